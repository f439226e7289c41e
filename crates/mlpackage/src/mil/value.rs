//! Constant values: immediate, or a reference into a weight file.

use super::types::{DataType, TensorType, ValueType};
use half::f16;

/// A typed constant.
#[derive(Clone, Debug, PartialEq)]
pub struct Value {
    /// Type; every dimension of a tensor is known.
    pub ty: ValueType,
    /// Data, or its place in a weight file.
    pub data: ValueData,
}

/// Data of a value, or its place in a weight file.
#[derive(Clone, Debug, PartialEq)]
pub enum ValueData {
    /// Data in the program itself.
    Immediate(Immediate),
    /// Data in a weight file of the package.
    Blob {
        /// Stored path, for instance `@model_path/weights/weight.bin`.
        file: String,
        /// Absolute offset of the blob's *metadata* (its data lies 64 bytes behind it).
        offset: u64,
    },
}

/// Data that is stored in the program.
#[derive(Clone, Debug, PartialEq)]
pub enum Immediate {
    /// A tensor's elements.
    Tensor(TensorData),
    /// A tuple's members.
    Tuple(Vec<Value>),
    /// A list's elements.
    List(Vec<Value>),
    /// A dictionary's entries, in stored order.
    Dictionary(Vec<(Value, Value)>),
}

/// Elements of an immediate tensor, in the field that the format prescribes for the element type.
#[derive(Clone, Debug, PartialEq)]
pub enum TensorData {
    /// fp32.
    Floats(Vec<f32>),
    /// int32, int16 and uint16.
    Ints(Vec<i32>),
    /// bool.
    Bools(Vec<bool>),
    /// string.
    Strings(Vec<String>),
    /// int64.
    LongInts(Vec<i64>),
    /// fp64.
    Doubles(Vec<f64>),
    /// Raw little-endian bytes of the other types: fp16, int8, uint8, uint32 and the sub-byte types (packed LSB first).
    Bytes(Vec<u8>),
}

/// File name that coremltools gives to the one weight file of a package.
pub const WEIGHT_FILE: &str = "@model_path/weights/weight.bin";

impl Value {
    fn tensor(dtype: DataType, dims: &[u64], data: TensorData) -> Self {
        Value {
            ty: ValueType::Tensor(TensorType::fixed(dtype, dims)),
            data: ValueData::Immediate(Immediate::Tensor(data)),
        }
    }

    /// Makes a bool scalar.
    pub fn bool(v: bool) -> Self {
        Value::tensor(DataType::Bool, &[], TensorData::Bools(vec![v]))
    }

    /// Makes a string scalar.
    pub fn string(v: impl Into<String>) -> Self {
        Value::tensor(DataType::String, &[], TensorData::Strings(vec![v.into()]))
    }

    /// Makes an int32 scalar.
    pub fn int32(v: i32) -> Self {
        Value::tensor(DataType::Int32, &[], TensorData::Ints(vec![v]))
    }

    /// Makes an int32 vector.
    pub fn int32s(v: &[i32]) -> Self {
        Value::tensor(DataType::Int32, &[v.len() as u64], TensorData::Ints(v.to_vec()))
    }

    /// Makes a bool vector.
    pub fn bools(v: &[bool]) -> Self {
        Value::tensor(DataType::Bool, &[v.len() as u64], TensorData::Bools(v.to_vec()))
    }

    /// Makes an fp32 scalar.
    pub fn fp32(v: f32) -> Self {
        Value::tensor(DataType::Float32, &[], TensorData::Floats(vec![v]))
    }

    /// Makes an fp16 scalar.
    pub fn fp16(v: f16) -> Self {
        Value::tensor(DataType::Float16, &[], TensorData::Bytes(v.to_le_bytes().to_vec()))
    }

    /// Makes an immediate tensor of a type that the format stores as bytes (fp16, int8, uint8, uint32, sub-byte types).
    pub fn bytes(dtype: DataType, dims: &[u64], bytes: Vec<u8>) -> Self {
        Value::tensor(dtype, dims, TensorData::Bytes(bytes))
    }

    /// Makes an immediate fp16 tensor.
    pub fn fp16_tensor(dims: &[u64], v: &[f16]) -> Self {
        Value::bytes(DataType::Float16, dims, v.iter().flat_map(|x| x.to_le_bytes()).collect())
    }

    /// Makes a reference to the blob whose metadata lies at `offset` of the package's weight file.
    pub fn blob(dtype: DataType, dims: &[u64], offset: u64) -> Self {
        Value {
            ty: ValueType::Tensor(TensorType::fixed(dtype, dims)),
            data: ValueData::Blob { file: WEIGHT_FILE.to_string(), offset },
        }
    }

    /// Returns the immediate tensor data; `None` for a blob or another type.
    pub fn tensor_data(&self) -> Option<&TensorData> {
        match &self.data {
            ValueData::Immediate(Immediate::Tensor(t)) => Some(t),
            _ => None,
        }
    }

    /// Returns the string of an immediate string scalar.
    pub fn as_str(&self) -> Option<&str> {
        match self.tensor_data()? {
            TensorData::Strings(v) if v.len() == 1 => Some(&v[0]),
            _ => None,
        }
    }

    /// Returns the int32 elements of an immediate tensor.
    pub fn as_ints(&self) -> Option<&[i32]> {
        match self.tensor_data()? {
            TensorData::Ints(v) => Some(v),
            _ => None,
        }
    }

    /// Returns the element of an immediate bool scalar.
    pub fn as_bool(&self) -> Option<bool> {
        match self.tensor_data()? {
            TensorData::Bools(v) if v.len() == 1 => Some(v[0]),
            _ => None,
        }
    }
}
