//! Runs fuzz targets one after the other and prints their results.

use crate::options::TaskOptions;
use crate::seeds;
use crate::task::{Passed, root};
use std::fs::{self, File};
use std::path::{Path, PathBuf};
use std::process::{Command, Stdio};
use std::time::Instant;

/// A fuzz target and its limits.
pub struct FuzzTarget {
    pub name: &'static str,
    /// Most bytes of an input: a little more than the longest seed.
    max_len: usize,
    /// Resident memory in MiB above which an input counts as a fault.
    rss_mb: usize,
}

const fn target(name: &'static str, max_len: usize, rss_mb: usize) -> FuzzTarget {
    FuzzTarget { name, max_len, rss_mb }
}

/// All fuzz targets of `fuzz/`.
pub const TARGETS: [FuzzTarget; 16] = [
    target("chain", 32 << 10, 512),
    target("config_gemma4", 4 << 10, 512),
    target("config_zaya", 4 << 10, 512),
    target("gguf", 40 << 10, 512),
    target("importance", 4 << 10, 1024),
    target("journal", 4 << 10, 512),
    target("mlmodel", 12 << 10, 512),
    target("npy", 1 << 10, 512),
    target("npz", 4 << 10, 1024),
    target("outcomes", 4 << 10, 512),
    target("package", 16 << 10, 512),
    target("plan_report", 4 << 10, 512),
    target("predict", 16 << 10, 1024),
    target("safetensors", 4 << 10, 512),
    target("tokenizer", 16 << 10, 512),
    target("weights", 8 << 10, 512),
];

/// Most seconds of one input.
const TIMEOUT_S: u64 = 10;
/// Faults after which a target is stopped.
const MAX_FAULTS: usize = 10;

/// Counts of a target's run.
#[derive(Default)]
struct FuzzRuns {
    executions: u64,
    seconds: f64,
    coverage: u64,
    features: u64,
    faults: usize,
}

/// Runs the task: the named targets, or all.
pub fn run(mut options: TaskOptions) -> Passed {
    let seconds = options.number("seconds")?;
    let runs = options.number("runs")?;
    let sanitizer = options.text("sanitizer").unwrap_or_else(|| "none".into());
    let seed_only = options.flag("seed-only");
    let names = options.finish()?;
    if let Some(name) = names.iter().find(|n| !TARGETS.iter().any(|t| t.name == **n)) {
        return Err(format!("no fuzz target `{name}`").into());
    }
    let chosen: Vec<&FuzzTarget> =
        TARGETS.iter().filter(|t| names.is_empty() || names.iter().any(|n| n == t.name)).collect();

    let folder = root().join("fuzz");
    seeds::write(&folder.join("corpus"))?;
    if seed_only {
        return Ok(true);
    }
    // Readers that take a path get files in memory.
    let memory = Path::new("/dev/shm");
    let scratch = if memory.is_dir() { tempfile::tempdir_in(memory)? } else { tempfile::tempdir()? };
    let mut all = Vec::new();
    for target in chosen {
        let budget = (seconds.unwrap_or(if runs.is_some() { 0 } else { 60 }), runs.unwrap_or(0));
        let done = fuzz(&folder, target, &sanitizer, budget, scratch.path())?;
        println!("{}", row(target.name, &done));
        all.push((target.name, done));
    }
    println!(
        "\n| target | executions | executions/s | coverage | features | faults |\n|---|---|---|---|---|---|"
    );
    let mut total = FuzzRuns::default();
    for (name, done) in &all {
        println!("{}", row(name, done));
        total.executions += done.executions;
        total.seconds += done.seconds;
        total.coverage += done.coverage;
        total.features += done.features;
        total.faults += done.faults;
    }
    println!("{}", row("all", &total));
    Ok(total.faults == 0)
}

fn row(name: &str, d: &FuzzRuns) -> String {
    let rate = d.executions as f64 / d.seconds.max(1e-9);
    format!("| {name} | {} | {rate:.0} | {} | {} | {} |", d.executions, d.coverage, d.features, d.faults)
}

