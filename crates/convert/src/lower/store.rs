//! Matrices and vectors of a shard, read from the checkpoint and written to the package in pieces.

use crate::importance::Importance;
use crate::models::CheckedCheckpoint;
use crate::plan::{MatrixPlan, PlannedShard, VectorPlan};
use crate::quant::Quant;
use crate::quantize::{Encoder, Metrics, OutsideFp16, ReadRows, TablesAndScales};
use crate::{Error, Result};
use anemoe_bundle::{IndexBits, IntBits, WeightFormat};
use anemoe_kernels::{MXFP4_TABLE, Weight};
use anemoe_mlpackage::blob::{BlobOffsets, BlobWriter, pack_sub_byte};
use anemoe_mlpackage::mil::builder::{FunctionBuilder, Var};
use anemoe_mlpackage::mil::{DataType, Value};
use half::f16;
use std::collections::BTreeMap;

/// Fewest elements of a tensor that goes to the weight file, as in coremltools.
const BLOB_ELEMENTS: u64 = 10;
/// Name of the stored triangle: row i has ones for the classes before i, so that a product with it adds these up.
pub const TRIANGLE: &str = "routing_triangle";

/// Weights that a package already holds, by name.
#[derive(Debug, Default)]
pub struct Stored {
    matrices: BTreeMap<String, StoredMatrix>,
    vectors: BTreeMap<String, Value>,
}

/// Weight of an operation, with the operation's axes. Tables have two more axes than the weight, `2^bits` and 1.
/// Tables and scales are fp16; offsets have the type of the elements.
pub type StoredMatrix = Weight<Value, Value>;

impl Stored {
    /// Describes the weights of a shard before it is written: types, shapes and offsets of blobs as in its package, and no
    /// data. Vectors too short for the weight file are zeros.
    ///
    /// # Errors
    /// The weight file would be larger than a file can be.
    pub fn from_plan(shard: &PlannedShard) -> Result<Stored> {
        let mut blobs = BlobOffsets::default();
        let mut place = |dtype: DataType, dims: &[u64], is_blob: bool| -> Result<Value> {
            let count: u64 = dims.iter().product();
            if is_blob || count >= BLOB_ELEMENTS {
                return Ok(Value::blob(dtype, dims, blobs.append(dtype, count)?));
            }
            Ok(Value::bytes(dtype, dims, vec![0; dtype.packed_bytes(count).unwrap_or(0) as usize]))
        };
        let mut stored = Stored::default();
        for plan in &shard.matrices {
            let (dtype, dims) = (element_type(plan.quant.kind), side_dims(plan));
            let elements = place(dtype, &plan.dims(), true)?;
            let mut side = |dtype| place(dtype, &dims, false);
            let format = plan.quant.format(plan.rows, plan.cols);
            let values = if format.has_values() { Some(side(DataType::Float16)?) } else { None };
            let offsets = if format.has_offsets() { Some(side(dtype)?) } else { None };
            let matrix = Weight { format, elements, values, offsets };
            stored.matrices.insert(plan.name.clone(), matrix);
        }
        for plan in &shard.vectors {
            stored.vectors.insert(plan.name.clone(), place(DataType::Float16, &plan.dims, false)?);
        }
        if let Some(n) = shard.triangle {
            stored.vectors.insert(TRIANGLE.into(), place(DataType::Float16, &triangle_dims(n), false)?);
        }
        Ok(stored)
    }

    pub(super) fn matrix(&self, name: &str) -> anemoe_mlpackage::Result<&StoredMatrix> {
        let missing = || anemoe_mlpackage::Error::invalid_program(format!("no matrix `{name}` is stored"));
        self.matrices.get(name).ok_or_else(missing)
    }

    pub(super) fn has_matrix(&self, name: &str) -> bool {
        self.matrices.contains_key(name)
    }

    pub(super) fn has_vector(&self, name: &str) -> bool {
        self.vectors.contains_key(name)
    }

    pub(super) fn vector(&self, name: &str) -> anemoe_mlpackage::Result<Value> {
        let missing = || anemoe_mlpackage::Error::invalid_program(format!("no vector `{name}` is stored"));
        self.vectors.get(name).cloned().ok_or_else(missing)
    }
}

/// Returns the type of the stored elements of a kind.
pub fn element_type(kind: Quant) -> DataType {
    match kind {
        Quant::Fp16 => DataType::Float16,
        Quant::Int { bits: IntBits::Four, .. } => DataType::Int4,
        Quant::Int { bits: IntBits::Eight, .. } => DataType::Int8,
        Quant::Lut { bits: IndexBits::One, .. } => DataType::UInt1,
        Quant::Lut { bits: IndexBits::Two, .. } => DataType::UInt2,
        Quant::Lut { bits: IndexBits::Three, .. } => DataType::UInt3,
        Quant::Lut { bits: IndexBits::Four, .. } | Quant::Mxfp4 => DataType::UInt4,
        Quant::Lut { bits: IndexBits::Six, .. } => DataType::UInt6,
        Quant::Lut { bits: IndexBits::Eight, .. } => DataType::UInt8,
    }
}

