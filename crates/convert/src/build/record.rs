//! Records that a build keeps of itself.

use super::weight_errors::RoleError;
use crate::quantize::Metrics;
use serde::{Deserialize, Serialize};
use std::path::PathBuf;

/// One of several processes that build a bundle together: every `of`-th shard from `index` on.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct BuildPart {
    /// Index of the part, from 0, less than `of`.
    pub index: usize,
    /// Number of parts.
    pub of: usize,
}

/// Place of a checkpoint, and its variant.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct CheckpointOrigin {
    /// An absolute path, or the name of a synthetic model.
    #[serde(with = "crate::path_kind::lossless")]
    pub checkpoint: PathBuf,
    /// See [`crate::variants::Variants`].
    pub zaya_skip: Option<String>,
    /// See [`crate::variants::Variants`].
    #[serde(default)]
    pub is_rotated: bool,
}

/// Errors of a shard's matrices against the originals.
#[derive(Clone, Debug)]
pub struct Quality {
    /// Lowest cosine between a matrix and its compressed form.
    pub min_cosine: f64,
    /// Errors over all matrices that are compressed.
    pub all: Metrics,
    /// Errors of each role of a matrix.
    pub roles: Vec<RoleError>,
}
