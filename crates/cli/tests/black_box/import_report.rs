//! `anemoe import-report` and `anemoe verify-on-mac` with the built binary, without Core ML: honest and hostile reports,
//! which the tests make.

use crate::common::{build, fixture, json, refused, run};
use anemoe_gates::residency::facts;
use anemoe_gates::residency::outcomes::cells::program_cells;
use anemoe_mlpackage::package::Package;
use serde_json::{Value, json as value};
use sha2::{Digest, Sha256};
use std::collections::BTreeMap;
use std::fs;
use std::io::{Cursor, Write};
use std::path::{Path, PathBuf};
use tempfile::TempDir;
use zip::write::SimpleFileOptions;
use zip::{CompressionMethod, ZipWriter};

const STAGES: [&str; 10] =
    ["doctor", "tune", "build", "compile", "check", "soak", "validate", "bench", "predict", "energy"];
/// Name of an entry that leads out of its folder: no test may write this file.
const OUTSIDE: &str = "../outside.txt";

fn text(path: &Path) -> &str {
    path.to_str().unwrap()
}

/// A bundle, and the entries of a report about it.
struct Made {
    dir: TempDir,
    entries: BTreeMap<String, Value>,
}

impl Made {
    fn new() -> Made {
        let dir = tempfile::tempdir().unwrap();
        let bundle = dir.path().join("b.anemoe");
        build(&fixture("tiny-gemma4-moe"), &bundle, &["--quant", "lut4", "--tokens", "1,8"]);
        let mut packages = Vec::new();
        let mut plans = Vec::new();
        let chain: Value = serde_json::from_slice(&fs::read(bundle.join("chain.json")).unwrap()).unwrap();
        for shard in chain["shards"].as_array().unwrap() {
            let package = Package::open(&bundle.join(shard["file"].as_str().unwrap())).unwrap();
            packages.push(value!({
                "name": shard["name"], "kind": shard["kind"], "bytes": shard["bytes"],
                "cells": program_cells(&facts(package.model())),
            }));
            let op = value!({"name": "x", "type": "ios18.conv", "preferred": "ane", "supported": ["ane"], "cost": 0.5});
            plans.push(value!({"package": shard["name"], "function": "t1", "ops": [op]}));
        }
        let mut entries = BTreeMap::new();
        let system =
            value!({"os": "macOS 26.0", "build": "25A354", "chip": "Apple M4 Max", "simulated": false});
        entries.insert("system.json".into(), value!({
            "system": system, "memory_bytes": 48_000_000_000u64, "cores": 16, "version": "0.1.0", "model": "tiny",
            "quant": "lut4", "tokens": [1, 8],
        }));
        for stage in STAGES {
            let record = value!({"stage": stage, "end": "done", "seconds": 1.5, "document": null});
            entries.insert(format!("stages/{stage}.json"), record);
        }
        let b = text(&bundle);
        let predicted = json(0, &["predict-speed", b, "--chip", "m4-max"]);
        let kinds: Vec<Value> = predicted["one"]["kinds"]
            .as_array()
            .unwrap()
            .iter()
            .map(|k| value!({"name": k["kind"], "ms_per_token": 3.0 * k["ms"]["likely"].as_f64().unwrap()}))
            .collect();
        entries.get_mut("stages/predict.json").unwrap()["document"] = predicted;
        let controls = value!([{"control": "the CPU alone is allowed", "package": "L00.attn", "on_ane": 0, "on_cpu": 3, "pass": true}]);
        entries.get_mut("stages/check.json").unwrap()["document"] = value!({"controls": controls});
        entries.insert(
            "bench.json".into(),
            value!({"schema": 1, "mode": "coreml", "kinds": kinds, "decode": []}),
        );
        entries.insert("packages.json".into(), Value::Array(packages));
        entries.insert("plan.json".into(), value!({
            "format": 1, "os": "macOS 26.0", "chip": "Apple M4 Max", "compute_units": "cpuAndNeuralEngine", "plans": plans,
        }));
        Made { dir, entries }
    }

