//! Options of the commands that generate text.

use super::drafter::{DrafterArgs, Running};
use super::executor::ExecutorArgs;
use super::runner::RunnerArgs;
use super::sampling::SamplingArgs;
use super::speculate_args::SpeculateArgs;
use crate::bundle::Verify;
use crate::ui::Ui;
use anemoe_bundle::Chain;
use anemoe_runtime::model::Model;
use anemoe_runtime::speculate::{Mode, Speculation};
use anemoe_text::tokenizer::Tokenizer;
use std::path::Path;

/// Options of a model that generates text.
#[derive(clap::Args)]
pub struct ModelArgs {
    #[command(flatten)]
    pub sampling: SamplingArgs,
    #[command(flatten)]
    pub speculate: SpeculateArgs,
    #[command(flatten)]
    drafter: DrafterArgs,
    #[command(flatten)]
    runner: RunnerArgs,
    #[command(flatten)]
    executor: ExecutorArgs,
    #[command(flatten)]
    pub verify: Verify,
}

impl ModelArgs {
    /// Checks the options of the executor, and that a drafter may draft.
    pub fn check(&self) -> anyhow::Result<()> {
        anyhow::ensure!(
            self.drafter.drafter.is_none() || self.speculate.mode() != Mode::Off,
            "--drafter has no effect with --speculate off"
        );
        self.executor.backend().map(drop)
    }

    /// Tells whether a drafter is named.
    pub fn names_drafter(&self) -> bool {
        self.drafter.drafter.is_some()
    }

    fn running(&self) -> Running<'_> {
        Running { runner: &self.runner, executor: &self.executor, verify: self.verify }
    }

    /// Opens the model of a bundle, on the Neural Engine or on the CPU.
    pub fn open(&self, bundle: &Path, chain: &Chain) -> anyhow::Result<Model> {
        self.running().open(bundle, chain)
    }

    /// Makes the settings of drafts for `target`, and opens its drafter.
    pub fn speculation(
        &self,
        target: &Model,
        tokenizer: Option<&Tokenizer>,
        ui: &Ui,
    ) -> anyhow::Result<Speculation> {
        let mut speculation = self.speculate.options(tokenizer)?;
        if speculation.mode != Mode::Off {
            speculation.drafter = self.drafter.open(target, &self.running(), ui)?;
        }
        Ok(speculation)
    }
}
