//! Exact matmul of 4-bit indices into tables of whole numbers.
//!
//! ```text
//! weight      w = step * i,  |i| < 2^15          looked up as 16-bit words, 32 at a time (f32: 16)
//! activation  x = scale * (4096 * high + low)    see `activations::i24`
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
use crate::activations::{I24_BLOCKS_PER_SCALE as BLOCKS_PER_SCALE, I24_VECTORS as VECTORS};
use crate::lut_tables::Int16Lut;
use crate::matrix::{BLOCK, Divisor};
use crate::memory::{AlignedVec, CacheLevel, Prefetch};
use crate::simd::{I16x32, Kernel, LANES, Simd, dispatch};
use crate::weight_format::WeightFormat;
use crate::{Isa, Matrix};
use std::cell::RefCell;
use std::ops::Range;

/// Bytes of a row's block.
const BYTES: usize = BLOCK / 2;
/// Radix of an activation's digits: activation = 4096 * high + low.
const RADIX: f32 = 4096.0;
/// Tokens per pass over decoded rows: their 24 sums and four vectors of weights fit into the registers of AVX-512.
const TOKENS_PER_PASS: usize = 3;
/// Tokens that words in registers are multiplied by: six sums and four words fit into the registers of AVX2.
const REGISTER_TOKENS: usize = 3;
/// Lines of a tile's words under one scale.
const PIECE_LINES: usize = BLOCKS_PER_SCALE * VECTORS * ROWS;

/// Multiplies some rows of `w`, whose tables `lut` holds, by all selected tokens, none of which is refused (see
/// `activations::i24`).
pub(super) fn multiply_rows(
    isa: Isa,
    w: &Matrix<'_>,
    lut: &Int16Lut,
    x: TokenSelection<'_>,
    rows: &RowTiles,
    y: &OutputRows<'_>,
) {
    let WeightFormat::Lut { bits: 4, rows_per_table } = w.weight.format else {
        unreachable!("tables of sixteen entries")
    };
    let group = Divisor::new(rows_per_table);
    let weights =
        Int16Weights { rows: RowBytes::new(w, w.weight.elements, 4), first: w.first, lut, group, x };
    dispatch(isa, MultiplyRowsInt16 { weights, rows, y });
}

struct MultiplyRowsInt16<'a> {
    weights: Int16Weights<'a>,
    rows: &'a RowTiles,
    y: &'a OutputRows<'a>,
}

impl Kernel for MultiplyRowsInt16<'_> {
    type Output = ();
    const HAS_DOT_PRODUCTS: bool = true;
    #[inline(always)]
    fn run<S: Simd>(self) {
        multiply_tiles::<S>(&self.weights, self.rows, self.y);
    }
}

/// Holds the indices, tables and activations of a matmul.
struct Int16Weights<'a> {
    rows: RowBytes<'a>,
    /// Row of the storage that is row 0 of the matrix.
    first: usize,
    lut: &'a Int16Lut,
    group: Divisor,
    x: TokenSelection<'a>,
}

impl Int16Weights<'_> {
    /// Returns a row's table and its step.
    #[inline(always)]
    fn row<L: I16x32>(&self, row: usize) -> (L::Table, f32) {
        let at = self.group.divide(self.first + row);
        (L::load_i16_table(&self.lut.tables[at]), self.lut.steps[at])
    }

    /// Returns a token's words and scales.
    #[inline(always)]
    fn token(&self, t: usize) -> (&[DigitBlock], &[[f32; LANES]]) {
        let (at, x) = (self.x.at(t), self.x.x);
        let blocks = x.blocks();
        let (lines, scaled) = (blocks * 2 * VECTORS, blocks.div_ceil(BLOCKS_PER_SCALE));
        let words = x.int24.words[at * lines..(at + 1) * lines].as_chunks::<2>().0.as_chunks().0;
        (words, &x.int24.scales[at * scaled..(at + 1) * scaled])
    }
}

