//! Inputs: regular files of a bounded size.

use std::fs::{File, Metadata, OpenOptions};
use std::io::{self, Read, Seek};
use std::path::Path;

/// First line of a file that Git LFS leaves in place of a file that it has not fetched, behind `version `.
const LFS_VERSIONS: [&str; 2] = ["https://git-lfs.github.com/spec/", "https://hawser.github.com/spec/"];
/// Most bytes of such a pointer, from its specification.
const LFS_BYTES: u64 = 1024;

/// Opens a regular file with these options. Refuses a pipe, a socket or a device at once: opening a pipe would wait for
/// its other end, and reading a device might never end.
///
/// # Errors
/// The file cannot be opened, or is not a regular file.
pub fn open_regular(path: &Path, options: &mut OpenOptions) -> io::Result<File> {
    let regular = |found: Metadata| if found.is_file() { Ok(()) } else { Err(not_regular(&found)) };
    path.metadata().map_or(Ok(()), regular)?;
    // Something else may have the name by now: with this flag, opening a pipe does not wait.
    #[cfg(unix)]
    std::os::unix::fs::OpenOptionsExt::custom_flags(options, libc::O_NONBLOCK);
    let file = options.open(path)?;
    regular(file.metadata()?)?;
    Ok(file)
}

/// Opens a regular file for reading. Refuses a Git LFS pointer instead of taking it for the file's contents.
///
/// # Errors
/// Fails like [`open_regular`], or the file is a Git LFS pointer or longer than `limit` bytes.
pub fn open_input(path: &Path, limit: u64) -> io::Result<File> {
    let file = open_regular(path, OpenOptions::new().read(true))?;
    let bytes = file.metadata()?.len();
    if bytes > limit {
        return Err(too_long(bytes, limit));
    }
    if bytes <= LFS_BYTES {
        refuse_lfs_pointer(&file, path)?;
    }
    Ok(file)
}

/// Refuses a Git LFS pointer with the command that fetches its file. Rewinds the file.
fn refuse_lfs_pointer(mut file: &File, path: &Path) -> io::Result<()> {
    let mut bytes = Vec::new();
    // A file without a position, such as one of /proc, is no pointer.
    if file.take(LFS_BYTES).read_to_end(&mut bytes).and_then(|_| file.rewind()).is_err() {
        return Ok(());
    }
    let text = std::str::from_utf8(&bytes).unwrap_or_default();
    let version = text.strip_prefix("version ").unwrap_or_default();
    if !LFS_VERSIONS.iter().any(|v| version.starts_with(v)) {
        return Ok(());
    }
    let size = text.lines().find_map(|line| line.strip_prefix("size ")).unwrap_or("unknown");
    let folder = path.parent().filter(|p| !p.as_os_str().is_empty()).unwrap_or(Path::new("."));
    let name = path.file_name().unwrap_or_default().to_string_lossy();
    Err(invalid(format!(
        "a Git LFS pointer, not the file itself ({size} bytes), which git has not fetched; fetch it: \
         git -C '{}' lfs pull --include '{name}'",
        folder.display()
    )))
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

/// Tells whether a file with this beginning is a web page: a download without a login, or of the page about a file, saves
/// one under the file's name. Eight bytes are enough to tell.
pub fn is_web_page(begin: &[u8]) -> bool {
    let begin = without_mark(begin).trim_ascii_start();
    ["<!doctype html", "<html"].into_iter().any(|page| {
        let n = page.len().min(begin.len());
        n >= 5 && begin[..n].eq_ignore_ascii_case(&page.as_bytes()[..n])
    })
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
    fn a_git_lfs_pointer_is_named() {
        let dir = tempfile::tempdir().unwrap();
        let path = dir.path().join("weight.bin");
        let pointer = "version https://git-lfs.github.com/spec/v1\noid sha256:00\nsize 123456\n";
        fs::write(&path, pointer).unwrap();
        let e = open_input(&path, 9999).unwrap_err().to_string();
        assert!(e.starts_with("a Git LFS pointer") && e.contains("123456 bytes"), "{e}");
        assert!(e.contains("lfs pull --include 'weight.bin'"), "{e}");
        // A text about pointers is a text.
        fs::write(&path, format!("# {pointer}")).unwrap();
        assert_eq!(read_text(&path, 9999).unwrap(), format!("# {pointer}"));
    }

    #[test]
    fn web_pages_are_known_by_their_beginning() {
        for page in ["<!DOCTYPE html>\n", "\n<html lang", "<!docTyp", "\u{feff} <HTML>"] {
            assert!(is_web_page(page.as_bytes()), "{page}");
        }
        for other in ["", "<", "<!", "{}", "<!-- html", "<htm", "<|im_start|>"] {
            assert!(!is_web_page(other.as_bytes()), "{other}");
        }
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
        for path in [&pipe, &link] {
            let e = open_regular(path, OpenOptions::new().append(true).create(true)).unwrap_err().to_string();
            assert!(e.contains(", where a regular file is expected"), "{e}");
        }
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
