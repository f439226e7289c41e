//! One-dimensional k-means over fp16 weights.
//!
//! In one dimension the clusters of an optimum are intervals of the sorted values, so a histogram of the 65,536 fp16 codes
//! holds all there is to know, and the squared error of an interval follows from prefix sums.

use half::f16;

/// Distinct values of a group of weights, ascending, with how often each occurs.
#[derive(Clone, Debug, Default)]
pub struct Histogram {
    /// By ordered code; all zero between uses.
    bins: Vec<u32>,
    /// Which bins are in use, a bit each.
    touched: Vec<u64>,
    /// Distinct values.
    pub values: Vec<f64>,
    /// How often each value occurs.
    pub counts: Vec<u32>,
    codes: Vec<u16>,
    /// Prefix sums of counts, count * value, count * value^2; one longer than `values`.
    weight: Vec<f64>,
    sum: Vec<f64>,
    square: Vec<f64>,
}

/// A code whose order is that of the values; -0 comes directly before 0.
#[inline]
pub(super) fn ordered(v: f16) -> u16 {
    let bits = v.to_bits();
    if bits & 0x8000 != 0 { !bits } else { bits | 0x8000 }
}

fn from_ordered(code: u16) -> f16 {
    f16::from_bits(if code & 0x8000 != 0 { code & 0x7fff } else { !code })
}

impl Histogram {
    /// Counts `weights`, which must be finite.
    pub fn fill(&mut self, weights: &[f16]) {
        self.bins.resize(1 << 16, 0);
        self.touched.resize(1 << 10, 0);
        for w in weights {
            let code = usize::from(ordered(*w));
            self.bins[code] += 1;
            self.touched[code / 64] |= 1 << (code % 64);
        }
        for list in [&mut self.values, &mut self.weight, &mut self.sum, &mut self.square] {
            list.clear();
        }
        self.counts.clear();
        self.codes.clear();
        let (mut weight, mut sum, mut square) = (0.0, 0.0, 0.0);
        for (word, bits) in self.touched.iter_mut().enumerate() {
            let mut left = std::mem::take(bits);
            while left != 0 {
                let code = word * 64 + left.trailing_zeros() as usize;
                left &= left - 1;
                let count = std::mem::take(&mut self.bins[code]);
                let value = from_ordered(code as u16).to_f64();
                self.weight.push(weight);
                self.sum.push(sum);
                self.square.push(square);
                self.codes.push(code as u16);
                self.values.push(value);
                self.counts.push(count);
                let n = f64::from(count);
                weight += n;
                sum += n * value;
                square += n * value * value;
            }
        }
        self.weight.push(weight);
        self.sum.push(sum);
        self.square.push(square);
    }

    /// Ordered codes of the values.
    pub(super) fn codes(&self) -> &[u16] {
        &self.codes
    }

    /// Squared error of values `a..b` around their mean.
    #[inline]
    fn cost(&self, a: usize, b: usize) -> f64 {
        let n = self.weight[b] - self.weight[a];
        let s = self.sum[b] - self.sum[a];
        // Cancellation can leave a tiny negative number.
        if n > 0.0 { (self.square[b] - self.square[a] - s * s / n).max(0.0) } else { 0.0 }
    }

    fn mean(&self, a: usize, b: usize) -> f64 {
        (self.sum[b] - self.sum[a]) / (self.weight[b] - self.weight[a])
    }

    fn total(&self, bounds: &[usize]) -> f64 {
        bounds.windows(2).map(|w| self.cost(w[0], w[1])).sum()
    }

    fn means(&self, bounds: &[usize]) -> Vec<f64> {
        bounds.windows(2).filter(|w| w[0] < w[1]).map(|w| self.mean(w[0], w[1])).collect()
    }
}

/// Centroids of the global optimum for `k` clusters, ascending; fewer when there are fewer distinct values.
pub fn kmeans_exact(h: &Histogram, k: usize) -> Vec<f64> {
    let n = h.values.len();
    if n <= k {
        return h.values.clone();
    }
    let edges: Vec<usize> = (0..=n).collect();
    h.means(&partition(h, &edges, k))
}

/// Centroids close to the global optimum: the optimum over a few hundred bins, then Lloyd's iteration on all values.
pub fn kmeans(h: &Histogram, k: usize) -> Vec<f64> {
    let n = h.values.len();
    if n <= k {
        return h.values.clone();
    }
    let edges = coarse_edges(h, if k <= 16 { 256 } else { 64 * k });
    let mut bounds = partition(h, &edges, k);
    refine(h, &mut bounds);
    h.means(&bounds)
}

