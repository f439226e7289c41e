use super::*;
use crate::Pool;
use crate::attention::{AttentionShape, CacheValues, CacheView, HeadStrides, Mask, attention, attention_in};
use crate::test_data::{cases, noise};
use half::f16;
use proptest::prelude::*;

/// What the instructions do, in integers.
#[derive(Clone, Copy)]
struct Emulated([u16; WIDTH]);

fn single(bits: u16) -> f32 {
    f16::from_bits(bits).to_f32()
}

/// `v / 2^48` to the nearest fp16, ties to even.
fn nearest(v: i128) -> u16 {
    // From 2^-14 on, 2^34 here, there are 11 bits of precision; below it all numbers are multiples of 2^-24.
    let magnitude = v.unsigned_abs();
    let bits = 128 - magnitude.leading_zeros();
    let unit = bits.saturating_sub(11).max(24);
    let (whole, rest, half) = (magnitude >> unit, magnitude & ((1 << unit) - 1), 1u128 << (unit - 1));
    let rounded = whole + u128::from(rest > half || rest == half && whole % 2 == 1);
    // At most 12 bits, so nothing is rounded again; too large ones become infinite.
    let rounded = rounded as f32 * 2f32.powi(unit as i32 - 48);
    f16::from_f32(if v < 0 { -rounded } else { rounded }).to_bits()
}

/// `a * b + c`, rounded once.
fn mul_add(a: u16, b: u16, c: u16) -> u16 {
    let near = single(a).mul_add(single(b), single(c));
    // Where this is zero it is exact, and it has the right sign.
    if near == 0.0 || !near.is_finite() {
        return f16::from_f32(near).to_bits();
    }
    // All numbers are multiples of 2^-24.
    let integer = |v: u16| (f64::from(single(v)) * f64::from(1 << 24)) as i128;
    let rounded = nearest(integer(a) * integer(b) + (integer(c) << 24));
    // What is too small keeps its sign.
    rounded | u16::from(near < 0.0) << 15
}

fn add(a: u16, b: u16) -> u16 {
    mul_add(a, 0x3c00, b)
}

impl<L: Lanes> Halves<L> for Emulated {
    fn zero() -> Self {
        Emulated([0; WIDTH])
    }
    unsafe fn load(from: *const u16) -> Self {
        // SAFETY: as this function's.
        Emulated(unsafe { from.cast::<[u16; WIDTH]>().read() })
    }
    fn load_some(from: &[u16]) -> Self {
        let mut all = [0; WIDTH];
        all[..from.len()].copy_from_slice(from);
        Emulated(all)
    }
    fn repeat(pair: u32) -> Self {
        Emulated(std::array::from_fn(|l| (pair >> (16 * (l % 2))) as u16))
    }
    fn pairs(v: L) -> [u32; LANES] {
        let mut lanes = [0f32; LANES];
        v.store(&mut lanes);
        lanes.map(|v| u32::from(f16::from_f32(v).to_bits()) * 0x1_0001)
    }
    fn mul_add(self, b: Self, c: Self) -> Self {
        Emulated(std::array::from_fn(|l| mul_add(self.0[l], b.0[l], c.0[l])))
    }
    fn widen(self) -> [L; 2] {
        [0, LANES].map(|at| L::load(&std::array::from_fn(|l| single(self.0[at + l]))))
    }
    fn quarters(v: [Self; 4]) -> L {
        let quarter =
            |v: &[u16; WIDTH], l: usize| single(add(add(v[l], v[l + 16]), add(v[l + 8], v[l + 24])));
        L::load(&std::array::from_fn(|l| quarter(&v[l / 4].0, l % 4) + quarter(&v[l / 4].0, l % 4 + 4)))
    }
    fn is_finite(self) -> bool {
        self.0.iter().all(|v| single(*v).is_finite())
    }
    fn are_finite(v: L) -> bool {
        let mut lanes = [0f32; LANES];
        v.store(&mut lanes);
        lanes.iter().all(|v| v.is_finite())
    }
}

