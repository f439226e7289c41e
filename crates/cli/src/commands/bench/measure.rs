//! Measurements of `anemoe bench`.

use super::bench_args::Args;
use super::bench_report::{Batch, DecodeSpeed, Memory, OpPart, Part, PrefillSpeed};
use super::bounds::PassWork;
use crate::ui::Ui;
use anemoe_io::Random;
use anemoe_kernels::Pool;
use anemoe_runtime::backend::Counts;
use anemoe_runtime::model::{Logits, Model, Request, Sequence, ShardStats};
use std::collections::BTreeMap;
use std::time::{Duration, Instant};

/// Bytes that are read between repetitions to measure the bandwidth.
const GAUGE: usize = 256 << 20;

/// Source of random tokens.
pub(super) struct Tokens {
    random: Random,
    vocabulary: usize,
}

impl Tokens {
    pub fn new(seed: u64, vocabulary: usize) -> Tokens {
        Tokens { random: Random::new(seed), vocabulary }
    }

    pub fn random_ids(&mut self, n: usize) -> Vec<u32> {
        (0..n).map(|_| self.random.below(self.vocabulary) as u32).collect()
    }

    /// Copies `ids`; each id stays right with probability `right`, and becomes another id otherwise.
    pub fn corrupt_ids(&mut self, ids: &[u32], right: f64) -> Vec<u32> {
        ids.iter().map(|&id| if self.random.uniform() < right { id } else { id ^ 1 }).collect()
    }
}

/// Returns the median seconds of `repetitions` runs, after one run that does not count.
pub(super) fn median_seconds(
    repetitions: usize,
    bar: &indicatif::ProgressBar,
    mut run: impl FnMut() -> anyhow::Result<Duration>,
) -> anyhow::Result<f64> {
    let mut times = Vec::new();
    for i in 0..=repetitions {
        let time = run()?.as_secs_f64();
        bar.inc(1);
        if i > 0 {
            times.push(time);
        }
    }
    Ok(median(&mut times).max(1e-9))
}

/// Sorts the values and returns their median.
pub(super) fn median(values: &mut [f64]) -> f64 {
    values.sort_by(f64::total_cmp);
    let n = values.len();
    (values[(n - 1) / 2] + values[n / 2]) / 2.0
}

/// Memory that is read between repetitions to measure the bandwidth.
pub(super) struct Gauge(Vec<u8>);

impl Gauge {
    pub fn new() -> Gauge {
        // Written pages: pages that were never written all map to one page of zeros.
        Gauge(vec![1; GAUGE])
    }

    /// Reads the memory with all threads, and returns the bandwidth in GB/s.
    pub fn gb_s(&self, pool: &Pool) -> f64 {
        let started = Instant::now();
        std::hint::black_box(anemoe_kernels::read(pool, &self.0));
        self.0.len() as f64 / 1e9 / started.elapsed().as_secs_f64()
    }
}

pub(super) fn bytes_read(model: &Model) -> u64 {
    model.shard_stats().iter().map(|s| s.counts.bytes_read).sum()
}

/// Returns the mean number of different experts that a layer ran per pass since `before`, over layers with experts.
pub(super) fn distinct_experts(model: &Model, before: &[ShardStats], passes: usize) -> Option<f64> {
    let mut layers = BTreeMap::<Option<usize>, u64>::new();
    for ((now, before), shard) in model.shard_stats().iter().zip(before).zip(&model.chain().shards) {
        let ran = now.counts.experts - before.counts.experts;
        if ran > 0 {
            *layers.entry(shard.layer).or_default() += ran;
        }
    }
    let all: u64 = layers.values().sum();
    (passes > 0 && !layers.is_empty()).then(|| all as f64 / (layers.len() * passes) as f64)
}

/// Measurement of one model.
pub(super) struct Bench<'a> {
    pub args: &'a Args,
    pub model: &'a Model,
    pub sequence: Sequence,
    pub tokens: Tokens,
    pool: &'a Pool,
    pub bar: indicatif::ProgressBar,
    /// Figures by kind of shard, by shard and by operation, in the first measurement.
    parts: Option<TimedParts>,
    /// Work by kind of shard, in passes over one token and over several.
    pub passes: Vec<PassWork>,
}

/// Figures by kind of shard, by shard, and by operation.
type TimedParts = (Vec<Part>, Vec<Part>, Vec<OpPart>);

