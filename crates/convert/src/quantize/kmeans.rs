//! One-dimensional k-means over a [`Histogram`].
//!
//! `exact` finds the global optimum. The least cost of k clusters is a convex function of k, so the optimum for k clusters
//! is also the optimum of "cost + penalty * number of clusters" for some penalty. For a given penalty one pass over the
//! values is enough (the best last split moves only upwards: a queue of candidates and galloping search), and the right
//! penalty is found in a few passes. Grønlund and others, "Fast exact k-means, k-medians and Bregman divergence clustering
//! in 1D" (2017), describe the method; joining two paths where no penalty gives k clusters is by Aggarwal, Schieber and
//! Tokuyama, "Finding a minimum-weight k-link path in graphs with the concave Monge property" (1994).

use super::histogram::Histogram;

/// Returns the centroids of the global optimum for `k` clusters, ascending; fewer when there are fewer distinct
/// values.
pub fn kmeans_exact(h: &Histogram, k: usize) -> Vec<f64> {
    let n = h.values().len();
    if n <= k {
        return h.values().iter().map(|&v| f64::from(v)).collect();
    }
    let (edges, penalty) = coarse_edges(h, 512.max(8 * k));
    let penalty = match PrefixSums::at(h, &edges).bounds(k, penalty) {
        Some((_, penalty)) => penalty,
        None => penalty,
    };
    let all = PrefixSums::all(h);
    let bounds = match all.bounds(k, penalty) {
        Some((bounds, _)) => bounds,
        None => all.partition(k),
    };
    means(h, &bounds)
}

/// Fewest clusters for which the exact optimum takes no longer than an approximation.
const ALWAYS_EXACT: usize = 33;
/// Bins in which the approximation looks for its start.
const COARSE_BINS: usize = 256;

/// Returns centroids close to the global optimum: the optimum over a few hundred bins, then over ever finer places
/// for each bound.
pub fn kmeans(h: &Histogram, k: usize) -> Vec<f64> {
    let n = h.values().len();
    if n <= k || !(2..ALWAYS_EXACT).contains(&k) {
        return kmeans_exact(h, k);
    }
    let (edges, _) = coarse_edges(h, COARSE_BINS);
    let coarse = PrefixSums::at(h, &edges).partition(k);
    let bounds = settle(&PrefixSums::all(h), &edges, &coarse);
    means(h, &bounds)
}

fn mean(h: &Histogram, a: usize, b: usize) -> f64 {
    let m = h.moments()[b].minus(h.moments()[a]);
    // A cluster without mass has its middle value as mean.
    if m.weight > 0.0 { m.sum / m.weight } else { f64::from(h.values()[a.midpoint(b - 1)]) }
}

fn means(h: &Histogram, bounds: &[usize]) -> Vec<f64> {
    let mut means: Vec<f64> =
        bounds.windows(2).filter(|w| w[0] < w[1]).map(|w| mean(h, w[0], w[1])).collect();
    // Rounding may disturb the order of means of values that are next to each other.
    means.sort_by(f64::total_cmp);
    means
}

/// Slices of the range in which the density is measured.
const SLICES: usize = 1024;

/// Chooses bin edges, as indices of values, and a penalty to start with. Edges lie where the density to the power 1/3
/// accumulates evenly (the density of an optimal quantizer's levels), and evenly over the range, so that neither the
/// bulk nor the tails are cut too coarsely. At the penalty about an eighth as many clusters as bins are the best.
fn coarse_edges(h: &Histogram, bins: usize) -> (Vec<usize>, f64) {
    let values = h.values();
    let n = values.len();
    let low = f64::from(values[0]);
    let width = (f64::from(values[n - 1]) - low) / SLICES as f64;
    let mut starts = [0usize; SLICES + 1];
    let mut slice = 0;
    for s in 1..SLICES {
        let bound = low + width * s as f64;
        // Most slices of a long tail are empty.
        if slice < n && f64::from(values[slice]) < bound {
            slice += values[slice..].partition_point(|&v| f64::from(v) < bound);
        }
        starts[s] = slice;
    }
    starts[SLICES] = n;
    let mut density = [0f64; SLICES];
    for (d, w) in density.iter_mut().zip(starts.windows(2)) {
        let mass = h.moments()[w[1]].weight - h.moments()[w[0]].weight;
        *d = if mass > 0.0 { mass.cbrt() } else { 0.0 };
    }
    let total: f64 = density.iter().sum();
    // High-resolution theory (Panter and Dite): k levels leave (integral of density^1/3)^3 / (12 k^2); its derivative
    // by k is the penalty.
    let k = (bins / 8).max(2) as f64;
    let penalty = total.powi(3) * width * width / (6.0 * k.powi(3));
    if n <= bins {
        return ((0..=n).collect(), penalty);
    }
    let step = total / (bins * 3 / 4) as f64;
    let mut edges = vec![0usize];
    let mut level = 0.0;
    let mut next = step;
    for (d, w) in density.iter().zip(starts.windows(2)) {
        let (a, b) = (w[0], w[1]);
        let mass = h.moments()[b].weight - h.moments()[a].weight;
        let mut from = a;
        while next <= level + d && from < b {
            let target = h.moments()[a].weight + mass * (next - level) / d;
            from += h.moments()[from + 1..=b].partition_point(|m| m.weight < target);
            from = (from + 1).min(b);
            edges.push(from);
            next += step;
        }
        level += d;
        while next <= level {
            next += step;
        }
    }
    let even = (bins / 4).clamp(1, SLICES);
    edges.extend((0..even).map(|i| starts[i * SLICES / even]));
    edges.push(n);
    edges.sort_unstable();
    edges.dedup();
    (edges, penalty)
}

