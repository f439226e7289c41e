//! Writes findings into a folder of evidence: a report's folder, in one step.

use super::findings::ReportFindings;
use crate::mac_report::stage::StageRecord;
use anemoe_bundle::CHAIN_FILE;
use anemoe_gates::residency::imported::{OUTCOMES_FILE, PROFILE_FILE, REPORT_FILE};
use anemoe_io::{Error, Temporary};
use serde_json::json;
use std::path::Path;

/// Longest reason of a stage, in characters.
const MAX_REASON: usize = 600;

/// Adds the findings of a report to the evidence, unless they are there. Returns true if they were there already.
///
/// # Errors
/// The folder cannot be written, or is a bundle or a file.
pub fn add(found: &ReportFindings, digest: &str, evidence: &Path) -> anyhow::Result<bool> {
    if evidence.join(CHAIN_FILE).symlink_metadata().is_ok() {
        let what = "evidence: this is a bundle; give a folder of its own";
        return Err(Error::invalid(evidence, what).into());
    }
    if evidence.exists() && !evidence.is_dir() {
        return Err(Error::invalid(evidence, "evidence: a file, where a folder is wanted").into());
    }
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
    Ok(already)
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

/// Cuts a text to `MAX_REASON` characters, with blanks for control characters.
fn shortened(text: &str) -> String {
    text.chars().map(|c| if c.is_control() { ' ' } else { c }).take(MAX_REASON).collect()
}
