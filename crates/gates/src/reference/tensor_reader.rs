//! Reads the weights of a reference run from the checkpoint as they are needed; a probe watches and replaces them.

use super::input_probe::{Compressor, InputPairs, Probe};
use super::math::dot;
use anemoe_convert::checkpoint::TensorSource;
use anemoe_convert::models::{TensorRow, full_name};
use anemoe_convert::quantize::product;
use anemoe_convert::{Error, Result};
use rayon::prelude::*;
use std::collections::BTreeMap;
use std::sync::Arc;

/// Number of weights that one task reads and converts at a time: 1 MiB in f32.
const PIECE: usize = 1 << 18;
/// Tokens from which on a product is made in tiles.
const MANY: usize = 256;

/// One vector per token of a pass.
pub type Rows = Vec<Vec<f32>>;

/// Name of the head's tensor in a probe, whatever tensor holds the head in the checkpoint.
pub const HEAD: &str = "lm_head.weight";

/// Reader of the checkpoint's tensors, by names without the checkpoint's prefix.
pub struct TensorReader<'a> {
    /// Tensors of the checkpoint.
    pub source: &'a dyn TensorSource,
    /// Prefix of the checkpoint's names.
    pub prefix: &'a str,
    /// Probe that watches products and replaces tensors.
    pub probe: Option<&'a Probe>,
}

impl<'a> TensorReader<'a> {
    /// Returns the full name of a tensor of the description.
    ///
    /// # Errors
    /// The tensor is missing, or has another shape.
    fn check(&self, row: &TensorRow) -> Result<String> {
        let (name, shape) = (full_name(self.prefix, &row.name), &row.shape);
        match self.source.info(&name) {
            None => {
                let what = format!("checkpoint: tensor `{name}` {shape:?} is missing");
                Err(Error::invalid(self.source.path(), what))
            }
            Some(info) if info.shape == *shape => Ok(name),
            Some(info) => {
                let what = format!("tensor `{name}`: shape {:?}, expected {shape:?}", info.shape);
                Err(Error::invalid(&info.file, what))
            }
        }
    }

    /// Reads a small tensor as stored, or returns the probe's replacement.
    ///
    /// # Errors
    /// The tensor is missing, has another shape, or its file cannot be read.
    pub fn tensor(&self, row: &TensorRow) -> Result<Vec<f32>> {
        let full_name = self.check(row)?;
        if let Some(values) = self.probe.and_then(|p| p.replaced.get(&row.name)) {
            return Ok(values.to_vec());
        }
        let mut out = vec![0f32; row.elements() as usize];
        self.source.read(&full_name, 0..out.len() as u64, &mut out)?;
        Ok(out)
    }

    /// Opens matrix `index` of a tensor `[matrices, rows, cols]`, or one that is a whole tensor `[rows, cols]`. A probe replaces
    /// it under the name `replaced`: the tensor's, or [`HEAD`] for the output head, whose tensor may be the embedding's.
    ///
    /// # Errors
    /// The tensor is missing, or has another shape.
    pub fn matrix(&self, row: &TensorRow, replaced: &str, index: usize) -> Result<StreamedMatrix<'a>> {
        let shape: Vec<usize> = row.shape.iter().map(|&n| n as usize).collect();
        let (rows, cols) = (shape[shape.len() - 2], shape[shape.len() - 1]);
        let whole =
            self.probe.and_then(|p| p.replaced.get(replaced)).map(|v| (v.clone(), index * rows * cols));
        let own = self.probe.and_then(|p| p.replaced_experts.get(&(replaced.to_string(), index)));
        Ok(StreamedMatrix {
            source: self.source,
            full_name: self.check(row)?,
            values: own.map(|v| (v.clone(), 0)).or(whole),
            probe: self.probe,
            name: row.name.clone(),
            parts: if shape.len() > 2 { shape[0] } else { 0 },
            index,
            rows,
            cols,
        })
    }
}

