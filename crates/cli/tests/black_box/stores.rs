//! Bundles and parts of builds in a store. Stores on servers have tests in `crates/hub`.

use crate::common::*;
use serde_json::{Value, json as value};
use std::fs;

/// A finished bundle, a store and other places in one folder.
struct Places {
    dir: Place,
    bundle: Place,
    store: Place,
    target: Place,
}

impl Places {
    fn new() -> Places {
        let dir = folder();
        let at = |name: &str| dir.join(name);
        copy(&built("tiny-zaya", "--tokens 1"), &at("a.anemoe"));
        Places { bundle: at("a.anemoe"), store: at("store"), target: at("pulled.anemoe"), dir }
    }

    fn push(&self) -> String {
        format!("push {} {}", self.bundle, self.store)
    }

    fn pull(&self) -> String {
        format!("pull {} {} --name a.anemoe", self.store, self.target)
    }

    fn has_arrived(&self) -> bool {
        contents(&self.target) == contents(&self.bundle)
    }
}

#[test]
fn a_bundle_goes_through_a_folder_and_what_is_there_is_not_sent_again() {
    let places = Places::new();
    let Places { dir, bundle, store, target } = &places;
    let first = json(0, places.push());
    assert_eq!(count(&first["bytes"]), count(&first["bytes_sent"]) + count(&first["bytes_there"]));
    assert!(count(&first["files_sent"]) > 17 && first["name"] == "a.anemoe", "{first}");
    let again = json(0, places.push());
    has(&again, value!({"files_sent": 0, "bytes_sent": 0}));
    // Another bundle with the same files, except for its tokenizer.
    let other = dir.join("b.anemoe");
    copy(bundle, &other);
    fs::write(other.join("tokenizer.json"), "{}").unwrap();
    assert_eq!(json(0, format!("push {other} file://{store} --jobs 1"))["files_sent"], 1);
    assert_eq!(json(0, places.pull())["bytes"], first["bytes"]);
    assert!(places.has_arrived());
    let left: Vec<_> = fs::read_dir(dir).unwrap().map(|e| e.unwrap().file_name()).collect();
    assert!(left.iter().all(|n| !n.to_string_lossy().starts_with('.')), "{left:?}");
    // All of it moves on one thread, where no other may start (which root always may).
    #[cfg(target_os = "linux")]
    for line in [format!("push {bundle} {dir}/alone"), format!("pull {store} {dir}/alone.anemoe")] {
        let line = format!("{line} --name a.anemoe --jobs 4");
        let (code, _, err) = finish(&mut in_shell("ulimit -u 1; exec \"$0\" \"$@\"", &line));
        assert_eq!(code, 0, "{line}: {err}");
    }
    // The same pull again finds all files in place, also when the bundle's journal has grown.
    passes(format!("check {target}"));
    assert_eq!(json(0, places.pull())["bytes_fetched"], 0);
    refused(format!("pull {store} {target} --name b.anemoe"), &["is not the bundle of the store"]);
    refused(format!("pull {store} {dir}/c"), &["no bundle `c`", "a.anemoe, b.anemoe"]);
    refused(format!("pull {dir}/nothing {dir}/c"), &["no bundle `c`"]);
    assert!(!dir.join("nothing").exists() && !dir.join("c").exists());
}

#[test]
fn damage_in_a_store_is_found_and_mended() {
    let places = Places::new();
    passes(places.push());
    let objects = contents(&places.store.join("objects"));
    let (largest, right) = objects.into_iter().max_by_key(|(_, bytes)| bytes.len()).unwrap();
    let largest = places.store.join("objects").join(largest);
    let sent = |more: &str| json(0, format!("{} {more}", places.push()))["files_sent"].clone();
    flip(&largest);
    refused(places.pull(), &[&largest.to_string(), "its hash is", "--verify"]);
    assert!(!places.target.exists());
    assert_eq!((sent(""), sent("--verify")), (0.into(), 1.into()));
    // Files that have arrived stay, and only the rest is fetched.
    let rest = json(0, places.pull());
    has(&rest, value!({"files_fetched": 1, "bytes_fetched": right.len()}));
    assert!(places.has_arrived());
    // A short object is found without being read, and so is a missing one.
    fs::remove_dir_all(&places.target).unwrap();
    fs::write(&largest, &right[1..]).unwrap();
    refused(places.pull(), &["bytes where the manifest says"]);
    fs::remove_file(&largest).unwrap();
    refused(places.pull(), &["it is not there"]);
    assert_eq!(sent(""), 1);
    passes(places.pull());
    // A damaged bundle is not sent.
    flip(places.bundle.join("embed.bin"));
    refused(places.push(), &["embed.bin", "SHA-256"]);
}

