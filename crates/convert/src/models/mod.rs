//! Model families: one folder per `model_type`, and the registry.

mod chain_builder;
mod checked;
mod family;
pub mod gemma4;
mod keys;
mod replan;
mod synthetic;
mod tensor_table;
pub mod zaya;

pub use checked::{CheckedCheckpoint, prefix};
pub use family::{Family, Preset, Sizes};
pub use keys::token_ids;
pub use replan::replan;
pub use tensor_table::{ModelPart, TensorRow, check_tensors};

use crate::checkpoint::{Checkpoint, open_checkpoint, open_in_ranges};
use crate::{Error, Result};
use anemoe_io::RangedFiles;
use std::path::Path;

/// Prefix of the names of checkpoints whose weights are random and computed as they are read.
const SYNTHETIC: &str = "synthetic:";

/// Tells whether a checkpoint's name is a synthetic one.
pub fn is_synthetic(source: &str) -> bool {
    source.starts_with(SYNTHETIC)
}

/// Opens a Hugging Face folder, a GGUF file, or `synthetic:NAME?seed=N&layers=N`. The tensors get the names of their
/// family's table, in any layout.
///
/// # Errors
/// A file is missing or wrong, or there is no such synthetic model.
pub fn load(spec: impl AsRef<Path>) -> Result<Checkpoint> {
    let path = spec.as_ref();
    match path.to_str().and_then(|spec| Some((spec, spec.strip_prefix(SYNTHETIC)?))) {
        Some((spec, name)) => synthetic::open(spec, name),
        None => normalize_layout(open_checkpoint(path)?),
    }
}

/// Opens a Hugging Face folder like [`load`], with some of its weight files elsewhere.
///
/// # Errors
/// A file is missing or wrong, or cannot be fetched.
pub fn load_in_ranges(path: &Path, elsewhere: &RangedFiles) -> Result<Checkpoint> {
    normalize_layout(open_in_ranges(path, elsewhere)?)
}

/// Opens the family that `config.json` names.
///
/// # Errors
/// The family is not known, or the checkpoint does not fit it.
pub fn open(checkpoint: Checkpoint) -> Result<Box<dyn Family>> {
    match family_of(&checkpoint.config, &checkpoint.config_path())? {
        KnownFamily::Gemma4 => Ok(Box::new(gemma4::Gemma4::open(checkpoint)?)),
        KnownFamily::Zaya => Ok(Box::new(zaya::Zaya::open(checkpoint)?)),
    }
}

/// Family of a `model_type`.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum KnownFamily {
    /// Gemma 4.
    Gemma4,
    /// ZAYA.
    Zaya,
}

/// Returns the family that a `config.json` names. Nothing else of the checkpoint has to be there.
///
/// # Errors
/// The configuration names no family, or an unknown one.
pub fn family_of(config: &serde_json::Value, path: &Path) -> Result<KnownFamily> {
    match config.get("model_type").and_then(|v| v.as_str()) {
        Some("gemma4" | "gemma4_text") => Ok(KnownFamily::Gemma4),
        Some("zaya") => Ok(KnownFamily::Zaya),
        Some(other) => Err(Error::unsupported(
            path,
            format!("model_type `{other}`; known are gemma4 and gemma4_text (MoE), and zaya"),
        )),
        None => Err(Error::invalid(path, "configuration: `model_type` is missing")),
    }
}

/// Renames the tensors of a checkpoint in another layout of its family to the names of the family's table.
///
/// # Errors
/// The checkpoint does not fit that layout.
pub fn normalize_layout(checkpoint: Checkpoint) -> Result<Checkpoint> {
    match checkpoint.config.get("model_type").and_then(|v| v.as_str()) {
        Some("zaya") if zaya::is_legacy(&checkpoint) => zaya::normalize_layout(checkpoint),
        _ => Ok(checkpoint),
    }
}