/// As [`super::run`], with the lanes that the instructions go with, where the processor has those.
pub(super) fn run(part: &Part<'_>, k: Slots<&[u16]>, v: Slots<&[u16]>, queries: &mut Queries) {
    #[cfg(target_arch = "x86_64")]
    if Isa::best() >= Isa::Avx512 {
        #[target_feature(enable = "avx512f,avx512bw,avx512vl,avx2,fma,f16c")]
        fn lanes(part: &Part<'_>, k: Slots<&[u16]>, v: Slots<&[u16]>, queries: &mut Queries) {
            run_on::<crate::lanes::x86::Avx512, Emulated>(part, k, v, queries);
        }
        // SAFETY: the processor has the instructions.
        return unsafe { lanes(part, k, v, queries) };
    }
    run_on::<crate::lanes::Plain, Emulated>(part, k, v, queries);
}

/// With the processor's instructions too, where it has them.
fn arithmetics() -> Vec<Arithmetic> {
    let native = is_native(Isa::best()).then_some(Arithmetic::Halves);
    [Arithmetic::Emulated].into_iter().chain(native).collect()
}

fn bits(v: &[f32]) -> Vec<u32> {
    v.iter().map(|v| v.to_bits()).collect()
}

/// Queries `[heads, tokens, head_dim]`, keys and values `[kv_heads, slots, head_dim]`, a mask.
#[derive(Clone, Debug)]
struct Case {
    s: AttentionShape,
    scale: f32,
    q: Vec<f32>,
    k: Vec<u16>,
    v: Vec<u16>,
    mask: Vec<f32>,
}

impl Case {
    /// The numbers are up to `size`, from all of which the mask leaves out what `seen` says of a token and a slot.
    fn new(
        (heads, kv_heads, tokens, head_dim, slots): (usize, usize, usize, usize, usize),
        (q, k, v): (f32, f32, f32),
        seen: impl Fn(usize, usize) -> bool,
    ) -> Case {
        let s = AttentionShape { heads, kv_heads, tokens, head_dim, slots, fast: true };
        let some = |seed, n, size: f32| noise(seed, n).into_iter().map(move |v| 2.0 * size * v);
        let halves = |v: f32| f16::from_f32(v).to_bits();
        let n = kv_heads * slots * head_dim;
        let mut mask = vec![-30000.0; tokens * slots];
        for (i, m) in mask.iter_mut().enumerate() {
            if seen(i / slots, i % slots) {
                *m = -0.3 * (i % 5) as f32;
            }
        }
        Case {
            s,
            scale: 1.0,
            q: some(slots as u64, heads * tokens * head_dim, q).collect(),
            k: some(2, n, k).map(halves).collect(),
            v: some(3, n, v).map(halves).collect(),
            mask,
        }
    }

    /// `[heads, tokens, head_dim]` of some tokens.
    fn run_some(&self, arithmetic: Option<Arithmetic>, threads: usize, tokens: Range<usize>) -> Vec<f32> {
        let (s, d) = (AttentionShape { tokens: tokens.len(), ..self.s }, self.s.head_dim);
        let view = |values| CacheView { values, first: 0, head_stride: s.slots * d, slot_stride: d };
        let (k, v) = (view(CacheValues::F16(&self.k)), view(CacheValues::F16(&self.v)));
        let q = HeadStrides { first: tokens.start * d, head: self.s.tokens * d, token: d };
        let to = HeadStrides { first: 0, head: tokens.len() * d, token: d };
        let mask = Mask { values: &self.mask[tokens.start * s.slots..], token_stride: s.slots };
        let mut out = vec![0f32; s.heads * tokens.len() * d];
        let (pool, q, to) = (Pool::new(threads), (self.q.as_slice(), q), (out.as_mut_slice(), to));
        match arithmetic {
            Some(a) => attention_in(a, &pool, &s, self.scale, q, &k, &v, Some(mask), to),
            None => attention(&pool, &s, self.scale, q, &k, &v, Some(mask), to),
        };
        out
    }

