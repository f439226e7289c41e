//! `anemoe predict-speed` with the built binary.

use crate::common::*;
use serde_json::json as value;
use std::fs;

#[test]
fn a_checkpoint_has_a_range_a_bottleneck_and_forms() {
    let line = "predict-speed synthetic:zaya1-8b --chip 'M4 Max'";
    let v = json(0, line);
    let one = &v["one"];
    let [low, likely, high] = ["low", "likely", "high"].map(|key| number(&one["tok_s"][key]));
    assert!(low < likely && likely < high && low < 9.25 && 9.25 < high, "{one}");
    assert!((likely / 9.25 - 1.0).abs() < 0.15, "{one}");
    let moe = list(&one["kinds"]).iter().find(|k| k["kind"] == "moe").unwrap();
    has(moe, value!({"bottleneck": "weights", "calls": 40.0}));
    assert!(list(&v["forms"]).len() >= 8 && each(&v["forms"], "name").all(|name| !name.is_empty()), "{v}");
    assert!(!list(&v["recommended"]["reasons"]).is_empty());
    let out = passes(line);
    assert!(out.contains("\nrecommended: --experts-per-shard 4 --history host\n  20."), "{out}");
    let slow = json(0, "predict-speed synthetic:zaya1-8b --chip m1");
    assert!(number(&slow["one"]["tok_s"]["likely"]) < likely);
}

#[test]
fn a_bench_of_a_mac_calibrates_a_profile() {
    let (b, dir) = (built("tiny-gemma4-moe", "--tokens 1,4"), folder());
    let plain = json(0, format!("predict-speed {b}"));
    // A bench in which everything took three times as long as predicted.
    let slower =
        |k: &serde_json::Value| value!({"name": k["kind"], "ms_per_token": 3.0 * number(&k["ms"]["likely"])});
    let kinds: Vec<_> = list(&plain["one"]["kinds"]).iter().map(slower).collect();
    fs::write(dir.join("bench.json"), value!({"schema": 1, "kinds": kinds, "decode": []}).to_string())
        .unwrap();
    let calibrate = format!("predict-speed {b} --calibrate {dir}/bench.json -o {dir}/mac.toml");
    passes(&calibrate);
    let fitted = json(0, format!("predict-speed {b} --profile {dir}/mac.toml"));
    let ratio = number(&fitted["one"]["ms"]["likely"]) / number(&plain["one"]["ms"]["likely"]);
    assert!((ratio - 3.0).abs() < 0.1, "{ratio}");
    // A second run does not replace the file without `--force`.
    refused(calibrate, &["mac.toml"]);
}

#[test]
fn bad_input_is_refused() {
    let dir = folder();
    fs::write(dir.join("broken.toml"), "chip = \"x\"\nbandwidth_gb_s = 3\n").unwrap();
    let zaya = "predict-speed synthetic:zaya1-8b";
    for (line, says) in [
        (format!("{zaya} --chip m9"), &["m9", "m4-max"][..]),
        (format!("{zaya} --profile {dir}/broken.toml"), &["broken.toml", "profile"]),
        (format!("{zaya} --memory-gb -1"), &["-1"]),
    ] {
        refused(line, says);
    }
    let (code, _, err) = run(format!("{zaya} --quant lut44"));
    let says = |text: &str| err.matches(text).count();
    assert!(code == 2 && says("error: ") == 1 && says("unknown compression kind `lut44`") == 1, "{err}");
    for (content, says) in [
        ("{", "bench"),
        (r#"{"schema": 7, "kinds": [], "decode": []}"#, "schema 7"),
        (r#"{"schema": 1, "kinds": [], "decode": [{"ms_per_token": 1e308}]}"#, "no machine"),
    ] {
        fs::write(dir.join("bench.json"), content).unwrap();
        refused(format!("{zaya} --calibrate {dir}/bench.json -o {dir}/o.toml"), &["bench.json", says]);
        assert!(!dir.join("o.toml").exists());
    }
}
