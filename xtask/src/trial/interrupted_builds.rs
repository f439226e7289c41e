//! Kills builds and continues them, with foreign files, folders and links in and beside the bundle.

use super::choices::Choices;
use super::process;
use super::snapshot::{self, FolderSnapshot, SnapshotEntry};
use crate::task::{Passed, root};
use std::collections::BTreeMap;
use std::ffi::OsString;
use std::fs;
use std::io;
use std::os::unix::fs::symlink;
use std::os::unix::process::ExitStatusExt;
use std::path::{Path, PathBuf};
use std::time::Duration;

const BUNDLE: &str = "out/b.anemoe";
/// Target folder of planted links.
const BEHIND: &str = "other/behind";
/// Most seconds of a build.
const LIMIT: Duration = Duration::from_secs(60);
/// Signals that end a build: sent by a user, by a scheduler, or without a chance to react.
const SIGNALS: [i32; 3] = [libc::SIGINT, libc::SIGTERM, libc::SIGKILL];

/// Foreign entries, and their places.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord)]
enum Foreign {
    Nothing,
    WorkFolder,
    Backup,
    ShardsLink,
    ShardsFiles,
    Beside,
    WorkLink,
}

const FOREIGN: [Foreign; 7] = [
    Foreign::Nothing,
    Foreign::WorkFolder,
    Foreign::Backup,
    Foreign::ShardsLink,
    Foreign::ShardsFiles,
    Foreign::Beside,
    Foreign::WorkLink,
];

impl Foreign {
    fn name(self) -> &'static str {
        match self {
            Foreign::Nothing => "nothing",
            Foreign::WorkFolder => "a foreign folder in .anemoe-build",
            Foreign::Backup => "a .tmp_backup folder in the bundle",
            Foreign::ShardsLink => "shards is a link to another folder",
            Foreign::ShardsFiles => "foreign .partial-x and .tmpfoo in shards",
            Foreign::Beside => "foreign .tmp files beside the bundle",
            Foreign::WorkLink => ".anemoe-build is a link to another folder",
        }
    }

    /// Plants the foreign entry. Returns the paths that must not change. Existing entries stay.
    fn plant(self, folder: &Path) -> io::Result<Vec<PathBuf>> {
        let bundle = folder.join(BUNDLE);
        let keep = |path: PathBuf| -> io::Result<PathBuf> {
            fs::create_dir_all(path.parent().unwrap_or(folder))?;
            fs::write(&path, "keep")?;
            Ok(path.strip_prefix(folder).unwrap_or(&path).to_path_buf())
        };
        // Existing entries move to the link's target, with foreign files beside them.
        let link = |name: &str| -> io::Result<Vec<PathBuf>> {
            let (path, target) = (bundle.join(name), folder.join(BEHIND));
            fs::create_dir_all(&bundle)?;
            if path.is_dir() {
                fs::rename(&path, &target)?;
            }
            let kept = vec![keep(target.join(".partial-x"))?, keep(target.join(".tmpfoo"))?];
            symlink(Path::new("../..").join(BEHIND), &path)?;
            Ok(kept)
        };
        match self {
            Foreign::Nothing => Ok(Vec::new()),
            Foreign::WorkFolder => Ok(vec![keep(bundle.join(".anemoe-build/mine/KEEP"))?]),
            Foreign::Backup => Ok(vec![keep(bundle.join(".tmp_backup/KEEP"))?]),
            Foreign::ShardsLink => link("shards"),
            Foreign::ShardsFiles => {
                let shards = bundle.join("shards");
                Ok(vec![keep(shards.join(".partial-x"))?, keep(shards.join(".tmpfoo/KEEP"))?])
            }
            Foreign::Beside => {
                let out = folder.join("out");
                Ok(vec![
                    keep(out.join(".tmp_backup/KEEP"))?,
                    keep(out.join(".partial-b.anemoe"))?,
                    keep(out.join(".tmp-b"))?,
                ])
            }
            Foreign::WorkLink => link(".anemoe-build"),
        }
    }
}

/// Outcome of one build.
struct BuildOutcome {
    seed: u64,
    foreign: Foreign,
    early: bool,
    kills: usize,
    end: String,
    violations: Vec<String>,
}

