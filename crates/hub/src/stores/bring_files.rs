//! Pull: turns objects into files, in a folder that gets its final name when all files are there.
//!
//! ```text
//! PARENT/.NAME.anemoe-pull/lock          held while a pull runs
//!                         /partial/HASH  contents as they come; a later pull goes on here
//!                         /files/...     the bundle as far as it is there
//! ```

use super::bundle_manifest::{BundleManifest, ManifestFile};
use super::object::{Contents, ObjectStore};
use super::transfer::{TransferCount, beside};
use crate::parallel::for_each;
use crate::progress::TransferProgress;
use crate::{Error, Result};
use anemoe_io::{OwnedDir, open_input, open_regular, sync_dir};
use serde::Serialize;
use std::collections::BTreeMap;
use std::fs::{self, File, TryLockError};
use std::io;
use std::path::{Path, PathBuf};
use std::sync::atomic::{AtomicU64, Ordering};
use std::time::Instant;

/// Suffix of the folder that a pull fills.
const PULL_SUFFIX: &str = ".anemoe-pull";
/// Folder in it for the bundle.
const FILES: &str = "files";
/// Folder in it for incomplete contents.
const PARTIAL: &str = "partial";
/// Lock file in it.
const LOCK: &str = "lock";

/// Result of a pull.
#[derive(Clone, Debug, Default, Serialize)]
pub struct BringReport {
    /// Files of the bundle.
    pub files: usize,
    /// Bytes of the bundle.
    pub bytes: u64,
    /// Number of files that were fetched.
    pub files_fetched: usize,
    /// Bytes that were fetched.
    pub bytes_fetched: u64,
    /// Bytes that were there already, or that several files share.
    pub bytes_there: u64,
    /// Duration in seconds.
    pub seconds: f64,
}

/// The folder beside a bundle that holds incomplete files of a pull.
struct PullDir {
    folder: OwnedDir,
    /// True if nothing in it is needed any more.
    is_done: bool,
    _lock: File,
}

impl PullDir {
    /// Opens and locks the folder for the bundle `target`.
    fn open(target: &Path) -> Result<PullDir> {
        let at = beside(target, PULL_SUFFIX)?;
        fs::create_dir_all(&at).map_err(|e| Error::io(&at, e))?;
        let folder = OwnedDir::new(&at);
        let lock = folder.lock_file(LOCK)?;
        match lock.try_lock() {
            Ok(()) => {}
            Err(TryLockError::WouldBlock) => {
                return Err(Error::usage(format!("{}: another pull is filling it", target.display())));
            }
            Err(TryLockError::Error(e)) => return Err(Error::io(at.join(LOCK), e)),
        }
        folder.create_dir(PARTIAL)?;
        Ok(PullDir { folder, is_done: false, _lock: lock })
    }
}

impl Drop for PullDir {
    /// Removes the folder unless it has a file that a later pull needs.
    fn drop(&mut self) {
        fn has_file(folder: &Path) -> bool {
            let entries = fs::read_dir(folder).into_iter().flatten().flatten();
            entries.into_iter().any(|e| match e.file_type() {
                Ok(kind) if kind.is_dir() => has_file(&e.path()),
                _ => true,
            })
        }
        let root = self.folder.root();
        if self.is_done || ![FILES, PARTIAL].iter().any(|inside| has_file(&root.join(inside))) {
            let _ = fs::remove_dir_all(root);
        }
    }
}

/// Fetches a bundle to the new folder `target`, which appears once all files are there and `accept` has passed them. An
/// interrupted pull continues. If the folder is the same bundle already, apart from files named in `own`, nothing is fetched.
///
/// # Errors
/// The folder is something else, the disk has too little room, an object is missing or differs from the manifest, or
/// `accept` refuses the bundle.
pub fn bring_bundle(
    store: &dyn ObjectStore,
    manifest: &BundleManifest,
    target: &Path,
    own: &[&str],
    jobs: usize,
    accept: &dyn Fn(&Path) -> Result<()>,
    tell: &(dyn Fn(TransferProgress) + Sync),
) -> Result<BringReport> {
    let started = Instant::now();
    let there = target.symlink_metadata().is_ok();
    let is_empty = || fs::read_dir(target).is_ok_and(|mut entries| entries.next().is_none());
    if there && !is_empty() {
        let folder = OwnedDir::new(target);
        let changed = manifest.files.iter().find(|f| !own.contains(&f.path.as_str()) && !is_file(&folder, f));
        if let Some(changed) = changed {
            let what = format!(
                "{}: exists, and is not the bundle of the store ({} differs); remove it or choose another name",
                target.display(),
                changed.path
            );
            return Err(Error::usage(what));
        }
        accept(target)?;
        let bytes = manifest.bytes();
        let seconds = started.elapsed().as_secs_f64();
        return Ok(BringReport {
            files: manifest.files.len(),
            bytes,
            bytes_there: bytes,
            seconds,
            ..BringReport::default()
        });
    }
    let mut pull = PullDir::open(target)?;
    let files = OwnedDir::new(&pull.folder.create_dir(FILES)?);
    let report = bring_missing(store, &manifest.files, &files, &pull, jobs, tell)?;
    remove_others(&files, manifest)?;
    pull.is_done = true;
    accept(files.root())?;
    pull.is_done = false;
    if there {
        fs::remove_dir(target).map_err(|e| {
            let what = format!("{e}: a pull gives a new folder this name; name a folder inside it");
            Error::io(target, io::Error::new(e.kind(), what))
        })?;
    }
    fs::rename(files.root(), target).map_err(|e| Error::io(target, e))?;
    let parent = pull.folder.root().parent().unwrap_or(Path::new("."));
    sync_dir(parent).map_err(|e| Error::io(parent, e))?;
    pull.is_done = true;
    Ok(BringReport { seconds: started.elapsed().as_secs_f64(), ..report })
}

