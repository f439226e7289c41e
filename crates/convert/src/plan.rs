//! Plan of a build: the packages that a checkpoint becomes, their contents and their compression.

use crate::context_buckets::ContextBuckets;
use crate::form::{FunctionForm, ShardForm, is_default};
use crate::quant::{Groups, MatrixQuant, Quant};
use crate::{Error, Result};
use anemoe_bundle::{Chain, Shard, ShardFunction, ShardKind, TokenCount};
use serde::{Deserialize, Serialize};
use std::collections::BTreeMap;
use std::num::NonZeroUsize;
use std::ops::Range;
use std::path::Path;

/// Options of a plan: kinds of compression, packing of experts, forms of shards, token counts.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
pub struct PlanOptions {
    /// Kind for every matrix that no other option names.
    pub quant: Quant,
    /// Kinds for parts of the model, where they differ.
    pub parts: PartKinds,
    /// Defaults of the family, for parts that no option names.
    #[serde(default)]
    pub defaults: PartKinds,
    /// Rows that share a table, and input channels that share a scale.
    pub groups: Groups,
    /// Experts that one call computes; the default is the largest divisor of a layer's experts up to 16.
    pub experts_per_shard: Option<usize>,
    /// Packages that the experts of a layer are spread over; `experts / ffn_shards` experts each.
    pub ffn_shards: Option<usize>,
    /// Form of the shards.
    #[serde(default, skip_serializing_if = "is_default")]
    pub form: ShardForm,
    /// Forms of sorts of shards, where they differ.
    #[serde(default, skip_serializing_if = "is_default")]
    pub forms: BTreeMap<ShardKind, ShardForm>,
    /// Token counts of one call.
    pub tokens: Vec<TokenCount>,
    /// Positions that the caches hold; the default is 2048, or the model's own limit where that is less.
    pub max_context: Option<usize>,
    /// Most bytes of a package's weights, in MB.
    pub max_shard_mb: u64,
    /// Experts that share a scale, where their kind has one scale per tensor.
    #[serde(default, skip_serializing_if = "ScaleScope::is_matrix")]
    pub scale_scope: ScaleScope,
}

/// Experts that share a scale, where their kind has one scale per tensor.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
pub enum ScaleScope {
    /// None: every matrix of every expert has its own scale.
    #[default]
    Matrix,
    /// All experts of a package: one outlier coarsens the steps of all, as in hand-made ports.
    Bank,
}

impl ScaleScope {
    fn is_matrix(&self) -> bool {
        *self == ScaleScope::Matrix
    }
}

/// Unit of functions of whole layers that also output the logits of their routers, as `layer_1_router_logits`. No
/// plan has this unit: probes use it to see the experts chosen inside a shard.
pub const CHOICES_UNIT: &str = "choices";

/// Prefix of the names of a layer's values and weights, where a package has several layers.
const LAYER_SCOPE: &str = "layer_";

/// Returns the prefix of the names of values and weights of layer `i` of a package: `layer_1_`.
pub fn layer_scope(i: usize) -> String {
    format!("{LAYER_SCOPE}{i}_")
}

/// Names a token count: `t4`, `t1to4`.
pub fn count_name(t: TokenCount) -> String {
    if t.min == t.max { format!("t{}", t.max) } else { format!("t{}to{}", t.min, t.max) }
}

/// Names the package of a shard that takes these token counts alone: `L00.attn.t4`.
pub fn package_name(shard: &str, t: TokenCount) -> String {
    format!("{shard}.{}", count_name(t))
}

/// Returns the prefix of a bank's matrices, from the bank's first expert: `bank_016`.
pub fn bank_name(first: usize) -> String {
    format!("bank_{first:03}")
}

/// Kinds for single parts of the model, where they differ from the kind of the rest.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
pub struct PartKinds {
    /// Attention projections.
    pub attention: Option<Quant>,
    /// Experts.
    pub experts: Option<Quant>,
    /// Dense MLP, which every token uses.
    pub dense_mlp: Option<Quant>,
    /// Router. By default a router of one matrix is fp16, since the matrix is small and its choice depends on small
    /// differences; a router that is a network has the kind of the whole model.
    pub router: Option<Quant>,
    /// Output head.
    pub head: Option<Quant>,
    /// Embedding that the host looks up. By default fp16, since a token reads one row.
    pub embedding: Option<Quant>,
}

