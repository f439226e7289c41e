//! Chooses the length of each draft by expected tokens per second, within a loss account.
//!
//! ```text
//! c(k)     cost of a pass over one token and k drafted ones, in plain passes; measured
//! a(m)     probability that the token after a match of m tokens is the drafted one; measured
//! E(k)   = 1 + a(m) + a(m) a(m + 1) + ..      expected tokens of the pass
//! k*     = argmax E(k) / c(k)                 tokens in the time of a plain pass
//! draft if E(k*) / c(k*) > 1  and  c(k) - 1 <= account
//! account = SHARE * tokens + sum over drafts of (accepted + 1) - c(k) - sum of what the drafter read, in plain passes
//! ```
//! In a pass of several streams a plain pass gives each stream a token: the same holds with `B c(k)` in place of `c(k)`, and with
//! costs that were measured in passes of `B` streams.
//!
//! The account bounds the loss: a draft of which nothing is right costs `c(k) - 1`, and has to be paid from the share or from what
//! drafts gained before. So short drafts come first, and their gains pay for longer ones.
//!
//! Repetitions that are not drafted are compared with the next tokens all the same. So their acceptance is known before any time
//! is spent. A drafter costs its own time for each token, which is measured and added to c(k); its acceptance is known by drafts
//! alone, and what is known fades, so that it is tried again as the account allows. Tokens that it has to read before, as those of
//! a prompt, are charged when it reads them, and a part of the account bounds them.
//!
//! Other work slows passes down for a while. So costs are ratios to the plain pass of the moment, which each pass corrects.

/// Share of the tokens that drafts may lose, in plain passes: the promise is 1.5 %, and costs are estimates.
const SHARE: f64 = 0.013;
/// Tokens still to come that the share counts at most: a generation may end early, so an advance is 1.3 passes.
const HORIZON: f64 = 100.0;
/// Assumed cost of a further token where a length was not measured, over that of a token of the next shorter one (one pass where
/// there is none): experts that several tokens share make later tokens cheaper.
const ASSUMED: f64 = 0.6;
/// Measurements that a mean remembers, and drafts after which a plain pass is due: fewer are noisy, more are late.
const MEMORY: f64 = 16.0;
/// Factor of the weight of a cost in each pass: a length that looked dear by accident is tried again after some hundred passes.
const FORGETTING: f64 = 0.99;
/// Largest factor of the expected time that counts: other work makes single passes take three times as long.
const DISTURBED: f64 = 1.5;
/// Exponent of an unexpected factor in the time of the plain pass if a pass was faster: nothing makes one faster by accident.
const FASTER: f64 = 0.5;
/// The same if it was slower, which a disturbance may explain: a plain pass that is thought too slow makes drafts look cheap.
const SLOWER: f64 = 0.25;

/// Most streams of a pass in which drafts are verified: more streams leave little room in a pass.
pub const MOST_STREAMS: usize = 4;
/// Acceptance that is assumed before anything was compared: of repetitions, and of a drafter, which somebody chose.
const PRIOR: [f64; 2] = [0.5, 0.8];
/// Share of the account that the drafter may read for at a time.
const READING: f64 = 0.25;

/// Measured cost of a length.
#[derive(Clone, Debug, Default)]
struct Cost {
    /// Geometric mean of the cost, in plain passes.
    mean: f64,
    /// Number of measurements, of which old ones count less.
    weight: f64,
}

/// Acceptance of drafted tokens, by the binary logarithm of the match before them.
#[derive(Clone, Debug, Default)]
struct Acceptance([AcceptanceBucket; 6]);

#[derive(Clone, Copy, Debug, Default)]
struct AcceptanceBucket {
    compared: f64,
    accepted: f64,
}

impl Acceptance {
    fn bucket(&mut self, matched: usize) -> &mut AcceptanceBucket {
        &mut self.0[(matched.max(1).ilog2() as usize).min(5)]
    }

    /// Estimates the probability after a match of `matched` tokens; `prior` where nothing was compared.
    fn estimate(&mut self, matched: usize, prior: f64) -> f64 {
        let bucket = self.bucket(matched);
        (bucket.accepted + prior) / (bucket.compared + 1.0)
    }

