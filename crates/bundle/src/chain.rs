//! `chain.json`: the execution contract of a bundle.

use crate::{CHAIN_FILE, Error, Result, write_atomic};
use anemoe_io::json;
use anemoe_kernels::WeightFormat;
use serde::{Deserialize, Serialize};
use std::collections::{BTreeMap, BTreeSet};
use std::ops::RangeInclusive;
use std::path::{Component, Path, PathBuf};

/// Version of the contract that this crate writes and reads.
pub const FORMAT: u32 = 1;

/// Largest `chain.json` that is read: 30 layers of 128 single-expert units stay far below it.
const MAX_CHAIN_BYTES: u64 = 256 << 20;

/// No size in a chain is larger, so that products of two of them stay in range.
const MAX_SIZE: usize = 1 << 24;
/// Caps of logits, see [`ModelInfo::final_logit_softcapping`]. Published ones are 30 and 50.
pub const SOFTCAPPING: RangeInclusive<f32> = 0.1..=1e6;
/// Factors of an embedding; published ones are roots of its width.
const EMBEDDING_SCALE: RangeInclusive<f32> = 1e-6..=1e6;

/// Most rows that a shard carries from call to call: the reach of a short convolution.
const MAX_CARRY: usize = 1 << 10;

/// Most channels of a register that a step makes of nothing.
const MAX_CHANNELS: usize = 1 << 16;
/// Most such registers: steps of all layers use the same ones.
const MAX_ZEROED: usize = 16;

/// The execution contract of a bundle: all that a host needs to run it, apart from weights and tokenizer.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct Chain {
    /// [`FORMAT`].
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

/// One thing that the host does.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
#[serde(rename_all = "snake_case", deny_unknown_fields)]
pub enum Step {
    /// Run a function of a package.
    Run(Run),
    /// Choose experts: the `top_k` most probable of each token, weighted by a softmax over them (or over all classes), times
    /// `scale` where given; all other weights of the output are zero.
    Route {
        /// Register `[1, experts, 1, T]`.
        logits: String,
        /// Register `[1, experts, 1, T]` that is written.
        weights: String,
        /// Number of experts chosen per token.
        top_k: usize,
        /// Factor per expert, applied after the softmax.
        #[serde(default, skip_serializing_if = "Option::is_none")]
        scale: Option<Vec<f32>>,
        /// Added to the probabilities (softmax over all classes) for the choice alone.
        #[serde(default, skip_serializing_if = "Option::is_none")]
        bias: Option<Vec<f32>>,
        /// Weights are the probabilities among all classes, not among the chosen ones.
        #[serde(default, skip_serializing_if = "std::ops::Not::not")]
        over_all: bool,
    },
    /// The residual stream, each channel by itself and in f32: `stream * V.scale + branch * V.branch_scale + V.shift`, where V
    /// is a name in [`Chain::vectors`]. Without a branch its term is left out.
    Residual {
        /// Register `[1, C, 1, T]` that is read and written.
        stream: String,
        /// Register of the same shape.
        #[serde(default, skip_serializing_if = "Option::is_none")]
        branch: Option<String>,
        /// Name of the vectors, each of C elements.
        vectors: String,
    },
    /// RMS norm over the channels, in f32: `from / sqrt(mean(from^2) + eps) * V`.
    Normalize {
        /// Register `[1, C, 1, T]`.
        from: String,
        /// Register of the same shape that is written.
        to: String,
        /// Name of the vector V of C elements in [`Chain::vectors`].
        vector: String,
        /// Epsilon.
        eps: f32,
    },
    /// Add to a register another one, times a row of weights: `register += from * weights[row]` for each token, in f32.
    AddScaled {
        /// Register `[1, C, 1, T]` that is read and written.
        register: String,
        /// Register of the same shape.
        from: String,
        /// Register `[1, N, 1, T]`.
        weights: String,
        /// Row of `weights`, less than N.
        row: usize,
    },
    /// Make a register `[1, channels, 1, T]` of zeros, for runs that accumulate into it.
    Zero {
        /// Register that is written.
        register: String,
        /// Channels of the register.
        channels: usize,
    },
}

