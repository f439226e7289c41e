//! Attention of a few tokens over a cache, of which each token sees some runs of slots.

use crate::Pool;
use crate::lanes::{LANES, Lanes};
use crate::vector::{dispatch, exp_sum};
use std::cell::RefCell;
use std::ops::Range;

/// Elements of a cache.
#[derive(Clone, Copy, Debug)]
pub enum CacheValues<'a> {
    /// As bits.
    F16(&'a [u16]),
    /// f32.
    F32(&'a [f32]),
}

/// Keys or values of all heads: `head_dim` elements that lie together for each head and slot.
#[derive(Clone, Copy, Debug)]
pub struct CacheView<'a> {
    /// The elements.
    pub values: CacheValues<'a>,
    /// Place of head 0, slot 0.
    pub first: usize,
    /// From head to head.
    pub head_stride: usize,
    /// From slot to slot.
    pub slot_stride: usize,
}

/// Queries `[heads, tokens, head_dim]`, or what attention gives for them, with channels together.
#[derive(Clone, Copy, Debug)]
pub struct HeadStrides {
    /// Place of head 0, token 0.
    pub first: usize,
    /// From head to head.
    pub head: usize,
    /// From token to token.
    pub token: usize,
}

/// Sizes of an attention.
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

/// What is added to the scores: `[tokens, slots]` with slots together.
#[derive(Clone, Copy, Debug)]
pub struct Mask<'a> {
    /// The elements.
    pub values: &'a [f32],
    /// From token to token.
    pub token_stride: usize,
}

/// A slot whose mask is this far below the token's largest is not seen: `e` to the power of the difference is zero by far.
const UNSEEN: f32 = 20_000.0;
/// Multiplications from which several threads are worth it.
const PARALLEL: usize = 1 << 16;
/// Most query heads that read a key together.
const GROUP: usize = 4;
/// Slots whose values are added before the next channels.
const SLOTS: usize = 32;

impl CacheView<'_> {
    fn check(&self, s: &AttentionShape) {
        let len = match self.values {
            CacheValues::F16(v) => v.len(),
            CacheValues::F32(v) => v.len(),
        };
        let end =
            self.first + (s.kv_heads - 1) * self.head_stride + (s.slots - 1) * self.slot_stride + s.head_dim;
        assert!(end <= len, "heads and slots lie inside the cache");
    }

    #[inline(always)]
    fn vector<L: Lanes>(&self, at: usize) -> L {
        match self.values {
            CacheValues::F16(v) => {
                let v: &[u16; LANES] = match v[at..at + LANES].try_into() {
                    Ok(v) => v,
                    Err(_) => unreachable!("sixteen elements"),
                };
                // SAFETY: sixteen halves are 32 initialized bytes.
                L::from_f16(unsafe { &*v.as_ptr().cast() })
            }
            CacheValues::F32(v) => match v[at..at + LANES].try_into() {
                Ok(v) => L::load(v),
                Err(_) => unreachable!("sixteen elements"),
            },
        }
    }

    fn element(&self, at: usize) -> f32 {
        match self.values {
            CacheValues::F16(v) => half::f16::from_bits(v[at]).to_f32(),
            CacheValues::F32(v) => v[at],
        }
    }
}

