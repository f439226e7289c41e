//! `config.json` made from the metadata of arch `gemma4`.

use super::metadata::Metadata;
use crate::{Error, Result};
use serde_json::{Map, Value, json};

/// The only architecture that is read.
pub const ARCH: &str = "gemma4";

/// Share of a head's pairs that rotate on full layers, where the file has no `rope_freqs.weight`.
const PARTIAL_ROTARY_FACTOR: f64 = 0.25;
/// `final_logit_softcapping` where the file has none.
const SOFTCAPPING: f64 = 30.0;
/// Least divisor of a frequency that means no rotation of its pair; writers use 1e30.
const NO_ROTATION: f32 = 1e20;

/// Facts about tensors that the configuration needs.
pub struct Tensors<'a> {
    /// Names in the file.
    pub names: Vec<&'a str>,
    /// Rows of the embedding.
    pub vocab_size: Option<u64>,
    /// Divisors of the full layers' frequencies.
    pub rope_freqs: Option<Vec<f32>>,
}

/// Makes the configuration. Keys that it leaves out have the values of the published one.
pub fn config(m: Metadata<'_>, tensors: &Tensors<'_>) -> Result<Value> {
    let key = |name: &str| format!("{ARCH}.{name}");
    let size = |name: &str| -> Result<u64> { m.needed(&key(name), m.unsigned(&key(name))?) };
    let layers = size("block_count")?;
    if !(1..=1000).contains(&layers) {
        return Err(m.invalid(&key("block_count"), format!("is {layers}, expected 1 to 1000")));
    }
    let layers = layers as usize;
    // The entries of these arrays have to be equal, since `config.json` has one number for them.
    let one_size = |name: &str| -> Result<u64> {
        let all = m.needed(&key(name), m.unsigneds(&key(name), layers)?)?;
        match all.iter().find(|n| **n != all[0]) {
            None => Ok(all[0]),
            Some(n) => Err(m.unsupported(&key(name), format!("has {} and {n}: layers differ", all[0]))),
        }
    };
    let number = |name: &str| -> Result<f64> { m.needed(&key(name), m.number(&key(name))?) };

    let sliding_key = key("attention.sliding_window_pattern");
    let sliding = m.needed(&sliding_key, m.flags(&sliding_key)?)?;
    if sliding.len() != layers {
        return Err(m.invalid(&sliding_key, format!("has {} entries for {layers} layers", sliding.len())));
    }
    let kv_key = key("attention.head_count_kv");
    let kv_heads = m.needed(&kv_key, m.unsigneds(&kv_key, layers)?)?;
    let (head_dim, global_head_dim) = (size("attention.key_length_swa")?, size("attention.key_length")?);
    for (name, expected) in [
        ("attention.value_length", global_head_dim),
        ("attention.value_length_swa", head_dim),
        ("rope.dimension_count", global_head_dim),
        ("rope.dimension_count_swa", head_dim),
    ] {
        if let Some(n) = m.unsigned(&key(name))?.filter(|n| *n != expected) {
            return Err(m.unsupported(&key(name), format!("is {n}, implemented is the key's {expected}")));
        }
    }
    if let Some(kind) = m.text(&key("rope.scaling.type"))?.filter(|t| *t != "none") {
        return Err(m.unsupported(&key("rope.scaling.type"), format!("is {kind}, implemented is none")));
    }

    let mut c = Map::new();
    let mut set = |name: &str, value: Value| c.insert(name.into(), value);
    set("model_type", json!("gemma4_text"));
    set("tie_word_embeddings", json!(true));
    set("hidden_size", json!(size("embedding_length")?));
    set("num_hidden_layers", json!(layers));
    set("num_attention_heads", json!(one_size("attention.head_count")?));
    set("intermediate_size", json!(one_size("feed_forward_length")?));
    set("sliding_window", json!(size("attention.sliding_window")?));
    set("max_position_embeddings", json!(size("context_length")?));
    set("rms_norm_eps", json!(number("attention.layer_norm_rms_epsilon")?));
    let experts = m.unsigned(&key("expert_count"))?.unwrap_or(0);
    set("enable_moe_block", json!(experts > 0));
    if experts > 0 {
        set("num_experts", json!(experts));
        set("top_k_experts", json!(size("expert_used_count")?));
        set("moe_intermediate_size", json!(one_size("expert_feed_forward_length")?));
    }
    let softcapping = m.number(&key("final_logit_softcapping"))?.unwrap_or(SOFTCAPPING);
    set("final_logit_softcapping", json!(softcapping));
    // The configuration's reader refuses these features unless they are off.
    for (name, hf) in [
        ("embedding_length_per_layer_input", "hidden_size_per_layer_input"),
        ("attention.shared_kv_layers", "num_kv_shared_layers"),
    ] {
        set(hf, json!(m.unsigned(&key(name))?.unwrap_or(0)));
    }
    if let Some(cap) = m.number(&key("attn_logit_softcapping"))? {
        set("attn_logit_softcapping", json!(cap));
    }

    let kind = |sliding: bool| if sliding { "sliding_attention" } else { "full_attention" };
    set("layer_types", sliding.iter().map(|&s| kind(s)).collect());
    let first = |s: bool| sliding.iter().position(|&x| x == s).map_or(kv_heads[0], |l| kv_heads[l]);
    let (kv, global_kv) = (first(true), first(false));
    set("head_dim", json!(head_dim));
    set("global_head_dim", json!(global_head_dim));
    set("num_key_value_heads", json!(kv));
    set("num_global_key_value_heads", json!(global_kv));
    let mut others = Map::new();
    for (l, &n) in kv_heads.iter().enumerate() {
        if n != if sliding[l] { kv } else { global_kv } {
            others.insert(l.to_string(), json!({"num_key_value_heads": n}));
        }
    }
    if !others.is_empty() {
        set("per_layer_config", others.into());
    }
    // If one full layer has no values of its own, no full layer has; the tensor table finds a superfluous tensor.
    let has_v = |l: usize| tensors.names.contains(&format!("blk.{l}.attn_v.weight").as_str());
    let k_eq_v = (0..layers).any(|l| !sliding[l] && !has_v(l));
    set("attention_k_eq_v", json!(k_eq_v));

    let factor = match &tensors.rope_freqs {
        Some(divisors) => rotary_factor(m, divisors, global_head_dim)?,
        None => PARTIAL_ROTARY_FACTOR,
    };
    set(
        "rope_parameters",
        json!({
            "sliding_attention": {"rope_type": "default", "rope_theta": number("rope.freq_base_swa")?},
            "full_attention": {
                "rope_type": "proportional", "rope_theta": number("rope.freq_base")?, "partial_rotary_factor": factor,
            },
        }),
    );

    let tokens = m.array_len("tokenizer.ggml.tokens");
    let vocab_size = match (tokens, m.unsigned(&key("vocab_size"))?) {
        (Some(tokens), Some(n)) if tokens != n => {
            return Err(m.invalid(&key("vocab_size"), format!("is {n} of {tokens} tokens")));
        }
        (a, b) => a.or(b).or(tensors.vocab_size),
    };
    let missing = || Error::invalid(m.path, "checkpoint: tensor `token_embd.weight` is missing");
    set("vocab_size", json!(vocab_size.ok_or_else(missing)?));
    if let Some(bos) = m.unsigned("tokenizer.ggml.bos_token_id")? {
        set("bos_token_id", json!(bos));
    }
    let eos = end_tokens(m)?;
    if !eos.is_empty() {
        set("eos_token_id", json!(eos));
    }
    Ok(c.into())
}

