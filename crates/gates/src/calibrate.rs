//! Measures the importance of every projection's inputs over a text.

use crate::perplexity::each_window;
use crate::reference::Probe;
use anemoe_convert::Result;
use anemoe_convert::checkpoint::Checkpoint;
use std::collections::BTreeMap;

/// Tokens of all experts' mean inputs that are added to each expert's own, so that an expert with few tokens is not
/// judged by chance.
const PRIOR_TOKENS: f64 = 8.0;

/// Shape and mean squares of the inputs of each projection, by tensor: `[cols]`, or `[experts, cols]`.
pub type Moments = BTreeMap<String, (Vec<usize>, Vec<f32>)>;

/// Runs windows of text through a checkpoint in f32, and returns the second moment of every projection's inputs. An
/// expert's inputs are those of the tokens that chose the expert. A down projection's inputs are multiplied by the
/// routing weight.
///
/// # Errors
/// Fails like [`crate::reference::run`].
pub fn moments(checkpoint: &Checkpoint, windows: &[Vec<u32>], progress: &mut dyn FnMut()) -> Result<Moments> {
    let probe = Probe::watching();
    each_window(checkpoint, Some(&probe), windows, progress, &mut |_, _| {})?;
    let mut out = Moments::new();
    for (tensor, m) in probe.into_moments() {
        let total: u64 = m.count.iter().sum();
        let mean: Vec<f64> = (0..m.cols)
            .map(|c| m.sums.iter().skip(c).step_by(m.cols).sum::<f64>() / (total as f64).max(1.0))
            .collect();
        let prior = if m.parts > 0 { PRIOR_TOKENS } else { 0.0 };
        let mut values = Vec::with_capacity(m.sums.len());
        for (sums, &count) in m.sums.chunks_exact(m.cols).zip(&m.count) {
            let n = (count as f64 + prior).max(1.0);
            values.extend(sums.iter().zip(&mean).map(|(s, mean)| ((s + prior * mean) / n) as f32));
        }
        let shape = if m.parts > 0 { vec![m.parts, m.cols] } else { vec![m.cols] };
        out.insert(tensor, (shape, values));
    }
    Ok(out)
}

#[cfg(test)]
mod tests {
    use super::*;
    use anemoe_convert::models;
    use std::path::Path;

    #[test]
    fn every_projection_is_seen() {
        let path = Path::new(env!("CARGO_MANIFEST_DIR")).join("../../fixtures/tiny-gemma4-moe");
        let checkpoint = models::load(&path).unwrap();
        let mut ticks = 0;
        let windows = [vec![2, 7, 19, 33], vec![2, 5]];
        let found = moments(&checkpoint, &windows, &mut || ticks += 1).unwrap();
        let family = anemoe_convert::models::open(checkpoint).unwrap();
        let plan = family.plan(&anemoe_convert::plan::PlanOptions::default()).unwrap();
        for m in plan.shards.iter().flat_map(|s| &s.matrices) {
            let (shape, values) = &found[&m.tensor];
            assert_eq!(shape.last(), Some(&m.cols), "{}", m.name);
            assert!(values.iter().all(|v| v.is_finite() && *v >= 0.0));
            assert!(values.iter().any(|v| *v > 0.0), "{}", m.name);
        }
        assert_eq!(ticks % windows.len(), 0);
        // The input of the first projection is a norm's output: its mean square is the mean square of the norm's weight.
        let (_, q) = &found["layers.0.self_attn.q_proj.weight"];
        let mut norm = vec![0f32; q.len()];
        family.checked.read("layers.0.input_layernorm.weight", 0..q.len() as u64, &mut norm).unwrap();
        let mean = |v: &mut dyn Iterator<Item = f32>| v.sum::<f32>() / q.len() as f32;
        let (found, expected) = (mean(&mut q.iter().copied()), mean(&mut norm.iter().map(|w| w * w)));
        assert!((found / expected - 1.0).abs() < 0.2, "{found} {expected}");
    }
}
