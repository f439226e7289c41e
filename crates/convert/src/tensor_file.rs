//! Files of single tensors: what is compressed, and what comes out.

use crate::checkpoint::open_safetensors;
use crate::nearest::did_you_mean;
use crate::one_tensor::{CompressedTensor, SystemTarget};
use crate::quant::Quant;
use crate::{Error, Result};
use anemoe_io::{Output, path_of};
use anemoe_kernels::MXFP4_TABLE;
use anemoe_mlpackage::mil::{DataType, TensorType, Value, ValueData};
use anemoe_mlpackage::package::{Package, is_model_name};
use anemoe_npz::{Array, ArrayData, read_npy, read_npz, write_npy, write_npz};
use half::f16;
use std::path::{Path, PathBuf};

/// A tensor that was read from a file.
pub struct LoadedTensor {
    /// Name in its file.
    pub name: String,
    /// Dimensions, outermost first.
    pub shape: Vec<usize>,
    /// Elements, row-major.
    pub values: Vec<f32>,
}

/// Splits `F.safetensors:TENSOR` or `F.mlpackage:TENSOR` into file and tensor; the tensor is none without the colon.
pub fn file_and_tensor(spec: &Path) -> (PathBuf, Option<String>) {
    const MARKS: [&[u8]; 3] = [b".safetensors:", b".mlpackage:", b".mlmodel:"];
    let bytes = spec.as_os_str().as_encoded_bytes();
    let end = |mark: &&[u8]| Some(bytes.windows(mark.len()).rposition(|w| w == *mark)? + mark.len());
    let Some(i) = MARKS.iter().filter_map(end).max() else { return (spec.into(), None) };
    (path_of(&bytes[..i - 1]), Some(String::from_utf8_lossy(&bytes[i..]).into_owned()))
}

impl LoadedTensor {
    /// Reads `F.npy`, or a tensor of `F.safetensors` or `F.mlpackage`, which `:TENSOR` names where there are several.
    ///
    /// # Errors
    /// The file cannot be read, or has no such tensor.
    pub fn read(spec: &Path) -> Result<LoadedTensor> {
        if spec.extension().is_some_and(|e| e == "npy") {
            let array = read_npy(spec)?;
            let values = array.to_f32();
            return Ok(LoadedTensor { name: spec.display().to_string(), shape: array.shape, values });
        }
        let (path, wanted) = file_and_tensor(spec);
        if is_model_name(&path) {
            return read_weight(&path, wanted.as_deref());
        }
        if path.extension().is_none_or(|e| e != "safetensors") {
            let what =
                format!("{}: expected F.npy, or F.safetensors or F.mlpackage with :TENSOR", path.display());
            return Err(Error::usage(what));
        }
        let source = open_safetensors(&path)?;
        let names: Vec<&str> = source.tensors().iter().map(|t| t.name.as_str()).collect();
        let info = &source.tensors()[find(&path, &names, wanted.as_deref(), ["tensor", ""])?];
        let mut values = vec![0f32; info.elements() as usize];
        source.read(&info.name, 0..info.elements(), &mut values)?;
        let shape = info.shape.iter().map(|&d| d as usize).collect();
        Ok(LoadedTensor { name: info.name.clone(), shape, values })
    }
}

/// Finds the tensor of this name, or the only one. `[noun, rest]` names what the file holds.
fn find(path: &Path, names: &[&str], wanted: Option<&str>, [noun, rest]: [&str; 2]) -> Result<usize> {
    let file = path.display();
    let what = match (wanted, names) {
        (None, [_]) => return Ok(0),
        (None, []) => format!("{file}: holds no {noun} of two or more axes{rest}"),
        (None, all) => {
            let first = &all[..all.len().min(5)];
            format!(
                "{file}: holds {} {noun}s{rest}, name one with :TENSOR ({}, ..)",
                all.len(),
                first.join(", ")
            )
        }
        (Some(wanted), all) => match all.iter().position(|name| *name == wanted) {
            Some(found) => return Ok(found),
            None => {
                format!("{file}: no {noun} `{wanted}`{rest}{}", did_you_mean(wanted, all.iter().copied()))
            }
        },
    };
    Err(Error::usage(what))
}

