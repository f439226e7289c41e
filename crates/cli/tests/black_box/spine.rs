//! Gemma 4 from a checkpoint to tokens, with the built binary.

use crate::common::{build, contents, fixture, ids, json, run, same_in_chunks};
use serde_json::Value;
use std::path::Path;

fn validate(bundle: &Path, model: &str, min_cosine: &str, status: i32) -> Value {
    crate::common::validate(bundle, &fixture(model).join("golden.npz"), min_cosine, status)
}

/// Checks 24 positions, 16 decode steps and 16 tokens against Hugging Face transformers, in both layouts of the checkpoint.
#[test]
fn fp16_shards_agree_with_transformers() {
    let dir = tempfile::tempdir().unwrap();
    let mut bundles = Vec::new();
    for model in ["tiny-gemma4-moe", "tiny-gemma4-moe-text"] {
        let bundle = dir.path().join(model);
        build(&fixture(model), &bundle, &["--quant", "fp16", "--tokens", "1,4"]);
        let v = validate(&bundle, model, "0.9999", 0);
        assert_eq!(v["pass"], true, "{v}");
        assert_eq!(v["tokens_match"], true);
        assert_eq!(ids(&v["generated_ids"]).len(), 16);
        assert_eq!(v["positions"].as_array().unwrap().len(), 24);
        assert_eq!(v["decode"].as_array().unwrap().len(), 17);
        bundles.push(contents(&bundle.join("shards")));
    }
    // The two layouts hold the same weights.
    assert!(bundles[0] == bundles[1], "the layouts give different packages");
}

/// Checks that every packing of experts and tokens gives the same tokens.
#[test]
fn every_packing_gives_the_same_tokens() {
    let dir = tempfile::tempdir().unwrap();
    for (i, options) in [
        ["--experts-per-shard", "1", "--tokens", "1,4"],
        ["--experts-per-shard", "2", "--tokens", "1,2"],
        ["--ffn-shards", "4", "--tokens", "1,64"],
        ["--ffn-shards", "1", "--token-range", "1..4"],
    ]
    .iter()
    .enumerate()
    {
        let bundle = dir.path().join(format!("{i}"));
        let mut all = vec!["--quant", "fp16"];
        all.extend(options);
        build(&fixture("tiny-gemma4-moe"), &bundle, &all);
        let v = validate(&bundle, "tiny-gemma4-moe", "0.9999", 0);
        assert_eq!(v["tokens_match"], true, "{options:?}: {v}");
    }
}

/// Checks that prefill token by token, in chunks and in one call gives the same tokens; the window of the sliding layers is
/// 8, and the prompt is longer.
#[test]
fn prefill_does_not_depend_on_its_chunks() {
    let dir = tempfile::tempdir().unwrap();
    let bundle = dir.path().join("b");
    build(&fixture("tiny-gemma4-moe"), &bundle, &["--quant", "lut4", "--tokens", "1,3,4,32"]);
    same_in_chunks(&bundle, &["1", "3", "4", "7", "32"]);
}

#[test]
fn the_same_build_gives_the_same_bytes() {
    let dir = tempfile::tempdir().unwrap();
    let (a, b) = (dir.path().join("a"), dir.path().join("b"));
    build(&fixture("tiny-gemma4-moe"), &a, &["--quant", "lut4"]);
    build(&fixture("tiny-gemma4-moe"), &b, &["--quant", "lut4", "--jobs", "3", "--threads", "1"]);
    let (a, b) = (contents(&a), contents(&b));
    let names = |c: &[(std::path::PathBuf, Vec<u8>)]| c.iter().map(|(n, _)| n.clone()).collect::<Vec<_>>();
    assert_eq!(names(&a), names(&b));
    for ((name, x), (_, y)) in a.iter().zip(&b) {
        assert!(x == y, "{} differs", name.display());
    }
}

/// Checks that a build that stopped in the middle goes on, and ends with the bytes of an uninterrupted one.
#[test]
fn an_interrupted_build_goes_on() {
    let dir = tempfile::tempdir().unwrap();
    let (a, b) = (dir.path().join("a"), dir.path().join("b"));
    build(&fixture("tiny-gemma4-moe"), &a, &["--quant", "lut4"]);
    // A killed build leaves some shards and their records, a temporary folder, and no chain.json.
    let mut child = crate::common::anemoe(&[
        "build",
        fixture("tiny-gemma4-moe").to_str().unwrap(),
        "-o",
        b.to_str().unwrap(),
        "--quant",
        "lut4",
    ])
    .stdout(std::process::Stdio::null())
    .stderr(std::process::Stdio::null())
    .spawn()
    .unwrap();
    while child.try_wait().unwrap().is_none() && !b.join("shards/L01.attn.mlpackage").exists() {
        std::thread::sleep(std::time::Duration::from_millis(2));
    }
    let _ = child.kill();
    child.wait().unwrap();
    let finished = b.join("chain.json").exists();
    if !finished {
        build(&fixture("tiny-gemma4-moe"), &b, &["--quant", "lut4"]);
    }
    assert!(contents(&a) == contents(&b));
}

