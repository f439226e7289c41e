//! Chooses the length of each draft by expected tokens per second, within a loss account.
//!
//! ```text
//! c(k)     cost of a pass over one token and k drafted ones, in plain passes; measured
//! a(m)     probability that the token after a match of m tokens is the drafted one; measured
//! E(k)   = 1 + a(m) + a(m) a(m + 1) + ..      expected tokens of the pass
//! k*     = argmax E(k) / c(k)                 tokens in the time of a plain pass
//! draft if E(k*) / c(k*) > 1  and  c(k) - 1 <= account
//! account = SHARE * tokens + sum over drafts of (accepted + 1) - c(k)
//! ```
//! The account bounds the loss: a draft of which nothing is right costs `c(k) - 1`, and has to be paid from the share or from what
//! drafts gained before. So short drafts come first, and their gains pay for longer ones.
//!
//! Repetitions that are not drafted are compared with the next tokens all the same. So their acceptance is known before any time
//! is spent. A drafter costs its own time for each token, which is measured and added to c(k); its acceptance is known by drafts
//! alone, and what is known fades, so that it is tried again as the account allows.
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

    /// Estimates the probability after a match of `matched` tokens; one half where nothing was compared.
    fn estimate(&mut self, matched: usize) -> f64 {
        let bucket = self.bucket(matched);
        (bucket.accepted + 0.5) / (bucket.compared + 1.0)
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
    /// What followed the same tokens before: a match of so many.
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

/// Costs of passes and acceptance of drafts: what one generation learns for the next.
#[derive(Clone, Debug)]
pub struct DraftStatistics {
    /// Seconds of a plain pass at the moment; none before one was measured.
    plain: Option<f64>,
    drafts_since_plain: usize,
    /// Costs by number of drafted tokens; the first is not used.
    costs: Vec<Cost>,
    /// Acceptance by source.
    acceptance: [Acceptance; 2],
    /// Seconds of the drafter for a token at the moment; none before one was measured.
    drafter: Option<f64>,
}

impl DraftStatistics {
    /// Makes statistics of drafts of at most `draft_max` tokens, without measurements.
    pub fn new(draft_max: usize) -> DraftStatistics {
        DraftStatistics {
            plain: None,
            drafts_since_plain: 0,
            costs: vec![Cost::default(); draft_max + 1],
            acceptance: Default::default(),
            drafter: None,
        }
    }

    /// Returns the largest number of drafted tokens that the statistics are made for.
    pub fn draft_max(&self) -> usize {
        self.costs.len() - 1
    }

    fn is_measured(&self, drafted: usize) -> bool {
        self.costs[drafted].weight > 0.0
    }

    /// Estimates the costs by number of drafted tokens. What the next shorter measured length lets assume counts as one measurement.
    fn costs(&self) -> Vec<f64> {
        let mut costs = vec![1.0];
        let (mut shorter, mut slope) = (0, ASSUMED);
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

    /// Adds the seconds that the drafter took for a token.
    pub(super) fn note_drafter(&mut self, seconds: f64) {
        let before = self.drafter.unwrap_or(seconds);
        let surprise = (seconds / before.max(1e-9)).clamp(1.0 / DISTURBED, DISTURBED);
        self.drafter = Some(before * surprise.powf(SLOWER));
    }

    /// Tells whether a token of the drafter was measured.
    pub(super) fn knows_drafter(&self) -> bool {
        self.drafter.is_some()
    }

    /// Adds the time of a pass with `drafted` tokens, and returns its cost as far as it counts. Passes before the first plain one
    /// count as plain.
    pub(super) fn note_time(&mut self, drafted: usize, seconds: f64) -> f64 {
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

/// Choice of drafts in one generation.
#[derive(Clone, Debug)]
pub struct Controller {
    statistics: DraftStatistics,
    /// Numbers of drafted tokens to choose from, whose passes are prepared.
    lengths: Vec<usize>,
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
    /// Figures by source: repetitions, then the drafter.
    pub sources: Vec<SourceReport>,
    /// For each length of a pass in this generation.
    pub passes: Vec<MeasuredPass>,
    /// For each draft length. Empty until a pass for one token was measured.
    pub break_even: Vec<BreakEven>,
}

/// Figures of the drafts of one source.
#[derive(Clone, Copy, Debug, PartialEq, serde::Serialize)]
pub struct SourceReport {
    /// Name of the source.
    pub source: &'static str,
    /// Tokens of all drafts.
    pub drafted: u64,
    /// Drafted tokens that were accepted.
    pub accepted: u64,
    /// Milliseconds for making drafts.
    pub ms: f64,
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
        let passes = vec![(0, 0.0); statistics.costs.len()];
        let report = SpeculationReport::default();
        let of = |source| SourceReport { source, drafted: 0, accepted: 0, ms: 0.0 };
        let sources = ["repetition", "drafter"].map(of);
        Controller { statistics, lengths, tokens: 0.0, gained: 0.0, passes, report, sources }
    }

    /// Returns what this generation and those before it have learned.
    pub fn statistics(&self) -> &DraftStatistics {
        &self.statistics
    }

    /// Notes the seconds that the drafter took for a token.
    pub(super) fn note_drafter(&mut self, seconds: f64) {
        self.statistics.note_drafter(seconds);
    }

    /// Chooses the number of tokens of a draft from `source`, at most `most`, when `left` tokens are still wanted. Returns 0
    /// where no draft gains or can be afforded.
    pub fn choose(&mut self, source: DraftSource, most: usize, left: usize) -> usize {
        let statistics = &mut self.statistics;
        let costs = statistics.costs();
        let drafter = match (source, statistics.drafter, statistics.plain) {
            (DraftSource::Repetition(_), ..) => 0.0,
            (DraftSource::Drafter, Some(drafter), Some(plain)) => drafter / plain,
            (DraftSource::Drafter, ..) => return 0,
        };
        let account = self.gained + SHARE * (self.tokens + HORIZON.min(left as f64));
        let (mut tokens, mut survives) = (1.0, 1.0);
        let mut best = (0, 1.0);
        if statistics.plain.is_some() && (statistics.drafts_since_plain as f64) < MEMORY {
            for (k, cost) in costs.into_iter().enumerate().take(most + 1).skip(1) {
                survives *= statistics.acceptance[source.index()].estimate(source.evidence(k - 1));
                tokens += survives;
                let making = drafter * k as f64;
                // A pass that was never measured may take as long as one pass for each of its tokens.
                let dearest =
                    if statistics.is_measured(k) { cost } else { cost.max((k + 1) as f64) } + making;
                let cost = cost + making;
                if tokens / cost > best.1 && dearest - 1.0 <= account && self.lengths.contains(&k) {
                    best = (k, tokens / cost);
                }
            }
        }
        self.report.fallbacks += u64::from(best.0 == 0 && source != DraftSource::Drafter);
        best.0
    }

    /// Notes whether the token after a match of `matched` tokens was the one that a draft would have had, which was not made.
    pub fn note_followed(&mut self, matched: usize, was_right: bool) {
        let source = DraftSource::Repetition(matched);
        self.statistics.acceptance[source.index()].note(matched, was_right);
    }

    /// Notes a pass over one token and `drafted` more from `source`, and the seconds that its draft took before.
    pub fn note(
        &mut self,
        source: DraftSource,
        (drafted, accepted): (usize, usize),
        seconds: f64,
        making: f64,
    ) {
        let Some((passes, time)) = self.passes.get_mut(drafted) else { return };
        (*passes, *time) = (*passes + 1, *time + seconds);
        let tokens = (accepted + 1) as f64;
        self.tokens += tokens;
        let is_drafter = source == DraftSource::Drafter && drafted > 0;
        if !is_drafter {
            self.statistics.acceptance[DraftSource::Drafter.index()].fade();
        }
        let cost = self.statistics.note_time(drafted, seconds);
        if drafted == 0 {
            return;
        }
        if is_drafter {
            self.statistics.note_drafter(making / drafted as f64);
        }
        let figures = &mut self.sources[source.index()];
        figures.drafted += drafted as u64;
        figures.accepted += accepted as u64;
        figures.ms += making * 1e3;
        self.gained += tokens - cost - making / self.statistics.plain.unwrap_or(f64::INFINITY);
        // The first refused token counts, too.
        for i in 0..(accepted + 1).min(drafted) {
            self.statistics.acceptance[source.index()].note(source.evidence(i), i < accepted);
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
        let costs = if self.statistics.plain.is_some() { self.statistics.costs() } else { Vec::new() };
        let is_known = |s: &&SourceReport| s.source == "repetition" || self.statistics.knows_drafter();
        SpeculationReport {
            sources: self.sources.iter().filter(is_known).copied().collect(),
            acceptance: self.report.accepted as f64 / (self.report.drafted as f64).max(1.0),
            passes: passes.map(pass).collect(),
            break_even: (1..costs.len())
                .map(|drafted| BreakEven {
                    drafted,
                    acceptance: break_even(costs[drafted], drafted),
                    is_measured: self.statistics.is_measured(drafted),
                })
                .collect(),
            ..self.report.clone()
        }
    }
}

#[cfg(test)]
#[path = "controller_tests.rs"]
mod tests;
