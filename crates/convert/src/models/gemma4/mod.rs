//! Gemma 4 with experts (Gemma-4-26B-A4B and its like): `model_type` gemma4 or gemma4_text.

mod config;
mod shards;
mod tensor_table;

pub use config::{Gemma4Config, limit_layers, published_config};
pub use tensor_table::tensor_table;

use super::checked::CheckedCheckpoint;
use super::keys::eos_token_ids;
use crate::Result;
use crate::checkpoint::Checkpoint;

/// An opened Gemma 4 checkpoint.
pub struct Gemma4 {
    /// Configuration of the text model.
    pub config: Gemma4Config,
    checkpoint: CheckedCheckpoint,
    eos_token_ids: Vec<u32>,
}

/// Prefixes of the text model's tensors: beside other modalities, and alone.
pub const PREFIXES: [&str; 2] = ["model.language_model.", "model."];

/// Tells whether text does not need a tensor: it is of another modality, or a copy of the tied embedding.
fn is_skipped(name: &str) -> bool {
    const OTHER: [&str; 6] = [
        "model.vision_tower.",
        "model.embed_vision.",
        "model.audio_tower.",
        "model.embed_audio.",
        "model.multi_modal_projector.",
        "multi_modal_projector.",
    ];
    name == "lm_head.weight" || OTHER.iter().any(|p| name.starts_with(p))
}

impl Gemma4 {
    /// Reads the configuration and checks the name and shape of every tensor.
    ///
    /// # Errors
    /// The configuration has a feature that is not implemented, or a tensor is missing, superfluous or of another shape.
    pub fn open(checkpoint: Checkpoint) -> Result<Gemma4> {
        let config = Gemma4Config::parse(&checkpoint.config, &checkpoint.config_path())?;
        let eos_token_ids = eos_token_ids(&checkpoint, &config.eos_token_ids);
        let checkpoint = CheckedCheckpoint::new(checkpoint, &PREFIXES, &tensor_table(&config), is_skipped)?;
        Ok(Gemma4 { config, checkpoint, eos_token_ids })
    }
}
