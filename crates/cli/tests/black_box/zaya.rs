//! ZAYA from a checkpoint to tokens, with the built binary.

use crate::common::{build, contents, fixture, ids, json, run, same_in_chunks, validate};
use serde_json::Value;
use std::path::Path;

/// Checks 24 positions, 16 decode steps and 16 tokens against Hugging Face transformers, in both layouts of the checkpoint.
#[test]
fn fp16_shards_agree_with_transformers() {
    let dir = tempfile::tempdir().unwrap();
    let mut bundles = Vec::new();
    for model in ["tiny-zaya", "tiny-zaya-legacy"] {
        let bundle = dir.path().join(model);
        build(&fixture(model), &bundle, &["--quant", "fp16", "--tokens", "1,4"]);
        let v = validate(&bundle, &fixture(model).join("golden.npz"), "0.9999", 0);
        assert_eq!((&v["pass"], &v["tokens_match"]), (&Value::Bool(true), &Value::Bool(true)), "{v}");
        assert_eq!((v["positions"].as_array().unwrap().len(), ids(&v["generated_ids"]).len()), (24, 16));
        // The weights are random, and the experts' choices are close: rounding every result has an effect.
        assert!(v["fp16"]["min_cosine"].as_f64().unwrap() > 0.99, "{v}");
        bundles.push((contents(&bundle.join("shards")), std::fs::read(bundle.join("vectors.npz")).unwrap()));
    }
    assert!(bundles[0] == bundles[1], "the layouts give different packages");
}

/// Checks the output for a token that chooses no expert: both readings, and experts chosen in the shard or by the host.
#[test]
fn both_readings_of_the_skip_class() {
    let dir = tempfile::tempdir().unwrap();
    let model = fixture("tiny-zaya-skip");
    let goldens = [("zero", model.join("golden.npz")), ("identity", dir.path().join("identity.npz"))];
    let prompt: Vec<String> = (0..24).map(|i| ((i * 37 + 2) % 512).to_string()).collect();
    let identity = goldens[1].1.to_str().unwrap();
    json(0, &["golden", model.to_str().unwrap(), "--prompt-ids", &prompt.join(","), "-o", identity]);
    for (skip, golden) in &goldens {
        for (i, packing) in [
            &["--tokens", "1,4"][..],
            &["--tokens", "1,3", "--experts-per-shard", "1"],
            &["--token-range", "1..4", "--ffn-shards", "2"],
        ]
        .iter()
        .enumerate()
        {
            let bundle = dir.path().join(format!("{skip}{i}"));
            let mut options = vec!["--quant", "fp16", "--zaya-skip", skip];
            options.extend(*packing);
            build(&model, &bundle, &options);
            let v = validate(&bundle, golden, "0.9999", 0);
            assert_eq!(v["tokens_match"], true, "{options:?}: {v}");
            let v = json(0, &["inspect", bundle.to_str().unwrap()]);
            assert_eq!(v["readings"]["zaya_skip"], *skip);
        }
    }
    // The two readings are not the same model.
    let bundle = dir.path().join("zero0");
    let (status, _, _) = run(&["validate", bundle.to_str().unwrap(), "--golden", identity]);
    assert_eq!(status, 1);
}

#[test]
fn inspect_says_where_the_readings_differ() {
    let remark = |name: &str| {
        let v = json(0, &["inspect", fixture(name).to_str().unwrap()]);
        v["remarks"][0].as_str().unwrap().to_string()
    };
    // In one layer, the biases of all experts are below 0, the bias of the class is -1.
    let rarely = remark("tiny-zaya");
    assert!(rarely.contains("in 1 of 8 layers (1), from a probability of 0.9780"), "{rarely}");
    let often = remark("tiny-zaya-skip");
    assert!(often.contains("in 8 of 8 layers") && often.contains("biases 0.34960938"), "{often}");
}

