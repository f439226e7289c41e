//! Facts that blocks of several types share.

use half::f16;

/// The 16 levels of IQ4_NL.
pub const IQ4_NL_LEVELS: [i8; 16] =
    [-127, -104, -83, -65, -49, -35, -22, -10, 1, 13, 25, 38, 53, 69, 89, 113];

/// Reads a fp16 number at a byte of a block.
#[inline(always)]
pub fn half_at(b: &[u8], at: usize) -> f32 {
    f16::from_le_bytes([b[at], b[at + 1]]).to_f32()
}
