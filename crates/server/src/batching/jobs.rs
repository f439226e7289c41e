//! Jobs: prompts to be continued, and what comes of them.

use super::choice::ChosenToken;
use anemoe_runtime::chat::PromptText;
use anemoe_runtime::sampler::Sampling;
use llguidance::Matcher;
use std::time::Instant;

/// A prompt to be continued.
pub struct Job {
    /// Name of the answer, for logs.
    pub id: String,
    /// Text and tokens of the prompt; the text may be empty where it is not known.
    pub prompt: PromptText,
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
    /// Go on behind end tokens.
    pub ignore_eos: bool,
    /// Most probable tokens that are reported with each chosen one.
    pub logprobs: Option<usize>,
    /// Grammar that the answer has to follow.
    pub grammar: Option<Matcher>,
    /// Time at which the job is given up.
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
        choice: ChosenToken,
    },
    /// The answer is complete; text that was held back comes with its end.
    Finished {
        /// Text to be shown.
        text: String,
        /// Reason for which it ended.
        reason: EndReason,
        /// Counts.
        usage: Usage,
    },
    /// The answer failed.
    Failed(JobFailure),
}

/// Reason for which an answer ended.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum EndReason {
    /// An end token, a stop string, or a complete sentence of the grammar.
    Stop,
    /// The answer has as many tokens as wanted, or as the context holds.
    Length,
}

/// Reason for which an answer failed.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum JobFailure {
    /// It took longer than allowed.
    Timeout,
    /// The server ends.
    Closing,
    /// The grammar of the answer takes too much, or allows nothing.
    Grammar(String),
    /// The model failed.
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

/// Reason for which a job was refused.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Refusal {
    /// Too many wait.
    QueueFull,
    /// The engine ends, or has failed.
    Closed,
}
