//! Outputs replace no input, no pipe and no file of a bundle, even with `--force`.
#![cfg(unix)]

use crate::common::{anemoe, build, finish, fixture, refused, run};
use std::fs;
use std::os::unix::fs::symlink;
use std::path::{Path, PathBuf};
use std::process::{Command, Stdio};

fn small() -> PathBuf {
    Path::new(env!("CARGO_MANIFEST_DIR")).join("../../models/small-gemma4")
}

fn pipe(path: &Path) {
    let _ = fs::remove_file(path);
    assert!(Command::new("mkfifo").arg(path).status().unwrap().success());
}

/// Runs the binary for at most 30 seconds, since a wait for the other end of a pipe never ends.
fn run_shortly(args: &[&str]) -> (i32, String, String) {
    let mut command = Command::new("timeout");
    finish(command.args(["30", env!("CARGO_BIN_EXE_anemoe")]).args(args).output().unwrap())
}

#[test]
fn no_input_of_any_command_is_replaced() {
    let dir = tempfile::tempdir().unwrap();
    let at = |name: &str| dir.path().join(name).to_str().unwrap().to_string();
    let small = small();
    let small = small.to_str().unwrap();
    let tiny = fixture("tiny-gemma4-moe-text");
    let tiny = tiny.to_str().unwrap();
    let package = Path::new(env!("CARGO_MANIFEST_DIR")).join("../runtime/tests/suite/lut4_axis1");
    let package = package.join("lut4_axis1.mlpackage");
    let package = package.to_str().unwrap();
    let input = at("in.npz");
    let link = at("link.npz");
    symlink(&input, &link).unwrap();
    for out in [input.as_str(), link.as_str()] {
        let cases: [&[&str]; 6] = [
            &["golden", small, "--prompt-file", &input, "-o", out],
            &["calibrate", small, "--text", &input, "-o", out],
            &["plan", tiny, "--importance", &input, "--out", out],
            &["plan", tiny, "--auto-text", &input, "--out", out],
            &["quantize", &at("w.npy"), "--importance", &input, "-o", out],
            &["predict", package, "--inputs", &at("other.npz"), &input, "--outputs", out],
        ];
        for args in cases {
            fs::write(&input, "theirs").unwrap();
            let (code, _, err) = run(&args.iter().copied().chain(["--force"]).collect::<Vec<_>>());
            assert_eq!(code, 2, "{args:?}: {err}");
            assert_eq!(fs::read_to_string(&input).unwrap(), "theirs", "{args:?}");
            assert!(err.contains("belongs to an input"), "{args:?}: {err}");
        }
    }
}

#[test]
fn a_file_on_standard_input_is_not_replaced() {
    let dir = tempfile::tempdir().unwrap();
    let text = dir.path().join("notes.txt");
    fs::write(&text, "def main():").unwrap();
    let small = small();
    let args = ["golden", small.to_str().unwrap(), "-p", "-", "-o", text.to_str().unwrap(), "--force"];
    let mut command = anemoe(&args);
    let (code, _, err) = finish(command.stdin(fs::File::open(&text).unwrap()).output().unwrap());
    assert!(code == 2 && err.contains("belongs to an input"), "{err}");
    assert_eq!(fs::read_to_string(&text).unwrap(), "def main():");
}

#[test]
fn pipes_are_no_outputs() {
    let dir = tempfile::tempdir().unwrap();
    let at = |name: &str| dir.path().join(name).to_str().unwrap().to_string();
    let tiny = fixture("tiny-gemma4-moe-text");
    let tiny_text = tiny.to_str().unwrap();
    let bundle = at("b.anemoe");
    build(&tiny, Path::new(&bundle), &["--no-journal"]);
    let tensor = format!("{tiny_text}/model.safetensors:model.layers.1.self_attn.q_proj.weight");
    for name in ["o.npz", "o.npy", "o.json"] {
        pipe(Path::new(&at(name)));
    }
    let bench = ["bench", &bundle, "--no-journal", "--context", "4", "--decode", "1", "--prefill", "0"];
    let (save, npz, npy) = (at("o.json"), at("o.npz"), at("o.npy"));
    let cases: [Vec<&str>; 5] = [
        vec!["quantize", &tensor, "-o", &npz],
        vec!["quantize", &tensor, "-o", &npy],
        vec!["golden", tiny_text, "--prompt-ids", "1", "--decode", "1", "-o", &npz],
        vec!["plan", tiny_text, "--out", &save],
        bench.iter().copied().chain(["--save", &save]).collect(),
    ];
    for args in cases {
        for force in [&[][..], &["--force"]] {
            let args: Vec<&str> = args.iter().copied().chain(force.iter().copied()).collect();
            let (code, _, err) = run_shortly(&args);
            assert!(
                code == 2 && err.contains("a pipe, where a regular file is expected"),
                "{args:?}: {code} {err}"
            );
        }
    }
    // A pipe that the shell opened is written to under its own name.
    let mut shell = Command::new("bash");
    let script = "\"$0\" plan \"$1\" --out /dev/stdout | head -c 1";
    shell.args(["-c", script, env!("CARGO_BIN_EXE_anemoe"), tiny_text]).stdin(Stdio::null());
    let (_, out, err) = finish(shell.output().unwrap());
    assert!(!out.is_empty(), "{err}");
}

