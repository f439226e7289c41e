//! Answers of Anthropic's `/v1/messages`: a list of blocks, each begun, filled and ended by events.

use super::answer_blocks::{BlockKind, BlockStep, Blocks};
use super::answer_header::AnswerHeader;
use super::answer_parts::{AnswerCounts, ChoiceAnswer};
use super::answer_writer::{AnswerWriter, PlacedToken, add_text, event};
use crate::batching::{EndReason, Usage};
use crate::http::api::Api;
use crate::http::api_error::ApiError;
use crate::tool_calls::AnswerPart;
use serde_json::{Value, json};

/// Writes answers of Anthropic's messages.
pub struct AnthropicAnswer {
    header: AnswerHeader,
    /// Blocks that were begun.
    content: Vec<Value>,
    blocks: Blocks,
}

impl AnthropicAnswer {
    /// Makes the writer of an answer.
    pub fn new(header: AnswerHeader) -> AnthropicAnswer {
        AnthropicAnswer { header, content: Vec::new(), blocks: Blocks::default() }
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

    fn message(&self, answer: &ChoiceAnswer, counts: AnswerCounts) -> Value {
        let mut message = json!({
            "id": self.header.id, "type": "message", "role": "assistant", "model": self.header.model,
            "content": self.content, "usage": self.usage(counts),
        });
        if let (Value::Object(message), Value::Object(stop)) = (&mut message, self.stop(answer)) {
            message.extend(stop);
        }
        message
    }

    /// Returns the counts as Anthropic's API has them: all tokens of the prompt are the sum of the first three.
    fn usage(&self, counts: AnswerCounts) -> Value {
        let Usage { reused, generated, .. } = counts.usage;
        json!({
            "input_tokens": self.header.prompt - reused, "cache_creation_input_tokens": 0,
            "cache_read_input_tokens": reused, "output_tokens": generated,
        })
    }

    /// Writes an event about the newest block.
    fn block_event(&self, kind: &str, key: &str, value: Value) -> String {
        event(&json!({"type": kind, "index": self.content.len() - 1, key: value}))
    }

    fn begin(&mut self, block: Value) -> String {
        self.content.push(block.clone());
        self.block_event("content_block_start", "content_block", block)
    }

    fn delta(&self, kind: &str, key: &str, text: &str) -> String {
        self.block_event("content_block_delta", "delta", json!({"type": kind, key: text}))
    }

    fn end_event(&self) -> String {
        event(&json!({"type": "content_block_stop", "index": self.content.len() - 1}))
    }

    /// Takes a step of the blocks; returns its events.
    fn step(&mut self, step: BlockStep<'_>) -> Vec<String> {
        match step {
            BlockStep::Begin(BlockKind::Text) => vec![self.begin(json!({"type": "text", "text": ""}))],
            BlockStep::Begin(BlockKind::Thought) => {
                vec![self.begin(json!({"type": "thinking", "thinking": "", "signature": ""}))]
            }
            BlockStep::Add(text) => {
                let Some(block) = self.content.last_mut() else { return Vec::new() };
                let (key, kind) = match block.get("thinking") {
                    Some(_) => ("thinking", "thinking_delta"),
                    None => ("text", "text_delta"),
                };
                add_text(&mut block[key], &text);
                vec![self.delta(kind, key, &text)]
            }
            BlockStep::End(BlockKind::Text) => vec![self.end_event()],
            BlockStep::End(BlockKind::Thought) => {
                vec![self.delta("signature_delta", "signature", ""), self.end_event()]
            }
            BlockStep::Call(call) => {
                let n = self.content.len();
                let id = self.header.id_of("toolu", n);
                let begin = self.begin(json!({"type": "tool_use", "id": id, "name": call.name, "input": {}}));
                self.content[n]["input"] =
                    serde_json::from_str(&call.arguments).unwrap_or_else(|_| json!({}));
                vec![begin, self.delta("input_json_delta", "partial_json", &call.arguments), self.end_event()]
            }
        }
    }
}

impl AnswerWriter for AnthropicAnswer {
    fn header(&self) -> &AnswerHeader {
        &self.header
    }

    fn whole(&mut self, all: &[ChoiceAnswer], counts: AnswerCounts) -> Value {
        let Some(answer) = all.first() else { return Value::Null };
        answer.parts.iter().for_each(|part| drop(self.part(0, answer, part, None)));
        self.message(answer, counts)
    }

    fn begin(&mut self, _n: usize) -> Vec<String> {
        let message = self.message(&ChoiceAnswer::default(), AnswerCounts::default());
        vec![event(&json!({"type": "message_start", "message": message}))]
    }

    fn part(
        &mut self,
        _index: usize,
        _answer: &ChoiceAnswer,
        part: &AnswerPart,
        _token: Option<PlacedToken<'_>>,
    ) -> Vec<String> {
        let steps = self.blocks.add(part).into_iter();
        steps.flat_map(|step| self.step(step)).collect()
    }

    fn end(&mut self, _index: usize, _answer: &ChoiceAnswer) -> Vec<String> {
        self.blocks.end().map(|step| self.step(step)).unwrap_or_default()
    }

    fn close(&mut self, answer: &ChoiceAnswer, counts: AnswerCounts, _wants_usage: bool) -> Vec<String> {
        let delta = self.stop(answer);
        let usage = self.usage(counts);
        vec![
            event(&json!({"type": "message_delta", "delta": delta, "usage": usage})),
            event(&json!({"type": "message_stop"})),
        ]
    }

    fn fail(&mut self, error: &ApiError) -> Vec<String> {
        vec![event(&error.to_json(Api::Messages))]
    }
}
