//! The gated build: what can fail, fails on one shard of each sort, before the others are built.
//!
//! ```text
//! room on disk -> files of the host -> one shard of each sort -> their placement -> their quality
//!              -> shards of the worst and of evenly spread layers -> their quality
//!              -> all shards, held to the errors of those -> placement of all -> logits and tokens of the whole -> chain.json
//! ```

use crate::Result;
use crate::golden_gate::{self, GoldenGate};
use crate::layer_sample::{self, LayerSample};
use crate::probe::{self, Inputs, ProbeContext, ProbeReport};
use crate::reference::Golden;
use crate::residency::{self, Report};
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
    /// Shards that are built at a time.
    pub jobs: usize,
    /// No gates: they are recorded as skipped.
    pub skip_gates: bool,
    /// Cosine that shards and logits must reach, at every position and step.
    pub min_cosine: f64,
    /// Random probes of a shard.
    pub probes: usize,
    /// Seed of the random probes.
    pub seed: u64,
    /// Evenly spread layers that are probed before all shards are built; with 0, the worst ones are not either.
    pub probe_layers: usize,
    /// Outliers that are known.
    pub outliers: &'a [Outlier],
    /// For the residency gate.
    pub residency: residency::CheckOptions,
    /// Folder for FP16 forms of shards, where it is not to be the bundle's.
    pub scratch: Option<&'a Path>,
    /// The token that starts a text.
    pub bos: Option<u32>,
    /// The reference is the user's, and decides whatever the model is.
    pub reference_given: bool,
    /// Makes the reference run when it is needed: with hidden states, of the very checkpoint.
    pub reference: &'a mut dyn FnMut() -> Result<Golden>,
    /// More references of the user's, which the whole has to pass, too.
    pub also: &'a [NamedGolden],
}

/// A reference run from a file.
pub struct NamedGolden {
    /// The file.
    pub path: PathBuf,
    /// Its contents.
    pub golden: Golden,
}

/// Stage of a gated build.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize)]
#[serde(rename_all = "snake_case")]
pub enum GateStage {
    /// One shard of each sort is built.
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
    /// Placement of all.
    Residency,
    /// Logits and tokens of the whole.
    Golden,
}

impl GateStage {
    /// Name for people.
    pub const fn name(self) -> &'static str {
        match self {
            GateStage::Representatives => "representative shards",
            GateStage::RepresentativeResidency => "predicted device of the representative shards",
            GateStage::Reference => "golden, the checkpoint in f32",
            GateStage::RepresentativeProbes => "quality of the representative shards",
            GateStage::LayerProbes => "quality of the worst and of evenly spread layers",
            GateStage::Shards => "all shards",
            GateStage::Residency => "predicted device of all shards",
            GateStage::Golden => "logits and tokens of the whole",
        }
    }
}

/// Event of a gated build.
pub enum GatedEvent<'a> {
    /// Needs of the build, before anything is written.
    Needs(&'a Needs),
    /// A stage begins.
    Stage(GateStage),
    /// Event of the build itself.
    Build(build::BuildEvent<'a>),
}

/// Result of a gated build.
#[derive(Debug, Serialize)]
pub struct GatedReport {
    /// No gate failed.
    pub pass: bool,
    /// The gate that failed. One of the whole leaves a complete bundle, one of the representatives an unfinished build.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub failed: Option<GateStage>,
    /// The finished build, or part of one.
    #[serde(flatten)]
    pub build: Option<BuildReport>,
    /// Needs of the build.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub needs: Option<Needs>,
    /// Gates of one shard of each sort.
    pub representative: RepresentativeGates,
    /// Gates of the worst and of evenly spread layers.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub layers: Option<LayerGates>,
    /// The shard at which the build ended since its weights' errors are far from those of its like.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub weight_fault: Option<WeightFault>,
    /// Gates of the whole.
    pub full_stack: FullStackGates,
}

/// Results of the representative shards' gates.
#[derive(Debug, Default, Serialize)]
pub struct RepresentativeGates {
    /// Names of the shards.
    pub shards: Vec<String>,
    /// Placement.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub residency: Option<Report>,
    /// Quality.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub probes: Option<ProbeReport>,
}

/// Results of the gates of some layers.
#[derive(Debug, Default, Serialize)]
pub struct LayerGates {
    /// Layers that are probed.
    #[serde(flatten)]
    pub sample: LayerSample,
    /// Quality; none where the representatives are all.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub probes: Option<ProbeReport>,
}

/// The golden gate with one of several references.
#[derive(Debug, Serialize)]
pub struct NamedGate {
    /// The reference's file.
    #[serde(serialize_with = "anemoe_bundle::path_text")]
    pub golden: PathBuf,
    /// Result with it.
    #[serde(flatten)]
    pub gate: GoldenGate,
}

/// Results of the gates of the whole.
#[derive(Debug, Default, Serialize)]
pub struct FullStackGates {
    /// Placement.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub residency: Option<Report>,
    /// Logits and tokens.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub golden: Option<GoldenGate>,
    /// The same with the other references, where there are several.
    #[serde(skip_serializing_if = "Vec::is_empty")]
    pub also: Vec<NamedGate>,
    /// Nats per token by which the model predicts the prompt better than chance, where that is too little for
    /// the gates to decide anything, see [`GateResult::Undecided`].
    #[serde(skip_serializing_if = "Option::is_none")]
    pub undecided: Option<f64>,
}

/// Bundles of more bytes are not to be resident as a whole while they are tried.
const FRUGAL: u64 = 1 << 30;

impl GatedReport {
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

/// Takes a build that has begun through its gates.
///
/// # Errors
/// There is not enough room, the checkpoint is wrong, a file cannot be written, or the build was interrupted. A gate that
/// fails is no error.
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
        // Finished shards stay: the build can go on, without its gates if need be.
        Ok((report, None)) => Ok(report),
        Err(e) => {
            build.abandon(&e);
            Err(e)
        }
    }
}

