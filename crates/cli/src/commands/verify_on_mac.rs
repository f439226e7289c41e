//! `anemoe verify-on-mac`

use super::quickstart::find_model;
use crate::args::step_limit::StepLimit;
use crate::bar_listener::BarListener;
use crate::command::{Command, Page};
use crate::files::Overwrite;
use crate::shell::quoted;
use crate::ui::{Table, Ui, duration};
use anemoe_bundle::journal::Machine;
use anemoe_convert::quant::Quant;
use anemoe_coreml::causes::End;
use anemoe_mac::{
    MacReport, MacStage, PrivateWords, ReportSystem, STAGES, SoakLength, StageRecord, Verification,
    report_entries, write_archive,
};
use anyhow::Context;
use clap::builder::{PossibleValue, PossibleValuesParser};
use serde_json::{Value, json};
use std::path::PathBuf;

/// Measure everything that only a Mac can, and put it into one file.
///
/// Runs doctor, tune, build, compile, check --device, a soak of thousands of passes, the golden gate and the bench on the Neural
/// Engine, and reads power where `powermetrics` may be run. Each stage has a process of its own: what crashes, hangs or is refused
/// is a finding, and the next stage goes on. An interrupted run goes on behind the last finished stage. The report is written at the
/// end, whatever failed; it holds no folders, user names or host names. Exit status 1 when a stage failed.
#[derive(clap::Args)]
#[command(
    after_help = "Example:\n  anemoe verify-on-mac\n  anemoe verify-on-mac --dry-run\n  anemoe verify-on-mac --stages soak --again\n  anemoe import-report anemoe-mac-report.zip --evidence evidence"
)]
pub struct Args {
    /// The checkpoint [default: models/small-gemma4 of the repository].
    #[arg(long, value_name = "CHECKPOINT")]
    checkpoint: Option<PathBuf>,
    /// The report. One of an earlier run is replaced.
    #[arg(short, long, value_name = "F.zip", default_value = "anemoe-mac-report.zip")]
    out: PathBuf,
    /// Folder of bundle, trials and documents, with which a later run goes on [default: beside the report, with the ending .work].
    #[arg(long, value_name = "DIR")]
    work: Option<PathBuf>,
    /// Compression.
    #[arg(long, value_name = "KIND", default_value = "lut4")]
    quant: Quant,
    /// Token counts for which each package has a function.
    #[arg(long, value_name = "N,..", value_delimiter = ',', default_value = "1,4,64", value_parser = crate::args::numbers::at_least_one)]
    tokens: Vec<usize>,
    /// Only these stages; what others have found before stays in the report.
    #[arg(long, value_name = "STAGE,..", value_delimiter = ',', value_parser = PossibleValuesParser::new(STAGES.map(|s| PossibleValue::new(s.name).help(s.what))))]
    stages: Vec<String>,
    /// Run stages again that an earlier run has finished.
    #[arg(long)]
    again: bool,
    /// List the stages, and do nothing.
    #[arg(long)]
    dry_run: bool,
    /// Calls of each form that are measured, as `tune --calls`.
    #[arg(long, value_name = "N", default_value_t = 300, value_parser = clap::value_parser!(u32).range(20..=100_000))]
    calls: u32,
    /// Passes of each token count in the soak.
    #[arg(long, value_name = "N", default_value_t = 2000, value_parser = clap::value_parser!(u64).range(1..=100_000_000))]
    soak_passes: u64,
    /// Least seconds of the soak: objects that are never let go end a process after some five minutes. --timeout does not limit the
    /// whole of it: it ends a soak in which no pass comes for so long.
    #[arg(long, value_name = "S", default_value_t = 360, value_parser = clap::value_parser!(u64).range(0..=86_400))]
    soak_seconds: u64,
    /// Seconds of which power is measured.
    #[arg(long, value_name = "S", default_value_t = 20, value_parser = clap::value_parser!(u64).range(1..=3600))]
    energy_seconds: u64,
    #[command(flatten)]
    limit: StepLimit,
    #[command(flatten)]
    overwrite: Overwrite,
}

impl Command for Args {
    type Report = Page;

