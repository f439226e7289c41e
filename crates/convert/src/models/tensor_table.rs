//! Tensors of a model, and the check of a checkpoint against them.

use crate::checkpoint::TensorSource;
use crate::{Error, Result};
use serde::{Deserialize, Serialize};
use std::collections::BTreeMap;

/// Name of an output head's own matrix, which has no prefix.
pub const HEAD: &str = "lm_head.weight";
/// Name of the embedding, without a prefix.
pub const EMBEDDING: &str = "embed_tokens.weight";

/// Role of the tensor with the tokens of an assistant's groups: integers, all others are weights.
pub const TOKEN_ORDERING: &str = "token_ordering";
/// Beginnings of other names without a prefix: what an assistant has around its layers.
const AROUND: [&str; 3] = ["pre_projection.", "post_projection.", "masked_embedding."];

/// Returns the name of a tensor in its checkpoint.
pub fn full_name(prefix: &str, name: &str) -> String {
    let is_outside = name == HEAD || AROUND.iter().any(|around| name.starts_with(around));
    if is_outside { name.to_string() } else { format!("{prefix}{name}") }
}

/// Part of a model that a tensor belongs to.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
pub enum ModelPart {
    /// Attention projections and their norms.
    Attention,
    /// Router, which chooses experts.
    Router,
    /// Experts.
    Experts,
    /// Dense MLP, which every token uses.
    DenseMlp,
    /// Norms and scalars of layers.
    Norms,
    /// Embedding, which may be the output head too.
    Embedding,
    /// Output head that is not the embedding.
    Head,
}

impl ModelPart {
    /// Returns the name in reports.
    pub const fn name(self) -> &'static str {
        match self {
            ModelPart::Attention => "attention",
            ModelPart::Router => "router",
            ModelPart::Experts => "experts",
            ModelPart::DenseMlp => "dense_mlp",
            ModelPart::Norms => "norms",
            ModelPart::Embedding => "embedding",
            ModelPart::Head => "head",
        }
    }
}

/// One tensor that a model has.
#[derive(Clone, Debug, PartialEq)]
pub struct TensorRow {
    /// Role in the network; the name of the weight in packages.
    pub role: &'static str,
    /// Name without the checkpoint's prefix.
    pub name: String,
    /// Shape, outermost first.
    pub shape: Vec<u64>,
    /// Part of the model.
    pub part: ModelPart,
    /// Layer, where the tensor belongs to one.
    pub layer: Option<usize>,
}

impl TensorRow {
    /// Returns the number of weights.
    pub fn elements(&self) -> u64 {
        self.shape.iter().product()
    }
}

/// Checks that a checkpoint has exactly the tensors of the table, with their shapes; `skip` tells those of other
/// modalities.
///
/// # Errors
/// A tensor is missing, superfluous, of another shape, or of a type that weights do not have; the error names it.
pub fn check_tensors(
    source: &dyn TensorSource,
    prefix: &str,
    table: &[TensorRow],
    skip: impl Fn(&str) -> bool,
) -> Result<()> {
    let rows: BTreeMap<String, &TensorRow> = table.iter().map(|r| (full_name(prefix, &r.name), r)).collect();
    let mut extra = None;
    for info in source.tensors() {
        match rows.get(&info.name) {
            Some(row) if row.shape == info.shape && row.role == TOKEN_ORDERING => {}
            Some(row) if row.shape == info.shape => info.check_weight()?,
            Some(row) => {
                return Err(Error::invalid(
                    &info.file,
                    format!("tensor `{}`: shape {:?}, expected {:?}", info.name, info.shape, row.shape),
                ));
            }
            None if skip(&info.name) => {}
            None => extra = extra.or(Some(info)),
        }
    }
    // A missing tensor says more than a superfluous one, and is reported first.
    if let Some((name, row)) = rows.iter().find(|(name, _)| source.info(name).is_none()) {
        let what = format!("checkpoint: tensor `{name}` {:?} is missing", row.shape);
        return Err(Error::invalid(source.path(), what));
    }
    match extra {
        None => Ok(()),
        Some(info) => {
            let hint = match info.name.ends_with("_scale") || info.name.ends_with("_scale_inv") {
                true => "; weights with scales need a `quantization_config` in config.json",
                false => "",
            };
            let what = format!("tensor `{}`: this model has none of that name{hint}", info.name);
            Err(Error::invalid(&info.file, what))
        }
    }
}