    /// Lets what is known count less.
    fn fade(&mut self) {
        for bucket in &mut self.0 {
            bucket.compared *= FORGETTING;
            bucket.accepted *= FORGETTING;
        }
    }

    fn note(&mut self, matched: usize, was_right: bool) {
        let bucket = self.bucket(matched);
        let kept = 1.0 - 1.0 / MEMORY;
        bucket.compared = kept * bucket.compared + 1.0;
        bucket.accepted = kept * bucket.accepted + f64::from(u8::from(was_right));
    }
}

/// Source of a draft.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum DraftSource {
    /// Tokens that followed the same ones before: a match of so many.
    Repetition(usize),
    /// A small model.
    Drafter,
}

impl DraftSource {
    /// Returns the index of the source's figures.
    fn index(self) -> usize {
        usize::from(self == DraftSource::Drafter)
    }

    /// Returns the evidence before drafted token `i`: the tokens of the match, or the token's place in the draft.
    fn evidence(self, i: usize) -> usize {
        match self {
            DraftSource::Repetition(matched) => matched + i,
            DraftSource::Drafter => i + 1,
        }
    }
}

/// Time of a pass, and what it held.
#[derive(Clone, Copy, Debug)]
pub struct PassTime {
    /// Seconds, without the making of drafts.
    pub seconds: f64,
    /// Streams of which the pass had tokens, each with one and its draft; 1 to [`MOST_STREAMS`].
    pub streams: usize,
    /// Drafted tokens of all streams.
    pub drafted: usize,
}

/// Room for a stream's draft.
#[derive(Clone, Copy, Debug)]
pub struct DraftRoom {
    /// Tokens that follow the prompt.
    pub generated: usize,
    /// Tokens that are still wanted.
    pub left: usize,
    /// Streams of the pass, 1 to [`MOST_STREAMS`].
    pub streams: usize,
    /// Drafted tokens of the other streams.
    pub drafted: usize,
    /// Seconds that a drafter may take before the pass.
    pub seconds: f64,
}

impl DraftRoom {
    /// Returns the room of a stream that runs alone.
    pub fn alone(generated: usize, left: usize) -> DraftRoom {
        DraftRoom { generated, left, streams: 1, drafted: 0, seconds: f64::INFINITY }
    }
}

/// Costs of passes of a number of streams.
#[derive(Clone, Debug)]
struct PassCosts {
    streams: usize,
    /// Seconds of a plain pass at the moment; none before one was measured.
    plain: Option<f64>,
    drafts_since_plain: usize,
    /// Costs by number of drafted tokens; the first is not used.
    costs: Vec<Cost>,
}

impl PassCosts {
    fn is_measured(&self, drafted: usize) -> bool {
        self.costs[drafted].weight > 0.0
    }

    /// Estimates the costs by number of drafted tokens. What the next shorter measured length lets assume counts as one measurement.
    fn costs(&self) -> Vec<f64> {
        let mut costs = vec![1.0];
        let (mut shorter, mut slope) = (0, ASSUMED / self.streams as f64);
        for (k, Cost { mean, weight }) in self.costs.iter().enumerate().skip(1) {
            let assumed = costs[shorter] + slope * (k - shorter) as f64;
            if *weight == 0.0 {
                costs.push(assumed);
                continue;
            }
            let cost = (mean.powf(*weight) * assumed).powf(1.0 / (weight + 1.0)).max(1.0);
            costs.push(cost);
            (shorter, slope) = (k, ASSUMED * (cost - 1.0) / k as f64);
        }
        costs
    }

