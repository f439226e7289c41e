//! Registry of the families.

use super::decoder::Decoder;
use super::family::Remarks;
use super::keys::Keys;
use super::tensor_table::TensorRow;
use super::{gemma3, gemma4, gpt_oss, llama, qwen_moe, zaya};
use crate::checkpoint::{Checkpoint, TensorOrigin};
use crate::variants::{HADAMARD, ROTATION, Variants};
use crate::{Error, Result};
use serde_json::{Value, json};
use std::path::Path;

/// Entry of the registry.
pub struct KnownFamily {
    /// Values of `model_type`.
    types: &'static [&'static str],
    /// Further values of `text_config.model_type`.
    inner: &'static [&'static str],
    /// Reads the description from the configuration of the text model, and from the whole configuration.
    parse: fn(Keys<'_>, Keys<'_>, Variants) -> Result<Decoder>,
    /// Returns the values of keys that a configuration of a type may lack, as transformers 5.24 has them: it writes no key
    /// that has its default in the text model of a model with images.
    defaults: fn(&str) -> Value,
    /// Returns the place of a tensor that a checkpoint has in another layout.
    pub origin: fn(&TensorRow, &str, &Checkpoint) -> Option<TensorOrigin>,
    pub remarks: Remarks,
}

/// An entry whose checkpoints have the tensors of its description.
const PLAIN: KnownFamily = KnownFamily {
    types: &[],
    inner: &[],
    parse: |k, _, _| llama::parse(k),
    defaults: |_| json!({}),
    origin: |_, _, _| None,
    remarks: |_, _| Ok(Vec::new()),
};

/// All families.
const FAMILIES: &[KnownFamily] = &[
    KnownFamily {
        types: &["gemma4", "gemma4_text"],
        parse: |k, _, _| gemma4::parse(k),
        origin: qwen_moe::origin,
        ..PLAIN
    },
    KnownFamily {
        types: &["gemma4_assistant"],
        inner: &["gemma4_text"],
        parse: |k, all, _| gemma4::parse_assistant(k, all),
        ..PLAIN
    },
    KnownFamily {
        types: &["zaya"],
        parse: |k, _, variants| zaya::parse(k, variants.zaya_skip.unwrap_or_default()),
        remarks: zaya::remarks,
        ..PLAIN
    },
    KnownFamily {
        types: &["llama", "mistral", "mistral3", "qwen2", "qwen3"],
        defaults: llama::defaults,
        origin: llama::origin,
        ..PLAIN
    },
    KnownFamily {
        types: &["qwen3_moe"],
        parse: |k, _, _| qwen_moe::parse_qwen(k),
        defaults: |_| {
            json!({"rms_norm_eps": 1e-6, "rope_theta": 1e4, "max_position_embeddings": 32_768, "num_key_value_heads": 4,
                "sliding_window": 4096})
        },
        origin: qwen_moe::origin,
        ..PLAIN
    },
    KnownFamily {
        types: &["olmoe"],
        parse: |k, _, _| qwen_moe::parse_olmoe(k),
        defaults: |_| json!({"rms_norm_eps": 1e-5, "rope_theta": 1e4, "max_position_embeddings": 4096}),
        origin: qwen_moe::origin,
        ..PLAIN
    },
    KnownFamily {
        types: &["gemma3", "gemma3_text"],
        parse: |k, _, _| gemma3::parse(k),
        defaults: |_| json!({"rms_norm_eps": 1e-6, "vocab_size": 262_208, "max_position_embeddings": 131_072, "sliding_window": 4096}),
        ..PLAIN
    },
    KnownFamily {
        types: &["gpt_oss"],
        parse: |k, _, _| gpt_oss::parse(k),
        defaults: |_| {
            json!({"rms_norm_eps": 1e-5, "rope_theta": 150_000.0, "max_position_embeddings": 131_072, "head_dim": 64,
                "num_key_value_heads": 8, "sliding_window": 128})
        },
        origin: gpt_oss::origin,
        ..PLAIN
    },
];

