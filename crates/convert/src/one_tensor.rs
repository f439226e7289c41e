//! One tensor by itself: compressed, measured, and written as a package with the one operation that uses it.

use crate::lower::{add_constant, element_type, join_operands};
use crate::quant::{Granularity, Groups, MatrixQuant, Quant};
use crate::quantize::{Encoder, OutsideFp16, SecondMoments, TablesAndScales};
use crate::{Error, Result};
use anemoe_mlpackage::mil::builder::{ConvParams, FunctionBuilder, Var, model};
use anemoe_mlpackage::mil::verify::verify;
use anemoe_mlpackage::mil::{DataType, Opset, TensorType, Value};
use anemoe_mlpackage::package::PackageWriter;
use half::f16;
use std::path::Path;
use std::time::{Duration, Instant};

/// Operation that a weight belongs to: it decides which axis holds the output channels.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum WeightOp {
    /// `[out, in, kernel..]`
    Conv,
    /// `[out, in]`; a stack of matrices `[n, out, in]` counts as `[n * out, in]`.
    Linear,
    /// `[in, out]`, the second operand.
    MatMul,
}

/// Systems that a package is for.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum SystemTarget {
    /// iOS16 and macOS 13: tables and scales per tensor or channel.
    IOS16,
    /// iOS18 and macOS 15.
    IOS18,
}

/// Compression job of one tensor.
#[derive(Clone)]
pub struct TensorJob<'a> {
    /// Name for messages.
    pub name: &'a str,
    /// Dimensions, outermost first.
    pub shape: &'a [usize],
    /// Elements, row-major.
    pub values: &'a [f32],
    /// Operation that uses the tensor.
    pub op: WeightOp,
    /// Kind of compression.
    pub kind: Quant,
    /// Group sizes.
    pub groups: Groups,
    /// True for the global optimum of k-means.
    pub exact: bool,
    /// Second moment of every input channel.
    pub importance: Option<&'a [f32]>,
    /// Second moments of the inputs, kernels included; codes are chosen for them then, by error feedback.
    pub moments: Option<&'a SecondMoments>,
}

/// A compressed tensor.
pub struct CompressedTensor {
    /// Output channels.
    pub rows: usize,
    /// Weights of an output channel.
    pub cols: usize,
    /// Elements of a kernel per input channel.
    pub spatial: usize,
    /// The kind with its group. For scales per block the group counts weights, kernels included.
    pub quant: MatrixQuant,
    /// Packed elements, `[rows, cols]`.
    pub packed: Vec<u8>,
    /// Tables or scales, and the compression's errors.
    pub side: TablesAndScales,
    /// Time that the compression took.
    pub elapsed: Duration,
    shape: Vec<usize>,
    op: WeightOp,
}

fn transpose<T: Copy>(values: &[T], rows: usize, cols: usize) -> Vec<T> {
    let mut out = Vec::with_capacity(values.len());
    for c in 0..cols {
        out.extend((0..rows).map(|r| values[r * cols + c]));
    }
    out
}

