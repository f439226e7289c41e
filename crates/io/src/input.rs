//! Inputs: regular files of a bounded size.

use std::fs::{File, Metadata, OpenOptions};
use std::io::{self, Read};
use std::path::Path;

/// Opens a regular file for reading. Refuses a pipe without a writer and an endless device instead of waiting for them.
///
/// # Errors
/// The file cannot be opened, is not a regular file, or is longer than `limit` bytes.
pub fn open_input(path: &Path, limit: u64) -> io::Result<File> {
    let mut options = OpenOptions::new();
    options.read(true);
    // Without this flag, opening a pipe waits for a writer.
    #[cfg(unix)]
    std::os::unix::fs::OpenOptionsExt::custom_flags(&mut options, libc::O_NONBLOCK);
    let file = options.open(path)?;
    let found = file.metadata()?;
    if !found.is_file() {
        return Err(not_regular(&found));
    }
    if found.len() > limit {
        return Err(too_long(found.len(), limit));
    }
    Ok(file)
}

/// Reads a regular file of at most `limit` bytes. Also refuses a file that grows beyond it meanwhile.
///
/// # Errors
/// Fails like [`open_input`], or the file cannot be read.
pub fn read_input(path: &Path, limit: u64) -> io::Result<Vec<u8>> {
    let file = open_input(path, limit)?;
    let mut bytes = Vec::new();
    file.take(limit.saturating_add(1)).read_to_end(&mut bytes)?;
    match bytes.len() as u64 {
        n if n > limit => Err(too_long(n, limit)),
        _ => Ok(bytes),
    }
}

/// Returns a text without the byte order mark that some editors put before it.
pub fn without_mark(text: &[u8]) -> &[u8] {
    text.strip_prefix(b"\xef\xbb\xbf").unwrap_or(text)
}

/// Reads a regular file of UTF-8 text of at most `limit` bytes, without its byte order mark.
///
/// # Errors
/// Fails like [`read_input`], or the text is not UTF-8; the error says at which byte.
pub fn read_text(path: &Path, limit: u64) -> io::Result<String> {
    let bytes = read_input(path, limit)?;
    let mark = bytes.len() - without_mark(&bytes).len();
    let text = String::from_utf8(bytes);
    let mut text =
        text.map_err(|e| invalid(format!("not UTF-8 text, from byte {} on", e.utf8_error().valid_up_to())))?;
    text.drain(..mark);
    Ok(text)
}

/// Makes the error for something that should be a regular file; it names the kind found.
pub(crate) fn not_regular(found: &Metadata) -> io::Error {
    invalid(format!("{}, where a regular file is expected", kind_name(found)))
}

fn invalid(what: String) -> io::Error {
    io::Error::new(io::ErrorKind::InvalidData, what)
}

fn too_long(bytes: u64, limit: u64) -> io::Error {
    invalid(format!("{bytes} bytes, more than the {limit} that a file of this kind may have"))
}

/// Returns the name of a kind of file other than a regular one.
fn kind_name(found: &Metadata) -> &'static str {
    if found.is_dir() {
        return "a folder";
    }
    #[cfg(unix)]
    {
        use std::os::unix::fs::FileTypeExt;
        let kind = found.file_type();
        if kind.is_fifo() {
            return "a pipe";
        }
        if kind.is_socket() {
            return "a socket";
        }
        if kind.is_char_device() || kind.is_block_device() {
            return "a device";
        }
    }
    "something else"
}

#[cfg(test)]
mod tests {
    use super::*;
    use std::fs;

    #[test]
    fn a_file_is_read_up_to_its_limit() {
        let dir = tempfile::tempdir().unwrap();
        let path = dir.path().join("f");
        fs::write(&path, "12345").unwrap();
        assert_eq!(read_input(&path, 5).unwrap(), b"12345");
        let e = read_input(&path, 4).unwrap_err().to_string();
        assert!(e.starts_with("5 bytes, more than the 4"), "{e}");
        fs::write(&path, b"ab\xffcd").unwrap();
        assert!(read_text(&path, 9).unwrap_err().to_string().ends_with("from byte 2 on"));
        fs::write(&path, "\u{feff}a\u{feff}").unwrap();
        assert_eq!(read_text(&path, 9).unwrap(), "a\u{feff}");
    }

    #[test]
    fn a_folder_is_no_input() {
        let dir = tempfile::tempdir().unwrap();
        assert!(read_input(dir.path(), 9).unwrap_err().to_string().starts_with("a folder, where"));
    }

    #[cfg(unix)]
    #[test]
    fn devices_and_pipes_are_refused_at_once() {
        let dir = tempfile::tempdir().unwrap();
        let link = dir.path().join("zero");
        std::os::unix::fs::symlink("/dev/zero", &link).unwrap();
        assert!(read_input(&link, 9).unwrap_err().to_string().starts_with("a device, where"));
        let pipe = dir.path().join("pipe");
        assert!(std::process::Command::new("mkfifo").arg(&pipe).status().unwrap().success());
        assert!(read_input(&pipe, 9).unwrap_err().to_string().starts_with("a pipe, where"));
    }

    #[cfg(target_os = "linux")]
    #[test]
    fn a_file_that_tells_no_size_is_bounded_too() {
        // The file's metadata say 0 bytes.
        assert!(
            read_input(Path::new("/proc/self/status"), 10).unwrap_err().to_string().contains("more than")
        );
    }
}
