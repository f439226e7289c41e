//! A model that drafts for another one, as an option.

use super::executor::ExecutorArgs;
use super::runner::RunnerArgs;
use crate::bundle::Verify;
use crate::target::expect_bundle;
use crate::ui::Ui;
use anemoe_bundle::Chain;
use anemoe_runtime::model::{AttachedAssistant, Model};
use anemoe_runtime::speculate::{DraftKind, DraftModel};
use anemoe_text::tokenizer::Tokenizer;
use anyhow::Context;
use std::path::{Path, PathBuf};
use std::sync::Arc;

/// Option of the model that drafts.
#[derive(clap::Args, Clone)]
pub struct DrafterArgs {
    /// Bundle of the model's assistant, or of a small model with the same tokens, which drafts where nothing repeats [default: the drafter in the bundle, see
    /// `build --drafter`].
    #[arg(long, value_name = "BUNDLE", value_hint = clap::ValueHint::DirPath)]
    pub drafter: Option<PathBuf>,
}

/// Options by which bundles are run.
#[derive(Clone, Copy)]
pub struct Running<'a> {
    pub runner: &'a RunnerArgs,
    pub executor: &'a ExecutorArgs,
    pub verify: Verify,
}

impl Running<'_> {
    /// Opens the model of a bundle, on the Neural Engine or on the CPU.
    pub fn open(&self, bundle: &Path, chain: &Chain) -> anyhow::Result<Model> {
        let cpu = self.executor.backend()?;
        Ok(match self.runner.core_ml(bundle, chain, !self.executor.is_default())? {
            Some(core_ml) => Model::open(bundle, &core_ml)?,
            None => Model::open(bundle, &cpu)?,
        })
    }
}

impl DrafterArgs {
    /// Opens the drafter of `target`: the one that is given, else the one in its bundle. It has to have the same tokens.
    pub fn open(
        &self,
        target: &Model,
        run: &Running<'_>,
        ui: &Ui,
    ) -> anyhow::Result<Option<Arc<DraftModel>>> {
        let (bundle, chain) = match (&self.drafter, &target.chain().drafter) {
            (Some(bundle), _) => {
                expect_bundle(bundle)?;
                (bundle.clone(), run.verify.open(bundle, ui)?)
            }
            (None, Some(inside)) => {
                let bundle = target.bundle().join(inside);
                let chain = Chain::read(&bundle)?;
                (bundle, chain)
            }
            (None, None) => return Ok(None),
        };
        let [own, others] = [target.bundle(), &bundle].map(|bundle| bundle.join("tokenizer.json"));
        let read = |path: &Path| {
            let text = anemoe_text::tokenizer::read(path);
            text.with_context(|| format!("{}: a drafter needs the tokenizers of both", bundle.display()))
        };
        // An assistant has the target's tokens, and often no tokenizer.
        let is_assistant = chain.assistant.is_some();
        if !is_assistant || others.exists() {
            same_tokens([(&read(&own)?, &own), (&read(&others)?, &others)])?;
        }
        let model = run.open(&bundle, &chain)?;
        drop(model.populate());
        let kind = match is_assistant {
            true => DraftKind::Assistant(AttachedAssistant::new(model, target)?),
            false => DraftKind::Small(model),
        };
        Ok(Some(Arc::new(DraftModel::new(kind))))
    }
}

/// Refuses two tokenizers, a model's and its drafter's, of which a token has different ids. How they split a text does not
/// matter: a drafter continues tokens.
pub fn same_tokens([own, others]: [(&[u8], &Path); 2]) -> anyhow::Result<()> {
    // Most drafters have the very same file.
    if own.0 == others.0 {
        return Ok(());
    }
    let of = |(text, path): (&[u8], &Path)| Tokenizer::from_bytes(text, path);
    let Some((id, [own, other])) = of(own)?.difference(&of(others)?) else { return Ok(()) };
    let name = |name: String| match name.as_str() {
        "" => "no token".to_string(),
        name => format!("`{}`", name.escape_debug()),
    };
    anyhow::bail!(
        "{}: token {id} is {}, and {} in the model: a drafter needs the same tokens",
        others.1.display(),
        name(other),
        name(own)
    )
}
