//! Every class of bad input: a message that names the file or option, exit status 2, no panic, no leftovers.

use crate::common::{
    anemoe, built, chain, copied, edit_json, edit_weights, finish, fixture, folder, in_shell, json, plant,
    refused, refuses, run, small, text,
};
use serde_json::{Map, Value, json as value};
use std::fs;
use std::path::Path;

/// Checks that a build of a damaged copy of the tiny checkpoint is refused with these words, and leaves no bundle.
fn damaged_checkpoint(damage: impl FnOnce(&Path), says: &[&str]) {
    let (model, out) = (copied("tiny-gemma4-moe-text"), folder().join("out.anemoe"));
    damage(&model);
    refused(format!("build {model} -o {out}"), says);
    assert!(!out.exists(), "{says:?}");
}

fn damaged_header(edit: impl FnOnce(&mut Map<String, Value>), says: &[&str]) {
    damaged_checkpoint(
        |model| edit_weights(&model.join("model.safetensors"), |header, _| edit(header)),
        says,
    );
}

const Q_PROJ: &str = "model.layers.1.self_attn.q_proj.weight";

#[test]
fn tensors_that_are_missing_or_have_another_shape_or_dtype() {
    let rename = |h: &mut Map<String, Value>| {
        let entry = h.remove(Q_PROJ).unwrap();
        h.insert("model.layers.1.self_attn.q_prog.weight".into(), entry);
    };
    damaged_header(rename, &["layers.1.self_attn.q_pro"]);
    damaged_header(|h| h[Q_PROJ]["shape"] = value!([32, 128]), &["layers.1.self_attn.q_proj.weight", "64"]);
    damaged_header(|h| h[Q_PROJ]["dtype"] = "I16".into(), &["layers.1.self_attn.q_proj.weight", "I16"]);
}

#[test]
fn weights_that_are_cut_off_or_lie_or_are_not_numbers() {
    let weights = |edit: fn(Vec<u8>) -> Vec<u8>| {
        move |model: &Path| {
            let file = model.join("model.safetensors");
            fs::write(&file, edit(fs::read(&file).unwrap())).unwrap();
        }
    };
    damaged_checkpoint(weights(|b| b[..b.len() - 1000].to_vec()), &["model.safetensors"]);
    let claim = weights(|b| [&(4u64 << 30).to_le_bytes()[..], &b[8..]].concat());
    damaged_checkpoint(claim, &["model.safetensors", "header"]);
    let nan = |model: &Path| plant(model, Q_PROJ, 5, f32::NAN);
    damaged_checkpoint(nan, &["layers.1.self_attn.q_proj.weight", "NaN"]);
    let (model, out) = (copied("tiny-gemma4-moe"), folder().join("out.anemoe"));
    fs::remove_file(model.join("model-00002-of-00002.safetensors")).unwrap();
    refused(format!("build {model} -o {out}"), &["model-00002-of-00002.safetensors"]);
    assert!(!out.exists());
}

#[test]
fn configurations_of_others_with_unknown_features_or_no_json() {
    let config = |key: &'static str, value: Value| {
        move |model: &Path| edit_json(model.join("config.json"), |config| config[key] = value)
    };
    damaged_checkpoint(config("model_type", "llama".into()), &["llama", "gemma4"]);
    let feature = "hidden_size_per_layer_input";
    damaged_checkpoint(config(feature, 256.into()), &[feature, "unsupported"]);
    damaged_checkpoint(|model| fs::write(model.join("config.json"), "{").unwrap(), &["config.json"]);
}

/// Checks that JSON objects with the same key twice are refused: programs differ in the value that they read.
#[test]
fn keys_that_are_there_twice() {
    for (file, good, bad, key) in [
        ("config.json", "\"hidden_size\": 64", "\"hidden_size\": 32, \"hidden_size\": 64", "hidden_size"),
        ("generation_config.json", "", "{\"eos_token_id\": 1, \"eos_token_id\": 2}", "eos_token_id"),
        ("model.safetensors.index.json", "", "{\"weight_map\": {\"a\": \"b\", \"a\": \"c\"}}", "a"),
    ] {
        let damage = |model: &Path| {
            let text = fs::read_to_string(model.join(file)).unwrap_or_default();
            let damaged = if good.is_empty() { bad.into() } else { text.replacen(good, bad, 1) };
            assert_ne!(text, damaged);
            fs::write(model.join(file), damaged).unwrap();
        };
        damaged_checkpoint(damage, &[file, &format!("key `{key}` is there twice")]);
    }
}

