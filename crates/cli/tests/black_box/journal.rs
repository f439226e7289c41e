//! The journal of a bundle, with the built binary.
use crate::common::*;
use serde_json::{Value, json as value};
use std::fs;
use std::process::Stdio;

const HEADINGS: [&str; 7] = ["Intent", "Setup", "Result", "Surprise", "Lesson", "Next", "Refs"];

/// Returns a bundle of the tiny model without a journal.
fn plain() -> Place {
    built("tiny-gemma4-moe", "--quant fp16 --tokens 1 --no-journal")
}

fn golden() -> Place {
    fixture("tiny-gemma4-moe/golden.npz")
}

fn entries(bundle: &Place) -> Vec<Value> {
    list(&json(0, format!("journal '{bundle}'"))["entries"]).clone()
}

/// Lists the events of a kind and status, in all entries.
fn events(bundle: &Place, kind: &str, status: &str) -> Vec<Value> {
    let all = entries(bundle).into_iter().flat_map(|e| list(&e["events"]).clone());
    all.filter(|e| e["kind"] == kind && e["status"] == status).collect()
}

#[test]
fn a_build_with_its_gates_is_one_entry_with_every_heading() {
    let (b, golden) = (folder().join("my bundle"), golden());
    let model = fixture("tiny-gemma4-moe");
    passes(format!("build {model} -o '{b}' --skip-gates --tokens 1 --intent 'does lut4 hold?'"));
    let v = json(1, format!("validate '{b}' --golden {golden} --min-cosine 0.999999"));
    let checked = json(0, format!("check '{b}'"));
    let traced = json(0, format!("trace '{b}' --golden {golden} --note 'in a \u{1b}[2J test'"));
    let page = passes(format!("journal '{b}'"));
    let found: Vec<(&str, &str)> =
        page.split("\n### ").skip(1).map(|section| section.split_once('\n').unwrap()).collect();
    assert_eq!(found.iter().map(|s| s.0).collect::<Vec<_>>(), HEADINGS);
    let lowest = format!("min_cosine {:.4}", number(&v["min_cosine"]) - 5e-5);
    for (heading, says) in [
        ("Intent", &["- does lut4 hold?"][..]),
        ("Setup", &["quant lut4", "tokens 1", "anemoe ", "min-cosine 0.999999", "checkpoint"]),
        ("Result", &["build done in", "validate fail in", "check pass in", "trace done in", &lowest]),
        ("Surprise", &["validate failed"]),
        ("Lesson", &["(nothing written)"]),
        ("Refs", &["chain.json, sha256", "golden.npz, sha256"]),
    ] {
        // Line breaks depend on the length of the repository's path.
        let body = found.iter().find(|s| s.0 == heading).unwrap().1;
        let flat = body.split_whitespace().collect::<Vec<_>>().join(" ");
        assert!(says.iter().all(|word| flat.contains(word)), "{heading}: {page}");
    }
    // Control characters do not reach the terminal, and a path in a command is one that a shell takes unchanged.
    assert!(!page.contains('\u{1b}') && page.contains(r"in a \u{1b}[2J test"), "{page}");
    assert!(page.contains("my bundle' --entry "), "{page}");

    // The facts equal those of the commands' own documents.
    let all = entries(&b);
    assert_eq!((all.len(), &all[0]["kinds"]), (1, &value!(["build", "validate", "check", "trace"])));
    let one = |kind: &str, status: &str| {
        let mut found = events(&b, kind, status);
        assert_eq!(found.len(), 1, "{kind} {status}");
        found.remove(0)
    };
    let facts = &one("validate", "fail")["facts"];
    for key in ["pass", "min_cosine", "mean_kl", "top1_agreement", "tokens_match"] {
        assert_eq!(facts[key], v[key], "{key}");
    }
    assert_eq!(facts["wrong_choices"], list(&v["wrong_choices"]).len());
    assert_eq!(facts["fp16"]["median_cosine"], v["fp16"]["median_cosine"]);
    let facts = &one("check", "pass")["facts"];
    assert_eq!((&facts["ops"], &facts["verdicts"]), (&checked["ops"], &checked["verdicts"]));
    let cosines = list(&traced["layers"]).iter().map(|l| number(&l["fidelity"]["min_cosine"]));
    assert_eq!(one("trace", "done")["facts"]["min_cosine"], cosines.fold(1.0, f64::min));
    let (done, inspected) = (one("build", "done"), json(0, format!("inspect '{b}'")));
    let facts = &done["facts"];
    assert_eq!(facts["package_bytes"], inspected["bytes"]);
    assert_eq!(facts["packages"], list(&inspected["shards"]).len());
    assert_eq!(value!([facts["quant"]["attention"], done["options"]["tokens"]]), value!(["lut4 g32", 1]));
    assert_eq!(text(&facts["chain_sha256"]).len(), 64);
    assert_eq!(done["of"], one("build", "started")["id"]);
    assert!(count(&done["machine"]["cores"]) > 0 && number(&done["seconds"]) > 0.0);
}