/// Words of a token's block: for each of four vectors the high digits, then the low digits.
type DigitBlock = [[[u8; 64]; 2]; VECTORS];

const NOTHING: DigitBlock = [[[0; 64]; 2]; VECTORS];

thread_local! {
    static DECODED: RefCell<AlignedVec<[u8; 64]>> = const { RefCell::new(AlignedVec::new()) };
}

/// Multiplies all rows of a part by all tokens.
#[inline(always)]
fn multiply_tiles<L: Simd>(s: &Int16Weights<'_>, rows: &RowTiles, y: &OutputRows<'_>) {
    let tokens = s.x.tokens();
    if L::REGISTERS < 32 {
        // Loops, not closures: a closure passed to another function is compiled without this function's instructions.
        if tokens <= REGISTER_TOKENS {
            for (which, n) in rows.each() {
                match tokens {
                    REGISTER_TOKENS => register_tile::<L, REGISTER_TOKENS>(s, &which[..n], y),
                    2 => register_tile::<L, 2>(s, &which[..n], y),
                    _ => register_tile::<L, 1>(s, &which[..n], y),
                }
            }
            return;
        }
        let mut memory = (DECODED.take(), LANE_SUMS.take());
        memory.0.grow(TILES_PER_PASS * PIECE_LINES, [0; 64]);
        memory.1.grow(tokens.min(PIECE_TOKENS) * ROWS_PER_PASS, [0.0; LANES]);
        if tokens <= SMALL_BATCH {
            for (which, n) in rows.each() {
                multiply_in_pieces::<L>(s, &which[..n], PREFETCH_DISTANCE, &mut memory, y);
            }
        } else {
            for (which, n) in rows.rows::<ROWS_PER_PASS>() {
                let next = ROWS_PER_PASS * s.rows.row_bytes();
                multiply_in_pieces::<L>(s, &which[..n], next, &mut memory, y);
            }
        }
        DECODED.set(memory.0);
        LANE_SUMS.set(memory.1);
        return;
    }
    if tokens <= SMALL_BATCH {
        for (which, n) in rows.each() {
            let mut t = 0;
            while t < tokens {
                t += match tokens - t {
                    // Sums of R rows and T tokens in two digits: sixteen registers. One lookup serves T tokens.
                    4.. => small_batch_tile::<L, { ROWS / 2 }, 4>(s, (which, n), t, y),
                    3 => small_batch_tile::<L, { ROWS / 2 }, 3>(s, (which, n), t, y),
                    2 => small_batch_tile::<L, ROWS, 2>(s, (which, n), t, y),
                    _ => small_batch_tile::<L, ROWS, 1>(s, (which, n), t, y),
                };
            }
        }
        return;
    }
    let lines = s.x.x.blocks() * VECTORS;
    let mut memory = DECODED.take();
    memory.grow(ROWS_PER_PASS * lines, [0; 64]);
    for (which, n) in rows.rows::<ROWS_PER_PASS>() {
        let which = &which[..n];
        let mut steps = [0.0; LANES];
        for (i, &r) in which.iter().enumerate() {
            let (table, step) = s.row::<L>(r);
            steps[i] = step;
            // SAFETY: every row of a tile is a row of the matrix.
            let bytes = unsafe { s.rows.row(r) };
            let tile = memory[i / ROWS * ROWS * lines..][..ROWS * lines].as_chunks_mut().0;
            for (b, out) in tile.as_chunks_mut::<VECTORS>().0.iter_mut().enumerate() {
                let at = indices::<L>(bytes, b);
                store_words::<L>(table, at, i % ROWS, out);
            }
        }
        let decoded = DecodedInt16 { words: memory.as_chunks().0, steps, next: s.rows.prefetch_after(which) };
        let mut t = 0;
        while t < tokens {
            t += match tokens - t {
                TOKENS_PER_PASS.. => large_batch_tiles::<L, TOKENS_PER_PASS>(&decoded, which, s, t, y),
                2.. => large_batch_tiles::<L, 2>(&decoded, which, s, t, y),
                _ => large_batch_tiles::<L, 1>(&decoded, which, s, t, y),
            };
        }
    }
    DECODED.set(memory);
}

