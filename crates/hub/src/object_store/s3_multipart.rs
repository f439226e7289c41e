//! Multipart uploads: a file of any size with one part in memory; an interrupted upload continues.

use super::object::Contents;
use super::s3_answers::S3Refusal;
use super::s3_client::{REST, S3Client, S3Request, VALID};
use crate::{Error, Result, xml};
use anemoe_io::{hex, open_input};
use base64::Engine;
use base64::prelude::BASE64_STANDARD;
use md5::Md5;
use rusty_s3::actions::ListParts;
use rusty_s3::{Method, S3Action};
use sha2::{Digest, Sha256};
use std::cell::Cell;
use std::collections::BTreeMap;
use std::io::Read;
use std::path::Path;
use url::Url;

/// Bytes of a part, and of the largest object sent in one piece. S3 requires at least 5 MiB; memory is this times the jobs.
pub const PART_BYTES: u64 = 16 << 20;
/// Most parts of an object; the limit of S3.
const MAX_PARTS: u64 = 10_000;
/// Most unfinished uploads of one object that are inspected.
const MAX_UPLOADS: usize = 8;
/// Most uploads of one object that may be lost to other pushes.
const MAX_LOST: usize = 4;
/// Most requests to put parts together while the server says that a part is another one.
const MAX_COMPLETIONS: usize = 4;
/// Most bytes of a list of uploads or parts.
const MAX_LIST: u64 = 4 << 20;

/// An unfinished upload: its id, and the parts that the server has.
struct Upload {
    id: String,
    /// Length and MD5 by part number.
    parts: BTreeMap<u16, (u64, String)>,
}

/// Returns the part size of a file in bytes. It depends on the length alone, so that a later run makes the same parts.
fn part_bytes(bytes: u64) -> u64 {
    const MIB: u64 = 1 << 20;
    PART_BYTES.max(bytes.div_ceil(MAX_PARTS).div_ceil(MIB) * MIB)
}

/// Sends a file in parts, without the parts that an earlier run sent. Another push may fill the same upload, and end it
/// first: then the object is there, or an upload of its own follows.
///
/// # Errors
/// Fails like [`ObjectStore::send`](super::object::ObjectStore::send); parts that were sent stay.
pub fn send_parts(
    client: &S3Client,
    key: &str,
    file: &Path,
    contents: &Contents,
    moved: &dyn Fn(i64),
) -> Result<u64> {
    // An object that is there before is to be replaced; one that is there later is another push's.
    let was_there = client.find(key)?.is_some();
    let is_there =
        || !was_there && matches!(client.find(key), Ok(Some((bytes, _))) if bytes == contents.bytes);
    let (mut sent, mut last) = (0, None);
    for attempt in 0..MAX_LOST {
        let known = if attempt == 0 { find_unfinished_upload(client, key) } else { None };
        let is_joined = known.is_some();
        let upload = match known {
            Some(upload) => upload,
            None => Upload { id: create(client, key)?, parts: BTreeMap::new() },
        };
        let told = Cell::new(0);
        let counted = |n: i64| {
            told.set(told.get() + n);
            moved(n);
        };
        match send_missing(client, key, file, contents, &upload, (&counted, &mut sent))? {
            UploadOutcome::Complete => {
                return match client.find(key)? {
                    Some((found, _)) if found != contents.bytes => Err(client.failed(
                        key,
                        format!("the server put {found} bytes together where {} were sent", contents.bytes),
                    )),
                    // Some users may write but not read.
                    _ => Ok(sent),
                };
            }
            _ if is_there() => {
                moved(contents.bytes as i64 - told.get());
                return Ok(sent);
            }
            UploadOutcome::Lost(refusal) if is_joined || refusal.is_lost_upload() => {
                moved(-told.get());
                last = Some(refusal);
            }
            UploadOutcome::Lost(refusal) => return Err(client.refused(key, &refusal)),
            UploadOutcome::Failed(e) => return Err(e),
        }
    }
    Err(last
        .map_or_else(|| client.failed(key, "no upload was made"), |refusal| client.refused(key, &refusal)))
}

