//! `anemoe build`

use crate::args::drafter::same_tokens;
use crate::args::hub_checkpoint::{Extent, locate};
use crate::args::numbers::at_least_one;
use crate::args::planning::{
    Calibration, PlanArgs, PlanUse, PlannedCheckpoint, find_outliers, plan_checkpoint,
};
use crate::args::store_args::{OpenStore, TRANSFERS};
use crate::args::text_gate_args::TextGateArgs;
use crate::args::text_windows::read_text;
use crate::command::{Command, CommandReport};
use crate::commands::push::{PushReport, push_bundle};
use crate::gate_reference::{read_goldens, reference};
use crate::part_store::{PartPusher, ResumedPart, manifest_part, push_part, resume_part};
use crate::recorder::{JournalArgs, Recorder};
use crate::shell::quoted;
use crate::show::build_report;
use crate::show::plan_table::show_outliers;
use crate::signals;
use crate::ui::{self, Ui};
use anemoe_bundle::DRAFTER_DIR;
use anemoe_bundle::journal::status;
use anemoe_convert::build::{
    self, Build, BuildEvent, BuildPart, BundleFiles, CheckpointOrigin, Needs, Share, bundle_files,
};
use anemoe_convert::checkpoint::Checkpoint;
use anemoe_convert::compressed::CompressedMatrices;
use anemoe_convert::models::{Family, is_synthetic};
use anemoe_convert::plan::Plan;
use anemoe_convert::variants::Variants;
use anemoe_gates::checkpoint_text::{bos, gate_text, tokenizer};
use anemoe_gates::facts;
use anemoe_gates::gated::{self, GateStage, GatedReport, NamedGolden};
use anemoe_gates::golden_gate::{self as gates, COSINE_BOUND};
use anemoe_gates::reference::Golden;
use anemoe_gates::search_record::SearchRecord;
use anemoe_gates::text_gate::{GateText, TextBounds};
use anemoe_gates::{layer_sample, probe, residency, text_feedback};
use anemoe_hub::{ManifestPart, SendOptions, SendReport};
use anemoe_io::{Error, json, locked};
use anemoe_runtime::sampler::SamplingDefaults;
use anemoe_text::chat::ChatTemplate;
use anyhow::{Context, bail};
use indicatif::ProgressBar;
use serde::Serialize;
use serde::de::IgnoredAny;
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
    after_help = "Examples:\n  anemoe build models/small-gemma4 -o small.anemoe --quant lut4 --attn-quant lut6 --head-quant lut6\n  anemoe build large -o large.anemoe --drafter small"
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
    /// Compress weights for a text, in UTF-8, or for the built-in one (`default`): each matrix so that its outputs change
    /// least [default: the built-in one where no --quant is given and it takes ten minutes at most, else none].
    #[arg(long, value_name = "TEXT|default|none", conflicts_with_all = ["importance", "shard"])]
    calibrate: Option<PathBuf>,
    /// Most memory for --calibrate, in MB: fewer tokens of the text where they would need more.
    #[arg(long, value_name = "MB", value_parser = megabytes, default_value_t = 12_000)]
    calibration_memory: u64,
    /// Build without gates; chain.json says that they were skipped.
    #[arg(long)]
    skip_gates: bool,
    /// Golden for the gates: a run of the checkpoint in f32, from `anemoe golden` or Hugging Face transformers [default: such a run
    /// on a built-in text]. Given several times, the whole has to pass with each; shards are probed with the first.
    #[arg(long, value_name = "F.npz")]
    golden: Vec<PathBuf>,
    #[command(flatten)]
    text_gate: TextGateArgs,
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
    /// Folder for temporary files: the FP16 forms of shards for the gates, and what a search for kinds has measured, where an
    /// interrupted one goes on [default: in the unfinished bundle].
    #[arg(long, value_name = "DIR")]
    scratch: Option<PathBuf>,
    /// Build only every N-th shard from the I-th on, beside other processes that build the others into the same folder (I from
    /// 0; N/N is 0/N, so counting from 1 does as well); `assemble` completes the bundle. With N alone, I is taken from
    /// SLURM_ARRAY_TASK_ID, JOB_COMPLETION_INDEX or AWS_BATCH_JOB_ARRAY_INDEX.
    #[arg(long, value_name = "I/N", value_parser = Share::parse)]
    shard: Option<Share>,
    /// Checkpoint of the model's assistant, or of a small model with the same tokens, which is built into the bundle and drafts
    /// for it. The options of compression and form count for it, too, but those of experts if it has none. Its gates only look for damage.
    #[arg(long, value_name = "CHECKPOINT", conflicts_with = "shard")]
    drafter: Option<PathBuf>,
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

