//! Push: turns files into objects, and writes a manifest when all are there.

use super::bundle_manifest::{BundleManifest, ManifestFile, ManifestPart};
use super::object::{Contents, ObjectStore};
use super::transfer::{TransferCount, beside};
use crate::parallel::for_each;
use crate::progress::TransferProgress;
use crate::safe_name::is_safe_name;
use crate::{Error, Result};
use anemoe_io::{OwnedDir, locked};
use serde::Serialize;
use sha2::{Digest, Sha256};
use std::collections::HashSet;
use std::path::{Path, PathBuf};
use std::sync::{Mutex, PoisonError};
use std::time::Instant;

/// Suffix of the folder beside a bundle that holds records of unfinished uploads.
const PUSH_SUFFIX: &str = ".anemoe-push";

/// Options of a push.
pub struct SendOptions {
    /// Files sent at the same time.
    pub jobs: usize,
    /// True if existing objects are read back, and sent again where they are damaged.
    pub verify: bool,
}

/// Result of a push.
#[derive(Clone, Debug, Default, Serialize)]
pub struct SendReport {
    /// Files of the bundle.
    pub files: usize,
    /// Bytes of the bundle.
    pub bytes: u64,
    /// Number of files that were sent.
    pub files_sent: usize,
    /// Bytes that were sent.
    pub bytes_sent: u64,
    /// Bytes that were there already, or that several files share.
    pub bytes_there: u64,
    /// Duration in seconds.
    pub seconds: f64,
}

impl SendReport {
    /// Counts a file. `sent` is the number of bytes sent, or `None` where the object existed.
    fn add(&mut self, file: &ManifestFile, sent: Option<u64>) {
        self.files += 1;
        self.bytes += file.bytes;
        self.files_sent += usize::from(sent.is_some());
        self.bytes_sent += sent.unwrap_or(0);
        self.bytes_there += file.bytes - sent.unwrap_or(0).min(file.bytes);
    }

    /// Adds the report of another push.
    pub fn merge(&mut self, other: &SendReport) {
        self.files += other.files;
        self.bytes += other.bytes;
        self.files_sent += other.files_sent;
        self.bytes_sent += other.bytes_sent;
        self.bytes_there += other.bytes_there;
        self.seconds += other.seconds;
    }
}

/// Sends the files of a folder that the store lacks. Returns their manifest entries. `files` are relative paths with
/// slashes.
///
/// # Errors
/// A file cannot be read, or the store refuses one. Sent objects stay, and the next push continues from there.
pub fn send_files(
    store: &dyn ObjectStore,
    folder: &Path,
    files: &[String],
    options: &SendOptions,
    tell: &(dyn Fn(TransferProgress) + Sync),
) -> Result<(Vec<ManifestFile>, SendReport)> {
    let started = Instant::now();
    let records = beside(folder, PUSH_SUFFIX)?;
    let folder = OwnedDir::new(folder);
    let mut sized = Vec::new();
    for file in files {
        let path = folder.expect(file, false)?;
        let bytes = path.metadata().map_err(|e| Error::io(&path, e))?.len();
        sized.push((file.as_str(), path, bytes));
    }
    // Small files go first, so that a refusal comes before gigabytes are sent.
    sized.sort_by_key(|(_, _, bytes)| *bytes);
    let count = TransferCount::new(sized.iter().map(|(_, _, bytes)| bytes).sum(), tell);
    let claimed: Mutex<HashSet<String>> = Mutex::default();
    let done: Mutex<(Vec<ManifestFile>, SendReport)> = Mutex::default();
    let send = |(file, path, bytes): &(&str, PathBuf, u64)| {
        let contents = Contents::of(path).map_err(|e| Error::io(path, e))?;
        if contents.bytes != *bytes {
            return Err(Error::invalid(path, "file: it changed while it was sent"));
        }
        let is_first = locked(&claimed).insert(contents.sha256.clone());
        let key = contents.key();
        let sent = if !is_first || is_there(store, &key, &contents, options.verify)? {
            count.spared(file, *bytes);
            None
        } else {
            let record = records.join(anemoe_io::hex(Sha256::digest(store.place(&key))));
            Some(store.send(&key, path, &contents, &record, &|n| count.moved(file, n))?)
        };
        let entry = ManifestFile { path: file.to_string(), bytes: contents.bytes, sha256: contents.sha256 };
        let mut done = locked(&done);
        done.1.add(&entry, sent);
        done.0.push(entry);
        Ok(())
    };
    for_each(&sized, options.jobs, &send)?;
    let (entries, report) = done.into_inner().unwrap_or_else(PoisonError::into_inner);
    Ok((entries, SendReport { seconds: started.elapsed().as_secs_f64(), ..report }))
}

/// Writes the manifest of a bundle or of a part of one, whose files are in the store.
///
/// # Errors
/// The name or an entry is not allowed in a store, or the store refuses the manifest.
pub fn write_manifest(
    store: &dyn ObjectStore,
    name: &str,
    part: Option<ManifestPart>,
    files: Vec<ManifestFile>,
) -> Result<()> {
    check_bundle_name(name)?;
    let key = BundleManifest::key(name, part.as_ref().map(|p| (p.index, p.of)));
    let text = BundleManifest::new(part, files).to_text();
    BundleManifest::parse(&text).map_err(|what| Error::invalid(store.place(&key), what))?;
    store.write(&key, &text)
}

/// Checks that a name is allowed for a bundle in a store.
///
/// # Errors
/// The name cannot be part of a key.
pub fn check_bundle_name(name: &str) -> Result<()> {
    if is_safe_name(name) && !name.contains('/') {
        return Ok(());
    }
    let what = "letters, digits and `._-+=,()`, the first one neither `.` nor `-`; --name gives another one";
    Err(Error::usage(format!("`{name}` is no name for a bundle in a store, which has {what}")))
}

/// Tells whether an object exists with the right contents, as far as the store tells or, with `verify`, by reading it back.
fn is_there(store: &dyn ObjectStore, key: &str, contents: &Contents, verify: bool) -> Result<bool> {
    let Some((bytes, sha256)) = store.find(key)? else { return Ok(false) };
    if bytes != contents.bytes || sha256.is_some_and(|hash| hash != contents.sha256) {
        return Ok(false);
    }
    Ok(!verify || store.holds(key, contents)?)
}
