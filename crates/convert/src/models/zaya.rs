//! ZAYA (ZAYA1-8B and its like): compressed convolutional attention, and experts whose router remembers the layer
//! before (`model_type` zaya).

mod legacy;

pub use legacy::normalize_layout;

use super::checked::CheckedCheckpoint;
use super::common_keys::{SILU, decoder, experts};
use super::decoder::{Attention, Decoder, Layer, Preset, QkvProjection, Residual, RouterKind};
use super::keys::Keys;
use super::rope::rope;
use crate::Result;
use crate::lower::Activation;
use crate::plan::PartKinds;
use crate::quant::{Granularity, Quant};
use crate::variants::ZayaSkip;
use anemoe_bundle::{IndexBits, IntBits};
use serde_json::{Value, json};

/// Names of tensors, where other families have other ones.
const NAMES: &[(&str, &str)] = &[
    ("input_scale", "input_hidden_states_scale"),
    ("input_bias", "input_hidden_states_bias"),
    ("q_proj", "self_attn.qkv_proj.q_proj.weight"),
    ("k_proj", "self_attn.qkv_proj.k_proj.weight"),
    ("v_proj_current", "self_attn.qkv_proj.v_proj_current.weight"),
    ("v_proj_delayed", "self_attn.qkv_proj.v_proj_delayed.weight"),
    ("conv_depthwise", "self_attn.qkv_proj.conv_qk_depthwise.weight"),
    ("conv_grouped", "self_attn.qkv_proj.conv_qk_grouped.weight"),
    ("temperature", "self_attn.qk_norm.temp"),
    ("attention_residual_branch_scale", "post_attention_residual_scale.hidden_states_scale"),
    ("attention_residual_branch_bias", "post_attention_residual_scale.hidden_states_bias"),
    ("attention_residual_stream_scale", "post_attention_residual_scale.residual_scale"),
    ("attention_residual_stream_bias", "post_attention_residual_scale.residual_bias"),
    ("router_down", "mlp.gate.down_proj.weight"),
    ("router_state_scale", "mlp.gate.router_states_scale"),
    ("router_norm", "mlp.gate.router_mlp.norm.weight"),
    ("router_fc1", "mlp.gate.router_mlp.fc1.weight"),
    ("router_fc2", "mlp.gate.router_mlp.fc2.weight"),
    ("router_logits", "mlp.gate.router_mlp.out_proj.weight"),
    ("balancing_biases", "mlp.gate.balancing_biases"),
    ("moe_residual_branch_scale", "post_mlp_residual_scale.hidden_states_scale"),
    ("moe_residual_branch_bias", "post_mlp_residual_scale.hidden_states_bias"),
    ("moe_residual_stream_scale", "post_mlp_residual_scale.residual_scale"),
    ("moe_residual_stream_bias", "post_mlp_residual_scale.residual_bias"),
];
/// Kernel of each of the two convolutions. Together they see two columns of `[q; k]` before the current one.
const KERNEL: usize = 2;
/// Name of the only rope and the only cache, and the type of every layer.
const HYBRID: &str = "hybrid";

/// Reads the description of a model from its configuration.
///
/// # Errors
/// A key is missing or has an impossible value, or a feature is not implemented.
pub fn parse(k: Keys<'_>, skip: ZayaSkip) -> Result<Decoder> {
    k.expect("tie_word_embeddings", &[json!(true)])?;
    k.expect("attention_bias", &[json!(false)])?;
    k.expect("lm_head_bias", &[json!(false)])?;
    k.expect("hidden_act", &SILU.map(Value::from))?;
    k.expect("num_experts_per_tok", &[json!(1)])?;
    k.expect("sliding_window", &[])?;
    for kernel in ["cca_time0", "cca_time1"] {
        k.expect(kernel, &[json!(KERNEL)])?;
    }
    let layers = k.layers()?;
    k.layer_types(layers, &[HYBRID])?;
    let (heads, kv_heads) = (k.size("num_attention_heads")?, k.size("num_key_value_heads")?);
    let head_dim = k.size("head_dim")?;
    k.check_heads(heads, kv_heads)?;
    if !kv_heads.is_multiple_of(2) {
        return Err(k.unsupported(format!(
            "`num_key_value_heads` is {kv_heads}, implemented are even numbers: half of the value heads are of the token before"
        )));
    }
    let (rope, factor) = rope(k, HYBRID, head_dim, true)?;
    let attention = Attention {
        kind: HYBRID,
        heads,
        kv_heads,
        head_dim,
        window: None,
        rope,
        scale: factor as f32 * (head_dim as f32).sqrt().recip(),
        projection: QkvProjection::Convolved,
        has_output_bias: false,
        has_sinks: false,
    };
    let (count, width) = (k.size("num_experts")?, k.size("moe_intermediate_size")?);
    let passes_input = skip == ZayaSkip::Identity;
    let router = RouterKind::Network { width: k.size("router_hidden_size")?, passes_input };
    let experts = experts(k, (count, 1, width), router)?;
    let layer = Layer { attention, activation: Activation::Silu, dense: None, experts: Some(experts) };
    let mut d = decoder(k, "zaya", true, vec![layer; layers])?;
    d.summary.remove("tie_word_embeddings");
    d.readings.insert("zaya_skip".into(), skip.name().into());
    d.summary.insert("num_experts_per_tok".into(), 1.into());
    Ok(Decoder {
        residual: Residual::Affine,
        names: NAMES,
        preset: Preset {
            quant: Quant::lut(IndexBits::Four),
            parts: PartKinds { head: Some(Quant::lut(IndexBits::Six)), ..PartKinds::NONE },
            reason: "it lowers the mean divergence of small-zaya from 0.0306 to 0.0196 nats over 16 prompts, for 16 % more bytes a token",
        },
        attention_kind: Some((
            Quant::int(IntBits::Eight, Granularity::Tensor),
            "stateful shards were measured in INT8 on the ANE, of which some palettized ones crashed",
        )),
        ..d
    })
}

