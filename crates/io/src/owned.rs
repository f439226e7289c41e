//! A folder that anemoe owns, such as a bundle.

use crate::input::{not_regular, open_regular};
use crate::{Error, Result, TEMPORARY, sync_dir, write_atomic};
use std::fs;
use std::io::{self, Write};
use std::path::{Component, Path, PathBuf};

/// Makes the error for a link in an owned folder.
fn link() -> io::Error {
    let what = "a link, and links in a bundle are not followed; put the file or folder itself there";
    io::Error::new(io::ErrorKind::InvalidInput, what)
}

fn failed(path: &Path) -> impl FnOnce(io::Error) -> Error {
    let path = path.to_path_buf();
    move |source| Error::io(path, source)
}

/// A folder in which every write and deletion goes through this type and follows no link below the folder. Otherwise a
/// bundle from elsewhere could name any file of this machine. The folder itself may be named by a link.
#[derive(Clone, Debug)]
pub struct OwnedDir {
    root: PathBuf,
}

impl OwnedDir {
    /// Makes an owned folder at `root`, which need not exist yet.
    pub fn new(root: &Path) -> OwnedDir {
        OwnedDir { root: root.to_path_buf() }
    }

    /// Returns the folder's path.
    pub fn root(&self) -> &Path {
        &self.root
    }

    /// Returns the path of `inside`, a relative path, in the folder.
    ///
    /// # Errors
    /// `inside` leaves the folder, or a part of it is a link; the error names that part.
    pub fn path(&self, inside: impl AsRef<Path>) -> Result<PathBuf> {
        let inside = inside.as_ref();
        let mut path = self.root.clone();
        for part in inside.components() {
            let Component::Normal(name) = part else {
                let what = format!("{} leaves the folder", inside.display());
                return Err(failed(&self.root)(io::Error::new(io::ErrorKind::InvalidInput, what)));
            };
            path.push(name);
            if path.is_symlink() {
                return Err(failed(&path)(link()));
            }
        }
        Ok(path)
    }

    /// Returns the path of `inside`, which must be absent or a regular file, or a folder if `folder` is set.
    ///
    /// # Errors
    /// Fails like [`OwnedDir::path`], or something else is there.
    pub fn expect(&self, inside: impl AsRef<Path>, folder: bool) -> Result<PathBuf> {
        let path = self.path(inside)?;
        match path.symlink_metadata() {
            Ok(found) if folder && !found.is_dir() => {
                let what = "exists and is not a folder";
                Err(failed(&path)(io::Error::new(io::ErrorKind::InvalidInput, what)))
            }
            Ok(found) if !folder && !found.is_file() => Err(failed(&path)(not_regular(&found))),
            _ => Ok(path),
        }
    }

    /// Creates a folder and its parents. Returns its path.
    ///
    /// # Errors
    /// Fails like [`OwnedDir::path`], or the system refuses it.
    pub fn create_dir(&self, inside: impl AsRef<Path>) -> Result<PathBuf> {
        let path = self.path(inside)?;
        fs::create_dir_all(&path).map_err(failed(&path))?;
        Ok(path)
    }

    /// Writes a file atomically: it is whole or absent.
    ///
    /// # Errors
    /// Fails like [`OwnedDir::path`], or the system refuses it.
    pub fn write(&self, inside: impl AsRef<Path>, bytes: &[u8]) -> Result<()> {
        self.write_with(inside, |file| file.write_all(bytes))
    }

    /// Lets `write` fill a file atomically: it is whole or absent.
    ///
    /// # Errors
    /// Fails like [`OwnedDir::path`], or the system refuses it.
    pub fn write_with(
        &self,
        inside: impl AsRef<Path>,
        write: impl FnOnce(&mut fs::File) -> io::Result<()>,
    ) -> Result<()> {
        let path = self.path(inside)?;
        write_atomic(&path, write).map_err(failed(&path))
    }

    /// Renames a file or folder.
    ///
    /// # Errors
    /// Fails like [`OwnedDir::path`], or the system refuses it.
    pub fn rename(&self, from: impl AsRef<Path>, to: impl AsRef<Path>) -> Result<()> {
        let (from, to) = (self.path(from)?, self.path(to)?);
        fs::rename(&from, &to).map_err(failed(&to))?;
        let _ = sync_dir(&self.root);
        Ok(())
    }

    /// Removes a file, or a folder with its contents. An absent path is no error.
    ///
    /// # Errors
    /// Fails like [`OwnedDir::path`], or the system refuses it.
    pub fn remove(&self, inside: impl AsRef<Path>) -> Result<()> {
        let path = self.path(inside)?;
        let removed = match path.symlink_metadata() {
            Ok(found) if found.is_dir() => fs::remove_dir_all(&path),
            Ok(_) => fs::remove_file(&path),
            Err(e) => Err(e),
        };
        match removed {
            Err(e) if e.kind() != io::ErrorKind::NotFound => Err(failed(&path)(e)),
            _ => Ok(()),
        }
    }

