//! Chooses the next token from logits.

mod logit_changes;
mod sampling_defaults;
mod sampling_settings;

pub use sampling_defaults::SamplingDefaults;
pub use sampling_settings::{REPEAT_LAST_N, Sampling, SamplingSettings, SettingError, TokenBias};

use anemoe_io::Random;
use logit_changes::LogitChanges;
use std::cmp::Ordering;

/// Elements whose exponentials are added in f32 before their sum is added in f64.
const CHUNK: usize = 1024;
/// Fewest candidates that are collected before they are cut to the wanted number.
const CANDIDATES: usize = 1024;

/// Number of classes of ranks by their highest bits.
const KEYS: usize = 4096;

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

/// Draws tokens by [`Sampling`] in the order of Hugging Face transformers: biases and penalties, temperature, then top-k, top-p,
/// min-p, and typical-p. Of equal tokens at the edge of top-k or top-p those with the lower ids stay.
///
/// A token's weight is `e^((logit - largest logit) / temperature)`. Of the tokens that the filters leave, the one is
/// drawn in which the running sum of weights passes a random share of their sum.
pub struct Sampler {
    sampling: Sampling,
    /// Changes of logits; none where no setting asks for them.
    changes: Option<LogitChanges>,
    random: Random,
    weights: Vec<f32>,
    /// Sums of the weights of each [`CHUNK`] tokens.
    sums: Vec<f64>,
}

impl Sampler {
    /// Makes a sampler at the start of its random sequence, for an answer to `prompt`; `ends` are the tokens that end it.
    pub fn new(sampling: Sampling, prompt: &[u32], ends: &[u32]) -> Self {
        let random = Random::new(sampling.seed);
        let changes = sampling.changes_logits().then(|| LogitChanges::new(&sampling, prompt, ends));
        Sampler { sampling, changes, random, weights: Vec::new(), sums: Vec::new() }
    }

    /// Makes a sampler that chooses as this one will, for drafts of the next tokens.
    pub fn ahead(&self) -> Sampler {
        Sampler {
            sampling: self.sampling.clone(),
            changes: self.changes.clone(),
            random: self.random.clone(),
            weights: Vec::new(),
            sums: Vec::new(),
        }
    }

    /// Chooses the next token by its logits, and takes it as said. The logits are the same afterwards.
    pub fn next(&mut self, logits: &mut [f32]) -> usize {
        let Some(mut changes) = self.changes.take() else { return self.draw(logits) };
        changes.apply(&self.sampling, logits);
        // Where every token is forbidden, none is.
        if anemoe_kernels::largest_element(logits).max(f32::NEG_INFINITY) == f32::NEG_INFINITY {
            changes.undo(logits);
        }
        let id = self.draw(logits);
        changes.undo(logits);
        changes.push(&self.sampling, id as u32);
        self.changes = Some(changes);
        id
    }

