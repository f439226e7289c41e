//! Temporary files and folders. They are removed at the end and after Ctrl-C; the next run removes those of a killed process.

use crate::locked::locked;
use crate::open_input;
use std::collections::BTreeSet;
use std::fs::{self, File};
use std::io;
use std::path::{Path, PathBuf};
use std::sync::{Mutex, MutexGuard};
use std::time::Duration;

/// Prefix of the names of temporary files and folders. No other program uses it, so names with it may be removed.
pub const TEMPORARY: &str = ".anemoe-tmp-";
/// Prefixes of the names of scratch folders, before and after they are locked.
const MAKING: &str = ".anemoe-tmp-making-";
const LOCKED: &str = ".anemoe-tmp-scratch-";
/// File in a scratch folder that is locked while the folder is in use.
const LOCK: &str = "lock";
/// Most attempts to remove a folder into which another thread still writes, and the pause between two attempts.
const REMOVE_TRIES: usize = 20;
const REMOVE_PAUSE: Duration = Duration::from_millis(10);

/// Temporary files and folders of this process, which the handler of an interruption removes.
static LIVE: Mutex<BTreeSet<PathBuf>> = Mutex::new(BTreeSet::new());

fn live() -> MutexGuard<'static, BTreeSet<PathBuf>> {
    // The set is consistent after every call.
    locked(&LIVE)
}

/// Removes every temporary file and folder of this process. Only for the handler of an interruption, which then ends
/// the process: threads that still use one get errors.
pub fn remove_all_temporary() {
    // Keeps the lock until the process ends, so that nothing new is registered.
    let paths = std::mem::ManuallyDrop::new(live());
    for path in paths.iter() {
        remove(path);
    }
}

/// Removes a file or folder; tries again where another thread adds something meanwhile.
fn remove(path: &Path) {
    for _ in 0..REMOVE_TRIES {
        let removed = match path.symlink_metadata() {
            Ok(found) if found.is_dir() => fs::remove_dir_all(path),
            Ok(_) => fs::remove_file(path),
            Err(_) => return,
        };
        match removed {
            Err(e) if e.kind() == io::ErrorKind::DirectoryNotEmpty => std::thread::sleep(REMOVE_PAUSE),
            _ => return,
        }
    }
}

/// A file or folder that is removed when the value is dropped, or when the process is interrupted.
#[derive(Debug)]
pub struct Temporary {
    path: PathBuf,
}

impl Temporary {
    /// Creates a folder with a new name in `parent`, readable by its owner only. The name ends with `suffix`.
    ///
    /// # Errors
    /// The system refuses to create it.
    pub fn dir(parent: &Path, suffix: &str) -> io::Result<Temporary> {
        Temporary::made(parent, TEMPORARY, suffix)
    }

    fn made(parent: &Path, prefix: &str, suffix: &str) -> io::Result<Temporary> {
        // Locked while the folder is made: a folder that the handler of an interruption does not know would stay.
        let mut live = live();
        let made = tempfile::Builder::new().prefix(prefix).suffix(suffix).tempdir_in(parent)?;
        let path = made.keep();
        live.insert(path.clone());
        Ok(Temporary { path })
    }

    /// Creates a file with a new name in `parent`. The process's umask decides who may read it.
    ///
    /// # Errors
    /// The system refuses to create it.
    pub fn file(parent: &Path) -> io::Result<(Temporary, File)> {
        let mut live = live();
        let mut builder = tempfile::Builder::new();
        builder.prefix(TEMPORARY);
        #[cfg(unix)]
        builder.permissions(std::os::unix::fs::PermissionsExt::from_mode(0o666));
        let (file, path) = builder.tempfile_in(parent)?.keep().map_err(|e| e.error)?;
        live.insert(path.clone());
        Ok((Temporary { path }, file))
    }

    /// Returns the path of the file or folder.
    pub fn path(&self) -> &Path {
        &self.path
    }

