//! GGUF files as checkpoints: the same model as the folder that they were made of, and an error that names each
//! fault.

#[path = "gguf/arch_files.rs"]
mod arch_files;
mod common;

use anemoe_convert::Error;
use anemoe_convert::checkpoint::{Checkpoint, Dtype, SideFile};
use anemoe_convert::models;
use anemoe_convert::plan::PlanOptions;
use anemoe_io::Kind;
use common::gguf::Gguf;
use common::tiny::{Options, as_f32, gguf_of, read};
use half::f16;
use serde_json::{Value, json};
use std::ops::Range;
use std::path::{Path, PathBuf};

fn repository(path: &str) -> PathBuf {
    Path::new(env!("CARGO_MANIFEST_DIR")).join("../..").join(path)
}

fn as_f16(values: &[f32]) -> (u32, Vec<u8>) {
    (1, values.iter().flat_map(|&v| f16::from_f32(v).to_le_bytes()).collect())
}

/// Encodes blocks of 32 with the scale 1/64: coarse, but fine enough to tell values apart.
fn as_q8_0(values: &[f32]) -> (u32, Vec<u8>) {
    let block = |v: &[f32]| {
        let scale = f16::from_f32(1.0 / 64.0).to_le_bytes();
        let quants = v.iter().map(|x| (x * 64.0).round().clamp(-127.0, 127.0) as i8 as u8);
        scale.into_iter().chain(quants).collect::<Vec<u8>>()
    };
    (8, values.chunks(32).flat_map(block).collect())
}

const FUSED: Options = Options { fused: true, encode: as_f32 };
const UNFUSED: Options = Options { fused: false, encode: as_f16 };

fn tiny(options: Options) -> Gguf {
    gguf_of(&repository("fixtures/tiny-gemma4-moe"), options)
}

/// A GGUF file in a folder of its own.
struct Written(tempfile::TempDir);

impl Written {
    fn new(g: &Gguf) -> Self {
        let dir = tempfile::tempdir().unwrap();
        std::fs::write(dir.path().join("tiny.gguf"), g.write()).unwrap();
        Written(dir)
    }

    fn path(&self) -> PathBuf {
        self.0.path().join("tiny.gguf")
    }

    fn open(&self) -> Result<Checkpoint, Error> {
        models::load(self.path().to_str().unwrap())
    }

    fn error(&self) -> Error {
        match self.open().and_then(|c| models::open(c).map(|_| ())) {
            Err(e) => e,
            Ok(()) => panic!("it opens"),
        }
    }
}

fn refused(g: &Gguf, kind: Kind) -> String {
    let file = Written::new(g);
    let e = file.error();
    assert!(e.kind() == kind && e.path() == Some(file.path().as_path()), "{e}");
    e.what().into()
}

fn invalid(g: &Gguf) -> String {
    refused(g, Kind::Invalid)
}

fn unsupported(g: &Gguf) -> String {
    refused(g, Kind::Unsupported)
}

#[test]
fn every_tensor_is_that_of_the_folder() {
    let folder = repository("fixtures/tiny-gemma4-moe");
    let folder = models::load(folder.to_str().unwrap()).unwrap();
    let rounded = |v: &f32| f16::from_f32(*v).to_f32();
    for (options, dtype) in [(FUSED, Dtype::F32), (UNFUSED, Dtype::F16)] {
        let file = Written::new(&tiny(options));
        let gguf = file.open().unwrap();
        assert_eq!(gguf.source.tensors().len(), folder.source.tensors().len());
        for info in folder.source.tensors() {
            let name = format!("model.{}", info.name.strip_prefix("model.language_model.").unwrap());
            let found = gguf.source.info(&name).unwrap();
            assert_eq!(found.shape, info.shape, "{name}");
            let expected = if info.shape.len() > 1 { dtype } else { Dtype::F32 };
            assert_eq!(found.dtype, expected, "{name}");
            assert_eq!(Some(found.bytes), expected.tensor_bytes(&info.shape), "{name}");
            let mut wanted = read(&folder, &info.name);
            if expected == Dtype::F16 {
                wanted = wanted.iter().map(rounded).collect();
            }
            assert!(read(&gguf, &name) == wanted, "{name}");
        }
    }
}

