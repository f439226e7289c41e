//! Approximate matmul of codes of 8 or 15 bits and activations of 8 or 15 bits.
//!
//! ```text
//! weight      w = step * code + low,  code in 0 .. 255      a step and a low value per row
//!             code = 256 * upper + lower, 0 .. 32767        tables of 64 entries that tokens of 15 bits meet
//! activation  x = scale * q,          |q| <= 127            a scale per lane and 8 blocks, see `activations::packed_int8`
//! result      step * sum(scale * sum(code * q)) + low * sum(x)
//! ```
//!
//! The inner sum, over at most 64 columns, is exact in integers. Lanes are scaled and added in f32 after each eight
//! blocks, then added by halves. The result has the same bits for any number of tokens and threads, and for each instruction set.
//! A token of LUT4 takes 12 us where the f32 loop takes 33, 64 tokens 360 where it takes 1302 (`--example matmul`).
//!
//! Processors that multiply 16-bit words only (AVX2) widen codes once, and x once for eight rows. A dot product of bytes would
//! widen both factors each time: nine instructions for 32 products, of which four remain. 64 tokens of LUT4 take 2230 us where the
//! f32 loop of AVX2 takes 4150.
//!
//! ```text
//! 32 bytes of codes   even bytes, as words | odd bytes, as words     8 rows and 1024 columns at a time: 16 KB
//! 32 bytes of x       even bytes, as words | odd bytes, as words     in registers
//! sum of lane l       codes 4 l, 4 l + 2 of the even words, then 4 l + 1, 4 l + 3 of the odd ones
//! ```

use super::int8_decode::*;
use super::schedule::*;
use super::tile_loop::*;
use crate::activations::BLOCK;
use crate::activations::INT8_BLOCKS_PER_SCALE as BLOCKS_PER_SCALE;
use crate::lut_tables::{Int8Codes, sign_bit};
use crate::matrix::Divisor;
use crate::simd::{Kernel, LANES, Simd, U8x64, dispatch};
use crate::weight_format::{IndexBits, IntBits, WeightFormat};
use crate::{Isa, Matrix};
use std::mem::MaybeUninit;
use std::ops::Range;

/// Lines of codes per block.
const CODE_LINES: usize = 2;
/// Lines of words per block: even and odd bytes of its lines of codes.
const WORD_LINES: usize = 2 * CODE_LINES;
/// Rows whose words are multiplied together: eight sums, two words of x and one of codes fit into the registers of AVX2.
const WORD_ROWS: usize = 2 * ROWS;

/// Multiplies some rows of `w`, which have codes, by all selected tokens.
pub(super) fn multiply_rows(
    isa: Isa,
    w: &Matrix<'_>,
    codes: &Int8Codes,
    x: Tokens<'_>,
    tiles: &RowTiles,
    y: &OutputRows<'_>,
) {
    let operands = TileOperands { rows: StoredRows::new(w), x, y };
    macro_rules! multiply {
        ($decoder:expr, $rows_per_group:expr) => {{
            let (decoder, group) = ($decoder, Divisor::new($rows_per_group));
            dispatch(isa, MultiplyRows(Int8Rows::<_, 1, 1> { decoder, codes, group, operands }, tiles))
        }};
    }
    match w.weight.format {
        WeightFormat::Lut { bits, rows_per_table: rows } => match bits {
            IndexBits::One => multiply!(SmallIndex::<1>, rows),
            IndexBits::Two => multiply!(SmallIndex::<2>, rows),
            IndexBits::Three => multiply!(SmallIndex::<3>, rows),
            IndexBits::Four => multiply!(Index4, rows),
            IndexBits::Six => multiply!(Index6, rows),
            IndexBits::Eight => multiply!(Index8, rows),
        },
        WeightFormat::Int { bits, signed, block_rows: rows, .. } => match bits {
            IntBits::Four => multiply!(Integer4 { sign_bit: sign_bit(bits, signed) }, rows),
            IntBits::Eight => multiply!(Integer8 { sign_bit: sign_bit(bits, signed) }, rows),
        },
        WeightFormat::Mxfp4 { .. } | WeightFormat::Fp16 | WeightFormat::F32 => {
            unreachable!("a format that has codes")
        }
    }
}

