//! Documents of answers, whole and streamed, in the form of each API.

mod anthropic_answer;
mod chat_answer;
mod responses_answer;

use super::api_error::ApiError;
use super::requests::Api;
use crate::batching::{ChosenToken, EndReason, Usage};
use crate::grammar::TokenBytes;
use crate::tool_calls::ToolCall;
use anemoe_runtime::tokenizer::Tokenizer;
use serde_json::{Map, Value};
use std::sync::Arc;
use std::sync::atomic::{AtomicU64, Ordering};
use std::time::{SystemTime, UNIX_EPOCH};

/// Part of an answer.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum Part {
    /// Thoughts.
    Thought(String),
    /// Text for the user.
    Text(String),
    /// A tool call.
    Call(ToolCall),
}

/// Answer to one prompt, so far or whole.
#[derive(Default)]
pub struct ChoiceAnswer {
    /// Parts; neighbours of the same kind are one part.
    pub parts: Vec<Part>,
    /// Tokens with probabilities, where wanted.
    pub choices: Vec<ChosenToken>,
    /// Reason why the answer ended; `None` before that.
    pub reason: Option<EndReason>,
    /// Stop string that ended it.
    pub stop: Option<String>,
}

impl ChoiceAnswer {
    /// Adds a part.
    pub fn add(&mut self, part: Part) {
        match (self.parts.last_mut(), part) {
            (Some(Part::Text(last)), Part::Text(text)) | (Some(Part::Thought(last)), Part::Thought(text)) => {
                last.push_str(&text);
            }
            (_, part) => self.parts.push(part),
        }
    }

    fn text(&self) -> String {
        let text = |part: &Part| if let Part::Text(text) = part { Some(text.clone()) } else { None };
        self.parts.iter().filter_map(text).collect()
    }

    /// Returns the thoughts; `None` where there are none.
    fn thoughts(&self) -> Option<String> {
        let text = |part: &Part| if let Part::Thought(text) = part { Some(text.clone()) } else { None };
        Some(self.parts.iter().filter_map(text).collect()).filter(|all: &String| !all.is_empty())
    }

    fn calls(&self) -> impl Iterator<Item = &ToolCall> {
        self.parts.iter().filter_map(|part| if let Part::Call(call) = part { Some(call) } else { None })
    }
}

/// Token counts of all answers to a request.
#[derive(Clone, Copy, Debug, Default)]
pub struct Counts {
    /// Tokens of prompts and answers.
    pub usage: Usage,
    /// New tokens of thoughts.
    pub thoughts: usize,
}

impl Counts {
    /// Adds the counts of a choice; the prompt of several choices counts once.
    pub fn add(&mut self, usage: Usage, is_first_of_prompt: bool) {
        if is_first_of_prompt {
            self.usage.prompt += usage.prompt;
            self.usage.reused += usage.reused;
        }
        self.usage.generated += usage.generated;
    }
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
    fn id_of(&self, prefix: &str, n: usize) -> String {
        let number = self.id.rsplit(['-', '_']).next().unwrap_or_default();
        format!("{prefix}_{number}_{n}")
    }

    /// Returns the text of a token; the name of a special token.
    fn token(&self, id: u32) -> String {
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
    fn logprobs(&self, choices: &[ChosenToken]) -> Vec<Value> {
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

    /// Returns the writer of the answer.
    pub fn writer(self) -> Box<dyn AnswerWriter> {
        match self.api {
            Api::Chat | Api::Completion => Box::new(chat_answer::ChatAnswer(self)),
            Api::Responses => Box::new(responses_answer::ResponsesAnswer::new(self)),
            Api::Messages => Box::new(anthropic_answer::AnthropicAnswer::new(self)),
        }
    }
}

/// A token with its place among the tokens of its answer.
#[derive(Clone, Copy)]
pub struct PlacedToken<'a> {
    /// The token.
    pub choice: &'a ChosenToken,
    /// Characters of the tokens before it.
    pub offset: usize,
}

/// Writes an answer in the form of an API: as one document, or as server-sent events.
pub trait AnswerWriter: Send {
    /// Returns the fields that all documents share.
    fn header(&self) -> &AnswerHeader;

    /// Returns the document of whole answers.
    fn whole(&mut self, all: &[ChoiceAnswer], counts: Counts) -> Value;

    /// Returns the first events of `n` choices.
    fn begin(&mut self, n: usize) -> Vec<String>;

    /// Returns the events of a part of choice `index`, whose `answer` holds the part already. `token` is the token that
    /// completed it, where its probability is wanted; a token without text comes with an empty text.
    fn part(
        &mut self,
        index: usize,
        answer: &ChoiceAnswer,
        part: &Part,
        token: Option<PlacedToken<'_>>,
    ) -> Vec<String>;

    /// Returns the last events of choice `index`.
    fn end(&mut self, index: usize, answer: &ChoiceAnswer) -> Vec<String>;

    /// Returns the last events of the request; `wants_usage` asks for token counts where they are not always sent.
    fn close(&mut self, answer: &ChoiceAnswer, counts: Counts, wants_usage: bool) -> Vec<String>;

    /// Returns the events of an error that ends the stream.
    fn fail(&mut self, error: &ApiError) -> Vec<String>;
}

/// Writes a server-sent event without a name.
fn data(value: &Value) -> String {
    format!("data: {value}\n\n")
}

/// Writes a server-sent event that is named as its `type` says.
fn event(value: &Value) -> String {
    format!("event: {}\ndata: {value}\n\n", value["type"].as_str().unwrap_or_default())
}
