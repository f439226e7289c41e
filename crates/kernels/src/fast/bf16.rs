//! Products of fp16 and f32 weights in bf16, where the processor multiplies that: twice as many at a time as f32.
//!
//! Weights and tokens are rounded to bf16 (8 bits of precision) and their products added in f32: sixteen lanes, each of two
//! neighbouring columns of 32, first the odd one's product and then the even one's; then the lanes are added by halves. A
//! token's result has the same bits in a batch and alone. As the instructions do, numbers below the normal ones are zero.

use super::{Taken, Target, Tiles};
use crate::lanes::{LANES, Lanes, Plain};
use crate::lines::{Ahead, Lines};
use crate::matrix::{Storage, as_bytes};
use crate::product::{ROWS, RowBytes, prefetch, store, store_rows};
use crate::{Isa, Matrix};
use std::cell::RefCell;

/// Columns of a line.
pub(crate) const COLUMNS: usize = 32;
/// Tokens that pass together.
const WIDE: usize = 6;
/// Tiles of rows that are rounded together.
const DECODED_TILES: usize = 4;
const DECODED_ROWS: usize = DECODED_TILES * ROWS;
/// Rows and columns from which on it is worth it: routers, of which a rounded sum may choose another expert, have fewer.
const ROWS_FROM: usize = 512;
const COLUMNS_FROM: usize = 512;

/// Lines of bf16 with the instructions of one [`Isa`].
trait Pairs: Lanes {
    /// Thirty-two as bf16, to the nearest, ties to even.
    fn narrow(low: Self, high: Self, out: &mut [u8; 64]);
    /// Adds to lane l the products of numbers `2 l + 1` and `2 l`.
    fn dot(sums: Self, w: &[u8; 64], x: &[u8; 64]) -> Self;
}

/// To the nearest, ties to even; what is not a number stays so, and what is below the normal numbers is zero.
#[inline(always)]
fn bf16_bits(v: f32) -> u16 {
    let bits = v.to_bits();
    let (sign, magnitude) = (bits & 0x8000_0000, bits & 0x7fff_ffff);
    let rounded = match magnitude {
        m if m > 0x7f80_0000 => m | 0x0040_0000,
        m if m < 0x0080_0000 => 0,
        m => m + 0x7fff + (m >> 16 & 1),
    };
    ((sign | rounded) >> 16) as u16
}

/// Zero where it is below the normal numbers.
#[inline(always)]
fn normal(v: f32) -> f32 {
    if v.is_subnormal() { 0f32.copysign(v) } else { v }
}

impl Pairs for Plain {
    #[inline(always)]
    fn narrow(low: Self, high: Self, out: &mut [u8; 64]) {
        let mut all = [[0f32; LANES]; 2];
        low.store(&mut all[0]);
        high.store(&mut all[1]);
        for (v, out) in all.as_flattened().iter().zip(out.as_chunks_mut::<2>().0) {
            *out = bf16_bits(*v).to_le_bytes();
        }
    }
    #[inline(always)]
    fn dot(sums: Self, w: &[u8; 64], x: &[u8; 64]) -> Self {
        let number = |of: &[u8; 64], i: usize| {
            normal(f32::from_bits(u32::from(u16::from_le_bytes([of[2 * i], of[2 * i + 1]])) << 16))
        };
        let mut lanes = [0f32; LANES];
        sums.store(&mut lanes);
        for (l, sum) in lanes.iter_mut().enumerate() {
            for i in [2 * l + 1, 2 * l] {
                *sum = normal(number(w, i).mul_add(number(x, i), normal(*sum)));
            }
        }
        Plain::load(&lanes)
    }
}

#[cfg(target_arch = "x86_64")]
mod x86 {
    use super::Pairs;
    use crate::lanes::x86::Avx512;
    use std::arch::x86_64::*;

