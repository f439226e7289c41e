//! Options of a plan, and what follows from them for a model.

use crate::context_buckets::ContextBuckets;
use crate::form::{ExpertForm, ShardForm, is_default};
use crate::quant::{Groups, MatrixQuant, Quant};
use crate::{Error, Result};
use anemoe_bundle::{IndexBits, ShardKind, TokenCount};
use serde::{Deserialize, Serialize};
use std::collections::BTreeMap;
use std::num::NonZeroUsize;

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
    /// True to store the rows of a compressed head in the order of their norms, so that rows which share a table are
    /// alike; the host puts the logits back into the order of the ids.
    #[serde(default, skip_serializing_if = "std::ops::Not::not")]
    pub sort_head: bool,
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

impl PartKinds {
    /// No part with a kind of its own.
    pub const NONE: PartKinds = PartKinds {
        attention: None,
        experts: None,
        dense_mlp: None,
        router: None,
        head: None,
        embedding: None,
    };
}

impl Default for PlanOptions {
    fn default() -> Self {
        PlanOptions {
            quant: Quant::lut(IndexBits::Four),
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
            sort_head: false,
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

    /// Returns the option that asks for something about experts; none where there is none.
    pub fn option_of_experts(&self) -> Option<&'static str> {
        let forms = || self.forms.values().chain([&self.form]);
        let asked = [
            ("--experts-per-shard", self.experts_per_shard.is_some()),
            ("--ffn-shards", self.ffn_shards.is_some()),
            ("--expert-quant", self.parts.experts.is_some()),
            ("--router-quant", self.parts.router.is_some()),
            ("--experts", forms().any(|form| form.experts != ExpertForm::default())),
        ];
        asked.into_iter().find_map(|(option, is_asked)| is_asked.then_some(option))
    }

    /// Checks the forms for a family whose attention has a history, or none, and which has packages of whole layers
    /// without being asked for them, or none.
    ///
    /// # Errors
    /// [`Kind::Usage`](anemoe_io::Kind::Usage) naming the options that contradict each other.
    pub fn check_forms(&self, has_history: bool, has_layers: bool) -> Result<()> {
        let mut others = self.forms.iter().filter(|(kind, _)| **kind != ShardKind::Layers);
        if let Some((kind, _)) = others.find(|(_, form)| form.layers_per_shard.is_some()) {
            return Err(Error::usage(format!(
                "[{}]: layers-per-shard is a choice of the sort `layers` alone",
                kind.name()
            )));
        }
        let is_joined = self.layers_per_shard().is_some();
        if self.forms.contains_key(&ShardKind::Layers) && !is_joined && !has_layers {
            return Err(Error::usage("[layers]: without layers-per-shard there is no shard of this sort"));
        }
        if is_joined || has_layers {
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
