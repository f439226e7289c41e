//! Weights as operations that decode them, and their data in the weight file.

use super::axed_weight::AxedWeight;
use super::pruning::Pruning;
use super::weight_job::{CodeForm, GivenTables, WeightReport, element_bytes};
use crate::lower::{element_type, store_elements};
use crate::one_tensor::{CompressedTensor, TensorJob, WeightOp};
use crate::quant::{Granularity, Groups, Quant};
use crate::quantize::{Metrics, ROUNDS_TO_INFINITY, SecondMoments, fit_vectors};
use crate::{Error, Result};
use anemoe_bundle::{IndexBits, IntBits};
use anemoe_mlpackage::blob::{BlobWriter, pack_sub_byte};
use anemoe_mlpackage::mil::{
    Argument, Binding, DataType, Immediate, Operation, Opset, TensorData, Value, ValueData,
};
use half::f16;
use rayon::prelude::*;
use std::borrow::Cow;
use std::collections::BTreeMap;

/// Operations that stand for a weight, without results, and its report. None for a weight that stays; of two, the second
/// scales the first one's result and lacks it as `data`.
pub(super) type Coded = (Vec<Operation>, WeightReport);

/// Writer of weights for functions of an opset.
pub(super) struct WeightCoder<'a> {
    pub blobs: &'a mut BlobWriter,
    pub opset: Opset,
}

