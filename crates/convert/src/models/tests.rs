//! Tests of all families' configurations.

use super::synthetic::MODELS;
use super::*;
use crate::form::{CacheForm, ExpertForm, ShardForm};
use crate::plan::PlanOptions;
use crate::variants::Variants;
use anemoe_bundle::ShardKind;
use serde_json::{Map, json};
use std::collections::BTreeMap;

fn config(model: &str) -> Value {
    MODELS.iter().find(|(name, _)| *name == model).unwrap().1()
}

/// Returns the keys of the text model.
fn text(config: &mut Value) -> &mut Map<String, Value> {
    let has_text = config.get("text_config").is_some();
    if has_text { config["text_config"].as_object_mut() } else { config.as_object_mut() }.unwrap()
}

pub fn parsed(config: &Value) -> Result<Decoder> {
    super::registry::parse(config, Path::new("config.json"), Variants::default())
}

fn error(model: &str, key: &str, value: Value) -> String {
    let mut config = config(model);
    text(&mut config).insert(key.into(), value);
    parsed(&config).unwrap_err().to_string()
}

#[test]
fn the_real_models_have_their_published_counts() {
    for (model, parameters) in [
        ("gemma4-26b-a4b", 25_233_141_790),
        ("zaya1-8b", 8_840_489_464),
        ("qwen3-30b-a3b", 30_532_122_624),
        ("gpt-oss-20b", 20_914_757_184),
        ("olmoe-1b-7b", 6_919_161_856),
        ("llama-3.2-1b", 1_235_814_400),
        ("qwen3-0.6b", 596_049_920),
        ("gemma3-1b", 999_885_952),
    ] {
        assert_eq!(parsed(&config(model)).unwrap().parameters(), parameters, "{model}");
    }
    use ModelPart::{Attention, DenseMlp, Embedding, Experts, Norms, Router};
    for (model, layer, part, elements) in [
        ("gemma4-26b-a4b", Some(0), Attention, 34_603_520),
        ("gemma4-26b-a4b", Some(5), Attention, 49_021_952),
        ("gemma4-26b-a4b", Some(0), Router, 363_392),
        ("gemma4-26b-a4b", Some(0), Experts, 761_266_176),
        ("gemma4-26b-a4b", Some(0), DenseMlp, 17_842_176),
        ("gemma4-26b-a4b", Some(0), Norms, 19_713),
        ("gemma4-26b-a4b", None, Embedding, 738_197_504),
        ("zaya1-8b", Some(0), Attention, 5_575_682),
        // The first layer has no state before it to scale.
        ("zaya1-8b", Some(0), Router, 661_009 - 256),
        ("zaya1-8b", Some(1), Router, 661_009),
        ("zaya1-8b", Some(0), Experts, 201_326_592),
        ("zaya1-8b", Some(0), Norms, 20_480),
    ] {
        let table = parsed(&config(model)).unwrap().tensors();
        let own = table.iter().filter(|r| r.layer == layer && r.part == part);
        assert_eq!(own.map(TensorRow::elements).sum::<u64>(), elements, "{model} {layer:?} {part:?}");
    }
}

