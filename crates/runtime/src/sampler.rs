//! Chooses the next token from logits.

use anemoe_io::Random;

/// Settings for choosing the next token.
#[derive(Clone, Debug, PartialEq)]
pub struct Sampling {
    /// Divisor of the logits; 0 takes the most probable token.
    pub temperature: f32,
    /// Number of most probable tokens that are sampled from; 0 for all.
    pub top_k: usize,
    /// Probability that the sampled tokens reach together, most probable first; 1 for all.
    pub top_p: f32,
    /// Start of the random sequence; the same seed gives the same tokens.
    pub seed: u64,
}

impl Sampling {
    /// Settings that always take the most probable token.
    pub const GREEDY: Sampling = Sampling { temperature: 0.0, top_k: 0, top_p: 1.0, seed: 0 };

    /// Checks that the settings are in range; the error says which is not.
    pub fn check(&self) -> Result<(), String> {
        if !self.temperature.is_finite() || self.temperature < 0.0 {
            return Err(format!("temperature {} is not a number of at least 0", self.temperature));
        }
        if !(self.top_p > 0.0 && self.top_p <= 1.0) {
            return Err(format!("top-p {} is not above 0 and at most 1", self.top_p));
        }
        Ok(())
    }
}

/// Returns the most probable token; the lowest id of equally probable ones.
pub fn argmax(logits: &[f32]) -> usize {
    let mut best = 0;
    for (i, &v) in logits.iter().enumerate() {
        if v > logits[best] {
            best = i;
        }
    }
    best
}

/// Draws tokens by [`Sampling`] like Hugging Face transformers: temperature, then top-k, then top-p.
pub struct Sampler {
    sampling: Sampling,
    random: Random,
    order: Vec<(f32, u32)>,
}

impl Sampler {
    /// Makes a sampler at the start of its random sequence.
    pub fn new(sampling: Sampling) -> Self {
        let random = Random::new(sampling.seed);
        Sampler { sampling, random, order: Vec::new() }
    }

    /// Draws the next token for these logits.
    pub fn next(&mut self, logits: &[f32]) -> usize {
        if self.sampling.temperature == 0.0 || logits.len() < 2 {
            return argmax(logits);
        }
        self.order.clear();
        // Logits are taken relative to the largest, so that a tiny temperature makes only negligible ones infinite.
        let largest = logits[argmax(logits)];
        let scaled = |v: f32| if v == largest { 0.0 } else { (v - largest) / self.sampling.temperature };
        self.order.extend(logits.iter().enumerate().map(|(i, &v)| (scaled(v), i as u32)));
        // Ties are broken by id, so that the order does not depend on the sort.
        let descending = |a: &(f32, u32), b: &(f32, u32)| b.0.total_cmp(&a.0).then(a.1.cmp(&b.1));
        let k = match self.sampling.top_k {
            0 => self.order.len(),
            k => k.min(self.order.len()),
        };
        if k < self.order.len() {
            self.order.select_nth_unstable_by(k, descending);
            self.order.truncate(k);
        }
        self.order.sort_unstable_by(descending);
        let max = self.order[0].0;
        let weight = |v: f32| f64::from(v - max).exp();
        let total: f64 = self.order.iter().map(|&(v, _)| weight(v)).sum();
        let mut kept = 0.0;
        let mut n = 0;
        for &(v, _) in &self.order {
            kept += weight(v);
            n += 1;
            if kept >= f64::from(self.sampling.top_p) * total {
                break;
            }
        }
        let mut left = self.random.uniform() * kept;
        for &(v, id) in &self.order[..n] {
            left -= weight(v);
            if left < 0.0 {
                return id as usize;
            }
        }
        self.order[n - 1].1 as usize
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_smallest_temperatures_take_the_most_probable_token() {
        let logits = [1.0, 3.5, -2.0, 3.25];
        for temperature in [f32::from_bits(1), 1e-40, 1e-38, 1e-5] {
            let mut sampler = Sampler::new(Sampling { temperature, top_k: 0, top_p: 1.0, seed: 3 });
            assert!((0..50).all(|_| sampler.next(&logits) == 1), "{temperature}");
        }
    }

    fn sampling(temperature: f32, top_k: usize, top_p: f32) -> Sampling {
        Sampling { temperature, top_k, top_p, seed: 7 }
    }

    #[test]
    fn greedy_takes_the_lowest_of_equals() {
        assert_eq!(Sampler::new(Sampling::GREEDY).next(&[0.0, 3.0, 3.0, -1.0]), 1);
    }

    #[test]
    fn frequencies_follow_the_softmax() {
        let logits = [1.0f32, 2.0, 0.0, -30.0];
        let mut sampler = Sampler::new(sampling(2.0, 0, 1.0));
        let mut counts = [0usize; 4];
        for _ in 0..40_000 {
            counts[sampler.next(&logits)] += 1;
        }
        let total: f64 = logits.iter().map(|v| f64::from(v / 2.0).exp()).sum();
        for (count, v) in counts.iter().zip(logits) {
            let expected = f64::from(v / 2.0).exp() / total;
            assert!((*count as f64 / 40_000.0 - expected).abs() < 0.01, "{counts:?}");
        }
    }

    #[test]
    fn top_k_and_top_p_cut_the_tail() {
        let logits = [0.0f32, 4.0, 3.9, 1.0, 3.8];
        let mut k = Sampler::new(sampling(1.0, 2, 1.0));
        let mut p = Sampler::new(sampling(1.0, 0, 0.9));
        for _ in 0..2000 {
            assert!([1, 2].contains(&k.next(&logits)));
            assert!([1, 2, 4].contains(&p.next(&logits)));
        }
        // The most probable token alone reaches a small top-p.
        let mut tight = Sampler::new(sampling(1.0, 0, 1e-6));
        assert!((0..100).all(|_| tight.next(&logits) == 1));
    }

    #[test]
    fn the_same_seed_gives_the_same_tokens() {
        let logits: Vec<f32> = (0..50).map(|i| (i as f32 * 0.7).sin()).collect();
        let draw = |seed| {
            let mut s = Sampler::new(Sampling { temperature: 1.0, top_k: 0, top_p: 1.0, seed });
            (0..20).map(|_| s.next(&logits)).collect::<Vec<_>>()
        };
        assert_eq!(draw(1), draw(1));
        assert_ne!(draw(1), draw(2));
    }

    #[test]
    fn out_of_range_settings_are_refused() {
        assert!(sampling(-1.0, 0, 1.0).check().is_err());
        assert!(sampling(f32::NAN, 0, 1.0).check().is_err());
        assert!(sampling(1.0, 0, 0.0).check().is_err());
        assert!(sampling(1.0, 0, 1.5).check().is_err());
        assert!(sampling(0.7, 40, 0.95).check().is_ok());
    }
}
