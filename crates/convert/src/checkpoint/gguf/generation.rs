//! Tokens that end a text and settings for sampling, in the words of `generation_config.json`.

use super::metadata::Metadata;
use crate::Result;
use serde_json::{Map, Value, json};

/// Texts of tokens that end a text or a turn, of llama.cpp's list.
const ENDS: [&str; 10] = [
    "<end_of_turn>",
    "<turn|>",
    "<|tool_response>",
    "<|eot_id|>",
    "<|eom_id|>",
    "<|end_of_text|>",
    "<|im_end|>",
    "<|endoftext|>",
    "<|return|>",
    "<|call|>",
];

/// Returns the tokens that end a text or a turn, the text's end first.
pub fn end_tokens(m: Metadata<'_>) -> Result<Vec<u64>> {
    let mut ids = Vec::new();
    for name in ["eos", "eot", "eom"] {
        ids.extend(m.special_token(name)?);
    }
    // Files often name only the text's end; runtimes know the other tokens by their text.
    if let Some(tokens) = m.texts("tokenizer.ggml.tokens")? {
        let types = m.unsigneds("tokenizer.ggml.token_type", tokens.len())?;
        for (id, text) in tokens.iter().enumerate() {
            // `<|end|>` ends a message of gpt-oss, whose turns end with `<|return|>`.
            let known = ENDS.contains(text) || *text == "<|end|>" && !tokens.contains(&"<|return|>");
            if known && types.as_ref().is_some_and(|t| matches!(t[id], 3 | 4)) {
                ids.push(id as u64);
            }
        }
    }
    let mut seen = std::collections::BTreeSet::new();
    ids.retain(|id| seen.insert(*id));
    Ok(ids)
}

/// Samplers of `general.sampling.sequence`, by llama.cpp's names for each, with the keys that a sampler reads.
const SAMPLERS: [(&[&str], &[&str]); 7] = [
    (&["top_k", "top-k"], &["top_k"]),
    (&["top_p", "top-p", "nucleus"], &["top_p"]),
    (&["min_p", "min-p"], &["min_p"]),
    (&["typ_p", "typ-p", "typ", "typical", "typical_p", "typical-p"], &["typical_p"]),
    (&["temperature", "temp"], &["temp"]),
    (&["xtc"], &["xtc_probability", "xtc_threshold"]),
    (&["penalties"], &["penalty_repeat", "penalty_last_n", "penalty_freq", "penalty_present"]),
];
/// Keys of `general.sampling`, with those of `generation_config.json`, and whether they are whole numbers.
const SETTINGS: [(&str, &str, bool); 14] = [
    ("temp", "temperature", false),
    ("top_k", "top_k", true),
    ("top_p", "top_p", false),
    ("min_p", "min_p", false),
    ("typical_p", "typical_p", false),
    ("penalty_repeat", "repetition_penalty", false),
    ("penalty_last_n", "penalty_last_n", true),
    ("penalty_freq", "frequency_penalty", false),
    ("penalty_present", "presence_penalty", false),
    ("xtc_probability", "xtc_probability", false),
    ("xtc_threshold", "xtc_threshold", false),
    ("mirostat", "mirostat", true),
    ("mirostat_tau", "mirostat_tau", false),
    ("mirostat_eta", "mirostat_eta", false),
];
/// Tokens that llama.cpp's repetition penalty looks at where the file does not say.
const PENALTY_LAST_N: i64 = 64;

/// Returns what the file's makers recommend for sampling, in the words of `generation_config.json`.
fn sampling(m: Metadata<'_>) -> Result<Map<String, Value>> {
    let key = |name: &str| format!("general.sampling.{name}");
    let sequence = m.text(&key("sequence"))?.filter(|s| !s.trim().is_empty());
    let steps: Vec<&str> = sequence.into_iter().flat_map(|s| s.split(';')).map(str::trim).collect();
    // A sampler that a sequence leaves out does not run.
    let runs = |name: &str| {
        let sampler = SAMPLERS.iter().find(|(_, keys)| keys.contains(&name));
        sequence.is_none() || sampler.is_none_or(|(names, _)| steps.iter().any(|s| names.contains(s)))
    };
    let mut c = Map::new();
    for (name, hf, is_whole) in SETTINGS.into_iter().filter(|(name, ..)| runs(name)) {
        let Some(v) = m.any_number(&key(name))? else { continue };
        // llama.cpp takes the most probable token below 0 as at 0, and all tokens above 1 as at 1.
        let v = match name {
            "temp" => v.max(0.0),
            "top_p" | "typical_p" => v.min(1.0),
            _ => v,
        };
        // Others as the shortest decimal of the f32 that the file has.
        let value =
            if is_whole { json!(v as i64) } else { json!((v as f32).to_string().parse().unwrap_or(v)) };
        c.insert(hf.into(), value);
    }
    if c.contains_key("repetition_penalty") {
        c.entry("penalty_last_n").or_insert(json!(PENALTY_LAST_N));
    }
    let is_sampled =
        ["temperature", "top_k", "top_p", "min_p", "typical_p"].iter().any(|k| c.contains_key(*k));
    if is_sampled {
        // A temperature of 0 takes the most probable token.
        let is_hot = c.get("temperature").and_then(Value::as_f64).is_none_or(|t| t > 0.0);
        c.insert("do_sample".into(), json!(is_hot));
        // Without a key, transformers would draw among 50 tokens.
        c.entry("top_k").or_insert(json!(0));
    }
    // Filters see the logits after the temperature, as in transformers; a sequence that asks for something else is
    // kept.
    let first = steps.iter().position(|s| SAMPLERS[..4].iter().any(|(names, _)| names.contains(s)));
    let heat = steps.iter().position(|s| SAMPLERS[4].0.contains(s));
    let is_one = c.get("temperature").and_then(Value::as_f64).is_none_or(|t| t == 1.0 || t == 0.0);
    if let (Some(sequence), Some(first), Some(heat)) = (sequence, first, heat)
        && first < heat
        && !is_one
    {
        c.insert("sequence".into(), json!(sequence));
    }
    Ok(c)
}

/// Makes `generation_config.json`; none where the file names no tokens that end a text, and recommends no sampling.
pub fn generation_config(m: Metadata<'_>) -> Result<Option<Value>> {
    let eos = end_tokens(m)?;
    let mut c = sampling(m)?;
    if eos.is_empty() && c.is_empty() {
        return Ok(None);
    }
    for (name, key) in [("bos_token_id", "bos"), ("pad_token_id", "padding")] {
        if let Some(id) = m.special_token(key)? {
            c.insert(name.into(), json!(id));
        }
    }
    if !eos.is_empty() {
        c.insert("eos_token_id".into(), json!(eos));
    }
    Ok(Some(c.into()))
}
