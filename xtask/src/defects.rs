//! `cargo xtask defects`: plants defects in the Core ML backend, one at a time, and lists those that the sim's tests miss.
//!
//! Works on a copy of the repository under `target/defects`; its log there says how each defect was noticed.

use crate::sim;
use crate::task::{Passed, root};
use std::fs::{self, File};
use std::io;
use std::path::Path;
use std::process::{Command, Stdio};
use std::time::Duration;

/// Files and folders of the repository that the copy needs.
const PARTS: [&str; 6] = ["Cargo.toml", "Cargo.lock", "crates", "fixtures", "sim", "xtask"];
/// Folder of the code that is changed.
const ENGINE: &str = "crates/coreml/src/engine";
/// Longest time of a test run; a defect that makes it longer counts as noticed.
const LONGEST: Duration = Duration::from_secs(300);

/// Defects: a name with its file, the lines that it removes, and the lines that it adds.
const DEFECTS: &str = include_str!("defects.txt");

/// A defect of the backend.
struct Defect<'a> {
    name: &'a str,
    /// False where the tests cannot notice it.
    shows: bool,
    file: &'a str,
    old: String,
    new: String,
}

/// Parses one block of `defects.txt`.
fn parse(block: &str) -> Option<Defect<'_>> {
    let (title, _) = block.split_once('\n')?;
    let (name, file) = title.rsplit_once(' ')?;
    let (name, shows) = name.strip_suffix('?').map_or((name.strip_suffix(':'), true), |n| (Some(n), false));
    let marked = |mark| block.lines().filter_map(|l| l.strip_prefix(mark)).collect::<Vec<_>>().join("\n");
    Some(Defect { name: name?, shows, file, old: marked('-'), new: marked('+') })
}

/// Runs the task for defects whose names contain one of the words, or for all.
pub fn run(words: Vec<String>) -> Passed {
    let tree = root().join("target/defects");
    copy_tree(&tree)?;
    sim::prepare(&tree)?;
    let log = tree.join("log.txt");
    // The first build takes longer than a test run may.
    let mut build = tests(&tree);
    if !build.arg("--no-run").status()?.success() {
        return Err("the tests cannot be built".into());
    }
    if !passes(&tree, &log)? {
        return Err(format!("the tests fail without any defect: {}", log.display()).into());
    }
    let (mut wrong, mut planted) = (0, 0);
    for block in DEFECTS.split("\n\n").filter(|block| !block.starts_with('#')) {
        let defect = parse(block).ok_or_else(|| format!("defects.txt: {block}"))?;
        let Defect { name, shows, file, old, new } = &defect;
        if !words.is_empty() && !words.iter().any(|w| name.contains(w.as_str())) {
            continue;
        }
        let path = tree.join(ENGINE).join(file);
        let text = fs::read_to_string(&path)?;
        if text.matches(old.as_str()).count() != 1 {
            return Err(format!("{name}: `{old}` is not in {file} exactly once").into());
        }
        fs::write(&path, text.replace(old.as_str(), new))?;
        let noticed = !passes(&tree, &log)?;
        fs::write(&path, &text)?;
        let report = fs::read_to_string(&log)?;
        let is_right = noticed == *shows && !report.contains("could not compile");
        (wrong, planted) = (wrong + usize::from(!is_right), planted + 1);
        let verdict = match (noticed, is_right) {
            (true, true) => "noticed",
            (false, true) => "not noticed, as known",
            (false, false) => "MISSED",
            (true, false) => "WRONG",
        };
        println!("{verdict:8}  {name}: {}", reason(&report));
    }
    println!("{wrong} of {planted} defects not as expected");
    Ok(wrong == 0)
}

/// Copies the needed parts of the repository; files that cargo made in the copy stay.
fn copy_tree(tree: &Path) -> io::Result<()> {
    for part in PARTS {
        let (from, to) = (root().join(part), tree.join(part));
        if !from.is_dir() {
            fs::create_dir_all(tree)?;
            fs::copy(from, to)?;
            continue;
        }
        if to.exists() {
            fs::remove_dir_all(&to)?;
        }
        sim::copy_folder(&from, &to)?;
    }
    Ok(())
}

/// Makes the command that builds and runs the backend's tests.
fn tests(tree: &Path) -> Command {
    let mut command = sim::cargo_test(tree, &tree.join("target/build"));
    command.args(["-p", "sim-tests"]);
    command
}

/// Tells whether the tests pass within [`LONGEST`].
fn passes(tree: &Path, log: &Path) -> io::Result<bool> {
    let out = File::create(log)?;
    let tests = tests(tree);
    // `timeout` also ends the processes that cargo has started.
    let mut command = Command::new("timeout");
    command.arg(LONGEST.as_secs().to_string()).arg(tests.get_program()).args(tests.get_args());
    // The longest tests repeat the others' checks for more bundles.
    command.args(["--", "--skip", "every_fixture", "--skip", "every_form"]);
    command.envs(tests.get_envs().filter_map(|(name, value)| Some((name, value?))));
    command.current_dir(tests.get_current_dir().unwrap_or(tree));
    Ok(command.stdout(out.try_clone()?).stderr(out).stdin(Stdio::null()).status()?.success())
}

/// Returns the first line that says why a test failed, at most 140 characters.
fn reason(report: &str) -> String {
    let mut lines = report.lines();
    let found = lines.find(|l| l.contains("panicked at") || l.contains("error:") || l.contains("signal:"));
    let line = match found {
        Some(line) if line.contains("panicked at") => lines.next().unwrap_or(line),
        Some(line) => line,
        None => "",
    };
    line.chars().take(140).collect()
}