#[test]
fn features_that_are_not_implemented_are_named() {
    for (model, key, value) in [
        ("gemma4-26b-a4b", "attention_bias", json!(true)),
        ("gemma4-26b-a4b", "hidden_size_per_layer_input", json!(256)),
        ("gemma4-26b-a4b", "num_kv_shared_layers", json!(4)),
        ("gemma4-26b-a4b", "use_double_wide_mlp", json!(true)),
        ("gemma4-26b-a4b", "hidden_activation", json!("silu")),
        ("gemma4-26b-a4b", "use_bidirectional_attention", json!("all")),
        ("gemma4-26b-a4b", "attn_logit_softcapping", json!(50.0)),
        ("gemma4-26b-a4b", "layer_types", json!(vec!["linear_attention"; 30])),
        ("gemma4-26b-a4b", "per_layer_config", json!({"5": {"sliding_window": 7}})),
        ("zaya1-8b", "attention_bias", json!(true)),
        ("zaya1-8b", "lm_head_bias", json!(true)),
        ("zaya1-8b", "hidden_act", json!("gelu")),
        ("zaya1-8b", "num_experts_per_tok", json!(2)),
        ("zaya1-8b", "sliding_window", json!(4097)),
        ("zaya1-8b", "cca_time0", json!(4)),
        ("zaya1-8b", "cca_time1", json!(1)),
        ("zaya1-8b", "tie_word_embeddings", json!(false)),
        ("zaya1-8b", "num_key_value_heads", json!(1)),
        ("zaya1-8b", "layer_types", json!(vec!["hybrid_sliding"; 40])),
        ("zaya1-8b", "rope_parameters", json!({"hybrid": {"rope_theta": 1e4, "rope_type": "longrope"}})),
        ("zaya1-8b", "rope_parameters", json!({"hybrid": {"rope_theta": 1e4, "factor": 8.0}})),
        ("llama-3.2-1b", "hidden_act", json!("gelu")),
        ("llama-3.2-1b", "mlp_bias", json!(true)),
        ("qwen3-0.6b", "layer_types", json!(vec!["chunked_attention"; 28])),
        ("llama-3.2-1b", "rope_scaling", json!({"rope_type": "longrope", "factor": 2.0})),
        ("olmoe-1b-7b", "clip_qkv", json!(8.0)),
        ("gemma3-1b", "attn_logit_softcapping", json!(50.0)),
        ("gemma3-1b", "hidden_activation", json!("silu")),
        ("gemma3-1b", "attention_bias", json!(true)),
        ("gemma3-1b", "use_bidirectional_attention", json!(true)),
        ("gpt-oss-20b", "hidden_act", json!("gelu")),
    ] {
        let error = error(model, key, value);
        assert!(error.contains(key) && error.contains("unsupported"), "{error}");
    }
    for kind in ["sliding_attention", "full_attention"] {
        for (key, value) in
            [("rope_type", json!("longrope")), ("factor", json!(8.0)), ("beta_fast", json!(32))]
        {
            let mut config = config("gemma4-26b-a4b");
            config["text_config"]["rope_parameters"][kind][key] = value;
            let error = parsed(&config).unwrap_err().to_string();
            assert!(error.contains("unsupported") && error.contains(kind) && error.contains(key), "{error}");
        }
    }
    let mut untied = config("gemma4-26b-a4b");
    (untied["tie_word_embeddings"], untied["text_config"]["tie_word_embeddings"]) =
        (json!(false), json!(false));
    assert!(parsed(&untied).unwrap_err().to_string().contains("tie_word_embeddings"));
    let error = parsed(&json!({"model_type": "llama4"})).unwrap_err().to_string();
    assert!(error.contains("llama4") && error.contains("qwen3_moe"), "{error}");
}

#[test]
fn every_size_is_needed() {
    const ALL: [&str; 7] = [
        "hidden_size",
        "num_hidden_layers",
        "rms_norm_eps",
        "vocab_size",
        "max_position_embeddings",
        "num_attention_heads",
        "intermediate_size",
    ];
    const EXPERTS: [&str; 2] = ["moe_intermediate_size", "num_experts"];
    const OTHERS: &[&str] =
        &["hidden_size", "num_hidden_layers", "vocab_size", "num_attention_heads", "intermediate_size"];
    for (model, keys, others) in [
        (
            "gemma4-26b-a4b",
            &ALL[..],
            &["sliding_window", "top_k_experts", "layer_types", "rope_parameters"][..],
        ),
        ("gemma4-26b-a4b", &EXPERTS[..], &["head_dim", "num_key_value_heads"][..]),
        (
            "zaya1-8b",
            &ALL[..6],
            &["head_dim", "num_key_value_heads", "router_hidden_size", "rope_parameters"][..],
        ),
        ("zaya1-8b", &EXPERTS[..], &[][..]),
        ("llama-3.2-1b", OTHERS, &[][..]),
        ("qwen3-30b-a3b", OTHERS, &["num_experts_per_tok", "num_experts", "moe_intermediate_size"][..]),
        ("olmoe-1b-7b", OTHERS, &["num_experts_per_tok", "num_experts"][..]),
        ("gemma3-1b", &OTHERS[..2], &["intermediate_size"][..]),
        ("gpt-oss-20b", OTHERS, &["num_local_experts", "num_experts_per_tok"][..]),
    ] {
        for key in keys.iter().chain(others) {
            let mut config = config(model);
            text(&mut config).remove(*key);
            let error = parsed(&config).unwrap_err().to_string();
            assert!(error.contains("invalid") && error.contains(key), "{model} {key}: {error}");
        }
    }
}

