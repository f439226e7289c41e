//! Answers of `/v1/chat/completions` and `/v1/completions`.

use super::answer_header::{AnswerHeader, TextPlace};
use super::answer_parts::{AnswerCounts, ChoiceAnswer};
use super::answer_writer::{AnswerWriter, PlacedToken, data};
use crate::batching::{ChosenToken, EndReason};
use crate::http::api::Api;
use crate::http::api_error::ApiError;
use crate::tool_calls::{AnswerPart, ToolCall};
use serde_json::{Map, Value, json};

/// End of a stream.
const DONE: &str = "data: [DONE]\n\n";

/// Writes answers of OpenAI's chats and completions.
pub struct ChatAnswer(pub AnswerHeader);

fn reason_name(answer: &ChoiceAnswer) -> Option<&'static str> {
    answer.reason.as_ref().map(|reason| match reason {
        EndReason::Length => "length",
        EndReason::Stop if answer.calls().next().is_some() => "tool_calls",
        EndReason::Stop => "stop",
    })
}

impl ChatAnswer {
    fn is_chat(&self) -> bool {
        self.0.api == Api::Chat
    }

    fn document(&self, object: &str, choices: Value) -> Value {
        json!({"id": self.0.id, "object": object, "created": self.0.created, "model": self.0.model, "choices": choices})
    }

    /// Returns an event of one choice.
    fn chunk(&self, index: usize, content: Value, logprobs: Value, reason: Option<&str>) -> String {
        let (key, object) = match self.is_chat() {
            true => ("delta", "chat.completion.chunk"),
            false => ("text", "text_completion"),
        };
        let choice = json!({"index": index, key: content, "logprobs": logprobs, "finish_reason": reason});
        data(&self.document(object, json!([choice])))
    }

    /// Returns call number `n` of the choice `index`.
    fn call(&self, index: usize, n: usize, call: &ToolCall) -> Value {
        let function = json!({"name": call.name, "arguments": call.arguments});
        json!({"id": self.0.id_of(&format!("call_{index}"), n), "type": "function", "function": function})
    }

    /// Returns the probabilities of tokens, null where not wanted. `place` is that of the first one.
    fn logprobs(&self, choices: &[ChosenToken], place: &TextPlace) -> Value {
        if choices.iter().all(|c| c.logprob.is_none()) {
            return Value::Null;
        }
        if self.is_chat() {
            return json!({"content": self.0.logprobs(choices), "refusal": null});
        }
        let (mut offsets, mut place) = (Vec::new(), place.clone());
        for choice in choices {
            offsets.push(place.characters);
            self.0.pass(&mut place, choice.id);
        }
        let tokens: Vec<String> = choices.iter().map(|c| self.0.token_or_bytes(c.id)).collect();
        let top = |c: &ChosenToken| {
            let mut all = Map::new();
            for (id, p) in &c.top {
                // Two tokens may have one text.
                let text = Some(self.0.token_or_bytes(*id)).filter(|text| !all.contains_key(text));
                all.insert(text.unwrap_or_else(|| self.0.tokenizer.name(*id)), json!(p));
            }
            all
        };
        json!({
            "tokens": tokens,
            "token_logprobs": choices.iter().map(|c| c.logprob.unwrap_or(f32::MIN)).collect::<Vec<_>>(),
            "top_logprobs": choices.iter().map(top).collect::<Vec<_>>(),
            "text_offset": offsets,
        })
    }

    fn message(&self, index: usize, answer: &ChoiceAnswer) -> Value {
        let text = answer.text();
        let mut message = json!({"role": "assistant", "content": text, "refusal": null});
        if let Some(thoughts) = answer.thoughts() {
            message["reasoning_content"] = thoughts.into();
        }
        let calls: Vec<Value> =
            answer.calls().enumerate().map(|(n, call)| self.call(index, n, call)).collect();
        if !calls.is_empty() {
            message["tool_calls"] = calls.into();
            if text.trim().is_empty() {
                message["content"] = Value::Null;
            }
        }
        message
    }
}

impl AnswerWriter for ChatAnswer {
    fn header(&self) -> &AnswerHeader {
        &self.0
    }

