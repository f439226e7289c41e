//! Masked attention over a KV cache; masked slots are skipped.
//!
//! ```text
//! slots    | chunk of 1024: 16 blocks of 64 | chunk | ...      fixed slots, whatever a token sees
//!
//! for each block, head and token:      s = scale q k + mask        m' = max(m, max s)       w = e^(s - m')
//!   sum    = e^(m - m') sum    + sum w                  (online softmax)
//!   values = e^(m - m') values + sum w v
//! for each head and token, over its chunks in order:
//!   out = sum_c e^(m_c - m) values_c / (sum_c e^(m_c - m) sum_c + e^(sink - m))      where heads have sinks
//! ```
//!
//! Chunks are parts of a job, so that threads share a long context. A token's result depends neither on the other
//! tokens nor on the number of threads, since blocks and chunks start at fixed slots.

mod blocks;
mod cache;
mod job;
mod merge;
#[cfg(test)]
mod tests;
mod visible;

pub use cache::{AttentionShape, CacheValues, CacheView, HeadStrides, Mask, Softmax};

use crate::Pool;
use crate::pool::SharedPointer;
use crate::simd::LANES;
use blocks::{AttentionMemory, compute_job};
use job::{CHUNK, ChunkJob, state_len};
use merge::merge_chunks;
use std::cell::RefCell;
use std::ops::Range;
pub use visible::MASK_CUTOFF;
use visible::{PARALLEL_ATTENTION, TOKENS_PER_JOB, VisibleSlots};

/// Largest number of query heads that read a key together.
const MAX_SHARED_HEADS: usize = 8;

thread_local! {
    static SCRATCH: RefCell<AttentionMemory> = RefCell::default();
    static SEEN: RefCell<VisibleSlots> = RefCell::default();
}

/// Computes `softmax(scale q k^T + mask) v` for each head, whose sink takes part in the softmax. Masked slots are not
/// read.
///
/// A token's result does not depend on the other tokens or the number of threads. Returns the bytes of keys and values
/// read, each counted once; several tokens count all slots from the first to the last that any token sees.
///
/// # Panics
/// Lengths do not match.
pub fn attention(
    pool: &Pool,
    s: &AttentionShape,
    Softmax { scale, mask, sinks }: Softmax<'_>,
    (q, q_at): (&[f32], HeadStrides),
    k: &CacheView<'_>,
    v: &CacheView<'_>,
    (out, out_at): (&mut [f32], HeadStrides),
) -> u64 {
    if s.heads == 0 || s.tokens == 0 || s.slots == 0 || s.head_dim == 0 {
        return 0;
    }
    assert!(s.kv_heads > 0 && s.heads.is_multiple_of(s.kv_heads), "query heads per key/value head");
    k.check(s);
    v.check(s);
    for (at, len) in [(q_at, q.len()), (out_at, out.len())] {
        let of = |n: usize, stride: usize| (n - 1).checked_mul(stride);
        let end = of(s.heads, at.head).and_then(|e| {
            e.checked_add(of(s.tokens, at.token)?)?.checked_add(at.first)?.checked_add(s.head_dim)
        });
        assert!(end.is_some_and(|end| end <= len), "heads and tokens lie inside");
    }
    if let Some(m) = mask {
        assert!((s.tokens - 1) * m.token_stride + s.slots <= m.values.len(), "a mask per token and slot");
    }
    assert!(sinks.is_none_or(|sinks| sinks.len() == s.heads), "a sink per head");
    assert!(
        are_disjoint((s.heads, out_at.head), (s.tokens, out_at.token), s.head_dim),
        "results do not overlap"
    );
    let mut seen = SEEN.take();
    seen.find(pool, s, mask);
    // Skips chunks at either end that no token sees.
    let start = seen.ranges.iter().map(|r| r.start / CHUNK).min().unwrap_or(0);
    let end = seen.ranges.iter().map(|r| r.end.div_ceil(CHUNK)).max().unwrap_or(0).max(start + 1);
    let work: usize = seen.ranges.iter().map(Range::len).sum();
    let state = state_len(s.head_dim);
    let chunk = s.heads * s.tokens * state;
    let mut states = std::mem::take(&mut seen.states);
    states.grow((end - start) * chunk, [0.0; LANES]);
    // Each part writes only the states of its own heads, tokens and chunk.
    let target = SharedPointer(states.as_mut_ptr());
    let group = s.heads / s.kv_heads;
    let (groups, blocks) = (group.div_ceil(MAX_SHARED_HEADS), s.tokens.div_ceil(TOKENS_PER_JOB));
    let part = |i: usize| {
        let target = &target;
        let (i, block) = (i / blocks, i % blocks);
        let (i, first) = (i / groups, i % groups * MAX_SHARED_HEADS);
        let (c, kv_head) = (i / s.kv_heads, i % s.kv_heads);
        let slots = (start + c) * CHUNK;
        let part = ChunkJob {
            s,
            scale,
            q: (q, q_at),
            mask,
            seen: &seen,
            kv_head,
            heads: kv_head * group + first..kv_head * group + group.min(first + MAX_SHARED_HEADS),
            tokens: block * TOKENS_PER_JOB..s.tokens.min((block + 1) * TOKENS_PER_JOB),
            slots: slots..s.slots.min(slots + CHUNK),
            // SAFETY: lies within `states`.
            states: unsafe { target.0.add(c * chunk) },
        };
        let mut scratch = SCRATCH.take();
        compute_job(&part, k, v, &mut scratch);
        SCRATCH.set(scratch);
    };
    let parts = (end - start) * s.kv_heads * groups * blocks;
    let parallel = work * s.heads * s.head_dim >= PARALLEL_ATTENTION;
    if parallel {
        pool.run(parts, &part)
    } else {
        (0..parts).for_each(part)
    }
    let target = SharedPointer(out.as_mut_ptr());
    let last = |head: usize| {
        let target = &target;
        for token in 0..s.tokens {
            let of = |c: usize| &states[c * chunk + (head * s.tokens + token) * state..][..state];
            let at = out_at.first + head * out_at.head + token * out_at.token;
            // SAFETY: lies within `out`, as asserted; heads and tokens do not overlap.
            let out = unsafe { std::slice::from_raw_parts_mut(target.0.add(at), s.head_dim) };
            merge_chunks((0..end - start).map(of), sinks.map(|sinks| sinks[head]), out);
        }
    };
    if parallel && s.tokens > 1 {
        pool.run(s.heads, &last)
    } else {
        (0..s.heads).for_each(last)
    }
    let low = seen.ranges.iter().map(|r| r.start).min().unwrap_or(0);
    let high = seen.ranges.iter().map(|r| r.end).max().unwrap_or(0);
    let read = if s.tokens == 1 { work } else { high - low };
    seen.states = states;
    SEEN.set(seen);
    (read * s.kv_heads * s.head_dim * (k.values.size() + v.values.size())) as u64
}

/// Tells whether pieces of `len` elements on two axes, each a count and a stride, are disjoint.
fn are_disjoint(a: (usize, usize), b: (usize, usize), len: usize) -> bool {
    let (inner, outer) = if a.1 <= b.1 && a.0 > 1 || b.0 == 1 { (a, b) } else { (b, a) };
    let width = (inner.0 - 1).checked_mul(inner.1).and_then(|w| w.checked_add(len));
    (inner.0 == 1 || inner.1 >= len) && (outer.0 == 1 || width.is_some_and(|width| outer.1 >= width))
}
