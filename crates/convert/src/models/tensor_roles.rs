//! Every tensor of a decoder, by its role.

use super::decoder::{
    Attention, Decoder, HeadNorm, Layer, Norms, QkvProjection, Residual, RouterKind, ValueSource,
};
use super::tensor_table::{HEAD, ModelPart, TOKEN_ORDERING, TensorRow};

/// Names of tensors by role, in a layer below `layers.N.`. A family that has other names says so in
/// [`Decoder::names`].
const NAMES: &[(&str, &str)] = &[
    ("embedding", "embed_tokens.weight"),
    ("final_norm", "norm.weight"),
    ("head", HEAD),
    ("input_norm", "input_layernorm.weight"),
    ("q_proj", "self_attn.q_proj.weight"),
    ("k_proj", "self_attn.k_proj.weight"),
    ("v_proj", "self_attn.v_proj.weight"),
    ("o_proj", "self_attn.o_proj.weight"),
    ("q_norm", "self_attn.q_norm.weight"),
    ("k_norm", "self_attn.k_norm.weight"),
    ("sinks", "self_attn.sinks"),
    ("dense_input", "post_attention_layernorm.weight"),
    ("gate_proj", "mlp.gate_proj.weight"),
    ("up_proj", "mlp.up_proj.weight"),
    ("down_proj", "mlp.down_proj.weight"),
    ("expert_input", "post_attention_layernorm.weight"),
    ("router_logits", "mlp.gate.weight"),
    ("gate_up", "mlp.experts.gate_up_proj"),
    ("down", "mlp.experts.down_proj"),
    ("pre_projection", "pre_projection.weight"),
    ("post_projection", "post_projection.weight"),
    ("centroids", "masked_embedding.centroids.weight"),
    (TOKEN_ORDERING, "masked_embedding.token_ordering"),
];

/// Returns the name of a tensor of this role. Without a name of its own, a bias `ROLE_bias` is beside the weight of ROLE. A
/// role without a name, a fault of the description, is its own name.
fn name_of(names: &'static [(&'static str, &'static str)], role: &str) -> String {
    let find = |role: &str| names.iter().chain(NAMES).find(|(r, _)| *r == role).map(|(_, name)| *name);
    let beside = |weight: &str| match weight.strip_suffix(".weight") {
        Some(stem) => format!("{stem}.bias"),
        None => format!("{weight}_bias"),
    };
    let own = find(role).map(str::to_string);
    own.or_else(|| role.strip_suffix("_bias").and_then(find).map(beside)).unwrap_or_else(|| role.into())
}

/// Roles of the vectors of a residual: of the branch scale and bias, of the stream scale and bias.
pub const AFFINE: [&str; 4] = ["branch_scale", "branch_bias", "stream_scale", "stream_bias"];
/// Roles of the two residuals of a layer with [`Residual::Affine`], each with its vectors in the order of [`AFFINE`].
const RESIDUALS: [[&str; 4]; 2] = [
    [
        "attention_residual_branch_scale",
        "attention_residual_branch_bias",
        "attention_residual_stream_scale",
        "attention_residual_stream_bias",
    ],
    [
        "moe_residual_branch_scale",
        "moe_residual_branch_bias",
        "moe_residual_stream_scale",
        "moe_residual_stream_bias",
    ],
];

/// Rows of a decoder's tensors: those of a layer, or those outside of layers.
struct TensorRows<'a> {
    decoder: &'a Decoder,
    layer: Option<usize>,
    rows: &'a mut Vec<TensorRow>,
}

