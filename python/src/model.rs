//! A function of a package, ready to run, and its states.

use crate::exception;
use anemoe_io::locked;
use anemoe_kernels::round_to_f16;
use anemoe_mlpackage::mil::{DataType, Feature, FeatureKind, FeatureShape};
use anemoe_mlpackage::package::Package;
use anemoe_runtime::cpu::{
    ClassLabel, Classifier, CompiledFunction, CpuPackage, CpuStates, Options, Precision,
};
use anemoe_runtime::tensor::{Data, Tensor};
use numpy::{Element, PyArray1, PyArrayMethods, PyReadonlyArrayDyn, PyUntypedArray, PyUntypedArrayMethods};
use pyo3::exceptions::{PyKeyError, PyTypeError, PyValueError};
use pyo3::prelude::*;
use pyo3::types::{PyDict, PyList};
use std::path::PathBuf;
use std::sync::Mutex;

/// Opens a package from a path, or from a model in memory whose weights lie in the folder `weights`.
///
/// # Errors
/// The package is missing or invalid.
pub fn open(path: PathBuf, spec: Option<&[u8]>) -> PyResult<Package> {
    match spec {
        None => Package::open(&path),
        Some(bytes) => Package::of_model(bytes, &path),
    }
    .map_err(exception)
}

/// A classifier's outputs with label and probabilities, its tensor of probabilities, and its classes.
type ClassifierParts<'py> = (String, String, String, Bound<'py, PyList>);

/// A compiled function of a package.
#[pyclass(frozen, module = "anemoe._anemoe")]
pub struct Runner {
    function: CompiledFunction,
    precision: Precision,
    classifier: Option<Classifier>,
    /// Outputs as the package describes them; a classifier's label is none of the function's.
    described: Vec<Feature>,
    name: String,
    metadata: Vec<(String, String)>,
    specification_version: i32,
}

#[pymethods]
impl Runner {
    /// Opens a package and compiles a function. `path` is the package, or with `spec` the place that the model in memory has.
    #[new]
    #[pyo3(signature = (path, spec, function, precision, every_result = false))]
    fn new(
        py: Python<'_>,
        path: PathBuf,
        spec: Option<&[u8]>,
        function: Option<&str>,
        precision: &str,
        every_result: bool,
    ) -> PyResult<Runner> {
        let precision = match precision {
            "fp16" => Precision::Fp16,
            "fp32" => Precision::Fp32,
            other => {
                return Err(PyValueError::new_err(format!(
                    "expected precision 'fp16' or 'fp32', got '{other}'"
                )));
            }
        };
        let spec = spec.map(<[u8]>::to_vec);
        py.detach(|| {
            let package = CpuPackage::of(open(path, spec.as_deref())?);
            let model = package.package().model();
            let known: Vec<&str> = model.functions.iter().map(|f| f.name.as_str()).collect();
            if let Some(name) = function.filter(|name| !known.contains(name)) {
                let known = known.join("', '");
                return Err(PyValueError::new_err(format!("no function '{name}'; there is '{known}'")));
            }
            let described = package.description(function).map_err(exception)?.clone();
            let options = Options { precision, ..Options::default() };
            let function = match every_result {
                false => package.compile(function, options),
                true => package.compile_traced(function, options, &|_| true),
            };
            Ok(Runner {
                classifier: package.classifier(Some(&described.name)).map_err(exception)?,
                function: function.map_err(exception)?,
                precision,
                described: described.outputs,
                name: described.name,
                metadata: model.metadata.clone().into_iter().collect(),
                specification_version: model.specification_version,
            })
        })
    }

    /// Returns the name of the function.
    #[getter]
    pub fn name(&self) -> &str {
        &self.name
    }

    /// Returns the metadata of the package: author, license, user-defined texts.
    #[getter]
    fn metadata(&self) -> Vec<(String, String)> {
        self.metadata.clone()
    }

    /// Returns the version of the specification.
    #[getter]
    fn specification_version(&self) -> i32 {
        self.specification_version
    }

