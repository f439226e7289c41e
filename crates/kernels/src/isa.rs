//! Which instructions this processor has.

use std::sync::OnceLock;

/// An instruction set that kernels are compiled for.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord)]
pub enum Isa {
    /// What every processor has.
    Scalar,
    /// NEON of AArch64, and its products of bytes where the processor has them.
    Neon,
    /// AVX2, FMA and F16C.
    Avx2,
    /// AVX-512 F, BW and VL, besides those of [`Isa::Avx2`].
    Avx512,
    /// Tiles of bytes (AMX of x86-64) for batches of integers; [`Isa::Avx512`] with VNNI for everything else.
    Amx,
}

const ALL: [Isa; 5] = [Isa::Scalar, Isa::Neon, Isa::Avx2, Isa::Avx512, Isa::Amx];

impl Isa {
    /// This processor has it.
    pub fn is_available(self) -> bool {
        #[cfg(target_arch = "x86_64")]
        {
            let avx2 = || {
                std::arch::is_x86_feature_detected!("avx2")
                    && std::arch::is_x86_feature_detected!("fma")
                    && std::arch::is_x86_feature_detected!("f16c")
            };
            match self {
                Isa::Scalar => true,
                Isa::Neon => false,
                Isa::Avx2 => avx2(),
                Isa::Avx512 => {
                    avx2()
                        && std::arch::is_x86_feature_detected!("avx512f")
                        && std::arch::is_x86_feature_detected!("avx512bw")
                        && std::arch::is_x86_feature_detected!("avx512vl")
                }
                Isa::Amx => Isa::Avx512.is_available() && crate::fast::amx::is_available(),
            }
        }
        #[cfg(not(target_arch = "x86_64"))]
        {
            let neon = cfg!(all(target_arch = "aarch64", target_feature = "neon"));
            self == Isa::Scalar || self == Isa::Neon && neon
        }
    }

    /// Those that this processor has.
    pub fn available() -> impl DoubleEndedIterator<Item = Isa> {
        ALL.into_iter().filter(|isa| isa.is_available())
    }

    /// The widest that this processor has, or the one that the environment variable `ANEMOE_CPU` names (`scalar`, `neon`,
    /// `avx2`, `avx512`, `amx`) if the processor has it.
    pub fn best() -> Isa {
        static BEST: OnceLock<Isa> = OnceLock::new();
        *BEST.get_or_init(|| {
            let wanted = match std::env::var("ANEMOE_CPU").as_deref() {
                Ok("scalar") => Isa::Scalar,
                Ok("neon") => Isa::Neon,
                Ok("avx2") => Isa::Avx2,
                Ok("avx512") => Isa::Avx512,
                _ => Isa::Amx,
            };
            // Only what is wanted is asked for: of tiles a process has to ask its system.
            ALL.into_iter().rfind(|isa| *isa <= wanted && isa.is_available()).unwrap_or(Isa::Scalar)
        })
    }
}
