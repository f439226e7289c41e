//! Turns events of the batcher into a whole answer, or into server-sent events.

use super::answers::{AnswerCounts, AnswerWriter, ChoiceAnswer, PlacedToken, TextPlace};
use super::api_error::ApiError;
use crate::batching::{AnswerEvent, ChosenToken, EndReason, JobFailure, Sink};
use crate::tool_calls::{AnswerPart, CallParser};
use anemoe_text::chat::{AnswerPiece, ThoughtSplitter};
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

/// Makes the error that a client receives when an answer fails.
fn failure(failure: &JobFailure) -> ApiError {
    match failure {
        JobFailure::Timeout => ApiError::timeout("the answer"),
        JobFailure::Closing => ApiError::closing(),
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

/// Splits the text of a choice into parts: thoughts first, then calls in what is left.
#[derive(Clone)]
pub struct PartSplitter {
    /// Splitter of thoughts; `None` where they stay in the text.
    pub thoughts: Option<ThoughtSplitter>,
    /// True if thoughts are part of the answer.
    pub shows_thoughts: bool,
    /// Parser of calls, if the request has tools.
    pub calls: Option<CallParser>,
}

impl PartSplitter {
    fn parts(&mut self, text: &str, end: Option<EndReason>) -> Vec<AnswerPart> {
        let mut pieces = match &mut self.thoughts {
            Some(splitter) => splitter.push(text),
            None => vec![AnswerPiece::Text(text.into())],
        };
        if let (Some(splitter), Some(_)) = (&mut self.thoughts, end) {
            pieces.extend(splitter.finish());
        }
        let mut parts = Vec::new();
        for piece in pieces {
            match piece {
                AnswerPiece::Thought(text) if self.shows_thoughts => parts.push(AnswerPart::Thought(text)),
                AnswerPiece::Thought(_) => {}
                AnswerPiece::Text(text) => match &mut self.calls {
                    Some(parser) => parts.extend(parser.push(&text)),
                    None => parts.push(AnswerPart::Text(text)),
                },
            }
        }
        if let (Some(parser), Some(reason)) = (&mut self.calls, end) {
            parts.extend(parser.finish(reason == EndReason::Length));
        }
        parts.retain(
            |part| !matches!(part, AnswerPart::Text(text) | AnswerPart::Thought(text) if text.is_empty()),
        );
        parts
    }

    fn is_thinking(&self) -> bool {
        self.thoughts.as_ref().is_some_and(ThoughtSplitter::is_thinking)
    }
}

/// Answers to a request while they arrive.
pub struct ComingAnswers {
    writer: Box<dyn AnswerWriter>,
    events: UnboundedReceiver<(usize, AnswerEvent)>,
    /// Splitter of each choice's text.
    splitters: Vec<PartSplitter>,
    answers: Vec<ChoiceAnswer>,
    /// Number of choices to each prompt.
    per_prompt: usize,
    counts: AnswerCounts,
    /// Number of choices that have not ended.
    left: usize,
}

/// Parts of a choice's answer that an event brought.
struct NewParts {
    index: usize,
    parts: Vec<AnswerPart>,
    token: Option<ChosenToken>,
    is_end: bool,
}

impl ComingAnswers {
    /// Makes the answers of one choice for each of `splitters`, `per_prompt` for each prompt.
    pub fn new(
        writer: Box<dyn AnswerWriter>,
        events: UnboundedReceiver<(usize, AnswerEvent)>,
        splitters: Vec<PartSplitter>,
        per_prompt: usize,
    ) -> ComingAnswers {
        let answers = splitters.iter().map(|_| ChoiceAnswer::default()).collect();
        let (left, counts) = (splitters.len(), AnswerCounts::default());
        ComingAnswers { writer, events, splitters, answers, per_prompt, counts, left }
    }

    /// Takes an event, and returns the parts that it brought.
    ///
    /// # Errors
    /// The choice failed.
    fn take(&mut self, index: usize, event: AnswerEvent) -> Result<NewParts, ApiError> {
        let splitter = &mut self.splitters[index];
        match event {
            AnswerEvent::Token { text, choice } => {
                let was_thinking = splitter.is_thinking();
                let parts = splitter.parts(&text, None);
                let is_thought = was_thinking || splitter.is_thinking();
                self.counts.thoughts += usize::from(is_thought);
                // Probabilities are those of the answer without thoughts.
                let token = Some(choice).filter(|choice| choice.logprob.is_some() && !is_thought);
                Ok(NewParts { index, parts, token, is_end: false })
            }
            AnswerEvent::Finished { text, reason, stop, usage } => {
                let parts = splitter.parts(&text, Some(reason));
                self.answers[index].reason = Some(reason);
                self.answers[index].stop = stop;
                self.counts.add(usage, index.is_multiple_of(self.per_prompt));
                self.left -= 1;
                Ok(NewParts { index, parts, token: None, is_end: true })
            }
            AnswerEvent::Failed(what) => Err(failure(&what)),
        }
    }

    /// Waits for the whole answers, and returns their document.
    ///
    /// # Errors
    /// A choice failed.
    pub async fn collect(mut self) -> Result<Value, ApiError> {
        while self.left > 0 {
            let (index, event) = self.events.recv().await.ok_or_else(lost)?;
            let new = self.take(index, event)?;
            let answer = &mut self.answers[index];
            new.parts.into_iter().for_each(|part| answer.add(part));
            answer.places.extend(new.token.iter().map(|_| answer.parts.len().saturating_sub(1)));
            answer.choices.extend(new.token);
        }
        Ok(self.writer.whole(&self.answers, self.counts))
    }

    /// Returns the server-sent events of the answers; `wants_usage` asks for token counts at their end.
    pub fn stream(mut self, wants_usage: bool) -> EventStream {
        let ready = self.writer.begin(self.answers.len()).into();
        let places = vec![TextPlace::default(); self.answers.len()];
        EventStream { coming: self, wants_usage, places, ready, is_done: false }
    }
}

/// Server-sent events of answers.
pub struct EventStream {
    coming: ComingAnswers,
    wants_usage: bool,
    /// Place of each choice behind its tokens so far.
    places: Vec<TextPlace>,
    /// Events that are ready to be sent.
    ready: VecDeque<String>,
    is_done: bool,
}

impl EventStream {
    fn take(&mut self, index: usize, event: AnswerEvent) {
        match self.coming.take(index, event) {
            Ok(new) => self.send(new),
            Err(e) => self.end_with(&e),
        }
    }

    /// Queues parts of a choice. Its token goes with the first text, or alone if there is none.
    fn send(&mut self, new: NewParts) {
        let NewParts { index, mut parts, token, is_end } = new;
        let is_text = |part: &AnswerPart| matches!(part, AnswerPart::Text(_) | AnswerPart::Thought(_));
        if token.is_some() && !parts.iter().any(is_text) {
            parts.insert(0, AnswerPart::Text(String::new()));
        }
        let place = &self.places[index];
        let mut placed = token.as_ref().map(|choice| PlacedToken { choice, place });
        for part in parts {
            let answer = &mut self.coming.answers[index];
            answer.add(part.clone());
            let token = if is_text(&part) { placed.take() } else { None };
            self.ready.extend(self.coming.writer.part(index, answer, &part, token));
        }
        if let Some(choice) = &token {
            self.coming.writer.header().pass(&mut self.places[index], choice.id);
        }
        if is_end {
            let answer = &self.coming.answers[index];
            self.ready.extend(self.coming.writer.end(index, answer));
            if self.coming.left == 0 {
                let last = self.coming.writer.close(answer, self.coming.counts, self.wants_usage);
                self.ready.extend(last);
                self.end();
            }
        }
    }

    fn end_with(&mut self, error: &ApiError) {
        self.ready.extend(self.coming.writer.fail(error));
        self.end();
    }

    fn end(&mut self) {
        self.is_done = true;
        self.coming.events.close();
    }
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
            match self.coming.events.poll_recv(context) {
                Poll::Ready(Some((index, event))) => self.take(index, event),
                Poll::Ready(None) => self.end_with(&lost()),
                Poll::Pending => return Poll::Pending,
            }
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::batching::Usage;
    use crate::http::answers::tests::header_of;
    use crate::http::answers::writer;
    use crate::http::api::Api;
    use serde_json::json;
    use tokio::sync::mpsc::unbounded_channel;

    /// Makes the answers whose tokens come with these texts.
    fn coming(api: Api, words: &[&[u8]], texts: &[&str]) -> (ComingAnswers, Vec<AnswerEvent>) {
        let (sender, events) = unbounded_channel();
        let mut all: Vec<AnswerEvent> = texts
            .iter()
            .enumerate()
            .map(|(i, text)| AnswerEvent::Token {
                text: text.to_string(),
                choice: ChosenToken { id: i as u32, logprob: Some(-1.0), top: Vec::new() },
            })
            .collect();
        let (reason, usage) = (EndReason::Stop, Usage::default());
        all.push(AnswerEvent::Finished { text: String::new(), reason, stop: None, usage });
        all.iter().for_each(|event| sender.send((0, event.clone())).unwrap());
        let splitter = PartSplitter { thoughts: None, shows_thoughts: true, calls: None };
        (ComingAnswers::new(writer(header_of(api, words)), events, vec![splitter], 1), all)
    }

    fn streamed(coming: ComingAnswers, all: Vec<AnswerEvent>) -> Vec<Value> {
        let mut stream = coming.stream(false);
        all.into_iter().for_each(|event| stream.take(0, event));
        let data = stream.ready.iter().filter_map(|event| event.split_once("data: "));
        data.filter_map(|(_, data)| serde_json::from_str(data.trim()).ok()).collect()
    }

    #[test]
    fn a_stream_has_the_probabilities_of_the_whole_answer() {
        let (words, texts): ([&[u8]; 5], _) =
            ([b"\n", b"\xc3", b"\xa9", b" ", b"b"], ["\n", "", "\u{e9}", " ", "b"]);
        let whole = coming(Api::Responses, &words, &texts).0.collect();
        let whole = tokio::runtime::Builder::new_current_thread().build().unwrap().block_on(whole).unwrap();
        let (answers, all) = coming(Api::Responses, &words, &texts);
        let events = streamed(answers, all);
        let of = |response: &Value| response["output"][0]["content"][0]["logprobs"].clone();
        let last = of(&events.last().unwrap()["response"]);
        assert_eq!((last.as_array().unwrap().len(), last), (5, of(&whole)));
        let deltas = events.iter().filter(|event| event["type"] == "response.output_text.delta");
        assert_eq!(deltas.map(|event| event["logprobs"].as_array().unwrap().len()).sum::<usize>(), 5);
        let (answers, all) = coming(Api::Completion, &words, &texts);
        let offsets = streamed(answers, all)
            .into_iter()
            .filter_map(|event| event.pointer("/choices/0/logprobs/text_offset").cloned());
        assert_eq!(offsets.collect::<Vec<_>>(), [0, 1, 1, 2, 3].map(|at| json!([at])));
    }
}
