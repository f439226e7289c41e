//! Findings of a report: rows of a table of outcomes, and a profile of the chip. Every entry that another entry can
//! contradict is checked against it.

use crate::placed::PlacedPackages;
use crate::report::{MacReport, STAND_IN, chip_slug};
use crate::stages::{BENCH, PACKAGES};
use anemoe_gates::cost::bench_fit::calibrate;
use anemoe_gates::cost::chips::{CALIBRATED, ChipProfile};
use anemoe_gates::cost::forecast::Forecast;
use anemoe_gates::residency::outcomes::{self, cells};
use anemoe_gates::residency::rule::Chip;
use cells::OutcomeCells;
use serde::Deserialize;
use serde_json::Value;
use std::collections::BTreeMap;

/// Findings of a report.
pub struct ReportFindings {
    /// Rows of a table of outcomes.
    pub rows: Vec<OutcomeCells>,
    /// Calibrated profile of the chip; none if the report allows none.
    pub profile: Option<ChipProfile>,
    /// Findings that are no evidence, and the reasons.
    pub left_out: Vec<String>,
}

/// Document of `predict-speed`, as far as it is read.
#[derive(Default, Deserialize)]
#[serde(default)]
struct PredictDocument {
    one: Option<Forecast>,
    profile: Option<ChipProfile>,
}

impl ReportFindings {
    /// Reads the findings of a report.
    ///
    /// # Errors
    /// An entry is not as expected, or contradicts another one; the message names it.
    pub fn of(report: &MacReport) -> Result<ReportFindings, String> {
        let PlacedPackages { labels, mut left_out } = PlacedPackages::of(report)?;
        let rows = rows(report, &labels)?;
        let profile = match profile(report)? {
            Ok(profile) => Some(profile),
            Err(why) => {
                left_out.push(format!("speed: {why}"));
                None
            }
        };
        Ok(ReportFindings { rows, profile, left_out })
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

/// Makes one row for each program and label.
fn rows(report: &MacReport, labels: &BTreeMap<String, &'static str>) -> Result<Vec<OutcomeCells>, String> {
    let system = &report.system;
    let chip = system.system.chip.trim_start_matches("Apple ").to_string();
    let is_known = Chip::parse(&chip).is_some();
    let other = if is_known { String::new() } else { format!(", {chip}") };
    let mut rows: Vec<OutcomeCells> = Vec::new();
    let mut alike: BTreeMap<(String, &str), (usize, usize)> = BTreeMap::new();
    for p in &report.packages {
        let Some(&label) = labels.get(&p.name) else { continue };
        let key = (p.cells.get("program").cloned().unwrap_or_default(), label);
        if let Some((_, more)) = alike.get_mut(&key) {
            *more += 1;
            continue;
        }
        alike.insert(key, (rows.len(), 0));
        let mut row = p.cells.clone();
        for (column, text) in [
            ("id", format!("{}:{}", report.name, p.name)),
            ("project", report.name.clone()),
            ("label", label.to_string()),
            ("chip", if is_known { chip.clone() } else { String::new() }),
            ("os", format!("{} ({}){other}", system.system.os, system.system.build)),
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
fn profile(report: &MacReport) -> Result<Result<ChipProfile, String>, String> {
    let Some(bench) = &report.bench else { return Ok(Err("the report has no bench".into())) };
    let PredictDocument { one: Some(forecast), profile: Some(said) } = report.document("predict")? else {
        return Ok(Err("the stage predict has no document".into()));
    };
    let of_bench = |e: String| format!("entry `{BENCH}`: {e}");
    let document: Value = anemoe_io::json::parse(bench).map_err(|e| of_bench(e.to_string()))?;
    if document["mode"] != "coreml" {
        return Ok(Err(format!("the bench ran in mode {}, not on Core ML", document["mode"])));
    }
    let system = &report.system;
    let slug = chip_slug(&system.system.chip);
    let base = ChipProfile::named(&slug).or_else(|_| ChipProfile::named(STAND_IN))?;
    if said != base {
        return Ok(Err("the report counted with another table of chips than this version has".into()));
    }
    let source = format!(
        "measured by report {}: {} {} on {}, {}",
        report.name, system.model, system.quant, system.system.chip, system.system.os
    );
    let mut profile = calibrate(bench, &forecast, &base, &source).map_err(of_bench)?;
    profile.chip = format!("{slug}{CALIBRATED}");
    // Figures out of bounds are refused, like those of a profile's file.
    ChipProfile::parse(&profile.text()).map(Ok).map_err(of_bench)
}
