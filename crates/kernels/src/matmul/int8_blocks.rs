//! Approximate matmul of integers with scales per block of columns.
//!
//! ```text
//! weight   w = scale * (code - zero)         a scale and an offset per block of a multiple of 4 columns (int4: 8)
//! result   sum(x_scale * sum(scale * (sum(code * q) - zero * sum(q))))
//! ```
//!
//! A lane holds 4 (int4: 8) neighbouring columns of a block of 128. They have one scale, and the lane's sum is scaled
//! before it is added.

use super::decode::Scales;
use super::int8_codes::*;
use super::schedule::*;
use crate::activations::I8_BLOCKS_PER_SCALE as BLOCKS_PER_SCALE;
use crate::matrix::BLOCK;
use crate::simd::{Kernel, LANES, Simd, U8x64, dispatch};
use crate::weight_format::WeightFormat;
use crate::{Isa, Matrix};

/// Multiplies some rows of `w` by all selected tokens.
pub(super) fn multiply_rows(
    isa: Isa,
    w: &Matrix<'_>,
    x: TokenSelection<'_>,
    rows: &RowTiles,
    y: &OutputRows<'_>,
) {
    let WeightFormat::Int { bits, signed, block_rows, block_cols, .. } = w.weight.format else {
        unreachable!("integers with scales per block")
    };
    let weights = Weights { rows: RowBytes::new(w, w.weight.elements, usize::from(bits)), w, x };
    let scales = Scales::new(w.values(), w.weight.offsets, (block_rows, block_cols), w.cols);
    let (sign, excess) = (sign_bit(bits, signed), code_excess(bits, signed));
    match bits {
        4 => dispatch(
            isa,
            MultiplyRowsInt8Blocks::<_, 1> { weights, codes: Nibbles(sign * 0x11), scales, excess, rows, y },
        ),
        _ => dispatch(
            isa,
            MultiplyRowsInt8Blocks::<_, 2> { weights, codes: Whole(sign), scales, excess, rows, y },
        ),
    }
}

/// Multiplies rows whose scales are per block of columns. HALVES is 1 where a lane holds 8 neighbouring columns of one
/// scale, 2 where it holds 4 in each half of a block, each with a scale.
struct MultiplyRowsInt8Blocks<'a, C, const HALVES: usize> {
    weights: Weights<'a>,
    codes: C,
    scales: Scales<'a>,
    excess: f32,
    rows: &'a RowTiles,
    y: &'a OutputRows<'a>,
}

impl<C: StoredIntegers, const HALVES: usize> Kernel for MultiplyRowsInt8Blocks<'_, C, HALVES> {
    type Output = ();
    const INT8: bool = true;
    #[inline(always)]
    fn run<S: Simd>(self) {
        let codes = self.codes.code::<S>();
        multiply_tiles::<S, _, HALVES>(&self.weights, codes, &self.scales, self.excess, self.rows, self.y);
    }
}

/// Multiplies all rows of a part by all tokens.
#[inline(always)]
fn multiply_tiles<L: U8x64, C: Coded<L>, const HALVES: usize>(
    s: &Weights<'_>,
    coded: C,
    scales: &Scales<'_>,
    excess: f32,
    rows: &RowTiles,
    y: &OutputRows<'_>,
) {
    for (which, n) in rows.each() {
        let mut first = 0;
        while first < s.x.tokens() {
            first += match s.x.tokens() - first {
                4.. if L::MULTIPLIES_SEVERAL_TOKENS => {
                    multiply_tile::<L, C, HALVES, 4>(s, coded, scales, excess, (which, n), first, y)
                }
                _ => multiply_tile::<L, C, HALVES, 1>(s, coded, scales, excess, (which, n), first, y),
            };
        }
    }
}

/// Multiplies four rows by T tokens from `first` on. Returns T.
#[inline(always)]
fn multiply_tile<L: U8x64, C: Coded<L>, const HALVES: usize, const T: usize>(
    s: &Weights<'_>,
    coded: C,
    scales: &Scales<'_>,
    excess: f32,
    (which, n): ([usize; ROWS], usize),
    first: usize,
    y: &OutputRows<'_>,
) -> usize {
    let x = s.x.x;
    let (row_blocks, step) = (x.blocks(), 4 * (2 / HALVES));
    let scaled = row_blocks.div_ceil(BLOCKS_PER_SCALE);
    let mut first_blocks = [0; ROWS];
    for i in 0..ROWS {
        first_blocks[i] = scales.first(s.w.first + which[i]);
    }
    let mut totals = [[L::splat(0.0); ROWS]; T];
    for part in 0..scaled {
        let mut sums = [[L::splat(0.0); ROWS]; T];
        for c in part * BLOCKS_PER_SCALE..row_blocks.min((part + 1) * BLOCKS_PER_SCALE) {
            for i in 0..ROWS {
                // SAFETY: every row of a tile is a row of the matrix.
                let bytes = unsafe { s.rows.row(which[i]) };
                prefetch_row(&bytes[c * C::BYTES..bytes.len().min((c + 1) * C::BYTES)]);
                let (a, b) = decode_block::<L, C>(coded, bytes, c);
                let block = first_blocks[i];
                for half in 0..HALVES {
                    let column = c * BLOCK + half * (BLOCK / HALVES);
                    let scale = scales.lanes::<L>(scales.scale, block, column, step);
                    let zero = match scales.offset {
                        Some(offset) => scales.lanes::<L>(offset, block, column, step).add(L::splat(excess)),
                        None => L::splat(excess),
                    };
                    for t in 0..T {
                        let at = (s.x.at(first + t) * row_blocks + c) * 2;
                        let (bytes, lanes) = (&x.int8.bytes[at..at + 2], &x.int8.lane_sums[at..at + 2]);
                        let (dot, sum) = match (HALVES, half) {
                            (1, _) => {
                                let dot =
                                    L::dot_u8i8(L::dot_u8i8(L::zero_sums(), a, &bytes[0]), b, &bytes[1]);
                                (dot, L::load(&lanes[0]).add(L::load(&lanes[1])))
                            }
                            (_, 0) => (L::dot_u8i8(L::zero_sums(), a, &bytes[0]), L::load(&lanes[0])),
                            _ => (L::dot_u8i8(L::zero_sums(), b, &bytes[1]), L::load(&lanes[1])),
                        };
                        let value = zero.neg_mul_add(sum, L::sums_to_f32(dot));
                        sums[t][i] = value.mul_add(scale, sums[t][i]);
                    }
                }
            }
        }
        for t in 0..T {
            let scale = L::load(&x.int8.scales[s.x.at(first + t) * scaled + part]);
            for i in 0..ROWS {
                totals[t][i] = sums[t][i].mul_add(scale, totals[t][i]);
            }
        }
    }
    for t in 0..T {
        for (i, total) in L::horizontal_sums(totals[t]).into_iter().enumerate().take(n) {
            store(y, which[i], first + t, total);
        }
    }
    T
}

const _: () = assert!(LANES == 16 && BLOCK == 128);