/// Returns the tokens that end a text or a turn, the text's end first.
pub fn end_tokens(m: Metadata<'_>) -> Result<Vec<u64>> {
    let mut ids = Vec::new();
    for name in ["eos", "eot", "eom"] {
        ids.extend(m.unsigned(&format!("tokenizer.ggml.{name}_token_id"))?);
    }
    // Files often name only the text's end; runtimes know the other tokens by their text.
    if let Some(tokens) = m.texts("tokenizer.ggml.tokens")? {
        let types = m.unsigneds("tokenizer.ggml.token_type", tokens.len())?;
        for (id, text) in tokens.iter().enumerate() {
            let known = matches!(*text, "<end_of_turn>" | "<turn|>" | "<|tool_response>");
            if known && types.as_ref().is_some_and(|t| matches!(t[id], 3 | 4)) {
                ids.push(id as u64);
            }
        }
    }
    let mut seen = std::collections::BTreeSet::new();
    ids.retain(|id| seen.insert(*id));
    Ok(ids)
}

/// Returns the share of pairs that rotate: those of divisor 1, before pairs whose divisors are so large that they
/// stand still.
fn rotary_factor(m: Metadata<'_>, divisors: &[f32], head_dim: u64) -> Result<f64> {
    let pairs = divisors.len();
    let refused = |what: String| Error::unsupported(m.path, format!("tensor `rope_freqs.weight`: {what}"));
    if pairs as u64 != head_dim / 2 {
        let what = format!("tensor `rope_freqs.weight`: {pairs} elements, expected {}", head_dim / 2);
        return Err(Error::invalid(m.path, what));
    }
    let rotating = divisors.iter().take_while(|d| **d == 1.0).count();
    if let Some(d) = divisors[rotating..].iter().find(|d| d.is_nan() || **d < NO_ROTATION) {
        return Err(refused(format!("divisor {d}; implemented are ones, then {NO_ROTATION:e} and more")));
    }
    if rotating == 0 {
        return Err(refused("no pair rotates".into()));
    }
    let factor = rotating as f64 / pairs as f64;
    // The configuration's reader multiplies this factor by the pairs again and rounds down.
    let exact = (factor * head_dim as f64 / 2.0) as usize == rotating;
    Ok(if exact { factor } else { factor.next_up() })
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
    // Filters see the logits after the temperature, as in transformers; a sequence that asks for something else is kept.
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
        if let Some(id) = m.unsigned(&format!("tokenizer.ggml.{key}_token_id"))? {
            c.insert(name.into(), json!(id));
        }
    }
    if !eos.is_empty() {
        c.insert("eos_token_id".into(), json!(eos));
    }
    Ok(Some(c.into()))
}
