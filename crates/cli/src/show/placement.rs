//! Placement of packages, for people.

use crate::ui::{self, Table, Ui};
use anemoe_gates::residency::op_summary::OpCounts;
use anemoe_gates::residency::rule::{Evidence, Verdict};
use anemoe_gates::residency::verdict::{PackageReport, Reason};
use anemoe_gates::residency::{Comparison, Report};
use std::collections::BTreeMap;

/// Prints the placement: a row per kind of package, then the reasons, and changes that would help.
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
    let shown: Vec<(&PackageReport, usize)> = rows.iter().map(|(p, n, _)| (*p, *n)).collect();
    for (p, n, cells) in rows {
        let mut row = vec![p.name.clone(), n.to_string()];
        row.extend(cells);
        table.row(row);
    }
    table.print(ui)?;
    print_summaries(report, &shown, ui)?;
    print_small_functions(report, ui)?;
    print_reasons(report, ui)?;
    print_measured(report, ui)?;
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
        "{verdict}: {}, predicted: {}{}",
        ui::counted(n, "package"),
        devices(v.ane, v.unknown, v.not_ane, small),
        if report.strict { " (strict: unknown fails, and so does small)" } else { "" }
    ))?;
    ui.line(
        "predicted from measurements that others published (anemoe check --rules); only a Mac can measure",
    )
}

/// Prints the packages whose program an imported report measured, with the report.
pub fn print_measured(report: &Report, ui: &Ui) -> std::io::Result<()> {
    let mut found: BTreeMap<String, Vec<&str>> = BTreeMap::new();
    for p in &report.packages {
        if let Some(measured) = &p.measured {
            found.entry(measured.text()).or_default().push(&p.name);
        }
    }
    if found.is_empty() {
        return Ok(());
    }
    ui.line("\nmeasured, by imported evidence:")?;
    for (text, names) in found {
        let more = if names.len() > 3 { format!(" and {} more", names.len() - 3) } else { String::new() };
        let first: Vec<&str> = names.iter().take(3).copied().collect();
        ui.line(format!("  {}{more}: {text}", first.join(", ")))?;
    }
    Ok(())
}

/// Prints the ops of each row of the table, and of all packages.
fn print_summaries(report: &Report, shown: &[(&PackageReport, usize)], ui: &Ui) -> std::io::Result<()> {
    ui.line("\nops, as predicted:")?;
    for (p, n) in shown {
        let times = if *n > 1 { format!(" (each of {n})") } else { String::new() };
        ui.line(format!("  {}{times}: {}", p.name, p.summary.line))?;
    }
    if report.packages.len() > 1 {
        ui.line(format!("  in sum: {}", report.summary.line))?;
    }
    Ok(())
}

/// Prints the functions that the CPU runs because they are tiny, in packages that other functions decide, and their cost.
fn print_small_functions(report: &Report, ui: &Ui) -> std::io::Result<()> {
    let with: Vec<&PackageReport> =
        report.packages.iter().filter(|p| !p.small_functions.is_empty()).collect();
    let Some(first) = with.first() else { return Ok(()) };
    let bytes: u64 = with.iter().flat_map(|p| &p.small_functions).map(|f| f.weight_bytes).sum();
    let names: Vec<String> = first
        .small_functions
        .iter()
        .map(|f| {
            format!(
                "{} ({} of {})",
                f.name,
                ui::bytes(f.weight_bytes),
                ui::bytes(first.weight_bytes.unwrap_or(0))
            )
        })
        .collect();
    ui.line(format!(
        "\ntoo small for the Neural Engine, in packages whose weights other functions hold: {} of {}{}. The CPU runs them, and \
         reads so much in each call: {} when each is called once",
        names.join(", "),
        first.name,
        if with.len() > 1 { format!(", and alike in {} more", with.len() - 1) } else { String::new() },
        ui::bytes(bytes)
    ))
}

/// Label of a package on the CPU that is too small for its device to matter.
pub const TOO_SMALL: &str = "CPU: small, fine";

/// Returns the predicted device of a package, for tables.
pub fn device_label(p: &PackageReport, strict: bool) -> &'static str {
    if p.too_small && !strict { TOO_SMALL } else { p.verdict.name() }
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

/// Prints one line per rule over all packages, since the same shard of thirty layers has the same reason.
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
                ui.line(format!("      measured: {}", sources.notes(&r.evidence)))?;
            }
        }
    }
    sources.print(ui)?;
    ui.line("")
}

/// Sources of evidence as numbered notes, without repetitions.
#[derive(Default)]
pub struct Sources(Vec<String>);

impl Sources {
    /// Returns the marks of these sources: `[1] [2]`.
    pub fn notes(&mut self, found: &[Evidence]) -> String {
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

    /// Prints the notes.
    pub fn print(&self, ui: &Ui) -> std::io::Result<()> {
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

/// A rule with all packages that it applies to.
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
            (n, ops) => format!(" at {} of {n} packages, first {place}", ui::counted(ops, "op")),
        }
    }
}

fn severity(r: &Reason) -> &'static str {
    use anemoe_gates::residency::rule::RuleSeverity;
    match r.severity {
        RuleSeverity::Hard => "hard",
        RuleSeverity::Soft => "soft",
        RuleSeverity::Warning => "warning",
    }
}

fn evidence(e: &Evidence) -> String {
    let place: Vec<&str> = [e.chip.as_str(), &e.os].into_iter().filter(|t| !t.is_empty()).collect();
    let place = if place.is_empty() { String::new() } else { format!(" ({})", place.join(", ")) };
    format!("{:?}: {} [{}]{place}", e.strength, e.finding, e.source)
}

pub fn print_ops(report: &Report, ui: &Ui) -> std::io::Result<()> {
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
    for p in &c.packages {
        ui.line(format!("  {}, as planned: {}", p.name, p.summary.line))?;
    }
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
