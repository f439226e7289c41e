//! Facts of a system with Core ML.

use serde::{Deserialize, Serialize};

/// Facts of a system with Core ML.
#[derive(Clone, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
pub struct SystemFacts {
    /// Name and version, for instance `macOS 26.0`.
    pub os: String,
    /// Build, for instance `25A354`.
    pub build: String,
    /// Chip, for instance `Apple M4 Max`.
    pub chip: String,
    /// True if Core ML is the fake of `sim/`: its results are no evidence of a Mac.
    pub simulated: bool,
}
