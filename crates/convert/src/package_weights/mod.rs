//! Weights of an existing package, of whatever tool: listed with their users, and compressed into another package.
//!
//! ```text
//! const weight --> constexpr_lut_to_dense | constexpr_blockwise_shift_scale | constexpr_affine_dequantize | constexpr_sparse_to_dense
//!                  constexpr_lut_to_dense --> constexpr_blockwise_shift_scale, with scales per channel
//! ```
//! Everything else is copied. Names, types and operations that use the weights stay.

mod axed_weight;
mod pruning;
mod weight_coder;
mod weight_job;

pub use pruning::Pruning;
pub use weight_job::{CodeForm, GivenTables, Shaped, WeightJob, WeightReport};

use crate::quantize::SecondMoments;
use crate::{Error, Result};
use anemoe_mlpackage::mil::verify::{Severity, verify};
use anemoe_mlpackage::mil::{
    Argument, Binding, Block, DataType, NamedType, Operation, Opset, Value, ValueData,
};
use anemoe_mlpackage::package::{Package, PackageWriter};
use axed_weight::AxedWeight;
use std::collections::{BTreeMap, BTreeSet};
use std::path::Path;
use weight_coder::{Coded, QuantizeJob, WeightCoder};

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

/// Finds the second moments of the inputs of a weight, by function and constant; `None` where they are not known.
pub type FindMoments<'a> = dyn FnMut(&str, &str) -> Result<Option<SecondMoments>> + 'a;

