//! JSON documents of answers, whole and streamed, for chats and completions.

use crate::batching::{ChosenToken, EndReason, Usage};
use crate::grammar::TokenBytes;
use crate::tool_calls::{AnswerPart, ToolCall};
use anemoe_runtime::tokenizer::Tokenizer;
use serde_json::{Map, Value, json};
use std::sync::Arc;
use std::sync::atomic::{AtomicU64, Ordering};
use std::time::{SystemTime, UNIX_EPOCH};

/// Kind of a request, by its path.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Endpoint {
    /// `/v1/chat/completions`.
    Chat,
    /// `/v1/completions`.
    Completion,
}

impl Endpoint {
    /// Returns the body's key for the prompt.
    pub fn prompt_key(self) -> &'static str {
        match self {
            Endpoint::Chat => "messages",
            Endpoint::Completion => "prompt",
        }
    }
}

/// Fields that all documents of a request's answer share.
#[derive(Clone)]
pub struct AnswerHeader {
    /// Kind of the request.
    pub endpoint: Endpoint,
    /// Name of the model.
    pub model: String,
    /// Id of the answer.
    pub id: String,
    /// Time of the request, in seconds since 1970.
    pub created: u64,
    /// Tokenizer that decodes tokens.
    pub tokenizer: Arc<Tokenizer>,
    /// Bytes of all tokens where probabilities are wanted; `None` where the tokenizer does not tell them.
    pub words: Option<Arc<TokenBytes>>,
}

/// Complete answer to one prompt.
#[derive(Default)]
pub struct Complete {
    /// All text outside calls.
    pub text: String,
    /// Tool calls.
    pub calls: Vec<ToolCall>,
    /// Tokens with probabilities, where wanted.
    pub choices: Vec<ChosenToken>,
    /// Reason why the answer ended; `None` before that.
    pub reason: Option<EndReason>,
}

impl Complete {
    /// Adds parts to text and calls.
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
    /// Makes the header of a new answer, with a new id.
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

    /// Returns the document of a whole answer.
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

    /// Returns the first chunk of a streamed choice; `None` for completions, which have none.
    pub fn opening(&self, index: usize) -> Option<Value> {
        (self.endpoint == Endpoint::Chat).then(|| {
            let delta = json!({"role": "assistant", "content": ""});
            let choice = json!({"index": index, "delta": delta, "logprobs": null, "finish_reason": null});
            self.document(self.chunk_object(), json!([choice])).into()
        })
    }

    /// Returns a chunk of text. `offset` is the number of characters of the tokens before it.
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

    /// Returns call number `n` of the choice `index`.
    fn call(&self, index: usize, n: usize, call: &ToolCall) -> Value {
        let number = self.id.rsplit('-').next().unwrap_or_default();
        let function = json!({"name": call.name, "arguments": call.arguments});
        json!({"id": format!("call_{number}_{index}_{n}"), "type": "function", "function": function})
    }

    /// Returns call number `n` of the choice `index` as a chunk of a stream.
    pub fn call_piece(&self, index: usize, n: usize, call: &ToolCall) -> Value {
        let mut entry = self.call(index, n, call);
        entry["index"] = n.into();
        let delta = json!({"tool_calls": [entry]});
        let choice = json!({"index": index, "delta": delta, "logprobs": null, "finish_reason": null});
        self.document(self.chunk_object(), json!([choice])).into()
    }

    /// Returns the last chunk of a streamed choice.
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

    /// Returns the chunk of token counts at the end of a stream.
    pub fn counts(&self, usage: Usage) -> Value {
        let mut document = self.document(self.chunk_object(), json!([]));
        document.insert("usage".into(), usage_json(usage));
        document.into()
    }

    /// Returns the text of a token; the name of a special token.
    pub fn token(&self, id: u32) -> String {
        if let Some(word) = self.word(id) {
            return String::from_utf8_lossy(word).into_owned();
        }
        let text = self.tokenizer.decode(&[id]).unwrap_or_default();
        if text.is_empty() { self.tokenizer.name(id) } else { text }
    }

    /// Returns the bytes of a token; `None` for special tokens.
    fn word(&self, id: u32) -> Option<&[u8]> {
        self.words.as_ref()?.get(id)
    }

    /// Returns the probabilities of tokens, null where not wanted. `offset` is the number of characters before the tokens.
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
