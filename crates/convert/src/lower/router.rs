//! A router inside a shard: top-1 choice by arithmetic alone.

use super::Lowering;
use anemoe_mlpackage::Result;
use anemoe_mlpackage::mil::Value;
use anemoe_mlpackage::mil::builder::Var;
use half::f16;

/// Turns a positive gap of two fp16 scores into at least 1 in two steps: the least one is 2^-24, and 2^28 of it are 16. A
/// single factor would overflow fp16 on the largest gap (below 4).
const STEEP: f32 = 16_384.0;

impl Lowering<'_> {
    /// The probability of each token's choice, and zero for all other classes: `probabilities` and the result are
    /// `[1, classes, 1, T]`. The choice is the class with the largest probability plus the stored vector `bias`, the first
    /// of equals.
    ///
    /// Neither `topk`, comparisons nor casts: a gap of zero is told from any other by `relu(1 - gap * 2^14)`, taken twice;
    /// of equals the first is the one before which there is none, counted by a product with a triangle of ones. Sums,
    /// products and relu are elementwise ops of fp16, exact on 0 and 1.
    pub fn top_1(&mut self, name: &str, probabilities: &Var, bias: &str, classes: usize) -> Result<Var> {
        let n = |part: &str| format!("{name}_{part}");
        let t = self.tokens_or_inferred();
        let bias = self.vector(bias)?;
        let steep = self.scalar(&n("steep"), STEEP)?;
        let one = self.scalar(&n("one"), 1.0)?;
        let triangle: Vec<f16> = (0..classes * classes)
            .map(|i| if i % classes < i / classes { f16::ONE } else { f16::ZERO })
            .collect();
        let size = classes as u64;
        let f = self.f();
        let score = f.add(&n("score"), probabilities, &bias)?;
        let best = f.reduce_max(&n("best"), &score, &[1], true)?;
        let gap = f.sub(&n("gap"), &best, &score)?;
        let far = f.mul(&n("far"), &gap, &steep)?;
        let near = f.sub(&n("near"), &one, &far)?;
        let near = f.relu(&n("near_positive"), &near)?;
        let off = f.sub(&n("off"), &one, &near)?;
        let far = f.mul(&n("off_far"), &off, &steep)?;
        let equal = f.sub(&n("equal_raw"), &one, &far)?;
        let equal = f.relu(&n("equal"), &equal)?;
        // [1, classes, 1, T] as a matrix [classes, T].
        let matrix = f.reshape(&n("equal_matrix"), &equal, &[1, 1, classes as i32, t])?;
        let triangle = f.constant(&n("triangle"), Value::fp16_tensor(&[1, 1, size, size], &triangle))?;
        let before = f.matmul(&n("before"), &triangle, &matrix, false, false)?;
        let before = f.reshape(&n("before_classes"), &before, &[1, classes as i32, 1, t])?;
        let first = f.sub(&n("first_raw"), &equal, &before)?;
        let first = f.relu(&n("first"), &first)?;
        f.mul(name, probabilities, &first)
    }
}
