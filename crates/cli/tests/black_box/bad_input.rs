//! Every class of bad input: a message that names the file or option, exit status 2, no panic, no leftovers.

use crate::common::{anemoe, build, contents, copy, finish, fixture, json, refused};
use std::fs;
use std::path::{Path, PathBuf};

/// A copy of the tiny checkpoint (one file, text layout) that a test may damage.
struct Damaged {
    dir: tempfile::TempDir,
}

impl Damaged {
    fn new() -> Self {
        let dir = tempfile::tempdir().unwrap();
        copy(&fixture("tiny-gemma4-moe-text"), &dir.path().join("model"));
        Damaged { dir }
    }

    fn model(&self) -> PathBuf {
        self.dir.path().join("model")
    }

    fn weights(&self) -> PathBuf {
        self.model().join("model.safetensors")
    }

    fn out(&self) -> PathBuf {
        self.dir.path().join("out.anemoe")
    }

    /// Changes the header of the weights.
    fn edit_header(&self, edit: impl FnOnce(&mut serde_json::Map<String, serde_json::Value>)) {
        let bytes = fs::read(self.weights()).unwrap();
        let n = u64::from_le_bytes(bytes[..8].try_into().unwrap()) as usize;
        let mut header = serde_json::from_slice(&bytes[8..8 + n]).unwrap();
        edit(&mut header);
        let header = serde_json::to_vec(&header).unwrap();
        let mut out = (header.len() as u64).to_le_bytes().to_vec();
        out.extend(header);
        out.extend(&bytes[8 + n..]);
        fs::write(self.weights(), out).unwrap();
    }

    fn edit_config(&self, edit: impl FnOnce(&mut serde_json::Value)) {
        let path = self.model().join("config.json");
        let mut config = serde_json::from_slice(&fs::read(&path).unwrap()).unwrap();
        edit(&mut config);
        fs::write(path, serde_json::to_vec(&config).unwrap()).unwrap();
    }

    /// Checks that the build is refused with these words and leaves no bundle.
    fn refused(&self, says: &[&str]) {
        refused(&["build", self.model().to_str().unwrap(), "-o", self.out().to_str().unwrap()], says);
        assert!(!self.out().exists(), "{:?}", contents(&self.out()).iter().map(|c| &c.0).collect::<Vec<_>>());
    }
}

const Q_PROJ: &str = "model.layers.1.self_attn.q_proj.weight";

#[test]
fn missing_tensor() {
    let d = Damaged::new();
    d.edit_header(|h| {
        let entry = h.remove(Q_PROJ).unwrap();
        h.insert("model.layers.1.self_attn.q_prog.weight".into(), entry);
    });
    d.refused(&["layers.1.self_attn.q_pro"]);
}

#[test]
fn wrong_shape() {
    let d = Damaged::new();
    d.edit_header(|h| {
        let shape = h.get_mut(Q_PROJ).unwrap().get_mut("shape").unwrap();
        shape.as_array_mut().unwrap().reverse();
        let (rows, cols) = (shape[0].as_u64().unwrap(), shape[1].as_u64().unwrap());
        *shape = serde_json::json!([rows / 2, cols * 2]);
    });
    d.refused(&["layers.1.self_attn.q_proj.weight", "64"]);
}

#[test]
fn wrong_dtype() {
    let d = Damaged::new();
    d.edit_header(|h| {
        h.get_mut(Q_PROJ).unwrap()["dtype"] = "I16".into();
    });
    d.refused(&["layers.1.self_attn.q_proj.weight", "I16"]);
}

#[test]
fn truncated_weights() {
    let d = Damaged::new();
    let bytes = fs::read(d.weights()).unwrap();
    fs::write(d.weights(), &bytes[..bytes.len() - 1000]).unwrap();
    d.refused(&["model.safetensors"]);
}

#[test]
fn header_that_claims_four_gigabytes() {
    let d = Damaged::new();
    let mut bytes = fs::read(d.weights()).unwrap();
    bytes[..8].copy_from_slice(&(4u64 << 30).to_le_bytes());
    fs::write(d.weights(), bytes).unwrap();
    d.refused(&["model.safetensors", "header"]);
}

