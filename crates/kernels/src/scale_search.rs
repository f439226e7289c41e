//! Searches scales for linear quantization, and quantizes with them.
//!
//! ```text
//! value v  ->  q = clamp(round(v / scale + zero), low, high)  ->  v' = scale * (q - zero)        error = sum mass (v - v')^2
//! ```
//!
//! Each value is tried on sixteen grids at once, one per lane, so that no sum crosses lanes.

use crate::simd::{F32x16, LANES, ROUND, simd_fn};

/// Grids tried together, one per lane.
pub const GRIDS: usize = LANES;
/// Values whose errors are summed in f32 before the sum goes to f64.
const PART: usize = 256;

type ScaleRow = [f32; GRIDS];

/// Holds sixteen grids `scale * (q - zero)` with integers q from `low` to `high`.
#[derive(Clone, Copy, Debug)]
pub struct Grids {
    /// Scale; positive.
    pub scale: ScaleRow,
    /// Integer of the value 0.
    pub zero: ScaleRow,
    /// Smallest q; not below -2^21.
    pub low: f32,
    /// Largest q; not above 2^21.
    pub high: f32,
}

/// Sums over weights and their quantized values.
#[derive(Clone, Copy, Debug, Default, PartialEq)]
pub struct ErrorSums {
    /// Squared errors.
    pub error: f64,
    /// Weight times quantized weight.
    pub dot: f64,
    /// Squared weights.
    pub original: f64,
    /// Squared quantized weights.
    pub compressed: f64,
    /// Importance times squared error; 0 without importance.
    pub weighted_error: f64,
    /// Importance times squared weight; 0 without importance.
    pub weighted_original: f64,
    /// Largest magnitude of an error.
    pub largest: f32,
}

/// Rounds to the nearest positive fp16 value, at least 2^-24; NaN gives 2^-24.
#[inline(always)]
fn to_half<V: F32x16>(v: V) -> V {
    // Rounds to 11 significant bits by Veltkamp's splitting, or to a multiple of 2^-24 below 2^-14.
    let minus_one = V::splat(-1.0);
    let c = v.mul(V::splat(8193.0));
    let normal = c.add(c.add(v.mul(minus_one)).mul(minus_one));
    let subnormal = v.add(V::splat(0.75)).add(V::splat(-0.75));
    let half = v.if_below(V::splat(6.103_515_6e-5), subnormal, normal);
    // max and min return their second operand for NaN.
    half.max(V::splat(5.960_464_5e-8)).min(V::splat(65504.0))
}

/// Holds a grid: a value is `scale * (q - zero)`.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct ScaleAndZero {
    /// Scale; positive.
    pub scale: f32,
    /// Integer of the value 0.
    pub zero: f32,
}

simd_fn! {
    /// Returns the sum of mass times squared error on each grid. Without masses, each value has mass 1.
    ///
    /// # Panics
    /// Masses and values differ in number, or the processor lacks `isa`.
    pub fn sum_grid_errors(isa: Isa; values: &[f32], masses: Option<&[f32]>, grids: &Grids) -> [f64; GRIDS] = asymmetric_errors
}

simd_fn! {
    /// Finds the scale whose signed integers of `bits` bits have the least error on `values`: a positive fp16 value; 1
    /// where all values are zero. Without masses, each value has mass 1.
    ///
    /// # Panics
    /// Masses and values differ in number, the bits are not 2 to 8, or the processor lacks `isa`.
    pub fn find_scale(isa: Isa; values: &[f32], masses: Option<&[f32]>, bits: u8) -> f32 = search
}

simd_fn! {
    /// Returns the smallest and the largest value, 0 included.
    pub fn find_extremes(isa: Isa; values: &[f32]) -> (f32, f32) = ends
}

