//! `anemoe check`

use crate::args::evidence::EvidenceArgs;
use crate::args::numbers::choice;
use crate::args::runner::CompiledArgs;
use crate::args::step_limit::StepLimit;
use crate::bar_listener::BarListener;
use crate::bundle::Verify;
use crate::command::{Command, Page, extended, to_value};
use crate::files::Overwrite;
use crate::recorder::{JournalArgs, Recorder};
use crate::show::placement::{Sources, show, show_ops};
use crate::target::expect_bundle;
use crate::ui::{Table, Ui};
use anemoe_bundle::{CHAIN_FILE, Chain};
use anemoe_gates::facts;
use anemoe_gates::integrity;
use anemoe_gates::residency::compare::compare;
use anemoe_gates::residency::device::PlanReport;
use anemoe_gates::residency::outcomes::{self, Judged, Score};
use anemoe_gates::residency::rule::{Chip, Conditions, DeviceTarget, Units};
use anemoe_gates::residency::{self, CheckOptions, Report, rules as rule_list};
use anemoe_mac::BundleSteps;
use serde_json::json;
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
    type Report = Page;

    fn run(self, ui: &Ui) -> anyhow::Result<Page> {
        if self.rules {
            return rules();
        }
        if let Some(file) = &self.outcomes {
            return score(file);
        }
        self.place(ui)
    }
}

impl Args {
    /// Predicts the placement of packages.
    fn place(&self, ui: &Ui) -> anyhow::Result<Page> {
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
        let mut lines = Vec::new();
        if self.ops {
            show_ops(&report, &mut lines);
        }
        show(&report, &mut lines);
        let mut document = to_value(&report)?;
        if let Some(asked) = &asked {
            lines.extend(asked.controls.iter().map(|control| control.text()));
            document = extended(document, asked)?;
        }
        Ok(Page { passed: report.pass, ..Page::new(document, lines) })
    }
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

fn rules() -> anyhow::Result<Page> {
    let (mut rows, mut lines, mut sources) = (Vec::new(), Vec::new(), Sources::default());
    for r in rule_list::all() {
        let matches = r.scope();
        let severity = format!("{:?}", r.severity).to_lowercase();
        let question = format!("{:?}", r.question).to_lowercase();
        lines.push(format!("{} [{question}, {severity}, {}]: {}", r.id, r.verdict.name(), r.text));
        lines.push(format!("    matches: {matches}"));
        if !r.advice.is_empty() {
            lines.push(format!("    change: {}", r.advice));
        }
        if !r.evidence.is_empty() {
            lines.push(format!("    measured: {}", sources.notes(&r.evidence)));
        }
        rows.push(extended(to_value(r)?, &json!({"matches": matches}))?);
    }
    sources.show(&mut lines);
    Ok(Page::new(json!({"rules": rows}), lines))
}

fn score(file: &Path) -> anyhow::Result<Page> {
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
    let row = |j: &Judged| {
        let mark = j.right.map_or("", |right| if right { "right" } else { "WRONG" });
        let ends = [j.verdict.name().into(), mark.into(), j.rules.join(" "), j.rows.join(" ")];
        [&[j.id.clone(), j.label.clone()], &ends[..]].concat()
    };
    let headings = ["row", "label", "predicted", "", "rules", "measured graphs"];
    let mut lines = Table::new(&headings).with_rows(judged.iter().map(row)).lines();
    let headings = ["rows of", "rows", "decided", "right", "accuracy", "unknown", "forced", "majority"];
    let rows = [figures("all", &score), figures("all, each project left out", &left_out)];
    lines.push(String::new());
    lines.extend(Table::new(&headings).with_rows(rows).lines());
    lines.push(
        "left out: rules that rest on the project alone, and its outcomes; forced: right when `unknown` counts as `not_ane`; \
         majority: right when the more frequent answer is always given".into(),
    );
    let document = json!({"score": score, "left_out": left_out, "rows": judged});
    Ok(Page::new(document, lines))
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
