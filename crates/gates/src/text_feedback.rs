//! Compresses a checkpoint for a text, layer by layer, before packages are built.
//!
//! ```text
//! windows of the text, twice:   the model's own weights     x   ---\
//!                               weights compressed so far   x^  ---- each matrix, when its inputs are known
//! ```
//! Both streams go through each layer together. A matrix is compressed at its first product, for the inputs that
//! come (x^) and those that the model's own weights give (x). An expert counts the tokens that the compressed router
//! sends to it. After each layer both streams are written, so that an interrupted run goes on there.

use crate::checkpoint_text;
use crate::perplexity;
use crate::reference::{Compressor, DecoderForward, InputPairs, Probe, Rows};
use crate::search_record::SearchRecord;
use crate::{Error, Result};
use anemoe_bundle::IndexBits;
use anemoe_convert::build::{check_interrupted, check_scratch};
use anemoe_convert::checkpoint::MOST_KEPT;
use anemoe_convert::compressed::{CompressedMatrices, PREFIX};
use anemoe_convert::kind_search::{self, Group};
use anemoe_convert::models::Family;
use anemoe_convert::plan::{MatrixPlan, PartKinds, Plan, PlanOptions};
use anemoe_convert::quant::Quant;
use anemoe_convert::quantize::{CompressedMatrix, Encoder, InputSums, SecondMoments};
use anemoe_io::{locked, write_atomic};
use std::collections::{BTreeMap, BTreeSet};
use std::io::Write;
use std::path::{Path, PathBuf};
use std::sync::{Arc, Mutex};

/// Tokens of all experts' mean inputs that are added to each expert's own, so that an expert with few tokens is not
/// judged by chance.
const PRIOR_TOKENS: f64 = 64.0;
/// Lengths of the median input that a longer input counts as. The first token of a window, on which heads rest that look
/// for nothing, can be hundreds of times as long as others before a down projection; no other token would count there.
const LONGEST: f32 = 16.0;
/// Tokens whose products are summed at a time: columns of 16 KB.
const TOKENS: usize = 4096;
/// Weights of rows that are compressed at a time, and in memory several times.
const WEIGHTS: usize = 16 << 20;

/// Built-in text: chats and other languages, books in the public domain (docs/compression.md), own documents and sources. No
/// gate and no benchmark uses it.
const TEXT: &str = include_str!("default_text.txt");
/// Tokens of a window, the starting token included.
const WINDOW: usize = 128;
/// Most windows of a text: more do not lower the divergence of small models.
const WINDOWS: usize = 256;

/// Cuts a text, or the built-in one, into the windows that matrices are compressed for: as many as fit into `memory`
/// bytes, evenly spread over the text.
///
/// # Errors
/// There is no tokenizer, the text has no token to predict, or the memory does not suffice for a window.
pub fn windows(family: &Family, text: Option<&str>, memory_limit: u64) -> Result<Vec<Vec<u32>>> {
    let checkpoint = &family.checked.checkpoint;
    let tokenizer = checkpoint_text::tokenizer(checkpoint)?;
    let bos = tokenizer.bos(checkpoint_text::bos(checkpoint));
    let ids = tokenizer.encode(text.unwrap_or(TEXT), bos)?;
    let context = WINDOW.min(family.decoder.positions);
    let all = perplexity::windows(&ids, bos, context, usize::MAX);
    if all.is_empty() {
        return Err(Error::usage("--calibrate: the text has no token to predict"));
    }
    let most = WINDOWS.min(all.len());
    let n = (1..=most).rev().find(|n| memory(family, n * context) <= memory_limit).ok_or_else(|| {
        let least = memory(family, context).div_ceil(1_000_000);
        Error::usage(format!("--calibration-memory: this model needs {least} MB at least"))
    })?;
    Ok((0..n).map(|i| all[i * all.len() / n].clone()).collect())
}

/// Returns the SHA-256 of windows' tokens, with the length of each window.
pub fn windows_sha256(windows: &[Vec<u32>]) -> String {
    let numbers = windows.iter().flat_map(|w| std::iter::once(w.len() as u32).chain(w.iter().copied()));
    anemoe_bundle::sha256(&numbers.flat_map(u32::to_le_bytes).collect::<Vec<u8>>())
}

