//! Stores of bundles: a folder, or a bucket of an S3-compatible object store.
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
//! `rusty-s3` signs requests without doing input or output, and this crate's own HTTP client sends them. That adds 8
//! small crates to the lock file and keeps one set of rules for proxies, certificates, retries and secrets. The
//! alternative, `object_store` with its feature `aws`, adds 41 crates, among them a second HTTP client (`reqwest`),
//! HTTP/2, a second TLS library in C (`aws-lc`) and an asynchronous runtime.

mod bring_files;
mod bundle_manifest;
mod folder_store;
mod object;
mod s3_answers;
mod s3_client;
mod s3_multipart;
mod s3_settings;
mod s3_store;
mod send_files;
mod store_location;
mod transfer;

pub use bring_files::{BringReport, bring_bundle, bring_files};
pub use bundle_manifest::{BundleManifest, ManifestFile, ManifestPart, MergedParts, merge_parts};
pub use object::{Contents, ObjectStore};
pub use s3_settings::S3Settings;
pub use send_files::{SendOptions, SendReport, check_bundle_name, send_files, write_manifest};
pub use store_location::StoreLocation;
pub use transfer::TransferProgress;

use crate::Result;
use folder_store::FolderStore;
use s3_store::S3Store;

/// Most bytes of a manifest: some hundred thousand files.
const MAX_MANIFEST: u64 = 64 << 20;

/// Opens a store. An unreachable store fails at the first request.
///
/// # Errors
/// The settings for an object store (`AWS_*`) are wrong.
pub fn open_store(
    location: &StoreLocation,
    settings: impl Fn() -> Result<S3Settings>,
) -> Result<Box<dyn ObjectStore>> {
    Ok(match location {
        StoreLocation::Folder(folder) => Box::new(FolderStore::new(folder)),
        StoreLocation::Bucket { bucket, prefix } => Box::new(S3Store::new(settings()?, bucket, prefix)?),
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
