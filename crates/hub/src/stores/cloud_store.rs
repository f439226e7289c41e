//! A store in a bucket.

use super::cloud_bucket::{CloudBucket, extension};
use super::cloud_http::{AnswerLimit, CloudFailure};
use super::multipart::{PART_BYTES, send_parts};
use super::object::{Contents, ObjectStore};
use crate::blob_hash::BlobHash;
use crate::download::{DownloadFailure, DownloadSource, Opened, download};
use crate::http_client::{Tries, Trouble};
use crate::{Error, Result};
use anemoe_io::hex;
use object_store::list::PaginatedListOptions;
use object_store::{GetOptions, PutOptions};
use sha2::{Digest, Sha256};
use std::collections::BTreeSet;
use std::path::Path;

/// Most pages of a list, and most names, of which a page has a thousand.
const MAX_PAGES: usize = 500;
const MAX_NAMES: usize = 100_000;
/// Most pages without a new name, one after the other.
const MAX_IDLE_PAGES: usize = 50;
/// Tries to read an object to its end.
const READ_TRIES: u32 = 4;

/// An object that is downloaded.
struct ObjectSource<'a> {
    bucket: &'a CloudBucket,
    key: &'a str,
}

impl DownloadSource for ObjectSource<'_> {
    fn open(&self, from: u64) -> std::result::Result<Opened<'_>, DownloadFailure> {
        let got = match self.bucket.stream(self.key, from) {
            // The server sends whole objects alone, or has no such bytes.
            Err(CloudFailure::Trouble(Trouble::Lasting(_))) if from > 0 => return self.open(0),
            Err(CloudFailure::Refused(refusal)) if from > 0 && refusal.status == 416 => return self.open(0),
            Err(CloudFailure::Trouble(Trouble::Passing(what))) => return Err(DownloadFailure::Network(what)),
            Err(failure) => return Err(DownloadFailure::Refused(self.bucket.failed(self.key, failure))),
            Ok(got) => got,
        };
        Ok(Opened {
            from: got.range.start,
            size: Some(got.meta.size),
            body: Box::new(self.bucket.reader(got)),
        })
    }
}

impl ObjectStore for CloudBucket {
    fn prepare(&self) -> Result<()> {
        // A user who may not read may still write; every other refusal would hit later requests, too.
        match self.get("bundles/none", GetOptions::default()) {
            Ok(_) => Ok(()),
            Err(CloudFailure::Refused(refusal)) if refusal.is_of_this_request() => Ok(()),
            Err(failure) => Err(self.failed("", failure)),
        }
    }

    fn find(&self, key: &str) -> Result<Option<(u64, Option<String>)>> {
        self.head(key)
    }

    fn holds(&self, key: &str, contents: &Contents) -> Result<bool> {
        let mut tries = Tries::new(READ_TRIES);
        loop {
            let why = match self.stream(key, 0) {
                Ok(got) => match Contents::of_reader(&mut self.reader(got)) {
                    Ok(found) => return Ok(found == *contents),
                    Err(e) => e.to_string(),
                },
                Err(CloudFailure::Refused(refusal)) if refusal.is_absence() => return Ok(false),
                Err(CloudFailure::Trouble(Trouble::Passing(why))) => why,
                Err(failure) => return Err(self.failed(key, failure)),
            };
            // A server may have lost a piece of an object, and end the connection there each time.
            if !tries.pause(&why) {
                let place = self.shown(key);
                tracing::warn!("{place} cannot be read to its end ({why}): it is sent again");
                return Ok(false);
            }
        }
    }

    fn write(&self, key: &str, bytes: &[u8]) -> Result<()> {
        let path = self.path(key);
        let put = self.cloud.put_opts(&path, bytes.to_vec().into(), PutOptions::default());
        self.wait(put).map(|_| ()).map_err(|failure| self.failed(key, failure))
    }

    fn send(
        &self,
        key: &str,
        file: &Path,
        contents: &Contents,
        record: &Path,
        moved: &dyn Fn(i64),
    ) -> Result<u64> {
        if contents.bytes > PART_BYTES {
            return send_parts(self, key, file, contents, record, moved);
        }
        let body = anemoe_io::read_input(file, PART_BYTES).map_err(|e| Error::io(file, e))?;
        if hex(Sha256::digest(&body)) != contents.sha256 {
            return Err(Error::invalid(file, "file: it changed while it was sent"));
        }
        self.write(key, &body)?;
        moved(contents.bytes as i64);
        Ok(contents.bytes)
    }

    fn read(&self, key: &str, limit: u64) -> Result<Option<Vec<u8>>> {
        let options = GetOptions { extensions: extension(AnswerLimit(limit)), ..GetOptions::default() };
        match self.get(key, options).and_then(|got| self.wait(got.bytes())) {
            Ok(bytes) => Ok(Some(bytes.into())),
            Err(CloudFailure::Refused(refusal)) if refusal.is_absence() => Ok(None),
            Err(failure) => Err(self.failed(key, failure)),
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
        let hash = BlobHash::Sha256(contents.sha256.clone());
        // The first report counts bytes that were there; a later report of 0 means that the download starts anew.
        let (mut there, mut begun) = (0, None);
        let mut told = |now: u64| {
            moved(now as i64 - there);
            there = now as i64;
            begun = Some(begun.unwrap_or(now).min(now));
        };
        let source = ObjectSource { bucket: self, key };
        download(&source, &hash, contents.bytes, partial, target, &mut told).map_err(
            |failure| match failure {
                DownloadFailure::Disk(e) => Error::io(partial, e),
                DownloadFailure::Refused(e) => e,
                DownloadFailure::WrongContents(what) => Error::invalid(
                    self.shown(key),
                    format!("object: {what}; push the bundle again with --verify"),
                ),
                DownloadFailure::Network(what) => self.failed(
                    key,
                    CloudFailure::Trouble(Trouble::Lasting(format!(
                        "{what}; what came stays, and the same command goes on from there; if it ends at the same byte, \
                         push the bundle again with --verify"
                    ))),
                ),
            },
        )?;
        Ok(contents.bytes - begun.unwrap_or(0).min(contents.bytes))
    }

    fn list(&self, folder: &str) -> Result<Vec<String>> {
        let prefix = format!("{}/", self.full(folder));
        let (mut names, mut token): (BTreeSet<String>, Option<String>) = Default::default();
        let mut idle = 0;
        for _ in 0..MAX_PAGES {
            let options = PaginatedListOptions {
                delimiter: Some("/".into()),
                max_keys: Some(1000),
                page_token: token.clone(),
                ..PaginatedListOptions::default()
            };
            let page = self.wait(self.cloud.list_paginated(Some(&prefix), options));
            let page = page.map_err(|failure| self.failed(folder, failure))?;
            let before = names.len();
            let objects = page.result.objects.into_iter().map(|object| object.location);
            names.extend(page.result.common_prefixes.into_iter().chain(objects).filter_map(|path| {
                let name = path.as_ref().strip_prefix(&prefix)?;
                (!name.is_empty() && !name.contains('/')).then(|| name.to_string())
            }));
            idle = if names.len() > before { 0 } else { idle + 1 };
            match page.page_token.filter(|next| !next.is_empty()) {
                None => return Ok(names.into_iter().collect()),
                next if next == token || names.len() > MAX_NAMES || idle > MAX_IDLE_PAGES => break,
                next => token = next,
            }
        }
        let what = format!("the server's list does not end, after {} names", names.len());
        Err(self.failed(folder, Trouble::Lasting(what).into()))
    }

    fn place(&self, key: &str) -> String {
        self.shown(key)
    }
}
