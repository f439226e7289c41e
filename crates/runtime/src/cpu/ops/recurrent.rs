//! Recurrent ops: `rnn`, `gru`, `lstm`.
//!
//! ```text
//! x [steps, batch, inputs] --all steps at once--> x W_ih^T + bias [steps, batch, gates * hidden]
//! each step: + h W_hh^T --> gates --> h [batch, hidden]
//! ```
//! A `reverse` op reads the steps from the last to the first, and its results lie in that order; the backward half of a
//! bidirectional `lstm` lies at the steps that it read (coremltools' op tests).

use super::elementwise_binary::larger;
use super::operands::{OpContext, OpError, OpResult};
use super::shape::{count, invalid};
use crate::tensor::Tensor;
use anemoe_kernels::{
    Columns, Isa, MatMul, Matrix, PackedActivations, Pool, apply_sigmoid, matmul_batch, softcap,
};

/// A function of floats, in place.
type RecurrentActivation = fn(&mut [f32]);

/// Reads the parameter `name`, an activation function with the default parameters of its op.
fn activation(c: &OpContext<'_>, name: &str, default: &'static str) -> OpResult<RecurrentActivation> {
    Ok(match c.str(name, default)?.to_ascii_lowercase().as_str() {
        "tanh" | "scaled_tanh" => |v| softcap(v, 1.0),
        "sigmoid" => apply_sigmoid,
        "hard_sigmoid" | "sigmoid_hard" => {
            |v| v.iter_mut().for_each(|v| *v = (0.2 * *v + 0.5).clamp(0.0, 1.0))
        }
        "relu" => |v| v.iter_mut().for_each(|v| *v = larger(*v, 0.0)),
        "linear" => |_| (),
        other => return invalid(format!("parameter `{name}`: no activation `{other}`")),
    })
}

/// Computes `x += y`.
fn add(x: &mut [f32], y: &[f32]) {
    x.iter_mut().zip(y).for_each(|(x, y)| *x += y);
}

/// Computes `x += a b`.
fn add_product(x: &mut [f32], a: &[f32], b: &[f32]) {
    x.iter_mut().zip(a).zip(b).for_each(|((x, a), b)| *x += a * b);
}

/// A product `x w^T` with rows of one matrix, and memory for it.
struct RowProduct<'a> {
    w: Matrix<'a>,
    packed: PackedActivations,
    y: Vec<f32>,
}

impl<'a> RowProduct<'a> {
    /// Takes `w [rows, cols]`.
    fn new(w: &'a [f32], rows: usize, cols: usize) -> OpResult<RowProduct<'a>> {
        let w = Matrix::f32(w, rows, cols).map_err(|e| OpError::Invalid(e.to_string()))?;
        Ok(RowProduct { w, packed: PackedActivations::default(), y: Vec::new() })
    }

    /// Computes the product with `x [n, cols]`, `[n, rows]`.
    fn run(&mut self, x: &[f32]) -> &mut [f32] {
        let RowProduct { w, packed, y } = self;
        let (tokens, cols) = (x.len() / w.cols().max(1), w.cols());
        let at = Columns { values: x, first: 0, token_stride: cols, channel_stride: 1 };
        packed.pack(Pool::global(), w.layout(), at, tokens, cols);
        y.resize(tokens * w.rows(), 0.0);
        let product = MatMul { w: *w, x: packed, tokens: None, y, stride: w.rows(), bias: None };
        matmul_batch(Isa::best(), Pool::global(), &mut [Some(product)]);
        y
    }
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
        count(&[self.steps, self.batch, n])?;
        let mut y = match self.inputs {
            0 => vec![0f32; self.steps * self.batch * n],
            _ => {
                let mut product = RowProduct::new(w, n, self.inputs)?;
                product.run(self.x);
                product.y
            }
        };
        for bias in biases {
            if let Some(bias) = c.vector(bias, n)? {
                y.chunks_exact_mut(n).for_each(|y| add(y, bias));
            }
        }
        Ok(y)
    }

    /// Returns the step that is read at round `i`.
    fn read(&self, i: usize, reverse: bool) -> usize {
        if reverse { self.steps - 1 - i } else { i }
    }