impl<'a> Bench<'a> {
    pub fn new(
        args: &'a Args,
        model: &'a Model,
        sequence: Sequence,
        tokens: Tokens,
        pool: &'a Pool,
        ui: &Ui,
    ) -> Bench<'a> {
        let prompts = args.prefill.iter().filter(|&&n| n > 0).count();
        let decodes = if args.decode > 0 { args.context.len() + args.sequences.len() } else { 0 };
        let verify = args.verify_tokens.iter().any(|&n| n > 0);
        let steps = (prompts + decodes + usize::from(verify) + args.drafts.len()) * (args.repetitions + 1);
        let bar = ui.bar(steps as u64, "runs");
        Bench { args, model, sequence, tokens, pool, bar, parts: None, passes: Vec::new() }
    }

    /// Ends the progress bar, and returns the figures of shards and operations in the first measurement.
    pub fn finish(self) -> TimedParts {
        self.bar.finish_and_clear();
        self.parts.unwrap_or_default()
    }

    /// Measures decoding in each context.
    pub fn decodes(&mut self) -> anyhow::Result<Vec<DecodeSpeed>> {
        let contexts: &[usize] = if self.args.decode > 0 { &self.args.context } else { &[] };
        let gauge = Gauge::new();
        contexts.iter().map(|&context| self.decode(context, &gauge)).collect()
    }

    fn decode(&mut self, context: usize, gauge: &Gauge) -> anyhow::Result<DecodeSpeed> {
        let Bench { args, model, sequence, tokens, pool, bar, parts, passes } = self;
        let before = model.shard_stats();
        let mut bytes = 0.0;
        let (mut reads, mut shares) = (Vec::new(), Vec::new());
        let seconds = median_seconds(args.repetitions, bar, || {
            model.fill_with_noise(sequence, context, args.seed)?;
            let first = gauge.gb_s(pool);
            let ids = tokens.random_ids(args.decode);
            let read = bytes_read(model);
            let started = Instant::now();
            for id in ids {
                model.append(sequence, &[id], Logits::Last, None)?;
            }
            let elapsed = started.elapsed();
            bytes = (bytes_read(model) - read) as f64;
            // Other work on the machine varies: the bandwidth is measured right before and after.
            let read = (first + gauge.gb_s(pool)) / 2.0;
            reads.push(read);
            shares.push(bytes / 1e9 / elapsed.as_secs_f64() / read);
            Ok(elapsed)
        })?;
        let (read_gb_s, share_of_bandwidth) = (median(&mut reads[1..]), median(&mut shares[1..]));
        let n = args.decode as f64;
        let gb_per_token = bytes / n / 1e9;
        let all = (args.repetitions + 1) * args.decode;
        if passes.is_empty() {
            passes.push(PassWork::since(model, &before, 1, all));
        }
        parts.get_or_insert_with(|| parts_of(model, &before, all));
        Ok(DecodeSpeed {
            context,
            tokens: args.decode,
            seconds,
            tok_s: n / seconds,
            ms_per_token: seconds / n * 1e3,
            gb_per_token,
            gb_s: bytes / 1e9 / seconds,
            read_gb_s,
            share_of_bandwidth,
            ceiling_tok_s: if gb_per_token > 0.0 { read_gb_s / gb_per_token } else { 0.0 },
        })
    }

    /// Measures prompts of each length.
    pub fn prefills(&mut self) -> anyhow::Result<Vec<PrefillSpeed>> {
        let lengths = self.args.prefill.iter().filter(|&&n| n > 0);
        lengths.map(|&n| self.prefill(n)).collect()
    }

    fn prefill(&mut self, n: usize) -> anyhow::Result<PrefillSpeed> {
        let Bench { args, model, sequence, tokens, bar, parts, .. } = self;
        let first = model.shard_stats();
        let (mut bytes, mut experts) = (0.0, None);
        let passes = n.div_ceil(model.most_tokens(args.prefill_chunk));
        let seconds = median_seconds(args.repetitions, bar, || {
            sequence.clear();
            let ids = tokens.random_ids(n);
            let (read, before) = (bytes_read(model), model.shard_stats());
            let started = Instant::now();
            model.append(sequence, &ids, Logits::Last, args.prefill_chunk)?;
            let elapsed = started.elapsed();
            bytes = (bytes_read(model) - read) as f64;
            experts = distinct_experts(model, &before, passes);
            Ok(elapsed)
        })?;
        let gb = bytes / 1e9;
        // If nothing is decoded, the first prompt gives the figures of the parts.
        parts.get_or_insert_with(|| parts_of(model, &first, (args.repetitions + 1) * n));
        Ok(PrefillSpeed {
            tokens: n,
            seconds,
            tok_s: n as f64 / seconds,
            gb,
            gb_s: gb / seconds,
            distinct_experts: experts,
        })
    }

    /// Measures decoding of several sequences at once, for each number of `--sequences`.
    pub fn batches(&mut self) -> anyhow::Result<Vec<Batch>> {
        let counts: &[usize] = if self.args.decode > 0 { &self.args.sequences } else { &[] };
        let mut batches: Vec<Batch> = Vec::new();
        for &n in counts {
            let batch = self.batch(n)?;
            let one = batches.iter().find(|b| b.sequences == 1).map(|b| b.tok_s);
            batches.push(Batch { over_one: one.map(|one| batch.tok_s / one), ..batch });
        }
        Ok(batches)
    }

    fn batch(&mut self, n: usize) -> anyhow::Result<Batch> {
        let Bench { args, model, tokens, bar, .. } = self;
        let context = args.context.first().copied().unwrap_or(0);
        let mut sequences: Vec<Sequence> = (0..n).map(|_| model.sequence()).collect();
        let (mut bytes, mut experts) = (0.0, None);
        let seconds = median_seconds(args.repetitions, bar, || {
            for (i, sequence) in sequences.iter_mut().enumerate() {
                model.fill_with_noise(sequence, context, args.seed + i as u64)?;
            }
            let ids: Vec<Vec<u32>> = (0..args.decode).map(|_| tokens.random_ids(n)).collect();
            let (read, before) = (bytes_read(model), model.shard_stats());
            let started = Instant::now();
            for ids in &ids {
                let mut requests: Vec<Request<'_>> = sequences
                    .iter_mut()
                    .zip(ids.chunks(1))
                    .map(|(sequence, ids)| Request { sequence, ids, logits: Logits::Last })
                    .collect();
                model.forward(&mut requests)?;
            }
            let elapsed = started.elapsed();
            bytes = (bytes_read(model) - read) as f64;
            experts = distinct_experts(model, &before, args.decode);
            Ok(elapsed)
        })?;
        let all = (n * args.decode) as f64;
        let tok_s = all / seconds;
        Ok(Batch {
            sequences: n,
            context,
            tokens: args.decode,
            seconds,
            tok_s,
            tok_s_per_sequence: tok_s / n as f64,
            over_one: None,
            gb_per_token: bytes / all / 1e9,
            gb_s: bytes / 1e9 / seconds,
            distinct_experts: experts,
        })
    }
}

