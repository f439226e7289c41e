//! Hashes that identify contents on servers.

use serde::{Deserialize, Serialize};

/// Hash of a file's contents: its name in a cache or a store.
#[derive(Clone, Debug, PartialEq, Eq, Deserialize, Serialize)]
#[serde(try_from = "String", into = "String")]
pub enum BlobHash {
    /// SHA-256 of a large file.
    Sha256(String),
    /// SHA-1 of a git blob: a header and the contents.
    Git(String),
}

impl BlobHash {
    /// Parses an entity tag or an id; `None` where it is no hash.
    pub fn parse(text: &str) -> Option<BlobHash> {
        let text = text.trim_start_matches("W/").trim_matches('"').to_ascii_lowercase();
        let is_hex = text.bytes().all(|b| b.is_ascii_hexdigit());
        match text.len() {
            64 if is_hex => Some(BlobHash::Sha256(text)),
            40 if is_hex => Some(BlobHash::Git(text)),
            _ => None,
        }
    }

    /// Returns the hash in hexadecimal.
    pub fn hex(&self) -> &str {
        match self {
            BlobHash::Sha256(hex) | BlobHash::Git(hex) => hex,
        }
    }
}

impl TryFrom<String> for BlobHash {
    type Error = &'static str;

    fn try_from(text: String) -> Result<BlobHash, &'static str> {
        BlobHash::parse(&text).ok_or("no hash")
    }
}

impl From<BlobHash> for String {
    fn from(hash: BlobHash) -> String {
        let (BlobHash::Sha256(hex) | BlobHash::Git(hex)) = hash;
        hex
    }
}
