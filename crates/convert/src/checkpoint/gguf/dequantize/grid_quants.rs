//! Decoding of the IQ types whose elements are rows of a grid: 4 or 8 values that one index stands for.
//!
//! Blocks have 256 elements. Unless a type has signs of its own, 7 bits state the signs of 8 elements, lowest first;
//! the number of negative signs is even, which gives the eighth.

use super::levels::half_at;

/// Grids of the types as packed numbers: places in `MAP`, which are 2 bits wide for 8 values and 4 bits for 4 values.
/// The bytes are those of the `grid_hex` constants of `gguf.quants` in the `gguf` package (0.19; MIT, of llama.cpp's
/// authors), in the order of the constants below.
const GRIDS: &[u8; 9216] = include_bytes!("grids.bin");

const MAP_2: [i8; 4] = [8, 25, 43, 0];
const MAP_3_XXS: [i8; 8] = [4, 12, 20, 28, 36, 44, 52, 62];
const MAP_3_S: [i8; 8] = [1, 3, 5, 7, 9, 11, 13, 15];
const MAP_1: [i8; 4] = [-1, 0, 1, 0];

static IQ2_XXS: [[i8; 8]; 256] = unpack(0, &MAP_2);
static IQ2_XS: [[i8; 8]; 512] = unpack(512, &MAP_2);
static IQ2_S: [[i8; 8]; 1024] = unpack(512 + 1024, &MAP_2);
static IQ3_XXS: [[i8; 4]; 256] = unpack(3584, &MAP_3_XXS);
static IQ3_S: [[i8; 4]; 512] = unpack(3584 + 512, &MAP_3_S);
static IQ1: [[i8; 8]; 2048] = unpack(3584 + 512 + 1024, &MAP_1);

/// Unpacks the grid that starts at byte `at`.
const fn unpack<const N: usize, const ROWS: usize>(at: usize, map: &[i8]) -> [[i8; N]; ROWS] {
    let mut rows = [[0; N]; ROWS];
    let bits = if N == 8 { 2 } else { 4 };
    let mut i = 0;
    while i < N * ROWS {
        let byte = GRIDS[at + i * bits / 8];
        let code = byte >> (i * bits % 8) & (map.len() as u8 - 1);
        rows[i / N][i % N] = map[code as usize];
        i += 1;
    }
    rows
}

/// Adds the eighth sign to the lower seven bits of `signs`.
#[inline(always)]
fn eight_signs(signs: u32) -> u8 {
    let seven = signs as u8 & 127;
    seven | (seven.count_ones() as u8 & 1) << 7
}

/// Writes `scale * value`, negative where the value's bit in `signs` is set, lowest first.
#[inline(always)]
fn write_signed(scale: f32, values: &[i8], signs: u8, out: &mut [f32]) {
    for (j, (o, &value)) in out.iter_mut().zip(values).enumerate() {
        let v = scale * f32::from(value);
        *o = if signs >> j & 1 == 1 { -v } else { v };
    }
}

#[inline(always)]
fn u16_at(b: &[u8], at: usize) -> u16 {
    u16::from_le_bytes([b[at], b[at + 1]])
}

#[inline(always)]
fn u32_at(b: &[u8], at: usize) -> u32 {
    u32::from_le_bytes([b[at], b[at + 1], b[at + 2], b[at + 3]])
}

/// Returns nibble `i` of `bytes`, the low one of a byte first.
#[inline(always)]
fn nibble(bytes: &[u8], i: usize) -> u8 {
    bytes[i / 2] >> (i % 2 * 4) & 15
}

/// Decodes `d * (0.5 + scale) / 4 * grid[q]` from a block `f16 d | 8 groups of 32: 4 bytes q, u32`. The u32 has 4 times
/// 7 bits of signs, and the scale in its upper nibble.
#[inline(always)]
pub fn iq2_xxs(b: &[u8; 66], out: &mut [f32; 256]) {
    let d = half_at(b, 0);
    for (i, row) in out.as_chunks_mut::<8>().0.iter_mut().enumerate() {
        let group = &b[2 + i / 4 * 8..][..8];
        let bits = u32_at(group, 4);
        let scale = d * (0.5 + (bits >> 28) as f32) * 0.25;
        write_signed(scale, &IQ2_XXS[usize::from(group[i % 4])], eight_signs(bits >> (i % 4 * 7)), row);
    }
}

/// Decodes `d * (0.5 + scale) / 4 * grid[q]` from a block `f16 d | 32 u16: 9 bits q, 7 bits of signs | 16 nibbles of
/// scales`, one for 16 elements.
#[inline(always)]
pub fn iq2_xs(b: &[u8; 74], out: &mut [f32; 256]) {
    let d = half_at(b, 0);
    for (i, row) in out.as_chunks_mut::<8>().0.iter_mut().enumerate() {
        let q = u16_at(b, 2 + 2 * i);
        let scale = d * (0.5 + f32::from(nibble(&b[66..], i / 2))) * 0.25;
        write_signed(scale, &IQ2_XS[usize::from(q & 511)], eight_signs(u32::from(q >> 9)), row);
    }
}