    /// Removes entries of the folder `inside` that killed runs left: names that begin with [`TEMPORARY`].
    ///
    /// # Errors
    /// Fails like [`OwnedDir::path`]. Entries that the system refuses to remove stay.
    pub fn sweep(&self, inside: impl AsRef<Path>) -> Result<()> {
        let inside = inside.as_ref();
        for name in self.names(inside)? {
            if name.starts_with(TEMPORARY) {
                // A link of such a name is removed itself, not its target.
                let path = self.path(inside)?.join(&name);
                let _ = match path.symlink_metadata() {
                    Ok(found) if found.is_dir() => fs::remove_dir_all(&path),
                    _ => fs::remove_file(&path),
                };
            }
        }
        Ok(())
    }

    /// Opens a file for locks, and creates it if it does not exist. Its content does not change.
    ///
    /// # Errors
    /// Fails like [`OwnedDir::path`], the path is no regular file, or the system refuses it.
    pub fn lock_file(&self, inside: impl AsRef<Path>) -> Result<fs::File> {
        let path = self.path(inside)?;
        let options = &mut fs::OpenOptions::new();
        open_regular(&path, options.read(true).write(true).create(true).truncate(false))
            .map_err(failed(&path))
    }

    /// Returns the names in the folder `inside`, sorted; none where it does not exist.
    ///
    /// # Errors
    /// Fails like [`OwnedDir::path`], or the folder cannot be read.
    pub fn names(&self, inside: impl AsRef<Path>) -> Result<Vec<String>> {
        let path = self.path(inside)?;
        let entries = match fs::read_dir(&path) {
            Ok(entries) => entries,
            Err(e) if e.kind() == io::ErrorKind::NotFound => return Ok(Vec::new()),
            Err(e) => return Err(failed(&path)(e)),
        };
        let mut names = Vec::new();
        for entry in entries {
            names.push(entry.map_err(failed(&path))?.file_name().to_string_lossy().into_owned());
        }
        names.sort();
        Ok(names)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn files_are_written_listed_and_removed() {
        let dir = tempfile::tempdir().unwrap();
        let owned = OwnedDir::new(&dir.path().join("b"));
        assert!(owned.names("").unwrap().is_empty());
        owned.create_dir("shards").unwrap();
        owned.write("shards/f", b"x").unwrap();
        owned.rename("shards/f", "g").unwrap();
        owned.create_dir(format!("{TEMPORARY}x/y")).unwrap();
        fs::write(owned.root().join(".tmp_backup"), "theirs").unwrap();
        owned.sweep("").unwrap();
        assert_eq!(owned.names("").unwrap(), [".tmp_backup", "g", "shards"]);
        owned.remove("g").unwrap();
        owned.remove("g").unwrap();
        owned.remove("shards").unwrap();
        assert_eq!(owned.names("").unwrap(), [".tmp_backup"]);
        assert!(owned.path("../x").is_err() && owned.path("/x").is_err());
    }

    #[cfg(unix)]
    #[test]
    fn nothing_goes_through_a_link() {
        let dir = tempfile::tempdir().unwrap();
        let other = dir.path().join("other");
        fs::create_dir(&other).unwrap();
        fs::write(other.join(format!("{TEMPORARY}theirs")), "x").unwrap();
        fs::write(other.join("f"), "x").unwrap();
        let owned = OwnedDir::new(&dir.path().join("b"));
        owned.create_dir("").unwrap();
        std::os::unix::fs::symlink(&other, owned.root().join("shards")).unwrap();
        std::os::unix::fs::symlink(other.join("f"), owned.root().join("f")).unwrap();
        let refused = |r: Result<()>| {
            let e = r.unwrap_err().to_string();
            assert!(e.contains(": a link, and links in a bundle"), "{e}");
        };
        refused(owned.sweep("shards"));
        refused(owned.write("shards/f", b"y"));
        refused(owned.write("f", b"y"));
        refused(owned.remove("shards/f"));
        refused(owned.remove("f"));
        refused(owned.rename("shards/f", "g"));
        refused(owned.create_dir("shards/new").map(drop));
        assert_eq!(fs::read(other.join("f")).unwrap(), b"x");
        assert_eq!(fs::read_dir(&other).unwrap().count(), 2);
        // A link may name the folder itself.
        let named = dir.path().join("named");
        std::os::unix::fs::symlink(owned.root(), &named).unwrap();
        OwnedDir::new(&named).write("g", b"z").unwrap();
        assert_eq!(fs::read(owned.root().join("g")).unwrap(), b"z");
    }
}
