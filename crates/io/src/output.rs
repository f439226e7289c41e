//! Outputs that a user names: nothing is overwritten unless asked for, and an input never is.

use crate::write_atomic;
use std::fs::File;
use std::io;
use std::path::{Path, PathBuf};

/// A file or package that a command is to write.
#[derive(Clone, Debug)]
pub struct Output {
    path: PathBuf,
    force: bool,
}

impl Output {
    /// Checks, before any work is done, that `path` may be written: it does not exist, or `force` is given and it neither is
    /// one of `inputs` nor lies in one that is a folder. Devices and pipes may always be written.
    ///
    /// # Errors
    /// It exists and `force` is not given, or it belongs to one of `inputs` under this or another name.
    pub fn new(path: &Path, force: bool, inputs: &[&Path]) -> io::Result<Output> {
        let output = Output { path: path.to_path_buf(), force };
        let Ok(found) = path.symlink_metadata() else { return Ok(output) };
        if let Some(input) = inputs.iter().find(|input| is_same_file(path, input) || is_below(path, input)) {
            let what =
                format!("it exists and belongs to an input ({}); choose another name", input.display());
            return Err(io::Error::new(io::ErrorKind::InvalidInput, what));
        }
        let special = path.metadata().is_ok_and(|m| !m.is_file() && !m.is_dir());
        if !force && !special {
            let what = if found.is_symlink() { "a link of this name exists" } else { "it exists already" };
            let what = format!("{what}; give --force to replace it");
            return Err(io::Error::new(io::ErrorKind::AlreadyExists, what));
        }
        Ok(output)
    }

    /// The path as the user gave it.
    pub fn path(&self) -> &Path {
        &self.path
    }

    /// An existing file or package is to be replaced.
    pub fn replaces(&self) -> bool {
        self.force
    }

    /// Writes the file with [`write_atomic`].
    ///
    /// # Errors
    /// A file of this name came into being since [`Output::new`] and `force` is not given, or the file cannot be written.
    pub fn write(&self, write: impl FnOnce(&mut File) -> io::Result<()>) -> io::Result<()> {
        Output::new(&self.path, self.force, &[])?;
        write_atomic(&self.path, write)
    }
}

/// Both names lead to one file or folder.
fn is_same_file(a: &Path, b: &Path) -> bool {
    #[cfg(unix)]
    {
        use std::os::unix::fs::MetadataExt;
        if let (Ok(a), Ok(b)) = (a.metadata(), b.metadata()) {
            return (a.dev(), a.ino()) == (b.dev(), b.ino());
        }
    }
    matches!((a.canonicalize(), b.canonicalize()), (Ok(a), Ok(b)) if a == b)
}

/// The file lies in the folder or in one below it.
fn is_below(path: &Path, folder: &Path) -> bool {
    folder.is_dir()
        && matches!((path.canonicalize(), folder.canonicalize()), (Ok(p), Ok(f)) if p.starts_with(&f))
}

#[cfg(test)]
mod tests {
    use super::*;
    use std::fs;

    #[test]
    fn an_existing_file_is_replaced_only_when_asked_for() {
        let dir = tempfile::tempdir().unwrap();
        let path = dir.path().join("f");
        let new = Output::new(&path, false, &[]).unwrap();
        new.write(|f| io::Write::write_all(f, b"one")).unwrap();
        assert!(Output::new(&path, false, &[]).unwrap_err().to_string().contains("--force"));
        // It came into being after the first look.
        assert_eq!(new.write(|_| Ok(())).unwrap_err().kind(), io::ErrorKind::AlreadyExists);
        Output::new(&path, true, &[]).unwrap().write(|f| io::Write::write_all(f, b"two")).unwrap();
        assert_eq!(fs::read(&path).unwrap(), b"two");
    }

    #[test]
    fn an_input_is_never_replaced() {
        let dir = tempfile::tempdir().unwrap();
        let path = dir.path().join("f");
        fs::write(&path, "x").unwrap();
        let other = dir.path().join("sub/../f");
        fs::create_dir(dir.path().join("sub")).unwrap();
        let e = Output::new(&path, true, &[&other]).unwrap_err().to_string();
        assert!(e.contains("belongs to an input"), "{e}");
        assert!(Output::new(&path, true, &[dir.path()]).is_err());
        assert!(Output::new(&dir.path().join("new"), true, &[dir.path()]).is_ok());
        #[cfg(unix)]
        {
            let hard = dir.path().join("hard");
            fs::hard_link(&path, &hard).unwrap();
            assert!(Output::new(&hard, true, &[&path]).is_err());
            let link = dir.path().join("link");
            std::os::unix::fs::symlink(&path, &link).unwrap();
            assert!(Output::new(&link, true, &[&path]).is_err());
            assert!(Output::new(&link, false, &[]).unwrap_err().to_string().contains("a link"));
        }
    }

    #[cfg(unix)]
    #[test]
    fn devices_may_be_written() {
        Output::new(Path::new("/dev/null"), false, &[]).unwrap().write(|_| Ok(())).unwrap();
    }
}
