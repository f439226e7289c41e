//! The gated build: what can fail, fails on one shard of each sort, before the others are built.
//!
//! ```text
//! room on disk -> files of the host -> one shard of each sort -> their placement -> their quality
//!              -> all shards -> placement of all -> logits and tokens of the whole -> chain.json
//! ```

use crate::Result;
use crate::golden_gate::{self, GoldenGate};
use crate::probe::{self, Inputs, ProbeContext, ProbeReport};
use crate::reference::Golden;
use crate::residency::{self, Report};
use anemoe_bundle::{Chain, GateResult, Gates};
use anemoe_convert::build::{self, Assembly, Build, BuildReport, Needs};
use anemoe_convert::plan::PlannedShard;
use anemoe_runtime::model::Model;
use serde::Serialize;
use std::path::Path;

/// What is asked of a build.
pub struct GateOptions<'a> {
    /// Shards that are built at a time.
    pub jobs: usize,
    /// No gates: they are recorded as skipped.
    pub skip_gates: bool,
    /// Cosine that shards (in the median of their probes) and logits (at every position and step) must reach.
    pub min_cosine: f64,
    /// Random probes of a shard.
    pub probes: usize,
    /// Their seed.
    pub seed: u64,
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
}

/// Where a build is.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize)]
#[serde(rename_all = "snake_case")]
pub enum GateStage {
    /// One shard of each sort is built.
    Representatives,
    /// Their placement is predicted.
    RepresentativeResidency,
    /// The checkpoint is run in f32.
    Reference,
    /// They are compared with their FP16 forms.
    RepresentativeProbes,
    /// All shards are built.
    Shards,
    /// Placement of all.
    Residency,
    /// Logits and tokens of the whole.
    Golden,
}

impl GateStage {
    /// For people.
    pub const fn name(self) -> &'static str {
        match self {
            GateStage::Representatives => "representative shards",
            GateStage::RepresentativeResidency => "predicted device of the representative shards",
            GateStage::Reference => "golden, the checkpoint in f32",
            GateStage::RepresentativeProbes => "quality of the representative shards",
            GateStage::Shards => "all shards",
            GateStage::Residency => "predicted device of all shards",
            GateStage::Golden => "logits and tokens of the whole",
        }
    }
}

/// What happens during a gated build.
pub enum GatedEvent<'a> {
    /// What it will need, before anything is written.
    Needs(&'a Needs),
    /// A stage begins.
    Stage(GateStage),
    /// Of the build itself.
    Build(build::BuildEvent<'a>),
}

/// What a gated build did.
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
    /// What it needed.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub needs: Option<Needs>,
    /// Of one shard of each sort.
    pub representative: RepresentativeGates,
    /// Of the whole.
    pub full_stack: FullStackGates,
}

/// What the gates of the representative shards found.
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

/// What the gates of the whole found.
#[derive(Debug, Default, Serialize)]
pub struct FullStackGates {
    /// Placement.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub residency: Option<Report>,
    /// Logits and tokens.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub golden: Option<GoldenGate>,
    /// What they are held to decides nothing, see [`GateResult::Undecided`]. Then this is how much better than chance the model
    /// predicts the prompt, in nats per token.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub undecided: Option<f64>,
}

/// Bundles of more bytes are not to be resident as a whole while they are tried.
const FRUGAL: u64 = 1 << 30;

/// A model that predicts a text by less than this better than chance, in nats per token, has not learned from any.
const LEARNED: f64 = 0.5;

