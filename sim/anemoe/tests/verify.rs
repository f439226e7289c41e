//! `anemoe verify-on-mac` on the fake Core ML, with planted outcomes, and the import of its report.

mod common;

use common::Sandbox;
use serde_json::Value;
use std::fs;
use std::io::Read;
use std::path::{Path, PathBuf};
use std::process::Stdio;
use std::time::{Duration, Instant};

fn checkpoint() -> String {
    let path = Path::new(env!("CARGO_MANIFEST_DIR")).join("../../fixtures/tiny-gemma4-moe");
    path.to_str().unwrap().to_string()
}

/// Returns the arguments of a short verification in a sandbox.
fn arguments(sandbox: &Sandbox, more: &[&str]) -> Vec<String> {
    let (out, checkpoint) = (sandbox.path("report.zip"), checkpoint());
    let fixed =
        ["verify-on-mac", "--checkpoint", &checkpoint, "-o", out.to_str().unwrap(), "--tokens", "1,8"];
    let short = ["--calls", "20", "--soak-passes", "60", "--soak-seconds", "0", "--energy-seconds", "1"];
    [&fixed[..], &short, more].concat().into_iter().map(String::from).collect()
}

fn verify(sandbox: &Sandbox, status: i32, more: &[&str]) -> Value {
    let all = arguments(sandbox, more);
    sandbox.json(status, &all.iter().map(String::as_str).collect::<Vec<_>>())
}

fn stage<'a>(document: &'a Value, name: &str) -> &'a Value {
    let stages = document["stages"].as_array().unwrap();
    stages.iter().find(|s| s["stage"] == name).unwrap_or_else(|| panic!("{name} is not in {document:#}"))
}

fn entry(sandbox: &Sandbox, name: &str) -> String {
    let file = fs::File::open(sandbox.path("report.zip")).unwrap();
    let mut text = String::new();
    zip::ZipArchive::new(file).unwrap().by_name(name).unwrap().read_to_string(&mut text).unwrap();
    text
}

fn document(sandbox: &Sandbox, stage: &str) -> Value {
    let record: Value = serde_json::from_str(&entry(sandbox, &format!("stages/{stage}.json"))).unwrap();
    record["document"].clone()
}

/// Puts a fake `powermetrics` into the sandbox. Returns a search path that finds it first.
fn with_powermetrics(sandbox: &Sandbox, script: &str) -> String {
    use std::os::unix::fs::PermissionsExt;
    let bin = sandbox.path("bin");
    fs::create_dir_all(&bin).unwrap();
    for name in ["powermetrics", "sudo"] {
        let text = if name == "sudo" { "#!/bin/sh\nexit 1\n" } else { script };
        fs::write(bin.join(name), text).unwrap();
        fs::set_permissions(bin.join(name), fs::Permissions::from_mode(0o755)).unwrap();
    }
    format!("{}:{}", bin.display(), std::env::var("PATH").unwrap_or_default())
}

/// Runs the program with environment variables. Returns its exit status, its document and its standard error.
fn run_with(sandbox: &Sandbox, arguments: &[String], variables: &[(&str, &str)]) -> (i32, Value, String) {
    let all: Vec<&str> = arguments.iter().map(String::as_str).chain(["--json"]).collect();
    let output = sandbox.anemoe(&all).envs(variables.iter().copied()).output().unwrap();
    let err = String::from_utf8_lossy(&output.stderr).into_owned();
    let out = serde_json::from_slice(&output.stdout).unwrap_or_default();
    (output.status.code().unwrap_or(-1), out, err)
}

fn verdict(report: &Value, package: &str) -> (String, bool) {
    let packages = report["packages"].as_array().unwrap();
    let one = packages.iter().find(|p| p["name"] == package).unwrap();
    (one["verdict"].as_str().unwrap().to_string(), one["measured"].is_object())
}

fn import(sandbox: &Sandbox) -> (String, Value) {
    let (zip, folder) = (sandbox.path("report.zip"), sandbox.path("evidence"));
    let folder = folder.to_str().unwrap().to_string();
    let args = ["import-report", zip.to_str().unwrap(), "--evidence", &folder, "--simulated"];
    let imported = sandbox.json(0, &args);
    (folder, imported)
}

