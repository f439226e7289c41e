//! Exact products of 4-bit indices into tables of whole numbers.
//!
//! Where each entry of a table is a whole number of at most 15 bits times a power of two, its step, tables are looked up as
//! integers of 16 bits, thirty-two at a time. A token's element becomes an integer of 24 bits, in two words: those that one lane
//! adds up over 512 columns share a scale, a power of two, so that what is lost is at most a unit in the last place of the
//! largest of these 32. Their products and sums are integers, without any rounding; behind 512 columns a lane is scaled and
//! added in f32, then the lanes are added by halves. That takes two thirds of the instructions of f32. Each of the 32 loses
//! at most half a unit of the last of 23 bits, so that the error of a result of up to 7000 columns is at most 5e-6 of the sum of
//! the largest weight times each token's element: for elements of similar sizes it is less than that of f32, where an element
//! thousands of times larger than the others meets a weight of almost zero it is more.
//!
//! Tokens of which an element is not finite, or in which the largest of a lane is from 2^64 on, or below 2^-104 but not zero,
//! are multiplied in f32.

use crate::decode::BLOCK;
use crate::fast::Bytes;
#[cfg(target_arch = "aarch64")]
use crate::lanes::neon::Neon;
use crate::lanes::{LANES, Lanes, Plain};
use crate::lines::{Ahead, Lines};
use crate::matrix::{Divisor, Storage};
use crate::product::{self, ROWS, RowBytes, Taken, Target, Tiles, prefetch, store, store_rows};
use crate::{Isa, Matrix, Pool};
use std::cell::RefCell;
use std::ops::Range;

#[cfg(target_arch = "aarch64")]
mod neon;
#[cfg(test)]
mod tests;
#[cfg(target_arch = "x86_64")]
mod x86;

/// Bytes of a block of a row.
const BYTES: usize = BLOCK / 2;
/// Vectors of 32 words of a block.
const VECTORS: usize = 4;
/// Vectors of f32 of a block.
const SINGLES: usize = BLOCK / LANES;
/// Blocks under one scale of a lane: as many products of 15 and 12 bits as 32 bits hold.
const SCALED: usize = 4;
/// What a word of a token holds, and the word above it counts.
const PIECE: f32 = 4096.0;
/// Tokens up to which words are looked up anew for each two tokens, in registers.
const FEW: usize = 8;
/// Tokens that pass together where words are looked up once.
const WIDE: usize = 3;
/// Tiles of rows whose words are looked up together.
const DECODED_TILES: usize = 4;
const DECODED_ROWS: usize = DECODED_TILES * ROWS;

/// Tables of f32 as whole numbers: entry i of table g is `steps[g] * tables[g][i]`, exactly. Errors of their products are at
/// most 5e-6 of the sum of the largest weight times each of the token's elements, of up to 7000.
#[derive(Clone, Debug)]
pub struct Words {
    tables: Vec<[i16; 16]>,
    steps: Vec<f32>,
}

impl Words {
    /// Of tables of sixteen entries, as many as there are; none where an entry is no whole number of at most 15 bits times the
    /// step of its table, a power of two.
    pub fn new(lut: &[f32]) -> Option<Words> {
        let (tables, []) = lut.as_chunks::<16>() else { return None };
        let mut all = Words { tables: Vec::new(), steps: Vec::new() };
        for table in tables {
            let largest = table.iter().fold(0f32, |a, v| a.max(v.abs()));
            let step = match largest {
                0.0 => 1.0,
                // Far from where f32 ends.
                v if (1e-20..1e20).contains(&v) => step_of(v),
                _ => return None,
            };
            let mut words = [0; 16];
            for (word, v) in words.iter_mut().zip(table) {
                let whole = v / step;
                *word = whole as i16;
                // Also where it is not finite.
                if f32::from(*word) != whole {
                    return None;
                }
            }
            all.tables.push(words);
            all.steps.push(step);
        }
        Some(all)
    }

