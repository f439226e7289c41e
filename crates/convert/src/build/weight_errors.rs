//! Errors of compressed weights during a build, held against those of shards that passed their probes.
//!
//! Matrices that do the same in different layers (query projections, down projections of experts) have nearly the
//! same relative squared error: it follows from the kind and from the shape of their distribution. A matrix that is
//! far from the others holds values that the kind cannot hold, usually an outlier. No probed shard has shown what
//! such values do.

use super::differences::quant_option;
use crate::plan::{MatrixPlan, PlannedShard};
use crate::quantize::Metrics;
use serde::{Deserialize, Serialize};
use std::collections::BTreeMap;

/// Factor on the usual relative squared error above which a matrix is far: its error is twice as long. Over all
/// matrices of two small trained models and two synthetic ones in seven kinds, the largest error of a role is at most
/// 3.65 times its median (INT8 with one scale, 0.00045), and at most 1.14 times where errors are above `HARMLESS_SPREAD`.
pub const FAR: f64 = 4.0;

/// Relative squared error that does no harm, usual or not: a cosine of 0.9995. The bound is low, since an outlier
/// also raises the sum that the error is divided by. Where an outlier of 361 times the mean magnitude has erased all
/// other weights of a matrix of 2048, the relative squared error is 0.0097.
const HARMLESS_SPREAD: f64 = 1e-3;

/// Errors of the matrices of one role in one shard.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
pub struct RoleError {
    /// Role of the matrices, see [`role`].
    role: String,
    /// Median of the matrices' relative squared errors.
    median: f64,
    /// Largest of the matrices' relative squared errors.
    largest: f64,
    /// Matrix with the largest error.
    matrix: String,
    /// Checkpoint tensor of the matrix with the largest error.
    tensor: String,
}

/// A matrix whose error is far from the usual error of its role.
#[derive(Clone, Debug, PartialEq, Serialize)]
pub struct WeightFault {
    /// Shard.
    pub shard: String,
    /// Layer, from 0; absent for the head.
    pub layer: Option<usize>,
    /// Matrix in the shard.
    pub matrix: String,
    /// Checkpoint tensor, without the checkpoint's prefix.
    pub tensor: String,
    /// Role of the matrix, its size and its kind.
    pub role: String,
    /// Relative squared error of the matrix.
    pub error: f64,
    /// Usual error: the median of the role in the probed shards.
    pub usual: f64,
}

impl WeightFault {
    /// Returns the option that chooses another kind for the matrix's part of the model.
    pub fn quant_option(&self) -> &'static str {
        quant_option(self.role.split(' ').next().unwrap_or_default())
    }
}

impl std::fmt::Display for WeightFault {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        let WeightFault { shard, matrix, tensor, role, error, usual, .. } = self;
        write!(
            f,
            "{shard}, {matrix} (tensor `{tensor}`): relative squared error {error:.5}, {:.1} times the {usual:.5} of its like in \
             the probed shards ({role}); probably an outlier",
            error / usual.max(f64::MIN_POSITIVE)
        )
    }
}

/// Names the role of a matrix, the same in all layers and experts: `experts expert_down_weight 704x2816 lut4 g32`.
fn role(m: &MatrixPlan) -> String {
    let name: String = m.name.chars().filter(|c| !c.is_ascii_digit()).collect();
    format!("{} {} {}x{} {}", m.part, name.replace("__", "_"), m.rows, m.cols, m.quant)
}

fn median(mut values: Vec<f64>) -> f64 {
    values.sort_by(f64::total_cmp);
    values.get(values.len() / 2).copied().unwrap_or(0.0)
}