#[test]
fn a_whole_run_is_one_private_report_that_becomes_evidence() {
    let sandbox = Sandbox::new();
    let path = with_powermetrics(
        &sandbox,
        "#!/bin/sh\necho 'CPU Power: 200 mW'; echo 'GPU Power: 10 mW'; echo 'ANE Power: 90 mW'\n",
    );
    let variables = [
        ("PATH", path.as_str()),
        ("USER", "annabella"),
        ("HOSTNAME", "annas-mac"),
        ("HOME", "/tmp/annas-home"),
    ];
    // Trials of other forms are slow, so that tune chooses the default form.
    let others = ["cache-host", "per-head", "io-channels", "norm-plain", "sigmoid", "bank", "apart"];
    sandbox.plant(&others.map(|form| format!("{form} slow 9000\n")).concat());
    let all = arguments(&sandbox, &["--quant", "fp16"]);
    let (code, first, err) = run_with(&sandbox, &all, &variables);
    assert_eq!(code, 0, "{first:#}\n{err}");
    for s in first["stages"].as_array().unwrap() {
        assert!(s["end"] == "done" && s["reused"] == false, "{s}");
    }
    // The report has nothing private: neither folders nor names.
    let dir = sandbox.dir.path().display().to_string();
    for name in first["entries"].as_array().unwrap() {
        let text = entry(&sandbox, name.as_str().unwrap());
        for word in [dir.as_str(), "annabella", "annas-mac", "annas-home", "/home/", "/root"] {
            assert!(!text.contains(word), "{name}: {word} in\n{text}");
        }
    }
    let energy = document(&sandbox, "energy");
    assert_eq!(
        (energy["running"]["ane"].as_f64(), energy["running"]["samples"].as_u64()),
        (Some(90.0), Some(1))
    );
    let soak = &document(&sandbox, "soak")["figures"];
    assert!(
        soak["passes"].as_u64() >= Some(120) && soak["wrong_passes"] == 0 && soak["wrong_states"] == 0,
        "{soak}"
    );
    assert!(soak["never_called"].as_array().unwrap().is_empty() && soak["leaks"] == false, "{soak}");
    assert!(soak["memory"].as_array().unwrap().len() >= 10, "{soak}");
    let bench: Value = serde_json::from_str(&entry(&sandbox, "bench.json")).unwrap();
    assert_eq!((&bench["mode"], &bench["verify"][0]["tokens"]), (&Value::from("coreml"), &Value::from(8)));

    // A second run reuses every stage.
    let (code, second, _) = run_with(&sandbox, &all, &variables);
    assert!(
        code == 0 && second["stages"].as_array().unwrap().iter().all(|s| s["reused"] == true),
        "{second:#}"
    );

    // On any machine: the measured placement replaces verdicts that were unknown or negative by a rule.
    let bundle = sandbox.path("report.work/bundle.anemoe");
    let b = bundle.to_str().unwrap();
    let (code, before, _) = sandbox.run(&["check", b, "--json", "--no-journal"]);
    assert_eq!(code, 0);
    let before: Value = serde_json::from_str(&before).unwrap();
    assert_ne!(verdict(&before, "L00.attn").0, "ane");
    let zip = sandbox.path("report.zip");
    sandbox.refused(&["import-report", zip.to_str().unwrap()], &["fake Core ML", "--simulated"]);
    let (evidence, imported) = import(&sandbox);
    assert!(
        imported["already"] == false && imported["left_out"].as_array().unwrap().is_empty(),
        "{imported:#}"
    );
    assert!(imported["rows"].as_array().unwrap().iter().all(|r| r["label"] == "ANE_ALL"), "{imported:#}");
    let after = sandbox.json(0, &["check", b, "--evidence", &evidence, "--strict", "--no-journal"]);
    let report = imported["report"].as_str().unwrap();
    for p in after["packages"].as_array().unwrap() {
        assert!(p["verdict"] == "ane" && p["measured"]["report"] == report, "{p:#}");
        assert_eq!(p["ops"]["unknown"], 0);
    }
    // Nothing is known of a chip without measurements, and nothing without the evidence folder.
    let (_, other, _) =
        sandbox.run(&["check", b, "--evidence", &evidence, "--chip", "m1", "--json", "--no-journal"]);
    assert!(!verdict(&serde_json::from_str(&other).unwrap(), "L00.attn").1);
    let speed = ["predict-speed", b, "--chip", "m4-max"];
    let (plain, calibrated) =
        (sandbox.json(0, &speed), sandbox.json(0, &[&speed[..], &["--evidence", &evidence]].concat()));
    assert_eq!(calibrated["profile"]["chip"], "m4-max-calibrated");
    assert!(calibrated["profile"]["call_ms"]["source"].as_str().unwrap().contains(report), "{calibrated:#}");
    assert_ne!(plain["one"]["ms"]["likely"], calibrated["one"]["ms"]["likely"]);
    let plan = ["plan", &checkpoint(), "--quant", "fp16", "--tokens", "1,8", "--evidence", &evidence];
    let plan = sandbox.json(0, &plan);
    let judged = plan["shards"]
        .as_array()
        .unwrap()
        .iter()
        .filter(|s| s["verdict"] == "ane" && s["verdict_reason"].as_str().unwrap().contains(report));
    assert!(judged.count() > 0, "{plan:#}");
    let table = sandbox.path("evidence").join(report).join("outcomes.tsv");
    let scored = sandbox.json(0, &["check", "--outcomes", table.to_str().unwrap()]);
    assert_eq!(scored["score"]["rows"].as_u64(), Some(imported["rows"].as_array().unwrap().len() as u64));
    // Importing the same report again adds nothing.
    let (_, again) = import(&sandbox);
    assert!(again["already"] == true && again["added"]["rows"] == 0, "{again:#}");
}

