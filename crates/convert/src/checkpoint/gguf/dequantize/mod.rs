//! Decoding of GGML's block types, and of the types of safetensors, to f32.
//!
//! The operations and their order are those of the `gguf` Python package, so that the results are equal bit by bit.
//! Every function describes the block of its type. A nibble pair is a byte whose low and high nibble are elements
//! half a block (or group) apart.

mod grid_quants;
mod k_quants;
mod levels;

use super::super::Dtype;
use grid_quants::{iq1_m, iq1_s, iq2_s, iq2_xs, iq2_xxs, iq3_s, iq3_xxs};
use half::{bf16, f16};
use k_quants::{iq4_xs, q2_k, q3_k, q4_k, q5_k, q6_k, tq1_0, tq2_0};
use levels::{IQ4_NL_LEVELS, half_at};

/// The 16 values of FP4 (E2M1), doubled.
const FP4_DOUBLED: [i8; 16] = [0, 1, 2, 3, 4, 6, 8, 12, 0, -1, -2, -3, -4, -6, -8, -12];

/// Decodes elements `first..first + out.len()` of the tensor that `bytes` starts with.
pub fn dequantize(dtype: Dtype, bytes: &[u8], first: usize, out: &mut [f32]) {
    match dtype {
        Dtype::F8E4M3 => scalars(bytes, first, out, f8_e4m3),
        Dtype::F8E5M2 => scalars(bytes, first, out, |[b]| f16::from_bits(u16::from(b) << 8).to_f32()),
        // Readers refuse these before.
        Dtype::Raw { .. } => out.fill(f32::NAN),
        Dtype::F32 => scalars(bytes, first, out, f32::from_le_bytes),
        Dtype::F16 => scalars(bytes, first, out, |b| f16::from_le_bytes(b).to_f32()),
        Dtype::BF16 => scalars(bytes, first, out, |b| bf16::from_le_bytes(b).to_f32()),
        Dtype::F64 => scalars(bytes, first, out, |b| f64::from_le_bytes(b) as f32),
        Dtype::I8 => scalars(bytes, first, out, |b| i8::from_le_bytes(b).into()),
        Dtype::I16 => scalars(bytes, first, out, |b| i16::from_le_bytes(b).into()),
        Dtype::I32 => scalars(bytes, first, out, |b| i32::from_le_bytes(b) as f32),
        Dtype::I64 => scalars(bytes, first, out, |b| i64::from_le_bytes(b) as f32),
        Dtype::Q4_0 => blocks(bytes, first, out, q4_0),
        Dtype::Q4_1 => blocks(bytes, first, out, q4_1),
        Dtype::Q5_0 => blocks(bytes, first, out, q5_0),
        Dtype::Q5_1 => blocks(bytes, first, out, q5_1),
        Dtype::Q8_0 => blocks(bytes, first, out, q8_0),
        Dtype::Q2K => blocks(bytes, first, out, q2_k),
        Dtype::Q3K => blocks(bytes, first, out, q3_k),
        Dtype::Q4K => blocks(bytes, first, out, q4_k),
        Dtype::Q5K => blocks(bytes, first, out, q5_k),
        Dtype::Q6K => blocks(bytes, first, out, q6_k),
        Dtype::Iq1S => blocks(bytes, first, out, iq1_s),
        Dtype::Iq1M => blocks(bytes, first, out, iq1_m),
        Dtype::Iq2Xxs => blocks(bytes, first, out, iq2_xxs),
        Dtype::Iq2Xs => blocks(bytes, first, out, iq2_xs),
        Dtype::Iq2S => blocks(bytes, first, out, iq2_s),
        Dtype::Iq3Xxs => blocks(bytes, first, out, iq3_xxs),
        Dtype::Iq3S => blocks(bytes, first, out, iq3_s),
        Dtype::Iq4Nl => blocks(bytes, first, out, iq4_nl),
        Dtype::Iq4Xs => blocks(bytes, first, out, iq4_xs),
        Dtype::Tq1_0 => blocks(bytes, first, out, tq1_0),
        Dtype::Tq2_0 => blocks(bytes, first, out, tq2_0),
        Dtype::Mxfp4 => blocks(bytes, first, out, mxfp4),
        Dtype::Nvfp4 => blocks(bytes, first, out, nvfp4),
        Dtype::Q1_0 => blocks(bytes, first, out, q1_0),
        Dtype::Q2_0 => blocks(bytes, first, out, q2_0),
    }
}