/// Sums up the errors of a shard's matrices by role.
pub fn by_role(errors: &[(&MatrixPlan, Metrics)]) -> Vec<RoleError> {
    let mut roles: BTreeMap<String, Vec<(&MatrixPlan, f64)>> = BTreeMap::new();
    for (m, metrics) in errors {
        roles.entry(role(m)).or_default().push((m, metrics.relative_mse()));
    }
    let sum_up = |(role, all): (String, Vec<(&MatrixPlan, f64)>)| {
        let (worst, largest) = all.iter().max_by(|a, b| a.1.total_cmp(&b.1)).copied()?;
        let median = median(all.iter().map(|e| e.1).collect());
        Some(RoleError { role, median, largest, matrix: worst.name.clone(), tensor: worst.tensor.clone() })
    };
    roles.into_iter().filter_map(sum_up).collect()
}

/// Usual errors by role, from probed shards.
#[derive(Clone, Debug, Default)]
pub struct Usual(BTreeMap<String, f64>);

impl Usual {
    /// Makes the usual errors: the median over `shards` for each role.
    pub fn of<'a>(shards: impl Iterator<Item = &'a [RoleError]>) -> Usual {
        let mut roles: BTreeMap<String, Vec<f64>> = BTreeMap::new();
        for e in shards.flatten() {
            roles.entry(e.role.clone()).or_default().push(e.median);
        }
        Usual(roles.into_iter().map(|(role, all)| (role, median(all))).collect())
    }

    /// Finds the matrix of a shard that is farthest off: more than [`FAR`] times the usual error, and more than [`HARMLESS_SPREAD`].
    pub fn fault(&self, shard: &PlannedShard, errors: &[RoleError]) -> Option<WeightFault> {
        let off = |e: &&RoleError| {
            let far =
                |usual: &f64| e.largest.is_nan() || e.largest > HARMLESS_SPREAD && e.largest > FAR * usual;
            self.0.get(&e.role).is_some_and(far)
        };
        let worst = errors.iter().filter(off).max_by(|a, b| a.largest.total_cmp(&b.largest))?;
        Some(WeightFault {
            shard: shard.name.clone(),
            layer: shard.layer,
            matrix: worst.matrix.clone(),
            tensor: worst.tensor.clone(),
            role: worst.role.clone(),
            error: worst.largest,
            usual: self.0.get(&worst.role).copied().unwrap_or(0.0),
        })
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use anemoe_bundle::ShardKind;

    fn error(role: &str, median: f64, largest: f64) -> RoleError {
        RoleError {
            role: role.into(),
            median,
            largest,
            matrix: format!("{role}_007"),
            tensor: format!("model.{role}"),
        }
    }

    #[test]
    fn a_matrix_far_from_its_like_is_named() {
        let probed = [vec![error("a", 0.011, 0.012)], vec![error("a", 0.010, 0.010), error("b", 1e-4, 1e-4)]];
        let usual = Usual::of(probed.iter().map(Vec::as_slice));
        let shard = PlannedShard::new("L17.x".into(), ShardKind::Experts, Some(17), vec![], vec![]);
        let fault = |e: RoleError| usual.fault(&shard, &[e]);
        assert_eq!(fault(error("a", 0.011, 0.043)), None);
        let found = fault(error("a", 0.011, 0.045)).unwrap();
        assert_eq!((found.matrix.as_str(), found.layer), ("a_007", Some(17)));
        let of_part = |role: &str| WeightFault { role: role.into(), ..found.clone() }.quant_option();
        assert_eq!(of_part("attention q_weight 8x8 lut4"), "--attn-quant");
        assert_eq!(of_part("dense_mlp up_weight 8x8 lut4"), "--mlp-quant");
        assert_eq!(of_part("other"), "--quant");
        let says = found.to_string();
        for part in ["L17.x", "`model.a`", "0.04500", "4.1 times", "0.01100"] {
            assert!(says.contains(part), "{part}: {says}");
        }
        // 8 times the usual error, but harmless; then 12 times, and harmful.
        assert_eq!(fault(error("b", 0.0008, 0.0008)), None);
        assert!(fault(error("b", 0.0012, 0.0012)).is_some());
        // Roles that no probed shard has are never far.
        assert_eq!(fault(error("c", 1.0, 1.0)), None);
        assert!(fault(error("a", 0.01, f64::INFINITY)).is_some());
    }
}
