//! Error of a compressed matrix against the original.

use super::histogram::MassMoments;
use anemoe_kernels::ErrorSums;
use serde::{Deserialize, Serialize};

/// Sums over weights and their compressed values, in f64; pieces of a matrix add up.
#[derive(Clone, Copy, Debug, Default, PartialEq, Serialize, Deserialize)]
pub struct Metrics {
    /// Number of weights.
    pub count: u64,
    squared_error: f64,
    dot: f64,
    original: f64,
    compressed: f64,
    /// Sum of squared errors times importances; 0 without importance.
    weighted_error: f64,
    /// Sum of squared weights times importances; 0 without importance.
    weighted_original: f64,
    /// Largest absolute error.
    pub max_error: f64,
}

/// Values that are summed in f32 before their sum goes to f64.
const RUN: usize = 128;

impl Metrics {
    /// Adds weights and their compressed values, with importances where those are known.
    pub fn add(&mut self, weights: &[f32], values: &[f32], importance: Option<&[f32]>) {
        self.count += weights.len() as u64;
        for (i, (w, v)) in weights.chunks(RUN).zip(values.chunks(RUN)).enumerate() {
            let mut sums = [0f32; 4];
            let mut largest = 0f32;
            for (&w, &v) in w.iter().zip(v) {
                let e = w - v;
                for (sum, term) in sums.iter_mut().zip([e * e, w * v, w * w, v * v]) {
                    *sum += term;
                }
                largest = largest.max(e.abs());
            }
            let [error, dot, original, compressed] = sums.map(f64::from);
            self.squared_error += error;
            self.dot += dot;
            self.original += original;
            self.compressed += compressed;
            self.max_error = self.max_error.max(f64::from(largest));
            if let Some(importance) = importance {
                let (mut error, mut original) = (0f32, 0f32);
                for ((&w, &v), &m) in w.iter().zip(v).zip(&importance[i * RUN..]) {
                    error += m * ((w - v) * (w - v));
                    original += m * (w * w);
                }
                self.weighted_error += f64::from(error);
                self.weighted_original += f64::from(original);
            }
        }
    }

    /// Adds the sums that a kernel made over `count` weights.
    pub(super) fn add_sums(&mut self, count: usize, s: &ErrorSums) {
        self.count += count as u64;
        self.squared_error += s.error;
        self.dot += s.dot;
        self.original += s.original;
        self.compressed += s.compressed;
        self.weighted_error += s.weighted_error;
        self.weighted_original += s.weighted_original;
        self.max_error = self.max_error.max(f64::from(s.largest));
    }

    /// Adds weights, given by their moments, that all became `v`; `farthest` is the weight that is farthest from `v`.
    pub(super) fn add_moments(&mut self, m: MassMoments, v: f64, farthest: f64) {
        self.count += m.weight as u64;
        self.squared_error += m.error(v);
        self.dot += v * m.sum;
        self.original += m.square;
        self.compressed += v * v * m.weight;
        self.max_error = self.max_error.max((v - farthest).abs());
    }

    /// Adds the importance of weights that all became `v`.
    pub(super) fn add_importance(&mut self, m: MassMoments, v: f64) {
        self.weighted_error += m.error(v);
        self.weighted_original += m.square;
    }

    /// Adds the sums of another piece.
    pub fn merge(&mut self, other: &Metrics) {
        self.count += other.count;
        self.squared_error += other.squared_error;
        self.dot += other.dot;
        self.original += other.original;
        self.compressed += other.compressed;
        self.weighted_error += other.weighted_error;
        self.weighted_original += other.weighted_original;
        self.max_error = self.max_error.max(other.max_error);
    }

    /// Returns the mean squared error.
    pub fn mse(&self) -> f64 {
        if self.count == 0 { 0.0 } else { self.squared_error / self.count as f64 }
    }

    /// Returns the squared error over the squared weights; 0 where these are 0.
    pub fn relative_mse(&self) -> f64 {
        if self.original > 0.0 { self.squared_error / self.original } else { 0.0 }
    }

    /// Estimates the squared error of the matrix's output over its squared output, from the importances of its inputs
    /// (taken as uncorrelated). Returns [`Metrics::relative_mse`] where no importance is known.
    pub fn output_error(&self) -> f64 {
        if self.weighted_original > 0.0 {
            self.weighted_error / self.weighted_original
        } else {
            self.relative_mse()
        }
    }

    /// Returns the cosine of weights and compressed weights; 1 where both are zero, 0 where only one is.
    pub fn cosine(&self) -> f64 {
        let norm = (self.original * self.compressed).sqrt();
        if norm > 0.0 {
            // Rounding can leave a little more than 1.
            (self.dot / norm).min(1.0)
        } else if self.original == self.compressed {
            1.0
        } else {
            0.0
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn figures_of_a_small_example() {
        let mut m = Metrics::default();
        m.add(&[1.0, 2.0, -3.0], &[1.0, 2.5, -2.0], Some(&[1.0, 4.0, 0.0]));
        assert_eq!((m.count, m.max_error), (3, 1.0));
        assert!((m.mse() - 1.25 / 3.0).abs() < 1e-9);
        assert!((m.relative_mse() - 1.25 / 14.0).abs() < 1e-9);
        assert!((m.output_error() - 1.0 / 17.0).abs() < 1e-9);
        let cosine = 12.0 / (14.0f64 * 11.25).sqrt();
        assert!((m.cosine() - cosine).abs() < 1e-6);
        let mut twice = m;
        twice.merge(&m);
        assert_eq!(twice.count, 6);
        assert!((twice.mse() - m.mse()).abs() < 1e-9);
    }

    #[test]
    fn zeros_are_themselves() {
        let mut m = Metrics::default();
        m.add(&[0.0, 0.0], &[0.0, 0.0], None);
        assert_eq!((m.cosine(), m.mse(), m.relative_mse(), m.output_error()), (1.0, 0.0, 0.0, 0.0));
        m.add(&[0.0], &[1.0], None);
        assert_eq!(m.cosine(), 0.0);
    }
}
