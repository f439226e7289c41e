//! Exact matmul of 4-bit indices into tables of whole numbers.
//!
//! ```text
//! weight      w = step * i,  |i| < 2^15          looked up as 16-bit words, 32 at a time (f32: 16)
//! activation  x = scale * (4096 * high + low)    see `activations::packed_int16`
//! sum         lane = scale * (4096 * sum(i * high) + sum(i * low))   over 512 columns, in i32 without rounding
//! result      step * (the lanes over all columns, added in f32)
//!
//! lookup of vector j of a block (AVX-512):
//!   64 bytes of indices = 32 words of 16 bits     word m = | i3 | i2 | i1 | i0 |   columns 4 m + 3 .. 4 m
//!   vector j = table16[(word >> 4 j) & 15]        columns 4 m + j, as words of a lane: 8 l + j, 8 l + j + 4
//! ```
//!
//! Takes two thirds of the instructions of f32: 16 instead of 23 per 64 bytes of indices. A token takes 23 us where the f32
//! loop takes 33 (`--example matmul`).

use super::schedule::*;
use super::tile_loop::*;
use crate::activations::BLOCK;
use crate::activations::{INT16_BLOCKS_PER_SCALE as BLOCKS_PER_SCALE, INT16_VECTORS as VECTORS};
use crate::lut_tables::Int16Lut;
use crate::matrix::Divisor;
use crate::simd::{I16x32, Kernel, LANES, Simd, dispatch};
use crate::weight_format::WeightFormat;
use crate::{Isa, Matrix};
use std::ops::Range;

/// Bytes of a row's block.
const BYTES: usize = BLOCK / 2;
/// Radix of an activation's digits: activation = 4096 * high + low.
const RADIX: f32 = 4096.0;
/// Lines of a row's words under one scale.
const LINES_PER_SCALE: usize = BLOCKS_PER_SCALE * VECTORS;

/// Multiplies some rows of `w`, whose tables `lut` holds, by all selected tokens: together if none is out of range (see
/// `activations::packed_int16`); else one by one, those out of range in f32.
pub(super) fn multiply_rows(
    isa: Isa,
    w: &Matrix<'_>,
    lut: &Int16Lut,
    x: Tokens<'_>,
    tiles: &RowTiles,
    y: &OutputRows<'_>,
) {
    let WeightFormat::Lut { rows_per_table, .. } = w.weight.format else { unreachable!("tables") };
    let group = Divisor::new(rows_per_table);
    let multiply = |x: Tokens<'_>, y: &OutputRows<'_>| {
        let operands = TileOperands { rows: StoredRows::new(w), x, y };
        dispatch(isa, MultiplyRows(Int16Rows { operands, lut, group }, tiles));
    };
    let is_out_of_range = |t: usize| x.packed.int16.of_token[x.at(t)];
    if !(0..x.len()).any(is_out_of_range) {
        return multiply(x, y);
    }
    for t in 0..x.len() {
        let token = [x.at(t) as u32];
        // SAFETY: points to token t of `y`, see `matmul_batch`.
        let y = OutputRows { y: unsafe { y.y.add(t * y.stride) }, ..*y };
        let one = Tokens::new(x.packed, Some(&token));
        if is_out_of_range(t) {
            super::f32::multiply_rows(isa, w, one, tiles, &y);
        } else {
            multiply(one, &y);
        }
    }
}

/// Indices, tables and activations of a matmul.
#[derive(Clone, Copy)]
struct Int16Rows<'a> {
    operands: TileOperands<'a>,
    lut: &'a Int16Lut,
    group: Divisor,
}

impl Kernel for MultiplyRows<'_, Int16Rows<'_>> {
    type Output = ();
    const HAS_DOT_PRODUCTS: bool = true;
    #[inline(always)]
    fn run<S: Simd>(self) {
        multiply_tiles::<S, _>(&self.0, self.1);
    }
}

/// Words of a token's block: for each of four vectors the high digits, then the low digits.
type DigitBlock = [[[u8; 64]; 2]; VECTORS];

const NOTHING: DigitBlock = [[[0; 64]; 2]; VECTORS];