    fn run(&self, arithmetic: Arithmetic, threads: usize) -> Vec<f32> {
        self.run_some(Some(arithmetic), threads, 0..self.s.tokens)
    }

    /// Of one head and token in f64, and how far fp16 may be off in each channel.
    fn exact(&self, head: usize, token: usize) -> (Vec<f64>, Vec<f64>) {
        let AttentionShape { heads, kv_heads, tokens, head_dim: d, slots, .. } = self.s;
        let of = |v: &[u16], slot: usize, c: usize| {
            f16::from_bits(v[(head / (heads / kv_heads) * slots + slot) * d + c]).to_f64()
        };
        let q = &self.q[(head * tokens + token) * d..][..d];
        let mask = &self.mask[token * slots..][..slots];
        let seen: Vec<usize> = (0..slots).filter(|i| mask[*i] > -20000.0).collect();
        let (mut scores, mut wrong) = (Vec::new(), 0f64);
        for &i in &seen {
            let terms = || (0..d).map(|c| f64::from(q[c]) * of(&self.k, i, c));
            scores.push(f64::from(self.scale) * terms().sum::<f64>() + f64::from(mask[i]));
            // The query, four products and two sums of lanes are rounded to 11 bits, and below 2^-14 to 2^-25.
            let largest = q.iter().fold(0f64, |m, q| m.max(f64::from(q.abs())));
            let small: f64 =
                (0..d).map(|c| largest * (2.0 + of(&self.k, i, c).abs())).sum::<f64>() / 2f64.powi(25);
            let sum: f64 = terms().map(f64::abs).sum();
            wrong = wrong.max(f64::from(self.scale) * (7.1 / 2048.0 * sum + small) + 1e-5);
        }
        let top = scores.iter().copied().fold(f64::NEG_INFINITY, f64::max);
        let weights: Vec<f64> = scores.iter().map(|s| (s - top).exp()).collect();
        let total: f64 = weights.iter().sum();
        let (mut out, mut bound) = (vec![0f64; d], vec![0f64; d]);
        for (&i, w) in seen.iter().zip(&weights) {
            for c in 0..d {
                let v = of(&self.v, i, c);
                out[c] += w / total * v;
                // A weight, and sixteen sums.
                let off = 17.1 / 2048.0 + (2.0 * wrong).exp_m1();
                bound[c] += (w * v.abs() * off + (2.0 + v.abs()) / 2f64.powi(24)) / total;
            }
        }
        (out, bound)
    }

    /// Errors are within what follows from the rounding, and the cosine of each head is at least `cosine`.
    fn is_near(&self, found: &[f32], cosine: f64) -> Result<(), TestCaseError> {
        let (d, tokens) = (self.s.head_dim, self.s.tokens);
        for (i, found) in found.chunks(d).enumerate() {
            let (exact, bound) = self.exact(i / tokens, i % tokens);
            let found: Vec<f64> = found.iter().map(|v| f64::from(*v)).collect();
            for c in 0..d {
                let error = (found[c] - exact[c]).abs();
                prop_assert!(error <= bound[c], "{:?}: {error} of {} in {}", self.s, bound[c], exact[c]);
            }
            let dot = |a: &[f64], b: &[f64]| a.iter().zip(b).map(|(a, b)| a * b).sum::<f64>();
            let of = dot(&found, &exact) / (dot(&found, &found) * dot(&exact, &exact)).sqrt();
            prop_assert!(of >= cosine, "{:?}: cosine {of}", self.s);
        }
        Ok(())
    }

