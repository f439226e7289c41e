//! Settings of the backend.

use crate::compiled::CompiledModels;

/// Devices that Core ML may use.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub enum ComputeUnits {
    /// The Neural Engine, and the CPU for what it does not take.
    #[default]
    CpuAndNeuralEngine,
    /// The CPU alone, to compare with.
    CpuOnly,
}

/// Settings of the backend: how packages are loaded and run.
#[derive(Clone, Debug, Default)]
pub struct CoreMlSettings {
    /// Places of compiled models.
    pub compiled: CompiledModels,
    /// Bytes of packages that are loaded at the same time, each function counted by itself: Core ML shares weights between the
    /// functions of a package, and memory grows with each all the same. Without a limit nothing is unloaded.
    pub max_loaded_bytes: Option<u64>,
    /// Devices.
    pub units: ComputeUnits,
}