/// Counts the bytes that a calibration over `tokens` tokens takes at most, roughly: both streams with the inputs and
/// outputs of the widest parts, three squares of the widest matrix, its weights in f32, and the rotated matrices that are kept.
pub fn memory(family: &Family, tokens: usize) -> u64 {
    let d = &family.decoder;
    let widths = d.layers.iter().map(|l| {
        let attention = 2 * l.attention.q_size() + 2 * l.attention.kv_size();
        let experts = l.experts.map_or(0, |e| 3 * e.active * e.width);
        attention.max(3 * l.dense.unwrap_or(0)).max(experts)
    });
    let columns = d.layers.iter().flat_map(|l| {
        [l.dense.unwrap_or(0), l.experts.map_or(0, |e| e.width), l.attention.q_size(), d.hidden]
    });
    let (width, columns) = (widths.max().unwrap_or(0), columns.max().unwrap_or(0));
    let streams = 2 * tokens * (6 * d.hidden + 2 * width);
    let rotated = if d.is_rotated { MOST_KEPT * d.hidden * columns } else { 0 };
    4 * (streams + 8 * columns * columns + 4 * WEIGHTS + rotated) as u64
}

/// Tells whether a matrix is compressed for a text where there is one.
pub fn is_compressed(m: &MatrixPlan) -> bool {
    !matches!(m.quant.kind, Quant::Fp16 | Quant::Mxfp4) && m.taps == 1 && !m.bank
}

/// Tells whether [`compress`] can take a plan: no table and no scale belongs to several experts of a stacked tensor.
pub fn fits_experts(family: &Family, plan: &Plan) -> bool {
    plan.shards.iter().flat_map(|s| &s.matrices).filter(|m| is_compressed(m)).all(|m| {
        let Some([_, rows, _]) = family.checked.shape(&m.tensor) else { return true };
        let rows = *rows as usize;
        m.rows <= rows || fits_rows(m, rows)
    })
}

/// Tells whether so many rows of a matrix have tables and scales of their own.
fn fits_rows(m: &MatrixPlan, rows: usize) -> bool {
    let (block, _) = m.quant.block(m.rows, m.cols);
    let bits = rows * m.cols * usize::from(m.quant.kind.bits());
    rows.is_multiple_of(block) && (rows == m.rows || bits.is_multiple_of(8))
}

/// Products of a column with a column, for each weight of a matrix, that compressing it takes: the target, its codes, two
/// sweeps over them, and two more for each of two fits of its tables.
const PRODUCTS: f64 = 8.0;
/// Multiplications per second of two processors. A fixed rate, so that a build that is continued decides as it did before.
const RATE: f64 = 20e9;

/// Forecasts the seconds that [`compress`] takes for `tokens` tokens on two processors: multiplications over their rate.
pub fn forecast(family: &Family, plan: &Plan, tokens: usize) -> f64 {
    let mut count = 0.0;
    let mut inputs = BTreeSet::new();
    for m in plan.shards.iter().flat_map(|s| &s.matrices) {
        let own = match (m.expert(), family.decoder.experts()) {
            (Some(_), Some(e)) => e.active as f64 / e.count as f64,
            _ => 1.0,
        };
        let (weights, cols, tokens) = (m.weights() as f64, m.cols as f64, own * tokens as f64);
        // Both streams; then the means of the products of both streams' inputs, which matrices of one size share.
        count += 2.0 * tokens * weights;
        if is_compressed(m) {
            count += PRODUCTS * weights * cols;
            if inputs.insert((m.layer(), m.expert(), m.cols)) {
                count += (2.0 * tokens + cols) * cols * cols;
            }
        }
    }
    count / RATE
}

