//! How far a compressed matrix is from the original.

/// Sums over weights and their compressed values, in f64; pieces of a matrix add up.
#[derive(Clone, Copy, Debug, Default, PartialEq)]
pub struct Metrics {
    /// Number of weights.
    pub count: u64,
    squared_error: f64,
    dot: f64,
    original: f64,
    compressed: f64,
    /// Largest absolute error.
    pub max_error: f64,
}

impl Metrics {
    /// Adds `count` weights `w` that became `v`.
    pub fn add(&mut self, w: f64, v: f64, count: u32) {
        let n = f64::from(count);
        self.count += u64::from(count);
        self.squared_error += n * (w - v) * (w - v);
        self.dot += n * w * v;
        self.original += n * w * w;
        self.compressed += n * v * v;
        self.max_error = self.max_error.max((w - v).abs());
    }

    /// Adds the sums of another piece.
    pub fn merge(&mut self, other: &Metrics) {
        self.count += other.count;
        self.squared_error += other.squared_error;
        self.dot += other.dot;
        self.original += other.original;
        self.compressed += other.compressed;
        self.max_error = self.max_error.max(other.max_error);
    }

    /// Mean squared error.
    pub fn mse(&self) -> f64 {
        if self.count == 0 { 0.0 } else { self.squared_error / self.count as f64 }
    }

    /// Squared error over the squared weights.
    pub fn relative_mse(&self) -> f64 {
        if self.original == 0.0 { 0.0 } else { self.squared_error / self.original }
    }

    /// Cosine of weights and compressed weights; 1 where both are zero.
    pub fn cosine(&self) -> f64 {
        let norm = (self.original * self.compressed).sqrt();
        if norm > 0.0 {
            self.dot / norm
        } else if self.original == self.compressed {
            1.0
        } else {
            0.0
        }
    }
}
