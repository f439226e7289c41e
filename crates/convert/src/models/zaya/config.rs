//! `config.json` of ZAYA in the form that transformers has.

use crate::models::keys::Keys;
use crate::{Error, Result};
use serde_json::{Value, json};
use std::path::Path;

/// Kernel of each of CCA's two convolutions. Together they see two columns of `[q; k]` before the current one.
const CCA_KERNEL: usize = 2;

/// Most experts of a layer: far more than any model has. One layout has a tensor for each expert.
const MAX_EXPERTS: usize = 4096;

/// Configuration of the model.
#[derive(Clone, Debug, PartialEq)]
pub struct ZayaConfig {
    /// Width of the residual stream.
    pub hidden_size: usize,
    /// Layers, each an attention and a MoE block.
    pub num_hidden_layers: usize,
    /// Query heads.
    pub num_attention_heads: usize,
    /// Key/value heads; even, since half of V's come from the token before.
    pub num_key_value_heads: usize,
    /// Channels of a head.
    pub head_dim: usize,
    /// Channels of a head that rotate, the first ones.
    pub rotary_dim: usize,
    /// Base of the rotary frequencies.
    pub rope_theta: f64,
    /// Experts of a layer, without the class that skips them.
    pub num_experts: usize,
    /// Width of an expert.
    pub moe_intermediate_size: usize,
    /// Width of the router.
    pub router_hidden_size: usize,
    /// Epsilon of every RMS norm.
    pub rms_norm_eps: f32,
    /// Tokens of the vocabulary.
    pub vocab_size: usize,
    /// Positions that the model was made for.
    pub max_position_embeddings: usize,
    /// Token that starts a text.
    pub bos_token_id: Option<u32>,
    /// Tokens that end a text.
    pub eos_token_ids: Vec<u32>,
}

impl ZayaConfig {
    /// Reads a configuration; `path` names it in errors.
    ///
    /// # Errors
    /// A key is missing or has an impossible value, or a feature is not implemented.
    pub fn parse(config: &Value, path: &Path) -> Result<ZayaConfig> {
        let map =
            config.as_object().ok_or_else(|| Error::invalid(path, "configuration: not a JSON object"))?;
        let k = Keys { map, path };
        k.expect("model_type", &[json!("zaya")])?;
        k.expect("tie_word_embeddings", &[json!(true)])?;
        k.expect("attention_bias", &[json!(false)])?;
        k.expect("lm_head_bias", &[json!(false)])?;
        k.expect("hidden_act", &[json!("silu")])?;
        k.expect("num_experts_per_tok", &[json!(1)])?;
        k.expect("sliding_window", &[])?;
        for kernel in ["cca_time0", "cca_time1"] {
            k.expect(kernel, &[json!(CCA_KERNEL)])?;
        }
        let eps = k.epsilon("rms_norm_eps")?;
        let vocab_size = k.size("vocab_size")?;
        let head_dim = k.size("head_dim")?;
        let (rope_theta, rotary_dim) = rope(&k, head_dim)?;
        let c = ZayaConfig {
            hidden_size: k.size("hidden_size")?,
            num_hidden_layers: k.size("num_hidden_layers")?,
            num_attention_heads: k.size("num_attention_heads")?,
            num_key_value_heads: k.size("num_key_value_heads")?,
            head_dim,
            rotary_dim,
            rope_theta,
            num_experts: k.size("num_experts")?,
            moe_intermediate_size: k.size("moe_intermediate_size")?,
            router_hidden_size: k.size("router_hidden_size")?,
            rms_norm_eps: eps,
            vocab_size,
            max_position_embeddings: k.size("max_position_embeddings")?,
            bos_token_id: k.tokens("bos_token_id", vocab_size)?.first().copied(),
            eos_token_ids: k.tokens("eos_token_id", vocab_size)?,
        };
        if c.num_hidden_layers > 1000 {
            return Err(k.invalid(format!("`num_hidden_layers` is {}, more than 1000", c.num_hidden_layers)));
        }
        if c.num_experts > MAX_EXPERTS {
            return Err(k.invalid(format!("`num_experts` is {}, more than {MAX_EXPERTS}", c.num_experts)));
        }
        if let Some(types) = k.get("layer_types") {
            let types = types.as_array().ok_or_else(|| k.invalid("`layer_types` is not a list".into()))?;
            if types.len() != c.num_hidden_layers {
                let (n, layers) = (types.len(), c.num_hidden_layers);
                return Err(k.invalid(format!("`layer_types` has {n} entries for {layers} layers")));
            }
            if let Some(other) = types.iter().find(|t| **t != json!("hybrid")) {
                return Err(k.unsupported(format!("`layer_types` has {other}, implemented is hybrid")));
            }
        }
        let (heads, kv) = (c.num_attention_heads, c.num_key_value_heads);
        if !heads.is_multiple_of(kv) {
            return Err(k.invalid(format!("{heads} query heads for {kv} key/value heads")));
        }
        if !kv.is_multiple_of(2) {
            return Err(k.unsupported(format!(
                "`num_key_value_heads` is {kv}, implemented are even numbers: half of the value heads are of the token before"
            )));
        }
        Ok(c)
    }

