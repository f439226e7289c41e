//! Palettization: indices into a table of fp16 values per group of rows.

use super::histogram::{Histogram, order};
use super::kmeans::{kmeans, kmeans_exact};
use super::metrics::Metrics;
use half::f16;

/// Method that chooses a table's values.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum TableMode {
    /// k-means, within 1e-4 of the optimum.
    KMeans,
    /// k-means, the global optimum.
    KMeansExact,
    /// Evenly between two ends, which are chosen for the smallest error.
    Uniform,
}

/// A table for one histogram, and the entry of every code that occurs in it.
pub(super) struct LutTable {
    /// `2^bits` values, ascending; a group with fewer distinct values repeats the last.
    pub values: Vec<f16>,
    /// Entry by ordered code.
    index: Vec<u8>,
}

impl LutTable {
    pub fn new() -> LutTable {
        LutTable { values: Vec::new(), index: vec![0; 1 << 16] }
    }

    /// Chooses the table for `h` and adds the errors to `metrics`.
    pub fn fit(&mut self, h: &Histogram, bits: u8, mode: TableMode, metrics: &mut Metrics) {
        let entries = 1usize << bits;
        let centroids = match mode {
            TableMode::KMeans => kmeans(h, entries),
            TableMode::KMeansExact => kmeans_exact(h, entries),
            TableMode::Uniform => uniform(h, entries),
        };
        self.values.clear();
        self.values.extend(centroids.into_iter().map(f16::from_f64));
        if entries == 16 && mode != TableMode::KMeansExact {
            round_to_int16(h, &mut self.values);
        }
        let last = self.values.last().copied().unwrap_or(f16::ZERO);
        self.values.resize(entries, last);
        // Values get the nearest entry of the rounded table, the lower of two equally near ones: an entry takes an
        // interval.
        let (n, codes) = (h.values().len(), h.codes());
        let mut from = 0;
        for entry in 0..entries {
            if from == n {
                break;
            }
            let v = self.values[entry].to_f64();
            let to = match self.values[entry + 1..].iter().find(|&&next| next > self.values[entry]) {
                Some(next) => h.above((v + next.to_f64()) / 2.0),
                None => n,
            };
            if from == to {
                continue;
            }
            self.index[usize::from(codes[from])..=usize::from(codes[to - 1])].fill(entry as u8);
            let (low, high) = (f64::from(h.values()[from]), f64::from(h.values()[to - 1]));
            let farthest = if (v - low).abs() > (v - high).abs() { low } else { high };
            metrics.add_moments(h.plain()[to].minus(h.plain()[from]), v, farthest);
            if h.is_weighted() {
                metrics.add_importance(h.moments()[to].minus(h.moments()[from]), v);
            }
            from = to;
        }
    }

    /// Looks up the entry of each of `codes`, which must occur in the histogram.
    pub fn assign(&self, codes: &[u16], entries: &mut [u8]) {
        let Ok(index) = <&[u8; 1 << 16]>::try_from(self.index.as_slice()) else { return };
        for (entry, code) in entries.iter_mut().zip(codes) {
            *entry = index[usize::from(*code)];
        }
    }
}

/// Largest rise of a squared error by [`round_to_int16`], as a share of the error.
const RAISED: f64 = 1e-3;

/// Rounds entries to multiples of `p / 2^15`, where `p` is the power of two above the largest magnitude: products of
/// such tables take two thirds of the instructions on a CPU. The table stays as it is where weights hundreds of times
/// larger than the others make these steps coarse, or where a group is reproduced without any error.
fn round_to_int16(h: &Histogram, values: &mut [f16]) {
    if h.values().len() <= values.len() {
        return;
    }
    let mut table: Vec<f32> = values.iter().map(|v| v.to_f32()).collect();
    let before = squared_error(h, table.iter().map(|v| f64::from(*v)));
    anemoe_kernels::round_to_int16(&mut table);
    let after = squared_error(h, table.iter().map(|v| f64::from(*v)));
    // Rounding must not make two entries equal.
    let as_many = values.windows(2).zip(table.windows(2)).all(|(v, t)| (v[0] == v[1]) == (t[0] == t[1]));
    if as_many && after <= before * (1.0 + RAISED) {
        values.iter_mut().zip(table).for_each(|(v, t)| *v = f16::from_f32(t));
    }
}

/// Sums the squared errors of all values of `h`, each with the nearest entry of an ascending table.
fn squared_error(h: &Histogram, table: impl Iterator<Item = f64> + Clone) -> f64 {
    let (n, mut from, mut sum) = (h.values().len(), 0, 0.0);
    let next = table.clone().skip(1).map(Some).chain([None]);
    for (v, next) in table.zip(next) {
        let to = next.map_or(n, |next| h.above((v + next) / 2.0));
        if to > from {
            sum += h.moments()[to].minus(h.moments()[from]).error(v);
            from = to;
        }
    }
    sum
}

