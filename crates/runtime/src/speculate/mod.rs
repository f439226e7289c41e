//! Speculative decoding without a draft model: drafts from repetitions, verified in one pass, and only where that pays.
//!
//! ```text
//! tokens so far --ngrams--> draft d1..dk --one pass over [last, d1..dk]--> k + 1 rows of logits
//! row i chooses a token as plain decoding would; drafts that it agrees with are kept, the sequence is cut back behind them
//! ```
//! A token has the same bits in a pass of several tokens and alone, and tokens are chosen one by one from the same rows by the
//! same sampler. So the tokens are those of plain decoding, at any temperature.

mod controller;
mod ngrams;

pub use controller::{Controller, SpeculationReport, break_even};
pub use ngrams::{Corpus, Ngrams};

use crate::model::{Logits, MOST_UNDONE, Model, Sequence};
use std::sync::Arc;
use std::time::{Duration, Instant};

/// Condition for drafts.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Default)]
pub enum Mode {
    /// Never.
    #[default]
    Off,
    /// Whenever there is a match.
    Ngram,
    /// Only if it pays by measured times and acceptance.
    Auto,
}

/// Options of drafts.
#[derive(Clone, Debug)]
pub struct Speculation {
    /// Condition for drafts.
    pub mode: Mode,
    /// Most tokens of a draft.
    pub draft_max: usize,
    /// Fewest tokens that have to repeat before a draft is made.
    pub ngram_min: usize,
    /// Most tokens of a match that count.
    pub ngram_max: usize,
    /// Tokens that drafts may come from besides the sequence's own.
    pub corpus: Option<Arc<Corpus>>,
    /// For measurements: the token to draft at each place behind the prompt, in place of what repeats.
    pub replay: Option<Arc<Vec<u32>>>,
}

impl Default for Speculation {
    fn default() -> Self {
        Speculation { mode: Mode::Off, draft_max: 8, ngram_min: 2, ngram_max: 24, corpus: None, replay: None }
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
            return Err(format!("matches of {} to {} tokens", self.ngram_min, self.ngram_max));
        }
        Ok(())
    }
}

/// Tokens that were not drafted.
#[derive(Default)]
struct Followed {
    ids: Vec<u32>,
    /// Next of them.
    at: usize,
    /// Tokens of the match before the first of them.
    matched: usize,
}

/// Drafts for one sequence, and the controller that says how many tokens of them are verified.
///
/// A pass is planned ([`Drafter::plan`]), run by the caller, its rows choose tokens as long as they agree with the draft
/// ([`Drafter::agrees`]), and the sequence is cut back behind these ([`Drafter::settle`]).
pub struct Drafter {
    options: Speculation,
    ngrams: Ngrams,
    corpus: Option<ngrams::Walk>,
    controller: Controller,
    /// The newest token, and a draft behind it.
    pass: Vec<u32>,
    /// Draft that was not made, and its match: the tokens that come are compared with it.
    followed: Followed,
    /// Tokens of the match that the draft comes from.
    matched: usize,
}

impl Drafter {
    /// A drafter that has seen nothing.
    pub fn new(options: Speculation) -> Drafter {
        let corpus = options.corpus.clone().map(ngrams::Walk::new);
        let controller = Controller::new(options.draft_max);
        Drafter {
            ngrams: Ngrams::default(),
            corpus,
            controller,
            pass: Vec::new(),
            followed: Followed::default(),
            matched: 0,
            options,
        }
    }

    /// Sees the next token of the sequence.
    pub fn push(&mut self, id: u32) {
        if self.options.mode == Mode::Off {
            return;
        }
        let Followed { ids, at, matched } = &mut self.followed;
        if let Some(&drafted) = ids.get(*at) {
            self.controller.note_token(*matched + *at, drafted == id);
            *at = if drafted == id { *at + 1 } else { ids.len() };
        }
        self.ngrams.push(id);
        if let Some(corpus) = &mut self.corpus {
            corpus.push(id);
        }
    }

