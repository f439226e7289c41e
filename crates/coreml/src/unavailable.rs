//! The backend where there is no Core ML.

use crate::plan::OpPlan;
use crate::{ComputeUnits, CoreMlSettings, Error, Result};
use anemoe_runtime::backend::{Backend, BackendPackage, KeptCache};
use std::convert::Infallible;
use std::path::{Path, PathBuf};

/// Runs packages on the Neural Engine; on this system there is none.
#[derive(Clone, Copy, Debug)]
pub struct CoreMlBackend(Infallible);

fn unavailable() -> Error {
    Error::unsupported_here("on this system: Core ML is a part of macOS; `--backend cpu` runs everywhere")
}

impl CoreMlBackend {
    /// Says that there is no Core ML.
    ///
    /// # Errors
    /// Always.
    pub fn new(_: CoreMlSettings) -> Result<CoreMlBackend> {
        Err(unavailable())
    }
}

impl Backend for CoreMlBackend {
    fn open_with(&self, _: &Path, _: &[KeptCache]) -> Result<Box<dyn BackendPackage>> {
        match self.0 {}
    }
}

/// Checks that there is Core ML; on this system there is none.
///
/// # Errors
/// Always.
pub fn available() -> Result<()> {
    Err(unavailable())
}

/// Compiles a package; on this system nothing can.
///
/// # Errors
/// Always.
pub fn compile(_: &Path, _: &Path) -> Result<PathBuf> {
    Err(unavailable())
}

/// Asks for the plan of a function; on this system nothing can.
///
/// # Errors
/// Always.
pub fn plan_of(_: &Path, _: &Path, _: &str, _: bool, _: ComputeUnits) -> Result<Vec<OpPlan>> {
    Err(unavailable())
}

/// Names this system's build and chip, as a folder; there is none.
pub fn this_system() -> Option<String> {
    None
}

/// Tells the system that Core ML belongs to; there is none.
pub fn system_facts() -> Option<crate::SystemFacts> {
    None
}

/// Returns the bytes of memory that this process holds.
pub fn held_memory() -> Option<u64> {
    anemoe_io::held_memory()
}

/// Name of the figure that [`held_memory`] returns.
pub const HELD_MEMORY: &str = "resident";