/// Stages without the tune, which has tests of its own.
const WITHOUT_TUNE: &str = "doctor,build,compile,check,soak";

#[test]
fn a_soak_that_fails_names_the_shard_and_the_report_comes_all_the_same() {
    let sandbox = Sandbox::new();
    verify(&sandbox, 0, &["--stages", WITHOUT_TUNE]);
    for (fault, end, says, of_shard, label) in [
        ("crash 40", "crashed", "signal 6", "crashed", "RUNTIME_FAIL"),
        ("error 40", "refused", "0x1d", "refused", "RUNTIME_FAIL"),
        ("wrong 40", "failed", "differ from the first ones", "failed", "ANE_ALL"),
        ("leak 2000000", "failed", "memory rises", "failed", "ANE_ALL"),
    ] {
        sandbox.plant(&format!("L01.attn {fault}"));
        let report = verify(&sandbox, 1, &["--stages", "soak", "--again"]);
        let own = stage(&report, "soak");
        assert_eq!(own["end"], end, "{fault}: {own}");
        assert!(own["reason"].as_str().unwrap().contains(says), "{fault}: {own}");
        assert!(stage(&report, "compile")["reused"] == true && stage(&report, "energy")["end"] == "skipped");
        let soak = document(&sandbox, "soak");
        let shards = soak["shards"].as_array().unwrap();
        for s in shards {
            let wanted = if s["shard"] == "L01.attn" { of_shard } else { "done" };
            assert_eq!(s["end"], wanted, "{fault}: {s}");
        }
        let _ = fs::remove_dir_all(sandbox.path("evidence"));
        let (evidence, imported) = import(&sandbox);
        let labels: Vec<&str> =
            imported["rows"].as_array().unwrap().iter().map(|r| r["label"].as_str().unwrap()).collect();
        assert_eq!(labels.contains(&"RUNTIME_FAIL"), label == "RUNTIME_FAIL", "{fault}: {imported:#}");
        assert!(
            label == "RUNTIME_FAIL" || !imported["left_out"].as_array().unwrap().is_empty(),
            "{imported:#}"
        );
        let about = Path::new(&evidence).join(imported["report"].as_str().unwrap()).join("report.json");
        let about: Value = serde_json::from_str(&fs::read_to_string(about).unwrap()).unwrap();
        let is_soak = |s: &&Value| s["stage"] == "soak";
        let recorded = about["stages"].as_array().unwrap().iter().find(is_soak);
        assert_eq!(recorded.unwrap()["end"], end, "{fault}: {about}");
    }
}

#[test]
fn a_soak_may_be_longer_than_the_limit_and_a_pass_that_does_not_come_is_a_hang() {
    let sandbox = Sandbox::new();
    verify(&sandbox, 0, &["--stages", "build,compile"]);
    // Calls are slow, so that the requested passes take longer than the limit.
    sandbox.plant("mlpackage slow 20000");
    let report = verify(&sandbox, 0, &["--stages", "soak", "--timeout", "10"]);
    assert_eq!(stage(&report, "soak")["end"], "done", "{report:#}");
    let soak = document(&sandbox, "soak");
    assert!(soak["figures"]["seconds"].as_f64() > Some(10.0), "{soak:#}");
    assert!(
        soak["seconds_without_a_pass"] == 10 && soak["passes_done"] == soak["figures"]["passes"],
        "{soak:#}"
    );
    assert_eq!(soak["figures"]["memory_figure"], "resident");
    sandbox.plant("L01.attn hang 40");
    let report = verify(&sandbox, 1, &["--stages", "soak", "--timeout", "10", "--again"]);
    let (own, soak) = (stage(&report, "soak"), document(&sandbox, "soak"));
    let reason = own["reason"].as_str().unwrap();
    assert!(own["end"] == "hung" && reason.contains("no progress for 10 s (--timeout)"), "{own}");
    let passes = soak["passes_done"].as_u64().unwrap();
    assert!(passes > 0 && reason.contains(&format!("behind {passes} passes")), "{reason}");
    for s in soak["shards"].as_array().unwrap() {
        assert_eq!(s["end"], if s["shard"] == "L01.attn" { "hung" } else { "done" }, "{s}");
    }
}

