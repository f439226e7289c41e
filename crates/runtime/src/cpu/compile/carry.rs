//! Functions with what they carry from call to call.

use super::super::Options;
use super::super::carry::{CarriedWindow, Carry};
use super::super::function::CompiledFunction;
use super::super::tokens::{Carried, carried};
use super::compile;
use crate::Result;
use anemoe_mlpackage::mil::{Feature, FeatureShape, Function, FunctionDescription};
use anemoe_mlpackage::package::Package;
use std::sync::Arc;

/// Most tokens of a call into which a sequence can be cut back without running tokens again: the window of a longer one would
/// take much memory, and calls that are cut back are short.
const MOST: usize = 32;

/// Compiles a function, and what is needed to cut its calls back.
///
/// # Errors
/// Fails like [`compile`].
pub(in crate::cpu) fn compile_with_carry(
    package: &Arc<Package>,
    body: &Function,
    described: &FunctionDescription,
    options: Options,
) -> Result<CompiledFunction> {
    let name = described.name.as_str();
    let found = carried(body);
    let Carried::Rows(found) = found else {
        let mut compiled = compile(package, name, body, described, options)?;
        let is_nothing = matches!(found, Carried::Nothing) && compiled.holds_slots_alone();
        compiled.set_carry(if is_nothing { Carry::Nothing } else { Carry::Unknown });
        return Ok(compiled);
    };
    let selection = described.inputs.iter().position(|f| f.name == found.selection);
    let tokens = body.inputs.iter().find(|i| i.name == found.selection);
    let tokens =
        tokens.and_then(|i| i.ty.tensor()?.shape()).and_then(|s| s.last()?.checked_sub(found.rows as u64));
    let window = body.block.operations.iter().flat_map(|op| &op.outputs).find(|o| o.name == found.window);
    let window = window.and_then(|o| o.ty.tensor());
    let (Some(selection), Some(window), true) = (selection, window, tokens.is_some_and(|n| n <= MOST as u64))
    else {
        let mut compiled = compile(package, name, body, described, options)?;
        compiled.set_carry(Carry::Unknown);
        return Ok(compiled);
    };
    let (mut more, mut described) = (body.clone(), described.clone());
    more.block.outputs.push(found.window.clone());
    let shape = window.shape().map_or(FeatureShape::Dynamic, FeatureShape::Fixed);
    described.outputs.push(Feature { name: found.window.clone(), dtype: window.dtype, shape });
    let mut compiled = compile(package, name, &more, &described, options)?;
    if compiled.slots_of(&found.state) != Some(found.first) {
        // Rows before the carried ones are more than slots of a cache.
        described.outputs.pop();
        let mut compiled = compile(package, name, body, &described, options)?;
        compiled.set_carry(Carry::Unknown);
        return Ok(compiled);
    }
    let tail = compile(package, name, &found.tail, &found.described, options)?;
    let (rows, state, first, output) = (found.rows, found.state, found.first, described.outputs.len() - 1);
    compiled.set_carry(Carry::Rows(Arc::new(CarriedWindow {
        selection,
        rows,
        state,
        first,
        output,
        tail: Box::new(tail),
    })));
    Ok(compiled)
}
