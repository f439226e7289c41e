//! Batches of products of bytes in the tiles of AMX.
//!
//! A tile of tokens, 16 of them with 64 bytes each, times a tile of codes, 64 columns of 16 rows, gives 256 sums. What one
//! scale of a token belongs to are the 64 columns that a lane adds up, see [`super`]; so a tile has these columns of one lane,
//! for which tokens and codes are turned: the words of four bytes of sixteen vectors become sixteen vectors, one per lane. The
//! sums are scaled and added in the order of [`super::panel`], so that results are the same bits.
//!
//! The few instructions on tiles are written out, since the compiler's own names for them are not stable.
//! None of this has run on a processor with AMX so far, only in an emulator of one; see `docs/cpu.md`.

use super::{DECODED_ROWS, Decoded, FEW, ROWS, SCALED, Taken, Target, Turned, store_rows};
use crate::lanes::x86::Avx512;
use crate::lanes::{LANES, Lanes};
use crate::lines::Lines;
use crate::matrix::Storage;
use crate::{Isa, Matrix, Pool};
use std::arch::x86_64::*;
use std::cell::RefCell;

/// Tokens of a tile.
const TOKENS: usize = 16;
/// Vectors of the columns under one scale.
const VECTORS: usize = 2 * SCALED;
/// Vectors of these columns of codes, turned.
const CODES: usize = LANES * VECTORS;

const _: () = assert!(LANES == 16 && VECTORS == 16 && TOKENS == 16 && DECODED_ROWS == 16);

/// Multiplies tiles.
pub(super) trait Multiply: Copy {
    /// Prepares this thread for tiles of `tokens` tokens, at most 16.
    ///
    /// # Safety
    /// The processor has the instructions.
    unsafe fn shape(self, tokens: usize);
    /// Sums of `a`, signed bytes of each token, times `b`, `[16, 16, 4]` bytes without signs: sum n of a token adds up bytes
    /// 4 k + j times `b[k][n][j]`. Only the tokens that the thread is prepared for have sums.
    ///
    /// # Safety
    /// The processor has the instructions, and the thread is prepared.
    unsafe fn multiply(self, a: &[[u8; 64]; TOKENS], b: &[[u8; 64]; VECTORS], sums: &mut Sums);
    /// The thread has no more tiles to multiply.
    ///
    /// # Safety
    /// The processor has the instructions.
    unsafe fn end(self);
}

/// Sums of a tile, each token's in a cache line of its own.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
#[repr(C, align(64))]
pub(super) struct Sums([[i32; LANES]; TOKENS]);

/// With the processor's tiles.
#[derive(Clone, Copy)]
pub(super) struct Amx;

/// What `ldtilecfg` reads: the sizes of eight tiles.
#[repr(C, align(64))]
struct Config {
    palette: u8,
    start_row: u8,
    reserved: [u8; 14],
    row_bytes: [u16; 16],
    rows: [u8; 16],
}

impl Multiply for Amx {
    #[inline(always)]
    unsafe fn shape(self, tokens: usize) {
        // Tile 0 has sums, 1 tokens, 2 codes.
        let mut config =
            Config { palette: 1, start_row: 0, reserved: [0; 14], row_bytes: [0; 16], rows: [0; 16] };
        config.row_bytes[..3].fill(64);
        config.rows[..3].copy_from_slice(&[tokens as u8, tokens as u8, 16]);
        // SAFETY: 64 bytes are read; as this function's.
        unsafe {
            std::arch::asm!(
                "ldtilecfg [{}]",
                in(reg) &raw const config,
                out("tmm0") _, out("tmm1") _, out("tmm2") _, out("tmm3") _,
                out("tmm4") _, out("tmm5") _, out("tmm6") _, out("tmm7") _,
                options(nostack, preserves_flags)
            );
        }
    }

    #[inline(always)]
    unsafe fn multiply(self, a: &[[u8; 64]; TOKENS], b: &[[u8; 64]; VECTORS], sums: &mut Sums) {
        // SAFETY: as this function's; no more than 16 lines of each are read or written.
        unsafe {
            std::arch::asm!(
                "tilezero tmm0",
                "tileloadd tmm1, [{a} + {line} * 1]",
                "tileloadd tmm2, [{b} + {line} * 1]",
                "tdpbsud tmm0, tmm1, tmm2",
                "tilestored [{sums} + {line} * 1], tmm0",
                a = in(reg) a.as_ptr(),
                b = in(reg) b.as_ptr(),
                line = in(reg) 64usize,
                sums = in(reg) sums.0.as_mut_ptr(),
                out("tmm0") _, out("tmm1") _, out("tmm2") _,
                options(nostack, preserves_flags)
            );
        }
    }