/// Multiplies some rows of `w`, integers of 8 bits or tables with codes of 15 bits, by all selected tokens in two digits.
pub(super) fn multiply_rows_in_digits(
    isa: Isa,
    w: &Matrix<'_>,
    codes: &Int8Codes,
    x: Tokens<'_>,
    tiles: &RowTiles,
    y: &OutputRows<'_>,
) {
    let operands = TileOperands { rows: StoredRows::new(w), x, y };
    macro_rules! multiply {
        ($decoder:expr, $parts:literal, $rows_per_group:expr) => {{
            let (decoder, group) = ($decoder, Divisor::new($rows_per_group));
            dispatch(isa, MultiplyRows(Int8Rows::<_, 2, $parts> { decoder, codes, group, operands }, tiles))
        }};
    }
    match w.weight.format {
        WeightFormat::Lut { bits: IndexBits::Six, rows_per_table: rows } => multiply!(Index6, 2, rows),
        WeightFormat::Int { bits: bits @ IntBits::Eight, signed, block_rows: rows, .. } => {
            multiply!(Integer8 { sign_bit: sign_bit(bits, signed) }, 1, rows)
        }
        WeightFormat::Lut { .. }
        | WeightFormat::Int { .. }
        | WeightFormat::Mxfp4 { .. }
        | WeightFormat::Fp16
        | WeightFormat::F32 => unreachable!("a format that is multiplied in digits"),
    }
}

/// Rows of one weight format, with codes of `PARTS` bytes, and the tokens that they are multiplied by, in `DIGITS` digits.
#[derive(Clone, Copy)]
struct Int8Rows<'a, D, const DIGITS: usize, const PARTS: usize> {
    decoder: D,
    codes: &'a Int8Codes,
    group: Divisor,
    operands: TileOperands<'a>,
}

/// Integer sums of T tokens and the rows of a tile, by digit and part.
type DigitSums<L, const DIGITS: usize, const PARTS: usize, const T: usize> =
    [[[[<L as U8x64>::Sums; PARTS]; ROWS]; DIGITS]; T];

impl<D: Int8Decode<PARTS>, const DIGITS: usize, const PARTS: usize> Int8Rows<'_, D, DIGITS, PARTS> {
    /// Adds the products of block b of row i of a tile.
    #[inline(always)]
    fn add_block<L: Simd, const T: usize>(
        &self,
        table: D::Table<'_, L>,
        block: &[u8],
        b: usize,
        tokens: &[[&[[[u8; 64]; CODE_LINES]]; DIGITS]; T],
        i: usize,
        sums: &mut DigitSums<L, DIGITS, PARTS, T>,
    ) {
        let codes = self.decoder.codes::<L>(table, block);
        for t in 0..T {
            for d in 0..DIGITS {
                // SAFETY: b is below the number of blocks of each token.
                let x = unsafe { tokens[t][d].get_unchecked(b) };
                for p in 0..PARTS {
                    let sum = &mut sums[t][d][i][p];
                    *sum = L::dot_u8i8(L::dot_u8i8(*sum, codes[p][0], &x[0]), codes[p][1], &x[1]);
                }
            }
        }
    }

    /// Returns a row's group.
    #[inline(always)]
    fn group(&self, row: usize) -> usize {
        self.group.divide(self.operands.rows.in_storage(row))
    }
}

impl<D: Int8Decode<PARTS>, const DIGITS: usize, const PARTS: usize> Kernel
    for MultiplyRows<'_, Int8Rows<'_, D, DIGITS, PARTS>>
{
    type Output = ();
    const HAS_DOT_PRODUCTS: bool = true;
    const PERMUTES_BYTES: bool = D::PERMUTES_BYTES;
    #[inline(always)]
    fn run<S: Simd>(self) {
        multiply_tiles::<S, _>(&self.0, self.1);
    }
}

/// Steps and low values of sixteen rows.
#[derive(Clone, Copy)]
struct StepsAndLows([f32; LANES], [f32; LANES]);