#[test]
fn not_a_number_in_a_weight() {
    let d = Damaged::new();
    let mut bytes = fs::read(d.weights()).unwrap();
    let n = u64::from_le_bytes(bytes[..8].try_into().unwrap()) as usize;
    let header: serde_json::Value = serde_json::from_slice(&bytes[8..8 + n]).unwrap();
    let at = 8 + n + header[Q_PROJ]["data_offsets"][0].as_u64().unwrap() as usize + 10;
    bytes[at..at + 2].copy_from_slice(&0x7fc0u16.to_le_bytes());
    fs::write(d.weights(), bytes).unwrap();
    d.refused(&["layers.1.self_attn.q_proj.weight", "NaN"]);
}

#[test]
fn index_that_names_a_missing_file() {
    let dir = tempfile::tempdir().unwrap();
    let model = dir.path().join("model");
    copy(&fixture("tiny-gemma4-moe"), &model);
    fs::remove_file(model.join("model-00002-of-00002.safetensors")).unwrap();
    let out = dir.path().join("o");
    refused(
        &["build", model.to_str().unwrap(), "-o", out.to_str().unwrap()],
        &["model-00002-of-00002.safetensors"],
    );
    assert!(!out.exists());
}

#[test]
fn config_of_another_family() {
    let d = Damaged::new();
    d.edit_config(|c| c["model_type"] = "llama".into());
    d.refused(&["llama", "gemma4"]);
}

#[test]
fn config_with_an_unknown_feature() {
    let d = Damaged::new();
    d.edit_config(|c| c["hidden_size_per_layer_input"] = 256.into());
    d.refused(&["hidden_size_per_layer_input", "unsupported"]);
}

#[test]
fn config_that_is_not_json() {
    let d = Damaged::new();
    fs::write(d.model().join("config.json"), "{").unwrap();
    d.refused(&["config.json"]);
}

#[test]
fn checkpoint_that_is_not_there() {
    refused(&["inspect", "no/such/folder"], &["no/such/folder"]);
    refused(&["plan", "synthetic:no-such-model"], &["no-such-model"]);
}

#[test]
fn output_that_exists() {
    let dir = tempfile::tempdir().unwrap();
    let model = fixture("tiny-gemma4-moe");
    let model = model.to_str().unwrap();
    let folder = dir.path().join("folder");
    fs::create_dir(&folder).unwrap();
    fs::write(folder.join("precious"), "x").unwrap();
    refused(&["build", model, "-o", folder.to_str().unwrap()], &["folder", "holds `precious`"]);
    assert_eq!(contents(&folder).len(), 1);

    let bundle = dir.path().join("bundle");
    build(Path::new(model), &bundle, &["--tokens", "1"]);
    let before = contents(&bundle);
    refused(&["build", model, "-o", bundle.to_str().unwrap(), "--max-context", "64"], &["finished bundle"]);
    assert!(contents(&bundle) == before);

    let file = dir.path().join("file");
    fs::write(&file, "x").unwrap();
    refused(&["build", model, "-o", file.to_str().unwrap()], &["not a folder"]);
}

#[test]
fn output_folder_that_cannot_be_made() {
    // A path below a file: unwritable for root, too.
    let dir = tempfile::tempdir().unwrap();
    let file = dir.path().join("file");
    fs::write(&file, "x").unwrap();
    let out = file.join("b.anemoe");
    refused(
        &["build", fixture("tiny-gemma4-moe").to_str().unwrap(), "-o", out.to_str().unwrap()],
        &["b.anemoe"],
    );
}

/// Checks a write that fails in the middle of a package: a limit on the size of files stands for a full disk.
#[cfg(unix)]
#[test]
fn output_that_does_not_fit() {
    let dir = tempfile::tempdir().unwrap();
    let out = dir.path().join("b.anemoe");
    let script = format!(
        "trap '' XFSZ; ulimit -f 40; exec {} build {} -o {} --quant fp16",
        env!("CARGO_BIN_EXE_anemoe"),
        fixture("tiny-gemma4-moe").display(),
        out.display()
    );
    let (code, stdout, err) =
        finish(std::process::Command::new("sh").args(["-c", &script]).output().unwrap());
    assert_eq!(code, 2, "{stdout}\n{err}");
    assert!(!err.contains("panicked"), "{err}");
    assert!(!out.exists(), "{:?}", contents(&out).iter().map(|c| &c.0).collect::<Vec<_>>());
}

