//! Decides how many tokens of a draft are worth a pass, by what passes took and what was accepted.
//!
//! ```text
//! t(T)   seconds of a pass over T tokens, measured           S_i  probability that the first i drafted tokens are accepted
//! gain of k drafted tokens: (1 + S_1 + .. + S_k) / t(k + 1)  against 1 / t(1)
//! ```
//! A draft also has to be affordable: what drafts have cost so far, plus what this one costs if nothing of it is accepted, stays
//! below [`SHARE`] of the time, beside one token's time to begin with. So the loss is bounded whatever the text is.

/// Share of the time that drafts may lose.
const SHARE: f64 = 0.005;
/// Tokens' time that gains count for at most, so that old ones do not pay for long losses.
const CREDIT: f64 = 8.0;
/// Weight of the newest measurement.
const NEWEST: f64 = 0.2;
/// Lengths of matches that share statistics: 1, 2, 3, 4 to 5, 6 to 8, 9 to 16, more.
const BUCKETS: usize = 7;
/// Assumed cost of each token more in a pass, as a share of a pass for one, until it was measured.
const ASSUMED_COST: f64 = 0.35;
/// Assumed acceptance of matches in each bucket, and the number of drafted tokens that this assumption counts for.
const ASSUMED: [f64; BUCKETS] = [0.3, 0.45, 0.55, 0.65, 0.75, 0.85, 0.9];
const ASSUMED_WEIGHT: f64 = 4.0;

/// Measurements of one generation.
#[derive(Clone, Debug)]
pub struct Controller {
    /// Seconds of a pass by its tokens less one.
    seconds: Vec<Option<f64>>,
    calls: Vec<u64>,
    /// Drafted tokens that were looked at, and those that were accepted, by length of the match; older ones count less.
    tried: [f64; BUCKETS],
    kept: [f64; BUCKETS],
    /// Seconds of all passes, and of those with drafts beyond what plain passes for their tokens would have taken.
    elapsed: f64,
    lost: f64,
    verifier_calls: u64,
    drafted: u64,
    accepted: u64,
    fallbacks: u64,
}

/// Figures of a generation.
#[derive(Clone, Debug, PartialEq)]
pub struct SpeculationReport {
    /// Passes over a draft.
    pub verifier_calls: u64,
    /// Tokens of all drafts.
    pub drafted: u64,
    /// Those that were accepted.
    pub accepted: u64,
    /// Passes without a draft although there was a match.
    pub fallbacks: u64,
    /// `accepted / drafted`; zero without drafts.
    pub acceptance: f64,
    /// Tokens of a pass, its milliseconds, and how many there were.
    pub passes: Vec<(usize, f64, u64)>,
    /// Drafted tokens, and the acceptance of each at which a pass over them costs what it gains.
    pub break_even: Vec<(usize, f64)>,
}

fn bucket(matched: usize) -> usize {
    match matched {
        0 | 1 => 0,
        2 => 1,
        3 => 2,
        4..=5 => 3,
        6..=8 => 4,
        9..=16 => 5,
        _ => 6,
    }
}

/// Tokens that a pass over `k` drafted ones gives, each accepted with probability `a` if those before it were.
fn expected(a: f64, k: usize) -> f64 {
    (1..=k).fold((1.0, 1.0), |(sum, s), _| (sum + s * a, s * a)).0
}

/// The acceptance at which a pass of `cost` passes for one, over `k` drafted tokens, gains nothing: the root of
/// `1 + a + .. + a^k = cost`. None where even `a = 1` loses.
pub fn break_even(cost: f64, k: usize) -> Option<f64> {
    if cost > (k + 1) as f64 {
        return None;
    }
    let (mut low, mut high) = (0.0, 1.0);
    for _ in 0..60 {
        let middle = (low + high) / 2.0;
        if expected(middle, k) < cost { low = middle } else { high = middle }
    }
    Some(high)
}

impl Controller {
    /// A controller for drafts of at most `draft_max` tokens that has measured nothing.
    pub fn new(draft_max: usize) -> Controller {
        Controller {
            seconds: vec![None; draft_max + 1],
            calls: vec![0; draft_max + 1],
            tried: [0.0; BUCKETS],
            kept: [0.0; BUCKETS],
            elapsed: 0.0,
            lost: 0.0,
            verifier_calls: 0,
            drafted: 0,
            accepted: 0,
            fallbacks: 0,
        }
    }

    /// Seconds of a pass over `tokens`, measured or estimated from the nearest that was.
    fn time(&self, tokens: usize) -> Option<f64> {
        let one = self.seconds[0]?;
        let known = |i: usize| self.seconds.get(i).copied().flatten();
        if let Some(seconds) = known(tokens - 1) {
            return Some(seconds);
        }
        // From the largest smaller pass on, at the assumed cost of each token more.
        let (at, seconds) = (0..tokens - 1).rev().find_map(|i| Some((i, known(i)?)))?;
        Some(seconds + ASSUMED_COST * one * (tokens - 1 - at) as f64)
    }

