//! Approximate matmul of 8-bit codes on processors that multiply 16-bit words only: AVX2.
//!
//! ```text
//! 32 bytes of codes   even bytes, as words | odd bytes, as words     widened once, 8 rows and 1024 columns at a time: 16 KB
//! 32 bytes of x       even bytes, as words | odd bytes, as words     widened in registers, once for 8 rows
//! sum of lane l       codes 4 l, 4 l + 2 of the even words, then 4 l + 1, 4 l + 3 of the odd ones
//! ```
//!
//! A dot product of bytes would widen both factors each time: nine instructions for 32 products, of which four remain
//! here. Sums of integers are exact, so the results have the bits of [`super::int8`].
//! 64 tokens of LUT4 take 2230 us where the f32 loop of AVX2 takes 4150 (`--example matmul`).

use super::int8_codes::{Format, Weights, decode_block};
use super::schedule::*;
use crate::activations::I8_BLOCKS_PER_SCALE as BLOCKS_PER_SCALE;
use crate::memory::{AlignedVec, CacheLevel, prefetch};
use crate::simd::{I16x32, Kernel, LANES, Simd};
use std::cell::RefCell;

/// Rows of a piece: eight sums, two words of x and one of codes fit into the registers of AVX2.
const PIECE_ROWS: usize = 8;
/// Lines of words per block: even and odd bytes of its two lines of codes.
const LINES: usize = 4;

/// One line of words for each row of a piece.
type WordLines = [[u8; 64]; PIECE_ROWS]; // [8, 32] i16

thread_local! {
    /// Words of a thread's piece.
    static WORDS: RefCell<AlignedVec<[u8; 64]>> = const { RefCell::new(AlignedVec::new()) };
}

/// Multiplies all rows of a part by several tokens.
#[inline(always)]
pub(super) fn multiply_tiles<L: Simd, F: Format>(
    s: &Weights<'_>,
    format: F,
    rows: &RowTiles,
    y: &OutputRows<'_>,
) {
    let (blocks, tokens, first_row) = (s.x.x.blocks(), s.x.tokens(), s.w.first);
    let (mut words, mut totals) = (WORDS.take(), LANE_SUMS.take());
    words.grow(BLOCKS_PER_SCALE * LINES * PIECE_ROWS, [0; 64]);
    totals.grow(tokens.min(PIECE_TOKENS) * ROWS_PER_PASS, [0.0; LANES]);
    let distance = if tokens <= SMALL_BATCH { PREFETCH_DISTANCE } else { ROWS_PER_PASS * s.rows.row_bytes() };
    for (which, n) in rows.rows::<ROWS_PER_PASS>() {
        let which = &which[..n];
        let (mut steps, mut lows) = ([0.0; ROWS_PER_PASS], [0.0; ROWS_PER_PASS]);
        for (i, &r) in which.iter().enumerate() {
            (steps[i], lows[i]) = format.row::<L>(first_row + r).1;
        }
        for first in (0..tokens).step_by(PIECE_TOKENS) {
            let n = PIECE_TOKENS.min(tokens - first);
            totals[..n * ROWS_PER_PASS].fill([0.0; LANES]);
            for (part, start) in (0..blocks).step_by(BLOCKS_PER_SCALE).enumerate() {
                let end = blocks.min(start + BLOCKS_PER_SCALE);
                for (half, which) in which.chunks(PIECE_ROWS).enumerate() {
                    let words = words.as_chunks_mut::<PIECE_ROWS>().0;
                    for (i, &r) in which.iter().enumerate() {
                        let code = format.row::<L>(first_row + r).0;
                        // SAFETY: every row of a tile is a row of the matrix.
                        let bytes = unsafe { s.rows.row(r) };
                        for (b, out) in (start..end).zip(words.as_chunks_mut::<LINES>().0) {
                            if first == 0 {
                                prefetch_block::<L, F>(bytes, b, distance);
                            }
                            let (low, high) = decode_block::<L, F::Code<L>>(code, bytes, b);
                            let ([a, b], [c, d]) = (L::widen_codes(low), L::widen_codes(high));
                            L::store_bytes(a, &mut out[0][i]);
                            L::store_bytes(b, &mut out[1][i]);
                            L::store_bytes(c, &mut out[2][i]);
                            L::store_bytes(d, &mut out[3][i]);
                        }
                    }
                    let words = &words[..(end - start) * LINES];
                    let columns = ScaledColumns { part, start, first, n };
                    let product = AddProducts { words, x: s.x, columns, half, totals: &mut totals };
                    // SAFETY: this function was compiled for L's instructions, so the processor has them.
                    unsafe { L::call(product) };
                }
            }
            for (t, totals) in (first..first + n).zip(totals.as_chunks().0) {
                let sums = add_lanes::<L>(totals, which.len().div_ceil(ROWS));
                let sum = L::splat(s.x.x.int8.sums[s.x.at(t)]);
                store_rows(y, which, t, L::load(&steps).mul(sums).add(L::load(&lows).mul(sum)));
            }
        }
    }
    WORDS.set(words);
    LANE_SUMS.set(totals);
}

