//! Decodes with each number of experts per call: `anemoe bench --dispatch`.

use super::bench_args::Args;
use super::measure::{Tokens, bytes_read, median};
use crate::args::reading::Reading;
use crate::outcome::Outcome;
use crate::ui::{Table, Ui};
use anemoe_convert::build::check_scratch;
use anemoe_convert::models;
use anemoe_convert::plan::{Plan, PlanOptions};
use anemoe_runtime::cpu::CpuBackend;
use anemoe_runtime::model::{Logits, Model};
use serde::Serialize;
use std::time::Instant;

/// Decoding with bundles that differ in the number of experts per call.
#[derive(Serialize)]
struct Study {
    checkpoint: String,
    quant: String,
    mode: String,
    context: usize,
    tokens: usize,
    repetitions: usize,
    rows: Vec<DispatchRow>,
    /// Numbers of experts per call that the model cannot be built with, and the reasons.
    left_out: Vec<LeftOutDispatch>,
}

#[derive(Serialize)]
struct DispatchRow {
    experts_per_shard: usize,
    packages: usize,
    /// Calls of packages per token.
    calls_per_token: f64,
    /// Calls per token that were left out because no expert of the package was chosen.
    skipped_per_token: f64,
    gb_per_token: f64,
    tok_s: f64,
    ms_per_token: f64,
    /// Speed over the speed of the first row, from pairs measured in turn.
    over_first: f64,
}

#[derive(Serialize)]
struct LeftOutDispatch {
    experts_per_shard: usize,
    why: String,
}

/// A bundle with its number of experts per call, and its measurements.
struct Built {
    experts: usize,
    model: Model,
    seconds: Vec<f64>,
    over_first: Vec<f64>,
    calls: f64,
    skipped: f64,
    bytes: f64,
}

/// Builds a bundle for each number of experts per call, and decodes with the bundles in turn.
pub(super) fn run(args: &Args, backend: &CpuBackend, ui: &Ui) -> anyhow::Result<Outcome> {
    let context = args.context.first().copied().unwrap_or(0);
    anyhow::ensure!(args.decode > 0, "--dispatch measures decoding: give --decode at least 1");
    let scratch = crate::files::scratch(None)?;
    let family = models::open(Reading::default().open(&args.bundle)?)?;
    let (mut built, mut left_out): (Vec<Built>, Vec<LeftOutDispatch>) = (Vec::new(), Vec::new());
    let bar = ui.bar((args.dispatch.len() + args.repetitions + 1) as u64, "bundles and runs");
    let planned = args.dispatch.iter().map(|&experts| {
        let options = PlanOptions {
            quant: args.quant,
            experts_per_shard: Some(experts),
            max_context: Some(context + args.decode),
            ..PlanOptions::default()
        };
        (experts, family.plan(&options))
    });
    let planned: Vec<_> = planned.collect();
    let plans = planned.iter().filter_map(|(_, plan)| plan.as_ref().ok());
    check_scratch(scratch.path(), plans.map(Plan::bundle_bytes).sum())?;
    for (experts, plan) in planned {
        match plan {
            Ok(plan) => {
                let out = scratch.path().join(format!("{experts}.anemoe"));
                anemoe_convert::build::build(family.as_ref(), &plan, None, &out, 1, &|_| ())?;
                let model = Model::open(&out, backend)?;
                model.prepare(1, Logits::Last);
                if let Some(mapped) = model.populate() {
                    let _ = mapped.join();
                }
                built.push(Built {
                    experts,
                    model,
                    seconds: Vec::new(),
                    over_first: Vec::new(),
                    calls: 0.0,
                    skipped: 0.0,
                    bytes: 0.0,
                });
            }
            Err(e) => left_out.push(LeftOutDispatch { experts_per_shard: experts, why: e.to_string() }),
        }
        bar.inc(1);
    }
    anyhow::ensure!(
        !built.is_empty(),
        "--dispatch: {}",
        left_out.first().map_or("no number of experts", |l| l.why.as_str())
    );
    for i in 0..=args.repetitions {
        let mut first = None;
        for b in &mut built {
            let seconds = b.decode(args, context)?;
            let first = *first.get_or_insert(seconds);
            // The first repetition reads weights that later ones find in memory, and does not count.
            if i > 0 {
                b.seconds.push(seconds);
                b.over_first.push(first / seconds);
            }
        }
        bar.inc(1);
    }
    bar.finish_and_clear();
    let study = Study {
        checkpoint: args.bundle.display().to_string(),
        quant: args.quant.to_string(),
        mode: args.executor.mode(),
        context,
        tokens: args.decode,
        repetitions: args.repetitions,
        rows: built.iter_mut().map(|b| b.row(args.decode)).collect(),
        left_out,
    };
    ui.document(&study)?;
    print(&study, ui)?;
    if let Some(path) = &args.save {
        anemoe_bundle::write_atomic(path, &serde_json::to_vec_pretty(&study)?)?;
    }
    Ok(Outcome::Done)
}

impl Built {
    /// Decodes `args.decode` tokens once, and returns the seconds.
    fn decode(&mut self, args: &Args, context: usize) -> anyhow::Result<f64> {
        let model = &self.model;
        let mut sequence = model.sequence();
        model.fill_with_noise(&mut sequence, context, args.seed)?;
        // The same tokens for every bundle.
        let ids = Tokens::new(args.seed, model.chain().model.vocab_size).random_ids(args.decode);
        let (stats, read) = (model.stats(), bytes_read(model));
        let started = Instant::now();
        for id in ids {
            model.append(&mut sequence, &[id], Logits::Last, None)?;
        }
        let seconds = started.elapsed().as_secs_f64().max(1e-9);
        let now = model.stats();
        self.calls = (now.calls - stats.calls) as f64;
        self.skipped = (now.skipped - stats.skipped) as f64;
        self.bytes = (bytes_read(model) - read) as f64;
        Ok(seconds)
    }

    fn row(&mut self, tokens: usize) -> DispatchRow {
        let n = tokens as f64;
        let seconds = median(&mut self.seconds);
        DispatchRow {
            experts_per_shard: self.experts,
            packages: self.model.chain().shards.len(),
            calls_per_token: self.calls / n,
            skipped_per_token: self.skipped / n,
            gb_per_token: self.bytes / n / 1e9,
            tok_s: n / seconds,
            ms_per_token: seconds / n * 1e3,
            over_first: median(&mut self.over_first),
        }
    }
}

fn print(study: &Study, ui: &Ui) -> anyhow::Result<()> {
    ui.line(format!(
        "{}, {}, {}: {} tokens at {}, medians of {} runs in turn\n",
        study.checkpoint, study.quant, study.mode, study.tokens, study.context, study.repetitions
    ))?;
    let mut table = Table::new(&[
        "experts per shard",
        "packages",
        "calls per token",
        "left out",
        "GB per token",
        "tok/s",
        "ms per token",
        "over the first",
    ]);
    for r in &study.rows {
        table.row(vec![
            r.experts_per_shard.to_string(),
            r.packages.to_string(),
            format!("{:.1}", r.calls_per_token),
            format!("{:.1}", r.skipped_per_token),
            format!("{:.4}", r.gb_per_token),
            format!("{:.2}", r.tok_s),
            format!("{:.2}", r.ms_per_token),
            format!("{:.3}", r.over_first),
        ]);
    }
    table.print(ui)?;
    for l in &study.left_out {
        ui.line(format!("{} experts per shard left out: {}", l.experts_per_shard, l.why))?;
    }
    Ok(())
}
