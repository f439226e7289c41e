//! Computes a decoder's forward pass from its description, formula by formula.
//!
//! `N(x) = x / sqrt(mean(x^2) + eps)`; a norm's weight w multiplies as `offset + w`. T is the number of tokens of a
//! pass.

use super::input_probe::Probe;
use super::math::{
    add, add_scaled, argmax, attend, gated, gelu_exact, l2_norm, rms_norm, rope, scaled, softmax, top_k,
};
use super::tensor_reader::{HEAD, Rows, StreamedMatrix, TensorReader, TokenSet};
use anemoe_convert::checkpoint::{Checkpoint, TensorSource};
use anemoe_convert::lower::Activation;
use anemoe_convert::models::{
    self, Attention, Decoder, ExpertLayer, QkvProjection, Residual, RouterKind, TensorRow, ValueSource,
};
use anemoe_convert::{Error, Result};
use std::collections::{BTreeMap, VecDeque};

/// Reason why an assistant has no reference run.
const ASSISTANT: &str =
    "an assistant runs on the keys and values of the model that it drafts for, and not by itself";

/// Values that a reference run records besides logits and tokens.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct RunOptions {
    /// True to record the residual stream of the prompt, before the first layer and after each layer.
    pub hidden: bool,
    /// True to record the experts that each layer chose for each prompt token, and the router states between layers.
    pub routing: bool,
}

/// Results of a pass.
#[derive(Clone, Debug, Default)]
pub struct Pass {
    /// Logits, `[T, vocab_size]`.
    pub logits: Rows,
    /// Residual streams, `[layers + 1, T, hidden_size]`; empty where not recorded.
    pub hidden_states: Vec<Rows>,
    /// Chosen experts, `[layers, T, top_k]`; empty where not recorded.
    pub router_index: Vec<Vec<Vec<u32>>>,
    /// Router states, `[layers, T, router_hidden_size]`; empty where not recorded, or where routers have no state.
    pub router_states: Vec<Rows>,
}

/// State of a layer.
#[derive(Default)]
pub(super) struct LayerMemory {
    /// Keys after norm and rope: one vector of all heads per position.
    keys: Rows,
    /// Values, likewise.
    values: Rows,
    /// `[q; k]` before the convolutions, of the last two positions; empty where there are no convolutions.
    pub window: VecDeque<Vec<f32>>,
    /// Late half of the values of the last position.
    pub delayed: Vec<f32>,
}

/// Decoder with the state of its context.
pub struct DecoderForward<'a> {
    /// Description of the decoder.
    pub decoder: Decoder,
    /// Tensors of the description, by layer and role.
    rows: BTreeMap<(Option<usize>, &'static str), TensorRow>,
    weights: TensorReader<'a>,
    /// State by layer and window.
    pub(super) memories: Vec<Vec<LayerMemory>>,
    /// Tokens of each window in the pass that is running, which lie one behind the other.
    windows: Vec<usize>,
}

/// Experts of each token, most probable first, with their weights.
type Routes = Vec<Vec<(usize, f32)>>;

fn empty(a: &Attention) -> LayerMemory {
    match a.projection {
        QkvProjection::Direct { .. } | QkvProjection::Lent => LayerMemory::default(),
        // Zeros precede the first token before both convolutions, so that the second convolution sees the first one's
        // bias.
        QkvProjection::Convolved => LayerMemory {
            window: VecDeque::from(vec![vec![0.0; a.q_size() + a.kv_size()]; 2]),
            delayed: vec![0.0; a.kv_size() / 2],
            ..LayerMemory::default()
        },
    }
}

