//! Finds the slots that each token sees.

use super::cache::{AttentionShape, Mask};
use crate::Pool;
use crate::elementwise::largest;
use crate::memory::AlignedVec;
use crate::simd::{F32x16, LANES, simd_fn};
use std::ops::Range;

/// Multiplications from which on several threads are used: a few microseconds of work.
pub(super) const PARALLEL_ATTENTION: usize = 1 << 16;
/// Tokens of a part; it widens fp16 once for them.
pub(super) const TOKENS_PER_JOB: usize = 16;

/// Distance below a token's largest mask value from which on a slot is skipped; `e^-20000` is 0 in f32.
pub const MASK_CUTOFF: f32 = 20_000.0;

simd_fn! {
    /// Appends the ranges of slots that a token sees, by its row of the mask.
    pub(super) fn add_ranges(mask: &[f32], out: &mut Vec<Range<usize>>) = add_ranges_simd
}

#[inline(always)]
fn add_ranges_simd<L: F32x16>(mask: &[f32], out: &mut Vec<Range<usize>>) {
    let largest = largest::<L>(mask);
    let bound = if largest.is_finite() { largest - MASK_CUTOFF } else { f32::NEG_INFINITY };
    let mut start = None;
    for (i, chunk) in mask.chunks(LANES).enumerate() {
        // Most chunks are seen as a whole or not at all.
        let below: u32 = chunk.iter().map(|m| u32::from(*m < bound)).sum();
        if below == chunk.len() as u32 {
            if let Some(start) = start.take() {
                out.push(start..i * LANES);
            }
        } else if below == 0 {
            start.get_or_insert(i * LANES);
        } else {
            for (j, m) in chunk.iter().enumerate() {
                match (*m < bound, start) {
                    (true, Some(s)) => {
                        out.push(s..i * LANES + j);
                        start = None;
                    }
                    (false, None) => start = Some(i * LANES + j),
                    _ => {}
                }
            }
        }
    }
    if let Some(start) = start {
        out.push(start..mask.len());
    }
}

/// Holds the ranges of slots that the tokens of a call see, and the softmax states of its parts.
#[derive(Default)]
pub(super) struct VisibleSlots {
    pub(super) ranges: Vec<Range<usize>>,
    /// Index of each token's first range, and the number of ranges.
    pub(super) first: Vec<usize>,
    /// Per part of 16 tokens: the ranges, and the end of each token's ranges.
    found: Vec<(Vec<Range<usize>>, Vec<usize>)>,
    /// `[chunks, heads, tokens, state]`, see [`super::job::SoftmaxState`].
    pub(super) states: AlignedVec<[f32; LANES]>,
}

impl VisibleSlots {
    /// Finds the ranges of slots that each token of a call sees.
    pub(super) fn find(&mut self, pool: &Pool, s: &AttentionShape, mask: Option<Mask<'_>>) {
        let VisibleSlots { ranges, first, found, .. } = self;
        ranges.clear();
        first.clear();
        first.push(0);
        let add = |tokens: Range<usize>, ranges: &mut Vec<Range<usize>>, first: &mut Vec<usize>| {
            for token in tokens {
                match mask {
                    Some(m) => add_ranges(&m.values[token * m.token_stride..][..s.slots], ranges),
                    None => ranges.push(0..s.slots),
                }
                first.push(ranges.len());
            }
        };
        if mask.is_none() || s.tokens * s.slots < PARALLEL_ATTENTION {
            return add(0..s.tokens, ranges, first);
        }
        let n = s.tokens.div_ceil(TOKENS_PER_JOB);
        found.resize_with(found.len().max(n), Default::default);
        pool.for_chunks(&mut found[..n], 1, &|i, found| {
            for (ranges, ends) in found {
                ranges.clear();
                ends.clear();
                add(i * TOKENS_PER_JOB..s.tokens.min((i + 1) * TOKENS_PER_JOB), ranges, ends);
            }
        });
        for (some, ends) in &found[..n] {
            first.extend(ends.iter().map(|end| ranges.len() + end));
            ranges.extend_from_slice(some);
        }
    }

    pub(super) fn ranges(&self, token: usize) -> &[Range<usize>] {
        &self.ranges[self.first[token]..self.first[token + 1]]
    }
}
