//! Prints how far a model's predictions move when all its matrices but router and embedding are compressed: by kind,
//! rotated (`lut4+rotated`), for the built-in text (`lut4+text`, `lut4+rotated+text`), as GGUF's Q4_0 (`q4_0`), in other
//! files of the same model, such as llama.cpp's, and in bundles, whose MB are what a token reads of their matrices.
//! `default=BUNDLE` and `fast=BUNDLE` compare a bundle's default and fast products with its exact ones.
//!
//!     cargo run --release -p anemoe-gates --example divergence -- CHECKPOINT A.txt,B.txt TOKENS WINDOWS lut4 lut4+text F.gguf ..
//!
//! TOKENS of each text are predicted, in windows of 128; WINDOWS of the built-in text are compressed for.

use anemoe_convert::checkpoint::Checkpoint;
use anemoe_convert::compressed::CompressedMatrices;
use anemoe_convert::kind_search::{decoded, in_q4, matrices};
use anemoe_convert::models::{self, BY_NORM, Family};
use anemoe_convert::plan::{MatrixPlan, PlanOptions};
use anemoe_convert::quantize::Encoder;
use anemoe_gates::checkpoint_text;
use anemoe_gates::golden_gate::divergence;
use anemoe_gates::perplexity::{Likelihood, each_window, windows};
use anemoe_gates::reference::{HEAD, Probe};
use anemoe_gates::text_feedback;
use anemoe_runtime::cpu::{CpuBackend, Options, Products};
use anemoe_runtime::model::Model;
use anemoe_runtime::sampler::argmax;
use anyhow::{Context, Result};
use std::path::Path;
use std::sync::Arc;
use std::time::Instant;

/// Tokens of a window.
const WINDOW: usize = 128;

/// Logits by window and position.
type Logits = Vec<Vec<Vec<f32>>>;

fn main() -> Result<()> {
    let arguments: Vec<String> = std::env::args().skip(1).collect();
    let [checkpoint, texts, tokens, calibration, what @ ..] = arguments.as_slice() else {
        anyhow::bail!(
            "usage: divergence CHECKPOINT TEXT,.. TOKENS WINDOWS KIND[+rotated][+text[=FILE]]|FILE|BUNDLE.."
        );
    };
    let source = models::load(checkpoint)?;
    let (tokens, calibration): (usize, usize) = (tokens.parse()?, calibration.parse()?);
    let tokenizer = checkpoint_text::tokenizer(&source)?;
    let bos = tokenizer.bos(checkpoint_text::bos(&source));
    let mut texts_windows = Vec::new();
    for path in texts.split(',') {
        let text = std::fs::read_to_string(path).with_context(|| path.to_string())?;
        texts_windows.push((path, windows(&tokenizer.encode(&text, bos)?, bos, WINDOW, tokens)));
    }
    let all: Vec<Vec<u32>> = texts_windows.iter().flat_map(|(_, w)| w.clone()).collect();
    let reference = logits(&source, None, &all)?;
    println!("| kind | MB | text | tokens | KL | 99 % | same token | perplexity | of | compressing, s |");
    println!("|---|---|---|---|---|---|---|---|---|---|");
    for kind in what {
        let start = Instant::now();
        let products = match kind.split_once('=') {
            Some(("default", bundle)) => Some((bundle, Products::Usual)),
            Some(("fast", bundle)) => Some((bundle, Products::Fast)),
            _ => None,
        };
        let mut exact = None;
        let (own, bytes) = if let Some((bundle, products)) = products {
            exact = Some(bundle_logits(Path::new(bundle), Products::Exact, &all)?.0);
            bundle_logits(Path::new(bundle), products, &all)?
        } else if Path::new(kind).is_dir() {
            bundle_logits(Path::new(kind), Products::Exact, &all)?
        } else if Path::new(kind).is_file() {
            (logits(&models::load(kind)?, None, &all)?, None)
        } else {
            let open = || match kind.contains("+rotated") {
                true => models::rotate(models::load(checkpoint)?),
                false => models::load(checkpoint),
            };
            let (probe, bytes) = compressed(&models::open(open()?)?, kind, calibration)?;
            (logits(&open()?, Some(&probe), &all)?, Some(bytes))
        };
        let seconds = start.elapsed().as_secs_f64();
        let mut first = 0;
        for (name, windows) in &texts_windows {
            let last = first + windows.len();
            let mb = bytes.map_or("-".into(), |b| format!("{:.2}", b as f64 / 1e6));
            let from = exact.as_ref().unwrap_or(&reference);
            let figures = compare(windows, &from[first..last], &own[first..last]);
            println!("| {kind} | {mb} | {name} | {figures} | {seconds:.0} |");
            first = last;
        }
    }
    Ok(())
}

fn logits(checkpoint: &Checkpoint, probe: Option<&Probe>, windows: &[Vec<u32>]) -> Result<Logits> {
    let mut all = Logits::new();
    each_window(checkpoint, probe, windows, &mut || {}, &mut |_, logits| all.push(logits))?;
    Ok(all)
}

