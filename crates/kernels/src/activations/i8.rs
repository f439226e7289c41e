//! Packs activations as 8-bit integers.
//!
//! ```text
//! lane l of 8 blocks (64 columns):  scale = max |x| / 127,  q = round(x / scale),  |q| <= 127
//! ```
//!
//! One lane of the dot product adds up the products of these 64 columns, so that a sum of integers has one scale. An
//! element that is not finite makes its scale NaN.

use super::f32::{WriteToken, with_arranged};
use crate::Pool;
use crate::matrix::BLOCK;
use crate::memory::AlignedVec;
use crate::simd::{LANES, U8x64, simd_fn};

/// Blocks that share a lane's scale: f32 holds the sum of 64 products of 8 by 8 bits without rounding.
pub(crate) const BLOCKS_PER_SCALE: usize = 8;
/// f32 vectors of a block.
const VECTORS: usize = BLOCK / LANES;
/// Elements that one thread packs at a time: 32 KB of f32, which stay in L1. Not tuned.
const PART: usize = 1 << 13;

/// Holds tokens as 8-bit integers.
#[derive(Clone, Debug, Default)]
pub(crate) struct Int8Activations {
    pub bytes: AlignedVec<[u8; 64]>,      // [tokens, blocks, 2, 64]
    pub scales: AlignedVec<[f32; LANES]>, // [tokens, blocks / 8 rounded up, 16]
    /// Sum of all elements of each token.
    pub sums: Vec<f32>, // [tokens]
}

/// Vectors of a block that become bytes 0, 1, 2, 3 of the lanes of its two lines.
type ByteOrder = [[usize; 4]; 2];

/// Byte order for weights of 4 bits: a line of even columns and a line of odd columns, as a byte's low and high nibbles.
pub(super) const NIBBLES: ByteOrder = [[0, 2, 4, 6], [1, 3, 5, 7]];
/// Byte order for weights of 8 bits: columns 0 to 63, columns 64 to 127.
pub(super) const BYTES: ByteOrder = [[0, 1, 2, 3], [4, 5, 6, 7]];

impl Int8Activations {
    /// Returns the number of elements that fit into the allocated memory.
    pub fn capacity(&self) -> usize {
        self.bytes.len() * 64
    }

    /// Packs `tokens` tokens of `blocks` blocks; `token` writes a token's vectors in the order of the layout.
    pub fn pack(
        &mut self,
        pool: &Pool,
        token: &WriteToken<'_>,
        tokens: usize,
        blocks: usize,
        byte_order: &ByteOrder,
    ) {
        let scales_per_token = blocks.div_ceil(BLOCKS_PER_SCALE);
        self.bytes.grow(tokens * blocks * 2, [0; 64]);
        self.scales.grow(tokens * scales_per_token, [0.0; LANES]);
        self.sums.resize(self.sums.len().max(tokens), 0.0);
        let (bytes, scales, sums) = (&mut *self.bytes, &mut *self.scales, &mut self.sums[..tokens]);
        let per_part = (PART / (blocks * BLOCK).max(1)).max(1);
        let pack_part = |first: usize, (bytes, scales, sums): Int8Part<'_>| {
            for (t, sum) in sums.iter_mut().enumerate() {
                let bytes = &mut bytes[t * blocks * 2..(t + 1) * blocks * 2];
                let scales = &mut scales[t * scales_per_token..(t + 1) * scales_per_token];
                with_arranged(token, first + t, blocks * BLOCK, |x| {
                    pack_token(x, byte_order, bytes, scales, sum)
                });
            }
        };
        // A single part needs no list of parts, so that decoding allocates nothing.
        if tokens <= per_part {
            return pack_part(0, (bytes, scales, sums));
        }
        let bytes = bytes[..tokens * blocks * 2].chunks_mut((per_part * blocks * 2).max(1));
        let scales = scales[..tokens * scales_per_token].chunks_mut((per_part * scales_per_token).max(1));
        let mut parts: Vec<_> = bytes.zip(scales).zip(sums.chunks_mut(per_part)).collect();
        pool.for_chunks(&mut parts, 1, &|i, parts| {
            for ((bytes, scales), sums) in parts {
                pack_part(i * per_part, (bytes, scales, sums));
            }
        });
    }
}

/// Bytes, scales and sums of consecutive tokens, see [`Int8Activations`].
type Int8Part<'a> = (&'a mut [[u8; 64]], &'a mut [[f32; LANES]], &'a mut [f32]);

simd_fn! {
    fn pack_token(data: &[[f32; LANES]], byte_order: &ByteOrder, bytes: &mut [[u8; 64]], scales: &mut [[f32; LANES]], sum: &mut f32) = pack_token_simd
}

#[inline(always)]
fn pack_token_simd<L: U8x64>(
    data: &[[f32; LANES]],
    byte_order: &ByteOrder,
    bytes: &mut [[u8; 64]],
    scales: &mut [[f32; LANES]],
    sum: &mut f32,
) {
    let mut total = L::splat(0.0);
    let parts =
        data.chunks(BLOCKS_PER_SCALE * VECTORS).zip(bytes.chunks_mut(BLOCKS_PER_SCALE * 2)).zip(scales);
    for ((data, bytes), scale) in parts {
        let (mut largest, mut wrong) = (L::splat(0.0), L::splat(0.0));
        for v in data {
            let v = L::load(v);
            largest = largest.max(v).max(v.mul(L::splat(-1.0)));
            // 0, or NaN where an element is not finite. NaN makes the scale NaN, and so the results.
            wrong = v.mul_add(L::splat(0.0), wrong);
        }
        let inverse = L::splat(127.0).div(largest.max(L::splat(1e-30)));
        let step = largest.mul(L::splat(1.0 / 127.0)).add(wrong);
        step.store(scale);
        let mut q = L::splat(0.0);
        let blocks = data.as_chunks::<VECTORS>().0.iter().zip(bytes.as_chunks_mut::<2>().0);
        for (block, out) in blocks {
            for (vectors, out) in byte_order.iter().zip(out) {
                let mut four = [q; 4];
                for j in 0..4 {
                    four[j] = L::load(&block[vectors[j]]).mul(inverse).round();
                }
                q = q.add(four[0].add(four[1]).add(four[2]).add(four[3]));
                L::pack_i8(four, out);
            }
        }
        total = step.mul_add(q, total);
    }
    *sum = total.horizontal_sum();
}