    #[inline(always)]
    unsafe fn end(self) {
        // SAFETY: as this function's.
        unsafe {
            std::arch::asm!(
                "tilerelease",
                out("tmm0") _, out("tmm1") _, out("tmm2") _, out("tmm3") _,
                out("tmm4") _, out("tmm5") _, out("tmm6") _, out("tmm7") _,
                options(nostack, preserves_flags)
            );
        }
    }
}

/// The processor has tiles of bytes, this process may use them, and they do what [`Multiply`] says.
pub(crate) fn is_available() -> bool {
    static AVAILABLE: std::sync::OnceLock<bool> = std::sync::OnceLock::new();
    *AVAILABLE.get_or_init(|| has_tiles() && is_permitted() && works())
}

fn has_tiles() -> bool {
    const TILES_AND_BYTES: u32 = 1 << 24 | 1 << 25;
    std::arch::is_x86_feature_detected!("avx512vnni")
        && __cpuid(0).eax >= 7
        && __cpuid_count(7, 0).edx & TILES_AND_BYTES == TILES_AND_BYTES
        // The palette has three tiles of 16 rows of 64 bytes.
        && __cpuid(0).eax >= 0x1d
        && __cpuid_count(0x1d, 0).eax >= 1
        && __cpuid_count(0x1d, 1).ebx & 0xffff >= 64
        && __cpuid_count(0x1d, 1).ebx >> 16 >= 3
        && __cpuid_count(0x1d, 1).ecx & 0xffff >= 16
}

/// Asks Linux, which keeps the tiles of a thread only for processes that want to have them.
#[cfg(target_os = "linux")]
fn is_permitted() -> bool {
    const ARCH_PRCTL: usize = 158;
    const REQUEST_PERMISSION: usize = 0x1023;
    const TILE_DATA: usize = 18;
    let done: isize;
    // SAFETY: the call changes what this process may do, nothing in its memory; it writes the two registers and its result.
    unsafe {
        std::arch::asm!(
            "syscall",
            inlateout("rax") ARCH_PRCTL => done,
            in("rdi") REQUEST_PERMISSION,
            in("rsi") TILE_DATA,
            lateout("rcx") _,
            lateout("r11") _,
            options(nostack)
        );
    }
    done == 0
}

#[cfg(not(target_os = "linux"))]
fn is_permitted() -> bool {
    false
}

/// Multiplies one tile and looks at the sums.
fn works() -> bool {
    let a: [[u8; 64]; TOKENS] = std::array::from_fn(|t| std::array::from_fn(|i| (t * 37 + i * 11) as u8));
    let b: [[u8; 64]; 16] = std::array::from_fn(|k| std::array::from_fn(|i| (k * 29 + i * 7) as u8));
    [TOKENS, 5].into_iter().all(|tokens| {
        let mut sums = Sums([[i32::MIN; LANES]; TOKENS]);
        let mut expected = sums;
        plain(tokens, &a, &b, &mut expected);
        // SAFETY: the processor has tiles, for which `has_tiles` and `is_permitted` were asked.
        unsafe {
            Amx.shape(tokens);
            Amx.multiply(&a, &b, &mut sums);
            Amx.end();
        }
        sums == expected
    })
}

/// What a tile of `tokens` tokens has to give; what is behind them stays.
fn plain(tokens: usize, a: &[[u8; 64]], b: &[[u8; 64]], sums: &mut Sums) {
    let Sums(sums) = sums;
    for (sums, a) in sums.iter_mut().zip(a).take(tokens) {
        for (n, sum) in sums.iter_mut().enumerate() {
            *sum = (0..64).map(|i| i32::from(a[i] as i8) * i32::from(b[i / 4][4 * n + i % 4])).sum();
        }
    }
}

/// Rows from which tokens are worth turning.
const TURNING: usize = 64;

