//! Host computations between package calls: rotary rows, masks, cache placement, choice of experts.

use crate::tensor::Tensor;
use anemoe_bundle::{Cache, Chain, HostInput, Rope};

/// Addend to the score of a slot that a token does not see: far below any score, and still finite in fp16 after the addition.
const MASKED: f32 = -30_000.0;

/// Tokens of a call that host inputs are made for.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) struct HostTokens {
    /// Position of the first token.
    pub first: usize,
    /// Number of tokens.
    pub n: usize,
    /// Tokens that the call has room for; tokens from `n` on are padding.
    pub width: usize,
    /// First slots of a cache that the call sees; more than the cache has if it sees all.
    pub seen: usize,
    /// Positions in caches that another model lends, and one more than the highest position that was ever in them; none where
    /// the call's tokens are in its caches.
    pub lent: Option<(usize, usize)>,
}

/// Tokens of one sequence in a call, as columns of the pass.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) struct Piece {
    /// First column.
    pub first: usize,
    /// Number of columns.
    pub tokens: usize,
    /// Index of the sequence in the pass; 0 if the function has no states.
    pub sequence: usize,
}

/// A host input, by sequence of the pass.
#[derive(Default)]
pub(super) struct HostValue {
    of_sequence: Vec<(Tensor, Filled)>,
}

/// Pass, piece and tokens of the call that a host input was last filled for.
type Filled = Option<(u64, Piece, HostTokens)>;

/// Position of a sequence before a pass, its first column in the pass, and what another model lends it.
pub(super) type SequencePlace = (usize, usize, Option<(usize, usize)>);

/// Host inputs of a pass, filled on demand.
pub(super) struct HostValues<'a> {
    pub model: &'a Chain,
    pub inputs: &'a [HostInput],
    pub values: &'a mut [HostValue],
    /// Position of each sequence before the pass, its first column, and what another model lends it.
    pub places: &'a [SequencePlace],
    pub pass: u64,
}

impl HostValues<'_> {
    /// Fills host inputs for a piece of a call that is `width` tokens wide and sees the first `seen` slots of a cache.
    pub fn fill(&mut self, piece: Piece, inputs: &[usize], width: usize, seen: usize) {
        let Some((position, column, lent)) = self.places.get(piece.sequence) else { return };
        for &input in inputs {
            let all = &mut self.values[input].of_sequence;
            all.resize_with(all.len().max(piece.sequence + 1), Default::default);
            let (value, filled) = &mut all[piece.sequence];
            let first = position + piece.first - column;
            let tokens = HostTokens { first, n: piece.tokens, width, seen, lent: *lent };
            if *filled != Some((self.pass, piece, tokens)) {
                fill(value, &self.inputs[input], self.model, tokens);
                *filled = Some((self.pass, piece, tokens));
            }
        }
    }

    /// Returns a host input, as last filled for the piece's sequence.
    pub fn get(&self, piece: Piece, input: usize) -> &Tensor {
        &self.values[input].of_sequence[piece.sequence].0
    }
}