/// One call of a package.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct Run {
    /// Name of the shard.
    pub shard: String,
    /// Shards with the same function for other token counts, where each count has a package of its own.
    #[serde(default, skip_serializing_if = "Vec::is_empty")]
    pub others: Vec<String>,
    /// Kind of function, besides the token count; absent where the shard has one kind.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub unit: Option<String>,
    /// The call is left out when this says so.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub when: Option<When>,
    /// Every input of the function.
    pub inputs: BTreeMap<String, InputBinding>,
    /// Every output of the function that goes into a register.
    pub outputs: BTreeMap<String, OutputBinding>,
    /// Inputs, besides [`Run::inputs`], that the host keeps for each sequence from call to call.
    #[serde(default, skip_serializing_if = "BTreeMap::is_empty")]
    pub kept: BTreeMap<String, Kept>,
    /// Registers go in and out as `[1, 1, T, C]`.
    #[serde(default, skip_serializing_if = "std::ops::Not::not")]
    pub channels_last: bool,
}

/// Rows that the host keeps of a call for the next one: a row `[heads, channels]` of each token. The input
/// has rows of tokens before the call, zeros where there were none; an output, `[1, heads, T, channels]`,
/// those of the call's own.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "snake_case", deny_unknown_fields)]
pub enum Kept {
    /// `[1, heads, slots, channels]`: the row of a token lies in its slot of a cache.
    Cache {
        /// Output with the call's own rows.
        rows: String,
        /// Input `[1, 1, slots, T]` that is 1 where a token's row goes.
        place: String,
    },
    /// `[1, heads, count, channels]`: the rows of the newest tokens, the last one behind.
    Newest {
        /// Output with the call's own rows.
        rows: String,
        /// Input `[1, 1, slots, T]` with zeros for tokens that only fill the call up.
        place: String,
        /// Number of tokens whose rows are kept.
        count: usize,
        /// Number of heads.
        heads: usize,
        /// Channels of a head.
        channels: usize,
    },
}

/// A condition: some element of these rows of a register is not zero.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct When {
    /// Register `[1, C, 1, T]`.
    pub register: String,
    /// Channels that are looked at.
    pub rows: RowRange,
}

/// Channels `start .. start + count` of a register.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct RowRange {
    /// First channel.
    pub start: usize,
    /// Number of channels.
    pub count: usize,
}

/// Source of a function's input.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
#[serde(rename_all = "snake_case", deny_unknown_fields)]
pub enum InputBinding {
    /// A register, or some channels of it.
    Register {
        /// Name of the register.
        name: String,
        /// Only these channels.
        #[serde(default, skip_serializing_if = "Option::is_none")]
        rows: Option<RowRange>,
        /// The function normalizes what it is given, so a token whose values fp16 could not hold may be divided by a power of
        /// two.
        #[serde(default, skip_serializing_if = "std::ops::Not::not")]
        rescale: bool,
    },
    /// A value that the host computes from positions alone.
    Host(HostInput),
}

/// Inputs that depend on positions alone.
#[derive(Clone, Debug, PartialEq, Eq, PartialOrd, Ord, Serialize, Deserialize)]
#[serde(rename_all = "snake_case", deny_unknown_fields)]
pub enum HostInput {
    /// `[1, 1, T, width]`: cosines, each frequency twice.
    RopeCos(String),
    /// `[1, 1, T, width]`: sines, negated in the first half, so that rotating is `x * cos + swap_halves(x) * sin`.
    RopeSin(String),
    /// `[1, 1, T, slots]`: 0 where a token sees a slot, -30000 where it does not.
    Mask(String),
    /// `[1, slots, 1, T]`: the same as [`HostInput::Mask`], slots on the channel axis.
    MaskColumns(String),
    /// `[1, 1, slots, T]`: 1 where a token's key and value go, else 0.
    Place(String),
    /// `[1, 1, slots, 1]`: 0 in the slots that this call writes, else 1.
    Keep(String),
    /// `[1, 1, rows, rows + T]`: picks the newest `rows` of as many old rows and T new ones, by a 1 in each row.
    Carry(usize),
}

impl HostInput {
    /// Name of the cache whose slots the input is made for.
    pub fn cache(&self) -> Option<&str> {
        match self {
            HostInput::Mask(name)
            | HostInput::MaskColumns(name)
            | HostInput::Place(name)
            | HostInput::Keep(name) => Some(name),
            HostInput::RopeCos(_) | HostInput::RopeSin(_) | HostInput::Carry(_) => None,
        }
    }
}

