//! Gemma 4 with experts (Gemma-4-26B-A4B and its like): `model_type` gemma4 or gemma4_text.

mod config;
mod shards;
mod table;

pub use config::{Gemma4Config, limit_layers, published_config};
pub use table::tensor_table;

use super::check_tensors;
use crate::checkpoint::Checkpoint;
use crate::{Error, Result};
use std::ops::Range;

/// An opened Gemma 4 checkpoint.
pub struct Gemma4 {
    /// Its configuration.
    pub config: Gemma4Config,
    checkpoint: Checkpoint,
    prefix: &'static str,
    eos_token_ids: Vec<u32>,
}

/// Prefixes of the text model's tensors: beside other modalities, and alone.
const PREFIXES: [&str; 2] = ["model.language_model.", "model."];

/// Tensors that text does not need: other modalities, and a copy of the tied embedding.
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
    /// Reads the configuration and checks every tensor's name, shape and type.
    ///
    /// # Errors
    /// The configuration has a feature that is not implemented, or a tensor is missing, superfluous or of another shape.
    pub fn open(checkpoint: Checkpoint) -> Result<Gemma4> {
        let config_path = checkpoint.config_path();
        let config = Gemma4Config::parse(&checkpoint.config, &config_path)?;
        let has = |p: &&&str| checkpoint.source.info(&format!("{p}embed_tokens.weight")).is_some();
        let prefix = PREFIXES.iter().find(has).copied().ok_or_else(|| {
            Error::invalid(
                &checkpoint.path,
                "checkpoint: neither `model.language_model.embed_tokens.weight` nor `model.embed_tokens.weight` is there",
            )
        })?;
        check_tensors(checkpoint.source.as_ref(), prefix, &tensor_table(&config), is_skipped)?;
        let generation = checkpoint.generation_config.as_ref();
        let mut eos = token_ids(generation.and_then(|g| g.get("eos_token_id")));
        for id in token_ids(checkpoint.config.get("eos_token_id"))
            .into_iter()
            .chain(config.eos_token_ids.iter().copied())
        {
            if eos.is_empty() || !eos.contains(&id) {
                eos.push(id);
            }
        }
        Ok(Gemma4 { config, checkpoint, prefix, eos_token_ids: eos })
    }

    /// The checkpoint's own name.
    fn source_name(&self) -> String {
        self.checkpoint.name.clone()
    }

    /// The checkpoint.
    pub fn checkpoint(&self) -> &Checkpoint {
        &self.checkpoint
    }

    /// Reads elements of a tensor named without the checkpoint's prefix.
    ///
    /// # Errors
    /// The tensor holds NaN or infinity there.
    pub fn read_elements(&self, name: &str, range: Range<u64>, out: &mut [f32]) -> Result<()> {
        self.checkpoint.source.read(&format!("{}{name}", self.prefix), range, out)
    }

    /// Reads a whole tensor named without the checkpoint's prefix.
    ///
    /// # Errors
    /// The tensor holds NaN or infinity.
    pub fn tensor(&self, name: &str) -> Result<Vec<f32>> {
        let full = format!("{}{name}", self.prefix);
        let info = self.checkpoint.source.info(&full);
        let info =
            info.ok_or_else(|| Error::invalid(&self.checkpoint.path, format!("use: no tensor `{full}`")))?;
        let mut out = vec![0f32; info.elements() as usize];
        self.checkpoint.source.read(&full, 0..info.elements(), &mut out)?;
        Ok(out)
    }
}

/// One id or a list of them.
fn token_ids(value: Option<&serde_json::Value>) -> Vec<u32> {
    let id = |v: &serde_json::Value| v.as_u64().and_then(|n| u32::try_from(n).ok());
    match value {
        Some(serde_json::Value::Array(list)) => list.iter().filter_map(id).collect(),
        Some(one) => id(one).into_iter().collect(),
        None => Vec::new(),
    }
}
