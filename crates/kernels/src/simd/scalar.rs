//! Portable scalar code, the reference that every instruction set is tested against.

use super::traits::*;
use crate::memory::array_at;
use std::array::from_fn;

/// Sixteen lanes as an array.
#[derive(Clone, Copy)]
pub(crate) struct Scalar([f32; LANES]);

impl Scalar {
    #[inline(always)]
    fn with(self, b: Self, f: impl Fn(f32, f32) -> f32) -> Self {
        let mut out = self.0;
        for (o, b) in out.iter_mut().zip(b.0) {
            *o = f(*o, b);
        }
        Scalar(out)
    }
}

impl F32x16 for Scalar {
    const REGISTERS: usize = 8;
    const IS_REFERENCE: bool = true;

    type U32s = [u32; LANES];

    one_register!();
    plain_half_tables!();
    methods! {
        splat(v: f32) -> Self = Scalar([v; LANES]);
        load(v: &[f32; LANES]) -> Self = Scalar(*v);
        store(self, out: &mut [f32; LANES]) = out.copy_from_slice(&self.0);
        add(self, b: Self) -> Self = self.with(b, |a, b| a + b);
        mul(self, b: Self) -> Self = self.with(b, |a, b| a * b);
        div(self, b: Self) -> Self = self.with(b, |a, b| a / b);
        mul_add(self, b: Self, c: Self) -> Self = self.mul(b).add(c);
        neg_mul_add(self, b: Self, c: Self) -> Self = c.with(self.mul(b), |c, p| c - p);
        min(self, b: Self) -> Self = self.with(b, |a, b| if a < b { a } else { b });
        max(self, b: Self) -> Self = self.with(b, |a, b| if a > b { a } else { b });
        round(self) -> Self = Scalar(self.0.map(|v| v + ROUND - ROUND));

        load_u32(v: &[u8; 64]) -> [u32; LANES] =
            from_fn(|l| u32::from_le_bytes([v[4 * l], v[4 * l + 1], v[4 * l + 2], v[4 * l + 3]]));
        load_u16(v: &[u8; 32]) -> [u32; LANES] =
            from_fn(|l| u32::from(u16::from_le_bytes([v[2 * l], v[2 * l + 1]])));
        load_u8(v: &[u8; 16]) -> [u32; LANES] = v.map(u32::from);
        shift_right(v: [u32; LANES], bits: u32) -> [u32; LANES] = v.map(|i| i >> bits);
        from_i8(v: &[u8; 16]) -> Self = Scalar(v.map(|b| f32::from(b as i8)));
        from_u8(v: &[u8; 16]) -> Self = Scalar(v.map(f32::from));
        from_f32(v: &[u8; 64]) -> Self = Scalar(Self::load_u32(v).map(f32::from_bits));
        from_f16(v: &[u8; 32]) -> Self =
            Scalar(from_fn(|l| half::f16::from_le_bytes([v[2 * l], v[2 * l + 1]]).to_f32()));
        lookup(table: Self, at: [u32; LANES]) -> Self = Scalar(at.map(|i| table.0[(i & 15) as usize]));
        lookup_64(table: &[f32; 64], at: [u32; LANES]) -> Self = Scalar(at.map(|i| table[(i & 63) as usize]));
        lookup_256(table: &[f32; 256], at: [u32; LANES]) -> Self =
            Scalar(at.map(|i| table[(i & 255) as usize]));
        power_of_two(self) -> Self = Scalar(self.0.map(|v| f32::from_bits(((v as i32 + 127) as u32) << 23)));
    }
    #[inline(always)]
    fn if_below(self, bound: Self, x: Self, y: Self) -> Self {
        let mut out = y.0;
        for g in 0..LANES {
            out[g] = if self.0[g] < bound.0[g] { x.0[g] } else { y.0[g] };
        }
        Scalar(out)
    }

    #[inline(always)]
    fn to_f16(self, out: &mut [u8; 32]) {
        for (v, out) in self.0.into_iter().zip(out.as_chunks_mut::<2>().0) {
            *out = half::f16::from_f32(v).to_le_bytes();
        }
    }
}

impl U8x64 for Scalar {
    type Bytes = [u8; 64];
    type Sums = [i32; LANES];
    const MULTIPLIES_SEVERAL_TOKENS: bool = false;
    methods! {
        load_bytes(v: &[u8; 64]) -> [u8; 64] = *v;
        load_byte_table(v: &[u8; 16]) -> [u8; 64] = from_fn(|i| v[i % 16]);
        store_bytes(v: [u8; 64], out: &mut [u8; 64]) = out.copy_from_slice(&v);
        xor_bytes(v: [u8; 64], bits: u8) -> [u8; 64] = v.map(|b| b ^ bits);
        split_nibbles(v: [u8; 64]) -> ([u8; 64], [u8; 64]) = (v.map(|b| b & 15), v.map(|b| b >> 4));
        lookup_bytes_16(table: [u8; 64], at: [u8; 64]) -> [u8; 64] = at.map(|i| table[usize::from(i & 15)]);
        zero_sums() -> [i32; LANES] = [0; LANES];
        load_sums(v: &[u8; 64]) -> [i32; LANES] = from_fn(|i| i32::from_ne_bytes(*array_at(v, 4 * i)));
        sums_to_f32(v: [i32; LANES]) -> Self = Scalar(v.map(|s| s as f32));
    }
    #[inline(always)]
    fn dot_u8i8(mut sums: Self::Sums, codes: [u8; 64], x: &[u8; 64]) -> Self::Sums {
        for i in 0..64 {
            sums[i / 4] += i32::from(codes[i]) * i32::from(x[i] as i8);
        }
        sums
    }
    #[inline(always)]
    fn pack_i8(v: [Self; 4], out: &mut [u8; 64]) {
        for (j, v) in v.into_iter().enumerate() {
            let mut lanes = [0f32; LANES];
            v.round().store(&mut lanes);
            for (l, v) in lanes.into_iter().enumerate() {
                out[4 * l + j] = v as i32 as u8;
            }
        }
    }
}

