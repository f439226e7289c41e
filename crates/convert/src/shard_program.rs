//! The MIL program of a shard: each of its functions, lowered over weights that are written or only planned.

use crate::lower::{OPSET, Stored};
use crate::models::Family;
use crate::plan::PlannedShard;
use crate::{Error, Result};
use anemoe_mlpackage::mil::MlModel;
use anemoe_mlpackage::mil::builder::model;
use anemoe_mlpackage::mil::verify::verify;

/// Lowers every function of a shard.
///
/// # Errors
/// The program breaks MIL's rules; a fault of the lowering, not of the input.
pub fn lower_shard(family: &Family, shard: &PlannedShard, stored: &Stored) -> Result<MlModel> {
    let mut functions = Vec::new();
    for function in &shard.functions {
        functions.push((function.name.clone(), family.lower(shard, function, stored)?));
    }
    let default = shard.functions.first().map(|f| f.name.clone()).unwrap_or_default();
    let model = model(OPSET, functions, &default)?;
    // A program that Core ML's compiler would refuse is caught before anything is written.
    if let Some(finding) = verify(&model).first() {
        let what = format!("shard {}: {finding}", shard.name);
        return Err(Error::invalid_program(what));
    }
    Ok(model)
}

/// Lowers a shard that is not built. The program's weights have types and offsets but no data; the checkpoint is not
/// read.
///
/// # Errors
/// Fails like [`lower_shard`].
pub fn lower_without_weights(family: &Family, shard: &PlannedShard) -> Result<MlModel> {
    lower_shard(family, shard, &Stored::from_plan(shard)?)
}
