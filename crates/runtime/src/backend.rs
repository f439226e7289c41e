//! What an engine needs of whatever runs a package.

use crate::Result;
use crate::tensor::Tensor;
use std::path::Path;

/// Opens packages.
pub trait Backend {
    /// Opens the package at `path`.
    ///
    /// # Errors
    /// The package is invalid, or uses something that this backend lacks.
    fn open(&self, path: &Path) -> Result<Box<dyn BackendPackage>>;
}

/// One opened package: its functions share weights, and calls of all of them share one set of states.
pub trait BackendPackage: Send {
    /// Prepares a function; the same name gives the same function again.
    ///
    /// # Errors
    /// There is no such function, or it uses something that this backend lacks.
    fn prepare(&mut self, function: &str) -> Result<FunctionId>;

    /// Input names of a prepared function, in the order of [`BackendPackage::run`].
    fn inputs(&self, function: FunctionId) -> &[String];

    /// Output names of a prepared function, in the order of [`BackendPackage::output`].
    fn outputs(&self, function: FunctionId) -> &[String];

    /// Runs a prepared function on `inputs`; states carry over from call to call.
    ///
    /// # Errors
    /// An input has the wrong shape or type, or the function fails.
    fn run(&mut self, function: FunctionId, inputs: &[&Tensor]) -> Result<()>;

    /// An output of the last call of a prepared function.
    fn output(&self, function: FunctionId, index: usize) -> &Tensor;

    /// Sets every state to zero.
    fn reset(&mut self);

    /// Lets go of memory that the next call gets back by itself, where there is such; the last call's outputs go with it.
    fn release(&mut self) {}
}

/// A prepared function of one package.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord)]
pub struct FunctionId(pub usize);