#[test]
fn keys_with_defaults_may_be_missing_or_null() {
    for (model, key) in [
        ("llama-3.2-1b", "rms_norm_eps"),
        ("llama-3.2-1b", "rope_theta"),
        ("qwen3-30b-a3b", "rms_norm_eps"),
        ("olmoe-1b-7b", "rms_norm_eps"),
        ("olmoe-1b-7b", "rope_theta"),
        ("gemma3-1b", "rms_norm_eps"),
        ("gemma3-1b", "vocab_size"),
        ("gemma3-1b", "max_position_embeddings"),
        ("gpt-oss-20b", "rms_norm_eps"),
    ] {
        let mut config = config(model);
        text(&mut config).insert(key.into(), Value::Null);
        let with_null = format!("{:?}", parsed(&config).unwrap());
        text(&mut config).remove(key);
        assert_eq!(format!("{:?}", parsed(&config).unwrap()), with_null, "{model} {key}");
    }
    // Defaults of a type: what transformers 5.24 has where the key is missing; null means another thing.
    for (model, of, key, expected) in [
        ("qwen3-0.6b", "qwen2", "max_window_layers", json!(28)),
        ("qwen3-0.6b", "qwen3", "head_dim", json!(128)),
        ("llama-3.2-1b", "mistral", "num_key_value_heads", json!(8)),
        ("llama-3.2-1b", "mistral", "sliding_window", json!(4096)),
        ("qwen3-30b-a3b", "qwen3_moe", "num_key_value_heads", json!(4)),
        ("gpt-oss-20b", "gpt_oss", "sliding_window", json!(128)),
        ("gpt-oss-20b", "gpt_oss", "head_dim", json!(64)),
    ] {
        let mut config = config(model);
        let keys = text(&mut config);
        keys.insert("model_type".into(), json!(of));
        keys.insert("use_sliding_window".into(), json!(true));
        keys.remove(key);
        let missing = format!("{:?}", parsed(&config).unwrap().layers);
        text(&mut config).insert(key.into(), expected);
        assert_eq!(format!("{:?}", parsed(&config).unwrap().layers), missing, "{model} {of} {key}");
    }
    let mut config_without = config("qwen3-0.6b");
    text(&mut config_without).remove("sliding_window");
    assert!(!parsed(&config_without).unwrap().summary.contains_key("sliding_window"));
    let mut scaled = config("gpt-oss-20b");
    let stated = format!("{:?}", parsed(&scaled).unwrap().layers);
    text(&mut scaled).insert("rope_scaling".into(), Value::Null);
    assert_eq!(format!("{:?}", parsed(&scaled).unwrap().layers), stated);
    // The text model of gemma-3-4b-it has no other keys.
    let text = json!({"model_type": "gemma3_text", "hidden_size": 2560, "intermediate_size": 10240, "num_hidden_layers": 34,
        "rope_scaling": {"factor": 8.0, "rope_type": "linear"}, "sliding_window": 1024});
    let found = parsed(&json!({"model_type": "gemma3", "text_config": text})).unwrap();
    assert_eq!((found.vocab, found.positions, found.eps, found.layers.len()), (262208, 131072, 1e-6, 34));
}