impl Default for PlanOptions {
    fn default() -> Self {
        PlanOptions {
            quant: Quant::lut(4),
            parts: PartKinds::default(),
            defaults: PartKinds::default(),
            groups: Groups::default(),
            experts_per_shard: None,
            ffn_shards: None,
            form: ShardForm::default(),
            forms: BTreeMap::new(),
            tokens: vec![TokenCount { min: 1, max: 1 }, TokenCount { min: 64, max: 64 }],
            max_context: None,
            max_shard_mb: 1900,
            scale_scope: ScaleScope::Matrix,
        }
    }
}

/// Experts of a package by default: the pack of the hand-made port (16 of 128).
pub const DEFAULT_EXPERTS_PER_PACKAGE: usize = 16;
/// Cache positions by default: softmax rows up to 2048 wide were seen on the ANE.
pub const DEFAULT_MAX_CONTEXT: usize = 2048;
/// Most weights of a head slice (419 MB in fp16): slices of this size were seen on the ANE.
pub const MAX_HEAD_WEIGHTS: u64 = 400 << 19;
/// Most output channels of a head slice: Core ML's validator names 1 to 65536 channels in the logs of M1 to M3; wider
/// convolutions were seen on the ANE of M4, A18 and A19 only.
pub const MAX_HEAD_ROWS: usize = 65_536;

/// Most rows of a router network that share a table.
const MAX_ROUTER_GROUP: usize = 8;

/// Estimated bytes of a function's program, without what its matrices add. Estimates are a little above what a build
/// takes (a test holds them against a build).
const FUNCTION_PROGRAM_BYTES: u64 = 64 << 10;
/// Estimated bytes that a matrix adds to the program of a function.
const MATRIX_PROGRAM_BYTES: u64 = 2 << 10;

/// Packing of a layer's experts.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Packing {
    /// Experts of one package.
    pub per_package: usize,
    /// Experts of one function; divides `per_package`.
    pub per_call: usize,
}

impl PlanOptions {
    /// Checks the options that do not depend on the model.
    ///
    /// # Errors
    /// [`Kind::Usage`](anemoe_io::Kind::Usage) naming the option.
    pub fn check(&self) -> Result<()> {
        let usage = |text: String| Err(Error::usage(text));
        if self.groups.rows == 0 {
            return usage("--group-size must be at least 1".into());
        }
        if self.groups.block == 0 {
            return usage("--block-size must be at least 1".into());
        }
        if self.tokens.is_empty() {
            return usage("--tokens needs at least one token count".into());
        }
        for (i, t) in self.tokens.iter().enumerate() {
            if t.min == 0 || t.max < t.min || t.max > 4096 {
                return usage(format!("--tokens: {}..{} is not a token count from 1 to 4096", t.min, t.max));
            }
            if i > 0 && self.tokens[i - 1].max >= t.min {
                return usage("--tokens must be ascending and name each count once".into());
            }
        }
        if self.tokens[0].min != 1 {
            return usage("--tokens must contain 1: decoding goes token by token".into());
        }
        if self.max_context == Some(0) {
            return usage("--max-context must be at least 1".into());
        }
        if self.max_shard_mb == 0 {
            return usage("--max-shard-mb must be at least 1".into());
        }
        if self.experts_per_shard.is_some() && self.ffn_shards.is_some() {
            return usage("--experts-per-shard and --ffn-shards say the same thing: give one".into());
        }
        Ok(())
    }

