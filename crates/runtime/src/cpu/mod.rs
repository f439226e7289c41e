//! Executes any `.mlpackage` in the supported op set.
//!
//! ```text
//! CpuPackage --session(function)--> compile: constants folded, weights left as stored, values assigned to buffers
//!            --run(inputs, states)--> exec: one step after the other
//! ```
//! Ops compute in f32; with [`Precision::Fp16`] every result whose type is fp16 is rounded to fp16.

mod compile;
mod exec;
pub mod ops;
mod plan;
mod states;
mod weights;

pub use exec::{Session, SessionStats, add_experts};
pub use states::States;

use crate::backend::{Backend, BackendPackage, FunctionId, OpTime};
use crate::tensor::Tensor;
use crate::{Error, Result};
use anemoe_mlpackage::package::{Package, Weights};
use ops::OpError;
use std::path::{Path, PathBuf};
use std::sync::Arc;
use std::time::Duration;

/// Packs of experts of a layer, and inputs of a call, up to which nothing is allocated for them.
pub(crate) const MANY: usize = 16;

/// How results are rounded.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Default)]
pub enum Precision {
    /// Results of type fp16 are rounded to fp16, as on the device.
    #[default]
    Fp16,
    /// Nothing is rounded.
    Fp32,
}

/// How a function is executed.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Options {
    /// Rounding.
    pub precision: Precision,
    /// Leave out what is multiplied by zero: experts whose routing weight is zero for every token.
    pub skip_zero: bool,
    /// Run functions of fixed shapes as fused nodes over planned buffers; without rounding only.
    pub fuse: bool,
    /// Hold keys and values of type fp16 in fp16, as a device does, also where nothing else is rounded: half the memory and
    /// half the reading at long contexts. Fused functions only.
    pub half_states: bool,
    /// Multiply integers of 8 bits where weights are tables or integers, see [`anemoe_kernels::Int8Lut`], and bf16 where they are
    /// large and of fp16 or f32 and the processor has it: faster, with an error of about half a percent of a product's norm.
    pub fast: bool,
    /// Measure the time of every node of fused functions.
    pub profile: bool,
}

impl Options {
    /// Keys and values of type fp16 are held as such.
    fn holds_halves(&self) -> bool {
        self.half_states && self.fuse && self.precision == Precision::Fp32
    }
}

impl Default for Options {
    fn default() -> Self {
        Options {
            precision: Precision::Fp16,
            skip_zero: true,
            fuse: true,
            half_states: false,
            fast: false,
            profile: false,
        }
    }
}

/// Result of something that happens inside an operation.
type OpErrorAt<T> = std::result::Result<T, OpError>;

/// Where an operation is, for errors.
pub(crate) struct Located<'a> {
    path: &'a Path,
    function: &'a str,
    op_type: &'a str,
    name: &'a str,
}

impl Located<'_> {
    fn error(&self, e: OpError) -> Error {
        let at = format!("op `{}` (operation `{}` of function `{}`)", self.op_type, self.name, self.function);
        match e {
            OpError::Invalid(what) => Error::invalid(self.path, format!("{at}: {what}")),
            OpError::Unsupported(what) => Error::unsupported(self.path, format!("{at}: {what}")),
        }
    }
}

fn ops_axis(axis: i32, rank: usize) -> Option<usize> {
    let a = if axis < 0 { i64::from(axis) + rank as i64 } else { i64::from(axis) };
    usize::try_from(a).ok().filter(|&a| a < rank)
}

/// An opened package; sessions of it share its mapped weights.
#[derive(Clone)]
pub struct CpuPackage {
    package: Arc<Package>,
}

impl CpuPackage {
    /// Opens a package.
    ///
    /// # Errors
    /// It is missing or invalid.
    pub fn open(path: &Path) -> Result<CpuPackage> {
        Ok(CpuPackage { package: Arc::new(Package::open(path)?) })
    }

    /// The package.
    pub fn package(&self) -> &Package {
        &self.package
    }

    /// Compiles a function; the default one when none is named.
    ///
    /// # Errors
    /// There is no such function, or it uses an operation or a form that is not implemented (named in the error).
    pub fn session(&self, function: Option<&str>, options: Options) -> Result<Session> {
        let model = self.package.model();
        let name = function.unwrap_or(&model.default_function);
        let described = model.functions.iter().find(|f| f.name == name);
        let (Some(body), Some(described)) = (model.program.functions.get(name), described) else {
            let known: Vec<&str> = model.functions.iter().map(|f| f.name.as_str()).collect();
            return Err(Error::invalid(
                self.package.path(),
                format!("use: no function `{name}`; there is {}", known.join(", ")),
            ));
        };
        compile::compile(&self.package, name, body, described, options)
    }
}

