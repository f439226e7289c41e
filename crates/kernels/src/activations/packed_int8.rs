//! Packs activations as 8-bit integers.
//!
//! ```text
//! lane l of 8 blocks (64 columns):  scale = max |x| / 127,  q = round(x / scale),  |q| <= 127
//! ```
//!
//! One lane of the dot product adds up the products of these 64 columns, so that a sum of integers has one scale. An
//! element that is not finite makes its scale NaN.

use crate::activations::BLOCK;
use crate::simd::{LANES, U8x64, simd_fn};

/// Blocks that share a lane's scale: f32 holds the sum of 64 products of 8 by 8 bits without rounding.
pub(crate) const BLOCKS_PER_SCALE: usize = 8;
/// Lines of a block.
pub(crate) const LINES: usize = 2;
/// f32 vectors of a block.
const VECTORS: usize = BLOCK / LANES;

/// Vectors of a block that become bytes 0, 1, 2, 3 of the lanes of its two lines.
type ByteOrder = [[usize; 4]; 2];

/// Byte order for weights of 4 bits: a line of even columns and a line of odd columns, as a byte's low and high nibbles.
pub(super) const NIBBLES: ByteOrder = [[0, 2, 4, 6], [1, 3, 5, 7]];
/// Byte order for weights of 8 bits: columns 0 to 63, columns 64 to 127.
pub(super) const BYTES: ByteOrder = [[0, 1, 2, 3], [4, 5, 6, 7]];

simd_fn! {
    /// Packs a token's vectors as lines and scales, and sums its elements.
    pub(super) fn pack_token(data: &[[f32; LANES]], byte_order: &ByteOrder, bytes: &mut [[u8; 64]], scales: &mut [[f32; LANES]], sum: &mut f32) = pack_token_simd
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