impl TensorJob<'_> {
    /// Compresses the tensor.
    ///
    /// # Errors
    /// The shape does not fit the operation, the importances do not fit the input channels or are no masses, or a value is
    /// not finite or does not fit fp16.
    pub fn run(&self) -> Result<CompressedTensor> {
        let usage = |what: String| Err(Error::usage(format!("tensor `{}`: {what}", self.name)));
        let (rows, cols, spatial) = match (self.op, self.shape) {
            (WeightOp::Conv, [o, i, kernel @ ..]) if !kernel.is_empty() && kernel.len() <= 3 => {
                let spatial: usize = kernel.iter().product();
                (*o, i * spatial, spatial)
            }
            (WeightOp::Linear, [outer @ .., i]) if !outer.is_empty() => (outer.iter().product(), *i, 1),
            (WeightOp::MatMul, [i, o]) => (*o, *i, 1),
            _ => {
                let op = match self.op {
                    WeightOp::Conv => "conv, [out, in, kernel..]",
                    WeightOp::Linear => "linear, [out, in]",
                    WeightOp::MatMul => "matmul, [in, out]",
                };
                return usage(format!("shape {:?} is not that of a weight of {op}", self.shape));
            }
        };
        if rows * cols == 0 {
            return usage(format!("shape {:?} has no elements", self.shape));
        }
        const EXPONENT: u32 = 0x7f80_0000;
        let infinite = |v: &f32| v.to_bits() & EXPONENT == EXPONENT;
        // The loop has no early end, so that vector instructions can test several values at a time.
        if self.values.iter().fold(false, |any, v| any | infinite(v)) {
            let i = self.values.iter().position(infinite).unwrap_or(0);
            return usage(format!("element {i} is {}", self.values[i]));
        }
        let channels = cols / spatial;
        let importance: Option<Vec<f32>> = match self.importance {
            None => None,
            Some(m) if m.iter().any(|v| !v.is_finite() || *v < 0.0) => {
                return usage("an importance is negative or no number".into());
            }
            Some(m) if m.len() == channels => {
                Some(m.iter().flat_map(|&v| std::iter::repeat_n(v, spatial)).collect())
            }
            Some(m) => return usage(format!("{} importances for {channels} input channels", m.len())),
        };
        let quant = MatrixQuant::resolve_kernels(self.kind, self.groups, rows, (channels, spatial));
        let transposed;
        let values = match self.op {
            WeightOp::MatMul => {
                transposed = transpose(self.values, cols, rows);
                transposed.as_slice()
            }
            _ => self.values,
        };
        let started = Instant::now();
        let encoder =
            Encoder { rows, cols, quant, exact: self.exact, importance: importance.as_deref(), scale: None };
        let outside = |e: OutsideFp16| Error::usage(format!("tensor `{}`: {e}", self.name));
        let (packed, side) = match self.moments {
            Some(moments) if moments.inputs() != cols => {
                return usage(format!("moments of {} inputs for {cols}", moments.inputs()));
            }
            Some(moments) => {
                let matrix = encoder.run_with_feedback(values, moments).map_err(outside)?;
                (matrix.packed, matrix.side)
            }
            None => {
                let mut packed =
                    Vec::with_capacity((rows * cols * usize::from(quant.kind.bits())).div_ceil(8));
                let read = |first: usize, out: &mut [f32]| {
                    out.copy_from_slice(&values[first * cols..][..out.len()]);
                    Ok(())
                };
                let write = &mut |bytes: &[u8]| {
                    packed.extend_from_slice(bytes);
                    Ok::<(), OutsideFp16>(())
                };
                let side = encoder.run(&read, write).map_err(outside)?;
                (packed, side)
            }
        };
        let elapsed = started.elapsed();
        Ok(CompressedTensor {
            rows,
            cols,
            spatial,
            quant,
            packed,
            side,
            elapsed,
            shape: self.shape.to_vec(),
            op: self.op,
        })
    }
}

impl CompressedTensor {
    /// Returns the bytes of elements, tables, scales and offsets.
    pub fn bytes(&self) -> u64 {
        self.quant.bytes(self.rows, self.cols)
    }

    /// Returns the fp16 values that the compressed tensor stands for, in the tensor's own layout.
    ///
    /// # Errors
    /// None is known: lengths always fit.
    pub fn decode(&self) -> Result<Vec<f16>> {
        let (rows, cols) = (self.rows, self.cols);
        let encoder = Encoder::plain(rows, cols, self.quant);
        let dense = encoder.decode(&self.packed, &self.side).map_err(|e| Error::usage(e.to_string()))?;
        let dense: Vec<f16> = dense.into_iter().map(f16::from_f32).collect();
        Ok(match self.op {
            WeightOp::MatMul => transpose(&dense, rows, cols),
            _ => dense,
        })
    }

    /// Returns the elements, one per byte, in the tensor's own layout; integers of linear kinds in two's complement.
    pub fn elements(&self) -> Vec<u8> {
        let bits = usize::from(self.quant.kind.bits());
        let mut codes = anemoe_mlpackage::blob::unpack_sub_byte(&self.packed, bits, self.rows * self.cols);
        if matches!(self.quant.kind, Quant::Int { .. }) && bits < 8 {
            codes.iter_mut().for_each(|c| *c = (((*c << (8 - bits)) as i8) >> (8 - bits)) as u8);
        }
        match self.op {
            WeightOp::MatMul => transpose(&codes, self.rows, self.cols),
            _ => codes,
        }
    }

