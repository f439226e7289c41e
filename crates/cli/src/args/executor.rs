//! Options of the CPU executor, for the commands that run bundles.

use super::numbers::choice;
use anemoe_runtime::cpu::{CpuBackend, Options, Precision, Products};
use clap::builder::TypedValueParser;

/// Makes the parser of a kind of numbers; what it means for results and for states is said where it is an option.
pub fn precision() -> impl TypedValueParser<Value = Precision> {
    choice([("fp16", Precision::Fp16), ("fp32", Precision::Fp32)])
}

/// Options of the CPU executor.
#[derive(Clone, Debug, clap::Args)]
pub struct ExecutorArgs {
    /// fp32 computes in f32 on the stored weights; fp16 rounds every result, as the device does, and is slow.
    #[arg(long, value_parser = precision(), default_value = "fp32")]
    precision: Precision,
    /// Compute every product exactly. By default activations are rounded to 8 bits where weights have at most 4 bits, and to 15
    /// bits where they are integers of 8 or indices of 6, which changes less than a tenth of what compression by the kind does, and
    /// is faster. Where the kind keeps the checkpoint's weights (MXFP4, the lattice of Q4_0), that rounding is the only change.
    #[arg(long)]
    exact: bool,
    /// Round activations to 8 bits also where weights are tables or integers of more than 4 bits, and multiply bf16 where the
    /// processor has it and weights are large and of fp16: faster, mostly for prompts, and less exact.
    #[arg(long, conflicts_with = "exact")]
    fast: bool,
    /// Run every operation by itself instead of fused: slow, to compare with.
    #[arg(long)]
    no_fuse: bool,
    /// Element type of keys and values: fp16 as on the device, or fp32 with twice the memory.
    #[arg(long, value_parser = precision(), default_value = "fp16", value_name = "KIND")]
    states: Precision,
}

impl ExecutorArgs {
    /// Returns the arithmetic of products.
    pub fn products(&self) -> Products {
        match (self.fast, self.exact || self.no_fuse || self.precision == Precision::Fp16) {
            (true, _) => Products::Fast,
            (false, true) => Products::Exact,
            (false, false) => Products::Usual,
        }
    }

    /// Names the mode: `default`, `exact` or `fast`, and the first other option that does not have its default.
    pub fn mode(&self) -> String {
        let mut mode = String::from(match self.products() {
            Products::Usual => "default",
            Products::Exact => "exact",
            Products::Fast => "fast",
        });
        if self.precision == Precision::Fp16 {
            mode += ", every result in fp16";
        } else if self.no_fuse {
            mode += ", not fused";
        } else if self.states == Precision::Fp32 {
            mode += ", states in fp32";
        }
        mode
    }

    /// Tells whether all options have their defaults.
    pub fn is_default(&self) -> bool {
        let fp32 = self.precision == Precision::Fp32 && self.states == Precision::Fp16;
        fp32 && !self.exact && !self.fast && !self.no_fuse
    }

    /// Makes the CPU backend with these options.
    pub fn backend(&self) -> anyhow::Result<CpuBackend> {
        let fused = self.precision == Precision::Fp32 && !self.no_fuse;
        if self.fast && !fused {
            anyhow::bail!(
                "--fast goes with fused functions in fp32: leave out --no-fuse and --precision fp16"
            );
        }
        Ok(CpuBackend {
            options: Options {
                precision: self.precision,
                fuse: !self.no_fuse,
                half_states: self.states == Precision::Fp16,
                products: self.products(),
                ..Options::default()
            },
        })
    }
}
