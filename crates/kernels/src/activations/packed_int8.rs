//! Packs activations as integers of 8 bits, or of 15 bits in two digits of 8.
//!
//! ```text
//! lane l of 8 blocks (64 columns):  scale = max |x| / 127,  q = round(x / scale),  |q| <= 127
//!
//! two digits:                       scale = max |x| / 16319,  q = round(x / scale) = 128 * high + low
//!                                   high = round(q / 128),  |high| <= 127,  |low| <= 64
//!   lines    high digits of all blocks, then low digits
//!   scales   128 * scale of all parts, then scale
//!
//! with sums:                        a third line of each block, i32: -16 * sum of q over the lane's 8 columns
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

/// The largest number in two digits: 127 * 128 + 63.
const LARGEST_IN_DIGITS: f32 = 16319.0;
/// Lines of a block with sums.
pub(crate) const WITH_SUMS: usize = LINES + 1;
/// The code of zero in weights that sums are for.
pub(crate) const ZERO: u8 = 16;
/// Worth of a unit of the high digit.
const RADIX: f32 = 128.0;

/// A function that packs a token's vectors as lines and scales, and sums its elements.
pub(super) type PackIntegers =
    fn(&[[f32; LANES]], &ByteOrder, &mut [[u8; 64]], &mut [[f32; LANES]], &mut f32);

simd_fn! {
    /// Packs a token's vectors in one digit.
    pub(super) fn pack_token(data: &[[f32; LANES]], byte_order: &ByteOrder, bytes: &mut [[u8; 64]], scales: &mut [[f32; LANES]], sum: &mut f32) = pack_token_simd, 1, LINES
}

simd_fn! {
    /// Packs a token's vectors in one digit, with sums.
    pub(super) fn pack_token_with_sums(data: &[[f32; LANES]], byte_order: &ByteOrder, bytes: &mut [[u8; 64]], scales: &mut [[f32; LANES]], sum: &mut f32) = pack_token_simd, 1, WITH_SUMS
}

simd_fn! {
    /// Packs a token's vectors in two digits.
    pub(super) fn pack_token_in_digits(data: &[[f32; LANES]], byte_order: &ByteOrder, bytes: &mut [[u8; 64]], scales: &mut [[f32; LANES]], sum: &mut f32) = pack_token_simd, 2, LINES
}

#[inline(always)]
fn pack_token_simd<L: U8x64, const DIGITS: usize, const BLOCK_LINES: usize>(
    data: &[[f32; LANES]],
    byte_order: &ByteOrder,
    bytes: &mut [[u8; 64]],
    scales: &mut [[f32; LANES]],
    sum: &mut f32,
) {
    let most = if const { DIGITS == 2 } { LARGEST_IN_DIGITS } else { 127.0 };
    let mut total = L::splat(0.0);
    let (bytes, low_bytes) = bytes.split_at_mut(data.len() / VECTORS * BLOCK_LINES);
    let (scales, low_scales) = scales.split_at_mut(data.len().div_ceil(BLOCKS_PER_SCALE * VECTORS));
    let parts = data.chunks(BLOCKS_PER_SCALE * VECTORS).zip(bytes.chunks_mut(BLOCKS_PER_SCALE * BLOCK_LINES));
    for (part, ((data, bytes), scale)) in parts.zip(scales).enumerate() {
        let (mut largest, mut wrong) = (L::splat(0.0), L::splat(0.0));
        for v in data {
            let v = L::load(v);
            largest = largest.max(v).max(v.mul(L::splat(-1.0)));
            // 0, or NaN where an element is not finite. NaN makes the scale NaN, and so the results.
            wrong = v.mul_add(L::splat(0.0), wrong);
        }
        let inverse = L::splat(most).div(largest.max(L::splat(1e-30)));
        let step = largest.mul(L::splat(1.0 / most)).add(wrong);
        if const { DIGITS == 2 } {
            step.mul(L::splat(RADIX)).store(scale);
            step.store(&mut low_scales[part]);
        } else {
            step.store(scale);
        }
        let mut sums = L::splat(0.0);
        let blocks = data.as_chunks::<VECTORS>().0.iter().zip(bytes.as_chunks_mut::<BLOCK_LINES>().0);
        for (b, (block, out)) in blocks.enumerate() {
            let before = sums;
            for (i, (vectors, out)) in byte_order.iter().zip(&mut *out).enumerate() {
                let mut q = [sums; 4];
                for j in 0..4 {
                    q[j] = L::load(&block[vectors[j]]).mul(inverse).round();
                }
                sums = sums.add(q[0].add(q[1]).add(q[2]).add(q[3]));
                if const { DIGITS == 2 } {
                    let mut high = q;
                    for j in 0..4 {
                        high[j] = q[j].mul(L::splat(1.0 / RADIX)).round();
                        q[j] = high[j].mul_add(L::splat(-RADIX), q[j]);
                    }
                    L::pack_i8(high, out);
                    L::pack_i8(q, &mut low_bytes[(part * BLOCKS_PER_SCALE + b) * LINES + i]);
                } else {
                    L::pack_i8(q, out);
                }
            }
            if const { BLOCK_LINES == WITH_SUMS } {
                // Sums of up to 64 whole numbers of 7 bits are exact.
                let mut lanes = [0f32; LANES];
                sums.mul_add(L::splat(-f32::from(ZERO)), before.mul(L::splat(f32::from(ZERO))))
                    .store(&mut lanes);
                for (to, v) in out[LINES].as_chunks_mut().0.iter_mut().zip(lanes) {
                    *to = (v as i32).to_ne_bytes();
                }
            }
        }
        total = step.mul_add(sums, total);
    }
    *sum = total.horizontal_sum();
}
