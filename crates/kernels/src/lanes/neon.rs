//! NEON, which every AArch64 processor has.

use super::{LANES, Lanes};
use std::arch::aarch64::*;
use std::array::from_fn;
use std::marker::PhantomData;

/// Sixteen numbers in four registers. `D` says how bytes are multiplied, see the module of products of integers.
#[derive(Clone, Copy)]
pub(crate) struct Neon<D = crate::fast::neon::Widening>(pub(crate) [float32x4_t; 4], PhantomData<D>);

impl<D> Neon<D> {
    #[inline(always)]
    pub(crate) fn of(v: [float32x4_t; 4]) -> Self {
        Neon(v, PhantomData)
    }
}

/// The same for all four registers.
macro_rules! each {
    ($f:ident, $($v:expr),*) => {{
        // SAFETY: the processor has NEON.
        Neon::of(from_fn(|i| unsafe { $f($($v.0[i]),*) }))
    }};
}

/// Sixteen integers: byte j of each in register j, so that what a lookup looks at is one register.
pub(crate) type Planes = [uint8x16_t; 4];

#[inline(always)]
fn zeros() -> uint8x16_t {
    // SAFETY: the processor has NEON.
    unsafe { vdupq_n_u8(0) }
}

/// The bytes of sixteen numbers, byte j of each in register j.
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

/// The sixteen numbers whose byte j is in register j.
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

/// Numbers 0 to 7 and 8 to 15.
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

impl<D: Copy> Lanes for Neon<D> {
    const REGISTERS: usize = 8;

    #[inline(always)]
    fn splat(v: f32) -> Self {
        // SAFETY: the processor has NEON.
        Neon::of([unsafe { vdupq_n_f32(v) }; 4])
    }
    #[inline(always)]
    fn load(v: &[f32; LANES]) -> Self {
        // SAFETY: sixteen numbers are there; the processor has NEON.
        Neon::of(from_fn(|i| unsafe { vld1q_f32(v.as_ptr().add(4 * i)) }))
    }
    #[inline(always)]
    fn store(self, out: &mut [f32; LANES]) {
        for i in 0..4 {
            // SAFETY: there is room for sixteen numbers; the processor has NEON.
            unsafe { vst1q_f32(out.as_mut_ptr().add(4 * i), self.0[i]) };
        }
    }
    #[inline(always)]
    fn add(self, b: Self) -> Self {
        each!(vaddq_f32, self, b)
    }
    #[inline(always)]
    fn mul(self, b: Self) -> Self {
        each!(vmulq_f32, self, b)
    }
    #[inline(always)]
    fn div(self, b: Self) -> Self {
        each!(vdivq_f32, self, b)
    }
    #[inline(always)]
    fn mul_add(self, b: Self, c: Self) -> Self {
        each!(vfmaq_f32, c, self, b)
    }
    #[inline(always)]
    fn neg_mul_add(self, b: Self, c: Self) -> Self {
        each!(vfmsq_f32, c, self, b)
    }
    #[inline(always)]
    fn min(self, b: Self) -> Self {
        // The instruction for minima takes a NaN of either operand; here the second is taken.
        self.if_below(b, self, b)
    }
    #[inline(always)]
    fn max(self, b: Self) -> Self {
        b.if_below(self, self, b)
    }
    #[inline(always)]
    fn round(self) -> Self {
        each!(vrndnq_f32, self)
    }
    #[inline(always)]
    fn if_below(self, bound: Self, x: Self, y: Self) -> Self {
        let below = |i: usize| {
            // SAFETY: the processor has NEON.
            unsafe { vbslq_f32(vcltq_f32(self.0[i], bound.0[i]), x.0[i], y.0[i]) }
        };
        Neon::of(from_fn(below))
    }

    type Ints = Planes;

