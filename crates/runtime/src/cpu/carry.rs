//! Keeps of a call what cuts a sequence back into it.

use super::compile;
use super::function::CompiledFunction;
use super::tokens::{Carried, carried};
use super::{CpuStates, Options};
use crate::Result;
use crate::tensor::Tensor;
use anemoe_kernels::Pool;
use anemoe_mlpackage::mil::{Feature, FeatureShape, Function, FunctionDescription};
use anemoe_mlpackage::package::Package;
use std::fmt;
use std::sync::Arc;

/// Most tokens of a call into which a sequence can be cut back without running tokens again: the window of a longer one would
/// take much memory, and calls that are cut back are short.
const MOST: usize = 32;

/// Values that a function carries from call to call besides slots of caches.
pub(super) enum Carry {
    /// Nothing: whatever was in a call, its rows can stay and be masked.
    Nothing,
    /// Rows of a window, which the function gives as its last output, after those of its description.
    Rows(Arc<CarriedWindow>),
    /// Something that only running tokens again brings back.
    Unknown,
}

/// Rows that are carried, see [`super::tokens`].
pub(super) struct CarriedWindow {
    /// Number of the input that selects the rows.
    selection: usize,
    /// Rows that are carried.
    rows: usize,
    state: String,
    /// First row of the state that is theirs.
    first: usize,
    /// Number of the output that is the window.
    output: usize,
    /// Makes rows of the state from carried ones.
    tail: CompiledFunction,
}

/// The rows that the last call left.
#[derive(Clone, Default)]
pub(super) struct LastCall {
    rows: Option<Arc<CarriedWindow>>,
    /// Rows carried before the call, and those of its tokens.
    window: Tensor,
    /// Tokens of the call that are still there; none where the window is another call's.
    tokens: Option<usize>,
    /// Nothing is carried.
    is_nothing: bool,
}

impl Carry {
    /// Compiles a function, and what is needed to cut its calls back.
    ///
    /// # Errors
    /// As [`compile::compile`].
    pub fn compile(
        package: &Arc<Package>,
        body: &Function,
        described: &FunctionDescription,
        options: Options,
    ) -> Result<CompiledFunction> {
        let name = described.name.as_str();
        let found = carried(body);
        let Carried::Rows(found) = found else {
            let mut compiled = compile::compile(package, name, body, described, options)?;
            let is_nothing = matches!(found, Carried::Nothing) && compiled.holds_slots_alone();
            compiled.set_carry(if is_nothing { Carry::Nothing } else { Carry::Unknown });
            return Ok(compiled);
        };
        let selection = described.inputs.iter().position(|f| f.name == found.selection);
        let tokens = body.inputs.iter().find(|i| i.name == found.selection);
        let tokens = tokens
            .and_then(|i| i.ty.tensor()?.shape())
            .and_then(|s| s.last()?.checked_sub(found.rows as u64));
        let window = body.block.operations.iter().flat_map(|op| &op.outputs).find(|o| o.name == found.window);
        let window = window.and_then(|o| o.ty.tensor());
        let (Some(selection), Some(window), true) =
            (selection, window, tokens.is_some_and(|n| n <= MOST as u64))
        else {
            let mut compiled = compile::compile(package, name, body, described, options)?;
            compiled.set_carry(Carry::Unknown);
            return Ok(compiled);
        };
        let (mut more, mut described) = (body.clone(), described.clone());
        more.block.outputs.push(found.window.clone());
        let shape = window.shape().map_or(FeatureShape::Dynamic, FeatureShape::Fixed);
        described.outputs.push(Feature { name: found.window.clone(), dtype: window.dtype, shape });
        let mut compiled = compile::compile(package, name, &more, &described, options)?;
        if compiled.slots_of(&found.state) != Some(found.first) {
            // Rows before the carried ones are more than slots of a cache.
            described.outputs.pop();
            let mut compiled = compile::compile(package, name, body, &described, options)?;
            compiled.set_carry(Carry::Unknown);
            return Ok(compiled);
        }
        let tail = compile::compile(package, name, &found.tail, &found.described, options)?;
        let (rows, state, first, output) =
            (found.rows, found.state, found.first, described.outputs.len() - 1);
        compiled.set_carry(Carry::Rows(Arc::new(CarriedWindow {
            selection,
            rows,
            state,
            first,
            output,
            tail,
        })));
        Ok(compiled)
    }

