//! Description of a decoder: what the network computes, layer by layer. Plans, programs, reference runs and synthetic
//! weights follow from it; none of them knows a family.
//!
//! ```text
//! stream  s = embedding_scale * E[token]
//! layer   s = s + P(attention(N(s)))          P: a norm where `norms` is Around, else nothing
//!         s = s + P(feed_forward(N(s)))       then times the layer's scalar where it has one
//! head    logits = softcap(W N(s))
//! ```
//! In an assistant, `s = W' [E'[token]; s']` with embedding and last hidden state of another model, and `W" N(s)` is the next `s'`.
//! With [`Residual::Affine`] each sum is `(branch + b) g + (s + b') g'` per channel instead. N is the RMS norm
//! `x / sqrt(mean(x^2) + eps)`, times `norm_offset + w`.

use crate::lower::Activation;
use crate::plan::PartKinds;
use crate::quant::Quant;
use anemoe_bundle::{Assistant, Centroids, Rope};
use serde_json::Value;
use std::collections::BTreeMap;

/// Description of a decoder.
#[derive(Clone, Debug)]
pub struct Decoder {
    /// Name of the family.
    pub family: &'static str,
    /// Width of the residual stream.
    pub hidden: usize,
    /// Tokens of the vocabulary.
    pub vocab: usize,
    /// Positions that the model was made for.
    pub positions: usize,
    /// Epsilon of every RMS norm.
    pub eps: f32,
    /// Number that is added to a norm's stored weights.
    pub norm_offset: f32,
    /// Norms of a layer's branches.
    pub norms: Norms,
    /// Joining of a branch with the stream.
    pub residual: Residual,
    /// Factor of the embedding.
    pub embedding_scale: f32,
    /// Number that packages divide the stream by, so that fp16 holds it; 1 where the stream is small enough.
    pub stream_unit: f32,
    /// True if the embedding's matrix is the head's, too.
    pub is_tied: bool,
    /// True if the weights are rotated, see [`super::rotate`]: then the head's matrix is another one than the embedding's.
    pub is_rotated: bool,
    /// Cap of the logits, `cap * tanh(logits / cap)`.
    pub softcap: Option<f32>,
    /// Token that starts a text.
    pub bos: Option<u32>,
    /// Tokens that end a text.
    pub eos: Vec<u32>,
    /// Layers.
    pub layers: Vec<Layer>,
    /// Ties to the model that this one drafts for, where it is an assistant.
    pub assistant: Option<Assistant>,
    /// Names of tensors, by role, where they are not those of [`super::tensor_roles`].
    pub names: &'static [(&'static str, &'static str)],
    /// Prefixes that a checkpoint's names may have.
    pub prefixes: &'static [&'static str],
    /// Kinds for a model that is too large to be run while it is planned.
    pub preset: Preset,
    /// Kind of attention where the options name none and ask for fewer than 8 bits, with the reason.
    pub attention_kind: Option<(Quant, &'static str)>,
    /// Names and values of the choices of [`Variants`](crate::variants::Variants) that programs depend on.
    pub readings: BTreeMap<String, String>,
    /// Sizes for people, by configuration key.
    pub summary: BTreeMap<String, Value>,
}

/// Kinds for a model that is too large to be run whole while it is planned.
#[derive(Clone, Copy, Debug)]
pub struct Preset {
    /// Kind of every part that `parts` does not name.
    pub quant: Quant,
    /// Kinds of the parts whose compression costs most for the bytes that it saves.
    pub parts: PartKinds,
    /// Measurement that speaks for the preset.
    pub reason: &'static str,
}

impl std::fmt::Display for Preset {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        let p = &self.parts;
        let parts =
            [("attention", p.attention), ("experts", p.experts), ("mlp", p.dense_mlp), ("head", p.head)];
        write!(f, "kinds: the family's preset, {}", self.quant)?;
        for (part, kind) in parts.into_iter().filter_map(|(part, kind)| Some((part, kind?))) {
            write!(f, ", {part} {kind}")?;
        }
        write!(f, ": {}", self.reason)
    }
}

/// Norms of a layer's branches.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Norms {
    /// Before each branch.
    Before,
    /// Before and after each branch. Where a dense MLP and experts lie side by side, each has its own norms, and their
    /// sum has one more.
    Around,
}

/// Joining of a branch with the stream.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Residual {
    /// `s + branch`.
    Plain,
    /// `s + branch`; the layer's end times one number.
    LayerScalar,
    /// `(branch + b) g + (s + b') g'` per channel; the embedding is shifted and scaled, too. The host keeps the stream,
    /// in f32.
    Affine,
}

/// A layer.
#[derive(Clone, Debug, PartialEq)]
pub struct Layer {
    /// Attention.
    pub attention: Attention,
    /// Function that gates the dense MLP and the experts.
    pub activation: Activation,
    /// Width of the dense MLP.
    pub dense: Option<usize>,
    /// Experts.
    pub experts: Option<ExpertLayer>,
}

