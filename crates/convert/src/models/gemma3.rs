//! Gemma 3 without images: dense layers with norms around each branch (`model_type` gemma3_text, and gemma3 for the
//! text model of a checkpoint with images).

use super::common_keys::{attention_of, decoder, windows};
use super::decoder::{Decoder, HeadNorm, Layer, Norms, QkvProjection, ValueSource};
use super::keys::Keys;
use crate::Result;
use crate::lower::Activation;
use serde_json::{Map, Value, json};

/// Names of tensors, where other families have other ones.
const NAMES: &[(&str, &str)] = &[
    ("post_attention_norm", "post_attention_layernorm.weight"),
    ("dense_input", "pre_feedforward_layernorm.weight"),
    ("post_feedforward_norm", "post_feedforward_layernorm.weight"),
];
/// Every n-th layer attends to all positions, where the configuration does not say.
const PATTERN: usize = 6;
/// Bases of the two ropes, where the configuration does not say.
const THETAS: (f64, f64) = (1e6, 1e4);
/// Number that the stream is divided by in packages: the stream of the larger models leaves the range of fp16.
const STREAM_UNIT: f32 = 64.0;

/// Reads the description of a model from its configuration.
///
/// # Errors
/// A key is missing or has an impossible value, or a feature is not implemented.
pub fn parse(k: Keys<'_>) -> Result<Decoder> {
    for key in ["hidden_activation", "hidden_act"] {
        k.expect(key, &[json!("gelu_pytorch_tanh")])?;
    }
    k.expect("attention_bias", &[json!(false)])?;
    k.expect("attn_logit_softcapping", &[])?;
    k.expect("use_bidirectional_attention", &[json!(false)])?;
    let key =
        ["sliding_window_pattern", "_sliding_window_pattern"].into_iter().find(|key| k.get(key).is_some());
    let pattern = key.map_or(Ok(PATTERN), |key| k.size(key))?;
    let (heads, kv_heads) = (k.size_or("num_attention_heads", 8)?, k.size_or("num_key_value_heads", 4)?);
    let sizes = (heads, kv_heads, k.size_or("head_dim", 256)?);
    let projection =
        QkvProjection::Direct { norm: HeadNorm::PerHead, values: ValueSource::Own, has_bias: false };
    let scalar = k.number("query_pre_attn_scalar")?.unwrap_or(256.0);
    let width = k.size("intermediate_size")?;
    let mut layers = Vec::new();
    for window in windows(k, |l| (l + 1) % pattern != 0)? {
        let own = with_rope(k, window.is_none());
        let own = Keys { map: &own, path: k.path };
        let attention = attention_of(own, sizes, window, scalar.sqrt(), projection)?;
        layers.push(Layer { attention, activation: Activation::GeluTanh, dense: Some(width), experts: None });
    }
    let d = decoder(k, "gemma3", true, layers)?;
    Ok(Decoder {
        norms: Norms::Around,
        norm_offset: 1.0,
        // transformers rounds the factor to bf16 where the weights are bf16, and llama.cpp does not.
        embedding_scale: (d.hidden as f32).sqrt(),
        stream_unit: STREAM_UNIT,
        softcap: k.softcapping("final_logit_softcapping")?,
        names: NAMES,
        ..d
    })
}

/// Returns the keys with those of a layer's rope. `rope_scaling`, of the older spelling, is that of the full layers alone.
fn with_rope(k: Keys<'_>, is_full: bool) -> Map<String, Value> {
    let (key, theta) = if is_full { ("rope_theta", THETAS.0) } else { ("rope_local_base_freq", THETAS.1) };
    let mut own = k.map.clone();
    own.insert("rope_theta".into(), k.get(key).cloned().unwrap_or(json!(theta)));
    if !is_full {
        own.remove("rope_scaling");
    }
    own
}

/// Returns the published configuration of Gemma-3-1B.
pub fn gemma_1b() -> Value {
    json!({
        "model_type": "gemma3_text", "hidden_size": 1152, "intermediate_size": 6912, "num_hidden_layers": 26,
        "num_attention_heads": 4, "num_key_value_heads": 1, "head_dim": 256, "hidden_activation": "gelu_pytorch_tanh",
        "attention_bias": false, "rms_norm_eps": 1e-6, "vocab_size": 262144, "max_position_embeddings": 32768,
        "query_pre_attn_scalar": 256, "rope_theta": 1000000, "rope_local_base_freq": 10000, "rope_scaling": null,
        "sliding_window": 512, "sliding_window_pattern": 6, "attn_logit_softcapping": null, "final_logit_softcapping": null,
        "bos_token_id": 2, "eos_token_id": [1, 106], "pad_token_id": 0
    })
}

#[cfg(test)]
mod tests {
    use super::super::tests::parsed;
    use super::*;

    #[test]
    fn both_spellings_of_ropes_and_windows_are_one() {
        let mut old = gemma_1b();
        old["rope_scaling"] = json!({"rope_type": "linear", "factor": 8.0});
        let mut new = old.clone();
        for key in ["rope_theta", "rope_local_base_freq", "rope_scaling", "sliding_window_pattern"] {
            new.as_object_mut().unwrap().remove(key);
        }
        new["rope_parameters"] = json!({
            "full_attention": {"rope_type": "linear", "rope_theta": 1e6, "factor": 8.0},
            "sliding_attention": {"rope_type": "default", "rope_theta": 1e4}});
        new["layer_types"] =
            (0..26).map(|l| if l % 6 == 5 { "full_attention" } else { "sliding_attention" }).collect();
        assert_eq!(parsed(&old).unwrap().layers, parsed(&new).unwrap().layers);
        let full = &parsed(&old).unwrap().layers[5].attention;
        assert_eq!((full.rope.inv_freq[0], full.window), (0.125, None));
    }
}
