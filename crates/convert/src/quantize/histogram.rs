//! Distinct fp16 values of a group of weights, with their moments.
//!
//! In one dimension the clusters of a k-means optimum are intervals of the sorted values. So a histogram of the
//! 65,536 fp16 codes is enough, and the cost of an interval follows from prefix sums.

use half::f16;

/// Sums over weights: of their masses, of mass times value, and of mass times squared value.
#[derive(Clone, Copy, Debug, Default, PartialEq)]
pub(super) struct MassMoments {
    pub weight: f64,
    pub sum: f64,
    pub square: f64,
}

impl MassMoments {
    #[inline]
    fn add(&mut self, value: f64, weight: f64) {
        let first = weight * value;
        self.weight += weight;
        self.sum += first;
        self.square += first * value;
    }

    #[inline]
    pub fn minus(self, other: MassMoments) -> MassMoments {
        MassMoments {
            weight: self.weight - other.weight,
            sum: self.sum - other.sum,
            square: self.square - other.square,
        }
    }

    /// Computes the squared error when every value becomes `v`: `square - 2 * v * sum + v * v * weight`.
    pub fn error(&self, v: f64) -> f64 {
        // Cancellation can leave a tiny negative number.
        (self.square - 2.0 * v * self.sum + v * v * self.weight).max(0.0)
    }
}

/// Distinct values of a group of weights, ascending, each with its mass: how often it occurs, or the importance of the
/// columns in which it does.
#[derive(Clone, Debug, Default)]
pub struct Histogram {
    /// Counts by ordered code; all zero between uses.
    counts: Vec<u32>,
    masses: Vec<f64>,
    /// True if the bins hold importances.
    weighted: bool,
    /// Least and greatest code in the bins.
    range: Option<(u16, u16)>,
    /// Ordered codes: the first `values.len()` are those of the values; the rest is room.
    codes: Vec<u16>,
    values: Vec<f32>,
    /// Prefix sums by mass, one longer than `values`.
    moments: Vec<MassMoments>,
    /// Prefix sums by count, one longer than `values`; empty without importance, where they equal those by mass.
    plain: Vec<MassMoments>,
}

/// Computes the ordered code of a value: codes ascend with the values, and -0 has the code of 0.
#[inline(always)]
pub(super) fn ordered(v: f16) -> u16 {
    let bits = v.to_bits();
    let code = bits ^ (((bits as i16 >> 15) as u16) | 0x8000);
    code + u16::from(code == 0x7fff)
}

/// Turns fp16 bits into ordered codes in place, and returns the least and the greatest code.
pub(super) fn order(bits: &mut [u16]) -> (u16, u16) {
    // Codes are compared as signed numbers: every processor compares several of these at a time.
    let (mut low, mut high) = (i16::MAX, i16::MIN);
    for b in bits.iter_mut() {
        *b = ordered(f16::from_bits(*b));
        let signed = (*b ^ 0x8000) as i16;
        low = low.min(signed);
        high = high.max(signed);
    }
    (low as u16 ^ 0x8000, high as u16 ^ 0x8000)
}

fn ordered_codes(weights: &[f16]) -> (Vec<u16>, (u16, u16)) {
    let mut codes: Vec<u16> = weights.iter().map(|w| w.to_bits()).collect();
    let range = order(&mut codes);
    (codes, range)
}

#[inline(always)]
fn value_of(code: u16) -> f32 {
    let bits = if code & 0x8000 != 0 { code & 0x7fff } else { !code };
    // A product changes the exponent's bias from 15 to 127; it is exact for normal and subnormal numbers alike.
    let magnitude = f32::from_bits(u32::from(bits & 0x7fff) << 13) * f32::from_bits(0x7780_0000);
    if bits & 0x8000 != 0 { -magnitude } else { magnitude }
}

/// Bins that are tested for emptiness together.
const CHUNK: usize = 16;

impl Histogram {
    /// Counts `weights`, which must be finite.
    pub fn fill(&mut self, weights: &[f16]) {
        let (codes, range) = ordered_codes(weights);
        self.count(&codes, range, None);
        self.collect();
    }

