//! `anemoe check`

use crate::Outcome;
use crate::bundle::Verify;
use crate::journal::{JournalArgs, Recorder, facts};
use crate::target::expect_bundle;
use crate::ui::{self, Table, Ui};
use anemoe_bundle::CHAIN_FILE;
use anemoe_gates::integrity;
use anemoe_gates::residency::compare::compare;
use anemoe_gates::residency::device::PlanReport;
use anemoe_gates::residency::outcomes::{self, Score};
use anemoe_gates::residency::rule::{Chip, Conditions, Evidence, Target, Units, Verdict};
use anemoe_gates::residency::verdict::{OpCounts, PackageReport, Reason};
use anemoe_gates::residency::{self, Comparison, Options, Report, table};
use std::collections::BTreeMap;
use std::path::{Path, PathBuf};

/// Largest plan report or table of outcomes that is read.
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
    target: TargetArg,
    /// Devices that Core ML may choose from.
    #[arg(long, value_enum, default_value = "cpu-and-ne")]
    units: UnitsArg,
    /// Chip, for the few rules that depend on it: m1 to m5, a11 to a19.
    #[arg(long, value_name = "CHIP", value_parser = chip)]
    chip: Option<Chip>,
    /// Fail on `unknown` too.
    #[arg(long)]
    strict: bool,
    /// List every op with its prediction.
    #[arg(long)]
    ops: bool,
    /// Compare with the plan report of a Mac, and let it decide.
    #[arg(long, value_name = "F.json", conflicts_with = "device")]
    report: Option<PathBuf>,
    /// Ask MLComputePlan (only on macOS).
    #[arg(long)]
    device: bool,
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
enum TargetArg {
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

pub fn run(args: Args, ui: &Ui) -> anyhow::Result<Outcome> {
    if args.rules {
        return rules(ui);
    }
    if let Some(file) = &args.outcomes {
        return score(file, ui);
    }
    anyhow::ensure!(
        !args.device,
        "--device needs macOS and is not written yet: this program predicts, and reads a Mac's plan report with --report"
    );
    let conditions = Conditions {
        target: match args.target {
            TargetArg::Mac => Target::Mac,
            TargetArg::Iphone => Target::Iphone,
        },
        units: match args.units {
            UnitsArg::CpuAndNe => Units::CpuAndNe,
            UnitsArg::All => Units::All,
        },
        chip: args.chip,
    };
    let plan = args.report.as_deref().map(read_plan).transpose()?;
    let options = Options { conditions, strict: args.strict, list_ops: args.ops || plan.is_some() };
    let path = args.path.unwrap_or_default();
    let recorder = Recorder::new(&args.journal, "check");
    let mut report = check(&path, &options, args.verify, ui)?;
    if let Some(plan) = &plan {
        compare(&mut report, plan);
        if !args.ops {
            report.packages.iter_mut().flat_map(|p| &mut p.functions).for_each(|f| f.op_list.clear());
        }
    }
    if path.join(CHAIN_FILE).is_file() {
        recorder.gate(&path, report.pass, facts::residency(&report));
    }
    ui.document(&report)?;
    if args.ops {
        print_ops(&report, ui)?;
    }
    print(&report, ui)?;
    Ok(if report.pass { Outcome::Done } else { Outcome::GateFailed })
}

fn check(path: &Path, options: &Options, verify: Verify, ui: &Ui) -> anyhow::Result<Report> {
    if path.extension().is_some_and(|e| e == "mlpackage") {
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

/// The result for people: a row per kind of package, then why, and what to change.
pub fn print(report: &Report, ui: &Ui) -> std::io::Result<()> {
    let mut rows: Vec<(&PackageReport, usize, Vec<String>)> = Vec::new();
    let mut known: BTreeMap<Vec<String>, usize> = BTreeMap::new();
    for p in &report.packages {
        let mut cells: Vec<String> = p.kind.iter().cloned().collect();
        cells.extend([p.functions.len().to_string(), p.weight_bytes.map(ui::bytes).unwrap_or_default()]);
        cells.extend(counts(&p.ops));
        cells.push(device_label(p, report.strict).into());
        match known.get(&cells) {
            Some(&i) => rows[i].1 += 1,
            None => {
                known.insert(cells.clone(), rows.len());
                rows.push((p, 1, cells));
            }
        }
    }
    let kinds = report.packages.iter().any(|p| p.kind.is_some());
    let mut headings = vec!["package", "count"];
    headings.extend(kinds.then_some("kind"));
    headings.extend(["functions", "weights", "ANE", "GPU", "CPU", "undecided", "no device", "predicted"]);
    let mut table = Table::new(&headings);
    for (p, n, cells) in rows {
        let mut row = vec![p.name.clone(), n.to_string()];
        row.extend(cells);
        table.row(row);
    }
    table.print(ui)?;
    print_reasons(report, ui)?;
    if let Some(device) = &report.device {
        print_device(device, ui)?;
    }
    let v = &report.verdicts;
    let n = report.packages.len();
    let verdict = match (report.pass, v.unknown) {
        (false, _) => "FAIL",
        (true, 1..) if report.device.is_none() => "pass, but NOT DECIDED for all",
        (true, _) => "pass",
    };
    let small = report.packages.iter().filter(|p| p.too_small && !report.strict).count();
    ui.line(format!(
        "{verdict}: {n} {}, predicted: {}{}",
        if n == 1 { "package" } else { "packages" },
        devices(v.ane, v.unknown, v.not_ane, small),
        if report.strict { " (strict: unknown fails, and so does small)" } else { "" }
    ))?;
    ui.line(
        "predicted from measurements that others published (anemoe check --rules); only a Mac can measure",
    )
}

/// Names the predicted device of a package, for tables.
pub fn device_label(p: &PackageReport, strict: bool) -> &'static str {
    if p.too_small && !strict { "CPU: small, fine" } else { p.verdict.name() }
}

/// Counts packages by their predicted devices, in words.
pub fn devices(ane: u64, unknown: u64, not_ane: u64, small: usize) -> String {
    let small = small as u64;
    let mut said = vec![format!("{ane} on the Neural Engine")];
    if unknown > 0 {
        said.push(format!("{unknown} unknown"));
    }
    if not_ane > small {
        said.push(format!("{} elsewhere", not_ane - small));
    }
    if small > 0 {
        said.push(format!("{small} too small for it to matter (they run on the CPU, which is fine)"));
    }
    said.join(", ")
}

fn counts(ops: &OpCounts) -> [String; 5] {
    [ops.ane, ops.gpu, ops.cpu, ops.unknown, ops.no_device].map(|n| n.to_string())
}

/// One line per rule over all packages: the same shard of thirty layers has the same reason.
fn print_reasons(report: &Report, ui: &Ui) -> std::io::Result<()> {
    let mut reasons: Vec<Folded<'_>> = Vec::new();
    let mut warnings: Vec<Folded<'_>> = Vec::new();
    for p in &report.packages {
        for (list, found) in [(&mut reasons, &p.reasons), (&mut warnings, &p.warnings)] {
            for r in found {
                match list.iter_mut().find(|f| f.first.rule == r.rule) {
                    Some(f) => f.add(p, r),
                    None => list.push(Folded {
                        first: r,
                        package: &p.name,
                        last: &p.name,
                        packages: 1,
                        ops: r.ops,
                    }),
                }
            }
        }
    }
    reasons.sort_by_key(|f| (std::cmp::Reverse(f.first.verdict), f.first.severity));
    warnings.extend(report.warnings.iter().map(|r| Folded {
        first: r,
        package: "",
        last: "",
        packages: 0,
        ops: 0,
    }));
    let mut sources = Sources::default();
    for (heading, list) in [("why", reasons), ("warnings, which decide nothing", warnings)] {
        if list.is_empty() {
            continue;
        }
        ui.line(format!("\n{heading}:"))?;
        for f in list {
            let r = f.first;
            let verdict = if heading == "why" { format!("{}, ", r.verdict.name()) } else { String::new() };
            ui.line(format!("  {} [{verdict}{}]: {}{}", r.rule, severity(r), r.text, f.place()))?;
            if !r.advice.is_empty() {
                ui.line(format!("      change: {}", r.advice))?;
            }
            if !r.evidence.is_empty() {
                ui.line(format!("      measured: {}", sources.notes(r.evidence)))?;
            }
        }
    }
    sources.print(ui)?;
    ui.line("")
}

/// Sources of evidence as numbered notes, each once.
#[derive(Default)]
struct Sources(Vec<String>);

impl Sources {
    /// Gives the marks of these sources: `[1] [2]`.
    fn notes(&mut self, found: &[Evidence]) -> String {
        let mut mark = |e: &Evidence| {
            let text = evidence(e);
            let known = self.0.iter().position(|t| *t == text);
            let i = known.unwrap_or_else(|| {
                self.0.push(text);
                self.0.len() - 1
            });
            format!("[{}]", i + 1)
        };
        found.iter().map(&mut mark).collect::<Vec<_>>().join(" ")
    }

    fn print(&self, ui: &Ui) -> std::io::Result<()> {
        if self.0.is_empty() {
            return Ok(());
        }
        ui.line(
            "\nsources (A: several measurements agree; B: one careful measurement; C: a claim, or contradictions):",
        )?;
        for (i, text) in self.0.iter().enumerate() {
            ui.line(format!("  [{}] {text}", i + 1))?;
        }
        Ok(())
    }
}

/// A rule with all places that it applies to.
struct Folded<'a> {
    first: &'a Reason,
    package: &'a str,
    last: &'a str,
    packages: u64,
    ops: u64,
}

impl<'a> Folded<'a> {
    fn add(&mut self, p: &'a PackageReport, r: &Reason) {
        self.packages += u64::from(self.last != p.name);
        self.last = &p.name;
        self.ops += r.ops;
    }

