//! `anemoe tune` on the fake Core ML, with planted outcomes: the form that it chooses, and the reason.

mod common;

use common::Sandbox;
use serde_json::Value;
use std::fs;
use std::path::Path;
use std::sync::{Mutex, MutexGuard};

/// Faults that slow all forms but the default and the host's cache, by far more than load on the machine adds to a call's median.
const OTHERS: &str = "per-head slow 9000\nio-channels slow 9000\nnorm-plain slow 9000\ncontext-buckets slow 9000\n\
    functions-apart slow 9000\n";
/// Fault that slows the form with the host's cache, so that the default is the fastest.
const HOST: &str = "/cache-host slow 9000";
/// Times are compared, so one test runs at a time.
static ONE: Mutex<()> = Mutex::new(());

fn alone() -> MutexGuard<'static, ()> {
    ONE.lock().unwrap_or_else(|e| e.into_inner())
}

fn checkpoint(fixture: &str) -> String {
    let path = Path::new(env!("CARGO_MANIFEST_DIR")).join("../../fixtures").join(fixture);
    path.to_str().unwrap().to_string()
}

/// Tunes attention of the tiny Gemma with planted faults. Returns the document.
fn tune(sandbox: &Sandbox, name: &str, faults: &str, calls: &str, status: i32) -> Value {
    sandbox.plant(faults);
    let (source, out) = (checkpoint("tiny-gemma4-moe"), sandbox.path(&format!("{name}.toml")));
    let args = ["tune", &source, "-o", out.to_str().unwrap(), "--sorts", "attention", "--tokens", "1,8"];
    // Timeout in seconds: long for many calls, short for forms that hang.
    let timeout = if calls == "20" { "8" } else { "60" };
    sandbox.json(status, &[&args[..], &["--calls", calls, "--timeout", timeout, "--force"]].concat())
}

fn trial<'a>(document: &'a Value, form: &str) -> &'a Value {
    let trials = document["sorts"][0]["trials"].as_array().unwrap();
    trials.iter().find(|t| t["form"] == form).unwrap_or_else(|| panic!("{form} is not in {document}"))
}

#[test]
fn planted_outcomes_lead_to_the_right_form_with_its_reason() {
    let _one = alone();
    let sandbox = Sandbox::new();
    let (host, heads) = ("cache by the host", "heads apart");
    let all_but_heads = "default/ slow 9000\ncache-host slow 9000\nio-channels slow 9000\nnorm-plain slow 9000\n\
        context-buckets slow 9000\n";
    // Name, faults, calls, chosen form, part of the reason, and why the default is out.
    let apart = "a package for each token count";
    let all_but_apart = "default/ slow 9000\n/cache-host slow 9000\nio-channels slow 9000\nnorm-plain slow 9000\n\
        per-head slow 9000\ncontext-buckets slow 9000\n";
    let cases: [(&str, &str, &str, &str, &str, &str); 19] = [
        ("none", HOST, "20", "default", "wholly on the Neural Engine", ""),
        ("refused", "default/ not-compiled", "20", host, "us a call", "compile refused: "),
        ("compile-crash", "default/ compile-crash", "20", host, "us a call", "compile crashed: signal 6"),
        ("compile-hang", "default/ compile-hang", "20", host, "us a call", "compile hung: "),
        ("no-plan", "default/ no-plan", "20", host, "us a call", "-14"),
        ("load-crash", "default/ load-crash", "20", host, "us a call", "load crashed: signal 6"),
        ("wrong", "default/ wrong 100", "120", host, "us a call", "the first in call number 101"),
        ("not-numbers", "default/ not-numbers 10", "20", host, "us a call", "cosine 0.0000"),
        ("crash", "default/ crash 10", "20", host, "us a call", "measure crashed: signal 6"),
        ("hang", "default/ hang 10", "20", host, "us a call", "measure hung: "),
        ("error", "default/ error 10", "20", host, "us a call", "0x1d"),
        ("on-cpu", "default/ plan-products-cpu", "20", host, "wholly on the Neural Engine", ""),
        ("nowhere", "default/ plan-none", "20", host, "wholly on the Neural Engine", ""),
        ("slow", all_but_heads, "20", heads, "the fastest of 9", ""),
        ("apart", all_but_apart, "20", apart, "the fastest of 9", ""),
        // Calls of one token alone would choose the default in each of these cases.
        (
            "many-wrong",
            "default/#t8 wrong 10",
            "20",
            host,
            "us a call",
            "in call number 11 (calls of 8 tokens)",
        ),
        (
            "many-crash",
            "default/#t8 crash 10",
            "20",
            host,
            "us a call",
            "measure crashed: signal 6 (abort) (calls of 8",
        ),
        ("many-on-cpu", "default/#t8 plan-products-cpu", "20", host, "wholly on the Neural Engine", ""),
        ("many-slow", "default/#t8 slow 60000", "20", host, "the fastest of 9", ""),
    ];
    for (name, faults, calls, chosen, reason, out) in cases {
        let others = if ["slow", "apart"].contains(&name) { "" } else { OTHERS };
        let document = tune(&sandbox, name, &format!("{others}{faults}"), calls, 0);
        let choice = &document["sorts"][0];
        assert_eq!(choice["chosen"], chosen, "{name}: {choice:#}");
        assert!(choice["reason"].as_str().unwrap().contains(reason), "{name}: {choice:#}");
        let said = trial(&document, "default")["out"].as_str().unwrap_or_default();
        assert_eq!(said.is_empty(), out.is_empty(), "{name}: {said}");
        assert!(said.contains(out), "{name}: {said}");
        let counts = trial(&document, "default")["tokens"].as_array().unwrap();
        assert!(counts[0]["tokens"] == 1 && counts[1]["tokens"] == 8 && counts.len() == 2, "{choice:#}");
        if name == "many-on-cpu" {
            assert_eq!([&counts[0]["residency"], &counts[1]["residency"]], ["ane", "not_ane"], "{choice:#}");
        }
        // Both packages of the form run.
        let figures = trial(&document, apart)["tokens"].as_array().unwrap().iter().map(|t| &t["figures"]);
        assert!(
            figures.clone().count() == 2 && figures.into_iter().all(|f| f["calls"].as_u64() >= Some(20)),
            "{choice:#}"
        );
        let others = choice["trials"].as_array().unwrap().iter().filter(|t| t["form"] != "default");
        assert!(others.clone().count() == 8 && others.into_iter().all(|t| t["out"].is_null()), "{choice:#}");
    }
}