/// Checks that a contract that contradicts itself is refused: nothing is read outside a register, and no large memory is
/// taken.
#[test]
fn damaged_chains() {
    let bundle = built("tiny-gemma4-moe", "--tokens 1,4");
    let written = fs::read_to_string(bundle.join("chain.json")).unwrap();
    let refuse = |text: &str, says: &str| {
        fs::write(bundle.join("chain.json"), text).unwrap();
        refused(format!("generate {bundle} --prompt-ids 1,2 --max-new 2"), &["chain.json", says]);
        refused(format!("check {bundle} --no-journal"), &["chain.json", says]);
    };
    refuse("{}", "chain.json");
    for (key, value) in [("format", "1"), ("top_k", "2")] {
        let (good, says) = (format!("\"{key}\": {value}"), format!("key `{key}` is there twice"));
        refuse(&written.replacen(&good, &format!("{good}, \"{key}\": 1"), 1), &says);
    }
    let frequencies = written.find("\"inv_freq\"").unwrap();
    let (before, behind) = written.split_at(frequencies);
    refuse(&format!("{before}{}", behind.replacen("1.0", "1e9", 1)), "expected numbers from 0 to 1");
    let original: Value = serde_json::from_str(&written).unwrap();
    let damaged = |change: &dyn Fn(&mut Value), says: &str| {
        let mut chain = original.clone();
        change(&mut chain);
        assert_ne!(chain, original, "{says}");
        refuse(&chain.to_string(), says);
    };
    damaged(&|c| c["shards"][0]["file"] = "../L00.attn.mlpackage".into(), "leaves the bundle");
    damaged(&|c| c["format"] = 99.into(), "99");
    damaged(&|c| drop(c.as_object_mut().unwrap().remove("model")), "key `model` is missing");
    damaged(&|c| c["tokens"] = value!([3]), "found 3, expected an object");
    damaged(&|c| c["shards"][0]["bytes"] = "many".into(), "found \"many\", expected a whole number");
    damaged(&|c| c["steps"] = value!([]), "steps: none");
    damaged(&|c| c["steps"][2]["zero"]["channels"] = 0.into(), "experts_in");
    damaged(&|c| c["model"]["top_k"] = 2000.into(), "top_k");
    damaged(&|c| c["model"]["final_logit_softcapping"] = 1e-40.into(), "final_logit_softcapping is ");
    damaged(&|c| c["model"]["final_logit_softcapping"] = 1e30.into(), "final_logit_softcapping is 1e30");
    damaged(&|c| c["embedding"]["scale"] = 1e30.into(), "embedding: scale is 1e30");
    fs::write(bundle.join("chain.json"), &written).unwrap();
    let embed = fs::read(bundle.join("embed.bin")).unwrap();
    fs::write(bundle.join("embed.bin"), &embed[..100]).unwrap();
    let err = refuses(
        &mut anemoe(format!("generate {bundle} --prompt-ids 1")),
        &["embed.bin: invalid size: 100 bytes where"],
    );
    assert!(!err.contains("Fp16"), "a type of the program: {err}");
}

