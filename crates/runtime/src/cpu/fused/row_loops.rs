//! Computes results row by row: each row of a result is computed by itself, on any thread.
//!
//! `rows` has the first element of each row in the result and in each operand, and the distance to the next row.

use super::super::strided::StridedLoops;
use anemoe_kernels::{GateFunction, Pool, RmsNorm};

/// Calls `f` with each row of the result, `n` elements, and the first element of the row in each operand.
fn each_row<const N: usize>(
    pool: &Pool,
    (rows, n): (&StridedLoops<N>, usize),
    y: &mut [f32],
    f: impl Fn(&mut [f32], [usize; N]) + Sync,
) {
    rows.split(pool, y, n, &|rows, y| rows.each_element(|at| f(&mut y[at[0]..][..n], at)));
}

/// Joins rows of `n` elements of the halves of gated MLPs.
pub(super) fn apply_gates(
    pool: &Pool,
    (rows, n): (&StridedLoops<3>, usize),
    (gate, up): (&[f32], &[f32]),
    function: GateFunction,
    y: &mut [f32],
) {
    each_row(pool, (rows, n), y, |y, [_, a, b]| {
        anemoe_kernels::apply_gate(&gate[a..a + n], &up[b..b + n], 1.0, function, y);
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
    each_row(pool, (rows, n), y, |y, [_, a]| anemoe_kernels::rms_norm(&x[a..a + n], weight, norm, y));
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
    each_row(pool, (rows, n), y, |y, [_, a, c, s]| {
        let (x, cos, sin) = (&x[a..][..n], &cos[c..][..n], &sin[s..][..n]);
        for k in 0..half {
            y[k] = (x[k] * cos[k] + x[half + k] * sin[k]) * factor;
        }
        for k in half..2 * half {
            y[k] = (x[k] * cos[k] + x[k - half] * sin[k]) * factor;
        }
        for k in 2 * half..n {
            y[k] = (x[k] * cos[k] + x[k] * sin[k]) * factor;
        }
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
    each_row(pool, (rows, n), y, |y, [_, a]| {
        match step {
            1 => y.copy_from_slice(&x[a..a + n]),
            step => y.iter_mut().enumerate().for_each(|(k, y)| *y = x[a + k * step]),
        }
        let sum = anemoe_kernels::exp_and_sum_from(y, anemoe_kernels::largest_element(y));
        y.iter_mut().for_each(|y| *y /= sum);
    });
}