/// Returns a token's words and scales.
#[inline(always)]
fn digits(x: Tokens<'_>, t: usize) -> (&[DigitBlock], &[[f32; LANES]]) {
    let (at, blocks, packed) = (x.at(t), x.packed.blocks(), &x.packed.int16);
    let (lines, scales) = (blocks * 2 * VECTORS, blocks.div_ceil(BLOCKS_PER_SCALE));
    let words = packed.lines[at * lines..(at + 1) * lines].as_chunks::<2>().0.as_chunks().0;
    (words, &packed.scales[at * scales..(at + 1) * scales])
}

/// Returns the words and scales of T tokens from `first` on.
#[inline(always)]
fn digits_of<'a, const T: usize>(
    x: Tokens<'a>,
    first: usize,
) -> ([&'a [DigitBlock]; T], [&'a [[f32; LANES]]; T]) {
    let (mut words, mut scales) = ([&[] as &[DigitBlock]; T], [&[] as &[[f32; LANES]]; T]);
    for t in 0..T {
        (words[t], scales[t]) = digits(x, first + t);
    }
    (words, scales)
}

impl Int16Rows<'_> {
    /// Returns the index of a row's table.
    #[inline(always)]
    fn table(&self, row: usize) -> usize {
        self.group.divide(self.operands.rows.in_storage(row))
    }

    /// Returns the tables and bytes of four rows.
    #[inline(always)]
    fn four<L: I16x32>(&self, rows: &[usize; ROWS]) -> ([L::Table; ROWS], [&[u8]; ROWS]) {
        let mut tables = [L::load_i16_table(&self.lut.tables[self.table(rows[0])]); ROWS];
        let mut bytes = [&[] as &[u8]; ROWS];
        for i in 0..ROWS {
            tables[i] = L::load_i16_table(&self.lut.tables[self.table(rows[i])]);
            // SAFETY: every row of a tile is a row of the matrix.
            bytes[i] = unsafe { self.operands.rows.bytes(rows[i]) };
        }
        (tables, bytes)
    }
}

/// Steps of sixteen rows.
#[derive(Clone, Copy)]
struct RowSteps([f32; LANES]);

impl<L: Simd> RowScales<L> for RowSteps {
    #[inline(always)]
    fn results(&self, _: Tokens<'_>, _: usize, sums: L) -> L {
        L::load(&self.0).mul(sums)
    }
    #[inline(always)]
    fn result(&self, _: Tokens<'_>, _: usize, i: usize, sum: f32) -> f32 {
        self.0[i] * sum
    }
}

impl<L: Simd> Tile<L> for RegisterTile<'_, Int16Rows<'_>, RowSteps> {
    /// Sums of R rows and T tokens in two digits take sixteen registers of 32, and one lookup serves T tokens. Fewer registers
    /// hold six sums and four words.
    const WIDTHS: &'static [usize] = match L::REGISTERS {
        _ if L::IS_REFERENCE => &[],
        ..32 => &[3, 2],
        _ => &[4, 3, 2],
    };
    #[inline(always)]
    fn multiply<const T: usize>(&mut self, first: usize) -> usize {
        let (product, rows) = (self.product, &self.rows);
        let sums = if const { L::REGISTERS < 32 } {
            by_register::<L, T>(product, rows, self.n, first)
        } else if const { T > 2 } {
            by_vector::<L, { ROWS / 2 }, T>(product, rows, first)
        } else {
            by_vector::<L, ROWS, T>(product, rows, first)
        };
        self.store(first, &sums)
    }
}

