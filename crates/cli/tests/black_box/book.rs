//! Books of experiments with the built binary: intents, expectations, states.

use crate::common::{fixture, json, refused, run};
use serde_json::Value;
use std::path::Path;

fn text(path: &Path) -> &str {
    path.to_str().unwrap()
}

fn succeed(args: &[&str]) -> String {
    let (code, out, err) = run(args);
    assert_eq!(code, 0, "{args:?}\n{out}\n{err}");
    out
}

/// Returns an experiment of a book.
fn experiment(book: &Path, id: &str) -> Value {
    let document = json(0, &["journal", text(book)]);
    let all = document["entries"].as_array().unwrap();
    all.iter().find(|e| e["id"] == id).unwrap_or_else(|| panic!("{id}: {document:#}")).clone()
}

fn state(book: &Path, id: &str) -> String {
    experiment(book, id)["experiment"]["state"].as_str().unwrap().into()
}

#[test]
fn an_experiment_goes_from_its_intent_to_its_outcome() {
    let dir = tempfile::tempdir().unwrap();
    let (book, bundle) = (dir.path().join("book"), dir.path().join("a.anemoe"));
    let at = book.join("e35");
    let (e35, b) = (text(&at), text(&bundle));
    let intent = ["--intent", "LUT4 halves the bytes", "--title", "LUT4 of the experts"];
    let expect = ["--expect", "shard_mb<110", "--expect", "decode_tok_s > 1e9", "--expect", "head_shards=1"];
    succeed(&[&["journal", "new", e35][..], &intent, &expect].concat());
    assert_eq!(state(&book, "e35"), "intent");

    // A build without gates brings no sizes; a check does, and the bundle knows its experiment by then.
    let tiny = fixture("tiny-gemma4-moe");
    let options = ["--quant", "lut4", "--tokens", "1", "--max-context", "64", "--skip-gates"];
    let (code, _, err) = run(&[&["build", text(&tiny), "-o", b, "--experiment", e35][..], &options].concat());
    assert_eq!(code, 0, "{err}");
    assert_eq!(state(&book, "e35"), "running");
    let (code, _, err) = run(&["check", b]);
    assert_eq!(code, 0, "{err}");
    assert!(err.contains("experiment e35: shard_mb<110: ") && err.contains("MB: holds"), "{err}");
    assert_eq!(state(&book, "e35"), "running", "a speed is expected, and none was measured yet");
    let bench =
        ["--decode", "2", "--context", "4", "--prefill", "0", "--verify-tokens", "0", "--repetitions", "1"];
    let (code, _, err) = run(&[&["bench", b][..], &bench].concat());
    assert_eq!(code, 0, "{err}");
    assert!(err.contains("decode_tok_s > 1e9: ") && err.contains("FAILS"), "{err}");
    assert_eq!(state(&book, "e35"), "failed");

    let entry = experiment(&book, "e35");
    let checked = entry["experiment"]["expectations"].as_array().unwrap();
    let holds: Vec<Option<bool>> = checked.iter().map(|e| e["holds"].as_bool()).collect();
    assert_eq!(holds, [Some(true), Some(false), Some(true)], "{checked:#?}");
    assert_eq!(entry["kinds"], serde_json::json!(["experiment", "build", "check", "bench"]));
    assert!(entry["surprise"].to_string().contains("expected decode_tok_s > 1e9, found "), "{entry:#}");
    // Every command has ended.
    assert!(!entry["surprise"].to_string().contains("has no end"), "{entry:#}");
    assert!(entry["result"].as_array().unwrap().iter().all(|r| r["status"] != "started"), "{entry:#}");
    assert!(entry["setup"].to_string().contains("quant lut4"), "{entry:#}");
    assert!(entry["refs"].to_string().contains("a.anemoe"), "{entry:#}");

    // The next experiment replaces this one; a person closes both.
    let next = book.join("e36");
    succeed(&["journal", "new", text(&next), "--intent", "k-means", "--replaces", "e35", "--link", b]);
    let note = ["--state", "dead-end", "--lesson", "speed is not bytes", "--milestone", "first 40 shards"];
    succeed(&[&["journal", "add", text(&book), "--entry", "e35"][..], &note].concat());
    assert_eq!((state(&book, "e35"), state(&book, "e36")), ("dead end".into(), "intent".into()));

    let page = succeed(&["journal", text(&book)]);
    for says in [
        "## e35: LUT4 of the experts (dead end)",
        "### Intent\n\n- LUT4 halves the bytes",
        "expected shard_mb<110: ",
        "milestone, 20",
        "- speed is not bytes",
        "### Next",
        "- replaces e35",
    ] {
        assert!(page.contains(says), "{says}\n{page}");
    }
    let table = succeed(&["journal", "show", text(&book), "--table"]);
    let row = table.lines().find(|l| l.starts_with("e35")).unwrap();
    assert!(
        row.contains("dead end") && row.contains("2 of 3 hold") && row.ends_with("LUT4 of the experts"),
        "{table}"
    );
    assert!(!table.contains("###"));
    // A command that runs later decides over an earlier note.
    succeed(&["check", b]);
    assert_eq!(state(&book, "e35"), "failed");
    // A bundle whose book is gone is checked all the same.
    std::fs::rename(&book, dir.path().join("elsewhere")).unwrap();
    succeed(&["check", b]);
}

