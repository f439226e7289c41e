//! Folders that live as long as a gate, and go with the next build where a killed one left them.

use crate::{Error, Result};
use std::fs::{self, File};
use std::path::Path;

/// Names of such folders begin with this.
const PREFIX: &str = ".tmp-scratch-";
/// Held while a folder is in use.
const LOCK: &str = "lock";

/// A folder that is removed when it is dropped.
pub struct Scratch {
    folder: tempfile::TempDir,
    _lock: File,
}

impl Scratch {
    /// A new one in `parent`, which must exist. Others there that nobody uses any more are removed.
    ///
    /// # Errors
    /// It cannot be made.
    pub fn new(parent: &Path) -> Result<Scratch> {
        for entry in fs::read_dir(parent).map_err(|e| Error::io(parent, e))?.flatten() {
            let ours = entry.file_name().to_string_lossy().starts_with(PREFIX);
            // One that is being made has no lock yet, and is left alone.
            let left = || File::open(entry.path().join(LOCK)).is_ok_and(|lock| lock.try_lock().is_ok());
            if ours && left() {
                let _ = fs::remove_dir_all(entry.path());
            }
        }
        let made = tempfile::Builder::new().prefix(PREFIX).tempdir_in(parent);
        let folder = made.map_err(|e| Error::io(parent, e))?;
        let path = folder.path().join(LOCK);
        let lock = File::create(&path).map_err(|e| Error::io(&path, e))?;
        lock.lock().map_err(|e| Error::io(&path, e))?;
        Ok(Scratch { folder, _lock: lock })
    }

    /// Where it is.
    pub fn path(&self) -> &Path {
        self.folder.path()
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn what_a_killed_build_left_is_removed_and_what_is_in_use_is_not() {
        let dir = tempfile::tempdir().unwrap();
        let used = Scratch::new(dir.path()).unwrap();
        let left = dir.path().join(format!("{PREFIX}left"));
        fs::create_dir(&left).unwrap();
        fs::write(left.join(LOCK), b"").unwrap();
        fs::write(dir.path().join("other"), b"").unwrap();
        let own = Scratch::new(dir.path()).unwrap();
        assert!(used.path().is_dir() && own.path().is_dir() && !left.exists());
        assert!(dir.path().join("other").exists());
        let gone = own.path().to_path_buf();
        drop(own);
        assert!(!gone.exists());
        assert!(Scratch::new(&dir.path().join("none")).is_err());
    }
}
