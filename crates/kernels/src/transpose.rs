//! Copies that exchange rows and columns.

use crate::Pool;
use crate::lanes::{LANES, Lanes};
use crate::vector::dispatch;
use std::ops::Range;

/// Rows of a part: from each column that is read, as many lines that lie together.
const PART: usize = 4 * LANES;
/// Elements from which several threads are worth it.
const PARALLEL: usize = 1 << 14;

/// Where element (r, c) of a matrix is: at `first + r + c * stride`, the other way round for what is written.
#[derive(Clone, Copy, Debug)]
pub struct Strided {
    /// Place of the first.
    pub first: usize,
    /// From column to column of what is read, from row to row of what is written.
    pub stride: usize,
}

/// Writes `[rows, cols]`, whose columns lie together in `out`, from `x`, whose rows lie together.
///
/// # Panics
/// A place is outside, or rows of `out` overlap.
pub fn transpose(
    pool: &Pool,
    (rows, cols): (usize, usize),
    (x, from): (&[f32], Strided),
    (out, to): (&mut [f32], Strided),
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
    let out = Out(out.as_mut_ptr());
    let part = |i: usize| {
        let first = i * PART;
        exchange(x, from, &out, to, first..rows.min(first + PART), cols);
    };
    let parts = rows.div_ceil(PART);
    if rows * cols < PARALLEL { (0..parts).for_each(part) } else { pool.run(parts, &part) }
}

struct Out(*mut f32);
// SAFETY: parts write disjoint rows.
unsafe impl Sync for Out {}

dispatch! {
    fn exchange(x: &[f32], from: Strided, out: &Out, to: Strided, rows: Range<usize>, cols: usize) = exchange_on
}

/// Some rows; what is written is inside, see [`transpose`].
#[inline(always)]
fn exchange_on<L: Lanes>(x: &[f32], from: Strided, out: &Out, to: Strided, rows: Range<usize>, cols: usize) {
    for c in (0..cols).step_by(LANES) {
        let m = LANES.min(cols - c);
        for r in rows.clone().step_by(LANES) {
            let n = LANES.min(rows.end - r);
            let mut block = [L::splat(0.0); LANES];
            for (k, v) in block.iter_mut().enumerate().take(m) {
                let line = &x[from.first + r + (c + k) * from.stride..][..n];
                *v = match line.as_array() {
                    Some(line) => L::load(line),
                    None => {
                        let mut lanes = [0f32; LANES];
                        lanes[..n].copy_from_slice(line);
                        L::load(&lanes)
                    }
                };
            }
            for (k, row) in L::turn(block).into_iter().enumerate().take(n) {
                let at = to.first + (r + k) * to.stride + c;
                let mut lanes = [0f32; LANES];
                row.store(&mut lanes);
                // SAFETY: row r + k of `out` lies inside of it from column c on, see `transpose`; rows do not overlap, and
                // each is of one part.
                unsafe {
                    match m {
                        LANES => out.0.add(at).cast::<[f32; LANES]>().write_unaligned(lanes),
                        _ => std::ptr::copy_nonoverlapping(lanes.as_ptr(), out.0.add(at), m),
                    }
                }
            }
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn every_element_goes_to_its_place() {
        for (rows, cols) in [(1, 1), (1, 40), (40, 1), (16, 16), (17, 33), (300, 129)] {
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
            }
        }
    }
}
