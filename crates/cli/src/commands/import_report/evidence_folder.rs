//! Writes findings into a folder of evidence: a report's folder in one step, then its events.

use super::findings::ReportFindings;
use crate::experiment::{self, ExperimentPath};
use crate::mac_report::stage::{StageEnd, StageName, StageRecord};
use crate::registry;
use anemoe_bundle::CHAIN_FILE;
use anemoe_bundle::journal::{self, Event, Machine, Prose, status};
use anemoe_gates::residency::imported::{OUTCOMES_FILE, PROFILE_FILE, REPORT_FILE};
use anemoe_io::{Error, Temporary};
use serde_json::{Map, Value, json};
use std::path::Path;

/// Longest reason in an event, in characters.
const MAX_REASON: usize = 600;

/// Additions of an import.
pub struct Added {
    /// True if the report was there already.
    pub already: bool,
    /// Number of events that the book got.
    pub events: usize,
}

/// Adds the findings of a report to the evidence and to the book, unless they are there.
///
/// # Errors
/// A folder or the book cannot be written, is a bundle or a file, or the book is damaged.
pub fn add(found: &ReportFindings, digest: &str, evidence: &Path, book: &Path) -> anyhow::Result<Added> {
    for folder in [evidence, book] {
        let what = "evidence: this is a bundle; give a folder of its own";
        if folder.join(CHAIN_FILE).symlink_metadata().is_ok() {
            return Err(Error::invalid(folder, what).into());
        }
        if folder.exists() && !folder.is_dir() {
            return Err(Error::invalid(folder, "evidence: a file, where a folder is wanted").into());
        }
    }
    // A damaged book is found before anything is written.
    journal::read(book)?;
    let target = evidence.join(&found.report);
    let already = target.join(REPORT_FILE).is_file();
    if !already {
        if target.symlink_metadata().is_ok() {
            return Err(
                Error::invalid(&target, "evidence: something else has the name of this report").into()
            );
        }
        write_folder(found, digest, evidence, &target)?;
    }
    let events = write_book(found, book)?;
    Ok(Added { already, events })
}

fn write_folder(found: &ReportFindings, digest: &str, evidence: &Path, target: &Path) -> anyhow::Result<()> {
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
        "report": found.report, "digest": digest, "generator": found.generator, "system": found.system,
        "rows": found.rows.len(), "chip": found.profile.as_ref().map(|p| &p.chip), "left_out": found.left_out,
        "stages": found.stages.iter().map(ends).collect::<Vec<_>>(),
    });
    anemoe_bundle::write_atomic(&folder.join(REPORT_FILE), &serde_json::to_vec_pretty(&about)?)?;
    std::fs::rename(&folder, target).map_err(|e| Error::io(target, e))?;
    Ok(anemoe_io::sync_dir(evidence).map_err(|e| Error::io(evidence, e))?)
}

/// Begins the experiment of a report and adds an event for each stage that was run. Existing events stay. Returns the
/// number of new events.
fn write_book(found: &ReportFindings, book: &Path) -> anyhow::Result<usize> {
    let before = if book.is_dir() { journal::read(book)?.events } else { Vec::new() };
    let mut added = 0;
    if !experiment::ids(&before).any(|id| id == found.report) {
        let s = &found.system.system;
        let intent = format!("what {} does with {} in {}", s.chip, found.system.model, found.system.quant);
        let title = format!("{} on {}, {}", found.system.model, s.chip, s.os);
        let at = ExperimentPath { book: book.to_path_buf(), id: found.report.clone() };
        experiment::begin(&at, intent, json!({"title": title}))?;
        added += 1;
    }
    let known = |kind: &str| before.iter().any(|e| e.of.as_deref() == Some(&found.report) && e.kind == kind);
    for record in found.stages.iter().filter(|r| r.end != StageEnd::Skipped) {
        if !known(record.stage.command()) {
            journal::append(book, event(found, record))?;
            added += 1;
        }
    }
    Ok(added)
}

fn event(found: &ReportFindings, record: &StageRecord) -> Event {
    let is_gate = matches!(record.stage, StageName::Check | StageName::Soak | StageName::Validate);
    let status = match record.end {
        StageEnd::Done if is_gate => status::PASS,
        StageEnd::Done => status::DONE,
        StageEnd::Failed => status::FAIL,
        _ => status::ERROR,
    };
    let command = record.stage.command();
    let measured = registry::measured(command, &record.document);
    let mut figures: Map<String, Value> =
        measured.into_iter().map(|(figure, value)| (figure.name.to_string(), value.into())).collect();
    figures.retain(|_, v| v.as_f64().is_some_and(f64::is_finite));
    let mut facts = experiment::facts_of(json!({"figures": figures, "end": record.end.word()}));
    let reason = shortened(&record.reason);
    if record.end.is_failure() {
        facts.insert("error".into(), reason.clone().into());
    }
    let s = &found.system.system;
    let surprise = record.end.is_failure().then(|| format!("{command} {}: {reason}", record.end.word()));
    Event {
        of: Some(found.report.clone()),
        seconds: Some(record.seconds),
        version: found.system.version.clone(),
        machine: Some(Machine {
            cpu: Some(s.chip.clone()),
            os: Some(format!("{} ({})", s.os, s.build)),
            memory_bytes: found.system.memory_bytes,
            cores: found.system.cores,
            ..Machine::default()
        }),
        facts,
        prose: Prose { surprise, ..Prose::default() },
        ..Event::new(command, status)
    }
}

/// Cuts a text to `MAX_REASON` characters, with blanks for control characters.
fn shortened(text: &str) -> String {
    text.chars().map(|c| if c.is_control() { ' ' } else { c }).take(MAX_REASON).collect()
}
