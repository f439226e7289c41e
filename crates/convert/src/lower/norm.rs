//! RMS normalization that stays inside fp16's range.

use super::Lowering;
use anemoe_mlpackage::Result;
use anemoe_mlpackage::mil::Value;
use anemoe_mlpackage::mil::builder::Var;
use half::f16;

/// Keeps the scale away from zero. It cancels as long as values are not far below it; those of a trained model's stream and
/// heads are not.
const SCALE_FLOOR: f32 = 1.0e-3;
/// `rsqrt` has an epsilon of its own, 0 in fp16 by default. Beside a mean of squares of at least 1/C it has no weight; for a
/// vector of zeros it keeps the result finite.
const RSQRT_EPSILON: f32 = 1.2e-7;

/// `x / sqrt(mean(x^2) + eps)` over one axis.
#[derive(Clone, Copy, Debug)]
pub struct NormShape {
    /// Axis of the mean.
    pub axis: i32,
    /// The model's epsilon; 0 makes this the L2 norm times the square root of the axis' length.
    pub eps: f32,
}

impl Lowering<'_> {
    /// Normalizes `x`, without a weight.
    ///
    /// A square overflows fp16 from 256 on, and the model's epsilon (1e-6) is subnormal there. So `x` is first divided by
    /// s = max|x| + 0.001, which cancels: x / sqrt(mean(x^2) + eps) = (x/s) / sqrt(mean((x/s)^2) + (sqrt(eps)/s)^2).
    pub fn rms_norm(&mut self, name: &str, x: &Var, norm: NormShape) -> Result<Var> {
        let n = |part: &str| format!("{name}_{part}");
        let f = self.f();
        let magnitude = f.abs(&n("abs"), x)?;
        let largest = f.reduce_max(&n("max"), &magnitude, &[norm.axis], true)?;
        let floor = f.constant(&n("floor"), Value::fp16(f16::from_f32(SCALE_FLOOR)))?;
        let scale = f.add(&n("scale"), &largest, &floor)?;
        let scaled = f.real_div(&n("scaled"), x, &scale)?;
        let square = f.mul(&n("square"), &scaled, &scaled)?;
        let mean = f.reduce_mean(&n("mean"), &square, &[norm.axis], true)?;
        if norm.eps == 0.0 {
            let inverse = f.rsqrt(&n("inverse"), &mean, RSQRT_EPSILON)?;
            return f.mul(name, &scaled, &inverse);
        }
        let root_eps = f.constant(&n("root_eps"), Value::fp16(f16::from_f32(norm.eps.sqrt())))?;
        let eps_scaled = f.real_div(&n("eps_scaled"), &root_eps, &scale)?;
        let eps_square = f.mul(&n("eps_square"), &eps_scaled, &eps_scaled)?;
        let variance = f.add(&n("variance"), &mean, &eps_square)?;
        let inverse = f.rsqrt(&n("inverse"), &variance, RSQRT_EPSILON)?;
        f.mul(name, &scaled, &inverse)
    }

    /// Normalizes `x` and multiplies by the stored vector `name_weight`.
    pub fn rms_norm_weighted(&mut self, name: &str, x: &Var, norm: NormShape) -> Result<Var> {
        let normed = self.rms_norm(&format!("{name}_unit"), x, norm)?;
        self.scale_by(name, &normed)
    }

    /// Multiplies by the stored vector `name_weight`.
    pub fn scale_by(&mut self, name: &str, x: &Var) -> Result<Var> {
        let weight = self.vector(&format!("{name}_weight"))?;
        self.f().mul(name, x, &weight)
    }
}
