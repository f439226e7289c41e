//! Compression kinds, importance, `auto` and perplexity, with the built binary.

use crate::common::{anemoe, anemoe_as_is, build, copy, finish, fixture, json, refused, run};
use anemoe_npz::{Array, read_npz, write_npy, write_npz};
use serde_json::Value;
use std::path::{Path, PathBuf};

const KINDS: [&str; 10] = [
    "fp16",
    "int8-tensor",
    "int8-channel",
    "int8-channel-asymmetric",
    "int4-block",
    "lut1",
    "lut3",
    "lut4-uniform",
    "lut6-tensor",
    "lut8",
];

/// Writes weights with a few that are far larger, and returns the path.
fn weight(dir: &Path, shape: &[usize]) -> PathBuf {
    let n: usize = shape.iter().product();
    let value = |i: usize| {
        let x = ((i * 7919 + 13) % 2003) as f32 / 2003.0 - 0.5;
        x * x * x * if i.is_multiple_of(301) { 2.0 } else { 0.2 }
    };
    let values: Vec<f32> = (0..n).map(value).collect();
    let path = dir.join("w.npy");
    write_npy(&path, &Array::new(shape.to_vec(), values).unwrap()).unwrap();
    path
}

fn text(path: &Path) -> &str {
    path.to_str().unwrap()
}

#[test]
fn one_tensor_in_every_kind() {
    let dir = tempfile::tempdir().unwrap();
    let w = weight(dir.path(), &[64, 96]);
    for kind in KINDS {
        let out = dir.path().join(format!("{kind}.npz"));
        let figures = json(0, &["quantize", text(&w), "--quant", kind, "-o", text(&out)]);
        assert_eq!(figures["weights"], 6144);
        for key in ["seconds", "weights_per_s", "mse", "relative_mse", "cosine", "bytes"] {
            assert!(figures[key].is_number(), "{kind}: {key} in {figures}");
        }
        let arrays = read_npz(&out).unwrap();
        let decoded = arrays["decoded"].to_f32();
        // Decoded from the parts, by the formats' definitions.
        let (rows, cols) = (64, 96);
        let expected: Vec<f32> = if kind.starts_with("lut") {
            let (lut, indices) = (&arrays["lut"], arrays["indices"].to_f32());
            let [groups, entries] = [lut.shape[0], lut.shape[2]];
            let values = lut.to_f32();
            let entry = |i: usize| i / cols / (rows / groups) * entries + indices[i] as usize;
            (0..rows * cols).map(|i| values[entry(i)]).collect()
        } else if kind.starts_with("int") {
            let (data, scale) = (arrays["data"].to_f32(), arrays["scale"].to_f32());
            let dims = &arrays["scale"].shape;
            let block = |i: usize| i / cols / (rows / dims[0]) * dims[1] + i % cols / (cols / dims[1]);
            let offset = arrays.get("offset").map_or(vec![0.0; scale.len()], |o| o.to_f32());
            let fp16 = |v: f32| half::f16::from_f32(v).to_f32();
            (0..rows * cols).map(|i| fp16(scale[block(i)] * (data[i] - offset[block(i)]))).collect()
        } else {
            decoded.clone()
        };
        assert_eq!(decoded, expected, "{kind}");
        let original = anemoe_npz::read_npy(&w).unwrap().to_f32();
        let mse = original.iter().zip(&decoded).map(|(a, b)| f64::from(a - b).powi(2)).sum::<f64>() / 6144.0;
        let said = figures["mse"].as_f64().unwrap();
        assert!((mse - said).abs() <= 0.02 * said + 1e-10, "{kind}: {mse} for {said}");
        let package = dir.path().join(format!("{kind}.mlpackage"));
        json(0, &["quantize", text(&w), "--quant", kind, "-o", text(&package)]);
        let inspected = json(0, &["inspect", text(&package)]);
        assert_eq!(inspected["functions"]["main"]["inputs"][0]["name"], "x");
    }
}

