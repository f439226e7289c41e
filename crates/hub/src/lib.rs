//! Downloads checkpoints from the Hugging Face hub into its cache; moves bundles to and from stores (module `stores`).
//!
//! ```text
//! hf:OWNER/NAME@REV ──listing──> files with sizes and hashes ──the needed ones──> blobs/HASH <── snapshots/COMMIT/FILE
//! ```
//!
//! Inspecting a checkpoint needs no weights: `Hub::peek` reads weight files that are not in the cache in ranges, and
//! caches these.
//!
//! The cache is that of Hugging Face's libraries: each side uses files that the other downloaded. Answers of a server
//! are never trusted: sizes and hashes are checked, names cannot leave the cache, memory is bounded, and a token goes
//! only to the server that it is for.
//!
//! The client is built on `ureq`: the crate `hf-hub` (1.0) comes with about 280 crates, a second TLS library among them.
//!
//! # Tests
//! `tests/` runs a server in the test's own process that drops connections, lies about sizes, redirects, and asks for a token.
//! `cargo test -p anemoe-hub` runs for seconds.
#![deny(unsafe_code)]

mod blob_hash;
mod download;
mod http_client;
mod http_source;
mod hugging_face;
mod parallel;
mod progress;
mod safe_name;
mod stores;
mod variables;

pub use hugging_face::{Hub, HubSettings, HubSpec, Peeked, Snapshot};
pub use progress::TransferProgress;
pub use stores::{
    BringReport, BundleManifest, Contents, ManifestFile, ManifestPart, MergedParts, ObjectStore, SendOptions,
    SendReport, StoreLocation, bring_bundle, bring_files, bundle_names, check_bundle_name, merge_parts,
    open_store, read_manifest, send_files, write_manifest,
};

pub use anemoe_io::{Error, Result};