    /// Tells the controller what it takes at most to prepare a number of tokens, before one was prepared.
    pub fn assume_preparing(&mut self, time: Option<Duration>) {
        if let Some(time) = time {
            self.controller.assume_preparing(time.as_secs_f64());
        }
    }

    /// Sets what the next pass is over: `newest`, which no pass has seen, and a draft behind it where that pays. `generated` tokens
    /// are behind the prompt, and `left` are wanted yet. Gives the time that preparing such a pass took.
    pub fn plan(
        &mut self,
        model: &Model,
        sequence: &Sequence,
        newest: u32,
        generated: usize,
        left: usize,
    ) -> Duration {
        self.plan_plain(newest);
        if self.options.mode == Mode::Off {
            return Duration::ZERO;
        }
        let room = model.chain().model.max_context.saturating_sub(sequence.position() + 1);
        let room = model.most_to_undo(sequence, room.min(left.saturating_sub(1)));
        self.draft(generated, room, left);
        // What is prepared inside a pass would count as its time.
        if self.controller.is_prepared(self.drafted()) {
            return Duration::ZERO;
        }
        let started = Instant::now();
        model.prepare(self.pass.len(), self.wanted());
        let time = started.elapsed();
        self.controller.note_prepared(self.drafted(), time.as_secs_f64());
        time
    }

    /// Sets a pass over `newest` alone.
    pub fn plan_plain(&mut self, newest: u32) {
        self.pass.clear();
        self.pass.push(newest);
    }

    /// Tokens of the next pass, or of the last one; none before one was planned.
    pub fn pass(&self) -> &[u32] {
        &self.pass
    }

    /// Logits that the pass has to give.
    pub fn wanted(&self) -> Logits {
        if self.drafted() > 0 { Logits::All } else { Logits::Last }
    }

    /// Tokens of the pass that are a draft.
    pub fn drafted(&self) -> usize {
        self.pass.len().saturating_sub(1)
    }

    /// Tells whether `id`, chosen from row `row` of the pass's logits, is what was drafted there, so that the next row counts.
    pub fn agrees(&self, row: usize, id: u32) -> bool {
        self.pass.get(row + 1) == Some(&id)
    }

    /// Cuts `sequence` back behind the first `right` tokens of the draft, and notes what the pass took, in seconds, where it is
    /// known for it alone.
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
            self.controller.note(self.matched, self.drafted(), right, seconds);
        }
        Ok(())
    }

    /// Figures of the drafts, where any may be made.
    pub fn report(&self) -> Option<SpeculationReport> {
        (self.options.mode != Mode::Off).then(|| self.controller.report())
    }

    /// Appends to the pass what may come next behind `generated` tokens, `most` tokens at most, and none where a pass over them
    /// would not pay.
    fn draft(&mut self, generated: usize, most: usize, left: usize) {
        let most = most.min(self.options.draft_max);
        if most == 0 {
            return;
        }
        let (length, next) = match &self.options.replay {
            Some(tokens) => (self.options.ngram_max, tokens.get(generated..).unwrap_or_default()),
            None => {
                let own = self.ngrams.longest_match();
                let other = self.corpus.as_ref().map_or((0, &[][..]), |c| c.longest_match());
                if other.0 > own.0 && !other.1.is_empty() { other } else { own }
            }
        };
        self.matched = length.min(self.options.ngram_max);
        if self.matched < self.options.ngram_min || next.is_empty() {
            return;
        }
        let n = match self.options.mode {
            Mode::Auto => self.controller.choose(self.matched, most, left),
            _ => most,
        };
        let Followed { ids, at, matched } = &mut self.followed;
        if n > 0 {
            ids.clear();
        } else if *at >= ids.len() {
            ids.clear();
            ids.extend(next.iter().take(most));
            (*at, *matched) = (0, self.matched);
        }
        let first = self.pass.len();
        self.pass.extend(next.iter().take(n));
        // A text that goes on as it repeats.
        for i in next.len()..n {
            self.pass.push(self.pass[first + i - next.len()]);
        }
    }
}