/// Turns the tokens of a batch, where tiles of `isa` will multiply them by `w`; then they are `out`,
/// `[tokens / 16 rounded up, scales, 16 lanes, 16 tokens]` vectors, and this is true.
pub(crate) fn turn(isa: Isa, pool: &Pool, w: &Matrix<'_>, x: Taken<'_>, out: &mut Turned) -> bool {
    // What is scaled by parts of a row has no tiles.
    let whole = !matches!(w.data, Storage::Int { block, .. } if block.1 != w.cols);
    let each = group_len(x.x.chunks());
    if isa != Isa::Amx || !w.fast || !whole || x.tokens() <= FEW || w.rows < TURNING || each == 0 {
        return false;
    }
    let n = x.tokens().div_ceil(TOKENS) * each;
    out.grow(n, [0; 64]);
    pool.pieces(&mut out[..n], each, &|group, out| {
        // SAFETY: a processor with tiles has AVX-512.
        unsafe { turn_group(x, group * TOKENS, out) }
    });
    true
}

/// Turned vectors of sixteen tokens.
fn group_len(chunks: usize) -> usize {
    chunks.div_ceil(SCALED) * LANES * TOKENS
}

/// Turns taken tokens `first..`, up to sixteen: vector t of lane l and scale s has what this lane adds up of token t.
#[target_feature(enable = "avx512f,avx512bw,avx512vl,avx512vnni,avx2,fma,f16c")]
fn turn_group(x: Taken<'_>, first: usize, out: &mut [[u8; 64]]) {
    let chunks = x.x.chunks();
    assert_eq!(out.len(), group_len(chunks));
    for t in 0..TOKENS.min(x.tokens() - first) {
        let bytes = &x.x.narrow.bytes[x.at(first + t) * chunks * 2..][..chunks * 2];
        for (bytes, out) in bytes.chunks(VECTORS).zip(out.as_chunks_mut::<{ LANES * TOKENS }>().0) {
            let mut v = [Avx512::splat(0.0); LANES];
            for (v, bytes) in v.iter_mut().zip(bytes) {
                *v = Avx512::from_f32(bytes);
            }
            for (l, v) in Avx512::turn(v).into_iter().enumerate() {
                put(v, &mut out[l * TOKENS + t]);
            }
        }
    }
}

#[inline(always)]
fn put(v: Avx512, out: &mut [u8; 64]) {
    // SAFETY: there is room for 64 bytes; the processor has AVX-512 F, see the module of lanes.
    unsafe { _mm512_storeu_ps(out.as_mut_ptr().cast(), v.0) }
}

thread_local! {
    static SPACE: RefCell<Space> = RefCell::default();
}

/// What a thread works in.
#[derive(Default)]
struct Space {
    /// `[scales, 16 lanes, 16 vectors, 16 rows]` words of four codes.
    codes: Lines<[u8; 64]>,
    /// `[16 lanes, 16 tokens, 16 rows]`
    sums: Lines<[f32; LANES]>,
}

/// As [`super::panel`], with tokens that were turned, see [`turn`].
///
/// # Safety
/// The processor has tiles.
pub(super) unsafe fn in_tiles(
    rows: &Decoded<'_>,
    which: &[usize],
    x: Taken<'_>,
    turned: &[[u8; 64]],
    y: &Target<'_>,
) {
    // SAFETY: as this function's.
    unsafe { panel(Amx, rows, which, x, turned, y) }
}

