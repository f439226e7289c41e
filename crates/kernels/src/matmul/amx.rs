//! Multiplies batches of 8-bit codes in AMX tiles. Runs only with `ANEMOE_CPU=amx`: its speed was never measured on a processor.
//!
//! ```text
//! tile of tokens [16 tokens, 64 columns of one lane]  x  tile of codes [64 columns of this lane, 16 rows]  =  256 sums
//! ```
//!
//! A scale belongs to the 64 columns that one lane adds up, so a tile holds the columns of one lane. Tokens and codes
//! are transposed for it: the 4-byte words of sixteen vectors become sixteen vectors, one per lane. Sums are scaled and
//! added in the order of [`super::int8`], which gives the same bits.

use super::int8_codes::DecodedInt8;
use super::schedule::*;
use crate::activations::I8_BLOCKS_PER_SCALE as BLOCKS_PER_SCALE;
use crate::memory::AlignedVec;
use crate::simd::amx::{Amx, Multiply, Sums, TILE_TOKENS as TOKENS, TILE_VECTORS as VECTORS};
use crate::simd::avx512::Avx512;
use crate::simd::{F32x16, LANES};
use crate::weight_format::WeightFormat;
use crate::{Isa, Matrix, Pool};
use std::arch::x86_64::*;
use std::cell::RefCell;

/// Vectors of the transposed codes under one scale.
const CODES: usize = LANES * VECTORS;

const _: () = assert!(LANES == 16 && VECTORS == 2 * BLOCKS_PER_SCALE && ROWS_PER_PASS == 16);

/// Fewest rows of weights for which transposing the tokens pays.
const MIN_TRANSPOSED_ROWS: usize = 64;

/// Transposes the tokens of a batch if AMX will multiply them by `w`. Tells whether it does.
///
/// `out` then is `[tokens / 16 rounded up, scales, 16 lanes, 16 tokens]` vectors of 64 bytes.
pub(super) fn transpose_tokens(
    isa: Isa,
    pool: &Pool,
    w: &Matrix<'_>,
    x: TokenSelection<'_>,
    out: &mut AlignedVec<[u8; 64]>,
) -> bool {
    // Scales per block of columns have no AMX kernel.
    let whole = !matches!(w.weight.format, WeightFormat::Int { block_cols, .. } if block_cols != w.cols);
    let each = group_len(x.x.blocks());
    if isa != Isa::Amx
        || !w.fast
        || !whole
        || x.tokens() <= SMALL_BATCH
        || w.rows < MIN_TRANSPOSED_ROWS
        || each == 0
    {
        return false;
    }
    let n = x.tokens().div_ceil(TOKENS) * each;
    out.grow(n, [0; 64]);
    pool.for_chunks(&mut out[..n], each, &|group, out| {
        // SAFETY: a processor with tiles has AVX-512.
        unsafe { transpose_group(x, group * TOKENS, out) }
    });
    true
}

/// Returns the number of 64-byte lines of sixteen transposed tokens.
fn group_len(blocks: usize) -> usize {
    blocks.div_ceil(BLOCKS_PER_SCALE) * LANES * TOKENS
}

/// Transposes up to sixteen selected tokens from `first` on: vector t of lane l and scale s holds lane l's columns of token t.
#[target_feature(enable = "avx512f,avx512bw,avx512vl,avx512vnni,avx2,fma,f16c")]
fn transpose_group(x: TokenSelection<'_>, first: usize, out: &mut [[u8; 64]]) {
    let blocks = x.x.blocks();
    assert_eq!(out.len(), group_len(blocks));
    for t in 0..TOKENS.min(x.tokens() - first) {
        let bytes = &x.x.int8.bytes[x.at(first + t) * blocks * 2..][..blocks * 2];
        for (bytes, out) in bytes.chunks(VECTORS).zip(out.as_chunks_mut::<{ LANES * TOKENS }>().0) {
            let mut v = [Avx512::splat(0.0); LANES];
            for (v, bytes) in v.iter_mut().zip(bytes) {
                *v = Avx512::from_f32(bytes);
            }
            for (l, v) in Avx512::transpose(v).into_iter().enumerate() {
                put(v, &mut out[l * TOKENS + t]);
            }
        }
    }
}

#[inline(always)]
fn put(v: Avx512, out: &mut [u8; 64]) {
    // SAFETY: `out` has 64 bytes; the processor has AVX-512 F, see `simd`.
    unsafe { _mm512_storeu_ps(out.as_mut_ptr().cast(), v.0) }
}

