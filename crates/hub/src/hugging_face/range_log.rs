//! Log of the parts of a file that were received.
//!
//! ```text
//! file    record*
//! record  start u64 | length u64 | SHA-256 of the bytes | bytes        little-endian
//! ```
//!
//! The form is the log's own, so that nobody takes it for the file itself. A record that is truncated or damaged ends
//! the log: that record and all after it are fetched again.

use sha2::{Digest, Sha256};
use std::collections::BTreeMap;
use std::fs::File;
use std::io::{self, Write};
use std::ops::Range;
use std::path::{Path, PathBuf};

/// Most bytes of a log; further parts are kept in memory only.
const MAX_LOG: u64 = 512 << 20;
/// Bytes of a record's header.
const HEAD: usize = 8 + 8 + 32;

/// Parts of one file, in memory and on disk.
pub struct RangeLog {
    path: PathBuf,
    /// Contents by their offset in the file; parts do not overlap.
    parts: BTreeMap<u64, Vec<u8>>,
    /// Bytes of the log up to the end of the last valid record.
    good: u64,
}

impl RangeLog {
    /// Reads the log at `path`; a missing log is empty.
    pub fn open(path: &Path) -> RangeLog {
        let mut log = RangeLog { path: path.into(), parts: BTreeMap::new(), good: 0 };
        log.load();
        log
    }

    fn load(&mut self) {
        let bytes = anemoe_io::read_input(&self.path, MAX_LOG).unwrap_or_default();
        let mut rest = bytes.as_slice();
        while let Some((start, contents, behind)) = record(rest) {
            self.insert(start, contents);
            rest = behind;
        }
        self.good = (bytes.len() - rest.len()) as u64;
    }

    fn insert(&mut self, start: u64, contents: &[u8]) {
        for gap in self.gaps(start..start + contents.len() as u64) {
            let piece = (gap.start - start) as usize..(gap.end - start) as usize;
            self.parts.insert(gap.start, contents[piece].to_vec());
        }
    }

    /// Returns the parts of `range` that are missing, in order.
    pub fn gaps(&self, range: Range<u64>) -> Vec<Range<u64>> {
        let (mut gaps, mut at) = (Vec::new(), range.start);
        let first = self.parts.range(..=range.start).next_back().map_or(range.start, |(start, _)| *start);
        for (start, part) in self.parts.range(first..range.end.max(first)) {
            if *start > at {
                gaps.push(at..*start);
            }
            at = at.max(start + part.len() as u64);
        }
        if at < range.end {
            gaps.push(at..range.end);
        }
        gaps
    }

    /// Fills `out` with the bytes from `start` on; all of them must be there.
    pub fn copy(&self, start: u64, out: &mut [u8]) {
        let end = start + out.len() as u64;
        let first = self.parts.range(..=start).next_back().map_or(start, |(first, _)| *first);
        for (at, part) in self.parts.range(first..end.max(first)) {
            let (from, to) = (start.max(*at), end.min(at + part.len() as u64));
            if from < to {
                let piece = &part[(from - at) as usize..(to - at) as usize];
                out[(from - start) as usize..(to - start) as usize].copy_from_slice(piece);
            }
        }
    }

    /// Adds a part to memory and log. The caller holds the lock of the file.
    ///
    /// # Errors
    /// The log cannot be written; memory has the part all the same.
    pub fn keep(&mut self, start: u64, contents: &[u8]) -> io::Result<()> {
        self.insert(start, contents);
        if let Some(folder) = self.path.parent() {
            std::fs::create_dir_all(folder)?;
        }
        let mut file = anemoe_io::open_regular(&self.path, File::options().create(true).append(true))?;
        if file.metadata()?.len() != self.good {
            // Another process wrote to the log, or a record was truncated.
            self.load();
            file.set_len(self.good)?;
        }
        let length = (HEAD + contents.len()) as u64;
        if self.good + length > MAX_LOG {
            return Ok(());
        }
        let mut bytes = start.to_le_bytes().to_vec();
        bytes.extend((contents.len() as u64).to_le_bytes());
        bytes.extend_from_slice(&Sha256::digest(contents));
        bytes.extend_from_slice(contents);
        file.write_all(&bytes)?;
        self.good += length;
        Ok(())
    }
}

/// Splits off the first record: its offset, its contents, and the bytes after it; `None` where it is damaged.
fn record(bytes: &[u8]) -> Option<(u64, &[u8], &[u8])> {
    let (head, rest) = bytes.split_at_checked(HEAD)?;
    let number = |at: usize| Some(u64::from_le_bytes(*head.get(at..)?.first_chunk()?));
    let (start, length) = (number(0)?, number(8)?);
    let (contents, behind) = rest.split_at_checked(usize::try_from(length).ok()?)?;
    start.checked_add(length)?;
    (Sha256::digest(contents)[..] == head[16..]).then_some((start, contents, behind))
}

#[cfg(test)]
mod tests {
    use super::*;

    fn log() -> (tempfile::TempDir, RangeLog) {
        let dir = tempfile::tempdir().unwrap();
        let log = RangeLog::open(&dir.path().join("ranges/x"));
        (dir, log)
    }

    #[test]
    fn parts_are_found_again() {
        let (_dir, mut log) = log();
        assert_eq!(log.gaps(3..9), vec![3..9]);
        log.keep(10, b"abcd").unwrap();
        log.keep(16, b"xy").unwrap();
        log.keep(14, b"ef").unwrap();
        for log in [&log, &RangeLog::open(&log.path)] {
            assert_eq!(log.gaps(8..20), [8..10, 18..20]);
            assert!(log.gaps(11..18).is_empty());
            let mut out = [0; 6];
            log.copy(11, &mut out);
            assert_eq!(&out, b"bcdefx");
        }
        log.keep(8, b"..abcdefxy..").unwrap();
        let again = RangeLog::open(&log.path);
        assert!(again.gaps(8..20).is_empty());
        let mut out = [0; 12];
        again.copy(8, &mut out);
        assert_eq!(&out, b"..abcdefxy..");
    }

    #[test]
    fn a_damaged_record_ends_the_log_and_is_written_over() {
        let (_dir, mut log) = log();
        log.keep(0, b"first").unwrap();
        let good = std::fs::read(&log.path).unwrap();
        log.keep(100, b"second").unwrap();
        let whole = std::fs::read(&log.path).unwrap();
        let mut wrong = whole.clone();
        wrong[good.len() + HEAD] ^= 1;
        let mut huge = whole.clone();
        huge[good.len() + 8..good.len() + 16].copy_from_slice(&(1u64 << 60).to_le_bytes());
        for bytes in [whole[..whole.len() - 1].to_vec(), whole[..good.len() + 3].to_vec(), wrong, huge] {
            std::fs::write(&log.path, &bytes).unwrap();
            let mut log = RangeLog::open(&log.path);
            assert_eq!(log.gaps(0..106), vec![5..106]);
            log.keep(100, b"second").unwrap();
            assert_eq!(std::fs::read(&log.path).unwrap(), whole);
        }
    }

    #[test]
    fn two_processes_write_one_behind_the_other() {
        let (_dir, mut log) = log();
        let mut other = RangeLog::open(&log.path);
        log.keep(0, b"ab").unwrap();
        other.keep(2, b"cd").unwrap();
        log.keep(4, b"ef").unwrap();
        assert!(RangeLog::open(&log.path).gaps(0..6).is_empty() && log.gaps(0..6).is_empty());
    }
}
