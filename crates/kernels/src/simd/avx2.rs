//! AVX2, FMA and F16C, and AVX-VNNI where the processor has it: sixteen lanes in two registers.

use super::traits::*;
use std::arch::x86_64::*;

/// Sixteen lanes in two registers. With `VNNI` bytes and words are multiplied and added by one instruction.
#[derive(Clone, Copy)]
pub(crate) struct Avx2<const VNNI: bool = false>(pub(crate) __m256, pub(crate) __m256);

/// Applies an intrinsic to both halves of vectors.
macro_rules! both {
    ($f:ident, $($v:expr),*) => {
        Avx2($f($($v.0),*), $f($($v.1),*))
    };
}

/// Evaluates an expression for both halves; a closure would not be compiled with the instructions.
macro_rules! pair {
    (|$($v:ident),*| $body:expr, $($a:expr),*) => {{
        let low = { $(let $v = $a.0;)* $body };
        let high = { $(let $v = $a.1;)* $body };
        (low, high)
    }};
}

/// Evaluates an expression for both halves of a vector.
macro_rules! halves {
    ($($all:tt)*) => {{
        let (low, high) = pair!($($all)*);
        Avx2(low, high)
    }};
}

const NEAREST: i32 = _MM_FROUND_TO_NEAREST_INT | _MM_FROUND_NO_EXC;

/// Returns the sums of four vectors of eight lanes, added by halves.
#[inline(always)]
pub(super) fn add_lanes_by_halves(v: [__m256; 4]) -> [f32; 4] {
    // SAFETY: the processor has AVX2, see the module; the result has room for four numbers.
    unsafe {
        let [a, b, c, d] = v;
        let a = _mm_add_ps(_mm256_castps256_ps128(a), _mm256_extractf128_ps::<1>(a));
        let b = _mm_add_ps(_mm256_castps256_ps128(b), _mm256_extractf128_ps::<1>(b));
        let c = _mm_add_ps(_mm256_castps256_ps128(c), _mm256_extractf128_ps::<1>(c));
        let d = _mm_add_ps(_mm256_castps256_ps128(d), _mm256_extractf128_ps::<1>(d));
        let ab = _mm_add_ps(_mm_movelh_ps(a, b), _mm_movehl_ps(b, a));
        let cd = _mm_add_ps(_mm_movelh_ps(c, d), _mm_movehl_ps(d, c));
        let sums =
            _mm_add_ps(_mm_shuffle_ps::<0b10_00_10_00>(ab, cd), _mm_shuffle_ps::<0b11_01_11_01>(ab, cd));
        let mut out = [0f32; 4];
        _mm_storeu_ps(out.as_mut_ptr(), sums);
        out
    }
}

/// Looks up eight indices, of which the bits of `mask` count.
///
/// # Safety
/// The table has `mask + 1` entries, and the processor has AVX2.
#[inline(always)]
unsafe fn gather(table: *const f32, at: __m256i, mask: i32) -> __m256 {
    // SAFETY: masked indices lie inside the table.
    unsafe { _mm256_i32gather_ps::<4>(table, _mm256_and_si256(at, _mm256_set1_epi32(mask))) }
}

impl<const VNNI: bool> F32x16 for Avx2<VNNI> {
    const REGISTERS: usize = 8;
    const REGISTERS_PER_VECTOR: usize = 2;
    type Register = __m256;
    type U32s = (__m256i, __m256i);

