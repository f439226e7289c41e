//! `anemoe verify-on-mac`

mod energy;
mod stage_runner;
mod verify_args;
mod work_folder;

pub use verify_args::Args;

use super::quickstart::find_model;
use crate::files::Overwrite;
use crate::mac_report::archive::{read_archive, write_archive};
use crate::mac_report::private::PrivateWords;
use crate::mac_report::stage::{StageEnd, StageName, StageRecord};
use crate::mac_report::{BENCH, DescribedPackage, FORMS, PACKAGES, PLAN, ReportSystem, SYSTEM};
use crate::machine;
use crate::outcome::Outcome;
use crate::shell::quoted;
use crate::ui::{Table, Ui, duration, message};
use anemoe_bundle::Chain;
use anemoe_coreml::SystemFacts;
use anemoe_gates::residency::facts;
use anemoe_gates::residency::outcomes::cells::program_cells;
use anemoe_mlpackage::package::Package;
use anyhow::Context;
use serde_json::Value;
use stage_runner::StageRunner;
use std::collections::BTreeMap;
use std::path::Path;
use work_folder::WorkFolder;

/// Largest document of a stage, and largest saved file, that goes into the report, in bytes.
const MAX_DOCUMENT_BYTES: u64 = 128 << 20;

/// Rough times of the stages. They are guesses, since nobody has run this on a Mac: from the numbers of calls, and from the
/// times of other compilers.
const ROUGH: [(StageName, &str, &str); 10] = [
    (StageName::Doctor, "seconds", "system, chip, memory, disks"),
    (StageName::Tune, "10 to 40 min", "each sort of shard in each form: compiled, placed, timed, compared"),
    (StageName::Build, "seconds", "the bundle in the forms that were chosen"),
    (StageName::Compile, "1 to 10 min", "every package compiled, every function loaded"),
    (StageName::Check, "1 min", "where each operation is planned, with negative controls"),
    (StageName::Soak, "6 min and more", "thousands of passes with states, memory and numbers watched"),
    (StageName::Validate, "1 min", "golden gate on the device"),
    (StageName::Bench, "2 min", "speed at each token count"),
    (StageName::Predict, "seconds", "speed as predicted, to calibrate by"),
    (StageName::Energy, "1 min", "power through powermetrics, where it may be run"),
];

pub fn run(args: Args, ui: &Ui) -> anyhow::Result<Outcome> {
    if args.dry_run {
        return dry_run(&args, ui);
    }
    anemoe_coreml::available().context("verify-on-mac runs packages on the Neural Engine")?;
    let system = anemoe_coreml::system_facts().context(
        "the system does not say its version, its build and its chip: a report without them is none",
    )?;
    let checkpoint = match &args.checkpoint {
        Some(path) => path.clone(),
        None => find_model().context("give --checkpoint")?,
    };
    // Without `--force`, only a report of an earlier run may be replaced.
    let replaces = args.out.is_file() && read_archive(&args.out).is_ok();
    let output = Overwrite { force: args.overwrite.force || replaces }.output(&args.out)?;
    let work = args.work.clone().unwrap_or_else(|| args.out.with_extension("work"));
    let folder =
        WorkFolder::open(&std::path::absolute(&work)?, &settings(&args, &checkpoint, &system), args.again)?;
    let about = machine::this();
    let report_system = ReportSystem {
        system: system.clone(),
        memory_bytes: about.memory_bytes,
        cores: about.cores,
        version: env!("CARGO_PKG_VERSION").into(),
        model: model_name(&checkpoint),
        quant: args.quant.to_string(),
        tokens: args.tokens.clone(),
    };
    let runner = StageRunner { args: &args, checkpoint: &checkpoint, folder: &folder, system: &system };
    let mut records = Vec::new();
    for stage in StageName::ALL {
        records.push(runner.stage(stage)?);
    }
    let words = PrivateWords::of_this_machine(&[(folder.path(), "WORK")]);
    let words = words.with_folder(&checkpoint, "CHECKPOINT");
    let entries = entries(&report_system, &records, &folder, &words)?;
    write_archive(&output, &entries)?;
    let failed = records.iter().filter(|(r, _)| r.end.is_failure()).count();
    let shown: Vec<Value> = records
        .iter()
        .map(|(r, reused)| {
            serde_json::json!({
                "stage": r.stage, "end": r.end, "seconds": r.seconds, "reason": r.reason, "reused": reused,
            })
        })
        .collect();
    ui.document(&serde_json::json!({
        "out": args.out.display().to_string(), "work": work.display().to_string(), "system": system, "failed": failed, "stages": shown,
        "entries": entries.keys().collect::<Vec<_>>(),
    }))?;
    print(&records, ui)?;
    ui.line(format!(
        "{}: the report, without folders, users and hosts; on any machine: anemoe import-report {} --evidence evidence",
        args.out.display(),
        quoted(&args.out)
    ))?;
    Ok(if failed == 0 { Outcome::Done } else { Outcome::GateFailed })
}