    /// They are for `lut`'s tables.
    pub(crate) fn fit(&self, lut: &[f32]) -> bool {
        self.tables.len() * 16 == lut.len()
    }
}

/// The step of a table of which the largest entry has this magnitude, a normal number: entries are below 2^15 of them.
fn step_of(largest: f32) -> f32 {
    f32::from_bits(largest.to_bits() & 0x7f80_0000) / 16384.0
}

/// Rounds the entries of a table so that [`Words`] can be made of it, unless they are far from where numbers usually are. What
/// that changes is at most a 2^15th of the largest; entries of fp16 stay so.
pub fn round_to_words(table: &mut [f32]) {
    let largest = table.iter().fold(0f32, |a, v| a.max(v.abs()));
    if !(1e-20..1e20).contains(&largest) {
        return;
    }
    let step = step_of(largest);
    // Rounding up would give the largest another step.
    table.iter_mut().for_each(|v| *v = (*v / step).round_ties_even().clamp(-32767.0, 32767.0) * step);
}

/// Words of 16 bits with the instructions of one [`Isa`], as bytes.
trait Wide: Bytes {
    /// A table of sixteen words.
    type Table: Copy;
    fn words(table: &[i16; 16]) -> Self::Table;
    /// For each sixteen bits of `at` what their Jth four bits stand for.
    fn look_up<const J: usize>(table: Self::Table, at: Self::Bytes) -> Self::Bytes;
    /// Adds to sum l the products of words `2 l` and `2 l + 1`, with the instruction for that where the processor has it.
    fn dot_words<const NATIVE: bool>(sums: Self::Sums, w: Self::Bytes, x: &[u8; 64]) -> Self::Sums;
    /// Whole numbers of magnitudes up to 2^23, rounded to the nearest with ties to even, as `4096 upper + lower`: words `2 l`
    /// are lane l of `even`, words `2 l + 1` of `odd`.
    fn split(even: Self, odd: Self, out: &mut [[u8; 64]; 2]);
    /// For each lane, not negative, `2^(22 - e)` and `2^(e - 22)` where `2^e <= v < 2^(e + 1)`; any powers for zero. No lane is
    /// below 2^-104 otherwise, or not finite.
    fn scales(self) -> (Self, Self);
}

impl Wide for Plain {
    type Table = [i16; 16];
    #[inline(always)]
    fn words(table: &[i16; 16]) -> [i16; 16] {
        *table
    }
    #[inline(always)]
    fn look_up<const J: usize>(table: [i16; 16], at: [u8; 64]) -> [u8; 64] {
        let mut out = [0; 64];
        for (at, out) in at.as_chunks::<2>().0.iter().zip(out.as_chunks_mut::<2>().0) {
            *out = table[usize::from(u16::from_le_bytes(*at) >> (4 * J) & 15)].to_le_bytes();
        }
        out
    }
    #[inline(always)]
    fn dot_words<const NATIVE: bool>(mut sums: [i32; LANES], w: [u8; 64], x: &[u8; 64]) -> [i32; LANES] {
        let word = |of: &[u8; 64], i: usize| i32::from(i16::from_le_bytes([of[2 * i], of[2 * i + 1]]));
        for i in 0..2 * LANES {
            sums[i / 2] += word(&w, i) * word(x, i);
        }
        sums
    }
    #[inline(always)]
    fn split(even: Self, odd: Self, out: &mut [[u8; 64]; 2]) {
        for (i, v) in [even, odd].into_iter().enumerate() {
            let mut lanes = [0f32; LANES];
            v.store(&mut lanes);
            for (l, v) in lanes.into_iter().enumerate() {
                let q = v.round_ties_even() as i32;
                let upper = q.wrapping_add(2048) >> 12;
                for (out, word) in out.iter_mut().zip([upper, q - (upper << 12)]) {
                    out[4 * l + 2 * i..4 * l + 2 * i + 2].copy_from_slice(&(word as i16).to_le_bytes());
                }
            }
        }
    }
    #[inline(always)]
    fn scales(self) -> (Self, Self) {
        let mut lanes = [0f32; LANES];
        self.store(&mut lanes);
        let exponents = lanes.map(|v| (v.to_bits() & 0x7f80_0000).max(LEAST));
        (
            Plain::load(&exponents.map(|e| f32::from_bits(INVERSE - e))),
            Plain::load(&exponents.map(|e| f32::from_bits(e - STEPS))),
        )
    }
}

