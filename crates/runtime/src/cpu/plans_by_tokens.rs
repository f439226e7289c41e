//! A function that is compiled for one token count after another.
//!
//! ```text
//! first call    the program rewritten --lower--> a function whose token axes are known
//! each count    sizes of the token axes set --plan--> compiled
//! ```
//! A function that does not fit a plan is rewritten and compiled for each count.

use super::Options;
use super::compile::{compile, lower_to_plan};
use super::function::CompiledFunction;
use super::plan_source::PlanSource;
use super::shared_constants::{CompileContext, SharedConstants};
use super::tokens::{KnownCarried, TokenAxis, describe, resize, with_axes};
use crate::{Error, Result};
use anemoe_mlpackage::mil::{Function, FunctionDescription};
use anemoe_mlpackage::package::Package;
use std::collections::BTreeMap;
use std::sync::{Arc, OnceLock};

/// A function as read from its package.
pub(super) struct ReadFunction {
    pub package: Arc<Package>,
    pub body: Function,
    pub described: FunctionDescription,
    /// Rows and slots that it carries; none where that is not known.
    pub carried: Option<Arc<KnownCarried>>,
}

/// A function of a package that can be compiled for any token count.
pub(super) struct PlansByTokens {
    function: ReadFunction,
    options: Options,
    constants: SharedConstants,
    /// The lowered function and the token axes of its values; none where it does not fit a plan.
    lowered: OnceLock<Option<(PlanSource, BTreeMap<String, TokenAxis>)>>,
}

impl PlansByTokens {
    /// Makes it from a function of a package.
    pub fn new(function: ReadFunction, options: Options) -> PlansByTokens {
        PlansByTokens { function, options, constants: SharedConstants::default(), lowered: OnceLock::new() }
    }

    /// Compiles the function, written for `from` tokens, for `to` tokens. `axes` gives the token axis of each input that has one.
    ///
    /// # Errors
    /// An operation may compute something else with another token count, is not implemented, or takes too much memory.
    pub fn for_tokens(
        &self,
        axes: &BTreeMap<String, usize>,
        from: usize,
        to: usize,
    ) -> Result<CompiledFunction> {
        let mut compiled = match self.planned(axes, from, to) {
            Some(planned) => planned,
            None => self.rewritten(axes, from, to)?,
        };
        compiled.set_carried(self.function.carried.as_ref());
        Ok(compiled)
    }

    fn context(&self) -> CompileContext<'_> {
        let (package, constants) = (&self.function.package, Some(&self.constants));
        CompileContext { package, options: self.options, constants }
    }

    /// Plans the function from its lowered form; none where there is none.
    fn planned(&self, axes: &BTreeMap<String, usize>, from: usize, to: usize) -> Option<CompiledFunction> {
        let ReadFunction { body, described, .. } = &self.function;
        let lowered = self.lowered.get_or_init(|| {
            let (function, axes) = with_axes(body, described, axes, from).ok()?;
            let described = describe(&function, described);
            let source = lower_to_plan(self.context(), &described.name, &function, &described).ok()??;
            Some((source, axes))
        });
        let (source, axes) = lowered.as_ref()?;
        source.for_tokens(axes, to)?.plan(self.context(), &described.name).ok()?
    }

    /// Compiles the function after rewriting it.
    fn rewritten(&self, axes: &BTreeMap<String, usize>, from: usize, to: usize) -> Result<CompiledFunction> {
        let ReadFunction { package, body, described, .. } = &self.function;
        let name = &described.name;
        let new = resize(body, described, axes, from, to)
            .map_err(|what| Error::unsupported(package.path(), format!("function `{name}`: {what}")))?;
        compile(self.context(), name, &new, &describe(&new, described))
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::cpu::{CpuPackage, CpuStates, Precision};
    use crate::tensor::Tensor;
    use anemoe_io::Random;
    use anemoe_mlpackage::mil::builder::{ConvParams, FunctionBuilder, model};
    use anemoe_mlpackage::mil::{DataType, Opset, TensorType, Value};
    use anemoe_mlpackage::package::PackageWriter;
    use std::path::Path;

    const CHANNELS: u64 = 24;

    /// Makes a package: a convolution, a softmax over heads made by a reshape that names the token count, plus the input.
    fn package(dir: &Path, tokens: u64) -> CpuPackage {
        let path = dir.join("heads.mlpackage");
        let mut writer = PackageWriter::create(&path).unwrap();
        let mut random = Random::new(1);
        let halves = (0..CHANNELS * CHANNELS)
            .flat_map(|_| half::f16::from_f64(random.uniform() - 0.5).to_le_bytes())
            .collect::<Vec<u8>>();
        let offset = writer.weights().append(DataType::Float16, CHANNELS * CHANNELS, &halves).unwrap();
        let mut f = FunctionBuilder::new(Opset::CoreML8);
        let x = f.input("x", TensorType::fixed(DataType::Float16, &[1, CHANNELS, 1, tokens])).unwrap();
        let weight = Value::blob(DataType::Float16, &[CHANNELS, CHANNELS, 1, 1], offset);
        let weight = f.constant("weight", weight).unwrap();
        let y = f.conv("y", &x, &weight, None, ConvParams::default()).unwrap();
        let heads = f.reshape("heads", &y, &[4, 6, 1, tokens as i32]).unwrap();
        let heads = f.softmax("parts", &heads, 1).unwrap();
        let flat = f.reshape("flat", &heads, &[1, CHANNELS as i32, 1, tokens as i32]).unwrap();
        let sum = f.add("sum", &flat, &x).unwrap();
        f.output(&sum).unwrap();
        let m = model(Opset::CoreML8, vec![("main".into(), f.finish().unwrap())], "main").unwrap();
        writer.finish(&m).unwrap();
        CpuPackage::open(&path).unwrap()
    }

    /// Returns the token axis of the input `x`.
    fn axes() -> BTreeMap<String, usize> {
        BTreeMap::from([("x".to_string(), 3)])
    }

    fn plans_by_tokens(package: &CpuPackage) -> PlansByTokens {
        let model = package.package().model();
        let (body, described) = (model.program.functions["main"].clone(), model.functions[0].clone());
        let options = Options { precision: Precision::Fp32, ..Options::default() };
        let package = Arc::new(Package::open(package.package().path()).unwrap());
        PlansByTokens::new(ReadFunction { package, body, described, carried: None }, options)
    }

    #[test]
    fn functions_for_any_token_count_are_those_that_are_rewritten() {
        let dir = tempfile::tempdir().unwrap();
        let plans = plans_by_tokens(&package(dir.path(), 8));
        for tokens in 1..=40 {
            let planned = plans.planned(&axes(), 8, tokens).unwrap();
            let rewritten = plans.rewritten(&axes(), 8, tokens).unwrap();
            assert_eq!(planned.inputs(), rewritten.inputs());
            assert_eq!(planned.outputs(), rewritten.outputs());
            let x = Tensor::f32(
                &[1, CHANNELS as usize, 1, tokens],
                (0..CHANNELS as usize * tokens).map(|i| (i as f32 * 0.37).sin()).collect(),
            );
            let run = |function: &CompiledFunction| {
                let mut outputs = Vec::new();
                function.run(&[&x], &mut CpuStates::default(), &mut outputs).unwrap();
                outputs
            };
            assert!(run(&planned) == run(&rewritten), "{tokens} tokens");
        }
    }
}
