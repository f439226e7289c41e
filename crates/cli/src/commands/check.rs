//! `anemoe check`

use crate::args::evidence::EvidenceArgs;
use crate::args::runner::CompiledArgs;
use crate::args::step_limit::StepLimit;
use crate::bar_listener::BarListener;
use crate::bundle::Verify;
use crate::files::Overwrite;
use crate::outcome::Outcome;
use crate::recorder::{JournalArgs, Recorder, facts};
use crate::show::placement::{Sources, print, print_ops};
use crate::target::expect_bundle;
use crate::ui::{Table, Ui, bytes};
use anemoe_bundle::{CHAIN_FILE, Chain};
use anemoe_gates::integrity;
use anemoe_gates::residency::compare::compare;
use anemoe_gates::residency::device::PlanReport;
use anemoe_gates::residency::outcomes::{self, Design, Score};
use anemoe_gates::residency::rule::{Chip, Conditions, DeviceTarget, SystemRelease, Units, Verdict};
use anemoe_gates::residency::{self, CheckOptions, Report, rules as rule_list};
use anemoe_mac::{DeviceFindings, ask_device};
use serde::Serialize;
use std::path::{Path, PathBuf};

/// Largest plan report or table of outcomes that is read, in bytes.
const MAX_REPORT_BYTES: u64 = 1 << 30;

/// Predict which packages the Neural Engine will run.
///
/// This is the residency gate: a package is resident when the Neural Engine runs all of its operations. Predictions follow rules
/// from published measurements. Exit status 1 when a package that is not small is predicted elsewhere.
#[derive(clap::Args)]
#[command(
    after_help = "Example:\n  anemoe check small.anemoe\n  anemoe check shard.mlpackage --ops\n  anemoe check --rules"
)]
pub struct Args {
    /// A bundle, or a .mlpackage of whatever tool.
    #[arg(required_unless_present_any = ["rules", "outcomes"])]
    path: Option<PathBuf>,
    /// Kind of machine that the packages are for.
    #[arg(long, value_enum, default_value = "mac")]
    target: CheckTarget,
    /// Devices that Core ML may choose from.
    #[arg(long, value_enum, default_value = "cpu-and-ne")]
    units: UnitsArg,
    /// Chip, for the few rules that depend on it: m1 to m5, a11 to a19.
    #[arg(long, value_name = "CHIP", value_parser = chip)]
    chip: Option<Chip>,
    /// Release of the system that runs the packages, such as 15 or 26; by default any.
    #[arg(long, value_name = "RELEASE", value_parser = system)]
    system: Option<SystemRelease>,
    /// Fail on `unknown` too.
    #[arg(long)]
    strict: bool,
    /// List every op with its prediction.
    #[arg(long)]
    ops: bool,
    #[command(flatten)]
    evidence: EvidenceArgs,
    /// Compare with the plan report of a Mac, and let it decide.
    #[arg(long, value_name = "F.json", conflicts_with = "device")]
    report: Option<PathBuf>,
    /// Ask this Mac: MLComputePlan for every function of a compiled bundle, each package in a process of its own. The plans decide.
    #[arg(long)]
    device: bool,
    /// Write the plan report of --device, as --report reads it.
    #[arg(long, value_name = "F.json", requires = "device")]
    save: Option<PathBuf>,
    #[command(flatten)]
    overwrite: Overwrite,
    #[command(flatten)]
    limit: StepLimit,
    #[command(flatten)]
    compiled: CompiledArgs,
    /// Print the rules instead.
    #[arg(long, conflicts_with_all = ["path", "outcomes"])]
    rules: bool,
    /// Score the rules on a table of published outcomes instead; `known` is the one that anemoe brings.
    #[arg(long, value_name = "F.tsv", conflicts_with = "path")]
    outcomes: Option<PathBuf>,
    #[command(flatten)]
    verify: Verify,
    #[command(flatten)]
    journal: JournalArgs,
}

#[derive(Clone, Copy, clap::ValueEnum)]
enum CheckTarget {
    Mac,
    Iphone,
}

#[derive(Clone, Copy, clap::ValueEnum)]
enum UnitsArg {
    CpuAndNe,
    All,
}

fn chip(text: &str) -> Result<Chip, String> {
    Chip::parse(text).ok_or_else(|| format!("`{text}` is not a known chip: {}", Chip::names()))
}

