//! `anemoe compile` on the fake Core ML: models that are kept, compiled again, or fail with a crash, a hang or a refusal.

mod common;

use common::Sandbox;
use std::fs;
use std::path::PathBuf;

/// Returns the folders of compiled models in a sandbox's cache, sorted.
fn compiled(sandbox: &Sandbox) -> Vec<PathBuf> {
    let folder = sandbox.path("cache/anemoe/compiled/sim-fake");
    let Ok(entries) = fs::read_dir(folder) else { return Vec::new() };
    let mut all: Vec<PathBuf> = entries.map(|e| e.unwrap().path()).collect();
    all.retain(|path| path.is_dir());
    all.sort();
    all
}

#[test]
fn what_is_compiled_stays_and_what_is_stale_is_made_again() {
    let sandbox = Sandbox::new();
    let bundle = sandbox.build("tiny-gemma4-moe", &[]);
    let b = bundle.to_str().unwrap();
    let first = sandbox.json(0, &["compile", b]);
    let n = first["compiled"].as_u64().unwrap();
    assert_eq!((n as usize, first["already_compiled"].as_u64()), (compiled(&sandbox).len(), Some(0)));
    for package in first["packages"].as_array().unwrap() {
        assert!(package["compiled_bytes"].as_u64().unwrap() > 0 && package["seconds"].as_f64().is_some());
        assert!(!package["load_seconds"].as_object().unwrap().is_empty(), "{package}");
    }
    let second = sandbox.json(0, &["compile", b]);
    assert_eq!((second["compiled"].as_u64(), second["already_compiled"].as_u64()), (Some(0), Some(n)));
    // One model is refused with -14 from now on, like a model of an older system.
    fs::write(compiled(&sandbox)[0].join("stale"), b"").unwrap();
    let third = sandbox.json(0, &["compile", b]);
    assert_eq!((third["compiled"].as_u64(), third["compiled_again"].as_u64()), (Some(1), Some(1)));
    let again = sandbox.json(0, &["compile", b, "--again"]);
    assert_eq!(again["compiled"].as_u64(), Some(n));
    // Models of another system are left as they are, and not used.
    let own = sandbox.path("cache/anemoe/compiled/sim-fake");
    let other = sandbox.path("cache/anemoe/compiled/24A335-Apple-M4");
    fs::rename(&own, &other).unwrap();
    let (code, out, _) = sandbox.run(&["compile", b]);
    assert!(code == 0 && out.contains(&format!("{n} were compiled for another system or chip")), "{out}");
    assert!(own.is_dir() && other.is_dir());
}

#[test]
fn one_package_that_fails_costs_only_itself_and_says_what_to_try() {
    let sandbox = Sandbox::new();
    let bundle = sandbox.build("tiny-gemma4-moe", &[]);
    let b = bundle.to_str().unwrap();
    let all = sandbox.json(0, &["compile", b, "--compiled", sandbox.path("aside").to_str().unwrap()]);
    let n = all["compiled"].as_u64().unwrap();
    for (fault, step, end, form, says) in [
        ("not-compiled", "compile", "refused", Some("--cache host"), "planted"),
        ("compile-crash", "compile", "crashed", Some("--cache host"), "signal 6"),
        ("compile-hang", "compile", "hung", Some("--attention per-head"), "--timeout"),
        ("no-plan", "load", "refused", Some("--cache host"), "-14"),
        ("load-exception", "load", "refused", Some("--cache host"), "planted at load"),
        ("no-answer", "load", "refused", Some("--cache host"), "did not answer"),
        ("load-crash", "load", "crashed", Some("--cache host"), "signal 6"),
        ("load-hang", "load", "hung", Some("--cache host"), "--timeout"),
    ] {
        sandbox.plant(&format!("L01.attn {fault}"));
        let report = sandbox.json(1, &["compile", b, "--timeout", "3"]);
        let failures = report["failures"].as_array().unwrap();
        assert_eq!((failures.len(), report["failed"].as_u64()), (1, Some(1)), "{fault}");
        let failure = &failures[0];
        assert_eq!((failure["what"].as_str(), failure["step"].as_str()), (Some("L01.attn"), Some(step)));
        assert_eq!((failure["end"].as_str(), failure["try_form"].as_str()), (Some(end), form), "{failure}");
        assert!(failure["message"].as_str().unwrap().contains(says), "{failure}");
        assert!(!failure["causes"].as_array().unwrap().is_empty());
        let there = compiled(&sandbox).len() as u64;
        assert_eq!(there, if step == "load" { n } else { n - 1 }, "{fault}: nothing half-made stays");
        let (_, out, err) = sandbox.run(&["compile", b, "--timeout", "3"]);
        assert!(err.contains("likely: ") && err.contains("L01.attn: ") && out.contains("1 failed"), "{err}");
        fs::remove_dir_all(sandbox.path("cache/anemoe/compiled")).unwrap();
    }
    sandbox.plant("");
    assert_eq!(sandbox.json(0, &["compile", b])["compiled"].as_u64(), Some(n));
}

