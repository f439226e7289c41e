//! Turns events of the batcher into a whole answer, or into server-sent events.

use super::answer::{AnswerHeader, Complete};
use super::api_error::ApiError;
use crate::batching::{AnswerEvent, ChosenToken, EndReason, JobFailure, Sink, Usage};
use crate::tool_calls::{AnswerPart, CallParser};
use axum::http::StatusCode;
use futures_core::Stream;
use serde_json::Value;
use std::collections::VecDeque;
use std::convert::Infallible;
use std::pin::Pin;
use std::task::{Context, Poll};
use tokio::sync::mpsc::{UnboundedReceiver, UnboundedSender};

/// Sends the events of one choice to its request. The answer's tokens bound the number of waiting events.
pub struct ChannelSink {
    /// Index of the choice.
    pub index: usize,
    /// Channel of the request.
    pub sender: UnboundedSender<(usize, AnswerEvent)>,
}

impl Sink for ChannelSink {
    fn send(&mut self, event: AnswerEvent) -> bool {
        self.sender.send((self.index, event)).is_ok()
    }

    fn is_gone(&self) -> bool {
        self.sender.is_closed()
    }
}

/// Adds up the token counts of choices; the prompt of several choices counts once.
#[derive(Default)]
struct UsageCounts {
    usage: Usage,
}

impl UsageCounts {
    fn add(&mut self, usage: Usage, is_first_of_prompt: bool) {
        if is_first_of_prompt {
            self.usage.prompt += usage.prompt;
            self.usage.reused += usage.reused;
        }
        self.usage.generated += usage.generated;
    }
}

/// Makes the error that a client receives when an answer fails.
fn failure(failure: &JobFailure) -> ApiError {
    let status = StatusCode::SERVICE_UNAVAILABLE;
    match failure {
        JobFailure::Timeout => {
            ApiError::new(status, "the answer took longer than this server allows").with_code("timeout")
        }
        JobFailure::Closing => ApiError::new(status, "the server is closing").with_code("closing"),
        JobFailure::Grammar(what) => {
            ApiError::invalid(format!("the answer cannot be held to its grammar: {what}"))
        }
        JobFailure::Broken(what) => ApiError::new(StatusCode::INTERNAL_SERVER_ERROR, what.clone()),
    }
}

/// Makes the error of a batcher that ended without an answer.
fn lost() -> ApiError {
    ApiError::new(StatusCode::INTERNAL_SERVER_ERROR, "the answer was lost")
}

/// Splits a choice's text into parts; without a parser, all of it is text.
#[derive(Clone, Default)]
struct ChoiceText {
    parser: Option<CallParser>,
    /// Number of calls so far.
    calls: usize,
}

impl ChoiceText {
    fn parts(&mut self, text: &str, end: Option<EndReason>) -> Vec<AnswerPart> {
        let Some(parser) = &mut self.parser else {
            return (!text.is_empty()).then(|| AnswerPart::Text(text.into())).into_iter().collect();
        };
        let mut parts = parser.push(text);
        if let Some(reason) = end {
            parts.extend(parser.finish(reason == EndReason::Length));
        }
        parts
    }
}

/// Waits for the complete answer of `n` choices, `per_prompt` for each prompt. `calls` parses tool calls.
///
/// # Errors
/// A choice failed.
pub async fn collect(
    header: &AnswerHeader,
    mut events: UnboundedReceiver<(usize, AnswerEvent)>,
    n: usize,
    per_prompt: usize,
    calls: Option<CallParser>,
) -> Result<Value, ApiError> {
    let mut texts = vec![ChoiceText { parser: calls, calls: 0 }; n];
    let mut all: Vec<Complete> = (0..n).map(|_| Complete::default()).collect();
    let mut counts = UsageCounts::default();
    let mut left = n;
    while left > 0 {
        let (index, event) = events.recv().await.ok_or_else(lost)?;
        match event {
            AnswerEvent::Token { text, choice } => {
                all[index].add(texts[index].parts(&text, None));
                if choice.logprob.is_some() {
                    all[index].choices.push(choice);
                }
            }
            AnswerEvent::Finished { text, reason, usage } => {
                all[index].add(texts[index].parts(&text, Some(reason)));
                all[index].reason = Some(reason);
                counts.add(usage, index.is_multiple_of(per_prompt));
                left -= 1;
            }
            AnswerEvent::Failed(what) => return Err(failure(&what)),
        }
    }
    Ok(header.complete(&all, counts.usage))
}

