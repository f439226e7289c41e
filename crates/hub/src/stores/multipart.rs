//! Uploads in parts: a file of any size with one part in memory.
//!
//! The parts that a store has taken are noted in a record beside the bundle, each with the SHA-256 of its bytes. A later
//! push of the same folder goes on behind the last one whose bytes are still those of the file. Without the record, or
//! where the store has dropped the upload, the file is sent from its beginning. Nothing is deleted from the store: a
//! bucket's own rule ends uploads that nobody goes on with.
//!
//! ```text
//! .NAME.anemoe-push/HASH    id of the upload, then for each part: SHA-256, blank, id of the part; one a line
//! ```

use super::cloud_bucket::CloudBucket;
use super::cloud_http::{CloudFailure, CloudResult};
use super::object::Contents;
use crate::http_client::Trouble;
use crate::{Error, Result};
use anemoe_io::{hex, open_input, open_regular};
use object_store::multipart::PartId;
use object_store::path::Path as Key;
use sha2::{Digest, Sha256};
use std::cell::Cell;
use std::fs::{self, File};
use std::io::{Read, Write};
use std::path::Path;

/// Bytes of a part, and of the largest object sent in one piece. S3 requires at least 5 MiB; memory is this times the jobs.
pub const PART_BYTES: u64 = 16 << 20;
/// Most parts of an object; the limit of S3.
const MAX_PARTS: u64 = 10_000;
/// Most bytes of a record.
const MAX_RECORD: u64 = 16 << 20;

/// Returns the part size of a file in bytes. It depends on the length alone, so that a later run makes the same parts.
fn part_bytes(bytes: u64) -> u64 {
    const MIB: u64 = 1 << 20;
    PART_BYTES.max(bytes.div_ceil(MAX_PARTS).div_ceil(MIB) * MIB)
}

/// An unfinished upload.
struct Upload {
    /// The locked record; `None` where another push holds it, or no file can be there.
    record: Option<File>,
    id: Option<String>,
    /// Parts that the store has: SHA-256, and id.
    parts: Vec<(String, String)>,
}

impl Upload {
    fn open(record: &Path) -> Upload {
        let options = &mut File::options();
        let opened = fs::create_dir_all(record.parent().unwrap_or(record))
            .and_then(|()| open_regular(record, options.read(true).append(true).create(true)));
        let mut upload = Upload { record: None, id: None, parts: Vec::new() };
        let Some(mut file) = opened.ok().filter(|file| file.try_lock().is_ok()) else { return upload };
        let mut text = String::new();
        if (&mut file).take(MAX_RECORD).read_to_string(&mut text).is_ok() {
            // A line without an end was not written to its end.
            let mut lines = text.split_inclusive('\n').map_while(|line| line.strip_suffix('\n'));
            upload.id = lines.next().map(str::to_string);
            let parts = lines.map_while(|line| line.split_once(' '));
            upload.parts = parts.map(|(hash, id)| (hash.into(), id.into())).collect();
        }
        upload.record = Some(file);
        upload
    }

    /// Writes the record anew. An upload that cannot be recorded begins anew the next time.
    fn begin(&mut self, id: String) {
        self.id = Some(id);
        self.keep(0);
    }

    /// Forgets all but the first parts.
    fn keep(&mut self, parts: usize) {
        self.parts.truncate(parts);
        if let Some(file) = &mut self.record {
            let _ = file.set_len(0);
        }
        self.note(&self.id.clone().unwrap_or_default());
        for (hash, id) in self.parts.clone() {
            self.note(&format!("{hash} {id}"));
        }
    }

    fn note(&mut self, line: &str) {
        if let Some(file) = &mut self.record {
            let _ = file.write_all(format!("{line}\n").as_bytes());
        }
    }

    fn add(&mut self, hash: String, id: String) {
        self.note(&format!("{hash} {id}"));
        self.parts.push((hash, id));
    }

    /// Tells whether every part of a file of this length was sent.
    fn has_all(&self, bytes: u64) -> bool {
        self.parts.len() as u64 == bytes.div_ceil(part_bytes(bytes))
    }
}

