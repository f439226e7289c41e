//! The gated build: finds faults on one shard of each type, before the other shards are built.
//!
//! ```text
//! room on disk -> files of the host -> one shard of each type -> their placement -> their quality
//!              -> shards of the worst and of evenly spread layers -> their quality
//!              -> all shards, with the errors of the probed ones as a bound -> placement of all shards
//!              -> weights of all shards -> logits and tokens of the whole bundle -> chain.json
//! ```

use crate::Result;
use crate::golden_gate::{self, GoldenGate};
use crate::layer_sample::{self, LayerSample};
use crate::probe::{self, Inputs, ProbeContext, ProbeReport};
use crate::reference::Golden;
use crate::residency::rule::Verdict;
use crate::residency::{self, Report};
use crate::text_gate::{self, GateText, TextBounds, TextGate};
use crate::weight_gate::{self, WeightGate};
use anemoe_bundle::{Chain, GateResult, Gates};
use anemoe_convert::build::{self, Assembly, Build, BuildReport, Needs, WeightFault};
use anemoe_convert::models::Family;
use anemoe_convert::outliers::Outlier;
use anemoe_convert::plan::{Plan, PlannedShard};
use anemoe_runtime::model::Model;
use serde::Serialize;
use std::path::{Path, PathBuf};

/// Options of a gated build.
pub struct GateOptions<'a> {
    /// Number of shards that are built at a time.
    pub jobs: usize,
    /// True to skip the gates, and record them as skipped.
    pub skip_gates: bool,
    /// Cosine that shards have to reach at every position, and logits in the median.
    pub cosine_bound: f64,
    /// Text over which the whole is compared with the checkpoint.
    pub text: &'a GateText,
    /// Bounds of that comparison.
    pub bounds: TextBounds,
    /// Number of random probes of a shard.
    pub probes: usize,
    /// Seed of the random probes.
    pub seed: u64,
    /// Number of evenly spread layers that are probed before all shards are built; 0 also skips the worst layers.
    pub probe_layers: usize,
    /// Outliers that are known from the plan.
    pub outliers: &'a [Outlier],
    /// Options of the residency gate.
    pub residency: residency::CheckOptions,
    /// Folder for FP16 forms of shards, if it is not the bundle's.
    pub scratch: Option<&'a Path>,
    /// Token that starts a text.
    pub bos: Option<u32>,
    /// True if the golden is the user's. A failure with the user's golden counts even if the model has not learned.
    pub reference_given: bool,
    /// Makes the golden when it is needed: with hidden states, of the same checkpoint.
    pub reference: &'a mut dyn FnMut() -> Result<Golden>,
    /// Further goldens of the user, which the whole bundle has to pass, too.
    pub also: &'a [NamedGolden],
}

/// Golden from a file.
pub struct NamedGolden {
    /// Path of the file.
    pub path: PathBuf,
    /// Contents of the file.
    pub golden: Golden,
}

/// Stage of a gated build.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize)]
#[serde(rename_all = "snake_case")]
pub enum GateStage {
    /// One shard of each type is built.
    Representatives,
    /// Placement of the representatives is predicted.
    RepresentativeResidency,
    /// The checkpoint is run in f32.
    Reference,
    /// The representatives are compared with their FP16 forms.
    RepresentativeProbes,
    /// Shards of the worst and of evenly spread layers are compared with their FP16 forms.
    LayerProbes,
    /// All shards are built.
    Shards,
    /// Placement of all shards is predicted.
    Residency,
    /// Weights of all packages are compared with the checkpoint's.
    Weights,
    /// Logits and tokens of the whole bundle are compared with the golden.
    Golden,
}

