//! Bodies of requests: each API's own becomes one [`Body`], whose fields are those of OpenAI's chats.
//!
//! ```text
//! /v1/chat/completions, /v1/completions ──┐
//! /v1/responses ── responses_body ────────┼──> Body ──> messages for the template, tools, Params
//! /v1/messages ─── anthropic_body ────────┘
//! ```
//! [`fields`] says of every field of the four APIs, and of other servers, what becomes of it.

mod anthropic_body;
mod chat_body;
mod fields;
mod responses_body;
mod template_messages;

pub use chat_body::{Body, OfferedTools, Params, Prompts, ShownThoughts};
pub use template_messages::template_messages;

use super::api_error::ApiError;
use serde::{Deserialize, Deserializer};
use serde_json::Value;

/// API that a request speaks, by its path.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Api {
    /// `/v1/chat/completions`.
    Chat,
    /// `/v1/completions`.
    Completion,
    /// `/v1/responses`.
    Responses,
    /// `/v1/messages`, Anthropic's.
    Messages,
}

impl Api {
    /// Returns the name that this API has for a field of [`Body`].
    pub fn field(self, name: &str) -> &str {
        match (self, name.split('.').next().unwrap_or(name)) {
            (Api::Completion, "messages") => "prompt",
            (Api::Responses, "messages") => "input",
            (Api::Responses, "max_tokens" | "max_completion_tokens") => "max_output_tokens",
            (Api::Responses, "response_format") => "text.format",
            (Api::Responses, "reasoning_effort") => "reasoning.effort",
            (Api::Messages, "max_completion_tokens") => "max_tokens",
            (Api::Messages, "stop") => "stop_sequences",
            (Api::Messages, "response_format") => "output_config.format",
            _ => name,
        }
    }

    /// Parses the body of a request.
    ///
    /// # Errors
    /// The body is not JSON, a field has the wrong type, or it would change the answer and is not supported.
    pub fn parse(self, bytes: &[u8]) -> Result<Body, ApiError> {
        let value: Value = anemoe_io::json::parse(bytes)
            .map_err(|e| ApiError::invalid(format!("the body is not valid JSON: {e}")))?;
        if !value.is_object() {
            return Err(ApiError::invalid("the body is not a JSON object"));
        }
        fields::refuse(self, &value)?;
        let sampling = typed(&value)?;
        let body = match self {
            Api::Chat | Api::Completion => typed(value),
            Api::Responses => responses_body::body(typed(value)?),
            Api::Messages => anthropic_body::body(typed(value)?),
        };
        Ok(Body { sampling, ..body? })
    }
}

/// Reads a value into a type; the error names the field at fault.
fn typed<'de, T: Deserialize<'de>>(
    value: impl Deserializer<'de, Error = serde_json::Error>,
) -> Result<T, ApiError> {
    serde_path_to_error::deserialize(value).map_err(|e| {
        let key = e.path().to_string();
        ApiError::param(key, format!("of another type: {}", in_words(&e.inner().to_string())))
    })
}

/// Translates a message about a type from Rust's words to JSON's.
fn in_words(message: &str) -> String {
    let words = [
        ("expected f64", "expected a number"),
        ("expected f32", "expected a number"),
        ("expected i64", "expected a whole number"),
        ("expected u64", "expected a whole number from 0 on"),
        ("expected usize", "expected a whole number from 0 on"),
        ("expected u32", "expected a whole number from 0 on"),
        ("floating point", "number"),
        ("invalid type: ", ""),
        ("expected a sequence", "expected a list"),
        ("expected a map", "expected an object"),
    ];
    words.iter().fold(message.to_string(), |text, (from, to)| text.replace(from, to))
}
