//! Bytes with AVX2 and with AVX-512.

use super::{Bytes, LANES, Lanes};
use crate::lanes::x86::{Avx2, Avx512};
use std::arch::x86_64::*;

/// How elements of BITS bits, 2, 3 or 6, become bytes: sixteen of them in each 128 bits.
struct Unpack {
    /// Words of 32 bits that each 128 bits start with, of 64 elements.
    words: [u32; 16],
    /// For each two elements, the two bytes of those 128 bits that they lie in.
    bytes: [u8; 64],
    /// Where in these they begin.
    shift: [u16; 32],
    /// That they begin at `LAST`, if multiplied by it.
    factor: [u16; 32],
}

/// The last bit at which two elements begin, at most.
const fn last(bits: usize) -> usize {
    if bits % 2 == 1 { 6 } else { 4 }
}

impl Unpack {
    const fn new(bits: usize) -> Unpack {
        let mut all = Unpack { words: [0; 16], bytes: [0; 64], shift: [0; 32], factor: [0; 32] };
        let mut lane = 0;
        while lane < 4 {
            let start = 2 * bits * lane;
            let mut i = 0;
            while i < 4 {
                let word = start / 4 + i;
                all.words[4 * lane + i] = if word < 2 * bits { word as u32 } else { 0 };
                i += 1;
            }
            let mut pair = 0;
            while pair < 8 {
                let bit = 2 * bits * pair + start % 4 * 8;
                all.bytes[16 * lane + 2 * pair] = (bit / 8) as u8;
                all.bytes[16 * lane + 2 * pair + 1] = (bit / 8 + 1) as u8;
                all.shift[8 * lane + pair] = (bit % 8) as u16;
                all.factor[8 * lane + pair] = 1 << (last(bits) - bit % 8);
                pair += 1;
            }
            lane += 1;
        }
        all
    }
}

struct Of<const BITS: usize>;

impl<const BITS: usize> Of<BITS> {
    const UNPACK: Unpack = Unpack::new(BITS);
}

