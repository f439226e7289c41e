//! `anemoe import-report` and `anemoe verify-on-mac` with the built binary, without Core ML: honest and hostile reports,
//! which the tests make.

use crate::common::*;
use anemoe_gates::residency::facts;
use anemoe_gates::residency::outcomes::cells::program_cells;
use anemoe_mlpackage::package::Package;
use serde_json::{Value, json as value};
use std::collections::BTreeMap;
use std::fs;
use std::io::{Cursor, Write};
use zip::write::SimpleFileOptions;
use zip::{CompressionMethod, ZipWriter};

const STAGES: [&str; 10] =
    ["doctor", "tune", "build", "compile", "check", "soak", "validate", "bench", "predict", "energy"];
/// Name of an entry that leads out of its folder: no test may write this file.
const OUTSIDE: &str = "../outside.txt";

/// A bundle, and the entries of a report about it.
struct Made {
    bundle: Place,
    dir: Place,
    entries: BTreeMap<String, Value>,
}

impl Made {
    fn new() -> Made {
        let bundle = built("tiny-gemma4-moe", "--tokens 1,8");
        let (mut packages, mut plans) = (Vec::new(), Vec::new());
        for shard in list(&chain(&bundle)["shards"]) {
            let package = Package::open(&bundle.join(text(&shard["file"]))).unwrap();
            packages.push(value!({
                "name": shard["name"], "kind": shard["kind"], "bytes": shard["bytes"],
                "cells": program_cells(&facts(package.model())),
            }));
            let op = value!({"name": "x", "type": "ios18.conv", "preferred": "ane", "supported": ["ane"], "cost": 0.5});
            plans.push(value!({"package": shard["name"], "function": "t1", "ops": [op]}));
        }
        let record = |stage: &str| value!({"stage": stage, "end": "done", "seconds": 1.5, "document": null});
        let mut entries: BTreeMap<String, Value> =
            STAGES.iter().map(|stage| (format!("stages/{stage}.json"), record(stage))).collect();
        let predicted = json(0, format!("predict-speed {bundle} --chip m4-max"));
        let slower =
            |k: &Value| value!({"name": k["kind"], "ms_per_token": 3.0 * number(&k["ms"]["likely"])});
        let kinds: Vec<Value> = list(&predicted["one"]["kinds"]).iter().map(slower).collect();
        let controls = value!([{"control": "the CPU alone is allowed", "package": "L00.attn", "on_ane": 0, "on_cpu": 3, "pass": true}]);
        entries.get_mut("stages/predict.json").unwrap()["document"] = predicted;
        entries.get_mut("stages/check.json").unwrap()["document"] = value!({"controls": controls});
        let system =
            value!({"os": "macOS 26.0", "build": "25A354", "chip": "Apple M4 Max", "simulated": false});
        let system = value!({
            "system": system, "memory_bytes": 48_000_000_000u64, "cores": 16, "version": "0.1.0", "model": "tiny",
            "quant": "lut4", "tokens": [1, 8],
        });
        let plan = value!({
            "format": 1, "os": "macOS 26.0", "chip": "Apple M4 Max", "compute_units": "cpuAndNeuralEngine", "plans": plans,
        });
        let bench = value!({"schema": 1, "mode": "coreml", "kinds": kinds, "decode": []});
        let names = ["system.json", "bench.json", "packages.json", "plan.json"].map(String::from);
        entries.extend(names.into_iter().zip([system, bench, packages.into(), plan]));
        Made { bundle, dir: folder(), entries }
    }

    fn evidence(&self) -> Place {
        self.dir.join("evidence")
    }

    fn bytes(&self) -> BTreeMap<String, Vec<u8>> {
        self.entries.iter().map(|(name, v)| (name.clone(), serde_json::to_vec(v).unwrap())).collect()
    }

    /// Writes a report of these entries.
    fn write(&self, entries: &BTreeMap<String, Vec<u8>>) {
        let manifest = value!({"format": 1, "generator": "anemoe 0.1.0"});
        self.pack(Some(&manifest), entries, CompressionMethod::Deflated);
    }