    /// Returns the kind that is wanted for a part of the model, named as in a plan: `router_mlp`.
    pub fn kind(&self, part: &str) -> Quant {
        let p = &self.parts;
        match part {
            "router" => p.router.unwrap_or(Quant::Fp16),
            // A router that is a whole network, not one matrix, has the kind of the whole model.
            "router_mlp" => p.router.unwrap_or(self.quant),
            "embedding" => p.embedding.unwrap_or(Quant::Fp16),
            "attention" => p.attention.or(self.defaults.attention).unwrap_or(self.quant),
            "experts" => p.experts.unwrap_or(self.quant),
            "dense_mlp" => p.dense_mlp.unwrap_or(self.quant),
            "head" => p.head.unwrap_or(self.quant),
            _ => self.quant,
        }
    }

    /// Returns the form of shards of a sort.
    pub fn form_of(&self, kind: ShardKind) -> ShardForm {
        self.forms.get(&kind).copied().unwrap_or(self.form)
    }

    /// Checks the forms for a family whose attention has a history, or none.
    ///
    /// # Errors
    /// [`Kind::Usage`](anemoe_io::Kind::Usage) naming the options that contradict each other.
    pub fn check_forms(&self, has_history: bool) -> Result<()> {
        let mut others = self.forms.iter().filter(|(kind, _)| **kind != ShardKind::Layers);
        if let Some((kind, _)) = others.find(|(_, form)| form.layers_per_shard.is_some()) {
            return Err(Error::usage(format!(
                "[{}]: layers-per-shard is a choice of the sort `layers` alone",
                kind.name()
            )));
        }
        if self.forms.contains_key(&ShardKind::Layers) && self.layers_per_shard().is_none() {
            return Err(Error::usage("[layers]: without layers-per-shard there is no shard of this sort"));
        }
        if self.layers_per_shard().is_some() {
            self.check_form(ShardKind::Layers, has_history)?;
        }
        self.check_form(ShardKind::Attention, has_history)
    }

    /// Checks the form of a sort; an error names the sort's table where a file of forms has one.
    fn check_form(&self, kind: ShardKind, has_history: bool) -> Result<()> {
        let checked = self.form_of(kind).check(has_history);
        checked.map_err(|e| match self.forms.contains_key(&kind) {
            true => Error::usage(format!("[{}]: {}", kind.name(), e.what())),
            false => e,
        })
    }

    /// Returns how many neighbouring layers share a package, at most; none where attention and experts have their own
    /// packages.
    pub fn layers_per_shard(&self) -> Option<NonZeroUsize> {
        self.form_of(ShardKind::Layers).layers_per_shard
    }

    /// Returns the context buckets of each sort of shards that has caches.
    pub fn context_buckets(&self) -> impl Iterator<Item = ContextBuckets> {
        let joined = self.layers_per_shard().map(|_| ShardKind::Layers);
        [Some(ShardKind::Attention), joined]
            .into_iter()
            .flatten()
            .map(|kind| self.form_of(kind).context_buckets)
    }

    /// Returns the compression of a matrix of `rows` x `cols` of a part.
    pub fn resolve(&self, part: &str, rows: usize, cols: usize) -> MatrixQuant {
        MatrixQuant::resolve(self.kind(part), self.groups_of(part), rows, cols)
    }

    /// Returns the wanted group sizes for a part. A router that is a network has tables for 8 rows at most: its size
    /// is nothing beside the experts', and its errors change which experts a token uses.
    pub fn groups_of(&self, part: &str) -> Groups {
        match part {
            "router_mlp" => Groups { rows: self.groups.rows.min(MAX_ROUTER_GROUP), ..self.groups },
            _ => self.groups,
        }
    }

    /// Returns the compression of a kernel of `taps` positions, which share their input channel's block; fp16 where a
    /// block would cut a kernel.
    pub fn resolve_kernel(&self, part: &str, rows: usize, cols: usize, taps: usize) -> MatrixQuant {
        let quant = self.resolve(part, rows, cols);
        match quant.kind.has_blocks() && !quant.group.is_multiple_of(taps) {
            true => MatrixQuant::FP16,
            false => quant,
        }
    }