/// All stages but the last; without gates where the build must not be completed.
fn stages(
    build: &mut Build<'_>,
    mut options: GateOptions<'_>,
    on_event: &(dyn Fn(GatedEvent<'_>) + Sync),
) -> Result<(GatedReport, Option<Gates>)> {
    let on_build = |e: build::BuildEvent<'_>| on_event(GatedEvent::Build(e));
    let plan = build.plan();
    let representatives = build.representatives();
    let sorts: Vec<&PlannedShard> = representatives.iter().map(|&i| &plan.shards[i]).collect();
    let sample = match options.skip_gates {
        true => LayerSample::default(),
        false => layer_sample::choose(build, options.outliers, &representatives, options.probe_layers)?,
    };
    let references = if options.skip_gates {
        Vec::new()
    } else {
        scratch_shards(build.family(), plan, &sorts, &sample.indices)?
    };
    let needs = Needs::of(build, &references.iter().collect::<Vec<_>>(), options.scratch)?;
    on_event(GatedEvent::Needs(&needs));
    needs.check()?;
    let mut report = GatedReport::new(Some(needs));
    build.host_files()?;
    let is_part = build.own().len() < plan.shards.len();
    let min_cosine = Some(options.min_cosine);
    let gates = |representative, full_stack| Gates { representative, full_stack, min_cosine };
    if options.skip_gates {
        build.note_skipped()?;
        on_event(GatedEvent::Stage(GateStage::Shards));
        build.shards(&build.own(), options.jobs, &on_build)?;
        return Ok((report, Some(Gates::skipped())));
    }

    let first = FirstShards { representatives, sample };
    let golden = match first_shards(build, &mut options, first, &mut report, on_event)? {
        Ok(golden) => golden,
        Err(stage) => return Ok((report.fails(stage), None)),
    };
    on_event(GatedEvent::Stage(GateStage::Shards));
    build.shards(&build.own(), options.jobs, &on_build)?;
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
        min_cosine: options.min_cosine,
    };
    let (report, result) = full_stack(report, build.bundle(), &build.chain()?, &wanted, on_event)?;
    Ok((report, Some(gates(GateResult::Passed, result))))
}

/// The shards that are built and looked at before the others.
struct FirstShards {
    /// Indices of one of each sort.
    representatives: Vec<usize>,
    /// Shards of some layers.
    sample: LayerSample,
}

/// The stages up to those of all shards: gives the reference run, or the gate that failed.
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
    let sorts: Vec<&PlannedShard> = representatives.iter().map(|&i| &plan.shards[i]).collect();
    // One that cannot be made is found before the work.
    let scratch = build.scratch(options.scratch)?;
    on_event(GatedEvent::Stage(GateStage::Representatives));
    build.shards(&representatives, options.jobs, &on_build)?;
    report.representative.shards = sorts.iter().map(|s| s.name.clone()).collect();
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
    let found = probe::probe(&site, &sorts, &package, &inputs, options.min_cosine, &mut |_| ())?;
    let pass = found.pass;
    report.representative.probes = Some(found);
    if !pass {
        return Ok(Err(GateStage::RepresentativeProbes));
    }

    on_event(GatedEvent::Stage(GateStage::LayerProbes));
    build.shards(&sample.indices, options.jobs, &on_build)?;
    let probes = probe_layers(build, &site, &sample, &inputs, options.min_cosine)?;
    let pass = probes.as_ref().is_none_or(|p| p.pass);
    let probed = [representatives.as_slice(), &sample.indices].concat();
    report.layers = Some(LayerGates { sample, probes });
    build.compare_with(&probed);
    Ok(if pass { Ok(golden) } else { Err(GateStage::LayerProbes) })
}

/// The shards whose FP16 forms lie in the scratch folder at a time: those of the representatives, and of the largest layer.
fn scratch_shards(
    family: &dyn Family,
    plan: &Plan,
    sorts: &[&PlannedShard],
    sample: &[usize],
) -> Result<Vec<PlannedShard>> {
    let shards: Vec<&PlannedShard> = sample.iter().map(|&i| &plan.shards[i]).collect();
    let layers = shards.chunk_by(|a, b| a.layer == b.layer).map(|l| probe::fp16_references(family, plan, l));
    let layers = layers.collect::<Result<Vec<_>>>()?;
    let bytes = |l: &Vec<PlannedShard>| l.iter().map(|s| s.weights).sum::<u64>();
    let mut all = probe::fp16_references(family, plan, sorts)?;
    all.extend(layers.into_iter().max_by_key(bytes).unwrap_or_default());
    Ok(all)
}

