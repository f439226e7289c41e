//! Reads and writes `chain.json`.

use super::contract::Chain;
use crate::{CHAIN_FILE, Error, Result, write_atomic};
use anemoe_io::json;
use serde::Deserialize;
use std::path::Path;

/// Format versions of `chain.json` that this crate reads: 2 where the head's rows are in another order than the ids
/// (`head_order`), which readers of 1 would not notice, and 1 elsewhere.
pub const FORMATS: [u32; 2] = [1, 2];

/// Largest `chain.json` that is read, in bytes; 30 layers of 128 single-expert units stay far below it.
const MAX_CHAIN_BYTES: u64 = 64 << 20;

impl Chain {
    /// Reads and checks `chain.json` of a bundle.
    ///
    /// # Errors
    /// The file cannot be read, is not a chain of these [`FORMATS`], or contradicts itself (the error says where).
    pub fn read(bundle: &Path) -> Result<Chain> {
        let path = bundle.join(CHAIN_FILE);
        let text = anemoe_io::read_input(&path, MAX_CHAIN_BYTES).map_err(|e| Error::io(&path, e))?;
        #[derive(Deserialize)]
        struct Version {
            format: u32,
        }
        let version: Version =
            json::parse(&text).map_err(|e| Error::invalid(&path, format!("chain: {e}")))?;
        if !FORMATS.contains(&version.format) {
            return Err(Error::invalid(
                &path,
                format!("chain: format {} where this version reads 1 and 2", version.format),
            ));
        }
        let chain: Chain = serde_json::from_slice(anemoe_io::without_mark(&text))
            .map_err(|e| Error::invalid(&path, format!("chain: {}", json::JsonError::from(e))))?;
        chain.check().map_err(|what| Error::invalid(&path, format!("chain: {what}")))?;
        Ok(chain)
    }

    /// Writes `chain.json` into a bundle. A build does this last, so that only complete bundles have the file.
    ///
    /// # Errors
    /// The file cannot be written.
    pub fn write(&self, bundle: &Path) -> Result<()> {
        let path = bundle.join(CHAIN_FILE);
        let mut text =
            serde_json::to_vec_pretty(self).map_err(|e| Error::invalid(&path, format!("chain: {e}")))?;
        text.push(b'\n');
        write_atomic(&path, &text)
    }
}
