//! Packs activations as 24-bit integers in two digits.
//!
//! ```text
//! lane l of 4 blocks (32 columns):  2^e <= max |x| < 2^(e+1)
//!   q = round(x * 2^(22-e)),  |q| <= 2^23          scale = 2^(e-22)
//!   q = 4096 * high + low,    -2048 <= low < 2048, |high| <= 2048
//! ```
//!
//! Rounding loses at most half a unit of the last of 23 bits, by the largest of 32 columns. `docs/kernels.md` has the
//! error bound.
//!
//! A token is out_of_range, and multiplied in f32, if an element is not finite, or if the largest magnitude of a lane is
//! 2^64 or more, or below 2^-104 but not zero.

use crate::activations::BLOCK;
use crate::simd::{I16x32, LANES, MIN_EXPONENT, simd_fn};

/// Blocks that share a lane's scale: the sum of their products of 15 by 12 bits fits into 32 bits.
pub(crate) const BLOCKS_PER_SCALE: usize = 4;
/// Vectors of 32 words in a block, per digit.
pub(crate) const VECTORS: usize = 4;
/// Lines of a block. Vector j holds columns `8 l + j` and `8 l + j + 4` as words `2 l` and `2 l + 1`: its high digits, then its
/// low ones.
pub(crate) const LINES: usize = 2 * VECTORS;
/// f32 vectors of a block.
const F32_VECTORS: usize = BLOCK / LANES;
/// Bound on magnitudes: from here on, sums in units of a table's step could become infinite.
const MAX_MAGNITUDE: f32 = (1u128 << 64) as f32;

simd_fn! {
    /// Packs a token's vectors, in the order of [`super::Layout::F32Interleaved`], and tells whether it is out of range.
    pub(super) fn pack_token(data: &[[f32; LANES]], words: &mut [[u8; 64]], scales: &mut [[f32; LANES]], out_of_range: &mut bool) = pack_token_simd
}

#[inline(always)]
fn pack_token_simd<L: I16x32>(
    data: &[[f32; LANES]],
    words: &mut [[u8; 64]],
    scales: &mut [[f32; LANES]],
    out_of_range: &mut bool,
) {
    // `served` is 1 in lanes that integers can hold; `wrong` is 0, or NaN where an element is not finite.
    let (mut served, mut wrong) = (L::splat(1.0), L::splat(0.0));
    let parts = data.chunks(BLOCKS_PER_SCALE * F32_VECTORS).zip(words.chunks_mut(BLOCKS_PER_SCALE * LINES));
    for ((data, words), scale) in parts.zip(scales) {
        let mut largest = L::splat(0.0);
        for v in data {
            let v = L::load(v);
            largest = largest.max(v).max(v.mul(L::splat(-1.0)));
            wrong = v.mul_add(L::splat(0.0), wrong);
        }
        let enough = largest.if_below(L::splat(f32::from_bits(MIN_EXPONENT)), L::splat(0.0), L::splat(1.0));
        let none = L::splat(0.0).if_below(largest, L::splat(0.0), L::splat(1.0));
        let bounded = largest.if_below(L::splat(MAX_MAGNITUDE), L::splat(1.0), L::splat(0.0));
        served = served.min(enough.max(none)).min(bounded);
        let (inverse, step) = largest.exponent_scales();
        step.store(scale);
        for (data, words) in data.as_chunks::<F32_VECTORS>().0.iter().zip(words.as_chunks_mut::<LINES>().0) {
            for (j, out) in words.as_chunks_mut::<2>().0.iter_mut().enumerate() {
                let (even, odd) = (L::load(&data[j]), L::load(&data[j + VECTORS]));
                L::split_digits(even.mul(inverse), odd.mul(inverse), out);
            }
        }
    }
    // The sum is 16 unless a lane is not served or NaN.
    *out_of_range = served.add(wrong).horizontal_sum() != LANES as f32;
}
