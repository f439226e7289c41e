//! Answers of `/v1/responses`: a list of items, each begun, filled and ended by events.

use super::answer_header::AnswerHeader;
use super::answer_parts::{AnswerCounts, ChoiceAnswer, ReplyPart};
use super::answer_writer::{AnswerWriter, PlacedToken, event};
use crate::batching::EndReason;
use crate::http::api_error::ApiError;
use serde_json::{Map, Value, json};

/// Item that is being written.
struct OpenItem {
    is_text: bool,
    id: String,
    text: String,
    logprobs: Vec<Value>,
}

impl OpenItem {
    /// Returns the item's content part.
    fn part(&self) -> Value {
        match self.is_text {
            true => {
                json!({"type": "output_text", "text": self.text, "annotations": [], "logprobs": self.logprobs})
            }
            false => json!({"type": "reasoning_text", "text": self.text}),
        }
    }

    fn item(&self, status: &str, content: Value) -> Value {
        match self.is_text {
            true => {
                json!({"type": "message", "id": self.id, "status": status, "role": "assistant", "content": content})
            }
            false => {
                json!({"type": "reasoning", "id": self.id, "status": status, "summary": [], "content": content})
            }
        }
    }
}

/// Writes answers of OpenAI's responses.
pub struct ResponsesAnswer {
    header: AnswerHeader,
    /// Number of events so far.
    events: usize,
    /// Items that are complete.
    items: Vec<Value>,
    open: Option<OpenItem>,
    /// Blanks that belong to a text if one follows.
    blanks: String,
}

impl ResponsesAnswer {
    /// Makes the writer of an answer.
    pub fn new(header: AnswerHeader) -> ResponsesAnswer {
        ResponsesAnswer { header, events: 0, items: Vec::new(), open: None, blanks: String::new() }
    }

    /// Returns the response as it stands.
    fn response(&self, status: &str, more: Value) -> Value {
        let mut all = Map::new();
        for (key, value) in [
            ("id", json!(self.header.id)),
            ("object", "response".into()),
            ("created_at", self.header.created.into()),
            ("status", status.into()),
            ("background", false.into()),
            ("error", Value::Null),
            ("incomplete_details", Value::Null),
            ("model", json!(self.header.model)),
            ("output", json!(self.items)),
            ("metadata", json!({})),
            ("previous_response_id", Value::Null),
            ("store", false.into()),
            ("truncation", "disabled".into()),
            ("usage", Value::Null),
        ] {
            all.insert(key.into(), value);
        }
        let defaults = [("tool_choice", json!("auto")), ("tools", json!([]))];
        all.extend(self.header.repeated.clone());
        for (key, value) in defaults {
            if all.get(key).is_none_or(Value::is_null) {
                all.insert(key.into(), value);
            }
        }
        all.extend(more.as_object().cloned().unwrap_or_default());
        all.into()
    }

    /// Writes an event; its number and the number of the item are added.
    fn event(&mut self, kind: &str, mut fields: Value) -> String {
        fields["type"] = kind.into();
        fields["sequence_number"] = self.events.into();
        self.events += 1;
        event(&fields)
    }

    /// Writes an event about the part of the open item.
    fn part_event(&mut self, kind: &str, id: &str, fields: Value) -> String {
        let mut all = json!({"item_id": id, "output_index": self.items.len(), "content_index": 0});
        for (key, value) in fields.as_object().cloned().unwrap_or_default() {
            all[key] = value;
        }
        self.event(kind, all)
    }

    fn item_event(&mut self, kind: &str, item: &Value) -> String {
        let index = self.items.len();
        self.event(kind, json!({"output_index": index, "item": item}))
    }

    fn begin_item(&mut self, is_text: bool, events: &mut Vec<String>) {
        let id = self.header.id_of(if is_text { "msg" } else { "rs" }, self.items.len());
        let open = OpenItem { is_text, id: id.clone(), text: String::new(), logprobs: Vec::new() };
        events.push(self.item_event("response.output_item.added", &open.item("in_progress", json!([]))));
        events.push(self.part_event("response.content_part.added", &id, json!({"part": open.part()})));
        self.open = Some(open);
    }