impl<L: Simd> RowScales<L> for StepsAndLows {
    #[inline(always)]
    fn results(&self, x: Tokens<'_>, token: usize, sums: L) -> L {
        let sum = L::splat(x.packed.int8.of_token[x.at(token)]);
        L::load(&self.0).mul(sums).add(L::load(&self.1).mul(sum))
    }
    #[inline(always)]
    fn result(&self, x: Tokens<'_>, token: usize, i: usize, sum: f32) -> f32 {
        self.0[i] * sum + self.1[i] * x.packed.int8.of_token[x.at(token)]
    }
}

/// Scales of the lanes of a token's blocks.
type LaneScales<'a> = &'a [[f32; LANES]];

/// Lines of the digits of T tokens, and their scales.
type DigitLines<'a, const DIGITS: usize, const T: usize> =
    ([[&'a [[u8; 64]]; DIGITS]; T], [[LaneScales<'a>; DIGITS]; T]);

/// Returns the lines and scales of T tokens from `first` on.
#[inline(always)]
fn lines_of<'a, const DIGITS: usize, const T: usize>(
    x: Tokens<'a>,
    first: usize,
) -> DigitLines<'a, DIGITS, T> {
    let (lines, scaled) = (x.packed.blocks() * CODE_LINES, x.packed.blocks().div_ceil(BLOCKS_PER_SCALE));
    let mut tokens = [[&[] as &[[u8; 64]]; DIGITS]; T];
    let mut scales = [[&[] as &[[f32; LANES]]; DIGITS]; T];
    for t in 0..T {
        for d in 0..DIGITS {
            let digit = x.at(first + t) * DIGITS + d;
            tokens[t][d] = &x.packed.int8.lines[digit * lines..][..lines];
            scales[t][d] = &x.packed.int8.scales[digit * scaled..][..scaled];
        }
    }
    (tokens, scales)
}

/// Joins the sums of a code's bytes.
#[inline(always)]
fn join_parts<L: Simd, const PARTS: usize>(sums: [L::Sums; PARTS]) -> L {
    let upper = L::sums_to_f32(sums[0]);
    // One rounding of the whole sum, as where words are multiplied.
    if PARTS == 1 { upper } else { upper.mul_add(L::splat(256.0), L::sums_to_f32(sums[PARTS - 1])) }
}

