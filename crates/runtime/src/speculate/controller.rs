//! Decides how many tokens to draft, from the measured times of passes and the measured acceptance.
//!
//! ```text
//! t(T)    seconds of a pass over T tokens, measured          a(m)  acceptance of a token after a match of m tokens, measured
//! S_i     = a(m) a(m + 1) .. a(m + i - 1): probability that the first i drafted tokens are accepted
//! lambda  tokens per second so far, at least 1 / t(1)
//! k*      = argmax over k of (1 + S_1 + .. + S_k) - lambda t(k + 1), and only if (1 + S_1 + .. + S_k) / t(k + 1) > 1 / t(1)
//! ```
//! Every prepared k is tested, because t is concave where experts saturate: a long draft can pay where a short one does not.
//!
//! Drafts that are not made are compared with the next tokens all the same, which costs nothing. So acceptance is known before
//! any time is spent.
//!
//! ```text
//! loss    sum over drafts of t(k + 1) - t(1) (accepted + 1); gains count up to CREDIT passes
//! a draft is made only if      loss + t(k + 1) - t(1)  <=  SHARE * time so far + ADVANCE passes + PROVEN * gains of followed drafts
//! ```
//! So drafts lose little for any text. t(1) and t(k + 1) change while a generation runs, because other work disturbs them: a plain
//! pass is due after [`MOST_WITHOUT_PLAIN`] drafts, and times that were not confirmed are measured again, see [`PassTimes`].
//!
//! A length that was never run has to be prepared first: an investment, made once the tokens left are expected to gain
//! [`WORTH`] times its cost, and drafts that were followed or made have already been worth it.

/// Share of the time that drafts may lose.
const SHARE: f64 = 0.003;
/// Loss that drafts may make at the start, in passes for one token, and as a share of the tokens of a short generation.
const ADVANCE: f64 = 0.65;
const ADVANCE_SHARE: f64 = 0.008;
/// Part of what followed drafts would have gained that lengths may lose besides which pay by a time that was measured once, and
/// its limit as a share of the tokens: with time and acceptance measured, a draft that seems to pay is no gamble.
const PROVEN: f64 = 0.5;
const PROVEN_SHARE: f64 = 0.02;
/// Largest credit for gains, in passes for one token: old gains must not pay for long losses.
const CREDIT: f64 = 32.0;
/// Weight of the newest tokens in lambda.
const NEWEST: f64 = 0.05;
/// Weight of the newest plain pass in the mean time that drafts are charged with.
const NEWEST_PLAIN: f64 = 0.1;
/// Newest measurements of a pass that count.
const RECENT: usize = 5;
/// Factor of the expected time above which the time of a pass is not charged to its draft.
const DISTURBED: f64 = 3.0;
/// Longest time of the first pass of a length, over that of later ones.
const COLD: f64 = 2.0;
/// Passes after which a time that was measured once is forgotten: four times as many for each further measurement, and twice as
/// many each time that it is found to be the same.
const PATIENCE: u64 = 32;
const MOST_PATIENCE: u64 = 1024;
/// Drafts in a row after which a plain pass is due, because t(1) may have changed; fewer where a time was shorter than expected.
const MOST_WITHOUT_PLAIN: u64 = 64;
const DOUBTED_WITHOUT_PLAIN: u64 = 16;
/// Share of the expected time below which a measured time casts doubt on the others.
const DOUBT: f64 = 0.75;
/// Number of groups of match lengths with shared statistics: 1, 2, 3, 4 to 5, 6 to 8, 9 to 16, more.
const BUCKETS: usize = 7;
/// Assumed cost of each further token in a pass, in passes for one token, until one was measured.
const ASSUMED_COST: f64 = 0.6;
/// Assumed acceptance in each bucket; [`ASSUMED_WEIGHT`] is the number of drafted tokens that it counts for.
const ASSUMED: [f64; BUCKETS] = [0.3, 0.45, 0.55, 0.65, 0.75, 0.85, 0.9];
const ASSUMED_WEIGHT: f64 = 4.0;

/// Lengths of drafts that mode `auto` prepares; few, because each takes time.
pub const PREPARED_LENGTHS: [usize; 6] = [1, 2, 4, 8, 16, 31];
/// Expected gain over cost from which a length is prepared.
const WORTH: f64 = 2.0;
/// Assumed cost of preparing a length, in passes for one token, until one was prepared.
const ASSUMED_PREPARING: f64 = 2.0;
/// Tokens that must have been compared after matches of a bucket before a length is prepared.
const EVIDENCE: f64 = 8.0;

