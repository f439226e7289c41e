//! The journal of a bundle, with the built binary.
// Remarks of tests go to standard error.
#![allow(clippy::disallowed_macros)]

use crate::common::{anemoe, build, contents, finish, fixture, json, refused, run};
use serde_json::Value;
use std::fs;
use std::path::{Path, PathBuf};
use std::process::Stdio;

const HEADINGS: [&str; 7] = ["Intent", "Setup", "Result", "Surprise", "Lesson", "Next", "Refs"];

fn text(path: &Path) -> &str {
    path.to_str().unwrap()
}

fn golden() -> PathBuf {
    fixture("tiny-gemma4-moe").join("golden.npz")
}

/// Builds a bundle of the tiny model.
fn tiny(dir: &Path, name: &str, options: &[&str]) -> PathBuf {
    let bundle = dir.join(name);
    let mut all = vec!["--tokens", "1", "--max-context", "64"];
    all.extend(options);
    build(&fixture("tiny-gemma4-moe"), &bundle, &all);
    bundle
}

fn succeed(args: &[&str]) -> String {
    let (code, out, err) = run(args);
    assert_eq!(code, 0, "{args:?}\n{out}\n{err}");
    out
}

fn entries(bundle: &Path) -> Vec<Value> {
    let document = json(0, &["journal", "show", text(bundle)]);
    document["entries"].as_array().unwrap().clone()
}

/// Lists the events of a kind and status, in all entries.
fn events(bundle: &Path, kind: &str, status: &str) -> Vec<Value> {
    let all = entries(bundle).into_iter().flat_map(|e| e["events"].as_array().unwrap().clone());
    all.filter(|e| e["kind"] == kind && e["status"] == status).collect()
}

/// Splits a page into its headings and the text under each.
fn sections(page: &str) -> Vec<(String, String)> {
    page.split("\n### ")
        .skip(1)
        .map(|s| {
            let (heading, body) = s.split_once('\n').unwrap();
            (heading.into(), body.trim().into())
        })
        .collect()
}

#[test]
fn a_build_with_its_gates_is_one_entry_with_every_heading() {
    let dir = tempfile::tempdir().unwrap();
    let bundle = tiny(dir.path(), "b", &["--quant", "lut4", "--intent", "does lut4 hold?"]);
    let (b, golden) = (text(&bundle), golden());
    let v = json(1, &["validate", b, "--golden", text(&golden), "--min-cosine", "0.999999"]);
    let checked = json(0, &["check", b]);
    let traced = json(0, &["trace", b, "--golden", text(&golden), "--note", "in a \u{1b}[2J test"]);
    let page = succeed(&["journal", b]);
    assert_eq!(page, succeed(&["journal", "show", b]));
    let found = sections(&page);
    assert_eq!(found.iter().map(|s| s.0.as_str()).collect::<Vec<_>>(), HEADINGS);
    let under = |heading: &str| &found.iter().find(|s| s.0 == heading).unwrap().1;
    assert_eq!(under("Intent"), "- does lut4 hold?");
    // Line breaks depend on the length of the repository's path.
    let flat = |heading: &str| under(heading).split_whitespace().collect::<Vec<_>>().join(" ");
    for says in ["quant lut4", "tokens 1", "anemoe ", "min-cosine 0.999999", "checkpoint"] {
        assert!(flat("Setup").contains(says), "{says}: {page}");
    }
    let lowest = format!("min_cosine {:.4}", v["min_cosine"].as_f64().unwrap() - 5e-5);
    for says in ["build done in", "validate fail in", "check pass in", "trace done in", lowest.as_str()] {
        assert!(flat("Result").contains(says), "{says}: {page}");
    }
    assert!(under("Surprise").contains("validate failed"), "{page}");
    assert!(flat("Result").contains("verdicts.not_ane"), "{page}");
    assert_eq!(under("Lesson"), "(nothing written)");
    assert!(under("Refs").contains("chain.json, sha256") && under("Refs").contains("golden.npz, sha256"));
    assert!(!page.contains('\u{1b}'), "a control character reaches the terminal");

    // The facts equal those of the commands' own documents.
    let list = entries(&bundle);
    assert_eq!(list.len(), 1);
    assert_eq!(list[0]["kinds"], serde_json::json!(["build", "validate", "check", "trace"]));
    let one = |kind: &str, status: &str| {
        let mut found = events(&bundle, kind, status);
        assert_eq!(found.len(), 1, "{kind} {status}");
        found.remove(0)
    };
    let validated = one("validate", "fail");
    for key in ["pass", "min_cosine", "mean_kl", "top1_agreement", "tokens_match"] {
        assert_eq!(validated["facts"][key], v[key], "{key}");
    }
    assert_eq!(validated["facts"]["wrong_choices"], v["wrong_choices"].as_array().unwrap().len());
    assert_eq!(validated["facts"]["fp16"]["median_cosine"], v["fp16"]["median_cosine"]);
    assert_eq!(one("check", "pass")["facts"]["ops"], checked["ops"]);
    assert_eq!(one("check", "pass")["facts"]["verdicts"], checked["verdicts"]);
    let layers = traced["layers"].as_array().unwrap();
    let cosines = layers.iter().map(|l| l["fidelity"]["min_cosine"].as_f64().unwrap());
    assert_eq!(one("trace", "done")["facts"]["min_cosine"], cosines.fold(1.0, f64::min));
    let built = one("build", "done");
    let inspected = json(0, &["inspect", b]);
    assert_eq!(built["facts"]["package_bytes"], inspected["bytes"]);
    assert_eq!(built["facts"]["packages"], inspected["shards"].as_array().unwrap().len());
    assert_eq!(built["facts"]["quant"]["attention"], "lut4 g32");
    assert_eq!(built["facts"]["chain_sha256"].as_str().unwrap().len(), 64);
    assert_eq!(built["of"], one("build", "started")["id"]);
    assert_eq!(built["options"]["quant"], "lut4");
    assert_eq!(built["options"]["tokens"], 1);
    assert!(built["machine"]["cores"].as_u64().unwrap() > 0 && built["seconds"].as_f64().unwrap() > 0.0);
}

