//! The contract's tables: the model, its embedding, ropes, caches and packages.

use super::build_results::{AutoChoice, Gates};
use super::steps::{HostInput, InputBinding, Kept, Step};
use anemoe_kernels::WeightFormat;
use serde::{Deserialize, Serialize};
use std::collections::{BTreeMap, BTreeSet};

/// The execution contract of a bundle: all that a host needs to run it, apart from weights and tokenizer.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct Chain {
    /// [`super::FORMAT`].
    pub format: u32,
    /// Program and version that wrote the bundle.
    pub generator: String,
    /// Model family, for people; nothing depends on it.
    pub family: String,
    /// Source of the weights, for people.
    pub source: String,
    /// Sizes and special tokens.
    pub model: ModelInfo,
    /// SHA-256 over what the checkpoint holds, wherever it lies; of large files over samples.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub checkpoint_sha256: Option<String>,
    /// Readings of the checkpoint where readers differ, for reference runs of it; nothing else depends on
    /// them.
    #[serde(default, skip_serializing_if = "BTreeMap::is_empty")]
    pub readings: BTreeMap<String, String>,
    /// The options of the plan, as the builder writes them: with the checkpoint they give the plan again.
    #[serde(default, skip_serializing_if = "serde_json::Value::is_null")]
    pub options: serde_json::Value,
    /// Results of the build's gates; absent in bundles of versions without gates.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub gates: Option<Gates>,
    /// SHA-256 of the file with the importances that errors were weighed with.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub importance: Option<String>,
    /// Choice of kinds, where a search made it.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub auto: Option<AutoChoice>,
    /// The embedding that the host looks up.
    pub embedding: Embedding,
    /// Vectors that steps of the host use.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub vectors: Option<Vectors>,
    /// Token counts for which the shards have functions, ascending.
    pub tokens: Vec<TokenCount>,
    /// Rotary tables by name.
    pub ropes: BTreeMap<String, Rope>,
    /// Key/value cache layouts by name.
    pub caches: BTreeMap<String, Cache>,
    /// One pass over T tokens: register `hidden` goes in as embeddings and comes out as the last layer's output.
    pub steps: Vec<Step>,
    /// Steps from register `hidden` to register `logits`, run only for the positions whose logits are asked.
    pub head: Vec<Step>,
    /// Every package, in the order of its first use.
    pub shards: Vec<Shard>,
}

/// Sizes and special tokens.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct ModelInfo {
    /// Rows of the embedding and number of logits.
    pub vocab_size: usize,
    /// Width of the residual stream.
    pub hidden_size: usize,
    /// Number of layers.
    pub num_layers: usize,
    /// Most positions that the caches hold.
    pub max_context: usize,
    /// Token that starts every prompt.
    pub bos_token_id: Option<u32>,
    /// Tokens that end generation.
    pub eos_token_ids: Vec<u32>,
    /// Logits are `cap * tanh(raw / cap)`; the host applies it.
    pub final_logit_softcapping: Option<f32>,
}

/// The embedding that the host looks up.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct Embedding {
    /// File in the bundle.
    pub file: String,
    /// Vocabulary size.
    pub rows: usize,
    /// Hidden size.
    pub cols: usize,
    /// Multiplied to a row in f32; the product is rounded to fp16.
    pub scale: f32,
    /// Storage format of the rows: packed elements (padded to a whole byte), then tables or scales in fp16,
    /// then offsets in int8, a byte each.
    #[serde(default)]
    pub storage: WeightFormat,
    /// SHA-256 of the file.
    pub sha256: String,
}

/// A file of named f32 vectors, in NumPy's npz format.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct Vectors {
    /// File in the bundle.
    pub file: String,
    /// SHA-256 of the file.
    pub sha256: String,
}

/// A token count for which functions exist.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct TokenCount {
    /// Fewest tokens of a call.
    pub min: usize,
    /// Most tokens of a call; equal to `min` for a fixed shape.
    pub max: usize,
}