/// Bin edges, as indices of values: where the density to the power 1/3 accumulates evenly (the density of an optimal
/// quantizer's levels), and evenly over the range, so that neither the bulk nor the tails are cut too coarsely.
fn coarse_edges(h: &Histogram, bins: usize) -> Vec<usize> {
    let n = h.values.len();
    if n <= bins {
        return (0..=n).collect();
    }
    let span = h.values[n - 1] - h.values[0];
    let slice = span / 1024.0;
    // Mass per slice of the range, to the power 1/3.
    let mut density = vec![0.0f64; 1025];
    let place = |v: f64| ((v - h.values[0]) / slice) as usize;
    for (v, &c) in h.values.iter().zip(&h.counts) {
        density[place(*v).min(1024)] += f64::from(c);
    }
    density.iter_mut().for_each(|d| *d = d.cbrt());
    let total: f64 = density.iter().sum();
    let step = total / (bins * 3 / 4) as f64;
    let range_step = span / (bins / 4) as f64;
    let mut edges = vec![0];
    let (mut level, mut next_level) = (0.0, step);
    let mut next_value = h.values[0] + range_step;
    let mut slice_count = vec![0u32; 1025];
    for (v, &c) in h.values.iter().zip(&h.counts) {
        slice_count[place(*v).min(1024)] += c;
    }
    for i in 0..n {
        let s = place(h.values[i]).min(1024);
        level += density[s] * f64::from(h.counts[i]) / f64::from(slice_count[s]);
        if level >= next_level || h.values[i] >= next_value {
            while next_level <= level {
                next_level += step;
            }
            while next_value <= h.values[i] {
                next_value += range_step;
            }
            if i + 1 < n {
                edges.push(i + 1);
            }
        }
    }
    edges.push(n);
    edges
}

/// The best partition into `k` intervals whose bounds are among `edges`, by dynamic programming. The best split moves only
/// upwards with the end of the interval, so each row is solved by divide and conquer in O(n log n).
fn partition(h: &Histogram, edges: &[usize], k: usize) -> Vec<usize> {
    let m = edges.len() - 1;
    if m <= k {
        return edges.to_vec();
    }
    let mut previous: Vec<f64> = (0..=m).map(|j| h.cost(edges[0], edges[j])).collect();
    let mut current = vec![0.0; m + 1];
    let mut splits: Vec<Vec<u32>> = Vec::with_capacity(k);
    for row in 1..k {
        let mut split = vec![0u32; m + 1];
        // (first end, last end, first split, last split)
        let mut work = vec![(row + 1, m, row, m - 1)];
        while let Some((low, high, from, to)) = work.pop() {
            if low > high {
                continue;
            }
            let mid = low.midpoint(high);
            let mut best = (f64::INFINITY, from);
            for s in from..=to.min(mid - 1) {
                let cost = previous[s] + h.cost(edges[s], edges[mid]);
                if cost < best.0 {
                    best = (cost, s);
                }
            }
            current[mid] = best.0;
            split[mid] = best.1 as u32;
            work.push((low, mid - 1, from, best.1));
            work.push((mid + 1, high, best.1, to));
        }
        current[row] = 0.0;
        split[row] = row as u32 - 1;
        std::mem::swap(&mut previous, &mut current);
        splits.push(split);
    }
    let mut bounds = vec![edges[m]];
    let mut end = m;
    for split in splits.iter().rev() {
        // A row without a better split than nothing leaves an empty interval; `end` is at least the row then.
        end = (split[end] as usize).min(end);
        bounds.push(edges[end]);
    }
    bounds.push(edges[0]);
    bounds.reverse();
    bounds
}

