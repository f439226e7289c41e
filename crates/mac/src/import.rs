//! Turns a report into evidence: rows of a table of outcomes and a profile of the chip, in a folder of their own. Every entry
//! of the report that another entry can contradict is checked against it.

use crate::bundle_compiler::CompileReport;
use crate::device_check::{DeviceFindings, UNITS};
use crate::json_file::write_json;
use crate::mac_report::{DescribedPackage, EntryResult, MacReport, STAND_IN, chip_slug};
use crate::stage_list::{BENCH, MAX_REASON, PACKAGES, StageRecord};
use crate::verification::SoakDocument;
use anemoe_bundle::CHAIN_FILE;
use anemoe_coreml::causes::End;
use anemoe_gates::cost::bench_fit::calibrate;
use anemoe_gates::cost::chips::{CALIBRATED, ChipProfile};
use anemoe_gates::cost::forecast::Forecast;
use anemoe_gates::residency::device::{DeviceCounts, PlanReport, PlannedOp};
use anemoe_gates::residency::imported::{OUTCOMES_FILE, PROFILE_FILE, REPORT_FILE};
use anemoe_gates::residency::outcomes::{self, cells};
use anemoe_gates::residency::rule::Chip;
use anemoe_io::{Error, Result, Temporary};
use cells::OutcomeCells;
use serde::Deserialize;
use serde_json::{Value, json};
use std::collections::BTreeMap;
use std::path::Path;

/// Findings of a report.
pub struct ReportFindings {
    /// Rows of a table of outcomes.
    pub rows: Vec<OutcomeCells>,
    /// Calibrated profile of the chip; none if the report allows none.
    pub profile: Option<ChipProfile>,
    /// Findings that are no evidence, and the reasons.
    pub left_out: Vec<String>,
}

/// Document of `predict-speed`, as far as it is read.
#[derive(Default, Deserialize)]
#[serde(default)]
struct PredictDocument {
    one: Option<Forecast>,
    profile: Option<ChipProfile>,
}

impl ReportFindings {
    /// Reads the findings of a report.
    ///
    /// # Errors
    /// An entry is not as expected, or contradicts another one; the message names it.
    pub fn of(report: &MacReport) -> EntryResult<ReportFindings> {
        let mut left_out = Vec::new();
        let rows = rows(report, &labels(report, &mut left_out)?)?;
        let profile = profile(report)?.map_err(|why| left_out.push(format!("speed: {why}"))).ok();
        Ok(ReportFindings { rows, profile, left_out })
    }
}

/// Formats rows as the table that `check --outcomes` reads.
fn table(rows: &[OutcomeCells]) -> String {
    let lines = std::iter::once(cells::heading_line()).chain(rows.iter().map(cells::line));
    lines.map(|line| line + "\n").collect()
}

/// Makes one row for each program and label.
fn rows(report: &MacReport, labels: &PackageLabels) -> EntryResult<Vec<OutcomeCells>> {
    let system = &report.system;
    let chip = system.system.chip.trim_start_matches("Apple ").to_string();
    let is_known = Chip::parse(&chip).is_some();
    let other = if is_known { String::new() } else { format!(", {chip}") };
    let mut groups: Vec<(&DescribedPackage, [&str; 2], usize)> = Vec::new();
    for p in &report.packages {
        let Some(label) = labels.get(&p.name) else { continue };
        let key = [p.cells.get("program").map_or("", String::as_str), label];
        match groups.iter_mut().find(|(_, of, _)| *of == key) {
            Some((_, _, more)) => *more += 1,
            None => groups.push((p, key, 0)),
        }
    }
    let row = |(p, [_, label], more): (&DescribedPackage, [&str; 2], usize)| {
        let alike = if more > 0 { format!(" and {more} alike") } else { String::new() };
        let mut row = p.cells.clone();
        for (column, text) in [
            ("id", format!("{}:{}", report.name, p.name)),
            ("project", report.name.clone()),
            ("label", label.to_string()),
            ("chip", if is_known { chip.clone() } else { String::new() }),
            ("os", format!("{} ({}){other}", system.system.os, system.system.build)),
            ("name", format!("{} {} {} {}{alike}", system.model, system.quant, p.kind, p.name)),
            ("source", format!("anemoe {}", system.version)),
        ] {
            row.insert(column.into(), text);
        }
        // An error in a cell names its package.
        outcomes::parse(&table(std::slice::from_ref(&row))).map_err(|e| {
            format!("entry `{PACKAGES}`: package `{}`: {}", p.name, e.trim_start_matches("line 2: "))
        })?;
        Ok(row)
    };
    groups.into_iter().map(row).collect()
}

/// Calibrates a profile of the chip; the inner error is the reason why there is none.
fn profile(report: &MacReport) -> EntryResult<std::result::Result<ChipProfile, String>> {
    let Some(bench) = &report.bench else { return Ok(Err("the report has no bench".into())) };
    let PredictDocument { one: Some(forecast), profile: Some(said) } = report.document("predict")? else {
        return Ok(Err("the stage predict has no document".into()));
    };
    let of_bench = |e: String| format!("entry `{BENCH}`: {e}");
    let document: Value = anemoe_io::json::parse(bench).map_err(|e| of_bench(e.to_string()))?;
    if document["mode"] != "coreml" {
        return Ok(Err(format!("the bench ran in mode {}, not on Core ML", document["mode"])));
    }
    let system = &report.system;
    let slug = chip_slug(&system.system.chip);
    let base = ChipProfile::named(&slug).or_else(|_| ChipProfile::named(STAND_IN))?;
    if said != base {
        return Ok(Err("the report counted with another table of chips than this version has".into()));
    }
    let source = format!(
        "measured by report {}: {} {} on {}, {}",
        report.name, system.model, system.quant, system.system.chip, system.system.os
    );
    let mut profile = calibrate(bench, &forecast, &base, &source).map_err(of_bench)?;
    profile.chip = format!("{slug}{CALIBRATED}");
    // Figures out of bounds are refused, like those of a profile's file.
    ChipProfile::parse(&profile.text()).map(Ok).map_err(of_bench)
}

