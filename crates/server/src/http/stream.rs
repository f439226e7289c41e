//! Events of the engine as a whole answer, or as server-sent events.

use super::answer::{AnswerHeader, Complete};
use super::api_error::ApiError;
use crate::batching::{AnswerEvent, EndReason, JobFailure, Sink, Usage};
use axum::http::StatusCode;
use futures_core::Stream;
use serde_json::Value;
use std::collections::VecDeque;
use std::convert::Infallible;
use std::pin::Pin;
use std::task::{Context, Poll};
use tokio::sync::mpsc::{UnboundedReceiver, UnboundedSender};

/// Sends events of one choice to its request. What waits in the channel is bounded by the tokens of the answer.
pub struct ChannelSink {
    /// Number of the choice.
    pub index: usize,
    /// The request's channel.
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

/// Adds up the counts of choices; those of one prompt are counted once.
#[derive(Default)]
struct Counts {
    usage: Usage,
}

impl Counts {
    fn add(&mut self, usage: Usage, is_first_of_prompt: bool) {
        if is_first_of_prompt {
            self.usage.prompt += usage.prompt;
            self.usage.reused += usage.reused;
        }
        self.usage.generated += usage.generated;
    }
}

/// The error that a client sees when an answer fails.
fn failure(failure: &JobFailure) -> ApiError {
    let status = StatusCode::SERVICE_UNAVAILABLE;
    match failure {
        JobFailure::Timeout => {
            ApiError::new(status, "the answer took longer than this server allows").with_code("timeout")
        }
        JobFailure::Closing => ApiError::new(status, "the server is closing").with_code("closing"),
        JobFailure::Broken(what) => ApiError::new(StatusCode::INTERNAL_SERVER_ERROR, what.clone()),
    }
}

/// The engine ended without a word.
fn lost() -> ApiError {
    ApiError::new(StatusCode::INTERNAL_SERVER_ERROR, "the answer was lost")
}

/// Waits for the whole answer of `n` choices, `per_prompt` to each prompt.
///
/// # Errors
/// A choice failed.
pub async fn collect(
    header: &AnswerHeader,
    mut events: UnboundedReceiver<(usize, AnswerEvent)>,
    n: usize,
    per_prompt: usize,
) -> Result<Value, ApiError> {
    let mut all: Vec<Complete> = (0..n).map(|_| Complete::default()).collect();
    let mut counts = Counts::default();
    let mut left = n;
    while left > 0 {
        let (index, event) = events.recv().await.ok_or_else(lost)?;
        match event {
            AnswerEvent::Token { text, choice } => {
                all[index].text += &text;
                if choice.logprob.is_some() {
                    all[index].choices.push(choice);
                }
            }
            AnswerEvent::Finished { text, reason, usage } => {
                all[index].text += &text;
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
    counts: Counts,
    /// Characters of each choice's tokens so far.
    offsets: Vec<usize>,
    /// Choices that have not ended.
    left: usize,
    /// Pieces that are to be sent.
    ready: VecDeque<String>,
    is_done: bool,
}

impl EventStream {
    /// A stream of `n` choices, `per_prompt` to each prompt.
    pub fn new(
        header: AnswerHeader,
        events: UnboundedReceiver<(usize, AnswerEvent)>,
        n: usize,
        per_prompt: usize,
        include_usage: bool,
    ) -> EventStream {
        let ready = (0..n).filter_map(|i| header.opening(i)).map(|v| data(&v)).collect();
        EventStream {
            header,
            events,
            per_prompt,
            include_usage,
            counts: Counts::default(),
            offsets: vec![0; n],
            left: n,
            ready,
            is_done: false,
        }
    }

    fn take(&mut self, index: usize, event: AnswerEvent) {
        match event {
            AnswerEvent::Token { text, choice } => {
                // Tokens without text say nothing, unless their probabilities are wanted.
                if !text.is_empty() || choice.logprob.is_some() {
                    let piece = self.header.piece(index, &text, Some(&choice), self.offsets[index]);
                    self.ready.push_back(data(&piece));
                }
                if choice.logprob.is_some() {
                    self.offsets[index] += self.header.token(choice.id).chars().count();
                }
            }
            AnswerEvent::Finished { text, reason, usage } => self.finish(index, &text, reason, usage),
            AnswerEvent::Failed(what) => self.end_with(&failure(&what)),
        }
    }

    fn finish(&mut self, index: usize, text: &str, reason: EndReason, usage: Usage) {
        if !text.is_empty() {
            self.ready.push_back(data(&self.header.piece(index, text, None, 0)));
        }
        self.ready.push_back(data(&self.header.ending(index, reason)));
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
