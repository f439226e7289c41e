//! The weight gate: compares every weight of a bundle with its checkpoint's.
//!
//! ```text
//! w   a row of a matrix, from the checkpoint     q   the same row, decoded from the package
//! cosine of a row      q w / |q| |w|        of rows that are not much shorter than the others
//! share of a matrix    sum q w / sum w w    1 - e where tables hold means; 1 where errors are independent of the weights
//! excess of a matrix   sum q q / sum q w    1                              1 + e
//! ```
//! Both hold for a relative squared error e. A scale that is off by 10 % moves both by 10 %, so that 1 lies outside.
//!
//! Vectors are stored in fp16, and must be the rounded values themselves.
//!
//! A fault in one matrix of many hardly moves the predictions of the whole: a shuffled expert of 96 costs as much as
//! `int8-channel` does everywhere. Its weights are another matrix's all the same.

use crate::Result;
use anemoe_bundle::Chain;
use anemoe_convert::build;
use anemoe_convert::lower::vector_values;
use anemoe_convert::models::{CheckedCheckpoint, Family};
use anemoe_convert::plan::{MatrixPlan, Plan, PlannedShard};
use anemoe_mlpackage::mil::Operation;
use anemoe_npz::Array;
use anemoe_runtime::cpu::CpuPackage;
use anemoe_runtime::model::EmbeddingFile;
use anemoe_runtime::tensor::Tensor;
use rayon::prelude::*;
use serde::Serialize;
use std::path::Path;

/// Returns the cosine below which a row is another row, by the bits of a weight. Two rows of an embedding can have 0.6, rows of a shuffled
/// table have about 0; compressed rows have at least 0.98 in 4 bits, 0.73 where they are for a text (docs/gates.md).
fn other_row(bits: u8, is_for_text: bool) -> f64 {
    match bits {
        6.. => 0.8,
        4.. if !is_for_text => 0.65,
        _ => 0.2,
    }
}
/// Length of a row over the median length below which its cosine does not count: a table that it shares with longer rows may
/// leave nothing of it.
const SHORT_ROW: f64 = 0.3;
/// Largest share, and inverse of the least excess.
const SCALE: f64 = 1.05;
/// Rows of the embedding that are compared at a time.
const EMBEDDING_ROWS: usize = 4096;
/// Most faults that are listed.
const LISTED: usize = 16;

/// Result of the weight gate.
#[derive(Clone, Debug, PartialEq, Serialize)]
pub struct WeightGate {
    /// True if no weight is at fault.
    pub pass: bool,
    /// Number of matrices and vectors that are compared.
    pub compared: usize,
    /// Lowest cosine of a row.
    pub min_row_cosine: f64,
    /// Largest share of a matrix.
    pub max_share: f64,
    /// Least excess of a matrix.
    pub min_excess: f64,
    /// Number of matrices and vectors at fault.
    pub wrong: usize,
    /// The first of them.
    pub faults: Vec<WrongWeight>,
}

/// A matrix or vector that is not the checkpoint's.
#[derive(Clone, Debug, PartialEq, Serialize)]
pub struct WrongWeight {
    /// Shard, or file of the host.
    pub place: String,
    /// Matrix or vector there.
    pub weight: String,
    /// Checkpoint tensor, without the checkpoint's prefix.
    pub tensor: String,
    /// Difference, in words.
    pub what: String,
}

impl std::fmt::Display for WrongWeight {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        write!(f, "{}, {} (tensor `{}`): {}", self.place, self.weight, self.tensor, self.what)
    }
}

/// Rules for a bundle's weights.
#[derive(Clone, Copy)]
struct WeightRules {
    /// True if weights are compressed for a text.
    is_for_text: bool,
    /// True if scales are judged. Compression for a text makes weights smaller where their inputs change much, as those of a
    /// model that has not learned from any text do.
    judges_scale: bool,
}

/// Sums over the rows of a matrix.
#[derive(Clone, Copy, Default)]
struct RowSums {
    /// `w w`, `q w` and `q q`.
    ww: f64,
    qw: f64,
    qq: f64,
}

/// Comparison of a matrix with the checkpoint's.
#[derive(Clone, Copy, Debug)]
struct Likeness {
    /// Lowest cosine of a row, the row, the cosine below which a row is another one, and the number of such rows.
    min_cosine: f64,
    row: usize,
    bound: f64,
    others: usize,
    share: f64,
    excess: f64,
}

