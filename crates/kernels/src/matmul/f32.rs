//! Exact matmul in f32, for any format.
//!
//! ```text
//! one token        decode a block of 4 rows into registers
//! AVX-512          2 to 8 tokens: the same, multiplied by 2 or 4 tokens   (see `Decode::REGISTER_TOKENS`, by format)
//!                  otherwise: decode 16 rows into memory, multiply by 6 tokens, 512 columns per pass
//! AVX2, NEON       decode 512 columns of 4 rows (up to 8 tokens) or 256 of 16 into L1, multiply a register of each row by
//!                  3 tokens
//! ```
//!
//! Formats whose rows no kernel reads in place are dequantized row by row first. Scalar code, the reference, always does so.

use super::decode::{self, Decode, VECTORS};
use super::schedule::*;
use super::tile_loop::*;
use crate::activations::BLOCK;
use crate::arithmetic::Arithmetic;
use crate::lut_tables::MXFP4_BLOCK;
use crate::matrix::Divisor;
use crate::memory::{CacheLevel, prefetch};
use crate::simd::{F32x16, Kernel, LANES, Simd, dispatch, has_half_tables};
use crate::weight_format::{IndexBits, IntBits, WeightFormat};
use crate::{Isa, Matrix};
use std::cell::RefCell;
use std::mem::MaybeUninit;
use std::ops::Range;

/// Multiplies some rows of `w` by all selected tokens.
pub(super) fn multiply_rows(isa: Isa, w: &Matrix<'_>, x: Tokens<'_>, tiles: &RowTiles, y: &OutputRows<'_>) {
    if isa == Isa::Scalar || !w.is_read_in_place() {
        return dequantize_fallback(isa, w, x, tiles, y);
    }
    let operands = TileOperands { rows: StoredRows::new(w), x, y };
    macro_rules! multiply {
        ($decoder:expr) => {
            dispatch(isa, MultiplyRows(F32Rows { decoder: $decoder, operands }, tiles))
        };
    }
    let (values, offset) = (w.values(), w.weight.offsets);
    match w.weight.format {
        WeightFormat::F32 => multiply!(decode::Single),
        WeightFormat::Fp16 => multiply!(decode::Half),
        WeightFormat::Lut { bits, rows_per_table } => {
            let (lut, group) = (values, Divisor::new(rows_per_table));
            let halves = match w.arithmetic {
                Arithmetic::F32OfHalves(halves) if has_half_tables(isa, 1 << bits.bits()) => Some(halves),
                _ => None,
            };
            match (bits, halves) {
                (IndexBits::One, _) => multiply!(decode::LutSmall::<1> { lut, group }),
                (IndexBits::Two, _) => multiply!(decode::LutSmall::<2> { lut, group }),
                (IndexBits::Three, _) => multiply!(decode::LutSmall::<3> { lut, group }),
                (IndexBits::Four, _) => multiply!(decode::LutSmall::<4> { lut, group }),
                (IndexBits::Six, None) => multiply!(decode::Lut6 { lut, group }),
                (IndexBits::Six, Some(lut)) => multiply!(decode::HalfLut6 { lut, group }),
                (IndexBits::Eight, None) => multiply!(decode::Lut8 { lut, group }),
                (IndexBits::Eight, Some(lut)) => multiply!(decode::HalfLut8 { lut, group }),
            }
        }
        WeightFormat::Mxfp4 { .. } => match w.arithmetic {
            Arithmetic::F32OfExponents(exponents) => {
                multiply!(decode::Mxfp4 { exponents, blocks: w.cols / MXFP4_BLOCK })
            }
            _ => unreachable!("see `Matrix::is_read_in_place`"),
        },
        WeightFormat::Int { bits, signed, block_rows, block_cols, .. } => {
            let scales = decode::Scales::new(values, offset, (block_rows, block_cols), w.cols);
            match bits {
                IntBits::Four if block_cols == w.cols => multiply!(decode::Int4Rows { scales, signed }),
                IntBits::Eight if block_cols == w.cols => multiply!(decode::WholeInt8Rows { scales, signed }),
                IntBits::Four => multiply!(decode::Int4 { scales, signed }),
                IntBits::Eight => {
                    let shift = block_cols.trailing_zeros().min(BLOCK.trailing_zeros());
                    multiply!(decode::Int8Blocks { scales, shift, signed })
                }
            }
        }
    }
}

/// Rows of one weight format, and what they are multiplied by.
#[derive(Clone, Copy)]
struct F32Rows<'a, D> {
    decoder: D,
    operands: TileOperands<'a>,
}

