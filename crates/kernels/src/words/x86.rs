//! Words with AVX2 and with AVX-512.

use super::{INVERSE, LEAST, STEPS, Source, Target, Tiles, Wide, all};
use crate::lanes::x86::{Avx2, Avx512};
use std::arch::asm;
use std::arch::x86_64::*;

#[target_feature(enable = "avx2,fma,f16c")]
pub(super) fn avx2(s: &Source<'_>, rows: &Tiles, y: &Target<'_>) {
    all::<Avx2, false>(s, rows, y);
}

#[target_feature(enable = "avx512f,avx512bw,avx512vl,avx2,fma,f16c")]
pub(super) fn avx512(s: &Source<'_>, rows: &Tiles, y: &Target<'_>) {
    all::<Avx512, false>(s, rows, y);
}

#[target_feature(enable = "avx512f,avx512bw,avx512vl,avx512vnni,avx2,fma,f16c")]
pub(super) fn avx512_vnni(s: &Source<'_>, rows: &Tiles, y: &Target<'_>) {
    all::<Avx512, true>(s, rows, y);
}

/// `_mm512_dpwssd_epi32`, which compilers take apart into a product and a sum, for a shorter chain: half as many instructions
/// again, where it is their number that counts.
#[inline]
#[target_feature(enable = "avx512f,avx512bw,avx512vnni")]
fn dot_native(mut sums: __m512i, w: __m512i, x: __m512i) -> __m512i {
    // SAFETY: it has no other effects than on its operands.
    unsafe {
        asm!(
            "vpdpwssd {sums}, {w}, {x}",
            sums = inout(zmm_reg) sums,
            w = in(zmm_reg) w,
            x = in(zmm_reg) x,
            options(pure, nomem, nostack, preserves_flags)
        );
    }
    sums
}

