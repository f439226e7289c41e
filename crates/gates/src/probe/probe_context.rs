//! Context of probes (checkpoint, plan, files), and the tokens that a probe gives to a shard.

use crate::Result;
use anemoe_bundle::Chain;
use anemoe_convert::build::write_shard;
use anemoe_convert::importance::Importance;
use anemoe_convert::models::Family;
use anemoe_convert::plan::{Plan, PlannedShard};
use std::path::{Path, PathBuf};

/// Sources of the probed shards, and the folders of their files.
pub struct ProbeContext<'a> {
    /// Family of the checkpoint.
    pub family: &'a Family,
    /// Plan of the shards.
    pub plan: &'a Plan,
    /// Contract of the bundle, or its draft.
    pub chain: &'a Chain,
    /// Folder of the bundle, with the files beside the shards.
    pub bundle: &'a Path,
    /// Importances that the shards were compressed with, if any.
    pub importance: Option<&'a Importance>,
    /// Folder for FP16 forms. The forms stay there: the next shard of the same layer may need one again.
    pub scratch: &'a Path,
}

/// Token of a probe: values of the register `hidden`, and of other registers that the segment needs.
pub type ProbeToken<'a> = Vec<(&'a str, Vec<f32>)>;

/// Returns the path of a shard's FP16 form.
pub fn fp16_path(site: &ProbeContext<'_>, name: &str) -> PathBuf {
    site.scratch.join(format!("{name}.fp16.mlpackage"))
}

/// Writes the FP16 form of a shard for single tokens, unless it exists.
pub fn write_fp16(site: &ProbeContext<'_>, shard: &PlannedShard) -> Result<()> {
    let path = fp16_path(site, &shard.name);
    if !path.is_dir() {
        // Probes run token by token.
        let mut fp16 = shard.in_fp16();
        fp16.functions.retain(|f| f.tokens.min == 1);
        write_shard(site.family, &fp16, None, &path)?;
    }
    Ok(())
}