/// Scales integer sums, and adds them to the totals.
#[inline(always)]
fn add_scaled<L: Simd, const DIGITS: usize, const PARTS: usize, const T: usize>(
    sums: &DigitSums<L, DIGITS, PARTS, T>,
    scales: &[[LaneScales<'_>; DIGITS]; T],
    part: usize,
    totals: &mut [[L; ROWS]; T],
) {
    for t in 0..T {
        for d in 0..DIGITS {
            let scale = L::load(&scales[t][d][part]);
            for i in 0..ROWS {
                totals[t][i] = join_parts::<L, PARTS>(sums[t][d][i]).mul_add(scale, totals[t][i]);
            }
        }
    }
}

/// Tells whether batches of several tokens decode rows into registers.
const fn decodes_in_registers<L: Simd, D: Int8Decode<PARTS>, const PARTS: usize>() -> bool {
    (D::IN_REGISTERS || L::PERMUTES_BYTES) && L::MULTIPLIES_SEVERAL_TOKENS
}

impl<L: Simd, D: Int8Decode<PARTS>, const DIGITS: usize, const PARTS: usize> Tile<L>
    for RegisterTile<'_, Int8Rows<'_, D, DIGITS, PARTS>, StepsAndLows>
{
    // More sums than these do not fit into the registers.
    const WIDTHS: &'static [usize] = match (decodes_in_registers::<L, D, PARTS>(), DIGITS * PARTS) {
        (true, 1) => &[4, 2],
        (true, 2) => &[2],
        _ => &[],
    };
    #[inline(always)]
    fn multiply<const T: usize>(&mut self, first: usize) -> usize {
        let RegisterTile { product, rows, .. } = self;
        let (stored, x) = (&product.operands.rows, product.operands.x);
        // Loops, not closures: a closure passed to another function is compiled without this function's instructions.
        let mut tables = [D::table::<L>(product.codes, product.group(rows[0])); ROWS];
        let mut bytes = [&[] as &[u8]; ROWS];
        for i in 0..ROWS {
            tables[i] = D::table::<L>(product.codes, product.group(rows[i]));
            // SAFETY: every row of a tile is a row of the matrix.
            bytes[i] = unsafe { stored.bytes(rows[i]) };
        }
        let (lines, scales) = lines_of::<DIGITS, T>(x, first);
        let mut tokens: [[&[[[u8; 64]; CODE_LINES]]; DIGITS]; T] = [[&[]; DIGITS]; T];
        for t in 0..T {
            for d in 0..DIGITS {
                tokens[t][d] = lines[t][d].as_chunks().0;
            }
        }
        let blocks = x.packed.blocks();
        let whole = blocks.min(bytes[0].len() / D::BYTES);
        assert!(bytes.iter().all(|b| b.len() == bytes[0].len()));
        let mut spaces = SPACES;
        let mut last = [&[] as &[u8]; ROWS];
        if whole < blocks {
            last = last_blocks(stored, rows, whole * D::BYTES, D::BYTES, true, &mut spaces);
        }
        let mut totals = [[L::splat(0.0); ROWS]; T];
        for part in 0..blocks.div_ceil(BLOCKS_PER_SCALE) {
            let mut sums = [[[[L::zero_sums(); PARTS]; ROWS]; DIGITS]; T];
            let (start, end) = (part * BLOCKS_PER_SCALE, blocks.min((part + 1) * BLOCKS_PER_SCALE));
            for b in start..end.min(whole) {
                for i in 0..ROWS {
                    // SAFETY: every row has `whole` blocks.
                    let block = unsafe { bytes[i].get_unchecked(b * D::BYTES..(b + 1) * D::BYTES) };
                    if T == 1 || DIGITS == 2 || D::BYTES < BLOCK {
                        prefetch_after(block, PREFETCH_DISTANCE);
                    }
                    product.add_block::<L, T>(tables[i], block, b, &tokens, i, &mut sums);
                }
            }
            if whole < end {
                for i in 0..ROWS {
                    product.add_block::<L, T>(tables[i], last[i], whole, &tokens, i, &mut sums);
                }
            }
            add_scaled::<L, DIGITS, PARTS, T>(&sums, &scales, part, &mut totals);
        }
        self.store(first, &totals)
    }
}

impl<L: Simd, D: Int8Decode<PARTS>, const DIGITS: usize, const PARTS: usize> Product<L>
    for Int8Rows<'_, D, DIGITS, PARTS>
{
    const MOST_IN_REGISTERS: usize =
        match (decodes_in_registers::<L, D, PARTS>(), L::MULTIPLIES_BYTES_AS_WORDS) {
            (false, _) => 1,
            (true, true) => 4,
            (true, false) if PARTS > 1 => 2,
            (true, false) => SMALL_BATCH,
        };
    const PANELS: Option<Panels> = if L::MULTIPLIES_BYTES_AS_WORDS {
        let lines = BLOCKS_PER_SCALE * WORD_LINES;
        Some(Panels { rows: WORD_ROWS, tiles_of_few: TILES_PER_PASS, lines_of_few: lines, lines })
    } else {
        None
    };
    type Line = [u8; 64];
    type Scales = StepsAndLows;

    #[inline(always)]
    fn operands(&self) -> &TileOperands<'_> {
        &self.operands
    }

    #[inline(always)]
    fn lines(&self) -> usize {
        self.operands.x.packed.blocks() * block_lines::<L, PARTS>()
    }

    #[inline(always)]
    fn scales(&self, rows: &[usize]) -> StepsAndLows {
        let mut scales = StepsAndLows([0.0; LANES], [0.0; LANES]);
        for (i, &r) in rows.iter().enumerate() {
            (scales.0[i], scales.1[i]) = self.codes.steps_and_lows[self.group(r)];
        }
        scales
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
        let table = D::table::<L>(self.codes, self.group(row));
        // SAFETY: every row of a tile is a row of the matrix.
        let bytes = unsafe { self.operands.rows.bytes(row) };
        let block_lines = block_lines::<L, PARTS>();
        let mut space = [MaybeUninit::uninit(); 4 * BLOCK];
        for (b, out) in (lines.start / block_lines..).zip(out.chunks_exact_mut(block_lines)) {
            if distance > 0 {
                prefetch_after(&bytes[b * D::BYTES..bytes.len().min((b + 1) * D::BYTES)], distance);
            }
            let block = row_block(bytes, b, D::BYTES, &mut space);
            let codes = self.decoder.codes::<L>(table, block);
            for half in 0..2 {
                if L::MULTIPLIES_BYTES_AS_WORDS {
                    let upper = codes[0][half];
                    let [even, odd] = match PARTS {
                        1 => L::widen_codes(upper),
                        _ => L::join_bytes(upper, codes[PARTS - 1][half]),
                    };
                    L::store_bytes(even, &mut out[2 * half][k]);
                    L::store_bytes(odd, &mut out[2 * half + 1][k]);
                } else {
                    for p in 0..PARTS {
                        L::store_bytes(codes[p][half], &mut out[PARTS * half + p][k]);
                    }
                }
            }
        }
    }

    #[inline(always)]
    fn multiply_decoded(rows: DecodedRows<'_, [u8; 64], StepsAndLows>) {
        // SAFETY: this function was compiled for L's instructions, so the processor has them.
        unsafe { L::call(Int8Decoded::<DIGITS, PARTS>(rows)) };
    }

    #[inline(always)]
    fn add_products(panel: Panel<'_, [u8; 64]>) {
        // SAFETY: this function was compiled for L's instructions, so the processor has them.
        unsafe { L::call(WordPanel::<DIGITS>(panel)) };
    }
}

