//! Scores the rules on published outcomes: a table of graphs that someone measured, with where they ran.
//!
//! A row is judged from what it says about the graph (`model_or_op`, `graph_facts`, `quant`, `MB`, `shape/state`, `chip_os`).
//! Its `label` is what the verdict is compared with; `detail` is never read, and `source` only names the family that
//! [`without_family`] leaves out.

mod read;
mod rebuild;
mod row;
mod row_facts;

pub use row::Row;

use super::rule::{Verdict, family_of};
use super::rules;
use super::verdict::Judge;
use serde::Serialize;
use std::collections::{BTreeMap, BTreeSet};

/// The published outcomes that the thresholds were compared with while they were written: 105 graphs, most from ane-book,
/// emilio, larql and InferKit; compiled from the sources that the column `source` names.
pub const KNOWN: &str = include_str!("known.tsv");

/// Reads a table: tab-separated, with a line of headings, columns by name in any order.
///
/// # Errors
/// A column that is needed is missing, or a line has too few cells; the message names the line.
pub fn parse(text: &str) -> Result<Vec<Row>, String> {
    let mut lines = text.lines().enumerate().filter(|(_, l)| !l.trim().is_empty() && !l.starts_with('#'));
    let (_, headings) = lines.next().ok_or("it is empty")?;
    let headings: Vec<&str> = headings.split('\t').map(str::trim).collect();
    let column = |name: &str| headings.iter().position(|h| h.eq_ignore_ascii_case(name));
    let needed = |name: &str| column(name).ok_or_else(|| format!("no column `{name}`"));
    let (id, model, facts) = (column("id"), needed("model_or_op")?, needed("graph_facts")?);
    let (quant, mb, shape) = (needed("quant")?, needed("MB")?, needed("shape/state")?);
    let (chip, label, source) = (column("chip_os"), needed("label")?, column("source"));
    let mut rows = Vec::new();
    for (number, line) in lines {
        let cells: Vec<&str> = line.split('\t').collect();
        let cell = |i: usize| cells.get(i).map(|c| c.trim().to_string()).unwrap_or_default();
        if cells.len() <= label {
            return Err(format!("line {}: {} cells, no label", number + 1, cells.len()));
        }
        let size = cell(mb);
        let size = match size.trim_start_matches(['~', '<']) {
            "" | "?" | "-" => None,
            t => Some(
                t.parse()
                    .ok()
                    .filter(|v: &f64| v.is_finite() && *v >= 0.0)
                    .ok_or_else(|| format!("line {}: `{t}` is not a number of megabytes", number + 1))?,
            ),
        };
        rows.push(Row {
            id: id.map_or_else(|| format!("line {}", number + 1), cell),
            model: cell(model),
            facts: cell(facts),
            quant: cell(quant),
            mb: size,
            shape: cell(shape),
            chip: chip.map(cell).unwrap_or_default(),
            label: cell(label).to_ascii_uppercase(),
            source: source.map(cell).unwrap_or_default(),
        });
    }
    Ok(rows)
}

/// A row and what the rules say about it.
#[derive(Clone, Debug, PartialEq, Serialize)]
pub struct Judged {
    /// Short name of the row.
    pub id: String,
    /// What it is.
    pub model: String,
    /// Where it ran.
    pub label: String,
    /// Prediction.
    pub verdict: Verdict,
    /// The prediction is decided and agrees; `None` where it is `unknown` or the label says nothing.
    pub right: Option<bool>,
    /// Whether the row states enough to be rebuilt as a program.
    pub rebuilt: bool,
    /// Rules that decided.
    pub rules: Vec<&'static str>,
}

/// Figures over a table.
#[derive(Clone, Debug, PartialEq, Serialize)]
pub struct Score {
    /// Rows with a label that says something.
    pub rows: usize,
    /// Rows with a verdict other than `unknown`.
    pub decided: usize,
    /// Decided rows whose verdict agrees with the label.
    pub right: usize,
    /// `right` of `decided`; 1 when nothing is decided.
    pub accuracy: f64,
    /// Rows that are `unknown`.
    pub unknown: usize,
    /// `unknown` of `rows`.
    pub unknown_share: f64,
    /// Share of the more frequent truth among all rows: what always saying the same would get.
    pub majority: f64,
    /// The same among decided rows.
    pub majority_of_decided: f64,
    /// Rows that were rebuilt as programs.
    pub rebuilt: usize,
}

/// Judges every row with the whole table of rules.
pub fn judge(rows: &[Row]) -> Vec<Judged> {
    rows.iter().map(|row| judge_row(row, None)).collect()
}

fn judge_row(row: &Row, without: Option<&str>) -> Judged {
    let read = read::row(row);
    let rules = rules::all().filter(|r| without.is_none_or(|f| r.stands_without(f)));
    let report = Judge::with_rules(read.conditions, rules).package(&row.id, &read.facts, false);
    let mut deciding: BTreeSet<&'static str> =
        report.reasons.iter().filter(|r| r.verdict == report.verdict).map(|r| r.rule).collect();
    if report.verdict == Verdict::Ane {
        deciding.extend(report.functions.iter().filter_map(|f| f.support));
    }
    let right = row.truth().filter(|_| report.verdict != Verdict::Unknown).map(|t| t == report.verdict);
    Judged {
        id: row.id.clone(),
        model: row.model.clone(),
        label: row.label.clone(),
        verdict: report.verdict,
        right,
        rebuilt: read.rebuilt,
        rules: deciding.into_iter().collect(),
    }
}

/// Counts.
pub fn score(rows: &[Row], judged: &[Judged]) -> Score {
    let labelled: Vec<(Verdict, &Judged)> =
        rows.iter().zip(judged).filter_map(|(row, j)| row.truth().map(|t| (t, j))).collect();
    let decided: Vec<&(Verdict, &Judged)> = labelled.iter().filter(|(_, j)| j.right.is_some()).collect();
    let right = decided.iter().filter(|(_, j)| j.right == Some(true)).count();
    let share = |part: usize, whole: usize| if whole == 0 { 1.0 } else { part as f64 / whole as f64 };
    let majority = |truths: &mut dyn Iterator<Item = Verdict>| {
        let (mut ane, mut all) = (0, 0);
        for t in truths {
            (ane, all) = (ane + usize::from(t == Verdict::Ane), all + 1);
        }
        share(ane.max(all - ane), all)
    };
    let unknown = labelled.len() - decided.len();
    Score {
        rows: labelled.len(),
        decided: decided.len(),
        right,
        accuracy: share(right, decided.len()),
        unknown,
        unknown_share: if labelled.is_empty() { 0.0 } else { share(unknown, labelled.len()) },
        majority: majority(&mut labelled.iter().map(|(t, _)| *t)),
        majority_of_decided: majority(&mut decided.iter().map(|(t, _)| *t)),
        rebuilt: labelled.iter().filter(|(_, j)| j.rebuilt).count(),
    }
}

/// For each family of sources, its rows judged without the rules that rest on that family alone: what the other sources know
/// about them. (Thresholds that several families support stay as they are.)
pub fn without_family(rows: &[Row]) -> BTreeMap<String, Score> {
    let families: BTreeSet<&str> = rows.iter().map(|r| family_of(&r.source)).collect();
    families
        .into_iter()
        .map(|family| {
            let own: Vec<Row> = rows.iter().filter(|r| family_of(&r.source) == family).cloned().collect();
            let judged: Vec<Judged> = own.iter().map(|row| judge_row(row, Some(family))).collect();
            (family.to_string(), score(&own, &judged))
        })
        .collect()
}

#[cfg(test)]
mod tests;
