//! Exact matmul in f32, for any format.
//!
//! ```text
//! one token        decode a block of 4 rows into registers
//! AVX-512          2 to 8 tokens: the same, multiplied by 2 or 4 tokens   (see `RegisterBatch`, by format)
//!                  otherwise: decode 16 rows into memory, multiply by 6 tokens, 512 columns per pass
//! AVX2, NEON       decode 512 columns of 4 rows (up to 8 tokens) or 256 of 16 into L1, multiply a register of each row by
//!                  3 tokens
//! ```
//!
//! Formats whose rows no kernel reads in place are dequantized row by row first. Scalar code, the reference, always does so.

use super::decode::{self, Decode, MAX_BLOCK_BYTES, VECTORS};
use super::schedule::*;
use crate::matrix::{BLOCK, Divisor};
use crate::memory::{AlignedVec, CacheLevel, Prefetch};
use crate::simd::{F32x16, Kernel, LANES, Simd, dispatch, has_half_tables};
use crate::weight_format::WeightFormat;
use crate::{Isa, Matrix};
use std::cell::RefCell;
use std::mem::MaybeUninit;
use std::ops::Range;

/// Multiplies some rows of `w` by all selected tokens.
pub(super) fn multiply_rows(
    isa: Isa,
    w: &Matrix<'_>,
    x: TokenSelection<'_>,
    rows: &RowTiles,
    y: &OutputRows<'_>,
) {
    if isa == Isa::Scalar || !w.has_native_kernel() {
        return dequantize_fallback(isa, w, x, rows, y);
    }
    macro_rules! run {
        ($decoder:expr, $bits:expr) => {{
            let stored = RowBytes::new(w, w.weight.elements, $bits);
            let weights = F32Weights { decoder: $decoder, rows: stored, first: w.first };
            dispatch(isa, MultiplyRowsF32 { weights, x, rows, y })
        }};
    }
    let (values, offset) = (w.values(), w.weight.offsets);
    match w.weight.format {
        WeightFormat::F32 => run!(decode::Single, 32),
        WeightFormat::Fp16 => run!(decode::Half, 16),
        WeightFormat::Lut { bits, rows_per_table } => {
            let (lut, group) = (values, Divisor::new(rows_per_table));
            if let Some(lut) = w.half_lut.filter(|_| has_half_tables(isa, 1 << bits)) {
                return match bits {
                    6 => run!(decode::HalfLut6 { lut, group }, 6),
                    _ => run!(decode::HalfLut8 { lut, group }, 8),
                };
            }
            match bits {
                1 => run!(decode::LutSmall::<1> { lut, group }, 1),
                2 => run!(decode::LutSmall::<2> { lut, group }, 2),
                3 => run!(decode::LutSmall::<3> { lut, group }, 3),
                4 => run!(decode::Nibbles(decode::Lut4 { lut, group }), 4),
                6 => run!(decode::Lut6 { lut, group }, 6),
                _ => run!(decode::Lut8 { lut, group }, 8),
            }
        }
        WeightFormat::Int { bits, signed, block_rows, block_cols, .. } if block_cols == w.cols => {
            let scales = decode::RowScales { scale: values, offset, block_rows: Divisor::new(block_rows) };
            match bits {
                4 => run!(decode::Nibbles(decode::Int4Rows { scales, signed }), 4),
                _ => run!(decode::Int8Rows { scales, signed }, 8),
            }
        }
        WeightFormat::Int { bits, signed, block_rows, block_cols, .. } => {
            let scales = decode::Scales::new(values, offset, (block_rows, block_cols), w.cols);
            match (bits, scales.vector_shift) {
                (4, _) => run!(decode::Int4 { scales, signed }, 4),
                (_, Some(shift)) => run!(decode::Int8Blocks { scales, shift, signed }, 8),
                (_, None) => run!(decode::Int8 { scales, signed }, 8),
            }
        }
    }
}

