//! Files on other machines.

use crate::Result;
use std::collections::BTreeMap;
use std::sync::Arc;

/// A file that is not on this machine, or not whole, and is read in ranges.
pub trait RangedFile: Send + Sync {
    /// Returns the file's length in bytes.
    fn bytes(&self) -> u64;

    /// Fills `out` with the bytes from `start` on.
    ///
    /// # Errors
    /// The range lies outside the file, or cannot be fetched.
    fn read_range(&self, start: u64, out: &mut [u8]) -> Result<()>;
}

/// Files of one folder that are read in ranges, by their names.
pub type RangedFiles = BTreeMap<String, Arc<dyn RangedFile>>;
