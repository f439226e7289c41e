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
        let planned = path.to_str().with_context(|| format!("{}: not UTF-8", path.display()))?;
        // Commands would read an option.
        let planned = if planned.starts_with('-') { format!("./{planned}") } else { planned.to_string() };
        let is_synthetic = models::is_synthetic(&planned);
        let is_checkpoint = |path: &Path| matches!(PathKind::at(path), PathKind::Checkpoint | PathKind::Gguf);
        if !is_synthetic && !is_checkpoint(&locate(path, Extent::Whole)?.path) {
            bail!(
                "{planned}: no checkpoint (a Hugging Face folder or a .gguf file); the recipe {} names {}",
                recipe.name,
                recipe.source.display()
            );
        }
        let (name, query) = planned.split_once('?').unwrap_or((&planned, ""));
        let sets_layers = |pair: &&str| pair.starts_with("layers=");
        if !is_synthetic || layers.is_none() && query.split('&').any(|pair| sets_layers(&pair)) {
            return Ok(Source { built: planned.clone(), planned, is_synthetic, layers: None });
        }
        let layers = layers.unwrap_or(recipe.layers);
        let mut pairs: Vec<&str> = query.split('&').filter(|p| !p.is_empty() && !sets_layers(p)).collect();
        let cut = format!("layers={layers}");
        pairs.push(&cut);
        let built = format!("{name}?{}", pairs.join("&"));
        Ok(Source { built, planned, is_synthetic, layers: Some(layers) })
    }
}