/// Returns the dimensions of a matrix's tables or scales: `[groups, blocks, 1, 1]`, and for tables `2^bits` and 1
/// behind.
fn side_dims(plan: &MatrixPlan) -> Vec<u64> {
    let (groups, blocks) = plan.quant.groups_and_blocks(plan.rows, plan.cols);
    let mut dims = vec![groups as u64, blocks as u64, 1, 1];
    if let Quant::Lut { bits, .. } = plan.quant.kind {
        dims.extend([1 << bits.bits(), 1]);
    }
    dims
}

/// Joins packed elements, which `elements` refers to, with their tables or scales of dimensions `dims`. Tables and
/// scales of 10 elements or more go to the weight file.
///
/// # Errors
/// Writing fails.
pub fn join_operands(
    blobs: &mut BlobWriter,
    format: WeightFormat,
    elements: Value,
    dims: &[u64],
    side: &TablesAndScales,
) -> Result<StoredMatrix> {
    let mut stored = Weight { format, elements, values: None, offsets: None };
    if format.has_values() {
        stored.values = Some(store_halves(blobs, dims, &side.values)?);
    }
    if format.has_offsets() {
        let dtype = stored.elements.ty.tensor().map_or(DataType::Int8, |t| t.dtype);
        let offsets: Vec<u8> = side.offsets.iter().map(|&o| o as u8).collect();
        stored.offsets = Some(store_elements(blobs, dtype, dims, &pack_sub_byte(&offsets, dtype.bits()))?);
    }
    Ok(stored)
}

/// Adds the ops that make a weight from its operands.
///
/// # Errors
/// The operands do not fit each other.
pub fn add_constant(f: &mut FunctionBuilder, name: &str, stored: &StoredMatrix) -> Result<Var> {
    let elements = stored.elements.clone();
    match (stored.format, stored.values.clone()) {
        (WeightFormat::Lut { .. }, Some(lut)) => f.constexpr_lut_to_dense(name, elements, lut),
        (WeightFormat::Int { .. }, Some(scale)) => {
            f.constexpr_blockwise_shift_scale(name, elements, scale, stored.offsets.clone())
        }
        (WeightFormat::Mxfp4 { .. }, Some(scale)) => {
            let rank = elements.ty.tensor().map_or(0, |t| t.rank());
            let mut dims = vec![1; rank];
            dims.extend([MXFP4_TABLE.len() as u64, 1]);
            let table = Value::fp16_tensor(&dims, &MXFP4_TABLE.map(f16::from_f32));
            let data = f.constexpr_lut_to_dense(&format!("{name}_unscaled"), elements, table)?;
            let operands = vec![("data", (&data).into()), ("scale", scale.into())];
            f.single("constexpr_blockwise_shift_scale", name, operands)
        }
        _ => f.constant(name, elements),
    }
}

fn to_f16(values: &[f32], out: &mut Vec<f16>) -> std::result::Result<(), OutsideFp16> {
    out.clear();
    out.extend(values.iter().map(|&v| f16::from_f32(v)));
    match out.iter().position(|v| !v.is_finite()) {
        None => Ok(()),
        Some(i) => Err(OutsideFp16::TooLarge(values[i])),
    }
}

/// Error of reading, or a value that fp16 cannot hold and whose tensor is not named yet.
enum Failed {
    Read(Error),
    Value(OutsideFp16),
}

impl From<OutsideFp16> for Failed {
    fn from(e: OutsideFp16) -> Self {
        Failed::Value(e)
    }
}

/// Compresses a matrix of the plan and hands its packed elements to `write`. The matrix has its own scales, or shares
/// `scale`.
///
/// # Errors
/// The checkpoint cannot be read or holds a value that fp16 cannot, the importances do not fit, or writing fails.
pub fn encode_matrix(
    checkpoint: &CheckedCheckpoint,
    plan: &MatrixPlan,
    importance: Option<&Importance>,
    scale: Option<f16>,
    write: &mut dyn FnMut(&[u8]) -> Result<()>,
) -> Result<TablesAndScales> {
    if let Some(compressed) = checkpoint.compressed.get()
        && let Some(found) = compressed.read(plan)?
    {
        write(&found.packed)?;
        return Ok(found.side);
    }
    let importance = importance.map(|all| all.of(plan)).transpose()?.flatten();
    let read = |first: usize, out: &mut [f32]| {
        let start = plan.offset + first as u64 * plan.cols as u64;
        checkpoint.read(&plan.tensor, start..start + out.len() as u64, out).map_err(Failed::Read)
    };
    encode(checkpoint, plan, (importance, scale), &read, write)
}

/// Compresses a matrix like [`encode_matrix`], with its rows in another order where one is given.
///
/// # Errors
/// Fails like [`encode_matrix`].
pub fn encode_in_order(
    checkpoint: &CheckedCheckpoint,
    plan: &MatrixPlan,
    order: Option<&[u32]>,
    write: &mut dyn FnMut(&[u8]) -> Result<()>,
) -> Result<TablesAndScales> {
    let Some(order) = order else { return encode_matrix(checkpoint, plan, None, None, write) };
    let read = |first: usize, out: &mut [f32]| {
        for (row, out) in order[first..].iter().zip(out.chunks_exact_mut(plan.cols)) {
            let start = u64::from(*row) * plan.cols as u64;
            checkpoint.read(&plan.tensor, start..start + out.len() as u64, out).map_err(Failed::Read)?;
        }
        Ok(())
    };
    encode(checkpoint, plan, (None, None), &read, write)
}