#[test]
fn a_stage_that_hangs_is_ended_and_the_next_one_goes_on() {
    let sandbox = Sandbox::new();
    verify(&sandbox, 0, &["--stages", "build,compile"]);
    sandbox.plant("L01.attn hang 3");
    let report = verify(&sandbox, 1, &["--stages", "validate,predict", "--timeout", "15"]);
    let validate = stage(&report, "validate");
    assert!(
        validate["end"] == "hung" && validate["reason"].as_str().unwrap().contains("--timeout"),
        "{report:#}"
    );
    assert_eq!(stage(&report, "predict")["end"], "done", "{report:#}");
    let (_, imported) = import(&sandbox);
    assert!(imported["rows"].as_array().unwrap().is_empty(), "{imported:#}");
}

#[test]
fn a_package_that_does_not_load_costs_only_itself_and_becomes_a_row() {
    let sandbox = Sandbox::new();
    sandbox.plant("attn no-plan\nhead plan-cpu");
    let report = verify(&sandbox, 1, &["--stages", "build,compile,check,validate"]);
    let ends = ["compile", "check", "validate"].map(|name| stage(&report, name)["end"].as_str().unwrap());
    assert_eq!(ends, ["failed", "failed", "refused"], "{report:#}");
    assert!(stage(&report, "compile")["reason"].as_str().unwrap().contains("-14"), "{report:#}");
    assert!(stage(&report, "check")["reason"].as_str().unwrap().contains("head.0of1: not_ane"), "{report:#}");
    let (evidence, imported) = import(&sandbox);
    let rows = imported["rows"].as_array().unwrap();
    let label = |name: &str| {
        let ends = |r: &&Value| r["id"].as_str().unwrap().ends_with(&format!(":{name}"));
        rows.iter().find(ends).map(|r| r["label"].as_str().unwrap().to_string())
    };
    assert_eq!(label("L00.attn").as_deref(), Some("COMPILE_FAIL"), "{imported:#}");
    assert_eq!(label("head.0of1").as_deref(), Some("CPU_ALL"), "{imported:#}");
    let b = sandbox.path("report.work/bundle.anemoe");
    let (code, out, _) =
        sandbox.run(&["check", b.to_str().unwrap(), "--evidence", &evidence, "--no-journal"]);
    assert!(code == 1 && out.contains("evidence.measured") && out.contains("COMPILE_FAIL"), "{out}");
}

/// Waits until a file exists, at most two minutes.
fn wait_for(path: &Path) {
    let started = Instant::now();
    while !path.exists() {
        assert!(started.elapsed() < Duration::from_secs(120), "{} never came", path.display());
        std::thread::sleep(Duration::from_millis(50));
    }
}

#[test]
fn a_run_that_is_killed_goes_on_behind_the_last_finished_stage() {
    let sandbox = Sandbox::new();
    sandbox.plant("L01.attn compile-hang");
    let all = arguments(&sandbox, &["--stages", "doctor,build,compile"]);
    let words: Vec<&str> = all.iter().map(String::as_str).collect();
    let mut child = sandbox.anemoe(&words).stdout(Stdio::null()).stderr(Stdio::null()).spawn().unwrap();
    let stages: PathBuf = sandbox.path("report.work/stages");
    wait_for(&stages.join("build.json"));
    std::thread::sleep(Duration::from_millis(300));
    child.kill().unwrap();
    child.wait().unwrap();
    assert!(!sandbox.path("report.zip").exists() && !stages.join("compile.json").exists());
    sandbox.plant("");
    let report = verify(&sandbox, 0, &["--stages", "doctor,build,compile"]);
    let reused = |name: &str| stage(&report, name)["reused"] == true;
    assert_eq!((reused("doctor"), reused("build"), reused("compile")), (true, true, false), "{report:#}");
    // Another compression needs a new verification.
    let zip = fs::read(sandbox.path("report.zip")).unwrap();
    let other = arguments(&sandbox, &["--quant", "lut6"]);
    sandbox.refused(&other.iter().map(String::as_str).collect::<Vec<_>>(), &["quant was", "lut6", "--again"]);
    assert_eq!(zip, fs::read(sandbox.path("report.zip")).unwrap());
}

