//! The job scripts on a real Slurm of one node, where it is installed.
// Remarks of tests go to standard error.
#![allow(clippy::disallowed_macros)]

use std::path::Path;
use std::process::Command;

fn installed(program: &str) -> bool {
    Command::new("sh")
        .args(["-c", &format!("command -v {program}")])
        .output()
        .is_ok_and(|o| o.status.success())
}

/// An array job with a task that fails and is run again makes the bytes of one build.
#[test]
fn an_array_job_makes_the_whole() {
    let missing: Vec<&str> =
        ["slurmctld", "slurmd", "munged", "runuser"].into_iter().filter(|p| !installed(p)).collect();
    if !missing.is_empty() {
        eprintln!("not run: {} not installed", missing.join(", "));
        return;
    }
    let user = Command::new("id").arg("-u").output().unwrap();
    if user.stdout.trim_ascii() != b"0" {
        eprintln!("not run: only root can start a Slurm of its own");
        return;
    }
    let script = Path::new(env!("CARGO_MANIFEST_DIR")).join("../../contrib/slurm/test.sh");
    let output = Command::new("bash").arg(script).arg(env!("CARGO_BIN_EXE_anemoe")).output().unwrap();
    let text = String::from_utf8_lossy(&output.stdout).into_owned();
    let errors = String::from_utf8_lossy(&output.stderr).into_owned();
    assert!(output.status.success(), "{text}\n{errors}");
    assert!(text.contains("byte-identical to that of one process"), "{text}\n{errors}");
    assert!(text.contains("through a store is byte-identical"), "{text}\n{errors}");
}