impl WeightCoder<'_> {
    /// Makes a value: in the weight file, or in the program where it is small.
    fn place(&mut self, dtype: DataType, dims: &[usize], bytes: &[u8]) -> Result<Value> {
        let dims: Vec<u64> = dims.iter().map(|&d| d as u64).collect();
        let mut value = store_elements(self.blobs, dtype, &dims, bytes)?;
        if dtype == DataType::Float32 && matches!(value.data, ValueData::Immediate(_)) {
            let floats = bytes.as_chunks().0.iter().map(|b| f32::from_le_bytes(*b)).collect();
            value.data = ValueData::Immediate(Immediate::Tensor(TensorData::Floats(floats)));
        }
        Ok(value)
    }

    /// Makes a tensor of the weight's own type.
    fn place_floats(&mut self, like: &Value, dims: &[usize], values: &[f32]) -> Result<Value> {
        match like.ty.tensor().map(|t| t.dtype) {
            Some(DataType::Float32) => {
                let bytes: Vec<u8> = values.iter().flat_map(|v| v.to_le_bytes()).collect();
                self.place(DataType::Float32, dims, &bytes)
            }
            _ => {
                let bytes: Vec<u8> = values.iter().flat_map(|v| f16::from_f32(*v).to_le_bytes()).collect();
                self.place(DataType::Float16, dims, &bytes)
            }
        }
    }

    /// Makes the operation of these operands, without results.
    fn operation(&self, op_type: &str, operands: Vec<(&str, Value)>) -> Operation {
        let operands = operands.into_iter().map(|(name, value)| (name.to_string(), value));
        let (mut inputs, mut attributes) = (BTreeMap::new(), BTreeMap::new());
        // Before iOS18 the operands of `constexpr_*` are attributes.
        if self.opset < Opset::CoreML8 {
            attributes.extend(operands);
        } else {
            inputs.extend(operands.map(|(name, value)| (name, Argument(vec![Binding::Value(value)]))));
        }
        Operation { op_type: op_type.into(), inputs, outputs: Vec::new(), blocks: Vec::new(), attributes }
    }

    /// Leaves out the zeros of a weight; no operation where the rule does not apply.
    pub fn sparse(
        &mut self,
        value: &Value,
        shape: &[usize],
        values: &[f32],
        pruning: Pruning,
    ) -> Result<Coded> {
        let mut report = WeightReport::dense(value, values.len());
        let Some(mask) = pruning.kept(values, shape) else { return Ok((Vec::new(), report)) };
        let kept: Vec<f32> = values.iter().zip(&mask).filter(|(_, m)| **m).map(|(v, _)| *v).collect();
        let squares = |v: &[f32]| v.iter().map(|v| f64::from(*v).powi(2)).sum::<f64>();
        let zeros = 1.0 - kept.len() as f64 / values.len().max(1) as f64;
        let (whole, left) = (squares(values), squares(&kept));
        let bits: Vec<u8> = mask.iter().map(|m| u8::from(*m)).collect();
        let packed = pack_sub_byte(&bits, 1);
        report.kind = format!("sparse {:.0} %", 100.0 * zeros);
        report.relative_mse = if whole > 0.0 { (whole - left) / whole } else { 0.0 };
        if kept.is_empty() {
            // A sparse tensor of no values cannot be stored; a table of zeros can.
            let lut = ([vec![1; shape.len()], vec![2, 1]].concat(), vec![0.0; 2]);
            let (bits, indices) = (IndexBits::One, (shape.to_vec(), packed));
            let relative_mse = report.relative_mse;
            let tables = GivenTables { bits, indices, lut, vector_axis: None, scale: None, relative_mse };
            report.after = tables.bytes(value);
            return Ok((self.lookup(value, shape, &tables)?, report));
        }
        report.after = kept.len() as u64 * element_bytes(value) + packed.len() as u64;
        let nonzero = self.place_floats(value, &[kept.len()], &kept)?;
        let mut operands = vec![("nonzero_data", nonzero)];
        if self.opset < Opset::CoreML8 {
            operands.push(("mask", self.place(DataType::UInt8, &[packed.len()], &packed)?));
            operands.push(("shape", shape_value(shape)));
        } else {
            operands.push(("mask", self.place(DataType::UInt1, shape, &packed)?));
        }
        Ok((vec![self.operation("constexpr_sparse_to_dense", operands)], report))
    }

    /// Writes tables that were made elsewhere.
    pub fn tables(&mut self, value: &Value, shape: &[usize], tables: &GivenTables) -> Result<Coded> {
        let is_one = tables.lut.1.len() == 1 << tables.bits.bits() && tables.scale.is_none();
        if self.opset < Opset::CoreML8 && !is_one {
            let what = "a package of iOS16 or iOS17 has one table of numbers per weight, without scales";
            return Err(Error::usage(what));
        }
        let report = WeightReport {
            kind: format!("lut{}", tables.bits),
            after: tables.bytes(value),
            relative_mse: tables.relative_mse,
            ..WeightReport::dense(value, shape.iter().product())
        };
        Ok((self.lookup(value, shape, tables)?, report))
    }

    /// Writes indices, entries and scales of a weight's tables.
    fn lookup(&mut self, like: &Value, shape: &[usize], tables: &GivenTables) -> Result<Vec<Operation>> {
        let ((index_shape, packed), (dims, entries)) = (&tables.indices, &tables.lut);
        let mut operands = Vec::new();
        if self.opset < Opset::CoreML8 {
            operands.push(("indices", self.place(DataType::UInt8, &[packed.len()], packed)?));
            operands.push(("lut", self.place_floats(like, &[entries.len()], entries)?));
            operands.push(("shape", shape_value(shape)));
        } else {
            let dtype = element_type(Quant::lut(tables.bits));
            operands.push(("indices", self.place(dtype, index_shape, packed)?));
            operands.push(("lut", self.place_floats(like, dims, entries)?));
            operands.extend(tables.vector_axis.map(|axis| ("vector_axis", Value::int32(axis as i32))));
        }
        let mut ops = vec![self.operation("constexpr_lut_to_dense", operands)];
        if let Some((dims, scales)) = &tables.scale {
            let scale = self.place_floats(like, dims, scales)?;
            ops.push(self.operation("constexpr_blockwise_shift_scale", vec![("scale", scale)]));
        }
        Ok(ops)
    }

    /// Codes a weight; no operation where it stays.
    pub fn quantized(
        &mut self,
        value: &Value,
        weight: &AxedWeight<'_>,
        values: Vec<f32>,
        job: &QuantizeJob<'_>,
    ) -> Result<Coded> {
        let refuse = |why: String| Err(Error::usage(format!("weight `{}`: {why}", weight.name)));
        let kind = job.kind;
        if self.opset < Opset::CoreML8 {
            let why = match job.form {
                CodeForm::Tables { vector, .. } if vector > 1 => {
                    Some("before iOS18 there are no tables of vectors".into())
                }
                CodeForm::Tables { scaled: true, .. } => {
                    Some("before iOS18 tables have no scales per channel".into())
                }
                _ => kind.refused_by_ios16(),
            };
            if let Some(why) = why {
                return refuse(format!("{kind} for a package of iOS16 or iOS17: {why}"));
            }
        }
        // Tables and scales are fp16. Masks have such values.
        if !values.iter().fold(true, |all, v| all & (v.abs() < ROUNDS_TO_INFINITY)) {
            return Ok((Vec::new(), WeightReport::dense(value, values.len())));
        }
        let (shape, mut values) = weight.by_channels(values)?;
        let scales = match (job.form, kind) {
            (CodeForm::Tables { scaled: true, .. }, Quant::Lut { .. }) => {
                let whole = values.clone();
                Some((divide_by_channel(&mut values, shape[0]), whole))
            }
            (CodeForm::Plain, _)
            | (CodeForm::Unsigned, Quant::Int { .. })
            | (CodeForm::Tables { scaled: false, .. }, Quant::Lut { .. }) => None,
            (form, _) => return refuse(format!("{kind} has no form {form:?}")),
        };
        let vector = if let CodeForm::Tables { vector, .. } = job.form { vector } else { 1 };
        let (mut report, mut tables, decoded) = match kind {
            Quant::Lut { uniform: true, .. } if vector > 1 => {
                return refuse("uniform tables have no vectors".into());
            }
            Quant::Lut { bits, per_tensor, .. } if vector > 1 => {
                let rows = if per_tensor { shape[0] } else { job.groups.rows };
                let report = WeightReport::dense(value, values.len());
                let found = vector_tables(weight, (&shape, &values), (bits, rows, vector), job.moments)?;
                let Some((tables, decoded)) = found else { return Ok((Vec::new(), report)) };
                let (kind, after) = (format!("lut{bits} of {vector}"), tables.bytes(value));
                let relative_mse = tables.relative_mse;
                (WeightReport { kind, after, relative_mse, ..report }, tables, decoded)
            }
            _ => {
                let op = if shape.len() > 2 { WeightOp::Conv } else { WeightOp::Linear };
                let QuantizeJob { groups, moments, .. } = *job;
                let (name, shape, values, exact, importance) =
                    (weight.name, shape.as_slice(), values.as_slice(), false, None);
                let c =
                    TensorJob { name, shape, values, op, kind, groups, exact, importance, moments }.run()?;
                let report = WeightReport {
                    kind: c.quant.to_string(),
                    after: c.bytes(),
                    relative_mse: c.side.metrics.relative_mse(),
                    ..WeightReport::dense(value, values.len())
                };
                match c.quant.kind {
                    Quant::Fp16 => return Ok((Vec::new(), WeightReport::as_it_is(value, values.len()))),
                    Quant::Lut { bits, .. } => {
                        let decoded = match scales {
                            Some(_) => c.decode()?.iter().map(|v| v.to_f32()).collect(),
                            None => Vec::new(),
                        };
                        (report, number_tables(weight, &c, bits), decoded)
                    }
                    Quant::Int { bits, granularity, .. } => {
                        let is_unsigned = job.form == CodeForm::Unsigned;
                        let op = self.integers(value, weight, &c, (bits, granularity), is_unsigned)?;
                        return Ok((vec![op], report));
                    }
                    Quant::Mxfp4 => {
                        return refuse(format!("{} is not written to other packages", c.quant.kind));
                    }
                }
            }
        };
        if let Some((scales, whole)) = scales {
            report.kind.push_str(" scaled");
            report.after += scales.len() as u64 * element_bytes(value);
            let rows = decoded.chunks(values.len() / scales.len().max(1)).zip(&scales);
            let decoded: Vec<f32> = rows.flat_map(|(row, s)| row.iter().map(move |v| v * s)).collect();
            report.relative_mse = relative_mse(&whole, &decoded);
            let mut dims = vec![1; weight.shape.len()];
            dims[weight.axes[0]] = scales.len();
            tables.scale = Some((dims, scales));
        }
        Ok((self.lookup(value, weight.shape, &tables)?, report))
    }

    /// Writes a weight of integers with scales.
    fn integers(
        &mut self,
        value: &Value,
        weight: &AxedWeight<'_>,
        c: &CompressedTensor,
        (bits, granularity): (IntBits, Granularity),
        is_unsigned: bool,
    ) -> Result<Operation> {
        let parts = c.quant.groups_and_blocks(c.rows, c.cols);
        let sides: Vec<f32> = c.side.values.iter().map(|v| v.to_f32()).collect();
        let bits = usize::from(bits.bits());
        // Numbers without sign are shifted by half their range.
        let shift = if is_unsigned { 1u8 << (bits - 1) } else { 0 };
        let signed = if bits == 4 { DataType::Int4 } else { DataType::Int8 };
        let dtype = DataType::uint_of_bits(bits).filter(|_| is_unsigned).unwrap_or(signed);
        let shifted = |codes: Vec<u8>| codes.into_iter().map(|c| c.wrapping_add(shift)).collect::<Vec<u8>>();
        let data = self.place(dtype, weight.shape, &packed_elements(weight, c, shift))?;
        let has_offsets = !c.side.offsets.is_empty() || shift != 0;
        let mut offsets: Vec<u8> = c.side.offsets.iter().map(|&o| o as u8).collect();
        offsets.resize(sides.len(), 0);
        if self.opset < Opset::CoreML8 {
            let dims: &[usize] = if granularity == Granularity::Tensor { &[] } else { &[sides.len()] };
            let scale = self.place_floats(value, dims, &sides)?;
            let zero_point = self.place(dtype, dims, &shifted(offsets))?;
            let axis = Value::int32(weight.axes[0] as i32);
            let operands =
                vec![("quantized_data", data), ("zero_point", zero_point), ("scale", scale), ("axis", axis)];
            return Ok(self.operation("constexpr_affine_dequantize", operands));
        }
        let (dims, sides) = weight.sides(parts, &sides, 1);
        let mut operands = vec![("data", data), ("scale", self.place_floats(value, &dims, &sides)?)];
        if has_offsets {
            let (_, offsets) = weight.sides(parts, &shifted(offsets), 1);
            operands.push(("offset", self.place(dtype, &dims, &pack_sub_byte(&offsets, bits))?));
        }
        Ok(self.operation("constexpr_blockwise_shift_scale", operands))
    }
}