    /// Returns the dimensions of tables or scales: groups per axis of the tensor; tables have two more, `2^bits` and
    /// 1.
    pub fn side_dims(&self) -> Vec<usize> {
        let (groups, blocks) = self.quant.groups_and_blocks(self.rows, self.cols);
        let mut dims = match self.op {
            WeightOp::MatMul => vec![blocks, groups],
            WeightOp::Linear => vec![groups, blocks],
            WeightOp::Conv => {
                let mut dims = vec![1; self.shape.len()];
                (dims[0], dims[1]) = (groups, blocks);
                dims
            }
        };
        if let Quant::Lut { bits, .. } = self.quant.kind {
            dims.extend([1 << bits.bits(), 1]);
        }
        dims
    }

    /// Returns the tables or scales in the order of [`CompressedTensor::side_dims`].
    pub fn side_values(&self) -> Vec<f16> {
        self.transposed(&self.side.values)
    }

    /// Returns the offsets in the order of [`CompressedTensor::side_dims`]; empty for kinds without offsets.
    pub fn side_offsets(&self) -> Vec<i8> {
        self.transposed(&self.side.offsets)
    }

    fn transposed<T: Copy>(&self, values: &[T]) -> Vec<T> {
        let (groups, blocks) = self.quant.groups_and_blocks(self.rows, self.cols);
        match self.op {
            WeightOp::MatMul if values.len() == groups * blocks => transpose(values, groups, blocks),
            _ => values.to_vec(),
        }
    }

    /// Writes a package with one function: input `x`, the operation with this weight, output `y`. With `replace`, a package
    /// that exists is replaced.
    ///
    /// # Errors
    /// The target's format lacks the kind, the weight's rank does not fit the operation, or writing fails.
    pub fn write_package(&self, path: &Path, replace: bool, target: SystemTarget) -> Result<()> {
        if target == SystemTarget::IOS16
            && let Some(why) = self.quant.kind.refused_by_ios16()
        {
            return Err(Error::usage(format!("{} for iOS16: {why}", self.quant.kind)));
        }
        if self.op == WeightOp::Linear && self.shape.len() > 2 {
            return Err(Error::usage(format!(
                "shape {:?}: a linear operation's weight has two axes",
                self.shape
            )));
        }
        let opset = match target {
            SystemTarget::IOS16 => Opset::CoreML6,
            SystemTarget::IOS18 => Opset::CoreML8,
        };
        let dims: Vec<u64> = self.shape.iter().map(|&d| d as u64).collect();
        let mut writer = if replace { PackageWriter::replace(path)? } else { PackageWriter::create(path)? };
        let packed = match self.op {
            // The package stores elements in the tensor's own layout.
            WeightOp::MatMul => match self.quant.kind {
                Quant::Fp16 => self.decode()?.iter().flat_map(|v| v.to_le_bytes()).collect(),
                kind => anemoe_mlpackage::blob::pack_sub_byte(&self.elements(), usize::from(kind.bits())),
            },
            _ => self.packed.clone(),
        };
        let mut f = FunctionBuilder::new(opset);
        let weight = match target {
            SystemTarget::IOS18 => self.weight_ios18(&mut writer, &mut f, &dims, &packed)?,
            SystemTarget::IOS16 => self.weight_ios16(&mut writer, &mut f, &dims, &packed)?,
        };
        let (channels, kernel) = (self.cols / self.spatial, dims.get(2..).unwrap_or_default());
        let y = match self.op {
            WeightOp::Conv => {
                let shape: Vec<u64> =
                    [1, channels as u64].into_iter().chain(kernel.iter().copied()).collect();
                let x = f.input("x", TensorType::fixed(DataType::Float16, &shape))?;
                f.conv("y", &x, &weight, None, ConvParams::default())?
            }
            WeightOp::Linear => {
                let x = f.input("x", TensorType::fixed(DataType::Float16, &[1, channels as u64]))?;
                // Every optional operand is written, as coremltools does.
                let rows = self.rows as u64;
                let offset = writer.weights().append(DataType::Float16, rows, &vec![0; 2 * self.rows])?;
                let bias = f.constant("bias", Value::blob(DataType::Float16, &[rows], offset))?;
                f.linear("y", &x, &weight, Some(&bias))?
            }
            WeightOp::MatMul => {
                let x = f.input("x", TensorType::fixed(DataType::Float16, &[1, channels as u64]))?;
                f.matmul("y", &x, &weight, false, false)?
            }
        };
        f.output(&y)?;
        let model = model(opset, vec![("main".to_string(), f.finish()?)], "main")?;
        if let Some(finding) = verify(&model).first() {
            return Err(Error::invalid_program(finding.to_string()));
        }
        writer.finish(&model)?;
        Ok(())
    }