/// Sends a file in parts, without those that an earlier run sent to the upload of `record`.
///
/// # Errors
/// Fails like [`ObjectStore::send`](super::object::ObjectStore::send); parts that were sent stay.
pub fn send_parts(
    bucket: &CloudBucket,
    key: &str,
    file: &Path,
    contents: &Contents,
    record: &Path,
    moved: &dyn Fn(i64),
) -> Result<u64> {
    let path = bucket.path(key);
    let mut upload = Upload::open(record);
    let mut sent = 0;
    // An upload that the server does not know any more is followed by a new one, once.
    for is_last in [false, true] {
        if upload.id.is_none() {
            let id = bucket.wait(bucket.cloud.create_multipart(&path));
            upload.begin(id.map_err(|failure| bucket.failed(key, failure))?);
        }
        let counted = Cell::new(0);
        let count = |bytes: u64| {
            counted.set(counted.get() + bytes as i64);
            moved(bytes as i64);
        };
        let ended = fill(bucket, &path, file, contents, &mut upload, (&count, &mut sent))?;
        let Err(failure) = ended else { break };
        match &failure {
            // It is complete, and the answer was lost.
            CloudFailure::Refused(refusal)
                if refusal.is_lost_upload()
                    && upload.has_all(contents.bytes)
                    && matches!(bucket.head(key), Ok(Some((bytes, _))) if bytes == contents.bytes) =>
            {
                break;
            }
            CloudFailure::Refused(refusal) if refusal.is_lost_upload() && !is_last => {}
            _ => return Err(bucket.failed(key, failure)),
        }
        moved(-counted.get());
        upload.id = None;
    }
    if upload.record.is_some() {
        let _ = fs::remove_file(record);
        // Succeeds where no other file is on its way.
        let _ = record.parent().map(fs::remove_dir);
    }
    match bucket.head(key)? {
        Some((found, _)) if found != contents.bytes => {
            let what = format!("the server put {found} bytes together where {} were sent", contents.bytes);
            Err(bucket.failed(key, Trouble::Lasting(what).into()))
        }
        // Some users may write but not read.
        _ => Ok(sent),
    }
}

/// Sends the missing parts of a file to an upload, and completes it. Adds the bytes that were sent to `sent`.
fn fill(
    bucket: &CloudBucket,
    path: &Key,
    file: &Path,
    contents: &Contents,
    upload: &mut Upload,
    (count, sent): (&dyn Fn(u64), &mut u64),
) -> Result<CloudResult<()>> {
    let unread = |e| Error::io(file, e);
    let id = upload.id.clone().unwrap_or_default();
    let mut from = open_input(file, u64::MAX).map_err(unread)?;
    let mut hasher = Sha256::new();
    let size = part_bytes(contents.bytes);
    let mut left = contents.bytes;
    for number in 0.. {
        let mut piece = Vec::with_capacity(size.min(left) as usize);
        (&mut from).take(size.min(left)).read_to_end(&mut piece).map_err(unread)?;
        if piece.is_empty() {
            break;
        }
        let bytes = piece.len() as u64;
        left -= bytes;
        hasher.update(&piece);
        let hash = hex(Sha256::digest(&piece));
        if upload.parts.get(number).is_none_or(|(known, _)| *known != hash) {
            if number < upload.parts.len() {
                upload.keep(number);
            }
            match bucket.wait(bucket.cloud.put_part(path, &id, number, piece.into())) {
                Ok(part) => upload.add(hash, part.content_id),
                Err(failure) => return Ok(Err(failure)),
            }
            *sent += bytes;
        }
        count(bytes);
    }
    let is_more = from.read(&mut [0]).map_err(unread)? > 0;
    if left > 0 || is_more || hex(hasher.finalize()) != contents.sha256 {
        return Err(Error::invalid(file, "file: it changed while it was sent"));
    }
    let parts = upload.parts.iter().map(|(_, id)| PartId { content_id: id.clone() }).collect();
    Ok(bucket.wait(bucket.cloud.complete_multipart(path, &id, parts)).map(|_| ()))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn parts_are_few_enough_and_small_enough() {
        assert_eq!(part_bytes(PART_BYTES + 1), PART_BYTES);
        assert_eq!(part_bytes(PART_BYTES * MAX_PARTS), PART_BYTES);
        let large = 1 << 40;
        assert!(large / part_bytes(large) < MAX_PARTS && part_bytes(large) < 2 * large / MAX_PARTS);
        assert_eq!(part_bytes(large) % (1 << 20), 0);
    }

    #[test]
    fn a_record_is_read_to_its_last_whole_line_by_one_push_at_a_time() {
        let dir = tempfile::tempdir().unwrap();
        let path = dir.path().join("push/x");
        let mut upload = Upload::open(&path);
        assert_eq!((&upload.id, upload.record.is_some()), (&None, true));
        upload.begin(String::new());
        upload.add("1".into(), "a b".into());
        assert!(Upload::open(&path).record.is_none());
        upload.add("2".into(), "c".into());
        drop(upload);
        File::options().append(true).open(&path).unwrap().write_all(b"3 half").unwrap();
        let mut upload = Upload::open(&path);
        let part = |hash: &str, id: &str| (hash.to_string(), id.to_string());
        assert_eq!(
            (upload.id.as_deref(), &upload.parts),
            (Some(""), &vec![part("1", "a b"), part("2", "c")])
        );
        upload.keep(1);
        drop(upload);
        let mut upload = Upload::open(&path);
        assert_eq!((upload.id.as_deref(), &upload.parts), (Some(""), &vec![part("1", "a b")]));
        upload.begin("other".into());
        drop(upload);
        let upload = Upload::open(&path);
        assert_eq!((upload.id.as_deref(), upload.parts.len()), (Some("other"), 0));
    }
}
