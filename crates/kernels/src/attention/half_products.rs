//! Attention over keys and values of fp16 that are multiplied as they are stored, thirty-two at a time (AVX512-FP16).
//!
//! A query is multiplied by the power of two that brings its largest element to between 1 and 2, and rounded to fp16. Products
//! of at most four vectors, 128 channels, are added in fp16, and so are quarters of their lanes; the eight that are left are
//! widened, and everything behind that is f32. Weights of a block's slots are multiplied by a power of two too, so that the
//! largest is about 1, and rounded; products of up to [`SLOTS`] slots, which start at fixed ones, are added in fp16 and then
//! to the sums in f32.
//!
//! What becomes too large for fp16 on the way is not finite, and made again in f32: a score by itself, or one vector of a
//! head's weighted values of these slots. So a token's result does not depend on what is beside it here either.
//!
//! None of this has run on a processor with AVX512-FP16 so far, only in an emulator of one; see `docs/cpu.md`.
// Without these instructions only tests come here.
#![cfg_attr(not(target_arch = "x86_64"), allow(dead_code))]

#[cfg(test)]
mod tests;

use super::{Arithmetic, BLOCK, Elements, Part, Products, SLOTS, SUMS, Slots, State, Weights};
use super::{ask, block, dots};
use crate::Isa;
use crate::lanes::{LANES, Lanes};
use crate::lines::Lines;
use crate::vector::largest;
use std::marker::PhantomData;
use std::ops::Range;

/// Numbers of a vector.
const WIDTH: usize = 32;
/// Channels whose products are added in fp16.
const CHANNELS: usize = 4 * WIDTH;
/// Elements of queries from which sums of f32 can become infinite on their way.
const LARGE: f32 = (1u128 << 100) as f32;
/// Largest power of two that weights are multiplied by; smaller ones than its inverse are zero anyway.
const RAISE: f32 = 125.0;

const _: () = assert!(BLOCK.is_multiple_of(SLOTS) && SLOTS == LANES && WIDTH == 2 * LANES);

/// Thirty-two fp16 numbers, beside the lanes of L.
trait Halves<L: Lanes>: Copy {
    fn zero() -> Self;
    /// # Safety
    /// There are 32 from `from` on.
    unsafe fn load(from: *const u16) -> Self;
    /// At most 32, and zeros behind them.
    fn load_some(from: &[u16]) -> Self;
    /// A pair of them sixteen times.
    fn repeat(pair: u32) -> Self;
    /// To the nearest fp16, ties to even, each one as a pair.
    fn pairs(v: L) -> [u32; LANES];
    /// `self * b + c`, rounded once.
    fn mul_add(self, b: Self, c: Self) -> Self;
    /// The first and the last sixteen as f32.
    fn widen(self) -> [L; 2];
    /// As [`Lanes::quarters`] of four vectors: lanes l, l + 8, l + 16 and l + 24 are added by halves in fp16, then lanes l and
    /// l + 4 of these in f32.
    fn quarters(v: [Self; 4]) -> L;
    /// All are.
    fn is_finite(self) -> bool;
    /// All are.
    fn are_finite(v: L) -> bool;
}

#[cfg(target_arch = "x86_64")]
mod x86 {
    use super::{Halves, WIDTH};
    use crate::lanes::LANES;
    use crate::lanes::x86::Avx512;
    use std::arch::x86_64::*;

    /// With the instructions of AVX512-FP16; exists only where `is_native` was asked for them.
    #[derive(Clone, Copy)]
    pub(super) struct Native(pub(super) __m512h);

    /// Halves, whatever they are taken for.
    #[inline(always)]
    fn add(a: __m512, b: __m512) -> __m512 {
        // SAFETY: the processor has AVX512-FP16.
        unsafe { _mm512_castph_ps(_mm512_add_ph(_mm512_castps_ph(a), _mm512_castps_ph(b))) }
    }

