//! Files that are either whole or absent, and files that end.

use std::fs::{File, Metadata, OpenOptions};
use std::io::{self, Read, Seek};
use std::path::Path;

/// Lets `write` fill a new file beside `path`, flushes it to disk and renames it into place. A link stays one, and what it names
/// is replaced; a file that is replaced hands its permissions on. Devices, pipes and what lies in `/dev` and `/proc` are
/// written to, from a temporary file.
///
/// # Errors
/// `path` is a folder or a file that must not be written, its folder does not exist, or any file operation fails; nothing
/// half-written stays behind, but in a device or a pipe.
pub fn write_atomic(path: &Path, write: impl FnOnce(&mut File) -> io::Result<()>) -> io::Result<()> {
    let found = match path.metadata() {
        Ok(found) => Some(found),
        Err(e) if e.kind() == io::ErrorKind::NotFound => None,
        Err(e) => return Err(e),
    };
    match &found {
        Some(found) if found.is_dir() => return Err(io::ErrorKind::IsADirectory.into()),
        Some(found) if !found.is_file() || is_of_system(path) => return through(path, write),
        _ => {}
    }
    if path.is_symlink() {
        return match found {
            Some(found) => replace(&path.canonicalize()?, Some(&found), write),
            // What it names is not there yet, and may be a link as well.
            None => write_atomic(&folder(path).join(path.read_link()?), write),
        };
    }
    replace(path, found.as_ref(), write)
}

/// Opens a file to read it. Pipes and devices are refused: one may wait for ever, the other may never end, and neither tells its
/// length.
///
/// # Errors
/// The file cannot be opened, or is a pipe, a socket or a device.
pub fn open(path: &Path) -> io::Result<File> {
    let found = path.metadata()?;
    if !found.is_file() && !found.is_dir() {
        return Err(io::Error::new(io::ErrorKind::InvalidInput, "not a regular file"));
    }
    File::open(path)
}

/// Reads a file of which [`open`] says that it ends.
///
/// # Errors
/// As [`open`], or the file cannot be read.
pub fn read(path: &Path) -> io::Result<Vec<u8>> {
    let mut bytes = Vec::new();
    open(path)?.read_to_end(&mut bytes)?;
    Ok(bytes)
}

/// Reads what a user named, which may be a pipe or a device, up to a number of bytes.
///
/// # Errors
/// It cannot be read, or has more bytes.
pub fn read_limited(path: &Path, limit: u64) -> io::Result<Vec<u8>> {
    let mut bytes = Vec::new();
    File::open(path)?.take(limit.saturating_add(1)).read_to_end(&mut bytes)?;
    if bytes.len() as u64 > limit {
        return Err(io::Error::new(io::ErrorKind::FileTooLarge, format!("more than {limit} bytes")));
    }
    Ok(bytes)
}

/// Flushes a folder's entries to disk, where the system can: elsewhere a rename is as durable as it makes it.
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

/// Names there stand for what somebody has open, and a new file would not be what they have.
fn is_of_system(path: &Path) -> bool {
    cfg!(unix) && ["/dev", "/proc"].iter().any(|dir| path.starts_with(dir))
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
    // The system's own words, without the name of a temporary file.
    dir.metadata()?;
    if found.is_some() {
        // To rename over it nobody needs to be allowed to write it.
        OpenOptions::new().write(true).open(path)?;
    }
    let mut builder = tempfile::Builder::new();
    builder.prefix(".tmp-");
    // A temporary file is private by default; this one becomes an ordinary file, and the process' mask applies.
    #[cfg(unix)]
    builder.permissions(std::os::unix::fs::PermissionsExt::from_mode(0o666));
    let mut file = builder.tempfile_in(dir)?;
    write(file.as_file_mut())?;
    if let Some(found) = found {
        file.as_file().set_permissions(found.permissions())?;
    }
    file.as_file().sync_all()?;
    file.persist(path).map_err(|e| e.error)?;
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
    fn what_may_not_end_is_read_up_to_a_limit_or_not_at_all() {
        let zero = Path::new("/dev/zero");
        let err = read(zero).unwrap_err();
        assert_eq!((err.kind(), err.to_string()), (io::ErrorKind::InvalidInput, "not a regular file".into()));
        assert_eq!(read_limited(zero, 100).unwrap_err().kind(), io::ErrorKind::FileTooLarge);
        let dir = tempfile::tempdir().unwrap();
        let (path, link) = (dir.path().join("f"), dir.path().join("link"));
        put(&path, "text").unwrap();
        std::os::unix::fs::symlink("f", &link).unwrap();
        assert_eq!((read(&link).unwrap(), read_limited(&link, 4).unwrap()), (b"text".into(), b"text".into()));
        assert!(read_limited(&path, 3).is_err() && read(dir.path()).is_err());
        std::fs::remove_file(&path).unwrap();
        assert_eq!(read(&link).unwrap_err().kind(), io::ErrorKind::NotFound);
    }

    #[cfg(unix)]
    #[test]
    fn devices_are_written_to() {
        use std::os::unix::fs::FileTypeExt;
        let null = Path::new("/dev/null");
        put(null, "gone").unwrap();
        assert!(null.metadata().unwrap().file_type().is_char_device());
        let dir = tempfile::tempdir().unwrap();
        let link = dir.path().join("null");
        std::os::unix::fs::symlink(null, &link).unwrap();
        put(&link, "gone").unwrap();
        assert!(link.is_symlink() && null.metadata().unwrap().file_type().is_char_device());
        #[cfg(target_os = "linux")]
        assert_eq!(put(Path::new("/dev/full"), "x").unwrap_err().kind(), io::ErrorKind::StorageFull);
    }
}
