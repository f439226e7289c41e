//! Cosines of a shard's results with and without the residual stream: the stream dominates the sum, and hides an
//! error of the branch.

use crate::golden_gate::cosine;
use serde::Serialize;

/// Cosines over the positions of a shard's probes.
#[derive(Clone, Copy, Debug, PartialEq, Serialize)]
pub struct CosineRange {
    /// Lowest cosine.
    pub min_cosine: f64,
    /// Mean cosine.
    pub mean_cosine: f64,
}

/// Cosines of one kind, by position.
#[derive(Debug, Default)]
pub(super) struct Cosines(Vec<f64>);

impl Cosines {
    /// Returns the range of the cosines; `None` without positions.
    pub fn range(&self) -> Option<CosineRange> {
        let min_cosine = self.0.iter().copied().reduce(f64::min)?;
        Some(CosineRange { min_cosine, mean_cosine: self.0.iter().sum::<f64>() / self.0.len() as f64 })
    }
}

/// Cosines of a layer's branch alone, and of the residual stream with the branch added.
#[derive(Debug, Default)]
pub(super) struct BothCosines {
    pub branch: Cosines,
    pub with_residual: Cosines,
}

impl BothCosines {
    /// Adds a position, and returns the branch's cosine and the stream's. `expected` and `own` are the values of
    /// register `output` in the FP16 form and in the shard; `hidden` is the stream before. Returns `None` where the
    /// results are no vectors of the stream's width, or the FP16 form gives zeros.
    pub fn add(&mut self, output: &str, hidden: &[f32], expected: &[f32], own: &[f32]) -> Option<[f64; 2]> {
        if expected.len() != hidden.len() || own.len() != hidden.len() || expected.iter().all(|&v| v == 0.0) {
            return None;
        }
        let moved =
            |v: &[f32], sign: f32| -> Vec<f32> { v.iter().zip(hidden).map(|(v, h)| v + sign * h).collect() };
        // A shard that writes `hidden` has added its branch already.
        let (branch, with_residual) = if output == "hidden" {
            (cosine(&moved(own, -1.0), &moved(expected, -1.0)), cosine(own, expected))
        } else {
            (cosine(own, expected), cosine(&moved(own, 1.0), &moved(expected, 1.0)))
        };
        self.branch.0.push(branch);
        self.with_residual.0.push(with_residual);
        Some([branch, with_residual])
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_stream_hides_an_error_of_the_branch() {
        let (hidden, expected, own) = ([3.0, 4.0], [0.1, 0.0], [0.0, 0.1]);
        let mut both = BothCosines::default();
        both.add("mlp_out", &hidden, &expected, &own);
        let stream = |v: [f32; 2]| [hidden[0] + v[0], hidden[1] + v[1]];
        both.add("hidden", &hidden, &stream(expected), &stream(own));
        // Skipped: the router's logits, and a pack that no token chose.
        both.add("logits", &hidden, &[1.0], &[1.0]);
        both.add("mlp_out", &hidden, &[0.0, 0.0], &[0.0, 0.0]);
        let (branch, with) = (both.branch.range().unwrap(), both.with_residual.range().unwrap());
        assert_eq!(both.branch.0.len(), 2);
        assert!(branch.mean_cosine.abs() < 1e-5, "{branch:?}");
        assert!(with.min_cosine > 0.999, "{with:?}");
        assert_eq!(Cosines::default().range(), None);
    }
}