    fn pack(&self, manifest: Option<&Value>, entries: &BTreeMap<String, Vec<u8>>, method: CompressionMethod) {
        let mut zip = ZipWriter::new(Cursor::new(Vec::new()));
        let manifest =
            manifest.map(|manifest| ("manifest.json".to_string(), manifest.to_string().into_bytes()));
        for (name, bytes) in manifest.iter().map(|(n, b)| (n, b)).chain(entries) {
            zip.start_file(name.clone(), SimpleFileOptions::default().compression_method(method)).unwrap();
            zip.write_all(bytes).unwrap();
        }
        fs::write(self.dir.join("r.zip"), zip.finish().unwrap().into_inner()).unwrap();
    }

    fn line(&self) -> String {
        format!("import-report {}/r.zip --evidence {}", self.dir, self.evidence())
    }

    /// Imports a report of the entries.
    fn import(&self) -> Value {
        self.write(&self.bytes());
        json(0, self.line())
    }

    /// Checks that the written report is refused for these reasons, and leaves nothing behind.
    fn refuse(&self, says: &[&str]) {
        refused(self.line(), &[&["r.zip"][..], says].concat());
        assert!(!self.evidence().exists(), "{says:?}: something was written");
        assert!(!self.dir.join("outside.txt").exists());
    }

    /// Checks that the report is refused if one document is changed.
    fn refuse_changed(&mut self, entry: &str, change: impl FnOnce(&mut Value), says: &str) {
        let kept = self.entries[entry].clone();
        change(self.entries.get_mut(entry).unwrap());
        self.write(&self.bytes());
        self.refuse(&[entry, says]);
        self.entries.insert(entry.into(), kept);
    }
}

#[test]
fn evidence_decides_plans_and_packages_and_is_added_once() {
    let made = Made::new();
    let (b, e) = (&made.bundle, made.evidence());
    let imported = made.import();
    let report = text(&imported["report"]);
    assert!(report.starts_with("m4-max-") && imported["already"] == false, "{imported:#}");
    assert!(each(&imported["rows"], "label").all(|label| label == "ANE_ALL"), "{imported:#}");
    assert!(list(&imported["left_out"]).is_empty(), "{imported:#}");
    let check = |options: &str| json(0, format!("check {b} --no-journal {options}"));
    assert!(each(&check("")["packages"], "verdict").all(|verdict| verdict != "ane"));
    let checked = check(&format!("--evidence {e} --strict"));
    for p in list(&checked["packages"]) {
        let found = value!([p["verdict"], p["measured"]["report"], p["ops"]["unknown"]]);
        assert_eq!(found, value!(["ane", report, 0]), "{p:#}");
    }
    let out = passes(format!("check {b} --evidence {e} --no-journal"));
    assert!(out.contains("imported report") && out.contains(report), "{out}");
    // The variable acts like the option; evidence says nothing about other chips.
    let by_variable =
        json_of(0, anemoe(format!("check {b} --no-journal")).env("ANEMOE_EVIDENCE", e.as_os_str()));
    assert_eq!(by_variable["verdicts"], checked["verdicts"]);
    let other = check(&format!("--evidence {e} --chip m1"));
    assert!(list(&other["packages"]).iter().all(|p| p["measured"].is_null()));
    let plan = json(0, format!("plan {} --tokens 1,8 --evidence {e}", fixture("tiny-gemma4-moe")));
    for shard in list(&plan["shards"]) {
        assert!(shard["verdict"] == "ane" && text(&shard["verdict_reason"]).contains(report), "{shard}");
    }
    // The measurement was three times as slow as the prediction.
    let speed = |options: &str| json(0, format!("predict-speed {b} {options}"));
    let ms = |v: &Value| number(&v["one"]["ms"]["likely"]);
    let calibrated = speed(&format!("--chip m4-max --evidence {e}"));
    assert!((ms(&calibrated) / ms(&speed("--chip m4-max")) - 3.0).abs() < 0.1);
    assert!(text(&calibrated["profile"]["call_ms"]["source"]).contains(report));
    assert_eq!(speed(&format!("--chip m1 --evidence {e}"))["profile"]["chip"], "m1");
    let before = contents(&e);
    let again = made.import();
    has(&again, value!({"already": true, "added": {"rows": 0, "chip": false}}));
    assert_eq!(before, contents(&e));
    // Packed in another way, it is the same report.
    let manifest = value!({"format": 1, "generator": "x"});
    made.pack(Some(&manifest), &made.bytes(), CompressionMethod::Stored);
    assert_eq!(json(0, made.line())["already"], true);
}

