//! Shard of a plan: its matrices and vectors, their compression, and its functions.

use super::shard_names::LAYER_SCOPE;
use crate::form::{ShardForm, is_default};
use crate::quant::MatrixQuant;
use anemoe_bundle::{Shard, ShardFunction, ShardKind};
use serde::{Deserialize, Serialize};
use std::collections::BTreeMap;
use std::ops::Range;

/// Estimated bytes of a function's program, without what its matrices add. Estimates are a little above what a build
/// takes (a test holds them against a build).
const FUNCTION_PROGRAM_BYTES: u64 = 64 << 10;
/// Estimated bytes that a matrix adds to the program of a function.
const MATRIX_PROGRAM_BYTES: u64 = 2 << 10;

/// One package.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
pub struct PlannedShard {
    /// Name, for instance `L00.ffn.p0of8`.
    pub name: String,
    /// Sort of shard: the part of the model that it computes.
    pub kind: ShardKind,
    /// Layer, from 0; the first of several layers; absent for the head.
    pub layer: Option<usize>,
    /// Last layer, where the shard has parts of several.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub last_layer: Option<usize>,
    /// Functions.
    pub functions: Vec<ShardFunction>,
    /// Kinds in use, by part of the model.
    pub quant: BTreeMap<String, String>,
    /// Number of weights, vectors included.
    pub weights: u64,
    /// Bytes of the shard's weights: matrices, tables and fp16 vectors.
    pub bytes: u64,
    /// Matrices in the order in which they are stored.
    pub matrices: Vec<MatrixPlan>,
    /// Vectors in the order in which they are stored, behind the matrices.
    pub vectors: Vec<VectorPlan>,
    /// Size n of the triangle `[1, 1, n, n]` that is stored behind the vectors, where the package chooses experts; see
    /// [`crate::lower::TRIANGLE`].
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub triangle: Option<usize>,
    /// Experts, as first and count.
    pub experts: Option<(usize, usize)>,
    /// Experts of one call.
    pub experts_per_call: Option<usize>,
    /// Slots of the cache.
    pub cache_slots: Option<usize>,
    /// Slots of caches that another model lends, by the kind of their layers.
    #[serde(default, skip_serializing_if = "BTreeMap::is_empty")]
    pub lent_slots: BTreeMap<String, usize>,
    /// Rows of the vocabulary, as first and count.
    pub vocab_rows: Option<(usize, usize)>,
    /// Form of the shard's program.
    #[serde(default, skip_serializing_if = "is_default")]
    pub form: ShardForm,
}

/// One matrix of a package.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
pub struct MatrixPlan {
    /// Name in the program, for instance `q_proj` or `expert_003_down_proj`.
    pub name: String,
    /// Part of the model, for instance `attention`.
    pub part: String,
    /// Checkpoint tensor, without the checkpoint's prefix.
    pub tensor: String,
    /// First element of the matrix in the tensor.
    pub offset: u64,
    /// Output channels.
    pub rows: usize,
    /// Input channels, times the positions of the kernel.
    pub cols: usize,
    /// Positions of the kernel, along the last axis.
    #[serde(default = "one", skip_serializing_if = "is_one")]
    pub taps: usize,
    /// True if the matrix shares its scale with the package's other matrices of the same tensor, see
    /// [`ScaleScope::Bank`].
    #[serde(default, skip_serializing_if = "std::ops::Not::not")]
    pub bank: bool,
    /// Compression.
    pub quant: MatrixQuant,
}

fn one() -> usize {
    1
}

fn is_one(n: &usize) -> bool {
    *n == 1
}

impl MatrixPlan {
    /// Returns the shape of the convolution's weight, `[rows, cols / taps, 1, taps]`.
    pub fn dims(&self) -> [u64; 4] {
        [self.rows as u64, (self.cols / self.taps) as u64, 1, self.taps as u64]
    }