/// Returns the work of shards and operations since `before`, per token of `tokens`.
fn parts_of(model: &Model, before: &[ShardStats], tokens: usize) -> TimedParts {
    let after = model.shard_stats();
    let all: f64 = after.iter().zip(before).map(|(a, b)| (a.time - b.time).as_secs_f64()).sum();
    let n = tokens.max(1) as f64;
    let part = |name: String, calls: u64, seconds: f64, counts: Counts| Part {
        name,
        calls,
        ms_per_token: seconds / n * 1e3,
        share: if all > 0.0 { seconds / all } else { 0.0 },
        gb_per_token: counts.bytes_read as f64 / n / 1e9,
        gb_s: if seconds > 0.0 { counts.bytes_read as f64 / 1e9 / seconds } else { 0.0 },
        million_multiply_adds_per_token: (counts.multiply_adds > 0)
            .then_some(counts.multiply_adds as f64 / n / 1e6),
    };
    let mut shards = Vec::new();
    let mut kinds: BTreeMap<&str, (u64, f64, Counts)> = BTreeMap::new();
    let mut ops: BTreeMap<String, f64> = BTreeMap::new();
    for ((a, b), shard) in after.iter().zip(before).zip(&model.chain().shards) {
        let (calls, seconds) = (a.calls - b.calls, (a.time - b.time).as_secs_f64());
        let counts = a.counts - b.counts;
        let kind = kinds.entry(shard.kind.name()).or_default();
        kind.0 += calls;
        kind.1 += seconds;
        kind.2 += counts;
        shards.push(part(shard.name.clone(), calls, seconds, counts));
        for (all, sign) in [(&a.ops, 1.0), (&b.ops, -1.0)] {
            for op in all {
                let name = format!("{} {}", shard.kind.name(), op.op_type);
                *ops.entry(name).or_default() += sign * op.time.as_secs_f64();
            }
        }
    }
    let kinds = kinds.into_iter().map(|(k, (c, s, b))| part(k.into(), c, s, b)).collect();
    let mut ops: Vec<OpPart> = ops
        .into_iter()
        .filter(|(_, s)| *s > 1e-9)
        .map(|(op, s)| OpPart { op, ms_per_token: s / n * 1e3, share: if all > 0.0 { s / all } else { 0.0 } })
        .collect();
    ops.sort_by(|a, b| b.ms_per_token.total_cmp(&a.ms_per_token));
    (kinds, shards, ops)
}

/// Returns the resident bytes of this process: its own, and those of mapped files; none on systems other than Linux.
pub(super) fn memory() -> Memory {
    #[cfg(target_os = "linux")]
    {
        let status = std::fs::read_to_string("/proc/self/status").unwrap_or_default();
        let of = |key: &str| {
            let line = status.lines().find_map(|l| l.strip_prefix(key))?;
            line.trim().strip_suffix("kB")?.trim().parse::<u64>().ok()?.checked_mul(1024)
        };
        Memory { own_bytes: of("RssAnon:"), mapped_bytes: of("RssFile:") }
    }
    #[cfg(not(target_os = "linux"))]
    Memory { own_bytes: None, mapped_bytes: None }
}
