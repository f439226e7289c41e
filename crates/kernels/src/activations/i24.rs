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
//! A token is refused, and multiplied in f32, if an element is not finite, or if the largest magnitude of a lane is
//! 2^64 or more, or below 2^-104 but not zero.

use crate::Pool;
use crate::matrix::BLOCK;
use crate::memory::AlignedVec;
use crate::simd::{I16x32, LANES, MIN_EXPONENT, simd_fn};

/// Blocks that share a lane's scale: the sum of their products of 15 by 12 bits fits into 32 bits.
pub(crate) const BLOCKS_PER_SCALE: usize = 4;
/// Vectors of 32 words in a block, per digit.
pub(crate) const VECTORS: usize = 4;
/// f32 vectors of a block.
const F32_VECTORS: usize = BLOCK / LANES;
/// Bound on magnitudes: from here on, sums in units of a table's step could become infinite.
const MAX_MAGNITUDE: f32 = (1u128 << 64) as f32;
/// Elements that one thread packs at a time: 32 KB of f32, which stay in L1. Not tuned.
const PART: usize = 1 << 13;

/// Holds tokens as 24-bit integers.
#[derive(Clone, Debug, Default)]
pub(crate) struct Int24Activations {
    /// Vector j holds columns `8 l + j` and `8 l + j + 4` as words `2 l` and `2 l + 1`: its high digits, then its low ones.
    pub words: AlignedVec<[u8; 64]>, // [tokens, blocks, 4, 2, 32] i16
    pub scales: AlignedVec<[f32; LANES]>, // [tokens, blocks / 4 rounded up, 16]
    /// True for tokens that are multiplied in f32 instead.
    pub refused: Vec<bool>, // [tokens]
}

impl Int24Activations {
    /// Packs tokens `[tokens, blocks, 8, 16]` in the order of [`super::Layout::F32Interleaved`].
    pub fn pack(&mut self, pool: &Pool, data: &[[f32; LANES]], tokens: usize, blocks: usize) {
        let scales_per_token = blocks.div_ceil(BLOCKS_PER_SCALE);
        self.words.grow(tokens * blocks * 2 * VECTORS, [0; 64]);
        self.scales.grow(tokens * scales_per_token, [0.0; LANES]);
        self.refused.resize(self.refused.len().max(tokens), false);
        self.refused[..tokens].fill(false);
        let per_part = (PART / (blocks * BLOCK).max(1)).max(1);
        let (words, scales, refused) = (&mut *self.words, &mut *self.scales, &mut self.refused[..tokens]);
        // A single part needs no list of parts, so that decoding allocates nothing.
        if tokens <= per_part {
            return pack_tokens(data, blocks, (words, scales, refused));
        }
        let words =
            words[..tokens * blocks * 2 * VECTORS].chunks_mut((per_part * blocks * 2 * VECTORS).max(1));
        let scales = scales[..tokens * scales_per_token].chunks_mut((per_part * scales_per_token).max(1));
        let data = data[..tokens * blocks * F32_VECTORS].chunks((per_part * blocks * F32_VECTORS).max(1));
        let mut parts: Vec<_> = data.zip(words).zip(scales).zip(refused.chunks_mut(per_part)).collect();
        pool.for_chunks(&mut parts, 1, &|_, parts| {
            for (((data, words), scales), refused) in parts {
                pack_tokens(data, blocks, (words, scales, refused));
            }
        });
    }
}

/// Words, scales and refusals of consecutive tokens, see [`Int24Activations`].
type Int24Part<'a> = (&'a mut [[u8; 64]], &'a mut [[f32; LANES]], &'a mut [bool]);

fn pack_tokens(data: &[[f32; LANES]], blocks: usize, (words, scales, refused): Int24Part<'_>) {
    let (scales_per_token, lines) = (blocks.div_ceil(BLOCKS_PER_SCALE), blocks * 2 * VECTORS);
    for (t, refused) in refused.iter_mut().enumerate() {
        pack_token(
            &data[t * blocks * F32_VECTORS..(t + 1) * blocks * F32_VECTORS],
            &mut words[t * lines..(t + 1) * lines],
            &mut scales[t * scales_per_token..(t + 1) * scales_per_token],
            refused,
        );
    }
}

simd_fn! {
    fn pack_token(data: &[[f32; LANES]], words: &mut [[u8; 64]], scales: &mut [[f32; LANES]], refused: &mut bool) = pack_token_simd
}

#[inline(always)]
fn pack_token_simd<L: I16x32>(
    data: &[[f32; LANES]],
    words: &mut [[u8; 64]],
    scales: &mut [[f32; LANES]],
    refused: &mut bool,
) {
    // `served` is 1 in lanes that integers can hold; `wrong` is 0, or NaN where an element is not finite.
    let (mut served, mut wrong) = (L::splat(1.0), L::splat(0.0));
    let parts =
        data.chunks(BLOCKS_PER_SCALE * F32_VECTORS).zip(words.chunks_mut(BLOCKS_PER_SCALE * 2 * VECTORS));
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
        for (data, words) in
            data.as_chunks::<F32_VECTORS>().0.iter().zip(words.as_chunks_mut::<{ 2 * VECTORS }>().0)
        {
            for (j, out) in words.as_chunks_mut::<2>().0.iter_mut().enumerate() {
                let (even, odd) = (L::load(&data[j]), L::load(&data[j + VECTORS]));
                L::split_digits(even.mul(inverse), odd.mul(inverse), out);
            }
        }
    }
    // The sum is 16 unless a lane is not served or NaN.
    *refused = served.add(wrong).horizontal_sum() != LANES as f32;
}
