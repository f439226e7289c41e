//! Measures passes over drafts, and decoding with drafts beside plain decoding.

use super::bench_report::{DraftPass, Drafts};
use super::bounds::PassWork;
use super::measure::{Bench, bytes_read, distinct_experts, median};
use anemoe_runtime::generate::{GenerateOptions, Generated, generate};
use anemoe_runtime::model::{Logits, Model};
use anemoe_runtime::sampler::Sampling;
use anemoe_runtime::speculate::{Mode, Speculation, SpeculationReport, break_even};
use std::sync::Arc;
use std::time::Instant;

/// Passes of each length in a repetition.
const EACH: usize = 4;
/// Tokens of the pass whose bounds are shown beside the bounds of a pass over one token.
const BOUNDED: usize = 4;

/// Measurements of passes over `tokens` tokens.
#[derive(Default)]
struct Passes {
    tokens: usize,
    seconds: Vec<f64>,
    /// Seconds over the seconds of a pass over one token, measured in turn.
    over_one: Vec<f64>,
    bytes: f64,
    experts: Option<f64>,
    /// Work of the last repetition.
    work: Option<PassWork>,
}

impl Bench<'_> {
    /// Measures passes over several tokens with logits of each, in turn with passes over one token.
    pub fn verify(&mut self) -> anyhow::Result<Vec<DraftPass>> {
        let Bench { args, model, sequence, tokens, bar, passes: works, .. } = self;
        let counts = std::iter::once(1).chain(args.verify_tokens.iter().copied().filter(|&n| n > 0));
        let mut passes: Vec<Passes> = counts.map(|tokens| Passes { tokens, ..Passes::default() }).collect();
        if passes.len() == 1 {
            return Ok(Vec::new());
        }
        let context = args.context.first().copied().unwrap_or(0);
        passes.iter().for_each(|p| model.prepare(p.tokens, Logits::All));
        for i in 0..=args.repetitions {
            let mut one = 0.0;
            for p in &mut passes {
                model.fill_with_noise(sequence, context, args.seed)?;
                let (read, before) = (bytes_read(model), model.shard_stats());
                let mut seconds = 0.0;
                for _ in 0..EACH {
                    let ids = tokens.random_ids(p.tokens);
                    let started = Instant::now();
                    model.append(sequence, &ids, Logits::All, None)?;
                    seconds += started.elapsed().as_secs_f64() / EACH as f64;
                    // Unfused functions cannot cut back their states, and noise has no tokens to run again: the caches are
                    // filled anew.
                    if model.truncate(sequence, context).is_err() {
                        model.fill_with_noise(sequence, context, args.seed)?;
                    }
                }
                one = if p.tokens == 1 { seconds } else { one };
                // The first repetition reads weights that later ones find in memory, and does not count.
                if i > 0 {
                    p.seconds.push(seconds);
                    p.over_one.push(seconds / one);
                    p.bytes = (bytes_read(model) - read) as f64 / EACH as f64;
                    p.experts = distinct_experts(model, &before, EACH);
                    p.work = Some(PassWork::since(model, &before, p.tokens, EACH));
                }
            }
            bar.inc(1);
        }
        works.extend(passes.iter_mut().filter(|p| p.tokens == BOUNDED).filter_map(|p| p.work.take()));
        let one = passes[0].bytes;
        let report = |p: &mut Passes| {
            let (seconds, over_one) = (median(&mut p.seconds).max(1e-9), median(&mut p.over_one));
            DraftPass {
                tokens: p.tokens,
                context,
                ms: seconds * 1e3,
                over_one,
                bytes_over_one: if one > 0.0 { p.bytes / one } else { 0.0 },
                gb: p.bytes / 1e9,
                gb_s: p.bytes / 1e9 / seconds,
                distinct_experts: p.experts,
                break_even: break_even(over_one, p.tokens - 1),
            }
        };
        Ok(passes[1..].iter_mut().map(report).collect())
    }

    /// Decodes with drafts that are right with each probability of --drafts, in turn with plain decoding. Each repetition has a
    /// text of its own, the same for all probabilities: what a pass costs depends on the experts that its tokens choose.
    pub fn drafts(&mut self) -> anyhow::Result<Vec<Drafts>> {
        let Bench { args, model, tokens, bar, .. } = self;
        let context = args.context.first().copied().unwrap_or(0).max(1);
        let mut of_planted: Vec<DraftRuns> = args.drafts.iter().map(|_| DraftRuns::default()).collect();
        let repetitions = if args.drafts.is_empty() { 0 } else { args.repetitions + 1 };
        for i in 0..repetitions {
            let prompt = tokens.random_ids(context);
            let plain = run(model, &prompt, args.decode, Speculation::default())?;
            for (&planted, runs) in args.drafts.iter().zip(&mut of_planted) {
                let replay = Some(Arc::new(tokens.corrupt_ids(&plain.ids, planted)));
                let with = run(
                    model,
                    &prompt,
                    args.decode,
                    Speculation { mode: Mode::Auto, replay, ..Speculation::default() },
                )?;
                anyhow::ensure!(with.ids == plain.ids, "drafts changed the tokens");
                let without = run(model, &prompt, args.decode, Speculation::default())?;
                bar.inc(1);
                // The first repetition warms caches and pages, and does not count.
                if i > 0 {
                    runs.add(&with, &without);
                }
            }
        }
        let reports = args.drafts.iter().zip(of_planted);
        Ok(reports.map(|(&planted, runs)| runs.report(planted, args.decode)).collect())
    }
}

/// Runs with drafts of one probability, and the plain runs after them.
#[derive(Default)]
struct DraftRuns {
    tok_s: Vec<f64>,
    plain_tok_s: Vec<f64>,
    gains: Vec<f64>,
    /// Counts of the last run.
    counts: SpeculationReport,
}

impl DraftRuns {
    fn add(&mut self, with: &Generated, without: &Generated) {
        let (with_s, plain_s) = (with.tokens_per_second(), without.tokens_per_second());
        self.tok_s.push(with_s);
        self.plain_tok_s.push(plain_s);
        self.gains.push(with_s / plain_s);
        self.counts = with.speculation.clone().unwrap_or_default();
    }

    fn report(mut self, planted: f64, tokens: usize) -> Drafts {
        Drafts {
            planted,
            tokens,
            plain_tok_s: median(&mut self.plain_tok_s),
            tok_s: median(&mut self.tok_s),
            gain: median(&mut self.gains),
            verifier_calls: self.counts.verifier_calls,
            drafted: self.counts.drafted,
            accepted: self.counts.accepted,
            fallbacks: self.counts.fallbacks,
        }
    }
}

fn run(model: &Model, prompt: &[u32], max_new: usize, speculation: Speculation) -> anyhow::Result<Generated> {
    let sampling = Sampling::GREEDY;
    let options = GenerateOptions { max_new, sampling, ignore_eos: true, prefill_chunk: None, speculation };
    Ok(generate(model, &mut model.sequence(), prompt, &options, |_| true)?)
}