/// Checks the counts of the real model, from the plan alone.
#[test]
fn the_plan_of_the_real_model_has_its_known_sizes() {
    let plan = json(0, &["plan", "synthetic:gemma4-26b-a4b", "--quant", "fp16"]);
    let totals = &plan["totals"];
    assert_eq!(totals["layer_shards"], 270);
    assert_eq!(totals["params"], 25_233_141_790u64);
    assert_eq!(totals["active_params_per_token"], 3_822_530_590u64);
    let shards = plan["shards"].as_array().unwrap();
    let mib = |name: &str| {
        let shard = shards.iter().find(|s| s["name"] == name).unwrap();
        shard["bytes"].as_f64().unwrap() / f64::from(1 << 20)
    };
    assert!((mib("L00.ffn.p0of8") - 181.5).abs() < 0.01);
    assert!((215.5..216.3).contains(&mib("L29.ffn.p7of8")), "{}", mib("L29.ffn.p7of8"));
    assert_eq!(shards.iter().filter(|s| s["kind"] == "head").count(), 4);

    let plan = json(0, &["plan", "synthetic:gemma4-26b-a4b", "--quant", "lut4"]);
    let pack = plan["shards"].as_array().unwrap().iter().find(|s| s["name"] == "L00.ffn.p0of8").unwrap();
    // 95,158,272 indices of 4 bits, and a table of 16 fp16 values for each 32 rows.
    let tables = 16 * (1408 / 32 + 2816 / 32) * 32;
    assert_eq!(pack["bytes"].as_u64().unwrap(), 95_158_272 / 2 + tables);
}

#[test]
fn a_gate_that_fails_has_its_own_exit_status() {
    let dir = tempfile::tempdir().unwrap();
    let bundle = dir.path().join("b");
    build(&fixture("tiny-gemma4-moe"), &bundle, &["--quant", "lut1", "--tokens", "1"]);
    let v = validate(&bundle, "tiny-gemma4-moe", "0.9999", 1);
    assert_eq!(v["pass"], false);
}

#[test]
fn sampling_is_reproducible() {
    let dir = tempfile::tempdir().unwrap();
    let bundle = dir.path().join("b");
    build(&fixture("tiny-gemma4-moe"), &bundle, &["--quant", "fp16", "--tokens", "1"]);
    let sample = |seed: &str| {
        let args =
            ["generate", bundle.to_str().unwrap(), "--prompt-ids", "2,5", "--max-new", "12", "--ignore-eos"];
        let mut args = args.to_vec();
        args.extend(["--temperature", "1.5", "--top-k", "50", "--top-p", "0.9", "--seed", seed]);
        ids(&json(0, &args)["generated_ids"])
    };
    assert_eq!(sample("1"), sample("1"));
    assert_ne!(sample("1"), sample("2"));
}

#[test]
fn every_command_explains_itself() {
    let (code, out, _) = run(&["--help"]);
    assert_eq!(code, 0);
    for command in [
        "quickstart",
        "inspect",
        "plan",
        "build",
        "check",
        "golden",
        "validate",
        "generate",
        "predict",
        "journal",
    ] {
        assert!(out.contains(command), "{out}");
        let (code, help, _) = run(&[command, "--help"]);
        assert_eq!(code, 0);
        assert!(help.contains("Example"), "{command}: {help}");
    }
}

/// Checks the small trained model in LUT4: its gate, and a text prompt through its tokenizer.
#[test]
fn the_small_model_passes_its_gate_in_lut4_and_writes_text() {
    let dir = tempfile::tempdir().unwrap();
    let bundle = dir.path().join("b");
    let model = Path::new(env!("CARGO_MANIFEST_DIR")).join("../../models/small-gemma4");
    build(&model, &bundle, &["--quant", "lut4", "--max-context", "256"]);
    let golden = model.join("golden.npz");
    let v = json(0, &["validate", bundle.to_str().unwrap(), "--golden", golden.to_str().unwrap()]);
    assert!(v["min_cosine"].as_f64().unwrap() >= 0.97, "{v}");
    assert_eq!(v["pass"], true);

    let prompt = "def main():\n    ";
    let args = ["generate", bundle.to_str().unwrap(), "--prompt", prompt, "--max-new", "20", "--ignore-eos"];
    let document = json(0, &args);
    assert_eq!(document["prompt_ids"][0], 2, "a prompt starts with <bos>");
    assert_eq!(ids(&document["generated_ids"]).len(), 20);
    let text = document["text"].as_str().unwrap();
    assert!(!text.trim().is_empty());
    // The terminal gets the same text.
    let (code, out, err) = run(&args);
    assert_eq!(code, 0, "{err}");
    assert_eq!(out.trim(), text.trim());
}
