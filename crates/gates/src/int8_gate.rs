//! The int8 gate: compares the CPU's fast products with its exact ones.

use crate::golden_gate::{NEAR_TIE, cosine};
use anemoe_runtime::cpu::{CpuBackend, Options, Precision, Products};
use anemoe_runtime::model::{Logits, Model};
use anemoe_runtime::sampler::argmax;
use anemoe_runtime::{Error, Result};
use serde::Serialize;
use std::path::Path;

/// Cosine to the exact logits that the median of all positions has to reach. A near tie of experts that a small error
/// turns costs a few positions, as in [`crate::golden_gate::Rounded`].
pub const MIN_FAST_COSINE: f64 = 0.999;

/// Cosine that every position has to reach.
const LOWEST: f64 = crate::golden_gate::MIN_COSINE;

/// Result of the int8 gate: the changes by fast products.
#[derive(Clone, Debug, PartialEq, Serialize)]
pub struct Int8Gate {
    /// True if the median reaches the threshold, every position reaches [`crate::golden_gate::MIN_COSINE`], and
    /// tokens differ at near ties only.
    pub pass: bool,
    /// Cosine that the median has to reach.
    pub threshold: f64,
    /// Lowest cosine of the logits.
    pub min_cosine: f64,
    /// Median cosine of the logits.
    pub median_cosine: f64,
    /// Lowest cosine of the residual stream before the first layer and after each layer, over all positions.
    pub stream: Vec<f64>,
    /// Number of positions.
    pub positions: usize,
    /// Number of positions whose cosine is below the threshold.
    pub below: usize,
    /// Positions whose most probable token differs.
    pub differing: Vec<Differing>,
}

/// Position whose most probable token differs.
#[derive(Clone, Debug, PartialEq, Serialize)]
pub struct Differing {
    /// Number of the position, from 0.
    pub position: usize,
    /// Most probable token of the exact logits.
    pub exact: usize,
    /// Most probable token of the fast logits.
    pub fast: usize,
    /// Difference of the exact logits between the two tokens.
    pub margin: f32,
    /// True if the margin is below [`NEAR_TIE`].
    pub near_tie: bool,
}

/// Runs `ids` through the bundle with exact and with fast products, and compares logits and residual streams.
///
/// # Errors
/// The bundle is wrong, there are no ids, or the ids do not fit the bundle's vocabulary and context.
pub fn compare(bundle: &Path, ids: &[u32], threshold: f64) -> Result<Int8Gate> {
    if ids.is_empty() {
        return Err(Error::input("no tokens to compare"));
    }
    let run = |fast| {
        // Fast products run as in `generate`, with states in fp16.
        let products = if fast { Products::Fast } else { Products::Exact };
        let options =
            Options { precision: Precision::Fp32, products, half_states: fast, ..Options::default() };
        let model = Model::open(bundle, &CpuBackend { options })?;
        // `[layers + 1]`, each `[tokens, channels]`
        let mut stream: Vec<Vec<Vec<f32>>> = Vec::new();
        let mut sequence = model.sequence();
        let logits = model.append_watched(&mut sequence, ids, Logits::All, None, &mut |layer, hidden| {
            let width = hidden.shape.last().copied().unwrap_or(1).max(1);
            let values = hidden.as_f32().unwrap_or_default();
            if stream.len() <= layer {
                stream.resize(layer + 1, Vec::new());
            }
            stream[layer]
                .extend((0..width).map(|t| values.chunks_exact(width).map(|c| c[t]).collect::<Vec<f32>>()));
        })?;
        Ok::<_, Error>((logits, stream))
    };
    let (exact, exact_stream) = run(false)?;
    let (fast, fast_stream) = run(true)?;
    let lowest = |a: &[Vec<f32>], b: &[Vec<f32>]| {
        a.iter().zip(b).map(|(a, b)| cosine(a, b)).fold(f64::INFINITY, f64::min)
    };
    let stream = exact_stream.iter().zip(&fast_stream).map(|(a, b)| lowest(a, b)).collect();
    let mut cosines: Vec<f64> = exact.iter().zip(&fast).map(|(a, b)| cosine(a, b)).collect();
    let mut differing = Vec::new();
    for (position, (a, b)) in exact.iter().zip(&fast).enumerate() {
        let (best, other) = (argmax(a), argmax(b));
        if best != other {
            let margin = a[best] - a[other];
            differing.push(Differing {
                position,
                exact: best,
                fast: other,
                margin,
                near_tie: margin < NEAR_TIE,
            });
        }
    }
    cosines.sort_by(f64::total_cmp);
    let (lowest, median) = (cosines[0], cosines[cosines.len() / 2]);
    Ok(Int8Gate {
        pass: median >= threshold && lowest >= LOWEST.min(threshold) && differing.iter().all(|d| d.near_tie),
        threshold,
        min_cosine: lowest,
        median_cosine: median,
        below: cosines.iter().filter(|c| **c < threshold).count(),
        stream,
        positions: ids.len(),
        differing,
    })
}
