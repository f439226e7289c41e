//! Prints tables of compression's effect on a model: by kind, with and without importance, and `auto` against one
//! kind for all tensors.
//!
//!     cargo run --release -p anemoe-gates --example quality -- models/small-gemma4 CALIBRATION.txt TEST.txt

use anemoe_convert::checkpoint::Checkpoint;
use anemoe_convert::importance::Importance;
use anemoe_convert::kind_search::Objective;
use anemoe_convert::kind_search::{KINDS, decoded, matrices};
use anemoe_convert::models;
use anemoe_convert::models::Family;
use anemoe_convert::plan::{MatrixPlan, Plan, PlanOptions};
use anemoe_convert::quant::{Groups, Quant};
use anemoe_gates::auto::{Goal, KindSearch, SearchBound, choose_each};
use anemoe_gates::calibrate::moments;
use anemoe_gates::golden_gate::cosine;
use anemoe_gates::perplexity::{Likelihood, windows};
use anemoe_gates::reference::{DecoderForward, HEAD, Probe, RunOptions};
use anemoe_text::tokenizer::Tokenizer;
use anyhow::{Context, Result};
use std::path::Path;
use std::sync::Arc;

const CONTEXT: usize = 128;
const CALIBRATION_TOKENS: usize = 4096;
const TEST_TOKENS: usize = 4096;

/// Results of a model over the test windows.
struct Run {
    /// Logits by position.
    logits: Vec<Vec<f32>>,
    /// Hidden states by layer, with all positions in one vector.
    hidden: Vec<Vec<f32>>,
    likelihood: Likelihood,
}

/// Distance of a compressed model from the original.
struct Figures {
    min_cosine: f64,
    mean_cosine: f64,
    perplexity: f64,
    /// Relative squared error of the residual stream after each layer.
    layers: Vec<f64>,
}

struct Bench<'a> {
    checkpoint: &'a Checkpoint,
    family: &'a Family,
    plan: &'a Plan,
    test: &'a [Vec<u32>],
}

impl Bench<'_> {
    fn run(&self, probe: Option<&Probe>) -> Result<Run> {
        let mut model = DecoderForward::open(self.checkpoint, probe)?;
        let layers = model.decoder.layers.len();
        let mut run =
            Run { logits: Vec::new(), hidden: vec![Vec::new(); layers], likelihood: Likelihood::default() };
        for window in self.test {
            model.reset();
            let pass = model.forward(window, RunOptions { hidden: true, routing: false }, &mut || {})?;
            run.likelihood.add(window, &pass.logits);
            run.logits.extend(pass.logits);
            for (all, layer) in run.hidden.iter_mut().zip(&pass.hidden_states[1..]) {
                all.extend(layer.iter().flatten());
            }
        }
        Ok(run)
    }

    /// Returns a probe with every matrix in the kind that `kind` gives for its tensor and part, but for routers; and
    /// the bytes.
    fn compressed(
        &self,
        importance: Option<&Importance>,
        kind: impl Fn(&MatrixPlan) -> Quant,
    ) -> Result<(Probe, u64)> {
        let (mut probe, mut bytes) = (Probe::default(), 0);
        for ((tensor, part), all) in matrices(self.plan) {
            if part == "router" {
                continue;
            }
            let mut values = Vec::new();
            for m in &all {
                let (own, size) =
                    decoded(self.family, std::slice::from_ref(m), kind(m), Groups::default(), importance)?;
                values.extend(own);
                bytes += size;
            }
            let name = if part == "head" { HEAD.to_string() } else { tensor };
            probe.replaced.insert(name, Arc::new(values));
        }
        Ok((probe, bytes))
    }

    fn figures(&self, reference: &Run, probe: &Probe) -> Result<Figures> {
        let run = self.run(Some(probe))?;
        let cosines: Vec<f64> = run.logits.iter().zip(&reference.logits).map(|(a, b)| cosine(a, b)).collect();
        let relative = |(a, b): (&Vec<f32>, &Vec<f32>)| {
            let error: f64 = a.iter().zip(b).map(|(x, y)| f64::from(x - y).powi(2)).sum();
            error / b.iter().map(|y| f64::from(*y).powi(2)).sum::<f64>()
        };
        Ok(Figures {
            min_cosine: cosines.iter().copied().fold(1.0, f64::min),
            mean_cosine: cosines.iter().sum::<f64>() / cosines.len() as f64,
            perplexity: run.likelihood.perplexity(),
            layers: run.hidden.iter().zip(&reference.hidden).map(relative).collect(),
        })
    }
}

