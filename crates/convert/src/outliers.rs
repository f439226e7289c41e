//! Outliers: single weights so large that one step for a whole tensor is too coarse for all others.

use crate::models::Family;
use crate::plan::{MatrixPlan, Plan, PlannedShard};
use crate::quant::{Granularity, Quant};
use crate::{Error, Result};
use rayon::prelude::*;
use serde::Serialize;

/// Predicted relative squared error above which a tensor is reported; 0.01 is a cosine of 0.995 with the compressed
/// tensor.
pub const LOSS: f64 = 0.01;

/// Weights that one task reads at a time: 4 MiB in f32.
const PIECE: usize = 1 << 20;

/// Pieces sampled per matrix. Sampling the 8000 matrices of Gemma-4-26B-A4B takes a few seconds.
const SAMPLE_PIECES: u64 = 16;
/// Weights of a sampled piece.
const SAMPLE_PIECE: u64 = 4096;

/// Spread of the values of a matrix.
#[derive(Clone, Copy, Debug, PartialEq, Serialize)]
pub struct Spread {
    /// Largest magnitude.
    pub largest: f32,
    /// Mean magnitude: the typical size, since a few outliers hardly change it.
    pub mean: f64,
}

impl Spread {
    /// Measures the spread of a matrix, from the checkpoint.
    ///
    /// # Errors
    /// The checkpoint cannot be read.
    pub fn of(family: &Family, m: &MatrixPlan) -> Result<Spread> {
        let n = m.weights() as usize;
        let pieces: Result<Vec<(f32, f64)>> = (0..n.div_ceil(PIECE))
            .into_par_iter()
            .map(|i| {
                crate::build::check_interrupted()?;
                let (from, to) = (i * PIECE, ((i + 1) * PIECE).min(n));
                let mut values = vec![0f32; to - from];
                family.checked.read(&m.tensor, m.offset + from as u64..m.offset + to as u64, &mut values)?;
                let largest = values.iter().fold(0f32, |max, v| max.max(v.abs()));
                Ok((largest, values.iter().map(|v| f64::from(v.abs())).sum()))
            })
            .collect();
        let pieces = pieces?;
        let largest = pieces.iter().fold(0f32, |max, p| max.max(p.0));
        // The sum follows the order of the pieces: it is the same on any number of threads.
        Ok(Spread { largest, mean: pieces.iter().map(|p| p.1).sum::<f64>() / n.max(1) as f64 })
    }

    /// Measures the spread of 16 evenly spread pieces of a matrix, of 4096 weights each. A small matrix is measured
    /// whole, and then the flag is true. A sample misses most single outliers, but not the shape of the distribution.
    ///
    /// # Errors
    /// The checkpoint cannot be read.
    pub fn sample(family: &Family, m: &MatrixPlan) -> Result<(Spread, bool)> {
        let n = m.weights();
        if n <= SAMPLE_PIECES * SAMPLE_PIECE {
            return Ok((Spread::of(family, m)?, true));
        }
        let mut values = vec![0f32; SAMPLE_PIECE as usize];
        let (mut largest, mut sum) = (0f32, 0f64);
        for i in 0..SAMPLE_PIECES {
            let from = m.offset + (n - SAMPLE_PIECE) * i / (SAMPLE_PIECES - 1);
            family.checked.read(&m.tensor, from..from + SAMPLE_PIECE, &mut values)?;
            largest = values.iter().fold(largest, |max, v| max.max(v.abs()));
            sum += values.iter().map(|v| f64::from(v.abs())).sum::<f64>();
        }
        let mean = sum / (SAMPLE_PIECES * SAMPLE_PIECE) as f64;
        Ok((Spread { largest, mean }, false))
    }

    /// Returns the largest over the mean magnitude; about 6 for a million normal deviates.
    pub fn ratio(&self) -> f64 {
        f64::from(self.largest) / self.mean.max(f64::MIN_POSITIVE)
    }

    /// Predicts the relative squared error of `levels` equal steps over the whole range:
    /// `min(1, step^2 / 12 / (pi / 2))` with `step = 2 * ratio / levels`. That is the noise of rounding over the
    /// power of normal deviates of this mean magnitude.
    pub fn uniform_loss(&self, levels: u32) -> f64 {
        let step = 2.0 * self.ratio() / f64::from(levels);
        // The mean square of normal deviates is pi / 2 times their mean magnitude squared.
        (step * step / 12.0 / std::f64::consts::FRAC_PI_2).min(1.0)
    }

    /// Predicts the relative squared error of INT8 with one scale per tensor, see [`Spread::uniform_loss`].
    pub fn int8_tensor_loss(&self) -> f64 {
        self.uniform_loss(254)
    }
}

/// Returns the number of equal steps of a kind that has the same steps for a whole tensor; none for other kinds.
pub fn tensor_levels(kind: Quant) -> Option<u32> {
    match kind {
        Quant::Int { bits, granularity: Granularity::Tensor, .. } => Some((1u32 << bits.bits()) - 2),
        Quant::Lut { bits, uniform: true, per_tensor: true } => Some((1u32 << bits.bits()) - 1),
        _ => None,
    }
}

