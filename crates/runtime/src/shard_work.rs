//! Measures the work and time of a model's shards, and finds what bounds them.

use crate::backend::Counts;
use crate::cpu::Products;
use crate::model::{Model, ShardStats};
use anemoe_kernels::{IndexBits, Pool};
use serde::Serialize;
use std::collections::BTreeMap;

/// Rounds of a measurement of multiply-adds.
const ROUNDS: usize = 20;
/// Largest bytes per weight that count as indices of 4, 6 and 8 bits: halfway to the next format.
const FORMATS: [(f64, IndexBits); 3] =
    [(0.63, IndexBits::Four), (0.88, IndexBits::Six), (1.5, IndexBits::Eight)];

/// Work and time of a shard, or of all shards of a kind, for a token or a pass.
#[derive(Clone, Debug, Serialize)]
pub struct WorkPart {
    /// Name of the shard or the kind.
    pub name: String,
    /// Number of calls, of all tokens.
    pub calls: u64,
    /// Milliseconds.
    pub ms_per_token: f64,
    /// Share of the time of all shards.
    pub share: f64,
    /// Gigabytes read.
    pub gb_per_token: f64,
    /// Gigabytes read per second.
    pub gb_s: f64,
    /// Millions of multiply-adds by weights, keys and values; absent if they are not counted.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub million_multiply_adds_per_token: Option<f64>,
}

/// Time of the operations of one type in the shards of one kind.
#[derive(Clone, Debug, Serialize)]
pub struct OpPart {
    /// Kind of the shards, and type of the operation.
    pub op: String,
    /// Milliseconds.
    pub ms_per_token: f64,
    /// Share of the time of all shards.
    pub share: f64,
}

/// Parts of a model's work.
#[derive(Clone, Debug, Default)]
pub struct WorkParts {
    /// Shards of one kind together.
    pub kinds: Vec<WorkPart>,
    /// Single shards.
    pub shards: Vec<WorkPart>,
    /// Operations, the longest first, where the backend measures them.
    pub ops: Vec<OpPart>,
}

/// Work of a model's shards since a moment.
pub struct ShardWork<'a> {
    model: &'a Model,
    before: Vec<ShardStats>,
}

impl ShardWork<'_> {
    /// Begins to count.
    pub fn begin(model: &Model) -> ShardWork<'_> {
        ShardWork { model, before: model.shard_stats() }
    }

    /// Counts the bytes that were read.
    pub fn bytes_read(&self) -> u64 {
        let all = |stats: &[ShardStats]| stats.iter().map(|s| s.counts.bytes_read).sum::<u64>();
        all(&self.model.shard_stats()) - all(&self.before)
    }

    /// Returns the mean number of different experts that a layer ran in each of `passes` passes, over layers with experts.
    pub fn distinct_experts(&self, passes: usize) -> Option<f64> {
        let mut layers = BTreeMap::<Option<usize>, u64>::new();
        let after = self.model.shard_stats();
        for ((now, before), shard) in after.iter().zip(&self.before).zip(&self.model.chain().shards) {
            let ran = now.counts.experts - before.counts.experts;
            if ran > 0 {
                *layers.entry(shard.layer).or_default() += ran;
            }
        }
        let all: u64 = layers.values().sum();
        (passes > 0 && !layers.is_empty()).then(|| all as f64 / (layers.len() * passes) as f64)
    }

    /// Divides the work among kinds of shards, shards and operations, per token of `tokens`.
    pub fn parts(&self, tokens: usize) -> WorkParts {
        let after = self.model.shard_stats();
        let seconds = |(now, before): (&ShardStats, &ShardStats)| (now.time - before.time).as_secs_f64();
        let all: f64 = after.iter().zip(&self.before).map(seconds).sum();
        let share = |seconds: f64| if all > 0.0 { seconds / all } else { 0.0 };
        let n = tokens.max(1) as f64;
        let part = |name: &str, calls: u64, seconds: f64, counts: Counts| WorkPart {
            name: name.into(),
            calls,
            ms_per_token: seconds / n * 1e3,
            share: share(seconds),
            gb_per_token: counts.bytes_read as f64 / n / 1e9,
            gb_s: if seconds > 0.0 { counts.bytes_read as f64 / 1e9 / seconds } else { 0.0 },
            million_multiply_adds_per_token: (counts.multiply_adds > 0)
                .then_some(counts.multiply_adds as f64 / n / 1e6),
        };
        let mut shards = Vec::new();
        let mut kinds: BTreeMap<&str, (u64, f64, Counts)> = BTreeMap::new();
        let mut ops: BTreeMap<String, f64> = BTreeMap::new();
        for ((now, before), shard) in after.iter().zip(&self.before).zip(&self.model.chain().shards) {
            let (calls, seconds) = (now.calls - before.calls, seconds((now, before)));
            let counts = now.counts - before.counts;
            let kind = kinds.entry(shard.kind.name()).or_default();
            kind.0 += calls;
            kind.1 += seconds;
            kind.2 += counts;
            shards.push(part(&shard.name, calls, seconds, counts));
            for (all, sign) in [(&now.ops, 1.0), (&before.ops, -1.0)] {
                for op in all {
                    let name = format!("{} {}", shard.kind.name(), op.op_type);
                    *ops.entry(name).or_default() += sign * op.time.as_secs_f64();
                }
            }
        }
        let kinds =
            kinds.into_iter().map(|(kind, (calls, s, counts))| part(kind, calls, s, counts)).collect();
        let ops = ops.into_iter().filter(|(_, seconds)| *seconds > 1e-9);
        let mut ops: Vec<OpPart> =
            ops.map(|(op, s)| OpPart { op, ms_per_token: s / n * 1e3, share: share(s) }).collect();
        ops.sort_by(|a, b| b.ms_per_token.total_cmp(&a.ms_per_token));
        WorkParts { kinds, shards, ops }
    }
}