    /// Counts `weights` like [`Histogram::fill`], in rows of `importance.len()`: the mass of a weight is its
    /// column's importance, a finite number that is not negative.
    ///
    /// # Panics
    /// The number of weights is no multiple of `importance.len()`.
    pub fn fill_weighted(&mut self, weights: &[f16], importance: &[f32]) {
        let (codes, range) = ordered_codes(weights);
        self.count(&codes, range, Some(importance));
        self.collect();
    }

    /// Adds ordered codes to the bins; `range` is what [`order`] returned. Either all calls before a
    /// [`Histogram::collect`] have importances, or none has.
    pub(super) fn count(&mut self, codes: &[u16], (low, high): (u16, u16), importance: Option<&[f32]>) {
        if codes.is_empty() {
            return;
        }
        self.counts.resize(1 << 16, 0);
        self.range = match self.range {
            Some((a, b)) => Some((a.min(low), b.max(high))),
            None => Some((low, high)),
        };
        match importance {
            None => {
                // An array, so that no index needs a check.
                if let Ok(counts) = <&mut [u32; 1 << 16]>::try_from(self.counts.as_mut_slice()) {
                    for code in codes {
                        counts[usize::from(*code)] += 1;
                    }
                }
            }
            Some(importance) => {
                assert!(codes.len().is_multiple_of(importance.len().max(1)));
                self.weighted = true;
                self.masses.resize(1 << 16, 0.0);
                for row in codes.chunks_exact(importance.len().max(1)) {
                    for (code, &mass) in row.iter().zip(importance) {
                        self.counts[usize::from(*code)] += 1;
                        self.masses[usize::from(*code)] += f64::from(mass);
                    }
                }
            }
        }
    }

    /// Adds the bins of another histogram that has not been collected.
    pub(super) fn join(&mut self, other: &Histogram) {
        let Some((low, high)) = other.range else { return };
        self.range = match self.range {
            Some((a, b)) => Some((a.min(low), b.max(high))),
            None => Some((low, high)),
        };
        self.counts.resize(1 << 16, 0);
        for (a, b) in self.counts.iter_mut().zip(&other.counts) {
            *a += b;
        }
        if other.weighted {
            self.weighted = true;
            self.masses.resize(1 << 16, 0.0);
            for (a, b) in self.masses.iter_mut().zip(&other.masses) {
                *a += b;
            }
        }
    }

    /// Moves the bins into sorted lists and empties them.
    pub(super) fn collect(&mut self) {
        self.plain.clear();
        let weighted = std::mem::take(&mut self.weighted);
        let range = self.range.take();
        let n = range.map_or(0, |range| self.find_codes(range));
        self.values.clear();
        self.values.extend(self.codes[..n].iter().map(|&code| value_of(code)));
        self.moments.resize(n + 1, MassMoments::default());
        let mut sums = MassMoments::default();
        self.moments[0] = sums;
        if !weighted {
            for ((m, &code), &v) in self.moments[1..].iter_mut().zip(&self.codes).zip(&self.values) {
                let count = std::mem::take(&mut self.counts[usize::from(code)]);
                sums.add(f64::from(v), f64::from(count));
                *m = sums;
            }
            return;
        }
        let mut plain = MassMoments::default();
        self.plain.resize(n + 1, plain);
        for (i, (&code, &v)) in self.codes.iter().zip(&self.values).enumerate() {
            let code = usize::from(code);
            sums.add(f64::from(v), std::mem::take(&mut self.masses[code]));
            plain.add(f64::from(v), f64::from(std::mem::take(&mut self.counts[code])));
            self.moments[i + 1] = sums;
            self.plain[i + 1] = plain;
        }
        // Importances that are all zero say nothing: then every weight counts the same.
        if sums.weight <= 0.0 {
            std::mem::swap(&mut self.moments, &mut self.plain);
            self.plain.clear();
        }
    }

