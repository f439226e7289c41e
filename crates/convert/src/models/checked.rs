//! A checkpoint that was checked against a family's tensor table.

use super::tensor_table::{EMBEDDING, HEAD, ModelPart, TensorRow, check_tensors, full_name};
use crate::checkpoint::Checkpoint;
use crate::compressed::CompressedMatrices;
use crate::{Error, Result};
use rayon::prelude::*;
use std::collections::BTreeMap;
use std::ops::Range;
use std::sync::OnceLock;

/// Suffix of the name of a matrix whose rows are in ascending order of their norms.
pub const BY_NORM: &str = " by norm";

/// A checkpoint and the prefix of its tensors' names.
pub struct CheckedCheckpoint {
    /// The checkpoint.
    pub checkpoint: Checkpoint,
    prefix: &'static str,
    parts: BTreeMap<String, ModelPart>,
    /// Rows of the head in ascending order of their norms.
    order: OnceLock<Vec<u32>>,
    /// Matrices that are compressed already.
    pub compressed: OnceLock<CompressedMatrices>,
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
    ) -> Result<CheckedCheckpoint> {
        let prefix = prefix(&checkpoint, prefixes)?;
        check_tensors(checkpoint.source.as_ref(), prefix, table, is_unneeded)?;
        let parts = table.iter().map(|r| (full_name(prefix, &r.name), r.part)).collect();
        Ok(CheckedCheckpoint {
            checkpoint,
            prefix,
            parts,
            order: OnceLock::new(),
            compressed: OnceLock::new(),
        })
    }

    /// Reads elements of a tensor named without the checkpoint's prefix.
    ///
    /// # Errors
    /// The file cannot be read, or a value is NaN or infinite.
    pub fn read(&self, name: &str, range: Range<u64>, out: &mut [f32]) -> Result<()> {
        let Some(matrix) = name.strip_suffix(BY_NORM) else {
            return self.checkpoint.source.read(&full_name(self.prefix, name), range, out);
        };
        let order = self.rows_by_norm(matrix)?;
        let cols = self.columns(matrix)?;
        let (mut at, mut out) = (range.start, out);
        while !out.is_empty() {
            let (row, first) = (order[(at / cols) as usize], at % cols);
            let (own, rest) = out.split_at_mut(((cols - first) as usize).min(out.len()));
            let start = u64::from(row) * cols + first;
            self.read(matrix, start..start + own.len() as u64, own)?;
            at += own.len() as u64;
            out = rest;
        }
        Ok(())
    }

    /// Returns the shape of a tensor named without the checkpoint's prefix; none where there is no such tensor.
    pub fn shape(&self, name: &str) -> Option<&[u64]> {
        self.checkpoint.source.info(&full_name(self.prefix, name)).map(|info| info.shape.as_slice())
    }

    /// Returns the columns of a matrix.
    fn columns(&self, name: &str) -> Result<u64> {
        match self.shape(name) {
            Some([_, cols]) if *cols > 0 => Ok(*cols),
            _ => Err(self.refuse(name, 0, "is no matrix")),
        }
    }

    /// Returns the rows of the head, the matrix `name`, in ascending order of their norms.
    ///
    /// # Errors
    /// The matrix cannot be read.
    pub fn rows_by_norm(&self, name: &str) -> Result<&[u32]> {
        if let Some(order) = self.order.get() {
            return Ok(order);
        }
        let cols = self.columns(name)?;
        let rows = self.shape(name).map_or(0, |shape| shape[0]);
        let norm = |row: u64| {
            let mut values = vec![0f32; cols as usize];
            self.read(name, row * cols..(row + 1) * cols, &mut values)?;
            Ok(values.iter().map(|v| f64::from(*v) * f64::from(*v)).sum())
        };
        let norms: Vec<f64> = (0..rows).into_par_iter().map(norm).collect::<Result<_>>()?;
        let mut order: Vec<u32> = (0..rows as u32).collect();
        order.sort_by(|&a, &b| norms[a as usize].total_cmp(&norms[b as usize]).then(a.cmp(&b)));
        Ok(self.order.get_or_init(|| order))
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
        let name = name.strip_suffix(BY_NORM).unwrap_or(name);
        let (file, tensor) = self.checkpoint.source.origin(&full_name(self.prefix, name), element);
        Error::invalid(file, format!("tensor `{tensor}`: {what}"))
    }

    /// Returns a remark on the tensors for other modalities and tasks; none where there are none.
    pub fn remark_on_others(&self) -> Option<String> {
        let all: Vec<&str> = self.checkpoint.source.tensors().iter().map(|t| t.name.as_str()).collect();
        let others: Vec<&str> = all.into_iter().filter(|name| is_of_other(name)).collect();
        let first = others.first()?;
        let more = match others.len() - 1 {
            0 => String::new(),
            n => format!(" and {n} more"),
        };
        Some(format!("`{}`{more}: left out, since generating text does not need it", first.escape_debug()))
    }

    /// Returns the part of the model of every tensor, by its full name.
    pub fn parts(&self) -> &BTreeMap<String, ModelPart> {
        &self.parts
    }
}

