//! Approximate matmul of 4-bit elements that have a scale per block, and 8-bit activations: integers and MXFP4.
//!
//! ```text
//! weight      w = scale * (code - 16),  code in 0 .. 32     a table for all rows, a scale per block of columns
//! activation  x = step * q,             |q| <= 127          a step per lane and 8 blocks of 128, as in `int8`
//! result      sum(step * sum(scale * (sum(code * q) - 16 * sum(q))))
//! ```
//!
//! A lane holds 8 neighbouring columns of 128, which have one scale. Their sum is exact in integers: it begins at `-16 * sum(q)`,
//! which the token brings. A token of 4096 x 2048 takes two fifths of the
//! time of f32 (`--example matmul`).

use super::schedule::*;
use super::tile_loop::*;
use crate::activations::INT8_BLOCKS_PER_SCALE as BLOCKS_PER_STEP;
use crate::activations::INT8_LINES_WITH_SUMS as TOKEN_LINES;
use crate::activations::{BLOCK, ZERO_CODE};
use crate::arithmetic::Arithmetic;
use crate::lut_tables::{Exponents, MXFP4_BLOCK, sign_bit};
use crate::matrix::Divisor;
use crate::simd::{F32x16, Kernel, LANES, Simd, dispatch};
use crate::weight_format::{IntBits, MXFP4_TABLE, WeightFormat};
use crate::{Isa, Matrix};
use std::mem::MaybeUninit;
use std::ops::Range;

/// Bytes of a block of 128 elements.
const BYTES: usize = BLOCK / 2;
/// Lines of a decoded block: codes of even columns, of odd columns, and the scales of the lanes.
const DECODED_LINES: usize = 3;

/// Scales of a block: each serves four lanes.
const SCALES: usize = BLOCK / MXFP4_BLOCK;

/// A token's blocks: even columns, odd columns, and what sums begin at.
type TokenBlocks<'a> = &'a [[[u8; 64]; TOKEN_LINES]];

/// Multiplies some rows of `w` by all selected tokens.
pub(super) fn multiply_rows(isa: Isa, w: &Matrix<'_>, x: Tokens<'_>, tiles: &RowTiles, y: &OutputRows<'_>) {
    let operands = TileOperands { rows: StoredRows::new(w), x, y };
    match (w.weight.format, w.arithmetic) {
        (WeightFormat::Int { signed, block_rows, .. }, _) => {
            let (scales, group) = (w.values(), Divisor::new(block_rows));
            let scales = FloatScales { scales, group, blocks: w.cols / MXFP4_BLOCK };
            let sign_bit = sign_bit(IntBits::Four, signed);
            let codes = std::array::from_fn(|i| (i as u8 ^ sign_bit) + ZERO_CODE - sign_bit);
            dispatch(isa, MultiplyRows(BlockRows { codes, scales, operands }, tiles));
        }
        (WeightFormat::Mxfp4 { .. }, Arithmetic::Int8OfExponents(exponents)) => {
            let scales = PowersOfTwo { exponents, blocks: w.cols / MXFP4_BLOCK };
            let codes = MXFP4_TABLE.map(|v| (2.0 * v + f32::from(ZERO_CODE)) as u8);
            dispatch(isa, MultiplyRows(BlockRows { codes, scales, operands }, tiles));
        }
        _ => unreachable!("a format that has blocks"),
    }
}

/// Scales of the blocks of a row.
trait BlockScales: Copy {
    /// Returns the index of the first scale of row `row` of the storage.
    fn first(&self, row: usize) -> usize;
    /// Returns the scales of the lanes of a block of 128 columns, of which scale `at` is the first. Lanes behind the end of the
    /// row have any finite scale.
    fn lanes<L: F32x16>(&self, at: usize) -> L;
}

/// Scales in f32, of groups of rows.
#[derive(Clone, Copy)]
struct FloatScales<'a> {
    scales: &'a [f32],
    group: Divisor,
    /// Scales of a row.
    blocks: usize,
}

