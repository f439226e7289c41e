//! Probes of a reference run: they measure the inputs of every projection, or replace weights.

use std::collections::BTreeMap;
use std::sync::{Arc, Mutex};

use anemoe_convert::Result;

/// Inputs of a matrix in two models: the uncompressed one, and one whose earlier weights are compressed.
pub struct InputPairs<'a> {
    /// Name of the tensor without the checkpoint's prefix.
    pub tensor: &'a str,
    /// Index of the matrix in a stacked tensor, else 0.
    pub index: usize,
    /// Rows and columns of the matrix.
    pub shape: (usize, usize),
    /// Inputs in the uncompressed model.
    pub float: Vec<&'a [f32]>,
    /// Inputs of the same tokens in the compressed model.
    pub compressed: Vec<&'a [f32]>,
    /// Factors of both inputs, where they count differently.
    pub scales: Option<&'a [f32]>,
}

/// Compresses weights while a model runs, each when its inputs are known.
pub trait Compressor: Sync + Send {
    /// Takes the inputs of all matrices of a stack, before the first of them is compressed.
    ///
    /// # Errors
    /// The user interrupts.
    fn share(&self, parts: &[InputPairs<'_>]) -> Result<()>;

    /// Compresses a matrix `weights` for its inputs, and returns the values of its compressed form; none where it stays.
    ///
    /// # Errors
    /// The checkpoint cannot be read, fp16 cannot hold a value, or the result cannot be written.
    fn compress(&self, inputs: &InputPairs<'_>, weights: &[f32]) -> Result<Option<Vec<f32>>>;
}

/// Probe that watches a reference run, or replaces its weights.
#[derive(Default)]
pub struct Probe {
    /// Values that replace whole tensors, by name without the checkpoint's prefix ([`super::HEAD`] for the head).
    pub replaced: BTreeMap<String, Arc<Vec<f32>>>,
    /// Values that replace the matrix of one expert in a stacked tensor, by the tensor's name.
    pub replaced_experts: BTreeMap<(String, usize), Arc<Vec<f32>>>,
    /// Compressor of the weights; then the second half of all tokens is the compressed model's.
    pub compressor: Option<Box<dyn Compressor>>,
    moments: Option<Mutex<BTreeMap<String, InputMoments>>>,
}

/// Sums of the squared inputs of a projection, or of each projection of a stacked tensor.
#[derive(Clone, Debug, PartialEq)]
pub struct InputMoments {
    /// Number of matrices of a stacked tensor; 0 for a single matrix.
    pub parts: usize,
    /// Number of input channels.
    pub cols: usize,
    /// Number of inputs seen, by part.
    pub count: Vec<u64>,
    /// Sums of squares, `[parts, cols]`.
    pub sums: Vec<f64>,
}

impl Probe {
    /// Makes a probe that sums the squares of every projection's inputs.
    pub fn watching() -> Probe {
        Probe { moments: Some(Mutex::default()), ..Probe::default() }
    }

    /// Makes a probe that compresses weights on the way.
    pub fn compressing(compressor: Box<dyn Compressor>) -> Probe {
        Probe { compressor: Some(compressor), ..Probe::default() }
    }

    /// Returns the sums of squares that were measured, by tensor.
    pub fn into_moments(self) -> BTreeMap<String, InputMoments> {
        self.moments.map(|m| m.into_inner().unwrap_or_else(|p| p.into_inner())).unwrap_or_default()
    }

    /// Adds inputs `x`, each multiplied by its scale, to part `index` of a tensor.
    pub(super) fn observe(
        &self,
        tensor: &str,
        parts: usize,
        index: usize,
        x: &[&[f32]],
        scales: Option<&[f32]>,
    ) {
        let (Some(moments), Some(first)) = (&self.moments, x.first()) else { return };
        let mut moments = moments.lock().unwrap_or_else(|p| p.into_inner());
        let (cols, n) = (first.len(), parts.max(1));
        let all = moments.entry(tensor.to_string()).or_insert_with(|| InputMoments {
            parts,
            cols,
            count: vec![0; n],
            sums: vec![0.0; n * cols],
        });
        all.count[index] += x.len() as u64;
        let sums = &mut all.sums[index * cols..(index + 1) * cols];
        for (t, x) in x.iter().enumerate() {
            let scale = scales.map_or(1.0, |s| f64::from(s[t]) * f64::from(s[t]));
            for (sum, v) in sums.iter_mut().zip(*x) {
                *sum += scale * f64::from(*v) * f64::from(*v);
            }
        }
    }
}
