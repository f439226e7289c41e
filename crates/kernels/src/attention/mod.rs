//! Masked attention over a KV cache; masked slots are skipped.
//!
//! ```text
//! slots    | chunk of 1024: 16 blocks of 64 | chunk | ...      fixed slots, whatever a token sees
//!
//! for each block, head and token:      s = scale q k + mask        m' = max(m, max s)       w = e^(s - m')
//!   sum    = e^(m - m') sum    + sum w                  (online softmax)
//!   values = e^(m - m') values + sum w v
//! for each head and token, over its chunks in order:
//!   out = sum_c e^(m_c - m) values_c / sum_c e^(m_c - m) sum_c
//! ```
//!
//! Chunks are parts of a job, so threads share a long context. A token's result depends neither on the other tokens nor on the
//! number of threads, since blocks and chunks start at fixed slots.

#[cfg(test)]
mod tests;

use crate::Pool;
use crate::elementwise::{exp_from, largest};
use crate::memory::{AlignedVec, CacheLevel};
use crate::simd::{F32x16, LANES, simd_fn};
use std::cell::RefCell;
use std::ops::Range;

/// Holds the elements of a cache.
#[derive(Clone, Copy, Debug)]
pub enum CacheValues<'a> {
    /// fp16, as bits.
    F16(&'a [u16]),
    /// f32.
    F32(&'a [f32]),
}

impl CacheValues<'_> {
    /// Returns the bytes of an element.
    fn size(&self) -> usize {
        match self {
            CacheValues::F16(_) => size_of::<u16>(),
            CacheValues::F32(_) => size_of::<f32>(),
        }
    }
}

/// Describes keys or values of all heads: `head_dim` contiguous elements for each head and slot.
#[derive(Clone, Copy, Debug)]
pub struct CacheView<'a> {
    /// The elements.
    pub values: CacheValues<'a>,
    /// Index of head 0, slot 0.
    pub first: usize,
    /// Elements from head to head.
    pub head_stride: usize,
    /// Elements from slot to slot.
    pub slot_stride: usize,
}

/// Describes queries or results `[heads, tokens, head_dim]` with contiguous channels.
#[derive(Clone, Copy, Debug)]
pub struct HeadStrides {
    /// Index of head 0, token 0.
    pub first: usize,
    /// Elements from head to head.
    pub head: usize,
    /// Elements from token to token.
    pub token: usize,
}

/// Holds the sizes of an attention.
#[derive(Clone, Copy, Debug)]
pub struct AttentionShape {
    /// Query heads, a multiple of `kv_heads`.
    pub heads: usize,
    /// Key/value heads.
    pub kv_heads: usize,
    /// Tokens.
    pub tokens: usize,
    /// Channels of a head.
    pub head_dim: usize,
    /// Slots.
    pub slots: usize,
}

/// Describes the mask that is added to the scores: `[tokens, slots]` with contiguous slots.
#[derive(Clone, Copy, Debug)]
pub struct Mask<'a> {
    /// The elements.
    pub values: &'a [f32],
    /// Elements from token to token.
    pub token_stride: usize,
}

/// Difference below a token's largest mask value from which a slot is skipped: `e^-20000` is zero by far.
const UNSEEN: f32 = 20_000.0;
/// Multiplications from which on several threads are used: some microseconds.
const PARALLEL: usize = 1 << 16;
/// Query heads that read a key together, at most.
const GROUP: usize = 8;
/// Slots of a block: scores, then weights of a head in two cache lines per token.
const BLOCK: usize = 64;
/// Slots of a chunk, the part of a job.
const CHUNK: usize = 16 * BLOCK;
/// Slots whose values are added before the next channels.
const SLOTS: usize = 16;
/// Tokens of a part, for which fp16 is widened once.
const TOKENS: usize = 16;
/// Tokens that take turns, so that their queries stay in L1 with the keys: 8 * 128 channels are 4 KB.
const NEAR: usize = 8;
/// Elements of values that stay in L1: 32 KB of f32.
const NEAR_VALUES: usize = 8192;

/// Loads elements of one type.
trait Elements: Copy {
    fn len(self) -> usize;
    /// Loads sixteen elements.
    ///
    /// # Safety
    /// There are sixteen from `at` on.
    unsafe fn vector<L: F32x16>(self, at: usize) -> L;
    fn element(self, at: usize) -> f32;
    /// Prefetches `n` elements from `at` on.
    fn prefetch(self, at: usize, n: usize);
}

