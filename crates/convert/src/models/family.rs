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
    /// Experts that a token uses.
    pub experts_per_token: usize,
    /// Most positions of a sequence.
    pub positions: usize,
    /// Parameters; a tied embedding counts once.
    pub parameters: u64,
    /// Parameters of one expert.
    pub expert_parameters: u64,
}

impl Sizes {
    /// Returns the parameters that a token uses; a tied embedding counts once, as the head.
    pub fn active_parameters(&self) -> u64 {
        let idle = (self.layers * (self.experts - self.experts_per_token)) as u64;
        self.parameters - idle * self.expert_parameters
    }
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

/// An opened checkpoint of one model family.
pub trait Family: Send + Sync {
    /// Returns the name of the family, for instance `gemma4`.
    fn name(&self) -> &'static str;

    /// Decides packages, compression and the chain.
    ///
    /// # Errors
    /// The options do not fit the model.
    fn plan(&self, options: &PlanOptions) -> Result<Plan>;

    /// Plans like [`Family::plan`], but joins only the layers that `shard` joins and leaves all others in parts.
    /// If `shard` begins in the middle of a layer, the layer's first part has a package of its own.
    ///
    /// # Errors
    /// The options do not fit the model.
    fn plan_around(&self, options: &PlanOptions, shard: &PlannedShard) -> Result<Plan>;

    /// Lowers one function of a shard over weights that are stored already.
    ///
    /// # Errors
    /// The program breaks MIL's rules; a fault of the lowering, not of the input.
    fn lower(&self, shard: &PlannedShard, function: &ShardFunction, stored: &Stored)
    -> Result<BuiltFunction>;

    /// Returns the checked checkpoint.
    fn checked_checkpoint(&self) -> &CheckedCheckpoint;

    /// Reads elements of a tensor, named as in the plan (without the checkpoint's prefix), as f32.
    ///
    /// # Errors
    /// The file cannot be read, or a value is NaN or infinite.
    fn read(&self, tensor: &str, range: Range<u64>, out: &mut [f32]) -> Result<()> {
        self.checked_checkpoint().read(tensor, range, out)
    }

    /// Tells whether attention remembers anything of earlier tokens besides keys and values.
    fn has_history(&self) -> bool {
        false
    }

    /// Returns the kinds that `--quant` stands for when it is not given and the model is not run.
    fn preset(&self) -> Preset;

    /// Returns a hash that changes when the checkpoint's files or its variants do, so that a build does not go on
    /// with another checkpoint's shards.
    fn fingerprint(&self) -> Result<String> {
        self.checked_checkpoint().checkpoint.fingerprint()
    }

    /// Reads the vectors, in f32, that the host steps of a plan with these options name, and those of the parts of
    /// joined layers.
    ///
    /// # Errors
    /// The checkpoint cannot be read.
    fn host_vectors(&self, _options: &PlanOptions) -> Result<BTreeMap<String, Vec<f32>>> {
        Ok(BTreeMap::new())
    }

    /// Returns remarks on the checkpoint's values that a user should know.
    ///
    /// # Errors
    /// The checkpoint cannot be read.
    fn remarks(&self) -> Result<Vec<String>> {
        Ok(Vec::new())
    }

    /// Returns the name of the embedding tensor, `[vocab_size, hidden_size]`.
    fn embedding_tensor(&self) -> &str;

    /// Returns sizes from the configuration, for people.
    fn summary(&self) -> BTreeMap<String, serde_json::Value>;

    /// Returns counts from the configuration: layers, experts, positions, parameters.
    fn sizes(&self) -> Sizes;
}