    /// Outputs of the function that its description does not have.
    pub fn outputs(&self) -> usize {
        usize::from(matches!(self, Carry::Rows(_)))
    }

    /// Keeps what a call that ran leaves.
    pub fn keep(&self, inputs: &[&Tensor], outputs: &mut [Tensor], states: &mut CpuStates) {
        let last = &mut states.carried;
        match self {
            Carry::Nothing => last.is_nothing = true,
            Carry::Unknown => {}
            Carry::Rows(rows) => {
                // The first row that is selected comes behind those of the call's own tokens.
                let selected = inputs[rows.selection].as_f32().and_then(|v| v.iter().position(|v| *v == 1.0));
                let window = outputs.get_mut(rows.output);
                if let (Some(tokens), Some(window)) = (selected, window) {
                    std::mem::swap(&mut last.window, window);
                    last.tokens = Some(tokens);
                    match &mut last.rows {
                        Some(known) if Arc::ptr_eq(known, rows) => {}
                        other => *other = Some(rows.clone()),
                    }
                }
            }
        }
    }
}

impl fmt::Debug for LastCall {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("LastCall").field("tokens", &self.tokens).finish_non_exhaustive()
    }
}

impl LastCall {
    /// Tells that the last `tokens` tokens of the call can be undone.
    pub fn holds(&self, tokens: usize) -> bool {
        self.is_nothing || self.rows.is_some() && self.tokens.is_some_and(|left| tokens <= left)
    }

    /// Forgets the last call, as another one begins.
    pub fn forget(&mut self) {
        (self.tokens, self.is_nothing) = (None, false);
    }
}

impl CpuStates {
    /// Undoes `tokens` tokens; false where what the last call left does not say how.
    ///
    /// # Errors
    /// The rows cannot be computed.
    pub(super) fn cut_back(&mut self, tokens: usize) -> Result<bool> {
        let LastCall { rows, window, tokens: left, is_nothing } = &mut self.carried;
        if *is_nothing || self.values.is_empty() {
            return Ok(true);
        }
        let (Some(rows), Some(left)) = (rows, left) else { return Ok(false) };
        let (Some(stay), &[1, heads, all, d]) = (left.checked_sub(tokens), window.shape.as_slice()) else {
            return Ok(false);
        };
        let state = self.names.iter().position(|n| *n == rows.state);
        let (Some(state), Some(values)) = (state, window.as_f32().filter(|_| stay + rows.rows <= all)) else {
            return Ok(false);
        };
        let mut carried = Tensor::default();
        let to = carried.reset_f32(&[1, heads, rows.rows, d]);
        for (to, head) in
            to.chunks_exact_mut((rows.rows * d).max(1)).zip(values.chunks_exact((all * d).max(1)))
        {
            to.copy_from_slice(&head[stay * d..(stay + rows.rows) * d]);
        }
        let mut outputs = Vec::new();
        rows.tail.run(&[&carried], &mut CpuStates::default(), &mut outputs)?;
        let Some(Tensor { shape, .. }) = outputs.first() else { return Ok(false) };
        let (&[1, _, n, d], Some(tail)) = (shape.as_slice(), outputs[0].as_f32()) else { return Ok(false) };
        let first = rows.first * d;
        self.values[state].heads(Pool::global(), false, &|h, mut piece| {
            piece.set(first, &tail[h * n * d..(h + 1) * n * d]);
        });
        *left = stay;
        Ok(true)
    }
}
