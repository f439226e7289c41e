//! Facts of the system that Core ML belongs to.

use serde::{Deserialize, Serialize};

/// Facts of a system with Core ML.
#[derive(Clone, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
pub struct SystemFacts {
    /// System and version, for instance `macOS 26.0`.
    pub os: String,
    /// Its build, for instance `25A354`.
    pub build: String,
    /// Chip, for instance `Apple M4 Max`.
    pub chip: String,
    /// Core ML is the fake of `sim/`: nothing of it is evidence of a Mac.
    pub simulated: bool,
}
