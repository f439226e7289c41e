//! Fields that all documents of a request's answer share.

use crate::batching::ChosenToken;
use crate::grammar::TokenBytes;
use crate::http::api::Api;
use anemoe_text::tokenizer::Tokenizer;
use serde_json::{Map, Value};
use std::sync::Arc;
use std::sync::atomic::{AtomicU64, Ordering};
use std::time::{SystemTime, UNIX_EPOCH};

/// A place in the text of an answer, behind some of its tokens.
#[derive(Clone, Debug, Default)]
pub struct TextPlace {
    /// Whole characters before it.
    pub characters: usize,
    /// Bytes of a character that is not whole.
    begun: Vec<u8>,
}

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

    /// Returns the text of a token as completions have it: the bytes of one that is no whole text.
    pub fn token_or_bytes(&self, id: u32) -> String {
        match self.word(id) {
            Some(word) if std::str::from_utf8(word).is_err() => format!("bytes:{}", word.escape_ascii()),
            _ => self.token(id),
        }
    }

    /// Moves a place behind a token. Special tokens are no text.
    pub fn pass(&self, place: &mut TextPlace, id: u32) {
        let text = || self.tokenizer.decode(&[id]).unwrap_or_default().into_bytes();
        let mut bytes = std::mem::take(&mut place.begun);
        bytes.extend(self.word(id).map_or_else(text, <[u8]>::to_vec));
        for chunk in bytes.utf8_chunks() {
            // What does not go on becomes a replacement character.
            place.characters += usize::from(!place.begun.is_empty()) + chunk.valid().chars().count();
            place.begun = chunk.invalid().to_vec();
        }
        if std::str::from_utf8(&place.begun).is_err_and(|e| e.error_len().is_some()) {
            place.characters += 1;
            place.begun.clear();
        }
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

#[cfg(test)]
pub mod tests {
    use super::*;
    use crate::grammar::tests::token_bytes;
    use std::path::Path;

    /// Makes a header whose tokens are these words, and a special token behind them.
    pub fn header_of(api: Api, words: &[&[u8]]) -> AnswerHeader {
        let id = words.len();
        let special = serde_json::json!({"id": id, "content": "<end>", "single_word": false, "lstrip": false, "rstrip": false,
            "normalized": false, "special": true});
        let vocab = Map::from_iter([("<end>".to_string(), id.into()), ("a".to_string(), (id + 1).into())]);
        let model = serde_json::json!({"type": "WordLevel", "vocab": vocab, "unk_token": "a"});
        let text =
            serde_json::json!({"version": "1.0", "added_tokens": [special], "model": model}).to_string();
        let tokenizer = Tokenizer::from_bytes(text.as_bytes(), Path::new("x")).unwrap();
        let words = Some(Arc::new(token_bytes(words)));
        AnswerHeader { words, ..AnswerHeader::new(api, "m", Arc::new(tokenizer)) }
    }

    #[test]
    fn a_place_counts_whole_characters_of_the_text() {
        let words: [&[u8]; 6] = [b"a ", b"\xf0\x9f", b"\x98", b"\x80b", b"\x80", b"c"];
        let header = header_of(Api::Completion, &words);
        let mut place = TextPlace::default();
        let mut pass = |id| {
            header.pass(&mut place, id);
            place.characters
        };
        // The special token is none; half a character and a wrong byte become one character each.
        assert_eq!([0, 1, 2, 3, 6, 1, 5, 4, 5].map(&mut pass), [2, 2, 2, 4, 4, 4, 6, 7, 8]);
        let all = [0, 1, 3, 4, 6].map(|id| header.token_or_bytes(id));
        assert_eq!(all, ["a ", "bytes:\\xf0\\x9f", "bytes:\\x80b", "bytes:\\x80", "<end>"]);
    }
}
