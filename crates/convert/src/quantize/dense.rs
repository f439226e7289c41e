//! Products and a Cholesky factor of large dense matrices in f32, row-major, over the kernels' matmul. Results do not
//! depend on the number of threads.

use anemoe_kernels::{Columns, Isa, MatMul, Matrix, PackedActivations, Pool, matmul_batch};
use std::cell::RefCell;

/// Columns that are factored or solved one by one between two products: their triangle of 64 KB stays in L2.
pub const BLOCK: usize = 128;
/// Rows of a symmetric product that are computed together, against all columns up to the diagonal.
const STRIP: usize = 512;

thread_local! {
    static PACKED: RefCell<PackedActivations> = RefCell::default();
}

/// Computes `x w'` into `out`: `out[t][r] = sum over c of x[t][c] w[r][c]`, for `x [T, cols]` and `w [rows, cols]`.
///
/// # Panics
/// A length is wrong.
pub fn multiply(x: &[f32], w: &[f32], cols: usize, out: &mut [f32]) {
    multiply_columns(x, cols, 0, w, cols, out);
}

/// Computes like [`multiply`] with columns `first..first + cols` of `x [T, stride]`.
fn multiply_columns(x: &[f32], stride: usize, first: usize, w: &[f32], cols: usize, out: &mut [f32]) {
    let (tokens, rows) = (x.len() / stride, w.len() / cols);
    let w = Matrix::f32(w, rows, cols).expect("whole rows");
    let mut packed = PACKED.take();
    let at = Columns { values: x, first, token_stride: stride, channel_stride: 1 };
    packed.pack(Pool::global(), w.layout(), at, tokens, cols);
    let job = MatMul { w, x: &packed, tokens: None, y: out, stride: rows, bias: None };
    matmul_batch(Isa::best(), Pool::global(), &mut [Some(job)]);
    PACKED.set(packed);
}

/// Computes `x w'` like [`multiply`], into a new matrix `[T, rows]`.
pub fn product(x: &[f32], w: &[f32], cols: usize) -> Vec<f32> {
    let mut out = vec![0f32; x.len() / cols * (w.len() / cols)];
    if !out.is_empty() {
        multiply(x, w, cols, &mut out);
    }
    out
}

/// Returns columns `from..to` of a matrix of `cols` columns.
fn columns(m: &[f32], cols: usize, from: usize, to: usize) -> Vec<f32> {
    m.chunks_exact(cols).flat_map(|row| &row[from..to]).copied().collect()
}

/// Transposes a matrix of `cols` columns.
pub fn transposed(m: &[f32], cols: usize) -> Vec<f32> {
    let rows = m.len() / cols;
    let mut out = vec![0f32; m.len()];
    for (r, row) in m.chunks_exact(cols).enumerate() {
        row.iter().enumerate().for_each(|(c, v)| out[c * rows + r] = *v);
    }
    out
}

/// Adds `sign * x x'` to the symmetric `sum [n, n]`, for `x [n, cols]`. Only the lower triangle counts.
pub fn add_gram(sum: &mut [f32], x: &[f32], cols: usize, sign: f32) {
    let n = x.len() / cols;
    for first in (0..n).step_by(STRIP) {
        let last = (first + STRIP).min(n);
        let part = product(&x[first * cols..last * cols], &x[..last * cols], cols);
        for (sum, part) in sum[first * n..].chunks_exact_mut(n).zip(part.chunks_exact(last)) {
            sum.iter_mut().zip(part).for_each(|(s, p)| *s += sign * p);
        }
    }
}

/// Copies the lower triangle of `[n, n]` to the upper one.
pub fn mirror(m: &mut [f32], n: usize) {
    for i in 0..n {
        for j in 0..i {
            m[j * n + i] = m[i * n + j];
        }
    }
}

/// Computes the lower Cholesky factor of a symmetric matrix `[n, n]`, in place; elements above the diagonal become 0.
/// A pivot is at least `least`.
fn cholesky(a: &mut [f32], n: usize, least: f32) {
    for b0 in (0..n).step_by(BLOCK) {
        let b1 = (b0 + BLOCK).min(n);
        let width = b1 - b0;
        for i in b0..b1 {
            for j in b0..=i {
                let dot: f64 = (b0..j).map(|k| f64::from(a[i * n + k]) * f64::from(a[j * n + k])).sum();
                let rest = f64::from(a[i * n + j]) - dot;
                a[i * n + j] = match i == j {
                    true => rest.max(f64::from(least)).sqrt() as f32,
                    false => (rest / f64::from(a[j * n + j])) as f32,
                };
            }
            a[i * n + i + 1..(i + 1) * n].fill(0.0);
        }
        let (above, below) = a.split_at_mut(b1 * n);
        let block = columns(&above[b0 * n..], n, b0, b1);
        // X L' = A below the block.
        let (mut panel, upper) = (columns(below, n, b0, b1), transposed(&block, width));
        Pool::global().for_chunks(&mut panel, width * 16, &|_, rows| {
            rows.chunks_exact_mut(width).for_each(|row| solve_row(row, &upper));
        });
        for (row, own) in below.chunks_exact_mut(n).zip(panel.chunks_exact(width)) {
            row[b0..b1].copy_from_slice(own);
        }
        let rest = n - b1;
        for first in (0..rest).step_by(STRIP) {
            let last = (first + STRIP).min(rest);
            let part = product(&panel[first * width..last * width], &panel[..last * width], width);
            for (row, part) in below[first * n..].chunks_exact_mut(n).zip(part.chunks_exact(last)) {
                row[b1..].iter_mut().zip(part).for_each(|(v, p)| *v -= p);
            }
        }
    }
}