    /// Packs `experts` experts of a layer into packages and calls, as the options say.
    ///
    /// # Errors
    /// [`Kind::Usage`](anemoe_io::Kind::Usage) when the option does not divide the number of experts.
    pub fn packing(&self, experts: usize) -> Result<Packing> {
        let divides = |option: &str, n: usize| {
            if n == 0 || n > experts || !experts.is_multiple_of(n) {
                Err(Error::usage(format!("{option} {n} does not divide the {experts} experts of a layer")))
            } else {
                Ok(n)
            }
        };
        let default = (1..=DEFAULT_EXPERTS_PER_PACKAGE.min(experts))
            .rev()
            .find(|n| experts.is_multiple_of(*n))
            .unwrap_or(1);
        if let Some(n) = self.ffn_shards {
            let n = experts / divides("--ffn-shards", n)?;
            return Ok(Packing { per_package: n, per_call: n });
        }
        let per_call = match self.experts_per_shard {
            Some(n) => divides("--experts-per-shard", n)?,
            None => default,
        };
        // Fewer experts per call become functions of one package; more make a larger package.
        let per_package = if default.is_multiple_of(per_call) { default } else { per_call };
        Ok(Packing { per_package, per_call })
    }

    /// Returns the positions that the caches hold, for a model that was trained on `limit` positions.
    ///
    /// # Errors
    /// [`Kind::Usage`](anemoe_io::Kind::Usage) when more positions are asked for than `limit`, or a bucket is larger.
    pub fn context(&self, limit: usize) -> Result<usize> {
        let context = match self.max_context {
            Some(n) if n > limit => {
                return Err(Error::usage(format!(
                    "--max-context {n} is more than the model's max_position_embeddings {limit}"
                )));
            }
            Some(n) => n,
            None => DEFAULT_MAX_CONTEXT.min(limit),
        };
        self.context_buckets().try_for_each(|buckets| buckets.check(context))?;
        Ok(context)
    }

    /// Returns the most tokens of one call.
    pub fn max_tokens(&self) -> usize {
        self.tokens.iter().map(|t| t.max).max().unwrap_or(1)
    }
}

/// Plan of a bundle: its packages, their matrices, and the contract of the host.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
pub struct Plan {
    /// Model family.
    pub family: String,
    /// Name of the checkpoint.
    pub source: String,
    /// Options that the plan was made with.
    pub options: PlanOptions,
    /// Packages in the order of their first use.
    pub shards: Vec<PlannedShard>,
    /// Sums over the plan.
    pub totals: Totals,
    /// Compression of the host's embedding.
    pub embedding: MatrixQuant,
    /// Facts of the family that matter for accuracy.
    #[serde(default)]
    pub facts: Vec<String>,
    /// [`Plan::facts`], and each matrix that is compressed otherwise than was asked, with the reason.
    pub notes: Vec<String>,
    /// Contract of the host, without hashes and file sizes, which only a finished build knows.
    pub chain: Chain,
}

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

fn is_all(every: &(usize, usize)) -> bool {
    *every == all()
}

impl VectorPlan {
    /// Makes a vector of one factor per channel of `[1, C, 1, T]`; its shape is `[1, n, 1, 1]`.
    pub fn channels(name: impl Into<String>, tensor: impl Into<String>, n: usize) -> Self {
        VectorPlan { dims: vec![1, n as u64, 1, 1], ..Self::plain(name, tensor) }
    }

    /// Makes a vector of one factor per element of the last axis; its shape is `[1, 1, 1, n]`.
    pub fn last_axis(name: impl Into<String>, tensor: impl Into<String>, n: usize) -> Self {
        VectorPlan { dims: vec![1, 1, 1, n as u64], ..Self::plain(name, tensor) }
    }

    /// Makes a convolution's bias, of shape `[n]`.
    pub fn bias(name: impl Into<String>, tensor: impl Into<String>, n: usize) -> Self {
        VectorPlan { dims: vec![n as u64], ..Self::plain(name, tensor) }
    }

    fn plain(name: impl Into<String>, tensor: impl Into<String>) -> Self {
        VectorPlan { name: name.into(), tensor: tensor.into(), dims: Vec::new(), scale: 1.0, every: all() }
    }

    /// Returns the number of weights.
    pub fn weights(&self) -> u64 {
        self.dims.iter().product()
    }
}

