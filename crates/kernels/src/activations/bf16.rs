//! Packs activations as bf16, rounded to the nearest, ties to even.

use crate::Isa;
use crate::simd::{Bf16Kernel, Bf16x32, LANES, dispatch_bf16};

/// Columns of a line of 64 bytes.
pub(crate) const COLUMNS_PER_LINE: usize = 32;

/// Rounds f32 vectors to bf16; two vectors make a line of 64 bytes.
pub(crate) fn pack(data: &[[f32; LANES]], out: &mut [[u8; 64]]) {
    dispatch_bf16(Isa::best(), PackBf16 { data, out });
}

struct PackBf16<'a> {
    data: &'a [[f32; LANES]],
    out: &'a mut [[u8; 64]],
}

impl Bf16Kernel for PackBf16<'_> {
    #[inline(always)]
    fn run<S: Bf16x32>(self) {
        for ([low, high], out) in self.data.as_chunks().0.iter().zip(self.out) {
            S::pack_bf16(S::load(low), S::load(high), out);
        }
    }
}