/// Destination of a function's output.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct OutputBinding {
    /// Register that is written.
    pub register: String,
    /// First channel that is written, of `channels` in all; the whole register when absent.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub rows: Option<RowRange>,
    /// Added to the register (in f32) instead of replacing it.
    #[serde(default, skip_serializing_if = "std::ops::Not::not")]
    pub accumulate: bool,
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
    /// See [`Run::unit`].
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
    /// Reads and checks `chain.json` of a bundle.
    ///
    /// # Errors
    /// The file cannot be read, is not a chain of this [`FORMAT`], or contradicts itself (the error says where).
    pub fn read(bundle: &Path) -> Result<Chain> {
        let path = bundle.join(CHAIN_FILE);
        let text = anemoe_io::read_input(&path, MAX_CHAIN_BYTES).map_err(|e| Error::io(&path, e))?;
        #[derive(Deserialize)]
        struct Version {
            format: u32,
        }
        let version: Version =
            json::parse(&text).map_err(|e| Error::invalid(&path, format!("chain: {e}")))?;
        if version.format != FORMAT {
            return Err(Error::invalid(
                &path,
                format!("chain: format {} where this version reads {FORMAT}", version.format),
            ));
        }
        let chain: Chain = serde_json::from_slice(&text)
            .map_err(|e| Error::invalid(&path, format!("chain: {}", json::Error::from(e))))?;
        chain.check().map_err(|what| Error::invalid(&path, format!("chain: {what}")))?;
        Ok(chain)
    }

    /// Writes `chain.json` into a bundle; the last thing that a build does.
    ///
    /// # Errors
    /// The file cannot be written.
    pub fn write(&self, bundle: &Path) -> Result<()> {
        let path = bundle.join(CHAIN_FILE);
        let mut text =
            serde_json::to_vec_pretty(self).map_err(|e| Error::invalid(&path, format!("chain: {e}")))?;
        text.push(b'\n');
        write_atomic(&path, &text)
    }

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

    /// Checks that the chain does not contradict itself; the error says where it does.
    fn check(&self) -> std::result::Result<(), String> {
        let m = &self.model;
        let sizes = [m.vocab_size, m.hidden_size, m.max_context];
        if sizes.iter().any(|&n| n == 0 || n > MAX_SIZE) {
            return Err(format!(
                "model: vocab_size, hidden_size and max_context must be from 1 to {MAX_SIZE}"
            ));
        }
        if (self.embedding.rows, self.embedding.cols) != (m.vocab_size, m.hidden_size) {
            return Err(format!(
                "embedding: [{}, {}] where the model says [{}, {}]",
                self.embedding.rows, self.embedding.cols, m.vocab_size, m.hidden_size
            ));
        }
        if let Some(cap) = m.final_logit_softcapping.filter(|cap| !SOFTCAPPING.contains(cap)) {
            let (least, most) = (SOFTCAPPING.start(), SOFTCAPPING.end());
            return Err(format!(
                "model: final_logit_softcapping is {cap:e}, expected a number from {least} to {most}"
            ));
        }
        if !EMBEDDING_SCALE.contains(&self.embedding.scale) {
            let (scale, least, most) = (self.embedding.scale, EMBEDDING_SCALE.start(), EMBEDDING_SCALE.end());
            return Err(format!("embedding: scale is {scale:e}, expected a number from {least} to {most}"));
        }
        inside(&self.embedding.file).map_err(|e| format!("embedding: {e}"))?;
        if let Some(vectors) = &self.vectors {
            inside(&vectors.file).map_err(|e| format!("vectors: {e}"))?;
        }
        if self.embedding.storage.layout(self.embedding.rows, self.embedding.cols).is_none() {
            return Err(format!("embedding: {} does not fit its rows and columns", self.embedding.storage));
        }
        if self.tokens.is_empty()
            || self.tokens.iter().any(|t| t.min == 0 || t.min > t.max || t.max > 1 << 16)
        {
            return Err("tokens: at least one count, each 1 <= min <= max <= 65536".into());
        }
        for (name, rope) in &self.ropes {
            if rope.width < rope.inv_freq.len().saturating_mul(2) || rope.width > MAX_SIZE {
                return Err(format!(
                    "rope `{name}`: width {} for {} frequencies",
                    rope.width,
                    rope.inv_freq.len()
                ));
            }
            if let Some(f) = rope.inv_freq.iter().find(|f| !(0.0..=1.0).contains(*f)) {
                return Err(format!("rope `{name}`: a frequency of {f:e}, expected numbers from 0 to 1"));
            }
        }
        for (name, cache) in &self.caches {
            let needed = cache
                .window
                .map_or(m.max_context, |w| (w.saturating_add(self.max_tokens() - 1)).min(m.max_context));
            let needed = needed.max(1);
            if cache.slots < needed || cache.slots > m.max_context.next_multiple_of(32) {
                return Err(format!(
                    "cache `{name}`: {} slots where at least {needed} are needed",
                    cache.slots
                ));
            }
        }
        if self.steps.is_empty() {
            return Err("steps: none, so that nothing leads from a token to its logits".into());
        }
        let mut names = BTreeSet::new();
        for shard in &self.shards {
            inside(&shard.file).map_err(|e| format!("shard `{}`: {e}", shard.name))?;
            if !names.insert(shard.name.as_str()) {
                return Err(format!("shard `{}` appears twice", shard.name));
            }
            if shard.functions.is_empty() {
                return Err(format!("shard `{}` has no function", shard.name));
            }
        }
        let zeroed: BTreeSet<&str> = self
            .steps
            .iter()
            .chain(&self.head)
            .filter_map(|s| if let Step::Zero { register, .. } = s { Some(register.as_str()) } else { None })
            .collect();
        if zeroed.len() > MAX_ZEROED {
            return Err(format!("{} registers of zeros, more than {MAX_ZEROED}", zeroed.len()));
        }
        let mut written: BTreeSet<&str> = BTreeSet::from(["hidden"]);
        for step in self.steps.iter().chain(&self.head) {
            self.check_step(step, &mut written)?;
        }
        if !written.contains("logits") {
            return Err("no step writes the register `logits`".into());
        }
        Ok(())
    }

    /// Checks the context of a function against the caches of its run; the error says what contradicts it.
    fn check_context(&self, run: &Run, function: &ShardFunction) -> std::result::Result<(), String> {
        let Some(context) = function.context else { return Ok(()) };
        let named =
            |what: String| Err(format!("function `{}`: a context of {context} {what}", function.name));
        let slots: Vec<usize> =
            run.cache_names().filter_map(|name| self.caches.get(name)).map(|c| c.slots).collect();
        match slots.iter().min() {
            None => named("positions, and no cache".into()),
            Some(slots) if context == 0 || context >= *slots => named(format!(
                "positions, expected fewer than the {slots} slots of its cache, and one at least"
            )),
            Some(_) => Ok(()),
        }
    }

    fn check_step<'a>(
        &'a self,
        step: &'a Step,
        written: &mut BTreeSet<&'a str>,
    ) -> std::result::Result<(), String> {
        let read = |register: &str, written: &BTreeSet<&str>| {
            if written.contains(register) {
                Ok(())
            } else {
                Err(format!("register `{register}` is read before any step writes it"))
            }
        };
        let rows_fit = |rows: &RowRange| {
            if rows.start <= MAX_SIZE && rows.count <= MAX_SIZE {
                Ok(())
            } else {
                Err(format!("rows from {} on, {} of them: more than {MAX_SIZE}", rows.start, rows.count))
            }
        };
        match step {
            Step::Zero { register, channels } => {
                if *channels > MAX_CHANNELS {
                    return Err(format!("zero `{register}`: {channels} channels, more than {MAX_CHANNELS}"));
                }
                written.insert(register);
            }
            Step::Route { logits, weights, top_k, scale, bias, .. } => {
                read(logits, written)?;
                if let Some(v) = scale.iter().chain(bias).flatten().find(|v| !v.is_finite()) {
                    return Err(format!("route to `{weights}`: scale or bias {v}, expected finite numbers"));
                }
                if *top_k == 0 {
                    return Err(format!("route to `{weights}`: top_k is 0"));
                }
                written.insert(weights);
            }
            Step::Residual { stream, branch, vectors } => {
                read(stream, written)?;
                branch.as_ref().map_or(Ok(()), |b| read(b, written))?;
                if self.vectors.is_none() {
                    return Err(format!("residual of `{stream}`: no file holds vectors `{vectors}`"));
                }
            }
            Step::Normalize { from, to, vector, eps } => {
                read(from, written)?;
                if self.vectors.is_none() || !(0.0..1.0).contains(eps) {
                    return Err(format!("norm of `{from}`: vector `{vector}` or eps {eps} cannot be"));
                }
                written.insert(to);
            }
            Step::AddScaled { register, from, weights, .. } => {
                for name in [register, from, weights] {
                    read(name, written)?;
                }
            }
            Step::Run(run) => {
                let mut counts = BTreeSet::new();
                for name in run.shards() {
                    let shard = self.shard(name).ok_or_else(|| format!("no shard is named `{name}`"))?;
                    let own = || shard.functions.iter().filter(|f| f.unit == run.unit);
                    if !own().any(|f| f.context.is_none()) {
                        return Err(match &run.unit {
                            Some(unit) => format!("shard `{name}` has no function for unit `{unit}`"),
                            None => format!("shard `{name}` has no function without a unit"),
                        });
                    }
                    for f in own() {
                        self.check_context(run, f).map_err(|what| format!("shard `{name}`: {what}"))?;
                    }
                    if !run.others.is_empty()
                        && let Some(f) = own().find(|f| !counts.insert((f.tokens, f.context)))
                    {
                        let count = f.tokens.max;
                        return Err(format!(
                            "shard `{name}`: another one has a function for {count} tokens, too"
                        ));
                    }
                }
                if let Some(when) = &run.when {
                    read(&when.register, written)?;
                    rows_fit(&when.rows)?;
                }
                for (input, binding) in &run.inputs {
                    match binding {
                        InputBinding::Register { name, rows, .. } => {
                            read(name, written)?;
                            rows.as_ref().map_or(Ok(()), rows_fit)?;
                        }
                        InputBinding::Host(HostInput::Carry(rows)) => {
                            if *rows > MAX_CARRY {
                                return Err(format!("shard `{}`: {rows} rows to carry", run.shard));
                            }
                        }
                        InputBinding::Host(HostInput::RopeCos(name) | HostInput::RopeSin(name)) => {
                            if !self.ropes.contains_key(name) {
                                return Err(format!(
                                    "shard `{}`, input `{input}`: no rope `{name}`",
                                    run.shard
                                ));
                            }
                        }
                        InputBinding::Host(
                            HostInput::Mask(name)
                            | HostInput::MaskColumns(name)
                            | HostInput::Place(name)
                            | HostInput::Keep(name),
                        ) => {
                            if !self.caches.contains_key(name) {
                                return Err(format!(
                                    "shard `{}`, input `{input}`: no cache `{name}`",
                                    run.shard
                                ));
                            }
                        }
                    }
                }
                for (input, kept) in &run.kept {
                    kept.check(run)
                        .map_err(|what| format!("shard `{}`, kept `{input}`: {what}", run.shard))?;
                }
                for binding in run.outputs.values() {
                    binding.rows.as_ref().map_or(Ok(()), rows_fit)?;
                    if binding.accumulate {
                        read(&binding.register, written)?;
                    }
                    written.insert(&binding.register);
                }
            }
        }
        Ok(())
    }
}

