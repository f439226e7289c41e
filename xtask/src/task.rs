//! Types and functions that all tasks share.

use std::path::PathBuf;

/// Result of a task: whether it passed.
pub type Passed = Result<bool, Box<dyn std::error::Error>>;

/// Returns the root of the repository.
pub fn root() -> PathBuf {
    PathBuf::from(env!("CARGO_MANIFEST_DIR")).parent().map(PathBuf::from).unwrap_or_default()
}
