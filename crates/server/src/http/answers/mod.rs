//! Documents of answers, whole and streamed, in the form of each API.

mod answer_blocks;
mod answer_header;
mod answer_parts;
mod answer_writer;
mod anthropic_answer;
mod chat_answer;
mod responses_answer;

pub use answer_header::{AnswerHeader, TextPlace};
pub use answer_parts::{AnswerCounts, ChoiceAnswer};
pub use answer_writer::{AnswerWriter, PlacedToken};

use super::api::Api;

#[cfg(test)]
pub use answer_header::tests;

/// Returns the writer of an answer in the form of its API.
pub fn writer(header: AnswerHeader) -> Box<dyn AnswerWriter> {
    match header.api {
        Api::Chat | Api::Completion => Box::new(chat_answer::ChatAnswer(header)),
        Api::Responses => Box::new(responses_answer::ResponsesAnswer::new(header)),
        Api::Messages => Box::new(anthropic_answer::AnthropicAnswer::new(header)),
    }
}
