//! Scores predictions on published outcomes: a table of graphs that someone measured, with where they ran.
//!
//! A row is judged from the facts of its graph. Its label is what the verdict is compared with, and its project what
//! [`leave_out_projects`] leaves out.

pub mod cells;
mod columns;
pub mod published;
pub mod read;
mod rebuild;
pub mod row;
mod sketch;
mod words;

pub use super::likelihood::Design;
pub use published::{KNOWN, parse};
pub use row::Row;

use super::likelihood::{Predictor, prepare};
use super::rule::Verdict;
use super::rules;
use super::verdict::Judge;
use rayon::prelude::*;
use serde::Serialize;
use std::collections::{BTreeMap, BTreeSet};
use std::sync::Arc;

/// A row and what the rules say about it.
#[derive(Clone, Debug, PartialEq, Serialize)]
pub struct Judged {
    /// Short name of the row.
    pub id: String,
    /// Model and part, in words.
    pub model: String,
    /// Label: where it ran.
    pub label: String,
    /// Prediction.
    pub verdict: Verdict,
    /// Probability that the ANE runs it.
    pub probability: f64,
    /// The prediction is decided and agrees; `None` where it is `unknown` or the label says nothing.
    pub right: Option<bool>,
    /// True if the row states enough to be rebuilt as a program.
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
    /// `right` of `decided`; none where nothing is decided.
    pub accuracy: Option<f64>,
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
    /// Rows whose probability lies on the right side of one half: the share that is right when every row has to be decided.
    pub forced: f64,
    /// Mean square of what probabilities miss: 0 at best, .25 for always saying one half.
    pub brier: f64,
}

/// Judges every row with all rules.
pub fn judge(rows: &[Row]) -> Vec<Judged> {
    rows.iter().map(|row| judge_row(row, Judge::new(row.conditions))).collect()
}

fn judge_row(row: &Row, judge: Judge) -> Judged {
    let read = read::read(&row.sketch);
    let report = judge.package(&row.id, &read.facts, false);
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
        probability: report.probability,
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
        accuracy: (!decided.is_empty()).then(|| share(right, decided.len())),
        unknown,
        unknown_share: if labelled.is_empty() { 0.0 } else { share(unknown, labelled.len()) },
        majority: majority(&mut labelled.iter().map(|(t, _)| *t)),
        majority_of_decided: majority(&mut decided.iter().map(|(t, _)| *t)),
        rebuilt: labelled.iter().filter(|(_, j)| j.rebuilt).count(),
        forced: share(
            labelled.iter().filter(|(t, j)| (j.probability >= 0.5) == (*t == Verdict::Ane)).count(),
            labelled.len(),
        ),
        brier: mean(labelled.iter().map(|(t, j)| (j.probability - f64::from(*t == Verdict::Ane)).powi(2))),
    }
}

/// The mean; 0 of nothing.
fn mean(values: impl Iterator<Item = f64>) -> f64 {
    let (n, sum) = values.fold((0usize, 0.0), |(n, sum), v| (n + 1, sum + v));
    if n == 0 { 0.0 } else { sum / n as f64 }
}

/// Rows judged by what other projects know about them.
#[derive(Clone, Debug, PartialEq, Serialize)]
pub struct LeftOut {
    /// All of them.
    pub all: Score,
    /// Score of each project's rows.
    pub projects: BTreeMap<String, Score>,
}

/// Judges the rows of each project without what that project found: its outcomes are not fitted, and rules that rest on it alone
/// do not apply. (A threshold that several projects support stays as it is.)
pub fn leave_out_projects(rows: &[Row], design: Design) -> LeftOut {
    let known = prepare(&published::parse(KNOWN).unwrap_or_default());
    let projects: BTreeSet<&str> = rows.iter().map(|r| r.project.as_str()).collect();
    let judge_project = |project: &&str| {
        let predictor = Arc::new(Predictor::fit(design, &known, Some(project)));
        let own: Vec<Row> = rows.iter().filter(|r| r.project == *project).cloned().collect();
        let judged: Vec<Judged> = own
            .iter()
            .map(|row| {
                let rules = rules::all().filter(|r| r.stands_without(project));
                judge_row(row, Judge::with_rules(row.conditions, rules, predictor.clone()))
            })
            .collect();
        (project.to_string(), own, judged)
    };
    let parts: Vec<(String, Vec<Row>, Vec<Judged>)> = projects.par_iter().map(judge_project).collect();
    let all_rows: Vec<Row> = parts.iter().flat_map(|p| p.1.clone()).collect();
    let all: Vec<Judged> = parts.iter().flat_map(|p| p.2.clone()).collect();
    LeftOut {
        all: score(&all_rows, &all),
        projects: parts.into_iter().map(|(name, own, judged)| (name, score(&own, &judged))).collect(),
    }
}

#[cfg(test)]
mod tests;