/// Multiplies rows of one weight format.
struct MultiplyRowsF32<'a, D> {
    weights: F32Weights<'a, D>,
    x: TokenSelection<'a>,
    rows: &'a RowTiles,
    y: &'a OutputRows<'a>,
}

impl<D: Decode> Kernel for MultiplyRowsF32<'_, D> {
    type Output = ();
    #[inline(always)]
    fn run<S: Simd>(self) {
        // Scalar code dequantizes first.
        if S::IS_REFERENCE {
            unreachable!("see `multiply_rows`");
        }
        multiply_tiles::<S, D>(&self.weights, self.x, self.rows, self.y);
    }
}

/// Multiplies decoded rows; they are rows `which` of the matrix.
struct MultiplyDecodedF32<'a> {
    rows: DecodedF32<'a>,
    which: &'a [usize],
    x: TokenSelection<'a>,
    y: &'a OutputRows<'a>,
}

impl Kernel for MultiplyDecodedF32<'_> {
    type Output = ();
    #[inline(always)]
    fn run<S: Simd>(self) {
        // The 24 sums of four rows and six tokens and their operands fit into the registers of AVX-512.
        if S::REGISTERS >= 32 {
            large_batch::<S, 6>(&self.rows, self.which, self.x, self.y);
        } else {
            large_batch::<S, 1>(&self.rows, self.which, self.x, self.y);
        }
    }
}

/// Multiplies some columns of decoded rows by some tokens, and adds the products to the lanes of each token and row.
struct MultiplyPieceF32<'a> {
    tiles: &'a [[[f32; LANES]; ROWS]], // [tiles, vectors, 4, 16]
    /// Range of vectors that holds the columns.
    vectors: Range<usize>,
    x: TokenSelection<'a>,
    tokens: Range<usize>,
    totals: &'a mut [[f32; LANES]], // [tokens, 16, 16]
}

impl Kernel for MultiplyPieceF32<'_> {
    type Output = ();
    #[inline(always)]
    fn run<S: Simd>(self) {
        let MultiplyPieceF32 { tiles, vectors, x, tokens, totals } = self;
        let (mut first, mut rest) = (tokens.start, totals);
        while first < tokens.end {
            let n = REGISTER_TOKENS.min(tokens.end - first);
            let (totals, after) = rest.split_at_mut(n * ROWS_PER_PASS);
            match n {
                REGISTER_TOKENS => multiply_piece::<S, REGISTER_TOKENS>(tiles, &vectors, x, first, totals),
                2 => multiply_piece::<S, 2>(tiles, &vectors, x, first, totals),
                _ => multiply_piece::<S, 1>(tiles, &vectors, x, first, totals),
            }
            (first, rest) = (first + n, after);
        }
    }
}

/// Tokens per register of four rows: twelve sums, a register of each token and one of a row.
const REGISTER_TOKENS: usize = 3;

/// Multiplies a piece by T tokens from `first` on, see [`MultiplyPieceF32`].
#[inline(always)]
fn multiply_piece<L: Simd, const T: usize>(
    tiles: &[[[f32; LANES]; ROWS]],
    vectors: &Range<usize>,
    x: TokenSelection<'_>,
    first: usize,
    totals: &mut [[f32; LANES]],
) {
    let mut tokens: [&[[f32; LANES]]; T] = [&[]; T];
    for t in 0..T {
        tokens[t] = &x.x.vectors(x.at(first + t))[vectors.clone()];
    }
    for (i, tile) in tiles.chunks_exact(vectors.len()).enumerate() {
        for r in 0..L::REGISTERS_PER_VECTOR {
            let mut sums = [[L::load_register(&[0.0; LANES], r); ROWS]; T];
            for t in 0..T {
                for k in 0..ROWS {
                    sums[t][k] = L::load_register(&totals[t * ROWS_PER_PASS + i * ROWS + k], r);
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
                    L::store_register(sums[t][k], &mut totals[t * ROWS_PER_PASS + i * ROWS + k], r);
                }
            }
        }
    }
}

