//! GGUF files of the repository's checkpoints.
#![allow(dead_code)]

use super::gguf::Gguf;
use anemoe_convert::checkpoint::Checkpoint;
use anemoe_convert::models;
use serde_json::Value;
use std::path::Path;

/// Encoder of values: returns the number of a GGML type, and bytes.
pub type Encode = fn(&[f32]) -> (u32, Vec<u8>);

/// Encodes values as GGML's f32.
pub fn as_f32(values: &[f32]) -> (u32, Vec<u8>) {
    (0, values.iter().flat_map(|v| v.to_le_bytes()).collect())
}

/// Options of a GGUF file.
#[derive(Clone, Copy)]
pub struct Options {
    /// True if the experts' gate and up projections are in one tensor.
    pub fused: bool,
    /// Encoding of matrices; vectors are f32.
    pub encode: Encode,
}

/// Hugging Face's names, and the GGUF names that converters give.
const NAMES: [(&str, &str); 21] = [
    ("input_layernorm.weight", "attn_norm.weight"),
    ("self_attn.q_proj.weight", "attn_q.weight"),
    ("self_attn.k_proj.weight", "attn_k.weight"),
    ("self_attn.v_proj.weight", "attn_v.weight"),
    ("self_attn.o_proj.weight", "attn_output.weight"),
    ("self_attn.q_norm.weight", "attn_q_norm.weight"),
    ("self_attn.k_norm.weight", "attn_k_norm.weight"),
    ("post_attention_layernorm.weight", "post_attention_norm.weight"),
    ("pre_feedforward_layernorm.weight", "ffn_norm.weight"),
    ("mlp.gate_proj.weight", "ffn_gate.weight"),
    ("mlp.up_proj.weight", "ffn_up.weight"),
    ("mlp.down_proj.weight", "ffn_down.weight"),
    ("post_feedforward_layernorm.weight", "post_ffw_norm.weight"),
    ("post_feedforward_layernorm_1.weight", "post_ffw_norm_1.weight"),
    ("pre_feedforward_layernorm_2.weight", "pre_ffw_norm_2.weight"),
    ("post_feedforward_layernorm_2.weight", "post_ffw_norm_2.weight"),
    ("router.proj.weight", "ffn_gate_inp.weight"),
    ("router.scale", "ffn_gate_inp.scale"),
    ("router.per_expert_scale", "ffn_down_exps.scale"),
    ("experts.down_proj", "ffn_down_exps.weight"),
    ("layer_scalar", "layer_output_scale.weight"),
];

/// Reads a whole tensor of a checkpoint.
pub fn read(checkpoint: &Checkpoint, name: &str) -> Vec<f32> {
    let info = checkpoint.source.info(name).unwrap_or_else(|| panic!("{name}"));
    let mut out = vec![0f32; info.elements() as usize];
    checkpoint.source.read(name, 0..info.elements(), &mut out).unwrap();
    out
}

/// Makes a GGUF file of a checkpoint in its published layout, with its tokenizer where it has one.
pub fn gguf_of(folder: &Path, options: Options) -> Gguf {
    let checkpoint = models::load(folder.to_str().unwrap()).unwrap();
    let mut g = Gguf::new();
    metadata(&mut g, &checkpoint.config["text_config"]);
    if let Ok(text) = std::fs::read(folder.join("tokenizer.json")) {
        tokenizer(&mut g, &serde_json::from_slice(&text).unwrap());
    }
    let divisors: Vec<f32> = {
        let half = checkpoint.config["text_config"]["global_head_dim"].as_u64().unwrap() / 2;
        (0..half).map(|i| if i < half / 4 { 1.0 } else { 1e30 }).collect()
    };
    g.floats("rope_freqs.weight", &[divisors.len() as u64], &divisors);
    for info in checkpoint.source.tensors() {
        let values = read(&checkpoint, &info.name);
        let name = info.name.strip_prefix("model.language_model.").unwrap();
        let mut add = |name: &str, shape: &[u64], values: &[f32]| {
            let ne: Vec<u64> = shape.iter().rev().copied().collect();
            let (kind, data) = if shape.len() > 1 { (options.encode)(values) } else { as_f32(values) };
            g.tensor(name, &ne, kind, data);
        };
        match name {
            "embed_tokens.weight" => add("token_embd.weight", &info.shape, &values),
            "norm.weight" => add("output_norm.weight", &info.shape, &values),
            _ => {
                let (layer, rest) = name.strip_prefix("layers.").unwrap().split_once('.').unwrap();
                let full = |rest: &str| format!("blk.{layer}.{rest}");
                if rest != "experts.gate_up_proj" {
                    let (_, short) = NAMES.iter().find(|(hf, _)| *hf == rest).unwrap();
                    add(&full(short), &info.shape, &values);
                } else if options.fused {
                    add(&full("ffn_gate_up_exps.weight"), &info.shape, &values);
                } else {
                    let [experts, rows, columns] = info.shape[..] else { panic!("{name}") };
                    let shape = [experts, rows / 2, columns];
                    let half = (rows / 2 * columns) as usize;
                    for (start, name) in [(0, "ffn_gate_exps.weight"), (half, "ffn_up_exps.weight")] {
                        let part = values.chunks(2 * half).flat_map(|e| &e[start..start + half]);
                        add(&full(name), &shape, &part.copied().collect::<Vec<f32>>());
                    }
                }
            }
        }
    }
    g
}

