//! NEON, which every AArch64 processor has, and three ways to multiply bytes with it.

use super::traits::*;
use std::arch::aarch64::*;
use std::arch::{asm, is_aarch64_feature_detected};
use std::array::from_fn;
use std::marker::PhantomData;

/// Sixteen lanes in four registers. `D` chooses the dot product of bytes, see [`Dots`].
#[derive(Clone, Copy)]
pub(crate) struct Neon<D = Widening>(pub(crate) [float32x4_t; 4], PhantomData<D>);

impl<D> Neon<D> {
    #[inline(always)]
    pub(crate) fn of(v: [float32x4_t; 4]) -> Self {
        Neon(v, PhantomData)
    }
}

/// Applies an intrinsic, or evaluates an expression, for all four registers.
macro_rules! each {
    ($f:ident, $($v:expr),*) => {
        Neon::of(from_fn(|i| $f($($v.0[i]),*)))
    };
    (|$($v:ident),*| $body:expr, $($a:expr),*) => {
        Neon::of(from_fn(|i| { $(let $v = $a.0[i];)* $body }))
    };
}

/// Sixteen 32-bit integers as planes: register j holds byte j of each, so that a lookup of bytes reads one register.
pub(crate) type Planes = [uint8x16_t; 4];

#[inline(always)]
fn zeros() -> uint8x16_t {
    // SAFETY: the processor has NEON.
    unsafe { vdupq_n_u8(0) }
}

/// Splits sixteen numbers into planes: byte j of each in register j.
#[inline(always)]
fn planes(v: [float32x4_t; 4]) -> Planes {
    // SAFETY: the processor has NEON.
    unsafe {
        let [a, b, c, d] = v.map(|v| vreinterpretq_u8_f32(v));
        let (even, more_even) = (vuzp1q_u8(a, b), vuzp1q_u8(c, d));
        let (odd, more_odd) = (vuzp2q_u8(a, b), vuzp2q_u8(c, d));
        [
            vuzp1q_u8(even, more_even),
            vuzp1q_u8(odd, more_odd),
            vuzp2q_u8(even, more_even),
            vuzp2q_u8(odd, more_odd),
        ]
    }
}

/// Joins planes to sixteen numbers, the inverse of [`planes`].
#[inline(always)]
fn numbers(v: Planes) -> [float32x4_t; 4] {
    // SAFETY: the processor has NEON.
    unsafe {
        let [a, b, c, d] = v;
        let pairs = |a, b| (vreinterpretq_u16_u8(a), vreinterpretq_u16_u8(b));
        let (low, high) = pairs(vzip1q_u8(a, b), vzip1q_u8(c, d));
        let (upper_low, upper_high) = pairs(vzip2q_u8(a, b), vzip2q_u8(c, d));
        [
            vreinterpretq_f32_u16(vzip1q_u16(low, high)),
            vreinterpretq_f32_u16(vzip2q_u16(low, high)),
            vreinterpretq_f32_u16(vzip1q_u16(upper_low, upper_high)),
            vreinterpretq_f32_u16(vzip2q_u16(upper_low, upper_high)),
        ]
    }
}

/// Converts sixteen 16-bit integers: 0 to 7 in `low`, 8 to 15 in `high`.
#[inline(always)]
fn from_i16<D>(low: int16x8_t, high: int16x8_t) -> Neon<D> {
    // SAFETY: the processor has NEON.
    unsafe {
        Neon::of([
            vcvtq_f32_s32(vmovl_s16(vget_low_s16(low))),
            vcvtq_f32_s32(vmovl_high_s16(low)),
            vcvtq_f32_s32(vmovl_s16(vget_low_s16(high))),
            vcvtq_f32_s32(vmovl_high_s16(high)),
        ])
    }
}

impl<D: Copy> F32x16 for Neon<D> {
    const REGISTERS: usize = 8;
    const REGISTERS_PER_VECTOR: usize = 4;
    type Register = float32x4_t;
    type U32s = Planes;