#[test]
fn people_add_what_commands_cannot_know() {
    let dir = tempfile::tempdir().unwrap();
    let bundle = tiny(dir.path(), "b", &["--quant", "fp16"]);
    let b = text(&bundle);
    let check = ["check", b, "--intent"];
    succeed(&[&check[..], &["first"]].concat());
    succeed(&[&check[..], &["second"]].concat());
    let list = entries(&bundle);
    assert_eq!(list.len(), 2);
    let first = list[0]["id"].as_str().unwrap();
    succeed(&["journal", "add", b, "--lesson", "newest", "--next", "go on"]);
    let args = ["journal", "add", b, "--entry", &first[..8], "--surprise", "older", "--refs", "page 3"];
    let added = json(0, &args);
    assert_eq!(added["entry"], first);
    let list = entries(&bundle);
    assert_eq!((&list[1]["lesson"][0], &list[1]["next"][0]), (&"newest".into(), &"go on".into()));
    let last = |key: &str| list[0][key].as_array().unwrap().last().unwrap().clone();
    assert_eq!((last("surprise"), last("refs")), ("older".into(), "page 3".into()));
    let page = succeed(&["journal", b, "--entry", first]);
    assert!(page.contains("- older") && !page.contains("newest"), "{page}");

    refused(&["journal", "add", b], &["--lesson"]);
    refused(&["journal", "add", b, "--lesson", " "], &["nothing to add"]);
    refused(&["journal", "add", b, "--lesson", "x", "--entry", "zzz"], &["zzz names no entry", first]);
    refused(&["journal", "add", text(dir.path()), "--lesson", "x"], &["a folder of another kind"]);
    refused(&["journal", b, "--entry", ""], &["names several"]);
    refused(&["journal"], &["BUNDLE"]);
    refused(&["journal", b, "add", b, "--lesson", "x"], &["a bundle comes behind"]);
    refused(&["journal", b, "show"], &["BUNDLE"]);
    // Options of all commands may stand anywhere.
    for args in
        [["--json", "journal", "show", b], ["journal", "--json", "show", b], ["journal", "show", "--json", b]]
    {
        assert!(succeed(&args).starts_with('{'), "{args:?}");
    }
    assert!(succeed(&["journal", "--json", b]).starts_with('{'));
    refused(&["check", b, "--intent", "x", "--no-journal"], &["--no-journal"]);
    let long = "x".repeat(100_000);
    let args = ["--lesson", &long, "--next", &long, "--note", &long];
    refused(&[&["journal", "add", b], &args[..]].concat(), &["journal.jsonl", "more than 262144"]);
}

