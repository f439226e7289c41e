//! Options of the commands that generate text.

use super::executor::ExecutorArgs;
use super::runner::RunnerArgs;
use super::sampling::SamplingArgs;
use super::speculate_args::SpeculateArgs;
use crate::bundle::Verify;
use anemoe_bundle::Chain;
use anemoe_runtime::model::Model;
use std::path::Path;

/// Options of a model that generates text.
#[derive(clap::Args)]
pub struct ModelArgs {
    #[command(flatten)]
    pub sampling: SamplingArgs,
    #[command(flatten)]
    pub speculate: SpeculateArgs,
    #[command(flatten)]
    runner: RunnerArgs,
    #[command(flatten)]
    executor: ExecutorArgs,
    #[command(flatten)]
    pub verify: Verify,
}

impl ModelArgs {
    /// Checks the options of the executor.
    ///
    /// # Errors
    /// They contradict each other.
    pub fn check(&self) -> anyhow::Result<()> {
        self.executor.backend().map(drop)
    }

    /// Opens the model of a bundle, on the Neural Engine or on the CPU.
    ///
    /// # Errors
    /// The options contradict each other, or the bundle cannot be run.
    pub fn open(&self, bundle: &Path, chain: &Chain) -> anyhow::Result<Model> {
        let cpu = self.executor.backend()?;
        Ok(match self.runner.core_ml(bundle, chain, !self.executor.is_default())? {
            Some(core_ml) => Model::open(bundle, &core_ml)?,
            None => Model::open(bundle, &cpu)?,
        })
    }
}
