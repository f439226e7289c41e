//! Operations that every store supports.

use crate::Result;
use anemoe_io::hex;
use sha2::{Digest, Sha256};
use std::fs::File;
use std::io::{self, Read};
use std::path::Path;

/// Bytes of one read.
const PIECE: usize = 1 << 20;

/// Length and hash of a file's contents, which identify them.
#[derive(Clone, Debug, PartialEq, Eq, PartialOrd, Ord)]
pub struct Contents {
    /// Length in bytes.
    pub bytes: u64,
    /// SHA-256 in hexadecimal.
    pub sha256: String,
}

impl Contents {
    /// Computes the length and hash of a regular file.
    ///
    /// # Errors
    /// The path is no regular file, or cannot be read.
    pub fn of(path: &Path) -> io::Result<Contents> {
        let mut file = anemoe_io::open_input(path, u64::MAX)?;
        Contents::of_reader(&mut file)
    }

    /// Computes the length and hash of all bytes of a reader.
    ///
    /// # Errors
    /// The reader fails.
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

    /// Returns the key of the object with these contents.
    pub fn key(&self) -> String {
        format!("objects/{}/{}", &self.sha256[..2], self.sha256)
    }
}

/// A store of objects by key. Keys are relative paths of safe names.
pub trait ObjectStore: Send + Sync {
    /// Readies the store for writing, and reports early what would fail later.
    ///
    /// # Errors
    /// The store cannot be reached, or this user cannot write to it.
    fn prepare(&self) -> Result<()>;

    /// Returns an object's length, and its SHA-256 where the store tells it; `None` where the object does not exist.
    ///
    /// # Errors
    /// The store does not answer.
    fn find(&self, key: &str) -> Result<Option<(u64, Option<String>)>>;

    /// Tells whether an object holds these contents, by reading it back.
    ///
    /// # Errors
    /// The store does not answer.
    fn holds(&self, key: &str, contents: &Contents) -> Result<bool>;

    /// Writes a small object and replaces an object of the same key. Readers see the old or the new object.
    ///
    /// # Errors
    /// The store refuses it.
    fn write(&self, key: &str, bytes: &[u8]) -> Result<()>;

    /// Sends a file with these contents. `record` is the path of a file in which an upload in parts notes what was sent, for
    /// a later try to go on from. Returns the bytes sent, fewer where an earlier run had sent a part. `moved` is called with
    /// bytes sent and bytes found there, and with a negative number for a failed try.
    ///
    /// # Errors
    /// The store refuses the object, or the file's contents have changed; then the object does not exist.
    fn send(
        &self,
        key: &str,
        file: &Path,
        contents: &Contents,
        record: &Path,
        moved: &dyn Fn(i64),
    ) -> Result<u64>;

    /// Reads an object of at most `limit` bytes; `None` where it does not exist.
    ///
    /// # Errors
    /// The store does not answer, or the object is longer.
    fn read(&self, key: &str, limit: u64) -> Result<Option<Vec<u8>>>;

    /// Fetches an object with these contents to `target`. `partial`, on the same disk, collects the bytes, and a later
    /// try continues from it. Returns the bytes received, fewer where an earlier run had received a part. `moved` is
    /// called with bytes received and bytes found there.
    ///
    /// # Errors
    /// The object does not come, or its contents are wrong; then `target` does not exist.
    fn bring(
        &self,
        key: &str,
        contents: &Contents,
        partial: &Path,
        target: &Path,
        moved: &dyn Fn(i64),
    ) -> Result<u64>;

    /// Returns the names directly below a folder of keys, sorted.
    ///
    /// # Errors
    /// The store does not answer.
    fn list(&self, folder: &str) -> Result<Vec<String>>;

    /// Returns the name of an object in messages.
    fn place(&self, key: &str) -> String;
}

/// Copies a file and computes its length and hash. `moved` is called with the number of bytes written.
///
/// # Errors
/// A file cannot be read or written.
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