/// Holds up to sixteen decoded rows as f32.
struct DecodedF32<'a> {
    vectors: &'a [[[f32; LANES]; ROWS]], // [tiles, vectors, 4, 16]
    /// The rows that are decoded next.
    next: Prefetch,
}

thread_local! {
    static DECODED: RefCell<AlignedVec<[f32; LANES]>> = const { RefCell::new(AlignedVec::new()) };
}

/// A dequantized row, and its vectors as a tile.
type OneRow = (Vec<f32>, Vec<[[f32; LANES]; ROWS]>);

thread_local! {
    static DEQUANTIZED: RefCell<OneRow> = RefCell::default();
}

/// Dequantizes rows one by one, and multiplies each by all tokens.
fn dequantize_fallback(isa: Isa, w: &Matrix<'_>, x: TokenSelection<'_>, rows: &RowTiles, y: &OutputRows<'_>) {
    let n = x.x.padded();
    let mut memory = DEQUANTIZED.take();
    let (row, vectors) = &mut memory;
    row.resize(w.cols, 0.0);
    vectors.resize(n / LANES, [[0.0; LANES]; ROWS]);
    for r in rows.each().flat_map(|(rows, n)| rows.into_iter().take(n)) {
        w.decode_row(r, row);
        for (k, [v, ..]) in vectors.iter_mut().enumerate() {
            for (l, v) in v.iter_mut().enumerate() {
                let i = k * LANES + l;
                *v = row.get(i / BLOCK * BLOCK + x.x.layout.column(i % BLOCK)).copied().unwrap_or(0.0);
            }
        }
        dispatch(
            isa,
            MultiplyDecodedF32 { rows: DecodedF32 { vectors, next: Prefetch::NOTHING }, which: &[r], x, y },
        );
    }
    DEQUANTIZED.set(memory);
}

/// Holds the weights of one format, and their decoder.
struct F32Weights<'a, D> {
    decoder: D,
    rows: RowBytes<'a>,
    /// Row of the storage that is row 0 of the matrix.
    first: usize,
}

/// Multiplies all rows of a part by all tokens.
#[inline(always)]
fn multiply_tiles<L: Simd, D: Decode>(
    s: &F32Weights<'_, D>,
    x: TokenSelection<'_>,
    rows: &RowTiles,
    y: &OutputRows<'_>,
) {
    let t = x.tokens();
    if L::REGISTERS < 32 && t > 1 {
        return multiply_tiles_in_pieces::<L, D>(s, x, rows, y);
    }
    let has_registers = L::REGISTERS >= 32;
    if t <= if has_registers { D::REGISTER_BATCH.most } else { 1 } {
        let at_once = if has_registers { D::REGISTER_BATCH.at_once } else { 1 };
        for (which, n) in rows.each() {
            let mut first = 0;
            while first < t {
                first += match t - first {
                    4.. if at_once >= 4 => small_batch_tile::<L, D, 4>(s, which, n, x, first, y),
                    2.. if at_once >= 2 => small_batch_tile::<L, D, 2>(s, which, n, x, first, y),
                    _ => small_batch_tile::<L, D, 1>(s, which, n, x, first, y),
                };
            }
        }
        return;
    }
    let mut decoded = DECODED.take();
    for (which, n) in rows.rows::<ROWS_PER_PASS>() {
        let len = x.x.padded() / LANES;
        decoded.grow(n.next_multiple_of(ROWS) * len, [0.0; LANES]);
        // Prefetches rows of streams here; other rows are prefetched while tokens are multiplied.
        let distance = if t <= SMALL_BATCH { PREFETCH_DISTANCE } else { 0 };
        decode_piece::<L, D>(
            s,
            &which[..n],
            &(0..len),
            distance,
            &mut decoded[..n.next_multiple_of(ROWS) * len],
        );
        let rows = DecodedF32 { vectors: decoded.as_chunks().0, next: s.rows.prefetch_after(&which[..n]) };
        // SAFETY: this function was compiled for L's instructions, so the processor has them.
        unsafe { L::call(MultiplyDecodedF32 { rows, which: &which[..n], x, y }) };
    }
    DECODED.set(decoded);
}