#[test]
fn outcomes_that_contradict_each_other_make_a_program_unknown() {
    let mut made = Made::new();
    made.import();
    for plan in made.entries.get_mut("plan.json").unwrap()["plans"].as_array_mut().unwrap() {
        plan["ops"][0]["preferred"] = "cpu".into();
    }
    let predict = made.entries.get_mut("stages/predict.json").unwrap();
    predict["document"]["profile"]["call_ms"]["likely"] = 0.31.into();
    let second = made.import();
    assert!(second["left_out"].to_string().contains("another table of chips"), "{second:#}");
    assert!(each(&second["rows"], "label").all(|label| label == "CPU_ALL"), "{second:#}");
    let checked = json(0, format!("check {} --evidence {} --no-journal", made.bundle, made.evidence()));
    for p in list(&checked["packages"]) {
        assert!(p["verdict"] == "unknown" && text(&p["measured"]["label"]).contains(" and "), "{p:#}");
        assert_eq!(p["reasons"][0]["rule"], "evidence.measured");
    }
}

#[test]
fn findings_that_say_nothing_are_left_out_and_named() {
    let mut made = Made::new();
    made.entries.get_mut("stages/check.json").unwrap()["document"]["controls"][0]["pass"] = false.into();
    made.entries.get_mut("bench.json").unwrap()["mode"] = "exact".into();
    let imported = made.import();
    let left_out = imported["left_out"].to_string();
    assert!(left_out.contains("negative control") && left_out.contains("not on Core ML"), "{left_out}");
    assert!(list(&imported["rows"]).is_empty() && imported["chip"].is_null());
    // The report is imported, without rows to judge by.
    let checked = json(0, format!("check {} --evidence {} --no-journal", made.bundle, made.evidence()));
    assert!(list(&checked["packages"]).iter().all(|p| p["measured"].is_null()));
}

