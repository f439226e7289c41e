//! Runs one package on arrays from files.

use crate::cpu::{CompiledFunction, CpuPackage, CpuStates, Options, Precision};
use crate::tensor::{Data, Tensor};
use crate::{Error, Result};
use anemoe_mlpackage::mil::{DataType, Feature, FeatureShape};
use anemoe_npz::{Array, ArrayData, read_npz_within, write_npz};
use half::f16;
use std::collections::BTreeMap;
use std::ffi::OsStr;
use std::path::{Path, PathBuf};

/// Prefix of a state's key in an archive.
const STATE: &str = "state:";
/// Most bytes that a function's inputs and states justify in an archive; a longer archive may hold as many bytes as it has.
const MAX_JUSTIFIED: u64 = 1 << 30;

/// A run of a package over several sets of inputs, in order, with states carried over.
#[derive(Clone, Debug)]
pub struct Prediction {
    /// Path of the package.
    pub package: PathBuf,
    /// Name of the function; the default one if absent.
    pub function: Option<String>,
    /// Rounding of results.
    pub precision: Precision,
    /// Paths of the archives, one per step: an array per input, and `state:NAME` for the initial value of a state.
    pub inputs: Vec<PathBuf>,
    /// Path of the outputs; `{}` becomes the step's number. Without `{}` only the last step is written.
    pub outputs: PathBuf,
}

/// An archive of outputs that was written.
#[derive(Clone, Debug, PartialEq)]
pub struct Written {
    /// Path of the archive.
    pub path: PathBuf,
    /// Names and shapes of its arrays.
    pub arrays: Vec<(String, Vec<usize>)>,
}

impl Prediction {
    /// Returns the paths of the archives that [`Prediction::run`] writes, in order.
    pub fn targets(&self) -> Vec<PathBuf> {
        let every = self.outputs.to_string_lossy().contains("{}");
        let steps =
            if every { 0..self.inputs.len() } else { self.inputs.len().saturating_sub(1)..self.inputs.len() };
        steps.map(|step| numbered(&self.outputs, step)).collect()
    }

    /// Runs every step and writes outputs and states. Returns the written archives.
    ///
    /// # Errors
    /// The package or an archive is missing or invalid, an array does not fit its input, or an operation fails.
    pub fn run(&self) -> Result<Vec<Written>> {
        let package = CpuPackage::open(&self.package)?;
        let options = Options { precision: self.precision, ..Options::default() };
        let function = package.compile(self.function.as_deref(), options)?;
        let mut states = CpuStates::new(&function);
        let mut outputs = Vec::new();
        let every = self.outputs.to_string_lossy().contains("{}");
        let mut written = Vec::new();
        for (step, path) in self.inputs.iter().enumerate() {
            let arrays = read_npz_within(path, justified_bytes(&function))?;
            let inputs = bind(&function, &mut states, arrays, path)?;
            function.run(&inputs.iter().collect::<Vec<_>>(), &mut states, &mut outputs)?;
            if every || step + 1 == self.inputs.len() {
                let target = numbered(&self.outputs, step);
                let entries = results(&function, &outputs, &states, self.precision);
                let arrays = entries.iter().map(|(n, a)| (n.clone(), a.shape.clone())).collect();
                write_npz(&target, &entries)?;
                written.push(Written { path: target, arrays });
            }
        }
        Ok(written)
    }
}

/// Returns the bytes that arrays of a function's inputs and states may take: numbers of 8 bytes, and headers.
fn justified_bytes(function: &CompiledFunction) -> u64 {
    const HEADER: u64 = 1 << 10;
    let elements = |shape: &[u64]| shape.iter().fold(1, |n: u64, &d| n.saturating_mul(d));
    let bytes = function.inputs().iter().chain(function.states()).map(|f| {
        let elements = match &f.shape {
            FeatureShape::Fixed(shape) => elements(shape),
            FeatureShape::Enumerated(all) => all.iter().map(|s| elements(s)).max().unwrap_or(0),
            // The upper bounds of a range would justify far more than real inputs have.
            FeatureShape::Range { default, .. } => elements(default),
            FeatureShape::Dynamic => 0,
        };
        elements.saturating_mul(8).saturating_add(HEADER)
    });
    bytes.fold(0, u64::saturating_add).min(MAX_JUSTIFIED)
}

