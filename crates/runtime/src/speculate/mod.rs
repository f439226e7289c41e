//! Speculative decoding: drafts from repetitions or of a small model, verified in one pass, and only where they pay.
//!
//! ```text
//! tokens so far --ngrams, small_model--> draft d1..dk --one pass over [last, d1..dk]--> k + 1 rows of logits
//! row i chooses a token as plain decoding would; drafts that agree are kept, and the sequence is truncated after them
//! ```
//! A token has the same bits in a pass of several tokens and alone. Tokens are chosen one by one from the same rows by the same
//! sampler. So the tokens are those of plain decoding, at any temperature.

mod controller;
mod draft_model;
mod ngrams;
mod small_model;
mod wanted_draft;

pub use controller::{
    BreakEven, Controller, DraftRoom, DraftSource, DraftStatistics, MOST_STREAMS, MeasuredPass, PassTime,
    SourceReport, SpeculationReport, break_even,
};
pub use draft_model::{DraftKind, DraftModel};
pub use ngrams::{Corpus, Ngrams};

use crate::model::{Logits, MOST_UNDONE, Model, Sequence};
use crate::sampler::Sampler;
use anemoe_io::locked;
use controller::DrafterTime;
use std::sync::{Arc, Mutex};
use std::time::Instant;
use wanted_draft::{CATCH_UP, WantedDraft};

/// Condition for drafting.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Default)]
pub enum Mode {
    /// Never draft.
    #[default]
    Off,
    /// Draft whenever there is a match or a drafter.
    Ngram,
    /// Draft only if it pays by measured times and acceptance.
    Auto,
}

/// Settings for drafting.
#[derive(Clone)]
pub struct Speculation {
    /// Condition for drafting.
    pub mode: Mode,
    /// Most tokens of a draft.
    pub draft_max: usize,
    /// Fewest tokens that have to repeat before a draft is made.
    pub ngram_min: usize,
    /// Most tokens of a match: of a longer repetition its newest tokens count, and what followed them last.
    pub ngram_max: usize,
    /// Tokens to find matches in, besides the sequence's own.
    pub corpus: Option<Arc<Corpus>>,
    /// For measurements: the tokens to draft at each place after the prompt, instead of repetitions and of a drafter's choices.
    pub replay: Option<Arc<Vec<u32>>>,
    /// A model with the same tokens, which drafts where nothing repeats.
    pub drafter: Option<Arc<DraftModel>>,
    /// Times and acceptance that generations of one model share: each begins with what those before it measured.
    pub statistics: SharedStatistics,
}

/// Statistics that the generations of a model share.
#[derive(Clone, Debug, Default)]
pub struct SharedStatistics(Arc<Mutex<Option<DraftStatistics>>>);

impl From<DraftStatistics> for SharedStatistics {
    fn from(statistics: DraftStatistics) -> SharedStatistics {
        SharedStatistics(Arc::new(Mutex::new(Some(statistics))))
    }
}

impl SharedStatistics {
    /// Returns the statistics of drafts of at most `draft_max` tokens; empty ones where none are known.
    fn get(&self, draft_max: usize) -> DraftStatistics {
        let known = locked(&self.0).clone().filter(|known| known.draft_max() == draft_max);
        known.unwrap_or_else(|| DraftStatistics::new(draft_max))
    }

    fn set(&self, statistics: &DraftStatistics) {
        *locked(&self.0) = Some(statistics.clone());
    }
}

impl Default for Speculation {
    fn default() -> Self {
        Speculation {
            mode: Mode::Off,
            draft_max: 8,
            ngram_min: 2,
            ngram_max: 24,
            corpus: None,
            replay: None,
            drafter: None,
            statistics: SharedStatistics::default(),
        }
    }
}

impl Speculation {
    /// Refuses settings that contradict each other.
    ///
    /// # Errors
    /// A length is zero, or the smallest match is longer than the largest.
    pub fn check(&self) -> Result<(), String> {
        if self.draft_max == 0 || self.ngram_min == 0 {
            return Err("a draft and a match have at least one token".into());
        }
        if self.draft_max > MOST_UNDONE {
            return Err(format!("drafts of {} tokens, where {MOST_UNDONE} are the most", self.draft_max));
        }
        if self.ngram_min > self.ngram_max {
            return Err(format!(
                "the shortest match has {} tokens, which is more than the {} of the longest",
                self.ngram_min, self.ngram_max
            ));
        }
        Ok(())
    }
}