/// Prefix sums of mass and of mass times value at possible bounds of clusters.
struct PrefixSums(Vec<(f64, f64)>);

impl PrefixSums {
    fn all(h: &Histogram) -> PrefixSums {
        PrefixSums(h.moments().iter().map(|m| (m.weight, m.sum)).collect())
    }

    fn at(h: &Histogram, edges: &[usize]) -> PrefixSums {
        PrefixSums(edges.iter().map(|&i| (h.moments()[i].weight, h.moments()[i].sum)).collect())
    }

    /// Computes the sum of squares that one cluster from `a` to `b` explains: `sum^2 / mass`.
    #[inline(always)]
    fn gain(&self, a: usize, b: usize) -> f64 {
        let (wa, sa) = self.0[a];
        let (wb, sb) = self.0[b];
        let (w, s) = (wb - wa, sb - sa);
        if w > 0.0 { s * s / w } else { 0.0 }
    }

    /// Finds the best bounds of `k` clusters by dynamic programming, row by row. The best split moves only upwards
    /// with the end of the interval, so each row is solved by divide and conquer in O(n log n).
    fn partition(&self, k: usize) -> Vec<usize> {
        let m = self.0.len() - 1;
        if m <= k {
            return (0..=m).collect();
        }
        let mut previous: Vec<f64> = (0..=m).map(|j| self.gain(0, j)).collect();
        let mut current = vec![0.0; m + 1];
        let mut splits: Vec<Vec<u32>> = Vec::with_capacity(k);
        let mut work = Vec::with_capacity(64);
        for row in 1..k {
            let mut split = vec![0u32; m + 1];
            // (first end, last end, first split, last split); the last row is needed at its end alone.
            let first = if row + 1 == k { m } else { row + 1 };
            work.push((first, m, row, m - 1));
            while let Some((low, high, from, to)) = work.pop() {
                if low > high {
                    continue;
                }
                let mid = low.midpoint(high);
                let mut best = (f64::NEG_INFINITY, from);
                for s in from..=to.min(mid - 1) {
                    let gain = previous[s] + self.gain(s, mid);
                    if gain > best.0 {
                        best = (gain, s);
                    }
                }
                current[mid] = best.0;
                split[mid] = best.1 as u32;
                work.push((low, mid - 1, from, best.1));
                work.push((mid + 1, high, best.1, to));
            }
            current[row] = previous[row - 1] + self.gain(row - 1, row);
            split[row] = row as u32 - 1;
            std::mem::swap(&mut previous, &mut current);
            splits.push(split);
        }
        let mut bounds = vec![m];
        let mut end = m;
        for split in splits.iter().rev() {
            end = (split[end] as usize).min(end);
            bounds.push(end);
        }
        bounds.push(0);
        bounds.reverse();
        bounds
    }

