//! Names of GGUF tensors, and their names in a Hugging Face checkpoint.

/// Names under `blk.N.` and under `model.layers.N.`.
const LAYER: [(&str, &str); 21] = [
    ("attn_norm.weight", "input_layernorm.weight"),
    ("attn_q.weight", "self_attn.q_proj.weight"),
    ("attn_k.weight", "self_attn.k_proj.weight"),
    ("attn_v.weight", "self_attn.v_proj.weight"),
    ("attn_output.weight", "self_attn.o_proj.weight"),
    ("attn_q_norm.weight", "self_attn.q_norm.weight"),
    ("attn_k_norm.weight", "self_attn.k_norm.weight"),
    ("post_attention_norm.weight", "post_attention_layernorm.weight"),
    ("ffn_norm.weight", "pre_feedforward_layernorm.weight"),
    ("ffn_gate.weight", "mlp.gate_proj.weight"),
    ("ffn_up.weight", "mlp.up_proj.weight"),
    ("ffn_down.weight", "mlp.down_proj.weight"),
    ("post_ffw_norm.weight", "post_feedforward_layernorm.weight"),
    ("post_ffw_norm_1.weight", "post_feedforward_layernorm_1.weight"),
    ("pre_ffw_norm_2.weight", "pre_feedforward_layernorm_2.weight"),
    ("post_ffw_norm_2.weight", "post_feedforward_layernorm_2.weight"),
    ("ffn_gate_inp.weight", "router.proj.weight"),
    ("ffn_gate_inp.scale", "router.scale"),
    ("ffn_down_exps.scale", "router.per_expert_scale"),
    ("ffn_down_exps.weight", "experts.down_proj"),
    ("layer_output_scale.weight", "layer_scalar"),
];

/// Names of the experts' first matrices: gate and up in one tensor, or in two.
const FUSED: &str = "ffn_gate_up_exps.weight";
const GATE: &str = "ffn_gate_exps.weight";
const UP: &str = "ffn_up_exps.weight";

/// Role of a GGUF tensor in the model.
#[derive(Debug, PartialEq)]
pub enum Role {
    /// A tensor of this name.
    Whole(String),
    /// First half of every expert's rows of the tensor of this name.
    Gate(String),
    /// Second half of every expert's rows of the tensor of this name.
    Up(String),
}

/// Returns the role of a GGUF tensor; none where the model has no tensor of that name.
pub fn role(name: &str) -> Option<Role> {
    match name {
        "token_embd.weight" => return Some(Role::Whole("model.embed_tokens.weight".into())),
        "output_norm.weight" => return Some(Role::Whole("model.norm.weight".into())),
        _ => {}
    }
    let (layer, rest) = name.strip_prefix("blk.")?.split_once('.')?;
    // A layer's number has one spelling, so that no two names are one tensor.
    let number: u32 = layer.parse().ok()?;
    if number.to_string() != layer {
        return None;
    }
    let full = |rest: &str| format!("model.layers.{layer}.{rest}");
    match rest {
        FUSED => Some(Role::Whole(full("experts.gate_up_proj"))),
        GATE => Some(Role::Gate(full("experts.gate_up_proj"))),
        UP => Some(Role::Up(full("experts.gate_up_proj"))),
        _ => LAYER.iter().find(|(gguf, _)| *gguf == rest).map(|(_, hf)| Role::Whole(full(hf))),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn names_have_one_spelling() {
        let whole = |name: &str| Some(Role::Whole(name.into()));
        assert_eq!(role("blk.12.attn_q.weight"), whole("model.layers.12.self_attn.q_proj.weight"));
        assert_eq!(role("blk.0.ffn_gate_inp.scale"), whole("model.layers.0.router.scale"));
        assert_eq!(
            role("blk.3.ffn_up_exps.weight"),
            Some(Role::Up("model.layers.3.experts.gate_up_proj".into()))
        );
        for name in [
            "blk.012.attn_q.weight",
            "blk.+1.attn_q.weight",
            "blk.x.attn_q.weight",
            "blk.1.attn_q",
            "v.std_bias",
            "",
        ] {
            assert_eq!(role(name), None, "{name}");
        }
    }
}