    /// Renames the file or folder to its final name, where it stays. Replaces a file of that name.
    ///
    /// # Errors
    /// The system refuses the rename; then the temporary file is removed.
    pub fn persist(self, path: &Path) -> io::Result<()> {
        let mut live = live();
        fs::rename(&self.path, path)?;
        live.remove(&self.path);
        drop(live);
        std::mem::forget(self);
        Ok(())
    }
}

impl Drop for Temporary {
    fn drop(&mut self) {
        remove(&self.path);
        live().remove(&self.path);
    }
}

/// A folder for intermediate results. It is locked while in use, so that a later run recognizes folders of killed processes.
pub struct Scratch {
    folder: Temporary,
    _lock: File,
}

impl Scratch {
    /// Creates a folder in `parent`, which must exist. Removes scratch folders there that no process uses any more.
    ///
    /// # Errors
    /// The system refuses to create it.
    pub fn new(parent: &Path) -> io::Result<Scratch> {
        for entry in fs::read_dir(parent)?.flatten() {
            let ours = entry.file_name().to_string_lossy().starts_with(LOCKED)
                && entry.file_type().is_ok_and(|t| t.is_dir());
            let left = || open_input(&entry.path().join(LOCK), 0).is_ok_and(|lock| lock.try_lock().is_ok());
            if ours && left() {
                let _ = fs::remove_dir_all(entry.path());
            }
        }
        let made = Temporary::made(parent, MAKING, "")?;
        let lock = File::create(made.path().join(LOCK))?;
        lock.lock()?;
        // Other runs recognize the folder from now on, and it is locked.
        let name = made.path().file_name().unwrap_or_default().to_string_lossy().replacen(MAKING, LOCKED, 1);
        let path = parent.join(name);
        let folder = Temporary { path: path.clone() };
        live().insert(path.clone());
        made.persist(&path)?;
        Ok(Scratch { folder, _lock: lock })
    }

    /// Returns the path of the folder.
    pub fn path(&self) -> &Path {
        self.folder.path()
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn what_a_killed_process_left_is_removed_and_what_is_in_use_is_not() {
        let dir = tempfile::tempdir().unwrap();
        let used = Scratch::new(dir.path()).unwrap();
        let left = dir.path().join(format!("{LOCKED}left"));
        fs::create_dir(&left).unwrap();
        fs::write(left.join(LOCK), b"").unwrap();
        fs::write(dir.path().join("other"), b"").unwrap();
        let own = Scratch::new(dir.path()).unwrap();
        assert!(used.path().is_dir() && own.path().is_dir() && !left.exists());
        assert!(dir.path().join("other").exists());
        let gone = own.path().to_path_buf();
        drop(own);
        assert!(!gone.exists() && !live().contains(&gone));
        assert!(Scratch::new(&dir.path().join("none")).is_err());
    }

    #[test]
    fn a_temporary_file_stays_under_its_final_name_only() {
        let dir = tempfile::tempdir().unwrap();
        let (kept, _) = Temporary::file(dir.path()).unwrap();
        let (dropped, _) = Temporary::file(dir.path()).unwrap();
        assert!(live().contains(kept.path()));
        kept.persist(&dir.path().join("f")).unwrap();
        drop(dropped);
        let names: Vec<_> = fs::read_dir(dir.path()).unwrap().map(|e| e.unwrap().file_name()).collect();
        assert_eq!(names, ["f"]);
    }

    #[cfg(unix)]
    #[test]
    fn a_link_of_such_a_name_is_left_alone() {
        let dir = tempfile::tempdir().unwrap();
        let other = dir.path().join("other");
        fs::create_dir(&other).unwrap();
        fs::write(other.join(LOCK), b"").unwrap();
        let link = dir.path().join(format!("{LOCKED}link"));
        std::os::unix::fs::symlink(&other, &link).unwrap();
        drop(Scratch::new(dir.path()).unwrap());
        assert!(link.is_symlink() && other.join(LOCK).is_file());
    }
}
