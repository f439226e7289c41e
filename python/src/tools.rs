//! Functions over packages and tensors.

use crate::exception;
use crate::model::{Runner, open, tensor};
use anemoe_convert::one_tensor::{TensorJob, WeightOp};
use anemoe_convert::package_weights::{
    CodeForm, GivenTables, Pruning, WeightJob, compress as compress_package, dense_weights as dense,
};
use anemoe_convert::quant::{Groups, Quant};
use anemoe_gates::package_inputs::PackageInputs;
use anemoe_gates::residency::{self, CheckOptions};
use anemoe_kernels::IndexBits;
use anemoe_mlpackage::blob::pack_sub_byte;
use anemoe_mlpackage::mil::DataType;
use anemoe_mlpackage::mil::text;
use anemoe_mlpackage::mil::verify as rules;
use anemoe_runtime::cpu::CpuPackage;
use half::f16;
use numpy::{
    PyArray1, PyArrayMethods, PyReadonlyArray1, PyReadonlyArrayDyn, PyUntypedArray, PyUntypedArrayMethods,
};
use pyo3::exceptions::PyValueError;
use pyo3::prelude::*;
use pyo3::types::PyDict;
use std::path::PathBuf;

/// Adds the functions to the module.
///
/// # Errors
/// Python refuses one.
pub fn add(module: &Bound<'_, PyModule>) -> PyResult<()> {
    module.add_class::<Job>()?;
    module.add_class::<Weights>()?;
    module.add_function(wrap_pyfunction!(verify, module)?)?;
    module.add_function(wrap_pyfunction!(check, module)?)?;
    module.add_function(wrap_pyfunction!(structure, module)?)?;
    module.add_function(wrap_pyfunction!(quantize, module)?)?;
    module.add_function(wrap_pyfunction!(dense_weights, module)?)?;
    module.add_function(wrap_pyfunction!(compress, module)?)
}

