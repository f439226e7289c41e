//! Computes Gemma 4's forward pass, formula by formula.
//!
//! `N(x) = x / sqrt(mean(x^2) + eps)`; a norm's weight multiplies directly. T is the number of tokens of a pass.

use super::input_probe::Probe;
use super::math::{add, add_scaled, attend, gated, gelu_tanh, rms_norm, rope, scaled, softmax, top_k};
use super::reference_model::{Forward, Limits, Pass, RunOptions};
use super::tensor_reader::{Layer, Rows, TensorReader};
use anemoe_convert::Result;
use anemoe_convert::checkpoint::Checkpoint;
use anemoe_convert::models::gemma4::{Gemma4Config, PREFIXES};
use anemoe_convert::models::prefix;
use std::collections::BTreeMap;

/// Keys (after norm and rope) and values (after norm) of a layer: one vector of all heads per position.
#[derive(Default)]
struct ReferenceCache {
    keys: Rows,
    values: Rows,
}

/// Gemma 4 model with the state of its context.
pub struct Gemma4Forward<'a> {
    config: Gemma4Config,
    weights: TensorReader<'a>,
    caches: Vec<ReferenceCache>,
}

impl<'a> Gemma4Forward<'a> {
    /// Makes a model with an empty context. A probe watches products and replaces tensors.
    pub fn open(checkpoint: &'a Checkpoint, probe: Option<&'a Probe>) -> Result<Self> {
        let config = Gemma4Config::parse(&checkpoint.config, &checkpoint.config_path())?;
        let prefix = prefix(checkpoint, &PREFIXES)?;
        let source = checkpoint.source.as_ref();
        let caches = (0..config.num_hidden_layers).map(|_| ReferenceCache::default()).collect();
        Ok(Gemma4Forward { config, weights: TensorReader { source, prefix, probe }, caches })
    }
}

impl Forward for Gemma4Forward<'_> {
    fn limits(&self) -> Limits {
        let c = &self.config;
        Limits { vocab: c.vocab_size, positions: c.max_position_embeddings, layers: c.num_hidden_layers }
    }

    fn reset(&mut self) {
        self.caches.iter_mut().for_each(|c| *c = ReferenceCache::default());
    }

    fn forward(&mut self, tokens: &[u32], options: RunOptions, tick: &mut dyn FnMut()) -> Result<Pass> {
        let (hidden, eps) = (self.config.hidden_size, self.config.rms_norm_eps);
        // h = E[token] * sqrt(hidden_size)
        let embed = self.weights.matrix("embed_tokens.weight", self.config.vocab_size, hidden)?;
        let scale = (hidden as f32).sqrt();
        let mut h = Rows::with_capacity(tokens.len());
        for &token in tokens {
            let mut row = embed.row(token as usize)?;
            row.iter_mut().for_each(|v| *v *= scale);
            h.push(row);
        }
        let mut pass = Pass::default();
        if options.hidden {
            pass.hidden_states.push(h.clone());
        }
        for l in 0..self.config.num_hidden_layers {
            self.attention(l, &mut h)?;
            let chosen = self.feed_forward(l, &mut h)?;
            if options.hidden {
                pass.hidden_states.push(h.clone());
            }
            if options.routing {
                pass.router_index.push(chosen);
            }
            tick();
        }
        // logits = cap * tanh((E (w . N(h))) / cap)
        let norm = self.weights.vector("norm.weight", hidden)?;
        let h: Rows = h.iter().map(|h| scaled(&rms_norm(h, eps), &norm)).collect();
        pass.logits = self.weights.head("embed_tokens.weight", self.config.vocab_size, hidden)?.times(&h)?;
        if let Some(cap) = self.config.final_logit_softcapping {
            pass.logits.iter_mut().flatten().for_each(|v| *v = cap * (*v / cap).tanh());
        }
        Ok(pass)
    }
}