/// Multiplies all rows of a part by several tokens, on processors with few registers.
#[inline(always)]
fn multiply_tiles_in_pieces<L: Simd, D: Decode>(
    s: &F32Weights<'_, D>,
    x: TokenSelection<'_>,
    rows: &RowTiles,
    y: &OutputRows<'_>,
) {
    let tokens = x.tokens();
    let mut memory = (DECODED.take(), LANE_SUMS.take());
    memory.0.grow(PIECE_VECTORS * ROWS_PER_PASS, [0.0; LANES]);
    memory.1.grow(tokens.min(PIECE_TOKENS) * ROWS_PER_PASS, [0.0; LANES]);
    if tokens <= SMALL_BATCH {
        for (which, n) in rows.each() {
            multiply_in_pieces::<L, D, { 2 * PIECE_VECTORS }>(
                s,
                &which[..n],
                PREFETCH_DISTANCE,
                x,
                &mut memory,
                y,
            );
        }
    } else {
        for (which, n) in rows.rows::<ROWS_PER_PASS>() {
            let next = ROWS_PER_PASS * s.rows.row_bytes();
            multiply_in_pieces::<L, D, PIECE_VECTORS>(s, &which[..n], next, x, &mut memory, y);
        }
    }
    DECODED.set(memory.0);
    LANE_SUMS.set(memory.1);
}

/// Vectors of columns that are decoded together for sixteen rows: 16 KB, which stay in L1 with those of three tokens.
const PIECE_VECTORS: usize = 16;

/// Decoded rows, and the lane sums of each row and token.
type F32Pieces = (AlignedVec<[f32; LANES]>, AlignedVec<[f32; LANES]>);

/// Multiplies up to sixteen rows by all tokens; the rows are decoded N vectors at a time.
#[inline(always)]
fn multiply_in_pieces<L: Simd, D: Decode, const N: usize>(
    s: &F32Weights<'_, D>,
    which: &[usize],
    prefetch_distance: usize,
    x: TokenSelection<'_>,
    (decoded, totals): &mut F32Pieces,
    y: &OutputRows<'_>,
) {
    let (len, tokens, tiles) = (x.x.padded() / LANES, x.tokens(), which.len().div_ceil(ROWS));
    for first in (0..tokens).step_by(PIECE_TOKENS) {
        let selected = first..tokens.min(first + PIECE_TOKENS);
        let totals = &mut totals[..selected.len() * ROWS_PER_PASS];
        totals.fill([0.0; LANES]);
        for start in (0..len).step_by(N) {
            let vectors = start..len.min(start + N);
            let n = vectors.len();
            let decoded = &mut decoded[..tiles * n * ROWS];
            decode_piece::<L, D>(s, which, &vectors, prefetch_distance * usize::from(first == 0), decoded);
            let tiles = decoded.as_chunks().0;
            let piece = MultiplyPieceF32 { tiles, vectors, x, tokens: selected.clone(), totals };
            // SAFETY: this function was compiled for L's instructions, so the processor has them.
            unsafe { L::call(piece) };
        }
        for (t, totals) in selected.zip(totals.as_chunks().0) {
            store_rows(y, which, t, add_lanes::<L>(totals, tiles));
        }
    }
}