/// Checks the factors beside NVFP4's weights: one of a matrix, or one of each expert.
#[test]
fn scales_beside_weights_are_factors_of_them() {
    let scaled = |experts: &[f32]| {
        let mut g = tiny(Options { fused: false, encode: as_f32 });
        g.floats("blk.0.attn_q.scale", &[1], &[0.5]);
        g.floats("blk.0.attn_q.input_scale", &[1], &[3.0]);
        g.floats("blk.0.ffn_up_exps.scale", &[experts.len() as u64], experts);
        g
    };
    let plain = Written::new(&tiny(Options { fused: false, encode: as_f32 }));
    let scales = [2.0, 0.25, 1.0, 4.0, 0.5, 2.0, 8.0, 1.0];
    let file = Written::new(&scaled(&scales));
    let (plain, found) = (plain.open().unwrap(), file.open().unwrap());
    let values = |name: &str| [&plain, &found].map(|c| read(c, &format!("model.layers.0.{name}")));
    let [before, after] = values("self_attn.q_proj.weight");
    assert!(before.iter().zip(&after).all(|(b, a)| b * 0.5 == *a));
    let [before, after] = values("experts.gate_up_proj");
    let half = before.len() / 16;
    for (i, (b, a)) in before.iter().zip(&after).enumerate() {
        let factor = if i / half % 2 == 0 { 1.0 } else { scales[i / half / 2] };
        assert_eq!(b * factor, *a, "{i}");
    }
    // Gemma 4's own factor of each expert stays a tensor.
    let [before, after] = values("router.per_expert_scale");
    assert_eq!(before, after);
    assert!(invalid(&scaled(&[2.0, 0.25])).contains("`blk.0.ffn_up_exps.scale`: f32 [2], expected one f32"));
    let mut g = tiny(FUSED);
    g.floats("blk.0.attn_w.scale", &[1], &[0.5]);
    assert!(invalid(&g).contains("`blk.0.attn_w.scale`: this model has none of that name"));
}

#[test]
fn the_plan_is_that_of_the_folder() {
    let folder = repository("fixtures/tiny-gemma4-moe");
    let plan = |path: &Path| {
        let family = models::open(models::load(path.to_str().unwrap()).unwrap()).unwrap();
        serde_json::to_value(family.plan(&PlanOptions::default()).unwrap()).unwrap()
    };
    let rename = |mut plan: Value| {
        for at in ["/source", "/chain/source"] {
            *plan.pointer_mut(at).unwrap() = json!("renamed");
        }
        plan
    };
    let expected = plan(&folder);
    for options in [FUSED, UNFUSED] {
        let file = Written::new(&tiny(options));
        let found = plan(&file.path());
        assert_eq!(found["source"], "tiny.gguf");
        assert_eq!(rename(found), rename(expected.clone()));
    }
}

/// Checks ranges that cut experts, halves and blocks anywhere.
#[test]
fn pieces_of_joined_experts() {
    let file = Written::new(&tiny(Options { fused: false, encode: as_q8_0 }));
    let fused = Written::new(&tiny(Options { fused: true, encode: as_q8_0 }));
    let (parts, whole) = (file.open().unwrap(), fused.open().unwrap());
    let name = "model.layers.2.experts.gate_up_proj";
    let expected = read(&whole, name);
    let n = expected.len() as u64;
    assert_eq!(n, 8 * 64 * 64);
    assert!(read(&parts, name) == expected);
    for (start, end) in [(0, 1), (2047, 2049), (2000, 7000), (4096, 8192), (4100, 4100), (n - 3, n), (31, 65)]
    {
        for checkpoint in [&parts, &whole] {
            let mut out = vec![0f32; (end - start) as usize];
            checkpoint.source.read(name, start..end, &mut out).unwrap();
            assert!(out == expected[start as usize..end as usize], "{start}..{end}");
        }
    }
    for range in [n..n + 1, Range { start: 5, end: 4 }, 0..2] {
        let err = parts.source.read(name, range, &mut [0f32]).unwrap_err().to_string();
        assert!(err.contains(name), "{err}");
    }
}

