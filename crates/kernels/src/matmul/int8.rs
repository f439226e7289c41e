//! Approximate matmul of 8-bit codes and 8-bit activations.
//!
//! ```text
//! weight      w = step * code + low,  code in 0 .. 255      a step and a low value per row
//! activation  x = scale * q,          |q| <= 127            a scale per lane and 8 blocks, see `activations::i8`
//! result      step * sum(scale * sum(code * q)) + low * sum(x)
//! ```
//!
//! The inner sum, over at most 64 columns, is exact in integers. Lanes are scaled and added in f32 after each eight
//! blocks, then added by halves. The result has the same bits for any number of tokens and threads, and for each instruction set.
//! A token of LUT4 takes 12 us where the f32 loop takes 33, 64 tokens 360 where it takes 1302 (`--example matmul`).

use super::decode::RowScales;
use super::int8_codes::*;
use super::int8_words;
use super::schedule::*;
use crate::activations::I8_BLOCKS_PER_SCALE as BLOCKS_PER_SCALE;
use crate::matrix::{BLOCK, Divisor};
use crate::memory::AlignedVec;
use crate::simd::{Kernel, LANES, Simd, U8x64, dispatch};
use crate::weight_format::WeightFormat;
use crate::{Isa, Matrix};
use std::cell::RefCell;
use std::ops::Range;

/// Tokens per pass over decoded rows. Three tokens and four rows have twelve integer sums and twelve f32 sums, which
/// fit into 32 registers. Six tokens would store and reload sums under each scale, which takes longer than loading codes twice.
const TOKENS_PER_PASS: usize = 3;

/// Multiplies some rows of `w`, which have scales per row, by all selected tokens.
pub(super) fn multiply_rows(
    isa: Isa,
    w: &Matrix<'_>,
    x: TokenSelection<'_>,
    rows: &RowTiles,
    y: &OutputRows<'_>,
) {
    macro_rules! run {
        ($format:expr, $bits:expr) => {{
            let weights = Weights { rows: RowBytes::new(w, w.weight.elements, $bits), w, x };
            dispatch(isa, MultiplyRowsInt8 { weights, format: $format, rows, y })
        }};
    }
    match (w.weight.format, w.int8_lut) {
        (WeightFormat::Lut { bits, rows_per_table }, Some(lut)) => {
            let of = TableOf { lut, group: Divisor::new(rows_per_table) };
            match bits {
                1 => run!(SmallTables::<1>(of), 1),
                2 => run!(SmallTables::<2>(of), 2),
                3 => run!(SmallTables::<3>(of), 3),
                4 => run!(Tables4(of), 4),
                6 => run!(Tables6(of), 6),
                _ => run!(Tables8(of), 8),
            }
        }
        (WeightFormat::Int { bits, signed, block_rows, .. }, _) => {
            let (sign, excess) = (sign_bit(bits, signed), code_excess(bits, signed));
            let (scale, offset) = (w.values(), w.weight.offsets);
            let scales = RowScales { scale, offset, block_rows: Divisor::new(block_rows) };
            match bits {
                4 => run!(Integers { codes: Nibbles(sign * 0x11), scales, excess }, 4),
                _ => run!(Integers { codes: Whole(sign), scales, excess }, 8),
            }
        }
        _ => unreachable!("a matrix that has codes"),
    }
}

/// Multiplies rows of one weight format.
struct MultiplyRowsInt8<'a, F> {
    weights: Weights<'a>,
    format: F,
    rows: &'a RowTiles,
    y: &'a OutputRows<'a>,
}

impl<F: Format> Kernel for MultiplyRowsInt8<'_, F> {
    type Output = ();
    const HAS_DOT_PRODUCTS: bool = true;
    #[inline(always)]
    fn run<S: Simd>(self) {
        multiply_tiles::<S, F>(&self.weights, self.format, self.rows, self.y);
    }
}

