//! Chooses the next token from logits.

use anemoe_io::Random;
use std::cmp::Ordering;

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

/// Elements whose exponentials are added in f32 before their sum is added in f64.
const CHUNK: usize = 1024;
/// Fewest candidates that are collected before they are cut to the wanted number.
const CANDIDATES: usize = 1024;

/// Number of classes of weights by their bits.
const KEYS: usize = 1024;

/// Returns the most probable token; the lowest id of equally probable ones.
pub fn argmax(logits: &[f32]) -> usize {
    let largest = anemoe_kernels::largest_element(logits);
    logits.iter().position(|v| *v == largest).unwrap_or(0)
}

/// Returns the `n` most probable tokens with their logits, in descending order, equal ones by id. Tokens with a logit of
/// negative infinity or NaN are left out.
pub fn most_probable(logits: &[f32], n: usize) -> Vec<(u32, f32)> {
    if n == 0 {
        return Vec::new();
    }
    // NaN is left out, so that all logits can be compared.
    let descending =
        |a: &(u32, f32), b: &(u32, f32)| b.1.partial_cmp(&a.1).unwrap_or(Ordering::Equal).then(a.0.cmp(&b.0));
    let most = n.max(CANDIDATES).saturating_mul(2);
    let (mut found, mut least) = (Vec::new(), f32::NEG_INFINITY);
    for (i, &v) in logits.iter().enumerate() {
        // Of equal logits the earlier one is found already.
        if v > least {
            found.push((i as u32, v));
        }
        if found.len() == most {
            found.select_nth_unstable_by(n - 1, descending);
            found.truncate(n);
            least = found[n - 1].1;
        }
    }
    found.sort_unstable_by(descending);
    found.truncate(n);
    found
}

/// Returns `ln sum e^logit`: a logit less this is the natural logarithm of the token's probability.
pub fn log_sum_exp(logits: &[f32]) -> f64 {
    let largest = anemoe_kernels::largest_element(logits);
    let mut chunk = [0f32; CHUNK];
    let sum_of = |values: &[f32]| {
        let chunk = &mut chunk[..values.len()];
        chunk.copy_from_slice(values);
        f64::from(anemoe_kernels::exp_and_sum_from(chunk, largest))
    };
    f64::from(largest) + logits.chunks(CHUNK).map(sum_of).sum::<f64>().ln()
}

/// Draws tokens by [`Sampling`] in the order of Hugging Face transformers: temperature, then top-k, then top-p. Of equal
/// tokens at an edge those with the lower ids stay.
///
/// A token's weight is `e^((logit - largest logit) / temperature)`. Of the tokens that top-k and top-p leave, the one is
/// drawn in which the running sum of weights passes a random share of their sum.
pub struct Sampler {
    sampling: Sampling,
    random: Random,
    weights: Vec<f32>,
    /// Sums of the weights of each [`CHUNK`] tokens.
    sums: Vec<f64>,
}

impl Sampler {
    /// Makes a sampler at the start of its random sequence.
    pub fn new(sampling: Sampling) -> Self {
        let random = Random::new(sampling.seed);
        Sampler { sampling, random, weights: Vec::new(), sums: Vec::new() }
    }

    /// Draws the next token for these logits.
    pub fn next(&mut self, logits: &[f32]) -> usize {
        let best = argmax(logits);
        if self.sampling.temperature == 0.0 || logits.len() < 2 {
            return best;
        }
        match self.sampling.top_k {
            k if (1..logits.len()).contains(&k) => self.draw_of_few(&most_probable(logits, k)),
            _ => self.draw_of_all(logits, logits[best]),
        }
    }

    /// Returns a logit relative to the largest, by the temperature, so that a tiny one makes only negligible tokens
    /// infinite.
    fn scaled(&self, v: f32, largest: f32) -> f32 {
        match v == largest {
            true => 0.0,
            false if v.is_nan() => f32::NEG_INFINITY,
            false => (v - largest) / self.sampling.temperature,
        }
    }

    /// Draws one of some tokens in descending order, with top-p among them.
    fn draw_of_few(&mut self, few: &[(u32, f32)]) -> usize {
        let Some(&(first, largest)) = few.first() else { return 0 };
        let weight = |v: f32| f64::from(self.scaled(v, largest)).exp();
        let weights: Vec<f64> = few.iter().map(|(_, v)| weight(*v)).collect();
        let wanted = f64::from(self.sampling.top_p) * weights.iter().sum::<f64>();
        let mut kept = 0.0;
        let reached = weights.iter().position(|w| {
            kept += w;
            kept >= wanted
        });
        let n = reached.map_or(few.len(), |last| last + 1);
        let mut left = self.random.uniform() * kept;
        let drawn = weights[..n].iter().position(|w| {
            left -= w;
            left < 0.0
        });
        few.get(drawn.unwrap_or(n - 1)).map_or(first, |token| token.0) as usize
    }