/// Sums over a plan.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
pub struct Totals {
    /// Packages, the head's included.
    pub shards: usize,
    /// Packages of layers.
    pub layer_shards: usize,
    /// Bytes of all weights in packages.
    pub bytes: u64,
    /// Bytes of the embedding on the host.
    pub embedding_bytes: u64,
    /// Parameters of the model; a tied embedding counts once.
    pub params: u64,
    /// Parameters that a token uses: its experts, everything else, and the embedding once, as the head.
    pub active_params_per_token: u64,
    /// Bytes that a token has to read: its experts, everything else and the head.
    pub bytes_per_token: u64,
    /// Experts of a layer.
    pub experts: usize,
    /// Experts that a token uses.
    pub experts_per_token: usize,
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

impl Totals {
    /// Counts the packages' bytes and the bytes per token again.
    pub fn recount(&mut self, shards: &[PlannedShard]) {
        (self.bytes, self.bytes_per_token) = (0, 0);
        for shard in shards {
            let experts: u64 =
                shard.matrices.iter().filter(|m| m.part == "experts").map(MatrixPlan::bytes).sum();
            self.bytes += shard.bytes;
            if !shard.takes_one_token() {
                continue;
            }
            let met = experts * self.experts_per_token as u64 / (self.experts as u64).max(1);
            self.bytes_per_token += shard.bytes - experts + met;
        }
    }
}

/// Largest plan file that is read, in bytes.
const MAX_PLAN_BYTES: u64 = 256 << 20;

impl Plan {
    /// Estimates the bytes of the bundle: packages and the embedding, without the checkpoint's small files.
    pub fn bundle_bytes(&self) -> u64 {
        self.shards.iter().map(PlannedShard::package_bytes).sum::<u64>() + self.totals.embedding_bytes
    }

    /// Fills the fields that follow from shards and options: sums, notes, and how the chain stores the embedding.
    ///
    /// # Errors
    /// [`Kind::Usage`](anemoe_io::Kind::Usage) when a shard is larger than the options allow.
    pub fn complete(&mut self) -> Result<()> {
        let limit = self.options.max_shard_mb.saturating_mul(1_000_000);
        if let Some(s) = self.shards.iter().find(|s| s.bytes > limit) {
            return Err(Error::usage(format!(
                "shard {} would hold {:.1} MB of weights, and --max-shard-mb allows {} MB: choose fewer {} per shard",
                s.name,
                s.bytes as f64 / 1e6,
                self.options.max_shard_mb,
                if s.kind == ShardKind::Layers { "layers, or experts," } else { "experts" }
            )));
        }
        self.totals.recount(&self.shards);
        self.chain.options = serde_json::to_value(&self.options).unwrap_or_default();
        let (rows, cols) = (self.chain.embedding.rows, self.chain.embedding.cols);
        self.embedding = self.options.resolve("embedding", rows, cols);
        self.totals.embedding_bytes = self.embedding.bytes(rows, cols);
        self.chain.embedding.storage = self.embedding.format(rows, cols);
        // A search chooses the kind of each tensor, so no note compares it with a kind that was asked for.
        let searched = self.chain.auto.is_some();
        let mut notes: BTreeMap<String, usize> = BTreeMap::new();
        let mut note = |part: &str, rows: usize, cols: usize, quant: MatrixQuant| {
            if !searched
                && let Some(what) = quant.differs_from(self.options.kind(part), self.options.groups_of(part))
            {
                *notes.entry(format!("{part} [{rows}, {cols}]: {what}")).or_default() += 1;
            }
        };
        for m in self.shards.iter().flat_map(|s| &s.matrices) {
            note(&m.part, m.rows, m.cols, m.quant);
        }
        note("embedding", rows, cols, self.embedding);
        let notes =
            notes.into_iter().map(|(what, n)| if n > 1 { format!("{what} ({n} matrices)") } else { what });
        self.notes = self.facts.iter().cloned().chain(notes).collect();
        Ok(())
    }

