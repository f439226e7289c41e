//! Inputs that are no regular files or have no end, and names that would steer a terminal.
#![cfg(unix)]

use crate::common::*;
use std::fs;
use std::os::unix::fs::symlink;
use std::path::Path;
use std::process::Command;

/// Replaces a file by something that is no regular file, and returns the words for it in an error.
fn replace_by(path: &Path, what: &str) -> &'static str {
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
    let dir = folder();
    let (model, bundle, part, small) =
        (dir.join("model"), dir.join("b.anemoe"), dir.join("p.anemoe"), small());
    copy(&fixture("tiny-gemma4-moe"), &model);
    copy(&built("tiny-gemma4-moe", "--tokens 1,4"), &bundle);
    copy(&built("tiny-gemma4-moe", "--no-journal --shard 0/2"), &part);
    let generate = format!("generate {bundle} --prompt-ids 1,2 --max-new 1");
    let check = format!("check {bundle} --no-journal");
    let build =
        |out: &str, more: &str| format!("build {model} -o {dir}/{out} --quant lut4 --skip-gates {more}");
    let (new, again, rest) =
        (build("new.anemoe", ""), build("b.anemoe", "--tokens 1,4"), build("p.anemoe", "--shard 0/2"));
    let package = "b.anemoe/shards/L00.attn.mlpackage";
    let data = format!("{package}/Data/com.apple.CoreML");
    for (file, line) in [
        ("model/config.json", &new),
        ("model/model.safetensors.index.json", &new),
        ("model/tokenizer.json", &new),
        ("model/tokenizer_config.json", &new),
        ("model/generation_config.json", &new),
        ("model/model-00001-of-00002.safetensors", &format!("golden {model} --prompt-ids 1 -o {dir}/out")),
        ("b.anemoe/chain.json", &generate),
        ("b.anemoe/chain.json", &check),
        ("b.anemoe/chain.json", &again),
        ("b.anemoe/embed.bin", &generate),
        ("b.anemoe/embed.bin", &again),
        ("b.anemoe/generation_config.json", &again),
        ("b.anemoe/tokenizer.json", &again),
        ("b.anemoe/tokenizer.json", &format!("generate {bundle} --prompt a --max-new 1")),
        ("b.anemoe/journal.jsonl", &format!("journal {bundle}")),
        (&format!("{package}/Manifest.json"), &format!("inspect {dir}/{package}")),
        (&format!("{data}/model.mlmodel"), &format!("inspect {dir}/{package}")),
        (&format!("{data}/weights/weight.bin"), &format!("inspect {dir}/{package}")),
        (&format!("{data}/weights/weight.bin"), &generate),
        ("p.anemoe/.anemoe-build/host.json", &format!("assemble {part}")),
        ("p.anemoe/.anemoe-build/source", &format!("assemble {part}")),
        ("p.anemoe/.anemoe-build/L00.attn.json", &rest),
        ("g.npz", &format!("validate {bundle} --golden {dir}/g.npz --no-journal")),
        ("t.txt", &format!("perplexity {small} --text {dir}/t.txt")),
        ("r.json", &format!("{check} --report {dir}/r.json")),
        ("o.tsv", &format!("check --outcomes {dir}/o.tsv")),
        ("w.npy", &format!("quantize {dir}/w.npy")),
    ] {
        for what in ["endless", "pipe", "folder"] {
            let (path, kept) = (dir.join(file), dir.join("kept"));
            let _ = fs::rename(&path, &kept);
            let says = replace_by(&path, what);
            // The limit on address space bounds an endless input, the limit on time a pipe.
            let script = "ulimit -v 4000000; exec timeout 30 \"$0\" \"$@\"";
            let (code, out, err) = finish(&mut in_shell(script, line));
            assert_eq!(code, 2, "{file} {what} {line}\n{out}\n{err}");
            let name = path.file_name().unwrap().to_str().unwrap();
            assert!(err.contains(name) || err.contains("L00.attn"), "{file} {what}: {err}");
            // The error about a folder may have other words.
            let words = [says, "not a regular file", "size:", ": a link, and"];
            assert!(what == "folder" || words.iter().any(|w| err.contains(w)), "{file} {what}: {err}");
            assert!(!dir.join("new.anemoe").exists(), "{file} {what}");
            let _ = fs::remove_file(&path).or_else(|_| fs::remove_dir_all(&path));
            let _ = fs::rename(&kept, &path);
        }
    }
}

#[test]
fn names_from_files_do_not_steer_the_terminal() {
    let dir = folder();
    let evil = "\u{1b}]0;owned\u{7}\u{1b}[2J";
    let model = copied("tiny-gemma4-moe");
    edit_json(model.join("model.safetensors.index.json"), |index| {
        let first = index["weight_map"].as_object_mut().unwrap().values_mut().next().unwrap();
        *first = format!("{evil}x.safetensors").into();
    });
    let bundle = built("tiny-gemma4-moe-text", "--no-journal");
    edit_json(bundle.join("chain.json"), |chain| chain["source"] = format!("{evil}x").into());
    let plain = anemoe_npz::Array::new(vec![1], vec![1.0f32]).unwrap();
    anemoe_npz::write_npz(&dir.join("e.npz"), &[(format!("{evil}name"), plain)]).unwrap();
    let package = root("crates/runtime/tests/suite/lut4_axis1/lut4_axis1.mlpackage");
    for line in [
        format!("plan {model}"),
        format!("inspect {bundle}"),
        format!("check {bundle} --no-journal"),
        format!("generate {bundle} --prompt-ids 1,2 --max-new 4"),
        format!("plan '{dir}/{evil}folder'"),
        format!("predict {package} --inputs {dir}/e.npz --outputs {dir}/o.npz"),
        format!("generate {bundle} '{evil}'"),
    ] {
        let (code, out, err) = run(&line);
        assert!(
            code <= 2 && !(out.clone() + &err).contains(['\u{1b}', '\u{7}']),
            "{line:?}: {out:?} {err:?}"
        );
    }
    // Programs get the unchanged name, escaped as in JSON.
    assert!(json(0, format!("inspect {bundle}")).to_string().contains("\\u001b"));
}