    impl Pairs for Avx512 {
        #[inline(always)]
        fn narrow(low: Self, high: Self, out: &mut [u8; 64]) {
            // SAFETY: there is room for 64 bytes; the processor has AVX-512 BF16, which `is_native` asks for.
            unsafe {
                let both = _mm512_cvtne2ps_pbh(high.0, low.0);
                out.as_mut_ptr().cast::<__m512bh>().write_unaligned(both);
            }
        }
        #[inline(always)]
        fn dot(sums: Self, w: &[u8; 64], x: &[u8; 64]) -> Self {
            // SAFETY: 64 bytes are there; the processor has AVX-512 BF16, which `is_native` asks for.
            unsafe {
                let w = w.as_ptr().cast::<__m512bh>().read_unaligned();
                let x = x.as_ptr().cast::<__m512bh>().read_unaligned();
                Avx512(_mm512_dpbf16_ps(sums.0, w, x))
            }
        }
    }
}

/// `isa` has products of bf16.
fn is_native(isa: Isa) -> bool {
    #[cfg(target_arch = "x86_64")]
    return isa >= Isa::Avx512 && std::arch::is_x86_feature_detected!("avx512bf16");
    #[cfg(not(target_arch = "x86_64"))]
    {
        let _ = isa;
        false
    }
}

/// Products in bf16 are faster than exact ones here, and the matrix is one that they are for.
pub(crate) fn is_worth_it(rows: usize, cols: usize) -> bool {
    rows >= ROWS_FROM && cols >= COLUMNS_FROM && is_native(Isa::best())
}

/// Rounds tokens, `[tokens, vectors]` of an even number of vectors each.
pub(crate) fn narrow(data: &[[f32; LANES]], out: &mut [[u8; 64]]) {
    #[cfg(target_arch = "x86_64")]
    if is_native(Isa::best()) {
        #[target_feature(enable = "avx512f,avx512bw,avx512vl,avx512bf16,avx2,fma,f16c")]
        fn native(data: &[[f32; LANES]], out: &mut [[u8; 64]]) {
            narrow_on::<crate::lanes::x86::Avx512>(data, out);
        }
        // SAFETY: the processor has the instructions.
        return unsafe { native(data, out) };
    }
    narrow_on::<Plain>(data, out);
}

#[inline(always)]
fn narrow_on<L: Pairs>(data: &[[f32; LANES]], out: &mut [[u8; 64]]) {
    for ([low, high], out) in data.as_chunks().0.iter().zip(out) {
        L::narrow(L::load(low), L::load(high), out);
    }
}

/// Some rows of w, which is of fp16 or f32, with all tokens.
pub(super) fn rows_on(isa: Isa, w: &Matrix<'_>, x: Taken<'_>, rows: &Tiles, y: &Target<'_>) {
    #[cfg(target_arch = "x86_64")]
    if is_native(isa) {
        #[target_feature(enable = "avx512f,avx512bw,avx512vl,avx512bf16,avx2,fma,f16c")]
        fn native(w: &Matrix<'_>, x: Taken<'_>, rows: &Tiles, y: &Target<'_>) {
            all::<crate::lanes::x86::Avx512>(w, x, rows, y);
        }
        // SAFETY: the processor has the instructions.
        return unsafe { native(w, x, rows, y) };
    }
    let _ = isa;
    all::<Plain>(w, x, rows, y);
}

thread_local! {
    static DECODED: RefCell<Lines<[u8; 64]>> = const { RefCell::new(Lines::new()) };
}

