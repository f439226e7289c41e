//! One error for the crate: what its parts refused.

use std::path::PathBuf;

/// Result of this crate's gates.
pub type Result<T> = std::result::Result<T, Error>;

/// Why a gate could not be run. A gate that was run and failed is no error.
#[derive(Debug, thiserror::Error)]
pub enum Error {
    /// The operating system refused a file operation.
    #[error("{}: {source}", path.display())]
    Io {
        /// File or directory concerned.
        path: PathBuf,
        /// What the system said.
        #[source]
        source: std::io::Error,
    },
    /// A question that makes no sense for this model.
    #[error("{0}")]
    Usage(String),
    /// Checkpoint, plan or build.
    #[error(transparent)]
    Convert(#[from] anemoe_convert::Error),
    /// Engine or executor.
    #[error(transparent)]
    Runtime(#[from] anemoe_runtime::Error),
    /// A package.
    #[error(transparent)]
    Package(#[from] anemoe_mlpackage::Error),
}