impl<L: Simd> Product<L> for Int16Rows<'_> {
    /// Scalar code has panels only, so that there is less of it.
    const MOST_IN_REGISTERS: usize = match L::REGISTERS {
        _ if L::IS_REFERENCE => 0,
        ..32 => 3,
        _ => SMALL_BATCH,
    };
    /// The panels of sixteen rows stay in L1 with a token's words.
    const PANELS: Option<Panels> = match L::REGISTERS {
        ..32 => {
            let lines = LINES_PER_SCALE;
            Some(Panels { rows: ROWS_PER_PASS, tiles_of_few: 1, lines_of_few: lines, lines })
        }
        _ => None,
    };
    type Line = [u8; 64];
    type Scales = RowSteps;

    #[inline(always)]
    fn operands(&self) -> &TileOperands<'_> {
        &self.operands
    }

    #[inline(always)]
    fn lines(&self) -> usize {
        self.operands.x.packed.blocks() * VECTORS
    }

    #[inline(always)]
    fn scales(&self, rows: &[usize]) -> RowSteps {
        let mut steps = [0.0; LANES];
        for (i, &r) in rows.iter().enumerate() {
            steps[i] = self.lut.steps[self.table(r)];
        }
        RowSteps(steps)
    }

    #[inline(always)]
    fn decode(
        &self,
        row: usize,
        lines: &Range<usize>,
        distance: usize,
        k: usize,
        out: &mut [[[u8; 64]; ROWS]],
    ) {
        let table = L::load_i16_table(&self.lut.tables[self.table(row)]);
        // SAFETY: every row of a tile is a row of the matrix.
        let bytes = unsafe { self.operands.rows.bytes(row) };
        let start = lines.start / VECTORS;
        if distance > 0 {
            let end = bytes.len().min(lines.end / VECTORS * BYTES);
            prefetch_after(&bytes[start * BYTES..end], distance);
        }
        for (b, out) in (start..).zip(out.as_chunks_mut::<VECTORS>().0) {
            let at = load_indices::<L>(&bytes[b * BYTES..]);
            L::store_bytes(L::lookup_i16::<0>(table, at), &mut out[0][k]);
            L::store_bytes(L::lookup_i16::<1>(table, at), &mut out[1][k]);
            L::store_bytes(L::lookup_i16::<2>(table, at), &mut out[2][k]);
            L::store_bytes(L::lookup_i16::<3>(table, at), &mut out[3][k]);
        }
    }

    #[inline(always)]
    fn multiply_decoded(rows: DecodedRows<'_, [u8; 64], RowSteps>) {
        let tokens = rows.x.len();
        multiply_tokens::<L, _>(&mut ByTile(rows, Int16Tile), tokens);
    }

    #[inline(always)]
    fn add_products(panel: Panel<'_, [u8; 64]>) {
        let blocks = panel.columns.start / VECTORS..panel.columns.end / VECTORS;
        // Made once, because making it divides.
        let tiles = panel.lines.as_chunks::<VECTORS>().0.chunks_exact(blocks.len());
        for (t, totals) in panel.tokens.zip(panel.totals) {
            let (words, scales) = digits(panel.x, t);
            let scale = &scales[blocks.start / BLOCKS_PER_SCALE];
            for (tile, totals) in tiles.clone().zip(totals.as_chunks_mut().0) {
                add_tile::<L>(tile, &words[blocks.clone()], scale, totals);
            }
        }
    }
}

/// Loads a block of indices; zeros follow the row's end.
#[inline(always)]
fn load_indices<L: I16x32>(bytes: &[u8]) -> L::Bytes {
    match bytes.first_chunk::<BYTES>() {
        Some(bytes) => L::load_bytes(bytes),
        None => L::load_partial_bytes(bytes),
    }
}

/// Joins the sums of the digits: `4096 * high + low`.
#[inline(always)]
fn join_digits<L: I16x32>([high, low]: [L::Sums; 2]) -> L {
    L::sums_to_f32(high).mul_add(L::splat(RADIX), L::sums_to_f32(low))
}

