//! Loops over the rows and tokens of a part, and decides where rows are decoded. An arithmetic brings its tiles.
//!
//! ```text
//! batch                              rows at a time     decoded to                    multiplied by
//! up to `MOST_IN_REGISTERS`          4                  registers                     its widths of tokens at a time
//! more                               16                 memory                        the arithmetic's widths of tokens
//! more, `PANELS` (few registers)     4 or 16            a panel of columns in L1      64 tokens, one after the other
//! ```

use super::schedule::*;
use crate::activations::BLOCK;
use crate::memory::{AlignedVec, CacheLevel, Prefetch, prefetch};
use crate::simd::{F32x16, LANES, Simd};
use std::cell::RefCell;
use std::mem::MaybeUninit;
use std::ops::Range;
use std::thread::LocalKey;

/// Rows and tokens that a part of a job multiplies.
#[derive(Clone, Copy)]
pub(super) struct TileOperands<'a> {
    pub rows: StoredRows<'a>,
    pub x: Tokens<'a>,
    pub y: &'a OutputRows<'a>,
}

/// Multiplies some rows of a matrix with an arithmetic; a [`crate::simd::Kernel`] for each product.
pub(super) struct MultiplyRows<'a, P>(pub P, pub &'a RowTiles);

/// Sizes of the panels that rows are decoded to on processors with few registers.
pub(super) struct Panels {
    /// Rows that are multiplied together.
    pub rows: usize,
    /// Tiles that are decoded together for up to [`SMALL_BATCH`] tokens; for more tokens, [`TILES_PER_PASS`].
    pub tiles_of_few: usize,
    /// Lines of a panel for up to [`SMALL_BATCH`] tokens, and for more.
    pub lines_of_few: usize,
    pub lines: usize,
}

/// Sixty-four bytes of a decoded row.
pub(super) trait PanelLine: Copy + 'static {
    const ZERO: Self;
    /// Returns the thread's memory for decoded rows.
    fn memory() -> &'static LocalKey<RefCell<AlignedVec<Self>>>;
}

macro_rules! lines {
    ($line:ty, $zero:expr) => {
        impl PanelLine for $line {
            const ZERO: Self = $zero;
            fn memory() -> &'static LocalKey<RefCell<AlignedVec<Self>>> {
                thread_local! {
                    static DECODED: RefCell<AlignedVec<$line>> = const { RefCell::new(AlignedVec::new()) };
                }
                &DECODED
            }
        }
    };
}
lines!([f32; LANES], [0.0; LANES]);
lines!([u8; 64], [0; 64]);

thread_local! {
    /// A thread's lane sums for each row and token of a panel.
    static LANE_SUMS: RefCell<AlignedVec<[f32; LANES]>> = const { RefCell::new(AlignedVec::new()) };
}