/// Loads block b of a row; zeros follow the row's end.
#[inline(always)]
fn indices<L: I16x32>(bytes: &[u8], b: usize) -> L::Bytes {
    let bytes = &bytes[b * BYTES..];
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

/// Multiplies four rows, of which n exist, by T tokens, R rows at a time; looks the words up into registers. Returns T.
#[inline(always)]
fn small_batch_tile<L: Simd, const R: usize, const T: usize>(
    s: &Int16Weights<'_>,
    (which, n): ([usize; ROWS], usize),
    first: usize,
    y: &OutputRows<'_>,
) -> usize {
    // Loops, not closures: a closure passed to another function is compiled without this function's instructions.
    let (table, step) = s.row::<L>(which[0]);
    let (mut tables, mut steps, mut bytes) = ([table; ROWS], [step; ROWS], [&[] as &[u8]; ROWS]);
    for i in 0..ROWS {
        (tables[i], steps[i]) = s.row::<L>(which[i]);
        // SAFETY: every row of a tile is a row of the matrix.
        bytes[i] = unsafe { s.rows.row(which[i]) };
    }
    let (mut tokens, mut scales) = ([&[] as &[DigitBlock]; T], [&[] as &[[f32; LANES]]; T]);
    for t in 0..T {
        (tokens[t], scales[t]) = s.token(first + t);
    }
    let blocks = s.x.x.blocks();
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
                            prefetch_row(bytes);
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
    for t in 0..T {
        for (i, total) in L::horizontal_sums(totals[t]).into_iter().enumerate().take(n) {
            store(y, which[i], first + t, steps[i] * total);
        }
    }
    T
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
            for piece in 0..2 {
                sums[t][i][piece] = L::dot_i16(sums[t][i][piece], w, &x[t][J][piece]);
            }
        }
    }
}

/// Holds up to sixteen decoded rows as words.
struct DecodedInt16<'a> {
    words: &'a [[[u8; 64]; ROWS]], // [tiles, blocks, 4, 4, 32] i16
    steps: [f32; LANES],
    /// The rows that are decoded next.
    next: Prefetch,
}

/// Multiplies decoded rows by T tokens from `first` on. Returns T.
#[inline(always)]
fn large_batch_tiles<L: Simd, const T: usize>(
    rows: &DecodedInt16<'_>,
    which: &[usize],
    s: &Int16Weights<'_>,
    first: usize,
    y: &OutputRows<'_>,
) -> usize {
    let (mut tokens, mut scales) = ([&[] as &[DigitBlock]; T], [&[] as &[[f32; LANES]]; T]);
    for t in 0..T {
        (tokens[t], scales[t]) = s.token(first + t);
    }
    let (blocks, all) = (s.x.x.blocks(), s.x.tokens());
    let tiles = if blocks == 0 { 0 } else { which.len().div_ceil(ROWS) };
    let mut partial_sums = [[L::splat(0.0); TILES_PER_PASS]; T];
    for i in 0..tiles {
        let words = rows.words[i * blocks * VECTORS..][..blocks * VECTORS].as_chunks::<VECTORS>().0;
        let piece = first * tiles + i * T;
        rows.next.prefetch_pieces(piece..piece + T, all * tiles);
        let mut totals = [[L::splat(0.0); ROWS]; T];
        for part in 0..blocks.div_ceil(BLOCKS_PER_SCALE) {
            let columns = part * BLOCKS_PER_SCALE..blocks.min((part + 1) * BLOCKS_PER_SCALE);
            // SAFETY: words and tokens have `blocks` blocks.
            let sums = unsafe { accumulate::<L, T>(words, &tokens, columns) };
            for t in 0..T {
                let scale = L::load(&scales[t][part]);
                for k in 0..ROWS {
                    totals[t][k] = join_digits::<L>(sums[t][k]).mul_add(scale, totals[t][k]);
                }
            }
        }
        for t in 0..T {
            partial_sums[t][i] = L::partial_sums(totals[t]);
        }
    }
    for t in 0..T {
        let sums = L::finish_partial_sums(partial_sums[t]);
        store_rows(y, which, first + t, L::load(&rows.steps).mul(sums));
    }
    T
}

