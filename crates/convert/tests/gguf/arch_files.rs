//! Files of each architecture: the configuration that their metadata state, and their tensors under Hugging Face names.

use super::common::gguf::Gguf;
use super::common::tiny::{as_f32, read};
use super::{Written, as_q8_0};
use anemoe_convert::Error;
use anemoe_convert::checkpoint::Checkpoint;
use anemoe_convert::models;
use anemoe_io::Kind;
use serde_json::{Value, json};
use std::path::Path;

/// Makes a file of 2 layers with the keys that every architecture has, and an embedding [32, 64].
fn stated(arch: &str, change: impl FnOnce(&mut Gguf)) -> Gguf {
    let mut g = Gguf::new();
    g.text("general.architecture", arch);
    for (key, n) in [
        ("block_count", 2),
        ("context_length", 512),
        ("embedding_length", 64),
        ("feed_forward_length", 96),
        ("attention.head_count", 4),
        ("attention.head_count_kv", 2),
    ] {
        g.u32(&format!("{arch}.{key}"), n);
    }
    g.f32(&format!("{arch}.attention.layer_norm_rms_epsilon"), 0.0009765625);
    g.f32(&format!("{arch}.rope.freq_base"), 500_000.0);
    if matches!(arch, "qwen3moe" | "olmoe" | "gpt-oss") {
        g.u32(&format!("{arch}.expert_count"), 8);
        g.u32(&format!("{arch}.expert_used_count"), 2);
        g.u32(&format!("{arch}.expert_feed_forward_length"), 48);
    }
    g.floats("token_embd.weight", &[32, 64], &[0.5; 32 * 64]);
    change(&mut g);
    g
}

/// Replaces a key.
fn replace(g: &mut Gguf, key: &str, n: u32) {
    g.remove(key);
    g.u32(key, n);
}

fn config(g: &Gguf) -> Value {
    Written::new(g).open().unwrap().config
}

/// Takes the refusal of a file and checks its kind.
fn refusal(g: &Gguf, kind: Kind) -> String {
    let e = Written::new(g).open().err().expect("a refusal");
    assert!(e.kind() == kind && e.to_string().contains("tiny.gguf: "), "{e}");
    e.to_string()
}

/// Adds the values of `more` to an object.
fn with(mut object: Value, more: Value) -> Value {
    for (name, value) in more.as_object().unwrap() {
        object[name] = value.clone();
    }
    object
}

