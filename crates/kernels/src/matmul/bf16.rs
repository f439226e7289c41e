//! Approximate matmul of fp16 and f32 weights in bf16.
//!
//! ```text
//! line     32 columns as bf16 (8 bits of precision): lane l holds columns 2 l and 2 l + 1
//! lane l   += w[2 l + 1] * x[2 l + 1], then += w[2 l] * x[2 l]     in f32, as vdpbf16ps adds
//! result   the lanes, added by halves
//! ```
//!
//! Subnormal numbers count as zero, as in the instruction. Scalar code gives the same bits. 64 tokens take 633 us where the f32
//! loop takes 1346 (`--example matmul`).

use super::schedule::*;
use crate::activations::COLUMNS_PER_LINE as COLUMNS;
use crate::memory::{AlignedVec, Prefetch};
use crate::simd::{Bf16Kernel, Bf16x32, dispatch_bf16};
use crate::weight_format::WeightFormat;
use crate::{Isa, Matrix};
use std::cell::RefCell;

/// Tokens per pass over decoded rows: their 24 sums fit into the registers of AVX-512.
const TOKENS_PER_PASS: usize = 6;

/// Multiplies some rows of `w` (fp16 or f32) by all selected tokens.
pub(super) fn multiply_rows(
    isa: Isa,
    w: &Matrix<'_>,
    x: TokenSelection<'_>,
    rows: &RowTiles,
    y: &OutputRows<'_>,
) {
    dispatch_bf16(isa, MultiplyRowsBf16 { w, x, rows, y });
}

struct MultiplyRowsBf16<'a> {
    w: &'a Matrix<'a>,
    x: TokenSelection<'a>,
    rows: &'a RowTiles,
    y: &'a OutputRows<'a>,
}

impl Bf16Kernel for MultiplyRowsBf16<'_> {
    #[inline(always)]
    fn run<S: Bf16x32>(self) {
        multiply_tiles::<S>(self.w, self.x, self.rows, self.y);
    }
}

thread_local! {
    static DECODED: RefCell<AlignedVec<[u8; 64]>> = const { RefCell::new(AlignedVec::new()) };
}

/// Multiplies all rows of a part by all selected tokens.
#[inline(always)]
fn multiply_tiles<L: Bf16x32>(w: &Matrix<'_>, x: TokenSelection<'_>, rows: &RowTiles, y: &OutputRows<'_>) {
    let (data, halves) = (w.weight.elements, w.weight.format == WeightFormat::Fp16);
    let (stored, lines) = (RowBytes::new(w, data, if halves { 16 } else { 32 }), x.x.padded() / COLUMNS);
    if x.tokens() <= SMALL_BATCH {
        for (which, n) in rows.each() {
            // Loops, not closures: a closure passed to another function is compiled without this function's instructions.
            let mut bytes: [&[u8]; ROWS] = [&[]; ROWS];
            for i in 0..ROWS {
                // SAFETY: every row of a tile is a row of the matrix.
                bytes[i] = unsafe { stored.row(which[i]) };
            }
            if halves {
                small_batch::<L, { 2 * COLUMNS }>(bytes, &which[..n], x, y);
            } else {
                small_batch::<L, { 4 * COLUMNS }>(bytes, &which[..n], x, y);
            }
        }
        return;
    }
    let mut decoded = DECODED.take();
    decoded.grow(ROWS_PER_PASS * lines, [0; 64]);
    for (which, n) in rows.rows::<ROWS_PER_PASS>() {
        for (i, &r) in which[..n].iter().enumerate() {
            // SAFETY: every row of a tile is a row of the matrix.
            let bytes = unsafe { stored.row(r) };
            let (tile, _) = decoded[i / ROWS * ROWS * lines..][..ROWS * lines].as_chunks_mut::<ROWS>();
            if halves {
                round_row::<L, { 2 * COLUMNS }>(bytes, tile, i % ROWS);
            } else {
                round_row::<L, { 4 * COLUMNS }>(bytes, tile, i % ROWS);
            }
        }
        let codes = decoded.as_chunks().0;
        let (next, mut at) = (stored.prefetch_after(&which[..n]), 0);
        while at < x.tokens() {
            at += match x.tokens() - at {
                TOKENS_PER_PASS.. => {
                    large_batch_tiles::<L, TOKENS_PER_PASS>(codes, next, &which[..n], x, at, y)
                }
                4.. => large_batch_tiles::<L, 4>(codes, next, &which[..n], x, at, y),
                2.. => large_batch_tiles::<L, 2>(codes, next, &which[..n], x, at, y),
                _ => large_batch_tiles::<L, 1>(codes, next, &which[..n], x, at, y),
            };
        }
    }
    DECODED.set(decoded);
}

