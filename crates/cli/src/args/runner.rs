//! Backend of the commands that run bundles, as options.

use crate::ui::message;
use anemoe_bundle::Chain;
use anemoe_coreml::{CompiledModels, ComputeUnits, CoreMlBackend, CoreMlSettings};
use anemoe_mac::compiled_models;
use std::path::{Path, PathBuf};

/// A backend, by its name.
#[derive(Clone, Copy, Debug, PartialEq, Eq, clap::ValueEnum)]
pub enum BackendArg {
    Coreml,
    Cpu,
}

/// Options of the backend that runs packages.
#[derive(Clone, Debug, clap::Args)]
pub struct RunnerArgs {
    /// Backend that runs the bundle: `coreml` is the Neural Engine of a Mac, `cpu` runs everywhere [default:
    /// coreml on Apple silicon where the bundle is compiled, else cpu].
    #[arg(long, value_enum, value_name = "NAME")]
    backend: Option<BackendArg>,
    /// For coreml: most GB of packages that are loaded at the same time, each function counted; others go, the longest unused first.
    #[arg(long, value_name = "GB", value_parser = gigabytes)]
    max_loaded: Option<u64>,
    #[command(flatten)]
    cache: CompiledArgs,
}

/// Place of compiled models.
#[derive(Clone, Debug, Default, clap::Args)]
pub struct CompiledArgs {
    /// For coreml: folder of compiled models [default: `compiled` in the user's cache].
    #[arg(long, value_name = "DIR")]
    compiled: Option<PathBuf>,
}

/// Parses a positive number of GB, and returns bytes.
fn gigabytes(text: &str) -> Result<u64, String> {
    let number: Option<f64> = text.trim().parse().ok();
    let number = number.filter(|n| *n > 0.0 && *n < 1e6);
    number.map(|n| (n * 1e9) as u64).ok_or_else(|| format!("`{text}` is no number of GB"))
}

impl CompiledArgs {
    /// Returns the places of a bundle's compiled models for this system.
    pub fn models(&self, bundle: &Path, chain: &Chain) -> CompiledModels {
        compiled_models(self.compiled.clone(), bundle, chain)
    }
}

impl RunnerArgs {
    /// Chooses the backend: Core ML if asked for, or if available while `cpu_options` are not in use; none for the CPU.
    ///
    /// # Errors
    /// Core ML was asked for and cannot run this bundle.
    pub fn core_ml(
        &self,
        bundle: &Path,
        chain: &Chain,
        cpu_options: bool,
    ) -> anyhow::Result<Option<CoreMlBackend>> {
        let asked = self.backend == Some(BackendArg::Coreml);
        anyhow::ensure!(
            !(asked && cpu_options),
            "--backend coreml computes in fp16: --fast, --precision, --states and --no-fuse are options of --backend cpu"
        );
        anyhow::ensure!(
            self.max_loaded.is_none() || self.backend != Some(BackendArg::Cpu),
            "--max-loaded is an option of --backend coreml"
        );
        let is_apple = cfg!(all(target_os = "macos", target_arch = "aarch64"));
        if !asked && (self.backend.is_some() || cpu_options || !is_apple) {
            return Ok(None);
        }
        let compiled = self.cache.models(bundle, chain);
        if !asked && !compiled.is_complete() {
            let (missing, all) = (compiled.missing(), chain.shards.len());
            message(format!(
                "{missing} of {all} packages are not compiled for this system, so the CPU runs them; `anemoe compile` brings them to the Neural Engine"
            ));
            return Ok(None);
        }
        let settings = CoreMlSettings {
            compiled,
            max_loaded_bytes: self.max_loaded,
            units: ComputeUnits::CpuAndNeuralEngine,
        };
        match CoreMlBackend::new(settings) {
            Ok(backend) => Ok(Some(backend)),
            Err(why) if !asked => {
                message(format!("Core ML cannot run this bundle, so the CPU runs it: {why}"));
                Ok(None)
            }
            Err(why) => Err(why.into()),
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn gigabytes_are_positive_numbers() {
        assert_eq!(gigabytes("1.5"), Ok(1_500_000_000));
        for wrong in ["0", "-1", "x", "nan", "inf", ""] {
            assert!(gigabytes(wrong).is_err(), "{wrong}");
        }
    }
}
