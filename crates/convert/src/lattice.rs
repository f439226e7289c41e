//! Lattices that weights lie on, since they were trained or stored for a format of four bits.
//!
//! ```text
//! MXFP4   2^k * one of 0, .5, 1, 1.5, 2, 3, 4, 6 and their negatives       gpt-oss
//! Q4_0    d * q, q in -8 .. 7, d = the value of largest magnitude over -8  checkpoints of quantization-aware training
//! ```
//!
//! Each 32 inputs of a row have their own k or d. A kind with the same blocks keeps such weights; any other kind
//! quantizes them a second time.

use crate::models::Family;
use crate::plan::MatrixPlan;
use crate::quant::{Granularity, Quant};
use crate::quantize::{mxfp4, q4_0};
use anemoe_bundle::IntBits;
use anemoe_kernels::round_to_f16;
use std::collections::BTreeSet;

/// Inputs of a block.
const BLOCK: usize = 32;
/// Weights of a matrix that are sampled: neighbours, so that a checkpoint of the hub is asked once.
const SAMPLE: usize = 32 * BLOCK;
/// Matrices of a tensor that are sampled.
const MATRICES: usize = 4;
/// Least number of magnitudes in a sample: fewer lie on a lattice by chance.
const MAGNITUDES: usize = 4;

/// A lattice of weights.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord)]
pub enum Lattice {
    /// 4-bit floats times powers of two.
    Mxfp4,
    /// 4-bit integers times a scale.
    Q4_0,
}

impl Lattice {
    /// Returns the name of the format that the lattice belongs to.
    pub const fn name(self) -> &'static str {
        match self {
            Lattice::Mxfp4 => "MXFP4",
            Lattice::Q4_0 => "Q4_0",
        }
    }

    /// Returns the kind that keeps weights of the lattice.
    pub const fn kind(self) -> Quant {
        match self {
            Lattice::Mxfp4 => Quant::Mxfp4,
            Lattice::Q4_0 => Quant::int(IntBits::Four, Granularity::Block),
        }
    }

    /// Tells whether a block of fp16 values lies on the lattice.
    fn holds(self, block: &[f32]) -> bool {
        match self {
            Lattice::Mxfp4 => mxfp4::is_exact(block),
            Lattice::Q4_0 => q4_0::is_exact(block),
        }
    }

    /// Finds the lattice of values, in whole blocks; none where there is none, or too few magnitudes to tell.
    pub fn of(values: &[f32]) -> Option<Lattice> {
        let magnitudes: BTreeSet<u32> = values.iter().map(|v| v.abs().to_bits()).collect();
        let holds = |lattice: &Lattice| values.chunks(BLOCK).all(|block| lattice.holds(block));
        [Lattice::Mxfp4, Lattice::Q4_0].into_iter().find(holds).filter(|_| magnitudes.len() >= MAGNITUDES)
    }

    /// Samples a matrix in its middle. Finds none where rows do not divide into blocks, or cannot be read.
    pub fn of_matrix(family: &Family, m: &MatrixPlan) -> Option<Lattice> {
        if m.taps != 1 || !m.cols.is_multiple_of(BLOCK) {
            return None;
        }
        let start = m.offset + (m.rows / 2 * m.cols) as u64;
        let mut values = vec![0f32; SAMPLE.min(m.rows.div_ceil(2) * m.cols)];
        family.checked.read(&m.tensor, start..start + values.len() as u64, &mut values).ok()?;
        round_to_f16(&mut values);
        Lattice::of(&values)
    }

    /// Samples a few matrices of a tensor, which have to agree.
    pub fn of_tensor(family: &Family, matrices: &[MatrixPlan]) -> Option<Lattice> {
        let step = matrices.len().div_ceil(MATRICES).max(1);
        let mut found = matrices.iter().step_by(step).map(|m| Lattice::of_matrix(family, m));
        let first = found.next()??;
        found.all(|l| l == Some(first)).then_some(first)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn values(entry: impl Fn(usize) -> f32, scale: impl Fn(usize) -> f32) -> Vec<f32> {
        (0..8 * BLOCK).map(|i| entry(i * 7 % 16) * scale(i / BLOCK)).collect()
    }

    #[test]
    fn lattices_are_told_apart() {
        let mxfp4 = values(|c| anemoe_kernels::MXFP4_TABLE[c], |b| 2f32.powi(b as i32 % 5 - 9));
        assert_eq!(Lattice::of(&mxfp4), Some(Lattice::Mxfp4));
        let q4_0 = values(|c| c as f32 - 8.0, |b| if b % 2 == 0 { 0.0078125 } else { -0.01171875 });
        assert_eq!(Lattice::of(&q4_0), Some(Lattice::Q4_0));
        let mut neither = mxfp4.clone();
        neither[77] = 0.013;
        assert_eq!(Lattice::of(&neither), None);
        assert_eq!(Lattice::of(&[0.0; 64]), None);
        assert_eq!(Lattice::of(&[1.0; 64]), None, "too few magnitudes to tell");
        assert_eq!(Lattice::of(&[]), None);
    }
}
