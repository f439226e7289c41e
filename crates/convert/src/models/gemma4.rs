//! Gemma 4 with experts (Gemma-4-26B-A4B) and without (Gemma-4-31B): `model_type` gemma4 or gemma4_text, in the published form and
//! in the form that transformers saves. `gemma4_assistant` is a model without keys and values that drafts for one of these.

use super::common_keys::{FULL_ATTENTION, SLIDING_ATTENTION, attention_of, decoder, experts};
use super::decoder::{
    Attention, Decoder, HeadNorm, Layer, Norms, QkvProjection, Residual, RouterKind, ValueSource,
};
use super::keys::{Keys, merged};
use crate::Result;
use crate::lower::Activation;
use anemoe_bundle::{Assistant, Centroids};
use serde_json::{Value, json};

/// Names of tensors, where other families have other ones.
const NAMES: &[(&str, &str)] = &[
    ("post_attention_norm", "post_attention_layernorm.weight"),
    ("dense_input", "pre_feedforward_layernorm.weight"),
    ("dense_norm", "post_feedforward_layernorm_1.weight"),
    ("expert_input", "pre_feedforward_layernorm_2.weight"),
    ("experts_norm", "post_feedforward_layernorm_2.weight"),
    ("post_feedforward_norm", "post_feedforward_layernorm.weight"),
    ("hidden_out", "layer_scalar"),
    ("router_logits", "router.proj.weight"),
    ("router_input", "router.scale"),
    ("expert_scale", "router.per_expert_scale"),
    ("gate_up", "experts.gate_up_proj"),
    ("down", "experts.down_proj"),
];
/// Prefixes of the text model's tensors: beside other modalities, and alone.
pub const PREFIXES: &[&str] = &["model.language_model.", "model.", "language_model.", ""];

/// Reads the description of a model from its configuration.
///
/// # Errors
/// A key is missing or has an impossible value, or a feature is not implemented.
pub fn parse(k: Keys<'_>) -> Result<Decoder> {
    expect_common(k)?;
    k.expect("num_kv_shared_layers", &[json!(0)])?;
    let router = RouterKind::Linear { has_bias: false, renormalizes: true, is_scaled: true };
    let experts = match k.flag("enable_moe_block", false)? {
        false => None,
        true => {
            let (count, active) = (k.size("num_experts")?, k.size("top_k_experts")?);
            Some(experts(k, (count, active, k.size("moe_intermediate_size")?), router)?)
        }
    };
    let dense = k.size("intermediate_size")?;
    let attentions = attentions(k)?;
    let full = attentions.iter().filter(|a| a.window.is_none()).count();
    let layer =
        |attention| Layer { attention, activation: Activation::GeluTanh, dense: Some(dense), experts };
    let mut d = decoder(k, "gemma4", true, attentions.into_iter().map(layer).collect())?;
    for key in ["head_dim", "num_key_value_heads", "tie_word_embeddings"] {
        d.summary.remove(key);
    }
    d.summary.insert("full_attention_layers".into(), full.into());
    Ok(Decoder {
        norms: Norms::Around,
        residual: Residual::LayerScalar,
        embedding_scale: (d.hidden as f32).sqrt(),
        softcap: k.softcapping("final_logit_softcapping")?,
        names: NAMES,
        prefixes: PREFIXES,
        ..d
    })
}