/// Most seconds that a build takes for compressing weights for the built-in text where nobody asked for it.
const MOST_SECONDS: f64 = 600.0;

/// Least cosine of a drafter, which only damage goes below. SmolLM2's drafter, moved from Q4_0 to LUT4, has 0.9697.
const DRAFTER_COSINE: f64 = 0.8;

/// Bounds of a drafter's text gate, which only damage exceeds. SmolLM2 in LUT4 by k-means has 3 nats and 0.22 equal tokens.
const DRAFTER_BOUNDS: TextBounds =
    TextBounds { mean_kl: 5.0, p99_kl: 20.0, top1_agreement: 0.1, perplexity_ratio: 100.0 };

fn megabytes(text: &str) -> Result<u64, String> {
    let wrong = || format!("`{text}` is not a number of MB from 1 on");
    text.parse().ok().filter(|n| (1..1 << 40).contains(n)).ok_or_else(wrong)
}

impl Command for Args {
    type Report = BuildSummary;

    fn run(self, ui: &Ui) -> anyhow::Result<BuildSummary> {
        // Before a search for kinds, which may take minutes.
        build::check_free(&self.out)?;
        if let Some(scratch) = &self.scratch {
            anyhow::ensure!(scratch.is_dir(), "--scratch {}: no such folder", scratch.display());
        }
        let mut goldens = read_goldens(&self.golden)?;
        self.text_gate.bounds()?;
        let text = match &self.calibrate {
            Some(path) if path == Path::new("none") => None,
            Some(path) if path == Path::new("default") => Some(None),
            Some(path) => Some(Some(read_text(path)?)),
            None => {
                (self.options.quant.is_none() && self.options.importance.is_none() && self.shard.is_none())
                    .then_some(None)
            }
        };
        let memory = self.calibration_memory.saturating_mul(1_000_000);
        let within = self.calibrate.is_none().then_some(MOST_SECONDS);
        let calibration = text.map(|text| Calibration { text, within, memory });
        // Parts search at the same time, each for itself.
        let search_in = self.shard.is_none().then(|| self.scratch.as_ref().unwrap_or(&self.out).clone());
        let own = PlanArgs { search_in, ..self.options.clone() };
        let options = PlanArgs { calibration, ..own.clone() };
        let PlannedCheckpoint { mut family, mut plan, importance, calibration: windows, search } =
            plan_checkpoint(&self.checkpoint, &options, PlanUse::GatedBuild, ui)?;
        if let Some(note) = check_side_files(&family.checked.checkpoint)? {
            ui.line(format!("note: {note}"))?;
        }
        family.calibration = windows.as_deref().map(text_feedback::windows_sha256);
        let family = &family;
        let drafter =
            self.drafter.as_deref().map(|spec| plan_drafter(spec, &own, (family, &plan), ui)).transpose()?;
        plan.chain.drafter = drafter.as_ref().map(|_| DRAFTER_DIR.to_string());
        let bytes = build::job_bytes(&family.decoder);
        let jobs = self.jobs.unwrap_or_else(|| build::default_jobs(bytes));
        let most = self.max_memory.map(|mb| mb.saturating_mul(1_000_000));
        let jobs = most.map_or(jobs, |most| build::jobs_within(jobs, Some(most), bytes));
        let part = self.shard.map(|s| s.part(|name| std::env::var(name).ok())).transpose()?;
        for NamedGolden { path, golden } in &goldens {
            gates::fits(golden, &plan.chain).map_err(|what| anemoe_convert::Error::invalid(path, what))?;
        }
        let also = goldens.split_off(goldens.len().min(1));
        let golden = goldens.pop().map(|g| g.golden);
        for note in &plan.notes {
            ui.line(format!("note: {note}"))?;
        }
        let outliers = find_outliers(family, &plan, &self.options, ui)?;
        ui.lines(|lines| show_outliers(&outliers, lines))?;
        signals::announce_rest();
        let checkpoint = &family.checked.checkpoint;
        let model = &plan.chain.model;
        let text = match self.skip_gates {
            true => GateText::default(),
            false => self.text_gate.text(checkpoint, model.vocab_size, model.max_context)?,
        };
        let mut reference = || reference(checkpoint, &plan, golden.as_ref(), ui);
        let options = gated::GateOptions {
            outliers: &outliers,
            reference_given: golden.is_some(),
            also: &also,
            ..self.gate_options((checkpoint, &plan), jobs, &text, &mut reference)
        };
        let recorder = Recorder::new(&self.journal, "build");
        let store = match &self.push {
            Some(store) => Some(Arc::new(OpenStore::open(store, self.name.as_deref(), &self.out)?)),
            None => None,
        };
        let resumed = match (&store, part) {
            (Some(store), Some(part)) => {
                let plan_sha256 = build::plan_sha256(family, &plan, importance.as_ref())?;
                Some(resumed(store, &self.out, part, &plan_sha256)?)
            }
            (store, _) => {
                store.iter().try_for_each(|store| store.objects.prepare())?;
                None
            }
        };
        let of_drafter = drafter.as_ref().and_then(|drafter| drafter.search.as_ref());
        let records = || search.iter().chain(of_drafter);
        let build = Build::begin(family, &plan, importance.as_ref(), &self.out, part)
            .inspect_err(|e| records().for_each(|record| record.remove_after(e)))?;
        recorder.begin(&self.out, facts::begun(&plan, part_name(part)));
        build.remember(&source(&self.checkpoint, &checkpoint.variants)?)?;
        if let Some(drafter) = &drafter {
            match self.build_drafter(drafter, jobs, ui) {
                Ok(gated) if gated.pass => {}
                Ok(gated) => {
                    let (bundle, planned) = (self.out.join(DRAFTER_DIR), drafter.plan.shards.len());
                    return Ok(BuildSummary { bundle, golden: None, planned, part, gated, push: None });
                }
                Err(e) => {
                    build.abandon(&e);
                    return Err(e.into());
                }
            }
        }
        if let Some(windows) = &windows {
            let bar = ui.bar(0, "calibrating");
            let mut show = |done: usize, total: usize| ui::advance(&bar, done, total, "layers");
            if let Err(e) = text_feedback::compress(family, &plan, windows, build.folder(), &mut show) {
                build.abandon(&e);
                return Err(e.into());
            }
            bar.finish_and_clear();
            let _ = family.checked.compressed.set(CompressedMatrices::new(build.folder()));
        }
        let progress = Progress::new(&plan, build.own_shards(), ui);
        // A part that is complete in the store stays complete there: it is sent again as a whole, and not shard by shard.
        let pusher = resumed
            .filter(|(_, _, resumed)| !resumed.finished)
            .map(|(store, part, resumed)| PartPusher::start(store, self.out.clone(), part, resumed.files))
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
                if self.out.is_dir() {
                    let error = serde_json::json!({"part": part_name(part), "error": e.to_string()});
                    recorder.end(&self.out, status::ERROR, facts::of(error));
                }
                return Err(e.into());
            }
        };
        let golden = self.golden.into_iter().next();
        let planned = plan.shards.len();
        let mut summary = BuildSummary { bundle: self.out, golden, planned, part, gated: report, push: None };
        summary.record(&recorder);
        if summary.gated.pass {
            records().for_each(SearchRecord::remove);
        }
        if let Some(store) = store.filter(|_| summary.gated.pass) {
            let sent = push_built(&summary.bundle, &store, part)?;
            summary.push = Some(PushReport::new(&store, sent));
        }
        Ok(summary)
    }
}