    /// Writes the codes that occur to `self.codes`, in order, and returns their number.
    fn find_codes(&mut self, (low, high): (u16, u16)) -> usize {
        let first = usize::from(low) / CHUNK * CHUNK;
        let end = (usize::from(high) + 1).next_multiple_of(CHUNK);
        if self.codes.is_empty() {
            self.codes.resize((1 << 16) + CHUNK, 0);
        }
        let mut n = 0;
        for (i, chunk) in self.counts[first..end].chunks_exact(CHUNK).enumerate() {
            if chunk.iter().fold(0, |any, &count| any | count) == 0 {
                continue;
            }
            // Every code is written; the next one overwrites a code that does not occur.
            let base = (first + i * CHUNK) as u16;
            let out = &mut self.codes[n..n + CHUNK];
            let mut kept = 0;
            for (j, &count) in chunk.iter().enumerate() {
                out[kept] = base + j as u16;
                kept += usize::from(count > 0);
            }
            n += kept;
        }
        n
    }

    /// Returns the distinct values, ascending.
    pub fn values(&self) -> &[f32] {
        &self.values
    }

    /// Returns the mass of the value at an index.
    pub fn mass(&self, i: usize) -> f64 {
        self.moments[i + 1].weight - self.moments[i].weight
    }

    /// Returns the ordered codes of the values.
    pub(super) fn codes(&self) -> &[u16] {
        &self.codes[..self.values.len()]
    }

    /// Returns the prefix sums by mass; one longer than the values.
    pub(super) fn moments(&self) -> &[MassMoments] {
        &self.moments
    }

    /// Returns the prefix sums by count; one longer than the values.
    pub(super) fn plain(&self) -> &[MassMoments] {
        if self.plain.is_empty() { &self.moments } else { &self.plain }
    }

    /// Tells whether the masses are importances.
    pub fn is_weighted(&self) -> bool {
        !self.plain.is_empty()
    }

    /// Returns the index of the first value above `bound`.
    #[inline]
    pub(super) fn above(&self, bound: f64) -> usize {
        // The values are f32: the largest f32 up to the bound splits them in the same place.
        let rounded = bound as f32;
        let bound = if f64::from(rounded) > bound { rounded.next_down() } else { rounded };
        self.values.partition_point(|&v| v <= bound)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn half(values: &[f32]) -> Vec<f16> {
        values.iter().map(|&v| f16::from_f32(v)).collect()
    }

    #[test]
    fn every_code_is_ordered_and_read_back() {
        let mut last = f32::NEG_INFINITY;
        for code in 0..=u16::MAX {
            let v = value_of(code);
            let bits = if code & 0x8000 != 0 { code & 0x7fff } else { !code };
            let expected = f16::from_bits(bits);
            if !expected.is_finite() {
                continue;
            }
            assert_eq!(v, expected.to_f32(), "{code}");
            assert_eq!(ordered(expected), if code == 0x7fff { 0x8000 } else { code });
            assert!(v > last || code == 0x8000 || code == 0x7fff, "{code}: {v} after {last}");
            last = v;
        }
    }

    #[test]
    fn a_histogram_can_be_filled_again() {
        let mut h = Histogram::default();
        h.fill(&half(&[1.0, -2.0, 1.0, -0.0, 0.0]));
        assert_eq!(h.values(), [-2.0, 0.0, 1.0]);
        assert_eq!([h.mass(0), h.mass(1), h.mass(2)], [1.0, 2.0, 2.0]);
        h.fill_weighted(&half(&[3.0, 4.0, 3.0, 3.0]), &[0.5, 2.0]);
        assert_eq!((h.values(), h.mass(0), h.mass(1)), ([3.0f32, 4.0].as_slice(), 3.0, 2.0));
        assert_eq!(h.plain()[2].weight, 4.0);
        h.fill_weighted(&half(&[3.0, 4.0]), &[0.0, 0.0]);
        assert!(!h.is_weighted() && h.mass(0) == 1.0);
        h.fill(&half(&[65504.0]));
        assert_eq!(h.values(), [65504.0]);
        h.fill(&[]);
        assert!(h.values().is_empty());
    }
}