#[test]
fn people_add_what_commands_cannot_know() {
    let b = plain();
    passes(format!("check {b} --intent first"));
    passes(format!("check {b} --intent second"));
    let all = entries(&b);
    assert_eq!(all.len(), 2);
    let first = text(&all[0]["id"]);
    passes(format!("journal add {b} --lesson newest --next 'go on'"));
    let added = json(0, format!("journal {b} --entry {} --surprise older --refs 'page 3'", &first[..8]));
    assert_eq!(added["entry"], first);
    let all = entries(&b);
    assert_eq!(value!([all[1]["lesson"][0], all[1]["next"][0]]), value!(["newest", "go on"]));
    let last = |key: &str| list(&all[0][key]).last().unwrap();
    assert_eq!(value!([last("surprise"), last("refs")]), value!(["older", "page 3"]));
    let page = passes(format!("journal {b} --entry {first}"));
    assert!(page.contains("- older") && !page.contains("newest"), "{page}");

    let long =
        ["--lesson", "--next", "--note"].map(|text| format!("{text} {} ", "x".repeat(100_000))).concat();
    let empty = folder();
    for (line, says) in [
        (format!("journal {b} --lesson ' '"), &["--lesson: there is nothing to add"][..]),
        (format!("journal {b} --lesson x --entry zzz"), &["zzz names no entry", first]),
        (format!("journal {empty} --lesson x"), &["an empty folder"]),
        (format!("journal {b} --entry ''"), &["names several"]),
        ("journal".into(), &["BUNDLE"]),
        (format!("journal {b} {b}"), &["one bundle"]),
        (format!("check {b} --intent x --no-journal"), &["--no-journal"]),
        (format!("journal {b} {long}"), &["journal.jsonl", "more than 262144"]),
    ] {
        refused(line, says);
    }
    // Options of all commands may stand anywhere.
    for line in ["--json journal", "journal --json"] {
        assert!(passes(format!("{line} {b}")).starts_with('{'), "{line}");
    }
}

#[test]
fn nothing_is_written_where_nothing_is_wanted() {
    let (b, golden) = (plain(), golden());
    passes(format!("validate {b} --golden {golden} --no-journal"));
    passes(format!("check {b} --no-journal"));
    passes(format!("trace {b} --golden {golden} --no-journal"));
    assert!(!b.join("journal.jsonl").exists());
    ends(0, format!("journal {b}"), &["Nothing is written yet", "validate"]);
    assert!(entries(&b).is_empty());
    // A package by itself has no journal.
    let package = b.join("shards/L00.attn.mlpackage");
    let before = contents(&package);
    run(format!("check {package}"));
    assert!(contents(&package) == before && !package.join("journal.jsonl").exists());
}

#[test]
fn broken_journals_are_named_and_stop_no_gate() {
    let (b, golden) = (built("tiny-gemma4-moe", "--quant fp16 --tokens 1"), golden());
    let file = b.join("journal.jsonl");
    let whole = fs::read_to_string(&file).unwrap();
    let lines = whole.lines().count();
    // The last line is cut off in its middle, or is garbage.
    fs::write(&file, &whole[..whole.len() - 40]).unwrap();
    ends(0, format!("journal {b}"), &["has no end", "was cut off"]);
    passes(format!("check {b}"));
    assert_eq!(json(0, format!("journal {b}"))["torn"], false);
    fs::write(&file, format!("{whole}garbage\n")).unwrap();
    refused(format!("journal {b}"), &["journal.jsonl", &format!("line {}", lines + 1)]);
    // The journal cannot be written: a folder has its name.
    fs::remove_file(&file).unwrap();
    fs::create_dir(&file).unwrap();
    for line in [
        format!("check {b}"),
        format!("validate {b} --golden {golden}"),
        format!("trace {b} --golden {golden}"),
    ] {
        ends(0, line, &["journal.jsonl", "nothing was written down"]);
    }
    // Facts in a wrong form leave sections of a report empty.
    fs::remove_dir(&file).unwrap();
    let event = r#"{"id":"aaaa","time":"2026-01-01T00:00:00Z","kind":"trace","status":"done","version":"1","facts":{"cosine_map":[["x"],7]}}"#;
    fs::write(&file, format!("{event}\n")).unwrap();
    assert!(passes(format!("report {b}")).contains("anemoe trace"));
}

#[test]
fn an_interrupted_build_and_its_parts_are_told_of() {
    let dir = folder();
    let (bundle, parts, model) = (dir.join("b"), dir.join("parts"), fixture("tiny-gemma4-moe"));
    let build = format!("build {model} -o {bundle} --jobs 1");
    let mut child = anemoe(&build).stdout(Stdio::null()).stderr(Stdio::null()).spawn().unwrap();
    // While the first shard is there, the last one cannot be finished yet.
    while child.try_wait().unwrap().is_none() && !bundle.join("shards/L00.attn.mlpackage").exists() {
        std::thread::sleep(std::time::Duration::from_millis(1));
    }
    let _ = child.kill();
    child.wait().unwrap();
    if !bundle.join("chain.json").exists() {
        // The journal tells of a build before it ends.
        assert!(passes(format!("journal {bundle}")).contains("has no end"));
        passes(build);
        let all = entries(&bundle);
        assert_eq!(all.len(), 1);
        let said = all[0]["surprise"].to_string();
        assert!(said.contains("was interrupted; the one") && !said.contains("has no end"), "{said}");
        let begun = events(&bundle, "build", "started");
        assert_eq!(begun[1]["facts"]["resumes"], begun[0]["id"]);
    }
    for part in ["0/2", "1/2"] {
        passes(format!("build {model} -o {parts} --shard {part} --intent 'in parts'"));
    }
    passes(format!("assemble {parts} --intent 'in parts'"));
    let all = entries(&parts);
    assert_eq!(all.len(), 1);
    has(&all[0], value!({"kinds": ["build", "gate", "assemble"], "intent": ["in parts"]}));
    assert_eq!(events(&parts, "build", "done")[1]["facts"]["part"], "1/2");
    let said = all[0]["surprise"].to_string();
    assert!(!said.contains("interrupted") && !said.contains("has no end"), "{said}");
    // Except for the journals, both bundles have the same bytes.
    assert!(contents(&parts) == contents(&bundle));
    assert!(parts.join("journal.jsonl").exists());
}
