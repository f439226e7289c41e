//! Checkpoints from the Hugging Face hub, into its cache; bundles to and from stores (the module `object_store`).
//!
//! ```text
//! hf:OWNER/NAME@REV ──listing──> files with sizes and hashes ──the needed ones──> blobs/HASH <── snapshots/COMMIT/FILE
//! ```
//!
//! To look at a checkpoint takes no weights: `Hub::peek` reads the files that are not in the cache in ranges, and keeps these there.
//!
//! The cache is the one of Hugging Face's own libraries: files that they brought are used, and they use what lies there afterwards.
//! A server is never believed: sizes and hashes are checked, names may not leave the cache, nothing is kept in memory beyond a
//! stated limit, and a token goes to the server that it is for and to no other.
//!
//! A client of its own over `ureq`: the crate `hf-hub` (1.0) comes with about 280 crates, a second TLS library among them.
//!
//! # Tests
//! `tests/` runs a server in the test's own process that drops connections, lies about sizes, redirects, and asks for a token.
//! `cargo test -p anemoe-hub` runs for seconds.
#![deny(unsafe_code)]

mod blob_hash;
mod download;
mod http_client;
mod hugging_face;
mod object_store;
mod remote_range;
mod safe_name;

pub use hugging_face::{DownloadProgress, Hub, HubSettings, HubSpec, Peeked, Snapshot};
pub use object_store::{
    BringReport, BundleManifest, Contents, ManifestFile, ManifestPart, MergedParts, ObjectStore, S3Settings,
    SendOptions, SendReport, StoreLocation, TransferProgress, bring_bundle, bring_files, bundle_names,
    check_bundle_name, merge_parts, open_store, read_manifest, send_files, write_manifest,
};

pub use anemoe_io::{Error, Result};