/// Compresses all matrices that a plan compresses for windows of tokens, into `folder`. `progress` takes layers that
/// are done, of how many; the head counts as one.
///
/// # Errors
/// The checkpoint cannot be read, a value is outside fp16, a table would span experts, or a file cannot be written.
pub fn compress(
    family: &Family,
    plan: &Plan,
    windows: &[Vec<u32>],
    folder: &Path,
    progress: &mut dyn FnMut(usize, usize),
) -> Result<()> {
    let checkpoint = &family.checked.checkpoint;
    let layers = family.decoder.layers.len();
    let state = folder.join(format!("{PREFIX}streams"));
    let store = CompressedMatrices::new(folder);
    let mut matrices: BTreeMap<String, Vec<MatrixPlan>> = BTreeMap::new();
    for m in plan.shards.iter().flat_map(|s| &s.matrices) {
        let of_tensor = matrices.entry(m.tensor.clone()).or_default();
        if is_compressed(m) && !of_tensor.iter().any(|o| o.offset == m.offset) {
            of_tensor.push(m.clone());
        }
    }
    let compressor = Arc::new(LayerCompressor {
        checkpoint: checkpoint.path.clone(),
        store,
        matrices,
        shared: Mutex::default(),
        last: Mutex::default(),
        begun: Mutex::default(),
    });
    let probe = Probe::compressing(Box::new(compressor.clone()));
    let mut model = DecoderForward::of(family.decoder.clone(), checkpoint, Some(&probe))?;
    let ids: Vec<u32> = windows.iter().flatten().copied().collect();
    let mut lengths: Vec<usize> = windows.iter().map(Vec::len).collect();
    lengths.extend_from_within(..);
    let (mut first, mut s, mut router) = match read_streams(&state, 2 * ids.len()) {
        Some(found) => found,
        None => {
            let mut s = model.embed(&ids)?;
            s.extend_from_within(..);
            (0, s, None)
        }
    };
    first = first.min(layers);
    for l in first..layers {
        check_interrupted()?;
        progress(l, layers + 1);
        model.layer_of_windows(l, &lengths, &mut s, &mut router)?;
        write_streams(&state, l + 1, &s, router.as_ref())?;
    }
    progress(layers, layers + 1);
    let x = model.head_input(&s)?;
    let head = plan.shards.iter().flat_map(|s| &s.matrices).find(|m| m.part == "head");
    head.map_or(Ok(()), |head| compressor.compress_head(family, &head.tensor, &x))?;
    progress(layers + 1, layers + 1);
    Ok(())
}

/// Kinds in which a search tries matrices that are compressed for a text; the others lose little by being compressed
/// without one.
const SEARCHED: [Quant; 4] = [
    Quant::lut(IndexBits::Two),
    Quant::lut(IndexBits::Three),
    Quant::lut(IndexBits::Four),
    Quant::lut(IndexBits::Six),
];
/// Windows of which a search compresses for one; the build takes all.
const SEARCH_STEP: usize = 4;
/// Windows that a search runs the model on.
const RUN_WINDOWS: usize = 16;

/// Matrices by tensor and part of the model.
type MatricesOfTensors = BTreeMap<(String, String), Vec<MatrixPlan>>;

/// Matrices that were compressed for a text in several kinds, each kind in a folder of its own.
pub struct Candidates {
    folder: PathBuf,
    plans: Vec<(Quant, MatricesOfTensors)>,
}

impl Candidates {
    /// Compresses a model for some of the windows in each kind, in the search's folder. The user's kinds of parts stay.
    /// `progress` takes layers that are done, of how many.
    ///
    /// # Errors
    /// Fails like [`compress`], or there is no room for the files.
    pub fn new(
        family: &Family,
        options: &PlanOptions,
        windows: &[Vec<u32>],
        record: &SearchRecord,
        progress: &mut dyn FnMut(usize, usize),
    ) -> Result<Candidates> {
        let folder = record.folder();
        let some: Vec<Vec<u32>> = windows.iter().step_by(SEARCH_STEP).cloned().collect();
        // A search tries attention in every kind too, where a build without one takes the family's.
        let planned = SEARCHED.map(|quant| {
            let parts = PartKinds { attention: options.parts.attention.or(Some(quant)), ..options.parts };
            family.plan(&PlanOptions { quant, parts, ..options.clone() })
        });
        let planned = planned.into_iter().collect::<Result<Vec<Plan>>>()?;
        let question = |quant: Quant| ("compressed", quant.to_string());
        let missing =
            SEARCHED.iter().zip(&planned).filter(|(q, _)| record.known::<()>(&question(**q)).is_none());
        let matrices = missing.flat_map(|(_, plan)| &plan.shards).flat_map(|s| &s.matrices);
        check_scratch(&folder, matrices.map(MatrixPlan::bytes).sum())?;
        let mut plans = Vec::new();
        for (i, (quant, plan)) in SEARCHED.into_iter().zip(planned).enumerate() {
            let own = folder.join(quant.to_string());
            std::fs::create_dir_all(&own).map_err(|e| Error::io(&own, e))?;
            let mut show = |done, of| progress(i * of + done, SEARCHED.len() * of);
            record.once(&question(quant), || compress(family, &plan, &some, &own, &mut show))?;
            plans.push((quant, kind_search::matrices(&plan)));
        }
        Ok(Candidates { folder, plans })
    }