impl<'a> DecoderForward<'a> {
    /// Makes a model with an empty context. A probe watches products and replaces tensors. Without one, a rotated
    /// checkpoint runs on its weights before the rotation, which compute the same and are read faster.
    pub fn open(checkpoint: &'a Checkpoint, probe: Option<&'a Probe>) -> Result<Self> {
        let mut decoder = models::describe(checkpoint)?;
        models::check(checkpoint, &decoder)?;
        let unrotated = checkpoint.source.unrotated().filter(|_| probe.is_none());
        decoder.is_rotated &= unrotated.is_none();
        DecoderForward::over(decoder, checkpoint, unrotated.unwrap_or(checkpoint.source.as_ref()), probe)
    }

    /// Makes a model of a description with an empty context.
    pub fn of(decoder: Decoder, checkpoint: &'a Checkpoint, probe: Option<&'a Probe>) -> Result<Self> {
        DecoderForward::over(decoder, checkpoint, checkpoint.source.as_ref(), probe)
    }

    fn over(
        decoder: Decoder,
        checkpoint: &Checkpoint,
        source: &'a dyn TensorSource,
        probe: Option<&'a Probe>,
    ) -> Result<Self> {
        if decoder.assistant.is_some() {
            return Err(Error::usage(ASSISTANT));
        }
        let prefix = models::prefix(checkpoint, &decoder)?;
        let weights = TensorReader { source, prefix, probe };
        let rows = decoder.tensors().into_iter().map(|row| ((row.layer, row.role), row)).collect();
        let mut model = DecoderForward { memories: Vec::new(), windows: Vec::new(), decoder, rows, weights };
        model.reset();
        Ok(model)
    }

    /// Runs one layer on windows of these lengths, each from an empty context. Returns the experts that each token chose,
    /// where the layer has some.
    pub fn layer_of_windows(
        &mut self,
        l: usize,
        windows: &[usize],
        s: &mut Rows,
        states: &mut Option<Rows>,
    ) -> Result<Option<Vec<Vec<u32>>>> {
        self.windows = windows.to_vec();
        self.memories[l] = windows.iter().map(|_| empty(&self.decoder.layers[l].attention)).collect();
        self.attention(l, s)?;
        self.memories[l].clear();
        self.feed_forward(l, s, states)
    }

    /// Computes the head's input from the stream behind the last layer.
    pub fn head_input(&self, s: &Rows) -> Result<Rows> {
        self.norm(None, "final_norm", s)
    }

    /// Returns the logits `[T, vocab]` of the head's inputs.
    pub fn logits(&self, x: &Rows) -> Result<Rows> {
        let d = &self.decoder;
        let head = self.row(None, if d.has_own_head() { "head" } else { "embedding" })?;
        let mut logits = self.weights.matrix(head, HEAD, 0)?.times(x)?;
        if let Some(cap) = d.softcap {
            logits.iter_mut().flatten().for_each(|v| *v = cap * (*v / cap).tanh());
        }
        Ok(logits)
    }

    /// Returns the position of each token of the pass in its window.
    fn positions(&self, l: usize) -> Vec<usize> {
        let windows = self.memories[l].iter().zip(&self.windows);
        windows.flat_map(|(m, n)| m.keys.len()..m.keys.len() + n).collect()
    }

    fn row<'r>(&'r self, l: Option<usize>, role: &'r str) -> Result<&'r TensorRow> {
        let found = self.rows.get(&(l, role));
        found.ok_or_else(|| Error::usage(format!("the description has no tensor of the role `{role}`")))
    }

    /// Reads the tensor of a role.
    fn tensor(&self, l: Option<usize>, role: &str) -> Result<Vec<f32>> {
        self.weights.tensor(self.row(l, role)?)
    }

    /// Reads the tensor of a role that not every decoder has.
    fn optional(&self, l: usize, role: &str) -> Result<Option<Vec<f32>>> {
        self.rows.get(&(Some(l), role)).map(|row| self.weights.tensor(row)).transpose()
    }

