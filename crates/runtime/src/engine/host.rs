//! What the host computes between package calls: rotary rows, masks, cache placement, expert choice.

use crate::tensor::Tensor;
use anemoe_bundle::{Cache, Chain, HostInput, Rope};

/// Added to the score of a slot that a token does not see: far below any score, and finite in fp16 with a score added.
const MASKED: f32 = -30_000.0;

/// Fills `out` for `n` tokens at positions `first..` in a call of `width` tokens.
pub(super) fn fill(out: &mut Tensor, input: &HostInput, chain: &Chain, first: usize, n: usize, width: usize) {
    // `Chain::read` has checked that the names exist.
    match input {
        HostInput::RopeCos(name) => rope_rows(out, &chain.ropes[name], first, width, false),
        HostInput::RopeSin(name) => rope_rows(out, &chain.ropes[name], first, width, true),
        HostInput::Mask(name) => mask_rows(out, &chain.caches[name], first, n, width),
        HostInput::Place(name) => {
            let slots = chain.caches[name].slots;
            let v = out.reset_f32(&[1, 1, slots, width]);
            v.fill(0.0);
            for t in 0..n {
                v[(first + t) % slots * width + t] = 1.0;
            }
        }
        HostInput::Keep(name) => {
            let slots = chain.caches[name].slots;
            let v = out.reset_f32(&[1, 1, slots, 1]);
            v.fill(1.0);
            for t in 0..n {
                v[(first + t) % slots] = 0.0;
            }
        }
    }
}

/// `[1, 1, width, rope.width]`; sines are negated in the first half.
fn rope_rows(out: &mut Tensor, rope: &Rope, first: usize, width: usize, sine: bool) {
    let half = rope.inv_freq.len();
    let v = out.reset_f32(&[1, 1, width, rope.width]);
    for (t, row) in v.chunks_exact_mut(rope.width.max(1)).enumerate() {
        for (c, inv_freq) in rope.inv_freq.iter().enumerate() {
            // In f64: at position 10^5 an f32 angle is off by 0.004 radians.
            let (sin, cos) = ((first + t) as f64 * inv_freq).sin_cos();
            (row[c], row[half + c]) = if sine { (-sin as f32, sin as f32) } else { (cos as f32, cos as f32) };
        }
    }
}

/// `[1, 1, width, slots]`: which slots each token sees after the call's own `n` tokens are written.
fn mask_rows(out: &mut Tensor, cache: &Cache, first: usize, n: usize, width: usize) {
    let slots = cache.slots;
    let v = out.reset_f32(&[1, 1, width, slots]);
    v.fill(MASKED);
    let newest = first + n - 1;
    for (t, row) in v.chunks_exact_mut(slots).enumerate().take(n) {
        let position = first + t;
        let oldest = cache.window.map_or(0, |w| (position + 1).saturating_sub(w));
        // Of a ring only the newest `slots` positions are still there.
        let oldest = oldest.max((newest + 1).saturating_sub(slots));
        for p in oldest..=position {
            row[p % slots] = 0.0;
        }
    }
}

/// Softmax over the `top_k` largest of each token's logits (the lowest index of equals), times `scale`; tokens from `n` on
/// get no expert.
pub(super) fn route(
    logits: &Tensor,
    weights: &mut Tensor,
    top_k: usize,
    scale: Option<&[f32]>,
    n: usize,
) -> Result<(), String> {
    let (&[1, experts, 1, width], Some(x)) = (logits.shape.as_slice(), logits.as_f32()) else {
        return Err(format!("route: logits of shape {:?}, expected [1, experts, 1, tokens]", logits.shape));
    };
    if top_k > experts || scale.is_some_and(|s| s.len() != experts) {
        return Err(format!("route: top_k {top_k} or its scale do not fit {experts} experts"));
    }
    let out = weights.reset_f32(&[1, experts, 1, width]);
    out.fill(0.0);
    let mut order: Vec<usize> = Vec::with_capacity(experts);
    for t in 0..n.min(width) {
        let logit = |e: usize| x[e * width + t];
        order.clear();
        order.extend(0..experts);
        order.sort_by(|&a, &b| logit(b).total_cmp(&logit(a)));
        let chosen = &order[..top_k];
        let max = logit(chosen[0]);
        let total: f32 = chosen.iter().map(|&e| (logit(e) - max).exp()).sum();
        for &e in chosen {
            out[e * width + t] = (logit(e) - max).exp() / total * scale.map_or(1.0, |s| s[e]);
        }
    }
    Ok(())
}

#[cfg(test)]
mod tests {
    use super::*;

    fn visible(cache: &Cache, first: usize, n: usize, width: usize) -> Vec<Vec<usize>> {
        let mut out = Tensor::default();
        mask_rows(&mut out, cache, first, n, width);
        let v = out.as_f32().unwrap();
        v.chunks(cache.slots).map(|r| (0..r.len()).filter(|&s| r[s] == 0.0).collect()).collect()
    }

    #[test]
    fn a_window_sees_its_last_positions_through_the_ring() {
        let ring = Cache { slots: 8, window: Some(3) };
        assert_eq!(visible(&ring, 0, 2, 4), vec![vec![0], vec![0, 1], vec![], vec![]]);
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
    fn routing_weights_are_a_softmax_of_the_chosen() {
        let logits = Tensor::f32(&[1, 4, 1, 2], vec![1.0, 0.0, 3.0, 5.0, 2.0, 5.0, -1.0, 4.0]);
        let mut weights = Tensor::default();
        route(&logits, &mut weights, 2, Some(&[1.0, 2.0, 10.0, 1.0]), 2).unwrap();
        let w = weights.as_f32().unwrap();
        let p = 1.0 / (1.0 + (-1.0f32).exp());
        let expected = [0.0, 0.0, 2.0 * p, 1.0, 10.0 * (1.0 - p), 5.0, 0.0, 0.0];
        assert!(w.iter().zip(expected).all(|(a, b)| (a - b).abs() < 1e-5), "{w:?}");
        // A padded token gets no expert.
        route(&logits, &mut weights, 2, None, 1).unwrap();
        assert!((0..4).all(|e| weights.as_f32().unwrap()[e * 2 + 1] == 0.0));
        assert!(route(&logits, &mut weights, 5, None, 2).is_err());
    }
}
