//! Weights of an existing package, of whatever tool: listed with their users, and compressed into another package.
//!
//! ```text
//! const weight --> constexpr_lut_to_dense | constexpr_blockwise_shift_scale | constexpr_affine_dequantize | constexpr_sparse_to_dense
//!                  constexpr_lut_to_dense --> constexpr_blockwise_shift_scale, with scales per channel
//! ```
//! Everything else is copied. Names, types and operations that use the weights stay.

mod axed_weight;
mod pruning;

pub use pruning::Pruning;

use crate::lower::element_type;
use crate::one_tensor::{TensorJob, WeightOp};
use crate::quant::{Granularity, Groups, Quant};
use crate::quantize::{Metrics, SecondMoments, fit_vectors};
use crate::{Error, Result};
use anemoe_bundle::IndexBits;
use anemoe_mlpackage::blob::{BlobWriter, pack_sub_byte};
use anemoe_mlpackage::mil::verify::{Severity, verify};
use anemoe_mlpackage::mil::{
    Argument, Binding, Block, DataType, Immediate, NamedType, Operation, Opset, TensorData, Value, ValueData,
};
use anemoe_mlpackage::package::{Package, PackageWriter};
use axed_weight::AxedWeight;
use half::f16;
use rayon::prelude::*;
use std::collections::{BTreeMap, BTreeSet};
use std::path::Path;

/// Fewest elements that go to the weight file, as in coremltools.
const BLOB_ELEMENTS: usize = 10;

/// A dense weight: a constant in the weight file, of two or more axes of floats.
#[derive(Clone, Debug, PartialEq)]
pub struct DenseWeight {
    /// Function.
    pub function: String,
    /// Name of the constant.
    pub name: String,
    /// Dimensions, outermost first.
    pub shape: Vec<u64>,
    /// Operations that use it.
    pub users: Vec<WeightUser>,
}

/// An operation that uses a weight.
#[derive(Clone, Debug, PartialEq)]
pub struct WeightUser {
    /// Type of the operation.
    pub op_type: String,
    /// Name of the operation.
    pub name: String,
    /// Parameter that takes the weight.
    pub param: String,
    /// True if the operation transposes it: `transpose_x` or `transpose_y` of a matmul.
    pub transposes: bool,
    /// Groups of a convolution; 1 for others.
    pub groups: usize,
}

/// Compression of one weight.
#[derive(Clone, Debug, PartialEq)]
pub enum WeightJob {
    /// Tables or integers.
    Quantize {
        /// Kind of compression.
        kind: Quant,
        /// Group sizes.
        groups: Groups,
        /// Axes of output and input channels.
        axes: [usize; 2],
        /// Form of the codes.
        form: CodeForm,
    },
    /// Zeros are left out.
    Sparse(Pruning),
    /// Tables that were made elsewhere.
    Tables(Box<GivenTables>),
}

/// Dimensions, outermost first, and elements.
pub type Shaped<T> = (Vec<usize>, Vec<T>);

/// Operands of a `constexpr_lut_to_dense`, and what becomes of its result.
#[derive(Clone, Debug, PartialEq)]
pub struct GivenTables {
    /// Width of an index.
    pub bits: IndexBits,
    /// Indices; for vectors the axis that an entry is along is shorter.
    pub indices: Shaped<u8>,
    /// Entries `[groups of each axis.., entries, numbers of an entry]`.
    pub lut: Shaped<f32>,
    /// Axis that an entry is along, for vectors.
    pub vector_axis: Option<usize>,
    /// Scales, of an axis or of none.
    pub scale: Option<Shaped<f32>>,
    /// Squared error over squared weights.
    pub relative_mse: f64,
}

/// Form of codes.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum CodeForm {
    /// Integers with sign, or indices of a table of numbers.
    Plain,
    /// Integers without sign.
    Unsigned,
    /// Indices of tables. Weights are divided by the largest magnitude of their output channel before where they are scaled.
    Tables {
        /// Output channels that an entry is for.
        vector: usize,
        /// True for scales per output channel.
        scaled: bool,
    },
}

/// Finds the second moments of the inputs of a weight, by function and constant; `None` where they are not known.
pub type FindMoments<'a> = dyn FnMut(&str, &str) -> Result<Option<SecondMoments>> + 'a;

/// Result of one weight.
#[derive(Clone, Debug, PartialEq)]
pub struct WeightReport {
    /// Function.
    pub function: String,
    /// Name of the constant.
    pub name: String,
    /// Kind; `fp16` for a weight whose tables would cost more than they save, `dense` for one to which the rule does not apply: both
    /// stay.
    pub kind: String,
    /// Bytes before.
    pub before: u64,
    /// Bytes of all that stands for it.
    pub after: u64,
    /// Squared error over squared weights.
    pub relative_mse: f64,
}