#[test]
fn power_that_needs_root_is_skipped_with_its_reason() {
    let sandbox = Sandbox::new();
    let path = with_powermetrics(
        &sandbox,
        "#!/bin/sh\necho 'powermetrics must be invoked as the superuser' >&2; exit 1\n",
    );
    let all = arguments(&sandbox, &["--stages", "build,compile,energy"]);
    let (code, report, err) = run_with(&sandbox, &all, &[("PATH", path.as_str())]);
    assert_eq!(code, 0, "{err}");
    let energy = stage(&report, "energy");
    assert_eq!(energy["end"], "skipped");
    let reason = energy["reason"].as_str().unwrap();
    assert!(reason.contains("needs root") && reason.contains("superuser"), "{reason}");
    // Stages that were skipped run again, stages that are done do not.
    let path = with_powermetrics(
        &sandbox,
        "#!/bin/sh\necho 'CPU Power: 2 mW'; echo 'GPU Power: 1 mW'; echo 'ANE Power: 9 mW'\n",
    );
    let (code, report, err) = run_with(&sandbox, &all, &[("PATH", path.as_str())]);
    assert_eq!((code, &stage(&report, "energy")["end"]), (0, &"done".into()), "{err}");
    assert_eq!(stage(&report, "compile")["reused"], true);
}

#[test]
fn power_is_read_while_calls_run_and_not_while_models_load() {
    let sandbox = Sandbox::new();
    verify(&sandbox, 0, &["--stages", "build,compile"]);
    sandbox.plant("L01.attn load-slow 5000");
    let log = sandbox.path("log");
    // Lines of the CPU and the Neural Engine count even where no line of the GPU exists.
    let lines = "echo 'CPU Power: 20 mW'; echo 'ANE Power: 90 mW'";
    let script = format!("#!/bin/sh\necho power >> {0}\n{lines}\nsleep 1\necho read >> {0}\n", log.display());
    let path = with_powermetrics(&sandbox, &script);
    let all = arguments(&sandbox, &["--stages", "energy"]);
    let variables = [("PATH", path.as_str()), ("FAKE_COREML_LOG", log.to_str().unwrap())];
    let (code, report, err) = run_with(&sandbox, &all, &variables);
    assert_eq!((code, &stage(&report, "energy")["end"]), (0, &"done".into()), "{report:#}\n{err}");
    let text = fs::read_to_string(&log).unwrap();
    let loads = text.lines().filter(|l| *l == "loaded").count();
    let wanted = [&["power", "read"][..], &vec!["loaded"; loads], &["power", "read"]].concat();
    assert!(loads > 1 && text.lines().eq(wanted), "{text}");
    let energy = document(&sandbox, "energy");
    assert_eq!(energy["counted"], serde_json::json!(["ane", "cpu"]), "{energy:#}");
    assert!(energy["tok_s"].as_f64() > Some(0.0) && energy["running"]["gpu"].is_null(), "{energy:#}");
    // A bundle that does not run is a failure with a reason.
    sandbox.plant("L01.attn error 0");
    let again = arguments(&sandbox, &["--stages", "energy", "--again"]);
    let (code, report, _) = run_with(&sandbox, &again, &variables);
    let energy = stage(&report, "energy");
    assert!(code == 1 && energy["reason"].as_str().unwrap().contains("0x1d"), "{energy}");
    // No power line at all is not a power of 0.
    sandbox.plant("");
    let path = with_powermetrics(&sandbox, "#!/bin/sh\necho 'Combined Power: 9 mW'\n");
    let (_, report, _) = run_with(&sandbox, &again, &[("PATH", path.as_str())]);
    let energy = stage(&report, "energy");
    let reason = energy["reason"].as_str().unwrap();
    assert!(energy["end"] == "skipped" && reason.contains("no line of the power"), "{energy}");
}

#[test]
fn folders_and_files_of_others_are_left_alone() {
    let sandbox = Sandbox::new();
    let work = sandbox.path("mine");
    fs::create_dir(&work).unwrap();
    fs::write(work.join("note.txt"), "mine").unwrap();
    let all = arguments(&sandbox, &["--work", work.to_str().unwrap()]);
    sandbox.refused(&all.iter().map(String::as_str).collect::<Vec<_>>(), &["mine", "did not make"]);
    fs::write(sandbox.path("report.zip"), "no report").unwrap();
    let all = arguments(&sandbox, &[]);
    sandbox.refused(&all.iter().map(String::as_str).collect::<Vec<_>>(), &["report.zip", "--force"]);
    assert_eq!(fs::read_to_string(sandbox.path("report.zip")).unwrap(), "no report");
    assert_eq!(fs::read_dir(&work).unwrap().count(), 1);
}