fn system(text: &str) -> Result<SystemRelease, String> {
    SystemRelease::parse(text)
        .ok_or_else(|| format!("`{text}` is not a release of macOS or iOS, such as 15 or 26"))
}

pub fn run(args: Args, ui: &Ui) -> anyhow::Result<Outcome> {
    if args.rules {
        return rules(ui);
    }
    if let Some(file) = &args.outcomes {
        return score(file, ui);
    }
    if args.device {
        anemoe_coreml::available()?;
        args.save.as_deref().map(|file| args.overwrite.output(file)).transpose()?;
    }
    let conditions = Conditions {
        target: match args.target {
            CheckTarget::Mac => DeviceTarget::Mac,
            CheckTarget::Iphone => DeviceTarget::Iphone,
        },
        units: match args.units {
            UnitsArg::CpuAndNe => Units::CpuAndNe,
            UnitsArg::All => Units::All,
        },
        chip: args.chip,
        system: args.system,
    };
    let plan = args.report.as_deref().map(read_plan).transpose()?;
    let list_ops = args.ops || plan.is_some() || args.device;
    let evidence = args.evidence.outcomes()?;
    let options = CheckOptions { conditions, strict: args.strict, list_ops, evidence };
    let path = args.path.unwrap_or_default();
    let recorder = Recorder::new(&args.journal, "check");
    let mut report = check(&path, &options, args.verify, ui)?;
    let mut asked = None;
    if args.device {
        expect_bundle(&path)?;
        let chain = Chain::read(&path)?;
        let models = args.compiled.models(&path, &chain);
        let found = ask_device(&path, &chain, &models, args.limit.steps(), &BarListener::new(ui))?;
        if let Some(file) = &args.save {
            anemoe_bundle::write_atomic(file, &serde_json::to_vec_pretty(&found.report)?)?;
        }
        asked = Some(found);
    }
    if let Some(plan) = plan.as_ref().or(asked.as_ref().map(|a| &a.report)) {
        compare(&mut report, plan);
        if !args.ops {
            report.packages.iter_mut().flat_map(|p| &mut p.functions).for_each(|f| f.op_list.clear());
        }
    }
    if let Some(asked) = &mut asked {
        asked.conclude(&report);
    }
    report.pass &= asked.as_ref().is_none_or(|asked| asked.no_is_proven);
    if path.join(CHAIN_FILE).is_file() {
        recorder.gate(&path, report.pass, facts::residency(&report));
    }
    ui.document(&WithPlans { report: &report, asked: asked.as_ref() })?;
    if args.ops {
        print_ops(&report, ui)?;
    }
    print(&report, ui)?;
    asked.iter().try_for_each(|asked| print_plans(asked, ui))?;
    Ok(Outcome::of(report.pass))
}

/// Report of a check, which may have asked this Mac.
#[derive(Serialize)]
struct WithPlans<'a> {
    #[serde(flatten)]
    report: &'a Report,
    #[serde(flatten)]
    asked: Option<&'a DeviceFindings>,
}

fn print_plans(asked: &DeviceFindings, ui: &Ui) -> anyhow::Result<()> {
    for control in &asked.controls {
        ui.line(control.text())?;
    }
    for verdict in [Verdict::Ane, Verdict::NotAne, Verdict::Unknown] {
        if let Some((n, smallest, largest)) = asked.sizes_of(verdict) {
            let (smallest, largest) = (bytes(smallest), bytes(largest));
            ui.line(format!("compiled sizes, {}: {n}, {smallest} to {largest}", verdict.name()))?;
        }
    }
    Ok(())
}

fn check(path: &Path, options: &CheckOptions, verify: Verify, ui: &Ui) -> anyhow::Result<Report> {
    if anemoe_mlpackage::package::is_model_name(path) {
        return Ok(residency::package(path, options)?);
    }
    expect_bundle(path)?;
    let chain = verify.open(path, ui)?;
    integrity::run_once(path)?;
    integrity::check_side_files(path, &chain)?;
    let bar = ui.bar(chain.shards.len() as u64, "check");
    let report = residency::bundle(path, &chain, options, || bar.inc(1))?;
    bar.finish_and_clear();
    Ok(report)
}

