//! Findings of a report: rows of a table of outcomes, a profile of the chip, and how stages ended. Every entry that another
//! entry can contradict is checked against it.

use super::placed::{PlacedPackages, has_document};
use crate::mac_report::archive::ReportArchive;
use crate::mac_report::stage::{StageName, StageRecord};
use crate::mac_report::{BENCH, DescribedPackage, PACKAGES, PLAN, ReportSystem, STAND_IN, SYSTEM, chip_slug};
use anemoe_gates::cost::bench_fit::calibrate;
use anemoe_gates::cost::chips::{CALIBRATED, ChipProfile};
use anemoe_gates::cost::forecast::Forecast;
use anemoe_gates::residency::device::PlanReport;
use anemoe_gates::residency::outcomes::{self, cells};
use anemoe_gates::residency::program_digest::is_digest;
use anemoe_gates::residency::rule::Chip;
use cells::OutcomeCells;
use serde_json::Value;
use std::collections::{BTreeMap, BTreeSet};

/// Number of hexadecimal digits of the digest in a report's name.
const DIGITS: usize = 10;
/// Longest name of a package, a system or a chip, in bytes.
const MAX_NAME: usize = 200;
/// Longest cell, in bytes.
const MAX_CELL: usize = 4096;
/// Most packages of a report.
const MAX_PACKAGES: usize = 10_000;
/// Columns that the import fills itself.
const OWN_COLUMNS: [&str; 9] = ["id", "project", "label", "units", "target", "chip", "os", "name", "source"];

/// Findings of a report.
pub struct ReportFindings {
    /// Name of the report: the chip and a digest of its content.
    pub report: String,
    /// Program that wrote the report.
    pub generator: String,
    /// Machine and model of the report.
    pub system: ReportSystem,
    /// Rows of a table of outcomes.
    pub rows: Vec<OutcomeCells>,
    /// Calibrated profile of the chip; none if the report allows none.
    pub profile: Option<ChipProfile>,
    /// Findings that are no evidence, and the reasons.
    pub left_out: Vec<String>,
    /// Records of the stages.
    pub stages: Vec<StageRecord>,
}

impl ReportFindings {
    /// Reads the findings of a report.
    ///
    /// # Errors
    /// An entry is missing, is not as expected, or contradicts another one; the message names it.
    pub fn of(archive: &ReportArchive) -> Result<ReportFindings, String> {
        let system: ReportSystem =
            archive.json(SYSTEM)?.ok_or_else(|| format!("entry `{SYSTEM}` is missing"))?;
        check_system(&system)?;
        let mut stages = Vec::new();
        for stage in StageName::ALL {
            let name = stage.entry();
            let record: StageRecord =
                archive.json(&name)?.ok_or_else(|| format!("entry `{name}` is missing"))?;
            let fits = record.stage == stage && record.seconds.is_finite() && record.seconds >= 0.0;
            if !fits {
                return Err(format!("entry `{name}`: stage {} in {} s", record.stage.name(), record.seconds));
            }
            stages.push(record);
        }
        let report = format!("{}-{}", chip_slug(&system.system.chip), &archive.digest[..DIGITS]);
        let packages: Vec<DescribedPackage> = archive.json(PACKAGES)?.unwrap_or_default();
        let plan = match archive.bytes(PLAN) {
            Some(bytes) => Some(PlanReport::parse(bytes).map_err(|e| format!("entry `{PLAN}`: {e}"))?),
            None => None,
        };
        check_packages(&packages)?;
        let known: Vec<&str> = packages.iter().map(|p| p.name.as_str()).collect();
        let machine = (system.system.chip.as_str(), system.system.os.as_str());
        let PlacedPackages { labels, mut left_out } =
            PlacedPackages::of(&known, &stages, plan.as_ref(), machine)?;
        let rows = rows(&report, &system, &packages, &labels)?;
        let profile = match profile(archive, &report, &system, &stages)? {
            Ok(profile) => Some(profile),
            Err(why) => {
                left_out.push(format!("speed: {why}"));
                None
            }
        };
        let generator = archive.manifest.generator.chars().take(MAX_NAME).collect();
        Ok(ReportFindings { report, generator, system, rows, profile, left_out, stages })
    }

    /// Formats the rows as the table that `check --outcomes` reads.
    pub fn table(&self) -> String {
        table(&self.rows)
    }
}

fn table(rows: &[OutcomeCells]) -> String {
    let lines = std::iter::once(cells::heading_line()).chain(rows.iter().map(cells::line));
    lines.map(|line| line + "\n").collect()
}

fn check_system(system: &ReportSystem) -> Result<(), String> {
    let s = &system.system;
    for (what, text) in [
        ("os", &s.os),
        ("build", &s.build),
        ("chip", &s.chip),
        ("model", &system.model),
        ("version", &system.version),
        ("quant", &system.quant),
    ] {
        if text.trim().is_empty() || text.len() > MAX_NAME || text.chars().any(char::is_control) {
            return Err(format!(
                "entry `{SYSTEM}`: `{what}` is not 1 to {MAX_NAME} characters of plain text"
            ));
        }
    }
    if chip_slug(&s.chip).is_empty() {
        return Err(format!("entry `{SYSTEM}`: chip `{}` has neither letters nor digits", s.chip));
    }
    Ok(())
}