#[test]
fn each_architecture_states_its_configuration() {
    let shared = json!({
        "tie_word_embeddings": true, "hidden_size": 64, "num_hidden_layers": 2, "num_attention_heads": 4,
        "num_key_value_heads": 2, "head_dim": 16, "intermediate_size": 96, "max_position_embeddings": 512,
        "rms_norm_eps": 0.0009765625, "vocab_size": 32,
    });
    let plain = json!({
        "hidden_act": "silu", "rope_parameters": {"rope_type": "default", "rope_theta": 500000.0}
    });
    let dense = with(shared.clone(), plain);
    for (g, own) in [
        (
            stated("llama", |g| g.u32("llama.rope.dimension_count", 16)),
            json!({"model_type": "llama", "attention_bias": false, "mlp_bias": false}),
        ),
        (
            stated("llama", |g| g.u32("llama.attention.sliding_window", 10)),
            json!({"model_type": "mistral", "sliding_window": 10}),
        ),
        (
            stated("llama", |g| {
                g.floats("output.weight", &[32, 64], &[0.5; 32 * 64]);
                g.floats("blk.0.attn_q.bias", &[64], &[0.5; 64]);
            }),
            json!({"model_type": "llama", "tie_word_embeddings": false, "attention_bias": true, "mlp_bias": false}),
        ),
        (stated("qwen2", |_| ()), json!({"model_type": "qwen2", "use_sliding_window": false})),
        (
            stated("qwen3", |g| {
                g.u32("qwen3.attention.key_length", 32);
                g.u32("qwen3.attention.value_length", 32);
            }),
            json!({
                "model_type": "qwen3", "use_sliding_window": false, "attention_bias": false, "head_dim": 32
            }),
        ),
        (
            stated("qwen3moe", |g| g.floats("blk.1.ffn_gate.weight", &[96, 64], &[0.5; 96 * 64])),
            json!({
                "model_type": "qwen3_moe", "use_sliding_window": false, "attention_bias": false, "num_experts": 8,
                "num_experts_per_tok": 2, "moe_intermediate_size": 48, "norm_topk_prob": true, "decoder_sparse_step": 1,
                "mlp_only_layers": [1],
            }),
        ),
        (
            stated("olmoe", |g| g.remove("olmoe.attention.head_count_kv")),
            json!({
                "model_type": "olmoe", "attention_bias": false, "clip_qkv": null, "num_experts": 8,
                "num_experts_per_tok": 2, "norm_topk_prob": false, "num_key_value_heads": 4,
            }),
        ),
        (
            stated("gpt-oss", |g| {
                g.u32("gpt-oss.attention.sliding_window", 8);
                g.text("gpt-oss.rope.scaling.type", "yarn");
                g.f32("gpt-oss.rope.scaling.factor", 32.0);
                g.u32("gpt-oss.rope.scaling.original_context_length", 64);
            }),
            json!({
                "model_type": "gpt_oss", "intermediate_size": 48, "sliding_window": 8, "attention_bias": true,
                "num_local_experts": 8, "num_experts_per_tok": 2, "swiglu_limit": 7.0, "swiglu_alpha": 1.702,
                "layer_types": ["sliding_attention", "full_attention"],
                "rope_parameters": {
                    "rope_type": "yarn", "rope_theta": 500000.0, "factor": 32.0, "beta_fast": 32.0, "beta_slow": 1.0,
                    "original_max_position_embeddings": 64, "truncate": false,
                },
            }),
        ),
    ] {
        assert_eq!(config(&g), with(dense.clone(), own));
    }

    let gemma = |change: &dyn Fn(&mut Gguf)| {
        config(&stated("gemma3", |g| {
            g.u32("gemma3.attention.key_length", 32);
            replace(g, "gemma3.block_count", 7);
            change(g);
        }))
    };
    let expected = with(
        shared,
        json!({
            "model_type": "gemma3_text", "hidden_activation": "gelu_pytorch_tanh", "attention_bias": false, "head_dim": 32,
            "num_hidden_layers": 7, "query_pre_attn_scalar": 32, "attn_logit_softcapping": null,
            "final_logit_softcapping": null, "layer_types": vec!["full_attention"; 7],
            "rope_parameters": {
                "full_attention": {"rope_type": "default", "rope_theta": 500000.0},
                "sliding_attention": {"rope_type": "default", "rope_theta": 10000.0},
            },
        }),
    );
    assert_eq!(gemma(&|_| ()), expected);
    let sliding = |l: usize| if l == 5 { "full_attention" } else { "sliding_attention" };
    let found = gemma(&|g| {
        g.u32("gemma3.attention.sliding_window", 512);
        g.f32("gemma3.final_logit_softcapping", 30.0);
        g.text("gemma3.rope.scaling.type", "linear");
        g.f32("gemma3.rope.scaling.factor", 8.0);
        g.f32("gemma3.rope.freq_base_swa", 20000.0);
    });
    let own = json!({
        "sliding_window": 512, "final_logit_softcapping": 30.0, "layer_types": (0..7).map(sliding).collect::<Vec<_>>(),
        "rope_parameters": {
            "full_attention": {"rope_type": "linear", "rope_theta": 500000.0, "factor": 8.0},
            "sliding_attention": {"rope_type": "default", "rope_theta": 20000.0},
        },
    });
    assert_eq!(found, with(expected, own));
    // Layers by name, and the scale of the 27B model's queries.
    let found = gemma(&|g| {
        g.u32("gemma3.attention.sliding_window", 512);
        g.bools("gemma3.attention.sliding_window_pattern", &[true, false, true, false, true, false, true]);
    });
    assert_eq!(found["layer_types"][1], "full_attention");
    assert_eq!(found["layer_types"][4], "sliding_attention");
    assert_eq!(gemma(&|g| replace(g, "gemma3.block_count", 62))["query_pre_attn_scalar"], 16);
}