    /// The same bits on several threads, of each token alone, and with every arithmetic of fp16. Gives them.
    fn check_bits(&self) -> Result<Vec<f32>, TestCaseError> {
        let expected = self.run(Arithmetic::Emulated, 1);
        for arithmetic in arithmetics() {
            for threads in [1, 3] {
                let found = self.run(arithmetic, threads);
                prop_assert!(bits(&found) == bits(&expected), "{arithmetic:?} {:?} {threads}", self.s);
            }
            let AttentionShape { heads, tokens, head_dim: d, .. } = self.s;
            for (t, few) in (0..tokens).flat_map(|t| [(t, 1), (t, 3)]) {
                let few = t..tokens.min(t + few);
                let found = self.run_some(Some(arithmetic), 2, few.clone());
                for head in 0..heads {
                    let expected = &expected[(head * tokens + t) * d..][..few.len() * d];
                    let found = &found[head * few.len() * d..][..few.len() * d];
                    prop_assert!(bits(found) == bits(expected), "{arithmetic:?} {:?} {few:?}", self.s);
                }
            }
        }
        Ok(expected)
    }
}

/// With holes of all kinds, of which the first starts further on with each token.
fn holes(token: usize, slot: usize) -> bool {
    slot % 23 != 3 && slot % 50 > 3 + token || slot == 0
}

#[test]
fn attention_in_fp16_is_near_and_a_token_has_the_same_bits_in_a_batch_and_alone() {
    for shape in [
        (1, 1, 1, 1, 1),
        (3, 3, 2, 31, 70),
        (2, 1, 3, 64, 65),
        (8, 2, 4, 128, 130),
        (8, 1, 2, 160, 77),
        (5, 1, 19, 33, 90),
        (7, 1, 2, 300, 60),
        (18, 2, 3, 40, 30),
        (2, 2, 2, 512, 40),
        (2, 1, 2, 48, 2100),
    ] {
        let case = Case::new(shape, (0.7, 1.0, 1.0), holes);
        let found = case.check_bits().unwrap();
        case.is_near(&found, 0.9999).unwrap();
        let exact = case.run(Arithmetic::Singles, 1);
        assert!(shape.3 == 1 || found != exact, "{shape:?} are not of fp16");
    }
}

proptest! {
    #![proptest_config(cases())]

    #[test]
    fn random_shapes_are_near_and_have_the_same_bits(
        (kv_heads, group, tokens) in (1usize..3, 1usize..9, 1usize..5),
        (head_dim, slots) in (1usize..=512, 1usize..100),
        (size, part) in (0usize..3, 2usize..9),
        seed in 0u64..1000,
    ) {
        // Of all sizes, with scores of up to a few units.
        let size = [(1.0, 1.0, 1.0), (1e-7, 30.0, 200.0), (3e6, 0.01, 0.003)][size];
        let all = noise(seed + 7, tokens * slots);
        let seen = |t: usize, i: usize| all[t * slots + i] > 1.0 / part as f32 - 0.5 || i == slots / 2;
        let mut case = Case::new((kv_heads * group, kv_heads, tokens, head_dim, slots), size, seen);
        case.scale = 3.0 / (size.0 * size.1 * (head_dim as f32).sqrt());
        let found = case.check_bits()?;
        // One channel is only right or wrong; a few may be what is left of far more.
        case.is_near(&found, if head_dim < 16 { -1.0 } else { 0.9999 })?;
    }
}

