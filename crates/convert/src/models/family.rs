//! Interface between the pipeline and a model family.

use super::CheckedCheckpoint;
use crate::Result;
use crate::lower::Stored;
use crate::plan::{PartKinds, Plan, PlanOptions, PlannedShard};
use crate::quant::Quant;
use anemoe_bundle::ShardFunction;
use anemoe_mlpackage::mil::builder::BuiltFunction;
use std::collections::BTreeMap;
use std::ops::Range;

/// Counts of a model.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Sizes {
    /// Layers with experts.
    pub layers: usize,
    /// Experts of a layer.
    pub experts: usize,
    /// Experts that a token meets.
    pub experts_per_token: usize,
    /// Most positions of a sequence.
    pub positions: usize,
    /// Parameters; a tied embedding counts once.
    pub parameters: u64,
    /// Parameters of one expert.
    pub expert_parameters: u64,
}

impl Sizes {
    /// Parameters that a token meets, a tied embedding once, as the head.
    pub fn active_parameters(&self) -> u64 {
        let idle = (self.layers * (self.experts - self.experts_per_token)) as u64;
        self.parameters - idle * self.expert_parameters
    }
}

/// Kinds for a model that is too large to be run whole while it is planned.
#[derive(Clone, Copy, Debug)]
pub struct Preset {
    /// Kind of every part that is not named.
    pub quant: Quant,
    /// Kinds of parts that lose most for their bytes.
    pub parts: PartKinds,
    /// The measurement that speaks for it.
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

/// An opened checkpoint of one model family.
pub trait Family: Send + Sync {
    /// Name of the family, for instance `gemma4`.
    fn name(&self) -> &'static str;

    /// Decides packages, compression and the chain.
    ///
    /// # Errors
    /// The options do not fit the model.
    fn plan(&self, options: &PlanOptions) -> Result<Plan>;

    /// Plans like [`Family::plan`], with every layer in parts but those that `shard` joins: what leads to a shard that begins in
    /// the middle of a layer begins in a package of its own there.
    ///
    /// # Errors
    /// The options do not fit the model.
    fn plan_around(&self, options: &PlanOptions, shard: &PlannedShard) -> Result<Plan>;

    /// Builds one function of a shard over weights that are stored already.
    ///
    /// # Errors
    /// The program breaks MIL's rules; a fault of the lowering, not of the input.
    fn lower(&self, shard: &PlannedShard, function: &ShardFunction, stored: &Stored)
    -> Result<BuiltFunction>;

    /// The checkpoint.
    fn checked_checkpoint(&self) -> &CheckedCheckpoint;

    /// Reads elements of a tensor, named as in the plan (without the checkpoint's prefix), as f32.
    ///
    /// # Errors
    /// The file cannot be read, or a value is NaN or infinite.
    fn read(&self, tensor: &str, range: Range<u64>, out: &mut [f32]) -> Result<()> {
        self.checked_checkpoint().read(tensor, range, out)
    }

    /// Attention remembers something of earlier tokens besides keys and values.
    fn has_history(&self) -> bool {
        false
    }

    /// Kinds that `--quant` stands for when nothing is said and the model is not run.
    fn preset(&self) -> Preset;

    /// Changes when the checkpoint's files do, or the way they are read, so that a build does not go on with another
    /// checkpoint's shards.
    fn fingerprint(&self) -> Result<String> {
        self.checked_checkpoint().checkpoint.fingerprint()
    }

    /// Vectors that the host steps of a plan with these options name, in f32, and those of the parts of joined layers.
    ///
    /// # Errors
    /// The checkpoint cannot be read.
    fn host_vectors(&self, _options: &PlanOptions) -> Result<BTreeMap<String, Vec<f32>>> {
        Ok(BTreeMap::new())
    }

    /// Remarks that a user should know about this checkpoint, found in its values.
    ///
    /// # Errors
    /// The checkpoint cannot be read.
    fn remarks(&self) -> Result<Vec<String>> {
        Ok(Vec::new())
    }

    /// Name of the embedding `[vocab_size, hidden_size]`.
    fn embedding_tensor(&self) -> &str;

    /// Sizes from the configuration, for people.
    fn summary(&self) -> BTreeMap<String, serde_json::Value>;

    /// Counts from the configuration: layers, experts, positions, parameters.
    fn sizes(&self) -> Sizes;
}