#[test]
fn exact_tables_are_at_least_as_good() {
    let dir = tempfile::tempdir().unwrap();
    let w = weight(dir.path(), &[64, 512]);
    let mse = |extra: &[&str]| {
        let mut args = vec!["quantize", text(&w), "--quant", "lut4"];
        args.extend(extra);
        json(0, &args)["mse"].as_f64().unwrap()
    };
    let (default, exact) = (mse(&[]), mse(&["--exact"]));
    assert!(exact <= default * (1.0 + 1e-9) && default <= exact * 1.0001, "{default} {exact}");
    // More groups give less error.
    assert!(mse(&["--group-size", "8"]) < default);
}

#[test]
fn tensors_that_cannot_be_compressed() {
    let dir = tempfile::tempdir().unwrap();
    let w = weight(dir.path(), &[64, 96]);
    let w = text(&w);
    refused(&["quantize", w, "--quant", "lut5"], &["5-bit", "1, 2, 3, 4, 6 or 8"]);
    refused(&["quantize", w, "--quant", "int3"], &["unknown compression kind `int3`"]);
    refused(&["quantize", w, "--quant", "lut3-tensor", "--target", "ios16"], &["iOS16", "3-bit"]);
    refused(&["quantize", w, "--quant", "lut4", "--target", "ios16"], &["iOS16", "-tensor"]);
    refused(&["quantize", w, "--quant", "int4-block", "--target", "ios16"], &["iOS16", "4-bit"]);
    refused(&["quantize", w, "--op", "conv"], &["w.npy", "[64, 96]"]);
    refused(&["quantize", w, "-o", "out.txt"], &["out.txt", ".mlpackage"]);
    refused(&["quantize", w, "--group-size", "0"], &["--group-size"]);
    refused(&["quantize", "nothing.npy"], &["nothing.npy"]);
    refused(&["quantize", "nothing.bin"], &["F.npy", "F.safetensors"]);
    let model = fixture("tiny-gemma4-moe-text").join("model.safetensors");
    refused(&["quantize", text(&model)], &["name one with :TENSOR"]);
    refused(&["quantize", &format!("{}:q_prj", text(&model))], &["no tensor `q_prj`"]);
    for (name, value) in [("nan", f32::NAN), ("large", 1e30)] {
        let path = dir.path().join(format!("{name}.npy"));
        let mut values = vec![0.5f32; 4096];
        values[77] = value;
        write_npy(&path, &Array::new(vec![64, 64], values).unwrap()).unwrap();
        let says = if value.is_nan() { "element 77 is NaN" } else { "does not fit fp16" };
        refused(&["quantize", text(&path), "--quant", "lut4"], &[name, says]);
    }
    let scalar = dir.path().join("scalar.npy");
    write_npy(&scalar, &Array::new(vec![], vec![1.0f32]).unwrap()).unwrap();
    refused(&["quantize", text(&scalar)], &["scalar.npy", "[]"]);
    let importance = dir.path().join("i.npy");
    write_npy(&importance, &Array::new(vec![5], vec![1.0f32; 5]).unwrap()).unwrap();
    refused(&["quantize", w, "--importance", text(&importance)], &["5 importances for 96 input channels"]);
}

#[test]
fn a_tensor_of_a_checkpoint() {
    let model = fixture("tiny-gemma4-moe-text").join("model.safetensors");
    let spec = format!("{}:model.layers.0.self_attn.q_proj.weight", text(&model));
    let figures = json(0, &["quantize", &spec, "--quant", "int8-channel"]);
    assert_eq!(figures["tensor"], "model.layers.0.self_attn.q_proj.weight");
    assert!(figures["cosine"].as_f64().unwrap() > 0.999);
}

fn chain(bundle: &Path) -> Value {
    serde_json::from_slice(&std::fs::read(bundle.join("chain.json")).unwrap()).unwrap()
}