/// Lists the weights of a package that can be compressed.
pub fn dense_weights(package: &Package) -> Vec<DenseWeight> {
    let mut all = Vec::new();
    for (name, function) in &package.model().program.functions {
        let mut ops = Vec::new();
        operations(&function.block, &mut ops);
        let mut users: BTreeMap<&str, Vec<WeightUser>> = BTreeMap::new();
        let constant = |name: &str| ops.iter().find(|op| op.outputs.first().is_some_and(|o| o.name == name));
        let is_true = |op: &Operation, param: &str| match op.inputs.get(param).map(|a| a.0.as_slice()) {
            Some([Binding::Value(value)]) => value.as_bool(),
            Some([Binding::Name(name)]) => constant(name).and_then(|op| op.attributes.get("val")?.as_bool()),
            _ => None,
        };
        let groups = |op: &Operation| {
            let found = match op.inputs.get("groups").map(|a| a.0.as_slice()) {
                Some([Binding::Value(value)]) => value.as_ints(),
                Some([Binding::Name(name)]) => {
                    constant(name).and_then(|op| op.attributes.get("val")?.as_ints())
                }
                _ => None,
            };
            found.and_then(|g| usize::try_from(*g.first()?).ok()).unwrap_or(1)
        };
        for op in &ops {
            for (param, Argument(bindings)) in &op.inputs {
                for binding in bindings {
                    let Binding::Name(used) = binding else { continue };
                    let transposes =
                        op.op_type == "matmul" && is_true(op, &format!("transpose_{param}")) == Some(true);
                    let (op_type, name, param) = (op.op_type.clone(), op.name().into(), param.clone());
                    let groups = groups(op);
                    let user = WeightUser { op_type, name, param, transposes, groups };
                    users.entry(used).or_default().push(user);
                }
            }
        }
        let weights = ops.iter().filter_map(|op| {
            let value = dense_value(op)?;
            let (output, shape) = (&op.outputs.first()?.name, value.ty.tensor()?.shape()?);
            let users = users.get(output.as_str()).cloned().unwrap_or_default();
            Some(DenseWeight { function: name.clone(), name: output.clone(), shape, users })
        });
        all.extend(weights);
    }
    all
}

fn operations<'a>(block: &'a Block, all: &mut Vec<&'a Operation>) {
    for op in &block.operations {
        all.push(op);
        op.blocks.iter().for_each(|inner| operations(inner, all));
    }
}

/// Returns the value of a constant that can be compressed.
fn dense_value(op: &Operation) -> Option<&Value> {
    let value = op.attributes.get("val").filter(|_| op.op_type == "const" && op.outputs.len() == 1)?;
    let ty = value.ty.tensor()?;
    let is_float = matches!(ty.dtype, DataType::Float16 | DataType::Float32);
    (is_float && ty.rank() >= 2 && matches!(value.data, ValueData::Blob { .. })).then_some(value)
}

/// Returns the elements of a float tensor.
///
/// # Errors
/// It is no float tensor of the package.
pub fn floats(package: &Package, value: &Value) -> Result<Vec<f32>> {
    let bytes = package.tensor_bytes(value)?;
    match value.ty.tensor().map(|t| t.dtype) {
        Some(DataType::Float16) => {
            Ok(bytes.as_chunks().0.iter().map(|b| f16::from_le_bytes(*b).to_f32()).collect())
        }
        Some(DataType::Float32) => Ok(bytes.as_chunks().0.iter().map(|b| f32::from_le_bytes(*b)).collect()),
        _ => Err(Error::invalid_program(format!("a weight of type {}, expected fp16 or fp32", value.ty))),
    }
}

/// Writes a package with compressed weights to `target`, which must not exist. `jobs` are by function and constant. Codes are chosen by
/// error feedback where `moments` finds the moments of a weight's inputs.
///
/// # Errors
/// A job does not fit its weight or the package's system, a weight holds a value that fp16 cannot, or writing fails.
pub fn compress(
    package: &Package,
    jobs: &BTreeMap<(String, String), WeightJob>,
    moments: &mut FindMoments<'_>,
    target: &Path,
) -> Result<Vec<WeightReport>> {
    let mut model = package.model().clone();
    let mut writer = PackageWriter::create(target)?;
    let mut rewriter = Rewriter {
        package,
        jobs,
        moments,
        blobs: writer.weights(),
        copied: BTreeMap::new(),
        compressed: Vec::new(),
        function: String::new(),
        names: BTreeSet::new(),
        opset: Opset::CoreML5,
        reports: Vec::new(),
    };
    for (name, function) in &mut model.program.functions {
        rewriter.function.clone_from(name);
        rewriter.opset = function.opset;
        let mut ops = Vec::new();
        operations(&function.block, &mut ops);
        rewriter.names = ops.iter().flat_map(|op| &op.outputs).map(|o| o.name.clone()).collect();
        rewriter.block(&mut function.block)?;
    }
    for value in model.program.attributes.values_mut() {
        rewriter.copy(value)?;
    }
    let reports = rewriter.reports;
    let known = verify(package.model());
    if let Some(fault) =
        verify(&model).into_iter().find(|f| f.severity == Severity::Error && !known.contains(f))
    {
        return Err(Error::invalid_program(fault.to_string()));
    }
    writer.finish(&model)?;
    Ok(reports)
}

