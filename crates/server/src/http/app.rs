//! State that requests share.

use super::access::{ApiKeys, Hosts, Origins};
use super::served_models::Models;
use std::time::Duration;
use tokio::sync::Semaphore;

/// Limits and names of a server.
#[derive(Clone, Debug)]
pub struct ServerSettings {
    /// API keys; an empty list accepts every request.
    pub keys: Vec<String>,
    /// Names by which the server may be asked besides addresses and `localhost`.
    pub hosts: Vec<String>,
    /// Origins whose pages may send requests.
    pub origins: Vec<String>,
    /// True if thoughts are part of answers.
    pub shows_thoughts: bool,
    /// Most answers of a request.
    pub most_answers: usize,
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
    /// The models.
    pub models: Models,
    /// Accepted API keys.
    pub keys: ApiKeys,
    /// Names of the server.
    pub hosts: Hosts,
    /// Origins whose pages may send requests.
    pub origins: Origins,
    /// Places of requests with large bodies that are prepared at the same time.
    pub large: Semaphore,
    /// Start of the server, in seconds since 1970.
    pub created: u64,
}
