//! GGUF files from file to tokens, with the built binary.

use crate::common::{build, contents, fixture, json, refused};
use crate::files::gguf::Gguf;
use crate::files::tiny::{Options, as_f32, gguf_of, tokenizer};
use serde_json::Value;
use std::path::{Path, PathBuf};

const TINY: &str = "tiny-gemma4-moe";

fn write(g: &Gguf, dir: &Path) -> PathBuf {
    let path = dir.join("tiny.gguf");
    std::fs::write(&path, g.write()).unwrap();
    path
}

/// Makes the tiny model with the first 512 tokens of the small model's tokenizer.
fn with_tokenizer() -> Gguf {
    let path = fixture("../models/small-gemma4/tokenizer.json");
    let mut t: Value = serde_json::from_slice(&std::fs::read(path).unwrap()).unwrap();
    let vocab = t["model"]["vocab"].as_object_mut().unwrap();
    vocab.retain(|_, id| id.as_u64().unwrap() < 512);
    let vocab = vocab.clone();
    let known = |m: &Value| {
        let [a, b] = [0, 1].map(|i| m[i].as_str().unwrap());
        [a.into(), b.into(), format!("{a}{b}")].iter().all(|t: &String| vocab.contains_key(t))
    };
    t["model"]["merges"].as_array_mut().unwrap().retain(known);
    let mut g = gguf_of(&fixture(TINY), Options { fused: false, encode: as_f32 });
    tokenizer(&mut g, &t);
    g
}

/// Checks that a file gives the same packages as the folder that it was made of, byte by byte.
#[test]
fn a_file_gives_the_bundle_of_its_folder() {
    let dir = tempfile::tempdir().unwrap();
    let options = ["--quant", "fp16", "--tokens", "1,4"];
    let expected = dir.path().join("folder.anemoe");
    build(&fixture(TINY), &expected, &options);
    for fused in [true, false] {
        let file = write(&gguf_of(&fixture(TINY), Options { fused, encode: as_f32 }), dir.path());
        let bundle = dir.path().join(format!("{fused}.anemoe"));
        build(&file, &bundle, &options);
        assert!(contents(&bundle.join("shards")) == contents(&expected.join("shards")), "fused: {fused}");
        assert!(
            std::fs::read(bundle.join("embed.bin")).unwrap()
                == std::fs::read(expected.join("embed.bin")).unwrap()
        );
        let chain = |bundle: &Path| -> Value {
            serde_json::from_slice(&std::fs::read(bundle.join("chain.json")).unwrap()).unwrap()
        };
        let (mut found, folder) = (chain(&bundle), chain(&expected));
        assert_eq!(found["source"], "tiny.gguf");
        assert_ne!(found["checkpoint_sha256"], folder["checkpoint_sha256"]);
        for other in ["source", "checkpoint_sha256"] {
            found[other] = folder[other].clone();
        }
        assert_eq!(found, folder);
    }
}

/// Checks that a text prompt needs nothing but the file, and that the bundle has all that it needs.
#[test]
fn a_text_needs_nothing_but_the_file() {
    let dir = tempfile::tempdir().unwrap();
    let file = write(&with_tokenizer(), dir.path());
    let file = file.to_str().unwrap();
    let out = dir.path().join("golden.npz");
    let golden =
        json(0, &["golden", file, "--prompt", "def in(self):", "--decode", "4", "-o", out.to_str().unwrap()]);
    let prompt = golden["prompt_ids"].as_array().unwrap();
    assert!(prompt[0] == 2 && prompt.len() > 4, "{golden}");

    let bundle = dir.path().join("tiny.anemoe");
    build(Path::new(file), &bundle, &["--quant", "fp16", "--tokens", "1"]);
    let bundle = bundle.to_str().unwrap();
    let generated =
        json(0, &["generate", bundle, "--prompt", "def in(self):", "--max-new", "4", "--ignore-eos"]);
    assert_eq!(generated["prompt_ids"], golden["prompt_ids"]);
    assert_eq!(generated["generated_ids"], golden["decode_tokens"]);
    assert!(generated["text"].is_string());
    for name in ["tokenizer.json", "tokenizer_config.json", "generation_config.json"] {
        assert!(Path::new(bundle).join(name).is_file(), "{name}");
    }
    // The folder has no tokenizer, but its weights are the same.
    let ids: Vec<String> = prompt.iter().map(Value::to_string).collect();
    let of_folder = dir.path().join("folder.npz");
    let folder = fixture(TINY);
    let (folder, to) = (folder.to_str().unwrap(), of_folder.to_str().unwrap());
    json(0, &["golden", folder, "--prompt-ids", &ids.join(","), "--decode", "4", "-o", to]);
    assert!(std::fs::read(&out).unwrap() == std::fs::read(&of_folder).unwrap());
}

