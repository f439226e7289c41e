//! Matrices and vectors of a shard, read from the checkpoint and written to the package in pieces.

use crate::family::Family;
use crate::importance::Importance;
use crate::plan::{MatrixPlan, VectorPlan};
use crate::quant::{Granularity, MatrixQuant, Quant};
use crate::quantize::{Encoder, Metrics, Side, TooLarge};
use crate::{Error, Result};
use anemoe_mlpackage::blob::{BlobWriter, pack_sub_byte};
use anemoe_mlpackage::mil::{DataType, Value};
use half::f16;
use std::collections::BTreeMap;

/// From this many elements on, a tensor goes to the weight file, as coremltools has it.
const BLOB_ELEMENTS: u64 = 10;

/// What a package already holds, by name.
#[derive(Debug, Default)]
pub struct Stored {
    matrices: BTreeMap<String, StoredMatrix>,
    vectors: BTreeMap<String, Value>,
}

/// A weight of an operation, whose axes are those of the operation.
#[derive(Clone, Debug)]
pub enum StoredMatrix {
    /// fp16.
    Dense(Value),
    /// Operands of `constexpr_lut_to_dense`.
    Lut {
        /// Of the weight's shape.
        indices: Value,
        /// The weight's rank and two more axes: groups per axis, `2^bits`, 1; fp16.
        lut: Value,
    },
    /// Operands of `constexpr_blockwise_shift_scale`.
    Int {
        /// Of the weight's shape.
        data: Value,
        /// Of the weight's rank: blocks per axis; fp16.
        scale: Value,
        /// As `scale`, of the type of `data`.
        offset: Option<Value>,
    },
}

impl Stored {
    pub(super) fn matrix(&self, name: &str) -> anemoe_mlpackage::Result<&StoredMatrix> {
        let missing = || anemoe_mlpackage::Error::InvalidProgram(format!("no matrix `{name}` is stored"));
        self.matrices.get(name).ok_or_else(missing)
    }

    pub(super) fn vector(&self, name: &str) -> anemoe_mlpackage::Result<Value> {
        let missing = || anemoe_mlpackage::Error::InvalidProgram(format!("no vector `{name}` is stored"));
        self.vectors.get(name).cloned().ok_or_else(missing)
    }
}

/// Type of the stored elements of a kind.
pub fn element_type(kind: Quant) -> DataType {
    match kind {
        Quant::Fp16 => DataType::Float16,
        Quant::Int { granularity: Granularity::Block, .. } => DataType::Int4,
        Quant::Int { .. } => DataType::Int8,
        Quant::Lut { bits, .. } => {
            DataType::uint_of_bits(usize::from(bits)).expect("bits of a kind have an index type")
        }
    }
}

/// How a matrix of output channels x input channels lies in an operation's weight.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Axes {
    /// `[out, in, 1, 1]`: convolution.
    Convolution,
    /// `[out, in]`: linear, and matmul with `transpose_y`.
    Linear,
    /// `[in, out]`: the second operand of matmul.
    MatMul,
}

impl Axes {
    /// Dimensions of the weight.
    pub fn dims(self, rows: usize, cols: usize) -> Vec<u64> {
        let (rows, cols) = (rows as u64, cols as u64);
        match self {
            Axes::Convolution => vec![rows, cols, 1, 1],
            Axes::Linear => vec![rows, cols],
            Axes::MatMul => vec![cols, rows],
        }
    }
}

/// The operands that stand for packed elements, which `elements` refers to, and their tables or scales. Writes these to
/// the weight file where they are large.
///
/// # Errors
/// Writing fails.
pub fn operands(
    blobs: &mut BlobWriter,
    quant: MatrixQuant,
    axes: Axes,
    (rows, cols): (usize, usize),
    elements: Value,
    side: &Side,
) -> Result<StoredMatrix> {
    let (block_rows, block_cols) = quant.block(rows, cols);
    let (groups, blocks) = (rows / block_rows.max(1), cols / block_cols.max(1));
    let mut place = |dtype: DataType, dims: &[u64], bytes: Vec<u8>| -> Result<Value> {
        let count: u64 = dims.iter().product();
        if count < BLOB_ELEMENTS {
            return Ok(Value::bytes(dtype, dims, bytes));
        }
        Ok(Value::blob(dtype, dims, blobs.append(dtype, count, &bytes)?))
    };
    // Scales of a matrix that lies the other way round are turned too.
    let turned = |values: &[f16]| -> Vec<f16> {
        match axes {
            Axes::MatMul => (0..groups * blocks).map(|i| values[i % groups * blocks + i / groups]).collect(),
            _ => values.to_vec(),
        }
    };
    let bytes = |values: &[f16]| values.iter().flat_map(|v| v.to_le_bytes()).collect::<Vec<u8>>();
    let mut dims = axes.dims(groups, blocks);
    Ok(match quant.kind {
        Quant::Fp16 => StoredMatrix::Dense(elements),
        Quant::Lut { bits, .. } => {
            dims.extend([1 << bits, 1]);
            StoredMatrix::Lut {
                indices: elements,
                lut: place(DataType::Float16, &dims, bytes(&side.values))?,
            }
        }
        Quant::Int { asymmetric, granularity } => {
            let scale = place(DataType::Float16, &dims, bytes(&turned(&side.values)))?;
            let offset = match asymmetric {
                false => None,
                true => {
                    // Offsets as halves, which hold them exactly, to be turned as scales are.
                    let offsets: Vec<f16> =
                        side.offsets.iter().map(|&o| f16::from_f32(f32::from(o))).collect();
                    let codes: Vec<u8> = turned(&offsets).iter().map(|o| o.to_f32() as i8 as u8).collect();
                    let packed = pack_sub_byte(&codes, usize::from(granularity.bits()));
                    Some(place(element_type(quant.kind), &dims, packed)?)
                }
            };
            StoredMatrix::Int { data: elements, scale, offset }
        }
    })
}

