//! Bytes with AVX2 and with AVX-512.

use super::{Bytes, LANES, Lanes};
use crate::lanes::x86::{Avx2, Avx512};
use std::arch::x86_64::*;

impl Bytes for Avx512 {
    type Bytes = __m512i;
    type Sums = __m512i;
    #[inline(always)]
    fn bytes(v: &[u8; 64]) -> __m512i {
        // SAFETY: 64 bytes are there; the processor has AVX-512 F, see the module of lanes.
        unsafe { _mm512_loadu_si512(v.as_ptr().cast()) }
    }
    #[inline(always)]
    fn table(v: &[u8; 16]) -> __m512i {
        // SAFETY: 16 bytes are there; the processor has AVX-512 F.
        unsafe { _mm512_broadcast_i32x4(_mm_loadu_si128(v.as_ptr().cast())) }
    }
    #[inline(always)]
    fn flip(v: __m512i) -> __m512i {
        // SAFETY: the processor has AVX-512 F.
        unsafe { _mm512_xor_si512(v, _mm512_set1_epi8(-128)) }
    }
    #[inline(always)]
    fn nibbles(v: __m512i) -> (__m512i, __m512i) {
        // SAFETY: the processor has AVX-512 F.
        unsafe {
            let low = _mm512_set1_epi8(15);
            (_mm512_and_si512(v, low), _mm512_and_si512(_mm512_srli_epi16::<4>(v), low))
        }
    }
    #[inline(always)]
    fn find(table: __m512i, at: __m512i) -> __m512i {
        // SAFETY: the processor has AVX-512 BW.
        unsafe { _mm512_shuffle_epi8(table, at) }
    }
    #[inline(always)]
    fn put(v: __m512i, out: &mut [u8; 64]) {
        // SAFETY: there is room for 64 bytes; the processor has AVX-512 F.
        unsafe { _mm512_storeu_si512(out.as_mut_ptr().cast(), v) }
    }
    #[inline(always)]
    fn no_sums() -> __m512i {
        // SAFETY: the processor has AVX-512 F.
        unsafe { _mm512_setzero_si512() }
    }
    #[inline(always)]
    fn dot(sums: __m512i, codes: __m512i, x: &[u8; 64]) -> __m512i {
        // SAFETY: 64 bytes are there; the processor has AVX-512 VNNI, which `Isa::for_bytes` asks for.
        unsafe { _mm512_dpbusd_epi32(sums, codes, _mm512_loadu_si512(x.as_ptr().cast())) }
    }
    #[inline(always)]
    fn sums(v: __m512i) -> Self {
        // SAFETY: the processor has AVX-512 F.
        unsafe { Avx512(_mm512_cvtepi32_ps(v)) }
    }
    #[inline(always)]
    fn narrow(v: [Self; 4], out: &mut [u8; 64]) {
        // SAFETY: there is room for 64 bytes; the processor has AVX-512 F.
        unsafe {
            let byte = _mm512_set1_epi32(255);
            let [a, b, c, d] = [v[0].0, v[1].0, v[2].0, v[3].0];
            let a = _mm512_and_si512(_mm512_cvtps_epi32(a), byte);
            let b = _mm512_slli_epi32::<8>(_mm512_and_si512(_mm512_cvtps_epi32(b), byte));
            let c = _mm512_slli_epi32::<16>(_mm512_and_si512(_mm512_cvtps_epi32(c), byte));
            let d = _mm512_slli_epi32::<24>(_mm512_cvtps_epi32(d));
            let all = _mm512_or_si512(_mm512_or_si512(a, b), _mm512_or_si512(c, d));
            _mm512_storeu_si512(out.as_mut_ptr().cast(), all);
        }
    }
}

/// Both halves.
macro_rules! both {
    (|$($v:ident),*| $body:expr, $($a:expr),*) => {{
        let low = { $(let $v = $a.0;)* $body };
        let high = { $(let $v = $a.1;)* $body };
        (low, high)
    }};
}

