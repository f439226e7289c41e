//! Second moments of the inputs of a package's linear and conv layers, from runs on samples.
//!
//! ```text
//! linear, matmul   a token for each vector that the weight multiplies
//! conv             a token for each position of the kernel, kernels included: [channels * taps]
//! ```
//! Weights of grouped and transposed convolutions have none, and those in the branches and loops of a program. Runs use the package's
//! own weights, rounded nowhere.

use crate::{Error, Result};
use anemoe_convert::package_weights::constant;
use anemoe_convert::quantize::{InputSums, SecondMoments};
use anemoe_mlpackage::mil::{Binding, Function, Operation, Value};
use anemoe_runtime::cpu::{CompiledFunction, CpuPackage, CpuStates, Options, Precision};
use anemoe_runtime::tensor::Tensor;
use std::collections::{BTreeMap, BTreeSet};

/// Bytes of the sums that are made in the same run.
const SUMS: usize = 1 << 30;
/// Most tokens of a sample that count for a layer: evenly spread ones of those that it has.
const TOKENS: usize = 4096;

/// A use of a weight: the operation's other operand, and how it is read.
#[derive(Clone, Debug)]
struct LayerInput {
    /// Name of the operand.
    value: String,
    reading: TokenAxes,
    /// Inputs of an output channel.
    cols: usize,
}

/// Axes of an operand that are read as tokens.
#[derive(Clone, Debug)]
enum TokenAxes {
    /// Vectors along the last axis.
    Last,
    /// Vectors along the last axis but one.
    LastButOne,
    /// Positions of a kernel.
    ConvWindow(ConvWindow),
}

#[derive(Clone, Debug)]
struct ConvWindow {
    taps: Vec<usize>,
    strides: Vec<usize>,
    dilations: Vec<usize>,
    /// Elements before each axis and after it.
    pad: Vec<(usize, usize)>,
    /// True where the padding keeps the size; the odd element lies before the axis where the second is true.
    same: Option<bool>,
}

/// Moments of a function's weights, made for several weights at a time, in the order of the program.
pub struct PackageInputs {
    package: CpuPackage,
    function: String,
    samples: Vec<Vec<Tensor>>,
    /// Weights that are asked for, in order, with their uses.
    wanted: Vec<(String, Vec<LayerInput>)>,
    made: BTreeMap<String, InputSums>,
}

impl PackageInputs {
    /// Takes a package, one of its functions, the weights that will be asked for, and inputs of that function in its order.
    ///
    /// # Errors
    /// There is no such function.
    pub fn new(
        package: CpuPackage,
        function: &str,
        weights: &BTreeSet<String>,
        samples: Vec<Vec<Tensor>>,
    ) -> Result<PackageInputs> {
        let name = package.description(Some(function))?.name.clone();
        let Some(body) = package.package().model().program.functions.get(&name) else {
            return Err(Error::invalid(package.package().path(), format!("no function `{name}`")));
        };
        let constants = body.block.operations.iter().filter(|op| op.op_type == "const");
        let constants: BTreeSet<&str> =
            constants.flat_map(|op| &op.outputs).map(|o| o.name.as_str()).collect();
        let uses = |weight: &str| -> Option<Vec<LayerInput>> {
            let users = body.block.operations.iter().filter(|op| uses_value(op, weight));
            let inputs: Option<Vec<LayerInput>> = users.map(|op| layer_input(body, op, weight)).collect();
            // A weight with a use that is not understood has no moments.
            inputs.filter(|all| !all.is_empty() && all.iter().all(|i| i.cols == all[0].cols))
        };
        let ops = body.block.operations.iter().flat_map(|op| &op.outputs);
        let wanted = ops
            .filter(|o| constants.contains(o.name.as_str()) && weights.contains(&o.name))
            .filter_map(|o| Some((o.name.clone(), uses(&o.name)?)))
            .collect();
        Ok(PackageInputs { package, function: name, samples, wanted, made: BTreeMap::new() })
    }

