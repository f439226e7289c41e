//! RMS norm of a vector.

use crate::elementwise::{get, put};
use crate::simd::*;

/// Holds the constants of `x / sqrt(max(mean(x^2) + eps + relative_eps * s^2, relative_least * s^2))` with `s = max|x| + floor`.
///
/// `relative_eps`, `relative_least` and `floor` serve norms that first divide by a multiple of s, so that squares fit
/// into fp16.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct RmsNorm {
    /// Added to the mean of squares.
    pub eps: f32,
    /// Added to the mean of squares, times `(max|x| + floor)^2`.
    pub relative_eps: f32,
    /// The least mean of squares, in units of `(max|x| + floor)^2`.
    pub relative_least: f32,
    /// Added to `max|x|`.
    pub floor: f32,
}

#[inline(always)]
fn rms_norm_on<L: F32x16>(x: &[f32], weight: Option<&[f32]>, norm: RmsNorm, out: &mut [f32]) {
    let n = out.len();
    let x = &x[..n];
    let (mut sum, mut largest) = (L::splat(0.0), L::splat(0.0));
    for i in (0..n).step_by(LANES) {
        let v = get::<L>(x, i);
        sum = v.mul_add(v, sum);
        largest = largest.max(v).max(v.mul(L::splat(-1.0)));
    }
    let mut lanes = [0f32; LANES];
    largest.store(&mut lanes);
    let scale = lanes.iter().copied().fold(0f32, f32::max) + norm.floor;
    let mean = sum.horizontal_sum() / n as f32 + norm.eps + norm.relative_eps * scale * scale;
    let mean = mean.max(norm.relative_least * scale * scale);
    // A vector of zeros stays zeros.
    let factor = L::splat(if mean == 0.0 { 0.0 } else { 1.0 / mean.sqrt() });
    for i in (0..n).step_by(LANES) {
        let mut v = get::<L>(x, i).mul(factor);
        if let Some(weight) = weight {
            v = v.mul(get(&weight[..n], i));
        }
        put(out, i, v);
    }
}

simd_fn! {
    /// Computes `out = x / sqrt(mean(x^2) + ..) * weight`, see [`RmsNorm`]; slices are at least as long as `out`.
    ///
    /// # Panics
    /// A slice is shorter than `out`.
    pub fn rms_norm(x: &[f32], weight: Option<&[f32]>, norm: RmsNorm, out: &mut [f32]) = rms_norm_on
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_norm_is_over_the_whole_vector() {
        for n in [1, 15, 16, 37, 256] {
            let x: Vec<f32> = (0..n).map(|i| (i as f32 * 1.3).sin() * 300.0).collect();
            let w: Vec<f32> = (0..n).map(|i| i as f32 * 0.1 - 1.0).collect();
            let mut out = vec![0f32; n];
            let norm = RmsNorm { eps: 1e-6, relative_eps: 0.0, relative_least: 0.0, floor: 0.0 };
            rms_norm(&x, Some(&w), norm, &mut out);
            let mean: f64 = x.iter().map(|v| f64::from(*v).powi(2)).sum::<f64>() / n as f64;
            for i in 0..n {
                let expected = f64::from(x[i]) / (mean + 1e-6).sqrt() * f64::from(w[i]);
                assert!((f64::from(out[i]) - expected).abs() < 1e-5 * expected.abs().max(1.0));
            }
        }
        let mut zero = [1f32; 5];
        rms_norm(
            &[0.0; 5],
            None,
            RmsNorm { eps: 0.0, relative_eps: 0.0, relative_least: 0.0, floor: 0.0 },
            &mut zero,
        );
        assert_eq!(zero, [0.0; 5]);
        // One nonzero element of 1000: the mean of squares lies below `relative_least`, one hundredth.
        let mut x = [0f32; 1000];
        x[3] = 2.0;
        let mut out = [0f32; 1000];
        rms_norm(
            &x,
            None,
            RmsNorm { eps: 0.0, relative_eps: 0.0, relative_least: 0.01, floor: 0.0 },
            &mut out,
        );
        assert_eq!(out[3], 10.0);
    }
}