/// Tokens of an expert.
pub struct TokenSet {
    /// The expert.
    pub expert: usize,
    /// Tokens with their routing weights. Where weights are compressed on the way: those of the uncompressed model,
    /// the uncompressed model's tokens in the places of the compressed model's, and those of the compressed model.
    pub tokens: Vec<(usize, f32)>,
    /// Number of the tokens of the compressed model.
    pub pairs: usize,
}

impl TokenSet {
    /// Returns the indices of the tokens that a router sent to the expert.
    pub fn own(&self) -> impl Iterator<Item = usize> {
        let n = self.tokens.len();
        (0..n - 2 * self.pairs).chain(n - self.pairs..n)
    }
}

impl<'a> TensorReader<'a> {
    fn compressor(&self) -> Option<&'a dyn Compressor> {
        self.probe.and_then(|p| p.compressor.as_deref())
    }

    /// Returns the tokens of each expert. Where weights are compressed on the way, all experts have a set, and the
    /// second half of all `tokens` tokens is the compressed model's.
    pub fn token_sets(
        &self,
        tokens_of: BTreeMap<usize, Vec<(usize, f32)>>,
        experts: usize,
        tokens: usize,
    ) -> Vec<TokenSet> {
        let mut tokens_of = tokens_of;
        if self.compressor().is_none() {
            let sets = tokens_of.into_iter();
            return sets.map(|(expert, tokens)| TokenSet { expert, tokens, pairs: 0 }).collect();
        }
        let set = |expert: usize| {
            let mut own = tokens_of.remove(&expert).unwrap_or_default();
            let at = own.partition_point(|&(t, _)| t < tokens / 2);
            let shadows: Vec<_> = own[at..].iter().map(|&(t, w)| (t - tokens / 2, w)).collect();
            let pairs = shadows.len();
            own.splice(at..at, shadows);
            TokenSet { expert, tokens: own, pairs }
        };
        (0..experts).map(set).collect()
    }

    /// Shows the inputs of all matrices of a stack before the first of them is compressed.
    ///
    /// # Errors
    /// The user interrupts.
    pub fn share<'p>(&self, parts: impl Iterator<Item = InputPairs<'p>>) -> Result<()> {
        match self.compressor() {
            Some(compressor) => compressor.share(&parts.collect::<Vec<_>>()),
            None => Ok(()),
        }
    }
}

/// Matrix `[rows, cols]` that stays in its file, or the probe's replacement.
pub struct StreamedMatrix<'a> {
    source: &'a dyn TensorSource,
    probe: Option<&'a Probe>,
    /// The probe's replacement, and where the matrix begins in it.
    values: Option<(Arc<Vec<f32>>, usize)>,
    full_name: String,
    /// Name of the tensor without the checkpoint's prefix.
    name: String,
    /// Number of matrices of a stacked tensor; 0 for a single matrix.
    parts: usize,
    /// Index of this matrix in the stack.
    index: usize,
    rows: usize,
    cols: usize,
}