/// Seconds of the newest passes of one length.
///
/// One disturbed measurement can say that a length does not pay; then it is not run, and not measured again. So a time is
/// forgotten after a while without measurements. The first pass of a length is cold, takes up to [`COLD`] times as long as later
/// ones, and does not count beside these.
#[derive(Clone, Debug)]
struct PassTimes {
    newest: Vec<f64>,
    /// Lower median of these seconds: of two measurements, the less disturbed one. Each token asks for it some forty times.
    median: Option<f64>,
    /// True if the only measurement is that of the first pass.
    is_cold: bool,
    /// Number of the pass of the newest measurement.
    last: u64,
    /// Passes without a measurement after which the time is forgotten.
    patience: u64,
}

impl Default for PassTimes {
    fn default() -> Self {
        PassTimes { newest: Vec::new(), median: None, is_cold: true, last: 0, patience: PATIENCE }
    }
}

impl PassTimes {
    fn push(&mut self, seconds: f64, pass: u64) {
        if !self.newest.is_empty() && self.is_stale(pass) {
            self.newest.clear();
            self.patience = (2 * self.patience).min(MOST_PATIENCE);
        }
        if self.is_cold && !self.newest.is_empty() {
            self.newest.clear();
            self.is_cold = false;
        }
        if self.newest.len() == RECENT {
            self.newest.remove(0);
            // The length is in use.
            self.patience = PATIENCE;
        }
        self.newest.push(seconds);
        self.last = pass;
        let mut sorted = self.newest.clone();
        sorted.sort_by(f64::total_cmp);
        self.median = sorted.get((sorted.len() - 1) / 2).copied();
    }

    /// Tells whether the newest measurement is too old to count.
    fn is_stale(&self, pass: u64) -> bool {
        let measured = self.newest.len().clamp(1, 3) as u32 - 1;
        pass.saturating_sub(self.last) > self.patience << (2 * measured)
    }

    /// Returns the fewest seconds that a pass takes by its measurements, forgotten ones and that of a cold pass included.
    fn least(&self) -> Option<f64> {
        Some(self.median? / if self.is_cold { COLD } else { 1.0 })
    }

    /// Returns the seconds of a pass, unless they are forgotten.
    fn known(&self, pass: u64) -> Option<f64> {
        if self.is_stale(pass) { None } else { self.median }
    }
}

/// Times of passes and acceptance of drafts: what one generation learns for the next.
#[derive(Clone, Debug)]
pub struct DraftStatistics {
    /// Times of passes, by number of drafted tokens.
    times: Vec<PassTimes>,
    passes: u64,
    /// Drafted tokens that were compared and those that were accepted, by bucket of the match. Older tokens count less.
    compared: [f64; BUCKETS],
    accepted: [f64; BUCKETS],
}

impl DraftStatistics {
    /// Makes statistics of drafts of at most `draft_max` tokens, without measurements.
    pub fn new(draft_max: usize) -> DraftStatistics {
        DraftStatistics {
            times: vec![PassTimes::default(); draft_max + 1],
            passes: 0,
            compared: [0.0; BUCKETS],
            accepted: [0.0; BUCKETS],
        }
    }

    /// Returns the largest number of drafted tokens that the statistics are made for.
    pub fn draft_max(&self) -> usize {
        self.times.len() - 1
    }

    /// Returns the median seconds of a pass over one token.
    fn one(&self) -> Option<f64> {
        self.times[0].median
    }

    /// Returns the seconds that each further token of a pass costs: the least that a length measured, or [`ASSUMED_COST`] where
    /// none was measured, and no more while only cold passes were.
    fn slope(&self, one: f64) -> f64 {
        let assumed = ASSUMED_COST * one;
        let measured = (1..self.times.len()).filter_map(|k| {
            let slope = (self.times[k].known(self.passes)? - one) / k as f64;
            Some(if self.times[k].is_cold { slope.min(assumed) } else { slope })
        });
        measured.reduce(f64::min).map_or(assumed, |slope| slope.max(0.0))
    }

