//! `anemoe doctor`: what it lists, and what it deletes.

use crate::common::{anemoe_as_is, finish};
use serde_json::Value;
use std::fs;
use std::path::Path;

fn doctor(cache: &Path, args: &[&str]) -> (i32, String, String) {
    let mut command = anemoe_as_is(&[&["doctor"], args].concat());
    command.env("XDG_CACHE_HOME", cache).env("HF_HOME", cache.join("hf")).stdin(std::process::Stdio::null());
    finish(command.output().unwrap())
}

fn json(cache: &Path, args: &[&str]) -> Value {
    let (code, out, err) = doctor(cache, &[args, &["--json"]].concat());
    assert_eq!(code, 0, "{out}\n{err}");
    serde_json::from_str(&out).unwrap()
}

#[test]
fn the_machine_is_described_everywhere() {
    let dir = tempfile::tempdir().unwrap();
    let found = json(dir.path(), &[]);
    assert!(found["read_gb_s"].as_f64().unwrap() > 0.0 && found["threads"].as_u64().unwrap() > 0);
    assert!(!found["instructions"].as_array().unwrap().is_empty());
    assert!(found["disks"].as_array().unwrap().iter().all(|d| d["free_bytes"].as_u64().is_some()));
    assert!(found["machine"]["os"].is_string());
    if !cfg!(target_os = "macos") {
        assert_eq!(found["core_ml"]["available"], false);
    }
    let (code, out, _) = doctor(dir.path(), &["--quick"]);
    assert!(
        code == 0 && out.contains("system ") && out.contains("memory ") && !out.contains("GB/s"),
        "{out}"
    );
}

#[test]
fn only_caches_that_are_named_and_ours_are_deleted() {
    let dir = tempfile::tempdir().unwrap();
    let compiled = dir.path().join("anemoe/compiled");
    for (system, file) in
        [("24A1-M1", "aa.mlmodelc/model"), ("24B2-M2", "bb.mlmodelc/model"), ("mine", "notes.txt")]
    {
        let file = compiled.join(system).join(file);
        fs::create_dir_all(file.parent().unwrap()).unwrap();
        fs::write(file, [0; 1000]).unwrap();
    }
    let hub = dir.path().join("hf/hub/models--a--b");
    fs::create_dir_all(&hub).unwrap();
    fs::write(hub.join("x"), [0; 500]).unwrap();
    let found = json(dir.path(), &["--quick"]);
    let of = |name: &str| {
        let caches = found["caches"].as_array().unwrap();
        let cache = caches.iter().find(|c| c["name"] == name).unwrap_or_else(|| panic!("{name}: {caches:?}"));
        (cache["bytes"].as_u64().unwrap(), cache["can_delete"].as_bool().unwrap())
    };
    assert_eq!(of("compiled/24A1-M1"), (1000, true));
    assert_eq!(of("compiled/mine"), (1000, false), "files of somebody else");
    assert_eq!(of("checkpoints"), (500, false));
    let (code, _, err) = doctor(dir.path(), &["--clean"]);
    assert!(code == 2 && err.contains("nothing was deleted"), "{err}");
    let (code, _, err) = doctor(dir.path(), &["--clean", "--yes", "--only", "checkpoints"]);
    assert!(code == 2 && err.contains("compiled/24A1-M1"), "{err}");
    let cleaned = json(dir.path(), &["--clean", "--yes", "--only", "compiled/24A1-M1"]);
    assert_eq!(cleaned["deleted"], serde_json::json!(["compiled/24A1-M1"]));
    assert!(!compiled.join("24A1-M1").exists() && compiled.join("24B2-M2").exists());
    let cleaned = json(dir.path(), &["--clean", "--yes"]);
    assert_eq!(cleaned["deleted"], serde_json::json!(["compiled/24B2-M2"]));
    assert!(compiled.join("mine/notes.txt").exists() && hub.join("x").exists());
}

#[cfg(unix)]
#[test]
fn a_link_is_not_followed() {
    let dir = tempfile::tempdir().unwrap();
    let aside = dir.path().join("aside");
    fs::create_dir_all(aside.join("cc.mlmodelc")).unwrap();
    let compiled = dir.path().join("anemoe/compiled");
    fs::create_dir_all(&compiled).unwrap();
    std::os::unix::fs::symlink(&aside, compiled.join("24C3-M3")).unwrap();
    assert_eq!(json(dir.path(), &["--clean", "--yes"])["deleted"], serde_json::json!([]));
    assert!(aside.join("cc.mlmodelc").exists());
}