impl BlockScales for FloatScales<'_> {
    #[inline(always)]
    fn first(&self, row: usize) -> usize {
        self.group.divide(row) * self.blocks
    }
    #[inline(always)]
    fn lanes<L: F32x16>(&self, at: usize) -> L {
        let shift = const { (LANES / SCALES).trailing_zeros() };
        match self.scales.get(at..at + SCALES) {
            Some(four) => L::repeat_lanes(four, shift),
            None => L::repeat_lanes(&self.last(at), shift),
        }
    }
}

impl FloatScales<'_> {
    /// Returns the scales from `at` on where fewer than four follow, and zeros behind them.
    #[cold]
    fn last(&self, at: usize) -> [f32; SCALES] {
        std::array::from_fn(|i| self.scales.get(at + i).copied().unwrap_or(0.0))
    }
}

/// Scales of MXFP4, halved: codes count halves.
#[derive(Clone, Copy)]
struct PowersOfTwo<'a> {
    exponents: &'a Exponents,
    /// Scales of a row.
    blocks: usize,
}

impl BlockScales for PowersOfTwo<'_> {
    #[inline(always)]
    fn first(&self, row: usize) -> usize {
        row * self.blocks
    }
    #[inline(always)]
    fn lanes<L: F32x16>(&self, at: usize) -> L {
        L::powers_of_two(self.exponents.four(at)).mul(L::splat(0.5))
    }
}

/// Rows with a scale per block, and what they are multiplied by.
#[derive(Clone, Copy)]
struct BlockRows<'a, S> {
    codes: [u8; 16],
    scales: S,
    operands: TileOperands<'a>,
}

impl<S: BlockScales> BlockRows<'_, S> {
    /// Adds the products of block b of four rows, whose scales begin at `scales`.
    #[inline(always)]
    fn add_rows<L: Simd, const T: usize>(
        &self,
        table: L::Bytes,
        block: [&[u8]; ROWS],
        scales: &[usize; ROWS],
        b: usize,
        tokens: &[TokenBlocks<'_>; T],
        sums: &mut [[L; ROWS]; T],
    ) {
        // Written out: the compiler keeps a loop of this size, and its sums in memory.
        let scales = scales.map(|first| first + SCALES * b);
        add_block::<L, T>(codes_of::<L>(table, block[0]), self.scales.lanes(scales[0]), b, tokens, 0, sums);
        add_block::<L, T>(codes_of::<L>(table, block[1]), self.scales.lanes(scales[1]), b, tokens, 1, sums);
        add_block::<L, T>(codes_of::<L>(table, block[2]), self.scales.lanes(scales[2]), b, tokens, 2, sums);
        add_block::<L, T>(codes_of::<L>(table, block[3]), self.scales.lanes(scales[3]), b, tokens, 3, sums);
    }
}

impl<S: BlockScales> Kernel for MultiplyRows<'_, BlockRows<'_, S>> {
    type Output = ();
    const HAS_DOT_PRODUCTS: bool = true;
    #[inline(always)]
    fn run<L: Simd>(self) {
        multiply_tiles::<L, _>(&self.0, self.1);
    }
}

