//! Multiplies stored matrices by packed activations.
//!
//! ```text
//! MatMul, MatMul, ..  --jobs-->  parts of row tiles  --threads-->  one tile loop per arithmetic
//!                                                                    f32      any format
//!                                                                    int16    tables of 16 whole numbers, 24-bit tokens
//!                                                                    int8     tables and integers, 8-bit tokens
//!                                                                    bf16     large fp16 and f32
//! ```
//!
//! An element of the result is a sum in sixteen lanes. Each lane adds its columns in ascending order of blocks and
//! vectors; then the lanes are added by halves. This order does not depend on the number of tokens, threads or rows
//! computed together, nor on the instruction set (AVX2, AVX-512, NEON): a token has the same bits alone and in a batch.
//!
//! This file makes jobs and chooses the arithmetic; `tile_loop` loops over rows and tokens for all of them.

mod bf16;
mod decode;
mod f32;
mod int16;
mod int8;
mod int8_blocks;
mod int8_decode;
mod schedule;
mod tile_loop;

pub(crate) use schedule::{OutputRows, RowTiles, Tokens};

use crate::activations::PackedActivations;
use crate::arithmetic::Arithmetic;
use crate::{Isa, Matrix, Pool};
use schedule::{ROWS, SMALL_BATCH, TILES_PER_PASS};

/// Bytes of weights in one part of a job: about 10 microseconds of reading, so that threads end at about the same time.
const PART_BYTES: usize = 32 << 10;
/// Fewest bytes of a part, for matrices that would have fewer than `MIN_PARTS` parts.
const MIN_PART_BYTES: usize = 4 << 10;
/// Parts of a small matrix: one for each of eight threads.
const MIN_PARTS: usize = 8;
/// Most matmuls of one job: the expert packs of a layer.
const JOB_SIZE: usize = 8;
/// Multiplications from which on a job uses several threads: a third of a microsecond of work with AVX-512, some three with the
/// slowest set, while a second thread delays the start and the end of a job by .2 to .3 us (examples/pool.rs).
pub(crate) const PARALLEL_MATMUL: usize = 1 << 15;

/// Describes one matmul `y = w x + bias`.
#[derive(Debug)]
pub struct MatMul<'a> {
    /// Weights.
    pub w: Matrix<'a>, // [rows, cols]
    /// Activations in `w`'s layout.
    pub x: &'a PackedActivations, // [tokens, cols]
    /// Indices of the wanted tokens of `x`; `None` means all, in order.
    pub tokens: Option<&'a [u32]>,
    /// Result; the first `rows` elements of each token are written.
    pub y: &'a mut [f32], // [tokens, stride]
    /// Elements from token to token of `y`.
    pub stride: usize,
    /// Bias per row.
    pub bias: Option<&'a [f32]>, // [rows]
}

fn check(p: &MatMul<'_>) {
    let (w, x) = (&p.w, p.x);
    assert_eq!(x.cols, w.cols, "x has the matrix' columns");
    assert_eq!(x.layout, w.layout(), "x is in the matrix' layout");
    assert!(x.is_packed());
    assert!(p.tokens.is_none_or(|t| t.iter().all(|&t| (t as usize) < x.tokens)), "tokens of x");
    let end = tokens(p).len().checked_sub(1).map(|t| t * p.stride + w.rows);
    assert!(w.rows <= p.stride && end.is_none_or(|end| end <= p.y.len()), "y is [tokens, stride]");
    assert!(p.bias.is_none_or(|b| b.len() == w.rows), "a bias per row");
}

fn tokens<'a>(p: &MatMul<'a>) -> Tokens<'a> {
    Tokens::new(p.x, p.tokens)
}

/// Returns the number of row tiles of a part.
fn part_tiles(w: &Matrix<'_>, tokens: usize) -> usize {
    let bytes = w.bytes_read() as usize;
    let tile = (ROWS * bytes / w.rows.max(1)).max(1);
    let part = (bytes / MIN_PARTS).clamp(MIN_PART_BYTES, PART_BYTES);
    // A row costs more with more tokens.
    let step = if tokens <= SMALL_BATCH { 1 } else { TILES_PER_PASS };
    (part / tile / tokens.div_ceil(8).clamp(1, 8)).max(1).next_multiple_of(step)
}