/// End of an upload.
enum UploadOutcome {
    /// The server put the parts together.
    Complete,
    /// The server does not know the upload or its parts any more: another push completed, aborted or rewrites it.
    Lost(S3Refusal),
    /// The server did not answer, or only with passing faults.
    Failed(Error),
}

/// Sends the missing parts of a file to an upload, and completes it. Adds the bytes that were sent to `sent`.
fn send_missing(
    client: &S3Client,
    key: &str,
    file: &Path,
    contents: &Contents,
    upload: &Upload,
    (moved, sent): (&dyn Fn(i64), &mut u64),
) -> Result<UploadOutcome> {
    let full = client.full(key);
    let failed = |e| Error::io(file, e);
    let mut from = open_input(file, u64::MAX).map_err(failed)?;
    let (mut hasher, mut tags) = (Sha256::new(), Vec::new());
    let size = part_bytes(contents.bytes);
    let mut left = contents.bytes;
    let mut piece = Vec::new();
    for number in 1..=u16::MAX {
        piece.clear();
        (&mut from).take(size.min(left)).read_to_end(&mut piece).map_err(failed)?;
        if piece.is_empty() {
            break;
        }
        left -= piece.len() as u64;
        hasher.update(&piece);
        let md5 = Md5::digest(&piece);
        let there = upload.parts.get(&number);
        let is_same = |(bytes, tag): &&(u64, String)| {
            *bytes == piece.len() as u64 && tag.eq_ignore_ascii_case(&hex(md5))
        };
        if let Some((_, tag)) = there.filter(is_same) {
            moved(piece.len() as i64);
            tags.push(format!("\"{tag}\""));
            continue;
        }
        let sign = || client.bucket.upload_part(client.credentials(), &full, number, &upload.id).sign(VALID);
        let headers = [("content-md5", BASE64_STANDARD.encode(md5))];
        let request = S3Request { method: "PUT", sign: &sign, headers: &headers, body: &piece, moved };
        let reply = match client.send(key, &request) {
            Ok(Ok(reply)) => reply,
            Ok(Err(refusal)) if refusal.is_lost_upload() => return Ok(UploadOutcome::Lost(refusal)),
            Ok(Err(refusal)) => return Err(client.refused(key, &refusal)),
            Err(e) => return Ok(UploadOutcome::Failed(e)),
        };
        *sent += piece.len() as u64;
        let tag = reply.tag.ok_or_else(|| client.failed(key, "the server gives a part no tag"))?;
        tags.push(format!("\"{tag}\""));
    }
    if left > 0 || from.read(&mut [0]).map_err(failed)? > 0 || hex(hasher.finalize()) != contents.sha256 {
        return Err(Error::invalid(file, "file: it changed while it was sent"));
    }
    complete(client, key, &upload.id, &tags)
}

fn create(client: &S3Client, key: &str) -> Result<String> {
    let full = client.full(key);
    let sign = || client.bucket.create_multipart_upload(client.credentials(), &full).sign(VALID);
    let request = S3Request { method: "POST", sign: &sign, headers: &[], body: &[], moved: &|_| () };
    let reply = client.send(key, &request)?.map_err(|refusal| client.refused(key, &refusal))?;
    let text = reply.text();
    let id = xml::parse(&text).map(|answer| xml::text(answer.root(), "UploadId").filter(|id| !id.is_empty()));
    match id {
        Ok(Some(id)) => Ok(id),
        Ok(None) => Err(client.failed(key, "the server gives an upload no UploadId")),
        Err(what) => Err(client.failed(key, format!("upload: {what}"))),
    }
}