#[test]
fn a_weight_that_is_not_a_number() {
    let mut g = tiny(UNFUSED);
    let up = g.tensors.iter_mut().find(|t| t.name == b"blk.0.ffn_up_exps.weight").unwrap();
    up.data[2 * 100..2 * 101].copy_from_slice(&f16::INFINITY.to_le_bytes());
    let checkpoint = Written::new(&g).open().unwrap();
    let name = "model.layers.0.experts.gate_up_proj";
    let err = checkpoint.source.read(name, 2000..2400, &mut [0f32; 400]).unwrap_err().to_string();
    assert!(err.contains("tiny.gguf") && err.contains(name) && err.contains("element 2148 is inf"), "{err}");
}

#[test]
fn tensors_that_do_not_fit_the_model() {
    let without = |name: &str| {
        let mut g = tiny(UNFUSED);
        g.tensors.retain(|t| t.name != name.as_bytes());
        g
    };
    assert!(invalid(&without("output_norm.weight")).contains("tensor `model.norm.weight` [64] is missing"));
    assert!(invalid(&without("token_embd.weight")).contains("`token_embd.weight` is missing"));
    let what = invalid(&without("blk.4.attn_v.weight"));
    assert!(what.contains("`model.layers.4.self_attn.v_proj.weight` [32, 64] is missing"), "{what}");
    let what = invalid(&without("blk.1.ffn_gate_exps.weight"));
    assert!(what.contains("`blk.1.ffn_up_exps.weight`") && what.contains("is missing"), "{what}");

    let mut g = tiny(FUSED);
    g.floats("blk.0.attn_sinks.weight", &[4], &[0.0; 4]);
    assert!(invalid(&g).contains("tensor `blk.0.attn_sinks.weight`: this model has none of that name"));
    let mut g = tiny(FUSED);
    g.floats("blk.6.attn_norm.weight", &[64], &[0.0; 64]);
    assert!(invalid(&g).contains("tensor `model.layers.6.input_layernorm.weight`"));
    let mut g = tiny(FUSED);
    g.floats("blk.0.ffn_gate_exps.weight", &[8, 32, 64], &[0.0; 8 * 32 * 64]);
    g.floats("blk.0.ffn_up_exps.weight", &[8, 32, 64], &[0.0; 8 * 32 * 64]);
    assert!(invalid(&g).contains("is there already as one tensor"));
    let mut g = tiny(FUSED);
    g.floats("output.weight", &[512, 64], &[0.0; 512 * 64]);
    assert!(unsupported(&g).contains("`tie_word_embeddings` is false"));

    let mut g = tiny(FUSED);
    let q = g.tensors.iter_mut().find(|t| t.name == b"blk.1.attn_q.weight").unwrap();
    q.ne = vec![128, 32];
    let what = invalid(&g);
    assert!(
        what.contains("`model.layers.1.self_attn.q_proj.weight`: shape [32, 128], expected [64, 64]"),
        "{what}"
    );
    let mut g = tiny(UNFUSED);
    let up = g.tensors.iter_mut().find(|t| t.name == b"blk.1.ffn_up_exps.weight").unwrap();
    up.ne = vec![32, 64, 8];
    assert!(invalid(&g).contains("`blk.1.ffn_up_exps.weight`: shape [8, 64, 32], expected [8, 32, 64]"));
}

#[test]
fn metadata_that_is_missing() {
    for key in [
        "general.architecture",
        "gemma4.context_length",
        "gemma4.embedding_length",
        "gemma4.block_count",
        "gemma4.feed_forward_length",
        "gemma4.expert_used_count",
        "gemma4.expert_feed_forward_length",
        "gemma4.attention.head_count",
        "gemma4.attention.head_count_kv",
        "gemma4.attention.key_length",
        "gemma4.attention.key_length_swa",
        "gemma4.attention.layer_norm_rms_epsilon",
        "gemma4.attention.sliding_window",
        "gemma4.attention.sliding_window_pattern",
        "gemma4.rope.freq_base",
        "gemma4.rope.freq_base_swa",
    ] {
        let mut g = tiny(FUSED);
        g.remove(key);
        assert!(invalid(&g).contains(&format!("metadata: `{key}` is missing")), "{key}");
        let mut g = tiny(FUSED);
        g.remove(key);
        g.raw(key, 7, &[1]);
        assert!(invalid(&g).contains(&format!("metadata: `{key}` is of type bool")), "{key}");
    }
}

