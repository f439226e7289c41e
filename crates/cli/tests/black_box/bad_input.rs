//! Every class of bad input: a message that names the file or option, exit status 2, no panic, no leftovers.

use crate::common::*;
use serde_json::{Map, Value, json as value};
use std::fs;
use std::path::Path;

const Q_PROJ: &str = "model.layers.1.self_attn.q_proj.weight";

/// Checks that a build of a damaged checkpoint names the file or tensor, and leaves no bundle. Each kind of damage has a
/// test of its own beside its reader.
#[test]
fn damaged_checkpoints() {
    let damaged = |damage: &dyn Fn(&Path), says: &[&str]| {
        let (model, out) = (copied("tiny-gemma4-moe-text"), folder().join("out.anemoe"));
        damage(&model);
        refused(format!("build {model} -o {out}"), says);
        assert!(!out.exists(), "{says:?}");
    };
    let weights = |m: &Path, edit: fn(&mut Map<String, Value>, &mut Vec<u8>)| {
        edit_weights(&m.join("model.safetensors"), edit);
    };
    let rename = |h: &mut Map<String, Value>, _: &mut Vec<u8>| {
        let entry = h.remove(Q_PROJ).unwrap();
        h.insert(Q_PROJ.replace("proj", "prog"), entry);
    };
    damaged(&|m| weights(m, rename), &["layers.1.self_attn.q_pro"]);
    damaged(
        &|m| weights(m, |h, _| h[Q_PROJ]["shape"] = value!([32, 128])),
        &["self_attn.q_proj.weight", "64"],
    );
    damaged(&|m| weights(m, |h, _| h[Q_PROJ]["dtype"] = "I16".into()), &["self_attn.q_proj.weight", "I16"]);
    damaged(&|m| weights(m, |_, data| data.truncate(1000)), &["model.safetensors"]);
    damaged(&|m| plant(m, Q_PROJ, 5, f32::NAN), &["layers.1.self_attn.q_proj.weight", "NaN"]);
    let write = |m: &Path, file: &str, text: &[u8]| fs::write(m.join(file), text).unwrap();
    let claim = (4u64 << 30).to_le_bytes();
    damaged(&|m| write(m, "model.safetensors", &claim), &["model.safetensors", "header"]);
    damaged(&|m| write(m, "config.json", b"{"), &["config.json"]);
    let config = |m: &Path, key: &str, v: Value| edit_json(m.join("config.json"), |config| config[key] = v);
    damaged(&|m| config(m, "model_type", "llama4".into()), &["llama", "gemma4"]);
    let feature = "hidden_size_per_layer_input";
    damaged(&|m| config(m, feature, 256.into()), &[feature, "unsupported"]);
    // Programs differ in the value that they read of a key that is there twice.
    let twice = b"{\"eos_token_id\": 1, \"eos_token_id\": 2}";
    let says = "key `eos_token_id` is there twice";
    for file in ["generation_config.json", "config.json", "model.safetensors.index.json"] {
        damaged(&|m| write(m, file, twice), &[file, says]);
    }
    // What a download leaves behind that failed.
    let page = b"<!DOCTYPE html><html><title>Sign in</title></html>";
    for file in ["config.json", "generation_config.json", "tokenizer.json", "tokenizer_config.json"] {
        damaged(&|m| write(m, file, b""), &[file, "invalid JSON: the text is empty"]);
        damaged(&|m| write(m, file, page), &[file, "invalid JSON: this is a web page (HTML)"]);
    }
    for file in ["model.safetensors", "model.safetensors.index.json", "chat_template.jinja"] {
        damaged(&|m| write(m, file, page), &[file, "this is a web page (HTML)"]);
    }
    damaged(&|m| write(m, "model.safetensors", b""), &["model.safetensors", "the file has 0 bytes"]);
    let (model, out) = (copied("tiny-gemma4-moe"), folder().join("out.anemoe"));
    fs::remove_file(model.join("model-00002-of-00002.safetensors")).unwrap();
    refused(format!("build {model} -o {out}"), &["model-00002-of-00002.safetensors"]);
}

/// Checks that a contract that contradicts itself is refused: nothing is read outside a register, and no large memory is
/// taken.
#[test]
fn damaged_chains() {
    let bundle = built("tiny-gemma4-moe", "--tokens 1,4");
    let written = fs::read_to_string(bundle.join("chain.json")).unwrap();
    let refuse = |text: &str, says: &str| {
        fs::write(bundle.join("chain.json"), text).unwrap();
        refused(format!("generate {bundle} --prompt-ids 1,2 --max-new 2"), &[says]);
        refused(format!("check {bundle} --no-journal"), &[says]);
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
    damaged(&|c| c["shards"][0]["functions"][0]["context"] = 0.into(), "one at least");
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

/// Checks that damaged tokenizers are refused: cut off, and with rules that make gigabytes of a letter.
#[test]
fn damaged_tokenizers() {
    let bundle = built("tiny-gemma4-moe", "--tokens 1,4");
    let good = fs::read_to_string(small().join("tokenizer.json")).unwrap();
    let doubling = value!({"type": "Replace", "pattern": {"String": "a"}, "content": "aa"});
    let mut doubled: Value = serde_json::from_str(&good).unwrap();
    doubled["normalizer"] = value!({"type": "Sequence", "normalizers": vec![doubling; 26]});
    for (damaged, says) in [
        (good[..good.find("\"decoder\"").unwrap() + 40].to_string(), "EOF"),
        (doubled.to_string(), "step Replace makes"),
    ] {
        assert_ne!(damaged, good, "{says}");
        fs::write(bundle.join("tokenizer.json"), damaged).unwrap();
        let error = &json(2, format!("generate {bundle} --prompt 'a aaa' --max-new 1"))["error"];
        let message = text(&error["message"]);
        assert!(message.contains("tokenizer.json") && message.contains(says), "{message}");
        assert!(error["kind"] == "invalid" && text(&error["path"]).ends_with("tokenizer.json"), "{error}");
    }
}

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
        ("half of the weights", good_weights[..good_weights.len() / 2].to_vec(), good_model.clone()),
        ("half of the program", good_weights.clone(), good_model[..good_model.len() / 2].to_vec()),
        ("groups without end", good_weights.clone(), vec![0x0b; 100_000]),
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
    refused("plan synthetic:no-such-model", &["no-such-model"]);
    // Lists may have blanks.
    let plan = json(0, format!("plan {model} --tokens '1, 4'"));
    assert_eq!(plan["options"]["tokens"][1]["max"], 4);
    // Errors are documents with JSON.
    let error = &json(2, "plan no/such/folder")["error"];
    has(error, value!({"path": "no/such/folder", "kind": "io"}));
    assert!(error["message"].is_string());
    assert_eq!(json(2, "plan synthetic:gemma4-26b-a4b --quant nonsense")["error"]["kind"], "usage");
    assert!(json(2, "inspect")["error"]["message"].as_str().unwrap().contains("provided: <PATH>"));
}

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
