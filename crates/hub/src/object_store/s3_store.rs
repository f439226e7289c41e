//! A store in a bucket of an S3-compatible server.

use super::object::{Contents, ObjectStore};
use super::s3_answers::S3Refusal;
use super::s3_client::{CHECKSUM, REST, S3Client, S3Request, VALID};
use super::s3_multipart::{PART_BYTES, send_parts};
use super::s3_settings::S3Settings;
use crate::blob_hash::BlobHash;
use crate::download::{DownloadFailure, Wanted, download};
use crate::{Error, Result, xml};
use anemoe_io::hex;
use base64::Engine;
use base64::prelude::BASE64_STANDARD;
use percent_encoding::percent_decode_str;
use rusty_s3::S3Action;
use rusty_s3::actions::ListObjectsV2;
use sha2::{Digest, Sha256};
use std::collections::BTreeSet;
use std::path::Path;

/// Most bytes of a page of a list: a thousand keys of a kilobyte, with their attributes.
const MAX_PAGE: u64 = 4 << 20;
/// Most pages of a list, and most names; S3 puts a thousand names on a page.
const MAX_PAGES: usize = 500;
const MAX_NAMES: usize = 100_000;
/// Most pages without a new name, one after the other.
const MAX_IDLE_PAGES: usize = 50;

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

    /// Makes the request for an object, and hands it to `ask`.
    fn get<T>(&self, key: &str, ask: impl FnOnce(&S3Request) -> Result<T>) -> Result<T> {
        let full = self.client.full(key);
        let sign = || self.client.bucket.get_object(self.client.credentials(), &full).sign(VALID);
        ask(&S3Request { method: "GET", sign: &sign, headers: &[], body: &[], moved: &|_| () })
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
        self.client.send(key, &request)?.map(|_| ()).map_err(|refusal| self.client.refused(key, &refusal))
    }
}

impl ObjectStore for S3Store {
    fn prepare(&self) -> Result<()> {
        // A user who may not read may still write; every other refusal would hit later requests, too.
        match self.get("bundles/none", |request| self.client.request("bundles/none", request))? {
            Err(refusal) if !refusal.is_of_this_request() => Err(self.client.refused("", &refusal)),
            _ => Ok(()),
        }
    }

    fn find(&self, key: &str) -> Result<Option<(u64, Option<String>)>> {
        self.client.find(key)
    }

    fn holds(&self, key: &str, contents: &Contents) -> Result<bool> {
        for tries in 1.. {
            let why = match self.get(key, |request| self.client.request(key, request))? {
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
        match self.get(key, |request| self.client.ask(key, request, limit))? {
            Ok(reply) => Ok(Some(reply.body)),
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
        let mut idle = 0;
        for _ in 0..MAX_PAGES {
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
            let page = self.client.ask(folder, &request, MAX_PAGE)?;
            let page = page.map_err(|refusal| self.client.refused(folder, &refusal))?;
            let (keys, token) = parse_page(&page.text())
                .map_err(|what| self.client.failed(folder, format!("list of objects: {what}")))?;
            let before = names.len();
            names.extend(keys.iter().filter_map(|key| {
                let name = key.strip_prefix(&prefix)?.trim_end_matches('/').to_string();
                (!name.is_empty() && !name.contains('/')).then_some(name)
            }));
            idle = if names.len() > before { 0 } else { idle + 1 };
            match token {
                None => return Ok(names.into_iter().collect()),
                Some(token) if next.as_ref() == Some(&token) => break,
                Some(_) if names.len() > MAX_NAMES || idle > MAX_IDLE_PAGES => break,
                token => next = token,
            }
        }
        let what = format!("the server's list does not end, after {} names", names.len());
        Err(self.client.failed(folder, what))
    }

    fn place(&self, key: &str) -> String {
        self.client.place(key)
    }
}

/// Reads a page of a list: its keys and common prefixes, and the token of the next page.
fn parse_page(text: &str) -> std::result::Result<(Vec<String>, Option<String>), String> {
    let page = xml::parse(text)?;
    let root = page.root_element();
    if root.tag_name().name() != "ListBucketResult" {
        return Err(format!("found <{}>, expected <ListBucketResult>", root.tag_name().name()));
    }
    let is_encoded = xml::text(page.root(), "EncodingType").is_some_and(|way| way == "url");
    let decoded = |key: String| match is_encoded {
        // S3 writes a blank as `+`.
        true => percent_decode_str(&key.replace('+', " ")).decode_utf8_lossy().into_owned(),
        false => key,
    };
    let texts = |outer, inner| xml::all(page.root(), outer).filter_map(move |node| xml::text(node, inner));
    let keys = texts("Contents", "Key").chain(texts("CommonPrefixes", "Prefix")).map(decoded).collect();
    let is_cut = xml::text(page.root(), "IsTruncated").is_none_or(|word| word == "true");
    let token = xml::text(page.root(), "NextContinuationToken").filter(|token| is_cut && !token.is_empty());
    Ok((keys, token))
}