#[test]
fn hostile_archives_are_refused_and_leave_nothing() {
    let made = Made::new();
    let good = made.bytes();
    let refuse_with = |name: &str, bytes: Vec<u8>, says: &str| {
        let mut entries = good.clone();
        entries.insert(name.into(), bytes);
        made.write(&entries);
        made.refuse(&["entry `", says]);
    };
    for name in
        [OUTSIDE, "/etc/passwd", "stages/../../x", "stages\\doctor.json", "stages/", "system.json/x", "C:x"]
    {
        refuse_with(name, b"{}".to_vec(), "no report has an entry of this name");
    }
    // A bomb: 200 MB of spaces in 200 kB.
    refuse_with("forms.toml", vec![b' '; 200 << 20], "too large");
    // Small values that take much more memory than their text.
    let soak = |values: String| {
        format!(r#"{{"stage":"soak","end":"done","seconds":1,"document":[{values}0]}}"#).into_bytes()
    };
    refuse_with("stages/soak.json", soak(r#"{"":0},"#.repeat(1 << 20)), "too many values");
    let path = made.dir.join("r.zip");
    for bytes in [&b""[..], b"PK\x05\x06", b"hello"] {
        fs::write(&path, bytes).unwrap();
        made.refuse(&["no zip"]);
    }
    // Files that are cut off, or have one changed byte, at any place.
    made.write(&good);
    let whole = fs::read(&path).unwrap();
    for at in (0..whole.len()).step_by(whole.len() / 40 + 1) {
        fs::write(&path, &whole[..at]).unwrap();
        made.refuse(&[]);
    }
    for at in (0..whole.len()).step_by(whole.len() / 60 + 1) {
        let mut bytes = whole.clone();
        bytes[at] ^= 0x55;
        fs::write(&path, &bytes).unwrap();
        let (code, _, err) = run(made.line());
        // Times and permissions of entries mean nothing; every other change is detected.
        assert!(code == 0 || code == 2, "{at}: {err}");
        assert_eq!(made.evidence().exists(), code == 0, "{at}: {err}");
        let _ = fs::remove_dir_all(made.evidence());
    }
}

#[test]
fn a_manifest_has_the_format_that_is_read() {
    let made = Made::new();
    let refuse = |manifest: Option<Value>, says: &[&str]| {
        made.pack(manifest.as_ref(), &made.bytes(), CompressionMethod::Deflated);
        made.refuse(says);
    };
    refuse(None, &["`manifest.json` is missing"]);
    refuse(Some(value!({"format": 2, "generator": "x"})), &["manifest.json", "format 2, 1 is read"]);
    refuse(Some(value!({"format": 1})), &["manifest.json", "generator"]);
}

#[test]
fn documents_that_are_missing_or_lie_are_named() {
    let mut made = Made::new();
    for entry in ["system.json", "stages/soak.json", "packages.json"] {
        let mut entries = made.bytes();
        entries.remove(entry);
        made.write(&entries);
        made.refuse(&[entry]);
    }
    let mut entries = made.bytes();
    entries.insert("system.json".into(), b"{\"system\": 1, \"system\": 2}".to_vec());
    made.write(&entries);
    made.refuse(&["entry `system.json`", "twice"]);
    let m = &mut made;
    m.refuse_changed("system.json", |v| v["system"]["chip"] = "\u{1b}[2J".into(), "chip");
    m.refuse_changed("system.json", |v| v["system"]["chip"] = "///".into(), "chip");
    m.refuse_changed("stages/soak.json", |v| v["stage"] = "bench".into(), "bench");
    m.refuse_changed("stages/soak.json", |v| v["end"] = "fine".into(), "fine");
    m.refuse_changed("stages/soak.json", |v| v["seconds"] = (-1.0).into(), "-1");
    m.refuse_changed("packages.json", |v| v[0]["name"] = "../x".into(), "../x");
    m.refuse_changed("packages.json", |v| v[1]["name"] = v[0]["name"].clone(), "twice");
    m.refuse_changed("packages.json", |v| v[0]["cells"]["label"] = "ANE_ALL".into(), "label");
    m.refuse_changed("packages.json", |v| v[0]["cells"]["program"] = "00".into(), "digest");
    m.refuse_changed("packages.json", |v| v[0]["cells"]["graph"] = "castle".into(), "castle");
    m.refuse_changed("packages.json", |v| v[0]["cells"]["depth"] = "1e300".into(), "1e300");
    m.refuse_changed("plan.json", |v| v["chip"] = "Apple M1".into(), "Apple M1");
    m.refuse_changed("plan.json", |v| v["format"] = 7.into(), "format 7");
    m.refuse_changed("plan.json", |v| v["plans"][0]["package"] = "L77".into(), "L77");
    let failure = value!({"failures": [{"what": "L77", "step": "load", "end": "refused", "message": "x"}]});
    m.refuse_changed("stages/compile.json", |v| v["document"] = failure, "L77");
    m.refuse_changed("bench.json", |v| v["schema"] = 9.into(), "schema 9");
    m.refuse_changed("stages/predict.json", |v| v["document"]["one"]["calls"] = "many".into(), "many");
    made.entries.get_mut("system.json").unwrap()["system"]["simulated"] = true.into();
    made.write(&made.bytes());
    made.refuse(&["fake Core ML", "--simulated"]);
}

#[test]
fn evidence_goes_into_a_folder_of_its_own() {
    let made = Made::new();
    let imported = made.import();
    fs::write(made.dir.join("file"), "x").unwrap();
    let import = format!("import-report {}/r.zip --evidence", made.dir);
    refused(format!("{import} {}", made.bundle), &["b.anemoe", "bundle"]);
    refused(format!("{import} {}/file", made.dir), &["file"]);
    // Evidence that is damaged later is named.
    let table = made.evidence().join(text(&imported["report"])).join("outcomes.tsv");
    fs::write(&table, "id\tgraph\n").unwrap();
    let check = format!("check {} --evidence", made.bundle);
    refused(format!("{check} {}", made.evidence()), &["outcomes.tsv", "no column"]);
    refused(format!("{check} /no/such/folder"), &["/no/such/folder"]);
}

#[cfg(not(target_os = "macos"))]
#[test]
fn a_verification_wants_a_mac_and_lists_its_stages_anywhere() {
    let dir = folder();
    refused(format!("verify-on-mac -o {dir}/r.zip"), &["Neural Engine", "macOS"]);
    assert_eq!(fs::read_dir(&dir).unwrap().count(), 0);
    let plan = json(0, "verify-on-mac --dry-run");
    assert_eq!(each(&plan["stages"], "stage").collect::<Vec<_>>(), STAGES);
    assert!(plan["cannot_run_here"].is_string());
    let text = passes("verify-on-mac --dry-run --stages soak,energy");
    assert!(text.contains("soak") && !text.contains("tune"), "{text}");
}