/// A draft that was not made, compared with the tokens that come.
#[derive(Default)]
struct Followed {
    ids: Vec<u32>,
    /// Index of the next token to compare.
    at: usize,
    /// Tokens of the match before the first token.
    matched: usize,
}

/// Drafts for one sequence, with the controller that decides how many tokens are drafted.
///
/// [`Drafter::plan`] plans a pass, and the caller runs it. The rows of its logits choose tokens as long as they agree with the
/// draft ([`Drafter::agrees`]). [`Drafter::settle`] cuts the sequence back after these tokens.
pub struct Drafter {
    options: Speculation,
    ngrams: Ngrams,
    corpus: Option<ngrams::Walk>,
    controller: Controller,
    /// Tokens of the pass: the newest token, and the draft after it.
    pass: Vec<u32>,
    /// Draft that was not made, with its match: the next tokens are compared with it.
    followed: Followed,
    source: DraftSource,
    /// Seconds of the drafter for the draft, and for what it read before.
    making: f64,
    reading: f64,
    /// Seconds of the plan as a whole.
    planning: f64,
    /// True if there was a match that no draft was worth.
    fell_back: bool,
}

impl Drafter {
    /// Makes a drafter that has seen no tokens.
    pub fn new(options: Speculation) -> Drafter {
        let corpus = options.corpus.clone().map(|corpus| ngrams::Walk::new(corpus, options.ngram_max));
        let controller = Controller::new(options.statistics.get(options.draft_max), Vec::new());
        Drafter {
            ngrams: Ngrams::new(options.ngram_max),
            corpus,
            controller,
            pass: Vec::new(),
            followed: Followed::default(),
            source: DraftSource::Repetition(0),
            making: 0.0,
            reading: 0.0,
            planning: 0.0,
            fell_back: false,
            options,
        }
    }

    /// Adds the next token of the sequence.
    pub fn push(&mut self, id: u32) {
        if self.options.mode == Mode::Off {
            return;
        }
        let Followed { ids, at, matched } = &mut self.followed;
        if let Some(&drafted) = ids.get(*at) {
            self.controller.note_followed(*matched + *at, drafted == id);
            *at = if drafted == id { *at + 1 } else { ids.len() };
        }
        self.ngrams.push(id);
        if let Some(corpus) = &mut self.corpus {
            corpus.push(id);
        }
    }

    /// Plans the next pass: `newest`, which no pass has seen, and a draft after it if that pays. `sampler` will choose the tokens
    /// that follow.
    pub fn plan(
        &mut self,
        model: &Model,
        sequence: &mut Sequence,
        newest: u32,
        room: &DraftRoom,
        sampler: &Sampler,
    ) {
        self.plan_plain(newest);
        if self.options.mode == Mode::Off {
            return;
        }
        let most = model.chain().model.max_context.saturating_sub(sequence.position() + 1);
        let most = model.most_to_undo(sequence, most.min(room.left.saturating_sub(1)));
        let most = most.min(self.options.draft_max);
        if most == 0 {
            return;
        }
        let started = Instant::now();
        // Mode `auto` drafts the lengths whose passes are prepared.
        let others = room.streams + room.drafted;
        let is_prepared = |drafted: &usize| model.has_prepared(others + drafted, Logits::All);
        self.controller.lengths = draft_lengths(&self.options).filter(is_prepared).collect();
        let drafter = self.options.drafter.clone();
        if self.options.replay.is_none() || drafter.is_none() {
            self.repeat(most, room);
        }
        if let Some(drafter) = drafter.filter(|_| self.drafted() == 0) {
            let asked = drafter.attempt(|| self.ask(&drafter, model, sequence, (most, room), sampler));
            if asked.is_none() {
                // A draft that was half made when the drafter failed.
                self.pass.truncate(1);
            }
        }
        self.planning = started.elapsed().as_secs_f64();
    }

