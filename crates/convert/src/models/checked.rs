//! A checkpoint that was checked against a family's tensor table.

use super::{ModelPart, TensorRow, check_tensors};
use crate::checkpoint::Checkpoint;
use crate::{Error, Result};
use std::collections::BTreeMap;
use std::ops::Range;

/// A checkpoint and the prefix of its tensors' names.
pub struct CheckedCheckpoint {
    /// The checkpoint.
    pub checkpoint: Checkpoint,
    prefix: &'static str,
    parts: BTreeMap<String, ModelPart>,
}

impl CheckedCheckpoint {
    /// Finds the prefix by `embed_tokens.weight`, and checks the name and shape of every tensor.
    ///
    /// # Errors
    /// A tensor is missing, superfluous or of another shape.
    pub fn new(
        checkpoint: Checkpoint,
        prefixes: &[&'static str],
        table: &[TensorRow],
        skip: impl Fn(&str) -> bool,
    ) -> Result<CheckedCheckpoint> {
        let prefix = prefix(&checkpoint, prefixes)?;
        check_tensors(checkpoint.source.as_ref(), prefix, table, skip)?;
        let parts = table.iter().map(|r| (format!("{prefix}{}", r.name), r.part)).collect();
        Ok(CheckedCheckpoint { checkpoint, prefix, parts })
    }

    /// Reads elements of a tensor named without the checkpoint's prefix.
    ///
    /// # Errors
    /// The file cannot be read, or a value is NaN or infinite.
    pub fn read(&self, name: &str, range: Range<u64>, out: &mut [f32]) -> Result<()> {
        self.checkpoint.source.read(&format!("{}{name}", self.prefix), range, out)
    }

    /// Reads a vector of `n` elements.
    ///
    /// # Errors
    /// Fails as [`CheckedCheckpoint::read`] does.
    pub fn vector(&self, name: &str, n: usize) -> Result<Vec<f32>> {
        let mut out = vec![0f32; n];
        self.read(name, 0..n as u64, &mut out)?;
        Ok(out)
    }

    /// Makes an error about a value of a tensor, with the checkpoint's own names for file and tensor.
    pub fn refuse(&self, name: &str, element: u64, what: &str) -> Error {
        let (file, tensor) = self.checkpoint.source.origin(&format!("{}{name}", self.prefix), element);
        Error::invalid(file, format!("tensor `{tensor}`: {what}"))
    }

    /// Returns the part of the model of every tensor, by its full name.
    pub fn parts(&self) -> &BTreeMap<String, ModelPart> {
        &self.parts
    }
}

/// Finds the prefix of a checkpoint's tensors, by `embed_tokens.weight`.
///
/// # Errors
/// There is no embedding under any prefix.
pub fn prefix(checkpoint: &Checkpoint, prefixes: &[&'static str]) -> Result<&'static str> {
    let has = |p: &&&str| checkpoint.source.info(&format!("{p}embed_tokens.weight")).is_some();
    prefixes.iter().find(has).copied().ok_or_else(|| {
        let names: Vec<String> = prefixes.iter().map(|p| format!("`{p}embed_tokens.weight`")).collect();
        let what = match names.as_slice() {
            [one] => format!("checkpoint: {one} is missing"),
            _ => format!("checkpoint: neither {} is there", names.join(" nor ")),
        };
        Error::invalid(&checkpoint.path, what)
    })
}
