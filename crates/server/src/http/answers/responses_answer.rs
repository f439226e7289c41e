//! Answers of `/v1/responses`: a list of items, each begun, filled and ended by events.

use super::answer_blocks::{BlockKind, BlockStep, Blocks};
use super::answer_header::AnswerHeader;
use super::answer_parts::{AnswerCounts, ChoiceAnswer};
use super::answer_writer::{AnswerWriter, PlacedToken, add_text, event};
use crate::batching::{ChosenToken, EndReason};
use crate::http::api_error::ApiError;
use crate::tool_calls::{AnswerPart, ToolCall};
use serde_json::{Value, json};

/// Writes answers of OpenAI's responses.
pub struct ResponsesAnswer {
    header: AnswerHeader,
    /// Number of events so far.
    events: usize,
    /// Items that were begun.
    items: Vec<Value>,
    blocks: Blocks,
    /// Probabilities of tokens whose text is held back.
    held: Vec<Value>,
}

impl ResponsesAnswer {
    /// Makes the writer of an answer.
    pub fn new(header: AnswerHeader) -> ResponsesAnswer {
        ResponsesAnswer { header, events: 0, items: Vec::new(), blocks: Blocks::default(), held: Vec::new() }
    }

    /// Returns the response as it stands, with the fields `more`.
    fn response(&self, status: &str, more: Value) -> Value {
        let mut all = json!({
            "id": self.header.id,
            "object": "response",
            "created_at": self.header.created,
            "status": status,
            "background": false,
            "error": null,
            "incomplete_details": null,
            "model": self.header.model,
            "output": self.items,
            "metadata": {},
            "previous_response_id": null,
            "store": false,
            "truncation": "disabled",
            "usage": null,
        });
        for (key, value) in self.header.repeated.iter().chain(more.as_object().into_iter().flatten()) {
            all[key] = value.clone();
        }
        for (key, default) in [("tool_choice", json!("auto")), ("tools", json!([]))] {
            if all[key].is_null() {
                all[key] = default;
            }
        }
        all
    }

    /// Writes an event; its number is added.
    fn event(&mut self, kind: &str, mut fields: Value) -> String {
        fields["type"] = kind.into();
        fields["sequence_number"] = self.events.into();
        self.events += 1;
        event(&fields)
    }

    fn last(&self) -> usize {
        self.items.len() - 1
    }

    /// Writes an event about the part of the open item.
    fn part_event(&mut self, kind: &str, fields: Value) -> String {
        let item = &self.items[self.last()];
        let mut all = json!({"item_id": item["id"], "output_index": self.last(), "content_index": 0});
        for (key, value) in fields.as_object().into_iter().flatten() {
            all[key] = value.clone();
        }
        self.event(kind, all)
    }

    /// Writes an event about the newest item.
    fn item_event(&mut self, kind: &str) -> String {
        let fields = json!({"output_index": self.last(), "item": self.items[self.last()]});
        self.event(kind, fields)
    }

    fn begin_item(&mut self, kind: BlockKind) -> Vec<String> {
        let n = self.items.len();
        let (item, part) = match kind {
            BlockKind::Text => (
                json!({"type": "message", "id": self.header.id_of("msg", n), "status": "in_progress", "role": "assistant",
                    "content": []}),
                json!({"type": "output_text", "text": "", "annotations": [], "logprobs": []}),
            ),
            BlockKind::Thought => (
                json!({"type": "reasoning", "id": self.header.id_of("rs", n), "status": "in_progress", "summary": [],
                    "content": []}),
                json!({"type": "reasoning_text", "text": ""}),
            ),
        };
        self.items.push(item);
        let added = self.item_event("response.output_item.added");
        self.items[n]["content"] = json!([part]);
        vec![added, self.part_event("response.content_part.added", json!({"part": part}))]
    }

    /// Adds text to the open item, and probabilities to a text.
    fn add(&mut self, text: &str) -> Vec<String> {
        let last = self.last();
        let part = &mut self.items[last]["content"][0];
        add_text(&mut part["text"], text);
        match part.get_mut("logprobs").and_then(Value::as_array_mut) {
            Some(all) => {
                let logprobs = std::mem::take(&mut self.held);
                all.extend(logprobs.clone());
                let fields = json!({"delta": text, "logprobs": logprobs});
                vec![self.part_event("response.output_text.delta", fields)]
            }
            None => vec![self.part_event("response.reasoning_text.delta", json!({"delta": text}))],
        }
    }

