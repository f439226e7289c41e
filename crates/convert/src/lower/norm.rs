//! RMS normalization that stays inside fp16's range.

use super::Lowering;
use crate::form::NormForm;
use anemoe_mlpackage::Result;
use anemoe_mlpackage::mil::Value;
use anemoe_mlpackage::mil::builder::Var;
use half::f16;

/// Number added to the scale, which must not be zero. It cancels unless the values are far below it; those of a
/// trained model's stream and heads are not.
const SCALE_FLOOR: f32 = 1.0e-3;
/// Least mean of squares. A vector with one element besides zeros has a larger mean (4 / 16375 for the widest that is
/// scaled by 2), so only vectors of zeros are below. It is a normal number of fp16: it holds where subnormal ones are
/// flushed.
const LEAST_MEAN: f32 = 1.0e-4;
/// Largest finite value of fp16.
const F16_MAX: u64 = 65_504;

/// Returns the factor `f` for a vector of `width` elements whose largest is 1, before its squares are summed: the
/// largest of 4, 2 and 1 with `f * f * width < 65504`, so that few squares are subnormal.
fn enlargement(width: u64) -> f32 {
    [4u64, 2].into_iter().find(|f| f * f * width < F16_MAX).unwrap_or(1) as f32
}

/// RMS norm `x / sqrt(mean(x^2) + eps)` over one axis.
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
    /// A square overflows fp16 from 256 on, and the model's epsilon (1e-6) is subnormal in fp16. So `x` is first
    /// divided by `s = max|x| / f + 0.001`, which cancels; f is 4, 2 or 1, see `enlargement`:
    ///
    /// ```text
    /// x / sqrt(mean(x^2) + eps) = (x/s) / sqrt(max(mean((x/s)^2) + (sqrt(eps)/s)^2, 1e-4))
    /// ```
    pub fn rms_norm(&mut self, name: &str, x: &Var, norm: NormShape) -> Result<Var> {
        let n = |part: &str| format!("{name}_{part}");
        if self.form.norm == NormForm::Plain {
            return self.rms_norm_plain(name, x, norm);
        }
        let axis = usize::try_from(norm.axis).unwrap_or(usize::MAX);
        let width = x.dims().get(axis).and_then(|d| d.fixed()).unwrap_or(u64::MAX >> 8);
        let f = self.f();
        let least = f.constant(&n("least"), Value::fp16(f16::from_f32(LEAST_MEAN)))?;
        let magnitude = f.abs(&n("abs"), x)?;
        let largest = f.reduce_max(&n("max"), &magnitude, &[norm.axis], true)?;
        let floor = f.constant(&n("floor"), Value::fp16(f16::from_f32(SCALE_FLOOR)))?;
        let part = f.constant(&n("part"), Value::fp16(f16::from_f32(1.0 / enlargement(width))))?;
        let largest = f.mul(&n("max_part"), &largest, &part)?;
        let scale = f.add(&n("scale"), &largest, &floor)?;
        let scaled = f.real_div(&n("scaled"), x, &scale)?;
        let square = f.mul(&n("square"), &scaled, &scaled)?;
        let mean = f.reduce_mean(&n("mean"), &square, &[norm.axis], true)?;
        if norm.eps == 0.0 {
            let mean = f.maximum(&n("mean_floored"), &mean, &least)?;
            let inverse = f.rsqrt(&n("inverse"), &mean, 0.0)?;
            return f.mul(name, &scaled, &inverse);
        }
        let root_eps = f.constant(&n("root_eps"), Value::fp16(f16::from_f32(norm.eps.sqrt())))?;
        let eps_scaled = f.real_div(&n("eps_scaled"), &root_eps, &scale)?;
        let eps_square = f.mul(&n("eps_square"), &eps_scaled, &eps_scaled)?;
        let variance = f.add(&n("variance"), &mean, &eps_square)?;
        let variance = f.maximum(&n("variance_floored"), &variance, &least)?;
        let inverse = f.rsqrt(&n("inverse"), &variance, 0.0)?;
        f.mul(name, &scaled, &inverse)
    }

    /// Normalizes `x` without dividing it first: `x rsqrt(mean(x^2) + eps)`, infinite in fp16 from 256 on.
    fn rms_norm_plain(&mut self, name: &str, x: &Var, norm: NormShape) -> Result<Var> {
        let n = |part: &str| format!("{name}_{part}");
        let f = self.f();
        let square = f.mul(&n("square"), x, x)?;
        let mean = f.reduce_mean(&n("mean"), &square, &[norm.axis], true)?;
        // The epsilon is at least the smallest number of fp16, so that a vector of zeros does not become 0 times
        // infinity.
        let eps = f.constant(&n("eps"), Value::fp16(f16::from_f32(norm.eps).max(f16::from_bits(1))))?;
        let variance = f.add(&n("variance"), &mean, &eps)?;
        let inverse = f.rsqrt(&n("inverse"), &variance, 0.0)?;
        f.mul(name, x, &inverse)
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

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn sums_of_squares_stay_in_fp16() {
        for (width, factor) in
            [(128, 4.0), (2816, 4.0), (4093, 4.0), (4094, 2.0), (16_375, 2.0), (20_000, 1.0)]
        {
            assert_eq!(enlargement(width), factor, "{width}");
            assert!(factor * factor * (width as f32) < F16_MAX as f32);
            assert!(factor * factor / width as f32 > LEAST_MEAN || width > 16_375);
        }
    }
}
