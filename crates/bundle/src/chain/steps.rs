//! Steps of a pass: the work of the host, in order.

use serde::{Deserialize, Serialize};
use std::collections::BTreeMap;

/// Step of a pass.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
#[serde(rename_all = "snake_case", deny_unknown_fields)]
pub enum Step {
    /// Run a function of a package.
    Run(Run),
    /// Choose experts: the `top_k` most probable of each token. The weights are a softmax over the chosen ones (or
    /// over all classes, see `over_all`), times `scale` where given; all other weights are zero.
    Route {
        /// Register `[1, experts, 1, T]` that is read.
        logits: String,
        /// Register `[1, experts, 1, T]` that is written: the weights of the experts.
        weights: String,
        /// Number of experts chosen per token.
        top_k: usize,
        /// Factor per expert, applied after the softmax.
        #[serde(default, skip_serializing_if = "Option::is_none")]
        scale: Option<Vec<f32>>,
        /// Added to the probabilities (softmax over all classes) for the choice, not for the weights.
        #[serde(default, skip_serializing_if = "Option::is_none")]
        bias: Option<Vec<f32>>,
        /// Weights are the probabilities among all classes, not among the chosen experts.
        #[serde(default, skip_serializing_if = "std::ops::Not::not")]
        over_all: bool,
    },
    /// Update the residual stream per channel, in f32: `stream * V.scale + branch * V.branch_scale + V.shift`, where
    /// V is a name in [`super::Chain::vectors`]. Without a branch, the branch's term is left out.
    Residual {
        /// Register `[1, C, 1, T]` that is read and written.
        stream: String,
        /// Register `[1, C, 1, T]` that is added.
        #[serde(default, skip_serializing_if = "Option::is_none")]
        branch: Option<String>,
        /// Name of the vectors, each of C elements.
        vectors: String,
    },
    /// Compute the RMS norm over the channels, in f32: `from / sqrt(mean(from^2) + eps) * V`.
    Normalize {
        /// Register `[1, C, 1, T]` that is read.
        from: String,
        /// Register of the same shape that is written.
        to: String,
        /// Name of the vector V of C elements in [`super::Chain::vectors`].
        vector: String,
        /// Epsilon, added to the mean square.
        eps: f32,
    },
    /// Add a scaled register to another one, in f32: `register += from * weights[row]` for each token.
    AddScaled {
        /// Register `[1, C, 1, T]` that is read and written.
        register: String,
        /// Register `[1, C, 1, T]` that is scaled and added.
        from: String,
        /// Register `[1, N, 1, T]` of factors.
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

/// Call of a function of a package.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct Run {
    /// Name of the shard whose package is called.
    pub shard: String,
    /// Shards with the same function for other token counts, where each count has its own package.
    #[serde(default, skip_serializing_if = "Vec::is_empty")]
    pub others: Vec<String>,
    /// Unit: the kind of function besides the token count; absent where the shard has one kind.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub unit: Option<String>,
    /// Condition of the call; the call is left out where the condition is false.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub when: Option<When>,
    /// Bindings of the function's inputs, but for [`Run::kept`].
    pub inputs: BTreeMap<String, InputBinding>,
    /// Bindings of the outputs that go into registers.
    pub outputs: BTreeMap<String, OutputBinding>,
    /// Rows that the host keeps for each sequence between calls, by the name of the input that takes them.
    #[serde(default, skip_serializing_if = "BTreeMap::is_empty")]
    pub kept: BTreeMap<String, Kept>,
    /// True if registers go in and out as `[1, 1, T, C]` instead of `[1, C, 1, T]`.
    #[serde(default, skip_serializing_if = "std::ops::Not::not")]
    pub channels_last: bool,
}

/// Rows that the host keeps from one call to the next: a row `[heads, channels]` per token. The input holds the rows
/// of tokens before the call, zeros where there were no tokens. An output `[1, heads, T, channels]` holds the rows of
/// the call's own tokens.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "snake_case", deny_unknown_fields)]
pub enum Kept {
    /// Input `[1, heads, slots, channels]`: the row of each token in its slot of a cache.
    Cache {
        /// Name of the output with the rows of the call's own tokens.
        rows: String,
        /// Name of the input `[1, 1, slots, T]` that is 1 in the slot of each token.
        place: String,
    },
    /// Input `[1, heads, count, channels]`: the rows of the newest tokens, oldest first.
    Newest {
        /// Name of the output with the rows of the call's own tokens.
        rows: String,
        /// Name of the input `[1, 1, slots, T]` that is zero in all slots for tokens that only fill up the call.
        place: String,
        /// Number of tokens whose rows are kept.
        count: usize,
        /// Number of heads.
        heads: usize,
        /// Channels of a head.
        channels: usize,
    },
    /// Input `[1, heads, slots, channels]`: the cache of an assistant's target, of its last layer whose cache has this name. The
    /// function leaves it as it is.
    Lent {
        /// Name of the cache.
        cache: String,
        /// Number of heads, of keys and values together.
        heads: usize,
        /// Channels of a head, filled up to a multiple of 32.
        channels: usize,
    },
}

/// Condition: some element of the rows of a register is not zero.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct When {
    /// Register `[1, C, 1, T]`.
    pub register: String,
    /// Channels that are compared with zero.
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
    /// A register, or some of its channels.
    Register {
        /// Name of the register.
        name: String,
        /// Channels that the function takes; all where absent.
        #[serde(default, skip_serializing_if = "Option::is_none")]
        rows: Option<RowRange>,
        /// True if tokens may be divided by a power of two, where fp16 could not hold their values: the function
        /// normalizes its input, so that the factor cancels out.
        #[serde(default, skip_serializing_if = "std::ops::Not::not")]
        rescale: bool,
    },
    /// A value that the host computes from positions alone.
    Host(HostInput),
}

