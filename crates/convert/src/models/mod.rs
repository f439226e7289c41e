//! One file or folder per `model_type`, and the registry.

pub mod gemma4;
mod table;

pub use table::{Part, TensorRow, check_tensors};

use crate::checkpoint::Checkpoint;
use crate::family::Family;
use crate::{Error, Result};

/// Opens the family that `config.json` names.
///
/// # Errors
/// The family is not known, or the checkpoint does not fit it.
pub fn open(checkpoint: Checkpoint) -> Result<Box<dyn Family>> {
    let path = checkpoint.config_path();
    let model_type = checkpoint.config.get("model_type").and_then(|v| v.as_str());
    match model_type {
        Some("gemma4" | "gemma4_text") => Ok(Box::new(gemma4::Gemma4::open(checkpoint)?)),
        Some(other) => Err(Error::unsupported(
            path,
            format!("model_type `{other}`; known are gemma4 and gemma4_text (MoE)"),
        )),
        None => Err(Error::invalid(path, "configuration: `model_type` is missing")),
    }
}