    /// Returns the values of a group's matrices in a kind, in the order of their places; none where the kind, or this
    /// tensor in it, was not compressed for the text.
    ///
    /// # Errors
    /// A temporary file cannot be read.
    pub fn values(&self, group: &Group, kind: Quant) -> Result<Option<Vec<f32>>> {
        let Some((_, plan)) = self.plans.iter().find(|(quant, _)| *quant == kind) else { return Ok(None) };
        let store = CompressedMatrices::new(&self.folder.join(kind.to_string()));
        let matrices = plan.get(&(group.tensor.clone(), group.part.clone())).into_iter().flatten();
        let mut values = Vec::new();
        for m in matrices.filter(|m| group.matrices.iter().any(|own| own.offset == m.offset)) {
            if m.quant.kind != kind {
                return Ok(None);
            }
            let Some(c) = store.read(m)? else { return Ok(None) };
            values.extend(decoded(m, &c)?);
        }
        Ok(Some(values).filter(|v| !v.is_empty()))
    }
}

/// Returns the windows that a search runs the model on: some for which it does not compress. Of few windows, all.
pub fn search_windows(windows: &[Vec<u32>]) -> Vec<Vec<u32>> {
    let others: Vec<&Vec<u32>> = windows
        .iter()
        .enumerate()
        .filter(|(i, _)| i % SEARCH_STEP == SEARCH_STEP / 2)
        .map(|(_, w)| w)
        .collect();
    match others.len() {
        0 => windows.to_vec(),
        n => (0..RUN_WINDOWS.min(n)).map(|i| others[i * n / RUN_WINDOWS.min(n)].clone()).collect(),
    }
}

/// Returns the values of a compressed matrix.
fn decoded(m: &MatrixPlan, c: &CompressedMatrix) -> Result<Vec<f32>> {
    let encoder = Encoder::plain(m.rows, m.cols, m.quant);
    encoder.decode(&c.packed, &c.side).map_err(|e| Error::usage(format!("matrix `{}`: {e}", m.name)))
}

/// Writes both streams behind `layers` layers, and the routers' state where there is one.
fn write_streams(path: &Path, layers: usize, s: &Rows, router: Option<&Rows>) -> Result<()> {
    let write = |file: &mut std::fs::File| {
        let mut out = std::io::BufWriter::new(file);
        let width = |rows: &Rows| rows.first().map_or(0, Vec::len);
        for n in [layers, s.len(), width(s), router.map_or(0, width)] {
            out.write_all(&(n as u64).to_le_bytes())?;
        }
        for v in s.iter().chain(router.into_iter().flatten()).flatten() {
            out.write_all(&v.to_le_bytes())?;
        }
        out.flush()
    };
    write_atomic(path, write).map_err(|e| Error::io(path, e))
}

/// Reads streams of `tokens` tokens with the number of layers that they went through; none where there are none.
fn read_streams(path: &Path, tokens: usize) -> Option<(usize, Rows, Option<Rows>)> {
    let bytes = std::fs::read(path).ok()?;
    let (head, body) = bytes.split_at_checked(32)?;
    let number = |i: usize| Some(u64::from_le_bytes(head[8 * i..8 * i + 8].try_into().ok()?) as usize);
    let (layers, found, width, router) = (number(0)?, number(1)?, number(2)?, number(3)?);
    let all = width.checked_add(router)?.checked_mul(tokens)?.checked_mul(4)?;
    if found != tokens || width == 0 || body.len() != all {
        return None;
    }
    let values: Vec<f32> =
        body.chunks_exact(4).map(|b| f32::from_le_bytes([b[0], b[1], b[2], b[3]])).collect();
    let (s, rest) = values.split_at(tokens * width);
    let rows = |v: &[f32], width: usize| v.chunks_exact(width).map(<[f32]>::to_vec).collect();
    Some((layers, rows(s, width), (router > 0).then(|| rows(rest, router))))
}

