//! One scale for all experts of a package, as in hand-made INT8 banks: the coarsest choice, kept to show its cost.

use crate::Result;
use crate::models::Family;
use crate::plan::{MatrixPlan, PlannedShard};
use half::f16;
use rayon::prelude::*;
use std::collections::BTreeMap;

/// Scales of a shard's banks, by tensor. Each is computed when the first matrix of its tensor is stored.
#[derive(Default)]
pub struct BankScales(BTreeMap<String, f16>);

impl BankScales {
    /// Returns the scale that a matrix shares with the shard's other matrices of its tensor; none where the matrix
    /// has its own.
    ///
    /// # Errors
    /// The checkpoint cannot be read.
    pub fn of(&mut self, family: &Family, shard: &PlannedShard, matrix: &MatrixPlan) -> Result<Option<f16>> {
        if !matrix.bank || !matrix.quant.kind.has_one_scale() {
            return Ok(None);
        }
        if let Some(scale) = self.0.get(&matrix.tensor) {
            return Ok(Some(*scale));
        }
        let mut largest = 0f32;
        for m in shard.matrices.iter().filter(|m| m.bank && m.tensor == matrix.tensor) {
            largest = largest.max(largest_of(family, m)?);
        }
        // The largest weight becomes the last integer (127 of 8 bits), as in hand-made converters. The scale is never zero.
        let last = (1u32 << (matrix.quant.kind.bits() - 1)) - 1;
        let scale = f16::from_f32(largest / last as f32).max(f16::from_bits(1)).min(f16::MAX);
        self.0.insert(matrix.tensor.clone(), scale);
        Ok(Some(scale))
    }
}

/// Weights that one task reads at a time: 4 MiB in f32.
const PIECE: u64 = 1 << 20;

/// Returns the largest magnitude of a matrix's weights.
fn largest_of(family: &Family, m: &MatrixPlan) -> Result<f32> {
    let (start, end) = (m.offset, m.offset + m.weights());
    let piece = |i: u64| {
        let from = start + i * PIECE;
        let to = (from + PIECE).min(end);
        let mut values = vec![0f32; (to - from) as usize];
        family.checked.read(&m.tensor, from..to, &mut values)?;
        Ok(values.iter().fold(0f32, |largest, v| largest.max(v.abs())))
    };
    (0..m.weights().div_ceil(PIECE)).into_par_iter().map(piece).try_reduce(|| 0.0, |a, b| Ok(a.max(b)))
}
