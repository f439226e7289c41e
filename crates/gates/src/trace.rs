//! The fidelity trace: compares a bundle's residual stream with its golden layer by layer, and measures the stream's range.

use crate::golden_gate::cosine;
use crate::reference::Golden;
use anemoe_bundle::Chain;
use anemoe_convert::variants::ROTATION;
use anemoe_runtime::cpu::{CpuBackend, Precision};
use anemoe_runtime::model::{Logits, Model};
use anemoe_runtime::{Error, Result};
use serde::Serialize;
use std::path::Path;

/// Result of a trace.
#[derive(Clone, Debug, PartialEq, Serialize)]
pub struct Trace {
    /// Residual stream before the first layer and after each layer, but for layers that end inside a package.
    pub layers: Vec<LayerTrace>,
    /// True if the bundle's host keeps the stream in f32, so that [`LayerTrace::fp16_stream`] can be measured.
    pub f32_stream: bool,
}

/// Residual stream after one layer.
#[derive(Clone, Debug, PartialEq, Serialize)]
pub struct LayerTrace {
    /// Index of the boundary: 0 is the embedding, i follows layer i - 1.
    pub boundary: usize,
    /// Cosines with the golden, over all positions.
    pub fidelity: Fidelity,
    /// Cosines with the golden when the host rounds the stream to fp16 after each change.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub fp16_stream: Option<Fidelity>,
    /// Largest magnitude in the golden.
    pub largest: f32,
    /// Root mean square of the golden.
    pub rms: f32,
    /// Length of the golden's stream before the layer over the length of the layer's change, at the position where
    /// this ratio is largest. An addition in floating point loses the logarithm of the ratio in bits.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub stream_to_change: Option<f32>,
    /// Cosine at each position.
    pub positions: Vec<f64>,
}

/// Cosines of the residual stream with the golden's.
#[derive(Clone, Copy, Debug, PartialEq, Serialize)]
pub struct Fidelity {
    /// Lowest cosine.
    pub min_cosine: f64,
    /// Position of the lowest cosine.
    pub position: usize,
    /// Mean cosine.
    pub mean_cosine: f64,
}

impl Fidelity {
    fn of(cosines: &[f64]) -> Fidelity {
        let lowest = cosines.iter().enumerate().min_by(|a, b| a.1.total_cmp(b.1));
        let (position, min_cosine) = lowest.map_or((0, 1.0), |(i, c)| (i, *c));
        let mean_cosine = cosines.iter().sum::<f64>() / cosines.len().max(1) as f64;
        Fidelity { min_cosine, position, mean_cosine }
    }
}

/// Checks that a golden has the residual stream of a bundle's layers.
///
/// # Errors
/// An array is missing or does not fit; the text names the array.
pub fn fits(golden: &Golden, chain: &Chain) -> std::result::Result<(), String> {
    let (layers, hidden) = (chain.model.num_layers, chain.model.hidden_size);
    let states = &golden.hidden_states;
    if states.is_empty() {
        return Err("array `hidden_states`: it is missing; `anemoe golden` records it".into());
    }
    if states.len() != layers + 1 || states.iter().flatten().any(|h| h.len() != hidden) {
        return Err(format!("array `hidden_states`: it is not of {layers} layers of width {hidden}"));
    }
    Ok(())
}

/// Runs the golden's prompt in one call, and compares the residual stream between layers.
///
/// # Errors
/// The golden has no hidden states or belongs to another model, or the bundle is wrong.
pub fn trace(bundle: &Path, golden: &Golden, precision: Precision) -> Result<Trace> {
    let mut model = Model::open(bundle, &CpuBackend::with(precision))?;
    fits(golden, model.chain()).map_err(|what| Error::input(format!("golden file: {what}")))?;
    let mut golden = golden.clone();
    if model.chain().readings.contains_key(ROTATION) {
        golden.rotate_states();
    }
    let golden = &golden;
    let states = &golden.hidden_states;
    let exact = run(&model, golden)?;
    let f32_stream = model.chain().vectors.is_some();
    let mut rounded = Vec::new();
    if f32_stream {
        model.set_fp16_stream(true);
        rounded = run(&model, golden)?;
    }
    let layers = exact
        .into_iter()
        .enumerate()
        .filter(|(_, positions)| !positions.is_empty())
        .map(|(i, positions)| LayerTrace {
            boundary: i,
            fidelity: Fidelity::of(&positions),
            fp16_stream: rounded.get(i).map(|c| Fidelity::of(c)),
            largest: states[i].iter().flatten().fold(0f32, |m, v| m.max(v.abs())),
            rms: rms(states[i].iter().flatten().copied()),
            stream_to_change: (i > 0).then(|| change(&states[i - 1], &states[i])),
            positions,
        })
        .collect();
    Ok(Trace { layers, f32_stream })
}

fn rms(values: impl Iterator<Item = f32>) -> f32 {
    let (mut n, mut sum) = (0u64, 0f64);
    for v in values {
        n += 1;
        sum += f64::from(v) * f64::from(v);
    }
    (sum / n.max(1) as f64).sqrt() as f32
}

fn change(before: &[Vec<f32>], after: &[Vec<f32>]) -> f32 {
    let ratio = |(b, a): (&Vec<f32>, &Vec<f32>)| {
        let change = rms(a.iter().zip(b).map(|(a, b)| a - b));
        rms(b.iter().copied()) / change.max(f32::MIN_POSITIVE)
    };
    before.iter().zip(after).map(ratio).fold(0f32, f32::max)
}