impl I16x32 for Scalar {
    type Table = [i16; 16];
    #[inline(always)]
    fn load_i16_table(table: &[i16; 16]) -> [i16; 16] {
        *table
    }
    #[inline(always)]
    fn lookup_i16<const J: usize>(table: [i16; 16], at: [u8; 64]) -> [u8; 64] {
        let mut out = [0; 64];
        for (at, out) in at.as_chunks::<2>().0.iter().zip(out.as_chunks_mut::<2>().0) {
            *out = table[usize::from(u16::from_le_bytes(*at) >> (4 * J) & 15)].to_le_bytes();
        }
        out
    }
    #[inline(always)]
    fn dot_word_register(mut sums: [i32; LANES], w: [u8; 64], x: [u8; 64]) -> [i32; LANES] {
        let word = |of: &[u8; 64], i: usize| i32::from(i16::from_le_bytes([of[2 * i], of[2 * i + 1]]));
        for i in 0..2 * LANES {
            sums[i / 2] += word(&w, i) * word(&x, i);
        }
        sums
    }
    one_word_register!();
    #[inline(always)]
    fn widen_codes(codes: [u8; 64]) -> [[u8; 64]; 2] {
        let (mut even, mut odd) = ([0; 64], [0; 64]);
        for (i, code) in codes.into_iter().enumerate() {
            [&mut even, &mut odd][i % 2][i / 2 * 2] = code;
        }
        [even, odd]
    }
    #[inline(always)]
    fn widen_signed_register(v: &[u8; 64], _: usize) -> [[u8; 64]; 2] {
        let (mut even, mut odd) = ([0; 64], [0; 64]);
        for (i, v) in v.iter().enumerate() {
            let word = i16::from(v.cast_signed()).to_le_bytes();
            [&mut even, &mut odd][i % 2][i / 2 * 2..][..2].copy_from_slice(&word);
        }
        [even, odd]
    }
    #[inline(always)]
    fn split_digits(even: Self, odd: Self, out: &mut [[u8; 64]; 2]) {
        for (i, v) in [even, odd].into_iter().enumerate() {
            let mut lanes = [0f32; LANES];
            v.store(&mut lanes);
            for (l, v) in lanes.into_iter().enumerate() {
                let q = v.round_ties_even() as i32;
                let upper = q.wrapping_add(2048) >> 12;
                for (out, word) in out.iter_mut().zip([upper, q - (upper << 12)]) {
                    out[4 * l + 2 * i..4 * l + 2 * i + 2].copy_from_slice(&(word as i16).to_le_bytes());
                }
            }
        }
    }
    #[inline(always)]
    fn exponent_scales(self) -> (Self, Self) {
        let mut lanes = [0f32; LANES];
        self.store(&mut lanes);
        let exponents = lanes.map(|v| (v.to_bits() & 0x7f80_0000).max(MIN_EXPONENT));
        (
            Scalar::load(&exponents.map(|e| f32::from_bits(INVERSE_EXPONENT - e))),
            Scalar::load(&exponents.map(|e| f32::from_bits(e - STEP_EXPONENT))),
        )
    }
}

/// Rounds to bf16, ties to even. NaN stays NaN, subnormal numbers become zero.
#[inline(always)]
pub(crate) fn bf16_bits(v: f32) -> u16 {
    let bits = v.to_bits();
    let (sign, magnitude) = (bits & 0x8000_0000, bits & 0x7fff_ffff);
    let rounded = match magnitude {
        m if m > 0x7f80_0000 => m | 0x0040_0000,
        m if m < 0x0080_0000 => 0,
        m => m + 0x7fff + (m >> 16 & 1),
    };
    ((sign | rounded) >> 16) as u16
}

/// Returns `v`, or zero where it is subnormal.
#[inline(always)]
fn normal(v: f32) -> f32 {
    if v.is_subnormal() { 0f32.copysign(v) } else { v }
}

impl Bf16x32 for Scalar {
    #[inline(always)]
    fn pack_bf16(low: Self, high: Self, out: &mut [u8; 64]) {
        let mut all = [[0f32; LANES]; 2];
        low.store(&mut all[0]);
        high.store(&mut all[1]);
        for (v, out) in all.as_flattened().iter().zip(out.as_chunks_mut::<2>().0) {
            *out = bf16_bits(*v).to_le_bytes();
        }
    }
    #[inline(always)]
    fn dot_bf16(sums: Self, w: &[u8; 64], x: &[u8; 64]) -> Self {
        let number = |of: &[u8; 64], i: usize| {
            normal(f32::from_bits(u32::from(u16::from_le_bytes([of[2 * i], of[2 * i + 1]])) << 16))
        };
        let mut lanes = [0f32; LANES];
        sums.store(&mut lanes);
        for (l, sum) in lanes.iter_mut().enumerate() {
            for i in [2 * l + 1, 2 * l] {
                *sum = normal(number(w, i).mul_add(number(x, i), normal(*sum)));
            }
        }
        Scalar::load(&lanes)
    }
}

impl Simd for Scalar {
    unsafe fn call<K: Kernel>(kernel: K) -> K::Output {
        kernel.run::<Self>()
    }
}
