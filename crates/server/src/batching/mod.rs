//! Continuous batching: one thread owns all sequences and runs them together.
//!
//! ```text
//! queue ──admit: fork or go on from a known prefix──> slots
//! step: one pass over [last token of every slot that decodes] + [a chunk of the prompts that are not read yet]
//!       rows of logits -> mask of the grammar -> sampler -> text -> Sink
//! end:  the sequence goes to the prefixes, for a prompt that begins with it
//! ```
//! A stream that runs alone drafts tokens from what repeats, as `generate` does: then its part of a pass is its last token and the
//! draft, and each row that agrees with it gives one more token. Where several decode, they fill the passes themselves.
//!
//! Prompts that come together while nobody decodes are read but for their last tokens, which one pass reads for all: so no prompt
//! is read between tokens of the others' answers. Chunks fill a pass up to its most tokens, or to those that take
//! [`BatchLimits::stall`] where others decode, so that no stream waits longer than one pass, however long a prompt is.

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
use anemoe_runtime::chat::PromptText;
use anemoe_runtime::model::Model;
use anemoe_runtime::speculate::Speculation;
use anemoe_runtime::tokenizer::Tokenizer;
use shared::Shared;
use std::sync::atomic::{AtomicBool, AtomicUsize, Ordering};
use std::sync::mpsc::{Sender, channel};
use std::sync::{Arc, Mutex};
use std::thread::JoinHandle;

/// The engine as others see it.
pub struct Batcher {
    shared: Arc<Shared>,
    sender: Mutex<Option<Sender<Job>>>,
    thread: Mutex<Option<JoinHandle<()>>>,
}

impl Batcher {
    /// Starts the thread.
    ///
    /// # Errors
    /// The system gives no thread.
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
            known: Mutex::default(),
        });
        let (sender, receiver) = channel();
        let mine = Arc::clone(&shared);
        let run = move || {
            let _closes = Closes(&mine);
            scheduler::run(&mine, &receiver);
        };
        let thread = std::thread::Builder::new().name("anemoe-engine".into()).spawn(run)?;
        Ok(Batcher { shared, sender: Mutex::new(Some(sender)), thread: Mutex::new(Some(thread)) })
    }

    /// Hands over jobs that belong together: all of them, or none.
    ///
    /// # Errors
    /// They do not fit the queue, or the engine takes no more.
    pub fn submit(&self, jobs: Vec<Job>) -> std::result::Result<(), Refusal> {
        if self.is_closing() {
            return Err(Refusal::Closed);
        }
        let sender = locked(&self.sender);
        let sender = sender.as_ref().ok_or(Refusal::Closed)?;
        let (limits, n) = (self.shared.limits, jobs.len());
        // Counted under the lock of the sender, so that two callers do not both take the last place.
        if self.shared.jobs.load(Ordering::SeqCst) + n > limits.sequences + limits.queue {
            return Err(Refusal::QueueFull);
        }
        for job in jobs {
            self.shared.jobs.fetch_add(1, Ordering::SeqCst);
            sender.send(job).map_err(|_| Refusal::Closed)?;
        }
        Ok(())
    }

    /// Tokens of a text: those of the longest earlier answer that it begins with, and of the rest.
    ///
    /// # Errors
    /// The tokenizer fails.
    pub fn encode(&self, text: &str) -> anemoe_runtime::Result<Vec<u32>> {
        let longest = self
            .shared
            .known()
            .iter()
            .filter(|k| text.starts_with(k.text.trim_end()))
            .max_by_key(|k| k.text.len())
            .cloned();
        longest.as_deref().unwrap_or(&PromptText::default()).encode(&self.shared.tokenizer, text)
    }

    /// The engine takes no more jobs.
    pub fn is_closing(&self) -> bool {
        self.shared.is_closing.load(Ordering::SeqCst)
    }

    /// Jobs that wait or run.
    pub fn jobs(&self) -> usize {
        self.shared.jobs.load(Ordering::SeqCst)
    }

    /// Takes no more jobs; those it has are finished.
    pub fn close(&self) {
        self.shared.is_closing.store(true, Ordering::SeqCst);
        *locked(&self.sender) = None;
    }

    /// Gives up the jobs that are left.
    pub fn give_up(&self) {
        self.shared.is_aborted.store(true, Ordering::SeqCst);
        self.close();
    }

    /// Gives up the jobs that are left, and waits for the thread.
    pub fn abort(&self) {
        self.give_up();
        let thread = locked(&self.thread).take();
        // A panic of the thread was reported when it came.
        let _ = thread.map(JoinHandle::join);
    }
}

/// Closes the engine when its thread ends, however that comes.
struct Closes<'a>(&'a Shared);

impl Drop for Closes<'_> {
    fn drop(&mut self) {
        self.0.is_closing.store(true, Ordering::SeqCst);
    }
}