fn read_plan(path: &Path) -> anyhow::Result<PlanReport> {
    let text =
        anemoe_io::read_input(path, MAX_REPORT_BYTES).map_err(|e| anemoe_mlpackage::Error::io(path, e))?;
    PlanReport::parse(&text).map_err(|what| anemoe_mlpackage::Error::invalid(path, what).into())
}

fn rules(ui: &Ui) -> anyhow::Result<Outcome> {
    let all: Vec<serde_json::Value> = rule_list::all()
        .map(|r| {
            serde_json::json!({
                "rule": r.id, "question": r.question, "severity": r.severity, "verdict": r.verdict, "matches": r.scope(),
                "text": r.text, "advice": r.advice, "evidence": r.evidence,
            })
        })
        .collect();
    ui.document(&serde_json::json!({"rules": all}))?;
    let mut sources = Sources::default();
    for r in rule_list::all() {
        let severity = format!("{:?}", r.severity).to_lowercase();
        let question = format!("{:?}", r.question).to_lowercase();
        ui.line(format!("{} [{question}, {severity}, {}]: {}", r.id, r.verdict.name(), r.text))?;
        ui.line(format!("    matches: {}", r.scope()))?;
        if !r.advice.is_empty() {
            ui.line(format!("    change: {}", r.advice))?;
        }
        if !r.evidence.is_empty() {
            ui.line(format!("    measured: {}", sources.notes(r.evidence)))?;
        }
    }
    sources.print(ui)?;
    Ok(Outcome::Done)
}

fn score(file: &Path, ui: &Ui) -> anyhow::Result<Outcome> {
    let text = match file.to_str() {
        Some("known") => outcomes::KNOWN.to_string(),
        _ => {
            anemoe_io::read_text(file, MAX_REPORT_BYTES).map_err(|e| anemoe_mlpackage::Error::io(file, e))?
        }
    };
    let wrong = |what: String| anemoe_mlpackage::Error::invalid(file, format!("table of outcomes: {what}"));
    let rows = outcomes::parse(&text).map_err(wrong)?;
    if rows.is_empty() {
        return Err(wrong("it has headings and no row".into()).into());
    }
    let judged = outcomes::judge(&rows);
    let score = outcomes::score(&rows, &judged);
    let left_out = outcomes::leave_out_projects(&rows, Design::Regression);
    let other = outcomes::leave_out_projects(&rows, Design::EvidenceSum);
    ui.document(&serde_json::json!({
        "score": score, "without_family": left_out.projects, "left_out": left_out.all,
        "designs": {"regression": left_out.all, "evidence_sum": other.all}, "rows": judged,
    }))?;
    let mut table = Table::new(&["row", "label", "predicted", "probability", "", "rules"]);
    for j in &judged {
        let mark = match j.right {
            Some(true) => "right",
            Some(false) => "WRONG",
            None => "",
        };
        table.row(vec![
            j.id.clone(),
            j.label.clone(),
            j.verdict.name().into(),
            format!("{:.2}", j.probability),
            mark.into(),
            j.rules.join(" "),
        ]);
    }
    table.print(ui)?;
    let mut table = Table::new(&[
        "rows of", "rows", "decided", "right", "accuracy", "unknown", "Brier", "forced", "majority",
    ]);
    table.row(figures("all, with all that is known", &score));
    for (project, s) in &left_out.projects {
        table.row(figures(&format!("{project}, left out"), s));
    }
    table.row(figures("all, each project left out", &left_out.all));
    table.row(figures("the same by a sum of evidence", &other.all));
    ui.line("")?;
    table.print(ui)?;
    ui.line(
        "left out: rules that rest on the project alone, and its outcomes; forced: right when each row has to be decided; \
         majority: right when the more frequent answer is always given",
    )?;
    ui.line(format!("{} of {} rows state enough to be rebuilt as programs", score.rebuilt, score.rows))?;
    Ok(Outcome::Done)
}

fn figures(name: &str, s: &Score) -> Vec<String> {
    let percent = |x: f64| format!("{:.1} %", 100.0 * x);
    vec![
        name.into(),
        s.rows.to_string(),
        s.decided.to_string(),
        s.right.to_string(),
        s.accuracy.map_or_else(|| "none decided".into(), percent),
        percent(s.unknown_share),
        format!("{:.3}", s.brier),
        percent(s.forced),
        percent(s.majority),
    ]
}