    /// Returns the inputs in the order of `run`.
    #[getter]
    fn inputs<'py>(&self, py: Python<'py>) -> PyResult<Bound<'py, PyList>> {
        features(py, self.function.inputs())
    }

    /// Returns the states.
    #[getter]
    fn states<'py>(&self, py: Python<'py>) -> PyResult<Bound<'py, PyList>> {
        features(py, self.function.states())
    }

    /// Returns the outputs as the package describes them.
    #[getter]
    fn described_outputs<'py>(&self, py: Python<'py>) -> PyResult<Bound<'py, PyList>> {
        features(py, &self.described)
    }

    /// Returns the outputs in the order of `run`.
    #[getter]
    fn outputs<'py>(&self, py: Python<'py>) -> PyResult<Bound<'py, PyList>> {
        features(py, self.function.outputs())
    }

    /// Returns a classifier's outputs, tensor and classes: (label, probabilities, tensor, classes).
    #[getter]
    fn classifier<'py>(&self, py: Python<'py>) -> PyResult<Option<ClassifierParts<'py>>> {
        let Some(c) = &self.classifier else { return Ok(None) };
        let classes = PyList::empty(py);
        for class in &c.classes {
            match class {
                ClassLabel::Text(text) => classes.append(text)?,
                ClassLabel::Number(n) => classes.append(n)?,
            }
        }
        Ok(Some((c.label.clone(), c.probabilities.clone(), c.tensor.clone(), classes)))
    }

    /// Makes the states of a new sequence, all zero.
    fn make_state(&self) -> State {
        State {
            states: Mutex::new(CpuStates::new(&self.function)),
            features: self.function.states().to_vec(),
        }
    }

    /// Runs the function on arrays of float32, int32 or bool in its order, without Python's lock. Results take over the memory that
    /// they were computed in.
    fn run<'py>(
        &self,
        py: Python<'py>,
        inputs: Vec<Bound<'py, PyUntypedArray>>,
        state: Option<&State>,
    ) -> PyResult<Vec<Bound<'py, PyAny>>> {
        let mut inputs: Vec<Tensor> = inputs.iter().map(tensor).collect::<PyResult<_>>()?;
        if let Some(state) = state.filter(|state| state.features != self.function.states()) {
            let names =
                |features: &[Feature]| features.iter().map(|f| f.name.clone()).collect::<Vec<_>>().join(", ");
            return Err(PyValueError::new_err(format!(
                "expected a state that this model's make_state() returned, got one of another model: ({}), expected ({})",
                names(&state.features),
                names(self.function.states())
            )));
        }
        let outputs = py.detach(|| {
            for (input, feature) in inputs.iter_mut().zip(self.function.inputs()) {
                if let (Some(values), DataType::Float16, Precision::Fp16) =
                    (input.as_f32_mut(), feature.dtype, self.precision)
                {
                    round_to_f16(values);
                }
            }
            let (inputs, mut outputs) = (inputs.iter().collect::<Vec<_>>(), Vec::new());
            let ran = match state {
                Some(state) => self.function.run(&inputs, &mut locked(&state.states), &mut outputs),
                None => self.function.run(&inputs, &mut CpuStates::new(&self.function), &mut outputs),
            };
            ran.map(|_| outputs).map_err(exception)
        })?;
        outputs.into_iter().map(|output| array(py, output)).collect()
    }
}

/// Values that a sequence carries from call to call.
#[pyclass(frozen, module = "anemoe._anemoe")]
pub struct State {
    states: Mutex<CpuStates>,
    features: Vec<Feature>,
}

#[pymethods]
impl State {
    /// Returns the value of a state.
    fn read_state<'py>(&self, py: Python<'py>, name: &str) -> PyResult<Bound<'py, PyAny>> {
        match py.detach(|| locked(&self.states).get(name)) {
            Some(value) => array(py, value),
            None => Err(self.unknown(name)),
        }
    }

    /// Sets a state to an array of float32.
    fn write_state(&self, py: Python<'_>, name: &str, value: &Bound<'_, PyUntypedArray>) -> PyResult<()> {
        if self.features.iter().all(|f| f.name != name) {
            return Err(self.unknown(name));
        }
        let value = tensor(value)?;
        let current = py.detach(|| locked(&self.states).get(name)).map(|t| t.shape).unwrap_or_default();
        if current != value.shape {
            let (wanted, got) = (tuple(&current), tuple(&value.shape));
            return Err(PyValueError::new_err(format!("state '{name}': expected shape {wanted}, got {got}")));
        }
        py.detach(|| locked(&self.states).set(name, value)).map_err(exception)
    }

    /// Returns the names of the states.
    #[getter]
    fn names(&self) -> Vec<String> {
        self.features.iter().map(|f| f.name.clone()).collect()
    }
}

