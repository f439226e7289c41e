//! The error type of every crate. *Invalid* means that an input breaks its format; *unsupported* means that it is well
//! formed but uses something that is not implemented.

use std::fmt;
use std::io;
use std::path::{Path, PathBuf};

/// Result of fallible operations.
pub type Result<T> = std::result::Result<T, Error>;

/// The kind of an [`Error`].
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Kind {
    /// The operating system refused a file operation.
    Io,
    /// A file, a program or a tensor breaks its format, or parts do not fit together.
    Invalid,
    /// A well-formed input that is not implemented.
    Unsupported,
    /// Input that does not fit the model: a prompt that is too long, an id outside the vocabulary, a wrong shape.
    Input,
    /// Options that contradict each other or the model.
    Usage,
    /// A disk has too little room for the output.
    Room,
    /// The caller asked to stop.
    Interrupted,
}

/// Reason of a refusal, and the file concerned.
///
/// ```text
/// Io            PATH: SOURCE             Usage, Input   WHAT
/// Invalid       PATH: invalid WHAT       Room           PATH: WHAT
/// Unsupported   PATH: unsupported WHAT   Interrupted    interrupted
/// ```
#[derive(Debug)]
pub struct Error {
    kind: Kind,
    path: Option<PathBuf>,
    /// Names the tensor, op or key, and what was expected.
    what: String,
    source: Option<io::Error>,
}

impl Error {
    fn new(kind: Kind, path: Option<PathBuf>, what: impl Into<String>) -> Error {
        Error { kind, path, what: what.into(), source: None }
    }

    /// Makes an error of the operating system for `path`.
    pub fn io(path: impl Into<PathBuf>, source: io::Error) -> Error {
        Error { source: Some(source), ..Error::new(Kind::Io, Some(path.into()), "") }
    }

    /// Makes an error for the file `path`, which breaks its format.
    pub fn invalid(path: impl Into<PathBuf>, what: impl Into<String>) -> Error {
        Error::new(Kind::Invalid, Some(path.into()), what)
    }

    /// Makes an error for a MIL program that breaks MIL's rules.
    pub fn invalid_program(what: impl fmt::Display) -> Error {
        Error::new(Kind::Invalid, None, format!("program: {what}"))
    }

    /// Makes an error for the MIL operation `op` of type `op_type`, which breaks its definition.
    pub fn invalid_op(op: &str, op_type: &str, what: impl fmt::Display) -> Error {
        Error::new(Kind::Invalid, None, format!("operation `{op}` ({op_type}): {what}"))
    }

    /// Makes an error for the file `path`, which uses something that is not implemented.
    pub fn unsupported(path: impl Into<PathBuf>, what: impl Into<String>) -> Error {
        Error::new(Kind::Unsupported, Some(path.into()), what)
    }

    /// Makes an error for something in memory that is not implemented.
    pub fn unsupported_here(what: impl Into<String>) -> Error {
        Error::new(Kind::Unsupported, None, what)
    }

    /// Makes an error for input that does not fit the model.
    pub fn input(what: impl Into<String>) -> Error {
        Error::new(Kind::Input, None, what)
    }

    /// Makes an error for options that contradict each other or the model.
    pub fn usage(what: impl Into<String>) -> Error {
        Error::new(Kind::Usage, None, what)
    }

    /// Makes an error for the folder `path`, whose disk has too little room.
    pub fn room(path: impl Into<PathBuf>, what: impl Into<String>) -> Error {
        Error::new(Kind::Room, Some(path.into()), what)
    }

    /// Makes the error of a caller who asked to stop.
    pub fn interrupted() -> Error {
        Error::new(Kind::Interrupted, None, "interrupted")
    }

    /// Returns the kind.
    pub fn kind(&self) -> Kind {
        self.kind
    }

    /// Returns the file or folder concerned.
    pub fn path(&self) -> Option<&Path> {
        self.path.as_deref()
    }

    /// Returns what is wrong and what was expected; empty where the operating system's error says it.
    pub fn what(&self) -> &str {
        &self.what
    }

    /// Returns the system's error of [`Kind::Io`].
    pub fn io_error(&self) -> Option<&io::Error> {
        self.source.as_ref()
    }

    /// Returns the error with `change` applied to its path, where it has one.
    pub fn map_path(mut self, change: impl FnOnce(PathBuf) -> PathBuf) -> Error {
        self.path = self.path.map(change);
        self
    }
}

impl fmt::Display for Error {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        if let Some(path) = &self.path {
            write!(f, "{}: ", path.display())?;
        }
        match (self.kind, &self.source) {
            (_, Some(source)) => source.fmt(f),
            (Kind::Invalid, _) => write!(f, "invalid {}", self.what),
            (Kind::Unsupported, _) if self.path.is_none() => write!(f, "unsupported: {}", self.what),
            (Kind::Unsupported, _) => write!(f, "unsupported {}", self.what),
            _ => f.write_str(&self.what),
        }
    }
}

impl std::error::Error for Error {
    fn source(&self) -> Option<&(dyn std::error::Error + 'static)> {
        self.source.as_ref().map(|e| e as _)
    }
}

/// Converts to an error of the operating system, for closures that end with one.
impl From<Error> for io::Error {
    fn from(e: Error) -> io::Error {
        e.source.unwrap_or_else(|| io::Error::other(e.what))
    }
}