/// Fills host input `input` in `out` for the tokens of a call.
fn fill(out: &mut Tensor, input: &HostInput, chain: &Chain, tokens: HostTokens) {
    let HostTokens { first, n, width, seen, lent } = tokens;
    // The position of the first token in the mask, and the newest position in the caches.
    let (masked, newest) = lent.map_or((first, first + n - 1), |(n, highest)| (n - 1, highest - 1));
    // `Chain::read` has checked that the names exist. A function that sees only the first slots runs only for positions in
    // them, so its cache is treated as a smaller one.
    let cache = |name: &String| {
        let cache = &chain.caches[name];
        Cache { slots: cache.slots.min(seen), ..cache.clone() }
    };
    match input {
        HostInput::RopeCos(name) => rope_rows(out, &chain.ropes[name], first, width, false),
        HostInput::RopeSin(name) => rope_rows(out, &chain.ropes[name], first, width, true),
        HostInput::Mask(name) => mask_rows(out, &cache(name), (masked, newest), n, width),
        HostInput::MaskColumns(name) => {
            let (mut rows, cache) = (Tensor::default(), cache(name));
            mask_rows(&mut rows, &cache, (masked, newest), n, width);
            let v = out.reset_f32(&[1, cache.slots, 1, width]);
            let values = rows.as_f32().unwrap_or_default();
            for (slot, column) in v.chunks_exact_mut(width.max(1)).enumerate() {
                column.iter_mut().enumerate().for_each(|(t, v)| *v = values[t * cache.slots + slot]);
            }
        }
        HostInput::Place(name) | HostInput::PlaceRows(name) => {
            let slots = cache(name).slots;
            let (shape, slot_step, token_step) = match input {
                HostInput::Place(_) => ([1, 1, slots, width], width, 1),
                _ => ([1, 1, width, slots], 1, slots),
            };
            let v = out.reset_f32(&shape);
            v.fill(0.0);
            for t in 0..n {
                v[(first + t) % slots * slot_step + t * token_step] = 1.0;
            }
        }
        HostInput::Keep(name) | HostInput::KeepRow(name) => {
            let slots = cache(name).slots;
            let v = match input {
                HostInput::Keep(_) => out.reset_f32(&[1, 1, slots, 1]),
                _ => out.reset_f32(&[1, 1, 1, slots]),
            };
            v.fill(1.0);
            for t in 0..n {
                v[(first + t) % slots] = 0.0;
            }
        }
        HostInput::Carry(rows) => carry_rows(out, *rows, n, width),
    }
}

/// Returns the token axis of a host input; none where one value serves all tokens.
pub(super) fn token_axis(input: &HostInput) -> Option<usize> {
    match input {
        HostInput::RopeCos(_) | HostInput::RopeSin(_) | HostInput::Mask(_) | HostInput::PlaceRows(_) => {
            Some(2)
        }
        HostInput::Place(_) | HostInput::Carry(_) | HostInput::MaskColumns(_) => Some(3),
        HostInput::Keep(_) | HostInput::KeepRow(_) => None,
    }
}

/// Fills the selection of carried rows, `[1, 1, rows, rows + width]`: the newest `rows` of the old rows and the call's `n` own
/// tokens. Padding is never selected.
fn carry_rows(out: &mut Tensor, rows: usize, n: usize, width: usize) {
    let v = out.reset_f32(&[1, 1, rows, rows + width]);
    v.fill(0.0);
    for r in 0..rows {
        v[r * (rows + width) + n + r] = 1.0;
    }
}

/// Fills cosines or sines of the rotary embedding, `[1, 1, width, rope.width]`; sines are negated in the first half.
fn rope_rows(out: &mut Tensor, rope: &Rope, first: usize, width: usize, sine: bool) {
    let half = rope.inv_freq.len();
    let v = out.reset_f32(&[1, 1, width, rope.width]);
    for (t, row) in v.chunks_exact_mut(rope.width.max(1)).enumerate() {
        for (c, inv_freq) in rope.inv_freq.iter().enumerate() {
            // f64, because an f32 angle at position 10^5 is off by 0.004 radians.
            let (sin, cos) = ((first + t) as f64 * inv_freq).sin_cos();
            (row[c], row[half + c]) = if sine { (-sin as f32, sin as f32) } else { (cos as f32, cos as f32) };
        }
        row[2 * half..].fill(if sine { 0.0 } else { 1.0 });
    }
}

