//! Documents of answers, whole and in pieces, of both kinds of requests.

use crate::batching::{ChosenToken, EndReason, Usage};
use crate::grammar::TokenWords;
use crate::tool_calls::{AnswerPart, ToolCall};
use anemoe_runtime::tokenizer::Tokenizer;
use serde_json::{Map, Value, json};
use std::sync::Arc;
use std::sync::atomic::{AtomicU64, Ordering};
use std::time::{SystemTime, UNIX_EPOCH};

/// Kind of a request.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Endpoint {
    /// `/v1/chat/completions`.
    Chat,
    /// `/v1/completions`.
    Completion,
}

impl Endpoint {
    /// Key of a body that holds the prompt.
    pub fn prompt_key(self) -> &'static str {
        match self {
            Endpoint::Chat => "messages",
            Endpoint::Completion => "prompt",
        }
    }
}

/// Fields that the documents of one request share.
#[derive(Clone)]
pub struct AnswerHeader {
    /// Kind of the request.
    pub endpoint: Endpoint,
    /// Name of the model.
    pub model: String,
    /// Name of the answer.
    pub id: String,
    /// Seconds since 1970.
    pub created: u64,
    /// Makes text of tokens.
    pub tokenizer: Arc<Tokenizer>,
    /// Bytes of all tokens, where probabilities are wanted; none where the tokenizer does not tell them.
    pub words: Option<Arc<TokenWords>>,
}

/// Answer to one prompt.
#[derive(Default)]
pub struct Complete {
    /// All text, but for calls.
    pub text: String,
    /// Calls of tools.
    pub calls: Vec<ToolCall>,
    /// Tokens with probabilities, where they are wanted.
    pub choices: Vec<ChosenToken>,
    /// Reason for which it ended, once it has.
    pub reason: Option<EndReason>,
}

impl Complete {
    /// Adds parts of its text.
    pub fn add(&mut self, parts: Vec<AnswerPart>) {
        for part in parts {
            match part {
                AnswerPart::Text(text) => self.text += &text,
                AnswerPart::Call(call) => self.calls.push(call),
            }
        }
    }
}

fn reason_name(reason: EndReason, has_calls: bool) -> &'static str {
    match reason {
        EndReason::Stop if has_calls => "tool_calls",
        EndReason::Stop => "stop",
        EndReason::Length => "length",
    }
}

impl AnswerHeader {
    /// A new answer.
    pub fn new(endpoint: Endpoint, model: &str, tokenizer: Arc<Tokenizer>) -> AnswerHeader {
        static NUMBER: AtomicU64 = AtomicU64::new(0);
        let now = SystemTime::now().duration_since(UNIX_EPOCH).unwrap_or_default();
        let number = NUMBER.fetch_add(1, Ordering::Relaxed);
        let prefix = if endpoint == Endpoint::Chat { "chatcmpl" } else { "cmpl" };
        let id = format!("{prefix}-{:x}{number:06x}", now.as_micros());
        AnswerHeader { endpoint, model: model.into(), id, created: now.as_secs(), tokenizer, words: None }
    }

    fn document(&self, object: &str, choices: Value) -> Map<String, Value> {
        let value = json!({"id": self.id, "object": object, "created": self.created, "model": self.model, "choices": choices});
        match value {
            Value::Object(map) => map,
            _ => Map::new(),
        }
    }

    /// The whole answer.
    pub fn complete(&self, all: &[Complete], usage: Usage) -> Value {
        let choice = |(index, answer): (usize, &Complete)| {
            let reason = answer.reason.map(|reason| reason_name(reason, !answer.calls.is_empty()));
            let logprobs = self.logprobs(&answer.choices, 0);
            match self.endpoint {
                Endpoint::Chat => {
                    let mut message = json!({"role": "assistant", "content": answer.text, "refusal": null});
                    if !answer.calls.is_empty() {
                        let calls = answer.calls.iter().enumerate();
                        message["tool_calls"] = calls.map(|(n, call)| self.call(index, n, call)).collect();
                        if answer.text.trim().is_empty() {
                            message["content"] = Value::Null;
                        }
                    }
                    json!({"index": index, "message": message, "logprobs": logprobs, "finish_reason": reason})
                }
                Endpoint::Completion => {
                    json!({"index": index, "text": answer.text, "logprobs": logprobs, "finish_reason": reason})
                }
            }
        };
        let choices = all.iter().enumerate().map(choice).collect();
        let object = match self.endpoint {
            Endpoint::Chat => "chat.completion",
            Endpoint::Completion => "text_completion",
        };
        let mut document = self.document(object, choices);
        document.insert("usage".into(), usage_json(usage));
        document.into()
    }

