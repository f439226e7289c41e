//! Tests exact matmul with integer lookup tables.

use super::*;
use crate::arithmetic::Arithmetic;
use crate::test_data::{bytes, cases, noise};
use crate::{Columns, IndexBits, Layout, MatMul, PackedActivations, Pool, matmul_batch, round_to_int16};
use proptest::prelude::*;

fn filled(w: &Matrix<'_>, x: &[f32], t: usize) -> PackedActivations {
    let mut packed = PackedActivations::default();
    let at = Columns { values: x, first: 0, token_stride: w.cols, channel_stride: 1 };
    packed.pack(&Pool::new(1), w.layout(), at, t, w.cols);
    packed
}

fn run(isa: Isa, w: &Matrix<'_>, x: &[f32], tokens: Option<&[u32]>) -> Vec<f32> {
    let t = x.len() / w.cols;
    let packed = filled(w, x, t);
    let mut y = vec![f32::NAN; tokens.map_or(t, <[u32]>::len) * w.rows];
    let product = MatMul { w: *w, x: &packed, tokens, y: &mut y, stride: w.rows, bias: None };
    matmul_batch(isa, &Pool::new(1), &mut [Some(product)]);
    y
}

/// Makes tables of whole numbers, one for every two rows.
fn tables(seed: u64, rows: usize) -> Vec<f32> {
    let mut lut = noise(seed, rows / 2 * 16);
    lut.chunks_mut(16).for_each(round_to_int16);
    lut
}

proptest! {
    #![proptest_config(cases())]
    #[test]
    fn rounded_tables_are_words_and_close(table in prop::collection::vec(-3.0f32..3.0, 16), power in -20i32..20, halves: bool) {
        let scale = 2f32.powi(power);
        let mut table: Vec<f32> = table.into_iter().map(|v| v * v * v * scale).collect();
        if halves {
            table.iter_mut().for_each(|v| *v = half::f16::from_f32(v.clamp(-60000.0, 60000.0)).to_f32());
        }
        table.sort_by(f32::total_cmp);
        let mut rounded = table.clone();
        round_to_int16(&mut rounded);
        let words = Int16Lut::new(&rounded).unwrap();
        let largest = table.iter().fold(0f32, |a, v| a.max(v.abs()));
        for (i, (v, r)) in table.iter().zip(&rounded).enumerate() {
            prop_assert!((v - r).abs() <= largest / 32768.0);
            prop_assert_eq!(f32::from(words.tables[0][i]) * words.steps[0], *r);
            prop_assert!(!halves || half::f16::from_f32(*r).to_f32() == *r);
        }
        prop_assert!(rounded.is_sorted());
        let again = rounded.clone();
        round_to_int16(&mut rounded);
        prop_assert_eq!(again, rounded);
    }
}

#[test]
fn tables_that_words_do_not_hold_are_refused() {
    let good: Vec<f32> = (0..16).map(|i| i as f32 * 0.25).collect();
    assert!(Int16Lut::new(&good).is_some());
    // The smallest step for a largest entry below four.
    assert!(Int16Lut::new(&[&good[1..], &[1.0 / 8192.0]].concat()).is_some());
    assert!(Int16Lut::new(&[]).is_some());
    assert!(Int16Lut::new(&[0.0; 32]).is_some());
    assert!(Int16Lut::new(&good[..15]).is_none());
    for bad in
        [f32::NAN, f32::INFINITY, f32::NEG_INFINITY, 1e-30, 1e30, f32::MIN_POSITIVE / 2.0, 1.0 / 16384.0]
    {
        let mut table = good.clone();
        table[3] = bad;
        assert!(Int16Lut::new(&table).is_none(), "{bad}");
        // The bad table comes second.
        assert!(Int16Lut::new(&[good.clone(), table].concat()).is_none(), "{bad}");
    }
    assert!(Int16Lut::new(&[1e-30; 16]).is_none());
    // Rounding would raise the largest entry to the next power of two.
    let mut table: Vec<f32> = (0..16).map(|i| i as f32 / 16384.0).collect();
    table[15] = f32::from_bits(2f32.to_bits() - 1);
    round_to_int16(&mut table);
    assert_eq!(Int16Lut::new(&table).unwrap().tables[0][15], 32767);
}

#[test]
fn the_largest_sums_do_not_overflow() {
    let cols = 1024;
    let x = vec![f32::from_bits(2f32.to_bits() - 1); cols];
    let mut lut = vec![0f32; 16];
    (lut[15], lut[7]) = (32767.0 / 16384.0, -32767.0 / 16384.0);
    let words = Int16Lut::new(&lut).unwrap();
    assert_eq!((words.tables[0][15], words.tables[0][7]), (32767, -32767));
    for code in [0xffu8, 0x77] {
        let indices = vec![code; cols / 2];
        let w = Matrix::lut(IndexBits::Four, &indices, &lut, 1, 1, cols).unwrap();
        let exact = Arithmetic::exact(&w);
        let w = w.with(&exact);
        for sign in [1.0, -1.0] {
            let x: Vec<f32> = x.iter().map(|v| v * sign).collect();
            let exact = f64::from(x[0]) * f64::from(lut[usize::from(code & 15)]) * cols as f64;
            for isa in Isa::available() {
                let y = f64::from(run(isa, &w, &x, None)[0]);
                assert!((y - exact).abs() <= 2e-7 * exact.abs(), "{isa:?} {code:x}: {y} for {exact}");
            }
        }
    }
}

