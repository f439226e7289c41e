//! Layers that are probed before all shards are built: those that the statistics of the weights call worst, and some that are
//! evenly spread. A representative says that a kind works on one layer; INT8 with one scale per tensor passes on most layers and
//! fails on those with outliers.

use crate::Result;
use anemoe_convert::build::Build;
use anemoe_convert::models::Family;
use anemoe_convert::outliers::{Outlier, Spread};
use anemoe_convert::plan::{MatrixPlan, Plan, PlannedShard};
use anemoe_convert::quant::MatrixQuant;
use serde::Serialize;
use std::collections::{BTreeMap, BTreeSet};

/// Evenly spread layers when nothing is said: as many as the hand-made port looked at.
pub const LAYERS: usize = 7;

/// Worst layers that are probed.
const WORST: usize = 3;

/// A matrix of a layer, by how far its largest weight stands out.
#[derive(Clone, Debug, PartialEq, Serialize)]
pub struct WorstMatrix {
    /// Layer, from 0.
    pub layer: usize,
    /// Shard.
    pub shard: String,
    /// Matrix in it.
    pub matrix: String,
    /// Its checkpoint tensor, without the checkpoint's prefix.
    pub tensor: String,
    /// Largest over mean magnitude, among the weights that were looked at.
    pub ratio: f64,
    /// Every weight was looked at: it is an outlier in a kind that has one step for the whole tensor, or the matrix is small.
    pub whole: bool,
}

/// Shards that are probed besides the representatives.
#[derive(Clone, Debug, Default, PartialEq, Serialize)]
pub struct LayerSample {
    /// The worst layers, the worst first, with the matrix that makes each so.
    pub worst: Vec<WorstMatrix>,
    /// The evenly spread ones.
    pub spread: Vec<usize>,
    /// Names of the shards: of a worst layer the one with that matrix, of the others one of each type.
    pub shards: Vec<String>,
    #[serde(skip)]
    pub(crate) indices: Vec<usize>,
}

/// Chooses the shards to probe among `own`, besides those of `known`: the worst layers and `count` evenly spread ones. With 0,
/// there are none of both. `outliers` are those that are known from reading whole matrices; of the others a sample is read.
///
/// # Errors
/// The checkpoint cannot be read.
pub fn choose(build: &Build<'_>, outliers: &[Outlier], known: &[usize], count: usize) -> Result<LayerSample> {
    if count == 0 {
        return Ok(LayerSample::default());
    }
    let (plan, own) = (build.plan(), build.own());
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
    // In the order of the plan: what shards of one layer need is there once.
    indices.sort_unstable();
    let shards = indices.iter().map(|&i| plan.shards[i].name.clone()).collect();
    Ok(LayerSample { worst, spread, shards, indices })
}

/// `count` of these, from the first to the last.
fn spread(layers: &[usize], count: usize) -> Vec<usize> {
    let n = layers.len();
    match count.min(n) {
        0 => Vec::new(),
        1 => vec![layers[n / 2]],
        k => (0..k).map(|i| layers[i * (n - 1) / (k - 1)]).collect(),
    }
}

/// The worst matrix of each layer, of the worst layers.
fn worst(family: &dyn Family, plan: &Plan, own: &[usize], outliers: &[Outlier]) -> Result<Vec<WorstMatrix>> {
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