/// Makes values that tell their place.
fn numbers(n: usize) -> Vec<f32> {
    (0..n).map(|i| (i % 127) as f32 / 64.0 + (i / 127) as f32 / 1024.0).collect()
}

/// Interleaves the halves of each head's rows as converters do for llama.
fn pair_rows(values: &[f32], head: usize, columns: usize) -> Vec<f32> {
    let rows: Vec<&[f32]> = values.chunks(columns).collect();
    let source = |row: usize| row / head * head + row % 2 * (head / 2) + row % head / 2;
    (0..rows.len()).flat_map(|row| rows[source(row)]).copied().collect()
}

#[test]
fn rows_of_llamas_queries_and_keys() {
    let (q, k, bias) = (numbers(64 * 64), numbers(32 * 64), numbers(64));
    let (kind, mut data) = as_q8_0(&pair_rows(&k, 16, 64));
    // The scale of each block tells where it was.
    for (i, block) in data.chunks_mut(34).enumerate() {
        block[0] = (i % 64) as u8;
    }
    let g = stated("llama", |g| {
        g.floats("blk.1.attn_q.weight", &[64, 64], &pair_rows(&q, 16, 64));
        g.floats("blk.1.attn_q.bias", &[64], &pair_rows(&bias, 16, 1));
        g.tensor("blk.1.attn_k.weight", &[64, 32], kind, data.clone());
        g.floats("blk.1.attn_v.weight", &[32, 64], &k);
    });
    let checkpoint = Written::new(&g).open().unwrap();
    let name = |part: &str| format!("model.layers.1.self_attn.{part}");
    assert!(read(&checkpoint, &name("q_proj.weight")) == q);
    assert!(read(&checkpoint, &name("q_proj.bias")) == bias);
    assert!(read(&checkpoint, &name("v_proj.weight")) == k);
    // Quantized rows, as those of an architecture without pairs in another order.
    let stored = {
        let g = stated("qwen2", |g| g.tensor("blk.1.attn_k.weight", &[64, 32], kind, data));
        read(&Written::new(&g).open().unwrap(), &name("k_proj.weight"))
    };
    let found = read(&checkpoint, &name("k_proj.weight"));
    assert!(stored != found && pair_rows(&found, 16, 64) == stored);
    for (start, end) in [(0, 1), (63, 65), (31, 700), (1000, 2048), (5, 5)] {
        let mut out = vec![0f32; end - start];
        checkpoint.source.read(&name("k_proj.weight"), start as u64..end as u64, &mut out).unwrap();
        assert!(out == found[start..end], "{start}..{end}");
    }
    let g = stated("llama", |g| g.floats("blk.0.attn_q.weight", &[24, 64], &[0.0; 24 * 64]));
    assert!(
        refusal(&g, Kind::Invalid)
            .contains("`blk.0.attn_q.weight`: 24 rows, expected heads of an even number")
    );
    let g = stated("llama", |g| g.floats("blk.0.attn_k.weight", &[2, 16, 64], &[0.0; 32 * 64]));
    assert!(refusal(&g, Kind::Invalid).contains("`blk.0.attn_k.weight`: shape [2, 16, 64]"));
}

