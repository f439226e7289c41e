//! Download of one file over any number of interruptions.

use crate::blob_hash::BlobHash;
use crate::http_client::{Answer, HttpClient, HttpRequest, Token, Trouble, is_passing, shown};
use anemoe_io::{hex, open_regular};
use sha1::Sha1;
use sha2::{Digest, Sha256};
use std::fs::{self, File};
use std::io::{self, Read, Seek, SeekFrom, Write};
use std::path::Path;
use std::time::Duration;
use url::Url;

/// Tries in a row without a new byte after which the download fails.
pub const TRIES: u32 = 6;
/// Pause before the second try; each later pause is twice as long.
pub const RETRY_PAUSE: Duration = Duration::from_millis(500);
/// Rounds after which contents that are wrong each time fail.
const ROUNDS: u32 = 3;
/// Bytes of one read.
const PIECE: usize = 1 << 18;

/// A file to download.
pub struct Wanted<'a> {
    /// Address of the file.
    pub url: &'a Url,
    /// Token sent with the request.
    pub token: Option<&'a Token>,
    /// Hash of the contents.
    pub hash: &'a BlobHash,
    /// Length in bytes.
    pub size: u64,
    /// True if redirects to other servers are followed.
    pub follow: bool,
}

/// Reason why a download failed.
#[derive(Debug)]
pub enum DownloadFailure {
    /// A file operation failed.
    Disk(io::Error),
    /// The server refused the request: status, and error code if it gave one.
    Status(u16, Option<String>),
    /// The server sent something else than announced.
    WrongContents(String),
    /// The connection failed.
    Network(String),
}

impl DownloadFailure {
    /// Makes the failure of an error answer. After a passing fault, waits as long as the server asks.
    pub fn of_status(url: &Url, answer: Answer) -> DownloadFailure {
        let status = answer.status;
        if is_passing(status, None) {
            answer.wait_as_asked();
        }
        match answer.error_code() {
            code if is_passing(status, code.as_deref()) => {
                DownloadFailure::Network(format!("status {status} of {}", shown(url)))
            }
            code => DownloadFailure::Status(status, code),
        }
    }
}

impl From<io::Error> for DownloadFailure {
    fn from(e: io::Error) -> DownloadFailure {
        DownloadFailure::Disk(e)
    }
}

/// Incremental hash of the contents.
enum Hasher {
    Sha256(Sha256),
    Git(Sha1),
}

impl Hasher {
    fn new(hash: &BlobHash, size: u64) -> Hasher {
        match hash {
            BlobHash::Sha256(_) => Hasher::Sha256(Sha256::new()),
            BlobHash::Git(_) => Hasher::Git(Sha1::new_with_prefix(format!("blob {size}\0"))),
        }
    }

    fn update(&mut self, bytes: &[u8]) {
        match self {
            Hasher::Sha256(h) => h.update(bytes),
            Hasher::Git(h) => h.update(bytes),
        }
    }

    fn hex(self) -> String {
        match self {
            Hasher::Sha256(h) => hex(h.finalize()),
            Hasher::Git(h) => hex(h.finalize()),
        }
    }
}

