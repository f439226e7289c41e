//! Chooses the rows, tokens and results of a part of a job, and the order in which rows are read.

use crate::Matrix;
use crate::activations::PackedActivations;
use crate::memory::Prefetch;
use crate::simd::{F32x16, LANES};
use std::marker::PhantomData;
use std::ops::Range;

/// Rows of a tile, computed together: four sums per token are in flight, enough to hide the latency of one.
pub(crate) const ROWS: usize = 4;
/// Largest batch, in tokens, that decodes weights in registers once per pass instead of once into memory.
pub(crate) const SMALL_BATCH: usize = 8;
/// Tiles decoded together for larger batches: each token is read once for all four.
pub(crate) const TILES_PER_PASS: usize = 4;
/// Rows of these tiles: the lanes of one vector of results.
pub(crate) const ROWS_PER_PASS: usize = TILES_PER_PASS * ROWS;
/// Tokens whose sums are kept while rows are decoded panel by panel, on processors with few registers: 64 KB per pass of rows.
pub(crate) const PANEL_TOKENS: usize = 64;
/// Bytes between the read and the prefetch in each stream; measured on an EPYC 9004.
pub(crate) const PREFETCH_DISTANCE: usize = 2048;

/// Orders the rows of a matrix into tiles of four.
///
/// ```text
/// up to 8 tokens:  tile t = rows t, s + t, 2s + t, 3s + t    (four streams of s rows, each read in order)
/// more tokens:     tile t = rows 4t, 4t + 1, 4t + 2, 4t + 3  (sixteen results of a token are one line)
/// ```
///
/// Streams far apart keep about half as many more reads in flight than neighbouring rows, which share pages and the
/// processor's stream tracking: 1.2 times (integers) to 1.6 times (f32) the speed on an EPYC 9004 with one token.
#[derive(Clone, Debug)]
pub(crate) struct RowTiles {
    tiles: Range<usize>,
    /// Rows from tile to tile.
    step: usize,
    /// Rows from row to row of a tile.
    stream_rows: usize,
    /// Rows of the matrix.
    rows: usize,
}

impl RowTiles {
    /// Makes the tiles of all rows of `w`.
    pub fn all(w: &Matrix<'_>, tokens: usize) -> RowTiles {
        if tokens > SMALL_BATCH {
            return RowTiles { tiles: 0..w.rows.div_ceil(ROWS), step: ROWS, stream_rows: 1, rows: w.rows };
        }
        let stream_rows = stream_rows(w.rows, w.bytes_read() as usize / w.rows.max(1));
        RowTiles { tiles: 0..stream_rows.min(w.rows), step: 1, stream_rows, rows: w.rows }
    }

    /// Returns the number of tiles.
    pub fn len(&self) -> usize {
        self.tiles.len()
    }

    /// Returns tiles `i * size .. (i + 1) * size`, without those past the end.
    pub fn part(&self, size: usize, i: usize) -> RowTiles {
        let (start, end) = (self.tiles.start + i * size, self.tiles.end);
        RowTiles { tiles: start..(start + size).min(end), ..*self }
    }

    /// Iterates over the tiles: their four rows, and the number of rows that exist; missing rows repeat the first.
    pub fn each(&self) -> impl Iterator<Item = ([usize; ROWS], usize)> + use<> {
        let RowTiles { tiles, step, stream_rows, rows } = self.clone();
        // A division would take as long as a short row.
        let last = [stream_rows, 2 * stream_rows, 3 * stream_rows];
        tiles.map(move |t| {
            let first = t * step;
            let n = 1 + last.iter().filter(|&&more| first + more < rows).count();
            (std::array::from_fn(|i| if i < n { first + i * stream_rows } else { first }), n)
        })
    }