    /// Returns the seconds of passes over 1, 2, .. tokens: measured, or estimated from the nearest shorter measured pass with
    /// the cost of each further token. None before a pass for one token was measured.
    fn estimates(&self, most: usize) -> Option<Vec<f64>> {
        let one = self.one()?;
        let slope = self.slope(one);
        let mut times = vec![one];
        for k in 1..=most {
            let estimate = times[k - 1] + slope;
            let warm = |time: f64| match self.times[k].is_cold {
                true => time.min(estimate).max(time / COLD),
                false => time,
            };
            times.push(self.times[k].known(self.passes).map_or(estimate, warm));
        }
        Some(times)
    }

    /// Tells whether the time of a pass with `drafted` tokens is known, and not only that of a cold pass.
    fn is_known(&self, drafted: usize) -> bool {
        let times = &self.times[drafted];
        !times.is_cold && times.known(self.passes).is_some()
    }

    /// Adds a measured pass with `drafted` tokens, which no generation ran.
    pub(super) fn note_time(&mut self, drafted: usize, seconds: f64) {
        self.passes += 1;
        self.times[drafted].push(seconds, self.passes);
    }

    fn acceptance(&self, matched: usize) -> f64 {
        let b = bucket(matched);
        (self.accepted[b] + ASSUMED[b] * ASSUMED_WEIGHT) / (self.compared[b] + ASSUMED_WEIGHT)
    }

    /// Notes whether the token after a match of `matched` tokens was the drafted one.
    fn note_token(&mut self, matched: usize, was_right: bool) {
        let b = bucket(matched);
        let accepted = if was_right { 1.0 } else { 0.0 };
        self.compared[b] = self.compared[b] * 0.95 + 1.0;
        self.accepted[b] = self.accepted[b] * 0.95 + accepted;
    }
}

/// Choice of drafts in one generation.
#[derive(Clone, Debug)]
pub struct Controller {
    statistics: DraftStatistics,
    /// Passes of this generation, by number of drafted tokens.
    calls: Vec<u64>,
    /// Passes of this generation, and those that had a match.
    passes: u64,
    matches: u64,
    /// Seconds of all passes; `lost`: seconds that drafts took beyond plain passes for the same tokens.
    elapsed: f64,
    lost: f64,
    /// Seconds that preparing took; `worth`: seconds that drafts gained, or would have gained where they were only followed.
    invested: f64,
    worth: f64,
    /// Mean seconds of a plain pass; older ones count less.
    plain_mean: Option<f64>,
    /// Newest tokens and their seconds; older ones count less.
    recent: (f64, f64),
    /// Expected seconds of the chosen draft.
    expected: Option<f64>,
    /// True if a pass took less than expected since the newest plain one.
    is_doubtful: bool,
    /// Prepared lengths, by drafted tokens; `preparing`: upper bound for preparing the next one, in seconds.
    prepared: Vec<bool>,
    preparing: Option<f64>,
    verifier_calls: u64,
    drafted: u64,
    accepted: u64,
    fallbacks: u64,
}

/// Figures of drafts in a generation.
#[derive(Clone, Debug, Default, PartialEq, serde::Serialize)]
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
    /// For each length of a pass in this generation.
    pub passes: Vec<MeasuredPass>,
    /// For each draft length. Empty until a pass for one token was measured.
    pub break_even: Vec<BreakEven>,
}

/// Time of the passes over a number of tokens.
#[derive(Clone, Copy, Debug, PartialEq, serde::Serialize)]
pub struct MeasuredPass {
    /// Tokens of a pass.
    pub tokens: usize,
    /// Median milliseconds of a pass.
    pub ms_per_call: f64,
    /// Number of passes.
    pub calls: u64,
}

/// Acceptance at which a pass over a draft costs what it gains.
#[derive(Clone, Copy, Debug, PartialEq, serde::Serialize)]
pub struct BreakEven {
    /// Drafted tokens.
    pub drafted: usize,
    /// The acceptance; none where even full acceptance would lose.
    pub acceptance: Option<f64>,
    /// True if the pass was measured; its time is an estimate otherwise.
    pub is_measured: bool,
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

/// Returns the expected tokens of a pass over `k` drafted ones, each accepted with probability `a` if those before it were.
fn expected(a: f64, k: usize) -> f64 {
    (1..=k).fold((1.0, 1.0), |(sum, s), _| (sum + s * a, s * a)).0
}

/// Returns the acceptance at which a pass over `k` drafted tokens, which costs `cost` passes for one token, gains nothing: the
/// root of `1 + a + .. + a^k = cost`. None where even `a = 1` loses.
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
    /// Makes a controller for one generation that begins with what others have learned.
    pub fn new(statistics: DraftStatistics) -> Controller {
        let lengths = statistics.times.len();
        Controller {
            plain_mean: statistics.one(),
            statistics,
            calls: vec![0; lengths],
            passes: 0,
            matches: 0,
            elapsed: 0.0,
            lost: 0.0,
            invested: 0.0,
            worth: 0.0,
            recent: (0.0, 0.0),
            expected: None,
            is_doubtful: false,
            prepared: (0..lengths).map(|drafted| drafted == 0).collect(),
            preparing: None,
            verifier_calls: 0,
            drafted: 0,
            accepted: 0,
            fallbacks: 0,
        }
    }

