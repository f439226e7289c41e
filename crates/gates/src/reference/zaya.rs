//! Computes ZAYA's forward pass, formula by formula.
//!
//! `N(x) = x / sqrt(mean(x^2) + eps)`; a norm's weight multiplies directly. T is the number of tokens of a pass.

use super::input_probe::Probe;
use super::math::{
    add, add_scaled, attend, gated, gelu_exact, l2_norm, rms_norm, rope, scaled, silu, softmax,
};
use super::reference_model::{Forward, LayerState, Limits, Pass, RunOptions};
use super::tensor_reader::{Layer, Rows, TensorReader};
use anemoe_convert::Result;
use anemoe_convert::checkpoint::Checkpoint;
use anemoe_convert::models::prefix;
use anemoe_convert::models::zaya::{PREFIXES, ZayaConfig};
use anemoe_convert::variants::ZayaSkip;
use std::collections::{BTreeMap, VecDeque};

/// State of a layer.
struct LayerMemory {
    /// Keys after norm, temperature and rope: one vector of all heads per position.
    keys: Rows,
    /// Values: the first half of each vector is of the position itself, the second half of the position before.
    values: Rows,
    /// `[q; k]` before the convolutions, of the last two positions.
    window: VecDeque<Vec<f32>>,
    /// Late half of the values of the last position.
    delayed: Vec<f32>,
}

/// ZAYA model with the state of its context.
pub struct ZayaForward<'a> {
    config: ZayaConfig,
    skip: ZayaSkip,
    weights: TensorReader<'a>,
    memories: Vec<LayerMemory>,
}

fn empty(c: &ZayaConfig) -> Vec<LayerMemory> {
    // Zeros precede the first token before both convolutions, so that the second convolution sees the first one's bias.
    let memory = || LayerMemory {
        keys: Rows::new(),
        values: Rows::new(),
        window: VecDeque::from(vec![vec![0.0; c.q_size() + c.kv_size()]; 2]),
        delayed: vec![0.0; c.kv_size() / 2],
    };
    (0..c.num_hidden_layers).map(|_| memory()).collect()
}

impl<'a> ZayaForward<'a> {
    /// Makes a model with an empty context. A probe watches products and replaces tensors.
    pub fn open(checkpoint: &'a Checkpoint, probe: Option<&'a Probe>) -> Result<Self> {
        let config = ZayaConfig::parse(&checkpoint.config, &checkpoint.config_path())?;
        let prefix = prefix(checkpoint, &PREFIXES)?;
        let weights = TensorReader { source: checkpoint.source.as_ref(), prefix, probe };
        let skip = checkpoint.variants.zaya_skip.unwrap_or_default();
        Ok(ZayaForward { memories: empty(&config), config, skip, weights })
    }
}

impl Forward for ZayaForward<'_> {
    fn limits(&self) -> Limits {
        let c = &self.config;
        Limits { vocab: c.vocab_size, positions: c.max_position_embeddings, layers: c.num_hidden_layers }
    }

    fn reset(&mut self) {
        self.memories = empty(&self.config);
    }

    fn forward(&mut self, tokens: &[u32], options: RunOptions, tick: &mut dyn FnMut()) -> Result<Pass> {
        let (hidden, eps) = (self.config.hidden_size, self.config.rms_norm_eps);
        // s = (E[token] + b_in) * g_in
        let embed = self.weights.matrix("embed_tokens.weight", self.config.vocab_size, hidden)?;
        let bias = self.weights.vector("input_hidden_states_bias", hidden)?;
        let scale = self.weights.vector("input_hidden_states_scale", hidden)?;
        let mut s = Rows::with_capacity(tokens.len());
        for &token in tokens {
            let mut row = embed.row(token as usize)?;
            add(&mut row, &bias);
            s.push(scaled(&row, &scale));
        }
        let mut pass = Pass::default();
        if options.hidden {
            pass.hidden_states.push(s.clone());
        }
        let mut router_states: Option<Rows> = None;
        for l in 0..self.config.num_hidden_layers {
            self.attention(l, &mut s)?;
            let chosen = self.experts(l, &mut s, &mut router_states)?;
            if options.hidden {
                pass.hidden_states.push(s.clone());
            }
            if options.routing {
                pass.router_index.push(chosen);
                pass.router_states.extend(router_states.clone());
            }
            tick();
        }
        // logits = E (w . N(s))
        let norm = self.weights.vector("norm.weight", hidden)?;
        let s: Rows = s.iter().map(|s| scaled(&rms_norm(s, eps), &norm)).collect();
        pass.logits = self.weights.head("embed_tokens.weight", self.config.vocab_size, hidden)?.times(&s)?;
        Ok(pass)
    }

    fn states(&self) -> BTreeMap<&'static str, Vec<LayerState>> {
        let conv = |m: &LayerMemory| {
            // [channels, 2], as in transformers.
            let values = m.window[0].iter().zip(&m.window[1]).flat_map(|(a, b)| [*a, *b]).collect();
            LayerState { shape: vec![m.window[0].len(), 2], values }
        };
        let delayed =
            |m: &LayerMemory| LayerState { shape: vec![m.delayed.len()], values: m.delayed.clone() };
        BTreeMap::from([
            ("cca_conv_state", self.memories.iter().map(conv).collect()),
            ("cca_delayed_v_state", self.memories.iter().map(delayed).collect()),
        ])
    }
}

