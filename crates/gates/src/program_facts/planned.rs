//! Programs of a plan before it is built, lowered without weights: one per type of shard.

use super::analyze::facts;
use super::graph::PackageFacts;
use anemoe_convert::models::Family;
use anemoe_convert::plan::{Plan, PlannedShard};
use anemoe_convert::shard_program::lower_without_weights;
use rayon::prelude::*;
use std::collections::BTreeMap;
use std::sync::Arc;

/// Facts of the programs of a plan's shards.
pub struct PlannedPrograms {
    /// Facts by type of shard.
    types: Vec<Arc<PackageFacts>>,
    /// Index in `types`, by shard.
    of_shard: Vec<usize>,
}

impl PlannedPrograms {
    /// Lowers the first shard of each type of a plan.
    ///
    /// # Errors
    /// A shard cannot be lowered.
    pub fn lower(family: &Family, plan: &Plan) -> crate::Result<Self> {
        let mut known: BTreeMap<String, usize> = BTreeMap::new();
        let mut first: Vec<&PlannedShard> = Vec::new();
        let of_type = |shard| {
            *known.entry(PlannedShard::signature(shard)).or_insert_with(|| {
                first.push(shard);
                first.len() - 1
            })
        };
        let of_shard = plan.shards.iter().map(of_type).collect();
        let lowered =
            first.into_par_iter().map(|shard| Ok(Arc::new(facts(&lower_without_weights(family, shard)?))));
        Ok(PlannedPrograms { types: lowered.collect::<crate::Result<_>>()?, of_shard })
    }

    /// Returns the facts of each type of shard, in the order of their first shards.
    pub fn types(&self) -> &[Arc<PackageFacts>] {
        &self.types
    }

    /// Returns the index of each shard's type, in the order of the plan.
    pub fn of_shards(&self) -> &[usize] {
        &self.of_shard
    }

    /// Returns the facts of each shard, in the order of the plan.
    pub fn of_each(&self) -> impl Iterator<Item = &Arc<PackageFacts>> {
        self.of_shard.iter().map(|&i| &self.types[i])
    }
}
