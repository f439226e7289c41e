//! `anemoe build`

use crate::args::checkpoint_text::bos;
use crate::args::hub_checkpoint::{Extent, locate};
use crate::args::numbers::at_least_one;
use crate::args::planning::{PlanArgs, PlanUse, PlannedCheckpoint, find_outliers, plan_checkpoint};
use crate::args::store_args::{OpenStore, TRANSFERS, sending};
use crate::commands::push;
use crate::gate_reference::{read_goldens, reference};
use crate::outcome::Outcome;
use crate::part_store::{PartPusher, manifest_part, push_part, resume_part};
use crate::recorder::{JournalArgs, Recorder, facts};
use crate::shell::quoted;
use crate::show::build_report::print;
use crate::show::plan_table::print_outliers;
use crate::signals;
use crate::ui::{self, Ui};
use anemoe_bundle::journal::status;
use anemoe_convert::build::{
    self, Build, BuildEvent, BuildPart, BundleFiles, CheckpointOrigin, Needs, bundle_files,
};
use anemoe_convert::plan::Plan;
use anemoe_convert::variants::Variants;
use anemoe_gates::gated::{self, GateStage, GatedReport, NamedGolden};
use anemoe_gates::golden_gate::{self as gates, MIN_COSINE};
use anemoe_gates::{layer_sample, probe, residency};
use anemoe_hub::SendReport;
use anemoe_io::{Error, locked};
use anyhow::{Context, bail};
use indicatif::ProgressBar;
use std::path::{Path, PathBuf};
use std::sync::atomic::{AtomicU64, AtomicUsize, Ordering};
use std::sync::{Arc, Mutex};
use std::time::Instant;

/// Build a bundle of Core ML packages from a checkpoint, and check it.
///
/// A shard is one package. Shards that differ only in their weights are a group, and one of each group, its representative, is
/// built first. The representatives have to pass two gates: the Neural Engine is predicted to run them, and they compute nearly
/// what their FP16 form computes. Then the other shards are built, and the whole has to pass the same. Exit status 1 when a gate
/// fails. A build that was interrupted goes on where it stopped.
#[derive(clap::Args)]
#[command(
    after_help = "Example:\n  anemoe build models/small-gemma4 -o small.anemoe --quant lut4 --attn-quant lut6 --head-quant lut6"
)]
pub struct Args {
    /// A Hugging Face folder, a .gguf file, hf:OWNER/NAME[@REV] from the hub, or synthetic:NAME?seed=N&layers=N.
    checkpoint: PathBuf,
    /// The bundle to write.
    #[arg(short, long, value_name = "BUNDLE")]
    out: PathBuf,
    #[command(flatten)]
    options: PlanArgs,
    /// Shards that are built at a time [default: one per processor, at most 8, within half of the free memory].
    #[arg(long, value_name = "N", value_parser = at_least_one)]
    jobs: Option<usize>,
    /// Most memory for shards that are built at a time, in MB: fewer at a time where they would need more.
    #[arg(long, value_name = "MB", value_parser = megabytes)]
    max_memory: Option<u64>,
    /// Build without gates; chain.json says that they were skipped.
    #[arg(long)]
    skip_gates: bool,
    /// Golden for the gates: a run of the checkpoint in f32, from `anemoe golden` or Hugging Face transformers [default: such a run
    /// on a built-in text]. Given several times, the whole has to pass with each; shards are probed with the first.
    #[arg(long, value_name = "F.npz")]
    golden: Vec<PathBuf>,
    /// Probes (random test vectors) per representative, besides the values that the prompt gives before its layer.
    #[arg(long, value_name = "N", default_value_t = probe::PROBES)]
    probes: usize,
    /// Layers, evenly spread, of which shards are probed before all others are built, besides those whose weights stand out
    /// most. 0 probes neither.
    #[arg(long, value_name = "N", default_value_t = layer_sample::LAYERS)]
    probe_layers: usize,
    /// Seed of the probes.
    #[arg(long, value_name = "N", default_value_t = probe::SEED)]
    probe_seed: u64,
    /// Folder for temporary files of the gates, the FP16 forms of shards [default: in the unfinished bundle].
    #[arg(long, value_name = "DIR")]
    scratch: Option<PathBuf>,
    /// Build only every N-th shard from the I-th on, beside other processes that build the others into the same folder (I from
    /// 0; N/N is 0/N, so counting from 1 does as well); `assemble` completes the bundle. With N alone, I is taken from
    /// SLURM_ARRAY_TASK_ID, JOB_COMPLETION_INDEX or AWS_BATCH_JOB_ARRAY_INDEX.
    #[arg(long, value_name = "I/N", value_parser = share)]
    shard: Option<Share>,
    /// Send the bundle, or the part of --shard, to this store: a folder or s3://BUCKET/PREFIX. Shards of a part are sent as they
    /// are finished, and a part whose folder is gone goes on from there. `assemble --pull` puts the parts together.
    #[arg(long, value_name = "STORE", value_hint = clap::ValueHint::DirPath)]
    push: Option<PathBuf>,
    /// Name of the bundle in the store [default: that of --out].
    #[arg(long, value_name = "NAME", requires = "push")]
    name: Option<String>,
    #[command(flatten)]
    journal: JournalArgs,
}

