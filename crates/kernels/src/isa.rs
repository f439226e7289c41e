//! Detects and chooses the instruction set.

use std::sync::OnceLock;

/// Names an instruction set that kernels are compiled for.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord)]
pub enum Isa {
    /// Portable code, the reference.
    Scalar,
    /// NEON of AArch64, and its dot products of bytes where the processor has them.
    Neon,
    /// AVX2, FMA and F16C.
    Avx2,
    /// AVX-VNNI on top of [`Isa::Avx2`]: dot products of bytes and words, for processors without AVX-512.
    AvxVnni,
    /// AVX-512 F, BW, VL and VNNI on top of [`Isa::Avx2`]; VBMI and BF16 where the processor has them.
    Avx512,
}

const ALL: [Isa; 5] = [Isa::Scalar, Isa::Neon, Isa::Avx2, Isa::AvxVnni, Isa::Avx512];

impl Isa {
    /// Returns the instruction set's name in the environment variable `ANEMOE_CPU`.
    pub fn name(self) -> &'static str {
        match self {
            Isa::Scalar => "scalar",
            Isa::Neon => "neon",
            Isa::Avx2 => "avx2",
            Isa::AvxVnni => "avxvnni",
            Isa::Avx512 => "avx512",
        }
    }

    /// Tells whether this processor has the instruction set.
    pub fn is_available(self) -> bool {
        #[cfg(target_arch = "x86_64")]
        {
            macro_rules! has { ($($feature:tt)+) => { $(std::arch::is_x86_feature_detected!($feature))&&+ } }
            let avx2 = || has!("avx2" "fma" "f16c");
            match self {
                Isa::Scalar => true,
                Isa::Neon => false,
                Isa::Avx2 => avx2(),
                Isa::AvxVnni => avx2() && has!("avxvnni"),
                Isa::Avx512 => avx2() && has!("avx512f" "avx512bw" "avx512vl" "avx512vnni"),
            }
        }
        #[cfg(not(target_arch = "x86_64"))]
        {
            let neon = cfg!(all(target_arch = "aarch64", target_feature = "neon"));
            self == Isa::Scalar || self == Isa::Neon && neon
        }
    }

    /// Returns the fewest multiplications of a thread in a matmul: one to three microseconds of work. A further thread delays the
    /// start and the end of a job by .2 to .3 us (examples/pool.rs on 16 threads).
    pub(crate) fn grain(self) -> usize {
        if self >= Isa::Avx512 { 1 << 17 } else { 1 << 15 }
    }

    /// Iterates over the instruction sets that this processor has.
    pub fn available() -> impl DoubleEndedIterator<Item = Isa> {
        ALL.into_iter().filter(|isa| isa.is_available())
    }

    /// Reads the environment variable `ANEMOE_CPU` (`scalar`, `neon`, `avx2`, `avxvnni`, `avx512`); `None` where it is not set.
    ///
    /// # Errors
    /// The name is unknown, or this processor lacks the instruction set.
    pub fn asked_for() -> Result<Option<Isa>, String> {
        let Some(name) = std::env::var_os("ANEMOE_CPU").filter(|name| !name.is_empty()) else {
            return Ok(None);
        };
        let wanted = ALL.into_iter().find(|isa| isa.name() == name);
        match wanted {
            Some(isa) if isa.is_available() => Ok(Some(isa)),
            _ => {
                let own: Vec<_> = Isa::available().map(Isa::name).collect();
                let name = name.to_string_lossy();
                Err(format!("ANEMOE_CPU={name}: this processor has {}", own.join(", ")))
            }
        }
    }

    /// Returns the set that is [asked for](Isa::asked_for), or else the widest that this processor has. No processor has timed
    /// NEON; it is taken all the same, since scalar code is the only other choice there.
    pub fn best() -> Isa {
        static BEST: OnceLock<Isa> = OnceLock::new();
        *BEST.get_or_init(|| match Isa::asked_for() {
            Ok(Some(isa)) => isa,
            _ => Isa::available().next_back().unwrap_or(Isa::Scalar),
        })
    }
}