/// Reads the description of an assistant from its configuration.
///
/// # Errors
/// A key is missing or has an impossible value, or a feature is not implemented.
pub fn parse_assistant(k: Keys<'_>, all: Keys<'_>) -> Result<Decoder> {
    expect_common(k)?;
    k.expect("enable_moe_block", &[json!(false)])?;
    // 0 stands for all, too.
    k.expect("num_kv_shared_layers", &[json!(0), json!(k.layers()?)])?;
    let dense = Some(k.size("intermediate_size")?);
    let layer = |mut attention: Attention| {
        attention.projection = QkvProjection::Lent;
        Layer { attention, activation: Activation::GeluTanh, dense, experts: None }
    };
    let layers: Vec<Layer> = attentions(k)?.into_iter().map(layer).collect();
    for l in &layers {
        let own = |of: &&Layer| of.attention.kind == l.attention.kind;
        if layers.iter().find(own).is_some_and(|first| first.attention != l.attention) {
            return Err(k.unsupported("layers of one kind with different key/value heads".into()));
        }
    }
    let d = decoder(k, "gemma4_assistant", true, layers)?;
    let centroids = match all.flag("use_ordered_embeddings", false)? {
        false => None,
        true => {
            let (count, top_k) = (all.size("num_centroids")?, all.size("centroid_intermediate_top_k")?);
            if !d.vocab.is_multiple_of(count) || top_k > count {
                let what = format!(
                    "`num_centroids` is {count} and `centroid_intermediate_top_k` {top_k}, where `vocab_size` is {}",
                    d.vocab
                );
                return Err(k.invalid(what));
            }
            Some(Centroids { count, top_k })
        }
    };
    let target_hidden_size = all.size("backbone_hidden_size")?;
    Ok(Decoder {
        norms: Norms::Around,
        residual: Residual::LayerScalar,
        softcap: None,
        names: NAMES,
        assistant: Some(Assistant { target_hidden_size, eps: d.eps, centroids }),
        ..d
    })
}

/// Refuses features that are not implemented, in models and in assistants.
fn expect_common(k: Keys<'_>) -> Result<()> {
    k.expect("tie_word_embeddings", &[json!(true)])?;
    k.expect("attention_bias", &[json!(false)])?;
    k.expect("hidden_size_per_layer_input", &[json!(0)])?;
    k.expect("use_double_wide_mlp", &[json!(false)])?;
    k.expect("hidden_activation", &[json!("gelu_pytorch_tanh")])?;
    k.expect("hidden_act", &[json!("gelu_pytorch_tanh")])?;
    // Text is causal either way; images, which "vision" concerns, are not read.
    k.expect("use_bidirectional_attention", &[json!("vision"), json!(false)])?;
    k.expect("attn_logit_softcapping", &[])
}

fn attentions(k: Keys<'_>) -> Result<Vec<Attention>> {
    let count = k.layers()?;
    let types = k.layer_types(count, &[FULL_ATTENTION, SLIDING_ATTENTION])?;
    let mut types = types.ok_or_else(|| k.invalid("`layer_types` is missing".into()))?;
    // transformers makes the last layer a full one, whatever the configuration says.
    types.iter_mut().last().into_iter().for_each(|last| *last = FULL_ATTENTION);
    let heads = k.size("num_attention_heads")?;
    let window = k.size("sliding_window")?;
    let (head_dim, kv_heads) = (k.size("head_dim")?, k.size("num_key_value_heads")?);
    let k_eq_v = k.flag("attention_k_eq_v", false)?;
    let overrides = k.object("per_layer_config")?;
    let is_layer = |key: &String| (0..count).any(|l| l.to_string() == *key);
    if let Some(key) = overrides.and_then(|o| o.map.keys().find(|key| !is_layer(key))) {
        let last = count - 1;
        return Err(k.invalid(format!("`per_layer_config` has `{key}`, expected layers from 0 to {last}")));
    }
    let mut all: Vec<Attention> = Vec::new();
    for (l, of) in types.into_iter().enumerate() {
        let is_full = of == FULL_ATTENTION;
        let (mut d, mut kv_heads) = (head_dim, kv_heads);
        if is_full {
            // The published form names the full layers' sizes once.
            d = k.size_or("global_head_dim", d)?;
            if k_eq_v {
                kv_heads = k.size_or("num_global_key_value_heads", kv_heads)?;
            }
        }
        if let Some(own) = overrides.and_then(|o| o.get(&l.to_string())) {
            // The saved form names these sizes layer by layer.
            let wrong = || k.invalid(format!("`per_layer_config.{l}` is not an object"));
            for (key, value) in own.as_object().ok_or_else(wrong)? {
                match key.as_str() {
                    "head_dim" => d = k.size_of(key, value)?,
                    "num_key_value_heads" => kv_heads = k.size_of(key, value)?,
                    _ => return Err(k.unsupported(format!("`per_layer_config.{l}.{key}`"))),
                }
            }
        }
        let values = if k_eq_v && is_full { ValueSource::KeysNormed } else { ValueSource::OwnNormed };
        let projection = QkvProjection::Direct { norm: HeadNorm::PerHead, values, has_bias: false };
        let window = (!is_full).then_some(window);
        let attention = attention_of(k, (heads, kv_heads, d), window, 1.0, projection)?;
        // A rope and a cache are shared by all layers of a kind.
        if all.iter().any(|a| a.kind == attention.kind && a.head_dim != d) {
            return Err(k.unsupported("layers of one kind with different head_dim".into()));
        }
        all.push(attention);
    }
    Ok(all)
}

