//! Names of ours in a bundle, and the things allowed under these names. Things under other names are others', and
//! left alone.

use crate::Result;
use crate::checkpoint::SIDE_FILES;
use anemoe_bundle::journal::JOURNAL_FILE;
use anemoe_bundle::{CHAIN_FILE, DRAFTER_DIR, SHARDS_DIR};
use anemoe_io::{OwnedDir, TEMPORARY};
use anemoe_mlpackage::package::foreign_entry;
use std::io::{Error, ErrorKind};
use std::path::Path;

/// Folder of an unfinished build. With the plan in it, it proves that the folder around it is one of ours.
pub const WORK_DIR: &str = ".anemoe-build";
/// File of the plan in [`WORK_DIR`].
pub const PLAN_FILE: &str = "plan.json";
/// Lock of an unfinished build.
pub const LOCK: &str = "lock";
/// File of the host's embedding.
pub const EMBEDDING_FILE: &str = "embed.bin";
/// File of the host's vectors.
pub const VECTORS_FILE: &str = "vectors.npz";
/// File that says where the checkpoint is.
pub const SOURCE_FILE: &str = "source";
/// Prefix of the records with the results of parts' gates.
pub const GATES_PREFIX: &str = "gates.";
/// Prefix of the folders in which searches for kinds keep what they measured, beside what is built.
pub const SEARCH_PREFIX: &str = ".anemoe-search-";
/// Record of the files beside the shards, in the folder of an unfinished build.
pub const HOST_RECORD: &str = "host.json";

/// Lists the files beside the shards that a run may read.
fn files() -> impl Iterator<Item = &'static str> {
    SIDE_FILES.into_iter().chain([CHAIN_FILE, EMBEDDING_FILE, VECTORS_FILE])
}

/// Lists the names that bundles use for their files and folders.
pub fn bundle_names() -> impl Iterator<Item = &'static str> {
    files().chain([JOURNAL_FILE, SHARDS_DIR, DRAFTER_DIR, WORK_DIR])
}

/// Tells whether a file of this name, in the folder of an unfinished build, is one that builds write; `shards` are
/// the names of its shards.
pub fn is_record(name: &str, shards: &[String]) -> bool {
    [PLAN_FILE, HOST_RECORD, SOURCE_FILE, LOCK].contains(&name)
        || name.starts_with(&format!("{LOCK}."))
        || name.starts_with(GATES_PREFIX)
        || name.starts_with(crate::compressed::PREFIX)
        || name.starts_with(TEMPORARY)
        || name.strip_suffix(".json").is_some_and(|shard| shards.iter().any(|s| s == shard))
}

/// Refuses links, pipes and all else that no build put under a name of ours in a bundle. `packages` are paths in the
/// bundle.
///
/// # Errors
/// Something else lies under a name of ours; the error names it.
pub fn check<'a>(folder: &OwnedDir, packages: impl IntoIterator<Item = &'a str>) -> Result<()> {
    for name in files() {
        folder.expect(name, false)?;
    }
    for name in [SHARDS_DIR, DRAFTER_DIR, WORK_DIR] {
        folder.expect(name, true)?;
    }
    packages.into_iter().try_for_each(|package| check_package(folder, package))
}

/// Checks the records of an unfinished build, as [`check`] checks a bundle.
///
/// # Errors
/// Fails like [`check`].
pub fn check_records(folder: &OwnedDir, shards: &[String]) -> Result<()> {
    for name in folder.names(WORK_DIR)?.iter().filter(|n| !n.starts_with(TEMPORARY) && is_record(n, shards)) {
        folder.expect(Path::new(WORK_DIR).join(name), false)?;
    }
    Ok(())
}

/// Refuses a package that holds anything that builds do not write.
///
/// # Errors
/// Fails like [`check`].
pub fn check_package(folder: &OwnedDir, package: &str) -> Result<()> {
    let path = folder.expect(package, true)?;
    let foreign = match foreign_entry(&path) {
        Ok(None) => return Ok(()),
        Ok(Some(foreign)) => foreign,
        Err(e) if e.kind() == ErrorKind::NotFound => return Ok(()),
        Err(source) => return Err(crate::Error::io(path, source)),
    };
    let inside = foreign.strip_prefix(folder.root()).unwrap_or(&foreign);
    folder.expect(inside, foreign.is_dir())?;
    let what = "lies in a package and is no part of it; move it away";
    Err(crate::Error::io(foreign, Error::new(ErrorKind::InvalidInput, what)))
}
