//! State that the engine's thread shares with those who ask it.

use crate::counters::ServerCounters;
use anemoe_io::locked;
use anemoe_runtime::chat::PromptText;
use anemoe_runtime::model::Model;
use anemoe_runtime::speculate::Speculation;
use anemoe_runtime::tokenizer::Tokenizer;
use std::collections::VecDeque;
use std::sync::atomic::{AtomicBool, AtomicUsize};
use std::sync::{Arc, Mutex, MutexGuard};
use std::time::Duration;

/// Texts of ended answers whose tokens are remembered.
pub const KNOWN_TEXTS: usize = 64;

/// Limits of an engine.
#[derive(Clone, Copy, Debug)]
pub struct BatchLimits {
    /// Most sequences that run at the same time.
    pub sequences: usize,
    /// Most jobs that wait for one.
    pub queue: usize,
    /// Most sequences that are kept for prompts that begin with them.
    pub prefixes: usize,
    /// Time that a pass with pieces of prompts may take while others decode.
    pub stall: Duration,
}

/// State that the engine's thread shares with those who ask it.
pub struct Shared {
    /// The model.
    pub model: Arc<Model>,
    /// Its tokenizer.
    pub tokenizer: Arc<Tokenizer>,
    /// Counters.
    pub metrics: Arc<ServerCounters>,
    /// Limits.
    pub limits: BatchLimits,
    /// Options of drafts.
    pub speculation: Speculation,
    /// Jobs that wait or run.
    pub jobs: AtomicUsize,
    /// No more jobs are taken.
    pub is_closing: AtomicBool,
    /// Jobs that are left are given up.
    pub is_aborted: AtomicBool,
    /// Texts of ended answers with their tokens.
    pub known: Mutex<VecDeque<Arc<PromptText>>>,
}

impl Shared {
    /// Known texts, the newest the last.
    pub fn known(&self) -> MutexGuard<'_, VecDeque<Arc<PromptText>>> {
        locked(&self.known)
    }
}
