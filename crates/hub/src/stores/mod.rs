//! Stores of bundles: a folder, or a bucket of an object store.
//!
//! ```text
//! STORE/objects/3f/3f9a...                    contents, by their SHA-256: what two bundles share lies there once
//!      /bundles/NAME/bundle.json              files of a finished bundle: path, bytes, SHA-256
//!      /bundles/NAME/part-0of4.json           the same for what one part of a build has made
//!
//! push   hash ──> is it there? ──no──> send ──> ... ──> manifest, when all of it is there
//! pull   manifest, checked ──> room on the disk ──> objects, hashed as they come ──> the folder gets its name
//! ```
//!
//! A store only grows: nothing is deleted, and a manifest is replaced as a whole, so that any number of processes can
//! push at the same time. Parts have manifests of their own, so that none loses another's entries. A reader does not
//! trust a store: paths may not leave the bundle, sizes are compared with the disk's room before the first byte comes,
//! and hashes are computed of the received bytes.
//!
//! The crate `object_store` speaks to S3, Google and Azure, over this crate's own HTTP client: with one set of rules for
//! proxies, certificates, retries and secrets, and without a second client and TLS library.
//!
//! # Quirks
//! `tests/object_stores.rs` holds servers that do the following, of which most were met:
//! - XML without AWS's namespace, with another one or a prefix, with white space before its declaration, CDATA, entities
//! - an error in the body of a 200, which some tries later is none; an empty 200; a list without `KeyCount`
//! - `SlowDown`, `RequestTimeout`, `IncompleteBody`, `BadDigest`, `OperationAborted`, a server that starts, a gateway's page
//! - connections that break in a body; bytes that change on the way; servers that ignore ranges
//! - lists that do not end: the same page, empty pages, other keys, new names
//! - another region, said in a header, in the error or by a redirect; a clock that is another one
//! - uploads in parts that the server ends, loses bytes of, or completes without an answer; two pushes of the same file

mod bring_files;
mod bundle_manifest;
mod cloud_bucket;
mod cloud_http;
mod cloud_settings;
mod cloud_store;
mod folder_store;
mod multipart;
mod object;
mod refusal;
mod send_files;
mod store_location;
mod transfer;

pub use bring_files::{BringReport, bring_bundle, bring_files};
pub use bundle_manifest::{BundleManifest, ManifestFile, ManifestPart, MergedParts, merge_parts};
pub use object::{Contents, ObjectStore};
pub use send_files::{SendOptions, SendReport, check_bundle_name, send_files, write_manifest};
pub use store_location::StoreLocation;

use crate::Result;
use crate::variables::Variables;
use cloud_settings::open_cloud;
use folder_store::FolderStore;
use std::ffi::OsString;

/// Most bytes of a manifest: some hundred thousand files.
const MAX_MANIFEST: u64 = 64 << 20;

/// Opens a store. An unreachable store fails at the first request. `variable` returns the value of an environment variable.
///
/// # Errors
/// The settings for an object store are wrong.
pub fn open_store(
    location: &StoreLocation,
    variable: impl Fn(&str) -> Option<OsString>,
) -> Result<Box<dyn ObjectStore>> {
    Ok(match location {
        StoreLocation::Folder(folder) => Box::new(FolderStore::new(folder)),
        StoreLocation::Bucket(bucket) => Box::new(open_cloud(bucket, &Variables(variable))?),
    })
}

/// Reads a manifest of a bundle; `None` where it does not exist.
///
/// # Errors
/// The store cannot be read, or the manifest breaks its format.
pub fn read_manifest(store: &dyn ObjectStore, key: &str) -> Result<Option<BundleManifest>> {
    let mut is_second = false;
    loop {
        let Some(text) = store.read(key, MAX_MANIFEST)? else { return Ok(None) };
        match BundleManifest::parse(&text) {
            Ok(manifest) => return Ok(Some(manifest)),
            // A text that broke on the way comes whole the next time.
            Err(_) if !is_second => is_second = true,
            Err(what) => return Err(crate::Error::invalid(store.place(key), what)),
        }
    }
}

/// Returns the names of finished bundles and of bundles with parts.
///
/// # Errors
/// The store cannot be listed.
pub fn bundle_names(store: &dyn ObjectStore) -> Result<Vec<String>> {
    store.list("bundles")
}
