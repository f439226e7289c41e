//! Fused nodes that round every result to fp16: they give the same bits as separate operations.

use super::super::ops::{activation, dot, sigmoid};
use super::super::weights::to_f16;
use anemoe_kernels::{
    AttentionShape, CacheValues, CacheView, GateFunction, HeadStrides, MASK_CUTOFF, Mask, Pool, round_to_f16,
};
use std::cell::RefCell;

/// Elements that a thread rounds in one part of a job.
const ROUNDED: usize = 1 << 14;

/// Rounds values to fp16 on all threads.
pub(super) fn round(pool: &Pool, values: &mut [f32]) {
    pool.for_chunks(values, ROUNDED, &|_, values| round_to_f16(values));
}

/// Computes `f(gate, up) * factor`, and rounds after each operation.
pub(super) fn gate(gate: &[f32], up: &[f32], factor: f32, f: GateFunction, out: &mut [f32]) {
    match f {
        GateFunction::Product(kind) => {
            let f = activation(kind);
            out.iter_mut().zip(gate).for_each(|(o, g)| *o = f(*g));
            round_to_f16(out);
            out.iter_mut().zip(up).for_each(|(o, u)| *o *= u);
        }
        GateFunction::Clamped { limit, steepness } => {
            out.iter_mut().zip(gate).for_each(|(o, g)| *o = g.min(limit) * steepness);
            round_to_f16(out);
            out.iter_mut().for_each(|o| *o = sigmoid(*o));
            round_to_f16(out);
            out.iter_mut().zip(gate).for_each(|(o, g)| *o *= g.min(limit));
            round_to_f16(out);
            out.iter_mut().zip(up).for_each(|(o, u)| *o *= to_f16(u.min(limit).max(-limit) + 1.0));
        }
    }
    round_to_f16(out);
    out.iter_mut().for_each(|o| *o *= factor);
    round_to_f16(out);
}

#[derive(Default)]
struct RoundingBuffers {
    scores: Vec<f32>,
    /// A row of keys or values converted to f32.
    row: Vec<f32>,
}

thread_local! {
    static SCRATCH: RefCell<RoundingBuffers> = RefCell::default();
}

/// Returns `d` elements of a cache's row; a row in fp16 is converted into `space`.
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

/// Returns the slots that a token sees: those at most [`MASK_CUTOFF`] below the largest value of its mask.
fn visible(mask: &[f32]) -> Vec<usize> {
    let largest = mask.iter().copied().fold(f32::NEG_INFINITY, f32::max);
    let bound = if largest.is_finite() { largest - MASK_CUTOFF } else { f32::NEG_INFINITY };
    // NaN counts as seen.
    mask.iter().enumerate().filter(|(_, m)| **m >= bound || m.is_nan()).map(|(slot, _)| slot).collect()
}

/// Turns scores into weights as an op `softmax` does, which rounds its results alone.
fn apply_softmax(scores: &mut [f32]) {
    let largest = scores.iter().copied().fold(f32::NEG_INFINITY, f32::max);
    let mut sum = 0.0;
    for s in scores.iter_mut() {
        *s = (*s - largest).exp();
        sum += *s;
    }
    scores.iter_mut().for_each(|s| *s /= sum);
    round_to_f16(scores);
}

/// Turns scores into weights beside one score more, as the ops of [`super::patterns::InstrGraph::softmax`] do.
fn apply_softmax_with(scores: &mut [f32], sink: f32) {
    let largest = scores.iter().copied().fold(f32::NEG_INFINITY, f32::max).max(sink);
    scores.iter_mut().for_each(|s| *s -= largest);
    round_to_f16(scores);
    scores.iter_mut().for_each(|s| *s = s.exp());
    round_to_f16(scores);
    let sum = to_f16(scores.iter().map(|s| f64::from(*s)).sum::<f64>() as f32);
    let sum = to_f16(sum + to_f16(to_f16(sink - largest).exp()));
    scores.iter_mut().for_each(|s| *s /= sum);
    round_to_f16(scores);
}

/// Computes attention and rounds each result: scores, masked scores, probabilities, and context. Masked slots are not read.
/// Returns the bytes of keys and values read.
pub(super) fn attention(
    pool: &Pool,
    shape: &AttentionShape,
    (mask, sinks): (Mask<'_>, Option<&[f32]>),
    (q, q_at): (&[f32], HeadStrides),
    k: &CacheView<'_>,
    v: &CacheView<'_>,
    (out, out_at): (&mut [f32], HeadStrides),
) -> u64 {
    let AttentionShape { heads, kv_heads, tokens, head_dim: d, slots } = *shape;
    if heads == 0 || tokens == 0 || d == 0 || kv_heads == 0 {
        return 0;
    }
    let seen: Vec<Vec<usize>> =
        (0..tokens).map(|t| visible(&mask.values[t * mask.token_stride..][..slots])).collect();
    let mut results = vec![0.0; heads * tokens * d];
    pool.for_chunks(&mut results, d, &|i, result| {
        let (head, token) = (i / tokens, i % tokens);
        let (kv_head, seen) = (head / (heads / kv_heads), &seen[token]);
        let mask = &mask.values[token * mask.token_stride..];
        let q = &q[q_at.first + head * q_at.head + token * q_at.token..][..d];
        let RoundingBuffers { mut scores, row: mut space } = SCRATCH.take();
        scores.clear();
        scores.extend(seen.iter().map(|&slot| dot(q, row(k, kv_head, slot, d, &mut space))));
        round_to_f16(&mut scores);
        scores.iter_mut().zip(seen).for_each(|(s, &slot)| *s += mask[slot]);
        round_to_f16(&mut scores);
        match sinks {
            None => apply_softmax(&mut scores),
            Some(sinks) => apply_softmax_with(&mut scores, sinks[head]),
        }
        for (s, &slot) in scores.iter().zip(seen) {
            let v = row(v, kv_head, slot, d, &mut space);
            result.iter_mut().zip(v).for_each(|(r, v)| *r += s * v);
        }
        round_to_f16(result);
        SCRATCH.set(RoundingBuffers { scores, row: space });
    });
    for (i, result) in results.chunks_exact(d).enumerate() {
        let to = out_at.first + i / tokens * out_at.head + i % tokens * out_at.token;
        out[to..to + d].copy_from_slice(result);
    }
    let size = |values: &CacheValues<'_>| match values {
        CacheValues::F32(_) => 4,
        CacheValues::F16(_) => 2,
    };
    let read = seen.iter().map(Vec::len).max().unwrap_or(0);
    (read * kv_heads * d * (size(&k.values) + size(&v.values))) as u64
}