    /// Iterates over the rows of `tiles` tiles at a time, four at most, with the number of rows that exist.
    pub fn rows(&self, tiles: usize) -> impl Iterator<Item = ([usize; ROWS_PER_PASS], usize)> + use<> {
        let all = self.clone();
        (0..self.len().div_ceil(tiles)).map(move |i| {
            let (mut rows, mut n) = ([0; ROWS_PER_PASS], 0);
            for (tile, wanted) in all.part(tiles, i).each() {
                rows[n..n + wanted].copy_from_slice(&tile[..wanted]);
                n += wanted;
            }
            (rows, n)
        })
    }
}

/// Returns the rows of a stream: a quarter of all rows, plus up to 16 so that the streams do not alias at 4 KB.
fn stream_rows(rows: usize, row_bytes: usize) -> usize {
    let quarter = rows.div_ceil(ROWS);
    // With fewer rows, extra rows would leave the last stream empty.
    let most = if quarter < 64 { 0 } else { 16 };
    let apart =
        |more: &usize| (1..ROWS).all(|i| (512..=3584).contains(&(i * (quarter + more) * row_bytes % 4096)));
    quarter + (0..=most).find(apart).unwrap_or(0)
}

/// Describes the place of results: element (t, r) is `y[t * stride + r]`.
#[derive(Clone, Copy)]
pub(crate) struct OutputRows<'a> {
    pub y: *mut f32,
    pub stride: usize,
    pub bias: Option<&'a [f32]>, // [rows]
}

// SAFETY: parts of a job write disjoint rows.
unsafe impl Sync for OutputRows<'_> {}

/// Tokens of packed activations, all or some.
#[derive(Clone, Copy)]
pub(crate) struct Tokens<'a> {
    pub packed: &'a PackedActivations,
    /// Indices of the tokens; `None` means all, in order.
    indices: Option<&'a [u32]>,
}

impl<'a> Tokens<'a> {
    /// Selects tokens `indices` of `packed`, or all.
    pub fn new(packed: &'a PackedActivations, indices: Option<&'a [u32]>) -> Tokens<'a> {
        Tokens { packed, indices }
    }

    /// Returns the number of selected tokens.
    pub fn len(&self) -> usize {
        self.indices.map_or(self.packed.tokens, <[u32]>::len)
    }

    /// Returns the index among the packed tokens of a selected one.
    #[inline(always)]
    pub fn at(&self, token: usize) -> usize {
        self.indices.map_or(token, |indices| indices[token] as usize)
    }
}

/// Stores the result of row r and token t, with its bias.
#[inline(always)]
pub(crate) fn store(y: &OutputRows<'_>, r: usize, t: usize, v: f32) {
    let v = v + y.bias.map_or(0.0, |b| b[r]);
    // SAFETY: row r of the token lies within y, see `check`; no other part writes row r.
    unsafe { *y.y.add(t * y.stride + r) = v };
}

/// Finds a matrix's stored rows without bounds checks, which would take as long as the matmul of a short row.
#[derive(Clone, Copy)]
pub(crate) struct StoredRows<'a> {
    start: *const u8,
    /// Bytes of all rows.
    bytes: usize,
    pub row_bytes: usize,
    /// Row of the storage that is row 0 of the matrix.
    first_row: usize,
    data: PhantomData<&'a [u8]>,
}

impl<'a> StoredRows<'a> {
    /// Makes a finder of the rows of `w`.
    ///
    /// # Panics
    /// Rows do not start at bytes.
    pub fn new(w: &Matrix<'a>) -> Self {
        assert!(w.starts_rows_at_bytes());
        let row_bytes = w.cols * usize::from(w.weight.format.bits()) / 8;
        let (start, bytes) = (w.stored().as_ptr(), w.stored().len());
        StoredRows { start, bytes, row_bytes, first_row: w.first_row, data: PhantomData }
    }

    /// Returns the row of the storage that is a row of the matrix.
    #[inline(always)]
    pub fn in_storage(&self, row: usize) -> usize {
        self.first_row + row
    }