/// Fetches files of a manifest into the folder `target` where they are missing or differ. Other files stay.
///
/// # Errors
/// Fails like [`bring_bundle`]; complete files stay.
pub fn bring_files(
    store: &dyn ObjectStore,
    files: &[ManifestFile],
    target: &Path,
    jobs: usize,
    tell: &(dyn Fn(TransferProgress) + Sync),
) -> Result<BringReport> {
    let started = Instant::now();
    let mut pull = PullDir::open(target)?;
    let report = bring_missing(store, files, &OwnedDir::new(target), &pull, jobs, tell)?;
    pull.is_done = true;
    Ok(BringReport { seconds: started.elapsed().as_secs_f64(), ..report })
}

/// Tells whether a folder has a file with the manifest's contents.
fn is_file(folder: &OwnedDir, file: &ManifestFile) -> bool {
    let path = folder.expect(&file.path, false).ok();
    let path = path.filter(|path| path.metadata().is_ok_and(|m| m.len() == file.bytes));
    path.is_some_and(|path| Contents::of(&path).is_ok_and(|found| found == file.contents()))
}

fn bring_missing(
    store: &dyn ObjectStore,
    files: &[ManifestFile],
    into: &OwnedDir,
    pull: &PullDir,
    jobs: usize,
    tell: &(dyn Fn(TransferProgress) + Sync),
) -> Result<BringReport> {
    // Equal contents are fetched once.
    let mut wanted: BTreeMap<Contents, Vec<&ManifestFile>> = BTreeMap::new();
    let mut report = BringReport { files: files.len(), ..BringReport::default() };
    for file in files {
        report.bytes += file.bytes;
        if !is_file(into, file) {
            wanted.entry(file.contents()).or_default().push(file);
        }
    }
    let wanted: Vec<(Contents, Vec<&ManifestFile>)> = wanted.into_iter().collect();
    check_room(pull, &wanted)?;
    let count = TransferCount::new(wanted.iter().map(|(contents, _)| contents.bytes).sum(), tell);
    let fetched = AtomicU64::new(0);
    for_each(&wanted, jobs, &|(contents, files)| {
        let Some((first, others)) = files.split_first() else { return Ok(()) };
        let path = made(into, &first.path)?;
        let partial = pull.folder.path(Path::new(PARTIAL).join(&contents.sha256))?;
        let came =
            store.bring(&contents.key(), contents, &partial, &path, &|n| count.moved(&first.path, n))?;
        fetched.fetch_add(came, Ordering::Relaxed);
        for other in others {
            let path = made(into, &other.path)?;
            let copy = |partial: &Path| {
                let mut from = open_input(&into.root().join(&first.path), u64::MAX)?;
                let options = &mut File::options();
                let mut to = open_regular(partial, options.write(true).create(true).truncate(true))?;
                io::copy(&mut from, &mut to)?;
                to.sync_all()?;
                fs::rename(partial, &path)
            };
            copy(&partial).map_err(|e| Error::io(&path, e))?;
        }
        Ok(())
    })?;
    report.files_fetched = wanted.len();
    report.bytes_fetched = fetched.into_inner();
    report.bytes_there = report.bytes - report.bytes_fetched;
    Ok(report)
}

/// Returns the path of a file, and makes its folder.
fn made(into: &OwnedDir, file: &str) -> Result<PathBuf> {
    let path = into.expect(file, false)?;
    if let Some((folder, _)) = file.rsplit_once('/') {
        into.create_dir(folder)?;
    } else {
        into.create_dir("")?;
    }
    Ok(path)
}

/// Checks that the disk has room for the wanted contents, minus bytes that an earlier pull left.
fn check_room(pull: &PullDir, wanted: &[(Contents, Vec<&ManifestFile>)]) -> Result<()> {
    let root = pull.folder.root();
    let begun = |contents: &Contents| {
        let partial = root.join(PARTIAL).join(&contents.sha256);
        partial.metadata().map_or(0, |m| m.len()).min(contents.bytes)
    };
    let needed = wanted.iter().fold(0u64, |sum, (contents, files)| {
        let all = contents.bytes.saturating_mul(files.len() as u64);
        sum.saturating_add(all - begun(contents).min(all))
    });
    let free = fs4::available_space(root).map_err(|e| Error::io(root, e))?;
    if needed > free {
        let parent = root.parent().unwrap_or(root);
        return Err(Error::room(
            parent,
            format!("the bundle needs {needed} bytes more, and its disk has {free} left"),
        ));
    }
    Ok(())
}

/// Removes files of an earlier pull that are not in the current manifest.
fn remove_others(files: &OwnedDir, manifest: &BundleManifest) -> Result<()> {
    fn walk(files: &OwnedDir, inside: &str, keep: &dyn Fn(&str) -> bool) -> Result<()> {
        for name in files.names(inside)? {
            let path = if inside.is_empty() { name } else { format!("{inside}/{name}") };
            match files.path(&path)?.is_dir() {
                true => walk(files, &path, keep)?,
                false if keep(&path) => {}
                false => files.remove(&path)?,
            }
        }
        // Succeeds only for an empty folder.
        let _ = fs::remove_dir(files.path(inside)?);
        Ok(())
    }
    let keep = |path: &str| manifest.files.binary_search_by(|f| f.path.as_str().cmp(path)).is_ok();
    walk(files, "", &keep)
}
