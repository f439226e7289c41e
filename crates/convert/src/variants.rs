//! Variants of a checkpoint: readings on which the programs that run it differ.

use serde::{Deserialize, Serialize};

/// Variants that are chosen, each with a default.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Variants {
    /// Output of ZAYA's skip class, the class behind the last expert; the default is [`ZayaSkip::Identity`].
    pub zaya_skip: Option<ZayaSkip>,
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
