//! Predictor of placements, fitted to outcomes.

use super::super::graph::Graph;
use super::super::outcomes::published::{KNOWN, parse};
use super::super::outcomes::row::Row;
use super::super::rule::Conditions;
use super::evidence_sum::EvidenceSum;
use super::features::{self, FEATURES};
use super::logistic::{Logistic, probability};
use super::training::{PreparedOutcome, examples, prepare};
use serde::Serialize;
use std::sync::{Arc, OnceLock};

/// Factor that stretches log-odds. With projects left out, 1 has the lowest Brier score (0.114) and leaves 34 % of the
/// rows undecided. 1.5 costs 0.005 and leaves 26 % (`docs/residency.md`).
const STRETCH: f64 = 1.5;
/// Least magnitude of an influence that is listed, in log-odds.
const LISTED: f64 = 0.1;

/// Design of a predictor: how features are combined.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Design {
    /// Weights of a logistic regression.
    Regression,
    /// Log-odds of each feature on its own, added up.
    EvidenceSum,
}

enum Fitted {
    Regression(Logistic),
    EvidenceSum(EvidenceSum),
}

/// Predictor of the probability that the ANE runs a function.
pub struct Predictor {
    fitted: Fitted,
    /// Probability that the ANE runs a function that a rule speaks against: the error rate of these rules.
    despite_rules: f64,
}

/// Influence of a feature on a probability.
#[derive(Clone, Debug, PartialEq, Serialize)]
pub struct Influence {
    /// Name of the feature.
    pub feature: &'static str,
    /// Meaning of the feature.
    pub text: &'static str,
    /// Value of the feature.
    pub value: f64,
    /// Addend to the log-odds: 1 multiplies the odds by 2.7.
    pub log_odds: f64,
}

impl Predictor {
    /// Returns the predictor that is fitted to the outcomes that anemoe ships; fits it once.
    pub fn known() -> Arc<Predictor> {
        static FITTED: OnceLock<Arc<Predictor>> = OnceLock::new();
        let fit = || {
            let rows = parse(KNOWN).unwrap_or_default();
            Arc::new(Predictor::fit(Design::Regression, &prepare(&rows), None))
        };
        FITTED.get_or_init(fit).clone()
    }

    /// Fits the outcomes that anemoe ships, and `more`.
    pub fn known_and(more: &[Row]) -> Predictor {
        let mut rows = parse(KNOWN).unwrap_or_default();
        rows.extend_from_slice(more);
        Predictor::fit(Design::Regression, &prepare(&rows), None)
    }

    /// Fits outcomes. Outcomes and rules of the project `without` are left out.
    pub fn fit(design: Design, outcomes: &[PreparedOutcome], without: Option<&str>) -> Predictor {
        let (examples, (asked, wrong)) = examples(outcomes, without);
        let fitted = match design {
            Design::Regression => {
                let prior: Vec<f64> = FEATURES.iter().map(|f| f.prior).collect();
                Fitted::Regression(Logistic::fit(&examples, &prior))
            }
            Design::EvidenceSum => Fitted::EvidenceSum(EvidenceSum::fit(&examples)),
        };
        // Laplace's rule: one half without any case.
        Predictor { fitted, despite_rules: (wrong + 1) as f64 / (asked + 2) as f64 }
    }

    /// Returns the probability that the ANE runs a function, and the influences of features. With `ruled_out` (a rule
    /// speaks against the ANE) the probability is at most the error rate of such rules.
    pub fn judge(&self, g: &Graph, c: &Conditions, ruled_out: bool) -> (f64, Vec<Influence>) {
        let values = features::values(g, c);
        let log_odds = match &self.fitted {
            Fitted::Regression(fit) => fit.log_odds(&values),
            Fitted::EvidenceSum(fit) => fit.log_odds(&values),
        };
        let free = probability(STRETCH * log_odds);
        let p = if ruled_out { free.min(self.despite_rules) } else { free };
        (round(p), self.influences(&values))
    }

    fn influences(&self, values: &[f64]) -> Vec<Influence> {
        let Fitted::Regression(fit) = &self.fitted else { return Vec::new() };
        let moved = FEATURES.iter().zip(values).zip(&fit.weights).map(|((f, &value), weight)| Influence {
            feature: f.name,
            text: f.text,
            value: round(value),
            log_odds: round(STRETCH * weight * value),
        });
        let mut moved: Vec<Influence> = moved.filter(|i| i.log_odds.abs() >= LISTED).collect();
        moved.sort_by(|a, b| b.log_odds.abs().total_cmp(&a.log_odds.abs()));
        moved
    }
}

/// Rounds to four digits after the point: more mean nothing, and JSON stays readable.
fn round(x: f64) -> f64 {
    (x * 1e4).round() / 1e4
}