simd_fn! {
    /// Quantizes `values` to integers from `-2^(bits-1)` to `2^(bits-1) - 1`, written to `codes`. Returns the error sums.
    /// `grids` divide the values into equal parts, one grid each.
    ///
    /// # Panics
    /// Lengths differ or do not divide, the bits are not 2 to 8, or the processor lacks `isa`.
    pub fn quantize_linear(isa: Isa; values: &[f32], importance: Option<&[f32]>, grids: &[ScaleAndZero], bits: u8, codes: &mut [i8]) -> ErrorSums = apply
}

/// Returns the smallest and the largest signed integer of `bits` bits.
fn range(bits: u8) -> (f32, f32) {
    let half = (1i32 << (bits - 1)) as f32;
    (-half, half - 1.0)
}

/// Returns the first sixteen elements of `v`.
#[inline(always)]
fn row(v: &[f32]) -> &ScaleRow {
    v.first_chunk().expect("a chunk of sixteen")
}

#[inline(always)]
fn ends<V: F32x16>(values: &[f32]) -> (f32, f32) {
    let (mut low, mut high) = (V::splat(0.0), V::splat(0.0));
    let chunks = values.chunks_exact(GRIDS);
    let rest = chunks.remainder();
    for chunk in chunks {
        let v = V::load(row(chunk));
        low = v.min(low);
        high = v.max(high);
    }
    let (mut lows, mut highs) = ([0f32; GRIDS], [0f32; GRIDS]);
    low.store(&mut lows);
    high.store(&mut highs);
    let argmin = rest.iter().chain(&lows).fold(0f32, |m, &v| m.min(v));
    (argmin, rest.iter().chain(&highs).fold(0f32, |m, &v| m.max(v)))
}

#[inline(always)]
fn add_to<V: F32x16>(total: &mut [f64; GRIDS], part: V) {
    let mut lanes = [0f32; GRIDS];
    part.store(&mut lanes);
    for g in 0..GRIDS {
        total[g] += f64::from(lanes[g]);
    }
}

#[inline(always)]
fn asymmetric_errors<V: F32x16>(values: &[f32], masses: Option<&[f32]>, grids: &Grids) -> [f64; GRIDS] {
    assert!(masses.is_none_or(|m| m.len() == values.len()));
    let (scale, zero) = (V::load(&grids.scale), V::load(&grids.zero));
    let inverse = V::load(&grids.scale.map(|s| 1.0 / s));
    let minus_zero = V::load(&grids.zero.map(|z| -z));
    let (low, high) = (V::splat(grids.low), V::splat(grids.high));
    let mut total = [0f64; GRIDS];
    for (i, values) in values.chunks(PART).enumerate() {
        let mut sum = V::splat(0.0);
        for (j, &v) in values.iter().enumerate() {
            let mass = V::splat(masses.map_or(1.0, |m| m[i * PART + j]));
            let v = V::splat(v);
            let q = v.mul_add(inverse, zero).max(low).min(high).round().add(minus_zero);
            let error = scale.neg_mul_add(q, v);
            sum = error.mul(mass).mul_add(error, sum);
        }
        add_to(&mut total, sum);
    }
    total
}

/// Sums over values: errors, value times integer, squared integers.
#[derive(Clone, Copy)]
struct Partial<V> {
    error: V,
    product: V,
    square: V,
}

impl<V: F32x16> Partial<V> {
    const fn of(zero: V) -> Self {
        Partial { error: zero, product: zero, square: zero }
    }
}

/// Holds sixteen symmetric grids (`zero` = 0).
#[derive(Clone, Copy)]
struct Symmetric<V> {
    scale: V,
    inverse: V,
    /// Smallest and largest integer, plus ROUND.
    low: V,
    high: V,
    round: V,
    minus_round: V,
}

impl<V: F32x16> Symmetric<V> {
    #[inline(always)]
    fn new(scale: V, (low, high): (f32, f32)) -> Self {
        let inverse = V::splat(1.0).div(scale);
        let (low, high) = (V::splat(ROUND + low), V::splat(ROUND + high));
        Symmetric { scale, inverse, low, high, round: V::splat(ROUND), minus_round: V::splat(-ROUND) }
    }

