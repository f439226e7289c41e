//! Answers of Anthropic's `/v1/messages`: a list of blocks, each begun, filled and ended by events.

use super::answer_header::AnswerHeader;
use super::answer_parts::{AnswerCounts, ChoiceAnswer, ReplyPart};
use super::answer_writer::{AnswerWriter, PlacedToken, event};
use crate::batching::EndReason;
use crate::http::api::Api;
use crate::http::api_error::ApiError;
use serde_json::{Value, json};

/// Block that is being written.
#[derive(Clone, Copy, PartialEq, Eq)]
enum OpenBlock {
    Text,
    Thought,
}

/// Writes answers of Anthropic's messages.
pub struct AnthropicAnswer {
    header: AnswerHeader,
    /// Number of blocks that were begun.
    blocks: usize,
    open: Option<OpenBlock>,
    /// Blanks that belong to a text if one follows.
    blanks: String,
}

impl AnthropicAnswer {
    /// Makes the writer of an answer.
    pub fn new(header: AnswerHeader) -> AnthropicAnswer {
        AnthropicAnswer { header, blocks: 0, open: None, blanks: String::new() }
    }

    /// Returns the reason why an answer ended, and its stop sequence.
    fn stop(&self, answer: &ChoiceAnswer) -> Value {
        let own = answer.stop.as_ref().filter(|stop| self.header.stops.contains(stop));
        let reason = match answer.reason {
            None => None,
            Some(EndReason::Length) => Some("max_tokens"),
            Some(_) if answer.calls().next().is_some() => Some("tool_use"),
            Some(_) if own.is_some() => Some("stop_sequence"),
            Some(_) => Some("end_turn"),
        };
        json!({"stop_reason": reason, "stop_sequence": own})
    }

    fn message(&self, content: Value, answer: &ChoiceAnswer, output: usize) -> Value {
        let mut message = json!({
            "id": self.header.id, "type": "message", "role": "assistant", "model": self.header.model, "content": content,
            "usage": self.usage(output),
        });
        if let (Value::Object(message), Value::Object(stop)) = (&mut message, self.stop(answer)) {
            message.extend(stop);
        }
        message
    }

    fn usage(&self, output: usize) -> Value {
        json!({
            "input_tokens": self.header.prompt, "cache_creation_input_tokens": 0, "cache_read_input_tokens": 0,
            "output_tokens": output,
        })
    }

    fn tool_use(&self, n: usize, name: &str, input: Value) -> Value {
        json!({"type": "tool_use", "id": self.header.id_of("toolu", n), "name": name, "input": input})
    }

    fn begin_block(&mut self, block: &Value, events: &mut Vec<String>) {
        events.push(event(
            &json!({"type": "content_block_start", "index": self.blocks, "content_block": block}),
        ));
        self.blocks += 1;
    }

    fn delta(&self, delta: &Value) -> String {
        event(&json!({"type": "content_block_delta", "index": self.blocks - 1, "delta": delta}))
    }

    fn end_block(&mut self, events: &mut Vec<String>) {
        if self.open.take() == Some(OpenBlock::Thought) {
            events.push(self.delta(&json!({"type": "signature_delta", "signature": ""})));
        }
        events.push(event(&json!({"type": "content_block_stop", "index": self.blocks - 1})));
    }
}

impl AnswerWriter for AnthropicAnswer {
    fn header(&self) -> &AnswerHeader {
        &self.header
    }

    fn whole(&mut self, all: &[ChoiceAnswer], counts: AnswerCounts) -> Value {
        let Some(answer) = all.first() else { return Value::Null };
        let mut blocks = Vec::new();
        for part in &answer.parts {
            blocks.push(match part {
                ReplyPart::Text(text) if text.trim().is_empty() => continue,
                ReplyPart::Text(text) => json!({"type": "text", "text": text}),
                ReplyPart::Thought(text) => {
                    json!({"type": "thinking", "thinking": text.trim_start(), "signature": ""})
                }
                ReplyPart::Call(call) => {
                    let input = serde_json::from_str(&call.arguments).unwrap_or_else(|_| json!({}));
                    self.tool_use(blocks.len(), &call.name, input)
                }
            });
        }
        self.message(blocks.into(), answer, counts.usage.generated)
    }

    fn begin(&mut self, _n: usize) -> Vec<String> {
        vec![event(
            &json!({"type": "message_start", "message": self.message(json!([]), &ChoiceAnswer::default(), 0)}),
        )]
    }

    fn part(
        &mut self,
        _index: usize,
        _answer: &ChoiceAnswer,
        part: &ReplyPart,
        _token: Option<PlacedToken<'_>>,
    ) -> Vec<String> {
        let mut events = Vec::new();
        let (kind, text) = match part {
            ReplyPart::Text(text) => (OpenBlock::Text, text),
            ReplyPart::Thought(text) => (OpenBlock::Thought, text),
            ReplyPart::Call(call) => {
                if self.open.is_some() {
                    self.end_block(&mut events);
                }
                self.blanks.clear();
                let block = self.tool_use(self.blocks, &call.name, json!({}));
                self.begin_block(&block, &mut events);
                events.push(self.delta(&json!({"type": "input_json_delta", "partial_json": call.arguments})));
                self.end_block(&mut events);
                return events;
            }
        };
        let is_begun = self.open != Some(kind);
        if is_begun {
            if text.trim().is_empty() {
                self.blanks.push_str(text);
                return events;
            }
            if self.open.is_some() {
                self.end_block(&mut events);
            }
            let block = match kind {
                OpenBlock::Text => json!({"type": "text", "text": ""}),
                OpenBlock::Thought => json!({"type": "thinking", "thinking": "", "signature": ""}),
            };
            self.begin_block(&block, &mut events);
            self.open = Some(kind);
        }
        let mut text = std::mem::take(&mut self.blanks) + text;
        if is_begun && kind == OpenBlock::Thought {
            // A line end that parts it from earlier thoughts.
            text.drain(..text.len() - text.trim_start().len());
        }
        events.push(self.delta(&match kind {
            OpenBlock::Text => json!({"type": "text_delta", "text": text}),
            OpenBlock::Thought => json!({"type": "thinking_delta", "thinking": text}),
        }));
        events
    }

    fn end(&mut self, _index: usize, _answer: &ChoiceAnswer) -> Vec<String> {
        let mut events = Vec::new();
        if self.open.is_some() {
            self.end_block(&mut events);
        }
        events
    }

    fn close(&mut self, answer: &ChoiceAnswer, counts: AnswerCounts, _wants_usage: bool) -> Vec<String> {
        let delta = self.stop(answer);
        let usage = self.usage(counts.usage.generated);
        vec![
            event(&json!({"type": "message_delta", "delta": delta, "usage": usage})),
            event(&json!({"type": "message_stop"})),
        ]
    }

    fn fail(&mut self, error: &ApiError) -> Vec<String> {
        vec![event(&error.to_json(Api::Messages))]
    }
}
