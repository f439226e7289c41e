//! `anemoe compile`

use crate::args::runner::CompiledArgs;
use crate::args::step_limit::StepLimit;
use crate::bar_listener::BarListener;
use crate::bundle::Verify;
use crate::command::{Command, CommandReport};
use crate::outcome::Outcome;
use crate::target::expect_bundle;
use crate::ui::{Table, Ui, bytes};
use anemoe_mac::{BundleCompiler, CompileReport};
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
        let compiler = BundleCompiler {
            bundle: &self.bundle,
            chain: &chain,
            models: &models,
            again: self.again,
            loads: !self.no_load,
            steps: self.limit.steps(),
        };
        let report = compiler.run(&BarListener::new(ui))?;
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

    fn outcome(&self) -> Outcome {
        Outcome::of(self.report.failed == 0)
    }
}

fn print(report: &CompileReport, ui: &Ui) -> io::Result<()> {
    let CompileReport { compiled, already_compiled, compiled_again, failed, .. } = report;
    if report.of_other_systems > 0 {
        ui.line(format!("{} were compiled for another system or chip", report.of_other_systems))?;
    }
    let mut table = Table::new(&["package", "bytes", "compiled", "compile s", "load s"]);
    for p in report.packages.iter().filter(|p| p.seconds.is_some()) {
        let number = |s: Option<f64>| s.map_or_else(String::new, |s| format!("{s:.1}"));
        table.row(vec![
            p.package.clone(),
            bytes(p.package_bytes),
            p.compiled_bytes.map_or_else(String::new, bytes),
            number(p.seconds),
            number((!p.load_seconds.is_empty()).then(|| p.load_seconds.values().sum())),
        ]);
    }
    if *compiled > 0 {
        table.print(ui)?;
    }
    let again =
        if *compiled_again > 0 { format!(" ({compiled_again} again, after -14)") } else { String::new() };
    let line =
        format!("{compiled} packages compiled{again}, {already_compiled} were already, {failed} failed");
    ui.line(line)
}