    fn chunk_object(&self) -> &'static str {
        match self.endpoint {
            Endpoint::Chat => "chat.completion.chunk",
            Endpoint::Completion => "text_completion",
        }
    }

    /// The first piece of an answer, which only a chat has.
    pub fn opening(&self, index: usize) -> Option<Value> {
        (self.endpoint == Endpoint::Chat).then(|| {
            let delta = json!({"role": "assistant", "content": ""});
            let choice = json!({"index": index, "delta": delta, "logprobs": null, "finish_reason": null});
            self.document(self.chunk_object(), json!([choice])).into()
        })
    }

    /// A piece of text; the tokens before it have `offset` characters.
    pub fn piece(&self, index: usize, text: &str, choice: Option<&ChosenToken>, offset: usize) -> Value {
        let logprobs = self.logprobs(choice.map(std::slice::from_ref).unwrap_or_default(), offset);
        let choice = match self.endpoint {
            Endpoint::Chat => {
                json!({"index": index, "delta": {"content": text}, "logprobs": logprobs, "finish_reason": null})
            }
            Endpoint::Completion => {
                json!({"index": index, "text": text, "logprobs": logprobs, "finish_reason": null})
            }
        };
        self.document(self.chunk_object(), json!([choice])).into()
    }

    /// Call number `n` of an answer.
    fn call(&self, index: usize, n: usize, call: &ToolCall) -> Value {
        let number = self.id.rsplit('-').next().unwrap_or_default();
        let function = json!({"name": call.name, "arguments": call.arguments});
        json!({"id": format!("call_{number}_{index}_{n}"), "type": "function", "function": function})
    }

    /// Call number `n` of an answer, as a piece of a stream.
    pub fn call_piece(&self, index: usize, n: usize, call: &ToolCall) -> Value {
        let mut entry = self.call(index, n, call);
        entry["index"] = n.into();
        let delta = json!({"tool_calls": [entry]});
        let choice = json!({"index": index, "delta": delta, "logprobs": null, "finish_reason": null});
        self.document(self.chunk_object(), json!([choice])).into()
    }

    /// The end of an answer.
    pub fn ending(&self, index: usize, reason: EndReason, has_calls: bool) -> Value {
        let reason = reason_name(reason, has_calls);
        let choice = match self.endpoint {
            Endpoint::Chat => json!({"index": index, "delta": {}, "logprobs": null, "finish_reason": reason}),
            Endpoint::Completion => {
                json!({"index": index, "text": "", "logprobs": null, "finish_reason": reason})
            }
        };
        self.document(self.chunk_object(), json!([choice])).into()
    }

    /// The counts behind all answers of a stream.
    pub fn counts(&self, usage: Usage) -> Value {
        let mut document = self.document(self.chunk_object(), json!([]));
        document.insert("usage".into(), usage_json(usage));
        document.into()
    }

    /// Text of one token; the name of a special one.
    pub fn token(&self, id: u32) -> String {
        if let Some(word) = self.word(id) {
            return String::from_utf8_lossy(word).into_owned();
        }
        let text = self.tokenizer.decode(&[id]).unwrap_or_default();
        if text.is_empty() { self.tokenizer.name(id) } else { text }
    }

    /// Bytes of a token that is not special.
    fn word(&self, id: u32) -> Option<&[u8]> {
        self.words.as_ref()?.get(id)
    }

    /// Probabilities of tokens, before which are `offset` characters; null where none are wanted.
    fn logprobs(&self, choices: &[ChosenToken], mut offset: usize) -> Value {
        if choices.iter().all(|c| c.logprob.is_none()) {
            return Value::Null;
        }
        let probability = |c: &ChosenToken| c.logprob.unwrap_or(f32::MIN);
        match self.endpoint {
            Endpoint::Chat => {
                let entry = |id: u32, logprob: f32| {
                    let token = self.token(id);
                    let bytes = self.word(id).unwrap_or(token.as_bytes());
                    json!({"token": token, "logprob": logprob, "bytes": bytes})
                };
                let content = choices.iter().map(|c| {
                    let mut value = entry(c.id, probability(c));
                    value["top_logprobs"] = c.top.iter().map(|(id, p)| entry(*id, *p)).collect();
                    value
                });
                json!({"content": content.collect::<Vec<_>>(), "refusal": null})
            }
            Endpoint::Completion => {
                let mut offsets = Vec::new();
                let tokens: Vec<String> = choices.iter().map(|c| self.token(c.id)).collect();
                for token in &tokens {
                    offsets.push(offset);
                    offset += token.chars().count();
                }
                let top = |c: &ChosenToken| -> Map<String, Value> {
                    c.top.iter().map(|(id, p)| (self.token(*id), json!(p))).collect()
                };
                json!({
                    "tokens": tokens,
                    "token_logprobs": choices.iter().map(probability).collect::<Vec<_>>(),
                    "top_logprobs": choices.iter().map(top).collect::<Vec<_>>(),
                    "text_offset": offsets,
                })
            }
        }
    }
}

fn usage_json(usage: Usage) -> Value {
    json!({
        "prompt_tokens": usage.prompt,
        "completion_tokens": usage.generated,
        "total_tokens": usage.prompt + usage.generated,
        "prompt_tokens_details": {"cached_tokens": usage.reused},
    })
}