    impl Halves<Avx512> for Native {
        #[inline(always)]
        fn zero() -> Self {
            // SAFETY: the processor has AVX512-FP16.
            unsafe { Native(_mm512_setzero_ph()) }
        }
        #[inline(always)]
        unsafe fn load(from: *const u16) -> Self {
            // SAFETY: as this function's; the processor has AVX-512 F.
            unsafe { Native(_mm512_castsi512_ph(_mm512_loadu_si512(from.cast()))) }
        }
        #[inline(always)]
        fn load_some(from: &[u16]) -> Self {
            let mask = if from.len() < WIDTH { (1u32 << from.len()) - 1 } else { u32::MAX };
            // SAFETY: no others than the slice's are loaded; the processor has AVX-512 BW.
            unsafe { Native(_mm512_castsi512_ph(_mm512_maskz_loadu_epi16(mask, from.as_ptr().cast()))) }
        }
        #[inline(always)]
        fn repeat(pair: u32) -> Self {
            // SAFETY: the processor has AVX-512 F.
            unsafe { Native(_mm512_castsi512_ph(_mm512_set1_epi32(pair as i32))) }
        }
        #[inline(always)]
        fn pairs(v: Avx512) -> [u32; LANES] {
            // SAFETY: there is room for sixteen pairs; the processor has AVX-512 F.
            unsafe {
                let halves = _mm512_cvtepu16_epi32(_mm512_cvtps_ph::<_MM_FROUND_TO_NEAREST_INT>(v.0));
                let mut out = [0; LANES];
                let pairs = _mm512_or_si512(halves, _mm512_slli_epi32::<16>(halves));
                _mm512_storeu_si512(out.as_mut_ptr().cast(), pairs);
                out
            }
        }
        #[inline(always)]
        fn mul_add(self, b: Self, c: Self) -> Self {
            // SAFETY: the processor has AVX512-FP16.
            unsafe { Native(_mm512_fmadd_ph(self.0, b.0, c.0)) }
        }
        #[inline(always)]
        fn widen(self) -> [Avx512; 2] {
            // SAFETY: the processor has AVX-512 F.
            unsafe {
                let halves = _mm512_castph_si512(self.0);
                let (low, high) = (_mm512_castsi512_si256(halves), _mm512_extracti64x4_epi64::<1>(halves));
                [Avx512(_mm512_cvtph_ps(low)), Avx512(_mm512_cvtph_ps(high))]
            }
        }
        #[inline(always)]
        fn quarters(v: [Self; 4]) -> Avx512 {
            // SAFETY: the processor has AVX-512 F and FP16.
            unsafe {
                let [a, b] = [_mm512_castph_ps(v[0].0), _mm512_castph_ps(v[1].0)];
                let [c, d] = [_mm512_castph_ps(v[2].0), _mm512_castph_ps(v[3].0)];
                // Parts of four f32 are eight halves.
                let ab = add(_mm512_shuffle_f32x4::<0x44>(a, b), _mm512_shuffle_f32x4::<0xee>(a, b));
                let cd = add(_mm512_shuffle_f32x4::<0x44>(c, d), _mm512_shuffle_f32x4::<0xee>(c, d));
                let even = _mm512_shuffle_f32x4::<0x88>(ab, cd);
                let sums = add(even, _mm512_shuffle_f32x4::<0xdd>(ab, cd));
                let [ab, cd] = Native(_mm512_castps_ph(sums)).widen();
                let even = _mm512_shuffle_f32x4::<0x88>(ab.0, cd.0);
                Avx512(_mm512_add_ps(even, _mm512_shuffle_f32x4::<0xdd>(ab.0, cd.0)))
            }
        }
        #[inline(always)]
        fn is_finite(self) -> bool {
            // SAFETY: the processor has AVX-512 BW.
            unsafe {
                let exponent = _mm512_set1_epi16(0x7c00);
                let found = _mm512_and_si512(_mm512_castph_si512(self.0), exponent);
                _mm512_cmpeq_epi16_mask(found, exponent) == 0
            }
        }
        #[inline(always)]
        fn are_finite(v: Avx512) -> bool {
            // SAFETY: the processor has AVX-512 F.
            unsafe {
                let exponent = _mm512_set1_epi32(0x7f80_0000);
                let found = _mm512_and_si512(_mm512_castps_si512(v.0), exponent);
                _mm512_cmpeq_epi32_mask(found, exponent) == 0
            }
        }
    }
}

