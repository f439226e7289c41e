//! Files of others are not lost: foreign folders, links, existing outputs, interrupted commands.
#![cfg(unix)]

use crate::common::{anemoe, build, contents, finish, fixture, refused, run};
use std::fs;
use std::os::unix::fs::symlink;
use std::path::{Path, PathBuf};
use std::process::{Command, Stdio};
use std::time::{Duration, Instant};

fn checkpoint() -> PathBuf {
    fixture("tiny-gemma4-moe-text")
}

fn build_args<'a>(checkpoint: &'a Path, out: &'a Path) -> [&'a str; 6] {
    ["build", checkpoint.to_str().unwrap(), "-o", out.to_str().unwrap(), "--skip-gates", "--no-journal"]
}

/// Checks that the arguments are refused with these words, and that the folder stays as it was.
fn refused_and_unchanged(args: &[&str], folder: &Path, says: &[&str]) {
    let before = contents(folder);
    refused(args, says);
    assert_eq!(contents(folder), before);
}

#[test]
fn a_folder_of_another_tool_is_no_unfinished_build() {
    let dir = tempfile::tempdir().unwrap();
    let swift = dir.path().join("P");
    fs::create_dir_all(swift.join(".build/debug")).unwrap();
    fs::create_dir_all(swift.join(".tmp_mine")).unwrap();
    fs::write(swift.join("embed.bin"), "theirs").unwrap();
    fs::write(swift.join(".build/plan.json"), "{}").unwrap();
    let checkpoint = checkpoint();
    refused_and_unchanged(&build_args(&checkpoint, &swift), &swift, &["holds `.build`", "another folder"]);
    // A folder with our name and without our plan proves nothing.
    fs::create_dir(swift.join(".anemoe-build")).unwrap();
    refused_and_unchanged(&build_args(&checkpoint, &swift), &swift, &["plan.json"]);
    fs::write(swift.join(".anemoe-build/plan.json"), r#"{"plan": {}}"#).unwrap();
    refused_and_unchanged(&build_args(&checkpoint, &swift), &swift, &["plan of an unfinished build"]);
}

#[test]
fn the_current_folder_is_not_taken_over() {
    let dir = tempfile::tempdir().unwrap();
    fs::write(dir.path().join("notes.txt"), "theirs").unwrap();
    let checkpoint = checkpoint().canonicalize().unwrap();
    let (code, _, err) =
        finish(anemoe(&build_args(&checkpoint, Path::new("."))).current_dir(dir.path()).output().unwrap());
    assert!(code == 2 && err.contains("holds `notes.txt`"), "{err}");
    assert_eq!(contents(dir.path()).len(), 1);
}

/// Builds a finished bundle.
fn finished(dir: &Path) -> PathBuf {
    let bundle = dir.join("b.anemoe");
    build(&checkpoint(), &bundle, &["--no-journal"]);
    bundle
}

#[test]
fn nothing_is_written_or_removed_through_links_in_a_bundle() {
    let dir = tempfile::tempdir().unwrap();
    let bundle = finished(dir.path());
    let checkpoint = checkpoint();
    let args = build_args(&checkpoint, &bundle);
    let elsewhere = dir.path().join("elsewhere");
    for name in ["shards", "chain.json", "embed.bin", "tokenizer.json", "shards/L00.attn.mlpackage"] {
        let (inside, outside) = (bundle.join(name), elsewhere.join(name));
        if !inside.exists() {
            continue;
        }
        fs::create_dir_all(outside.parent().unwrap()).unwrap();
        fs::rename(&inside, &outside).unwrap();
        for planted in [".partial-theirs", ".tmpfoo", ".anemoe-tmp-theirs"] {
            fs::write(elsewhere.join(planted), "theirs").unwrap();
            if outside.is_dir() {
                fs::write(outside.join(planted), "theirs").unwrap();
            }
        }
        symlink(&outside, &inside).unwrap();
        let before = (contents(&bundle), contents(&elsewhere));
        refused(&args, &[name, "a link"]);
        refused(&["assemble", bundle.to_str().unwrap()], &[name, "a link"]);
        assert_eq!((contents(&bundle), contents(&elsewhere)), before, "{name}");
        for planted in [".partial-theirs", ".tmpfoo", ".anemoe-tmp-theirs"] {
            let _ = fs::remove_file(outside.join(planted));
        }
        fs::remove_file(&inside).unwrap();
        fs::rename(&outside, &inside).unwrap();
        let _ = fs::remove_dir_all(&elsewhere);
    }
    // The bundle itself may be named by a link.
    let named = dir.path().join("named.anemoe");
    symlink(&bundle, &named).unwrap();
    let (code, _, err) = run(&build_args(&checkpoint, &named));
    assert_eq!(code, 0, "{err}");
}

#[test]
fn a_refused_build_has_removed_nothing() {
    let dir = tempfile::tempdir().unwrap();
    let bundle = dir.path().join("b.anemoe");
    fs::create_dir_all(bundle.join(".tmp_backup/deep")).unwrap();
    fs::create_dir_all(bundle.join(".anemoe-tmp-old")).unwrap();
    fs::write(bundle.join("chain.json"), "{}").unwrap();
    let checkpoint = checkpoint();
    refused_and_unchanged(&build_args(&checkpoint, &bundle), &bundle, &["chain.json"]);
}

#[test]
fn foreign_files_beside_a_build_stay() {
    let dir = tempfile::tempdir().unwrap();
    let bundle = finished(dir.path());
    let before = contents(&bundle);
    fs::create_dir_all(bundle.join(".tmp_backup")).unwrap();
    fs::write(bundle.join(".tmp_backup/f"), "theirs").unwrap();
    fs::write(bundle.join("README.md"), "theirs").unwrap();
    fs::write(bundle.join("shards/.DS_Store"), "theirs").unwrap();
    // One package is lost and built again.
    fs::remove_dir_all(bundle.join("shards/L00.attn.mlpackage")).unwrap();
    let checkpoint = checkpoint();
    let (code, _, err) = run(&build_args(&checkpoint, &bundle));
    assert_eq!(code, 0, "{err}");
    for (path, bytes) in before {
        assert_eq!(fs::read(bundle.join(&path)).unwrap(), bytes, "{}", path.display());
    }
    for theirs in [".tmp_backup/f", "README.md", "shards/.DS_Store"] {
        assert_eq!(fs::read_to_string(bundle.join(theirs)).unwrap(), "theirs");
    }
}

#[test]
fn a_failed_rebuild_of_a_finished_bundle_keeps_it() {
    let dir = tempfile::tempdir().unwrap();
    let bundle = finished(dir.path());
    // A package is missing, and the damaged checkpoint cannot give it again.
    fs::remove_dir_all(bundle.join("shards/L00.attn.mlpackage")).unwrap();
    let before = contents(&bundle);
    let model = dir.path().join("model");
    crate::common::copy(&checkpoint(), &model);
    fs::write(model.join("model.safetensors"), "no weights").unwrap();
    refused(&build_args(&model, &bundle), &["model.safetensors"]);
    assert_eq!(contents(&bundle), before);
}

#[test]
fn outputs_are_replaced_only_with_force_and_inputs_never() {
    let dir = tempfile::tempdir().unwrap();
    let at = |name: &str| dir.path().join(name).to_str().unwrap().to_string();
    let suite = Path::new(env!("CARGO_MANIFEST_DIR")).join("../runtime/tests/suite/lut4_axis1");
    fs::copy(suite.join("inputs.npz"), at("in.npz")).unwrap();
    let package = suite.join("lut4_axis1.mlpackage");
    let weights = fixture("tiny-gemma4-moe-text/model.safetensors");
    let tensor = format!("{}:model.layers.1.self_attn.q_proj.weight", weights.display());
    let quantize = |out: &str| vec!["quantize".to_string(), tensor.clone(), "-o".into(), out.into()];
    let check = |args: Vec<String>, out: &str| {
        let args: Vec<&str> = args.iter().map(String::as_str).collect();
        let (code, _, err) = run(&args);
        assert_eq!(code, 0, "{args:?}: {err}");
        let before = contents(dir.path());
        refused(&args, &["it exists already; give --force"]);
        assert_eq!(contents(dir.path()), before);
        let forced: Vec<&str> = args.iter().copied().chain(["--force"]).collect();
        let (code, _, err) = run(&forced);
        assert_eq!(code, 0, "{forced:?}: {err}");
        assert!(Path::new(out).exists());
    };
    for name in ["a.npy", "a.npz", "a.mlpackage"] {
        check(quantize(&at(name)), &at(name));
    }
    let model = checkpoint().to_str().unwrap().to_string();
    let golden = ["golden", &model, "--prompt-ids", "1,2", "--decode", "1", "-o", &at("g.npz")];
    check(golden.map(String::from).to_vec(), &at("g.npz"));
    check(["plan", &model, "--out", &at("p.json")].map(String::from).to_vec(), &at("p.json"));
    let predict = |out: &str| {
        let package = package.to_str().unwrap();
        ["predict", package, "--inputs", &at("in.npz"), "--outputs", out].map(String::from).to_vec()
    };
    check(predict(&at("o{}.npz")), &at("o0.npz"));
    // An input is not replaced, even under another name.
    let hard = at("hard.npz");
    fs::hard_link(at("in.npz"), &hard).unwrap();
    for out in [at("in.npz"), hard] {
        let args = predict(&out);
        let args: Vec<&str> = args.iter().map(String::as_str).chain(["--force"]).collect();
        refused(&args, &["belongs to an input"]);
    }
    let own = at("a.npy");
    let before = fs::read(&own).unwrap();
    refused(&["quantize", &own, "-o", &own, "--force"], &["belongs to an input"]);
    assert_eq!(fs::read(&own).unwrap(), before);
    // A folder that is no package is not replaced by one.
    fs::create_dir(at("photos.mlpackage")).unwrap();
    fs::write(at("photos.mlpackage/a.jpg"), "theirs").unwrap();
    let args = quantize(&at("photos.mlpackage"));
    let args: Vec<&str> = args.iter().map(String::as_str).chain(["--force"]).collect();
    refused(&args, &["it exists and is not a package"]);
    assert!(Path::new(&at("photos.mlpackage/a.jpg")).exists());
}

/// Sends a signal to a running command once `ready` says so; returns its exit status and messages after its end.
fn interrupt(mut command: Command, signal: &str, ready: impl Fn() -> bool) -> (i32, String) {
    let child = command.stdout(Stdio::piped()).stderr(Stdio::piped()).spawn().unwrap();
    let begun = Instant::now();
    while !ready() && begun.elapsed() < Duration::from_secs(60) {
        std::thread::sleep(Duration::from_millis(2));
    }
    Command::new("kill").args([signal, &child.id().to_string()]).status().unwrap();
    let (code, _, err) = finish(child.wait_with_output().unwrap());
    (code, err)
}

#[test]
fn an_interrupted_command_leaves_no_temporary_folder() {
    let models = Path::new(env!("CARGO_MANIFEST_DIR")).join("../../models/small-gemma4");
    let dir = tempfile::tempdir().unwrap();
    let bundle = finished(dir.path());
    let golden = fixture("tiny-gemma4-moe-text/golden.npz");
    let (bundle, golden) = (bundle.to_str().unwrap(), golden.to_str().unwrap());
    let checkpoint = checkpoint();
    let checkpoint = checkpoint.to_str().unwrap();
    let commands: [&[&str]; 3] = [
        &["quickstart", "--model", models.to_str().unwrap()],
        &["trace", bundle, "--golden", golden, "--swap", "--checkpoint", checkpoint, "--no-journal"],
        &[
            "validate",
            bundle,
            "--golden",
            golden,
            "--probes",
            "9",
            "--checkpoint",
            checkpoint,
            "--no-journal",
        ],
    ];
    for args in commands {
        let temporary = tempfile::tempdir().unwrap();
        let mut command = anemoe(args);
        command.env("TMPDIR", temporary.path());
        let entries = || fs::read_dir(temporary.path()).unwrap().count();
        let (code, err) = interrupt(command, "-INT", || entries() > 0);
        // A fast machine may have finished first.
        assert!(code == 130 || code <= 1, "{args:?}: {code} {err}");
        assert_eq!(entries(), 0, "{args:?}");
    }
}

#[test]
fn a_limit_of_file_sizes_is_an_error_with_a_reason() {
    let dir = tempfile::tempdir().unwrap();
    let bundle = dir.path().join("b.anemoe");
    let checkpoint = checkpoint();
    let args = build_args(&checkpoint, &bundle);
    // `ulimit -f` counts blocks of 512 or 1024 bytes.
    let mut shell = Command::new("sh");
    shell.args(["-c", "ulimit -f 8; exec \"$0\" \"$@\"", env!("CARGO_BIN_EXE_anemoe")]).args(args);
    let (code, _, err) = finish(shell.output().unwrap());
    assert!(code == 2 && err.contains("File too large"), "{code} {err}");
    assert!(!bundle.exists(), "{:?}", contents(&bundle).iter().map(|c| &c.0).collect::<Vec<_>>());
}