#[test]
fn gemma3_norms_are_less_one() {
    let w: Vec<f32> = numbers(64);
    let stored: Vec<f32> = w.iter().map(|w| w + 1.0).collect();
    for (arch, expected) in [("gemma3", &w), ("qwen3", &stored)] {
        let g = stated(arch, |g| {
            g.floats("output_norm.weight", &[64], &stored);
            g.floats("blk.0.attn_norm.weight", &[64], &stored);
            g.floats("blk.0.attn_q_norm.weight", &[16], &stored[..16]);
            g.floats("blk.0.attn_q.weight", &[1, 64], &stored);
        });
        let checkpoint = Written::new(&g).open().unwrap();
        let layer = |name: &str| read(&checkpoint, &format!("model.layers.0.{name}.weight"));
        assert!(read(&checkpoint, "model.norm.weight") == *expected);
        assert!(layer("input_layernorm") == *expected);
        assert!(layer("self_attn.q_norm") == expected[..16]);
        assert!(layer("self_attn.q_proj") == stored);
    }
}

#[test]
fn experts_of_gpt_oss_have_biases() {
    let (gate, up) = (numbers(2 * 3 * 4), numbers(100)[50..74].to_vec());
    let file = |fused: bool| {
        let g = stated("gpt-oss", |g| {
            g.u32("gpt-oss.attention.sliding_window", 8);
            if fused {
                let joined: Vec<f32> = (0..2)
                    .flat_map(|e| [&gate, &up].map(|w| &w[12 * e..][..12]))
                    .flatten()
                    .copied()
                    .collect();
                g.floats("blk.0.ffn_gate_up_exps.weight", &[2, 6, 4], &joined);
                let bias: Vec<f32> =
                    (0..2).flat_map(|e| [&gate, &up].map(|w| &w[3 * e..][..3])).flatten().copied().collect();
                g.floats("blk.0.ffn_gate_up_exps.bias", &[2, 6], &bias);
            } else {
                g.floats("blk.0.ffn_gate_exps.weight", &[2, 3, 4], &gate);
                g.floats("blk.0.ffn_up_exps.weight", &[2, 3, 4], &up);
                g.floats("blk.0.ffn_gate_exps.bias", &[2, 3], &gate[..6]);
                g.floats("blk.0.ffn_up_exps.bias", &[2, 3], &up[..6]);
            }
            g.floats("blk.0.attn_sinks.weight", &[4], &gate[..4]);
        });
        Written::new(&g).open().unwrap()
    };
    let [parts, fused] = [false, true].map(file);
    let experts = |c: &Checkpoint, name: &str| read(c, &format!("model.layers.0.mlp.experts.{name}"));
    for name in ["gate_up_proj", "gate_up_proj_bias"] {
        assert!(experts(&parts, name) == experts(&fused, name), "{name}");
    }
    assert_eq!(experts(&parts, "gate_up_proj_bias"), [&gate[..3], &up[..3], &gate[3..6], &up[3..6]].concat());
    assert_eq!(parts.source.info("model.layers.0.mlp.experts.gate_up_proj_bias").unwrap().shape, [2, 6]);
    assert_eq!(read(&parts, "model.layers.0.self_attn.sinks"), gate[..4]);
    let g = stated("gpt-oss", |g| {
        g.u32("gpt-oss.attention.sliding_window", 8);
        g.floats("blk.0.ffn_gate_exps.bias", &[2, 3], &gate[..6]);
    });
    let what = refusal(&g, Kind::Invalid);
    assert!(
        what.contains(
            "`blk.0.ffn_gate_exps.bias`: the other half of `model.layers.0.mlp.experts.gate_up_proj_bias`"
        ),
        "{what}"
    );
}

/// Computes the divisors of llama3's scaling as llama.cpp's converter does.
fn llama3_divisors(head: usize, theta: f32, factor: f32, context: f32) -> Vec<f32> {
    let divisor = |pair: usize| {
        let wavelength = std::f32::consts::TAU * theta.powf((2 * pair) as f32 / head as f32);
        if wavelength < context / 4.0 {
            1.0
        } else if wavelength > context {
            factor
        } else {
            let smooth = (context / wavelength - 1.0) / 3.0;
            1.0 / ((1.0 - smooth) / factor + smooth)
        }
    };
    (0..head / 2).map(divisor).collect()
}