    /// Sets the kinds of matrices; a matrix keeps its own kind where `choose` gives none.
    ///
    /// # Errors
    /// Fails like [`Plan::complete`].
    pub fn requantize(&mut self, choose: impl Fn(&MatrixPlan) -> Option<MatrixQuant>) -> Result<()> {
        for shard in &mut self.shards {
            *shard = shard.requantized(&choose);
        }
        self.complete()
    }

    /// Returns the bytes of all weights in packages if none were compressed.
    pub fn fp16_bytes(&self) -> u64 {
        self.shards.iter().map(|s| 2 * s.weights).sum()
    }

    /// Returns the shard named `name`; none where there is no such shard.
    pub fn shard(&self, name: &str) -> Option<&PlannedShard> {
        self.shards.iter().find(|s| s.name == name)
    }

    /// Returns the packages of a shard: its own, or one for each token count where its form keeps them apart,
    /// ascending.
    pub fn packages(&self, shard: &str) -> Vec<&PlannedShard> {
        let is_apart = |s: &PlannedShard| {
            s.form.functions == FunctionForm::Apart
                && s.functions.first().is_some_and(|f| s.name == package_name(shard, f.tokens))
        };
        let is_one = |s: &&PlannedShard| s.name == shard || is_apart(s);
        self.shards.iter().filter(is_one).collect()
    }

    /// Reads a plan from a file that holds [`Plan`]'s JSON form.
    ///
    /// # Errors
    /// The file cannot be read or is not a plan.
    pub fn read(path: &Path) -> Result<Plan> {
        let text = anemoe_io::read_input(path, MAX_PLAN_BYTES).map_err(|e| Error::io(path, e))?;
        anemoe_io::json::parse(&text).map_err(|e| Error::invalid(path, format!("plan: {e}")))
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn packing_follows_the_options() {
        let options =
            |eps, ffn| PlanOptions { experts_per_shard: eps, ffn_shards: ffn, ..Default::default() };
        let packing =
            |eps, ffn, experts| options(eps, ffn).packing(experts).map(|p| (p.per_package, p.per_call));
        assert_eq!(packing(None, None, 128).unwrap(), (16, 16));
        assert_eq!(packing(None, None, 8).unwrap(), (8, 8));
        assert_eq!(packing(None, None, 60).unwrap(), (15, 15));
        assert_eq!(packing(Some(1), None, 128).unwrap(), (16, 1));
        assert_eq!(packing(Some(32), None, 128).unwrap(), (32, 32));
        assert_eq!(packing(None, Some(8), 128).unwrap(), (16, 16));
        assert_eq!(packing(None, Some(2), 128).unwrap(), (64, 64));
        for (eps, ffn) in [(Some(7), None), (Some(0), None), (None, Some(3)), (Some(256), None)] {
            assert!(packing(eps, ffn, 128).is_err());
        }
    }

    #[test]
    fn contradicting_options_are_refused_by_name() {
        let default = PlanOptions::default();
        let t = |min, max| TokenCount { min, max };
        for (options, names) in [
            (PlanOptions { groups: Groups { rows: 0, block: 32 }, ..default.clone() }, "--group-size"),
            (PlanOptions { groups: Groups { rows: 32, block: 0 }, ..default.clone() }, "--block-size"),
            (PlanOptions { tokens: vec![], ..default.clone() }, "--tokens"),
            (PlanOptions { tokens: vec![t(4, 4)], ..default.clone() }, "contain 1"),
            (PlanOptions { tokens: vec![t(1, 1), t(1, 1)], ..default.clone() }, "ascending"),
            (PlanOptions { max_context: Some(0), ..default.clone() }, "--max-context"),
            (PlanOptions { experts_per_shard: Some(1), ffn_shards: Some(8), ..default.clone() }, "give one"),
        ] {
            let err = options.check().unwrap_err().to_string();
            assert!(err.contains(names), "{err}");
        }
        assert!(default.check().is_ok());
        assert!(default.context(512).unwrap() == 512);
        assert!(PlanOptions { max_context: Some(4096), ..default }.context(512).is_err());
    }
}
