//! Tables of vectors: k-means over points of a few dimensions.
//!
//! ```text
//! start      k-means++ on a part of the points, several times; the best after a few rounds goes on with all points
//! round      each point to the nearest entry, each entry to the mean of its points
//! ```
//! An entry without points moves to the point that is farthest from its own. Results do not depend on the number of threads.

use anemoe_io::Random;
use half::f16;
use rayon::prelude::*;

/// Starts of which the best is taken.
const STARTS: u64 = 4;
/// Points for each entry, of those that starts are tried on.
const POINTS_PER_ENTRY: usize = 128;
/// Rounds of a start.
const START_ROUNDS: usize = 12;
/// Most rounds with all points; most tables stop changing earlier.
const ROUNDS: usize = 60;
/// Share of the error below which a round's gain ends the rounds.
const LEAST_GAIN: f64 = 1e-4;
/// Points that a thread works on at a time.
const CHUNK: usize = 1 << 13;

/// A table of vectors, and the entry of each point.
#[derive(Clone, Debug, PartialEq)]
pub struct VectorTable {
    /// `[entries, dim]`
    pub entries: Vec<f16>,
    /// `[points]`
    pub codes: Vec<u8>,
}

/// Points of `dim` numbers, each with a mass.
#[derive(Clone, Copy)]
struct Points<'a> {
    values: &'a [f32],
    dim: usize,
    masses: Option<&'a [f32]>,
}

impl Points<'_> {
    fn len(&self) -> usize {
        self.values.len() / self.dim
    }

    fn at(&self, i: usize) -> &[f32] {
        &self.values[i * self.dim..][..self.dim]
    }

    fn mass(&self, i: usize) -> f64 {
        self.masses.map_or(1.0, |m| f64::from(m[i]))
    }
}

fn distance(a: &[f32], b: &[f32]) -> f32 {
    a.iter().zip(b).map(|(a, b)| (a - b) * (a - b)).sum()
}

/// Fits a table of `2^bits` vectors to points `[n, dim]`, of `masses [n]` where these are given.
///
/// # Panics
/// There is no point, or lengths do not fit.
pub fn fit_vectors(values: &[f32], dim: usize, bits: u8, masses: Option<&[f32]>) -> VectorTable {
    let points = Points { values, dim, masses };
    let n = points.len();
    assert!(dim > 0 && n > 0 && n * dim == values.len() && masses.is_none_or(|m| m.len() == n));
    let count = 1usize << bits;
    let most = count * POINTS_PER_ENTRY;
    let (part, part_masses): (Vec<f32>, Option<Vec<f32>>) = if n <= most {
        (values.to_vec(), masses.map(<[f32]>::to_vec))
    } else {
        let chosen = || (0..most).map(|i| i * n / most);
        (
            chosen().flat_map(|i| points.at(i)).copied().collect(),
            masses.map(|m| chosen().map(|i| m[i]).collect()),
        )
    };
    let part = Points { values: &part, dim, masses: part_masses.as_deref() };
    let start = |seed: u64| {
        let mut table = plus_plus(part, count, &mut Random::new(seed));
        let error = rounds(part, &mut table, START_ROUNDS);
        (error, table)
    };
    let starts: Vec<(f64, Vec<f32>)> = (0..STARTS).into_par_iter().map(start).collect();
    let best = starts.into_iter().reduce(|a, b| if b.0 < a.0 { b } else { a });
    let mut table = best.map(|(_, table)| table).unwrap_or_default();
    if part.len() < n {
        rounds(points, &mut table, ROUNDS);
    }
    let entries: Vec<f16> = table.iter().map(|v| f16::from_f32(*v)).collect();
    let rounded: Vec<f32> = entries.iter().map(|v| v.to_f32()).collect();
    let codes = assign(points, &rounded).into_iter().flat_map(|part| part.codes).collect();
    VectorTable { entries, codes }
}

