//! Palettization: indices into a table of fp16 values per group of rows.

use super::kmeans::{Histogram, kmeans, kmeans_exact};
use super::metrics::Metrics;
use half::f16;

/// How a table's values are chosen.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum TableMode {
    /// k-means, within 1e-4 of the optimum.
    KMeans,
    /// k-means, the global optimum.
    KMeansExact,
    /// Evenly from the smallest to the largest weight.
    Uniform,
}

/// Palettizes one group after the other, reusing its memory.
pub struct Palettizer {
    bits: u32,
    mode: TableMode,
    histogram: Histogram,
    /// Index by ordered code; valid for the codes of the current group.
    index: Vec<u8>,
}

impl Palettizer {
    /// A palettizer for tables of `2^bits` values, 1 to 8 bits.
    ///
    /// # Panics
    /// The bits are out of range.
    pub fn new(bits: u8, mode: TableMode) -> Self {
        assert!((1..=8).contains(&bits));
        Palettizer { bits: u32::from(bits), mode, histogram: Histogram::default(), index: vec![0; 1 << 16] }
    }

    /// Palettizes a group of finite weights: their table of `2^bits` values, ascending (a group with fewer distinct values
    /// repeats the last), and an index per weight in `indices`. Adds the errors to `metrics`.
    ///
    /// # Panics
    /// `indices` has another length than `weights`.
    pub fn group(&mut self, weights: &[f16], indices: &mut [u8], metrics: &mut Metrics) -> Vec<f16> {
        assert_eq!(weights.len(), indices.len());
        let entries = 1usize << self.bits;
        let h = &mut self.histogram;
        h.fill(weights);
        let centroids = match self.mode {
            TableMode::KMeans => kmeans(h, entries),
            TableMode::KMeansExact => kmeans_exact(h, entries),
            TableMode::Uniform => uniform(h, entries),
        };
        let mut table: Vec<f16> = centroids.into_iter().map(f16::from_f64).collect();
        let last = table.last().copied().unwrap_or(f16::ZERO);
        table.resize(entries, last);
        // Assigned against the rounded table: the nearest entry, the lower of equally near ones.
        let values: Vec<f64> = table.iter().map(|t| t.to_f64()).collect();
        let mut entry = 0;
        for ((&v, &count), &code) in h.values.iter().zip(&h.counts).zip(h.codes()) {
            while entry + 1 < entries && (values[entry + 1] - v).abs() < (values[entry] - v).abs() {
                entry += 1;
            }
            self.index[usize::from(code)] = entry as u8;
            metrics.add(v, values[entry], count);
        }
        for (i, w) in indices.iter_mut().zip(weights) {
            *i = self.index[usize::from(super::kmeans::ordered(*w))];
        }
        table
    }
}

fn uniform(h: &Histogram, entries: usize) -> Vec<f64> {
    let (Some(&low), Some(&high)) = (h.values.first(), h.values.last()) else { return Vec::new() };
    let step = (high - low) / (entries - 1) as f64;
    (0..entries).map(|i| low + step * i as f64).collect()
}

#[cfg(test)]
mod tests {
    use super::*;
    use proptest::prelude::*;

    proptest! {
        /// Every weight gets the nearest entry of an ascending table, whatever the weights are.
        #[test]
        fn indices_are_nearest(v in prop::collection::vec(-70000.0f32..70000.0, 1..300), scale in -8i32..2, bits in 1u8..9, mode in prop::sample::select(vec![TableMode::KMeans, TableMode::KMeansExact, TableMode::Uniform])) {
            let weights: Vec<f16> = v.iter().map(|x| f16::from_f32((x * 10f32.powi(scale)).clamp(-65504.0, 65504.0))).collect();
            let mut indices = vec![0u8; weights.len()];
            let mut metrics = Metrics::default();
            let table = Palettizer::new(bits, mode).group(&weights, &mut indices, &mut metrics);
            prop_assert_eq!(table.len(), 1 << bits);
            prop_assert!(table.windows(2).all(|w| w[0] <= w[1]) && table.iter().all(|t| t.is_finite()));
            let mut squared = 0.0;
            for (w, i) in weights.iter().zip(&indices) {
                let distance = |t: &f16| (t.to_f64() - w.to_f64()).abs();
                let nearest = table.iter().map(distance).fold(f64::INFINITY, f64::min);
                prop_assert_eq!(distance(&table[usize::from(*i)]), nearest);
                squared += nearest * nearest;
            }
            prop_assert!((metrics.mse() * weights.len() as f64 - squared).abs() <= 1e-9 * squared);
            prop_assert_eq!(metrics.count, weights.len() as u64);
        }
    }

    #[test]
    fn the_uniform_grid_ends_at_the_extremes() {
        let weights: Vec<f16> = [-1.0f32, 0.1, 0.2, 2.0].iter().map(|&v| f16::from_f32(v)).collect();
        let mut indices = [0; 4];
        let table =
            Palettizer::new(2, TableMode::Uniform).group(&weights, &mut indices, &mut Metrics::default());
        assert_eq!(table.iter().map(|t| t.to_f32()).collect::<Vec<_>>(), [-1.0, 0.0, 1.0, 2.0]);
        assert_eq!(indices, [0, 1, 1, 3]);
        let constant = [f16::from_f32(0.25); 9];
        let table =
            Palettizer::new(4, TableMode::Uniform).group(&constant, &mut [0; 9], &mut Metrics::default());
        assert!(table.iter().all(|t| t.to_f32() == 0.25));
    }
}
