//! Compressed convolutional attention (CCA, ZAYA): queries and keys go through two short causal convolutions, half of the
//! values are those of the token before.

use super::attention::LayerCache;
use super::{AttentionDims, Lowering, NormShape};
use crate::form::HistoryForm;
use anemoe_mlpackage::Result;
use anemoe_mlpackage::mil::builder::{ConvParams, SliceParams, Var};

/// Tokens before the current one that two convolutions of kernel 2 see together.
pub const CCA_HISTORY: usize = 2;

/// Queries, keys and values `[1, heads, T, head_dim]` before rotation, and the state's new tail.
pub struct Compressed {
    /// Queries, normalized.
    pub q: Var,
    /// Keys, normalized, times the stored temperature.
    pub k: Var,
    /// Values: the first half of the heads from this token, the second half from the token before.
    pub v: Var,
    /// New tail of the state, see [`AttentionDims::tail`]; none where the host keeps the history.
    pub tail: Option<Var>,
    /// History rows of the call's own tokens, `[1, history_heads, T, head_dim]`, where the host keeps the history.
    pub rows: Option<Var>,
}

/// Input with the history that the host kept.
pub const HISTORY: &str = "history";
/// Output with the history rows of the call's own tokens.
pub const HISTORY_ROWS: &str = "history_rows";

/// Source of a layer's history.
#[derive(Clone)]
pub enum HistoryInput {
    /// History in the state's tail; this input picks the newest rows for the next call.
    Carry(Var),
    /// Rows of the history that the host kept.
    Rows(Var),
}

impl AttentionDims {
    /// Returns the heads of one token's history: query and key heads before the convolutions, and the half of V's
    /// heads that comes a token late.
    fn history_heads(&self) -> usize {
        self.heads + self.kv_heads + self.kv_heads / 2
    }

    /// Returns the rows of each of the state's `2 * kv_heads` that hold the history; even, for whole pairs of tokens.
    fn history_rows(&self) -> usize {
        (CCA_HISTORY * self.history_heads()).div_ceil(2 * self.kv_heads).next_multiple_of(CCA_HISTORY)
    }

    /// Returns the shape of one token's history in a CCA layer: heads and channels.
    #[must_use]
    pub fn history_shape(&self) -> (usize, usize) {
        (self.history_heads(), self.head_dim)
    }

    /// Returns the shape with the tail that a CCA layer needs.
    #[must_use]
    pub fn with_history(self) -> AttentionDims {
        AttentionDims { tail: self.history_rows().next_multiple_of(32), ..self }
    }
}

