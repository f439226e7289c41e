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
use super::tile_loop::*;
use crate::activations::COLUMNS_PER_LINE as COLUMNS;
use crate::simd::{Bf16Kernel, Bf16x32, dispatch_bf16};
use crate::weight_format::WeightFormat;
use crate::{Isa, Matrix};
use std::ops::Range;

/// Bytes of a line's columns as fp16, and as f32.
const HALVES: usize = 2 * COLUMNS;
const SINGLES: usize = 4 * COLUMNS;

/// Multiplies some rows of `w` (fp16 or f32) by all selected tokens.
pub(super) fn multiply_rows(isa: Isa, w: &Matrix<'_>, x: Tokens<'_>, tiles: &RowTiles, y: &OutputRows<'_>) {
    let operands = TileOperands { rows: StoredRows::new(w), x, y };
    match w.weight.format {
        WeightFormat::Fp16 => dispatch_bf16(isa, MultiplyRows(Bf16Rows::<HALVES>(operands), tiles)),
        _ => dispatch_bf16(isa, MultiplyRows(Bf16Rows::<SINGLES>(operands), tiles)),
    }
}

/// Rows whose lines have `BYTES` bytes, and what they are multiplied by.
#[derive(Clone, Copy)]
struct Bf16Rows<'a, const BYTES: usize>(TileOperands<'a>);

impl<const BYTES: usize> Bf16Kernel for MultiplyRows<'_, Bf16Rows<'_, BYTES>> {
    #[inline(always)]
    fn run<S: Bf16x32>(self) {
        multiply_tiles::<S, _>(&self.0, self.1);
    }
}

impl<L: Bf16x32, const BYTES: usize> Tile<L> for RegisterTile<'_, Bf16Rows<'_, BYTES>, ()> {
    const WIDTHS: &'static [usize] = if L::IS_REFERENCE { &[] } else { &[4, 2] };
    #[inline(always)]
    fn multiply<const T: usize>(&mut self, first: usize) -> usize {
        let (product, rows) = (self.product, &self.rows);
        let tokens = lines_of::<T>(product.0.x, first);
        let mut bytes = [&[] as &[u8]; ROWS];
        for i in 0..ROWS {
            // SAFETY: every row of a tile is a row of the matrix.
            bytes[i] = unsafe { product.0.rows.bytes(rows[i]) };
        }
        let (whole, lines) = (bytes[0].len() / BYTES, Product::<L>::lines(product));
        let mut spaces = SPACES;
        let mut last = [&[] as &[u8]; ROWS];
        if whole < lines {
            last = last_blocks(&product.0.rows, rows, whole * BYTES, BYTES, false, &mut spaces);
        }
        let (mut sums, mut line) = ([[L::splat(0.0); ROWS]; T], [0; 64]);
        // Further lines are zeros in the tokens.
        for (rows, range) in [(bytes, 0..whole), (last, whole..lines.min(whole + 1))] {
            for (at, c) in range.enumerate() {
                for i in 0..ROWS {
                    let bytes = rows[i][at * BYTES..].first_chunk().expect("a line's columns");
                    prefetch_after(bytes, PREFETCH_DISTANCE);
                    round::<L, BYTES>(bytes, &mut line);
                    for t in 0..T {
                        sums[t][i] = L::dot_bf16(sums[t][i], &line, &tokens[t][c]);
                    }
                }
            }
        }
        self.store(first, &sums)
    }
}

impl<L: Bf16x32, const BYTES: usize> Product<L> for Bf16Rows<'_, BYTES> {
    /// Scalar code always decodes to memory, so that there is less of it.
    const MOST_IN_REGISTERS: usize = if L::IS_REFERENCE { 0 } else { SMALL_BATCH };
    type Line = [u8; 64];
    type Scales = ();

    #[inline(always)]
    fn operands(&self) -> &TileOperands<'_> {
        &self.0
    }

    #[inline(always)]
    fn lines(&self) -> usize {
        self.0.x.packed.padded() / COLUMNS
    }

    #[inline(always)]
    fn scales(&self, _: &[usize]) {}

    #[inline(always)]
    fn decode(&self, row: usize, _: &Range<usize>, distance: usize, k: usize, out: &mut [[[u8; 64]; ROWS]]) {
        // SAFETY: every row of a tile is a row of the matrix.
        let (whole, rest) = unsafe { self.0.rows.bytes(row) }.as_chunks::<BYTES>();
        for (c, line) in out.iter_mut().enumerate() {
            match whole.get(c) {
                Some(bytes) => {
                    if distance > 0 {
                        prefetch_after(bytes, distance);
                    }
                    round::<L, BYTES>(bytes, &mut line[k]);
                }
                None => round::<L, BYTES>(&padded(if c == whole.len() { rest } else { &[] }), &mut line[k]),
            }
        }
    }

    #[inline(always)]
    fn multiply_decoded(rows: DecodedRows<'_, [u8; 64], ()>) {
        let tokens = rows.x.len();
        multiply_tokens::<L, _>(&mut ByTile(rows, Bf16Tile), tokens);
    }

    #[inline(always)]
    fn add_products(_: Panel<'_, [u8; 64]>) {
        unreachable!("rows are decoded whole");
    }
}