/// Returns the cosine of the stream with the golden's, by boundary and position.
fn run(model: &Model, golden: &Golden) -> Result<Vec<Vec<f64>>> {
    let mut sequence = model.sequence();
    let states = &golden.hidden_states;
    let mut cosines: Vec<Vec<f64>> = vec![Vec::new(); states.len()];
    let mut wrong = false;
    model.append_watched(
        &mut sequence,
        &golden.prompt_ids,
        Logits::None,
        None,
        &mut |boundary, stream| {
            let width = stream.shape.last().copied().unwrap_or(0);
            let (Some(values), Some(found)) = (stream.as_f32(), cosines.get_mut(boundary)) else {
                wrong = true;
                return;
            };
            for t in 0..width {
                let own: Vec<f32> = values.iter().skip(t).step_by(width).copied().collect();
                match states[boundary].get(found.len()) {
                    Some(expected) => found.push(cosine(&own, expected)),
                    None => wrong = true,
                }
            }
        },
    )?;
    // The stream inside a package that joins layers is not visible.
    let is_joined = model.chain().shards.iter().any(|s| s.last_layer.is_some());
    let ends = [cosines.first(), cosines.last()];
    let is_whole = |c: &Vec<f64>| c.len() == golden.prompt_ids.len();
    let fits = |c: &Vec<f64>| is_whole(c) || is_joined && c.is_empty();
    if wrong || !cosines.iter().all(fits) || !ends.into_iter().flatten().all(is_whole) {
        return Err(Error::input("the bundle's chain does not show the hidden state between its layers"));
    }
    Ok(cosines)
}

#[cfg(test)]
mod tests {
    use super::*;
    use anemoe_bundle::TokenCount;
    use anemoe_convert::build::build;
    use anemoe_convert::models;
    use anemoe_convert::plan::PlanOptions;
    use anemoe_convert::quant::Quant;
    use std::path::PathBuf;

    fn fixture(name: &str) -> PathBuf {
        Path::new(env!("CARGO_MANIFEST_DIR")).join("../../fixtures").join(name)
    }

    fn bundle(name: &str, dir: &Path) -> PathBuf {
        let family = models::open(models::load(fixture(name).to_str().unwrap()).unwrap()).unwrap();
        let tokens = [1, 3, 4, 32].map(|n| TokenCount { min: n, max: n }).to_vec();
        let options = PlanOptions { quant: Quant::Fp16, tokens, ..PlanOptions::default() };
        let out = dir.join(name);
        build(&family, &family.plan(&options).unwrap(), None, &out, 2, &|_| ()).unwrap();
        out
    }

    /// Checks that logits of every position and decode step do not depend on the calls that a prompt is cut into.
    #[test]
    fn pieces_of_a_prompt_are_the_prompt() {
        let dir = tempfile::tempdir().unwrap();
        for name in ["tiny-zaya", "tiny-gemma4-moe"] {
            let golden = Golden::read(&fixture(name).join("golden.npz")).unwrap();
            let model = Model::open(&bundle(name, dir.path()), &CpuBackend::default()).unwrap();
            let mut sequence = model.sequence();
            let whole = model.append(&mut sequence, &golden.prompt_ids, Logits::All, None).unwrap();
            let after = model.append(&mut sequence, &[7, 8], Logits::All, None).unwrap();
            for pieces in [vec![1; 24], vec![3; 8], vec![4; 6], vec![7, 7, 7, 3], vec![1, 4, 2, 9, 3, 5]] {
                sequence.clear();
                let (mut at, mut logits) = (0, Vec::new());
                for n in &pieces {
                    let ids = &golden.prompt_ids[at..at + n];
                    logits.extend(model.append(&mut sequence, ids, Logits::All, None).unwrap());
                    at += n;
                }
                logits.extend(model.append(&mut sequence, &[7, 8], Logits::All, Some(1)).unwrap());
                assert_eq!(logits.len(), 26);
                for (i, (a, b)) in logits.iter().zip(whole.iter().chain(&after)).enumerate() {
                    let cosine = cosine(a, b);
                    assert!(cosine >= 0.99999, "{name}, {pieces:?}, row {i}: {cosine}");
                }
            }
        }
    }

    #[test]
    fn every_layer_is_shown() {
        let dir = tempfile::tempdir().unwrap();
        for (name, layers, f32_stream) in [("tiny-zaya", 8, true), ("tiny-gemma4-moe", 6, false)] {
            let path = bundle(name, dir.path());
            let mut golden = Golden::read(&fixture(name).join("golden.npz")).unwrap();
            let trace = trace(&path, &golden, Precision::Fp32).unwrap();
            assert_eq!((trace.layers.len(), trace.f32_stream), (layers + 1, f32_stream));
            for l in &trace.layers {
                assert_eq!(l.positions.len(), 24);
                assert!(l.fidelity.min_cosine > 0.99999, "{name}: {l:?}");
                assert!(l.largest >= l.rms && l.rms > 0.0);
                assert_eq!(l.fp16_stream.is_some(), f32_stream);
            }
            // The error that an fp16 stream adds shows after the last layer.
            if let Some(rounded) = trace.layers[layers].fp16_stream {
                assert!(rounded.min_cosine < trace.layers[layers].fidelity.min_cosine);
            }
            golden.hidden_states.pop();
            assert!(super::trace(&path, &golden, Precision::Fp32).is_err());
            golden.hidden_states.clear();
            let err = super::trace(&path, &golden, Precision::Fp32).unwrap_err().to_string();
            assert!(err.contains("hidden_states"), "{err}");
        }
    }
}
