//! AVX-512 F, BW, VL and VNNI, and VBMI and BF16 where the processor has them.

use super::avx2::{Avx2, UnpackLanes, add_lanes_by_halves};
use super::traits::*;
use std::arch::asm;
use std::arch::x86_64::*;

/// Sixteen lanes in one register. With `VBMI`, bytes of a register are permuted by one instruction.
#[derive(Clone, Copy)]
pub(crate) struct Avx512<const VBMI: bool = false>(pub(crate) __m512);

/// Permutation of bytes and bit offsets that unpack elements of BITS bits. Eight elements, in BITS bytes, go to each 64 bits:
///
/// ```text
/// BITS = 3    | byte 3 g + 2 | byte 3 g + 1 | byte 3 g |      byte 8 g + j = eight bits from bit 3 j on
/// ```
struct BytePermutation<const BITS: usize>;

impl<const BITS: usize> BytePermutation<BITS> {
    /// Bytes of 64 elements, and of the next 64.
    const BYTES: [[u8; 64]; 2] = [Self::bytes(0), Self::bytes(8 * BITS)];
    const OFFSETS: [u8; 64] = {
        let mut all = [0; 64];
        let mut i = 0;
        while i < 64 {
            all[i] = (BITS * (i % 8)) as u8;
            i += 1;
        }
        all
    };

    const fn bytes(first: usize) -> [u8; 64] {
        let mut all = [0; 64];
        let mut i = 0;
        while i < 64 {
            let byte = if i % 8 < BITS { i % 8 } else { BITS - 1 };
            all[i] = (first + BITS * (i / 8) + byte) as u8;
            i += 1;
        }
        all
    }
}

/// Unpacks sixty-four elements of BITS bits.
///
/// # Safety
/// `v` points to 8 * BITS bytes, and the processor has AVX-512 F and BW.
#[inline(always)]
unsafe fn unpack_64<const BITS: usize>(v: *const u8) -> __m512i {
    // SAFETY: only the 8 * BITS bytes at `v` are loaded; the processor has AVX-512 F and BW.
    unsafe {
        if BITS == 1 {
            return _mm512_maskz_set1_epi8(v.cast::<u64>().read_unaligned(), 1);
        }
        let how = &UnpackLanes::<BITS>::UNPACK;
        let v = _mm512_maskz_loadu_epi32((1u16 << (2 * BITS)) - 1, v.cast());
        let v = _mm512_permutexvar_epi32(_mm512_loadu_si512(how.words.as_ptr().cast()), v);
        let v = _mm512_shuffle_epi8(v, _mm512_loadu_si512(how.bytes.as_ptr().cast()));
        let v = _mm512_srlv_epi16(v, _mm512_loadu_si512(how.shift.as_ptr().cast()));
        let element = (1i16 << BITS) - 1;
        let first = _mm512_and_si512(v, _mm512_set1_epi16(element));
        let second = _mm512_sll_epi16(v, _mm_cvtsi32_si128(8 - BITS as i32));
        _mm512_or_si512(first, _mm512_and_si512(second, _mm512_set1_epi16(element << 8)))
    }
}

/// Returns the upper eight of sixteen lanes.
#[inline(always)]
fn upper(v: __m512) -> __m256 {
    // SAFETY: the processor has AVX-512 F, see `simd`.
    unsafe { _mm256_castpd_ps(_mm512_extractf64x4_pd::<1>(_mm512_castps_pd(v))) }
}

/// Returns a mask of the first n bytes, at most 64.
#[inline(always)]
pub(crate) fn first_bytes(n: usize) -> u64 {
    if n < 64 { (1 << n) - 1 } else { u64::MAX }
}

impl<const VBMI: bool> F32x16 for Avx512<VBMI> {
    const REGISTERS: usize = 32;
    const LARGEST_HALF_TABLE: usize = 256;
    type U32s = __m512i;
    type HalfTable = [__m512i; 2];
    type F16x32 = __m512i;

    one_register!();