/// Returns the blocks and steps of T tokens from `first` on.
#[inline(always)]
fn blocks_of<'a, const T: usize>(
    x: Tokens<'a>,
    first: usize,
) -> ([TokenBlocks<'a>; T], [&'a [[f32; LANES]]; T]) {
    let (blocks, int8) = (x.packed.blocks(), &x.packed.int8);
    let steps_of_token = blocks.div_ceil(BLOCKS_PER_STEP);
    let (mut tokens, mut steps) = ([&[] as TokenBlocks<'_>; T], [&[] as &[[f32; LANES]]; T]);
    for t in 0..T {
        let token = x.at(first + t);
        tokens[t] = &int8.lines.as_chunks().0[token * blocks..][..blocks];
        steps[t] = &int8.scales[token * steps_of_token..][..steps_of_token];
    }
    (tokens, steps)
}

/// Adds the products of one block of one row to the sums of T tokens.
#[inline(always)]
fn add_block<L: Simd, const T: usize>(
    [even, odd]: [L::Bytes; 2],
    scale: L,
    b: usize,
    tokens: &[TokenBlocks<'_>; T],
    i: usize,
    sums: &mut [[L; ROWS]; T],
) {
    for t in 0..T {
        // SAFETY: b is below the number of blocks of each token.
        let x = unsafe { tokens[t].get_unchecked(b) };
        let dots = L::dot_u8i8(L::dot_u8i8(L::load_sums(&x[2]), even, &x[0]), odd, &x[1]);
        sums[t][i] = L::sums_to_f32(dots).mul_add(scale, sums[t][i]);
    }
}

/// Adds the sums of eight blocks to the totals, by the steps of their activations.
#[inline(always)]
fn add_part<L: Simd, const T: usize>(
    sums: &[[L; ROWS]; T],
    steps: &[&[[f32; LANES]]; T],
    part: usize,
    totals: &mut [[L; ROWS]; T],
) {
    for t in 0..T {
        let step = L::load(&steps[t][part]);
        for i in 0..ROWS {
            totals[t][i] = sums[t][i].mul_add(step, totals[t][i]);
        }
    }
}

/// Decodes 64 bytes to the codes of even columns and of odd ones.
#[inline(always)]
fn codes_of<L: Simd>(table: L::Bytes, block: &[u8]) -> [L::Bytes; 2] {
    let (even, odd) = L::split_nibbles(L::load_bytes(block.try_into().expect("64 bytes")));
    [L::lookup_bytes_16(table, even), L::lookup_bytes_16(table, odd)]
}

impl<L: Simd, S: BlockScales> Tile<L> for RegisterTile<'_, BlockRows<'_, S>, ()> {
    const WIDTHS: &'static [usize] = if L::MULTIPLIES_SEVERAL_TOKENS { &[4, 2] } else { &[] };
    #[inline(always)]
    fn multiply<const T: usize>(&mut self, first: usize) -> usize {
        let RegisterTile { product, rows, .. } = self;
        let (stored, x) = (&product.operands.rows, product.operands.x);
        let table = L::load_byte_table(&product.codes);
        // Loops, not closures: a closure passed to another function is compiled without this function's instructions.
        let mut scales = [0; ROWS];
        let mut bytes = [&[] as &[u8]; ROWS];
        for i in 0..ROWS {
            scales[i] = product.scales.first(stored.in_storage(rows[i]));
            // SAFETY: every row of a tile is a row of the matrix.
            bytes[i] = unsafe { stored.bytes(rows[i]) };
        }
        let (tokens, steps) = blocks_of::<T>(x, first);
        let blocks = x.packed.blocks();
        let whole = blocks.min(bytes[0].len() / BYTES);
        assert!(bytes.iter().all(|b| b.len() == bytes[0].len()));
        let mut spaces = SPACES;
        let mut last = [&[] as &[u8]; ROWS];
        if whole < blocks {
            last = last_blocks(stored, rows, whole * BYTES, BYTES, true, &mut spaces);
        }
        let mut totals = [[L::splat(0.0); ROWS]; T];
        for part in 0..blocks.div_ceil(BLOCKS_PER_STEP) {
            let mut sums = [[L::splat(0.0); ROWS]; T];
            let (start, end) = (part * BLOCKS_PER_STEP, blocks.min((part + 1) * BLOCKS_PER_STEP));
            for b in start..end.min(whole) {
                let mut block = [bytes[0]; ROWS];
                for i in 0..ROWS {
                    // SAFETY: every row has `whole` blocks.
                    block[i] = unsafe { bytes[i].get_unchecked(b * BYTES..(b + 1) * BYTES) };
                    prefetch_after(block[i], PREFETCH_DISTANCE);
                }
                product.add_rows::<L, T>(table, block, &scales, b, &tokens, &mut sums);
            }
            if whole < end {
                product.add_rows::<L, T>(table, last, &scales, whole, &tokens, &mut sums);
            }
            add_part::<L, T>(&sums, &steps, part, &mut totals);
        }
        self.store(first, &totals)
    }
}

impl<L: Simd, S: BlockScales> Product<L> for BlockRows<'_, S> {
    const MOST_IN_REGISTERS: usize = if L::MULTIPLIES_SEVERAL_TOKENS { SMALL_BATCH } else { 1 };
    type Line = [u8; 64];
    type Scales = ();

    #[inline(always)]
    fn operands(&self) -> &TileOperands<'_> {
        &self.operands
    }

    #[inline(always)]
    fn lines(&self) -> usize {
        self.operands.x.packed.blocks() * DECODED_LINES
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
        out: &mut [[[u8; 64]; ROWS]],
    ) {
        let (stored, table) = (&self.operands.rows, L::load_byte_table(&self.codes));
        let scales = self.scales.first(stored.in_storage(row));
        // SAFETY: every row of a tile is a row of the matrix.
        let bytes = unsafe { stored.bytes(row) };
        let mut space = [MaybeUninit::uninit(); 4 * BLOCK];
        for (b, out) in (lines.start / DECODED_LINES..).zip(out.as_chunks_mut::<DECODED_LINES>().0) {
            if distance > 0 {
                prefetch_after(&bytes[b * BYTES..bytes.len().min((b + 1) * BYTES)], distance);
            }
            let block = row_block(bytes, b, BYTES, &mut space);
            let [even, odd] = codes_of::<L>(table, block);
            L::store_bytes(even, &mut out[0][k]);
            L::store_bytes(odd, &mut out[1][k]);
            let mut scale = [0.0; LANES];
            self.scales.lanes::<L>(scales + SCALES * b).store(&mut scale);
            for (to, v) in out[2][k].as_chunks_mut().0.iter_mut().zip(scale) {
                *to = v.to_ne_bytes();
            }
        }
    }

    #[inline(always)]
    fn multiply_decoded(rows: DecodedRows<'_, [u8; 64], ()>) {
        // SAFETY: this function was compiled for L's instructions, so the processor has them.
        unsafe { L::call(DecodedBlocks(rows)) };
    }

    #[inline(always)]
    fn add_products(_: Panel<'_, [u8; 64]>) {
        unreachable!("a product without panels")
    }
}

/// Rows that are decoded to memory as codes and scales.
struct DecodedBlocks<'a>(DecodedRows<'a, [u8; 64], ()>);