impl Bytes for Avx2 {
    type Bytes = (__m256i, __m256i);
    type Sums = (__m256i, __m256i);
    #[inline(always)]
    fn bytes(v: &[u8; 64]) -> Self::Bytes {
        Self::ints(v)
    }
    #[inline(always)]
    fn table(v: &[u8; 16]) -> Self::Bytes {
        // SAFETY: 16 bytes are there; the processor has AVX2, see the module of lanes.
        unsafe {
            let v = _mm256_broadcastsi128_si256(_mm_loadu_si128(v.as_ptr().cast()));
            (v, v)
        }
    }
    #[inline(always)]
    fn flip(v: Self::Bytes) -> Self::Bytes {
        // SAFETY: the processor has AVX2.
        unsafe { both!(|v| _mm256_xor_si256(v, _mm256_set1_epi8(-128)), v) }
    }
    #[inline(always)]
    fn nibbles(v: Self::Bytes) -> (Self::Bytes, Self::Bytes) {
        // SAFETY: the processor has AVX2.
        unsafe {
            let low = _mm256_set1_epi8(15);
            (
                both!(|v| _mm256_and_si256(v, low), v),
                both!(|v| _mm256_and_si256(_mm256_srli_epi16::<4>(v), low), v),
            )
        }
    }
    #[inline(always)]
    fn find(table: Self::Bytes, at: Self::Bytes) -> Self::Bytes {
        // SAFETY: the processor has AVX2.
        unsafe { both!(|table, at| _mm256_shuffle_epi8(table, at), table, at) }
    }
    #[inline(always)]
    fn put(v: Self::Bytes, out: &mut [u8; 64]) {
        // SAFETY: there is room for 64 bytes; the processor has AVX2.
        unsafe {
            _mm256_storeu_si256(out.as_mut_ptr().cast(), v.0);
            _mm256_storeu_si256(out.as_mut_ptr().add(32).cast(), v.1);
        }
    }
    #[inline(always)]
    fn no_sums() -> Self::Sums {
        // SAFETY: the processor has AVX2.
        unsafe { (_mm256_setzero_si256(), _mm256_setzero_si256()) }
    }
    #[inline(always)]
    fn dot(sums: Self::Sums, codes: Self::Bytes, x: &[u8; 64]) -> Self::Sums {
        let x = Self::bytes(x);
        // Bytes of even and of odd places by themselves, since sums of two products can be more than 16 bits hold.
        // SAFETY: the processor has AVX2.
        unsafe {
            both!(
                |sums, codes, x| {
                    let even = _mm256_madd_epi16(
                        _mm256_and_si256(codes, _mm256_set1_epi16(255)),
                        _mm256_srai_epi16::<8>(_mm256_slli_epi16::<8>(x)),
                    );
                    let odd = _mm256_madd_epi16(_mm256_srli_epi16::<8>(codes), _mm256_srai_epi16::<8>(x));
                    _mm256_add_epi32(sums, _mm256_add_epi32(even, odd))
                },
                sums,
                codes,
                x
            )
        }
    }
    #[inline(always)]
    fn sums(v: Self::Sums) -> Self {
        // SAFETY: the processor has AVX2.
        let (low, high) = unsafe { both!(|v| _mm256_cvtepi32_ps(v), v) };
        Avx2(low, high)
    }
    #[inline(always)]
    fn narrow(v: [Self; 4], out: &mut [u8; 64]) {
        // SAFETY: the processor has AVX2.
        let all = unsafe {
            let byte = _mm256_set1_epi32(255);
            let [a, b, c, d] = v;
            both!(
                |a, b, c, d| {
                    let a = _mm256_and_si256(_mm256_cvtps_epi32(a), byte);
                    let b = _mm256_slli_epi32::<8>(_mm256_and_si256(_mm256_cvtps_epi32(b), byte));
                    let c = _mm256_slli_epi32::<16>(_mm256_and_si256(_mm256_cvtps_epi32(c), byte));
                    let d = _mm256_slli_epi32::<24>(_mm256_cvtps_epi32(d));
                    _mm256_or_si256(_mm256_or_si256(a, b), _mm256_or_si256(c, d))
                },
                a,
                b,
                c,
                d
            )
        };
        Self::put(all, out);
    }
}

const _: () = assert!(LANES == 16);
