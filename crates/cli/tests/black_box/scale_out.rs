//! Builds that are killed, repeated, and spread over processes.
// Remarks of tests go to standard error.
#![allow(clippy::disallowed_macros)]

use crate::common::{anemoe, build, contents, finish, fixture, json, refused, run};
use std::path::{Path, PathBuf};
use std::process::Stdio;
use std::time::Duration;

const OPTIONS: [&str; 4] = ["--quant", "lut4", "--tokens", "1"];

fn arguments<'a>(bundle: &'a Path, model: &'a Path, more: &[&'a str]) -> Vec<&'a str> {
    let mut args = vec!["build", model.to_str().unwrap(), "-o", bundle.to_str().unwrap()];
    args.extend(OPTIONS);
    args.extend(more);
    args
}

/// Builds a bundle in one process, with its gates, and returns its contents.
fn gated(dir: &Path, model: &str) -> Vec<(PathBuf, Vec<u8>)> {
    let (bundle, model) = (dir.join("whole"), fixture(model));
    json(0, &arguments(&bundle, &model, &[]));
    contents(&bundle)
}

fn whole(dir: &Path, model: &str) -> Vec<(PathBuf, Vec<u8>)> {
    let bundle = dir.join("whole");
    build(&fixture(model), &bundle, &OPTIONS);
    contents(&bundle)
}

/// Kills a build up to `most` times, at moments up to `longest` after its start, and continues it each time.
fn kill_and_resume(
    expected: &[(PathBuf, Vec<u8>)],
    bundle: &Path,
    more: &[&str],
    most: usize,
    longest: Duration,
) {
    let model = fixture("tiny-zaya");
    let mut random = anemoe_io::Random::new(7);
    let (mut kills, mut finished) = (0, 0);
    let complete = || {
        let complete = bundle.join("chain.json").exists() && !bundle.join(".anemoe-build").exists();
        if complete {
            refused(&arguments(bundle, &model, &["--max-context", "64"]), &["finished bundle"]);
        }
        complete
    };
    while kills < most {
        let mut child = anemoe(&arguments(bundle, &model, more))
            .stdout(Stdio::null())
            .stderr(Stdio::null())
            .spawn()
            .unwrap();
        // Moments from before the first shard to after the last one.
        std::thread::sleep(Duration::from_micros(random.below(longest.as_micros() as usize) as u64));
        let ended = child.try_wait().unwrap();
        let _ = child.kill();
        child.wait().unwrap();
        match ended {
            Some(status) => {
                assert!(status.success());
                finished += 1;
            }
            None => kills += 1,
        }
        // A bundle that looks finished is finished. A kill while the folder of the build is removed leaves some of it,
        // under a name that readers ignore and that the next build of this bundle removes.
        if complete() {
            let mut found = contents(bundle);
            found.retain(|(name, _)| !name.starts_with(".anemoe-tmp-build"));
            assert!(found == expected, "after {kills} kills");
            std::fs::remove_dir_all(bundle).unwrap();
        }
    }
    complete();
    json(0, &arguments(bundle, &model, more));
    let found = contents(bundle);
    let differing: Vec<&PathBuf> = found
        .iter()
        .filter(|f| !expected.contains(f))
        .chain(expected.iter().filter(|f| !found.contains(f)))
        .map(|(name, _)| name)
        .collect();
    assert!(differing.is_empty(), "after {kills} kills: {differing:?}");
    eprintln!("{kills} kills, {finished} builds were faster");
}

/// Checks that a build that is killed again and again goes on each time, and ends with the bytes of an uninterrupted one.
#[test]
fn fifty_kills() {
    let dir = tempfile::tempdir().unwrap();
    let expected = whole(dir.path(), "tiny-zaya");
    let more = ["--jobs", "1", "--skip-gates"];
    kill_and_resume(&expected, &dir.path().join("killed"), &more, 50, Duration::from_millis(60));
}

/// Checks that a build with gates survives kills at any moment, also during a gate.
#[test]
fn kills_between_gates() {
    let dir = tempfile::tempdir().unwrap();
    let expected = gated(dir.path(), "tiny-zaya");
    kill_and_resume(&expected, &dir.path().join("killed"), &["--jobs", "1"], 15, Duration::from_millis(1500));
}

