//! What an engine needs of whatever runs a package.

use crate::Result;
use crate::tensor::Tensor;
use std::path::Path;
use std::time::Duration;

/// Opens packages, several at once.
pub trait Backend: Sync {
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

    /// A prepared function that is a sum of experts, which [`crate::cpu::add_experts`] can add up with others'; none where it
    /// is anything else.
    fn experts(&self, function: FunctionId) -> Option<&crate::cpu::Session> {
        let _ = function;
        None
    }

    /// Counts a run by [`crate::cpu::add_experts`].
    fn count(&mut self, function: FunctionId, counts: (u64, u64), time: Duration) {
        let _ = (function, counts, time);
    }

    /// Gives memory that the next call may use for an output.
    fn lend(&mut self, function: FunctionId, index: usize, memory: Tensor) {
        let _ = (function, index, memory);
    }

    /// Moves an output of the last call out.
    fn take(&mut self, function: FunctionId, index: usize) -> Tensor {
        self.output(function, index).clone()
    }

    /// Sets every state to zero.
    fn reset(&mut self);

    /// Fills every state with noise, as if tokens had been in it: for measurements. False where that is not possible.
    fn fill_states(&mut self, seed: u64) -> bool {
        let _ = seed;
        false
    }

    /// What maps all of the package's weights, for another thread; see [`crate::engine::Engine::populate`].
    fn populate(&self) -> Option<Box<dyn FnOnce() + Send>> {
        None
    }

    /// Bytes of weights and caches read since opening, where that is known.
    fn bytes_read(&self) -> u64 {
        0
    }

    /// Time by operation since opening, where it is measured.
    fn op_times(&self) -> Vec<OpTime> {
        Vec::new()
    }

    /// Lets go of memory that the next call gets back by itself, where there is such; the last call's outputs go with it.
    fn release(&mut self) {}
}

/// Time that an operation, or several that were fused into it, has taken.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct OpTime {
    /// Operation type, for instance `conv`.
    pub op_type: String,
    /// Name of the operation.
    pub name: String,
    /// In all calls.
    pub time: Duration,
}

/// A prepared function of one package.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord)]
pub struct FunctionId(pub usize);