/// Returns the bytes, followed by zeros.
#[inline(always)]
fn padded<const BYTES: usize>(bytes: &[u8]) -> [u8; BYTES] {
    let mut all = [0; BYTES];
    all[..bytes.len()].copy_from_slice(bytes);
    all
}

/// Rounds thirty-two columns to a line of bf16.
#[inline(always)]
fn round<L: Bf16x32, const BYTES: usize>(bytes: &[u8; BYTES], out: &mut [u8; 64]) {
    let (low, high) = bytes.split_at(BYTES / 2);
    let (low, high) = if BYTES == HALVES {
        (L::from_f16(chunk(low)), L::from_f16(chunk(high)))
    } else {
        (L::from_f32(chunk(low)), L::from_f32(chunk(high)))
    };
    L::pack_bf16(low, high, out);
}

#[inline(always)]
fn chunk<const N: usize>(bytes: &[u8]) -> &[u8; N] {
    bytes.first_chunk().expect("half of a line's columns")
}

/// Returns the lines of T tokens from `first` on.
#[inline(always)]
fn lines_of<'a, const T: usize>(x: Tokens<'a>, first: usize) -> [&'a [[u8; 64]]; T] {
    let lines = x.packed.padded() / COLUMNS;
    let mut tokens: [&[[u8; 64]]; T] = [&[]; T];
    for t in 0..T {
        tokens[t] = &x.packed.bf16[x.at(first + t) * lines..][..lines];
    }
    tokens
}

/// Rows that are rounded to bf16.
struct Bf16Tile;

impl<L: Bf16x32> DecodedTile<L> for Bf16Tile {
    /// The 24 sums of six tokens fit into the registers of AVX-512.
    const WIDTHS: &'static [usize] = if L::IS_REFERENCE { &[] } else { &[6, 4, 2] };
    #[inline(always)]
    fn sums<const T: usize>(tile: &[[[u8; 64]; ROWS]], x: Tokens<'_>, first: usize) -> [[L; ROWS]; T] {
        let tokens = lines_of::<T>(x, first);
        let mut sums = [[L::splat(0.0); ROWS]; T];
        for (c, four) in tile.iter().enumerate() {
            for t in 0..T {
                // SAFETY: each token has as many lines as the rows.
                let token = unsafe { tokens[t].get_unchecked(c) };
                for k in 0..ROWS {
                    sums[t][k] = L::dot_bf16(sums[t][k], &four[k], token);
                }
            }
        }
        sums
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::arithmetic::Arithmetic;
    use crate::simd::{F32x16, LANES, Scalar, has_bf16, scalar::bf16_bits};
    use crate::test_data::noise;
    use crate::{Columns, Layout, MatMul, PackedActivations, Pool, matmul_batch};

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
        matmul_batch(isa, &pool, &mut [Some(product)]);
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
            let halves =
                Matrix { arithmetic: &Arithmetic::Bf16, ..Matrix::f16(&stored, rows, cols).unwrap() };
            let singles =
                Matrix { arithmetic: &Arithmetic::Bf16, ..Matrix::f32(&dense, rows, cols).unwrap() };
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
        let is_fast = |rows| {
            let w = Matrix::f16(&stored[..2 * 600 * rows], rows, 600).unwrap();
            matches!(Arithmetic::fast(&w), Arithmetic::Bf16)
        };
        assert_eq!(is_fast(600), has_bf16(Isa::best()));
        assert!(!is_fast(100));
    }

    #[test]
    fn what_is_not_finite_is_not_hidden() {
        let (dense, mut x) = (noise(1, 20 * 600), noise(2, 600));
        let w = Matrix { arithmetic: &Arithmetic::Bf16, ..Matrix::f32(&dense, 20, 600).unwrap() };
        x[77] = f32::NAN;
        for isa in Isa::available() {
            assert!(run(isa, 1, &w, &x, 1, None).iter().all(|v| v.is_nan()), "{isa:?}");
        }
    }
}
