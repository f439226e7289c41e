//! Placement as this Mac plans it: `MLComputePlan` for every function of a bundle, each package in a process of its own.

use crate::child_work::{ChildFailure, Risky, Work};
use crate::commands::compile::form_of;
use crate::device_controls::{Control, PlanAnswer};
use crate::ui::{Ui, bytes, message};
use anemoe_bundle::{Chain, Shard};
use anemoe_coreml::CompiledModels;
use anemoe_gates::residency::Report;
use anemoe_gates::residency::device::{FORMAT, FunctionPlan, PlanReport, PlannedOp};
use anemoe_gates::residency::rule::Verdict;
use serde::Serialize;
use std::collections::BTreeMap;
use std::path::Path;

/// Plans of a bundle.
pub struct DevicePlans {
    /// Report, as `check --report` reads it. A package without a plan has no operations in it, which means `unknown`.
    pub report: PlanReport,
    /// Failures of the packages that gave no plan.
    pub failures: Vec<ChildFailure>,
    /// Negative controls.
    pub controls: Vec<Control>,
    /// Sizes of compiled models.
    pub compiled: Vec<CompiledSize>,
}

/// Sizes of a package and its compiled model, with the package's device: they show whether a size exists beyond which no
/// package is on the Neural Engine.
#[derive(Clone, Serialize)]
pub struct CompiledSize {
    /// Name of the package.
    pub package: String,
    /// Bytes of the package.
    pub package_bytes: u64,
    /// Bytes of the compiled model.
    pub compiled_bytes: u64,
    /// Verdict of the package's plans.
    pub measured: Option<Verdict>,
}

/// Asks for the plans of a bundle's functions, and for the negative controls.
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
    // A package that could not be compiled lacks only its own plan.
    if let Some(first) = chain.shards.first()
        && chain.shards.iter().all(|s| models.find(&bundle.join(&s.file)).is_none())
    {
        models.expect(&bundle.join(&first.file))?;
    }
    let mut cpu_alone = None;
    let bar = ui.bar(chain.shards.len() as u64, "plans");
    for shard in &chain.shards {
        bar.set_message(shard.name.clone());
        let package = bundle.join(&shard.file);
        if let Err(e) = models.expect(&package) {
            let failure = ChildFailure::refused(&shard.name, "plan", e.to_string());
            bar.suspend(|| failure.lines().iter().for_each(message));
            found.report.plans.extend(functions(shard).map(|function| plan(shard, function, Vec::new())));
            found.failures.push(failure);
            bar.inc(1);
            continue;
        }
        match ask(&package, shard, chain, models, risky, false)? {
            Ok(plans) => {
                if cpu_alone.is_none() {
                    let answer = ask(&package, shard, chain, models, risky, true)?;
                    cpu_alone = Some(Control::cpu_alone(&shard.name, Some(answer)));
                }
                let plans = plans.into_iter().map(|(function, ops)| plan(shard, function, ops));
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
    found.controls.push(cpu_alone.unwrap_or_else(|| Control::cpu_alone("", None)));
    found.controls.push(Control::fp32(risky)?);
    bar.finish_and_clear();
    Ok(found)
}

impl DevicePlans {
    /// Tells whether every control was answered correctly: plans mean nothing if the reader cannot say no.
    pub fn no_is_proven(&self) -> bool {
        self.controls.iter().all(|control| control.pass)
    }

    /// Adds the verdict of each package's plans to its sizes.
    pub fn join_sizes(&mut self, report: &Report) {
        let packages = report.device.iter().flat_map(|d| &d.packages);
        let measured: BTreeMap<&str, Verdict> = packages.map(|p| (p.name.as_str(), p.measured)).collect();
        for size in &mut self.compiled {
            size.measured = measured.get(size.package.as_str()).copied();
        }
    }

    /// Formats the compiled sizes by verdict, one line each: number, smallest, largest.
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
) -> anyhow::Result<PlanAnswer> {
    let work = Work::Plan {
        package: package.to_path_buf(),
        compiled: models.expect(package)?,
        functions: functions(shard).collect(),
        cpu_only,
    };
    let form = (shard.kind, form_of(chain, shard.kind));
    Ok(match risky.step(&shard.name, &work, Some(form))? {
        Ok(value) => Ok(serde_json::from_value(value)?),
        Err(failure) => Err(failure),
    })
}
