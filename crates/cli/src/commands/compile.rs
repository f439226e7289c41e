//! `anemoe compile`

use crate::args::runner::CompiledArgs;
use crate::args::step_limit::StepLimit;
use crate::bar_listener::BarListener;
use crate::bundle::Verify;
use crate::command::{Command, Page, extended};
use crate::target::expect_bundle;
use crate::ui::{Table, Ui, bytes};
use anemoe_mac::{BundleSteps, CompileReport};
use serde_json::json;
use std::path::PathBuf;

/// Compile a bundle for the Neural Engine of this Mac.
///
/// Compiled models lie in a cache, by content, version of the system and chip: what is compiled already stays as it is. Every
/// function is loaded once, because the Neural Engine's own compiler runs then. Each package is compiled and loaded in a process
/// of its own; one that fails, crashes or hangs is reported with likely causes, and the others go on. Exit status 1 when some
/// package failed.
#[derive(clap::Args)]
#[command(
    after_help = "Example:\n  anemoe compile small.anemoe\n  anemoe compile small.anemoe --timeout 120"
)]
pub struct Args {
    /// The bundle.
    bundle: PathBuf,
    /// Compile again what is compiled. What is refused with error -14 is compiled again anyway.
    #[arg(long)]
    again: bool,
    /// Load no function: mistakes of a form then show when the bundle runs.
    #[arg(long)]
    no_load: bool,
    #[command(flatten)]
    limit: StepLimit,
    #[command(flatten)]
    cache: CompiledArgs,
    #[command(flatten)]
    verify: Verify,
}

impl Command for Args {
    type Report = Page;

    fn run(self, ui: &Ui) -> anyhow::Result<Page> {
        anemoe_coreml::available()?;
        expect_bundle(&self.bundle)?;
        let chain = self.verify.open(&self.bundle, ui)?;
        let models = self.cache.models(&self.bundle, &chain);
        let limit = self.limit.limit();
        let steps = BundleSteps { bundle: &self.bundle, chain: &chain, models: &models, limit };
        let report = steps.compile(self.again, !self.no_load, &BarListener::new(ui))?;
        let document = extended(json!({"bundle": self.bundle.display().to_string()}), &report)?;
        Ok(Page { passed: report.failed == 0, ..Page::new(document, lines(&report)) })
    }
}

fn lines(report: &CompileReport) -> Vec<String> {
    let CompileReport { compiled, already_compiled, compiled_again, of_other_systems, failed, .. } = report;
    let mut lines = Vec::new();
    if *of_other_systems > 0 {
        lines.push(format!("{of_other_systems} were compiled for another system or chip"));
    }
    let number = |s: Option<f64>| s.map_or_else(String::new, |s| format!("{s:.1}"));
    let rows = report.packages.iter().filter(|p| p.seconds.is_some()).map(|p| {
        let load = (!p.load_seconds.is_empty()).then(|| p.load_seconds.values().sum());
        let compiled = p.compiled_bytes.map_or_else(String::new, bytes);
        vec![p.package.clone(), bytes(p.package_bytes), compiled, number(p.seconds), number(load)]
    });
    if *compiled > 0 {
        let table = Table::new(&["package", "bytes", "compiled", "compile s", "load s"]);
        lines.extend(table.with_rows(rows).lines());
    }
    let again =
        if *compiled_again > 0 { format!(" ({compiled_again} again, after -14)") } else { String::new() };
    lines.push(format!(
        "{compiled} packages compiled{again}, {already_compiled} were already, {failed} failed"
    ));
    lines
}