    /// Returns a row's bytes.
    ///
    /// # Safety
    /// The matrix has a row `row`.
    #[inline(always)]
    pub unsafe fn bytes(&self, row: usize) -> &'a [u8] {
        // SAFETY: `new` has checked that all rows of the matrix lie in the data.
        unsafe { std::slice::from_raw_parts(self.start.add(row * self.row_bytes), self.row_bytes) }
    }

    /// Returns `n` bytes from byte `at` of a row on, those of the rows behind it included; none where the data end before.
    ///
    /// # Safety
    /// The matrix has a row `row`, and the row a byte `at`.
    #[inline(always)]
    pub unsafe fn bytes_from(&self, row: usize, at: usize, n: usize) -> Option<&'a [u8]> {
        let first = row * self.row_bytes + at;
        // SAFETY: the bytes lie in the data.
        (n <= self.bytes - first).then(|| unsafe { std::slice::from_raw_parts(self.start.add(first), n) })
    }

    /// Returns the prefetch of the rows that are decoded after `rows`. Rows of streams need none: decoding prefetches them.
    #[inline(always)]
    pub fn prefetch_after(&self, rows: &[usize]) -> Prefetch {
        match rows {
            [first, second, ..] if *second == first + 1 => {
                let from = self.start.wrapping_add((rows[rows.len() - 1] + 1) * self.row_bytes);
                Prefetch { from, bytes: TILES_PER_PASS * ROWS * self.row_bytes }
            }
            _ => Prefetch::NOTHING,
        }
    }
}

/// Adds up the lanes of each row of `tiles` tiles: lane r of the result is the sum of row r.
#[inline(always)]
pub(crate) fn add_lanes<L: F32x16>(rows: &[[f32; LANES]; ROWS_PER_PASS], tiles: usize) -> L {
    let mut partial_sums = [L::splat(0.0); TILES_PER_PASS];
    for (sums, [a, b, c, d]) in partial_sums.iter_mut().zip(rows.as_chunks().0).take(tiles) {
        *sums = L::partial_sums([L::load(a), L::load(b), L::load(c), L::load(d)]);
    }
    L::finish_partial_sums(partial_sums)
}

/// Stores rows `rows` of token t, at most sixteen, with their biases.
#[inline(always)]
pub(crate) fn store_rows<L: F32x16>(y: &OutputRows<'_>, rows: &[usize], t: usize, v: L) {
    // Sixteen rows are contiguous or belong to streams; in streams, the second row is a stream's length after the first.
    if rows.len() == LANES && rows[1] == rows[0] + 1 && rows[LANES - 1] == rows[0] + LANES - 1 {
        let bias = match y.bias {
            Some(all) => L::load(all[rows[0]..].first_chunk().expect("a bias per row")),
            None => L::splat(0.0),
        };
        // SAFETY: as in `store`, for contiguous rows.
        return v.add(bias).store(unsafe { &mut *y.y.add(t * y.stride + rows[0]).cast::<[f32; LANES]>() });
    }
    let mut all = [0f32; LANES];
    v.store(&mut all);
    rows.iter().zip(all).for_each(|(&r, v)| store(y, r, t, v));
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn streams_cover_all_rows_once_and_do_not_meet_in_caches() {
        for (rows, row_bytes) in
            [(1, 8), (5, 1408), (7, 64), (1408, 1408), (262_144, 1408), (4096, 2048), (999, 4096)]
        {
            let stream_rows = stream_rows(rows, row_bytes);
            let all = RowTiles { tiles: 0..stream_rows, step: 1, stream_rows, rows };
            let mut seen = vec![0; rows];
            for (tile, n) in (0..stream_rows.div_ceil(3)).flat_map(|i| all.part(3, i).each()) {
                assert!(n > 0);
                tile[..n].iter().for_each(|&r| seen[r] += 1);
            }
            assert!(seen.iter().all(|n| *n == 1), "{rows} {row_bytes}");
        }
        assert_ne!(stream_rows(262_144, 1408) * 1408 % 4096, 0);
        assert_eq!(stream_rows(262_144, 4096), 65_536);
    }
}
