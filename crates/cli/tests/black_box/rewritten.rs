//! Packages that systems and other tools have touched: files of the system and rewritten packages are no damage, other
//! programs and other weights are.

use crate::common::{anemoe, build, finish, fixture, json, refused};
use std::fs;
use std::path::{Path, PathBuf};

const PACKAGE: &str = "shards/L00.attn.mlpackage";
const MODEL: &str = "Data/com.apple.CoreML/model.mlmodel";
const WEIGHTS: &str = "Data/com.apple.CoreML/weights/weight.bin";
const NAMED: &str = "rewritten by another tool, same program and weights";

fn bundle(dir: &Path) -> PathBuf {
    let bundle = dir.join("b.anemoe");
    build(&fixture("tiny-gemma4-moe"), &bundle, &["--quant", "lut4", "--tokens", "1,4"]);
    bundle
}

/// Checks that the commands that verify a bundle accept it; returns their messages about rewritten packages.
fn accepted(bundle: &Path, cache: &Path) -> Vec<String> {
    let golden = fixture("tiny-gemma4-moe").join("golden.npz");
    let (b, golden) = (bundle.to_str().unwrap(), golden.to_str().unwrap());
    let mut said = Vec::new();
    for args in [
        vec!["check", b, "--json"],
        vec!["validate", b, "--golden", golden, "--min-cosine", "0.5", "--json"],
        vec!["generate", b, "--prompt-ids", "2,42", "--max-new", "2", "--json"],
    ] {
        // A cache of its own: another test may have remembered hashes on this machine.
        let (code, _, err) = finish(anemoe(&args).env("XDG_CACHE_HOME", cache).output().unwrap());
        // A gate may fail, since the model has random weights.
        assert!(code == 0 || code == 1 && args[0] != "generate", "{args:?}: {err}");
        said.extend(err.lines().filter(|line| line.contains(NAMED)).map(String::from));
    }
    said
}

#[test]
fn files_that_a_system_leaves_are_no_part_of_a_bundle() {
    let dir = tempfile::tempdir().unwrap();
    let bundle = bundle(dir.path());
    for place in
        ["", "shards", PACKAGE, &format!("{PACKAGE}/Data"), &format!("{PACKAGE}/Data/com.apple.CoreML")]
    {
        fs::write(bundle.join(place).join(".DS_Store"), "Bud1").unwrap();
    }
    assert_eq!(accepted(&bundle, dir.path()), Vec::<String>::new());
    // A package that is checked by itself is accepted, too.
    let package = bundle.join(PACKAGE);
    let (code, _, err) = finish(anemoe(&["check", package.to_str().unwrap()]).output().unwrap());
    assert!(code < 2, "{err}");
}

#[test]
fn packages_that_another_tool_wrote_anew_are_named_and_accepted() {
    let dir = tempfile::tempdir().unwrap();
    let bundle = bundle(dir.path());
    assert_eq!(accepted(&bundle, dir.path()), Vec::<String>::new());
    let (manifest, model) = (bundle.join(PACKAGE).join("Manifest.json"), bundle.join(PACKAGE).join(MODEL));
    let kept = [fs::read(&manifest).unwrap(), fs::read(&model).unwrap()];

    // The manifest is written without blanks, and with its keys in another order.
    let value: serde_json::Value = serde_json::from_slice(&kept[0]).unwrap();
    let parts = ["rootModelIdentifier", "itemInfoEntries", "fileFormatVersion"];
    let parts = parts.map(|key| format!("{key:?}:{}", value[key]));
    fs::write(&manifest, format!("{{{}}}", parts.join(","))).unwrap();
    let said = accepted(&bundle, dir.path());
    assert_eq!(said.len(), 3, "{said:?}");
    assert!(said.iter().all(|line| line.contains("L00.attn.mlpackage")), "{said:?}");

    // The version of the specification moves from the beginning of the protobuf to its end.
    assert_eq!(kept[1][0], 0x08, "field 1, a number");
    let mut moved = kept[1][2..].to_vec();
    moved.extend(&kept[1][..2]);
    fs::write(&model, &moved).unwrap();
    assert_eq!(accepted(&bundle, dir.path()).len(), 3);
    fs::write(&manifest, &kept[0]).unwrap();
    assert_eq!(accepted(&bundle, dir.path()).len(), 3);

    fs::write(&model, &kept[1]).unwrap();
    assert_eq!(accepted(&bundle, dir.path()), Vec::<String>::new());
}

