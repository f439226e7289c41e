//! `config.json` made from the metadata.

use super::generation::end_tokens;
use super::metadata::Metadata;
use crate::{Error, Result};
use serde_json::{Map, Value, json};
use std::collections::BTreeSet;

/// Base of rotary frequencies where the file has none, as in llama.cpp.
const FREQ_BASE: f64 = 10_000.0;
/// Factors of llama3's scaling that all published models have. llama.cpp's files keep only what comes of them.
const LOW_FREQ_FACTOR: f64 = 1.0;
const HIGH_FREQ_FACTOR: f64 = 4.0;
/// Context that llama3's scaling starts from, in most files.
const LLAMA3_CONTEXT: u64 = 8192;
/// Largest difference of a divisor from the one that parameters give, as a share; converters compute in f32.
const DIVISOR_TOLERANCE: f64 = 1e-4;

/// Key of the width of an expert.
pub const EXPERT_WIDTH: &str = "expert_feed_forward_length";

/// Names of tensors under `blk.N.`, and under `model.layers.N.` of a Hugging Face checkpoint.
pub type LayerNames = &'static [(&'static str, &'static str)];

/// Architecture of GGUF files.
#[derive(Debug)]
pub struct Arch {
    /// `general.architecture`, which is the prefix of keys too.
    pub name: &'static str,
    /// `model_type` of the configuration.
    pub model_type: &'static str,
    /// Key of the width of the MLP or, where experts are all that there is, of an expert.
    pub width: &'static str,
    /// Adds what `config.json` has beyond the keys that all architectures share.
    pub config: fn(&StatedModel<'_>, &mut Map<String, Value>) -> Result<()>,
    /// Names of a layer's tensors that architectures do not share.
    pub names: LayerNames,
    /// True if the rows of q and k have the two halves of a head in turn, so that rotary pairs are side by side.
    pub has_paired_rows: bool,
    /// True if the norms' weights are one more than in the Hugging Face checkpoint.
    pub has_norms_plus_one: bool,
}

/// Model that a file states: metadata under the keys of its architecture, and facts about its tensors.
pub struct StatedModel<'a> {
    pub arch: &'static Arch,
    pub m: Metadata<'a>,
    /// Number of layers.
    pub layers: usize,
    /// Names of tensors in the file.
    pub names: BTreeSet<&'a str>,
    /// Rows of the embedding.
    pub vocab_size: Option<u64>,
    /// Divisors of rotary frequencies.
    pub rope_freqs: Option<Vec<f32>>,
}

/// Makes the configuration. Keys that it leaves out have the values of the published ones.
pub fn config(s: &StatedModel<'_>) -> Result<Map<String, Value>> {
    let mut c = Map::new();
    let mut set = |name: &str, value: Value| c.insert(name.into(), value);
    set("model_type", json!(s.arch.model_type));
    set("tie_word_embeddings", json!(!s.names.contains("output.weight")));
    set("hidden_size", json!(s.size("embedding_length")?));
    set("num_hidden_layers", json!(s.layers));
    set("num_attention_heads", json!(s.equal_sizes("attention.head_count")?));
    // A model of experts alone may name only their width.
    let is_named = |name: &str| s.m.values.contains_key(&s.key(name));
    let has_dense = s.names.iter().any(|name| name.ends_with(".ffn_gate.weight"));
    let is_of_experts = !has_dense && !is_named(s.arch.width) && is_named(EXPERT_WIDTH);
    let width = if is_of_experts { EXPERT_WIDTH } else { s.arch.width };
    set("intermediate_size", json!(s.equal_sizes(width)?));
    if let Some(window) = s.window()? {
        set("sliding_window", json!(window));
    }
    set("max_position_embeddings", json!(s.size("context_length")?));
    set("rms_norm_eps", json!(s.number("attention.layer_norm_rms_epsilon")?));
    (s.arch.config)(s, &mut c)?;

    let key = s.key("vocab_size");
    let tokens = s.m.array_len("tokenizer.ggml.tokens");
    let vocab_size = match (tokens, s.m.unsigned(&key)?) {
        (Some(tokens), Some(n)) if tokens != n => {
            return Err(s.m.invalid(&key, format!("is {n} of {tokens} tokens")));
        }
        (a, b) => a.or(b).or(s.vocab_size),
    };
    let missing = || Error::invalid(s.m.path, "checkpoint: tensor `token_embd.weight` is missing");
    c.insert("vocab_size".into(), json!(vocab_size.ok_or_else(missing)?));
    if let Some(bos) = s.m.special_token("bos")? {
        c.insert("bos_token_id".into(), json!(bos));
    }
    let eos = end_tokens(s.m)?;
    if !eos.is_empty() {
        c.insert("eos_token_id".into(), json!(eos));
    }
    Ok(c)
}