/// Prefetches the bytes `distance` after block b of a row.
#[inline(always)]
fn prefetch_block<L: Simd, F: Format>(bytes: &[u8], b: usize, distance: usize) {
    use super::int8_codes::Coded;
    let size = F::Code::<L>::BYTES;
    prefetch(CacheLevel::L2, bytes.as_ptr().wrapping_add(b * size + distance), size);
}

/// Columns under one scale from block `start` on, and n tokens from `first` on.
#[derive(Clone, Copy)]
struct ScaledColumns {
    part: usize,
    start: usize,
    first: usize,
    n: usize,
}

/// Adds a piece's products to the lanes of its rows, rows `8 half ..` of sixteen.
struct AddProducts<'a> {
    words: &'a [WordLines], // [blocks, 4]
    x: TokenSelection<'a>,
    columns: ScaledColumns,
    half: usize,
    totals: &'a mut [[f32; LANES]], // [tokens, 16, 16]
}

impl Kernel for AddProducts<'_> {
    type Output = ();
    const HAS_DOT_PRODUCTS: bool = true;
    #[inline(always)]
    fn run<S: Simd>(self) {
        let AddProducts { words, x, columns, half, totals } = self;
        let (blocks, int8) = (x.x.blocks(), &x.x.int8);
        let scaled = blocks.div_ceil(BLOCKS_PER_SCALE);
        for t in 0..columns.n {
            let token = x.at(columns.first + t);
            let bytes = &int8.bytes[(token * blocks + columns.start) * 2..][..words.len() / 2];
            let scale = &int8.scales[token * scaled + columns.part];
            let totals =
                totals[t * ROWS_PER_PASS + half * PIECE_ROWS..].first_chunk_mut().expect("eight rows");
            add_token::<S>(words, bytes, scale, totals);
        }
    }
}

/// Adds the products of eight rows and one token to their lanes.
#[inline(always)]
fn add_token<L: I16x32>(
    words: &[WordLines],
    x: &[[u8; 64]],
    scale: &[f32; LANES],
    totals: &mut [[f32; LANES]; PIECE_ROWS],
) {
    for r in 0..L::REGISTERS_PER_VECTOR {
        let mut sums = [L::zero_sum_register(); PIECE_ROWS];
        for (words, x) in words.as_chunks::<2>().0.iter().zip(x) {
            let x = L::widen_signed_register(x, r);
            for (words, x) in words.iter().zip(x) {
                for k in 0..PIECE_ROWS {
                    sums[k] = L::dot_word_register(sums[k], L::load_word_register(&words[k], r), x);
                }
            }
        }
        let scale = L::load_register(scale, r);
        for k in 0..PIECE_ROWS {
            let before = L::load_register(&totals[k], r);
            let total = L::mul_add_register(L::sum_register_to_f32(sums[k]), scale, before);
            L::store_register(total, &mut totals[k], r);
        }
    }
}
