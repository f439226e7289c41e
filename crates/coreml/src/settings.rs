//! Settings of the Core ML backend.

use crate::compiled::CompiledModels;

/// Devices that Core ML may use.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub enum ComputeUnits {
    /// The Neural Engine, and the CPU for operations that the Neural Engine does not take.
    #[default]
    CpuAndNeuralEngine,
    /// The CPU alone, for comparison.
    CpuOnly,
}

/// Settings of the Core ML backend: how packages are loaded and run.
#[derive(Clone, Debug, Default)]
pub struct CoreMlSettings {
    /// Compiled models of the packages.
    pub compiled: CompiledModels,
    /// Most bytes of packages loaded at the same time; `None` unloads nothing. Each function counts separately: Core ML
    /// shares weights between the functions of a package, but memory grows with each function all the same.
    pub max_loaded_bytes: Option<u64>,
    /// Devices that Core ML may use.
    pub units: ComputeUnits,
}