/// Reads a weight of a package: a constant in its weight file that is not compressed yet.
fn read_weight(path: &Path, wanted: Option<&str>) -> Result<LoadedTensor> {
    let package = Package::open(path)?;
    let functions = package.model().program.functions.values();
    let constants = functions.flat_map(|f| &f.block.operations).filter(|op| op.op_type == "const");
    let mut weights: Vec<(&str, &Value, &TensorType)> = constants
        .filter_map(|op| {
            let (output, value) = (op.outputs.first()?, op.attributes.get("val")?);
            let ty = value.ty.tensor()?;
            let is_weight = matches!(value.data, ValueData::Blob { .. }) && ty.rank() >= 2;
            let is_dense = matches!(ty.dtype, DataType::Float16 | DataType::Float32);
            (is_weight && is_dense).then_some((output.name.as_str(), value, ty))
        })
        .collect();
    weights.sort_by_key(|(name, ..)| *name);
    weights.dedup_by_key(|(name, ..)| *name);
    let names: Vec<&str> = weights.iter().map(|(name, ..)| *name).collect();
    let (name, value, ty) = weights[find(path, &names, wanted, ["weight", " that is not compressed"])?];
    let bytes = package.tensor_bytes(value)?;
    let values = match ty.dtype {
        DataType::Float16 => {
            bytes.chunks_exact(2).map(|b| half::f16::from_le_bytes([b[0], b[1]]).to_f32()).collect()
        }
        _ => bytes.chunks_exact(4).map(|b| f32::from_le_bytes([b[0], b[1], b[2], b[3]])).collect(),
    };
    let shape = ty.shape().unwrap_or_default().iter().map(|&d| d as usize).collect();
    Ok(LoadedTensor { name: name.into(), shape, values })
}

/// Reads the importances of the input channels, `[in]`.
///
/// # Errors
/// The file cannot be read, has no array of the tensor's name, or holds something else.
pub fn read_channel_importance(path: &Path, tensor: &str) -> Result<Vec<f32>> {
    let wrong = |what: String| Error::usage(format!("{}: {what}", path.display()));
    let array = match path.extension().and_then(|e| e.to_str()) {
        Some("npy") => read_npy(path)?,
        _ => read_npz(path)?.remove(tensor).ok_or_else(|| wrong(format!("no array `{tensor}`")))?,
    };
    let values = array.to_f32();
    if array.shape.len() != 1 || values.iter().any(|v| !v.is_finite() || *v < 0.0) {
        return Err(wrong("expected a vector of numbers from 0, one per input channel".into()));
    }
    Ok(values)
}

impl CompressedTensor {
    /// Writes a package with an operation that has this weight, an archive of elements, tables or scales and decoded values, or
    /// the decoded values alone, by the name's ending: `.mlpackage`, `.npz`, `.npy`.
    ///
    /// # Errors
    /// The file cannot be written.
    pub fn write(&self, shape: &[usize], out: &Output, target: SystemTarget) -> Result<()> {
        let array = |shape: &[usize], data: ArrayData| {
            let wrong = || Error::input("an array of another size than its shape");
            Array::new(shape.to_vec(), data).ok_or_else(wrong)
        };
        match out.path().extension().and_then(|e| e.to_str()) {
            Some("mlpackage") => return self.write_package(out.path(), out.replaces(), target),
            Some("npy") => return write_npy(out.path(), &array(shape, self.decode()?.into())?),
            _ => {}
        }
        let mut arrays = vec![("decoded".to_string(), array(shape, self.decode()?.into())?)];
        let dims = self.side_dims();
        match self.quant.kind {
            Quant::Fp16 => {}
            Quant::Lut { .. } => {
                arrays.push(("indices".into(), array(shape, self.elements().into())?));
                arrays.push(("lut".into(), array(&dims, self.side_values().into())?));
            }
            Quant::Mxfp4 => {
                arrays.push(("indices".into(), array(shape, self.elements().into())?));
                let table = MXFP4_TABLE.map(f16::from_f32).to_vec();
                arrays.push(("lut".into(), array(&[table.len()], table.into())?));
                arrays.push(("scale".into(), array(&dims, self.side_values().into())?));
            }
            Quant::Int { asymmetric, .. } => {
                let codes: Vec<i8> = self.elements().into_iter().map(|c| c as i8).collect();
                arrays.push(("data".into(), array(shape, codes.into())?));
                arrays.push(("scale".into(), array(&dims, self.side_values().into())?));
                if asymmetric {
                    arrays.push(("offset".into(), array(&dims, self.side_offsets().into())?));
                }
            }
        }
        write_npz(out.path(), &arrays)
    }
}