/// Compressor of the matrices of a plan, each for its inputs.
struct LayerCompressor {
    checkpoint: PathBuf,
    store: CompressedMatrices,
    /// Matrices to compress, by tensor.
    matrices: BTreeMap<String, Vec<MatrixPlan>>,
    /// Sums over all experts of the stack that is being compressed, with its tensor.
    shared: Mutex<Option<(String, InputSums)>>,
    /// Moments of the last inputs, with a hash of the inputs: queries, keys and values have the same.
    last: Mutex<Option<(u64, Arc<SecondMoments>)>>,
    /// Matrices of which some rows are compressed, by tensor and offset.
    begun: Mutex<BTreeMap<(String, u64), CompressedMatrix>>,
}

/// Reader of rows from the given one on.
type ReadWeights<'a> = dyn Fn(usize, &mut [f32]) -> Result<()> + 'a;

impl LayerCompressor {
    /// Adds the inputs of a matrix to its sums.
    fn add(sums: &mut InputSums, inputs: &InputPairs<'_>) {
        let (cols, factors) = (inputs.shape.1, factors(inputs));
        for first in (0..inputs.compressed.len()).step_by(TOKENS) {
            let tokens = TOKENS.min(inputs.compressed.len() - first);
            let columns = |x: &[&[f32]]| -> Vec<f32> {
                let own = &x[first..first + tokens];
                (0..cols)
                    .flat_map(|c| own.iter().zip(&factors[first..]).map(move |(x, f)| x[c] * f))
                    .collect()
            };
            sums.add(&columns(&inputs.float), &columns(&inputs.compressed), tokens);
        }
    }

    /// Returns the moments of a matrix's inputs.
    fn moments(&self, inputs: &InputPairs<'_>) -> Arc<SecondMoments> {
        let shared = locked(&self.shared);
        let shared = shared.as_ref().filter(|(tensor, _)| tensor == inputs.tensor);
        let mut last = locked(&self.last);
        let key = match shared {
            Some(_) => None,
            None => Some(hash(inputs)),
        };
        if let Some((_, moments)) = last.as_ref().filter(|(of, _)| Some(*of) == key) {
            return moments.clone();
        }
        *last = None;
        let mut sums = InputSums::new(inputs.shape.1);
        LayerCompressor::add(&mut sums, inputs);
        if let Some((_, all)) = shared {
            sums.add_mean(all, PRIOR_TOKENS);
        }
        let moments = Arc::new(SecondMoments::new(sums));
        *last = key.map(|key| (key, moments.clone()));
        moments
    }

    /// Compresses rows of a matrix from row `first` on, as many as `read` has, and hands the values of the result to
    /// `each`, some rows at a time.
    fn compress_rows(
        &self,
        m: &MatrixPlan,
        (first, rows): (usize, usize),
        moments: &SecondMoments,
        read: &ReadWeights<'_>,
        each: &mut dyn FnMut(usize, &[f32]),
    ) -> Result<()> {
        let (block, _) = m.quant.block(m.rows, m.cols);
        let unit = block.max(1).saturating_mul(8);
        let chunk = (WEIGHTS / m.cols / unit).max(1).saturating_mul(unit);
        if !fits_rows(m, rows) {
            return Err(Error::unsupported(
                &self.checkpoint,
                format!(
                    "tensor `{}`: experts that share a table ({}) cannot be calibrated",
                    m.tensor, m.quant
                ),
            ));
        }
        for start in (0..rows).step_by(chunk) {
            check_interrupted()?;
            let n = chunk.min(rows - start);
            let mut weights = vec![0f32; n * m.cols];
            read(start, &mut weights)?;
            let encoder = Encoder::plain(n, m.cols, m.quant);
            let failed =
                |what: String| Error::invalid(&self.checkpoint, format!("tensor `{}`: {what}", m.tensor));
            let c = encoder.run_with_feedback(&weights, moments).map_err(|e| failed(e.to_string()))?;
            each(start, &encoder.decode(&c.packed, &c.side).map_err(|e| failed(e.to_string()))?);
            let mut begun = locked(&self.begun);
            let key = (m.tensor.clone(), m.offset);
            if first + start == 0 {
                begun.remove(&key);
            }
            let whole = begun.entry(key.clone()).or_default();
            whole.packed.extend_from_slice(&c.packed);
            whole.side.values.extend_from_slice(&c.side.values);
            whole.side.offsets.extend_from_slice(&c.side.offsets);
            whole.side.metrics.merge(&c.side.metrics);
            if first + start + n == m.rows
                && let Some(whole) = begun.remove(&key)
            {
                self.store.write(m, &whole)?;
            }
        }
        Ok(())
    }