/// Cuts that are tried at both ends: how far an end moves towards the mean, as a share of their distance.
const CUTS: [f64; 11] = [0.05, 0.1, 0.2, 0.3, 0.4, 0.5, 0.6, 0.7, 0.8, 0.88, 0.94];

/// Makes an evenly spaced table. Its ends are the smallest and largest value, or lie closer together where that
/// lowers the error: then a few outliers do not decide how coarse all others become.
fn uniform(h: &Histogram, entries: usize) -> Vec<f64> {
    let values = h.values();
    let (Some(&low), Some(&high)) = (values.first(), values.last()) else { return Vec::new() };
    let (low, high) = (f64::from(low), f64::from(high));
    if low == high {
        return vec![low];
    }
    let grid = |a: f64, b: f64| -> Vec<f64> {
        let step = (b - a) / (entries - 1) as f64;
        (0..entries).map(|i| a + step * i as f64).collect()
    };
    let error = |a: f64, b: f64| squared_error(h, grid(a, b).into_iter());
    let center = {
        let m = h.moments()[values.len()];
        if m.weight > 0.0 { m.sum / m.weight } else { low.midpoint(high) }
    };
    // Cuts move an end towards the mean.
    let at = |end: f64, cut: f64| end + (center - end) * cut;
    let mut best = (error(low, high), 0.0, 0.0);
    let try_cuts = |a: f64, b: f64, best: &mut (f64, f64, f64)| {
        if (0.0..1.0).contains(&a) && (0.0..1.0).contains(&b) {
            let found = error(at(low, a), at(high, b));
            if found < best.0 {
                *best = (found, a, b);
            }
        }
    };
    for cut in CUTS {
        try_cuts(cut, cut, &mut best);
    }
    // Then each end moves by itself, in smaller and smaller steps of the rest of its side.
    for step in [0.3, 0.12, 0.05, 0.02] {
        for sign in [-1.0, 1.0] {
            let (_, a, b) = best;
            try_cuts(a + sign * step * (1.0 - a), b, &mut best);
            let (_, a, b) = best;
            try_cuts(a, b + sign * step * (1.0 - b), &mut best);
        }
    }
    grid(at(low, best.1), at(high, best.2))
}

/// Palettizes one group after the other, reusing its memory.
pub struct Palettizer {
    bits: u8,
    mode: TableMode,
    histogram: Histogram,
    table: LutTable,
}

impl Palettizer {
    /// Makes a palettizer for tables of `2^bits` values, 1 to 8 bits.
    ///
    /// # Panics
    /// The bits are out of range.
    pub fn new(bits: u8, mode: TableMode) -> Self {
        assert!((1..=8).contains(&bits));
        Palettizer { bits, mode, histogram: Histogram::default(), table: LutTable::new() }
    }

    /// Palettizes a group of finite weights in rows. Returns their table of `2^bits` values, ascending (a group with
    /// fewer distinct values repeats the last), and writes an index per weight to `indices`. `importance` has one
    /// number per column. Adds the errors to `metrics`.
    ///
    /// # Panics
    /// `indices` has another length than `weights`, or these are no whole rows.
    pub fn group(
        &mut self,
        weights: &[f16],
        importance: Option<&[f32]>,
        indices: &mut [u8],
        metrics: &mut Metrics,
    ) -> &[f16] {
        let mut codes: Vec<u16> = weights.iter().map(|w| w.to_bits()).collect();
        self.codes(&mut codes, importance, indices, metrics)
    }

    /// Palettizes a group like [`Palettizer::group`], from fp16 bits, which it overwrites.
    pub(super) fn codes(
        &mut self,
        bits: &mut [u16],
        importance: Option<&[f32]>,
        indices: &mut [u8],
        metrics: &mut Metrics,
    ) -> &[f16] {
        assert_eq!(bits.len(), indices.len());
        let range = order(bits);
        self.histogram.count(bits, range, importance);
        self.histogram.collect();
        self.table.fit(&self.histogram, self.bits, self.mode, metrics);
        self.table.assign(bits, indices);
        &self.table.values
    }
}

#[cfg(test)]
mod tests {
    use super::super::testing::{KINDS, weights};
    use super::*;
    use proptest::prelude::*;