/// `isa` multiplies fp16.
pub(super) fn is_native(isa: Isa) -> bool {
    #[cfg(target_arch = "x86_64")]
    return isa >= Isa::Avx512 && std::arch::is_x86_feature_detected!("avx512fp16");
    #[cfg(not(target_arch = "x86_64"))]
    {
        let _ = isa;
        false
    }
}

/// One part of a call. The arithmetic is one of fp16.
pub(super) fn run(
    arithmetic: Arithmetic,
    part: &Part<'_>,
    k: Slots<&[u16]>,
    v: Slots<&[u16]>,
    queries: &mut Queries,
) {
    #[cfg(test)]
    if arithmetic == Arithmetic::Emulated {
        return tests::run(part, k, v, queries);
    }
    #[cfg(target_arch = "x86_64")]
    if arithmetic == Arithmetic::Halves && is_native(Isa::best()) {
        #[target_feature(enable = "avx512f,avx512bw,avx512vl,avx512fp16,avx2,fma,f16c")]
        fn native(part: &Part<'_>, k: Slots<&[u16]>, v: Slots<&[u16]>, queries: &mut Queries) {
            run_on::<crate::lanes::x86::Avx512, x86::Native>(part, k, v, queries);
        }
        // SAFETY: the processor has the instructions.
        return unsafe { native(part, k, v, queries) };
    }
    let _ = (part, k, v, queries);
    unreachable!("{arithmetic:?} without its instructions");
}

#[inline(always)]
fn run_on<L: Lanes, H: Halves<L>>(
    part: &Part<'_>,
    k: Slots<&[u16]>,
    v: Slots<&[u16]>,
    queries: &mut Queries,
) {
    part.clear();
    queries.round::<L, H>(part);
    let products = InHalves { queries, halves: PhantomData::<H> };
    for (slots, _) in part.blocks() {
        block::<L, _, _>(part, &products, &slots, k, v);
    }
}

/// A part's queries in fp16.
#[derive(Default)]
pub(super) struct Queries {
    /// `[heads, tokens, vectors]`
    halves: Lines<[u16; WIDTH]>,
    /// What each is to be multiplied by, `[heads, tokens]`.
    powers: Vec<f32>,
}

impl Queries {
    #[inline(always)]
    fn round<L: Lanes, H: Halves<L>>(&mut self, part: &Part<'_>) {
        let n = part.s.head_dim.div_ceil(WIDTH);
        self.halves.grow(part.heads.len() * part.tokens.len() * n, [0; WIDTH]);
        self.powers.clear();
        let mut out = self.halves.chunks_exact_mut(n);
        for head in part.heads.clone() {
            for token in part.tokens.clone() {
                let q = part.query(head, token);
                let mut lanes = L::splat(0.0);
                for c in (0..q.len()).step_by(LANES) {
                    let some = L::load(&sixteen(q, c));
                    lanes = lanes.max(some).max(some.mul(L::splat(-1.0)));
                }
                let mut magnitudes = [0f32; LANES];
                lanes.store(&mut magnitudes);
                let top = largest::<L>(&magnitudes);
                // Of what is no number all scores are made in f32.
                let power = if top < LARGE { power_below(top) } else { f32::NAN };
                self.powers.push(power);
                let out = out.next().expect("a query's vectors").as_flattened_mut();
                for (i, out) in out.as_chunks_mut::<LANES>().0.iter_mut().enumerate() {
                    let some = L::load(&sixteen(q, i * LANES)).mul(L::splat(1.0 / power));
                    for (out, pair) in out.iter_mut().zip(H::pairs(some)) {
                        *out = pair as u16;
                    }
                }
            }
        }
    }
}