impl StreamedMatrix<'_> {
    fn read(&self, first_row: usize, out: &mut [f32]) -> Result<()> {
        match &self.values {
            Some((values, begin)) => {
                let from = begin + first_row * self.cols;
                out.copy_from_slice(&values[from..from + out.len()]);
                Ok(())
            }
            None => {
                let from = (self.index * self.rows + first_row) * self.cols;
                self.source.read(&self.full_name, from as u64..(from + out.len()) as u64, out)
            }
        }
    }

    /// Reads one row of `cols` elements.
    ///
    /// # Errors
    /// The file cannot be read.
    pub fn row(&self, row: usize) -> Result<Vec<f32>> {
        let mut out = vec![0f32; self.cols];
        self.read(row, &mut out)?;
        Ok(out)
    }

    /// Computes `W x` for each `x` of `cols` elements; the probe sees each `x`. Where weights are compressed on the
    /// way, the first half of `x` is the uncompressed model's.
    ///
    /// # Errors
    /// The file cannot be read, or the user interrupts.
    pub fn times(&self, x: &[Vec<f32>]) -> Result<Rows> {
        self.times_set(x.iter().map(Vec::as_slice).collect(), x.len() / 2, None)
    }

    /// Computes `W x` like [`StreamedMatrix::times`]; the probe sees each `x` times its scale. Where weights are
    /// compressed on the way, the last `pairs` inputs are of the compressed model, and as many before them are what
    /// the uncompressed model has instead.
    ///
    /// # Errors
    /// Fails like [`StreamedMatrix::times`].
    pub fn times_set(&self, x: Vec<&[f32]>, pairs: usize, scales: Option<&[f32]>) -> Result<Rows> {
        let Some(probe) = self.probe else { return self.product(&x) };
        probe.observe(&self.name, self.parts, self.index, &x, scales);
        let Some(compressor) = &probe.compressor else { return self.product(&x) };
        let first = x.len() - pairs;
        let mut own = vec![0f32; self.rows * self.cols];
        self.read(0, &mut own)?;
        let compressed = compressor.compress(&self.pairs(x.clone(), pairs, scales), &own)?;
        let times = |x: &[&[f32]], w: &[f32]| product(&x.concat(), w, self.cols);
        let mut out = times(&x[..first], &own);
        out.extend(times(&x[first..], compressed.as_deref().unwrap_or(&own)));
        Ok(out.chunks_exact(self.rows).map(<[f32]>::to_vec).collect())
    }

    /// Describes the inputs of which the last `pairs` are of the compressed model.
    pub fn pairs<'a>(&'a self, x: Vec<&'a [f32]>, pairs: usize, scales: Option<&'a [f32]>) -> InputPairs<'a> {
        let (before, compressed) = x.split_at(x.len() - pairs);
        InputPairs {
            tensor: &self.name,
            index: self.index,
            shape: (self.rows, self.cols),
            float: before[before.len() - pairs..].to_vec(),
            compressed: compressed.to_vec(),
            scales: scales.map(|s| &s[s.len() - pairs..]),
        }
    }

    /// Computes `W x` on all threads; each task reads its rows of the matrix.
    fn product(&self, x: &[&[f32]]) -> Result<Rows> {
        if x.is_empty() {
            return Ok(Rows::new());
        }
        let (all, rows_at_once) = (x.len(), (PIECE / self.cols).max(1));
        if all >= MANY {
            let (inputs, mut out) = (x.concat(), vec![Vec::with_capacity(self.rows); all]);
            for first in (0..self.rows).step_by(rows_at_once) {
                anemoe_convert::build::check_interrupted()?;
                let mut weights = vec![0f32; rows_at_once.min(self.rows - first) * self.cols];
                self.read(first, &mut weights)?;
                let sums = product(&inputs, &weights, self.cols);
                let sums = sums.chunks_exact(weights.len() / self.cols);
                out.iter_mut().zip(sums).for_each(|(out, sums)| out.extend_from_slice(sums));
            }
            return Ok(out);
        }
        // [rows, T]: each task writes a piece of its own.
        let mut by_row = vec![0f32; self.rows * all];
        by_row.par_chunks_mut(rows_at_once * all).enumerate().try_for_each(|(i, out)| {
            anemoe_convert::build::check_interrupted()?;
            let mut weights = vec![0f32; out.len() / all * self.cols];
            self.read(i * rows_at_once, &mut weights)?;
            for (w, out) in weights.chunks_exact(self.cols).zip(out.chunks_exact_mut(all)) {
                for (x, out) in x.iter().zip(out) {
                    *out = dot(w, x);
                }
            }
            Ok::<(), Error>(())
        })?;
        Ok((0..all).map(|t| by_row.iter().skip(t).step_by(all).copied().collect()).collect())
    }
}