/// Returns the lane sums of four rows and T tokens, R rows at a time; looks the words up into registers.
#[inline(always)]
fn by_vector<L: Simd, const R: usize, const T: usize>(
    s: &Int16Rows<'_>,
    rows: &[usize; ROWS],
    first: usize,
) -> [[L; ROWS]; T] {
    let (tables, bytes) = s.four::<L>(rows);
    let (tokens, scales) = digits_of::<T>(s.operands.x, first);
    let blocks = s.operands.x.packed.blocks();
    // Blocks that are whole in all rows, which have equal lengths.
    let whole = blocks.min(bytes[0].len() / BYTES);
    assert!(tokens.iter().all(|t| t.len() == blocks));
    let mut totals = [[L::splat(0.0); ROWS]; T];
    for part in 0..blocks.div_ceil(BLOCKS_PER_SCALE) {
        let end = blocks.min((part + 1) * BLOCKS_PER_SCALE);
        for start in (0..ROWS).step_by(R) {
            let mut sums = [[[L::zero_sums(); 2]; R]; T];
            for b in part * BLOCKS_PER_SCALE..end {
                let mut at = [L::load_bytes(&[0; 64]); R];
                for i in 0..R {
                    at[i] = if b < whole {
                        // SAFETY: b is below `whole`.
                        let bytes = unsafe { bytes[start + i].get_unchecked(b * BYTES..(b + 1) * BYTES) };
                        if first == 0 {
                            prefetch_after(bytes, PREFETCH_DISTANCE);
                        }
                        L::load_bytes(bytes.first_chunk().expect("a block"))
                    } else {
                        L::load_partial_bytes(&bytes[start + i][b * BYTES..])
                    };
                }
                let mut x = [&NOTHING; T];
                for t in 0..T {
                    // SAFETY: b is below `blocks`, the number of blocks of each token.
                    x[t] = unsafe { tokens[t].get_unchecked(b) };
                }
                let tables = tables[start..].first_chunk().expect("R tables");
                accumulate_vector::<L, R, T, 0>(tables, &at, &x, &mut sums);
                accumulate_vector::<L, R, T, 1>(tables, &at, &x, &mut sums);
                accumulate_vector::<L, R, T, 2>(tables, &at, &x, &mut sums);
                accumulate_vector::<L, R, T, 3>(tables, &at, &x, &mut sums);
            }
            for t in 0..T {
                let scale = L::load(&scales[t][part]);
                for i in 0..R {
                    let total = &mut totals[t][start + i];
                    *total = join_digits::<L>(sums[t][i]).mul_add(scale, *total);
                }
            }
        }
    }
    totals
}

/// Adds the products of vector J of a block, of R rows and T tokens.
#[inline(always)]
fn accumulate_vector<L: Simd, const R: usize, const T: usize, const J: usize>(
    tables: &[L::Table; R],
    at: &[L::Bytes; R],
    x: &[&DigitBlock; T],
    sums: &mut [[[L::Sums; 2]; R]; T],
) {
    for i in 0..R {
        let w = L::lookup_i16::<J>(tables[i], at[i]);
        for t in 0..T {
            for digit in 0..2 {
                sums[t][i][digit] = L::dot_i16(sums[t][i][digit], w, &x[t][J][digit]);
            }
        }
    }
}

/// Rows as words, in order of blocks and vectors.
struct Int16Tile;

impl<L: Simd> DecodedTile<L> for Int16Tile {
    /// 24 sums and four vectors of weights fit into the registers of AVX-512.
    const WIDTHS: &'static [usize] = &[3, 2];
    #[inline(always)]
    fn sums<const T: usize>(tile: &[[[u8; 64]; ROWS]], x: Tokens<'_>, first: usize) -> [[L; ROWS]; T] {
        let (tokens, scales) = digits_of::<T>(x, first);
        let mut totals = [[L::splat(0.0); ROWS]; T];
        for (part, blocks) in tile.as_chunks::<VECTORS>().0.chunks(BLOCKS_PER_SCALE).enumerate() {
            let mut sums = [[[L::zero_sums(); 2]; ROWS]; T];
            for (b, words) in (part * BLOCKS_PER_SCALE..).zip(blocks) {
                for j in 0..VECTORS {
                    let mut w = [L::load_bytes(&words[j][0]); ROWS];
                    for k in 1..ROWS {
                        w[k] = L::load_bytes(&words[j][k]);
                    }
                    for t in 0..T {
                        // SAFETY: tokens have as many blocks as the rows.
                        let x = unsafe { &tokens[t].get_unchecked(b)[j] };
                        for (digit, x) in x.iter().enumerate() {
                            for k in 0..ROWS {
                                sums[t][k][digit] = L::dot_i16(sums[t][k][digit], w[k], x);
                            }
                        }
                    }
                }
            }
            for t in 0..T {
                let scale = L::load(&scales[t][part]);
                for k in 0..ROWS {
                    totals[t][k] = join_digits::<L>(sums[t][k]).mul_add(scale, totals[t][k]);
                }
            }
        }
        totals
    }
}