/// Kills and continues builds; prints a table and the violations.
pub fn run(binary: &Path, scratch: &Path, builds: u64, seed: u64, keep: bool) -> Passed {
    let mut references = Vec::new();
    for gates in [false, true] {
        let folder = scratch.join(format!("whole-{gates}"));
        prepare(&folder)?;
        let ran = build(binary, &folder, gates, None)?;
        if !ran.status.success() {
            return Err(format!("the whole build: {}", String::from_utf8_lossy(&ran.stderr)).into());
        }
        references.push((snapshot::take(&folder.join(BUNDLE))?, ran.seconds));
    }
    let mut outcomes = Vec::new();
    for i in 0..builds {
        let seed = seed.wrapping_add(i);
        let mut r = Choices::new(seed);
        let gates = r.once_in(3);
        let (reference, seconds) = &references[usize::from(gates)];
        let folder = scratch.join(format!("killed-{seed}"));
        let outcome = BuildOutcome { seed, ..one(binary, &folder, gates, (reference, *seconds), &mut r)? };
        for what in &outcome.violations {
            eprintln!("seed {}: {}: {what}", outcome.seed, outcome.foreign.name());
        }
        outcomes.push(outcome);
        if !keep {
            fs::remove_dir_all(&folder)?;
        }
    }
    Ok(report(&outcomes))
}

fn one(
    binary: &Path,
    folder: &Path,
    gates: bool,
    (reference, seconds): (&FolderSnapshot, f64),
    r: &mut Choices,
) -> io::Result<BuildOutcome> {
    let foreign = *r.pick(&FOREIGN);
    let early = r.once_in(2);
    let kills = 1 + r.below(4);
    prepare(folder)?;
    let mut kept: Vec<PathBuf> =
        ["KEEP", ".partial-x", ".tmpfoo"].map(|n| Path::new("other/shards").join(n)).into();
    if early {
        kept.extend(foreign.plant(folder)?);
    }
    let mut violations = Vec::new();
    let mut before = FolderSnapshot::new();
    let mut end = String::new();
    for attempt in 0..=kills {
        if attempt == 1 && !early {
            kept.extend(foreign.plant(folder)?);
        }
        if attempt <= 1 {
            give(folder)?;
            before = snapshot::take(folder)?;
        }
        // The last attempt runs to its end. Most of the others are killed midway.
        let last = attempt == kills;
        let after = Duration::from_secs_f64(seconds * 1.2 * (r.below(1000) as f64 / 1000.0));
        let signal = *r.pick(&SIGNALS);
        let ran = build(binary, folder, gates, (!last).then_some((after, signal)))?;
        let stderr = String::from_utf8_lossy(&ran.stderr).into_owned();
        if stderr.contains("panicked") {
            violations.push(stderr.lines().find(|l| l.contains("panicked")).unwrap_or_default().to_string());
        }
        match (ran.ended, ran.status.code(), ran.status.signal()) {
            (Some(why), _, _) => violations.push(format!("ended by its {why}")),
            (_, Some(0 | 2 | 129 | 130 | 143), _) => {}
            (_, _, Some(found)) if !last && found == signal => {}
            _ => violations.push(format!("{}", ran.status)),
        }
        if !last {
            continue;
        }
        end = match ran.status.code() {
            Some(0) => "done".into(),
            Some(2) => "refused".into(),
            _ => format!("{}", ran.status),
        };
        match ran.status.code() {
            Some(0) => {
                let mut found = snapshot::take(&folder.join(BUNDLE))?;
                if foreign == Foreign::ShardsLink {
                    // Either the build wrote through the link, or a folder has replaced it.
                    let behind = snapshot::take(&folder.join(BEHIND))?;
                    let is_kept = |p: &Path| kept.iter().any(|k| *k == Path::new(BEHIND).join(p));
                    if matches!(found.get(Path::new("shards")), Some(SnapshotEntry::Link(_))) {
                        found.insert("shards".into(), SnapshotEntry::Folder);
                        let all = behind.into_iter().filter(|(p, _)| !is_kept(p));
                        found.extend(all.map(|(p, e)| (Path::new("shards").join(p), e)));
                    }
                }
                // Planted entries are not part of the bundle.
                let is_planted = |p: &Path| kept.iter().any(|k| k.starts_with(Path::new(BUNDLE).join(p)));
                found.retain(|path, _| reference.contains_key(path) || !is_planted(path));
                violations.extend(unlike(reference, &found));
            }
            Some(2) if foreign == Foreign::Nothing || foreign == Foreign::Beside => {
                violations.push(format!("refused: {}", stderr.lines().next().unwrap_or_default()));
            }
            // The message must name the entry in the way.
            Some(2) if !names_it(&stderr, &kept, early) => {
                violations.push(format!(
                    "refused without naming it: {}",
                    stderr.lines().next().unwrap_or_default()
                ));
            }
            _ => {}
        }
    }
    let after = snapshot::take(folder)?;
    for path in &kept {
        if before.get(path) != after.get(path) {
            violations.push(format!("planted {} was changed or deleted", path.display()));
        }
    }
    let may = [BUNDLE, BEHIND].map(PathBuf::from);
    let created =
        snapshot::differences(&before, &after, &may[..1 + usize::from(foreign == Foreign::ShardsLink)]);
    violations
        .extend(created.into_iter().filter(|c| !kept.iter().any(|k| c.ends_with(&k.display().to_string()))));
    Ok(BuildOutcome { seed: 0, foreign, early, kills, end, violations })
}