/// Builds a bundle that tests may damage.
fn bundle() -> (tempfile::TempDir, PathBuf) {
    let dir = tempfile::tempdir().unwrap();
    let out = dir.path().join("b");
    build(&fixture("tiny-gemma4-moe"), &out, &["--tokens", "1", "--max-context", "64"]);
    (dir, out)
}

fn generate_refused(bundle: &Path, ids: &str, says: &[&str]) {
    refused(&["generate", bundle.to_str().unwrap(), "--prompt-ids", ids, "--max-new", "2"], says);
}

#[test]
fn prompts_that_do_not_fit() {
    let (_dir, bundle) = bundle();
    let long: Vec<String> = (0..65).map(|i| i.to_string()).collect();
    generate_refused(&bundle, &long.join(","), &["65 tokens", "64"]);
    generate_refused(&bundle, "1,512", &["512", "vocabulary"]);
    generate_refused(&bundle, "1,4294967295", &["4294967295"]);
    generate_refused(&bundle, "1,-3", &["-3"]);
    refused(&["generate", bundle.to_str().unwrap(), "--prompt", "text"], &["tokenizer"]);
    refused(&["generate", bundle.to_str().unwrap()], &["--prompt"]);
    let args = ["generate", bundle.to_str().unwrap(), "--prompt-ids", "1", "--temperature", "-1"];
    refused(&args, &["temperature"]);
}

/// Checks that a full context ends generation without an error.
#[test]
fn the_context_ends_generation() {
    let (_dir, bundle) = bundle();
    let ids: Vec<String> = (0..60).map(|i| i.to_string()).collect();
    let args = ["generate", bundle.to_str().unwrap(), "--prompt-ids", &ids.join(","), "--ignore-eos"];
    let v = json(0, &args);
    assert_eq!(v["stop"], "context_full");
    assert_eq!(v["generated_ids"].as_array().unwrap().len(), 5);
}

#[test]
fn damaged_bundles() {
    let (_dir, bundle) = bundle();
    let chain = fs::read_to_string(bundle.join("chain.json")).unwrap();
    let write = |text: &str| fs::write(bundle.join("chain.json"), text).unwrap();
    write("{}");
    generate_refused(&bundle, "1", &["chain.json"]);
    write(&chain.replace("shards/L00.attn.mlpackage", "../L00.attn.mlpackage"));
    generate_refused(&bundle, "1", &["leaves the bundle"]);
    write(&chain.replacen("\"format\": 1", "\"format\": 99", 1));
    generate_refused(&bundle, "1", &["99"]);
    write(&chain.replacen("\"top_k\": 2", "\"top_k\": 2000", 1));
    generate_refused(&bundle, "1", &["top_k"]);
    for (good, bad, says) in [
        (
            "\"final_logit_softcapping\": 30.0",
            "\"final_logit_softcapping\": 1e-40",
            "final_logit_softcapping is ",
        ),
        (
            "\"final_logit_softcapping\": 30.0",
            "\"final_logit_softcapping\": 1e30",
            "final_logit_softcapping is 1e30",
        ),
        ("\"scale\": 8.0", "\"scale\": 1e30", "embedding: scale is 1e30"),
        ("\"format\": 1", "\"format\": 1, \"format\": 1", "key `format` is there twice"),
        ("\"top_k\": 2", "\"top_k\": 2, \"top_k\": 1", "key `top_k` is there twice"),
    ] {
        assert!(chain.contains(good), "{good}");
        write(&chain.replacen(good, bad, 1));
        generate_refused(&bundle, "1", &["chain.json", says]);
    }
    let frequencies = chain.find("\"inv_freq\"").unwrap();
    write(&format!("{}{}", &chain[..frequencies], chain[frequencies..].replacen("1.0", "1e9", 1)));
    generate_refused(&bundle, "1", &["chain.json", "expected numbers from 0 to 1"]);
    write(&chain);
    let embed = bundle.join("embed.bin");
    let bytes = fs::read(&embed).unwrap();
    fs::write(&embed, &bytes[..100]).unwrap();
    generate_refused(&bundle, "1", &["embed.bin"]);
    fs::write(&embed, bytes).unwrap();
    fs::remove_dir_all(bundle.join("shards/L02.attn.mlpackage")).unwrap();
    generate_refused(&bundle, "1", &["L02.attn.mlpackage"]);
}