    // SAFETY: the processor has AVX2, FMA and F16C, see `simd`. Loads and stores are as long as their arrays, or halves of
    // them; the tables have as many entries as the masks of `gather` select.
    intrinsics! {
        splat(v: f32) -> Self = Avx2(_mm256_set1_ps(v), _mm256_set1_ps(v));
        load(v: &[f32; LANES]) -> Self = halves!(|at| _mm256_loadu_ps(v.as_ptr().add(at)), (0, 8));
        add(self, b: Self) -> Self = both!(_mm256_add_ps, self, b);
        mul(self, b: Self) -> Self = both!(_mm256_mul_ps, self, b);
        div(self, b: Self) -> Self = both!(_mm256_div_ps, self, b);
        mul_add(self, b: Self, c: Self) -> Self = both!(_mm256_fmadd_ps, self, b, c);
        neg_mul_add(self, b: Self, c: Self) -> Self = both!(_mm256_fnmadd_ps, self, b, c);
        min(self, b: Self) -> Self = both!(_mm256_min_ps, self, b);
        max(self, b: Self) -> Self = both!(_mm256_max_ps, self, b);
        if_below(self, bound: Self, x: Self, y: Self) -> Self =
            halves!(|v, b, x, y| _mm256_blendv_ps(y, x, _mm256_cmp_ps::<_CMP_LT_OQ>(v, b)),
                self, bound, x, y);
        power_of_two(self) -> Self = halves!(
            |v| _mm256_castsi256_ps(_mm256_slli_epi32::<23>(_mm256_add_epi32(
                _mm256_cvtps_epi32(v),
                _mm256_set1_epi32(127),
            ))),
            self
        );
        round(self) -> Self = halves!(|v| _mm256_round_ps::<NEAREST>(v), self);
        load_register(v: &[f32; LANES], r: usize) -> __m256 =
            _mm256_loadu_ps(v.as_chunks::<8>().0[r].as_ptr());
        store_register(v: __m256, out: &mut [f32; LANES], r: usize) =
            _mm256_storeu_ps(out.as_chunks_mut::<8>().0[r].as_mut_ptr(), v);
        mul_add_register(a: __m256, b: __m256, c: __m256) -> __m256 = _mm256_fmadd_ps(a, b, c);

        load_u32(v: &[u8; 64]) -> Self::U32s =
            pair!(|at| _mm256_loadu_si256(v.as_ptr().add(at).cast()), (0, 32));
        load_u16(v: &[u8; 32]) -> Self::U32s =
            pair!(|at| _mm256_cvtepu16_epi32(_mm_loadu_si128(v.as_ptr().add(at).cast())), (0, 16));
        load_u8(v: &[u8; 16]) -> Self::U32s =
            pair!(|at| _mm256_cvtepu8_epi32(_mm_loadl_epi64(v.as_ptr().add(at).cast())), (0, 8));
        from_i8(v: &[u8; 16]) -> Self = halves!(
            |at| _mm256_cvtepi32_ps(_mm256_cvtepi8_epi32(_mm_loadl_epi64(v.as_ptr().add(at).cast()))),
            (0, 8)
        );
        from_u8(v: &[u8; 16]) -> Self = halves!(|v| _mm256_cvtepi32_ps(v), Self::load_u8(v));
        from_f32(v: &[u8; 64]) -> Self = halves!(|at| _mm256_loadu_ps(v.as_ptr().add(at).cast()), (0, 32));
        from_f16(v: &[u8; 32]) -> Self =
            halves!(|at| _mm256_cvtph_ps(_mm_loadu_si128(v.as_ptr().add(at).cast())), (0, 16));
        lookup_64(table: &[f32; 64], at: Self::U32s) -> Self = halves!(|i| gather(table.as_ptr(), i, 63), at);
        lookup_256(table: &[f32; 256], at: Self::U32s) -> Self =
            halves!(|i| gather(table.as_ptr(), i, 255), at);
    }
    #[inline(always)]
    fn store(self, out: &mut [f32; LANES]) {
        // SAFETY: there is room for sixteen numbers; the processor has AVX2, see `simd`.
        unsafe {
            _mm256_storeu_ps(out.as_mut_ptr(), self.0);
            _mm256_storeu_ps(out.as_mut_ptr().add(8), self.1);
        }
    }