fn check_packages(packages: &[DescribedPackage]) -> Result<(), String> {
    let wrong = |what: String| Err(format!("entry `{PACKAGES}`: {what}"));
    if packages.len() > MAX_PACKAGES {
        return wrong(format!("{} packages, more than {MAX_PACKAGES}", packages.len()));
    }
    let columns: BTreeSet<&str> = cells::columns().filter(|c| !OWN_COLUMNS.contains(c)).collect();
    let mut names = BTreeSet::new();
    for p in packages {
        let plain = |c: char| c.is_ascii_alphanumeric() || "._-".contains(c);
        if p.name.is_empty() || p.name.len() > MAX_NAME || !p.name.chars().all(plain) {
            return wrong(format!(
                "package `{}`: a name of letters, digits, `.`, `_` and `-` is expected",
                p.name.escape_debug()
            ));
        }
        if !names.insert(p.name.as_str()) {
            return wrong(format!("package `{}` is there twice", p.name));
        }
        if let Some(column) = p.cells.keys().find(|c| !columns.contains(c.as_str())) {
            return wrong(format!("package `{}`: no column is named `{}`", p.name, column.escape_debug()));
        }
        if let Some((column, _)) = p.cells.iter().find(|(_, cell)| cell.len() > MAX_CELL) {
            return wrong(format!("package `{}`: `{column}` has more than {MAX_CELL} bytes", p.name));
        }
        if !p.cells.get("program").is_some_and(|digest| is_digest(digest)) {
            return wrong(format!("package `{}`: `program` is no digest", p.name));
        }
    }
    Ok(())
}

/// Makes one row for each program and label.
fn rows(
    report: &str,
    system: &ReportSystem,
    packages: &[DescribedPackage],
    labels: &BTreeMap<String, &'static str>,
) -> Result<Vec<OutcomeCells>, String> {
    let mut rows: Vec<OutcomeCells> = Vec::new();
    let mut alike: BTreeMap<(String, &str), (usize, usize)> = BTreeMap::new();
    let chip = system.system.chip.trim_start_matches("Apple ").to_string();
    for p in packages {
        let Some(&label) = labels.get(&p.name) else { continue };
        let key = (p.cells.get("program").cloned().unwrap_or_default(), label);
        if let Some((_, more)) = alike.get_mut(&key) {
            *more += 1;
            continue;
        }
        alike.insert(key, (rows.len(), 0));
        let mut row = p.cells.clone();
        let known = Chip::parse(&chip).is_some();
        let os = format!(
            "{} ({}){}",
            system.system.os,
            system.system.build,
            if known { String::new() } else { format!(", {chip}") }
        );
        for (column, text) in [
            ("id", format!("{report}:{}", p.name)),
            ("project", report.to_string()),
            ("label", label.to_string()),
            ("chip", if known { chip.clone() } else { String::new() }),
            ("os", os),
            ("name", format!("{} {} {} {}", system.model, system.quant, p.kind, p.name)),
            ("source", format!("anemoe {}", system.version)),
        ] {
            row.insert(column.into(), text);
        }
        // An error in a cell names its package.
        outcomes::parse(&table(std::slice::from_ref(&row))).map_err(|e| {
            format!("entry `{PACKAGES}`: package `{}`: {}", p.name, e.trim_start_matches("line 2: "))
        })?;
        rows.push(row);
    }
    for (i, more) in alike.into_values().filter(|(_, more)| *more > 0) {
        if let Some(name) = rows[i].get_mut("name") {
            *name += &format!(" and {more} alike");
        }
    }
    Ok(rows)
}

/// Calibrates a profile of the chip; the inner error is the reason why there is none.
fn profile(
    archive: &ReportArchive,
    report: &str,
    system: &ReportSystem,
    stages: &[StageRecord],
) -> Result<Result<ChipProfile, String>, String> {
    let Some(bench) = archive.bytes(BENCH) else { return Ok(Err("the report has no bench".into())) };
    let entry = StageName::Predict.entry();
    let predicted = stages.iter().find(|r| r.stage == StageName::Predict).filter(|r| has_document(r));
    let Some(predicted) = predicted else { return Ok(Err("the stage predict has no document".into())) };
    let of_entry = |e: serde_json::Error| format!("entry `{entry}`: {}", anemoe_io::json::JsonError::from(e));
    let part = |key: &str| predicted.document.get(key).cloned().unwrap_or(Value::Null);
    let forecast: Forecast = serde_json::from_value(part("one")).map_err(of_entry)?;
    let said: ChipProfile = serde_json::from_value(part("profile")).map_err(of_entry)?;
    let document: Value = archive.json(BENCH)?.unwrap_or_default();
    if document["mode"] != "coreml" {
        return Ok(Err(format!("the bench ran in mode {}, not on Core ML", document["mode"])));
    }
    let slug = chip_slug(&system.system.chip);
    let base = ChipProfile::named(&slug).or_else(|_| ChipProfile::named(STAND_IN))?;
    if said != base {
        return Ok(Err("the report counted with another table of chips than this version has".into()));
    }
    let s = &system.system;
    let source =
        format!("measured by report {report}: {} {} on {}, {}", system.model, system.quant, s.chip, s.os);
    let mut profile =
        calibrate(bench, &forecast, &base, &source).map_err(|e| format!("entry `{BENCH}`: {e}"))?;
    profile.chip = format!("{slug}{CALIBRATED}");
    // Figures out of bounds are refused, like those of a profile's file.
    ChipProfile::parse(&profile.text()).map(Ok).map_err(|e| format!("entry `{BENCH}`: {e}"))
}
