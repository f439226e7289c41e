//! Scores predictions on published outcomes: a table of measured graphs, with their outcomes.
//!
//! A row is judged by the facts of its graph and by all other rows. [`leave_out_projects`] also leaves out what the
//! row's own project found.

pub mod cells;
mod outcome_table;
pub mod row;

pub use outcome_table::{KNOWN, parse};
pub use row::Row;

use super::precedents::Precedents;
use super::rule::{Rule, Verdict};
use super::rules;
use super::verdict::Judge;
use rayon::prelude::*;
use serde::Serialize;
use std::collections::BTreeSet;

/// Row with its prediction.
#[derive(Clone, Debug, PartialEq, Serialize)]
pub struct Judged {
    /// Id of the row.
    pub id: String,
    /// Label of the row: where the graph ran, or how it failed.
    pub label: String,
    /// Predicted verdict.
    pub verdict: Verdict,
    /// True if a decided prediction agrees with the label; `None` for `unknown`, or a label without an outcome.
    pub right: Option<bool>,
    /// Ids of the rules that decided.
    pub rules: Vec<&'static str>,
    /// Ids of the rows that decided.
    pub rows: Vec<String>,
}

/// Score of the predictions over a table.
#[derive(Clone, Debug, Default, PartialEq, Serialize)]
pub struct Score {
    /// Number of rows whose label states an outcome.
    pub rows: usize,
    /// Number of rows with a verdict other than `unknown`.
    pub decided: usize,
    /// Number of decided rows whose verdict agrees with the label.
    pub right: usize,
    /// `right / decided`; `None` where no row is decided.
    pub accuracy: Option<f64>,
    /// Number of rows with the verdict `unknown`.
    pub unknown: usize,
    /// `unknown / rows`.
    pub unknown_share: f64,
    /// Share of rows that are right if `unknown` counts as `not_ane`, since nothing speaks for the ANE there.
    pub forced: f64,
    /// Share of the more frequent truth: the score of a constant answer.
    pub majority: f64,
}

/// Judges every row with all rules, and with all known outcomes but its own.
pub fn judge(rows: &[Row]) -> Vec<Judged> {
    let all = || rules::all().collect();
    rows.par_iter().map(|row| judge_row(row, all(), |known| known.id != row.id)).collect()
}

/// Judges every row without the findings of its own project: rules without other evidence do not apply, and its outcomes
/// are no precedents.
pub fn leave_out_projects(rows: &[Row]) -> Vec<Judged> {
    let foreign = |project: &str| rules::all().filter(|r| r.stands_without(project)).collect();
    let judge = |row: &Row| judge_row(row, foreign(&row.project), |known| known.project != row.project);
    rows.par_iter().map(judge).collect()
}

fn judge_row(row: &Row, rules: Vec<&'static Rule>, is_known: impl Fn(&Row) -> bool) -> Judged {
    let judge = Judge::with_rules(row.conditions, rules, Precedents::known().retain(is_known).into());
    let report = judge.package(&row.id, &row.package(), false);
    let mut deciding: BTreeSet<&'static str> =
        report.reasons.iter().filter(|r| r.verdict == report.verdict).map(|r| r.rule).collect();
    if report.verdict == Verdict::Ane {
        deciding.extend(report.functions.iter().filter_map(|f| f.support));
    }
    let right = row.truth().filter(|_| report.verdict != Verdict::Unknown).map(|t| t == report.verdict);
    Judged {
        id: row.id.clone(),
        label: row.label.clone(),
        verdict: report.verdict,
        right,
        rules: deciding.into_iter().collect(),
        rows: report.functions.into_iter().flat_map(|f| f.precedents).collect(),
    }
}

/// Computes the score of judged rows.
pub fn score<'a>(judged: impl Iterator<Item = (&'a Row, &'a Judged)>) -> Score {
    let mut s = Score::default();
    let (mut ane, mut forced) = (0usize, 0usize);
    for (row, judged) in judged {
        let Some(truth) = row.truth() else { continue };
        s.rows += 1;
        s.decided += usize::from(judged.right.is_some());
        s.right += usize::from(judged.right == Some(true));
        ane += usize::from(truth == Verdict::Ane);
        forced += usize::from((judged.verdict == Verdict::Ane) == (truth == Verdict::Ane));
    }
    let share = |part: usize, whole: usize| part as f64 / whole.max(1) as f64;
    s.unknown = s.rows - s.decided;
    s.accuracy = (s.decided > 0).then(|| share(s.right, s.decided));
    s.unknown_share = share(s.unknown, s.rows);
    s.forced = share(forced, s.rows);
    s.majority = share(ane.max(s.rows - ane), s.rows);
    s
}

#[cfg(test)]
mod tests;