/// Server-sent events of `n` choices.
pub struct EventStream {
    header: AnswerHeader,
    events: UnboundedReceiver<(usize, AnswerEvent)>,
    per_prompt: usize,
    include_usage: bool,
    counts: UsageCounts,
    /// Characters of each choice's tokens so far.
    offsets: Vec<usize>,
    texts: Vec<ChoiceText>,
    /// Number of choices that have not ended.
    left: usize,
    /// Events that are ready to be sent.
    ready: VecDeque<String>,
    is_done: bool,
}

impl EventStream {
    /// Makes a stream of `n` choices, `per_prompt` for each prompt. `calls` parses tool calls.
    pub fn new(
        header: AnswerHeader,
        events: UnboundedReceiver<(usize, AnswerEvent)>,
        n: usize,
        per_prompt: usize,
        include_usage: bool,
        calls: Option<CallParser>,
    ) -> EventStream {
        let ready = (0..n).filter_map(|i| header.opening(i)).map(|v| data(&v)).collect();
        EventStream {
            header,
            events,
            per_prompt,
            include_usage,
            counts: UsageCounts::default(),
            offsets: vec![0; n],
            texts: vec![ChoiceText { parser: calls, calls: 0 }; n],
            left: n,
            ready,
            is_done: false,
        }
    }

    fn take(&mut self, index: usize, event: AnswerEvent) {
        match event {
            AnswerEvent::Token { text, choice } => {
                let parts = self.texts[index].parts(&text, None);
                self.send(index, parts, Some(&choice));
                if choice.logprob.is_some() {
                    self.offsets[index] += self.header.token(choice.id).chars().count();
                }
            }
            AnswerEvent::Finished { text, reason, usage } => self.finish(index, &text, reason, usage),
            AnswerEvent::Failed(what) => self.end_with(&failure(&what)),
        }
    }

    /// Queues parts of a choice's text. The token that completed them goes with the first text, or alone if there is none.
    fn send(&mut self, index: usize, parts: Vec<AnswerPart>, mut choice: Option<&ChosenToken>) {
        // A token without text is sent only if its probability is wanted.
        let is_wanted = choice.is_some_and(|c| c.logprob.is_some());
        if is_wanted && !parts.iter().any(|part| matches!(part, AnswerPart::Text(_))) {
            let piece = self.header.piece(index, "", choice.take(), self.offsets[index]);
            self.ready.push_back(data(&piece));
        }
        for part in parts {
            let piece = match part {
                AnswerPart::Text(text) => self.header.piece(index, &text, choice.take(), self.offsets[index]),
                AnswerPart::Call(call) => {
                    let n = self.texts[index].calls;
                    self.texts[index].calls += 1;
                    self.header.call_piece(index, n, &call)
                }
            };
            self.ready.push_back(data(&piece));
        }
    }

    fn finish(&mut self, index: usize, text: &str, reason: EndReason, usage: Usage) {
        let parts = self.texts[index].parts(text, Some(reason));
        self.send(index, parts, None);
        let has_calls = self.texts[index].calls > 0;
        self.ready.push_back(data(&self.header.ending(index, reason, has_calls)));
        self.counts.add(usage, index.is_multiple_of(self.per_prompt));
        self.left -= 1;
        if self.left == 0 {
            if self.include_usage {
                self.ready.push_back(data(&self.header.counts(self.counts.usage)));
            }
            self.end();
        }
    }

    fn end_with(&mut self, error: &ApiError) {
        self.ready.push_back(data(&error.to_json()));
        self.end();
    }

    fn end(&mut self) {
        self.ready.push_back("data: [DONE]\n\n".into());
        self.is_done = true;
        self.events.close();
    }
}

fn data(value: &Value) -> String {
    format!("data: {value}\n\n")
}

impl Stream for EventStream {
    type Item = Result<String, Infallible>;

    fn poll_next(mut self: Pin<&mut Self>, context: &mut Context<'_>) -> Poll<Option<Self::Item>> {
        loop {
            if let Some(piece) = self.ready.pop_front() {
                return Poll::Ready(Some(Ok(piece)));
            }
            if self.is_done {
                return Poll::Ready(None);
            }
            match self.events.poll_recv(context) {
                Poll::Ready(Some((index, event))) => self.take(index, event),
                Poll::Ready(None) => self.end_with(&lost()),
                Poll::Pending => return Poll::Pending,
            }
        }
    }
}