/// Exponents, as the bits of f32: of 2^-104, of what a scale and its inverse are together, and of 2^22.
const LEAST: u32 = 23 << 23;
const INVERSE: u32 = (254 + 22) << 23;
const STEPS: u32 = 22 << 23;
/// From which on sums in units of a table's step could become infinite.
const MOST: f32 = (1u128 << 64) as f32;

/// Tokens as integers of 24 bits.
#[derive(Clone, Debug, Default)]
pub(crate) struct WideTokens {
    /// `[tokens, blocks, 4, 2, 64]`: of vector j the upper and the lower words of columns `8 l + j` and `8 l + j + 4`.
    words: Lines<[u8; 64]>,
    /// `[tokens, blocks / SCALED rounded up, 16]`
    scales: Lines<[f32; LANES]>,
    /// Tokens that integers do not serve.
    refused: Vec<bool>,
}

/// Elements that one thread makes words of at a time.
const SHARED: usize = 1 << 13;

impl WideTokens {
    /// From tokens `[tokens, blocks, 8, 16]` in packed order.
    pub fn fill(&mut self, data: &[[f32; LANES]], tokens: usize, blocks: usize) {
        let scaled = blocks.div_ceil(SCALED);
        self.words.grow(tokens * blocks * 2 * VECTORS, [0; 64]);
        self.scales.grow(tokens * scaled, [0.0; LANES]);
        self.refused.resize(self.refused.len().max(tokens), false);
        self.refused[..tokens].fill(false);
        // Tokens by the few, so that threads share large calls; one token allocates nothing.
        let some = (SHARED / (blocks * BLOCK).max(1)).max(1);
        let (words, scales, refused) = (&mut *self.words, &mut *self.scales, &mut self.refused[..tokens]);
        if tokens <= some {
            return widen_tokens(data, blocks, (words, scales, refused));
        }
        let words = words[..tokens * blocks * 2 * VECTORS].chunks_mut((some * blocks * 2 * VECTORS).max(1));
        let scales = scales[..tokens * scaled].chunks_mut((some * scaled).max(1));
        let data = data[..tokens * blocks * SINGLES].chunks((some * blocks * SINGLES).max(1));
        let parts = data.zip(words).zip(scales).zip(refused.chunks_mut(some));
        let mut parts: Vec<_> = parts.collect();
        Pool::global().pieces(&mut parts, 1, &|_, parts| {
            for (((data, words), scales), refused) in parts {
                widen_tokens(data, blocks, (words, scales, refused));
            }
        });
    }
}

/// Words, scales and refusals of some tokens, see [`WideTokens`].
type Widened<'a> = (&'a mut [[u8; 64]], &'a mut [[f32; LANES]], &'a mut [bool]);

fn widen_tokens(data: &[[f32; LANES]], blocks: usize, (words, scales, refused): Widened<'_>) {
    let (scaled, lines) = (blocks.div_ceil(SCALED), blocks * 2 * VECTORS);
    for (t, refused) in refused.iter_mut().enumerate() {
        widen(
            &data[t * blocks * SINGLES..(t + 1) * blocks * SINGLES],
            &mut words[t * lines..(t + 1) * lines],
            &mut scales[t * scaled..(t + 1) * scaled],
            refused,
        );
    }
}

crate::vector::dispatch! {
    fn widen(data: &[[f32; LANES]], words: &mut [[u8; 64]], scales: &mut [[f32; LANES]], refused: &mut bool) = widen_on
}