impl Elements for &[u16] {
    #[inline(always)]
    fn len(self) -> usize {
        self.len()
    }
    #[inline(always)]
    unsafe fn vector<L: F32x16>(self, at: usize) -> L {
        // SAFETY: the caller promises sixteen fp16 values, which are 32 initialized bytes.
        L::from_f16(unsafe { &*self.as_ptr().add(at).cast() })
    }
    #[inline(always)]
    fn element(self, at: usize) -> f32 {
        half::f16::from_bits(self[at]).to_f32()
    }
    #[inline(always)]
    fn prefetch(self, at: usize, n: usize) {
        crate::memory::prefetch(CacheLevel::L2, self.as_ptr().wrapping_add(at).cast(), 2 * n);
    }
}

impl Elements for &[f32] {
    #[inline(always)]
    fn len(self) -> usize {
        self.len()
    }
    #[inline(always)]
    unsafe fn vector<L: F32x16>(self, at: usize) -> L {
        // SAFETY: the caller promises sixteen elements.
        L::load(unsafe { &*self.as_ptr().add(at).cast() })
    }
    #[inline(always)]
    fn element(self, at: usize) -> f32 {
        self[at]
    }
    #[inline(always)]
    fn prefetch(self, at: usize, n: usize) {
        crate::memory::prefetch(CacheLevel::L2, self.as_ptr().wrapping_add(at).cast(), 4 * n);
    }
}

/// Locates keys or values of one head: slot s starts at `first + s * stride`, modulo 2^64.
#[derive(Clone, Copy)]
struct Slots<T> {
    values: T,
    first: usize,
    stride: usize,
}

impl<T> Slots<T> {
    #[inline(always)]
    fn at(&self, slot: usize) -> usize {
        self.first.wrapping_add(slot * self.stride)
    }
}

impl CacheView<'_> {
    fn head<T>(&self, values: T, head: usize) -> Slots<T> {
        Slots { values, first: self.first + head * self.head_stride, stride: self.slot_stride }
    }

    fn check(&self, s: &AttentionShape) {
        let len = match self.values {
            CacheValues::F16(v) => v.len(),
            CacheValues::F32(v) => v.len(),
        };
        let end =
            self.first + (s.kv_heads - 1) * self.head_stride + (s.slots - 1) * self.slot_stride + s.head_dim;
        assert!(end <= len, "heads and slots lie inside the cache");
    }
}

simd_fn! {
    /// Appends the runs of slots that a token sees.
    fn add_runs(mask: &[f32], out: &mut Vec<Range<usize>>) = add_runs_on
}