/// Returns the word in `layer_types`.
pub fn layer_type(is_sliding: &bool) -> Value {
    json!(if *is_sliding { "sliding_attention" } else { "full_attention" })
}

impl StatedModel<'_> {
    /// Returns a key of the architecture: `llama.block_count`.
    pub fn key(&self, name: &str) -> String {
        format!("{}.{name}", self.arch.name)
    }

    /// Reads a size that has to be there.
    pub fn size(&self, name: &str) -> Result<u64> {
        let key = self.key(name);
        self.m.needed(&key, self.m.unsigned(&key)?)
    }

    /// Reads a size of each layer; all have to be equal, since `config.json` has one number for them.
    pub fn equal_sizes(&self, name: &str) -> Result<u64> {
        let key = self.key(name);
        let all = self.m.needed(&key, self.m.unsigneds(&key, self.layers)?)?;
        match all.iter().find(|n| **n != all[0]) {
            None => Ok(all[0]),
            Some(n) => Err(self.m.unsupported(&key, format!("has {} and {n}: layers differ", all[0]))),
        }
    }

    /// Reads a number that has to be there.
    pub fn number(&self, name: &str) -> Result<f64> {
        let key = self.key(name);
        self.m.needed(&key, self.m.number(&key)?)
    }

    /// Refuses a size that is there and not `expected`.
    pub fn expect_size(&self, name: &str, expected: u64) -> Result<()> {
        let key = self.key(name);
        match self.m.unsigned(&key)?.filter(|n| *n != expected) {
            None => Ok(()),
            Some(n) => Err(self.m.unsupported(&key, format!("is {n}, implemented is {expected}"))),
        }
    }

    /// Adds `head_dim` and `num_key_value_heads` of models whose layers are alike, and returns `head_dim`.
    pub fn add_heads(&self, c: &mut Map<String, Value>) -> Result<u64> {
        let heads = self.equal_sizes("attention.head_count")?;
        let kv_key = self.key("attention.head_count_kv");
        let kv_heads = match self.m.values.contains_key(&kv_key) {
            true => self.equal_sizes("attention.head_count_kv")?,
            false => heads,
        };
        let head_dim = match self.m.unsigned(&self.key("attention.key_length"))? {
            Some(n) => n,
            None => self.size("embedding_length")?.checked_div(heads).unwrap_or(0),
        };
        self.expect_size("attention.value_length", head_dim)?;
        self.expect_size("rope.dimension_count", head_dim)?;
        c.insert("num_key_value_heads".into(), json!(kv_heads));
        c.insert("head_dim".into(), json!(head_dim));
        Ok(head_dim)
    }

    /// Tells whether a projection of the first layer's attention has a bias.
    pub fn has_attention_bias(&self) -> bool {
        ["q", "k", "v", "output"].iter().any(|p| self.names.contains(&*format!("blk.0.attn_{p}.bias")))
    }

    /// Reads the tokens that a sliding layer sees; none where the file names no window.
    pub fn window(&self) -> Result<Option<u64>> {
        Ok(self.m.unsigned(&self.key("attention.sliding_window"))?.filter(|n| *n > 0))
    }

    /// Tells which layers have a window: those that the file names, or all but each last of `period` layers.
    pub fn sliding(&self, period: u64) -> Result<Vec<bool>> {
        let key = self.key("attention.sliding_window_pattern");
        if self.m.array_len(&key).is_none() {
            let period = self.m.unsigned(&key)?.unwrap_or(period);
            // llama.cpp takes 0 for windows in all layers.
            let is_sliding = |l: u64| l.checked_rem(period).is_none_or(|at| at + 1 < period);
            return Ok((0..self.layers as u64).map(is_sliding).collect());
        }
        let sliding = self.m.needed(&key, self.m.flags(&key)?)?;
        match sliding.len() == self.layers {
            true => Ok(sliding),
            false => {
                let what = format!("has {} entries for {} layers", sliding.len(), self.layers);
                Err(self.m.invalid(&key, what))
            }
        }
    }

    /// Makes `rope_parameters` from the base, the keys under `rope.scaling` and the divisors of frequencies.
    pub fn rope(&self, head_dim: u64) -> Result<Map<String, Value>> {
        let theta = self.m.number(&self.key("rope.freq_base"))?.unwrap_or(FREQ_BASE);
        let mut r = Map::from_iter([("rope_theta".to_string(), json!(theta))]);
        let mut set = |name: &str, value: Value| r.insert(name.into(), value);
        let scaling = |name: &str| self.key(&format!("rope.scaling.{name}"));
        for (name, neutral) in [
            ("attn_factor", 1.0),
            ("yarn_attn_factor", 1.0),
            ("yarn_ext_factor", 1.0),
            ("yarn_log_multiplier", 0.0),
            ("alpha", 0.0),
        ] {
            if let Some(n) = self.m.any_number(&scaling(name))?.filter(|n| *n != neutral) {
                return Err(self.m.unsupported(&scaling(name), format!("is {n}, implemented is {neutral}")));
            }
        }
        // Older files have the factor under another name.
        let factor = match self.m.number(&scaling("factor"))? {
            Some(factor) => Some(factor),
            None => self.m.number(&self.key("rope.scale_linear"))?,
        };
        let factor = factor.filter(|n| *n != 0.0 && *n != 1.0);
        match (self.m.text(&scaling("type"))?, factor) {
            (Some("none"), _) | (None | Some("linear" | "yarn"), None) => match &self.rope_freqs {
                Some(divisors) => r.append(&mut self.llama3(divisors, theta, head_dim)?),
                None => {
                    set("rope_type", json!("default"));
                }
            },
            // Without a type, llama.cpp takes the factor for a linear one.
            (None | Some("linear"), Some(factor)) => {
                set("rope_type", json!("linear"));
                set("factor", json!(factor));
            }
            (Some("yarn"), Some(factor)) => {
                set("rope_type", json!("yarn"));
                set("factor", json!(factor));
                let context = self.m.unsigned(&scaling("original_context_length"))?;
                let context = context.map_or_else(|| self.size("context_length"), Ok)?;
                set("original_max_position_embeddings", json!(context));
                for name in ["beta_fast", "beta_slow"] {
                    if let Some(n) = self.m.any_number(&scaling(&format!("yarn_{name}")))? {
                        set(name, json!(n));
                    }
                }
            }
            (Some(other), _) => {
                let what = format!("is {}; read are none, linear and yarn", other.escape_debug());
                return Err(self.m.unsupported(&scaling("type"), what));
            }
        }
        if r["rope_type"] != "default" && r["rope_type"] != "llama3" && self.rope_freqs.is_some() {
            let what = "tensor `rope_freqs.weight`: divisors of frequencies beside a scaling of the rope";
            return Err(Error::unsupported(self.m.path, what));
        }
        Ok(r)
    }

    /// Finds the parameters of llama3's scaling that give the divisors `divisors` of the frequencies.
    fn llama3(&self, divisors: &[f32], theta: f64, head_dim: u64) -> Result<Map<String, Value>> {
        if divisors.len() as u64 != head_dim / 2 {
            let what =
                format!("tensor `rope_freqs.weight`: {} elements, expected {}", divisors.len(), head_dim / 2);
            return Err(Error::invalid(self.m.path, what));
        }
        // The lowest frequency is divided by the whole factor.
        let factor = divisors.last().map_or(1.0, |d| f64::from(*d));
        if divisors.iter().all(|d| *d == 1.0) {
            return Ok(Map::from_iter([("rope_type".to_string(), json!("default"))]));
        }
        let divisor = |pair: usize, context: f64| {
            let wavelength = std::f64::consts::TAU * theta.powf(2.0 * pair as f64 / head_dim as f64);
            let smooth = (context / wavelength - LOW_FREQ_FACTOR) / (HIGH_FREQ_FACTOR - LOW_FREQ_FACTOR);
            let smooth = smooth.clamp(0.0, 1.0);
            1.0 / ((1.0 - smooth) / factor + smooth)
        };
        let fits = |context: &u64| {
            divisors.iter().enumerate().all(|(i, &d)| {
                let expected = divisor(i, *context as f64);
                (f64::from(d) - expected).abs() <= DIVISOR_TOLERANCE * expected
            })
        };
        let contexts = std::iter::once(LLAMA3_CONTEXT).chain((4..=24).map(|n| 1 << n));
        let is_divisor = factor.is_finite() && factor >= 1.0;
        let Some(context) = contexts.into_iter().find(|c| is_divisor && fits(c)) else {
            let what = format!(
                "tensor `rope_freqs.weight`: divisors up to {factor}; read are those of llama3's scaling with low_freq_factor \
                 {LOW_FREQ_FACTOR}, high_freq_factor {HIGH_FREQ_FACTOR} and a power of two as the context"
            );
            return Err(Error::unsupported(self.m.path, what));
        };
        Ok(Map::from_iter(
            [
                ("rope_type", json!("llama3")),
                ("factor", json!(factor)),
                ("low_freq_factor", json!(LOW_FREQ_FACTOR)),
                ("high_freq_factor", json!(HIGH_FREQ_FACTOR)),
                ("original_max_position_embeddings", json!(context)),
            ]
            .map(|(name, value)| (name.to_string(), value)),
        ))
    }
}
