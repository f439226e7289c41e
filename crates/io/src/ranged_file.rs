//! Files that lie elsewhere.

use crate::Result;
use std::collections::BTreeMap;
use std::sync::Arc;

/// A file that is not on this machine, or not whole, and is read in ranges.
pub trait RangedFile: Send + Sync {
    /// Gives its length in bytes.
    fn bytes(&self) -> u64;

    /// Fills `out` with the bytes from `start` on.
    ///
    /// # Errors
    /// The range is outside the file, or does not come.
    fn read_range(&self, start: u64, out: &mut [u8]) -> Result<()>;
}

/// Files of one folder that are read in ranges, by their names.
pub type RangedFiles = BTreeMap<String, Arc<dyn RangedFile>>;