/// Decodes some vectors of rows (whole blocks) to `[tiles, vectors, 4]`, and prefetches the bytes `prefetch_distance`
/// after them; 0 prefetches nothing.
#[inline(always)]
fn decode_piece<L: F32x16, D: Decode>(
    s: &F32Weights<'_, D>,
    which: &[usize],
    vectors: &Range<usize>,
    prefetch_distance: usize,
    out: &mut [[f32; LANES]],
) {
    let mut rest = [0u8; MAX_BLOCK_BYTES];
    let out = out.as_chunks_mut::<ROWS>().0;
    let (n, first) = (vectors.len(), vectors.start / VECTORS);
    for (i, &r) in which.iter().enumerate() {
        let (out, i) = (&mut out[i / ROWS * n..][..n], i % ROWS);
        // SAFETY: every row of a tile is a row of the matrix.
        let (row, bytes) = (s.decoder.row::<L>(s.first + r), unsafe { s.rows.row(r) });
        for (b, out) in (first..).zip(out.as_chunks_mut::<VECTORS>().0) {
            let raw = match bytes.get(b * D::BYTES..(b + 1) * D::BYTES) {
                Some(bytes) => {
                    if prefetch_distance > 0 {
                        prefetch_block::<D>(bytes, prefetch_distance);
                    }
                    s.decoder.raw::<L>(row, b, bytes)
                }
                None => s.decoder.rest::<L>(row, b, &bytes[b * D::BYTES..], &mut rest),
            };
            for k in 0..VECTORS {
                s.decoder.vector::<L>(row, b, raw, k).store(&mut out[k][i]);
            }
        }
    }
}

/// Prefetches a block `distance` bytes ahead: into L1 for weights of few bits, which wait for instructions rather than
/// memory, else into L2.
#[inline(always)]
fn prefetch_block<D: Decode>(bytes: &[u8], distance: usize) {
    let cache = if D::BYTES < BLOCK { CacheLevel::L1 } else { CacheLevel::L2 };
    crate::memory::prefetch(cache, bytes.as_ptr().wrapping_add(distance), bytes.len());
}

/// Multiplies four rows, of which n exist, by T tokens; decodes the weights into registers. Returns T.
#[inline(always)]
fn small_batch_tile<L: F32x16, D: Decode, const T: usize>(
    s: &F32Weights<'_, D>,
    which: [usize; ROWS],
    n: usize,
    x: TokenSelection<'_>,
    first: usize,
    y: &OutputRows<'_>,
) -> usize {
    let mut acc = [[L::splat(0.0); ROWS]; T];
    // Loops, not closures: a closure passed to another function is compiled without this function's instructions.
    let mut rows = [s.decoder.row::<L>(s.first + which[0]); ROWS];
    let mut bytes: [&[u8]; ROWS] = [&[]; ROWS];
    for i in 0..ROWS {
        rows[i] = s.decoder.row::<L>(s.first + which[i]);
        // SAFETY: every row of a tile is a row of the matrix.
        bytes[i] = unsafe { s.rows.row(which[i]) };
    }
    let mut tokens: [&[[[f32; LANES]; VECTORS]]; T] = [&[]; T];
    for t in 0..T {
        tokens[t] = x.x.vectors(x.at(first + t)).as_chunks().0;
    }
    let whole = bytes[0].len() / D::BYTES;
    for b in 0..whole {
        let mut blocks = [bytes[0]; ROWS];
        for i in 0..ROWS {
            blocks[i] = &bytes[i][b * D::BYTES..(b + 1) * D::BYTES];
            prefetch_block::<D>(blocks[i], PREFETCH_DISTANCE);
        }
        let raw = [
            s.decoder.raw::<L>(rows[0], b, blocks[0]),
            s.decoder.raw::<L>(rows[1], b, blocks[1]),
            s.decoder.raw::<L>(rows[2], b, blocks[2]),
            s.decoder.raw::<L>(rows[3], b, blocks[3]),
        ];
        accumulate_block::<L, D, T>(&s.decoder, &rows, b, raw, &tokens, &mut acc);
    }
    // The end of a row, shorter than a block.
    if whole < tokens[0].len() {
        let mut space = [[0u8; MAX_BLOCK_BYTES]; ROWS];
        let [p, q, r, t] = &mut space;
        let from = whole * D::BYTES;
        let raw = [
            s.decoder.rest::<L>(rows[0], whole, &bytes[0][from..], p),
            s.decoder.rest::<L>(rows[1], whole, &bytes[1][from..], q),
            s.decoder.rest::<L>(rows[2], whole, &bytes[2][from..], r),
            s.decoder.rest::<L>(rows[3], whole, &bytes[3][from..], t),
        ];
        accumulate_block::<L, D, T>(&s.decoder, &rows, whole, raw, &tokens, &mut acc);
    }
    for t in 0..T {
        for (i, sum) in L::horizontal_sums(acc[t]).into_iter().enumerate().take(n) {
            store(y, which[i], first + t, sum);
        }
    }
    T
}

