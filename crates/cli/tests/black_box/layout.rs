//! Foreign files in a bundle: they stay, and are an obstacle only under a name of ours.
#![cfg(unix)]

use crate::common::{build, contents, fixture, refused, run};
use std::fs;
use std::os::unix::fs::symlink;
use std::path::{Path, PathBuf};
use std::time::Instant;

fn args(out: &Path) -> Vec<String> {
    let checkpoint = fixture("tiny-gemma4-moe-text");
    let (checkpoint, out) = (checkpoint.to_str().unwrap(), out.to_str().unwrap());
    ["build", checkpoint, "-o", out, "--skip-gates", "--no-journal"].map(String::from).to_vec()
}

/// Builds a finished bundle, and an unfinished one with its first part.
fn bundles(dir: &Path) -> [PathBuf; 2] {
    let (finished, begun) = (dir.join("b.anemoe"), dir.join("parts.anemoe"));
    build(&fixture("tiny-gemma4-moe-text"), &finished, &["--no-journal"]);
    build(&fixture("tiny-gemma4-moe-text"), &begun, &["--no-journal", "--shard", "0/2"]);
    [finished, begun]
}

fn build_refused(bundle: &Path, says: &[&str]) {
    let before = contents(bundle);
    let args = args(bundle);
    refused(&args.iter().map(String::as_str).collect::<Vec<_>>(), says);
    assert_eq!(contents(bundle), before);
}

fn builds(bundle: &Path) {
    let args = args(bundle);
    let (code, _, err) = run(&args.iter().map(String::as_str).collect::<Vec<_>>());
    assert_eq!(code, 0, "{err}");
}

#[test]
fn foreign_files_in_a_package_are_named_before_anything_changes() {
    let dir = tempfile::tempdir().unwrap();
    for bundle in bundles(dir.path()) {
        let package = bundle.join("shards/L00.attn.mlpackage");
        for name in ["notes.txt", ".git/HEAD", "Data/com.apple.CoreML/weights/mine.bin"] {
            let path = package.join(name);
            fs::create_dir_all(path.parent().unwrap()).unwrap();
            fs::write(&path, "theirs").unwrap();
            // With damaged weights, the package would be built again.
            let weights = package.join("Data/com.apple.CoreML/weights/weight.bin");
            let kept = fs::read(&weights).unwrap();
            fs::write(&weights, "damaged").unwrap();
            let first = name.split('/').next().filter(|first| *first != "Data").unwrap_or("mine.bin");
            build_refused(&bundle, &[first, "is no part of it; move it away"]);
            fs::write(&weights, kept).unwrap();
            fs::remove_file(&path).unwrap();
            let _ = fs::remove_dir(package.join(".git"));
        }
        builds(&bundle);
    }
}

#[test]
fn a_foreign_folder_under_the_name_of_a_package_is_not_removed() {
    let dir = tempfile::tempdir().unwrap();
    for bundle in bundles(dir.path()) {
        let package = bundle.join("shards/L00.attn.mlpackage");
        fs::remove_dir_all(&package).unwrap();
        let _ = fs::remove_file(bundle.join(".anemoe-build/L00.attn.json"));
        fs::create_dir(&package).unwrap();
        fs::write(package.join("x"), "theirs").unwrap();
        build_refused(&bundle, &["L00.attn.mlpackage/x", "move it away"]);
        fs::remove_dir_all(&package).unwrap();
        fs::write(&package, "a file").unwrap();
        build_refused(&bundle, &["L00.attn.mlpackage", "is not a folder"]);
        fs::remove_file(&package).unwrap();
        builds(&bundle);
    }
}

#[test]
fn links_under_other_names_are_left_alone() {
    let dir = tempfile::tempdir().unwrap();
    let elsewhere = dir.path().join("elsewhere");
    fs::create_dir(&elsewhere).unwrap();
    fs::write(elsewhere.join("f"), "theirs").unwrap();
    for bundle in bundles(dir.path()) {
        fs::create_dir_all(bundle.join(".anemoe-build")).unwrap();
        let planted = ["foo", "shards/foo", "shards/.tmpl", ".anemoe-build/foo"];
        for name in planted {
            symlink(&elsewhere, bundle.join(name)).unwrap();
        }
        fs::write(bundle.join(".anemoe-build/notes.txt"), "theirs").unwrap();
        symlink(&elsewhere, bundle.join("shards/.anemoe-tmp-zz")).unwrap();
        fs::remove_dir_all(bundle.join("shards/L00.attn.mlpackage")).unwrap();
        builds(&bundle);
        for name in planted {
            assert!(bundle.join(name).is_symlink(), "{name}");
        }
        assert_eq!(fs::read_to_string(bundle.join(".anemoe-build/notes.txt")).unwrap(), "theirs");
        assert!(bundle.join("shards/.anemoe-tmp-zz").symlink_metadata().is_err());
        assert_eq!(contents(&elsewhere).len(), 1);
        assert!(bundle.join("chain.json").is_file() && !bundle.join(".anemoe-build/plan.json").exists());
        // The same again, with the package lost once more.
        fs::remove_dir_all(bundle.join("shards/L00.attn.mlpackage")).unwrap();
        builds(&bundle);
        let (code, _, err) = run(&["generate", bundle.to_str().unwrap(), "--prompt-ids", "1,2", "-n", "1"]);
        assert_eq!(code, 0, "{err}");
    }
}

#[test]
fn links_under_our_names_are_refused_by_every_command() {
    let dir = tempfile::tempdir().unwrap();
    let [bundle, _] = bundles(dir.path());
    let kept = dir.path().join("kept");
    let b = bundle.to_str().unwrap();
    let manifest = "shards/L00.attn.mlpackage/Manifest.json";
    for name in ["shards", "embed.bin", "shards/L00.attn.mlpackage", manifest] {
        let path = bundle.join(name);
        fs::rename(&path, &kept).unwrap();
        symlink(&kept, &path).unwrap();
        let says = [name, "a link, and links in a bundle are not followed"];
        build_refused(&bundle, &says);
        refused(&["generate", b, "--prompt-ids", "1,2", "-n", "1"], &says);
        refused(&["check", b, "--no-journal"], &says);
        fs::remove_file(&path).unwrap();
        fs::rename(&kept, &path).unwrap();
    }
    builds(&bundle);
}

#[test]
fn a_work_folder_without_a_plan_comes_with_advice() {
    let dir = tempfile::tempdir().unwrap();
    let bundle = dir.path().join("b.anemoe");
    fs::create_dir_all(bundle.join(".anemoe-build")).unwrap();
    build_refused(&bundle, &[".anemoe-build", "plan.json", "remove this folder"]);
}

#[test]
fn a_sparse_giant_in_a_bundle_is_not_hashed_by_a_build() {
    let dir = tempfile::tempdir().unwrap();
    for bundle in bundles(dir.path()) {
        for name in ["embed.bin", "shards/L00.attn.mlpackage/Data/com.apple.CoreML/weights/weight.bin"] {
            let path = bundle.join(name);
            let length = path.metadata().unwrap().len();
            fs::OpenOptions::new().write(true).open(&path).unwrap().set_len(40 << 30).unwrap();
            let started = Instant::now();
            builds(&bundle);
            // Hashing the file would take half a minute.
            assert!(started.elapsed().as_secs() < 15, "{name}");
            assert_eq!(path.metadata().unwrap().len(), length, "{name}");
        }
    }
}