#[inline(always)]
fn all<L: Pairs>(w: &Matrix<'_>, x: Taken<'_>, rows: &Tiles, y: &Target<'_>) {
    let (data, halves) = match w.data {
        Storage::F16(data) => (data, true),
        Storage::F32(data) => (as_bytes(data), false),
        _ => unreachable!("a matrix of fp16 or f32"),
    };
    let (stored, lines) = (RowBytes::new(w, data, if halves { 16 } else { 32 }), x.x.padded() / COLUMNS);
    if x.tokens() <= super::FEW {
        for (which, n) in rows.each() {
            // In loops: closures given to other functions would be compiled without this one's instructions.
            let mut bytes: [&[u8]; ROWS] = [&[]; ROWS];
            for i in 0..ROWS {
                // SAFETY: tiles have rows of the matrix.
                bytes[i] = unsafe { stored.row(which[i]) };
            }
            if halves {
                tile::<L, { 2 * COLUMNS }>(bytes, &which[..n], x, y);
            } else {
                tile::<L, { 4 * COLUMNS }>(bytes, &which[..n], x, y);
            }
        }
        return;
    }
    let mut decoded = DECODED.take();
    decoded.grow(DECODED_ROWS * lines, [0; 64]);
    for (which, n) in rows.rows::<DECODED_ROWS>() {
        for (i, &r) in which[..n].iter().enumerate() {
            // SAFETY: tiles have rows of the matrix.
            let bytes = unsafe { stored.row(r) };
            let (tile, _) = decoded[i / ROWS * ROWS * lines..][..ROWS * lines].as_chunks_mut::<ROWS>();
            if halves {
                round_row::<L, { 2 * COLUMNS }>(bytes, tile, i % ROWS);
            } else {
                round_row::<L, { 4 * COLUMNS }>(bytes, tile, i % ROWS);
            }
        }
        let codes = decoded.as_chunks().0;
        let (next, mut at) = (stored.behind(&which[..n]), 0);
        while at < x.tokens() {
            at += match x.tokens() - at {
                WIDE.. => block::<L, WIDE>(codes, next, &which[..n], x, at, y),
                4.. => block::<L, 4>(codes, next, &which[..n], x, at, y),
                2.. => block::<L, 2>(codes, next, &which[..n], x, at, y),
                _ => block::<L, 1>(codes, next, &which[..n], x, at, y),
            };
        }
    }
    DECODED.set(decoded);
}

/// Rounds a row of which 32 columns have BYTES bytes to row k of a tile.
#[inline(always)]
fn round_row<L: Pairs, const BYTES: usize>(bytes: &[u8], tile: &mut [[[u8; 64]; ROWS]], k: usize) {
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

/// Thirty-two columns.
#[inline(always)]
fn round<L: Pairs, const BYTES: usize>(bytes: &[u8; BYTES], out: &mut [u8; 64]) {
    let (low, high) = bytes.split_at(BYTES / 2);
    let (low, high) = if BYTES == 2 * COLUMNS {
        (L::from_f16(chunk(low)), L::from_f16(chunk(high)))
    } else {
        (L::from_f32(chunk(low)), L::from_f32(chunk(high)))
    };
    L::narrow(low, high, out);
}

/// The lines of T tokens, and their number.
#[inline(always)]
fn tokens_of<'a, const T: usize>(x: Taken<'a>, first: usize) -> ([&'a [[u8; 64]]; T], usize) {
    let lines = x.x.padded() / COLUMNS;
    let mut tokens: [&[[u8; 64]]; T] = [&[]; T];
    for t in 0..T {
        tokens[t] = &x.x.halves[x.at(first + t) * lines..][..lines];
    }
    (tokens, lines)
}

/// Four rows, of which as many are wanted as `which` has, with all of a few tokens; rounded in registers for each four.
#[inline(always)]
fn tile<L: Pairs, const BYTES: usize>(bytes: [&[u8]; ROWS], which: &[usize], x: Taken<'_>, y: &Target<'_>) {
    let mut at = 0;
    while at < x.tokens() {
        at += match x.tokens() - at {
            4.. => few::<L, BYTES, 4>(bytes, which, x, at, y),
            2.. => few::<L, BYTES, 2>(bytes, which, x, at, y),
            _ => few::<L, BYTES, 1>(bytes, which, x, at, y),
        };
    }
}

/// Gives T.
#[inline(always)]
fn few<L: Pairs, const BYTES: usize, const T: usize>(
    bytes: [&[u8]; ROWS],
    which: &[usize],
    x: Taken<'_>,
    first: usize,
    y: &Target<'_>,
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
            prefetch(&rows[i].0[c]);
            round::<L, BYTES>(&rows[i].0[c], &mut line);
            for t in 0..T {
                sums[t][i] = L::dot(sums[t][i], &line, &tokens[t][c]);
            }
        }
    }
    if whole < lines {
        for i in 0..ROWS {
            let mut last = [0; BYTES];
            last[..rows[i].1.len()].copy_from_slice(rows[i].1);
            round::<L, BYTES>(&last, &mut line);
            for t in 0..T {
                sums[t][i] = L::dot(sums[t][i], &line, &tokens[t][whole]);
            }
        }
    }
    for t in 0..T {
        for (&r, sum) in which.iter().zip(L::totals(sums[t])) {
            store(y, r, first + t, sum);
        }
    }
    T
}

