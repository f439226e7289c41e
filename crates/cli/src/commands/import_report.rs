//! `anemoe import-report`

use crate::command::{Command, CommandReport};
use crate::shell::quoted;
use crate::ui::{Table, Ui};
use anemoe_gates::cost::chips::ChipProfile;
use anemoe_gates::residency::outcomes::cells::OutcomeCells;
use anemoe_io::Error;
use anemoe_mac::{MacReport, ReportFindings, ReportSystem, add_evidence};
use serde::Serialize;
use std::io;
use std::path::PathBuf;

/// Turn the report of a Mac into evidence.
///
/// Reads a file that `anemoe verify-on-mac` wrote, on any machine. Adds a folder to the evidence: rows of a table of outcomes, by
/// which `check` and `plan` judge the same programs as measured; and a profile of the chip, calibrated by the report's bench, with
/// which `predict-speed` counts. The same report adds nothing a second time.
#[derive(clap::Args)]
#[command(
    after_help = "Example:\n  anemoe import-report anemoe-mac-report.zip --evidence evidence\n  anemoe check small.anemoe --evidence evidence\n  anemoe predict-speed small.anemoe --evidence evidence"
)]
pub struct Args {
    /// The report.
    #[arg(value_name = "F.zip")]
    report: PathBuf,
    /// Folder of evidence, which is made where there is none.
    #[arg(long, value_name = "DIR", default_value = "evidence", value_hint = clap::ValueHint::DirPath)]
    evidence: PathBuf,
    /// Accept a report of the fake Core ML, which is no evidence of any Mac: for tests.
    #[arg(long)]
    simulated: bool,
}

impl Command for Args {
    type Report = ImportedReport;

    fn run(self, _: &Ui) -> anyhow::Result<ImportedReport> {
        let report = MacReport::read(&self.report)?;
        let found = ReportFindings::of(&report)
            .map_err(|what| Error::invalid(&self.report, format!("report: {what}")))?;
        if report.system.system.simulated && !self.simulated {
            let what = "report: it comes from the fake Core ML and is no evidence of any Mac; --simulated takes it for tests";
            return Err(Error::unsupported(&self.report, what).into());
        }
        let already = add_evidence(&report, &found, &self.evidence)?;
        let ReportFindings { rows, profile: chip, left_out, .. } = found;
        let added =
            AddedFigures { rows: if already { 0 } else { rows.len() }, chip: chip.is_some() && !already };
        Ok(ImportedReport {
            folder: self.evidence.join(&report.name),
            evidence: self.evidence,
            report: report.name,
            generator: report.generator,
            already,
            added,
            rows,
            chip,
            left_out,
            system: report.system,
        })
    }
}

/// Evidence that a report gave.
#[derive(Serialize)]
pub struct ImportedReport {
    report: String,
    #[serde(skip)]
    generator: String,
    #[serde(skip)]
    evidence: PathBuf,
    #[serde(serialize_with = "anemoe_bundle::path_text")]
    folder: PathBuf,
    already: bool,
    added: AddedFigures,
    rows: Vec<OutcomeCells>,
    chip: Option<ChipProfile>,
    left_out: Vec<String>,
    system: ReportSystem,
}

#[derive(Serialize)]
struct AddedFigures {
    rows: usize,
    chip: bool,
}

impl CommandReport for ImportedReport {
    fn print(&self, ui: &Ui) -> io::Result<()> {
        let ReportSystem { system, model, .. } = &self.system;
        let (chip, os, build) = (&system.chip, &system.os, &system.build);
        ui.line(format!("{}: {model} on {chip}, {os} ({build}), {}", self.report, self.generator))?;
        let folder = self.folder.display();
        if self.already {
            ui.line(format!("{folder} is there already: nothing was added"))?;
        } else {
            let cells = |row: &OutcomeCells| {
                ["id", "label", "name"].map(|name| row.get(name).cloned().unwrap_or_default()).to_vec()
            };
            if !self.rows.is_empty() {
                Table::ending_in_text(&["row", "label", "package"])
                    .with_rows(self.rows.iter().map(cells))
                    .print(ui)?;
            }
            if let Some(p) = &self.chip {
                let (ms, source) = (p.call_ms.likely, &p.call_ms.source);
                ui.line(format!("chip {}: a call {ms:.3} ms ({source})", p.base_name()))?;
            }
            let chip = if self.added.chip { " and a profile of the chip" } else { "" };
            ui.line(format!("added {} rows{chip} to {folder}", self.added.rows))?;
        }
        self.left_out.iter().try_for_each(|what| ui.line(format!("left out: {what}")))?;
        ui.line(format!("next: anemoe check BUNDLE --evidence {}", quoted(&self.evidence)))
    }
}