/// Lloyd's iteration: bounds move to where the nearest centroid changes, until the error no longer falls.
fn refine(h: &Histogram, bounds: &mut [usize]) {
    let mut best = h.total(bounds);
    let mut next = bounds.to_vec();
    for _ in 0..200 {
        for i in 1..bounds.len() - 1 {
            let (a, b) = (h.mean(bounds[i - 1], bounds[i]), h.mean(bounds[i], bounds[i + 1]));
            let middle = (a + b) / 2.0;
            // Every cluster keeps at least one value.
            let (low, high) = (next[i - 1] + 1, bounds[bounds.len() - 1] - (bounds.len() - 1 - i));
            next[i] = h.values.partition_point(|&v| v <= middle).clamp(low, high);
        }
        let cost = h.total(&next);
        if cost >= best * (1.0 - 1e-12) {
            break;
        }
        best = cost;
        bounds.copy_from_slice(&next);
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use proptest::prelude::*;

    fn histogram(weights: &[f32]) -> Histogram {
        let mut h = Histogram::default();
        h.fill(&weights.iter().map(|&w| f16::from_f32(w)).collect::<Vec<_>>());
        h
    }

    /// Squared error of assigning every value to its nearest centroid.
    fn error(h: &Histogram, centroids: &[f64]) -> f64 {
        let nearest = |v: f64| centroids.iter().map(|c| (c - v) * (c - v)).fold(f64::INFINITY, f64::min);
        h.values.iter().zip(&h.counts).map(|(&v, &n)| f64::from(n) * nearest(v)).sum()
    }

    /// The optimum by the plain recurrence over every split: O(k n^2), from the definition alone.
    fn optimum(h: &Histogram, k: usize) -> f64 {
        let n = h.values.len();
        let interval = |a: usize, b: usize| {
            let w: f64 = h.counts[a..b].iter().map(|&c| f64::from(c)).sum();
            let mean =
                h.values[a..b].iter().zip(&h.counts[a..b]).map(|(v, &c)| v * f64::from(c)).sum::<f64>() / w;
            h.values[a..b]
                .iter()
                .zip(&h.counts[a..b])
                .map(|(v, &c)| f64::from(c) * (v - mean) * (v - mean))
                .sum::<f64>()
        };
        let mut best: Vec<f64> = (0..=n).map(|j| if j == 0 { 0.0 } else { interval(0, j) }).collect();
        for _ in 1..k {
            best =
                (0..=n).map(|j| (0..j).map(|s| best[s] + interval(s, j)).fold(best[j], f64::min)).collect();
        }
        best[n]
    }

    /// Gaussian with outliers, as trained weights have them.
    fn weights(seed: u64, n: usize, kind: usize) -> Vec<f32> {
        let mut s = seed | 1;
        let mut uniform = move || {
            s = s.wrapping_mul(6364136223846793005).wrapping_add(1442695040888963407);
            ((s >> 33) as f64 / (1u64 << 31) as f64).max(1e-9)
        };
        (0..n)
            .map(|_| {
                let gauss = (-2.0 * uniform().ln()).sqrt() * (std::f64::consts::TAU * uniform()).cos();
                (match kind {
                    0 => 0.02 * gauss,
                    1 => 0.02 * gauss * if uniform() < 0.001 { 10.0 } else { 1.0 },
                    // Heavy tails.
                    2 => 0.01 * gauss / uniform().sqrt(),
                    // Few distinct values.
                    3 => (gauss * 3.0).round() * 0.01,
                    // Denormals of fp16.
                    4 => gauss * 1e-6,
                    // Two far clusters.
                    _ => 0.001 * gauss + if uniform() < 0.5 { 1.0 } else { -1.0 },
                }) as f32
            })
            .collect()
    }

    proptest! {
        #[test]
        fn exact_is_the_optimum_of_small_inputs(v in prop::collection::vec(-4.0f32..4.0, 1..60), k in 1usize..9) {
            let h = histogram(&v);
            let (found, best) = (error(&h, &kmeans_exact(&h, k)), optimum(&h, k));
            prop_assert!((found - best).abs() <= 1e-9 * best + 1e-12, "{found} for {best}");
        }
    }

    #[test]
    fn exact_is_the_optimum_of_larger_inputs() {
        for kind in 0..6 {
            let h = histogram(&weights(kind as u64 + 1, 700, kind));
            for k in [2, 4, 16] {
                let (found, best) = (error(&h, &kmeans_exact(&h, k)), optimum(&h, k));
                assert!(
                    (found - best).abs() <= 1e-7 * best + 1e-15,
                    "kind {kind}, k {k}: {found} for {best}"
                );
            }
        }
    }

    #[test]
    fn the_default_is_within_a_ten_thousandth_of_the_optimum() {
        for kind in 0..6 {
            let h = histogram(&weights(kind as u64 + 11, 22_528, kind));
            for k in [2, 4, 8, 16, 64, 256] {
                let (found, best) = (error(&h, &kmeans(&h, k)), error(&h, &kmeans_exact(&h, k)));
                assert!(
                    found <= best * (1.0 + 1e-4) + 1e-12,
                    "kind {kind}, k {k}: {} of the optimum",
                    found / best
                );
            }
        }
    }

    #[test]
    fn few_values_are_their_own_centroids() {
        assert_eq!(kmeans(&histogram(&[0.5; 100]), 16), [0.5]);
        assert_eq!(kmeans(&histogram(&[1.0, -1.0, 1.0, 0.0]), 4), [-1.0, 0.0, 1.0]);
        assert!(kmeans(&histogram(&[]), 4).is_empty());
    }

    #[test]
    fn a_histogram_can_be_filled_again() {
        let mut h = Histogram::default();
        h.fill(&[f16::from_f32(1.0), f16::from_f32(-2.0), f16::from_f32(1.0)]);
        assert_eq!((h.values.as_slice(), h.counts.as_slice()), ([-2.0, 1.0].as_slice(), [1, 2].as_slice()));
        h.fill(&[f16::from_f32(3.0)]);
        assert_eq!((h.values.as_slice(), h.counts.as_slice()), ([3.0].as_slice(), [1].as_slice()));
    }
}