    // SAFETY: the processor has AVX-512 F, see `simd`. Loads and stores are as long as their arrays, or halves of them; masked
    // indices lie inside the table.
    intrinsics! {
        splat(v: f32) -> Self = Avx512(_mm512_set1_ps(v));
        load(v: &[f32; LANES]) -> Self = Avx512(_mm512_loadu_ps(v.as_ptr()));
        store(self, out: &mut [f32; LANES]) = _mm512_storeu_ps(out.as_mut_ptr(), self.0);
        add(self, b: Self) -> Self = Avx512(_mm512_add_ps(self.0, b.0));
        mul(self, b: Self) -> Self = Avx512(_mm512_mul_ps(self.0, b.0));
        div(self, b: Self) -> Self = Avx512(_mm512_div_ps(self.0, b.0));
        mul_add(self, b: Self, c: Self) -> Self = Avx512(_mm512_fmadd_ps(self.0, b.0, c.0));
        neg_mul_add(self, b: Self, c: Self) -> Self = Avx512(_mm512_fnmadd_ps(self.0, b.0, c.0));
        min(self, b: Self) -> Self = Avx512(_mm512_min_ps(self.0, b.0));
        max(self, b: Self) -> Self = Avx512(_mm512_max_ps(self.0, b.0));
        if_below(self, bound: Self, x: Self, y: Self) -> Self =
            Avx512(_mm512_mask_blend_ps(_mm512_cmp_ps_mask::<_CMP_LT_OQ>(self.0, bound.0), y.0, x.0));
        power_of_two(self) -> Self = Avx512(_mm512_castsi512_ps(_mm512_slli_epi32::<23>(_mm512_add_epi32(
            _mm512_cvtps_epi32(self.0),
            _mm512_set1_epi32(127),
        ))));
        round(self) -> Self = Avx512(_mm512_roundscale_ps::<_MM_FROUND_TO_NEAREST_INT>(self.0));
        horizontal_sum(self) -> f32 =
            Avx2::<false>(_mm512_castps512_ps256(self.0), upper(self.0)).horizontal_sum();

        load_u32(v: &[u8; 64]) -> __m512i = _mm512_loadu_si512(v.as_ptr().cast());
        load_u16(v: &[u8; 32]) -> __m512i = _mm512_cvtepu16_epi32(_mm256_loadu_si256(v.as_ptr().cast()));
        load_u8(v: &[u8; 16]) -> __m512i = _mm512_cvtepu8_epi32(_mm_loadu_si128(v.as_ptr().cast()));
        shift_right(v: __m512i, bits: u32) -> __m512i = _mm512_srl_epi32(v, _mm_cvtsi32_si128(bits as i32));
        from_i8(v: &[u8; 16]) -> Self =
            Avx512(_mm512_cvtepi32_ps(_mm512_cvtepi8_epi32(_mm_loadu_si128(v.as_ptr().cast()))));
        from_u8(v: &[u8; 16]) -> Self = Avx512(_mm512_cvtepi32_ps(Self::load_u8(v)));
        from_f32(v: &[u8; 64]) -> Self = Avx512(_mm512_loadu_ps(v.as_ptr().cast()));
        from_f16(v: &[u8; 32]) -> Self = Avx512(_mm512_cvtph_ps(_mm256_loadu_si256(v.as_ptr().cast())));
        to_f16(self, out: &mut [u8; 32]) = _mm256_storeu_si256(
            out.as_mut_ptr().cast(),
            _mm512_cvtps_ph::<_MM_FROUND_TO_NEAREST_INT>(self.0),
        );
        // The instruction reads only the lowest four bits of an index.
        lookup(table: Self, at: __m512i) -> Self = Avx512(_mm512_permutexvar_ps(at, table.0));
        lookup_256(table: &[f32; 256], at: __m512i) -> Self =
            Avx512(_mm512_i32gather_ps::<4>(_mm512_and_si512(at, _mm512_set1_epi32(255)), table.as_ptr()));
        load_half_table(table: &[u16; 64]) -> [__m512i; 2] =
            [_mm512_loadu_epi16(table.as_ptr().cast()), _mm512_loadu_epi16(table.as_ptr().add(32).cast())];
        half_vector(v: __m512i, second: bool) -> Self = Avx512(_mm512_cvtph_ps(match second {
            false => _mm512_castsi512_si256(v),
            true => _mm512_extracti64x4_epi64::<1>(v),
        }));
    }
    #[inline(always)]
    fn repeat_lanes(v: &[f32], shift: u32) -> Self {
        assert!(v.len() >= LANES >> shift);
        // SAFETY: `v` has LANES >> shift numbers, and no others are loaded; the processor has AVX-512 F, see `simd`.
        unsafe {
            let lanes = _mm512_setr_epi32(0, 1, 2, 3, 4, 5, 6, 7, 8, 9, 10, 11, 12, 13, 14, 15);
            let at = _mm512_srl_epi32(lanes, _mm_cvtsi32_si128(shift as i32));
            let mask = ((1u32 << (LANES >> shift)) - 1) as u16;
            Avx512(_mm512_permutexvar_ps(at, _mm512_maskz_loadu_ps(mask, v.as_ptr())))
        }
    }
    #[inline(always)]
    fn argmin(self) -> (usize, f32) {
        // SAFETY: the processor has AVX-512 F, see `simd`.
        let (mask, argmin) = unsafe {
            let argmin = _mm512_reduce_min_ps(self.0);
            (_mm512_cmp_ps_mask::<_CMP_LE_OQ>(self.0, _mm512_set1_ps(argmin)), argmin)
        };
        ((mask.trailing_zeros() as usize).min(LANES - 1), argmin)
    }

