//! Fields that all documents of a request's answer share.

use crate::batching::ChosenToken;
use crate::grammar::TokenBytes;
use crate::http::api::Api;
use anemoe_text::tokenizer::Tokenizer;
use serde_json::{Map, Value};
use std::sync::Arc;
use std::sync::atomic::{AtomicU64, Ordering};
use std::time::{SystemTime, UNIX_EPOCH};

/// Fields that all documents of a request's answer share.
pub struct AnswerHeader {
    /// API of the request.
    pub api: Api,
    /// Name of the model.
    pub model: String,
    /// Id of the answer.
    pub id: String,
    /// Time of the request, in seconds since 1970.
    pub created: u64,
    /// Tokens of the prompt.
    pub prompt: usize,
    /// Stop strings of the request.
    pub stops: Vec<String>,
    /// Facts of the request that the answer repeats.
    pub repeated: Map<String, Value>,
    /// Tokenizer that decodes tokens.
    pub tokenizer: Arc<Tokenizer>,
    /// Bytes of all tokens where probabilities are wanted; `None` where the tokenizer does not tell them.
    pub words: Option<Arc<TokenBytes>>,
}

impl AnswerHeader {
    /// Makes the header of a new answer, with a new id.
    pub fn new(api: Api, model: &str, tokenizer: Arc<Tokenizer>) -> AnswerHeader {
        static NUMBER: AtomicU64 = AtomicU64::new(0);
        let now = SystemTime::now().duration_since(UNIX_EPOCH).unwrap_or_default();
        let number = NUMBER.fetch_add(1, Ordering::Relaxed);
        let prefix = match api {
            Api::Chat => "chatcmpl-",
            Api::Completion => "cmpl-",
            Api::Responses => "resp_",
            Api::Messages => "msg_",
        };
        let id = format!("{prefix}{:x}{number:06x}", now.as_micros());
        let (created, model) = (now.as_secs(), model.to_string());
        let (prompt, stops) = (0, Vec::new());
        AnswerHeader { api, model, id, created, prompt, stops, repeated: Map::new(), tokenizer, words: None }
    }

    /// Returns the id of another thing of this answer.
    pub fn id_of(&self, prefix: &str, n: usize) -> String {
        let number = self.id.rsplit(['-', '_']).next().unwrap_or_default();
        format!("{prefix}_{number}_{n}")
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

    /// Returns the number of characters of a token's text.
    pub fn characters(&self, id: u32) -> usize {
        self.token(id).chars().count()
    }

    /// Returns the probabilities of tokens as chats have them; empty where they are not wanted.
    pub fn logprobs(&self, choices: &[ChosenToken]) -> Vec<Value> {
        let entry = |id: u32, logprob: f32| {
            let token = self.token(id);
            let bytes = self.word(id).unwrap_or(token.as_bytes());
            serde_json::json!({"token": token, "logprob": logprob, "bytes": bytes})
        };
        let wanted = choices.iter().filter_map(|c| Some((c, c.logprob?)));
        let tokens = wanted.map(|(c, logprob)| {
            let mut value = entry(c.id, logprob);
            value["top_logprobs"] = c.top.iter().map(|(id, p)| entry(*id, *p)).collect();
            value
        });
        tokens.collect()
    }
}
