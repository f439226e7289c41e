//! Integers with scales for parts of a row: a lane's sums are scaled before they are added.

use super::codes::Coded;
use super::{Bytes, CHUNK, SCALED, Source, chunk};
use crate::decode::Scales;
use crate::lanes::LANES;
use crate::product::{ROWS, Target, Tiles, prefetch, store};

/// Rows of which a lane of one of HALVES parts of a chunk has columns of one block: 8 that lie together, or 4 in each half.
#[inline(always)]
pub(super) fn all<L: Bytes, C: Coded<L>, const HALVES: usize>(
    s: &Source<'_>,
    coded: C,
    scales: &Scales<'_>,
    more: f32,
    rows: &Tiles,
    y: &Target<'_>,
) {
    for (which, n) in rows.each() {
        let mut first = 0;
        while first < s.x.tokens() {
            first += match s.x.tokens() - first {
                4.. if L::TILES => tile::<L, C, HALVES, 4>(s, coded, scales, more, (which, n), first, y),
                _ => tile::<L, C, HALVES, 1>(s, coded, scales, more, (which, n), first, y),
            };
        }
    }
}

/// Four rows with T tokens. Gives T.
#[inline(always)]
fn tile<L: Bytes, C: Coded<L>, const HALVES: usize, const T: usize>(
    s: &Source<'_>,
    coded: C,
    scales: &Scales<'_>,
    more: f32,
    (which, n): ([usize; ROWS], usize),
    first: usize,
    y: &Target<'_>,
) -> usize {
    let x = s.x.x;
    let (chunks, step) = (x.chunks(), 4 * (2 / HALVES));
    let scaled = chunks.div_ceil(SCALED);
    let mut blocks = [0; ROWS];
    for i in 0..ROWS {
        blocks[i] = scales.first(s.w.first + which[i]);
    }
    let mut totals = [[L::splat(0.0); ROWS]; T];
    for part in 0..scaled {
        let mut sums = [[L::splat(0.0); ROWS]; T];
        for c in part * SCALED..chunks.min((part + 1) * SCALED) {
            for i in 0..ROWS {
                // SAFETY: tiles have rows of the matrix.
                let bytes = unsafe { s.rows.row(which[i]) };
                prefetch(&bytes[c * C::BYTES..bytes.len().min((c + 1) * C::BYTES)]);
                let (a, b) = chunk::<L, C>(coded, bytes, c);
                let block = blocks[i];
                for half in 0..HALVES {
                    let column = c * CHUNK + half * (CHUNK / HALVES);
                    let scale = scales.lanes::<L>(scales.scale, block, column, step);
                    let zero = match scales.offset {
                        Some(offset) => scales.lanes::<L>(offset, block, column, step).add(L::splat(more)),
                        None => L::splat(more),
                    };
                    for t in 0..T {
                        let at = (s.x.at(first + t) * chunks + c) * 2;
                        let (bytes, lanes) = (&x.narrow.bytes[at..at + 2], &x.narrow.lanes[at..at + 2]);
                        let (dot, sum) = match (HALVES, half) {
                            (1, _) => {
                                let dot = L::dot(L::dot(L::no_sums(), a, &bytes[0]), b, &bytes[1]);
                                (dot, L::load(&lanes[0]).add(L::load(&lanes[1])))
                            }
                            (_, 0) => (L::dot(L::no_sums(), a, &bytes[0]), L::load(&lanes[0])),
                            _ => (L::dot(L::no_sums(), b, &bytes[1]), L::load(&lanes[1])),
                        };
                        let value = zero.neg_mul_add(sum, L::sums(dot));
                        sums[t][i] = value.mul_add(scale, sums[t][i]);
                    }
                }
            }
        }
        for t in 0..T {
            let scale = L::load(&x.narrow.scales[s.x.at(first + t) * scaled + part]);
            for i in 0..ROWS {
                totals[t][i] = sums[t][i].mul_add(scale, totals[t][i]);
            }
        }
    }
    for t in 0..T {
        for (i, total) in L::totals(totals[t]).into_iter().enumerate().take(n) {
            store(y, which[i], first + t, total);
        }
    }
    T
}

const _: () = assert!(LANES == 16 && CHUNK == 128);