#[inline(always)]
fn widen_on<L: Wide>(
    data: &[[f32; LANES]],
    words: &mut [[u8; 64]],
    scales: &mut [[f32; LANES]],
    refused: &mut bool,
) {
    // Ones where lanes are served; zeros, or NaN where elements are not finite.
    let (mut served, mut wrong) = (L::splat(1.0), L::splat(0.0));
    let parts = data.chunks(SCALED * SINGLES).zip(words.chunks_mut(SCALED * 2 * VECTORS));
    for ((data, words), scale) in parts.zip(scales) {
        let mut largest = L::splat(0.0);
        for v in data {
            let v = L::load(v);
            largest = largest.max(v).max(v.mul(L::splat(-1.0)));
            wrong = v.mul_add(L::splat(0.0), wrong);
        }
        let enough = largest.if_below(L::splat(f32::from_bits(LEAST)), L::splat(0.0), L::splat(1.0));
        let none = L::splat(0.0).if_below(largest, L::splat(0.0), L::splat(1.0));
        let bounded = largest.if_below(L::splat(MOST), L::splat(1.0), L::splat(0.0));
        served = served.min(enough.max(none)).min(bounded);
        let (inverse, step) = largest.scales();
        step.store(scale);
        for (data, words) in
            data.as_chunks::<SINGLES>().0.iter().zip(words.as_chunks_mut::<{ 2 * VECTORS }>().0)
        {
            for (j, out) in words.as_chunks_mut::<2>().0.iter_mut().enumerate() {
                let (even, odd) = (L::load(&data[j]), L::load(&data[j + VECTORS]));
                L::split(even.mul(inverse), odd.mul(inverse), out);
            }
        }
    }
    // Anything but sixteen.
    *refused = served.add(wrong).total() != LANES as f32;
}

/// Some rows of w, whose tables `tables` are, with all tokens.
pub(crate) fn rows_on(isa: Isa, w: &Matrix<'_>, tables: &Words, x: Taken<'_>, rows: &Tiles, y: &Target<'_>) {
    let refused = |t: usize| x.x.wide.refused[x.at(t)];
    if !(0..x.tokens()).any(refused) {
        return accepted(isa, w, tables, x, rows, y);
    }
    for t in 0..x.tokens() {
        let which = [x.at(t) as u32];
        // SAFETY: a token of `y`, see `check` of products.
        let y = Target { y: unsafe { y.y.add(t * y.stride) }, ..*y };
        let one = Taken::some(x.x, Some(&which));
        if refused(t) {
            product::in_f32(isa, w, one, rows, &y);
        } else {
            accepted(isa, w, tables, one, rows, &y);
        }
    }
}

fn accepted(isa: Isa, w: &Matrix<'_>, tables: &Words, x: Taken<'_>, rows: &Tiles, y: &Target<'_>) {
    let Storage::Lut { bits: 4, indices, rows_per_group, .. } = w.data else {
        unreachable!("tables of sixteen entries")
    };
    let group = Divisor::new(rows_per_group);
    let s = Source { rows: RowBytes::new(w, indices, 4), first: w.first, tables, group, x };
    match isa {
        Isa::Scalar => all::<Plain, false>(&s, rows, y),
        #[cfg(target_arch = "x86_64")]
        // SAFETY: the processor has the instructions, which callers assert.
        Isa::Avx2 => unsafe { x86::avx2(&s, rows, y) },
        #[cfg(target_arch = "x86_64")]
        // SAFETY: the processor has the instructions, which callers assert.
        Isa::Avx512 | Isa::Amx => unsafe {
            if std::arch::is_x86_feature_detected!("avx512vnni") {
                x86::avx512_vnni(&s, rows, y);
            } else {
                x86::avx512(&s, rows, y);
            }
        },
        #[cfg(target_arch = "aarch64")]
        Isa::Neon => all::<Neon, true>(&s, rows, y),
        _ => unreachable!("not available"),
    }
}

struct Source<'a> {
    rows: RowBytes<'a>,
    /// Row of the storage that is row 0.
    first: usize,
    tables: &'a Words,
    group: Divisor,
    x: Taken<'a>,
}