/// Operations that stand for a weight.
#[derive(Clone)]
enum OpsOfWeight {
    /// The weight stays.
    None,
    /// An operation, without results.
    One(Operation),
    /// An operation, and one that scales its result, without `data` and results.
    Scaled(Operation, Operation),
}

/// A replacement with its report.
type Rewritten = (OpsOfWeight, WeightReport);

struct Rewriter<'a, 'm> {
    package: &'a Package,
    jobs: &'a BTreeMap<(String, String), WeightJob>,
    moments: &'a mut FindMoments<'m>,
    blobs: &'a mut BlobWriter,
    /// New offsets of copied blobs, by file and offset.
    copied: BTreeMap<(String, u64), u64>,
    /// Compressed weights, which functions share.
    compressed: Vec<(Value, WeightJob, Opset, Rewritten)>,
    function: String,
    /// Names of the function's values.
    names: BTreeSet<String>,
    opset: Opset,
    reports: Vec<WeightReport>,
}

impl Rewriter<'_, '_> {
    fn block(&mut self, block: &mut Block) -> Result<()> {
        let operations = std::mem::take(&mut block.operations);
        block.operations.reserve(operations.len());
        for mut op in operations {
            let key = op.outputs.first().map(|o| (self.function.clone(), o.name.clone()));
            if let (Some(value), Some(job)) = (dense_value(&op), key.and_then(|key| self.jobs.get(&key))) {
                let (new, report) = self.compressed(&value.clone(), job, &op)?;
                self.reports.push(report);
                let last = match new {
                    OpsOfWeight::None => None,
                    OpsOfWeight::One(last) => Some(last),
                    OpsOfWeight::Scaled(mut first, mut last) => {
                        let name = self.free_name(&format!("{}_unscaled", op.outputs[0].name));
                        first.outputs = vec![NamedType { name: name.clone(), ..op.outputs[0].clone() }];
                        first.attributes.insert("name".into(), Value::string(&name));
                        last.inputs.insert("data".into(), Argument(vec![Binding::Name(name)]));
                        block.operations.push(first);
                        Some(last)
                    }
                };
                if let Some(mut last) = last {
                    last.outputs = std::mem::take(&mut op.outputs);
                    last.attributes.extend(op.attributes.remove_entry("name"));
                    block.operations.push(last);
                    continue;
                }
            }
            for value in op.attributes.values_mut() {
                self.copy(value)?;
            }
            for binding in op.inputs.values_mut().flat_map(|argument| &mut argument.0) {
                if let Binding::Value(value) = binding {
                    self.copy(value)?;
                }
            }
            for inner in &mut op.blocks {
                self.block(inner)?;
            }
            block.operations.push(op);
        }
        Ok(())
    }

    /// Returns a name that no value of the function has, and takes it.
    fn free_name(&mut self, wanted: &str) -> String {
        let mut name = wanted.to_string();
        while !self.names.insert(name.clone()) {
            name.push('_');
        }
        name
    }

    /// Copies the blob of a value; an immediate value stays.
    fn copy(&mut self, value: &mut Value) -> Result<()> {
        let ValueData::Blob { file, offset } = &value.data else { return Ok(()) };
        let key = (file.clone(), *offset);
        let blob = self.package.blob(value)?;
        let offset = match self.copied.get(&key) {
            Some(offset) => *offset,
            None => self.blobs.append(blob.dtype, blob.count, blob.data)?,
        };
        self.copied.insert(key, offset);
        let dims = value.ty.tensor().and_then(|t| t.shape()).unwrap_or_default();
        value.data = Value::blob(blob.dtype, &dims, offset).data;
        Ok(())
    }