    /// Finds the bounds of the clusters that are best when each costs `penalty`.
    fn penalized(&self, penalty: f64, scratch: &mut ClusterBuffers) -> Vec<usize> {
        let n = self.0.len() - 1;
        let ClusterBuffers { best, parent, queue } = scratch;
        best.clear();
        best.resize(n + 1, 0.0);
        parent.clear();
        parent.resize(n + 1, 0);
        queue.clear();
        // (start of the last cluster, first end for which it is the best)
        queue.push((0u32, 1u32));
        let mut head = 0;
        let mut guess = 1;
        for j in 1..=n {
            while head + 1 < queue.len() && queue[head + 1].1 as usize <= j {
                head += 1;
            }
            let i = queue[head].0 as usize;
            best[j] = best[i] + self.gain(i, j) - penalty;
            parent[j] = i as u32;
            if j == n {
                break;
            }
            let better =
                |rival: usize, end: usize| best[j] + self.gain(j, end) > best[rival] + self.gain(rival, end);
            // Drop the candidates that j beats from their first end on.
            while queue.len() > head {
                let (rival, start) = queue[queue.len() - 1];
                if better(rival as usize, (start as usize).max(j + 1)) {
                    queue.pop();
                } else {
                    break;
                }
            }
            let Some(&(rival, start)) = queue.get(head..).and_then(<[_]>::last) else {
                queue.truncate(head);
                queue.push((j as u32, j as u32 + 1));
                continue;
            };
            let rival = rival as usize;
            // Search the first end for which j beats the last candidate; it is near that of the step before.
            let mut worse = (start as usize).max(j + 1);
            let (mut stride, mut probe) = (1, guess.max(worse + 1).min(n));
            let mut found = None;
            if worse < n {
                if better(rival, probe) {
                    found = Some(probe);
                    // Gallop downwards, to an end for which j is not better.
                    while let Some(high) = found {
                        let below = high.saturating_sub(stride).max(worse);
                        if below == worse || !better(rival, below) {
                            worse = below;
                            break;
                        }
                        found = Some(below);
                        stride *= 2;
                    }
                } else {
                    worse = probe;
                    while worse < n {
                        probe = (worse + stride).min(n);
                        if better(rival, probe) {
                            found = Some(probe);
                            break;
                        }
                        worse = probe;
                        stride *= 2;
                    }
                }
            }
            if let Some(mut high) = found {
                while high - worse > 1 {
                    let mid = worse.midpoint(high);
                    if better(rival, mid) {
                        high = mid;
                    } else {
                        worse = mid;
                    }
                }
                guess = high + 1;
                queue.push((j as u32, high as u32));
            }
        }
        let mut bounds = vec![n];
        let mut end = n;
        while end > 0 {
            end = parent[end] as usize;
            bounds.push(end);
        }
        bounds.reverse();
        bounds
    }

    /// Finds the bounds of the best `k` clusters, and a penalty that gives them; starts at the penalty `guess`. None
    /// when rounding hides the difference between numbers of clusters.
    fn bounds(&self, k: usize, guess: f64) -> Option<(Vec<usize>, f64)> {
        let n = self.0.len() - 1;
        if n <= k {
            return Some(((0..=n).collect(), guess));
        }
        let mut scratch = ClusterBuffers::default();
        // Too many clusters at `low`, too few at `high`.
        let mut low: Option<(f64, Vec<usize>)> = None;
        let mut high: Option<(f64, Vec<usize>)> = None;
        let mut penalty = if guess.is_finite() && guess > 0.0 { guess } else { 1.0 };
        for round in 0..200 {
            let bounds = self.penalized(penalty, &mut scratch);
            let count = bounds.len() - 1;
            if count == k {
                return Some((bounds, penalty));
            }
            // The number of clusters is about proportional to the penalty to the power -1/3.
            let mut next = penalty * (count as f64 / k as f64).powi(3);
            if count > k {
                low = Some((penalty, bounds));
            } else {
                high = Some((penalty, bounds));
            }
            match (&low, &high) {
                (Some((a, _)), Some((b, _))) => {
                    if b - a <= 1e-13 * b {
                        break;
                    }
                    let inside = *a * (1.0 + 1e-6)..*b * (1.0 - 1e-6);
                    if round > 12 || !inside.contains(&next) {
                        next = if round > 12 || b / a < 4.0 { a.midpoint(*b) } else { (a * b).sqrt() };
                    }
                }
                (Some(_), None) => next = next.max(penalty * 1.01),
                (None, _) => next = next.min(penalty * 0.99),
            }
            if next <= f64::MIN_POSITIVE || !next.is_finite() {
                break;
            }
            penalty = next;
        }
        let ((penalty, many), (_, few)) = (low?, high?);
        join(&few, &many, k).map(|bounds| (bounds, penalty))
    }
}

#[derive(Default)]
struct ClusterBuffers {
    best: Vec<f64>,
    parent: Vec<u32>,
    queue: Vec<(u32, u32)>,
}