impl Likeness {
    /// Compares the rows of `q` with those that `read` gives, each of `cols` columns; `bound` is the least cosine of a row.
    fn of(
        q: &[f32],
        cols: usize,
        bound: f64,
        read: &(dyn Fn(usize, &mut [f32]) -> Result<()> + Sync),
    ) -> Result<Self> {
        let sums = q.par_chunks_exact(cols.max(1)).enumerate().map_init(
            || vec![0f32; cols],
            |w, (row, q)| {
                read(row, w)?;
                let mut sums = RowSums::default();
                for (&q, &w) in q.iter().zip(w.iter()) {
                    let (q, w) = (f64::from(q), f64::from(w));
                    sums.ww += w * w;
                    sums.qw += q * w;
                    sums.qq += q * q;
                }
                Ok(sums)
            },
        );
        let rows: Vec<RowSums> = sums.collect::<Result<_>>()?;
        let sum = |f: fn(&RowSums) -> f64| rows.iter().map(f).sum::<f64>();
        let short =
            SHORT_ROW * SHORT_ROW * median(rows.iter().map(|r| r.ww).filter(|ww| *ww > 0.0).collect());
        let counted = rows.iter().enumerate().filter(|(_, r)| r.ww > 0.0 && r.ww >= short);
        let cosines = counted.map(|(i, r)| (i, r.qw / (r.ww * r.qq).sqrt()));
        let (mut others, mut lowest) = (0, (0, 1.0));
        for (row, cosine) in cosines {
            // What is not a number is the lowest.
            if cosine.is_nan() || cosine < lowest.1 {
                lowest = (row, cosine);
            }
            others += usize::from(cosine.is_nan() || cosine < bound);
        }
        let [ww, qw, qq] = [sum(|r| r.ww), sum(|r| r.qw), sum(|r| r.qq)];
        let ratio = |a: f64, b: f64| if a == b { 1.0 } else { a / b };
        Ok(Likeness {
            min_cosine: lowest.1,
            row: lowest.0,
            bound,
            others,
            share: ratio(qw, ww),
            excess: ratio(qq, qw),
        })
    }

    /// Says what is wrong; `None` where nothing is.
    fn fault(&self, rows: usize, judges_scale: bool) -> Option<String> {
        if self.others > 0 {
            return Some(format!(
                "{} of {rows} rows are not the checkpoint's; the cosine of row {} is {:.3}, at least {:.3} wanted",
                self.others, self.row, self.min_cosine, self.bound
            ));
        }
        // What is not a number is no scale.
        if judges_scale && !(self.share <= SCALE && self.excess >= 1.0 / SCALE) {
            return Some(format!(
                "the scale is not the checkpoint's: {:.3} to {:.3} times its own",
                self.share.min(self.excess),
                self.share.max(self.excess)
            ));
        }
        None
    }
}

fn median(mut values: Vec<f64>) -> f64 {
    values.sort_by(f64::total_cmp);
    values.get(values.len() / 2).copied().unwrap_or_default()
}

impl WeightGate {
    fn new() -> WeightGate {
        WeightGate {
            pass: true,
            compared: 0,
            min_row_cosine: 1.0,
            max_share: 0.0,
            min_excess: f64::INFINITY,
            wrong: 0,
            faults: Vec::new(),
        }
    }

    /// Notes a comparison, with what is wrong in it.
    fn note(&mut self, (place, weight, tensor): (&str, &str, &str), what: Option<String>) {
        self.compared += 1;
        let Some(what) = what else { return };
        self.pass = false;
        self.wrong += 1;
        if self.faults.len() < LISTED {
            let (place, weight, tensor) = (place.into(), weight.into(), tensor.into());
            self.faults.push(WrongWeight { place, weight, tensor, what });
        }
    }

    fn note_matrix(&mut self, at: (&str, &str, &str), rows: usize, found: Likeness, rules: WeightRules) {
        self.min_row_cosine = self.min_row_cosine.min(found.min_cosine);
        self.max_share = self.max_share.max(found.share);
        self.min_excess = self.min_excess.min(found.excess);
        self.note(at, found.fault(rows, rules.judges_scale));
    }
}

/// Compares the weights of a bundle's packages, its embedding and the host's vectors with those of the checkpoint that
/// `plan` was made for; `learned` is false where the checkpoint is known to predict text no better than chance. `progress` is
/// called after each shard.
///
/// # Errors
/// The checkpoint or a package cannot be read, or the work was interrupted.
pub fn gate(
    family: &Family,
    plan: &Plan,
    bundle: &Path,
    chain: &Chain,
    learned: bool,
    progress: &mut dyn FnMut(),
) -> Result<WeightGate> {
    let is_for_text = chain.calibration.is_some();
    let rules = WeightRules { is_for_text, judges_scale: learned || !is_for_text };
    let mut gate = WeightGate::new();
    for shard in &plan.shards {
        build::check_interrupted()?;
        shard_weights(&mut gate, &family.checked, shard, bundle, rules)?;
        progress();
    }
    embedding(&mut gate, (family, plan), bundle, chain, rules)?;
    host_vectors(&mut gate, family, plan, bundle, chain)?;
    Ok(gate)
}