/// Decodes `d * (0.5 + scale) / 4 * grid[q]` from a block
///
/// ```text
/// f16 d | 32 lower bytes of q | 32 bytes of signs | 8 bytes of two upper bits of q | 16 nibbles of scales
/// ```
#[inline(always)]
pub fn iq2_s(b: &[u8; 82], out: &mut [f32; 256]) {
    let d = half_at(b, 0);
    for (i, row) in out.as_chunks_mut::<8>().0.iter_mut().enumerate() {
        let q = usize::from(b[2 + i]) | usize::from(b[66 + i / 4] >> (i % 4 * 2) & 3) << 8;
        let scale = d * (0.5 + f32::from(nibble(&b[74..], i / 2))) * 0.25;
        write_signed(scale, &IQ2_S[q], b[34 + i], row);
    }
}

/// Decodes `d * (0.5 + scale) / 2 * grid[q]` from a block `f16 d | 64 bytes q | 8 u32`. The u32 of 32 elements has 4
/// times 7 bits of signs, and the scale in its upper nibble.
#[inline(always)]
pub fn iq3_xxs(b: &[u8; 98], out: &mut [f32; 256]) {
    let d = half_at(b, 0);
    for (i, row) in out.as_chunks_mut::<4>().0.iter_mut().enumerate() {
        let bits = u32_at(b, 66 + i / 8 * 4);
        let scale = d * (0.5 + (bits >> 28) as f32) * 0.5;
        let signs = eight_signs(bits >> (i / 2 % 4 * 7)) >> (i % 2 * 4);
        write_signed(scale, &IQ3_XXS[usize::from(b[2 + i])], signs, row);
    }
}

/// Decodes `d * (1 + 2 scale) * grid[q]` from a block
///
/// ```text
/// f16 d | 64 lower bytes of q | 64 ninth bits of q | 32 bytes of signs | 8 nibbles of scales
/// ```
#[inline(always)]
pub fn iq3_s(b: &[u8; 110], out: &mut [f32; 256]) {
    let d = half_at(b, 0);
    for (i, row) in out.as_chunks_mut::<4>().0.iter_mut().enumerate() {
        let q = usize::from(b[2 + i]) | usize::from(b[66 + i / 8] >> (i % 8) & 1) << 8;
        let scale = d * f32::from(1 + 2 * nibble(&b[106..], i / 8));
        write_signed(scale, &IQ3_S[q], b[74 + i / 2] >> (i % 2 * 4), row);
    }
}

/// Writes `scale * (value + 1/8)`, or `scale * (value - 1/8)` where the shift is down.
#[inline(always)]
fn write_shifted(scale: f32, values: &[i8; 8], is_down: bool, out: &mut [f32; 8]) {
    let shift = if is_down { -0.125 } else { 0.125 };
    for (o, &value) in out.iter_mut().zip(values) {
        *o = scale * (f32::from(value) + shift);
    }
}

/// Decodes `d * (1 + 2 scale) * (grid[q] + shift)` from a block `f16 d | 32 lower bytes of q | 8 u16`. The u16 of 32
/// elements has 4 times 3 upper bits of q, 3 bits of the scale, and the sign of the shift.
#[inline(always)]
pub fn iq1_s(b: &[u8; 50], out: &mut [f32; 256]) {
    let d = half_at(b, 0);
    for (i, row) in out.as_chunks_mut::<8>().0.iter_mut().enumerate() {
        let high = u16_at(b, 34 + i / 4 * 2);
        let q = usize::from(b[2 + i]) | usize::from(high >> (i % 4 * 3) & 7) << 8;
        let scale = d * f32::from(2 * (high >> 12 & 7) + 1);
        write_shifted(scale, &IQ1[q], high >> 15 == 1, row);
    }
}

/// Decodes `d * (1 + 2 scale) * (grid[q] + shift)` from a block `32 lower bytes of q | 32 nibbles | 4 u16`. A nibble
/// has 3 upper bits of q and the sign of the shift. A u16 has 4 scales of 3 bits, each for 16 elements, and a nibble of
/// the f16 d, the lowest first.
#[inline(always)]
pub fn iq1_m(b: &[u8; 56], out: &mut [f32; 256]) {
    let scales = [0, 1, 2, 3].map(|i| u16_at(b, 48 + 2 * i));
    let [s0, s1, s2, s3] = scales.map(|s| s >> 12);
    let d = half::f16::from_bits(s0 | s1 << 4 | s2 << 8 | s3 << 12).to_f32();
    for (i, row) in out.as_chunks_mut::<8>().0.iter_mut().enumerate() {
        let high = nibble(&b[32..48], i);
        let q = usize::from(b[i]) | usize::from(high & 7) << 8;
        let scale = scales[i / 8] >> (i / 2 % 4 * 3) & 7;
        write_shifted(d * f32::from(2 * scale + 1), &IQ1[q], high & 8 != 0, row);
    }
}
