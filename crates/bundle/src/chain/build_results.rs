//! Results of a build: its gates, and the kinds that a search chose per tensor.

use serde::{Deserialize, Serialize};

/// Results of a build's gates.
#[derive(Clone, Copy, Debug, PartialEq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct Gates {
    /// Placement and quality of one shard of each type, checked before the other shards were built.
    pub representative: GateResult,
    /// Placement of all shards, and logits and tokens of the whole model.
    pub full_stack: GateResult,
    /// Cosine that probed shards had to reach at every position, and logits in the median.
    #[serde(default, rename = "min_cosine", skip_serializing_if = "Option::is_none")]
    pub cosine_bound: Option<f64>,
}

/// Result of one gate.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
pub enum GateResult {
    /// The gate passed.
    Passed,
    /// The gate failed.
    Failed,
    /// The gate did not pass, and the result says nothing: the model predicts the prompt no better than chance, as
    /// random weights do, and the user gave no golden.
    Undecided,
    /// The user asked for no gates.
    Skipped,
    /// The gate was not run: the command that completed the bundle had no golden.
    NotRun,
}

impl Gates {
    /// Returns the results of a build without gates.
    pub const fn skipped() -> Gates {
        Gates { representative: GateResult::Skipped, full_stack: GateResult::Skipped, cosine_bound: None }
    }
}

/// Choices of a search for the kind of each tensor.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct AutoChoice {
    /// Goal of the search, for instance `min_cosine 0.99` or `max_bytes 6000000`.
    pub goal: String,
    /// Text or data on which errors were measured.
    pub measured_on: String,
    /// Bytes of all matrices as chosen.
    pub bytes: u64,
    /// Bytes of matrices that a token reads on average; experts count as often as they are chosen.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub bytes_read_per_token: Option<u64>,
    /// Mean Kullback-Leibler divergence of the next token's distribution from the uncompressed model's, in nats;
    /// present where the whole model was run.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub mean_kl: Option<f64>,
    /// Lowest cosine of logits to the uncompressed model's over the text; present where the whole model was run.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub min_cosine: Option<f64>,
    /// Mean cosine of the same logits.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub mean_cosine: Option<f64>,
    /// Choice for every compressed tensor.
    pub tensors: Vec<TensorChoice>,
    /// Whole models with one kind for all tensors, for comparison; empty where none was run.
    #[serde(default)]
    pub uniform: Vec<UniformResult>,
}

/// Kind of one tensor, and the reason.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct TensorChoice {
    /// Name of the tensor in the checkpoint, without its prefix.
    pub tensor: String,
    /// Part of the model that the tensor belongs to.
    pub part: String,
    /// Experts of a stacked tensor that the kind is for; empty for all of the tensor.
    #[serde(default, skip_serializing_if = "Vec::is_empty")]
    pub experts: Vec<usize>,
    /// Compression kind, for instance `lut4`.
    pub kind: String,
    /// Bytes of the compressed tensor.
    pub bytes: u64,
    /// Relative squared error of the tensor's output.
    pub output_error: f64,
    /// Loss (divergence of the next token's distribution, in nats) per unit of output error; 1 where it was not measured.
    pub sensitivity: f64,
    /// Reason of the choice: cost or gain of the neighbouring kinds.
    pub reason: String,
}

/// Whole model with one kind for all tensors.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct UniformResult {
    /// Compression kind.
    pub kind: String,
    /// Bytes of all matrices.
    pub bytes: u64,
    /// Lowest cosine of logits to the uncompressed model's.
    pub min_cosine: f64,
    /// Mean cosine of logits to the uncompressed model's.
    pub mean_cosine: f64,
}
