//! `anemoe build`

use super::auto::{self, Planned};
use super::plan::Options;
use crate::Outcome;
use crate::ui::{self, Ui};
use anemoe_convert::build::{BuildReport, Event};
use anemoe_convert::family::Family;
use anemoe_convert::importance::Importance;
use anemoe_convert::plan::Plan;
use std::collections::BTreeSet;
use std::path::{Path, PathBuf};

/// Build a bundle of Core ML packages from a checkpoint. A build that was interrupted goes on where it stopped.
#[derive(clap::Args)]
#[command(after_help = "Example:\n  anemoe build models/small-gemma4 -o small.anemoe --quant lut4")]
pub struct Args {
    /// A Hugging Face folder, a .gguf file, or synthetic:NAME?seed=N&layers=N.
    checkpoint: String,
    /// The bundle to write.
    #[arg(short, long, value_name = "BUNDLE")]
    out: PathBuf,
    #[command(flatten)]
    options: Options,
    /// Shards that are built at a time [default: one per processor, at most 8].
    #[arg(long, value_name = "N")]
    jobs: Option<usize>,
}

pub fn run(args: Args, ui: &Ui) -> anyhow::Result<Outcome> {
    let Planned { family, plan, importance } = auto::plan(&args.checkpoint, &args.options, ui)?;
    let jobs =
        args.jobs.unwrap_or_else(|| std::thread::available_parallelism().map_or(1, |n| n.get().min(8)));
    let report = with_progress(family.as_ref(), &plan, importance.as_ref(), &args.out, jobs, ui)?;
    ui.document(&report)?;
    ui.line(summary(&report))?;
    Ok(Outcome::Done)
}

/// Reads importances, all of which must be of tensors that the plan compresses.
pub fn read_importance(path: &Path, plan: &Plan) -> anyhow::Result<Importance> {
    let importance = Importance::read(path)?;
    let known: BTreeSet<&str> =
        plan.shards.iter().flat_map(|s| &s.matrices).map(|m| m.tensor.as_str()).collect();
    importance.check_names(|name| known.contains(name))?;
    for m in plan.shards.iter().flat_map(|s| &s.matrices) {
        importance.of(m)?;
    }
    Ok(importance)
}

/// Builds with a bar over the weights.
pub fn with_progress(
    family: &dyn Family,
    plan: &Plan,
    importance: Option<&Importance>,
    out: &Path,
    jobs: usize,
    ui: &Ui,
) -> anyhow::Result<BuildReport> {
    let bar = ui.bar(plan.shards.iter().map(|s| s.weights).sum::<u64>() / 1000, "building");
    let report = anemoe_convert::build::build(family, plan, importance, out, jobs, &|event| {
        let Event::ShardDone { shard, bytes, elapsed, reused } = event;
        bar.inc(shard.weights / 1000);
        bar.set_message(format!("k weights, {}", shard.name));
        tracing::info!(shard = shard.name, bytes, seconds = elapsed.as_secs_f64(), reused, "shard");
    });
    bar.finish_and_clear();
    Ok(report?)
}

/// One line about a finished build.
pub fn summary(report: &BuildReport) -> String {
    let reused = if report.reused > 0 {
        format!(", {} of them from an earlier run", report.reused)
    } else {
        String::new()
    };
    format!(
        "{}: {} packages{reused}, {} in {:.1} s; lowest weight cosine {:.5}",
        report.bundle.display(),
        report.shards,
        ui::bytes(report.package_bytes),
        report.seconds,
        report.min_weight_cosine
    )
}
