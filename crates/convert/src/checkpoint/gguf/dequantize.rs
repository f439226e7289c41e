//! Decoding of GGML's block types to f32.
//!
//! The operations and their order are those of the `gguf` Python package, so that the results are equal bit by bit.
//! Every function describes the block of its type. A nibble pair is a byte whose low and high nibble are elements
//! half a block (or group) apart.

use super::super::Dtype;
use half::{bf16, f16};

/// The 16 levels of IQ4_NL.
const IQ4_NL_LEVELS: [i8; 16] = [-127, -104, -83, -65, -49, -35, -22, -10, 1, 13, 25, 38, 53, 69, 89, 113];
/// The 16 values of FP4 (E2M1), doubled.
const FP4_DOUBLED: [i8; 16] = [0, 1, 2, 3, 4, 6, 8, 12, 0, -1, -2, -3, -4, -6, -8, -12];

/// Decodes elements `first..first + out.len()` of the tensor that `bytes` starts with.
pub fn dequantize(dtype: Dtype, bytes: &[u8], first: usize, out: &mut [f32]) {
    match dtype {
        Dtype::F32 => scalars(bytes, first, out, f32::from_le_bytes),
        Dtype::F16 => scalars(bytes, first, out, |b| f16::from_le_bytes(b).to_f32()),
        Dtype::BF16 => scalars(bytes, first, out, |b| bf16::from_le_bytes(b).to_f32()),
        Dtype::Q4_0 => blocks(bytes, first, out, q4_0),
        Dtype::Q4_1 => blocks(bytes, first, out, q4_1),
        Dtype::Q5_0 => blocks(bytes, first, out, q5_0),
        Dtype::Q5_1 => blocks(bytes, first, out, q5_1),
        Dtype::Q8_0 => blocks(bytes, first, out, q8_0),
        Dtype::Q4K => blocks(bytes, first, out, q4_k),
        Dtype::Q5K => blocks(bytes, first, out, q5_k),
        Dtype::Q6K => blocks(bytes, first, out, q6_k),
        Dtype::Iq4Nl => blocks(bytes, first, out, iq4_nl),
        Dtype::Mxfp4 => blocks(bytes, first, out, mxfp4),
    }
}

fn scalars<const B: usize>(bytes: &[u8], first: usize, out: &mut [f32], value: impl Fn([u8; B]) -> f32) {
    let (all, _) = bytes.as_chunks::<B>();
    for (o, b) in out.iter_mut().zip(&all[first..]) {
        *o = value(*b);
    }
}

/// Decodes blocks of `B` bytes and `N` elements. Only blocks that the range cuts go through a buffer.
fn blocks<const B: usize, const N: usize>(
    bytes: &[u8],
    first: usize,
    mut out: &mut [f32],
    decode: impl Fn(&[u8; B], &mut [f32; N]),
) {
    let (all, _) = bytes.as_chunks::<B>();
    let (mut block, skip) = (first / N, first % N);
    let mut buffer = [0f32; N];
    if skip > 0 && !out.is_empty() {
        decode(&all[block], &mut buffer);
        let n = out.len().min(N - skip);
        let (head, rest) = out.split_at_mut(n);
        head.copy_from_slice(&buffer[skip..skip + n]);
        out = rest;
        block += 1;
    }
    let (whole, tail) = out.as_chunks_mut::<N>();
    for (o, b) in whole.iter_mut().zip(&all[block.min(all.len())..]) {
        decode(b, o);
    }
    if !tail.is_empty() {
        decode(&all[block + whole.len()], &mut buffer);
        tail.copy_from_slice(&buffer[..tail.len()]);
    }
}

#[inline(always)]
fn half_at(b: &[u8], at: usize) -> f32 {
    f16::from_le_bytes([b[at], b[at + 1]]).to_f32()
}

/// Decodes `d * (q - 8)` from a block `f16 d | 16 bytes of nibble pairs q`.
#[inline(always)]
fn q4_0(b: &[u8; 18], out: &mut [f32; 32]) {
    let d = half_at(b, 0);
    for (j, &q) in b[2..].iter().enumerate() {
        out[j] = d * f32::from((q & 15) as i8 - 8);
        out[j + 16] = d * f32::from((q >> 4) as i8 - 8);
    }
}

/// Decodes `d * q + m` from a block `f16 d | f16 m | 16 bytes of nibble pairs q`.
#[inline(always)]
fn q4_1(b: &[u8; 20], out: &mut [f32; 32]) {
    let (d, m) = (half_at(b, 0), half_at(b, 2));
    for (j, &q) in b[4..].iter().enumerate() {
        out[j] = d * f32::from(q & 15) + m;
        out[j + 16] = d * f32::from(q >> 4) + m;
    }
}

/// Joins nibble pair `q`, byte `j` of a block, with fifth bits from `high`: elements j and j + 16.
#[inline(always)]
fn five_bits(high: u32, q: u8, j: usize) -> (u8, u8) {
    let fifth = |i: usize| ((high >> i & 1) as u8) << 4;
    (q & 15 | fifth(j), q >> 4 | fifth(j + 16))
}