/// Checks that processes that append at the same time write whole lines.
#[test]
fn processes_append_at_the_same_time() {
    let dir = tempfile::tempdir().unwrap();
    let bundle = tiny(dir.path(), "b", &["--quant", "fp16", "--no-journal"]);
    let children: Vec<_> = (0..12)
        .map(|i| {
            let note = format!("{i} {}", "x".repeat(5000 * i));
            anemoe(&["journal", "add", text(&bundle), "--note", &note]).stdout(Stdio::null()).spawn().unwrap()
        })
        .collect();
    for mut child in children {
        assert!(child.wait().unwrap().success());
    }
    let notes: usize = entries(&bundle).iter().map(|e| e["notes"].as_array().unwrap().len()).sum();
    assert_eq!(notes, 12);
    let lines = fs::read_to_string(bundle.join("journal.jsonl")).unwrap();
    assert_eq!(lines.lines().count(), 12);
}

#[test]
fn nothing_is_written_where_nothing_is_wanted() {
    let dir = tempfile::tempdir().unwrap();
    let bundle = tiny(dir.path(), "b", &["--quant", "fp16", "--no-journal"]);
    let (b, golden) = (text(&bundle), golden());
    succeed(&["validate", b, "--golden", text(&golden), "--no-journal"]);
    succeed(&["check", b, "--no-journal"]);
    succeed(&["trace", b, "--golden", text(&golden), "--no-journal"]);
    assert!(!bundle.join("journal.jsonl").exists());
    let page = succeed(&["journal", b]);
    assert!(page.contains("Nothing is written yet") && page.contains("validate"), "{page}");
    assert!(entries(&bundle).is_empty());
    // A package by itself has no journal.
    let package = bundle.join("shards/L00.attn.mlpackage");
    let before = contents(&package);
    run(&["check", text(&package)]);
    assert!(contents(&package) == before && !package.join("journal.jsonl").exists());
}

#[test]
fn broken_journals_are_named_and_stop_no_gate() {
    let dir = tempfile::tempdir().unwrap();
    let bundle = tiny(dir.path(), "b", &["--quant", "fp16"]);
    let (b, file, golden) = (text(&bundle), bundle.join("journal.jsonl"), golden());
    let whole = fs::read_to_string(&file).unwrap();
    let lines = whole.lines().count();
    // The last line is cut off in its middle.
    fs::write(&file, &whole[..whole.len() - 40]).unwrap();
    let page = succeed(&["journal", b]);
    assert!(page.contains("has no end") && page.contains("was cut off"), "{page}");
    succeed(&["check", b]);
    let mended = fs::read_to_string(&file).unwrap();
    assert_eq!(mended.lines().count(), lines);
    assert_eq!(json(0, &["journal", b])["torn"], false);
    // The last line is garbage.
    fs::write(&file, format!("{whole}garbage\n")).unwrap();
    let line = format!("line {}", lines + 1);
    refused(&["journal", b], &["journal.jsonl", &line]);
    refused(&["journal", "add", b, "--note", "x"], &["journal.jsonl", &line]);
    let error = json(2, &["journal", b]);
    assert_eq!(error["error"]["path"], text(&file));
    // The journal cannot be written: a folder has its name.
    fs::remove_file(&file).unwrap();
    fs::create_dir(&file).unwrap();
    for args in [
        &["check", b][..],
        &["validate", b, "--golden", text(&golden)],
        &["trace", b, "--golden", text(&golden)],
    ] {
        let (code, out, err) = run(args);
        assert_eq!(code, 0, "{out}\n{err}");
        assert!(err.contains("journal.jsonl") && err.contains("nothing was written down"), "{err}");
    }
}