/// Scales the sums of register r and adds them to its lanes of `total`.
#[inline(always)]
fn add_scaled<L: Simd>(
    [high, low]: [L::SumRegister; 2],
    scale: &[f32; LANES],
    r: usize,
    total: &mut [f32; LANES],
) {
    let (high, low) = (L::sum_register_to_f32(high), L::sum_register_to_f32(low));
    let sum = L::mul_add_register(high, L::load_register(&[RADIX; LANES], r), low);
    add_register::<L>(sum, L::load_register(scale, r), r, total);
}

/// Returns the lane sums of four rows, of which n exist, and T tokens; each register of words is looked up once and
/// multiplied by each token.
#[inline(always)]
fn by_register<L: Simd, const T: usize>(
    s: &Int16Rows<'_>,
    rows: &[usize; ROWS],
    n: usize,
    first: usize,
) -> [[L; ROWS]; T] {
    let (tables, bytes) = s.four::<L>(rows);
    let (tokens, scales) = digits_of::<T>(s.operands.x, first);
    let all = s.operands.x.packed.blocks();
    let mut totals = [[[0f32; LANES]; ROWS]; T];
    for (part, start) in (0..all).step_by(BLOCKS_PER_SCALE).enumerate() {
        let end = all.min(start + BLOCKS_PER_SCALE);
        let mut words = [&[] as &[DigitBlock]; T];
        for t in 0..T {
            words[t] = &tokens[t][start..end];
        }
        for i in 0..n {
            let bytes = &bytes[i][start * BYTES..];
            let bytes = &bytes[..bytes.len().min((end - start) * BYTES)];
            prefetch_after(bytes, PREFETCH_DISTANCE);
            let mut last = [[0; BYTES]; BLOCKS_PER_SCALE];
            let blocks = match bytes.as_chunks::<BYTES>() {
                (blocks, []) => blocks,
                _ => {
                    last.as_flattened_mut()[..bytes.len()].copy_from_slice(bytes);
                    &last[..end - start]
                }
            };
            for r in 0..L::REGISTERS_PER_VECTOR {
                let mut sums = [[L::zero_sum_register(); 2]; T];
                for (b, at) in blocks.iter().enumerate() {
                    let w = L::lookup_word_registers(tables[i], at, r);
                    for j in 0..VECTORS {
                        for t in 0..T {
                            // SAFETY: tokens have as many blocks as a row, from `start` to `end`.
                            let x = unsafe { &words[t].get_unchecked(b)[j] };
                            for digit in 0..2 {
                                let x = L::load_word_register(&x[digit], r);
                                sums[t][digit] = L::dot_word_register(sums[t][digit], w[j], x);
                            }
                        }
                    }
                }
                for t in 0..T {
                    add_scaled::<L>(sums[t], &scales[t][part], r, &mut totals[t][i]);
                }
            }
        }
    }
    let mut sums = [[L::splat(0.0); ROWS]; T];
    for t in 0..T {
        for i in 0..ROWS {
            sums[t][i] = L::load(&totals[t][i]);
        }
    }
    sums
}

/// Adds a token's products with a tile's words to its lanes, two rows at a time.
#[inline(always)]
fn add_tile<L: Simd>(
    tile: &[[[[u8; 64]; ROWS]; VECTORS]],
    words: &[DigitBlock],
    scale: &[f32; LANES],
    totals: &mut [[f32; LANES]; ROWS],
) {
    const R: usize = ROWS / 2;
    for (half, totals) in totals.as_chunks_mut::<R>().0.iter_mut().enumerate() {
        for r in 0..L::REGISTERS_PER_VECTOR {
            let mut sums = [[L::zero_sum_register(); 2]; R];
            for (rows, x) in tile.iter().zip(words) {
                for j in 0..VECTORS {
                    let high = L::load_word_register(&x[j][0], r);
                    let low = L::load_word_register(&x[j][1], r);
                    for k in 0..R {
                        let w = L::load_word_register(&rows[j][half * R + k], r);
                        sums[k][0] = L::dot_word_register(sums[k][0], w, high);
                        sums[k][1] = L::dot_word_register(sums[k][1], w, low);
                    }
                }
            }
            for k in 0..R {
                add_scaled::<L>(sums[k], scale, r, &mut totals[k]);
            }
        }
    }
}

#[cfg(test)]
#[path = "int16_tests.rs"]
mod tests;