    fn bundle(&self) -> PathBuf {
        self.dir.path().join("b.anemoe")
    }

    fn evidence(&self) -> PathBuf {
        self.dir.path().join("evidence")
    }

    fn bytes(&self) -> BTreeMap<String, Vec<u8>> {
        self.entries.iter().map(|(name, v)| (name.clone(), serde_json::to_vec(v).unwrap())).collect()
    }

    /// Writes a report of these entries, with a correct manifest.
    fn write(&self, entries: &BTreeMap<String, Vec<u8>>) -> PathBuf {
        let listed: BTreeMap<&String, Value> = entries
            .iter()
            .map(|(name, bytes)| (name, value!({"bytes": bytes.len(), "sha256": sha256(bytes)})))
            .collect();
        let manifest = value!({"format": 1, "generator": "anemoe 0.1.0", "entries": listed});
        let mut all = vec![("manifest.json".to_string(), serde_json::to_vec(&manifest).unwrap())];
        all.extend(entries.iter().map(|(n, b)| (n.clone(), b.clone())));
        self.pack(&all)
    }

    fn pack(&self, entries: &[(String, Vec<u8>)]) -> PathBuf {
        let mut zip = ZipWriter::new(Cursor::new(Vec::new()));
        let options = SimpleFileOptions::default().compression_method(CompressionMethod::Deflated);
        for (name, bytes) in entries {
            zip.start_file(name.clone(), options).unwrap();
            zip.write_all(bytes).unwrap();
        }
        let path = self.dir.path().join("r.zip");
        fs::write(&path, zip.finish().unwrap().into_inner()).unwrap();
        path
    }

    /// Checks that a report is refused for these reasons, and leaves nothing behind.
    fn refuse(&self, zip: &Path, says: &[&str]) {
        refused(
            &["import-report", text(zip), "--evidence", text(&self.evidence())],
            &[&["r.zip"][..], says].concat(),
        );
        assert!(!self.evidence().exists(), "{says:?}: something was written");
        assert!(!self.dir.path().join("outside.txt").exists());
    }

    /// Checks that the report is refused if one document is changed.
    fn refuse_changed(&self, entry: &str, change: impl FnOnce(&mut Value), says: &[&str]) {
        let mut entries = self.entries.clone();
        change(entries.get_mut(entry).unwrap());
        let changed = Made { dir: tempfile::tempdir().unwrap(), entries };
        let zip = changed.write(&changed.bytes());
        changed.refuse(&zip, &[&[entry][..], says].concat());
    }
}

fn sha256(bytes: &[u8]) -> String {
    Sha256::digest(bytes).iter().map(|b| format!("{b:02x}")).collect()
}