/// Multiplies decoded rows; they are rows `which` of the matrix.
pub(super) struct MultiplyDecoded<'a> {
    pub rows: &'a DecodedInt8<'a>,
    pub which: &'a [usize],
    pub x: TokenSelection<'a>,
    pub y: &'a OutputRows<'a>,
}

impl Kernel for MultiplyDecoded<'_> {
    type Output = ();
    const HAS_DOT_PRODUCTS: bool = true;
    #[inline(always)]
    fn run<S: Simd>(self) {
        large_batch::<S>(self.rows, self.which, self.x, self.y);
    }
}

thread_local! {
    static DECODED: RefCell<AlignedVec<[u8; 64]>> = const { RefCell::new(AlignedVec::new()) };
}

/// Multiplies all rows of a part by all tokens.
#[inline(always)]
fn multiply_tiles<L: Simd, F: Format>(s: &Weights<'_>, format: F, rows: &RowTiles, y: &OutputRows<'_>) {
    let (x, first) = (s.x, s.w.first);
    let several = F::Code::<L>::SMALL_BATCH_KERNEL && L::MULTIPLIES_SEVERAL_TOKENS;
    if L::MULTIPLIES_BYTES_AS_WORDS && x.tokens() > if several { 4 } else { 1 } {
        return int8_words::multiply_tiles::<L, F>(s, format, rows, y);
    }
    if x.tokens() <= if several { SMALL_BATCH } else { 1 } {
        for (which, n) in rows.each() {
            // Loops, not closures: a closure passed to another function is compiled without this function's instructions.
            let (code, line) = format.row::<L>(first + which[0]);
            let (mut codes, mut lines, mut bytes) = ([code; ROWS], [line; ROWS], [&[] as &[u8]; ROWS]);
            for i in 0..ROWS {
                (codes[i], lines[i]) = format.row::<L>(first + which[i]);
                // SAFETY: every row of a tile is a row of the matrix.
                bytes[i] = unsafe { s.rows.row(which[i]) };
            }
            let rows = FourRows { codes, bytes, lines, which, n };
            let mut at = 0;
            while at < x.tokens() {
                at += match x.tokens() - at {
                    4.. if several => small_batch_tile::<L, F::Code<L>, 4>(&rows, x, at, y),
                    2.. if several => small_batch_tile::<L, F::Code<L>, 2>(&rows, x, at, y),
                    _ => small_batch_tile::<L, F::Code<L>, 1>(&rows, x, at, y),
                };
            }
        }
        return;
    }
    let (lines, few) = (x.x.blocks() * 2, x.tokens() <= SMALL_BATCH);
    let mut memory = DECODED.take();
    memory.grow(ROWS_PER_PASS * lines, [0; 64]);
    for (which, n) in rows.rows::<ROWS_PER_PASS>() {
        let (mut steps, mut lows) = ([0.0; ROWS_PER_PASS], [0.0; ROWS_PER_PASS]);
        for (i, &r) in which[..n].iter().enumerate() {
            let (code, line) = format.row::<L>(first + r);
            (steps[i], lows[i]) = line;
            // SAFETY: every row of a tile is a row of the matrix.
            let bytes = unsafe { s.rows.row(r) };
            let (tile, _) = memory[i / ROWS * ROWS * lines..][..ROWS * lines].as_chunks_mut::<{ 2 * ROWS }>();
            for (b, out) in tile.iter_mut().enumerate() {
                if few && !bytes.is_empty() {
                    let size = F::Code::<L>::BYTES;
                    prefetch_row(&bytes[(b * size).min(bytes.len())..bytes.len().min((b + 1) * size)]);
                }
                let halves = decode_block::<L, F::Code<L>>(code, bytes, b);
                L::store_bytes(halves.0, &mut out[i % ROWS]);
                L::store_bytes(halves.1, &mut out[ROWS + i % ROWS]);
            }
        }
        let next = s.rows.prefetch_after(&which[..n]);
        let decoded = DecodedInt8 { codes: memory.as_chunks().0, steps, lows, next };
        // SAFETY: this function was compiled for L's instructions, so the processor has them.
        unsafe { L::call(MultiplyDecoded { rows: &decoded, which: &which[..n], x, y }) };
    }
    DECODED.set(memory);
}