#[test]
fn hostile_manifests_write_nothing() {
    let mut places = Places::new();
    fs::create_dir(places.dir.join("in")).unwrap();
    places.target = places.dir.join("in/pulled.anemoe");
    passes(places.push());
    let path = places.store.join("bundles/a.anemoe/bundle.json");
    let written = read_json(&path);
    // As older versions wrote it: what follows would be refused by the hash of the list alone.
    let mut right = written.clone();
    right.as_object_mut().unwrap().remove("files_sha256");
    let before = contents(&places.bundle);
    let hostile = |change: &dyn Fn(&mut Value), says: &str| {
        let mut manifest = right.clone();
        change(&mut manifest);
        fs::write(&path, manifest.to_string()).unwrap();
        refused(places.pull(), &[says]);
        let evil = ["evil", "in/evil", "in/pulled.anemoe"].map(|name| places.dir.join(name));
        assert!(!evil.iter().any(|path| path.exists()) && contents(&places.bundle) == before, "{says}");
    };
    hostile(&|m| m["files"][0]["path"] = "../../evil".into(), "is not a path in a bundle");
    hostile(&|m| m["files"][0]["bytes"] = (1u64 << 60).into(), "and its disk has");
    // The contract names a file that the manifest lacks: all other files are fetched, and deleted again.
    let without = |m: &mut Value, part: &str| {
        m["files"].as_array_mut().unwrap().retain(|f| !text(&f["path"]).contains(part));
    };
    for (part, says) in [
        ("embed.bin", "lacks embed.bin"),
        ("L00.attn.mlpackage/Manifest", "L00.attn.mlpackage"),
        ("L00.attn.mlpackage", "L00.attn.mlpackage"),
        ("L00.attn.mlpackage/Data", "L00.attn.mlpackage"),
        ("model.mlmodel", "L00.attn.mlpackage"),
        ("weight.bin", ".mlpackage: size: "),
    ] {
        hostile(&|m| without(m, part), says);
    }
    // The contract does not name this file; the hash of the list does not allow that it is left out.
    let of_list = |m: &mut Value| {
        *m = written.clone();
        without(m, "generation_config.json");
    };
    hostile(&of_list, "`files_sha256`");
    // Nor does a folder that lacks the same file count as the bundle of the store.
    without(&mut right, "weight.bin");
    fs::write(&path, right.to_string()).unwrap();
    copy(&places.bundle, &places.target);
    for (file, _) in contents(&places.target).iter().filter(|(file, _)| file.ends_with("weight.bin")) {
        fs::remove_file(places.target.join(file)).unwrap();
    }
    refused(places.pull(), &["no whole bundle"]);
}

#[cfg(unix)]
#[test]
fn links_are_not_followed() {
    use std::os::unix::fs::symlink;
    let (places, other) = (Places::new(), folder());
    passes(places.push());
    let staged = places.dir.join(".pulled.anemoe.anemoe-pull");
    symlink(&other, &staged).unwrap();
    refused(places.pull(), &["a link"]);
    fs::remove_file(&staged).unwrap();
    fs::create_dir_all(staged.join("files")).unwrap();
    symlink(&other, staged.join("files/shards")).unwrap();
    refused(places.pull(), &["a link"]);
    assert!(fs::read_dir(&other).unwrap().next().is_none());
    // A link in the bundle that leads out of it is not sent.
    fs::write(other.join("vocabulary"), "secret").unwrap();
    symlink(other.join("vocabulary"), places.bundle.join("tokenizer.json")).unwrap();
    refused(places.push(), &["tokenizer.json", "a link"]);
}