/// Joins two optimal paths for the same penalty, one with fewer and one with more than `k` clusters, to an optimal one with
/// `k`: where a cluster of the shorter path holds the cluster of the longer one that is `k - fewer` further on, the paths
/// can be swapped without a loss.
fn join(few: &[usize], many: &[usize], k: usize) -> Option<Vec<usize>> {
    let shift = k.checked_sub(few.len() - 1)?;
    let at = (0..few.len() - 1).find(|&i| {
        i + shift + 1 < many.len() && few[i] <= many[i + shift] && many[i + shift + 1] <= few[i + 1]
    })?;
    let bounds: Vec<usize> = many[..=at + shift].iter().chain(&few[at + 1..]).copied().collect();
    (bounds.len() == k + 1).then_some(bounds)
}

/// Places that are tried for a bound at a time, around its own.
const PLACES: usize = 9;

/// Moves the bounds of a partition of coarse bins to the best places among the values: every bound has a few places around
/// its own, the best combination of all of them is found by dynamic programming, and the places come closer. Unlike Lloyd's
/// iteration, which moves a bound by what its neighbours ask for, this moves all of them together.
fn settle(all: &PrefixSums, edges: &[usize], coarse: &[usize]) -> Vec<usize> {
    let mut bounds: Vec<usize> = coarse.iter().map(|&i| edges[i]).collect();
    let inner = bounds.len() - 2;
    // Distance that a bound may move: to the neighbouring edges at first.
    let mut reach: Vec<usize> =
        coarse[1..=inner].iter().map(|&i| (edges[i + 1] - edges[i - 1]).div_ceil(2).max(1)).collect();
    let end = bounds[inner + 1];
    let mut places = vec![[0usize; PLACES]; inner];
    let mut from = vec![[0u8; PLACES]; inner];
    for _ in 0..64 {
        for ((places, &at), &reach) in places.iter_mut().zip(&bounds[1..]).zip(&reach) {
            // Steps of a quarter of the reach, of one value at least.
            let step = reach.div_ceil(PLACES / 2).max(1);
            for (p, place) in places.iter_mut().enumerate() {
                *place = (at + p * step).saturating_sub(PLACES / 2 * step).clamp(1, end - 1);
            }
        }
        let mut gains = [0f64; PLACES];
        for (p, gain) in gains.iter_mut().enumerate() {
            *gain = all.gain(0, places[0][p]);
        }
        for i in 1..inner {
            let mut next = [f64::NEG_INFINITY; PLACES];
            for (p, &place) in places[i].iter().enumerate() {
                for (q, &before) in places[i - 1].iter().enumerate() {
                    // Every cluster keeps at least one value.
                    if before < place {
                        let gain = gains[q] + all.gain(before, place);
                        if gain > next[p] {
                            next[p] = gain;
                            from[i][p] = q as u8;
                        }
                    }
                }
            }
            gains = next;
        }
        let mut best = (f64::NEG_INFINITY, 0);
        for (p, &place) in places[inner - 1].iter().enumerate() {
            let gain = gains[p] + all.gain(place, end);
            if gain > best.0 {
                best = (gain, p);
            }
        }
        let mut p = best.1;
        let mut moved = false;
        for i in (0..inner).rev() {
            let place = places[i][p];
            moved |= place != bounds[i + 1];
            bounds[i + 1] = place;
            p = usize::from(from[i][p]);
        }
        if !moved && reach.iter().all(|&r| r <= PLACES / 2) {
            break;
        }
        reach.iter_mut().for_each(|r| *r = (*r / 3).max(1));
    }
    bounds
}

#[cfg(test)]
mod tests {
    use super::super::testing::weights;
    use super::*;
    use half::f16;
    use proptest::prelude::*;

    fn histogram(weights: &[f32]) -> Histogram {
        let mut h = Histogram::default();
        h.fill(&weights.iter().map(|&w| f16::from_f32(w)).collect::<Vec<_>>());
        h
    }

    /// Computes the squared error of assigning every value to its nearest centroid.
    fn error(h: &Histogram, centroids: &[f64]) -> f64 {
        let nearest = |v: f64| centroids.iter().map(|c| (c - v) * (c - v)).fold(f64::INFINITY, f64::min);
        h.values().iter().enumerate().map(|(i, &v)| h.mass(i) * nearest(f64::from(v))).sum()
    }

