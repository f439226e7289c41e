//! Runs the built binary on damaged, lying and hostile inputs, and checks the outcome.

mod cases;
mod choices;
mod hostile;
mod mutate;
mod one;
mod process;
mod snapshot;

use crate::task::Passed;
use cases::{Case, InputPool};
use one::{OneTrial, TrialOutcome};
use rayon::iter::{IntoParallelIterator, ParallelIterator};
use std::collections::BTreeMap;
use std::fs;
use std::os::unix::fs::PermissionsExt;
use std::path::{Path, PathBuf};

/// Options of the task.
#[derive(clap::Args)]
pub struct TrialOptions {
    /// Binary to run.
    #[arg(long)]
    anemoe: PathBuf,
    #[arg(long, default_value_t = 1000)]
    runs: u64,
    /// Seed of the first run; each run adds 1.
    #[arg(long, default_value_t = 1)]
    seed: u64,
    /// Runs at a time.
    #[arg(long, default_value_t = 1)]
    jobs: usize,
    /// Keep the folders of the runs, and print their commands and outputs.
    #[arg(long)]
    keep: bool,
    /// Sub-command to run instead of all.
    #[arg(long)]
    only: Option<String>,
}

/// Runs the task.
pub fn run(options: TrialOptions) -> Passed {
    let TrialOptions { anemoe, runs, seed, jobs, keep, only } = options;
    let (binary, scratch) = prepare(&anemoe, keep)?;
    let cases = Case::all().into_iter().filter(|c| only.as_ref().is_none_or(|o| o == c.command));
    let cases: Vec<Case> = cases.collect();
    if cases.is_empty() {
        return Err("--only: no such command".into());
    }
    let passed = InputPool::make(&scratch.join("pool"), &binary).and_then(|pool| {
        let trial = OneTrial { binary: &binary, pool: &pool, scratch: &scratch, cases, keep };
        all(&trial, seed, runs, jobs)
    });
    if keep {
        println!("kept: {}", scratch.display());
    } else {
        fs::remove_dir_all(&scratch)?;
        fs::remove_dir_all(binary.parent().ok_or("a folder")?)?;
    }
    passed
}

/// Makes folders that `nobody` can read: one with a copy of the binary, and one for the runs, in memory unless they are kept.
fn prepare(binary: &Path, keep: bool) -> std::io::Result<(PathBuf, PathBuf)> {
    let folder = |inside: &Path| {
        let dir = tempfile::Builder::new().prefix("anemoe-trial-").tempdir_in(inside)?.keep();
        fs::set_permissions(&dir, fs::Permissions::from_mode(0o755)).map(|()| dir)
    };
    let (memory, disk) = (Path::new("/dev/shm"), std::env::temp_dir());
    let scratch = folder(if memory.is_dir() && !keep { memory } else { &disk })?;
    let copied = folder(&disk)?.join("anemoe");
    fs::copy(binary, &copied)?;
    Ok((copied, scratch))
}

/// Counts of one command.
#[derive(Default)]
struct TrialRow {
    runs: u64,
    statuses: BTreeMap<String, u64>,
    peak_bytes: u64,
    longest: f64,
}

/// Runs all seeds; prints the table and the violations. A failure of the trial itself ends it.
fn all(trial: &OneTrial<'_>, seed: u64, runs: u64, jobs: usize) -> Passed {
    let one = |i| {
        let seed = seed.wrapping_add(i);
        let outcome = trial.run(seed).map_err(|e| format!("seed {seed}: {e}"))?;
        for what in &outcome.violations {
            eprintln!("seed {seed}: {} ({}): {what}", outcome.command, outcome.damage);
        }
        Ok(outcome)
    };
    let threads = rayon::ThreadPoolBuilder::new().num_threads(jobs).build()?;
    let outcomes =
        threads.install(|| (0..runs).into_par_iter().map(one).collect::<Result<Vec<_>, String>>())?;
    print_table(&outcomes);
    let violations: usize = outcomes.iter().map(|o| o.violations.len()).sum();
    println!("\n{violations} violations; --seed S --runs 1 --keep runs one again");
    Ok(violations == 0)
}

fn print_table(outcomes: &[TrialOutcome]) {
    let mut rows: BTreeMap<String, TrialRow> = BTreeMap::new();
    for o in outcomes {
        for name in [o.command.to_string(), format!("({:?})", o.class), "all".into()] {
            let row = rows.entry(name).or_default();
            row.runs += 1;
            *row.statuses.entry(o.status.clone()).or_default() += 1;
            row.peak_bytes = row.peak_bytes.max(o.peak_bytes);
            row.longest = row.longest.max(o.seconds);
        }
    }
    println!(
        "| command, or kind of damage | runs | exit statuses | peak MiB | longest s |\n|---|---|---|---|---|"
    );
    for (name, row) in &rows {
        let statuses: Vec<String> = row.statuses.iter().map(|(s, n)| format!("{s}: {n}")).collect();
        let (runs, statuses, peak) = (row.runs, statuses.join(", "), row.peak_bytes >> 20);
        println!("| {name} | {runs} | {statuses} | {peak} | {:.1} |", row.longest);
    }
}