/// Elements from c on, and zeros behind the last.
#[inline(always)]
fn sixteen(v: &[f32], c: usize) -> [f32; LANES] {
    let mut some = [0f32; LANES];
    if let Some(v) = v.get(c..) {
        let n = v.len().min(LANES);
        some[..n].copy_from_slice(&v[..n]);
    }
    some
}

/// The power of two that is at most v, which is finite and not negative; at least `2^-126`.
#[inline(always)]
fn power_below(v: f32) -> f32 {
    f32::from_bits((v.to_bits() & 0x7f80_0000).max(1 << 23))
}

/// In fp16.
struct InHalves<'a, H> {
    queries: &'a Queries,
    halves: PhantomData<H>,
}

/// Queries of a token's N heads.
struct Query<'a, const N: usize> {
    singles: [&'a [f32]; N],
    halves: [&'a [[u16; WIDTH]]; N],
    /// What inner products with `halves` are to be multiplied by.
    powers: [f32; SUMS],
}

impl<L: Lanes, H: Halves<L>> Products<L, &[u16]> for InHalves<'_, H> {
    type Queries<'a, const N: usize>
        = Query<'a, N>
    where
        Self: 'a;

    #[inline(always)]
    fn queries<'a, const N: usize, const S: usize>(
        &'a self,
        part: &'a Part<'_>,
        token: usize,
    ) -> Query<'a, N> {
        let n = part.s.head_dim.div_ceil(WIDTH);
        let mut q = Query { singles: part.queries(token), halves: [&[]; N], powers: [0.0; SUMS] };
        for h in 0..N {
            let head = if h < part.heads.len() { h } else { 0 };
            let at = head * part.tokens.len() + token - part.tokens.start;
            q.halves[h] = &self.queries.halves[at * n..][..n];
            q.powers[h * S..][..S].fill(self.queries.powers[at]);
        }
        q
    }

    #[inline(always)]
    fn dots<const N: usize, const S: usize>(
        &self,
        q: &Query<'_, N>,
        k: Slots<&[u16]>,
        at: (usize, usize),
        next: Option<Slots<&[u16]>>,
    ) -> L {
        let sums = half_dots::<L, H, N, S>(q, k, at, next).mul(L::load(&q.powers));
        if H::are_finite(sums) {
            return sums;
        }
        // Each by itself, since it depends on other tokens which ones are together.
        let (mut all, mut exact) = ([0f32; SUMS], [0f32; SUMS]);
        dots::<L, _, N, S>(&q.singles, k, at, None).store(&mut exact);
        sums.store(&mut all);
        for (sum, exact) in all.iter_mut().zip(exact) {
            if !sum.is_finite() {
                *sum = exact;
            }
        }
        L::load(&all)
    }

    #[inline(always)]
    fn add_values<const G: usize, const N: usize, const WIDE: usize>(
        &self,
        part: &Part<'_>,
        tokens: &Range<usize>,
        slots: &Range<usize>,
        weights: &Weights<G, N>,
        v: Slots<&[u16]>,
        k: Slots<&[u16]>,
    ) {
        let n = part.heads.len();
        // The slots that tokens see.
        let mut seen = [[0usize; BLOCK]; G];
        for (token, seen) in tokens.clone().zip(&mut seen) {
            let mut next = seen.iter_mut();
            for run in part.runs(token, slots) {
                run.zip(next.by_ref()).for_each(|(slot, to)| *to = slot);
            }
        }
        let mut added = [0; G];
        for first in slots.clone().step_by(SLOTS) {
            for (g, token) in tokens.clone().enumerate() {
                let from = added[g];
                while added[g] < weights.seen[g] && seen[g][added[g]] < first + SLOTS {
                    added[g] += 1;
                }
                if from == added[g] {
                    continue;
                }
                let which = from..added[g];
                let mut some = Piece {
                    slots: &seen[g][which.clone()],
                    weights: [[0.0; LANES]; N],
                    pairs: [[0; LANES]; N],
                    powers: [1.0; N],
                };
                for h in 0..n {
                    // Weights of this block are at most e to the power of -below.
                    let raise = (weights.below[g][h] * std::f32::consts::LOG2_E).floor();
                    let raise = if raise <= RAISE { raise } else { 0.0 };
                    let power = f32::from_bits(((127.0 + raise) as u32) << 23);
                    some.powers[h] = 1.0 / power;
                    some.weights[h] = sixteen(&weights.of[g][h][which.clone()], 0);
                    some.pairs[h] = H::pairs(L::load(&some.weights[h]).mul(L::splat(power)));
                }
                // SAFETY: the part's own heads and token, each once; dropped before the next ones are made.
                let mut states: [Option<State<'_>>; N] = std::array::from_fn(|h| {
                    (h < n).then(|| unsafe { part.state(part.heads.start + h, token) })
                });
                let next = (G == 1).then_some((k, part.end(token)));
                some.add::<L, H>(v, &mut states, part.s.head_dim, next);
            }
        }
    }
}