#[test]
fn scalings_of_the_rope() {
    let rope = |change: &dyn Fn(&mut Gguf)| config(&stated("llama", change))["rope_parameters"].clone();
    let divisors = |d: &[f32]| stated("llama", |g| g.floats("rope_freqs.weight", &[d.len() as u64], d));
    // Llama 3.1, 3.2, and one made for tests.
    for (head, factor, context) in [(128, 8.0, 8192), (64, 32.0, 8192), (16, 8.0, 64)] {
        let found = rope(&|g| {
            g.u32("llama.attention.key_length", head);
            let d = llama3_divisors(head as usize, 500_000.0, factor, context as f32);
            g.floats("rope_freqs.weight", &[d.len() as u64], &d);
        });
        let expected = json!({
            "rope_type": "llama3", "rope_theta": 500000.0, "factor": factor, "low_freq_factor": 1.0,
            "high_freq_factor": 4.0, "original_max_position_embeddings": context,
        });
        assert_eq!(found, expected);
    }
    assert_eq!(config(&divisors(&[1.0; 8]))["rope_parameters"]["rope_type"], "default");
    for wrong in [[1.0, 2.0, 3.0, 4.0, 5.0, 6.0, 7.0, 8.0], [f32::NAN; 8], [0.0; 8], [f32::INFINITY; 8]] {
        let what = refusal(&divisors(&wrong), Kind::Unsupported);
        assert!(what.contains("tensor `rope_freqs.weight`: divisors up to "), "{what}");
    }
    let what = refusal(&divisors(&[1.0; 7]), Kind::Invalid);
    assert!(what.contains("tensor `rope_freqs.weight`: 7 elements, expected 8"), "{what}");

    let scaled = |kind: &'static str, factor: f32| {
        move |g: &mut Gguf| {
            g.text("llama.rope.scaling.type", kind);
            g.f32("llama.rope.scaling.factor", factor);
        }
    };
    let default = json!({"rope_theta": 500000.0, "rope_type": "default"});
    let linear = json!({"rope_theta": 500000.0, "rope_type": "linear", "factor": 4.0});
    assert_eq!(rope(&scaled("none", 4.0)), default);
    assert_eq!(rope(&scaled("linear", 1.0)), default);
    assert_eq!(rope(&scaled("linear", 4.0)), linear);
    assert_eq!(rope(&|g| g.f32("llama.rope.scale_linear", 4.0)), linear);
    let yarn = json!({
        "rope_theta": 500000.0, "rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 512,
        "beta_fast": 16.0,
    });
    let found = rope(&|g| {
        scaled("yarn", 4.0)(g);
        g.f32("llama.rope.scaling.yarn_beta_fast", 16.0);
    });
    assert_eq!(found, yarn);
    let mut no_base = stated("llama", |_| ());
    no_base.remove("llama.rope.freq_base");
    assert_eq!(config(&no_base)["rope_parameters"]["rope_theta"], 10000.0);

    let unsupported = |change: &dyn Fn(&mut Gguf)| refusal(&stated("llama", change), Kind::Unsupported);
    for (what, says) in [
        (
            unsupported(&scaled("longrope", 4.0)),
            "`llama.rope.scaling.type` is longrope; read are none, linear and yarn",
        ),
        (unsupported(&|g| g.text("general.type", "adapter")), "`general.type` is adapter; read are models"),
        (
            unsupported(&|g| g.f32("llama.rope.scaling.attn_factor", 2.0)),
            "`llama.rope.scaling.attn_factor` is 2, implemented is 1",
        ),
        (
            unsupported(&|g| {
                scaled("linear", 4.0)(g);
                g.floats("rope_freqs.weight", &[8], &[2.0; 8]);
            }),
            "`rope_freqs.weight`: divisors of frequencies beside a scaling",
        ),
    ] {
        assert!(what.contains(says), "{what}");
    }
}

