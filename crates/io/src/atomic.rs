//! Files that are either whole or absent.

use crate::Temporary;
use crate::input::not_regular;
use std::fs::{File, Metadata, OpenOptions};
use std::io::{self, Seek};
use std::path::Path;

/// Lets `write` fill a new file beside `path`, flushes it to disk and renames it into place. A link stays: its target
/// is replaced. A replaced file hands on its permissions. Only names in `/dev` and `/proc` may stand for something else
/// than a regular file (`/dev/null`, `/dev/stdout`): those are written to, from a temporary file.
///
/// # Errors
/// `path` is no regular file or may not be written, its folder does not exist, or a file operation fails. No
/// half-written file is left, except in `/dev` and `/proc`.
pub fn write_atomic(path: &Path, write: impl FnOnce(&mut File) -> io::Result<()>) -> io::Result<()> {
    let found = match path.metadata() {
        Ok(found) => Some(found),
        Err(e) if e.kind() == io::ErrorKind::NotFound => None,
        Err(e) => return Err(e),
    };
    match &found {
        Some(found) if found.is_dir() => return Err(io::ErrorKind::IsADirectory.into()),
        Some(found) if may_be_special(path, found) => return through(path, write),
        Some(found) if !found.is_file() => return Err(not_regular(found)),
        _ => {}
    }
    if path.is_symlink() {
        return match found {
            Some(found) => replace(&path.canonicalize()?, Some(&found), write),
            // The link's target does not exist yet, and may be a link as well.
            None => write_atomic(&folder(path).join(path.read_link()?), write),
        };
    }
    replace(path, found.as_ref(), write)
}

/// Flushes a folder's entries to disk on Unix; other systems decide themselves how durable a rename is.
///
/// # Errors
/// The folder cannot be opened or flushed.
pub fn sync_dir(dir: &Path) -> io::Result<()> {
    #[cfg(unix)]
    File::open(dir)?.sync_all()?;
    #[cfg(not(unix))]
    let _ = dir;
    Ok(())
}

/// Tells whether the system owns the name and it may be no regular file: a device in `/dev`, or an open file
/// (`/dev/fd/3`), which a new file would not reach. A named pipe elsewhere does not count: opening it waits for a reader.
pub(crate) fn may_be_special(path: &Path, found: &Metadata) -> bool {
    let below = |dirs: &[&str]| dirs.iter().any(|dir| path.starts_with(dir));
    cfg!(unix)
        && (below(&["/dev/fd", "/dev/stdout", "/dev/stderr", "/proc"])
            || below(&["/dev"]) && (found.is_file() || is_device(found)))
}

fn is_device(found: &Metadata) -> bool {
    #[cfg(unix)]
    {
        use std::os::unix::fs::FileTypeExt;
        found.file_type().is_char_device()
    }
    #[cfg(not(unix))]
    {
        let _ = found;
        false
    }
}

fn folder(path: &Path) -> &Path {
    path.parent().filter(|p| !p.as_os_str().is_empty()).unwrap_or(Path::new("."))
}

fn replace(
    path: &Path,
    found: Option<&Metadata>,
    write: impl FnOnce(&mut File) -> io::Result<()>,
) -> io::Result<()> {
    let dir = folder(path);
    // Gives the system's own error, without the name of a temporary file.
    dir.metadata()?;
    if found.is_some() {
        // Renaming over the file would not require permission to write it; opening it does.
        OpenOptions::new().write(true).open(path)?;
    }
    let (temporary, mut file) = Temporary::file(dir)?;
    write(&mut file)?;
    if let Some(found) = found {
        file.set_permissions(found.permissions())?;
    }
    file.sync_all()?;
    drop(file);
    temporary.persist(path)?;
    sync_dir(dir)
}

fn through(path: &Path, write: impl FnOnce(&mut File) -> io::Result<()>) -> io::Result<()> {
    let mut file = tempfile::tempfile()?;
    write(&mut file)?;
    file.rewind()?;
    io::copy(&mut file, &mut OpenOptions::new().write(true).open(path)?).map(|_| ())
}

#[cfg(test)]
mod tests {
    use super::*;
    use std::io::Write;
    use std::path::PathBuf;

