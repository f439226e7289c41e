//! Keeps the values of a call that are needed to cut a sequence back into it.

use crate::backend::BackendFunction;
use crate::tensor::Tensor;
use std::fmt;
use std::sync::Arc;

/// Way in which a sequence can be cut back into a call of a function.
#[derive(Clone)]
pub(super) enum CutBack {
    /// Masks: the function carries nothing but slots of caches, whose rows may stay and be masked.
    Masks,
    /// Rows that are carried from call to call are restored from windows, one for each layer. The function returns the
    /// windows behind the outputs of its description.
    Rows(Arc<Vec<CarriedWindow>>),
    /// The function carries values that only running the tokens again restores.
    Unknown,
}

/// A window that rows are carried from; see [`super::tokens`].
pub(super) struct CarriedWindow {
    /// Index of the input that selects the rows.
    pub selection: usize,
    /// Number of rows that are carried.
    pub rows: usize,
    pub state: String,
    /// First row of the state that holds carried rows.
    pub first: usize,
    /// Index of the output that is the window.
    pub output: usize,
    /// Makes rows of the state from carried ones.
    pub tail: Box<dyn BackendFunction>,
}

/// The carried rows of the last call.
#[derive(Clone, Default)]
pub(super) struct LastCall {
    pub rows: Option<Arc<Vec<CarriedWindow>>>,
    /// For each window, the rows carried before the call, then those of the call's tokens.
    pub windows: Vec<Tensor>,
    /// Tokens of the call that are not cut off; none where the windows are another call's.
    pub tokens: Option<usize>,
    /// True if the function carries nothing.
    pub is_nothing: bool,
}

impl CutBack {
    /// Returns the number of outputs that the function has beyond its description.
    pub fn outputs(&self) -> usize {
        if let CutBack::Rows(rows) = self { rows.len() } else { 0 }
    }

    /// Keeps the windows that a call wrote.
    pub fn keep(&self, inputs: &[&Tensor], outputs: &mut [Tensor], last: &mut LastCall) {
        match self {
            CutBack::Masks => last.is_nothing = true,
            CutBack::Unknown => {}
            CutBack::Rows(rows) => {
                // The first selected row follows the rows of the call's own tokens; layers share the selection.
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
    /// Tells whether the last `tokens` tokens of the call can be undone.
    pub fn holds(&self, tokens: usize) -> bool {
        self.is_nothing || self.rows.is_some() && self.tokens.is_some_and(|left| tokens <= left)
    }

    /// Forgets the last call, because another one begins.
    pub fn forget(&mut self) {
        (self.tokens, self.is_nothing) = (None, false);
    }
}
