//! Layouts of packed activations.

use crate::simd::LANES;

/// Columns of a block, the unit of decoding weights and packing activations: 16 lanes of 8 indices of 4 bits.
pub(crate) const BLOCK: usize = 128;

/// Says how activations are packed: which column of a block is lane l of vector k, and in which format.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Default)]
pub enum Layout {
    /// f32; column `16 k + l`.
    #[default]
    F32,
    /// f32; column `8 l + k`: eight neighbouring columns share a lane, as packed indices share a 32-bit word.
    F32Interleaved,
    /// 24-bit integers in the order of [`Layout::F32Interleaved`].
    Int16,
    /// 8-bit integers in the order of [`Layout::F32Interleaved`], for weights of 4 bits.
    Int8Interleaved,
    /// 8-bit integers; column `64 (k / 4) + 4 l + k % 4`: four neighbouring columns share a lane.
    Int8,
    /// [`Layout::Int8Interleaved`] with the sums of each lane, for 4-bit weights with a scale per block.
    Int8Blocks,
    /// 15-bit integers in two digits, each in the order of [`Layout::Int8`].
    Int8Digits,
    /// bf16; column `16 k + l`.
    Bf16,
}

impl Layout {
    /// All of them; their numbers are indices.
    pub const ALL: [Layout; 8] = [
        Layout::F32,
        Layout::F32Interleaved,
        Layout::Int16,
        Layout::Int8Interleaved,
        Layout::Int8,
        Layout::Int8Blocks,
        Layout::Int8Digits,
        Layout::Bf16,
    ];

    /// Returns the column of a block at index `i = 16 k + l` of its vectors.
    #[inline(always)]
    pub(crate) fn column(self, i: usize) -> usize {
        let (k, l) = (i / LANES, i % LANES);
        match self {
            Layout::F32 | Layout::Bf16 => i,
            Layout::F32Interleaved | Layout::Int16 | Layout::Int8Interleaved | Layout::Int8Blocks => {
                BLOCK / LANES * l + k
            }
            Layout::Int8 | Layout::Int8Digits => 64 * (k / 4) + 4 * l + k % 4,
        }
    }
}