    proptest! {
        /// Checks that every weight gets the nearest entry of an ascending table, for any weights.
        #[test]
        fn indices_are_nearest(v in prop::collection::vec(-70000.0f32..70000.0, 1..300), scale in -8i32..2, bits in 1u8..9, mode in prop::sample::select(vec![TableMode::KMeans, TableMode::KMeansExact, TableMode::Uniform]), importance in prop::option::of(prop::collection::vec(0.0f32..2.0, 1..4))) {
            let columns = importance.as_ref().map_or(1, Vec::len);
            let weights: Vec<f16> = v.iter().map(|x| f16::from_f32((x * 10f32.powi(scale)).clamp(-65504.0, 65504.0))).collect();
            let weights = &weights[..weights.len() / columns * columns];
            let mut indices = vec![0u8; weights.len()];
            let mut metrics = Metrics::default();
            let mut palettizer = Palettizer::new(bits, mode);
            let table = palettizer.group(weights, importance.as_deref(), &mut indices, &mut metrics);
            prop_assert_eq!(table.len(), 1 << bits);
            prop_assert!(table.windows(2).all(|w| w[0] <= w[1]) && table.iter().all(|t| t.is_finite()));
            let mut distinct: Vec<f16> = weights.to_vec();
            distinct.sort_by(f16::total_cmp);
            distinct.dedup_by(|a, b| a.to_f32() == b.to_f32());
            if mode != TableMode::Uniform && !weights.is_empty() {
                let used = table.windows(2).filter(|w| w[0] < w[1]).count() + 1;
                prop_assert_eq!(used, distinct.len().min(1 << bits));
            }
            let mut squared = 0.0;
            for (w, i) in weights.iter().zip(&indices) {
                let distance = |t: &f16| (t.to_f64() - w.to_f64()).abs();
                let nearest = table.iter().map(distance).fold(f64::INFINITY, f64::min);
                prop_assert_eq!(distance(&table[usize::from(*i)]), nearest);
                squared += nearest * nearest;
            }
            let norm: f64 = weights.iter().map(|w| w.to_f64().powi(2)).sum();
            prop_assert!((metrics.mse() * weights.len() as f64 - squared).abs() <= 1e-9 * squared + 1e-13 * norm);
            prop_assert_eq!(metrics.count, weights.len() as u64);
        }
    }

    #[test]
    fn the_uniform_grid_ends_at_the_extremes_where_that_is_best() {
        let weights: Vec<f16> = [-1.0f32, 0.0, 1.0, 2.0].iter().map(|&v| f16::from_f32(v)).collect();
        let mut indices = [0; 4];
        let mut palettizer = Palettizer::new(2, TableMode::Uniform);
        let table = palettizer.group(&weights, None, &mut indices, &mut Metrics::default());
        assert_eq!(table.iter().map(|t| t.to_f32()).collect::<Vec<_>>(), [-1.0, 0.0, 1.0, 2.0]);
        assert_eq!(indices, [0, 1, 2, 3]);
        let constant = [f16::from_f32(0.25); 9];
        let mut palettizer = Palettizer::new(4, TableMode::Uniform);
        let table = palettizer.group(&constant, None, &mut [0; 9], &mut Metrics::default());
        assert!(table.iter().all(|t| t.to_f32() == 0.25));
    }

    #[test]
    fn tables_are_words_unless_outliers_make_their_steps_coarse() {
        for (outlier, whole) in [(0.0, true), (1.0, true), (3.0, true), (200.0, false), (20_000.0, false)] {
            let mut weights: Vec<f32> = weights(3, 4096, 0);
            weights[7] = if outlier == 0.0 { weights[7] } else { outlier };
            let half: Vec<f16> = weights.into_iter().map(f16::from_f32).collect();
            let fit = |mode| {
                let mut metrics = Metrics::default();
                let mut palettizer = Palettizer::new(4, mode);
                let table = palettizer.group(&half, None, &mut vec![0; half.len()], &mut metrics);
                (table.iter().map(|t| t.to_f32()).collect::<Vec<_>>(), metrics.mse())
            };
            let ((table, error), (_, exact)) = (fit(TableMode::KMeans), fit(TableMode::KMeansExact));
            assert_eq!(anemoe_kernels::Int16Lut::new(&table).is_some(), whole, "{outlier}: {table:?}");
            assert!(error <= exact * (1.0 + 1e-4 + RAISED), "{outlier}: {error} {exact}");
        }
    }

    #[test]
    fn k_means_is_never_worse_than_a_grid() {
        for kind in 0..KINDS {
            let half: Vec<f16> = weights(3, 4096, kind).into_iter().map(f16::from_f32).collect();
            for bits in [1, 2, 3, 4, 6, 8] {
                let error = |mode| {
                    let mut metrics = Metrics::default();
                    Palettizer::new(bits, mode).group(&half, None, &mut vec![0; half.len()], &mut metrics);
                    metrics.mse()
                };
                let (grid, default) = (error(TableMode::Uniform), error(TableMode::KMeans));
                let exact = error(TableMode::KMeansExact);
                assert!(default <= grid * (1.0 + 1e-4) + 1e-15, "kind {kind}, {bits} bits: {default} {grid}");
                assert!(
                    default <= exact * (1.0 + 1e-4) + 1e-15,
                    "kind {kind}, {bits} bits: {default} {exact}"
                );
            }
        }
    }
}
