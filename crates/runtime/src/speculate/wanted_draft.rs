//! A draft that is to be made, for all kinds of models that draft.

use crate::model::Model;

/// Most tokens of a sequence that a draft reads along. More are read in passes of their own.
pub(super) const CATCH_UP: usize = 8;

/// Draft that is to be made after the tokens of a sequence and `newest`.
pub(super) struct WantedDraft<'a> {
    /// The sequence's model.
    pub target: &'a Model,
    /// Token that no pass of the target has seen.
    pub newest: u32,
    /// Number of tokens.
    pub tokens: usize,
    /// Chooses a token from its row of logits, of the target's vocabulary.
    pub choose: &'a mut dyn FnMut(&mut [f32]) -> u32,
}
