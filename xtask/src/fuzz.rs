//! Runs fuzz targets one after the other and prints their results.

use crate::seeds;
use crate::task::{Passed, root};
use std::fs::{self, File};
use std::path::Path;
use std::process::{Command, Stdio};
use std::time::Instant;

/// Resident memory in MiB above which an input counts as a fault, and for targets that unpack or compute.
const RSS_MB: [usize; 2] = [512, 1024];
const UNPACKING: [&str; 3] = ["importance", "npz", "predict"];
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

/// Options of the task.
#[derive(clap::Args)]
pub struct FuzzOptions {
    /// Targets to run instead of all.
    targets: Vec<String>,
    /// Seconds for each target.
    #[arg(long, default_value_t = 60)]
    seconds: u32,
    /// Sanitizer: none or address.
    #[arg(long, default_value = "none")]
    sanitizer: String,
    /// Write seeds and run nothing.
    #[arg(long)]
    seed_only: bool,
}

/// Runs the task.
pub fn run(options: FuzzOptions) -> Passed {
    let FuzzOptions { targets: names, seconds, sanitizer, seed_only } = options;
    let folder = root().join("fuzz");
    let mut targets = names_in(&folder.join("fuzz_targets"))?;
    targets.iter_mut().for_each(|name| name.truncate(name.len() - ".rs".len()));
    if let Some(name) = names.iter().find(|name| !targets.contains(name)) {
        return Err(format!("no fuzz target `{name}`").into());
    }
    targets.retain(|target| names.is_empty() || names.contains(target));
    seeds::write(&folder.join("corpus"))?;
    if seed_only {
        return Ok(true);
    }
    // Readers that take a path get files in memory.
    let memory = Path::new("/dev/shm");
    let scratch = if memory.is_dir() { tempfile::tempdir_in(memory)? } else { tempfile::tempdir()? };
    println!(
        "| target | executions | executions/s | coverage | features | faults |\n|---|---|---|---|---|---|"
    );
    let mut total = FuzzRuns::default();
    for target in &targets {
        let done = fuzz(&folder, target, &sanitizer, seconds.into(), scratch.path())?;
        println!("{}", row(target, &done));
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

/// Runs a target for some seconds. Restarts libFuzzer after each fault, which ends it.
fn fuzz(
    folder: &Path,
    target: &str,
    sanitizer: &str,
    seconds: f64,
    scratch: &Path,
) -> Result<FuzzRuns, Box<dyn std::error::Error>> {
    let (corpus, artifacts) = (folder.join("corpus").join(target), folder.join("artifacts").join(target));
    fs::create_dir_all(&artifacts)?;
    let log = artifacts.join("log.txt");
    if !cargo(folder).args(["build", "--sanitizer", sanitizer, target]).status()?.success() {
        return Err("cargo +nightly fuzz build failed; `cargo install cargo-fuzz` installs it".into());
    }
    let seeds = names_in(&corpus)?.into_iter().filter(|name| name.starts_with("seed-"));
    let longest = seeds.map(|name| Ok(fs::metadata(corpus.join(name))?.len()));
    let longest = longest.collect::<std::io::Result<Vec<u64>>>()?.into_iter().max().unwrap_or(0);
    let rss_mb = RSS_MB[usize::from(UNPACKING.contains(&target))];
    let mut done = FuzzRuns::default();
    while done.faults < MAX_FAULTS && done.seconds < seconds {
        let before = count_faults(&artifacts)?;
        let mut command = cargo(folder);
        command.args(["run", "--sanitizer", sanitizer, target]).arg(&corpus).arg("--");
        command.args([
            // A little more than the longest seed.
            format!("-max_len={}", longest + longest / 4),
            format!("-rss_limit_mb={rss_mb}"),
            format!("-timeout={TIMEOUT_S}"),
            format!("-max_total_time={}", (seconds - done.seconds).ceil()),
            // Large inputs are tried from the start: headers of these formats do not grow byte by byte.
            "-len_control=0".into(),
            "-print_final_stats=1".into(),
        ]);
        let (start, out) = (Instant::now(), File::create(&log)?);
        let status = command.env("TMPDIR", scratch).stdout(Stdio::null()).stderr(out).status()?;
        let text = String::from_utf8_lossy(&fs::read(&log)?).into_owned();
        done.seconds += start.elapsed().as_secs_f64();
        done.executions += number_behind(&text, "stat::number_of_executed_units:").unwrap_or(0);
        done.coverage = done.coverage.max(number_behind(&text, " cov: ").unwrap_or(0));
        done.features = done.features.max(number_behind(&text, " ft: ").unwrap_or(0));
        let faults = count_faults(&artifacts)? - before;
        done.faults += faults;
        if !status.success() && faults == 0 {
            return Err(format!("target `{target}` did not run: {}", log.display()).into());
        }
        if status.success() {
            break;
        }
    }
    Ok(done)
}

fn cargo(folder: &Path) -> Command {
    let mut command = Command::new("cargo");
    // Without this, the child would inherit this task's toolchain.
    command.args(["+nightly", "fuzz"]).env_remove("RUSTUP_TOOLCHAIN").env_remove("CARGO").current_dir(folder);
    command
}

/// Counts the inputs that libFuzzer kept because of a fault.
fn count_faults(artifacts: &Path) -> std::io::Result<usize> {
    let is_fault =
        |name: &&String| ["crash-", "oom-", "timeout-", "leak-"].iter().any(|f| name.starts_with(f));
    Ok(names_in(artifacts)?.iter().filter(is_fault).count())
}

/// Returns the names in a folder, sorted.
fn names_in(folder: &Path) -> std::io::Result<Vec<String>> {
    let mut names = Vec::new();
    for entry in fs::read_dir(folder)? {
        names.push(entry?.file_name().to_string_lossy().into_owned());
    }
    names.sort();
    Ok(names)
}

/// Returns the number after the last occurrence of a word.
fn number_behind(text: &str, word: &str) -> Option<u64> {
    let rest = text[text.rfind(word)? + word.len()..].trim_start();
    rest.split(|c: char| !c.is_ascii_digit()).next()?.parse().ok()
}