#[test]
fn metadata_that_may_be_missing() {
    let mut g = tiny(FUSED);
    for key in [
        "gemma4.final_logit_softcapping",
        "gemma4.attention.value_length",
        "gemma4.attention.shared_kv_layers",
        "gemma4.embedding_length_per_layer_input",
        "gemma4.rope.dimension_count",
        "tokenizer.ggml.bos_token_id",
        "tokenizer.ggml.eos_token_id",
        "tokenizer.ggml.padding_token_id",
    ] {
        g.remove(key);
    }
    g.tensors.retain(|t| t.name != b"rope_freqs.weight");
    let checkpoint = Written::new(&g).open().unwrap();
    assert_eq!(checkpoint.config["final_logit_softcapping"], 30.0);
    assert_eq!(checkpoint.config["rope_parameters"]["full_attention"]["partial_rotary_factor"], 0.25);
    assert_eq!(checkpoint.generation_config, None);
    assert!(checkpoint.side_files().unwrap().is_empty());
    models::open(checkpoint).unwrap();
}

/// Checks that `general.sampling` becomes the words of `generation_config.json`, whatever kinds of numbers it has.
#[test]
fn recommended_sampling_is_kept() {
    let made = |change: &dyn Fn(&mut Gguf)| {
        let mut g = tiny(FUSED);
        for key in ["bos", "eos", "padding"] {
            g.remove(&format!("tokenizer.ggml.{key}_token_id"));
        }
        change(&mut g);
        Written::new(&g).open().unwrap().generation_config
    };
    let i32 =
        |g: &mut Gguf, key: &str, n: i32| g.raw(&format!("general.sampling.{key}"), 5, &n.to_le_bytes());
    let f32 = |g: &mut Gguf, key: &str, v: f32| g.f32(&format!("general.sampling.{key}"), v);
    let all = made(&|g| {
        i32(g, "top_k", 64);
        f32(g, "top_p", 0.95);
        f32(g, "min_p", 0.05);
        i32(g, "temp", 1);
        f32(g, "penalty_repeat", 1.1);
    });
    assert_eq!(
        all,
        Some(json!({"do_sample": true, "top_k": 64, "top_p": 0.95, "min_p": 0.05, "temperature": 1.0,
            "repetition_penalty": 1.1, "penalty_last_n": 64}))
    );
    // No key means all tokens, and a temperature of 0 the most probable one.
    assert_eq!(
        made(&|g| f32(g, "temp", 0.0)),
        Some(json!({"do_sample": false, "temperature": 0.0, "top_k": 0}))
    );
    // What a sequence leaves out does not run; what it asks for and does not happen is kept for its name.
    let left_out = made(&|g| {
        f32(g, "min_p", 0.05);
        f32(g, "temp", 0.7);
        f32(g, "xtc_probability", 0.5);
        i32(g, "penalty_last_n", -1);
        g.text("general.sampling.sequence", "penalties;top-k;min_p;temp");
    });
    assert_eq!(
        left_out,
        Some(json!({"do_sample": true, "min_p": 0.05, "temperature": 0.7, "top_k": 0, "penalty_last_n": -1,
            "sequence": "penalties;top-k;min_p;temp"}))
    );
    let mut g = tiny(FUSED);
    g.text("general.sampling.temp", "hot");
    assert!(
        Written::new(&g)
            .open()
            .err()
            .unwrap()
            .to_string()
            .contains("`general.sampling.temp` is of type string")
    );
}