#[test]
fn damaged_chains_of_registers_and_vectors() {
    let bundle = built("tiny-zaya", "--quant fp16 --tokens 1,4");
    let original = chain(&bundle);
    let generate = format!("generate {bundle} --prompt-ids 2,3,4 --max-new 4");
    let damaged = |change: &dyn Fn(&mut Value), says: &str| {
        let mut v = original.clone();
        change(&mut v);
        fs::write(bundle.join("chain.json"), v.to_string()).unwrap();
        refused(&generate, &["chain.json", says]);
    };
    let push = |v: &mut Value, step: Value| v["steps"].as_array_mut().unwrap().push(step);
    let zero = |register: &str, n: u64| value!({"zero": {"register": register, "channels": n}});
    let norm = value!({"normalize": {"from": "hidden", "to": "x", "vector": "nothing", "eps": 1e-5}});
    damaged(&|v| push(v, zero("hidden", 1)), "stream of shape");
    damaged(&|v| push(v, zero("more", 1 << 24)), "channels");
    damaged(&|v| (0..20).for_each(|i| push(v, zero(&format!("r{i}"), 4))), "registers of zeros");
    damaged(&|v| v["caches"]["hybrid"]["slots"] = 4096.into(), "slots");
    damaged(&|v| push(v, norm.clone()), "no vector `nothing`");
    damaged(&|v| drop(v.as_object_mut().unwrap().remove("vectors")), "vectors");
    fs::write(bundle.join("chain.json"), original.to_string()).unwrap();
    let vectors = fs::read(bundle.join("vectors.npz")).unwrap();
    fs::write(bundle.join("vectors.npz"), &vectors[..vectors.len() / 2]).unwrap();
    refused(&generate, &["vectors.npz"]);
    fs::remove_file(bundle.join("vectors.npz")).unwrap();
    let (_, _, err) = run(&generate);
    assert_eq!(err.matches("No such file").count(), 1, "{err}");
}

/// Checks that damaged tokenizers are refused: cut off, invalid in a way at which the library panics, and with rules that
/// make gigabytes of a letter.
#[test]
fn damaged_tokenizers() {
    let bundle = built("tiny-gemma4-moe", "--tokens 1,4");
    let good = fs::read_to_string(small().join("tokenizer.json")).unwrap();
    let doubling = value!({"type": "Replace", "pattern": {"String": "a"}, "content": "aa"});
    let mut doubled: Value = serde_json::from_str(&good).unwrap();
    doubled["normalizer"] = value!({"type": "Sequence", "normalizers": vec![doubling; 26]});
    let prefix = "\"continuing_subword_prefix\": ";
    for (damaged, says) in [
        (good[..good.find("\"decoder\"").unwrap() + 40].to_string(), "EOF"),
        (doubled.to_string(), "step Replace makes"),
        (
            good.replacen(&format!("{prefix}null"), &format!("{prefix}\"####\""), 1),
            "has no `continuing_subword_prefix` `####`",
        ),
        (
            good.replacen("\"special_tokens\": {", "\"special_tokens\": {}, \"none\": {", 1),
            "not among `special_tokens`",
        ),
    ] {
        assert_ne!(damaged, good, "{says}");
        fs::write(bundle.join("tokenizer.json"), damaged).unwrap();
        let error = &json(2, format!("generate {bundle} --prompt 'a aaa' --max-new 1"))["error"];
        let message = text(&error["message"]);
        assert!(message.contains("tokenizer.json") && message.contains(says), "{message}");
        assert!(error["kind"] == "invalid" && text(&error["path"]).ends_with("tokenizer.json"), "{error}");
    }
}

/// Checks that damaged packages are refused: a wrong blob offset, overlapping blobs, a protobuf without end, a cut weight
/// file.
#[test]
fn damaged_packages() {
    let package = built("tiny-gemma4-moe", "--tokens 1,4").join("shards/L00.attn.mlpackage");
    let weights = package.join("Data/com.apple.CoreML/weights/weight.bin");
    let model = package.join("Data/com.apple.CoreML/model.mlmodel");
    let (good_weights, good_model) = (fs::read(&weights).unwrap(), fs::read(&model).unwrap());
    let with = |at: usize, bytes: &[u8]| {
        let mut all = good_weights.clone();
        all[at..at + bytes.len()].copy_from_slice(bytes);
        all
    };
    for (name, weights_now, model_now) in [
        // The first blob's data offset, in its metadata.
        ("offset outside the file", with(64 + 16, &u64::MAX.to_le_bytes()), good_model.clone()),
        ("blob over its own metadata", with(64 + 16, &64u64.to_le_bytes()), good_model.clone()),
        ("four billion blobs", with(0, &u32::MAX.to_le_bytes()), good_model.clone()),
        ("half of the weights", good_weights[..good_weights.len() / 2].to_vec(), good_model.clone()),
        ("half of the program", good_weights.clone(), good_model[..good_model.len() / 2].to_vec()),
        ("groups without end", good_weights.clone(), vec![0x0b; 100_000]),
        ("an empty program", good_weights.clone(), Vec::new()),
    ] {
        fs::write(&weights, weights_now).unwrap();
        fs::write(&model, model_now).unwrap();
        for line in [
            format!("inspect {package}"),
            format!("predict {package} --inputs none.npz --outputs none-out.npz"),
        ] {
            let (code, out, err) = run(line);
            assert!(code == 2 && err.contains("L00.attn.mlpackage"), "{name}: {out}\n{err}");
        }
    }
}