/// Checks that a failed expectation still fails when an easier golden passes.
#[test]
fn an_easier_golden_hides_no_failure() {
    let dir = tempfile::tempdir().unwrap();
    let (tiny, bundle, book) =
        (fixture("tiny-gemma4-moe"), dir.path().join("a.anemoe"), dir.path().join("book"));
    let options = ["--quant", "lut4", "--tokens", "1", "--max-context", "64"];
    crate::common::build(&tiny, &bundle, &options);
    let b = text(&bundle);
    let mut goldens: Vec<(f64, String)> = ["2,5,9", "7,100,33,4,250,91"]
        .iter()
        .enumerate()
        .map(|(i, ids)| {
            let path = dir.path().join(format!("{i}.npz")).to_str().unwrap().to_string();
            succeed(&["golden", text(&tiny), "--prompt-ids", ids, "--decode", "2", "-o", &path]);
            // Random weights fail the gate.
            let args = ["validate", b, "--golden", &path, "--no-journal", "--json"];
            let cosine: Value = serde_json::from_str(&run(&args).1).unwrap();
            (cosine["min_cosine"].as_f64().unwrap(), path)
        })
        .collect();
    goldens.sort_by(|a, b| a.0.total_cmp(&b.0));
    let [(low, hard), (high, easy)] = &goldens[..] else { unreachable!() };
    let expect = format!("logit_cosine_min>{}", (low + high) / 2.0);
    let at = book.join("e1");
    succeed(&["journal", "new", text(&at), "--intent", "quality", "--expect", &expect]);
    let validate = |golden: &str| {
        let (code, out, err) = run(&["validate", b, "--golden", golden, "--experiment", text(&at)]);
        assert!(code < 2, "{out}\n{err}");
        err
    };
    assert!(validate(hard).contains(": FAILS"));
    assert_eq!(state(&book, "e1"), "failed");
    let said = validate(easy);
    let name = Path::new(hard).file_name().unwrap().to_str().unwrap();
    assert!(said.contains("holds here, and still FAILS") && said.contains(&format!("with {name}")), "{said}");
    let checked = experiment(&book, "e1")["experiment"]["expectations"][0].clone();
    assert_eq!(
        (&checked["holds"], &checked["golden"]),
        (&Value::from(false), &Value::from(name)),
        "{checked}"
    );
    assert_eq!(state(&book, "e1"), "failed");
    // Other packages begin without failures.
    std::fs::remove_dir_all(&bundle).unwrap();
    crate::common::build(&tiny, &bundle, &["--quant", "fp16", "--tokens", "1", "--max-context", "64"]);
    assert!(validate(easy).contains(": holds\n"));
    assert_eq!(state(&book, "e1"), "passed");
}