/// Fills the mask `[1, 1, width, slots]`: 0 for slots that a token sees after the call's `n` tokens are written, else [`MASKED`].
/// The cache has held positions up to `newest`.
fn mask_rows(out: &mut Tensor, cache: &Cache, (first, newest): (usize, usize), n: usize, width: usize) {
    let slots = cache.slots;
    let v = out.reset_f32(&[1, 1, width, slots]);
    v.fill(MASKED);
    for (t, row) in v.chunks_exact_mut(slots).enumerate().take(n) {
        let position = first + t;
        let oldest = cache.window.map_or(0, |w| (position + 1).saturating_sub(w));
        // A ring holds only the newest `slots` positions.
        let oldest = oldest.max((newest + 1).saturating_sub(slots));
        for p in oldest..=position {
            row[p % slots] = 0.0;
        }
    }
    // Padding sees one slot: a row without any would count as seeing all slots.
    for row in v.chunks_exact_mut(slots).skip(n) {
        row[first % slots] = 0.0;
    }
}

/// Routing: number of chosen experts, and their weights.
pub(super) struct Routing {
    pub top_k: usize,
    pub scale: Option<Vec<f32>>,
    pub bias: Option<Vec<f32>>,
    pub over_all: bool,
}

/// Memory of [`route`], reused from call to call.
#[derive(Default)]
pub(super) struct Ranking {
    order: Vec<usize>,
    exps: Vec<f32>,
}

/// Chooses the `top_k` most probable classes of each token and writes their weights to `weights`, `[1, classes, 1, tokens]`;
/// other weights are 0. Of equally probable classes, the one with the lowest index is chosen.
pub(super) fn route(
    logits: &Tensor,
    weights: &mut Tensor,
    r: &Routing,
    ranking: &mut Ranking,
) -> Result<(), String> {
    let (&[1, classes, 1, width], Some(x)) = (logits.shape.as_slice(), logits.as_f32()) else {
        return Err(format!("route: logits of shape {:?}, expected [1, experts, 1, tokens]", logits.shape));
    };
    let misfit = |v: &Option<Vec<f32>>| v.as_ref().is_some_and(|v| v.len() != classes);
    if r.top_k > classes || misfit(&r.scale) || misfit(&r.bias) {
        return Err(format!("route: top_k {}, scale or bias do not fit {classes} classes", r.top_k));
    }
    let out = weights.reset_f32(&[1, classes, 1, width]);
    out.fill(0.0);
    let Ranking { order, exps } = ranking;
    exps.resize(classes, 0.0);
    for t in 0..width {
        let logit = |e: usize| x[e * width + t];
        let max = (0..classes).map(logit).fold(f32::NEG_INFINITY, f32::max);
        exps.iter_mut().enumerate().for_each(|(e, v)| *v = (logit(e) - max).exp());
        let all: f32 = exps.iter().sum();
        order.clear();
        order.extend(0..classes);
        match &r.bias {
            // Logits have the same order as probabilities, but no rounding.
            None => order.sort_unstable_by(|&a, &b| logit(b).total_cmp(&logit(a)).then(a.cmp(&b))),
            Some(bias) => {
                let score = |e: usize| exps[e] / all + bias[e];
                order.sort_unstable_by(|&a, &b| score(b).total_cmp(&score(a)).then(a.cmp(&b)));
            }
        }
        let chosen = &order[..r.top_k];
        let total = if r.over_all { all } else { chosen.iter().map(|&e| exps[e]).sum() };
        for &e in chosen {
            out[e * width + t] = exps[e] / total * r.scale.as_ref().map_or(1.0, |s| s[e]);
        }
    }
    Ok(())
}

/// Computes `to += from * weights[row]`, for each token by itself.
pub(super) fn add_scaled(to: &mut Tensor, from: &Tensor, weights: &Tensor, row: usize) -> Result<(), String> {
    let width = weights.shape.last().copied().unwrap_or(0);
    let shapes = || format!("add: row {row} of {:?} to {:?} from {:?}", weights.shape, to.shape, from.shape);
    let fits = width > 0 && to.shape == from.shape && to.shape.last() == Some(&width);
    let w = weights.as_f32().and_then(|w| w.get(row * width..(row + 1) * width));
    let (Some(w), true) = (w, fits) else { return Err(shapes()) };
    if w.iter().all(|&w| w == 0.0) {
        return Ok(());
    }
    let (Some(x), Some(sum)) = (from.as_f32(), to.as_f32_mut()) else {
        return Err("add: registers that are not of floats".into());
    };
    for (sum, x) in sum.chunks_exact_mut(width).zip(x.chunks_exact(width)) {
        for ((s, x), w) in sum.iter_mut().zip(x).zip(w) {
            *s += x * w;
        }
    }
    Ok(())
}