/// Severity, function, place and text of a finding.
type FindingParts = (&'static str, String, String, String);

/// Checks a package against MIL's rules.
#[pyfunction]
#[pyo3(signature = (path, spec = None))]
fn verify(py: Python<'_>, path: PathBuf, spec: Option<Vec<u8>>) -> PyResult<Vec<FindingParts>> {
    let findings = py.detach(|| Ok::<_, PyErr>(rules::verify(open(path, spec.as_deref())?.model())))?;
    let severity = |s| if s == rules::Severity::Error { "error" } else { "warning" };
    Ok(findings.into_iter().map(|f| (severity(f.severity), f.function, f.place, f.text)).collect())
}

/// Predicts the placement of a package, as JSON.
#[pyfunction]
fn check(py: Python<'_>, path: PathBuf, spec: Option<Vec<u8>>, list_ops: bool) -> PyResult<String> {
    let options = CheckOptions { list_ops, ..CheckOptions::default() };
    let report = py.detach(|| Ok::<_, PyErr>(residency::opened(&open(path, spec.as_deref())?, &options)))?;
    Ok(serde_json::to_string(&report).unwrap_or_default())
}

/// Lists inputs, outputs, states and operations of all functions, a line each, without names of values.
#[pyfunction]
#[pyo3(signature = (path, spec = None))]
fn structure(py: Python<'_>, path: PathBuf, spec: Option<Vec<u8>>) -> PyResult<Vec<String>> {
    py.detach(|| {
        let package = open(path, spec.as_deref())?;
        let model = package.model();
        let mut lines = vec![format!("specification version {}", model.specification_version)];
        for f in &model.functions {
            lines.push(format!("function {}", f.name));
            let all = [("input", &f.inputs), ("state", &f.states), ("output", &f.outputs)];
            for (word, feature) in all.iter().flat_map(|(word, all)| all.iter().map(move |f| (word, f))) {
                lines.push(format!("  {word} {}: {feature}", feature.name));
            }
            if let Some(body) = model.program.functions.get(&f.name) {
                text::outline(&body.block, &mut lines);
            }
        }
        Ok(lines)
    })
}

/// Weights of a package: what constants and `constexpr_*` operations of two or more axes stand for.
#[pyclass(frozen, module = "anemoe._anemoe")]
struct Weights {
    package: CpuPackage,
    /// Name for Python, function and name in the program, and true for fp16.
    names: Vec<(String, String, String, bool)>,
}

#[pymethods]
impl Weights {
    #[new]
    #[pyo3(signature = (path, spec = None))]
    fn new(path: PathBuf, spec: Option<&[u8]>) -> PyResult<Weights> {
        let package = CpuPackage::of(open(path, spec)?);
        let functions = &package.package().model().program.functions;
        let mut names = Vec::new();
        for (function, body) in functions {
            for op in body.block.operations.iter().filter(|op| op.op_type.starts_with("const")) {
                let [output] = op.outputs.as_slice() else { continue };
                let weight = output.ty.tensor().filter(|t| t.dtype.is_float() && t.rank() > 1);
                if let Some(ty) = weight {
                    let shown = if functions.len() > 1 {
                        format!("{function}/{}", output.name)
                    } else {
                        output.name.clone()
                    };
                    let is_half = ty.dtype == DataType::Float16;
                    names.push((shown, function.clone(), output.name.clone(), is_half));
                }
            }
        }
        Ok(Weights { package, names })
    }

    /// Returns the names of the weights; with the function before it where a package has several.
    #[getter]
    fn names(&self) -> Vec<&str> {
        self.names.iter().map(|(shown, ..)| shown.as_str()).collect()
    }

    /// Returns the values of a weight, in its own type.
    fn read<'py>(&self, py: Python<'py>, name: &str) -> PyResult<Bound<'py, PyAny>> {
        let found = self.names.iter().find(|(shown, ..)| shown == name);
        let (_, function, name, is_half) =
            found.ok_or_else(|| PyValueError::new_err(format!("no weight '{name}'")))?;
        let tensor = py.detach(|| self.package.constant(function, name)).map_err(exception)?;
        let array = crate::model::array(py, tensor)?;
        if *is_half { array.call_method1("astype", ("float16",)) } else { Ok(array) }
    }
}