    fn acceptance(&self, matched: usize) -> f64 {
        let b = bucket(matched);
        (self.kept[b] + ASSUMED[b] * ASSUMED_WEIGHT) / (self.tried[b] + ASSUMED_WEIGHT)
    }

    /// The number of drafted tokens, `most` at most, of the pass that gains most; 0 where none does or can be afforded.
    pub fn choose(&mut self, matched: usize, most: usize) -> usize {
        let a = self.acceptance(matched);
        let chosen = self.time(1).and_then(|one| {
            let room = SHARE * self.elapsed + one - self.lost;
            (1..=most.min(self.seconds.len() - 1))
                .filter_map(|k| {
                    let time = self.time(k + 1)?;
                    let gain = expected(a, k) * one / time;
                    (gain > 1.0 && time - one <= room).then_some((k, gain))
                })
                .max_by(|x, y| x.1.total_cmp(&y.1))
        });
        match chosen {
            Some((k, _)) => k,
            None => {
                self.fallbacks += 1;
                0
            }
        }
    }

    /// Notes a pass over one token and `drafted` more, behind a match of `matched` tokens.
    pub fn note(&mut self, matched: usize, drafted: usize, accepted: usize, seconds: f64) {
        let (Some(known), Some(calls)) = (self.seconds.get_mut(drafted), self.calls.get_mut(drafted)) else {
            return;
        };
        *calls += 1;
        *known = Some(known.map_or(seconds, |was| was + NEWEST * (seconds - was)));
        self.elapsed += seconds;
        if drafted == 0 {
            return;
        }
        self.verifier_calls += 1;
        self.drafted += drafted as u64;
        self.accepted += accepted as u64;
        if let Some(one) = self.seconds[0] {
            self.lost = (self.lost + seconds - one * (accepted + 1) as f64).max(-CREDIT * one);
        }
        let b = bucket(matched);
        // The first that is refused is looked at, too.
        let looked = accepted + usize::from(accepted < drafted);
        (self.tried[b], self.kept[b]) =
            (self.tried[b] * 0.9 + looked as f64, self.kept[b] * 0.9 + accepted as f64);
    }

    /// Figures so far.
    pub fn report(&self) -> SpeculationReport {
        let measured = self.seconds.iter().zip(&self.calls).enumerate();
        let one = self.seconds[0];
        let cost = |i: usize| Some(self.seconds[i]? / one?);
        SpeculationReport {
            verifier_calls: self.verifier_calls,
            drafted: self.drafted,
            accepted: self.accepted,
            fallbacks: self.fallbacks,
            acceptance: if self.drafted > 0 { self.accepted as f64 / self.drafted as f64 } else { 0.0 },
            passes: measured.filter_map(|(i, (s, n))| Some((i + 1, (*s)? * 1e3, *n))).collect(),
            break_even: (1..self.seconds.len()).filter_map(|k| Some((k, break_even(cost(k)?, k)?))).collect(),
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn break_even_is_where_a_pass_costs_what_it_gives() {
        // 1 + a = 1.5, and 1 + a + a^2 + a^3 = 4 at a = 1.
        assert!((break_even(1.5, 1).unwrap() - 0.5).abs() < 1e-9);
        assert!((break_even(4.0, 3).unwrap() - 1.0).abs() < 1e-9);
        assert!(
            break_even(4.4, 3).is_none(),
            "a verification that costs 4.4 tokens never pays for 3 drafted ones"
        );
        assert!(break_even(1.0, 3).unwrap() < 1e-9);
    }

    /// Seconds of plain decoding over those with the controller, where drafted tokens are accepted with probability `a` and a
    /// pass over T tokens costs `cost(T)`.
    fn speedup(a: f64, cost: impl Fn(usize) -> f64, tokens: usize) -> f64 {
        let mut c = Controller::new(8);
        let (mut random, mut made, mut seconds) = (anemoe_io::Random::new(7), 0, 0.0);
        while made < tokens {
            let k = c.choose(4, 8);
            let accepted = (0..k).take_while(|_| random.uniform() < a).count();
            c.note(4, k, accepted, cost(k + 1));
            (made, seconds) = (made + accepted + 1, seconds + cost(k + 1));
        }
        made as f64 * cost(1) / seconds
    }

    #[test]
    fn it_gains_where_there_is_something_to_gain_and_loses_nothing_elsewhere() {
        let cheap = |t: usize| 1.0 + 0.1 * (t - 1) as f64;
        let linear = |t: usize| t as f64;
        let notes = |t: usize| if t == 1 { 1.0 } else { 4.4 };
        assert!(speedup(0.9, cheap, 500) > 2.0);
        for a in [0.0, 0.2, 0.5, 0.9] {
            assert!(speedup(a, cheap, 500) >= 0.99, "{a}: {}", speedup(a, cheap, 500));
            assert!(speedup(a, linear, 500) >= 0.99, "{a}: {}", speedup(a, linear, 500));
            assert!(speedup(a, notes, 500) >= 0.99, "{a}: {}", speedup(a, notes, 500));
        }
    }
}