    /// Returns what this generation and those before it have learned.
    pub fn statistics(&self) -> &DraftStatistics {
        &self.statistics
    }

    /// Tells whether the next pass has to be a plain one, because t(1) may have changed since the newest.
    fn is_plain_due(&self, one: f64) -> bool {
        let plain = &self.statistics.times[0];
        let since = self.statistics.passes - plain.last;
        let most = if self.is_doubtful { DOUBTED_WITHOUT_PLAIN } else { MOST_WITHOUT_PLAIN };
        since >= most || plain.newest.last().is_some_and(|&newest| newest < DOUBT * one)
    }

    /// Tells whether preparing a pass that takes `time` for `tokens` tokens on average is justified by the
    /// statistics so far.
    fn is_worth_preparing(&self, matched: usize, one: f64, time: f64, tokens: f64, left: usize) -> bool {
        // Share of passes with a match; 0 before the first pass.
        let share = self.matches as f64 / (self.passes as f64).max(1.0);
        let gain = (one - time / tokens) * left as f64 * share.min(1.0);
        let cost = self.preparing.unwrap_or(ASSUMED_PREPARING * one);
        let was_worth = self.worth >= self.invested + cost;
        self.statistics.compared[bucket(matched)] >= EVIDENCE && gain >= WORTH * cost && was_worth
    }

    /// Chooses the number of drafted tokens, at most `most`, for the pass that gains most when `left` tokens are still wanted.
    /// Returns 0 where no draft gains, can be afforded, or is worth preparing.
    pub fn choose(&mut self, matched: usize, most: usize, left: usize) -> usize {
        self.matches += 1;
        let most = most.min(self.statistics.draft_max());
        let times = self.statistics.estimates(most).filter(|times| !self.is_plain_due(times[0]));
        let chosen = times.and_then(|times| {
            let one = times[0];
            let all = self.passes as f64 + left as f64;
            let proven = (PROVEN * self.worth / one).min(PROVEN_SHARE * all);
            let advance = ADVANCE.min(ADVANCE_SHARE * all);
            let room = SHARE * self.elapsed + advance * one - self.lost;
            let lambda = match self.recent {
                (tokens, seconds) if seconds > 0.0 => (tokens / seconds).max(1.0 / one),
                _ => 1.0 / one,
            };
            let (mut tokens, mut survives) = (1.0, 1.0);
            let mut best: Option<(usize, f64, f64)> = None;
            for (k, &time) in times.iter().enumerate().skip(1) {
                survives *= self.statistics.acceptance(matched + k - 1);
                tokens += survives;
                if !self.prepared[k] && !PREPARED_LENGTHS.contains(&k) && k != most {
                    continue;
                }
                let score = tokens - lambda * time;
                // A time that was forgotten may have been true.
                let forgotten = self.statistics.times[k].median.unwrap_or(0.0).min(DISTURBED * one);
                let is_proven = self.statistics.times[k].least().is_some_and(|least| tokens * one > least);
                let more = if is_proven { proven * one } else { 0.0 };
                let pays = tokens * one > time && time.max(forgotten) - one <= room + more;
                let ready = || self.prepared[k] || self.is_worth_preparing(matched, one, time, tokens, left);
                if pays && best.is_none_or(|(_, most, _)| score > most) && ready() {
                    best = Some((k, score, time));
                }
            }
            best
        });
        self.expected = chosen.map(|(_, _, time)| time);
        match chosen {
            Some((k, _, _)) => k,
            None => {
                self.fallbacks += 1;
                0
            }
        }
    }

