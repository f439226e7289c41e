//! Decoding of blocks of 256 whose elements are numbers: K-quants, IQ4_XS and the ternary types.

use super::levels::{IQ4_NL_LEVELS, half_at};

/// Decodes `d * scale * q - dmin * minimum` from a block of 16 groups of 16:
///
/// ```text
/// 16 bytes of nibble pairs (scale, minimum) | 64 bytes of q, 2 bits each | f16 d | f16 dmin
/// ```
/// Element 32 k + j of either half of a block is bits 2k and 2k + 1 of the half's byte j.
#[inline(always)]
pub fn q2_k(b: &[u8; 84], out: &mut [f32; 256]) {
    let (scales, qs, d, dmin) = (&b[..16], &b[16..80], half_at(b, 80), half_at(b, 82));
    for (g, group) in out.as_chunks_mut::<16>().0.iter_mut().enumerate() {
        let (scale, min) = (d * f32::from(scales[g] & 15), dmin * f32::from(scales[g] >> 4));
        let (half, shift) = (g / 8, g / 2 % 4 * 2);
        for (o, &q) in group.iter_mut().zip(&qs[half * 32 + g % 2 * 16..]) {
            *o = scale * f32::from(q >> shift & 3) - min;
        }
    }
}

/// Decodes `d * (scale - 32) * (q - 4)` from a block of 16 groups of 16, whose q are laid out as those of Q2_K, with
/// third bits of their own. Bit `i / 32` of byte `i % 32` of these belongs to element i:
///
/// ```text
/// 32 bytes of third bits | 64 bytes of q, 2 bits each | 12 bytes of scales of 6 bits | f16 d
/// ```
/// The low nibbles of scales 0 to 7 are the low nibbles of bytes 0 to 7, those of 8 to 15 the high ones. Upper bits of
/// scale g are bits `g / 4 * 2` of byte `8 + g % 4`.
#[inline(always)]
pub fn q3_k(b: &[u8; 110], out: &mut [f32; 256]) {
    let (high, qs, scales, d) = (&b[..32], &b[32..96], &b[96..108], half_at(b, 108));
    for (g, group) in out.as_chunks_mut::<16>().0.iter_mut().enumerate() {
        let scale = scales[g % 8] >> (g / 8 * 4) & 15 | (scales[8 + g % 4] >> (g / 4 * 2) & 3) << 4;
        let scale = d * f32::from(scale as i8 - 32);
        let (half, shift, column) = (g / 8, g / 2 % 4 * 2, g % 2 * 16);
        for (j, o) in group.iter_mut().enumerate() {
            let third = high[column + j] >> (g / 2) & 1;
            let q = qs[half * 32 + column + j] >> shift & 3 | third << 2;
            *o = scale * f32::from(q as i8 - 4);
        }
    }
}

/// Returns scale and minimum of group `g` of 8, of 6 bits each, from 12 bytes `s`:
///
/// ```text
/// g < 4:   scale = s[g] & 63                              minimum = s[g + 4] & 63
/// g >= 4:  scale = s[g + 4] & 15 | s[g - 4] >> 2 & 0x30   minimum = s[g + 4] >> 4 | s[g] >> 2 & 0x30
/// ```
#[inline(always)]
fn scale_min(s: &[u8], g: usize) -> (f32, f32) {
    let (scale, min) = match g {
        0..4 => (s[g] & 63, s[g + 4] & 63),
        _ => (s[g + 4] & 15 | s[g - 4] >> 2 & 0x30, s[g + 4] >> 4 | s[g] >> 2 & 0x30),
    };
    (f32::from(scale), f32::from(min))
}

/// Decodes `d * scale * q - dmin * minimum` from a block of 8 groups of 32:
///
/// ```text
/// f16 d | f16 dmin | 12 bytes of scales and minima | 4 times 32 bytes of nibble pairs q, of two groups each
/// ```
#[inline(always)]
pub fn q4_k(b: &[u8; 144], out: &mut [f32; 256]) {
    let (d, dmin) = (half_at(b, 0), half_at(b, 2));
    let (scales, qs) = (&b[4..16], &b[16..]);
    for (g, group) in out.as_chunks_mut::<32>().0.iter_mut().enumerate() {
        let (scale, min) = scale_min(scales, g);
        let (scale, min) = (d * scale, dmin * min);
        let shift = 4 * (g % 2);
        for (o, &q) in group.iter_mut().zip(&qs[g / 2 * 32..]) {
            *o = scale * f32::from(q >> shift & 15) - min;
        }
    }
}