/// Checks that prefill token by token, in chunks and in one call gives the same tokens: keys, values, convolution and late
/// values are carried over every boundary.
#[test]
fn prefill_does_not_depend_on_its_chunks() {
    let dir = tempfile::tempdir().unwrap();
    for (name, options) in [
        ("whole", &["--quant", "lut4", "--tokens", "1,3,4,32"][..]),
        ("split", &["--quant", "fp16", "--tokens", "1,4", "--experts-per-shard", "2"]),
        ("range", &["--quant", "fp16", "--token-range", "1..7"]),
    ] {
        let bundle = dir.path().join(name);
        build(&fixture("tiny-zaya"), &bundle, options);
        same_in_chunks(&bundle, &["1", "2", "3", "4", "7", "32"]);
    }
}

/// Checks the sizes of the real model, from the plan alone.
#[test]
fn the_plan_of_the_real_model() {
    let plan = |options: &[&str]| {
        let mut args = vec!["plan", "synthetic:zaya1-8b", "--skip-outliers"];
        args.extend(options);
        json(0, &args)
    };
    let bytes = |v: &Value, name: &str| {
        let shards = v["shards"].as_array().unwrap();
        shards.iter().find(|s| s["name"] == name).unwrap()["bytes"].as_f64().unwrap() / 1e6
    };
    let kinds =
        |v: &Value, kind: &str| v["shards"].as_array().unwrap().iter().filter(|s| s["kind"] == kind).count();
    for (quant, moe) in [("int8-tensor", 202.0), ("lut4", 101.1), ("lut4-uniform", 101.1)] {
        let v = plan(&["--quant", quant, "--tokens", "1,4"]);
        assert_eq!(v["totals"]["params"], 8_840_489_464u64);
        assert_eq!(v["totals"]["active_params_per_token"], 1_290_742_264u64);
        assert_eq!((kinds(&v, "attention"), kinds(&v, "moe"), kinds(&v, "head")), (40, 40, 5));
        assert!((bytes(&v, "L01.moe") - moe).abs() < 0.05, "{quant}: {}", bytes(&v, "L01.moe"));
        assert!((bytes(&v, "L01.attn") - 5.58).abs() < 0.01, "{quant}: {}", bytes(&v, "L01.attn"));
    }
    for n in ["1", "2", "4", "8"] {
        let v = plan(&["--experts-per-shard", n]);
        assert_eq!((kinds(&v, "attention"), kinds(&v, "moe")), (40, 40));
    }
    let v = plan(&["--token-range", "1..4"]);
    assert_eq!(v["shards"][1]["functions"], serde_json::json!(["main"]));
}

/// Checks that two layers of the real model, with the shapes that the ANE gets, keep to the rules.
#[test]
fn real_shapes_keep_to_the_rules() {
    let dir = tempfile::tempdir().unwrap();
    let bundle = dir.path().join("b");
    // The rules judge the same, whatever the tables contain.
    let options = ["--quant", "lut4-uniform", "--tokens", "1", "--max-context", "64"];
    build(Path::new("synthetic:zaya1-8b?layers=2"), &bundle, &options);
    let inspect = |shard: &str| {
        let path = bundle.join("shards").join(format!("{shard}.mlpackage"));
        json(0, &["inspect", path.to_str().unwrap()])["functions"]["main"].clone()
    };
    let moe = inspect("L01.moe");
    assert_eq!(moe["ops"]["conv"], 36);
    let attention = inspect("L01.attn");
    let states = attention["states"].as_array().unwrap();
    assert_eq!((states.len(), states[0]["shape"].as_str().unwrap()), (1, "[1, 4, 96, 128]"));
    for function in [&moe, &attention] {
        let off =
            ["gather", "scatter", "topk", "equal", "greater_equal", "cast", "select", "one_hot", "cumsum"];
        let ops = function["ops"].as_object().unwrap();
        assert!(ops.keys().all(|op| !off.contains(&op.as_str())), "{ops:?}");
    }
}

