//! Every tensor of a decoder, by its role.

use super::decoder::{Decoder, HeadNorm, Layer, Norms, QkvProjection, Residual, RouterKind, ValueSource};
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

impl Decoder {
    /// Returns the name of a tensor by its role: in layer `l`, or outside of layers.
    pub fn tensor(&self, layer: Option<usize>, role: &str) -> String {
        let name = name_of(self.names, role);
        layer.map_or_else(|| name.to_string(), |l| format!("layers.{l}.{name}"))
    }

    /// Lists the tensors: names without prefix, shapes, parts. Linear weights are `[out, in]`.
    pub fn tensors(&self) -> Vec<TensorRow> {
        let mut rows = Vec::new();
        let mut add = |part: ModelPart, role: &'static str, shape: &[usize]| {
            let shape = shape.iter().map(|&n| n as u64).collect();
            rows.push(TensorRow { role, name: self.tensor(None, role), shape, part, layer: None });
        };
        add(ModelPart::Embedding, "embedding", &[self.vocab, self.hidden]);
        if self.has_own_head() {
            add(ModelPart::Head, "head", &[self.vocab, self.hidden]);
        }
        add(ModelPart::Norms, "final_norm", &[self.hidden]);
        if let Some(of) = &self.assistant {
            add(ModelPart::DenseMlp, "pre_projection", &[self.hidden, 2 * of.target_hidden_size]);
            add(ModelPart::DenseMlp, "post_projection", &[of.target_hidden_size, self.hidden]);
            if let Some(of) = of.centroids {
                add(ModelPart::Head, "centroids", &[of.count, self.hidden]);
                add(ModelPart::Embedding, TOKEN_ORDERING, &[self.vocab]);
            }
        }
        if self.residual == Residual::Affine {
            add(ModelPart::Norms, "input_scale", &[self.hidden]);
            add(ModelPart::Norms, "input_bias", &[self.hidden]);
        }
        for (l, layer) in self.layers.iter().enumerate() {
            let mut add = |part: ModelPart, role: &'static str, shape: &[usize]| {
                let shape = shape.iter().map(|&n| n as u64).collect();
                rows.push(TensorRow { role, name: self.tensor(Some(l), role), shape, part, layer: Some(l) });
            };
            self.attention_rows(layer, &mut add);
            self.feed_forward_rows(l, layer, &mut add);
        }
        rows
    }

    fn attention_rows(&self, layer: &Layer, add: &mut dyn FnMut(ModelPart, &'static str, &[usize])) {
        use ModelPart::{Attention, Norms as Norm};
        let a = &layer.attention;
        let (h, d, q, kv) = (self.hidden, a.head_dim, a.q_size(), a.kv_size());
        add(Norm, "input_norm", &[h]);
        add(Attention, "q_proj", &[q, h]);
        if a.projection != QkvProjection::Lent {
            add(Attention, "k_proj", &[kv, h]);
        }
        match a.projection {
            QkvProjection::Direct { norm, values, has_bias } => {
                let has_values = values != ValueSource::KeysNormed;
                if has_values {
                    add(Attention, "v_proj", &[kv, h]);
                }
                let (of_q, of_k) = if norm == HeadNorm::PerHead { (d, d) } else { (q, kv) };
                if norm != HeadNorm::None {
                    add(Attention, "q_norm", &[of_q]);
                    add(Attention, "k_norm", &[of_k]);
                }
                if has_bias {
                    add(Attention, "q_proj_bias", &[q]);
                    add(Attention, "k_proj_bias", &[kv]);
                    if has_values {
                        add(Attention, "v_proj_bias", &[kv]);
                    }
                }
            }
            QkvProjection::Convolved => {
                add(Attention, "v_proj_current", &[kv / 2, h]);
                add(Attention, "v_proj_delayed", &[kv / 2, h]);
                add(Attention, "conv_depthwise", &[q + kv, 1, 2]);
                add(Attention, "conv_depthwise_bias", &[q + kv]);
                add(Attention, "conv_grouped", &[q + kv, d, 2]);
                add(Attention, "conv_grouped_bias", &[q + kv]);
                add(Attention, "temperature", &[a.kv_heads]);
            }
            QkvProjection::Lent => add(Attention, "q_norm", &[d]),
        }
        add(Attention, "o_proj", &[h, q]);
        if a.has_output_bias {
            add(Attention, "o_proj_bias", &[h]);
        }
        if a.has_sinks {
            add(Attention, "sinks", &[a.heads]);
        }
        if self.norms == Norms::Around {
            add(Norm, "post_attention_norm", &[h]);
        }
        if self.residual == Residual::Affine {
            RESIDUALS[0].iter().for_each(|role| add(Norm, role, &[h]));
        }
    }

    fn feed_forward_rows(
        &self,
        l: usize,
        layer: &Layer,
        add: &mut dyn FnMut(ModelPart, &'static str, &[usize]),
    ) {
        use ModelPart::{DenseMlp, Experts, Norms as Norm, Router as Route};
        let h = self.hidden;
        let is_around = self.norms == Norms::Around;
        let has_both = layer.dense.is_some() && layer.experts.is_some();
        if let Some(width) = layer.dense {
            add(Norm, "dense_input", &[h]);
            add(DenseMlp, "gate_proj", &[width, h]);
            add(DenseMlp, "up_proj", &[width, h]);
            add(DenseMlp, "down_proj", &[h, width]);
        }
        if let Some(e) = &layer.experts {
            add(Norm, "expert_input", &[h]);
            match e.router {
                RouterKind::Linear { has_bias, is_scaled, .. } => {
                    add(Route, "router_logits", &[e.count, h]);
                    if has_bias {
                        add(Route, "router_logits_bias", &[e.count]);
                    }
                    if is_scaled {
                        add(Route, "router_input", &[h]);
                        add(Route, "expert_scale", &[e.count]);
                    }
                }
                RouterKind::Network { width: r, .. } => {
                    add(Route, "router_down", &[r, h]);
                    add(Route, "router_down_bias", &[r]);
                    // The first layer has no router state before it.
                    if l > 0 {
                        add(Route, "router_state_scale", &[r]);
                    }
                    add(Route, "router_norm", &[r]);
                    add(Route, "router_fc1", &[r, r]);
                    add(Route, "router_fc1_bias", &[r]);
                    add(Route, "router_fc2", &[r, r]);
                    add(Route, "router_fc2_bias", &[r]);
                    add(Route, "router_logits", &[e.classes(), r]);
                    add(Route, "balancing_biases", &[e.classes()]);
                }
            }
            add(Experts, "gate_up", &[e.count, 2 * e.width, h]);
            add(Experts, "down", &[e.count, h, e.width]);
            if e.has_bias {
                add(Experts, "gate_up_bias", &[e.count, 2 * e.width]);
                add(Experts, "down_bias", &[e.count, h]);
            }
        }
        if is_around && has_both {
            add(Norm, "dense_norm", &[h]);
            add(Norm, "experts_norm", &[h]);
        }
        if is_around {
            add(Norm, "post_feedforward_norm", &[h]);
        }
        match self.residual {
            Residual::Plain => {}
            Residual::LayerScalar => add(Norm, "hidden_out", &[1]),
            Residual::Affine => RESIDUALS[1].iter().for_each(|role| add(Norm, role, &[h])),
        }
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