    /// Compresses the head, whose inputs are `x`, both streams one behind the other.
    fn compress_head(&self, family: &Family, tensor: &str, x: &Rows) -> Result<()> {
        let (float, compressed) = x.split_at(x.len() / 2);
        let Some(matrices) = self.matrices.get(tensor).filter(|all| !all.is_empty()) else { return Ok(()) };
        fn rows(x: &[Vec<f32>]) -> Vec<&[f32]> {
            x.iter().map(Vec::as_slice).collect()
        }
        let shape = (family.decoder.vocab, family.decoder.hidden);
        let (float, compressed) = (rows(float), rows(compressed));
        let moments = self.moments(&InputPairs { tensor, index: 0, shape, float, compressed, scales: None });
        for m in matrices {
            let read = |row: usize, out: &mut [f32]| {
                let start = m.offset + (row * m.cols) as u64;
                family.checked.read(&m.tensor, start..start + out.len() as u64, out)
            };
            self.compress_rows(m, (0, m.rows), &moments, &read, &mut |_, _| ())?;
        }
        Ok(())
    }
}

/// Returns the factor with which each token of a matrix's inputs counts.
fn factors(inputs: &InputPairs<'_>) -> Vec<f32> {
    let scale = |t: usize| inputs.scales.map_or(1.0, |s| s[t]);
    let length = |(t, x): (usize, &&[f32])| scale(t) * x.iter().map(|v| v * v).sum::<f32>().sqrt();
    let lengths: Vec<f32> = inputs.compressed.iter().enumerate().map(length).collect();
    let mut sorted = lengths.clone();
    sorted.sort_by(f32::total_cmp);
    let most = LONGEST * sorted.get(sorted.len() / 2).copied().unwrap_or_default();
    let is_long = |length: f32| most > 0.0 && length > most;
    lengths.iter().enumerate().map(|(t, &l)| scale(t) * if is_long(l) { most / l } else { 1.0 }).collect()
}

/// Computes a hash of a matrix's inputs (FNV-1a over their bits).
fn hash(inputs: &InputPairs<'_>) -> u64 {
    let rows = inputs.float.iter().chain(&inputs.compressed).copied().chain(inputs.scales);
    let start = (0xcbf2_9ce4_8422_2325u64, 0x0100_0000_01b3u64);
    rows.flatten()
        .fold(start.0 ^ inputs.shape.1 as u64, |h, v| (h ^ u64::from(v.to_bits())).wrapping_mul(start.1))
}