impl Bytes for Avx512 {
    type Bytes = __m512i;
    type Sums = __m512i;
    #[inline(always)]
    fn bytes(v: &[u8; 64]) -> __m512i {
        // SAFETY: 64 bytes are there; the processor has AVX-512 F, see the module of lanes.
        unsafe { _mm512_loadu_si512(v.as_ptr().cast()) }
    }
    #[inline(always)]
    fn bytes_of(v: &[u8]) -> __m512i {
        Self::ints_of(v)
    }
    #[inline(always)]
    fn table(v: &[u8; 16]) -> __m512i {
        // SAFETY: 16 bytes are there; the processor has AVX-512 F.
        unsafe { _mm512_broadcast_i32x4(_mm_loadu_si128(v.as_ptr().cast())) }
    }
    #[inline(always)]
    fn flip(v: __m512i, bits: u8) -> __m512i {
        // SAFETY: the processor has AVX-512 F.
        unsafe { _mm512_xor_si512(v, _mm512_set1_epi8(bits as i8)) }
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
    fn unpack<const BITS: usize>(v: &[u8]) -> __m512i {
        assert!(v.len() >= 8 * BITS && matches!(BITS, 1 | 2 | 3 | 6));
        // SAFETY: 8 * BITS bytes are there, and no others are loaded; the processor has AVX-512 F and BW.
        unsafe {
            if BITS == 1 {
                return _mm512_maskz_set1_epi8(v.as_ptr().cast::<u64>().read_unaligned(), 1);
            }
            let how = &Of::<BITS>::UNPACK;
            let v = _mm512_maskz_loadu_epi32((1u16 << (2 * BITS)) - 1, v.as_ptr().cast());
            let v = _mm512_permutexvar_epi32(_mm512_loadu_si512(how.words.as_ptr().cast()), v);
            let v = _mm512_shuffle_epi8(v, _mm512_loadu_si512(how.bytes.as_ptr().cast()));
            let v = _mm512_srlv_epi16(v, _mm512_loadu_si512(how.shift.as_ptr().cast()));
            let element = (1i16 << BITS) - 1;
            let first = _mm512_and_si512(v, _mm512_set1_epi16(element));
            let second = _mm512_sll_epi16(v, _mm_cvtsi32_si128(8 - BITS as i32));
            _mm512_or_si512(first, _mm512_and_si512(second, _mm512_set1_epi16(element << 8)))
        }
    }
    #[inline(always)]
    fn find_64(table: &[u8; 64], at: __m512i) -> __m512i {
        // SAFETY: the processor has AVX-512 F and BW.
        unsafe {
            let p = table.as_ptr();
            let a = _mm512_broadcast_i32x4(_mm_loadu_si128(p.cast()));
            let b = _mm512_broadcast_i32x4(_mm_loadu_si128(p.add(16).cast()));
            let c = _mm512_broadcast_i32x4(_mm_loadu_si128(p.add(32).cast()));
            let d = _mm512_broadcast_i32x4(_mm_loadu_si128(p.add(48).cast()));
            // A lookup sees the lowest four bits, and that the highest is zero.
            let upper = _mm512_and_si512(at, _mm512_set1_epi8(0x30));
            let is_b = _mm512_cmpeq_epi8_mask(upper, _mm512_set1_epi8(0x10));
            let is_c = _mm512_cmpeq_epi8_mask(upper, _mm512_set1_epi8(0x20));
            let is_d = _mm512_cmpeq_epi8_mask(upper, _mm512_set1_epi8(0x30));
            let all = _mm512_mask_shuffle_epi8(_mm512_shuffle_epi8(a, at), is_b, b, at);
            _mm512_mask_shuffle_epi8(_mm512_mask_shuffle_epi8(all, is_c, c, at), is_d, d, at)
        }
    }
    #[inline(always)]
    fn find_256(table: &[u8; 256], at: __m512i) -> __m512i {
        // Codes are looked up two at a time, as words of 16 bits.
        // SAFETY: four times 64 bytes are there; the processor has AVX-512 F and BW.
        unsafe {
            let p = table.as_ptr();
            let part = [p, p.add(64), p.add(128), p.add(192)];
            let [a, b, c, d] = [
                _mm512_loadu_si512(part[0].cast()),
                _mm512_loadu_si512(part[1].cast()),
                _mm512_loadu_si512(part[2].cast()),
                _mm512_loadu_si512(part[3].cast()),
            ];
            let byte = _mm512_set1_epi16(255);
            let mut found = [_mm512_and_si512(at, byte), _mm512_srli_epi16::<8>(at)];
            for at in &mut found {
                let word = _mm512_srli_epi16::<1>(*at);
                let low = _mm512_permutex2var_epi16(a, word, b);
                let high = _mm512_permutex2var_epi16(c, word, d);
                let upper = _mm512_test_epi16_mask(*at, _mm512_set1_epi16(128));
                let both = _mm512_mask_blend_epi16(upper, low, high);
                let shift = _mm512_slli_epi16::<3>(_mm512_and_si512(*at, _mm512_set1_epi16(1)));
                *at = _mm512_and_si512(_mm512_srlv_epi16(both, shift), byte);
            }
            _mm512_or_si512(found[0], _mm512_slli_epi16::<8>(found[1]))
        }
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

/// Thirty-two elements of BITS bits.
///
/// # Safety
/// There are 4 * BITS bytes, and the processor has AVX2.
#[inline(always)]
unsafe fn unpack_32<const BITS: usize>(v: *const u8) -> __m256i {
    // SAFETY: 4 * BITS bytes are there, and no others are loaded; the processor has AVX2.
    unsafe {
        if BITS == 1 {
            let v = _mm256_set1_epi32(v.cast::<i32>().read_unaligned());
            // Each byte for eight elements, each of which looks at its bit.
            let bytes =
                _mm256_setr_epi64x(0, 0x0101_0101_0101_0101, 0x0202_0202_0202_0202, 0x0303_0303_0303_0303);
            let bit = _mm256_set1_epi64x(0x8040_2010_0804_0201_u64 as i64);
            let set = _mm256_cmpeq_epi8(_mm256_and_si256(_mm256_shuffle_epi8(v, bytes), bit), bit);
            return _mm256_and_si256(set, _mm256_set1_epi8(1));
        }
        let how = &Of::<BITS>::UNPACK;
        let lanes = _mm256_setr_epi32(0, 1, 2, 3, 4, 5, 6, 7);
        let mask = _mm256_cmpgt_epi32(_mm256_set1_epi32(BITS as i32), lanes);
        let v = _mm256_maskload_epi32(v.cast(), mask);
        let v = _mm256_permutevar8x32_epi32(v, _mm256_loadu_si256(how.words.as_ptr().cast()));
        let v = _mm256_shuffle_epi8(v, _mm256_loadu_si256(how.bytes.as_ptr().cast()));
        let v = _mm256_mullo_epi16(v, _mm256_loadu_si256(how.factor.as_ptr().cast()));
        let v = _mm256_srl_epi16(v, _mm_cvtsi32_si128(last(BITS) as i32));
        let element = (1i16 << BITS) - 1;
        let first = _mm256_and_si256(v, _mm256_set1_epi16(element));
        let second = _mm256_sll_epi16(v, _mm_cvtsi32_si128(8 - BITS as i32));
        _mm256_or_si256(first, _mm256_and_si256(second, _mm256_set1_epi16(element << 8)))
    }
}

impl Bytes for Avx2 {
    type Bytes = (__m256i, __m256i);
    type Sums = (__m256i, __m256i);
    #[inline(always)]
    fn bytes(v: &[u8; 64]) -> Self::Bytes {
        Self::ints(v)
    }
    #[inline(always)]
    fn bytes_of(v: &[u8]) -> Self::Bytes {
        Self::ints_of(v)
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
    fn flip(v: Self::Bytes, bits: u8) -> Self::Bytes {
        // SAFETY: the processor has AVX2.
        unsafe { both!(|v| _mm256_xor_si256(v, _mm256_set1_epi8(bits as i8)), v) }
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
    fn unpack<const BITS: usize>(v: &[u8]) -> Self::Bytes {
        assert!(v.len() >= 8 * BITS && matches!(BITS, 1 | 2 | 3 | 6));
        // SAFETY: twice 4 * BITS bytes are there; the processor has AVX2.
        unsafe { (unpack_32::<BITS>(v.as_ptr()), unpack_32::<BITS>(v.as_ptr().add(4 * BITS))) }
    }
    #[inline(always)]
    fn find_64(table: &[u8; 64], at: Self::Bytes) -> Self::Bytes {
        // SAFETY: four times 16 bytes are there; the processor has AVX2.
        unsafe {
            let p = table.as_ptr();
            let a = _mm256_broadcastsi128_si256(_mm_loadu_si128(p.cast()));
            let b = _mm256_broadcastsi128_si256(_mm_loadu_si128(p.add(16).cast()));
            let c = _mm256_broadcastsi128_si256(_mm_loadu_si128(p.add(32).cast()));
            let d = _mm256_broadcastsi128_si256(_mm_loadu_si128(p.add(48).cast()));
            both!(
                |at| {
                    // Bits 4 and 5, moved to the highest.
                    let (fourth, fifth) = (_mm256_slli_epi16::<3>(at), _mm256_slli_epi16::<2>(at));
                    let low =
                        _mm256_blendv_epi8(_mm256_shuffle_epi8(a, at), _mm256_shuffle_epi8(b, at), fourth);
                    let high =
                        _mm256_blendv_epi8(_mm256_shuffle_epi8(c, at), _mm256_shuffle_epi8(d, at), fourth);
                    _mm256_blendv_epi8(low, high, fifth)
                },
                at
            )
        }
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
