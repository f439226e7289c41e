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
    let (tokens, rows) = (x.len() / cols, w.len() / cols);
    let w = Matrix::f32(w, rows, cols).expect("whole rows");
    let mut packed = PACKED.take();
    let at = Columns { values: x, first: 0, token_stride: cols, channel_stride: 1 };
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
pub fn columns(m: &[f32], cols: usize, from: usize, to: usize) -> Vec<f32> {
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
pub fn cholesky(a: &mut [f32], n: usize, least: f32) {
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
        let mut panel = columns(below, n, b0, b1);
        solve_rows(&mut panel, &block, width);
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

/// Solves `y l' = x` for each row of `x [T, width]` in place, where `l [width, width]` is lower.
fn solve_rows(x: &mut [f32], l: &[f32], width: usize) {
    Pool::global().for_chunks(x, width * 16, &|_, rows| {
        for row in rows.chunks_exact_mut(width) {
            for k in 0..width {
                let dot: f32 = l[k * width..k * width + k].iter().zip(&*row).map(|(l, y)| l * y).sum();
                row[k] = (row[k] - dot) / l[k * width + k];
            }
        }
    });
}

/// Solves `y l = x` for each row of `x [T, width]` in place, where `l [width, width]` is lower.
fn solve_rows_back(x: &mut [f32], l: &[f32], width: usize) {
    Pool::global().for_chunks(x, width * 16, &|_, rows| {
        for row in rows.chunks_exact_mut(width) {
            for k in (0..width).rev() {
                row[k] /= l[k * width + k];
                let (before, own) = row.split_at_mut(k);
                before.iter_mut().zip(&l[k * width..]).for_each(|(y, l)| *y -= own[0] * l);
            }
        }
    });
}

/// Solves `z l l' = x` for each row of `x [T, n]` in place, where `l [n, n]` is a Cholesky factor.
pub fn solve(x: &mut [f32], l: &[f32], n: usize) {
    let blocks: Vec<usize> = (0..n).step_by(BLOCK).collect();
    let mut step = |b0: usize, known: std::ops::Range<usize>, is_back: bool| {
        let b1 = (b0 + BLOCK).min(n);
        let (width, own) = (b1 - b0, &l[b0 * n..b1 * n]);
        let mut part = columns(x, n, b0, b1);
        if !known.is_empty() {
            let done = columns(x, n, known.start, known.end);
            let w = match is_back {
                false => columns(own, n, known.start, known.end),
                true => transposed(&columns(&l[known.start * n..known.end * n], n, b0, b1), width),
            };
            let sums = product(&done, &w, known.len());
            part.iter_mut().zip(&sums).for_each(|(v, s)| *v -= s);
        }
        let diagonal = columns(own, n, b0, b1);
        match is_back {
            false => solve_rows(&mut part, &diagonal, width),
            true => solve_rows_back(&mut part, &diagonal, width),
        }
        for (row, part) in x.chunks_exact_mut(n).zip(part.chunks_exact(width)) {
            row[b0..b1].copy_from_slice(part);
        }
    };
    blocks.iter().for_each(|&b0| step(b0, 0..b0, false));
    blocks.iter().rev().for_each(|&b0| step(b0, (b0 + BLOCK).min(n)..n, true));
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
            let again = product(&l, &l, n);
            assert!(h.iter().zip(&again).all(|(a, b)| (a - b).abs() <= 1e-5 * scale * n as f32), "{n}");
            let w = weights(7, 9 * n, 1);
            let mut b = product(&w, &h, n);
            solve(&mut b, &l, n);
            let largest = w.iter().fold(0f32, |a, v| a.max(v.abs()));
            assert!(b.iter().zip(&w).all(|(a, b)| (a - b).abs() <= 0.02 * largest), "{n}");
        }
    }
}