    fn place(&self) -> String {
        let place = [self.package, &self.first.function, &self.first.op];
        let place = place.into_iter().filter(|s| !s.is_empty()).collect::<Vec<_>>().join(" ");
        match (self.packages, self.ops) {
            (0, _) => String::new(),
            (1, 0..=1) => format!(" at {place}"),
            (n, 0) => format!(" in {n} packages, first {place}"),
            (1, ops) => format!(" at {ops} ops, first {place}"),
            (n, ops) => format!(" at {ops} ops of {n} packages, first {place}"),
        }
    }
}

fn severity(r: &Reason) -> &'static str {
    use anemoe_gates::residency::rule::Severity;
    match r.severity {
        Severity::Hard => "hard",
        Severity::Soft => "soft",
        Severity::Warning => "warning",
    }
}

fn evidence(e: &Evidence) -> String {
    let place: Vec<&str> = [e.chip, e.os].into_iter().filter(|t| !t.is_empty()).collect();
    let place = if place.is_empty() { String::new() } else { format!(" ({})", place.join(", ")) };
    format!("{:?}: {} [{}]{place}", e.strength, e.finding, e.source)
}

fn print_ops(report: &Report, ui: &Ui) -> std::io::Result<()> {
    for p in &report.packages {
        for f in &p.functions {
            ui.line(format!("{} {}: {}", p.name, f.name, f.verdict.name()))?;
            let mut table = Table::new(&["op", "type", "predicted", "rules"]);
            for op in &f.op_list {
                let rules = op.rules.join(" ");
                table.row(vec![op.name.clone(), op.op_type.clone(), op.verdict.name().into(), rules]);
            }
            table.print(ui)?;
            ui.line("")?;
        }
    }
    Ok(())
}

