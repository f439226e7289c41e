//! The backend on systems without Core ML: every function fails.

use crate::op_plan::OpPlan;
use crate::{ComputeUnits, CoreMlSettings, Error, Result};
use anemoe_runtime::backend::{Backend, BackendPackage, KeptCache};
use std::convert::Infallible;
use std::path::{Path, PathBuf};

/// Stands in for the Core ML backend; has no value.
#[derive(Clone, Copy, Debug)]
pub struct CoreMlBackend(Infallible);

fn unavailable() -> Error {
    Error::unsupported_here("on this system: Core ML is a part of macOS; `--backend cpu` runs everywhere")
}

impl CoreMlBackend {
    /// Fails: this system has no Core ML.
    ///
    /// # Errors
    /// Always fails.
    pub fn new(_: CoreMlSettings) -> Result<CoreMlBackend> {
        Err(unavailable())
    }
}

impl Backend for CoreMlBackend {
    fn open_with(&self, _: &Path, _: &[KeptCache]) -> Result<Box<dyn BackendPackage>> {
        match self.0 {}
    }
}

/// Fails: this system has no Core ML.
///
/// # Errors
/// Always fails.
pub fn available() -> Result<()> {
    Err(unavailable())
}

/// Fails: only Core ML compiles packages.
///
/// # Errors
/// Always fails.
pub fn compile(_: &Path, _: &Path) -> Result<PathBuf> {
    Err(unavailable())
}

/// Fails: only Core ML makes plans.
///
/// # Errors
/// Always fails.
pub fn plan_of(_: &Path, _: &Path, _: &str, _: bool, _: ComputeUnits) -> Result<Vec<OpPlan>> {
    Err(unavailable())
}

/// Returns `None`: this system has no Core ML.
pub fn this_system() -> Option<String> {
    None
}

/// Returns `None`: this system has no Core ML.
pub fn system_facts() -> Option<crate::SystemFacts> {
    None
}

/// Returns the bytes of memory that this process holds.
pub fn held_memory() -> Option<u64> {
    anemoe_io::held_memory()
}

/// Name of the figure that [`held_memory`] returns.
pub const HELD_MEMORY: &str = "resident";