/// Attention of a layer.
#[derive(Clone, Debug, PartialEq)]
pub struct Attention {
    /// Name of the layer's rope and cache, which layers of one kind share.
    pub kind: &'static str,
    /// Query heads.
    pub heads: usize,
    /// Key/value heads; divides `heads`.
    pub kv_heads: usize,
    /// Channels of a head.
    pub head_dim: usize,
    /// Newest positions that a token sees, its own included; all where absent.
    pub window: Option<usize>,
    /// Rotation: channels that turn, and radians per position.
    pub rope: Rope,
    /// Factor of the scores.
    pub scale: f32,
    /// Way from the stream to queries, keys and values.
    pub projection: QkvProjection,
    /// True if the output projection has a bias.
    pub has_output_bias: bool,
    /// True if each head has a sink: a score that takes part in the softmax and has no value.
    pub has_sinks: bool,
}

/// Way from the normalized stream to queries, keys and values.
#[derive(Clone, Copy, Debug, PartialEq)]
pub enum QkvProjection {
    /// Products with matrices.
    Direct {
        /// Norm of queries and keys before the rotation.
        norm: HeadNorm,
        /// Source of the values.
        values: ValueSource,
        /// True if queries, keys and values have biases.
        has_bias: bool,
    },
    /// Products, then two short causal convolutions over queries and keys, whose result has its length replaced by
    /// `sqrt(head_dim)`, for keys times a temperature; half of the values are those of the token before (compressed
    /// convolutional attention).
    Convolved,
    /// A product for queries, each head normed before the rotation. Keys and values are those of another model: of its last layer
    /// of the same kind.
    Lent,
}

/// Norm of queries and keys.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum HeadNorm {
    /// None.
    None,
    /// RMS norm of each head, all with the same weights.
    PerHead,
    /// RMS norm over all heads at once.
    WholeRow,
}

/// Source of the values.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum ValueSource {
    /// A matrix of their own.
    Own,
    /// A matrix of their own, then an RMS norm of each head without weights.
    OwnNormed,
    /// The keys before norm and rotation, then an RMS norm of each head without weights.
    KeysNormed,
}

/// Experts of a layer.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct ExpertLayer {
    /// Number of experts.
    pub count: usize,
    /// Experts that a token uses.
    pub active: usize,
    /// Width of an expert.
    pub width: usize,
    /// True if an expert's products have biases.
    pub has_bias: bool,
    /// Choice of experts.
    pub router: RouterKind,
}

/// Choice of experts.
#[derive(Clone, Copy, Debug, PartialEq)]
pub enum RouterKind {
    /// One matrix on the normalized stream. The weights are the softmax over the chosen logits where `renormalizes`,
    /// else over all.
    Linear {
        /// True if the logits have a bias.
        has_bias: bool,
        /// True if the weights of the chosen experts add up to 1.
        renormalizes: bool,
        /// True if the router norms the stream itself, times a vector and `1 / sqrt(hidden)`, and each expert's weight
        /// has a factor.
        is_scaled: bool,
    },
    /// A network of three matrices whose state adds that of the layer before, times a vector. One class more than
    /// experts; biases count for the choice alone; the weight is the probability among all classes.
    Network {
        /// Width of the network.
        width: usize,
        /// True if the class behind the last expert gives its input times the probability; else it gives nothing.
        passes_input: bool,
    },
}

impl ExpertLayer {
    /// Returns the number of classes that the router chooses from.
    pub fn classes(&self) -> usize {
        self.count + usize::from(matches!(self.router, RouterKind::Network { .. }))
    }
}

impl Attention {
    /// Returns the channels of all query heads.
    pub fn q_size(&self) -> usize {
        self.heads * self.head_dim
    }

    /// Returns the channels of all key heads.
    pub fn kv_size(&self) -> usize {
        self.kv_heads * self.head_dim
    }
}

impl Decoder {
    /// Tells whether attention remembers anything of earlier tokens besides keys and values.
    pub fn has_history(&self) -> bool {
        self.layers.iter().any(|l| l.attention.projection == QkvProjection::Convolved)
    }

    /// Returns the layers' experts, with the number of each layer that has some.
    pub fn routed(&self) -> impl Iterator<Item = (usize, &ExpertLayer)> {
        self.layers.iter().enumerate().filter_map(|(i, l)| Some((i, l.experts.as_ref()?)))
    }

    /// Returns the experts of the first layer that has some; all such layers have the same.
    pub fn experts(&self) -> Option<&ExpertLayer> {
        self.routed().next().map(|(_, experts)| experts)
    }

    /// Returns the groups of tokens of an assistant whose head computes only those of the best groups.
    pub fn centroids(&self) -> Option<Centroids> {
        self.assistant.as_ref()?.centroids
    }

    /// Tells whether the head has a matrix of its own.
    pub fn has_own_head(&self) -> bool {
        !self.is_tied || self.is_rotated
    }

    /// Tells whether any layer has a dense MLP.
    pub fn has_dense(&self) -> bool {
        self.layers.iter().any(|l| l.dense.is_some())
    }
}