#[test]
fn every_part_has_a_flag_and_every_kind_runs() {
    let dir = tempfile::tempdir().unwrap();
    let bundle = dir.path().join("b");
    build(
        &fixture("tiny-gemma4-moe"),
        &bundle,
        &[
            "--quant",
            "lut8",
            "--attn-quant",
            "int8-channel",
            "--expert-quant",
            "lut6-tensor",
            "--mlp-quant",
            "int4-block",
            "--block-size",
            "16",
            "--router-quant",
            "int8-channel-asymmetric",
            "--embed-quant",
            "int8-channel",
            "--tokens",
            "1,4",
        ],
    );
    let chain = chain(&bundle);
    let quant = |shard: usize| chain["shards"][shard]["quant"].clone();
    assert_eq!(quant(0)["attention"], "int8-channel");
    assert_eq!(quant(0)["router"], "int8-channel-asymmetric");
    assert_eq!(quant(1)["experts"], "lut6-tensor");
    assert_eq!(quant(1)["dense_mlp"], "int4-block g16");
    let head = chain["shards"].as_array().unwrap().last().unwrap();
    assert_eq!(head["quant"]["head"], "lut8 g32");
    assert!(chain["embedding"]["storage"]["int"]["bits"] == 8, "{}", chain["embedding"]);
    let golden = fixture("tiny-gemma4-moe").join("golden.npz");
    let (code, out, err) = run(&["validate", text(&bundle), "--golden", text(&golden), "--json"]);
    let found: Value = serde_json::from_str(&out).unwrap_or_else(|e| panic!("{e}: {out}{err}"));
    assert!(code < 2 && found["min_cosine"].as_f64().unwrap() > 0.6, "{out}");
}

#[test]
fn a_compressed_embedding_is_close_to_the_plain_one() {
    let dir = tempfile::tempdir().unwrap();
    let golden = fixture("tiny-gemma4-moe").join("golden.npz");
    // The routers of a random model are random, too, and react to every small change.
    for (kind, least) in [("int8-channel", 0.9), ("lut8", 0.9), ("lut6-tensor", 0.8), ("int4-block", 0.6)] {
        let bundle = dir.path().join(kind);
        build(
            &fixture("tiny-gemma4-moe"),
            &bundle,
            &["--quant", "fp16", "--embed-quant", kind, "--tokens", "1"],
        );
        let (_, out, _) = run(&["validate", text(&bundle), "--golden", text(&golden), "--json"]);
        let found: Value = serde_json::from_str(&out).unwrap();
        let cosine = found["min_cosine"].as_f64().unwrap();
        assert!(cosine > least && cosine < 0.999_999, "{kind}: {cosine}");
    }
}

/// Checks that a scale that all experts share is made for the kind's integers: random experts have nearly equal ranges.
#[test]
fn one_scale_for_a_bank_suits_the_bits_of_its_kind() {
    let dir = tempfile::tempdir().unwrap();
    let cosine = |kind: &str, scope: &str| {
        let bundle = dir.path().join(format!("{kind}-{scope}"));
        let options = ["--quant", kind, "--scale-scope", scope, "--tokens", "1", "--skip-outliers"];
        build(&fixture("tiny-gemma4-moe"), &bundle, &options);
        let chain: Value =
            serde_json::from_slice(&std::fs::read(bundle.join("chain.json")).unwrap()).unwrap();
        let shards = chain["shards"].as_array().unwrap().clone();
        shards.iter().filter_map(|s| s["min_weight_cosine"].as_f64()).fold(1.0, f64::min)
    };
    for (kind, least) in [("int8-tensor", 0.9999), ("int4-tensor", 0.98)] {
        for scope in ["matrix", "bank"] {
            let found = cosine(kind, scope);
            assert!(found > least && found < 1.0, "{kind} {scope}: {found}");
        }
    }
}

