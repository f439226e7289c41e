//! The fitted predictor.

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

/// Stretches log-odds. By leaving out projects, 1 has the lowest Brier score and 1.3 one that is .003 higher; it decides 4 rows in
/// 100 more, of which nine in ten are right.
const STRETCH: f64 = 1.5;
/// Influences below this are not listed.
const LISTED: f64 = 0.1;

/// A way to put features together.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Design {
    /// Weights of a logistic regression.
    Regression,
    /// Log-odds of each feature by itself, added up.
    EvidenceSum,
}

enum Fitted {
    Regression(Logistic),
    EvidenceSum(EvidenceSum),
}

/// Predictor of the probability that the ANE runs a function.
pub struct Predictor {
    fitted: Fitted,
    /// Probability that the ANE runs what a rule speaks against.
    despite_rules: f64,
}

/// Influence of a feature on a probability.
#[derive(Clone, Debug, PartialEq, Serialize)]
pub struct Influence {
    /// Feature.
    pub feature: &'static str,
    /// Meaning of the feature.
    pub text: &'static str,
    /// Its value.
    pub value: f64,
    /// Addend to the log-odds: 1 makes the odds 2.7 times as good.
    pub log_odds: f64,
}

impl Predictor {
    /// Fitted to the outcomes that anemoe brings, once.
    pub fn known() -> Arc<Predictor> {
        static FITTED: OnceLock<Arc<Predictor>> = OnceLock::new();
        let fit = || {
            let rows = parse(KNOWN).unwrap_or_default();
            Arc::new(Predictor::fit(Design::Regression, &prepare(&rows), None))
        };
        FITTED.get_or_init(fit).clone()
    }

    /// Fits the outcomes that anemoe brings and `more`.
    pub fn known_and(more: &[Row]) -> Predictor {
        let mut rows = parse(KNOWN).unwrap_or_default();
        rows.extend_from_slice(more);
        Predictor::fit(Design::Regression, &prepare(&rows), None)
    }

    /// Fits outcomes, but for those of one project, with the rules that stand without its findings.
    pub fn fit(design: Design, outcomes: &[PreparedOutcome], without: Option<&str>) -> Predictor {
        let (examples, (asked, wrong)) = examples(outcomes, without);
        let fitted = match design {
            Design::Regression => {
                let prior: Vec<f64> = FEATURES.iter().map(|f| f.prior).collect();
                Fitted::Regression(Logistic::fit(&examples, &prior))
            }
            Design::EvidenceSum => Fitted::EvidenceSum(EvidenceSum::fit(&examples)),
        };
        // Laplace's rule: of no case at all one half.
        Predictor { fitted, despite_rules: (wrong + 1) as f64 / (asked + 2) as f64 }
    }

    /// The probability that the ANE runs a function, and what moved it. A rule that speaks against it lets only its record stand.
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

/// Rounds to four digits: more say nothing, and JSON stays readable.
fn round(x: f64) -> f64 {
    (x * 1e4).round() / 1e4
}
