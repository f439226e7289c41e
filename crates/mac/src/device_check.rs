//! Placement as this Mac plans it: `MLComputePlan` for every function of a bundle, each package in a process of its own.
//!
//! Negative controls are questions whose right answer is that nothing is on the Neural Engine:
//! ```text
//! CPU alone allowed    a package of the bundle, planned again with other compute units
//! products in fp32     a package made for this control, planned like those of the bundle: the Neural Engine computes in fp16
//! ```
//! The first control shows that the reader sees a device that was asked for, the second that it sees a choice of Core ML.

use crate::bundle_compiler::{compiled_bytes, model_files};
use crate::caches::ModelFiles;
use crate::child_work::Work;
use crate::listener::Listener;
use crate::risky_steps::{StepFailure, StepShard, Steps};
use anemoe_bundle::{Chain, Shard};
use anemoe_coreml::CompiledModels;
use anemoe_gates::residency::Report;
use anemoe_gates::residency::device::{DeviceCounts, FORMAT, FunctionPlan, PlanReport, PlannedOp};
use anemoe_gates::residency::rule::Verdict;
use anemoe_io::{Error, Result, Temporary};
use anemoe_mlpackage::mil::builder::{FunctionBuilder, model};
use anemoe_mlpackage::mil::{DataType, Opset, TensorType};
use anemoe_mlpackage::package::PackageWriter;
use serde::{Deserialize, Serialize};
use std::path::Path;

/// Compute units of the plans.
pub const UNITS: &str = "cpuAndNeuralEngine";
/// Rows and columns of the products in fp32; products of every measured size ran on the CPU (rule `type.fp32`).
const SIZE: u64 = 256;
/// Name of the package with products in fp32.
const FP32_PACKAGE: &str = "control.fp32";

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

/// A question with a known answer, which shows that the reader of plans can say no.
#[derive(Debug, Default, Serialize, Deserialize)]
#[serde(default)]
pub struct Control {
    /// Question.
    control: String,
    /// Package that was asked about; empty if none could be.
    package: String,
    /// Number of operations that the plan puts on the Neural Engine; the right answer is 0.
    on_ane: u64,
    /// Number of operations that the plan puts on the CPU; the right answer is more than 0.
    on_cpu: u64,
    /// True if the answer is right.
    pub pass: bool,
    /// Reason why there is no answer.
    #[serde(skip_serializing_if = "Option::is_none")]
    failure: Option<String>,
}

/// Operations of a package by function, or the failure of the child process that asked for them.
pub type PlanAnswer = std::result::Result<Vec<(String, Vec<PlannedOp>)>, StepFailure>;

impl Control {
    /// Judges the plans of a package of the bundle with the CPU alone allowed; `answer` is none if no package has a plan.
    pub fn cpu_alone(package: &str, answer: Option<PlanAnswer>) -> Control {
        Control::judged("the CPU alone is allowed", package, answer)
    }

    /// Makes a package of products in fp32, compiles it and asks for its plan, each in a child process.
    pub fn fp32(steps: Steps) -> Result<Control> {
        let temporary = std::env::temp_dir();
        let folder = Temporary::dir(&temporary, ".control").map_err(|e| Error::io(&temporary, e))?;
        let package = folder.path().join(format!("{FP32_PACKAGE}.mlpackage"));
        write_fp32(&package)?;
        let compiled = folder.path().join("control.mlmodelc");
        let model = ModelFiles { package, compiled, functions: vec!["main".into()] };
        let shard = StepShard { name: FP32_PACKAGE, form: None };
        let answer = match steps.run::<()>(shard, &Work::Compile(model.clone()))? {
            Ok(()) => steps.run(shard, &Work::Plan { model, cpu_only: false })?,
            Err(failure) => Err(failure),
        };
        Ok(Control::judged("products in fp32", FP32_PACKAGE, Some(answer)))
    }

    fn judged(control: &str, package: &str, answer: Option<PlanAnswer>) -> Control {
        let (plans, failure) = match answer {
            None => (Vec::new(), Some("no package of the bundle has a plan".to_string())),
            Some(Err(failure)) => (Vec::new(), Some(failure.text())),
            Some(Ok(plans)) => (plans, None),
        };
        let counts = DeviceCounts::of(plans.iter().flat_map(|(_, ops)| ops));
        let (on_ane, on_cpu) = (counts.ane, counts.cpu);
        let pass = failure.is_none() && on_ane == 0 && on_cpu > 0;
        Control { control: control.into(), package: package.into(), on_ane, on_cpu, pass, failure }
    }

    /// Formats question, answer and meaning.
    pub fn text(&self) -> String {
        let Control { control, package, on_ane, on_cpu, .. } = self;
        let meaning = match &self.failure {
            None if self.pass => "says no, as it should".into(),
            None => "DOES NOT SAY NO: the plans mean nothing".into(),
            Some(why) => format!("NO ANSWER ({why}): it is not proven that the reader can say no"),
        };
        let of = if package.is_empty() { String::new() } else { format!(", {package}") };
        format!("control ({control}{of}): {on_ane} ops on the ANE, {on_cpu} on the CPU; {meaning}")
    }
}

/// Writes a package with one function in fp32: `(x y) y^T + x`, with `x` and `y` of `SIZE` rows and columns.
fn write_fp32(target: &Path) -> Result<()> {
    let opset = Opset::CoreML8;
    let mut f = FunctionBuilder::new(opset);
    let matrix = || TensorType::fixed(DataType::Float32, &[1, 1, SIZE, SIZE]);
    let (x, y) = (f.input("x", matrix())?, f.input("y", matrix())?);
    let product = f.matmul("product", &x, &y, false, false)?;
    let again = f.matmul("again", &product, &y, false, true)?;
    let sum = f.add("sum", &again, &x)?;
    f.output(&sum)?;
    PackageWriter::create(target)?.finish(&model(opset, vec![("main".into(), f.finish()?)], "main")?)?;
    Ok(())
}

#[cfg(test)]
mod tests {
    use super::*;
    use anemoe_gates::residency::device::Device;
    use anemoe_gates::residency::{self, CheckOptions};

    fn op(preferred: Option<Device>) -> PlannedOp {
        PlannedOp { name: "x".into(), op_type: "ios18.matmul".into(), preferred, ..PlannedOp::default() }
    }

    #[test]
    fn a_control_that_crashed_is_missing_or_says_yes_proves_nothing() {
        let judged = |ops: Vec<PlannedOp>| Control::cpu_alone("a", Some(Ok(vec![("main".into(), ops)])));
        assert!(judged(vec![op(None), op(Some(Device::Cpu))]).pass);
        assert!(!judged(vec![op(Some(Device::Cpu)), op(Some(Device::Ane))]).pass);
        assert!(judged(vec![op(None)]).text().contains("DOES NOT SAY NO"));
        let crashed = StepFailure::refused("a", "plan", "signal 6 (abort)".into());
        for control in [Control::cpu_alone("a", Some(Err(crashed))), Control::cpu_alone("", None)] {
            assert!(!control.pass && control.text().contains("not proven"), "{}", control.text());
        }
    }

    #[test]
    fn the_package_in_fp32_is_one_that_rules_keep_off_the_neural_engine() {
        let dir = tempfile::tempdir().unwrap();
        let path = dir.path().join("control.mlpackage");
        write_fp32(&path).unwrap();
        let report = residency::package(&path, &CheckOptions::default()).unwrap();
        assert_eq!(report.packages[0].verdict, Verdict::NotAne, "{report:?}");
    }
}