impl Kernel for DecodedBlocks<'_> {
    type Output = ();
    const HAS_DOT_PRODUCTS: bool = true;
    #[inline(always)]
    fn run<S: Simd>(self) {
        let tokens = self.0.x.len();
        multiply_tokens::<S, _>(&mut ByTile(self.0, BlockTile), tokens);
    }
}

struct BlockTile;

impl<L: Simd> DecodedTile<L> for BlockTile {
    /// Four tokens and four rows have sixteen sums; the other registers hold codes, a scale and integer sums.
    const WIDTHS: &'static [usize] = if L::MULTIPLIES_SEVERAL_TOKENS { &[4, 2] } else { &[] };
    #[inline(always)]
    fn sums<const T: usize>(tile: &[[[u8; 64]; ROWS]], x: Tokens<'_>, first: usize) -> [[L; ROWS]; T] {
        let (tokens, steps) = blocks_of::<T>(x, first);
        let mut totals = [[L::splat(0.0); ROWS]; T];
        let parts = tile.as_chunks::<DECODED_LINES>().0.chunks(BLOCKS_PER_STEP);
        for (part, blocks) in parts.enumerate() {
            let mut sums = [[L::splat(0.0); ROWS]; T];
            for (b, [even, odd, scales]) in (part * BLOCKS_PER_STEP..).zip(blocks) {
                for i in 0..ROWS {
                    let mut scale = [0.0; LANES];
                    for (v, bytes) in scale.iter_mut().zip(scales[i].as_chunks().0) {
                        *v = f32::from_ne_bytes(*bytes);
                    }
                    let codes = [L::load_bytes(&even[i]), L::load_bytes(&odd[i])];
                    add_block::<L, T>(codes, L::load(&scale), b, &tokens, i, &mut sums);
                }
            }
            add_part::<L, T>(&sums, &steps, part, &mut totals);
        }
        totals
    }
}
