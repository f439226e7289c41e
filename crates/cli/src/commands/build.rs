//! `anemoe build`

use super::auto::{self, Planned};
use super::plan::Options;
use crate::Outcome;
use crate::journal::{JournalArgs, Recorder, facts};
use crate::ui::{self, Ui};
use anemoe_bundle::journal::status;
use anemoe_convert::build::{BuildReport, Event, Part};
use anemoe_convert::family::Family;
use anemoe_convert::importance::Importance;
use anemoe_convert::plan::Plan;
use anyhow::{Context, bail};
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
    /// Build only every N-th shard from the I-th on, beside other processes that build the others into the same folder (I from
    /// 0; N/N is 0/N, so counting from 1 does as well); `assemble` completes the bundle. With N alone, I is taken from
    /// SLURM_ARRAY_TASK_ID, JOB_COMPLETION_INDEX or AWS_BATCH_JOB_ARRAY_INDEX.
    #[arg(long, value_name = "I/N", value_parser = share)]
    shard: Option<Share>,
    #[command(flatten)]
    journal: JournalArgs,
}

/// What `--shard` says.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
struct Share {
    index: Option<usize>,
    of: usize,
}

/// Most parts of a build: more than any model has shards.
const MAX_PARTS: usize = 100_000;

/// Indices of array jobs, as their schedulers count them.
const ARRAY_INDICES: [&str; 3] = ["SLURM_ARRAY_TASK_ID", "JOB_COMPLETION_INDEX", "AWS_BATCH_JOB_ARRAY_INDEX"];

fn share(text: &str) -> Result<Share, String> {
    let wrong = || format!("`{text}` is neither I/N nor N, with N from 1 to {MAX_PARTS} and I from 0 to N");
    let (index, of) = match text.split_once('/') {
        Some((index, of)) => (Some(index.parse().map_err(|_| wrong())?), of),
        None => (None, text),
    };
    let of = of.parse().ok().filter(|n| (1..=MAX_PARTS).contains(n)).ok_or_else(wrong)?;
    if index.is_some_and(|i: usize| i > of) {
        return Err(wrong());
    }
    Ok(Share { index, of })
}

impl Share {
    fn part(self, variable: impl Fn(&str) -> Option<String>) -> anyhow::Result<Part> {
        let index = match self.index {
            Some(index) => index,
            None => {
                let found = ARRAY_INDICES.iter().find_map(|name| Some((name, variable(name)?)));
                let (name, value) = found.with_context(|| {
                    format!(
                        "--shard {}: no index is given, and none of {} is set",
                        self.of,
                        ARRAY_INDICES.join(", ")
                    )
                })?;
                let index: usize =
                    value.parse().with_context(|| format!("{name} is `{value}`, expected a number"))?;
                if index > self.of {
                    bail!("{name} is {index}, and --shard says that there are {} parts", self.of);
                }
                index
            }
        };
        Ok(Part { index: index % self.of, of: self.of })
    }
}

pub fn run(args: Args, ui: &Ui) -> anyhow::Result<Outcome> {
    let Planned { family, plan, importance } = auto::plan(&args.checkpoint, &args.options, ui)?;
    let jobs =
        args.jobs.unwrap_or_else(|| std::thread::available_parallelism().map_or(1, |n| n.get().min(8)));
    let part = args.shard.map(|s| s.part(|name| std::env::var(name).ok())).transpose()?;
    let work = Work { family: family.as_ref(), plan: &plan, importance: importance.as_ref(), part };
    let recorder = Recorder::new(&args.journal, "build");
    let report = recorded(work, &args.out, jobs, &recorder, ui)?;
    ui.document(&report)?;
    ui.line(summary(&report))?;
    if let Some(part) = part {
        ui.line(format!("part {}/{} is done; anemoe assemble completes the bundle", part.index, part.of))?;
    }
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

/// What is to be built.
#[derive(Clone, Copy)]
pub struct Work<'a> {
    pub family: &'a dyn Family,
    pub plan: &'a Plan,
    pub importance: Option<&'a Importance>,
    pub part: Option<Part>,
}

/// Builds, and writes into the bundle's journal that it began and how it ended.
pub fn recorded(
    work: Work<'_>,
    out: &Path,
    jobs: usize,
    recorder: &Recorder,
    ui: &Ui,
) -> anyhow::Result<BuildReport> {
    let part = work.part.map(|p| format!("{}/{}", p.index, p.of));
    let begun = || recorder.begin(out, facts::begun(work.plan, part.clone()));
    let result = with_progress(work, out, jobs, &begun, ui);
    match &result {
        Ok(report) => recorder.end(out, status::DONE, facts::build(report, out, part)),
        // What could not be kept is gone, and its journal with it.
        Err(e) if recorder.has_begun() && out.is_dir() => {
            recorder.end(
                out,
                status::ERROR,
                facts::of(serde_json::json!({"part": part, "error": format!("{e:#}")})),
            );
        }
        Err(_) => {}
    }
    result
}

/// Builds with a bar over the weights; `begun` is called once the folder is this build's own.
fn with_progress(
    work: Work<'_>,
    out: &Path,
    jobs: usize,
    begun: &(dyn Fn() + Sync),
    ui: &Ui,
) -> anyhow::Result<BuildReport> {
    let Work { family, plan, importance, part } = work;
    let (index, of) = part.map_or((0, 1), |p| (p.index, p.of));
    let own = plan.shards.iter().skip(index).step_by(of);
    let bar = ui.bar(own.map(|s| s.weights).sum::<u64>() / 1000, "building");
    let on_event = |event: Event<'_>| {
        let Event::ShardDone { shard, bytes, elapsed, reused } = event else { return begun() };
        bar.inc(shard.weights / 1000);
        bar.set_message(format!("k weights, {}", shard.name));
        tracing::info!(shard = shard.name, bytes, seconds = elapsed.as_secs_f64(), reused, "shard");
    };
    let report = match part {
        None => anemoe_convert::build::build(family, plan, importance, out, jobs, &on_event),
        Some(part) => anemoe_convert::build::build_part(family, plan, importance, out, part, jobs, &on_event),
    };
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

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn parts_count_from_zero_or_from_one() {
        let none = |_: &str| None;
        let part = |text: &str| share(text).unwrap().part(none).unwrap();
        assert_eq!(part("0/3"), Part { index: 0, of: 3 });
        assert_eq!(part("2/3"), Part { index: 2, of: 3 });
        assert_eq!(part("3/3"), Part { index: 0, of: 3 });
        for wrong in ["4/3", "0/0", "0", "-1/3", "1/", "/3", "a/b", "1/2/3", "", "0/100001"] {
            assert!(share(wrong).is_err(), "{wrong}");
        }
    }

    #[test]
    fn schedulers_tell_the_index() {
        for name in ARRAY_INDICES {
            let set = |wanted: &str| (wanted == name).then(|| "5".to_string());
            assert_eq!(share("8").unwrap().part(set).unwrap(), Part { index: 5, of: 8 });
            assert!(share("4").unwrap().part(set).unwrap_err().to_string().contains(name));
        }
        assert!(share("4").unwrap().part(|_| None).unwrap_err().to_string().contains("SLURM_ARRAY_TASK_ID"));
        assert!(share("4").unwrap().part(|_| Some("x".into())).is_err());
    }
}