/// Changes every key of every configuration to values that it cannot have: nothing panics, and an error names the key
/// or one that follows from it.
#[test]
fn impossible_values_are_refused_or_harmless() {
    let values = [
        json!(0),
        json!(-1),
        json!(1e18),
        json!(1e300),
        json!("7"),
        json!([1]),
        json!({}),
        json!(null),
        json!(true),
        json!(7),
    ];
    for (model, published) in MODELS {
        let published = published();
        let keys: Vec<String> = text(&mut published.clone()).keys().cloned().collect();
        for key in keys {
            for value in &values {
                let mut config = published.clone();
                text(&mut config).insert(key.clone(), value.clone());
                if let Err(e) = parsed(&config) {
                    assert!(e.to_string().contains("config"), "{model} {key} {value}: {e}");
                }
            }
        }
    }
    for (model, key, value) in [
        ("gemma4-26b-a4b", "num_hidden_layers", json!(29)),
        ("gemma4-26b-a4b", "num_key_value_heads", json!(7)),
        ("gemma4-26b-a4b", "top_k_experts", json!(129)),
        ("gemma4-26b-a4b", "rms_norm_eps", json!(1e-40)),
        ("gemma4-26b-a4b", "rms_norm_eps", json!(0.5)),
        ("gemma4-26b-a4b", "final_logit_softcapping", json!(1e300)),
        ("gemma4-26b-a4b", "head_dim", json!(255)),
        ("gemma4-26b-a4b", "bos_token_id", json!("<bos>")),
        ("gemma4-26b-a4b", "eos_token_id", json!([1, {}])),
        ("gemma4-26b-a4b", "per_layer_config", json!({"30": {}})),
        ("gemma4-26b-a4b", "per_layer_config", json!({"05": {}})),
        ("zaya1-8b", "num_hidden_layers", json!(41)),
        ("zaya1-8b", "num_attention_heads", json!(7)),
        (
            "zaya1-8b",
            "rope_parameters",
            json!({"hybrid": {"rope_theta": 1e4, "partial_rotary_factor": 0.001}}),
        ),
        ("qwen3-30b-a3b", "num_experts", json!(100_000)),
        ("qwen3-30b-a3b", "num_experts_per_tok", json!(129)),
        ("qwen3-30b-a3b", "mlp_only_layers", json!(["a"])),
        ("gpt-oss-20b", "num_experts_per_tok", json!(33)),
        ("gpt-oss-20b", "swiglu_limit", json!(-1)),
    ] {
        let error = error(model, key, value);
        // A number of layers, heads or experts is wrong beside another key, which may be the one that is named.
        let named = ["layer_types", "heads", "head_dim", "num_experts", key];
        assert!(named.iter().any(|n| error.contains(n)), "{model} {key}: {error}");
    }
}

#[test]
fn ids_outside_the_vocabulary_stand_for_no_token() {
    let mut config = config("llama-3.2-1b");
    for (given, bos, eos) in [
        (json!(5), Some(5), vec![5]),
        (json!(-1), None, vec![]),
        (json!(128_256), None, vec![]),
        (json!(u64::MAX), None, vec![]),
        (json!([128_256, null, 7, -1, 8]), Some(7), vec![7, 8]),
        (json!([]), None, vec![]),
    ] {
        text(&mut config).insert("bos_token_id".into(), given.clone());
        text(&mut config).insert("eos_token_id".into(), given);
        let found = parsed(&config).unwrap();
        assert_eq!((found.bos, found.eos), (bos, eos), "{config}");
    }
}

#[test]
fn values_that_are_not_implemented_come_with_what_is() {
    let says = error("olmoe-1b-7b", "clip_qkv", json!(8.0));
    assert!(says.ends_with("`clip_qkv` is 8.0, implemented is a model without it"), "{says}");
    let says = error("llama-3.2-1b", "model_type", json!(7));
    assert!(says.ends_with("`model_type` is 7, expected a name"), "{says}");
}

#[test]
fn options_about_experts_are_refused_without_experts() {
    let family = open(load("synthetic:llama-3.2-1b?layers=2").unwrap()).unwrap();
    let bank = ShardForm { experts: ExpertForm::Bank, ..ShardForm::default() };
    let of_sort =
        |kind, form| PlanOptions { forms: BTreeMap::from([(kind, form)]), ..PlanOptions::default() };
    for (says, options) in [
        ("--experts-per-shard", PlanOptions { experts_per_shard: Some(2), ..PlanOptions::default() }),
        ("--ffn-shards", PlanOptions { ffn_shards: Some(2), ..PlanOptions::default() }),
        ("--experts: ", PlanOptions { form: bank, ..PlanOptions::default() }),
        ("--experts: ", of_sort(ShardKind::Layers, bank)),
        ("[attention]: ", of_sort(ShardKind::Attention, ShardForm::default())),
    ] {
        let error = family.plan(&options).unwrap_err().to_string();
        assert!(error.contains(says) && error.contains("no experts"), "{error}");
    }
    let cache = ShardForm { cache: CacheForm::Host, ..ShardForm::default() };
    assert!(family.plan(&of_sort(ShardKind::Layers, cache)).is_ok());
}