/// Checks that parts in any order, one of them twice, some at the same time, give the bytes of one build.
#[test]
fn parts_make_the_whole() {
    let dir = tempfile::tempdir().unwrap();
    for model in ["tiny-zaya", "tiny-gemma4-moe"] {
        let dir = dir.path().join(model);
        std::fs::create_dir(&dir).unwrap();
        let expected = gated(&dir, model);
        let bundle = dir.join("parts");
        let path = fixture(model);
        let children: Vec<_> = ["1/3", "2/3"]
            .map(|part| {
                anemoe(&arguments(&bundle, &path, &["--shard", part]))
                    .stdout(Stdio::null())
                    .stderr(Stdio::piped())
                    .spawn()
                    .unwrap()
            })
            .into();
        for child in children {
            let (code, _, err) = finish(child.wait_with_output().unwrap());
            assert_eq!(code, 0, "{err}");
        }
        refused(&["assemble", bundle.to_str().unwrap()], &["not built", "L00.attn"]);
        // The scheduler's index names the missing part; then the same part runs again.
        for reused in [false, true] {
            let mut args = arguments(&bundle, &path, &["--shard", "3"]);
            args.push("--json");
            let (code, out, err) = finish(anemoe(&args).env("SLURM_ARRAY_TASK_ID", "0").output().unwrap());
            assert_eq!(code, 0, "{err}");
            let report: serde_json::Value = serde_json::from_str(&out).unwrap();
            let shards = report["shards"].as_u64().unwrap();
            assert_eq!(report["reused"], if reused { shards } else { 0 }, "{report}");
        }
        let report = json(0, &["assemble", bundle.to_str().unwrap()]);
        assert_eq!(report["shards"].as_u64().unwrap(), report["reused"].as_u64().unwrap());
        assert!(contents(&bundle) == expected, "{model}");
        refused(&["assemble", bundle.to_str().unwrap()], &["complete already"]);
    }
}

/// Checks that a changed or missing shard is not taken, and that its part builds it again.
#[test]
fn damage_between_parts_is_found() {
    let dir = tempfile::tempdir().unwrap();
    let model = fixture("tiny-zaya");
    let expected = whole(dir.path(), "tiny-zaya");
    let bundle = dir.path().join("parts");
    for part in ["0/2", "1/2"] {
        let (code, _, err) = run(&arguments(&bundle, &model, &["--shard", part, "--skip-gates"]));
        assert_eq!(code, 0, "{err}");
    }
    let weights = |shard: &str| {
        bundle.join(format!("shards/{shard}.mlpackage/Data/com.apple.CoreML/weights/weight.bin"))
    };
    let mut bytes = std::fs::read(weights("L02.moe")).unwrap();
    *bytes.last_mut().unwrap() ^= 1;
    std::fs::write(weights("L02.moe"), bytes).unwrap();
    refused(
        &["assemble", bundle.to_str().unwrap()],
        &["1 of 17 shards are missing or have other bytes", "L02.moe"],
    );
    std::fs::remove_dir_all(bundle.join("shards/L03.attn.mlpackage")).unwrap();
    refused(&["assemble", bundle.to_str().unwrap()], &["2 of 17 shards are missing", "L02.moe, L03.attn"]);
    std::fs::write(bundle.join("embed.bin"), b"x").unwrap();
    for part in ["1/2", "2/2"] {
        let (code, _, err) = run(&arguments(&bundle, &model, &["--shard", part, "--skip-gates"]));
        assert_eq!(code, 0, "{err}");
    }
    json(0, &["assemble", bundle.to_str().unwrap()]);
    assert!(contents(&bundle) == expected);
}

#[test]
fn parts_that_cannot_be() {
    let dir = tempfile::tempdir().unwrap();
    let model = fixture("tiny-zaya");
    let bundle = dir.path().join("parts");
    for wrong in ["4/3", "0/0", "x", "1/2/3", "-1/2"] {
        let args = arguments(&bundle, &model, &[]);
        let shard = format!("--shard={wrong}");
        let mut args: Vec<&str> = args;
        args.push(&shard);
        refused(&args, &["I/N"]);
    }
    refused(&arguments(&bundle, &model, &["--shard", "3"]), &["SLURM_ARRAY_TASK_ID"]);
    assert!(!bundle.exists());
    refused(&["assemble", dir.path().to_str().unwrap()], &["an empty folder"]);
    // Another plan in the same folder.
    let (code, _, err) = run(&arguments(&bundle, &model, &["--shard", "0/2"]));
    assert_eq!(code, 0, "{err}");
    refused(&arguments(&bundle, &model, &["--shard", "1/2", "--max-context", "64"]), &["other options"]);
    // A damaged plan.
    std::fs::write(bundle.join(".anemoe-build/plan.json"), b"{").unwrap();
    refused(&["assemble", bundle.to_str().unwrap()], &["plan.json"]);
}