#[test]
fn groups_that_do_not_divide_are_noted() {
    let plan = json(0, &["plan", text(&fixture("tiny-gemma4-moe")), "--group-size", "48"]);
    let notes = plan["notes"].as_array().unwrap();
    assert!(notes.iter().any(|n| n.as_str().unwrap().contains("48 do not divide")), "{notes:?}");
    let plan = json(0, &["plan", text(&fixture("tiny-gemma4-moe")), "--group-size", "1", "--quant", "lut8"]);
    let notes = plan["notes"].to_string();
    assert!(notes.contains("stays fp16"), "{notes}");
    refused(&["plan", text(&fixture("tiny-gemma4-moe")), "--block-size", "0"], &["--block-size"]);
}

/// Writes a short text and returns its path.
fn sample(dir: &Path) -> PathBuf {
    let path = dir.join("text.txt");
    std::fs::write(&path, "def main():\n    return the first value of the list\n".repeat(4)).unwrap();
    path
}

#[test]
fn importance_is_measured_and_used() {
    let dir = tempfile::tempdir().unwrap();
    let small = fixture("../models/small-gemma4");
    let (sample, importance) = (sample(dir.path()), dir.path().join("i.npz"));
    let found = json(0, &["calibrate", text(&small), "--text", text(&sample), "-o", text(&importance)]);
    assert_eq!(found["tensors"], 60);
    let arrays = read_npz(&importance).unwrap();
    assert_eq!(arrays["layers.0.experts.gate_up_proj"].shape, [16, 256]);
    assert_eq!(arrays["layers.5.self_attn.o_proj.weight"].shape, [512]);
    let options = ["--quant", "lut2", "--tokens", "1,16", "--max-context", "64"];
    let (plain, weighted) = (dir.path().join("plain"), dir.path().join("weighted"));
    build(&small, &plain, &options);
    let mut with = options.to_vec();
    with.extend(["--importance", text(&importance)]);
    build(&small, &weighted, &with);
    let bytes = |chain: &Value| -> u64 {
        chain["shards"].as_array().unwrap().iter().map(|s| s["bytes"].as_u64().unwrap()).sum()
    };
    let (a, b) = (chain(&plain), chain(&weighted));
    assert_eq!(bytes(&a), bytes(&b));
    assert_ne!(a["shards"][0]["sha256"], b["shards"][0]["sha256"]);
    assert_eq!(b["importance"].as_str().unwrap().len(), 64);
    let perplexity = |model: &Path| {
        let out = json(
            0,
            &["perplexity", text(model), "--text", text(&sample), "--context", "32", "--max-tokens", "48"],
        );
        assert_eq!(out["tokens"], 48);
        out["perplexity"].as_f64().unwrap()
    };
    let (reference, plain, weighted) = (perplexity(&small), perplexity(&plain), perplexity(&weighted));
    assert!(reference < plain && reference < weighted, "{reference} {plain} {weighted}");
}

