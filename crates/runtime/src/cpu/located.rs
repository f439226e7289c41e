//! Locations of operations, for errors.

use super::ops::OpError;
use crate::Error;
use std::path::Path;

/// Location of an operation, for errors.
pub(super) struct Located<'a> {
    pub path: &'a Path,
    pub function: &'a str,
    pub op_type: &'a str,
    pub name: &'a str,
}

impl Located<'_> {
    pub fn error(&self, e: OpError) -> Error {
        let at = format!("op `{}` (operation `{}` of function `{}`)", self.op_type, self.name, self.function);
        match e {
            OpError::Invalid(what) => Error::invalid(self.path, format!("{at}: {what}")),
            OpError::Unsupported(what) => Error::unsupported(self.path, format!("{at}: {what}")),
        }
    }
}
