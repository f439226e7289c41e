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
    /// Makes an error of an operation that breaks its definition.
    pub fn invalid(&self, what: impl Into<String>) -> Error {
        self.error(OpError::Invalid(what.into()))
    }

    pub fn error(&self, e: OpError) -> Error {
        let at = format!("op `{}` (operation `{}` of function `{}`)", self.op_type, self.name, self.function);
        match e {
            OpError::Invalid(what) => Error::invalid(self.path, format!("{at}: {}", with_tuples(&what))),
            OpError::Unsupported(what) => {
                Error::unsupported(self.path, format!("{at}: {}", with_tuples(&what)))
            }
        }
    }
}

/// Writes lists of sizes as Python writes shapes: `(1, 128)`, `(3,)`. Types keep their brackets: `tensor<fp32, [1, 128]>`.
pub(super) fn with_tuples(text: &str) -> String {
    let mut parts = text.split('[');
    let mut out = parts.next().unwrap_or_default().to_string();
    for part in parts {
        let sizes = part.split_once(']').filter(|(sizes, rest)| {
            let is_size = |n: &str| n.bytes().all(|b| b.is_ascii_digit() || matches!(b, b'-' | b'.'));
            !rest.starts_with('>')
                && (sizes.is_empty() || sizes.split(", ").all(|n| !n.is_empty() && is_size(n)))
        });
        match sizes {
            Some((sizes, rest)) => {
                let comma = if sizes.is_empty() || sizes.contains(',') { "" } else { "," };
                out.extend(["(", sizes, comma, ")", rest]);
            }
            None => out.extend(["[", part]),
        }
    }
    out
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn shapes_are_tuples_and_types_are_not() {
        let written = [
            ("shape [1, 128] and [3], not []", "shape (1, 128) and (3,), not ()"),
            ("[1..4, 8] of tensor<fp32, [1, 8]>", "(1..4, 8) of tensor<fp32, [1, 8]>"),
            ("x[i] [\"a\", 1] [1, 2", "x[i] [\"a\", 1] [1, 2"),
        ];
        written.iter().for_each(|(text, expected)| assert_eq!(with_tuples(text), *expected));
    }
}
