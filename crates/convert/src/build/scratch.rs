//! Folders that live as long as a gate, and go with the next build where a killed one left them.

use crate::{Error, Result};
use std::fs::{self, File};
use std::path::{Path, PathBuf};

/// Names of such folders begin with this, and before they are locked with the other.
const PREFIX: &str = ".tmp-scratch-";
const MAKING: &str = ".tmp-making-";
/// Held while a folder is in use.
const LOCK: &str = "lock";

/// A folder that is removed when it is dropped.
pub struct Scratch {
    path: PathBuf,
    _lock: File,
}

impl Drop for Scratch {
    fn drop(&mut self) {
        let _ = fs::remove_dir_all(&self.path);
    }
}

impl Scratch {
    /// A new one in `parent`, which must exist. Others there that nobody uses any more are removed.
    ///
    /// # Errors
    /// It cannot be made.
    pub fn new(parent: &Path) -> Result<Scratch> {
        for entry in fs::read_dir(parent).map_err(|e| Error::io(parent, e))?.flatten() {
            let ours = entry.file_name().to_string_lossy().starts_with(PREFIX);
            let left = || File::open(entry.path().join(LOCK)).is_ok_and(|lock| lock.try_lock().is_ok());
            if ours && left() {
                let _ = fs::remove_dir_all(entry.path());
            }
        }
        let made = tempfile::Builder::new().prefix(MAKING).tempdir_in(parent);
        let folder = made.map_err(|e| Error::io(parent, e))?;
        let file = folder.path().join(LOCK);
        let lock = File::create(&file).map_err(|e| Error::io(&file, e))?;
        lock.lock().map_err(|e| Error::io(&file, e))?;
        // Under a name that others look at only now that it is locked.
        let name =
            folder.path().file_name().unwrap_or_default().to_string_lossy().replacen(MAKING, PREFIX, 1);
        let path = parent.join(name);
        fs::rename(folder.path(), &path).map_err(|e| Error::io(&path, e))?;
        let _ = folder.keep();
        Ok(Scratch { path, _lock: lock })
    }

    /// Where it is.
    pub fn path(&self) -> &Path {
        &self.path
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
