//! `anemoe import-report`

use crate::outcome::Outcome;
use crate::shell::quoted;
use crate::ui::{Table, Ui};
use anemoe_gates::cost::chips::ChipProfile;
use anemoe_io::Error;
use anemoe_mac::{Added, MacReport, ReportFindings, ReportSystem, add_evidence};
use serde::Serialize;
use std::path::PathBuf;

/// Turn the report of a Mac into evidence.
///
/// Reads a file that `anemoe verify-on-mac` wrote, on any machine. Adds a folder to the evidence: rows of a table of outcomes, by
/// which `check` and `plan` judge the same programs as measured; a profile of the chip, calibrated by the report's bench, with which
/// `predict-speed` counts; and an event in the evidence's journal. The same report adds nothing a second time.
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

#[derive(Serialize)]
struct ImportDocument<'a> {
    report: &'a str,
    #[serde(serialize_with = "anemoe_bundle::path_text")]
    folder: PathBuf,
    already: bool,
    added: AddedFigures,
    rows: Vec<ImportedRow<'a>>,
    chip: &'a Option<ChipProfile>,
    left_out: &'a [String],
    system: &'a ReportSystem,
}

#[derive(Serialize)]
struct AddedFigures {
    rows: usize,
    events: usize,
    chip: bool,
}

#[derive(Serialize)]
struct ImportedRow<'a> {
    id: &'a str,
    label: &'a str,
    name: &'a str,
    program: &'a str,
}

pub fn run(args: Args, ui: &Ui) -> anyhow::Result<Outcome> {
    let report = MacReport::read(&args.report)?;
    let found = ReportFindings::of(&report)
        .map_err(|what| Error::invalid(&args.report, format!("report: {what}")))?;
    if report.system.system.simulated && !args.simulated {
        let what = "report: it comes from the fake Core ML and is no evidence of any Mac; --simulated takes it for tests";
        return Err(Error::unsupported(&args.report, what).into());
    }
    let Added { already, events } = add_evidence(&report, &found, &args.evidence)?;
    let cell = |row: &'static str, of: usize| found.rows[of].get(row).map_or("", String::as_str);
    let rows: Vec<ImportedRow<'_>> = (0..found.rows.len())
        .map(|i| ImportedRow {
            id: cell("id", i),
            label: cell("label", i),
            name: cell("name", i),
            program: cell("program", i),
        })
        .collect();
    let chip = found.profile.is_some() && !already;
    let added = AddedFigures { rows: if already { 0 } else { rows.len() }, events, chip };
    let document = ImportDocument {
        report: &report.name,
        folder: args.evidence.join(&report.name),
        already,
        added,
        rows,
        chip: &found.profile,
        left_out: &found.left_out,
        system: &report.system,
    };
    ui.document(&document)?;
    print(&document, &report.generator, ui)?;
    ui.line(format!("next: anemoe check BUNDLE --evidence {}", quoted(&args.evidence)))?;
    Ok(Outcome::Done)
}

fn print(document: &ImportDocument<'_>, generator: &str, ui: &Ui) -> anyhow::Result<()> {
    let ReportSystem { system, model, .. } = document.system;
    ui.line(format!(
        "{}: {model} on {}, {} ({}), {generator}",
        document.report, system.chip, system.os, system.build
    ))?;
    let folder = document.folder.display();
    if document.already {
        ui.line(format!("{folder} is there already: nothing was added"))?;
    } else {
        let mut table = Table::ending_in_text(&["row", "label", "package"]);
        for row in &document.rows {
            table.row(vec![row.id.into(), row.label.into(), row.name.into()]);
        }
        if !document.rows.is_empty() {
            table.print(ui)?;
        }
        if let Some(p) = document.chip {
            let (ms, source) = (p.call_ms.likely, &p.call_ms.source);
            ui.line(format!("chip {}: a call {ms:.3} ms ({source})", p.base_name()))?;
        }
        let chip = if document.added.chip { " and a profile of the chip" } else { "" };
        let rows = document.added.rows;
        ui.line(format!("added {rows} rows{chip} to {folder}, and an event to the journal beside it"))?;
    }
    Ok(document.left_out.iter().try_for_each(|what| ui.line(format!("left out: {what}")))?)
}