fn print_device(c: &Comparison, ui: &Ui) -> std::io::Result<()> {
    ui.line(format!("plan report of {}, {}, {}:", c.chip, c.os, c.compute_units))?;
    let mut table = Table::new(&["predicted", "planned ANE", "GPU", "CPU", "no device"]);
    for (predicted, p) in &c.confusion {
        table.row(vec![
            predicted.to_string(),
            p.ane.to_string(),
            p.gpu.to_string(),
            p.cpu.to_string(),
            p.none.to_string(),
        ]);
    }
    table.print(ui)?;
    ui.line(format!(
        "{} ops joined, {} only in the packages, {} only in the report; {} of {} decided predictions agree; {} packages not in the report",
        c.joined, c.not_in_report, c.not_in_packages, c.agreeing, c.decided, c.packages_without_plan
    ))?;
    for d in c.disagreements.iter().take(20) {
        let device = d.preferred.map_or("none".into(), |p| format!("{p:?}").to_lowercase());
        ui.line(format!(
            "  {} {} {} ({}): predicted {}, planned {device} {}",
            d.package,
            d.function,
            d.op,
            d.op_type,
            d.predicted.name(),
            d.rules.join(" ")
        ))?;
    }
    let says = c.verdict.map_or("nothing: none of its packages is checked here", Verdict::name);
    ui.line(format!("the plan says {says}"))?;
    if c.verdict == Some(Verdict::Unknown) {
        ui.line("(no device for some ops or all: the plan API gives none when a model's deployment target is too low, and on some systems for every op)")?;
    }
    ui.line("")
}

fn rules(ui: &Ui) -> anyhow::Result<Outcome> {
    let all: Vec<serde_json::Value> = table::all()
        .map(|r| {
            serde_json::json!({
                "rule": r.id, "question": r.question, "severity": r.severity, "verdict": r.verdict, "matches": r.scope(),
                "text": r.text, "advice": r.advice, "evidence": r.evidence,
            })
        })
        .collect();
    ui.document(&serde_json::json!({"rules": all}))?;
    let mut sources = Sources::default();
    for r in table::all() {
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
    let rows = outcomes::parse(&text)
        .map_err(|what| anemoe_mlpackage::Error::invalid(file, format!("table of outcomes: {what}")))?;
    let judged = outcomes::judge(&rows);
    let score = outcomes::score(&rows, &judged);
    let families = outcomes::without_family(&rows);
    ui.document(&serde_json::json!({"score": score, "without_family": families, "rows": judged}))?;
    let mut table = Table::new(&["row", "label", "predicted", "", "rules"]);
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
            mark.into(),
            j.rules.join(" "),
        ]);
    }
    table.print(ui)?;
    let mut table = Table::new(&[
        "rows of",
        "rows",
        "decided",
        "right",
        "accuracy",
        "unknown",
        "majority",
        "majority of decided",
    ]);
    table.row(figures("all", &score));
    for (family, s) in &families {
        table.row(figures(&format!("{family}, without its rules"), s));
    }
    ui.line("")?;
    table.print(ui)?;
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
        percent(s.accuracy),
        percent(s.unknown_share),
        percent(s.majority),
        percent(s.majority_of_decided),
    ]
}