/// Checks that JSON objects with the same key twice are refused: programs differ in the value that they read.
#[test]
fn keys_that_are_there_twice() {
    for (file, good, bad, key) in [
        ("config.json", "\"hidden_size\": 64", "\"hidden_size\": 32, \"hidden_size\": 64", "hidden_size"),
        ("generation_config.json", "", "{\"eos_token_id\": 1, \"eos_token_id\": 2}", "eos_token_id"),
        ("model.safetensors.index.json", "", "{\"weight_map\": {\"a\": \"b\", \"a\": \"c\"}}", "a"),
    ] {
        let d = Damaged::new();
        let path = d.model().join(file);
        let text = match good {
            "" => bad.to_string(),
            _ => {
                let text = fs::read_to_string(&path).unwrap();
                assert!(text.contains(good), "{text}");
                text.replacen(good, bad, 1)
            }
        };
        fs::write(&path, text).unwrap();
        d.refused(&[file, &format!("key `{key}` is there twice")]);
    }
}

/// Checks that damaged tokenizers are refused: cut off, invalid in a way at which the library panics, and with rules that
/// make gigabytes of a letter.
#[test]
fn damaged_tokenizers() {
    let (_dir, bundle) = bundle();
    let good = fs::read_to_string(fixture("../models/small-gemma4").join("tokenizer.json")).unwrap();
    let doubling = r#"{"type": "Replace", "pattern": {"String": "a"}, "content": "aa"}"#;
    let doubling = format!("{{\"type\": \"Sequence\", \"normalizers\": [{}]}}", vec![doubling; 26].join(","));
    let normalizer = good.find("\"normalizer\": ").map(|at| at + "\"normalizer\": ".len()).unwrap();
    let end = normalizer
        + good[normalizer..]
            .find('}')
            .map(|at| at + good[normalizer + at + 1..].find('}').unwrap() + 2)
            .unwrap();
    let decoder = good.find("\"decoder\"").unwrap();
    for (text, says) in [
        (good[..decoder + 40].to_string(), "EOF"),
        (format!("{}{doubling}{}", &good[..normalizer], &good[end..]), "step Replace makes"),
        (
            good.replacen(
                "\"continuing_subword_prefix\": null",
                "\"continuing_subword_prefix\": \"####\"",
                1,
            ),
            "has no `continuing_subword_prefix` `####`",
        ),
        (
            good.replacen("\"special_tokens\": {", "\"special_tokens\": {}, \"none\": {", 1),
            "not among `special_tokens`",
        ),
    ] {
        assert_ne!(text, good, "{says}");
        fs::write(bundle.join("tokenizer.json"), text).unwrap();
        let v = json(2, &["generate", bundle.to_str().unwrap(), "--prompt", "a aaa", "--max-new", "1"]);
        let message = v["error"]["message"].as_str().unwrap();
        assert!(message.contains("tokenizer.json") && message.contains(says), "{message}");
        assert_eq!(v["error"]["kind"], "invalid");
        assert!(v["error"]["path"].as_str().unwrap().ends_with("tokenizer.json"));
    }
}