/// Runs packages on this machine's CPU.
#[derive(Clone, Copy, Debug)]
pub struct CpuBackend {
    /// How functions are executed.
    pub options: Options,
}

impl Default for CpuBackend {
    /// Weights as stored, everything else in f32: the CPU's own way.
    fn default() -> Self {
        CpuBackend::with(Precision::Fp32)
    }
}

impl CpuBackend {
    /// Runs with this rounding of results.
    pub fn with(precision: Precision) -> Self {
        CpuBackend { options: Options { precision, ..Options::default() } }
    }
}

impl Backend for CpuBackend {
    fn open(&self, path: &Path) -> Result<Box<dyn BackendPackage>> {
        // What is no package is said now.
        Package::open_to_run(path, &[], &Weights::default())?;
        Ok(Box::new(LoadedPackage {
            weights: Weights::default(),
            path: path.to_path_buf(),
            options: self.options,
            functions: Vec::new(),
            states: States::default(),
        }))
    }
}

struct LoadedPackage {
    /// Mapped for the functions that are prepared.
    weights: Weights,
    path: PathBuf,
    options: Options,
    functions: Vec<Prepared>,
    states: States,
}

struct Prepared {
    name: String,
    session: Session,
    inputs: Vec<String>,
    outputs: Vec<String>,
}

impl BackendPackage for LoadedPackage {
    fn prepare(&mut self, function: &str) -> Result<FunctionId> {
        if let Some(i) = self.functions.iter().position(|f| f.name == function) {
            return Ok(FunctionId(i));
        }
        // Programs take more memory than what is made of them, so each is read when it is needed and not kept.
        let package = Package::open_to_run(&self.path, &[function], &self.weights)?;
        self.weights.adopt(package.weights());
        let package = CpuPackage { package: Arc::new(package) };
        let session = package.session(Some(function), self.options)?;
        self.states.adopt(&session).map_err(|what| Error::invalid(&self.path, what))?;
        let names = |f: &[anemoe_mlpackage::mil::Feature]| f.iter().map(|f| f.name.clone()).collect();
        let (inputs, outputs) = (names(session.inputs()), names(session.outputs()));
        self.functions.push(Prepared { name: function.into(), session, inputs, outputs });
        Ok(FunctionId(self.functions.len() - 1))
    }

    fn inputs(&self, function: FunctionId) -> &[String] {
        &self.functions[function.0].inputs
    }

    fn outputs(&self, function: FunctionId) -> &[String] {
        &self.functions[function.0].outputs
    }

    fn run(&mut self, function: FunctionId, inputs: &[&Tensor]) -> Result<()> {
        self.functions[function.0].session.run(inputs, &mut self.states)
    }

    fn output(&self, function: FunctionId, index: usize) -> &Tensor {
        self.functions[function.0].session.output(index)
    }

    fn experts(&self, function: FunctionId) -> Option<&Session> {
        Some(&self.functions[function.0].session).filter(|s| s.is_experts())
    }

    fn count(&mut self, function: FunctionId, counts: (u64, u64), time: Duration) {
        self.functions[function.0].session.count(counts, time);
    }

    fn lend(&mut self, function: FunctionId, index: usize, memory: Tensor) {
        self.functions[function.0].session.lend(index, memory);
    }

    fn take(&mut self, function: FunctionId, index: usize) -> Tensor {
        self.functions[function.0].session.take(index)
    }

    fn reset(&mut self) {
        self.states.reset();
    }

    fn populate(&self) -> Option<Box<dyn FnOnce() + Send>> {
        let weights = self.weights.clone();
        Some(Box::new(move || weights.populate()))
    }

    fn fill_states(&mut self, seed: u64) -> bool {
        self.states.fill(seed);
        true
    }

    fn bytes_read(&self) -> u64 {
        self.functions.iter().map(|f| f.session.stats().bytes_read).sum()
    }

    fn op_times(&self) -> Vec<OpTime> {
        self.functions.iter().flat_map(|f| f.session.op_times()).collect()
    }

    fn release(&mut self) {
        self.weights.release();
        self.functions.iter_mut().for_each(|f| f.session.release());
    }
}
