//! Every tensor of ZAYA, and its place in the original layout of the same network.

use super::config::ZayaConfig;
use crate::models::{ModelPart, TensorRow};

/// Place of a tensor in the original layout, whose half-layers 2i and 2i + 1 are the attention and the MoE of
/// layer i.
#[derive(Clone, Debug, PartialEq)]
pub enum Legacy {
    /// One tensor of the same shape.
    Whole(String),
    /// One tensor for each expert, stacked along the first axis.
    PerExpert(Vec<String>),
}

/// Lists the tensors of the model: names without prefix, shapes, parts. Linear weights are `[out, in]`.
pub fn tensor_table(c: &ZayaConfig) -> Vec<TensorRow> {
    rows(c).into_iter().map(|(row, _)| row).collect()
}

/// Lists the tensors of the model, each with its place in the original layout.
pub fn rows(c: &ZayaConfig) -> Vec<(TensorRow, Legacy)> {
    use ModelPart::*;
    let (h, d, r) = (c.hidden_size, c.head_dim, c.router_hidden_size);
    let (q, kv) = (c.q_size(), c.kv_size());
    let (e, f, classes) = (c.num_experts, c.moe_intermediate_size, c.classes());
    let mut rows = Vec::new();
    let mut add = |layer: Option<usize>, part: ModelPart, name: String, legacy: Legacy, shape: &[usize]| {
        let shape = shape.iter().map(|&n| n as u64).collect();
        rows.push((TensorRow { name, shape, part, layer }, legacy));
    };
    let whole = |name: &str| Legacy::Whole(name.to_string());
    add(None, Embedding, "embed_tokens.weight".into(), whole("embed_tokens.weight"), &[c.vocab_size, h]);
    add(None, Norms, "norm.weight".into(), whole("final_norm.weight"), &[h]);
    for name in ["scale", "bias"] {
        let legacy = Legacy::Whole(format!("layers.0.res_scale.hidden_states_{name}"));
        add(None, Norms, format!("input_hidden_states_{name}"), legacy, &[h]);
    }
    for l in 0..c.num_hidden_layers {
        let mut row = |part: ModelPart, half: usize, name: &str, legacy: &str, shape: &[usize]| {
            let legacy = Legacy::Whole(format!("layers.{}.{legacy}", 2 * l + half));
            add(Some(l), part, format!("layers.{l}.{name}"), legacy, shape);
        };
        row(Norms, 0, "input_layernorm.weight", "input_norm.weight", &[h]);
        for (name, legacy, shape) in [
            ("qkv_proj.q_proj.weight", "qkv.linear_q.weight", &[q, h][..]),
            ("qkv_proj.k_proj.weight", "qkv.linear_k.weight", &[kv, h]),
            ("qkv_proj.v_proj_current.weight", "qkv.val_proj1.weight", &[kv / 2, h]),
            ("qkv_proj.v_proj_delayed.weight", "qkv.val_proj2.weight", &[kv / 2, h]),
            ("qkv_proj.conv_qk_depthwise.weight", "qkv.conv_qk.0.weight", &[q + kv, 1, 2]),
            ("qkv_proj.conv_qk_depthwise.bias", "qkv.conv_qk.0.bias", &[q + kv]),
            ("qkv_proj.conv_qk_grouped.weight", "qkv.conv_qk.1.weight", &[q + kv, d, 2]),
            ("qkv_proj.conv_qk_grouped.bias", "qkv.conv_qk.1.bias", &[q + kv]),
            ("qk_norm.temp", "qkv.temp", &[c.num_key_value_heads]),
            ("o_proj.weight", "o_proj.weight", &[h, q]),
        ] {
            row(Attention, 0, &format!("self_attn.{name}"), &format!("self_attn.{legacy}"), shape);
        }
        row(Norms, 1, "post_attention_layernorm.weight", "input_norm.weight", &[h]);
        for (name, legacy, shape) in [
            ("down_proj.weight", "down_proj.weight", &[r, h][..]),
            ("down_proj.bias", "down_proj.bias", &[r]),
            ("router_states_scale", "router_states_scale", &[r]),
            ("router_mlp.norm.weight", "rmsnorm_eda.weight", &[r]),
            ("router_mlp.fc1.weight", "router_mlp.0.weight", &[r, r]),
            ("router_mlp.fc1.bias", "router_mlp.0.bias", &[r]),
            ("router_mlp.fc2.weight", "router_mlp.2.weight", &[r, r]),
            ("router_mlp.fc2.bias", "router_mlp.2.bias", &[r]),
            ("router_mlp.out_proj.weight", "router_mlp.4.weight", &[classes, r]),
            ("balancing_biases", "balancing_biases", &[classes]),
        ] {
            // The first layer has no router state before it.
            if name != "router_states_scale" || l > 0 {
                row(Router, 1, &format!("mlp.gate.{name}"), &format!("zaya_block.router.{legacy}"), shape);
            }
        }
        let last = l + 1 == c.num_hidden_layers;
        for name in ["hidden_states_scale", "hidden_states_bias", "residual_scale", "residual_bias"] {
            let after_attention = format!("post_attention_residual_scale.{name}");
            row(Norms, 1, &after_attention, &format!("res_scale.{name}"), &[h]);
        }
        for name in ["hidden_states_scale", "hidden_states_bias", "residual_scale", "residual_bias"] {
            let legacy = match last {
                false => format!("layers.{}.res_scale.{name}", 2 * l + 2),
                true => format!("res_scale.{name}"),
            };
            let own = format!("layers.{l}.post_mlp_residual_scale.{name}");
            add(Some(l), Norms, own, Legacy::Whole(legacy), &[h]);
        }
        for (name, legacy, shape) in
            [("gate_up_proj", "linear_fc1", [e, 2 * f, h]), ("down_proj", "linear_fc2", [e, h, f])]
        {
            let expert =
                |x| format!("layers.{}.zaya_block.experts.local_experts.{x}.{legacy}.weight", 2 * l + 1);
            let legacy = Legacy::PerExpert((0..e).map(expert).collect());
            add(Some(l), Experts, format!("layers.{l}.mlp.experts.{name}"), legacy, &shape);
        }
    }
    rows
}

impl ZayaConfig {
    /// Counts the parameters; the tied embedding counts once.
    pub fn parameters(&self) -> u64 {
        tensor_table(self).iter().map(|r| r.elements()).sum()
    }
}