/// As [`super::panel`], with tokens that were turned, see [`turn`].
///
/// # Safety
/// The processor has AVX-512 VNNI, and M's instructions.
#[target_feature(enable = "avx512f,avx512bw,avx512vl,avx512vnni,avx2,fma,f16c")]
pub(super) unsafe fn panel<M: Multiply>(
    tiles: M,
    rows: &Decoded<'_>,
    which: &[usize],
    x: Taken<'_>,
    turned: &[[u8; 64]],
    y: &Target<'_>,
) {
    let (chunks, tokens, n) = (x.x.chunks(), x.tokens(), which.len());
    let scaled = chunks.div_ceil(SCALED);
    let per_group = group_len(chunks);
    assert!(n <= DECODED_ROWS && rows.codes.len() >= n.div_ceil(ROWS) * chunks * 2);
    assert!(turned.len() >= tokens.div_ceil(TOKENS) * per_group);
    let Space { codes: mut turned_codes, mut sums } = SPACE.take();
    turned_codes.grow(scaled * CODES, [0; 64]);
    sums.grow(LANES * TOKENS, [0.0; LANES]);
    for (s, out) in turned_codes.as_chunks_mut::<CODES>().0.iter_mut().enumerate().take(scaled) {
        for k in 0..VECTORS {
            let mut v = [Avx512::splat(0.0); LANES];
            let column = s * VECTORS + k;
            // Behind a token's end are zeros, so it does not matter what codes are there.
            if column < chunks * 2 {
                for (row, v) in v.iter_mut().enumerate().take(n) {
                    *v = Avx512::from_f32(&rows.codes[row / ROWS * chunks * 2 + column][row % ROWS]);
                }
            }
            for (l, v) in Avx512::turn(v).into_iter().enumerate() {
                put(v, &mut out[l * VECTORS + k]);
            }
        }
    }
    let (steps, lows) = (Avx512::load(&rows.steps), Avx512::load(&rows.lows));
    for first in (0..tokens).step_by(TOKENS) {
        let some = TOKENS.min(tokens - first);
        rows.next.pieces(first..first + some, tokens);
        // SAFETY: as this function's.
        unsafe { tiles.shape(some) };
        let scales = |t: usize, s: usize| &x.x.narrow.scales[x.at(first + t) * scaled + s];
        let mut scale_of = [&[0f32; LANES]; TOKENS];
        let mut found = [Sums([[0; LANES]; TOKENS]); 2];
        let (turned, _) = turned[first / TOKENS * per_group..][..per_group].as_chunks::<TOKENS>();
        let (turned_codes, _) = turned_codes.as_chunks::<VECTORS>();
        for s in 0..scaled {
            for (t, scale) in scale_of.iter_mut().enumerate().take(some) {
                *scale = scales(t, s);
            }
            // A lane's sums are scaled while the next one's tiles are multiplied.
            for l in 0..=LANES {
                if l < LANES {
                    let (a, b) = (&turned[s * LANES + l], &turned_codes[s * LANES + l]);
                    // SAFETY: the thread was prepared above; as this function's.
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
            let sum = Avx512::splat(x.x.narrow.sums[x.at(first + t)]);
            let v = steps.mul(lanes[0]).add(lows.mul(sum));
            store_rows(y, which, first + t, v);
        }
    }
    // SAFETY: as this function's.
    unsafe { tiles.end() };
    SPACE.set(Space { codes: turned_codes, sums });
}

/// Adds the sums of T tokens in lane l, scaled, to `all`, or puts them there where they are the first.
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
        // SAFETY: sixteen sums are there; the processor has AVX-512 F.
        let v = Avx512(unsafe { _mm512_cvtepi32_ps(_mm512_loadu_si512(found[t].as_ptr().cast())) });
        let before = if first { Avx512::splat(0.0) } else { Avx512::load(&all[t]) };
        v.mul_add(Avx512::splat(scales[t][l]), before).store(&mut all[t]);
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::test_data::{bytes, noise};
    use crate::{Columns, Order, Panel, Product, products_on};
    use std::cell::Cell;

    /// What tiles do, for processors without them. Knows how many tokens it was prepared for, 0 at the end.
    #[derive(Clone, Copy)]
    struct Loops<'a>(&'a Cell<usize>);

    impl Multiply for Loops<'_> {
        unsafe fn shape(self, tokens: usize) {
            self.0.set(tokens);
        }
        unsafe fn multiply(self, a: &[[u8; 64]; TOKENS], b: &[[u8; 64]; VECTORS], sums: &mut Sums) {
            plain(self.0.get(), a, b, sums);
        }
        unsafe fn end(self) {
            self.0.set(0);
        }
    }

    fn bits(v: &[f32]) -> Vec<u32> {
        v.iter().map(|v| v.to_bits()).collect()
    }

    fn panel_of(x: &[f32], cols: usize, tokens: usize) -> Panel {
        let mut panel = Panel::default();
        let at = Columns { values: x, first: 0, token_stride: cols, channel_stride: 1 };
        panel.fill(Order::Fast, at, tokens, cols);
        panel
    }

    #[test]
    fn tiles_give_the_bits_of_rows() {
        if Isa::best().for_bytes() < Isa::Avx512 {
            return;
        }
        for (rows, cols, tokens) in
            [(16usize, 1024, 16), (16, 2816, 33), (16, 100, 9), (5, 1100, 20), (1, 8, 1), (13, 2048, 15)]
        {
            let mut x = noise(1, cols * tokens);
            // A token of zeros, and one with something that is not finite.
            x[..cols].fill(0.0);
            x[cols * tokens - 1] = f32::INFINITY;
            let panel = panel_of(&x, cols, tokens);
            let chunks = panel.chunks();
            let codes = bytes(2, rows.next_multiple_of(ROWS) * chunks * 128);
            let (steps, lows, bias) = (noise(3, DECODED_ROWS), noise(4, DECODED_ROWS), noise(5, rows));
            let decoded = Decoded {
                codes: codes.as_chunks::<64>().0.as_chunks().0,
                steps: steps.try_into().unwrap(),
                lows: lows.try_into().unwrap(),
                next: crate::lines::Ahead::NOTHING,
            };
            let which: Vec<usize> = (0..rows).collect();
            let mut chosen: Vec<u32> = (0..tokens as u32).rev().collect();
            chosen[0] = 0;
            for (bias, taken) in [(None, None), (Some(bias.as_slice()), Some(chosen.as_slice()))] {
                let x = Taken::some(&panel, taken);
                // With rubbish where no token is.
                let mut turned = vec![[9; 64]; tokens.div_ceil(TOKENS) * group_len(chunks)];
                let prepared = Cell::new(77);
                let (mut expected, mut found) = (vec![9f32; tokens * rows], vec![7f32; tokens * rows]);
                let to = |y: &mut Vec<f32>| Target { y: y.as_mut_ptr(), stride: rows, bias };
                // SAFETY: the processor has AVX-512 VNNI; the targets have the rows of all tokens.
                unsafe {
                    for (group, out) in turned.chunks_exact_mut(group_len(chunks)).enumerate() {
                        turn_group(x, group * TOKENS, out);
                    }
                    <Avx512 as super::super::Compiled>::panel(&decoded, &which, x, &to(&mut expected));
                    self::panel(Loops(&prepared), &decoded, &which, x, &turned, &to(&mut found));
                }
                assert_eq!(prepared.get(), 0, "tiles are let go of");
                assert_eq!(bits(&found), bits(&expected), "[{rows}, {cols}], {tokens} tokens");
            }
        }
    }

    /// Where there are tiles, everything from matrices to results goes through them: several products of one job, each with
    /// its own tokens and its own kind.
    #[test]
    fn batches_through_tiles_have_the_bits_of_others() {
        if !Isa::Amx.is_available() {
            assert!(!has_tiles() || !is_permitted(), "tiles that do not work");
            return;
        }
        for (rows, cols, tokens) in [(64, 2816, 50), (100, 1000, 9), (70, 1032, 16)] {
            let values = noise(6, cols * tokens);
            let (lut, indices) = (noise(7, rows * 16), bytes(8, rows * cols / 2));
            let codes = crate::Codes::new(&lut, 4).unwrap();
            let (integers, scale) = (bytes(9, rows * cols), noise(10, rows * cols / 8));
            let int = |scale, block| Matrix::int(8, true, &integers, scale, None, (1, block), rows, cols);
            let matrices = [
                Matrix::lut(4, &indices, &lut, 1, rows, cols).unwrap().fast(Some(&codes)),
                int(&scale[..rows], cols).unwrap().fast(None),
                int(&scale, 8).unwrap().fast(None),
                Matrix::lut(4, &indices, &lut, 1, rows, cols).unwrap(),
            ];
            let panels = matrices.map(|w| {
                let mut panel = Panel::default();
                let at = Columns { values: &values, first: 0, token_stride: cols, channel_stride: 1 };
                panel.fill(w.order(), at, tokens, cols);
                panel
            });
            // All of them, and fewer, in another order.
            let chosen: Vec<u32> = (0..tokens as u32).rev().filter(|t| t % 4 != 1 || tokens < 12).collect();
            let taken = [None, Some(chosen.as_slice()), Some(&chosen[1..]), Some(&chosen[..3])];
            let slots = [Some(0), None, Some(1), Some(2), Some(3)];
            let run = |isa, threads, turn: usize| {
                let mut y: Vec<Vec<f32>> = vec![vec![0.0; tokens * rows]; slots.len()];
                let mut all: Vec<Option<Product<'_>>> = Vec::new();
                for (k, y) in y.iter_mut().enumerate() {
                    let Some(k) = slots[k] else {
                        all.push(None);
                        continue;
                    };
                    let tokens = taken[(k + turn) % taken.len()];
                    all.push(Some(Product {
                        w: matrices[k],
                        x: &panels[k],
                        tokens,
                        y,
                        stride: rows,
                        bias: None,
                    }));
                }
                products_on(isa, &Pool::new(threads), &mut all);
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