    /// Opens a matrix, or matrix `index` of a stack.
    fn matrix(&self, l: Option<usize>, role: &str, index: usize) -> Result<StreamedMatrix<'a>> {
        let row = self.row(l, role)?;
        self.weights.matrix(row, &row.name, index)
    }

    /// Computes `W x`, plus the bias `ROLE_bias` where the decoder has it.
    fn product(&self, l: usize, role: &str, x: &Rows) -> Result<Rows> {
        let mut out = self.matrix(Some(l), role, 0)?.times(x)?;
        if let Some(bias) = self.optional(l, &format!("{role}_bias"))? {
            out.iter_mut().for_each(|row| add(row, &bias));
        }
        Ok(out)
    }

    /// Computes `(offset + w) . N(x)`.
    fn norm(&self, l: Option<usize>, role: &str, x: &Rows) -> Result<Rows> {
        let weight = self.with_offset(self.tensor(l, role)?);
        Ok(x.iter().map(|x| scaled(&rms_norm(x, self.decoder.eps), &weight)).collect())
    }

    fn with_offset(&self, norm: Vec<f32>) -> Vec<f32> {
        norm.into_iter().map(|w| w + self.decoder.norm_offset).collect()
    }

    /// Norms a branch's result where the decoder has this norm.
    fn after(&self, l: usize, role: &str, x: Rows) -> Result<Rows> {
        if self.rows.contains_key(&(Some(l), role)) { self.norm(Some(l), role, &x) } else { Ok(x) }
    }

    /// Computes `s + branch`, or `(branch + b) g + (s + b') g'` per channel, in place.
    fn merge(&self, l: usize, residual: &str, branch: &Rows, s: &mut Rows) -> Result<()> {
        if self.decoder.residual != Residual::Affine {
            s.iter_mut().zip(branch).for_each(|(s, branch)| add(s, branch));
            return Ok(());
        }
        let vector = |part: &str| self.tensor(Some(l), &format!("{residual}_{part}"));
        let (scale, bias) = (vector("branch_scale")?, vector("branch_bias")?);
        let (own_scale, own_bias) = (vector("stream_scale")?, vector("stream_bias")?);
        for (s, branch) in s.iter_mut().zip(branch) {
            for (i, s) in s.iter_mut().enumerate() {
                *s = (branch[i] + bias[i]) * scale[i] + (*s + own_bias[i]) * own_scale[i];
            }
        }
        Ok(())
    }

    /// Returns the stream before the first layer.
    pub fn embed(&self, tokens: &[u32]) -> Result<Rows> {
        let d = &self.decoder;
        let embed = self.matrix(None, "embedding", 0)?;
        let mut s = Rows::with_capacity(tokens.len());
        for &token in tokens {
            let mut row = embed.row(token as usize)?;
            row.iter_mut().for_each(|v| *v *= d.embedding_scale);
            s.push(row);
        }
        if d.residual == Residual::Affine {
            let (bias, scale) = (self.tensor(None, "input_bias")?, self.tensor(None, "input_scale")?);
            for row in &mut s {
                add(row, &bias);
                *row = scaled(row, &scale);
            }
        }
        Ok(s)
    }
}

