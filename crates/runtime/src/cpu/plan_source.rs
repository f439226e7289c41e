//! Functions of fixed shapes, lowered to instructions for planning; the same function for any token count.
//!
//! Lowering a function takes ten times as long as planning it. It does not depend on the token count, so a function is lowered
//! once, and the sizes `fixed + per_token * T` of its token axes are set before each planning.

use super::function::{CompiledFunction, Executable};
use super::fused::{self, PlanInput};
use super::ops::shape::count;
use super::shared_constants::CompileContext;
use super::tokens::TokenAxis;
use crate::memory_limit::{Allowance, MemoryNeed};
use crate::{Error, Result};
use anemoe_mlpackage::mil::{DataType, Dim, FeatureShape, FunctionDescription, TensorType};
use std::collections::BTreeMap;

/// A function of fixed shapes.
#[derive(Clone)]
pub(super) struct PlanSource {
    pub described: FunctionDescription,
    pub inputs: Vec<TensorType>,
    pub states: Vec<(String, TensorType)>,
    pub source: PlanInput,
    pub need: MemoryNeed,
}

/// Returns the bytes of a value of this type in memory; 0 where its shape is unknown.
pub(super) fn bytes_of(ty: &TensorType) -> u64 {
    let element = if ty.dtype == DataType::Bool { 1 } else { 4 };
    match ty.shape() {
        Some(shape) => shape.into_iter().fold(element, u64::saturating_mul),
        None => 0,
    }
}

impl PlanSource {
    /// Plans the function; none where an operation or a shape does not fit a plan.
    ///
    /// # Errors
    /// The function takes more memory than is allowed.
    pub fn plan(&self, context: CompileContext<'_>, function: &str) -> Result<Option<CompiledFunction>> {
        let Some(mut plan) = fused::plan(&self.source) else { return Ok(None) };
        let CompileContext { package, options, .. } = context;
        let bytes =
            |types: &mut dyn Iterator<Item = &TensorType>| types.map(bytes_of).fold(0, u64::saturating_add);
        let states = bytes(&mut self.states.iter().map(|(_, ty)| ty));
        let allowance = Allowance::new(package.total_bytes(), bytes(&mut self.inputs.iter()));
        let checked = self.need.check(allowance, plan.bytes(), states);
        checked.map_err(|what| Error::invalid(package.path(), format!("function `{function}`: {what}")))?;
        if options.profile {
            plan.profile();
        }
        Ok(Some(CompiledFunction::new(
            package.path().to_path_buf(),
            function.to_string(),
            options,
            allowance,
            self.described.clone(),
            self.inputs.clone(),
            self.states.clone(),
            Executable::FusedPlan(plan),
        )))
    }

    /// Makes the same function for `tokens` tokens; `axes` gives the token axis of each value that has one. Returns none where a
    /// value would be too large.
    pub fn for_tokens(&self, axes: &BTreeMap<String, TokenAxis>, tokens: usize) -> Option<PlanSource> {
        let mut new = self.clone();
        let set = |name: &str, dims: &mut [Dim]| -> Option<()> {
            let Some(axis) = axes.get(name) else { return Some(()) };
            *dims.get_mut(axis.axis)? = Dim::Fixed(axis.size(tokens)?);
            Some(())
        };
        let PlanInput { instructions, shapes, inputs, .. } = &mut new.source;
        let steps = instructions.iter().flat_map(|step| step.results.iter().zip(step.writes()));
        for (name, buffer) in
            steps.chain(new.described.inputs.iter().map(|f| &f.name).zip(inputs.iter().copied()))
        {
            let Some(axis) = axes.get(name) else { continue };
            let shape = shapes.get_mut(buffer)?;
            *shape.get_mut(axis.axis)? = usize::try_from(axis.size(tokens)?).ok()?;
            count(shape).ok()?;
        }
        for step in instructions {
            step.results.iter().zip(&mut step.types).try_for_each(|(name, ty)| set(name, &mut ty.dims))?;
        }
        let FunctionDescription { inputs, outputs, .. } = &mut new.described;
        inputs.iter().zip(&mut new.inputs).try_for_each(|(f, ty)| set(&f.name, &mut ty.dims))?;
        for feature in inputs.iter_mut().chain(outputs) {
            if let (Some(axis), FeatureShape::Fixed(shape)) = (axes.get(&feature.name), &mut feature.shape) {
                *shape.get_mut(axis.axis)? = axis.size(tokens)?;
            }
        }
        Some(new)
    }
}