#[inline(always)]
fn add_runs_on<L: F32x16>(mask: &[f32], out: &mut Vec<Range<usize>>) {
    let largest = largest::<L>(mask);
    let bound = if largest.is_finite() { largest - UNSEEN } else { f32::NEG_INFINITY };
    let mut start = None;
    for (i, chunk) in mask.chunks(LANES).enumerate() {
        // Most chunks are seen as a whole, or not at all.
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

thread_local! {
    static SCRATCH: RefCell<Scratch> = RefCell::default();
    static SEEN: RefCell<Seen> = RefCell::default();
}

/// Holds a thread's widened keys and values of a block.
#[derive(Default)]
struct Scratch {
    /// Widened keys and values of a block.
    keys: AlignedVec<[f32; LANES]>,
    values: AlignedVec<[f32; LANES]>,
}

/// Holds the runs of slots that the tokens of a call see, and the states of its parts.
#[derive(Default)]
struct Seen {
    runs: Vec<Range<usize>>,
    /// First run of each token, and the end.
    first: Vec<usize>,
    /// Runs of 16 tokens each, and the end of each token's.
    found: Vec<(Vec<Range<usize>>, Vec<usize>)>,
    /// `[chunks, heads, tokens, state]`, see [`State`].
    states: AlignedVec<[f32; LANES]>,
}

impl Seen {
    /// Finds the runs of all tokens of a call.
    fn find(&mut self, pool: &Pool, s: &AttentionShape, mask: Option<Mask<'_>>) {
        let Seen { runs, first, found, .. } = self;
        runs.clear();
        first.clear();
        first.push(0);
        let add = |tokens: Range<usize>, runs: &mut Vec<Range<usize>>, first: &mut Vec<usize>| {
            for token in tokens {
                match mask {
                    Some(m) => add_runs(&m.values[token * m.token_stride..][..s.slots], runs),
                    None => runs.push(0..s.slots),
                }
                first.push(runs.len());
            }
        };
        if mask.is_none() || s.tokens * s.slots < PARALLEL {
            return add(0..s.tokens, runs, first);
        }
        let n = s.tokens.div_ceil(TOKENS);
        found.resize_with(found.len().max(n), Default::default);
        pool.for_chunks(&mut found[..n], 1, &|i, found| {
            for (runs, ends) in found {
                runs.clear();
                ends.clear();
                add(i * TOKENS..s.tokens.min((i + 1) * TOKENS), runs, ends);
            }
        });
        for (some, ends) in &found[..n] {
            first.extend(ends.iter().map(|end| runs.len() + end));
            runs.extend_from_slice(some);
        }
    }

    fn runs(&self, token: usize) -> &[Range<usize>] {
        &self.runs[self.first[token]..self.first[token + 1]]
    }
}

/// Online softmax of one head of a token: the largest score m, the sum of weights against it, and of weighted values.
///
/// Stored as a vector of m and the sum, then the vectors of the values.
struct State<'a> {
    top: &'a mut f32,
    sum: &'a mut f32,
    values: &'a mut [f32],
}

/// One part of a call: some heads of a key/value head, some tokens, one chunk.
struct Part<'a> {
    s: &'a AttentionShape,
    scale: f32,
    q: (&'a [f32], HeadStrides),
    mask: Option<Mask<'a>>,
    seen: &'a Seen,
    kv_head: usize,
    heads: Range<usize>,
    tokens: Range<usize>,
    slots: Range<usize>,
    /// `[heads, tokens, state]` of the chunk; each part has its own heads and tokens.
    states: *mut [f32; LANES],
}

/// Returns the vectors of a state.
fn state_len(head_dim: usize) -> usize {
    1 + head_dim.div_ceil(LANES)
}

impl Part<'_> {
    /// Iterates over the runs that a token sees in `slots`.
    #[inline(always)]
    fn runs(&self, token: usize, slots: &Range<usize>) -> impl Iterator<Item = Range<usize>> + '_ {
        let (slots, all) = (slots.clone(), self.seen.runs(token));
        let from = all.partition_point(|r| r.end <= slots.start);
        let some = all[from..].iter().take_while(move |r| r.start < slots.end);
        some.map(move |r| r.start.max(slots.start)..r.end.min(slots.end))
    }

    /// Returns the state of a head and a token.
    ///
    /// # Safety
    /// The head and the token are the part's own, and nobody else has their state.
    #[inline(always)]
    unsafe fn state<'s>(&self, head: usize, token: usize) -> State<'s> {
        let n = state_len(self.s.head_dim);
        // SAFETY: inside of the states, `[chunks, heads, tokens, n]`; the caller promises that nobody else has this one.
        let state =
            unsafe { std::slice::from_raw_parts_mut(self.states.add((head * self.s.tokens + token) * n), n) };
        let (first, values) = state.split_at_mut(1);
        let (top, sum) = first[0].split_at_mut(1);
        State { top: &mut top[0], sum: &mut sum[0], values: values.as_flattened_mut() }
    }

    fn query(&self, head: usize, token: usize) -> &[f32] {
        let (q, at) = self.q;
        &q[at.first + head * at.head + token * at.token..][..self.s.head_dim]
    }

    /// Returns the queries of N heads; where there are fewer, the first is repeated.
    #[inline(always)]
    fn queries<const N: usize>(&self, token: usize) -> [&[f32]; N] {
        let mut queries = [self.query(self.heads.start, token); N];
        for (h, query) in queries.iter_mut().enumerate().take(self.heads.len()) {
            *query = self.query(self.heads.start + h, token);
        }
        queries
    }

    /// Returns the end of the last slot that a token sees.
    fn end(&self, token: usize) -> usize {
        self.seen.runs(token).last().map_or(0, |r| r.end)
    }

    /// Resets the states.
    fn clear(&self) {
        for head in self.heads.clone() {
            for token in self.tokens.clone() {
                // SAFETY: the part's own; dropped at once.
                let state = unsafe { self.state(head, token) };
                (*state.top, *state.sum) = (f32::NEG_INFINITY, 0.0);
                state.values.fill(0.0);
            }
        }
    }

    /// Iterates over the blocks of which a token sees something, with the slots from the first to the last that any sees.
    fn blocks(&self) -> impl Iterator<Item = (Range<usize>, Range<usize>)> + '_ {
        self.slots.clone().step_by(BLOCK).filter_map(|start| {
            let slots = start..self.slots.end.min(start + BLOCK);
            let seen = self.tokens.clone().flat_map(|t| self.runs(t, &slots));
            let (low, high) = seen.fold((usize::MAX, 0), |(a, b), r| (a.min(r.start), b.max(r.end)));
            (low < high).then_some((slots, low..high))
        })
    }
}

