//! Risky work, which a process of its own does, so that a crash or a hang becomes a report.

use crate::caches::{ModelFiles, compiled_models};
use crate::child::{Ended, ParentLink, Worker, serve};
use crate::form_trial::{Trial, run_trial};
use crate::soak::{SoakLength, run_until, soak};
use anemoe_bundle::Chain;
use anemoe_coreml::{CompiledModels, ComputeUnits, CoreMlBackend, CoreMlSettings, plan_of};
use anemoe_io::{Error, Result};
use anemoe_runtime::backend::{Backend, BackendPackage, KeptCache};
use anemoe_runtime::cpu::CpuBackend;
use serde::de::DeserializeOwned;
use serde::{Deserialize, Serialize};
use serde_json::Value;
use std::collections::BTreeMap;
use std::path::{Path, PathBuf};
use std::time::{Duration, Instant};

/// Work of a child.
#[derive(Clone, Debug, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
pub enum Work {
    /// Compiles a package.
    Compile(ModelFiles),
    /// Loads functions, one after the other: [`LoadSeconds`].
    Load(ModelFiles),
    /// Asks for the plans of functions, as for the CPU alone if `cpu_only`: a list of operations by function.
    Plan { model: ModelFiles, cpu_only: bool },
    /// Runs the trial of a form, these packages on Core ML: [`crate::form_trial::TrialFigures`].
    Measure { trial: Box<Trial>, models: Vec<ModelFiles>, tokens: usize, calls: usize },
    /// Soaks a bundle, the shards `only` on Core ML, or all if it is empty: [`crate::soak::SoakFigures`].
    Soak { bundle: PathBuf, only: Vec<String>, length: SoakLength },
    /// Runs a bundle on Core ML until it is told to stop, and reports progress once everything is loaded: tokens per
    /// second.
    Run { bundle: PathBuf },
    /// Runs a whole command: [`CommandDone`].
    Command { command: String, arguments: Vec<String> },
}

/// Result of [`Work::Command`].
#[derive(Clone, Debug, Serialize, Deserialize)]
pub struct CommandDone {
    /// True if the command's gate passed, or the command has no gate.
    pub passed: bool,
    /// Document of the command.
    pub document: Value,
}

/// Seconds to load each function, by name.
pub type LoadSeconds = BTreeMap<String, f64>;

impl Work {
    /// Returns the name of the step, for people.
    pub fn name(&self) -> &'static str {
        match self {
            Work::Compile(_) => "compile",
            Work::Load(_) => "load",
            Work::Plan { .. } => "plan",
            Work::Measure { .. } => "measure",
            Work::Soak { .. } => "soak",
            Work::Run { .. } => "run",
            Work::Command { .. } => "command",
        }
    }

    /// Starts a child that does the work.
    pub fn start(&self) -> Result<Worker> {
        Worker::start(self, matches!(self, Work::Command { .. }))
    }

    /// Does the work in a child and waits for it, at most for `limit`.
    pub fn run(&self, limit: Duration) -> Result<Ended> {
        self.start()?.wait(limit)
    }
}

/// Converts the result of a child's work to JSON.
pub fn to_value(result: &impl Serialize) -> Result<Value> {
    serde_json::to_value(result).map_err(|e| Error::usage(format!("result of a step: {e}")))
}

/// Reads the result of a child's work.
pub fn from_value<T: DeserializeOwned>(result: Value) -> Result<T> {
    serde_json::from_value(result).map_err(|e| Error::usage(format!("result of a step: {e}")))
}

/// Runs a whole command, given its name and arguments.
type CommandRunner = dyn Fn(&str, &[String]) -> std::result::Result<CommandDone, String>;

/// Serves a parent as its child, with `command` for whole commands.
///
/// # Errors
/// Standard input holds no work.
pub fn serve_parent(command: &CommandRunner) -> Result<()> {
    serve(|work, parent| match work {
        Work::Command { command: name, arguments } => {
            to_value(&command(&name, &arguments)?).map_err(|e| e.to_string())
        }
        work => perform(work, parent).map_err(|e| e.to_string()),
    })
}

fn perform(work: Work, parent: &ParentLink) -> Result<Value> {
    match work {
        Work::Compile(model) => anemoe_coreml::compile(&model.package, &model.compiled).map(|_| Value::Null),
        Work::Load(model) => to_value(&load(model)?),
        Work::Plan { model: ModelFiles { package, compiled, functions }, cpu_only } => {
            let units = if cpu_only { ComputeUnits::CpuOnly } else { ComputeUnits::CpuAndNeuralEngine };
            let named = functions.len() > 1;
            let plan = |name: &String| Ok((name.clone(), plan_of(&package, &compiled, name, named, units)?));
            to_value(&functions.iter().map(plan).collect::<Result<Vec<_>>>()?)
        }
        Work::Measure { trial, models, tokens, calls } => {
            let packages = models.iter().map(|m| m.package.clone()).collect();
            let backend = Mixed { packages, core_ml: core_ml_for(models)?, cpu: CpuBackend::default() };
            to_value(&run_trial(&trial, &backend, tokens, calls)?)
        }
        Work::Soak { bundle, only, length } => {
            let (chain, core_ml) = core_ml_of(&bundle)?;
            let on_core_ml = chain.shards.iter().filter(|s| only.is_empty() || only.contains(&s.name));
            let packages = on_core_ml.map(|shard| bundle.join(&shard.file)).collect();
            let backend = Mixed { packages, core_ml, cpu: CpuBackend::default() };
            to_value(&soak(&bundle, &backend, length, &mut |passes| parent.report(passes))?)
        }
        Work::Run { bundle } => {
            let mut told = |passes| {
                parent.report(passes);
                parent.is_stopped()
            };
            to_value(&run_until(&bundle, &core_ml_of(&bundle)?.1, &mut told)?)
        }
        Work::Command { .. } => Err(Error::usage("a command inside of a step")),
    }
}

fn load(model: ModelFiles) -> Result<LoadSeconds> {
    let (package, functions) = (model.package.clone(), model.functions.clone());
    let backend = core_ml_for(vec![model])?;
    let mut seconds = LoadSeconds::new();
    for name in functions {
        let opened = backend.open(&package)?;
        let started = Instant::now();
        opened.prepare(&name)?;
        seconds.insert(name, started.elapsed().as_secs_f64());
    }
    Ok(seconds)
}

fn core_ml_for(models: Vec<ModelFiles>) -> Result<CoreMlBackend> {
    let compiled = CompiledModels::of_packages(models.into_iter().map(|m| (m.package, m.compiled)));
    CoreMlBackend::new(CoreMlSettings { compiled, ..CoreMlSettings::default() })
}

fn core_ml_of(bundle: &Path) -> Result<(Chain, CoreMlBackend)> {
    let chain = Chain::read(bundle)?;
    let compiled = compiled_models(None, bundle, &chain);
    Ok((chain, CoreMlBackend::new(CoreMlSettings { compiled, ..CoreMlSettings::default() })?))
}

/// Backend with Core ML for some packages, and the CPU executor for all others.
struct Mixed {
    packages: Vec<PathBuf>,
    core_ml: CoreMlBackend,
    cpu: CpuBackend,
}

impl Backend for Mixed {
    fn open_with(&self, path: &Path, caches: &[KeptCache]) -> Result<Box<dyn BackendPackage>> {
        let backend: &dyn Backend =
            if self.packages.iter().any(|p| p == path) { &self.core_ml } else { &self.cpu };
        backend.open_with(path, caches)
    }
}