/// Largest value that a function gets without scaling: results of simple operations on it (a sum of two, a product with a
/// norm's weight) fit in fp16.
const LARGEST: f32 = 16_384.0;

/// Tells whether a magnitude is above [`LARGEST`].
pub(super) fn is_large(values: &[f32]) -> bool {
    let mut lanes = [0f32; 16];
    let (chunks, rest) = values.as_chunks::<16>();
    for chunk in chunks {
        lanes.iter_mut().zip(chunk).for_each(|(m, v)| *m = m.max(v.abs()));
    }
    lanes.iter().copied().chain(rest.iter().map(|v| v.abs())).any(|m| m > LARGEST)
}

/// Divides each token (column of `[C, width]`) whose largest magnitude is above [`LARGEST`] by a power of two, which keeps all
/// digits.
pub(super) fn rescale(values: &mut [f32], width: usize) {
    for t in 0..width {
        let largest = values.iter().skip(t).step_by(width).fold(0f32, |m, v| m.max(v.abs()));
        if largest > LARGEST && largest.is_finite() {
            let factor = (-(largest / LARGEST).log2().ceil()).exp2();
            values.iter_mut().skip(t).step_by(width).for_each(|v| *v *= factor);
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn visible(cache: &Cache, first: usize, n: usize, width: usize) -> Vec<Vec<usize>> {
        let mut out = Tensor::default();
        mask_rows(&mut out, cache, (first, first + n - 1), n, width);
        let v = out.as_f32().unwrap();
        v.chunks(cache.slots).map(|r| (0..r.len()).filter(|&s| r[s] == 0.0).collect()).collect()
    }

    #[test]
    fn a_window_sees_its_last_positions_through_the_ring() {
        let ring = Cache { slots: 8, window: Some(3) };
        assert_eq!(visible(&ring, 0, 2, 4), vec![vec![0], vec![0, 1], vec![0], vec![0]]);
        assert_eq!(visible(&ring, 8, 3, 3), vec![vec![0, 6, 7], vec![0, 1, 7], vec![0, 1, 2]]);
    }

    #[test]
    fn a_full_cache_is_causal() {
        let full = Cache { slots: 8, window: None };
        assert_eq!(visible(&full, 2, 2, 2), vec![vec![0, 1, 2], vec![0, 1, 2, 3]]);
    }

    #[test]
    fn rotary_rows_turn_a_pair_by_its_angle() {
        let rope = Rope { width: 4, inv_freq: vec![0.5, 0.0] };
        let (mut cos, mut sin) = (Tensor::default(), Tensor::default());
        rope_rows(&mut cos, &rope, 3, 1, false);
        rope_rows(&mut sin, &rope, 3, 1, true);
        let (c, s) = (1.5f32.cos(), 1.5f32.sin());
        let close = |a: &[f32], b: [f32; 4]| a.iter().zip(b).all(|(x, y)| (x - y).abs() < 1e-6);
        assert!(close(cos.as_f32().unwrap(), [c, 1.0, c, 1.0]), "{cos:?}");
        assert!(close(sin.as_f32().unwrap(), [-s, 0.0, s, 0.0]), "{sin:?}");
    }

    #[test]
    fn channels_behind_the_pairs_stay() {
        let rope = Rope { width: 5, inv_freq: vec![0.5, 0.25] };
        let (mut cos, mut sin) = (Tensor::default(), Tensor::default());
        rope_rows(&mut cos, &rope, 3, 2, false);
        rope_rows(&mut sin, &rope, 3, 2, true);
        for row in 0..2 {
            assert_eq!((cos.as_f32().unwrap()[5 * row + 4], sin.as_f32().unwrap()[5 * row + 4]), (1.0, 0.0));
        }
    }

    #[test]
    fn the_newest_rows_are_carried() {
        let chain = |n, width| {
            let mut out = Tensor::default();
            carry_rows(&mut out, 2, n, width);
            let v = out.as_f32().unwrap();
            v.chunks(2 + width).map(|r| r.iter().position(|&x| x == 1.0).unwrap()).collect::<Vec<_>>()
        };
        // Indices of rows [old 0, old 1, new 0, new 1, ..].
        assert_eq!(chain(1, 1), [1, 2]);
        assert_eq!(chain(4, 4), [4, 5]);
        assert_eq!(chain(1, 4), [1, 2]);
        assert_eq!(chain(3, 4), [3, 4]);
    }

    fn routing(top_k: usize) -> Routing {
        Routing { top_k, scale: None, bias: None, over_all: false }
    }

    #[test]
    fn routing_weights_are_a_softmax_of_the_chosen() {
        let logits = Tensor::f32(&[1, 4, 1, 2], vec![1.0, 0.0, 3.0, 5.0, 2.0, 5.0, -1.0, 4.0]);
        let mut weights = Tensor::default();
        let scaled = Routing { scale: Some(vec![1.0, 2.0, 10.0, 1.0]), ..routing(2) };
        route(&logits, &mut weights, &scaled, &mut Ranking::default()).unwrap();
        let w = weights.as_f32().unwrap();
        let p = 1.0 / (1.0 + (-1.0f32).exp());
        let expected = [0.0, 0.0, 2.0 * p, 1.0, 10.0 * (1.0 - p), 5.0, 0.0, 0.0];
        assert!(w.iter().zip(expected).all(|(a, b)| (a - b).abs() < 1e-5), "{w:?}");
        assert!(route(&logits, &mut weights, &routing(5), &mut Ranking::default()).is_err());
        let short = Routing { bias: Some(vec![0.0]), ..routing(1) };
        assert!(route(&logits, &mut weights, &short, &mut Ranking::default()).is_err());
    }

    #[test]
    fn a_bias_changes_the_choice_but_not_the_weight() {
        // Probabilities 0.2, 0.5, 0.3.
        let logits = Tensor::f32(&[1, 3, 1, 1], vec![0.2f32.ln(), 0.5f32.ln(), 0.3f32.ln()]);
        let mut weights = Tensor::default();
        let biased = Routing { bias: Some(vec![0.0, -0.25, 0.0]), over_all: true, ..routing(1) };
        route(&logits, &mut weights, &biased, &mut Ranking::default()).unwrap();
        let w = weights.as_f32().unwrap();
        assert!(w[0] == 0.0 && w[1] == 0.0 && (w[2] - 0.3).abs() < 1e-6, "{w:?}");
    }

    #[test]
    fn a_row_of_weights_scales_what_is_added() {
        let mut sum = Tensor::f32(&[1, 2, 1, 2], vec![1.0, 2.0, 3.0, 4.0]);
        let from = Tensor::f32(&[1, 2, 1, 2], vec![1.0, 1.0, 2.0, 2.0]);
        let weights = Tensor::f32(&[1, 2, 1, 2], vec![9.0, 9.0, 0.5, 0.0]);
        add_scaled(&mut sum, &from, &weights, 1).unwrap();
        assert_eq!(sum.as_f32().unwrap(), [1.5, 2.0, 4.0, 4.0]);
        assert!(add_scaled(&mut sum, &from, &weights, 2).is_err());
    }

    #[test]
    fn only_large_tokens_are_rescaled() {
        let mut v = [1.0, 100_000.0, 3.0, 1.0];
        rescale(&mut v, 2);
        assert_eq!(v, [1.0, 12_500.0, 3.0, 0.125]);
    }
}