    fn put(path: &Path, text: &str) -> io::Result<()> {
        write_atomic(path, |f| f.write_all(text.as_bytes()))
    }

    fn names(dir: &Path) -> Vec<PathBuf> {
        let mut names: Vec<_> =
            std::fs::read_dir(dir).unwrap().map(|e| e.unwrap().file_name().into()).collect();
        names.sort();
        names
    }

    #[test]
    fn a_write_replaces_the_whole_file_and_leaves_nothing_beside_it() {
        let dir = tempfile::tempdir().unwrap();
        let path = dir.path().join("f");
        put(&path, "long first version").unwrap();
        put(&path, "second").unwrap();
        assert_eq!(std::fs::read(&path).unwrap(), b"second");
        let failed =
            write_atomic(&path, |f| f.write_all(b"half").and(Err(io::ErrorKind::StorageFull.into())));
        assert_eq!(failed.unwrap_err().kind(), io::ErrorKind::StorageFull);
        assert_eq!(std::fs::read(&path).unwrap(), b"second");
        assert_eq!(names(dir.path()), [PathBuf::from("f")]);
    }

    #[test]
    fn folders_and_files_in_missing_folders_are_refused() {
        let dir = tempfile::tempdir().unwrap();
        assert_eq!(put(dir.path(), "x").unwrap_err().kind(), io::ErrorKind::IsADirectory);
        let err = put(&dir.path().join("no/f"), "x").unwrap_err();
        assert_eq!(err.kind(), io::ErrorKind::NotFound);
        assert!(!err.to_string().contains("tmp"), "{err}");
    }

    #[cfg(unix)]
    #[test]
    fn links_stay_and_what_they_name_is_replaced() {
        use std::os::unix::fs::{PermissionsExt, symlink};
        let dir = tempfile::tempdir().unwrap();
        let at = |name: &str| dir.path().join(name);
        std::fs::create_dir(at("other")).unwrap();
        symlink("other/f", at("link")).unwrap();
        symlink("link", at("second")).unwrap();
        for text in ["new", "replaced"] {
            put(&at("second"), text).unwrap();
            assert!(at("second").is_symlink() && at("link").is_symlink());
            assert_eq!(std::fs::read_to_string(at("other/f")).unwrap(), text);
            std::fs::set_permissions(at("other/f"), PermissionsExt::from_mode(0o640)).unwrap();
        }
        put(&at("link"), "third").unwrap();
        assert_eq!(at("other/f").metadata().unwrap().permissions().mode() & 0o777, 0o640);
        symlink("round", at("round")).unwrap();
        put(&at("round"), "x").unwrap_err();
        assert_eq!(names(&at("other")), [PathBuf::from("f")]);
    }

    #[cfg(unix)]
    #[test]
    fn devices_are_written_to_by_their_own_names_only() {
        use std::os::unix::fs::FileTypeExt;
        let null = Path::new("/dev/null");
        put(null, "gone").unwrap();
        assert!(null.metadata().unwrap().file_type().is_char_device());
        let dir = tempfile::tempdir().unwrap();
        let link = dir.path().join("null");
        std::os::unix::fs::symlink(null, &link).unwrap();
        let e = put(&link, "gone").unwrap_err().to_string();
        assert!(e.starts_with("a device, where a regular file"), "{e}");
        assert!(link.is_symlink() && null.metadata().unwrap().file_type().is_char_device());
        #[cfg(target_os = "linux")]
        assert_eq!(put(Path::new("/dev/full"), "x").unwrap_err().kind(), io::ErrorKind::StorageFull);
    }

    #[cfg(unix)]
    #[test]
    fn pipes_are_refused_at_once() {
        let dir = tempfile::tempdir().unwrap();
        let pipe = dir.path().join("pipe");
        assert!(std::process::Command::new("mkfifo").arg(&pipe).status().unwrap().success());
        let link = dir.path().join("link");
        std::os::unix::fs::symlink(&pipe, &link).unwrap();
        for path in [&pipe, &link] {
            let e = put(path, "x").unwrap_err().to_string();
            assert!(e.starts_with("a pipe, where a regular file"), "{e}");
        }
    }
}
