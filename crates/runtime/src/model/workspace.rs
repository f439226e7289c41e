//! Memory that passes use one after the other.

use super::call::{CallScratch, Piece};
use super::host::{CallTokens, Ranking};
use crate::tensor::Tensor;

/// Memory of a pass.
#[derive(Default)]
pub(super) struct PassWorkspace {
    pub registers: Vec<Tensor>,
    /// Host inputs of the body, and of the head.
    pub host: [Vec<HostValue>; 2],
    pub wanted: Vec<usize>,
    pub ranking: Ranking,
    pub scratch: CallScratch,
    /// A token's embedding, and what the head reads.
    pub row: Vec<f32>,
    pub column: Tensor,
    /// Logits of some tokens, a row for each.
    pub logit_rows: Vec<f32>,
    /// Number of the pass: host inputs of an earlier one are filled anew.
    pub pass: u64,
}

/// A host input, for each sequence of the pass.
#[derive(Default)]
pub(super) struct HostValue {
    pub of_sequence: Vec<(Tensor, Filled)>,
}

/// Pass, piece, and tokens of the call for which a host input was filled.
pub(super) type Filled = Option<(u64, Piece, CallTokens)>;
