//! Vectors of one instruction set behind common traits, and the one place that chooses the instruction set.
//!
//! ```text
//! trait     holds                 adds
//! F32x16    16 f32 lanes          arithmetic, table lookups, horizontal sums
//! U8x64     64 bytes              lookups of 8-bit codes, u8 x i8 dot products
//! I16x32    32 words              lookups of 16-bit words, i16 x i16 dot products
//! Simd      all of these          `call`: compiles a [`Kernel`] for the instruction set
//! Bf16x32   32 bf16               bf16 dot products (AVX512-BF16 only, and the scalar reference)
//! ```
//!
//! A value of a vector type exists only in functions entered through [`dispatch`] or [`Simd::call`], which check that
//! the processor has the instructions. The SAFETY comments of the backends rely on that.

use crate::Isa;

#[cfg(target_arch = "x86_64")]
pub(crate) mod avx2;
#[cfg(target_arch = "x86_64")]
pub(crate) mod avx512;
#[cfg(target_arch = "aarch64")]
pub(crate) mod neon;
pub(crate) mod scalar;
#[cfg(test)]
mod tests;
mod traits;

pub(crate) use scalar::Scalar;
pub(crate) use traits::{
    Bf16Kernel, Bf16x32, F32x16, I16x32, Kernel, LANES, MIN_EXPONENT, ROUND, Simd, U8x64,
};

/// Runs a kernel with the instructions of `isa`, which the processor must have. Returns the kernel's output.
///
/// This and [`dispatch_bf16`] are the only places that match on an instruction set.
pub(crate) fn dispatch<K: Kernel>(isa: Isa, kernel: K) -> K::Output {
    // The usual case costs one load.
    assert!(isa == Isa::best() || isa.is_available());
    // SAFETY: the processor has the instructions, as asserted.
    unsafe {
        match isa {
            Isa::Scalar => Scalar::call(kernel),
            #[cfg(target_arch = "x86_64")]
            Isa::AvxVnni if K::HAS_DOT_PRODUCTS => avx2::Avx2::<true>::call(kernel),
            #[cfg(target_arch = "x86_64")]
            Isa::Avx2 | Isa::AvxVnni => avx2::Avx2::<false>::call(kernel),
            #[cfg(target_arch = "x86_64")]
            Isa::Avx512 if K::PERMUTES_BYTES && std::arch::is_x86_feature_detected!("avx512vbmi") => {
                avx512::Avx512::<true>::call(kernel)
            }
            #[cfg(target_arch = "x86_64")]
            Isa::Avx512 => avx512::Avx512::<false>::call(kernel),
            #[cfg(target_arch = "aarch64")]
            Isa::Neon => neon::call_fastest(kernel),
            _ => unreachable!("asserted above"),
        }
    }
}

/// Runs a kernel with the bf16 instructions of `isa`, or with scalar code that gives the same bits.
pub(crate) fn dispatch_bf16<K: Bf16Kernel>(isa: Isa, kernel: K) {
    #[cfg(target_arch = "x86_64")]
    if has_bf16(isa) {
        // SAFETY: the processor has the instructions.
        return unsafe { avx512::call_bf16(kernel) };
    }
    let _ = isa;
    kernel.run::<Scalar>();
}

/// Tells whether the processor has bf16 dot products among the instructions of `isa`.
pub(crate) fn has_bf16(isa: Isa) -> bool {
    #[cfg(target_arch = "x86_64")]
    return isa >= Isa::Avx512 && std::arch::is_x86_feature_detected!("avx512bf16");
    #[cfg(not(target_arch = "x86_64"))]
    {
        let _ = isa;
        false
    }
}

/// Tells whether `isa` looks up fp16 tables of `entries` in a few instructions, see [`F32x16::LARGEST_HALF_TABLE`].
pub(crate) fn has_half_tables(isa: Isa, entries: usize) -> bool {
    struct Asked;
    impl Kernel for Asked {
        type Output = usize;
        #[inline(always)]
        fn run<S: Simd>(self) -> usize {
            S::LARGEST_HALF_TABLE
        }
    }
    entries <= dispatch(isa, Asked)
}

/// Tells whether the fastest instructions of `isa` have dot products of bytes.
pub(crate) fn multiplies_bytes(isa: Isa) -> bool {
    struct Asked;
    impl Kernel for Asked {
        type Output = bool;
        const HAS_DOT_PRODUCTS: bool = true;
        #[inline(always)]
        fn run<S: Simd>(self) -> bool {
            !S::MULTIPLIES_BYTES_AS_WORDS
        }
    }
    dispatch(isa, Asked)
}

/// Holds the arguments of a function as a [`Kernel`], see [`simd_fn`].
pub(crate) struct KernelArguments<T, F>(pub T, pub std::marker::PhantomData<F>);

/// Defines a function that runs a generic function, with constants after the instruction set if there are some, with the
/// instructions of [`Isa::best`], or of an argument `isa`.
macro_rules! simd_fn {
    ($(#[$doc:meta])* $vis:vis fn $name:ident($($arg:ident: $ty:ty),* $(,)?) $(-> $out:ty)? = $generic:ident $(, $const:tt)*) => {
        $(#[$doc])*
        $vis fn $name($($arg: $ty),*) $(-> $out)? {
            $crate::simd::simd_fn!(@call $crate::Isa::best(), ($($arg: $ty),*), ($($out)?), $generic $(, $const)*)
        }
    };
    ($(#[$doc:meta])* $vis:vis fn $name:ident($isa:ident: Isa; $($arg:ident: $ty:ty),* $(,)?) $(-> $out:ty)? = $generic:ident $(, $const:tt)*) => {
        $(#[$doc])*
        $vis fn $name($isa: $crate::Isa, $($arg: $ty),*) $(-> $out)? {
            $crate::simd::simd_fn!(@call $isa, ($($arg: $ty),*), ($($out)?), $generic $(, $const)*)
        }
    };
    (@output) => { () };
    (@output $out:ty) => { $out };
    (@call $isa:expr, ($($arg:ident: $ty:ty),*), ($($out:ty)?), $generic:ident $(, $const:tt)*) => {{
        struct Name;
        impl $crate::simd::Kernel for $crate::simd::KernelArguments<($($ty,)*), Name> {
            type Output = $crate::simd::simd_fn!(@output $($out)?);
            #[inline(always)]
            fn run<S: $crate::simd::Simd>(self) -> Self::Output {
                let ($($arg,)*) = self.0;
                $generic::<S $(, $const)*>($($arg),*)
            }
        }
        $crate::simd::dispatch($isa, $crate::simd::KernelArguments(($($arg,)*), std::marker::PhantomData::<Name>))
    }};
}
pub(crate) use simd_fn;
