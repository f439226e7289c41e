//! Qwen3-MoE and OLMoE: experts behind a router of one matrix (`model_type` qwen3_moe, olmoe).

use super::common_keys::{self, attention, decoder, expect_silu, sliding};
use super::decoder::{Decoder, ExpertLayer, HeadNorm, Layer, RouterKind};
use super::keys::Keys;
use super::tensor_table::TensorRow;
use crate::Result;
use crate::checkpoint::{Checkpoint, TensorOrigin};
use crate::lower::Activation;
use serde_json::{Value, json};

/// Reads the description of a Qwen3-MoE from its configuration.
///
/// # Errors
/// A key is missing or has an impossible value, or a feature is not implemented.
pub fn parse_qwen(k: Keys<'_>) -> Result<Decoder> {
    let count = experts_key(k)?;
    let experts = experts(k, count, k.size("moe_intermediate_size")?)?;
    let dense = k.size("intermediate_size")?;
    let step = k.size_or("decoder_sparse_step", 1)?;
    let only = match k.get("mlp_only_layers") {
        None => Vec::new(),
        Some(v) => v.as_array().map(Vec::as_slice).unwrap_or(std::slice::from_ref(v)).to_vec(),
    };
    if let Some(v) = only.iter().find(|v| !v.is_u64()) {
        return Err(k.invalid(format!("`mlp_only_layers` has {v}, expected numbers of layers")));
    }
    let is_dense = |l: usize| only.contains(&json!(l)) || !(l + 1).is_multiple_of(step);
    let bias = k.flag("attention_bias", false)?;
    layers(k, "qwen3_moe", HeadNorm::PerHead, bias, |l| match is_dense(l) {
        true => (Some(dense), None),
        false => (None, Some(experts)),
    })
}

/// Reads the description of an OLMoE from its configuration.
///
/// # Errors
/// A key is missing or has an impossible value, or a feature is not implemented.
pub fn parse_olmoe(k: Keys<'_>) -> Result<Decoder> {
    k.expect("clip_qkv", &[])?;
    let experts = experts(k, experts_key(k)?, k.size("intermediate_size")?)?;
    let bias = k.flag("attention_bias", false)?;
    layers(k, "olmoe", HeadNorm::WholeRow, bias, |_| (None, Some(experts)))
}

fn layers(
    k: Keys<'_>,
    family: &'static str,
    norm: HeadNorm,
    bias: bool,
    feed_forward: impl Fn(usize) -> (Option<usize>, Option<ExpertLayer>),
) -> Result<Decoder> {
    expect_silu(k)?;
    k.expect("shared_expert_intermediate_size", &[])?;
    // OLMoE has no windows.
    let slides =
        family == "qwen3_moe" && k.flag("use_sliding_window", false)? && k.get("sliding_window").is_some();
    let mut all = Vec::new();
    for (l, window) in sliding(k, |_| slides)?.into_iter().enumerate() {
        let attention = attention(k, norm, window, bias)?;
        let (dense, experts) = feed_forward(l);
        all.push(Layer { attention, activation: Activation::Silu, dense, experts });
    }
    decoder(k, family, false, all)
}

/// Returns the number of experts, which has two names.
fn experts_key(k: Keys<'_>) -> Result<usize> {
    k.size(if k.get("num_local_experts").is_some() { "num_local_experts" } else { "num_experts" })
}

fn experts(k: Keys<'_>, count: usize, width: usize) -> Result<ExpertLayer> {
    let renormalizes = k.flag("norm_topk_prob", false)?;
    let router = RouterKind::Linear { has_bias: false, renormalizes, is_scaled: false };
    common_keys::experts(k, (count, k.size("num_experts_per_tok")?, width), router)
}

/// Returns the places of a stack of experts in a checkpoint that has tensors for each expert.
pub fn origin(row: &TensorRow, prefix: &str, checkpoint: &Checkpoint) -> Option<TensorOrigin> {
    let (stack, parts): (_, &[&str]) = match row.role {
        "gate_up" => ("gate_up_proj", &["gate_proj", "up_proj"]),
        "down" => ("down_proj", &["down_proj"]),
        _ => return None,
    };
    let stem = row.name.strip_suffix(stack)?;
    let of = |e: u64| parts.iter().map(move |part| format!("{prefix}{stem}{e}.{part}.weight"));
    let is_apart = of(0).all(|name| checkpoint.source.info(&name).is_some());
    is_apart.then(|| TensorOrigin::Pieces((0..row.shape[0]).flat_map(of).collect()))
}

/// Returns the published configuration of Qwen3-30B-A3B.
pub fn qwen3_30b() -> Value {
    json!({
        "model_type": "qwen3_moe", "hidden_size": 2048, "intermediate_size": 6144, "moe_intermediate_size": 768,
        "num_hidden_layers": 48, "num_attention_heads": 32, "num_key_value_heads": 4, "head_dim": 128, "num_experts": 128,
        "num_experts_per_tok": 8, "norm_topk_prob": true, "decoder_sparse_step": 1, "mlp_only_layers": [], "hidden_act": "silu",
        "attention_bias": false, "rms_norm_eps": 1e-6, "vocab_size": 151936, "tie_word_embeddings": false,
        "max_position_embeddings": 40960, "rope_theta": 1000000.0, "rope_scaling": null, "sliding_window": null,
        "use_sliding_window": false, "bos_token_id": 151643, "eos_token_id": 151645
    })
}

/// Returns the published configuration of OLMoE-1B-7B.
pub fn olmoe_7b() -> Value {
    json!({
        "model_type": "olmoe", "hidden_size": 2048, "intermediate_size": 1024, "num_hidden_layers": 16,
        "num_attention_heads": 16, "num_key_value_heads": 16, "num_experts": 64, "num_experts_per_tok": 8,
        "norm_topk_prob": false, "hidden_act": "silu", "attention_bias": false, "clip_qkv": null, "rms_norm_eps": 1e-5,
        "vocab_size": 50304, "tie_word_embeddings": false, "max_position_embeddings": 4096, "rope_theta": 10000.0,
        "rope_scaling": null, "eos_token_id": 50279
    })
}

#[cfg(test)]
mod tests {
    use super::super::tests::parsed;
    use super::*;

    #[test]
    fn layers_without_experts_follow_the_keys() {
        let mut config = qwen3_30b();
        let dense = |config: &Value| -> Vec<usize> {
            let d = parsed(config).unwrap();
            (0..d.layers.len()).filter(|l| d.layers[*l].dense.is_some()).collect()
        };
        assert!(dense(&config).is_empty());
        config["mlp_only_layers"] = json!([3, 5]);
        assert_eq!(dense(&config), [3, 5]);
        config["decoder_sparse_step"] = json!(24);
        assert_eq!(dense(&config).len(), 46);
    }
}
