//! Runs the built binary on damaged, lying and hostile inputs, and checks the outcome.

mod cases;
mod choices;
mod hostile;
mod interrupted_builds;
mod mutate;
mod one;
mod process;
mod snapshot;

use crate::options::TaskOptions;
use crate::task::Passed;
use cases::{CASES, Case, InputPool};
use hostile::DamageClass;
use one::{OneTrial, TrialOutcome};
use std::collections::BTreeMap;
use std::fs;
use std::os::unix::fs::PermissionsExt;
use std::path::{Path, PathBuf};
use std::sync::Mutex;
use std::sync::atomic::{AtomicU64, Ordering};

/// Seeds that are printed per cause.
const SHOWN: usize = 4;

/// Runs the task.
pub fn run(mut options: TaskOptions) -> Passed {
    let binary = options.text("anemoe").ok_or("--anemoe PATH is missing")?;
    let runs = options.number("runs")?;
    let seed = options.number("seed")?.unwrap_or(1);
    let jobs = options.number("jobs")?.unwrap_or(1).max(1);
    let interrupts = options.number("interrupt")?;
    let keep = options.flag("keep");
    let only = options.text("only");
    if !options.finish()?.is_empty() {
        return Err("trial takes options only".into());
    }
    let base = TrialBase::new(Path::new(&binary), keep)?;
    let passed = (|| -> Passed {
        let mut passed = true;
        if let Some(n) = interrupts {
            passed &= interrupted_builds::run(&base.binary, &base.scratch, n, seed, keep)?;
        }
        if runs.is_some() || interrupts.is_none() {
            let is_chosen = |c: &&Case| only.as_ref().is_none_or(|o| o == c.command);
            let cases: Vec<&Case> = CASES.iter().filter(is_chosen).collect();
            if cases.is_empty() {
                return Err("--only: no such command".into());
            }
            let pool = InputPool::make(&base.scratch.join("pool"), &base.binary)?;
            let trial = OneTrial { binary: &base.binary, pool: &pool, scratch: &base.scratch, cases, keep };
            passed &= all(&trial, seed, runs.unwrap_or(1000), jobs)?;
        }
        Ok(passed)
    })();
    if keep {
        println!("kept: {}", base.scratch.display());
    } else {
        fs::remove_dir_all(&base.scratch)?;
        fs::remove_dir_all(base.binary.parent().ok_or("a folder")?)?;
    }
    passed
}

/// Folders of a trial that `nobody` can read: one for the binary, one in memory for the runs.
struct TrialBase {
    binary: PathBuf,
    scratch: PathBuf,
}

impl TrialBase {
    fn new(binary: &Path, keep: bool) -> std::io::Result<TrialBase> {
        let folder = |inside: &Path| {
            let dir = tempfile::Builder::new().prefix("anemoe-trial-").tempdir_in(inside)?.keep();
            fs::set_permissions(&dir, fs::Permissions::from_mode(0o755))?;
            std::io::Result::Ok(dir)
        };
        let memory = Path::new("/dev/shm");
        // Kept runs go where users look for temporary files.
        let scratch = if memory.is_dir() && !keep { folder(memory)? } else { folder(&std::env::temp_dir())? };
        let copied = folder(&std::env::temp_dir())?.join("anemoe");
        fs::copy(binary, &copied)?;
        Ok(TrialBase { binary: copied, scratch })
    }
}

/// Counts of one command.
#[derive(Default)]
struct TrialRow {
    classes: BTreeMap<DamageClass, u64>,
    statuses: BTreeMap<String, u64>,
    peak_bytes: u64,
    longest: f64,
}

/// Runs all seeds; prints the table and the violations.
fn all(trial: &OneTrial<'_>, seed: u64, runs: u64, jobs: u64) -> Passed {
    let next = AtomicU64::new(0);
    let outcomes = Mutex::new(Vec::<TrialOutcome>::new());
    let failed = Mutex::new(None);
    std::thread::scope(|s| {
        for _ in 0..jobs {
            s.spawn(|| {
                loop {
                    let i = next.fetch_add(1, Ordering::Relaxed);
                    if i >= runs {
                        return;
                    }
                    match trial.run(seed.wrapping_add(i)) {
                        Ok(outcome) => {
                            let mut all = outcomes.lock().unwrap_or_else(|e| e.into_inner());
                            for what in &outcome.violations {
                                eprintln!(
                                    "seed {}: {} ({}): {what}",
                                    outcome.seed, outcome.command, outcome.damage
                                );
                            }
                            all.push(outcome);
                        }
                        Err(e) => {
                            // A failure of the trial itself ends it.
                            next.store(runs, Ordering::Relaxed);
                            *failed.lock().unwrap_or_else(|e| e.into_inner()) =
                                Some(format!("seed {}: {e}", seed + i));
                        }
                    }
                }
            });
        }
    });
    if let Some(e) = failed.into_inner().unwrap_or_else(|e| e.into_inner()) {
        return Err(e.into());
    }
    let outcomes = outcomes.into_inner().unwrap_or_else(|e| e.into_inner());
    print_table(&outcomes);
    Ok(print_violations(&outcomes))
}

fn print_table(outcomes: &[TrialOutcome]) {
    let mut rows: BTreeMap<&str, TrialRow> = BTreeMap::new();
    for o in outcomes {
        for name in [o.command, "all"] {
            let row = rows.entry(name).or_default();
            *row.classes.entry(o.class).or_default() += 1;
            *row.statuses.entry(o.status.clone()).or_default() += 1;
            row.peak_bytes = row.peak_bytes.max(o.peak_bytes);
            row.longest = row.longest.max(o.seconds);
        }
    }
    let classes: Vec<String> = DamageClass::ALL.iter().map(|c| format!(" {} |", c.name())).collect();
    println!("| command | runs |{} exit statuses | peak MiB | longest s |", classes.concat());
    println!("|---|---|{}---|---|---|", "---|".repeat(classes.len()));
    for (name, row) in &rows {
        let count = |c: &DamageClass| format!(" {} |", row.classes.get(c).copied().unwrap_or(0));
        let classes: String = DamageClass::ALL.iter().map(count).collect();
        let statuses: Vec<String> = row.statuses.iter().map(|(s, n)| format!("{s}: {n}")).collect();
        let runs: u64 = row.classes.values().sum();
        let peak = row.peak_bytes >> 20;
        println!("| {name} | {runs} |{classes} {} | {peak} | {:.1} |", statuses.join(", "), row.longest);
    }
}

/// Prints violations by cause. Tells whether there was none.
fn print_violations(outcomes: &[TrialOutcome]) -> bool {
    let mut causes: BTreeMap<(&str, String), Vec<&TrialOutcome>> = BTreeMap::new();
    for o in outcomes {
        for what in &o.violations {
            causes.entry((o.command, one::cause(what))).or_default().push(o);
        }
    }
    if causes.is_empty() {
        println!("\nno violation");
        return true;
    }
    println!("\nviolations by cause; --seed S --runs 1 --keep runs one again:");
    for ((command, cause), found) in &causes {
        let mut seeds: Vec<u64> = found.iter().map(|o| o.seed).collect();
        seeds.sort_unstable();
        seeds.truncate(SHOWN);
        println!(
            "- {command}: {cause}: {} runs, seeds {seeds:?}, for instance {}",
            found.len(),
            found[0].damage
        );
    }
    false
}
