//! Dense rows packed by sixteen: each lane of a vector sums one row, and tokens are read where they lie.
//!
//! ```text
//! rows of a tile    [columns, 16]                        one vector for each column: weights of a convolution, packed once,
//!                                                        or columns of a matrix, packed for one product
//! a token           pieces of the same length, anywhere  taps of a window, or one row of a matrix
//! y[token, row] =   sum over pieces and their elements, in order
//! ```
//! Nothing is packed but the rows. A sum depends neither on the other tokens, nor on threads, nor on the instruction set (AVX2,
//! AVX-512, NEON).

use crate::elementwise::{get, put};
use crate::matmul::PARALLEL_MATMUL;
use crate::memory::AlignedVec;
use crate::pool::SharedPointer;
use crate::simd::{F32x16, LANES, simd_fn};
use crate::weight_format::WeightFormat;
use crate::{Matrix, Pool, f16_bits_to_f32, f32_to_f16};
use std::cell::RefCell;

/// Dense rows in equal groups, packed by sixteen. Rows of fp16 stay fp16.
#[derive(Debug)]
pub struct PackedRows {
    pub(crate) groups: usize,
    /// Rows of a group.
    rows: usize,
    pub(crate) columns: usize,
    elements: PackedElements,
}

/// Elements `[groups, tiles, columns, 16]`.
#[derive(Debug)]
enum PackedElements {
    F32(AlignedVec<[f32; LANES]>),
    F16(Vec<[u16; LANES]>),
}

thread_local! {
    /// A thread's tile of rows in f32.
    static TILE: RefCell<AlignedVec<[f32; LANES]>> = const { RefCell::new(AlignedVec::new()) };
}

impl PackedRows {
    /// Packs the rows of `w`, which are `groups` equal groups. Columns `[channels, taps]` become `[taps, channels]`.
    ///
    /// # Panics
    /// Rows or columns do not fit groups or taps.
    pub fn new(w: &Matrix<'_>, groups: usize, taps: usize) -> PackedRows {
        let columns = w.cols();
        assert!(groups > 0 && w.rows().is_multiple_of(groups) && columns.is_multiple_of(taps), "equal parts");
        let (rows, channels) = (w.rows() / groups, columns / taps);
        let lines = groups * rows.div_ceil(LANES) * columns;
        let mut elements = match w.weight.format {
            WeightFormat::Fp16 => PackedElements::F16(vec![[0; LANES]; lines]),
            _ => {
                let mut all = AlignedVec::new();
                all.grow(lines, [0.0; LANES]);
                PackedElements::F32(all)
            }
        };
        let (mut row, mut halves) = (vec![0.0; columns], vec![0; columns]);
        for r in 0..w.rows() {
            w.decode_row(r, &mut row);
            let (group, lane) = (r / rows, r % rows);
            let first = (group * rows.div_ceil(LANES) + lane / LANES) * columns;
            let to = |c: usize| first + c % taps * channels + c / taps;
            match &mut elements {
                PackedElements::F32(all) => {
                    row.iter().enumerate().for_each(|(c, v)| all[to(c)][lane % LANES] = *v)
                }
                PackedElements::F16(all) => {
                    f32_to_f16(&row, &mut halves);
                    halves.iter().enumerate().for_each(|(c, v)| all[to(c)][lane % LANES] = *v);
                }
            }
        }
        PackedRows { groups, rows, columns, elements }
    }

    /// Returns the number of rows of all groups.
    pub fn rows(&self) -> usize {
        self.groups * self.rows
    }

    /// Returns the bytes of the elements.
    pub fn bytes(&self) -> u64 {
        (match &self.elements {
            PackedElements::F32(all) => size_of_val(&**all),
            PackedElements::F16(all) => size_of_val(all.as_slice()),
        }) as u64
    }

    /// Returns the number of tiles of a group.
    pub(crate) fn tiles(&self) -> usize {
        self.rows.div_ceil(LANES)
    }

    /// Returns the number of rows of a tile that exist.
    pub(crate) fn tile_rows(&self, tile: usize) -> usize {
        (self.rows - tile * LANES).min(LANES)
    }