    fn draw(&mut self, logits: &[f32]) -> usize {
        let best = argmax(logits);
        if self.sampling.temperature == 0.0 || logits.len() < 2 {
            return best;
        }
        match self.sampling.top_k {
            k if (1..logits.len()).contains(&k) => {
                let (ids, few): (Vec<u32>, Vec<f32>) = most_probable(logits, k).into_iter().unzip();
                ids.get(self.draw_of(&few, logits[best])).map_or(0, |id| *id as usize)
            }
            _ => self.draw_of(logits, logits[best]),
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

    /// Draws one of some tokens, without sorting them, and returns its index.
    fn draw_of(&mut self, logits: &[f32], largest: f32) -> usize {
        self.weigh(logits, largest);
        let Sampler { weights, sums, random, .. } = self;
        let mut left = random.uniform() * sums.iter().sum::<f64>();
        let mut drawn = None;
        for (i, (chunk, sum)) in weights.chunks(CHUNK).zip(&*sums).enumerate() {
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
        drawn.unwrap_or_else(last)
    }

    /// Computes the weights of tokens, 0 for those that a filter leaves out, and the sums of chunks.
    fn weigh(&mut self, logits: &[f32], largest: f32) {
        let Sampling { top_p, min_p, typical_p, .. } = self.sampling;
        let (mut weights, mut sums) = (std::mem::take(&mut self.weights), std::mem::take(&mut self.sums));
        weights.clear();
        weights.extend(logits.iter().map(|&v| self.scaled(v, largest)));
        sums.clear();
        sums.extend(weights.chunks_mut(CHUNK).map(|c| f64::from(anemoe_kernels::exp_and_sum_from(c, 0.0))));
        if top_p < 1.0 {
            let wanted = f64::from(top_p) * sums.iter().sum::<f64>();
            // Weights lie between 0 and 1, where bits are in the order of values.
            keep_first(&mut weights, wanted, Ties::LowestIds, |_, w| w.to_bits());
        }
        if min_p > 0.0 {
            let least = min_p.ln();
            let cut = weights.iter_mut().zip(logits).filter(|(_, v)| self.scaled(**v, largest) < least);
            cut.for_each(|(w, _)| *w = 0.0);
        }
        if typical_p < 1.0 {
            let (mut total, mut mean) = (0.0, 0.0);
            let mut distances: Vec<f32> = logits.iter().map(|&v| self.scaled(v, largest)).collect();
            for (&w, &s) in weights.iter().zip(&distances).filter(|(w, _)| **w > 0.0) {
                total += f64::from(w);
                mean += f64::from(w) * f64::from(s);
            }
            let mean = (mean / total) as f32;
            distances.iter_mut().for_each(|s| *s = (*s - mean).abs());
            let wanted = f64::from(typical_p) * total;
            keep_first(&mut weights, wanted, Ties::All, |i, w| {
                if w > 0.0 { u32::MAX - distances[i].to_bits() } else { 0 }
            });
        }
        if top_p < 1.0 || min_p > 0.0 || typical_p < 1.0 {
            sums.clear();
            sums.extend(weights.chunks(CHUNK).map(|c| c.iter().map(|w| f64::from(*w)).sum::<f64>()));
        }
        (self.weights, self.sums) = (weights, sums);
    }
}

/// Treatment of tokens whose rank is that of the last one that is kept.
#[derive(Clone, Copy, PartialEq)]
enum Ties {
    All,
    LowestIds,
}

/// Sets weights to 0 except those of the highest ranks that reach `wanted` together. A weight of 0 has rank 0.
fn keep_first(weights: &mut [f32], wanted: f64, ties: Ties, rank: impl Fn(usize, f32) -> u32) {
    // Of a number: sign, exponent and three bits of the mantissa.
    let key = |rank: u32| (rank >> 20) as usize;
    let mut mass = [0f64; KEYS];
    weights.iter().enumerate().for_each(|(i, &w)| mass[key(rank(i, w))] += f64::from(w));
    let mut kept = 0.0;
    let at = (0..KEYS).rev().find(|&k| {
        let reaches = kept + mass[k] >= wanted;
        if !reaches {
            kept += mass[k];
        }
        reaches
    });
    let at = at.unwrap_or(0);
    let ranked = weights.iter().enumerate().map(|(i, &w)| (rank(i, w), i));
    let mut edge: Vec<(u32, usize)> = ranked.filter(|(rank, _)| key(*rank) == at).collect();
    edge.sort_unstable_by(|a, b| b.0.cmp(&a.0).then(a.1.cmp(&b.1)));
    let mut stays = 0;
    while stays < edge.len() && (kept < wanted || stays == 0) {
        kept += f64::from(weights[edge[stays].1]);
        stays += 1;
    }
    while ties == Ties::All && stays > 0 && stays < edge.len() && edge[stays].0 == edge[stays - 1].0 {
        stays += 1;
    }
    weights.iter_mut().enumerate().filter(|(i, w)| key(rank(*i, **w)) < at).for_each(|(_, w)| *w = 0.0);
    edge[stays..].iter().for_each(|(_, i)| weights[*i] = 0.0);
}

#[cfg(test)]
mod tests {
    use super::*;
    use serde_json::Value;

    #[test]
    fn the_smallest_temperatures_take_the_most_probable_token() {
        let mut logits = [1.0, 3.5, -2.0, 3.25];
        for temperature in [f32::from_bits(1), 1e-40, 1e-38, 1e-5] {
            let mut drawing = sampler(Sampling { temperature, seed: 3, ..Sampling::GREEDY });
            assert!((0..50).all(|_| drawing.next(&mut logits) == 1), "{temperature}");
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
            let mut logits = many(n, seed);
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
                let mut drawing = sampler(sampling(0.8, 0, top_p));
                for _ in 0..300 {
                    let id = drawing.next(&mut logits);
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
        let mut logits: Vec<f32> = (0..3000).map(|i| ((i * 7) % 3000 / 100) as f32 * 0.25).collect();
        let draws = 6_000;
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
            let mut drawing = sampler(sampling.clone());
            (0..draws).for_each(|_| counts[drawing.next(&mut logits)] += 1);
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
        let mut drawing = sampler(sampling(1.0, 0, 1.0));
        assert!((0..200_000).all(|_| drawing.next(&mut logits) != CHUNK - 1));
    }

    #[test]
    fn logarithms_of_probabilities_add_up_to_one() {
        let logits: Vec<f32> = (0..5000).map(|i| (i as f32 * 0.37).sin() * 9.0).collect();
        let log = log_sum_exp(&logits);
        let sum: f64 = logits.iter().map(|v| (f64::from(*v) - log).exp()).sum();
        assert!((sum - 1.0).abs() < 1e-6, "{sum}");
    }

    fn sampling(temperature: f32, top_k: usize, top_p: f32) -> Sampling {
        Sampling { temperature, top_k, top_p, seed: 7, ..Sampling::GREEDY }
    }

    fn sampler(sampling: Sampling) -> Sampler {
        Sampler::new(sampling, &[], &[])
    }

    #[test]
    fn greedy_takes_the_lowest_of_equals() {
        assert_eq!(sampler(Sampling::GREEDY).next(&mut [0.0, 3.0, 3.0, -1.0]), 1);
    }

    #[test]
    fn frequencies_follow_the_softmax() {
        let mut logits = [1.0f32, 2.0, 0.0, -30.0];
        let mut drawing = sampler(sampling(2.0, 0, 1.0));
        let mut counts = [0usize; 4];
        for _ in 0..40_000 {
            counts[drawing.next(&mut logits)] += 1;
        }
        let total: f64 = logits.iter().map(|v| f64::from(v / 2.0).exp()).sum();
        for (count, v) in counts.iter().zip(logits) {
            let expected = f64::from(v / 2.0).exp() / total;
            assert!((*count as f64 / 40_000.0 - expected).abs() < 0.01, "{counts:?}");
        }
    }

    #[test]
    fn top_k_and_top_p_cut_the_tail() {
        let mut logits = [0.0f32, 4.0, 3.9, 1.0, 3.8];
        let mut k = sampler(sampling(1.0, 2, 1.0));
        let mut p = sampler(sampling(1.0, 0, 0.9));
        for _ in 0..2000 {
            assert!([1, 2].contains(&k.next(&mut logits)));
            assert!([1, 2, 4].contains(&p.next(&mut logits)));
        }
        // The most probable token alone reaches a small top-p.
        let mut tight = sampler(sampling(1.0, 0, 1e-6));
        assert!((0..100).all(|_| tight.next(&mut logits) == 1));
    }

    #[test]
    fn the_same_seed_gives_the_same_tokens() {
        let mut logits: Vec<f32> = (0..50).map(|i| (i as f32 * 0.7).sin()).collect();
        let mut draw = |seed| {
            let mut s = sampler(Sampling { temperature: 1.0, seed, ..Sampling::GREEDY });
            (0..20).map(|_| s.next(&mut logits)).collect::<Vec<_>>()
        };
        assert_eq!(draw(1), draw(1));
        assert_ne!(draw(1), draw(2));
    }

    /// Compares probabilities with those of Hugging Face transformers, with its files of settings (`xtask/oracle/sampling.py`).
    #[test]
    fn probabilities_are_those_of_transformers() {
        let goldens: Value = serde_json::from_str(include_str!("../../tests/sampling/goldens.json")).unwrap();
        let ids = |v: &Value| serde_json::from_value::<Vec<u32>>(v.clone()).unwrap();
        let logits: Vec<f32> = serde_json::from_value(goldens["logits"].clone()).unwrap();
        for case in goldens["cases"].as_array().unwrap() {
            let file = &case["generation_config"];
            let ends = if file["eos_token_id"].is_u64() { vec![1] } else { vec![1, 2] };
            let sampling = SamplingDefaults::parse(file).unwrap().sampling(&SamplingSettings::default());
            let mut sampler = Sampler::new(sampling.clone(), &ids(&goldens["prompt"]), &ends);
            let mut changed = logits.clone();
            if let Some(changes) = &mut sampler.changes {
                ids(&case["answer"]).into_iter().for_each(|id| changes.push(&sampling, id));
                changes.apply(&sampling, &mut changed);
            }
            let n = logits.len();
            let few = most_probable(&changed, if sampling.top_k == 0 { n } else { sampling.top_k });
            let (ids_of_few, values): (Vec<u32>, Vec<f32>) = few.iter().copied().unzip();
            sampler.weigh(&values, changed[argmax(&changed)]);
            let of_few = ids_of_few.iter().zip(&sampler.weights).map(|(id, w)| (*id as usize, f64::from(*w)));
            let mut found = vec![of_few.collect::<Vec<_>>()];
            if sampling.top_k == 0 {
                sampler.weigh(&changed, changed[argmax(&changed)]);
                found.push(sampler.weights.iter().map(|w| f64::from(*w)).enumerate().collect());
            }
            for weights in found {
                let total: f64 = weights.iter().map(|(_, w)| w).sum();
                let mut probabilities = vec![0.0; n];
                weights.into_iter().for_each(|(id, w)| probabilities[id] = w / total);
                for (id, p) in probabilities.into_iter().enumerate() {
                    let expected = case["probabilities"][id.to_string()].as_f64().unwrap_or(0.0);
                    assert!(
                        (p - expected).abs() < 1e-6 + 1e-4 * expected,
                        "{file}: {id}: {p} for {expected}"
                    );
                    assert_eq!(p > 0.0, expected > 0.0, "{file}: {id}");
                }
            }
            if let Some(changes) = &mut sampler.changes {
                changes.undo(&mut changed);
                assert_eq!(changed, logits);
            }
        }
    }

    /// Returns the weights of tokens in descending order in f64, 0 for those that a filter leaves out.
    fn weights_of_few(sampler: &Sampler, few: &[(u32, f32)]) -> Vec<f64> {
        let Sampling { top_p, min_p, typical_p, .. } = sampler.sampling;
        let largest = few.first().map_or(0.0, |token| token.1);
        let scaled: Vec<f64> = few.iter().map(|(_, v)| f64::from(sampler.scaled(*v, largest))).collect();
        let mut weights: Vec<f64> = scaled.iter().map(|s| s.exp()).collect();
        let wanted = f64::from(top_p) * weights.iter().sum::<f64>();
        let mut kept = 0.0;
        let reached = weights.iter().position(|w| {
            kept += w;
            kept >= wanted
        });
        weights.truncate(reached.map_or(few.len(), |last| last + 1));
        let least = f64::from(min_p).ln();
        weights.truncate(scaled.partition_point(|s| *s >= least));
        if typical_p < 1.0 {
            let total: f64 = weights.iter().sum();
            let mean =
                weights.iter().zip(&scaled).map(|(w, s)| if *w > 0.0 { w * s } else { 0.0 }).sum::<f64>()
                    / total;
            let distance = |i: usize| (scaled[i] - mean).abs();
            let mut order: Vec<usize> = (0..weights.len()).collect();
            order.sort_by(|a, b| distance(*a).total_cmp(&distance(*b)));
            let mut kept = 0.0;
            let last = order.iter().find(|i| {
                kept += weights[**i];
                kept >= f64::from(typical_p) * total
            });
            let most = last.map_or(f64::INFINITY, |i| distance(*i));
            (0..weights.len()).filter(|i| distance(*i) > most).for_each(|i| weights[i] = 0.0);
        }
        weights
    }

    #[test]
    fn tokens_are_filtered_like_those_in_order() {
        for (n, seed) in [(700, 1), (9000, 2)] {
            let logits = many(n, seed);
            for (top_p, min_p, typical_p) in
                [(1.0, 0.01, 1.0), (1.0, 0.0, 0.4), (0.9, 0.02, 0.7), (0.3, 0.0, 0.99)]
            {
                let mut sampler = sampler(Sampling { min_p, typical_p, ..sampling(0.9, 0, top_p) });
                let few = most_probable(&logits, n);
                let of_few = weights_of_few(&sampler, &few);
                sampler.weigh(&logits, few[0].1);
                let left = few.iter().zip(&of_few).filter(|(_, w)| **w > 0.0).count();
                let differ = few.iter().enumerate().filter(|(i, (id, _))| {
                    (of_few.get(*i).copied().unwrap_or(0.0) > 0.0) != (sampler.weights[*id as usize] > 0.0)
                });
                // Sums in f32 and f64 may differ by a token, and those equal to it.
                assert!(differ.count() <= 1 && left > 10, "{n}: {top_p}, {min_p}, {typical_p}");
            }
        }
    }

    #[test]
    fn penalties_look_at_the_tokens_that_they_name() {
        let next = |s: Sampling, prompt: &[u32], n: usize| {
            let mut logits = [1.0, 0.9, 0.8, -5.0];
            let mut sampler = Sampler::new(s, prompt, &[3]);
            let drawn: Vec<usize> = (0..n).map(|_| sampler.next(&mut logits)).collect();
            assert_eq!(logits, [1.0, 0.9, 0.8, -5.0]);
            drawn
        };
        let g = Sampling::GREEDY;
        // The prompt counts for repetition alone, and only its newest tokens where these are limited.
        assert_eq!(next(Sampling { repetition_penalty: 2.0, ..g.clone() }, &[0, 1], 3), [2, 0, 0]);
        assert_eq!(
            next(Sampling { repetition_penalty: 2.0, repeat_last_n: Some(1), ..g.clone() }, &[0, 1], 4),
            [0, 1, 0, 1]
        );
        assert_eq!(
            next(Sampling { repetition_penalty: 2.0, repeat_last_n: Some(0), ..g.clone() }, &[0], 2),
            [0, 0]
        );
        assert_eq!(next(Sampling { presence_penalty: 0.15, ..g.clone() }, &[0, 0], 4), [0, 1, 0, 0]);
        assert_eq!(next(Sampling { frequency_penalty: 0.15, ..g.clone() }, &[0, 0], 4), [0, 1, 0, 2]);
        // A bias of a token outside the vocabulary changes nothing, and of all tokens one is left.
        let biases = vec![TokenBias::single(0, f32::NEG_INFINITY), TokenBias::single(9, 5.0)];
        assert_eq!(next(Sampling { biases, ..g.clone() }, &[], 2), [1, 1]);
        let biases = (0..4).map(|id| TokenBias::single(id, f32::NEG_INFINITY)).collect();
        assert_eq!(next(Sampling { biases, ..g.clone() }, &[], 2), [0, 0]);
        let early = Sampling { biases: vec![TokenBias::single(3, 9.0)], min_new: 2, ..g };
        assert_eq!(next(early, &[0], 3), [0, 0, 3]);
    }
}