    /// Returns the channels of all query heads.
    pub fn q_size(&self) -> usize {
        self.num_attention_heads * self.head_dim
    }

    /// Returns the channels of all key heads.
    pub fn kv_size(&self) -> usize {
        self.num_key_value_heads * self.head_dim
    }

    /// Returns the number of classes that the router chooses from: the experts, and the class that skips them.
    pub fn classes(&self) -> usize {
        self.num_experts + 1
    }

    /// Computes the radians per position of each channel pair that rotates, `[rotary_dim / 2]`:
    /// `theta^(-2 c / rotary_dim)`.
    pub fn inv_freq(&self) -> Vec<f64> {
        let d = self.rotary_dim as f64;
        (0..self.rotary_dim / 2).map(|c| self.rope_theta.powf(-((2 * c) as f64) / d)).collect()
    }

    /// Returns the parameters of one expert.
    pub fn expert_parameters(&self) -> u64 {
        3 * self.hidden_size as u64 * self.moe_intermediate_size as u64
    }
}

fn rope(k: &Keys<'_>, head_dim: usize) -> Result<(f64, usize)> {
    let place = "rope_parameters.hybrid";
    let map = k.get("rope_parameters").and_then(|v| v.get("hybrid")).and_then(Value::as_object);
    let map = map.ok_or_else(|| k.invalid(format!("`{place}` is missing")))?;
    let r = Keys { map, path: k.path };
    let theta = r.theta(place)?;
    for key in map.keys().filter(|key| r.get(key).is_some()) {
        match key.as_str() {
            "rope_type" if r.get(key) == Some(&json!("default")) => {}
            "rope_theta" | "partial_rotary_factor" => {}
            _ => return Err(k.unsupported(format!("`{place}.{key}`"))),
        }
    }
    let factor = r.number("partial_rotary_factor")?.unwrap_or(1.0);
    let rotary_dim = (factor * head_dim as f64) as usize;
    if rotary_dim == 0 || rotary_dim > head_dim || !rotary_dim.is_multiple_of(2) {
        return Err(k.invalid(format!(
            "`{place}.partial_rotary_factor` is {factor}: {rotary_dim} of {head_dim} channels would rotate"
        )));
    }
    Ok((theta, rotary_dim))
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

/// Sets the number of layers of a configuration.
pub fn limit_layers(config: &mut Value, layers: usize) {
    config["num_hidden_layers"] = json!(layers);
    config["layer_types"] = json!(vec!["hybrid"; layers]);
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::models::{ModelPart, zaya::tensor_table};

    fn parse(config: &Value) -> Result<ZayaConfig> {
        ZayaConfig::parse(config, Path::new("config.json"))
    }

    #[test]
    fn the_real_model_has_its_published_counts() {
        let c = parse(&published_config()).unwrap();
        assert_eq!(c.parameters(), 8_840_489_464);
        let table = tensor_table(&c);
        let part = |layer, part| {
            table.iter().filter(|r| r.layer == layer && r.part == part).map(|r| r.elements()).sum::<u64>()
        };
        assert_eq!(part(Some(0), ModelPart::Attention), 5_575_682);
        // The first layer has no state before it to scale.
        assert_eq!(part(Some(0), ModelPart::Router), 661_009 - 256);
        assert_eq!(part(Some(1), ModelPart::Router), 661_009);
        assert_eq!(part(Some(0), ModelPart::Experts), 201_326_592);
        assert_eq!(part(Some(0), ModelPart::Norms), 20_480);
        assert_eq!(part(None, ModelPart::Embedding), 537_133_056);
    }

    #[test]
    fn half_of_a_head_rotates() {
        let f = parse(&published_config()).unwrap().inv_freq();
        assert_eq!(f.len(), 32);
        assert!((f[1] - 5e6f64.powf(-2.0 / 64.0)).abs() < 1e-12);
    }

    #[test]
    fn features_that_are_not_implemented_are_named() {
        for (key, value) in [
            ("attention_bias", json!(true)),
            ("lm_head_bias", json!(true)),
            ("hidden_act", json!("gelu")),
            ("num_experts_per_tok", json!(2)),
            ("sliding_window", json!(4097)),
            ("cca_time0", json!(4)),
            ("cca_time1", json!(1)),
            ("tie_word_embeddings", json!(false)),
            ("num_key_value_heads", json!(1)),
            ("layer_types", json!(["hybrid_sliding"])),
            ("rope_parameters", json!({"hybrid": {"rope_theta": 1e4, "rope_type": "yarn"}})),
            ("rope_parameters", json!({"hybrid": {"rope_theta": 1e4, "factor": 8.0}})),
        ] {
            let mut config = published_config();
            if key == "layer_types" {
                config["num_hidden_layers"] = json!(1);
            }
            config[key] = value;
            let err = parse(&config).unwrap_err().to_string();
            assert!(err.contains(key) && err.contains("unsupported"), "{err}");
        }
    }

    #[test]
    fn every_size_is_needed() {
        for key in [
            "hidden_size",
            "num_hidden_layers",
            "num_attention_heads",
            "num_key_value_heads",
            "head_dim",
            "num_experts",
            "moe_intermediate_size",
            "router_hidden_size",
            "rms_norm_eps",
            "vocab_size",
            "max_position_embeddings",
            "rope_parameters",
        ] {
            let mut config = published_config();
            config.as_object_mut().unwrap().remove(key);
            let err = parse(&config).unwrap_err().to_string();
            assert!(err.contains("invalid") && err.contains(key), "{key}: {err}");
        }
    }

    #[test]
    fn impossible_numbers_are_refused() {
        for (key, value) in [
            ("num_hidden_layers", json!(41)),
            ("num_attention_heads", json!(7)),
            ("hidden_size", json!(0)),
            ("head_dim", json!("128")),
            ("eos_token_id", json!(262272)),
            ("layer_types", json!("hybrid")),
            ("rope_parameters", json!({"hybrid": {"rope_theta": 0}})),
            ("rope_parameters", json!({"hybrid": {"rope_theta": 1e300}})),
            ("rms_norm_eps", json!(1e-40)),
            ("rms_norm_eps", json!(1)),
            ("rope_parameters", json!({"hybrid": {"rope_theta": 1e4, "partial_rotary_factor": 2.0}})),
            ("rope_parameters", json!({"hybrid": {"rope_theta": 1e4, "partial_rotary_factor": 0.001}})),
        ] {
            let mut config = published_config();
            config[key] = value.clone();
            assert!(parse(&config).is_err(), "{key} {value}");
        }
    }
}