fn encode(
    checkpoint: &CheckedCheckpoint,
    plan: &MatrixPlan,
    (importance, scale): (Option<&[f32]>, Option<f16>),
    read: &ReadRows<'_, Failed>,
    write: &mut dyn FnMut(&[u8]) -> Result<()>,
) -> Result<TablesAndScales> {
    let encoder = Encoder { importance, scale, ..Encoder::plain(plan.rows, plan.cols, plan.quant) };
    encoder.run(read, &mut |bytes| write(bytes).map_err(Failed::Read)).map_err(|e| match e {
        Failed::Read(e) => e,
        Failed::Value(e) => checkpoint.refuse(&plan.tensor, plan.offset, &e.to_string()),
    })
}

/// Writes a matrix to the weight file and returns its errors against the original.
///
/// # Errors
/// Fails like [`encode_matrix`].
pub fn store_matrix(
    blobs: &mut BlobWriter,
    checkpoint: &CheckedCheckpoint,
    plan: &MatrixPlan,
    importance: Option<&Importance>,
    scale: Option<f16>,
    stored: &mut Stored,
) -> Result<Metrics> {
    let dtype = element_type(plan.quant.kind);
    let offset = blobs.begin(dtype, plan.weights())?;
    let side = encode_matrix(checkpoint, plan, importance, scale, &mut |bytes| blobs.write(bytes))?;
    blobs.end()?;
    let elements = Value::blob(dtype, &plan.dims(), offset);
    let dims = side_dims(plan);
    let matrix = join_operands(blobs, plan.quant.format(plan.rows, plan.cols), elements, &dims, &side)?;
    stored.matrices.insert(plan.name.clone(), matrix);
    Ok(side.metrics)
}

/// Reads a vector of the plan from the checkpoint.
///
/// # Errors
/// The checkpoint cannot be read, or holds a value that fp16 cannot.
pub fn vector_values(checkpoint: &CheckedCheckpoint, plan: &VectorPlan) -> Result<Vec<f16>> {
    let n = plan.weights();
    let (first, of) = plan.every;
    let mut values = vec![0f32; n as usize * of];
    checkpoint.read(&plan.tensor, plan.start..plan.start + n * of as u64, &mut values)?;
    let values: Vec<f32> =
        values.into_iter().skip(first).step_by(of).map(|v| (v + plan.offset) * plan.scale).collect();
    let mut halves = Vec::new();
    to_f16(&values, &mut halves).map_err(|e| checkpoint.refuse(&plan.tensor, 0, &e.to_string()))?;
    Ok(halves)
}

/// Writes a vector to the weight file; a vector of few elements becomes a value of the program.
///
/// # Errors
/// Fails like [`store_matrix`].
pub fn store_vector(
    blobs: &mut BlobWriter,
    checkpoint: &CheckedCheckpoint,
    plan: &VectorPlan,
    stored: &mut Stored,
) -> Result<()> {
    let halves = vector_values(checkpoint, plan)?;
    stored.vectors.insert(plan.name.clone(), store_halves(blobs, &plan.dims, &halves)?);
    Ok(())
}

/// Writes the strictly lower triangle of ones `[1, 1, n, n]` as [`TRIANGLE`].
///
/// # Errors
/// The weight file cannot be written.
pub fn store_triangle(blobs: &mut BlobWriter, n: usize, stored: &mut Stored) -> Result<()> {
    let is_before = |i: usize| if i % n < i / n { f16::ONE } else { f16::ZERO };
    let halves: Vec<f16> = (0..n * n).map(is_before).collect();
    stored.vectors.insert(TRIANGLE.into(), store_halves(blobs, &triangle_dims(n), &halves)?);
    Ok(())
}

fn triangle_dims(n: usize) -> [u64; 4] {
    [1, 1, n as u64, n as u64]
}

/// Writes fp16 values to the weight file; few become a value of the program.
fn store_halves(blobs: &mut BlobWriter, dims: &[u64], halves: &[f16]) -> Result<Value> {
    let bytes: Vec<u8> = halves.iter().flat_map(|v| v.to_le_bytes()).collect();
    store_elements(blobs, DataType::Float16, dims, &bytes)
}

/// Writes elements to the weight file; those of a tensor of few become a value of the program.
///
/// # Errors
/// Writing fails.
pub fn store_elements(blobs: &mut BlobWriter, dtype: DataType, dims: &[u64], bytes: &[u8]) -> Result<Value> {
    let count = dims.iter().product();
    if count < BLOB_ELEMENTS {
        return Ok(Value::bytes(dtype, dims, bytes.to_vec()));
    }
    Ok(Value::blob(dtype, dims, blobs.append(dtype, count, bytes)?))
}