impl Compressor for Arc<LayerCompressor> {
    fn share(&self, parts: &[InputPairs<'_>]) -> Result<()> {
        let Some(first) = parts.first().filter(|p| self.matrices.contains_key(p.tensor)) else {
            return Ok(());
        };
        let mut sums = InputSums::new(first.shape.1);
        for part in parts {
            check_interrupted()?;
            LayerCompressor::add(&mut sums, part);
        }
        *locked(&self.shared) = Some((first.tensor.to_string(), sums));
        Ok(())
    }

    fn compress(&self, inputs: &InputPairs<'_>, weights: &[f32]) -> Result<Option<Vec<f32>>> {
        let cols = inputs.shape.1;
        let first = (inputs.index * weights.len()) as u64;
        let end = first + weights.len() as u64;
        let own = |m: &&MatrixPlan| m.offset < end && m.offset + m.weights() > first;
        let matrices: Vec<&MatrixPlan> =
            self.matrices.get(inputs.tensor).into_iter().flatten().filter(own).collect();
        if matrices.is_empty() {
            return Ok(None);
        }
        let moments = self.moments(inputs);
        let mut out = weights.to_vec();
        for m in matrices {
            let (from, to) = (m.offset.max(first), (m.offset + m.weights()).min(end));
            let (start, rows) = ((from - first) as usize, (to - from) as usize / cols);
            let read = |row: usize, out: &mut [f32]| {
                out.copy_from_slice(&weights[start + row * cols..][..out.len()]);
                Ok(())
            };
            let behind = (from - m.offset) as usize / cols;
            self.compress_rows(m, (behind, rows), &moments, &read, &mut |row, values| {
                out[start + row * cols..][..values.len()].copy_from_slice(values);
            })?;
        }
        Ok(Some(out))
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use anemoe_convert::form::{ExpertForm, ShardForm};
    use anemoe_convert::models;
    use anemoe_convert::plan::PlanOptions;

    fn fixture(name: &str) -> Family {
        let path = Path::new(env!("CARGO_MANIFEST_DIR")).join("../../fixtures").join(name);
        models::open(models::load(&path).unwrap()).unwrap()
    }

    #[test]
    fn no_gate_shares_a_line_with_the_built_in_text() {
        let lines: std::collections::BTreeSet<&str> = TEXT.lines().filter(|l| l.len() > 30).collect();
        let gates = include_str!("gate_text.txt");
        assert!(lines.len() > 500 && gates.lines().all(|l| !lines.contains(l)));
    }

    #[test]
    fn the_longest_inputs_count_less() {
        fn factors_of<'a>(inputs: &[&'a [f32]], scales: Option<&'a [f32]>) -> Vec<f32> {
            let (float, compressed) = (inputs.to_vec(), inputs.to_vec());
            factors(&InputPairs { tensor: "t", index: 0, shape: (1, 2), float, compressed, scales })
        }
        let (long, short, zero): (&[f32], &[f32], &[f32]) = (&[300.0, 400.0], &[0.6, 0.8], &[0.0; 2]);
        assert_eq!(factors_of(&[long, short, short], None), [LONGEST / 500.0, 1.0, 1.0]);
        assert_eq!(factors_of(&[long, short, short], Some(&[0.001, 0.5, 0.5])), [0.001, 0.5, 0.5]);
        assert_eq!(factors_of(&[long, zero, zero], None), [1.0; 3]);
        assert!(factors_of(&[], None).is_empty());
    }

    const TOKENS: [&[u32]; 3] = [&[2, 7, 19, 33, 5, 8, 40, 41], &[2, 5, 9], &[2, 90, 91, 92, 93, 17, 18]];

    fn tokens() -> Vec<Vec<u32>> {
        TOKENS.iter().map(|w| w.to_vec()).collect()
    }

    fn files(folder: &Path) -> BTreeMap<String, Vec<u8>> {
        let entries = std::fs::read_dir(folder).unwrap().map(|e| e.unwrap());
        entries.map(|e| (e.file_name().into_string().unwrap(), std::fs::read(e.path()).unwrap())).collect()
    }

    #[test]
    fn every_matrix_of_every_family_is_compressed_once() {
        for name in [
            "gemma4-moe",
            "zaya",
            "llama",
            "mistral",
            "qwen2",
            "qwen3",
            "qwen3-moe",
            "olmoe",
            "gemma3",
            "gpt-oss",
        ] {
            let family = fixture(&format!("tiny-{name}"));
            for kind in ["lut4", "int4-block"] {
                let options = PlanOptions { quant: kind.parse().unwrap(), ..PlanOptions::default() };
                let plan = family.plan(&options).unwrap();
                let dir = tempfile::tempdir().unwrap();
                let mut seen = Vec::new();
                compress(&family, &plan, &tokens(), dir.path(), &mut |done, of| seen.push((done, of)))
                    .unwrap();
                let layers = family.decoder.layers.len();
                assert_eq!(seen, (0..=layers + 1).map(|i| (i, layers + 1)).collect::<Vec<_>>());
                let store = CompressedMatrices::new(dir.path());
                for m in plan.shards.iter().flat_map(|s| &s.matrices) {
                    let wanted = !matches!(m.quant.kind, Quant::Fp16 | Quant::Mxfp4) && m.taps == 1;
                    assert_eq!(store.has(m), wanted, "{name} {kind}: {} {}", m.tensor, m.quant);
                    if let Some(c) = store.read(m).unwrap() {
                        let encoder = Encoder::plain(m.rows, m.cols, m.quant);
                        let values = encoder.decode(&c.packed, &c.side).unwrap();
                        assert!(values.iter().all(|v| v.is_finite()));
                        assert!(c.side.metrics.cosine() > 0.9, "{}: {}", m.tensor, c.side.metrics.cosine());
                    }
                }
            }
        }
    }

