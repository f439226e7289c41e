//! Scores predictions on published outcomes: a table of measured graphs, with their outcomes.
//!
//! A row is judged by the facts of its graph. Its label is compared with the verdict, and its project is left out by
//! [`leave_out_projects`].

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

/// Row with its prediction.
#[derive(Clone, Debug, PartialEq, Serialize)]
pub struct Judged {
    /// Id of the row.
    pub id: String,
    /// Model and part, in words.
    pub model: String,
    /// Label of the row: where the graph ran, or how it failed.
    pub label: String,
    /// Predicted verdict.
    pub verdict: Verdict,
    /// Probability that the ANE runs the graph.
    pub probability: f64,
    /// True if a decided prediction agrees with the label; `None` for `unknown`, or a label without an outcome.
    pub right: Option<bool>,
    /// True if the row states enough to be rebuilt as a program.
    pub rebuilt: bool,
    /// Ids of the rules that decided.
    pub rules: Vec<&'static str>,
}

/// Score of the predictions over a table.
#[derive(Clone, Debug, PartialEq, Serialize)]
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
    /// Share of the more frequent truth among all rows: the score of a constant answer.
    pub majority: f64,
    /// Share of the more frequent truth among the decided rows.
    pub majority_of_decided: f64,
    /// Number of rows that were rebuilt as programs.
    pub rebuilt: usize,
    /// Share of rows whose probability is on the right side of one half: the accuracy if every row has to be decided.
    pub forced: f64,
    /// Brier score, the mean of `(probability - truth)^2`: 0 is perfect, 0.25 is the score of always one half.
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

/// Computes the score of judged rows.
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

/// Computes the mean; 0 without values.
fn mean(values: impl Iterator<Item = f64>) -> f64 {
    let (n, sum) = values.fold((0usize, 0.0), |(n, sum), v| (n + 1, sum + v));
    if n == 0 { 0.0 } else { sum / n as f64 }
}

/// Scores of rows that are judged without their own project's findings.
#[derive(Clone, Debug, PartialEq, Serialize)]
pub struct LeftOut {
    /// Score of all rows.
    pub all: Score,
    /// Score of each project's rows.
    pub projects: BTreeMap<String, Score>,
}

/// Judges the rows of each project without that project's findings: its outcomes are not fitted, and rules without
/// other evidence do not apply. (A threshold that several projects support stays as it is.)
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
