//! Sums over a plan.

use super::planned_shard::{MatrixPlan, PlannedShard};
use serde::{Deserialize, Serialize};

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