/// Probes the shards of a sample, layer by layer: the FP16 forms of one are gone before those of the next are made.
fn probe_layers(
    build: &Build<'_>,
    site: &ProbeContext<'_>,
    sample: &LayerSample,
    inputs: &Inputs<'_>,
    min_cosine: f64,
) -> Result<Option<ProbeReport>> {
    let plan = build.plan();
    let mut report: Option<ProbeReport> = None;
    let shards: Vec<&PlannedShard> = sample.indices.iter().map(|&i| &plan.shards[i]).collect();
    for layer in shards.chunk_by(|a, b| a.layer == b.layer) {
        let scratch = build.scratch(site.scratch.parent())?;
        let site = ProbeContext { scratch: scratch.path(), ..*site };
        let package = |s: &PlannedShard| build.package(s);
        let found = probe::probe(&site, layer, &package, inputs, min_cosine, &mut |_| ())?;
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

/// References and bounds of the gates of the whole.
struct WantedGates<'a> {
    residency: &'a residency::CheckOptions,
    golden: &'a Golden,
    also: &'a [NamedGolden],
    /// The user's.
    given: bool,
    min_cosine: f64,
}

/// The gates of the whole, before its contract is written.
fn full_stack(
    mut report: GatedReport,
    bundle: &Path,
    chain: &Chain,
    wanted: &WantedGates<'_>,
    on_event: &(dyn Fn(GatedEvent<'_>) + Sync),
) -> Result<(GatedReport, GateResult)> {
    on_event(GatedEvent::Stage(GateStage::Residency));
    let placed = residency::bundle(bundle, chain, wanted.residency, || ())?;
    on_event(GatedEvent::Stage(GateStage::Golden));
    let open = |backend: &anemoe_runtime::cpu::CpuBackend| {
        let mut model = Model::with_chain(bundle, chain.clone(), backend, &|s| bundle.join(&s.file))?;
        model.set_low_memory(chain.shards.iter().map(|s| s.bytes).sum::<u64>() > FRUGAL);
        Ok(model)
    };
    build::check_interrupted()?;
    let gate = golden_gate::gate_with(&open, wanted.golden, wanted.min_cosine)?;
    build::check_interrupted()?;
    let mut also = Vec::new();
    for NamedGolden { path, golden } in wanted.also {
        let gate = golden_gate::gate_with(&open, golden, wanted.min_cosine)?;
        also.push(NamedGate { golden: path.clone(), gate });
        build::check_interrupted()?;
    }
    let passes = gate.pass && also.iter().all(|g| g.gate.pass);
    let learned = golden_gate::better_than_chance(wanted.golden).unwrap_or(0.0);
    // A result that is no number is wrong whatever the model has learned.
    let undecided =
        !gate.pass && !wanted.given && learned < golden_gate::LEARNED && gate.fp16.not_finite.is_empty();
    let (result, failed) = match (placed.pass, passes) {
        (false, _) => (GateResult::Failed, Some(GateStage::Residency)),
        (true, true) => (GateResult::Passed, None),
        (true, false) if undecided => (GateResult::Undecided, None),
        (true, false) => (GateResult::Failed, Some(GateStage::Golden)),
    };
    report.full_stack = FullStackGates {
        residency: Some(placed),
        golden: Some(gate),
        also,
        undecided: undecided.then_some(learned),
    };
    Ok((
        match failed {
            Some(stage) => report.fails(stage),
            None => report,
        },
        result,
    ))
}

/// Reference that a completed bundle is held to.
pub struct GateReference {
    /// The run.
    pub golden: Golden,
    /// More of the user's, which have to pass, too.
    pub also: Vec<NamedGolden>,
    /// The user's; it decides whatever the model is.
    pub given: bool,
}

/// Completes a bundle whose parts passed the gates of their representatives, with the gates of the whole where there is a
/// reference run.
///
/// # Errors
/// The reference does not fit, or a file cannot be written.
pub fn assemble(
    assembly: Assembly,
    reference: Option<&GateReference>,
    residency: &residency::CheckOptions,
    min_cosine: Option<f64>,
    on_event: &(dyn Fn(GatedEvent<'_>) + Sync),
) -> Result<GatedReport> {
    let mut report = GatedReport::new(None);
    let (mut gates, none_had) = assembly.part_gates();
    let min_cosine = min_cosine.or(gates.min_cosine).unwrap_or(golden_gate::MIN_COSINE);
    match reference {
        Some(GateReference { golden, also, given }) => {
            let wanted = WantedGates { residency, golden, also, given: *given, min_cosine };
            (report, gates.full_stack) =
                full_stack(report, assembly.bundle(), &assembly.chain()?, &wanted, on_event)?;
            gates.min_cosine = Some(min_cosine);
        }
        None if none_had => gates = Gates::skipped(),
        None => {}
    }
    report.build = Some(assembly.finish(gates)?);
    Ok(report)
}
