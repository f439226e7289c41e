//! Matrices and vectors of a shard, read from the checkpoint and written to the package in pieces.

use crate::family::Family;
use crate::plan::{MatrixPlan, VectorPlan};
use crate::quant::Quant;
use crate::quantize::{Metrics, Palettizer, TableMode};
use crate::{Error, Result};
use anemoe_mlpackage::blob::{BlobWriter, pack_sub_byte};
use anemoe_mlpackage::mil::{DataType, Value};
use half::f16;
use rayon::prelude::*;
use std::collections::BTreeMap;

/// Weights that are held in memory at a time.
const PIECE: usize = 4 << 20;
/// From this many elements on, a vector goes to the weight file, as coremltools has it.
const BLOB_ELEMENTS: u64 = 10;

/// What a package already holds, by name.
#[derive(Debug, Default)]
pub struct Stored {
    matrices: BTreeMap<String, StoredMatrix>,
    vectors: BTreeMap<String, Value>,
}

/// A matrix `[rows, cols, 1, 1]` in the weight file.
#[derive(Clone, Debug)]
pub enum StoredMatrix {
    /// fp16.
    Dense(Value),
    /// Operands of `constexpr_lut_to_dense`.
    Lut {
        /// `[rows, cols, 1, 1]`
        indices: Value,
        /// `[groups, 1, 1, 1, 2^bits, 1]` fp16
        lut: Value,
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

fn to_f16(tensor: &str, values: &[f32], out: &mut Vec<f16>) -> Result<()> {
    out.clear();
    out.extend(values.iter().map(|&v| f16::from_f32(v)));
    match out.iter().position(|v| !v.is_finite()) {
        None => Ok(()),
        Some(i) => Err(Error::Usage(format!("tensor `{tensor}`: {} does not fit fp16", values[i]))),
    }
}

/// Writes a matrix and gives its cosine to the original, 1 where it is not compressed.
///
/// # Errors
/// The checkpoint cannot be read or holds a value that fp16 cannot, or writing fails.
pub fn store_matrix(
    blobs: &mut BlobWriter,
    family: &dyn Family,
    plan: &MatrixPlan,
    stored: &mut Stored,
) -> Result<f64> {
    let dims = [plan.rows as u64, plan.cols as u64, 1, 1];
    let count = plan.weights();
    let (matrix, cosine) = match plan.quant.kind {
        Quant::Fp16 => {
            let offset = blobs.begin(DataType::Float16, count)?;
            let rows = (PIECE / plan.cols).max(1);
            pieces(family, plan, rows, |halves| {
                let bytes: Vec<u8> = halves.iter().flat_map(|v| v.to_le_bytes()).collect();
                Ok(blobs.write(&bytes)?)
            })?;
            blobs.end()?;
            (StoredMatrix::Dense(Value::blob(DataType::Float16, &dims, offset)), 1.0)
        }
        Quant::Lut { bits, uniform, .. } => {
            let dtype = DataType::uint_of_bits(usize::from(bits));
            let dtype = dtype.ok_or_else(|| Error::Usage(format!("{bits}-bit indices do not exist")))?;
            let mode = if uniform { TableMode::Uniform } else { TableMode::KMeans };
            let group = plan.quant.group_rows;
            // Pieces of whole groups and whole bytes.
            let unit = group * 8 / gcd(group, 8);
            let rows = (PIECE / plan.cols / unit).max(1) * unit;
            let offset = blobs.begin(dtype, count)?;
            let mut tables: Vec<f16> = Vec::new();
            let mut metrics = Metrics::default();
            pieces(family, plan, rows, |halves| {
                let mut indices = vec![0u8; halves.len()];
                let size = group * plan.cols;
                let done: Vec<(Vec<f16>, Metrics)> = halves
                    .par_chunks(size)
                    .zip(indices.par_chunks_mut(size))
                    .map_init(
                        || Palettizer::new(bits, mode),
                        |palettizer, (weights, indices)| {
                            let mut metrics = Metrics::default();
                            (palettizer.group(weights, indices, &mut metrics), metrics)
                        },
                    )
                    .collect();
                for (table, m) in &done {
                    tables.extend_from_slice(table);
                    metrics.merge(m);
                }
                Ok(blobs.write(&pack_sub_byte(&indices, usize::from(bits)))?)
            })?;
            blobs.end()?;
            let bytes: Vec<u8> = tables.iter().flat_map(|v| v.to_le_bytes()).collect();
            let lut_dims = [(plan.rows / group) as u64, 1, 1, 1, 1 << bits, 1];
            let lut = if tables.len() as u64 >= BLOB_ELEMENTS {
                let offset = blobs.append(DataType::Float16, tables.len() as u64, &bytes)?;
                Value::blob(DataType::Float16, &lut_dims, offset)
            } else {
                Value::fp16_tensor(&lut_dims, &tables)
            };
            (StoredMatrix::Lut { indices: Value::blob(dtype, &dims, offset), lut }, metrics.cosine())
        }
    };
    stored.matrices.insert(plan.name.clone(), matrix);
    Ok(cosine)
}

fn gcd(a: usize, b: usize) -> usize {
    if b == 0 { a } else { gcd(b, a % b) }
}

/// Reads a matrix in pieces of `rows` rows, rounded to fp16.
fn pieces(
    family: &dyn Family,
    plan: &MatrixPlan,
    rows: usize,
    mut each: impl FnMut(&[f16]) -> Result<()>,
) -> Result<()> {
    let mut values = vec![0f32; rows.min(plan.rows) * plan.cols];
    let mut halves = Vec::with_capacity(values.len());
    for first in (0..plan.rows).step_by(rows) {
        let n = rows.min(plan.rows - first) * plan.cols;
        let start = plan.offset + first as u64 * plan.cols as u64;
        family.read(&plan.tensor, start..start + n as u64, &mut values[..n])?;
        to_f16(&plan.tensor, &values[..n], &mut halves)?;
        each(&halves)?;
    }
    Ok(())
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
