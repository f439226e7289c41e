//! Placement of packages, for people.

use crate::ui::{self, Table};
use anemoe_gates::residency::op_summary::OpCounts;
use anemoe_gates::residency::rule::{Evidence, Verdict};
use anemoe_gates::residency::verdict::{PackageReport, Reason};
use anemoe_gates::residency::{Comparison, Report};
use std::collections::BTreeMap;

/// Shows the placement: a row per kind of package, then the reasons, and changes that would help.
pub fn show(report: &Report, out: &mut Vec<String>) {
    let rows = ui::folded(report.packages.iter().map(|p| {
        let mut cells: Vec<String> = p.kind.iter().cloned().collect();
        cells.extend([p.functions.len().to_string(), p.weight_bytes.map(ui::bytes).unwrap_or_default()]);
        let OpCounts { ane, gpu, cpu, unknown, no_device } = p.ops;
        cells.extend([ane, gpu, cpu, unknown, no_device].map(|n| n.to_string()));
        cells.push(device_label(p, report.strict).into());
        (p, cells)
    }));
    let mut headings = vec!["package", "count"];
    headings.extend(report.packages.iter().any(|p| p.kind.is_some()).then_some("kind"));
    headings.extend(["functions", "weights", "ANE", "GPU", "CPU", "undecided", "no device", "predicted"]);
    let row = |(p, n, cells): &(&PackageReport, usize, Vec<String>)| {
        [&[p.name.clone(), n.to_string()], &cells[..]].concat()
    };
    out.extend(Table::new(&headings).with_rows(rows.iter().map(row)).lines());
    out.push("\nops, as predicted:".into());
    for (p, n, _) in &rows {
        let times = if *n > 1 { format!(" (each of {n})") } else { String::new() };
        out.push(format!("  {}{times}: {}", p.name, p.summary.line));
    }
    if report.packages.len() > 1 {
        out.push(format!("  in sum: {}", report.summary.line));
    }
    show_small_functions(report, out);
    show_reasons(report, out);
    show_measured(report, out);
    report.device.iter().for_each(|device| show_device(device, out));
    let verdict = match (report.pass, report.verdicts.unknown) {
        (false, _) => "FAIL",
        (true, 1..) if report.device.is_none() => "pass, but NOT DECIDED for all",
        (true, _) => "pass",
    };
    let (packages, devices) = (ui::counted(report.packages.len(), "package"), devices(report));
    let strict = if report.strict { " (strict: unknown fails, and so does small)" } else { "" };
    out.push(format!("{verdict}: {packages}, predicted: {devices}{strict}"));
    out.push(
        "predicted from measurements that others published (anemoe check --rules); only a Mac can measure"
            .into(),
    );
}

/// Shows the packages whose program an imported report measured, with the report.
pub fn show_measured(report: &Report, out: &mut Vec<String>) {
    let mut found: BTreeMap<String, Vec<&str>> = BTreeMap::new();
    for p in &report.packages {
        if let Some(measured) = &p.measured {
            found.entry(measured.text()).or_default().push(&p.name);
        }
    }
    if !found.is_empty() {
        out.push("\nmeasured, by imported evidence:".into());
    }
    for (text, names) in &found {
        let more = if names.len() > 3 { format!(" and {} more", names.len() - 3) } else { String::new() };
        out.push(format!("  {}{more}: {text}", names[..names.len().min(3)].join(", ")));
    }
}

/// Shows the functions that the CPU runs because they are tiny, in packages that other functions decide, and their cost.
fn show_small_functions(report: &Report, out: &mut Vec<String>) {
    let with = || report.packages.iter().filter(|p| !p.small_functions.is_empty());
    let Some(first) = with().next() else { return };
    let whole = ui::bytes(first.weight_bytes.unwrap_or(0));
    let names = first.small_functions.iter();
    let names = names.map(|f| format!("{} ({} of {whole})", f.name, ui::bytes(f.weight_bytes)));
    let alike = match with().count() {
        1 => String::new(),
        n => format!(", and alike in {} more", n - 1),
    };
    out.push(format!(
        "\ntoo small for the Neural Engine, in packages whose weights other functions hold: {} of {}{alike}. The CPU runs them, and \
         reads so much in each call: {} when each is called once",
        names.collect::<Vec<_>>().join(", "),
        first.name,
        ui::bytes(with().flat_map(|p| &p.small_functions).map(|f| f.weight_bytes).sum())
    ));
}

/// Label of a package on the CPU that is too small for its device to matter.
pub const TOO_SMALL: &str = "CPU: small, fine";

/// Returns the predicted device of a package, for tables.
pub fn device_label(p: &PackageReport, strict: bool) -> &'static str {
    if p.too_small && !strict { TOO_SMALL } else { p.verdict.name() }
}

/// Counts packages by their predicted devices, in words.
pub fn devices(report: &Report) -> String {
    let small = report.packages.iter().filter(|p| p.too_small && !report.strict).count() as u64;
    let v = &report.verdicts;
    let counts = [
        (v.unknown, "unknown"),
        (v.not_ane.saturating_sub(small), "elsewhere"),
        (small, "too small for it to matter (they run on the CPU, which is fine)"),
    ];
    let others = counts.iter().filter(|(n, _)| *n > 0).map(|(n, word)| format!(", {n} {word}"));
    format!("{} on the Neural Engine{}", v.ane, others.collect::<String>())
}

