//! Labels of packages by the device that they ran on, from the documents of compile, check and soak.

use crate::mac_report::stage::{StageEnd, StageName, StageRecord};
use anemoe_gates::residency::device::{Device, DeviceCounts, PlanReport};
use serde_json::Value;
use std::collections::BTreeMap;

/// Compute units of reports that count as evidence.
const UNITS: &str = "cpuAndNeuralEngine";

/// Labels by package, and reasons why packages have none.
#[derive(Default)]
pub struct PlacedPackages {
    pub labels: BTreeMap<String, &'static str>,
    pub left_out: Vec<String>,
}

fn text<'a>(v: &'a Value, key: &str) -> &'a str {
    v[key].as_str().unwrap_or_default()
}

impl PlacedPackages {
    /// Reads the labels. A package that does not load or run has the label of that failure, whatever its plan says.
    ///
    /// # Errors
    /// A document names a package that the report does not have, or another machine; the message names the entry.
    pub fn of(
        known: &[&str],
        stages: &[StageRecord],
        plan: Option<&PlanReport>,
        chip_and_os: (&str, &str),
    ) -> Result<PlacedPackages, String> {
        let mut placed = PlacedPackages::default();
        let document = |stage: StageName| stages.iter().find(|r| r.stage == stage).map(|r| &r.document);
        if let Some(plan) = plan {
            placed.plans(known, plan, document(StageName::Check).unwrap_or(&Value::Null), chip_and_os)?;
        }
        for (stage, list, name, label) in [
            (StageName::Compile, "failures", "what", "COMPILE_FAIL"),
            (StageName::Soak, "shards", "shard", "RUNTIME_FAIL"),
        ] {
            let listed = document(stage).and_then(|d| d[list].as_array());
            for entry in listed.into_iter().flatten() {
                placed.failure(known, stage, entry, text(entry, name), label)?;
            }
        }
        Ok(placed)
    }

    fn failure(
        &mut self,
        known: &[&str],
        stage: StageName,
        entry: &Value,
        package: &str,
        label: &'static str,
    ) -> Result<(), String> {
        if !known.contains(&package) {
            return Err(format!("entry `{}`: package `{package}` is not in packages.json", stage.entry()));
        }
        match text(entry, "end") {
            "refused" | "crashed" => drop(self.labels.insert(package.into(), label)),
            "hung" => {
                self.labels.remove(package);
                self.left_out.push(format!("{package}: {} hung, which patience may cure", stage.name()));
            }
            "failed" => self
                .left_out
                .push(format!("{package}: {}, which says nothing of its place", text(entry, "reason"))),
            _ => {}
        }
        Ok(())
    }

    fn plans(
        &mut self,
        known: &[&str],
        plan: &PlanReport,
        check: &Value,
        (chip, os): (&str, &str),
    ) -> Result<(), String> {
        if (plan.chip.as_str(), plan.os.as_str()) != (chip, os) {
            return Err(format!(
                "entry `plan.json`: it is of {} and {}, where system.json says {chip} and {os}",
                plan.chip, plan.os
            ));
        }
        let mut counts: BTreeMap<&str, DeviceCounts> = BTreeMap::new();
        for function in &plan.plans {
            if !known.contains(&function.package.as_str()) {
                return Err(format!(
                    "entry `plan.json`: package `{}` is not in packages.json",
                    function.package
                ));
            }
            let own = counts.entry(&function.package).or_default();
            for op in &function.ops {
                let name = op.op_type.rsplit('.').next().unwrap_or_default();
                if name == "const" || name.starts_with("constexpr_") {
                    continue;
                }
                match op.preferred {
                    Some(Device::Ane) => own.ane += 1,
                    Some(Device::Gpu) => own.gpu += 1,
                    Some(Device::Cpu) => own.cpu += 1,
                    None => own.none += 1,
                }
            }
        }
        let controls = check["controls"].as_array().map(Vec::as_slice).unwrap_or_default();
        if controls.is_empty() || controls.iter().any(|c| c["pass"] != true) {
            self.left_out
                .push("placement: not every negative control of check passed, so plans say nothing".into());
            return Ok(());
        }
        if plan.compute_units != UNITS {
            self.left_out
                .push(format!("placement: compute units {}, where {UNITS} counts", plan.compute_units));
            return Ok(());
        }
        for (package, c) in counts {
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

/// Tells whether a stage ended with a document.
pub fn has_document(record: &StageRecord) -> bool {
    matches!(record.end, StageEnd::Done | StageEnd::Failed) && !record.document.is_null()
}