#[inline(always)]
fn chunk<const N: usize>(bytes: &[u8]) -> &[u8; N] {
    bytes.first_chunk().expect("half of a line's columns")
}

/// Rounded rows, `[tiles, lines, 4, 64]`, with T tokens. Gives T.
#[inline(always)]
fn block<L: Pairs, const T: usize>(
    rows: &[[[u8; 64]; ROWS]],
    next: Ahead,
    which: &[usize],
    x: Taken<'_>,
    first: usize,
    y: &Target<'_>,
) -> usize {
    let (tokens, lines) = tokens_of::<T>(x, first);
    let tiles = which.len().div_ceil(ROWS);
    let mut quarters = [[L::splat(0.0); DECODED_TILES]; T];
    for i in 0..tiles {
        let piece = first * tiles + i * T;
        next.pieces(piece..piece + T, x.tokens() * tiles);
        let mut sums = [[L::splat(0.0); ROWS]; T];
        for (c, four) in rows[i * lines..][..lines].iter().enumerate() {
            for t in 0..T {
                // SAFETY: each token has `lines` lines.
                let token = unsafe { tokens[t].get_unchecked(c) };
                for k in 0..ROWS {
                    sums[t][k] = L::dot(sums[t][k], &four[k], token);
                }
            }
        }
        for t in 0..T {
            quarters[t][i] = L::quarters(sums[t]);
        }
    }
    for t in 0..T {
        store_rows(y, which, first + t, L::totals_of_quarters(quarters[t]));
    }
    T
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::test_data::noise;
    use crate::{Columns, Order, Panel, Pool, Product, products_on};

    fn run(
        isa: Isa,
        threads: usize,
        w: &Matrix<'_>,
        x: &[f32],
        t: usize,
        chosen: Option<&[u32]>,
    ) -> Vec<f32> {
        let mut panel = Panel::default();
        let of = |values, stride| Columns { values, first: 0, token_stride: stride, channel_stride: 1 };
        // Rubbish of an earlier use.
        panel.fill(Order::Rounded, of(&[7.0; 1900], 0), 9, 1900);
        panel.fill(w.order(), of(x, w.cols()), t, w.cols());
        let n = chosen.map_or(t, <[u32]>::len);
        let mut y = vec![f32::NAN; n * w.rows()];
        let stride = w.rows();
        let product = Product { w: *w, x: &panel, tokens: chosen, y: &mut y, stride, bias: None };
        products_on(isa, &Pool::new(threads), &mut [Some(product)]);
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
                        // Two factors, each half of a 2^-8 off, and fp16.
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
                // Of all sizes.
                None => f32::from_bits((i as u32).wrapping_mul(0x9e37_79b9)),
            };
        }
        let (mut plain, mut native) = ([[0u8; 64]; 32], [[1u8; 64]; 32]);
        narrow_on::<Plain>(&data, &mut plain);
        narrow(&data, &mut native);
        assert_eq!(plain, native);
        assert_eq!(bf16_bits(1.0 + 1.0 / 256.0), 0x3f80, "a tie goes to the even one");
        assert_eq!(bf16_bits(1.0 + 3.0 / 256.0), 0x3f82);
    }

    #[test]
    fn small_and_narrow_matrices_stay_exact() {
        assert!(!is_worth_it(128, 2816) && !is_worth_it(2048, 256));
        let stored = vec![0u8; 2 * 600 * 600];
        let w = Matrix::f16(&stored, 600, 600).unwrap().fast(None);
        assert_eq!(w.fast, is_native(Isa::best()));
        assert!(!Matrix::f16(&stored[..2 * 600 * 100], 100, 600).unwrap().fast(None).fast);
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