thread_local! {
    static SPACE: RefCell<Space> = RefCell::default();
}

/// Holds one thread's transposed codes and sums.
#[derive(Default)]
struct Space {
    /// `[scales, 16 lanes, 16 vectors, 16 rows]` words of four codes.
    codes: AlignedVec<[u8; 64]>,
    /// `[16 lanes, 16 tokens, 16 rows]`
    sums: AlignedVec<[f32; LANES]>,
}

/// Multiplies decoded rows by transposed tokens, see [`transpose_tokens`].
///
/// # Safety
/// The processor has AMX.
pub(super) unsafe fn multiply_decoded(
    rows: &DecodedInt8<'_>,
    which: &[usize],
    x: TokenSelection<'_>,
    transposed: &[[u8; 64]],
    y: &OutputRows<'_>,
) {
    // SAFETY: the caller promises AMX.
    unsafe { multiply_in_tiles(Amx, rows, which, x, transposed, y) }
}

/// Multiplies decoded rows by transposed tokens with the tiles of `M`.
///
/// # Safety
/// The processor has AVX-512 VNNI and the instructions of `M`.
#[target_feature(enable = "avx512f,avx512bw,avx512vl,avx512vnni,avx2,fma,f16c")]
unsafe fn multiply_in_tiles<M: Multiply>(
    tiles: M,
    rows: &DecodedInt8<'_>,
    which: &[usize],
    x: TokenSelection<'_>,
    transposed: &[[u8; 64]],
    y: &OutputRows<'_>,
) {
    let (blocks, tokens, n) = (x.x.blocks(), x.tokens(), which.len());
    let scaled = blocks.div_ceil(BLOCKS_PER_SCALE);
    let per_group = group_len(blocks);
    assert!(n <= ROWS_PER_PASS && rows.codes.len() >= n.div_ceil(ROWS) * blocks * 2);
    assert!(transposed.len() >= tokens.div_ceil(TOKENS) * per_group);
    let Space { codes: mut tile_codes, mut sums } = SPACE.take();
    tile_codes.grow(scaled * CODES, [0; 64]);
    sums.grow(LANES * TOKENS, [0.0; LANES]);
    for (s, out) in tile_codes.as_chunks_mut::<CODES>().0.iter_mut().enumerate().take(scaled) {
        for k in 0..VECTORS {
            let mut v = [Avx512::splat(0.0); LANES];
            let column = s * VECTORS + k;
            // Tokens end with zeros, so the codes there do not matter.
            if column < blocks * 2 {
                for (row, v) in v.iter_mut().enumerate().take(n) {
                    *v = Avx512::from_f32(&rows.codes[row / ROWS * blocks * 2 + column][row % ROWS]);
                }
            }
            for (l, v) in Avx512::transpose(v).into_iter().enumerate() {
                put(v, &mut out[l * VECTORS + k]);
            }
        }
    }
    let (steps, lows) = (Avx512::load(&rows.steps), Avx512::load(&rows.lows));
    for first in (0..tokens).step_by(TOKENS) {
        let some = TOKENS.min(tokens - first);
        rows.next.prefetch_pieces(first..first + some, tokens);
        // SAFETY: the caller promises the same.
        unsafe { tiles.shape(some) };
        let scales = |t: usize, s: usize| &x.x.int8.scales[x.at(first + t) * scaled + s];
        let mut scale_of = [&[0f32; LANES]; TOKENS];
        let mut found = [Sums([[0; LANES]; TOKENS]); 2];
        let (transposed, _) = transposed[first / TOKENS * per_group..][..per_group].as_chunks::<TOKENS>();
        let (tile_codes, _) = tile_codes.as_chunks::<VECTORS>();
        for s in 0..scaled {
            for (t, scale) in scale_of.iter_mut().enumerate().take(some) {
                *scale = scales(t, s);
            }
            // Scales a lane's sums while the tiles of the next lane are multiplied.
            for l in 0..=LANES {
                if l < LANES {
                    let (a, b) = (&transposed[s * LANES + l], &tile_codes[s * LANES + l]);
                    // SAFETY: the thread was prepared above; the caller promises the rest.
                    unsafe { tiles.multiply(a, b, &mut found[l % 2]) };
                }
                let Some(l) = l.checked_sub(1) else { continue };
                let all = &mut sums[l * TOKENS..][..TOKENS];
                if some == TOKENS {
                    scale::<TOKENS>(&found[l % 2].0, &scale_of, l, s == 0, all);
                } else {
                    for t in 0..some {
                        let (found, scale_of) = (&found[l % 2].0[t..], &scale_of[t..]);
                        scale::<1>(found, scale_of, l, s == 0, &mut all[t..]);
                    }
                }
            }
        }
        for t in 0..some {
            let mut lanes = [Avx512::splat(0.0); LANES];
            for l in 0..LANES {
                lanes[l] = Avx512::load(&sums[l * TOKENS + t]);
            }
            for width in [8, 4, 2, 1] {
                for l in 0..width {
                    lanes[l] = lanes[l].add(lanes[l + width]);
                }
            }
            let sum = Avx512::splat(x.x.int8.sums[x.at(first + t)]);
            let v = steps.mul(lanes[0]).add(lows.mul(sum));
            store_rows(y, which, first + t, v);
        }
    }
    // SAFETY: the caller promises the same.
    unsafe { tiles.end() };
    SPACE.set(Space { codes: tile_codes, sums });
}