/// Value of `--shard`.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
struct Share {
    index: Option<usize>,
    of: usize,
}

/// Most parts of a build: more than any model has shards.
const MAX_PARTS: usize = 100_000;

/// Environment variables with the index of an array job: of Slurm, of Kubernetes and of AWS Batch.
const ARRAY_INDICES: [&str; 3] = ["SLURM_ARRAY_TASK_ID", "JOB_COMPLETION_INDEX", "AWS_BATCH_JOB_ARRAY_INDEX"];

fn megabytes(text: &str) -> Result<u64, String> {
    let wrong = || format!("`{text}` is not a number of MB from 1 on");
    text.parse().ok().filter(|n| (1..1 << 40).contains(n)).ok_or_else(wrong)
}

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
    fn part(self, variable: impl Fn(&str) -> Option<String>) -> anyhow::Result<BuildPart> {
        let index = match self.index {
            Some(index) => index,
            None => {
                let set = |name: &&'static str| Some((*name, variable(name).filter(|v| !v.is_empty())?));
                let found = ARRAY_INDICES.iter().find_map(set);
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
        Ok(BuildPart { index: index % self.of, of: self.of })
    }
}

pub fn run(args: Args, ui: &Ui) -> anyhow::Result<Outcome> {
    Ok(if gated(args, ui)?.pass { Outcome::Done } else { Outcome::GateFailed })
}

/// Builds a checkpoint through its gates and shows the report.
pub fn gated(args: Args, ui: &Ui) -> anyhow::Result<GatedReport> {
    // Before a search for kinds, which may take minutes.
    if args.out.exists() && !args.out.is_dir() {
        return Err(Error::usage(format!("{}: exists and is not a folder", args.out.display())).into());
    }
    if let Some(scratch) = &args.scratch {
        anyhow::ensure!(scratch.is_dir(), "--scratch {}: no such folder", scratch.display());
    }
    let mut goldens = read_goldens(&args.golden)?;
    let PlannedCheckpoint { family, plan, importance } =
        plan_checkpoint(&args.checkpoint, &args.options, PlanUse::GatedBuild, ui)?;
    let family = family.as_ref();
    let jobs = args.jobs.unwrap_or_else(build::default_jobs);
    let jobs =
        args.max_memory.map_or(jobs, |mb| build::jobs_within(jobs, Some(mb.saturating_mul(1_000_000))));
    let part = args.shard.map(|s| s.part(|name| std::env::var(name).ok())).transpose()?;
    for NamedGolden { path, golden } in &goldens {
        gates::fits(golden, &plan.chain).map_err(|what| anemoe_convert::Error::invalid(path, what))?;
    }
    let also = goldens.split_off(goldens.len().min(1));
    let golden = goldens.pop().map(|g| g.golden);
    let first = args.golden.first().map(PathBuf::as_path);
    for note in &plan.notes {
        ui.line(format!("note: {note}"))?;
    }
    let outliers = find_outliers(family, &plan, &args.options, ui)?;
    print_outliers(&outliers, ui)?;
    signals::announce_rest();
    let checkpoint = &family.checked_checkpoint().checkpoint;
    let mut reference = || reference(checkpoint, &plan, golden.as_ref(), ui);
    let options = gated::GateOptions {
        jobs,
        skip_gates: args.skip_gates,
        min_cosine: gate_cosine(&args.options, &plan),
        probes: args.probes,
        probe_layers: args.probe_layers,
        outliers: &outliers,
        seed: args.probe_seed,
        residency: residency::CheckOptions::default(),
        scratch: args.scratch.as_deref(),
        bos: bos(checkpoint),
        reference_given: golden.is_some(),
        reference: &mut reference,
        also: &also,
    };
    let recorder = Recorder::new(&args.journal, "build");
    let store = args
        .push
        .as_ref()
        .map(|store| OpenStore::open(store, args.name.as_deref(), &args.out))
        .transpose()?;
    let store = store.map(Arc::new);
    let resumed = match (&store, part) {
        (Some(store), Some(part)) => {
            let plan_sha256 = build::plan_sha256(family, &plan, importance.as_ref())?;
            let resumed = resume_part(store, &args.out, part, &plan_sha256)?;
            if resumed.bytes > 0 {
                let bytes = ui::bytes(resumed.bytes);
                ui::message(format!("{}: {bytes} of this part were in {}", args.out.display(), store.shown));
            }
            Some((Arc::clone(store), manifest_part(part, &plan_sha256, false), resumed))
        }
        (Some(store), None) => {
            store.objects.prepare()?;
            None
        }
        (None, _) => None,
    };
    let build = Build::begin(family, &plan, importance.as_ref(), &args.out, part)?;
    let part_name = part.map(|p| format!("{}/{}", p.index, p.of));
    recorder.begin(&args.out, facts::begun(&plan, part_name.clone()));
    build.remember(&source(&args.checkpoint, &checkpoint.variants)?)?;
    let all = plan.shards.len();
    let progress = Progress::new(&plan, build.own_shards(), ui);
    // A part that is complete in the store stays complete there: it is sent again as a whole, and not shard by shard.
    let pusher = resumed
        .filter(|(_, _, resumed)| !resumed.finished)
        .map(|(store, part, resumed)| PartPusher::start(store, args.out.clone(), part, resumed.files))
        .transpose()?;
    let report = gated::run(build, options, &|event| {
        if let (Some(pusher), gated::GatedEvent::Build(BuildEvent::ShardDone { shard, .. })) =
            (&pusher, &event)
        {
            pusher.shard(shard);
        }
        progress.on(event);
    });
    progress.bar.finish_and_clear();
    if let Some(pusher) = pusher {
        pusher.finish();
    }
    let report = match report {
        Ok(report) => report,
        Err(e) => {
            // A build that could not be kept is deleted with its journal.
            if args.out.is_dir() {
                let error = serde_json::json!({"part": part_name, "error": e.to_string()});
                recorder.end(&args.out, status::ERROR, facts::of(error));
            }
            return Err(e.into());
        }
    };
    for (said, facts) in facts::gates(&report, first) {
        recorder.also(&args.out, "gate", said, None, facts);
    }
    let status = if report.pass { status::DONE } else { status::FAIL };
    recorder.end(
        &args.out,
        status,
        match &report.build {
            Some(built) => facts::build(built, &args.out, part_name),
            None => facts::of(
                serde_json::json!({"part": part_name, "failed": report.failed.map(GateStage::name)}),
            ),
        },
    );
    let pushed = match store.filter(|_| report.pass) {
        Some(store) => Some((push_built(&args.out, &store, part)?, store)),
        None => None,
    };
    match &pushed {
        None => ui.document(&report)?,
        Some((sent, store)) => {
            let mut document = serde_json::to_value(&report)?;
            document["push"] = push::document(store, sent, &[]);
            ui.document(&document)?;
        }
    }
    print(&report, &args.out, first, all, ui)?;
    if let Some((sent, store)) = &pushed {
        push::print(store, sent, ui)?;
    }
    if let (Some(part), true) = (part, report.pass) {
        let completes = match &pushed {
            Some((_, store)) => {
                format!("{} --pull {}", quoted(Path::new(&store.name)), quoted(Path::new(&store.shown)))
            }
            None => quoted(&args.out),
        };
        ui.line(format!(
            "part {}/{} is done; anemoe assemble {completes} completes the bundle",
            part.index, part.of
        ))?;
    }
    Ok(report)
}

/// Sends the part that was built, or the finished bundle.
fn push_built(bundle: &Path, store: &OpenStore, part: Option<BuildPart>) -> anyhow::Result<SendReport> {
    let files = bundle_files(bundle)?;
    if let Some(report) = push::push_bundle(bundle, store, &files, TRANSFERS, false)? {
        return Ok(report);
    }
    let BundleFiles::Parts(parts) = files else { bail!("{}: there is nothing to push", bundle.display()) };
    let own = parts.iter().find(|p| Some(p.part) == part);
    let own = own.with_context(|| format!("{}: the part is not there any more", bundle.display()))?;
    Ok(push_part(bundle, store, own, &sending(TRANSFERS, false))?)
}

/// Returns the checkpoint's origin in a form that another process can open: the pinned name of the hub, or the absolute path.
fn source(spec: &Path, variants: &Variants) -> anyhow::Result<CheckpointOrigin> {
    let pinned = locate(spec, Extent::Whole)?.pinned.map(|pinned| pinned.to_string().into());
    let absolute = spec.exists().then(|| std::path::absolute(spec).ok()).flatten();
    let checkpoint = pinned.or(absolute).unwrap_or_else(|| spec.to_path_buf());
    Ok(CheckpointOrigin { checkpoint, zaya_skip: variants.zaya_skip.map(|s| s.name().to_string()) })
}

/// Returns the cosine that gates require. A search measures its aim on another text, so the aim never raises this bound.
fn gate_cosine(options: &PlanArgs, plan: &Plan) -> f64 {
    let asked = options.min_cosine.unwrap_or(MIN_COSINE);
    if plan.chain.auto.is_some() { asked.min(MIN_COSINE) } else { asked }
}

/// Progress of a running build.
struct Progress {
    bar: ProgressBar,
    shards: AtomicUsize,
    of: usize,
    weights: Vec<u64>,
    /// Start of the stage, and weights that this run compressed in it.
    stage: Mutex<(Instant, u64)>,
    /// Weights that are finished, by this run or an earlier one.
    done: AtomicU64,
}

impl Progress {
    fn new(plan: &Plan, own: Vec<usize>, ui: &Ui) -> Progress {
        let weights: Vec<u64> = own.iter().map(|&i| plan.shards[i].weights).collect();
        let bar = ui.bar(weights.iter().sum::<u64>() / 1000, "building");
        let stage = Mutex::new((Instant::now(), 0));
        Progress { bar, shards: AtomicUsize::new(0), of: own.len(), weights, stage, done: AtomicU64::new(0) }
    }

    /// Estimates the time of the remaining shards at the rate of the representatives, in words; none if the representatives
    /// were reused, or nothing is left.
    fn forecast(&self) -> Option<String> {
        let (started, compressed) = *locked(&self.stage);
        let shards = self.of.checked_sub(self.shards.load(Ordering::Relaxed)).filter(|n| *n > 0)?;
        let left = self.weights.iter().sum::<u64>().saturating_sub(self.done.load(Ordering::Relaxed));
        let rate = compressed as f64 / started.elapsed().as_secs_f64();
        let seconds = left as f64 / rate;
        (seconds.is_finite() && seconds >= 1.0).then(|| {
            format!(
                "{} with {} weights: about {} at {} weights per s, the rate of the representatives",
                ui::counted(shards, "more shard"),
                ui::count(left),
                ui::duration(seconds),
                ui::count(rate as u64)
            )
        })
    }

    fn on(&self, event: gated::GatedEvent<'_>) {
        match event {
            gated::GatedEvent::Needs(needs) => {
                let text = needs_line(needs);
                self.bar.suspend(|| ui::message(text));
            }
            gated::GatedEvent::Stage(stage) => {
                // The first stage after the representatives: their rate is known.
                if stage == GateStage::RepresentativeResidency
                    && let Some(text) = self.forecast()
                {
                    self.bar.suspend(|| ui::message(text));
                }
                *locked(&self.stage) = (Instant::now(), 0);
                self.bar.set_prefix(stage.name());
                tracing::info!(stage = stage.name(), "stage");
            }
            gated::GatedEvent::Build(event) => {
                let BuildEvent::ShardDone { shard, bytes, elapsed, reused } = event;
                let done = self.shards.fetch_add(1, Ordering::Relaxed) + 1;
                self.done.fetch_add(shard.weights, Ordering::Relaxed);
                if !reused {
                    locked(&self.stage).1 += shard.weights;
                }
                if reused {
                    // A shard of an earlier run says nothing about the rate of this one.
                    self.bar.set_length(self.bar.length().unwrap_or(0).saturating_sub(shard.weights / 1000));
                } else {
                    self.bar.inc(shard.weights / 1000);
                }
                let total: u64 = self.weights.iter().sum();
                self.bar.set_message(format!(
                    "k weights of {}, {} per s; {done} of {} shards, {}",
                    ui::count(total),
                    ui::count((self.bar.per_sec() * 1000.0) as u64),
                    self.of,
                    shard.name
                ));
                tracing::info!(shard = shard.name, bytes, seconds = elapsed.as_secs_f64(), reused, "shard");
            }
        }
    }
}

fn needs_line(needs: &Needs) -> String {
    let Needs { bundle, bundle_bytes, bundle_free, scratch, scratch_bytes, scratch_free, same_disk } = needs;
    let mut line = format!("{}: needs {}", bundle.display(), ui::bytes(*bundle_bytes));
    match (*scratch_bytes, *same_disk) {
        (0, _) => {}
        (n, true) => line += &format!(", and {} of temporary files", ui::bytes(n)),
        (n, false) => {
            line += &format!(
                ", and {} of temporary files in {} ({} free)",
                ui::bytes(n),
                scratch.display(),
                ui::bytes(*scratch_free)
            );
        }
    }
    line + &format!("; {} are free", ui::bytes(*bundle_free))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn parts_count_from_zero_or_from_one() {
        let none = |_: &str| None;
        let part = |text: &str| share(text).unwrap().part(none).unwrap();
        assert_eq!(part("0/3"), BuildPart { index: 0, of: 3 });
        assert_eq!(part("2/3"), BuildPart { index: 2, of: 3 });
        assert_eq!(part("3/3"), BuildPart { index: 0, of: 3 });
        for wrong in ["4/3", "0/0", "0", "-1/3", "1/", "/3", "a/b", "1/2/3", "", "0/100001"] {
            assert!(share(wrong).is_err(), "{wrong}");
        }
    }

    #[test]
    fn schedulers_tell_the_index() {
        for name in ARRAY_INDICES {
            let set = |wanted: &str| (wanted == name).then(|| "5".to_string());
            assert_eq!(share("8").unwrap().part(set).unwrap(), BuildPart { index: 5, of: 8 });
            assert!(share("4").unwrap().part(set).unwrap_err().to_string().contains(name));
        }
        assert!(share("4").unwrap().part(|_| None).unwrap_err().to_string().contains("SLURM_ARRAY_TASK_ID"));
        assert!(share("4").unwrap().part(|_| Some("x".into())).is_err());
    }
}
