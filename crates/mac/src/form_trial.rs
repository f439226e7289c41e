//! Trials of forms: runs one shard in one form on random inputs, and compares it with the CPU executor.
//!
//! ```text
//! FOLDER/SHARD.mlpackage   shard in the form; several where the form has a package for each token count
//! PARTS/NAME.mlpackage     other shards that the shard's inputs need, run by the CPU executor
//! ```

use crate::caches::ModelFiles;
use anemoe_bundle::{Chain, InputBinding, Step};
use anemoe_convert::build::{check_room, write_host_vectors, write_shard};
use anemoe_convert::importance::Importance;
use anemoe_convert::models::Family;
use anemoe_convert::plan::{Plan, PlannedShard};
use anemoe_coreml::COMPILED;
use anemoe_gates::golden_gate::cosine;
use anemoe_gates::probe::{Segment, chooses_inside, segment_of};
use anemoe_io::{Error, Random, Result};
use anemoe_mlpackage::mil::FeatureShape;
use anemoe_mlpackage::package::{Package, WeightFiles};
use anemoe_runtime::backend::Backend;
use anemoe_runtime::cpu::CpuBackend;
use anemoe_runtime::model::{Model, Registers};
use serde::{Deserialize, Serialize};
use std::path::{Path, PathBuf};
use std::time::Duration;

/// Least cosine of a call's results with the CPU executor's.
pub const LEAST_COSINE: f64 = 0.99;
/// Number of first calls that are not timed.
const WARM_UP: usize = 5;
/// Most passes per call that is wanted: a pack of experts is not called when none of its experts is chosen.
const PASSES_FOR_A_CALL: usize = 40;

/// Description of a trial, for the process that runs it.
#[derive(Clone, Debug, Serialize, Deserialize)]
pub struct Trial {
    /// Folder of the shard's packages.
    folder: PathBuf,
    /// Part of the chain that leads to the shard.
    chain: Chain,
    /// Packages of the shard, which run on Core ML; at least one.
    pub models: Vec<ModelFiles>,
    /// True if a router in the shard chooses experts.
    has_router: bool,
    /// Registers that the shard's work ends in.
    outputs: Vec<String>,
    /// Registers that have to be given, behind their widths in channels.
    inputs: Vec<(usize, String)>,
    /// Folder of the other shards.
    parts: PathBuf,
}

/// Results of a trial with calls of one token count.
#[derive(Clone, Debug, Default, Serialize, Deserialize)]
pub struct TrialFigures {
    pub calls: u64,
    /// Median time of a call in microseconds, without the first calls.
    pub median_us: f64,
    /// Time in microseconds that 90 % of the calls do not exceed.
    pub p90_us: f64,
    /// Lowest cosine with the CPU executor's results; 0 where a value is not a number.
    pub min_cosine: f64,
    /// Number of tokens whose cosine is below [`LEAST_COSINE`].
    pub wrong_tokens: usize,
    /// Index of the first call with a wrong token.
    pub first_wrong: Option<usize>,
    /// Most tokens that may be wrong: 2 % where a router in the shard decides between near ties, else none.
    pub may_be_wrong: usize,
}

fn package_in(folder: &Path, shard: &str) -> PathBuf {
    folder.join(format!("{shard}.mlpackage"))
}