    /// Returns the bytes as stored, tables and scales included.
    pub fn bytes(&self) -> u64 {
        self.quant.bytes(self.rows, self.cols)
    }

    /// Returns the number of weights.
    pub fn weights(&self) -> u64 {
        self.rows as u64 * self.cols as u64
    }

    /// Returns the expert that the matrix belongs to, from its name: `expert_003_down_proj` gives 3.
    pub fn expert(&self) -> Option<usize> {
        // A package of several layers puts the layer's prefix before: `layer_1_expert_003_down_proj`.
        let behind = self.name.strip_prefix(LAYER_SCOPE).and_then(|rest| rest.split_once('_'));
        let own = behind.map_or(self.name.as_str(), |(_, own)| own);
        own.strip_prefix("expert_")?.split('_').next()?.parse().ok()
    }

    /// Returns the layer that the matrix belongs to, from the name of its tensor.
    pub fn layer(&self) -> Option<usize> {
        self.tensor.strip_prefix("layers.")?.split('.').next()?.parse().ok()
    }
}

/// One vector of a package, always fp16.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
pub struct VectorPlan {
    /// Name in the program, for instance `input_norm_weight`.
    pub name: String,
    /// Checkpoint tensor, without the checkpoint's prefix.
    pub tensor: String,
    /// Shape in the program; its product is the number of elements that are taken.
    pub dims: Vec<u64>,
    /// First element that is taken.
    #[serde(default, skip_serializing_if = "is_zero")]
    pub start: u64,
    /// Number that is added in f32 before the product with `scale`.
    #[serde(default, skip_serializing_if = "is_nothing")]
    pub offset: f32,
    /// Factor, multiplied in f32 before rounding to fp16.
    pub scale: f32,
    /// Elements that are taken: (i, n) takes number `i` of every `n` neighbours, (0, 1) all, (1, 2) every
    /// second one.
    #[serde(default = "all", skip_serializing_if = "is_all")]
    pub every: (usize, usize),
}

fn all() -> (usize, usize) {
    (0, 1)
}

fn is_zero(start: &u64) -> bool {
    *start == 0
}

fn is_nothing(offset: &f32) -> bool {
    *offset == 0.0
}

fn is_all(every: &(usize, usize)) -> bool {
    *every == all()
}

impl VectorPlan {
    /// Makes a vector of one factor per channel of `[1, C, 1, T]`; its shape is `[1, n, 1, 1]`.
    pub fn channels(name: impl Into<String>, tensor: impl Into<String>, n: usize) -> Self {
        VectorPlan { dims: vec![1, n as u64, 1, 1], ..Self::plain(name, tensor) }
    }

    /// Makes a convolution's bias, of shape `[n]`.
    pub fn bias(name: impl Into<String>, tensor: impl Into<String>, n: usize) -> Self {
        VectorPlan { dims: vec![n as u64], ..Self::plain(name, tensor) }
    }

    fn plain(name: impl Into<String>, tensor: impl Into<String>) -> Self {
        let (name, tensor) = (name.into(), tensor.into());
        VectorPlan { name, tensor, dims: Vec::new(), start: 0, offset: 0.0, scale: 1.0, every: all() }
    }

    /// Returns the number of weights.
    pub fn weights(&self) -> u64 {
        self.dims.iter().product()
    }
}

impl PlannedShard {
    /// Makes a shard, with the counts and kinds that follow from its matrices and vectors.
    pub fn new(
        name: String,
        kind: ShardKind,
        layer: Option<usize>,
        matrices: Vec<MatrixPlan>,
        vectors: Vec<VectorPlan>,
    ) -> Self {
        let mut shard = PlannedShard {
            name,
            kind,
            layer,
            last_layer: None,
            functions: Vec::new(),
            quant: BTreeMap::new(),
            weights: 0,
            bytes: 0,
            matrices,
            vectors,
            triangle: None,
            experts: None,
            experts_per_call: None,
            cache_slots: None,
            lent_slots: BTreeMap::new(),
            vocab_rows: None,
            form: ShardForm::default(),
        };
        shard.recount();
        shard
    }