    /// Returns the moments of a weight's inputs; `None` for a weight without. A weight is asked for once.
    ///
    /// # Errors
    /// A run fails.
    pub fn moments(&mut self, function: &str, weight: &str) -> Result<Option<SecondMoments>> {
        let Some(at) = self.wanted.iter().position(|(name, _)| name == weight) else { return Ok(None) };
        if function != self.function {
            return Ok(None);
        }
        if !self.made.contains_key(weight) {
            self.make(at)?;
        }
        Ok(self.made.remove(weight).map(SecondMoments::new))
    }

    /// Makes the sums of a weight and of those after it, as many as the memory takes.
    fn make(&mut self, first: usize) -> Result<()> {
        let mut bytes = 0;
        let sizes = self.wanted[first..].iter().map(|(_, uses)| 8 * uses[0].cols * uses[0].cols);
        let fitting = sizes.take_while(|size| {
            bytes += size;
            bytes <= SUMS
        });
        let last = first + fitting.count().max(1);
        let wanted = &self.wanted[first..last];
        let values: BTreeSet<&str> =
            wanted.iter().flat_map(|(_, uses)| uses).map(|u| u.value.as_str()).collect();
        let options = Options { precision: Precision::Fp32, ..Options::default() };
        let runner =
            self.package.compile_traced(Some(&self.function), options, &|name| values.contains(name))?;
        let mut made: BTreeMap<String, InputSums> =
            wanted.iter().map(|(name, uses)| (name.clone(), InputSums::new(uses[0].cols))).collect();
        let mut results = Vec::new();
        for (number, sample) in self.samples.iter().enumerate() {
            let inputs: Vec<&Tensor> = sample.iter().collect();
            runner.run(&inputs, &mut CpuStates::new(&runner), &mut results)?;
            for (name, uses) in wanted {
                for input in uses {
                    let Some(value) = value(&runner, sample, &results, &input.value) else { continue };
                    let columns = input.columns(value).ok_or_else(|| {
                        let what = format!("value `{}` of shape {:?}", input.value, value.shape);
                        Error::invalid_program(format!("weight `{name}`: cannot read its input, {what}"))
                    })?;
                    if columns.iter().any(|v| !v.is_finite()) {
                        let what =
                            format!("weight `{name}`: its inputs from sample {number} are not all finite");
                        return Err(Error::invalid_program(what));
                    }
                    let tokens = columns.len() / input.cols;
                    if let Some(sums) = made.get_mut(name).filter(|_| tokens > 0) {
                        sums.add(&columns, &columns, tokens);
                    }
                }
            }
        }
        self.made.extend(made);
        Ok(())
    }
}

/// Finds a value among the inputs or the results of a run.
fn value<'a>(
    runner: &CompiledFunction,
    sample: &'a [Tensor],
    results: &'a [Tensor],
    name: &str,
) -> Option<&'a Tensor> {
    let at = |features: &[anemoe_mlpackage::mil::Feature]| features.iter().position(|f| f.name == name);
    match at(runner.outputs()) {
        Some(i) => results.get(i),
        None => sample.get(at(runner.inputs())?),
    }
}

fn uses_value(op: &Operation, name: &str) -> bool {
    op.inputs.values().flat_map(|a| &a.0).any(|b| matches!(b, Binding::Name(used) if used == name))
}