/// Computes `softmax(scale q k^T + mask) v` for each head. Masked slots are not read.
///
/// A token's result does not depend on the other tokens or the number of threads. Returns the bytes of keys and values read,
/// each counted once; for several tokens those from the first slot to the last that any sees.
///
/// # Panics
/// Lengths do not fit.
#[allow(clippy::too_many_arguments)]
pub fn attention(
    pool: &Pool,
    s: &AttentionShape,
    scale: f32,
    (q, q_at): (&[f32], HeadStrides),
    k: &CacheView<'_>,
    v: &CacheView<'_>,
    mask: Option<Mask<'_>>,
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
    assert!(
        are_apart((s.heads, out_at.head), (s.tokens, out_at.token), s.head_dim),
        "results do not overlap"
    );
    let mut seen = SEEN.take();
    seen.find(pool, s, mask);
    // Chunks at either end that no token sees are skipped.
    let start = seen.runs.iter().map(|r| r.start / CHUNK).min().unwrap_or(0);
    let end = seen.runs.iter().map(|r| r.end.div_ceil(CHUNK)).max().unwrap_or(0).max(start + 1);
    let work: usize = seen.runs.iter().map(Range::len).sum();
    let state = state_len(s.head_dim);
    let chunk = s.heads * s.tokens * state;
    let mut states = std::mem::take(&mut seen.states);
    states.grow((end - start) * chunk, [0.0; LANES]);
    struct OutputRows<T>(*mut T);
    // SAFETY: each part writes what belongs to its own heads, tokens and chunk.
    unsafe impl<T> Sync for OutputRows<T> {}
    let target = OutputRows(states.as_mut_ptr());
    let group = s.heads / s.kv_heads;
    let (groups, blocks) = (group.div_ceil(GROUP), s.tokens.div_ceil(TOKENS));
    let part = |i: usize| {
        let target = &target;
        let (i, block) = (i / blocks, i % blocks);
        let (i, first) = (i / groups, i % groups * GROUP);
        let (c, kv_head) = (i / s.kv_heads, i % s.kv_heads);
        let slots = (start + c) * CHUNK;
        let part = Part {
            s,
            scale,
            q: (q, q_at),
            mask,
            seen: &seen,
            kv_head,
            heads: kv_head * group + first..kv_head * group + group.min(first + GROUP),
            tokens: block * TOKENS..s.tokens.min((block + 1) * TOKENS),
            slots: slots..s.slots.min(slots + CHUNK),
            // SAFETY: inside of `states`.
            states: unsafe { target.0.add(c * chunk) },
        };
        let mut scratch = SCRATCH.take();
        run(&part, k, v, &mut scratch);
        SCRATCH.set(scratch);
    };
    let parts = (end - start) * s.kv_heads * groups * blocks;
    let parallel = work * s.heads * s.head_dim >= PARALLEL;
    if parallel {
        pool.run(parts, &part)
    } else {
        (0..parts).for_each(part)
    }
    let target = OutputRows(out.as_mut_ptr());
    let last = |head: usize| {
        let target = &target;
        for token in 0..s.tokens {
            let of = |c: usize| &states[c * chunk + (head * s.tokens + token) * state..][..state];
            let at = out_at.first + head * out_at.head + token * out_at.token;
            // SAFETY: inside of `out`, as asserted; heads and tokens do not overlap.
            let out = unsafe { std::slice::from_raw_parts_mut(target.0.add(at), s.head_dim) };
            finish((0..end - start).map(of), out);
        }
    };
    if parallel && s.tokens > 1 {
        pool.run(s.heads, &last)
    } else {
        (0..s.heads).for_each(last)
    }
    let low = seen.runs.iter().map(|r| r.start).min().unwrap_or(0);
    let high = seen.runs.iter().map(|r| r.end).max().unwrap_or(0);
    let read = if s.tokens == 1 { work } else { high - low };
    seen.states = states;
    SEEN.set(seen);
    (read * s.kv_heads * s.head_dim * (k.values.size() + v.values.size())) as u64
}