    // SAFETY: the processor has NEON. Loads and stores are as long as their arrays, or as quarters of them.
    intrinsics! {
        load_register(v: &[f32; LANES], r: usize) -> float32x4_t =
            vld1q_f32(v.as_chunks::<4>().0[r].as_ptr());
        store_register(v: float32x4_t, out: &mut [f32; LANES], r: usize) =
            vst1q_f32(out.as_chunks_mut::<4>().0[r].as_mut_ptr(), v);
        mul_add_register(a: float32x4_t, b: float32x4_t, c: float32x4_t) -> float32x4_t = vfmaq_f32(c, a, b);

        splat(v: f32) -> Self = Neon::of([vdupq_n_f32(v); 4]);
        load(v: &[f32; LANES]) -> Self = Neon::of(from_fn(|i| vld1q_f32(v.as_ptr().add(4 * i))));
        store(self, out: &mut [f32; LANES]) =
            (0..4).for_each(|i| vst1q_f32(out.as_mut_ptr().add(4 * i), self.0[i]));
        add(self, b: Self) -> Self = each!(vaddq_f32, self, b);
        mul(self, b: Self) -> Self = each!(vmulq_f32, self, b);
        div(self, b: Self) -> Self = each!(vdivq_f32, self, b);
        mul_add(self, b: Self, c: Self) -> Self = each!(vfmaq_f32, c, self, b);
        neg_mul_add(self, b: Self, c: Self) -> Self = each!(vfmsq_f32, c, self, b);
        round(self) -> Self = each!(vrndnq_f32, self);
        if_below(self, bound: Self, x: Self, y: Self) -> Self =
            each!(|v, bound, x, y| vbslq_f32(vcltq_f32(v, bound), x, y), self, bound, x, y);
        power_of_two(self) -> Self = each!(
            |v| vreinterpretq_f32_s32(vshlq_n_s32::<23>(vaddq_s32(vcvtnq_s32_f32(v), vdupq_n_s32(127)))),
            self
        );

        load_u8(v: &[u8; 16]) -> Planes = [vld1q_u8(v.as_ptr()), zeros(), zeros(), zeros()];
        from_f32(v: &[u8; 64]) -> Self =
            Neon::of(from_fn(|i| vreinterpretq_f32_u8(vld1q_u8(v.as_ptr().add(16 * i)))));
        from_f16(v: &[u8; 32]) -> Self =
            Neon::of(from_fn(|i| vcvt_f32_f16(vreinterpret_f16_u8(vld1_u8(v.as_ptr().add(8 * i))))));
        to_f16(self, out: &mut [u8; 32]) = (0..4).for_each(|i| {
            vst1_u8(out.as_mut_ptr().add(8 * i), vreinterpret_u8_f16(vcvt_f16_f32(self.0[i])));
        });
    }
    methods! {
        // The instruction returns NaN if either operand is NaN; these return the second operand then.
        min(self, b: Self) -> Self = self.if_below(b, self, b);
        max(self, b: Self) -> Self = b.if_below(self, self, b);
        partial_sums(v: [Self; 4]) -> Self = Neon::of(v.map(|v| quarter(v.0)));
        finish_partial_sums(v: [Self; 4]) -> Self = Neon::of(v.map(|v| add_lanes_by_halves(v.0)));
    }
    #[inline(always)]
    fn load_u32(v: &[u8; 64]) -> Planes {
        // SAFETY: 64 bytes are there; the processor has NEON.
        let v = unsafe { vld4q_u8(v.as_ptr()) };
        [v.0, v.1, v.2, v.3]
    }
    #[inline(always)]
    fn load_u16(v: &[u8; 32]) -> Planes {
        // SAFETY: 32 bytes are there; the processor has NEON.
        let v = unsafe { vld2q_u8(v.as_ptr()) };
        [v.0, v.1, zeros(), zeros()]
    }

