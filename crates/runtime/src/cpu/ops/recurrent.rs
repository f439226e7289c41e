//! Recurrent ops: `rnn`, `gru`, `lstm`.
//!
//! ```text
//! x [steps, batch, inputs] --all steps at once--> x W_ih^T + bias [steps, batch, gates * hidden]
//! each step: + h W_hh^T --> gates --> h [batch, hidden]
//! ```
//! A `reverse` op reads the steps from the last to the first, and its results lie in that order; the backward half of a
//! bidirectional `lstm` lies at the steps that it read (coremltools' op tests).

use super::elementwise_unary::sigmoid;
use super::linear::product_by_rows;
use super::operands::{OpContext, OpResult};
use super::shape::{count, invalid};
use crate::tensor::Tensor;

/// A function of one float.
type RecurrentActivation = fn(f32) -> f32;

/// Reads the parameter `name`, an activation function with the default parameters of its op.
fn activation(c: &OpContext<'_>, name: &str, default: &'static str) -> OpResult<RecurrentActivation> {
    Ok(match c.str(name, default)?.to_ascii_lowercase().as_str() {
        "tanh" | "scaled_tanh" => f32::tanh,
        "sigmoid" => sigmoid,
        "hard_sigmoid" | "sigmoid_hard" => |v| (0.2 * v + 0.5).clamp(0.0, 1.0),
        "relu" => |v| v.max(0.0),
        "linear" => |v| v,
        other => return invalid(format!("parameter `{name}`: no activation `{other}`")),
    })
}

/// Operands that all three ops have.
struct RecurrentInput<'a> {
    x: &'a [f32],
    steps: usize,
    batch: usize,
    inputs: usize,
    hidden: usize,
    /// Results of every step, not of the last one alone.
    every: bool,
    /// Columns of hidden states: `hidden` for each direction.
    width: usize,
}