/// Work of the shards of one kind in a pass, and its bound.
#[derive(Clone, Debug, Serialize)]
pub struct KindBound {
    /// Kind of the shards.
    pub kind: String,
    /// Number of tokens of the pass.
    pub tokens: usize,
    /// Milliseconds.
    pub ms: f64,
    /// Gigabytes read.
    pub gb: f64,
    /// Millions of multiply-adds.
    pub million_multiply_adds: f64,
    /// Milliseconds that reading takes at the measured bandwidth.
    pub read_ms: f64,
    /// Milliseconds that products take with weights in the caches, measured for these tokens.
    pub multiply_ms: f64,
    /// The longer of `read_ms` and `multiply_ms`, or calls.
    pub bound: BoundBy,
}

/// Part of a machine that a pass waits for.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize)]
#[serde(rename_all = "snake_case")]
pub enum BoundBy {
    /// Reading weights and caches.
    Bandwidth,
    /// Multiply-adds.
    Arithmetic,
    /// Neither: the cost of calls and of passing values on.
    Calls,
}

impl BoundBy {
    /// Returns the name.
    pub const fn name(self) -> &'static str {
        match self {
            BoundBy::Bandwidth => "bandwidth",
            BoundBy::Arithmetic => "arithmetic",
            BoundBy::Calls => "calls",
        }
    }

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

/// Compares the work of passes with the bandwidth, in GB/s, and with multiply-adds measured now on weights in the caches.
/// `passes` are numbers of tokens, each with the work of one pass by kind of shard. 8 bits count as integers with a scale per row.
pub fn bounds(
    passes: &[(usize, Vec<WorkPart>)],
    pool: &Pool,
    products: Products,
    read_gb_s: f64,
) -> Vec<KindBound> {
    let mut speeds: BTreeMap<(usize, usize), f64> = BTreeMap::new();
    let one = passes.iter().find(|(tokens, _)| *tokens == 1).map_or(&[][..], |(_, kinds)| kinds);
    let mut bounds = Vec::new();
    for (tokens, kinds) in passes {
        for part in kinds {
            let Some(millions) = part.million_multiply_adds_per_token else { continue };
            // A pass over one token has one multiply-add for each weight that it reads.
            let weights = one.iter().find(|p| p.name == part.name);
            let bytes = weights.map_or(f64::NAN, |p| {
                p.gb_per_token * 1e3 / p.million_multiply_adds_per_token.unwrap_or(f64::NAN)
            });
            let index_bits = index_bits_of(bytes);
            let bits = index_bits.map_or(16, |b| usize::from(b.bits()));
            let speed = *speeds.entry((bits, *tokens)).or_insert_with(|| {
                anemoe_kernels::measure_multiply_adds(pool, index_bits, products, *tokens, ROUNDS)
            });
            let (ms, gb) = (part.ms_per_token, part.gb_per_token);
            let (read_ms, multiply_ms) = (gb / read_gb_s * 1e3, millions * 1e6 / speed * 1e3);
            bounds.push(KindBound {
                kind: part.name.clone(),
                tokens: *tokens,
                ms,
                gb,
                million_multiply_adds: millions,
                read_ms,
                multiply_ms,
                bound: BoundBy::of(ms, read_ms, multiply_ms),
            });
        }
    }
    bounds
}

/// Returns the bits of an index where a weight takes `bytes` bytes, tables and scales included; none for fp16.
fn index_bits_of(bytes: f64) -> Option<IndexBits> {
    FORMATS.iter().find(|(most, _)| bytes <= *most).map(|f| f.1)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_longer_part_bounds() {
        let pool = Pool::new(1);
        let pass = |tokens, millions| {
            let part = WorkPart {
                name: "moe".into(),
                calls: 1,
                ms_per_token: 1.0,
                share: 1.0,
                gb_per_token: 0.5,
                gb_s: 500.0,
                million_multiply_adds_per_token: Some(millions),
            };
            (tokens, vec![part])
        };
        let passes = [pass(1, 1e3), pass(4, 4e3)];
        // Reading takes 50 s at the first bandwidth and next to nothing at the second. The passes took 1 ms, so calls never
        // bound them.
        for (gb_s, bound) in [(0.01, BoundBy::Bandwidth), (1e9, BoundBy::Arithmetic)] {
            let bounds = bounds(&passes, &pool, Products::Exact, gb_s);
            assert_eq!(bounds.len(), 2);
            assert!(bounds.iter().all(|b| b.bound == bound && b.multiply_ms > 0.0));
            assert_eq!((bounds[1].tokens, bounds[1].million_multiply_adds), (4, 4e3));
        }
        let found = [0.53, 0.8, 1.06, 2.0].map(index_bits_of);
        assert_eq!(found, [Some(IndexBits::Four), Some(IndexBits::Six), Some(IndexBits::Eight), None]);
        for (ms, read, multiply, bound) in [
            (10.0, 2.0, 2.0, BoundBy::Calls),
            (10.0, 4.0, 3.0, BoundBy::Bandwidth),
            (10.0, 1.0, 9.0, BoundBy::Arithmetic),
        ] {
            assert_eq!(BoundBy::of(ms, read, multiply), bound);
        }
    }
}