impl TensorRows<'_> {
    /// Adds a row where the network has the tensor.
    fn add(&mut self, is_there: bool, part: ModelPart, role: &'static str, shape: &[usize]) {
        if is_there {
            let (name, layer) = (self.decoder.tensor(self.layer, role), self.layer);
            let shape = shape.iter().map(|&n| n as u64).collect();
            self.rows.push(TensorRow { role, name, shape, part, layer });
        }
    }

    /// Adds the rows of attention, in the order in which packages store its weights.
    fn add_attention(&mut self, a: &Attention) {
        use ModelPart::{Attention, Norms as Norm};
        let (h, d, q, kv) = (self.decoder.hidden, a.head_dim, a.q_size(), a.kv_size());
        // (norm of queries, norm of keys, values of their own, biases)
        let (q_norm, k_norm, has_values, has_bias) = match a.projection {
            QkvProjection::Direct { norm, values, has_bias } => {
                (norm, norm, values != ValueSource::KeysNormed, has_bias)
            }
            QkvProjection::Convolved => (HeadNorm::None, HeadNorm::None, false, false),
            QkvProjection::Lent => (HeadNorm::PerHead, HeadNorm::None, false, false),
        };
        let normed = |norm: HeadNorm, row: usize| if norm == HeadNorm::PerHead { d } else { row };
        self.add(true, Norm, "input_norm", &[h]);
        self.add(true, Attention, "q_proj", &[q, h]);
        self.add(a.projection != QkvProjection::Lent, Attention, "k_proj", &[kv, h]);
        self.add(has_values, Attention, "v_proj", &[kv, h]);
        self.add(q_norm != HeadNorm::None, Attention, "q_norm", &[normed(q_norm, q)]);
        self.add(k_norm != HeadNorm::None, Attention, "k_norm", &[normed(k_norm, kv)]);
        self.add(has_bias, Attention, "q_proj_bias", &[q]);
        self.add(has_bias, Attention, "k_proj_bias", &[kv]);
        self.add(has_bias && has_values, Attention, "v_proj_bias", &[kv]);
        if a.projection == QkvProjection::Convolved {
            self.add(true, Attention, "v_proj_current", &[kv / 2, h]);
            self.add(true, Attention, "v_proj_delayed", &[kv / 2, h]);
            self.add(true, Attention, "conv_depthwise", &[q + kv, 1, 2]);
            self.add(true, Attention, "conv_depthwise_bias", &[q + kv]);
            self.add(true, Attention, "conv_grouped", &[q + kv, d, 2]);
            self.add(true, Attention, "conv_grouped_bias", &[q + kv]);
            self.add(true, Attention, "temperature", &[a.kv_heads]);
        }
        self.add(true, Attention, "o_proj", &[h, q]);
        self.add(a.has_output_bias, Attention, "o_proj_bias", &[h]);
        self.add(a.has_sinks, Attention, "sinks", &[a.heads]);
        self.add(self.decoder.norms == Norms::Around, Norm, "post_attention_norm", &[h]);
        self.add_residual(0);
    }

    /// Adds the vectors of a layer's first or second residual.
    fn add_residual(&mut self, half: usize) {
        let is_affine = self.decoder.residual == Residual::Affine;
        RESIDUALS[half]
            .iter()
            .for_each(|role| self.add(is_affine, ModelPart::Norms, role, &[self.decoder.hidden]));
    }

    fn add_feed_forward(&mut self, l: usize, layer: &Layer) {
        use ModelPart::{DenseMlp, Experts, Norms as Norm, Router as Route};
        let (d, h) = (self.decoder, self.decoder.hidden);
        let is_around = d.norms == Norms::Around;
        let has_both = layer.dense.is_some() && layer.experts.is_some();
        if let Some(width) = layer.dense {
            self.add(true, Norm, "dense_input", &[h]);
            self.add(true, DenseMlp, "gate_proj", &[width, h]);
            self.add(true, DenseMlp, "up_proj", &[width, h]);
            self.add(true, DenseMlp, "down_proj", &[h, width]);
        }
        if let Some(e) = &layer.experts {
            self.add(true, Norm, "expert_input", &[h]);
            match e.router {
                RouterKind::Linear { has_bias, is_scaled, .. } => {
                    self.add(true, Route, "router_logits", &[e.count, h]);
                    self.add(has_bias, Route, "router_logits_bias", &[e.count]);
                    self.add(is_scaled, Route, "router_input", &[h]);
                    self.add(is_scaled, Route, "expert_scale", &[e.count]);
                }
                RouterKind::Network { width: r, .. } => {
                    self.add(true, Route, "router_down", &[r, h]);
                    self.add(true, Route, "router_down_bias", &[r]);
                    // The first layer has no router state before it.
                    self.add(l > 0, Route, "router_state_scale", &[r]);
                    self.add(true, Route, "router_norm", &[r]);
                    self.add(true, Route, "router_fc1", &[r, r]);
                    self.add(true, Route, "router_fc1_bias", &[r]);
                    self.add(true, Route, "router_fc2", &[r, r]);
                    self.add(true, Route, "router_fc2_bias", &[r]);
                    self.add(true, Route, "router_logits", &[e.classes(), r]);
                    self.add(true, Route, "balancing_biases", &[e.classes()]);
                }
            }
            self.add(true, Experts, "gate_up", &[e.count, 2 * e.width, h]);
            self.add(true, Experts, "down", &[e.count, h, e.width]);
            self.add(e.has_bias, Experts, "gate_up_bias", &[e.count, 2 * e.width]);
            self.add(e.has_bias, Experts, "down_bias", &[e.count, h]);
        }
        self.add(is_around && has_both, Norm, "dense_norm", &[h]);
        self.add(is_around && has_both, Norm, "experts_norm", &[h]);
        self.add(is_around, Norm, "post_feedforward_norm", &[h]);
        self.add(d.residual == Residual::LayerScalar, Norm, "hidden_out", &[1]);
        self.add_residual(1);
    }
}