/// Finds what an operation multiplies a weight with; `None` for other uses.
fn layer_input(body: &Function, op: &Operation, weight: &str) -> Option<LayerInput> {
    let made = body.block.operations.iter().flat_map(|op| &op.outputs).find(|o| o.name == weight)?;
    let shape: Vec<usize> = made.ty.tensor()?.shape()?.iter().map(|&d| d as usize).collect();
    let operand = |param: &str| match op.inputs.get(param)?.0.as_slice() {
        [Binding::Name(name)] => Some(name.clone()),
        _ => None,
    };
    let constant = |param: &str| constant(&body.block.operations, op, param);
    let is = |param: &str| operand(param).is_some_and(|name| name == weight);
    let transposes = |param: &str| constant(param).and_then(Value::as_bool) == Some(true);
    match (op.op_type.as_str(), shape.as_slice()) {
        ("linear", &[_, cols]) if is("weight") => {
            Some(LayerInput { value: operand("x")?, reading: TokenAxes::Last, cols })
        }
        ("matmul", &[a, b]) if is("x") || is("y") => {
            let (own, other) = if is("y") { ("y", "x") } else { ("x", "y") };
            // Sums are over the last axis of `x` and the last but one of `y`, where these are not transposed.
            let is_last = |param: &str| (param == "x") != transposes(&format!("transpose_{param}"));
            let reading = if is_last(other) { TokenAxes::Last } else { TokenAxes::LastButOne };
            Some(LayerInput { value: operand(other)?, reading, cols: if is_last(own) { b } else { a } })
        }
        ("conv", [_, channels, taps @ ..]) if is("weight") && !taps.is_empty() => {
            let numbers = |param: &str, count: usize, missing: usize| -> Option<Vec<usize>> {
                let Some(value) = constant(param) else {
                    return (!op.inputs.contains_key(param)).then(|| vec![missing; count]);
                };
                let all: Option<Vec<usize>> =
                    value.as_ints()?.iter().map(|&v| usize::try_from(v).ok()).collect();
                all.filter(|v| v.len() == count)
            };
            let n = taps.len();
            let groups = constant("groups").and_then(|v| v.as_ints()?.first().copied()).unwrap_or(1);
            let kind = constant("pad_type").map_or(Some("valid"), Value::as_str)?;
            let pad = if kind == "custom" { numbers("pad", 2 * n, 0)? } else { vec![0; 2 * n] };
            let kernel = ConvWindow {
                taps: taps.to_vec(),
                strides: numbers("strides", n, 1)?,
                dilations: numbers("dilations", n, 1)?,
                pad: pad.chunks(2).map(|p| (p[0], p[1])).collect(),
                same: (kind != "custom" && kind != "valid").then_some(kind == "same_lower"),
            };
            let (value, cols) = (operand("x")?, channels * taps.iter().product::<usize>());
            (groups == 1).then_some(LayerInput { value, reading: TokenAxes::ConvWindow(kernel), cols })
        }
        _ => None,
    }
}

/// Returns which of `n` tokens count.
fn spread(n: usize) -> Vec<usize> {
    let most = n.min(TOKENS);
    (0..most).map(|i| i * n / most).collect()
}

impl LayerInput {
    /// Returns the tokens of an operand as columns, `[cols, tokens]`; `None` where the operand does not fit.
    fn columns(&self, x: &Tensor) -> Option<Vec<f32>> {
        let (values, shape) = (x.as_f32()?, x.shape.as_slice());
        // Steps between a token's elements, and the places of tokens: outer ones, and those within.
        let (step, inner) = match (&self.reading, shape) {
            (TokenAxes::ConvWindow(kernel), _) => return kernel.columns(values, shape, self.cols),
            (TokenAxes::Last, [.., n]) => (1, *n),
            (TokenAxes::LastButOne, [.., n, m]) => (*m, n * m),
            _ => return None,
        };
        if inner / step != self.cols || inner == 0 {
            return None;
        }
        let starts = (0..values.len() / inner).flat_map(|i| (0..step).map(move |j| i * inner + j));
        let starts: Vec<usize> = starts.collect();
        let chosen: Vec<usize> = spread(starts.len()).into_iter().map(|i| starts[i]).collect();
        Some((0..self.cols).flat_map(|c| chosen.iter().map(move |s| values[s + c * step])).collect())
    }
}

