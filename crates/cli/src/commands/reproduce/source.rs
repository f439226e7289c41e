//! Sources of builds: checkpoints, and synthetic models cut to fewer layers.

use super::recipe::Recipe;
use crate::args::hub_checkpoint::{Extent, locate};
use anemoe_convert::models;
use anemoe_convert::path_kind::PathKind;
use anyhow::{Context, bail};
use std::path::Path;

/// Checkpoint that is planned, and checkpoint that is built.
pub(super) struct Source {
    pub planned: String,
    /// Checkpoint that is built: the planned one, with fewer layers if it is synthetic.
    pub built: String,
    pub is_synthetic: bool,
    /// Layers of the model that are built; none for all.
    pub layers: Option<usize>,
}

impl Source {
    /// Makes the source of the checkpoint at `path`; cuts a synthetic one to `layers`, else to the recipe's layers.
    ///
    /// # Errors
    /// There is no checkpoint at `path`.
    pub fn new(recipe: &Recipe, path: &Path, layers: Option<usize>) -> anyhow::Result<Source> {
        let mut planned =
            path.to_str().with_context(|| format!("{}: not UTF-8", path.display()))?.to_string();
        if planned.starts_with('-') {
            // Commands would read an option.
            planned.insert_str(0, "./");
        }
        let is_synthetic = models::is_synthetic(&planned);
        if !is_synthetic {
            if !matches!(
                PathKind::at(&locate(path, Extent::Whole)?.path),
                PathKind::Checkpoint | PathKind::Gguf
            ) {
                bail!(
                    "{planned}: no checkpoint (a Hugging Face folder or a .gguf file); the recipe {} names {}",
                    recipe.name,
                    recipe.source.display()
                );
            }
            return Ok(Source { built: planned.clone(), planned, is_synthetic, layers: None });
        }
        let given = planned.split(['?', '&']).any(|pair| pair.starts_with("layers="));
        if given && layers.is_none() {
            return Ok(Source { built: planned.clone(), planned, is_synthetic, layers: None });
        }
        let (name, query) = planned.split_once('?').unwrap_or((&planned, ""));
        let mut pairs: Vec<String> = query
            .split('&')
            .filter(|p| !p.is_empty() && !p.starts_with("layers="))
            .map(str::to_string)
            .collect();
        let layers = layers.unwrap_or(recipe.layers);
        pairs.push(format!("layers={layers}"));
        let built = format!("{name}?{}", pairs.join("&"));
        Ok(Source { built, planned, is_synthetic, layers: Some(layers) })
    }
}