/// Returns the unfinished upload of this object with the most parts; `None` where there is none or the server does not
/// list uploads.
fn find_unfinished_upload(client: &S3Client, key: &str) -> Option<Upload> {
    let full = client.full(key);
    let sign = || sign_list(client, &full);
    let request = S3Request { method: "GET", sign: &sign, headers: &[], body: &[], moved: &|_| () };
    let reply = client.ask(key, &request, MAX_LIST).ok()?.ok()?;
    let text = reply.text();
    let answer = xml::parse(&text).ok()?;
    let is_it = |upload: &xml::Node| xml::text(*upload, "Key").as_ref() == Some(&full);
    let ids =
        xml::all(answer.root(), "Upload").filter(is_it).filter_map(|upload| xml::text(upload, "UploadId"));
    let uploads = ids.take(MAX_UPLOADS).filter_map(|id| Some(Upload { parts: parts(client, key, &id)?, id }));
    uploads.max_by_key(|upload| upload.parts.len())
}

/// Makes a signed address that lists uploads; rusty-s3 has no such action.
fn sign_list(client: &S3Client, key: &str) -> Url {
    let query = [("prefix", key), ("uploads", "")];
    let mut url = client.bucket.base_url().clone();
    let Some(credentials) = client.credentials() else {
        url.query_pairs_mut().extend_pairs(query);
        return url;
    };
    let (id, secret, token) = (credentials.key(), credentials.secret(), credentials.token());
    let (region, seconds) = (client.bucket.region(), VALID.as_secs());
    let now = jiff::Timestamp::now();
    let none = std::iter::empty();
    rusty_s3::signing::sign(
        &now,
        Method::Get,
        url,
        id,
        secret,
        token,
        region,
        seconds,
        query.into_iter(),
        none,
    )
}

/// Returns the parts of an upload that the server has.
fn parts(client: &S3Client, key: &str, id: &str) -> Option<BTreeMap<u16, (u64, String)>> {
    let full = client.full(key);
    let (mut found, mut after) = (BTreeMap::new(), None);
    loop {
        let sign = || {
            let mut action = ListParts::new(&client.bucket, client.credentials(), &full, id);
            if let Some(after) = after {
                action.set_part_number_marker(after);
            }
            action.sign(VALID)
        };
        let request = S3Request { method: "GET", sign: &sign, headers: &[], body: &[], moved: &|_| () };
        let reply = client.ask(key, &request, MAX_LIST).ok()?.ok()?;
        let text = reply.text();
        let answer = xml::parse(&text).ok()?;
        for part in xml::all(answer.root(), "Part") {
            let number = xml::text(part, "PartNumber")?.parse().ok()?;
            let bytes = xml::text(part, "Size")?.parse().ok()?;
            found.insert(number, (bytes, xml::text(part, "ETag")?.trim_matches('"').to_string()));
        }
        let is_cut = xml::text(answer.root(), "IsTruncated").is_some_and(|word| word == "true");
        match xml::text(answer.root(), "NextPartNumberMarker").and_then(|n| n.parse().ok()) {
            Some(next) if is_cut && Some(next) > after => after = Some(next),
            _ => return Some(found),
        }
    }
}

/// Asks the server to put the parts together, again while another push rewrites one of them.
fn complete(client: &S3Client, key: &str, id: &str, tags: &[String]) -> Result<UploadOutcome> {
    let full = client.full(key);
    let action = || {
        let tags = tags.iter().map(String::as_str);
        client.bucket.complete_multipart_upload(client.credentials(), &full, id, tags)
    };
    let sign = || action().sign(VALID);
    let body = action().body();
    let headers = [("content-type", "application/xml".to_string())];
    let request =
        S3Request { method: "POST", sign: &sign, headers: &headers, body: body.as_bytes(), moved: &|_| () };
    let mut tries = 0;
    loop {
        tries += 1;
        let Err(refusal) = client.send(key, &request)? else { return Ok(UploadOutcome::Complete) };
        match refusal.code.as_deref() {
            // Another push of the same contents was faster, or the answer to an earlier try was lost.
            Some("NoSuchUpload") => return Ok(UploadOutcome::Lost(refusal)),
            Some("InvalidPart" | "InvalidPartOrder") if tries < MAX_COMPLETIONS => std::thread::sleep(REST),
            Some("InvalidPart" | "InvalidPartOrder") => return Ok(UploadOutcome::Lost(refusal)),
            _ => return Err(client.refused(key, &refusal)),
        }
    }
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
}
