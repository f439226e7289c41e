//! `anemoe predict-speed` with the built binary.

use crate::common::{build, fixture, json, refused, run};
use serde_json::{Value, json as value};
use std::path::Path;

fn text(path: &Path) -> &str {
    path.to_str().unwrap()
}

fn figure(v: &Value) -> f64 {
    v.as_f64().unwrap_or_else(|| panic!("{v}"))
}

#[test]
fn a_checkpoint_has_a_range_a_bottleneck_and_forms() {
    let v = json(0, &["predict-speed", "synthetic:zaya1-8b", "--chip", "M4 Max"]);
    let one = &v["one"];
    let s = &one["tok_s"];
    let (low, likely, high) = (figure(&s["low"]), figure(&s["likely"]), figure(&s["high"]));
    assert!(low < likely && likely < high && low < 9.25 && 9.25 < high, "{s}");
    assert!((likely / 9.25 - 1.0).abs() < 0.15, "{s}");
    let kinds = one["kinds"].as_array().unwrap();
    let moe = kinds.iter().find(|k| k["kind"] == "moe").unwrap();
    assert_eq!((&moe["bottleneck"], figure(&moe["calls"])), (&Value::from("weights"), 40.0), "{moe}");
    let forms = v["forms"].as_array().unwrap();
    assert!(forms.len() >= 8 && forms.iter().all(|f| f["name"] != ""), "{v}");
    assert!(!v["recommended"]["reasons"].as_array().unwrap().is_empty());
    let (_, out, _) = run(&["predict-speed", "synthetic:zaya1-8b", "--chip", "M4 Max"]);
    assert!(out.contains("\nrecommended: --experts-per-shard 4 --history host\n  20."), "{out}");
    let slow = json(0, &["predict-speed", "synthetic:zaya1-8b", "--chip", "m1"]);
    assert!(figure(&slow["one"]["tok_s"]["likely"]) < likely);
}

#[test]
fn a_bench_of_a_mac_calibrates_a_profile() {
    let dir = tempfile::tempdir().unwrap();
    let bundle = dir.path().join("b");
    build(&fixture("tiny-gemma4-moe"), &bundle, &["--quant", "lut4", "--tokens", "1,4"]);
    let plain = json(0, &["predict-speed", text(&bundle)]);
    // A bench in which everything took three times as long as predicted.
    let kinds: Vec<Value> = plain["one"]["kinds"]
        .as_array()
        .unwrap()
        .iter()
        .map(|k| value!({"name": k["kind"], "ms_per_token": 3.0 * figure(&k["ms"]["likely"])}))
        .collect();
    let (bench, profile) = (dir.path().join("bench.json"), dir.path().join("mac.toml"));
    let document = value!({"schema": 1, "kinds": kinds, "decode": []});
    std::fs::write(&bench, document.to_string()).unwrap();
    json(0, &["predict-speed", text(&bundle), "--calibrate", text(&bench), "-o", text(&profile)]);
    let fitted = json(0, &["predict-speed", text(&bundle), "--profile", text(&profile)]);
    let ratio = figure(&fitted["one"]["ms"]["likely"]) / figure(&plain["one"]["ms"]["likely"]);
    assert!((ratio - 3.0).abs() < 0.1, "{ratio}");
    // A second run does not replace the file without `--force`.
    refused(
        &["predict-speed", text(&bundle), "--calibrate", text(&bench), "-o", text(&profile)],
        &["mac.toml"],
    );
}

#[test]
fn bad_input_is_refused() {
    let dir = tempfile::tempdir().unwrap();
    let broken = dir.path().join("broken.toml");
    std::fs::write(&broken, "chip = \"x\"\nbandwidth_gb_s = 3\n").unwrap();
    refused(&["predict-speed", "synthetic:zaya1-8b", "--chip", "m9"], &["m9", "m4-max"]);
    let (code, _, err) = run(&["predict-speed", "synthetic:zaya1-8b", "--quant", "lut44"]);
    let says = |text: &str| err.matches(text).count();
    assert!(code == 2 && says("error: ") == 1 && says("unknown compression kind `lut44`") == 1, "{err}");
    refused(
        &["predict-speed", "synthetic:zaya1-8b", "--profile", text(&broken)],
        &["broken.toml", "profile"],
    );
    refused(&["predict-speed"], &["PATH"]);
    refused(&["predict-speed", "synthetic:zaya1-8b", "--quant", "auto"], &["auto"]);
    refused(&["predict-speed", "synthetic:zaya1-8b", "--memory-gb", "-1"], &["-1"]);
    refused(&["predict-speed", text(&dir.path().join("nothing"))], &["nothing"]);
    let bench = dir.path().join("bench.json");
    for (content, says) in [
        ("{", "bench"),
        (r#"{"schema": 7, "kinds": [], "decode": []}"#, "schema 7"),
        ("[]", "bench"),
        (r#"{"schema": 1, "kinds": [], "decode": [{"ms_per_token": 1e308}]}"#, "no machine"),
        (r#"{"schema": 1, "kinds": [], "decode": [{"ms_per_token": 1e-308}]}"#, "no machine"),
    ] {
        std::fs::write(&bench, content).unwrap();
        let out = dir.path().join("o.toml");
        let args = ["predict-speed", "synthetic:zaya1-8b", "--calibrate", text(&bench), "-o", text(&out)];
        refused(&args, &["bench.json", says]);
        assert!(!out.exists());
    }
}
