//! Choice of the weights that become zero.

/// A rule for the weights that become zero.
#[derive(Clone, Copy, Debug, PartialEq)]
pub enum Pruning {
    /// Weights up to a magnitude.
    Threshold {
        /// Largest magnitude that becomes zero.
        threshold: f32,
        /// Least share of zeros; a weight with fewer stays.
        least: f64,
    },
    /// A share of the weights: those of least magnitude.
    Share(f64),
    /// A share of the weights: blocks of least magnitude.
    Blocks {
        /// Share of the weights.
        share: f64,
        /// Weights of a block, neighbours on `axis`.
        size: usize,
        /// Axis of the weight.
        axis: usize,
    },
    /// `n` of `m` neighbours: those of least magnitude.
    Neighbours {
        /// Zeros.
        n: usize,
        /// Neighbours on `axis`.
        m: usize,
        /// Axis of the weight.
        axis: usize,
    },
}

impl Pruning {
    /// Returns the weights that stay, in order; `None` where the rule does not apply to the weight: it has too few zeros, or not two
    /// blocks.
    pub fn kept(&self, values: &[f32], shape: &[usize]) -> Option<Vec<bool>> {
        let above = |magnitudes: &[f32], share: f64| {
            let threshold = percentile(magnitudes, share);
            magnitudes.iter().map(|m| *m > threshold).collect::<Vec<bool>>()
        };
        let magnitudes: Vec<f32> = values.iter().map(|v| v.abs()).collect();
        let mut kept = match *self {
            Pruning::Threshold { threshold, .. } => magnitudes.iter().map(|m| *m > threshold).collect(),
            Pruning::Share(share) => above(&magnitudes, share),
            Pruning::Blocks { share, size, axis } => {
                let lines = Lines::new(shape, axis, size)?;
                let mut norms = vec![0f32; values.len()];
                lines.each(&mut |places| {
                    let norm = places.clone().map(|i| values[i] * values[i]).sum::<f32>().sqrt();
                    places.for_each(|i| norms[i] = norm);
                });
                above(&norms, share)
            }
            Pruning::Neighbours { n, m, axis } => {
                let lines = Lines::new(shape, axis, m)?;
                let mut kept = vec![true; values.len()];
                let mut order = Vec::new();
                lines.each(&mut |places| {
                    order.clear();
                    order.extend(places);
                    // The last neighbours of a line may be fewer: those that are missing count as zeros.
                    let missing = m - order.len();
                    order.sort_by(|a: &usize, b| magnitudes[*a].total_cmp(&magnitudes[*b]));
                    order.iter().take(n.saturating_sub(missing)).for_each(|i| kept[*i] = false);
                });
                kept
            }
        };
        kept.iter_mut().zip(values).for_each(|(k, v)| *k &= *v != 0.0);
        let zeros = kept.iter().filter(|k| !**k).count() as f64;
        match self {
            Pruning::Threshold { least, .. } if zeros < least * values.len() as f64 => None,
            _ => Some(kept),
        }
    }
}

/// Returns the value below which a share of the values lies, between two of them as numpy's `percentile`.
fn percentile(values: &[f32], share: f64) -> f32 {
    let mut sorted = values.to_vec();
    let at = share * sorted.len().saturating_sub(1) as f64;
    let low = at as usize;
    if low >= sorted.len() {
        return f32::NEG_INFINITY;
    }
    let a = *sorted.select_nth_unstable_by(low, f32::total_cmp).1;
    let b = sorted[low + 1..].iter().copied().fold(f32::INFINITY, f32::min);
    if b.is_finite() { a + (f64::from(b - a) * (at - low as f64)) as f32 } else { a }
}

/// Neighbours on an axis, `size` of them at a time.
struct Lines {
    outer: usize,
    length: usize,
    inner: usize,
    size: usize,
}

impl Lines {
    /// Makes neighbours of a shape; `None` without room for two groups.
    fn new(shape: &[usize], axis: usize, size: usize) -> Option<Lines> {
        let length = *shape.get(axis)?;
        let (outer, inner) = (shape[..axis].iter().product(), shape[axis + 1..].iter().product());
        (size > 0 && 2 * size <= length).then_some(Lines { outer, length, inner, size })
    }

    /// Gives the places of each group to `visit`.
    fn each(&self, visit: &mut dyn FnMut(std::iter::StepBy<std::ops::Range<usize>>)) {
        for outer in 0..self.outer {
            for first in (0..self.length).step_by(self.size) {
                let last = (first + self.size).min(self.length);
                for inner in 0..self.inner {
                    let at = |i: usize| (outer * self.length + i) * self.inner + inner;
                    visit((at(first)..at(last - 1) + 1).step_by(self.inner));
                }
            }
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn zeros(pruning: Pruning, values: &[f32], shape: &[usize]) -> Vec<usize> {
        let kept = pruning.kept(values, shape).unwrap();
        (0..values.len()).filter(|i| !kept[*i]).collect()
    }

    #[test]
    fn shares_are_percentiles() {
        let values = [4.0, -1.0, 3.0, -2.0, 5.0];
        assert_eq!(zeros(Pruning::Share(0.5), &values, &[5, 1]), [1, 2, 3]);
        assert_eq!(zeros(Pruning::Share(0.45), &values, &[5, 1]), [1, 3]);
        assert_eq!(percentile(&values.map(f32::abs), 0.6), 3.4);
        let few = Pruning::Threshold { threshold: 1.0, least: 0.5 };
        assert_eq!(few.kept(&values, &[5, 1]), None);
    }

    #[test]
    fn blocks_go_together() {
        // Columns of two rows: norms 5, 1 and 2; below, 1, 3 and 2.
        let values = [3.0, 1.0, 0.0, 4.0, 0.0, 2.0, 1.0, 0.0, 0.0, 0.0, 3.0, 2.0];
        let blocks = Pruning::Blocks { share: 0.4, size: 2, axis: 0 };
        assert_eq!(zeros(blocks, &values, &[4, 3]), [1, 2, 4, 5, 6, 7, 8, 9, 11]);
        assert_eq!(Pruning::Blocks { share: 0.4, size: 3, axis: 0 }.kept(&values, &[4, 3]), None);
    }

    #[test]
    fn n_of_m_neighbours_go() {
        let values = [1.0, -2.0, 3.0, -4.0, 8.0, 7.0, 6.0, 5.0, 9.0];
        // One of two on a line of nine: the last has a zero beside it.
        let one = Pruning::Neighbours { n: 1, m: 2, axis: 1 };
        assert_eq!(zeros(one, &values, &[1, 9]), [0, 2, 5, 7]);
        let three = Pruning::Neighbours { n: 3, m: 4, axis: 0 };
        assert_eq!(zeros(three, &values[..8], &[8, 1]), [0, 1, 2, 5, 6, 7]);
    }
}
