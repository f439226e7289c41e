//! How the CPU rounds, as an option of the commands that run packages.

use anemoe_runtime::cpu::Precision;

/// See [`Precision`].
#[derive(Clone, Copy, Debug, clap::ValueEnum)]
pub enum PrecisionArg {
    /// Every fp16 result is rounded, as the device does.
    Fp16,
    /// Nothing is rounded.
    Fp32,
}

impl From<PrecisionArg> for Precision {
    fn from(p: PrecisionArg) -> Precision {
        match p {
            PrecisionArg::Fp16 => Precision::Fp16,
            PrecisionArg::Fp32 => Precision::Fp32,
        }
    }
}