/// Computes independent matmuls as one job with the instructions of `isa`; skips `None`.
///
/// # Panics
/// Lengths or layouts do not match, or the processor lacks `isa`.
pub fn matmul_batch(isa: Isa, pool: &Pool, all: &mut [Option<MatMul<'_>>]) {
    let mut work = 0;
    for p in all.iter().flatten() {
        check(p);
        work += p.w.rows * p.w.cols * tokens(p).len();
    }
    if work < PARALLEL_MATMUL {
        for p in all.iter_mut().flatten() {
            let y = OutputRows { y: p.y.as_mut_ptr(), stride: p.stride, bias: p.bias };
            multiply_prepared(isa, &p.w, tokens(p), &RowTiles::all(&p.w, tokens(p).len()), &y);
        }
        return;
    }
    struct SharedMatMuls<'s, 'a>(&'s [Option<MatMul<'a>>]);
    // SAFETY: parts write disjoint rows of `y` and only read the rest.
    unsafe impl Sync for SharedMatMuls<'_, '_> {}
    for job in all.chunks_mut(JOB_SIZE) {
        // Per matmul: its tiles, the tiles of a part, and the index of its first part.
        let mut plan: [Option<(RowTiles, usize, usize)>; JOB_SIZE] = [const { None }; JOB_SIZE];
        let mut parts = 0;
        for (p, plan) in job.iter().zip(&mut plan) {
            let Some(p) = p else { continue };
            let n = tokens(p).len();
            let (tiles, size) = (RowTiles::all(&p.w, n), part_tiles(&p.w, n));
            let n = tiles.len().div_ceil(size);
            *plan = Some((tiles, size, parts));
            parts += n;
        }
        let shared = SharedMatMuls(job);
        pool.run_on(work.div_ceil(isa.grain()), parts, &|i| {
            let shared = &shared;
            let found = shared.0.iter().zip(&plan).rev().find_map(|(p, plan)| match (p, plan) {
                (Some(p), Some((tiles, size, first))) if *first <= i => {
                    Some((p, tiles.part(*size, i - first)))
                }
                _ => None,
            });
            if let Some((p, tiles)) = found {
                let y = OutputRows { y: p.y.as_ptr().cast_mut(), stride: p.stride, bias: p.bias };
                multiply_prepared(isa, &p.w, tokens(p), &tiles, &y);
            }
        });
    }
}

