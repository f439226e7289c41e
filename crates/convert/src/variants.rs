//! Variants of a checkpoint: ways to read it.

use serde::{Deserialize, Serialize};

/// Name of the rotation of weights among the readings of a bundle.
pub const ROTATION: &str = "rotation";
/// Name of the one rotation that there is, see [`crate::checkpoint::Rotation`].
pub const HADAMARD: &str = "hadamard";

/// Ways to read a checkpoint.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Variants {
    /// Output of ZAYA's skip class, the class behind the last expert; the default is [`ZayaSkip::Identity`].
    pub zaya_skip: Option<ZayaSkip>,
    /// True if the weights were multiplied by rotations that cancel out, see [`crate::models::rotate`].
    pub is_rotated: bool,
}

/// Output for a token whose router chooses ZAYA's skip class, the class behind the last expert.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
pub enum ZayaSkip {
    /// The token's own input times the probability, as in the original implementation.
    #[default]
    Identity,
    /// Nothing, as in Hugging Face transformers.
    Zero,
}

impl ZayaSkip {
    /// Returns the name as on the command line.
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