    #[inline(always)]
    fn load_u24(v: &[u8], stride: usize) -> Self::U32s {
        let v = &v[..15 * stride + 3];
        match stride {
            // Each part of 128 bits takes the 12 bytes of four integers; then bytes move within it.
            3 => {
                // SAFETY: the 48 bytes that are there are read; the processor has AVX-512 BW, see `simd`.
                unsafe {
                    let parts = _mm512_setr_epi32(0, 1, 2, 2, 3, 4, 5, 5, 6, 7, 8, 8, 9, 10, 11, 11);
                    let within = _mm_setr_epi8(0, 1, 2, 2, 3, 4, 5, 5, 6, 7, 8, 8, 9, 10, 11, 11);
                    let bytes = _mm512_maskz_loadu_epi8(first_bytes(48), v.as_ptr().cast());
                    let parts = _mm512_permutexvar_epi32(parts, bytes);
                    _mm512_shuffle_epi8(parts, _mm512_broadcast_i32x4(within))
                }
            }
            // Words 3 l and 3 l + 1 of 47, the last of which has one byte.
            6 => {
                let mut words = [0u16; 32];
                for l in 0..LANES {
                    (words[2 * l], words[2 * l + 1]) = (3 * l as u16, 3 * l as u16 + 1);
                }
                // SAFETY: 64 bytes and the 29 behind them are there; the processor has AVX-512 BW, see `simd`.
                unsafe {
                    let words = _mm512_loadu_si512(words.as_ptr().cast());
                    let low = _mm512_loadu_si512(v.as_ptr().cast());
                    let high = _mm512_maskz_loadu_epi8(first_bytes(29), v.as_ptr().add(64).cast());
                    _mm512_permutex2var_epi16(low, words, high)
                }
            }
            _ => unreachable!("integers beside each other or every second of them"),
        }
    }
    #[inline(always)]
    fn lookup_64(table: &[f32; 64], at: Self::U32s) -> Self {
        // SAFETY: all four loads lie inside the table; the processor has AVX-512 F, see `simd`.
        unsafe {
            let p = table.as_ptr();
            let (a, b) = (_mm512_loadu_ps(p), _mm512_loadu_ps(p.add(16)));
            let (c, d) = (_mm512_loadu_ps(p.add(32)), _mm512_loadu_ps(p.add(48)));
            // Each lookup reads only the lowest five bits.
            let (low, high) = (_mm512_permutex2var_ps(a, at, b), _mm512_permutex2var_ps(c, at, d));
            Avx512(_mm512_mask_blend_ps(_mm512_test_epi32_mask(at, _mm512_set1_epi32(32)), low, high))
        }
    }
    /// Looks up 128 indices of 6 bits. A lane's eight indices lie in three words, `3 l` to `3 l + 2`:
    ///
    /// ```text
    ///  bit 47    42    36 | 35 30    24    18    | 12     6     0
    ///      | i7 | i6 | i5 :    | i4 | i3 | i2 :  | i1 | i0 |          i2 and i5 lie in two words
    /// ```
    #[inline(always)]
    fn lookup_halves_6([a, b]: [__m512i; 2], at: &[u8; 96]) -> [__m512i; 4] {
        /// Returns the numbers of words `3 l + first` of all lanes, then of words `3 l + second`. Words above 31 come
        /// from the last 64 bytes.
        const fn words(first: u16, second: u16) -> [u16; 32] {
            let mut all = [0; 32];
            let mut l = 0;
            while l < 16 {
                let (one, two) = (3 * l as u16 + first, 3 * l as u16 + second);
                all[l] = if one < 32 { one } else { one + 16 };
                all[16 + l] = if two < 32 { two } else { two + 16 };
                l += 1;
            }
            all
        }
        const fn shifts(first: u16, second: u16) -> [u16; 32] {
            let mut all = [first; 32];
            let mut l = 16;
            while l < 32 {
                all[l] = second;
                l += 1;
            }
            all
        }
        const WORDS: [[u16; 32]; 5] = [words(0, 0), words(0, 1), words(1, 2), words(1, 1), words(2, 2)];
        const SHIFTS: [[u16; 32]; 5] =
            [shifts(0, 6), shifts(12, 14), shifts(4, 2), shifts(2, 8), shifts(4, 10)];
        // SAFETY: 64 bytes are there from 0 and from 32 on; the processor has AVX-512 F and BW, see `simd`. Lookups ignore all but
        // the lowest six bits.
        unsafe {
            let (low, high) =
                (_mm512_loadu_si512(at.as_ptr().cast()), _mm512_loadu_si512(at.as_ptr().add(32).cast()));
            let load = |v: &[u16; 32]| _mm512_loadu_si512(v.as_ptr().cast());
            let of = |i: usize| _mm512_permutex2var_epi16(low, load(&WORDS[i]), high);
            let right = |i: usize| _mm512_srlv_epi16(of(i), load(&SHIFTS[i]));
            let both = _mm512_or_si512(right(1), _mm512_sllv_epi16(of(2), load(&SHIFTS[2])));
            [right(0), both, right(3), right(4)].map(|at| _mm512_permutex2var_epi16(a, at, b))
        }
    }
    #[inline(always)]
    fn lookup_halves_8(table: &[u16; 256], at: &[u8; 32]) -> __m512i {
        // SAFETY: 32 bytes and eight times 32 words are there; the processor has AVX-512 F and BW, see `simd`. Lookups ignore all
        // but the lowest six bits.
        unsafe {
            let at = _mm512_cvtepu8_epi16(_mm256_loadu_si256(at.as_ptr().cast()));
            let part = |i: usize| _mm512_loadu_si512(table.as_ptr().add(32 * i).cast());
            let of = |i: usize| _mm512_permutex2var_epi16(part(2 * i), at, part(2 * i + 1));
            let sixth = _mm512_test_epi16_mask(at, _mm512_set1_epi16(64));
            let seventh = _mm512_test_epi16_mask(at, _mm512_set1_epi16(128));
            let low = _mm512_mask_blend_epi16(sixth, of(0), of(1));
            _mm512_mask_blend_epi16(seventh, low, _mm512_mask_blend_epi16(sixth, of(2), of(3)))
        }
    }
    #[inline(always)]
    fn transpose(v: [Self; LANES]) -> [Self; LANES] {
        // SAFETY: the processor has AVX-512 F, see `simd`.
        unsafe {
            // `fours[g + c]`: columns c, 4 + c, 8 + c and 12 + c of rows g to g + 3.
            let mut fours = v;
            for g in (0..LANES).step_by(4) {
                let [a, b, c, d] = [v[g].0, v[g + 1].0, v[g + 2].0, v[g + 3].0];
                let ab = _mm512_castps_pd(_mm512_unpacklo_ps(a, b));
                let ab_high = _mm512_castps_pd(_mm512_unpackhi_ps(a, b));
                let cd = _mm512_castps_pd(_mm512_unpacklo_ps(c, d));
                let cd_high = _mm512_castps_pd(_mm512_unpackhi_ps(c, d));
                fours[g].0 = _mm512_castpd_ps(_mm512_unpacklo_pd(ab, cd));
                fours[g + 1].0 = _mm512_castpd_ps(_mm512_unpackhi_pd(ab, cd));
                fours[g + 2].0 = _mm512_castpd_ps(_mm512_unpacklo_pd(ab_high, cd_high));
                fours[g + 3].0 = _mm512_castpd_ps(_mm512_unpackhi_pd(ab_high, cd_high));
            }
            let mut transposed = v;
            for c in 0..4 {
                let [p, q, r, s] = [fours[c].0, fours[4 + c].0, fours[8 + c].0, fours[12 + c].0];
                // Parts 0 and 2, then parts 1 and 3.
                let (even, even_2) = (_mm512_shuffle_f32x4::<0x88>(p, q), _mm512_shuffle_f32x4::<0x88>(r, s));
                let (odd, odd_2) = (_mm512_shuffle_f32x4::<0xdd>(p, q), _mm512_shuffle_f32x4::<0xdd>(r, s));
                transposed[c].0 = _mm512_shuffle_f32x4::<0x88>(even, even_2);
                transposed[4 + c].0 = _mm512_shuffle_f32x4::<0x88>(odd, odd_2);
                transposed[8 + c].0 = _mm512_shuffle_f32x4::<0xdd>(even, even_2);
                transposed[12 + c].0 = _mm512_shuffle_f32x4::<0xdd>(odd, odd_2);
            }
            transposed
        }
    }
    #[inline(always)]
    fn partial_sums(v: [Self; 4]) -> Self {
        // SAFETY: the processor has AVX-512 F, see `simd`.
        unsafe {
            let [a, b, c, d] = [v[0].0, v[1].0, v[2].0, v[3].0];
            let ab = _mm512_add_ps(_mm512_shuffle_f32x4::<0x44>(a, b), _mm512_shuffle_f32x4::<0xee>(a, b));
            let cd = _mm512_add_ps(_mm512_shuffle_f32x4::<0x44>(c, d), _mm512_shuffle_f32x4::<0xee>(c, d));
            let (even, odd) = (_mm512_shuffle_f32x4::<0x88>(ab, cd), _mm512_shuffle_f32x4::<0xdd>(ab, cd));
            Avx512(_mm512_add_ps(even, odd))
        }
    }
    #[inline(always)]
    fn finish_partial_sums(v: [Self; 4]) -> Self {
        // SAFETY: the processor has AVX-512 F, see `simd`.
        unsafe {
            let (a, b) = (_mm512_castps_pd(v[0].0), _mm512_castps_pd(v[1].0));
            let (c, d) = (_mm512_castps_pd(v[2].0), _mm512_castps_pd(v[3].0));
            let (low, high) = (_mm512_unpacklo_pd(a, b), _mm512_unpackhi_pd(a, b));
            let ab = _mm512_add_ps(_mm512_castpd_ps(low), _mm512_castpd_ps(high));
            let (low, high) = (_mm512_unpacklo_pd(c, d), _mm512_unpackhi_pd(c, d));
            let cd = _mm512_add_ps(_mm512_castpd_ps(low), _mm512_castpd_ps(high));
            let even = _mm512_shuffle_ps::<0b10_00_10_00>(ab, cd);
            let sums = _mm512_add_ps(even, _mm512_shuffle_ps::<0b11_01_11_01>(ab, cd));
            // The sum of vector i of `v[q]` is in lane 4 i + q.
            let order = _mm512_setr_epi32(0, 4, 8, 12, 1, 5, 9, 13, 2, 6, 10, 14, 3, 7, 11, 15);
            Avx512(_mm512_permutexvar_ps(order, sums))
        }
    }
    #[inline(always)]
    fn horizontal_sums(v: [Self; 4]) -> [f32; 4] {
        // SAFETY: the processor has AVX-512 F, see `simd`.
        unsafe {
            let [a, b, c, d] = v;
            add_lanes_by_halves([
                _mm256_add_ps(_mm512_castps512_ps256(a.0), upper(a.0)),
                _mm256_add_ps(_mm512_castps512_ps256(b.0), upper(b.0)),
                _mm256_add_ps(_mm512_castps512_ps256(c.0), upper(c.0)),
                _mm256_add_ps(_mm512_castps512_ps256(d.0), upper(d.0)),
            ])
        }
    }
}

