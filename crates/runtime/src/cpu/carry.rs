//! Keeps of a call what cuts a sequence back into it.

use crate::backend::BackendFunction;
use crate::tensor::Tensor;
use std::fmt;
use std::sync::Arc;

/// Values that a function carries from call to call besides slots of caches.
#[derive(Clone)]
pub(super) enum Carry {
    /// Nothing: whatever was in a call, its rows can stay and be masked.
    Nothing,
    /// Rows of windows, which the function gives as its last outputs, after those of its description: one for each layer.
    Rows(Arc<Vec<CarriedWindow>>),
    /// Values that only running tokens again brings back.
    Unknown,
}

/// Rows that are carried, see [`super::tokens`].
pub(super) struct CarriedWindow {
    /// Number of the input that selects the rows.
    pub selection: usize,
    /// Rows that are carried.
    pub rows: usize,
    pub state: String,
    /// First row of the state that is theirs.
    pub first: usize,
    /// Number of the output that is the window.
    pub output: usize,
    /// Makes rows of the state from carried ones.
    pub tail: Box<dyn BackendFunction>,
}

/// The rows that the last call left.
#[derive(Clone, Default)]
pub(super) struct LastCall {
    pub rows: Option<Arc<Vec<CarriedWindow>>>,
    /// Rows carried before the call, and those of its tokens, by window.
    pub windows: Vec<Tensor>,
    /// Tokens of the call that are still there; none where the window is another call's.
    pub tokens: Option<usize>,
    /// True if nothing is carried.
    pub is_nothing: bool,
}

impl Carry {
    /// Outputs of the function that its description does not have.
    pub fn outputs(&self) -> usize {
        if let Carry::Rows(rows) = self { rows.len() } else { 0 }
    }

    /// Keeps what a call that ran leaves.
    pub fn keep(&self, inputs: &[&Tensor], outputs: &mut [Tensor], last: &mut LastCall) {
        match self {
            Carry::Nothing => last.is_nothing = true,
            Carry::Unknown => {}
            Carry::Rows(rows) => {
                // The first row that is selected comes behind those of the call's own tokens; layers share the selection.
                let selection = rows.first().and_then(|r| inputs.get(r.selection)?.as_f32());
                let selected = selection.and_then(|v| v.iter().position(|v| *v == 1.0));
                let Some(tokens) = selected.filter(|_| rows.iter().all(|r| r.output < outputs.len())) else {
                    return;
                };
                last.windows.resize_with(rows.len(), Tensor::default);
                for (window, rows) in last.windows.iter_mut().zip(rows.iter()) {
                    std::mem::swap(window, &mut outputs[rows.output]);
                }
                last.tokens = Some(tokens);
                match &mut last.rows {
                    Some(known) if Arc::ptr_eq(known, rows) => {}
                    other => *other = Some(rows.clone()),
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