#[test]
fn metadata_that_is_impossible_or_not_implemented() {
    let with = |key: &str, change: &dyn Fn(&mut Gguf, &str)| {
        let mut g = tiny(FUSED);
        g.remove(key);
        change(&mut g, key);
        match Written::new(&g).error() {
            e if matches!(e.kind(), Kind::Invalid | Kind::Unsupported) => e.to_string(),
            e => panic!("{e}"),
        }
    };
    let number = |key: &str, n: u32| with(key, &|g, key| g.u32(key, n));
    for (found, says) in [
        (
            number("split.count", 2),
            "invalid metadata: `split.count` is 2: this is one of 2 files, but its name",
        ),
        (number("gemma4.block_count", 0), "`gemma4.block_count` is 0"),
        (number("gemma4.block_count", u32::MAX), "`gemma4.block_count` is 4294967295"),
        (number("gemma4.block_count", 7), "has 6 entries for 7 layers"),
        (number("gemma4.attention.head_count", 0), "`num_attention_heads` is 0"),
        (
            number("gemma4.expert_count", 0),
            "`model.layers.0.experts.down_proj`: this model has none of that name",
        ),
        (number("gemma4.embedding_length_per_layer_input", 256), "hidden_size_per_layer_input"),
        (number("gemma4.attention.shared_kv_layers", 2), "num_kv_shared_layers"),
        (
            number("gemma4.attention.value_length", 64),
            "unsupported metadata: `gemma4.attention.value_length` is 64",
        ),
        (number("gemma4.rope.dimension_count", 8), "`gemma4.rope.dimension_count` is 8"),
        (number("gemma4.vocab_size", 100), "shape [512, 64], expected [100, 64]"),
        (
            with("general.architecture", &|g, k| g.text(k, "bert")),
            "`general.architecture` is bert; read are llama, qwen2, qwen3, qwen3moe, olmoe, gemma3, gemma4, gpt-oss",
        ),
        (with("gemma4.rope.scaling.type", &|g, k| g.text(k, "yarn")), "`gemma4.rope.scaling.type` is yarn"),
        (with("gemma4.attn_logit_softcapping", &|g, k| g.f32(k, 50.0)), "attn_logit_softcapping"),
        (with("gemma4.attention.head_count", &|g, k| g.i32s(k, &[4, 4, 4, 4, 4, 8])), "layers differ"),
        (with("gemma4.attention.head_count_kv", &|g, k| g.i32s(k, &[2, 2, 2])), "has 3 values, expected 6"),
        (with("gemma4.attention.head_count_kv", &|g, k| g.i32s(k, &[2, 2, 2, 2, 2, -1])), "has -1"),
        (
            with("gemma4.attention.layer_norm_rms_epsilon", &|g, k| g.f32(k, f32::NAN)),
            "`gemma4.attention.layer_norm_rms_epsilon` is NaN, expected a finite number",
        ),
        (with("gemma4.attention.layer_norm_rms_epsilon", &|g, k| g.f32(k, 1e-40)), "rms_norm_eps"),
        (with("gemma4.final_logit_softcapping", &|g, k| g.f32(k, f32::NAN)), "softcapping` is NaN"),
        (with("gemma4.final_logit_softcapping", &|g, k| g.f32(k, f32::INFINITY)), "softcapping` is inf"),
        (with("gemma4.final_logit_softcapping", &|g, k| g.f32(k, 1e-40)), "`final_logit_softcapping` is "),
        (with("gemma4.attn_logit_softcapping", &|g, k| g.f32(k, f32::NAN)), "softcapping` is NaN"),
        (with("gemma4.rope.freq_base", &|g, k| g.f32(k, f32::INFINITY)), "freq_base` is inf"),
        (with("gemma4.rope.freq_base_swa", &|g, k| g.f32(k, 3e38)), "rope_theta` is "),
    ] {
        assert!(found.contains("tiny.gguf: ") && found.contains(says), "{found}");
    }
}

#[test]
fn key_value_heads_of_one_layer() {
    let mut g = tiny(FUSED);
    g.remove("gemma4.attention.head_count_kv");
    g.i32s("gemma4.attention.head_count_kv", &[2, 1, 2, 2, 2, 1]);
    assert!(
        invalid(&g).contains("`model.layers.1.self_attn.k_proj.weight`: shape [32, 64], expected [16, 64]")
    );
    g.remove("gemma4.attention.head_count_kv");
    g.u32("gemma4.attention.head_count_kv", 2);
    assert!(
        invalid(&g).contains("`model.layers.5.self_attn.k_proj.weight`: shape [32, 64], expected [64, 64]")
    );
}