    /// Adds the time of a pass with `drafted` tokens, and returns its cost as far as it counts. Passes before the first plain one
    /// count as plain.
    fn note(&mut self, drafted: usize, seconds: f64) -> f64 {
        let seconds = seconds.max(1e-9);
        let Some(plain) = &mut self.plain else {
            self.plain = (drafted == 0).then_some(seconds);
            return 1.0;
        };
        let before = *plain;
        self.costs.iter_mut().for_each(|cost| cost.weight *= FORGETTING);
        let expected = self.costs()[drafted];
        let surprise = seconds / (before * expected);
        let counted = surprise.clamp(1.0 / DISTURBED, DISTURBED);
        let factor = if surprise < 1.0 { surprise.powf(FASTER) } else { counted.powf(SLOWER) };
        self.plain = Some(before * factor);
        if drafted == 0 {
            self.drafts_since_plain = 0;
            return 1.0;
        }
        self.drafts_since_plain += 1;
        let cost = &mut self.costs[drafted];
        let weight = (cost.weight + 1.0).min(MEMORY);
        cost.mean = match cost.weight {
            0.0 => expected * counted,
            _ => cost.mean * counted.powf(1.0 / weight),
        };
        cost.weight = weight;
        (expected * counted).max(1.0)
    }
}

/// Seconds of a drafter at the moment.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct DrafterTime {
    /// For a drafted token.
    pub making: f64,
    /// For a token that it reads beside others.
    pub reading: f64,
}

/// Costs of passes and acceptance of drafts: what one generation learns for the next.
#[derive(Clone, Debug)]
pub struct DraftStatistics {
    /// Costs of passes by number of streams, from 1.
    passes: [PassCosts; MOST_STREAMS],
    /// Acceptance by source.
    acceptance: [Acceptance; 2],
    /// Seconds of the drafter; none before they were measured.
    pub(super) drafter: Option<DrafterTime>,
}

impl DraftStatistics {
    /// Makes statistics of drafts of at most `draft_max` tokens, without measurements.
    pub fn new(draft_max: usize) -> DraftStatistics {
        let costs = |i| PassCosts {
            streams: i + 1,
            plain: None,
            drafts_since_plain: 0,
            costs: vec![Cost::default(); draft_max + 1],
        };
        DraftStatistics { passes: std::array::from_fn(costs), acceptance: Default::default(), drafter: None }
    }

    /// Returns the largest number of drafted tokens that the statistics are made for.
    pub fn draft_max(&self) -> usize {
        self.passes[0].costs.len() - 1
    }

    /// Adds the time of a pass, and returns its cost as far as it counts.
    pub(super) fn note_time(&mut self, time: PassTime) -> f64 {
        self.passes[time.streams - 1].note(time.drafted, time.seconds)
    }
}

/// Moves a time towards `seconds`, of which `expected` were expected.
fn correct(time: &mut f64, seconds: f64, expected: f64) {
    let surprise = seconds / expected.max(1e-9);
    *time *= surprise.clamp(1.0 / DISTURBED, DISTURBED).powf(SLOWER);
}

/// Choice of drafts in one generation.
#[derive(Clone, Debug)]
pub struct Controller {
    statistics: DraftStatistics,
    /// Numbers of drafted tokens to choose from, whose passes are prepared.
    pub(super) lengths: Vec<usize>,
    /// Tokens of all passes, and what drafts gained, in plain passes.
    tokens: f64,
    gained: f64,
    /// Passes and their seconds, by number of drafted tokens.
    passes: Vec<(u64, f64)>,
    report: SpeculationReport,
    sources: [SourceReport; 2],
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
    /// Figures by source: repetitions, then the drafter; empty without one.
    #[serde(skip_serializing_if = "Vec::is_empty")]
    pub sources: Vec<SourceReport>,
    /// For each length of a pass in this generation.
    pub passes: Vec<MeasuredPass>,
    /// For each draft length. Empty until a pass for one token was measured.
    pub break_even: Vec<BreakEven>,
}

/// Figures of the drafts of one source.
#[derive(Clone, Debug, PartialEq, serde::Serialize)]
pub struct SourceReport {
    /// Name of the source.
    pub source: &'static str,
    /// Tokens of all drafts.
    pub drafted: u64,
    /// Drafted tokens that were accepted.
    pub accepted: u64,
    /// Milliseconds for making drafts, and for reading what comes before them.
    pub ms: f64,
    /// Tokens before which all were accepted, and those of them that were, by place in the draft.
    pub places: Vec<[u64; 2]>,
}