#[test]
fn wrong_importance_text_and_goals() {
    let dir = tempfile::tempdir().unwrap();
    let (tiny, out) = (fixture("tiny-gemma4-moe"), dir.path().join("out"));
    let write = |name: &str, tensor: &str, shape: Vec<usize>, value: f32| {
        let path = dir.path().join(name);
        let n = shape.iter().product();
        write_npz(&path, &[(tensor.to_string(), Array::new(shape, vec![value; n]).unwrap())]).unwrap();
        path
    };
    let q = "layers.0.self_attn.q_proj.weight";
    let typo = write("typo.npz", "layers.0.self_attn.q_prj.weight", vec![64], 1.0);
    let short = write("short.npz", q, vec![5], 1.0);
    let negative = write("negative.npz", q, vec![64], -1.0);
    let partial = write("partial.npz", q, vec![64], 1.0);
    let not_npz = dir.path().join("not.npz");
    std::fs::write(&not_npz, b"PK\x03\x04 nonsense").unwrap();
    for (path, says) in [
        (&typo, "no tensor of that name"),
        (&short, "shape [5]"),
        (&negative, "expected a number from 0"),
        (&partial, "importance: no array for `embed_tokens.weight`, "),
        (&not_npz, "not.npz"),
    ] {
        refused(&["build", text(&tiny), "-o", text(&out), "--importance", text(path)], &[says]);
        assert!(!out.exists());
    }
    refused(&["plan", text(&tiny), "--min-cosine", "0.9"], &["--min-cosine", "--quant auto"]);
    refused(&["plan", text(&tiny), "--quant", "auto", "--min-cosine", "1.5"], &["1.5", "between 0 and 1"]);
    refused(&["plan", text(&tiny), "--quant", "auto", "--max-bytes", "12"], &["--max-bytes 12", "needs"]);
    refused(&["plan", text(&tiny), "--quant", "auto", "--max-bytes", "5 apples"], &["apples"]);
    refused(&["plan", text(&tiny), "--quant", "automatic"], &["unknown compression kind `automatic`"]);
    refused(
        &["plan", "synthetic:gemma4-26b-a4b?layers=1", "--quant", "auto", "--min-cosine", "0.9"],
        &["--max-bytes"],
    );
    refused(&["perplexity", text(&tiny), "--text", "nothing.txt"], &["tokenizer"]);
    let small = fixture("../models/small-gemma4");
    refused(&["perplexity", text(&small), "--text", "nothing.txt"], &["nothing.txt"]);
    let empty = dir.path().join("empty.txt");
    std::fs::write(&empty, "").unwrap();
    refused(&["perplexity", text(&small), "--text", text(&empty)], &["empty.txt", "no token"]);
    let binary = dir.path().join("binary.txt");
    std::fs::write(&binary, [0xff, 0xfe, 0x00]).unwrap();
    refused(&["calibrate", text(&small), "--text", text(&binary), "-o", text(&out)], &["binary.txt"]);
    assert!(!out.exists());
}

/// Copies the tiny model, with one huge weight in every expert's first matrix.
fn with_outliers(dir: &Path) -> PathBuf {
    let model = dir.join("model");
    copy(&fixture("tiny-gemma4-moe-text"), &model);
    let path = model.join("model.safetensors");
    let mut bytes = std::fs::read(&path).unwrap();
    let n = u64::from_le_bytes(bytes[..8].try_into().unwrap()) as usize;
    let header: Value = serde_json::from_slice(&bytes[8..8 + n]).unwrap();
    for (name, info) in header.as_object().unwrap() {
        if !name.ends_with("experts.gate_up_proj") {
            continue;
        }
        let shape: Vec<usize> =
            info["shape"].as_array().unwrap().iter().map(|d| d.as_u64().unwrap() as usize).collect();
        let start = 8 + n + info["data_offsets"][0].as_u64().unwrap() as usize;
        let size = if info["dtype"] == "F32" { 4 } else { 2 };
        for expert in 0..shape[0] {
            let at = start + size * expert * shape[1] * shape[2];
            let value = 6.0f32.to_le_bytes();
            bytes[at..at + size].copy_from_slice(&value[4 - size..]);
        }
    }
    std::fs::write(&path, bytes).unwrap();
    model
}

