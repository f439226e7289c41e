//! Lookup tables as integers, made once per matrix.
//!
//! ```text
//! Int8Codes  element = low + step * code, rounded    code in 0 .. 255      for approximate matmul
//! Int16Lut   entry = step * word, exactly            |word| < 2^15         for exact matmul, step a power of two
//! HalfLut    entry as fp16, exactly                                        for exact matmul, tables of 64 and 256
//! Exponents  scale = 2^(byte - 127), exactly                               for MXFP4 in blocks of 32
//! ```

use crate::memory::array_at;
use crate::weight_format::{IndexBits, IntBits};

/// Turns stored elements into codes of 8 bits, or of 15 in two bytes: an element of group g is about `steps[g] * code + lows[g]`.
#[derive(Clone, Debug)]
pub(crate) struct Int8Codes {
    /// Codes of the entries of tables; tables of fewer than 16 entries are repeated to 16. Integers have none: their
    /// codes are their bits, with the sign bit flipped.
    tables: Vec<u8>, // [groups, max(entries, 16)]
    /// Lower bytes of codes of 15 bits, of which `tables` has the upper bytes; empty for codes of 8 bits.
    lower: Vec<u8>, // [groups, entries]
    pub steps_and_lows: Vec<(f32, f32)>, // [groups]
}

impl Int8Codes {
    /// Makes the codes of tables, of 8 bits; `None` where an entry is not finite.
    pub fn of_tables(lut: &[f32], bits: IndexBits) -> Option<Int8Codes> {
        Int8Codes::up_to(lut, bits, 255)
    }

    /// Makes the codes of tables of 64 entries, of 15 bits; `None` where an entry is not finite.
    pub fn of_two_bytes(lut: &[f32]) -> Option<Int8Codes> {
        Int8Codes::up_to(lut, IndexBits::Six, 32767)
    }

    /// Makes the codes of tables, the largest of which is `most`.
    fn up_to(lut: &[f32], bits: IndexBits, most: u16) -> Option<Int8Codes> {
        let entries = 1usize << bits.bits();
        let mut all = Int8Codes { tables: Vec::new(), lower: Vec::new(), steps_and_lows: Vec::new() };
        for table in lut.chunks_exact(entries) {
            let (low, high) =
                table.iter().fold((f32::INFINITY, f32::NEG_INFINITY), |(a, b), &v| (a.min(v), b.max(v)));
            let step = (high - low) / f32::from(most);
            if !step.is_finite() || table.iter().any(|v| !v.is_finite()) {
                return None;
            }
            let code = |v: f32| if step > 0.0 { ((v - low) / step).round() as u16 } else { 0 };
            let codes = (0..entries.max(16)).map(|i| code(table[i % entries]));
            match most {
                255 => all.tables.extend(codes.map(|code| code as u8)),
                _ => codes.map(u16::to_be_bytes).for_each(|[upper, lower]| {
                    all.tables.push(upper);
                    all.lower.push(lower);
                }),
            }
            all.steps_and_lows.push((step, low));
        }
        Some(all)
    }

    /// Makes the codes of integers with a scale, and an offset or 0, per group of rows.
    pub fn of_integers(scales: &[f32], offsets: Option<&[f32]>, bits: IntBits, signed: bool) -> Int8Codes {
        let zero_point = f32::from(sign_bit(bits, signed));
        let offset = |i: usize| offsets.map_or(0.0, |o| o[i]);
        let steps_and_lows = scales.iter().enumerate().map(|(i, s)| (*s, -s * (offset(i) + zero_point)));
        Int8Codes { tables: Vec::new(), lower: Vec::new(), steps_and_lows: steps_and_lows.collect() }
    }

    /// Returns the N codes of a group's table, or their upper bytes.
    #[inline(always)]
    pub fn table<const N: usize>(&self, group: usize) -> &[u8; N] {
        array_at(&self.tables, group * N)
    }

    /// Returns the lower bytes of the N codes of a group's table.
    #[inline(always)]
    pub fn lower<const N: usize>(&self, group: usize) -> &[u8; N] {
        array_at(&self.lower, group * N)
    }
}

/// Returns the sign bit of integers, 0 for unsigned ones. Flipping it adds half their range and makes unsigned codes.
pub(crate) fn sign_bit(bits: IntBits, signed: bool) -> u8 {
    if signed { 1 << (bits.bits() - 1) } else { 0 }
}

/// Holds tables of f32 as whole numbers: entry i of table g is exactly `step[g] * word[g][i]`.
///
/// The error of a matmul with up to 7000 columns is at most `5e-6 * max |w| * sum |x|`.
#[derive(Clone, Debug)]
pub struct Int16Lut {
    pub(crate) tables: Vec<[i16; 16]>, // [tables, 16]
    pub(crate) steps: Vec<f32>,        // [tables]
}