/// Beginnings of the names of tensors for other modalities, other tasks, and predictions of several tokens at once,
/// behind `model.` or without it.
const OTHER: [&str; 17] = [
    "vision_tower.",
    "vision_model.",
    "visual.",
    "embed_vision.",
    "audio_tower.",
    "embed_audio.",
    "multi_modal_projector.",
    "score.",
    "classifier.",
    "qa_outputs.",
    "v_head.",
    "mtp.",
    "mtp_layers.",
    "mtp_emb_norm.",
    "mtp_hidden_norm.",
    "mtp_token_norm.",
    "mtp_final_norm.",
];

/// Tells whether text does not need a tensor that is not in its table: it is of another modality or task, a copy of a
/// tied embedding, computed from the configuration, or a scale of keys and values in FP8, which stay floats here.
pub fn is_unneeded(name: &str) -> bool {
    const ENDINGS: [&str; 6] =
        ["rotary_emb.inv_freq", ".q_scale", ".k_scale", ".v_scale", ".kv_scale", "_proj.output_scale"];
    name == HEAD
        || name.starts_with("language_model.lm_head.")
        || is_of_other(name)
        || ENDINGS.iter().any(|ending| name.ends_with(ending))
}

fn is_of_other(name: &str) -> bool {
    let name = name.strip_prefix("model.").unwrap_or(name);
    OTHER.iter().any(|p| name.starts_with(p))
}

/// Finds the prefix of a checkpoint's tensors, by `embed_tokens.weight`, or by `norm.weight` where the head stands for it.
///
/// # Errors
/// There is no embedding under any prefix.
pub fn prefix(checkpoint: &Checkpoint, prefixes: &[&'static str]) -> Result<&'static str> {
    let has = |name: String| checkpoint.source.info(&name).is_some();
    let by = |name: &str| prefixes.iter().find(|p| has(format!("{p}{name}"))).copied();
    let by_norm = || by("norm.weight").filter(|_| has(HEAD.into()));
    by(EMBEDDING).or_else(by_norm).ok_or_else(|| {
        let names: Vec<String> = prefixes.iter().map(|p| format!("`{p}embed_tokens.weight`")).collect();
        let what = match names.as_slice() {
            [one] => format!("checkpoint: {one} is missing"),
            _ => format!("checkpoint: neither {} is there", names.join(" nor ")),
        };
        Error::invalid(&checkpoint.path, what)
    })
}

#[cfg(test)]
mod tests {
    use super::is_unneeded;

    #[test]
    fn scales_of_caches_and_other_modalities_and_tasks_are_not_needed() {
        for layer in
            ["rotary_emb.inv_freq", "k_scale", "v_proj.v_scale", "attn.kv_scale", "k_proj.output_scale"]
        {
            assert!(is_unneeded(&format!("model.layers.0.self_attn.{layer}")), "{layer}");
        }
        for name in [
            "vision_tower.x",
            "model.visual.x",
            "lm_head.weight",
            "score.weight",
            "rotary_emb.inv_freq",
            "mtp.fc.weight",
        ] {
            assert!(is_unneeded(name), "{name}");
        }
        for name in [
            "model.layers.0.self_attn.q_proj.lora_A.weight",
            "model.layers.0.self_attn.q_proj.bias",
            "model.layers.0.score.weight",
        ] {
            assert!(!is_unneeded(name), "{name}");
        }
    }
}
