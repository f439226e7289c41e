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
    /// Name of the model in requests.
    pub model_id: String,
    /// API keys; an empty list accepts every request.
    pub keys: Vec<String>,
    /// Origins whose pages may send requests.
    pub origins: Vec<String>,
    /// Limits of the batcher.
    pub batch_limits: BatchLimits,
    /// Settings of drafts, for streams that run alone.
    pub speculation: Speculation,
    /// Sampling where a request sets nothing.
    pub defaults: SamplingDefaults,
    /// Most new tokens of an answer.
    pub max_tokens: Option<usize>,
    /// Most bytes of a body.
    pub max_body: usize,
    /// Most open connections.
    pub max_connections: usize,
    /// Most time from a request to the end of its answer.
    pub request_timeout: Duration,
    /// Most time for a request's head or body to arrive, and for a client to take what is sent.
    pub body_timeout: Duration,
    /// Time that running answers get when the server ends.
    pub grace: Duration,
}

/// State that requests share.
pub struct App {
    /// Limits and names.
    pub settings: ServerSettings,
    /// The model.
    pub model: Arc<Model>,
    /// Tokenizer of the model.
    pub tokenizer: Arc<Tokenizer>,
    /// Chat template of the model.
    pub template: ChatTemplate,
    /// Form of tool calls in the model's answers; `None` for an unknown form.
    pub call_form: Option<CallForm>,
    /// Tokens that end a chat's answer.
    pub ends: Vec<u32>,
    /// Batcher that runs jobs.
    pub batcher: Batcher,
    /// Maker of grammars.
    pub grammars: Grammars,
    /// Counters.
    pub metrics: Arc<ServerCounters>,
    /// Accepted API keys.
    pub keys: ApiKeys,
    /// Origins whose pages may send requests.
    pub origins: Origins,
    /// Start of the server, in seconds since 1970.
    pub created: u64,
}

/// A sink in place of a request's own until that is connected.
pub struct Unconnected;

impl Sink for Unconnected {
    fn send(&mut self, _event: AnswerEvent) -> bool {
        false
    }

    fn is_gone(&self) -> bool {
        true
    }
}