/// Returns the lines that a block is decoded to in memory: words, or the bytes of codes, a line of each part by turns.
const fn block_lines<L: Simd, const PARTS: usize>() -> usize {
    if L::MULTIPLIES_BYTES_AS_WORDS { WORD_LINES } else { CODE_LINES * PARTS }
}

/// Rows that are decoded to memory as codes.
struct Int8Decoded<'a, const DIGITS: usize, const PARTS: usize>(DecodedRows<'a, [u8; 64], StepsAndLows>);

impl<const DIGITS: usize, const PARTS: usize> Kernel for Int8Decoded<'_, DIGITS, PARTS> {
    type Output = ();
    const HAS_DOT_PRODUCTS: bool = true;
    #[inline(always)]
    fn run<S: Simd>(self) {
        let tokens = self.0.x.len();
        multiply_tokens::<S, _>(&mut ByTile(self.0, Int8Tile::<DIGITS, PARTS>), tokens);
    }
}

struct Int8Tile<const DIGITS: usize, const PARTS: usize>;

impl<L: Simd, const DIGITS: usize, const PARTS: usize> DecodedTile<L> for Int8Tile<DIGITS, PARTS> {
    /// Three tokens and four rows have twelve integer sums and twelve f32 sums, which fit into 32 registers. Six tokens would
    /// store and reload sums under each scale, which takes longer than loading codes twice.
    const WIDTHS: &'static [usize] = match (L::MULTIPLIES_SEVERAL_TOKENS && PARTS == 1, DIGITS) {
        (false, _) => &[],
        (true, 1) => &[3, 2],
        (true, _) => &[2],
    };
    #[inline(always)]
    fn sums<const T: usize>(tile: &[[[u8; 64]; ROWS]], x: Tokens<'_>, first: usize) -> [[L; ROWS]; T] {
        const LINES: usize = BLOCKS_PER_SCALE * CODE_LINES;
        let (tokens, scales) = lines_of::<DIGITS, T>(x, first);
        let mut totals = [[L::splat(0.0); ROWS]; T];
        for (part, lines) in tile.chunks(LINES * PARTS).enumerate() {
            let mut sums = [[[[L::zero_sums(); PARTS]; ROWS]; DIGITS]; T];
            for (c, codes) in (part * LINES..).zip(lines.as_chunks::<PARTS>().0) {
                for k in 0..ROWS {
                    for p in 0..PARTS {
                        let code = L::load_bytes(&codes[p][k]);
                        for t in 0..T {
                            for d in 0..DIGITS {
                                // SAFETY: tokens have as many lines as a part of the rows.
                                let x = unsafe { tokens[t][d].get_unchecked(c) };
                                sums[t][d][k][p] = L::dot_u8i8(sums[t][d][k][p], code, x);
                            }
                        }
                    }
                }
            }
            add_scaled::<L, DIGITS, PARTS, T>(&sums, &scales, part, &mut totals);
        }
        totals
    }
}

