//! One part of an attention call: some heads and tokens over one chunk, and their online softmax.

use super::cache::{AttentionShape, HeadStrides, Mask};
use super::visible::VisibleSlots;
use crate::simd::LANES;
use std::ops::Range;

/// Slots of a block: the scores, and then the weights, of a head and token fill four cache lines.
pub(super) const SLOTS_PER_BLOCK: usize = 64;
/// Slots of a chunk, the unit that a job covers.
pub(super) const CHUNK: usize = 16 * SLOTS_PER_BLOCK;

/// Online softmax of one head and token: the largest score m, the sum of weights relative to m, and the sum of weighted values.
///
/// Stored as one vector that has m and the sum of weights in lanes 0 and 1, then the vectors of the values.
pub(super) struct SoftmaxState<'a> {
    pub(super) top: &'a mut f32,
    pub(super) sum: &'a mut f32,
    pub(super) values: &'a mut [f32],
}

/// One part of a call: some heads of a key/value head, some tokens, one chunk.
#[derive(Clone)]
pub(super) struct ChunkJob<'a> {
    pub(super) s: &'a AttentionShape,
    pub(super) scale: f32,
    pub(super) q: (&'a [f32], HeadStrides),
    pub(super) mask: Option<Mask<'a>>,
    pub(super) seen: &'a VisibleSlots,
    pub(super) kv_head: usize,
    pub(super) heads: Range<usize>,
    pub(super) tokens: Range<usize>,
    pub(super) slots: Range<usize>,
    /// `[heads, tokens, state]` of the chunk; each part has its own heads and tokens.
    pub(super) states: *mut [f32; LANES],
}

/// Returns the number of vectors of a state.
pub(super) fn state_len(head_dim: usize) -> usize {
    1 + head_dim.div_ceil(LANES)
}

impl ChunkJob<'_> {
    /// Iterates over the ranges within `slots` that a token sees.
    #[inline(always)]
    pub(super) fn ranges(
        &self,
        token: usize,
        slots: &Range<usize>,
    ) -> impl Iterator<Item = Range<usize>> + '_ {
        let (slots, all) = (slots.clone(), self.seen.ranges(token));
        let from = all.partition_point(|r| r.end <= slots.start);
        let some = all[from..].iter().take_while(move |r| r.start < slots.end);
        some.map(move |r| r.start.max(slots.start)..r.end.min(slots.end))
    }

    /// Returns the softmax state of a head and a token.
    ///
    /// # Safety
    /// The head and the token are the part's own, and no other reference to their state exists.
    #[inline(always)]
    pub(super) unsafe fn state<'s>(&self, head: usize, token: usize) -> SoftmaxState<'s> {
        let n = state_len(self.s.head_dim);
        // SAFETY: lies within the states, `[chunks, heads, tokens, n]`; the caller promises that no other reference to it exists.
        let state =
            unsafe { std::slice::from_raw_parts_mut(self.states.add((head * self.s.tokens + token) * n), n) };
        let (first, values) = state.split_at_mut(1);
        let (top, sum) = first[0].split_at_mut(1);
        SoftmaxState { top: &mut top[0], sum: &mut sum[0], values: values.as_flattened_mut() }
    }

    pub(super) fn query(&self, head: usize, token: usize) -> &[f32] {
        let (q, at) = self.q;
        &q[at.first + head * at.head + token * at.token..][..self.s.head_dim]
    }

    /// Returns the queries of N heads of a token; missing heads repeat the first.
    #[inline(always)]
    pub(super) fn queries<const N: usize>(&self, token: usize) -> [&[f32]; N] {
        let mut queries = [self.query(self.heads.start, token); N];
        for (h, query) in queries.iter_mut().enumerate().take(self.heads.len()) {
            *query = self.query(self.heads.start + h, token);
        }
        queries
    }

    /// Returns the index behind the last slot that a token sees; 0 if it sees none.
    pub(super) fn end(&self, token: usize) -> usize {
        self.seen.ranges(token).last().map_or(0, |r| r.end)
    }

    /// Resets the softmax states of all heads and tokens of the part.
    pub(super) fn clear(&self) {
        for head in self.heads.clone() {
            for token in self.tokens.clone() {
                // SAFETY: the head and token are the part's own; the state is dropped at once.
                let state = unsafe { self.state(head, token) };
                (*state.top, *state.sum) = (f32::NEG_INFINITY, 0.0);
                state.values.fill(0.0);
            }
        }
    }

    /// Iterates over the blocks that any token sees. Gives the block's slots, and the range from the first slot seen to the last.
    pub(super) fn blocks(&self) -> impl Iterator<Item = (Range<usize>, Range<usize>)> + '_ {
        self.slots.clone().step_by(SLOTS_PER_BLOCK).filter_map(|start| {
            let slots = start..self.slots.end.min(start + SLOTS_PER_BLOCK);
            let seen = self.tokens.clone().flat_map(|t| self.ranges(t, &slots));
            let (low, high) = seen.fold((usize::MAX, 0), |(a, b), r| (a.min(r.start), b.max(r.end)));
            (low < high).then_some((slots, low..high))
        })
    }
}
