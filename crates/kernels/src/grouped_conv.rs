//! Grouped convolution: each group of rows times columns of its own.

use crate::activations::{Columns, PackedActivations};
use crate::matmul::{MatMul, OutputRows, PARALLEL, RowTiles, TokenSelection, matmul_batch, multiply_rows};
use crate::memory::{CacheLevel, prefetch};
use crate::{Isa, Matrix, Pool};
use std::cell::RefCell;
use std::ops::Range;

/// Bytes of a group's weights that are prefetched at once, at most: half of an L1 cache of 32 KB.
const NEAR_BYTES: usize = 16 << 10;

/// Describes a grouped convolution: equal groups of rows of `w`, each times columns of its own.
#[derive(Debug)]
pub struct GroupedConv<'a> {
    /// Weights `[rows, cols]`.
    pub w: Matrix<'a>,
    /// Groups of rows.
    pub groups: usize,
    /// Columns of the first group.
    pub x: Columns<'a>,
    /// Elements from group to group of x.
    pub group_stride: usize,
    /// Tokens.
    pub tokens: usize,
    /// Channels of a group, and taps; the taps of a channel are contiguous in `w`.
    pub cols: (usize, usize),
    /// Elements from tap to tap of x.
    pub tap_stride: usize,
    /// Result `[tokens, rows]`.
    pub y: &'a mut [f32],
    /// Bias `[rows]`.
    pub bias: Option<&'a [f32]>,
}

thread_local! {
    static GROUP: RefCell<PackedActivations> = RefCell::default();
}

/// Computes the matmul of each group.
///
/// # Panics
/// Lengths do not fit.
pub fn grouped_conv(pool: &Pool, p: &mut GroupedConv<'_>) {
    let w = p.w;
    assert!(p.groups > 0 && w.rows.is_multiple_of(p.groups), "rows in groups");
    assert!(p.cols.0 * p.cols.1 == w.cols, "columns of w");
    assert!(
        p.y.len() >= p.tokens * w.rows && p.bias.is_none_or(|b| b.len() == w.rows),
        "y and a bias per row"
    );
    let per = w.rows / p.groups;
    if p.tokens == 0 || w.rows == 0 {
        return;
    }
    if p.groups < pool.threads() {
        // With fewer groups than threads, threads share the rows of a group.
        let mut panel = GROUP.take();
        for g in 0..p.groups {
            let w = w.row_range(g * per, (g + 1) * per);
            let x = Columns { first: p.x.first + g * p.group_stride, ..p.x };
            panel.pack_taps(pool, w.layout(), x, p.tokens, p.cols, p.tap_stride);
            let bias = p.bias.map(|b| &b[g * per..(g + 1) * per]);
            let (y, stride) = (&mut p.y[g * per..], p.w.rows);
            matmul_batch(pool, &mut [Some(MatMul { w, x: &panel, tokens: None, y, stride, bias })]);
        }
        GROUP.set(panel);
        return;
    }
    let isa = Isa::best();
    struct To(*mut f32);
    // SAFETY: groups write disjoint rows.
    unsafe impl Sync for To {}
    let to = To(p.y.as_mut_ptr());
    let p = &*p;
    let some = |groups: Range<usize>| {
        let to = &to;
        let mut panel = GROUP.take();
        for g in groups {
            let group = w.row_range(g * per, (g + 1) * per);
            // Weights arrive while the tokens are packed.
            let stored = group.stored();
            prefetch(CacheLevel::L1, stored.as_ptr(), stored.len().min(NEAR_BYTES));
            let x = Columns { first: p.x.first + g * p.group_stride, ..p.x };
            panel.pack_taps(pool, group.layout(), x, p.tokens, p.cols, p.tap_stride);
            let bias = p.bias.map(|b| &b[g * per..(g + 1) * per]);
            // SAFETY: token t's rows of the group are below `tokens * rows`.
            let y = OutputRows { y: unsafe { to.0.add(g * per) }, stride: w.rows, bias };
            multiply_rows(
                isa,
                &group,
                TokenSelection::new(&panel, None),
                &RowTiles::all(&group, p.tokens),
                &y,
            );
        }
        GROUP.set(panel);
    };
    let work = (w.rows * w.cols * p.tokens).max(1);
    if work < PARALLEL {
        return some(0..p.groups);
    }
    // Parts of some microseconds.
    let together = (p.groups * (PARALLEL / 4) / work).max(1);
    pool.run(p.groups.div_ceil(together), &|i| some(i * together..p.groups.min((i + 1) * together)));
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::test_data::noise;

    #[test]
    fn groups_have_their_own_columns() {
        let (groups, per, channels, taps, tokens) = (5, 6, 7, 2, 3);
        let (rows, cols) = (groups * per, channels * taps);
        let dense = noise(1, rows * cols);
        let w = Matrix::f32(&dense, rows, cols).unwrap();
        // [channels of all groups, tokens and the tap before the first]
        let width = tokens + taps - 1;
        let (values, bias) = (noise(2, groups * channels * width), noise(3, rows));
        let run = |threads| {
            let mut y = vec![f32::NAN; tokens * rows];
            let x = Columns { values: &values, first: 0, token_stride: 1, channel_stride: width };
            grouped_conv(
                &Pool::new(threads),
                &mut GroupedConv {
                    w,
                    groups,
                    x,
                    group_stride: channels * width,
                    tokens,
                    cols: (channels, taps),
                    tap_stride: 1,
                    y: &mut y,
                    bias: Some(&bias),
                },
            );
            y
        };
        let y = run(1);
        for t in 0..tokens {
            for r in 0..rows {
                let mut sum = bias[r];
                for c in 0..channels {
                    for j in 0..taps {
                        sum +=
                            dense[r * cols + c * taps + j] * values[(r / per * channels + c) * width + t + j];
                    }
                }
                assert!((y[t * rows + r] - sum).abs() < 1e-5);
            }
        }
        assert!([2, 3, 64].into_iter().all(|n| run(n) == y));
    }
}