/// Solves `y l' = x` for a row in place, where `upper` is `l'`, `[width, width]`: differences are made along its rows, as vectors.
fn solve_row(x: &mut [f32], upper: &[f32]) {
    let width = x.len();
    for k in 0..width {
        let (known, rest) = x.split_at_mut(k + 1);
        known[k] /= upper[k * width + k];
        rest.iter_mut().zip(&upper[k * width + k + 1..]).for_each(|(y, l)| *y -= known[k] * l);
    }
}

/// Solves `y l = x` for a row in place, where `l [width, width]` is lower.
fn solve_row_back(x: &mut [f32], l: &[f32]) {
    let width = x.len();
    for k in (0..width).rev() {
        x[k] /= l[k * width + k];
        let (before, own) = x.split_at_mut(k);
        before.iter_mut().zip(&l[k * width..]).for_each(|(y, l)| *y -= own[0] * l);
    }
}

/// Cholesky factor L of a symmetric matrix, as blocks of rows.
pub struct Factor {
    n: usize,
    /// Blocks of [`BLOCK`] rows.
    pub blocks: Vec<FactorBlock>,
}

/// Rows of a factor.
pub struct FactorBlock {
    /// The first row.
    pub first: usize,
    /// Columns of the rows themselves, `[rows, rows]`: lower.
    pub own: Vec<f32>,
    /// The same, transposed.
    upper: Vec<f32>,
    /// Columns before them, `[rows, first]`.
    before: Vec<f32>,
    /// The same, transposed.
    before_columns: Vec<f32>,
}

impl FactorBlock {
    /// Returns the number of rows.
    pub fn rows(&self) -> usize {
        self.own.len().isqrt()
    }

    /// Returns `x L` for the columns before the block, `[T, first]`, with columns `at..at + rows` of `x [T, stride]`.
    pub fn times_before(&self, x: &[f32], stride: usize, at: usize) -> Vec<f32> {
        let mut sums = vec![0f32; x.len() / stride * self.first];
        if self.first > 0 {
            multiply_columns(x, stride, at, &self.before_columns, self.rows(), &mut sums);
        }
        sums
    }
}

impl Factor {
    /// Factors a symmetric matrix `[n, n]`. A pivot is at least `least`.
    pub fn new(mut a: Vec<f32>, n: usize, least: f32) -> Factor {
        cholesky(&mut a, n, least);
        let block = |first: usize| {
            let last = (first + BLOCK).min(n);
            let (own, before) = (&a[first * n..last * n], 0..first);
            let (own, before) = (columns(own, n, first, last), columns(own, n, before.start, before.end));
            let (upper, before_columns) = (transposed(&own, last - first), transposed(&before, first.max(1)));
            FactorBlock { first, own, upper, before, before_columns }
        };
        Factor { n, blocks: (0..n).step_by(BLOCK).map(block).collect() }
    }

    /// Solves `z L L' = x` for each row of `x [T, n]` in place.
    pub fn solve(&self, x: &mut [f32]) {
        let n = self.n;
        for b in &self.blocks {
            let own = b.first..b.first + b.rows();
            let mut sums = vec![0f32; x.len() / n * b.rows()];
            if b.first > 0 {
                multiply_columns(x, n, 0, &b.before, b.first, &mut sums);
            }
            for (x, sums) in x.chunks_exact_mut(n).zip(sums.chunks_exact(b.rows())) {
                x[own.clone()].iter_mut().zip(sums).for_each(|(v, s)| *v -= s);
                solve_row(&mut x[own.clone()], &b.upper);
            }
        }
        for b in self.blocks.iter().rev() {
            let own = b.first..b.first + b.rows();
            x.chunks_exact_mut(n).for_each(|x| solve_row_back(&mut x[own.clone()], &b.own));
            let sums = b.times_before(x, n, b.first);
            for (x, sums) in x.chunks_exact_mut(n).zip(sums.chunks_exact(b.first.max(1))) {
                x.iter_mut().zip(sums).for_each(|(v, s)| *v -= s);
            }
        }
    }
}

#[cfg(test)]
mod tests {
    use super::super::testing::weights;
    use super::*;

    #[test]
    fn a_factor_gives_its_matrix_and_solves() {
        for (n, tokens) in [(5, 3), (130, 40), (300, 700)] {
            let x = weights(n as u64, n * tokens, 0);
            let mut h = vec![0f32; n * n];
            add_gram(&mut h, &x, tokens, 1.0);
            mirror(&mut h, n);
            let scale = (0..n).map(|i| h[i * n + i]).sum::<f32>() / n as f32;
            (0..n).for_each(|i| h[i * n + i] += 0.01 * scale);
            let dot: f32 = (0..tokens).map(|t| x[t] * x[tokens + t]).sum();
            assert!((h[1] - dot).abs() <= 1e-4 * scale && h[1] == h[n]);
            let mut l = h.clone();
            cholesky(&mut l, n, 1e-6 * scale);
            let factor = Factor::new(h.clone(), n, 1e-6 * scale);
            let again = product(&l, &l, n);
            assert!(h.iter().zip(&again).all(|(a, b)| (a - b).abs() <= 1e-5 * scale * n as f32), "{n}");
            let w = weights(7, 9 * n, 1);
            let mut b = product(&w, &h, n);
            factor.solve(&mut b);
            let largest = w.iter().fold(0f32, |a, v| a.max(v.abs()));
            assert!(b.iter().zip(&w).all(|(a, b)| (a - b).abs() <= 0.02 * largest), "{n}");
        }
    }
}
