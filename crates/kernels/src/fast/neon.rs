//! Bytes with NEON.

use super::{Bytes, LANES, Taken, Target, Tiles, each_kind};
use crate::Matrix;
use crate::lanes::neon::Neon;
use std::arch::aarch64::*;
use std::arch::{asm, is_aarch64_feature_detected};
use std::array::from_fn;

/// Some rows of w with all tokens, with the best instructions that this processor has for products of bytes.
pub(super) fn rows_on(w: &Matrix<'_>, x: Taken<'_>, rows: &Tiles, y: &Target<'_>) {
    // SAFETY: the processor has NEON, and the products of bytes that are chosen.
    unsafe {
        if is_aarch64_feature_detected!("i8mm") {
            each_kind::<Neon<MixedDots>>(w, x, rows, y);
        } else if is_aarch64_feature_detected!("dotprod") {
            each_kind::<Neon<SignedDots>>(w, x, rows, y);
        } else {
            each_kind::<Neon<Widening>>(w, x, rows, y);
        }
    }
}

/// How bytes are multiplied.
///
/// Values with one that the processor lacks do not exist: that is what the SAFETY lines of [`Dots::dot`] rely on.
pub(crate) trait Dots: Copy {
    /// Adds to each sum the products of four bytes, of which `codes` has no signs and `x`, above -128, has.
    fn dot(sums: int32x4_t, codes: uint8x16_t, x: int8x16_t) -> int32x4_t;
}

/// What every processor can do.
#[derive(Clone, Copy)]
pub(crate) struct Widening;

/// Products of bytes that all have signs.
#[derive(Clone, Copy)]
pub(crate) struct SignedDots;

/// Products of bytes of which one has no sign.
#[derive(Clone, Copy)]
pub(crate) struct MixedDots;

/// A code as a number with a sign, 128 less.
#[inline(always)]
fn signed(codes: uint8x16_t) -> int8x16_t {
    // SAFETY: the processor has NEON.
    unsafe { vreinterpretq_s8_u8(veorq_u8(codes, vdupq_n_u8(0x80))) }
}

impl Dots for Widening {
    #[inline(always)]
    fn dot(sums: int32x4_t, codes: uint8x16_t, x: int8x16_t) -> int32x4_t {
        // A sum of two products of at most 128 * 127 is just what 16 bits hold.
        // SAFETY: the processor has NEON.
        unsafe {
            let signed = signed(codes);
            let pairs = vpaddq_s16(vmull_s8(vget_low_s8(signed), vget_low_s8(x)), vmull_high_s8(signed, x));
            // 128 times x, once for all rows.
            let rest = vshlq_n_s32::<7>(vpaddlq_s16(vpaddlq_s8(x)));
            vpadalq_s16(vaddq_s32(sums, rest), pairs)
        }
    }
}

// The intrinsics are not stable. Assembly names the extension, since functions are compiled for all processors.

impl Dots for SignedDots {
    #[inline(always)]
    fn dot(mut sums: int32x4_t, codes: uint8x16_t, x: int8x16_t) -> int32x4_t {
        // SAFETY: the processor has `dotprod`, which `rows_on` asks for.
        unsafe {
            let rest = vshlq_n_s32::<7>(vpaddlq_s16(vpaddlq_s8(x)));
            asm!(
                ".arch_extension dotprod",
                "sdot {sums:v}.4s, {codes:v}.16b, {x:v}.16b",
                sums = inout(vreg) sums,
                codes = in(vreg) signed(codes),
                x = in(vreg) x,
                options(pure, nomem, nostack, preserves_flags)
            );
            vaddq_s32(sums, rest)
        }
    }
}

impl Dots for MixedDots {
    #[inline(always)]
    fn dot(mut sums: int32x4_t, codes: uint8x16_t, x: int8x16_t) -> int32x4_t {
        // SAFETY: the processor has `i8mm`, which `rows_on` asks for.
        unsafe {
            asm!(
                ".arch_extension i8mm",
                "usdot {sums:v}.4s, {codes:v}.16b, {x:v}.16b",
                sums = inout(vreg) sums,
                codes = in(vreg) codes,
                x = in(vreg) x,
                options(pure, nomem, nostack, preserves_flags)
            );
        }
        sums
    }
}

/// How eight elements of BITS bits, which are BITS bytes, become words of 16 bits.
struct Of<const BITS: usize>;

impl<const BITS: usize> Of<BITS> {
    /// For each element the two bytes that it lies in.
    const BYTES: [u8; 16] = {
        let mut bytes = [0; 16];
        let mut i = 0;
        while i < 16 {
            bytes[i] = (BITS * (i / 2) / 8 + i % 2) as u8;
            i += 1;
        }
        bytes
    };
    /// How far they are shifted to the left, or by negative numbers to the right, so that it comes first.
    const SHIFT: [i16; 8] = {
        let mut shift = [0; 8];
        let mut i = 0;
        while i < 8 {
            shift[i] = -((BITS * i % 8) as i16);
            i += 1;
        }
        shift
    };
}