impl Args {
    /// Returns the options of gates without a golden of the user.
    fn gate_options<'a>(
        &'a self,
        (checkpoint, plan): (&Checkpoint, &Plan),
        jobs: usize,
        text: &'a GateText,
        reference: &'a mut dyn FnMut() -> anemoe_io::Result<Golden>,
    ) -> gated::GateOptions<'a> {
        gated::GateOptions {
            jobs,
            skip_gates: self.skip_gates,
            cosine_bound: gate_cosine(&self.options, plan),
            text,
            bounds: self.text_gate.bounds().unwrap_or_default(),
            probes: self.probes,
            probe_layers: self.probe_layers,
            outliers: &[],
            seed: self.probe_seed,
            residency: residency::CheckOptions::default(),
            scratch: self.scratch.as_deref(),
            bos: bos(checkpoint),
            reference_given: false,
            reference,
            also: &[],
        }
    }

    /// Builds the drafter in the folder of the bundle. Its gates look for damage only: what it drafts is verified.
    fn build_drafter(
        &self,
        drafter: &PlannedCheckpoint,
        jobs: usize,
        ui: &Ui,
    ) -> anemoe_io::Result<GatedReport> {
        let PlannedCheckpoint { family, plan, .. } = drafter;
        let checkpoint = &family.checked.checkpoint;
        let model = &plan.chain.model;
        let text = match self.skip_gates {
            true => GateText::default(),
            false => gate_text(checkpoint, model.vocab_size, model.max_context, None)?,
        };
        let mut reference = || reference(checkpoint, plan, None, ui);
        let mut options = self.gate_options((checkpoint, plan), jobs, &text, &mut reference);
        (options.cosine_bound, options.bounds) = (DRAFTER_COSINE, DRAFTER_BOUNDS);
        let build = Build::begin(family, plan, None, &self.out.join(DRAFTER_DIR), None)?;
        let progress = Progress::new(plan, build.own_shards(), ui);
        let report = gated::run(build, options, &|event| progress.on(event));
        progress.bar.finish_and_clear();
        report
    }
}