    fn compressed(&mut self, value: &Value, job: &WeightJob, op: &Operation) -> Result<Rewritten> {
        let named = |(new, report): Rewritten, function: &str| {
            (new, WeightReport { function: function.into(), name: op.name().into(), ..report })
        };
        let same = |(v, j, opset, _): &&(Value, WeightJob, Opset, Rewritten)| {
            v == value && j == job && (*opset < Opset::CoreML8) == (self.opset < Opset::CoreML8)
        };
        if let Some((.., done)) = self.compressed.iter().find(same) {
            return Ok(named(done.clone(), &self.function));
        }
        if self.opset < Opset::CoreML6 {
            let what = "compressed weights: the package is for iOS15, and they need iOS16; convert with minimum_deployment_target";
            return Err(Error::usage(format!("{what}=iOS16 or later")));
        }
        let shape = value.ty.tensor().and_then(|t| t.shape()).unwrap_or_default();
        let shape: Vec<usize> = shape.iter().map(|&d| d as usize).collect();
        let values = floats(self.package, value)?;
        let done = match *job {
            WeightJob::Sparse(pruning) => self.sparse(value, &shape, &values, pruning)?,
            WeightJob::Tables(ref tables) => self.tables(value, &shape, tables)?,
            WeightJob::Quantize { kind, groups, axes, form } => {
                let moments = (self.moments)(&self.function, &op.outputs[0].name)?;
                let weight = AxedWeight { name: op.name(), shape: &shape, axes };
                let job = QuantizeJob { kind, groups, form, moments: moments.as_ref() };
                self.quantized(value, &weight, &values, &job)?
            }
        };
        self.compressed.push((value.clone(), job.clone(), self.opset, done.clone()));
        Ok(named(done, &self.function))
    }