/// As [`dots`].
#[inline(always)]
fn half_dots<L: Lanes, H: Halves<L>, const N: usize, const S: usize>(
    q: &Query<'_, N>,
    k: Slots<&[u16]>,
    (first, last): (usize, usize),
    next: Option<Slots<&[u16]>>,
) -> L {
    const { assert!(N * S == SUMS) };
    let d = q.singles[0].len();
    let mut at = [0; S];
    for s in 0..S {
        at[s] = k.at((first + s).min(last));
        assert!(at[s] <= k.values.len() && d <= k.values.len() - at[s]);
    }
    assert!(q.halves.iter().all(|q| q.len() == d.div_ceil(WIDTH)));
    let whole = d / WIDTH * WIDTH;
    let mut quarters = [L::splat(0.0); 4];
    for start in (0..d).step_by(CHANNELS) {
        let mut acc = [[H::zero(); N]; S];
        for c in (start..whole.min(start + CHANNELS)).step_by(WIDTH) {
            for s in 0..S {
                ask(next, (first + s).min(last), c);
            }
            let mut queries = [H::zero(); N];
            for h in 0..N {
                // SAFETY: a vector of each query, of which there are enough, as asserted.
                queries[h] = unsafe { H::load(q.halves[h].get_unchecked(c / WIDTH).as_ptr()) };
            }
            for s in 0..S {
                // SAFETY: c + WIDTH is at most d, and so many elements are there, as asserted.
                let key = unsafe { H::load(k.values.as_ptr().add(at[s] + c)) };
                for h in 0..N {
                    acc[s][h] = key.mul_add(queries[h], acc[s][h]);
                }
            }
        }
        if whole < d.min(start + CHANNELS) {
            for s in 0..S {
                let key = H::load_some(&k.values[at[s] + whole..at[s] + d]);
                for h in 0..N {
                    let query = H::load_some(&q.halves[h][whole / WIDTH]);
                    acc[s][h] = key.mul_add(query, acc[s][h]);
                }
            }
        }
        for i in 0..4 {
            let mut four = [H::zero(); 4];
            for j in 0..4 {
                four[j] = acc[(4 * i + j) % S][(4 * i + j) / S];
            }
            quarters[i] = quarters[i].add(H::quarters(four));
        }
    }
    L::totals_of_quarters(quarters)
}

/// Up to sixteen slots that a token sees, for N heads.
struct Piece<'a, const N: usize> {
    slots: &'a [usize],
    weights: [[f32; LANES]; N],
    /// The weights in fp16, as pairs; where there is no head, zeros.
    pairs: [[u32; LANES]; N],
    /// What sums with `pairs` are to be multiplied by.
    powers: [f32; N],
}