/// Checks that pieces of `len` elements on two axes, each a count and a stride, do not overlap.
fn are_apart(a: (usize, usize), b: (usize, usize), len: usize) -> bool {
    let (inner, outer) = if a.1 <= b.1 && a.0 > 1 || b.0 == 1 { (a, b) } else { (b, a) };
    let width = (inner.0 - 1).checked_mul(inner.1).and_then(|w| w.checked_add(len));
    (inner.0 == 1 || inner.1 >= len) && (outer.0 == 1 || width.is_some_and(|width| outer.1 >= width))
}

/// Merges the states of the chunks, in order.
fn finish<'a>(chunks: impl Iterator<Item = &'a [[f32; LANES]]> + Clone, out: &mut [f32]) {
    let top = chunks.clone().map(|c| c[0][0]).fold(f32::NEG_INFINITY, f32::max);
    let mut total = 0.0;
    out.fill(0.0);
    for chunk in chunks {
        let [this, sum, ..] = chunk[0];
        // No slot of the chunk was seen.
        if sum == 0.0 {
            continue;
        }
        let factor = (this - top).exp();
        total += sum * factor;
        out.iter_mut().zip(chunk[1..].as_flattened()).for_each(|(o, v)| *o += v * factor);
    }
    let factor = 1.0 / total;
    out.iter_mut().for_each(|o| *o *= factor);
}