impl<D: Dots> Bytes for Neon<D> {
    type Bytes = [uint8x16_t; 4];
    type Sums = [int32x4_t; 4];
    /// Sums of four rows with one token are half of all registers.
    const TILES: bool = false;
    #[inline(always)]
    fn bytes(v: &[u8; 64]) -> Self::Bytes {
        // SAFETY: 64 bytes are there; the processor has NEON.
        from_fn(|i| unsafe { vld1q_u8(v.as_ptr().add(16 * i)) })
    }
    #[inline(always)]
    fn table(v: &[u8; 16]) -> Self::Bytes {
        // SAFETY: 16 bytes are there; the processor has NEON.
        [unsafe { vld1q_u8(v.as_ptr()) }; 4]
    }
    #[inline(always)]
    fn flip(v: Self::Bytes, bits: u8) -> Self::Bytes {
        // SAFETY: the processor has NEON.
        v.map(|v| unsafe { veorq_u8(v, vdupq_n_u8(bits)) })
    }
    #[inline(always)]
    fn nibbles(v: Self::Bytes) -> (Self::Bytes, Self::Bytes) {
        // SAFETY: the processor has NEON.
        unsafe { (v.map(|v| vandq_u8(v, vdupq_n_u8(15))), v.map(|v| vshrq_n_u8::<4>(v))) }
    }
    #[inline(always)]
    fn find(table: Self::Bytes, at: Self::Bytes) -> Self::Bytes {
        // SAFETY: the processor has NEON.
        at.map(|at| unsafe { vqtbl1q_u8(table[0], at) })
    }
    #[inline(always)]
    fn unpack<const BITS: usize>(v: &[u8]) -> Self::Bytes {
        assert!(v.len() >= 8 * BITS && matches!(BITS, 1 | 2 | 3 | 6));
        let v = v.as_ptr();
        // SAFETY: 8 * BITS bytes are there, and no others are loaded; the processor has NEON.
        unsafe {
            let half = |at| vcombine_u8(vld1_u8(v.add(at)), vdup_n_u8(0));
            let none = vdupq_n_u8(0);
            let (a, b, c) = match BITS {
                1 => (half(0), none, none),
                2 => (vld1q_u8(v), none, none),
                3 => (vld1q_u8(v), half(16), none),
                _ => (vld1q_u8(v), vld1q_u8(v.add(16)), vld1q_u8(v.add(32))),
            };
            // Behind the last byte a lookup finds zeros.
            let find = |at| match BITS {
                1 | 2 => vqtbl1q_u8(a, at),
                3 => vqtbl2q_u8(uint8x16x2_t(a, b), at),
                _ => vqtbl3q_u8(uint8x16x3_t(a, b, c), at),
            };
            let (first, shift) =
                (vld1q_u8(Of::<BITS>::BYTES.as_ptr()), vld1q_s16(Of::<BITS>::SHIFT.as_ptr()));
            let eight = |i: usize| {
                let words = vreinterpretq_u16_u8(find(vaddq_u8(first, vdupq_n_u8((BITS * i) as u8))));
                vreinterpretq_u8_u16(vshlq_u16(words, shift))
            };
            let element = vdupq_n_u8((1 << BITS) - 1);
            from_fn(|i| vandq_u8(vuzp1q_u8(eight(2 * i), eight(2 * i + 1)), element))
        }
    }
    #[inline(always)]
    fn find_64(table: &[u8; 64], at: Self::Bytes) -> Self::Bytes {
        // SAFETY: 64 bytes are there; the processor has NEON.
        at.map(|at| unsafe { vqtbl4q_u8(vld1q_u8_x4(table.as_ptr()), at) })
    }
    #[inline(always)]
    fn find_256(table: &[u8; 256], at: Self::Bytes) -> Self::Bytes {
        // SAFETY: four times 64 bytes are there; the processor has NEON.
        at.map(|at| unsafe {
            let mut found = vqtbl4q_u8(vld1q_u8_x4(table.as_ptr()), at);
            for first in [64, 128, 192] {
                // What the part does not have is left as it is.
                let at = vsubq_u8(at, vdupq_n_u8(first));
                found = vqtbx4q_u8(found, vld1q_u8_x4(table.as_ptr().add(usize::from(first))), at);
            }
            found
        })
    }
    #[inline(always)]
    fn put(v: Self::Bytes, out: &mut [u8; 64]) {
        for i in 0..4 {
            // SAFETY: there is room for 64 bytes; the processor has NEON.
            unsafe { vst1q_u8(out.as_mut_ptr().add(16 * i), v[i]) };
        }
    }
    #[inline(always)]
    fn no_sums() -> Self::Sums {
        // SAFETY: the processor has NEON.
        [unsafe { vdupq_n_s32(0) }; 4]
    }
    #[inline(always)]
    fn dot(sums: Self::Sums, codes: Self::Bytes, x: &[u8; 64]) -> Self::Sums {
        let x = Self::bytes(x);
        // SAFETY: the processor has NEON.
        from_fn(|i| D::dot(sums[i], codes[i], unsafe { vreinterpretq_s8_u8(x[i]) }))
    }
    #[inline(always)]
    fn sums(v: Self::Sums) -> Self {
        // SAFETY: the processor has NEON.
        Neon::of(v.map(|v| unsafe { vcvtq_f32_s32(v) }))
    }
    #[inline(always)]
    fn narrow(v: [Self; 4], out: &mut [u8; 64]) {
        // The lowest byte of each integer.
        let bytes = |v: Self| {
            // SAFETY: the processor has NEON.
            unsafe {
                let [a, b, c, d] = v.0.map(|v| vreinterpretq_s16_s32(vcvtnq_s32_f32(v)));
                let (low, high) = (vuzp1q_s16(a, b), vuzp1q_s16(c, d));
                vuzp1q_u8(vreinterpretq_u8_s16(low), vreinterpretq_u8_s16(high))
            }
        };
        let [a, b, c, d] = v.map(bytes);
        // SAFETY: there is room for 64 bytes; the processor has NEON.
        unsafe { vst4q_u8(out.as_mut_ptr(), uint8x16x4_t(a, b, c, d)) };
    }
}

const _: () = assert!(LANES == 16);
