//! Inputs that are no regular files, have no end or a false size, hold other bytes than the contract says, or have names
//! that would steer a terminal.
#![cfg(unix)]

use crate::common::{build, copy, fixture, json, refused, run};
use std::fs;
use std::os::unix::fs::symlink;
use std::path::{Path, PathBuf};
use std::process::Command;

/// Replaces a file by something that is no regular file, and returns the words for it in an error.
fn replace_by(path: &Path, what: &str) -> &'static str {
    if path.is_dir() {
        fs::remove_dir_all(path).unwrap();
    } else {
        let _ = fs::remove_file(path);
    }
    match what {
        "endless" => {
            symlink("/dev/zero", path).unwrap();
            "a device, where a regular file is expected"
        }
        "pipe" => {
            assert!(Command::new("mkfifo").arg(path).status().unwrap().success());
            "a pipe, where a regular file is expected"
        }
        _ => {
            fs::create_dir(path).unwrap();
            "a folder, where a regular file is expected"
        }
    }
}

/// Checks that every input of every command is refused by name and at once if it is a device without an end, a pipe without
/// a writer, or a folder.
#[test]
fn inputs_that_are_no_regular_files_are_refused_at_once() {
    let dir = tempfile::tempdir().unwrap();
    let at = |name: &str| dir.path().join(name).to_str().unwrap().to_string();
    let (model, bundle) = (dir.path().join("model"), dir.path().join("b.anemoe"));
    let restore = || {
        let _ = fs::remove_dir_all(&model);
        copy(&fixture("tiny-gemma4-moe"), &model);
        let _ = fs::remove_dir_all(&bundle);
        copy(&dir.path().join("kept.anemoe"), &bundle);
    };
    build(&fixture("tiny-gemma4-moe"), &dir.path().join("kept.anemoe"), &["--no-journal"]);
    let package = "b.anemoe/shards/L00.attn.mlpackage";
    let (model_arg, bundle_arg, out) = (at("model"), at("b.anemoe"), at("out"));
    let generate: &[&str] = &["generate", &bundle_arg, "--prompt-ids", "1,2", "--max-new", "1"];
    let plan: &[&str] = &["plan", &model_arg];
    let check: &[&str] = &["check", &bundle_arg, "--no-journal"];
    let inspect_package: &[&str] = &["inspect", &at(package)];
    let golden: &[&str] = &["golden", &model_arg, "--prompt-ids", "1", "-o", &out];
    let validate: &[&str] = &["validate", &bundle_arg, "--golden", &at("g.npz"), "--no-journal"];
    let small = Path::new(env!("CARGO_MANIFEST_DIR")).join("../../models/small-gemma4");
    let text: &[&str] = &["perplexity", small.to_str().unwrap(), "--text", &at("t.txt")];
    let prompt: &[&str] = &["generate", &bundle_arg, "--prompt", "a", "--max-new", "1"];
    let report: &[&str] = &["check", &bundle_arg, "--report", &at("r.json"), "--no-journal"];
    let outcomes: &[&str] = &["check", "--outcomes", &at("o.tsv")];
    let quantize: &[&str] = &["quantize", &at("w.npy")];
    let journal: &[&str] = &["journal", &bundle_arg];
    let cases: &[(&str, &[&str])] = &[
        ("model/config.json", plan),
        ("model/model.safetensors.index.json", plan),
        ("model/model-00001-of-00002.safetensors", golden),
        ("b.anemoe/chain.json", generate),
        ("b.anemoe/chain.json", check),
        ("b.anemoe/embed.bin", generate),
        (&format!("{package}/Manifest.json"), inspect_package),
        (&format!("{package}/Data/com.apple.CoreML/model.mlmodel"), inspect_package),
        (&format!("{package}/Data/com.apple.CoreML/weights/weight.bin"), inspect_package),
        (&format!("{package}/Data/com.apple.CoreML/weights/weight.bin"), generate),
        ("b.anemoe/journal.jsonl", journal),
        ("g.npz", validate),
        ("t.txt", text),
        ("b.anemoe/tokenizer.json", prompt),
        ("r.json", report),
        ("o.tsv", outcomes),
        ("w.npy", quantize),
    ];
    for (file, args) in cases {
        for what in ["endless", "pipe", "folder"] {
            restore();
            let path = dir.path().join(file);
            let says = replace_by(&path, what);
            // The limit on address space bounds an endless input, the limit on time a pipe.
            let script = "ulimit -v 4000000; exec timeout 30 \"$0\" \"$@\"";
            let mut command = Command::new("sh");
            command.args(["-c", script, env!("CARGO_BIN_EXE_anemoe")]).args(*args);
            let (code, out, err) = crate::common::finish(command.output().unwrap());
            assert_eq!(code, 2, "{file} {what} {args:?}\n{out}\n{err}");
            let name = path.file_name().unwrap().to_str().unwrap();
            let in_words = err.contains(says)
                || ["not a regular file", "size:", ": a link, and"].iter().any(|w| err.contains(w));
            // The error about a folder may have other words.
            assert!(err.contains(name) || err.contains("L00.attn"), "{file} {what}: {err}");
            assert!(in_words || what == "folder" && !err.contains("panicked"), "{file} {what}: {err}");
            let _ = fs::remove_file(&path).or_else(|_| fs::remove_dir_all(&path));
        }
    }
}

fn weights(bundle: &Path) -> PathBuf {
    bundle.join("shards/L00.attn.mlpackage/Data/com.apple.CoreML/weights/weight.bin")
}

