//! Continuous batching: one thread owns all sequences and runs them together.
//!
//! ```text
//! queue ──admit: fork or go on from a known prefix──> slots
//! step: one pass over [last token of every slot that decodes] + [a chunk of the prompts that are not read yet]
//!       rows of logits -> mask of the grammar -> sampler -> text -> Sink
//! end:  the sequence goes to the prefixes, for a prompt that begins with it
//! ```
//! A stream that runs alone drafts tokens from repetitions, as `generate` does: its part of a pass is its last token
//! and the draft, and each row that agrees with the draft gives one more token. Several decoding streams do not draft,
//! since together they fill the passes.
//!
//! Prompts that arrive together while nobody decodes are read up to their last tokens, which one pass then reads for
//! all: no prompt is read between tokens of another's answer. Chunks of prompts fill a pass up to its most tokens.
//! While others decode, they fill it only up to [`BatchLimits::stall`], so that no stream waits longer than one pass
//! for a prompt of any length.

mod choice;
mod jobs;
mod prefixes;
mod running_job;
mod scheduler;
mod shared;
mod warm_up;

pub use choice::ChosenToken;
pub use jobs::{AnswerEvent, EndReason, Job, JobFailure, Refusal, Sink, Usage};
pub use shared::BatchLimits;

use crate::counters::ServerCounters;
use anemoe_io::locked;
use anemoe_runtime::model::Model;
use anemoe_runtime::speculate::Speculation;
use anemoe_text::tokenizer::Tokenizer;
use shared::Shared;
use std::sync::atomic::{AtomicBool, AtomicUsize, Ordering};
use std::sync::mpsc::{Sender, channel};
use std::sync::{Arc, Mutex};
use std::thread::JoinHandle;

/// Handle of the batcher.
pub struct Batcher {
    shared: Arc<Shared>,
    sender: Mutex<Option<Sender<Job>>>,
    thread: Mutex<Option<JoinHandle<()>>>,
}

impl Batcher {
    /// Starts the batcher's thread.
    ///
    /// # Errors
    /// The system cannot start a thread.
    pub fn start(
        model: Arc<Model>,
        tokenizer: Arc<Tokenizer>,
        metrics: Arc<ServerCounters>,
        limits: BatchLimits,
        speculation: Speculation,
    ) -> std::io::Result<Batcher> {
        let shared = Arc::new(Shared {
            model,
            tokenizer,
            metrics,
            limits,
            speculation,
            jobs: AtomicUsize::new(0),
            is_closing: AtomicBool::new(false),
            is_aborted: AtomicBool::new(false),
        });
        let (sender, receiver) = channel();
        let mine = Arc::clone(&shared);
        let run = move || {
            let _closes = Closes(&mine);
            scheduler::run(&mine, &receiver);
        };
        let thread = std::thread::Builder::new().name("anemoe-batcher".into()).spawn(run)?;
        Ok(Batcher { shared, sender: Mutex::new(Some(sender)), thread: Mutex::new(Some(thread)) })
    }

    /// Submits jobs that belong together: all, or none.
    ///
    /// # Errors
    /// The jobs do not fit into the queue, or the batcher takes no more.
    pub fn submit(&self, jobs: Vec<Job>) -> std::result::Result<(), Refusal> {
        if self.is_closing() {
            return Err(Refusal::Closed);
        }
        let sender = locked(&self.sender);
        let sender = sender.as_ref().ok_or(Refusal::Closed)?;
        let (limits, n) = (self.shared.limits, jobs.len());
        // Counted under the sender's lock, so that two callers do not both take the last place.
        if self.shared.jobs.load(Ordering::SeqCst) + n > limits.sequences + limits.queue {
            return Err(Refusal::QueueFull);
        }
        for job in jobs {
            self.shared.jobs.fetch_add(1, Ordering::SeqCst);
            sender.send(job).map_err(|_| Refusal::Closed)?;
        }
        Ok(())
    }

    /// Tells whether the batcher takes no more jobs.
    pub fn is_closing(&self) -> bool {
        self.shared.is_closing.load(Ordering::SeqCst)
    }

    /// Returns the number of jobs that wait or run.
    pub fn jobs(&self) -> usize {
        self.shared.jobs.load(Ordering::SeqCst)
    }

    /// Takes no more jobs; jobs that wait or run are finished.
    pub fn close(&self) {
        self.shared.is_closing.store(true, Ordering::SeqCst);
        *locked(&self.sender) = None;
    }

    /// Takes no more jobs, and makes those that wait or run fail.
    pub fn give_up(&self) {
        self.shared.is_aborted.store(true, Ordering::SeqCst);
        self.close();
    }

    /// Makes all jobs fail, and waits for the thread to end.
    pub fn abort(&self) {
        self.give_up();
        let thread = locked(&self.thread).take();
        // A panic of the thread was reported when it happened.
        let _ = thread.map(JoinHandle::join);
    }
}

/// Closes the batcher when its thread ends, also by a panic.
struct Closes<'a>(&'a Shared);

impl Drop for Closes<'_> {
    fn drop(&mut self) {
        self.0.is_closing.store(true, Ordering::SeqCst);
    }
}
