//! Layouts of packed activations.

use crate::matrix::BLOCK;
use crate::simd::LANES;

/// Says how activations are packed: which column of a block is lane l of vector k, and in which format.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Default)]
pub enum Layout {
    /// f32; column `16 k + l`.
    #[default]
    F32,
    /// f32; column `8 l + k`: eight neighbouring columns share a lane, as packed indices share a 32-bit word.
    F32Interleaved,
    /// 24-bit integers in the order of [`Layout::F32Interleaved`].
    I24,
    /// 8-bit integers in the order of [`Layout::F32Interleaved`], for weights of 4 bits.
    I8Nibbles,
    /// 8-bit integers; column `64 (k / 4) + 4 l + k % 4`: four neighbouring columns share a lane.
    I8,
    /// bf16; column `16 k + l`.
    Bf16,
}

impl Layout {
    /// Returns the column of a block at index `i = 16 k + l` of its vectors.
    #[inline(always)]
    pub(crate) fn column(self, i: usize) -> usize {
        let (k, l) = (i / LANES, i % LANES);
        match self {
            Layout::F32 | Layout::Bf16 => i,
            Layout::F32Interleaved | Layout::I24 | Layout::I8Nibbles => BLOCK / LANES * l + k,
            Layout::I8 => 64 * (k / 4) + 4 * l + k % 4,
        }
    }
}