/// Turns the sums of up to sixteen rows into results.
pub(super) trait RowScales<L>: Copy {
    fn results(&self, x: Tokens<'_>, token: usize, sums: L) -> L;
    /// Returns the result of row i alone.
    fn result(&self, x: Tokens<'_>, token: usize, i: usize, sum: f32) -> f32;
}

impl<L> RowScales<L> for () {
    #[inline(always)]
    fn results(&self, _: Tokens<'_>, _: usize, sums: L) -> L {
        sums
    }
    #[inline(always)]
    fn result(&self, _: Tokens<'_>, _: usize, _: usize, sum: f32) -> f32 {
        sum
    }
}

/// A product with the rows of one weight format in one arithmetic.
pub(super) trait Product<L: F32x16>: Copy {
    /// Most tokens of a batch whose rows are decoded into registers, see [`RegisterTile`].
    const MOST_IN_REGISTERS: usize;
    /// `None` if larger batches decode whole rows.
    const PANELS: Option<Panels> = None;
    type Line: PanelLine;
    type Scales: RowScales<L>;

    fn operands(&self) -> &TileOperands<'_>;
    /// Returns the number of lines of a decoded row.
    fn lines(&self) -> usize;
    fn scales(&self, rows: &[usize]) -> Self::Scales;
    /// Decodes lines of a row, whole blocks, to row k of `out`, and prefetches the bytes `distance` after each block; 0
    /// prefetches nothing.
    fn decode(
        &self,
        row: usize,
        lines: &Range<usize>,
        distance: usize,
        k: usize,
        out: &mut [[Self::Line; ROWS]],
    );
    /// Multiplies decoded rows by all tokens.
    fn multiply_decoded(rows: DecodedRows<'_, Self::Line, Self::Scales>);
    /// Adds a panel's products to the lane sums.
    fn add_products(panel: Panel<'_, Self::Line>);
}

/// Up to sixteen decoded rows, and what they are multiplied by.
pub(super) struct DecodedRows<'a, T, S> {
    pub lines: &'a [[T; ROWS]], // [tiles, lines]
    /// Lines of a row.
    pub row_lines: usize,
    pub rows: &'a [usize],
    pub scales: S,
    /// The rows that are decoded next.
    next: Prefetch,
    pub x: Tokens<'a>,
    pub y: &'a OutputRows<'a>,
}

impl<'a, T> DecodedRows<'a, T, ()> {
    /// Makes the only row of a pass.
    pub fn one(lines: &'a [[T; ROWS]], rows: &'a [usize; 1], x: Tokens<'a>, y: &'a OutputRows<'a>) -> Self {
        DecodedRows { lines, row_lines: lines.len(), rows, scales: (), next: Prefetch::NOTHING, x, y }
    }
}

impl<T, S> DecodedRows<'_, T, S> {
    /// Returns the number of tiles; 0 where rows are empty.
    #[inline(always)]
    pub fn tiles(&self) -> usize {
        if self.row_lines == 0 { 0 } else { self.rows.len().div_ceil(ROWS) }
    }

    /// Prefetches a part of the next rows, as tile i is multiplied by `tokens` tokens from `first` on.
    #[inline(always)]
    pub fn prefetch_next(&self, i: usize, first: usize, tokens: usize) {
        let part = first * self.tiles() + i * tokens;
        self.next.prefetch_parts(part..part + tokens, self.x.len() * self.tiles());
    }
}

/// Columns of decoded rows, and what they are multiplied by.
pub(super) struct Panel<'a, T> {
    pub lines: &'a [[T; ROWS]], // [tiles, lines of the panel]
    /// Lines of the rows that the panel has.
    pub columns: Range<usize>,
    pub x: Tokens<'a>,
    pub tokens: Range<usize>,
    /// First of the sixteen rows of `totals` that the panel has.
    pub first_row: usize,
    pub totals: &'a mut [[[f32; LANES]; ROWS_PER_PASS]], // [tokens]
}

/// Multiplies a tile by tokens, with the instructions of L.
pub(super) trait Tile<L> {
    /// Numbers of tokens that are multiplied together, some of 6, 4, 3, 2 and 1.
    const WIDTHS: &'static [usize];
    /// Multiplies by T tokens from `first` on, and returns T.
    fn multiply<const T: usize>(&mut self, first: usize) -> usize;
}

/// Multiplies a tile by all tokens, as many at a time as its widths allow.
#[inline(always)]
pub(super) fn multiply_tokens<L, A: Tile<L>>(tile: &mut A, tokens: usize) {
    const fn has(widths: &[usize], width: usize) -> bool {
        match widths {
            [] => false,
            [first, rest @ ..] => *first == width || has(rest, width),
        }
    }
    let mut first = 0;
    while first < tokens {
        first += match tokens - first {
            // Eight tokens go four and four rather than six and two.
            6.. if const { has(A::WIDTHS, 6) } && !matches!(tokens - first, 8 | 9) => {
                tile.multiply::<6>(first)
            }
            4.. if const { has(A::WIDTHS, 4) } => tile.multiply::<4>(first),
            3.. if const { has(A::WIDTHS, 3) } => tile.multiply::<3>(first),
            2.. if const { has(A::WIDTHS, 2) } => tile.multiply::<2>(first),
            _ => tile.multiply::<1>(first),
        };
    }
}

/// Four rows, of which n exist, that are decoded into registers. As a [`Tile`], its widths are the numbers of tokens that a decoded
/// block is multiplied by; other numbers decode it again.
pub(super) struct RegisterTile<'a, A, S> {
    pub product: &'a A,
    pub rows: [usize; ROWS],
    pub n: usize,
    scales: S,
}

impl<A, S> RegisterTile<'_, A, S> {
    /// Stores the results of the lane sums of T tokens from `first` on, and returns T.
    #[inline(always)]
    pub fn store<L: F32x16, const T: usize>(&self, first: usize, sums: &[[L; ROWS]; T]) -> usize
    where
        A: Product<L>,
        S: RowScales<L>,
    {
        let TileOperands { x, y, .. } = *self.product.operands();
        for t in 0..T {
            for (i, sum) in L::horizontal_sums(sums[t]).into_iter().enumerate().take(self.n) {
                store(y, self.rows[i], first + t, self.scales.result(x, first + t, i, sum));
            }
        }
        T
    }
}

