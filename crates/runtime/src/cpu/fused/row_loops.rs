//! Computes results row by row: each row of a result is computed by itself, on any thread.
//!
//! `rows` has the first element of each row in the result and in each operand, and the distance to the next row.

use super::super::strided::StridedLoops;
use anemoe_kernels::{GateFunction, Pool, RmsNorm};

/// Joins rows of `n` elements of the halves of gated MLPs.
pub(super) fn apply_gates(
    pool: &Pool,
    (rows, n): (&StridedLoops<3>, usize),
    (gate, up): (&[f32], &[f32]),
    function: GateFunction,
    y: &mut [f32],
) {
    rows.split(pool, y, n, &|rows, y| {
        rows.each(|[o, a, b], m, s| {
            for i in 0..m {
                let (o, a, b) = (o + i * s[0], a + i * s[1], b + i * s[2]);
                anemoe_kernels::apply_gate(&gate[a..a + n], &up[b..b + n], 1.0, function, &mut y[o..o + n]);
            }
        });
    });
}

/// Computes the norm of rows of `n` elements.
pub(super) fn norms(
    pool: &Pool,
    (rows, n): (&StridedLoops<2>, usize),
    x: &[f32],
    weight: Option<&[f32]>,
    norm: RmsNorm,
    y: &mut [f32],
) {
    rows.split(pool, y, n, &|rows, y| {
        rows.each(|[o, a], m, s| {
            for i in 0..m {
                let (o, a) = (o + i * s[0], a + i * s[1]);
                anemoe_kernels::rms_norm(&x[a..a + n], weight, norm, &mut y[o..o + n]);
            }
        });
    });
}

/// Turns the pairs (k, k + `half`) of rows of `n` elements by the angles, and multiplies by `factor`; the table of sines
/// holds the signs. Elements from `2 half` on have no partner.
pub(super) fn rotate(
    pool: &Pool,
    (rows, n): (&StridedLoops<4>, usize),
    (half, factor): (usize, f32),
    x: &[f32],
    (cos, sin): (&[f32], &[f32]),
    y: &mut [f32],
) {
    rows.split(pool, y, n, &|rows, y| {
        rows.each(|[o, a, c, s], m, step| {
            for i in 0..m {
                let y = &mut y[o + i * step[0]..][..n];
                let x = &x[a + i * step[1]..][..n];
                let (cos, sin) = (&cos[c + i * step[2]..][..n], &sin[s + i * step[3]..][..n]);
                for k in 0..half {
                    y[k] = (x[k] * cos[k] + x[half + k] * sin[k]) * factor;
                }
                for k in half..2 * half {
                    y[k] = (x[k] * cos[k] + x[k - half] * sin[k]) * factor;
                }
                for k in 2 * half..n {
                    y[k] = (x[k] * cos[k] + x[k] * sin[k]) * factor;
                }
            }
        });
    });
}

/// Computes the softmax of rows of `n` elements, which lie `step` apart in `x`.
pub(super) fn softmax(
    pool: &Pool,
    (rows, n): (&StridedLoops<2>, usize),
    step: usize,
    x: &[f32],
    y: &mut [f32],
) {
    rows.split(pool, y, n, &|rows, y| {
        rows.each(|[o, a], m, s| {
            for i in 0..m {
                let (x, y) = (&x[a + i * s[1]..], &mut y[o + i * s[0]..][..n]);
                match step {
                    1 => y.copy_from_slice(&x[..n]),
                    step => y.iter_mut().enumerate().for_each(|(k, y)| *y = x[k * step]),
                }
                let sum = anemoe_kernels::exp_and_sum_from(y, anemoe_kernels::largest_element(y));
                y.iter_mut().for_each(|y| *y /= sum);
            }
        });
    });
}