    /// Calls `f` with a tile in f32, `[columns, 16]`.
    pub(crate) fn with_tile(&self, group: usize, tile: usize, f: impl FnOnce(&[[f32; LANES]])) {
        let first = (group * self.tiles() + tile) * self.columns;
        match &self.elements {
            PackedElements::F32(all) => f(&all[first..first + self.columns]),
            PackedElements::F16(all) => {
                let mut decoded = TILE.take();
                decoded.grow(self.columns, [0.0; LANES]);
                let lines = &mut decoded[..self.columns];
                f16_bits_to_f32(all[first..first + self.columns].as_flattened(), lines.as_flattened_mut());
                f(lines);
                TILE.set(decoded);
            }
        }
    }
}

/// Tokens to be multiplied by a tile of rows, and the place of their results.
pub(crate) struct TileProduct<'a> {
    /// PackedElements of the rows.
    pub lines: &'a [[f32; LANES]], // [pieces, length]
    /// First element of each token's pieces.
    pub pieces: &'a [*const f32], // [tokens, pieces]
    /// PackedElements of a piece.
    pub length: usize,
    /// Rows of the tile that exist.
    pub rows: usize,
    /// Bias of each of them.
    pub bias: Option<&'a [f32]>, // [rows]
    /// Result of the first token and row; other tokens follow `stride` elements apart.
    pub y: *mut f32,
    pub stride: usize,
    /// True if a product and its sum are rounded once, not each.
    pub is_fused: bool,
}

impl TileProduct<'_> {
    /// Computes the products.
    ///
    /// # Safety
    /// `length` elements are readable from each piece on, and `rows` elements of each token are writable.
    pub unsafe fn run(&self) {
        assert!(self.length > 0 && self.lines.len().is_multiple_of(self.length), "whole pieces");
        assert!(self.rows <= LANES && self.bias.is_none_or(|b| b.len() == self.rows), "rows of a tile");
        if self.is_fused {
            multiply_fused(self);
        } else {
            multiply_and_add(self);
        }
    }
}