/// Checks that full layers with values of their own use these.
#[test]
fn values_of_full_layers() {
    let mut g = tiny(FUSED);
    let k_eq_v = |g: &Gguf| Written::new(g).open().unwrap().config["attention_k_eq_v"].clone();
    assert_eq!(k_eq_v(&g), true);
    g.floats("blk.5.attn_v.weight", &[32, 64], &[0.5; 32 * 64]);
    assert_eq!(k_eq_v(&g), false);
    models::open(Written::new(&g).open().unwrap()).unwrap();
}

#[test]
fn pairs_that_rotate() {
    let with = |divisors: &[f32]| {
        let mut g = tiny(FUSED);
        g.tensors.retain(|t| t.name != b"rope_freqs.weight");
        g.floats("rope_freqs.weight", &[divisors.len() as u64], divisors);
        g
    };
    for rotating in 1..=16 {
        let divisors: Vec<f32> = (0..16).map(|i| if i < rotating { 1.0 } else { 1e30 }).collect();
        let config = Written::new(&with(&divisors)).open().unwrap().config;
        let factor = config["rope_parameters"]["full_attention"]["partial_rotary_factor"].as_f64().unwrap();
        assert_eq!((factor * 32.0 / 2.0) as usize, rotating);
    }
    let mut mixed = vec![1e30; 16];
    assert!(unsupported(&with(&mixed)).contains("no pair rotates"));
    (mixed[0], mixed[2]) = (1.0, 1.0);
    assert!(unsupported(&with(&mixed)).contains("`rope_freqs.weight`: divisor 1;"));
    mixed[2] = 8.0;
    assert!(unsupported(&with(&mixed)).contains("divisor 8"));
    assert!(invalid(&with(&[1.0; 8])).contains("`rope_freqs.weight`: 8 elements, expected 16"));
}

#[test]
fn files_that_are_not_there_or_not_files() {
    assert!(models::load("no/such.gguf").err().unwrap().kind() == Kind::Io);
    let file = Written::new(&tiny(FUSED));
    std::fs::write(file.path(), b"").unwrap();
    assert!(file.error().to_string().contains("GGUF header"));
    let short = &tiny(FUSED).write()[..200_000];
    std::fs::write(file.path(), short).unwrap();
    assert!(file.error().to_string().contains("the file is cut off"));
}

/// Checks that metadata with wrong bytes is refused or read, without a panic.
#[test]
fn metadata_with_wrong_bytes() {
    let mut g = tiny(FUSED);
    g.texts("tokenizer.ggml.tokens", &["<bos>", "a", "b", "ab", "▁"]);
    g.texts("tokenizer.ggml.merges", &["a b"]);
    g.i32s("tokenizer.ggml.token_type", &[3, 1, 1, 1, 4]);
    g.text("tokenizer.ggml.model", "gemma4");
    let mut random = anemoe_io::Random::new(1);
    let file = Written::new(&g);
    let whole = g.write();
    let keys = Gguf { tensors: Vec::new(), ..g }.head().len();
    for _ in 0..300 {
        let mut bytes = whole.clone();
        for _ in 0..1 + random.below(3) {
            let (at, byte) = (random.below(keys), random.below(256) as u8);
            bytes[at] = byte;
        }
        std::fs::write(file.path(), bytes).unwrap();
        if let Ok(checkpoint) = file.open() {
            let _ = checkpoint.side_files();
            let _ = models::open(checkpoint);
        }
    }
}