impl DecoderForward<'_> {
    /// Empties the context.
    pub fn reset(&mut self) {
        self.memories = self.decoder.layers.iter().map(|l| vec![empty(&l.attention)]).collect();
    }

    /// Appends tokens to the context; `tick` is called after each layer.
    ///
    /// # Errors
    /// A weight cannot be read, is not finite, or has another shape than the configuration says.
    pub fn forward(&mut self, tokens: &[u32], options: RunOptions, tick: &mut dyn FnMut()) -> Result<Pass> {
        self.windows = vec![tokens.len()];
        let mut s = self.embed(tokens)?;
        let mut pass = Pass::default();
        if options.hidden {
            pass.hidden_states.push(s.clone());
        }
        let mut router_states: Option<Rows> = None;
        for l in 0..self.decoder.layers.len() {
            self.attention(l, &mut s)?;
            let chosen = self.feed_forward(l, &mut s, &mut router_states)?;
            if options.hidden {
                pass.hidden_states.push(s.clone());
            }
            if options.routing {
                pass.router_index.extend(chosen);
                pass.router_states.extend(router_states.clone());
            }
            tick();
        }
        pass.logits = self.logits(&self.head_input(&s)?)?;
        Ok(pass)
    }

    /// Adds attention's branch to the stream `s`, and appends to the layer's state.
    fn attention(&mut self, l: usize, s: &mut Rows) -> Result<()> {
        let a = self.decoder.layers[l].attention.clone();
        let x = self.norm(Some(l), "input_norm", s)?;
        let queries = match a.projection {
            QkvProjection::Direct { values, .. } => self.direct(l, &a, &x, values)?,
            QkvProjection::Convolved => self.convolved(l, &a, &x)?,
            QkvProjection::Lent => return Err(Error::usage(ASSISTANT)),
        };
        // o = Wo softmax(scale q k^T + mask) v: groups of query heads share a key/value head, and a window includes
        // the current token
        let sinks = self.optional(l, "sinks")?;
        let (mut o, mut rest) = (Rows::with_capacity(x.len()), queries.as_slice());
        for (LayerMemory { keys, values, .. }, n) in self.memories[l].iter().zip(&self.windows) {
            let (own, behind) = rest.split_at(*n);
            o.extend(attend(own, (keys, values), keys.len() - n, &a, sinks.as_deref()));
            rest = behind;
        }
        let o = self.after(l, "post_attention_norm", self.product(l, "o_proj", &o)?)?;
        self.merge(l, "attention_residual", &o, s)
    }

    /// Appends keys and values, which are products of the normalized stream, to the layer's state; returns queries.
    fn direct(&mut self, l: usize, a: &Attention, x: &Rows, values: ValueSource) -> Result<Rows> {
        let (eps, d) = (self.decoder.eps, a.head_dim);
        let (mut q, mut k) = (self.product(l, "q_proj", x)?, self.product(l, "k_proj", x)?);
        let mut v = match values {
            ValueSource::KeysNormed => k.clone(),
            ValueSource::Own | ValueSource::OwnNormed => self.product(l, "v_proj", x)?,
        };
        let positions = self.positions(l);
        for (x, role) in [(&mut q, "q_norm"), (&mut k, "k_norm")] {
            // The norm is over as many channels as it has weights: a head, or the whole row.
            let weight = self.optional(l, role)?.map(|weight| self.with_offset(weight));
            for (position, row) in positions.iter().zip(x.iter_mut()) {
                if let Some(weight) = &weight {
                    for part in row.chunks_exact_mut(weight.len()) {
                        part.copy_from_slice(&scaled(&rms_norm(part, eps), weight));
                    }
                }
                for head in row.chunks_exact_mut(d) {
                    rope(&mut head[..a.rope.width], *position, &a.rope.inv_freq);
                }
            }
        }
        if values != ValueSource::Own {
            for head in v.iter_mut().flat_map(|row| row.chunks_exact_mut(d)) {
                head.copy_from_slice(&rms_norm(head, eps));
            }
        }
        let (mut k, mut v) = (k.into_iter(), v.into_iter());
        for (memory, n) in self.memories[l].iter_mut().zip(&self.windows) {
            memory.keys.extend(k.by_ref().take(*n));
            memory.values.extend(v.by_ref().take(*n));
        }
        Ok(q)
    }

    /// Computes queries, keys and values by products and two short convolutions; appends keys and values to the
    /// layer's state, and returns queries.
    fn convolved(&mut self, l: usize, a: &Attention, x: &Rows) -> Result<Rows> {
        let (d, nq, nk, q_size) = (a.head_dim, a.heads, a.kv_heads, a.q_size());
        let (group, channels) = (nq / nk, q_size + a.kv_size());
        let (q0, k0) = (self.product(l, "q_proj", x)?, self.product(l, "k_proj", x)?);
        let (current, delayed) =
            (self.product(l, "v_proj_current", x)?, self.product(l, "v_proj_delayed", x)?);
        let tensor = |role: &str| self.tensor(Some(l), role);
        let (depthwise, depthwise_bias) = (tensor("conv_depthwise")?, tensor("conv_depthwise_bias")?);
        let (grouped, grouped_bias) = (tensor("conv_grouped")?, tensor("conv_grouped_bias")?);
        let temperature = tensor("temperature")?;
        let positions = self.positions(l);
        let window_of = self.windows.iter().enumerate().flat_map(|(i, n)| std::iter::repeat_n(i, *n));
        let mut queries = Rows::with_capacity(x.len());
        for (t, window) in window_of.enumerate() {
            let memory = &mut self.memories[l][window];
            let u: Vec<f32> = q0[t].iter().chain(&k0[t]).copied().collect();
            // d_t = w0 u_{t-1} + w1 u_t + b
            let conv = |before: &[f32], now: &[f32]| -> Vec<f32> {
                let at = |i: usize| depthwise[2 * i] * before[i] + depthwise[2 * i + 1] * now[i];
                (0..channels).map(|i| at(i) + depthwise_bias[i]).collect()
            };
            let (d_before, d_now) = (conv(&memory.window[0], &memory.window[1]), conv(&memory.window[1], &u));
            // c_t = G0 d_{t-1} + G1 d_t + b, within each head
            let mixed: Vec<f32> = (0..channels)
                .map(|i| {
                    let head = i / d * d;
                    let row = &grouped[i * d * 2..(i + 1) * d * 2];
                    let pairs = row.chunks_exact(2).zip(d_before[head..].iter().zip(&d_now[head..]));
                    pairs.fold(grouped_bias[i], |sum, (w, (before, now))| sum + w[0] * before + w[1] * now)
                })
                .collect();
            memory.window.pop_front();
            memory.window.push_back(u);

            // q = sqrt(d) (c + m) / |c + m|, m = (q0 + k0 of its group) / 2; for k, the mean of m over the group's queries
            let mean = |h: usize, i: usize| (q0[t][h * d + i] + k0[t][h / group * d + i]) / 2.0;
            let head = |raw: Vec<f32>, length: f32| {
                let mut head = l2_norm(&raw, length);
                rope(&mut head[..a.rope.width], positions[t], &a.rope.inv_freq);
                head
            };
            let query =
                |h: usize| head((0..d).map(|i| mixed[h * d + i] + mean(h, i)).collect(), (d as f32).sqrt());
            let key = |g: usize| {
                let over =
                    |i: usize| (g * group..(g + 1) * group).map(|h| mean(h, i)).sum::<f32>() / group as f32;
                let raw = (0..d).map(|i| mixed[q_size + g * d + i] + over(i)).collect();
                head(raw, (d as f32).sqrt() * temperature[g])
            };
            let late = std::mem::replace(&mut memory.delayed, delayed[t].clone());
            memory.values.push(current[t].iter().chain(&late).copied().collect());
            memory.keys.push((0..nk).flat_map(key).collect());
            queries.push((0..nq).flat_map(query).collect());
        }
        Ok(queries)
    }

    /// Adds the branch of the dense MLP and the experts to the stream `s`. Returns the chosen experts of each token
    /// where the layer has some, and leaves the router's state for the next layer in `states`.
    fn feed_forward(
        &self,
        l: usize,
        s: &mut Rows,
        states: &mut Option<Rows>,
    ) -> Result<Option<Vec<Vec<u32>>>> {
        let layer = &self.decoder.layers[l];
        let (mut sum, mut chosen) = (None, None);
        if layer.dense.is_some() {
            let x = self.norm(Some(l), "dense_input", s)?;
            sum = Some(self.after(l, "dense_norm", self.dense_mlp(l, layer.activation, &x)?)?);
        }
        if let Some(e) = &layer.experts {
            let x = self.norm(Some(l), "expert_input", s)?;
            let routes = match e.router {
                RouterKind::Linear { renormalizes, .. } => self.route(l, e.active, renormalizes, s, &x)?,
                RouterKind::Network { .. } => self.route_by_network(l, &x, states)?,
            };
            let mut own =
                self.after(l, "experts_norm", self.experts(l, e, layer.activation, &x, &routes)?)?;
            if let Some(dense) = &sum {
                own.iter_mut().zip(dense).for_each(|(own, dense)| add(own, dense));
            }
            sum = Some(own);
            let ids = |route: &Vec<(usize, f32)>| route.iter().map(|(expert, _)| *expert as u32).collect();
            chosen = Some(routes.iter().map(ids).collect());
        }
        let sum = self.after(l, "post_feedforward_norm", sum.unwrap_or_default())?;
        self.merge(l, "moe_residual", &sum, s)?;
        if let Some(scalar) = self.optional(l, "hidden_out")? {
            s.iter_mut().flatten().for_each(|v| *v *= scalar[0]);
        }
        Ok(chosen)
    }

    /// Computes `Wdown(activation(Wgate x) * (Wup x))`.
    fn dense_mlp(&self, l: usize, activation: Activation, x: &Rows) -> Result<Rows> {
        let (gate, up) = (self.product(l, "gate_proj", x)?, self.product(l, "up_proj", x)?);
        let inner = gate.iter().zip(&up).map(|(g, u)| gated(activation, g, u)).collect();
        self.product(l, "down_proj", &inner)
    }

    /// Returns the routes of a router of one matrix, on the experts' input `x` or on the stream `s` itself.
    fn route(&self, l: usize, active: usize, renormalizes: bool, s: &Rows, x: &Rows) -> Result<Routes> {
        let mut p = match self.optional(l, "router_input")? {
            None => self.product(l, "router_logits", x)?,
            Some(scale) => {
                let factor = (self.decoder.hidden as f32).powf(-0.5);
                let input = |s: &Vec<f32>| -> Vec<f32> {
                    scaled(&rms_norm(s, self.decoder.eps), &scale).into_iter().map(|v| v * factor).collect()
                };
                self.product(l, "router_logits", &s.iter().map(input).collect())?
            }
        };
        let factors = self.optional(l, "expert_scale")?;
        // w = p_top / sum(p_top) * factor, or w = p_top
        let route = |p: &mut Vec<f32>| {
            softmax(p);
            let top = top_k(p, active);
            let sum: f32 = if renormalizes { top.iter().map(|&e| p[e]).sum() } else { 1.0 };
            let factor = |e: usize| factors.as_ref().map_or(1.0, |factors| factors[e]);
            top.into_iter().map(|e| (e, p[e] / sum * factor(e))).collect()
        };
        Ok(p.iter_mut().map(route).collect())
    }

    /// Returns the routes of a router that is a network with a state, and replaces the state.
    fn route_by_network(&self, l: usize, x: &Rows, states: &mut Option<Rows>) -> Result<Routes> {
        // z = Wd x + b + r_prev * scale; the next layer gets z as r_prev
        let mut z = self.product(l, "router_down", x)?;
        if let Some(before) = states.as_ref() {
            let scale = self.tensor(Some(l), "router_state_scale")?;
            z.iter_mut().zip(before).for_each(|(z, before)| add(z, &scaled(before, &scale)));
        }
        *states = Some(z.clone());
        // l = W3 gelu(W2 gelu(W1 (w . N(z)) + b1) + b2)
        let mut n = self.norm(Some(l), "router_norm", &z)?;
        for role in ["router_fc1", "router_fc2"] {
            n = self.product(l, role, &n)?;
            n.iter_mut().flatten().for_each(|v| *v = gelu_exact(*v));
        }
        let mut p = self.product(l, "router_logits", &n)?;
        // The bias counts for the choice only; the weight is the probability among all classes.
        let bias = self.tensor(Some(l), "balancing_biases")?;
        let route = |p: &mut Vec<f32>| {
            softmax(p);
            let score: Vec<f32> = p.iter().zip(&bias).map(|(p, b)| p + b).collect();
            let best = argmax(&score);
            vec![(best, p[best])]
        };
        Ok(p.iter_mut().map(route).collect())
    }

    /// Computes `sum_e w_e * (D_e(activation(G_e y) * (U_e y)) + b_e)` over each token's experts. Reads each chosen
    /// expert once.
    fn experts(
        &self,
        l: usize,
        e: &ExpertLayer,
        activation: Activation,
        y: &Rows,
        routes: &Routes,
    ) -> Result<Rows> {
        let (hidden, width) = (self.decoder.hidden, e.width);
        let mut tokens_of: BTreeMap<usize, Vec<(usize, f32)>> = BTreeMap::new();
        for (t, route) in routes.iter().enumerate() {
            for &(expert, weight) in route {
                tokens_of.entry(expert).or_default().push((t, weight));
            }
        }
        let (inner_biases, biases) = (self.optional(l, "gate_up_bias")?, self.optional(l, "down_bias")?);
        let add_bias = |rows: &mut Rows, biases: &Option<Vec<f32>>, expert: usize| {
            let own = biases.as_ref().and_then(|all| all.chunks_exact(all.len() / e.count).nth(expert));
            own.into_iter().for_each(|own| rows.iter_mut().for_each(|row| add(row, own)));
        };
        let mut out = vec![vec![0f32; hidden]; y.len()];
        if let Some(tokens) = tokens_of.remove(&e.count)
            && matches!(e.router, RouterKind::Network { passes_input: true, .. })
        {
            tokens.iter().for_each(|&(t, weight)| add_scaled(&mut out[t], weight, &y[t]));
        }
        let sets = self.weights.token_sets(tokens_of, e.count, y.len());
        let stack = |role: &str| -> Result<Vec<StreamedMatrix<'_>>> {
            sets.iter().map(|set| self.matrix(Some(l), role, set.expert)).collect()
        };
        // Rows of the gate come before rows of the up projection.
        let gate_up = stack("gate_up")?;
        let x = |set: &TokenSet| -> Vec<&[f32]> { set.tokens.iter().map(|&(t, _)| &y[t][..]).collect() };
        self.weights.share(gate_up.iter().zip(&sets).map(|(m, set)| m.pairs(x(set), set.pairs, None)))?;
        let mut inner = Vec::with_capacity(sets.len());
        for (matrix, set) in gate_up.iter().zip(&sets) {
            let mut gate_up = matrix.times_set(x(set), set.pairs, None)?;
            add_bias(&mut gate_up, &inner_biases, set.expert);
            let own = gate_up.iter().map(|gu| gated(activation, &gu[..width], &gu[width..]));
            inner.push(own.collect::<Rows>());
        }
        let down = stack("down")?;
        // The probe sees weighted inputs, as the shards' down projection does.
        let scales: Vec<Vec<f32>> =
            sets.iter().map(|set| set.tokens.iter().map(|&(_, weight)| weight).collect()).collect();
        let z = |i: usize| -> Vec<&[f32]> { inner[i].iter().map(Vec::as_slice).collect() };
        let pairs = |i: usize| down[i].pairs(z(i), sets[i].pairs, Some(&scales[i]));
        self.weights.share((0..sets.len()).map(pairs))?;
        for (i, set) in sets.iter().enumerate() {
            let mut down = down[i].times_set(z(i), set.pairs, Some(&scales[i]))?;
            add_bias(&mut down, &biases, set.expert);
            for (&(t, weight), down) in set.own().map(|j| (&set.tokens[j], &down[j])) {
                add_scaled(&mut out[t], weight, down);
            }
        }
        Ok(out)
    }
}