impl<D: Decode> Kernel for MultiplyRows<'_, F32Rows<'_, D>> {
    type Output = ();
    #[inline(always)]
    fn run<S: Simd>(self) {
        // Scalar code dequantizes first, and large tables of fp16 are f32 where their lookup is slow.
        if const { S::IS_REFERENCE || D::HALF_TABLE > S::LARGEST_HALF_TABLE } {
            unreachable!("see `multiply_rows`");
        }
        multiply_tiles::<S, _>(&self.0, self.1);
    }
}

impl<L: Simd, D: Decode> Tile<L> for RegisterTile<'_, F32Rows<'_, D>, ()> {
    const WIDTHS: &'static [usize] = match D::REGISTER_TOKENS {
        _ if L::REGISTERS < 32 => &[],
        (_, 4) => &[4, 2],
        _ => &[2],
    };
    #[inline(always)]
    fn multiply<const T: usize>(&mut self, first: usize) -> usize {
        let F32Rows { decoder: d, operands: TileOperands { rows: stored, x, .. } } = self.product;
        let rows = &self.rows;
        // Loops, not closures: a closure passed to another function is compiled without this function's instructions.
        let mut scales = [d.row::<L>(stored.in_storage(rows[0])); ROWS];
        let mut bytes: [&[u8]; ROWS] = [&[]; ROWS];
        for i in 0..ROWS {
            scales[i] = d.row::<L>(stored.in_storage(rows[i]));
            // SAFETY: every row of a tile is a row of the matrix.
            bytes[i] = unsafe { stored.bytes(rows[i]) };
        }
        let mut tokens: [&[[[f32; LANES]; VECTORS]]; T] = [&[]; T];
        for t in 0..T {
            tokens[t] = x.packed.vectors(x.at(first + t)).as_chunks().0;
        }
        let mut sums = [[L::splat(0.0); ROWS]; T];
        // Blocks that are whole in all rows.
        let (whole, blocks) = (bytes[0].len() / D::BYTES, tokens[0].len());
        let mut spaces = SPACES;
        for b in 0..whole {
            let mut blocks = [bytes[0]; ROWS];
            for i in 0..ROWS {
                blocks[i] = &bytes[i][b * D::BYTES..(b + 1) * D::BYTES];
                prefetch_block::<D>(blocks[i], PREFETCH_DISTANCE);
            }
            add_block::<L, D, T>(d, &scales, b, blocks, VECTORS, &tokens, &mut sums);
        }
        let rest = bytes[0].len() - whole * D::BYTES;
        if const { D::VECTOR_BYTES > 0 } && rest > 0 && rest.is_multiple_of(D::VECTOR_BYTES) {
            let mut last = [bytes[0]; ROWS];
            for i in 0..ROWS {
                last[i] = &bytes[i][whole * D::BYTES..];
                prefetch_block::<D>(last[i], PREFETCH_DISTANCE);
            }
            add_block::<L, D, T>(d, &scales, whole, last, rest / D::VECTOR_BYTES, &tokens, &mut sums);
        } else if whole < blocks {
            let last = last_blocks(stored, rows, whole * D::BYTES, D::BYTES, D::IS_FINITE, &mut spaces);
            add_block::<L, D, T>(d, &scales, whole, last, VECTORS, &tokens, &mut sums);
        }
        self.store(first, &sums)
    }
}

impl<L: Simd, D: Decode> Product<L> for F32Rows<'_, D> {
    const MOST_IN_REGISTERS: usize = if L::REGISTERS < 32 { 1 } else { D::REGISTER_TOKENS.0 };
    /// 256 columns of sixteen rows take 16 KB, which stay in L1 with those of three tokens.
    const PANELS: Option<Panels> = match L::REGISTERS {
        ..32 => Some(Panels { rows: ROWS_PER_PASS, tiles_of_few: 1, lines_of_few: 32, lines: 16 }),
        _ => None,
    };
    type Line = [f32; LANES];
    type Scales = ();

    #[inline(always)]
    fn operands(&self) -> &TileOperands<'_> {
        &self.operands
    }

    #[inline(always)]
    fn lines(&self) -> usize {
        self.operands.x.packed.padded() / LANES
    }

    #[inline(always)]
    fn scales(&self, _: &[usize]) {}

    #[inline(always)]
    fn decode(
        &self,
        row: usize,
        lines: &Range<usize>,
        distance: usize,
        k: usize,
        out: &mut [[[f32; LANES]; ROWS]],
    ) {
        let (stored, d) = (&self.operands.rows, &self.decoder);
        // SAFETY: every row of a tile is a row of the matrix.
        let (scales, bytes) = (d.row::<L>(stored.in_storage(row)), unsafe { stored.bytes(row) });
        let mut space = [MaybeUninit::uninit(); 4 * BLOCK];
        for (b, out) in (lines.start / VECTORS..).zip(out.as_chunks_mut::<VECTORS>().0) {
            if distance > 0 {
                prefetch_block::<D>(&bytes[b * D::BYTES..bytes.len().min((b + 1) * D::BYTES)], distance);
            }
            let block = row_block(bytes, b, D::BYTES, &mut space);
            let raw = d.raw::<L>(scales, b, block);
            for v in 0..VECTORS {
                d.vector::<L>(scales, b, raw, v).store(&mut out[v][k]);
            }
        }
    }

    #[inline(always)]
    fn multiply_decoded(rows: DecodedRows<'_, [f32; LANES], ()>) {
        // SAFETY: this function was compiled for L's instructions, so the processor has them.
        unsafe { L::call(F32Decoded(rows)) };
    }

    #[inline(always)]
    fn add_products(panel: Panel<'_, [f32; LANES]>) {
        // SAFETY: this function was compiled for L's instructions, so the processor has them.
        unsafe { L::call(F32Panel(panel)) };
    }
}

