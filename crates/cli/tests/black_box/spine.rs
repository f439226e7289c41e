//! Checkpoints of both families as packages and tokens, with the built binary.

use crate::common::*;
use serde_json::Value;

/// Checks 24 positions, 16 decode steps and 16 tokens against Hugging Face transformers, in both layouts of the checkpoint.
#[test]
fn fp16_shards_agree_with_transformers() {
    for layouts in [["tiny-gemma4-moe", "tiny-gemma4-moe-text"], ["tiny-zaya", "tiny-zaya-legacy"]] {
        let packages = layouts.map(|model| {
            let bundle = built(model, "--quant fp16 --tokens 1,4");
            let v = json(
                0,
                format!("validate {bundle} --golden {}/golden.npz --min-cosine 0.9999", fixture(model)),
            );
            assert_eq!((&v["pass"], &v["tokens_match"]), (&true.into(), &true.into()), "{v}");
            let lengths = ["positions", "generated_ids", "decode"].map(|key| list(&v[key]).len());
            assert_eq!(lengths, [24, 16, 17], "{v}");
            // The weights are random, and the experts' choices are close: rounding every result has an effect.
            assert!(number(&v["fp16"]["min_cosine"]) > 0.99, "{v}");
            (contents(&bundle.join("shards")), std::fs::read(bundle.join("vectors.npz")).ok())
        });
        assert!(packages[0] == packages[1], "the layouts {layouts:?} give different packages");
    }
}

/// Checks that packings of experts and tokens give the same tokens, and both readings of a token that chooses no expert.
#[test]
fn every_packing_gives_the_same_tokens() {
    let skip = fixture("tiny-zaya-skip");
    let identity = folder().join("identity.npz");
    let prompt: Vec<String> = (0..24).map(|i| ((i * 37 + 2) % 512).to_string()).collect();
    json(0, format!("golden {skip} --prompt-ids {} -o {identity}", prompt.join(",")));
    for (model, options) in [
        ("tiny-gemma4-moe", "--experts-per-shard 1 --tokens 1,4"),
        ("tiny-gemma4-moe", "--ffn-shards 4 --token-range 1..4"),
        ("tiny-zaya-skip", "--zaya-skip zero --tokens 1,3 --experts-per-shard 1"),
        ("tiny-zaya-skip", "--zaya-skip zero --token-range 1..4 --ffn-shards 2"),
        ("tiny-zaya-skip", "--zaya-skip identity --tokens 1,3 --experts-per-shard 1"),
        ("tiny-zaya-skip", "--zaya-skip identity --tokens 1,4"),
    ] {
        let bundle = built(model, &format!("--quant fp16 {options}"));
        let own = fixture(model).join("golden.npz");
        let golden = if options.contains("identity") { &identity } else { &own };
        let v = json(0, format!("validate {bundle} --golden {golden} --min-cosine 0.9999"));
        assert_eq!(v["tokens_match"], true, "{options}: {v}");
        if let Some(reading) = ["zero", "identity"].iter().find(|reading| options.contains(*reading)) {
            assert_eq!(json(0, format!("inspect {bundle}"))["readings"]["zaya_skip"], *reading);
            // The two readings are not the same model.
            let other = if **golden == *identity { &own } else { &identity };
            assert_eq!(run(format!("validate {bundle} --golden {other}")).0, 1);
        }
    }
}

#[test]
fn the_same_build_gives_the_same_bytes() {
    let (a, b) = (built("tiny-gemma4-moe", "--tokens 1,4"), folder().join("b"));
    build(fixture("tiny-gemma4-moe"), &b, "--tokens 1,4 --jobs 3 --threads 1");
    let (a, b) = (contents(&a), contents(&b));
    assert_eq!(a.len(), b.len());
    for ((name, x), (other, y)) in a.iter().zip(&b) {
        assert!(name == other && x == y, "{} differs", name.display());
    }
}

