//! AVX2 and AVX-512.

use super::{LANES, Lanes};
use std::arch::x86_64::*;

/// AVX2 and FMA.
#[derive(Clone, Copy)]
pub(crate) struct Avx2(pub(crate) __m256, pub(crate) __m256);

/// AVX-512 F.
#[derive(Clone, Copy)]
pub(crate) struct Avx512(pub(crate) __m512);

macro_rules! both {
    ($f:ident, $($v:expr),*) => {
        // SAFETY: the processor has AVX2 and FMA, see the module.
        unsafe { Avx2($f($($v.0),*), $f($($v.1),*)) }
    };
}

/// The same for both halves. Closures would not be compiled for the instructions.
macro_rules! pair {
    (|$v:ident| $body:expr, $a:expr, $b:expr) => {
        (
            {
                let $v = $a;
                $body
            },
            {
                let $v = $b;
                $body
            },
        )
    };
}

macro_rules! halves {
    (|$v:ident| $body:expr, $a:expr, $b:expr) => {{
        let (low, high) = pair!(|$v| $body, $a, $b);
        Avx2(low, high)
    }};
}

const NEAREST: i32 = _MM_FROUND_TO_NEAREST_INT | _MM_FROUND_NO_EXC;

/// The upper eight of sixteen.
#[inline(always)]
fn upper(v: __m512) -> __m256 {
    // SAFETY: the processor has AVX-512 F, see the module.
    unsafe { _mm256_castpd_ps(_mm512_extractf64x4_pd::<1>(_mm512_castps_pd(v))) }
}

