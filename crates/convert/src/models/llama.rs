//! Llama and its relatives: dense layers with a gated MLP (`model_type` llama, mistral, qwen2, qwen3, and
//! mistral3 for the text model of one with images).

use super::common_keys::{attention, decoder, expect_silu, sliding, windows};
use super::decoder::{Attention, Decoder, HeadNorm, Layer};
use super::keys::Keys;
use super::tensor_table::{HEAD, TensorRow};
use crate::Result;
use crate::checkpoint::{Checkpoint, TensorOrigin};
use crate::lower::Activation;
use serde_json::{Value, json};

/// Returns the values of keys that a configuration may lack.
pub fn defaults(of: &str) -> Value {
    let (positions, kv_heads, head_dim) = match of {
        "mistral" => (131_072, Some(8), None),
        "qwen2" => (32_768, Some(32), None),
        "qwen3" => (32_768, Some(32), Some(128)),
        _ => (2048, None, None),
    };
    json!({"rms_norm_eps": 1e-6, "rope_theta": 1e4, "max_position_embeddings": positions, "num_key_value_heads": kv_heads,
        "head_dim": head_dim, "sliding_window": (of != "llama").then_some(4096), "max_window_layers": 28})
}

/// Reads the description of a model from its configuration.
///
/// # Errors
/// A key is missing or has an impossible value, or a feature is not implemented.
pub fn parse(k: Keys<'_>) -> Result<Decoder> {
    expect_silu(k)?;
    let family = match k.get("model_type").and_then(Value::as_str) {
        Some("mistral") => "mistral",
        Some("qwen2") => "qwen2",
        Some("qwen3") => "qwen3",
        _ => "llama",
    };
    // (norm of heads, bias of queries, keys and values, bias of the output); Mistral's projections have none.
    let bias = family != "mistral" && k.flag("attention_bias", false)?;
    let (norm, has_bias, has_output_bias) = match family {
        "qwen2" => (HeadNorm::None, true, false),
        "qwen3" => (HeadNorm::PerHead, bias, bias),
        _ => (HeadNorm::None, bias, bias),
    };
    // Mistral's window is that of all layers. Qwen's is that of the layers from a number on, where it is asked for. Llama has none.
    let has_window = k.get("sliding_window").is_some();
    let first = k.get("max_window_layers").and_then(Value::as_u64).unwrap_or(0);
    let windows = match family {
        "llama" => sliding(k, |_| false)?,
        "mistral" => sliding(k, |_| has_window)?,
        _ => {
            let slides = has_window && k.flag("use_sliding_window", false)?;
            windows(k, |l| slides && l as u64 >= first)?
        }
    };
    let width = k.size("intermediate_size")?;
    let mut layers = Vec::new();
    for window in windows {
        let attention = Attention { has_output_bias, ..attention(k, norm, window, has_bias)? };
        layers.push(Layer { attention, activation: Activation::Silu, dense: Some(width), experts: None });
    }
    decoder(k, family, false, layers)
}

/// Name of the head in the older layout of a model with images, where it stands beside the text model.
pub const HEAD_BESIDE: &str = "language_model.lm_head.weight";

/// Returns the place of the head in the older layout of a model with images, where it stands beside the text model.
pub fn origin(row: &TensorRow, _: &str, checkpoint: &Checkpoint) -> Option<TensorOrigin> {
    let is_beside = row.name == HEAD && checkpoint.source.info(HEAD_BESIDE).is_some();
    is_beside.then(|| TensorOrigin::Whole(HEAD_BESIDE.into()))
}

/// Returns the published configuration of Llama-3.2-1B.
pub fn llama_1b() -> Value {
    json!({
        "model_type": "llama", "hidden_size": 2048, "intermediate_size": 8192, "num_hidden_layers": 16,
        "num_attention_heads": 32, "num_key_value_heads": 8, "head_dim": 64, "hidden_act": "silu", "attention_bias": false,
        "mlp_bias": false, "rms_norm_eps": 1e-5, "vocab_size": 128256, "tie_word_embeddings": true,
        "max_position_embeddings": 131072, "rope_theta": 500000.0, "bos_token_id": 128000, "eos_token_id": [128001, 128008, 128009],
        "rope_scaling": {"rope_type": "llama3", "factor": 32.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0,
            "original_max_position_embeddings": 8192}
    })
}

/// Returns the published configuration of Qwen3-0.6B.
pub fn qwen3_600m() -> Value {
    json!({
        "model_type": "qwen3", "hidden_size": 1024, "intermediate_size": 3072, "num_hidden_layers": 28,
        "num_attention_heads": 16, "num_key_value_heads": 8, "head_dim": 128, "hidden_act": "silu", "attention_bias": false,
        "rms_norm_eps": 1e-6, "vocab_size": 151936, "tie_word_embeddings": true, "max_position_embeddings": 40960,
        "rope_theta": 1000000.0, "rope_scaling": null, "sliding_window": null, "use_sliding_window": false,
        "max_window_layers": 28, "bos_token_id": 151643, "eos_token_id": 151645
    })
}

#[cfg(test)]
mod tests {
    use super::super::decoder::QkvProjection;
    use super::super::tests::parsed;
    use super::*;

    #[test]
    fn windows_follow_the_family() {
        let mut config = qwen3_600m();
        config["sliding_window"] = json!(4096);
        let windows = |config: &Value| -> Vec<Option<usize>> {
            parsed(config).unwrap().layers.iter().map(|l| l.attention.window).collect()
        };
        assert!(windows(&config).iter().all(Option::is_none));
        config["use_sliding_window"] = json!(true);
        config["max_window_layers"] = json!(27);
        assert_eq!(windows(&config)[26..], [None, Some(4096)]);
        config["model_type"] = json!("mistral");
        assert!(windows(&config).iter().all(|w| *w == Some(4096)));
        config["use_sliding_window"] = json!(false);
        assert!(windows(&config).iter().all(|w| *w == Some(4096)));
    }

    #[test]
    fn keys_that_transformers_does_not_read_say_nothing() {
        let mut config = llama_1b();
        let plain = parsed(&config).unwrap();
        for (key, value) in [
            ("final_logit_softcapping", json!(5.0)),
            ("layer_types", json!(["sliding_attention"])),
            ("sliding_window", json!(8)),
            ("use_sliding_window", json!(true)),
            ("max_window_layers", json!(0)),
        ] {
            config[key] = value;
        }
        let decoder = parsed(&config).unwrap();
        assert_eq!((decoder.softcap, &decoder.layers), (None, &plain.layers));
    }

    #[test]
    fn projections_of_mistral_have_no_bias() {
        let mut config = qwen3_600m();
        config["attention_bias"] = json!(true);
        let biases = |config: &Value| {
            let layer = parsed(config).unwrap().layers.remove(0);
            let QkvProjection::Direct { has_bias, .. } = layer.attention.projection else {
                panic!("a projection of its own")
            };
            [has_bias, layer.attention.has_output_bias]
        };
        assert_eq!(biases(&config), [true; 2]);
        config["model_type"] = json!("mistral");
        assert_eq!(biases(&config), [false; 2]);
    }
}
