//! `anemoe report`

mod document;
mod page;
mod report_sections;
mod speeds;

use crate::bundle::Verify;
use crate::command::{Command, CommandReport};
use crate::files::Overwrite;
use crate::target::expect_bundle;
use crate::ui::Ui;
use anemoe_bundle::Chain;
use anemoe_io::Error;
use document::BundleReport;
use report_sections::ReportSection;
use serde::Serialize;
use std::io::{self, Write};
use std::path::{Path, PathBuf};

/// Show everything that a bundle records of itself, as one page or for a terminal.
///
/// The page is one HTML file that needs no network: packages by size and predicted device, errors, cosines by layer and position,
/// bytes and quality, speed beside bandwidth, gates, predicted speed by form and chip, journal. What was never measured names its
/// command.
#[derive(clap::Args)]
#[command(
    after_help = "Examples:\n  anemoe report small.anemoe -o small.html\n  anemoe report small.anemoe --text\n  anemoe report small.anemoe --against other.anemoe -o both.html"
)]
pub struct Args {
    /// The bundle.
    bundle: PathBuf,
    /// The HTML file to write.
    #[arg(short, long, value_name = "FILE.html")]
    out: Option<PathBuf>,
    /// Print it for a terminal; without --out this is what happens anyway.
    #[arg(long)]
    text: bool,
    /// Another bundle, to stand beside this one in bytes and quality; may be given several times.
    #[arg(long, value_name = "BUNDLE")]
    against: Vec<PathBuf>,
    /// The checkpoint that the bundle was built from, for the predicted speed of other forms [default: the one that the journal
    /// names, where it is there].
    #[arg(long, value_name = "CHECKPOINT")]
    checkpoint: Option<PathBuf>,
    #[command(flatten)]
    overwrite: Overwrite,
    #[command(flatten)]
    verify: Verify,
}

impl Command for Args {
    type Report = ShownReport;

    fn run(self, ui: &Ui) -> anyhow::Result<ShownReport> {
        for bundle in std::iter::once(&self.bundle).chain(&self.against) {
            expect_bundle(bundle)?;
        }
        let output = self.out.as_deref().map(|path| self.overwrite.output(path)).transpose()?;
        let chain = self.verify.open(&self.bundle, ui)?;
        let others = self.against.iter().map(|path| Ok((path.as_path(), Chain::read(path)?)));
        let others: Vec<(&Path, Chain)> = others.collect::<anyhow::Result<_>>()?;
        let report = document::gather(&self.bundle, &chain, &others, self.checkpoint.as_deref(), ui)?;
        let sections = report_sections::sections(&report, &self.bundle);
        let is_printed = self.text || output.is_none();
        let mut written = None;
        if let Some(output) = output {
            let page = page::page(&report, &sections)?;
            output.write(|file| file.write_all(page.as_bytes())).map_err(|e| Error::io(output.path(), e))?;
            let (path, packages) = (output.path().display(), report.shards.len());
            written = Some(format!("{path}: {packages} packages, {} kB", page.len() / 1000));
        }
        Ok(ShownReport { report, sections: Some(sections).filter(|_| is_printed), written })
    }
}

/// Report of a bundle, and how it is shown.
#[derive(Serialize)]
#[serde(transparent)]
pub struct ShownReport {
    report: BundleReport,
    /// Parts that a terminal shows, if it is to.
    #[serde(skip)]
    sections: Option<Vec<ReportSection>>,
    /// Line about the page that was written.
    #[serde(skip)]
    written: Option<String>,
}

impl CommandReport for ShownReport {
    fn print(&self, ui: &Ui) -> io::Result<()> {
        if let Some(sections) = &self.sections {
            ui.line(&self.report.name)?;
            for s in sections.iter().filter(|s| !s.is_long) {
                ui.line(format!("\n{}: {}", s.title, s.note))?;
                if let Some((why, command)) = &s.missing {
                    ui.line(format!("{why}; {command}"))?;
                }
                if s.table.rows().len() > 1 {
                    s.table.print(ui)?;
                }
            }
        }
        self.written.iter().try_for_each(|written| ui.line(written))
    }
}