/// Rounds a row to bf16 as row k of a tile; `BYTES` is the size of 32 columns.
#[inline(always)]
fn round_row<L: Bf16x32, const BYTES: usize>(bytes: &[u8], tile: &mut [[[u8; 64]; ROWS]], k: usize) {
    let (whole, rest) = bytes.as_chunks::<BYTES>();
    let mut last = [0; BYTES];
    last[..rest.len()].copy_from_slice(rest);
    for (c, line) in tile.iter_mut().enumerate() {
        let bytes = match c.cmp(&whole.len()) {
            std::cmp::Ordering::Less => &whole[c],
            std::cmp::Ordering::Equal => &last,
            std::cmp::Ordering::Greater => &[0; BYTES],
        };
        round::<L, BYTES>(bytes, &mut line[k]);
    }
}

/// Rounds thirty-two columns to a line of bf16.
#[inline(always)]
fn round<L: Bf16x32, const BYTES: usize>(bytes: &[u8; BYTES], out: &mut [u8; 64]) {
    let (low, high) = bytes.split_at(BYTES / 2);
    let (low, high) = if BYTES == 2 * COLUMNS {
        (L::from_f16(chunk(low)), L::from_f16(chunk(high)))
    } else {
        (L::from_f32(chunk(low)), L::from_f32(chunk(high)))
    };
    L::pack_bf16(low, high, out);
}