impl Int16Lut {
    /// Makes words for tables of sixteen entries. `None` where an entry is not a whole number of at most 15 bits times
    /// the table's power of two.
    pub fn new(lut: &[f32]) -> Option<Int16Lut> {
        let (tables, []) = lut.as_chunks::<16>() else { return None };
        let mut all = Int16Lut { tables: Vec::new(), steps: Vec::new() };
        for table in tables {
            let largest = table.iter().fold(0f32, |a, v| a.max(v.abs()));
            let step = match largest {
                0.0 => 1.0,
                // Steps and their inverses stay normal numbers.
                v if (1e-20..1e20).contains(&v) => step_of(v),
                _ => return None,
            };
            let mut words = [0; 16];
            for (word, v) in words.iter_mut().zip(table) {
                let whole = v / step;
                *word = whole as i16;
                // NaN is unequal too.
                if f32::from(*word) != whole {
                    return None;
                }
            }
            all.tables.push(words);
            all.steps.push(step);
        }
        Some(all)
    }
}

/// Holds tables of f32 that fp16 represents exactly: a lookup gives thirty-two fp16 entries at once, sixteen f32 entries.
#[derive(Clone, Debug)]
pub(crate) struct HalfLut {
    halves: Vec<u16>, // [tables, entries]
}

impl HalfLut {
    /// Makes fp16 tables; `None` where an entry is NaN or fp16 cannot represent it.
    pub fn new(lut: &[f32]) -> Option<HalfLut> {
        let half = |v: &f32| {
            let half = half::f16::from_f32(*v);
            (half.to_f32().to_bits() == v.to_bits() && !v.is_nan()).then_some(half.to_bits())
        };
        Some(HalfLut { halves: lut.iter().map(half).collect::<Option<_>>()? })
    }

    /// Returns the N entries of table `i`, as fp16 bits.
    #[inline(always)]
    pub fn table<const N: usize>(&self, i: usize) -> &[u16; N] {
        array_at(&self.halves, i * N)
    }
}

/// Columns that share a scale of MXFP4, where kernels read rows in place: four lanes of eight columns.
pub(crate) const MXFP4_BLOCK: usize = 32;

/// Holds scales that are powers of two as the exponent bytes of f32: a quarter of the memory.
#[derive(Clone, Debug)]
pub(crate) struct Exponents {
    bytes: Vec<u8>, // [rows, blocks], and three more
}

impl Exponents {
    /// Takes the exponents of scales; `None` where a scale is no normal positive power of two.
    pub fn new(scales: &[f32]) -> Option<Exponents> {
        let exponent = |v: &f32| {
            let byte = (v.to_bits() >> 23) as u8;
            (v.to_bits() == u32::from(byte) << 23 && !matches!(byte, 0 | 255)).then_some(byte)
        };
        let mut bytes: Vec<u8> = scales.iter().map(exponent).collect::<Option<_>>()?;
        // Kernels read four at a time.
        bytes.extend([0; 3]);
        Some(Exponents { bytes })
    }

    /// Returns scale `i`.
    #[inline(always)]
    pub fn scale(&self, i: usize) -> f32 {
        f32::from_bits(u32::from(self.bytes[i]) << 23)
    }

    /// Returns the exponent bytes of four scales from `i` on; those behind the last scale are 0.
    #[inline(always)]
    pub fn four(&self, i: usize) -> &[u8; 4] {
        array_at(&self.bytes, i)
    }
}

/// Returns the step of a table whose largest magnitude is `largest`: `2^floor(log2(largest)) / 2^14`.
fn step_of(largest: f32) -> f32 {
    f32::from_bits(largest.to_bits() & 0x7f80_0000) / 16384.0
}

/// Rounds a table's entries so that [`Int16Lut`] can hold them, by at most 2^-15 of the largest. fp16 entries do not change.
///
/// Tables whose largest magnitude lies outside 1e-20 to 1e20 do not change.
pub fn round_to_int16(table: &mut [f32]) {
    let largest = table.iter().fold(0f32, |a, v| a.max(v.abs()));
    if !(1e-20..1e20).contains(&largest) {
        return;
    }
    let step = step_of(largest);
    // The clamp keeps the largest from rounding up, which would change the step.
    table.iter_mut().for_each(|v| *v = (*v / step).round_ties_even().clamp(-32767.0, 32767.0) * step);
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn exponents_hold_powers_of_two() {
        let scales = [1.0, 0.5, 2f32.powi(-24), 2f32.powi(13), f32::MIN_POSITIVE, 2f32.powi(127)];
        let exponents = Exponents::new(&scales).unwrap();
        assert_eq!(std::array::from_fn(|i| exponents.scale(i)), scales);
        assert_eq!(exponents.four(5), &[254, 0, 0, 0]);
        for not in [0.0, -1.0, 3.0, 1e-40, f32::INFINITY, f32::NAN] {
            assert!(Exponents::new(&[1.0, not]).is_none(), "{not}");
        }
    }

    #[test]
    fn halves_hold_what_fp16_holds() {
        let table = [0.0, -0.0, 1.5, 65504.0, -5.9604645e-8, f32::INFINITY];
        let halves = HalfLut::new(&table).unwrap().halves;
        assert_eq!(halves, table.map(|v| half::f16::from_f32(v).to_bits()));
        for not in [1.0 + f32::EPSILON, 65520.0, 1e-9, f32::NAN] {
            assert!(HalfLut::new(&[0.0, not]).is_none(), "{not}");
        }
    }
}
