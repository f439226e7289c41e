//! `anemoe doctor`: what it lists, and what it deletes.

use crate::common::*;
use serde_json::{Value, json as value};
use std::fs;
use std::process::Command;

fn doctor(cache: &Place, options: &str) -> Command {
    let mut command = anemoe(format!("doctor {options}"));
    command.env("XDG_CACHE_HOME", &**cache).env("HF_HOME", cache.join("hf").as_os_str());
    command.stdin(std::process::Stdio::null());
    command
}

fn json(cache: &Place, options: &str) -> Value {
    json_of(0, &mut doctor(cache, options))
}

#[test]
fn the_machine_is_described_everywhere() {
    let dir = folder();
    let found = json(&dir, "");
    assert!(number(&found["read_gb_s"]) > 0.0 && count(&found["threads"]) > 0);
    assert!(!list(&found["instructions"]).is_empty() && found["machine"]["os"].is_string());
    assert!(list(&found["disks"]).iter().all(|d| d["free_bytes"].is_u64()));
    if !cfg!(target_os = "macos") {
        assert_eq!(found["core_ml"]["available"], false);
    }
    let (code, out, _) = finish(&mut doctor(&dir, "--quick"));
    let has = |word: &str| out.contains(word);
    assert!(code == 0 && has("system ") && has("memory ") && !has("GB/s"), "{out}");
}

#[test]
fn only_caches_that_are_named_and_ours_are_deleted() {
    let dir = folder();
    let compiled = dir.join("anemoe/compiled");
    for file in ["24A1-M1/aa.mlmodelc/model", "24B2-M2/bb.mlmodelc/model", "mine/notes.txt"] {
        fs::create_dir_all(compiled.join(file).parent().unwrap()).unwrap();
        fs::write(compiled.join(file), [0; 1000]).unwrap();
    }
    let hub = dir.join("hf/hub/models--a--b");
    fs::create_dir_all(&hub).unwrap();
    fs::write(hub.join("x"), [0; 500]).unwrap();
    let found = json(&dir, "--quick");
    for (name, bytes, can_delete) in
        [("compiled/24A1-M1", 1000, true), ("compiled/mine", 1000, false), ("checkpoints", 500, false)]
    {
        let at = each(&found["caches"], "name").position(|n| n == name).unwrap();
        let cache = &found["caches"][at];
        has(cache, value!({"bytes": bytes, "can_delete": can_delete}));
    }
    refuses(&mut doctor(&dir, "--clean"), &["nothing was deleted"]);
    refuses(&mut doctor(&dir, "--clean --yes --only checkpoints"), &["compiled/24A1-M1"]);
    let cleaned = json(&dir, "--clean --yes --only compiled/24A1-M1");
    assert_eq!(cleaned["deleted"], value!(["compiled/24A1-M1"]));
    assert!(!compiled.join("24A1-M1").exists() && compiled.join("24B2-M2").exists());
    // A link is not followed.
    #[cfg(unix)]
    std::os::unix::fs::symlink(&hub, compiled.join("24C3-M3")).unwrap();
    assert_eq!(json(&dir, "--clean --yes")["deleted"], value!(["compiled/24B2-M2"]));
    assert!(compiled.join("mine/notes.txt").exists() && hub.join("x").exists());
}