#[test]
fn without_a_kind_the_fewest_bytes_that_a_token_reads_are_searched_for() {
    let tiny = fixture("tiny-gemma4-moe");
    let planned = |args: &[&str]| {
        let (code, out, err) = finish(anemoe_as_is(args).output().unwrap());
        assert_eq!(code, 0, "{args:?}: {err}");
        serde_json::from_str::<Value>(&out).unwrap()
    };
    let plan = planned(&["plan", text(&tiny), "--json"]);
    let auto = &plan["auto"];
    assert_eq!(auto["goal"], "max_kl 0.0025, for speed");
    assert!(auto["mean_kl"].as_f64().unwrap() <= 0.0025, "{auto}");
    let by = |objective: &str| {
        planned(&["plan", text(&tiny), "--objective", objective, "--max-kl", "0.02", "--json"])
    };
    let (size, speed) = (by("size"), by("speed"));
    let bytes = |v: &Value, what: &str| v["auto"][what].as_u64().unwrap();
    let read = |v: &Value| bytes(v, "bytes_read_per_token") as f64 / bytes(v, "bytes") as f64;
    assert!(read(&speed) <= read(&size), "for speed, bits go into what is read seldom");
    assert!(bytes(&size, "bytes_read_per_token") < bytes(&size, "bytes"), "not all experts are read");
    // A model that is too large to be run gets its family's preset, and the reason.
    let large = planned(&["plan", "synthetic:gemma4-26b-a4b?layers=1", "--json"]);
    assert_eq!(large["options"]["parts"]["attention"], "lut6");
    assert!(
        large["notes"][0].as_str().unwrap().contains("preset, lut4, attention lut6, head lut6: "),
        "{large}"
    );
    let own = planned(&["plan", "synthetic:gemma4-26b-a4b?layers=1", "--attn-quant", "fp16", "--json"]);
    assert_eq!(own["options"]["parts"]["attention"], "fp16");
    refused(&["plan", text(&tiny), "--quant", "auto", "--max-kl", "-1"], &["-1"]);
    refused(
        &["plan", text(&tiny), "--quant", "lut4", "--objective", "speed"],
        &["--objective", "--quant auto"],
    );
}

#[test]
fn auto_keeps_its_goal_and_says_why() {
    let dir = tempfile::tempdir().unwrap();
    let model = with_outliers(dir.path());
    let plan = json(0, &["plan", text(&model), "--quant", "auto", "--min-cosine", "0.999"]);
    let auto = &plan["auto"];
    assert!(auto["min_cosine"].as_f64().unwrap() >= 0.999, "{auto}");
    assert_eq!(auto["goal"], "min_cosine 0.999");
    let uniform = auto["uniform"].as_array().unwrap();
    // No kind for all tensors that reaches the goal is smaller.
    for u in uniform.iter().filter(|u| u["min_cosine"].as_f64().unwrap() >= 0.999) {
        assert!(auto["bytes"].as_u64() <= u["bytes"].as_u64(), "{u}");
    }
    let tensors = auto["tensors"].as_array().unwrap();
    assert!(tensors.iter().all(|t| !t["reason"].as_str().unwrap().is_empty()));
    let experts: Vec<&Value> =
        tensors.iter().filter(|t| t["tensor"].as_str().unwrap().ends_with("gate_up_proj")).collect();
    assert!(!experts.is_empty());
    for t in experts {
        assert_ne!(t["kind"], "int8-tensor", "{t}");
    }
    let by_size = json(0, &["plan", text(&model), "--quant", "auto", "--max-bytes", "230kB"]);
    assert!(by_size["auto"]["bytes"].as_u64().unwrap() <= 230_000);

    // The build records the choice, which is the plan's.
    let bundle = dir.path().join("b");
    build(&model, &bundle, &["--quant", "auto", "--max-bytes", "230kB", "--tokens", "1"]);
    assert_eq!(chain(&bundle)["auto"], by_size["auto"]);
}

#[test]
fn a_part_with_its_own_kind_is_left_alone() {
    let tiny = fixture("tiny-gemma4-moe");
    let plan = json(
        0,
        &["plan", text(&tiny), "--quant", "auto", "--max-bytes", "300kB", "--attn-quant", "int8-channel"],
    );
    let parts: Vec<&str> =
        plan["auto"]["tensors"].as_array().unwrap().iter().map(|t| t["part"].as_str().unwrap()).collect();
    assert!(!parts.contains(&"attention") && parts.contains(&"experts"));
    assert_eq!(plan["shards"][0]["quant"]["attention"], "int8-channel");
}

#[test]
fn help_has_examples() {
    for command in ["quantize", "calibrate", "perplexity", "plan", "build"] {
        let (code, out, _) = finish(anemoe(&[command, "--help"]).output().unwrap());
        assert!(code == 0 && out.contains("Example"), "{command}: {out}");
    }
}
