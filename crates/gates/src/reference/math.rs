//! Arithmetic of a forward pass on plain slices of f32. Norms and softmax sum in f64; [`dot`] adds partial sums of
//! f32 in f64.

use anemoe_convert::lower::Activation;
use anemoe_convert::models::Attention;
use rayon::prelude::*;

/// Computes `x / sqrt(mean(x^2) + eps)`.
pub fn rms_norm(x: &[f32], eps: f32) -> Vec<f32> {
    let mean = x.iter().map(|&v| f64::from(v) * f64::from(v)).sum::<f64>() / x.len() as f64;
    let scale = 1.0 / (mean + f64::from(eps)).sqrt();
    x.iter().map(|&v| (f64::from(v) * scale) as f32).collect()
}

/// Computes `weight * x`, element by element.
pub fn scaled(x: &[f32], weight: &[f32]) -> Vec<f32> {
    x.iter().zip(weight).map(|(x, w)| x * w).collect()
}

/// Computes `to += x`.
pub fn add(to: &mut [f32], x: &[f32]) {
    to.iter_mut().zip(x).for_each(|(t, x)| *t += x);
}

/// Computes `to += factor * x`.
pub fn add_scaled(to: &mut [f32], factor: f32, x: &[f32]) {
    to.iter_mut().zip(x).for_each(|(t, x)| *t += factor * x);
}

/// Computes the tanh form of GELU (Hugging Face's `gelu_pytorch_tanh`).
pub fn gelu_tanh(x: f32) -> f32 {
    const SQRT_2_OVER_PI: f32 = 0.797_884_6;
    0.5 * x * (1.0 + (SQRT_2_OVER_PI * (x + 0.044_715 * x * x * x)).tanh())
}

/// Computes GELU with the error function: `x / 2 * (1 + erf(x / sqrt(2)))`.
pub fn gelu_exact(x: f32) -> f32 {
    let x = f64::from(x);
    (0.5 * x * (1.0 + libm::erf(x * std::f64::consts::FRAC_1_SQRT_2))) as f32
}

/// Computes `x * sigmoid(x)`.
pub fn silu(x: f32) -> f32 {
    x / (1.0 + (-x).exp())
}

/// Computes `activation(gate) * up`, element by element.
pub fn gated(activation: Activation, gate: &[f32], up: &[f32]) -> Vec<f32> {
    let one = |g: f32, u: f32| match activation {
        Activation::GeluTanh => gelu_tanh(g) * u,
        Activation::Silu => silu(g) * u,
        Activation::ClampedSilu { limit, steepness } => {
            let g = g.min(limit);
            g / (1.0 + (-steepness * g).exp()) * (u.clamp(-limit, limit) + 1.0)
        }
    };
    gate.iter().zip(up).map(|(&g, &u)| one(g, u)).collect()
}

/// Computes `length * x / |x|`; zero stays zero.
pub fn l2_norm(x: &[f32], length: f32) -> Vec<f32> {
    let norm = x.iter().map(|&v| f64::from(v) * f64::from(v)).sum::<f64>().sqrt();
    let scale = f64::from(length) / norm.max(f64::from(f32::MIN_POSITIVE));
    x.iter().map(|&v| (f64::from(v) * scale) as f32).collect()
}

/// Computes `softmax(scale q k^T + mask) v` for queries at positions from `first` on, over all positions. The mask is
/// causal, with a window that includes the query's own position. Groups of query heads share a key/value head. A
/// head's sink is a score that takes part in its softmax and has no value.
pub fn attend(
    q: &[Vec<f32>],
    (keys, values): (&[Vec<f32>], &[Vec<f32>]),
    first: usize,
    a: &Attention,
    sinks: Option<&[f32]>,
) -> Vec<Vec<f32>> {
    let (heads, kv_heads, d) = (a.heads, a.kv_heads, a.head_dim);
    let window = a.window.unwrap_or(usize::MAX);
    q.par_iter()
        .enumerate()
        .map(|(t, q)| {
            let end = first + t + 1;
            let start = end.saturating_sub(window);
            let mut o = vec![0f32; heads * d];
            for (head, (q, o)) in q.chunks_exact(d).zip(o.chunks_exact_mut(d)).enumerate() {
                let kv = head / (heads / kv_heads) * d;
                let mut p: Vec<f32> =
                    keys[start..end].iter().map(|k| a.scale * dot(q, &k[kv..kv + d])).collect();
                p.extend(sinks.map(|sinks| sinks[head]));
                softmax(&mut p);
                for (p, v) in p.iter().zip(&values[start..end]) {
                    add_scaled(o, *p, &v[kv..kv + d]);
                }
            }
            o
        })
        .collect()
}