    /// Appends a draft of the drafter to the pass, once it has read what it needs: a pass of it at a time.
    fn ask(
        &mut self,
        drafter: &DraftModel,
        model: &Model,
        sequence: &mut Sequence,
        (most, room): (usize, &DraftRoom),
        sampler: &Sampler,
    ) -> crate::Result<()> {
        let paid = match self.options.mode {
            Mode::Auto => self.controller.affordable_tokens(room),
            _ => usize::MAX,
        };
        let (all, progress) = (sequence.position(), drafter.progress(sequence));
        let window = all.min(paid).min(drafter.window());
        let mut lacking = match progress {
            // Where much more can be paid than was read, the drafter reads it.
            Some((kept, lacking))
                if (lacking <= CATCH_UP || lacking / 2 <= paid)
                    && (kept + lacking == all || window / GROWTH < kept + lacking) =>
            {
                lacking
            }
            _ if window >= all.min(CATCH_UP) => drafter.begin(sequence, window),
            _ => return Ok(()),
        };
        if lacking > CATCH_UP {
            let reading = self.controller.statistics().drafter.map_or(0.0, |time| time.reading);
            // Casting infinity gives the largest integer.
            let most = ((room.seconds / reading) as usize).max(1);
            let started = Instant::now();
            let read = drafter.read(sequence, most)?;
            self.reading = started.elapsed().as_secs_f64();
            self.controller.note_reading(read, self.reading, room);
            lacking -= read.min(lacking);
        }
        if lacking > CATCH_UP {
            return Ok(());
        }
        let mut n = match self.options.mode {
            Mode::Auto => self.controller.choose(DraftSource::Drafter, most, room),
            _ => most,
        };
        let planted = self.options.replay.as_ref().map(|ids| ids.get(room.generated..).unwrap_or_default());
        n = planted.map_or(n, |ids| n.min(ids.len()));
        if n == 0 {
            return Ok(());
        }
        self.source = DraftSource::Drafter;
        let (mut sampler, mut i) = (sampler.ahead(), 0);
        let mut choose = |row: &mut [f32]| {
            let id = sampler.next(row) as u32;
            i += 1;
            planted.map_or(id, |ids| ids[i - 1])
        };
        let newest = self.pass[0];
        let wanted = WantedDraft { target: model, newest, tokens: n, choose: &mut choose };
        let started = Instant::now();
        let made = drafter.draft(sequence, wanted, &mut self.pass);
        self.making = started.elapsed().as_secs_f64();
        made
    }

    /// Plans a pass over only `newest`.
    pub fn plan_plain(&mut self, newest: u32) {
        self.fell_back = false;
        self.source = DraftSource::Repetition(0);
        (self.making, self.reading, self.planning) = (0.0, 0.0, 0.0);
        self.pass.clear();
        self.pass.push(newest);
    }

    /// Returns the tokens of the next pass, or of the last one; empty before one was planned.
    pub fn pass(&self) -> &[u32] {
        &self.pass
    }

    /// Returns which logits the pass has to compute.
    pub fn wanted(&self) -> Logits {
        if self.drafted() > 0 { Logits::All } else { Logits::Last }
    }

    /// Returns the number of drafted tokens in the pass.
    pub fn drafted(&self) -> usize {
        self.pass.len().saturating_sub(1)
    }

    /// Returns the seconds that planning the pass took, with the making of its draft.
    pub fn planning(&self) -> f64 {
        self.planning
    }

    /// Returns the seconds that the drafter took for the pass.
    pub fn drafter_seconds(&self) -> f64 {
        self.making + self.reading
    }

    /// Tells whether the draft of the pass is the drafter's.
    pub fn has_drafter_tokens(&self) -> bool {
        self.source == DraftSource::Drafter && self.drafted() > 0
    }

    /// Tells whether the pass has no draft although there was a match.
    pub fn fell_back(&self) -> bool {
        self.fell_back
    }

    /// Tells whether `id`, chosen from row `row` of the pass's logits, is the drafted token, so that the next row counts.
    pub fn agrees(&self, row: usize, id: u32) -> bool {
        self.pass.get(row + 1) == Some(&id)
    }

    /// Truncates `sequence` after the first `right` tokens of the draft. Notes the time of the pass, where it is known.
    ///
    /// # Errors
    /// The states cannot be truncated.
    pub fn settle(
        &mut self,
        model: &Model,
        sequence: &mut Sequence,
        right: usize,
        time: Option<PassTime>,
    ) -> crate::Result<()> {
        let started = Instant::now();
        let wrong = self.drafted().saturating_sub(right);
        if wrong > 0 {
            model.truncate(sequence, sequence.position() - wrong)?;
        }
        if let Some(time) = time {
            let seconds = time.seconds + started.elapsed().as_secs_f64();
            let time = PassTime { seconds, ..time };
            self.controller.note(self.source, (self.drafted(), right), time, self.making);
        }
        Ok(())
    }

    /// Returns the figures of the drafts; none if drafting is off.
    pub fn report(&self) -> Option<SpeculationReport> {
        let mut report = (self.options.mode != Mode::Off).then(|| self.controller.report())?;
        if self.options.drafter.is_none() {
            report.sources.clear();
        }
        Some(report)
    }