/// Multiplies all rows of a part by all tokens.
#[inline(always)]
pub(super) fn multiply_tiles<L: F32x16, A: Product<L>>(product: &A, tiles: &RowTiles)
where
    for<'t> RegisterTile<'t, A, A::Scales>: Tile<L>,
{
    let TileOperands { rows: stored, x, y } = *product.operands();
    // Loops, not closures: a closure passed to another function is compiled without this function's instructions.
    if x.len() <= A::MOST_IN_REGISTERS {
        for (rows, n) in tiles.each() {
            let scales = product.scales(&rows);
            multiply_tokens(&mut RegisterTile { product, rows, n, scales }, x.len());
        }
        return;
    }
    let mut memory = A::Line::memory().take();
    if const { A::PANELS.is_some() } {
        multiply_in_panels(product, tiles, &mut memory);
    } else {
        let row_lines = product.lines();
        memory.grow(ROWS_PER_PASS * row_lines, A::Line::ZERO);
        // Rows of streams are prefetched here, others while tokens are multiplied.
        let distance = if x.len() <= SMALL_BATCH { PREFETCH_DISTANCE } else { 0 };
        for (rows, n) in tiles.rows(TILES_PER_PASS) {
            let rows = &rows[..n];
            decode_rows(product, rows, &(0..row_lines), distance, &mut memory);
            let (lines, scales) = (memory.as_chunks().0, product.scales(rows));
            let next = stored.prefetch_after(rows);
            A::multiply_decoded(DecodedRows { lines, row_lines, rows, scales, next, x, y });
        }
    }
    A::Line::memory().set(memory);
}

/// Decodes lines of rows to `[tiles, lines, 4]`.
#[inline(always)]
fn decode_rows<L: F32x16, A: Product<L>>(
    product: &A,
    rows: &[usize],
    lines: &Range<usize>,
    distance: usize,
    out: &mut [A::Line],
) {
    let out = out.as_chunks_mut::<ROWS>().0;
    for (i, &row) in rows.iter().enumerate() {
        let tile = &mut out[i / ROWS * lines.len()..][..lines.len()];
        product.decode(row, lines, distance, i % ROWS, tile);
    }
}

/// Multiplies all rows of a part by all tokens; rows are decoded panel by panel.
#[inline(always)]
fn multiply_in_panels<L: F32x16, A: Product<L>>(
    product: &A,
    tiles: &RowTiles,
    memory: &mut AlignedVec<A::Line>,
) {
    let Some(panels) = A::PANELS else { return };
    let TileOperands { rows: stored, x, y } = *product.operands();
    let (row_lines, tokens) = (product.lines(), x.len());
    let (tiles_at_once, panel_lines, distance) = match tokens {
        ..=SMALL_BATCH => (panels.tiles_of_few, panels.lines_of_few, PREFETCH_DISTANCE),
        _ => (TILES_PER_PASS, panels.lines, ROWS_PER_PASS * stored.row_bytes),
    };
    memory.grow(panels.rows.min(tiles_at_once * ROWS) * panel_lines, A::Line::ZERO);
    let mut lane_sums = LANE_SUMS.take();
    lane_sums.grow(tokens.min(PANEL_TOKENS) * ROWS_PER_PASS, [0.0; LANES]);
    for (rows, n) in tiles.rows(tiles_at_once) {
        let rows = &rows[..n];
        let scales = product.scales(rows);
        for first in (0..tokens).step_by(PANEL_TOKENS) {
            let selected = first..tokens.min(first + PANEL_TOKENS);
            let totals = &mut lane_sums.as_chunks_mut().0[..selected.len()];
            totals.as_flattened_mut().fill([0.0; LANES]);
            for start in (0..row_lines).step_by(panel_lines) {
                let columns = start..row_lines.min(start + panel_lines);
                for (i, rows) in rows.chunks(panels.rows).enumerate() {
                    // Bytes are prefetched for the first tokens.
                    decode_rows(product, rows, &columns, distance * usize::from(first == 0), memory);
                    let lines = &memory.as_chunks().0[..rows.len().div_ceil(ROWS) * columns.len()];
                    let (columns, tokens, first_row) = (columns.clone(), selected.clone(), i * panels.rows);
                    A::add_products(Panel { lines, columns, x, tokens, first_row, totals });
                }
            }
            for (t, totals) in selected.zip(&*totals) {
                let sums = add_lanes::<L>(totals, rows.len().div_ceil(ROWS));
                store_rows(y, rows, t, scales.results(x, t, sums));
            }
        }
    }
    LANE_SUMS.set(lane_sums);
}

