//! `anemoe step`: one step of another command, in a process of its own. `anemoe help` does not show it.

use crate::outcome::Outcome;
use crate::step::{LoadSeconds, Work, serve};
use anemoe_coreml::plan::OpPlan;
use anemoe_coreml::{CompiledModels, ComputeUnits, CoreMlBackend, CoreMlSettings};
use anemoe_runtime::backend::Backend;
use serde_json::Value;
use std::path::Path;
use std::time::Instant;

/// Do one step of another command.
#[derive(clap::Args)]
pub struct Args {}

pub fn run(_: Args) -> anyhow::Result<Outcome> {
    serve(work)?;
    Ok(Outcome::Done)
}

fn work(work: Work) -> anyhow::Result<Value> {
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
    }
}

fn load(package: &Path, compiled: &Path, functions: &[String]) -> anyhow::Result<Value> {
    let settings = CoreMlSettings {
        compiled: CompiledModels::of_package(package, compiled),
        max_loaded_bytes: None,
        units: ComputeUnits::CpuAndNeuralEngine,
    };
    let backend = CoreMlBackend::new(settings)?;
    let mut seconds = LoadSeconds::new();
    for name in functions {
        let opened = backend.open(package)?;
        let started = Instant::now();
        opened.prepare(name)?;
        seconds.insert(name.clone(), started.elapsed().as_secs_f64());
    }
    Ok(serde_json::to_value(seconds)?)
}
