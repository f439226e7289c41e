//! What fused nodes compute where every result is rounded to fp16: the bits of the operations one after the other.

use super::super::OpErrorAt;
use super::super::ops::activation;
use super::Reduction;
use super::view::StridedLoops;
use anemoe_kernels::{AttentionShape, CacheValues, CacheView, Gate, HeadStrides, Mask, Pool, round_to_f16};
use std::cell::RefCell;

/// Below a row's largest score by this much, a probability is 0 in f32.
const NO_WEIGHT: f32 = -104.0;

/// `activation(gate) * up * factor`, each rounded.
pub(super) fn gate(gate: &[f32], up: &[f32], factor: f32, kind: Gate, out: &mut [f32]) {
    let f = activation(kind);
    out.iter_mut().zip(gate).for_each(|(o, g)| *o = f(*g));
    round_to_f16(out);
    out.iter_mut().zip(up).for_each(|(o, u)| *o *= u);
    round_to_f16(out);
    out.iter_mut().for_each(|o| *o *= factor);
    round_to_f16(out);
}

/// Each row's elements, of which there are n, in f64.
pub(super) fn reduce(
    kind: Reduction,
    rows: &StridedLoops<2>,
    inner: &StridedLoops<1>,
    n: usize,
    x: &[f32],
    y: &mut [f32],
) {
    rows.each(|[o, a], m, s| {
        for i in 0..m {
            let x = &x[a + i * s[1]..];
            let fold = |first: f64, f: fn(f64, f64) -> f64| {
                let mut v = first;
                inner.each(|[a], n, s| (0..n).for_each(|k| v = f(v, f64::from(x[a + k * s[0]]))));
                v
            };
            let v = match kind {
                Reduction::Max => fold(f64::NEG_INFINITY, f64::max),
                Reduction::Min => fold(f64::INFINITY, f64::min),
                Reduction::Sum => fold(0.0, |a, b| a + b),
                Reduction::Mean => fold(0.0, |a, b| a + b) / n as f64,
            };
            y[o + i * s[0]] = v as f32;
        }
    });
}

#[derive(Default)]
struct Scratch {
    /// Slots that a token sees, and their scores.
    slots: Vec<usize>,
    scores: Vec<f32>,
    /// A row of keys or values where it does not lie in f32.
    row: Vec<f32>,
}

thread_local! {
    static SCRATCH: RefCell<Scratch> = RefCell::default();
}

/// A row of a cache.
fn row<'a>(cache: &CacheView<'a>, head: usize, slot: usize, d: usize, space: &'a mut Vec<f32>) -> &'a [f32] {
    let from = cache.first + head * cache.head_stride + slot * cache.slot_stride;
    match cache.values {
        CacheValues::F32(v) => &v[from..from + d],
        CacheValues::F16(v) => {
            space.resize(d, 0.0);
            anemoe_kernels::f16_bits_to_f32(&v[from..from + d], space);
            space
        }
    }
}

/// Attention with each of its results rounded: scores, masked scores, probabilities, and the result. Slots whose probability is
/// zero by their mask are not read. Gives the bytes of keys and values that were read.
pub(super) fn attention(
    pool: &Pool,
    shape: &AttentionShape,
    (q, q_at): (&[f32], HeadStrides),
    k: &CacheView<'_>,
    v: &CacheView<'_>,
    mask: Mask<'_>,
    (out, out_at): (&mut [f32], HeadStrides),
) -> OpErrorAt<u64> {
    todo!()
}
