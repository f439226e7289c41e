//! Compiles functions to a plan where possible, else for the interpreter.

mod constants;
mod function_compiler;
mod known_values;
mod outline;
mod projection;
mod uses;

use super::function::CompiledFunction;
use super::ir::OutlinedPlan;
use super::plan_source::PlanSource;
use super::plans_by_shapes::{PlansByShapes, follows_from_shapes};
use super::shared_constants::CompileContext;
use crate::Result;
use anemoe_mlpackage::mil::{Block, Function, FunctionDescription, ValueType};
use function_compiler::{CompileTarget, lower};
use outline::OutlinedPlans;
use std::sync::Arc;

/// Lowers a function for a plan; none where a shape is unknown, or there is control flow.
///
/// # Errors
/// An operation is not implemented, or the function takes too much memory.
pub(super) fn lower_to_plan(
    context: CompileContext<'_>,
    function: &str,
    body: &Function,
    described: &FunctionDescription,
) -> Result<Option<PlanSource>> {
    if !context.options.fuse || !knows_shapes(&body.block) {
        return Ok(None);
    }
    Ok(lower(context, function, body, described, CompileTarget::FusedPlan)?.plan_source(described))
}

/// Compiles a function to a plan where possible, else for the interpreter.
pub(super) fn compile(
    context: CompileContext<'_>,
    function: &str,
    body: &Function,
    described: &FunctionDescription,
) -> Result<CompiledFunction> {
    let CompileContext { package, options, .. } = context;
    if let Some(source) = lower_to_plan(context, function, body, described)?
        && let Some(compiled) = source.plan(context, function)?
    {
        return Ok(compiled);
    }
    let outlines = options.fuse && outline::needs_outlining(&body.block);
    let interpreted = |body: &Function, plans: OutlinedPlans| {
        lower(context, function, body, described, CompileTarget::Interpreter(plans))?.interpreted(described)
    };
    // The function is checked as a whole first: errors then name operations of the package, and its limits apply.
    let mut compiled = interpreted(body, OutlinedPlans::new())?;
    if outlines {
        let plan = |body: &Function, described: &FunctionDescription| {
            let compiled = compile(context, function, body, described).ok()?;
            compiled.is_planned().then(|| Arc::new(compiled) as Arc<dyn OutlinedPlan>)
        };
        let (outlined, plans) = outline::outline(body, &plan);
        if !plans.is_empty() {
            return interpreted(&outlined, plans);
        }
    } else if options.fuse && !knows_shapes(&body.block) {
        let plans = PlansByShapes::new(package, body, described, options, compile_for_shapes);
        compiled.plans_by_shapes = Some(plans);
    }
    Ok(compiled)
}

/// Compiles a function whose shapes a run has found to a plan, if the shapes do not depend on the contents of its inputs.
fn compile_for_shapes(
    context: CompileContext<'_>,
    body: &Function,
    described: &FunctionDescription,
) -> Result<Option<CompiledFunction>> {
    if !knows_shapes(&body.block) {
        return Ok(None);
    }
    let lowered = lower(context, &described.name, body, described, CompileTarget::FusedPlan)?;
    if !lowered.instructions.iter().all(follows_from_shapes) {
        return Ok(None);
    }
    match lowered.plan_source(described) {
        Some(source) => source.plan(context, &described.name),
        None => Ok(None),
    }
}

/// Tells whether a block has no control flow and knows the shape of every result.
fn knows_shapes(block: &Block) -> bool {
    block.operations.iter().all(|op| {
        let known = |t: &ValueType| t.tensor().is_none_or(|t| t.shape().is_some());
        op.blocks.is_empty() && op.outputs.iter().all(|o| known(&o.ty))
    })
}