#[test]
fn models_that_are_almost_known() {
    let unsupported =
        |arch: &str, change: &dyn Fn(&mut Gguf)| refusal(&stated(arch, |g| change(g)), Kind::Unsupported);
    for (what, says) in [
        (
            unsupported("llama", &|g| g.u32("llama.expert_count", 8)),
            "`llama.expert_count` is 8, implemented is 0",
        ),
        (
            unsupported("llama", &|g| g.u32("llama.attention.value_length", 8)),
            "`llama.attention.value_length` is 8, implemented is 16",
        ),
        (
            unsupported("qwen3", &|g| g.u32("qwen3.rope.dimension_count", 8)),
            "`qwen3.rope.dimension_count` is 8, implemented is 16",
        ),
        (
            unsupported("qwen2", &|g| {
                g.remove("qwen2.attention.head_count_kv");
                g.i32s("qwen2.attention.head_count_kv", &[2, 4]);
            }),
            "`qwen2.attention.head_count_kv` has 2 and 4: layers differ",
        ),
        (unsupported("gemma3n", &|_| ()), "`general.architecture` is gemma3n; read are llama, qwen2"),
    ] {
        assert!(what.contains(says), "{what}");
    }
    let one_width = |gone: &str| config(&stated("qwen3moe", |g| g.remove(&format!("qwen3moe.{gone}"))));
    let c = one_width("feed_forward_length");
    assert_eq!((&c["intermediate_size"], &c["moe_intermediate_size"]), (&json!(48), &json!(48)));
    let c = one_width("expert_feed_forward_length");
    assert_eq!((&c["intermediate_size"], &c["moe_intermediate_size"]), (&json!(96), &json!(48)));
    let mut g = stated("gpt-oss", |_| ());
    assert!(refusal(&g, Kind::Invalid).contains("`gpt-oss.attention.sliding_window` is missing"));
    g.remove("gpt-oss.expert_feed_forward_length");
    assert!(refusal(&g, Kind::Invalid).contains("`gpt-oss.expert_feed_forward_length` is missing"));
    let g = stated("llama", |g| replace(g, "llama.attention.head_count", 0));
    assert_eq!(config(&g)["head_dim"], 0);
    let g = stated("llama", |g| g.floats("blk.0.ffn_gate_exps.weight", &[2, 3, 4], &[0.0; 24]));
    assert!(
        refusal(&g, Kind::Invalid).contains("`blk.0.ffn_gate_exps.weight`: this model has none of that name")
    );
}

/// Checks that tokens end a text by their names, and that those between messages do not.
#[test]
fn tokens_that_end_a_turn() {
    let ends = |tokens: &[&str]| {
        let g = stated("qwen3", |g| {
            g.texts("tokenizer.ggml.tokens", tokens);
            g.i32s("tokenizer.ggml.token_type", &vec![3; tokens.len()]);
            g.u32("tokenizer.ggml.eos_token_id", 0);
        });
        config(&g)["eos_token_id"].clone()
    };
    assert_eq!(ends(&["a", "<|end|>", "<|im_end|>", "<|endoftext|>"]), json!([0, 1, 2, 3]));
    assert_eq!(ends(&["a", "<|end|>", "<|return|>", "<|call|>"]), json!([0, 2, 3]));
}

/// Parts of a split model in a folder of their own.
struct Parts(tempfile::TempDir);

impl Parts {
    /// Writes a model of three parts: keys alone, then one tensor in each. `change` gets every part and its number.
    fn new(change: impl Fn(usize, &mut Gguf)) -> Self {
        let parts = Parts(tempfile::tempdir().unwrap());
        let mut first = stated("llama", |_| ());
        let embedding = first.tensors.pop().unwrap();
        let mut third = Gguf::new();
        let (kind, data) = as_f32(&numbers(64));
        third.tensor("output_norm.weight", &[64], kind, data);
        let second = Gguf { tensors: vec![embedding], ..Gguf::new() };
        for (i, mut g) in [first, second, third].into_iter().enumerate() {
            g.raw("split.no", 2, &(i as u16).to_le_bytes());
            g.raw("split.count", 2, &3u16.to_le_bytes());
            g.raw("split.tensors.count", 5, &2i32.to_le_bytes());
            change(i, &mut g);
            std::fs::write(parts.path(i), g.write()).unwrap();
        }
        parts
    }

