//! Files of JSON that a later run goes on with.

use anemoe_io::{Error, Result};
use serde::Serialize;
use serde::de::DeserializeOwned;
use std::path::Path;

/// Largest file that is read, in bytes: plans of thousands of ops for each function of a large model.
pub const MAX_BYTES: u64 = 128 << 20;

/// Writes a file, whole or not at all.
pub fn write_json(path: &Path, value: &impl Serialize) -> Result<()> {
    let text = serde_json::to_vec_pretty(value).map_err(|e| Error::invalid(path, e.to_string()))?;
    anemoe_bundle::write_atomic(path, &text)
}

/// Reads a file; none if it is missing, damaged or too large.
pub fn read_json<T: DeserializeOwned>(path: &Path) -> Option<T> {
    anemoe_io::json::parse(&anemoe_io::read_input(path, MAX_BYTES).ok()?).ok()
}
