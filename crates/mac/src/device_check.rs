//! Placement as this Mac plans it: `MLComputePlan` for every function of a bundle, each package in a process of its own.
//!
//! Negative controls are questions whose right answer is that nothing is on the Neural Engine:
//! ```text
//! CPU alone allowed    a package of the bundle, planned again with other compute units
//! products in fp32     a package made for this control, planned like those of the bundle: the Neural Engine computes in fp16
//! ```
//! The first control shows that the reader sees a device that was asked for, the second that it sees a choice of Core ML.

use crate::bundle_compiler::BundleSteps;
use crate::caches::ModelFiles;
use crate::child::Work;
use crate::risky_steps::{Listener, StepFailure, finding, run_step};
use anemoe_bundle::Shard;
use anemoe_coreml::causes::End;
use anemoe_gates::residency::Report;
use anemoe_gates::residency::device::{DeviceCounts, FORMAT, FunctionPlan, PlanReport, PlannedOp};
use anemoe_gates::residency::rule::Verdict;
use anemoe_io::{Error, Result, Temporary};
use anemoe_mlpackage::mil::builder::{FunctionBuilder, model};
use anemoe_mlpackage::mil::{DataType, Opset, TensorType};
use anemoe_mlpackage::package::PackageWriter;
use serde::{Deserialize, Serialize};
use std::path::Path;
use std::time::Duration;

/// Compute units of the plans.
pub const UNITS: &str = "cpuAndNeuralEngine";
/// Control that asks about a package of the bundle with the CPU alone allowed.
const CPU_ALONE: &str = "the CPU alone is allowed";
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
    /// Reasons for which the check fails.
    faults: Vec<String>,
}

impl BundleSteps<'_> {
    /// Asks for the plans of all functions, and for the negative controls.
    ///
    /// # Errors
    /// No package is compiled, or no process can be started.
    pub fn ask_device(&self, listener: &dyn Listener) -> Result<DeviceFindings> {
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
        let shards = &self.chain.shards;
        // A package that could not be compiled lacks only its own plan.
        let find = |shard: &Shard| self.models.expect(&self.package(shard));
        if shards.iter().all(|shard| find(shard).is_err()) {
            shards.first().map(find).transpose()?;
        }
        let ask = |shard: &Shard, cpu_only: bool| -> Result<PlanAnswer> {
            match find(shard) {
                Ok(compiled) => finding(self.run(shard, compiled, |model| Work::Plan { model, cpu_only })),
                Err(e) => Ok(Err(StepFailure::new(&shard.name, "plan", End::Refused, e.to_string()))),
            }
        };
        for (i, shard) in shards.iter().enumerate() {
            listener.progress("plans", &shard.name, i, shards.len());
            let plans = match ask(shard, false)? {
                Ok(plans) => {
                    if found.controls.is_empty() {
                        found.controls.push(Control::judged(CPU_ALONE, &shard.name, Some(ask(shard, true)?)));
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
        }
        if found.controls.is_empty() {
            found.controls.push(Control::judged(CPU_ALONE, "", None));
        }
        found.controls.push(Control::fp32(self.limit)?);
        found.no_is_proven = found.controls.iter().all(|control| control.pass);
        listener.progress("plans", "", shards.len(), shards.len());
        Ok(found)
    }
}

impl DeviceFindings {
    /// Adds the verdicts of the plans, which the report of the check has.
    pub fn conclude(&mut self, report: &Report) {
        let packages = || report.device.iter().flat_map(|d| &d.packages);
        self.faults = self.plan_failures.iter().map(StepFailure::line).collect();
        let elsewhere = packages().filter(|p| p.measured != Verdict::Ane);
        self.faults.extend(elsewhere.map(|p| format!("{}: {}", p.name, p.measured.name())));
        self.faults.extend(self.controls.iter().filter(|control| !control.pass).map(Control::text));
    }
}

/// A question with a known answer, which shows that the reader of plans can say no.
#[derive(Debug, Default, Serialize, Deserialize)]
#[serde(default)]
pub struct Control {
    control: String,
    /// Package that was asked about; empty if none could be.
    package: String,
    /// Number of operations that the plan puts on the Neural Engine; the right answer is 0.
    on_ane: u64,
    /// Number of operations that the plan puts on the CPU; the right answer is more than 0.
    on_cpu: u64,
    pub pass: bool,
    #[serde(skip_serializing_if = "Option::is_none")]
    failure: Option<String>,
}

/// Operations of a package by function, or the failure of the child process that asked for them.
pub type PlanAnswer = std::result::Result<Vec<(String, Vec<PlannedOp>)>, StepFailure>;

impl Control {
    /// Makes a package of products in fp32, compiles it and asks for its plan, each in a child process.
    pub fn fp32(limit: Duration) -> Result<Control> {
        let temporary = std::env::temp_dir();
        let folder = Temporary::dir(&temporary, ".control").map_err(|e| Error::io(&temporary, e))?;
        let package = folder.path().join(format!("{FP32_PACKAGE}.mlpackage"));
        write_fp32(&package)?;
        let compiled = folder.path().join("control.mlmodelc");
        let (shard, functions) = (FP32_PACKAGE.into(), vec!["main".into()]);
        let model = ModelFiles { shard, package, compiled, functions };
        let compiled = run_step::<()>(limit, None, &Work::Compile(model.clone()));
        let planned = compiled.and_then(|()| run_step(limit, None, &Work::Plan { model, cpu_only: false }));
        Ok(Control::judged("products in fp32", FP32_PACKAGE, Some(finding(planned)?)))
    }

    /// Judges the plans of a package; `answer` is none if no package has a plan.
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
        let judged =
            |ops: Vec<PlannedOp>| Control::judged(CPU_ALONE, "a", Some(Ok(vec![("main".into(), ops)])));
        assert!(judged(vec![op(None), op(Some(Device::Cpu))]).pass);
        assert!(!judged(vec![op(Some(Device::Cpu)), op(Some(Device::Ane))]).pass);
        assert!(judged(vec![op(None)]).text().contains("DOES NOT SAY NO"));
        let crashed = StepFailure::new("a", "plan", End::Crashed, "signal 6 (abort)".into());
        for control in
            [Control::judged(CPU_ALONE, "a", Some(Err(crashed))), Control::judged(CPU_ALONE, "", None)]
        {
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