/// Checks that damaged packages are refused: a wrong blob offset, overlapping blobs, a protobuf without end, a cut weight
/// file.
#[test]
fn damaged_packages() {
    let (_dir, bundle) = bundle();
    let package = bundle.join("shards/L00.attn.mlpackage");
    let weights = package.join("Data/com.apple.CoreML/weights/weight.bin");
    let model = package.join("Data/com.apple.CoreML/model.mlmodel");
    let (good_weights, good_model) = (fs::read(&weights).unwrap(), fs::read(&model).unwrap());
    let check = |name: &str| {
        for command in ["inspect", "predict"] {
            let mut args = vec![command, package.to_str().unwrap()];
            if command == "predict" {
                args.extend(["--inputs", "none.npz", "--outputs", "none-out.npz"]);
            }
            let (code, out, err) = finish(anemoe(&args).output().unwrap());
            assert_eq!(code, 2, "{name}, {command}: {out}\n{err}");
            assert!(!err.contains("panicked"), "{name}, {command}: {err}");
            assert!(err.contains("L00.attn.mlpackage"), "{name}, {command}: {err}");
        }
    };
    // The first blob's data offset, in its metadata.
    let mut bytes = good_weights.clone();
    bytes[64 + 16..64 + 24].copy_from_slice(&u64::MAX.to_le_bytes());
    fs::write(&weights, &bytes).unwrap();
    check("offset outside the file");
    bytes[64 + 16..64 + 24].copy_from_slice(&64u64.to_le_bytes());
    fs::write(&weights, &bytes).unwrap();
    check("blob over its own metadata");
    let mut bytes = good_weights.clone();
    bytes[..4].copy_from_slice(&u32::MAX.to_le_bytes());
    fs::write(&weights, &bytes).unwrap();
    check("four billion blobs");
    fs::write(&weights, &good_weights[..good_weights.len() / 2]).unwrap();
    check("half of the weights");
    fs::write(&weights, &good_weights).unwrap();
    fs::write(&model, &good_model[..good_model.len() / 2]).unwrap();
    check("half of the program");
    fs::write(&model, vec![0x0b; 100_000]).unwrap();
    check("groups without end");
    fs::write(&model, b"").unwrap();
    check("an empty program");
}

#[test]
fn options_that_do_not_fit() {
    let model = fixture("tiny-gemma4-moe");
    let model = model.to_str().unwrap();
    for (options, says) in [
        (&["--experts-per-shard", "3"][..], "--experts-per-shard 3"),
        (&["--quant", "lut5"], "5-bit"),
        (&["--quant", "int3"], "int3"),
        (&["--tokens", "4"], "contain 1"),
        (&["--tokens", "1,x"], "x"),
        (&["--token-range", "4..1"], "4..1"),
        (&["--max-context", "100000"], "max_position_embeddings"),
        (&["--group-size", "0"], "--group-size"),
        (&["--max-shard-mb", "0"], "--max-shard-mb"),
        (&["--quantt", "lut4"], "--quant"),
    ] {
        let mut args = vec!["plan", model];
        args.extend(options);
        refused(&args, &[says]);
    }
}

#[test]
fn errors_are_documents_with_json() {
    let v = json(2, &["plan", "no/such/folder"]);
    assert_eq!(v["error"]["path"], "no/such/folder");
    assert!(v["error"]["message"].is_string() && v["error"]["kind"].is_string(), "{v}");
    let v = json(2, &["plan", "synthetic:gemma4-26b-a4b", "--quant", "nonsense"]);
    assert_eq!(v["error"]["kind"], "usage");
}

/// Checks that the error about a full standard output names it, since it has no path.
#[cfg(target_os = "linux")]
#[test]
fn standard_output_that_is_full() {
    let full = fs::OpenOptions::new().write(true).open("/dev/full").unwrap();
    let model = fixture("tiny-gemma4-moe");
    for json in [&[][..], &["--json"]] {
        let out = full.try_clone().unwrap();
        let mut command = anemoe(&["inspect", model.to_str().unwrap()]);
        let (code, _, err) = finish(command.args(json).stdout(out).output().unwrap());
        assert_eq!(code, 2, "{err}");
        assert!(err.contains("standard output: No space left on device"), "{err}");
    }
}

/// Runs a build with address spaces that are too small for it: each ends with a message, and none is aborted.
#[cfg(target_os = "linux")]
#[test]
fn too_little_memory_is_an_error_like_any_other() {
    let dir = tempfile::tempdir().unwrap();
    for (kilobytes, json) in [(200_000, false), (250_000, false), (300_000, true)] {
        let script = format!("ulimit -v {kilobytes}; exec \"$@\"");
        let mut command = std::process::Command::new("sh");
        command.args([
            "-c",
            &script,
            "sh",
            env!("CARGO_BIN_EXE_anemoe"),
            "build",
            "--quant",
            "lut4",
            "--skip-gates",
        ]);
        command.arg(fixture("../models/small-gemma4")).arg("-o").arg(dir.path().join(format!("{kilobytes}")));
        let output = command.args(json.then_some("--json")).output().unwrap();
        let (code, out, err) = finish(output);
        assert!(code == 0 || code == 2 && err.contains("error: "), "{kilobytes}: {code}: {err}");
        assert!(code == 0 || !json || out.contains(r#"{"error":"#), "{out}");
    }
}