/// Checks that the disk has room, and writes the packages of the trial of a form. `own` are the packages of the shard
/// ([`Plan::packages`]), at least one; the two folders are for them, and for other shards.
pub fn write_trial(
    family: &Family,
    importance: Option<&Importance>,
    (plan, own): (&Plan, &[&PlannedShard]),
    (folder, parts): (PathBuf, PathBuf),
    form: &str,
) -> Result<Trial> {
    let is_own = |shard: &str| own.iter().any(|s| s.name == shard);
    let package = |shard: &str| package_in(if is_own(shard) { &folder } else { &parts }, shard);
    let (around, cut) = cut_out(family, plan, own)?;
    let needed: Vec<_> = cut.chain.shards.iter().filter_map(|s| around.shard(&s.name)).collect();
    // The package, its compiled model, as much for the Neural Engine's compiler, and other packages that are missing.
    let bytes: u64 = own.iter().map(|s| s.package_bytes()).sum();
    let missing = needed.iter().filter(|s| !is_own(&s.name) && !package(&s.name).exists());
    let bytes = 3 * bytes + bytes / 20 + missing.map(|s| s.package_bytes()).sum::<u64>();
    let sort = own[0].kind.name();
    check_room(&folder, &format!("the trial of the form `{form}` for {sort} needs about"), bytes)?;
    for path in [&parts, &folder] {
        std::fs::create_dir_all(path).map_err(|e| Error::io(path, e))?;
    }
    let vectors = write_host_vectors(family, &plan.options, &folder)?;
    for shard in needed {
        let path = package(&shard.name);
        // A package gets its name when it is whole, so an existing one is used.
        if is_own(&shard.name) && path.exists() {
            std::fs::remove_dir_all(&path).map_err(|e| Error::io(&path, e))?;
        }
        if !path.exists() {
            write_shard(family, shard, importance, &path)?;
        }
    }
    let files = |shard: &&PlannedShard| ModelFiles {
        shard: shard.name.clone(),
        package: package(&shard.name),
        compiled: folder.join(format!("{}.{COMPILED}", shard.name)),
        functions: shard.functions.iter().map(|f| f.name.clone()).collect(),
    };
    let hidden = (cut.chain.model.hidden_size, "hidden".to_string());
    let width = |seed: String| Ok((width_of(&seed, &cut.chain, &package)?, seed));
    Ok(Trial {
        models: own.iter().map(files).collect(),
        has_router: own.iter().any(|s| chooses_inside(s)),
        outputs: cut.outputs,
        inputs: std::iter::once(Ok(hidden)).chain(cut.seeds.into_iter().map(width)).collect::<Result<_>>()?,
        chain: Chain { vectors, ..cut.chain },
        folder,
        parts,
    })
}

/// Returns the width in channels of a register that has to be given, by the inputs that read it.
fn width_of(register: &str, chain: &Chain, package: &dyn Fn(&str) -> PathBuf) -> Result<usize> {
    for step in &chain.steps {
        let Step::Run(run) = step else { continue };
        let read = run.inputs.iter().find(|(_, binding)| match binding {
            InputBinding::Register { name, .. } => name == register,
            _ => false,
        });
        let Some((input, _)) = read else { continue };
        let opened = Package::open_to_run(&package(&run.shard), &[], &WeightFiles::default())?;
        let features = opened.model().functions.iter().flat_map(|f| &f.inputs);
        let widths = features.filter(|f| f.name == *input).filter_map(|f| match &f.shape {
            FeatureShape::Fixed(dims) => usize::try_from(dims.iter().product::<u64>()).ok(),
            _ => None,
        });
        if let Some(width) = widths.min() {
            return Ok(width);
        }
    }
    Err(Error::usage(format!("no input of a fixed width reads `{register}`")))
}

/// Returns the plan around the shard, and the part of its chain that leads to the shard, with all packages of the shard.
fn cut_out(family: &Family, plan: &Plan, own: &[&PlannedShard]) -> Result<(Plan, Segment)> {
    let [first, others @ ..] = own else { return Err(Error::usage("a trial of no package")) };
    let around = family.plan_around(&plan.options, first)?;
    let mut cut = segment_of(&around, &plan.chain, first)?;
    // A segment has the packages for one token only.
    for step in &mut cut.chain.steps {
        if let Step::Run(run) = step
            && run.shard == first.name
        {
            run.others = others.iter().map(|s| s.name.clone()).collect();
        }
    }
    cut.chain.head.clone_from(&cut.chain.steps);
    cut.chain.shards.extend(others.iter().map(|s| s.chain_entry()));
    Ok((around, cut))
}

