//! Memory that is reused from pass to pass.

use super::call::CallScratch;
use super::host::{HostValue, Ranking};
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
    /// Embedding of a token; `column`: the head's register `hidden`.
    pub row: Vec<f32>,
    pub column: Tensor,
    /// Logits of several tokens, one row per token.
    pub logit_rows: Vec<f32>,
    /// Number of the pass; host inputs of an earlier pass are filled again.
    pub pass: u64,
}
