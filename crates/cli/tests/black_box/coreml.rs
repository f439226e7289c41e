//! Commands with Core ML on systems without it.
#![cfg(not(target_os = "macos"))]

use crate::common::{build, fixture, json, refused};

#[test]
fn core_ml_is_refused_where_there_is_none_and_not_the_default() {
    let dir = tempfile::tempdir().unwrap();
    let bundle = dir.path().join("tiny.anemoe");
    build(&fixture("tiny-gemma4-moe"), &bundle, &["--quant", "lut4"]);
    let b = bundle.to_str().unwrap();
    let golden = fixture("tiny-gemma4-moe/golden.npz");
    let golden = golden.to_str().unwrap();
    let generate = ["generate", b, "--prompt-ids", "1,2", "--max-new", "2"];
    let core_ml = [&generate[..], &["--backend", "coreml"]].concat();
    refused(&core_ml, &["Core ML is a part of macOS", "--backend cpu"]);
    refused(&["bench", b, "--backend", "coreml"], &["Core ML is a part of macOS"]);
    refused(&["validate", b, "--golden", golden, "--backend", "coreml"], &["Core ML is a part of macOS"]);
    refused(&["compile", b], &["Core ML is a part of macOS"]);
    refused(&["tune", fixture("tiny-gemma4-moe").to_str().unwrap()], &["Core ML is a part of macOS"]);
    refused(&["check", b, "--device"], &["Core ML is a part of macOS"]);
    refused(&["step"], &["`step` is for anemoe itself"]);
    refused(&[&core_ml[..], &["--fast"]].concat(), &["--fast", "--backend cpu"]);
    refused(&[&generate[..], &["--backend", "cpu", "--max-loaded", "1"]].concat(), &["--max-loaded"]);
    refused(&[&generate[..], &["--max-loaded", "0"]].concat(), &["no number of GB"]);
    let plain = json(0, &generate);
    let cpu = json(0, &[&generate[..], &["--backend", "cpu"]].concat());
    assert_eq!(plain["generated_ids"], cpu["generated_ids"]);
}