/// Returns the sums of products of four rows and T tokens over the blocks `blocks`, for the high and low digits.
///
/// # Safety
/// Rows and tokens have these blocks.
#[inline(always)]
unsafe fn accumulate<L: Simd, const T: usize>(
    words: &[[[[u8; 64]; ROWS]; VECTORS]],
    tokens: &[&[DigitBlock]; T],
    blocks: Range<usize>,
) -> [[[L::Sums; 2]; ROWS]; T] {
    let mut sums = [[[L::zero_sums(); 2]; ROWS]; T];
    for b in blocks {
        for j in 0..VECTORS {
            // SAFETY: the caller promises these blocks.
            let words = unsafe { &words.get_unchecked(b)[j] };
            let mut w = [L::load_bytes(&words[0]); ROWS];
            for k in 1..ROWS {
                w[k] = L::load_bytes(&words[k]);
            }
            for t in 0..T {
                // SAFETY: the caller promises these blocks.
                let x = unsafe { &tokens[t].get_unchecked(b)[j] };
                for (piece, x) in x.iter().enumerate() {
                    for k in 0..ROWS {
                        sums[t][k][piece] = L::dot_i16(sums[t][k][piece], w[k], x);
                    }
                }
            }
        }
    }
    sums
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
    let before = L::load_register(total, r);
    L::store_register(L::mul_add_register(sum, L::load_register(scale, r), before), total, r);
}