/// Decodes `d * (q - 16)` from a block `f16 d | 32 fifth bits of q | 16 bytes of nibble pairs`.
#[inline(always)]
fn q5_0(b: &[u8; 22], out: &mut [f32; 32]) {
    let d = half_at(b, 0);
    let high = u32::from_le_bytes([b[2], b[3], b[4], b[5]]);
    for (j, &q) in b[6..].iter().enumerate() {
        let (low, up) = five_bits(high, q, j);
        out[j] = d * f32::from(low as i8 - 16);
        out[j + 16] = d * f32::from(up as i8 - 16);
    }
}

/// Decodes `d * q + m` from a block `f16 d | f16 m | 32 fifth bits of q | 16 bytes of nibble pairs`.
#[inline(always)]
fn q5_1(b: &[u8; 24], out: &mut [f32; 32]) {
    let (d, m) = (half_at(b, 0), half_at(b, 2));
    let high = u32::from_le_bytes([b[4], b[5], b[6], b[7]]);
    for (j, &q) in b[8..].iter().enumerate() {
        let (low, up) = five_bits(high, q, j);
        out[j] = d * f32::from(low) + m;
        out[j + 16] = d * f32::from(up) + m;
    }
}

/// Decodes `d * q` from a block `f16 d | 32 signed bytes q`.
#[inline(always)]
fn q8_0(b: &[u8; 34], out: &mut [f32; 32]) {
    let d = half_at(b, 0);
    for (o, &q) in out.iter_mut().zip(&b[2..]) {
        *o = f32::from(q as i8) * d;
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
fn q4_k(b: &[u8; 144], out: &mut [f32; 256]) {
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
fn q5_k(b: &[u8; 176], out: &mut [f32; 256]) {
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
fn q6_k(b: &[u8; 210], out: &mut [f32; 256]) {
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

/// Decodes `d * IQ4_NL_LEVELS[q]` from a block `f16 d | 16 bytes of nibble pairs q`.
#[inline(always)]
fn iq4_nl(b: &[u8; 18], out: &mut [f32; 32]) {
    let d = half_at(b, 0);
    for (j, &q) in b[2..].iter().enumerate() {
        out[j] = d * f32::from(IQ4_NL_LEVELS[usize::from(q & 15)]);
        out[j + 16] = d * f32::from(IQ4_NL_LEVELS[usize::from(q >> 4)]);
    }
}

/// Decodes `2^(e - 127) * fp4(q)` from a block `u8 e | 16 bytes of nibble pairs q`. The values of the table are
/// doubled, so the power is halved, which makes it subnormal for e below 2.
#[inline(always)]
fn mxfp4(b: &[u8; 17], out: &mut [f32; 32]) {
    let e = u32::from(b[0]);
    let d = f32::from_bits(if e < 2 { 0x0020_0000 << e } else { (e - 1) << 23 });
    for (j, &q) in b[1..].iter().enumerate() {
        out[j] = d * f32::from(FP4_DOUBLED[usize::from(q & 15)]);
        out[j + 16] = d * f32::from(FP4_DOUBLED[usize::from(q >> 4)]);
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    const ALL: [Dtype; 13] = [
        Dtype::F32,
        Dtype::F16,
        Dtype::BF16,
        Dtype::Q4_0,
        Dtype::Q4_1,
        Dtype::Q5_0,
        Dtype::Q5_1,
        Dtype::Q8_0,
        Dtype::Q4K,
        Dtype::Q5K,
        Dtype::Q6K,
        Dtype::Iq4Nl,
        Dtype::Mxfp4,
    ];

    /// Checks that any range gives what the whole tensor gives, whichever blocks it cuts.
    #[test]
    fn pieces_are_parts_of_the_whole() {
        for dtype in ALL {
            let n = 3 * dtype.block_elements().max(8);
            let size = n / dtype.block_elements() * dtype.block_bytes();
            // The upper bits of an f16 stay small, so that no scale is infinite.
            let bytes: Vec<u8> =
                (0..size as u32).map(|i| (i.wrapping_mul(2_654_435_761) >> 13) as u8 & 0x3b).collect();
            let mut whole = vec![0f32; n];
            dequantize(dtype, &bytes, 0, &mut whole);
            assert!(whole.iter().any(|v| *v != whole[0]), "{dtype:?}");
            let step = dtype.block_elements().div_ceil(5).max(1);
            for start in (0..=n).step_by(step) {
                for end in (start..=n).step_by(step).chain([start, n]) {
                    let mut part = vec![7f32; end - start];
                    dequantize(dtype, &bytes, start, &mut part);
                    assert_eq!(part, whole[start..end], "{dtype:?} {start}..{end}");
                }
            }
        }
    }

    #[test]
    fn blocks_account_for_shapes() {
        assert_eq!(Dtype::Q6K.tensor_bytes(&[3, 2, 512]), Some(3 * 2 * 2 * 210));
        assert_eq!(Dtype::Q6K.tensor_bytes(&[512, 255]), None);
        assert_eq!(Dtype::Q8_0.tensor_bytes(&[]), None);
        assert_eq!(Dtype::F32.tensor_bytes(&[]), Some(4));
        assert_eq!(Dtype::F32.tensor_bytes(&[1 << 40, 1 << 40, 0]), None);
        assert_eq!(Dtype::Q4_0.tensor_bytes(&[u64::MAX, 32]), None);
    }
}