    fn path(&self, i: usize) -> std::path::PathBuf {
        self.0.path().join(format!("m-{:05}-of-00003.gguf", i + 1))
    }

    fn error(&self, i: usize) -> Error {
        open(&self.path(i)).err().expect("a refusal")
    }
}

fn open(path: &Path) -> Result<Checkpoint, Error> {
    models::load(path.to_str().unwrap())
}

#[test]
fn any_part_opens_the_whole_model() {
    let parts = Parts::new(|_, _| ());
    for i in 0..3 {
        let c = open(&parts.path(i)).unwrap();
        assert_eq!((c.name.as_str(), &c.path), ("m-00001-of-00003.gguf", &parts.path(0)));
        assert_eq!(c.config["vocab_size"], 32);
        let info = c.source.info("model.embed_tokens.weight").unwrap();
        assert_eq!((&info.shape[..], &info.file), (&[32, 64][..], &parts.path(1)));
        assert_eq!(read(&c, "model.norm.weight"), numbers(64));
        assert_eq!(c.fingerprint().unwrap(), open(&parts.path(0)).unwrap().fingerprint().unwrap());
    }
}

#[test]
fn parts_that_do_not_fit() {
    let replaced = |g: &mut Gguf, key: &str, n: u16| {
        g.remove(key);
        g.raw(key, 2, &n.to_le_bytes());
    };
    let parts = Parts::new(|_, _| ());
    std::fs::remove_file(parts.path(1)).unwrap();
    for i in [0, 2] {
        let e = parts.error(i);
        assert!(e.kind() == Kind::Io && e.path() == Some(parts.path(1).as_path()), "{e}");
        assert!(e.to_string().contains("part 2 of 3"), "{e}");
    }
    let renamed = parts.path(0).with_file_name("model.gguf");
    std::fs::rename(parts.path(0), &renamed).unwrap();
    let e = open(&renamed).err().unwrap();
    assert!(
        e.kind() == Kind::Invalid && e.to_string().contains("`split.count` is 3: this is one of 3 files"),
        "{e}"
    );

    type Change<'a> = &'a dyn Fn(&mut Gguf);
    let changes: [(usize, Change<'_>, &str); 6] = [
        (2, &|g| replaced(g, "split.no", 1), "`split.no` is 1, expected 2 in part 3 of 3"),
        (1, &|g| replaced(g, "split.count", 2), "`split.count` is 2, expected 3 in part 2 of 3"),
        (1, &|g| g.remove("split.no"), "`split.no` is missing"),
        (0, &|g| replaced(g, "split.tensors.count", 3), "is 3, but the 3 parts have 2 tensors"),
        (2, &|g| g.tensors[0].name = b"token_embd.weight".to_vec(), "`token_embd.weight` is in "),
        (1, &|g| g.version = 0, "version 0"),
    ];
    let changed = |at: usize, change: Change<'_>| {
        Parts::new(|i, g| {
            if i == at {
                change(g)
            }
        })
    };
    for (at, change, says) in changes {
        let parts = changed(at, change);
        let e = parts.error(0);
        assert!(e.kind() == Kind::Invalid && e.path() == Some(parts.path(at).as_path()), "{e}");
        assert!(e.to_string().contains(says), "{e}");
    }
    // A count that lies stops at the first part that is not there.
    let parts = changed(0, &|g| replaced(g, "split.count", u16::MAX));
    let many = parts.path(0).with_file_name("m-00001-of-65535.gguf");
    std::fs::rename(parts.path(0), &many).unwrap();
    let e = open(&many).err().unwrap();
    assert!(e.kind() == Kind::Io && e.to_string().contains("m-00002-of-65535.gguf"), "{e}");
}
