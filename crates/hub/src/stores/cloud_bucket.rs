//! A bucket of S3, Google or Azure, by the crate `object_store`.

use super::cloud_http::{CloudFailure, CloudResult, Streamed, ToldHash};
use super::refusal::Account;
use crate::{Error, Result};
use bytes::Bytes;
use futures_util::StreamExt;
use futures_util::stream::BoxStream;
use object_store::list::PaginatedListStore;
use object_store::multipart::MultipartStore;
use object_store::path::Path as Key;
use object_store::{Extensions, GetOptions, GetRange, GetResult, ObjectStore};
use std::io::{self, Read};
use std::sync::Arc;
use tokio::runtime::Runtime;

/// A bucket of any kind.
pub trait Cloud: ObjectStore + MultipartStore + PaginatedListStore {}

impl<T: ObjectStore + MultipartStore + PaginatedListStore> Cloud for T {}

/// A bucket, with a prefix of all keys.
pub struct CloudBucket {
    /// The bucket.
    pub cloud: Arc<dyn Cloud>,
    /// The bucket, asked in such a way that S3 tells hashes of objects.
    pub telling: Arc<dyn Cloud>,
    /// Prefix of all keys; empty, or without slashes at its ends.
    pub prefix: String,
    /// Account that asks.
    pub account: Account,
    /// Runs the crate's asynchronous calls, which block in this crate's own client.
    pub runtime: Runtime,
}

impl CloudBucket {
    /// Returns a key with the prefix, as it is in the bucket.
    pub fn full(&self, key: &str) -> String {
        if self.prefix.is_empty() { key.to_string() } else { format!("{}/{key}", self.prefix) }
    }

    /// Returns the name of an object in messages.
    pub fn shown(&self, key: &str) -> String {
        format!("{}://{}/{}", self.account.kind.scheme(), self.account.bucket, self.full(key))
    }

    /// Returns a key as `object_store` takes it; names are safe, so that none changes.
    pub fn path(&self, key: &str) -> Key {
        Key::from(self.full(key))
    }

    /// Makes the error of a failed request for an object.
    pub fn failed(&self, key: &str, failure: CloudFailure) -> Error {
        match failure {
            CloudFailure::Refused(refusal) => refusal.error(&self.shown(key), &self.account),
            CloudFailure::Trouble(trouble) => {
                Error::io(self.shown(key), io::Error::other(trouble.to_string()))
            }
        }
    }

    /// Waits for the end of a call.
    pub fn wait<T>(&self, call: impl Future<Output = object_store::Result<T>>) -> CloudResult<T> {
        self.runtime.block_on(call).map_err(CloudFailure::from)
    }

    /// Asks for an object.
    pub fn get(&self, key: &str, options: GetOptions) -> CloudResult<GetResult> {
        self.wait(self.cloud.get_opts(&self.path(key), options))
    }

    /// Begins to read an object, at a byte.
    pub fn stream(&self, key: &str, from: u64) -> CloudResult<GetResult> {
        let range = (from > 0).then_some(GetRange::Offset(from));
        self.get(key, GetOptions { range, extensions: extension(Streamed), ..GetOptions::default() })
    }

    /// Returns a reader of an object.
    pub fn reader(&self, got: GetResult) -> ObjectReader<'_> {
        ObjectReader { bucket: self, stream: got.into_stream(), piece: Bytes::new() }
    }

    /// Returns an object's length, and its SHA-256 where the server tells it; `None` where the object does not exist or may not
    /// be seen.
    pub fn head(&self, key: &str) -> Result<Option<(u64, Option<String>)>> {
        let options = GetOptions { head: true, ..GetOptions::default() };
        match self.wait(self.telling.get_opts(&self.path(key), options)) {
            Ok(found) => {
                let told = found.extensions.get::<ToldHash>().map(|told| told.0.clone());
                Ok(Some((found.meta.size, told)))
            }
            // A user who may not list gets 403 for a missing object. Other causes show when the upload fails.
            Err(CloudFailure::Refused(refusal)) if matches!(refusal.status, 403 | 404) => Ok(None),
            Err(failure) => Err(self.failed(key, failure)),
        }
    }
}

/// Makes extensions of one value.
pub fn extension<T: Clone + Send + Sync + 'static>(value: T) -> Extensions {
    let mut extensions = Extensions::new();
    extensions.insert(value);
    extensions
}

/// Reader of an object's bytes.
pub struct ObjectReader<'a> {
    bucket: &'a CloudBucket,
    stream: BoxStream<'static, object_store::Result<Bytes>>,
    piece: Bytes,
}

impl Read for ObjectReader<'_> {
    fn read(&mut self, out: &mut [u8]) -> io::Result<usize> {
        if self.piece.is_empty() {
            match self.bucket.runtime.block_on(self.stream.next()) {
                None => return Ok(0),
                Some(piece) => self.piece = piece.map_err(|e| io::Error::other(CloudFailure::from(e)))?,
            }
        }
        let n = out.len().min(self.piece.len());
        out[..n].copy_from_slice(&self.piece.split_to(n));
        Ok(n)
    }
}