    /// Draws one of all tokens, with top-p among them, without sorting them.
    fn draw_of_all(&mut self, logits: &[f32], largest: f32) -> usize {
        let mut weights = std::mem::take(&mut self.weights);
        weights.clear();
        weights.extend(logits.iter().map(|&v| self.scaled(v, largest)));
        self.sums.clear();
        let sums = weights.chunks_mut(CHUNK).map(|c| f64::from(anemoe_kernels::exp_and_sum_from(c, 0.0)));
        self.sums.extend(sums);
        let mut kept: f64 = self.sums.iter().sum();
        if self.sampling.top_p < 1.0 {
            kept = cut_to(&mut weights, f64::from(self.sampling.top_p) * kept);
            self.sums.clear();
            self.sums.extend(weights.chunks(CHUNK).map(|c| c.iter().map(|w| f64::from(*w)).sum::<f64>()));
        }
        let mut left = self.random.uniform() * kept;
        let mut drawn = None;
        for (i, (chunk, sum)) in weights.chunks(CHUNK).zip(&self.sums).enumerate() {
            if left >= *sum {
                left -= sum;
                continue;
            }
            // The sum was added up in f32: its error is spread over the chunk.
            left *= chunk.iter().map(|w| f64::from(*w)).sum::<f64>() / sum;
            for (k, w) in chunk.iter().enumerate().filter(|(_, w)| **w > 0.0) {
                left -= f64::from(*w);
                drawn = Some(i * CHUNK + k);
                if left < 0.0 {
                    break;
                }
            }
            break;
        }
        let last = || weights.iter().rposition(|w| *w > 0.0).unwrap_or(0);
        let id = drawn.unwrap_or_else(last);
        self.weights = weights;
        id
    }
}

