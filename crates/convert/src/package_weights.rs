//! Weights of an existing package, of whatever tool: listed with their users, and compressed into another package.
//!
//! ```text
//! const weight --> constexpr_lut_to_dense | constexpr_blockwise_shift_scale | constexpr_affine_dequantize | constexpr_sparse_to_dense
//! ```
//! Everything else is copied. Names, types and operations that use the weights stay.

use crate::lower::element_type;
use crate::one_tensor::{CompressedTensor, TensorJob, WeightOp};
use crate::quant::{Granularity, Groups, Quant};
use crate::{Error, Result};
use anemoe_mlpackage::blob::{BlobWriter, pack_sub_byte};
use anemoe_mlpackage::mil::verify::{Severity, verify};
use anemoe_mlpackage::mil::{
    Argument, Binding, Block, DataType, Immediate, Operation, Opset, TensorData, Value, ValueData,
};
use anemoe_mlpackage::package::{Package, PackageWriter};
use half::f16;
use std::collections::BTreeMap;
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
}

/// Compression of one weight.
#[derive(Clone, Copy, Debug, PartialEq)]
pub enum WeightJob {
    /// Tables or integers.
    Quantize {
        /// Kind of compression.
        kind: Quant,
        /// Group sizes.
        groups: Groups,
        /// Axes of output and input channels.
        axes: [usize; 2],
        /// True to store integers of linear kinds without sign.
        unsigned: bool,
    },
    /// Zeros are left out.
    Sparse {
        /// Largest magnitude that becomes zero.
        threshold: f32,
        /// Least share of zeros; a weight with fewer stays.
        least: f64,
    },
}

