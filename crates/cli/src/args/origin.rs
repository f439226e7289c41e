//! The checkpoint that a bundle was built from.

use super::reading::Reading;
use anemoe_bundle::Chain;
use anemoe_convert::importance::Importance;
use anemoe_convert::models::{self, Family};
use anemoe_convert::plan::Plan;
use anyhow::{Context, bail};
use std::path::{Path, PathBuf};

/// Origin of a bundle, for questions that its packages alone cannot answer.
#[derive(clap::Args, Clone)]
pub struct OriginArgs {
    /// The checkpoint that the bundle was built from.
    #[arg(long, value_name = "CHECKPOINT")]
    pub checkpoint: Option<PathBuf>,
    /// The importances that it was built with, where it was.
    #[arg(long, value_name = "F.npz", requires = "checkpoint")]
    pub importance: Option<PathBuf>,
}

/// Chain of a bundle, with the checkpoint and the plan that the bundle was built from.
pub struct Origin {
    pub chain: Chain,
    pub family: Family,
    pub plan: Plan,
    pub importance: Option<Importance>,
}

impl OriginArgs {
    /// Opens the checkpoint as the bundle's build read it, and plans it again. `what_for` names the option that needs it.
    pub fn open(&self, bundle: &Path, what_for: &str) -> anyhow::Result<Origin> {
        let chain = Chain::read(bundle)?;
        let spec = self.checkpoint.as_deref();
        let spec =
            spec.with_context(|| format!("{what_for} needs --checkpoint, the one of {}", chain.source))?;
        let family = models::open(Reading::of(&chain)?.open(spec)?)?;
        if chain.family != family.decoder.family {
            bail!(
                "--checkpoint {}: is not what {} was built from: it is of the family {}, not {}",
                spec.display(),
                bundle.display(),
                family.decoder.family,
                chain.family
            );
        }
        if let Some(hash) = &chain.checkpoint_sha256
            && *hash != family.checked.checkpoint.fingerprint()?
        {
            bail!(
                "--checkpoint {}: is not what {} was built from: its contents differ",
                spec.display(),
                bundle.display()
            );
        }
        let plan = models::replan(&family, bundle, &chain)?;
        let importance =
            self.importance.as_deref().map(|path| Importance::read_for(&plan, path)).transpose()?;
        if importance.as_ref().map(Importance::sha256) != chain.importance.as_deref() {
            match &chain.importance {
                Some(hash) => bail!("--importance: the bundle was built with the file of SHA-256 {hash}"),
                None => bail!("--importance: the bundle was built without one"),
            }
        }
        Ok(Origin { chain, family, plan, importance })
    }
}
