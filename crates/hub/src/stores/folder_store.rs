//! A store in a folder, for instance on a disk that many machines share.

use super::object::{Contents, ObjectStore, copy_hashed};
use crate::{Error, Result};
use anemoe_io::{OwnedDir, Temporary, open_input, open_regular, read_input, sync_dir};
use std::cell::Cell;
use std::fs::{self, File};
use std::io;
use std::path::{Path, PathBuf};

/// A store in a folder.
pub struct FolderStore {
    folder: OwnedDir,
}

impl FolderStore {
    /// Makes a store in a folder, which need not exist yet.
    pub fn new(folder: &Path) -> FolderStore {
        FolderStore { folder: OwnedDir::new(folder) }
    }

    /// Returns the paths of an object and of its folder, and makes the folder.
    fn made(&self, key: &str) -> Result<(PathBuf, PathBuf)> {
        let path = self.folder.path(key)?;
        let parent = path.parent().unwrap_or(self.folder.root()).to_path_buf();
        fs::create_dir_all(&parent).map_err(|e| Error::io(&parent, e))?;
        Ok((path, parent))
    }

    /// Opens an object's file; `None` where the object does not exist.
    fn open(&self, key: &str) -> Result<Option<(File, PathBuf)>> {
        let path = self.folder.path(key)?;
        match open_input(&path, u64::MAX) {
            Ok(file) => Ok(Some((file, path))),
            Err(e) if e.kind() == io::ErrorKind::NotFound => Ok(None),
            Err(e) => Err(Error::io(path, e)),
        }
    }
}

impl ObjectStore for FolderStore {
    fn prepare(&self) -> Result<()> {
        let root = self.folder.root();
        if root.exists() && !root.is_dir() {
            return Err(Error::usage(format!("{}: exists and is not a folder", root.display())));
        }
        self.folder.create_dir("objects")?;
        Ok(())
    }

    fn find(&self, key: &str) -> Result<Option<(u64, Option<String>)>> {
        let Some((file, path)) = self.open(key)? else { return Ok(None) };
        let found = file.metadata().map_err(|e| Error::io(path, e))?;
        Ok(Some((found.len(), None)))
    }

    fn holds(&self, key: &str, contents: &Contents) -> Result<bool> {
        let Some((mut file, path)) = self.open(key)? else { return Ok(false) };
        let found = Contents::of_reader(&mut file).map_err(|e| Error::io(path, e))?;
        Ok(found == *contents)
    }

    fn write(&self, key: &str, bytes: &[u8]) -> Result<()> {
        self.made(key)?;
        self.folder.write(key, bytes)
    }

    fn send(
        &self,
        key: &str,
        file: &Path,
        contents: &Contents,
        _: &Path,
        moved: &dyn Fn(i64),
    ) -> Result<u64> {
        let mut from = open_input(file, u64::MAX).map_err(|e| Error::io(file, e))?;
        let (path, parent) = self.made(key)?;
        let went = Cell::new(0);
        let counted = |n: i64| {
            went.set(went.get() + n);
            moved(n);
        };
        let (temporary, mut to) = Temporary::file(&parent).map_err(|e| Error::io(&parent, e))?;
        let sent = copy_hashed(&mut from, &mut to, &counted)
            .and_then(|found| to.sync_all().map(|()| found))
            .map_err(|e| Error::io(&path, e))
            .and_then(|found| match found == *contents {
                true => Ok(()),
                false => Err(Error::invalid(file, "file: it changed while it was sent")),
            });
        if sent.is_err() {
            moved(-went.get());
        }
        sent?;
        temporary.persist(&path).and_then(|()| sync_dir(&parent)).map_err(|e| Error::io(&path, e))?;
        Ok(contents.bytes)
    }

    fn read(&self, key: &str, limit: u64) -> Result<Option<Vec<u8>>> {
        let path = self.folder.path(key)?;
        match read_input(&path, limit) {
            Ok(bytes) => Ok(Some(bytes)),
            Err(e) if e.kind() == io::ErrorKind::NotFound => Ok(None),
            Err(e) => Err(Error::io(path, e)),
        }
    }

    fn bring(
        &self,
        key: &str,
        contents: &Contents,
        partial: &Path,
        target: &Path,
        moved: &dyn Fn(i64),
    ) -> Result<u64> {
        let Some((mut from, path)) = self.open(key)? else {
            let what = "the manifest names it, and it is not there; push the bundle again";
            return Err(Error::io(self.place(key), io::Error::new(io::ErrorKind::NotFound, what)));
        };
        let length = from.metadata().map_err(|e| Error::io(&path, e))?.len();
        if length != contents.bytes {
            let what = format!(
                "object: it has {length} bytes where the manifest says {}; push the bundle again",
                contents.bytes
            );
            return Err(Error::invalid(path, what));
        }
        // A copy on one machine starts anew: hashing the existing part would take as long.
        let options = &mut File::options();
        let mut to = open_regular(partial, options.write(true).create(true).truncate(true))
            .map_err(|e| Error::io(partial, e))?;
        let found = copy_hashed(&mut from, &mut to, moved)
            .and_then(|found| to.sync_all().map(|()| found))
            .map_err(|e| Error::io(partial, e))?;
        if found != *contents {
            let _ = fs::remove_file(partial);
            let what = format!("object: its hash is {}; push the bundle again with --verify", found.sha256);
            return Err(Error::invalid(path, what));
        }
        fs::rename(partial, target).map_err(|e| Error::io(target, e))?;
        Ok(contents.bytes)
    }

    fn list(&self, folder: &str) -> Result<Vec<String>> {
        let mut names = self.folder.names(folder)?;
        names.retain(|name| !name.starts_with('.'));
        Ok(names)
    }

    fn place(&self, key: &str) -> String {
        self.folder.root().join(key).display().to_string()
    }
}