/// Columns of eight rows under one scale, as words.
struct WordPanel<'a, const DIGITS: usize>(Panel<'a, [u8; 64]>);

impl<const DIGITS: usize> Kernel for WordPanel<'_, DIGITS> {
    type Output = ();
    const HAS_DOT_PRODUCTS: bool = true;
    #[inline(always)]
    fn run<S: Simd>(self) {
        let Panel { lines, columns, x, tokens, first_row, totals } = self.0;
        let (lines, rest) = lines.split_at(columns.len());
        // Rows that do not exist repeat the others.
        let words = [lines, if rest.is_empty() { lines } else { rest }].map(|lines| lines.as_chunks().0);
        let (first, int8, blocks) = (columns.start / WORD_LINES, &x.packed.int8, x.packed.blocks());
        let scales = blocks.div_ceil(BLOCKS_PER_SCALE);
        for (t, totals) in tokens.zip(totals) {
            let totals = totals[first_row..].first_chunk_mut().expect("eight rows");
            for digit in (0..DIGITS).map(|d| x.at(t) * DIGITS + d) {
                let lines = &int8.lines[(digit * blocks + first) * CODE_LINES..][..words[0].len()];
                let scale = &int8.scales[digit * scales + first / BLOCKS_PER_SCALE];
                add_token::<S>(words, lines, scale, totals);
            }
        }
    }
}

/// Even and odd words of a line of codes of four rows.
type WordLines = [[[u8; 64]; ROWS]; 2];