/// Tells whether a refusal names the planted entry. A folder that was empty before the first run may be named itself.
fn names_it(message: &str, kept: &[PathBuf], early: bool) -> bool {
    if early && message.contains(BUNDLE) {
        return true;
    }
    let words = [".anemoe-build", ".tmp_backup", "shards", ".partial-x", ".tmpfoo", BEHIND];
    // A message names a link itself, not its target.
    if message.contains("a link") && [".anemoe-build", "shards"].iter().any(|w| message.contains(w)) {
        return true;
    }
    kept.iter().any(|k| {
        let text = k.to_string_lossy();
        words.iter().any(|w| text.contains(w) && message.contains(w))
    })
}

/// Makes the input checkpoint, and a folder of another owner.
fn prepare(folder: &Path) -> io::Result<()> {
    for name in ["in", "out", "tmp", "other/shards"] {
        fs::create_dir_all(folder.join(name))?;
    }
    snapshot::copy(&root().join("fixtures/tiny-gemma4-moe-text"), &folder.join("in/gemma"))?;
    for name in ["KEEP", ".partial-x", ".tmpfoo"] {
        fs::write(folder.join("other/shards").join(name), "keep")?;
    }
    give(folder)
}

fn give(folder: &Path) -> io::Result<()> {
    if process::drops_rights() { snapshot::give(folder, process::NOBODY) } else { Ok(()) }
}

fn build(
    binary: &Path,
    folder: &Path,
    gates: bool,
    interrupt: Option<process::Interrupt>,
) -> io::Result<process::Ran> {
    let mut words = format!("build in/gemma -o {BUNDLE} --quant lut4 --tokens 1,4 --threads 2");
    if !gates {
        words.push_str(" --skip-gates");
    }
    let args: Vec<OsString> = words.split(' ').map(OsString::from).collect();
    let logs = folder.with_extension("logs");
    fs::create_dir_all(&logs)?;
    process::run(binary, &args, folder, &logs, LIMIT, interrupt)
}

/// Returns the differences of a bundle from the reference, without the journal.
fn unlike(reference: &FolderSnapshot, found: &FolderSnapshot) -> Vec<String> {
    let same = |a: &SnapshotEntry, b: &SnapshotEntry| match (a, b) {
        (SnapshotEntry::File { hash: a, .. }, SnapshotEntry::File { hash: b, .. }) => a == b,
        _ => a == b,
    };
    let mut all = Vec::new();
    for (path, entry) in reference.iter().filter(|(p, _)| !p.starts_with("journal.jsonl")) {
        match found.get(path) {
            None => all.push(format!("bundle: {} is missing", path.display())),
            Some(other) if !same(entry, other) => all.push(format!("bundle: {} differs", path.display())),
            Some(_) => {}
        }
    }
    for path in found.keys().filter(|p| !reference.contains_key(*p)) {
        all.push(format!("bundle: {} is left over", path.display()));
    }
    all.truncate(5);
    all
}

/// Builds with one kind of foreign entry.
#[derive(Default)]
struct BuildRow<'a> {
    builds: u64,
    kills: usize,
    ends: BTreeMap<&'a str, u64>,
    broken: Vec<&'a BuildOutcome>,
}

fn report(outcomes: &[BuildOutcome]) -> bool {
    let mut rows: BTreeMap<Foreign, BuildRow<'_>> = BTreeMap::new();
    for o in outcomes {
        let row = rows.entry(o.foreign).or_default();
        row.builds += 1;
        row.kills += o.kills;
        *row.ends.entry(&o.end).or_default() += 1;
        row.broken.extend((!o.violations.is_empty()).then_some(o));
    }
    println!("| planted | builds | kills | end | with violations |\n|---|---|---|---|---|");
    for (foreign, row) in &rows {
        let ends: Vec<String> = row.ends.iter().map(|(e, n)| format!("{e}: {n}")).collect();
        let (builds, kills, broken) = (row.builds, row.kills, row.broken.len());
        println!("| {} | {builds} | {kills} | {} | {broken} |", foreign.name(), ends.join(", "));
    }
    for o in rows.values().flat_map(|row| row.broken.iter().take(3)) {
        let when = if o.early { "before the first run" } else { "after the first kill" };
        println!("- seed {}: {}, {when}: {}", o.seed, o.foreign.name(), o.violations.join("; "));
    }
    rows.values().all(|row| row.broken.is_empty())
}
