//! Decides how many tokens of a draft are worth a pass, by what passes took and what was accepted.
//!
//! ```text
//! t(T)    seconds of a pass over T tokens, measured          a(m)  acceptance of a token behind a match of m tokens, measured
//! S_i     = a(m) a(m + 1) .. a(m + i - 1): probability that the first i drafted tokens are accepted
//! lambda  tokens per second so far, at least 1 / t(1)
//! k*      = argmax over k of (1 + S_1 + .. + S_k) - lambda t(k + 1), and only if (1 + S_1 + .. + S_k) / t(k + 1) > 1 / t(1)
//! ```
//! Every k is tested, since t is concave where experts saturate: a long draft can pay where a short one does not.
//!
//! Drafts that are not made are followed all the same: whether the next tokens are those that it would have had costs nothing to
//! see. So acceptance is known before anything is spent. A length that was never run has to be prepared first; that is done
//! once what was seen says that the tokens left gain at least [`WORTH`] times the cost, or [`SURE_WORTH`] times where much was
//! seen.
//!
//! A draft also has to be affordable: what drafts have cost so far, plus what this one costs if nothing of it is accepted, stays
//! below [`SHARE`] of the time, beside [`ADVANCE`]. So the loss is bounded whatever the text is.

/// Share of the time that drafts may lose.
const SHARE: f64 = 0.005;
/// Passes for one token that drafts may lose before there was time for a share.
const ADVANCE: f64 = 0.65;
/// Passes for one token that gains count for at most, so that old ones do not pay for long losses.
const CREDIT: f64 = 8.0;
/// Weight of the newest tokens in lambda.
const NEWEST: f64 = 0.05;
/// Measurements of a pass that count: the newest.
const RECENT: usize = 5;
/// Passes behind which a time that was measured fewer than [`SURE`] times is forgotten, so that one disturbed measurement does
/// not keep a length from being tried again.
const FORGET: u64 = 512;
/// Measurements of a pass that are enough.
const SURE: usize = 3;
/// Lengths of matches that share statistics: 1, 2, 3, 4 to 5, 6 to 8, 9 to 16, more.
const BUCKETS: usize = 7;
/// Assumed cost of each token more in a pass, as a share of a pass for one, until one was measured.
const ASSUMED_COST: f64 = 0.6;
/// Assumed acceptance of matches in each bucket, and the number of drafted tokens that this assumption counts for.
const ASSUMED: [f64; BUCKETS] = [0.3, 0.45, 0.55, 0.65, 0.75, 0.85, 0.9];
const ASSUMED_WEIGHT: f64 = 4.0;

/// Drafted tokens of `auto`: each length has to be prepared.
const LENGTHS: [usize; 6] = [1, 2, 4, 8, 16, 31];
/// Gain over cost from which a length is prepared.
const WORTH: f64 = 4.0;
/// The same behind twice the evidence.
const SURE_WORTH: f64 = 2.0;
/// Assumed cost of preparing a length, in passes for one token, until one was.
const ASSUMED_PREPARING: f64 = 2.0;
/// Tokens that have to be seen behind matches of one bucket before a length is prepared.
const EVIDENCE: f64 = 8.0;

/// Newest seconds of passes of one length.
#[derive(Clone, Debug, Default)]
struct PassTimes {
    newest: Vec<f64>,
    calls: u64,
    /// Number of the pass that was measured last.
    last: u64,
}

impl PassTimes {
    fn push(&mut self, seconds: f64, pass: u64) {
        if self.newest.len() == RECENT {
            self.newest.remove(0);
        }
        self.newest.push(seconds);
        (self.calls, self.last) = (self.calls + 1, pass);
    }

    /// The lower median, so that of two the undisturbed one counts.
    fn seconds(&self) -> Option<f64> {
        let mut sorted = self.newest.clone();
        sorted.sort_by(f64::total_cmp);
        sorted.get((sorted.len().max(1) - 1) / 2).copied()
    }

    /// Seconds, unless they are too few and too old to rely on.
    fn known(&self, pass: u64) -> Option<f64> {
        let stale = self.newest.len() < SURE && pass - self.last > FORGET;
        if stale { None } else { self.seconds() }
    }
}

/// Measurements of one generation.
#[derive(Clone, Debug)]
pub struct Controller {
    /// Times of passes by drafted tokens.
    times: Vec<PassTimes>,
    passes: u64,
    /// Passes in front of which there was a match.
    matches: u64,
    /// Drafted tokens that were looked at, and those that were accepted, by length of the match; older ones count less.
    tried: [f64; BUCKETS],
    kept: [f64; BUCKETS],
    /// Seconds of all passes, and of those with drafts beyond what plain passes for their tokens would have taken.
    elapsed: f64,
    lost: f64,
    /// Newest tokens, and their seconds; older ones count less.
    recent: (f64, f64),
    /// Lengths whose passes are prepared, by drafted tokens, and the seconds that the next one takes at most.
    prepared: Vec<bool>,
    preparing: Option<f64>,
    verifier_calls: u64,
    drafted: u64,
    accepted: u64,
    fallbacks: u64,
}