/// Time of the passes over a number of tokens.
#[derive(Clone, Copy, Debug, PartialEq, serde::Serialize)]
pub struct MeasuredPass {
    /// Tokens of a pass.
    pub tokens: usize,
    /// Mean milliseconds of a pass.
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
    /// True if the pass was measured; its cost is an estimate otherwise.
    pub is_measured: bool,
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
    /// Makes a controller for one generation that begins with what others have learned, and chooses from `lengths`.
    pub fn new(statistics: DraftStatistics, lengths: Vec<usize>) -> Controller {
        let passes = vec![(0, 0.0); statistics.draft_max() + 1];
        let report = SpeculationReport::default();
        let of = |source| SourceReport { source, drafted: 0, accepted: 0, ms: 0.0, places: Vec::new() };
        let sources = ["repetition", "drafter"].map(of);
        Controller { statistics, lengths, tokens: 0.0, gained: 0.0, passes, report, sources }
    }

    /// Returns what this generation and those before it have learned.
    pub fn statistics(&self) -> &DraftStatistics {
        &self.statistics
    }

    /// Returns what may be lost now, in tokens of this stream, when `left` tokens are still wanted.
    fn account(&self, left: usize) -> f64 {
        self.gained + SHARE * (self.tokens + HORIZON.min(left as f64))
    }

    /// Returns how many tokens the drafter may read for drafts in such a room: none where its drafts would not pay anyway.
    pub fn affordable_tokens(&mut self, room: &DraftRoom) -> usize {
        let pays = self.best(DraftSource::Drafter, self.statistics.draft_max(), room, f64::INFINITY).0 > 0;
        let Some((drafter, plain)) = self.drafter_and_plain(room).filter(|_| pays) else { return 0 };
        let passes = READING * self.account(room.left) / room.streams as f64;
        // Casting a negative number gives 0.
        (passes * plain / drafter.reading.max(1e-9)) as usize
    }

    fn drafter_and_plain(&self, room: &DraftRoom) -> Option<(DrafterTime, f64)> {
        Some((self.statistics.drafter?, self.statistics.passes[room.streams - 1].plain?))
    }

    /// Chooses the number of tokens of a draft from `source`, at most `most`. Returns 0 where no draft gains or can be afforded.
    pub fn choose(&mut self, source: DraftSource, most: usize, room: &DraftRoom) -> usize {
        let (best, _) = self.best(source, most, room, self.account(room.left));
        self.report.fallbacks += u64::from(best == 0 && source != DraftSource::Drafter);
        best
    }

    /// Returns the number of tokens of the draft with the most tokens per time that `account` pays for, and that rate.
    fn best(&mut self, source: DraftSource, most: usize, room: &DraftRoom, account: f64) -> (usize, f64) {
        let streams = room.streams as f64;
        let drafter = match (source, self.drafter_and_plain(room)) {
            (DraftSource::Repetition(_), _) => 0.0,
            (DraftSource::Drafter, Some((drafter, plain))) => drafter.making / plain,
            (DraftSource::Drafter, None) => return (0, 0.0),
        };
        let passes = &self.statistics.passes[room.streams - 1];
        let costs = passes.costs();
        let before = costs[room.drafted.min(costs.len() - 1)];
        let (mut tokens, mut survives) = (streams, 1.0);
        let mut best = (0, streams / before);
        if passes.plain.is_none() || passes.drafts_since_plain as f64 >= MEMORY {
            return best;
        }
        let acceptance = &mut self.statistics.acceptance[source.index()];
        for k in 1..=most.min((costs.len() - 1).saturating_sub(room.drafted)) {
            survives *= acceptance.estimate(source.evidence(k - 1), PRIOR[source.index()]);
            tokens += survives;
            let (all, making) = (room.drafted + k, drafter * k as f64);
            // A pass that was never measured may take as long as one pass for each of its tokens.
            let is_measured = passes.is_measured(all);
            let dearest = if is_measured { costs[all] } else { costs[all].max(1.0 + all as f64 / streams) };
            let is_affordable = streams * (dearest + making - before) <= account;
            let rate = tokens / (costs[all] + making);
            if rate > best.1 && is_affordable && self.lengths.contains(&k) {
                best = (k, rate);
            }
        }
        best
    }

