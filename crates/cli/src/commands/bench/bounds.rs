//! Bound of each kind of shard in a pass: reading or multiplying.

use super::bench_report::{BoundBy, KindBound};
use anemoe_bundle::ShardKind;
use anemoe_kernels::Pool;
use anemoe_runtime::backend::Counts;
use anemoe_runtime::model::{Model, ShardStats};
use std::collections::BTreeMap;

/// Rounds of a measurement of multiply-adds.
const ROUNDS: usize = 20;
/// Largest bytes per weight that count as indices of 4, 6 and 8 bits: halfway to the next format.
const FORMATS: [(f64, usize); 3] = [(0.63, 4), (0.88, 6), (1.5, 8)];

/// Work of the shards in a pass over `tokens` tokens, averaged over passes.
pub(super) struct PassWork {
    tokens: usize,
    /// Seconds, bytes and multiply-adds by kind.
    kinds: BTreeMap<ShardKind, (f64, f64, f64)>,
}

impl PassWork {
    /// Averages the work since `before` over `passes` passes of `tokens` tokens.
    pub fn since(model: &Model, before: &[ShardStats], tokens: usize, passes: usize) -> PassWork {
        let mut kinds: BTreeMap<ShardKind, (f64, f64, f64)> = BTreeMap::new();
        let n = passes.max(1) as f64;
        for ((now, before), shard) in model.shard_stats().iter().zip(before).zip(&model.chain().shards) {
            let counts: Counts = now.counts - before.counts;
            let kind = kinds.entry(shard.kind).or_default();
            kind.0 += (now.time - before.time).as_secs_f64() / n;
            kind.1 += counts.bytes_read as f64 / n;
            kind.2 += counts.multiply_adds as f64 / n;
        }
        PassWork { tokens, kinds }
    }
}

/// Compares the work of `passes` with the bandwidth, in GB/s, and with multiply-adds measured now on weights in the caches.
pub(super) fn of_kinds(passes: &[PassWork], pool: &Pool, fast: bool, read_gb_s: f64) -> Vec<KindBound> {
    let mut speeds: BTreeMap<(usize, usize), f64> = BTreeMap::new();
    let one = passes.iter().find(|p| p.tokens == 1);
    let mut bounds = Vec::new();
    for pass in passes {
        for (&kind, &(seconds, bytes, multiply_adds)) in &pass.kinds {
            if multiply_adds == 0.0 {
                continue;
            }
            // A pass over one token has one multiply-add for each weight that it reads.
            let (_, read, each) = one.and_then(|p| p.kinds.get(&kind)).copied().unwrap_or_default();
            let bits = format_of(read / each);
            let speed = *speeds.entry((bits, pass.tokens)).or_insert_with(|| {
                anemoe_kernels::measure_multiply_adds(pool, bits, fast, pass.tokens, ROUNDS)
            });
            let (read_ms, multiply_ms) = (bytes / read_gb_s / 1e6, multiply_adds / speed * 1e3);
            bounds.push(KindBound {
                kind: kind.name().into(),
                tokens: pass.tokens,
                ms: seconds * 1e3,
                gb: bytes / 1e9,
                million_multiply_adds: multiply_adds / 1e6,
                read_ms,
                multiply_ms,
                bound: BoundBy::of(seconds * 1e3, read_ms, multiply_ms),
            });
        }
    }
    bounds
}

impl BoundBy {
    /// Returns the bound of a pass of `ms` milliseconds: the longer of reading and multiplying, or `Calls` if both together
    /// take less than half of it.
    fn of(ms: f64, read_ms: f64, multiply_ms: f64) -> BoundBy {
        match () {
            () if read_ms + multiply_ms < ms / 2.0 => BoundBy::Calls,
            () if read_ms >= multiply_ms => BoundBy::Bandwidth,
            () => BoundBy::Arithmetic,
        }
    }
}

/// Returns the bits of a weight whose format takes `bytes` bytes, tables and scales included.
fn format_of(bytes: f64) -> usize {
    FORMATS.iter().find(|(most, _)| bytes <= *most).map_or(16, |f| f.1)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn what_takes_longer_bounds() {
        let pool = Pool::new(1);
        let pass = |tokens, bytes, multiply_adds| PassWork {
            tokens,
            kinds: [(ShardKind::Moe, (1e-3, bytes, multiply_adds))].into(),
        };
        let passes = [pass(1, 5e8, 1e9), pass(4, 5e8, 4e9)];
        // Reading takes 50 s at the first bandwidth and next to nothing at the second. The passes took 1 ms, so calls never
        // bound them.
        for (gb_s, bound) in [(0.01, "bandwidth"), (1e9, "arithmetic")] {
            let bounds = of_kinds(&passes, &pool, false, gb_s);
            assert_eq!(bounds.len(), 2);
            assert!(bounds.iter().all(|b| b.bound.name() == bound && b.multiply_ms > 0.0));
            assert_eq!((bounds[1].tokens, bounds[1].million_multiply_adds), (4, 4e3));
        }
        assert_eq!([0.53, 0.8, 1.06, 2.0].map(format_of), [4, 6, 8, 16]);
        for (ms, read, multiply, bound) in
            [(10.0, 2.0, 2.0, "calls"), (10.0, 4.0, 3.0, "bandwidth"), (10.0, 1.0, 9.0, "arithmetic")]
        {
            assert_eq!(BoundBy::of(ms, read, multiply).name(), bound);
        }
    }
}