/// Result of one weight.
#[derive(Clone, Debug, PartialEq)]
pub struct WeightReport {
    /// Function.
    pub function: String,
    /// Name of the constant.
    pub name: String,
    /// Kind; `fp16` for a weight whose tables would cost more than they save, `dense` for one with too few zeros: both stay.
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
        for op in &ops {
            for (param, Argument(bindings)) in &op.inputs {
                for binding in bindings {
                    let Binding::Name(used) = binding else { continue };
                    let transposes =
                        op.op_type == "matmul" && is_true(op, &format!("transpose_{param}")) == Some(true);
                    let (op_type, name, param) = (op.op_type.clone(), op.name().into(), param.clone());
                    users.entry(used).or_default().push(WeightUser { op_type, name, param, transposes });
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

/// Writes a package with compressed weights to `target`, which must not exist. `jobs` are by function and constant.
///
/// # Errors
/// A job does not fit its weight or the package's system, a weight holds a value that fp16 cannot, or writing fails.
pub fn compress(
    package: &Package,
    jobs: &BTreeMap<(String, String), WeightJob>,
    target: &Path,
) -> Result<Vec<WeightReport>> {
    let mut model = package.model().clone();
    let mut writer = PackageWriter::create(target)?;
    let mut rewriter = Rewriter {
        package,
        jobs,
        blobs: writer.weights(),
        copied: BTreeMap::new(),
        compressed: Vec::new(),
        function: String::new(),
        opset: Opset::CoreML5,
        reports: Vec::new(),
    };
    for (name, function) in &mut model.program.functions {
        rewriter.function.clone_from(name);
        rewriter.opset = function.opset;
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

/// An operation with its report; none for a weight that stays.
type Rewritten = (Option<Operation>, WeightReport);

struct Rewriter<'a> {
    package: &'a Package,
    jobs: &'a BTreeMap<(String, String), WeightJob>,
    blobs: &'a mut BlobWriter,
    /// New offsets of copied blobs, by file and offset.
    copied: BTreeMap<(String, u64), u64>,
    /// Compressed weights, which functions share.
    compressed: Vec<(Value, WeightJob, Opset, Rewritten)>,
    function: String,
    opset: Opset,
    reports: Vec<WeightReport>,
}

impl Rewriter<'_> {
    fn block(&mut self, block: &mut Block) -> Result<()> {
        for op in &mut block.operations {
            let key = op.outputs.first().map(|o| (self.function.clone(), o.name.clone()));
            if let (Some(value), Some(job)) = (dense_value(op), key.and_then(|key| self.jobs.get(&key))) {
                let (new, report) = self.compressed(&value.clone(), *job, op)?;
                self.reports.push(report);
                if let Some(new) = new {
                    let (outputs, name) = (std::mem::take(&mut op.outputs), op.attributes.remove("name"));
                    *op = Operation { outputs, ..new };
                    op.attributes.extend(name.map(|name| ("name".to_string(), name)));
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
        }
        Ok(())
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

    fn compressed(&mut self, value: &Value, job: WeightJob, op: &Operation) -> Result<Rewritten> {
        let named = |(new, report): Rewritten, function: &str| {
            (new, WeightReport { function: function.into(), name: op.name().into(), ..report })
        };
        let same = |(v, j, opset, _): &&(Value, WeightJob, Opset, Rewritten)| {
            v == value && *j == job && (*opset < Opset::CoreML8) == (self.opset < Opset::CoreML8)
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
        let done = match job {
            WeightJob::Sparse { threshold, least } => self.sparse(value, &shape, values, threshold, least)?,
            WeightJob::Quantize { kind, groups, axes, unsigned } => {
                let weight = AxedWeight { name: op.name(), shape: &shape, axes, unsigned };
                self.quantized(value, &weight, &values, kind, groups)?
            }
        };
        self.compressed.push((value.clone(), job, self.opset, done.clone()));
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
        values: Vec<f32>,
        threshold: f32,
        least: f64,
    ) -> Result<Rewritten> {
        let kept: Vec<f32> = values.iter().copied().filter(|v| v.abs() > threshold).collect();
        let squares = |v: &[f32]| v.iter().map(|v| f64::from(*v).powi(2)).sum::<f64>();
        let element = value.ty.tensor().map_or(2, |t| t.dtype.bits() as u64 / 8);
        let before = values.len() as u64 * element;
        let mut report = WeightReport {
            function: String::new(),
            name: String::new(),
            kind: "dense".into(),
            before,
            after: before,
            relative_mse: 0.0,
        };
        let zeros = 1.0 - kept.len() as f64 / values.len().max(1) as f64;
        // A tensor of no values cannot be stored.
        if zeros < least || kept.is_empty() {
            return Ok((None, report));
        }
        let (whole, left) = (squares(&values), squares(&kept));
        let bits: Vec<u8> = values.iter().map(|v| u8::from(v.abs() > threshold)).collect();
        let packed = pack_sub_byte(&bits, 1);
        report.kind = format!("sparse {:.0} %", 100.0 * zeros);
        report.after = kept.len() as u64 * element + packed.len() as u64;
        report.relative_mse = if whole > 0.0 { (whole - left) / whole } else { 0.0 };
        let nonzero = self.place_floats(value, &[kept.len()], &kept)?;
        let mut operands = vec![("nonzero_data", nonzero)];
        if self.opset < Opset::CoreML8 {
            operands.push(("mask", self.place(DataType::UInt8, &[packed.len()], &packed)?));
            operands.push(("shape", shape_value(shape)));
        } else {
            operands.push(("mask", self.place(DataType::UInt1, shape, &packed)?));
        }
        Ok((Some(self.operation("constexpr_sparse_to_dense", operands)), report))
    }

    fn quantized(
        &mut self,
        value: &Value,
        weight: &AxedWeight<'_>,
        values: &[f32],
        kind: Quant,
        groups: Groups,
    ) -> Result<Rewritten> {
        let old = self.opset < Opset::CoreML8;
        if old && let Some(why) = kind.refused_by_ios16() {
            let what = format!("weight `{}`: {kind} for a package of iOS16 or iOS17: {why}", weight.name);
            return Err(Error::usage(what));
        }
        let (shape, values) = weight.by_channels(values)?;
        let op = if shape.len() > 2 { WeightOp::Conv } else { WeightOp::Linear };
        let (name, exact, importance) = (weight.name, false, None);
        let c =
            TensorJob { name, shape: &shape, values: &values, op, kind, groups, exact, importance }.run()?;
        let report = WeightReport {
            function: String::new(),
            name: String::new(),
            kind: c.quant.to_string(),
            before: values.len() as u64 * value.ty.tensor().map_or(2, |t| t.dtype.bits() as u64 / 8),
            after: c.bytes(),
            relative_mse: c.side.metrics.relative_mse(),
        };
        let sides: Vec<f32> = c.side.values.iter().map(|v| v.to_f32()).collect();
        let op = match c.quant.kind {
            Quant::Fp16 => return Ok((None, report)),
            Quant::Lut { bits, .. } => {
                let codes = weight.in_own_order(&c.elements());
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
                    let (mut dims, sides) = weight.sides(&c, &sides, entries);
                    dims.extend([entries, 1]);
                    let lut = self.place_floats(value, &dims, &sides)?;
                    self.operation("constexpr_lut_to_dense", vec![("indices", indices), ("lut", lut)])
                }
            }
            Quant::Int { bits, granularity, .. } => {
                let bits = usize::from(bits.bits());
                // Numbers without sign are shifted by half their range.
                let shift = if weight.unsigned { 1u8 << (bits - 1) } else { 0 };
                let signed = if bits == 4 { DataType::Int4 } else { DataType::Int8 };
                let dtype = match DataType::uint_of_bits(bits) {
                    Some(unsigned) if weight.unsigned => unsigned,
                    _ => signed,
                };
                let shifted =
                    |codes: Vec<u8>| codes.into_iter().map(|c| c.wrapping_add(shift)).collect::<Vec<u8>>();
                let codes = shifted(weight.in_own_order(&c.elements()));
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
                    let (dims, sides) = weight.sides(&c, &sides, 1);
                    let mut operands =
                        vec![("data", data), ("scale", self.place_floats(value, &dims, &sides)?)];
                    if has_offsets {
                        let (_, offsets) = weight.sides(&c, &shifted(offsets), 1);
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
        Ok((Some(op), report))
    }
}

/// Makes the operand `shape` of the operations before iOS18.
fn shape_value(shape: &[usize]) -> Value {
    let bytes = shape.iter().flat_map(|&d| (d as u32).to_le_bytes()).collect();
    Value::bytes(DataType::UInt32, &[shape.len() as u64], bytes)
}

/// A weight whose channels lie on any two axes.
struct AxedWeight<'a> {
    name: &'a str,
    shape: &'a [usize],
    /// Axes of output and input channels.
    axes: [usize; 2],
    unsigned: bool,
}

impl AxedWeight<'_> {
    /// Returns the axes with those of output and input channels first.
    fn order(&self) -> Vec<usize> {
        let rest = (0..self.shape.len()).filter(|axis| !self.axes.contains(axis));
        self.axes.into_iter().chain(rest).collect()
    }

    /// Returns shape and elements `[out, in, rest..]`.
    fn by_channels(&self, values: &[f32]) -> Result<(Vec<usize>, Vec<f32>)> {
        let [out, input] = self.axes;
        if out == input || out.max(input) >= self.shape.len() {
            let what = format!("axes {out} and {input} of a weight of shape {:?}", self.shape);
            return Err(Error::usage(format!("weight `{}`: {what}", self.name)));
        }
        let order = self.order();
        Ok((order.iter().map(|&axis| self.shape[axis]).collect(), permute(values, self.shape, &order)))
    }

    /// Returns elements `[out, in, rest..]` in the weight's own order.
    fn in_own_order(&self, elements: &[u8]) -> Vec<u8> {
        let order = self.order();
        let shape: Vec<usize> = order.iter().map(|&axis| self.shape[axis]).collect();
        let back: Vec<usize> =
            (0..order.len()).filter_map(|axis| order.iter().position(|&a| a == axis)).collect();
        permute(elements, &shape, &back)
    }

    /// Returns dimensions and elements of tables or scales, `entries` elements per group and block.
    fn sides<T: Copy>(&self, c: &CompressedTensor, values: &[T], entries: usize) -> (Vec<usize>, Vec<T>) {
        let (groups, blocks) = c.quant.parts(c.rows, c.cols);
        let [out, input] = self.axes;
        let mut dims = vec![1; self.shape.len()];
        (dims[out], dims[input]) = (groups, blocks);
        let order = if out < input { [0, 1, 2] } else { [1, 0, 2] };
        (dims, permute(values, &[groups, blocks, entries], &order))
    }
}

/// Reorders the axes of a row-major array: axis i of the result is axis `order[i]` of `values`.
fn permute<T: Copy>(values: &[T], shape: &[usize], order: &[usize]) -> Vec<T> {
    if order.is_sorted() {
        return values.to_vec();
    }
    let mut strides = vec![1; shape.len()];
    for axis in (1..shape.len()).rev() {
        strides[axis - 1] = strides[axis] * shape[axis];
    }
    let steps: Vec<(usize, usize)> = order.iter().map(|&axis| (shape[axis], strides[axis])).collect();
    let mut index = vec![0; steps.len()];
    let mut place = 0;
    let mut out = Vec::with_capacity(values.len());
    for _ in 0..values.len() {
        out.push(values[place]);
        for (i, (size, stride)) in index.iter_mut().zip(&steps).rev() {
            *i += 1;
            place += stride;
            if *i < *size {
                break;
            }
            place -= *i * stride;
            *i = 0;
        }
    }
    out
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
        let (kind, groups) = (kind.parse().unwrap(), Groups { rows: 16, block: 32 });
        WeightJob::Quantize { kind, groups, axes: [1, 0], unsigned: false }
    }

    fn run(package: &Package, job: WeightJob, target: &Path) -> Result<Vec<WeightReport>> {
        compress(package, &BTreeMap::from([(("main".to_string(), "w".to_string()), job)]), target)
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
        let sparse = WeightJob::Sparse { threshold: 0.5, least: 0.3 };
        let jobs = [
            ("lut4", true),
            ("lut2-tensor", false),
            ("int8-channel", false),
            ("int4-block-asymmetric", true),
        ];
        let jobs = jobs.map(|(kind, is_new)| (quantized(kind), is_new)).into_iter().chain([(sparse, false)]);
        for (i, (job, is_new)) in jobs.enumerate() {
            for (package, works) in [(&new, true), (&old, !is_new)] {
                let target =
                    dir.path().join(format!("{i}-{}.mlpackage", package.model().specification_version));
                let done = run(package, job, &target);
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
            let e = run(&package(dir.path(), opset), job, &target).unwrap_err().to_string();
            assert!(e.contains(says), "{e}");
            assert!(!target.exists());
        };
        refused(Opset::CoreML5, quantized("lut4-tensor"), "iOS16");
        let axes = WeightJob::Quantize {
            kind: Quant::Fp16,
            groups: Groups::default(),
            axes: [0, 2],
            unsigned: false,
        };
        refused(Opset::CoreML8, axes, "weight `w`: axes 0 and 2");
    }

    #[test]
    fn a_weight_with_few_zeros_stays() {
        let dir = tempfile::tempdir().unwrap();
        let (package, target) = (package(dir.path(), Opset::CoreML8), dir.path().join("out.mlpackage"));
        let reports = run(&package, WeightJob::Sparse { threshold: 0.1, least: 0.9 }, &target).unwrap();
        assert_eq!(reports[0].kind, "dense");
        assert_eq!(Package::open(&target).unwrap().model(), package.model());
    }

    #[test]
    fn axes_are_reordered() {
        let values: Vec<u8> = (0..24).collect();
        let there = permute(&values, &[2, 3, 4], &[2, 0, 1]);
        assert_eq!(there[..4], [0, 4, 8, 12]);
        assert_eq!(permute(&there, &[4, 2, 3], &[1, 2, 0]), values);
    }
}
