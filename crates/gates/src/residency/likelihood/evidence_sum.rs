//! Evidence sum: cuts each feature into low, middle and high, and adds the log-odds of the examples in each part.
//!
//! This design was tried and is not used. The tests compare it with the regression by leaving out projects.

use super::logistic::Example;

/// Value up to which a feature is low, and value from which on it is high.
const CUTS: (f64, f64) = (-0.5, 0.5);
/// Examples that are added to every part before counting.
const PRIOR: f64 = 1.0;

/// Log-odds of the parts of each feature.
#[derive(Clone, Debug, Default, PartialEq)]
pub struct EvidenceSum {
    offset: f64,
    parts: Vec<[f64; 3]>,
}

fn part(value: f64) -> usize {
    usize::from(value > CUTS.0) + usize::from(value >= CUTS.1)
}

impl EvidenceSum {
    /// Fits the log-odds by counting weighted examples.
    pub fn fit(examples: &[Example]) -> EvidenceSum {
        let features = examples.first().map_or(0, |e| e.values.len());
        let count = |wanted: &dyn Fn(&Example) -> bool| -> f64 {
            examples.iter().filter(|e| wanted(e)).map(|e| e.weight).sum()
        };
        let totals = [count(&|e| !e.ane), count(&|e| e.ane)];
        let share = |n: f64, all: f64| libm::log((n + PRIOR) / (all + 3.0 * PRIOR));
        let parts = (0..features)
            .map(|j| {
                [0, 1, 2].map(|p| {
                    let of = |ane: bool| count(&|e| e.ane == ane && part(e.values[j]) == p);
                    share(of(true), totals[1]) - share(of(false), totals[0])
                })
            })
            .collect();
        EvidenceSum { offset: libm::log((totals[1] + PRIOR) / (totals[0] + PRIOR)), parts }
    }

    /// Computes the log-odds that the ANE runs a graph.
    pub fn log_odds(&self, values: &[f64]) -> f64 {
        self.offset + self.parts.iter().zip(values).map(|(p, &x)| p[part(x)]).sum::<f64>()
    }
}
