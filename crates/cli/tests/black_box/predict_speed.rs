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
}