/// Values that the host computes from positions alone.
#[derive(Clone, Debug, PartialEq, Eq, PartialOrd, Ord, Serialize, Deserialize)]
#[serde(rename_all = "snake_case", deny_unknown_fields)]
pub enum HostInput {
    /// `[1, 1, T, width]`: cosines of the named rope, each frequency twice.
    RopeCos(String),
    /// `[1, 1, T, width]`: sines of the named rope, negated in the first half: rotating is `x * cos + swap_halves(x) * sin`.
    RopeSin(String),
    /// `[1, 1, T, slots]` of the named cache: 0 where a token sees a slot, -30000 where it does not.
    Mask(String),
    /// `[1, slots, 1, T]`: the values of [`HostInput::Mask`], with slots on the channel axis.
    MaskColumns(String),
    /// `[1, 1, slots, T]` of the named cache: 1 in the slot of a token's key and value, else 0.
    Place(String),
    /// `[1, 1, T, slots]`: the values of [`HostInput::Place`], with slots on the last axis.
    PlaceRows(String),
    /// `[1, 1, slots, 1]` of the named cache: 0 in the slots that this call writes, else 1.
    Keep(String),
    /// `[1, 1, 1, slots]`: the values of [`HostInput::Keep`], with slots on the last axis.
    KeepRow(String),
    /// `[1, 1, rows, rows + T]`: selects the newest `rows` rows of the `rows` old and T new ones, by one 1 per row.
    Carry(usize),
}

impl HostInput {
    /// Returns the name of the cache whose slots the input describes; `None` for rotary rows and carries.
    pub fn cache(&self) -> Option<&str> {
        match self {
            HostInput::Mask(name)
            | HostInput::MaskColumns(name)
            | HostInput::Place(name)
            | HostInput::PlaceRows(name)
            | HostInput::Keep(name)
            | HostInput::KeepRow(name) => Some(name),
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
    /// Channels of the register that are written; the whole register where absent.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub rows: Option<RowRange>,
    /// True if the output is added to the register, in f32, instead of replacing it.
    #[serde(default, skip_serializing_if = "std::ops::Not::not")]
    pub accumulate: bool,
}

impl Run {
    /// Returns the names of all packages that the call may run: the shard, then the others.
    pub fn shards(&self) -> impl Iterator<Item = &str> {
        std::iter::once(&self.shard).chain(&self.others).map(String::as_str)
    }

    /// Returns the names of the caches whose slots the call's inputs describe.
    pub fn cache_names(&self) -> impl Iterator<Item = &str> {
        self.inputs.values().filter_map(|binding| match binding {
            InputBinding::Host(input) => input.cache(),
            InputBinding::Register { .. } => None,
        })
    }
}

impl Kept {
    /// Returns the name of the output with the rows of the call's own tokens, and of the input that places tokens in slots; none
    /// where the call adds no rows.
    pub fn added(&self) -> Option<(&str, &str)> {
        match self {
            Kept::Cache { rows, place } | Kept::Newest { rows, place, .. } => Some((rows, place)),
            Kept::Lent { .. } => None,
        }
    }
}
