//! Decodes with bundles that differ in the number of experts per call, in turn: calls and bytes for a token, and its time.
//!
//!     cargo run --release -p anemoe-gates --example dispatch -- "synthetic:zaya1-8b?layers=4" 1,2,4,8,16

use anemoe_bundle::TokenCount;
use anemoe_convert::build::build;
use anemoe_convert::models;
use anemoe_convert::plan::PlanOptions;
use anemoe_io::Random;
use anemoe_runtime::cpu::CpuBackend;
use anemoe_runtime::model::{Logits, Model};
use anemoe_runtime::shard_work::ShardWork;
use anyhow::{Context, Result};
use std::time::Instant;

/// Positions before the first token.
const CONTEXT: usize = 64;
const TOKENS: usize = 32;
const REPETITIONS: usize = 3;

/// Times of a bundle, and the counts of its last run.
struct Built {
    experts: usize,
    model: Model,
    seconds: Vec<f64>,
    over_first: Vec<f64>,
    calls: u64,
    skipped: u64,
    bytes: u64,
}

impl Built {
    /// Decodes the same tokens as every other bundle, and returns the seconds.
    fn decode(&mut self) -> Result<f64> {
        let model = &self.model;
        let mut sequence = model.sequence();
        model.fill_with_noise(&mut sequence, CONTEXT, 1)?;
        let mut random = Random::new(1);
        let (before, work) = (model.stats(), ShardWork::begin(model));
        let started = Instant::now();
        for _ in 0..TOKENS {
            let id = random.below(model.chain().model.vocab_size) as u32;
            model.append(&mut sequence, &[id], Logits::Last, None)?;
        }
        let seconds = started.elapsed().as_secs_f64();
        let after = model.stats();
        self.calls = after.calls - before.calls;
        self.skipped = after.skipped - before.skipped;
        self.bytes = work.bytes_read();
        Ok(seconds)
    }
}

fn median(values: &mut [f64]) -> f64 {
    values.sort_by(f64::total_cmp);
    values[values.len() / 2]
}

fn main() -> Result<()> {
    let mut args = std::env::args().skip(1);
    let checkpoint = args.next().context("a checkpoint is missing")?;
    let experts = args.next().unwrap_or_else(|| "1,2,4,8,16".into());
    let folder = tempfile::tempdir()?;
    let family = models::open(models::load(&checkpoint)?)?;
    let mut built = Vec::new();
    for experts in experts.split(',') {
        let options = PlanOptions {
            quant: "lut4".parse().map_err(anyhow::Error::msg)?,
            experts_per_shard: Some(experts.parse()?),
            max_context: Some(CONTEXT + TOKENS),
            tokens: vec![TokenCount { min: 1, max: 1 }],
            ..PlanOptions::default()
        };
        let plan = match family.plan(&options) {
            Ok(plan) => plan,
            Err(e) => {
                println!("{experts} experts per shard left out: {e}");
                continue;
            }
        };
        let bundle = folder.path().join(experts);
        build(&family, &plan, None, &bundle, 1, &|_| ())?;
        let model = Model::open(&bundle, &CpuBackend::default())?;
        let (seconds, over_first) = (Vec::new(), Vec::new());
        let experts = experts.parse()?;
        built.push(Built { experts, model, seconds, over_first, calls: 0, skipped: 0, bytes: 0 });
    }
    for i in 0..=REPETITIONS {
        let mut first = None;
        for b in &mut built {
            let seconds = b.decode()?;
            let first = *first.get_or_insert(seconds);
            // The first run reads weights that later ones find in memory, and does not count.
            if i > 0 {
                b.seconds.push(seconds);
                b.over_first.push(first / seconds);
            }
        }
    }
    println!(
        "experts per shard, packages, calls and calls left out per token, GB per token, tok/s, over the first"
    );
    for b in &mut built {
        let n = TOKENS as f64;
        println!(
            "{:3} {:4} {:6.1} {:6.1} {:.4} {:7.2} {:.3}",
            b.experts,
            b.model.chain().shards.len(),
            b.calls as f64 / n,
            b.skipped as f64 / n,
            b.bytes as f64 / n / 1e9,
            n / median(&mut b.seconds),
            median(&mut b.over_first)
        );
    }
    Ok(())
}