    #[inline(always)]
    fn one<const REFIT: bool, const MASS: bool>(&self, v: f32, mass: f32, sum: &mut Partial<V>) {
        let v = V::splat(v);
        // Adding ROUND rounds to integers; clamping comes before the subtraction.
        let q = v.mul_add(self.inverse, self.round).max(self.low).min(self.high).add(self.minus_round);
        let e = self.scale.neg_mul_add(q, v);
        let (we, wq) = match MASS {
            true => (e.mul(V::splat(mass)), q.mul(V::splat(mass))),
            false => (e, q),
        };
        sum.error = we.mul_add(e, sum.error);
        if REFIT {
            sum.product = wq.mul_add(v, sum.product);
            sum.square = wq.mul_add(q, sum.square);
        }
    }
}

/// Sums the errors of at most `PART` values on symmetric grids. With REFIT, also sums for each grid's best scale at
/// fixed integers.
#[inline(always)]
fn part_errors<V: F32x16, const REFIT: bool>(
    values: &[f32],
    masses: Option<&[f32]>,
    grid: &Symmetric<V>,
) -> Partial<V> {
    // Four independent sums hide the latency of one.
    let mut sums = [Partial::of(V::splat(0.0)); 4];
    let (groups, rest) = values.as_chunks::<4>();
    match masses {
        None => {
            for group in groups {
                for k in 0..4 {
                    grid.one::<REFIT, false>(group[k], 1.0, &mut sums[k]);
                }
            }
            for &v in rest {
                grid.one::<REFIT, false>(v, 1.0, &mut sums[0]);
            }
        }
        Some(masses) => {
            let (masses, rest_masses) = masses.as_chunks::<4>();
            for (group, masses) in groups.iter().zip(masses) {
                for k in 0..4 {
                    grid.one::<REFIT, true>(group[k], masses[k], &mut sums[k]);
                }
            }
            for (&v, &m) in rest.iter().zip(rest_masses) {
                grid.one::<REFIT, true>(v, m, &mut sums[0]);
            }
        }
    }
    let [a, b, c, d] = sums;
    Partial {
        error: a.error.add(b.error).add(c.error.add(d.error)),
        product: a.product.add(b.product).add(c.product.add(d.product)),
        square: a.square.add(b.square).add(c.square.add(d.square)),
    }
}

/// Tries sixteen scales on all values; updates `found` if the best of them beats it. Returns each grid's best scale at
/// fixed integers (NaN where all integers are zero), and the index of the best grid.
#[inline(always)]
fn attempt<V: F32x16, const REFIT: bool>(
    values: &[f32],
    masses: Option<&[f32]>,
    scale: V,
    range: (f32, f32),
    found: &mut (f32, f64),
) -> (V, usize) {
    let grid = Symmetric::<V>::new(scale, range);
    let mut scales = [0f32; GRIDS];
    // Faster, with the same result; scalar code has the other way only, so that there is less of it.
    if const { !V::IS_REFERENCE } && values.len() <= PART {
        let sums = part_errors::<V, REFIT>(values, masses, &grid);
        let (best, error) = sums.error.argmin();
        if f64::from(error) < found.1 {
            scale.store(&mut scales);
            *found = (scales[best], f64::from(error));
        }
        return (if REFIT { sums.product.div(sums.square) } else { scale }, best);
    }
    let (mut errors, mut products, mut squares) = ([0f64; GRIDS], [0f64; GRIDS], [0f64; GRIDS]);
    for (i, values) in values.chunks(PART).enumerate() {
        let masses = masses.map(|m| &m[i * PART..][..values.len()]);
        let sums = part_errors::<V, REFIT>(values, masses, &grid);
        add_to(&mut errors, sums.error);
        if REFIT {
            add_to(&mut products, sums.product);
            add_to(&mut squares, sums.square);
        }
    }
    let best = (1..GRIDS).fold(0, |best, g| if errors[g] < errors[best] { g } else { best });
    if errors[best] < found.1 {
        scale.store(&mut scales);
        *found = (scales[best], errors[best]);
    }
    if REFIT {
        for g in 0..GRIDS {
            scales[g] = (products[g] / squares[g]) as f32;
        }
        return (V::load(&scales), best);
    }
    (scale, best)
}

