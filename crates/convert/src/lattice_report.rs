//! Reports which weights of a checkpoint lie on a lattice.

use crate::Result;
use crate::importance::Importance;
use crate::kind_search::{matrices, sampled};
use crate::lattice::Lattice;
use crate::lower::encode_matrix;
use crate::models::Family;
use crate::plan::{MatrixPlan, Plan};
use crate::quant::{Groups, MatrixQuant, Quant};
use crate::quantize::Metrics;
use anemoe_bundle::IndexBits;
use serde::Serialize;
use std::collections::BTreeMap;

/// Most tensors that are sampled: a checkpoint of the hub is read over the network.
const MOST_TENSORS: usize = 16;

/// Shares of tensors that lie on a lattice.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Serialize)]
pub struct LatticeShares {
    /// Tensors of matrices that were sampled.
    pub sampled: usize,
    /// Sampled tensors on the lattice of MXFP4.
    pub mxfp4: usize,
    /// Sampled tensors on the lattice of Q4_0.
    pub q4_0: usize,
}

impl LatticeShares {
    /// Samples the tensors of a plan, evenly spread.
    pub fn of(family: &Family, plan: &Plan) -> LatticeShares {
        let mut all = LatticeShares::default();
        for part in by_part(family, plan).into_values() {
            all.sampled += part.sampled;
            all.mxfp4 += part.mxfp4;
            all.q4_0 += part.q4_0;
        }
        all
    }

    /// Returns the lattices with their number of tensors.
    fn each(self) -> impl Iterator<Item = (Lattice, usize)> {
        [(Lattice::Mxfp4, self.mxfp4), (Lattice::Q4_0, self.q4_0)].into_iter().filter(|(_, n)| *n > 0)
    }

    /// Says for each lattice how many tensors lie on it, and what keeps them.
    pub fn remarks(self) -> Vec<String> {
        let remark = |(lattice, n): (Lattice, usize)| {
            format!(
                "{n} of {} sampled weights lie on the lattice of {}: {} keeps them, other kinds quantize them a second time",
                self.sampled,
                lattice.name(),
                lattice.kind()
            )
        };
        self.each().map(remark).collect()
    }
}

/// Samples the tensors of a plan, by part of the model.
fn by_part(family: &Family, plan: &Plan) -> BTreeMap<String, LatticeShares> {
    let all = matrices(plan);
    let mut parts: BTreeMap<String, LatticeShares> = BTreeMap::new();
    for ((_, part), matrices) in all.iter().step_by(all.len().div_ceil(MOST_TENSORS).max(1)) {
        let shares = parts.entry(part.clone()).or_default();
        shares.sampled += 1;
        match matrices.first().and_then(|m| Lattice::of_matrix(family, m)) {
            Some(Lattice::Mxfp4) => shares.mxfp4 += 1,
            Some(Lattice::Q4_0) => shares.q4_0 += 1,
            None => {}
        }
    }
    parts
}

/// Says which parts of the model lie on a lattice, and what `lut4` would lose of them; and where the plan has `mxfp4`,
/// what is known of it on the Neural Engine.
///
/// # Errors
/// The checkpoint cannot be read.
pub fn notes(family: &Family, plan: &Plan, importance: Option<&Importance>) -> Result<Vec<String>> {
    let mut notes = Vec::new();
    for (part, shares) in by_part(family, plan) {
        for (lattice, n) in shares.each() {
            let tensors = matrices(plan);
            let is_on_it = |(key, m): &(&(String, String), &Vec<MatrixPlan>)| {
                key.1 == part && Lattice::of_tensor(family, m) == Some(lattice)
            };
            let Some((_, matrices)) = tensors.iter().find(is_on_it) else { continue };
            let (loss, weights) = lut4_loss(family, matrices, importance)?;
            notes.push(format!(
                "{part}: {n} of {} sampled weights lie on the lattice of {}, which {} keeps at 4.5 bits; lut4 per 32 rows \
                 would lose {:.2} % of their squares (measured on {weights} weights)",
                shares.sampled,
                lattice.name(),
                lattice.kind(),
                100.0 * loss
            ));
        }
    }
    if plan.shards.iter().flat_map(|s| &s.matrices).any(|m| m.quant.kind == Quant::Mxfp4) {
        notes.push(
            "mxfp4 is a table behind scales: on the Neural Engine such weights failed to load (error -14 on A19 and M4, \
             JR: TERNARY_BONSAI; an assertion on macOS 26, coremltools #2688); expect the CPU or the GPU"
                .into(),
        );
    }
    Ok(notes)
}

/// Measures the relative squared error of `lut4` per 32 rows on a sample of a tensor. Returns it with the weights.
fn lut4_loss(
    family: &Family,
    matrices: &[MatrixPlan],
    importance: Option<&Importance>,
) -> Result<(f64, u64)> {
    let mut metrics = Metrics::default();
    for m in sampled(matrices) {
        let quant = MatrixQuant::resolve(Quant::lut(IndexBits::Four), Groups::default(), m.rows, m.cols);
        let m = MatrixPlan { quant, ..m };
        let side = encode_matrix(&family.checked, &m, importance, None, &mut |_| Ok(()))?;
        metrics.merge(&side.metrics);
    }
    Ok((metrics.output_error(), metrics.count))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn remarks_name_the_kind_that_keeps_the_weights() {
        let shares = LatticeShares { sampled: 16, mxfp4: 12, q4_0: 0 };
        let remarks = shares.remarks();
        assert_eq!(remarks.len(), 1);
        assert!(remarks[0].starts_with("12 of 16") && remarks[0].contains("mxfp4 keeps"), "{remarks:?}");
        assert!(LatticeShares { sampled: 3, ..LatticeShares::default() }.remarks().is_empty());
    }
}