/// Checks that three parts on three machines, of which one is killed and loses its disk, give the bytes of one build.
#[test]
fn parts_meet_in_a_store() {
    let (dir, model) = (folder(), fixture("tiny-zaya"));
    let (store, whole, assembled) =
        (dir.join("store"), dir.join("whole"), dir.join("elsewhere/whole.anemoe"));
    passes(format!("build {model} -o {whole} --tokens 1"));
    let part = |i: usize, more: &str| {
        let out = dir.join(format!("machine-{i}/part.anemoe"));
        format!("build {model} -o {out} --shard {i}/3 --push {store} --name whole --jobs 1 --tokens 1 {more}")
    };
    let manifest = store.join("bundles/whole/part-1of3.json");
    // One machine is killed once it has sent something.
    let mut child = start(&mut anemoe(part(1, "")));
    wait_for("manifest", || manifest.exists());
    let early = child.try_wait().unwrap().is_some();
    let _ = child.kill();
    child.wait().unwrap();
    let sent = read_json(&manifest);
    fs::remove_dir_all(dir.join("machine-1")).unwrap();
    let assemble = format!("assemble {assembled} --pull {store} --name whole");
    if !early {
        assert_eq!(sent["part"]["finished"], false);
        refused(&assemble, &["3 of 3 parts are not there or not finished (0/3, 1/3, 2/3)"]);
    }
    refused(format!("pull {store} {assembled} --name whole"), &["in parts only (1/3)", "assemble"]);
    // All machines run at the same time.
    let children = [0, 1, 2].map(|i| start(&mut anemoe(part(i, "--json"))));
    for (i, child) in children.into_iter().enumerate() {
        let (code, out, err) = ended(child.wait_with_output().unwrap());
        assert_eq!(code, 0, "{err}");
        let report: Value = serde_json::from_str(&out).unwrap();
        assert!(count(&report["push"]["files"]) > 5, "{report}");
        // Shards that the killed machine had sent are not built again.
        let is_reused = || count(&report["reused"]) > 0 && err.contains("of this part were in");
        assert!(i != 1 || early || is_reused(), "{report}\n{err}");
    }
    let report = json(0, &assemble);
    assert_eq!(report["shards"], report["reused"]);
    assert!(contents(&assembled) == contents(&whole));
    // The journal of the whole has the journals of all parts.
    let journal = json(0, format!("journal show {assembled}")).to_string();
    assert!((0..3).all(|i| journal.contains(&format!("\"{i}/3\""))), "{journal}");
    refused(&assemble, &["complete already"]);
    // A push of the whole bundle sends only its contract and its journal.
    assert_eq!(json(0, format!("push {assembled} {store} --name whole"))["files_sent"], 2);
    // Parts of another build are refused.
    fs::remove_dir_all(dir.join("machine-0")).unwrap();
    refused(part(0, "--max-context 64"), &["of a build with other options", "--name"]);
    assert!(!dir.join("machine-0/part.anemoe").exists());
}

/// Checks that folders of parts are pushed by hand, and that an assembly goes on that had begun with fewer parts.
#[test]
fn folders_of_parts_are_pushed_and_assembled_in_two_steps() {
    let (dir, model) = (folder(), fixture("tiny-zaya"));
    for (name, part) in [("a", "0/2"), ("b", "1/2")] {
        passes(format!("build {model} -o {dir}/{name} --tokens 1 --shard {part} --skip-gates"));
        let report = json(0, format!("push {dir}/{name} {dir}/store --name x"));
        assert_eq!(report["parts"][0]["finished"], true, "{report}");
    }
    // The assembly goes into the folder of one of the parts.
    passes(format!("assemble {dir}/a --pull {dir}/store --name x"));
    assert!(contents(&dir.join("a")) == contents(&built("tiny-zaya", "--tokens 1")));
    refused(format!("assemble {dir}/y --pull {dir}/store"), &["no part of it is there"]);
}

#[test]
fn stores_that_are_none() {
    let Places { dir, bundle, .. } = Places::new();
    fs::write(dir.join("file"), "x").unwrap();
    for (store, says) in [
        ("ftp://models/x".to_string(), &["ftp://", "s3://BUCKET/PREFIX"][..]),
        ("az://models/x".into(), &["AZURE_STORAGE_ACCOUNT_NAME is not set"]),
        ("s3://x".into(), &["is not s3://BUCKET/PREFIX"]),
        (format!("{dir}/file"), &["is not a folder"]),
        // A store in the bundle would become a part of the bundle.
        (bundle.to_string(), &["lies in the bundle"]),
        (format!("{bundle}/new"), &["lies in the bundle"]),
        (format!("{bundle}/shards"), &["lies in the bundle"]),
    ] {
        refused(format!("push {bundle} {store}"), says);
    }
    for name in ["../x", "a/b", ".x", "''"] {
        refused(format!("push {bundle} {dir} --name={name}"), &["no name for a bundle"]);
    }
    refused(format!("push {dir} {dir}/file"), &["bundle"]);
    assert!(!bundle.join("objects").exists() && !bundle.join("new").exists());
    refused(format!("assemble {bundle} --name x"), &["--pull"]);
    // Plain HTTP.
    let mut command = anemoe(format!("pull s3://models {dir}/x"));
    command.env_remove("AWS_ALLOW_HTTP").env("AWS_ENDPOINT_URL", "http://127.0.0.1:9");
    refuses(&mut command, &["AWS_ALLOW_HTTP"]);
}