/// Returns the published configuration of Gemma-4-26B-A4B.
pub fn published_config() -> Value {
    let layer_types: Vec<&str> =
        (0..30).map(|l| if l % 6 == 5 { "full_attention" } else { "sliding_attention" }).collect();
    json!({
        "model_type": "gemma4",
        "tie_word_embeddings": true,
        "text_config": {
            "model_type": "gemma4_text", "hidden_size": 2816, "num_hidden_layers": 30, "layer_types": layer_types,
            "num_attention_heads": 16, "head_dim": 256, "num_key_value_heads": 8, "global_head_dim": 512,
            "num_global_key_value_heads": 2, "attention_k_eq_v": true, "sliding_window": 1024, "attention_bias": false,
            "intermediate_size": 2112, "enable_moe_block": true, "num_experts": 128, "top_k_experts": 8,
            "moe_intermediate_size": 704, "hidden_activation": "gelu_pytorch_tanh", "rms_norm_eps": 1e-6,
            "vocab_size": 262144, "tie_word_embeddings": true, "final_logit_softcapping": 30.0,
            "max_position_embeddings": 262144, "hidden_size_per_layer_input": 0, "num_kv_shared_layers": 0,
            "use_double_wide_mlp": false, "use_bidirectional_attention": "vision", "bos_token_id": 2, "eos_token_id": [1, 106],
            "pad_token_id": 0,
            "rope_parameters": {
                "sliding_attention": {"rope_type": "default", "rope_theta": 10000.0},
                "full_attention": {"rope_type": "proportional", "rope_theta": 1000000.0, "partial_rotary_factor": 0.25}
            }
        }
    })
}

/// Returns the published configuration of the assistant of Gemma-4-26B-A4B.
pub fn published_assistant() -> Value {
    let own = json!({
        "hidden_size": 1024, "intermediate_size": 8192, "num_hidden_layers": 4, "num_kv_shared_layers": 4,
        "layer_types": ["sliding_attention", "sliding_attention", "sliding_attention", "full_attention"],
        "enable_moe_block": false, "final_logit_softcapping": null
    });
    let text = merged(published_config()["text_config"].take(), own);
    json!({
        "model_type": "gemma4_assistant", "tie_word_embeddings": true, "backbone_hidden_size": 2816,
        "use_ordered_embeddings": false, "text_config": text
    })
}

#[cfg(test)]
mod tests {
    use super::super::tests::parsed;
    use super::*;
    use serde_json::Map;

    #[test]
    fn both_forms_of_the_configuration_are_one() {
        let published = published_config();
        let mut saved = published["text_config"].clone();
        let map = saved.as_object_mut().unwrap();
        map.remove("global_head_dim");
        map.remove("num_global_key_value_heads");
        let layers: Map<String, Value> = [5, 11, 17, 23, 29]
            .iter()
            .map(|l| (l.to_string(), json!({"head_dim": 512, "num_key_value_heads": 2})))
            .collect();
        map.insert("per_layer_config".into(), layers.into());
        assert_eq!(parsed(&published).unwrap().layers, parsed(&saved).unwrap().layers);
        // The last layer is a full one, whatever its type.
        let mut sliding = published.clone();
        sliding["text_config"]["layer_types"][29] = json!("sliding_attention");
        assert_eq!(parsed(&published).unwrap().layers, parsed(&sliding).unwrap().layers);
    }

    #[test]
    fn heads_of_full_layers_are_their_own_where_values_are_the_keys() {
        let mut config = published_config();
        let kv_heads = |config: &Value| parsed(config).unwrap().layers[5].attention.kv_heads;
        assert_eq!(kv_heads(&config), 2);
        config["text_config"]["attention_k_eq_v"] = json!(false);
        assert_eq!(kv_heads(&config), 8);
    }
}