    fn end_item(&mut self, kind: BlockKind, status: &str) -> Vec<String> {
        let last = self.last();
        let part = self.items[last]["content"][0].clone();
        let (name, fields) = match kind {
            BlockKind::Text => {
                ("response.output_text.done", json!({"text": part["text"], "logprobs": part["logprobs"]}))
            }
            BlockKind::Thought => ("response.reasoning_text.done", json!({"text": part["text"]})),
        };
        let done = self.part_event(name, fields);
        let part = self.part_event("response.content_part.done", json!({"part": part}));
        self.items[last]["status"] = status.into();
        vec![done, part, self.item_event("response.output_item.done")]
    }

    fn add_call(&mut self, call: &ToolCall) -> Vec<String> {
        let n = self.items.len();
        let id = self.header.id_of("fc", n);
        self.items.push(json!({"type": "function_call", "id": id, "call_id": self.header.id_of("call", n), "name": call.name,
            "arguments": "", "status": "in_progress"}));
        let added = self.item_event("response.output_item.added");
        let fields = json!({"item_id": id, "output_index": n, "delta": call.arguments});
        let delta = self.event("response.function_call_arguments.delta", fields);
        let fields =
            json!({"item_id": id, "output_index": n, "name": call.name, "arguments": call.arguments});
        let done = self.event("response.function_call_arguments.done", fields);
        self.items[n]["arguments"] = call.arguments.as_str().into();
        self.items[n]["status"] = "completed".into();
        vec![added, delta, done, self.item_event("response.output_item.done")]
    }

    fn finished(&mut self, answer: &ChoiceAnswer, counts: AnswerCounts) -> (&'static str, Value) {
        let usage = counts.usage;
        let usage = json!({
            "input_tokens": usage.prompt,
            "input_tokens_details": {"cached_tokens": usage.reused},
            "output_tokens": usage.generated,
            "output_tokens_details": {"reasoning_tokens": counts.thoughts},
            "total_tokens": usage.prompt + usage.generated,
        });
        match answer.reason {
            Some(EndReason::Length) => {
                let fields = json!({"usage": usage, "incomplete_details": {"reason": "max_output_tokens"}});
                ("response.incomplete", self.response("incomplete", fields))
            }
            _ => ("response.completed", self.response("completed", json!({"usage": usage}))),
        }
    }

    /// Ends the open item, if there is one.
    fn end_open(&mut self, status: &str) -> Vec<String> {
        match self.blocks.end() {
            Some(BlockStep::End(kind)) => self.end_item(kind, status),
            _ => Vec::new(),
        }
    }
}

impl AnswerWriter for ResponsesAnswer {
    fn header(&self) -> &AnswerHeader {
        &self.header
    }

    fn whole(&mut self, all: &[ChoiceAnswer], counts: AnswerCounts) -> Value {
        let Some(answer) = all.first() else { return Value::Null };
        for (i, part) in answer.parts.iter().enumerate() {
            let own = answer.choices.iter().zip(&answer.places).filter(|(_, place)| **place == i);
            let own: Vec<ChosenToken> = own.map(|(choice, _)| choice.clone()).collect();
            self.held.extend(self.header.logprobs(&own));
            self.part(0, answer, part, None);
        }
        self.end(0, answer);
        self.finished(answer, counts).1
    }

    fn begin(&mut self, _n: usize) -> Vec<String> {
        let response = self.response("in_progress", json!({}));
        let kinds = ["response.created", "response.in_progress"];
        kinds.into_iter().map(|kind| self.event(kind, json!({"response": response}))).collect()
    }

    fn part(
        &mut self,
        _index: usize,
        _answer: &ChoiceAnswer,
        part: &AnswerPart,
        token: Option<PlacedToken<'_>>,
    ) -> Vec<String> {
        self.held.extend(token.iter().flat_map(|t| self.header.logprobs(std::slice::from_ref(t.choice))));
        let steps = self.blocks.add(part).into_iter();
        let events = |step| match step {
            BlockStep::Begin(kind) => self.begin_item(kind),
            BlockStep::Add(text) => self.add(&text),
            BlockStep::End(kind) => self.end_item(kind, "completed"),
            BlockStep::Call(call) => self.add_call(call),
        };
        steps.flat_map(events).collect()
    }

    fn end(&mut self, _index: usize, answer: &ChoiceAnswer) -> Vec<String> {
        self.end_open(if answer.reason == Some(EndReason::Length) { "incomplete" } else { "completed" })
    }

    fn close(&mut self, answer: &ChoiceAnswer, counts: AnswerCounts, _wants_usage: bool) -> Vec<String> {
        let (kind, response) = self.finished(answer, counts);
        vec![self.event(kind, json!({"response": response}))]
    }

    fn fail(&mut self, error: &ApiError) -> Vec<String> {
        let code = error.code.unwrap_or("server_error");
        let mut events = self.end_open("incomplete");
        let fields = json!({"error": {"code": code, "message": error.message}});
        let response = self.response("failed", fields);
        events.push(self.event("response.failed", json!({"response": response})));
        events
    }
}
