//! `anemoe import-report`

use crate::command::{Command, Page};
use crate::shell::quoted;
use crate::ui::{Table, Ui};
use anemoe_coreml::SystemFacts;
use anemoe_gates::residency::outcomes::cells::OutcomeCells;
use anemoe_io::Error;
use anemoe_mac::{MacReport, ReportFindings, ReportSystem, add_evidence};
use serde_json::json;
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
    type Report = Page;

    fn run(self, _: &Ui) -> anyhow::Result<Page> {
        let report = MacReport::read(&self.report)?;
        let found = ReportFindings::of(&report)
            .map_err(|what| Error::invalid(&self.report, format!("report: {what}")))?;
        if report.system.system.simulated && !self.simulated {
            let what = "report: it comes from the fake Core ML and is no evidence of any Mac; --simulated takes it for tests";
            return Err(Error::unsupported(&self.report, what).into());
        }
        let already = add_evidence(&report, &found, &self.evidence)?;
        let ReportFindings { rows, profile: chip, left_out } = found;
        let folder = self.evidence.join(&report.name).display().to_string();
        let ReportSystem { system, model, .. } = &report.system;
        let SystemFacts { chip: on, os, build, .. } = system;
        let mut lines =
            vec![format!("{}: {model} on {on}, {os} ({build}), {}", report.name, report.generator)];
        if already {
            lines.push(format!("{folder} is there already: nothing was added"));
        } else {
            let cells = |row: &OutcomeCells| {
                ["id", "label", "name"].map(|name| row.get(name).cloned().unwrap_or_default()).to_vec()
            };
            if !rows.is_empty() {
                let table = Table::ending_in_text(&["row", "label", "package"]);
                lines.extend(table.with_rows(rows.iter().map(cells)).lines());
            }
            if let Some(p) = &chip {
                let (ms, source) = (p.call_ms.likely, &p.call_ms.source);
                lines.push(format!("chip {}: a call {ms:.3} ms ({source})", p.base_name()));
            }
            let profile = if chip.is_some() { " and a profile of the chip" } else { "" };
            lines.push(format!("added {} rows{profile} to {folder}", rows.len()));
        }
        lines.extend(left_out.iter().map(|what| format!("left out: {what}")));
        lines.push(format!("next: anemoe check BUNDLE --evidence {}", quoted(&self.evidence)));
        let added = json!({"rows": if already { 0 } else { rows.len() }, "chip": chip.is_some() && !already});
        let document = json!({
            "report": report.name, "folder": folder, "already": already, "added": added, "rows": rows, "chip": chip,
            "left_out": left_out, "system": report.system,
        });
        Ok(Page::new(document, lines))
    }
}
