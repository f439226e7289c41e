//! Words with NEON.

use super::{INVERSE, LEAST, STEPS, Wide};
use crate::fast::Bytes;
use crate::fast::neon::Dots;
use crate::lanes::neon::Neon;
use std::arch::aarch64::*;
use std::array::from_fn;

impl<D: Dots> Wide for Neon<D> {
    /// The lower and the upper bytes of the words.
    type Table = (uint8x16_t, uint8x16_t);
    #[inline(always)]
    fn words(table: &[i16; 16]) -> Self::Table {
        // SAFETY: sixteen words are there; the processor has NEON.
        let both = unsafe { vld2q_u8(table.as_ptr().cast()) };
        (both.0, both.1)
    }
    #[inline(always)]
    fn look_up<const J: usize>((low, high): Self::Table, at: Self::Bytes) -> Self::Bytes {
        // SAFETY: the processor has NEON.
        at.map(|at| unsafe {
            let at = if J.is_multiple_of(2) { vandq_u8(at, vdupq_n_u8(15)) } else { vshrq_n_u8::<4>(at) };
            let (low, high) = (vqtbl1q_u8(low, at), vqtbl1q_u8(high, at));
            if J < 2 { vtrn1q_u8(low, high) } else { vtrn2q_u8(low, high) }
        })
    }
    #[inline(always)]
    fn dot_words<const NATIVE: bool>(sums: Self::Sums, w: Self::Bytes, x: &[u8; 64]) -> Self::Sums {
        let x = <Self as Bytes>::bytes(x);
        // SAFETY: the processor has NEON.
        from_fn(|i| unsafe {
            let (w, x) = (vreinterpretq_s16_u8(w[i]), vreinterpretq_s16_u8(x[i]));
            let low = vmull_s16(vget_low_s16(w), vget_low_s16(x));
            vaddq_s32(sums[i], vpaddq_s32(low, vmull_high_s16(w, x)))
        })
    }
    #[inline(always)]
    fn split(even: Self, odd: Self, out: &mut [[u8; 64]; 2]) {
        for i in 0..4 {
            // SAFETY: there is room for twice 64 bytes; the processor has NEON.
            unsafe {
                let (even, odd) = (vcvtnq_s32_f32(even.0[i]), vcvtnq_s32_f32(odd.0[i]));
                let upper = |v| vshrq_n_s32::<12>(vaddq_s32(v, vdupq_n_s32(2048)));
                let (a, b) = (upper(even), upper(odd));
                let lower = |v, upper| vsubq_s32(v, vshlq_n_s32::<12>(upper));
                let words = [(a, b), (lower(even, a), lower(odd, b))];
                for (out, (even, odd)) in out.iter_mut().zip(words) {
                    let words = vtrn1q_s16(vreinterpretq_s16_s32(even), vreinterpretq_s16_s32(odd));
                    vst1q_u8(out.as_mut_ptr().add(16 * i), vreinterpretq_u8_s16(words));
                }
            }
        }
    }
    #[inline(always)]
    fn scales(self) -> (Self, Self) {
        // SAFETY: the processor has NEON.
        unsafe {
            let bits = self.0.map(|v| {
                let bits = vandq_u32(vreinterpretq_u32_f32(v), vdupq_n_u32(0x7f80_0000));
                vmaxq_u32(bits, vdupq_n_u32(LEAST))
            });
            let inverse = bits.map(|v| vreinterpretq_f32_u32(vsubq_u32(vdupq_n_u32(INVERSE), v)));
            let step = bits.map(|v| vreinterpretq_f32_u32(vsubq_u32(v, vdupq_n_u32(STEPS))));
            (Neon::of(inverse), Neon::of(step))
        }
    }
}