#[test]
fn a_sparse_giant_is_refused_by_its_size_before_it_is_read() {
    let dir = tempfile::tempdir().unwrap();
    let bundle = dir.path().join("b.anemoe");
    build(&fixture("tiny-gemma4-moe-text"), &bundle, &["--no-journal"]);
    fs::OpenOptions::new().write(true).open(weights(&bundle)).unwrap().set_len(40 << 30).unwrap();
    let started = std::time::Instant::now();
    refused(
        &["check", bundle.to_str().unwrap(), "--no-journal"],
        &["L00.attn", "size: 4294", "chain.json says"],
    );
    // Hashing the file would take half a minute.
    assert!(started.elapsed().as_secs() < 10);
}

#[test]
fn changed_weights_are_refused_by_every_command_that_uses_them() {
    let dir = tempfile::tempdir().unwrap();
    let bundle = dir.path().join("b.anemoe");
    build(&fixture("tiny-gemma4-moe-text"), &bundle, &["--no-journal"]);
    let golden = fixture("tiny-gemma4-moe-text").join("golden.npz");
    let (b, golden) = (bundle.to_str().unwrap(), golden.to_str().unwrap());
    let commands: [&[&str]; 5] = [
        &["generate", b, "--prompt-ids", "1,2", "--max-new", "1"],
        &[
            "bench",
            b,
            "--context",
            "4",
            "--decode",
            "1",
            "--prefill",
            "4",
            "--repetitions",
            "1",
            "--no-journal",
        ],
        &["check", b, "--no-journal"],
        &["validate", b, "--golden", golden, "--no-journal"],
        &["trace", b, "--golden", golden, "--no-journal"],
    ];
    // The hashes are verified once, and remembered where the system allows it.
    let (code, _, err) = run(commands[0]);
    assert_eq!(code, 0, "{err}");
    let mut bytes = fs::read(weights(&bundle)).unwrap();
    let at = bytes.len() - 100;
    bytes[at] ^= 1;
    fs::write(weights(&bundle), bytes).unwrap();
    for args in commands {
        refused(args, &["L00.attn", "SHA-256", "chain.json says"]);
        let unverified: Vec<&str> = args.iter().copied().chain(["--no-verify"]).collect();
        let (code, _, err) = run(&unverified);
        assert!(code <= 1, "{unverified:?}: {err}");
    }
}

#[test]
fn check_refuses_chains_that_cannot_run() {
    let dir = tempfile::tempdir().unwrap();
    let bundle = dir.path().join("b.anemoe");
    build(&fixture("tiny-gemma4-moe-text"), &bundle, &["--no-journal"]);
    let file = bundle.join("chain.json");
    let chain: serde_json::Value = serde_json::from_slice(&fs::read(&file).unwrap()).unwrap();
    let check = |edit: &dyn Fn(&mut serde_json::Value), says: &str| {
        let mut edited = chain.clone();
        edit(&mut edited);
        fs::write(&file, serde_json::to_vec(&edited).unwrap()).unwrap();
        let b = bundle.to_str().unwrap();
        refused(&["check", b, "--no-journal"], &[says]);
        refused(&["generate", b, "--prompt-ids", "1,2", "--max-new", "1"], &[says]);
    };
    check(&|c| c["steps"] = serde_json::json!([]), "steps: none");
    check(&|c| c["steps"][2]["zero"]["channels"] = 0.into(), "experts_in");
}

#[test]
fn names_from_files_do_not_steer_the_terminal() {
    let dir = tempfile::tempdir().unwrap();
    let evil = "\u{1b}]0;owned\u{7}\u{1b}[2J";
    let model = dir.path().join("model");
    copy(&fixture("tiny-gemma4-moe"), &model);
    let index = model.join("model.safetensors.index.json");
    let text = fs::read_to_string(&index).unwrap();
    let escaped = evil.replace('\u{1b}', "\\u001b").replace('\u{7}', "\\u0007");
    fs::write(&index, text.replacen("model-00001-of", &format!("{escaped}model-00001-of"), 1)).unwrap();
    let bundle = dir.path().join("b.anemoe");
    build(&fixture("tiny-gemma4-moe-text"), &bundle, &["--no-journal"]);
    let file = bundle.join("chain.json");
    let text = fs::read_to_string(&file).unwrap();
    fs::write(&file, text.replacen("\"source\": \"", &format!("\"source\": \"{escaped}"), 1)).unwrap();
    let folder = dir.path().join(format!("{evil}folder"));
    let arrays = dir.path().join("e.npz");
    let plain = anemoe_npz::Array::new(vec![1], vec![1.0f32]).unwrap();
    anemoe_npz::write_npz(&arrays, &[(format!("{evil}name"), plain)]).unwrap();
    let package =
        Path::new(env!("CARGO_MANIFEST_DIR")).join("../runtime/tests/suite/lut4_axis1/lut4_axis1.mlpackage");
    let out = dir.path().join("o.npz");
    let text = |path: &'static str| dir.path().join(path).to_str().unwrap().to_string();
    let commands: [&[&str]; 7] = [
        &["plan", &text("model")],
        &["inspect", &text("b.anemoe")],
        &["check", &text("b.anemoe"), "--no-journal"],
        &["generate", &text("b.anemoe"), "--prompt-ids", "1,2", "--max-new", "4"],
        &["plan", folder.to_str().unwrap()],
        &[
            "predict",
            package.to_str().unwrap(),
            "--inputs",
            &text("e.npz"),
            "--outputs",
            out.to_str().unwrap(),
        ],
        &["generate", &text("b.anemoe"), evil],
    ];
    for args in commands {
        let (code, out, err) = run(args);
        assert!(code <= 2, "{args:?}: {err}");
        let shown = out + &err;
        assert!(!shown.contains(['\u{1b}', '\u{7}']), "{args:?}: {shown:?}");
    }
    // Programs get the unchanged name, escaped as in JSON.
    assert!(json(0, &["inspect", &text("b.anemoe")]).to_string().contains("\\u001b"));
}