/// Adds the scaled sums of T tokens in lane l to `all`; the first scale's sums (`first`) replace `all`.
#[inline(always)]
fn scale<const T: usize>(
    found: &[[i32; LANES]],
    scales: &[&[f32; LANES]],
    l: usize,
    first: bool,
    all: &mut [[f32; LANES]],
) {
    assert!(found.len() >= T && scales.len() >= T && all.len() >= T && l < LANES);
    for t in 0..T {
        // SAFETY: `found[t]` has sixteen sums; the processor has AVX-512 F.
        let v = Avx512(unsafe { _mm512_cvtepi32_ps(_mm512_loadu_si512(found[t].as_ptr().cast())) });
        let before = if first { Avx512::splat(0.0) } else { Avx512::load(&all[t]) };
        v.mul_add(Avx512::splat(scales[t][l]), before).store(&mut all[t]);
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::test_data::{bytes, noise};
    use crate::{Columns, Layout, MatMul, PackedActivations, matmul_batch_on};
    use std::cell::Cell;

    /// Multiplies tiles in scalar code, for processors without AMX. Remembers the prepared number of tokens, 0 after the end.
    #[derive(Clone, Copy)]
    struct Loops<'a>(&'a Cell<usize>);

    impl Multiply for Loops<'_> {
        unsafe fn shape(self, tokens: usize) {
            self.0.set(tokens);
        }
        unsafe fn multiply(self, a: &[[u8; 64]; TOKENS], b: &[[u8; 64]; VECTORS], sums: &mut Sums) {
            crate::simd::amx::multiply_plainly(self.0.get(), a, b, sums);
        }
        unsafe fn end(self) {
            self.0.set(0);
        }
    }

    fn bits(v: &[f32]) -> Vec<u32> {
        v.iter().map(|v| v.to_bits()).collect()
    }

    fn pack(x: &[f32], cols: usize, tokens: usize) -> PackedActivations {
        let mut packed = PackedActivations::default();
        let at = Columns { values: x, first: 0, token_stride: cols, channel_stride: 1 };
        packed.pack(&Pool::new(1), Layout::I8, at, tokens, cols);
        packed
    }

    #[test]
    fn tiles_give_the_bits_of_rows() {
        if !Isa::Avx512.is_available() {
            return;
        }
        for (rows, cols, tokens) in
            [(16usize, 1024, 16), (16, 2816, 33), (16, 100, 9), (5, 1100, 20), (1, 8, 1), (13, 2048, 15)]
        {
            let mut x = noise(1, cols * tokens);
            // A token of zeros, and a token with an element that is not finite.
            x[..cols].fill(0.0);
            x[cols * tokens - 1] = f32::INFINITY;
            let packed = pack(&x, cols, tokens);
            let blocks = packed.blocks();
            let codes = bytes(2, rows.next_multiple_of(ROWS) * blocks * 128);
            let (steps, lows, bias) = (noise(3, ROWS_PER_PASS), noise(4, ROWS_PER_PASS), noise(5, rows));
            let decoded = DecodedInt8 {
                codes: codes.as_chunks::<64>().0.as_chunks().0,
                steps: steps.try_into().unwrap(),
                lows: lows.try_into().unwrap(),
                next: crate::memory::Prefetch::NOTHING,
            };
            let which: Vec<usize> = (0..rows).collect();
            let mut chosen: Vec<u32> = (0..tokens as u32).rev().collect();
            chosen[0] = 0;
            for (bias, taken) in [(None, None), (Some(bias.as_slice()), Some(chosen.as_slice()))] {
                let x = TokenSelection::new(&packed, taken);
                // Lines without a token hold arbitrary bytes.
                let mut transposed = vec![[9; 64]; tokens.div_ceil(TOKENS) * group_len(blocks)];
                let prepared = Cell::new(77);
                let (mut expected, mut found) = (vec![9f32; tokens * rows], vec![7f32; tokens * rows]);
                let to = |y: &mut Vec<f32>| OutputRows { y: y.as_mut_ptr(), stride: rows, bias };
                // SAFETY: the processor has AVX-512 VNNI; the targets have the rows of all tokens.
                unsafe {
                    for (group, out) in transposed.chunks_exact_mut(group_len(blocks)).enumerate() {
                        transpose_group(x, group * TOKENS, out);
                    }
                    crate::simd::dispatch(
                        Isa::Avx512,
                        crate::matmul::int8::MultiplyDecoded {
                            rows: &decoded,
                            which: &which,
                            x,
                            y: &to(&mut expected),
                        },
                    );
                    multiply_in_tiles(Loops(&prepared), &decoded, &which, x, &transposed, &to(&mut found));
                }
                assert_eq!(prepared.get(), 0, "tiles are let go of");
                assert_eq!(bits(&found), bits(&expected), "[{rows}, {cols}], {tokens} tokens");
            }
        }
    }

    /// Checks whole matmuls where AMX is available: several matmuls of one job, each with its own tokens and weight format.
    #[test]
    fn batches_through_tiles_have_the_bits_of_others() {
        if !Isa::Amx.is_available() {
            assert!(
                !crate::simd::amx::has_tiles() || !crate::simd::amx::is_permitted(),
                "tiles that do not work"
            );
            return;
        }
        for (rows, cols, tokens) in [(64, 2816, 50), (100, 1000, 9), (70, 1032, 16)] {
            let values = noise(6, cols * tokens);
            let (lut, indices) = (noise(7, rows * 16), bytes(8, rows * cols / 2));
            let codes = crate::Int8Lut::new(&lut, 4).unwrap();
            let (integers, scale) = (bytes(9, rows * cols), noise(10, rows * cols / 8));
            let int = |scale, block| Matrix::int(8, true, &integers, scale, None, (1, block), rows, cols);
            let matrices = [
                Matrix::lut(4, &indices, &lut, 1, rows, cols).unwrap().with_fast(Some(&codes)),
                int(&scale[..rows], cols).unwrap().with_fast(None),
                int(&scale, 8).unwrap().with_fast(None),
                Matrix::lut(4, &indices, &lut, 1, rows, cols).unwrap(),
            ];
            let packed = matrices.map(|w| {
                let mut packed = PackedActivations::default();
                let at = Columns { values: &values, first: 0, token_stride: cols, channel_stride: 1 };
                packed.pack(&Pool::new(1), w.layout(), at, tokens, cols);
                packed
            });
            // All tokens, then fewer, in another order.
            let chosen: Vec<u32> = (0..tokens as u32).rev().filter(|t| t % 4 != 1 || tokens < 12).collect();
            let taken = [None, Some(chosen.as_slice()), Some(&chosen[1..]), Some(&chosen[..3])];
            let slots = [Some(0), None, Some(1), Some(2), Some(3)];
            let run = |isa, threads, turn: usize| {
                let mut y: Vec<Vec<f32>> = vec![vec![0.0; tokens * rows]; slots.len()];
                let mut all: Vec<Option<MatMul<'_>>> = Vec::new();
                for (k, y) in y.iter_mut().enumerate() {
                    let Some(k) = slots[k] else {
                        all.push(None);
                        continue;
                    };
                    let tokens = taken[(k + turn) % taken.len()];
                    all.push(Some(MatMul {
                        w: matrices[k],
                        x: &packed[k],
                        tokens,
                        y,
                        stride: rows,
                        bias: None,
                    }));
                }
                matmul_batch_on(isa, &Pool::new(threads), &mut all);
                drop(all);
                y.iter().map(|y| bits(y)).collect::<Vec<_>>()
            };
            for turn in 0..taken.len() {
                let expected = run(Isa::Avx512, 1, turn);
                assert!(run(Isa::Amx, 1, turn) == expected, "[{rows}, {cols}], {tokens} tokens, {turn}");
                assert!(
                    run(Isa::Amx, 3, turn) == expected,
                    "[{rows}, {cols}], {tokens} tokens, {turn}, threads"
                );
            }
        }
    }
}
