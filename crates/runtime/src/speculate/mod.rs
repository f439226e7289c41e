//! Speculative decoding: drafts from repetitions or of a small model, verified in one pass, and only where they pay.
//!
//! ```text
//! tokens so far --ngrams, small_model--> draft d1..dk --one pass over [last, d1..dk]--> k + 1 rows of logits
//! row i chooses a token as plain decoding would; drafts that agree are kept, and the sequence is cut back after them
//! ```
//! A token has the same bits in a pass of several tokens and alone. Tokens are chosen one by one from the same rows by the same
//! sampler. So the tokens are those of plain decoding, at any temperature.

mod controller;
mod ngrams;
mod small_model;

pub use controller::{
    BreakEven, Controller, DraftSource, DraftStatistics, MeasuredPass, SourceReport, SpeculationReport,
    break_even,
};
pub use ngrams::{Corpus, Ngrams};

use crate::model::{Logits, MOST_UNDONE, Model, Sequence};
use crate::sampler::Sampler;
use anemoe_io::locked;
use std::sync::{Arc, Mutex};
use std::time::Instant;

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
    /// For measurements: the tokens to draft at each place after the prompt, instead of repetitions.
    pub replay: Option<Arc<Vec<u32>>>,
    /// A small model with the same tokens, which drafts where nothing repeats.
    pub drafter: Option<Arc<Model>>,
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
    /// Source of the draft, and the seconds that it took.
    source: DraftSource,
    making: f64,
    /// True if there was a match that no draft was worth.
    fell_back: bool,
}