/// Returns the error of `values` on one grid, which all lanes share; their number is a multiple of the lanes.
#[inline(always)]
fn one_error<V: F32x16>(values: &[f32], grid: &Symmetric<V>) -> f32 {
    let mut error = V::splat(0.0);
    for chunk in values.chunks_exact(GRIDS) {
        let v = V::load(row(chunk));
        let q = v.mul_add(grid.inverse, grid.round).max(grid.low).min(grid.high).add(grid.minus_round);
        let e = grid.scale.neg_mul_add(q, v);
        error = e.mul_add(e, error);
    }
    error.horizontal_sum()
}

/// Returns the powers 0 to 15 of a ratio.
const fn powers(ratio: f32) -> ScaleRow {
    let mut p = [1f32; GRIDS];
    let mut g = 1;
    while g < GRIDS {
        p[g] = p[g - 1] * ratio;
        g += 1;
    }
    p
}

/// Factors of scales: fall by 2 in 14 steps for few bits, by 3 for many bits; WIDE falls further.
const FEW_BITS: ScaleRow = powers(0.950_5);
const MANY_BITS: ScaleRow = powers(0.924_5);
const WIDE: ScaleRow = powers(0.74);
/// Factors near 1.
const NEAR: ScaleRow = {
    let mut p = [1f32; GRIDS];
    let mut g = 0;
    while g < GRIDS {
        p[g] = 1.0 + 0.011 * (7.0 - g as f32);
        g += 1;
    }
    p
};

/// Searches downwards from the scale at which all magnitudes fit. For few bits each candidate then moves to the best
/// scale for its integers; for many bits the best candidate is refined.
#[inline(always)]
fn search<V: F32x16>(values: &[f32], masses: Option<&[f32]>, bits: u8) -> f32 {
    assert!(masses.is_none_or(|m| m.len() == values.len()));
    assert!((2..=8).contains(&bits));
    let (lowest, highest) = ends::<V>(values);
    let largest = highest.max(-lowest);
    if largest == 0.0 {
        return 1.0;
    }
    // All-zero masses are ignored.
    let masses = masses.filter(|m| m.iter().any(|&m| m > 0.0));
    let (low, high) = range(bits);
    let few = bits <= 4;
    let mut found = (1.0, f64::INFINITY);
    // At the first scale all values just fit. The last candidate maps the largest magnitude to the largest integer, as
    // without a search.
    let whole = (highest / high).max(lowest / low);
    let mut scales = if few { FEW_BITS } else { MANY_BITS };
    for s in &mut scales {
        *s *= whole;
    }
    let bottom = scales[GRIDS - 2];
    scales[GRIDS - 1] = largest / high;
    let (mut refit, mut best) =
        attempt::<V, true>(values, masses, to_half(V::load(&scales)), (low, high), &mut found);
    // The best scale may lie lower where few weights are far above the others, or where the best of these scales was
    // the smallest. In the first case larger scales are all equally bad, so that the first or an already small one was chosen.
    let middle = (2..11).contains(&best);
    let limit = if few { 4.5 } else { 16.0 };
    if best == GRIDS - 2 || !middle && crest_is_high::<V>(values, masses, largest, limit) {
        let before = found.1;
        let wide = to_half(V::load(&WIDE).mul(V::splat(bottom)));
        let (lower, at) = attempt::<V, true>(values, masses, wide, (low, high), &mut found);
        if found.1 < before {
            (refit, best) = (lower, at);
        }
    }
    if few && masses.is_none() && values.len() <= PART && values.len().is_multiple_of(GRIDS) {
        // Moving only the best candidate takes a sixteenth of the work and finds a nearly as good scale.
        let mut scales = [0f32; GRIDS];
        to_half(refit).store(&mut scales);
        let error = one_error(values, &Symmetric::<V>::new(V::splat(scales[best]), (low, high)));
        return if f64::from(error) < found.1 { scales[best] } else { found.0 };
    }
    let next = if few { refit } else { V::load(&NEAR).mul(V::splat(found.0)) };
    attempt::<V, false>(values, masses, to_half(next), (low, high), &mut found);
    found.0
}

