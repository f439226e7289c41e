//! Sample of layers that are probed before all shards are built: the layers with the worst weight statistics, and
//! evenly spread ones. A representative shows that a kind works on one layer. INT8 with one scale per tensor works on
//! most layers, and fails on those with outliers.

use crate::Result;
use anemoe_convert::build::Build;
use anemoe_convert::models::Family;
use anemoe_convert::outliers::{Outlier, Spread};
use anemoe_convert::plan::{MatrixPlan, Plan, PlannedShard};
use anemoe_convert::quant::MatrixQuant;
use serde::Serialize;
use std::collections::{BTreeMap, BTreeSet};

/// Default number of evenly spread layers, as in the hand-made port.
pub const LAYERS: usize = 7;

/// Number of worst layers that are probed.
const WORST: usize = 3;

/// Matrix of a layer whose largest weight stands out.
#[derive(Clone, Debug, PartialEq, Serialize)]
pub struct WorstMatrix {
    /// Layer, from 0.
    pub layer: usize,
    /// Name of the shard.
    pub shard: String,
    /// Name of the matrix in the shard.
    pub matrix: String,
    /// Name of the matrix's checkpoint tensor, without the checkpoint's prefix.
    pub tensor: String,
    /// Largest magnitude over mean magnitude, of the weights that were read.
    pub ratio: f64,
    /// True if every weight was read: the matrix is small, or an outlier in a kind with one step per tensor.
    pub whole: bool,
}

/// Shards that are probed besides the representatives.
#[derive(Clone, Debug, Default, PartialEq, Serialize)]
pub struct LayerSample {
    /// Worst layers, worst first, each with its worst matrix.
    pub worst: Vec<WorstMatrix>,
    /// Evenly spread layers.
    pub spread: Vec<usize>,
    /// Names of the shards: the one with the worst matrix of a worst layer, one of each type of a spread layer.
    pub shards: Vec<String>,
    #[serde(skip)]
    pub(crate) indices: Vec<usize>,
}

/// Chooses the shards to probe among the build's own, without those in `known`: of the worst layers, and of `count`
/// evenly spread layers. With a `count` of 0 there are none of either. `outliers` are known from reading whole
/// matrices; of other matrices a sample is read.
///
/// # Errors
/// The checkpoint cannot be read.
pub fn choose(build: &Build<'_>, outliers: &[Outlier], known: &[usize], count: usize) -> Result<LayerSample> {
    if count == 0 {
        return Ok(LayerSample::default());
    }
    let (plan, own) = (build.plan(), build.own_shards());
    let layers: BTreeSet<usize> = own.iter().filter_map(|&i| plan.shards[i].layer).collect();
    let layers: Vec<usize> = layers.into_iter().collect();
    let spread = spread(&layers, count);
    let mut indices: Vec<usize> = Vec::new();
    let worst = worst(build.family(), plan, &own, outliers)?;
    for w in &worst {
        indices.extend(own.iter().filter(|&&i| plan.shards[i].name == w.shard));
    }
    for &layer in &spread {
        let mut seen = BTreeSet::new();
        let of_layer = own.iter().copied().filter(|&i| plan.shards[i].layer == Some(layer));
        indices.extend(of_layer.filter(|&i| seen.insert(plan.shards[i].signature())));
    }
    let mut taken: BTreeSet<usize> = known.iter().copied().collect();
    indices.retain(|&i| taken.insert(i));
    // In the order of the plan, so that shards of one layer share the forms that they need.
    indices.sort_unstable();
    let shards = indices.iter().map(|&i| plan.shards[i].name.clone()).collect();
    Ok(LayerSample { worst, spread, shards, indices })
}

/// Returns `count` layers, evenly spread from the first to the last.
fn spread(layers: &[usize], count: usize) -> Vec<usize> {
    let n = layers.len();
    match count.min(n) {
        0 => Vec::new(),
        1 => vec![layers[n / 2]],
        k => (0..k).map(|i| layers[i * (n - 1) / (k - 1)]).collect(),
    }
}

/// Returns the worst matrix of each of the worst layers, worst first.
fn worst(family: &Family, plan: &Plan, own: &[usize], outliers: &[Outlier]) -> Result<Vec<WorstMatrix>> {
    let mut by_layer: BTreeMap<usize, WorstMatrix> = BTreeMap::new();
    for &i in own {
        let shard = &plan.shards[i];
        let Some(layer) = shard.layer else { continue };
        for m in shard.matrices.iter().filter(|m| m.quant != MatrixQuant::FP16) {
            let known = outliers.iter().find(|o| o.shard == shard.name && o.matrix == m.name);
            let (spread, whole) = match known {
                Some(o) => (o.spread, true),
                None => Spread::sample(family, m)?,
            };
            let layer = m.layer().unwrap_or(layer);
            let found = stands_out(layer, shard, m, spread, whole);
            let known = by_layer.entry(layer).or_insert_with(|| found.clone());
            if found.ratio > known.ratio {
                *known = found;
            }
        }
    }
    let mut all: Vec<WorstMatrix> = by_layer.into_values().collect();
    all.sort_by(|a, b| b.ratio.total_cmp(&a.ratio));
    all.truncate(WORST);
    Ok(all)
}

fn stands_out(
    layer: usize,
    shard: &PlannedShard,
    m: &MatrixPlan,
    spread: Spread,
    whole: bool,
) -> WorstMatrix {
    WorstMatrix {
        layer,
        shard: shard.name.clone(),
        matrix: m.name.clone(),
        tensor: m.tensor.clone(),
        ratio: spread.ratio(),
        whole,
    }
}

#[cfg(test)]
mod tests {
    use super::spread;

    #[test]
    fn layers_are_spread_from_the_first_to_the_last() {
        let all: Vec<usize> = (0..30).collect();
        assert_eq!(spread(&all, 7), [0, 4, 9, 14, 19, 24, 29]);
        assert_eq!(spread(&all, 2), [0, 29]);
        assert_eq!(spread(&all, 1), [15]);
        assert_eq!(spread(&all, 0), [0; 0]);
        assert_eq!(spread(&[3, 5, 8], 7), [3, 5, 8]);
        assert_eq!(spread(&[], 7), [0; 0]);
    }
}