/// Checks that what a file's makers recommend for sampling reaches the tokens.
#[test]
fn recommended_sampling_is_followed() {
    let dir = tempfile::tempdir().unwrap();
    let mut g = with_tokenizer();
    g.raw("general.sampling.top_k", 5, &40i32.to_le_bytes());
    g.f32("general.sampling.temp", 1.5);
    g.f32("general.sampling.penalty_repeat", 1.1);
    let file = write(&g, dir.path());
    let bundle = dir.path().join("tiny.anemoe");
    build(&file, &bundle, &["--quant", "fp16", "--tokens", "1"]);
    let bundle = bundle.to_str().unwrap();
    let generate = |options: &[&str]| {
        json(0, &[&["generate", bundle, "-p", "def in", "-n", "8", "--ignore-eos"], options].concat())
    };
    let (one, two) = (generate(&["--seed", "1"]), generate(&["--seed", "2"]));
    assert_ne!(one["generated_ids"], two["generated_ids"]);
    let sampling = &one["sampling"];
    assert_eq!(sampling["from_model"], serde_json::json!(["temperature", "top_k", "repetition_penalty"]));
    assert_eq!((&sampling["temperature"], &sampling["top_k"]), (&1.5.into(), &40.into()));
    let cold = |seed| generate(&["--temperature", "0", "--seed", seed])["generated_ids"].clone();
    assert_eq!(cold("1"), cold("2"));
}

#[test]
fn a_file_is_inspected_and_planned() {
    let dir = tempfile::tempdir().unwrap();
    let file = write(&gguf_of(&fixture(TINY), Options { fused: true, encode: as_f32 }), dir.path());
    let report = json(0, &["inspect", file.to_str().unwrap()]);
    let folder = json(0, &["inspect", fixture(TINY).to_str().unwrap()]);
    assert_eq!(report["name"], "tiny.gguf");
    for key in ["family", "config", "total_parameters", "active_parameters"] {
        assert_eq!(report[key], folder[key], "{key}");
    }
    assert_eq!(report["bytes"], 4 * report["total_parameters"].as_u64().unwrap());
    let tensors = report["tensors"].as_array().unwrap();
    assert!(tensors.iter().all(|t| t["dtype"] == "f32"));
    json(0, &["plan", file.to_str().unwrap()]);
}

/// Checks that the wrong file is named, and that no bundle stays behind.
#[test]
fn wrong_files_are_refused() {
    let dir = tempfile::tempdir().unwrap();
    let bundle = dir.path().join("none.anemoe");
    let refuse = |g: &Gguf, says: &str| {
        let file = write(g, dir.path());
        refused(&["build", file.to_str().unwrap(), "-o", bundle.to_str().unwrap()], &["tiny.gguf", says]);
        assert!(!bundle.exists());
    };
    let mut g = with_tokenizer();
    g.u32("split.count", 3);
    refuse(&g, "`split.count` is 3");
    // The error is found before the packages are built.
    let mut g = with_tokenizer();
    g.remove("tokenizer.ggml.merges");
    g.texts("tokenizer.ggml.merges", &["t"]);
    refuse(&g, "`tokenizer.ggml.merges` has `t` as 0");
    let file = dir.path().join("text.gguf");
    std::fs::write(&file, "no model").unwrap();
    refused(&["inspect", file.to_str().unwrap()], &["text.gguf", "expected `GGUF`"]);
    let out = dir.path().join("golden.npz");
    let plain = write(&gguf_of(&fixture(TINY), Options { fused: true, encode: as_f32 }), dir.path());
    refused(
        &["golden", plain.to_str().unwrap(), "--prompt", "x", "-o", out.to_str().unwrap()],
        &["tokenizer", "--prompt-ids"],
    );
}
