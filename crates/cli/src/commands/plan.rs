//! `anemoe plan`

use crate::args::planning::{PlanArgs, PlannedCheckpoint, find_outliers, plan_checkpoint};
use crate::files::Overwrite;
use crate::outcome::Outcome;
use crate::show::plan_table::{print, print_outliers};
use crate::ui::Ui;
use anemoe_convert::outliers::Outlier;
use anemoe_convert::plan::Plan;
use anemoe_gates::residency::{self, Report};
use std::path::PathBuf;

/// Show the packages that a checkpoint becomes: sizes, compression, predicted device.
#[derive(clap::Args)]
#[command(
    after_help = "Example:\n  anemoe plan synthetic:gemma4-26b-a4b --quant lut4 --experts-per-shard 16"
)]
pub struct Args {
    /// A Hugging Face folder, a .gguf file, or synthetic:NAME?seed=N&layers=N.
    checkpoint: PathBuf,
    #[command(flatten)]
    options: PlanArgs,
    /// Write the whole plan as JSON to this file.
    #[arg(long, value_name = "FILE")]
    out: Option<PathBuf>,
    #[command(flatten)]
    overwrite: Overwrite,
    /// Print every shard, not one of each kind.
    #[arg(long)]
    all: bool,
}

pub fn run(args: Args, ui: &Ui) -> anyhow::Result<Outcome> {
    if let Some(out) = &args.out {
        args.overwrite.output(out)?;
    }
    let PlannedCheckpoint { family, plan, .. } = plan_checkpoint(&args.checkpoint, &args.options, false, ui)?;
    let outliers = find_outliers(family.as_ref(), &plan, &args.options, ui)?;
    let placement = residency::plan(family.as_ref(), &plan, &residency::CheckOptions::default())?;
    if let Some(path) = &args.out {
        let mut text = serde_json::to_vec_pretty(&full_document(&plan, &placement)?)?;
        text.push(b'\n');
        anemoe_bundle::write_atomic(path, &text)?;
    }
    ui.document(&document(&plan, &placement, &outliers))?;
    print(&plan, &placement, args.all, ui)?;
    print_outliers(&outliers, ui)?;
    Ok(Outcome::Done)
}

/// The document that `--out` writes: the plan, and the predicted device of each shard.
fn full_document(plan: &Plan, placement: &Report) -> anyhow::Result<serde_json::Value> {
    // By its text: as a value, a number of 32 bits would get the digits of 64.
    let mut document: serde_json::Value = serde_json::from_slice(&serde_json::to_vec(plan)?)?;
    let shards = document["shards"].as_array_mut().into_iter().flatten();
    for (shard, p) in shards.zip(&placement.packages) {
        shard["verdict"] = p.verdict.name().into();
        shard["verdict_reason"] = p.deciding_rule().into();
    }
    Ok(document)
}

/// The document that `--json` prints: the plan without its matrices and its chain, which `--out` writes.
fn document(plan: &Plan, placement: &Report, outliers: &[Outlier]) -> serde_json::Value {
    let shards: Vec<serde_json::Value> = plan
        .shards
        .iter()
        .zip(&placement.packages)
        .map(|(s, p)| {
            let functions: Vec<&str> = s.functions.iter().map(|f| f.name.as_str()).collect();
            serde_json::json!({
                "name": s.name, "kind": s.kind, "layer": s.layer, "functions": functions, "quant": s.quant,
                "weights": s.weights, "bytes": s.bytes, "verdict": p.verdict, "verdict_reason": p.deciding_rule(),
            })
        })
        .collect();
    serde_json::json!({
        "family": plan.family, "source": plan.source, "options": plan.options, "shards": shards, "totals": plan.totals,
        "embedding": plan.embedding, "notes": plan.notes, "auto": plan.chain.auto,
        "outliers": outliers,
    })
}