    #[inline(always)]
    fn load_u24(v: &[u8], stride: usize) -> Self::U32s {
        let v = &v[..15 * stride + 3];
        match stride {
            // Each part of 128 bits takes the 12 bytes of four integers, the last four from byte 4 on.
            3 => {
                // SAFETY: 48 bytes are there; the processor has AVX2, see `simd`.
                unsafe {
                    let load = |at: usize| _mm_loadu_si128(v.as_ptr().add(at).cast());
                    let first = _mm_setr_epi8(0, 1, 2, -1, 3, 4, 5, -1, 6, 7, 8, -1, 9, 10, 11, -1);
                    let last = _mm_setr_epi8(4, 5, 6, -1, 7, 8, 9, -1, 10, 11, 12, -1, 13, 14, 15, -1);
                    (
                        _mm256_shuffle_epi8(
                            _mm256_set_m128i(load(12), load(0)),
                            _mm256_set_m128i(first, first),
                        ),
                        _mm256_shuffle_epi8(
                            _mm256_set_m128i(load(32), load(24)),
                            _mm256_set_m128i(last, first),
                        ),
                    )
                }
            }
            // Four bytes at each integer, the last of which is read from one byte before it.
            6 => {
                // SAFETY: the last read ends with the 93 bytes that are there; the processor has AVX2, see `simd`.
                unsafe {
                    let at = _mm256_setr_epi32(0, 6, 12, 18, 24, 30, 36, 42);
                    let at_last = _mm256_setr_epi32(0, 6, 12, 18, 24, 30, 36, 41);
                    let low = _mm256_i32gather_epi32::<1>(v.as_ptr().cast(), at);
                    let high = _mm256_i32gather_epi32::<1>(v.as_ptr().add(48).cast(), at_last);
                    (low, _mm256_srlv_epi32(high, _mm256_setr_epi32(0, 0, 0, 0, 0, 0, 0, 8)))
                }
            }
            _ => unreachable!("integers beside each other or every second of them"),
        }
    }
    #[inline(always)]
    fn shift_right(v: Self::U32s, bits: u32) -> Self::U32s {
        // SAFETY: the processor has AVX2, see `simd`.
        unsafe {
            let n = _mm_cvtsi32_si128(bits as i32);
            (_mm256_srl_epi32(v.0, n), _mm256_srl_epi32(v.1, n))
        }
    }
    #[inline(always)]
    fn to_f16(self, out: &mut [u8; 32]) {
        // SAFETY: there is room for 32 bytes; the processor has F16C, see `simd`.
        unsafe {
            let (low, high) = pair!(|v| _mm256_cvtps_ph::<_MM_FROUND_TO_NEAREST_INT>(v), self);
            _mm_storeu_si128(out.as_mut_ptr().cast(), low);
            _mm_storeu_si128(out.as_mut_ptr().add(16).cast(), high);
        }
    }
    #[inline(always)]
    fn lookup(table: Self, at: Self::U32s) -> Self {
        // SAFETY: the processor has AVX2, see `simd`.
        unsafe {
            // Bit 3 of an index, moved to the sign, selects the upper half of the table.
            halves!(
                |i| {
                    let upper = _mm256_castsi256_ps(_mm256_slli_epi32::<28>(i));
                    let (a, b) = (_mm256_permutevar8x32_ps(table.0, i), _mm256_permutevar8x32_ps(table.1, i));
                    _mm256_blendv_ps(a, b, upper)
                },
                at
            )
        }
    }
    const LARGEST_HALF_TABLE: usize = 64;
    type HalfTable = [[__m256i; 4]; 2];
    type F16x32 = (__m256i, __m256i);
    #[inline(always)]
    fn load_half_table(table: &[u16; 64]) -> Self::HalfTable {
        // SAFETY: four times sixteen words are there; the processor has AVX2, see `simd`.
        unsafe {
            let mut planes = [[_mm256_setzero_si256(); 4]; 2];
            let mut before = [_mm_setzero_si128(); 2];
            for (i, words) in table.as_chunks::<16>().0.iter().enumerate() {
                let (a, b) =
                    (_mm_loadu_si128(words.as_ptr().cast()), _mm_loadu_si128(words.as_ptr().add(8).cast()));
                let low = _mm_set1_epi16(0xff);
                let bytes = [
                    _mm_packus_epi16(_mm_and_si128(a, low), _mm_and_si128(b, low)),
                    _mm_packus_epi16(_mm_srli_epi16::<8>(a), _mm_srli_epi16::<8>(b)),
                ];
                for p in 0..2 {
                    planes[p][i] = _mm256_broadcastsi128_si256(_mm_xor_si128(bytes[p], before[p]));
                }
                before = bytes;
            }
            planes
        }
    }
    #[inline(always)]
    fn lookup_halves_6(planes: Self::HalfTable, at: &[u8; 96]) -> [Self::F16x32; 4] {
        /// Returns the byte indices of pairs of 6-bit indices, two bytes each, for two lanes from byte `first` on: pair
        /// 0 of both lanes, then pairs 1, 2 and 3.
        const fn pairs(first: u8) -> [u8; 16] {
            let mut all = [0; 16];
            let mut i = 0;
            while i < 8 {
                let bit = 48 * (i % 2) + 12 * (i / 2);
                all[2 * i] = first + (bit / 8) as u8;
                all[2 * i + 1] = all[2 * i] + 1;
                i += 1;
            }
            all
        }
        /// Factors that shift each pair so that it begins at bit 4.
        const FACTORS: [i16; 8] = [16, 16, 1, 1, 16, 16, 1, 1];
        const PAIRS: [[u8; 16]; 2] = [pairs(0), pairs(4)];
        // SAFETY: 16 bytes are there from 0, 12, .. 72 and from 80 on; the processor has AVX2, see `simd`.
        unsafe {
            let first = _mm_loadu_si128(PAIRS[0].as_ptr().cast());
            let last = _mm_loadu_si128(PAIRS[1].as_ptr().cast());
            let factors = _mm256_broadcastsi128_si256(_mm_loadu_si128(FACTORS.as_ptr().cast()));
            // Indices of lanes 2 i and 2 i + 1; in the upper half, of lanes 8 + 2 i and 9 + 2 i.
            let mut indices = [_mm256_setzero_si256(); 4];
            for (i, indices) in indices.iter_mut().enumerate() {
                let (upper, places) = if i < 3 { (48 + 12 * i, first) } else { (80, last) };
                let packed = _mm256_set_m128i(
                    _mm_loadu_si128(at.as_ptr().add(upper).cast()),
                    _mm_loadu_si128(at.as_ptr().add(12 * i).cast()),
                );
                let pairs = _mm256_shuffle_epi8(packed, _mm256_set_m128i(places, first));
                let pairs = _mm256_mullo_epi16(pairs, factors);
                let even = _mm256_and_si256(_mm256_srli_epi16::<4>(pairs), _mm256_set1_epi16(0x3f));
                let odd = _mm256_and_si256(_mm256_srli_epi16::<2>(pairs), _mm256_set1_epi16(0x3f00));
                *indices = _mm256_or_si256(even, odd);
            }
            // Word l of vector w is pair w of lane l.
            let [a, b, c, d] = indices;
            let (ab, ab_high) = (_mm256_unpacklo_epi32(a, b), _mm256_unpackhi_epi32(a, b));
            let (cd, cd_high) = (_mm256_unpacklo_epi32(c, d), _mm256_unpackhi_epi32(c, d));
            let pairs = [
                _mm256_unpacklo_epi64(ab, cd),
                _mm256_unpackhi_epi64(ab, cd),
                _mm256_unpacklo_epi64(ab_high, cd_high),
                _mm256_unpackhi_epi64(ab_high, cd_high),
            ];
            let mut vectors = [(a, b); 4];
            for (vectors, index) in vectors.iter_mut().zip(pairs) {
                // A shuffle gives zero where an index is negative. So entry 16 k + j is the sum, without carries, of
                // entries j of parts 0 to k; each part holds its difference to the part before.
                let sixteen = _mm256_set1_epi8(16);
                let second = _mm256_sub_epi8(index, sixteen);
                let third = _mm256_sub_epi8(second, sixteen);
                let fourth = _mm256_sub_epi8(third, sixteen);
                let mut bytes = [index; 2];
                for (bytes, p) in bytes.iter_mut().zip(planes) {
                    let a =
                        _mm256_xor_si256(_mm256_shuffle_epi8(p[0], index), _mm256_shuffle_epi8(p[1], second));
                    let b =
                        _mm256_xor_si256(_mm256_shuffle_epi8(p[2], third), _mm256_shuffle_epi8(p[3], fourth));
                    *bytes = _mm256_xor_si256(a, b);
                }
                let ([low, high], byte) = (bytes, _mm256_set1_epi16(0xff));
                *vectors = (
                    _mm256_or_si256(_mm256_and_si256(low, byte), _mm256_slli_epi16::<8>(high)),
                    _mm256_or_si256(_mm256_srli_epi16::<8>(low), _mm256_andnot_si256(byte, high)),
                );
            }
            let [(a, b), (c, d), (e, f), (g, h)] = vectors;
            [(a, b), (c, f), (d, e), (g, h)]
        }
    }
    #[inline(always)]
    fn lookup_halves_8(table: &[u16; 256], at: &[u8; 32]) -> Self::F16x32 {
        let words = at.map(|i| table[usize::from(i)]);
        // SAFETY: thirty-two words are there; the processor has AVX2, see `simd`.
        unsafe {
            (_mm256_loadu_si256(words.as_ptr().cast()), _mm256_loadu_si256(words.as_ptr().add(16).cast()))
        }
    }
    #[inline(always)]
    fn half_vector(v: Self::F16x32, second: bool) -> Self {
        let v = if second { v.1 } else { v.0 };
        // SAFETY: the processor has F16C, see `simd`.
        unsafe {
            Avx2(
                _mm256_cvtph_ps(_mm256_castsi256_si128(v)),
                _mm256_cvtph_ps(_mm256_extracti128_si256::<1>(v)),
            )
        }
    }
    #[inline(always)]
    fn horizontal_sum(self) -> f32 {
        // SAFETY: the processor has AVX2, see `simd`.
        unsafe {
            let v = _mm256_add_ps(self.0, self.1);
            let v = _mm_add_ps(_mm256_castps256_ps128(v), _mm256_extractf128_ps::<1>(v));
            let v = _mm_add_ps(v, _mm_movehl_ps(v, v));
            _mm_cvtss_f32(_mm_add_ss(v, _mm_movehdup_ps(v)))
        }
    }
    #[inline(always)]
    fn partial_sums(v: [Self; 4]) -> Self {
        // SAFETY: the processor has AVX2, see `simd`.
        unsafe {
            let (a, b) = (_mm256_add_ps(v[0].0, v[0].1), _mm256_add_ps(v[1].0, v[1].1));
            let (c, d) = (_mm256_add_ps(v[2].0, v[2].1), _mm256_add_ps(v[3].0, v[3].1));
            let (low, high) = (_mm256_permute2f128_ps::<0x20>(a, b), _mm256_permute2f128_ps::<0x31>(a, b));
            let ab = _mm256_add_ps(low, high);
            let (low, high) = (_mm256_permute2f128_ps::<0x20>(c, d), _mm256_permute2f128_ps::<0x31>(c, d));
            Avx2(ab, _mm256_add_ps(low, high))
        }
    }
    #[inline(always)]
    fn finish_partial_sums(v: [Self; 4]) -> Self {
        // SAFETY: the processor has AVX2, see `simd`.
        unsafe {
            // Lane 4 i + q of each half belongs to vector i of `v[q]`.
            let mut halves = [[v[0].0, v[1].0, v[2].0, v[3].0], [v[0].1, v[1].1, v[2].1, v[3].1]];
            for half in &mut halves {
                let (a, b) = (_mm256_castps_pd(half[0]), _mm256_castps_pd(half[1]));
                let (c, d) = (_mm256_castps_pd(half[2]), _mm256_castps_pd(half[3]));
                let (low, high) = (_mm256_unpacklo_pd(a, b), _mm256_unpackhi_pd(a, b));
                let ab = _mm256_add_ps(_mm256_castpd_ps(low), _mm256_castpd_ps(high));
                let (low, high) = (_mm256_unpacklo_pd(c, d), _mm256_unpackhi_pd(c, d));
                let cd = _mm256_add_ps(_mm256_castpd_ps(low), _mm256_castpd_ps(high));
                let even = _mm256_shuffle_ps::<0b10_00_10_00>(ab, cd);
                half[0] = _mm256_add_ps(even, _mm256_shuffle_ps::<0b11_01_11_01>(ab, cd));
            }
            // Vectors 0, 2 and 1, 3 interleaved.
            let (a, b) = (halves[0][0], halves[1][0]);
            let (even, odd) = (_mm256_permute2f128_ps::<0x20>(a, b), _mm256_permute2f128_ps::<0x31>(a, b));
            let (low, high) = (_mm256_unpacklo_ps(even, odd), _mm256_unpackhi_ps(even, odd));
            // Vectors 0 and 1 of `v[q]` in the lower half, 2 and 3 in the upper.
            let first = _mm256_permute4x64_pd::<0b11_01_10_00>(_mm256_castps_pd(low));
            let second = _mm256_permute4x64_pd::<0b11_01_10_00>(_mm256_castps_pd(high));
            Avx2(_mm256_castpd_ps(first), _mm256_castpd_ps(second))
        }
    }
    #[inline(always)]
    fn horizontal_sums(v: [Self; 4]) -> [f32; 4] {
        // SAFETY: the processor has AVX2, see `simd`.
        unsafe {
            let [a, b, c, d] = v;
            add_lanes_by_halves([
                _mm256_add_ps(a.0, a.1),
                _mm256_add_ps(b.0, b.1),
                _mm256_add_ps(c.0, c.1),
                _mm256_add_ps(d.0, d.1),
            ])
        }
    }
}

