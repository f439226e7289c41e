//! Scores, weights and weighted values of one block of slots.

use super::cache::{CacheElement, CacheValues, CacheView, SlotView, vector_at};
use super::job::{ChunkJob, SLOTS_PER_BLOCK, SoftmaxState};
use crate::elementwise::{exp_from, largest};
use crate::memory::AlignedVec;
use crate::simd::{F32x16, LANES, simd_fn};
use std::ops::Range;

/// Slots whose values are added before the loop goes on to the next channels.
const SLOTS_PER_STEP: usize = 16;

/// Tokens that alternate on a block, so that their queries stay in L1 with the keys: 8 * 128 channels are 4 KB.
const TOKENS_PER_STEP: usize = 8;
/// Elements of values that stay in L1: 32 KB of f32.
const L1_VALUES: usize = 8192;

/// Holds one thread's widened keys and values of a block.
#[derive(Default)]
pub(super) struct AttentionMemory {
    /// Widened keys.
    keys: AlignedVec<[f32; LANES]>,
    values: AlignedVec<[f32; LANES]>,
}

simd_fn! {
    /// Computes the softmax states of a job.
    pub(super) fn compute_job(part: &ChunkJob<'_>, k: &CacheView<'_>, v: &CacheView<'_>, scratch: &mut AttentionMemory) = compute_job_simd
}

#[inline(always)]
fn compute_job_simd<L: F32x16>(
    part: &ChunkJob<'_>,
    k: &CacheView<'_>,
    v: &CacheView<'_>,
    scratch: &mut AttentionMemory,
) {
    part.clear();
    for (slots, seen) in part.blocks() {
        let (keys, values) = match (k.values, v.values) {
            // One token reads fp16 as it is. Scalar code widens it once for all heads.
            (CacheValues::F16(keys), CacheValues::F16(values))
                if part.tokens.len() == 1 && (part.heads.len() == 1 || !L::IS_REFERENCE) =>
            {
                let (keys, values) = (k.head(keys, part.kv_head), v.head(values, part.kv_head));
                compute_tokens::<L, _, 1>(part, &part.tokens, &slots, keys, values);
                continue;
            }
            (CacheValues::F32(keys), CacheValues::F32(values)) => {
                (k.head(keys, part.kv_head), v.head(values, part.kv_head))
            }
            _ => (
                widen::<L>(part, k, seen.clone(), &mut scratch.keys),
                widen::<L>(part, v, seen, &mut scratch.values),
            ),
        };
        for first in part.tokens.clone().step_by(TOKENS_PER_STEP) {
            let some = first..part.tokens.end.min(first + TOKENS_PER_STEP);
            compute_tokens::<L, _, TOKENS_PER_STEP>(part, &some, &slots, keys, values);
        }
    }
}

/// Widens slots of the job's head to f32.
#[inline(always)]
fn widen<'o, L: F32x16>(
    part: &ChunkJob<'_>,
    view: &CacheView<'_>,
    slots: Range<usize>,
    out: &'o mut AlignedVec<[f32; LANES]>,
) -> SlotView<'o, f32> {
    let (d, n) = (part.s.head_dim, part.s.head_dim.div_ceil(LANES));
    out.grow(SLOTS_PER_BLOCK * n, [0.0; LANES]);
    for (slot, out) in slots.clone().zip(out.chunks_exact_mut(n)) {
        let at = view.first + part.kv_head * view.head_stride + slot * view.slot_stride;
        match view.values {
            CacheValues::F16(values) => {
                let whole = values[at..at + d].as_chunks::<LANES>().0;
                for (halves, out) in whole.iter().zip(out.iter_mut()) {
                    u16::vector::<L>(halves).store(out);
                }
                for c in d / LANES * LANES..d {
                    out.as_flattened_mut()[c] = values[at + c].to_f32();
                }
            }
            CacheValues::F32(values) => out.as_flattened_mut()[..d].copy_from_slice(&values[at..at + d]),
        }
    }
    let stride = n * LANES;
    SlotView { values: out.as_flattened(), first: 0usize.wrapping_sub(slots.start * stride), stride }
}

