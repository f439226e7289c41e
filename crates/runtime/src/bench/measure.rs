//! Measures prompts, decoding and batches.

use super::speeds::{BatchSpeed, BenchOptions, DecodeSpeed, PrefillSpeed};
use crate::Result;
use crate::model::{Logits, Model, Request, Sequence};
use crate::shard_work::{ShardWork, WorkPart, WorkParts};
use anemoe_io::Random;
use anemoe_kernels::Pool;
use std::time::{Duration, Instant};

/// Bytes that are read between repetitions to measure the bandwidth.
const GAUGE: usize = 256 << 20;

/// Source of random tokens.
pub struct BenchTokens {
    random: Random,
    vocabulary: usize,
}

impl BenchTokens {
    /// Makes a source that begins at a seed.
    pub fn new(seed: u64, vocabulary: usize) -> BenchTokens {
        BenchTokens { random: Random::new(seed), vocabulary }
    }

    /// Draws `n` ids.
    pub fn random_ids(&mut self, n: usize) -> Vec<u32> {
        (0..n).map(|_| self.random.below(self.vocabulary) as u32).collect()
    }

    /// Copies `ids`; each id stays right with probability `right`, and becomes another id otherwise.
    pub(super) fn corrupt_ids(&mut self, ids: &[u32], right: f64) -> Vec<u32> {
        ids.iter().map(|&id| if self.random.uniform() < right { id } else { id ^ 1 }).collect()
    }
}

/// Returns the median seconds of `repetitions` runs, after one run that does not count.
pub(super) fn median_seconds(
    repetitions: usize,
    tick: &dyn Fn(),
    mut run: impl FnMut() -> Result<Duration>,
) -> Result<f64> {
    let mut times = Vec::new();
    for i in 0..=repetitions {
        let time = run()?.as_secs_f64();
        tick();
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

/// Measurement of one model.
pub(super) struct Bench<'a> {
    pub args: &'a BenchOptions,
    pub model: &'a Model,
    pub sequence: Sequence,
    pub tokens: BenchTokens,
    pub pool: &'a Pool,
    /// Called after each run.
    pub tick: &'a dyn Fn(),
    /// Work of shards and operations in the first measurement.
    pub parts: Option<WorkParts>,
    /// Work by kind of shard of a pass over one token, and of one over several.
    pub passes: Vec<(usize, Vec<WorkPart>)>,
}

impl Bench<'_> {
    /// Measures decoding in each context.
    pub fn decodes(&mut self) -> Result<Vec<DecodeSpeed>> {
        let contexts: &[usize] = if self.args.decode > 0 { &self.args.context } else { &[] };
        contexts.iter().map(|&context| self.decode(context)).collect()
    }

    fn decode(&mut self, context: usize) -> Result<DecodeSpeed> {
        let Bench { args, model, sequence, tokens, pool, tick, parts, passes } = self;
        let whole = ShardWork::begin(model);
        let mut bytes = 0.0;
        let (mut reads, mut shares) = (Vec::new(), Vec::new());
        let gauge = || anemoe_kernels::measure_bandwidth(pool, GAUGE, 1);
        let seconds = median_seconds(args.repetitions, tick, || {
            model.fill_with_noise(sequence, context, args.seed)?;
            let first = gauge();
            let ids = tokens.random_ids(args.decode);
            let work = ShardWork::begin(model);
            let started = Instant::now();
            for id in ids {
                model.append(sequence, &[id], Logits::Last, None)?;
            }
            let elapsed = started.elapsed();
            bytes = work.bytes_read() as f64;
            // Other work on the machine varies: the bandwidth is measured right before and after.
            let read = (first + gauge()) / 2.0;
            reads.push(read);
            shares.push(bytes / 1e9 / elapsed.as_secs_f64() / read);
            Ok(elapsed)
        })?;
        let (read_gb_s, share_of_bandwidth) = (median(&mut reads[1..]), median(&mut shares[1..]));
        let n = args.decode as f64;
        let gb_per_token = bytes / n / 1e9;
        if parts.is_none() {
            let found = whole.parts((args.repetitions + 1) * args.decode);
            passes.push((1, found.kinds.clone()));
            *parts = Some(found);
        }
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

    /// Measures prompts of `n` tokens.
    pub fn prefill(&mut self, n: usize) -> Result<PrefillSpeed> {
        let Bench { args, model, sequence, tokens, tick, parts, .. } = self;
        let whole = ShardWork::begin(model);
        let (mut bytes, mut experts) = (0.0, None);
        let passes = n.div_ceil(model.most_tokens(args.prefill_chunk));
        let seconds = median_seconds(args.repetitions, tick, || {
            sequence.clear();
            let ids = tokens.random_ids(n);
            let work = ShardWork::begin(model);
            let started = Instant::now();
            model.append(sequence, &ids, Logits::Last, args.prefill_chunk)?;
            let elapsed = started.elapsed();
            bytes = work.bytes_read() as f64;
            experts = work.distinct_experts(passes);
            Ok(elapsed)
        })?;
        let gb = bytes / 1e9;
        // If nothing is decoded, the first prompt gives the figures of the parts.
        parts.get_or_insert_with(|| whole.parts((args.repetitions + 1) * n));
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
    pub fn batches(&mut self) -> Result<Vec<BatchSpeed>> {
        let counts: &[usize] = if self.args.decode > 0 { &self.args.sequences } else { &[] };
        let mut batches: Vec<BatchSpeed> = Vec::new();
        for &n in counts {
            let batch = self.batch(n)?;
            let one = batches.iter().find(|b| b.sequences == 1).map(|b| b.tok_s);
            batches.push(BatchSpeed { over_one: one.map(|one| batch.tok_s / one), ..batch });
        }
        Ok(batches)
    }

    fn batch(&mut self, n: usize) -> Result<BatchSpeed> {
        let Bench { args, model, tokens, tick, .. } = self;
        let context = args.context.first().copied().unwrap_or(0);
        let mut sequences: Vec<Sequence> = (0..n).map(|_| model.sequence()).collect();
        let (mut bytes, mut experts) = (0.0, None);
        let seconds = median_seconds(args.repetitions, tick, || {
            for (i, sequence) in sequences.iter_mut().enumerate() {
                model.fill_with_noise(sequence, context, args.seed + i as u64)?;
            }
            let ids: Vec<Vec<u32>> = (0..args.decode).map(|_| tokens.random_ids(n)).collect();
            let work = ShardWork::begin(model);
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
            bytes = work.bytes_read() as f64;
            experts = work.distinct_experts(args.decode);
            Ok(elapsed)
        })?;
        let all = (n * args.decode) as f64;
        let tok_s = all / seconds;
        Ok(BatchSpeed {
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
