//! `anemoe step`: one step of another command, in a process of its own. `anemoe help` does not show it.

use super::reproduce::command::parse;
use super::{bench, build, check, compile, doctor, golden, predict_speed, tune, validate};
use crate::args::runner::CompiledArgs;
use crate::child_work::{CommandDone, LoadSeconds, ParentLink, Work, serve};
use crate::command::execute;
use crate::outcome::Outcome;
use crate::ui::Ui;
use anemoe_bundle::Chain;
use anemoe_coreml::op_plan::OpPlan;
use anemoe_coreml::{CompiledModels, ComputeUnits, CoreMlBackend, CoreMlSettings};
use anemoe_gates::form_trial::run_trial;
use anemoe_gates::soak::{MemoryFigure, SoakLength, run_until, soak};
use anemoe_runtime::backend::{Backend, BackendPackage, KeptCache};
use anemoe_runtime::cpu::CpuBackend;
use anyhow::Context;
use serde_json::Value;
use std::path::{Path, PathBuf};
use std::time::Instant;

/// Do one step of another command.
#[derive(clap::Args)]
pub struct Args {}

pub fn run(_: Args, _: &Ui) -> anyhow::Result<Outcome> {
    serve(work)?;
    Ok(Outcome::Done)
}

fn work(work: Work, parent: &mut ParentLink) -> anyhow::Result<Value> {
    match work {
        Work::Compile { package, target } => {
            anemoe_coreml::compile(&package, &target)?;
            Ok(Value::Null)
        }
        Work::Load { package, compiled, functions } => load(&package, &compiled, &functions),
        Work::Plan { package, compiled, functions, cpu_only } => {
            let units = if cpu_only { ComputeUnits::CpuOnly } else { ComputeUnits::CpuAndNeuralEngine };
            let named = functions.len() > 1;
            let plan = |name: &String| {
                Ok((name.clone(), anemoe_coreml::plan_of(&package, &compiled, name, named, units)?))
            };
            let plans: Vec<(String, Vec<OpPlan>)> =
                functions.iter().map(plan).collect::<anyhow::Result<_>>()?;
            Ok(serde_json::to_value(plans)?)
        }
        Work::Measure { folder, packages, tokens, calls } => {
            let core_ml = CoreMlBackend::new(settings(packages.clone()))?;
            let packages = packages.into_iter().map(|(package, _)| package).collect();
            let backend = Mixed { packages, core_ml, cpu: CpuBackend::default() };
            Ok(serde_json::to_value(run_trial(&folder, &backend, tokens, calls)?)?)
        }
        Work::Soak { bundle, only, length } => soak_bundle(&bundle, &only, length, parent),
        Work::Run { bundle } => {
            let core_ml = core_ml_of(&bundle, &Chain::read(&bundle)?)?;
            let figures = run_until(&bundle, &core_ml, &mut |passes| {
                parent.report(passes);
                parent.is_stopped()
            })?;
            Ok(serde_json::to_value(figures)?)
        }
        Work::Command { command, arguments } => Ok(serde_json::to_value(run_command(&command, &arguments)?)?),
    }
}

/// Makes the Core ML backend for all packages of a bundle.
fn core_ml_of(bundle: &Path, chain: &Chain) -> anyhow::Result<CoreMlBackend> {
    Ok(CoreMlBackend::new(CoreMlSettings {
        compiled: CompiledArgs::default().models(bundle, chain),
        max_loaded_bytes: None,
        units: ComputeUnits::CpuAndNeuralEngine,
    })?)
}

/// Soaks a bundle, or some shards of it, and reports each pass.
fn soak_bundle(
    bundle: &Path,
    only: &[String],
    length: SoakLength,
    parent: &mut ParentLink,
) -> anyhow::Result<Value> {
    let chain = Chain::read(bundle)?;
    let core_ml = core_ml_of(bundle, &chain)?;
    let mut told = |passes: u64| parent.report(passes);
    let memory = MemoryFigure { name: anemoe_coreml::HELD_MEMORY, look: &anemoe_coreml::held_memory };
    if only.is_empty() {
        return Ok(serde_json::to_value(soak(bundle, &core_ml, length, memory, &mut told)?)?);
    }
    let package = |name: &String| {
        let shard = chain.shard(name).with_context(|| format!("no shard `{name}`"))?;
        Ok(bundle.join(&shard.file))
    };
    let packages = only.iter().map(package).collect::<anyhow::Result<_>>()?;
    let mixed = Mixed { packages, core_ml, cpu: CpuBackend::default() };
    let found = soak(bundle, &mixed, length, memory, &mut told)?;
    Ok(serde_json::to_value(found)?)
}

/// Runs one of the commands that `verify-on-mac` consists of.
fn run_command(name: &str, arguments: &[String]) -> anyhow::Result<CommandDone> {
    let ui = Ui::inner();
    let outcome = match name {
        "bench" => execute::<bench::Args>(parse("bench", arguments)?, "bench", &ui),
        "build" => execute::<build::Args>(parse("build", arguments)?, "build", &ui),
        "check" => check::run(parse("check", arguments)?, &ui),
        "compile" => compile::run(parse("compile", arguments)?, &ui),
        "doctor" => doctor::run(parse("doctor", arguments)?, &ui),
        "golden" => execute::<golden::Args>(parse("golden", arguments)?, "golden", &ui),
        "predict-speed" => execute::<predict_speed::Args>(parse("predict-speed", arguments)?, "predict_speed", &ui),
        "tune" => tune::run(parse("tune", arguments)?, &ui),
        "validate" => execute::<validate::Args>(parse("validate", arguments)?, "validate", &ui),
        _ => anyhow::bail!("`{name}` is not a command that a step does"),
    }?;
    let passed = matches!(outcome, Outcome::Done);
    Ok(CommandDone { passed, document: ui.into_document().unwrap_or_default() })
}

fn settings(packages: Vec<(PathBuf, PathBuf)>) -> CoreMlSettings {
    CoreMlSettings {
        compiled: CompiledModels::of_packages(packages),
        max_loaded_bytes: None,
        units: ComputeUnits::CpuAndNeuralEngine,
    }
}

/// Backend with Core ML for some packages, and the CPU executor for all others.
struct Mixed {
    packages: Vec<PathBuf>,
    core_ml: CoreMlBackend,
    cpu: CpuBackend,
}

impl Backend for Mixed {
    fn open_with(
        &self,
        path: &Path,
        caches: &[KeptCache],
    ) -> anemoe_runtime::Result<Box<dyn BackendPackage>> {
        let backend: &dyn Backend =
            if self.packages.iter().any(|p| p == path) { &self.core_ml } else { &self.cpu };
        backend.open_with(path, caches)
    }
}

fn load(package: &Path, compiled: &Path, functions: &[String]) -> anyhow::Result<Value> {
    let backend = CoreMlBackend::new(settings(vec![(package.into(), compiled.into())]))?;
    let mut seconds = LoadSeconds::new();
    for name in functions {
        let opened = backend.open(package)?;
        let started = Instant::now();
        opened.prepare(name)?;
        seconds.insert(name.clone(), started.elapsed().as_secs_f64());
    }
    Ok(serde_json::to_value(seconds)?)
}