/// Computes up to G tokens; sixteen sums are in flight for any number of heads.
#[inline(always)]
fn compute_tokens<L: F32x16, T: CacheElement, const G: usize>(
    part: &ChunkJob<'_>,
    tokens: &Range<usize>,
    slots: &Range<usize>,
    k: SlotView<'_, T>,
    v: SlotView<'_, T>,
) {
    match part.heads.len() {
        // There is less scalar code if heads are computed one by one.
        _ if const { L::IS_REFERENCE } => {
            for head in part.heads.clone() {
                let part = ChunkJob { heads: head..head + 1, ..part.clone() };
                compute_heads::<L, T, G, 1, 16, 8>(&part, tokens, slots, k, v);
            }
        }
        1 => compute_heads::<L, T, G, 1, 16, 8>(part, tokens, slots, k, v),
        2 => compute_heads::<L, T, G, 2, 8, 8>(part, tokens, slots, k, v),
        3 | 4 => compute_heads::<L, T, G, 4, 4, 4>(part, tokens, slots, k, v),
        _ => compute_heads::<L, T, G, 8, 2, 2>(part, tokens, slots, k, v),
    }
}

/// Computes up to N heads of up to G tokens over one block: scores of S slots and WIDE vectors of values at a time.
/// Tokens alternate every [`SLOTS_PER_STEP`] slots, which stay in L1.
#[inline(always)]
fn compute_heads<
    L: F32x16,
    T: CacheElement,
    const G: usize,
    const N: usize,
    const S: usize,
    const WIDE: usize,