/// Multiplies decoded rows by all tokens.
#[inline(always)]
fn large_batch<L: U8x64>(rows: &DecodedInt8<'_>, which: &[usize], x: TokenSelection<'_>, y: &OutputRows<'_>) {
    let mut at = 0;
    while at < x.tokens() {
        at += match x.tokens() - at {
            TOKENS_PER_PASS.. if L::MULTIPLIES_SEVERAL_TOKENS => {
                large_batch_tiles::<L, TOKENS_PER_PASS>(rows, which, x, at, y)
            }
            2.. if L::MULTIPLIES_SEVERAL_TOKENS => large_batch_tiles::<L, 2>(rows, which, x, at, y),
            _ => large_batch_tiles::<L, 1>(rows, which, x, at, y),
        };
    }
}

/// Multiplies decoded rows by T tokens from `first` on. Returns T.
#[inline(always)]
fn large_batch_tiles<L: U8x64, const T: usize>(
    rows: &DecodedInt8<'_>,
    which: &[usize],
    x: TokenSelection<'_>,
    first: usize,
    y: &OutputRows<'_>,
) -> usize {
    let (lines, scaled) = (x.x.blocks() * 2, x.x.blocks().div_ceil(BLOCKS_PER_SCALE));
    let mut tokens: [&[[u8; 64]]; T] = [&[]; T];
    let mut scales: [&[[f32; LANES]]; T] = [&[]; T];
    for t in 0..T {
        let token = x.at(first + t);
        tokens[t] = &x.x.int8.bytes[token * lines..][..lines];
        scales[t] = &x.x.int8.scales[token * scaled..][..scaled];
    }
    let mut partial_sums = [[L::splat(0.0); TILES_PER_PASS]; T];
    let tiles = if scaled == 0 { 0 } else { which.len().div_ceil(ROWS) };
    for i in 0..tiles {
        let codes = &rows.codes[i * lines..][..lines];
        let piece = first * tiles + i * T;
        rows.next.prefetch_pieces(piece..piece + T, x.tokens() * tiles);
        let mut totals = [[L::splat(0.0); ROWS]; T];
        for s in 0..scaled {
            let columns = 2 * s * BLOCKS_PER_SCALE..lines.min(2 * (s + 1) * BLOCKS_PER_SCALE);
            // SAFETY: codes and tokens have `lines` lines.
            let sums = unsafe { accumulate::<L, T>(codes, &tokens, columns) };
            for t in 0..T {
                let scale = L::load(&scales[t][s]);
                for k in 0..ROWS {
                    totals[t][k] = L::sums_to_f32(sums[t][k]).mul_add(scale, totals[t][k]);
                }
            }
        }
        for t in 0..T {
            partial_sums[t][i] = L::partial_sums(totals[t]);
        }
    }
    for t in 0..T {
        let sum = L::splat(x.x.int8.sums[x.at(first + t)]);
        let scaled = L::load(&rows.steps).mul(L::finish_partial_sums(partial_sums[t]));
        store_rows(y, which, first + t, scaled.add(L::load(&rows.lows).mul(sum)));
    }
    T
}

/// Returns the integer sums of products of four rows and T tokens over the lines `lines`.
///
/// # Safety
/// Rows and tokens have these lines.
#[inline(always)]
unsafe fn accumulate<L: U8x64, const T: usize>(
    codes: &[[[u8; 64]; ROWS]],
    tokens: &[&[[u8; 64]]; T],
    lines: Range<usize>,
) -> [[L::Sums; ROWS]; T] {
    let mut sums = [[L::zero_sums(); ROWS]; T];
    for c in lines {
        // SAFETY: the caller promises these lines.
        let codes = unsafe { codes.get_unchecked(c) };
        for k in 0..ROWS {
            let code = L::load_bytes(&codes[k]);
            for t in 0..T {
                // SAFETY: the caller promises these lines.
                sums[t][k] = L::dot_u8i8(sums[t][k], code, unsafe { tokens[t].get_unchecked(c) });
            }
        }
    }
    sums
}