/// Adds the products of the first vectors of one block of four rows; the rows alternate, so that four sums are always in flight.
#[inline(always)]
fn add_block<L: F32x16, D: Decode, const T: usize>(
    d: &D,
    scales: &[D::Row<L>; ROWS],
    b: usize,
    blocks: [&[u8]; ROWS],
    vectors: usize,
    tokens: &[&[[[f32; LANES]; VECTORS]]; T],
    sums: &mut [[L; ROWS]; T],
) {
    let raw = [
        d.raw::<L>(scales[0], b, blocks[0]),
        d.raw::<L>(scales[1], b, blocks[1]),
        d.raw::<L>(scales[2], b, blocks[2]),
        d.raw::<L>(scales[3], b, blocks[3]),
    ];
    let mut x = [&[[0f32; LANES]; VECTORS]; T];
    for t in 0..T {
        x[t] = &tokens[t][b];
    }
    for k in 0..vectors {
        for i in 0..ROWS {
            let w = d.vector::<L>(scales[i], b, raw[i], k);
            for t in 0..T {
                sums[t][i] = w.mul_add(L::load(&x[t][k]), sums[t][i]);
            }
        }
    }
}

/// Prefetches a block `distance` bytes ahead: into L1 for weights of few bits, which wait for instructions rather than
/// memory, else into L2.
#[inline(always)]
fn prefetch_block<D: Decode>(bytes: &[u8], distance: usize) {
    let cache = if D::BYTES < BLOCK { CacheLevel::L1 } else { CacheLevel::L2 };
    prefetch(cache, bytes.as_ptr().wrapping_add(distance), bytes.len());
}

/// Columns of decoded rows.
struct F32Panel<'a>(Panel<'a, [f32; LANES]>);

impl Kernel for F32Panel<'_> {
    type Output = ();
    #[inline(always)]
    fn run<S: Simd>(mut self) {
        let tokens = self.0.tokens.len();
        multiply_tokens::<S, _>(&mut self, tokens);
    }
}

impl<L: Simd> Tile<L> for F32Panel<'_> {
    /// Twelve sums, a register of each token and one of a row.
    const WIDTHS: &'static [usize] = &[3, 2];
    #[inline(always)]
    fn multiply<const T: usize>(&mut self, first: usize) -> usize {
        let Panel { lines, columns, x, tokens: all, totals, .. } = &mut self.0;
        let mut tokens: [&[[f32; LANES]]; T] = [&[]; T];
        for t in 0..T {
            tokens[t] = &x.packed.vectors(x.at(all.start + first + t))[columns.clone()];
        }
        let totals: &mut [_; T] = totals[first..].first_chunk_mut().expect("sums of each token");
        for (i, tile) in lines.chunks_exact(columns.len()).enumerate() {
            for r in 0..L::REGISTERS_PER_VECTOR {
                let mut sums = [[L::load_register(&[0.0; LANES], r); ROWS]; T];
                for t in 0..T {
                    for k in 0..ROWS {
                        sums[t][k] = L::load_register(&totals[t][i * ROWS + k], r);
                    }
                }
                for (v, rows) in tile.iter().enumerate() {
                    let mut values = [sums[0][0]; T];
                    for t in 0..T {
                        // SAFETY: tokens have as many vectors as the tile.
                        values[t] = L::load_register(unsafe { tokens[t].get_unchecked(v) }, r);
                    }
                    for k in 0..ROWS {
                        let w = L::load_register(&rows[k], r);
                        for t in 0..T {
                            sums[t][k] = L::mul_add_register(w, values[t], sums[t][k]);
                        }
                    }
                }
                for t in 0..T {
                    for k in 0..ROWS {
                        L::store_register(sums[t][k], &mut totals[t][i * ROWS + k], r);
                    }
                }
            }
        }
        T
    }
}

/// A dequantized row, and its vectors as a tile.
type OneRow = (Vec<f32>, Vec<[[f32; LANES]; ROWS]>);

thread_local! {
    static DEQUANTIZED: RefCell<OneRow> = RefCell::default();
}

