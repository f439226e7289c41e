//! Options for reading checkpoints.

use super::hub_checkpoint::{Extent, locate};
use anemoe_bundle::Chain;
use anemoe_convert::checkpoint::Checkpoint;
use anemoe_convert::models;
use anemoe_convert::variants::{HADAMARD, ROTATION, Variants, ZayaSkip};
use std::path::Path;

/// Ways to read a checkpoint where those who run it differ.
#[derive(clap::Args, Clone, Copy, Debug, Default)]
pub struct Reading {
    /// Output for a token that chooses ZAYA's class behind the last expert: identity (its input times the
    /// probability, as in the original implementation) or zero (as in transformers) [default: identity].
    #[arg(long, value_name = "identity|zero")]
    pub zaya_skip: Option<ZayaSkip>,
    /// Rotation of the weights, which a build for a text chooses.
    #[arg(skip)]
    pub is_rotated: bool,
}

impl Reading {
    /// Returns the options with which the checkpoint of a bundle was read.
    pub fn of(chain: &Chain) -> anyhow::Result<Reading> {
        let zaya_skip = chain.readings.get("zaya_skip").map(|name| name.parse());
        let rotation = chain.readings.get(ROTATION);
        if let Some(other) = rotation.filter(|name| *name != HADAMARD) {
            anyhow::bail!("chain.json: rotation `{other}` is unknown; the program is older than the bundle");
        }
        let zaya_skip = zaya_skip.transpose().map_err(anyhow::Error::msg)?;
        Ok(Reading { zaya_skip, is_rotated: rotation.is_some() })
    }

    /// Opens a checkpoint with these options.
    pub fn open(self, spec: &Path) -> anyhow::Result<Checkpoint> {
        self.open_extent(spec, Extent::Whole)
    }

    /// Opens the extent of a checkpoint with these options.
    pub fn open_extent(self, spec: &Path, extent: Extent) -> anyhow::Result<Checkpoint> {
        let located = locate(spec, extent)?;
        let mut checkpoint = match located.weights.is_empty() {
            true => models::load(&located.path)?,
            false => models::load_in_ranges(&located.path, &located.weights)?,
        };
        if let Some(pinned) = located.pinned {
            // The cache names the folder by its commit; users know the checkpoint by its name at the hub.
            checkpoint.name = pinned.file.unwrap_or(pinned.name);
        }
        let zaya = checkpoint.config.get("model_type").is_some_and(|t| t == "zaya");
        if self.zaya_skip.is_some() && !zaya {
            anyhow::bail!("--zaya-skip: {} is not a ZAYA checkpoint", spec.display());
        }
        let variants = Variants { zaya_skip: self.zaya_skip, ..checkpoint.variants };
        let checkpoint = checkpoint.with_variants(variants);
        Ok(if self.is_rotated { models::rotate(checkpoint)? } else { checkpoint })
    }
}