/// Chooses entries by k-means++: each is a point, by chance as often as it is far from those before, the best of a few.
fn plus_plus(points: Points<'_>, count: usize, random: &mut Random) -> Vec<f32> {
    let (n, dim) = (points.len(), points.dim);
    let tries = 2 + (count as f64).ln() as usize;
    let mut table = points.at(((random.uniform() * n as f64) as usize).min(n - 1)).to_vec();
    let mut nearest: Vec<f64> =
        (0..n).map(|i| points.mass(i) * f64::from(distance(points.at(i), &table))).collect();
    while table.len() < count * dim {
        let sum: f64 = nearest.iter().sum();
        let mut best: Option<(f64, Vec<f64>, usize)> = None;
        for _ in 0..tries {
            let mut rest = random.uniform() * sum;
            let found = nearest.iter().position(|d| {
                rest -= d;
                rest < 0.0
            });
            let chosen = found.unwrap_or(n - 1);
            let with: Vec<f64> = (0..n)
                .map(|i| {
                    nearest[i].min(points.mass(i) * f64::from(distance(points.at(i), points.at(chosen))))
                })
                .collect();
            let error = with.iter().sum();
            if best.as_ref().is_none_or(|b| error < b.0) {
                best = Some((error, with, chosen));
            }
        }
        let Some((_, with, chosen)) = best else { break };
        table.extend_from_slice(points.at(chosen));
        nearest = with;
    }
    table
}

/// The points of a chunk by entry.
struct Assigned {
    codes: Vec<u8>,
    /// Sum of the points of each entry, `[entries, dim]`, and of their masses.
    sums: Vec<f64>,
    masses: Vec<f64>,
    error: f64,
    /// The point that is farthest from its entry, with the distance.
    farthest: (f32, usize),
}

/// Finds the nearest entry of each point.
fn assign(points: Points<'_>, table: &[f32]) -> Vec<Assigned> {
    let (n, dim) = (points.len(), points.dim);
    let count = table.len() / dim;
    // One number of all entries together, so that vector instructions compare a point with several entries.
    let by_number: Vec<f32> = (0..dim).flat_map(|d| (0..count).map(move |e| table[e * dim + d])).collect();
    let chunk = |first: usize| {
        let last = (first + CHUNK).min(n);
        let mut a = Assigned {
            codes: Vec::with_capacity(last - first),
            sums: vec![0.0; table.len()],
            masses: vec![0.0; count],
            error: 0.0,
            farthest: (-1.0, first),
        };
        let mut distances = vec![0f32; count];
        for i in first..last {
            let point = points.at(i);
            distances.fill(0.0);
            for (v, numbers) in point.iter().zip(by_number.chunks_exact(count)) {
                distances.iter_mut().zip(numbers).for_each(|(d, e)| *d += (v - e) * (v - e));
            }
            let least = distances.iter().copied().fold(f32::INFINITY, f32::min);
            let code = distances.iter().position(|d| *d <= least).unwrap_or(0);
            let mass = points.mass(i);
            a.codes.push(code as u8);
            a.sums[code * dim..][..dim].iter_mut().zip(point).for_each(|(s, v)| *s += mass * f64::from(*v));
            a.masses[code] += mass;
            a.error += mass * f64::from(least);
            if least > a.farthest.0 {
                a.farthest = (least, i);
            }
        }
        a
    };
    let starts: Vec<usize> = (0..n).step_by(CHUNK).collect();
    starts.into_par_iter().map(chunk).collect()
}

