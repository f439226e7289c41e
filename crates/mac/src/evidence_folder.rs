//! Writes findings into a folder of evidence: a report's folder in one step, then an event in the folder's journal.

use crate::findings::ReportFindings;
use crate::json_file::write_json;
use crate::report::{MacReport, ReportSystem};
use crate::stages::StageRecord;
use anemoe_bundle::CHAIN_FILE;
use anemoe_bundle::journal::{self, Event, Machine, Prose, status};
use anemoe_gates::residency::imported::{OUTCOMES_FILE, PROFILE_FILE, REPORT_FILE};
use anemoe_io::{Error, Result, Temporary};
use serde_json::json;
use std::path::Path;

/// Longest reason in an event, in characters.
const MAX_REASON: usize = 600;

/// Additions of an import.
pub struct Added {
    /// True if the report was there already.
    pub already: bool,
    /// Number of events that the journal got.
    pub events: usize,
}

/// Adds the findings of a report to the evidence and to its journal, unless they are there.
///
/// # Errors
/// The folder cannot be written, is a bundle or a file, or its journal is damaged.
pub fn add_evidence(report: &MacReport, found: &ReportFindings, evidence: &Path) -> Result<Added> {
    let refused = |path: &Path, what: &str| Err(Error::invalid(path, format!("evidence: {what}")));
    if evidence.join(CHAIN_FILE).symlink_metadata().is_ok() {
        return refused(evidence, "this is a bundle; give a folder of its own");
    }
    if evidence.exists() && !evidence.is_dir() {
        return refused(evidence, "a file, where a folder is wanted");
    }
    // A damaged journal is found before anything is written.
    let known = journal::read(evidence)?.events;
    let target = evidence.join(&report.name);
    let already = target.join(REPORT_FILE).is_file();
    if !already {
        if target.symlink_metadata().is_ok() {
            return refused(&target, "something else has the name of this report");
        }
        write_folder(report, found, evidence, &target)?;
    }
    let is_known = known.iter().any(|event| event.id == report.name);
    if !is_known {
        write_event(report, evidence)?;
    }
    Ok(Added { already, events: usize::from(!is_known) })
}

fn write_folder(report: &MacReport, found: &ReportFindings, evidence: &Path, target: &Path) -> Result<()> {
    std::fs::create_dir_all(evidence).map_err(|e| Error::io(evidence, e))?;
    let temporary = Temporary::dir(evidence, ".import").map_err(|e| Error::io(evidence, e))?;
    let folder = temporary.path().join("report");
    std::fs::create_dir(&folder).map_err(|e| Error::io(&folder, e))?;
    anemoe_bundle::write_atomic(&folder.join(OUTCOMES_FILE), found.table().as_bytes())?;
    if let Some(profile) = &found.profile {
        anemoe_bundle::write_atomic(&folder.join(PROFILE_FILE), profile.text().as_bytes())?;
    }
    let ends = |r: &StageRecord| json!({"stage": r.stage, "end": r.end, "seconds": r.seconds, "reason": shortened(&r.reason)});
    let about = json!({
        "report": report.name, "digest": report.digest, "generator": report.generator, "system": report.system,
        "rows": found.rows.len(), "chip": found.profile.as_ref().map(|p| &p.chip), "left_out": found.left_out,
        "stages": report.stages.iter().map(ends).collect::<Vec<_>>(),
    });
    write_json(&folder.join(REPORT_FILE), &about)?;
    std::fs::rename(&folder, target).map_err(|e| Error::io(target, e))?;
    anemoe_io::sync_dir(evidence).map_err(|e| Error::io(evidence, e))
}

/// Adds an event of the report to the journal; its surprises are the stages that failed.
fn write_event(report: &MacReport, evidence: &Path) -> Result<()> {
    let ReportSystem { system, model, quant, version, memory_bytes, cores, .. } = &report.system;
    let failed = report.stages.iter().filter(|r| r.end.is_failure());
    let failed: Vec<String> =
        failed.map(|r| format!("{} {}: {}", r.stage, r.end.word(), shortened(&r.reason))).collect();
    let ends = report.stages.iter().map(|r| (r.stage.clone(), r.end.word().into()));
    let intent = format!("what {} does with {model} in {quant}", system.chip);
    let surprise = (!failed.is_empty()).then(|| failed.join("; "));
    let event = Event {
        id: report.name.clone(),
        seconds: Some(report.stages.iter().map(|r| r.seconds).sum()),
        version: version.clone(),
        machine: Some(Machine {
            cpu: Some(system.chip.clone()),
            os: Some(format!("{} ({})", system.os, system.build)),
            memory_bytes: *memory_bytes,
            cores: *cores,
            ..Machine::default()
        }),
        facts: ends.collect(),
        prose: Prose { intent: Some(intent), surprise, ..Prose::default() },
        ..Event::new("report", if failed.is_empty() { status::PASS } else { status::FAIL })
    };
    journal::append(evidence, event).map(|_| ())
}

/// Cuts a text to `MAX_REASON` characters, with blanks for control characters.
fn shortened(text: &str) -> String {
    text.chars().map(|c| if c.is_control() { ' ' } else { c }).take(MAX_REASON).collect()
}