/// Dequantizes rows one by one, and multiplies each by all tokens.
fn dequantize_fallback(isa: Isa, w: &Matrix<'_>, x: Tokens<'_>, tiles: &RowTiles, y: &OutputRows<'_>) {
    let n = x.packed.padded();
    let mut memory = DEQUANTIZED.take();
    let (row, vectors) = &mut memory;
    row.resize(w.cols, 0.0);
    vectors.resize(n / LANES, [[0.0; LANES]; ROWS]);
    for r in tiles.each().flat_map(|(rows, n)| rows.into_iter().take(n)) {
        w.decode_row(r, row);
        for (k, [v, ..]) in vectors.iter_mut().enumerate() {
            for (l, v) in v.iter_mut().enumerate() {
                let i = k * LANES + l;
                *v = row.get(i / BLOCK * BLOCK + x.packed.layout.column(i % BLOCK)).copied().unwrap_or(0.0);
            }
        }
        dispatch(isa, F32Decoded(DecodedRows::one(vectors, &[r], x, y)));
    }
    DEQUANTIZED.set(memory);
}

/// Vectors of columns per pass over the tiles: 2 KB per token, so that six tokens stay in L1 while rows come from L2.
const L1_VECTORS: usize = 32;

/// Rows that are decoded to memory.
struct F32Decoded<'a>(DecodedRows<'a, [f32; LANES], ()>);

impl Kernel for F32Decoded<'_> {
    type Output = ();
    #[inline(always)]
    fn run<S: Simd>(mut self) {
        let tokens = self.0.x.len();
        multiply_tokens::<S, _>(&mut self, tokens);
    }
}

impl<L: F32x16> Tile<L> for F32Decoded<'_> {
    /// The 24 sums of four rows and six tokens and their operands fit into the registers of AVX-512.
    const WIDTHS: &'static [usize] = if L::REGISTERS >= 32 { &[6, 4, 2] } else { &[] };
    #[inline(always)]
    fn multiply<const T: usize>(&mut self, first: usize) -> usize {
        let all = &self.0;
        let (len, tiles) = (all.row_lines, all.tiles());
        // Left uninitialized: writing zeros would take as long as some of the multiplications.
        let mut sums = [[MaybeUninit::<L>::uninit(); ROWS_PER_PASS]; T];
        for start in (0..len).step_by(L1_VECTORS) {
            let columns = start..len.min(start + L1_VECTORS);
            // Loops, not closures: a closure passed to another function is compiled without this function's instructions.
            let mut tokens: [&[[f32; LANES]]; T] = [&[]; T];
            for t in 0..T {
                tokens[t] = &all.x.packed.vectors(all.x.at(first + t))[columns.clone()];
            }
            for i in 0..tiles {
                let mut before = [[L::splat(0.0); ROWS]; T];
                if start > 0 {
                    for t in 0..T {
                        for r in 0..ROWS {
                            // SAFETY: the pass with start 0 has written it.
                            before[t][r] = unsafe { sums[t][i * ROWS + r].assume_init() };
                        }
                    }
                }
                if start == 0 {
                    all.prefetch_next(i, first, T);
                }
                let after = accumulate::<L, T>(&all.lines[i * len..][columns.clone()], &tokens, before);
                for t in 0..T {
                    for r in 0..ROWS {
                        sums[t][i * ROWS + r].write(after[t][r]);
                    }
                }
            }
        }
        for t in 0..T {
            let mut partial_sums = [L::splat(0.0); TILES_PER_PASS];
            for (i, partial_sums) in partial_sums.iter_mut().enumerate().take(tiles) {
                let mut four = [L::splat(0.0); ROWS];
                for r in 0..ROWS {
                    // SAFETY: the loop above has written it.
                    four[r] = unsafe { sums[t][i * ROWS + r].assume_init() };
                }
                *partial_sums = L::partial_sums(four);
            }
            store_rows(all.y, all.rows, first + t, L::finish_partial_sums(partial_sums));
        }
        T
    }
}

#[inline(always)]
fn accumulate<L: F32x16, const T: usize>(
    rows: &[[[f32; LANES]; ROWS]],
    tokens: &[&[[f32; LANES]]; T],
    mut acc: [[L; ROWS]; T],
) -> [[L; ROWS]; T] {
    assert!(tokens.iter().all(|v| v.len() == rows.len()));
    for (k, rows) in rows.iter().enumerate() {
        let mut four = [acc[0][0]; ROWS];
        for i in 0..ROWS {
            four[i] = L::load(&rows[i]);
        }
        for t in 0..T {
            // SAFETY: tokens have as many vectors as the rows.
            let v = L::load(unsafe { tokens[t].get_unchecked(k) });
            for i in 0..ROWS {
                acc[t][i] = four[i].mul_add(v, acc[t][i]);
            }
        }
    }
    acc
}