fn metadata(g: &mut Gguf, c: &Value) {
    let size = |name: &str| c[name].as_u64().unwrap_or_else(|| panic!("{name}")) as u32;
    let sliding: Vec<bool> =
        c["layer_types"].as_array().unwrap().iter().map(|t| t == "sliding_attention").collect();
    let rope = |kind: &str| c["rope_parameters"][kind]["rope_theta"].as_f64().unwrap() as f32;
    g.text("general.architecture", "gemma4");
    for (key, hf) in [
        ("context_length", "max_position_embeddings"),
        ("embedding_length", "hidden_size"),
        ("block_count", "num_hidden_layers"),
        ("feed_forward_length", "intermediate_size"),
        ("expert_count", "num_experts"),
        ("expert_used_count", "top_k_experts"),
        ("expert_feed_forward_length", "moe_intermediate_size"),
        ("attention.head_count", "num_attention_heads"),
        ("attention.key_length", "global_head_dim"),
        ("attention.value_length", "global_head_dim"),
        ("attention.key_length_swa", "head_dim"),
        ("attention.value_length_swa", "head_dim"),
        ("rope.dimension_count", "global_head_dim"),
        ("rope.dimension_count_swa", "head_dim"),
        ("attention.sliding_window", "sliding_window"),
        ("attention.shared_kv_layers", "num_kv_shared_layers"),
        ("embedding_length_per_layer_input", "hidden_size_per_layer_input"),
    ] {
        g.u32(&format!("gemma4.{key}"), size(hf));
    }
    let kv = |s: &bool| size(if *s { "num_key_value_heads" } else { "num_global_key_value_heads" }) as i32;
    g.i32s("gemma4.attention.head_count_kv", &sliding.iter().map(kv).collect::<Vec<i32>>());
    g.bools("gemma4.attention.sliding_window_pattern", &sliding);
    g.f32("gemma4.attention.layer_norm_rms_epsilon", c["rms_norm_eps"].as_f64().unwrap() as f32);
    g.f32("gemma4.final_logit_softcapping", c["final_logit_softcapping"].as_f64().unwrap() as f32);
    g.f32("gemma4.rope.freq_base", rope("full_attention"));
    g.f32("gemma4.rope.freq_base_swa", rope("sliding_attention"));
    g.u32("tokenizer.ggml.bos_token_id", size("bos_token_id"));
    g.u32("tokenizer.ggml.eos_token_id", size("eos_token_id"));
    g.u32("tokenizer.ggml.padding_token_id", size("pad_token_id"));
}

/// Adds the keys of a `tokenizer.json`, as converters write them.
pub fn tokenizer(g: &mut Gguf, t: &Value) {
    let vocab = t["model"]["vocab"].as_object().unwrap();
    let mut tokens = vec![""; vocab.len()];
    for (text, id) in vocab {
        tokens[id.as_u64().unwrap() as usize] = text;
    }
    let added = t["added_tokens"].as_array().unwrap();
    let kind = |text: &&str| match added.iter().find(|a| a["content"] == **text) {
        Some(a) if a["special"] == true => 3,
        Some(_) => 4,
        None if text.len() == 6 && text.starts_with("<0x") => 6,
        None => 1,
    };
    let merges: Vec<String> = t["model"]["merges"]
        .as_array()
        .unwrap()
        .iter()
        .map(|m| format!("{} {}", m[0].as_str().unwrap(), m[1].as_str().unwrap()))
        .collect();
    g.text("tokenizer.ggml.model", "gemma4");
    g.texts("tokenizer.ggml.tokens", &tokens);
    g.f32s("tokenizer.ggml.scores", &vec![-1000.0; tokens.len()]);
    g.i32s("tokenizer.ggml.token_type", &tokens.iter().map(kind).collect::<Vec<i32>>());
    g.texts("tokenizer.ggml.merges", &merges);
    g.bool("tokenizer.ggml.add_space_prefix", false);
    g.bool("tokenizer.ggml.add_bos_token", true);
    g.u32("tokenizer.ggml.unknown_token_id", 3);
}