fn to_f16(tensor: &str, values: &[f32], out: &mut Vec<f16>) -> Result<()> {
    out.clear();
    out.extend(values.iter().map(|&v| f16::from_f32(v)));
    match out.iter().position(|v| !v.is_finite()) {
        None => Ok(()),
        Some(i) => Err(Error::Usage(format!("tensor `{tensor}`: {}", TooLarge(values[i])))),
    }
}

/// An error of reading, or a value that fp16 cannot hold, whose tensor is yet to be named.
enum Failed {
    Read(Error),
    TooLarge(TooLarge),
}

impl From<TooLarge> for Failed {
    fn from(e: TooLarge) -> Self {
        Failed::TooLarge(e)
    }
}

/// Compresses a matrix of the plan, handing its packed elements to `write`.
///
/// # Errors
/// The checkpoint cannot be read or holds a value that fp16 cannot, the importances do not fit, or writing fails.
pub fn encode_matrix(
    family: &dyn Family,
    plan: &MatrixPlan,
    importance: Option<&Importance>,
    write: &mut dyn FnMut(&[u8]) -> Result<()>,
) -> Result<Side> {
    let importance = importance.map(|all| all.of(plan)).transpose()?.flatten();
    let encoder = Encoder { rows: plan.rows, cols: plan.cols, quant: plan.quant, exact: false, importance };
    let read = |first: usize, out: &mut [f32]| {
        let start = plan.offset + first as u64 * plan.cols as u64;
        family.read(&plan.tensor, start..start + out.len() as u64, out).map_err(Failed::Read)
    };
    encoder.run(&read, &mut |bytes| write(bytes).map_err(Failed::Read)).map_err(|e| match e {
        Failed::Read(e) => e,
        Failed::TooLarge(e) => Error::Usage(format!("tensor `{}`: {e}", plan.tensor)),
    })
}

/// Writes a matrix and gives how far it is from the original.
///
/// # Errors
/// As [`encode_matrix`].
pub fn store_matrix(
    blobs: &mut BlobWriter,
    family: &dyn Family,
    plan: &MatrixPlan,
    importance: Option<&Importance>,
    stored: &mut Stored,
) -> Result<Metrics> {
    let dtype = element_type(plan.quant.kind);
    let offset = blobs.begin(dtype, plan.weights())?;
    let side = encode_matrix(family, plan, importance, &mut |bytes| Ok(blobs.write(bytes)?))?;
    blobs.end()?;
    let elements = Value::blob(dtype, &Axes::Convolution.dims(plan.rows, plan.cols), offset);
    let size = (plan.rows, plan.cols);
    let matrix = operands(blobs, plan.quant, Axes::Convolution, size, elements, &side)?;
    stored.matrices.insert(plan.name.clone(), matrix);
    Ok(side.metrics)
}

/// Writes a vector.
///
/// # Errors
/// As [`store_matrix`].
pub fn store_vector(
    blobs: &mut BlobWriter,
    family: &dyn Family,
    plan: &VectorPlan,
    stored: &mut Stored,
) -> Result<()> {
    let n = plan.weights();
    let mut values = vec![0f32; n as usize];
    family.read(&plan.tensor, 0..n, &mut values)?;
    values.iter_mut().for_each(|v| *v *= plan.scale);
    let mut halves = Vec::new();
    to_f16(&plan.tensor, &values, &mut halves)?;
    let value = if n >= BLOB_ELEMENTS {
        let bytes: Vec<u8> = halves.iter().flat_map(|v| v.to_le_bytes()).collect();
        Value::blob(DataType::Float16, &plan.dims, blobs.append(DataType::Float16, n, &bytes)?)
    } else {
        Value::fp16_tensor(&plan.dims, &halves)
    };
    stored.vectors.insert(plan.name.clone(), value);
    Ok(())
}