    #[inline(always)]
    fn ints(v: &[u8; 64]) -> Planes {
        // SAFETY: 64 bytes are there; the processor has NEON.
        let v = unsafe { vld4q_u8(v.as_ptr()) };
        [v.0, v.1, v.2, v.3]
    }
    #[inline(always)]
    fn ints_u16(v: &[u8; 32]) -> Planes {
        // SAFETY: 32 bytes are there; the processor has NEON.
        let v = unsafe { vld2q_u8(v.as_ptr()) };
        [v.0, v.1, zeros(), zeros()]
    }
    #[inline(always)]
    fn ints_u8(v: &[u8; 16]) -> Planes {
        // SAFETY: 16 bytes are there; the processor has NEON.
        [unsafe { vld1q_u8(v.as_ptr()) }, zeros(), zeros(), zeros()]
    }
    #[inline(always)]
    fn ints_u24(v: &[u8], stride: usize) -> Planes {
        const N: usize = 3 * LANES;
        match stride {
            3 => {
                let v = &v[..N];
                // SAFETY: 48 bytes are there; the processor has NEON.
                let v = unsafe { vld3q_u8(v.as_ptr()) };
                [v.0, v.1, v.2, zeros()]
            }
            6 => {
                // Each second triple of 31: the first and the last sixteen of them.
                let v = &v[..N + 15 * 3];
                // SAFETY: 93 bytes are there, of which the last 48 are loaded again; the processor has NEON.
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
        // SAFETY: the processor has NEON. Shifts to the left by eight or by negative numbers, to the right, give what they say.
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
    #[inline(always)]
    fn from_f32(v: &[u8; 64]) -> Self {
        // SAFETY: 64 bytes are there, which may lie anywhere; the processor has NEON.
        Neon::of(from_fn(|i| unsafe { vreinterpretq_f32_u8(vld1q_u8(v.as_ptr().add(16 * i))) }))
    }
    #[inline(always)]
    fn from_f16(v: &[u8; 32]) -> Self {
        // SAFETY: 32 bytes are there; the processor has NEON.
        Neon::of(from_fn(|i| unsafe { vcvt_f32_f16(vreinterpret_f16_u8(vld1_u8(v.as_ptr().add(8 * i)))) }))
    }
    // A lookup finds bytes: those of sixteen numbers' first bytes, then of their second and so on, which costs less than
    // lookups of whole numbers by the places of their bytes.
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
    #[inline(always)]
    fn power_of_two(self) -> Self {
        let power = |i: usize| {
            // SAFETY: the processor has NEON.
            unsafe {
                let biased = vaddq_s32(vcvtnq_s32_f32(self.0[i]), vdupq_n_s32(127));
                vreinterpretq_f32_s32(vshlq_n_s32::<23>(biased))
            }
        };
        Neon::of(from_fn(power))
    }
    #[inline(always)]
    fn total(self) -> f32 {
        // SAFETY: the processor has NEON.
        unsafe {
            let v = quarter(self.0);
            vpadds_f32(vadd_f32(vget_low_f32(v), vget_high_f32(v)))
        }
    }
    #[inline(always)]
    fn quarters(v: [Self; 4]) -> Self {
        Neon::of(v.map(|v| quarter(v.0)))
    }
    #[inline(always)]
    fn totals_of_quarters(v: [Self; 4]) -> Self {
        Neon::of(v.map(|v| totals(v.0)))
    }
    #[inline(always)]
    fn totals(v: [Self; 4]) -> [f32; 4] {
        let mut out = [0f32; 4];
        // SAFETY: the processor has NEON; there is room for four numbers.
        unsafe { vst1q_f32(out.as_mut_ptr(), totals(v.map(|v| quarter(v.0)))) };
        out
    }
}

/// Totals of four times four numbers, added by halves.
#[inline(always)]
fn totals(v: [float32x4_t; 4]) -> float32x4_t {
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

/// Sixteen lanes added to eight, these to four.
#[inline(always)]
fn quarter(v: [float32x4_t; 4]) -> float32x4_t {
    // SAFETY: the processor has NEON.
    unsafe { vaddq_f32(vaddq_f32(v[0], v[2]), vaddq_f32(v[1], v[3])) }
}