/// Sums of products of a tile of decoded rows.
pub(super) trait DecodedTile<L: F32x16> {
    /// See [`Tile::WIDTHS`].
    const WIDTHS: &'static [usize];
    /// Returns the lane sums of the products of a tile and T tokens from `first` on.
    fn sums<const T: usize>(tile: &[[[u8; 64]; ROWS]], x: Tokens<'_>, first: usize) -> [[L; ROWS]; T];
}

/// Decoded rows whose tiles, of which D gives the sums, are multiplied one after the other.
pub(super) struct ByTile<'a, S, D>(pub DecodedRows<'a, [u8; 64], S>, pub D);

impl<L: F32x16, S: RowScales<L>, D: DecodedTile<L>> Tile<L> for ByTile<'_, S, D> {
    const WIDTHS: &'static [usize] = D::WIDTHS;
    #[inline(always)]
    fn multiply<const T: usize>(&mut self, first: usize) -> usize {
        let all = &self.0;
        let mut partial_sums = [[L::splat(0.0); TILES_PER_PASS]; T];
        for i in 0..all.tiles() {
            all.prefetch_next(i, first, T);
            let sums = D::sums::<T>(&all.lines[i * all.row_lines..][..all.row_lines], all.x, first);
            for t in 0..T {
                partial_sums[t][i] = L::partial_sums(sums[t]);
            }
        }
        for t in 0..T {
            let sums = L::finish_partial_sums(partial_sums[t]);
            store_rows(all.y, all.rows, first + t, all.scales.results(all.x, first + t, sums));
        }
        T
    }
}

/// Scales the sums in a register, one per lane, and adds them to register r of a row's lane sums.
#[inline(always)]
pub(super) fn add_register<L: Simd>(
    sums: L::Register,
    scale: L::Register,
    r: usize,
    totals: &mut [f32; LANES],
) {
    let before = L::load_register(totals, r);
    L::store_register(L::mul_add_register(sums, scale, before), totals, r);
}

/// Memory for the last block of a row that is shorter than others.
pub(super) type Space = [MaybeUninit<u8>; 4 * BLOCK];

/// An empty [`Space`] for each row of a tile.
pub(super) const SPACES: [Space; ROWS] = [[MaybeUninit::uninit(); 4 * BLOCK]; ROWS];

/// Copies bytes to `space`, fills them with zeros to `n` bytes, and returns these.
#[inline(always)]
fn pad<'a>(bytes: &[u8], n: usize, space: &'a mut Space) -> &'a [u8] {
    let space = &mut space[..n];
    space.fill(MaybeUninit::new(0));
    space[..bytes.len()].write_copy_of_slice(bytes);
    // SAFETY: all n bytes have been written.
    unsafe { space.assume_init_ref() }
}

/// Returns block b of a row, `n` bytes; zeros follow where the row ends before.
#[inline(always)]
pub(super) fn row_block<'a>(row: &'a [u8], b: usize, n: usize, space: &'a mut Space) -> &'a [u8] {
    match row.get(b * n..(b + 1) * n) {
        Some(block) => block,
        None => pad(&row[b * n..], n, space),
    }
}

/// Returns the block that follows the whole ones, `at` bytes into four rows. It is filled with the bytes of the next row where any
/// bytes stand for finite numbers, which tokens multiply by zero: a copy takes as long as five blocks. Else with zeros.
#[inline(always)]
pub(super) fn last_blocks<'a>(
    stored: &StoredRows<'a>,
    rows: &[usize; ROWS],
    at: usize,
    block_bytes: usize,
    is_finite: bool,
    spaces: &'a mut [Space; ROWS],
) -> [&'a [u8]; ROWS] {
    let mut last = [&[] as &[u8]; ROWS];
    for (i, space) in spaces.iter_mut().enumerate() {
        // SAFETY: every row of a tile is a row of the matrix, with a byte `at`.
        let next = if is_finite { unsafe { stored.bytes_from(rows[i], at, block_bytes) } } else { None };
        // SAFETY: as above.
        let rest = unsafe { &stored.bytes(rows[i])[at..] };
        // Half blocks of rows are not prefetched with whole ones. Each would be waited for.
        prefetch_after(rest, PREFETCH_DISTANCE);
        last[i] = next.unwrap_or_else(|| pad(rest, block_bytes, space));
    }
    last
}

/// Prefetches the bytes `distance` after some bytes of a row, into L2.
#[inline(always)]
pub(super) fn prefetch_after(bytes: &[u8], distance: usize) {
    prefetch(CacheLevel::L2, bytes.as_ptr().wrapping_add(distance), bytes.len());
}
