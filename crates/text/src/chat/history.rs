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
        // The message after the system prompt: the oldest, or a question, so that roles still alternate.
        let is_first = |i: &usize| *i == system || messages[*i]["role"] == "user";
        let firsts: Vec<usize> = (system..messages.len()).filter(is_first).collect();
        let last = firsts.len() - 1;
        let prompt_from = |at: usize| -> Result<PromptText> {
            let kept = [&messages[..system], &messages[firsts[at]..]].concat();
            let text = template.render(&kept, None, true)?;
            let ids = self.known.encode(tokenizer, &text)?;
            Ok(PromptText { text, ids })
        };
        let too_long = |what: &str, ids: &[u32]| {
            Error::input(format!("{what}: {} tokens, where {room} leave room for an answer", ids.len()))
        };
        let mut prompt = prompt_from(0)?;
        let mut first = 0;
        if prompt.ids.len() > room {
            if overflow == Overflow::Stop {
                return Err(too_long("the context is full", &prompt.ids));
            }
            prompt = if last == 0 { prompt } else { prompt_from(last)? };
            if prompt.ids.len() > room {
                let what = match system {
                    0 => "the question is too long for the context",
                    _ => "the system prompt and the question are too long for the context",
                };
                return Err(too_long(what, &prompt.ids));
            }
            // Once messages go, a quarter of the room becomes free: the next turns then continue this turn's tokens.
            let free = room - room / 4;
            // `first` fits, `over` does not. From the newest question back in growing steps, then by halves.
            first = last;
            let (mut over, mut step) = (0, 1);
            while first - over > 1 {
                let at =
                    if step == 0 { first.midpoint(over) } else { first.saturating_sub(step).max(over + 1) };
                let longer = prompt_from(at)?;
                if longer.ids.len() <= free {
                    (first, prompt, step) = (at, longer, 2 * step);
                } else {
                    (over, step) = (at, 0);
                }
            }
        }
        let dropped = firsts[first] - system;
        messages.drain(system..system + dropped);
        self.messages = messages;
        Ok(Turn { prompt, dropped })
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

#[cfg(test)]
mod tests {
    use super::*;
    use std::path::Path;
    use std::time::{Duration, Instant};

    /// Makes a history of this many questions and answers, of one to four words each.
    fn history(turns: usize, system: bool) -> History {
        let mut history = History::new(system.then_some("be brief"));
        for i in 0..turns {
            history.messages.push(message("user", &"word ".repeat(1 + i % 4)));
            history.messages.push(message("assistant", "yes"));
        }
        history
    }

    #[test]
    fn the_fewest_messages_are_forgotten_in_few_renderings() {
        let model = Path::new(env!("CARGO_MANIFEST_DIR")).join("../../models/small-gemma4");
        let tokenizer = Tokenizer::open(&model.join("tokenizer.json")).unwrap();
        let template = ChatTemplate::open(&model, None).unwrap();
        for system in [false, true] {
            for room in (40..600).step_by(61) {
                let mut asked = history(20, system);
                let turn = asked.ask("why?", &template, &tokenizer, room, Overflow::Slide).unwrap();
                let fits = |dropped: usize| {
                    let mut kept = history(20, system).messages;
                    kept.push(message("user", "why?"));
                    kept.drain(usize::from(system)..usize::from(system) + dropped);
                    let text = template.render(&kept, None, true).unwrap();
                    let ids = tokenizer.encode_written(&text).unwrap().len();
                    ids <= if dropped == 0 || kept.len() <= 1 + usize::from(system) {
                        room
                    } else {
                        room - room / 4
                    }
                };
                let fewest = (0..=40).step_by(2).find(|dropped| fits(*dropped)).unwrap();
                assert_eq!(turn.dropped, fewest, "{room}");
                assert_eq!(asked.messages.len(), 41 + usize::from(system) - fewest);
            }
        }
        let mut asked = history(2, false);
        let refused = asked.ask("why?", &template, &tokenizer, 3, Overflow::Slide).unwrap_err().to_string();
        assert!(refused.contains("the question is too long") && asked == history(2, false), "{refused}");
        // With a rendering for each turn that is forgotten, this would take minutes.
        let started = Instant::now();
        let turn = history(3000, true).ask("why?", &template, &tokenizer, 500, Overflow::Slide).unwrap();
        assert!(
            turn.dropped > 5000 && started.elapsed() < Duration::from_secs(20),
            "{:?}",
            started.elapsed()
        );
    }
}