/// Runs rounds until the error falls no more, and returns it.
fn rounds(points: Points<'_>, table: &mut [f32], most: usize) -> f64 {
    let dim = points.dim;
    let mut last = f64::INFINITY;
    for _ in 0..most {
        let parts = assign(points, table);
        let error: f64 = parts.iter().map(|p| p.error).sum();
        let mut farthest: Vec<(f32, usize)> = parts.iter().map(|p| p.farthest).collect();
        farthest.sort_by(|a, b| b.0.total_cmp(&a.0));
        let mut farthest = farthest.into_iter().filter(|(d, _)| *d > 0.0);
        let mut was_empty = false;
        for (e, entry) in table.chunks_exact_mut(dim).enumerate() {
            let mass: f64 = parts.iter().map(|p| p.masses[e]).sum();
            if mass > 0.0 {
                for (d, v) in entry.iter_mut().enumerate() {
                    *v = (parts.iter().map(|p| p.sums[e * dim + d]).sum::<f64>() / mass) as f32;
                }
            } else if let Some((_, point)) = farthest.next() {
                entry.copy_from_slice(points.at(point));
                was_empty = true;
            }
        }
        if !was_empty && error >= last * (1.0 - LEAST_GAIN) {
            return error;
        }
        last = error;
    }
    last
}

#[cfg(test)]
mod tests {
    use super::super::testing::weights;
    use super::*;

    fn error(values: &[f32], dim: usize, t: &VectorTable) -> f64 {
        let decoded = t.codes.iter().flat_map(|&c| &t.entries[usize::from(c) * dim..][..dim]);
        values.iter().zip(decoded).map(|(v, d)| f64::from(v - d.to_f32()).powi(2)).sum()
    }

    #[test]
    fn points_that_fit_the_table_are_kept() {
        let points = [1.0f32, 2.0, -1.0, 0.5, 3.0, 3.0, 1.0, 2.0, 0.0, -4.0, -1.0, 0.5];
        let t = fit_vectors(&points, 2, 2, None);
        assert_eq!(error(&points, 2, &t), 0.0);
        assert_eq!((t.codes[0], t.codes[1]), (t.codes[3], t.codes[5]));
    }

    #[test]
    fn vectors_cost_less_than_numbers_of_the_same_size() {
        // Pairs that are nearly equal: a table of pairs needs half the bits.
        let noise = weights(3, 8192, 0);
        let points: Vec<f32> =
            (0..4096).flat_map(|i| [noise[i], noise[i] + 0.05 * noise[4096 + i]]).collect();
        let pairs = error(&points, 2, &fit_vectors(&points, 2, 4, None));
        let numbers = error(&points, 1, &fit_vectors(&points, 1, 2, None));
        assert!(pairs < 0.2 * numbers, "{pairs} for {numbers}");
    }

    #[test]
    fn heavy_points_are_nearer_to_their_entries() {
        let points = weights(5, 2 * 3000, 0);
        let masses: Vec<f32> = (0..3000).map(|i| if i % 10 == 0 { 100.0 } else { 1.0 }).collect();
        let heavy = |t: &VectorTable| -> f64 {
            let at = |i: usize| (&points[2 * i..2 * i + 2], &t.entries[usize::from(t.codes[i]) * 2..][..2]);
            (0..3000)
                .step_by(10)
                .map(|i| {
                    at(i).0.iter().zip(at(i).1).map(|(v, e)| f64::from(v - e.to_f32()).powi(2)).sum::<f64>()
                })
                .sum()
        };
        let (with, without) = (fit_vectors(&points, 2, 4, Some(&masses)), fit_vectors(&points, 2, 4, None));
        assert!(heavy(&with) < 0.95 * heavy(&without));
    }

    #[test]
    fn threads_do_not_change_the_table() {
        let points = weights(7, 3 * 30_000, 0);
        let one = rayon::ThreadPoolBuilder::new().num_threads(1).build().unwrap();
        let fit = || fit_vectors(&points, 3, 6, None);
        assert_eq!(fit(), one.install(fit));
    }

    #[test]
    fn one_point_fills_a_table() {
        let t = fit_vectors(&[0.25, 0.5], 2, 8, None);
        assert_eq!((t.entries.len(), t.codes.len()), (512, 1));
        assert_eq!(error(&[0.25, 0.5], 2, &t), 0.0);
    }
}