impl Source<'_> {
    /// The table of a row, and its step.
    #[inline(always)]
    fn row<L: Wide>(&self, row: usize) -> (L::Table, f32) {
        let at = self.group.divide(self.first + row);
        (L::words(&self.tables.tables[at]), self.tables.steps[at])
    }

    /// A token's words `[blocks, 4, 2, 64]`, and its scales.
    #[inline(always)]
    fn token(&self, t: usize) -> (&[Block], &[[f32; LANES]]) {
        let (at, x) = (self.x.at(t), self.x.x);
        let blocks = x.chunks();
        let (lines, scaled) = (blocks * 2 * VECTORS, blocks.div_ceil(SCALED));
        let words = x.wide.words[at * lines..(at + 1) * lines].as_chunks::<2>().0.as_chunks().0;
        (words, &x.wide.scales[at * scaled..(at + 1) * scaled])
    }
}

/// A token's words of a block: of four vectors the upper and the lower ones.
type Block = [[[u8; 64]; 2]; VECTORS];

const NOTHING: Block = [[[0; 64]; 2]; VECTORS];

thread_local! {
    static DECODED: RefCell<Lines<[u8; 64]>> = const { RefCell::new(Lines::new()) };
}

#[inline(always)]
fn all<L: Wide, const NATIVE: bool>(s: &Source<'_>, rows: &Tiles, y: &Target<'_>) {
    let tokens = s.x.tokens();
    if tokens <= FEW {
        for (which, n) in rows.each() {
            let mut t = 0;
            while t < tokens {
                t += match tokens - t {
                    // Sums of four rows are all registers that others have.
                    2.. if L::REGISTERS >= 32 => few::<L, NATIVE, ROWS, 2>(s, (which, n), t, y),
                    _ if L::REGISTERS >= 32 => few::<L, NATIVE, ROWS, 1>(s, (which, n), t, y),
                    _ => few::<L, NATIVE, { ROWS / 2 }, 1>(s, (which, n), t, y),
                };
            }
        }
        return;
    }
    let lines = s.x.x.chunks() * VECTORS;
    let mut memory = DECODED.take();
    memory.grow(DECODED_ROWS * lines, [0; 64]);
    for (which, n) in rows.rows::<DECODED_ROWS>() {
        let which = &which[..n];
        let mut steps = [0.0; LANES];
        for (i, &r) in which.iter().enumerate() {
            let (table, step) = s.row::<L>(r);
            steps[i] = step;
            // SAFETY: tiles have rows of the matrix.
            let bytes = unsafe { s.rows.row(r) };
            let (tile, _) =
                memory[i / ROWS * ROWS * lines..][..ROWS * lines].as_chunks_mut::<{ VECTORS * ROWS }>();
            for (b, out) in tile.iter_mut().enumerate() {
                let at = indices::<L>(bytes, b);
                L::put(L::look_up::<0>(table, at), &mut out[i % ROWS]);
                L::put(L::look_up::<1>(table, at), &mut out[ROWS + i % ROWS]);
                L::put(L::look_up::<2>(table, at), &mut out[2 * ROWS + i % ROWS]);
                L::put(L::look_up::<3>(table, at), &mut out[3 * ROWS + i % ROWS]);
            }
        }
        let decoded = Decoded { words: memory.as_chunks().0, steps, next: s.rows.behind(which) };
        let mut t = 0;
        while t < tokens {
            t += match tokens - t {
                WIDE.. if L::REGISTERS >= 32 => panel::<L, NATIVE, ROWS, WIDE>(&decoded, which, s, t, y),
                2.. if L::REGISTERS >= 32 => panel::<L, NATIVE, ROWS, 2>(&decoded, which, s, t, y),
                _ if L::REGISTERS >= 32 => panel::<L, NATIVE, ROWS, 1>(&decoded, which, s, t, y),
                _ => panel::<L, NATIVE, { ROWS / 2 }, 1>(&decoded, which, s, t, y),
            };
        }
    }
    DECODED.set(memory);
}