/// Compresses one tensor; the parts of `anemoe.Quantized`.
#[pyfunction]
#[allow(clippy::too_many_arguments)]
fn quantize<'py>(
    py: Python<'py>,
    array: PyReadonlyArrayDyn<'py, f32>,
    quant: &str,
    group_size: usize,
    block_size: usize,
    op: Option<&str>,
    exact: bool,
    importance: Option<PyReadonlyArray1<'py, f32>>,
) -> PyResult<Bound<'py, PyDict>> {
    let wrong = |what: String| PyValueError::new_err(what);
    let kind: Quant = quant.parse().map_err(wrong)?;
    if group_size == 0 || block_size == 0 {
        return Err(wrong("expected group_size and block_size from 1".into()));
    }
    let shape = array.shape().to_vec();
    let op = match op {
        None if shape.len() > 2 => WeightOp::Conv,
        None | Some("linear") => WeightOp::Linear,
        Some("conv") => WeightOp::Conv,
        Some("matmul") => WeightOp::MatMul,
        Some(other) => return Err(wrong(format!("expected op 'conv', 'linear' or 'matmul', got '{other}'"))),
    };
    let values = array.to_vec().map_err(|_| wrong("expected an array in C order".into()))?;
    let importance = importance.map(|m| m.to_vec()).transpose().map_err(|e| wrong(e.to_string()))?;
    let groups = Groups { rows: group_size, block: block_size };
    let (c, decoded) = py.detach(|| {
        let importance = importance.as_deref();
        let (name, shape, values, moments) = ("array", shape.as_slice(), values.as_slice(), None);
        let job = TensorJob { name, shape, values, op, kind, groups, exact, importance, moments };
        let c = job.run().map_err(exception)?;
        let decoded = c.decode().map_err(exception)?;
        Ok::<_, PyErr>((c, decoded))
    })?;
    let parts = PyDict::new(py);
    parts.set_item("quant", c.quant.to_string())?;
    parts.set_item("decoded", PyArray1::from_vec(py, decoded).reshape(shape.clone())?)?;
    let (dims, none) = (c.side_dims(), py.None());
    let sides = |values: Vec<f16>| PyArray1::from_vec(py, values).reshape(dims.clone());
    let linear = matches!(c.quant.kind, Quant::Int { .. });
    let elements = match c.quant.kind {
        Quant::Fp16 => none.clone_ref(py),
        _ if linear => {
            let codes: Vec<i8> = c.elements().into_iter().map(|code| code as i8).collect();
            PyArray1::from_vec(py, codes).reshape(shape)?.into_any().unbind()
        }
        _ => PyArray1::from_vec(py, c.elements()).reshape(shape)?.into_any().unbind(),
    };
    parts.set_item("elements", elements)?;
    let is_table = matches!(c.quant.kind, Quant::Lut { .. });
    for (name, is_there) in [("lut", is_table), ("scale", linear || c.quant.kind == Quant::Mxfp4)] {
        match is_there {
            true => parts.set_item(name, sides(c.side_values())?)?,
            false => parts.set_item(name, &none)?,
        }
    }
    match c.side.offsets.is_empty() {
        true => parts.set_item("offset", &none)?,
        false => parts.set_item("offset", PyArray1::from_vec(py, c.side_offsets()).reshape(dims.clone())?)?,
    }
    parts.set_item("bytes", c.bytes())?;
    Ok(parts)
}

/// A dense weight: function, name, shape, and type, name, parameter, transposition and groups of each user.
type WeightParts = (String, String, Vec<u64>, Vec<(String, String, String, bool, usize)>);

/// Lists the weights of a package that can be compressed.
#[pyfunction]
#[pyo3(signature = (path, spec = None))]
fn dense_weights(path: PathBuf, spec: Option<&[u8]>) -> PyResult<Vec<WeightParts>> {
    let weights = dense(&open(path, spec)?).into_iter().map(|w| {
        let users =
            w.users.into_iter().map(|u| (u.op_type, u.name, u.param, u.transposes, u.groups)).collect();
        (w.function, w.name, w.shape, users)
    });
    Ok(weights.collect())
}

/// Compression of a weight.
#[pyclass(frozen, from_py_object, module = "anemoe._anemoe")]
#[derive(Clone)]
struct Job {
    function: String,
    name: String,
    job: WeightJob,
}

#[pymethods]
impl Job {
    /// Tables or integers; with `vector` or `scaled` tables of vectors, or of weights divided by a scale per channel.
    #[staticmethod]
    #[allow(clippy::too_many_arguments)]
    fn quantize(
        function: String,
        name: String,
        kind: &str,
        groups: [usize; 2],
        axes: [usize; 2],
        unsigned: bool,
        vector: usize,
        scaled: bool,
    ) -> PyResult<Job> {
        let kind = kind.parse().map_err(PyValueError::new_err::<String>)?;
        let form = match (unsigned, vector > 1 || scaled) {
            (true, _) => CodeForm::Unsigned,
            (false, true) => CodeForm::Tables { vector, scaled },
            (false, false) => CodeForm::Plain,
        };
        let groups = Groups { rows: groups[0], block: groups[1] };
        Ok(Job { function, name, job: WeightJob::Quantize { kind, groups, axes, form } })
    }

