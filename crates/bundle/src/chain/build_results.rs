//! Results of a build: its gates, and the kinds that a search chose.

use serde::{Deserialize, Serialize};

/// Results of a build's gates.
#[derive(Clone, Copy, Debug, PartialEq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct Gates {
    /// Placement and quality of one shard of each sort, before the others were built.
    pub representative: GateResult,
    /// Placement of all shards, and logits and tokens of the whole model.
    pub full_stack: GateResult,
    /// Cosine that was wanted.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub min_cosine: Option<f64>,
}

/// Result of one gate.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
pub enum GateResult {
    /// It passed.
    Passed,
    /// It failed.
    Failed,
    /// It was run, and says nothing: the model predicts the prompt no better than chance, as one of random weights does, and
    /// the user gave no reference to hold it to.
    Undecided,
    /// The user asked for no gates.
    Skipped,
    /// It was not run: the one who completed the bundle had no reference.
    NotRun,
}

impl Gates {
    /// Results of a build without gates.
    pub const fn skipped() -> Gates {
        Gates { representative: GateResult::Skipped, full_stack: GateResult::Skipped, min_cosine: None }
    }
}

/// Choice that a search made: the compression of each tensor.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct AutoChoice {
    /// Goal of the search, for instance `min_cosine 0.99` or `max_bytes 6000000`.
    pub goal: String,
    /// Text or data on which errors were measured.
    pub measured_on: String,
    /// Bytes of all matrices as chosen.
    pub bytes: u64,
    /// Bytes of matrices that a token reads on average, experts counted by how often they are chosen.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub bytes_read_per_token: Option<u64>,
    /// Mean divergence of the next token's distribution from the uncompressed model's, in nats, where the whole model was run.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub mean_kl: Option<f64>,
    /// Lowest cosine of logits to those of the uncompressed model over that text, where the whole model was run.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub min_cosine: Option<f64>,
    /// Mean of it.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub mean_cosine: Option<f64>,
    /// Every compressed tensor.
    pub tensors: Vec<TensorChoice>,
    /// Whole models with one kind for every tensor, for comparison, where they were run.
    #[serde(default)]
    pub uniform: Vec<UniformResult>,
}

/// The kind of one tensor, and why.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct TensorChoice {
    /// Checkpoint tensor without its prefix.
    pub tensor: String,
    /// Part of the model.
    pub part: String,
    /// Compression kind.
    pub kind: String,
    /// Bytes.
    pub bytes: u64,
    /// Relative squared error of the tensor's output.
    pub output_error: f64,
    /// Loss (divergence of the next token's distribution, in nats) per unit of output error; 1 where it was not measured.
    pub sensitivity: f64,
    /// Reason of the choice: cost or gain of the neighbouring kinds.
    pub reason: String,
}

/// A whole model with one kind.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct UniformResult {
    /// The kind.
    pub kind: String,
    /// Bytes of all matrices.
    pub bytes: u64,
    /// Lowest cosine of logits.
    pub min_cosine: f64,
    /// Mean cosine of logits.
    pub mean_cosine: f64,
}
