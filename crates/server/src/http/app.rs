//! State that requests share.

use super::access::{ApiKeys, Origins};
use crate::batching::{AnswerEvent, BatchLimits, Batcher, Sink};
use crate::counters::ServerCounters;
use crate::grammar::Grammars;
use crate::tool_calls::CallForm;
use anemoe_runtime::chat::{ChatTemplate, SamplingDefaults};
use anemoe_runtime::model::Model;
use anemoe_runtime::speculate::Speculation;
use anemoe_runtime::tokenizer::Tokenizer;
use std::sync::Arc;
use std::time::Duration;

/// Limits and names of a server.
#[derive(Clone, Debug)]
pub struct ServerSettings {
    /// Name under which the model is asked for.
    pub model_id: String,
    /// API keys; without any, everybody may ask.
    pub keys: Vec<String>,
    /// Origins whose pages may ask.
    pub origins: Vec<String>,
    /// Limits of the engine.
    pub engine: BatchLimits,
    /// Options of drafts, for streams that run alone.
    pub speculation: Speculation,
    /// Sampling where a request says nothing.
    pub defaults: SamplingDefaults,
    /// Most new tokens of an answer.
    pub max_tokens: Option<usize>,
    /// Most bytes of a body.
    pub max_body: usize,
    /// Most open connections.
    pub max_connections: usize,
    /// Most time from request to the end of its answer.
    pub request_timeout: Duration,
    /// Most time for the head of a request or its body to arrive, and for a client to take what is sent.
    pub body_timeout: Duration,
    /// Time that running answers have when the server ends.
    pub grace: Duration,
}

/// State that requests share.
pub struct App {
    /// Limits and names.
    pub settings: ServerSettings,
    /// The model.
    pub model: Arc<Model>,
    /// Its tokenizer.
    pub tokenizer: Arc<Tokenizer>,
    /// Its chat template.
    pub template: ChatTemplate,
    /// Form of calls in its answers, where it is a known one.
    pub call_form: Option<CallForm>,
    /// Tokens that end an answer of a chat.
    pub ends: Vec<u32>,
    /// Batcher, which runs jobs.
    pub engine: Batcher,
    /// Maker of grammars.
    pub grammars: Grammars,
    /// Counters.
    pub metrics: Arc<ServerCounters>,
    /// Keys that are needed.
    pub keys: ApiKeys,
    /// Origins whose pages may ask.
    pub origins: Origins,
    /// Start of the server, in seconds since 1970.
    pub created: u64,
}

/// A sink whose request is not connected yet.
pub struct Unconnected;

impl Sink for Unconnected {
    fn send(&mut self, _event: AnswerEvent) -> bool {
        false
    }

    fn is_gone(&self) -> bool {
        true
    }
}
