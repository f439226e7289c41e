//! Pools of images with channels last.

use crate::Pool;
use crate::conv::{Image, Window};
use crate::elementwise::{get, put};
use crate::matmul::PARALLEL_MATMUL;
use crate::simd::{F32x16, LANES, simd_fn};
use std::ops::Range;

/// Names what a pool computes of a window.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum PoolFunction {
    /// The largest element; NaN where one is.
    Max,
    /// The sum divided by a number of elements.
    Average,
    /// The root of the sum of squares.
    L2,
}

/// Describes a pool.
#[derive(Clone, Copy, Debug)]
pub struct Pooling<'a> {
    /// Function of a window.
    pub function: PoolFunction,
    /// Places of the windows.
    pub window: &'a Window,
    /// Divisors of averages: the product of those of a window's three indices.
    pub counts: &'a [Vec<usize>; 3], // [out] for each axis
    /// Input; its channels are contiguous.
    pub x: Image<'a>,
}

/// Computes a pool, `[batch * positions, channels]`, on all threads. Taps are joined in ascending order.
///
/// # Panics
/// Lengths do not match, or channels are not contiguous.
pub fn pool_windows(pool: &Pool, p: &Pooling<'_>, y: &mut [f32]) {
    let channels = p.x.channels;
    assert!(channels == 1 || p.x.strides[1] == 1, "channels that lie together");
    assert!((0..3).all(|i| p.counts[i].len() == p.window.out[i]), "a divisor for each index");
    let tokens = p.x.batch * p.window.positions();
    let per_part = (PARALLEL_MATMUL / (4 * channels * p.window.taps()).max(1)).max(1);
    pool.for_chunks(&mut y[..tokens * channels], per_part * channels, &|i, y| {
        pool_tokens(p, i * per_part, y)
    });
}

/// Returns the larger numbers; NaN where one is. Neither comparison holds for equal numbers, whose sum of halves is a number or
/// theirs, and for NaN.
#[inline(always)]
fn larger<L: F32x16>(a: L, b: L) -> L {
    let half = L::splat(0.5);
    let sum = a.mul(half).add(b.mul(half));
    a.if_below(b, b, b.if_below(a, a, sum.if_below(L::splat(f32::INFINITY), a, sum)))
}

simd_fn! { fn pool_tokens(p: &Pooling<'_>, first: usize, y: &mut [f32]) = pool_tokens_on }

#[inline(always)]
fn pool_tokens_on<L: F32x16>(p: &Pooling<'_>, first: usize, y: &mut [f32]) {
    let (window, x, channels) = (p.window, &p.x, p.x.channels);
    let positions = window.positions();
    for (t, y) in (first..).zip(y.chunks_exact_mut(channels)) {
        let index = window.indices(t % positions);
        let start = x.first + t / positions * x.strides[0];
        let inside: [Range<usize>; 3] = [0, 1, 2].map(|i| window.inside(i, index[i]));
        let count = (0..3).fold(1, |n: usize, i| n.saturating_mul(p.counts[i][index[i]])).max(1) as f32;
        for c in (0..channels).step_by(LANES) {
            let n = (channels - c).min(LANES);
            let mut joined = match p.function {
                PoolFunction::Max => L::splat(f32::NEG_INFINITY),
                PoolFunction::Average | PoolFunction::L2 => L::splat(0.0),
            };
            for d in inside[0].clone() {
                for h in inside[1].clone() {
                    let row = start
                        + window.at(0, index[0], d) * x.strides[2]
                        + window.at(1, index[1], h) * x.strides[3];
                    for w in inside[2].clone() {
                        let v =
                            get::<L>(&x.values[row + window.at(2, index[2], w) * x.strides[4] + c..][..n], 0);
                        joined = match p.function {
                            PoolFunction::Max => larger(v, joined),
                            PoolFunction::Average => joined.add(v),
                            PoolFunction::L2 => joined.add(v.mul(v)),
                        };
                    }
                }
            }
            if p.function == PoolFunction::Average {
                joined = joined.div(L::splat(count));
            }
            put(&mut y[c..c + n], 0, joined);
            if p.function == PoolFunction::L2 {
                y[c..c + n].iter_mut().for_each(|v| *v = v.sqrt());
            }
        }
    }
}