#[test]
fn options_that_do_not_fit() {
    let model = fixture("tiny-gemma4-moe");
    for (options, says) in [
        ("--experts-per-shard 3", "--experts-per-shard 3"),
        ("--quant lut5", "5-bit"),
        ("--quant int3", "int3"),
        ("--tokens 4", "contain 1"),
        ("--tokens 1,x", "`x` is not a whole number"),
        ("--token-range 4..1", "4..1"),
        ("--max-context 100000", "max_position_embeddings"),
        ("--group-size 0", "--group-size"),
        ("--block-size 0", "--block-size"),
        ("--max-shard-mb 0", "--max-shard-mb"),
        ("--zaya-skip zero", "--zaya-skip"),
        ("--zaya-skip one", "neither identity nor zero"),
        ("--min-cosine 0.9", "--min-cosine"),
        ("--quant lut4 --objective speed", "--objective"),
        ("--quant auto --min-cosine 1.5", "1.5"),
        ("--quant auto --max-kl -1", "-1"),
        ("--quant auto --max-bytes 12", "--max-bytes 12"),
        ("--quant auto --max-bytes '5 apples'", "apples"),
        ("--quant automatic", "unknown compression kind `automatic`"),
        ("--scale-scope bank", "--scale-scope bank"),
        ("--quant auto --scale-scope bank", "--scale-scope bank"),
        ("--quant int8-tensor --scale-scope row", "bank"),
    ] {
        refused(format!("plan {model} {options}"), &[says]);
    }
    refused(format!("plan {} --mlp-quant lut4", fixture("tiny-zaya")), &["--mlp-quant"]);
    let large = "plan synthetic:gemma4-26b-a4b?layers=1 --quant auto --min-cosine 0.9";
    refused(large, &["--max-bytes"]);
    refused("plan synthetic:no-such-model", &["no-such-model"]);
    // Lists may have blanks.
    let plan = json(0, format!("plan {model} --tokens '1, 4'"));
    assert_eq!(plan["options"]["tokens"][1]["max"], 4);
    // Errors are documents with JSON.
    let error = &json(2, "plan no/such/folder")["error"];
    assert!(
        error["path"] == "no/such/folder" && error["message"].is_string() && error["kind"].is_string(),
        "{error}"
    );
    assert_eq!(json(2, "plan synthetic:gemma4-26b-a4b --quant nonsense")["error"]["kind"], "usage");
}

/// Checks that the error about a full standard output names it, since it has no path.
#[cfg(target_os = "linux")]
#[test]
fn standard_output_that_is_full() {
    let full = fs::OpenOptions::new().write(true).open("/dev/full").unwrap();
    for json in ["", "--json"] {
        let mut command = anemoe(format!("inspect {} {json}", fixture("tiny-gemma4-moe")));
        refuses(command.stdout(full.try_clone().unwrap()), &["standard output: No space left on device"]);
    }
}

/// Runs a build with address spaces that are too small for it: each ends with a message, and none is aborted.
#[cfg(target_os = "linux")]
#[test]
fn too_little_memory_is_an_error_like_any_other() {
    let dir = folder();
    for (kilobytes, json) in [(200_000, ""), (250_000, ""), (300_000, "--json")] {
        let build = format!("build --quant lut4 --skip-gates {} -o {dir}/b {json}", small());
        let (code, out, err) =
            finish(&mut in_shell(&format!("ulimit -v {kilobytes}; exec \"$0\" \"$@\""), build));
        assert!(code == 0 || code == 2 && err.contains("error: "), "{kilobytes}: {code}: {err}");
        assert!(code == 0 || json.is_empty() || out.contains(r#"{"error":"#), "{out}");
    }
}
