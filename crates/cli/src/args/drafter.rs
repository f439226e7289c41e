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
        let tokenizer = |bundle: &Path| {
            let path = bundle.join("tokenizer.json");
            path.exists().then(|| anemoe_text::tokenizer::read(&path)).transpose()
        };
        // An assistant has the target's tokens, and often no tokenizer.
        let is_assistant = chain.assistant.is_some();
        let sizes = [target.chain().model.vocab_size, chain.model.vocab_size];
        let others = tokenizer(&bundle)?;
        if !is_assistant || others.is_some() {
            same_tokens(&bundle, [tokenizer(target.bundle())?, others], sizes)?;
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

/// Refuses `drafter` if a token has different ids in the model's tokenizer and in its own. How they split a text does not matter: a
/// drafter continues tokens. Models without tokenizers have to have vocabularies of the same size.
pub fn same_tokens(
    drafter: &Path,
    tokenizers: [Option<Vec<u8>>; 2],
    sizes: [usize; 2],
) -> anyhow::Result<()> {
    let needs = "a drafter needs the same tokens";
    let drafter = drafter.display();
    let [own, others] = match &tokenizers {
        [Some(own), Some(others)] => [own, others],
        [None, None] if sizes[0] == sizes[1] => return Ok(()),
        [None, None] => anyhow::bail!(
            "{drafter}: a vocabulary of {}, where the model has {}: {needs}",
            sizes[1],
            sizes[0]
        ),
        [Some(_), None] => anyhow::bail!("{drafter}: has no tokenizer.json, and the model has: {needs}"),
        [None, Some(_)] => anyhow::bail!("{drafter}: has a tokenizer.json, and the model has none: {needs}"),
    };
    // Most drafters have the very same file.
    if own == others {
        return Ok(());
    }
    let path = PathBuf::from(format!("{drafter}/tokenizer.json"));
    let [own, others] =
        [Tokenizer::from_bytes(own, Path::new("tokenizer.json"))?, Tokenizer::from_bytes(others, &path)?];
    let Some((id, [own, other])) = own.difference(&others) else { return Ok(()) };
    let name = |name: String| match name.as_str() {
        "" => "no token".to_string(),
        name => format!("`{}`", name.escape_debug()),
    };
    anyhow::bail!("{drafter}: token {id} is {}, and {} in the model: {needs}", name(other), name(own))
}
