//! Labels of packages by the device that they ran on, from the documents of compile, check and soak.

use crate::compile::CompileReport;
use crate::device_check::{DeviceFindings, UNITS};
use crate::report::MacReport;
use crate::soak_stage::SoakDocument;
use anemoe_coreml::causes::End;
use anemoe_gates::residency::device::{DeviceCounts, PlanReport, PlannedOp};
use std::collections::BTreeMap;

/// Labels by package, and reasons why packages have none.
#[derive(Default)]
pub struct PlacedPackages {
    /// Labels, as tables of outcomes have them.
    pub labels: BTreeMap<String, &'static str>,
    /// Findings that say nothing of a place, and the reasons.
    pub left_out: Vec<String>,
}

impl PlacedPackages {
    /// Reads the labels. A package that does not load or run has the label of that failure, whatever its plan says.
    /// Fails if a document names a package that the report does not have, or another machine.
    pub fn of(report: &MacReport) -> Result<PlacedPackages, String> {
        let mut placed = PlacedPackages::default();
        if let Some(plan) = &report.plan {
            placed.plans(report, plan)?;
        }
        let compile: CompileReport = report.document("compile")?;
        for f in &compile.failures {
            report.expect_package(&f.what, "stages/compile.json")?;
            placed.failure("compile", &f.what, f.end, &f.message, "COMPILE_FAIL");
        }
        let soak: SoakDocument = report.document("soak")?;
        for s in &soak.shards {
            report.expect_package(&s.shard, "stages/soak.json")?;
            placed.failure("soak", &s.shard, s.end, &s.reason, "RUNTIME_FAIL");
        }
        Ok(placed)
    }

    fn failure(&mut self, stage: &str, package: &str, end: End, reason: &str, label: &'static str) {
        match end {
            End::Refused | End::Crashed => {
                self.labels.insert(package.into(), label);
            }
            End::Hung => {
                self.labels.remove(package);
                self.left_out.push(format!("{package}: {stage} hung, which patience may cure"));
            }
            End::Failed => {
                self.left_out.push(format!("{package}: {reason}, which says nothing of its place"));
            }
            End::Done | End::Skipped => {}
        }
    }

    fn plans(&mut self, report: &MacReport, plan: &PlanReport) -> Result<(), String> {
        let system = &report.system.system;
        if (&plan.chip, &plan.os) != (&system.chip, &system.os) {
            return Err(format!(
                "entry `plan.json`: it is of {} and {}, where system.json says {} and {}",
                plan.chip, plan.os, system.chip, system.os
            ));
        }
        let mut ops: BTreeMap<&str, Vec<&PlannedOp>> = BTreeMap::new();
        for function in &plan.plans {
            report.expect_package(&function.package, "plan.json")?;
            ops.entry(&function.package).or_default().extend(&function.ops);
        }
        let controls = report.document::<DeviceFindings>("check")?.controls;
        let nothing = if controls.is_empty() || controls.iter().any(|control| !control.pass) {
            Some("not every negative control of check passed, so plans say nothing".to_string())
        } else {
            (plan.compute_units != UNITS)
                .then(|| format!("compute units {}, where {UNITS} counts", plan.compute_units))
        };
        if let Some(why) = nothing {
            self.left_out.push(format!("placement: {why}"));
            return Ok(());
        }
        for (package, ops) in ops {
            let c = DeviceCounts::of(ops);
            let label = match (c.ane, c.gpu, c.cpu, c.none) {
                (1.., 0, 0, 0) => "ANE_ALL",
                (0, 0, 1.., 0) => "CPU_ALL",
                (0, 1.., 0, 0) => "GPU_ALL",
                (_, gpu, cpu, _) if gpu + cpu > 0 => "MIXED",
                _ => {
                    self.left_out.push(format!("{package}: its plan has no device for {} ops", c.none));
                    continue;
                }
            };
            self.labels.insert(package.into(), label);
        }
        Ok(())
    }
}