    /// Makes a value: in the weight file, or in the program where it is small.
    fn place(&mut self, dtype: DataType, dims: &[usize], bytes: &[u8]) -> Result<Value> {
        let dims: Vec<u64> = dims.iter().map(|&d| d as u64).collect();
        let count: u64 = dims.iter().product();
        if count >= BLOB_ELEMENTS as u64 {
            return Ok(Value::blob(dtype, &dims, self.blobs.append(dtype, count, bytes)?));
        }
        let mut value = Value::bytes(dtype, &dims, bytes.to_vec());
        if dtype == DataType::Float32 {
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

    fn sparse(
        &mut self,
        value: &Value,
        shape: &[usize],
        values: &[f32],
        pruning: Pruning,
    ) -> Result<Rewritten> {
        let mut report = WeightReport::dense(value, values.len());
        // A tensor of no values cannot be stored.
        let Some(mask) = pruning.kept(values, shape).filter(|mask| mask.contains(&true)) else {
            return Ok((OpsOfWeight::None, report));
        };
        let kept: Vec<f32> = values.iter().zip(&mask).filter(|(_, m)| **m).map(|(v, _)| *v).collect();
        let squares = |v: &[f32]| v.iter().map(|v| f64::from(*v).powi(2)).sum::<f64>();
        let zeros = 1.0 - kept.len() as f64 / values.len().max(1) as f64;
        let (whole, left) = (squares(values), squares(&kept));
        let bits: Vec<u8> = mask.iter().map(|m| u8::from(*m)).collect();
        let packed = pack_sub_byte(&bits, 1);
        report.kind = format!("sparse {:.0} %", 100.0 * zeros);
        report.after = kept.len() as u64 * element_bytes(value) + packed.len() as u64;
        report.relative_mse = if whole > 0.0 { (whole - left) / whole } else { 0.0 };
        let nonzero = self.place_floats(value, &[kept.len()], &kept)?;
        let mut operands = vec![("nonzero_data", nonzero)];
        if self.opset < Opset::CoreML8 {
            operands.push(("mask", self.place(DataType::UInt8, &[packed.len()], &packed)?));
            operands.push(("shape", shape_value(shape)));
        } else {
            operands.push(("mask", self.place(DataType::UInt1, shape, &packed)?));
        }
        Ok((OpsOfWeight::One(self.operation("constexpr_sparse_to_dense", operands)), report))
    }

    /// Writes tables that were made elsewhere.
    fn tables(&mut self, value: &Value, shape: &[usize], tables: &GivenTables) -> Result<Rewritten> {
        let (GivenTables { bits, vector_axis, .. }, (index_shape, codes)) = (tables, &tables.indices);
        let (dims, entries) = &tables.lut;
        let packed = pack_sub_byte(codes, usize::from(bits.bits()));
        let operands = if self.opset < Opset::CoreML8 {
            if entries.len() != 1 << bits.bits() || tables.scale.is_some() {
                let what = "a package of iOS16 or iOS17 has one table of numbers per weight, without scales";
                return Err(Error::usage(what));
            }
            let indices = self.place(DataType::UInt8, &[packed.len()], &packed)?;
            let lut = self.place_floats(value, &[entries.len()], entries)?;
            vec![("indices", indices), ("lut", lut), ("shape", shape_value(shape))]
        } else {
            let indices = self.place(element_type(Quant::lut(*bits)), index_shape, &packed)?;
            let mut operands = vec![("indices", indices), ("lut", self.place_floats(value, dims, entries)?)];
            operands.extend(vector_axis.map(|axis| ("vector_axis", Value::int32(axis as i32))));
            operands
        };
        let op = self.operation("constexpr_lut_to_dense", operands);
        let scales = tables.scale.as_ref().map_or(0, |(_, scales)| scales.len());
        let report = WeightReport {
            kind: format!("lut{bits}"),
            after: packed.len() as u64 + (entries.len() + scales) as u64 * element_bytes(value),
            relative_mse: tables.relative_mse,
            ..WeightReport::dense(value, shape.iter().product())
        };
        let Some((dims, scales)) = &tables.scale else { return Ok((OpsOfWeight::One(op), report)) };
        let scale = self.place_floats(value, dims, scales)?;
        let last = self.operation("constexpr_blockwise_shift_scale", vec![("scale", scale)]);
        Ok((OpsOfWeight::Scaled(op, last), report))
    }

    fn quantized(
        &mut self,
        value: &Value,
        weight: &AxedWeight<'_>,
        values: &[f32],
        job: &QuantizeJob<'_>,
    ) -> Result<Rewritten> {
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
        let (shape, mut values) = weight.by_channels(values)?;
        let whole = values.clone();
        let scales = match (job.form, kind) {
            (CodeForm::Tables { scaled: true, .. }, Quant::Lut { .. }) => {
                Some(divide_by_channel(&mut values, shape[0]))
            }
            (CodeForm::Plain, _)
            | (CodeForm::Unsigned, Quant::Int { .. })
            | (CodeForm::Tables { scaled: false, .. }, Quant::Lut { .. }) => None,
            (form, _) => return refuse(format!("{kind} has no form {form:?}")),
        };
        let mut coded = match (job.form, kind) {
            (CodeForm::Tables { vector, .. }, Quant::Lut { bits, uniform, per_tensor }) if vector > 1 => {
                if uniform {
                    return refuse("uniform tables have no vectors".into());
                }
                let rows = if per_tensor { shape[0] } else { job.groups.rows };
                let vectors = VectorForm { bits, rows, length: vector };
                self.vectors(value, weight, (&shape, &values), vectors, job.moments)?
            }
            _ => self.numbers(value, weight, (&shape, &values), job)?,
        };
        let Some(op) = coded.operation else {
            return Ok((OpsOfWeight::None, coded.report));
        };
        let Some(scales) = scales else { return Ok((OpsOfWeight::One(op), coded.report)) };
        coded.report.kind.push_str(" scaled");
        coded.report.after += scales.len() as u64 * element_bytes(value);
        let cols = values.len() / scales.len().max(1);
        let decoded: Vec<f32> = coded
            .decoded
            .chunks(cols)
            .zip(&scales)
            .flat_map(|(row, s)| row.iter().map(move |v| v * s))
            .collect();
        let mut metrics = Metrics::default();
        metrics.add(&whole, &decoded, None);
        coded.report.relative_mse = metrics.relative_mse();
        let mut dims = vec![1; weight.shape.len()];
        dims[weight.axes[0]] = scales.len();
        let scale = self.place_floats(value, &dims, &scales)?;
        let last = self.operation("constexpr_blockwise_shift_scale", vec![("scale", scale)]);
        Ok((OpsOfWeight::Scaled(op, last), coded.report))
    }

    /// Codes a weight by tables of vectors over its output channels.
    fn vectors(
        &mut self,
        value: &Value,
        weight: &AxedWeight<'_>,
        (shape, values): (&[usize], &[f32]),
        form: VectorForm,
        moments: Option<&SecondMoments>,
    ) -> Result<CodedWeight> {
        let (rows, length) = (shape[0], form.length);
        let cols = values.len() / rows.max(1);
        let mut report = WeightReport::dense(value, values.len());
        // The largest group that divides the channels and holds whole vectors.
        let fits = |g: &usize| rows.is_multiple_of(*g) && g.is_multiple_of(length);
        let Some(group) = (1..=form.rows.min(rows)).rev().find(fits) else {
            return Ok(CodedWeight { operation: None, report, decoded: Vec::new() });
        };
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
            fit_vectors(&points, length, form.bits.bits(), masses.as_deref())
        };
        let tables: Vec<_> = values.par_chunks_exact(group * cols).map(fit).collect();
        let (codes, sides): (Vec<u8>, Vec<f32>) = (
            tables.iter().flat_map(|t| &t.codes).copied().collect(),
            tables.iter().flat_map(|t| &t.entries).map(|v| v.to_f32()).collect(),
        );
        let mut decoded = vec![0f32; values.len()];
        for (out, table) in decoded.chunks_exact_mut(group * cols).zip(&tables) {
            for (i, code) in table.codes.iter().enumerate() {
                let entry = &table.entries[usize::from(*code) * length..][..length];
                let first = i / cols * length;
                entry.iter().enumerate().for_each(|(r, v)| out[(first + r) * cols + i % cols] = v.to_f32());
            }
        }
        let (bits, entries) = (usize::from(form.bits.bits()), 1usize << form.bits.bits());
        let packed = pack_sub_byte(&weight.in_own_order(&codes, length), bits);
        let mut index_shape = weight.shape.to_vec();
        index_shape[weight.axes[0]] /= length;
        let dtype = element_type(Quant::lut(form.bits));
        let indices = self.place(dtype, &index_shape, &packed)?;
        let (mut dims, sides) = weight.sides((rows / group, 1), &sides, entries * length);
        dims.extend([entries, length]);
        let lut = self.place_floats(value, &dims, &sides)?;
        let axis = Value::int32(weight.axes[0] as i32);
        let operands = vec![("indices", indices), ("lut", lut), ("vector_axis", axis)];
        let mut metrics = Metrics::default();
        metrics.add(values, &decoded, None);
        report.kind = format!("lut{bits} of {length}");
        report.after = packed.len() as u64 + sides.len() as u64 * element_bytes(value);
        report.relative_mse = metrics.relative_mse();
        Ok(CodedWeight {
            operation: Some(self.operation("constexpr_lut_to_dense", operands)),
            report,
            decoded,
        })
    }

    /// Codes a weight by tables of numbers, or by integers.
    fn numbers(
        &mut self,
        value: &Value,
        weight: &AxedWeight<'_>,
        (shape, values): (&[usize], &[f32]),
        job: &QuantizeJob<'_>,
    ) -> Result<CodedWeight> {
        let old = self.opset < Opset::CoreML8;
        let op = if shape.len() > 2 { WeightOp::Conv } else { WeightOp::Linear };
        let QuantizeJob { kind, groups, moments, .. } = *job;
        let (name, exact, importance) = (weight.name, false, None);
        let c = TensorJob { name, shape, values, op, kind, groups, exact, importance, moments }.run()?;
        let report = WeightReport {
            kind: c.quant.to_string(),
            after: c.bytes(),
            relative_mse: c.side.metrics.relative_mse(),
            ..WeightReport::dense(value, values.len())
        };
        let decoded = match job.form {
            CodeForm::Tables { scaled: true, .. } => c.decode()?.iter().map(|v| v.to_f32()).collect(),
            _ => Vec::new(),
        };
        let parts = c.quant.groups_and_blocks(c.rows, c.cols);
        let sides: Vec<f32> = c.side.values.iter().map(|v| v.to_f32()).collect();
        let op = match c.quant.kind {
            Quant::Fp16 => return Ok(CodedWeight { operation: None, report, decoded }),
            Quant::Lut { bits, .. } => {
                let codes = weight.in_own_order(&c.elements(), 1);
                let packed = pack_sub_byte(&codes, usize::from(bits.bits()));
                let entries = 1usize << bits.bits();
                if old {
                    let indices = self.place(DataType::UInt8, &[packed.len()], &packed)?;
                    let lut = self.place_floats(value, &[entries], &sides)?;
                    let operands =
                        vec![("indices", indices), ("lut", lut), ("shape", shape_value(weight.shape))];
                    self.operation("constexpr_lut_to_dense", operands)
                } else {
                    let indices = self.place(element_type(c.quant.kind), weight.shape, &packed)?;
                    let (mut dims, sides) = weight.sides(parts, &sides, entries);
                    dims.extend([entries, 1]);
                    let lut = self.place_floats(value, &dims, &sides)?;
                    self.operation("constexpr_lut_to_dense", vec![("indices", indices), ("lut", lut)])
                }
            }
            Quant::Int { bits, granularity, .. } => {
                let bits = usize::from(bits.bits());
                let unsigned = job.form == CodeForm::Unsigned;
                // Numbers without sign are shifted by half their range.
                let shift = if unsigned { 1u8 << (bits - 1) } else { 0 };
                let signed = if bits == 4 { DataType::Int4 } else { DataType::Int8 };
                let dtype = match DataType::uint_of_bits(bits) {
                    Some(dtype) if unsigned => dtype,
                    _ => signed,
                };
                let shifted =
                    |codes: Vec<u8>| codes.into_iter().map(|c| c.wrapping_add(shift)).collect::<Vec<u8>>();
                let codes = shifted(weight.in_own_order(&c.elements(), 1));
                let data = self.place(dtype, weight.shape, &pack_sub_byte(&codes, bits))?;
                let has_offsets = !c.side.offsets.is_empty() || shift != 0;
                let mut offsets: Vec<u8> = c.side.offsets.iter().map(|&o| o as u8).collect();
                offsets.resize(sides.len(), 0);
                if old {
                    let dims: &[usize] =
                        if granularity == Granularity::Tensor { &[] } else { &[sides.len()] };
                    let scale = self.place_floats(value, dims, &sides)?;
                    let zero_point = self.place(dtype, dims, &shifted(offsets))?;
                    let axis = Value::int32(weight.axes[0] as i32);
                    let operands = vec![
                        ("quantized_data", data),
                        ("zero_point", zero_point),
                        ("scale", scale),
                        ("axis", axis),
                    ];
                    self.operation("constexpr_affine_dequantize", operands)
                } else {
                    let (dims, sides) = weight.sides(parts, &sides, 1);
                    let mut operands =
                        vec![("data", data), ("scale", self.place_floats(value, &dims, &sides)?)];
                    if has_offsets {
                        let (_, offsets) = weight.sides(parts, &shifted(offsets), 1);
                        operands.push(("offset", self.place(dtype, &dims, &pack_sub_byte(&offsets, bits))?));
                    }
                    self.operation("constexpr_blockwise_shift_scale", operands)
                }
            }
            kind @ Quant::Mxfp4 => {
                return Err(Error::usage(format!(
                    "weight `{}`: {kind} is not written to other packages",
                    weight.name
                )));
            }
        };
        Ok(CodedWeight { operation: Some(op), report, decoded })
    }
}

/// A quantization of one weight.
struct QuantizeJob<'a> {
    kind: Quant,
    groups: Groups,
    form: CodeForm,
    moments: Option<&'a SecondMoments>,
}

