//! Writer of an answer.

use super::answer_header::{AnswerHeader, TextPlace};
use super::answer_parts::{AnswerCounts, ChoiceAnswer};
use crate::batching::ChosenToken;
use crate::http::api_error::ApiError;
use crate::tool_calls::AnswerPart;
use serde_json::Value;

/// A token with its place among the tokens of its answer.
#[derive(Clone, Copy)]
pub struct PlacedToken<'a> {
    /// The token.
    pub choice: &'a ChosenToken,
    /// Its place, behind the tokens before it.
    pub place: &'a TextPlace,
}

/// Writes an answer in the form of an API: as one document, or as server-sent events.
pub trait AnswerWriter: Send {
    /// Returns the fields that all documents share.
    fn header(&self) -> &AnswerHeader;

    /// Returns the document of whole answers.
    fn whole(&mut self, all: &[ChoiceAnswer], counts: AnswerCounts) -> Value;

    /// Returns the first events of `n` choices.
    fn begin(&mut self, n: usize) -> Vec<String>;

    /// Returns the events of a part of choice `index`, whose `answer` holds the part already. `token` is the token that
    /// completed it, where its probability is wanted; a token without text comes with an empty text.
    fn part(
        &mut self,
        index: usize,
        answer: &ChoiceAnswer,
        part: &AnswerPart,
        token: Option<PlacedToken<'_>>,
    ) -> Vec<String>;

    /// Returns the last events of choice `index`.
    fn end(&mut self, index: usize, answer: &ChoiceAnswer) -> Vec<String>;

    /// Returns the last events of the request; `wants_usage` asks for token counts where they are not always sent.
    fn close(&mut self, answer: &ChoiceAnswer, counts: AnswerCounts, wants_usage: bool) -> Vec<String>;

    /// Returns the events of an error that ends the stream.
    fn fail(&mut self, error: &ApiError) -> Vec<String>;
}

/// Adds text to a text of a document.
pub fn add_text(to: &mut Value, text: &str) {
    if let Value::String(all) = to {
        all.push_str(text);
    }
}

/// Writes a server-sent event without a name.
pub fn data(value: &Value) -> String {
    format!("data: {value}\n\n")
}

/// Writes a server-sent event that is named as its `type` says.
pub fn event(value: &Value) -> String {
    format!("event: {}\ndata: {value}\n\n", value["type"].as_str().unwrap_or_default())
}
