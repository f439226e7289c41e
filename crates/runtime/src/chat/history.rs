//! Messages so far, cut to what the context holds.

use super::{ChatTemplate, PromptText, message};
use crate::tokenizer::Tokenizer;
use crate::{Error, Result};
use serde_json::Value;

/// Behaviour when the context is full.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Overflow {
    /// Removes the oldest questions and answers; the system prompt stays.
    Slide,
    /// Refuses the question.
    Stop,
}

/// A conversation: its messages, and the text and tokens of the last turn.
#[derive(Clone, Debug, Default, PartialEq)]
pub struct History {
    /// Messages, oldest first; a system prompt is the first of them.
    pub messages: Vec<Value>,
    /// Prompt and answer of the last turn.
    pub known: PromptText,
}

/// The prompt of a turn.
#[derive(Debug, PartialEq, Eq)]
pub struct Turn {
    /// Text and tokens of the prompt.
    pub prompt: PromptText,
    /// Messages that were left out to make room.
    pub dropped: usize,
}

impl History {
    /// Makes a conversation that begins with a system prompt if there is one.
    pub fn new(system: Option<&str>) -> History {
        History {
            messages: system.map(|text| message("system", text)).into_iter().collect(),
            ..Default::default()
        }
    }

    /// Adds a question and returns the prompt for its answer, at most `room` tokens. If the prompt is longer, `overflow` says
    /// whether the oldest messages behind the system prompt are removed or the question is refused.
    ///
    /// # Errors
    /// There is no room for the question, or the template refuses it. The conversation does not hold the question then.
    pub fn ask(
        &mut self,
        question: &str,
        template: &ChatTemplate,
        tokenizer: &Tokenizer,
        room: usize,
        overflow: Overflow,
    ) -> Result<Turn> {
        let mut messages = self.messages.clone();
        messages.push(message("user", question));
        let system = usize::from(messages[0]["role"] == "system");
        let mut dropped = 0;
        loop {
            let text = template.render(&messages, None, true)?;
            let ids = self.known.encode(tokenizer, &text)?;
            // Once messages go, a quarter of the room becomes free: the next turns then continue this turn's tokens.
            let is_last = messages.len() <= system + 1;
            if ids.len() <= if dropped == 0 || is_last { room } else { room - room / 4 } {
                self.messages = messages;
                return Ok(Turn { prompt: PromptText { text, ids }, dropped });
            }
            if overflow == Overflow::Stop || is_last {
                let what = match (overflow, system) {
                    (Overflow::Stop, _) => "the context is full",
                    (Overflow::Slide, 0) => "the question is too long for the context",
                    (Overflow::Slide, _) => "the system prompt and the question are too long for the context",
                };
                return Err(Error::input(format!(
                    "{what}: {} tokens, where {room} leave room for an answer",
                    ids.len()
                )));
            }
            // Remove up to the next question, so that roles still alternate.
            let next = messages[system + 1..].iter().position(|m| m["role"] == "user").unwrap_or(0);
            messages.drain(system..=system + next);
            dropped += next + 1;
        }
    }

    /// Adds the answer to the prompt of the last question. `ids` are the answer's tokens, if they are exactly
    /// the tokens of `text`.
    pub fn answer(&mut self, prompt: PromptText, text: &str, ids: Option<&[u32]>) {
        self.messages.push(message("assistant", text));
        self.known = prompt;
        if let Some(ids) = ids {
            self.known.text += text;
            self.known.ids.extend_from_slice(ids);
        }
    }

    /// Takes back the last question, whose answer failed.
    pub fn take_back(&mut self) {
        self.messages.pop();
    }

    /// Forgets all but the system prompt.
    pub fn reset(&mut self) {
        self.messages.retain(|m| m["role"] == "system");
        self.known = PromptText::default();
    }

    /// Writes the history as JSON.
    pub fn to_json(&self) -> Value {
        serde_json::json!({"messages": self.messages, "text": self.known.text, "ids": self.known.ids})
    }

    /// Reads the JSON of [`History::to_json`].
    ///
    /// # Errors
    /// A key is missing or of another type.
    pub fn from_json(value: &Value) -> std::result::Result<History, String> {
        let messages = value["messages"].as_array().ok_or("`messages` is no list")?.clone();
        let is_message = |m: &Value| m["role"].is_string() && m["content"].is_string();
        if !messages.iter().all(is_message) {
            return Err("a message has no role or no content".into());
        }
        let text = value["text"].as_str().ok_or("`text` is no text")?.to_string();
        let ids = value["ids"].as_array().ok_or("`ids` is no list")?;
        let ids: Option<Vec<u32>> = ids.iter().map(|id| u32::try_from(id.as_u64()?).ok()).collect();
        Ok(History { messages, known: PromptText { text, ids: ids.ok_or("`ids` holds no ids")? } })
    }
}