impl State {
    fn unknown(&self, name: &str) -> PyErr {
        PyKeyError::new_err(format!("no state '{name}'; there is '{}'", self.names().join("', '")))
    }
}

/// Writes a shape as Python does: `(1,)`, `(2, 3)`.
fn tuple(shape: &[usize]) -> String {
    match shape {
        [one] => format!("({one},)"),
        all => format!("({})", all.iter().map(ToString::to_string).collect::<Vec<_>>().join(", ")),
    }
}

/// Copies an array, so that nobody changes it while the function runs without Python's lock.
pub fn tensor(array: &Bound<'_, PyUntypedArray>) -> PyResult<Tensor> {
    fn elements<T: Element>(array: &Bound<'_, PyUntypedArray>) -> Option<PyResult<Vec<T>>> {
        let array: PyReadonlyArrayDyn<'_, T> = array.extract().ok()?;
        Some(array.to_vec().map_err(|_| PyTypeError::new_err("expected an array in C order")))
    }
    let shape = array.shape().to_vec();
    let data = if let Some(v) = elements::<f32>(array) {
        Data::F32(v?)
    } else if let Some(v) = elements::<i32>(array) {
        Data::I32(v?)
    } else if let Some(v) = elements::<bool>(array) {
        Data::Bool(v?)
    } else {
        return Err(PyTypeError::new_err(format!("expected float32, int32 or bool, got {}", array.dtype())));
    };
    Ok(Tensor { shape, data })
}

/// Makes an array that owns the tensor's memory.
pub fn array(py: Python<'_>, tensor: Tensor) -> PyResult<Bound<'_, PyAny>> {
    fn of<T: Element>(py: Python<'_>, v: Vec<T>, shape: Vec<usize>) -> PyResult<Bound<'_, PyAny>> {
        Ok(PyArray1::from_vec(py, v).reshape(shape)?.into_any())
    }
    match tensor.data {
        Data::F32(v) => of(py, v, tensor.shape),
        Data::I32(v) => of(py, v, tensor.shape),
        Data::Bool(v) => of(py, v, tensor.shape),
        Data::Str(v) => Ok(PyList::new(py, v)?.into_any()),
    }
}

/// Describes features as dicts: name, kind, dtype, shape, and what else they have.
fn features<'py>(py: Python<'py>, features: &[Feature]) -> PyResult<Bound<'py, PyList>> {
    let list = PyList::empty(py);
    for f in features {
        let d = PyDict::new(py);
        let kind = match f.kind {
            FeatureKind::MultiArray => "multiArray",
            FeatureKind::Image(color) => {
                d.set_item("color_space", color.name())?;
                "image"
            }
            FeatureKind::Scalar => match f.dtype {
                DataType::Int64 => "int64",
                DataType::Float64 => "double",
                _ => "string",
            },
            FeatureKind::Dictionary => "dictionary",
            FeatureKind::Sequence => "sequence",
        };
        d.set_item("name", &f.name)?;
        d.set_item("kind", kind)?;
        d.set_item("dtype", numpy_name(f.dtype))?;
        d.set_item("short_description", &f.short_description)?;
        d.set_item("default", f.default)?;
        d.set_item("shape", f.shape.default().map(<[u64]>::to_vec))?;
        match &f.shape {
            FeatureShape::Enumerated(all) => d.set_item("shapes", all)?,
            FeatureShape::Range { ranges, .. } => d.set_item("ranges", ranges.clone())?,
            FeatureShape::Fixed(_) | FeatureShape::Dynamic => {}
        }
        list.append(d)?;
    }
    Ok(list)
}

/// Returns NumPy's name of a type.
pub fn numpy_name(dtype: DataType) -> &'static str {
    match dtype {
        DataType::Float16 => "float16",
        DataType::Float32 => "float32",
        DataType::Float64 => "float64",
        other => other.name(),
    }
}
