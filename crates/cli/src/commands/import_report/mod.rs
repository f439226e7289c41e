//! `anemoe import-report`

mod evidence_folder;
mod findings;
mod placed;

use crate::mac_report::archive::read_archive;
use crate::outcome::Outcome;
use crate::shell::quoted;
use crate::ui::{Table, Ui};
use anemoe_io::Error;
use evidence_folder::add;
use findings::ReportFindings;
use std::path::PathBuf;

/// Turn the report of a Mac into evidence.
///
/// Reads a file that `anemoe verify-on-mac` wrote, on any machine. Adds a folder to the evidence: rows of a table of outcomes, by
/// which `check` and `plan` judge the same programs as measured and others as more likely or less; and a profile of the chip,
/// calibrated by the report's bench, with which `predict-speed` counts. The same report adds nothing a second time.
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

pub fn run(args: Args, ui: &Ui) -> anyhow::Result<Outcome> {
    let archive = read_archive(&args.report)?;
    let found = ReportFindings::of(&archive)
        .map_err(|what| Error::invalid(&args.report, format!("report: {what}")))?;
    if found.system.system.simulated && !args.simulated {
        let what = "report: it comes from the fake Core ML and is no evidence of any Mac; --simulated takes it for tests";
        return Err(Error::unsupported(&args.report, what).into());
    }
    let already = add(&found, &archive.digest, &args.evidence)?;
    let rows: Vec<serde_json::Value> = found
        .rows
        .iter()
        .map(|row| serde_json::json!({"id": row["id"], "label": row["label"], "name": row["name"], "program": row["program"]}))
        .collect();
    ui.document(&serde_json::json!({
        "report": found.report, "folder": args.evidence.join(&found.report).display().to_string(), "already": already,
        "added": {"rows": if already { 0 } else { rows.len() }, "chip": found.profile.is_some() && !already},
        "rows": rows, "chip": found.profile, "left_out": found.left_out, "system": found.system,
    }))?;
    print(&args, &found, already, ui)?;
    Ok(Outcome::Done)
}

fn print(args: &Args, found: &ReportFindings, already: bool, ui: &Ui) -> anyhow::Result<()> {
    let system = &found.system.system;
    ui.line(format!(
        "{}: {} on {}, {} ({}), {}",
        found.report, found.system.model, system.chip, system.os, system.build, found.generator
    ))?;
    if already {
        ui.line(format!("it is in {} already: nothing was added", args.evidence.display()))?;
    } else {
        let mut table = Table::ending_in_text(&["row", "label", "package"]);
        for row in &found.rows {
            let cell = |name: &str| row.get(name).cloned().unwrap_or_default();
            table.row(vec![cell("id"), cell("label"), cell("name")]);
        }
        if !found.rows.is_empty() {
            table.print(ui)?;
        }
        if let Some(p) = &found.profile {
            ui.line(format!(
                "chip {}: a call {:.3} ms ({})",
                p.base_name(),
                p.call_ms.likely,
                p.call_ms.source
            ))?;
        }
        ui.line(format!(
            "added {} rows{} to {}",
            found.rows.len(),
            if found.profile.is_some() { " and a profile of the chip" } else { "" },
            args.evidence.join(&found.report).display()
        ))?;
    }
    found.left_out.iter().try_for_each(|what| ui.line(format!("left out: {what}")))?;
    let folder = quoted(&args.evidence);
    ui.line(format!("next: anemoe check BUNDLE --evidence {folder}"))?;
    Ok(())
}