#[test]
fn pipes_in_a_bundle_are_refused_at_once() {
    let dir = tempfile::tempdir().unwrap();
    let tiny = fixture("tiny-gemma4-moe");
    let bundle = dir.path().join("b.anemoe");
    build(&tiny, &bundle, &["--no-journal"]);
    let (b, tiny) = (bundle.to_str().unwrap(), tiny.to_str().unwrap());
    let args = ["build", tiny, "-o", b, "--quant", "lut4", "--skip-gates", "--no-journal"];
    let kept = dir.path().join("kept");
    for name in ["chain.json", "embed.bin", "generation_config.json", "tokenizer.json", "journal.jsonl"] {
        let path = bundle.join(name);
        let _ = fs::rename(&path, &kept);
        pipe(&path);
        let (code, _, err) = run_shortly(&args);
        assert!(code == 2 && err.contains(name) && err.contains("a pipe"), "{name}: {code} {err}");
        fs::remove_file(&path).unwrap();
        let _ = fs::rename(&kept, &path);
    }
    // An unfinished build, of one of two parts.
    let parts = dir.path().join("parts.anemoe");
    let p = parts.to_str().unwrap();
    let args = ["build", tiny, "-o", p, "--quant", "lut4", "--skip-gates", "--no-journal", "--shard", "0/2"];
    let (code, _, err) = run(&args);
    assert_eq!(code, 0, "{err}");
    let shard = fs::read_dir(parts.join("shards")).unwrap().next().unwrap().unwrap().file_name();
    let record = shard.to_str().unwrap().replace(".mlpackage", ".json");
    for name in
        ["chain.json", ".anemoe-build/host.json", ".anemoe-build/source", &format!(".anemoe-build/{record}")]
    {
        let path = parts.join(name);
        let _ = fs::rename(&path, &kept);
        pipe(&path);
        for args in [&args[..], &["assemble", p, "--no-journal"]] {
            let (code, _, err) = run_shortly(args);
            assert!(code == 2 && err.contains("a pipe"), "{name} {args:?}: {code} {err}");
        }
        fs::remove_file(&path).unwrap();
        let _ = fs::rename(&kept, &path);
    }
}

#[test]
fn a_pipe_in_the_cache_is_left_alone() {
    let dir = tempfile::tempdir().unwrap();
    let bundle = dir.path().join("b.anemoe");
    build(&fixture("tiny-gemma4-moe-text"), &bundle, &["--no-journal"]);
    fs::create_dir_all(dir.path().join("cache/anemoe")).unwrap();
    pipe(&dir.path().join("cache/anemoe/verified.txt"));
    // Hashes of files that were written just now are not remembered.
    let old = ["-c", "find \"$0\" -exec touch -d 2020-01-01 {} +", bundle.to_str().unwrap()];
    assert!(Command::new("sh").args(old).status().unwrap().success());
    std::thread::sleep(std::time::Duration::from_secs(4));
    let mut command = Command::new("timeout");
    command.args(["30", env!("CARGO_BIN_EXE_anemoe"), "generate", bundle.to_str().unwrap()]);
    command.args(["--prompt-ids", "1,2", "-n", "1"]).env("XDG_CACHE_HOME", dir.path().join("cache"));
    let (code, _, err) = finish(command.output().unwrap());
    assert_eq!(code, 0, "{err}");
}

#[test]
fn a_pipe_as_a_file_of_the_checkpoint_is_refused() {
    let dir = tempfile::tempdir().unwrap();
    for name in ["tokenizer.json", "tokenizer_config.json", "generation_config.json"] {
        for device in [false, true] {
            let model = dir.path().join("model");
            crate::common::copy(&fixture("tiny-gemma4-moe-text"), &model);
            let _ = fs::remove_file(model.join(name));
            if device {
                symlink("/dev/zero", model.join(name)).unwrap();
            } else {
                pipe(&model.join(name));
            }
            let (model, out) = (model.to_str().unwrap(), dir.path().join("b.anemoe"));
            let args = ["build", model, "-o", out.to_str().unwrap(), "--quant", "lut4", "--skip-gates"];
            let (code, _, err) = run_shortly(&args);
            assert!(
                code == 2 && err.contains(name) && err.contains("where a regular file"),
                "{name}: {code} {err}"
            );
            assert!(!out.exists());
            fs::remove_dir_all(model).unwrap();
        }
    }
}

#[test]
fn files_of_a_bundle_are_no_outputs() {
    let dir = tempfile::tempdir().unwrap();
    let bundle = dir.path().join("b.anemoe");
    let tiny = fixture("tiny-gemma4-moe-text");
    build(&tiny, &bundle, &["--no-journal"]);
    let before = crate::common::contents(&bundle);
    for name in [
        "chain.json",
        "embed.bin",
        "tokenizer.json",
        "shards/x.npz",
        "shards/L00.attn.mlpackage/Manifest.json",
    ] {
        let out = bundle.join(name);
        let (tiny, out) = (tiny.to_str().unwrap(), out.to_str().unwrap());
        let says = ["is a file of the", "choose another name"];
        refused(&["golden", tiny, "--prompt-ids", "1", "-o", out, "--force"], &says);
        refused(&["plan", tiny, "--out", out, "--force"], &says);
    }
    assert_eq!(crate::common::contents(&bundle), before);
    // Other names in the bundle's folder are the user's.
    let out = bundle.join("plan.json");
    let (code, _, err) = run(&["plan", tiny.to_str().unwrap(), "--out", out.to_str().unwrap()]);
    assert_eq!(code, 0, "{err}");
}