    /// Sets the cost of preparing a length to `seconds`, until one was prepared.
    pub fn assume_preparing(&mut self, seconds: f64) {
        self.preparing = Some(seconds);
    }

    /// Tells whether a pass with `drafted` tokens is prepared.
    pub fn is_prepared(&self, drafted: usize) -> bool {
        self.prepared.get(drafted).copied().unwrap_or(true)
    }

    /// Notes that a pass with `drafted` tokens was prepared before this generation.
    pub fn set_prepared(&mut self, drafted: usize) {
        if let Some(prepared) = self.prepared.get_mut(drafted) {
            *prepared = true;
        }
    }

    /// Notes that a pass with `drafted` tokens was prepared in `seconds`.
    pub fn note_prepared(&mut self, drafted: usize, seconds: f64) {
        self.set_prepared(drafted);
        self.invested += seconds;
        // A length that another sequence prepared takes no time here, so a short time halves the bound at most.
        self.preparing = Some(self.preparing.map_or(seconds, |was| seconds.max(was / 2.0)));
    }

    /// Notes whether the token after a match of `matched` tokens was the one that a draft would have had, which was not made.
    pub fn note_followed(&mut self, matched: usize, was_right: bool) {
        self.statistics.note_token(matched, was_right);
        if let Some(one) = self.statistics.one() {
            let slope = self.statistics.slope(one);
            self.worth = (self.worth + if was_right { one - slope } else { -slope }).max(0.0);
        }
    }

    /// Notes a pass over one token and `drafted` more, after a match of `matched` tokens.
    pub fn note(&mut self, matched: usize, drafted: usize, accepted: usize, seconds: f64) {
        if drafted > self.statistics.draft_max() {
            return;
        }
        let expected = self.expected.take();
        // A pass that takes several times what was expected was disturbed by something else than its draft.
        let charged = expected.map_or(seconds, |expected| seconds.min(DISTURBED * expected));
        self.statistics.note_time(drafted, seconds);
        self.passes += 1;
        self.calls[drafted] += 1;
        self.elapsed += seconds;
        let (tokens, time) = self.recent;
        self.recent = (tokens * (1.0 - NEWEST) + (accepted + 1) as f64, time * (1.0 - NEWEST) + seconds);
        if drafted == 0 {
            self.is_doubtful = false;
            let mean = self.plain_mean.get_or_insert(seconds);
            *mean += NEWEST_PLAIN * (seconds - *mean);
            return;
        }
        self.is_doubtful |= expected.is_some_and(|expected| seconds < DOUBT * expected);
        self.verifier_calls += 1;
        self.drafted += drafted as u64;
        self.accepted += accepted as u64;
        if let (Some(one), Some(mean)) = (self.statistics.one(), self.plain_mean) {
            // The median of the newest is high by chance where drafts seem to pay, the mean is old: the smaller one counts.
            let gained = one.min(mean) * (accepted + 1) as f64 - charged;
            self.lost = (self.lost - gained).max(-CREDIT * one);
            self.worth = (self.worth + gained).max(0.0);
        }
        // The first refused token counts, too.
        for i in 0..(accepted + 1).min(drafted) {
            self.statistics.note_token(matched + i, i < accepted);
        }
    }

    /// Returns the figures so far.
    pub fn report(&self) -> SpeculationReport {
        let times = &self.statistics.times;
        let passes = self.calls.iter().enumerate().filter(|(_, calls)| **calls > 0);
        let pass = |(k, &calls): (usize, &u64)| {
            Some(MeasuredPass { tokens: k + 1, ms_per_call: times[k].median? * 1e3, calls })
        };
        let costs = self.statistics.estimates(self.statistics.draft_max()).unwrap_or_default();
        SpeculationReport {
            verifier_calls: self.verifier_calls,
            drafted: self.drafted,
            accepted: self.accepted,
            fallbacks: self.fallbacks,
            acceptance: if self.drafted > 0 { self.accepted as f64 / self.drafted as f64 } else { 0.0 },
            passes: passes.filter_map(pass).collect(),
            break_even: (1..costs.len())
                .map(|drafted| BreakEven {
                    drafted,
                    acceptance: break_even(costs[drafted] / costs[0], drafted),
                    is_measured: self.statistics.is_known(drafted),
                })
                .collect(),
        }
    }
}

#[cfg(test)]
#[path = "controller_tests.rs"]
mod tests;