/// Figures of a generation.
#[derive(Clone, Debug, Default, PartialEq)]
pub struct SpeculationReport {
    /// Passes over a draft.
    pub verifier_calls: u64,
    /// Tokens of all drafts.
    pub drafted: u64,
    /// Drafted tokens that were accepted.
    pub accepted: u64,
    /// Passes without a draft although there was a match.
    pub fallbacks: u64,
    /// `accepted / drafted`; zero without drafts.
    pub acceptance: f64,
    /// Tokens of a pass, its milliseconds, and how many there were.
    pub passes: Vec<(usize, f64, u64)>,
    /// Drafted tokens, and the acceptance of each at which a pass over them costs what it gains; none where even all accepted
    /// would lose. Only of lengths that were measured, beside a pass for one token.
    pub break_even: Vec<(usize, Option<f64>)>,
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
            times: vec![PassTimes::default(); draft_max + 1],
            passes: 0,
            matches: 0,
            tried: [0.0; BUCKETS],
            kept: [0.0; BUCKETS],
            elapsed: 0.0,
            lost: 0.0,
            recent: (0.0, 0.0),
            prepared: (0..=draft_max).map(|drafted| drafted == 0).collect(),
            preparing: None,
            verifier_calls: 0,
            drafted: 0,
            accepted: 0,
            fallbacks: 0,
        }
    }

    /// Seconds of passes over 1, 2, .. tokens: measured, or estimated from the nearest shorter pass that was, at the measured or
    /// assumed cost of each token more. None before a pass for one token was measured.
    fn estimates(&self, most: usize) -> Option<Vec<f64>> {
        let one = self.times[0].seconds()?;
        let known = |k: usize| self.times[k].known(self.passes);
        let slope = (1..self.times.len())
            .filter_map(|k| Some((known(k)? - one) / k as f64))
            .reduce(f64::min)
            .map_or(ASSUMED_COST * one, |slope| slope.max(0.0));
        let mut times = vec![one];
        for k in 1..=most {
            times.push(known(k).unwrap_or(times[k - 1] + slope));
        }
        Some(times)
    }

    fn acceptance(&self, matched: usize) -> f64 {
        let b = bucket(matched);
        (self.kept[b] + ASSUMED[b] * ASSUMED_WEIGHT) / (self.tried[b] + ASSUMED_WEIGHT)
    }

    /// True if preparing a pass that takes `time` for `tokens` tokens on average is justified by the passes
    /// so far.
    fn is_worth_preparing(&self, matched: usize, one: f64, time: f64, tokens: f64, left: usize) -> bool {
        // Matches are this often; before any pass there is none.
        let share = self.matches as f64 / (self.passes as f64).max(1.0);
        let gain = (one - time / tokens) * left as f64 * share.min(1.0);
        let cost = self.preparing.unwrap_or(ASSUMED_PREPARING * one);
        let seen = self.tried[bucket(matched)];
        let worth = if seen >= 2.0 * EVIDENCE { SURE_WORTH } else { WORTH };
        seen >= EVIDENCE && gain >= worth * cost
    }

    /// The number of drafted tokens, `most` at most, of the pass that gains most where `left` tokens are still wanted; 0 where
    /// none does, can be afforded, or is worth preparing.
    pub fn choose(&mut self, matched: usize, most: usize, left: usize) -> usize {
        self.matches += 1;
        let most = most.min(self.times.len() - 1);
        let chosen = self.estimates(most).and_then(|times| {
            let one = times[0];
            let room = SHARE * self.elapsed + ADVANCE * one - self.lost;
            let lambda = match self.recent {
                (tokens, seconds) if seconds > 0.0 => (tokens / seconds).max(1.0 / one),
                _ => 1.0 / one,
            };
            let (mut tokens, mut survives) = (1.0, 1.0);
            let mut best: Option<(usize, f64)> = None;
            for (k, &time) in times.iter().enumerate().skip(1) {
                survives *= self.acceptance(matched + k - 1);
                tokens += survives;
                if !LENGTHS.contains(&k) && k != most {
                    continue;
                }
                let score = tokens - lambda * time;
                let pays = tokens * one > time && time - one <= room;
                let ready = || self.prepared[k] || self.is_worth_preparing(matched, one, time, tokens, left);
                if pays && best.is_none_or(|(_, most)| score > most) && ready() {
                    best = Some((k, score));
                }
            }
            best
        });
        match chosen {
            Some((k, _)) => k,
            None => {
                self.fallbacks += 1;
                0
            }
        }
    }

    /// Takes preparing a length to cost so many seconds, until one was.
    pub fn assume_preparing(&mut self, seconds: f64) {
        self.preparing = Some(seconds);
    }

    /// True if a pass with `drafted` tokens is prepared.
    pub fn is_prepared(&self, drafted: usize) -> bool {
        self.prepared.get(drafted).copied().unwrap_or(true)
    }

    /// Notes that a pass with `drafted` tokens was prepared, in so many seconds.
    pub fn note_prepared(&mut self, drafted: usize, seconds: f64) {
        if let Some(prepared) = self.prepared.get_mut(drafted) {
            *prepared = true;
            // One that another sequence has prepared takes no time, and says little.
            self.preparing = Some(self.preparing.map_or(seconds, |was| seconds.max(was / 2.0)));
        }
    }

    /// Notes whether the token behind a match of `matched` tokens was the one that a draft has or would have had.
    pub fn note_token(&mut self, matched: usize, was_right: bool) {
        let b = bucket(matched);
        let kept = if was_right { 1.0 } else { 0.0 };
        (self.tried[b], self.kept[b]) = (self.tried[b] * 0.95 + 1.0, self.kept[b] * 0.95 + kept);
    }

    /// Notes a pass over one token and `drafted` more, behind a match of `matched` tokens.
    pub fn note(&mut self, matched: usize, drafted: usize, accepted: usize, seconds: f64) {
        let Some(times) = self.times.get_mut(drafted) else { return };
        self.passes += 1;
        times.push(seconds, self.passes);
        self.elapsed += seconds;
        let (tokens, time) = self.recent;
        self.recent = (tokens * (1.0 - NEWEST) + (accepted + 1) as f64, time * (1.0 - NEWEST) + seconds);
        if drafted == 0 {
            return;
        }
        self.verifier_calls += 1;
        self.drafted += drafted as u64;
        self.accepted += accepted as u64;
        if let Some(one) = self.times[0].seconds() {
            self.lost = (self.lost + seconds - one * (accepted + 1) as f64).max(-CREDIT * one);
        }
        // The first that is refused is looked at, too.
        for i in 0..(accepted + 1).min(drafted) {
            self.note_token(matched + i, i < accepted);
        }
    }

    /// Figures so far.
    pub fn report(&self) -> SpeculationReport {
        let measured = self.times.iter().enumerate();
        let one = self.times[0].seconds();
        let cost = |k: usize| Some(self.times[k].seconds()? / one?);
        SpeculationReport {
            verifier_calls: self.verifier_calls,
            drafted: self.drafted,
            accepted: self.accepted,
            fallbacks: self.fallbacks,
            acceptance: if self.drafted > 0 { self.accepted as f64 / self.drafted as f64 } else { 0.0 },
            passes: measured.filter_map(|(k, t)| Some((k + 1, t.seconds()? * 1e3, t.calls))).collect(),
            break_even: (1..self.times.len()).filter_map(|k| Some((k, break_even(cost(k)?, k)))).collect(),
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
            let k = c.choose(4, 8, tokens - made);
            if !c.is_prepared(k) {
                c.note_prepared(k, 1.0);
                seconds += 1.0;
            }
            let accepted = (0..k).take_while(|_| random.uniform() < a).count();
            if k == 0 {
                c.note_token(4, random.uniform() < a);
            }
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
        for a in [0.0, 0.2, 0.5, 0.7, 0.9] {
            assert!(speedup(a, cheap, 500) >= 0.99, "{a}: {}", speedup(a, cheap, 500));
            assert!(speedup(a, linear, 500) >= 0.99, "{a}: {}", speedup(a, linear, 500));
            assert!(speedup(a, notes, 500) >= 0.99, "{a}: {}", speedup(a, notes, 500));
        }
    }

    /// Figures of the field notes: 108 ms for one token, 483 ms for four, and what three drafted tokens would have to gain.
    #[test]
    fn the_notes_formula_is_not_the_break_even() {
        let (one, four) = (108.1f64, 483.0f64);
        let wrong = 1.0 - one / (four / 4.0);
        assert!((wrong - 0.10).abs() < 0.01, "{wrong}");
        assert_eq!(break_even(four / one, 3), None);
        assert!(expected(wrong, 3) / four < 1.0 / one, "three tokens drafted at that acceptance lose");
        assert!(expected(1.0, 3) / four < 1.0 / one, "and at any other");
    }

    #[test]
    fn one_disturbed_time_is_forgotten() {
        let mut c = Controller::new(1);
        c.note_prepared(1, 0.0);
        (0..20).for_each(|_| c.note(4, 0, 0, 1.0));
        c.note(4, 1, 1, 30.0);
        c.lost = 0.0;
        assert_eq!(c.choose(4, 1, 100), 0);
        (0..600).for_each(|_| c.note(4, 0, 0, 1.0));
        assert_eq!(c.choose(4, 1, 100), 1);
    }

    #[test]
    fn nothing_is_prepared_without_evidence() {
        let mut c = Controller::new(8);
        (0..20).for_each(|_| c.note(4, 0, 0, 1.0));
        assert_eq!(c.choose(20, 8, 1000), 0, "nothing was seen behind such matches");
        (0..16).for_each(|_| c.note_token(20, true));
        assert_eq!(c.choose(20, 8, 2), 0, "too few tokens are left");
        assert!(c.choose(20, 8, 1000) > 0);
    }
}