/// Computes the least probability p with which a class of this bias can be chosen before experts of those biases. The
/// class's score p + bias has to exceed each expert's bias, and the experts' scores when they share 1 - p as evenly
/// as possible.
fn needed_probability(experts: &[f32], bias: f32) -> f32 {
    let n = experts.len() as f32;
    let best = experts.iter().copied().fold(f32::NEG_INFINITY, f32::max);
    let shared = (1.0 - n * bias + experts.iter().sum::<f32>()) / (n + 1.0);
    (best - bias).max(shared).max(0.0)
}

/// Explains whether the two readings of the class behind the last expert can differ, and from which probability on.
///
/// # Errors
/// The checkpoint cannot be read.
pub fn remarks(d: &Decoder, checkpoint: &CheckedCheckpoint) -> Result<Vec<String>> {
    let mut reachable = Vec::new();
    let mut least = f32::INFINITY;
    let (mut low, mut high) = (f32::INFINITY, f32::NEG_INFINITY);
    for (layer, e) in d.routed() {
        let all = checkpoint.vector(&d.tensor(Some(layer), "balancing_biases"), e.classes())?;
        let (experts, skip) = all.split_at(e.count);
        let needed = needed_probability(experts, skip[0]);
        if needed < 1.0 {
            reachable.push(layer.to_string());
            least = least.min(needed);
        }
        (low, high) = (low.min(skip[0]), high.max(skip[0]));
    }
    let layers = d.layers.len();
    Ok(vec![if reachable.is_empty() {
        format!(
            "the class behind the last expert (skip) can never be chosen: biases {low} to {high} in {layers} layers; \
             --zaya-skip identity and zero are the same"
        )
    } else {
        format!(
            "the class behind the last expert (skip) can be chosen in {} of {layers} layers ({}), from a probability of \
             {least:.4} on: biases {low} to {high}; --zaya-skip identity (the original implementation, the default) and zero \
             (transformers, which also overwrites these biases with -1 when it loads them) differ there",
            reachable.len(),
            reachable.join(", ")
        )
    }])
}

/// Returns the published configuration of ZAYA1-8B.
pub fn published_config() -> Value {
    json!({
        "model_type": "zaya", "hidden_size": 2048, "num_hidden_layers": 40, "layer_types": vec!["hybrid"; 40],
        "num_attention_heads": 8, "num_key_value_heads": 2, "head_dim": 128, "num_experts": 16, "num_experts_per_tok": 1,
        "moe_intermediate_size": 2048, "router_hidden_size": 256, "cca_time0": 2, "cca_time1": 2, "hidden_act": "silu",
        "rope_parameters": {"hybrid": {"rope_type": "default", "rope_theta": 5000000.0, "partial_rotary_factor": 0.5}},
        "rms_norm_eps": 1e-5, "vocab_size": 262272, "tie_word_embeddings": true, "pad_token_id": 0, "bos_token_id": 2,
        "eos_token_id": 106, "max_position_embeddings": 131072, "attention_bias": false, "lm_head_bias": false,
        "sliding_window": null
    })
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn what_a_class_needs_to_be_chosen() {
        // Without biases, more than an equal share.
        assert!((needed_probability(&[0.0; 3], 0.0) - 0.25).abs() < 1e-6);
        // Never, with the biases that training starts with.
        assert!(needed_probability(&[0.0, 0.01, -0.01], -1.0) >= 1.0);
        assert!((needed_probability(&[-0.1, -0.2], -1.0) - 0.9).abs() < 1e-6);
        // Two experts at 0.3 + 0.2, the class at 0.4 + 0.1.
        assert!((needed_probability(&[0.2, 0.2], 0.1) - 0.4).abs() < 1e-6);
        // Always.
        assert_eq!(needed_probability(&[0.0, 0.1], 2.0), 0.0);
    }
}