    #[inline(always)]
    fn load_u24(v: &[u8], stride: usize) -> Planes {
        const N: usize = 3 * LANES;
        match stride {
            3 => {
                let v = &v[..N];
                // SAFETY: 48 bytes are there; the processor has NEON.
                let v = unsafe { vld3q_u8(v.as_ptr()) };
                [v.0, v.1, v.2, zeros()]
            }
            6 => {
                // Every second triple of 31: two loads read the first and the last sixteen triples.
                let v = &v[..N + 15 * 3];
                // SAFETY: `v` has 93 bytes; the second load starts at byte 45. The processor has NEON.
                unsafe {
                    let (a, b) = (vld3q_u8(v.as_ptr()), vld3q_u8(v.as_ptr().add(15 * 3)));
                    let every_second = |a: uint8x16_t, b: uint8x16_t| {
                        vcombine_u8(vget_low_u8(vuzp1q_u8(a, a)), vget_low_u8(vuzp2q_u8(b, b)))
                    };
                    [every_second(a.0, b.0), every_second(a.1, b.1), every_second(a.2, b.2), zeros()]
                }
            }
            _ => unreachable!("integers beside each other or every second of them"),
        }
    }
    #[inline(always)]
    fn shift_right(v: Planes, bits: u32) -> Planes {
        let (whole, bits) = ((bits / 8) as usize, (bits % 8) as i8);
        let at = |j: usize| v.get(j).copied().unwrap_or_else(zeros);
        // SAFETY: the processor has NEON. A shift left by eight and a shift by a negative number, to the right, are defined.
        from_fn(|j| unsafe {
            let low = vshlq_u8(at(j + whole), vdupq_n_s8(-bits));
            vorrq_u8(low, vshlq_u8(at(j + whole + 1), vdupq_n_s8(8 - bits)))
        })
    }
    #[inline(always)]
    fn from_i8(v: &[u8; 16]) -> Self {
        // SAFETY: 16 bytes are there; the processor has NEON.
        unsafe {
            let v = vld1q_s8(v.as_ptr().cast());
            from_i16(vmovl_s8(vget_low_s8(v)), vmovl_high_s8(v))
        }
    }
    #[inline(always)]
    fn from_u8(v: &[u8; 16]) -> Self {
        // SAFETY: 16 bytes are there; the processor has NEON.
        unsafe {
            let v = vld1q_u8(v.as_ptr());
            let (low, high) = (vmovl_u8(vget_low_u8(v)), vmovl_high_u8(v));
            from_i16(vreinterpretq_s16_u16(low), vreinterpretq_s16_u16(high))
        }
    }
    // Looks up the first bytes of sixteen numbers, then their second bytes and so on. Lookups of whole numbers by the
    // indices of their bytes would cost more.
    #[inline(always)]
    fn lookup(table: Self, at: Planes) -> Self {
        // SAFETY: the processor has NEON.
        unsafe {
            let at = vandq_u8(at[0], vdupq_n_u8(15));
            Neon::of(numbers(planes(table.0).map(|bytes| vqtbl1q_u8(bytes, at))))
        }
    }
    #[inline(always)]
    fn lookup_64(table: &[f32; 64], at: Planes) -> Self {
        // SAFETY: all four loads lie inside the table; the processor has NEON.
        unsafe {
            let at = vandq_u8(at[0], vdupq_n_u8(63));
            let [a, b, c, d] = from_fn(|i| vld4q_u8(table.as_ptr().add(16 * i).cast()));
            Neon::of(numbers([
                vqtbl4q_u8(uint8x16x4_t(a.0, b.0, c.0, d.0), at),
                vqtbl4q_u8(uint8x16x4_t(a.1, b.1, c.1, d.1), at),
                vqtbl4q_u8(uint8x16x4_t(a.2, b.2, c.2, d.2), at),
                vqtbl4q_u8(uint8x16x4_t(a.3, b.3, c.3, d.3), at),
            ]))
        }
    }
    #[inline(always)]
    fn lookup_256(table: &[f32; 256], at: Planes) -> Self {
        let mut each = [0u8; LANES];
        // SAFETY: there is room for 16 bytes; the processor has NEON.
        unsafe { vst1q_u8(each.as_mut_ptr(), at[0]) };
        Self::load(&each.map(|i| table[usize::from(i)]))
    }
    plain_half_tables!();
    #[inline(always)]
    fn horizontal_sum(self) -> f32 {
        // SAFETY: the processor has NEON.
        unsafe {
            let v = quarter(self.0);
            vpadds_f32(vadd_f32(vget_low_f32(v), vget_high_f32(v)))
        }
    }
    #[inline(always)]
    fn horizontal_sums(v: [Self; 4]) -> [f32; 4] {
        let mut out = [0f32; 4];
        // SAFETY: the processor has NEON; there is room for four numbers.
        unsafe { vst1q_f32(out.as_mut_ptr(), add_lanes_by_halves(v.map(|v| quarter(v.0)))) };
        out
    }
}