impl Gemma4Forward<'_> {
    /// Computes `h += w_pa . N(Wo attention(w_in . N(h)))`, and appends to the layer's cache.
    fn attention(&mut self, l: usize, h: &mut Rows) -> Result<()> {
        let c = &self.config;
        let (hidden, eps) = (c.hidden_size, c.rms_norm_eps);
        let (heads, kv_heads, d) = (c.num_attention_heads, c.kv_heads(l), c.head_dim(l));
        let layer = Layer { weights: &self.weights, l };
        let norm = layer.vector("input_layernorm.weight", hidden)?;
        let a: Rows = h.iter().map(|h| scaled(&rms_norm(h, eps), &norm)).collect();
        let mut q = layer.matrix("self_attn.q_proj.weight", heads * d, hidden)?.times(&a)?;
        let mut k = layer.matrix("self_attn.k_proj.weight", kv_heads * d, hidden)?.times(&a)?;
        // Values of a full layer are its keys, before norm and rope.
        let mut v = match c.k_eq_v(l) {
            true => k.clone(),
            false => layer.matrix("self_attn.v_proj.weight", kv_heads * d, hidden)?.times(&a)?,
        };

        // q = rope(w_qn . N(q)), k = rope(w_kn . N(k)), v = N(v), each head on its own
        let q_norm = layer.vector("self_attn.q_norm.weight", d)?;
        let k_norm = layer.vector("self_attn.k_norm.weight", d)?;
        let inv_freq = c.inv_freq(l);
        let first = self.caches[l].keys.len();
        for t in 0..a.len() {
            for (x, weight) in [(&mut q[t], &q_norm), (&mut k[t], &k_norm)] {
                for head in x.chunks_exact_mut(d) {
                    head.copy_from_slice(&scaled(&rms_norm(head, eps), weight));
                    rope(head, first + t, &inv_freq);
                }
            }
            for head in v[t].chunks_exact_mut(d) {
                head.copy_from_slice(&rms_norm(head, eps));
            }
        }
        self.caches[l].keys.extend(k);
        self.caches[l].values.extend(v);

        // o = softmax(q k^T + mask) v: the scale is 1, groups of query heads share a key/value head, and a window
        // includes the current token
        let ReferenceCache { keys, values } = &self.caches[l];
        let window = if c.is_full(l) { usize::MAX } else { c.sliding_window };
        let o = attend(&q, keys, values, first, (heads, kv_heads, d), 1.0, window);
        let o = layer.matrix("self_attn.o_proj.weight", hidden, heads * d)?.times(&o)?;
        let norm = layer.vector("post_attention_layernorm.weight", hidden)?;
        for (h, o) in h.iter_mut().zip(&o) {
            add(h, &scaled(&rms_norm(o, eps), &norm));
        }
        Ok(())
    }

    /// Computes `h = (h + w_post . N(m1 + m2)) * layer_scalar`, where `m1` is the dense MLP and `m2` the experts.
    /// Returns the chosen experts of each token, most probable first.
    fn feed_forward(&self, l: usize, h: &mut Rows) -> Result<Vec<Vec<u32>>> {
        let (hidden, eps) = (self.config.hidden_size, self.config.rms_norm_eps);
        let layer = Layer { weights: &self.weights, l };
        let norm = |name: &str, x: &Rows| -> Result<Rows> {
            let weight = layer.vector(name, hidden)?;
            Ok(x.iter().map(|x| scaled(&rms_norm(x, eps), &weight)).collect())
        };
        let m1 = self.dense_mlp(l, &norm("pre_feedforward_layernorm.weight", h)?)?;
        let m1 = norm("post_feedforward_layernorm_1.weight", &m1)?;
        // The router takes the residual stream itself; the experts take it after a norm.
        let routes = self.route(l, h)?;
        let m2 = self.experts(l, &norm("pre_feedforward_layernorm_2.weight", h)?, &routes)?;
        let mut m = norm("post_feedforward_layernorm_2.weight", &m2)?;
        m.iter_mut().zip(&m1).for_each(|(m2, m1)| add(m2, m1));
        let m = norm("post_feedforward_layernorm.weight", &m)?;
        let layer_scalar = layer.vector("layer_scalar", 1)?;
        for (h, m) in h.iter_mut().zip(&m) {
            add(h, m);
            h.iter_mut().for_each(|v| *v *= layer_scalar[0]);
        }
        Ok(routes
            .into_iter()
            .map(|route| route.into_iter().map(|(expert, _)| expert as u32).collect())
            .collect())
    }

    /// Computes `Wdown(gelu_tanh(Wgate x) * (Wup x))`.
    fn dense_mlp(&self, l: usize, x: &Rows) -> Result<Rows> {
        let (hidden, width) = (self.config.hidden_size, self.config.intermediate_size);
        let layer = Layer { weights: &self.weights, l };
        let gate = layer.matrix("mlp.gate_proj.weight", width, hidden)?.times(x)?;
        let up = layer.matrix("mlp.up_proj.weight", width, hidden)?.times(x)?;
        let inner: Rows = gate.iter().zip(&up).map(|(g, u)| gated(gelu_tanh, g, u)).collect();
        layer.matrix("mlp.down_proj.weight", hidden, width)?.times(&inner)
    }

    /// Returns the experts of each token with their weights `p_top / sum(p_top) * per_expert_scale`, most probable first,
    /// where `p = softmax(Wr (N(h) * scale * hidden_size^-0.5))`.
    fn route(&self, l: usize, h: &Rows) -> Result<Vec<Vec<(usize, f32)>>> {
        let c = &self.config;
        let layer = Layer { weights: &self.weights, l };
        let scale = layer.vector("router.scale", c.hidden_size)?;
        let per_expert_scale = layer.vector("router.per_expert_scale", c.num_experts)?;
        let factor = (c.hidden_size as f32).powf(-0.5);
        let r: Rows = h
            .iter()
            .map(|h| scaled(&rms_norm(h, c.rms_norm_eps), &scale).into_iter().map(|v| v * factor).collect())
            .collect();
        let mut p = layer.matrix("router.proj.weight", c.num_experts, c.hidden_size)?.times(&r)?;
        let route = |p: &mut Vec<f32>| {
            softmax(p);
            let top = top_k(p, c.top_k_experts);
            let sum: f32 = top.iter().map(|&e| p[e]).sum();
            top.into_iter().map(|e| (e, p[e] / sum * per_expert_scale[e])).collect()
        };
        Ok(p.iter_mut().map(route).collect())
    }

    /// Computes `sum_e w_e * D_e(gelu_tanh(G_e y) * (U_e y))` over each token's experts. Reads each chosen expert
    /// once.
    fn experts(&self, l: usize, y: &Rows, routes: &[Vec<(usize, f32)>]) -> Result<Rows> {
        let c = &self.config;
        let (hidden, width) = (c.hidden_size, c.moe_intermediate_size);
        let layer = Layer { weights: &self.weights, l };
        let mut tokens_of: BTreeMap<usize, Vec<(usize, f32)>> = BTreeMap::new();
        for (t, route) in routes.iter().enumerate() {
            for &(expert, weight) in route {
                tokens_of.entry(expert).or_default().push((t, weight));
            }
        }
        let mut out = vec![vec![0f32; hidden]; y.len()];
        for (expert, tokens) in tokens_of {
            let x: Rows = tokens.iter().map(|&(t, _)| y[t].clone()).collect();
            // Rows of the gate come before rows of the up projection.
            let gate_up =
                layer.expert("experts.gate_up_proj", c.num_experts, expert, 2 * width, hidden)?.times(&x)?;
            let inner: Rows = gate_up.iter().map(|gu| gated(gelu_tanh, &gu[..width], &gu[width..])).collect();
            let down = layer.expert("experts.down_proj", c.num_experts, expert, hidden, width)?;
            // The probe sees weighted inputs, as the shards' down projection does.
            let scales: Vec<f32> = tokens.iter().map(|&(_, weight)| weight).collect();
            let down = down.times_scaled(&inner, &scales)?;
            for (&(t, weight), down) in tokens.iter().zip(&down) {
                add_scaled(&mut out[t], weight, down);
            }
        }
        Ok(out)
    }
}