impl ConvWindow {
    /// Returns the inputs of the kernel's positions as columns, `[channels * taps, positions]`.
    fn columns(&self, values: &[f32], shape: &[usize], cols: usize) -> Option<Vec<f32>> {
        let &[batch, channels, ref spatial @ ..] = shape else { return None };
        let (n, taps) = (self.taps.len(), self.taps.iter().product::<usize>());
        if spatial.len() != n || channels * taps != cols {
            return None;
        }
        let mut out = Vec::new();
        let mut before = Vec::new();
        for (i, &size) in spatial.iter().enumerate() {
            let reach = (self.taps[i] - 1) * self.dilations[i] + 1;
            let (low, high) = match self.same {
                None => self.pad[i],
                Some(lower) => {
                    let needed = (size.div_ceil(self.strides[i]).max(1) - 1) * self.strides[i] + reach;
                    let all = needed.saturating_sub(size);
                    if lower { (all - all / 2, all / 2) } else { (all / 2, all - all / 2) }
                }
            };
            out.push((size + low + high).checked_sub(reach)? / self.strides[i] + 1);
            before.push(low);
        }
        let size: usize = spatial.iter().product();
        let positions: usize = out.iter().product();
        let chosen = spread(batch * positions);
        let mut columns = vec![0f32; cols * chosen.len()];
        for tap in 0..taps {
            for (t, token) in chosen.iter().enumerate() {
                let (mut place, mut stride, mut inside) = (0, 1, true);
                let (mut position, mut rest) = (token % positions, tap);
                for i in (0..n).rev() {
                    let at = position % out[i] * self.strides[i] + rest % self.taps[i] * self.dilations[i];
                    (position, rest) = (position / out[i], rest / self.taps[i]);
                    inside &= at >= before[i] && at < before[i] + spatial[i];
                    place += at.saturating_sub(before[i]) * stride;
                    stride *= spatial[i];
                }
                if inside {
                    let image = token / positions * channels * size;
                    for c in 0..channels {
                        columns[(c * taps + tap) * chosen.len() + t] = values[image + c * size + place];
                    }
                }
            }
        }
        Some(columns)
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use anemoe_convert::quantize::product;
    use anemoe_mlpackage::mil::builder::{ConvParams, FunctionBuilder, Var, model};
    use anemoe_mlpackage::mil::{DataType, Opset, TensorType, Value};
    use anemoe_mlpackage::package::{Package, PackageWriter};
    use half::f16;

    /// Writes a package whose layer of one weight `w` has the result `y`.
    fn package(
        shapes: (&[u64], &[u64]),
        layer: impl Fn(&mut FunctionBuilder, &Var, &Var) -> Var,
    ) -> (tempfile::TempDir, CpuPackage) {
        let dir = tempfile::tempdir().unwrap();
        let path = dir.path().join("m.mlpackage");
        let mut writer = PackageWriter::create(&path).unwrap();
        let n: u64 = shapes.1.iter().product();
        let bytes: Vec<u8> =
            values(n as usize, 3).iter().flat_map(|v| f16::from_f32(*v).to_le_bytes()).collect();
        let offset = writer.weights().append(DataType::Float16, n, &bytes).unwrap();
        let mut f = FunctionBuilder::new(Opset::CoreML8);
        let x = f.input("x", TensorType::fixed(DataType::Float16, shapes.0)).unwrap();
        let w = f.constant("w", Value::blob(DataType::Float16, shapes.1, offset)).unwrap();
        let y = layer(&mut f, &x, &w);
        f.output(&y).unwrap();
        let model = model(Opset::CoreML8, vec![("main".into(), f.finish().unwrap())], "main").unwrap();
        writer.finish(&model).unwrap();
        let package = CpuPackage::of(Package::open(&path).unwrap());
        (dir, package)
    }

    /// Makes values that fp16 holds.
    fn values(n: usize, step: usize) -> Vec<f32> {
        (0..n).map(|i| ((i * step * 37 % 101) as f32 - 50.0) / 64.0).collect()
    }

    fn inputs(package: &CpuPackage, samples: Vec<Vec<Tensor>>) -> PackageInputs {
        PackageInputs::new(package.clone(), "main", &BTreeSet::from(["w".to_string()]), samples).unwrap()
    }

    /// Checks that the weight times the columns is what the package computes; `[rows, tokens]`.
    fn check_columns(
        shapes: (&[u64], &[u64]),
        w: &[f32],
        layer: impl Fn(&mut FunctionBuilder, &Var, &Var) -> Var,
    ) {
        let (_dir, package) = package(shapes, layer);
        let shape: Vec<usize> = shapes.0.iter().map(|&d| d as usize).collect();
        let x = Tensor::f32(&shape, values(shape.iter().product(), 1));
        let runner =
            package.compile(None, Options { precision: Precision::Fp32, ..Options::default() }).unwrap();
        let mut y = Vec::new();
        runner.run(&[&x], &mut CpuStates::default(), &mut y).unwrap();
        let inputs = inputs(&package, Vec::new());
        let [(_, uses)] = &inputs.wanted[..] else { panic!("one weight") };
        let columns = uses[0].columns(&x).unwrap();
        let (cols, tokens) = (uses[0].cols, columns.len() / uses[0].cols);
        let by_tokens: Vec<f32> = (0..tokens)
            .flat_map(|t| (0..cols).map(move |c| (t, c)))
            .map(|(t, c)| columns[c * tokens + t])
            .collect();
        let mut expected = product(w, &by_tokens, cols);
        let mut found = y[0].as_f32().unwrap().to_vec();
        // Layers differ in the order of rows and tokens.
        expected.sort_by(f32::total_cmp);
        found.sort_by(f32::total_cmp);
        assert_eq!(found.len(), expected.len());
        for (a, b) in found.iter().zip(&expected) {
            assert!((a - b).abs() < 1e-3, "{a} {b}");
        }
    }

    #[test]
    fn columns_are_the_inputs_of_convolutions() {
        let w = values(5 * 3 * 6, 3);
        for (strides, pad, dilations) in [([1, 1], vec![], [1, 1]), ([2, 1], vec![1, 2, 0, 1], [1, 2])] {
            let params = ConvParams { strides: strides.into(), pad, dilations: dilations.into(), groups: 1 };
            check_columns((&[2, 3, 7, 9], &[5, 3, 2, 3]), &w, |f, x, w| {
                f.conv("y", x, w, None, params.clone()).unwrap()
            });
        }
        let line = ConvParams { strides: vec![3], pad: vec![2, 0], dilations: vec![1], groups: 1 };
        check_columns((&[1, 3, 20], &[5, 3, 6]), &w, |f, x, w| {
            f.conv("y", x, w, None, line.clone()).unwrap()
        });
    }

    #[test]
    fn columns_are_the_inputs_of_products() {
        let w = values(6 * 4, 3);
        let across: Vec<f32> = (0..4).flat_map(|c| (0..6).map(move |r| r * 4 + c)).map(|i| w[i]).collect();
        check_columns((&[2, 3, 4], &[6, 4]), &w, |f, x, w| f.linear("y", x, w, None).unwrap());
        check_columns((&[2, 3, 6], &[6, 4]), &across, |f, x, w| f.matmul("y", x, w, false, false).unwrap());
        check_columns((&[2, 4, 3], &[6, 4]), &w, |f, x, w| f.matmul("y", x, w, true, true).unwrap());
        check_columns((&[4, 3], &[6, 4]), &w, |f, x, w| f.matmul("y", w, x, false, false).unwrap());
        check_columns((&[3, 6], &[6, 4]), &across, |f, x, w| f.matmul("y", w, x, true, true).unwrap());
    }

    #[test]
    fn moments_are_those_of_the_samples() {
        let (_dir, package) = package((&[3, 4], &[6, 4]), |f, x, w| f.linear("y", x, w, None).unwrap());
        let samples = (1..3).map(|k| vec![Tensor::f32(&[3, 4], values(12, k))]).collect::<Vec<_>>();
        let mut inputs = inputs(&package, samples.clone());
        assert!(inputs.moments("other", "w").unwrap().is_none());
        assert!(inputs.moments("main", "unknown").unwrap().is_none());
        let squares = inputs.moments("main", "w").unwrap().unwrap().squares();
        for (c, found) in squares.iter().enumerate() {
            let all = samples.iter().flat_map(|s| s[0].as_f32().unwrap().iter().skip(c).step_by(4));
            let mean = all.map(|v| v * v).sum::<f32>() / 6.0;
            // Moments are damped by a hundredth.
            assert!((found - mean).abs() < 0.02, "{found} {mean}");
        }
    }

    #[test]
    fn grouped_convolutions_have_no_moments() {
        let params = ConvParams { strides: vec![1, 1], pad: vec![], dilations: vec![1, 1], groups: 2 };
        let (_dir, package) = package((&[1, 4, 5, 5], &[4, 2, 3, 3]), |f, x, w| {
            f.conv("y", x, w, None, params.clone()).unwrap()
        });
        let sample = vec![Tensor::f32(&[1, 4, 5, 5], values(100, 1))];
        assert!(inputs(&package, vec![sample]).moments("main", "w").unwrap().is_none());
    }
}