/// Lists the weights of a package that can be compressed.
pub fn dense_weights(package: &Package) -> Vec<DenseWeight> {
    let mut all = Vec::new();
    for (name, function) in &package.model().program.functions {
        let mut ops = Vec::new();
        operations(&function.block, &mut ops);
        let mut users: BTreeMap<&str, Vec<WeightUser>> = BTreeMap::new();
        let constant = |op, param: &str| constant(ops.iter().copied(), op, param);
        let groups = |op| {
            let found = constant(op, "groups").and_then(Value::as_ints);
            found.and_then(|g| usize::try_from(*g.first()?).ok()).unwrap_or(1)
        };
        for op in &ops {
            for (param, Argument(bindings)) in &op.inputs {
                for binding in bindings {
                    let Binding::Name(used) = binding else { continue };
                    let is_true = |param: &str| constant(op, param).and_then(Value::as_bool) == Some(true);
                    let transposes = op.op_type == "matmul" && is_true(&format!("transpose_{param}"));
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

/// Returns the value of an operand of `op` that stands in the operation, or is a constant of `ops`.
pub fn constant<'a>(
    ops: impl IntoIterator<Item = &'a Operation>,
    op: &'a Operation,
    param: &str,
) -> Option<&'a Value> {
    match op.inputs.get(param)?.0.as_slice() {
        [Binding::Value(value)] => Some(value),
        [Binding::Name(name)] => {
            let made = |op: &&Operation| op.op_type == "const" && op.outputs.iter().any(|o| o.name == *name);
            ops.into_iter().find(made)?.attributes.get("val")
        }
        _ => None,
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
            let halves = bytes.as_chunks::<2>().0;
            let mut values = vec![0f32; halves.len()];
            anemoe_kernels::f16_to_f32(halves.as_flattened(), &mut values);
            Ok(values)
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
        coder: WeightCoder { blobs: writer.weights(), opset: Opset::CoreML5 },
        copied: BTreeMap::new(),
        compressed: Vec::new(),
        function: String::new(),
        names: BTreeSet::new(),
        reports: Vec::new(),
    };
    for (name, function) in &mut model.program.functions {
        rewriter.function.clone_from(name);
        rewriter.coder.opset = function.opset;
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

struct Rewriter<'a, 'm> {
    package: &'a Package,
    jobs: &'a BTreeMap<(String, String), WeightJob>,
    moments: &'a mut FindMoments<'m>,
    coder: WeightCoder<'a>,
    /// New offsets of copied blobs, by file and offset.
    copied: BTreeMap<(String, u64), u64>,
    /// Compressed weights, which functions share.
    compressed: Vec<(Value, WeightJob, Opset, Coded)>,
    function: String,
    /// Names of the function's values.
    names: BTreeSet<String>,
    reports: Vec<WeightReport>,
}

impl Rewriter<'_, '_> {
    fn block(&mut self, block: &mut Block) -> Result<()> {
        let operations = std::mem::take(&mut block.operations);
        block.operations.reserve(operations.len());
        for mut op in operations {
            let key = op.outputs.first().map(|o| (self.function.clone(), o.name.clone()));
            if let (Some(value), Some(job)) = (dense_value(&op), key.and_then(|key| self.jobs.get(&key))) {
                let (mut new, report) = self.compressed(&value.clone(), job, &op)?;
                self.reports.push(report);
                if let Some(mut last) = new.pop() {
                    if let Some(mut first) = new.pop() {
                        let name = self.free_name(&format!("{}_unscaled", op.outputs[0].name));
                        first.outputs = vec![NamedType { name: name.clone(), ..op.outputs[0].clone() }];
                        first.attributes.insert("name".into(), Value::string(&name));
                        last.inputs.insert("data".into(), Argument(vec![Binding::Name(name)]));
                        block.operations.push(first);
                    }
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
            None => self.coder.blobs.append(blob.dtype, blob.count, blob.data)?,
        };
        self.copied.insert(key, offset);
        let dims = value.ty.tensor().and_then(|t| t.shape()).unwrap_or_default();
        value.data = Value::blob(blob.dtype, &dims, offset).data;
        Ok(())
    }

    fn compressed(&mut self, value: &Value, job: &WeightJob, op: &Operation) -> Result<Coded> {
        let named = |(new, report): Coded, function: &str| {
            (new, WeightReport { function: function.into(), name: op.name().into(), ..report })
        };
        let same = |(v, j, opset, _): &&(Value, WeightJob, Opset, Coded)| {
            v == value && j == job && (*opset < Opset::CoreML8) == (self.coder.opset < Opset::CoreML8)
        };
        if let Some((.., done)) = self.compressed.iter().find(same) {
            return Ok(named(done.clone(), &self.function));
        }
        if self.coder.opset < Opset::CoreML6 {
            let what = "compressed weights: the package is for iOS15, and they need iOS16; convert with minimum_deployment_target";
            return Err(Error::usage(format!("{what}=iOS16 or later")));
        }
        let shape = value.ty.tensor().and_then(|t| t.shape()).unwrap_or_default();
        let shape: Vec<usize> = shape.iter().map(|&d| d as usize).collect();
        let values = floats(self.package, value)?;
        let done = match *job {
            WeightJob::Sparse(pruning) => self.coder.sparse(value, &shape, &values, pruning)?,
            WeightJob::Tables(ref tables) => self.coder.tables(value, &shape, tables)?,
            WeightJob::Quantize { kind, groups, axes, form } => {
                let moments = (self.moments)(&self.function, &op.outputs[0].name)?;
                let weight = AxedWeight { name: op.name(), shape: &shape, axes };
                let job = QuantizeJob { kind, groups, form, moments: moments.as_ref() };
                self.coder.quantized(value, &weight, values, &job)?
            }
        };
        self.compressed.push((value.clone(), job.clone(), self.coder.opset, done.clone()));
        Ok(named(done, &self.function))
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::quant::{Groups, Quant};
    use anemoe_bundle::IndexBits;
    use anemoe_mlpackage::blob::pack_sub_byte;
    use anemoe_mlpackage::mil::TensorType;
    use anemoe_mlpackage::mil::builder::{FunctionBuilder, model};
    use half::f16;

    /// Writes a package that computes `y = x * w` for `w [64, 48]`.
    fn package(dir: &Path, opset: Opset) -> Package {
        package_of(dir, opset, &|i| ((i * 37 % 101) as f32 - 50.0) / 50.0)
    }

    /// Writes a package like [`package`], with these weights.
    fn package_of(dir: &Path, opset: Opset, weight: &dyn Fn(usize) -> f32) -> Package {
        let path = dir.join(format!("{opset}.mlpackage"));
        let mut writer = PackageWriter::create(&path).unwrap();
        let bytes: Vec<u8> = (0..64 * 48).flat_map(|i| f16::from_f32(weight(i)).to_le_bytes()).collect();
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
            indices: (
                vec![64, 48 / of],
                pack_sub_byte(&(0..64 * 48 / of).map(|i| (i % 4) as u8).collect::<Vec<_>>(), 2),
            ),
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
    fn a_weight_without_a_value_is_a_table_of_zeros() {
        let dir = tempfile::tempdir().unwrap();
        for opset in [Opset::CoreML6, Opset::CoreML8] {
            let target = dir.path().join(format!("{opset}-out.mlpackage"));
            let all = WeightJob::Sparse(Pruning::Threshold { threshold: 100.0, least: 0.5 });
            let reports = run(&package(dir.path(), opset), all, &target).unwrap();
            assert_eq!((reports[0].kind.as_str(), reports[0].relative_mse), ("sparse 100 %", 1.0));
            assert_eq!(reports[0].after, 64 * 48 / 8 + 4);
            let errors = verify(Package::open(&target).unwrap().model()).into_iter();
            assert_eq!(errors.filter(|f| f.severity == Severity::Error).count(), 0);
        }
    }

    #[test]
    fn masks_stay_as_they_are() {
        let dir = tempfile::tempdir().unwrap();
        let mask = |i: usize| if i % 48 > i / 48 { f32::NEG_INFINITY } else { 0.0 };
        let package = package_of(dir.path(), Opset::CoreML8, &mask);
        let reports = run(&package, quantized("int8-channel"), &dir.path().join("out.mlpackage")).unwrap();
        assert_eq!((reports[0].kind.as_str(), reports[0].after), ("dense", reports[0].before));
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