#[test]
fn no_load_leaves_functions_alone() {
    let sandbox = Sandbox::new();
    let bundle = sandbox.build("tiny-gemma4-moe", &[]);
    sandbox.plant("attn no-plan");
    let report = sandbox.json(0, &["compile", bundle.to_str().unwrap(), "--no-load"]);
    assert!(report["packages"][0]["load_seconds"].as_object().unwrap().is_empty());
}

/// A path on a file system without free space, like a full disk.
const FULL: &str = "/proc/anemoe-full";

#[cfg(target_os = "linux")]
#[test]
fn what_does_not_fit_the_disk_is_refused_before_anything_is_made() {
    let sandbox = Sandbox::new();
    let bundle = sandbox.build("tiny-gemma4-moe", &[]);
    let b = bundle.to_str().unwrap();
    // A compiler that ended the process would fail with exit status 1 instead.
    sandbox.plant("mlpackage compile-crash");
    sandbox.refused(&["compile", b, "--compiled", FULL], &[FULL, "the compiled models of", "has 0 left"]);
    // Models that are there are not counted: nothing is missing, so no space is needed.
    sandbox.plant("");
    sandbox.json(0, &["compile", b]);
    let n = compiled(&sandbox).len();
    let chain: serde_json::Value =
        serde_json::from_slice(&fs::read(bundle.join("chain.json")).unwrap()).unwrap();
    for shard in chain["shards"].as_array().unwrap() {
        let place = sandbox.path("cache/anemoe/compiled/sim-fake");
        let made = place.join(format!("{}.mlmodelc", shard["sha256"].as_str().unwrap()));
        fs::rename(made, bundle.join(shard["file"].as_str().unwrap()).with_extension("mlmodelc")).unwrap();
    }
    let beside = sandbox.json(0, &["compile", b, "--compiled", FULL]);
    assert_eq!((beside["already_compiled"].as_u64(), beside["compiled"].as_u64()), (Some(n as u64), Some(0)));
}

#[test]
fn a_model_beside_its_package_is_used_and_left_alone() {
    let sandbox = Sandbox::new();
    let bundle = sandbox.build("tiny-gemma4-moe", &[]);
    let b = bundle.to_str().unwrap();
    let n = sandbox.json(0, &["compile", b])["compiled"].as_u64().unwrap();
    let chain: serde_json::Value =
        serde_json::from_slice(&fs::read(bundle.join("chain.json")).unwrap()).unwrap();
    let shard = &chain["shards"][0];
    let cache = sandbox.path("cache/anemoe/compiled/sim-fake");
    let hash = shard["sha256"].as_str().unwrap();
    let made = cache.join(format!("{hash}.mlmodelc"));
    let beside = bundle.join(shard["file"].as_str().unwrap()).with_extension("mlmodelc");
    fs::rename(&made, &beside).unwrap();
    let report = sandbox.json(0, &["compile", b]);
    assert_eq!((report["compiled"].as_u64(), report["already_compiled"].as_u64()), (Some(0), Some(n)));
    let of_first = &report["packages"][0];
    assert!(
        of_first["compiled_bytes"].as_u64() > Some(0) && of_first["load_seconds"].is_object(),
        "{of_first}"
    );
    assert!(!made.exists() && beside.exists(), "somebody else's model is not copied");
    sandbox.json(0, &["generate", b, "--prompt-ids", "1,2", "--max-new", "2", "--backend", "coreml"]);
    // A model beside the package that this system refuses gets a replacement in the cache, which is found first from then on.
    fs::write(beside.join("stale"), b"").unwrap();
    let report = sandbox.json(0, &["compile", b]);
    assert_eq!((report["compiled"].as_u64(), report["compiled_again"].as_u64()), (Some(1), Some(1)));
    assert!(made.exists() && beside.join("stale").exists(), "both are there");
    assert_eq!(sandbox.json(0, &["compile", b])["already_compiled"].as_u64(), Some(n));
    sandbox.json(0, &["generate", b, "--prompt-ids", "1,2", "--max-new", "2", "--backend", "coreml"]);
}