/// Runs a bundle on the windows. Returns its logits, and the bytes that a token reads where its kinds were searched for.
fn bundle_logits(path: &Path, products: Products, windows: &[Vec<u32>]) -> Result<(Logits, Option<u64>)> {
    let options = Options { products, ..Options::default() };
    let model = Model::open(path, &CpuBackend { options })?;
    let mut sequence = model.sequence();
    let mut all = Logits::new();
    for window in windows {
        sequence.clear();
        all.push(model.append(&mut sequence, window, anemoe_runtime::model::Logits::All, None)?);
    }
    let chain: serde_json::Value = serde_json::from_slice(&std::fs::read(path.join("chain.json"))?)?;
    Ok((all, chain["auto"]["bytes_read_per_token"].as_u64()))
}

/// Compresses a model in a kind, with `+text` behind it for windows of the built-in text, with `+text=FILE` of another one.
/// Returns a probe with the values of the matrices, and their bytes.
fn compressed(family: &Family, kind: &str, calibration: usize) -> Result<(Probe, u64)> {
    let (kind, text) = kind.split_once("+text").map_or((kind, None), |(kind, file)| (kind, Some(file)));
    let is_for_text = text.is_some();
    let text = text.and_then(|text| text.strip_prefix('=')).map(std::fs::read_to_string).transpose()?;
    let is_q4 = kind.trim_end_matches("+rotated") == "q4_0";
    let name = if is_q4 { "lut4" } else { kind.trim_end_matches("+rotated") };
    let quant = name.parse().map_err(anyhow::Error::msg)?;
    let plan = family.plan(&PlanOptions { quant, sort_head: is_for_text, ..PlanOptions::default() })?;
    let folder = tempfile::tempdir()?;
    let store = CompressedMatrices::new(folder.path());
    if is_for_text {
        let all = text_feedback::windows(family, text.as_deref(), u64::MAX)?;
        let n = calibration.min(all.len());
        let some: Vec<Vec<u32>> = (0..n).map(|i| all[i * all.len() / n].clone()).collect();
        text_feedback::compress(family, &plan, &some, folder.path(), &mut |_, _| {})?;
    }
    let (mut probe, mut bytes) = (Probe::default(), 0);
    for ((tensor, part), mut own) in matrices(&plan) {
        if !own.iter().any(text_feedback::is_compressed) {
            continue;
        }
        own.sort_by_key(|m| m.offset);
        bytes += match is_q4 {
            true => own.iter().map(|m| m.weights() * 9 / 16).sum::<u64>(),
            false => own.iter().map(|m| m.quant.bytes(m.rows, m.cols)).sum::<u64>(),
        };
        let values = match is_for_text {
            true => for_text(&store, &own)?,
            false if is_q4 => in_q4(family, &own)?,
            false => decoded(family, &own, quant, plan.options.groups, None)?.0,
        };
        let values = match tensor.strip_suffix(BY_NORM) {
            Some(head) => in_order(&values, family.checked.rows_by_norm(head)?),
            None => values,
        };
        let name = if part == "head" { HEAD.to_string() } else { tensor };
        probe.replaced.insert(name, Arc::new(values));
    }
    Ok((probe, bytes))
}

/// Reads the values of matrices that were compressed for a text.
fn for_text(store: &CompressedMatrices, matrices: &[MatrixPlan]) -> Result<Vec<f32>> {
    let mut values = Vec::new();
    for m in matrices {
        let (rows, cols, quant) = (m.rows, m.cols, m.quant);
        let encoder = Encoder::plain(rows, cols, quant);
        let c = store.read(m)?.with_context(|| m.name.clone())?;
        values.extend(encoder.decode(&c.packed, &c.side).map_err(|e| anyhow::anyhow!("{}: {e}", m.name))?);
    }
    Ok(values)
}

/// Puts rows back that lie in the order of `ids`.
fn in_order(values: &[f32], ids: &[u32]) -> Vec<f32> {
    let cols = values.len() / ids.len();
    let mut out = vec![0f32; values.len()];
    for (row, &id) in values.chunks_exact(cols).zip(ids) {
        out[id as usize * cols..][..cols].copy_from_slice(row);
    }
    out
}

/// Compares logits with the reference's: the columns of the table.
fn compare(windows: &[Vec<u32>], reference: &[Vec<Vec<f32>>], own: &[Vec<Vec<f32>>]) -> String {
    let (mut kl, mut equal) = (Vec::new(), 0usize);
    let (mut before, mut behind) = (Likelihood::default(), Likelihood::default());
    for ((window, p), q) in windows.iter().zip(reference).zip(own) {
        before.add(window, p);
        behind.add(window, q);
        // As the text gate: without the first and the last position.
        for (p, q) in p.iter().zip(q).take(window.len() - 1).skip(1) {
            kl.push(divergence(p, q));
            equal += usize::from(argmax(p) == argmax(q));
        }
    }
    kl.sort_by(f64::total_cmp);
    let n = kl.len();
    format!(
        "{n} | {:.5} | {:.4} | {:.1} % | {:.3} | {:.3}",
        kl.iter().sum::<f64>() / n as f64,
        kl[n * 99 / 100],
        100.0 * equal as f64 / n as f64,
        behind.perplexity(),
        before.perplexity()
    )
}
