//! Does one run of a trial, from its seed to its violations.

use super::cases::{Case, InputPool};
use super::choices::Choices;
use super::hostile::{DamageClass, damage};
use super::process::{self, Ran};
use super::snapshot;
use std::ffi::OsString;
use std::fs;
use std::io;
use std::os::unix::fs::{PermissionsExt, symlink};
use std::os::unix::process::ExitStatusExt;
use std::path::{Path, PathBuf};
use std::time::Duration;

/// Longest time of a run.
const LIMIT: Duration = Duration::from_secs(10);
/// Most bytes of memory of a run on small inputs.
const MAX_BYTES: u64 = 1 << 30;
/// One in this many draws of `bench` is kept: each measures the machine's memory for seconds.
const BENCH_ONCE_IN: usize = 4;

/// Binary, cases and folders that all runs share.
pub struct OneTrial<'a> {
    pub binary: &'a Path,
    pub pool: &'a InputPool,
    pub scratch: &'a Path,
    pub cases: Vec<Case>,
    pub keep: bool,
}

/// Outcome of a run, with its violations.
pub struct TrialOutcome {
    pub command: &'static str,
    pub class: DamageClass,
    pub damage: String,
    pub status: String,
    pub peak_bytes: u64,
    pub seconds: f64,
    pub violations: Vec<String>,
}

impl OneTrial<'_> {
    /// Makes and judges the run of a seed.
    pub fn run(&self, seed: u64) -> io::Result<TrialOutcome> {
        let mut r = Choices::new(seed);
        let mut case = r.pick(&self.cases);
        if case.command == "bench" && !r.once_in(BENCH_ONCE_IN) {
            case = r.pick(&self.cases);
        }
        let class = DamageClass::choose(&mut r);
        let home = self.scratch.join(format!("run-{seed}"));
        let folder = home.join("work");
        plant(&folder)?;
        for input in case.inputs() {
            snapshot::copy(&self.pool.folder.join(input), &folder.join("in").join(input))?;
        }
        let done = damage(case, class, &folder, &mut r)?;
        if process::drops_rights() {
            snapshot::give(&folder, process::NOBODY)?;
        }
        let mut args: Vec<OsString> = done.args.clone();
        let is_json = !r.once_in(5);
        args.extend(is_json.then(|| "--json".into()));
        if !args.iter().any(|a| a == "--threads") {
            args.extend(["--threads".into(), "1".into()]);
        }
        let before = snapshot::take(&folder)?;
        let ran = process::run(self.binary, &args, &folder, &home, LIMIT)?;
        let after = snapshot::take(&folder)?;

        let mut violations = judge(&ran, is_json, done.is_small);
        let may: Vec<PathBuf> = case.allowed().into_iter().chain(done.allowed).collect();
        violations.extend(snapshot::differences(&before, &after, &may));
        if self.keep {
            let line: Vec<String> = args.iter().map(|a| format!("{a:?}")).collect();
            println!("cd {} && {} {}", folder.display(), self.binary.display(), line.join(" "));
            println!("{}\n{}", String::from_utf8_lossy(&ran.stdout), String::from_utf8_lossy(&ran.stderr));
        } else {
            let _ = fs::set_permissions(folder.join("out"), fs::Permissions::from_mode(0o755));
            fs::remove_dir_all(&home)?;
        }
        Ok(TrialOutcome {
            command: case.command,
            class,
            damage: done.what,
            status: status(&ran),
            peak_bytes: ran.peak_bytes,
            seconds: ran.seconds,
            violations,
        })
    }
}

/// Makes the folders of a run, with files and links that no command may touch.
fn plant(folder: &Path) -> io::Result<()> {
    for name in ["in", "out", "tmp", "other/shards"] {
        fs::create_dir_all(folder.join(name))?;
    }
    for name in ["KEEP", "in/.tmpKEEP", "out/KEEP", "out/.partial-KEEP", "tmp/KEEP", "other/shards/.tmpKEEP"]
    {
        fs::write(folder.join(name), "keep")?;
    }
    symlink("../other", folder.join("out/link"))?;
    symlink("no/such", folder.join("in/dangling"))
}

fn status(ran: &Ran) -> String {
    match (ran.ended, ran.status.code(), ran.status.signal()) {
        (Some(why), _, _) => format!("ended: {why}"),
        (_, Some(code), _) => code.to_string(),
        (_, _, signal) => format!("signal {}", signal.unwrap_or(0)),
    }
}

/// Returns the violations of a run, except those of files.
fn judge(ran: &Ran, is_json: bool, is_small: bool) -> Vec<String> {
    let mut found = Vec::new();
    let stderr = String::from_utf8_lossy(&ran.stderr);
    match (ran.ended, ran.status.code()) {
        (Some(why), _) => found.push(format!("ended by its {why}")),
        (None, Some(0 | 1 | 2 | 129 | 130 | 143)) => {}
        (None, Some(code)) => found.push(format!("exit status {code}")),
        (None, None) => found.push(status(ran)),
    }
    if let Some(at) = stderr.find("panicked") {
        let line: String = stderr[at..].lines().take(2).collect::<Vec<_>>().join(" ");
        found.push(line.chars().take(300).collect());
    }
    if is_small && ran.peak_bytes > MAX_BYTES {
        found.push(format!("memory: {} MiB", ran.peak_bytes >> 20));
    }
    let has_ended = ran.ended.is_none() && ran.status.code().is_some();
    if is_json
        && has_ended
        && let Err(e) = serde_json::from_slice::<serde_json::Value>(&ran.stdout)
    {
        let start: String = String::from_utf8_lossy(&ran.stdout).chars().take(80).collect();
        found.push(format!("standard output is not one JSON document: {e}: {start:?}"));
    }
    // JSON output is for programs, and must escape only U+0000 to U+001F.
    let stdout = if is_json { Default::default() } else { String::from_utf8_lossy(&ran.stdout) };
    for (name, text) in [("output", stdout), ("error", stderr.clone())] {
        // A terminal obeys control characters; U+009B alone starts an escape sequence.
        let control = |c: char| c.is_control() && !"\n\t\r".contains(c);
        if let Some(line) = text.lines().find(|l| l.contains(control)) {
            found.push(format!(
                "control character in standard {name}: {:?}",
                line.chars().take(120).collect::<String>()
            ));
        }
    }
    found
}
