//! A function that is compiled for one token count after another.
//!
//! ```text
//! first two counts    the program rewritten --lower--> a fixed function --plan--> compiled
//! other counts        a fixed function interpolated between those two --plan--> compiled
//! ```

use super::Options;
use super::compile::compile_kept;
use super::function::CompiledFunction;
use super::plan_source::PlanSource;
use super::shared_constants::{CompileContext, SharedConstants};
use super::tokens::{KnownCarried, describe, rewrite};
use crate::{Error, Result};
use anemoe_io::locked;
use anemoe_mlpackage::mil::{Function, FunctionDescription};
use anemoe_mlpackage::package::Package;
use std::collections::BTreeMap;
use std::sync::{Arc, Mutex};

/// A function of a package that can be compiled for any token count.
pub(super) struct PlansByTokens {
    package: Arc<Package>,
    options: Options,
    function: Function,
    described: FunctionDescription,
    /// Rows and slots that the function carries; none where that is not known.
    carried: Option<Arc<KnownCarried>>,
    constants: SharedConstants,
    /// The function as last rewritten, to be rewritten again: a new copy would take twice as long as rewriting.
    copy: Mutex<Option<Function>>,
    /// The function lowered for the first two token counts.
    known: Mutex<Vec<(usize, Arc<PlanSource>)>>,
}

impl PlansByTokens {
    /// Makes it from a function of a package and its description.
    pub fn new(
        package: Arc<Package>,
        options: Options,
        function: Function,
        described: FunctionDescription,
        carried: Option<Arc<KnownCarried>>,
    ) -> PlansByTokens {
        PlansByTokens {
            package,
            options,
            function,
            described,
            carried,
            constants: SharedConstants::default(),
            copy: Mutex::default(),
            known: Mutex::default(),
        }
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
        if let Some(compiled) = self.between(to) {
            return Ok(compiled);
        }
        let wrong = |what: String| {
            let name = &self.described.name;
            Error::unsupported(self.package.path(), format!("function `{name}`: {what}"))
        };
        let kept = locked(&self.copy).take();
        let mut new = kept.unwrap_or_else(|| self.function.clone());
        rewrite(&self.function, &mut new, &self.described, axes, (from, to)).map_err(wrong)?;
        let described = describe(&new, &self.described);
        let (mut compiled, fixed) = compile_kept(self.context(), &described.name, &new, &described)?;
        compiled.set_carried(self.carried.as_ref());
        *locked(&self.copy) = Some(new);
        let mut known = locked(&self.known);
        if let Some(fixed) = fixed
            && known.len() < 2
            && known.iter().all(|(tokens, _)| *tokens != to)
        {
            known.push((to, Arc::new(fixed)));
        }
        Ok(compiled)
    }

    fn context(&self) -> CompileContext<'_> {
        CompileContext { package: &self.package, options: self.options, constants: Some(&self.constants) }
    }

    /// Makes the function for `to` tokens from two known ones; none where fewer are known, or it does not follow from them.
    fn between(&self, to: usize) -> Option<CompiledFunction> {
        let known = locked(&self.known).clone();
        let [(from, a), (other, b)] = known.as_slice() else { return None };
        let fixed = a.between(*from, (b, *other), to)?;
        let mut compiled = fixed.plan(self.context(), &self.described.name).ok()??;
        compiled.set_carried(self.carried.as_ref());
        Some(compiled)
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

    /// Compiles the package's function for 5 and for 3 tokens.
    fn known(package: &CpuPackage) -> PlansByTokens {
        let known = plans_by_tokens(package);
        for tokens in [5, 3] {
            assert!(known.between(tokens).is_none(), "there are no two yet");
            known.for_tokens(&axes(), 8, tokens).unwrap();
        }
        known
    }

    fn plans_by_tokens(package: &CpuPackage) -> PlansByTokens {
        let model = package.package().model();
        let (function, described) = (model.program.functions["main"].clone(), model.functions[0].clone());
        let options = Options { precision: Precision::Fp32, ..Options::default() };
        let package = Arc::new(Package::open(package.package().path()).unwrap());
        PlansByTokens::new(package, options, function, described, None)
    }

    #[test]
    fn functions_between_two_are_those_that_are_compiled() {
        let dir = tempfile::tempdir().unwrap();
        let package = package(dir.path(), 8);
        let known = known(&package);
        for tokens in 1..=40 {
            let between = known.between(tokens).unwrap();
            let compiled = plans_by_tokens(&package).for_tokens(&axes(), 8, tokens).unwrap();
            assert_eq!(between.inputs(), compiled.inputs());
            assert_eq!(between.outputs(), compiled.outputs());
            let x = Tensor::f32(
                &[1, CHANNELS as usize, 1, tokens],
                (0..CHANNELS as usize * tokens).map(|i| (i as f32 * 0.37).sin()).collect(),
            );
            let run = |function: &CompiledFunction| {
                let mut outputs = Vec::new();
                function.run(&[&x], &mut CpuStates::default(), &mut outputs).unwrap();
                outputs
            };
            assert!(run(&between) == run(&compiled), "{tokens} tokens");
        }
    }

    #[test]
    fn what_is_on_no_line_is_not_between() {
        let dir = tempfile::tempdir().unwrap();
        let known = known(&package(dir.path(), 8));
        {
            // 24 channels at 5 tokens and 23 at 3 would be 23.5 at 4.
            let mut all = locked(&known.known);
            let other = Arc::get_mut(&mut all[1].1).unwrap();
            let sizes = other.source.shapes.iter_mut().flatten();
            sizes.filter(|n| **n == CHANNELS as usize).for_each(|n| *n -= 1);
        }
        assert!(known.between(4).is_none());
        assert!(known.for_tokens(&axes(), 8, 4).is_ok(), "it is compiled instead");
    }
}