fn scalars<const B: usize>(bytes: &[u8], first: usize, out: &mut [f32], value: impl Fn([u8; B]) -> f32) {
    let (all, _) = bytes.as_chunks::<B>();
    for (o, b) in out.iter_mut().zip(&all[first..]) {
        *o = value(*b);
    }
}

/// Decodes an F8_E4M3 `s | eeee | mmm` of bias 7, without infinities; 0x7f and 0xff are NaN. The bits are those of an
/// f32 whose exponent is short of 127 - 7.
#[inline(always)]
fn f8_e4m3([b]: [u8; 1]) -> f32 {
    if b & 0x7f == 0x7f {
        return f32::NAN;
    }
    let bits = u32::from(b & 0x80) << 24 | u32::from(b & 0x7f) << 20;
    f32::from_bits(bits) * f32::from_bits((127 + 120) << 23)
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

/// Decodes `scale * fp4(q)` from a block of 4 groups of 16: `4 scales | 4 times 8 bytes of nibble pairs q`. A scale is
/// unsigned E4M3 (bias 7) whose upper bit does not count; 0x7f means 0. It is halved, since the table is doubled.
#[inline(always)]
fn nvfp4(b: &[u8; 36], out: &mut [f32; 64]) {
    for (g, group) in out.as_chunks_mut::<16>().0.iter_mut().enumerate() {
        let (exponent, mantissa) = (i32::from(b[g] >> 3 & 15), f32::from(b[g] & 7));
        let d = match exponent {
            _ if b[g] == 0x7f => 0.0,
            0 => mantissa * 2f32.powi(-10),
            _ => (1.0 + mantissa / 8.0) * 2f32.powi(exponent - 8),
        };
        for (j, &q) in b[4 + 8 * g..][..8].iter().enumerate() {
            group[j] = d * f32::from(FP4_DOUBLED[usize::from(q & 15)]);
            group[j + 8] = d * f32::from(FP4_DOUBLED[usize::from(q >> 4)]);
        }
    }
}

/// Decodes `d` for a one, `-d` for a zero from a block `f16 d | 128 bits`, the lowest bit of a byte first.
#[inline(always)]
fn q1_0(b: &[u8; 18], out: &mut [f32; 128]) {
    let d = half_at(b, 0);
    for (j, o) in out.iter_mut().enumerate() {
        *o = if b[2 + j / 8] >> (j % 8) & 1 == 1 { d } else { -d };
    }
}

/// Decodes `d * (q - 1)` from a block `f16 d | 64 q of two bits`, the lowest bits of a byte first.
#[inline(always)]
fn q2_0(b: &[u8; 18], out: &mut [f32; 64]) {
    let d = half_at(b, 0);
    for (j, o) in out.iter_mut().enumerate() {
        *o = f32::from((b[2 + j / 4] >> (2 * (j % 4)) & 3) as i8 - 1) * d;
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    /// Checks that any range gives what the whole tensor gives, whichever blocks it cuts.
    #[test]
    fn pieces_are_parts_of_the_whole() {
        for (_, dtype) in super::super::header::TYPES {
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

    /// Checks the types that the `gguf` package does not decode, against llama.cpp's formulas.
    #[test]
    fn one_and_two_bits_are_signs_and_thirds() {
        let mut block = [0; 18];
        block[..2].copy_from_slice(&f16::from_f32(0.5).to_le_bytes());
        (block[2], block[17]) = (0b1110_0100, 0b1000_0000);
        let mut out = [0f32; 128];
        dequantize(Dtype::Q1_0, &block, 0, &mut out);
        assert_eq!(out[..8], [-0.5, -0.5, 0.5, -0.5, -0.5, 0.5, 0.5, 0.5]);
        assert_eq!(out[126..], [-0.5, 0.5]);
        dequantize(Dtype::Q2_0, &block, 0, &mut out[..64]);
        assert_eq!(out[..4], [-0.5, 0.0, 0.5, 1.0]);
        assert_eq!(out[62..64], [-0.5, 0.5]);
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
