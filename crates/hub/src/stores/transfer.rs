//! Transfers of several files at a time, with one count of bytes.

use crate::progress::TransferProgress;
use crate::{Error, Result};
use std::io;
use std::path::{Path, PathBuf};
use std::sync::atomic::{AtomicU64, Ordering};

/// Count of the bytes of one run.
pub struct TransferCount<'a> {
    done: AtomicU64,
    total: AtomicU64,
    tell: &'a (dyn Fn(TransferProgress) + Sync),
}

impl<'a> TransferCount<'a> {
    /// Makes a count at 0 of `total` bytes.
    pub fn new(total: u64, tell: &'a (dyn Fn(TransferProgress) + Sync)) -> TransferCount<'a> {
        TransferCount { done: AtomicU64::new(0), total: AtomicU64::new(total), tell }
    }

    /// Counts moved bytes of a file; a failed try subtracts its bytes.
    pub fn moved(&self, file: &str, bytes: i64) {
        let done = self.done.fetch_add(bytes as u64, Ordering::Relaxed).wrapping_add(bytes as u64);
        (self.tell)(TransferProgress { file, done, total: self.total.load(Ordering::Relaxed) });
    }

    /// Counts bytes that need not be moved.
    pub fn spared(&self, file: &str, bytes: u64) {
        self.total.fetch_sub(bytes, Ordering::Relaxed);
        self.moved(file, 0);
    }
}

/// Returns the path of the hidden folder beside a bundle that notes how far a transfer is.
///
/// # Errors
/// The bundle has no name, or the path is a link.
pub fn beside(bundle: &Path, suffix: &str) -> Result<PathBuf> {
    let absolute = std::path::absolute(bundle).map_err(|e| Error::io(bundle, e))?;
    let (Some(parent), Some(name)) = (absolute.parent(), absolute.file_name()) else {
        return Err(Error::usage(format!("{}: is no name for a bundle", bundle.display())));
    };
    let at = parent.join(format!(".{}{suffix}", name.to_string_lossy()));
    if at.is_symlink() {
        let what = "a link, and a transfer would write through it; remove it";
        return Err(Error::io(at, io::Error::new(io::ErrorKind::InvalidInput, what)));
    }
    Ok(at)
}