/// Multiplies some rows of `w` by all selected tokens, in the arithmetic that the matrix is prepared for.
pub(crate) fn multiply_prepared(
    isa: Isa,
    w: &Matrix<'_>,
    x: Tokens<'_>,
    tiles: &RowTiles,
    y: &OutputRows<'_>,
) {
    if x.len() == 0 {
        return;
    }
    match w.arithmetic {
        Arithmetic::F32 | Arithmetic::F32OfHalves(_) | Arithmetic::F32OfExponents(_) => {
            f32::multiply_rows(isa, w, x, tiles, y);
        }
        Arithmetic::Int16(lut) => int16::multiply_rows(isa, w, lut, x, tiles, y),
        Arithmetic::Int8(codes) => int8::multiply_rows(isa, w, codes, x, tiles, y),
        Arithmetic::Int8Digits(codes) => int8::multiply_rows_in_digits(isa, w, codes, x, tiles, y),
        Arithmetic::Int8OfBlocks | Arithmetic::Int8OfExponents(_) => {
            int8_blocks::multiply_rows(isa, w, x, tiles, y);
        }
        Arithmetic::Bf16 => bf16::multiply_rows(isa, w, x, tiles, y),
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::test_data::{bytes, cases, noise};
    use crate::{Columns, IndexBits, IntBits, Layout};
    use proptest::prelude::*;

    /// Calls `check` with the name and the matrix of each format.
    fn each_matrix(seed: u64, rows: usize, cols: usize, mut check: impl FnMut(&str, &Matrix<'_>)) {
        let n = rows * cols;
        let dense = noise(seed, n);
        check("f32", &Matrix::f32(&dense, rows, cols).unwrap());
        let halves: Vec<u8> = dense.iter().flat_map(|&v| half::f16::from_f32(v).to_le_bytes()).collect();
        check("f16", &Matrix::f16(&halves, rows, cols).unwrap());
        for width in IndexBits::ALL {
            let bits = usize::from(width.bits());
            let group = (1..=4).rev().find(|g| rows.is_multiple_of(*g)).unwrap();
            let mut lut = noise(seed + 1, (rows / group) << bits);
            let indices = bytes(seed + 2, (n * bits).div_ceil(8));
            check(&format!("lut{bits}"), &Matrix::lut(width, &indices, &lut, group, rows, cols).unwrap());
            match width {
                IndexBits::One | IndexBits::Two | IndexBits::Three => {}
                IndexBits::Four => {
                    lut.chunks_mut(16).for_each(crate::round_to_int16);
                    let w = Matrix::lut(width, &indices, &lut, group, rows, cols).unwrap();
                    let exact = Arithmetic::exact(&w);
                    let w = w.with(&exact);
                    assert_eq!(w.layout() == Layout::Int16, cols.is_multiple_of(2));
                    check("lut4 in int16", &w);
                }
                IndexBits::Six | IndexBits::Eight => {
                    crate::round_to_f16(&mut lut);
                    let plain = Matrix::lut(width, &indices, &lut, group, rows, cols).unwrap();
                    let exact = Arithmetic::exact(&plain);
                    let w = plain.with(&exact);
                    check(&format!("lut{bits} of fp16"), &w);
                    // fp16 tables give the bits of f32 tables.
                    let x = noise(seed + 9, cols * 2);
                    for isa in Isa::available() {
                        let run = |w: &Matrix<'_>| run(isa, &Pool::new(1), w, &x, 2, None);
                        assert_eq!(run(&w), run(&plain), "lut{bits} {isa:?} [{rows}, {cols}]");
                    }
                }
            }
        }
        let width = [32, 16, 8, 5, 1].into_iter().find(|n| cols.is_multiple_of(*n)).unwrap();
        let powers: Vec<f32> =
            bytes(seed + 6, n / width).iter().map(|b| 2f32.powi(i32::from(b % 30) - 20)).collect();
        let indices = bytes(seed + 7, n.div_ceil(2));
        let plain = Matrix::mxfp4(&indices, &powers, width, rows, cols).unwrap();
        check("mxfp4", &plain);
        let exact = Arithmetic::exact(&plain);
        assert_eq!(matches!(exact, Arithmetic::F32OfExponents(_)), width == 32);
        check("mxfp4 of exponents", &plain.with(&exact));
        for (width, signed) in IntBits::ALL.into_iter().flat_map(|width| [(width, true), (width, false)]) {
            let bits = usize::from(width.bits());
            for most in [cols, 128, 64, 32, 16, 8, 5] {
                let block = (
                    (1..=2).rev().find(|g| rows.is_multiple_of(*g)).unwrap(),
                    (1..=most).rev().find(|g| cols.is_multiple_of(*g)).unwrap(),
                );
                let blocks = rows / block.0 * (cols / block.1);
                let (scale, offset) = (noise(seed + 3, blocks), noise(seed + 4, blocks));
                let data = bytes(seed + 5, (n * bits).div_ceil(8));
                for offset in [None, Some(offset.as_slice())] {
                    let m = Matrix::int(width, signed, &data, &scale, offset, block, rows, cols).unwrap();
                    check(&format!("int{bits} {signed} {block:?}"), &m);
                }
            }
        }
    }

    fn run(isa: Isa, pool: &Pool, w: &Matrix<'_>, x: &[f32], t: usize, bias: Option<&[f32]>) -> Vec<f32> {
        let mut packed = PackedActivations::default();
        // Data of an earlier use, which must not matter.
        packed.pack(
            pool,
            Layout::F32Interleaved,
            Columns { values: &[7.0; 900], first: 0, token_stride: 0, channel_stride: 1 },
            9,
            900,
        );
        let at = Columns { values: x, first: 0, token_stride: w.cols(), channel_stride: 1 };
        packed.pack(pool, w.layout(), at, t, w.cols());
        let mut y = vec![f32::NAN; t * w.rows()];
        matmul_batch(
            isa,
            pool,
            &mut [Some(MatMul { w: *w, x: &packed, tokens: None, y: &mut y, stride: w.rows(), bias })],
        );
        y
    }

    /// Generates numbers of columns, many of them just below or above whole blocks.
    fn columns() -> impl Strategy<Value = usize> {
        prop_oneof![1usize..400, (1usize..4, 0usize..9).prop_map(|(blocks, more)| 128 * blocks + more - 2)]
    }

    proptest! {
        #![proptest_config(cases())]
        #[test]
        fn every_kind_agrees_with_plain_arithmetic(seed in 1u64..1000, rows in 1usize..40, cols in columns(), t in prop::sample::select(vec![1usize, 2, 3, 5, 6, 7, 13])) {
            let (one, three) = (Pool::new(1), Pool::new(3));
            each_matrix(seed, rows, cols, |kind, w| {
                let x = noise(seed + 9, cols * t);
                let bias = noise(seed + 10, rows);
                let mut dense = vec![0f32; rows * cols];
                w.to_dense(&mut dense);
                let mut of_vectors = None;
                for isa in Isa::available() {
                    let y = run(isa, &one, w, &x, t, Some(&bias));
                    for k in 0..t {
                        for r in 0..rows {
                            let terms = |f: fn(f64) -> f64| -> f64 {
                                (0..cols).map(|c| f(f64::from(dense[r * cols + c]) * f64::from(x[k * cols + c]))).sum()
                            };
                            let exact = terms(|v| v) + f64::from(bias[r]);
                            let error = (f64::from(y[k * rows + r]) - exact).abs();
                            let bound = 1e-6 * (terms(f64::abs) + exact.abs()) + 1e-12;
                            assert!(error <= bound, "{kind} {isa:?} [{rows}, {cols}] t {t}: {} for {exact}", y[k * rows + r]);
                        }
                        // A token alone has the same result.
                        let alone = run(isa, &one, w, &x[k * cols..(k + 1) * cols], 1, Some(&bias));
                        assert_eq!(alone, &y[k * rows..(k + 1) * rows], "{kind} {isa:?} [{rows}, {cols}] t {t}");
                    }
                    assert_eq!(run(isa, &three, w, &x, t, Some(&bias)), y, "{kind} {isa:?}");
                    match &of_vectors {
                        _ if isa == Isa::Scalar => {}
                        None => of_vectors = Some(y),
                        Some(other) => assert_eq!(other, &y, "{isa:?} {kind}"),
                    }
                }
                // Some rows alone.
                let part = w.row_range(rows / 2, rows);
                let all = run(Isa::best(), &one, w, &x, t, None);
                let some = run(Isa::best(), &one, &part, &x, t, None);
                for k in 0..t {
                    assert_eq!(&some[k * part.rows()..(k + 1) * part.rows()], &all[k * rows + rows / 2..(k + 1) * rows]);
                }
            });
        }
    }

    #[test]
    fn tokens_of_another_panel_have_the_same_products() {
        let (rows, tokens, pool) = (21, 67, Pool::new(1));
        for cols in [300, 1100] {
            let x = noise(3, cols * tokens);
            each_matrix(5, rows, cols, |kind, w| {
                let fast = Arithmetic::fast(w);
                for w in [*w, w.with(&fast)] {
                    for isa in Isa::available() {
                        let all = run(isa, &pool, &w, &x, tokens, None);
                        for t in [0, 3, 63, 64, 66] {
                            let alone = run(isa, &pool, &w, &x[t * cols..(t + 1) * cols], 1, None);
                            assert_eq!(alone, &all[t * rows..(t + 1) * rows], "{kind} {isa:?} {cols} {t}");
                        }
                    }
                }
            });
        }
    }

    #[test]
    fn threads_and_chosen_tokens_do_not_change_products() {
        let (rows, cols, t) = (515, 700, 3);
        let (data, other) = (noise(1, rows * cols), noise(7, rows * cols));
        let w = Matrix::f32(&data, rows, cols).unwrap();
        let v = Matrix::f32(&other, rows, cols).unwrap();
        let values = noise(2, cols * t);
        let x = Columns { values: &values, first: 0, token_stride: cols, channel_stride: 1 };
        let mut all = PackedActivations::default();
        all.pack(&Pool::new(1), w.layout(), x, t, cols);
        let run = |threads| {
            let pool = Pool::new(threads);
            let (mut y, mut z, mut some) = (vec![0f32; rows * t], vec![0f32; rows * t], vec![0f32; rows * 2]);
            let product = |w, y, tokens| Some(MatMul { w, x: &all, tokens, y, stride: rows, bias: None });
            let a = product(w, y.as_mut_slice(), None);
            let b = product(v, z.as_mut_slice(), None);
            let c = product(v, some.as_mut_slice(), Some(&[2, 0]));
            matmul_batch(Isa::best(), &pool, &mut [a, None, b, c]);
            assert_eq!(some[..rows], z[2 * rows..3 * rows]);
            assert_eq!(some[rows..], z[..rows]);
            (y, z)
        };
        let one = run(1);
        assert!([2, 3, 8, 64].into_iter().all(|n| run(n) == one));
    }
}
