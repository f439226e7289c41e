//! Outputs that a user names: they are not overwritten unless asked for, and inputs never are.

use crate::atomic::may_be_special;
use crate::input::not_regular;
use crate::write_atomic;
use std::fs::{self, File, Metadata};
use std::io;
use std::path::{Path, PathBuf};

/// Most entries of a folder that are compared with an output; a checkpoint has hundreds.
const MAX_ENTRIES: usize = 100_000;

/// A file or package that a command will write.
#[derive(Clone, Debug)]
pub struct Output {
    path: PathBuf,
    force: bool,
}

impl Output {
    /// Makes an output and checks, before any work, that `path` may be written. It must not exist; with `force` it may
    /// be a regular file or a package that neither is one of `inputs` nor lies in an input folder. Names in `/dev` and
    /// `/proc` may always be written, see [`write_atomic`].
    ///
    /// # Errors
    /// The path exists without `force`, is a pipe, socket or device, or belongs to one of `inputs` under this or
    /// another name.
    pub fn new(path: &Path, force: bool, inputs: &[&Path]) -> io::Result<Output> {
        let output = Output { path: path.to_path_buf(), force };
        let Ok(found) = path.symlink_metadata() else { return Ok(output) };
        if let Some(input) = inputs.iter().find(|input| is_same_file(path, input) || is_in(path, input)) {
            let what =
                format!("it exists and belongs to an input ({}); choose another name", input.display());
            return Err(io::Error::new(io::ErrorKind::InvalidInput, what));
        }
        let target = path.metadata().ok();
        if let Some(target) = &target {
            if !target.is_file() && may_be_special(path, target) {
                return Ok(output);
            }
            if !target.is_file() && !target.is_dir() {
                return Err(not_regular(target));
            }
        }
        if !force {
            let what = if found.is_symlink() { "a link of this name exists" } else { "it exists already" };
            let what = format!("{what}; give --force to replace it");
            return Err(io::Error::new(io::ErrorKind::AlreadyExists, what));
        }
        Ok(output)
    }

    /// Returns the path as the user gave it.
    pub fn path(&self) -> &Path {
        &self.path
    }

    /// Tells whether an existing file or package is replaced.
    pub fn replaces(&self) -> bool {
        self.force
    }

    /// Writes the file with [`write_atomic`].
    ///
    /// # Errors
    /// A file of this name appeared since [`Output::new`] without `force`, or the file cannot be written.
    pub fn write(&self, write: impl FnOnce(&mut File) -> io::Result<()>) -> io::Result<()> {
        Output::new(&self.path, self.force, &[])?;
        write_atomic(&self.path, write)
    }
}

/// Tells whether two names lead to the same file or folder.
fn is_same_file(a: &Path, b: &Path) -> bool {
    match (a.metadata(), b.metadata()) {
        (Ok(of_a), Ok(of_b)) => is_one(a, &of_a, b, &of_b),
        _ => false,
    }
}

fn is_one(a: &Path, of_a: &Metadata, b: &Path, of_b: &Metadata) -> bool {
    #[cfg(unix)]
    {
        use std::os::unix::fs::MetadataExt;
        let _ = (a, b);
        (of_a.dev(), of_a.ino()) == (of_b.dev(), of_b.ino())
    }
    #[cfg(not(unix))]
    {
        let _ = (of_a, of_b);
        matches!((a.canonicalize(), b.canonicalize()), (Ok(a), Ok(b)) if a == b)
    }
}

/// Tells whether the file lies in the folder or below it, or a link there leads to it: downloaded checkpoints are
/// folders of links.
fn is_in(path: &Path, folder: &Path) -> bool {
    if !folder.is_dir() {
        return false;
    }
    if matches!((path.canonicalize(), folder.canonicalize()), (Ok(p), Ok(f)) if p.starts_with(&f)) {
        return true;
    }
    let Ok(of_path) = path.metadata() else { return false };
    let mut folders = vec![folder.to_path_buf()];
    let mut seen = 0;
    while let Some(folder) = folders.pop() {
        for entry in fs::read_dir(folder).into_iter().flatten().flatten() {
            let inside = entry.path();
            seen += 1;
            if seen > MAX_ENTRIES {
                return false;
            }
            // A folder behind a link is compared but not walked: links may form a cycle.
            if entry.file_type().is_ok_and(|t| t.is_dir()) {
                folders.push(inside.clone());
            }
            if inside.metadata().is_ok_and(|m| is_one(path, &of_path, &inside, &m)) {
                return true;
            }
        }
    }
    false
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
        // The file appeared after the first check.
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

    #[cfg(unix)]
    #[test]
    fn pipes_are_refused_with_and_without_force() {
        let dir = tempfile::tempdir().unwrap();
        let pipe = dir.path().join("pipe");
        assert!(std::process::Command::new("mkfifo").arg(&pipe).status().unwrap().success());
        for force in [false, true] {
            let e = Output::new(&pipe, force, &[]).unwrap_err().to_string();
            assert!(e.starts_with("a pipe, where"), "{e}");
        }
    }

    #[cfg(unix)]
    #[test]
    fn files_behind_the_links_of_an_input_folder_are_inputs() {
        let dir = tempfile::tempdir().unwrap();
        let blob = dir.path().join("blob");
        fs::write(&blob, "weights").unwrap();
        let snapshot = dir.path().join("snapshot/sub");
        fs::create_dir_all(&snapshot).unwrap();
        std::os::unix::fs::symlink("../../blob", snapshot.join("model.safetensors")).unwrap();
        std::os::unix::fs::symlink("..", snapshot.join("round")).unwrap();
        let snapshot = dir.path().join("snapshot");
        let e = Output::new(&blob, true, &[&snapshot]).unwrap_err().to_string();
        assert!(e.contains("belongs to an input"), "{e}");
        fs::write(dir.path().join("other"), "x").unwrap();
        Output::new(&dir.path().join("other"), true, &[&snapshot]).unwrap();
    }
}
