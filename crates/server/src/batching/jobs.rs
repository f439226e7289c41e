//! Jobs (prompts to continue) and their results.

use super::choice::ChosenToken;
use crate::grammar::AnswerGrammar;
use anemoe_runtime::sampler::Sampling;
use std::time::Instant;

/// A prompt to continue.
pub struct Job {
    /// Name of the answer, for logs.
    pub id: String,
    /// Tokens of the prompt, at least one.
    pub prompt: Vec<u32>,
    /// Most new tokens.
    pub max_new: usize,
    /// Sampling: how tokens are chosen.
    pub sampling: Sampling,
    /// Texts that end the answer.
    pub stops: Vec<String>,
    /// Tokens that end the answer besides the model's own.
    pub ends: Vec<u32>,
    /// Special tokens whose names are text of the answer.
    pub marks: Vec<u32>,
    /// True if the answer continues after end tokens.
    pub ignore_eos: bool,
    /// Number of most probable tokens reported with each chosen token.
    pub logprobs: Option<usize>,
    /// Grammar that the answer has to follow.
    pub grammar: Option<AnswerGrammar>,
    /// Time at which the job fails with a timeout.
    pub deadline: Option<Instant>,
    /// Receiver of the answer.
    pub sink: Box<dyn Sink>,
}

/// Receiver of an answer.
pub trait Sink: Send {
    /// Takes an event. Returns false if the receiver wants no more events.
    fn send(&mut self, event: AnswerEvent) -> bool;

    /// Tells whether nobody wants the answer any more.
    fn is_gone(&self) -> bool;
}

/// Event of an answer.
#[derive(Clone, Debug, PartialEq)]
pub enum AnswerEvent {
    /// A new token, and the text that it completes, which may be empty.
    Token {
        /// Text to be shown.
        text: String,
        /// The token, with its probability where wanted.
        choice: ChosenToken,
    },
    /// The answer is complete; text that was held back comes with this event.
    Finished {
        /// Text to be shown.
        text: String,
        /// Reason why the answer ended.
        reason: EndReason,
        /// Stop string that ended it.
        stop: Option<String>,
        /// Token counts.
        usage: Usage,
    },
    /// The answer failed.
    Failed(JobFailure),
}

/// Reason why an answer ended.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum EndReason {
    /// An end token, a stop string, or a complete sentence of the grammar.
    Stop,
    /// The answer reached its token limit or the end of the context.
    Length,
}

/// Reason why an answer failed.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum JobFailure {
    /// The answer took longer than allowed.
    Timeout,
    /// The server is closing.
    Closing,
    /// The grammar needs too much work, or allows no token.
    Grammar(String),
    /// The model failed.
    Broken(String),
}

/// Token counts of an answer.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Usage {
    /// Tokens of the prompt.
    pub prompt: usize,
    /// Tokens of the prompt that were reused from earlier answers.
    pub reused: usize,
    /// New tokens.
    pub generated: usize,
}

/// Reason why a job was refused.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Refusal {
    /// Too many jobs wait.
    QueueFull,
    /// The batcher is closing, or has failed.
    Closed,
}