/// Runs a target until its time or its executions are used up. Restarts libFuzzer after each fault, which ends it.
fn fuzz(
    folder: &Path,
    target: &FuzzTarget,
    sanitizer: &str,
    (seconds, runs): (u64, u64),
    scratch: &Path,
) -> Result<FuzzRuns, Box<dyn std::error::Error>> {
    let corpus = folder.join("corpus").join(target.name);
    let artifacts = folder.join("artifacts").join(target.name);
    fs::create_dir_all(&artifacts)?;
    let log = artifacts.join("log.txt");
    build(folder, target, sanitizer)?;
    let mut done = FuzzRuns::default();
    while done.faults < MAX_FAULTS {
        let before = files(&artifacts)?;
        let mut command = cargo(folder);
        command.args(["run", "--sanitizer", sanitizer, target.name]).arg(&corpus).arg("--");
        command.args([
            format!("-max_len={}", target.max_len),
            format!("-rss_limit_mb={}", target.rss_mb),
            format!("-timeout={TIMEOUT_S}"),
            // Large inputs are tried from the start: headers of these formats do not grow byte by byte.
            "-len_control=0".into(),
            "-print_final_stats=1".into(),
        ]);
        if seconds > 0 {
            command.arg(format!("-max_total_time={}", (seconds as f64 - done.seconds).ceil().max(1.0)));
        }
        if runs > 0 {
            command.arg(format!("-runs={}", runs - done.executions));
        }
        let start = Instant::now();
        let out = File::create(&log)?;
        let status = command.env("TMPDIR", scratch).stdout(Stdio::null()).stderr(out).status()?;
        let text = String::from_utf8_lossy(&fs::read(&log)?).into_owned();
        done.seconds += start.elapsed().as_secs_f64();
        done.executions += number_behind(&text, "stat::number_of_executed_units:").unwrap_or(0);
        done.coverage = done.coverage.max(number_behind(&text, " cov: ").unwrap_or(0));
        done.features = done.features.max(number_behind(&text, " ft: ").unwrap_or(0));
        let faults = files(&artifacts)?.len() - before.len();
        done.faults += faults;
        if !status.success() && faults == 0 {
            return Err(format!("target `{}` did not run: {}", target.name, log.display()).into());
        }
        if status.success()
            || (seconds > 0 && done.seconds >= seconds as f64)
            || (runs > 0 && done.executions >= runs)
        {
            break;
        }
    }
    Ok(done)
}

fn build(folder: &Path, target: &FuzzTarget, sanitizer: &str) -> Result<(), Box<dyn std::error::Error>> {
    let status = cargo(folder).args(["build", "--sanitizer", sanitizer, target.name]).status()?;
    if status.success() {
        return Ok(());
    }
    Err("cargo +nightly fuzz build failed; `cargo install cargo-fuzz` installs it".into())
}

fn cargo(folder: &Path) -> Command {
    let mut command = Command::new("cargo");
    // Without this, the child would inherit this task's toolchain.
    command.args(["+nightly", "fuzz"]).env_remove("RUSTUP_TOOLCHAIN").env_remove("CARGO").current_dir(folder);
    command
}

/// Returns the inputs that libFuzzer kept because of a fault.
fn files(artifacts: &Path) -> std::io::Result<Vec<PathBuf>> {
    let faults = ["crash-", "oom-", "timeout-", "leak-"];
    let mut found = Vec::new();
    for entry in fs::read_dir(artifacts)? {
        let entry = entry?;
        if faults.iter().any(|f| entry.file_name().to_string_lossy().starts_with(f)) {
            found.push(entry.path());
        }
    }
    Ok(found)
}

/// Returns the number after the last occurrence of a word.
fn number_behind(text: &str, word: &str) -> Option<u64> {
    let rest = text[text.rfind(word)? + word.len()..].trim_start();
    rest.split(|c: char| !c.is_ascii_digit()).next()?.parse().ok()
}
