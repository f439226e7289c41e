//! `cargo xtask sim`: tests the Core ML backend on Linux against a fake Core ML, see docs/mac.md.

use crate::task::{Passed, root};
use std::fs;
use std::path::{Path, PathBuf};
use std::process::Command;

/// Crate whose published source links a framework on every system.
const PATCHED: &str = "objc2-core-ml";
/// File in the crate with that link.
const PATCHED_FILE: &str = "src/generated/mod.rs";
/// Workspace of the sim, made by each run: the repository's manifest with other members.
const WORKSPACE: &str = "target/sim/workspace";
/// Line with the link, and its replacement.
const LINK: &str = "#[link(name = \"CoreML\", kind = \"framework\")]";
const LINK_ON_APPLE: &str =
    "#[cfg_attr(target_vendor = \"apple\", link(name = \"CoreML\", kind = \"framework\"))]";

/// Crates in `sim/` that are members of its workspace.
const MEMBERS: [&str; 6] = ["objc", "fake", "coreml", "started", "anemoe", "tests"];
/// Symbolic links in the workspace and their targets in the repository: members, and cargo's settings.
const LINKED: [(&str, &str); 3] = [("crates", "crates"), ("sim", "sim"), (".cargo", "sim/.cargo")];

/// Manifest of the program on the fake: that of the command line up to its dependencies, which follow.
const PROGRAM: &str = r#"# Made by `cargo xtask sim` from crates/cli/Cargo.toml: the program with Core ML's backend on the fake.
[package]
name = "anemoe"
version.workspace = true
edition.workspace = true
publish = false

[[bin]]
name = "anemoe"
path = "../../crates/cli/src/main.rs"
# Its unit tests run in the workspace of the repository.
test = false
doctest = false

[dev-dependencies]
serde_json.workspace = true
tempfile.workspace = true
zip.workspace = true

[dependencies]
# Registers the fake's classes when the program starts.
anemoe-coreml = { path = "../started", package = "started-coreml" }
"#;

/// Runs the task. Words filter the tests.
pub fn run(filter: Vec<String>) -> Passed {
    prepare(&root())?;
    // With CARGO_TARGET_DIR, crates that the repository's workspace has built are reused. Otherwise the sim has a
    // folder of its own, so that `target/debug/anemoe` is not replaced.
    let target = std::env::var_os("CARGO_TARGET_DIR");
    let target = target.map_or_else(|| root().join("target/sim/build"), PathBuf::from);
    let mut command = cargo_test(&root(), &target);
    // Unit tests of other crates run in the workspace of the repository. A filter before `--` would make cargo build those
    // that are disabled here.
    command.args(["-p", "anemoe", "-p", "sim-tests", "--"]).args(filter);
    Ok(command.status()?.success())
}

/// Makes the command that runs tests in the sim's workspace of `tree`; added arguments choose the crates.
pub fn cargo_test(tree: &Path, target: &Path) -> Command {
    let mut command = Command::new("cargo");
    // Cargo looks for its settings from its working folder upwards.
    command.args(["test", "--quiet"]).current_dir(tree.join(WORKSPACE));
    command.env("CARGO_TARGET_DIR", target);
    command
}

/// Makes the sim's workspace of `tree`, and the patched source that it uses.
pub fn prepare(tree: &Path) -> Result<(), Box<dyn std::error::Error>> {
    patch_source(tree)?;
    let workspace = tree.join(WORKSPACE);
    fs::create_dir_all(&workspace)?;
    for (name, folder) in LINKED {
        let link = workspace.join(name);
        if !link.exists() {
            std::os::unix::fs::symlink(tree.join(folder), link)?;
        }
    }
    let program = program_manifest(&fs::read_to_string(tree.join("crates/cli/Cargo.toml"))?)?;
    write_changed(&tree.join("sim/anemoe/Cargo.toml"), program.as_bytes())?;
    let manifest = workspace_manifest(&fs::read_to_string(tree.join("Cargo.toml"))?)?;
    write_changed(&workspace.join("Cargo.toml"), manifest.as_bytes())?;
    // Cargo adds entries to the copy that the repository does not need on this system.
    let (lock, known) = (fs::read(tree.join("Cargo.lock"))?, workspace.join("Cargo.lock.repository"));
    if fs::read(&known).ok().as_ref() != Some(&lock) {
        fs::write(workspace.join("Cargo.lock"), &lock)?;
        fs::write(known, &lock)?;
    }
    Ok(())
}

