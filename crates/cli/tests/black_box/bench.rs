//! `bench`, and fast products, of the built binary.

use crate::common::*;

#[test]
fn a_bundle_is_measured() {
    let (out, dir) = (built("tiny-gemma4-moe", "--tokens 1,4"), folder());
    let save = dir.join("a.json");
    let short = format!("bench {out} --decode 2 --repetitions 1");
    let table = passes(format!("{short} --prefill 7,12 --context '3, 20' --ops --shards --save {save}"));
    let parts =
        ["decode at 3", "decode at 20", "prefill 12", "attention", "head.0of", "L00.attn", "head conv"];
    shows(&table, &parts);
    let saved = read_json(&save);
    assert_eq!((&saved["mode"], list(&saved["decode"]).len()), (&"default".into(), 2));
    let of = |name: &str| number(&saved["decode"][1][name]);
    assert!(of("tok_s") > 0.0 && of("gb_per_token") > 0.0);
    assert!((of("tok_s") * of("gb_per_token") - of("gb_s")).abs() <= 1e-6 * of("gb_s"));
    // The head multiplies every token by its whole matrix.
    let head = |tokens: u64| {
        let is_head = |b: &&serde_json::Value| b["kind"] == "head" && b["tokens"] == tokens;
        let row = list(&saved["bounds"]).iter().find(is_head).unwrap();
        let [ms, read, multiply] = ["ms", "read_ms", "multiply_ms"].map(|key| number(&row[key]));
        let longer = if read >= multiply { "bandwidth" } else { "arithmetic" };
        assert_eq!(row["bound"], if read + multiply < ms / 2.0 { "calls" } else { longer }, "{row}");
        number(&row["million_multiply_adds"])
    };
    let each = 512.0 * 64.0 / 1e6;
    assert!((head(1) - each).abs() < 1e-9 && (head(4) - 4.0 * each).abs() < 1e-9, "{saved}");
    assert!(number(&saved["machine"]["read_gb_s"]) > 0.0);
    let mode = |options: &str| json(0, format!("{short} --context 3 {options}"))["mode"].clone();
    assert_eq!(mode("--prefill 7 --fast"), "fast");
    assert_eq!(mode("--prefill 0 --no-fuse"), "exact, not fused");
    let table = passes(format!("{short} --context 3 --prefill ' 0'"));
    assert!(table.contains("decode at 3") && !table.contains("prefill"), "{table}");
    let journal = std::fs::read_to_string(out.join("journal.jsonl")).unwrap();
    assert!(journal.contains("\"kind\":\"bench\"") && journal.contains("decode_at_3_tok_s"), "{journal}");
    // What cannot be measured is refused.
    for (options, says) in [
        ("--context 100000".to_string(), "100032 tokens are asked for"),
        ("--context 64 --decode 18446744073709551552".into(), "tokens are asked for"),
        ("--fast --no-fuse".into(), "--fast"),
        (format!("--save {dir}"), "a folder"),
        (format!("--save {dir}/none/f"), "no such folder"),
        ("--repetitions 0".into(), "not a number from 1 on"),
    ] {
        refused(format!("bench {out} {options}"), &[says]);
    }
    refused(format!("bench {dir}"), &["chain.json"]);
}

#[test]
fn settings_of_the_environment_are_looked_at() {
    for (name, value, is_known) in [
        ("ANEMOE_CPU", "bogus", false),
        ("ANEMOE_THREADS", "0", false),
        ("ANEMOE_THREADS", "-1", false),
        ("ANEMOE_CPU", "scalar", true),
        ("ANEMOE_CPU", "", true),
        ("ANEMOE_THREADS", "3", true),
    ] {
        let mut command = anemoe("plan synthetic:zaya1-8b?layers=2 --skip-outliers");
        let (code, _, said) = finish(command.env(name, value));
        let is_named = code == 2 && said.contains(&format!("{name}={value}"));
        assert!(if is_known { code == 0 } else { is_named }, "{name}={value}: {said}");
    }
}