/// Rotary angles: position times `inv_freq[c]` turns the pair of channels (c, c + n), where n is the number of frequencies;
/// channels behind those pairs stay as they are.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct Rope {
    /// Channels of a row; at least twice as many as frequencies.
    pub width: usize,
    /// Radians per position; 0 leaves a pair as it is.
    pub inv_freq: Vec<f64>,
}

/// A ring of cache slots: position p lives in slot p mod `slots`.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct Cache {
    /// Slots; a multiple of 32.
    pub slots: usize,
    /// A query sees this many newest positions, its own included; all positions when absent.
    pub window: Option<usize>,
}

/// Kind of a shard, by the part of the model that it computes.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
pub enum ShardKind {
    /// Attention of one layer, with its router.
    Attention,
    /// A pack of experts.
    Experts,
    /// A pack of experts with what joins the branches of the layer: dense MLP, norms, residual.
    ExpertsCombine,
    /// Experts with their own router.
    Moe,
    /// Neighbouring layers, or what lies between the choices of experts of two.
    Layers,
    /// A slice of the output vocabulary.
    Head,
}

impl ShardKind {
    /// Every part.
    pub const ALL: [ShardKind; 6] = [
        ShardKind::Attention,
        ShardKind::Experts,
        ShardKind::ExpertsCombine,
        ShardKind::Moe,
        ShardKind::Layers,
        ShardKind::Head,
    ];

    /// Name in `chain.json`.
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

/// One package.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct Shard {
    /// For instance `L00.attn`.
    pub name: String,
    /// Path in the bundle.
    pub file: String,
    /// Part of the model that it computes.
    pub kind: ShardKind,
    /// Layer, from 0, of several the first; absent for the head.
    pub layer: Option<usize>,
    /// The last layer, where the package has parts of several.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub last_layer: Option<usize>,
    /// Functions.
    pub functions: Vec<ShardFunction>,
    /// Compression kind of its matrices, by part of the model.
    pub quant: BTreeMap<String, String>,
    /// Number of weights, vectors included.
    pub weights: u64,
    /// Bytes of the whole package.
    pub bytes: u64,
    /// See [`crate::package_sha256`].
    pub sha256: String,
    /// Lowest cosine between a matrix and its compressed form; 1 without compression.
    pub min_weight_cosine: f64,
    /// Squared error of its matrices over their squares, inputs weighted by importance where that is known.
    #[serde(default)]
    pub output_error: f64,
}

/// A function of a package.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct ShardFunction {
    /// Name in the package.
    pub name: String,
    /// See [`super::Run::unit`].
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub unit: Option<String>,
    /// Token counts that it takes.
    pub tokens: TokenCount,
    /// Positions that a sequence may have behind the call: the function sees so many slots of its cache, the first ones. All
    /// when absent.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub context: Option<usize>,
}

impl Chain {
    /// The shard named `name`.
    pub fn shard(&self, name: &str) -> Option<&Shard> {
        self.shards.iter().find(|s| s.name == name)
    }

    /// Attention remembers something of earlier tokens besides keys and values.
    pub fn has_history(&self) -> bool {
        let carries = |input: &InputBinding| matches!(input, InputBinding::Host(HostInput::Carry(_)));
        let newest = |kept: &Kept| matches!(kept, Kept::Newest { .. });
        self.steps.iter().any(|step| match step {
            Step::Run(run) => run.inputs.values().any(carries) || run.kept.values().any(newest),
            _ => false,
        })
    }

    /// Contexts for which functions exist, ascending, without the whole one.
    pub fn contexts(&self) -> Vec<usize> {
        let all = self.shards.iter().flat_map(|s| &s.functions).filter_map(|f| f.context);
        all.collect::<BTreeSet<_>>().into_iter().collect()
    }

    /// Most tokens that one call takes.
    pub fn max_tokens(&self) -> usize {
        self.tokens.iter().map(|t| t.max).max().unwrap_or(1)
    }
}
