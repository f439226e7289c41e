//! `anemoe report`

mod page;
mod report_sections;

use crate::bundle::Verify;
use crate::command::{Command, Page};
use crate::files::Overwrite;
use crate::target::expect_bundle;
use crate::ui::Ui;
use anemoe_bundle::Chain;
use anemoe_gates::bundle_report::bundle_report;
use anemoe_io::Error;
use std::io::Write;
use std::path::{Path, PathBuf};

/// Show everything that a bundle records of itself, as one page or for a terminal.
///
/// The page is one HTML file that needs no network: packages by size and predicted device, errors, cosines by layer and position,
/// bytes and quality, speed beside bandwidth, gates, predicted speed of chips, journal. What was never measured names its
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
    #[command(flatten)]
    overwrite: Overwrite,
    #[command(flatten)]
    verify: Verify,
}

impl Command for Args {
    type Report = Page;

    fn run(self, ui: &Ui) -> anyhow::Result<Page> {
        for bundle in std::iter::once(&self.bundle).chain(&self.against) {
            expect_bundle(bundle)?;
        }
        let output = self.out.as_deref().map(|path| self.overwrite.output(path)).transpose()?;
        let chain = self.verify.open(&self.bundle, ui)?;
        let others = self.against.iter().map(|path| Ok((path.as_path(), Chain::read(path)?)));
        let others: Vec<(&Path, Chain)> = others.collect::<anyhow::Result<_>>()?;
        let bar = ui.bar(chain.shards.len() as u64, "packages");
        let report = bundle_report(&self.bundle, &chain, &others, || bar.inc(1))?;
        drop(bar);
        let sections = report_sections::sections(&report, &self.bundle);
        let mut lines = Vec::new();
        if self.text || output.is_none() {
            lines.push(report.name.clone());
            for s in sections.iter().filter(|s| !s.is_long) {
                lines.push(format!("\n{}: {}", s.title, s.note));
                lines.extend(s.missing.iter().map(|command| format!("nothing is recorded; {command}")));
                if s.table.rows().len() > 1 {
                    lines.extend(s.table.lines());
                }
            }
        }
        if let Some(output) = output {
            let page = page::page(&report, &sections)?;
            output.write(|file| file.write_all(page.as_bytes())).map_err(|e| Error::io(output.path(), e))?;
            let (path, packages) = (output.path().display(), report.shards.len());
            lines.push(format!("{path}: {packages} packages, {} kB", page.len() / 1000));
        }
        Ok(Page::new(serde_json::to_value(report)?, lines))
    }
}
