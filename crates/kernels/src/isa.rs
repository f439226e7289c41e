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
    /// As `ANEMOE_CPU` says it.
    pub fn name(self) -> &'static str {
        match self {
            Isa::Scalar => "scalar",
            Isa::Neon => "neon",
            Isa::Avx2 => "avx2",
            Isa::Avx512 => "avx512",
            Isa::Amx => "amx",
        }
    }

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

    /// The one that the environment variable `ANEMOE_CPU` names (`scalar`, `neon`, `avx2`, `avx512`, `amx`), if it is set.
    ///
    /// # Errors
    /// It names none of them, or one that the processor lacks.
    pub fn asked_for() -> Result<Option<Isa>, String> {
        let Some(name) = std::env::var_os("ANEMOE_CPU").filter(|name| !name.is_empty()) else {
            return Ok(None);
        };
        let wanted = ALL.into_iter().find(|isa| isa.name() == name);
        // Only what is wanted is asked for: of tiles a process has to ask its system.
        match wanted {
            Some(isa) if isa.is_available() => Ok(Some(isa)),
            _ => {
                let own: Vec<_> = Isa::available().map(Isa::name).collect();
                let name = name.to_string_lossy();
                Err(format!("ANEMOE_CPU={name}: this processor has {}", own.join(", ")))
            }
        }
    }

    /// The one that is [asked for](Isa::asked_for), or the widest that this processor has; [`Isa::Amx`], which no processor
    /// has timed yet, only where it is asked for.
    pub fn best() -> Isa {
        static BEST: OnceLock<Isa> = OnceLock::new();
        *BEST.get_or_init(|| match Isa::asked_for() {
            Ok(Some(isa)) => isa,
            _ => ALL.into_iter().rfind(|isa| *isa != Isa::Amx && isa.is_available()).unwrap_or(Isa::Scalar),
        })
    }
}
