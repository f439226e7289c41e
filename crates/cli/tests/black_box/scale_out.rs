//! Builds that are killed, repeated, and spread over processes.
// Remarks of tests go to standard error.
#![allow(clippy::disallowed_macros)]

use crate::common::*;
use std::path::PathBuf;
use std::process::Stdio;
use std::time::Duration;

fn line(model: &str, bundle: &Place, more: &str) -> String {
    format!("build {} -o {bundle} --quant lut4 --tokens 1 {more}", fixture(model))
}

/// Returns the contents of a bundle that was built in one process, with its gates.
fn gated(model: &str) -> Vec<(PathBuf, Vec<u8>)> {
    let bundle = folder().join("whole");
    passes(line(model, &bundle, ""));
    contents(&bundle)
}

/// Kills a build up to `most` times, at moments up to `longest` after its start, and continues it each time.
fn kill_and_resume(expected: &[(PathBuf, Vec<u8>)], more: &str, most: usize, longest: Duration) {
    let bundle = folder().join("killed");
    let build = line("tiny-zaya", &bundle, more);
    let mut random = anemoe_io::Random::new(7);
    let (mut kills, mut finished) = (0, 0);
    let complete = || {
        let complete = bundle.join("chain.json").exists() && !bundle.join(".anemoe-build").exists();
        if complete {
            refused(format!("{build} --max-context 64"), &["finished bundle"]);
        }
        complete
    };
    while kills < most {
        let mut child = anemoe(&build).stdout(Stdio::null()).stderr(Stdio::null()).spawn().unwrap();
        // Moments from before the first shard to after the last one.
        std::thread::sleep(Duration::from_micros(random.below(longest.as_micros() as usize) as u64));
        let ended = child.try_wait().unwrap();
        let _ = child.kill();
        child.wait().unwrap();
        assert!(ended.is_none_or(|status| status.success()));
        kills += usize::from(ended.is_none());
        finished += usize::from(ended.is_some());
        // A bundle that looks finished is finished. A kill while the folder of the build is removed leaves some of it,
        // under a name that readers ignore and that the next build of this bundle removes.
        if complete() {
            let mut found = contents(&bundle);
            found.retain(|(name, _)| !name.starts_with(".anemoe-tmp-build"));
            assert!(found == expected, "after {kills} kills");
            std::fs::remove_dir_all(&bundle).unwrap();
        }
    }
    complete();
    passes(build);
    assert!(contents(&bundle) == expected, "after {kills} kills");
    eprintln!("{kills} kills, {finished} builds were faster");
}

/// Checks that a build that is killed again and again goes on each time, and ends with the bytes of an uninterrupted one.
#[test]
fn many_kills() {
    let expected = contents(&built("tiny-zaya", "--tokens 1"));
    kill_and_resume(&expected, "--jobs 1 --skip-gates", 50, Duration::from_millis(60));
}

/// Checks that a build with gates survives kills at any moment, also during a gate.
#[test]
fn kills_between_gates() {
    kill_and_resume(&gated("tiny-zaya"), "--jobs 1", 15, Duration::from_millis(1500));
}

/// Checks that parts in any order, one of them twice, some at the same time, give the bytes of one build.
#[test]
fn parts_make_the_whole() {
    for model in ["tiny-zaya", "tiny-gemma4-moe"] {
        let bundle = folder().join("parts");
        let assemble = format!("assemble {bundle}");
        let children =
            ["1/3", "2/3"].map(|part| start(&mut anemoe(line(model, &bundle, &format!("--shard {part}")))));
        for child in children {
            let (code, _, err) = ended(child.wait_with_output().unwrap());
            assert_eq!(code, 0, "{err}");
        }
        refused(&assemble, &["not built", "L00.attn"]);
        // The scheduler's index names the missing part; then the same part runs again.
        for reused in [false, true] {
            let mut part = anemoe(line(model, &bundle, "--shard 3"));
            let report = json_of(0, part.env("SLURM_ARRAY_TASK_ID", "0"));
            let expected = if reused { report["shards"].clone() } else { 0.into() };
            assert_eq!(report["reused"], expected, "{report}");
        }
        let report = json(0, &assemble);
        assert_eq!(report["shards"], report["reused"]);
        assert!(contents(&bundle) == gated(model), "{model}");
        refused(&assemble, &["complete already"]);
    }
}