    /// Returns the path of the shard's package in a bundle.
    pub fn package_file(&self) -> String {
        format!("{}/{}.mlpackage", anemoe_bundle::SHARDS_DIR, self.name)
    }

    /// Makes the shard's entry of a chain, without the hash and the errors that only a finished package has.
    pub fn chain_entry(&self) -> Shard {
        Shard {
            name: self.name.clone(),
            file: self.package_file(),
            kind: self.kind,
            layer: self.layer,
            last_layer: self.last_layer,
            functions: self.functions.clone(),
            quant: self.quant.clone(),
            weights: self.weights,
            bytes: self.bytes,
            sha256: String::new(),
            min_weight_cosine: 1.0,
            output_error: 0.0,
        }
    }

    /// Returns the layers of which the shard joins parts; none for other sorts than [`ShardKind::Layers`].
    pub fn joined_layers(&self) -> Option<Range<usize>> {
        let first = self.layer.filter(|_| self.kind == ShardKind::Layers)?;
        Some(first..self.last_layer.unwrap_or(first) + 1)
    }

    /// Tells whether the shard has a function for a single token. Functions for other counts may be in a package of
    /// their own, with the same weights.
    pub fn takes_one_token(&self) -> bool {
        self.functions.iter().any(|f| f.tokens.min == 1)
    }

    /// Returns the same shard without compression.
    #[must_use]
    pub fn in_fp16(&self) -> PlannedShard {
        self.requantized(|_| Some(MatrixQuant::FP16))
    }

    /// Returns the same shard with other kinds; a matrix keeps its own kind where `choose` gives none.
    #[must_use]
    pub fn requantized(&self, choose: impl Fn(&MatrixPlan) -> Option<MatrixQuant>) -> PlannedShard {
        let mut shard = self.clone();
        for m in &mut shard.matrices {
            m.quant = choose(m).unwrap_or(m.quant);
        }
        shard.recount();
        shard
    }

    /// Returns a text that shards of one type share: what a gate finds in one of them holds for all.
    pub fn signature(&self) -> String {
        let matrices: Vec<_> =
            self.matrices.iter().map(|m| (&m.part, m.rows, m.cols, m.taps, m.quant)).collect();
        let vectors: Vec<_> = self.vectors.iter().map(|v| &v.dims).collect();
        let tokens: Vec<_> = self.functions.iter().map(|f| (f.tokens, f.context)).collect();
        format!("{:?} {:?} {tokens:?} {matrices:?} {vectors:?}", self.kind, self.cache_slots)
    }

    /// Estimates the bytes of the shard's package: weights, and the program of each function.
    pub fn package_bytes(&self) -> u64 {
        let per_matrix =
            self.matrices.len() as u64 / self.functions.len().max(1) as u64 * MATRIX_PROGRAM_BYTES;
        self.bytes + self.functions.len() as u64 * (FUNCTION_PROGRAM_BYTES + per_matrix)
    }

    /// Counts weights and bytes and lists the kinds again, after a change of a matrix.
    fn recount(&mut self) {
        let vector_weights: u64 = self.vectors.iter().map(VectorPlan::weights).sum();
        self.weights = vector_weights + self.matrices.iter().map(MatrixPlan::weights).sum::<u64>();
        self.bytes = 2 * vector_weights + self.matrices.iter().map(MatrixPlan::bytes).sum::<u64>();
        self.quant.clear();
        for m in &self.matrices {
            let kinds = self.quant.entry(m.part.clone()).or_default();
            let kind = m.quant.to_string();
            if !kinds.split(", ").any(|k| k == kind) {
                if !kinds.is_empty() {
                    kinds.push_str(", ");
                }
                kinds.push_str(&kind);
            }
        }
    }
}
