//! `anemoe check`

use crate::args::evidence::EvidenceArgs;
use crate::args::numbers::choice;
use crate::args::runner::CompiledArgs;
use crate::args::step_limit::StepLimit;
use crate::bar_listener::BarListener;
use crate::bundle::Verify;
use crate::command::{Command, CommandReport};
use crate::files::Overwrite;
use crate::recorder::{JournalArgs, Recorder};
use crate::show::placement::{Sources, print, print_ops};
use crate::target::expect_bundle;
use crate::ui::{Table, Ui};
use anemoe_bundle::{CHAIN_FILE, Chain};
use anemoe_gates::facts;
use anemoe_gates::integrity;
use anemoe_gates::residency::compare::compare;
use anemoe_gates::residency::device::PlanReport;
use anemoe_gates::residency::outcomes::{self, Judged, Score};
use anemoe_gates::residency::rule::{Chip, Conditions, DeviceTarget, Rule, Units};
use anemoe_gates::residency::{self, CheckOptions, Report, rules as rule_list};
use anemoe_mac::{BundleSteps, DeviceFindings};
use serde::Serialize;
use std::io;
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
    #[arg(long, value_parser = choice([("mac", DeviceTarget::Mac), ("iphone", DeviceTarget::Iphone)]), default_value = "mac")]
    target: DeviceTarget,
    /// Devices that Core ML may choose from.
    #[arg(long, value_parser = choice([("cpu-and-ne", Units::CpuAndNe), ("all", Units::All)]), default_value = "cpu-and-ne")]
    units: Units,
    /// Chip, for the few rules that depend on it: m1 to m5, a11 to a19.
    #[arg(long, value_name = "CHIP", value_parser = chip)]
    chip: Option<Chip>,
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
    /// Score the verdicts on a table of outcomes instead; `known` is the one that anemoe brings.
    #[arg(long, value_name = "F.tsv", conflicts_with = "path")]
    outcomes: Option<PathBuf>,
    #[command(flatten)]
    verify: Verify,
    #[command(flatten)]
    journal: JournalArgs,
}

fn chip(text: &str) -> Result<Chip, String> {
    Chip::parse(text).ok_or_else(|| format!("`{text}` is not a known chip: {}", Chip::names()))
}

impl Command for Args {
    type Report = CheckReport;

    fn run(self, ui: &Ui) -> anyhow::Result<CheckReport> {
        if self.rules {
            return Ok(CheckReport::Rules {
                rules: rule_list::all().map(|rule| RuleRow { matches: rule.scope(), rule }).collect(),
            });
        }
        if let Some(file) = &self.outcomes {
            return score(file);
        }
        Ok(CheckReport::Placement(Box::new(self.place(ui)?)))
    }
}

