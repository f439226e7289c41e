//! `config.json` of Gemma 4, in the published form and in the form that transformers saves.

use crate::models::keys::Keys;
use crate::{Error, Result};
use serde_json::{Value, json};
use std::path::Path;

/// Configuration of the text model.
#[derive(Clone, Debug, PartialEq)]
pub struct Gemma4Config {
    /// Width of the residual stream.
    pub hidden_size: usize,
    /// Number of layers.
    pub num_hidden_layers: usize,
    /// Query heads.
    pub num_attention_heads: usize,
    /// Tokens that a sliding layer sees, the current one included.
    pub sliding_window: usize,
    /// Width of the dense MLP.
    pub intermediate_size: usize,
    /// Experts of a layer.
    pub num_experts: usize,
    /// Experts per token.
    pub top_k_experts: usize,
    /// Width of an expert.
    pub moe_intermediate_size: usize,
    /// Epsilon of every RMS norm.
    pub rms_norm_eps: f32,
    /// Tokens of the vocabulary.
    pub vocab_size: usize,
    /// Cap of the logits, `cap * tanh(logits / cap)`.
    pub final_logit_softcapping: Option<f32>,
    /// Positions that the model was made for.
    pub max_position_embeddings: usize,
    /// Token that starts a text.
    pub bos_token_id: Option<u32>,
    /// Tokens that end a text.
    pub eos_token_ids: Vec<u32>,
    layers: Vec<LayerConfig>,
}

#[derive(Clone, Debug, PartialEq)]
struct LayerConfig {
    full: bool,
    head_dim: usize,
    kv_heads: usize,
    k_eq_v: bool,
    rope_theta: f64,
    /// Channels of a head that rotate.
    rotary_dim: usize,
}

impl Gemma4Config {
    /// Reads a configuration; `path` names it in errors.
    ///
    /// # Errors
    /// A key is missing or has an impossible value, or a feature is not implemented.
    pub fn parse(config: &Value, path: &Path) -> Result<Gemma4Config> {
        let top =
            config.as_object().ok_or_else(|| Error::invalid(path, "configuration: not a JSON object"))?;
        let map = match top.get("text_config") {
            None => top,
            Some(Value::Object(text)) => text,
            Some(_) => return Err(Error::invalid(path, "configuration: `text_config` is not an object")),
        };
        let k = Keys { map, path };
        k.expect("model_type", &[json!("gemma4"), json!("gemma4_text")])?;
        if let Some(tied) = top.get("tie_word_embeddings").filter(|v| **v != json!(true)) {
            return Err(k.unsupported(format!("`tie_word_embeddings` is {tied}, implemented is true")));
        }
        k.expect("tie_word_embeddings", &[json!(true)])?;
        k.expect("attention_bias", &[json!(false)])?;
        k.expect("hidden_size_per_layer_input", &[json!(0)])?;
        k.expect("num_kv_shared_layers", &[json!(0)])?;
        k.expect("use_double_wide_mlp", &[json!(false)])?;
        k.expect("hidden_activation", &[json!("gelu_pytorch_tanh")])?;
        k.expect("hidden_act", &[json!("gelu_pytorch_tanh")])?;
        // Text is causal either way; images, which "vision" concerns, are not read.
        k.expect("use_bidirectional_attention", &[json!("vision"), json!(false)])?;
        k.expect("attn_logit_softcapping", &[])?;
        if k.get("enable_moe_block") != Some(&json!(true)) {
            return Err(
                k.unsupported("`enable_moe_block` is not true: only models with experts are read".into())
            );
        }
        let eps = k.epsilon("rms_norm_eps")?;
        let vocab_size = k.size("vocab_size")?;
        let mut c = Gemma4Config {
            hidden_size: k.size("hidden_size")?,
            num_hidden_layers: k.size("num_hidden_layers")?,
            num_attention_heads: k.size("num_attention_heads")?,
            sliding_window: k.size("sliding_window")?,
            intermediate_size: k.size("intermediate_size")?,
            num_experts: k.size("num_experts")?,
            top_k_experts: k.size("top_k_experts")?,
            moe_intermediate_size: k.size("moe_intermediate_size")?,
            rms_norm_eps: eps,
            vocab_size,
            final_logit_softcapping: k.softcapping("final_logit_softcapping")?,
            max_position_embeddings: k.size("max_position_embeddings")?,
            bos_token_id: k.tokens("bos_token_id", vocab_size)?.first().copied(),
            eos_token_ids: k.tokens("eos_token_id", vocab_size)?,
            layers: Vec::new(),
        };
        if c.num_hidden_layers > 1000 {
            return Err(k.invalid(format!("`num_hidden_layers` is {}, more than 1000", c.num_hidden_layers)));
        }
        if c.top_k_experts > c.num_experts {
            return Err(
                k.invalid(format!("`top_k_experts` is {} of {} experts", c.top_k_experts, c.num_experts))
            );
        }
        c.layers = layers(&k, &c)?;
        Ok(c)
    }

