//! Makes the plan of a finished bundle again.

use super::Family;
use crate::kind_search::{Kinds, apply};
use crate::plan::{Plan, PlanOptions};
use crate::quant::Quant;
use crate::{Error, Result};
use anemoe_bundle::Chain;
use std::path::Path;

/// Makes the plan that a bundle was built from again, from its checkpoint.
///
/// # Errors
/// The bundle does not say its options (older versions did not), or it is of another checkpoint.
pub fn replan(family: &Family, bundle: &Path, chain: &Chain) -> Result<Plan> {
    let path = bundle.join(anemoe_bundle::CHAIN_FILE);
    let wrong = |what: String| Error::invalid(&path, format!("chain: {what}"));
    if chain.options.is_null() {
        return Err(wrong(
            "does not say the options that it was built with: an older version wrote it".into(),
        ));
    }
    let options: PlanOptions = serde_json::from_value(chain.options.clone()).map_err(|e| {
        wrong(format!("the options that it was built with: {}", anemoe_io::json::JsonError::from(e)))
    })?;
    let mut plan = family.plan(&options)?;
    if let Some(choice) = &chain.auto {
        let mut kinds = Kinds::default();
        for t in &choice.tensors {
            kinds.set(&t.tensor, &t.part, &t.experts, t.kind.parse::<Quant>().map_err(wrong)?);
        }
        apply(&mut plan, &kinds)?;
        plan.chain.auto = chain.auto.clone();
    }
    let own = plan.shards.iter().map(|s| (&s.name, s.kind, s.weights, &s.quant));
    if !own.eq(chain.shards.iter().map(|s| (&s.name, s.kind, s.weights, &s.quant))) {
        let what = format!("its shards are not those of the checkpoint {}", plan.source);
        return Err(wrong(what));
    }
    Ok(plan)
}