/// Converts arrays to a function's inputs, in its order, and sets states from the arrays `state:NAME`.
pub fn bind(
    function: &CompiledFunction,
    states: &mut CpuStates,
    mut arrays: BTreeMap<String, Array>,
    path: &Path,
) -> Result<Vec<Tensor>> {
    let wrong = |what: String| Error::invalid(path, format!("inputs: {what}"));
    let mut inputs = Vec::new();
    for feature in function.inputs() {
        let array = arrays.remove(&feature.name).ok_or_else(|| {
            let names: Vec<&str> = function.inputs().iter().map(|f| f.name.as_str()).collect();
            wrong(format!("no array `{}`; the function takes {}", feature.name, names.join(", ")))
        })?;
        inputs.push(
            to_tensor(array, feature).map_err(|what| wrong(format!("array `{}`: {what}", feature.name)))?,
        );
    }
    for (name, array) in arrays {
        let Some(state) = name.strip_prefix(STATE) else {
            return Err(wrong(format!("array `{name}` is not an input of the function")));
        };
        let value = Tensor::f32(&array.shape, array.to_f32());
        states.set(state, value).map_err(|e| wrong(e.to_string()))?;
    }
    Ok(inputs)
}

fn to_tensor(array: Array, feature: &Feature) -> std::result::Result<Tensor, String> {
    let is_float = matches!(array.data, ArrayData::F16(_) | ArrayData::F32(_) | ArrayData::F64(_));
    let mut shape = array.shape.clone();
    // The description of a scalar has one element; the array may have no axis or one.
    if shape.is_empty() && feature.shape == FeatureShape::Fixed(vec![1]) {
        shape = vec![1];
    }
    if feature.dtype.is_float() {
        if !is_float {
            return Err(format!("integers, expected {}", feature.dtype));
        }
        return Ok(Tensor::f32(&shape, array.to_f32()));
    }
    let ints: Option<Vec<i32>> = match &array.data {
        ArrayData::F16(_) | ArrayData::F32(_) | ArrayData::F64(_) => {
            return Err(format!("floating point numbers, expected {}", feature.dtype));
        }
        _ => array.to_i64().and_then(|v| v.into_iter().map(|v| i32::try_from(v).ok()).collect()),
    };
    let ints = ints.ok_or_else(|| "a number that does not fit int32".to_string())?;
    Ok(Tensor::i32(&shape, ints))
}

/// Returns the outputs of a function's run and its states by name, in the types of the package's description.
pub fn results(
    function: &CompiledFunction,
    outputs: &[Tensor],
    states: &CpuStates,
    precision: Precision,
) -> Vec<(String, Array)> {
    let mut entries = Vec::new();
    for (feature, output) in function.outputs().iter().zip(outputs) {
        entries.push((feature.name.clone(), to_array(output, feature.dtype, precision)));
    }
    for name in states.names() {
        if let Some(value) = states.get(name) {
            entries.push((format!("{STATE}{name}"), to_array(&value, DataType::Float16, precision)));
        }
    }
    entries
}

fn to_array(t: &Tensor, dtype: DataType, precision: Precision) -> Array {
    let data = match &t.data {
        // Without rounding, f32 holds more than fp16 could.
        Data::F32(v) if dtype == DataType::Float16 && precision == Precision::Fp16 => {
            ArrayData::F16(v.iter().map(|&x| f16::from_f32(x)).collect())
        }
        Data::F32(v) => ArrayData::F32(v.clone()),
        Data::I32(v) => ArrayData::I32(v.clone()),
        Data::Bool(v) => ArrayData::Bool(v.clone()),
        Data::Str(_) => ArrayData::I32(Vec::new()),
    };
    Array { shape: t.shape.clone(), data }
}
/// Replaces `{}` by the step's number. Parts of the path that are not UTF-8 stay as they are.
fn numbered(outputs: &Path, step: usize) -> PathBuf {
    let number = |part: &OsStr| match part.to_str() {
        Some(text) => text.replace("{}", &step.to_string()).into(),
        None => part.to_os_string(),
    };
    outputs.components().map(|c| number(c.as_os_str())).collect()
}
