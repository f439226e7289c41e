//! Checkpoints from the Hugging Face hub, into its cache.
//!
//! ```text
//! hf:OWNER/NAME@REV ──listing──> files with sizes and hashes ──the needed ones──> blobs/HASH <── snapshots/COMMIT/FILE
//! ```
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

mod http_client;
mod hugging_face;

pub use hugging_face::{DownloadProgress, Hub, HubSettings, HubSpec, Snapshot};

pub use anemoe_io::{Error, Result};
