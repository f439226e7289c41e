//! An orthogonal matrix that spreads every channel over all others, so that none is an outlier.
//!
//! ```text
//! R = S (H x C)     n = 2^k m, m odd
//!                   S  signs, a fixed random choice for each size
//!                   H  Hadamard's matrix of size 2^k over sqrt(2^k)
//!                   C  the cosine transform of size m (DCT-II)
//! ```
//! Randomized Hadamard transforms: QuaRot, arXiv 2404.00456.

use anemoe_io::Random;
use std::f64::consts::PI;

/// Seed of the signs.
const SEED: u64 = 0x0726_1963;

/// An orthogonal matrix R of `n` rows and columns.
pub struct Rotation {
    /// Signs over `sqrt(2^k)`.
    signs: Vec<f32>,
    /// C, `[m, m]`.
    cosines: Vec<f32>,
    m: usize,
}

impl Rotation {
    /// Makes the matrix of a size, 1 or more.
    pub fn new(n: usize) -> Rotation {
        let m = n >> n.trailing_zeros();
        let scale = ((n / m) as f32).sqrt().recip();
        let random = Random::new(SEED);
        let signs =
            (0..n as u64).map(|i| if random.bits_at(i) >> 63 == 0 { scale } else { -scale }).collect();
        let cosine = |b: usize, to: usize| {
            let length = if to == 0 { 1.0 } else { 2.0 } / m as f64;
            (length.sqrt() * (PI * (b as f64 + 0.5) * to as f64 / m as f64).cos()) as f32
        };
        let cosines = (0..m * m).map(|i| cosine(i / m, i % m)).collect();
        Rotation { signs, cosines, m }
    }

    /// Returns the number of rows and columns.
    pub fn size(&self) -> usize {
        self.signs.len()
    }

    /// Replaces every row x of `n` values by `x R`.
    pub fn rotate_rows(&self, rows: &mut [f32]) {
        rows.chunks_exact_mut(self.size()).for_each(|row| self.rotate(row, 1));
    }

    /// Replaces a matrix M of `n` rows by `R' M`, R' being the transpose.
    pub fn rotate_columns(&self, matrix: &mut [f32]) {
        self.rotate(matrix, matrix.len() / self.size());
    }

    /// Replaces each of `width` vectors x, whose values are `width` apart, by `x R`.
    fn rotate(&self, all: &mut [f32], width: usize) {
        if width == 0 {
            return;
        }
        for (part, sign) in all.chunks_exact_mut(width).zip(&self.signs) {
            part.iter_mut().for_each(|v| *v *= sign);
        }
        let mut half = self.m * width;
        while half < all.len() {
            for pair in all.chunks_exact_mut(2 * half) {
                let (a, b) = pair.split_at_mut(half);
                for (a, b) in a.iter_mut().zip(b) {
                    (*a, *b) = (*a + *b, *a - *b);
                }
            }
            half *= 2;
        }
        if self.m == 1 {
            return;
        }
        let mut sums = vec![0f32; self.m * width];
        for part in all.chunks_exact_mut(self.m * width) {
            sums.fill(0.0);
            for (x, cosines) in part.chunks_exact(width).zip(self.cosines.chunks_exact(self.m)) {
                for (sum, c) in sums.chunks_exact_mut(width).zip(cosines) {
                    sum.iter_mut().zip(x).for_each(|(sum, x)| *sum += c * x);
                }
            }
            part.copy_from_slice(&sums);
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    /// Returns R.
    fn matrix(n: usize) -> Vec<f32> {
        let mut rows: Vec<f32> = (0..n * n).map(|i| f32::from(u8::from(i / n == i % n))).collect();
        Rotation::new(n).rotate_rows(&mut rows);
        rows
    }

    #[test]
    fn a_rotation_is_orthogonal_and_spreads_each_channel() {
        for n in [1, 2, 3, 8, 12, 45, 64, 576] {
            let r = matrix(n);
            for i in 0..n {
                for j in 0..n {
                    let dot: f32 = (0..n).map(|k| r[i * n + k] * r[j * n + k]).sum();
                    let expected = if i == j { 1.0 } else { 0.0 };
                    assert!((dot - expected).abs() < 1e-5, "size {n}: rows {i} and {j} have {dot}");
                }
            }
            let largest = r.iter().fold(0f32, |m, v| m.max(v.abs()));
            assert!(largest <= (2.0 / n as f32).sqrt() + 1e-5, "size {n}: {largest}");
        }
    }

    #[test]
    fn columns_are_multiplied_by_the_transpose() {
        let (n, width) = (12, 3);
        let r = matrix(n);
        let m: Vec<f32> = (0..n * width).map(|i| (i * 7 % 11) as f32 - 5.0).collect();
        let mut turned = m.clone();
        Rotation::new(n).rotate_columns(&mut turned);
        for (i, v) in turned.iter().enumerate() {
            let expected: f32 = (0..n).map(|k| r[k * n + i / width] * m[k * width + i % width]).sum();
            assert!((v - expected).abs() < 1e-5, "element {i}: {v}, expected {expected}");
        }
    }
}
