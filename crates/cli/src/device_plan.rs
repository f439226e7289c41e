//! Placement as this Mac plans it: MLComputePlan for every function of a bundle, each package in a process of its own.

use crate::commands::compile::form_of;
use crate::step::{Risky, StepFailure, Work};
use crate::ui::{Ui, bytes, message};
use anemoe_bundle::{Chain, Shard};
use anemoe_coreml::CompiledModels;
use anemoe_gates::residency::Report;
use anemoe_gates::residency::device::{Device, FORMAT, FunctionPlan, PlanReport, PlannedOp};
use anemoe_gates::residency::rule::Verdict;
use serde::Serialize;
use std::collections::BTreeMap;
use std::path::Path;

/// Plans of a bundle.
pub struct DevicePlans {
    /// Report, as `check --report` reads it. A package without a plan is in it without operations, which is `unknown`.
    pub report: PlanReport,
    /// Packages that gave no plan.
    pub failures: Vec<StepFailure>,
    /// Negative controls.
    pub controls: Vec<Control>,
    /// Sizes of compiled models.
    pub compiled: Vec<CompiledSize>,
}

/// A question whose answer is known, to see that the reader of plans can say no.
#[derive(Serialize)]
pub struct Control {
    /// Question.
    pub control: &'static str,
    /// Package that was asked about.
    pub package: String,
    /// Operations that the plan puts on the Neural Engine; the right answer is 0.
    pub on_ane: usize,
    /// Operations that it puts on the CPU; the right answer is more than 0.
    pub on_cpu: usize,
    /// The answer is right.
    pub pass: bool,
}

/// Sizes of a package and its compiled model, with where the package runs: whether there is a size beyond which none does.
#[derive(Clone, Serialize)]
pub struct CompiledSize {
    /// Package.
    pub package: String,
    /// Its bytes.
    pub package_bytes: u64,
    /// Bytes of its compiled model.
    pub compiled_bytes: u64,
    /// Verdict of its plans.
    pub measured: Option<Verdict>,
}

/// Asks for the plans of a bundle's functions.
///
/// # Errors
/// A package is not compiled, or no process can be started.
pub fn of_bundle(
    bundle: &Path,
    chain: &Chain,
    models: &CompiledModels,
    risky: Risky,
    ui: &Ui,
) -> anyhow::Result<DevicePlans> {
    let about = anemoe_coreml::system_facts().unwrap_or_default();
    let mut found = DevicePlans {
        report: PlanReport {
            format: FORMAT,
            os: about.os,
            chip: about.chip,
            compute_units: "cpuAndNeuralEngine".into(),
            generator: concat!("anemoe ", env!("CARGO_PKG_VERSION")).into(),
            plans: Vec::new(),
        },
        failures: Vec::new(),
        controls: Vec::new(),
        compiled: Vec::new(),
    };
    // One that could not be compiled costs only itself.
    if let Some(first) = chain.shards.first()
        && chain.shards.iter().all(|s| models.find(&bundle.join(&s.file)).is_none())
    {
        models.expect(&bundle.join(&first.file))?;
    }
    let bar = ui.bar(chain.shards.len() as u64, "plans");
    for shard in &chain.shards {
        bar.set_message(shard.name.clone());
        let package = bundle.join(&shard.file);
        if let Err(e) = models.expect(&package) {
            let failure = StepFailure::refused(&shard.name, "plan", e.to_string());
            bar.suspend(|| failure.lines().iter().for_each(message));
            found.report.plans.extend(functions(shard).map(|function| plan(shard, function, Vec::new())));
            found.failures.push(failure);
            bar.inc(1);
            continue;
        }
        match ask(&package, shard, chain, models, risky, false)? {
            Ok(plans) => {
                if found.controls.is_empty() {
                    found.controls.push(cpu_alone(&package, shard, chain, models, risky)?);
                }
                found.report.plans.extend(plans);
            }
            Err(failure) => {
                bar.suspend(|| failure.lines().iter().for_each(message));
                found.report.plans.extend(functions(shard).map(|function| plan(shard, function, Vec::new())));
                found.failures.push(failure);
            }
        }
        if let Some(record) = models.record(&package) {
            found.compiled.push(CompiledSize {
                package: shard.name.clone(),
                package_bytes: shard.bytes,
                compiled_bytes: record.compiled_bytes,
                measured: None,
            });
        }
        bar.inc(1);
    }
    bar.finish_and_clear();
    Ok(found)
}

impl DevicePlans {
    /// Joins the sizes with what the plans say of each package.
    pub fn join_sizes(&mut self, report: &Report) {
        let packages = report.device.iter().flat_map(|d| &d.packages);
        let measured: BTreeMap<&str, Verdict> = packages.map(|p| (p.name.as_str(), p.measured)).collect();
        for size in &mut self.compiled {
            size.measured = measured.get(size.package.as_str()).copied();
        }
    }

    /// Compiled sizes by where packages run, in lines: how many, smallest, largest.
    pub fn size_lines(&self) -> Vec<String> {
        let line = |verdict: Verdict| {
            let own =
                || self.compiled.iter().filter(|s| s.measured == Some(verdict)).map(|s| s.compiled_bytes);
            let (smallest, largest) = own().min().zip(own().max())?;
            let n = own().count();
            Some(format!(
                "compiled sizes, {}: {n}, {} to {}",
                verdict.name(),
                bytes(smallest),
                bytes(largest)
            ))
        };
        [Verdict::Ane, Verdict::NotAne, Verdict::Unknown].into_iter().filter_map(line).collect()
    }
}

fn functions(shard: &Shard) -> impl Iterator<Item = String> {
    shard.functions.iter().map(|f| f.name.clone())
}

fn plan(shard: &Shard, function: String, ops: Vec<PlannedOp>) -> FunctionPlan {
    FunctionPlan { package: shard.name.clone(), function, ops }
}

fn ask(
    package: &Path,
    shard: &Shard,
    chain: &Chain,
    models: &CompiledModels,
    risky: Risky,
    cpu_only: bool,
) -> anyhow::Result<Result<Vec<FunctionPlan>, StepFailure>> {
    let work = Work::Plan {
        package: package.to_path_buf(),
        compiled: models.expect(package)?,
        functions: functions(shard).collect(),
        cpu_only,
    };
    let form = (shard.kind, form_of(chain, shard.kind));
    Ok(match risky.step(&shard.name, &work, Some(form))? {
        Ok(value) => {
            let plans: Vec<(String, Vec<PlannedOp>)> = serde_json::from_value(value)?;
            Ok(plans.into_iter().map(|(function, ops)| plan(shard, function, ops)).collect())
        }
        Err(failure) => Err(failure),
    })
}

/// Asks again with the CPU alone allowed: nothing may be on the Neural Engine then.
fn cpu_alone(
    package: &Path,
    shard: &Shard,
    chain: &Chain,
    models: &CompiledModels,
    risky: Risky,
) -> anyhow::Result<Control> {
    let plans = ask(package, shard, chain, models, risky, true)?.unwrap_or_default();
    let count = |device| plans.iter().flat_map(|p| &p.ops).filter(|op| op.preferred == Some(device)).count();
    let (on_ane, on_cpu) = (count(Device::Ane), count(Device::Cpu));
    let pass = on_ane == 0 && on_cpu > 0;
    Ok(Control { control: "the CPU alone is allowed", package: shard.name.clone(), on_ane, on_cpu, pass })
}