impl Decoder {
    /// Returns the name of a tensor by its role: in layer `l`, or outside of layers.
    pub fn tensor(&self, layer: Option<usize>, role: &str) -> String {
        let name = name_of(self.names, role);
        layer.map_or_else(|| name.to_string(), |l| format!("layers.{l}.{name}"))
    }

    /// Lists the tensors: names without prefix, shapes, parts. Linear weights are `[out, in]`.
    pub fn tensors(&self) -> Vec<TensorRow> {
        use ModelPart::{DenseMlp, Embedding, Head, Norms};
        let (mut rows, h) = (Vec::new(), self.hidden);
        let mut table = TensorRows { decoder: self, layer: None, rows: &mut rows };
        table.add(true, Embedding, "embedding", &[self.vocab, h]);
        table.add(self.has_own_head(), Head, "head", &[self.vocab, h]);
        table.add(true, Norms, "final_norm", &[h]);
        let outer = self.assistant.as_ref().map_or(0, |of| of.target_hidden_size);
        table.add(outer > 0, DenseMlp, "pre_projection", &[h, 2 * outer]);
        table.add(outer > 0, DenseMlp, "post_projection", &[outer, h]);
        if let Some(of) = self.centroids() {
            table.add(true, Head, "centroids", &[of.count, h]);
            table.add(true, Embedding, TOKEN_ORDERING, &[self.vocab]);
        }
        table.add(self.residual == Residual::Affine, Norms, "input_scale", &[h]);
        table.add(self.residual == Residual::Affine, Norms, "input_bias", &[h]);
        for (l, layer) in self.layers.iter().enumerate() {
            let mut table = TensorRows { decoder: self, layer: Some(l), rows: &mut rows };
            table.add_attention(&layer.attention);
            table.add_feed_forward(l, layer);
        }
        rows
    }

    /// Counts the parameters; a tied embedding counts once.
    pub fn parameters(&self) -> u64 {
        let decoder = Decoder { is_rotated: false, ..self.clone() };
        decoder.tensors().iter().map(TensorRow::elements).sum()
    }

    /// Counts the parameters that a token uses: one row of an embedding that is not the head, and its experts.
    pub fn active_parameters(&self) -> u64 {
        let looked_up = if self.is_tied { 0 } else { self.vocab * self.hidden };
        let idle = self.experts().map_or(0, |e| {
            let biases = if e.has_bias { 2 * e.width + self.hidden } else { 0 };
            self.routed().count() * (e.count - e.active) * (3 * self.hidden * e.width + biases)
        });
        self.parameters() - (looked_up + idle) as u64
    }
}