/// Checks that a bundle that cannot be written is checked all the same; by another user, since root may write anywhere.
#[cfg(unix)]
#[test]
fn a_bundle_that_cannot_be_written_is_checked_all_the_same() {
    use std::os::unix::fs::PermissionsExt;
    use std::os::unix::process::CommandExt;
    let dir = tempfile::tempdir().unwrap();
    let bundle = tiny(dir.path(), "b", &["--quant", "fp16", "--no-journal"]);
    let golden = dir.path().join("golden.npz");
    fs::copy(self::golden(), &golden).unwrap();
    fs::set_permissions(dir.path(), fs::Permissions::from_mode(0o755)).unwrap();
    fs::set_permissions(&bundle, fs::Permissions::from_mode(0o555)).unwrap();
    let root = finish(std::process::Command::new("id").arg("-u").output().unwrap()).1.trim() == "0";
    let golden_args = ["--golden", text(&golden)];
    for (command, more) in [("check", &[][..]), ("validate", &golden_args), ("trace", &golden_args)] {
        let mut child = anemoe(&[&[command, text(&bundle)], more].concat());
        if root {
            child.uid(65534).gid(65534);
        }
        match child.output() {
            Ok(output) => {
                let (code, out, err) = finish(output);
                assert_eq!(code, 0, "{command}: {out}\n{err}");
                assert!(err.contains("nothing was written down"), "{command}: {err}");
            }
            Err(e) => eprintln!("not run: another user cannot run the program here: {e}"),
        }
    }
    fs::set_permissions(&bundle, fs::Permissions::from_mode(0o755)).unwrap();
    assert!(!bundle.join("journal.jsonl").exists());
}

#[test]
fn an_interrupted_build_and_its_parts_are_told_of() {
    let dir = tempfile::tempdir().unwrap();
    let bundle = dir.path().join("b");
    let model = fixture("tiny-gemma4-moe");
    let args = ["build", text(&model), "-o", text(&bundle), "--quant", "lut4", "--jobs", "1"];
    let mut child = anemoe(&args).stdout(Stdio::null()).stderr(Stdio::null()).spawn().unwrap();
    // While the first shard is there, the last one cannot be finished yet.
    while child.try_wait().unwrap().is_none() && !bundle.join("shards/L00.attn.mlpackage").exists() {
        std::thread::sleep(std::time::Duration::from_millis(1));
    }
    let _ = child.kill();
    child.wait().unwrap();
    if !bundle.join("chain.json").exists() {
        // The journal tells of a build before it ends.
        assert!(succeed(&["journal", text(&bundle)]).contains("has no end"));
        succeed(&args);
        let list = entries(&bundle);
        assert_eq!(list.len(), 1);
        let said = list[0]["surprise"].to_string();
        assert!(said.contains("was interrupted; the one that began"), "{said}");
        assert!(!said.contains("has no end"), "{said}");
        let begun = events(&bundle, "build", "started");
        assert_eq!(begun[1]["facts"]["resumes"], begun[0]["id"]);
    }

    let parts = dir.path().join("parts");
    for part in ["0/2", "1/2"] {
        let out = text(&parts);
        let more = ["--quant", "lut4", "--shard", part, "--intent", "in parts"];
        succeed(&[&["build", text(&model), "-o", out], &more[..]].concat());
    }
    json(0, &["assemble", text(&parts), "--intent", "in parts"]);
    let list = entries(&parts);
    assert_eq!(list.len(), 1);
    assert_eq!(list[0]["kinds"], serde_json::json!(["build", "gate", "assemble"]));
    assert_eq!(list[0]["intent"], serde_json::json!(["in parts"]));
    let done = events(&parts, "build", "done");
    assert_eq!(done[1]["facts"]["part"], "1/2");
    let said = list[0]["surprise"].to_string();
    assert!(!said.contains("interrupted") && !said.contains("has no end"), "{said}");
    // Except for the journals, both bundles have the same bytes.
    assert!(contents(&parts) == contents(&bundle));
    assert!(parts.join("journal.jsonl").exists());
}