#[test]
fn a_reading_that_the_model_does_not_have() {
    let gemma = fixture("tiny-gemma4-moe");
    let out = tempfile::tempdir().unwrap();
    let bundle = out.path().join("b");
    let (status, _, stderr) =
        run(&["build", gemma.to_str().unwrap(), "-o", bundle.to_str().unwrap(), "--zaya-skip", "zero"]);
    assert_eq!(status, 2);
    assert!(stderr.contains("--zaya-skip") && !bundle.exists(), "{stderr}");
    let (status, _, stderr) = run(&["plan", gemma.to_str().unwrap(), "--zaya-skip", "one"]);
    assert_eq!(status, 2);
    assert!(stderr.contains("neither identity nor zero"), "{stderr}");
}

/// Checks that chains that contradict themselves are refused: nothing is read outside a register, and no large memory is
/// taken.
#[test]
fn damaged_chains() {
    let dir = tempfile::tempdir().unwrap();
    let bundle = dir.path().join("b");
    build(&fixture("tiny-zaya"), &bundle, &["--quant", "fp16", "--tokens", "1,4", "--max-context", "64"]);
    let chain = std::fs::read_to_string(bundle.join("chain.json")).unwrap();
    let damaged = |change: &dyn Fn(&mut Value), says: &str| {
        let mut v: Value = serde_json::from_str(&chain).unwrap();
        change(&mut v);
        std::fs::write(bundle.join("chain.json"), v.to_string()).unwrap();
        crate::common::refused(
            &["generate", bundle.to_str().unwrap(), "--prompt-ids", "2,3,4", "--max-new", "4"],
            &["chain.json", says],
        );
    };
    let push = |v: &mut Value, step: Value| v["steps"].as_array_mut().unwrap().push(step);
    let zero = |register: &str, n: u64| serde_json::json!({"zero": {"register": register, "channels": n}});
    damaged(&|v| push(v, zero("hidden", 1)), "stream of shape");
    damaged(&|v| push(v, zero("more", 1 << 24)), "channels");
    damaged(&|v| (0..20).for_each(|i| push(v, zero(&format!("r{i}"), 4))), "registers of zeros");
    damaged(&|v| v["caches"]["hybrid"]["slots"] = 4096.into(), "slots");
    damaged(
        &|v| {
            let norm = serde_json::json!({"from": "hidden", "to": "x", "vector": "nothing", "eps": 1e-5});
            push(v, serde_json::json!({"normalize": norm}));
        },
        "no vector `nothing`",
    );
    damaged(&|v| drop(v.as_object_mut().unwrap().remove("vectors")), "vectors");
    std::fs::write(bundle.join("chain.json"), &chain).unwrap();
    let vectors = std::fs::read(bundle.join("vectors.npz")).unwrap();
    std::fs::write(bundle.join("vectors.npz"), &vectors[..vectors.len() / 2]).unwrap();
    crate::common::refused(&["validate", bundle.to_str().unwrap(), "--golden", "x.npz"], &["x.npz"]);
    let generate = ["generate", bundle.to_str().unwrap(), "--prompt-ids", "2"];
    crate::common::refused(&generate, &["vectors.npz"]);
    std::fs::remove_file(bundle.join("vectors.npz")).unwrap();
    let (_, _, err) = run(&generate);
    assert_eq!(err.matches("No such file").count(), 1, "{err}");
}

#[test]
fn flags_that_would_do_nothing_are_refused() {
    let model = fixture("tiny-zaya");
    crate::common::refused(&["plan", model.to_str().unwrap(), "--mlp-quant", "lut4"], &["--mlp-quant"]);
    crate::common::refused(
        &["generate", "nothing", "--prompt-ids", "2", "--prefill-chunk", "0"],
        &["--prefill-chunk", "from 1 on"],
    );
}
