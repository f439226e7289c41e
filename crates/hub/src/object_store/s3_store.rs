//! A store in a bucket of an S3-compatible server.

use super::object::{Contents, ObjectStore};
use super::s3_answers::{S3Refusal, text_of};
use super::s3_client::{CHECKSUM, REST, S3Client, S3Request, VALID};
use super::s3_multipart::{PART_BYTES, send_parts};
use super::s3_settings::S3Settings;
use crate::blob_hash::BlobHash;
use crate::download::{DownloadFailure, Wanted, download};
use crate::http_client::Answer;
use crate::{Error, Result};
use anemoe_io::hex;
use base64::Engine;
use base64::prelude::BASE64_STANDARD;
use rusty_s3::S3Action;
use rusty_s3::actions::ListObjectsV2;
use sha2::{Digest, Sha256};
use std::collections::BTreeSet;
use std::path::Path;

/// Most bytes of a list: a thousand keys of a kilobyte, with their attributes.
const MAX_LIST: u64 = 4 << 20;

/// Tries to read an object to its end.
const READ_TRIES: u32 = 4;

/// A store in a bucket.
pub struct S3Store {
    client: S3Client,
}

impl S3Store {
    /// Makes a store in a bucket, below a prefix.
    ///
    /// # Errors
    /// The certificates cannot be read, or the server's address cannot contain a bucket.
    pub fn new(settings: S3Settings, bucket: &str, prefix: &str) -> Result<S3Store> {
        Ok(S3Store { client: S3Client::new(settings, bucket, prefix)? })
    }

    fn get(&self, key: &str) -> Result<std::result::Result<Answer, S3Refusal>> {
        let full = self.client.full(key);
        let sign = || self.client.bucket.get_object(self.client.credentials(), &full).sign(VALID);
        self.client
            .request(key, &S3Request { method: "GET", sign: &sign, headers: &[], body: &[], moved: &|_| () })
    }

    /// Sends an object in one piece; the server checks its hash.
    fn put(&self, key: &str, body: &[u8], moved: &dyn Fn(i64)) -> Result<()> {
        let full = self.client.full(key);
        let checksum = BASE64_STANDARD.encode(Sha256::digest(body));
        let sign = || {
            let mut action = self.client.bucket.put_object(self.client.credentials(), &full);
            action.headers_mut().insert(CHECKSUM, checksum.clone());
            action.sign(VALID)
        };
        let headers = [(CHECKSUM, checksum.clone())];
        let request = S3Request { method: "PUT", sign: &sign, headers: &headers, body, moved };
        self.client.request(key, &request)?.map(|_| ()).map_err(|refusal| self.client.refused(key, &refusal))
    }
}

impl ObjectStore for S3Store {
    fn prepare(&self) -> Result<()> {
        // A user who may not read may still write; every other refusal would hit later requests, too.
        match self.get("bundles/none")? {
            Err(refusal) if !refusal.is_of_this_request() => Err(self.client.refused("", &refusal)),
            _ => Ok(()),
        }
    }

    fn find(&self, key: &str) -> Result<Option<(u64, Option<String>)>> {
        self.client.find(key)
    }

    fn holds(&self, key: &str, contents: &Contents) -> Result<bool> {
        for tries in 1.. {
            let why = match self.get(key)? {
                Ok(answer) => match Contents::of_reader(&mut answer.reader()) {
                    Ok(found) => return Ok(found == *contents),
                    Err(e) => e,
                },
                Err(refusal) if refusal.is_absence() => return Ok(false),
                Err(refusal) => return Err(self.client.refused(key, &refusal)),
            };
            // A server may have lost a piece of an object, and end the connection there each time.
            if tries >= READ_TRIES {
                let place = self.client.place(key);
                tracing::warn!("{place} cannot be read to its end ({why}): it is sent again");
                break;
            }
            std::thread::sleep(REST * 2u32.pow(tries - 1));
        }
        Ok(false)
    }

    fn write(&self, key: &str, bytes: &[u8]) -> Result<()> {
        self.put(key, bytes, &|_| ())
    }