>(
    part: &ChunkJob<'_>,
    tokens: &Range<usize>,
    slots: &Range<usize>,
    k: SlotView<'_, T>,
    v: SlotView<'_, T>,
) {
    let n = part.heads.len();
    // Weights of the slots that each token sees, for N heads; the first `counts` weights of each token are set.
    let (mut all, mut counts) = ([[[0f32; SLOTS_PER_BLOCK]; N]; G], [0; G]);
    // One token does not alternate.
    let step = if G == 1 { SLOTS_PER_BLOCK } else { SLOTS_PER_STEP };
    for first in slots.clone().step_by(step) {
        let these = first..slots.end.min(first + step);
        for ((token, weights), seen) in tokens.clone().zip(&mut all).zip(&mut counts) {
            let mask = part.mask.map(|m| &m.values[token * m.token_stride..][..part.s.slots]);
            let queries = part.queries::<N>(token);
            for range in part.ranges(token, &these) {
                let start = *seen;
                for first in range.clone().step_by(S) {
                    let next = (G == 1).then_some(v);
                    let sums = dot_products::<L, T, N, S>(&queries, k, (first, range.end - 1), next);
                    let mut scores = [0f32; SUMS];
                    sums.mul(L::splat(part.scale)).store(&mut scores);
                    for (weights, scores) in weights.iter_mut().zip(scores.as_chunks::<S>().0) {
                        // Scores past the range are overwritten later.
                        match weights[*seen..].first_chunk_mut() {
                            Some(weights) => *weights = *scores,
                            None => {
                                let rest = SLOTS_PER_BLOCK - *seen;
                                weights[*seen..].copy_from_slice(&scores[..rest]);
                            }
                        }
                    }
                    *seen += S.min(range.end - first);
                }
                if let Some(mask) = mask {
                    for weights in weights.iter_mut().take(n) {
                        let scores = &mut weights[start..*seen];
                        scores.iter_mut().zip(&mask[range.clone()]).for_each(|(w, m)| *w += m);
                    }
                }
            }
        }
    }
    for (g, token) in tokens.clone().enumerate() {
        for h in 0..n {
            // SAFETY: the head and token are the part's own; the state is dropped before the next one is made.
            let state = unsafe { part.state(part.heads.start + h, token) };
            update_softmax::<L>(&mut all[g][h][..counts[g]], state);
        }
    }
    let (d, mut added) = (part.s.head_dim, [0; G]);
    let step = if G == 1 { (L1_VALUES / d).clamp(SLOTS_PER_STEP, SLOTS_PER_BLOCK) } else { SLOTS_PER_STEP };
    for first in slots.clone().step_by(step) {
        let these = first..slots.end.min(first + step);
        for ((token, weights), added) in tokens.clone().zip(&all).zip(&mut added) {
            // SAFETY: the heads and the token are the part's own, each taken once; the states are dropped before the
            // next ones are made.
            let mut states: [Option<SoftmaxState<'_>>; N] =
                std::array::from_fn(|h| (h < n).then(|| unsafe { part.state(part.heads.start + h, token) }));
            let next = (G == 1).then_some((k, part.end(token)));
            for range in part.ranges(token, &these) {
                let n = range.len();
                add_values::<L, T, N, WIDE>(weights, *added, v, range, &mut states, (d, next));
                *added += n;
            }
        }
    }
}

/// Turns scores into weights relative to the largest score so far, and rescales the state to it.
#[inline(always)]
fn update_softmax<L: F32x16>(weights: &mut [f32], state: SoftmaxState<'_>) {
    if weights.is_empty() {
        return;
    }
    let top = largest::<L>(weights).max(*state.top);
    if top == f32::NEG_INFINITY {
        // All weights are zero, unless a score is NaN.
        weights.iter_mut().for_each(|w| *w = if w.is_nan() { *w } else { 0.0 });
        *state.sum += weights.iter().sum::<f32>();
        return;
    }
    if top > *state.top {
        let factor = (*state.top - top).exp();
        *state.top = top;
        *state.sum *= factor;
        for v in state.values.as_chunks_mut().0 {
            L::load(v).mul(L::splat(factor)).store(v);
        }
    }
    *state.sum += exp_from::<L>(weights, top);
}

/// Sums in flight: N queries times S keys.
const SUMS: usize = LANES;

/// Returns the dot products `[N, S]` of N queries with S keys from slot `first` on; keys past `last` repeat `last`.
/// Prefetches the same slots of `next`.
#[inline(always)]
fn dot_products<L: F32x16, T: CacheElement, const N: usize, const S: usize>(
    q: &[&[f32]; N],
    k: SlotView<'_, T>,
    (first, last): (usize, usize),
    next: Option<SlotView<'_, T>>,
) -> L {
    const { assert!(N * S == SUMS) };
    let d = q[0].len();
    let mut at = [0; S];
    for s in 0..S {
        at[s] = k.at((first + s).min(last));
        assert!(at[s] <= k.values.len() && d <= k.values.len() - at[s]);
    }
    assert!(q.iter().all(|q| q.len() == d));
    let mut acc = [[L::splat(0.0); N]; S];
    let whole = d / LANES * LANES;
    if L::REGISTERS > SUMS + N {
        for c in (0..whole).step_by(LANES) {
            for s in 0..S {
                prefetch_slot(next, (first + s).min(last), c);
            }
            let mut queries = [L::splat(0.0); N];
            for h in 0..N {
                // SAFETY: c + LANES is at most d, and the query has d elements, as asserted.
                queries[h] = unsafe { vector_at(q[h], c) };
            }
            for s in 0..S {
                // SAFETY: c + LANES is at most d, and the key has d elements, as asserted.
                let key = unsafe { vector_at::<T, L>(k.values, at[s] + c) };
                for h in 0..N {
                    acc[s][h] = key.mul_add(queries[h], acc[s][h]);
                }
            }
        }
    } else {
        // Four sums at a time, with as few keys as possible.
        let (heads, keys) = (N.min(4), 4 / N.min(4));
        for group in 0..SUMS / 4 {
            let (s, h) = (group * 4 / N, group * 4 % N);
            let mut four = [L::splat(0.0); 4];
            for c in (0..whole).step_by(LANES) {
                for j in 0..keys {
                    if h == 0 {
                        prefetch_slot(next, (first + s + j).min(last), c);
                    }
                    // SAFETY: c + LANES is at most d, and the key has d elements, as asserted.
                    let key = unsafe { vector_at::<T, L>(k.values, at[s + j] + c) };
                    for i in 0..heads {
                        // SAFETY: c + LANES is at most d, and the query has d elements, as asserted.
                        let query = unsafe { vector_at::<f32, L>(q[h + i], c) };
                        four[j * heads + i] = key.mul_add(query, four[j * heads + i]);
                    }
                }
            }
            for j in 0..4 {
                acc[s + j / heads][h + j % heads] = four[j];
            }
        }
    }
    let mut partial_sums = [L::splat(0.0); 4];
    for i in 0..4 {
        let of = |j: usize| acc[(4 * i + j) % S][(4 * i + j) / S];
        partial_sums[i] = L::partial_sums([of(0), of(1), of(2), of(3)]);
    }
    let sums = L::finish_partial_sums(partial_sums);
    if whole == d {
        return sums;
    }
    let mut all = [0f32; SUMS];
    sums.store(&mut all);
    for (i, sum) in all.iter_mut().enumerate() {
        for c in whole..d {
            *sum += q[i / S][c] * k.values[at[i % S] + c].to_f32();
        }
    }
    L::load(&all)
}

/// Prefetches two vectors of a slot from channel c on; every second call does nothing.
#[inline(always)]
fn prefetch_slot<T: CacheElement>(next: Option<SlotView<'_, T>>, slot: usize, c: usize) {
    if let Some(next) = next
        && c.is_multiple_of(2 * LANES)
    {
        next.prefetch(next.at(slot).wrapping_add(c), 2 * LANES);
    }
}

/// Adds the weighted values of `slots`; `weights[h][i]` belongs to the first slot. Prefetches `next` in the next block,
/// up to the given slot.
#[inline(always)]
fn add_values<L: F32x16, T: CacheElement, const N: usize, const WIDE: usize>(
    weights: &[[f32; SLOTS_PER_BLOCK]; N],
    i: usize,
    v: SlotView<'_, T>,
    slots: Range<usize>,
    states: &mut [Option<SoftmaxState<'_>>; N],
    (d, next): (usize, Option<(SlotView<'_, T>, usize)>),
) {
    assert!(i + slots.len() <= SLOTS_PER_BLOCK);
    let mut c = 0;
    while c + WIDE * LANES <= d {
        add_vectors::<L, T, N, WIDE>(weights, i, v, slots.clone(), states, (c, next));
        c += WIDE * LANES;
    }
    while c + LANES <= d {
        add_vectors::<L, T, N, 1>(weights, i, v, slots.clone(), states, (c, next));
        c += LANES;
    }
    for c in c..d {
        for (n, slot) in slots.clone().enumerate() {
            let value = v.values[v.at(slot) + c].to_f32();
            for (weights, state) in weights.iter().zip(states.iter_mut()) {
                if let Some(state) = state {
                    state.values[c] += weights[i + n] * value;
                }
            }
        }
    }
}

/// Adds WIDE vectors of weighted values from channel c on, see [`add_values`].
#[inline(always)]
fn add_vectors<L: F32x16, T: CacheElement, const N: usize, const WIDE: usize>(
    weights: &[[f32; SLOTS_PER_BLOCK]; N],
    i: usize,
    v: SlotView<'_, T>,
    slots: Range<usize>,
    states: &mut [Option<SoftmaxState<'_>>; N],
    (c, next): (usize, Option<(SlotView<'_, T>, usize)>),
) {
    let mut acc = [[L::splat(0.0); WIDE]; N];
    for h in 0..N {
        let Some(state) = &states[h] else { continue };
        let vectors = state.values[c..c + WIDE * LANES].as_chunks().0;
        for j in 0..WIDE {
            acc[h][j] = L::load(&vectors[j]);
        }
    }
    for (n, slot) in slots.enumerate() {
        let at = v.at(slot) + c;
        if let Some((next, end)) = next
            && slot + SLOTS_PER_BLOCK < end
        {
            next.prefetch(next.at(slot + SLOTS_PER_BLOCK).wrapping_add(c), WIDE * LANES);
        }
        assert!(at <= v.values.len() && WIDE * LANES <= v.values.len() - at);
        let mut factors = [L::splat(0.0); N];
        for h in 0..N {
            factors[h] = L::splat(weights[h][i + n]);
        }
        for j in 0..WIDE {
            // SAFETY: the slot has WIDE vectors from `at` on, as asserted.
            let value = unsafe { vector_at::<T, L>(v.values, at + j * LANES) };
            for h in 0..N {
                acc[h][j] = value.mul_add(factors[h], acc[h][j]);
            }
        }
    }
    for h in 0..N {
        let Some(state) = &mut states[h] else { continue };
        let vectors = state.values[c..c + WIDE * LANES].as_chunks_mut().0;
        for j in 0..WIDE {
            acc[h][j].store(&mut vectors[j]);
        }
    }
}
