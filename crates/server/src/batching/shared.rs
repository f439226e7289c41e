//! State that the batcher's thread shares with its callers.

use crate::counters::ServerCounters;
use anemoe_runtime::model::Model;
use anemoe_runtime::speculate::Speculation;
use anemoe_text::tokenizer::Tokenizer;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, AtomicUsize};
use std::time::Duration;

/// Limits of a batcher.
#[derive(Clone, Copy, Debug)]
pub struct BatchLimits {
    /// Most sequences that run at the same time.
    pub sequences: usize,
    /// Most jobs that wait.
    pub queue: usize,
    /// Most sequences that are kept as prefixes of later prompts.
    pub prefixes: usize,
    /// Time that a pass with parts of prompts may take while others decode.
    pub stall: Duration,
}

/// State that the batcher's thread shares with its callers.
pub struct Shared {
    /// The model.
    pub model: Arc<Model>,
    /// Tokenizer of the model.
    pub tokenizer: Arc<Tokenizer>,
    /// Counters.
    pub metrics: Arc<ServerCounters>,
    /// Limits.
    pub limits: BatchLimits,
    /// Settings of drafts.
    pub speculation: Speculation,
    /// Number of jobs that wait or run.
    pub jobs: AtomicUsize,
    /// True if no more jobs are taken.
    pub is_closing: AtomicBool,
    /// True if all jobs are made to fail.
    pub is_aborted: AtomicBool,
}