impl ZayaForward<'_> {
    /// Computes `s = (branch + b) * g + (s + b') * g'` per channel, in place.
    fn merge(&self, l: usize, name: &str, branch: &Rows, s: &mut Rows) -> Result<()> {
        let layer = Layer { weights: &self.weights, l };
        let vector = |part: &str| layer.vector(&format!("{name}.{part}"), self.config.hidden_size);
        let (scale, bias) = (vector("hidden_states_scale")?, vector("hidden_states_bias")?);
        let (own_scale, own_bias) = (vector("residual_scale")?, vector("residual_bias")?);
        for (s, branch) in s.iter_mut().zip(branch) {
            for (i, s) in s.iter_mut().enumerate() {
                *s = (branch[i] + bias[i]) * scale[i] + (*s + own_bias[i]) * own_scale[i];
            }
        }
        Ok(())
    }

    /// Computes compressed convolutional attention, merges it into the residual stream `s`, and appends to the layer's state.
    fn attention(&mut self, l: usize, s: &mut Rows) -> Result<()> {
        let c = &self.config;
        let (hidden, eps, d) = (c.hidden_size, c.rms_norm_eps, c.head_dim);
        let (nq, nk, q_size, kv_size) =
            (c.num_attention_heads, c.num_key_value_heads, c.q_size(), c.kv_size());
        let group = nq / nk;
        let layer = Layer { weights: &self.weights, l };
        let norm = layer.vector("input_layernorm.weight", hidden)?;
        let x: Rows = s.iter().map(|s| scaled(&rms_norm(s, eps), &norm)).collect();
        let matrix =
            |name: &str, rows, cols| layer.matrix(&format!("self_attn.qkv_proj.{name}.weight"), rows, cols);
        let q0 = matrix("q_proj", q_size, hidden)?.times(&x)?;
        let k0 = matrix("k_proj", kv_size, hidden)?.times(&x)?;
        let current = matrix("v_proj_current", kv_size / 2, hidden)?.times(&x)?;
        let delayed = matrix("v_proj_delayed", kv_size / 2, hidden)?.times(&x)?;
        let channels = q_size + kv_size;
        let depthwise = layer.tensor("self_attn.qkv_proj.conv_qk_depthwise.weight", &[channels, 1, 2])?;
        let depthwise_bias = layer.vector("self_attn.qkv_proj.conv_qk_depthwise.bias", channels)?;
        let grouped = layer.tensor("self_attn.qkv_proj.conv_qk_grouped.weight", &[channels, d, 2])?;
        let grouped_bias = layer.vector("self_attn.qkv_proj.conv_qk_grouped.bias", channels)?;
        let temperature = layer.vector("self_attn.qk_norm.temp", nk)?;
        let inv_freq = c.inv_freq();

        let memory = &mut self.memories[l];
        let first = memory.keys.len();
        let mut queries = Rows::with_capacity(x.len());
        for t in 0..x.len() {
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
            let mut q = Vec::with_capacity(q_size);
            for h in 0..nq {
                let raw: Vec<f32> = (0..d).map(|i| mixed[h * d + i] + mean(h, i)).collect();
                let mut head = l2_norm(&raw, (d as f32).sqrt());
                rope(&mut head[..c.rotary_dim], first + t, &inv_freq);
                q.extend(head);
            }
            let mut k = Vec::with_capacity(kv_size);
            for g in 0..nk {
                let over =
                    |i: usize| (g * group..(g + 1) * group).map(|h| mean(h, i)).sum::<f32>() / group as f32;
                let raw: Vec<f32> = (0..d).map(|i| mixed[q_size + g * d + i] + over(i)).collect();
                let mut head = l2_norm(&raw, (d as f32).sqrt() * temperature[g]);
                rope(&mut head[..c.rotary_dim], first + t, &inv_freq);
                k.extend(head);
            }
            let late = std::mem::replace(&mut memory.delayed, delayed[t].clone());
            memory.values.push(current[t].iter().chain(&late).copied().collect());
            memory.keys.push(k);
            queries.push(q);
        }

        // a = Wo softmax(q k^T / sqrt(d)) v
        let LayerMemory { keys, values, .. } = &self.memories[l];
        let scale = (d as f32).sqrt().recip();
        let context = attend(&queries, keys, values, first, (nq, nk, d), scale, usize::MAX);
        let layer = Layer { weights: &self.weights, l };
        let attended = layer.matrix("self_attn.o_proj.weight", hidden, q_size)?.times(&context)?;
        self.merge(l, "post_attention_residual_scale", &attended, s)
    }

    /// Computes the router and the experts, and merges the experts' sum into the residual stream `s`. Returns the
    /// chosen class of each token, and leaves the router's state for the next layer in `states`.
    fn experts(&self, l: usize, s: &mut Rows, states: &mut Option<Rows>) -> Result<Vec<Vec<u32>>> {
        let c = &self.config;
        let (hidden, width, r, eps) =
            (c.hidden_size, c.moe_intermediate_size, c.router_hidden_size, c.rms_norm_eps);
        let layer = Layer { weights: &self.weights, l };
        let norm = layer.vector("post_attention_layernorm.weight", hidden)?;
        let x: Rows = s.iter().map(|s| scaled(&rms_norm(s, eps), &norm)).collect();

        // z = Wd x + b + r_prev * scale; the next layer gets z as r_prev
        let gate = |name: &str| format!("mlp.gate.{name}");
        let biased = |name: &str, rows: usize, cols: usize, x: &Rows| -> Result<Rows> {
            let bias = layer.vector(&gate(&format!("{name}.bias")), rows)?;
            let mut out = layer.matrix(&gate(&format!("{name}.weight")), rows, cols)?.times(x)?;
            out.iter_mut().for_each(|row| add(row, &bias));
            Ok(out)
        };
        let mut z = biased("down_proj", r, hidden, &x)?;
        if let Some(before) = states.as_ref() {
            let scale = layer.vector(&gate("router_states_scale"), r)?;
            z.iter_mut().zip(before).for_each(|(z, before)| add(z, &scaled(before, &scale)));
        }
        *states = Some(z.clone());
        // l = W3 gelu(W2 gelu(W1 (w . N(z)) + b1) + b2)
        let norm = layer.vector(&gate("router_mlp.norm.weight"), r)?;
        let mut n: Rows = z.iter().map(|z| scaled(&rms_norm(z, eps), &norm)).collect();
        for name in ["router_mlp.fc1", "router_mlp.fc2"] {
            n = biased(name, r, r, &n)?;
            n.iter_mut().flatten().for_each(|v| *v = gelu_exact(*v));
        }
        let mut p = layer.matrix(&gate("router_mlp.out_proj.weight"), c.classes(), r)?.times(&n)?;

        // The bias counts for the choice only; the weight is the probability among all classes.
        let bias = layer.vector(&gate("balancing_biases"), c.classes())?;
        let mut tokens_of: BTreeMap<usize, Vec<(usize, f32)>> = BTreeMap::new();
        let mut chosen = Vec::with_capacity(x.len());
        for (t, p) in p.iter_mut().enumerate() {
            softmax(p);
            let score: Vec<f32> = p.iter().zip(&bias).map(|(p, b)| p + b).collect();
            let e = super::math::argmax(&score);
            chosen.push(vec![e as u32]);
            tokens_of.entry(e).or_default().push((t, p[e]));
        }
        let mut out = vec![vec![0f32; hidden]; x.len()];
        for (expert, tokens) in tokens_of {
            if expert == c.num_experts {
                if self.skip == ZayaSkip::Identity {
                    tokens.iter().for_each(|&(t, weight)| add_scaled(&mut out[t], weight, &x[t]));
                }
                continue;
            }
            let input: Rows = tokens.iter().map(|&(t, _)| x[t].clone()).collect();
            // Rows of the gate come before rows of the up projection.
            let gate_up = layer
                .expert("mlp.experts.gate_up_proj", c.num_experts, expert, 2 * width, hidden)?
                .times(&input)?;
            let inner: Rows = gate_up.iter().map(|gu| gated(silu, &gu[..width], &gu[width..])).collect();
            let down = layer.expert("mlp.experts.down_proj", c.num_experts, expert, hidden, width)?;
            // The probe sees weighted inputs, as the shards' down projection does.
            let scales: Vec<f32> = tokens.iter().map(|&(_, weight)| weight).collect();
            let down = down.times_scaled(&inner, &scales)?;
            for (&(t, weight), down) in tokens.iter().zip(&down) {
                add_scaled(&mut out[t], weight, down);
            }
        }
        self.merge(l, "post_mlp_residual_scale", &out, s)?;
        Ok(chosen)
    }
}