/// Block b of a row; behind the row's end are zeros.
#[inline(always)]
fn indices<L: Wide>(bytes: &[u8], b: usize) -> L::Bytes {
    let bytes = &bytes[b * BYTES..];
    match bytes.first_chunk::<BYTES>() {
        Some(bytes) => L::bytes(bytes),
        None => L::bytes_of(bytes),
    }
}

/// The sums of a lane, upper and lower words, as numbers.
#[inline(always)]
fn joined<L: Wide>([upper, lower]: [L::Sums; 2]) -> L {
    L::sums(upper).mul_add(L::splat(PIECE), L::sums(lower))
}

/// Four rows, of which n are wanted, R at a time, times T tokens; words are looked up into registers. Gives T.
#[inline(always)]
fn few<L: Wide, const NATIVE: bool, const R: usize, const T: usize>(
    s: &Source<'_>,
    (which, n): ([usize; ROWS], usize),
    first: usize,
    y: &Target<'_>,
) -> usize {
    // In loops: closures given to other functions would be compiled without this one's instructions.
    let (table, step) = s.row::<L>(which[0]);
    let (mut tables, mut steps, mut bytes) = ([table; ROWS], [step; ROWS], [&[] as &[u8]; ROWS]);
    for i in 0..ROWS {
        (tables[i], steps[i]) = s.row::<L>(which[i]);
        // SAFETY: tiles have rows of the matrix.
        bytes[i] = unsafe { s.rows.row(which[i]) };
    }
    let (mut tokens, mut scales) = ([&[] as &[Block]; T], [&[] as &[[f32; LANES]]; T]);
    for t in 0..T {
        (tokens[t], scales[t]) = s.token(first + t);
    }
    let blocks = s.x.x.chunks();
    // Blocks that are whole in all rows, which are as long as each other.
    let whole = blocks.min(bytes[0].len() / BYTES);
    assert!(tokens.iter().all(|t| t.len() == blocks));
    let mut totals = [[L::splat(0.0); ROWS]; T];
    for part in 0..blocks.div_ceil(SCALED) {
        let end = blocks.min((part + 1) * SCALED);
        for start in (0..ROWS).step_by(R) {
            let mut sums = [[[L::no_sums(); 2]; R]; T];
            for b in part * SCALED..end {
                let mut at = [L::bytes(&[0; 64]); R];
                for i in 0..R {
                    at[i] = if b < whole {
                        // SAFETY: b is below `whole`.
                        let bytes = unsafe { bytes[start + i].get_unchecked(b * BYTES..(b + 1) * BYTES) };
                        if first == 0 {
                            prefetch(bytes);
                        }
                        L::bytes(bytes.first_chunk().expect("a block"))
                    } else {
                        L::bytes_of(&bytes[start + i][b * BYTES..])
                    };
                }
                let mut x = [&NOTHING; T];
                for t in 0..T {
                    // SAFETY: b is below `blocks`, as many as each token has.
                    x[t] = unsafe { tokens[t].get_unchecked(b) };
                }
                let tables = tables[start..].first_chunk().expect("R tables");
                vector::<L, NATIVE, R, T, 0>(tables, &at, &x, &mut sums);
                vector::<L, NATIVE, R, T, 1>(tables, &at, &x, &mut sums);
                vector::<L, NATIVE, R, T, 2>(tables, &at, &x, &mut sums);
                vector::<L, NATIVE, R, T, 3>(tables, &at, &x, &mut sums);
            }
            for t in 0..T {
                let scale = L::load(&scales[t][part]);
                for i in 0..R {
                    let total = &mut totals[t][start + i];
                    *total = joined::<L>(sums[t][i]).mul_add(scale, *total);
                }
            }
        }
    }
    for t in 0..T {
        for (i, total) in L::totals(totals[t]).into_iter().enumerate().take(n) {
            store(y, which[i], first + t, steps[i] * total);
        }
    }
    T
}