/// Returns the manifest of the program on the fake, with the dependencies of the command line.
fn program_manifest(cli: &str) -> Result<String, String> {
    let (_, tables) =
        cli.split_once("\n[dependencies]\n").ok_or("crates/cli/Cargo.toml: no [dependencies]")?;
    let tables = tables.split("\n[dev-dependencies]").next().unwrap_or(tables);
    let own = tables.lines().filter(|line| !line.starts_with("anemoe-coreml."));
    Ok(own.fold(PROGRAM.to_string(), |manifest, line| manifest + line + "\n"))
}

/// Returns the repository's workspace manifest with the sim's members.
///
/// Cargo names build outputs by the path below the workspace, the profile and the features. A workspace of the same
/// layout therefore reuses outputs of the repository's workspace.
fn workspace_manifest(repository: &str) -> Result<String, String> {
    let mut manifest = String::new();
    let mut found = [false; 2];
    for line in repository.lines() {
        let key = line.split(" = ").next().unwrap_or_default();
        match key {
            "members" => {
                let members = MEMBERS.map(|name| format!("\"sim/{name}\"")).join(", ");
                manifest += &format!("members = [{members}]\n");
                found[0] = true;
            }
            "anemoe-coreml" => {
                manifest += "anemoe-coreml = { path = \"sim/coreml\" }\n";
                found[1] = true;
            }
            "exclude" | "default-members" => {}
            _ => manifest += &format!("{line}\n"),
        }
    }
    if found != [true; 2] {
        return Err("Cargo.toml: no line begins with `members = ` or with `anemoe-coreml = `".into());
    }
    Ok(format!("{manifest}\n[patch.crates-io]\n{PATCHED} = {{ path = \"../{PATCHED}\" }}\n"))
}

/// Writes a file unless it has these bytes already: cargo rebuilds after every write.
fn write_changed(path: &Path, bytes: &[u8]) -> std::io::Result<()> {
    if fs::read(path).is_ok_and(|old| old == bytes) { Ok(()) } else { fs::write(path, bytes) }
}

/// Makes a source of [`PATCHED`] that links no framework on this system.
fn patch_source(tree: &Path) -> Result<(), Box<dyn std::error::Error>> {
    let source = registry_source()?;
    let target = tree.join("target/sim").join(PATCHED);
    let file = source.join(PATCHED_FILE);
    let text = fs::read_to_string(&file)?;
    if text.matches(LINK).count() != 1 {
        let what = format!(
            "{}: `{LINK}` is not there exactly once; the sim has to learn this version",
            file.display()
        );
        return Err(what.into());
    }
    let text = text.replace(LINK, LINK_ON_APPLE);
    let manifest = "Cargo.toml";
    let is_same = |name: &str, text: &[u8]| fs::read(target.join(name)).is_ok_and(|old| old == text);
    if is_same(PATCHED_FILE, text.as_bytes()) && is_same(manifest, &fs::read(source.join(manifest))?) {
        return Ok(());
    }
    if target.exists() {
        fs::remove_dir_all(&target)?;
    }
    copy_folder(&source, &target)?;
    fs::write(target.join(PATCHED_FILE), text)?;
    Ok(())
}

/// Returns the folder of the crate's published source, which cargo downloads if it is missing.
fn registry_source() -> Result<PathBuf, Box<dyn std::error::Error>> {
    let mut command = Command::new("cargo");
    command.args(["metadata", "--format-version", "1", "--locked"]).current_dir(root());
    let output = command.output()?;
    if !output.status.success() {
        return Err(String::from_utf8_lossy(&output.stderr).into_owned().into());
    }
    let metadata: serde_json::Value = serde_json::from_slice(&output.stdout)?;
    let packages = metadata["packages"].as_array().into_iter().flatten();
    let found = packages.filter(|p| p["name"] == PATCHED).find_map(|p| p["manifest_path"].as_str());
    let folder = found.and_then(|manifest| Path::new(manifest).parent());
    Ok(folder.ok_or_else(|| format!("cargo metadata names no {PATCHED}"))?.to_path_buf())
}

/// Copies a folder with all its contents.
pub fn copy_folder(from: &Path, to: &Path) -> std::io::Result<()> {
    fs::create_dir_all(to)?;
    for entry in fs::read_dir(from)? {
        let entry = entry?;
        let target = to.join(entry.file_name());
        if entry.file_type()?.is_dir() {
            copy_folder(&entry.path(), &target)?;
        } else {
            fs::copy(entry.path(), target)?;
        }
    }
    Ok(())
}
