//! Operations that every store has.

use crate::Result;
use anemoe_io::hex;
use sha2::{Digest, Sha256};
use std::fs::File;
use std::io::{self, Read};
use std::path::Path;

/// Bytes that are read at a time.
const PIECE: usize = 1 << 20;

/// Contents of a file, by which it is known.
#[derive(Clone, Debug, PartialEq, Eq, PartialOrd, Ord)]
pub struct Contents {
    /// Length.
    pub bytes: u64,
    /// SHA-256 in hexadecimal.
    pub sha256: String,
}

impl Contents {
    /// The contents of a regular file.
    ///
    /// # Errors
    /// It is none, or cannot be read.
    pub fn of(path: &Path) -> io::Result<Contents> {
        let mut file = anemoe_io::open_input(path, u64::MAX)?;
        Contents::of_reader(&mut file)
    }

    /// The contents of what a reader gives.
    ///
    /// # Errors
    /// It cannot be read.
    pub fn of_reader(reader: &mut dyn Read) -> io::Result<Contents> {
        let (mut hasher, mut bytes, mut piece) = (Sha256::new(), 0, vec![0; PIECE]);
        loop {
            let n = match reader.read(&mut piece) {
                Ok(0) => return Ok(Contents { bytes, sha256: hex(hasher.finalize()) }),
                Ok(n) => n,
                Err(e) if e.kind() == io::ErrorKind::Interrupted => continue,
                Err(e) => return Err(e),
            };
            hasher.update(&piece[..n]);
            bytes += n as u64;
        }
    }

    /// The key of the object that holds them.
    pub fn key(&self) -> String {
        format!("objects/{}/{}", &self.sha256[..2], self.sha256)
    }
}

/// A store of objects by key. Keys are relative paths of safe names.
pub trait ObjectStore: Send + Sync {
    /// Makes the store ready to be written, and finds out early what would fail later.
    ///
    /// # Errors
    /// It cannot be reached, or not written by this user.
    fn prepare(&self) -> Result<()>;

    /// Length of an object, and its SHA-256 where the store tells it; none where it is not there.
    ///
    /// # Errors
    /// The store does not answer.
    fn find(&self, key: &str) -> Result<Option<(u64, Option<String>)>>;

    /// Reads an object back and tells whether it holds these contents.
    ///
    /// # Errors
    /// The store does not answer.
    fn holds(&self, key: &str, contents: &Contents) -> Result<bool>;

    /// Writes a small object, in place of one of this key. Readers see the old one or the new one.
    ///
    /// # Errors
    /// The store refuses it.
    fn write(&self, key: &str, bytes: &[u8]) -> Result<()>;

    /// Sends a file that has these contents, and gives the bytes that went out: fewer where an earlier run had sent some. `moved`
    /// is told of both, and takes some back where a try failed.
    ///
    /// # Errors
    /// The store refuses it, or the file has other contents by now; then there is no such object.
    fn send(&self, key: &str, file: &Path, contents: &Contents, moved: &dyn Fn(i64)) -> Result<u64>;

    /// Reads an object of at most `limit` bytes; none where it is not there.
    ///
    /// # Errors
    /// The store does not answer, or the object is longer.
    fn read(&self, key: &str, limit: u64) -> Result<Option<Vec<u8>>>;

    /// Brings an object with these contents to `target`, over `partial`, which lies on the same disk and where a later try goes on.
    /// Gives the bytes that came: fewer where an earlier run had brought some. `moved` is told of both.
    ///
    /// # Errors
    /// It does not come, or something else does; then nothing lies in `target`.
    fn bring(
        &self,
        key: &str,
        contents: &Contents,
        partial: &Path,
        target: &Path,
        moved: &dyn Fn(i64),
    ) -> Result<u64>;

    /// Names of what lies directly below a folder of keys, sorted.
    ///
    /// # Errors
    /// The store does not answer.
    fn list(&self, folder: &str) -> Result<Vec<String>>;

    /// The name of an object in messages.
    fn place(&self, key: &str) -> String;
}

/// Copies a file while its contents are computed. `moved` is told how many bytes were written.
///
/// # Errors
/// One of them cannot be read or written.
pub fn copy_hashed(from: &mut File, to: &mut File, moved: &dyn Fn(i64)) -> io::Result<Contents> {
    struct Copied<'a> {
        from: &'a mut File,
        to: &'a mut File,
        moved: &'a dyn Fn(i64),
    }
    impl Read for Copied<'_> {
        fn read(&mut self, piece: &mut [u8]) -> io::Result<usize> {
            let n = self.from.read(piece)?;
            io::Write::write_all(self.to, &piece[..n])?;
            (self.moved)(n as i64);
            Ok(n)
        }
    }
    Contents::of_reader(&mut Copied { from, to, moved })
}
