//! Continuous batching: one thread owns all sequences and runs them together.
//!
//! ```text
//! queue ──admit: fork or go on from a known prefix──> slots
//! step: one pass over [last token of every slot that decodes] + [a chunk of the prompts that are not read yet]
//!       rows of logits -> mask of the grammar -> sampler -> text -> Sink
//! end:  the sequence goes to the prefixes, for a prompt that begins with it
//! ```
//! Chunks fill a pass up to its most tokens, so that no stream waits longer than one pass, however long a prompt is.

mod choice;
mod prefixes;
mod scheduler;
mod slot;

pub use choice::Choice;

use crate::metrics::Metrics;
use anemoe_runtime::chat::PromptText;
use anemoe_runtime::model::Model;
use anemoe_runtime::sampler::Sampling;
use anemoe_runtime::tokenizer::Tokenizer;
use llguidance::Matcher;
use std::collections::VecDeque;
use std::sync::atomic::{AtomicBool, AtomicUsize, Ordering};
use std::sync::mpsc::{Sender, channel};
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};
use std::thread::JoinHandle;
use std::time::Instant;

/// Texts of ended answers whose tokens are remembered.
const KNOWN_TEXTS: usize = 64;

/// Limits of an engine.
#[derive(Clone, Copy, Debug)]
pub struct EngineLimits {
    /// Most sequences that run at the same time.
    pub sequences: usize,
    /// Most jobs that wait for one.
    pub queue: usize,
    /// Most sequences that are kept for prompts that begin with them.
    pub prefixes: usize,
}

/// A prompt to be continued.
pub struct Job {
    /// Text and tokens of the prompt; the text may be empty where it is not known.
    pub prompt: PromptText,
    /// Most new tokens.
    pub max_new: usize,
    /// How tokens are chosen.
    pub sampling: Sampling,
    /// Texts that end the answer.
    pub stops: Vec<String>,
    /// Tokens that end the answer besides the model's own.
    pub ends: Vec<u32>,
    /// Go on behind end tokens.
    pub ignore_eos: bool,
    /// Most probable tokens that are reported with each chosen one.
    pub logprobs: Option<usize>,
    /// What the answer has to look like.
    pub grammar: Option<Matcher>,
    /// When the job is given up.
    pub deadline: Option<Instant>,
    /// Receiver of the answer.
    pub sink: Box<dyn Sink>,
}

/// Receiver of an answer.
pub trait Sink: Send {
    /// Takes an event; false when nobody wants more.
    fn send(&mut self, event: AnswerEvent) -> bool;

    /// Nobody wants the answer any more.
    fn is_gone(&self) -> bool;
}

/// Piece of an answer.
#[derive(Clone, Debug, PartialEq)]
pub enum AnswerEvent {
    /// A new token and the text that it settles, which may be none.
    Token {
        /// Text to be shown.
        text: String,
        /// The token, with its probability where that is wanted.
        choice: Choice,
    },
    /// The answer is complete; text that was held back comes with its end.
    Finished {
        /// Text to be shown.
        text: String,
        /// Why it ended.
        reason: Reason,
        /// Counts.
        usage: Usage,
    },
    /// The answer failed.
    Failed(Failure),
}

/// Why an answer ended.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Reason {
    /// An end token, a stop string, or a complete sentence of the grammar.
    Stop,
    /// As many tokens as wanted, or as the context holds.
    Length,
}

/// Why an answer failed.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum Failure {
    /// It took longer than allowed.
    Timeout,
    /// The server ends.
    Closing,
    /// The model or the grammar failed.
    Broken(String),
}

/// Counts of an answer.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Usage {
    /// Tokens of the prompt.
    pub prompt: usize,
    /// Tokens of the prompt that were known from earlier answers.
    pub reused: usize,
    /// New tokens.
    pub generated: usize,
}

/// Why a job was not taken.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Refusal {
    /// Too many wait.
    QueueFull,
    /// The engine ends, or has failed.
    Closed,
}

/// What the engine's thread and those who ask it share.
struct Shared {
    model: Arc<Model>,
    tokenizer: Arc<Tokenizer>,
    metrics: Arc<Metrics>,
    limits: EngineLimits,
    /// Jobs that wait or run.
    jobs: AtomicUsize,
    /// No more jobs are taken.
    is_closing: AtomicBool,
    /// Jobs that are left are given up.
    is_aborted: AtomicBool,
    known: Mutex<VecDeque<Arc<PromptText>>>,
}

impl Shared {
    fn known(&self) -> MutexGuard<'_, VecDeque<Arc<PromptText>>> {
        self.known.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

/// The engine as others see it.
pub struct Engine {
    shared: Arc<Shared>,
    sender: Mutex<Option<Sender<Job>>>,
    thread: Mutex<Option<JoinHandle<()>>>,
}

impl Engine {
    /// Starts the thread.
    ///
    /// # Errors
    /// The system gives no thread.
    pub fn start(
        model: Arc<Model>,
        tokenizer: Arc<Tokenizer>,
        metrics: Arc<Metrics>,
        limits: EngineLimits,
    ) -> std::io::Result<Engine> {
        let shared = Arc::new(Shared {
            model,
            tokenizer,
            metrics,
            limits,
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
        Ok(Engine { shared, sender: Mutex::new(Some(sender)), thread: Mutex::new(Some(thread)) })
    }

    /// Hands over jobs that belong together: all of them, or none.
    ///
    /// # Errors
    /// They do not fit the queue, or the engine takes no more.
    pub fn submit(&self, jobs: Vec<Job>) -> std::result::Result<(), Refusal> {
        if self.is_closing() {
            return Err(Refusal::Closed);
        }
        let sender = self.sender.lock().unwrap_or_else(PoisonError::into_inner);
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
        *self.sender.lock().unwrap_or_else(PoisonError::into_inner) = None;
    }

    /// Gives up the jobs that are left.
    pub fn give_up(&self) {
        self.shared.is_aborted.store(true, Ordering::SeqCst);
        self.close();
    }

    /// Gives up the jobs that are left, and waits for the thread.
    pub fn abort(&self) {
        self.give_up();
        let thread = self.thread.lock().unwrap_or_else(PoisonError::into_inner).take();
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