impl GateStage {
    /// Returns the name for people.
    pub const fn name(self) -> &'static str {
        match self {
            GateStage::Representatives => "representative shards",
            GateStage::RepresentativeResidency => "predicted device of the representative shards",
            GateStage::Reference => "golden, the checkpoint in f32",
            GateStage::RepresentativeProbes => "quality of the representative shards",
            GateStage::LayerProbes => "quality of the worst and of evenly spread layers",
            GateStage::Shards => "all shards",
            GateStage::Residency => "predicted device of all shards",
            GateStage::Weights => "weights of all shards",
            GateStage::Golden => "logits and tokens of the whole",
        }
    }
}

/// Event of a gated build.
pub enum GatedEvent<'a> {
    /// Room that the build needs, before anything is written.
    Needs(&'a Needs),
    /// A stage begins.
    Stage(GateStage),
    /// Event of the build itself.
    Build(build::BuildEvent<'a>),
}

/// Result of a gated build.
#[derive(Debug, Serialize)]
pub struct GatedReport {
    /// True if no gate failed.
    pub pass: bool,
    /// Gate that failed. A gate of the whole leaves a complete bundle; an earlier gate leaves an unfinished build.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub failed: Option<GateStage>,
    /// Finished build, or part of one.
    #[serde(flatten)]
    pub build: Option<BuildReport>,
    /// Room that the build needs.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub needs: Option<Needs>,
    /// Gates of one shard of each type.
    pub representative: RepresentativeGates,
    /// Gates of the worst and of evenly spread layers.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub layers: Option<LayerGates>,
    /// Shard at which the build ended, because its weights' errors are far from those of matrices of the same role.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub weight_fault: Option<WeightFault>,
    /// Gates of the whole bundle.
    pub full_stack: FullStackGates,
}

/// Results of the representative shards' gates.
#[derive(Debug, Default, Serialize)]
pub struct RepresentativeGates {
    /// Names of the shards.
    pub shards: Vec<String>,
    /// Predicted placement.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub residency: Option<Report>,
    /// Quality, by probes.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub probes: Option<ProbeReport>,
}

/// Results of the gates of some layers.
#[derive(Debug, Default, Serialize)]
pub struct LayerGates {
    /// Layers that are probed.
    #[serde(flatten)]
    pub sample: LayerSample,
    /// Quality, by probes; `None` where the representatives are all shards.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub probes: Option<ProbeReport>,
}

/// Result of the golden gate with one of several goldens.
#[derive(Debug, Serialize)]
pub struct NamedGate {
    /// Path of the golden's file.
    #[serde(serialize_with = "anemoe_bundle::path_text")]
    pub golden: PathBuf,
    /// Result with this golden.
    #[serde(flatten)]
    pub gate: GoldenGate,
}

/// Results of the gates of the whole bundle.
#[derive(Debug, Default, Serialize)]
pub struct FullStackGates {
    /// Predicted placement of all shards.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub residency: Option<Report>,
    /// Weights compared with the checkpoint's; `None` where the checkpoint is gone.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub weights: Option<WeightGate>,
    /// Logits and tokens compared with the first golden.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub golden: Option<GoldenGate>,
    /// Logits and tokens compared with the other goldens.
    #[serde(skip_serializing_if = "Vec::is_empty")]
    pub also: Vec<NamedGate>,
    /// Predictions over a text compared with the checkpoint's; `None` where the checkpoint is gone, or has not learned
    /// to predict text.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub text: Option<TextGate>,
    /// Nats per token by which the model predicts the prompt better than chance; present where they are too few for
    /// the gates to decide, see [`GateResult::Undecided`].
    #[serde(skip_serializing_if = "Option::is_none")]
    pub undecided: Option<f64>,
}

/// Largest bundle, in bytes, that the gates keep in memory as a whole.
const MAX_RESIDENT_BYTES: u64 = 1 << 30;

impl GatedReport {
    /// Names the gate at which the build ended, with the packages that failed there; none if none failed.
    pub fn stopped(&self) -> Option<String> {
        let stage = self.failed?.name();
        let first = &self.representative;
        let placed =
            first.residency.iter().flat_map(|r| &r.packages).filter(|p| p.verdict == Verdict::NotAne);
        let layers = self.layers.iter().flat_map(|l| &l.probes);
        let probed = first.probes.iter().chain(layers).flat_map(|r| &r.shards).filter(|s| !s.pass);
        let mut names: Vec<&str> =
            placed.map(|p| p.name.as_str()).chain(probed.map(|s| s.shard.as_str())).collect();
        names.extend(self.weight_fault.iter().map(|w| w.shard.as_str()));
        names.sort_unstable();
        names.dedup();
        Some(if names.is_empty() {
            format!("`{stage}`")
        } else {
            format!("`{stage}` ({})", names.join(", "))
        })
    }

    fn new(needs: Option<Needs>) -> GatedReport {
        GatedReport {
            pass: true,
            failed: None,
            build: None,
            needs,
            representative: RepresentativeGates::default(),
            layers: None,
            weight_fault: None,
            full_stack: FullStackGates::default(),
        }
    }

    fn fails(mut self, stage: GateStage) -> GatedReport {
        (self.pass, self.failed) = (false, Some(stage));
        self
    }
}

/// Runs a build that has begun through its gates, to the end.
///
/// # Errors
/// There is not enough room, the checkpoint is wrong, a file cannot be written, or the build was interrupted. A
/// failed gate is not an error.
pub fn run(
    build: Build<'_>,
    options: GateOptions<'_>,
    on_event: &(dyn Fn(GatedEvent<'_>) + Sync),
) -> Result<GatedReport> {
    let mut build = build;
    match stages(&mut build, options, on_event) {
        Ok((mut report, Some(gates))) => {
            report.build = Some(build.finish(gates)?);
            Ok(report)
        }
        // Finished shards stay: the build can be continued, also without gates.
        Ok((report, None)) => Ok(report),
        Err(e) => {
            build.abandon(&e);
            Err(e)
        }
    }
}

/// Runs all stages but the last. Returns no gates where the build must not be completed.
fn stages(
    build: &mut Build<'_>,
    mut options: GateOptions<'_>,
    on_event: &(dyn Fn(GatedEvent<'_>) + Sync),
) -> Result<(GatedReport, Option<Gates>)> {
    let on_build = |e: build::BuildEvent<'_>| on_event(GatedEvent::Build(e));
    let plan = build.plan();
    // Gates run the checkpoint, which an assistant cannot do by itself.
    options.skip_gates |= plan.chain.assistant.is_some();
    let representatives = build.representatives();
    let representative_shards: Vec<&PlannedShard> =
        representatives.iter().map(|&i| &plan.shards[i]).collect();
    let sample = match options.skip_gates {
        true => LayerSample::default(),
        false => layer_sample::choose(build, options.outliers, &representatives, options.probe_layers)?,
    };
    let references = if options.skip_gates {
        Vec::new()
    } else {
        scratch_shards(build.family(), plan, &representative_shards, &sample.indices)?
    };
    let needs = Needs::of(build, &references.iter().collect::<Vec<_>>(), options.scratch)?;
    on_event(GatedEvent::Needs(&needs));
    needs.check()?;
    let mut report = GatedReport::new(Some(needs));
    build.host_files()?;
    let is_part = build.own_shards().len() < plan.shards.len();
    let cosine_bound = Some(options.cosine_bound);
    let gates = |representative, full_stack| Gates { representative, full_stack, cosine_bound };
    if options.skip_gates {
        build.note_skipped()?;
        on_event(GatedEvent::Stage(GateStage::Shards));
        build.shards(&build.own_shards(), options.jobs, &on_build)?;
        return Ok((report, Some(Gates::skipped())));
    }

    let first = FirstShards { representatives, sample };
    let golden = match first_shards(build, &mut options, first, &mut report, on_event)? {
        Ok(golden) => golden,
        Err(stage) => return Ok((report.fails(stage), None)),
    };
    on_event(GatedEvent::Stage(GateStage::Shards));
    build.shards(&build.own_shards(), options.jobs, &on_build)?;
    if let Some(fault) = build.weight_fault() {
        report.weight_fault = Some(fault);
        return Ok((report.fails(GateStage::Shards), None));
    }
    if is_part {
        return Ok((report, Some(gates(GateResult::Passed, GateResult::NotRun))));
    }
    let wanted = WantedGates {
        residency: &options.residency,
        golden: &golden,
        also: options.also,
        given: options.reference_given,
        cosine_bound: options.cosine_bound,
        origin: Some((build.family(), options.text)),
        bounds: options.bounds,
    };
    let (report, result) = full_stack(report, build.bundle(), (plan, &build.chain()?), &wanted, on_event)?;
    Ok((report, Some(gates(GateResult::Passed, result))))
}

/// Shards that are built and checked before the others.
struct FirstShards {
    /// Indices of one shard of each type.
    representatives: Vec<usize>,
    /// Shards of the sampled layers.
    sample: LayerSample,
}

/// Runs the stages before all shards are built. Returns the golden, or the gate that failed.
fn first_shards(
    build: &mut Build<'_>,
    options: &mut GateOptions<'_>,
    first: FirstShards,
    report: &mut GatedReport,
    on_event: &(dyn Fn(GatedEvent<'_>) + Sync),
) -> Result<std::result::Result<Golden, GateStage>> {
    let FirstShards { representatives, sample } = first;
    let on_build = |e: build::BuildEvent<'_>| on_event(GatedEvent::Build(e));
    let plan = build.plan();
    let representative_shards: Vec<&PlannedShard> =
        representatives.iter().map(|&i| &plan.shards[i]).collect();
    // A folder that cannot be made is found before the work.
    let scratch = build.scratch(options.scratch)?;
    on_event(GatedEvent::Stage(GateStage::Representatives));
    build.shards(&representatives, options.jobs, &on_build)?;
    report.representative.shards = representative_shards.iter().map(|s| s.name.clone()).collect();
    on_event(GatedEvent::Stage(GateStage::RepresentativeResidency));
    let draft = build.draft(representatives.iter().copied());
    let found = residency::bundle(build.bundle(), &draft, &options.residency, || ())?;
    let pass = found.pass;
    report.representative.residency = Some(found);
    if !pass {
        return Ok(Err(GateStage::RepresentativeResidency));
    }

    on_event(GatedEvent::Stage(GateStage::Reference));
    let golden = (options.reference)()?;
    on_event(GatedEvent::Stage(GateStage::RepresentativeProbes));
    let (bundle, vectors) = build.vectors(scratch.path())?;
    let chain = Chain { vectors, ..build.draft(0..0) };
    let site = ProbeContext {
        family: build.family(),
        plan,
        chain: &chain,
        bundle,
        importance: build.importance(),
        scratch: scratch.path(),
    };
    let inputs = Inputs {
        count: options.probes,
        seed: options.seed,
        real: Some(&golden),
        bos: options.bos.filter(|_| options.reference_given),
    };
    let package = |s: &PlannedShard| build.package(s);
    let found =
        probe::probe(&site, &representative_shards, &package, &inputs, options.cosine_bound, &mut |_| ())?;
    let pass = found.pass;
    report.representative.probes = Some(found);
    if !pass {
        return Ok(Err(GateStage::RepresentativeProbes));
    }

    on_event(GatedEvent::Stage(GateStage::LayerProbes));
    build.shards(&sample.indices, options.jobs, &on_build)?;
    let probes = probe_layers(build, &site, &sample, &inputs, options.cosine_bound)?;
    let pass = probes.as_ref().is_none_or(|p| p.pass);
    let probed = [representatives.as_slice(), &sample.indices].concat();
    report.layers = Some(LayerGates { sample, probes });
    build.compare_with(&probed);
    Ok(if pass { Ok(golden) } else { Err(GateStage::LayerProbes) })
}

/// Returns the shards whose FP16 forms lie in the scratch folder at a time: of the representatives, and of the
/// largest sampled layer.
fn scratch_shards(
    family: &Family,
    plan: &Plan,
    representative_shards: &[&PlannedShard],
    sample: &[usize],
) -> Result<Vec<PlannedShard>> {
    let shards: Vec<&PlannedShard> = sample.iter().map(|&i| &plan.shards[i]).collect();
    let layers = shards.chunk_by(|a, b| a.layer == b.layer).map(|l| probe::fp16_references(family, plan, l));
    let layers = layers.collect::<Result<Vec<_>>>()?;
    let bytes = |l: &Vec<PlannedShard>| l.iter().map(|s| s.weights).sum::<u64>();
    let mut all = probe::fp16_references(family, plan, representative_shards)?;
    all.extend(layers.into_iter().max_by_key(bytes).unwrap_or_default());
    Ok(all)
}

/// Probes the shards of a sample, layer by layer. The FP16 forms of a layer are removed before the next layer's are made.
fn probe_layers(
    build: &Build<'_>,
    site: &ProbeContext<'_>,
    sample: &LayerSample,
    inputs: &Inputs<'_>,
    cosine_bound: f64,
) -> Result<Option<ProbeReport>> {
    let plan = build.plan();
    let mut report: Option<ProbeReport> = None;
    let shards: Vec<&PlannedShard> = sample.indices.iter().map(|&i| &plan.shards[i]).collect();
    for layer in shards.chunk_by(|a, b| a.layer == b.layer) {
        let scratch = build.scratch(site.scratch.parent())?;
        let site = ProbeContext { scratch: scratch.path(), ..*site };
        let package = |s: &PlannedShard| build.package(s);
        let found = probe::probe(&site, layer, &package, inputs, cosine_bound, &mut |_| ())?;
        match &mut report {
            Some(report) => {
                report.pass &= found.pass;
                report.shards.extend(found.shards);
            }
            None => report = Some(found),
        }
    }
    Ok(report)
}

/// Goldens and bounds of the gates of the whole bundle.
struct WantedGates<'a> {
    residency: &'a residency::CheckOptions,
    golden: &'a Golden,
    also: &'a [NamedGolden],
    /// True if the golden is the user's.
    given: bool,
    cosine_bound: f64,
    /// Checkpoint, and the text over which predictions are compared with its own.
    origin: Option<(&'a Family, &'a GateText)>,
    bounds: TextBounds,
}

/// Runs the gates of the whole bundle, before its contract is written.
fn full_stack(
    mut report: GatedReport,
    bundle: &Path,
    (plan, chain): (&Plan, &Chain),
    wanted: &WantedGates<'_>,
    on_event: &(dyn Fn(GatedEvent<'_>) + Sync),
) -> Result<(GatedReport, GateResult)> {
    on_event(GatedEvent::Stage(GateStage::Residency));
    let placed = residency::bundle(bundle, chain, wanted.residency, || ())?;
    on_event(GatedEvent::Stage(GateStage::Weights));
    let better = golden_gate::better_than_chance(wanted.golden).unwrap_or(0.0);
    let learned = better >= golden_gate::LEARNED;
    let weights =
        wanted.origin.map(|(family, _)| weight_gate::gate(family, plan, bundle, chain, learned, &mut || ()));
    let weights = weights.transpose()?;
    on_event(GatedEvent::Stage(GateStage::Golden));
    let open = |backend: &anemoe_runtime::cpu::CpuBackend| {
        let mut model = Model::with_chain(bundle, chain.clone(), backend, &|s| bundle.join(&s.file))?;
        model.set_low_memory(chain.shards.iter().map(|s| s.bytes).sum::<u64>() > MAX_RESIDENT_BYTES);
        Ok(model)
    };
    build::check_interrupted()?;
    let gate = golden_gate::gate_with(&open, wanted.golden, wanted.cosine_bound)?;
    build::check_interrupted()?;
    let mut also = Vec::new();
    for NamedGolden { path, golden } in wanted.also {
        let gate = golden_gate::gate_with(&open, golden, wanted.cosine_bound)?;
        also.push(NamedGate { golden: path.clone(), gate });
        build::check_interrupted()?;
    }
    let text = wanted.origin.filter(|_| wanted.given || learned);
    let text = text.map(|(family, text)| {
        let model = open(&anemoe_runtime::cpu::CpuBackend::default())?;
        let checkpoint = &family.checked.checkpoint;
        text_gate::gate(&model, checkpoint, text, wanted.bounds, &mut || ())
    });
    let text = text.transpose()?;
    let passes =
        gate.pass && also.iter().all(|g| g.gate.pass) && text.as_ref().is_none_or(TextGate::is_good_enough);
    // A result that is not a number is wrong, whatever the model has learned.
    let undecided = !gate.pass && !wanted.given && !learned && gate.fp16.not_finite.is_empty();
    let is_own = weights.as_ref().is_none_or(|w| w.pass);
    let (result, failed) = match (placed.pass, is_own, passes) {
        (false, ..) => (GateResult::Failed, Some(GateStage::Residency)),
        (true, false, _) => (GateResult::Failed, Some(GateStage::Weights)),
        (true, true, true) => (GateResult::Passed, None),
        (true, true, false) if undecided => (GateResult::Undecided, None),
        (true, true, false) => (GateResult::Failed, Some(GateStage::Golden)),
    };
    report.full_stack = FullStackGates {
        residency: Some(placed),
        weights,
        golden: Some(gate),
        also,
        text,
        undecided: undecided.then_some(better),
    };
    Ok((
        match failed {
            Some(stage) => report.fails(stage),
            None => report,
        },
        result,
    ))
}

/// Goldens that a completed bundle is compared with.
pub struct GateReference {
    /// First golden.
    pub golden: Golden,
    /// Further goldens of the user, which have to pass, too.
    pub also: Vec<NamedGolden>,
    /// True if the golden is the user's. A failure with the user's golden counts even if the model has not learned.
    pub given: bool,
    /// The checkpoint, where it still is, and the text over which the whole is compared with it.
    pub origin: Option<(Family, GateText)>,
}

/// Completes a bundle whose parts passed the gates of their representatives. Runs the gates of the whole bundle where
/// there is a golden.
///
/// # Errors
/// The golden does not fit, or a file cannot be written.
pub fn assemble(
    assembly: Assembly,
    reference: Option<&GateReference>,
    residency: &residency::CheckOptions,
    (cosine_bound, bounds): (Option<f64>, TextBounds),
    on_event: &(dyn Fn(GatedEvent<'_>) + Sync),
) -> Result<GatedReport> {
    let mut report = GatedReport::new(None);
    let (mut gates, none_had) = assembly.part_gates();
    let cosine_bound = cosine_bound.or(gates.cosine_bound).unwrap_or(golden_gate::COSINE_BOUND);
    match reference {
        Some(GateReference { golden, also, given, origin }) => {
            let origin = origin.as_ref().map(|(family, text)| (family, text));
            let wanted = WantedGates { residency, golden, also, given: *given, cosine_bound, origin, bounds };
            let of = (assembly.plan(), &assembly.chain()?);
            (report, gates.full_stack) = full_stack(report, assembly.bundle(), of, &wanted, on_event)?;
            gates.cosine_bound = Some(cosine_bound);
        }
        None if none_had => gates = Gates::skipped(),
        None => {}
    }
    report.build = Some(assembly.finish(gates)?);
    Ok(report)
}