/// Labels by package, as tables of outcomes have them.
type PackageLabels = BTreeMap<String, &'static str>;

/// Reads the labels, and adds findings that say nothing of a place to `left_out`. A package that does not load or run has
/// the label of that failure, whatever its plan says. Fails if a document names a package that the report does not have,
/// or another machine.
fn labels(report: &MacReport, left_out: &mut Vec<String>) -> EntryResult<PackageLabels> {
    let planned = report.plan.as_ref().map(|plan| placed(report, plan, left_out));
    let mut labels = planned.transpose()?.unwrap_or_default();
    let compile: CompileReport = report.document("compile")?;
    let soak: SoakDocument = report.document("soak")?;
    let compiled = compile.failures.iter().map(|f| ("compile", &f.what, f.end, &f.message, "COMPILE_FAIL"));
    let soaked = soak.shards.iter().map(|s| ("soak", &s.shard, s.ended.end, &s.ended.reason, "RUNTIME_FAIL"));
    for (stage, package, end, reason, label) in compiled.chain(soaked) {
        report.expect_package(package, &format!("stages/{stage}.json"))?;
        match end {
            End::Refused | End::Crashed => {
                labels.insert(package.clone(), label);
            }
            End::Hung => {
                labels.remove(package);
                left_out.push(format!("{package}: {stage} hung, which patience may cure"));
            }
            End::Failed => left_out.push(format!("{package}: {reason}, which says nothing of its place")),
            End::Done | End::Skipped => {}
        }
    }
    Ok(labels)
}

/// Reads the labels of a plan report.
fn placed(report: &MacReport, plan: &PlanReport, left_out: &mut Vec<String>) -> EntryResult<PackageLabels> {
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
    let mut labels = PackageLabels::new();
    let controls = report.document::<DeviceFindings>("check")?.controls;
    if controls.is_empty() || controls.iter().any(|control| !control.pass) {
        left_out.push("placement: not every negative control of check passed, so plans say nothing".into());
        return Ok(labels);
    }
    if plan.compute_units != UNITS {
        left_out.push(format!("placement: compute units {}, where {UNITS} counts", plan.compute_units));
        return Ok(labels);
    }
    for (package, ops) in ops {
        let c = DeviceCounts::of(ops);
        let label = match (c.ane, c.gpu, c.cpu, c.none) {
            (1.., 0, 0, 0) => "ANE_ALL",
            (0, 0, 1.., 0) => "CPU_ALL",
            (0, 1.., 0, 0) => "GPU_ALL",
            (_, gpu, cpu, _) if gpu + cpu > 0 => "MIXED",
            _ => {
                left_out.push(format!("{package}: its plan has no device for {} ops", c.none));
                continue;
            }
        };
        labels.insert(package.into(), label);
    }
    Ok(labels)
}

/// Adds the findings of a report to the evidence, unless they are there. Returns true if they were there already.
///
/// # Errors
/// The folder cannot be written, or is a bundle or a file.
pub fn add_evidence(report: &MacReport, found: &ReportFindings, evidence: &Path) -> Result<bool> {
    let refused = |path: &Path, what: &str| Err(Error::invalid(path, format!("evidence: {what}")));
    if evidence.join(CHAIN_FILE).symlink_metadata().is_ok() {
        return refused(evidence, "this is a bundle; give a folder of its own");
    }
    if evidence.exists() && !evidence.is_dir() {
        return refused(evidence, "a file, where a folder is wanted");
    }
    let target = evidence.join(&report.name);
    if target.join(REPORT_FILE).is_file() {
        return Ok(true);
    }
    if target.symlink_metadata().is_ok() {
        return refused(&target, "something else has the name of this report");
    }
    std::fs::create_dir_all(evidence).map_err(|e| Error::io(evidence, e))?;
    let temporary = Temporary::dir(evidence, ".import").map_err(|e| Error::io(evidence, e))?;
    let folder = temporary.path().join("report");
    std::fs::create_dir(&folder).map_err(|e| Error::io(&folder, e))?;
    anemoe_bundle::write_atomic(&folder.join(OUTCOMES_FILE), table(&found.rows).as_bytes())?;
    if let Some(profile) = &found.profile {
        anemoe_bundle::write_atomic(&folder.join(PROFILE_FILE), profile.text().as_bytes())?;
    }
    let plain = |c: char| if c.is_control() { ' ' } else { c };
    let ends = |r: &StageRecord| {
        let reason: String = r.ended.reason.chars().map(plain).take(MAX_REASON).collect();
        json!({"stage": r.stage, "end": r.ended.end, "seconds": r.seconds, "reason": reason})
    };
    let about = json!({
        "report": report.name, "digest": report.digest, "generator": report.generator, "system": report.system,
        "rows": found.rows.len(), "chip": found.profile.as_ref().map(|p| &p.chip), "left_out": found.left_out,
        "stages": report.stages.iter().map(ends).collect::<Vec<_>>(),
    });
    write_json(&folder.join(REPORT_FILE), &about)?;
    std::fs::rename(&folder, &target).map_err(|e| Error::io(&target, e))?;
    anemoe_io::sync_dir(evidence).map_err(|e| Error::io(evidence, e))?;
    Ok(false)
}
