//! Options of the commands that generate text.

use super::executor::ExecutorArgs;
use super::runner::RunnerArgs;
use super::sampling::SamplingArgs;
use super::speculate_args::SpeculateArgs;
use crate::bundle::Verify;
use crate::target::expect_bundle;
use crate::ui::Ui;
use anemoe_bundle::Chain;
use anemoe_runtime::model::Model;
use anemoe_runtime::speculate::{Mode, Speculation};
use anemoe_text::tokenizer::Tokenizer;
use anyhow::Context;
use std::path::Path;
use std::sync::Arc;

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
    pub fn check(&self) -> anyhow::Result<()> {
        self.executor.backend().map(drop)
    }

    /// Opens the model of a bundle, on the Neural Engine or on the CPU.
    pub fn open(&self, bundle: &Path, chain: &Chain) -> anyhow::Result<Model> {
        let cpu = self.executor.backend()?;
        Ok(match self.runner.core_ml(bundle, chain, !self.executor.is_default())? {
            Some(core_ml) => Model::open(bundle, &core_ml)?,
            None => Model::open(bundle, &cpu)?,
        })
    }

    /// Makes the settings of drafts for `target`, and opens the drafter, which has to have the same tokens.
    pub fn speculation(
        &self,
        target: &Model,
        tokenizer: Option<&Tokenizer>,
        ui: &Ui,
    ) -> anyhow::Result<Speculation> {
        let mut speculation = self.speculate.options(tokenizer)?;
        let Some(bundle) = &self.speculate.drafter else { return Ok(speculation) };
        expect_bundle(bundle)?;
        let chain = self.verify.open(bundle, ui)?;
        let sizes = [target.chain().model.vocab_size, chain.model.vocab_size];
        let own =
            tokenizer.context("--drafter needs the model's tokenizer, to compare the tokens of both")?;
        let others =
            Tokenizer::open(&bundle.join("tokenizer.json")).context("--drafter needs a tokenizer")?;
        // Rows behind the named tokens fill up a vocabulary.
        let vocabulary = sizes.into_iter().max().unwrap_or_default();
        if let Some((id, [own, others])) = own.difference(&others, vocabulary) {
            let (own, others) = (own.escape_debug(), others.escape_debug());
            anyhow::bail!(
                "--drafter {}: token {id} is `{others}`, and `{own}` in the model: a drafter needs the same tokens",
                bundle.display()
            );
        }
        if speculation.mode != Mode::Off {
            speculation.drafter = Some(Arc::new(self.open(bundle, &chain)?));
        }
        Ok(speculation)
    }
}
