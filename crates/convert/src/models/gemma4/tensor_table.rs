//! Every tensor of the text model.

use super::config::Gemma4Config;
use crate::models::{ModelPart, TensorRow};

/// Lists the tensors of the text model: names without prefix, shapes, parts. Linear weights are `[out, in]`.
pub fn tensor_table(c: &Gemma4Config) -> Vec<TensorRow> {
    use ModelPart::*;
    let h = c.hidden_size;
    let (e, f, i) = (c.num_experts, c.moe_intermediate_size, c.intermediate_size);
    let mut rows = Vec::new();
    let mut add = |layer: Option<usize>, part: ModelPart, name: String, shape: &[usize]| {
        rows.push(TensorRow { name, shape: shape.iter().map(|&n| n as u64).collect(), part, layer });
    };
    add(None, Embedding, "embed_tokens.weight".into(), &[c.vocab_size, h]);
    add(None, Norms, "norm.weight".into(), &[h]);
    for l in 0..c.num_hidden_layers {
        let d = c.head_dim(l);
        let (q, kv) = (c.num_attention_heads * d, c.kv_heads(l) * d);
        let mut row = |part: ModelPart, name: &str, shape: &[usize]| {
            add(Some(l), part, format!("layers.{l}.{name}"), shape)
        };
        row(Attention, "self_attn.q_proj.weight", &[q, h]);
        row(Attention, "self_attn.k_proj.weight", &[kv, h]);
        if !c.k_eq_v(l) {
            row(Attention, "self_attn.v_proj.weight", &[kv, h]);
        }
        row(Attention, "self_attn.o_proj.weight", &[h, q]);
        row(Attention, "self_attn.q_norm.weight", &[d]);
        row(Attention, "self_attn.k_norm.weight", &[d]);
        for norm in [
            "input_layernorm",
            "post_attention_layernorm",
            "pre_feedforward_layernorm",
            "post_feedforward_layernorm",
            "post_feedforward_layernorm_1",
            "pre_feedforward_layernorm_2",
            "post_feedforward_layernorm_2",
        ] {
            row(Norms, &format!("{norm}.weight"), &[h]);
        }
        row(Norms, "layer_scalar", &[1]);
        row(DenseMlp, "mlp.gate_proj.weight", &[i, h]);
        row(DenseMlp, "mlp.up_proj.weight", &[i, h]);
        row(DenseMlp, "mlp.down_proj.weight", &[h, i]);
        row(Router, "router.proj.weight", &[e, h]);
        row(Router, "router.scale", &[h]);
        row(Router, "router.per_expert_scale", &[e]);
        row(Experts, "experts.gate_up_proj", &[e, 2 * f, h]);
        row(Experts, "experts.down_proj", &[e, h, f]);
    }
    rows
}

impl Gemma4Config {
    /// Counts the parameters of the text model; the tied embedding counts once.
    pub fn parameters(&self) -> u64 {
        tensor_table(self).iter().map(|r| r.elements()).sum()
    }
}