#[test]
fn without_a_form_on_the_engine_the_choice_says_so_and_without_any_form_there_is_none() {
    let _one = alone();
    let sandbox = Sandbox::new();
    let document = tune(&sandbox, "all-cpu", &format!("{OTHERS}{HOST}\nmlpackage plan-cpu"), "20", 0);
    let choice = &document["sorts"][0];
    assert_eq!(choice["chosen"], "default");
    assert!(
        choice["reason"].as_str().unwrap().contains("no form is wholly on the Neural Engine"),
        "{choice}"
    );
    let document = tune(&sandbox, "none", "mlpackage no-plan", "20", 1);
    let choice = &document["sorts"][0];
    assert!(choice["chosen"].is_null() && choice["reason"].as_str().unwrap().contains("no form works"));
    let text = fs::read_to_string(sandbox.path("none.toml")).unwrap();
    assert!(text.lines().all(|line| line.is_empty() || line.starts_with('#')), "{text}");
}

#[test]
fn combinations_of_outcomes_leave_the_one_form_that_is_right() {
    let _one = alone();
    let sandbox = Sandbox::new();
    // Name, faults of the forms in their order, chosen form, part of the reason, and how many forms are out. The sixth
    // form, Apple's rules, contains the names of three other forms, so their faults apply to it.
    let cases: [(&str, &str, &str, &str, usize); 3] = [
        (
            "one-left",
            "default/ compile-crash\ncache-host not-numbers 5\nper-head error 5\nio-channels load-crash\ncontext-buckets compile-crash\n",
            "plain norms",
            "the only one that works",
            8,
        ),
        // The fastest form is on the CPU, the next is wrong, the third has no plan, the fourth is slow.
        (
            "each-another",
            "default/ plan-cpu\ncache-host wrong 5\nper-head plan-none\nio-channels slow 9000\nnorm-plain crash 5\ncontext-buckets slow 20000\n",
            "channels last at the border",
            "wholly on the Neural Engine",
            5,
        ),
        // No form is wholly on the Neural Engine: a form with unknown devices ranks before forms on other devices.
        (
            "nowhere",
            "default/ plan-cpu\ncache-host plan-cpu\nper-head plan-none\nio-channels plan-cpu\nnorm-plain plan-cpu\ncontext-buckets plan-cpu\n",
            "heads apart",
            "no form is known to be wholly",
            0,
        ),
    ];
    for (name, faults, chosen, reason, out) in cases {
        let document = tune(&sandbox, name, faults, "20", 0);
        let choice = &document["sorts"][0];
        let trials = choice["trials"].as_array().unwrap();
        println!(
            "{name}: {}",
            trials.iter().map(|t| format!("{}: {}; ", t["form"], t["out"])).collect::<String>()
        );
        assert_eq!(choice["chosen"], chosen, "{name}: {choice:#}");
        assert!(choice["reason"].as_str().unwrap().contains(reason), "{name}: {choice:#}");
        assert_eq!(trials.iter().filter(|t| !t["out"].is_null()).count(), out, "{name}: {choice:#}");
    }
}