/// What is too large for fp16 on the way, and small enough in the end.
#[test]
fn what_is_too_large_for_fp16_is_as_in_f32() {
    for shape in [(1, 1, 3, 128, 100), (8, 1, 4, 70, 150), (4, 2, 9, 300, 60)] {
        let (group, tokens, d, slots) = (shape.0 / shape.1, shape.2, shape.3, shape.4);
        let mut case = Case::new(shape, (1.0, 1.0, 1.0), holes);
        case.scale = 1e-5;
        for (i, k) in case.k.iter_mut().enumerate() {
            // Keys of one sign in some slots, and of changing signs in others.
            match i / d % 7 {
                2 => *k = f16::from_f32(60000.0).to_bits(),
                4 => *k = f16::from_f32(if i % 2 == 0 { 60000.0 } else { -60000.0 }).to_bits(),
                _ => {}
            }
        }
        for (i, v) in case.v.iter_mut().enumerate() {
            // Two channels.
            if i % d == 5 || i % d == d - 1 {
                *v = f16::from_f32(50000.0 - (i / d % 100) as f32).to_bits();
            }
        }
        // Queries of which f32 is at its end, with nothing but tiny products behind it.
        case.q[..d].iter_mut().for_each(|q| *q *= 1e-30);
        for head in 0..shape.0 {
            let q = &mut case.q[(head * tokens + 1) * d..][..d];
            q.iter_mut().for_each(|q| *q *= 1e33);
        }
        for (i, m) in case.mask[slots..2 * slots].iter_mut().enumerate() {
            // One slot, whatever it scores.
            *m = if i == 1 { 0.0 } else { -30000.0 };
        }
        let found = case.check_bits().unwrap();
        let exact = case.run(Arithmetic::Singles, 1);
        for (i, (found, exact)) in found.iter().zip(&exact).enumerate() {
            let (head, token, c) = (i / d / tokens, i / d % tokens, i % d);
            assert!(found.is_finite() && exact.is_finite(), "{shape:?} {i}");
            let size = if c == 5 || c == d - 1 { 50000.0 } else { 1.0 };
            let error = (found - exact).abs();
            assert!(error <= 0.005 * size, "{head} of {group}, {token}, {c}: {found} for {exact}");
        }
    }
}

#[test]
fn what_is_not_finite_stays_so_and_stays_in_its_token() {
    let shape = (4, 2, 3, 70, 90);
    let (tokens, d) = (shape.2, shape.3);
    let case = Case::new(shape, (1.0, 1.0, 1.0), |_, i| i % 5 != 4);
    let special = [f32::INFINITY, f32::NEG_INFINITY, f32::NAN];
    let good = case.run(Arithmetic::Emulated, 1);
    for (i, value) in special.into_iter().enumerate() {
        let (mut q, mut k, mut v, mut unseen) = (case.clone(), case.clone(), case.clone(), case.clone());
        // Of head 1 and token 2, of head 0 and slot 67, and of a slot that nobody sees.
        q.q[(tokens + 2) * d + 33 + i] = value;
        k.k[67 * d + 69 - i] = f16::from_f32(value).to_bits();
        v.v[67 * d + 30 + i] = f16::from_f32(value).to_bits();
        for all in [&mut unseen.k, &mut unseen.v] {
            all[14 * d..15 * d].fill(f16::from_f32(value).to_bits());
        }
        assert_eq!(bits(&unseen.run(Arithmetic::Emulated, 1)), bits(&good), "{value} is not read");
        // Products that f32 has no numbers for, with a sum of about zero, in one slot.
        let mut large = case.clone();
        large.k.chunks_mut(d).for_each(|k| k[33..35].fill(0));
        for (c, value) in [(33, 3e38), (34, -3e38)] {
            large.q[(tokens + 2) * d + c] = value;
            large.k[67 * d + c] = f16::from_f32(20000.0).to_bits();
        }
        assert!(large.run(Arithmetic::Singles, 1).iter().any(|v| v.is_nan()));
        for (what, case) in [("query", q), ("key", k), ("value", v), ("product", large)] {
            let exact = case.run(Arithmetic::Singles, 1);
            for arithmetic in arithmetics() {
                let found = case.run(arithmetic, 1);
                for (i, (found, exact)) in found.iter().zip(&exact).enumerate() {
                    let same = found == exact || found.is_nan() && exact.is_nan();
                    let near = exact.is_finite() && (found - exact).abs() < 0.01;
                    assert!(same || near, "{what} {value} at {i}: {found} for {exact}");
                }
                for t in 0..tokens {
                    let alone = case.run_some(Some(arithmetic), 1, t..t + 1);
                    for head in 0..shape.0 {
                        let (alone, found) =
                            (&alone[head * d..][..d], &found[(head * tokens + t) * d..][..d]);
                        let same =
                            |(a, b): (&f32, &f32)| a.to_bits() == b.to_bits() || a.is_nan() && b.is_nan();
                        assert!(alone.iter().zip(found).all(same), "{what} {value}: {t} alone");
                    }
                }
            }
        }
    }
}