    fn end_item(&mut self, status: &str, events: &mut Vec<String>) {
        let Some(open) = self.open.take() else { return };
        let mut done = json!({"text": open.text});
        if open.is_text {
            done["logprobs"] = json!(open.logprobs);
        }
        let kind = if open.is_text { "response.output_text.done" } else { "response.reasoning_text.done" };
        events.push(self.part_event(kind, &open.id, done));
        events.push(self.part_event("response.content_part.done", &open.id, json!({"part": open.part()})));
        let item = open.item(status, json!([open.part()]));
        events.push(self.item_event("response.output_item.done", &item));
        self.items.push(item);
    }

    fn add_call(&mut self, name: &str, arguments: &str, events: &mut Vec<String>) {
        let n = self.items.len();
        let id = self.header.id_of("fc", n);
        let mut item = json!({"type": "function_call", "id": id, "call_id": self.header.id_of("call", n), "name": name, "arguments": "",
            "status": "in_progress"});
        events.push(self.item_event("response.output_item.added", &item));
        let place = json!({"item_id": id, "output_index": n, "delta": arguments});
        events.push(self.event("response.function_call_arguments.delta", place));
        let place = json!({"item_id": id, "output_index": n, "name": name, "arguments": arguments});
        events.push(self.event("response.function_call_arguments.done", place));
        item["arguments"] = arguments.into();
        item["status"] = "completed".into();
        events.push(self.item_event("response.output_item.done", &item));
        self.items.push(item);
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
                let why = json!({"reason": "max_output_tokens"});
                (
                    "response.incomplete",
                    self.response("incomplete", json!({"usage": usage, "incomplete_details": why})),
                )
            }
            _ => ("response.completed", self.response("completed", json!({"usage": usage}))),
        }
    }
}

impl AnswerWriter for ResponsesAnswer {
    fn header(&self) -> &AnswerHeader {
        &self.header
    }

    fn whole(&mut self, all: &[ChoiceAnswer], counts: AnswerCounts) -> Value {
        let Some(answer) = all.first() else { return Value::Null };
        for part in &answer.parts {
            self.part(0, answer, part, None);
        }
        if let Some(open) = self.open.as_mut().filter(|open| open.is_text) {
            open.logprobs = self.header.logprobs(&answer.choices);
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
        part: &ReplyPart,
        token: Option<PlacedToken<'_>>,
    ) -> Vec<String> {
        let mut events = Vec::new();
        let (is_text, text) = match part {
            ReplyPart::Text(text) => (true, text),
            ReplyPart::Thought(text) => (false, text),
            ReplyPart::Call(call) => {
                self.end_item("completed", &mut events);
                self.blanks.clear();
                self.add_call(&call.name, &call.arguments, &mut events);
                return events;
            }
        };
        let is_open = self.open.as_ref().is_some_and(|open| open.is_text == is_text);
        if !is_open && text.trim().is_empty() {
            self.blanks.push_str(text);
            return events;
        }
        if !is_open {
            self.end_item("completed", &mut events);
            self.begin_item(is_text, &mut events);
        }
        let mut text = std::mem::take(&mut self.blanks) + text;
        if !is_open && !is_text {
            // A line end that parts it from earlier thoughts.
            text.drain(..text.len() - text.trim_start().len());
        }
        let logprobs =
            token.map(|t| self.header.logprobs(std::slice::from_ref(t.choice))).unwrap_or_default();
        let Some(open) = &mut self.open else { return events };
        open.text += &text;
        open.logprobs.extend(logprobs.clone());
        let id = open.id.clone();
        events.push(match is_text {
            true => self.part_event(
                "response.output_text.delta",
                &id,
                json!({"delta": text, "logprobs": logprobs}),
            ),
            false => self.part_event("response.reasoning_text.delta", &id, json!({"delta": text})),
        });
        events
    }

    fn end(&mut self, _index: usize, answer: &ChoiceAnswer) -> Vec<String> {
        let mut events = Vec::new();
        let status = if answer.reason == Some(EndReason::Length) { "incomplete" } else { "completed" };
        self.end_item(status, &mut events);
        events
    }

    fn close(&mut self, answer: &ChoiceAnswer, counts: AnswerCounts, _wants_usage: bool) -> Vec<String> {
        let (kind, response) = self.finished(answer, counts);
        vec![self.event(kind, json!({"response": response}))]
    }

    fn fail(&mut self, error: &ApiError) -> Vec<String> {
        let code = error.code.unwrap_or("server_error");
        let what = json!({"code": code, "message": error.message});
        let mut events = Vec::new();
        self.end_item("incomplete", &mut events);
        let response = self.response("failed", json!({"error": what}));
        events.push(self.event("response.failed", json!({"response": response})));
        events
    }
}