#[test]
fn evidence_decides_plans_and_packages_and_is_added_once() {
    let made = Made::new();
    let zip = made.write(&made.bytes());
    let (bundle, evidence) = (made.bundle(), made.evidence());
    let (b, e) = (text(&bundle), text(&evidence));
    let imported = json(0, &["import-report", text(&zip), "--evidence", e]);
    let report = imported["report"].as_str().unwrap();
    assert!(report.starts_with("m4-max-") && imported["already"] == false, "{imported:#}");
    assert!(imported["rows"].as_array().unwrap().iter().all(|r| r["label"] == "ANE_ALL"), "{imported:#}");
    assert!(imported["left_out"].as_array().unwrap().is_empty(), "{imported:#}");
    let before = json(0, &["check", b, "--no-journal"]);
    assert!(before["packages"].as_array().unwrap().iter().all(|p| p["verdict"] != "ane"));
    let checked = json(0, &["check", b, "--evidence", e, "--strict", "--no-journal"]);
    for p in checked["packages"].as_array().unwrap() {
        assert!(
            p["verdict"] == "ane" && p["measured"]["report"] == report && p["ops"]["unknown"] == 0,
            "{p:#}"
        );
    }
    let (code, out, _) = run(&["check", b, "--evidence", e, "--no-journal"]);
    assert!(code == 0 && out.contains("imported report") && out.contains(report), "{out}");
    // The variable acts like the option; evidence says nothing about other chips.
    let output = crate::common::anemoe(&["check", b, "--json", "--no-journal"])
        .env("ANEMOE_EVIDENCE", &evidence)
        .output()
        .unwrap();
    let by_variable: Value = serde_json::from_slice(&output.stdout).unwrap();
    assert_eq!(by_variable["verdicts"], checked["verdicts"]);
    let other = json(0, &["check", b, "--evidence", e, "--chip", "m1", "--no-journal"]);
    assert!(other["packages"].as_array().unwrap().iter().all(|p| p["measured"].is_null()));
    let fixture = fixture("tiny-gemma4-moe");
    let plan = json(0, &["plan", text(&fixture), "--quant", "lut4", "--tokens", "1,8", "--evidence", e]);
    let shards = plan["shards"].as_array().unwrap();
    assert!(
        shards
            .iter()
            .all(|s| s["verdict"] == "ane" && s["verdict_reason"].as_str().unwrap().contains(report))
    );
    // The measurement was three times as slow as the prediction.
    let plain = json(0, &["predict-speed", b, "--chip", "m4-max"]);
    let calibrated = json(0, &["predict-speed", b, "--chip", "m4-max", "--evidence", e]);
    let ms = |v: &Value| v["one"]["ms"]["likely"].as_f64().unwrap();
    assert!((ms(&calibrated) / ms(&plain) - 3.0).abs() < 0.1);
    assert!(calibrated["profile"]["call_ms"]["source"].as_str().unwrap().contains(report));
    let elsewhere = json(0, &["predict-speed", b, "--chip", "m1", "--evidence", e]);
    assert_eq!(elsewhere["profile"]["chip"], "m1");
    let contents = crate::common::contents(&evidence);
    let again = json(0, &["import-report", text(&zip), "--evidence", e]);
    assert!(again["already"] == true && again["added"] == value!({"rows": 0, "chip": false}), "{again:#}");
    assert_eq!(contents, crate::common::contents(&evidence));
    // Packed in another way, it is the same report.
    let stored = made.dir.path().join("stored.zip");
    let mut other = ZipWriter::new(Cursor::new(Vec::new()));
    let mut archive = zip::ZipArchive::new(fs::File::open(&zip).unwrap()).unwrap();
    for i in (0..archive.len()).rev() {
        let mut entry = archive.by_index(i).unwrap();
        other
            .start_file(
                entry.name().to_string(),
                SimpleFileOptions::default().compression_method(CompressionMethod::Stored),
            )
            .unwrap();
        std::io::copy(&mut entry, &mut other).unwrap();
    }
    fs::write(&stored, other.finish().unwrap().into_inner()).unwrap();
    assert_eq!(json(0, &["import-report", text(&stored), "--evidence", e])["already"], true);
}

#[test]
fn outcomes_that_contradict_each_other_make_a_program_unknown() {
    let mut made = Made::new();
    let (bundle, evidence) = (made.bundle(), made.evidence());
    let e = text(&evidence);
    json(0, &["import-report", text(&made.write(&made.bytes())), "--evidence", e]);
    for plan in made.entries.get_mut("plan.json").unwrap()["plans"].as_array_mut().unwrap() {
        plan["ops"][0]["preferred"] = "cpu".into();
    }
    let second = json(0, &["import-report", text(&made.write(&made.bytes())), "--evidence", e]);
    assert!(second["rows"].as_array().unwrap().iter().all(|r| r["label"] == "CPU_ALL"), "{second:#}");
    let checked = json(0, &["check", text(&bundle), "--evidence", e, "--no-journal"]);
    for p in checked["packages"].as_array().unwrap() {
        assert!(
            p["verdict"] == "unknown" && p["measured"]["label"].as_str().unwrap().contains(" and "),
            "{p:#}"
        );
        assert_eq!(p["reasons"][0]["rule"], "evidence.measured");
    }
}

