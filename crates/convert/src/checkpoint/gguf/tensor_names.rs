//! Names of GGUF tensors, and their names in a Hugging Face checkpoint.

use super::config::Arch;

/// Names under `blk.N.` and under `model.layers.N.` that mean the same in every architecture.
const LAYER: [(&str, &str); 14] = [
    ("attn_norm.weight", "input_layernorm.weight"),
    ("attn_q.weight", "self_attn.q_proj.weight"),
    ("attn_q.bias", "self_attn.q_proj.bias"),
    ("attn_k.weight", "self_attn.k_proj.weight"),
    ("attn_k.bias", "self_attn.k_proj.bias"),
    ("attn_v.weight", "self_attn.v_proj.weight"),
    ("attn_v.bias", "self_attn.v_proj.bias"),
    ("attn_output.weight", "self_attn.o_proj.weight"),
    ("attn_output.bias", "self_attn.o_proj.bias"),
    ("attn_q_norm.weight", "self_attn.q_norm.weight"),
    ("attn_k_norm.weight", "self_attn.k_norm.weight"),
    ("ffn_gate.weight", "mlp.gate_proj.weight"),
    ("ffn_up.weight", "mlp.up_proj.weight"),
    ("ffn_down.weight", "mlp.down_proj.weight"),
];

/// Role of a GGUF tensor in the tensor of a Hugging Face checkpoint.
#[derive(Clone, Copy, Debug, PartialEq)]
pub enum Role {
    /// It is the tensor.
    Whole,
    /// One is subtracted from every weight.
    LessOne,
    /// Each head's rows come from `0, 2, 4, .., 1, 3, 5, ..`.
    PairedRows,
    /// It is the first half of every expert's rows.
    Gate,
    /// It is the second half of every expert's rows.
    Up,
}

/// Returns a GGUF tensor's name in a Hugging Face checkpoint and its role there; none where the model has no tensor of
/// that name.
pub fn hf_name(arch: &Arch, name: &str) -> Option<(String, Role)> {
    let norm = if arch.has_norms_plus_one { Role::LessOne } else { Role::Whole };
    match name {
        "token_embd.weight" => return Some(("model.embed_tokens.weight".into(), Role::Whole)),
        "output_norm.weight" => return Some(("model.norm.weight".into(), norm)),
        "output.weight" => return Some(("lm_head.weight".into(), Role::Whole)),
        _ => {}
    }
    let (layer, rest) = name.strip_prefix("blk.")?.split_once('.')?;
    // A layer's number has one spelling, so that no two names are one tensor.
    let number: u32 = layer.parse().ok()?;
    if number.to_string() != layer {
        return None;
    }
    let (_, hf) = LAYER.iter().chain(arch.names).find(|(gguf, _)| *gguf == rest)?;
    let role = match rest {
        "ffn_gate_exps.weight" | "ffn_gate_exps.bias" => Role::Gate,
        "ffn_up_exps.weight" | "ffn_up_exps.bias" => Role::Up,
        "attn_q.weight" | "attn_q.bias" | "attn_k.weight" | "attn_k.bias" if arch.has_paired_rows => {
            Role::PairedRows
        }
        _ if rest.ends_with("norm.weight") => norm,
        _ => Role::Whole,
    };
    Some((format!("model.layers.{layer}.{hf}"), role))
}

#[cfg(test)]
mod tests {
    use super::super::archs::ARCHS;
    use super::*;

    fn named(arch: &str, name: &str) -> Option<(String, Role)> {
        hf_name(ARCHS.iter().find(|a| a.name == arch).unwrap(), name)
    }

    #[test]
    fn names_have_one_spelling() {
        for (arch, name, hf, role) in [
            ("gemma4", "blk.12.attn_q.weight", "layers.12.self_attn.q_proj.weight", Role::Whole),
            ("gemma4", "blk.0.ffn_gate_inp.scale", "layers.0.router.scale", Role::Whole),
            ("gemma4", "blk.3.ffn_up_exps.weight", "layers.3.experts.gate_up_proj", Role::Up),
            ("gemma4", "output_norm.weight", "norm.weight", Role::Whole),
            ("llama", "blk.1.attn_k.bias", "layers.1.self_attn.k_proj.bias", Role::PairedRows),
            ("qwen2", "blk.1.attn_k.bias", "layers.1.self_attn.k_proj.bias", Role::Whole),
            ("gemma3", "blk.1.attn_q_norm.weight", "layers.1.self_attn.q_norm.weight", Role::LessOne),
            ("gemma3", "output_norm.weight", "norm.weight", Role::LessOne),
            ("gpt-oss", "blk.0.ffn_gate_exps.bias", "layers.0.mlp.experts.gate_up_proj_bias", Role::Gate),
            ("olmoe", "blk.0.ffn_gate_inp.weight", "layers.0.mlp.gate.weight", Role::Whole),
        ] {
            assert_eq!(named(arch, name), Some((format!("model.{hf}"), role)));
        }
        for name in [
            "blk.012.attn_q.weight",
            "blk.+1.attn_q.weight",
            "blk.x.attn_q.weight",
            "blk.1.attn_q",
            "blk.1.ffn_gate_exps.weight",
            "v.std_bias",
            "",
        ] {
            assert_eq!(named("llama", name), None, "{name}");
        }
    }

    /// Checks that two GGUF names are one tensor only where these are the halves of experts, or both halves at once.
    #[test]
    fn no_name_means_two_tensors() {
        for arch in &ARCHS {
            for (i, (gguf, hf)) in LAYER.iter().chain(arch.names).enumerate() {
                for (other, other_hf) in LAYER.iter().chain(arch.names).skip(i + 1) {
                    assert_ne!(gguf, other, "{}", arch.name);
                    let is_joined = [gguf, other].iter().all(|n| n.contains("_exps."));
                    assert!(hf != other_hf || is_joined, "{}: {gguf} {other}", arch.name);
                }
            }
        }
    }
}