    /// Notes that the drafter read `tokens` tokens in so many seconds, beside `streams` streams.
    pub fn note_reading(&mut self, tokens: usize, seconds: f64, room: &DraftRoom) {
        if let Some((_, plain)) = self.drafter_and_plain(room) {
            self.gained -= seconds / plain * room.streams as f64;
        }
        self.sources[DraftSource::Drafter.index()].ms += seconds * 1e3;
        if let Some(DrafterTime { reading, .. }) = &mut self.statistics.drafter {
            let expected = *reading * tokens as f64;
            correct(reading, seconds, expected);
        }
    }

    /// Notes whether the token after a match of `matched` tokens was the one that a draft would have had, which was not made.
    pub fn note_followed(&mut self, matched: usize, was_right: bool) {
        let source = DraftSource::Repetition(matched);
        self.statistics.acceptance[source.index()].note(matched, was_right);
    }

    /// Notes a pass in which this stream had one token and `drafted` more from `source`, and the seconds that its draft took before.
    pub fn note(
        &mut self,
        source: DraftSource,
        (drafted, accepted): (usize, usize),
        time: PassTime,
        making: f64,
    ) {
        if time.drafted >= self.passes.len() {
            return;
        }
        if time.streams == 1 {
            let (passes, seconds) = &mut self.passes[drafted];
            (*passes, *seconds) = (*passes + 1, *seconds + time.seconds);
        }
        self.tokens += (accepted + 1) as f64;
        let is_drafter = source == DraftSource::Drafter && drafted > 0;
        if !is_drafter {
            self.statistics.acceptance[DraftSource::Drafter.index()].fade();
        }
        let streams = time.streams as f64;
        let cost = self.statistics.note_time(time);
        let making_passes = making / self.statistics.passes[time.streams - 1].plain.unwrap_or(f64::INFINITY);
        self.gained -= making_passes * streams;
        if drafted == 0 {
            return;
        }
        if let Some(DrafterTime { making: token, .. }) =
            self.statistics.drafter.as_mut().filter(|_| is_drafter)
        {
            let expected = *token * drafted as f64;
            correct(token, making, expected);
        }
        let figures = &mut self.sources[source.index()];
        figures.drafted += drafted as u64;
        figures.accepted += accepted as u64;
        figures.ms += making * 1e3;
        // The streams share the cost of a pass by their drafted tokens.
        self.gained += accepted as f64 - streams * (cost - 1.0) * drafted as f64 / time.drafted as f64;
        // The first refused token counts, too.
        for i in 0..(accepted + 1).min(drafted) {
            self.statistics.acceptance[source.index()].note(source.evidence(i), i < accepted);
            if figures.places.len() == i {
                figures.places.push([0, 0]);
            }
            figures.places[i][0] += 1;
            figures.places[i][1] += u64::from(i < accepted);
        }
        self.report.verifier_calls += 1;
        self.report.drafted += drafted as u64;
        self.report.accepted += accepted as u64;
    }

    /// Returns the figures so far.
    pub fn report(&self) -> SpeculationReport {
        let passes = self.passes.iter().enumerate().filter(|(_, (n, _))| *n > 0);
        let pass = |(k, &(calls, seconds)): (usize, &(u64, f64))| MeasuredPass {
            tokens: k + 1,
            ms_per_call: seconds * 1e3 / calls as f64,
            calls,
        };
        let alone = &self.statistics.passes[0];
        let costs = if alone.plain.is_some() { alone.costs() } else { Vec::new() };
        SpeculationReport {
            sources: self.sources.to_vec(),
            acceptance: self.report.accepted as f64 / (self.report.drafted as f64).max(1.0),
            passes: passes.map(pass).collect(),
            break_even: (1..costs.len())
                .map(|drafted| BreakEven {
                    drafted,
                    acceptance: break_even(costs[drafted], drafted),
                    is_measured: alone.is_measured(drafted),
                })
                .collect(),
            ..self.report.clone()
        }
    }
}

#[cfg(test)]
#[path = "controller_tests.rs"]
mod tests;