/// Adds the products of one token, a register of each row at a time.
#[inline(always)]
fn add_token<L: Simd>(
    words: [&[WordLines]; 2],
    x: &[[u8; 64]],
    scale: &[f32; LANES],
    totals: &mut [[f32; LANES]; WORD_ROWS],
) {
    for r in 0..L::REGISTERS_PER_VECTOR {
        let mut sums = [L::zero_sum_register(); WORD_ROWS];
        for ((low, high), x) in words[0].iter().zip(words[1]).zip(x) {
            let x = L::widen_signed_register(x, r);
            // One tile after the other: with their words in turn, a sum did not fit into the registers.
            for (sums, words) in sums.as_chunks_mut::<ROWS>().0.iter_mut().zip([low, high]) {
                for j in 0..2 {
                    for k in 0..ROWS {
                        sums[k] = L::dot_word_register(sums[k], L::load_word_register(&words[j][k], r), x[j]);
                    }
                }
            }
        }
        let scale = L::load_register(scale, r);
        for k in 0..WORD_ROWS {
            add_register::<L>(L::sum_register_to_f32(sums[k]), scale, r, &mut totals[k]);
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::arithmetic::Arithmetic;
    use crate::lut_tables::Exponents;
    use crate::test_data::{bytes, cases, noise};
    use crate::{Columns, Layout, MatMul, PackedActivations, Pool, Weight, matmul_batch};
    use proptest::prelude::*;

    fn run(isa: Isa, pool: &Pool, w: &Matrix<'_>, x: &[f32], t: usize) -> Vec<f32> {
        let mut packed = PackedActivations::default();
        let rubbish = Columns { values: &[7.0; 900], first: 0, token_stride: 0, channel_stride: 1 };
        packed.pack(pool, Layout::Int8, rubbish, 9, 900);
        let at = Columns { values: x, first: 0, token_stride: w.cols, channel_stride: 1 };
        packed.pack(pool, w.layout(), at, t, w.cols);
        let mut y = vec![f32::NAN; t * w.rows];
        matmul_batch(
            isa,
            pool,
            &mut [Some(MatMul { w: *w, x: &packed, tokens: None, y: &mut y, stride: w.rows, bias: None })],
        );
        y
    }

    /// Calls `check` with a matrix of each format: its name, the bits of its tables (0 without), and the matrix.
    fn each_matrix(seed: u64, rows: usize, cols: usize, mut check: impl FnMut(&str, usize, &Matrix<'_>)) {
        let group = (1..=4).rev().find(|g| rows.is_multiple_of(*g)).unwrap();
        for width in IndexBits::ALL {
            let bits = usize::from(width.bits());
            let cols = if bits == 8 { cols } else { cols.next_multiple_of(8) };
            let lut = noise(seed + 1, (rows / group) << bits);
            let indices = bytes(seed + 2, rows * cols * bits / 8);
            let m = Matrix::lut(width, &indices, &lut, group, rows, cols).unwrap();
            check(&format!("lut{bits}"), bits, &m.with(&Arithmetic::fast(&m)));
            if width == IndexBits::Six {
                let codes = Int8Codes::of_two_bytes(&lut).unwrap();
                check("digits", bits, &m.with(&Arithmetic::Int8Digits(codes)));
            }
        }
        for (width, signed) in IntBits::ALL.into_iter().flat_map(|width| [(width, true), (width, false)]) {
            let bits = usize::from(width.bits());
            let cols = cols.next_multiple_of(32);
            let data = bytes(seed + 3, rows * cols * bits / 8);
            let (scale, offset) = (noise(seed + 4, rows / group), noise(seed + 5, rows / group));
            for offset in [None, Some(offset.as_slice())] {
                let m = Matrix::int(width, signed, &data, &scale, offset, (group, cols), rows, cols).unwrap();
                check(&format!("int{bits} {signed}"), 0, &m.with(&Arithmetic::fast(&m)));
                if width == IntBits::Eight {
                    let codes = Int8Codes::of_integers(&scale, offset, width, signed);
                    check("digits", 0, &m.with(&Arithmetic::Int8Digits(codes)));
                }
            }
            if width == IntBits::Four {
                let scale = noise(seed + 6, rows / group * cols / 32);
                let m = Matrix::int(width, signed, &data, &scale, None, (group, 32), rows, cols).unwrap();
                check("blocks", 0, &m.with(&Arithmetic::Int8OfBlocks));
            }
        }
        let cols = cols.next_multiple_of(32);
        let data = bytes(seed + 7, rows * cols / 2);
        let powers: Vec<f32> =
            bytes(seed + 8, rows * cols / 32).iter().map(|b| 2f32.powi(i32::from(b % 8) - 6)).collect();
        let format = WeightFormat::Mxfp4 { block_cols: 32 };
        let weight = Weight { format, elements: &data[..], values: Some(&powers[..]), offsets: None };
        let m = Matrix::new(weight, rows, cols).unwrap();
        let exponents = Exponents::new(&powers).unwrap();
        check("mxfp4", 0, &m.with(&Arithmetic::Int8OfExponents(exponents)));
    }

    proptest! {
        #![proptest_config(cases())]
        #[test]
        fn products_of_integers_are_close_and_do_not_depend_on_what_is_beside(
            seed in 1u64..1000,
            rows in 1usize..40,
            cols in 1usize..1300,
            t in prop::sample::select(vec![1usize, 2, 3, 4, 5, 6, 7, 13]),
        ) {
            let (one, three) = (Pool::new(1), Pool::new(3));
            each_matrix(seed, rows, cols, |kind, bits, w| {
                prop_assert_fast(kind, bits, w, seed, t, &one, &three);
            });
        }
    }

    fn prop_assert_fast(
        kind: &str,
        bits: usize,
        w: &Matrix<'_>,
        seed: u64,
        t: usize,
        one: &Pool,
        three: &Pool,
    ) {
        assert!(!matches!(w.arithmetic, Arithmetic::F32), "{kind}");
        let (rows, cols) = (w.rows, w.cols);
        let x = noise(seed + 9, cols * t);
        let mut dense = vec![0f32; rows * cols];
        w.to_dense(&mut dense);
        let mut of_vectors: Option<Vec<f32>> = None;
        for isa in Isa::available() {
            let y = run(isa, one, w, &x, t);
            for k in 0..t {
                for r in 0..rows {
                    let pairs = || (0..cols).map(|c| (dense[r * cols + c], x[k * cols + c]));
                    let exact: f64 = pairs().map(|(w, x)| f64::from(w) * f64::from(x)).sum();
                    // Half a step of each factor in the worst case: x is at most 0.5, and a step of tables at most 1/255.
                    let (most_code, largest) =
                        if kind == "digits" { (32767.0, 16319.0) } else { (255.0, 127.0) };
                    let half_step = if bits > 0 { 0.5 / most_code } else { 0.0 };
                    let terms: f64 =
                        pairs().map(|(w, _)| f64::from(w).abs() * 0.25 / largest + 0.51 * half_step).sum();
                    let bound = terms * 1.01
                        + pairs().map(|(w, x)| f64::from((w * x).abs())).sum::<f64>() * 1e-5
                        + 1e-5;
                    let error = (f64::from(y[k * rows + r]) - exact).abs();
                    assert!(
                        error <= bound,
                        "{kind} {isa:?} [{rows}, {cols}] t {t}: {} for {exact}",
                        y[k * rows + r]
                    );
                }
                let alone = run(isa, one, w, &x[k * cols..(k + 1) * cols], 1);
                assert_eq!(alone, &y[k * rows..(k + 1) * rows], "{kind} {isa:?} [{rows}, {cols}] t {t}");
            }
            assert_eq!(run(isa, three, w, &x, t), y, "{kind} {isa:?}");
            match &of_vectors {
                _ if isa == Isa::Scalar => {}
                None => of_vectors = Some(y),
                Some(other) => assert_eq!(other, &y, "{isa:?} {kind}"),
            }
        }
    }

    /// Checks the error relative to the norm, since random signs average out.
    #[test]
    fn the_error_of_a_product_is_below_one_percent() {
        let (rows, cols) = (256, 2816);
        let lut: Vec<f32> = noise(3, rows / 32 * 16);
        let indices = bytes(4, rows * cols / 2);
        let exact = Matrix::lut(IndexBits::Four, &indices, &lut, 32, rows, cols).unwrap();
        let x: Vec<f32> = noise(5, cols).chunks(2).flat_map(|v| [v[0] + v[1], v[0] * 3.0 - v[1]]).collect();
        let pool = Pool::new(1);
        let a = run(Isa::best(), &pool, &exact, &x, 1);
        let b = run(Isa::best(), &pool, &exact.with(&Arithmetic::fast(&exact)), &x, 1);
        let norm = |v: &mut dyn Iterator<Item = f32>| v.map(|v| f64::from(v).powi(2)).sum::<f64>().sqrt();
        let error = norm(&mut a.iter().zip(&b).map(|(a, b)| a - b)) / norm(&mut a.iter().copied());
        assert!(error > 1e-5 && error < 0.01, "{error}");
        let dot: f64 = a.iter().zip(&b).map(|(a, b)| f64::from(a * b)).sum();
        let cosine = dot / norm(&mut a.iter().copied()) / norm(&mut b.iter().copied());
        assert!(cosine > 0.9999, "{cosine}");
    }

    #[test]
    fn what_is_not_finite_is_not_hidden() {
        let lut = noise(3, 16);
        let indices = bytes(4, 4 * 100);
        let matrix = |lut| Matrix::lut(IndexBits::Four, &indices, lut, 4, 4, 200).unwrap();
        let fast = Arithmetic::fast(&matrix(&lut));
        let w = matrix(&lut).with(&fast);
        for bad in [f32::NAN, f32::INFINITY, f32::NEG_INFINITY] {
            let mut x = noise(5, 200);
            x[77] = bad;
            assert!(run(Isa::best(), &Pool::new(1), &w, &x, 1).iter().all(|v| v.is_nan()), "{bad}");
        }
        assert!(matches!(Arithmetic::fast(&matrix(&[f32::NAN; 16])), Arithmetic::F32));
        let mut scales = noise(6, 4 * 5);
        scales[7] = f32::INFINITY;
        let blocks =
            Matrix::int(IntBits::Four, true, &indices[..320], &scales, None, (1, 32), 4, 160).unwrap();
        assert!(matches!(Arithmetic::fast(&blocks), Arithmetic::F32));
        let zeros = run(Isa::best(), &Pool::new(1), &w, &[0.0; 200], 1);
        assert_eq!(zeros, [0.0; 4]);
    }
}