    #[test]
    fn candidates_have_the_kind_that_a_search_asks_for() {
        // A build of ZAYA without a search keeps attention in int8.
        let family = fixture("tiny-zaya");
        let options = PlanOptions::default();
        let dir = tempfile::tempdir().unwrap();
        let record = SearchRecord::open(dir.path(), "0").unwrap();
        let candidates = Candidates::new(&family, &options, &tokens(), &record, &mut |_, _| ()).unwrap();
        // Nothing is compressed a second time.
        Candidates::new(&family, &options, &tokens(), &record, &mut |_, _| panic!("again")).unwrap();
        let parts = PartKinds { attention: Some(Quant::lut(IndexBits::Two)), ..PartKinds::default() };
        let quant = Quant::lut(IndexBits::Two);
        let plan = family.plan(&PlanOptions { quant, parts, ..options }).unwrap();
        let mut found = 0;
        for ((tensor, part), matrices) in kind_search::matrices(&plan) {
            let (rows, cols, own) = (matrices[0].rows, matrices[0].cols, matrices[0].quant);
            let (experts, tried) = (Vec::new(), Vec::new());
            let (sensitivity, read) = (1.0, 1.0);
            let group =
                Group { tensor, part: part.clone(), experts, matrices, candidates: tried, sensitivity, read };
            let Some(values) = candidates.values(&group, quant).unwrap() else { continue };
            found += usize::from(part == "attention");
            for table in values[..rows * cols].chunks(own.group * cols) {
                let distinct: BTreeSet<u32> = table.iter().map(|v| v.to_bits()).collect();
                assert!(distinct.len() <= 4, "{}: {} values", group.tensor, distinct.len());
            }
        }
        assert!(found > 0);
    }

    #[test]
    fn plans_whose_experts_share_tables_are_told_before() {
        let family = fixture("tiny-gemma4-moe");
        let mut told = Vec::new();
        for experts in [ExpertForm::Separate, ExpertForm::Bank] {
            for kind in ["lut4", "lut4-tensor", "int8-tensor"] {
                let (form, quant) = (ShardForm { experts, ..ShardForm::default() }, kind.parse().unwrap());
                let plan = family.plan(&PlanOptions { quant, form, ..PlanOptions::default() }).unwrap();
                let dir = tempfile::tempdir().unwrap();
                let compressed = compress(&family, &plan, &tokens(), dir.path(), &mut |_, _| ());
                assert_eq!(compressed.is_ok(), fits_experts(&family, &plan), "{experts:?} {kind}");
                told.push(compressed.is_ok());
            }
        }
        assert!(told[..4].iter().all(|fits| *fits) && told[4..].iter().all(|fits| !fits), "{told:?}");
    }

    #[test]
    fn an_interrupted_run_goes_on_behind_its_last_layer() {
        let family = fixture("tiny-zaya");
        let plan = family.plan(&PlanOptions::default()).unwrap();
        let (whole, cut) = (tempfile::tempdir().unwrap(), tempfile::tempdir().unwrap());
        let run = |dir: &Path, seen: &mut Vec<usize>| {
            compress(&family, &plan, &tokens(), dir, &mut |done, _| seen.push(done)).unwrap();
        };
        let mut seen = Vec::new();
        run(whole.path(), &mut seen);
        let state = format!("{PREFIX}streams");
        // A run of fewer layers leaves streams behind them.
        let stopped = std::panic::catch_unwind(std::panic::AssertUnwindSafe(|| {
            compress(&family, &plan, &tokens(), cut.path(), &mut |done, _| assert!(done < 2))
        }));
        assert!(stopped.is_err() && cut.path().join(&state).is_file());
        seen.clear();
        run(cut.path(), &mut seen);
        assert_eq!(seen[0], 2);
        assert_eq!(files(whole.path()), files(cut.path()));
        // Streams of another text, or cut ones, do not count.
        let bytes = std::fs::read(whole.path().join(&state)).unwrap();
        for bad in [&bytes[..bytes.len() - 1], &bytes[..20], &[]] {
            std::fs::write(whole.path().join(&state), bad).unwrap();
            assert!(read_streams(&whole.path().join(&state), 36).is_none());
        }
    }
}
