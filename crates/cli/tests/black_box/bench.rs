//! `bench`, and fast products, of the built binary.

use crate::common::{build, fixture, json, refused, run};
use serde_json::Value;
use std::path::{Path, PathBuf};

fn bundle(dir: &Path, name: &str, quant: &str) -> PathBuf {
    let out = dir.join(format!("{}.{quant}", name.replace('/', "_")));
    build(&fixture(name), &out, &["--quant", quant]);
    out
}

fn text(path: &Path) -> &str {
    path.to_str().unwrap()
}

#[test]
fn a_bundle_is_measured() {
    let dir = tempfile::tempdir().unwrap();
    let out = bundle(dir.path(), "tiny-gemma4-moe", "lut4");
    let save = dir.path().join("a.json");
    let (code, table, err) = run(&[
        "bench",
        text(&out),
        "--prefill",
        "7,12",
        "--context",
        "3,20",
        "--decode",
        "2",
        "--repetitions",
        "1",
        "--ops",
        "--shards",
        "--save",
        text(&save),
    ]);
    assert_eq!(code, 0, "{err}");
    for part in
        ["decode at 3", "decode at 20", "prefill 12", "attention", "head.0of", "L00.attn", "head conv"]
    {
        assert!(table.contains(part), "{part}: {table}");
    }
    let saved: Value = serde_json::from_slice(&std::fs::read(&save).unwrap()).unwrap();
    assert_eq!(saved["mode"], "exact");
    assert_eq!(saved["decode"].as_array().unwrap().len(), 2);
    let of = |name: &str| saved["decode"][1][name].as_f64().unwrap();
    assert!(of("tok_s") > 0.0 && of("gb_per_token") > 0.0);
    assert!((of("tok_s") * of("gb_per_token") - of("gb_s")).abs() <= 1e-6 * of("gb_s"));
    // The head multiplies every token by its whole matrix.
    let head = |tokens: u64| {
        let rows = saved["bounds"].as_array().unwrap();
        let row = rows.iter().find(|b| b["kind"] == "head" && b["tokens"] == tokens).unwrap();
        let [ms, read, multiply] = ["ms", "read_ms", "multiply_ms"].map(|key| row[key].as_f64().unwrap());
        let longer = if read >= multiply { "bandwidth" } else { "arithmetic" };
        assert_eq!(row["bound"], if read + multiply < ms / 2.0 { "calls" } else { longer }, "{row}");
        row["million_multiply_adds"].as_f64().unwrap()
    };
    let each = 512.0 * 64.0 / 1e6;
    assert!((head(1) - each).abs() < 1e-9 && (head(4) - 4.0 * each).abs() < 1e-9, "{saved}");
    assert!(saved["machine"]["read_gb_s"].as_f64().unwrap() > 0.0);
    let short = ["--decode", "2", "--context", "3", "--repetitions", "1"];
    let fast = json(0, &[&["bench", text(&out), "--prefill", "7", "--fast"], &short[..]].concat());
    assert_eq!(fast["mode"], "fast");
    let plain = json(0, &[&["bench", text(&out), "--prefill", "0", "--no-fuse"], &short[..]].concat());
    assert_eq!(plain["mode"], "exact, not fused");
    let (_, table, _) = run(&[&["bench", text(&out), "--prefill", "0"], &short[..]].concat());
    assert!(table.contains("decode at 3") && !table.contains("prefill"), "{table}");
    let journal = std::fs::read_to_string(out.join("journal.jsonl")).unwrap();
    assert!(journal.contains("\"kind\":\"bench\"") && journal.contains("decode_at_3_tok_s"), "{journal}");
}

#[test]
fn what_cannot_be_measured_is_refused() {
    let dir = tempfile::tempdir().unwrap();
    let out = bundle(dir.path(), "tiny-gemma4-moe", "fp16");
    refused(&["bench", text(&out), "--context", "100000"], &["100032 tokens are asked for"]);
    refused(
        &["bench", text(&out), "--context", "64", "--decode", "18446744073709551552"],
        &["tokens are asked for"],
    );
    refused(&["bench", text(&out), "--fast", "--no-fuse"], &["--fast"]);
    refused(&["bench", text(&out), "--save", text(dir.path())], &["a folder"]);
    let none = dir.path().join("none/f");
    refused(&["bench", text(&out), "--save", text(&none)], &["no such folder"]);
    refused(&["bench", text(&out), "--repetitions", "0"], &["not a number from 1 on"]);
    refused(&["bench", text(dir.path())], &["chain.json"]);
}

#[test]
fn settings_of_the_environment_are_looked_at() {
    let with = |name: &str, value: &str| {
        let mut command = std::process::Command::new(env!("CARGO_BIN_EXE_anemoe"));
        let out = command
            .args(["plan", "synthetic:zaya1-8b?layers=2", "--quant", "lut4", "--skip-outliers"])
            .env(name, value)
            .output()
            .unwrap();
        (out.status.code(), String::from_utf8(out.stderr).unwrap())
    };
    for (name, value) in [
        ("ANEMOE_CPU", "bogus"),
        ("ANEMOE_CPU", "AVX2"),
        ("ANEMOE_THREADS", "0"),
        ("ANEMOE_THREADS", "1.5"),
        ("ANEMOE_THREADS", "-1"),
        ("ANEMOE_THREADS", "100000000"),
    ] {
        let (code, said) = with(name, value);
        assert!(code == Some(2) && said.contains(&format!("{name}={value}")), "{said}");
    }
    for (name, value) in [("ANEMOE_CPU", "scalar"), ("ANEMOE_CPU", ""), ("ANEMOE_THREADS", "3")] {
        assert_eq!(with(name, value).0, Some(0), "{name}={value}");
    }
}

#[test]
fn fast_products_pass_their_gate_on_a_trained_model() {
    let dir = tempfile::tempdir().unwrap();
    for (name, quant) in [("../models/small-gemma4", "lut4"), ("../models/small-gemma4", "int8-tensor")] {
        let out = bundle(dir.path(), name, quant);
        let golden = fixture(name).join("golden.npz");
        let found =
            json(0, &["validate", text(&out), "--min-cosine", "0.9", "--fast", "--golden", text(&golden)]);
        let fast = &found["fast"];
        assert_eq!((&fast["pass"], &fast["threshold"]), (&true.into(), &0.999.into()), "{fast}");
        assert!(fast["median_cosine"].as_f64().unwrap() > 0.9999, "{fast}");
        assert!(fast["min_cosine"].as_f64().unwrap() < 1.0 && fast["below"].as_u64().unwrap() <= 2, "{fast}");
        let stream: Vec<f64> =
            fast["stream"].as_array().unwrap().iter().map(|c| c.as_f64().unwrap()).collect();
        assert!(stream[0] > 1.0 - 1e-9);
        assert!(stream[1] >= 0.9999 && stream[1] < 1.0, "{stream:?}");
    }
}