/// Returns the sums of four vectors of four numbers, added by halves.
#[inline(always)]
fn add_lanes_by_halves(v: [float32x4_t; 4]) -> float32x4_t {
    // SAFETY: the processor has NEON.
    unsafe {
        let [a, b, c, d] = v.map(|v| vreinterpretq_f64_f32(v));
        let halves = |a, b| {
            let (low, high) = (vzip1q_f64(a, b), vzip2q_f64(a, b));
            vaddq_f32(vreinterpretq_f32_f64(low), vreinterpretq_f32_f64(high))
        };
        vpaddq_f32(halves(a, b), halves(c, d))
    }
}

/// Adds sixteen lanes to eight, and eight lanes to four.
#[inline(always)]
fn quarter(v: [float32x4_t; 4]) -> float32x4_t {
    // SAFETY: the processor has NEON.
    unsafe { vaddq_f32(vaddq_f32(v[0], v[2]), vaddq_f32(v[1], v[3])) }
}

/// Dot products of bytes.
///
/// A value whose dot products the processor lacks never exists; the SAFETY comments of [`Dots::dot`] rely on that.
pub(crate) trait Dots: Copy {
    /// Adds the products of four bytes to each sum; codes are unsigned, `x` signed and above -128.
    fn dot(sums: int32x4_t, codes: uint8x16_t, x: int8x16_t) -> int32x4_t;
}

/// Uses widening multiplications, which every processor has.
#[derive(Clone, Copy)]
pub(crate) struct Widening;

/// Uses `sdot`: signed times signed.
#[derive(Clone, Copy)]
pub(crate) struct SignedDots;

/// Uses `usdot`: unsigned times signed.
#[derive(Clone, Copy)]
pub(crate) struct MixedDots;

/// Returns `codes - 128` as signed bytes.
#[inline(always)]
fn signed(codes: uint8x16_t) -> int8x16_t {
    // SAFETY: the processor has NEON.
    unsafe { vreinterpretq_s8_u8(veorq_u8(codes, vdupq_n_u8(0x80))) }
}

impl Dots for Widening {
    #[inline(always)]
    fn dot(sums: int32x4_t, codes: uint8x16_t, x: int8x16_t) -> int32x4_t {
        // A sum of two products of at most 128 * 127 fits into 16 bits.
        // SAFETY: the processor has NEON.
        unsafe {
            let signed = signed(codes);
            let pairs = vpaddq_s16(vmull_s8(vget_low_s8(signed), vget_low_s8(x)), vmull_high_s8(signed, x));
            // The signed codes are 128 too small: 128 x is added.
            let rest = vshlq_n_s32::<7>(vpaddlq_s16(vpaddlq_s8(x)));
            vpadalq_s16(vaddq_s32(sums, rest), pairs)
        }
    }
}

// The intrinsics are not stable. The assembly names its extension, since the functions are compiled for every processor.

