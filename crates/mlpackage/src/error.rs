//! One error for the crate. *Invalid* means that the input breaks the format; *unsupported* means that the input is
//! well formed but uses something that this crate does not implement.

use std::path::PathBuf;

/// Result of this crate's fallible operations.
pub type Result<T> = std::result::Result<T, Error>;

/// Why a package, a program or a weight file was refused.
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
    /// A file breaks its format.
    #[error("{}: invalid {what}", path.display())]
    InvalidFile {
        /// The file.
        path: PathBuf,
        /// What is wrong and what was expected.
        what: String,
    },
    /// A program breaks MIL's rules.
    #[error("invalid program: {0}")]
    InvalidProgram(String),
    /// An operation breaks its definition.
    #[error("invalid operation `{op}` ({op_type}): {what}")]
    InvalidOp {
        /// The operation's name (its first output).
        op: String,
        /// Its type, for instance `conv`.
        op_type: String,
        /// What is wrong and what was expected.
        what: String,
    },
    /// Well formed, but not implemented here.
    #[error("unsupported: {0}")]
    Unsupported(String),
}

impl Error {
    /// An [`Error::Io`] for `path`.
    pub fn io(path: impl Into<PathBuf>, source: std::io::Error) -> Self {
        Error::Io { path: path.into(), source }
    }

    /// An [`Error::InvalidFile`] for `path`.
    pub fn invalid(path: impl Into<PathBuf>, what: impl Into<String>) -> Self {
        Error::InvalidFile { path: path.into(), what: what.into() }
    }
}
