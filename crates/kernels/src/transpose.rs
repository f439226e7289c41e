//! Transposing copies.

use crate::Pool;
use crate::pool::SharedPointer;
use crate::simd::{F32x16, LANES, simd_fn};
use std::ops::Range;

/// Rows of a part: four cache lines of each column of the source.
const PART: usize = 4 * LANES;
/// Columns of a part; few rows make parts by columns only.
const COLUMNS: usize = 256 * LANES;
/// Elements from which on several threads are used: a few microseconds of work.
const PARALLEL_TRANSPOSE: usize = 1 << 14;

/// Locates a matrix. Source: element (r, c) at `first + r + c * stride`. Target: element (r, c) at `first + r * stride + c`.
#[derive(Clone, Copy, Debug)]
pub struct Strided {
    /// Index of the first element.
    pub first: usize,
    /// Elements from column to column of the source, from row to row of the target.
    pub stride: usize,
}

/// Copies `[rows, cols]` from `x`, whose columns are contiguous, to `out`, whose rows are contiguous.
///
/// # Panics
/// An element lies outside `x` or `out`, or rows of `out` overlap.
pub fn transpose(
    pool: &Pool,
    (rows, cols): (usize, usize),
    (x, from): (&[f32], Strided),
    (out, to): (&mut [f32], Strided),
) {
    exchange_all(pool, (rows, cols), (x, from), (out, to), false);
}

/// Adds the transpose of `x` to `out`, see [`transpose`].
///
/// # Panics
/// An element lies outside `x` or `out`, or rows of `out` overlap.
pub fn transpose_add(
    pool: &Pool,
    sizes: (usize, usize),
    (x, from): (&[f32], Strided),
    (out, to): (&mut [f32], Strided),
) {
    exchange_all(pool, sizes, (x, from), (out, to), true);
}

fn exchange_all(
    pool: &Pool,
    (rows, cols): (usize, usize),
    (x, from): (&[f32], Strided),
    (out, to): (&mut [f32], Strided),
    add: bool,
) {
    if rows == 0 || cols == 0 {
        return;
    }
    let inside = |s: Strided, along: usize, across: usize, len: usize| {
        let last = (across - 1).checked_mul(s.stride).and_then(|n| n.checked_add(s.first));
        last.and_then(|n| n.checked_add(along)).is_some_and(|end| end <= len)
    };
    assert!(inside(from, rows, cols, x.len()) && inside(to, cols, rows, out.len()), "inside of both");
    assert!(to.stride >= cols || rows == 1, "rows that do not overlap");
    // Parts write disjoint rows, or disjoint columns of the same rows.
    let out = SharedPointer(out.as_mut_ptr());
    let across = cols.div_ceil(COLUMNS);
    let part = |i: usize| {
        let (first, column) = (i / across * PART, i % across * COLUMNS);
        let from = Strided { first: from.first + column * from.stride, ..from };
        let to = Strided { first: to.first + column, ..to };
        exchange(x, from, &out, to, first..rows.min(first + PART), COLUMNS.min(cols - column), add);
    };
    let parts = rows.div_ceil(PART) * across;
    if rows * cols < PARALLEL_TRANSPOSE { (0..parts).for_each(part) } else { pool.run(parts, &part) }
}

simd_fn! {
    fn exchange(x: &[f32], from: Strided, out: &SharedPointer<f32>, to: Strided, rows: Range<usize>, cols: usize, add: bool) = exchange_on
}

/// Transposes `rows` by `cols` elements, which lie within both matrices, see [`exchange_all`].
#[inline(always)]
fn exchange_on<L: F32x16>(
    x: &[f32],
    from: Strided,
    out: &SharedPointer<f32>,
    to: Strided,
    rows: Range<usize>,
    cols: usize,
    add: bool,
) {
    // SAFETY: row r of `out` lies within it from column c on, see `exchange_all`. Rows do not overlap, and each of
    // their columns belongs to one part.
    let row = |r: usize, c: usize, n: usize| unsafe {
        std::slice::from_raw_parts_mut(out.0.add(to.first + r * to.stride + c), n)
    };
    let whole_rows = rows.start + rows.len() / LANES * LANES;
    let whole_cols = cols / LANES * LANES;
    for c in (0..whole_cols).step_by(LANES) {
        for r in (rows.start..whole_rows).step_by(LANES) {
            let mut block = [L::splat(0.0); LANES];
            for (k, v) in block.iter_mut().enumerate() {
                let line = &x[from.first + r + (c + k) * from.stride..];
                *v = line.first_chunk().map_or(*v, L::load);
            }
            for (k, values) in L::transpose(block).into_iter().enumerate() {
                let Some(to) = row(r + k, c, LANES).as_mut_array() else { continue };
                if add { values.add(L::load(to)).store(to) } else { values.store(to) }
            }
        }
    }
    // A block would be mostly empty for few rows or few columns.
    let one_by_one = |rows: Range<usize>, columns: Range<usize>| {
        for r in rows.filter(|_| !columns.is_empty()) {
            let column = x[from.first + r + columns.start * from.stride..].iter().step_by(from.stride.max(1));
            for (to, &v) in row(r, columns.start, columns.len()).iter_mut().zip(column) {
                *to = if add { *to + v } else { v };
            }
        }
    };
    one_by_one(whole_rows..rows.end, 0..cols);
    one_by_one(rows.start..whole_rows, whole_cols..cols);
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn every_element_goes_to_its_place() {
        for (rows, cols) in [(1, 1), (1, 40), (40, 1), (16, 16), (17, 33), (300, 129), (3, 9001)] {
            let (from, to) = (Strided { first: 3, stride: rows + 2 }, Strided { first: 5, stride: cols + 1 });
            let x: Vec<f32> = (0..3 + cols * (rows + 2)).map(|i| i as f32).collect();
            let mut out = vec![-1f32; 5 + rows * (cols + 1)];
            for threads in [1, 3] {
                out.fill(-1.0);
                transpose(&Pool::new(threads), (rows, cols), (&x, from), (&mut out, to));
                for (i, v) in out.iter().enumerate() {
                    let inside = i.checked_sub(5).map(|i| (i / (cols + 1), i % (cols + 1)));
                    match inside {
                        Some((r, c)) if r < rows && c < cols => {
                            assert_eq!(*v, (3 + r + c * (rows + 2)) as f32);
                        }
                        _ => assert_eq!(*v, -1.0),
                    }
                }
                let before = out.clone();
                transpose_add(&Pool::new(threads), (rows, cols), (&x, from), (&mut out, to));
                let doubled =
                    out.iter().zip(&before).all(|(v, b)| *v == if *b == -1.0 { -1.0 } else { 2.0 * b });
                assert!(doubled, "[{rows}, {cols}]");
            }
        }
    }
}