/// Keys for which null is a value of its own.
const MAY_BE_NULL: [&str; 3] = ["head_dim", "num_key_value_heads", "sliding_window"];

/// Reads the description of a checkpoint's model.
///
/// # Errors
/// The family is not known, a key is missing or has an impossible value, or a feature is not implemented.
pub fn describe(checkpoint: &Checkpoint) -> Result<Decoder> {
    parse(&checkpoint.config, &checkpoint.config_path(), checkpoint.variants)
}

/// Reads the description of a model from its configuration.
///
/// # Errors
/// The family is not known, a key is missing or has an impossible value, or a feature is not implemented.
pub fn parse(config: &Value, path: &Path, variants: Variants) -> Result<Decoder> {
    let known = known_family(config, path)?;
    let mut keys = Keys::of_text(config, path)?.map.clone();
    if config.get("text_config").is_some() {
        let all = [known.types, known.inner].concat();
        if let Some(own) = keys.get("model_type").and_then(Value::as_str).filter(|own| !all.contains(own)) {
            let (own, known) = (own.escape_debug(), all.join(", "));
            let what = format!("configuration: `text_config.model_type` is {own}; known are {known}");
            return Err(Error::unsupported(path, what));
        }
        let is_missing = |value: Option<&Value>| value.is_none_or(Value::is_null);
        // transformers' text model of mistral3.
        if config["model_type"] == "mistral3" && is_missing(keys.get("model_type")) {
            keys.insert("model_type".into(), json!("mistral"));
        }
        // Where the two differ, a head of the checkpoint decides (`own_head`).
        if let Some(tied) = config.get("tie_word_embeddings").filter(|tied| !tied.is_null()) {
            let own = keys.get("tie_word_embeddings");
            let differ = !is_missing(own) && own != Some(tied);
            keys.insert("tie_word_embeddings".into(), if differ { json!(true) } else { tied.clone() });
        }
    }
    let own_type = keys.get("model_type").or(config.get("model_type")).and_then(Value::as_str);
    let defaults = (known.defaults)(own_type.unwrap_or_default());
    for (key, value) in defaults.as_object().into_iter().flatten() {
        let own = keys.entry(key.clone()).or_insert_with(|| value.clone());
        if own.is_null() && !MAY_BE_NULL.contains(&key.as_str()) {
            *own = value.clone();
        }
    }
    let mut decoder = (known.parse)(Keys { map: &keys, path }, Keys::of_all(config, path)?, variants)?;
    // A default that no layer uses is no size of the model.
    if Keys::of_text(config, path)?.get("sliding_window").is_none()
        && decoder.layers.iter().all(|l| l.attention.window.is_none())
    {
        decoder.summary.remove("sliding_window");
    }
    if variants.is_rotated {
        decoder.readings.insert(ROTATION.into(), HADAMARD.into());
    }
    Ok(Decoder { is_rotated: variants.is_rotated, ..decoder })
}

/// Returns the family that a configuration names.
///
/// # Errors
/// The configuration names no family, or an unknown one.
pub fn known_family(config: &Value, path: &Path) -> Result<&'static KnownFamily> {
    let own = config.get("model_type").filter(|own| !own.is_null());
    let own = own.ok_or_else(|| Error::invalid(path, "configuration: `model_type` is missing"))?;
    let own = own.as_str().ok_or_else(|| {
        Error::invalid(path, format!("configuration: `model_type` is {own}, expected a name"))
    })?;
    FAMILIES.iter().find(|family| family.types.contains(&own)).ok_or_else(|| {
        let known: Vec<&str> = FAMILIES.iter().flat_map(|family| family.types).copied().collect();
        let what =
            format!("configuration: `model_type` is {}; known are {}", own.escape_debug(), known.join(", "));
        Error::unsupported(path, what)
    })
}