/// Tables for unpacking elements of 2, 3 or 6 bits to bytes, sixteen elements in each 128 bits.
///
/// ```text
/// move words      the 128 bits start at the word in which their first element begins
/// move bytes      each pair of elements gets the two bytes that it lies in
/// shift           the pair begins at bit 0 (AVX-512: by `shift`; AVX2: times `factor`, then by a constant)
/// mask            element 0 to the low byte, element 1, shifted, to the high byte
/// ```
pub(super) struct Unpack {
    /// Indices of the four 32-bit words for each 128 bits.
    pub(super) words: [u32; 16],
    /// Indices of the two bytes that hold each pair of elements.
    pub(super) bytes: [u8; 64],
    /// Bit at which each pair begins.
    pub(super) shift: [u16; 32],
    /// Factor that shifts each pair to begin at bit [`last`].
    pub(super) factor: [u16; 32],
}

/// Returns the largest bit at which a pair of elements begins.
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

pub(super) struct UnpackLanes<const BITS: usize>;

impl<const BITS: usize> UnpackLanes<BITS> {
    pub(super) const UNPACK: Unpack = Unpack::new(BITS);
}

/// Unpacks thirty-two elements of BITS bits.
///
/// # Safety
/// `v` points to 4 * BITS bytes, and the processor has AVX2.
#[inline(always)]
unsafe fn unpack_32<const BITS: usize>(v: *const u8) -> __m256i {
    // SAFETY: only the 4 * BITS bytes at `v` are loaded; the processor has AVX2.
    unsafe {
        if BITS == 1 {
            let v = _mm256_set1_epi32(v.cast::<i32>().read_unaligned());
            // Each byte is repeated for eight elements; each element tests its own bit.
            let bytes =
                _mm256_setr_epi64x(0, 0x0101_0101_0101_0101, 0x0202_0202_0202_0202, 0x0303_0303_0303_0303);
            let bit = _mm256_set1_epi64x(0x8040_2010_0804_0201_u64 as i64);
            let set = _mm256_cmpeq_epi8(_mm256_and_si256(_mm256_shuffle_epi8(v, bytes), bit), bit);
            return _mm256_and_si256(set, _mm256_set1_epi8(1));
        }
        let how = &UnpackLanes::<BITS>::UNPACK;
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

impl<const VNNI: bool> U8x64 for Avx2<VNNI> {
    type Bytes = (__m256i, __m256i);
    type Sums = (__m256i, __m256i);
    #[inline(always)]
    fn load_bytes(v: &[u8; 64]) -> Self::Bytes {
        Self::load_u32(v)
    }
    #[inline(always)]
    fn load_sums(v: &[u8; 64]) -> Self::Sums {
        Self::load_u32(v)
    }
    // SAFETY: the processor has AVX2, see `simd`.
    intrinsics! {
        xor_bytes(v: Self::Bytes, bits: u8) -> Self::Bytes =
            pair!(|v| _mm256_xor_si256(v, _mm256_set1_epi8(bits as i8)), v);
        split_nibbles(v: Self::Bytes) -> (Self::Bytes, Self::Bytes) = (
            pair!(|v| _mm256_and_si256(v, _mm256_set1_epi8(15)), v),
            pair!(|v| _mm256_and_si256(_mm256_srli_epi16::<4>(v), _mm256_set1_epi8(15)), v),
        );
        lookup_bytes_16(table: Self::Bytes, at: Self::Bytes) -> Self::Bytes =
            pair!(|table, at| _mm256_shuffle_epi8(table, at), table, at);
        zero_sums() -> Self::Sums = (_mm256_setzero_si256(), _mm256_setzero_si256());
        sums_to_f32(v: Self::Sums) -> Self = halves!(|v| _mm256_cvtepi32_ps(v), v);
    }
    #[inline(always)]
    fn load_partial_bytes(v: &[u8]) -> Self::Bytes {
        if let Ok(half) = <&[u8; 32]>::try_from(v) {
            // SAFETY: 32 bytes are there; the processor has AVX2, see `simd`.
            return unsafe { (_mm256_loadu_si256(half.as_ptr().cast()), _mm256_setzero_si256()) };
        }
        let mut whole = [0; 64];
        whole[..v.len()].copy_from_slice(v);
        Self::load_u32(&whole)
    }
    #[inline(always)]
    fn load_byte_table(v: &[u8; 16]) -> Self::Bytes {
        // SAFETY: 16 bytes are there; the processor has AVX2, see `simd`.
        unsafe {
            let v = _mm256_broadcastsi128_si256(_mm_loadu_si128(v.as_ptr().cast()));
            (v, v)
        }
    }
    #[inline(always)]
    fn unpack<const BITS: usize>(v: &[u8]) -> [Self::Bytes; 2] {
        assert!(v.len() >= 16 * BITS && matches!(BITS, 1 | 2 | 3 | 6));
        // SAFETY: four times 4 * BITS bytes are there; the processor has AVX2.
        let part = |i: usize| unsafe { unpack_32::<BITS>(v.as_ptr().add(4 * BITS * i)) };
        [(part(0), part(1)), (part(2), part(3))]
    }
    #[inline(always)]
    fn lookup_bytes_64(table: &[u8; 64], at: Self::Bytes) -> Self::Bytes {
        // SAFETY: the table has four times 16 bytes; the processor has AVX2.
        unsafe {
            let p = table.as_ptr();
            let a = _mm256_broadcastsi128_si256(_mm_loadu_si128(p.cast()));
            let b = _mm256_broadcastsi128_si256(_mm_loadu_si128(p.add(16).cast()));
            let c = _mm256_broadcastsi128_si256(_mm_loadu_si128(p.add(32).cast()));
            let d = _mm256_broadcastsi128_si256(_mm_loadu_si128(p.add(48).cast()));
            pair!(
                |at| {
                    // Bits 4 and 5, each moved to the sign.
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
    fn store_bytes(v: Self::Bytes, out: &mut [u8; 64]) {
        // SAFETY: there is room for 64 bytes; the processor has AVX2.
        unsafe {
            _mm256_storeu_si256(out.as_mut_ptr().cast(), v.0);
            _mm256_storeu_si256(out.as_mut_ptr().add(32).cast(), v.1);
        }
    }
    #[inline(always)]
    fn dot_u8i8(sums: Self::Sums, codes: Self::Bytes, x: &[u8; 64]) -> Self::Sums {
        let x = Self::load_bytes(x);
        if VNNI {
            // SAFETY: the processor has AVX-VNNI.
            return unsafe {
                pair!(|sums, codes, x| _mm256_dpbusd_avx_epi32(sums, codes, x), sums, codes, x)
            };
        }
        // Even and odd bytes are multiplied separately: a sum of two products can exceed 16 bits.
        // SAFETY: the processor has AVX2.
        unsafe {
            pair!(
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
    fn pack_i8(v: [Self; 4], out: &mut [u8; 64]) {
        // SAFETY: the processor has AVX2.
        let all = unsafe {
            let byte = _mm256_set1_epi32(255);
            let [a, b, c, d] = v;
            pair!(
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
        Self::store_bytes(all, out);
    }
}

impl<const VNNI: bool> I16x32 for Avx2<VNNI> {
    /// Lower bytes and upper bytes of the words, each stored twice.
    type Table = (__m256i, __m256i);
    #[inline(always)]
    fn load_i16_table(table: &[i16; 16]) -> Self::Table {
        // SAFETY: sixteen words are there; the processor has AVX2, see `simd`.
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
    fn lookup_i16<const J: usize>((low, high): Self::Table, at: Self::Bytes) -> Self::Bytes {
        // SAFETY: the processor has AVX2.
        unsafe {
            pair!(
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
    fn dot_i16(sums: Self::Sums, w: Self::Bytes, x: &[u8; 64]) -> Self::Sums {
        let x = <Self as U8x64>::load_bytes(x);
        (Self::dot_word_register(sums.0, w.0, x.0), Self::dot_word_register(sums.1, w.1, x.1))
    }
    type WordRegister = __m256i;
    type SumRegister = __m256i;
    // SAFETY: the processor has AVX2, and AVX-VNNI where VNNI says so, see `simd`. The load is half as long as its array.
    intrinsics! {
        load_word_register(v: &[u8; 64], r: usize) -> __m256i =
            _mm256_loadu_si256(v.as_chunks::<32>().0[r].as_ptr().cast());
        zero_sum_register() -> __m256i = _mm256_setzero_si256();
        dot_word_register(sums: __m256i, w: __m256i, x: __m256i) -> __m256i = match VNNI {
            true => _mm256_dpwssd_avx_epi32(sums, w, x),
            false => _mm256_add_epi32(sums, _mm256_madd_epi16(w, x)),
        };
        sum_register_to_f32(v: __m256i) -> __m256 = _mm256_cvtepi32_ps(v);
        widen_codes(codes: Self::Bytes) -> [Self::Bytes; 2] = [
            pair!(|v| _mm256_and_si256(v, _mm256_set1_epi16(255)), codes),
            pair!(|v| _mm256_srli_epi16::<8>(v), codes),
        ];
        join_bytes(upper: Self::Bytes, lower: Self::Bytes) -> [Self::Bytes; 2] = [
            pair!(
                |upper, lower| _mm256_blendv_epi8(_mm256_slli_epi16::<8>(upper), lower, _mm256_set1_epi16(255)),
                upper,
                lower
            ),
            pair!(
                |upper, lower| _mm256_blendv_epi8(upper, _mm256_srli_epi16::<8>(lower), _mm256_set1_epi16(255)),
                upper,
                lower
            ),
        ];
    }
    #[inline(always)]
    fn lookup_word_registers((low, high): Self::Table, at: &[u8; 64], r: usize) -> [__m256i; 4] {
        let at = Self::load_word_register(at, r);
        // SAFETY: the processor has AVX2.
        unsafe {
            let (nibble, byte) = (_mm256_set1_epi8(15), _mm256_set1_epi16(255));
            // Lower and upper bytes of the words that each byte of `at` selects: for J 0 and 2, then for J 1 and 3.
            let mut words = [at; 4];
            for (j, at) in [at, _mm256_srli_epi16::<4>(at)].into_iter().enumerate() {
                let at = _mm256_and_si256(at, nibble);
                let (low, high) = (_mm256_shuffle_epi8(low, at), _mm256_shuffle_epi8(high, at));
                words[j] = _mm256_or_si256(_mm256_and_si256(low, byte), _mm256_slli_epi16::<8>(high));
                words[j + 2] = _mm256_or_si256(_mm256_srli_epi16::<8>(low), _mm256_andnot_si256(byte, high));
            }
            words
        }
    }
    const MULTIPLIES_BYTES_AS_WORDS: bool = !VNNI;
    #[inline(always)]
    fn widen_signed_register(v: &[u8; 64], r: usize) -> [__m256i; 2] {
        let v = Self::load_word_register(v, r);
        // SAFETY: the processor has AVX2.
        unsafe { [_mm256_srai_epi16::<8>(_mm256_slli_epi16::<8>(v)), _mm256_srai_epi16::<8>(v)] }
    }
    #[inline(always)]
    fn split_digits(even: Self, odd: Self, out: &mut [[u8; 64]; 2]) {
        // SAFETY: the processor has AVX2.
        let (upper, lower) = unsafe {
            let half = _mm256_set1_epi32(2048);
            let sums = pair!(
                |even, odd| (
                    _mm256_add_epi32(_mm256_cvtps_epi32(even), half),
                    _mm256_add_epi32(_mm256_cvtps_epi32(odd), half)
                ),
                even,
                odd
            );
            let upper = pair!(
                |v| _mm256_blend_epi16::<0xaa>(_mm256_srai_epi32::<12>(v.0), _mm256_slli_epi32::<4>(v.1)),
                sums
            );
            let rest = _mm256_set1_epi32(4095);
            let lower = pair!(
                |v| {
                    let even = _mm256_sub_epi32(_mm256_and_si256(v.0, rest), half);
                    let odd = _mm256_sub_epi32(_mm256_and_si256(v.1, rest), half);
                    _mm256_blend_epi16::<0xaa>(even, _mm256_slli_epi32::<16>(odd))
                },
                sums
            );
            (upper, lower)
        };
        <Self as U8x64>::store_bytes(upper, &mut out[0]);
        <Self as U8x64>::store_bytes(lower, &mut out[1]);
    }
    #[inline(always)]
    fn exponent_scales(self) -> (Self, Self) {
        // SAFETY: the processor has AVX2.
        unsafe {
            let bits = pair!(
                |v| {
                    let bits = _mm256_and_si256(_mm256_castps_si256(v), _mm256_set1_epi32(0x7f80_0000));
                    _mm256_max_epi32(bits, _mm256_set1_epi32(MIN_EXPONENT as i32))
                },
                self
            );
            let inverse = halves!(
                |v| _mm256_castsi256_ps(_mm256_sub_epi32(_mm256_set1_epi32(INVERSE_EXPONENT as i32), v)),
                bits
            );
            let step = halves!(
                |v| _mm256_castsi256_ps(_mm256_sub_epi32(v, _mm256_set1_epi32(STEP_EXPONENT as i32))),
                bits
            );
            (inverse, step)
        }
    }
}

impl Simd for Avx2 {
    #[target_feature(enable = "avx2,fma,f16c")]
    unsafe fn call<K: Kernel>(kernel: K) -> K::Output {
        kernel.run::<Self>()
    }
}

impl Simd for Avx2<true> {
    #[target_feature(enable = "avx2,fma,f16c,avxvnni")]
    unsafe fn call<K: Kernel>(kernel: K) -> K::Output {
        kernel.run::<Self>()
    }
}
