//! Lookup tables as integers, made once per matrix.
//!
//! ```text
//! Int8Lut    entry = low + step * code, rounded      code in 0 .. 255      for approximate matmul
//! Int16Lut   entry = step * word, exactly            |word| < 2^15         for exact matmul, step a power of two
//! HalfLut    entry as fp16, exactly                                        for exact matmul, tables of 64 and 256
//! ```

/// Holds tables of f32 as 8-bit codes: entry i of table g is about `step[g] * code[g][i] + low[g]`.
#[derive(Clone, Debug)]
pub struct Int8Lut {
    /// Entries per table.
    entries: usize,
    /// Codes. Tables of fewer than 16 entries are repeated to 16.
    codes: Vec<u8>, // [tables, max(entries, 16)]
    /// Step and low value of each table.
    lines: Vec<(f32, f32)>, // [tables]
}

impl Int8Lut {
    /// Makes codes for all tables of `2^bits` entries in `lut`; `None` where an entry is not finite.
    pub fn new(lut: &[f32], bits: usize) -> Option<Int8Lut> {
        let entries = 1usize << bits;
        if bits > 8 || !lut.len().is_multiple_of(entries) || lut.iter().any(|v| !v.is_finite()) {
            return None;
        }
        let mut all = Int8Lut { entries, codes: Vec::new(), lines: Vec::new() };
        for table in lut.chunks_exact(entries) {
            let (low, high) =
                table.iter().fold((f32::INFINITY, f32::NEG_INFINITY), |(a, b), &v| (a.min(v), b.max(v)));
            let step = (high - low) / 255.0;
            if !step.is_finite() {
                return None;
            }
            let code = |v: f32| if step > 0.0 { ((v - low) / step).round() as u8 } else { 0 };
            all.codes.extend((0..entries.max(16)).map(|i| code(table[i % entries])));
            all.lines.push((step, low));
        }
        Some(all)
    }

    /// Tells whether there are codes for each table of `2^bits` entries in `lut`.
    pub(crate) fn fits(&self, lut: &[f32], bits: usize) -> bool {
        self.entries == 1 << bits && self.entries * self.lines.len() == lut.len()
    }

    /// Returns a table's step and low value.
    pub(crate) fn line(&self, table: usize) -> (f32, f32) {
        self.lines[table]
    }

    /// Returns the N codes of a table.
    #[inline(always)]
    pub(crate) fn table<const N: usize>(&self, table: usize) -> &[u8; N] {
        match self.codes[table * N..(table + 1) * N].try_into() {
            Ok(codes) => codes,
            Err(_) => unreachable!("N codes"),
        }
    }
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

    /// Tells whether there are as many tables as in `lut`.
    pub(crate) fn fits(&self, lut: &[f32]) -> bool {
        self.tables.len() * 16 == lut.len()
    }
}

/// Holds tables of f32 that fp16 represents exactly: a lookup gives thirty-two fp16 entries at once, sixteen f32 entries.
#[derive(Clone, Debug)]
pub struct HalfLut {
    pub(crate) halves: Vec<u16>, // [tables, entries]
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
    pub(crate) fn table<const N: usize>(&self, i: usize) -> &[u16; N] {
        match self.halves[i * N..(i + 1) * N].try_into() {
            Ok(table) => table,
            Err(_) => unreachable!("a slice of N"),
        }
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
    fn halves_hold_what_fp16_holds() {
        let table = [0.0, -0.0, 1.5, 65504.0, -5.9604645e-8, f32::INFINITY];
        let halves = HalfLut::new(&table).unwrap().halves;
        assert_eq!(halves, table.map(|v| half::f16::from_f32(v).to_bits()));
        for not in [1.0 + f32::EPSILON, 65520.0, 1e-9, f32::NAN] {
            assert!(HalfLut::new(&[0.0, not]).is_none(), "{not}");
        }
    }
}
