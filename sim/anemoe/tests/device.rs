//! `anemoe check --device` on the fake Core ML, with planted placements.

mod common;

use common::{Sandbox, TINY};

#[test]
fn plans_decide_are_saved_and_read_back() {
    for fixture in TINY {
        let sandbox = Sandbox::new();
        let bundle = sandbox.build(fixture, &[]);
        let b = bundle.to_str().unwrap();
        sandbox.refused(&["check", b, "--device"], &["anemoe compile"]);
        sandbox.json(0, &["compile", b]);
        let file = sandbox.path("plan.json");
        let f = file.to_str().unwrap();
        let report = sandbox.json(0, &["check", b, "--device", "--save", f]);
        assert_eq!(report["device"]["verdict"], "ane", "{fixture}");
        assert_eq!(report["device"]["not_in_packages"], 0);
        assert_eq!(report["device"]["not_in_report"], 0);
        let controls = report["controls"].as_array().unwrap();
        assert!(controls.len() == 2 && controls[0]["package"] != controls[1]["package"], "{controls:?}");
        for control in controls {
            assert!(
                control["pass"] == true && control["on_ane"] == 0 && control["on_cpu"].as_u64() > Some(0)
            );
        }
        assert_eq!(report["no_is_proven"], true);
        let read = sandbox.json(0, &["check", b, "--report", f]);
        assert_eq!(read["device"], report["device"]);
        sandbox.refused(&["check", b, "--device", "--save", f], &["--force"]);
    }
}

#[test]
fn what_is_elsewhere_nowhere_or_unanswered_is_no_pass() {
    let sandbox = Sandbox::new();
    let bundle = sandbox.build("tiny-gemma4-moe", &[]);
    let b = bundle.to_str().unwrap();
    sandbox.json(0, &["compile", b]);
    for (fault, measured, failures) in [
        ("plan-cpu", "not_ane", 0),
        ("plan-products-cpu", "not_ane", 0),
        ("plan-none", "unknown", 0),
        ("plan-error", "unknown", 1),
        ("plan-crash", "unknown", 1),
    ] {
        sandbox.plant(&format!("L01.attn {fault}"));
        let report = sandbox.json(1, &["check", b, "--device"]);
        let packages = report["device"]["packages"].as_array().unwrap();
        let one = packages.iter().find(|p| p["name"] == "L01.attn").unwrap();
        assert_eq!(one["measured"], measured, "{fault}");
        assert!(packages.iter().filter(|p| p["name"] != "L01.attn").all(|p| p["measured"] == "ane"));
        assert_eq!(report["plan_failures"].as_array().unwrap().len(), failures, "{fault}");
    }
    // No operation has a device: the reader cannot exclude the Neural Engine either, and says so.
    sandbox.plant("mlpackage plan-none");
    let (code, out, _) = sandbox.run(&["check", b, "--device"]);
    assert!(code == 1 && out.contains("DOES NOT SAY NO"), "{out}");
}

#[test]
fn a_control_that_crashes_is_missing_or_says_yes_fails_the_check() {
    let sandbox = Sandbox::new();
    let bundle = sandbox.build("tiny-gemma4-moe", &[]);
    let b = bundle.to_str().unwrap();
    sandbox.json(0, &["compile", b]);
    // Every package has its plan and runs on the Neural Engine alone: only the controls fail.
    for (fault, control, says) in [
        ("attn plan-cpu-crash", 0, "signal 6"),
        ("attn plan-ane", 0, "MEAN NOTHING"),
        ("control.fp32 plan-crash", 1, "signal 6"),
        ("control.fp32 not-compiled", 1, "compile refused"),
        ("control.fp32 plan-ane", 1, "MEAN NOTHING"),
    ] {
        sandbox.plant(fault);
        let report = sandbox.json(1, &["check", b, "--device", "--no-journal"]);
        assert_eq!(
            (&report["device"]["verdict"], &report["no_is_proven"]),
            (&"ane".into(), &false.into()),
            "{fault}"
        );
        assert!(report["plan_failures"].as_array().unwrap().is_empty(), "{fault}");
        let controls = report["controls"].as_array().unwrap();
        for (i, c) in controls.iter().enumerate() {
            assert_eq!(c["pass"], i != control, "{fault}: {c}");
        }
        let (code, out, _) = sandbox.run(&["check", b, "--device", "--no-journal"]);
        assert!(code == 1 && out.to_uppercase().contains(&says.to_uppercase()), "{fault}: {out}");
    }
    // No package has a plan: the control that asks a second time is missing.
    sandbox.plant("shards plan-crash");
    let report = sandbox.json(1, &["check", b, "--device", "--no-journal"]);
    let packages = report["device"]["packages"].as_array().unwrap().len();
    assert_eq!(report["plan_failures"].as_array().unwrap().len(), packages, "each in a child of its own");
    assert!(report["no_is_proven"] == false && report["controls"][1]["pass"] == true, "{report:#}");
    assert!(report["controls"][0]["failure"].as_str().unwrap().contains("no package"), "{report:#}");
}

#[test]
fn a_package_that_is_not_compiled_is_unknown_beside_others() {
    let sandbox = Sandbox::new();
    let bundle = sandbox.build("tiny-gemma4-moe", &[]);
    let b = bundle.to_str().unwrap();
    sandbox.plant("L01.attn not-compiled");
    sandbox.json(1, &["compile", b]);
    let report = sandbox.json(1, &["check", b, "--device"]);
    let failures = report["plan_failures"].as_array().unwrap();
    assert!(failures.len() == 1 && failures[0]["message"].as_str().unwrap().contains("anemoe compile"));
    let packages = report["device"]["packages"].as_array().unwrap();
    for p in packages {
        assert_eq!(p["measured"], if p["name"] == "L01.attn" { "unknown" } else { "ane" }, "{p}");
    }
}