#[test]
fn a_recipe_is_an_experiment_like_any_other() {
    let dir = tempfile::tempdir().unwrap();
    let book = dir.path().join("book");
    let at = book.join("l0");
    succeed(&["journal", "new", text(&at), "--intent", "sizes", "--expect", "moe_shards=240"]);
    succeed(&["reproduce", "l0-probe", "--dry-run", "--experiment", text(&at)]);
    assert_eq!(state(&book, "l0"), "passed");
}

#[test]
fn wrong_experiments_are_refused() {
    let dir = tempfile::tempdir().unwrap();
    let book = dir.path().join("book");
    let at = book.join("e1");
    let e1 = text(&at);
    refused(&["journal", "new", e1], &["--intent"]);
    refused(&["journal", "new", e1, "--intent", " "], &["why it is done"]);
    for (expect, says) in [
        ("shard_gb<1", "shard_mb"),
        ("shard_mb", "expects nothing"),
        ("shard_mb<", "is not a number"),
        ("shard_mb<nan", "is not a number"),
        ("<110", "no figure is named ``"),
    ] {
        refused(&["journal", "new", e1, "--intent", "x", "--expect", expect], &[says]);
    }
    refused(&["journal", "new", "lonely", "--intent", "x"], &["BOOK/ID"]);
    refused(&["journal", "new", text(&book.join("a b")), "--intent", "x"], &["BOOK/ID"]);
    refused(&["journal", "new", e1, "--intent", "x", "--replaces", "e0"], &["no such experiment"]);
    refused(&["plan", text(&fixture("tiny-zaya")), "--experiment", e1], &["there are: "]);
    refused(
        &["plan", text(&fixture("tiny-zaya")), "--experiment", text(&dir.path().join("no/e1"))],
        &["journal new"],
    );
    refused(&["journal", "add", text(&book), "--lesson", "x"], &["no experiment yet"]);
    succeed(&["journal", "new", e1, "--intent", "x"]);
    refused(&["journal", "new", e1, "--intent", "x"], &["already"]);
    refused(
        &["plan", text(&fixture("tiny-zaya")), "--experiment", text(&book.join("e2"))],
        &["there are: e1"],
    );
    refused(&["journal", "add", text(&book), "--entry", "e9", "--lesson", "x"], &["e9", "e1"]);
    // A bundle is no book.
    let bundle = dir.path().join("b");
    crate::common::build(
        &fixture("tiny-gemma4-moe"),
        &bundle,
        &["--quant", "fp16", "--tokens", "1", "--max-context", "64"],
    );
    refused(&["journal", "new", text(&bundle.join("e1")), "--intent", "x"], &["finished bundle"]);
    refused(&["journal", "add", text(&bundle), "--state", "failed"], &["only experiments"]);
    // The error about a broken book names the line.
    let file = book.join("book.jsonl");
    let lines = std::fs::read_to_string(&file).unwrap() + "garbage\n";
    std::fs::write(&file, lines).unwrap();
    refused(&["journal", text(&book)], &["book.jsonl", "line 2"]);
    refused(&["check", text(&bundle), "--experiment", e1], &["book.jsonl", "line 2"]);
    // Facts of another version, in any form, are shown.
    let odd = serde_json::json!({"id": "e1", "time": "2026-01-02T03:04:05Z", "kind": "experiment", "facts":
        {"expect": ["colour=red", 7, "shard_mb<1"], "bundles": "x", "title": 3, "figures": {"shard_mb": "y"}}});
    std::fs::write(&file, format!("{odd}\n")).unwrap();
    assert!(succeed(&["journal", text(&book)]).contains("colour=red"));
}