    fn weight_ios18(
        &self,
        writer: &mut PackageWriter,
        f: &mut FunctionBuilder,
        dims: &[u64],
        packed: &[u8],
    ) -> Result<Var> {
        let dtype = element_type(self.quant.kind);
        let blobs = writer.weights();
        let offset = blobs.append(dtype, self.rows as u64 * self.cols as u64, packed)?;
        let elements = Value::blob(dtype, dims, offset);
        let side_dims: Vec<u64> = self.side_dims().iter().map(|&d| d as u64).collect();
        let side = TablesAndScales {
            values: self.side_values(),
            offsets: self.side_offsets(),
            metrics: self.side.metrics,
        };
        let format = self.quant.format(self.rows, self.cols);
        let stored = join_operands(blobs, format, elements, &side_dims, &side)?;
        add_constant(f, "weight", &stored)
    }

    fn weight_ios16(
        &self,
        writer: &mut PackageWriter,
        f: &mut FunctionBuilder,
        dims: &[u64],
        packed: &[u8],
    ) -> Result<Var> {
        let blobs = writer.weights();
        let n = self.rows as u64 * self.cols as u64;
        Ok(match self.quant.kind {
            Quant::Fp16 => {
                let offset = blobs.append(DataType::Float16, n, packed)?;
                f.constant("weight", Value::blob(DataType::Float16, dims, offset))?
            }
            Quant::Lut { .. } => {
                let bytes = packed.len() as u64;
                let offset = blobs.append(DataType::UInt8, bytes, packed)?;
                let indices = Value::blob(DataType::UInt8, &[bytes], offset);
                let lut = Value::fp16_tensor(&[self.side.values.len() as u64], &self.side.values);
                let shape: Vec<u8> = dims.iter().flat_map(|&d| (d as u32).to_le_bytes()).collect();
                let shape = Value::bytes(DataType::UInt32, &[dims.len() as u64], shape);
                // The op takes one table, indices packed into bytes, and the weight's shape.
                let args = vec![("indices", indices.into()), ("lut", lut.into()), ("shape", shape.into())];
                f.single("constexpr_lut_to_dense", "weight", args)?
            }
            kind @ Quant::Mxfp4 => {
                return Err(Error::usage(format!("{kind}: before iOS18 there are no scales per block")));
            }
            Quant::Int { granularity, .. } => {
                let offset = blobs.append(DataType::Int8, n, packed)?;
                let data = Value::blob(DataType::Int8, dims, offset);
                // The scale is a scalar for the whole tensor, or a vector along the output axis.
                let scale_dims: &[u64] =
                    if granularity == Granularity::Tensor { &[] } else { &[self.side.values.len() as u64] };
                let scale = Value::fp16_tensor(scale_dims, &self.side.values);
                let mut zeros: Vec<u8> = self.side.offsets.iter().map(|&o| o as u8).collect();
                zeros.resize(self.side.values.len(), 0);
                let zero_point = Value::bytes(DataType::Int8, scale_dims, zeros);
                let axis = if self.op == WeightOp::MatMul { 1 } else { 0 };
                let args = vec![
                    ("quantized_data", data.into()),
                    ("zero_point", zero_point.into()),
                    ("scale", scale.into()),
                    ("axis", axis.into()),
                ];
                f.single("constexpr_affine_dequantize", "weight", args)?
            }
        })
    }
}
