//! Files of others are not lost: foreign files, folders and links in a bundle's place stay, and are an obstacle only under a
//! name of ours.
#![cfg(unix)]

use crate::common::*;
use std::fs;
use std::os::unix::fs::symlink;
use std::path::Path;
use std::time::{Duration, Instant};

fn checkpoint() -> Place {
    fixture("tiny-gemma4-moe-text")
}

fn build_line(bundle: &Place) -> String {
    format!("build {} -o {bundle} --skip-gates --no-journal", checkpoint())
}

/// Returns a finished bundle, and an unfinished one with its first part.
fn bundles() -> [Place; 2] {
    ["--no-journal", "--no-journal --shard 0/2"].map(|options| built("tiny-gemma4-moe-text", options))
}

/// Checks that a build is refused with these words, and changes nothing.
fn build_refused(bundle: &Place, says: &[&str]) {
    let before = contents(bundle);
    refused(build_line(bundle), says);
    assert_eq!(contents(bundle), before);
}

fn write(path: impl AsRef<Path>, text: &str) {
    fs::create_dir_all(path.as_ref().parent().unwrap()).unwrap();
    fs::write(path, text).unwrap();
}

#[test]
fn folders_that_are_no_bundle_are_not_taken_over() {
    let dir = folder();
    let swift = dir.join("P");
    write(swift.join(".build/plan.json"), "{}");
    write(swift.join("embed.bin"), "theirs");
    build_refused(&swift, &["holds `.build`", "another folder"]);
    // A folder with our name and without our plan proves nothing.
    fs::create_dir(swift.join(".anemoe-build")).unwrap();
    build_refused(&swift, &["plan.json", "remove this folder"]);
    write(swift.join(".anemoe-build/plan.json"), r#"{"plan": {}}"#);
    build_refused(&swift, &["plan of an unfinished build"]);
    // A refused build has removed nothing.
    let bundle = dir.join("b.anemoe");
    write(bundle.join("chain.json"), "{}");
    write(bundle.join(".tmp_backup/deep"), "theirs");
    write(bundle.join(".anemoe-tmp-old/x"), "old");
    build_refused(&bundle, &["chain.json"]);
    // The current folder is not taken over, nor a file, nor a path below one.
    let here = dir.join("here");
    write(here.join("precious"), "x");
    let mut command = anemoe(format!("build {} -o .", checkpoint()));
    refuses(command.current_dir(&here), &["holds `precious`"]);
    for (path, says) in [("precious", "not a folder"), ("precious/b.anemoe", "b.anemoe")] {
        refused(build_line(&here.join(path)), &[says]);
    }
    assert_eq!(contents(&here).len(), 1);
}

#[test]
fn foreign_files_under_our_names_are_named_before_anything_changes() {
    for bundle in bundles() {
        let package = bundle.join("shards/L00.attn.mlpackage");
        let weights = package.join("Data/com.apple.CoreML/weights/weight.bin");
        for (name, says) in [
            ("notes.txt", "notes.txt"),
            (".git/HEAD", ".git"),
            ("Data/com.apple.CoreML/weights/mine.bin", "mine.bin"),
        ] {
            write(package.join(name), "theirs");
            // With damaged weights, the package would be built again.
            let kept = fs::read(&weights).unwrap();
            fs::write(&weights, "damaged").unwrap();
            build_refused(&bundle, &[says, "is no part of it; move it away"]);
            fs::write(&weights, kept).unwrap();
            fs::remove_file(package.join(name)).unwrap();
            let _ = fs::remove_dir(package.join(".git"));
        }
        fs::remove_dir_all(&package).unwrap();
        let _ = fs::remove_file(bundle.join(".anemoe-build/L00.attn.json"));
        write(package.join("x"), "theirs");
        build_refused(&bundle, &["L00.attn.mlpackage/x", "move it away"]);
        fs::remove_dir_all(&package).unwrap();
        fs::write(&package, "a file").unwrap();
        build_refused(&bundle, &["L00.attn.mlpackage", "is not a folder"]);
        fs::remove_file(&package).unwrap();
        passes(build_line(&bundle));
    }
}

#[test]
fn files_and_links_under_other_names_are_left_alone() {
    let elsewhere = folder();
    write(elsewhere.join("f"), "theirs");
    for bundle in bundles() {
        let links = ["foo", "shards/foo", "shards/.tmpl", ".anemoe-build/foo"];
        let files = [".tmp_backup/f", "README.md", "shards/.DS_Store", ".anemoe-build/notes.txt"];
        files.iter().for_each(|name| write(bundle.join(name), "theirs"));
        links.iter().for_each(|name| symlink(&elsewhere, bundle.join(name)).unwrap());
        symlink(&elsewhere, bundle.join("shards/.anemoe-tmp-zz")).unwrap();
        for _ in 0..2 {
            // A package is lost and built again.
            let _ = fs::remove_dir_all(bundle.join("shards/L00.attn.mlpackage"));
            passes(build_line(&bundle));
            assert!(links.iter().all(|name| bundle.join(name).is_symlink()));
            assert!(files.iter().all(|name| fs::read_to_string(bundle.join(name)).unwrap() == "theirs"));
        }
        assert!(bundle.join("shards/.anemoe-tmp-zz").symlink_metadata().is_err());
        assert_eq!(contents(&elsewhere).len(), 1);
        assert!(bundle.join("chain.json").is_file() && !bundle.join(".anemoe-build/plan.json").exists());
        passes(format!("generate {bundle} --prompt-ids 1,2 -n 1"));
    }
}

#[test]
fn links_under_our_names_are_refused_by_every_command() {
    let [bundle, _] = bundles();
    let elsewhere = folder();
    let package = "shards/L00.attn.mlpackage";
    for name in ["shards", "chain.json", "embed.bin", package, &format!("{package}/Manifest.json")] {
        let (inside, outside) = (bundle.join(name), elsewhere.join("kept"));
        fs::rename(&inside, &outside).unwrap();
        let planted = [".partial-theirs", ".tmpfoo", ".anemoe-tmp-theirs"].map(|p| outside.join(p));
        if outside.is_dir() {
            planted.iter().for_each(|path| write(path, "theirs"));
        }
        symlink(&outside, &inside).unwrap();
        let before = contents(&elsewhere);
        let says = [name, "a link"];
        build_refused(&bundle, &says);
        refused(format!("assemble {bundle}"), &says);
        refused(format!("generate {bundle} --prompt-ids 1,2 -n 1"), &says);
        refused(format!("check {bundle} --no-journal"), &says);
        assert_eq!(contents(&elsewhere), before, "{name}");
        planted.iter().for_each(|path| drop(fs::remove_file(path)));
        fs::remove_file(&inside).unwrap();
        fs::rename(&outside, &inside).unwrap();
    }
    // The bundle itself may be named by a link.
    symlink(&bundle, elsewhere.join("named.anemoe")).unwrap();
    passes(build_line(&elsewhere.join("named.anemoe")));
}

#[test]
fn a_failed_rebuild_of_a_finished_bundle_keeps_it() {
    let [bundle, _] = bundles();
    // A package is missing, and the damaged checkpoint cannot give it again.
    fs::remove_dir_all(bundle.join("shards/L00.attn.mlpackage")).unwrap();
    let (before, model) = (contents(&bundle), copied("tiny-gemma4-moe-text"));
    fs::write(model.join("model.safetensors"), "no weights").unwrap();
    refused(format!("build {model} -o {bundle} --skip-gates"), &["model.safetensors"]);
    assert_eq!(contents(&bundle), before);
}

#[test]
fn a_sparse_giant_in_a_bundle_is_known_by_its_size() {
    let weights = "shards/L00.attn.mlpackage/Data/com.apple.CoreML/weights/weight.bin";
    for bundle in bundles() {
        for name in ["embed.bin", weights] {
            let path = bundle.join(name);
            let length = path.metadata().unwrap().len();
            fs::OpenOptions::new().write(true).open(&path).unwrap().set_len(40 << 30).unwrap();
            // Hashing the file would take half a minute.
            let started = Instant::now();
            if bundle.join("chain.json").exists() {
                let part = name.split('/').nth(1).unwrap_or(name);
                refused(format!("check {bundle} --no-journal"), &[part, "size: 4294", "chain.json says"]);
            }
            passes(build_line(&bundle));
            assert!(started.elapsed() < Duration::from_secs(15), "{name}");
            assert_eq!(path.metadata().unwrap().len(), length, "{name}");
        }
    }
}

#[test]
fn an_interrupted_command_leaves_no_temporary_folder() {
    let [bundle, _] = bundles();
    let golden = checkpoint().join("golden.npz");
    let gate = format!("{bundle} --golden {golden} --checkpoint {} --no-journal", checkpoint());
    for line in [
        format!("quickstart --model {}", small()),
        format!("trace {gate} --swap"),
        format!("validate {gate} --probes 9"),
    ] {
        let temporary = folder();
        let entries = || fs::read_dir(&temporary).unwrap().count();
        let child = start(anemoe(&line).env("TMPDIR", &*temporary));
        let begun = Instant::now();
        while entries() == 0 && begun.elapsed() < Duration::from_secs(60) {
            std::thread::sleep(Duration::from_millis(2));
        }
        signal(&child, "INT");
        let (code, _, err) = ended(child.wait_with_output().unwrap());
        // A fast machine may have finished first.
        assert!(code == 130 || code <= 1, "{line}: {code} {err}");
        assert_eq!(entries(), 0, "{line}");
    }
}