/// Shows one line per rule over all packages, since the same shard of thirty layers has the same reason.
fn show_reasons(report: &Report, out: &mut Vec<String>) {
    let mut reasons: Vec<Folded<'_>> = Vec::new();
    let mut warnings: Vec<Folded<'_>> = Vec::new();
    for p in &report.packages {
        for (list, found) in [(&mut reasons, &p.reasons), (&mut warnings, &p.warnings)] {
            for r in found {
                match list.iter_mut().find(|f| f.first.rule == r.rule) {
                    Some(f) => f.add(p, r),
                    None => list.push(Folded::of(r, &p.name)),
                }
            }
        }
    }
    reasons.sort_by_key(|f| (std::cmp::Reverse(f.first.verdict), f.first.severity));
    warnings.extend(report.warnings.iter().map(|r| Folded { packages: 0, ..Folded::of(r, "") }));
    let mut sources = Sources::default();
    for (heading, list) in [("why", reasons), ("warnings, which decide nothing", warnings)] {
        if list.is_empty() {
            continue;
        }
        out.push(format!("\n{heading}:"));
        for f in list {
            let r = f.first;
            let verdict = if heading == "why" { format!("{}, ", r.verdict.name()) } else { String::new() };
            let severity = format!("{:?}", r.severity).to_lowercase();
            out.push(format!("  {} [{verdict}{severity}]: {}{}", r.rule, r.text, f.place()));
            if !r.advice.is_empty() {
                out.push(format!("      change: {}", r.advice));
            }
            if !r.evidence.is_empty() {
                out.push(format!("      measured: {}", sources.notes(&r.evidence)));
            }
        }
    }
    sources.show(out);
    out.push(String::new());
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

    /// Shows the notes.
    pub fn show(&self, out: &mut Vec<String>) {
        if self.0.is_empty() {
            return;
        }
        out.push(
            "\nsources (A: several measurements agree; B: one careful measurement; C: a claim, or contradictions):".into(),
        );
        for (i, text) in self.0.iter().enumerate() {
            out.push(format!("  [{}] {text}", i + 1));
        }
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
    fn of(first: &'a Reason, package: &'a str) -> Folded<'a> {
        Folded { first, package, last: package, packages: 1, ops: first.ops }
    }

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

fn evidence(e: &Evidence) -> String {
    let place: Vec<&str> = [e.chip.as_str(), &e.os].into_iter().filter(|t| !t.is_empty()).collect();
    let place = if place.is_empty() { String::new() } else { format!(" ({})", place.join(", ")) };
    format!("{:?}: {} [{}]{place}", e.strength, e.finding, e.source)
}

/// Shows every op with its prediction.
pub fn show_ops(report: &Report, out: &mut Vec<String>) {
    for (p, f) in report.packages.iter().flat_map(|p| p.functions.iter().map(move |f| (p, f))) {
        out.push(format!("{} {}: {}", p.name, f.name, f.verdict.name()));
        let rows = f.op_list.iter().map(|op| {
            vec![op.name.clone(), op.op_type.clone(), op.verdict.name().into(), op.rules.join(" ")]
        });
        out.extend(Table::new(&["op", "type", "predicted", "rules"]).with_rows(rows).lines());
        out.push(String::new());
    }
}

fn show_device(c: &Comparison, out: &mut Vec<String>) {
    out.push(format!("plan report of {}, {}, {}:", c.chip, c.os, c.compute_units));
    let rows = c.confusion.iter().map(|(predicted, p)| {
        let counts = [p.ane, p.gpu, p.cpu, p.none].map(|n| n.to_string());
        [&[predicted.to_string()], &counts[..]].concat()
    });
    out.extend(Table::new(&["predicted", "planned ANE", "GPU", "CPU", "no device"]).with_rows(rows).lines());
    for p in &c.packages {
        out.push(format!("  {}, as planned: {}", p.name, p.summary.line));
    }
    out.push(format!(
        "{} ops joined, {} only in the packages, {} only in the report; {} of {} decided predictions agree; {} packages not in the report",
        c.joined, c.not_in_report, c.not_in_packages, c.agreeing, c.decided, c.packages_without_plan
    ));
    for d in c.disagreements.iter().take(20) {
        let device = d.preferred.map_or("none".into(), |p| format!("{p:?}").to_lowercase());
        let (predicted, rules) = (d.predicted.name(), d.rules.join(" "));
        out.push(format!(
            "  {} {} {} ({}): predicted {predicted}, planned {device} {rules}",
            d.package, d.function, d.op, d.op_type
        ));
    }
    let says = c.verdict.map_or("nothing: none of its packages is checked here", Verdict::name);
    out.push(format!("the plan says {says}"));
    if c.verdict == Some(Verdict::Unknown) {
        out.push(
            "(no device for some ops or all: the plan API gives none when a model's deployment target is too \
             low, and on some systems for every op)"
                .into(),
        );
    }
    out.push(String::new());
}