/// Tells whether the largest magnitude exceeds `limit` times the root of the mean square.
#[inline(always)]
fn crest_is_high<V: F32x16>(values: &[f32], masses: Option<&[f32]>, largest: f32, limit: f32) -> bool {
    let (mut square, mut mass) = (0f64, 0f64);
    match masses {
        None => {
            mass = values.len() as f64;
            for values in values.chunks(PART) {
                let groups = values.chunks_exact(GRIDS);
                square += groups.remainder().iter().map(|v| f64::from(v * v)).sum::<f64>();
                let mut lanes = V::splat(0.0);
                for group in groups {
                    let v = V::load(row(group));
                    lanes = v.mul_add(v, lanes);
                }
                square += f64::from(lanes.horizontal_sum());
            }
        }
        Some(masses) => {
            for (&v, &m) in values.iter().zip(masses) {
                square += f64::from(m * v * v);
                mass += f64::from(m);
            }
        }
    }
    let l = f64::from(largest / limit);
    l * l * mass > square
}

#[inline(always)]
fn apply<V: F32x16>(
    values: &[f32],
    importance: Option<&[f32]>,
    grids: &[ScaleAndZero],
    bits: u8,
    codes: &mut [i8],
) -> ErrorSums {
    assert!(importance.is_none_or(|m| m.len() == values.len()));
    assert_eq!(values.len(), codes.len());
    assert!((2..=8).contains(&bits));
    assert!(values.len().is_multiple_of(grids.len().max(1)));
    if values.is_empty() {
        return ErrorSums::default();
    }
    let width = values.len() / grids.len();
    let (low, high) = range(bits);
    let (low, high) = (V::splat(low), V::splat(high));
    let (minus_one, zero, integer_bits) = (V::splat(-1.0), V::splat(0.0), V::splat(ROUND));
    let mut sums = ErrorSums::default();
    let mut largest = zero;
    let (mut error, mut dot, mut original, mut compressed) = (zero, zero, zero, zero);
    let (mut weighted_error, mut weighted_original) = (zero, zero);
    let mut summed = 0;
    for (i, grid) in grids.iter().enumerate() {
        let (inverse, zeros) = (V::splat(1.0 / grid.scale), V::splat(grid.zero));
        let (scale, minus_zeros) = (V::splat(grid.scale), V::splat(-grid.zero));
        for start in (i * width..(i + 1) * width).step_by(GRIDS) {
            let n = GRIDS.min((i + 1) * width - start);
            // A shorter last row is padded with values that become zero without error.
            let part = |from: &[f32]| match from[start..].first_chunk::<GRIDS>() {
                Some(all) if n == GRIDS => V::load(all),
                _ => {
                    let mut own = [0f32; GRIDS];
                    own[..n].copy_from_slice(&from[start..start + n]);
                    V::load(&own)
                }
            };
            let v = part(values);
            let q = v.mul_add(inverse, zeros).max(low).min(high).round();
            // The low bits of the sum are the integer's bits.
            let mut bits = [0f32; GRIDS];
            q.add(integer_bits).store(&mut bits);
            let mut own = [0i8; GRIDS];
            for g in 0..GRIDS {
                own[g] = bits[g].to_bits() as u8 as i8;
            }
            match codes[start..].first_chunk_mut::<GRIDS>() {
                Some(all) if n == GRIDS => *all = own,
                _ => codes[start..start + n].copy_from_slice(&own[..n]),
            }
            let result = q.add(minus_zeros).mul(scale);
            let e = result.mul_add(minus_one, v);
            error = e.mul_add(e, error);
            dot = v.mul_add(result, dot);
            original = v.mul_add(v, original);
            compressed = result.mul_add(result, compressed);
            largest = largest.max(e).max(e.mul(minus_one));
            if let Some(importance) = importance {
                let m = part(importance);
                weighted_error = e.mul(m).mul_add(e, weighted_error);
                weighted_original = v.mul(m).mul_add(v, weighted_original);
            }
            summed += n;
            if summed >= 4 * PART || start + n == values.len() {
                sums.error += f64::from(error.horizontal_sum());
                sums.dot += f64::from(dot.horizontal_sum());
                sums.original += f64::from(original.horizontal_sum());
                sums.compressed += f64::from(compressed.horizontal_sum());
                (error, dot, original, compressed) = (zero, zero, zero, zero);
                if importance.is_some() {
                    sums.weighted_error += f64::from(weighted_error.horizontal_sum());
                    sums.weighted_original += f64::from(weighted_original.horizontal_sum());
                    (weighted_error, weighted_original) = (zero, zero);
                }
                summed = 0;
            }
        }
    }
    let mut lanes = [0f32; GRIDS];
    largest.store(&mut lanes);
    sums.largest = lanes.iter().fold(0f32, |m, &e| m.max(e));
    sums
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::Isa;
    use half::f16;

    fn isas() -> impl Iterator<Item = Isa> {
        Isa::available()
    }

    fn values(n: usize) -> Vec<f32> {
        (0..n).map(|i| ((i * 37 % 101) as f32 - 50.0) * 0.013 + (i % 7) as f32 * 0.001).collect()
    }

    #[test]
    fn every_path_gives_the_sum_of_squares() {
        let values = values(777);
        let masses: Vec<f32> = (0..777).map(|i| (i % 5) as f32 * 0.5).collect();
        let mut grids = Grids { scale: [0.0; GRIDS], zero: [0.0; GRIDS], low: -8.0, high: 7.0 };
        for g in 0..GRIDS {
            grids.scale[g] = 0.02 + 0.007 * g as f32;
            grids.zero[g] = (g % 4) as f32 - 2.0;
        }
        for masses in [None, Some(masses.as_slice())] {
            for g in 0..GRIDS {
                let (s, z) = (f64::from(grids.scale[g]), f64::from(grids.zero[g]));
                let expected: f64 = values
                    .iter()
                    .enumerate()
                    .map(|(i, &v)| {
                        let v = f64::from(v);
                        let q = (v / s + z).round_ties_even().clamp(-8.0, 7.0);
                        masses.map_or(1.0, |m| f64::from(m[i])) * (v - s * (q - z)).powi(2)
                    })
                    .sum();
                for isa in isas() {
                    let found = sum_grid_errors(isa, &values, masses, &grids)[g];
                    assert!((found - expected).abs() <= 1e-4 * expected, "{isa:?}: {found} for {expected}");
                }
            }
        }
        assert_eq!(sum_grid_errors(Isa::best(), &[], None, &grids), [0.0; GRIDS]);
    }

    #[test]
    fn every_path_finds_the_same_quality() {
        for n in [1, 5, 16, 32, 31, 256, 704, 1000] {
            for bits in [4, 8] {
                let v = values(n);
                let masses: Vec<f32> = (0..n).map(|i| (i % 5) as f32 * 0.5 + 0.1).collect();
                for masses in [None, Some(masses.as_slice())] {
                    let error = |isa| {
                        let scale = find_scale(isa, &v, masses, bits);
                        assert_eq!(f16::from_f32(scale).to_f32(), scale);
                        let mut codes = vec![0i8; n];
                        let grid = [ScaleAndZero { scale, zero: 0.0 }];
                        let sums = quantize_linear(isa, &v, masses, &grid, bits, &mut codes);
                        let own: f64 = v
                            .iter()
                            .zip(&codes)
                            .map(|(v, q)| f64::from(v - scale * f32::from(*q)).powi(2))
                            .sum();
                        assert!((own - sums.error).abs() <= 1e-4 * own + 1e-12, "{own} {}", sums.error);
                        if masses.is_some() { sums.weighted_error } else { sums.error }
                    };
                    let scalar = error(Isa::Scalar);
                    for isa in isas() {
                        let found = error(isa);
                        assert!(found <= scalar * 1.02 + 1e-9, "{isa:?}, {n}, {bits}: {found} for {scalar}");
                    }
                }
            }
        }
    }

    #[test]
    fn extremes_hold_zero() {
        for isa in isas() {
            assert_eq!(find_extremes(isa, &[]), (0.0, 0.0));
            assert_eq!(find_extremes(isa, &[3.0; 40]), (0.0, 3.0));
            let mut v = vec![0.5f32; 37];
            (v[36], v[5]) = (-4.0, 9.0);
            assert_eq!(find_extremes(isa, &v), (-4.0, 9.0));
        }
    }

    #[test]
    fn scales_are_numbers_of_fp16() {
        let half = |v: f32| {
            let mut out = [0f32; GRIDS];
            to_half(crate::simd::Scalar::splat(v)).store(&mut out);
            out[0]
        };
        for i in 0..200_000u32 {
            let v = f32::from_bits(0x2f00_0000 + i * 4001);
            let expected = f16::from_f32(v).to_f32().clamp(5.960_464_5e-8, 65504.0);
            let found = half(v);
            // Ties may round either way.
            assert!(
                f16::from_f32(found).to_f32() == found && (found - v).abs() <= (expected - v).abs() * 1.000_1,
                "{v}: {found} for {expected}"
            );
            if v > 65504.0 {
                break;
            }
        }
        assert_eq!([half(0.0), half(f32::NAN), half(1e9)], [5.960_464_5e-8, 5.960_464_5e-8, 65504.0]);
    }

    #[test]
    fn blocks_have_their_own_scales() {
        let v = values(40);
        let grids: Vec<ScaleAndZero> =
            (0..5).map(|i| ScaleAndZero { scale: 0.05 + 0.01 * i as f32, zero: i as f32 - 2.0 }).collect();
        for isa in isas() {
            let mut together = vec![0i8; 40];
            let sums = quantize_linear(isa, &v, Some(&[0.5; 40]), &grids, 4, &mut together);
            let (mut error, mut apart) = (0.0, vec![0i8; 40]);
            for (i, grid) in grids.iter().enumerate() {
                let part = &mut apart[i * 8..i * 8 + 8];
                error += quantize_linear(isa, &v[i * 8..i * 8 + 8], None, &[*grid], 4, part).error;
            }
            assert_eq!(together, apart, "{isa:?}");
            assert!((sums.error - error).abs() < 1e-5 * error && sums.weighted_error < sums.error);
        }
    }

    #[test]
    fn sums_of_a_small_example() {
        let importance = [1.0, 0.0, 2.0];
        for isa in isas() {
            let mut codes = [0i8; 3];
            let grid = [ScaleAndZero { scale: 1.0, zero: 1.0 }];
            let s = quantize_linear(isa, &[1.0, -2.4, 9.0], Some(&importance), &grid, 4, &mut codes);
            assert_eq!(codes, [2, -1, 7]);
            let close = |a: f64, b: f64| (a - b).abs() < 1e-5 * b.max(1.0);
            assert!(close(s.error, 0.16 + 9.0) && close(s.dot, 1.0 + 4.8 + 54.0), "{s:?}");
            assert!(close(s.original, 1.0 + 5.76 + 81.0) && close(s.compressed, 1.0 + 4.0 + 36.0));
            assert!(close(s.weighted_error, 18.0) && close(s.weighted_original, 163.0));
            assert_eq!(s.largest, 3.0);
        }
    }
}