/// Computes the softmax in place.
pub fn softmax(x: &mut [f32]) {
    let max = x.iter().copied().fold(f32::NEG_INFINITY, f32::max);
    let mut sum = 0f64;
    for v in x.iter_mut() {
        *v = (*v - max).exp();
        sum += f64::from(*v);
    }
    x.iter_mut().for_each(|v| *v = (f64::from(*v) / sum) as f32);
}

/// Rotates the pairs `(c, c + d/2)` of a head of `d` channels by `position * inv_freq[c]`.
pub fn rope(head: &mut [f32], position: usize, inv_freq: &[f64]) {
    let (first, second) = head.split_at_mut(inv_freq.len());
    for ((a, b), f) in first.iter_mut().zip(second).zip(inv_freq) {
        let (sin, cos) = (position as f64 * f).sin_cos();
        let (x, y) = (f64::from(*a), f64::from(*b));
        *a = (x * cos - y * sin) as f32;
        *b = (y * cos + x * sin) as f32;
    }
}

/// Computes the inner product. Sixteen partial sums let the compiler use vectors.
pub fn dot(a: &[f32], b: &[f32]) -> f32 {
    const LANES: usize = 16;
    let mut sums = [0f32; LANES];
    let (a_pieces, b_pieces) = (a.chunks_exact(LANES), b.chunks_exact(LANES));
    let rest: f32 = a_pieces.remainder().iter().zip(b_pieces.remainder()).map(|(x, y)| x * y).sum();
    for (a, b) in a_pieces.zip(b_pieces) {
        for ((sum, x), y) in sums.iter_mut().zip(a).zip(b) {
            *sum += x * y;
        }
    }
    let total = sums.iter().map(|&s| f64::from(s)).sum::<f64>();
    (total + f64::from(rest)) as f32
}

/// Returns the index of the largest value; of equal values the first.
pub fn argmax(x: &[f32]) -> usize {
    let mut best = 0;
    for (i, v) in x.iter().enumerate() {
        if *v > x[best] {
            best = i;
        }
    }
    best
}

/// Returns the indices of the `k` largest values, largest first; of equal values the first.
pub fn top_k(x: &[f32], k: usize) -> Vec<usize> {
    let mut order: Vec<usize> = (0..x.len()).collect();
    order.sort_by(|&a, &b| x[b].total_cmp(&x[a]).then(a.cmp(&b)));
    order.truncate(k);
    order
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn dot_takes_every_element() {
        for n in [0, 1, 15, 16, 17, 40] {
            let a: Vec<f32> = (0..n).map(|i| i as f32).collect();
            let expected: f32 = a.iter().map(|x| 2.0 * x).sum();
            assert_eq!(dot(&a, &vec![2.0; n]), expected);
        }
    }

    #[test]
    fn largest_values_come_first_and_ties_in_order() {
        assert_eq!(top_k(&[1.0, 3.0, 3.0, 2.0, 3.0], 3), [1, 2, 4]);
        assert_eq!(argmax(&[1.0, 3.0, 3.0]), 1);
    }

    #[test]
    fn softmax_of_large_values_is_finite() {
        let mut x = [1000.0, 1000.0, -1000.0];
        softmax(&mut x);
        assert_eq!(x, [0.5, 0.5, 0.0]);
    }

    #[test]
    fn gelu_at_known_points() {
        // 0.5 (1 + tanh(0.79788456 * 1.044715)) = 0.841192
        assert!((gelu_tanh(1.0) - 0.841_192).abs() < 1e-6);
        assert_eq!(gelu_tanh(0.0), 0.0);
        assert!(gelu_tanh(-10.0).abs() < 1e-6);
    }

    #[test]
    fn exact_gelu_and_silu_at_known_points() {
        // 0.5 (1 + erf(1/sqrt 2)) = 0.8413447, sigmoid(1) = 0.7310586
        assert!((gelu_exact(1.0) - 0.841_344_7).abs() < 1e-6 && gelu_exact(0.0) == 0.0);
        assert!((silu(1.0) - 0.731_058_6).abs() < 1e-6 && silu(0.0) == 0.0);
    }

    #[test]
    fn a_vector_gets_its_length() {
        assert_eq!(l2_norm(&[3.0, 4.0], 10.0), [6.0, 8.0]);
        assert_eq!(l2_norm(&[0.0, 0.0], 10.0), [0.0, 0.0]);
    }

    #[test]
    fn a_quarter_turn_swaps_a_pair() {
        let mut head = [1.0, 5.0, 0.0, 7.0];
        rope(&mut head, 1, &[std::f64::consts::FRAC_PI_2, 0.0]);
        assert!((head[0]).abs() < 1e-7 && (head[2] - 1.0).abs() < 1e-7);
        assert_eq!((head[1], head[3]), (5.0, 7.0));
    }
}