    fn whole(&mut self, all: &[ChoiceAnswer], counts: AnswerCounts) -> Value {
        let choice = |(index, answer): (usize, &ChoiceAnswer)| {
            let (key, content) = match self.is_chat() {
                true => ("message", self.message(index, answer)),
                false => ("text", answer.text().into()),
            };
            let logprobs = self.logprobs(&answer.choices, &TextPlace::default());
            json!({"index": index, key: content, "logprobs": logprobs, "finish_reason": reason_name(answer)})
        };
        let choices = all.iter().enumerate().map(choice).collect();
        let mut document =
            self.document(if self.is_chat() { "chat.completion" } else { "text_completion" }, choices);
        document["usage"] = usage_json(counts);
        document
    }

    fn begin(&mut self, n: usize) -> Vec<String> {
        let opening = |i| self.chunk(i, json!({"role": "assistant", "content": ""}), Value::Null, None);
        if self.is_chat() { (0..n).map(opening).collect() } else { Vec::new() }
    }

    fn part(
        &mut self,
        index: usize,
        answer: &ChoiceAnswer,
        part: &AnswerPart,
        token: Option<PlacedToken<'_>>,
    ) -> Vec<String> {
        let logprobs = token.map_or(Value::Null, |t| self.logprobs(std::slice::from_ref(t.choice), t.place));
        let content = match part {
            AnswerPart::Text(text) if self.is_chat() => json!({"content": text}),
            AnswerPart::Text(text) => text.as_str().into(),
            AnswerPart::Thought(text) => json!({"reasoning_content": text}),
            AnswerPart::Call(call) => {
                let n = answer.calls().count().saturating_sub(1);
                let mut entry = self.call(index, n, call);
                entry["index"] = n.into();
                json!({"tool_calls": [entry]})
            }
        };
        vec![self.chunk(index, content, logprobs, None)]
    }

    fn end(&mut self, index: usize, answer: &ChoiceAnswer) -> Vec<String> {
        let content = if self.is_chat() { json!({}) } else { "".into() };
        vec![self.chunk(index, content, Value::Null, reason_name(answer))]
    }

    fn close(&mut self, _answer: &ChoiceAnswer, counts: AnswerCounts, wants_usage: bool) -> Vec<String> {
        let mut events = Vec::new();
        if wants_usage {
            let object = if self.is_chat() { "chat.completion.chunk" } else { "text_completion" };
            let mut document = self.document(object, json!([]));
            document["usage"] = usage_json(counts);
            events.push(data(&document));
        }
        events.push(DONE.into());
        events
    }

    fn fail(&mut self, error: &ApiError) -> Vec<String> {
        vec![data(&error.to_json(self.0.api)), DONE.into()]
    }
}

fn usage_json(counts: AnswerCounts) -> Value {
    let usage = counts.usage;
    json!({
        "prompt_tokens": usage.prompt,
        "completion_tokens": usage.generated,
        "total_tokens": usage.prompt + usage.generated,
        "prompt_tokens_details": {"cached_tokens": usage.reused},
        "completion_tokens_details": {"reasoning_tokens": counts.thoughts},
    })
}

#[cfg(test)]
mod tests {
    use super::super::answer_header::tests::header_of;
    use super::*;

    #[test]
    fn fragments_of_a_character_have_its_offset_and_names_of_their_own() {
        let writer = ChatAnswer(header_of(Api::Completion, &[b"a", b"\xf0\x9f", b"\x98\x80", b"b", b"b"]));
        let top = vec![(1, -0.5), (2, -1.0), (3, -2.0), (4, -3.0)];
        let choices = [0, 1, 2, 3].map(|id| ChosenToken { id, logprob: Some(-0.5), top: top.clone() });
        let got = writer.logprobs(&choices, &TextPlace::default());
        assert_eq!(got["text_offset"], json!([0, 1, 1, 2]));
        assert_eq!(got["tokens"], json!(["a", "bytes:\\xf0\\x9f", "bytes:\\x98\\x80", "b"]));
        assert_eq!(got["top_logprobs"][0].as_object().unwrap().len(), 4);
    }
}