impl Dots for SignedDots {
    #[inline(always)]
    fn dot(mut sums: int32x4_t, codes: uint8x16_t, x: int8x16_t) -> int32x4_t {
        // SAFETY: the processor has `dotprod`, which `call_fastest` checks.
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
        // SAFETY: the processor has `i8mm`, which `call_fastest` checks.
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

/// Tables for unpacking eight elements of BITS bits, BITS bytes in all, to words of 16 bits.
struct UnpackBytes<const BITS: usize>;

impl<const BITS: usize> UnpackBytes<BITS> {
    /// Indices of the two bytes that hold each element.
    const BYTES: [u8; 16] = {
        let mut bytes = [0; 16];
        let mut i = 0;
        while i < 16 {
            bytes[i] = (BITS * (i / 2) / 8 + i % 2) as u8;
            i += 1;
        }
        bytes
    };
    /// Shift that moves each element to bit 0; negative numbers shift right.
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

/// Unpacks sixty-four elements of BITS bits.
#[inline(always)]
fn unpack_64<const BITS: usize>(v: &[u8]) -> [uint8x16_t; 4] {
    assert!(v.len() >= 8 * BITS && matches!(BITS, 1 | 2 | 3 | 6));
    let v = v.as_ptr();
    // SAFETY: only the 8 * BITS bytes of `v` are loaded; the processor has NEON.
    unsafe {
        let half = |at| vcombine_u8(vld1_u8(v.add(at)), vdup_n_u8(0));
        let none = vdupq_n_u8(0);
        let (a, b, c) = match BITS {
            1 => (half(0), none, none),
            2 => (vld1q_u8(v), none, none),
            3 => (vld1q_u8(v), half(16), none),
            _ => (vld1q_u8(v), vld1q_u8(v.add(16)), vld1q_u8(v.add(32))),
        };
        // A lookup past the last byte gives zero.
        let find = |at| match BITS {
            1 | 2 => vqtbl1q_u8(a, at),
            3 => vqtbl2q_u8(uint8x16x2_t(a, b), at),
            _ => vqtbl3q_u8(uint8x16x3_t(a, b, c), at),
        };
        let (first, shift) =
            (vld1q_u8(UnpackBytes::<BITS>::BYTES.as_ptr()), vld1q_s16(UnpackBytes::<BITS>::SHIFT.as_ptr()));
        let eight = |i: usize| {
            let words = vreinterpretq_u16_u8(find(vaddq_u8(first, vdupq_n_u8((BITS * i) as u8))));
            vreinterpretq_u8_u16(vshlq_u16(words, shift))
        };
        let element = vdupq_n_u8((1 << BITS) - 1);
        from_fn(|i| vandq_u8(vuzp1q_u8(eight(2 * i), eight(2 * i + 1)), element))
    }
}

impl<D: Dots> U8x64 for Neon<D> {
    type Bytes = [uint8x16_t; 4];
    type Sums = [int32x4_t; 4];
    /// False: the sums of four rows with one token already fill half of the registers.
    const MULTIPLIES_SEVERAL_TOKENS: bool = false;
    // SAFETY: the processor has NEON. Loads and stores are as long as their arrays, or as quarters of them.
    intrinsics! {
        load_bytes(v: &[u8; 64]) -> Self::Bytes = from_fn(|i| vld1q_u8(v.as_ptr().add(16 * i)));
        load_byte_table(v: &[u8; 16]) -> Self::Bytes = [vld1q_u8(v.as_ptr()); 4];
        store_bytes(v: Self::Bytes, out: &mut [u8; 64]) =
            (0..4).for_each(|i| vst1q_u8(out.as_mut_ptr().add(16 * i), v[i]));
        xor_bytes(v: Self::Bytes, bits: u8) -> Self::Bytes = v.map(|v| veorq_u8(v, vdupq_n_u8(bits)));
        split_nibbles(v: Self::Bytes) -> (Self::Bytes, Self::Bytes) =
            (v.map(|v| vandq_u8(v, vdupq_n_u8(15))), v.map(|v| vshrq_n_u8::<4>(v)));
        lookup_bytes_16(table: Self::Bytes, at: Self::Bytes) -> Self::Bytes =
            at.map(|at| vqtbl1q_u8(table[0], at));
        lookup_bytes_64(table: &[u8; 64], at: Self::Bytes) -> Self::Bytes =
            at.map(|at| vqtbl4q_u8(vld1q_u8_x4(table.as_ptr()), at));
        zero_sums() -> Self::Sums = [vdupq_n_s32(0); 4];
        load_sums(v: &[u8; 64]) -> Self::Sums = from_fn(|i| vld1q_s32(v.as_ptr().add(16 * i).cast()));
        dot_u8i8(sums: Self::Sums, codes: Self::Bytes, x: &[u8; 64]) -> Self::Sums =
            from_fn(|i| D::dot(sums[i], codes[i], vld1q_s8(x.as_ptr().add(16 * i).cast())));
        sums_to_f32(v: Self::Sums) -> Self = Neon::of(v.map(|v| vcvtq_f32_s32(v)));
    }
    #[inline(always)]
    fn unpack<const BITS: usize>(v: &[u8]) -> [Self::Bytes; 2] {
        let (first, second) = v.split_at(8 * BITS);
        [unpack_64::<BITS>(first), unpack_64::<BITS>(second)]
    }
    #[inline(always)]
    fn lookup_bytes_256(table: &[u8; 256], at: Self::Bytes) -> Self::Bytes {
        // SAFETY: four times 64 bytes are there; the processor has NEON.
        at.map(|at| unsafe {
            let mut found = vqtbl4q_u8(vld1q_u8_x4(table.as_ptr()), at);
            for first in [64, 128, 192] {
                // Bytes outside this quarter of the table keep their value.
                let at = vsubq_u8(at, vdupq_n_u8(first));
                found = vqtbx4q_u8(found, vld1q_u8_x4(table.as_ptr().add(usize::from(first))), at);
            }
            found
        })
    }
    #[inline(always)]
    fn pack_i8(v: [Self; 4], out: &mut [u8; 64]) {
        // Takes the lowest byte of each integer.
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

impl<D: Dots> I16x32 for Neon<D> {
    /// Lower bytes and upper bytes of the words.
    type Table = (uint8x16_t, uint8x16_t);
    #[inline(always)]
    fn load_i16_table(table: &[i16; 16]) -> Self::Table {
        // SAFETY: sixteen words are there; the processor has NEON.
        let both = unsafe { vld2q_u8(table.as_ptr().cast()) };
        (both.0, both.1)
    }
    #[inline(always)]
    fn lookup_i16<const J: usize>((low, high): Self::Table, at: Self::Bytes) -> Self::Bytes {
        // SAFETY: the processor has NEON.
        at.map(|at| unsafe {
            let at = if J.is_multiple_of(2) { vandq_u8(at, vdupq_n_u8(15)) } else { vshrq_n_u8::<4>(at) };
            let (low, high) = (vqtbl1q_u8(low, at), vqtbl1q_u8(high, at));
            if J < 2 { vtrn1q_u8(low, high) } else { vtrn2q_u8(low, high) }
        })
    }
    type WordRegister = uint8x16_t;
    type SumRegister = int32x4_t;
    #[inline(always)]
    fn dot_i16(sums: Self::Sums, w: Self::Bytes, x: &[u8; 64]) -> Self::Sums {
        from_fn(|r| Self::dot_word_register(sums[r], w[r], Self::load_word_register(x, r)))
    }
    // SAFETY: the processor has NEON. The load is a quarter as long as its array.
    intrinsics! {
        load_word_register(v: &[u8; 64], r: usize) -> uint8x16_t =
            vld1q_u8(v.as_chunks::<16>().0[r].as_ptr());
        zero_sum_register() -> int32x4_t = vdupq_n_s32(0);
        sum_register_to_f32(v: int32x4_t) -> float32x4_t = vcvtq_f32_s32(v);
    }
    #[inline(always)]
    fn lookup_word_registers((low, high): Self::Table, at: &[u8; 64], r: usize) -> [uint8x16_t; 4] {
        let at = Self::load_word_register(at, r);
        // SAFETY: the processor has NEON.
        unsafe {
            let (even, odd) = (vandq_u8(at, vdupq_n_u8(15)), vshrq_n_u8::<4>(at));
            let (even_low, even_high) = (vqtbl1q_u8(low, even), vqtbl1q_u8(high, even));
            let (odd_low, odd_high) = (vqtbl1q_u8(low, odd), vqtbl1q_u8(high, odd));
            [
                vtrn1q_u8(even_low, even_high),
                vtrn1q_u8(odd_low, odd_high),
                vtrn2q_u8(even_low, even_high),
                vtrn2q_u8(odd_low, odd_high),
            ]
        }
    }
    #[inline(always)]
    fn dot_word_register(sums: int32x4_t, w: uint8x16_t, x: uint8x16_t) -> int32x4_t {
        // SAFETY: the processor has NEON.
        unsafe {
            let (w, x) = (vreinterpretq_s16_u8(w), vreinterpretq_s16_u8(x));
            let low = vmull_s16(vget_low_s16(w), vget_low_s16(x));
            vaddq_s32(sums, vpaddq_s32(low, vmull_high_s16(w, x)))
        }
    }
    #[inline(always)]
    fn widen_codes(codes: Self::Bytes) -> [Self::Bytes; 2] {
        // SAFETY: the processor has NEON.
        unsafe {
            let words = codes.map(|v| vreinterpretq_u16_u8(v));
            let even = words.map(|v| vreinterpretq_u8_u16(vandq_u16(v, vdupq_n_u16(255))));
            [even, words.map(|v| vreinterpretq_u8_u16(vshrq_n_u16::<8>(v)))]
        }
    }
    #[inline(always)]
    fn widen_signed_register(v: &[u8; 64], r: usize) -> [uint8x16_t; 2] {
        // SAFETY: the processor has NEON.
        unsafe {
            let words = vreinterpretq_s16_u8(Self::load_word_register(v, r));
            let even = vshrq_n_s16::<8>(vshlq_n_s16::<8>(words));
            [vreinterpretq_u8_s16(even), vreinterpretq_u8_s16(vshrq_n_s16::<8>(words))]
        }
    }
    #[inline(always)]
    fn split_digits(even: Self, odd: Self, out: &mut [[u8; 64]; 2]) {
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
    fn exponent_scales(self) -> (Self, Self) {
        // SAFETY: the processor has NEON.
        unsafe {
            let bits = self.0.map(|v| {
                let bits = vandq_u32(vreinterpretq_u32_f32(v), vdupq_n_u32(0x7f80_0000));
                vmaxq_u32(bits, vdupq_n_u32(MIN_EXPONENT))
            });
            let inverse = bits.map(|v| vreinterpretq_f32_u32(vsubq_u32(vdupq_n_u32(INVERSE_EXPONENT), v)));
            let step = bits.map(|v| vreinterpretq_f32_u32(vsubq_u32(v, vdupq_n_u32(STEP_EXPONENT))));
            (Neon::of(inverse), Neon::of(step))
        }
    }
}

impl<D: Dots> Simd for Neon<D> {
    unsafe fn call<K: Kernel>(kernel: K) -> K::Output {
        kernel.run::<Self>()
    }
}

/// Runs a kernel with the fastest dot products of bytes that this processor has, if the kernel needs them.
///
/// # Safety
/// The processor has NEON.
pub(super) unsafe fn call_fastest<K: Kernel>(kernel: K) -> K::Output {
    // SAFETY: the processor has NEON and the chosen dot products.
    unsafe {
        if K::HAS_DOT_PRODUCTS && is_aarch64_feature_detected!("i8mm") {
            Neon::<MixedDots>::call(kernel)
        } else if K::HAS_DOT_PRODUCTS && is_aarch64_feature_detected!("dotprod") {
            Neon::<SignedDots>::call(kernel)
        } else {
            Neon::<Widening>::call(kernel)
        }
    }
}
