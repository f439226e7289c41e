//! `cargo xtask mac-check`: type-checks the binary for macOS on Linux.
//!
//! ```text
//! Debian's rustc-web, with its standard libraries and sources, unpacked under target/mac-check
//! cargo check --target aarch64-apple-darwin -Zbuild-std, with that compiler: source and compiler have to be of one version
//! ```

use crate::task::{Passed, root};
use std::collections::BTreeSet;
use std::ffi::OsStr;
use std::fs;
use std::path::Path;
use std::process::{Command, Stdio};

/// Target that is checked.
const TARGET: &str = "aarch64-apple-darwin";
/// Packages of the compiler.
const PACKAGES: [&str; 3] = ["rustc-web", "libstd-rust-web-dev", "rust-web-src"];
/// Prefixes of the names of two more, which have its version in their names, and on which the first two packages depend.
const VERSIONED: [&str; 2] = ["libstd-rust-web-1", "libllvm"];
/// Arguments with which `apt-cache depends` lists what packages need, and what these need.
const NEEDED: &str =
    "depends --recurse --no-recommends --no-suggests --no-conflicts --no-breaks --no-replaces --no-enhances";
/// Oldest macOS on which the backend runs.
const OLDEST_SYSTEM: &str = "15.0";

/// Script of a compiler that writes an empty object.
const EMPTY_OBJECT: &str =
    "#!/bin/sh\nwhile [ $# -gt 0 ]; do [ \"$1\" = -o ] && : > \"$2\"; shift; done\nexit 0\n";
/// Script of an archiver that writes an empty archive.
const EMPTY_ARCHIVE: &str = "#!/bin/sh\n: > \"$2\"\n";

/// Runs the task. It passes with a notice if the compiler is not available.
pub fn run() -> Passed {
    let folder = root().join("target/mac-check");
    let compiler = folder.join("root/usr/bin/rustc");
    let ready = if compiler.is_file() { Ok(()) } else { unpack(&folder) };
    if let Err(why) = ready.and_then(|()| compiler_is_new_enough(&folder)) {
        println!("mac-check: SKIPPED. Nothing was checked for macOS: {why}");
        return Ok(true);
    }
    let mut command = Command::new("cargo");
    command.args(["check", "--target", TARGET, "-Zbuild-std=std,panic_abort", "--locked"]);
    command.args(["-p", "anemoe-coreml", "-p", "anemoe"]);
    // The build script of this crate compiles code that needs Apple's compiler; the code is not linked here.
    command.args(["--config", &format!("target.{TARGET}.objc2_exception_helper_0_1.rustc-cfg=[]")]);
    command.current_dir(root());
    command.env("CARGO_TARGET_DIR", folder.join("build"));
    command.env("LD_LIBRARY_PATH", folder.join("root/usr/lib/x86_64-linux-gnu"));
    command.env("RUSTC", compiler).env("RUSTC_BOOTSTRAP", "1").env("RUSTFLAGS", "-Dwarnings");
    command.env("MACOSX_DEPLOYMENT_TARGET", OLDEST_SYSTEM);
    // C and assembly of other crates are not linked either.
    let compiler = write_tool(&folder, "cc", EMPTY_OBJECT)?;
    command.env("CC_aarch64_apple_darwin", compiler).env("SDKROOT", "/");
    command.env("AR_aarch64_apple_darwin", write_tool(&folder, "ar", EMPTY_ARCHIVE)?);
    Ok(command.status()?.success())
}

/// Fails where the unpacked compiler is older than the workspace's `rust-version`, and removes it, so that the next run
/// downloads a newer one.
fn compiler_is_new_enough(folder: &Path) -> Result<(), String> {
    let cargo_toml = fs::read_to_string(root().join("Cargo.toml")).map_err(|e| e.to_string())?;
    let needed = cargo_toml.lines().find_map(|line| line.strip_prefix("rust-version = "));
    let needed = needed.ok_or("Cargo.toml: no rust-version")?.trim_matches('"');
    let printed = Command::new(folder.join("root/usr/bin/rustc"))
        .arg("--version")
        .env("LD_LIBRARY_PATH", folder.join("root/usr/lib/x86_64-linux-gnu"))
        .output()
        .map_err(|e| format!("rustc-web: {e}"))?;
    let printed = String::from_utf8_lossy(&printed.stdout).into_owned();
    let found = printed.split_whitespace().nth(1).ok_or("rustc-web printed no version")?;
    if version_numbers(found) >= version_numbers(needed) {
        return Ok(());
    }
    fs::remove_dir_all(folder).map_err(|e| e.to_string())?;
    Err(format!(
        "Debian's rustc-web is {found}, and {needed} is needed: run apt-get update, or use a newer release"
    ))
}

