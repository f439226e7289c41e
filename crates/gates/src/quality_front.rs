//! Compares models by bytes and quality.

use anemoe_bundle::Chain;
use anemoe_bundle::journal::Event;
use serde::Serialize;

/// Bytes and quality of a bundle, or of a whole model with one kind.
#[derive(Clone, Debug, PartialEq, Serialize)]
pub struct QualityPoint {
    /// Name of the bundle or the kind.
    pub name: String,
    /// Bytes of the packages.
    pub bytes: u64,
    /// Lowest cosine of the logits.
    pub min_cosine: f64,
    /// True if it was measured while kinds were chosen, on matrices alone.
    pub is_search: bool,
    /// True if no other point of the same sort is smaller and better.
    pub is_best: bool,
}

impl QualityPoint {
    /// Lists the points that a search measured: whole models of one kind, and the chosen model.
    pub fn of_search(chain: &Chain) -> Vec<QualityPoint> {
        let Some(auto) = &chain.auto else { return Vec::new() };
        let chosen = auto.min_cosine.map(|cosine| QualityPoint::new("auto", auto.bytes, cosine, true));
        let uniform = auto.uniform.iter().map(|u| QualityPoint::new(&u.kind, u.bytes, u.min_cosine, true));
        uniform.chain(chosen).collect()
    }

    /// Finds the bytes of a bundle, and the newest lowest cosine of its logits. Returns `None` if none was measured.
    pub fn of_bundle(name: &str, chain: &Chain, events: &[Event]) -> Option<QualityPoint> {
        let measured = |e: &Event| {
            let is_golden = e.kind == "validate" || e.facts.get("stage")? == "full_stack golden";
            e.facts.get("min_cosine").filter(|_| is_golden)?.as_f64()
        };
        let min_cosine = events.iter().rev().find_map(measured)?;
        Some(QualityPoint::new(name, chain.shards.iter().map(|s| s.bytes).sum(), min_cosine, false))
    }

    fn new(name: &str, bytes: u64, min_cosine: f64, is_search: bool) -> QualityPoint {
        QualityPoint { name: name.into(), bytes, min_cosine, is_search, is_best: false }
    }

    /// Tells whether this point is at least as small and as good as another one of its sort, and not equal to it.
    fn beats(&self, other: &QualityPoint) -> bool {
        self.is_search == other.is_search
            && self.bytes <= other.bytes
            && self.min_cosine >= other.min_cosine
            && (self.bytes < other.bytes || self.min_cosine > other.min_cosine)
    }
}

/// Marks the points that no other point of their sort beats in size and quality.
pub fn mark_best(points: &mut [QualityPoint]) {
    let all = points.to_vec();
    points.iter_mut().for_each(|p| p.is_best = !all.iter().any(|q| q.beats(p)));
}

#[cfg(test)]
mod tests {
    use super::{QualityPoint, mark_best};

    #[test]
    fn the_best_points_are_those_that_nothing_beats() {
        let mut all = [
            QualityPoint::new("small", 1, 0.9, true),
            QualityPoint::new("worse", 2, 0.8, true),
            QualityPoint::new("large", 3, 0.99, true),
            QualityPoint::new("other sort", 9, 0.1, false),
        ];
        mark_best(&mut all);
        assert_eq!(all.each_ref().map(|p| p.is_best), [true, false, true, true]);
    }
}