impl<const VBMI: bool> U8x64 for Avx512<VBMI> {
    type Bytes = __m512i;
    type Sums = __m512i;
    const PERMUTES_BYTES: bool = VBMI;
    // SAFETY: the processor has AVX-512 F, BW and VNNI, which `Isa::Avx512` needs. Loads and stores are as long as their
    // arrays; the masked load reads as many bytes as there are, 64 at most.
    intrinsics! {
        load_bytes(v: &[u8; 64]) -> __m512i = _mm512_loadu_si512(v.as_ptr().cast());
        load_partial_bytes(v: &[u8]) -> __m512i =
            _mm512_maskz_loadu_epi8(first_bytes(v.len()), v.as_ptr().cast());
        load_byte_table(v: &[u8; 16]) -> __m512i = _mm512_broadcast_i32x4(_mm_loadu_si128(v.as_ptr().cast()));
        store_bytes(v: __m512i, out: &mut [u8; 64]) = _mm512_storeu_si512(out.as_mut_ptr().cast(), v);
        xor_bytes(v: __m512i, bits: u8) -> __m512i = _mm512_xor_si512(v, _mm512_set1_epi8(bits as i8));
        split_nibbles(v: __m512i) -> (__m512i, __m512i) = (
            _mm512_and_si512(v, _mm512_set1_epi8(15)),
            _mm512_and_si512(_mm512_srli_epi16::<4>(v), _mm512_set1_epi8(15)),
        );
        zero_sums() -> __m512i = _mm512_setzero_si512();
        load_sums(v: &[u8; 64]) -> __m512i = _mm512_loadu_si512(v.as_ptr().cast());
        dot_u8i8(sums: __m512i, codes: __m512i, x: &[u8; 64]) -> __m512i =
            _mm512_dpbusd_epi32(sums, codes, _mm512_loadu_si512(x.as_ptr().cast()));
        sums_to_f32(v: __m512i) -> Self = Avx512(_mm512_cvtepi32_ps(v));
    }
    #[inline(always)]
    fn lookup_bytes_16(table: __m512i, at: __m512i) -> __m512i {
        // SAFETY: the processor has AVX-512 F and BW, and VBMI where it says so. The permutation reads the lowest six bits.
        unsafe { if VBMI { _mm512_permutexvar_epi8(at, table) } else { _mm512_shuffle_epi8(table, at) } }
    }
    #[inline(always)]
    fn unpack<const BITS: usize>(v: &[u8]) -> [__m512i; 2] {
        assert!(v.len() >= 16 * BITS && matches!(BITS, 1 | 2 | 3 | 6));
        let v = v.as_ptr();
        // SAFETY: 16 * BITS bytes are there, and no others are loaded; the processor has AVX-512 F and BW, and VBMI where it
        // says so.
        unsafe {
            let half = |i: usize| v.add(8 * BITS * i);
            if !VBMI || BITS == 1 {
                return [unpack_64::<BITS>(half(0)), unpack_64::<BITS>(half(1))];
            }
            let words = |v: *const u8, n: usize| _mm512_maskz_loadu_epi32(((1u32 << n) - 1) as u16, v.cast());
            let load = |v: &[u8; 64]| _mm512_loadu_si512(v.as_ptr().cast());
            let bytes = &BytePermutation::<BITS>::BYTES;
            // Both halves fit into one register, but those of 6 bits.
            let [a, b] = match BITS {
                6 => [(words(half(0), 12), &bytes[0]), (words(half(1), 12), &bytes[0])],
                _ => [&bytes[0], &bytes[1]].map(|bytes| (words(v, 4 * BITS), bytes)),
            }
            .map(|(v, bytes)| _mm512_permutexvar_epi8(load(bytes), v));
            let offsets = load(&BytePermutation::<BITS>::OFFSETS);
            [_mm512_multishift_epi64_epi8(offsets, a), _mm512_multishift_epi64_epi8(offsets, b)]
        }
    }
    #[inline(always)]
    fn lookup_bytes_64(table: &[u8; 64], at: __m512i) -> __m512i {
        // SAFETY: the table has 64 bytes; the processor has AVX-512 F and BW, and VBMI where it says so.
        unsafe {
            let p = table.as_ptr();
            if VBMI {
                return _mm512_permutexvar_epi8(at, _mm512_loadu_si512(p.cast()));
            }
            let a = _mm512_broadcast_i32x4(_mm_loadu_si128(p.cast()));
            let b = _mm512_broadcast_i32x4(_mm_loadu_si128(p.add(16).cast()));
            let c = _mm512_broadcast_i32x4(_mm_loadu_si128(p.add(32).cast()));
            let d = _mm512_broadcast_i32x4(_mm_loadu_si128(p.add(48).cast()));
            // A lookup reads the lowest four bits, and the highest bit, which is zero.
            let upper = _mm512_and_si512(at, _mm512_set1_epi8(0x30));
            let is_b = _mm512_cmpeq_epi8_mask(upper, _mm512_set1_epi8(0x10));
            let is_c = _mm512_cmpeq_epi8_mask(upper, _mm512_set1_epi8(0x20));
            let is_d = _mm512_cmpeq_epi8_mask(upper, _mm512_set1_epi8(0x30));
            let all = _mm512_mask_shuffle_epi8(_mm512_shuffle_epi8(a, at), is_b, b, at);
            _mm512_mask_shuffle_epi8(_mm512_mask_shuffle_epi8(all, is_c, c, at), is_d, d, at)
        }
    }
    #[inline(always)]
    fn lookup_bytes_256(table: &[u8; 256], at: __m512i) -> __m512i {
        // Without permutations of bytes, entries are looked up two at a time, as words of 16 bits.
        // SAFETY: four times 64 bytes are there; the processor has AVX-512 F and BW, and VBMI where it says so.
        unsafe {
            let p = table.as_ptr();
            let part = [p, p.add(64), p.add(128), p.add(192)];
            let [a, b, c, d] = [
                _mm512_loadu_si512(part[0].cast()),
                _mm512_loadu_si512(part[1].cast()),
                _mm512_loadu_si512(part[2].cast()),
                _mm512_loadu_si512(part[3].cast()),
            ];
            if VBMI {
                // Each lookup reads the lowest seven bits.
                let (low, high) = (_mm512_permutex2var_epi8(a, at, b), _mm512_permutex2var_epi8(c, at, d));
                return _mm512_mask_blend_epi8(_mm512_movepi8_mask(at), low, high);
            }
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
    fn pack_i8(v: [Self; 4], out: &mut [u8; 64]) {
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

/// Multiplies and adds words with `vpdpwssd`. The compiler emits `vpmaddwd` and `vpaddd` for `_mm512_dpwssd_epi32`,
/// which is half as many instructions again.
#[inline]
#[target_feature(enable = "avx512f,avx512bw,avx512vnni")]
fn dot_native(mut sums: __m512i, w: __m512i, x: __m512i) -> __m512i {
    // SAFETY: the instruction affects nothing but its operands.
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

impl<const VBMI: bool> I16x32 for Avx512<VBMI> {
    type Table = __m512i;
    one_word_register!();
    // SAFETY: the processor has AVX-512 BW and VNNI, which `Isa::Avx512` needs. The load is as long as the table.
    intrinsics! {
        // Stored twice: a lookup reads five bits.
        load_i16_table(table: &[i16; 16]) -> __m512i =
            _mm512_broadcast_i64x4(_mm256_loadu_si256(table.as_ptr().cast()));
        dot_word_register(sums: __m512i, w: __m512i, x: __m512i) -> __m512i = dot_native(sums, w, x);
        widen_codes(codes: __m512i) -> [__m512i; 2] =
            [_mm512_and_si512(codes, _mm512_set1_epi16(255)), _mm512_srli_epi16::<8>(codes)];
    }
    #[inline(always)]
    fn lookup_i16<const J: usize>(table: __m512i, at: __m512i) -> __m512i {
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
    fn widen_signed_register(v: &[u8; 64], _: usize) -> [__m512i; 2] {
        let v = Self::load_bytes(v);
        // SAFETY: the processor has AVX-512 BW.
        unsafe { [_mm512_srai_epi16::<8>(_mm512_slli_epi16::<8>(v)), _mm512_srai_epi16::<8>(v)] }
    }
    #[inline(always)]
    fn split_digits(even: Self, odd: Self, out: &mut [[u8; 64]; 2]) {
        // SAFETY: there is room for twice 64 bytes; the processor has AVX-512 BW.
        unsafe {
            let (even, odd) = (_mm512_cvtps_epi32(even.0), _mm512_cvtps_epi32(odd.0));
            let half = _mm512_set1_epi32(2048);
            let (a, b) = (_mm512_add_epi32(even, half), _mm512_add_epi32(odd, half));
            // Even words come from one vector, odd words from the other; the blend drops the other bits.
            let places = 0xaaaa_aaaa;
            let upper =
                _mm512_mask_blend_epi16(places, _mm512_srai_epi32::<12>(a), _mm512_slli_epi32::<4>(b));
            // The lowest twelve bits are the low digit plus 2048.
            let lower_even = _mm512_sub_epi32(_mm512_and_si512(a, _mm512_set1_epi32(4095)), half);
            let lower_odd = _mm512_sub_epi32(_mm512_and_si512(b, _mm512_set1_epi32(4095)), half);
            let lower = _mm512_mask_blend_epi16(places, lower_even, _mm512_slli_epi32::<16>(lower_odd));
            _mm512_storeu_si512(out[0].as_mut_ptr().cast(), upper);
            _mm512_storeu_si512(out[1].as_mut_ptr().cast(), lower);
        }
    }
    #[inline(always)]
    fn exponent_scales(self) -> (Self, Self) {
        // SAFETY: the processor has AVX-512 F.
        unsafe {
            let bits = _mm512_and_si512(_mm512_castps_si512(self.0), _mm512_set1_epi32(0x7f80_0000));
            let bits = _mm512_max_epi32(bits, _mm512_set1_epi32(MIN_EXPONENT as i32));
            let inverse = _mm512_sub_epi32(_mm512_set1_epi32(INVERSE_EXPONENT as i32), bits);
            let step = _mm512_sub_epi32(bits, _mm512_set1_epi32(STEP_EXPONENT as i32));
            (Avx512(_mm512_castsi512_ps(inverse)), Avx512(_mm512_castsi512_ps(step)))
        }
    }
}

impl<const VBMI: bool> Bf16x32 for Avx512<VBMI> {
    #[inline(always)]
    fn pack_bf16(low: Self, high: Self, out: &mut [u8; 64]) {
        // SAFETY: there is room for 64 bytes; the processor has AVX-512 BF16, which `has_bf16` asks for.
        unsafe {
            let both = _mm512_cvtne2ps_pbh(high.0, low.0);
            out.as_mut_ptr().cast::<__m512bh>().write_unaligned(both);
        }
    }
    #[inline(always)]
    fn dot_bf16(sums: Self, w: &[u8; 64], x: &[u8; 64]) -> Self {
        // SAFETY: 64 bytes are there; the processor has AVX-512 BF16, which `has_bf16` asks for.
        unsafe {
            let w = w.as_ptr().cast::<__m512bh>().read_unaligned();
            let x = x.as_ptr().cast::<__m512bh>().read_unaligned();
            Avx512(_mm512_dpbf16_ps(sums.0, w, x))
        }
    }
}

impl Simd for Avx512<false> {
    #[target_feature(enable = "avx512f,avx512bw,avx512vl,avx512vnni,avx2,fma,f16c")]
    unsafe fn call<K: Kernel>(kernel: K) -> K::Output {
        kernel.run::<Self>()
    }
}

impl Simd for Avx512<true> {
    #[target_feature(enable = "avx512f,avx512bw,avx512vl,avx512vnni,avx512vbmi,avx2,fma,f16c")]
    unsafe fn call<K: Kernel>(kernel: K) -> K::Output {
        kernel.run::<Self>()
    }
}

/// Runs a bf16 kernel.
///
/// # Safety
/// The processor has AVX-512 and AVX512-BF16.
#[target_feature(enable = "avx512f,avx512bw,avx512vl,avx512vnni,avx512bf16,avx2,fma,f16c")]
pub(super) unsafe fn call_bf16<K: Bf16Kernel>(kernel: K) {
    kernel.run::<Avx512<false>>();
}