/// Tables of vectors.
#[derive(Clone, Copy)]
struct VectorForm {
    bits: IndexBits,
    /// Output channels that share a table, at most.
    rows: usize,
    /// Numbers of an entry.
    length: usize,
}

/// A weight as codes.
struct CodedWeight {
    /// The operation, without results; none for a weight that stays.
    operation: Option<Operation>,
    report: WeightReport,
    /// Decoded values `[out, in, rest..]` of tables; empty where nobody needs them.
    decoded: Vec<f32>,
}

impl WeightReport {
    /// Makes the report of a weight of `n` elements that stays.
    fn dense(value: &Value, n: usize) -> WeightReport {
        let before = n as u64 * element_bytes(value);
        let (function, name) = (String::new(), String::new());
        WeightReport { function, name, kind: "dense".into(), before, after: before, relative_mse: 0.0 }
    }
}

/// Returns the bytes of an element of a float tensor.
fn element_bytes(value: &Value) -> u64 {
    value.ty.tensor().map_or(2, |t| t.dtype.bits() as u64 / 8)
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

#[cfg(test)]
mod tests {
    use super::*;
    use anemoe_mlpackage::mil::TensorType;
    use anemoe_mlpackage::mil::builder::{FunctionBuilder, model};

    /// Writes a package that computes `y = x * w` for `w [64, 48]`.
    fn package(dir: &Path, opset: Opset) -> Package {
        let path = dir.join(format!("{opset}.mlpackage"));
        let mut writer = PackageWriter::create(&path).unwrap();
        let values = (0..64 * 48).map(|i| f16::from_f32(((i * 37 % 101) as f32 - 50.0) / 50.0));
        let bytes: Vec<u8> = values.flat_map(|v| v.to_le_bytes()).collect();
        let offset = writer.weights().append(DataType::Float16, 64 * 48, &bytes).unwrap();
        let mut f = FunctionBuilder::new(opset);
        let x = f.input("x", TensorType::fixed(DataType::Float16, &[1, 64])).unwrap();
        let w = f.constant("w", Value::blob(DataType::Float16, &[64, 48], offset)).unwrap();
        let y = f.matmul("y", &x, &w, false, false).unwrap();
        f.output(&y).unwrap();
        let model = model(opset, vec![("main".into(), f.finish().unwrap())], "main").unwrap();
        writer.finish(&model).unwrap();
        Package::open(&path).unwrap()
    }

    fn quantized(kind: &str) -> WeightJob {
        coded(kind, CodeForm::Plain)
    }

    fn coded(kind: &str, form: CodeForm) -> WeightJob {
        let (kind, groups) = (kind.parse().unwrap(), Groups { rows: 16, block: 32 });
        WeightJob::Quantize { kind, groups, axes: [1, 0], form }
    }

    /// Makes a table of numbers, or two of pairs with scales.
    fn given(pairs: bool) -> WeightJob {
        let (groups, of) = if pairs { (2, 2) } else { (1, 1) };
        WeightJob::Tables(Box::new(GivenTables {
            bits: IndexBits::Two,
            indices: (vec![64, 48 / of], (0..64 * 48 / of).map(|i| (i % 4) as u8).collect()),
            lut: (vec![1, groups, 4, of], (0..groups * 4 * of).map(|i| i as f32).collect()),
            vector_axis: pairs.then_some(1),
            scale: pairs.then(|| (vec![1, 48], vec![0.5; 48])),
            relative_mse: 0.25,
        }))
    }

    fn run(package: &Package, job: WeightJob, target: &Path) -> Result<Vec<WeightReport>> {
        let jobs = BTreeMap::from([(("main".to_string(), "w".to_string()), job)]);
        compress(package, &jobs, &mut |_, _| Ok(None), target)
    }

    #[test]
    fn a_weight_is_listed_with_its_user() {
        let dir = tempfile::tempdir().unwrap();
        let weights = dense_weights(&package(dir.path(), Opset::CoreML8));
        let [weight] = &weights[..] else { panic!("one weight") };
        assert_eq!((weight.name.as_str(), weight.shape.as_slice()), ("w", &[64, 48][..]));
        let user = &weight.users[0];
        assert_eq!((user.op_type.as_str(), user.param.as_str(), user.transposes), ("matmul", "y", false));
    }

    #[test]
    fn every_kind_passes_the_verifier() {
        let dir = tempfile::tempdir().unwrap();
        let of = |opset| package(dir.path(), opset);
        let (new, old) = (of(Opset::CoreML8), of(Opset::CoreML6));
        let sparse = WeightJob::Sparse(Pruning::Threshold { threshold: 0.5, least: 0.3 });
        let tables = |vector, scaled| CodeForm::Tables { vector, scaled };
        let jobs = [
            (quantized("lut4"), true),
            (quantized("lut2-tensor"), false),
            (quantized("int8-channel"), false),
            (quantized("int4-block-asymmetric"), true),
            (coded("int8-channel", CodeForm::Unsigned), false),
            (coded("lut4", tables(1, true)), true),
            (coded("lut4", tables(2, false)), true),
            (coded("lut6-tensor", tables(4, true)), true),
            (sparse, false),
            (given(false), false),
            (given(true), true),
        ];
        for (i, (job, is_new)) in jobs.into_iter().enumerate() {
            for (name, package, works) in [("new", &new, true), ("old", &old, !is_new)] {
                let target = dir.path().join(format!("{i}-{name}.mlpackage"));
                let done = run(package, job.clone(), &target);
                assert_eq!(done.is_ok(), works, "{job:?}: {done:?}");
                let Ok(reports) = done else { continue };
                assert!(reports[0].after < reports[0].before && reports[0].relative_mse < 0.5, "{reports:?}");
                assert!(dense_weights(&Package::open(&target).unwrap()).is_empty());
            }
        }
    }

    #[test]
    fn what_does_not_fit_is_named_and_leaves_nothing() {
        let dir = tempfile::tempdir().unwrap();
        let target = dir.path().join("out.mlpackage");
        let refused = |opset, job, says: &str| {
            let dir = tempfile::tempdir().unwrap();
            let e = run(&package(dir.path(), opset), job, &target).unwrap_err().to_string();
            assert!(e.contains(says), "{e}");
            assert!(!target.exists());
        };
        refused(Opset::CoreML5, quantized("lut4-tensor"), "iOS16");
        let (kind, groups, form) = (Quant::Fp16, Groups::default(), CodeForm::Plain);
        let axes = WeightJob::Quantize { kind, groups, axes: [0, 2], form };
        refused(Opset::CoreML8, axes, "weight `w`: axes 0 and 2");
        refused(
            Opset::CoreML8,
            coded("int8-channel", CodeForm::Tables { vector: 2, scaled: false }),
            "has no form",
        );
        refused(
            Opset::CoreML7,
            coded("lut4", CodeForm::Tables { vector: 2, scaled: false }),
            "tables of vectors",
        );
    }

    #[test]
    fn a_weight_with_few_zeros_stays() {
        let dir = tempfile::tempdir().unwrap();
        let (package, target) = (package(dir.path(), Opset::CoreML8), dir.path().join("out.mlpackage"));
        let reports =
            run(&package, WeightJob::Sparse(Pruning::Threshold { threshold: 0.1, least: 0.9 }), &target)
                .unwrap();
        assert_eq!(reports[0].kind, "dense");
        assert_eq!(Package::open(&target).unwrap().model(), package.model());
    }
}
