//! Download of one file over any number of interruptions.

use crate::Error;
use crate::blob_hash::BlobHash;
use crate::http_client::Tries;
use anemoe_io::{hex, open_regular};
use sha1::Sha1;
use sha2::digest::DynDigest;
use sha2::{Digest, Sha256};
use std::fs::{self, File};
use std::io::{self, Read, Seek, SeekFrom, Write};
use std::path::Path;

/// Rounds after which contents that are wrong each time fail.
const ROUNDS: u32 = 3;
/// Bytes of one read.
const PIECE: usize = 1 << 18;

/// A file on a server.
pub trait DownloadSource {
    /// Begins to read the file at a byte; a server may begin at another one.
    ///
    /// # Errors
    /// The server does not answer, or refuses.
    fn open(&self, from: u64) -> Result<Opened<'_>, DownloadFailure>;
}

/// A file that is read.
pub struct Opened<'a> {
    /// First byte that comes.
    pub from: u64,
    /// Length of the whole file, where the server tells it.
    pub size: Option<u64>,
    /// The bytes.
    pub body: Box<dyn Read + 'a>,
}

/// Reason why a download failed.
#[derive(Debug)]
pub enum DownloadFailure {
    /// A file operation failed.
    Disk(io::Error),
    /// The server refused the request.
    Refused(Error),
    /// The server sent something else than announced.
    WrongContents(String),
    /// The connection failed.
    Network(String),
}

impl From<io::Error> for DownloadFailure {
    fn from(e: io::Error) -> DownloadFailure {
        DownloadFailure::Disk(e)
    }
}

/// Makes the hasher of contents.
fn hasher(hash: &BlobHash, size: u64) -> Box<dyn DynDigest> {
    match hash {
        BlobHash::Sha256(_) => Box::new(Sha256::new()),
        BlobHash::Git(_) => Box::new(Sha1::new_with_prefix(format!("blob {size}\0"))),
    }
}

/// Downloads a file with this hash and size to `target`, and continues from the contents of `partial`. `progress` gets the
/// number of bytes that are there.
///
/// # Errors
/// The file does not come, or its contents are wrong; then `target` does not exist.
pub fn download(
    source: &dyn DownloadSource,
    hash: &BlobHash,
    size: u64,
    partial: &Path,
    target: &Path,
    progress: &mut dyn FnMut(u64),
) -> Result<(), DownloadFailure> {
    // Bytes may have broken on the way, or in `partial` since an earlier run: the server's file is wrong only where a
    // round from nothing brings the same again.
    let mut before = None;
    for round in 1.. {
        match Download::open(hash, size, partial)?.fill(source, progress) {
            Err(DownloadFailure::WrongContents(what)) => {
                fs::remove_file(partial)?;
                if round == ROUNDS || before.as_ref() == Some(&what) {
                    return Err(DownloadFailure::WrongContents(what));
                }
                before = Some(what);
            }
            ended => {
                ended?;
                break;
            }
        }
    }
    Ok(fs::rename(partial, target)?)
}

/// A file as far as it is there.
struct Download<'a> {
    hash: &'a BlobHash,
    size: u64,
    file: File,
    hasher: Box<dyn DynDigest>,
    there: u64,
}

impl Download<'_> {
    fn open<'a>(hash: &'a BlobHash, size: u64, partial: &Path) -> io::Result<Download<'a>> {
        let options = &mut File::options();
        let file = open_regular(partial, options.create(true).truncate(false).read(true).write(true))?;
        let mut download = Download { hash, size, file, hasher: hasher(hash, size), there: 0 };
        if download.file.metadata()?.len() > size {
            download.file.set_len(0)?;
        }
        let mut piece = vec![0; PIECE];
        loop {
            match download.file.read(&mut piece)? {
                0 => return Ok(download),
                n => {
                    download.hasher.update(&piece[..n]);
                    download.there += n as u64;
                }
            }
        }
    }

    /// Downloads until the file is complete, and checks its hash.
    fn fill(
        mut self,
        source: &dyn DownloadSource,
        progress: &mut dyn FnMut(u64),
    ) -> Result<(), DownloadFailure> {
        let mut tries = Tries::default();
        tries.reaches(self.there);
        progress(self.there);
        while self.there < self.size {
            let why = match self.receive(source, progress) {
                _ if self.there >= self.size => break,
                Ok(()) => "the connection ended early".to_string(),
                Err(DownloadFailure::Network(why)) => why,
                Err(other) => return Err(other),
            };
            let why = format!("{why} (after {} of {} bytes)", self.there, self.size);
            if !tries.reaches(self.there) && !tries.pause(&why) {
                return Err(DownloadFailure::Network(why));
            }
        }
        self.file.sync_all()?;
        let (found, wanted) = (hex(self.hasher.finalize()), self.hash.hex());
        if found != wanted {
            return Err(DownloadFailure::WrongContents(format!("its hash is {found}, not {wanted}")));
        }
        Ok(())
    }

    /// Appends the missing bytes, also where the connection breaks.
    fn receive(
        &mut self,
        source: &dyn DownloadSource,
        progress: &mut dyn FnMut(u64),
    ) -> Result<(), DownloadFailure> {
        let Opened { from, size, mut body } = source.open(self.there)?;
        if from == 0 && self.there > 0 {
            self.file.set_len(0)?;
            self.file.seek(SeekFrom::Start(0))?;
            self.hasher = hasher(self.hash, self.size);
            self.there = 0;
            progress(0);
        }
        if from != self.there {
            return Err(DownloadFailure::WrongContents("it sends another part than was asked for".into()));
        }
        if let Some(found) = size.filter(|found| *found != self.size) {
            return Err(DownloadFailure::WrongContents(format!("it has {found} bytes, not {}", self.size)));
        }
        let mut piece = vec![0; PIECE];
        loop {
            let n = body.read(&mut piece).map_err(|e| DownloadFailure::Network(e.to_string()))?;
            if n == 0 {
                return Ok(());
            }
            if self.there + n as u64 > self.size {
                return Err(DownloadFailure::WrongContents(format!("it has more than {} bytes", self.size)));
            }
            self.file.write_all(&piece[..n])?;
            self.hasher.update(&piece[..n]);
            self.there += n as u64;
            progress(self.there);
        }
    }
}
