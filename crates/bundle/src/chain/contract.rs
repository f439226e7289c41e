//! Tables of the execution contract: the model, its embedding, ropes, caches and packages.

use super::build_results::{AutoChoice, Gates};
use super::steps::{HostInput, InputBinding, Kept, Step};
use anemoe_kernels::WeightFormat;
use serde::{Deserialize, Serialize};
use std::collections::{BTreeMap, BTreeSet};

/// The execution contract of a bundle: all that a host needs to run it, apart from weights and tokenizer.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct Chain {
    /// Format version: one of [`super::FORMATS`].
    pub format: u32,
    /// Program and version that wrote the bundle.
    pub generator: String,
    /// Model family, for people; the host does not use it.
    pub family: String,
    /// Source of the weights, for people.
    pub source: String,
    /// Sizes and special tokens.
    pub model: ModelInfo,
    /// Ties of an assistant to its target, the model that it drafts for; absent in bundles of other models.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub assistant: Option<Assistant>,
    /// SHA-256 over the checkpoint's contents, independent of its path; large files count by samples.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub checkpoint_sha256: Option<String>,
    /// Ways in which the checkpoint was read: where its users disagree on how to run it, and the rotation of its weights.
    /// Only what opens the checkpoint again uses them.
    #[serde(default, skip_serializing_if = "BTreeMap::is_empty")]
    pub readings: BTreeMap<String, String>,
    /// Options of the plan, as the builder writes them. The checkpoint and the options give the same plan again.
    #[serde(default, skip_serializing_if = "serde_json::Value::is_null")]
    pub options: serde_json::Value,
    /// Results of the build's gates; absent in bundles that were built before there were gates.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub gates: Option<Gates>,
    /// SHA-256 of the file with the importances that weighted the errors.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub importance: Option<String>,
    /// SHA-256 of the tokens that matrices were compressed for, little-endian.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub calibration: Option<String>,
    /// Kinds that a search chose; absent where the user gave them.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub auto: Option<AutoChoice>,
    /// Embedding table in which the host looks tokens up.
    pub embedding: Embedding,
    /// File of the vectors that steps of the host use.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub vectors: Option<Vectors>,
    /// Bundle of the model that drafts for this one, a path in this bundle.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub drafter: Option<String>,
    /// Token counts for which the shards have functions, ascending.
    pub tokens: Vec<TokenCount>,
    /// Rotary tables by name.
    pub ropes: BTreeMap<String, Rope>,
    /// Key/value cache layouts by name.
    pub caches: BTreeMap<String, Cache>,
    /// Steps of a pass over T tokens: register `hidden` holds the embeddings before, the last layer's output after.
    pub steps: Vec<Step>,
    /// Steps from register `hidden` to register `logits`, run for the positions whose logits are wanted.
    pub head: Vec<Step>,
    /// Name of the vector with the token of each row of register `logits`; absent where row i is of token i.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub head_order: Option<String>,
    /// Packages, in the order of their first use.
    pub shards: Vec<Shard>,
}

/// Sizes and special tokens of a model.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct ModelInfo {
    /// Rows of the embedding and number of logits.
    pub vocab_size: usize,
    /// Width of the residual stream.
    pub hidden_size: usize,
    /// Number of layers.
    pub num_layers: usize,
    /// Experts of a layer; absent in models without experts, and in bundles of earlier versions.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub num_experts: Option<usize>,
    /// Most positions that the caches hold.
    pub max_context: usize,
    /// Token that starts every prompt.
    pub bos_token_id: Option<u32>,
    /// Tokens that end generation.
    pub eos_token_ids: Vec<u32>,
    /// Cap of the logits, `cap * tanh(raw / cap)`, which the host applies.
    pub final_logit_softcapping: Option<f32>,
}

/// Ties of an assistant to its target. The steps read the register `input`: the target's embedding of the newest token, over the
/// target's hidden state before that token. They write the register `state`: the hidden state of the next step.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct Assistant {
    /// Width of the target's residual stream.
    pub target_hidden_size: usize,
    /// Epsilon of the target's final norm, which makes the first hidden state.
    pub eps: f32,
    /// Groups of tokens whose logits the host computes; absent where the head computes all logits.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub centroids: Option<Centroids>,
}

/// Groups of tokens of equal size. The head's `logits` are those of the groups' centroids. The host computes the products of the
/// register `normalized` with the rows of the best groups. Row r of the embedding is that of the token `token_ordering[r]`, a
/// vector in [`Chain::vectors`]; a group's rows follow each other.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct Centroids {
    /// Number of groups.
    pub count: usize,
    /// Groups whose tokens have logits.
    pub top_k: usize,
}

/// Embedding table in which the host looks tokens up.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct Embedding {
    /// Path of the file in the bundle.
    pub file: String,
    /// Vocabulary size; 0 in an assistant whose tokens nobody looks up.
    pub rows: usize,
    /// Hidden size.
    pub cols: usize,
    /// Factor that is multiplied to a row in f32; the product is rounded to fp16.
    pub scale: f32,
    /// Storage format of the rows: packed elements (padded to a whole byte), then tables or scales in fp16, then
    /// offsets in int8, one byte each.
    #[serde(default)]
    pub storage: WeightFormat,
    /// SHA-256 of the file.
    pub sha256: String,
}

/// A file of named f32 vectors, in NumPy's npz format.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct Vectors {
    /// Path of the file in the bundle.
    pub file: String,
    /// SHA-256 of the file.
    pub sha256: String,
}

/// Token count, or range of token counts, for which functions exist.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct TokenCount {
    /// Fewest tokens of a call.
    pub min: usize,
    /// Most tokens of a call; equal to `min` for a fixed shape.
    pub max: usize,
}