/// Downloads a file to `target` and continues from the contents of `partial`. `progress` gets the number of bytes that are there.
///
/// # Errors
/// The file does not come, or its contents are wrong; then `target` does not exist.
pub fn download(
    client: &HttpClient,
    wanted: &Wanted,
    partial: &Path,
    target: &Path,
    progress: &mut dyn FnMut(u64),
) -> Result<(), DownloadFailure> {
    // Bytes may have broken on the way, or in `partial` since an earlier run: the server's file is wrong only where a
    // round from nothing brings the same again.
    let mut before = None;
    for round in 1.. {
        match fill(client, wanted, partial, progress) {
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

/// Downloads into `partial` until it is complete, and checks its hash.
fn fill(
    client: &HttpClient,
    wanted: &Wanted,
    partial: &Path,
    progress: &mut dyn FnMut(u64),
) -> Result<(), DownloadFailure> {
    let options = &mut File::options();
    let mut file = open_regular(partial, options.create(true).truncate(false).read(true).write(true))?;
    let mut hasher = Hasher::new(wanted.hash, wanted.size);
    let mut there = file.metadata()?.len();
    if there > wanted.size {
        file.set_len(0)?;
        there = 0;
    }
    hash_file(&mut file, &mut hasher)?;
    let (mut best, mut tries) = (there, 0);
    progress(there);
    while there < wanted.size {
        let ended = receive(client, wanted, &mut file, &mut hasher, &mut there, progress);
        if there >= wanted.size {
            break;
        }
        let why = match ended {
            Ok(()) => "the connection ended early".to_string(),
            Err(DownloadFailure::Network(why)) => why,
            Err(other) => return Err(other),
        };
        tries = if there > best { 0 } else { tries + 1 };
        best = best.max(there);
        if tries >= TRIES {
            return Err(DownloadFailure::Network(format!("{why} (after {there} of {} bytes)", wanted.size)));
        }
        if tries > 0 {
            let rest = RETRY_PAUSE * 2u32.pow(tries - 1);
            if tries > 1 {
                tracing::warn!("{}: {why}; the next try is in {} s", shown(wanted.url), rest.as_secs());
            }
            std::thread::sleep(rest);
        }
    }
    file.sync_all()?;
    let found = hasher.hex();
    if found != wanted.hash.hex() {
        return Err(DownloadFailure::WrongContents(format!(
            "its hash is {found}, not {}",
            wanted.hash.hex()
        )));
    }
    Ok(())
}

fn hash_file(file: &mut File, hasher: &mut Hasher) -> io::Result<()> {
    file.seek(SeekFrom::Start(0))?;
    let mut piece = vec![0; PIECE];
    loop {
        match file.read(&mut piece)? {
            0 => return Ok(()),
            n => hasher.update(&piece[..n]),
        }
    }
}

/// Requests the missing bytes and appends them to `file`. `there` counts them, also where the connection breaks.
fn receive(
    client: &HttpClient,
    wanted: &Wanted,
    file: &mut File,
    hasher: &mut Hasher,
    there: &mut u64,
    progress: &mut dyn FnMut(u64),
) -> Result<(), DownloadFailure> {
    let request = HttpRequest {
        method: "GET",
        url: wanted.url,
        from: *there,
        to: None,
        token: wanted.token,
        headers: &[],
        follow: wanted.follow,
    };
    let answer = client.send(&request).map_err(|t| match t {
        Trouble::Passing(what) => DownloadFailure::Network(what),
        Trouble::Lasting(what) => DownloadFailure::WrongContents(what),
    })?;
    match answer.status {
        206 if range_start(&answer) == Some(*there) => {}
        // The whole file or another part: starts again from byte 0.
        200 | 416 => {
            file.set_len(0)?;
            file.seek(SeekFrom::Start(0))?;
            *hasher = Hasher::new(wanted.hash, wanted.size);
            *there = 0;
            progress(0);
            if answer.status == 416 {
                return Err(DownloadFailure::Network(format!("{} has no such bytes", shown(wanted.url))));
            }
        }
        206 => return Err(DownloadFailure::WrongContents("it sends another part than was asked for".into())),
        _ => return Err(DownloadFailure::of_status(wanted.url, answer)),
    }
    let length = answer.length();
    if length.is_some_and(|n| *there + n != wanted.size) {
        let found = *there + length.unwrap_or(0);
        // A server may report an error in spite of the status.
        if answer.error_code().is_some_and(|code| is_passing(200, Some(&code))) {
            return Err(DownloadFailure::Network(format!("an error in place of {}", shown(wanted.url))));
        }
        return Err(DownloadFailure::WrongContents(format!("it has {found} bytes, not {}", wanted.size)));
    }
    let mut body = answer.reader();
    let mut piece = vec![0; PIECE];
    loop {
        let n = body
            .read(&mut piece)
            .map_err(|e| DownloadFailure::Network(format!("{}: {e}", shown(wanted.url))))?;
        if n == 0 {
            return Ok(());
        }
        if *there + n as u64 > wanted.size {
            return Err(DownloadFailure::WrongContents(format!("it has more than {} bytes", wanted.size)));
        }
        file.write_all(&piece[..n])?;
        hasher.update(&piece[..n]);
        *there += n as u64;
        progress(*there);
    }
}

/// Returns the first byte of a part: 5 for `bytes 5-9/10`.
fn range_start(answer: &Answer) -> Option<u64> {
    let range = answer.header("content-range")?.strip_prefix("bytes ")?;
    range.split_once('-')?.0.trim().parse().ok()
}