impl Wide for Avx512 {
    type Table = __m512i;
    #[inline(always)]
    fn words(table: &[i16; 16]) -> __m512i {
        // Twice, since a lookup sees five bits.
        // SAFETY: sixteen words are there; the processor has AVX-512 F, see the module of lanes.
        unsafe { _mm512_broadcast_i64x4(_mm256_loadu_si256(table.as_ptr().cast())) }
    }
    #[inline(always)]
    fn look_up<const J: usize>(table: __m512i, at: __m512i) -> __m512i {
        // SAFETY: the processor has AVX-512 BW.
        unsafe {
            let at = match J {
                0 => at,
                1 => _mm512_srli_epi16::<4>(at),
                2 => _mm512_srli_epi16::<8>(at),
                _ => _mm512_srli_epi16::<12>(at),
            };
            _mm512_permutexvar_epi16(at, table)
        }
    }
    #[inline(always)]
    fn dot_words<const NATIVE: bool>(sums: __m512i, w: __m512i, x: &[u8; 64]) -> __m512i {
        // SAFETY: 64 bytes are there; the processor has AVX-512 BW, and VNNI where it is said to.
        unsafe {
            let x = _mm512_loadu_si512(x.as_ptr().cast());
            if !NATIVE {
                return _mm512_add_epi32(sums, _mm512_madd_epi16(w, x));
            }
            dot_native(sums, w, x)
        }
    }
    #[inline(always)]
    fn split(even: Self, odd: Self, out: &mut [[u8; 64]; 2]) {
        // SAFETY: there is room for twice 64 bytes; the processor has AVX-512 BW.
        unsafe {
            let (even, odd) = (_mm512_cvtps_epi32(even.0), _mm512_cvtps_epi32(odd.0));
            let half = _mm512_set1_epi32(2048);
            let (a, b) = (_mm512_add_epi32(even, half), _mm512_add_epi32(odd, half));
            // Words of even places from one, of odd places from the other; what else is in them is cut off.
            let places = 0xaaaa_aaaa;
            let upper =
                _mm512_mask_blend_epi16(places, _mm512_srai_epi32::<12>(a), _mm512_slli_epi32::<4>(b));
            // The lowest twelve bits are the lower word and a half.
            let lower_even = _mm512_sub_epi32(_mm512_and_si512(a, _mm512_set1_epi32(4095)), half);
            let lower_odd = _mm512_sub_epi32(_mm512_and_si512(b, _mm512_set1_epi32(4095)), half);
            let lower = _mm512_mask_blend_epi16(places, lower_even, _mm512_slli_epi32::<16>(lower_odd));
            _mm512_storeu_si512(out[0].as_mut_ptr().cast(), upper);
            _mm512_storeu_si512(out[1].as_mut_ptr().cast(), lower);
        }
    }
    #[inline(always)]
    fn scales(self) -> (Self, Self) {
        // SAFETY: the processor has AVX-512 F.
        unsafe {
            let bits = _mm512_and_si512(_mm512_castps_si512(self.0), _mm512_set1_epi32(0x7f80_0000));
            let bits = _mm512_max_epi32(bits, _mm512_set1_epi32(LEAST as i32));
            let inverse = _mm512_sub_epi32(_mm512_set1_epi32(INVERSE as i32), bits);
            let step = _mm512_sub_epi32(bits, _mm512_set1_epi32(STEPS as i32));
            (Avx512(_mm512_castsi512_ps(inverse)), Avx512(_mm512_castsi512_ps(step)))
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

impl Wide for Avx2 {
    /// The lower and the upper bytes of the words, twice each.
    type Table = (__m256i, __m256i);
    #[inline(always)]
    fn words(table: &[i16; 16]) -> Self::Table {
        // SAFETY: sixteen words are there; the processor has AVX2, see the module of lanes.
        unsafe {
            let v = _mm256_loadu_si256(table.as_ptr().cast());
            let apart = _mm256_broadcastsi128_si256(_mm_setr_epi8(
                0, 2, 4, 6, 8, 10, 12, 14, 1, 3, 5, 7, 9, 11, 13, 15,
            ));
            let v = _mm256_permute4x64_epi64::<0b11_01_10_00>(_mm256_shuffle_epi8(v, apart));
            (_mm256_permute2x128_si256::<0x00>(v, v), _mm256_permute2x128_si256::<0x11>(v, v))
        }
    }
    #[inline(always)]
    fn look_up<const J: usize>((low, high): Self::Table, at: Self::Bytes) -> Self::Bytes {
        // SAFETY: the processor has AVX2.
        unsafe {
            both!(
                |at| {
                    let at = if J.is_multiple_of(2) { at } else { _mm256_srli_epi16::<4>(at) };
                    let at = _mm256_and_si256(at, _mm256_set1_epi8(15));
                    let (low, high) = (_mm256_shuffle_epi8(low, at), _mm256_shuffle_epi8(high, at));
                    let byte = _mm256_set1_epi16(255);
                    if J < 2 {
                        _mm256_or_si256(_mm256_and_si256(low, byte), _mm256_slli_epi16::<8>(high))
                    } else {
                        _mm256_or_si256(_mm256_srli_epi16::<8>(low), _mm256_andnot_si256(byte, high))
                    }
                },
                at
            )
        }
    }
    #[inline(always)]
    fn dot_words<const NATIVE: bool>(sums: Self::Sums, w: Self::Bytes, x: &[u8; 64]) -> Self::Sums {
        let x = <Self as crate::fast::Bytes>::bytes(x);
        // SAFETY: the processor has AVX2.
        unsafe { both!(|sums, w, x| _mm256_add_epi32(sums, _mm256_madd_epi16(w, x)), sums, w, x) }
    }
    #[inline(always)]
    fn split(even: Self, odd: Self, out: &mut [[u8; 64]; 2]) {
        // SAFETY: the processor has AVX2.
        let (upper, lower) = unsafe {
            let half = _mm256_set1_epi32(2048);
            let sums = both!(
                |even, odd| (
                    _mm256_add_epi32(_mm256_cvtps_epi32(even), half),
                    _mm256_add_epi32(_mm256_cvtps_epi32(odd), half)
                ),
                even,
                odd
            );
            let upper = both!(
                |v| _mm256_blend_epi16::<0xaa>(_mm256_srai_epi32::<12>(v.0), _mm256_slli_epi32::<4>(v.1)),
                sums
            );
            let rest = _mm256_set1_epi32(4095);
            let lower = both!(
                |v| {
                    let even = _mm256_sub_epi32(_mm256_and_si256(v.0, rest), half);
                    let odd = _mm256_sub_epi32(_mm256_and_si256(v.1, rest), half);
                    _mm256_blend_epi16::<0xaa>(even, _mm256_slli_epi32::<16>(odd))
                },
                sums
            );
            (upper, lower)
        };
        <Self as crate::fast::Bytes>::put(upper, &mut out[0]);
        <Self as crate::fast::Bytes>::put(lower, &mut out[1]);
    }
    #[inline(always)]
    fn scales(self) -> (Self, Self) {
        // SAFETY: the processor has AVX2.
        unsafe {
            let bits = both!(
                |v| {
                    let bits = _mm256_and_si256(_mm256_castps_si256(v), _mm256_set1_epi32(0x7f80_0000));
                    _mm256_max_epi32(bits, _mm256_set1_epi32(LEAST as i32))
                },
                self
            );
            let inverse =
                both!(|v| _mm256_castsi256_ps(_mm256_sub_epi32(_mm256_set1_epi32(INVERSE as i32), v)), bits);
            let step =
                both!(|v| _mm256_castsi256_ps(_mm256_sub_epi32(v, _mm256_set1_epi32(STEPS as i32))), bits);
            (Avx2(inverse.0, inverse.1), Avx2(step.0, step.1))
        }
    }
}