/// Weights far below one do not vanish: those of a block are rounded against its own largest.
#[test]
fn small_weights_keep_their_precision() {
    let mut case = Case::new((2, 1, 1, 64, 300), (1.0, 1.0, 1.0), |_, _| true);
    case.scale = 0.05;
    // The first slot outweighs all others by far, and its value is zero.
    case.mask[0] = 20.0;
    case.v[..64].fill(0);
    case.mask[1..64].fill(-30000.0);
    for arithmetic in arithmetics() {
        let found = case.run(arithmetic, 1);
        for (head, found) in found.chunks(64).enumerate() {
            let (exact, _) = case.exact(head, 0);
            let found: Vec<f64> = found.iter().map(|v| f64::from(*v)).collect();
            let dot = |a: &[f64], b: &[f64]| a.iter().zip(b).map(|(a, b)| a * b).sum::<f64>();
            let of = dot(&found, &exact) / (dot(&found, &found) * dot(&exact, &exact)).sqrt();
            assert!(of >= 0.9999, "{of}");
        }
    }
}

#[test]
fn only_fast_calls_over_two_caches_of_fp16_are_in_fp16_and_only_where_the_processor_does_that() {
    let mut case = Case::new((4, 2, 2, 96, 80), (1.0, 1.0, 1.0), holes);
    let exact = bits(&case.run(Arithmetic::Singles, 1));
    let halves = bits(&case.run(Arithmetic::Emulated, 1));
    assert_ne!(exact, halves);
    let tokens = 0..case.s.tokens;
    let expected = if is_native(Isa::best()) { &halves } else { &exact };
    assert_eq!(&bits(&case.run_some(None, 1, tokens.clone())), expected);
    case.s.fast = false;
    assert_eq!(bits(&case.run_some(None, 1, tokens)), exact);
    // One cache of f32.
    let (d, slots) = (case.s.head_dim, case.s.slots);
    let wide: Vec<f32> = case.k.iter().map(|k| single(*k)).collect();
    for fast in [false, true] {
        let s = AttentionShape { fast, ..case.s };
        let view = |values| CacheView { values, first: 0, head_stride: slots * d, slot_stride: d };
        let (k, v) = (view(CacheValues::F32(&wide)), view(CacheValues::F16(&case.v)));
        let at = HeadStrides { first: 0, head: s.tokens * d, token: d };
        let mask = Mask { values: &case.mask, token_stride: slots };
        let mut out = vec![0f32; case.q.len()];
        attention(&Pool::new(1), &s, case.scale, (&case.q, at), &k, &v, Some(mask), (&mut out, at));
        assert_eq!(bits(&out), exact);
    }
}

#[test]
fn numbers_are_rounded_once() {
    let halves = |v: f32| f16::from_f32(v).to_bits();
    let check = |a: f32, b: f32, c: f32, expected: f32| {
        assert_eq!(mul_add(halves(a), halves(b), halves(c)), halves(expected), "{a} * {b} + {c}");
    };
    let unit = 2f32.powi(-10);
    check(2.0, 3.0, 1.0, 7.0);
    check(1.0, unit / 2.0, 1.0, 1.0);
    check(1.0, unit / 2.0, 1.0 + unit, 1.0 + 2.0 * unit);
    // A little more than a tie, too little for f64 to hold both.
    check(1.0 + unit, 2f32.powi(-11), 1.0, 1.0 + unit);
    check(2f32.powi(-24), 2f32.powi(-24), 1.0, 1.0);
    check(2f32.powi(-24), 0.5, 0.0, 0.0);
    check(2f32.powi(-24), 0.75, 0.0, 2f32.powi(-24));
    check(2f32.powi(-24), -0.25, 0.0, -0.0);
    check(300.0, 300.0, 0.0, f32::INFINITY);
    check(255.875, 256.0, 0.0, 65504.0);
    check(256.0, 256.0, -16.0, f32::INFINITY);
    check(256.0, 256.0, -17.0, 65504.0);
    check(1.0, -1.0, 1.0, 0.0);
    check(-0.0, 1.0, -0.0, -0.0);
    assert!(single(mul_add(halves(f32::INFINITY), 0, 0)).is_nan());
    // Where f64 is exact, the nearest of all numbers.
    let v: Vec<u16> = noise(5, 3000).into_iter().map(|v| halves(40.0 * v)).collect();
    for v in v.as_chunks::<3>().0 {
        let [a, b, c] = v.map(|v| f16::from_bits(v).to_f64());
        let found = mul_add(v[0], v[1], v[2]);
        let exact = a * b + c;
        let off = |bits: u16| (f16::from_bits(bits).to_f64() - exact).abs();
        assert!(off(found) <= off(found + 1) && off(found) <= off(found - 1), "{a} * {b} + {c}");
    }
}

