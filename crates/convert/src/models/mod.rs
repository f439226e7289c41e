//! Model families: a description for each, the registry, and the plans that follow from a description.

mod assistant;
mod chain_builder;
mod checked;
mod common_keys;
mod decoder;
mod family;
mod gemma3;
mod gemma4;
mod gpt_oss;
mod keys;
mod layer_blocks;
mod llama;
mod own_head;
mod qwen_moe;
mod registry;
mod replan;
mod rope;
mod rotate;
mod stream_at_host;
mod stream_in_packages;
mod synthetic;
mod tensor_roles;
mod tensor_table;
#[cfg(test)]
mod tests;
mod zaya;

pub use checked::{BY_NORM, CheckedCheckpoint};
pub use decoder::{
    Attention, Decoder, ExpertLayer, HeadNorm, Layer, Norms, Preset, QkvProjection, Residual, RouterKind,
    ValueSource,
};
pub use family::Family;
pub use keys::token_ids;
pub use registry::describe;
pub use replan::replan;
pub use rotate::{can_rotate, rotate};
pub use tensor_table::{ModelPart, TensorRow, check_tensors, full_name};

use crate::Result;
use crate::checkpoint::{
    Checkpoint, DerivedTensor, TensorOrigin, derive, is_gguf, open_checkpoint, open_in_ranges,
};
use anemoe_io::RangedFiles;
use registry::known_family;
use serde_json::Value;
use std::path::Path;
use tensor_table::{EMBEDDING, HEAD};

/// Prefix of the names of checkpoints whose weights are random and computed as they are read.
const SYNTHETIC: &str = "synthetic:";

/// Tells whether a checkpoint's name is a synthetic one.
pub fn is_synthetic(source: &str) -> bool {
    source.starts_with(SYNTHETIC)
}

/// Opens a Hugging Face folder, a GGUF file, or `synthetic:NAME?seed=N&layers=N`. The tensors get the names of their
/// family's table, in any layout.
///
/// # Errors
/// A file is missing or wrong, or there is no such synthetic model.
pub fn load(spec: impl AsRef<Path>) -> Result<Checkpoint> {
    let path = spec.as_ref();
    match path.to_str().and_then(|spec| Some((spec, spec.strip_prefix(SYNTHETIC)?))) {
        Some((spec, name)) => synthetic::open(spec, name),
        None => normalize_layout(open_checkpoint(path)?),
    }
}

/// Opens a Hugging Face folder like [`load`], with some of its weight files elsewhere.
///
/// # Errors
/// A file is missing or wrong, or cannot be fetched.
pub fn load_in_ranges(path: &Path, elsewhere: &RangedFiles) -> Result<Checkpoint> {
    normalize_layout(open_in_ranges(path, elsewhere)?)
}

/// Opens the family that `config.json` names.
///
/// # Errors
/// The family is not known, or the checkpoint does not fit it.
pub fn open(checkpoint: Checkpoint) -> Result<Family> {
    let known = known_family(&checkpoint.config, &checkpoint.config_path())?;
    let decoder = describe(&checkpoint)?;
    let checked = CheckedCheckpoint::new(checkpoint, decoder.prefixes, &decoder.tensors())?;
    Ok(Family::new(decoder, checked, known.remarks))
}

/// Returns the prefix of the names of a checkpoint's tensors.
///
/// # Errors
/// There is no embedding under any prefix.
pub fn prefix(checkpoint: &Checkpoint, decoder: &Decoder) -> Result<&'static str> {
    checked::prefix(checkpoint, decoder.prefixes)
}

/// Checks the name and shape of every tensor of a checkpoint.
///
/// # Errors
/// A tensor is missing, superfluous or of another shape.
pub fn check(checkpoint: &Checkpoint, decoder: &Decoder) -> Result<()> {
    let prefix = prefix(checkpoint, decoder)?;
    check_tensors(checkpoint.source.as_ref(), prefix, &decoder.tensors(), checked::is_unneeded)
}

/// Checks that a `config.json` names a family that is known. Nothing else of the checkpoint has to be there.
///
/// # Errors
/// The configuration names no family, or an unknown one.
pub fn check_family(config: &Value, path: &Path) -> Result<()> {
    known_family(config, path).map(|_| ())
}

/// Gives the tensors of a checkpoint in another layout of its family the names and shapes of the family's table.
///
/// # Errors
/// The checkpoint does not fit that layout.
pub fn normalize_layout(checkpoint: Checkpoint) -> Result<Checkpoint> {
    if is_gguf(&checkpoint.path) {
        return Ok(checkpoint);
    }
    let checkpoint = zaya::normalize_layout(checkpoint)?;
    let Ok(known) = known_family(&checkpoint.config, &checkpoint.path) else { return Ok(checkpoint) };
    let checkpoint = own_head::untie(checkpoint)?;
    let decoder = describe(&checkpoint)?;
    let prefix = prefix(&checkpoint, &decoder)?;
    let mut is_other = false;
    let has = |name: &str| checkpoint.source.info(name).is_some();
    // Writers drop one of two tensors that share memory, sometimes the embedding.
    let is_head = decoder.is_tied && has(HEAD) && !has(&full_name(prefix, EMBEDDING));
    let mut origin = |row: &TensorRow| {
        let found = match is_head && row.name == EMBEDDING {
            true => Some(TensorOrigin::Whole(HEAD.into())),
            false => (known.origin)(row, prefix, &checkpoint),
        };
        is_other |= found.is_some();
        found.unwrap_or_else(|| TensorOrigin::Whole(full_name(prefix, &row.name)))
    };
    let derived = |row: TensorRow| DerivedTensor {
        name: full_name(prefix, &row.name),
        origin: origin(&row),
        shape: row.shape,
    };
    let tensors: Vec<DerivedTensor> = decoder.tensors().into_iter().map(derived).collect();
    match is_other {
        true => derive(checkpoint, tensors, checked::is_unneeded),
        false => Ok(checkpoint),
    }
}