/// Decodes Q5_K, which is Q4_K with fifth bits of q. Bit `g` of a byte of these belongs to group `g`:
///
/// ```text
/// f16 d | f16 dmin | 12 bytes of scales and minima | 32 bytes of fifth bits | 4 times 32 bytes of nibble pairs
/// ```
#[inline(always)]
pub fn q5_k(b: &[u8; 176], out: &mut [f32; 256]) {
    let (d, dmin) = (half_at(b, 0), half_at(b, 2));
    let (scales, high, qs) = (&b[4..16], &b[16..48], &b[48..]);
    for (g, group) in out.as_chunks_mut::<32>().0.iter_mut().enumerate() {
        let (scale, min) = scale_min(scales, g);
        let (scale, min) = (d * scale, dmin * min);
        let shift = 4 * (g % 2);
        for ((o, &q), &h) in group.iter_mut().zip(&qs[g / 2 * 32..]).zip(high) {
            let q = q >> shift & 15 | (h >> g & 1) << 4;
            *o = scale * f32::from(q) - min;
        }
    }
}

/// Decodes `d * scale * (q - 32)`, with a signed scale for 16 elements, from a block:
///
/// ```text
/// 128 bytes of nibble pairs | 64 bytes of two upper bits | 16 signed scales | f16 d
/// ```
/// Both halves of a block have four groups of 32; a nibble pair belongs to groups 0 and 2, or 1 and 3.
#[inline(always)]
pub fn q6_k(b: &[u8; 210], out: &mut [f32; 256]) {
    let (low, high, scales, d) = (&b[..128], &b[128..192], &b[192..208], half_at(b, 208));
    for (g, group) in out.as_chunks_mut::<32>().0.iter_mut().enumerate() {
        let (half, k) = (g / 4, g % 4);
        let low = &low[half * 64 + k % 2 * 32..][..32];
        let high = &high[half * 32..][..32];
        let scale = [0, 1].map(|i| d * f32::from(scales[g * 2 + i] as i8));
        for (j, o) in group.iter_mut().enumerate() {
            let q = low[j] >> (4 * (k / 2)) & 15 | (high[j] >> (2 * k) & 3) << 4;
            *o = scale[j / 16] * f32::from(q as i8 - 32);
        }
    }
}

/// Decodes `d * (scale - 32) * IQ4_NL_LEVELS[q]` from a block of 8 groups of 32:
///
/// ```text
/// f16 d | u16 of two upper bits of each scale | 4 bytes of lower nibbles | 8 times 16 bytes of nibble pairs q
/// ```
#[inline(always)]
pub fn iq4_xs(b: &[u8; 136], out: &mut [f32; 256]) {
    let (d, high) = (half_at(b, 0), u16::from_le_bytes([b[2], b[3]]));
    for (g, group) in out.as_chunks_mut::<32>().0.iter_mut().enumerate() {
        let scale = b[4 + g / 2] >> (g % 2 * 4) & 15 | ((high >> (2 * g) & 3) as u8) << 4;
        let scale = d * f32::from(scale as i8 - 32);
        for (j, &q) in b[8 + 16 * g..][..16].iter().enumerate() {
            group[j] = scale * f32::from(IQ4_NL_LEVELS[usize::from(q & 15)]);
            group[j + 16] = scale * f32::from(IQ4_NL_LEVELS[usize::from(q >> 4)]);
        }
    }
}

/// Decodes `d * (q - 1)` with ternary q, five digits in a byte of 48, then four in each of 4 bytes: `f16 d` is last. A
/// byte is the fraction `byte / 256` in base 3; times 3^n mod 256, its first digit is digit n. Digit n of a row of
/// bytes comes before digit n + 1 of that row; the rows have 32, 16 and 4 bytes.
#[inline(always)]
pub fn tq1_0(b: &[u8; 54], out: &mut [f32; 256]) {
    let d = half_at(b, 52);
    let mut out = out.iter_mut();
    for (row, digits) in [(&b[..32], 5), (&b[32..48], 5), (&b[48..52], 4)] {
        let mut power = 1u8;
        for _ in 0..digits {
            for (&byte, o) in row.iter().zip(&mut out) {
                let digit = ((u16::from(byte.wrapping_mul(power)) * 3) >> 8) as i8;
                *o = d * f32::from(digit - 1);
            }
            power = power.wrapping_mul(3);
        }
    }
}

/// Decodes `d * (q - 1)` from a block `64 bytes of q, laid out as those of Q2_K | f16 d`.
#[inline(always)]
pub fn tq2_0(b: &[u8; 66], out: &mut [f32; 256]) {
    let d = half_at(b, 64);
    for (g, group) in out.as_chunks_mut::<32>().0.iter_mut().enumerate() {
        for (o, &q) in group.iter_mut().zip(&b[g / 4 * 32..]) {
            *o = d * f32::from((q >> (g % 4 * 2) & 3) as i8 - 1);
        }
    }
}