/// Adds vector J of a block of R rows, times T tokens.
#[inline(always)]
fn vector<L: Wide, const NATIVE: bool, const R: usize, const T: usize, const J: usize>(
    tables: &[L::Table; R],
    at: &[L::Bytes; R],
    x: &[&Block; T],
    sums: &mut [[[L::Sums; 2]; R]; T],
) {
    for i in 0..R {
        let w = L::look_up::<J>(tables[i], at[i]);
        for t in 0..T {
            for piece in 0..2 {
                sums[t][i][piece] = L::dot_words::<NATIVE>(sums[t][i][piece], w, &x[t][J][piece]);
            }
        }
    }
}

/// Up to sixteen rows as words.
struct Decoded<'a> {
    /// `[tiles of four rows, blocks, 4, 4, 64]`
    words: &'a [[[u8; 64]; ROWS]],
    steps: [f32; LANES],
    /// The rows that are decoded next.
    next: Ahead,
}

/// Decoded rows, R of a tile at a time, with T tokens. Gives T.
#[inline(always)]
fn panel<L: Wide, const NATIVE: bool, const R: usize, const T: usize>(
    rows: &Decoded<'_>,
    which: &[usize],
    s: &Source<'_>,
    first: usize,
    y: &Target<'_>,
) -> usize {
    let (mut tokens, mut scales) = ([&[] as &[Block]; T], [&[] as &[[f32; LANES]]; T]);
    for t in 0..T {
        (tokens[t], scales[t]) = s.token(first + t);
    }
    let (blocks, all) = (s.x.x.chunks(), s.x.tokens());
    let tiles = if blocks == 0 { 0 } else { which.len().div_ceil(ROWS) };
    let mut quarters = [[L::splat(0.0); DECODED_TILES]; T];
    for i in 0..tiles {
        let words = rows.words[i * blocks * VECTORS..][..blocks * VECTORS].as_chunks::<VECTORS>().0;
        let piece = first * tiles + i * T;
        rows.next.pieces(piece..piece + T, all * tiles);
        let mut totals = [[L::splat(0.0); ROWS]; T];
        for part in 0..blocks.div_ceil(SCALED) {
            let columns = part * SCALED..blocks.min((part + 1) * SCALED);
            for start in (0..ROWS).step_by(R) {
                // SAFETY: words and tokens have as many blocks.
                let sums = unsafe { dots::<L, NATIVE, R, T>(words, start, &tokens, columns.clone()) };
                for t in 0..T {
                    let scale = L::load(&scales[t][part]);
                    for k in 0..R {
                        let total = &mut totals[t][start + k];
                        *total = joined::<L>(sums[t][k]).mul_add(scale, *total);
                    }
                }
            }
        }
        for t in 0..T {
            quarters[t][i] = L::quarters(totals[t]);
        }
    }
    for t in 0..T {
        let sums = L::totals_of_quarters(quarters[t]);
        store_rows(y, which, first + t, L::load(&rows.steps).mul(sums));
    }
    T
}

/// Sums of products of R rows' words with T tokens.
///
/// # Safety
/// All have these blocks.
#[inline(always)]
unsafe fn dots<L: Wide, const NATIVE: bool, const R: usize, const T: usize>(
    words: &[[[[u8; 64]; ROWS]; VECTORS]],
    start: usize,
    tokens: &[&[Block]; T],
    blocks: Range<usize>,
) -> [[[L::Sums; 2]; R]; T] {
    let mut sums = [[[L::no_sums(); 2]; R]; T];
    for b in blocks {
        for j in 0..VECTORS {
            // SAFETY: as this function's.
            let words = unsafe { &words.get_unchecked(b)[j] };
            let mut w = [L::bytes(&words[start]); R];
            for k in 1..R {
                w[k] = L::bytes(&words[start + k]);
            }
            for t in 0..T {
                // SAFETY: as this function's.
                let x = unsafe { &tokens[t].get_unchecked(b)[j] };
                for (piece, x) in x.iter().enumerate() {
                    for k in 0..R {
                        sums[t][k][piece] = L::dot_words::<NATIVE>(sums[t][k][piece], w[k], x);
                    }
                }
            }
        }
    }
    sums
}