impl Args {
    /// Predicts the placement of packages.
    fn place(&self, ui: &Ui) -> anyhow::Result<Placement> {
        let recorder = Recorder::new(&self.journal, "check");
        if self.device {
            anemoe_coreml::available()?;
            self.save.as_deref().map(|file| self.overwrite.output(file)).transpose()?;
        }
        let conditions = Conditions { target: self.target, units: self.units, chip: self.chip };
        let plan = self.report.as_deref().map(read_plan).transpose()?;
        let list_ops = self.ops || plan.is_some() || self.device;
        let evidence = self.evidence.outcomes()?;
        let options = CheckOptions { conditions, strict: self.strict, list_ops, evidence };
        let path = self.path.clone().unwrap_or_default();
        let mut report = check(&path, &options, self.verify, ui)?;
        let mut asked = None;
        if self.device {
            expect_bundle(&path)?;
            let chain = Chain::read(&path)?;
            let models = self.compiled.models(&path, &chain);
            let limit = self.limit.limit();
            let steps = BundleSteps { bundle: &path, chain: &chain, models: &models, limit };
            let found = steps.ask_device(&BarListener::new(ui))?;
            if let Some(file) = &self.save {
                anemoe_bundle::write_atomic(file, &serde_json::to_vec_pretty(&found.report)?)?;
            }
            asked = Some(found);
        }
        if let Some(plan) = plan.as_ref().or(asked.as_ref().map(|a| &a.report)) {
            compare(&mut report, plan);
            if !self.ops {
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
        Ok(Placement { report, asked, lists_ops: self.ops })
    }
}

/// Placement of packages, the rules, or how well they do on known outcomes.
#[derive(Serialize)]
#[serde(untagged)]
pub enum CheckReport {
    Placement(Box<Placement>),
    Rules { rules: Vec<RuleRow> },
    Scores { score: Score, left_out: Score, rows: Vec<Judged> },
}

/// Placement of packages; a Mac may have been asked for it.
#[derive(Serialize)]
pub struct Placement {
    #[serde(flatten)]
    pub report: Report,
    #[serde(flatten)]
    asked: Option<DeviceFindings>,
    #[serde(skip)]
    lists_ops: bool,
}

/// A rule, as it is shown.
#[derive(Serialize)]
pub struct RuleRow {
    #[serde(flatten)]
    rule: &'static Rule,
    matches: String,
}

impl CheckReport {
    /// Takes the placement, if packages were checked.
    pub fn into_placement(self) -> Option<Report> {
        if let CheckReport::Placement(placement) = self { Some(placement.report) } else { None }
    }
}

impl CommandReport for CheckReport {
    fn print(&self, ui: &Ui) -> io::Result<()> {
        match self {
            CheckReport::Placement(placement) => placement.print(ui),
            CheckReport::Rules { rules } => print_rules(rules, ui),
            CheckReport::Scores { score, left_out, rows } => print_scores(score, left_out, rows, ui),
        }
    }

    fn passed(&self) -> bool {
        !matches!(self, CheckReport::Placement(placement) if !placement.report.pass)
    }
}

impl Placement {
    fn print(&self, ui: &Ui) -> io::Result<()> {
        if self.lists_ops {
            print_ops(&self.report, ui)?;
        }
        print(&self.report, ui)?;
        self.asked.iter().try_for_each(|asked| print_plans(asked, ui))
    }
}

fn print_plans(asked: &DeviceFindings, ui: &Ui) -> io::Result<()> {
    asked.controls.iter().try_for_each(|control| ui.line(control.text()))
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
    Ok(residency::bundle(path, &chain, options, || bar.inc(1))?)
}

fn read_plan(path: &Path) -> anyhow::Result<PlanReport> {
    let text =
        anemoe_io::read_input(path, MAX_REPORT_BYTES).map_err(|e| anemoe_mlpackage::Error::io(path, e))?;
    PlanReport::parse(&text).map_err(|what| anemoe_mlpackage::Error::invalid(path, what).into())
}

fn print_rules(rules: &[RuleRow], ui: &Ui) -> io::Result<()> {
    let mut sources = Sources::default();
    for RuleRow { rule: r, matches } in rules {
        let severity = format!("{:?}", r.severity).to_lowercase();
        let question = format!("{:?}", r.question).to_lowercase();
        ui.line(format!("{} [{question}, {severity}, {}]: {}", r.id, r.verdict.name(), r.text))?;
        ui.line(format!("    matches: {matches}"))?;
        if !r.advice.is_empty() {
            ui.line(format!("    change: {}", r.advice))?;
        }
        if !r.evidence.is_empty() {
            ui.line(format!("    measured: {}", sources.notes(&r.evidence)))?;
        }
    }
    sources.print(ui)
}

fn score(file: &Path) -> anyhow::Result<CheckReport> {
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
    let alone = outcomes::leave_out_projects(&rows);
    let score = outcomes::score(rows.iter().zip(&judged));
    let left_out = outcomes::score(rows.iter().zip(&alone));
    Ok(CheckReport::Scores { score, left_out, rows: judged })
}

fn print_scores(score: &Score, left_out: &Score, rows: &[Judged], ui: &Ui) -> io::Result<()> {
    let row = |j: &Judged| {
        let mark = j.right.map_or("", |right| if right { "right" } else { "WRONG" });
        let ends = [j.verdict.name().into(), mark.into(), j.rules.join(" "), j.rows.join(" ")];
        [&[j.id.clone(), j.label.clone()], &ends[..]].concat()
    };
    let headings = ["row", "label", "predicted", "", "rules", "measured graphs"];
    Table::new(&headings).with_rows(rows.iter().map(row)).print(ui)?;
    let headings = ["rows of", "rows", "decided", "right", "accuracy", "unknown", "forced", "majority"];
    let rows = [figures("all", score), figures("all, each project left out", left_out)];
    ui.line("")?;
    Table::new(&headings).with_rows(rows).print(ui)?;
    ui.line(
        "left out: rules that rest on the project alone, and its outcomes; forced: right when `unknown` counts as `not_ane`; \
         majority: right when the more frequent answer is always given",
    )
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
        percent(s.forced),
        percent(s.majority),
    ]
}
