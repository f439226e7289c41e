//! Steps of a pass: what the host does, in order.

use serde::{Deserialize, Serialize};
use std::collections::BTreeMap;

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
    /// is a name in [`super::Chain::vectors`]. Without a branch its term is left out.
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
        /// Name of the vector V of C elements in [`super::Chain::vectors`].
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
}