/// Holds four rows, of which the first n exist.
struct FourRows<'a, C> {
    codes: [C; ROWS],
    bytes: [&'a [u8]; ROWS],
    /// Step and low value of each row.
    lines: [(f32, f32); ROWS],
    which: [usize; ROWS],
    n: usize,
}

/// Multiplies four rows by T tokens; decodes the codes into registers. Returns T.
#[inline(always)]
fn small_batch_tile<L: U8x64, C: Coded<L>, const T: usize>(
    rows: &FourRows<'_, C>,
    x: TokenSelection<'_>,
    first: usize,
    y: &OutputRows<'_>,
) -> usize {
    let blocks = x.x.blocks();
    let scaled = blocks.div_ceil(BLOCKS_PER_SCALE);
    let mut tokens: [&[[[u8; 64]; 2]]; T] = [&[]; T];
    let mut scales: [&[[f32; LANES]]; T] = [&[]; T];
    for t in 0..T {
        tokens[t] = x.x.int8.bytes[x.at(first + t) * blocks * 2..][..blocks * 2].as_chunks().0;
        scales[t] = &x.x.int8.scales[x.at(first + t) * scaled..][..scaled];
    }
    let mut totals = [[L::splat(0.0); ROWS]; T];
    // Blocks that are whole in all rows.
    let whole = blocks.min(rows.bytes[0].len() / C::BYTES);
    assert!(rows.bytes.iter().all(|b| b.len() == rows.bytes[0].len()));
    for s in 0..scaled {
        let mut sums = [[L::zero_sums(); ROWS]; T];
        let end = blocks.min((s + 1) * BLOCKS_PER_SCALE);
        for c in s * BLOCKS_PER_SCALE..end.min(whole) {
            for i in 0..ROWS {
                // SAFETY: c is below `whole`, which is the number of whole blocks of every row.
                let bytes = unsafe { rows.bytes[i].get_unchecked(c * C::BYTES..(c + 1) * C::BYTES) };
                if T == 1 || C::BYTES < BLOCK {
                    prefetch_row(bytes);
                }
                let (a, b) = rows.codes[i].codes(bytes);
                for t in 0..T {
                    // SAFETY: c is below `blocks`, the number of blocks of each token.
                    let x = unsafe { tokens[t].get_unchecked(c) };
                    sums[t][i] = L::dot_u8i8(L::dot_u8i8(sums[t][i], a, &x[0]), b, &x[1]);
                }
            }
        }
        for c in whole.max(s * BLOCKS_PER_SCALE)..end {
            for i in 0..ROWS {
                let (a, b) = rows.codes[i].rest(&rows.bytes[i][c * C::BYTES..]);
                for t in 0..T {
                    let x = &tokens[t][c];
                    sums[t][i] = L::dot_u8i8(L::dot_u8i8(sums[t][i], a, &x[0]), b, &x[1]);
                }
            }
        }
        for t in 0..T {
            let scale = L::load(&scales[t][s]);
            for i in 0..ROWS {
                totals[t][i] = L::sums_to_f32(sums[t][i]).mul_add(scale, totals[t][i]);
            }
        }
    }
    for t in 0..T {
        let sum = x.x.int8.sums[x.at(first + t)];
        for (i, total) in L::horizontal_sums(totals[t]).into_iter().enumerate().take(rows.n) {
            let (step, low) = rows.lines[i];
            store(y, rows.which[i], first + t, step * total + low * sum);
        }
    }
    T
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::test_data::{bytes, cases, noise};
    use crate::{Columns, Int8Lut, Layout, MatMul, PackedActivations, Pool, matmul_batch_on};
    use proptest::prelude::*;

    fn run(isa: Isa, pool: &Pool, w: &Matrix<'_>, x: &[f32], t: usize) -> Vec<f32> {
        let mut packed = PackedActivations::default();
        let rubbish = Columns { values: &[7.0; 900], first: 0, token_stride: 0, channel_stride: 1 };
        packed.pack(pool, Layout::I8, rubbish, 9, 900);
        let at = Columns { values: x, first: 0, token_stride: w.cols, channel_stride: 1 };
        packed.pack(pool, w.layout(), at, t, w.cols);
        let mut y = vec![f32::NAN; t * w.rows];
        matmul_batch_on(
            isa,
            pool,
            &mut [Some(MatMul { w: *w, x: &packed, tokens: None, y: &mut y, stride: w.rows, bias: None })],
        );
        y
    }

    /// Calls `check` with a matrix of each format: its name, the bits of its tables (0 without), and the matrix.
    fn each_matrix(seed: u64, rows: usize, cols: usize, mut check: impl FnMut(&str, usize, &Matrix<'_>)) {
        let group = (1..=4).rev().find(|g| rows.is_multiple_of(*g)).unwrap();
        for bits in [1, 2, 3, 4, 6, 8] {
            let cols = if bits == 8 { cols } else { cols.next_multiple_of(8) };
            let lut = noise(seed + 1, (rows / group) << bits);
            let indices = bytes(seed + 2, rows * cols * bits / 8);
            let codes = Int8Lut::new(&lut, bits).unwrap();
            let m = Matrix::lut(bits, &indices, &lut, group, rows, cols).unwrap().with_fast(Some(&codes));
            check(&format!("lut{bits}"), bits, &m);
        }
        for (bits, signed) in [(8, true), (8, false), (4, true), (4, false)] {
            let cols = cols.next_multiple_of(32);
            let data = bytes(seed + 3, rows * cols * bits / 8);
            let (scale, offset) = (noise(seed + 4, rows / group), noise(seed + 5, rows / group));
            for offset in [None, Some(offset.as_slice())] {
                let m = Matrix::int(bits, signed, &data, &scale, offset, (group, cols), rows, cols);
                check(&format!("int{bits} {signed}"), 0, &m.unwrap().with_fast(None));
            }
        }
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
        assert!(w.fast, "{kind}");
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
                    let half_step = if bits > 0 { 0.5 / 255.0 } else { 0.0 };
                    let terms: f64 =
                        pairs().map(|(w, _)| f64::from(w).abs() * 0.25 / 127.0 + 0.51 * half_step).sum();
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
        let codes = Int8Lut::new(&lut, 4).unwrap();
        let exact = Matrix::lut(4, &indices, &lut, 32, rows, cols).unwrap();
        let x: Vec<f32> = noise(5, cols).chunks(2).flat_map(|v| [v[0] + v[1], v[0] * 3.0 - v[1]]).collect();
        let pool = Pool::new(1);
        let a = run(Isa::best(), &pool, &exact, &x, 1);
        let b = run(Isa::best(), &pool, &exact.with_fast(Some(&codes)), &x, 1);
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
        let codes = Int8Lut::new(&lut, 4).unwrap();
        let indices = bytes(4, 4 * 100);
        let w = Matrix::lut(4, &indices, &lut, 4, 4, 200).unwrap().with_fast(Some(&codes));
        for bad in [f32::NAN, f32::INFINITY, f32::NEG_INFINITY] {
            let mut x = noise(5, 200);
            x[77] = bad;
            assert!(run(Isa::best(), &Pool::new(1), &w, &x, 1).iter().all(|v| v.is_nan()), "{bad}");
        }
        assert!(Int8Lut::new(&[f32::NAN; 16], 4).is_none());
        assert!(Int8Lut::new(&[0.0; 15], 4).is_none());
        let zeros = run(Isa::best(), &Pool::new(1), &w, &[0.0; 200], 1);
        assert_eq!(zeros, [0.0; 4]);
    }
}