impl Lowering<'_> {
    /// Takes the rows of axis 2 from `first` on, without the last `without`.
    fn rows(&mut self, name: &str, x: &Var, first: i32, without: i32) -> Result<Var> {
        let p = SliceParams {
            begin: vec![0, 0, first, 0],
            end: vec![0, 0, -without, 0],
            stride: vec![1; 4],
            begin_mask: vec![true, true, false, true],
            end_mask: vec![true, true, without == 0, true],
            squeeze_mask: vec![false; 4],
        };
        self.f().slice_by_index(name, x, p)
    }

    /// Reads the history, rows of the last [`CCA_HISTORY`] tokens: `[1, history_heads, 2, head_dim]`.
    fn read_history(&mut self, cache: &LayerCache, shape: &AttentionDims) -> Result<Var> {
        let (heads, rows, d) =
            (2 * shape.kv_heads as i32, shape.history_rows() as i32, shape.head_dim as i32);
        let pairs = heads * rows / CCA_HISTORY as i32;
        let wanted = shape.history_heads() as i32;
        let f = self.f();
        let begin = [0, 0, shape.slots as i32, 0];
        let raw = f.slice_by_size("history_rows", &cache.old, &begin, &[1, heads, rows, d])?;
        let all = f.reshape("history_padded", &raw, &[1, pairs, CCA_HISTORY as i32, d])?;
        if pairs == wanted {
            return Ok(all);
        }
        f.slice_by_size("history", &all, &[0; 4], &[1, wanted, -1, -1])
    }

    /// Makes the state's tail from a history `[1, history_heads, 2, head_dim]`.
    fn make_tail(&mut self, history: &Var, shape: &AttentionDims) -> Result<Var> {
        let (heads, rows) = (2 * shape.kv_heads, shape.history_rows());
        let missing = heads * rows / CCA_HISTORY - shape.history_heads();
        let zero = self.scalar("history_zero", 0.0)?;
        let f = self.f();
        let mut all = history.clone();
        if missing > 0 {
            all = f.pad("history_new_padded", &all, &[0, 0, 0, missing as i32, 0, 0, 0, 0], &zero)?;
        }
        let dims = [1, heads as i32, rows as i32, shape.head_dim as i32];
        let all = f.reshape("history_new_rows", &all, &dims)?;
        let (rows, lanes) = (shape.tail - rows, shape.padded_dim() - shape.head_dim);
        if rows == 0 && lanes == 0 {
            return Ok(all);
        }
        f.pad("tail", &all, &[0, 0, 0, 0, 0, rows as i32, 0, lanes as i32], &zero)
    }

    /// Declares the input for the layer's history: rows that the host kept, or the carry that picks rows of the
    /// state.
    pub fn history_input(&mut self, shape: &AttentionDims) -> Result<HistoryInput> {
        let rows = CCA_HISTORY as u64;
        match self.form.history {
            HistoryForm::State => {
                Ok(HistoryInput::Carry(self.input("carry", &[1, 1, rows, rows], Some(3))?))
            }
            HistoryForm::Host => {
                let dims = [1, shape.history_heads() as u64, rows, shape.head_dim as u64];
                Ok(HistoryInput::Rows(self.input(HISTORY, &dims, None)?))
            }
        }
    }

    /// Computes queries, keys and values from the normalized stream `[1, H, 1, T]`.
    ///
    /// With `u` the projected `[q; k]`: `d_t = w0 u_{t-1} + w1 u_t + b` per channel, then a convolution of kernel 2 within
    /// each head on `d_{t-1}` and `d_t`. The history starts as zeros of `u`, which makes `d_{-1}` the depthwise bias, as the
    /// padding before both convolutions does. Depthwise is done by products: depthwise convolutions were seen off the ANE.
    pub fn compress(
        &mut self,
        x: &Var,
        cache: &LayerCache,
        old: &HistoryInput,
        shape: &AttentionDims,
    ) -> Result<Compressed> {
        let (nq, nk, d) = (shape.heads, shape.kv_heads, shape.head_dim);
        let t = self.tokens_or_inferred();
        let q = self.project("q_proj", x, "q_proj")?;
        let k = self.project("k_proj", x, "k_proj")?;
        let v_current = self.project("v_proj_current", x, "v_proj_current")?;
        let v_delayed = self.project("v_proj_delayed", x, "v_proj_delayed")?;
        let own = self.f().concat("compressed", &[&q, &k, &v_delayed], 1)?;
        let by_host = matches!(old, HistoryInput::Rows(_));
        let name = if by_host { HISTORY_ROWS } else { "compressed_heads" };
        let own = self.to_heads(name, &own, shape.history_heads(), d)?;
        // [1, history_heads, 2 + T, head_dim]
        let (all, tail, rows) = match old {
            HistoryInput::Rows(old) => (self.f().concat("window", &[old, &own], 2)?, None, Some(own.clone())),
            HistoryInput::Carry(carry) => {
                let old = self.read_history(cache, shape)?;
                let all = self.f().concat("window", &[&old, &own], 2)?;
                let history = self.f().matmul("history_new", carry, &all, false, false)?;
                (all, Some(self.make_tail(&history, shape)?), None)
            }
        };

        let sizes = [(nq + nk) as i32, (nk / 2) as i32];
        let parts = self.f().split_sizes("window_part", &all, &sizes, 1)?;
        let before = self.rows("conv_before", &parts[0], 0, 1)?;
        let now = self.rows("conv_now", &parts[0], 1, 0)?;
        let (w0, w1) = (self.vector("depthwise_before")?, self.vector("depthwise_now")?);
        let bias = self.vector("depthwise_bias")?;
        let f = self.f();
        let before = f.mul("depthwise_0", &before, &w0)?;
        let now = f.mul("depthwise_1", &now, &w1)?;
        let sum = f.add("depthwise_sum", &before, &now)?;
        let depthwise = f.add("depthwise", &sum, &bias)?;
        let columns = if t < 0 { -1 } else { t + 1 };
        let channels = ((nq + nk) * d) as i32;
        let transposed = f.transpose("depthwise_turned", &depthwise, &[0, 1, 3, 2])?;
        let channels = f.reshape("depthwise_channels", &transposed, &[1, channels, 1, columns])?;
        let weight = self.matrix("conv_grouped_weight")?;
        let bias = self.vector("conv_grouped_bias")?;
        let groups = ConvParams { groups: (nq + nk) as i32, ..ConvParams::default() };
        let mixed = self.f().conv("conv_grouped", &channels, &weight, Some(&bias), groups)?;
        let mixed = self.to_heads("conv_heads", &mixed, nq + nk, d)?;
        let mixed = self.f().split_sizes("conv_part", &mixed, &[nq as i32, nk as i32], 1)?;

        // Each convolution's result gets a mean of the projections. For a query head: its mean with its key head. For a
        // key head: the average of these means over its query heads.
        let piece = |l: &mut Self, name: &str, first: usize, heads: usize| {
            let (begin, size) = ([0, first as i32, 0, 0], [1, heads as i32, t, d as i32]);
            l.f().slice_by_size(name, &own, &begin, &size)
        };
        let own_q = piece(self, "own_queries", 0, nq)?;
        let own_k = piece(self, "own_keys", nq, nk)?;
        let own_q = self.f().split("own_q", &own_q, nk, 1)?;
        let own_k = self.f().split("own_k", &own_k, nk, 1)?;
        let half = self.scalar("half", 0.5)?;
        let (mut q_means, mut k_means) = (Vec::new(), Vec::new());
        for (g, (q, k)) in own_q.iter().zip(&own_k).enumerate() {
            let f = self.f();
            let sum = f.add(&format!("sum_{g}"), q, k)?;
            let mean = f.mul(&format!("q_mean_{g}"), &sum, &half)?;
            k_means.push(f.reduce_mean(&format!("k_mean_{g}"), &mean, &[1], true)?);
            q_means.push(mean);
        }
        let q_mean = self.f().concat("q_mean", &q_means.iter().collect::<Vec<_>>(), 1)?;
        let k_mean = self.f().concat("k_mean", &k_means.iter().collect::<Vec<_>>(), 1)?;
        let q = self.f().add("q_mixed", &mixed[0], &q_mean)?;
        let k = self.f().add("k_mixed", &mixed[1], &k_mean)?;
        // sqrt(head_dim) x / |x| is an RMS norm without an epsilon.
        let norm = NormShape { axis: 3, eps: 0.0 };
        let q = self.rms_norm("q_norm", &q, norm)?;
        let k = self.rms_norm_weighted("k_norm", &k, norm)?;

        let v_current = self.to_heads("v_current", &v_current, nk / 2, d)?;
        let v_delayed = self.rows("v_delayed", &parts[1], 1, 1)?;
        let v = self.f().concat("v", &[&v_current, &v_delayed], 1)?;
        Ok(Compressed { q, k, v, tail, rows })
    }
}
