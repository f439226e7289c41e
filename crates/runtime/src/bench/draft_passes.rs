//! Measures passes over drafts, and decoding with drafts beside plain decoding.

use super::measure::{Bench, median};
use super::speeds::{DraftPass, DraftedSpeed};
use crate::generate::{GenerateOptions, Generated, generate};
use crate::model::{Logits, Model};
use crate::sampler::Sampling;
use crate::shard_work::{ShardWork, WorkPart};
use crate::speculate::{Mode, Speculation, break_even, prepare_drafts};
use crate::{Error, Result};
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
    /// Work of a pass in the last repetition, by kind of shard.
    kinds: Vec<WorkPart>,
}

impl Bench<'_> {
    /// Measures passes over several tokens with logits of each, in turn with passes over one token.
    pub fn verify(&mut self) -> Result<Vec<DraftPass>> {
        let Bench { args, model, sequence, tokens, tick, passes: works, .. } = self;
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
                let work = ShardWork::begin(model);
                let mut seconds = 0.0;
                for _ in 0..EACH {
                    let ids = tokens.random_ids(p.tokens);
                    let started = Instant::now();
                    model.append(sequence, &ids, Logits::All, None)?;
                    seconds += started.elapsed().as_secs_f64() / EACH as f64;
                    // Unfused functions cannot truncate their states, and noise has no tokens to run again: the caches are
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
                    p.bytes = work.bytes_read() as f64 / EACH as f64;
                    p.experts = work.distinct_experts(EACH);
                    p.kinds = work.parts(EACH).kinds;
                }
            }
            tick();
        }
        let bounded = passes.iter_mut().filter(|p| p.tokens == BOUNDED);
        works.extend(bounded.map(|p| (p.tokens, std::mem::take(&mut p.kinds))));
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

    /// Decodes with drafts that are right with each probability of --drafts, and with those of a drafter, in turn with plain
    /// decoding. Each repetition has a text of its own, the same for all: what a pass costs depends on the experts that its tokens
    /// choose.
    pub fn drafts(&mut self) -> Result<Vec<DraftedSpeed>> {
        let Bench { args, model, tokens, tick, .. } = self;
        let context = args.context.first().copied().unwrap_or(0).max(1);
        let mut pairs: Vec<Vec<(Generated, Generated)>> = args.planted().map(|_| Vec::new()).collect();
        let repetitions = if pairs.is_empty() { 0 } else { args.repetitions + 1 };
        for i in 0..repetitions {
            let prompt = tokens.random_ids(context);
            let plain = run(model, &prompt, args.decode, Speculation::default())?;
            for (planted, pairs) in args.planted().zip(&mut pairs) {
                let replay = planted.map(|right| Arc::new(tokens.corrupt_ids(&plain.ids, right)));
                let drafter = args.drafter.clone();
                let drafts = Speculation { mode: Mode::Auto, replay, drafter, ..Speculation::default() };
                prepare_drafts(model, &drafts)?;
                let with = run(model, &prompt, args.decode, drafts)?;
                if with.ids != plain.ids {
                    return Err(Error::input("drafts changed the tokens"));
                }
                let without = run(model, &prompt, args.decode, Speculation::default())?;
                tick();
                // The first repetition warms caches and pages, and does not count.
                if i > 0 {
                    pairs.push((with, without));
                }
            }
        }
        let reports = args.planted().zip(pairs);
        Ok(reports.map(|(planted, pairs)| report(planted, args.decode, &pairs)).collect())
    }
}

/// Makes the medians of runs with drafts, each followed by a plain run, with the counts of the last one.
fn report(planted: Option<f64>, tokens: usize, pairs: &[(Generated, Generated)]) -> DraftedSpeed {
    let median_of = |figure: fn(&Generated, &Generated) -> f64| {
        median(&mut pairs.iter().map(|(with, without)| figure(with, without)).collect::<Vec<f64>>())
    };
    let counts = pairs.last().and_then(|(with, _)| with.speculation.clone()).unwrap_or_default();
    DraftedSpeed {
        planted,
        tokens,
        plain_tok_s: median_of(|_, without| without.tokens_per_second()),
        tok_s: median_of(|with, _| with.tokens_per_second()),
        gain: median_of(|with, without| with.tokens_per_second() / without.tokens_per_second()),
        verifier_calls: counts.verifier_calls,
        drafted: counts.drafted,
        accepted: counts.accepted,
        fallbacks: counts.fallbacks,
        sources: counts.sources,
    }
}

fn run(model: &Model, prompt: &[u32], max_new: usize, speculation: Speculation) -> Result<Generated> {
    let sampling = Sampling::GREEDY;
    let options = GenerateOptions { max_new, sampling, ignore_eos: true, prefill_chunk: None, speculation };
    generate(model, &mut model.sequence(), prompt, &options, |_| true)
}