fn shard_weights(
    gate: &mut WeightGate,
    checkpoint: &CheckedCheckpoint,
    shard: &PlannedShard,
    bundle: &Path,
    rules: WeightRules,
) -> Result<()> {
    let package = CpuPackage::open(&bundle.join(shard.package_file()))?;
    for m in &shard.matrices {
        let at = (shard.name.as_str(), m.name.as_str(), m.tensor.as_str());
        let q = match stored(&package, &m.name, &m.dims()) {
            Ok(q) => q,
            Err(what) => {
                gate.note(at, Some(what));
                continue;
            }
        };
        let values = q.as_f32().unwrap_or_default();
        let bound = other_row(m.quant.kind.bits(), rules.is_for_text);
        gate.note_matrix(at, m.rows, Likeness::of(values, m.cols, bound, &rows_of(checkpoint, m))?, rules);
    }
    for v in &shard.vectors {
        let what = match stored(&package, &v.name, &v.dims) {
            Ok(q) => {
                let wanted =
                    vector_values(checkpoint, v)?.into_iter().map(|w| w.to_f32()).collect::<Vec<_>>();
                other_value(q.as_f32().unwrap_or_default(), &wanted)
            }
            Err(what) => Some(what),
        };
        gate.note((&shard.name, &v.name, &v.tensor), what);
    }
    Ok(())
}

/// Returns what reads a row of a planned matrix from the checkpoint.
fn rows_of<'a>(
    checkpoint: &'a CheckedCheckpoint,
    m: &'a MatrixPlan,
) -> impl Fn(usize, &mut [f32]) -> Result<()> + Sync + 'a {
    |row, out| {
        let start = m.offset + row as u64 * m.cols as u64;
        checkpoint.read(&m.tensor, start..start + m.cols as u64, out)
    }
}

/// Compares the embedding's rows with the checkpoint's, some at a time.
fn embedding(
    gate: &mut WeightGate,
    (family, plan): (&Family, &Plan),
    bundle: &Path,
    chain: &Chain,
    rules: WeightRules,
) -> Result<()> {
    let (e, checkpoint) = (&chain.embedding, &family.checked);
    // An assistant takes the embedding of the model that it drafts for.
    if e.rows == 0 || chain.assistant.is_some() {
        return Ok(());
    }
    let (mut file, tensor) = (EmbeddingFile::open(bundle, e)?, family.decoder.tensor(None, "embedding"));
    let (mut q, mut worst) = (Vec::new(), None::<Likeness>);
    for first in (0..e.rows).step_by(EMBEDDING_ROWS) {
        build::check_interrupted()?;
        q.resize(EMBEDDING_ROWS.min(e.rows - first) * e.cols, 0.0);
        file.rows(first, &mut q)?;
        let read = |row: usize, out: &mut [f32]| {
            let start = (first + row) as u64 * e.cols as u64;
            checkpoint.read(&tensor, start..start + e.cols as u64, out)?;
            out.iter_mut().for_each(|w| *w *= e.scale);
            Ok(())
        };
        let d = Likeness::of(&q, e.cols, other_row(plan.embedding.kind.bits(), rules.is_for_text), &read)?;
        let d = Likeness { row: first + d.row, ..d };
        let is_worse = |w: Likeness| {
            let fault = |l: Likeness| l.fault(e.rows, rules.judges_scale);
            fault(w).is_none() && (fault(d).is_some() || d.min_cosine < w.min_cosine)
        };
        if worst.is_none_or(is_worse) {
            worst = Some(d);
        }
    }
    if let Some(worst) = worst {
        gate.note_matrix((&e.file, "embedding", &tensor), e.rows, worst, rules);
    }
    Ok(())
}

/// Compares the host's vectors with those of the checkpoint, which are f32 in both.
fn host_vectors(
    gate: &mut WeightGate,
    family: &Family,
    plan: &Plan,
    bundle: &Path,
    chain: &Chain,
) -> Result<()> {
    let Some(vectors) = &chain.vectors else { return Ok(()) };
    let wanted = family.host_vectors(&plan.options)?;
    let bytes = wanted.values().map(|v| 4 * v.len() as u64).sum();
    let stored = anemoe_npz::read_npz_within(&bundle.join(&vectors.file), bytes)?;
    for (name, wanted) in &wanted {
        let what = match stored.get(name).map(Array::to_f32) {
            Some(stored) => other_value(&stored, wanted),
            None => Some("is missing".to_string()),
        };
        gate.note((&vectors.file, name, name), what);
    }
    Ok(())
}