    /// Appends a repetition to the pass: at most `most` tokens, and none where a pass over them would not pay.
    fn repeat(&mut self, most: usize, room: &DraftRoom) {
        let (length, next) = match &self.options.replay {
            Some(tokens) => (self.options.ngram_max, tokens.get(room.generated..).unwrap_or_default()),
            None => {
                let own = self.ngrams.longest_match();
                let other = self.corpus.as_ref().map_or((0, &[][..]), |c| c.longest_match());
                if other.0 > own.0 && !other.1.is_empty() { other } else { own }
            }
        };
        self.source = DraftSource::Repetition(length);
        if length < self.options.ngram_min || next.is_empty() {
            return;
        }
        let n = match self.options.mode {
            Mode::Auto => self.controller.choose(self.source, most, room),
            _ => most,
        };
        self.fell_back = n == 0;
        let Followed { ids, at, matched } = &mut self.followed;
        if n > 0 {
            ids.clear();
        } else if *at >= ids.len() {
            ids.clear();
            ids.extend(next.iter().take(most));
            (*at, *matched) = (0, length);
        }
        let first = self.pass.len();
        self.pass.extend(next.iter().take(n));
        // A match near the end: the text is continued periodically.
        for i in next.len()..n {
            self.pass.push(self.pass[first + i - next.len()]);
        }
    }
}

impl Drop for Drafter {
    /// Hands what was measured to the next generation.
    fn drop(&mut self) {
        if self.options.mode != Mode::Off {
            self.options.statistics.set(self.controller.statistics());
        }
    }
}

/// Largest bundle for which preparing takes longer than a pass: 8 ms beside 0.3 ms of a pass with 11 MB of packages, and 13
/// beside 9 with 1.1 GB (2 processors of an EPYC of the fifth generation).
const SMALL_BUNDLE: u64 = 200_000_000;

/// Factor of the tokens that a drafter has from which on reading more pays: each reading is charged.
const GROWTH: usize = 4;

/// Passes of each length that [`measure_draft`] runs, the first one untimed.
const TIMED: usize = 4;

/// Returns the lengths of drafts that mode `auto` chooses from: the powers of two and the longest; none in other modes.
pub fn draft_lengths(options: &Speculation) -> impl Iterator<Item = usize> + use<> {
    let most = if options.mode == Mode::Auto { options.draft_max } else { 0 };
    (1..=most).filter(move |&drafted| drafted.is_power_of_two() || drafted == most)
}

/// Prepares the passes of drafts before the first token. If they take less time than preparing them, they are timed, too, so that
/// generations know from their first token which lengths pay.
///
/// # Errors
/// A pass fails.
pub fn prepare_drafts(model: &Model, options: &Speculation) -> crate::Result<()> {
    measure_drafter(model, options);
    let is_small = model.chain().shards.iter().map(|s| s.bytes).sum::<u64>() <= SMALL_BUNDLE;
    draft_lengths(options).try_for_each(|drafted| {
        model.prepare(drafted + 1, Logits::All);
        if is_small { measure_draft(model, options, drafted) } else { Ok(()) }
    })
}

/// Prepares the passes of the drafter and times them, so that generations know what its tokens cost.
pub fn measure_drafter(model: &Model, options: &Speculation) {
    let Some(drafter) = options.drafter.as_ref().filter(|_| options.mode == Mode::Auto) else { return };
    if let Some((making, reading)) = drafter.attempt(|| drafter.measure(model)) {
        let mut statistics = options.statistics.get(options.draft_max);
        statistics.drafter = Some(DrafterTime { making, reading });
        options.statistics.set(&statistics);
    }
}

/// Prepares a pass over `drafted` drafted tokens and times it in turn with plain passes.
///
/// # Errors
/// A pass fails.
pub fn measure_draft(model: &Model, options: &Speculation, drafted: usize) -> crate::Result<()> {
    model.prepare(drafted + 1, Logits::All);
    let mut statistics = options.statistics.get(options.draft_max);
    let mut sequence = model.sequence();
    for i in 0..TIMED {
        for (drafted, logits) in [(0, Logits::Last), (drafted, Logits::All)] {
            if sequence.position() + drafted >= model.chain().model.max_context {
                sequence.clear();
            }
            let ids = vec![0; drafted + 1];
            let started = Instant::now();
            model.append(&mut sequence, &ids, logits, None)?;
            // The first pass of a length also touches its memory for the first time.
            if i > 0 {
                let seconds = started.elapsed().as_secs_f64();
                statistics.note_time(PassTime { seconds, streams: 1, drafted });
            }
        }
    }
    options.statistics.set(&statistics);
    Ok(())
}