/// Totals of four times eight numbers, added by halves.
#[inline(always)]
fn totals(v: [__m256; 4]) -> [f32; 4] {
    // SAFETY: the processor has AVX2, see the module; there is room for four numbers.
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

/// A mask of the first n bytes of 64, all of them where n is more.
#[inline(always)]
pub(crate) fn first_bytes(n: usize) -> u64 {
    if n < 64 { (1 << n) - 1 } else { u64::MAX }
}

impl Lanes for Avx2 {
    const REGISTERS: usize = 8;

    #[inline(always)]
    fn splat(v: f32) -> Self {
        // SAFETY: the processor has AVX2, see the module.
        unsafe { Avx2(_mm256_set1_ps(v), _mm256_set1_ps(v)) }
    }
    #[inline(always)]
    fn load(v: &[f32; LANES]) -> Self {
        // SAFETY: sixteen numbers are there; the processor has AVX2, see the module.
        unsafe { Avx2(_mm256_loadu_ps(v.as_ptr()), _mm256_loadu_ps(v.as_ptr().add(8))) }
    }
    #[inline(always)]
    fn store(self, out: &mut [f32; LANES]) {
        // SAFETY: there is room for sixteen numbers; the processor has AVX2, see the module.
        unsafe {
            _mm256_storeu_ps(out.as_mut_ptr(), self.0);
            _mm256_storeu_ps(out.as_mut_ptr().add(8), self.1);
        }
    }
    #[inline(always)]
    fn add(self, b: Self) -> Self {
        both!(_mm256_add_ps, self, b)
    }
    #[inline(always)]
    fn mul(self, b: Self) -> Self {
        both!(_mm256_mul_ps, self, b)
    }
    #[inline(always)]
    fn div(self, b: Self) -> Self {
        both!(_mm256_div_ps, self, b)
    }
    #[inline(always)]
    fn mul_add(self, b: Self, c: Self) -> Self {
        both!(_mm256_fmadd_ps, self, b, c)
    }
    #[inline(always)]
    fn neg_mul_add(self, b: Self, c: Self) -> Self {
        both!(_mm256_fnmadd_ps, self, b, c)
    }
    #[inline(always)]
    fn min(self, b: Self) -> Self {
        both!(_mm256_min_ps, self, b)
    }
    #[inline(always)]
    fn max(self, b: Self) -> Self {
        both!(_mm256_max_ps, self, b)
    }
    #[inline(always)]
    fn if_below(self, bound: Self, x: Self, y: Self) -> Self {
        // SAFETY: the processor has AVX2, see the module.
        unsafe {
            let low = _mm256_cmp_ps::<_CMP_LT_OQ>(self.0, bound.0);
            let high = _mm256_cmp_ps::<_CMP_LT_OQ>(self.1, bound.1);
            Avx2(_mm256_blendv_ps(y.0, x.0, low), _mm256_blendv_ps(y.1, x.1, high))
        }
    }
    #[inline(always)]
    fn round(self) -> Self {
        // SAFETY: the processor has AVX2, see the module.
        unsafe { Avx2(_mm256_round_ps::<NEAREST>(self.0), _mm256_round_ps::<NEAREST>(self.1)) }
    }

    type Ints = (__m256i, __m256i);

    #[inline(always)]
    fn ints_of(v: &[u8]) -> Self::Ints {
        if let Ok(half) = <&[u8; 32]>::try_from(v) {
            // SAFETY: 32 bytes are there; the processor has AVX2, see the module.
            return unsafe { (_mm256_loadu_si256(half.as_ptr().cast()), _mm256_setzero_si256()) };
        }
        let mut whole = [0; 64];
        whole[..v.len()].copy_from_slice(v);
        Self::ints(&whole)
    }
    #[inline(always)]
    fn ints(v: &[u8; 64]) -> Self::Ints {
        // SAFETY: 64 bytes are there; the processor has AVX2, see the module.
        unsafe { (_mm256_loadu_si256(v.as_ptr().cast()), _mm256_loadu_si256(v.as_ptr().add(32).cast())) }
    }
    #[inline(always)]
    fn ints_u16(v: &[u8; 32]) -> Self::Ints {
        // SAFETY: 32 bytes are there; the processor has AVX2, see the module.
        unsafe { pair!(|at| _mm256_cvtepu16_epi32(_mm_loadu_si128(v.as_ptr().add(at).cast())), 0, 16) }
    }
    #[inline(always)]
    fn ints_u8(v: &[u8; 16]) -> Self::Ints {
        // SAFETY: 16 bytes are there; the processor has AVX2, see the module.
        unsafe { pair!(|at| _mm256_cvtepu8_epi32(_mm_loadl_epi64(v.as_ptr().add(at).cast())), 0, 8) }
    }
    #[inline(always)]
    fn shift_right(v: Self::Ints, bits: u32) -> Self::Ints {
        // SAFETY: the processor has AVX2, see the module.
        unsafe {
            let n = _mm_cvtsi32_si128(bits as i32);
            (_mm256_srl_epi32(v.0, n), _mm256_srl_epi32(v.1, n))
        }
    }
    #[inline(always)]
    fn from_i8(v: &[u8; 16]) -> Self {
        // SAFETY: 16 bytes are there; the processor has AVX2, see the module.
        unsafe {
            halves!(
                |at| _mm256_cvtepi32_ps(_mm256_cvtepi8_epi32(_mm_loadl_epi64(v.as_ptr().add(at).cast()))),
                0,
                8
            )
        }
    }
    #[inline(always)]
    fn from_u8(v: &[u8; 16]) -> Self {
        let (a, b) = Self::ints_u8(v);
        // SAFETY: the processor has AVX2, see the module.
        unsafe { Avx2(_mm256_cvtepi32_ps(a), _mm256_cvtepi32_ps(b)) }
    }
    #[inline(always)]
    fn from_f32(v: &[u8; 64]) -> Self {
        // SAFETY: 64 bytes are there; the processor has AVX2, see the module.
        unsafe { Avx2(_mm256_loadu_ps(v.as_ptr().cast()), _mm256_loadu_ps(v.as_ptr().add(32).cast())) }
    }
    #[inline(always)]
    fn from_f16(v: &[u8; 32]) -> Self {
        // SAFETY: 32 bytes are there; the processor has F16C, see the module.
        unsafe { halves!(|at| _mm256_cvtph_ps(_mm_loadu_si128(v.as_ptr().add(at).cast())), 0, 16) }
    }
    #[inline(always)]
    fn lookup(table: Self, at: Self::Ints) -> Self {
        // SAFETY: the processor has AVX2, see the module.
        unsafe {
            // Bit 3 of an index, moved to the sign, selects the upper half of the table.
            halves!(
                |i| {
                    let upper = _mm256_castsi256_ps(_mm256_slli_epi32::<28>(i));
                    let (a, b) = (_mm256_permutevar8x32_ps(table.0, i), _mm256_permutevar8x32_ps(table.1, i));
                    _mm256_blendv_ps(a, b, upper)
                },
                at.0,
                at.1
            )
        }
    }
    #[inline(always)]
    fn lookup_64(table: &[f32; 64], at: Self::Ints) -> Self {
        // SAFETY: masked indices lie inside the table; the processor has AVX2, see the module.
        unsafe {
            halves!(
                |i| _mm256_i32gather_ps::<4>(table.as_ptr(), _mm256_and_si256(i, _mm256_set1_epi32(63))),
                at.0,
                at.1
            )
        }
    }
    #[inline(always)]
    fn lookup_256(table: &[f32; 256], at: Self::Ints) -> Self {
        // SAFETY: masked indices lie inside the table; the processor has AVX2, see the module.
        unsafe {
            halves!(
                |i| _mm256_i32gather_ps::<4>(table.as_ptr(), _mm256_and_si256(i, _mm256_set1_epi32(255))),
                at.0,
                at.1
            )
        }
    }
    #[inline(always)]
    fn power_of_two(self) -> Self {
        // SAFETY: the processor has AVX2, see the module.
        unsafe {
            halves!(
                |v| {
                    let biased = _mm256_add_epi32(_mm256_cvtps_epi32(v), _mm256_set1_epi32(127));
                    _mm256_castsi256_ps(_mm256_slli_epi32::<23>(biased))
                },
                self.0,
                self.1
            )
        }
    }
    #[inline(always)]
    fn total(self) -> f32 {
        // SAFETY: the processor has AVX2, see the module.
        unsafe {
            let v = _mm256_add_ps(self.0, self.1);
            let v = _mm_add_ps(_mm256_castps256_ps128(v), _mm256_extractf128_ps::<1>(v));
            let v = _mm_add_ps(v, _mm_movehl_ps(v, v));
            _mm_cvtss_f32(_mm_add_ss(v, _mm_movehdup_ps(v)))
        }
    }
    #[inline(always)]
    fn quarters(v: [Self; 4]) -> Self {
        // SAFETY: the processor has AVX2, see the module.
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
    fn totals_of_quarters(v: [Self; 4]) -> Self {
        // SAFETY: the processor has AVX2, see the module.
        unsafe {
            // Lane 4 i + q of each half is vector i of quarters q.
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
            // Vectors 0, 2 and 1, 3 in turn.
            let (a, b) = (halves[0][0], halves[1][0]);
            let (even, odd) = (_mm256_permute2f128_ps::<0x20>(a, b), _mm256_permute2f128_ps::<0x31>(a, b));
            let (low, high) = (_mm256_unpacklo_ps(even, odd), _mm256_unpackhi_ps(even, odd));
            // Of quarters q: vectors 0 and 1 in the lower half, 2 and 3 in the upper.
            let first = _mm256_permute4x64_pd::<0b11_01_10_00>(_mm256_castps_pd(low));
            let second = _mm256_permute4x64_pd::<0b11_01_10_00>(_mm256_castps_pd(high));
            Avx2(_mm256_castpd_ps(first), _mm256_castpd_ps(second))
        }
    }
    #[inline(always)]
    fn totals(v: [Self; 4]) -> [f32; 4] {
        // SAFETY: the processor has AVX2, see the module.
        unsafe {
            let [a, b, c, d] = v;
            totals([
                _mm256_add_ps(a.0, a.1),
                _mm256_add_ps(b.0, b.1),
                _mm256_add_ps(c.0, c.1),
                _mm256_add_ps(d.0, d.1),
            ])
        }
    }
}

impl Lanes for Avx512 {
    const REGISTERS: usize = 32;

    #[inline(always)]
    fn splat(v: f32) -> Self {
        // SAFETY: the processor has AVX-512 F, see the module.
        unsafe { Avx512(_mm512_set1_ps(v)) }
    }
    #[inline(always)]
    fn load(v: &[f32; LANES]) -> Self {
        // SAFETY: sixteen numbers are there; the processor has AVX-512 F, see the module.
        unsafe { Avx512(_mm512_loadu_ps(v.as_ptr())) }
    }
    #[inline(always)]
    fn store(self, out: &mut [f32; LANES]) {
        // SAFETY: there is room for sixteen numbers; the processor has AVX-512 F, see the module.
        unsafe { _mm512_storeu_ps(out.as_mut_ptr(), self.0) }
    }
    #[inline(always)]
    fn add(self, b: Self) -> Self {
        // SAFETY: the processor has AVX-512 F, see the module.
        unsafe { Avx512(_mm512_add_ps(self.0, b.0)) }
    }
    #[inline(always)]
    fn mul(self, b: Self) -> Self {
        // SAFETY: the processor has AVX-512 F, see the module.
        unsafe { Avx512(_mm512_mul_ps(self.0, b.0)) }
    }
    #[inline(always)]
    fn div(self, b: Self) -> Self {
        // SAFETY: the processor has AVX-512 F, see the module.
        unsafe { Avx512(_mm512_div_ps(self.0, b.0)) }
    }
    #[inline(always)]
    fn mul_add(self, b: Self, c: Self) -> Self {
        // SAFETY: the processor has AVX-512 F, see the module.
        unsafe { Avx512(_mm512_fmadd_ps(self.0, b.0, c.0)) }
    }
    #[inline(always)]
    fn neg_mul_add(self, b: Self, c: Self) -> Self {
        // SAFETY: the processor has AVX-512 F, see the module.
        unsafe { Avx512(_mm512_fnmadd_ps(self.0, b.0, c.0)) }
    }
    #[inline(always)]
    fn min(self, b: Self) -> Self {
        // SAFETY: the processor has AVX-512 F, see the module.
        unsafe { Avx512(_mm512_min_ps(self.0, b.0)) }
    }
    #[inline(always)]
    fn max(self, b: Self) -> Self {
        // SAFETY: the processor has AVX-512 F, see the module.
        unsafe { Avx512(_mm512_max_ps(self.0, b.0)) }
    }
    #[inline(always)]
    fn if_below(self, bound: Self, x: Self, y: Self) -> Self {
        // SAFETY: the processor has AVX-512 F, see the module.
        unsafe {
            let below = _mm512_cmp_ps_mask::<_CMP_LT_OQ>(self.0, bound.0);
            Avx512(_mm512_mask_blend_ps(below, y.0, x.0))
        }
    }
    #[inline(always)]
    fn repeated(v: &[f32], shift: u32) -> Self {
        assert!(v.len() >= LANES >> shift);
        // SAFETY: so many numbers are there, and no others are loaded; the processor has AVX-512 F, see the module.
        unsafe {
            let lanes = _mm512_setr_epi32(0, 1, 2, 3, 4, 5, 6, 7, 8, 9, 10, 11, 12, 13, 14, 15);
            let at = _mm512_srl_epi32(lanes, _mm_cvtsi32_si128(shift as i32));
            let mask = ((1u32 << (LANES >> shift)) - 1) as u16;
            Avx512(_mm512_permutexvar_ps(at, _mm512_maskz_loadu_ps(mask, v.as_ptr())))
        }
    }
    #[inline(always)]
    fn least(self) -> (usize, f32) {
        // SAFETY: the processor has AVX-512 F, see the module.
        let (mask, least) = unsafe {
            let least = _mm512_reduce_min_ps(self.0);
            (_mm512_cmp_ps_mask::<_CMP_LE_OQ>(self.0, _mm512_set1_ps(least)), least)
        };
        ((mask.trailing_zeros() as usize).min(LANES - 1), least)
    }
    #[inline(always)]
    fn total(self) -> f32 {
        // SAFETY: the processor has AVX-512 F, see the module.
        unsafe { Avx2(_mm512_castps512_ps256(self.0), upper(self.0)).total() }
    }
    #[inline(always)]
    fn round(self) -> Self {
        // SAFETY: the processor has AVX-512 F, see the module.
        unsafe { Avx512(_mm512_roundscale_ps::<_MM_FROUND_TO_NEAREST_INT>(self.0)) }
    }

    type Ints = __m512i;

    #[inline(always)]
    fn ints_of(v: &[u8]) -> Self::Ints {
        // SAFETY: as many bytes as there are, 64 at most, are read; the processor has AVX-512 BW, see the module.
        unsafe { _mm512_maskz_loadu_epi8(first_bytes(v.len()), v.as_ptr().cast()) }
    }
    #[inline(always)]
    fn ints(v: &[u8; 64]) -> Self::Ints {
        // SAFETY: 64 bytes are there; the processor has AVX-512 F, see the module.
        unsafe { _mm512_loadu_si512(v.as_ptr().cast()) }
    }
    #[inline(always)]
    fn ints_u16(v: &[u8; 32]) -> Self::Ints {
        // SAFETY: 32 bytes are there; the processor has AVX-512 F, see the module.
        unsafe { _mm512_cvtepu16_epi32(_mm256_loadu_si256(v.as_ptr().cast())) }
    }
    #[inline(always)]
    fn ints_u8(v: &[u8; 16]) -> Self::Ints {
        // SAFETY: 16 bytes are there; the processor has AVX-512 F, see the module.
        unsafe { _mm512_cvtepu8_epi32(_mm_loadu_si128(v.as_ptr().cast())) }
    }
    #[inline(always)]
    fn shift_right(v: Self::Ints, bits: u32) -> Self::Ints {
        // SAFETY: the processor has AVX-512 F, see the module.
        unsafe { _mm512_srl_epi32(v, _mm_cvtsi32_si128(bits as i32)) }
    }
    #[inline(always)]
    fn from_i8(v: &[u8; 16]) -> Self {
        // SAFETY: 16 bytes are there; the processor has AVX-512 F, see the module.
        unsafe { Avx512(_mm512_cvtepi32_ps(_mm512_cvtepi8_epi32(_mm_loadu_si128(v.as_ptr().cast())))) }
    }
    #[inline(always)]
    fn from_u8(v: &[u8; 16]) -> Self {
        // SAFETY: the processor has AVX-512 F, see the module.
        unsafe { Avx512(_mm512_cvtepi32_ps(Self::ints_u8(v))) }
    }
    #[inline(always)]
    fn from_f32(v: &[u8; 64]) -> Self {
        // SAFETY: 64 bytes are there; the processor has AVX-512 F, see the module.
        unsafe { Avx512(_mm512_loadu_ps(v.as_ptr().cast())) }
    }
    #[inline(always)]
    fn from_f16(v: &[u8; 32]) -> Self {
        // SAFETY: 32 bytes are there; the processor has AVX-512 F, see the module.
        unsafe { Avx512(_mm512_cvtph_ps(_mm256_loadu_si256(v.as_ptr().cast()))) }
    }
    #[inline(always)]
    fn lookup(table: Self, at: Self::Ints) -> Self {
        // The instruction looks at the lowest four bits alone.
        // SAFETY: the processor has AVX-512 F, see the module.
        unsafe { Avx512(_mm512_permutexvar_ps(at, table.0)) }
    }
    #[inline(always)]
    fn lookup_64(table: &[f32; 64], at: Self::Ints) -> Self {
        // SAFETY: all four loads lie inside the table; the processor has AVX-512 F, see the module.
        unsafe {
            let p = table.as_ptr();
            let (a, b) = (_mm512_loadu_ps(p), _mm512_loadu_ps(p.add(16)));
            let (c, d) = (_mm512_loadu_ps(p.add(32)), _mm512_loadu_ps(p.add(48)));
            // Each looks at the lowest five bits alone.
            let (low, high) = (_mm512_permutex2var_ps(a, at, b), _mm512_permutex2var_ps(c, at, d));
            Avx512(_mm512_mask_blend_ps(_mm512_test_epi32_mask(at, _mm512_set1_epi32(32)), low, high))
        }
    }
    #[inline(always)]
    fn lookup_256(table: &[f32; 256], at: Self::Ints) -> Self {
        // SAFETY: masked indices lie inside the table; the processor has AVX-512 F, see the module.
        unsafe {
            let at = _mm512_and_si512(at, _mm512_set1_epi32(255));
            Avx512(_mm512_i32gather_ps::<4>(at, table.as_ptr()))
        }
    }
    #[inline(always)]
    fn power_of_two(self) -> Self {
        // SAFETY: the processor has AVX-512 F, see the module.
        unsafe {
            let biased = _mm512_add_epi32(_mm512_cvtps_epi32(self.0), _mm512_set1_epi32(127));
            Avx512(_mm512_castsi512_ps(_mm512_slli_epi32::<23>(biased)))
        }
    }
    #[inline(always)]
    fn turn(v: [Self; LANES]) -> [Self; LANES] {
        // SAFETY: the processor has AVX-512 F, see the module.
        unsafe {
            // Of each four rows, columns c, 4 + c, 8 + c and 12 + c in the four parts of `fours[.. + c]`.
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
            let mut turned = v;
            for c in 0..4 {
                let [p, q, r, s] = [fours[c].0, fours[4 + c].0, fours[8 + c].0, fours[12 + c].0];
                // Parts 0 and 2, and parts 1 and 3.
                let (even, even_2) = (_mm512_shuffle_f32x4::<0x88>(p, q), _mm512_shuffle_f32x4::<0x88>(r, s));
                let (odd, odd_2) = (_mm512_shuffle_f32x4::<0xdd>(p, q), _mm512_shuffle_f32x4::<0xdd>(r, s));
                turned[c].0 = _mm512_shuffle_f32x4::<0x88>(even, even_2);
                turned[4 + c].0 = _mm512_shuffle_f32x4::<0x88>(odd, odd_2);
                turned[8 + c].0 = _mm512_shuffle_f32x4::<0xdd>(even, even_2);
                turned[12 + c].0 = _mm512_shuffle_f32x4::<0xdd>(odd, odd_2);
            }
            turned
        }
    }
    #[inline(always)]
    fn quarters(v: [Self; 4]) -> Self {
        // SAFETY: the processor has AVX-512 F, see the module.
        unsafe {
            let [a, b, c, d] = [v[0].0, v[1].0, v[2].0, v[3].0];
            let ab = _mm512_add_ps(_mm512_shuffle_f32x4::<0x44>(a, b), _mm512_shuffle_f32x4::<0xee>(a, b));
            let cd = _mm512_add_ps(_mm512_shuffle_f32x4::<0x44>(c, d), _mm512_shuffle_f32x4::<0xee>(c, d));
            let (even, odd) = (_mm512_shuffle_f32x4::<0x88>(ab, cd), _mm512_shuffle_f32x4::<0xdd>(ab, cd));
            Avx512(_mm512_add_ps(even, odd))
        }
    }
    #[inline(always)]
    fn totals_of_quarters(v: [Self; 4]) -> Self {
        // SAFETY: the processor has AVX-512 F, see the module.
        unsafe {
            let (a, b) = (_mm512_castps_pd(v[0].0), _mm512_castps_pd(v[1].0));
            let (c, d) = (_mm512_castps_pd(v[2].0), _mm512_castps_pd(v[3].0));
            let (low, high) = (_mm512_unpacklo_pd(a, b), _mm512_unpackhi_pd(a, b));
            let ab = _mm512_add_ps(_mm512_castpd_ps(low), _mm512_castpd_ps(high));
            let (low, high) = (_mm512_unpacklo_pd(c, d), _mm512_unpackhi_pd(c, d));
            let cd = _mm512_add_ps(_mm512_castpd_ps(low), _mm512_castpd_ps(high));
            let even = _mm512_shuffle_ps::<0b10_00_10_00>(ab, cd);
            let sums = _mm512_add_ps(even, _mm512_shuffle_ps::<0b11_01_11_01>(ab, cd));
            // The total of vector i of quarters q is lane 4 i + q.
            let order = _mm512_setr_epi32(0, 4, 8, 12, 1, 5, 9, 13, 2, 6, 10, 14, 3, 7, 11, 15);
            Avx512(_mm512_permutexvar_ps(order, sums))
        }
    }
    #[inline(always)]
    fn totals(v: [Self; 4]) -> [f32; 4] {
        // SAFETY: the processor has AVX-512 F, see the module.
        unsafe {
            let [a, b, c, d] = v;
            totals([
                _mm256_add_ps(_mm512_castps512_ps256(a.0), upper(a.0)),
                _mm256_add_ps(_mm512_castps512_ps256(b.0), upper(b.0)),
                _mm256_add_ps(_mm512_castps512_ps256(c.0), upper(c.0)),
                _mm256_add_ps(_mm512_castps512_ps256(d.0), upper(d.0)),
            ])
        }
    }
}
