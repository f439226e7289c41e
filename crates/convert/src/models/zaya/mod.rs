//! ZAYA (ZAYA1-8B and its like): compressed convolutional attention, and experts whose router remembers the layer before.

mod config;
mod legacy;
mod lowering;
mod shards;
mod tensor_table;

pub use config::{ZayaConfig, limit_layers, published_config};
pub use legacy::{is_legacy, normalize_layout};
pub use tensor_table::tensor_table;

use super::checked::CheckedCheckpoint;
use super::keys::eos_token_ids;
use crate::Result;
use crate::checkpoint::Checkpoint;
use crate::variants::ZayaSkip;

/// An opened ZAYA checkpoint.
pub struct Zaya {
    /// Configuration of the model.
    pub config: ZayaConfig,
    checkpoint: CheckedCheckpoint,
    skip: ZayaSkip,
    eos_token_ids: Vec<u32>,
}

/// Prefix of the model's tensors.
pub const PREFIXES: [&str; 1] = ["model."];

impl Zaya {
    /// Reads the configuration and checks the name and shape of every tensor.
    ///
    /// # Errors
    /// The configuration has a feature that is not implemented, or a tensor is missing, superfluous or of another shape.
    pub fn open(checkpoint: Checkpoint) -> Result<Zaya> {
        let config = ZayaConfig::parse(&checkpoint.config, &checkpoint.config_path())?;
        let eos_token_ids = eos_token_ids(&checkpoint, &config.eos_token_ids);
        let skip = checkpoint.variants.zaya_skip.unwrap_or_default();
        // The checkpoint may have a copy of the tied embedding.
        let checkpoint =
            CheckedCheckpoint::new(checkpoint, &PREFIXES, &tensor_table(&config), |n| n == "lm_head.weight")?;
        Ok(Zaya { config, checkpoint, skip, eos_token_ids })
    }
}