/// Returns the elements of a compressed weight in the weight's own order, packed.
fn packed_elements<'c>(weight: &AxedWeight<'_>, c: &'c CompressedTensor, shift: u8) -> Cow<'c, [u8]> {
    if shift == 0 && weight.is_in_order() {
        return Cow::Borrowed(&c.packed);
    }
    let mut codes = weight.in_own_order(&c.elements(), 1);
    codes.iter_mut().for_each(|code| *code = code.wrapping_add(shift));
    Cow::Owned(pack_sub_byte(&codes, usize::from(c.quant.kind.bits())))
}

/// Returns the tables of numbers of a compressed weight.
fn number_tables(weight: &AxedWeight<'_>, c: &CompressedTensor, bits: IndexBits) -> GivenTables {
    let sides: Vec<f32> = c.side.values.iter().map(|v| v.to_f32()).collect();
    let entries = 1usize << bits.bits();
    let (mut dims, sides) = weight.sides(c.quant.groups_and_blocks(c.rows, c.cols), &sides, entries);
    dims.extend([entries, 1]);
    GivenTables {
        bits,
        indices: (weight.shape.to_vec(), packed_elements(weight, c, 0).into_owned()),
        lut: (dims, sides),
        vector_axis: None,
        scale: None,
        relative_mse: c.side.metrics.relative_mse(),
    }
}