    /// Computes the optimum by the plain recurrence over every split, from the definition alone: O(k n^2).
    fn optimum(h: &Histogram, k: usize) -> f64 {
        let n = h.values().len();
        let v: Vec<f64> = h.values().iter().map(|&v| f64::from(v)).collect();
        let m: Vec<f64> = (0..n).map(|i| h.mass(i)).collect();
        // interval[a][b - a]: cost of values a..b around their mean, by an update that cannot cancel.
        let interval: Vec<Vec<f64>> = (0..n)
            .map(|a| {
                let (mut w, mut mean, mut cost) = (0.0, 0.0, 0.0);
                let mut row = vec![0.0];
                for b in a..n {
                    w += m[b];
                    if w > 0.0 {
                        let delta = v[b] - mean;
                        mean += delta * m[b] / w;
                        cost += m[b] * delta * (v[b] - mean);
                    }
                    row.push(cost);
                }
                row
            })
            .collect();
        let mut best: Vec<f64> = (0..=n).map(|j| interval[0][j]).collect();
        for _ in 1..k {
            best = (0..=n)
                .map(|j| (0..j).map(|s| best[s] + interval[s][j - s]).fold(best[j], f64::min))
                .collect();
        }
        best[n]
    }

    proptest! {
        #[test]
        fn exact_is_the_optimum_of_small_inputs(v in prop::collection::vec(-4.0f32..4.0, 1..60), k in 1usize..40) {
            let h = histogram(&v);
            let (found, best) = (error(&h, &kmeans_exact(&h, k)), optimum(&h, k));
            prop_assert!((found - best).abs() <= 1e-9 * best + 1e-12, "{found} for {best}");
        }

        /// Checks values on a grid: many numbers of clusters cost the same per cluster, so that no penalty gives just
        /// one of them.
        #[test]
        fn exact_is_the_optimum_on_a_grid(n in 2usize..90, k in 1usize..40, twice in any::<bool>()) {
            let v: Vec<f32> = (0..n).map(|i| i as f32 * 0.25).chain((0..n * usize::from(twice)).map(|i| i as f32 * 0.5)).collect();
            let h = histogram(&v);
            let (found, best) = (error(&h, &kmeans_exact(&h, k)), optimum(&h, k));
            prop_assert!((found - best).abs() <= 1e-9 * best + 1e-12, "{found} for {best}");
        }

        #[test]
        fn importance_is_a_mass(v in prop::collection::vec(-4.0f32..4.0, 8..60), mass in prop::collection::vec(0.0f32..3.0, 4), k in 1usize..9) {
            let half: Vec<f16> = v[..v.len() / 4 * 4].iter().map(|&w| f16::from_f32(w)).collect();
            let mut h = Histogram::default();
            h.fill_weighted(&half, &mass);
            let best = optimum(&h, k);
            for found in [error(&h, &kmeans_exact(&h, k)), error(&h, &kmeans(&h, k))] {
                prop_assert!((found - best).abs() <= 1e-4 * best + 1e-9, "{found} for {best}");
            }
        }
    }

    #[test]
    fn exact_is_the_optimum_of_larger_inputs() {
        for kind in 0..8 {
            let h = histogram(&weights(kind as u64 + 1, 700, kind));
            for k in [2, 3, 4, 8, 16, 64] {
                let (found, best) = (error(&h, &kmeans_exact(&h, k)), optimum(&h, k));
                assert!(
                    (found - best).abs() <= 1e-7 * best + 1e-15,
                    "kind {kind}, k {k}: {found} for {best}"
                );
            }
        }
    }

    #[test]
    fn both_exact_solvers_agree_on_large_inputs() {
        for kind in 0..8 {
            let h = histogram(&weights(kind as u64 + 5, 22_528, kind));
            for k in [2, 16, 256] {
                let rows = PrefixSums::all(&h).partition(k);
                let (found, other) = (error(&h, &kmeans_exact(&h, k)), error(&h, &means(&h, &rows)));
                assert!(
                    (found - other).abs() <= 1e-7 * other + 1e-13,
                    "kind {kind}, k {k}: {found} for {other}"
                );
            }
        }
    }

    #[test]
    fn the_default_is_within_two_ten_thousandths_of_the_optimum() {
        for kind in 0..8 {
            for (seed, n) in [(11, 22_528), (12, 5_632), (13, 360_448)] {
                let h = histogram(&weights(kind as u64 + seed, n, kind));
                for k in [2, 4, 8, 16, 64, 256] {
                    let (found, best) = (error(&h, &kmeans(&h, k)), error(&h, &kmeans_exact(&h, k)));
                    assert!(
                        found <= best * (1.0 + 2e-4) + 1e-12,
                        "kind {kind}, {n} weights, k {k}: {} of the optimum",
                        found / best
                    );
                }
            }
        }
    }

    #[test]
    fn few_values_are_their_own_centroids() {
        assert_eq!(kmeans(&histogram(&[0.5; 100]), 16), [0.5]);
        assert_eq!(kmeans(&histogram(&[1.0, -1.0, 1.0, 0.0]), 4), [-1.0, 0.0, 1.0]);
        assert!(kmeans(&histogram(&[]), 4).is_empty());
    }
}
