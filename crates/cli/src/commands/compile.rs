//! `anemoe compile`

use crate::args::runner::CompiledArgs;
use crate::args::step_limit::StepLimit;
use crate::bar_listener::BarListener;
use crate::bundle::Verify;
use crate::command::{Command, CommandReport};
use crate::target::expect_bundle;
use crate::ui::{Table, Ui, bytes};
use anemoe_mac::{BundleSteps, CompileReport};
use serde::Serialize;
use std::io;
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
    type Report = CompiledBundle;

    fn run(self, ui: &Ui) -> anyhow::Result<CompiledBundle> {
        anemoe_coreml::available()?;
        expect_bundle(&self.bundle)?;
        let chain = self.verify.open(&self.bundle, ui)?;
        let models = self.cache.models(&self.bundle, &chain);
        let limit = self.limit.limit();
        let steps = BundleSteps { bundle: &self.bundle, chain: &chain, models: &models, limit };
        let report = steps.compile(self.again, !self.no_load, &BarListener::new(ui))?;
        Ok(CompiledBundle { bundle: self.bundle, report })
    }
}

/// A bundle that was compiled.
#[derive(Serialize)]
pub struct CompiledBundle {
    #[serde(serialize_with = "anemoe_bundle::path_text")]
    bundle: PathBuf,
    #[serde(flatten)]
    report: CompileReport,
}

impl CommandReport for CompiledBundle {
    fn print(&self, ui: &Ui) -> io::Result<()> {
        print(&self.report, ui)
    }

    fn passed(&self) -> bool {
        self.report.failed == 0
    }
}

fn print(report: &CompileReport, ui: &Ui) -> io::Result<()> {
    let CompileReport { compiled, already_compiled, compiled_again, failed, .. } = report;
    if report.of_other_systems > 0 {
        ui.line(format!("{} were compiled for another system or chip", report.of_other_systems))?;
    }
    let number = |s: Option<f64>| s.map_or_else(String::new, |s| format!("{s:.1}"));
    let rows = report.packages.iter().filter(|p| p.seconds.is_some()).map(|p| {
        let load = (!p.load_seconds.is_empty()).then(|| p.load_seconds.values().sum());
        let compiled = p.compiled_bytes.map_or_else(String::new, bytes);
        vec![p.package.clone(), bytes(p.package_bytes), compiled, number(p.seconds), number(load)]
    });
    if *compiled > 0 {
        Table::new(&["package", "bytes", "compiled", "compile s", "load s"]).with_rows(rows).print(ui)?;
    }
    let again =
        if *compiled_again > 0 { format!(" ({compiled_again} again, after -14)") } else { String::new() };
    let line =
        format!("{compiled} packages compiled{again}, {already_compiled} were already, {failed} failed");
    ui.line(line)
}
