//! Sixteen f32 lanes with the instructions of one [`crate::Isa`], so that a kernel is written once.
//!
//! Values of the wider kinds exist only inside functions that were entered after the processor was asked for their
//! instructions; that is what the SAFETY lines rely on.

/// Number of lanes.
pub(crate) const LANES: usize = 16;

/// Sixteen numbers.
pub(crate) trait Lanes: Copy {
    fn splat(v: f32) -> Self;
    fn load(v: &[f32; LANES]) -> Self;
    fn store(self, out: &mut [f32; LANES]);
    fn add(self, b: Self) -> Self;
    fn mul(self, b: Self) -> Self;
    fn div(self, b: Self) -> Self;
    /// `self * b + c`
    fn mul_add(self, b: Self, c: Self) -> Self;
    /// `c - self * b`
    fn neg_mul_add(self, b: Self, c: Self) -> Self;
    fn min(self, b: Self) -> Self;
    fn max(self, b: Self) -> Self;
    /// To the nearest integer, ties to even; magnitudes below 2^22.
    fn round(self) -> Self;

    /// `x` where `self < bound`, else `y`.
    fn if_below(self, bound: Self, x: Self, y: Self) -> Self;

    /// The first of the smallest lanes, and its number. No lane is NaN.
    #[inline(always)]
    fn least(self) -> (usize, f32) {
        let mut v = [0f32; LANES];
        self.store(&mut v);
        let mut best = 0;
        for g in 1..LANES {
            if v[g] < v[best] {
                best = g;
            }
        }
        (best, v[best])
    }

    /// The sum of all lanes, by halves.
    #[inline(always)]
    fn total(self) -> f32 {
        let mut v = [0f32; LANES];
        self.store(&mut v);
        for width in [8, 4, 2, 1] {
            for g in 0..width {
                v[g] += v[g + width];
            }
        }
        v[0]
    }
}

/// Adding and subtracting it rounds to the nearest integer, ties to even, for magnitudes below 2^22.
pub(crate) const ROUND: f32 = 12_582_912.0;

/// What every processor can do.
#[derive(Clone, Copy)]
pub(crate) struct Plain([f32; LANES]);

impl Plain {
    #[inline(always)]
    fn with(self, b: Self, f: impl Fn(f32, f32) -> f32) -> Self {
        let mut out = self.0;
        for (o, b) in out.iter_mut().zip(b.0) {
            *o = f(*o, b);
        }
        Plain(out)
    }
}

impl Lanes for Plain {
    #[inline(always)]
    fn splat(v: f32) -> Self {
        Plain([v; LANES])
    }
    #[inline(always)]
    fn load(v: &[f32; LANES]) -> Self {
        Plain(*v)
    }
    #[inline(always)]
    fn store(self, out: &mut [f32; LANES]) {
        *out = self.0;
    }
    #[inline(always)]
    fn add(self, b: Self) -> Self {
        self.with(b, |a, b| a + b)
    }
    #[inline(always)]
    fn mul(self, b: Self) -> Self {
        self.with(b, |a, b| a * b)
    }
    #[inline(always)]
    fn div(self, b: Self) -> Self {
        self.with(b, |a, b| a / b)
    }
    #[inline(always)]
    fn mul_add(self, b: Self, c: Self) -> Self {
        self.mul(b).add(c)
    }
    #[inline(always)]
    fn neg_mul_add(self, b: Self, c: Self) -> Self {
        c.with(self.mul(b), |c, p| c - p)
    }
    #[inline(always)]
    fn min(self, b: Self) -> Self {
        self.with(b, |a, b| if a < b { a } else { b })
    }
    #[inline(always)]
    fn max(self, b: Self) -> Self {
        self.with(b, |a, b| if a > b { a } else { b })
    }
    #[inline(always)]
    fn if_below(self, bound: Self, x: Self, y: Self) -> Self {
        let mut out = y.0;
        for g in 0..LANES {
            out[g] = if self.0[g] < bound.0[g] { x.0[g] } else { y.0[g] };
        }
        Plain(out)
    }
    #[inline(always)]
    fn round(self) -> Self {
        let mut out = self.0;
        for o in &mut out {
            *o = *o + ROUND - ROUND;
        }
        Plain(out)
    }
}

#[cfg(target_arch = "x86_64")]
pub(crate) mod x86 {
    use super::{LANES, Lanes};
    use std::arch::x86_64::*;

    /// AVX2 and FMA.
    #[derive(Clone, Copy)]
    pub(crate) struct Avx2(__m256, __m256);

    /// AVX-512 F.
    #[derive(Clone, Copy)]
    pub(crate) struct Avx512(__m512);

    macro_rules! both {
        ($f:ident, $($v:expr),*) => {
            // SAFETY: the processor has AVX2 and FMA, see the module.
            unsafe { Avx2($f($($v.0),*), $f($($v.1),*)) }
        };
    }

    const NEAREST: i32 = _MM_FROUND_TO_NEAREST_INT | _MM_FROUND_NO_EXC;

    impl Lanes for Avx2 {
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
                let half = |v, b, x, y| _mm256_blendv_ps(y, x, _mm256_cmp_ps::<_CMP_LT_OQ>(v, b));
                Avx2(half(self.0, bound.0, x.0, y.0), half(self.1, bound.1, x.1, y.1))
            }
        }
        #[inline(always)]
        fn round(self) -> Self {
            // SAFETY: the processor has AVX2, see the module.
            unsafe { Avx2(_mm256_round_ps::<NEAREST>(self.0), _mm256_round_ps::<NEAREST>(self.1)) }
        }
    }

    impl Lanes for Avx512 {
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
            unsafe { _mm512_reduce_add_ps(self.0) }
        }
        #[inline(always)]
        fn round(self) -> Self {
            // SAFETY: the processor has AVX-512 F, see the module.
            unsafe { Avx512(_mm512_roundscale_ps::<_MM_FROUND_TO_NEAREST_INT>(self.0)) }
        }
    }
}