/// The processor's instructions do what is emulated.
#[cfg(target_arch = "x86_64")]
#[test]
fn instructions_give_what_is_emulated() {
    use super::x86::Native;
    use crate::lanes::x86::Avx512;
    if !is_native(Isa::Avx512) {
        return;
    }
    #[target_feature(enable = "avx512f,avx512bw,avx512vl,avx512fp16,avx2,fma,f16c")]
    fn all<H: Halves<Avx512>>(v: &[[u16; WIDTH]; 4], singles: &[f32; LANES], n: usize) -> Vec<u32> {
        // SAFETY: 32 are there.
        let [a, b, c, d] = [0, 1, 2, 3].map(|i| unsafe { H::load(v[i].as_ptr()) });
        let mut found = Vec::new();
        let mut put = |v: Avx512| {
            let mut lanes = [0f32; LANES];
            v.store(&mut lanes);
            // NaNs may differ.
            found.extend(lanes.map(|v| if v.is_nan() { u32::MAX } else { v.to_bits() }));
        };
        for v in [a.mul_add(b, c), b.mul_add(c, d), c.mul_add(H::zero(), d), H::load_some(&v[0][..n])] {
            let [low, high] = v.widen();
            put(low);
            put(high);
        }
        put(H::quarters([a, b, c, d]));
        put(H::quarters([d, c, b, H::repeat(u32::from(v[0][0]) | u32::from(v[1][1]) << 16)]));
        found.extend(H::pairs(Avx512::load(singles)));
        found.push(u32::from(a.is_finite()) | u32::from(H::are_finite(Avx512::load(singles))) << 1);
        found
    }
    let mut seed = 1u64;
    let mut random = || {
        seed ^= seed << 13;
        seed ^= seed >> 7;
        seed ^= seed << 17;
        seed
    };
    for round in 0..400 {
        let v: [[u16; WIDTH]; 4] = std::array::from_fn(|_| {
            std::array::from_fn(|_| match round % 4 {
                // All numbers, those that are close together, and those with nothing that is not finite.
                0 => random() as u16,
                1 => random() as u16 & 0x83ff | 0x3c00,
                2 => random() as u16 & 0xbfff,
                _ => random() as u16 & 0x87ff,
            })
        });
        let mut singles: [f32; LANES] = std::array::from_fn(|_| {
            let bits = random() as u32;
            // About those that fp16 has.
            f32::from_bits(bits & 0x8fff_ffff | if bits & 1 == 0 { 0x3000_0000 } else { 0x4000_0000 })
        });
        if round % 3 == 0 {
            singles[round % LANES] = [f32::NAN, f32::INFINITY, 0.0][round % 9 / 3];
        }
        let n = round % (WIDTH + 1);
        // SAFETY: the processor has the instructions.
        let (native, emulated) =
            unsafe { (all::<Native>(&v, &singles, n), all::<Emulated>(&v, &singles, n)) };
        for (i, (native, emulated)) in native.iter().zip(&emulated).enumerate() {
            assert_eq!(native, emulated, "{round}, {i}");
        }
    }
}
