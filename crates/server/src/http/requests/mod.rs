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
mod lone_surrogates;
mod responses_body;
mod template_messages;

pub use chat_body::{Body, OfferedTools, Params, Prompts, ShownThoughts};
pub use template_messages::template_messages;

use super::api::Api;
use super::api_error::ApiError;
use lone_surrogates::without_lone_surrogates;
use serde::{Deserialize, Deserializer};
use serde_json::Value;

/// Parses the body of a request.
///
/// # Errors
/// The body is not JSON, a field has the wrong type, or it would change the answer and is not supported.
pub fn parse(api: Api, bytes: &[u8]) -> Result<Body, ApiError> {
    let mut value: Value = anemoe_io::json::parse(&without_lone_surrogates(bytes))
        .map_err(|e| ApiError::invalid(format!("the body is not valid JSON: {e}")))?;
    let Some(all) = value.as_object_mut() else {
        return Err(ApiError::invalid("the body is not a JSON object"));
    };
    // JSON has one kind of numbers: 150.0 is whole. A number that no integer holds is more than any count.
    for (key, value) in all {
        let whole = match (value.as_u64(), value.as_f64()) {
            // Seeds have 64 bits.
            (Some(n), _) if key == "seed" => Some(n as i64),
            (Some(n), _) => i64::try_from(n).is_err().then_some(i64::MAX),
            (None, Some(n)) if value.is_f64() && n.fract() == 0.0 => Some(n as i64),
            _ => None,
        };
        whole.into_iter().for_each(|n| *value = n.into());
    }
    fields::refuse(api, &value)?;
    let sampling = typed(&value)?;
    let body = match api {
        Api::Chat | Api::Completion => typed(value),
        Api::Responses => responses_body::body(typed(value)?),
        Api::Messages => anthropic_body::body(typed(value)?),
    };
    let mut body = Body { sampling, ..body? };
    body.settle_tools();
    Ok(body)
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

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn half_a_character_does_not_break_a_request() {
        let body = parse(Api::Completion, br#"{"prompt": "a\ud83d"}"#).unwrap();
        assert!(matches!(body.prompt, Some(Prompts::Text(text)) if text == "a\u{fffd}"));
    }
}