#[test]
fn findings_that_say_nothing_are_left_out_and_named() {
    let mut made = Made::new();
    let evidence = made.evidence();
    made.entries.get_mut("stages/check.json").unwrap()["document"]["controls"][0]["pass"] = false.into();
    made.entries.get_mut("bench.json").unwrap()["mode"] = "exact".into();
    let imported =
        json(0, &["import-report", text(&made.write(&made.bytes())), "--evidence", text(&evidence)]);
    let left_out = imported["left_out"].to_string();
    assert!(left_out.contains("negative control") && left_out.contains("not on Core ML"), "{left_out}");
    assert!(imported["rows"].as_array().unwrap().is_empty() && imported["chip"].is_null());
    // The report is imported, without rows to judge by.
    let checked = json(0, &["check", text(&made.bundle()), "--evidence", text(&evidence), "--no-journal"]);
    assert!(checked["packages"].as_array().unwrap().iter().all(|p| p["measured"].is_null()));
}

#[test]
fn hostile_archives_are_refused_and_leave_nothing() {
    let made = Made::new();
    let good = made.bytes();
    let with = |name: &str, bytes: Vec<u8>| {
        let mut entries = good.clone();
        entries.insert(name.into(), bytes);
        made.write(&entries)
    };
    for name in
        [OUTSIDE, "/etc/passwd", "stages/../../x", "stages\\doctor.json", "stages/", "system.json/x", "C:x"]
    {
        made.refuse(&with(name, b"{}".to_vec()), &["entry `", "no report has an entry of this name"]);
    }
    // A bomb: 200 MB of spaces in 200 kB.
    made.refuse(&with("forms.toml", vec![b' '; 200 << 20]), &["entry `forms.toml`", "bytes, where"]);
    // Small values that take much more memory than their text, packed as no report is, or in a larger file.
    let soak = |values: String| {
        format!(r#"{{"stage":"soak","end":"done","seconds":1,"document":[{values}0]}}"#).into_bytes()
    };
    let dense = soak(r#"{"":0},"#.repeat(1 << 20));
    made.refuse(&with("stages/soak.json", dense), &["entry `stages/soak.json`", "which no report is"]);
    let values = soak((0..400_000).map(|i| format!(r#"{{"":{i}}},"#)).collect());
    made.refuse(&with("stages/soak.json", values), &["entry `stages/soak.json`", "too many values"]);
    let path = made.dir.path().join("r.zip");
    for (bytes, says) in [(&b""[..], "no zip"), (b"PK\x05\x06", "no zip"), (b"hello", "no zip")] {
        fs::write(&path, bytes).unwrap();
        made.refuse(&path, &[says]);
    }
    // Files that are cut off, or have one changed byte, at any place.
    let whole = fs::read(made.write(&good)).unwrap();
    for at in (0..whole.len()).step_by(whole.len() / 40 + 1) {
        fs::write(&path, &whole[..at]).unwrap();
        made.refuse(&path, &[]);
    }
    for at in (0..whole.len()).step_by(whole.len() / 60 + 1) {
        let mut bytes = whole.clone();
        bytes[at] ^= 0x55;
        fs::write(&path, &bytes).unwrap();
        let (code, _, err) = run(&["import-report", text(&path), "--evidence", text(&made.evidence())]);
        // Times and permissions of entries mean nothing; every other change is detected.
        assert!(code == 0 || code == 2, "{at}: {err}");
        assert!(!err.contains("panicked"), "{at}: {err}");
        assert_eq!(made.evidence().exists(), code == 0, "{at}: {err}");
        let _ = fs::remove_dir_all(made.evidence());
    }
    // The same entry name twice.
    let manifest = (String::from("manifest.json"), b"{}".to_vec());
    let zip = made.pack(&[manifest, ("manifesu.json".into(), b"{}".to_vec())]);
    let twice = String::from_utf8_lossy(&fs::read(&zip).unwrap()).len();
    assert!(twice > 0);
    let bytes = fs::read(&zip).unwrap();
    let renamed: Vec<u8> = replace(&bytes, b"manifesu", b"manifest");
    fs::write(&zip, renamed).unwrap();
    made.refuse(&zip, &["twice"]);
}

fn replace(bytes: &[u8], from: &[u8], to: &[u8]) -> Vec<u8> {
    let mut out = bytes.to_vec();
    while let Some(at) = out.windows(from.len()).position(|w| w == from) {
        out[at..at + to.len()].copy_from_slice(to);
    }
    out
}

#[test]
fn manifests_that_lie_are_found_out() {
    let made = Made::new();
    let good = made.bytes();
    let zip = made.pack(&good.clone().into_iter().collect::<Vec<_>>());
    made.refuse(&zip, &["`manifest.json` is missing"]);
    let pack_with = |manifest: Value| {
        let mut all = vec![("manifest.json".to_string(), serde_json::to_vec(&manifest).unwrap())];
        all.extend(good.clone());
        made.pack(&all)
    };
    made.refuse(
        &pack_with(value!({"format": 2, "generator": "x", "entries": {}})),
        &["manifest.json", "format 2, 1 is read"],
    );
    made.refuse(&pack_with(value!({"format": 1, "generator": "x"})), &["manifest.json", "entries"]);
    made.refuse(&pack_with(value!({"format": 1, "generator": "x", "entries": {}})), &["does not list it"]);
    let mut listed: BTreeMap<String, Value> = good
        .iter()
        .map(|(name, bytes)| (name.clone(), value!({"bytes": bytes.len(), "sha256": sha256(bytes)})))
        .collect();
    listed.insert("system.json".into(), value!({"bytes": 3, "sha256": sha256(b"{}")}));
    made.refuse(
        &pack_with(value!({"format": 1, "generator": "x", "entries": listed})),
        &["system.json", "others than the manifest says"],
    );
    listed.insert(
        "system.json".into(),
        value!({"bytes": good["system.json"].len(), "sha256": sha256(&good["system.json"])}),
    );
    listed.insert("forms.toml".into(), value!({"bytes": 0, "sha256": sha256(b"")}));
    made.refuse(
        &pack_with(value!({"format": 1, "generator": "x", "entries": listed})),
        &["forms.toml", "is missing"],
    );
}

#[test]
fn documents_that_are_missing_or_lie_are_named() {
    let made = Made::new();
    for entry in ["system.json", "stages/soak.json", "packages.json"] {
        let mut entries = made.bytes();
        entries.remove(entry);
        made.refuse(&made.write(&entries), &[entry]);
    }
    let mut entries = made.bytes();
    entries.insert("system.json".into(), b"{\"system\": 1, \"system\": 2}".to_vec());
    made.refuse(&made.write(&entries), &["entry `system.json`", "twice"]);
    let m = &made;
    m.refuse_changed("system.json", |v| v["system"]["chip"] = "\u{1b}[2J".into(), &["chip"]);
    m.refuse_changed("system.json", |v| v["system"]["chip"] = "///".into(), &["chip"]);
    m.refuse_changed("stages/soak.json", |v| v["stage"] = "bench".into(), &["bench"]);
    m.refuse_changed("stages/soak.json", |v| v["end"] = "fine".into(), &["fine"]);
    m.refuse_changed("stages/soak.json", |v| v["seconds"] = (-1.0).into(), &["-1"]);
    m.refuse_changed("packages.json", |v| v[0]["name"] = "../x".into(), &["../x"]);
    m.refuse_changed("packages.json", |v| v[1]["name"] = v[0]["name"].clone(), &["twice"]);
    m.refuse_changed("packages.json", |v| v[0]["cells"]["label"] = "ANE_ALL".into(), &["label"]);
    m.refuse_changed("packages.json", |v| v[0]["cells"]["program"] = "00".into(), &["digest"]);
    m.refuse_changed("packages.json", |v| v[0]["cells"]["graph"] = "castle".into(), &["castle"]);
    m.refuse_changed("packages.json", |v| v[0]["cells"]["depth"] = "1e300".into(), &["1e300"]);
    m.refuse_changed("plan.json", |v| v["chip"] = "Apple M1".into(), &["Apple M1"]);
    m.refuse_changed("plan.json", |v| v["format"] = 7.into(), &["format 7"]);
    m.refuse_changed("plan.json", |v| v["plans"][0]["package"] = "L77".into(), &["L77"]);
    let failure = value!({"failures": [{"what": "L77", "step": "load", "end": "refused", "message": "x"}]});
    m.refuse_changed("stages/compile.json", |v| v["document"] = failure, &["L77"]);
    m.refuse_changed("bench.json", |v| v["schema"] = 9.into(), &["schema 9"]);
    m.refuse_changed("stages/predict.json", |v| v["document"]["one"]["calls"] = "many".into(), &["many"]);
    // The speed is left out if its table of chips is unknown to this version.
    let mut other = Made { dir: tempfile::tempdir().unwrap(), entries: made.entries.clone() };
    other.entries.get_mut("stages/predict.json").unwrap()["document"]["profile"]["call_ms"]["likely"] =
        0.31.into();
    let imported = json(
        0,
        &["import-report", text(&other.write(&other.bytes())), "--evidence", text(&other.evidence())],
    );
    assert!(imported["left_out"].to_string().contains("another table of chips"), "{imported:#}");
}

#[test]
fn evidence_goes_into_a_folder_of_its_own() {
    let made = Made::new();
    let zip = made.write(&made.bytes());
    let bundle = made.bundle();
    refused(&["import-report", text(&zip), "--evidence", text(&bundle)], &["b.anemoe", "bundle"]);
    let file = made.dir.path().join("file");
    fs::write(&file, "x").unwrap();
    refused(&["import-report", text(&zip), "--evidence", text(&file)], &["file"]);
    // Evidence that is damaged later is named.
    let imported = json(0, &["import-report", text(&zip), "--evidence", text(&made.evidence())]);
    let table = made.evidence().join(imported["report"].as_str().unwrap()).join("outcomes.tsv");
    fs::write(&table, "id\tgraph\n").unwrap();
    refused(&["check", text(&bundle), "--evidence", text(&made.evidence())], &["outcomes.tsv", "no column"]);
    refused(&["check", text(&bundle), "--evidence", "/no/such/folder"], &["/no/such/folder"]);
}

#[test]
fn reports_of_the_fake_are_no_evidence() {
    let mut made = Made::new();
    made.entries.get_mut("system.json").unwrap()["system"]["simulated"] = true.into();
    made.refuse(&made.write(&made.bytes()), &["fake Core ML", "--simulated"]);
}

#[cfg(not(target_os = "macos"))]
#[test]
fn a_verification_wants_a_mac_and_lists_its_stages_anywhere() {
    let dir = tempfile::tempdir().unwrap();
    let out = dir.path().join("r.zip");
    refused(&["verify-on-mac", "-o", text(&out)], &["Neural Engine", "macOS"]);
    assert_eq!(fs::read_dir(dir.path()).unwrap().count(), 0);
    let plan = json(0, &["verify-on-mac", "--dry-run"]);
    let names: Vec<&str> =
        plan["stages"].as_array().unwrap().iter().map(|s| s["stage"].as_str().unwrap()).collect();
    assert_eq!(names, STAGES);
    assert!(plan["cannot_run_here"].is_string());
    let (code, text, _) = run(&["verify-on-mac", "--dry-run", "--stages", "soak,energy"]);
    assert!(
        code == 0 && text.contains("soak") && !text.contains("tune") && text.contains("guesses"),
        "{text}"
    );
}
