//! Functions with what they carry from call to call.

use super::super::Options;
use super::super::carry::{CarriedWindow, Carry};
use super::super::function::CompiledFunction;
use super::super::tokens::{Carried, CarriedRows, carried};
use super::compile;
use crate::Result;
use anemoe_mlpackage::mil::{Feature, FeatureShape, Function, FunctionDescription, TensorType};
use anemoe_mlpackage::package::Package;
use std::collections::BTreeSet;
use std::sync::Arc;

/// Most tokens of a call into which a sequence can be cut back without running tokens again: the window of a longer one would
/// take much memory, and calls that are cut back are short.
const MOST: usize = 32;

/// Compiles a function, and what is needed to cut its calls back. `body` is left as it was.
///
/// # Errors
/// Fails like [`compile`].
pub(in crate::cpu) fn compile_with_carry(
    package: &Arc<Package>,
    body: &mut Function,
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
    let unknown = |body: &Function| {
        let mut compiled = compile(package, name, body, described, options)?;
        compiled.set_carry(Carry::Unknown);
        Ok(compiled)
    };
    let selections: BTreeSet<&str> = found.iter().map(|f| f.selection.as_str()).collect();
    let mut with_windows = described.clone();
    for rows in &found {
        let Some(window) = window_of(body, rows).filter(|_| selections.len() == 1) else {
            return unknown(body);
        };
        let shape = window.shape().map_or(FeatureShape::Dynamic, FeatureShape::Fixed);
        with_windows.outputs.push(Feature { name: rows.window.clone(), dtype: window.dtype, shape });
    }
    let declared = body.block.outputs.len();
    body.block.outputs.extend(found.iter().map(|rows| rows.window.clone()));
    let compiled = compile(package, name, body, &with_windows, options);
    body.block.outputs.truncate(declared);
    let mut compiled = compiled?;
    if found.iter().any(|f| compiled.slots_of(&f.state) != Some(f.first)) {
        // Rows before the carried ones are more than slots of a cache.
        return unknown(body);
    }
    let mut windows = Vec::new();
    for (i, f) in found.into_iter().enumerate() {
        let Some(selection) = described.inputs.iter().position(|d| d.name == f.selection) else {
            return unknown(body);
        };
        let tail = compile(package, name, &f.tail, &f.described, options)?;
        windows.push(CarriedWindow {
            selection,
            rows: f.rows,
            state: f.state,
            first: f.first,
            output: described.outputs.len() + i,
            tail: Box::new(tail),
        });
    }
    compiled.set_carry(Carry::Rows(Arc::new(windows)));
    Ok(compiled)
}

/// Type of the window that carried rows are selected from, where a call has few enough tokens to be cut back.
fn window_of<'a>(body: &'a Function, rows: &CarriedRows) -> Option<&'a TensorType> {
    let selection = body.inputs.iter().find(|i| i.name == rows.selection)?.ty.tensor()?.shape()?;
    let tokens = selection.last()?.checked_sub(rows.rows as u64)?;
    let outputs = body.block.operations.iter().flat_map(|op| &op.outputs);
    outputs.filter(|o| o.name == rows.window).find_map(|o| o.ty.tensor()).filter(|_| tokens <= MOST as u64)
}