/// Finds tables of vectors over the output channels of a weight `[out, in, rest..]`: entries of `length` numbers, for at most
/// `most_rows` channels. Returns them with the decoded values; none where no group of channels holds whole vectors.
fn vector_tables(
    weight: &AxedWeight<'_>,
    (shape, values): (&[usize], &[f32]),
    (bits, most_rows, length): (IndexBits, usize, usize),
    moments: Option<&SecondMoments>,
) -> Result<Option<(GivenTables, Vec<f32>)>> {
    let rows = shape[0];
    let cols = values.len() / rows.max(1);
    // The largest group that divides the channels and holds whole vectors.
    let fits = |g: &usize| rows.is_multiple_of(*g) && g.is_multiple_of(length);
    let Some(group) = (1..=most_rows.min(rows)).rev().find(fits) else { return Ok(None) };
    let masses = match moments {
        Some(m) if m.inputs() != cols => {
            let what = format!("weight `{}`: moments of {} inputs for {cols}", weight.name, m.inputs());
            return Err(Error::usage(what));
        }
        Some(m) => Some(m.squares().repeat(group / length)),
        None => None,
    };
    let fit = |group: &[f32]| {
        let mut points = Vec::with_capacity(group.len());
        for rows in group.chunks_exact(length * cols) {
            (0..cols).for_each(|c| points.extend((0..length).map(|r| rows[r * cols + c])));
        }
        fit_vectors(&points, length, bits.bits(), masses.as_deref())
    };
    let tables: Vec<_> = values.par_chunks_exact(group * cols).map(fit).collect();
    let codes: Vec<u8> = tables.iter().flat_map(|t| &t.codes).copied().collect();
    let sides: Vec<f32> = tables.iter().flat_map(|t| &t.entries).map(|v| v.to_f32()).collect();
    let mut decoded = vec![0f32; values.len()];
    for (out, table) in decoded.chunks_exact_mut(group * cols).zip(&tables) {
        for (i, code) in table.codes.iter().enumerate() {
            let entry = &table.entries[usize::from(*code) * length..][..length];
            let first = i / cols * length;
            entry.iter().enumerate().for_each(|(r, v)| out[(first + r) * cols + i % cols] = v.to_f32());
        }
    }
    let axis = weight.axes[0];
    let mut index_shape = weight.shape.to_vec();
    index_shape[axis] /= length;
    let entries = 1usize << bits.bits();
    let (mut dims, sides) = weight.sides((rows / group, 1), &sides, entries * length);
    dims.extend([entries, length]);
    let tables = GivenTables {
        bits,
        indices: (index_shape, pack_sub_byte(&weight.in_own_order(&codes, length), usize::from(bits.bits()))),
        lut: (dims, sides),
        vector_axis: Some(axis),
        scale: None,
        relative_mse: relative_mse(values, &decoded),
    };
    Ok(Some((tables, decoded)))
}

