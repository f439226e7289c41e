//! Imported evidence: outcomes from reports of the user's Macs, beside the published outcomes of anemoe.
//!
//! ```text
//! EVIDENCE/REPORT/outcomes.tsv   rows: programs that a Mac ran, with their labels
//!                 chip.toml      chip profile that the report's bench calibrated, see `cost::chips`
//!                 report.json    description of the report
//! ```

use super::outcomes::{Row, parse};
use super::precedents::Precedents;
use super::rule::{Conditions, DeviceTarget, Units, Verdict};
use crate::{Error, Result};
use serde::Serialize;
use std::path::{Path, PathBuf};
use std::sync::Arc;

/// Name of the table of outcomes in a report's folder.
pub const OUTCOMES_FILE: &str = "outcomes.tsv";
/// Name of the chip profile in a report's folder.
pub const PROFILE_FILE: &str = "chip.toml";
/// Name of the report's description in its folder; it is written last.
pub const REPORT_FILE: &str = "report.json";
/// Largest table that is read, in bytes.
const MAX_TABLE_BYTES: u64 = 64 << 20;

/// Measured outcome of the program that is judged.
#[derive(Clone, Debug, PartialEq, Serialize)]
pub struct MeasuredOutcome {
    /// Verdict that follows from the label.
    pub verdict: Verdict,
    /// Label of the outcome: where the program ran, or how it failed.
    pub label: String,
    /// Chip and system that ran the program.
    pub machine: String,
    /// Name of the report: its folder in the evidence.
    pub report: String,
    /// Id of the row in the report's table.
    pub row: String,
}

/// Rows of all reports in a folder of evidence.
#[derive(Debug)]
pub struct ImportedEvidence {
    rows: Vec<(String, Row)>,
    precedents: Arc<Precedents>,
}

/// Returns the folders of reports in a folder of evidence, sorted by name.
///
/// # Errors
/// The folder cannot be read.
pub fn report_folders(folder: &Path) -> Result<Vec<PathBuf>> {
    let entries = folder.read_dir().map_err(|e| Error::io(folder, e))?;
    let mut all = Vec::new();
    for entry in entries {
        let path = entry.map_err(|e| Error::io(folder, e))?.path();
        if path.join(REPORT_FILE).is_file() {
            all.push(path);
        }
    }
    all.sort();
    Ok(all)
}

impl ImportedEvidence {
    /// Reads the tables of a folder of evidence.
    ///
    /// # Errors
    /// The folder is missing, or a table is damaged; the message names the table.
    pub fn read(folder: &Path) -> Result<ImportedEvidence> {
        let mut rows = Vec::new();
        for report in report_folders(folder)? {
            let path = report.join(OUTCOMES_FILE);
            let name = report.file_name().map(|n| n.to_string_lossy().into_owned()).unwrap_or_default();
            let text = anemoe_io::read_text(&path, MAX_TABLE_BYTES).map_err(|e| Error::io(&path, e))?;
            let parsed =
                parse(&text).map_err(|e| Error::invalid(&path, format!("table of outcomes: {e}")))?;
            rows.extend(parsed.into_iter().map(|row| (name.clone(), row)));
        }
        let own: Vec<Row> = rows.iter().map(|(_, row)| row.clone()).collect();
        Ok(ImportedEvidence { precedents: Arc::new(Precedents::known().and(&own)), rows })
    }

    /// Returns published and imported outcomes, by which other programs are judged.
    pub fn precedents(&self) -> Arc<Precedents> {
        self.precedents.clone()
    }

    /// Returns the outcome of a program under these conditions. Findings that contradict each other give `unknown`,
    /// and both are named.
    pub fn find(&self, program: &str, conditions: &Conditions) -> Option<MeasuredOutcome> {
        if conditions.target != DeviceTarget::Mac || conditions.units != Units::CpuAndNe {
            return None;
        }
        let same_chip = |row: &Row| conditions.chip.is_none_or(|chip| row.conditions.chip == Some(chip));
        let found = self.rows.iter().filter(|(_, row)| row.program == program && same_chip(row));
        let mut found = found.filter_map(|(report, row)| {
            Some(MeasuredOutcome {
                verdict: row.truth()?,
                label: row.label.clone(),
                machine: row.machine.clone(),
                report: report.clone(),
                row: row.id.clone(),
            })
        });
        let first = found.next()?;
        let other = found.find(|other| other.verdict != first.verdict);
        Some(match other {
            None => first,
            Some(other) => MeasuredOutcome {
                verdict: Verdict::Unknown,
                label: format!("{} and {}", first.label, other.label),
                machine: format!("{}; {}", first.machine, other.machine),
                report: format!("{} and {}", first.report, other.report),
                row: first.row,
            },
        })
    }
}

impl MeasuredOutcome {
    /// Returns the outcome in words.
    pub fn text(&self) -> String {
        let MeasuredOutcome { label, machine, report, .. } = self;
        let what = match self.verdict {
            Verdict::Ane => "this very program ran on the Neural Engine as a whole",
            Verdict::NotAne => "this very program did not run on the Neural Engine as a whole",
            Verdict::Unknown => "reports about this very program contradict each other",
        };
        format!("{what}: {label} on {machine} (imported report {report})")
    }
}
