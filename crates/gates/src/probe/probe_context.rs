//! Context of probes: checkpoint, plan and files, and the tokens that a probe gives to a shard.

use crate::Result;
use anemoe_bundle::Chain;
use anemoe_convert::build::write_shard;
use anemoe_convert::importance::Importance;
use anemoe_convert::models::Family;
use anemoe_convert::plan::{Plan, PlannedShard};
use std::path::{Path, PathBuf};

/// Inputs that shards are made from, and their places.
pub struct ProbeContext<'a> {
    /// The checkpoint.
    pub family: &'a dyn Family,
    /// The plan of the shards.
    pub plan: &'a Plan,
    /// The contract, or its draft.
    pub chain: &'a Chain,
    /// Folder of the bundle, for the files beside the shards.
    pub bundle: &'a Path,
    /// The importances that the shards were compressed with, where they were.
    pub importance: Option<&'a Importance>,
    /// Folder for FP16 references. They stay there: the next shard of the same layer may need one again.
    pub scratch: &'a Path,
}

/// One token: values of the register `hidden`, and of other registers that the segment needs.
pub type ProbeToken<'a> = Vec<(&'a str, Vec<f32>)>;

/// The place of a shard's FP16 form.
pub fn fp16_path(site: &ProbeContext<'_>, name: &str) -> PathBuf {
    site.scratch.join(format!("{name}.fp16.mlpackage"))
}

/// Writes the FP16 form of a shard, unless it is there.
pub fn write_fp16(site: &ProbeContext<'_>, shard: &PlannedShard) -> Result<()> {
    let path = fp16_path(site, &shard.name);
    if !path.is_dir() {
        // Probes go token by token.
        let mut fp16 = shard.in_fp16();
        fp16.functions.retain(|f| f.tokens.min == 1);
        write_shard(site.family, &fp16, None, &path)?;
    }
    Ok(())
}