/// Checks that a changed or missing shard is not taken, and that its part builds it again.
#[test]
fn damage_between_parts_is_found() {
    let bundle = folder().join("parts");
    let assemble = format!("assemble {bundle}");
    let parts = |parts: [&str; 2]| {
        for part in parts {
            passes(line("tiny-zaya", &bundle, &format!("--shard {part} --skip-gates")));
        }
    };
    parts(["0/2", "1/2"]);
    flip(bundle.join("shards/L02.moe.mlpackage/Data/com.apple.CoreML/weights/weight.bin"));
    refused(&assemble, &["1 of 17 shards are missing or have other bytes", "L02.moe"]);
    std::fs::remove_dir_all(bundle.join("shards/L03.attn.mlpackage")).unwrap();
    refused(&assemble, &["2 of 17 shards are missing", "L02.moe, L03.attn"]);
    std::fs::write(bundle.join("embed.bin"), b"x").unwrap();
    parts(["1/2", "2/2"]);
    passes(&assemble);
    assert!(contents(&bundle) == contents(&built("tiny-zaya", "--tokens 1")));
}

#[test]
fn parts_that_cannot_be() {
    let (dir, bundle) = (folder(), folder().join("parts"));
    for wrong in ["4/3", "0/0", "1/2/3"] {
        refused(line("tiny-zaya", &bundle, &format!("--shard={wrong}")), &["I/N"]);
    }
    refused(line("tiny-zaya", &bundle, "--shard 3"), &["SLURM_ARRAY_TASK_ID"]);
    assert!(!bundle.exists());
    refused(format!("assemble {dir}"), &["an empty folder"]);
    // Another plan in the same folder.
    passes(line("tiny-zaya", &bundle, "--shard 0/2"));
    refused(line("tiny-zaya", &bundle, "--shard 1/2 --max-context 64"), &["other options"]);
    // A damaged plan.
    std::fs::write(bundle.join(".anemoe-build/plan.json"), b"{").unwrap();
    refused(format!("assemble {bundle}"), &["plan.json"]);
}

/// Checks that a search for kinds that is killed goes on there, and leaves nothing beside the bundle.
#[test]
fn a_killed_search_goes_on() {
    let dir = folder();
    let (whole, killed, scratch) = (dir.join("whole"), dir.join("killed"), dir.join("scratch"));
    std::fs::create_dir(&scratch).unwrap();
    let build = |bundle: &Place, more: &str| {
        let options = format!("--quant auto --tokens 1 --skip-gates {more}");
        format!("build {} -o {bundle} {options}", fixture("tiny-gemma4-moe"))
    };
    passes(build(&whole, "--max-bytes 400kB"));
    // Each run gets as far as the measurement behind those of the runs before it.
    let measured = || {
        let names = std::fs::read_dir(&scratch).unwrap().map(|entry| entry.unwrap().path());
        let files = names.map(|name| name.join("measured.jsonl"));
        files.filter_map(|file| std::fs::read(file).ok()).flatten().filter(|b| *b == b'\n').count()
    };
    let line = build(&killed, &format!("--max-bytes 400kB --scratch {scratch}"));
    for _ in 0..3 {
        let before = measured();
        let mut child = anemoe(&line).stdout(Stdio::null()).stderr(Stdio::null()).spawn().unwrap();
        while measured() == before && child.try_wait().unwrap().is_none() {
            std::thread::sleep(Duration::from_millis(1));
        }
        let _ = child.kill();
        child.wait().unwrap();
        assert!(measured() > before || killed.exists());
    }
    passes(line);
    assert!(contents(&whole) == contents(&killed));
    assert_eq!(std::fs::read_dir(&scratch).unwrap().count(), 0);
    // A goal that cannot be reached leaves nothing.
    let beyond = dir.join("beyond");
    refused(build(&beyond, "--max-bytes 4kB"), &["--max-bytes 4000"]);
    assert!(!beyond.exists());
}