fn main() -> Result<()> {
    let arguments: Vec<String> = std::env::args().skip(1).collect();
    let [checkpoint, calibration, test] = arguments.as_slice() else {
        anyhow::bail!("usage: quality CHECKPOINT CALIBRATION.txt TEST.txt");
    };
    run(checkpoint, Path::new(calibration), Path::new(test))
}

/// Prints both tables for a checkpoint, measured on `test` and calibrated on `calibration`.
fn run(checkpoint: &str, calibration: &Path, test: &Path) -> Result<()> {
    let source = models::load(checkpoint)?;
    let family = models::open(models::load(checkpoint)?)?;
    let plan = family.plan(&PlanOptions::default())?;
    let tokenizer = Tokenizer::open(&Path::new(checkpoint).join("tokenizer.json"))?;
    let bos = tokenizer.bos(plan.chain.model.bos_token_id);
    let read = |path: &Path, limit: usize| -> Result<Vec<Vec<u32>>> {
        let text = std::fs::read_to_string(path).with_context(|| path.display().to_string())?;
        Ok(windows(&tokenizer.encode(&text, bos)?, bos, CONTEXT, limit))
    };
    let calibration = read(calibration, CALIBRATION_TOKENS)?;
    let test = read(test, TEST_TOKENS)?;
    let dir = tempfile::tempdir()?;
    let file = dir.path().join("importance.npz");
    Importance::write(&file, &moments(&source, &calibration, &mut || {})?)?;
    let importance = Importance::read(&file)?;

    let bench = Bench { checkpoint: &source, family: &family, plan: &plan, test: &test };
    let reference = bench.run(None)?;
    println!(
        "{} tokens of test text, {} of calibration; perplexity in f32 {:.4}\n",
        test.iter().map(Vec::len).sum::<usize>(),
        calibration.iter().map(Vec::len).sum::<usize>(),
        reference.likelihood.perplexity()
    );
    println!(
        "| kind | bytes | importance | min cosine | 1 - mean cosine | perplexity | error behind layers |"
    );
    println!("|---|---|---|---|---|---|---|");
    let int4: Quant = "int4-block".parse().map_err(anyhow::Error::msg)?;
    let uniform4: Quant = "lut4-uniform".parse().map_err(anyhow::Error::msg)?;
    let mut uniform = Vec::new();
    for kind in KINDS.into_iter().filter(|k| *k != Quant::Fp16).chain([int4, uniform4]) {
        for (name, importance) in [("no", None), ("yes", Some(&importance))] {
            let (probe, bytes) = bench.compressed(importance, |_| kind)?;
            let f = bench.figures(&reference, &probe)?;
            row(&kind.to_string(), bytes, name, &f);
            if importance.is_none() {
                uniform.push((kind, bytes, f));
            }
        }
    }
    println!("\n| choice | bytes | min cosine | 1 - mean cosine | perplexity |\n|---|---|---|---|---|");
    let search = KindSearch {
        checkpoint: &source,
        family: &family,
        stored: None,
        importance: None,
        candidates: None,
        record: None,
        windows: &calibration[..calibration.len().min(6)],
        text: "the calibration text".into(),
    };
    let goals: Vec<Goal> = uniform
        .iter()
        .map(|(_, bytes, _)| Goal { objective: Objective::Size, bound: SearchBound::MaxBytes(*bytes) })
        .collect();
    let chosen = choose_each(&search, &plan, &goals, &mut |_, _, _| {})?;
    for ((kind, limit, f), (_, kinds)) in uniform.iter().zip(&chosen) {
        line(&kind.to_string(), *limit, f);
        let (probe, bytes) = bench.compressed(None, |m| kinds.of(m).unwrap_or(Quant::Fp16))?;
        line("auto", bytes, &bench.figures(&reference, &probe)?);
    }
    Ok(())
}

fn row(kind: &str, bytes: u64, importance: &str, f: &Figures) {
    let layers: Vec<String> = f.layers.iter().map(|e| format!("{e:.1e}")).collect();
    println!(
        "| {kind} | {bytes} | {importance} | {:.5} | {:.3e} | {:.4} | {} |",
        f.min_cosine,
        1.0 - f.mean_cosine,
        f.perplexity,
        layers.join(" ")
    );
}

fn line(name: &str, bytes: u64, f: &Figures) {
    println!(
        "| {name} | {bytes} | {:.5} | {:.3e} | {:.4} |",
        f.min_cosine,
        1.0 - f.mean_cosine,
        f.perplexity
    );
}
