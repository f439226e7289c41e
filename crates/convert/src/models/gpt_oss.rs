//! gpt-oss: sinks in the softmax, biases everywhere, every second layer with a window, a clamped gate (`model_type`
//! gpt_oss).

use super::common_keys::{SILU, attention, decoder, experts, windows};
use super::decoder::{Attention, Decoder, ExpertLayer, HeadNorm, Layer, RouterKind};
use super::keys::Keys;
use super::tensor_table::TensorRow;
use crate::Result;
use crate::checkpoint::{Checkpoint, TensorOrigin};
use crate::lower::Activation;
use serde_json::{Value, json};

/// Names of tensors, where other families have other ones.
const NAMES: &[(&str, &str)] = &[("router_logits", "mlp.router.weight")];

/// Returns the rope of a configuration that names none.
fn default_rope() -> Value {
    json!({"rope_type": "yarn", "factor": 32.0, "beta_fast": 32.0, "beta_slow": 1.0, "truncate": false,
        "original_max_position_embeddings": 4096})
}

/// Reads the description of a model from its configuration.
///
/// # Errors
/// A key is missing or has an impossible value, or a feature is not implemented.
pub fn parse(k: Keys<'_>) -> Result<Decoder> {
    k.expect("hidden_act", &SILU.map(Value::from))?;
    let mut own = k.map.clone();
    if k.get("rope_parameters").is_none() && k.get("rope_scaling").is_none() {
        own.insert("rope_scaling".into(), default_rope());
    }
    let k = Keys { map: &own, path: k.path };
    let bias = k.flag("attention_bias", true)?;
    let (count, active) = (k.size("num_local_experts")?, k.size("num_experts_per_tok")?);
    let router = RouterKind::Linear { has_bias: true, renormalizes: true, is_scaled: false };
    let experts = experts(k, (count, active, k.size("intermediate_size")?), router)?;
    let experts = Some(ExpertLayer { has_bias: true, ..experts });
    let activation = Activation::ClampedSilu {
        limit: k.number("swiglu_limit")?.unwrap_or(7.0) as f32,
        steepness: k.number("swiglu_alpha")?.unwrap_or(1.702) as f32,
    };
    let mut layers = Vec::new();
    for window in windows(k, |l| l % 2 == 0)? {
        let attention = Attention { has_sinks: true, ..attention(k, HeadNorm::None, window, bias)? };
        layers.push(Layer { attention, activation, dense: None, experts });
    }
    Ok(Decoder { names: NAMES, ..decoder(k, "gpt_oss", false, layers)? })
}

/// Returns the place of an expert tensor in a checkpoint, which has inputs before outputs, and rows of the gate and of
/// the up projection in turn; published ones are MXFP4.
pub fn origin(row: &TensorRow, prefix: &str, checkpoint: &Checkpoint) -> Option<TensorOrigin> {
    let name = format!("{prefix}{}", row.name);
    let has = |name: &str| checkpoint.source.info(name).is_some();
    let interleaved = if row.role.starts_with("gate_up") { 2 } else { 1 };
    match row.role {
        "gate_up_bias" => Some(TensorOrigin::Sorted { name, interleaved }),
        "gate_up" | "down" if has(&format!("{name}_blocks")) => Some(TensorOrigin::Mxfp4 {
            blocks: format!("{name}_blocks"),
            scales: format!("{name}_scales"),
            interleaved,
        }),
        "gate_up" | "down" => Some(TensorOrigin::Transposed { name, interleaved }),
        _ => None,
    }
}

/// Returns the published configuration of gpt-oss-20b.
pub fn gpt_oss_20b() -> Value {
    let types: Vec<&str> =
        (0..24).map(|l| if l % 2 == 0 { "sliding_attention" } else { "full_attention" }).collect();
    json!({
        "model_type": "gpt_oss", "hidden_size": 2880, "intermediate_size": 2880, "num_hidden_layers": 24, "layer_types": types,
        "num_attention_heads": 64, "num_key_value_heads": 8, "head_dim": 64, "num_local_experts": 32, "num_experts_per_tok": 4,
        "sliding_window": 128, "hidden_act": "silu", "swiglu_limit": 7.0, "attention_bias": true, "rms_norm_eps": 1e-5,
        "vocab_size": 201088, "tie_word_embeddings": false, "max_position_embeddings": 131072, "rope_theta": 150000.0,
        "rope_scaling": default_rope(),
        "eos_token_id": 200002, "pad_token_id": 199999
    })
}

#[cfg(test)]
mod tests {
    use super::super::tests::parsed;
    use super::*;

    #[test]
    fn windows_take_turns_and_yarn_makes_scores_larger() {
        let d = parsed(&gpt_oss_20b()).unwrap();
        assert_eq!(d.layers[0].attention.window, Some(128));
        assert_eq!(d.layers[1].attention.window, None);
        // YaRN makes cosines and sines longer by 0.1 ln 32 + 1.
        let longer = 0.1 * 32f32.ln() + 1.0;
        assert!((d.layers[0].attention.scale - longer * longer / 8.0).abs() < 1e-6);
    }
}
