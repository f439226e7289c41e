//! Paths as parts of arguments, also where they are no text.

use std::path::{Path, PathBuf};

/// Makes a path of its bytes; outside Unix, of the text that they are.
pub fn path_of(bytes: &[u8]) -> PathBuf {
    #[cfg(unix)]
    let path = <std::ffi::OsStr as std::os::unix::ffi::OsStrExt>::from_bytes(bytes);
    #[cfg(not(unix))]
    let path = String::from_utf8_lossy(bytes).into_owned();
    path.into()
}

/// Splits an argument at the first byte of this value, which is ASCII.
pub fn split_once(argument: &Path, at: u8) -> Option<(PathBuf, PathBuf)> {
    let bytes = argument.as_os_str().as_encoded_bytes();
    let i = bytes.iter().position(|b| *b == at)?;
    Some((path_of(&bytes[..i]), path_of(&bytes[i + 1..])))
}