impl Run {
    /// The shard and the others, by name.
    pub fn shards(&self) -> impl Iterator<Item = &str> {
        std::iter::once(&self.shard).chain(&self.others).map(String::as_str)
    }

    /// Names of the caches whose slots its inputs are made for.
    pub fn cache_names(&self) -> impl Iterator<Item = &str> {
        self.inputs.values().filter_map(|binding| match binding {
            InputBinding::Host(input) => input.cache(),
            InputBinding::Register { .. } => None,
        })
    }
}

impl Kept {
    /// Output with the call's own rows.
    pub fn rows(&self) -> &str {
        match self {
            Kept::Cache { rows, .. } | Kept::Newest { rows, .. } => rows,
        }
    }

    /// Input that places tokens in slots.
    pub fn place(&self) -> &str {
        match self {
            Kept::Cache { place, .. } | Kept::Newest { place, .. } => place,
        }
    }

    /// Checks the rows against the run that keeps them; the error says what contradicts it.
    fn check(&self, run: &Run) -> std::result::Result<(), String> {
        let place = self.place();
        match run.inputs.get(place) {
            Some(InputBinding::Host(HostInput::Place(_))) => {}
            _ => return Err(format!("input `{place}` does not place rows in slots")),
        }
        if let Kept::Newest { count, heads, channels, .. } = self
            && (*count > MAX_CARRY
                || [*count, *heads, *channels].iter().any(|n| *n == 0 || *n > MAX_CHANNELS))
        {
            return Err(format!("{count} rows of {heads} heads of {channels} channels"));
        }
        match run.outputs.contains_key(self.rows()) {
            true => Err(format!("output `{}` goes into a register, too", self.rows())),
            false => Ok(()),
        }
    }
}

/// A path that stays in the bundle.
fn inside(file: &str) -> std::result::Result<PathBuf, String> {
    let path = Path::new(file);
    if !file.is_empty() && path.components().all(|c| matches!(c, Component::Normal(_))) {
        Ok(path.to_path_buf())
    } else {
        Err(format!("path `{file}` leaves the bundle"))
    }
}