/// Returns the root mean square of the errors, divided by that of the exact results.
fn error(w: &Matrix<'_>, x: &[f32]) -> f64 {
    let mut dense = vec![0f32; w.rows * w.cols];
    w.to_dense(&mut dense);
    let y = run(Isa::best(), w, x, None);
    let (mut wrong, mut all) = (0.0, 0.0);
    for (row, y) in dense.chunks_exact(w.cols).zip(y) {
        let exact: f64 = row.iter().zip(x).map(|(w, x)| f64::from(*w) * f64::from(*x)).sum();
        wrong += (f64::from(y) - exact).powi(2);
        all += exact * exact;
    }
    (wrong / all).sqrt()
}

/// Checks errors against their bound, also where one element is far larger than the others.
#[test]
fn errors_are_within_their_bound() {
    let (rows, cols) = (64, 2048);
    let lut = tables(3, rows);
    let indices = bytes(4, rows * cols / 2);
    let w = Matrix::lut(IndexBits::Four, &indices, &lut, 2, rows, cols).unwrap();
    let exact = Arithmetic::exact(&w);
    let w = w.with(&exact);
    let mut dense = vec![0f32; rows * cols];
    w.to_dense(&mut dense);
    let largest = lut.iter().fold(0f32, |a, v| a.max(v.abs()));
    for (seed, large) in (1..40).zip([1.0, 1e2, 1e4, 1e9].into_iter().cycle()) {
        let mut x = noise(seed, cols);
        x[seed as usize * 50] = large;
        let bound: f64 = x.iter().map(|v| 5e-6 * f64::from(largest * v.abs())).sum();
        for (row, y) in dense.chunks_exact(cols).zip(run(Isa::best(), &w, &x, None)) {
            let exact: f64 = row.iter().zip(&x).map(|(w, x)| f64::from(*w) * f64::from(*x)).sum();
            assert!((f64::from(y) - exact).abs() <= bound, "{large}: {y} for {exact}");
        }
    }
}

#[test]
fn words_are_as_exact_as_f32() {
    let (rows, cols) = (256, 2816);
    let lut = tables(3, rows);
    let indices = bytes(4, rows * cols / 2);
    let f32s = Matrix::lut(IndexBits::Four, &indices, &lut, 2, rows, cols).unwrap();
    let exact = Arithmetic::exact(&f32s);
    // Elements of similar and of very different magnitudes.
    for power in [1, 5] {
        let x: Vec<f32> = noise(5, cols).into_iter().map(|v| v.powi(power)).collect();
        let (words, f32s) = (error(&f32s.with(&exact), &x), error(&f32s, &x));
        assert!(words > 0.0 && words < 3e-7 && words < 2.0 * f32s, "{words}, {f32s} in f32");
    }
}

#[test]
fn what_is_finite_stays_so() {
    let (rows, cols) = (8, 256);
    // A small step, in units of which sums are large.
    let mut lut: Vec<f32> = (0..16).map(|i| (i as f32 - 7.5) / 400.0).collect();
    round_to_int16(&mut lut);
    let indices = bytes(4, rows * cols / 2);
    let in_f32 = Matrix::lut(IndexBits::Four, &indices, &lut, rows, rows, cols).unwrap();
    let arithmetic = Arithmetic::exact(&in_f32);
    let w = in_f32.with(&arithmetic);
    for scale in [1e-36f32, 1e-30, 1e-10, 1e10, 1e19, 1e20, 1e30, 1e34, 1e36] {
        let x: Vec<f32> = noise(5, cols).iter().map(|v| v * scale).collect();
        let exact = run(Isa::best(), &in_f32, &x, None);
        for isa in Isa::available() {
            for (y, exact) in run(isa, &w, &x, None).into_iter().zip(&exact) {
                assert!((y - exact).abs() <= 1e-4 * scale, "{isa:?} {scale}: {y} for {exact}");
            }
        }
    }
}

#[test]
fn tokens_that_are_out_of_range_are_multiplied_in_f32() {
    let (rows, cols, t) = (10, 700, 12);
    let lut = tables(3, rows);
    let indices = bytes(4, rows * cols / 2);
    let in_f32 = Matrix::lut(IndexBits::Four, &indices, &lut, 2, rows, cols).unwrap();
    let exact = Arithmetic::exact(&in_f32);
    let w = in_f32.with(&exact);
    let mut x = noise(5, t * cols);
    let good = run(Isa::best(), &w, &x, None);
    x[2 * cols + 699] = f32::NAN;
    x[4 * cols + 1] = f32::INFINITY;
    x[7 * cols..8 * cols].fill(1e-33);
    // Tokens of zeros are not out of range.
    x[9 * cols..10 * cols].fill(0.0);
    for isa in Isa::available() {
        let (all, other) = (run(isa, &w, &x, None), run(isa, &in_f32, &x, None));
        let of =
            |y: &[f32], t: usize| y[t * rows..(t + 1) * rows].iter().map(|v| v.to_bits()).collect::<Vec<_>>();
        for token in 0..t {
            match token {
                2 | 4 | 7 => assert_eq!(of(&all, token), of(&other, token), "{isa:?} {token}"),
                9 => assert!(all[9 * rows..10 * rows].iter().all(|v| *v == 0.0)),
                _ if isa == Isa::best() => assert_eq!(of(&all, token), of(&good, token)),
                _ => {}
            }
        }
        let some = run(isa, &w, &x, Some(&[7, 0, 2, 11]));
        for (i, token) in [7, 0, 2, 11].into_iter().enumerate() {
            assert_eq!(of(&some, i), of(&all, token), "{isa:?} {token}");
        }
    }
    let packed = filled(&w, &x, t);
    let out_of_range: Vec<usize> = (0..t).filter(|&t| packed.int16.of_token[t]).collect();
    assert_eq!(out_of_range, [2, 4, 7]);
    assert_eq!(packed.layout, Layout::Int16);
}
