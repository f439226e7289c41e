//! A router inside a shard: top-1 choice by arithmetic alone.

use super::{Lowering, TRIANGLE};
use anemoe_mlpackage::Result;
use anemoe_mlpackage::mil::builder::Var;

/// Units of gap per best score. Scores count as equal up to a gap of best / 2048, and as different from twice that
/// on. Half a step of fp16 is at most best / 2048: so much a score may differ where one reader sees it rounded and
/// another does not.
const GAPS: f32 = 2048.0;
/// Least magnitude of the best score in the unit of gaps.
const LEAST_SCORE: f32 = 1.0e-3;

impl Lowering<'_> {
    /// Computes the probability of each token's choice, and zero for all other classes. `probabilities` and the
    /// result are `[1, classes, 1, T]`. The choice is the class with the largest probability plus the stored vector
    /// `bias`, the first of equals.
    ///
    /// The program has no `topk`, comparisons or casts. How far a class is *equal* to the best follows from its gap
    /// g, in units of best / 2048:
    ///
    /// ```text
    /// equal = 1 - relu(g - 1), at least 0      1 up to g = 1, 0 from g = 2 on
    /// left  = 1 - sum of equal before it, at least 0
    /// first = min(equal, left)                 adds up to 1, since the best class is equal to itself
    /// ```
    /// A gap of exactly zero is not required. A backend may fuse the sum into one reader and round it for another:
    /// then the best score may miss itself by half a step of fp16, and no class would be chosen. The price: of two
    /// classes whose scores are neighbours in fp16, the first gets a part of the choice.
    pub fn top_1(&mut self, name: &str, probabilities: &Var, bias: &str, classes: usize) -> Result<Var> {
        let n = |part: &str| format!("{name}_{part}");
        let t = self.tokens_or_inferred();
        let bias = self.vector(bias)?;
        let gaps = self.scalar(&n("gaps"), GAPS)?;
        let one = self.scalar(&n("one"), 1.0)?;
        let least = self.scalar(&n("least"), LEAST_SCORE)?;
        let triangle = self.stored.vector(TRIANGLE)?;
        let f = self.f();
        let score = f.add(&n("score"), probabilities, &bias)?;
        let best = f.reduce_max(&n("best"), &score, &[1], true)?;
        let gap = f.sub(&n("gap"), &best, &score)?;
        let magnitude = f.abs(&n("magnitude"), &best)?;
        let unit = f.maximum(&n("unit"), &magnitude, &least)?;
        let relative = f.real_div(&n("relative"), &gap, &unit)?;
        let steps = f.mul(&n("steps"), &relative, &gaps)?;
        let beyond = f.sub(&n("beyond"), &steps, &one)?;
        let beyond = f.relu(&n("beyond_positive"), &beyond)?;
        let equal = f.sub(&n("equal_raw"), &one, &beyond)?;
        let equal = f.relu(&n("equal"), &equal)?;
        // [1, classes, 1, T] as a matrix [classes, T].
        let matrix = f.reshape(&n("equal_matrix"), &equal, &[1, 1, classes as i32, t])?;
        let triangle = f.constant(&n("triangle"), triangle)?;
        let before = f.matmul(&n("before"), &triangle, &matrix, false, false)?;
        let before = f.reshape(&n("before_classes"), &before, &[1, classes as i32, 1, t])?;
        let left = f.sub(&n("left_raw"), &one, &before)?;
        let left = f.relu(&n("left"), &left)?;
        let first = f.minimum(&n("first"), &equal, &left)?;
        f.mul(name, probabilities, &first)
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use half::f16;
    use proptest::prelude::*;

    fn rounded(v: f32) -> f32 {
        f16::from_f32(v).to_f32()
    }

    /// Computes each class's part of the choice as the program does, where `score` is rounded for the maximum and, if
    /// `fused`, not for the difference.
    fn choose(scores: &[f32], fused: bool) -> Vec<f32> {
        let best = scores.iter().copied().map(rounded).fold(f32::NEG_INFINITY, f32::max);
        let unit = rounded(best.abs().max(rounded(LEAST_SCORE)));
        let mut before = 0.0;
        let each = scores.iter().map(|&s| {
            let gap = rounded(best - if fused { s } else { rounded(s) });
            let steps = rounded(rounded(gap / unit) * GAPS);
            let equal = (1.0 - (steps - 1.0).max(0.0)).max(0.0);
            let first = equal.min((1.0f32 - before).max(0.0));
            before += equal;
            first
        });
        each.collect()
    }

    proptest! {
        /// Checks that the choice is whole where one reader sees a score rounded and another does not, and that only
        /// classes within two thousandths of the best have a part of it.
        #[test]
        fn a_choice_does_not_hang_on_a_gap_of_zero(scores in prop::collection::vec(0.0f32..1.0, 2..18), fused: bool) {
            let choice = choose(&scores, fused);
            let largest = scores.iter().copied().fold(0.0, f32::max);
            let near: Vec<usize> = (0..scores.len()).filter(|&i| scores[i] > largest * 0.998 - 1e-6).collect();
            let sum: f32 = choice.iter().sum();
            prop_assert!((sum - 1.0).abs() < 1e-3, "{sum}");
            prop_assert!((0..scores.len()).all(|i| choice[i] == 0.0 || near.contains(&i)), "{choice:?} of {scores:?}");
        }
    }
}
