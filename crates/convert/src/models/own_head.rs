//! Heads that a configuration ties to the embedding and that a checkpoint has as another matrix.

use super::checked::prefix;
use super::llama::HEAD_BESIDE;
use super::registry::describe;
use super::tensor_table::{EMBEDDING, HEAD, full_name};
use crate::checkpoint::{Checkpoint, TensorSource};
use crate::{Error, Result};
use rayon::prelude::*;
use serde_json::{Value, json};

/// Key of a configuration that says whether the head is the embedding.
const KEY: &str = "tie_word_embeddings";
/// Elements that are compared at a time.
const BLOCK: u64 = 1 << 20;

/// Gives a model its own head where the configuration ties it to the embedding and the checkpoint has a head with other
/// values, as fine-tuning leaves it: transformers 5 runs both then.
///
/// # Errors
/// The matrices cannot be read, or the family has no head of its own.
pub fn untie(mut checkpoint: Checkpoint) -> Result<Checkpoint> {
    let decoder = describe(&checkpoint)?;
    let embedding = full_name(prefix(&checkpoint, decoder.prefixes)?, EMBEDDING);
    let names = [HEAD, HEAD_BESIDE];
    let Some(head) = names.into_iter().find(|name| checkpoint.source.info(name).is_some()) else {
        return Ok(checkpoint);
    };
    if !decoder.is_tied || !differ(checkpoint.source.as_ref(), &embedding, head)? {
        return Ok(checkpoint);
    }
    checkpoint.config[KEY] = json!(false);
    if checkpoint.config.get("text_config").is_some_and(Value::is_object) {
        checkpoint.config["text_config"][KEY] = json!(false);
    }
    describe(&checkpoint).map_err(|_| {
        let what = format!("tensor `{head}`: other values than `{embedding}`, which is the head by {KEY}");
        Error::unsupported(&checkpoint.path, what)
    })?;
    let what = "is the head, as in transformers 5, since its values are other than the embedding's";
    checkpoint.remarks.push(format!("`{head}` {what}; the configuration says that both are one ({KEY})"));
    Ok(checkpoint)
}

/// Tells whether two matrices of one shape differ. Of a checkpoint elsewhere, eight places are compared.
fn differ(source: &dyn TensorSource, a: &str, b: &str) -> Result<bool> {
    let (Some(one), Some(other)) = (source.info(a), source.info(b)) else { return Ok(false) };
    // A head of another shape cannot be the model's: it holds a place.
    if one.shape != other.shape {
        return Ok(false);
    }
    let elements = one.elements();
    let (size, step) = if one.file.is_file() { (BLOCK, BLOCK) } else { (1 << 10, elements.div_ceil(8)) };
    let starts: Vec<u64> = (0..elements).step_by(step.max(1) as usize).collect();
    let differ_at = |start: &u64| {
        let range = *start..(start + size).min(elements);
        let mut values = [a, b].map(|_| vec![0f32; (range.end - range.start) as usize]);
        for (name, values) in [a, b].into_iter().zip(&mut values) {
            source.read(name, range.clone(), values)?;
        }
        Ok(values[0] != values[1])
    };
    let found = starts.par_iter().map(differ_at).find_any(|found| !matches!(found, Ok(false)));
    found.unwrap_or(Ok(false))
}