    /// Tells whether layer `l` attends to all tokens, not only to a window.
    pub fn is_full(&self, l: usize) -> bool {
        self.layers[l].full
    }

    /// Returns the channels of a head of layer `l`.
    pub fn head_dim(&self, l: usize) -> usize {
        self.layers[l].head_dim
    }

    /// Returns the key/value heads of layer `l`.
    pub fn kv_heads(&self, l: usize) -> usize {
        self.layers[l].kv_heads
    }

    /// Tells whether layer `l` has no `v_proj`: its values are the output of `k_proj`.
    pub fn k_eq_v(&self, l: usize) -> bool {
        self.layers[l].k_eq_v
    }

    /// Computes the radians per position of each channel pair of layer `l`, `[head_dim / 2]`:
    /// `theta^(-2 c / head_dim)` for pair c, and 0 for pairs that do not rotate. The exponent's denominator is the
    /// whole head for all ropes ("proportional").
    pub fn inv_freq(&self, l: usize) -> Vec<f64> {
        let layer = &self.layers[l];
        let d = layer.head_dim;
        let frequency = |c: usize| match 2 * c < layer.rotary_dim {
            true => layer.rope_theta.powf(-((2 * c) as f64) / d as f64),
            false => 0.0,
        };
        (0..d / 2).map(frequency).collect()
    }

    /// Returns the parameters of one expert.
    pub fn expert_parameters(&self) -> u64 {
        3 * self.hidden_size as u64 * self.moe_intermediate_size as u64
    }
}

fn layers(k: &Keys<'_>, c: &Gemma4Config) -> Result<Vec<LayerConfig>> {
    let types = k.get("layer_types").and_then(Value::as_array);
    let types = types.ok_or_else(|| k.invalid("`layer_types` is missing or not a list".into()))?;
    if types.len() != c.num_hidden_layers {
        return Err(k.invalid(format!(
            "`layer_types` has {} entries for {} layers",
            types.len(),
            c.num_hidden_layers
        )));
    }
    let head_dim = k.size("head_dim")?;
    let kv_heads = k.size("num_key_value_heads")?;
    let k_eq_v = match k.get("attention_k_eq_v") {
        None => false,
        Some(Value::Bool(b)) => *b,
        Some(v) => return Err(k.invalid(format!("`attention_k_eq_v` is {v}, expected true or false"))),
    };
    let overrides = k
        .get("per_layer_config")
        .map(|v| v.as_object().ok_or_else(|| k.invalid("`per_layer_config` is not an object".into())))
        .transpose()?;
    let is_layer = |key: &String| (0..c.num_hidden_layers).any(|l| l.to_string() == *key);
    if let Some(key) = overrides.and_then(|o| o.keys().find(|key| !is_layer(key))) {
        let last = c.num_hidden_layers - 1;
        return Err(k.invalid(format!("`per_layer_config` has `{key}`, expected layers from 0 to {last}")));
    }
    let mut layers = Vec::new();
    for (l, ty) in types.iter().enumerate() {
        let full = match ty.as_str() {
            Some("full_attention") => true,
            Some("sliding_attention") => false,
            _ => {
                return Err(k.unsupported(format!(
                    "`layer_types` has {ty}, implemented are full_attention and sliding_attention"
                )));
            }
        };
        let (mut d, mut kv) = (head_dim, kv_heads);
        if full {
            // The published form names the full layers' sizes once.
            if k.get("global_head_dim").is_some() {
                d = k.size("global_head_dim")?;
            }
            if k.get("num_global_key_value_heads").is_some() {
                kv = k.size("num_global_key_value_heads")?;
            }
        }
        if let Some(own) = overrides.and_then(|o| o.get(&l.to_string())) {
            // The saved form names these sizes layer by layer.
            let own = own
                .as_object()
                .ok_or_else(|| k.invalid(format!("`per_layer_config.{l}` is not an object")))?;
            for (key, value) in own {
                match key.as_str() {
                    "head_dim" => d = k.size_of(key, value)?,
                    "num_key_value_heads" => kv = k.size_of(key, value)?,
                    _ => return Err(k.unsupported(format!("`per_layer_config.{l}.{key}`"))),
                }
            }
        }
        if d % 2 != 0 {
            return Err(k.invalid(format!("layer {l}: head_dim {d} is odd")));
        }
        if !c.num_attention_heads.is_multiple_of(kv) {
            return Err(k.invalid(format!(
                "layer {l}: {} query heads for {kv} key/value heads",
                c.num_attention_heads
            )));
        }
        let (rope_theta, rotary_dim) = rope(k, full, d)?;
        layers.push(LayerConfig {
            full,
            head_dim: d,
            kv_heads: kv,
            k_eq_v: k_eq_v && full,
            rope_theta,
            rotary_dim,
        });
    }
    for full in [false, true] {
        // A rope and a cache are shared by all layers of a kind.
        let mut kind = layers.iter().filter(|l| l.full == full);
        if let Some(first) = kind.next()
            && kind.any(|l| l.head_dim != first.head_dim)
        {
            return Err(k.unsupported("layers of one kind with different head_dim".into()));
        }
    }
    Ok(layers)
}

