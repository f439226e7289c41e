//! Measures the speed of a model: prompts, decoding, batches, passes over drafts.

mod draft_passes;
mod measure;
mod speeds;

pub use measure::BenchTokens;
pub use speeds::{BatchSpeed, BenchOptions, DecodeSpeed, DraftPass, DraftedSpeed, PrefillSpeed, Speeds};

use crate::cpu::Products;
use crate::model::Model;
use crate::shard_work::{WorkParts, bounds};
use anemoe_kernels::Pool;
use measure::Bench;

impl BenchOptions {
    /// Measures a model, whose weights are in memory. `products` is its arithmetic; none if the CPU does not run it. `tick` is called after each run.
    ///
    /// # Errors
    /// The backend fails.
    pub fn measure(
        &self,
        model: &Model,
        tokens: BenchTokens,
        products: Option<Products>,
        read_gb_s: f64,
        tick: &dyn Fn(),
    ) -> crate::Result<Speeds> {
        let pool = Pool::global();
        let sequence = model.sequence();
        let mut bench =
            Bench { args: self, model, sequence, tokens, pool, tick, parts: None, passes: Vec::new() };
        let decode = bench.decodes()?;
        let batches = bench.batches()?;
        let verify = bench.verify()?;
        let drafts = bench.drafts()?;
        let lengths = self.prefill.iter().filter(|&&n| n > 0);
        let prefill = lengths.map(|&n| bench.prefill(n)).collect::<crate::Result<_>>()?;
        let WorkParts { kinds, shards, ops } = bench.parts.unwrap_or_default();
        let bounds =
            products.map_or_else(Vec::new, |products| bounds(&bench.passes, pool, products, read_gb_s));
        Ok(Speeds { prefill, decode, batches, verify, drafts, kinds, bounds, shards, ops })
    }
}