/// Runs a trial until its shard has been called `calls` times with `tokens` tokens each. `backend` and the CPU executor
/// both run the whole part of the chain.
pub fn run_trial(trial: &Trial, backend: &dyn Backend, tokens: usize, calls: usize) -> Result<TrialFigures> {
    let folder = &trial.folder;
    let is_own = |shard: &str| trial.models.iter().any(|m| m.shard == shard);
    let package = |shard: &anemoe_bundle::Shard| {
        package_in(if is_own(&shard.name) { folder } else { &trial.parts }, &shard.name)
    };
    let cpu = Model::with_chain(folder, trial.chain.clone(), &CpuBackend::default(), &package)?;
    let own = Model::with_chain(folder, trial.chain.clone(), backend, &package)?;
    let of_own = |model: &Model| {
        let stats = model.shard_stats();
        let own = || stats.iter().filter(|s| is_own(&s.shard));
        (own().map(|s| s.calls).sum::<u64>(), own().map(|s| s.time).sum::<Duration>())
    };
    let (mut of_cpu, mut of_model) = (cpu.sequence(), own.sequence());
    let mut random = Random::new(1);
    let may_be_wrong = if trial.has_router { calls.saturating_mul(tokens) / 50 } else { 0 };
    let mut found = TrialFigures { min_cosine: 1.0, may_be_wrong, ..TrialFigures::default() };
    let mut times = Vec::new();
    for _ in 0..calls.saturating_mul(PASSES_FOR_A_CALL) {
        if found.calls >= calls as u64 {
            break;
        }
        if own.room_for_pass(&of_model) < tokens {
            of_cpu.clear();
            of_model.clear();
        }
        let inputs = trial.inputs.iter();
        let values: Vec<_> =
            inputs.map(|(width, name)| (name, stream(&mut random, width * tokens))).collect();
        let registers: Vec<(&str, &[f32])> = values.iter().map(|(n, v)| (n.as_str(), v.as_slice())).collect();
        let mut read = |left: Registers<'_>| -> Vec<Vec<f32>> {
            let of = |name: &String| left.get(name).and_then(|t| t.as_f32()).unwrap_or_default().to_vec();
            trial.outputs.iter().map(of).collect()
        };
        let expected = cpu.pass_from(&mut of_cpu, tokens, &registers, &mut read)?;
        let (before, time_before) = of_own(&own);
        let results = own.pass_from(&mut of_model, tokens, &registers, &mut read)?;
        let (after, time) = of_own(&own);
        if after == before {
            continue;
        }
        times.push((time - time_before).as_secs_f64() * 1e6 / (after - before) as f64);
        for lowest in (0..tokens).map(|token| lowest_cosine(&expected, &results, token, tokens)) {
            found.min_cosine = found.min_cosine.min(lowest);
            if lowest < LEAST_COSINE {
                found.wrong_tokens += 1;
                found.first_wrong = found.first_wrong.or(Some(found.calls as usize));
            }
        }
        found.calls = after;
    }
    if times.len() > 2 * WARM_UP {
        times.drain(..WARM_UP);
    }
    times.sort_by(f64::total_cmp);
    let at = |share: f64| times.get((times.len() as f64 * share) as usize).copied().unwrap_or(0.0);
    (found.median_us, found.p90_us) = (at(0.5), at(0.9));
    Ok(found)
}

/// Returns the lowest cosine of the results `[channels, tokens]` for one token; 0 where a value is not a number.
fn lowest_cosine(expected: &[Vec<f32>], results: &[Vec<f32>], token: usize, tokens: usize) -> f64 {
    let column = |all: &[f32]| -> Vec<f32> { all.iter().skip(token).step_by(tokens).copied().collect() };
    let one = |(expected, own): (&Vec<f32>, &Vec<f32>)| match expected.len() == own.len() {
        true => cosine(&column(own), &column(expected)),
        false => 0.0,
    };
    expected.iter().zip(results).map(one).fold(1.0, f64::min)
}

/// Draws `n` uniform values whose mean square is about 1, like the output of a norm.
fn stream(random: &mut Random, n: usize) -> Vec<f32> {
    let mut one = || ((random.uniform() - 0.5) * 12f64.sqrt()) as f32;
    (0..n).map(|_| one()).collect()
}
