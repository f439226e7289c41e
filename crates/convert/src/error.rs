//! One error for the crate; *invalid* is not *unsupported*.

use std::path::PathBuf;

/// Result of this crate's fallible operations.
pub type Result<T> = std::result::Result<T, Error>;

/// Why a checkpoint, a plan or a build was refused.
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
    /// A checkpoint, its configuration or one of its tensors is wrong.
    #[error("{}: invalid {what}", path.display())]
    Invalid {
        /// The file.
        path: PathBuf,
        /// What is wrong and what was expected; names the tensor or the configuration key.
        what: String,
    },
    /// Well formed, but not implemented here.
    #[error("{}: unsupported {what}", path.display())]
    Unsupported {
        /// The file.
        path: PathBuf,
        /// What is not implemented.
        what: String,
    },
    /// Options that contradict each other or the model.
    #[error("{0}")]
    Usage(String),
    /// A disk has too little room for what is to be written.
    #[error("{}: {what}", path.display())]
    Room {
        /// The folder.
        path: PathBuf,
        /// How much is needed, and how much there is.
        what: String,
    },
    /// The caller asked to stop.
    #[error("interrupted")]
    Interrupted,
    /// Writing a package failed.
    #[error(transparent)]
    Package(#[from] anemoe_mlpackage::Error),
    /// A NumPy file is wrong.
    #[error(transparent)]
    Npz(#[from] anemoe_npz::Error),
    /// Writing the bundle around the packages failed.
    #[error(transparent)]
    Bundle(#[from] anemoe_bundle::Error),
}

impl From<anemoe_io::PathError> for Error {
    fn from(e: anemoe_io::PathError) -> Error {
        Error::Io { path: e.path, source: e.source }
    }
}

impl Error {
    /// An [`Error::Io`] for `path`.
    pub fn io(path: impl Into<PathBuf>, source: std::io::Error) -> Self {
        Error::Io { path: path.into(), source }
    }

    /// An [`Error::Invalid`] for `path`.
    pub fn invalid(path: impl Into<PathBuf>, what: impl Into<String>) -> Self {
        Error::Invalid { path: path.into(), what: what.into() }
    }

    /// An [`Error::Unsupported`] for `path`.
    pub fn unsupported(path: impl Into<PathBuf>, what: impl Into<String>) -> Self {
        Error::Unsupported { path: path.into(), what: what.into() }
    }
}