/// Encodes a field of a protobuf that holds bytes.
fn field(number: u32, bytes: &[u8]) -> Vec<u8> {
    let mut out = Vec::new();
    for mut n in [u64::from(number << 3 | 2), bytes.len() as u64] {
        while n > 127 {
            out.push(n as u8 | 128);
            n >>= 7;
        }
        out.push(n as u8);
    }
    [out, bytes.to_vec()].concat()
}

#[test]
fn packages_that_another_tool_described_are_named_and_accepted() {
    let dir = tempfile::tempdir().unwrap();
    let bundle = bundle(dir.path());
    let model = bundle.join(PACKAGE).join(MODEL);
    let kept = fs::read(&model).unwrap();
    // `userDefined["note"] = "looked at"` and an author, in the metadata of the description; protobuf merges the parts of a
    // message.
    let entry = [field(1, b"note"), field(2, b"looked at")].concat();
    let metadata = [field(3, b"somebody"), field(100, &entry)].concat();
    let described = [kept.clone(), field(2, &field(100, &metadata))].concat();
    fs::write(&model, &described).unwrap();
    let said = accepted(&bundle, dir.path());
    assert_eq!(said.len(), 3, "{said:?}");
    assert!(said.iter().all(|line| line.contains("L00.attn.mlpackage")), "{said:?}");
    // Together with such metadata, another program is still damage.
    let b = bundle.to_str().unwrap();
    let mut other = described.clone();
    let places: Vec<usize> = (0..kept.len() - 8).filter(|&i| &kept[i..i + 8] == b"rope_cos").collect();
    places.iter().for_each(|&i| other[i..i + 8].copy_from_slice(b"rope_kos"));
    assert!(!places.is_empty());
    fs::write(&model, &other).unwrap();
    refused(&["check", b], &["L00.attn.mlpackage"]);
    fs::write(&model, &kept).unwrap();
    assert_eq!(accepted(&bundle, dir.path()), Vec::<String>::new());
}

#[test]
fn other_weights_and_other_programs_are_damage() {
    let dir = tempfile::tempdir().unwrap();
    let bundle = bundle(dir.path());
    let b = bundle.to_str().unwrap();
    for (file, change) in [(WEIGHTS, 4000), (MODEL, 0)] {
        let path = bundle.join(PACKAGE).join(file);
        let kept = fs::read(&path).unwrap();
        let mut other = kept.clone();
        match change {
            // An input has another name.
            0 => {
                let at = kept.windows(8).position(|w| w == b"rope_cos").unwrap();
                kept.windows(8).enumerate().skip(at).filter(|(_, w)| *w == b"rope_cos").for_each(|(i, _)| {
                    other[i..i + 8].copy_from_slice(b"rope_kos");
                });
            }
            at => other[at] ^= 1,
        }
        fs::write(&path, &other).unwrap();
        refused(&["check", b], &["L00.attn.mlpackage", "SHA-256"]);
        // The same, together with a manifest in another form.
        let manifest = bundle.join(PACKAGE).join("Manifest.json");
        let own = fs::read(&manifest).unwrap();
        let value: serde_json::Value = serde_json::from_slice(&own).unwrap();
        fs::write(&manifest, value.to_string()).unwrap();
        refused(&["check", b], &["L00.attn.mlpackage", "size"]);
        fs::write(&manifest, own).unwrap();
        fs::write(&path, &kept).unwrap();
    }
    json(0, &["generate", b, "--prompt-ids", "2,42", "--max-new", "1"]);
}
