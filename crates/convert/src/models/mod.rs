//! One file or folder per `model_type`, and the registry.

mod assembly;
pub mod gemma4;
mod keys;
mod opened;
mod table;
pub mod zaya;

pub use keys::token_ids;
pub use opened::{Opened, prefix};
pub use table::{Part, TensorRow, check_tensors};

use crate::checkpoint::Checkpoint;
use crate::family::Family;
use crate::{Error, Result};
use serde::{Deserialize, Serialize};

/// Opens the family that `config.json` names.
///
/// # Errors
/// The family is not known, or the checkpoint does not fit it.
pub fn open(checkpoint: Checkpoint) -> Result<Box<dyn Family>> {
    let path = checkpoint.config_path();
    let model_type = checkpoint.config.get("model_type").and_then(|v| v.as_str());
    match model_type {
        Some("gemma4" | "gemma4_text") => Ok(Box::new(gemma4::Gemma4::open(checkpoint)?)),
        Some("zaya") => Ok(Box::new(zaya::Zaya::open(checkpoint)?)),
        Some(other) => Err(Error::unsupported(
            path,
            format!("model_type `{other}`; known are gemma4 and gemma4_text (MoE), and zaya"),
        )),
        None => Err(Error::invalid(path, "configuration: `model_type` is missing")),
    }
}

/// Gives a checkpoint in another layout of its family the names that the family's table has.
///
/// # Errors
/// The checkpoint does not fit that layout.
pub fn adapt(checkpoint: Checkpoint) -> Result<Checkpoint> {
    match checkpoint.config.get("model_type").and_then(|v| v.as_str()) {
        Some("zaya") if zaya::is_legacy(&checkpoint) => zaya::adapt(checkpoint),
        _ => Ok(checkpoint),
    }
}

/// How a checkpoint is read where those who run it differ.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Readings {
    /// What ZAYA's class behind the last expert gives; the default is [`ZayaSkip::Identity`].
    pub zaya_skip: Option<ZayaSkip>,
}

/// What a token gets that chooses ZAYA's class behind the last expert.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
pub enum ZayaSkip {
    /// Its own input times the probability, as in the original implementation.
    #[default]
    Identity,
    /// Nothing, as in Hugging Face transformers.
    Zero,
}

impl ZayaSkip {
    /// As on the command line.
    pub const fn name(self) -> &'static str {
        match self {
            ZayaSkip::Identity => "identity",
            ZayaSkip::Zero => "zero",
        }
    }
}

impl std::str::FromStr for ZayaSkip {
    type Err = String;

    fn from_str(text: &str) -> std::result::Result<Self, String> {
        match text {
            "identity" => Ok(ZayaSkip::Identity),
            "zero" => Ok(ZayaSkip::Zero),
            _ => Err(format!("`{text}` is neither identity nor zero")),
        }
    }
}