/// Largest over mean magnitude that values without outliers may have: a billion normal deviates have 8. Kinds of few steps
/// lose 1 % without any outlier.
const NORMAL_RATIO: f64 = 12.0;

/// A matrix whose compression an outlier spoils.
#[derive(Clone, Debug, PartialEq, Serialize)]
pub struct Outlier {
    /// Shard.
    pub shard: String,
    /// Layer, from 0; absent for the head.
    pub layer: Option<usize>,
    /// Part of the model.
    pub part: String,
    /// Matrix in the shard.
    pub matrix: String,
    /// Checkpoint tensor, without the checkpoint's prefix.
    pub tensor: String,
    /// Kind of the matrix.
    pub kind: String,
    /// Spread of the matrix's values.
    #[serde(flatten)]
    pub spread: Spread,
    /// Largest over mean magnitude.
    pub ratio: f64,
    /// Predicted relative squared error of the kind.
    pub predicted_loss: f64,
}

impl Outlier {
    /// Makes the report of an outlier, where `m` has the same steps for a whole tensor and `spread` predicts a loss
    /// above [`LOSS`], with a largest value above [`NORMAL_RATIO`].
    pub fn of(shard: &PlannedShard, m: &MatrixPlan, spread: Spread) -> Option<Outlier> {
        let predicted_loss = spread.uniform_loss(tensor_levels(m.quant.kind)?);
        (predicted_loss > LOSS && spread.ratio() > NORMAL_RATIO).then(|| Outlier {
            shard: shard.name.clone(),
            layer: m.layer(),
            part: m.part.clone(),
            matrix: m.name.clone(),
            tensor: m.tensor.clone(),
            kind: m.quant.kind.to_string(),
            spread,
            ratio: spread.ratio(),
            predicted_loss,
        })
    }
}

impl std::fmt::Display for Outlier {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        let Outlier { shard, part, matrix, tensor, kind, spread, ratio, predicted_loss, .. } = self;
        write!(
            f,
            "{shard}, {part}, {matrix} (tensor `{tensor}`): an outlier of {:.3e} is {ratio:.0} times the mean magnitude; one \
             step for the whole tensor in {kind} loses {predicted_loss:.3} of it (relative squared error, predicted); use \
             int8-channel or lut4",
            spread.largest
        )
    }
}

/// Returns the matrices of a plan, with their shards, whose kind has the same steps for a whole tensor.
pub fn matrices_at_risk(plan: &Plan) -> impl Iterator<Item = (&PlannedShard, &MatrixPlan)> {
    let all = plan.shards.iter().flat_map(|s| s.matrices.iter().map(move |m| (s, m)));
    all.filter(|(_, m)| tensor_levels(m.quant.kind).is_some())
}

/// Measures every matrix whose kind has the same steps for a whole tensor, and returns those that an outlier spoils,
/// the worst first. `progress` is told how many weights were read.
///
/// # Errors
/// The checkpoint cannot be read, or holds a value that is not a finite number.
pub fn find(family: &Family, plan: &Plan, progress: &mut dyn FnMut(u64)) -> Result<Vec<Outlier>> {
    let mut found = Vec::new();
    for (shard, m) in matrices_at_risk(plan) {
        let spread = Spread::of(family, m)?;
        if !spread.largest.is_finite() || !spread.mean.is_finite() {
            let what = "holds a value that is not a finite number";
            return Err(Error::usage(format!("tensor `{}` {what}", m.tensor)));
        }
        found.extend(Outlier::of(shard, m, spread));
        progress(m.weights());
    }
    found.sort_by(|a, b| b.predicted_loss.total_cmp(&a.predicted_loss));
    Ok(found)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn predicted_loss_of_known_spreads() {
        // A million normal deviates reach about 4.9 standard deviations; their mean magnitude is 0.798.
        let normal = Spread { largest: 4.9, mean: 0.798 };
        assert!((normal.ratio() - 6.14).abs() < 0.01);
        // The step is 9.8 / 254; its noise is step^2 / 12, and the power of the deviates is 1.
        let expected = (9.8f64 / 254.0).powi(2) / 12.0;
        assert!((normal.int8_tensor_loss() / expected - 1.0).abs() < 0.01);
        assert!(normal.int8_tensor_loss() < LOSS);
        // Fourteen steps lose more than that without any outlier.
        assert!(normal.uniform_loss(14) > LOSS && normal.ratio() < NORMAL_RATIO);
        let planted = Spread { largest: 490.0, mean: 0.798 };
        assert!(planted.int8_tensor_loss() == 1.0);
        assert_eq!(Spread { largest: 0.0, mean: 0.0 }.int8_tensor_loss(), 0.0);
    }

    #[test]
    fn kinds_with_one_step_per_tensor() {
        let levels = |kind: &str| tensor_levels(kind.parse().unwrap());
        assert_eq!(levels("int8-tensor"), Some(254));
        assert_eq!(levels("int4-tensor"), Some(14));
        assert_eq!(levels("lut4-uniform-tensor"), Some(15));
        for other in ["fp16", "int8-channel", "int4-block", "lut4", "lut4-tensor", "lut4-uniform"] {
            assert_eq!(levels(other), None, "{other}");
        }
    }
}