impl GatedReport {
    fn new(needs: Option<Needs>) -> GatedReport {
        GatedReport {
            pass: true,
            failed: None,
            build: None,
            needs,
            representative: RepresentativeGates::default(),
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
    options: GateOptions<'_>,
    on_event: &(dyn Fn(GatedEvent<'_>) + Sync),
) -> Result<(GatedReport, Option<Gates>)> {
    let on_build = |e: build::BuildEvent<'_>| on_event(GatedEvent::Build(e));
    let plan = build.plan();
    let representatives = build.representatives();
    let sorts: Vec<&PlannedShard> = representatives.iter().map(|&i| &plan.shards[i]).collect();
    let references = if options.skip_gates { Vec::new() } else { probe::fp16_references(plan, &sorts)? };
    let needs = Needs::of(build, &references, options.scratch)?;
    on_event(GatedEvent::Needs(&needs));
    needs.check()?;
    let mut report = GatedReport::new(Some(needs));
    build.host_files()?;
    let is_part = build.own().len() < plan.shards.len();
    let gates = |representative, full_stack| Gates {
        representative,
        full_stack,
        min_cosine: Some(options.min_cosine),
    };
    if options.skip_gates {
        build.note_skipped()?;
        on_event(GatedEvent::Stage(GateStage::Shards));
        build.shards(&build.own(), options.jobs, &on_build)?;
        return Ok((report, Some(Gates::skipped())));
    }

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
        return Ok((report.fails(GateStage::RepresentativeResidency), None));
    }

    on_event(GatedEvent::Stage(GateStage::Reference));
    let golden = (options.reference)()?;
    on_event(GatedEvent::Stage(GateStage::RepresentativeProbes));
    let (bundle, vectors) = build.vectors(scratch.path())?;
    let chain = Chain { vectors, ..build.draft(0..0) };
    let site = ProbeContext { family: build.family(), plan, chain: &chain, bundle, scratch: scratch.path() };
    let inputs = Inputs {
        count: options.probes,
        seed: options.seed,
        real: Some(&golden),
        bos: options.bos.filter(|_| options.reference_given),
    };
    let package = |s: &PlannedShard| build.package(s);
    let found = probe::probe(&site, &sorts, &package, &inputs, options.min_cosine, &mut |_| ())?;
    drop(scratch);
    let pass = found.pass;
    report.representative.probes = Some(found);
    if !pass {
        return Ok((report.fails(GateStage::RepresentativeProbes), None));
    }

    on_event(GatedEvent::Stage(GateStage::Shards));
    build.shards(&build.own(), options.jobs, &on_build)?;
    if is_part {
        return Ok((report, Some(gates(GateResult::Passed, GateResult::NotRun))));
    }
    let wanted = Wanted {
        residency: &options.residency,
        golden: &golden,
        given: options.reference_given,
        min_cosine: options.min_cosine,
    };
    let (report, result) = full_stack(report, build.bundle(), &build.chain()?, &wanted, on_event)?;
    Ok((report, Some(gates(GateResult::Passed, result))))
}

/// What the whole is held to.
struct Wanted<'a> {
    residency: &'a residency::CheckOptions,
    golden: &'a Golden,
    /// The user's.
    given: bool,
    min_cosine: f64,
}

/// The gates of the whole, before its contract is written.
fn full_stack(
    mut report: GatedReport,
    bundle: &Path,
    chain: &Chain,
    wanted: &Wanted<'_>,
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
    let learned = golden_gate::better_than_chance(wanted.golden).unwrap_or(0.0);
    // A result that is no number is wrong whatever the model has learned.
    let undecided = !gate.pass && !wanted.given && learned < LEARNED && gate.fp16.not_finite.is_empty();
    let (result, failed) = match (placed.pass, gate.pass) {
        (false, _) => (GateResult::Failed, Some(GateStage::Residency)),
        (true, true) => (GateResult::Passed, None),
        (true, false) if undecided => (GateResult::Undecided, None),
        (true, false) => (GateResult::Failed, Some(GateStage::Golden)),
    };
    report.full_stack = FullStackGates {
        residency: Some(placed),
        golden: Some(gate),
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

/// What a completed bundle is held to.
pub struct GateReference {
    /// The run.
    pub golden: Golden,
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
        Some(GateReference { golden, given }) => {
            let wanted = Wanted { residency, golden, given: *given, min_cosine };
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