/// Sets weights to 0 except the largest ones that reach `wanted` together, equal ones by id. Returns their sum.
fn cut_to(weights: &mut [f32], wanted: f64) -> f64 {
    // Weights lie between 0 and 1, where bits are in the order of values: exponent and three bits of the mantissa.
    let key = |w: f32| (w.to_bits() >> 20) as usize & (KEYS - 1);
    let mut mass = [0f64; KEYS];
    weights.iter().for_each(|&w| mass[key(w)] += f64::from(w));
    let mut kept = 0.0;
    let at = (0..KEYS).rev().find(|&k| {
        let reaches = kept + mass[k] >= wanted;
        if !reaches {
            kept += mass[k];
        }
        reaches
    });
    let at = at.unwrap_or(0);
    let on_edge = weights.iter().enumerate().filter(|(_, w)| key(**w) == at);
    let mut edge: Vec<(f32, usize)> = on_edge.map(|(i, w)| (*w, i)).collect();
    edge.sort_unstable_by(|a, b| b.0.total_cmp(&a.0).then(a.1.cmp(&b.1)));
    let mut stays = 0;
    while stays < edge.len() && (kept < wanted || stays == 0) {
        kept += f64::from(edge[stays].0);
        stays += 1;
    }
    weights.iter_mut().filter(|w| key(**w) < at).for_each(|w| *w = 0.0);
    edge[stays..].iter().for_each(|(_, i)| weights[*i] = 0.0);
    kept
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

    /// Makes logits with ties, some of negative infinity, and a few NaN.
    fn many(n: usize, seed: u64) -> Vec<f32> {
        let mut random = Random::new(seed);
        let logit = |_| match random.below(100) {
            0 => f32::NEG_INFINITY,
            1 => f32::NAN,
            2..50 => random.below(12) as f32,
            _ => random.uniform() as f32 * 12.0,
        };
        (0..n).map(logit).collect()
    }

    /// Returns all tokens that can be drawn, in descending order, equal ones by id.
    fn sorted(logits: &[f32]) -> Vec<(u32, f32)> {
        let finite = logits.iter().enumerate().filter(|(_, v)| **v > f32::NEG_INFINITY);
        let mut all: Vec<(u32, f32)> = finite.map(|(i, v)| (i as u32, *v)).collect();
        all.sort_by(|a, b| b.1.total_cmp(&a.1).then(a.0.cmp(&b.0)));
        all
    }

    #[test]
    fn the_most_probable_are_those_of_a_sort() {
        for (n, seed) in [(1, 1), (5, 2), (1000, 3), (5000, 4), (50_000, 5)] {
            let logits = many(n, seed);
            let all = sorted(&logits);
            for k in [0, 1, 2, 40, 1500, n] {
                assert_eq!(most_probable(&logits, k), all[..k.min(all.len())], "{k} of {n}");
            }
            if let Some(best) = all.first() {
                assert_eq!(argmax(&logits), best.0 as usize);
            }
        }
    }

    #[test]
    fn nothing_is_drawn_that_top_p_leaves_out() {
        for (n, seed) in [(40, 1), (3000, 2), (20_000, 3)] {
            let logits = many(n, seed);
            let all = sorted(&logits);
            let weight = |v: f32| f64::from((v - all[0].1) / 0.8).exp();
            let total: f64 = all.iter().map(|(_, v)| weight(*v)).sum();
            for top_p in [1e-6f32, 0.3, 0.9, 0.999] {
                let mut kept = 0.0;
                let reached = all.iter().position(|(_, v)| {
                    kept += weight(*v);
                    // Sums in f32 and f64 may differ by a token.
                    kept > f64::from(top_p) * total * (1.0 + 1e-6) + 1e-9
                });
                let may = &all[..reached.map_or(all.len(), |last| last + 1)];
                let may: std::collections::BTreeSet<usize> = may.iter().map(|t| t.0 as usize).collect();
                let mut sampler = Sampler::new(sampling(0.8, 0, top_p));
                for _ in 0..300 {
                    let id = sampler.next(&logits);
                    assert!(may.contains(&id), "{id} with {top_p} of {n}");
                }
            }
        }
    }

    /// Returns the probabilities of tokens: temperature, top-k, then top-p among those that stay.
    fn probabilities(logits: &[f32], s: &Sampling) -> Vec<f64> {
        let mut all = sorted(logits);
        all.truncate(if s.top_k == 0 { all.len() } else { s.top_k });
        let weight = |v: f32| (f64::from(v - all[0].1) / f64::from(s.temperature)).exp();
        let total: f64 = all.iter().map(|(_, v)| weight(*v)).sum();
        let mut kept = 0.0;
        let mut found = vec![0.0; logits.len()];
        for (id, v) in &all {
            if kept >= f64::from(s.top_p) * total {
                break;
            }
            kept += weight(*v);
            found[*id as usize] = weight(*v);
        }
        found.iter().map(|w| w / kept).collect()
    }

    #[test]
    fn frequencies_are_those_of_temperature_top_k_and_top_p() {
        // Tokens in groups of a hundred with the same logit, so that the edges lie among equal ones.
        let logits: Vec<f32> = (0..3000).map(|i| ((i * 7) % 3000 / 100) as f32 * 0.25).collect();
        let draws = 20_000;
        for (temperature, top_k, top_p) in [
            (1.0, 0, 1.0),
            (0.7, 0, 0.5),
            (1.3, 0, 0.9),
            (1.0, 0, 0.001),
            (1.0, 250, 1.0),
            (0.8, 250, 0.7),
            (1.0, 40, 0.9),
            (1.0, 2999, 0.999),
            (1.0, 1, 1.0),
        ] {
            let sampling = sampling(temperature, top_k, top_p);
            let expected = probabilities(&logits, &sampling);
            let mut counts = vec![0usize; logits.len()];
            let mut sampler = Sampler::new(sampling.clone());
            (0..draws).for_each(|_| counts[sampler.next(&logits)] += 1);
            let forbidden = counts.iter().zip(&expected).filter(|(n, p)| **n > 0 && **p == 0.0).count();
            assert_eq!(forbidden, 0, "{sampling:?}");
            // Chunks of ids, and tokens of one logit.
            let group = |of: &dyn Fn(usize) -> bool| {
                let n: usize = (0..logits.len()).filter(|i| of(*i)).map(|i| counts[i]).sum();
                let p: f64 = (0..logits.len()).filter(|i| of(*i)).map(|i| expected[i]).sum();
                let spread = 4.5 * (f64::from(draws) * p * (1.0 - p)).max(0.0).sqrt() + 1.0;
                assert!((n as f64 - f64::from(draws) * p).abs() <= spread, "{sampling:?}: {n} of {p}");
            };
            (0..6).for_each(|c| group(&|i| i / 512 == c));
            (0..30).for_each(|g| group(&|i| logits[i] == g as f32 * 0.25));
        }
    }

    #[test]
    fn an_improbable_last_token_gets_no_share_of_rounding() {
        // A chunk whose sum in f32 is larger than that of its weights.
        let small = -22.0 * std::f32::consts::LN_2;
        let mut logits = vec![small; CHUNK];
        logits[..16].fill(0.0);
        logits[CHUNK - 1] = small - 10.0;
        let mut sampler = Sampler::new(sampling(1.0, 0, 1.0));
        assert!((0..200_000).all(|_| sampler.next(&logits) != CHUNK - 1));
    }

    #[test]
    fn logarithms_of_probabilities_add_up_to_one() {
        let logits: Vec<f32> = (0..5000).map(|i| (i as f32 * 0.37).sin() * 9.0).collect();
        let log = log_sum_exp(&logits);
        let sum: f64 = logits.iter().map(|v| (f64::from(*v) - log).exp()).sum();
        assert!((sum - 1.0).abs() < 1e-6, "{sum}");
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
