//! Packages that systems and other tools have touched: files of the system and rewritten packages are no damage, other
//! programs and other weights are.

use crate::common::*;
use std::fs;

const PACKAGE: &str = "shards/L00.attn.mlpackage";

fn bundle() -> Place {
    built("tiny-gemma4-moe", "--tokens 1,4")
}

/// Checks that the commands that verify a bundle accept it, and that `times` of them name its rewritten package.
fn accepted(bundle: &Place, times: usize) {
    let (golden, cache) = (fixture("tiny-gemma4-moe/golden.npz"), folder());
    let mut said = Vec::new();
    for line in [
        format!("check {bundle} --json"),
        format!("validate {bundle} --golden {golden} --min-cosine 0.5 --json"),
        format!("generate {bundle} --prompt-ids 2,42 --max-new 2 --json"),
    ] {
        // A cache of its own: another test may have remembered hashes on this machine.
        let (code, _, err) = finish(anemoe(&line).env("XDG_CACHE_HOME", &*cache));
        // A gate may fail, since the model has random weights.
        assert!(code == 0 || code == 1 && !line.starts_with("generate"), "{line}: {err}");
        let named = "rewritten by another tool, same program and weights";
        said.extend(err.lines().filter(|line| line.contains(named)).map(String::from));
    }
    assert!(said.len() == times && said.iter().all(|line| line.contains("L00.attn.mlpackage")), "{said:?}");
}

/// Writes a manifest without blanks, and with its keys in another order.
fn rewrite_manifest(bundle: &Place) {
    let manifest = bundle.join(PACKAGE).join("Manifest.json");
    let value = read_json(&manifest);
    let parts = ["rootModelIdentifier", "itemInfoEntries", "fileFormatVersion"];
    let parts = parts.map(|key| format!("{key:?}:{}", value[key]));
    fs::write(&manifest, format!("{{{}}}", parts.join(","))).unwrap();
}

/// Changes the model of the package.
fn edit_model(bundle: &Place, edit: impl FnOnce(Vec<u8>) -> Vec<u8>) {
    let model = bundle.join(PACKAGE).join("Data/com.apple.CoreML/model.mlmodel");
    fs::write(&model, edit(fs::read(&model).unwrap())).unwrap();
}

/// Gives an input of the model another name.
fn rename_input(mut model: Vec<u8>) -> Vec<u8> {
    let places: Vec<usize> = (0..model.len() - 8).filter(|&i| &model[i..i + 8] == b"rope_cos").collect();
    assert!(!places.is_empty());
    places.iter().for_each(|&i| model[i..i + 8].copy_from_slice(b"rope_kos"));
    model
}

#[test]
fn files_that_a_system_leaves_are_no_part_of_a_bundle() {
    let bundle = bundle();
    for place in ["", "shards", PACKAGE, &format!("{PACKAGE}/Data/com.apple.CoreML")] {
        fs::write(bundle.join(place).join(".DS_Store"), "Bud1").unwrap();
    }
    accepted(&bundle, 0);
    // A package that is checked by itself is accepted, too.
    assert!(run(format!("check {bundle}/{PACKAGE}")).0 < 2);
}

#[test]
fn packages_that_another_tool_wrote_anew_are_named_and_accepted() {
    let bundle = bundle();
    rewrite_manifest(&bundle);
    accepted(&bundle, 3);
    // The version of the specification moves from the beginning of the protobuf to its end.
    edit_model(&bundle, |model| {
        assert_eq!(model[0], 0x08, "field 1, a number");
        [&model[2..], &model[..2]].concat()
    });
    accepted(&bundle, 3);
    // `userDefined["note"] = "looked at"` and an author, in the metadata of the description; protobuf merges the parts of a
    // message.
    let bundle = self::bundle();
    let entry = [field(1, b"note"), field(2, b"looked at")].concat();
    let metadata = [field(3, b"somebody"), field(100, &entry)].concat();
    edit_model(&bundle, |model| [model, field(2, &field(100, &metadata))].concat());
    accepted(&bundle, 3);
    // Together with such metadata, another program is still damage.
    edit_model(&bundle, rename_input);
    refused(format!("check {bundle}"), &["L00.attn.mlpackage"]);
}

#[test]
fn other_weights_and_other_programs_are_damage() {
    let other_weights = |b: &Place| flip(b.join(PACKAGE).join("Data/com.apple.CoreML/weights/weight.bin"));
    let other_program = |b: &Place| edit_model(b, rename_input);
    for change in [&other_weights as &dyn Fn(&Place), &other_program] {
        let bundle = bundle();
        change(&bundle);
        refused(format!("check {bundle}"), &["L00.attn.mlpackage", "SHA-256"]);
        // The same, together with a manifest in another form.
        rewrite_manifest(&bundle);
        refused(format!("check {bundle}"), &["L00.attn.mlpackage", "size"]);
    }
    let bundle = bundle();
    passes(format!("generate {bundle} --prompt-ids 2,42 --max-new 1"));
}