fn rope(k: &Keys<'_>, full: bool, head_dim: usize) -> Result<(f64, usize)> {
    let name = if full { "full_attention" } else { "sliding_attention" };
    let place = format!("rope_parameters.{name}");
    let map = k.get("rope_parameters").and_then(|v| v.get(name)).and_then(Value::as_object);
    let map = map.ok_or_else(|| k.invalid(format!("`{place}` is missing")))?;
    let r = Keys { map, path: k.path };
    let theta = r.theta(&place)?;
    for key in map.keys().filter(|key| r.get(key).is_some()) {
        match key.as_str() {
            "rope_type" | "rope_theta" | "partial_rotary_factor" => {}
            // Both factors are 1 where they are absent.
            "factor" | "attention_factor" if r.number(key)? == Some(1.0) => {}
            _ => return Err(k.unsupported(format!("`{place}.{key}`"))),
        }
    }
    match r.get("rope_type").and_then(Value::as_str) {
        Some("default") | None if r.get("partial_rotary_factor").is_none() => Ok((theta, head_dim)),
        Some("proportional") => {
            let factor = r.number("partial_rotary_factor")?.unwrap_or(1.0);
            if factor > 1.0 {
                return Err(k.invalid(format!("`{place}.partial_rotary_factor` is {factor}")));
            }
            Ok((theta, 2 * ((factor * head_dim as f64 / 2.0) as usize)))
        }
        other => Err(k.unsupported(format!(
            "`{place}` has rope_type `{}` or a partial_rotary_factor; implemented are default and proportional",
            other.unwrap_or("default")
        ))),
    }
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

/// Keeps the first `layers` layers of a configuration; more repeat its pattern.
pub fn limit_layers(config: &mut Value, layers: usize) {
    let text = &mut config["text_config"];
    text["num_hidden_layers"] = json!(layers);
    if let Some(types) = text["layer_types"].as_array().cloned().filter(|t| !t.is_empty()) {
        text["layer_types"] = (0..layers).map(|l| types[l % types.len()].clone()).collect();
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::models::{ModelPart, gemma4::tensor_table};
    use serde_json::Map;

    fn parse(config: &Value) -> Result<Gemma4Config> {
        Gemma4Config::parse(config, Path::new("config.json"))
    }

    #[test]
    fn the_real_model_has_its_published_counts() {
        let c = parse(&published_config()).unwrap();
        assert_eq!(c.parameters(), 25_233_141_790);
        let table = tensor_table(&c);
        assert_eq!(table.len(), 657);
        let part = |layer, part| {
            table.iter().filter(|r| r.layer == layer && r.part == part).map(|r| r.elements()).sum::<u64>()
        };
        assert_eq!(part(Some(0), ModelPart::Attention), 34_603_520);
        assert_eq!(part(Some(5), ModelPart::Attention), 49_021_952);
        assert_eq!(part(Some(0), ModelPart::Router), 363_392);
        assert_eq!(part(Some(0), ModelPart::Experts), 761_266_176);
        assert_eq!(part(Some(0), ModelPart::DenseMlp), 17_842_176);
        assert_eq!(part(Some(0), ModelPart::Norms), 19_713);
        assert_eq!(part(None, ModelPart::Embedding), 738_197_504);
    }

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
        assert_eq!(parse(&published).unwrap(), parse(&saved).unwrap());
    }

    #[test]
    fn a_quarter_of_a_full_layers_pairs_rotate() {
        let c = parse(&published_config()).unwrap();
        let full = c.inv_freq(5);
        assert_eq!((full.len(), full.iter().filter(|f| **f > 0.0).count()), (256, 64));
        assert!((full[1] - 1e6f64.powf(-2.0 / 512.0)).abs() < 1e-12);
        assert!(c.inv_freq(0).iter().all(|f| *f > 0.0));
    }

    #[test]
    fn features_that_are_not_implemented_are_named() {
        for (key, value) in [
            ("attention_bias", json!(true)),
            ("hidden_size_per_layer_input", json!(256)),
            ("num_kv_shared_layers", json!(4)),
            ("use_double_wide_mlp", json!(true)),
            ("hidden_activation", json!("silu")),
            ("enable_moe_block", json!(false)),
            ("tie_word_embeddings", json!(false)),
            ("use_bidirectional_attention", json!("all")),
            ("attn_logit_softcapping", json!(50.0)),
            ("model_type", json!("gemma3_text")),
            ("layer_types", json!(["linear_attention"])),
        ] {
            let mut config = published_config();
            if key == "layer_types" {
                config["text_config"]["num_hidden_layers"] = json!(1);
            }
            config["text_config"][key] = value;
            let err = parse(&config).unwrap_err().to_string();
            assert!(err.contains(key) && err.contains("unsupported"), "{err}");
        }
    }

    #[test]
    fn ropes_that_are_not_implemented_are_named() {
        for (key, value) in [("rope_type", json!("yarn")), ("factor", json!(8.0)), ("beta_fast", json!(32))] {
            for kind in ["sliding_attention", "full_attention"] {
                let mut config = published_config();
                config["text_config"]["rope_parameters"][kind][key] = value.clone();
                let err = parse(&config).unwrap_err().to_string();
                assert!(err.contains("unsupported") && err.contains(kind) && err.contains(key), "{err}");
            }
        }
        let mut config = published_config();
        config["text_config"]["rope_parameters"]["full_attention"]["factor"] = json!(1.0);
        assert_eq!(parse(&config).unwrap(), parse(&published_config()).unwrap());
    }

    #[test]
    fn overrides_of_layers_that_do_not_exist() {
        for (key, says) in
            [("30", "from 0 to 29"), ("05", "from 0 to 29"), ("x", "from 0 to 29"), ("5", "sliding_window")]
        {
            let mut config = published_config();
            config["text_config"]["per_layer_config"] = json!({ key: {"sliding_window": 7} });
            let err = parse(&config).unwrap_err().to_string();
            assert!(err.contains("per_layer_config") && err.contains(says), "{err}");
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
            "sliding_window",
            "intermediate_size",
            "num_experts",
            "top_k_experts",
            "moe_intermediate_size",
            "rms_norm_eps",
            "vocab_size",
            "max_position_embeddings",
            "layer_types",
            "rope_parameters",
        ] {
            let mut config = published_config();
            config["text_config"].as_object_mut().unwrap().remove(key);
            let err = parse(&config).unwrap_err().to_string();
            assert!(err.contains("invalid") && err.contains(key), "{key}: {err}");
        }
    }

    #[test]
    fn impossible_numbers_are_refused() {
        for (key, value) in [
            ("num_hidden_layers", json!(1e18)),
            ("num_hidden_layers", json!(29)),
            ("num_attention_heads", json!(0)),
            ("num_key_value_heads", json!(7)),
            ("hidden_size", json!(-1)),
            ("hidden_size", json!("2816")),
            ("top_k_experts", json!(129)),
            ("rms_norm_eps", json!(0)),
            ("rms_norm_eps", json!(1e-40)),
            ("rms_norm_eps", json!(0.5)),
            ("final_logit_softcapping", json!(0)),
            ("final_logit_softcapping", json!(1e-40)),
            ("final_logit_softcapping", json!(1e300)),
            ("final_logit_softcapping", json!(-30)),
            ("final_logit_softcapping", json!("30")),
            (
                "rope_parameters",
                json!({"sliding_attention": {"rope_theta": 1e300}, "full_attention": {"rope_theta": 1e4}}),
            ),
            ("head_dim", json!(255)),
            ("layer_types", json!([1])),
            ("bos_token_id", json!("2")),
            ("bos_token_id", json!(262144)),
            ("eos_token_id", json!([1, -1])),
            ("rope_parameters", json!({})),
        ] {
            let mut config = published_config();
            config["text_config"][key] = value.clone();
            assert!(parse(&config).is_err(), "{key} {value}");
        }
    }
}