/// Opens and plans the checkpoint of a drafter, which has to have the tokens of `target`.
fn plan_drafter(
    spec: &Path,
    options: &PlanArgs,
    (target, plan): (&Family, &Plan),
    ui: &Ui,
) -> anyhow::Result<PlannedCheckpoint> {
    // Bounds and statistics are the target's.
    let options = PlanArgs {
        max_bytes: None,
        importance: None,
        experts_per_shard: None,
        ffn_shards: None,
        ..options.clone()
    };
    let drafter = plan_checkpoint(spec, &options, PlanUse::Drafter, ui)?;
    let has_none = drafter.family.checked.checkpoint.side_file("tokenizer.json")?.is_none();
    if drafter.plan.chain.assistant.is_some() && has_none {
        return Ok(drafter);
    }
    let tokenizer = |family: &Family| -> anyhow::Result<Option<Vec<u8>>> {
        let file = family.checked.checkpoint.side_file("tokenizer.json")?;
        Ok(file.map(|file| file.read().map(|text| text.into_owned())).transpose()?)
    };
    let sizes = [plan, &drafter.plan].map(|plan| plan.chain.model.vocab_size);
    same_tokens(spec, [tokenizer(target)?, tokenizer(&drafter.family)?], sizes)?;
    Ok(drafter)
}

/// A build with its gates, and where it was sent.
#[derive(Serialize)]
pub struct BuildSummary {
    #[serde(skip)]
    pub bundle: PathBuf,
    /// The first golden that was given.
    #[serde(skip)]
    pub golden: Option<PathBuf>,
    /// Shards of the plan.
    #[serde(skip)]
    pub planned: usize,
    #[serde(skip)]
    pub part: Option<BuildPart>,
    #[serde(flatten)]
    pub gated: GatedReport,
    #[serde(skip_serializing_if = "Option::is_none")]
    pub push: Option<PushReport>,
}

impl BuildSummary {
    /// Writes the gates and the end of the build into its journal.
    pub fn record(&self, recorder: &Recorder) {
        let (gated, part) = (&self.gated, part_name(self.part));
        for (said, facts) in facts::gates(gated, self.golden.as_deref()) {
            recorder.also(&self.bundle, "gate", said, None, facts);
        }
        let facts = match &gated.build {
            Some(built) => facts::build(built, &self.bundle, part),
            None => facts::of(serde_json::json!({"part": part, "failed": gated.failed.map(GateStage::name)})),
        };
        recorder.end(&self.bundle, if gated.pass { status::DONE } else { status::FAIL }, facts);
    }
}

fn part_name(part: Option<BuildPart>) -> Option<String> {
    part.map(|p| format!("{}/{}", p.index, p.of))
}

impl CommandReport for BuildSummary {
    fn show(&self, out: &mut Vec<String>) {
        build_report::show(&self.gated, &self.bundle, self.golden.as_deref(), self.planned, out);
        self.push.iter().for_each(|push| push.show(out));
        let Some(BuildPart { index, of }) = self.part.filter(|_| self.gated.pass) else { return };
        let completes = match &self.push {
            Some(push) => {
                format!("{} --pull {}", quoted(Path::new(&push.name)), quoted(Path::new(&push.store)))
            }
            None => quoted(&self.bundle),
        };
        out.push(format!("part {index}/{of} is done; anemoe assemble {completes} completes the bundle"));
    }