/// Adds the products of one block of four rows; the rows alternate, so that four sums are always in flight.
#[inline(always)]
fn accumulate_block<L: F32x16, D: Decode, const T: usize>(
    d: &D,
    rows: &[D::Row<L>; ROWS],
    b: usize,
    raw: [D::Raw<'_, L>; ROWS],
    tokens: &[&[[[f32; LANES]; VECTORS]]; T],
    acc: &mut [[L; ROWS]; T],
) {
    let mut x = [&[[0f32; LANES]; VECTORS]; T];
    for t in 0..T {
        x[t] = &tokens[t][b];
    }
    for k in 0..VECTORS {
        for i in 0..ROWS {
            let w = d.vector::<L>(rows[i], b, raw[i], k);
            for t in 0..T {
                acc[t][i] = w.mul_add(L::load(&x[t][k]), acc[t][i]);
            }
        }
    }
}

/// Vectors of columns per pass over the tiles: 2 KB per token, so that six tokens stay in L1 while rows come from L2.
const L1_VECTORS: usize = 32;

/// Multiplies decoded rows by all tokens, up to WIDE tokens at a time.
#[inline(always)]
fn large_batch<L: F32x16, const WIDE: usize>(
    rows: &DecodedF32<'_>,
    which: &[usize],
    x: TokenSelection<'_>,
    y: &OutputRows<'_>,
) {
    let mut first = 0;
    while first < x.tokens() {
        first += match x.tokens() - first {
            // Eight tokens go four and four rather than six and two.
            8 | 9 if WIDE > 4 => large_batch_tiles::<L, 4>(rows, which, x, first, y),
            left if left >= WIDE => large_batch_tiles::<L, WIDE>(rows, which, x, first, y),
            4.. if WIDE > 4 => large_batch_tiles::<L, 4>(rows, which, x, first, y),
            2.. if WIDE > 2 => large_batch_tiles::<L, 2>(rows, which, x, first, y),
            _ => large_batch_tiles::<L, 1>(rows, which, x, first, y),
        };
    }
}

/// Multiplies decoded rows by T tokens from `first` on. Returns T.
#[inline(always)]
fn large_batch_tiles<L: F32x16, const T: usize>(
    rows: &DecodedF32<'_>,
    which: &[usize],
    x: TokenSelection<'_>,
    first: usize,
    y: &OutputRows<'_>,
) -> usize {
    let len = x.x.padded() / LANES;
    let tiles = if len == 0 { 0 } else { which.len().div_ceil(ROWS) };
    // Left uninitialized: writing zeros would take as long as some of the multiplications.
    let mut sums = [[MaybeUninit::<L>::uninit(); ROWS_PER_PASS]; T];
    for start in (0..len).step_by(L1_VECTORS) {
        let columns = start..len.min(start + L1_VECTORS);
        // Loops, not closures: a closure passed to another function is compiled without this function's instructions.
        let mut tokens: [&[[f32; LANES]]; T] = [&[]; T];
        for t in 0..T {
            tokens[t] = &x.x.vectors(x.at(first + t))[columns.clone()];
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
                let piece = first * tiles + i * T;
                rows.next.prefetch_pieces(piece..piece + T, x.tokens() * tiles);
            }
            let all = accumulate::<L, T>(&rows.vectors[i * len..][columns.clone()], &tokens, before);
            for t in 0..T {
                for r in 0..ROWS {
                    sums[t][i * ROWS + r].write(all[t][r]);
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
        store_rows(y, which, first + t, L::finish_partial_sums(partial_sums));
    }
    T
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