    /// Tables that were made elsewhere: `indices` of the weight's shape, or of vectors along an axis, `lut` as
    /// `constexpr_lut_to_dense` has it, and scales, which are empty where there are none.
    #[staticmethod]
    #[allow(clippy::too_many_arguments)]
    fn tables(
        function: String,
        name: String,
        bits: u8,
        indices: PyReadonlyArrayDyn<'_, u8>,
        lut: PyReadonlyArrayDyn<'_, f32>,
        vector_axis: Option<usize>,
        scale: PyReadonlyArrayDyn<'_, f32>,
        relative_mse: f64,
    ) -> PyResult<Job> {
        let wrong = |what: String| PyValueError::new_err(what);
        let bits = IndexBits::try_from(bits).map_err(wrong)?;
        let floats = |array: &PyReadonlyArrayDyn<'_, f32>| {
            let values = array.to_vec().map_err(|_| wrong("expected an array in C order".into()))?;
            Ok::<_, PyErr>((array.shape().to_vec(), values))
        };
        let codes = indices.to_vec().map_err(|_| wrong("expected indices in C order".into()))?;
        let indices = (indices.shape().to_vec(), pack_sub_byte(&codes, usize::from(bits.bits())));
        let (lut, scale) = (floats(&lut)?, Some(floats(&scale)?).filter(|(_, values)| !values.is_empty()));
        let tables = GivenTables { bits, indices, lut, vector_axis, scale, relative_mse };
        Ok(Job { function, name, job: WeightJob::Tables(tables.into()) })
    }

    /// Zeros up to a magnitude.
    #[staticmethod]
    fn threshold(function: String, name: String, threshold: f32, least: f64) -> Job {
        Job { function, name, job: WeightJob::Sparse(Pruning::Threshold { threshold, least }) }
    }

    /// Makes a job for a share of zeros; with a size, in blocks of neighbours on an axis.
    #[staticmethod]
    fn share(function: String, name: String, share: f64, size: usize, axis: usize) -> Job {
        let pruning = if size > 1 { Pruning::Blocks { share, size, axis } } else { Pruning::Share(share) };
        Job { function, name, job: WeightJob::Sparse(pruning) }
    }

    /// Makes a job for `n` zeros of `m` neighbours on an axis.
    #[staticmethod]
    fn neighbours(function: String, name: String, n: usize, m: usize, axis: usize) -> Job {
        Job { function, name, job: WeightJob::Sparse(Pruning::Neighbours { n, m, axis }) }
    }
}

/// Name, kind, bytes before and after, and relative error of a weight.
type ReportParts = (String, String, u64, u64, f64);

/// Writes a package with compressed weights. Samples are inputs of `runner`'s function in its order; for them the codes of the weights
/// `for_samples` are chosen.
#[pyfunction]
#[allow(clippy::too_many_arguments)]
fn compress(
    py: Python<'_>,
    path: PathBuf,
    spec: Option<Vec<u8>>,
    target: PathBuf,
    jobs: Vec<Job>,
    runner: Option<&Runner>,
    samples: Vec<Vec<Bound<'_, PyUntypedArray>>>,
    for_samples: Vec<String>,
) -> PyResult<Vec<ReportParts>> {
    let jobs = jobs.into_iter().map(|job| ((job.function, job.name), job.job)).collect();
    let samples =
        samples.iter().map(|s| s.iter().map(tensor).collect()).collect::<PyResult<Vec<Vec<_>>>>()?;
    let function = runner.map(|r| r.name().to_string());
    let reports = py.detach(|| {
        let package = CpuPackage::of(open(path, spec.as_deref())?);
        let weights = for_samples.into_iter().collect();
        let inputs = function.map(|name| PackageInputs::new(package.clone(), &name, &weights, samples));
        let mut inputs = inputs.transpose().map_err(exception)?;
        let mut moments = |function: &str, weight: &str| match &mut inputs {
            Some(inputs) => inputs.moments(function, weight),
            None => Ok(None),
        };
        compress_package(package.package(), &jobs, &mut moments, &target).map_err(exception)
    })?;
    Ok(reports.into_iter().map(|r| (r.name, r.kind, r.before, r.after, r.relative_mse)).collect())
}