    fn passed(&self) -> bool {
        self.gated.pass
    }
}

/// Fetches what earlier runs of a part sent to the store.
fn resumed(
    store: &Arc<OpenStore>,
    bundle: &Path,
    part: BuildPart,
    plan_sha256: &str,
) -> anyhow::Result<(Arc<OpenStore>, ManifestPart, ResumedPart)> {
    let resumed = resume_part(store, bundle, part, plan_sha256)?;
    if resumed.bytes > 0 {
        let bytes = ui::bytes(resumed.bytes);
        ui::message(format!("{}: {bytes} of this part were in {}", bundle.display(), store.shown));
    }
    Ok((Arc::clone(store), manifest_part(part, plan_sha256, false), resumed))
}

/// Sends the part that was built, or the finished bundle.
fn push_built(bundle: &Path, store: &OpenStore, part: Option<BuildPart>) -> anyhow::Result<SendReport> {
    let (files, options) = (bundle_files(bundle)?, SendOptions { jobs: TRANSFERS, verify: false });
    if let Some(report) = push_bundle(bundle, store, &files, &options)? {
        return Ok(report);
    }
    let BundleFiles::Parts(parts) = files else { bail!("{}: there is nothing to push", bundle.display()) };
    let own = parts.iter().find(|p| Some(p.part) == part);
    let own = own.with_context(|| format!("{}: the part is not there any more", bundle.display()))?;
    Ok(push_part(bundle, store, own, &options)?)
}

/// Opens the files beside the weights as commands that run the bundle do, so that none of them refuses what took hours to
/// build. Returns a remark if there is no tokenizer.
fn check_side_files(checkpoint: &Checkpoint) -> anyhow::Result<Option<String>> {
    for (name, file) in checkpoint.side_files()? {
        let text = file.read()?;
        let wrong = match name.ends_with(".json") {
            true => json::parse_large::<IgnoredAny>(&text).err().map(|e| format!("JSON: {e}")),
            false => anemoe_io::is_web_page(&text).then(|| format!("template: {}", json::WEB_PAGE)),
        };
        if let Some(what) = wrong {
            return Err(Error::invalid(checkpoint.path.join(name), what).into());
        }
    }
    if let Some(own) = &checkpoint.generation_config {
        let path = checkpoint.path.join("generation_config.json");
        SamplingDefaults::parse(own).map_err(|what| Error::invalid(path, what))?;
    }
    if checkpoint.path.is_dir() {
        ChatTemplate::open(&checkpoint.path, None)?;
    }
    if checkpoint.side_file("tokenizer.json")?.is_some() {
        tokenizer(checkpoint)?;
        return Ok(None);
    }
    Ok((!is_synthetic(&checkpoint.name)).then(|| {
        "there is no tokenizer.json: prompts are ids, chat and serve do not run. Where there is a tokenizer of another kind, \
         AutoTokenizer.from_pretrained(FOLDER).save_pretrained(FOLDER) of transformers writes one"
            .into()
    }))
}

/// Returns the checkpoint's origin in a form that another process can open: the pinned name of the hub, or the absolute path.
fn source(spec: &Path, variants: &Variants) -> anyhow::Result<CheckpointOrigin> {
    let pinned = locate(spec, Extent::Whole)?.pinned.map(|pinned| pinned.to_string().into());
    let absolute = spec.exists().then(|| std::path::absolute(spec).ok()).flatten();
    let checkpoint = pinned.or(absolute).unwrap_or_else(|| spec.to_path_buf());
    let zaya_skip = variants.zaya_skip.map(|s| s.name().to_string());
    Ok(CheckpointOrigin { checkpoint, zaya_skip, is_rotated: variants.is_rotated })
}

/// Returns the cosine that gates require. A search measures its aim on another text, so the aim never raises this bound.
fn gate_cosine(options: &PlanArgs, plan: &Plan) -> f64 {
    let asked = options.min_cosine.unwrap_or(COSINE_BOUND);
    if plan.chain.auto.is_some() { asked.min(COSINE_BOUND) } else { asked }
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
