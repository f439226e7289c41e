//! Compiles functions together with the rows that they carry from call to call.

use super::super::cut_back::{CarriedWindow, CutBack};
use super::super::fixed_function::FixedFunction;
use super::super::function::CompiledFunction;
use super::super::shared_constants::CompileContext;
use super::super::tokens::{Carried, CarriedRows, carried};
use super::{compile, compile_kept};
use crate::Result;
use anemoe_mlpackage::mil::{Feature, FeatureShape, Function, FunctionDescription, TensorType};
use std::collections::BTreeSet;
use std::sync::Arc;

/// Largest call, in tokens, into which a sequence can be cut back without running tokens again. Windows of longer calls would
/// take much memory, and calls that are cut back are short.
pub(in crate::cpu) const MOST_CUT_BACK: usize = 32;

/// Compiles a function and the parts that cut its calls back. Returns also the function that its plan was made from, if it is
/// kept. `body` is the same afterwards.
///
/// # Errors
/// Fails like [`compile`].
pub(in crate::cpu) fn compile_with_cut_back(
    context: CompileContext<'_>,
    body: &mut Function,
    described: &FunctionDescription,
) -> Result<(CompiledFunction, Option<FixedFunction>)> {
    let name = described.name.as_str();
    let found = carried(body);
    let Carried::Rows(found) = found else {
        let (mut compiled, fixed) = compile_kept(context, name, body, described)?;
        let is_nothing = matches!(found, Carried::Nothing) && compiled.allows(&CutBack::Masks);
        compiled.set_cut_back(if is_nothing { CutBack::Masks } else { CutBack::Unknown });
        return Ok((compiled, fixed));
    };
    let unknown = |body: &Function| {
        let (mut compiled, fixed) = compile_kept(context, name, body, described)?;
        compiled.set_cut_back(CutBack::Unknown);
        Ok((compiled, fixed))
    };
    let selections: BTreeSet<&str> = found.iter().map(|f| f.selection.as_str()).collect();
    let mut with_windows = described.clone();
    for rows in &found {
        let Some(window) = window_of(body, rows).filter(|_| selections.len() == 1) else {
            return unknown(body);
        };
        let shape = window.shape().map_or(FeatureShape::Dynamic, FeatureShape::Fixed);
        with_windows.outputs.push(Feature::array(&rows.window, window.dtype, shape));
    }
    let declared = body.block.outputs.len();
    body.block.outputs.extend(found.iter().map(|rows| rows.window.clone()));
    let compiled = compile_kept(context, name, body, &with_windows);
    body.block.outputs.truncate(declared);
    let (mut compiled, fixed) = compiled?;
    let mut windows = Vec::new();
    for (i, f) in found.into_iter().enumerate() {
        let Some(selection) = described.inputs.iter().position(|d| d.name == f.selection) else {
            return unknown(body);
        };
        let tail = compile(context, name, &f.tail, &f.described)?;
        windows.push(CarriedWindow {
            selection,
            rows: f.rows,
            state: f.state,
            first: f.first,
            output: described.outputs.len() + i,
            tail: Box::new(tail),
        });
    }
    let cut_back = CutBack::Rows(Arc::new(windows));
    if !compiled.allows(&cut_back) {
        return unknown(body);
    }
    compiled.set_cut_back(cut_back);
    Ok((compiled, fixed))
}

/// Returns the type of the window that carried rows are selected from, if a call has at most [`MOST_CUT_BACK`] tokens.
fn window_of<'a>(body: &'a Function, rows: &CarriedRows) -> Option<&'a TensorType> {
    let selection = body.inputs.iter().find(|i| i.name == rows.selection)?.ty.tensor()?.shape()?;
    let tokens = selection.last()?.checked_sub(rows.rows as u64)?;
    let outputs = body.block.operations.iter().flat_map(|op| &op.outputs);
    outputs
        .filter(|o| o.name == rows.window)
        .find_map(|o| o.ty.tensor())
        .filter(|_| tokens <= MOST_CUT_BACK as u64)
}