impl Drafter {
    /// Makes a drafter that has seen no tokens. Mode `auto` drafts the lengths that the model has prepared.
    pub fn new(options: Speculation, model: &Model) -> Drafter {
        let corpus = options.corpus.clone().map(|corpus| ngrams::Walk::new(corpus, options.ngram_max));
        let lengths = draft_lengths(&options).filter(|drafted| model.has_prepared(drafted + 1, Logits::All));
        let controller = Controller::new(options.statistics.get(options.draft_max), lengths.collect());
        Drafter {
            ngrams: Ngrams::new(options.ngram_max),
            corpus,
            controller,
            pass: Vec::new(),
            followed: Followed::default(),
            source: DraftSource::Repetition(0),
            making: 0.0,
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

    /// Plans the next pass: `newest`, which no pass has seen, and a draft after it if that pays. `generated` tokens follow the
    /// prompt, and `left` are still wanted. `sampler` will choose them.
    ///
    /// # Errors
    /// The small model fails.
    pub fn plan(
        &mut self,
        model: &Model,
        sequence: &mut Sequence,
        newest: u32,
        (generated, left): (usize, usize),
        sampler: &Sampler,
    ) -> crate::Result<()> {
        self.plan_plain(newest);
        if self.options.mode == Mode::Off {
            return Ok(());
        }
        let room = model.chain().model.max_context.saturating_sub(sequence.position() + 1);
        let room = model.most_to_undo(sequence, room.min(left.saturating_sub(1)));
        let most = room.min(self.options.draft_max);
        if most == 0 {
            return Ok(());
        }
        let started = Instant::now();
        self.repeat(generated, most, left);
        if self.drafted() == 0 && self.options.replay.is_none() {
            let vocabulary = model.chain().model.vocab_size;
            self.ask_drafter(sequence, generated, (most, left), (sampler, vocabulary))?;
        }
        self.making = started.elapsed().as_secs_f64();
        Ok(())
    }

    /// Brings the small model to the tokens of a prompt, and measures the time of its last one.
    ///
    /// # Errors
    /// The small model fails.
    pub fn read(&mut self, sequence: &mut Sequence) -> crate::Result<()> {
        while self.options.mode != Mode::Off && !self.follow(sequence)? {}
        Ok(())
    }

    /// Brings the small model nearer to the tokens of `sequence`. Returns true if it has all of them, or cannot have them.
    fn follow(&mut self, sequence: &mut Sequence) -> crate::Result<bool> {
        let Some(small) = self.options.drafter.clone() else { return Ok(true) };
        if sequence.position() == 0 || !small_model::has_room(&small, sequence.ids(), 0) {
            return Ok(true);
        }
        let mut own = sequence.take_companion(&small);
        let seconds = small_model::follow(&small, &mut own, sequence.ids())?;
        sequence.companion = Some(own);
        seconds.into_iter().for_each(|seconds| self.controller.note_drafter(seconds));
        Ok(seconds.is_some())
    }

    /// Appends a draft of the small model to the pass. Before the first one it reads the prompt, a pass of it at a time.
    fn ask_drafter(
        &mut self,
        sequence: &mut Sequence,
        generated: usize,
        (most, left): (usize, usize),
        with: (&Sampler, usize),
    ) -> crate::Result<()> {
        let Some(small) = self.options.drafter.clone() else { return Ok(()) };
        let read = sequence.companion.as_ref().map_or(0, |own| own.shared_with(sequence.ids()));
        let lacks_prompt = read + generated < sequence.position();
        if (lacks_prompt || !self.controller.statistics().knows_drafter()) && !self.follow(sequence)? {
            return Ok(());
        }
        let n = match self.options.mode {
            Mode::Auto => self.controller.choose(DraftSource::Drafter, most, left),
            _ => most,
        };
        let ids = [sequence.ids(), self.pass.as_slice()].concat();
        if n == 0 || !small_model::has_room(&small, &ids, n) {
            return Ok(());
        }
        self.source = DraftSource::Drafter;
        let mut own = sequence.take_companion(&small);
        small_model::draft(&small, &mut own, (ids.as_slice(), n), with, &mut self.pass)?;
        sequence.companion = Some(own);
        Ok(())
    }

    /// Plans a pass over only `newest`.
    pub fn plan_plain(&mut self, newest: u32) {
        self.fell_back = false;
        (self.source, self.making) = (DraftSource::Repetition(0), 0.0);
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

    /// Returns the seconds that the draft of the pass took.
    pub fn making(&self) -> f64 {
        self.making
    }

    /// Tells whether the pass has no draft although there was a match.
    pub fn fell_back(&self) -> bool {
        self.fell_back
    }

    /// Tells whether `id`, chosen from row `row` of the pass's logits, is the drafted token, so that the next row counts.
    pub fn agrees(&self, row: usize, id: u32) -> bool {
        self.pass.get(row + 1) == Some(&id)
    }

    /// Cuts `sequence` back after the first `right` tokens of the draft. Notes the time of the pass, in seconds without
    /// the making of the draft, if it is known for this sequence alone.
    ///
    /// # Errors
    /// The states cannot be cut back.
    pub fn settle(
        &mut self,
        model: &Model,
        sequence: &mut Sequence,
        right: usize,
        seconds: Option<f64>,
    ) -> crate::Result<()> {
        let started = Instant::now();
        let wrong = self.drafted().saturating_sub(right);
        if wrong > 0 {
            model.truncate(sequence, sequence.position() - wrong)?;
        }
        if let Some(seconds) = seconds {
            let seconds = seconds + started.elapsed().as_secs_f64();
            self.controller.note(self.source, (self.drafted(), right), seconds, self.making);
        }
        Ok(())
    }

    /// Returns the figures of the drafts; none if drafting is off.
    pub fn report(&self) -> Option<SpeculationReport> {
        (self.options.mode != Mode::Off).then(|| self.controller.report())
    }

    /// Appends a repetition to the pass: at most `most` tokens that may follow the `generated` ones, and none where a pass over
    /// them would not pay.
    fn repeat(&mut self, generated: usize, most: usize, left: usize) {
        let (length, next) = match &self.options.replay {
            Some(tokens) => (self.options.ngram_max, tokens.get(generated..).unwrap_or_default()),
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
            Mode::Auto => self.controller.choose(self.source, most, left),
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
    if let Some(small) = &options.drafter {
        (1..=2).for_each(|tokens| small.prepare(tokens, Logits::Last));
    }
    let is_small = model.chain().shards.iter().map(|s| s.bytes).sum::<u64>() <= SMALL_BUNDLE;
    draft_lengths(options).try_for_each(|drafted| {
        model.prepare(drafted + 1, Logits::All);
        if is_small { measure_draft(model, options, drafted) } else { Ok(()) }
    })
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
                statistics.note_time(drafted, started.elapsed().as_secs_f64());
            }
        }
    }
    options.statistics.set(&statistics);
    Ok(())
}