/// Multiplies up to four rows by all T tokens; each register of words is looked up once and multiplied by each token.
#[inline(always)]
fn register_tile<L: Simd, const T: usize>(s: &Int16Weights<'_>, which: &[usize], y: &OutputRows<'_>) {
    let (table, step) = s.row::<L>(which[0]);
    let (mut tables, mut steps, mut bytes) = ([table; ROWS], [step; ROWS], [&[] as &[u8]; ROWS]);
    for (i, &r) in which.iter().enumerate() {
        (tables[i], steps[i]) = s.row::<L>(r);
        // SAFETY: every row of a tile is a row of the matrix.
        bytes[i] = unsafe { s.rows.row(r) };
    }
    let (mut tokens, mut scales) = ([&[] as &[DigitBlock]; T], [&[] as &[[f32; LANES]]; T]);
    for t in 0..T {
        (tokens[t], scales[t]) = s.token(t);
    }
    let mut totals = [[[0f32; LANES]; ROWS]; T];
    for (part, start) in (0..s.x.x.blocks()).step_by(BLOCKS_PER_SCALE).enumerate() {
        let end = s.x.x.blocks().min(start + BLOCKS_PER_SCALE);
        let mut words = [&[] as &[DigitBlock]; T];
        for t in 0..T {
            words[t] = &tokens[t][start..end];
        }
        for i in 0..which.len() {
            let bytes = &bytes[i][start * BYTES..];
            let bytes = &bytes[..bytes.len().min((end - start) * BYTES)];
            prefetch_row(bytes);
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
                            for piece in 0..2 {
                                let x = L::load_word_register(&x[piece], r);
                                sums[t][piece] = L::dot_word_register(sums[t][piece], w[j], x);
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
    for t in 0..T {
        let mut vectors = [L::splat(0.0); ROWS];
        for i in 0..ROWS {
            vectors[i] = L::load(&totals[t][i]);
        }
        let sums = L::horizontal_sums(vectors);
        for (i, &r) in which.iter().enumerate() {
            store(y, r, t, steps[i] * sums[i]);
        }
    }
}

/// Words of the rows of a pass under one scale, and the lane sums of each row and token.
type Int16Pieces = (AlignedVec<[u8; 64]>, AlignedVec<[f32; LANES]>);

/// Multiplies up to sixteen rows by all tokens. Decodes 512 columns of the rows at a time, which stay in L1 with a token's words.
#[inline(always)]
fn multiply_in_pieces<L: Simd>(
    s: &Int16Weights<'_>,
    which: &[usize],
    prefetch_distance: usize,
    (decoded, totals): &mut Int16Pieces,
    y: &OutputRows<'_>,
) {
    let (blocks, tokens) = (s.x.x.blocks(), s.x.tokens());
    let mut steps = [0.0; LANES];
    for first in (0..tokens).step_by(PIECE_TOKENS) {
        let n = PIECE_TOKENS.min(tokens - first);
        totals[..n * ROWS_PER_PASS].fill([0.0; LANES]);
        for (part, start) in (0..blocks).step_by(BLOCKS_PER_SCALE).enumerate() {
            let end = blocks.min(start + BLOCKS_PER_SCALE);
            for (i, &r) in which.iter().enumerate() {
                let (table, step) = s.row::<L>(r);
                steps[i] = step;
                // SAFETY: every row of a tile is a row of the matrix.
                let bytes = unsafe { s.rows.row(r) };
                if first == 0 {
                    let from = bytes.as_ptr().wrapping_add(start * BYTES + prefetch_distance);
                    crate::memory::prefetch(CacheLevel::L2, from, (end - start) * BYTES);
                }
                let tile = decoded[i / ROWS * PIECE_LINES..][..PIECE_LINES].as_chunks_mut().0;
                for (b, out) in (start..end).zip(tile.as_chunks_mut::<VECTORS>().0) {
                    store_words::<L>(table, indices::<L>(bytes, b), i % ROWS, out);
                }
            }
            let tiles = decoded.as_chunks::<ROWS>().0.as_chunks::<VECTORS>().0;
            for t in 0..n {
                let (words, scales) = s.token(first + t);
                let words = &words[start..end];
                for i in 0..which.len().div_ceil(ROWS) {
                    let tile = &tiles[i * BLOCKS_PER_SCALE..][..end - start];
                    let totals = &mut totals[t * ROWS_PER_PASS + i * ROWS..][..ROWS];
                    accumulate_piece::<L>(tile, words, &scales[part], totals);
                }
            }
        }
        for (t, totals) in (first..first + n).zip(totals.as_chunks().0) {
            let sums = add_lanes::<L>(totals, which.len().div_ceil(ROWS));
            store_rows(y, which, t, L::load(&steps).mul(sums));
        }
    }
}

/// Looks up a block of indices and stores its words as row i of a tile.
#[inline(always)]
fn store_words<L: Simd>(table: L::Table, at: L::Bytes, i: usize, out: &mut [[[u8; 64]; ROWS]; VECTORS]) {
    L::store_bytes(L::lookup_i16::<0>(table, at), &mut out[0][i]);
    L::store_bytes(L::lookup_i16::<1>(table, at), &mut out[1][i]);
    L::store_bytes(L::lookup_i16::<2>(table, at), &mut out[2][i]);
    L::store_bytes(L::lookup_i16::<3>(table, at), &mut out[3][i]);
}

/// Adds a token's products with a tile's words to its lanes, two rows at a time.
#[inline(always)]
fn accumulate_piece<L: Simd>(
    tile: &[[[[u8; 64]; ROWS]; VECTORS]],
    words: &[DigitBlock],
    scale: &[f32; LANES],
    totals: &mut [[f32; LANES]],
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
#[path = "int16_lut_tests.rs"]
mod tests;