/// Returns the lines of T tokens from `first` on, and the number of lines of each.
#[inline(always)]
fn tokens_of<'a, const T: usize>(x: TokenSelection<'a>, first: usize) -> ([&'a [[u8; 64]]; T], usize) {
    let lines = x.x.padded() / COLUMNS;
    let mut tokens: [&[[u8; 64]]; T] = [&[]; T];
    for t in 0..T {
        tokens[t] = &x.x.bf16[x.at(first + t) * lines..][..lines];
    }
    (tokens, lines)
}

/// Multiplies rows `which` of a tile by a small batch; rounds the weights in registers once per four tokens.
#[inline(always)]
fn small_batch<L: Bf16x32, const BYTES: usize>(
    bytes: [&[u8]; ROWS],
    which: &[usize],
    x: TokenSelection<'_>,
    y: &OutputRows<'_>,
) {
    let mut at = 0;
    while at < x.tokens() {
        at += match x.tokens() - at {
            4.. => small_batch_tile::<L, BYTES, 4>(bytes, which, x, at, y),
            2.. => small_batch_tile::<L, BYTES, 2>(bytes, which, x, at, y),
            _ => small_batch_tile::<L, BYTES, 1>(bytes, which, x, at, y),
        };
    }
}

/// Multiplies four rows by T tokens from `first` on. Returns T.
#[inline(always)]
fn small_batch_tile<L: Bf16x32, const BYTES: usize, const T: usize>(
    bytes: [&[u8]; ROWS],
    which: &[usize],
    x: TokenSelection<'_>,
    first: usize,
    y: &OutputRows<'_>,
) -> usize {
    let (tokens, lines) = tokens_of::<T>(x, first);
    let mut rows: [(&[[u8; BYTES]], &[u8]); ROWS] = [(&[], &[]); ROWS];
    for i in 0..ROWS {
        rows[i] = bytes[i].as_chunks();
    }
    let whole = rows[0].0.len();
    assert!(whole <= lines && rows.iter().all(|r| r.0.len() == whole));
    let (mut sums, mut line) = ([[L::splat(0.0); ROWS]; T], [0; 64]);
    for c in 0..whole {
        for i in 0..ROWS {
            prefetch_row(&rows[i].0[c]);
            round::<L, BYTES>(&rows[i].0[c], &mut line);
            for t in 0..T {
                sums[t][i] = L::dot_bf16(sums[t][i], &line, &tokens[t][c]);
            }
        }
    }
    if whole < lines {
        for i in 0..ROWS {
            let mut last = [0; BYTES];
            last[..rows[i].1.len()].copy_from_slice(rows[i].1);
            round::<L, BYTES>(&last, &mut line);
            for t in 0..T {
                sums[t][i] = L::dot_bf16(sums[t][i], &line, &tokens[t][whole]);
            }
        }
    }
    for t in 0..T {
        for (&r, sum) in which.iter().zip(L::horizontal_sums(sums[t])) {
            store(y, r, first + t, sum);
        }
    }
    T
}

#[inline(always)]
fn chunk<const N: usize>(bytes: &[u8]) -> &[u8; N] {
    bytes.first_chunk().expect("half of a line's columns")
}

/// Multiplies rounded rows `[tiles, lines, 4, 64]` by T tokens from `first` on. Returns T.
#[inline(always)]
fn large_batch_tiles<L: Bf16x32, const T: usize>(
    rows: &[[[u8; 64]; ROWS]],
    next: Prefetch,
    which: &[usize],
    x: TokenSelection<'_>,
    first: usize,
    y: &OutputRows<'_>,
) -> usize {
    let (tokens, lines) = tokens_of::<T>(x, first);
    let tiles = which.len().div_ceil(ROWS);
    let mut partial_sums = [[L::splat(0.0); TILES_PER_PASS]; T];
    for i in 0..tiles {
        let piece = first * tiles + i * T;
        next.prefetch_pieces(piece..piece + T, x.tokens() * tiles);
        let mut sums = [[L::splat(0.0); ROWS]; T];
        for (c, four) in rows[i * lines..][..lines].iter().enumerate() {
            for t in 0..T {
                // SAFETY: each token has `lines` lines.
                let token = unsafe { tokens[t].get_unchecked(c) };
                for k in 0..ROWS {
                    sums[t][k] = L::dot_bf16(sums[t][k], &four[k], token);
                }
            }
        }
        for t in 0..T {
            partial_sums[t][i] = L::partial_sums(sums[t]);
        }
    }
    for t in 0..T {
        store_rows(y, which, first + t, L::finish_partial_sums(partial_sums[t]));
    }
    T
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::simd::{F32x16, LANES, Scalar, has_bf16, scalar::bf16_bits};
    use crate::test_data::noise;
    use crate::{Columns, Layout, MatMul, PackedActivations, Pool, matmul_batch_on};

    fn run(
        isa: Isa,
        threads: usize,
        w: &Matrix<'_>,
        x: &[f32],
        t: usize,
        chosen: Option<&[u32]>,
    ) -> Vec<f32> {
        let mut packed = PackedActivations::default();
        let of = |values, stride| Columns { values, first: 0, token_stride: stride, channel_stride: 1 };
        let pool = Pool::new(threads);
        // Data of an earlier use, which must not matter.
        packed.pack(&pool, Layout::Bf16, of(&[7.0; 1900], 0), 9, 1900);
        packed.pack(&pool, w.layout(), of(x, w.cols()), t, w.cols());
        let n = chosen.map_or(t, <[u32]>::len);
        let mut y = vec![f32::NAN; n * w.rows()];
        let stride = w.rows();
        let product = MatMul { w: *w, x: &packed, tokens: chosen, y: &mut y, stride, bias: None };
        matmul_batch_on(isa, &pool, &mut [Some(product)]);
        y
    }

    fn bits(v: &[f32]) -> Vec<u32> {
        v.iter().map(|v| v.to_bits()).collect()
    }

    #[test]
    fn every_processor_gives_the_bits_of_plain_code() {
        for (rows, cols, t) in
            [(16, 64, 1), (37, 513, 7), (5, 1000, 13), (530, 600, 3), (33, 31, 9), (1, 1, 2)]
        {
            let (dense, x) = (noise(1, rows * cols), noise(2, cols * t));
            let stored: Vec<u8> = dense.iter().flat_map(|v| half::f16::from_f32(*v).to_le_bytes()).collect();
            let halves = Matrix { fast: true, ..Matrix::f16(&stored, rows, cols).unwrap() };
            let singles = Matrix { fast: true, ..Matrix::f32(&dense, rows, cols).unwrap() };
            for w in [halves, singles] {
                let expected = run(Isa::Scalar, 1, &w, &x, t, None);
                for k in 0..t {
                    for r in 0..rows {
                        let terms =
                            || (0..cols).map(|c| f64::from(dense[r * cols + c]) * f64::from(x[k * cols + c]));
                        let error = f64::from(expected[k * rows + r]) - terms().sum::<f64>();
                        // Two factors with an error of half of 2^-8 each, and the error of fp16.
                        let bound = terms().map(f64::abs).sum::<f64>() * 1.1 / 128.0 + 1e-6;
                        assert!(error.abs() <= bound, "[{rows}, {cols}] {error} of {bound}");
                    }
                    let alone = run(Isa::best(), 1, &w, &x[k * cols..(k + 1) * cols], 1, None);
                    assert_eq!(bits(&alone), bits(&expected[k * rows..(k + 1) * rows]), "alone");
                }
                for isa in Isa::available() {
                    for threads in [1, 3] {
                        let y = run(isa, threads, &w, &x, t, None);
                        assert_eq!(bits(&y), bits(&expected), "{isa:?} [{rows}, {cols}], {t} tokens");
                    }
                    let chosen: Vec<u32> = (0..t as u32).rev().step_by(2).collect();
                    let y = run(isa, 1, &w, &x, t, Some(&chosen));
                    for (y, c) in y.chunks(rows).zip(chosen) {
                        assert_eq!(bits(y), bits(&expected[c as usize * rows..][..rows]), "{isa:?}, chosen");
                    }
                }
            }
        }
    }

    #[test]
    fn numbers_are_rounded_as_the_processor_does() {
        let special = [
            0.0,
            -0.0,
            1.0,
            -1.0,
            1.0 + 1.0 / 256.0,
            1.0 + 3.0 / 256.0,
            1e-39,
            -1e-39,
            1e-45,
            3e38,
            3.4028235e38,
            -3.4028235e38,
            f32::INFINITY,
            f32::NEG_INFINITY,
            f32::NAN,
            0.1,
            f32::MIN_POSITIVE,
            65504.0,
            6e-8,
            -7.7e-20,
        ];
        let mut data = [[0f32; LANES]; 64];
        for (i, v) in data.as_flattened_mut().iter_mut().enumerate() {
            *v = match special.get(i) {
                Some(v) => *v,
                // Numbers of all magnitudes.
                None => f32::from_bits((i as u32).wrapping_mul(0x9e37_79b9)),
            };
        }
        let (mut plain, mut native) = ([[0u8; 64]; 32], [[1u8; 64]; 32]);
        for ([low, high], out) in data.as_chunks().0.iter().zip(&mut plain) {
            Scalar::pack_bf16(Scalar::load(low), Scalar::load(high), out);
        }
        crate::activations::pack_bf16(&data, &mut native);
        assert_eq!(plain, native);
        assert_eq!(bf16_bits(1.0 + 1.0 / 256.0), 0x3f80, "a tie goes to the even one");
        assert_eq!(bf16_bits(1.0 + 3.0 / 256.0), 0x3f82);
    }

    #[test]
    fn small_and_narrow_matrices_stay_exact() {
        let stored = vec![0u8; 2 * 600 * 600];
        let w = Matrix::f16(&stored, 600, 600).unwrap().with_fast(None);
        assert_eq!(w.fast, has_bf16(Isa::best()));
        assert!(!Matrix::f16(&stored[..2 * 600 * 100], 100, 600).unwrap().with_fast(None).fast);
    }

    #[test]
    fn what_is_not_finite_is_not_hidden() {
        let (dense, mut x) = (noise(1, 20 * 600), noise(2, 600));
        let w = Matrix { fast: true, ..Matrix::f32(&dense, 20, 600).unwrap() };
        x[77] = f32::NAN;
        for isa in Isa::available() {
            assert!(run(isa, 1, &w, &x, 1, None).iter().all(|v| v.is_nan()), "{isa:?}");
        }
    }
}