/// Checks the counts and sizes of the real models, from plans alone.
#[test]
fn plans_of_the_real_models_have_their_known_sizes() {
    let plan = |options: &str| json(0, format!("plan synthetic:{options} --skip-outliers"));
    let shard =
        |plan: &Value, name: &str| list(&plan["shards"]).iter().find(|s| s["name"] == name).unwrap().clone();
    let bytes = |plan: &Value, name: &str| number(&shard(plan, name)["bytes"]);
    let kinds = |plan: &Value, kind: &str| list(&plan["shards"]).iter().filter(|s| s["kind"] == kind).count();
    let v = plan("gemma4-26b-a4b --quant fp16");
    let totals = ["layer_shards", "params", "active_params_per_token"].map(|key| count(&v["totals"][key]));
    assert_eq!((totals, kinds(&v, "head")), ([270, 25_233_141_790, 3_822_530_590], 4));
    let mib = |name: &str| bytes(&v, name) / f64::from(1 << 20);
    assert!((mib("L00.ffn.p0of8") - 181.5).abs() < 0.01);
    assert!((215.5..216.3).contains(&mib("L29.ffn.p7of8")), "{}", mib("L29.ffn.p7of8"));
    // 95,158,272 indices of 4 bits, and a table of 16 fp16 values for each 32 rows.
    let tables = 16 * (1408 / 32 + 2816 / 32) * 32;
    let v = plan("gemma4-26b-a4b --quant lut4");
    assert_eq!(count(&shard(&v, "L00.ffn.p0of8")["bytes"]), 95_158_272 / 2 + tables);
    for (quant, moe) in [("int8-tensor", 202.0), ("lut4", 101.1), ("lut4-uniform", 101.1)] {
        let v = plan(&format!("zaya1-8b --quant {quant} --tokens 1,4"));
        let totals = ["params", "active_params_per_token"].map(|key| count(&v["totals"][key]));
        assert_eq!(totals, [8_840_489_464, 1_290_742_264]);
        assert_eq!(["attention", "moe", "head"].map(|kind| kinds(&v, kind)), [40, 40, 5]);
        for (name, mb, near) in [("L01.moe", moe, 0.05), ("L01.attn", 5.58, 0.01)] {
            assert!((bytes(&v, name) / 1e6 - mb).abs() < near, "{quant} {name}: {}", bytes(&v, name));
        }
    }
    for n in [1, 8] {
        let v = plan(&format!("zaya1-8b --experts-per-shard {n}"));
        assert_eq!(["attention", "moe"].map(|kind| kinds(&v, kind)), [40, 40]);
    }
    assert_eq!(plan("zaya1-8b --token-range 1..4")["shards"][1]["functions"], serde_json::json!(["main"]));
}

/// Checks that a layer of the real model, with the shapes that the ANE gets, keeps to the rules.
#[test]
fn real_shapes_keep_to_the_rules() {
    let bundle = folder().join("b");
    // The rules judge the same, whatever the tables contain.
    build("synthetic:zaya1-8b?layers=1", &bundle, "--quant int8-tensor --tokens 1 --max-context 64");
    let inspect = |shard: &str| {
        json(0, format!("inspect {bundle}/shards/{shard}.mlpackage"))["functions"]["main"].clone()
    };
    let (moe, attention) = (inspect("L00.moe"), inspect("L00.attn"));
    assert_eq!(moe["ops"]["conv"], 36);
    let [state] = list(&attention["states"]).as_slice() else { panic!("{attention}") };
    assert_eq!(state["shape"], "[1, 4, 96, 128]");
    let off = ["gather", "scatter", "topk", "equal", "greater_equal", "cast", "select", "one_hot", "cumsum"];
    for function in [&moe, &attention] {
        let ops = function["ops"].as_object().unwrap();
        assert!(ops.keys().all(|op| !off.contains(&op.as_str())), "{ops:?}");
    }
}