    fn run(self, ui: &Ui) -> anyhow::Result<Page> {
        if self.dry_run {
            return Ok(list_stages(&self.stages));
        }
        anemoe_coreml::available().context("verify-on-mac runs packages on the Neural Engine")?;
        let system = anemoe_coreml::system_facts().context(
            "the system does not say its version, its build and its chip: a report without them is none",
        )?;
        let checkpoint = match self.checkpoint {
            Some(path) => path,
            None => find_model().context("give --checkpoint")?,
        };
        // Without `--force`, only a report of an earlier run may be replaced.
        let replaces = self.out.is_file() && MacReport::read(&self.out).is_ok();
        let output = Overwrite { force: self.overwrite.force || replaces }.output(&self.out)?;
        let work = self.work.unwrap_or_else(|| self.out.with_extension("work"));
        let machine = Machine::here();
        let model =
            checkpoint.file_name().map_or_else(|| "checkpoint".into(), |n| n.to_string_lossy().into_owned());
        let about = ReportSystem {
            system,
            memory_bytes: machine.memory_bytes,
            cores: machine.cores,
            version: env!("CARGO_PKG_VERSION").into(),
            model,
            quant: self.quant.to_string(),
            tokens: self.tokens,
        };
        let verification = Verification {
            work: std::path::absolute(&work)?,
            checkpoint,
            about,
            calls: self.calls,
            soak: SoakLength { passes: self.soak_passes, seconds: self.soak_seconds as f64 },
            energy_seconds: self.energy_seconds,
            timeout: self.limit.timeout,
            stages: self.stages,
            again: self.again,
        };
        let records = verification.run(&BarListener::new(ui))?;
        let folders = [(verification.work.as_path(), "WORK"), (&verification.checkpoint, "CHECKPOINT")];
        let words = PrivateWords::of_this_machine(&folders);
        let entries = report_entries(&verification.about, &records, &verification.work, &words)?;
        write_archive(&output, &entries)?;
        let failed = records.iter().filter(|(r, _)| r.ended.end.is_failure()).count();
        let rows = records.iter().map(|(StageRecord { stage, seconds, ended }, reused)| {
            let took = if ended.end == End::Skipped { String::new() } else { duration(*seconds) };
            let by_another = if *reused { "(by an earlier run)" } else { "" };
            let note = format!("{} {by_another}", ended.reason).trim().to_string();
            vec![stage.clone(), ended.end.word().into(), took, note]
        });
        let mut lines = Table::ending_in_text(&["stage", "end", "took", ""]).with_rows(rows).lines();
        lines.push(format!(
            "{}: the report, without folders, users and hosts; on any machine: anemoe import-report {} --evidence evidence",
            self.out.display(),
            quoted(&self.out)
        ));
        let stages = records.iter().map(|(r, reused)| {
            json!({"stage": r.stage, "seconds": r.seconds, "end": r.ended.end, "reason": r.ended.reason, "reused": reused})
        });
        let document = json!({
            "out": self.out.display().to_string(), "work": work.display().to_string(), "system": verification.about.system,
            "failed": failed, "stages": stages.collect::<Vec<_>>(), "entries": entries.into_keys().collect::<Vec<_>>(),
        });
        Ok(Page { passed: failed == 0, ..Page::new(document, lines) })
    }
}

/// Lists the stages that would run.
fn list_stages(wanted: &[String]) -> Page {
    let is_wanted = |stage: &&MacStage| wanted.is_empty() || wanted.iter().any(|name| name == stage.name);
    let stages: Vec<&MacStage> = STAGES.iter().filter(is_wanted).collect();
    let cannot = anemoe_coreml::available().err().map(|e| e.to_string());
    let rows = stages.iter().map(|s| [s.name, s.what].map(String::from).to_vec());
    let mut lines = Table::ending_in_text(&["stage", ""]).with_rows(rows).lines();
    lines.extend(cannot.iter().map(|why| format!("it cannot run here: {why}")));
    let listed: Vec<Value> = stages.iter().map(|s| json!({"stage": s.name, "what": s.what})).collect();
    Page::new(json!({"dry_run": true, "stages": listed, "cannot_run_here": cannot}), lines)
}