/// Checks that the small model's tokenizer, from a file with nothing else of that model, is the one of its folder.
#[test]
fn the_tokenizer_is_that_of_the_folder() {
    let text = std::fs::read(repository("models/small-gemma4/tokenizer.json")).unwrap();
    let mut json: Value = serde_json::from_slice(&text).unwrap();
    // A token that is matched whole but is not special.
    json["added_tokens"][5]["special"] = json!(false);
    let mut g = tiny(FUSED);
    common::tiny::tokenizer(&mut g, &json);
    g.text("tokenizer.chat_template", "{{ bos_token }}");
    // The embedding has as many rows as there are tokens.
    g.tensors.retain(|t| t.name != b"token_embd.weight");
    g.floats("token_embd.weight", &[4096, 64], &vec![0.5; 4096 * 64]);
    let checkpoint = Written::new(&g).open().unwrap();
    assert_eq!(checkpoint.config["vocab_size"], 4096);
    let side = |name: &str| match checkpoint.side_file(name).unwrap() {
        Some(SideFile::Bytes(bytes)) => bytes,
        other => panic!("{name}: {other:?}"),
    };
    let made = side("tokenizer.json");
    let mut found: Value = serde_json::from_slice(&made).unwrap();
    for t in [&mut found, &mut json] {
        // The order of the vocabulary does not count.
        let vocab = t["model"]["vocab"].as_object_mut().unwrap();
        vocab.sort_keys();
    }
    for part in ["normalizer", "pre_tokenizer", "decoder", "model", "added_tokens", "post_processor"] {
        assert!(found[part] == json[part], "{part}");
    }
    let config: Value = serde_json::from_slice(&side("tokenizer_config.json")).unwrap();
    assert_eq!((&config["bos_token"], &config["eos_token"]), (&json!("<bos>"), &json!("<eos>")));
    assert_eq!(config["chat_template"], "{{ bos_token }}");
    // <eos>, and <end_of_turn> by its text.
    let generation: Value = serde_json::from_slice(&side("generation_config.json")).unwrap();
    assert_eq!(generation, json!({"bos_token_id": 2, "pad_token_id": 0, "eos_token_id": [1, 6]}));
    assert_eq!(checkpoint.generation_config, Some(generation));

    let [made, original] = [made, text].map(|t| tokenizers::Tokenizer::from_bytes(t).unwrap());
    for text in [
        "def main():\n    return 1",
        "  ü 漢字 🦀\t<end_of_turn>\n\n",
        "",
        " ",
        "<bos>a<pad>",
        "\u{0}\u{7f}\r\n",
    ] {
        let [a, b] = [&made, &original].map(|t| t.encode(text, true).unwrap().get_ids().to_vec());
        assert_eq!(a, b, "{text}");
        assert_eq!(made.decode(&a, true).unwrap(), original.decode(&b, true).unwrap());
    }
}

#[test]
fn tokenizers_that_are_wrong() {
    let small = |change: &dyn Fn(&mut Gguf)| {
        let mut g = tiny(FUSED);
        let tokens: Vec<String> =
            (0..510).map(|i| format!("t{i}")).chain(["a".into(), "t1a".into()]).collect();
        g.text("tokenizer.ggml.model", "gemma4");
        g.texts("tokenizer.ggml.tokens", &tokens);
        g.texts("tokenizer.ggml.merges", &["t1 a"]);
        change(&mut g);
        let file = Written::new(&g);
        let checkpoint = file.open()?;
        checkpoint.side_files().map(|files| files.len())
    };
    let replace = |key: &'static str, texts: &'static [&'static str]| {
        small(&move |g: &mut Gguf| {
            g.remove(key);
            g.texts(key, texts);
        })
    };
    let merges = "tokenizer.ggml.merges";
    assert_eq!(small(&|_| {}).unwrap(), 3);
    for (found, says) in [
        (small(&|g| g.remove("tokenizer.ggml.model")), "`tokenizer.ggml.model` is missing"),
        (small(&|g| g.remove(merges)), "`tokenizer.ggml.merges` is missing"),
        (replace(merges, &["t1 a", "t1a"]), "has `t1a` as 1, which is not two tokens"),
        (replace(merges, &["t1 b"]), "has `t1 b` as 0, which is not two tokens that make a third"),
        (replace(merges, &["a a"]), "has `a a` as 0"),
        (replace(merges, &["", " ", "é "]), "has `` as 0"),
        (replace("tokenizer.ggml.tokens", &["a", "b", "a"]), "has `a` as 0 and as 2"),
        (
            small(&|g| g.i32s("tokenizer.ggml.token_type", &[1, 1])),
            "`tokenizer.ggml.token_type` has 2 values",
        ),
        (
            small(&|g| {
                g.remove("tokenizer.ggml.model");
                g.text("tokenizer.ggml.model", "bert");
            }),
            "unsupported metadata: `tokenizer.ggml.model` is bert",
        ),
    ] {
        let found = found.unwrap_err().to_string();
        assert!(found.contains("tiny.gguf: ") && found.contains(says), "{found}");
    }
}