impl<'a> RecurrentInput<'a> {
    fn new(c: &OpContext<'a>, directions: usize) -> OpResult<RecurrentInput<'a>> {
        let ((xs, x), (ws, _)) = (c.f32s("x")?, c.f32s("weight_hh")?);
        let (&[steps, batch, inputs], &[_, hidden]) = (xs, ws) else {
            return invalid(format!("input of shape {xs:?} with a weight_hh of shape {ws:?}"));
        };
        let every = c.bool("output_sequence", false)?;
        if steps == 0 || hidden == 0 {
            return invalid(format!("input of shape {xs:?} for {hidden} hidden values: nothing to compute"));
        }
        Ok(RecurrentInput { x, steps, batch, inputs, hidden, every, width: directions * hidden })
    }

    /// Returns a matrix that must have `shape`.
    fn matrix(c: &OpContext<'a>, name: &str, shape: [usize; 2]) -> OpResult<&'a [f32]> {
        match c.f32s(name)? {
            (found, values) if found == shape => Ok(values),
            (found, _) => invalid(format!("parameter `{name}` has shape {found:?}, expected {shape:?}")),
        }
    }

    /// Returns a vector of `n` values; none where it is left out.
    fn vector(c: &OpContext<'a>, name: &str, n: usize) -> OpResult<Option<&'a [f32]>> {
        match c.get(name) {
            None => Ok(None),
            Some(_) => match c.f32s(name)? {
                (_, values) if values.len() == n => Ok(Some(values)),
                (found, _) => invalid(format!("parameter `{name}` has shape {found:?}, expected [{n}]")),
            },
        }
    }

    /// Returns the columns of direction `d` of an initial state.
    fn initial(&self, c: &OpContext<'a>, name: &str, d: usize) -> OpResult<Vec<f32>> {
        let all = Self::matrix(c, name, [self.batch, self.width])?;
        let rows = all.chunks_exact(self.width);
        Ok(rows.flat_map(|row| &row[d * self.hidden..][..self.hidden]).copied().collect())
    }

    /// Computes `x W_ih^T + bias` for all steps; `gates` is the number of rows of `W_ih` by `hidden`.
    fn inputs(&self, c: &OpContext<'a>, weight: &str, biases: &[&str], gates: usize) -> OpResult<Vec<f32>> {
        let n = gates * self.hidden;
        let w = Self::matrix(c, weight, [n, self.inputs])?;
        let mut y = vec![0f32; count(&[self.steps, self.batch, n])?];
        product_by_rows(self.x, w, &mut y, (self.inputs, n));
        for bias in biases {
            if let Some(bias) = Self::vector(c, bias, n)? {
                y.chunks_exact_mut(n).for_each(|y| y.iter_mut().zip(bias).for_each(|(y, b)| *y += b));
            }
        }
        Ok(y)
    }

    /// Runs the steps of direction `d` on the hidden state `h` and writes it to `out`; `step` computes the next state.
    fn scan(
        &self,
        (from_inputs, gates): (&[f32], usize),
        (d, reverse): (usize, bool),
        h: &mut [f32],
        out: &mut [Tensor],
        mut step: impl FnMut(&[f32], &mut [f32]),
    ) {
        let size = self.batch * gates * self.hidden;
        let (width, hidden) = (self.width, self.hidden);
        let put = |to: &mut [f32], h: &[f32]| {
            for (to, h) in to.chunks_exact_mut(width).zip(h.chunks_exact(hidden)) {
                to[d * hidden..][..hidden].copy_from_slice(h);
            }
        };
        let Some((sequence, last)) = out.split_first_mut() else { return };
        let shape = [if self.every { self.steps } else { 1 }, self.batch, width];
        let y = sequence.reset_f32(&shape);
        for i in 0..self.steps {
            let read = if reverse { self.steps - 1 - i } else { i };
            step(&from_inputs[read * size..][..size], h);
            let place = match self.every {
                // The backward half of two directions.
                true if d == 1 => read,
                true => i,
                false => 0,
            };
            if self.every || i + 1 == self.steps {
                put(&mut y[place * self.batch * width..][..self.batch * width], h);
            }
        }
        if let Some(last) = last.first_mut() {
            put(last.reset_f32(&[self.batch, width]), h);
        }
    }
}

/// Reads the direction of an op that has one: true for `reverse`.
fn reads_backwards(c: &OpContext<'_>) -> OpResult<bool> {
    match c.str("direction", "forward")? {
        "forward" => Ok(false),
        "reverse" => Ok(true),
        other => invalid(format!("parameter `direction`: `{other}` is not forward or reverse")),
    }
}

/// Computes `h = activation(W_ih x + W_hh h + bias)`.
pub(super) fn rnn(c: &OpContext<'_>, out: &mut [Tensor]) -> OpResult {
    let s = RecurrentInput::new(c, 1)?;
    let f = activation(c, "activation", "tanh")?;
    let w = RecurrentInput::matrix(c, "weight_hh", [s.hidden, s.hidden])?;
    let x = s.inputs(c, "weight_ih", &["bias"], 1)?;
    let mut h = s.initial(c, "initial_h", 0)?;
    let mut product = vec![0f32; h.len()];
    s.scan((&x, 1), (0, reads_backwards(c)?), &mut h, out, |x, h| {
        product_by_rows(h, w, &mut product, (s.hidden, s.hidden));
        h.iter_mut().zip(x).zip(&product).for_each(|((h, x), p)| *h = f(x + p));
    });
    Ok(())
}

/// Computes a GRU. Gates lie in the order reset, new, update:
///
/// ```text
/// h = (1 - z) n + z h,   n = activation(x_n + W_n (r h)),   with reset_after: activation(x_n + r (W_n h + bias_n))
/// ```
pub(super) fn gru(c: &OpContext<'_>, out: &mut [Tensor]) -> OpResult {
    let s = RecurrentInput::new(c, 1)?;
    let (gate, new) =
        (activation(c, "recurrent_activation", "sigmoid")?, activation(c, "activation", "tanh")?);
    let n = s.hidden;
    let after = c.bool("reset_after", false)?;
    let w = RecurrentInput::matrix(c, "weight_hh", [3 * n, n])?;
    // With `reset_after`, the bias belongs to the hidden state.
    let hidden_bias = if after { RecurrentInput::vector(c, "bias", 3 * n)? } else { None };
    let x = s.inputs(c, "weight_ih", if after { &["input_bias"] } else { &["input_bias", "bias"] }, 3)?;
    let mut h = s.initial(c, "initial_h", 0)?;
    let (mut product, mut reset, mut fresh) = (vec![0f32; 3 * h.len()], h.clone(), h.clone());
    s.scan((&x, 3), (0, reads_backwards(c)?), &mut h, out, |x, h| {
        product_by_rows(h, w, &mut product, (n, 3 * n));
        let rows = || x.chunks_exact(3 * n);
        if let Some(bias) = hidden_bias {
            product.chunks_exact_mut(3 * n).flat_map(|p| p.iter_mut().zip(bias)).for_each(|(p, b)| *p += b);
        }
        let products = || product.chunks_exact(3 * n);
        for (((x, p), r), (h, f)) in rows()
            .zip(products())
            .zip(reset.chunks_exact_mut(n))
            .zip(h.chunks_exact(n).zip(fresh.chunks_exact_mut(n)))
        {
            for k in 0..n {
                r[k] = gate(x[k] + p[k]);
                // Rows of the product with the new gate, or the state that they are made from.
                if after { f[k] = r[k] * p[n + k] } else { r[k] *= h[k] }
            }
        }
        if !after {
            product_by_rows(&reset, &w[n * n..2 * n * n], &mut fresh, (n, n));
        }
        for (((x, p), f), h) in rows().zip(products()).zip(fresh.chunks_exact(n)).zip(h.chunks_exact_mut(n)) {
            for k in 0..n {
                let z = gate(x[2 * n + k] + p[2 * n + k]);
                h[k] = (1.0 - z) * new(x[n + k] + f[k]) + z * h[k];
            }
        }
    });
    Ok(())
}

/// Computes an LSTM. Gates lie in the order input, forget, output, cell; `peephole` has the first three:
///
/// ```text
/// c = clip(f c + i cell(z)),   h = o activation(c)
/// ```
pub(super) fn lstm(c: &OpContext<'_>, out: &mut [Tensor]) -> OpResult {
    let (directions, reverse) = match c.str("direction", "forward")? {
        "bidirectional" => (2, false),
        _ => (1, reads_backwards(c)?),
    };
    let s = RecurrentInput::new(c, directions)?;
    let (gate, cell) =
        (activation(c, "recurrent_activation", "sigmoid")?, activation(c, "cell_activation", "tanh")?);
    let activate = activation(c, "activation", "tanh")?;
    let clip = c.get("clip").map(|_| c.float("clip", 0.0)).transpose()?.map_or(f32::INFINITY, f32::abs);
    let n = s.hidden;
    let zeros = vec![0f32; 3 * n];
    let mut cells = vec![0f32; count(&[s.batch, s.width])?];
    for d in 0..directions {
        let name = |base: &str| if d == 1 { format!("{base}_back") } else { base.to_string() };
        let w = RecurrentInput::matrix(c, &name("weight_hh"), [4 * n, n])?;
        let peephole = RecurrentInput::vector(c, &name("peephole"), 3 * n)?.unwrap_or(&zeros);
        let x = s.inputs(c, &name("weight_ih"), &[&name("bias")], 4)?;
        let (mut h, mut memory) = (s.initial(c, "initial_h", d)?, s.initial(c, "initial_c", d)?);
        let mut product = vec![0f32; 4 * h.len()];
        s.scan((&x, 4), (d, reverse || d == 1), &mut h, out, |x, h| {
            product_by_rows(h, w, &mut product, (n, 4 * n));
            let rows = x.chunks_exact(4 * n).zip(product.chunks_exact(4 * n));
            for ((x, p), (h, m)) in rows.zip(h.chunks_exact_mut(n).zip(memory.chunks_exact_mut(n))) {
                for k in 0..n {
                    let sum = |g: usize| x[g * n + k] + p[g * n + k];
                    let input = gate(sum(0) + peephole[k] * m[k]);
                    let forget = gate(sum(1) + peephole[n + k] * m[k]);
                    m[k] = (forget * m[k] + input * cell(sum(3))).max(-clip).min(clip);
                    h[k] = gate(sum(2) + peephole[2 * n + k] * m[k]) * activate(m[k]);
                }
            }
        });
        for (to, m) in cells.chunks_exact_mut(s.width).zip(memory.chunks_exact(n)) {
            to[d * n..][..n].copy_from_slice(m);
        }
    }
    if let Some(last) = out.get_mut(2) {
        last.reset_f32(&[s.batch, s.width]).copy_from_slice(&cells);
    }
    Ok(())
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::tensor::Data;

    fn run(
        op: super::super::OpFunction,
        inputs: &[(&str, Tensor)],
        results: usize,
    ) -> OpResult<Vec<Vec<f32>>> {
        let bound: Vec<(&str, &Tensor)> = inputs.iter().map(|(n, t)| (*n, t)).collect();
        let mut out = vec![Tensor::default(); results];
        op(&OpContext { op: "", inputs: &bound, values: &[], outputs: &[] }, &mut out)?;
        Ok(out.iter().map(|t| t.as_f32().unwrap().to_vec()).collect())
    }

    fn text(value: &str) -> Tensor {
        Tensor { shape: vec![], data: Data::Str(vec![value.into()]) }
    }

    fn flag(value: bool) -> Tensor {
        Tensor { shape: vec![], data: Data::Bool(vec![value]) }
    }

    fn close(found: &[f32], expected: &[f32]) {
        assert_eq!(found.len(), expected.len());
        assert!(found.iter().zip(expected).all(|(a, b)| (a - b).abs() < 1e-6), "{found:?} {expected:?}");
    }

    /// Operands of one input, one hidden value and two steps, 1 and 2, from the state 0.
    fn operands(gates: usize, w: &[f32], r: &[f32]) -> Vec<(&'static str, Tensor)> {
        vec![
            ("x", Tensor::f32(&[2, 1, 1], vec![1.0, 2.0])),
            ("initial_h", Tensor::f32(&[1, 1], vec![0.5])),
            ("weight_ih", Tensor::f32(&[gates, 1], w.to_vec())),
            ("weight_hh", Tensor::f32(&[gates, 1], r.to_vec())),
            ("output_sequence", flag(true)),
        ]
    }

    #[test]
    fn rnn_runs_forward_and_backward() {
        let mut inputs = operands(1, &[1.0], &[2.0]);
        inputs.push(("activation", text("linear")));
        // 1 + 2 * 0.5 = 2, 2 + 2 * 2 = 6; backward 2 + 2 * 0.5 = 3, 1 + 2 * 3 = 7.
        assert_eq!(run(rnn, &inputs, 2).unwrap(), [vec![2.0, 6.0], vec![6.0]]);
        inputs.push(("direction", text("reverse")));
        assert_eq!(run(rnn, &inputs, 2).unwrap(), [vec![3.0, 7.0], vec![7.0]]);
        inputs[4].1 = flag(false);
        assert_eq!(run(rnn, &inputs, 2).unwrap(), [vec![7.0], vec![7.0]]);
    }

    #[test]
    fn gru_resets_before_or_after_the_product() {
        let mut inputs = operands(3, &[1.0, 0.5, -1.0], &[0.5, 2.0, 1.0]);
        inputs.push(("bias", Tensor::f32(&[3], vec![0.1, 0.2, 0.3])));
        let sigmoid = |v: f64| 1.0 / (1.0 + (-v).exp());
        let expected = |after: bool| -> Vec<f32> {
            let mut h = 0.5f64;
            [1.0f64, 2.0]
                .map(|x| {
                    let (r, z) = (sigmoid(x + 0.5 * h + 0.1), sigmoid(-x + h + 0.3));
                    let inner = if after { r * (2.0 * h + 0.2) } else { 2.0 * r * h + 0.2 };
                    h = (1.0 - z) * (0.5 * x + inner).tanh() + z * h;
                    h as f32
                })
                .to_vec()
        };
        close(&run(gru, &inputs, 2).unwrap()[0], &expected(false));
        inputs.push(("reset_after", flag(true)));
        close(&run(gru, &inputs, 2).unwrap()[0], &expected(true));
    }

    #[test]
    fn lstm_has_peepholes_a_clip_and_two_directions() {
        let (w, r, p) = ([0.5, -0.5, 1.0, 2.0], [1.0, 0.5, -1.0, 0.25], [0.1, 0.2, 0.3]);
        let mut inputs = operands(4, &w.map(|v| v as f32), &r.map(|v| v as f32));
        let expected = |steps: [f64; 2], clip: f64| {
            let sigmoid = |v: f64| 1.0 / (1.0 + (-v).exp());
            let (mut h, mut c) = (0.5, 0.25);
            let all = steps.map(|x| {
                let sum = |g: usize| w[g] * x + r[g] * h;
                let (i, f) = (sigmoid(sum(0) + p[0] * c), sigmoid(sum(1) + p[1] * c));
                c = (f * c + i * sum(3).tanh()).clamp(-clip, clip);
                h = sigmoid(sum(2) + p[2] * c) * c.tanh();
                h as f32
            });
            (all, c as f32)
        };
        inputs.push(("initial_c", Tensor::f32(&[1, 1], vec![0.25])));
        inputs.push(("peephole", Tensor::f32(&[3], p.map(|v| v as f32).to_vec())));
        let found = run(lstm, &inputs, 3).unwrap();
        let (all, c) = expected([1.0, 2.0], f64::INFINITY);
        close(&found[0], &all);
        close(&[found[1][0], found[2][0]], &[all[1], c]);
        inputs.push(("clip", Tensor::f32(&[], vec![0.2])));
        close(&run(lstm, &inputs, 3).unwrap()[0], &expected([1.0, 2.0], 0.2).0);
        // Both directions with the same weights: the backward half lies at the step that it read.
        let back: Vec<(&str, Tensor)> =
            [("weight_ih", "weight_ih_back"), ("weight_hh", "weight_hh_back"), ("peephole", "peephole_back")]
                .map(|(from, to)| (to, inputs.iter().find(|(n, _)| *n == from).unwrap().1.clone()))
                .to_vec();
        inputs.extend(back);
        for (name, value) in &mut inputs {
            match *name {
                "initial_h" => *value = Tensor::f32(&[1, 2], vec![0.5, 0.5]),
                "initial_c" => *value = Tensor::f32(&[1, 2], vec![0.25, 0.25]),
                _ => {}
            }
        }
        inputs.push(("direction", text("bidirectional")));
        let (a, b) = (expected([1.0, 2.0], 0.2).0, expected([2.0, 1.0], 0.2).0);
        let found = run(lstm, &inputs, 3).unwrap();
        close(&found[0], &[a[0], b[1], a[1], b[0]]);
        close(&found[1], &[a[1], b[1]]);
    }

    #[test]
    fn weights_of_another_shape_are_refused() {
        let mut inputs = operands(4, &[0.0; 4], &[0.0; 4]);
        let refused = run(rnn, &inputs, 2).unwrap_err().to_string();
        assert!(refused.contains("`weight_hh` has shape"), "{refused}");
        inputs.push(("direction", text("sideways")));
        inputs.push(("initial_c", Tensor::f32(&[1, 1], vec![0.0])));
        assert!(run(lstm, &inputs, 3).unwrap_err().to_string().contains("sideways"));
    }
}