impl<const N: usize> Piece<'_, N> {
    /// Adds the weighted values. Asks for what is `next` in the next block meanwhile, up to the slot that is given.
    #[inline(always)]
    fn add<L: Lanes, H: Halves<L>>(
        &self,
        v: Slots<&[u16]>,
        states: &mut [Option<State<'_>>; N],
        d: usize,
        next: Option<(Slots<&[u16]>, usize)>,
    ) {
        let mut c = 0;
        // As many sums at a time as two operations under way take, and weights are read for more than one vector.
        if N <= 2 {
            while c + 4 * WIDTH <= d {
                self.add_vectors::<L, H, 4>(v, states, (c, 4 * WIDTH), next);
                c += 4 * WIDTH;
            }
        }
        while c + 2 * WIDTH <= d {
            self.add_vectors::<L, H, 2>(v, states, (c, 2 * WIDTH), next);
            c += 2 * WIDTH;
        }
        while c < d {
            self.add_vectors::<L, H, 1>(v, states, (c, WIDTH.min(d - c)), next);
            c += WIDTH;
        }
    }

    /// WIDE vectors from channel c on, of which only one may have fewer channels than lanes.
    #[inline(always)]
    fn add_vectors<L: Lanes, H: Halves<L>, const WIDE: usize>(
        &self,
        v: Slots<&[u16]>,
        states: &mut [Option<State<'_>>; N],
        (c, width): (usize, usize),
        next: Option<(Slots<&[u16]>, usize)>,
    ) {
        assert!(width == WIDE * WIDTH || WIDE == 1 && width < WIDTH);
        let mut acc = [[H::zero(); WIDE]; N];
        for (i, &slot) in self.slots.iter().enumerate().take(LANES) {
            let at = v.at(slot) + c;
            if let Some((next, end)) = next
                && slot + BLOCK < end
            {
                next.values.prefetch(next.at(slot + BLOCK).wrapping_add(c), width);
            }
            let from = &v.values[at..][..width];
            let mut values = [H::zero(); WIDE];
            for j in 0..WIDE {
                values[j] = if width < WIDTH {
                    H::load_some(from)
                } else {
                    // SAFETY: so many vectors are there.
                    unsafe { H::load(from.as_ptr().add(j * WIDTH)) }
                };
            }
            for h in 0..N {
                let weight = H::repeat(self.pairs[h][i]);
                for j in 0..WIDE {
                    acc[h][j] = values[j].mul_add(weight, acc[h][j]);
                }
            }
        }
        // Zero times what is not finite is NaN, and stays so.
        let mut all = H::zero();
        for h in 0..N {
            for j in 0..WIDE {
                all = acc[h][j].mul_add(H::zero(), all);
            }
        }
        let finite = all.is_finite();
        for h in 0..N {
            let Some(state) = &mut states[h] else { continue };
            for j in 0..WIDE {
                let c = c + j * WIDTH;
                if !finite && !acc[h][j].is_finite() {
                    let channels = c..c + WIDTH.min(width);
                    self.add_exactly::<L>(v, state.values, channels, h);
                    continue;
                }
                for (i, sums) in acc[h][j].widen().into_iter().enumerate() {
                    // Behind the last channel there may be no lanes.
                    if let Some(to) = state.values[c + i * LANES..].first_chunk_mut() {
                        sums.mul_add(L::splat(self.powers[h]), L::load(to)).store(to);
                    }
                }
            }
        }
    }

    /// Some channels of one head in f32.
    #[inline(always)]
    fn add_exactly<L: Lanes>(&self, v: Slots<&[u16]>, sums: &mut [f32], channels: Range<usize>, h: usize) {
        let (sums, _) = sums[channels.start..].split_at_mut(channels.len());
        for (&slot, weight) in self.slots.iter().zip(self.weights[h]) {
            let values = &v.values[v.at(slot) + channels.start..][..channels.len()];
            let (vectors, rest) = sums.as_chunks_mut::<LANES>();
            let (halves, last) = values.as_chunks::<LANES>();
            for (sums, halves) in vectors.iter_mut().zip(halves) {
                // SAFETY: sixteen are there.
                let values = unsafe { halves.as_slice().vector::<L>(0) };
                values.mul_add(L::splat(weight), L::load(sums)).store(sums);
            }
            for (c, sum) in rest.iter_mut().enumerate() {
                *sum += weight * last.element(c);
            }
        }
    }
}