simd_fn! { fn multiply_fused(p: &TileProduct<'_>) = multiply_on, true }
simd_fn! { fn multiply_and_add(p: &TileProduct<'_>) = multiply_on, false }

#[inline(always)]
fn multiply_on<L: F32x16, const FUSED: bool>(p: &TileProduct<'_>) {
    let pieces = p.lines.len() / p.length;
    let tokens = p.pieces.len() / pieces.max(1);
    let mut t = 0;
    while t < tokens {
        t += match tokens - t {
            // With many registers, more sums hide the latency of each.
            12.. if const { L::REGISTERS >= 32 } => multiply_tokens::<L, FUSED, 12>(p, pieces, t),
            // Seven go four and three.
            6 | 8.. => multiply_tokens::<L, FUSED, 6>(p, pieces, t),
            4.. => multiply_tokens::<L, FUSED, 4>(p, pieces, t),
            3 => multiply_tokens::<L, FUSED, 3>(p, pieces, t),
            2 => multiply_tokens::<L, FUSED, 2>(p, pieces, t),
            _ => multiply_tokens::<L, FUSED, 1>(p, pieces, t),
        };
    }
}

/// Multiplies T tokens from `first` on, and returns T. The sums of six stay in the registers of AVX2.
#[inline(always)]
fn multiply_tokens<L: F32x16, const FUSED: bool, const T: usize>(
    p: &TileProduct<'_>,
    pieces: usize,
    first: usize,
) -> usize {
    let mut sums = [L::splat(0.0); T];
    for (i, lines) in p.lines.chunks_exact(p.length).enumerate() {
        let mut x = [std::ptr::null::<f32>(); T];
        for t in 0..T {
            x[t] = p.pieces[(first + t) * pieces + i];
        }
        for (k, line) in lines.iter().enumerate() {
            let w = L::load(line);
            for t in 0..T {
                // SAFETY: a piece has as many elements as `lines`, see `TileProduct::run`.
                let v = L::splat(unsafe { *x[t].add(k) });
                sums[t] = if FUSED { w.mul_add(v, sums[t]) } else { sums[t].add(w.mul(v)) };
            }
        }
    }
    let mut bias = [0.0; LANES];
    if let Some(b) = p.bias {
        bias[..p.rows].copy_from_slice(b);
    }
    let bias = L::load(&bias);
    for t in 0..T {
        let v = sums[t].add(bias);
        // SAFETY: `rows` elements of the token are writable, see `TileProduct::run`.
        unsafe {
            let y = p.y.add((first + t) * p.stride);
            if p.rows == LANES {
                v.store(&mut *y.cast::<[f32; LANES]>());
            } else {
                let mut all = [0.0; LANES];
                v.store(&mut all);
                std::ptr::copy_nonoverlapping(all.as_ptr(), y, p.rows);
            }
        }
    }
    T
}

/// Describes products `out[m, n] = x[m, k] y[k, n]` of many pairs of matrices.
#[derive(Clone, Copy, Debug)]
pub struct DenseProducts<'a> {
    /// First element of each product's matrices: of the result, of x and of y.
    pub places: &'a [[usize; 3]],
    /// Sizes m, k and n.
    pub sizes: [usize; 3],
    /// PackedElements from row to row of x, whose rows are contiguous.
    pub x_stride: usize,
    /// PackedElements from row to row, and from column to column of y.
    pub y_strides: [usize; 2],
    /// Left operand.
    pub x: &'a [f32],
    /// Right operand.
    pub y: &'a [f32],
}

/// Most rows of x that a thread multiplies with packed columns of y.
const PART_ROWS: usize = 192;
/// Fewest rows of x for which rows of y are packed: for fewer, packing takes longer than the product.
const MIN_PACKED_ROWS: usize = 4;

thread_local! {
    /// A thread's packed columns, and the rows of x that they are multiplied with.
    static COLUMNS: RefCell<(AlignedVec<[f32; LANES]>, Vec<*const f32>)> = const { RefCell::new((AlignedVec::new(), Vec::new())) };
}

/// Computes products of dense matrices on all threads of the pool; rows of a result are contiguous and follow each other. A sum adds
/// products in ascending order of k; each product and each sum is rounded.
///
/// # Panics
/// An element lies outside its operand, or results overlap or are not in ascending order.
pub fn multiply_dense(pool: &Pool, p: &DenseProducts<'_>, out: &mut [f32]) {
    let [m, k, n] = p.sizes;
    if m == 0 || n == 0 || p.places.is_empty() {
        return;
    }
    let [row_step, column_step] = p.y_strides;
    assert!(p.places.windows(2).all(|w| w[1][0] >= w[0][0] + m * n), "results one behind the other");
    for [o, x, y] in p.places {
        assert!(o + m * n <= out.len(), "results inside of out");
        let (x_end, y_end) =
            ((m - 1) * p.x_stride + k, k.max(1) * row_step - row_step + (n - 1) * column_step + 1);
        assert!(k == 0 || (x + x_end <= p.x.len() && y + y_end <= p.y.len()), "operands inside of x and y");
    }
    if k == 0 {
        return p.places.iter().for_each(|at| out[at[0]..at[0] + m * n].fill(0.0));
    }
    // Parts write different columns or rows of results that do not overlap.
    let to = SharedPointer(out.as_mut_ptr());
    let (tiles, blocks) = (n.div_ceil(LANES), m.div_ceil(PART_ROWS));
    let threads = if p.places.len() * m * k * n < PARALLEL_MATMUL { 1 } else { pool.threads() };
    // Small products are joined.
    let together = (PARALLEL_MATMUL / (m.min(PART_ROWS) * k * LANES)).clamp(1, tiles);
    let runs = tiles.div_ceil(together);
    pool.run_on(threads, p.places.len() * blocks * runs, &|i| {
        let to = &to;
        let [out, x, y] = p.places[i / runs / blocks];
        let first_row = i / runs % blocks * PART_ROWS;
        let rows = first_row..m.min(first_row + PART_ROWS);
        let tiles = i % runs * together..tiles.min((i % runs + 1) * together);
        if m < MIN_PACKED_ROWS && column_step == 1 {
            let columns = tiles.start * LANES..n.min(tiles.end * LANES);
            for r in rows {
                // SAFETY: the columns of the row lie in the product's result.
                let out = unsafe {
                    let first = to.0.add(out + r * n + columns.start);
                    std::slice::from_raw_parts_mut(first, columns.len())
                };
                add_rows(&p.x[x + r * p.x_stride..][..k], &p.y[y + columns.start..], row_step, out);
            }
            return;
        }
        let (mut lines, mut pieces) = COLUMNS.take();
        pieces.clear();
        pieces.extend(rows.map(|r| p.x[x + r * p.x_stride..][..k].as_ptr()));
        lines.grow(k.next_multiple_of(LANES), [0.0; LANES]);
        for tile in tiles {
            let columns = (n - tile * LANES).min(LANES);
            pack_columns(&p.y[y + tile * LANES * column_step..], p.y_strides, columns, &mut lines[..k]);
            // SAFETY: pieces have k elements; the tile's columns of the rows lie in the product's result.
            unsafe {
                let y = to.0.add(out + first_row * n + tile * LANES);
                let (lines, pieces) = (&lines[..k], pieces.as_slice());
                let bias = None;
                TileProduct { lines, pieces, length: k, rows: columns, bias, y, stride: n, is_fused: false }
                    .run();
            }
        }
        COLUMNS.set((lines, pieces));
    });
}

simd_fn! {
    /// Computes the sum of rows of `y`, `stride` apart, each times an element of `x`.
    fn add_rows(x: &[f32], y: &[f32], stride: usize, out: &mut [f32]) = add_rows_on
}

#[inline(always)]
fn add_rows_on<L: F32x16>(x: &[f32], y: &[f32], stride: usize, out: &mut [f32]) {
    out.fill(0.0);
    for (r, v) in x.iter().enumerate() {
        let (v, y) = (L::splat(*v), &y[r * stride..][..out.len()]);
        for i in (0..out.len()).step_by(LANES) {
            let sum = get::<L>(out, i).add(v.mul(get(y, i)));
            put(out, i, sum);
        }
    }
}

simd_fn! {
    /// Packs up to sixteen columns of a matrix whose rows lie `strides[0]` and whose columns lie `strides[1]` apart.
    fn pack_columns(y: &[f32], strides: [usize; 2], columns: usize, lines: &mut [[f32; LANES]]) = pack_columns_on
}

#[inline(always)]
fn pack_columns_on<L: F32x16>(
    y: &[f32],
    [row, column]: [usize; 2],
    columns: usize,
    lines: &mut [[f32; LANES]],
) {
    if row == 1 && column > 1 {
        let k = lines.len();
        for first in (0..k).step_by(LANES) {
            let mut from = [L::splat(0.0); LANES];
            for (c, from) in from.iter_mut().enumerate().take(columns) {
                *from = get(&y[c * column..][..k], first);
            }
            for (line, v) in lines[first..].iter_mut().zip(L::transpose(from)) {
                v.store(line);
            }
        }
        return;
    }
    for (r, line) in lines.iter_mut().enumerate() {
        let y = &y[r * row..];
        match column {
            1 if columns == LANES => line.copy_from_slice(&y[..LANES]),
            _ => {
                line[columns..].fill(0.0);
                line.iter_mut().enumerate().take(columns).for_each(|(c, v)| *v = y[c * column]);
            }
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::test_data::noise;

    #[test]
    fn matrices_of_any_layout_are_multiplied() {
        for (m, k, n) in [(1, 3, 1), (7, 20, 33), (200, 64, 16), (5, 1, 40), (13, 100, 7)] {
            for [row, column] in [[n, 1], [1, k], [2 * n, 2], [1, k + 3]] {
                let (x, y) = (noise(1, 2 * m * (k + 1)), noise(2, 2 * (k * row + n * column)));
                let places = [[0, m * (k + 1), 1], [m * n, 0, k * row]];
                let p = DenseProducts {
                    places: &places,
                    sizes: [m, k, n],
                    x_stride: k + 1,
                    y_strides: [row, column],
                    x: &x,
                    y: &y,
                };
                let mut out = vec![f32::NAN; 2 * m * n];
                let mut same = out.clone();
                multiply_dense(&Pool::new(1), &p, &mut out);
                multiply_dense(&Pool::new(3), &p, &mut same);
                assert_eq!(out, same);
                for [o, xs, ys] in places {
                    for (i, j) in (0..m).flat_map(|i| (0..n).map(move |j| (i, j))) {
                        let expected = (0..k).fold(0f32, |sum, c| {
                            sum + x[xs + i * (k + 1) + c] * y[ys + c * row + j * column]
                        });
                        assert_eq!(out[o + i * n + j], expected, "{m} {k} {n} {i} {j}");
                    }
                }
            }
        }
    }
}