simd_fn! {
    fn run(part: &Part<'_>, k: &CacheView<'_>, v: &CacheView<'_>, scratch: &mut Scratch) = run_on
}

#[inline(always)]
fn run_on<L: F32x16>(part: &Part<'_>, k: &CacheView<'_>, v: &CacheView<'_>, scratch: &mut Scratch) {
    part.clear();
    for (slots, seen) in part.blocks() {
        let (keys, values) = match (k.values, v.values) {
            (CacheValues::F16(keys), CacheValues::F16(values)) if part.tokens.len() == 1 => {
                let (keys, values) = (k.head(keys, part.kv_head), v.head(values, part.kv_head));
                block::<L, _>(part, &slots, keys, values);
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
        block::<L, _>(part, &slots, keys, values);
    }
}

/// Widens some slots of the part's head to f32.
#[inline(always)]
fn widen<'o, L: F32x16>(
    part: &Part<'_>,
    view: &CacheView<'_>,
    slots: Range<usize>,
    out: &'o mut AlignedVec<[f32; LANES]>,
) -> Slots<&'o [f32]> {
    let (d, n) = (part.s.head_dim, part.s.head_dim.div_ceil(LANES));
    out.grow(BLOCK * n, [0.0; LANES]);
    for (slot, out) in slots.clone().zip(out.chunks_exact_mut(n)) {
        let at = view.first + part.kv_head * view.head_stride + slot * view.slot_stride;
        match view.values {
            CacheValues::F16(values) => {
                let whole = values[at..at + d].as_chunks::<LANES>().0;
                for (halves, out) in whole.iter().zip(out.iter_mut()) {
                    // SAFETY: sixteen halves.
                    unsafe { halves.as_slice().vector::<L>(0) }.store(out);
                }
                for c in d / LANES * LANES..d {
                    out.as_flattened_mut()[c] = values.element(at + c);
                }
            }
            CacheValues::F32(values) => out.as_flattened_mut()[..d].copy_from_slice(&values[at..at + d]),
        }
    }
    let stride = n * LANES;
    Slots { values: out.as_flattened(), first: 0usize.wrapping_sub(slots.start * stride), stride }
}

/// Computes all heads and tokens of a part over one block.
#[inline(always)]
fn block<L: F32x16, T: Elements>(part: &Part<'_>, slots: &Range<usize>, k: Slots<T>, v: Slots<T>) {
    if part.tokens.len() == 1 {
        return tokens::<L, T, 1>(part, &part.tokens, slots, k, v);
    }
    for first in part.tokens.clone().step_by(NEAR) {
        let some = first..part.tokens.end.min(first + NEAR);
        tokens::<L, T, NEAR>(part, &some, slots, k, v);
    }
}

/// Computes up to G tokens; sixteen sums are under way, whatever the number of heads.
#[inline(always)]
fn tokens<L: F32x16, T: Elements, const G: usize>(
    part: &Part<'_>,
    tokens: &Range<usize>,
    slots: &Range<usize>,
    k: Slots<T>,
    v: Slots<T>,
) {
    match part.heads.len() {
        1 => heads::<L, T, G, 1, 16, 8>(part, tokens, slots, k, v),
        2 => heads::<L, T, G, 2, 8, 8>(part, tokens, slots, k, v),
        3 | 4 => heads::<L, T, G, 4, 4, 4>(part, tokens, slots, k, v),
        _ => heads::<L, T, G, 8, 2, 2>(part, tokens, slots, k, v),
    }
}

/// Computes up to N heads of up to G tokens over one block, S slots' scores and WIDE vectors of values at a time. Tokens take
/// turns every [`SLOTS`] slots, which stay in L1.
#[inline(always)]
fn heads<L: F32x16, T: Elements, const G: usize, const N: usize, const S: usize, const WIDE: usize>(
    part: &Part<'_>,
    tokens: &Range<usize>,
    slots: &Range<usize>,
    k: Slots<T>,
    v: Slots<T>,
) {
    let n = part.heads.len();
    // Weights of the slots that each token sees, for N heads: the first `counts` of each.
    let (mut all, mut counts) = ([[[0f32; BLOCK]; N]; G], [0; G]);
    // One token needs no turns.
    let turn = if G == 1 { BLOCK } else { SLOTS };
    for first in slots.clone().step_by(turn) {
        let some = first..slots.end.min(first + turn);
        for ((token, weights), seen) in tokens.clone().zip(&mut all).zip(&mut counts) {
            let mask = part.mask.map(|m| &m.values[token * m.token_stride..][..part.s.slots]);
            let queries = part.queries::<N>(token);
            for run in part.runs(token, &some) {
                let start = *seen;
                for first in run.clone().step_by(S) {
                    let next = (G == 1).then_some(v);
                    let sums = dots::<L, T, N, S>(&queries, k, (first, run.end - 1), next);
                    let mut scores = [0f32; SUMS];
                    sums.mul(L::splat(part.scale)).store(&mut scores);
                    for (weights, scores) in weights.iter_mut().zip(scores.as_chunks::<S>().0) {
                        // Scores past the run are overwritten.
                        match weights[*seen..].first_chunk_mut() {
                            Some(weights) => *weights = *scores,
                            None => {
                                let rest = BLOCK - *seen;
                                weights[*seen..].copy_from_slice(&scores[..rest]);
                            }
                        }
                    }
                    *seen += S.min(run.end - first);
                }
                if let Some(mask) = mask {
                    for weights in weights.iter_mut().take(n) {
                        let scores = &mut weights[start..*seen];
                        scores.iter_mut().zip(&mask[run.clone()]).for_each(|(w, m)| *w += m);
                    }
                }
            }
        }
    }
    for (g, token) in tokens.clone().enumerate() {
        for h in 0..n {
            // SAFETY: the part's own; dropped before the next one is made.
            let state = unsafe { part.state(part.heads.start + h, token) };
            weigh::<L>(&mut all[g][h][..counts[g]], state);
        }
    }
    let (d, mut added) = (part.s.head_dim, [0; G]);
    let turn = if G == 1 { (NEAR_VALUES / d).clamp(SLOTS, BLOCK) } else { SLOTS };
    for first in slots.clone().step_by(turn) {
        let some = first..slots.end.min(first + turn);
        for ((token, weights), added) in tokens.clone().zip(&all).zip(&mut added) {
            // SAFETY: the part's own heads and token, each once; dropped before the next ones are made.
            let mut states: [Option<State<'_>>; N] =
                std::array::from_fn(|h| (h < n).then(|| unsafe { part.state(part.heads.start + h, token) }));
            let next = (G == 1).then_some((k, part.end(token)));
            for run in part.runs(token, &some) {
                let n = run.len();
                add_values::<L, T, N, WIDE>(weights, *added, v, run, &mut states, (d, next));
                *added += n;
            }
        }
    }
}

/// Turns scores into weights against the largest score so far, and scales the state to it.
#[inline(always)]
fn weigh<L: F32x16>(weights: &mut [f32], state: State<'_>) {
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

/// Sums under way: of N queries with S keys.
const SUMS: usize = LANES;

/// Returns the dot products of N queries with S keys from slot `first` on, `[N, S]`; `last` is repeated past the end.
/// Prefetches `next` in the same slots.
#[inline(always)]
fn dots<L: F32x16, T: Elements, const N: usize, const S: usize>(
    q: &[&[f32]; N],
    k: Slots<T>,
    (first, last): (usize, usize),
    next: Option<Slots<T>>,
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
                ask(next, (first + s).min(last), c);
            }
            let mut queries = [L::splat(0.0); N];
            for h in 0..N {
                // SAFETY: c + LANES is at most d, and so many elements are there, as asserted.
                queries[h] = unsafe { q[h].vector(c) };
            }
            for s in 0..S {
                // SAFETY: c + LANES is at most d, and so many elements are there, as asserted.
                let key = unsafe { k.values.vector::<L>(at[s] + c) };
                for h in 0..N {
                    acc[s][h] = key.mul_add(queries[h], acc[s][h]);
                }
            }
        }
    } else {
        // Four sums at a time, of as few keys as possible.
        let (heads, keys) = (N.min(4), 4 / N.min(4));
        for group in 0..SUMS / 4 {
            let (s, h) = (group * 4 / N, group * 4 % N);
            let mut four = [L::splat(0.0); 4];
            for c in (0..whole).step_by(LANES) {
                for j in 0..keys {
                    if h == 0 {
                        ask(next, (first + s + j).min(last), c);
                    }
                    // SAFETY: c + LANES is at most d, and so many elements are there, as asserted.
                    let key = unsafe { k.values.vector::<L>(at[s + j] + c) };
                    for i in 0..heads {
                        // SAFETY: c + LANES is at most d, and so many elements are there, as asserted.
                        let query = unsafe { q[h + i].vector::<L>(c) };
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
            *sum += q[i / S][c] * k.values.element(at[i % S] + c);
        }
    }
    L::load(&all)
}

/// Prefetches two vectors of a slot from channel c on, at every other c.
#[inline(always)]
fn ask<T: Elements>(next: Option<Slots<T>>, slot: usize, c: usize) {
    if let Some(next) = next
        && c.is_multiple_of(2 * LANES)
    {
        next.values.prefetch(next.at(slot).wrapping_add(c), 2 * LANES);
    }
}

/// Adds the weighted values of some slots, the first of which has weight i. Prefetches `next` in the next block, up to the slot
/// that is given.
#[inline(always)]
fn add_values<L: F32x16, T: Elements, const N: usize, const WIDE: usize>(
    weights: &[[f32; BLOCK]; N],
    i: usize,
    v: Slots<T>,
    slots: Range<usize>,
    states: &mut [Option<State<'_>>; N],
    (d, next): (usize, Option<(Slots<T>, usize)>),
) {
    assert!(i + slots.len() <= BLOCK);
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
            let value = v.values.element(v.at(slot) + c);
            for (weights, state) in weights.iter().zip(states.iter_mut()) {
                if let Some(state) = state {
                    state.values[c] += weights[i + n] * value;
                }
            }
        }
    }
}

/// Adds WIDE vectors of weighted values from channel c on, as [`add_values`] does.
#[inline(always)]
fn add_vectors<L: F32x16, T: Elements, const N: usize, const WIDE: usize>(
    weights: &[[f32; BLOCK]; N],
    i: usize,
    v: Slots<T>,
    slots: Range<usize>,
    states: &mut [Option<State<'_>>; N],
    (c, next): (usize, Option<(Slots<T>, usize)>),
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
            && slot + BLOCK < end
        {
            next.values.prefetch(next.at(slot + BLOCK).wrapping_add(c), WIDE * LANES);
        }
        assert!(at <= v.values.len() && WIDE * LANES <= v.values.len() - at);
        let mut factors = [L::splat(0.0); N];
        for h in 0..N {
            factors[h] = L::splat(weights[h][i + n]);
        }
        for j in 0..WIDE {
            // SAFETY: so many vectors are there, as asserted.
            let value = unsafe { v.values.vector::<L>(at + j * LANES) };
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