fn relative_mse(values: &[f32], decoded: &[f32]) -> f64 {
    let mut metrics = Metrics::default();
    metrics.add(values, decoded, None);
    metrics.relative_mse()
}

/// A quantization of one weight.
pub(super) struct QuantizeJob<'a> {
    pub kind: Quant,
    pub groups: Groups,
    pub form: CodeForm,
    pub moments: Option<&'a SecondMoments>,
}

/// Divides each output channel of weights `[rows, ..]` by its largest magnitude, rounded to fp16, and returns these; 1 for zeros.
fn divide_by_channel(values: &mut [f32], rows: usize) -> Vec<f32> {
    let cols = (values.len() / rows.max(1)).max(1);
    let divide = |row: &mut [f32]| {
        let largest = f16::from_f32(row.iter().fold(0f32, |m, v| m.max(v.abs()))).to_f32();
        // A scale of zero would lose the channel, an infinite one too.
        let scale = if largest > 0.0 && largest.is_finite() { largest } else { 1.0 };
        row.iter_mut().for_each(|v| *v /= scale);
        scale
    };
    values.chunks_mut(cols).map(divide).collect()
}

/// Makes the operand `shape` of the operations before iOS18.
fn shape_value(shape: &[usize]) -> Value {
    let bytes = shape.iter().flat_map(|&d| (d as u32).to_le_bytes()).collect();
    Value::bytes(DataType::UInt32, &[shape.len() as u64], bytes)
}