/// Decodes a constant of a package as a run does, or says why it is not the planned one. Functions of few experts each have
/// their own constants.
fn stored(package: &CpuPackage, name: &str, dims: &[u64]) -> std::result::Result<Tensor, String> {
    let makes_it = |op: &Operation| op.outputs.iter().any(|output| output.name == name);
    let mut functions = package.package().model().program.functions.iter();
    let function = functions.find(|(_, f)| f.block.operations.iter().any(makes_it));
    let (function, _) = function.ok_or("is missing")?;
    let tensor = package.constant(function, name).map_err(|e| e.to_string())?;
    let shape: Vec<u64> = tensor.shape.iter().map(|&d| d as u64).collect();
    match shape == dims {
        true => Ok(tensor),
        false => Err(format!("has the shape {shape:?}, not {dims:?}")),
    }
}

/// Says where stored values are not the wanted ones; `None` where all are.
fn other_value(stored: &[f32], wanted: &[f32]) -> Option<String> {
    if stored.len() != wanted.len() {
        return Some(format!("has {} values, not {}", stored.len(), wanted.len()));
    }
    let i = stored.iter().zip(wanted).position(|(q, w)| q != w)?;
    Some(format!("value {i} is {}, and {} in the checkpoint", stored[i], wanted[i]))
}

#[cfg(test)]
mod tests {
    use super::*;
    use anemoe_io::Random;

    fn matrix(seed: u64) -> Vec<f32> {
        let mut random = Random::new(seed);
        (0..64 * 48).map(|_| 2.0 * random.uniform() as f32 - 1.0).collect()
    }

    fn fault(w: &[f32], q: &[f32]) -> Option<String> {
        let read = |row: usize, out: &mut [f32]| {
            out.copy_from_slice(&w[row * 48..][..48]);
            Ok(())
        };
        Likeness::of(q, 48, 0.2, &read).unwrap().fault(w.len() / 48, true)
    }

    #[test]
    fn errors_of_compression_pass_and_other_matrices_do_not() {
        let w = matrix(1);
        let with =
            |f: &dyn Fn(usize, f32) -> f32| w.iter().enumerate().map(|(i, v)| f(i, *v)).collect::<Vec<f32>>();
        let noise = matrix(2);
        assert_eq!(fault(&w, &w), None);
        // Means of what they stand for: three values. Then errors that are independent of the weights.
        assert_eq!(
            fault(&w, &with(&|_, v| if v.abs() < 1.0 / 3.0 { 0.0 } else { v.signum() * 2.0 / 3.0 })),
            None
        );
        assert_eq!(fault(&w, &with(&|i, v| v + 0.5 * noise[i])), None);
        assert_eq!(fault(&[0.0; 96], &[0.0; 96]), None);
        for scale in [0.9, 1.1] {
            assert!(fault(&w, &with(&|_, v| scale * v)).unwrap().starts_with("the scale"));
        }
        let mut swapped = w.clone();
        swapped[..96].rotate_left(48);
        assert!(fault(&w, &swapped).unwrap().starts_with("2 of 64 rows"));
        assert!(fault(&w, &noise).unwrap().contains("of 64 rows"));
        assert!(
            fault(&w, &with(&|i, v| if i == 100 { f32::NAN } else { v }))
                .unwrap()
                .starts_with("1 of 64 rows")
        );
        assert!(fault(&w, &[0.0; 64 * 48]).unwrap().starts_with("64 of 64 rows"));
    }

    #[test]
    fn a_scale_is_not_judged_where_nothing_was_learned() {
        let w = matrix(5);
        let q: Vec<f32> = w.iter().map(|v| 0.8 * v).collect();
        let read = |row: usize, out: &mut [f32]| {
            out.copy_from_slice(&w[row * 48..][..48]);
            Ok(())
        };
        let found = Likeness::of(&q, 48, 0.2, &read).unwrap();
        assert!(found.fault(64, true).is_some() && found.fault(64, false).is_none());
    }

    #[test]
    fn rows_that_are_alike_are_told_apart_where_bits_suffice() {
        let (w, other) = (matrix(3), matrix(4));
        // Rows with a cosine of 0.6, as those of an embedding.
        let w: Vec<f32> =
            w.iter().zip(&other[..48].repeat(64)).map(|(w, common)| w + 1.25 * common).collect();
        let mut swapped = w.clone();
        swapped[..96].rotate_left(48);
        let faults = |bits: u8, is_for_text: bool| {
            let read = |row: usize, out: &mut [f32]| {
                out.copy_from_slice(&w[row * 48..][..48]);
                Ok(())
            };
            let found = Likeness::of(&swapped, 48, other_row(bits, is_for_text), &read).unwrap();
            assert!((0.4..0.65).contains(&found.min_cosine), "{}", found.min_cosine);
            found.others
        };
        assert_eq!([faults(16, false), faults(6, true), faults(4, false)], [2; 3]);
        assert_eq!([faults(4, true), faults(3, false)], [0; 2]);
    }
}
