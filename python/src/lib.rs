//! Extension module of the Python package: what `anemoe/*.py` builds on. Names, defaults and checks that need Python only are there.
//!
//! Errors become Python's own: a file operation `OSError`, a broken package or a wrong value `ValueError`, what is not implemented
//! `NotImplementedError`.

mod model;
mod tools;

use anemoe_io::{Error, Kind};
use pyo3::exceptions::{PyKeyboardInterrupt, PyNotImplementedError, PyOSError, PyValueError};
use pyo3::prelude::*;

/// Converts an error to the Python exception of its kind.
fn exception(error: Error) -> PyErr {
    let text = error.to_string();
    match error.kind() {
        Kind::Io => match (error.io_error().and_then(std::io::Error::raw_os_error), error.path()) {
            // With these arguments Python makes a FileNotFoundError and the like.
            (Some(number), Some(path)) => {
                let what = error.io_error().map(ToString::to_string).unwrap_or_default();
                let what = what.split(" (os error").next().unwrap_or_default().to_string();
                PyOSError::new_err((number, what, path.to_path_buf()))
            }
            _ => PyOSError::new_err(text),
        },
        Kind::Room => PyOSError::new_err(text),
        Kind::Unsupported => PyNotImplementedError::new_err(text),
        Kind::Interrupted => PyKeyboardInterrupt::new_err(text),
        Kind::Invalid | Kind::Input | Kind::Usage => PyValueError::new_err(text),
    }
}

/// Sets the threads of the process; `None` keeps those that it has.
///
/// # Errors
/// The process computes with another number already, or no thread can be started.
#[pyfunction]
fn set_threads(threads: Option<usize>) -> PyResult<()> {
    let Some(threads) = threads else { return Ok(()) };
    if anemoe_kernels::Pool::set_threads(threads) {
        // The quantizers' threads; where they run already, their number stays.
        let _ = rayon::ThreadPoolBuilder::new().num_threads(threads).build_global();
    }
    match anemoe_kernels::Pool::global().threads() {
        running if running == threads => Ok(()),
        running => Err(PyValueError::new_err(format!(
            "expected threads={running}: the threads are shared by all models of a process, and the first model has set them"
        ))),
    }
}

/// Holds the functions and types of the package that are not written in Python.
#[pymodule]
fn _anemoe(module: &Bound<'_, PyModule>) -> PyResult<()> {
    module.add("__version__", env!("CARGO_PKG_VERSION"))?;
    module.add_class::<model::Runner>()?;
    module.add_class::<model::State>()?;
    module.add_function(wrap_pyfunction!(set_threads, module)?)?;
    tools::add(module)
}
