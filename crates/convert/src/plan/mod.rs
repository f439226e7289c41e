//! Plan of a build: the packages that a checkpoint becomes, their contents and their compression.

mod plan_options;
mod planned_shard;
mod shard_names;
mod totals;

use crate::form::FunctionForm;
use crate::quant::MatrixQuant;
use crate::{Error, Result};
use anemoe_bundle::{Chain, ShardKind};
use serde::{Deserialize, Serialize};
use std::collections::BTreeMap;
use std::path::Path;

pub use plan_options::{
    DEFAULT_EXPERTS_PER_PACKAGE, DEFAULT_MAX_CONTEXT, MAX_HEAD_ROWS, MAX_HEAD_WEIGHTS, Packing, PartKinds,
    PlanOptions, ScaleScope,
};
pub use planned_shard::{MatrixPlan, PlannedShard, VectorPlan};
pub use shard_names::{CHOICES_UNIT, bank_name, count_name, layer_scope, package_name};
pub use totals::Totals;

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
        self.embedding = match rows {
            0 => MatrixQuant::FP16,
            _ => self.options.resolve("embedding", rows, cols),
        };
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
        if rows > 0 {
            note("embedding", rows, cols, self.embedding);
        }
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