/// Returns the major and minor number of a version such as `1.95` or `1.96.0`.
fn version_numbers(version: &str) -> Vec<u32> {
    version.split('.').take(2).filter_map(|part| part.parse().ok()).collect()
}

/// Writes a script that stands in for a tool. Returns its path.
fn write_tool(folder: &Path, name: &str, script: &str) -> std::io::Result<std::path::PathBuf> {
    let path = folder.join(name);
    fs::write(&path, script)?;
    #[cfg(unix)]
    fs::set_permissions(&path, std::os::unix::fs::PermissionsExt::from_mode(0o755))?;
    Ok(path)
}

/// Downloads and unpacks the compiler.
fn unpack(folder: &Path) -> Result<(), String> {
    let debs = folder.join("debs");
    let failed = |e: std::io::Error| e.to_string();
    if folder.exists() {
        fs::remove_dir_all(folder).map_err(failed)?;
    }
    fs::create_dir_all(&debs).map_err(failed)?;
    // An image's package lists name old compilers; a user who may not update the lists uses them as they are.
    let lists = Command::new("apt-get").arg("update").stdout(Stdio::null()).stderr(Stdio::null()).status();
    if !lists.is_ok_and(|status| status.success()) {
        println!("mac-check: apt-get update failed; the lists of packages are used as they are");
    }
    let arguments: Vec<&str> = NEEDED.split(' ').chain(PACKAGES).collect();
    let needed = output("apt-cache", &arguments)?;
    let versioned = |name: &str| VERSIONED.iter().any(|prefix| name.to_lowercase().starts_with(prefix));
    let names: BTreeSet<&str> = needed.lines().filter(|name| versioned(name)).chain(PACKAGES).collect();
    let mut download = Command::new("apt-get");
    download.arg("download").args(&names).current_dir(&debs).stdout(Stdio::null()).stderr(Stdio::null());
    if !download.status().map_err(failed)?.success() {
        return Err(format!("apt-get download {names:?} failed"));
    }
    let staging = folder.join("staging");
    for entry in fs::read_dir(&debs).map_err(failed)? {
        let path = entry.map_err(failed)?.path();
        let arguments = ["-x".as_ref(), path.as_os_str(), staging.as_os_str()];
        let status = Command::new("dpkg").args::<[&OsStr; 3], _>(arguments).status();
        if !status.map_err(failed)?.success() {
            return Err(format!("dpkg -x {} failed", path.display()));
        }
    }
    fs::remove_dir_all(&debs).map_err(failed)?;
    // Only the library is needed of the sources: 69 MB of 434.
    for version in fs::read_dir(staging.join("usr/src")).map_err(failed)? {
        let version = version.map_err(failed)?.path();
        for part in ["compiler", "src"] {
            fs::remove_dir_all(version.join(part)).map_err(failed)?;
        }
    }
    fs::rename(&staging, folder.join("root")).map_err(failed)
}

/// Runs a program and returns its standard output.
fn output(program: &str, arguments: &[&str]) -> Result<String, String> {
    let output = Command::new(program).args(arguments).output().map_err(|e| format!("{program}: {e}"))?;
    if !output.status.success() {
        return Err(format!("{program} {} failed", arguments.join(" ")));
    }
    String::from_utf8(output.stdout).map_err(|e| e.to_string())
}

#[cfg(test)]
mod tests {
    use super::version_numbers;

    #[test]
    fn versions_compare_by_number() {
        assert!(version_numbers("1.100.2") >= version_numbers("1.95"));
        assert!(version_numbers("1.85.0") < version_numbers("1.95"));
        assert!(version_numbers("1.95.0") >= version_numbers("1.95"));
    }
}
