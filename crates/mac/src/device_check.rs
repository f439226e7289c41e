//! Placement as this Mac plans it: `MLComputePlan` for every function of a bundle, each package in a process of its own.

use crate::compile::{compiled_bytes, model_files};
use crate::controls::{Control, PlanAnswer};
use crate::listener::Listener;
use crate::steps::{StepFailure, StepShard, Steps};
use crate::work::Work;
use anemoe_bundle::{Chain, Shard};
use anemoe_coreml::CompiledModels;
use anemoe_gates::residency::Report;
use anemoe_gates::residency::device::{FORMAT, FunctionPlan, PlanReport};
use anemoe_gates::residency::rule::Verdict;
use anemoe_io::Result;
use serde::{Deserialize, Serialize};
use std::path::Path;

/// Compute units of the plans.
pub const UNITS: &str = "cpuAndNeuralEngine";

/// Plans of a bundle, and what shows that they mean something.
#[derive(Debug, Default, Serialize, Deserialize)]
#[serde(default)]
pub struct DeviceFindings {
    /// Report, as `check --report` reads it. A package without a plan has no operations in it, which means `unknown`.
    #[serde(skip)]
    pub report: PlanReport,
    /// Failures of the packages that gave no plan.
    plan_failures: Vec<StepFailure>,
    /// True if every control was answered correctly: plans mean nothing if the reader cannot say no.
    pub no_is_proven: bool,
    /// Negative controls.
    pub controls: Vec<Control>,
    /// Sizes of compiled models.
    compiled: Vec<CompiledSize>,
    /// Reasons for which the check fails.
    faults: Vec<String>,
}

/// Sizes of a package and its compiled model, with the package's device: they show whether a size exists beyond which no
/// package is on the Neural Engine.
#[derive(Clone, Debug, Serialize, Deserialize)]
struct CompiledSize {
    package: String,
    package_bytes: u64,
    compiled_bytes: u64,
    /// Verdict of the package's plans.
    measured: Option<Verdict>,
}

/// Asks for the plans of a bundle's functions, and for the negative controls.
///
/// # Errors
/// No package is compiled, or no process can be started.
pub fn ask_device(
    bundle: &Path,
    chain: &Chain,
    models: &CompiledModels,
    steps: Steps,
    listener: &dyn Listener,
) -> Result<DeviceFindings> {
    let about = anemoe_coreml::system_facts().unwrap_or_default();
    let mut found = DeviceFindings {
        report: PlanReport {
            format: FORMAT,
            os: about.os,
            chip: about.chip,
            compute_units: UNITS.into(),
            generator: concat!("anemoe ", env!("CARGO_PKG_VERSION")).into(),
            plans: Vec::new(),
        },
        ..DeviceFindings::default()
    };
    // A package that could not be compiled lacks only its own plan.
    let find = |shard: &Shard| models.expect(&bundle.join(&shard.file));
    if let Some(first) = chain.shards.first()
        && chain.shards.iter().all(|shard| find(shard).is_err())
    {
        find(first)?;
    }
    let ask = |shard: &Shard, cpu_only: bool| -> Result<PlanAnswer> {
        let compiled = match find(shard) {
            Ok(compiled) => compiled,
            Err(e) => return Ok(Err(StepFailure::refused(&shard.name, "plan", e.to_string()))),
        };
        let model = model_files(shard, &bundle.join(&shard.file), compiled);
        steps.run(StepShard::of(chain, shard), &Work::Plan { model, cpu_only })
    };
    let mut cpu_alone = None;
    for (i, shard) in chain.shards.iter().enumerate() {
        listener.progress("plans", &shard.name, i, chain.shards.len());
        let plans = match ask(shard, false)? {
            Ok(plans) => {
                if cpu_alone.is_none() {
                    cpu_alone = Some(Control::cpu_alone(&shard.name, Some(ask(shard, true)?)));
                }
                plans
            }
            Err(failure) => {
                listener.message(&failure.lines());
                found.plan_failures.push(failure);
                shard.functions.iter().map(|f| (f.name.clone(), Vec::new())).collect()
            }
        };
        let plan = |(function, ops)| FunctionPlan { package: shard.name.clone(), function, ops };
        found.report.plans.extend(plans.into_iter().map(plan));
        if let Some(compiled_bytes) = compiled_bytes(models, &bundle.join(&shard.file))? {
            let (package, package_bytes) = (shard.name.clone(), shard.bytes);
            found.compiled.push(CompiledSize { package, package_bytes, compiled_bytes, measured: None });
        }
    }
    found.controls.push(cpu_alone.unwrap_or_else(|| Control::cpu_alone("", None)));
    found.controls.push(Control::fp32(steps)?);
    found.no_is_proven = found.controls.iter().all(|control| control.pass);
    listener.progress("plans", "", chain.shards.len(), chain.shards.len());
    Ok(found)
}

impl DeviceFindings {
    /// Adds the verdicts of the plans, which the report of the check has.
    pub fn conclude(&mut self, report: &Report) {
        let packages = || report.device.iter().flat_map(|d| &d.packages);
        for size in &mut self.compiled {
            size.measured = packages().find(|p| p.name == size.package).map(|p| p.measured);
        }
        self.faults = self.plan_failures.iter().map(StepFailure::line).collect();
        let elsewhere = packages().filter(|p| p.measured != Verdict::Ane);
        self.faults.extend(elsewhere.map(|p| format!("{}: {}", p.name, p.measured.name())));
        self.faults.extend(self.controls.iter().filter(|control| !control.pass).map(Control::text));
    }

    /// Returns the number of compiled models with a verdict, and the smallest and the largest of their bytes; none
    /// without one.
    pub fn sizes_of(&self, verdict: Verdict) -> Option<(usize, u64, u64)> {
        let own = self.compiled.iter().filter(|s| s.measured == Some(verdict));
        let bytes: Vec<u64> = own.map(|s| s.compiled_bytes).collect();
        Some((bytes.len(), *bytes.iter().min()?, *bytes.iter().max()?))
    }
}