#[test]
fn a_second_run_goes_on_and_the_file_builds() {
    let _one = alone();
    let sandbox = Sandbox::new();
    let slower = "cache-host/ slow 1\ndefault/ no-plan\nio-channels no-plan\nnorm-plain no-plan\nper-head no-plan\n\
        context-buckets no-plan\nfunctions-apart slow 9000\n";
    let first = tune(&sandbox, "forms", slower, "20", 0);
    assert_eq!(first["sorts"][0]["chosen"], "cache by the host", "{first:#}");
    // One result is removed: the second run measures that form alone and reuses the others.
    fs::remove_file(sandbox.path("forms.tune/attention/norm-plain/result.json")).unwrap();
    let second = tune(&sandbox, "forms", slower, "20", 0);
    for trial in second["sorts"][0]["trials"].as_array().unwrap() {
        assert_eq!(trial["reused"], trial["form"] != "plain norms", "{trial}");
    }
    let text = fs::read_to_string(sandbox.path("forms.toml")).unwrap();
    assert!(text.contains("[attention]\ncache = \"host\"\n"), "{text}");
    sandbox.plant("");
    let forms = sandbox.path("forms.toml");
    let bundle = sandbox.build("tiny-gemma4-moe", &["--forms", forms.to_str().unwrap()]);
    let b = bundle.to_str().unwrap();
    sandbox.json(0, &["compile", b]);
    sandbox.json(0, &["generate", b, "--prompt-ids", "1,2", "--max-new", "4", "--backend", "coreml"]);
    let source = checkpoint("tiny-gemma4-moe");
    sandbox.refused(&["tune", &source, "-o", forms.to_str().unwrap()], &["--force"]);
    sandbox.refused(&["tune", &source, "--cache", "host"], &["tune tries all forms"]);
    sandbox.refused(&["tune", &source, "--sorts", "moe"], &["this model has attention"]);
}

#[cfg(target_os = "linux")]
#[test]
fn trials_that_do_not_fit_the_disk_are_refused_before_they_are_built() {
    let sandbox = Sandbox::new();
    let (source, out) = (checkpoint("tiny-gemma4-moe"), sandbox.path("forms.toml"));
    // This file system has no free space, like a full disk.
    let args = ["tune", &source, "-o", out.to_str().unwrap(), "--work", "/proc/anemoe-full"];
    sandbox.refused(&args, &["/proc/anemoe-full", "the trial of the form `default`", "has 0 left"]);
    assert!(!out.exists());
}

#[test]
fn every_sort_of_both_families_is_tuned() {
    let _one = alone();
    for (fixture, sorts) in
        [("tiny-gemma4-moe", &["attention", "experts_combine"][..]), ("tiny-zaya", &["attention", "moe"])]
    {
        let sandbox = Sandbox::new();
        let (source, out) = (checkpoint(fixture), sandbox.path("forms.toml"));
        let args =
            ["tune", &source, "-o", out.to_str().unwrap(), "--tokens", "1,8", "--experts-per-shard", "2"];
        let document = sandbox.json(0, &[&args[..], &["--calls", "20"]].concat());
        let found: Vec<&str> =
            document["sorts"].as_array().unwrap().iter().map(|c| c["sort"].as_str().unwrap()).collect();
        for sort in sorts {
            assert!(found.contains(sort), "{fixture}: {sort} is not in {found:?}");
        }
        assert!(found.contains(&"head"));
        let trials =
            document["sorts"].as_array().unwrap().iter().flat_map(|c| c["trials"].as_array().unwrap());
        for trial in trials {
            assert!(trial["out"].is_null() && trial["residency"] == "ane", "{fixture}: {trial}");
        }
    }
}