    /// Sets the shapes of the results.
    fn start(&self, out: &mut [Tensor]) {
        if let Some(sequence) = out.first_mut() {
            sequence.reset_f32(&[if self.every { self.steps } else { 1 }, self.batch, self.width]);
        }
        for last in out.iter_mut().skip(1) {
            last.reset_f32(&[self.batch, self.width]);
        }
    }

    /// Writes the hidden state of direction `d` after round `i`.
    fn store(&self, h: &[f32], (d, i): (usize, usize), out: &mut [Tensor]) {
        let is_last = i + 1 == self.steps;
        // The backward half of two directions lies where it read.
        let place = if !self.every { 0 } else { self.read(i, d == 1) };
        if self.every || is_last {
            self.put(h, d, place, out.first_mut());
        }
        if is_last {
            self.put(h, d, 0, out.get_mut(1));
        }
    }

    /// Writes the columns of direction `d` of step `place`.
    fn put(&self, h: &[f32], d: usize, place: usize, to: Option<&mut Tensor>) {
        let Some(to) = to.and_then(Tensor::as_f32_mut) else { return };
        let rows = to[place * self.batch * self.width..].chunks_exact_mut(self.width);
        for (to, h) in rows.zip(h.chunks_exact(self.hidden)) {
            to[d * self.hidden..][..self.hidden].copy_from_slice(h);
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
    let (reverse, mut product) = (reads_backwards(c)?, RowProduct::new(w, s.hidden, s.hidden)?);
    s.start(out);
    for i in 0..s.steps {
        let y = product.run(&h);
        add(y, &x[s.read(i, reverse) * h.len()..]);
        f(y);
        h.copy_from_slice(y);
        s.store(&h, (0, i), out);
    }
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
    let hidden_bias = if after { c.vector("bias", 3 * n)? } else { None };
    let x = s.inputs(c, "weight_ih", if after { &["input_bias"] } else { &["input_bias", "bias"] }, 3)?;
    let mut h = s.initial(c, "initial_h", 0)?;
    let reverse = reads_backwards(c)?;
    let (mut all, mut fresh) = (RowProduct::new(w, 3 * n, n)?, RowProduct::new(&w[n * n..2 * n * n], n, n)?);
    let mut reset = vec![0f32; h.len()];
    s.start(out);
    for i in 0..s.steps {
        let x = &x[s.read(i, reverse) * 3 * h.len()..][..3 * h.len()];
        let p = all.run(&h);
        for ((x, p), (r, h)) in x
            .chunks_exact(3 * n)
            .zip(p.chunks_exact_mut(3 * n))
            .zip(reset.chunks_exact_mut(n).zip(h.chunks_exact(n)))
        {
            if let Some(bias) = hidden_bias {
                add(p, bias);
            }
            add(&mut p[..n], &x[..n]);
            add(&mut p[2 * n..], &x[2 * n..]);
            gate(&mut p[..n]);
            gate(&mut p[2 * n..]);
            // The reset part of the new gate, or the state that it is made from.
            let by = if after { &p[n..2 * n] } else { h };
            r.iter_mut().zip(&p[..n]).zip(by).for_each(|((r, gate), v)| *r = gate * v);
        }
        let new_part: &[f32] = if after { &reset } else { fresh.run(&reset) };
        for ((x, p), (f, h)) in x
            .chunks_exact(3 * n)
            .zip(all.y.chunks_exact_mut(3 * n))
            .zip(new_part.chunks_exact(n).zip(h.chunks_exact_mut(n)))
        {
            let (_, rest) = p.split_at_mut(n);
            let (fresh, update) = rest.split_at_mut(n);
            fresh.copy_from_slice(f);
            add(fresh, &x[n..2 * n]);
            new(fresh);
            for ((h, z), f) in h.iter_mut().zip(update).zip(fresh) {
                *h = (1.0 - *z) * *f + *z * *h;
            }
        }
        s.store(&h, (0, i), out);
    }
    Ok(())
}

/// One direction of an LSTM.
struct LstmDirection<'a> {
    product: RowProduct<'a>,
    /// Inputs of all steps.
    x: Vec<f32>,
    peephole: Option<&'a [f32]>,
    h: Vec<f32>,
    memory: Vec<f32>,
    reverse: bool,
    /// The hidden state after each round, or after the last alone.
    rounds: Vec<f32>, // [steps or 1, batch, hidden]
}

/// Most multiply-adds of a step that one thread computes by itself where others are free: more threads would wait for each other.
/// Not tuned.
const MAX_ALONE: usize = 1 << 18;

/// The functions of an LSTM.
#[derive(Clone, Copy)]
struct LstmFunctions {
    gate: RecurrentActivation,
    cell: RecurrentActivation,
    activate: RecurrentActivation,
    /// Bound of the magnitude of memory.
    clip: f32,
}

impl LstmDirection<'_> {
    /// Computes all steps.
    fn run(&mut self, s: &RecurrentInput<'_>, f: LstmFunctions) {
        let n = s.hidden;
        let mut activated = vec![0f32; n];
        for i in 0..s.steps {
            let x = &self.x[s.read(i, self.reverse) * 4 * self.h.len()..];
            let rows = x.chunks_exact(4 * n).zip(self.product.run(&self.h).chunks_exact_mut(4 * n));
            for ((x, p), (h, m)) in rows.zip(self.h.chunks_exact_mut(n).zip(self.memory.chunks_exact_mut(n)))
            {
                add(p, x);
                if let Some(peephole) = self.peephole {
                    add_product(&mut p[..n], &peephole[..n], m);
                    add_product(&mut p[n..2 * n], &peephole[n..2 * n], m);
                }
                (f.gate)(&mut p[..2 * n]);
                (f.cell)(&mut p[3 * n..]);
                for (k, m) in m.iter_mut().enumerate() {
                    *m = (p[n + k] * *m + p[k] * p[3 * n + k]).max(-f.clip).min(f.clip);
                }
                if let Some(peephole) = self.peephole {
                    add_product(&mut p[2 * n..3 * n], &peephole[2 * n..], m);
                }
                (f.gate)(&mut p[2 * n..3 * n]);
                activated.copy_from_slice(m);
                (f.activate)(&mut activated);
                for ((h, o), a) in h.iter_mut().zip(&p[2 * n..]).zip(&activated) {
                    *h = o * a;
                }
            }
            if s.every || i + 1 == s.steps {
                self.rounds.extend_from_slice(&self.h);
            }
        }
    }
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
    let functions = LstmFunctions {
        gate: activation(c, "recurrent_activation", "sigmoid")?,
        cell: activation(c, "cell_activation", "tanh")?,
        activate: activation(c, "activation", "tanh")?,
        clip: c.get("clip").map(|_| c.float("clip", 0.0)).transpose()?.map_or(f32::INFINITY, f32::abs),
    };
    let n = s.hidden;
    let direction = |d: usize| -> OpResult<LstmDirection<'_>> {
        let name = |base: &str| if d == 1 { format!("{base}_back") } else { base.to_string() };
        let w = RecurrentInput::matrix(c, &name("weight_hh"), [4 * n, n])?;
        Ok(LstmDirection {
            product: RowProduct::new(w, 4 * n, n)?,
            x: s.inputs(c, &name("weight_ih"), &[&name("bias")], 4)?,
            peephole: c.vector(&name("peephole"), 3 * n)?,
            h: s.initial(c, "initial_h", d)?,
            memory: s.initial(c, "initial_c", d)?,
            reverse: reverse || d == 1,
            rounds: Vec::new(),
        })
    };
    let mut all = (0..directions).map(direction).collect::<OpResult<Vec<_>>>()?;
    let pool = Pool::global();
    if pool.threads() <= directions || 4 * n * n * s.batch <= MAX_ALONE {
        // A thread for each direction: its matrix stays in a cache for all steps. Products inside a part run on its thread.
        pool.for_chunks(&mut all, 1, &|_, d| d[0].run(&s, functions));
    } else {
        all.iter_mut().for_each(|d| d.run(&s, functions));
    }
    s.start(out);
    let first = if s.every { 0 } else { s.steps - 1 };
    for (at, d) in all.iter().enumerate() {
        for (i, h) in d.rounds.chunks_exact(d.h.len().max(1)).enumerate() {
            s.store(h, (at, first + i), out);
        }
        s.put(&d.memory, at, 0, out.get_mut(2));
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