    fn send(&self, key: &str, file: &Path, contents: &Contents, moved: &dyn Fn(i64)) -> Result<u64> {
        if contents.bytes > PART_BYTES {
            return send_parts(&self.client, key, file, contents, moved);
        }
        let body = anemoe_io::read_input(file, PART_BYTES).map_err(|e| Error::io(file, e))?;
        if hex(Sha256::digest(&body)) != contents.sha256 {
            return Err(Error::invalid(file, "file: it changed while it was sent"));
        }
        self.put(key, &body, moved).map(|()| contents.bytes)
    }

    fn read(&self, key: &str, limit: u64) -> Result<Option<Vec<u8>>> {
        match self.get(key)? {
            Ok(answer) => answer.read(limit).map(Some).map_err(|e| self.client.failed(key, e.to_string())),
            Err(refusal) if refusal.is_absence() => Ok(None),
            Err(refusal) => Err(self.client.refused(key, &refusal)),
        }
    }

    fn bring(
        &self,
        key: &str,
        contents: &Contents,
        partial: &Path,
        target: &Path,
        moved: &dyn Fn(i64),
    ) -> Result<u64> {
        let url =
            self.client.bucket.get_object(self.client.credentials(), &self.client.full(key)).sign(VALID);
        let hash = BlobHash::Sha256(contents.sha256.clone());
        let wanted = Wanted { url: &url, token: None, hash: &hash, size: contents.bytes, follow: false };
        // The first report counts bytes that were there; a later report of 0 means that the download starts anew.
        let (mut there, mut begun) = (0, None);
        let mut told = |now: u64| {
            moved(now as i64 - there);
            there = now as i64;
            begun = Some(begun.unwrap_or(now).min(now));
        };
        download(self.client.http(), &wanted, partial, target, &mut told).map_err(
            |failure| match failure {
                DownloadFailure::Disk(e) => Error::io(partial, e),
                DownloadFailure::Status(status, code) => {
                    self.client.refused(key, &S3Refusal::of_status(status, code))
                }
                DownloadFailure::WrongContents(what) => Error::invalid(
                    self.client.place(key),
                    format!("object: {what}; push the bundle again with --verify"),
                ),
                DownloadFailure::Network(what) => self.client.failed(
                    key,
                    format!(
                        "{what}; what came stays, and the same command goes on from there; if it ends at the same byte, \
                         push the bundle again with --verify"
                    ),
                ),
            },
        )?;
        Ok(contents.bytes - begun.unwrap_or(0).min(contents.bytes))
    }

    fn list(&self, folder: &str) -> Result<Vec<String>> {
        let prefix = format!("{}/", self.client.full(folder));
        let (mut names, mut next): (BTreeSet<String>, Option<String>) = Default::default();
        loop {
            let sign = || {
                let mut action = ListObjectsV2::new(&self.client.bucket, self.client.credentials());
                action.with_prefix(prefix.as_str());
                action.with_delimiter("/");
                if let Some(token) = &next {
                    action.with_continuation_token(token.as_str());
                }
                action.sign(VALID)
            };
            let request = S3Request { method: "GET", sign: &sign, headers: &[], body: &[], moved: &|_| () };
            let answer = self
                .client
                .request(folder, &request)?
                .map_err(|refusal| self.client.refused(folder, &refusal))?;
            let text = text_of(answer, MAX_LIST).map_err(|what| self.client.failed(folder, what))?;
            let list = ListObjectsV2::parse_response(&text)
                .map_err(|e| self.client.failed(folder, format!("list of objects: {e}")))?;
            let keys = list.contents.into_iter().map(|c| c.key);
            let found = keys.chain(list.common_prefixes.into_iter().map(|p| p.prefix));
            let before = names.len();
            names.extend(found.filter_map(|key| {
                let name = key.strip_prefix(&prefix)?.trim_end_matches('/').to_string();
                (!name.is_empty() && !name.contains('/')).then_some(name)
            }));
            match list.next_continuation_token {
                // Stops at a server that sends the same page forever.
                Some(token) if names.len() > before => next = Some(token),
                _ => return Ok(names.into_iter().collect()),
            }
        }
    }

    fn place(&self, key: &str) -> String {
        self.client.place(key)
    }
}