impl TokenCount {
    /// One token.
    pub const ONE: TokenCount = TokenCount { min: 1, max: 1 };
}

/// Rotary embedding: the angle `position * inv_freq[c]` turns the channels (c, c + n), where n is the number of
/// frequencies. Channels from 2n on stay as they are.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct Rope {
    /// Channels of a row; at least 2n.
    pub width: usize,
    /// Angle per position in radians; 0 leaves a pair as it is.
    pub inv_freq: Vec<f64>,
}

/// Ring of cache slots: position p lies in slot p mod `slots`.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct Cache {
    /// Number of slots; a multiple of 32.
    pub slots: usize,
    /// Number of newest positions that a query sees, its own included; all positions where absent.
    pub window: Option<usize>,
}

/// Kind of a shard: the part of the model that it computes.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
pub enum ShardKind {
    /// Attention of one layer, with its router.
    Attention,
    /// A pack of experts.
    Experts,
    /// A pack of experts, with the ops that join the branches of the layer: dense MLP, norms, residual.
    ExpertsCombine,
    /// Experts with their own router.
    Moe,
    /// Neighbouring layers, or the ops between the expert choices of two layers.
    Layers,
    /// A slice of the output vocabulary.
    Head,
}

impl ShardKind {
    /// Every kind.
    pub const ALL: [ShardKind; 6] = [
        ShardKind::Attention,
        ShardKind::Experts,
        ShardKind::ExpertsCombine,
        ShardKind::Moe,
        ShardKind::Layers,
        ShardKind::Head,
    ];

    /// Returns the name in `chain.json`.
    pub const fn name(self) -> &'static str {
        match self {
            ShardKind::Attention => "attention",
            ShardKind::Experts => "experts",
            ShardKind::ExpertsCombine => "experts_combine",
            ShardKind::Moe => "moe",
            ShardKind::Layers => "layers",
            ShardKind::Head => "head",
        }
    }
}

/// Package of a bundle.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct Shard {
    /// Name, for instance `L00.attn`.
    pub name: String,
    /// Path of the package in the bundle.
    pub file: String,
    /// Part of the model that the package computes.
    pub kind: ShardKind,
    /// Layer, from 0; the first one where the package has parts of several; absent for the head.
    pub layer: Option<usize>,
    /// Last layer, where the package has parts of several.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub last_layer: Option<usize>,
    /// Functions of the package.
    pub functions: Vec<ShardFunction>,
    /// Compression kinds of the package's matrices, by part of the model.
    pub quant: BTreeMap<String, String>,
    /// Number of weights, vectors included.
    pub weights: u64,
    /// Bytes of the whole package.
    pub bytes: u64,
    /// Hash of the package; see [`crate::package_sha256`].
    pub sha256: String,
    /// Lowest cosine between a matrix of the package and its compressed form; 1 without compression.
    pub min_weight_cosine: f64,
    /// Squared error of the matrices over their squares, inputs weighted by importance where it is known.
    #[serde(default)]
    pub output_error: f64,
}

/// A function of a package.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct ShardFunction {
    /// Name in the package.
    pub name: String,
    /// Unit of the function; see [`super::Run::unit`].
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub unit: Option<String>,
    /// Token counts that the function takes.
    pub tokens: TokenCount,
    /// Most positions that a sequence may have after the call: the function sees the first `context` slots of its
    /// cache. All slots where absent.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub context: Option<usize>,
}

impl Chain {
    /// Returns the shard named `name`.
    pub fn shard(&self, name: &str) -> Option<&Shard> {
        self.shards.iter().find(|s| s.name == name)
    }

    /// Describes what the weights were compressed for, with the first digits of its SHA-256, and what a search chose kinds
    /// for; none where they were compressed for nothing.
    pub fn compressed_for(&self) -> Option<String> {
        let named =
            |what: &str, hash: &Option<String>| Some(format!("{what} {}", hash.as_deref()?.get(..12)?));
        let inputs = named("text", &self.calibration).or_else(|| named("importances", &self.importance));
        let goal = self.auto.as_ref().map(|auto| format!("kinds chosen for {}", auto.goal));
        let all: Vec<String> = inputs.into_iter().chain(goal).collect();
        (!all.is_empty()).then(|| all.join(", "))
    }

    /// Tells whether attention uses values of earlier tokens besides keys and values.
    pub fn has_history(&self) -> bool {
        let carries = |input: &InputBinding| matches!(input, InputBinding::Host(HostInput::Carry(_)));
        let newest = |kept: &Kept| matches!(kept, Kept::Newest { .. });
        self.steps.iter().any(|step| match step {
            Step::Run(run) => run.inputs.values().any(carries) || run.kept.values().any(newest),
            _ => false,
        })
    }

    /// Returns the number of experts of a layer: as the model says, in bundles of earlier versions as the host chooses among
    /// them. None where neither does.
    pub fn experts(&self) -> Option<usize> {
        let runs =
            self.steps.iter().filter_map(|step| if let Step::Run(run) = step { Some(run) } else { None });
        let routed =
            || runs.filter_map(|run| run.when.as_ref()).map(|when| when.rows.start + when.rows.count).max();
        self.model.num_experts.or_else(routed)
    }

    /// Returns the context buckets for which functions exist, in positions, ascending, without the whole context.
    pub fn contexts(&self) -> Vec<usize> {
        let all = self.shards.iter().flat_map(|s| &s.functions).filter_map(|f| f.context);
        all.collect::<BTreeSet<_>>().into_iter().collect()
    }

    /// Returns the most tokens that one call takes.
    pub fn max_tokens(&self) -> usize {
        self.tokens.iter().map(|t| t.max).max().unwrap_or(1)
    }
}