/// Returns the facts on which all documents of a work folder depend.
fn settings(args: &Args, checkpoint: &Path, system: &SystemFacts) -> Value {
    let checkpoint = std::path::absolute(checkpoint).unwrap_or_else(|_| checkpoint.to_path_buf());
    serde_json::json!({
        "version": env!("CARGO_PKG_VERSION"), "checkpoint": checkpoint.display().to_string(),
        "quant": args.quant.to_string(), "tokens": args.tokens, "system": system,
    })
}

/// Returns the last part of a checkpoint's path.
fn model_name(checkpoint: &Path) -> String {
    checkpoint.file_name().map_or_else(|| "checkpoint".into(), |n| n.to_string_lossy().into_owned())
}

fn dry_run(args: &Args, ui: &Ui) -> anyhow::Result<Outcome> {
    let wanted = |stage: &StageName| args.stages.is_empty() || args.stages.contains(stage);
    let shown: Vec<Value> = ROUGH
        .iter()
        .filter(|(stage, ..)| wanted(stage))
        .map(|(stage, time, what)| serde_json::json!({"stage": stage, "rough_time": time, "what": what}))
        .collect();
    let here = anemoe_coreml::available().err().map(|e| e.to_string());
    ui.document(&serde_json::json!({"dry_run": true, "stages": shown, "cannot_run_here": here}))?;
    let mut table = Table::ending_in_text(&["stage", "about", ""]);
    for (stage, time, what) in ROUGH.iter().filter(|(stage, ..)| wanted(stage)) {
        table.row(vec![stage.name().into(), (*time).into(), (*what).into()]);
    }
    table.print(ui)?;
    ui.line("times are guesses for the small model: nobody has run this on a Mac yet")?;
    if let Some(why) = here {
        ui.line(format!("it cannot run here: {why}"))?;
    }
    Ok(Outcome::Done)
}

/// Makes the entries of a report, without private words.
fn entries(
    system: &ReportSystem,
    records: &[(StageRecord, bool)],
    folder: &WorkFolder,
    words: &PrivateWords,
) -> anyhow::Result<BTreeMap<String, Vec<u8>>> {
    let mut entries = BTreeMap::new();
    let mut put = |name: String, value: Value| -> anyhow::Result<()> {
        entries.insert(name, serde_json::to_vec_pretty(&words.document(&value))?);
        Ok(())
    };
    put(SYSTEM.into(), serde_json::to_value(system)?)?;
    for (record, _) in records {
        let mut shown = serde_json::to_value(record)?;
        if record.stage == StageName::Doctor {
            leave_out_foreign(&mut shown["document"]);
        }
        put(record.stage.entry(), shown)?;
    }
    if folder.bundle().join(anemoe_bundle::CHAIN_FILE).is_file() {
        put(PACKAGES.into(), serde_json::to_value(described(&folder.bundle())?)?)?;
    }
    for (name, file) in [(PLAN, folder.plan()), (BENCH, folder.bench())] {
        let Ok(bytes) = anemoe_io::read_input(&file, MAX_DOCUMENT_BYTES) else { continue };
        match anemoe_io::json::parse::<Value>(&bytes) {
            Ok(value) => put(name.into(), value)?,
            Err(e) => message(format!("warning: {}: {e}; it is left out of the report", file.display())),
        }
    }
    if let Ok(text) = anemoe_io::read_text(&folder.forms(), MAX_DOCUMENT_BYTES) {
        entries.insert(FORMS.into(), words.text(&text).into_bytes());
    }
    Ok(entries)
}

/// Removes caches and disks from a document of `doctor`: they tell what else a user has.
fn leave_out_foreign(doctor: &mut Value) {
    if let Some(map) = doctor.as_object_mut() {
        map.remove("caches");
        map.remove("disks");
    }
}

/// Describes the packages of a bundle, with the cells that follow from their programs.
fn described(bundle: &Path) -> anyhow::Result<Vec<DescribedPackage>> {
    let chain = Chain::read(bundle)?;
    let one = |shard: &anemoe_bundle::Shard| {
        let package = Package::open(&bundle.join(&shard.file))?;
        Ok(DescribedPackage {
            name: shard.name.clone(),
            kind: shard.kind.name().into(),
            bytes: shard.bytes,
            cells: program_cells(&facts(package.model())),
        })
    };
    chain.shards.iter().map(one).collect()
}

fn print(records: &[(StageRecord, bool)], ui: &Ui) -> anyhow::Result<()> {
    let mut table = Table::ending_in_text(&["stage", "end", "took", ""]);
    for (r, reused) in records {
        let took = if r.end == StageEnd::Skipped { String::new() } else { duration(r.seconds) };
        let note = match (reused, r.reason.is_empty()) {
            (true, true) => "by an earlier run".into(),
            (true, false) => format!("{} (by an earlier run)", r.reason),
            _ => r.reason.clone(),
        };
        table.row(vec![r.stage.name().into(), r.end.word().into(), took, note]);
    }
    Ok(table.print(ui)?)
}