/// Appends the runs of slots that a token sees.
fn add_runs(mask: &[f32], out: &mut Vec<Range<usize>>) {
    let (chunks, rest) = mask.as_chunks::<LANES>();
    let mut lanes = [f32::NEG_INFINITY; LANES];
    for chunk in chunks {
        for l in 0..LANES {
            lanes[l] = if chunk[l] > lanes[l] { chunk[l] } else { lanes[l] };
        }
    }
    let largest = lanes.iter().chain(rest).copied().fold(f32::NEG_INFINITY, f32::max);
    let bound = if largest.is_finite() { largest - UNSEEN } else { f32::NEG_INFINITY };
    let mut start = None;
    for (i, chunk) in mask.chunks(LANES).enumerate() {
        // Most chunks are of one kind.
        let below: usize = chunk.iter().map(|m| usize::from(*m < bound)).sum();
        if below == chunk.len() {
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

#[derive(Default)]
struct Scratch {
    /// `[heads of a key/value head, slots that are seen]`
    scores: Vec<f32>,
    out: Vec<f32>,
}

/// What the tokens of a call see.
#[derive(Default)]
struct Seen {
    runs: Vec<Range<usize>>,
    /// First run of each token, and the end.
    first: Vec<usize>,
}

thread_local! {
    static SCRATCH: RefCell<Scratch> = RefCell::default();
    static SEEN: RefCell<Seen> = RefCell::default();
}

/// `softmax(scale q k^T + mask) v` for each head; the cache's slots that a token's mask rules out are not read.
///
/// A token's result does not depend on the other tokens or the number of threads.
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
) {
    if s.heads == 0 || s.tokens == 0 || s.slots == 0 || s.head_dim == 0 {
        return;
    }
    assert!(s.kv_heads > 0 && s.heads.is_multiple_of(s.kv_heads), "query heads per key/value head");
    k.check(s);
    v.check(s);
    for (at, len) in [(q_at, q.len()), (out_at, out.len())] {
        let end = at.first + (s.heads - 1) * at.head + (s.tokens - 1) * at.token + s.head_dim;
        assert!(end <= len, "heads and tokens lie inside");
    }
    if let Some(m) = mask {
        assert!((s.tokens - 1) * m.token_stride + s.slots <= m.values.len(), "a mask per token and slot");
    }
    assert!(out_at.head >= s.head_dim && out_at.token >= s.head_dim, "results do not overlap");
    struct Target(*mut f32);
    // SAFETY: each part writes the results of its own heads and token.
    unsafe impl Sync for Target {}
    let target = Target(out.as_mut_ptr());
    let group = s.heads / s.kv_heads;
    let mut seen = SEEN.take();
    seen.runs.clear();
    seen.first.clear();
    seen.first.push(0);
    for token in 0..s.tokens {
        match mask {
            Some(m) => add_runs(&m.values[token * m.token_stride..][..s.slots], &mut seen.runs),
            None => seen.runs.push(0..s.slots),
        }
        seen.first.push(seen.runs.len());
    }
    let most = (0..s.tokens).map(|t| count(&seen.runs[seen.first[t]..seen.first[t + 1]])).max().unwrap_or(0);
    let part = |i: usize| {
        let target = &target;
        let (head, token) = (i / s.tokens, i % s.tokens);
        let mut scratch = SCRATCH.take();
        let runs = &seen.runs[seen.first[token]..seen.first[token + 1]];
        let mask = mask.map(|m| &m.values[token * m.token_stride..][..s.slots]);
        for first in (0..group).step_by(GROUP) {
            let n = GROUP.min(group - first);
            let at = |h: usize, at: &HeadStrides| {
                at.first + (head * group + first + h) * at.head + token * at.token
            };
            let mut queries: [&[f32]; GROUP] = [&[]; GROUP];
            for (h, query) in queries.iter_mut().enumerate().take(n) {
                *query = &q[at(h, &q_at)..][..s.head_dim];
            }
            heads(&queries[..n], (k, v), (head, count(runs), scale), runs, mask, &mut scratch);
            for h in 0..n {
                // SAFETY: inside of `out`, as asserted; no other part writes this head and token.
                let out = unsafe { std::slice::from_raw_parts_mut(target.0.add(at(h, &out_at)), s.head_dim) };
                out.copy_from_slice(&scratch.out[h * s.head_dim..(h + 1) * s.head_dim]);
            }
        }
        SCRATCH.set(scratch);
    };
    let parts = s.kv_heads * s.tokens;
    if parts * group * s.head_dim * most < PARALLEL {
        (0..parts).for_each(part);
    } else {
        pool.run(parts, &part);
    }
    SEEN.set(seen);
}

fn count(runs: &[Range<usize>]) -> usize {
    runs.iter().map(Range::len).sum()
}

dispatch! {
    fn heads(q: &[&[f32]], kv: (&CacheView<'_>, &CacheView<'_>), what: (usize, usize, f32), runs: &[Range<usize>], mask: Option<&[f32]>, scratch: &mut Scratch) = heads_on
}

#[inline(always)]
fn heads_on<L: Lanes>(
    q: &[&[f32]],
    (k, v): (&CacheView<'_>, &CacheView<'_>),
    (head, seen, scale): (usize, usize, f32),
    runs: &[Range<usize>],
    mask: Option<&[f32]>,
    scratch: &mut Scratch,
) {
    let (n, d) = (q.len(), q[0].len());
    let Scratch { scores, out } = scratch;
    scores.resize(n * seen, 0.0);
    let mut i = 0;
    for run in runs.iter() {
        for slot in run.clone() {
            let at = k.first + head * k.head_stride + slot * k.slot_stride;
            let sums = match n {
                1 => dots::<L, 1>(q, k, at, d),
                2 => dots::<L, 2>(q, k, at, d),
                3 => dots::<L, 3>(q, k, at, d),
                _ => dots::<L, 4>(q, k, at, d),
            };
            for h in 0..n {
                scores[h * seen + i] = sums[h] * scale + mask.map_or(0.0, |m| m[slot]);
            }
            i += 1;
        }
    }
    let mut factors = [0f32; GROUP];
    for h in 0..n {
        let mut sum = 0.0;
        exp_sum(&mut scores[h * seen..(h + 1) * seen], &mut sum);
        factors[h] = 1.0 / sum;
    }
    out.clear();
    out.resize(n * d, 0.0);
    let mut i = 0;
    for run in runs.iter() {
        for first in run.clone().step_by(SLOTS) {
            let slots = first..run.end.min(first + SLOTS);
            let at = v.first + head * v.head_stride;
            match n {
                1 => add_values::<L, 1>(scores, seen, i, v, at, slots.clone(), out, d),
                2 => add_values::<L, 2>(scores, seen, i, v, at, slots.clone(), out, d),
                3 => add_values::<L, 3>(scores, seen, i, v, at, slots.clone(), out, d),
                _ => add_values::<L, 4>(scores, seen, i, v, at, slots.clone(), out, d),
            }
            i += slots.len();
        }
    }
    for h in 0..n {
        for o in &mut out[h * d..(h + 1) * d] {
            *o *= factors[h];
        }
    }
}

/// Inner products of N queries with one key.
#[inline(always)]
fn dots<L: Lanes, const N: usize>(q: &[&[f32]], k: &CacheView<'_>, at: usize, d: usize) -> [f32; GROUP] {
    let mut acc = [L::splat(0.0); GROUP];
    let whole = d / LANES * LANES;
    for c in (0..whole).step_by(LANES) {
        let key = k.vector::<L>(at + c);
        for h in 0..N {
            if let Ok(q) = q[h][c..c + LANES].try_into() {
                acc[h] = key.mul_add(L::load(q), acc[h]);
            }
        }
    }
    let mut sums = L::totals(acc);
    for c in whole..d {
        let key = k.element(at + c);
        for h in 0..N {
            sums[h] += q[h][c] * key;
        }
    }
    sums
}

/// Adds the weighted values of some slots, the `i`th that are seen and on.
#[inline(always)]
#[allow(clippy::too_many_arguments)]
fn add_values<L: Lanes, const N: usize>(
    weights: &[f32],
    seen: usize,
    i: usize,
    v: &CacheView<'_>,
    at: usize,
    slots: Range<usize>,
    out: &mut [f32],
    d: usize,
) {
    const WIDE: usize = 4;
    let mut c = 0;
    while c + LANES <= d {
        let wide = if c + WIDE * LANES <= d { WIDE } else { 1 };
        let mut acc = [[L::splat(0.0); WIDE]; N];
        for h in 0..N {
            for j in 0..WIDE {
                if j < wide
                    && let Ok(o) = out[h * d + c + j * LANES..][..LANES].try_into()
                {
                    acc[h][j] = L::load(o);
                }
            }
        }
        for (n, slot) in slots.clone().enumerate() {
            let at = at + slot * v.slot_stride + c;
            for j in 0..WIDE {
                if j < wide {
                    let value = v.vector::<L>(at + j * LANES);
                    for h in 0..N {
                        acc[h][j] = value.mul_add(L::splat(weights[h * seen + i + n]), acc[h][j]);
                    }
                }
            }
        }
        for h in 0..N {
            for j in 0..WIDE {
                if j < wide
                    && let Ok(o) = (&mut out[h * d + c + j * LANES..][..LANES]).try_into()
                {
                    acc[h][j].store(o);
                }
            }
        }
        c += wide * LANES;
    }
    for c in c..d {
        for (n, slot) in slots.clone().enumerate() {
            let value = v.element(at + slot * v.slot_stride + c);
            for h in 0..N {
                out[h * d + c] += weights[h * seen + i + n] * value;
            }
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::test_data::noise;

    #[test]
    fn attention_is_that_of_f64_and_a_token_does_not_depend_on_others() {
        for (heads, kv_heads, tokens, d, slots) in
            [(1, 1, 1, 1, 1), (4, 2, 3, 64, 40), (6, 1, 2, 20, 70), (8, 2, 5, 128, 33), (3, 3, 4, 17, 100)]
        {
            let s = AttentionShape { heads, kv_heads, tokens, head_dim: d, slots };
            let q = noise(1, heads * tokens * d);
            let kv = noise(2, 2 * kv_heads * slots * d);
            let halves: Vec<u16> = kv.iter().map(|v| half::f16::from_f32(*v).to_bits()).collect();
            let mut mask = vec![-30000f32; tokens * slots];
            for t in 0..tokens {
                for i in 0..slots {
                    if i % 7 != 3 && i <= slots / 2 + t || i == slots - 1 {
                        mask[t * slots + i] = 0.0;
                    }
                }
            }
            fn view(values: CacheValues<'_>, first: usize, s: AttentionShape) -> CacheView<'_> {
                let (head_stride, slot_stride) = (s.slots * s.head_dim, s.head_dim);
                CacheView { values, first, head_stride, slot_stride }
            }
            let strides = HeadStrides { first: 0, head: tokens * d, token: d };
            let run = |pool: &Pool, values: CacheValues<'_>| {
                let mut out = vec![0f32; heads * tokens * d];
                let m = Mask { values: &mask, token_stride: slots };
                let (k, v) = (view(values, 0, s), view(values, kv_heads * slots * d, s));
                attention(pool, &s, 0.3, (&q, strides), &k, &v, Some(m), (&mut out, strides));
                out
            };
            let (one, many) = (Pool::new(1), Pool::new(5));
            for values in [CacheValues::F32(&kv), CacheValues::F16(&halves)] {
                let out = run(&one, values);
                assert_eq!(out, run(&many, values));
                let at = |i: usize| match values {
                    CacheValues::F32(v) => f64::from(v[i]),
                    CacheValues::F16(v) => half::f16::from_bits(v[i]).to_f64(),
                };
                for h in 0..heads {
                    for t in 0..tokens {
                        let g = h / (heads / kv_heads);
                        let q = &q[(h * tokens + t) * d..][..d];
                        let scores: Vec<f64> = (0..slots)
                            .map(|i| {
                                let dot: f64 =
                                    (0..d).map(|c| f64::from(q[c]) * at((g * slots + i) * d + c)).sum();
                                (dot * f64::from(0.3f32) + f64::from(mask[t * slots + i])).exp()
                            })
                            .collect();
                        let sum: f64 = scores.iter().sum();
                        for c in 0..d {
                            let exact: f64 = (0..slots)
                                .map(|i| scores[i] / sum * at(((kv_heads + g) * slots + i) * d + c))
                                .sum();
                            let got = f64::from(out[(h * tokens + t) * d + c]);
                            assert!((got - exact).abs() < 1e-5, "{s:?}: {got}, expected {exact}");
                        }
                    }
                }
                // The last token by itself.
                let t = tokens - 1;
                let alone = AttentionShape { tokens: 1, ..s };
                let mut single = vec![0f32; heads * d];
                let at = HeadStrides { first: t * d, ..strides };
                let m = Mask { values: &mask[t * slots..], token_stride: slots };
                let (k, v) = (view(values, 0, s), view(values, kv_heads * slots * d, s));
                let to = HeadStrides { first: 0, head: d, token: heads * d };
                attention(&one, &alone, 0.3, (&q, at), &k, &v, Some(m), (&mut single, to));
                for h in 0..heads {
                    assert_eq!(single[h * d..(h + 1) * d], out[(h * tokens + t) * d..][..d]);
                }
            }
        }
    }

    #[test]
    fn unseen_slots_are_in_no_run() {
        let mut found = Vec::new();
        let mut mask = vec![-30000f32; 70];
        found.clear();
        add_runs(&mask, &mut found);
        assert_eq!((found.len(), found[0].clone()), (1, 0..70));
        mask[3] = 0.0;
        mask[16..40].fill(0.0);
        mask[69] = -1.0;
        found.clear();
        add_runs(&mask, &mut found);
        assert_eq!(found, [3..4, 16..40, 69..70]);
    }
}
