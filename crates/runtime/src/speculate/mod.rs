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

use crate::model::MOST_UNDONE;
use std::sync::Arc;

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
pub struct Drafter {
    options: Speculation,
    ngrams: Ngrams,
    corpus: Option<ngrams::Walk>,
    /// Times and acceptance.
    pub controller: Controller,
    draft: Vec<u32>,
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
            draft: Vec::new(),
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

    /// Tokens that may come next behind `generated` ones, `most` at most, and none where a pass over them would not pay.
    /// `left` tokens are still wanted.
    pub fn draft(&mut self, generated: usize, most: usize, left: usize) -> &[u32] {
        self.draft.clear();
        let most = most.min(self.options.draft_max);
        if self.options.mode == Mode::Off || most == 0 {
            return &[];
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
            return &[];
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
        self.draft.extend(next.iter().take(n));
        // A text that goes on as it repeats.
        for i in next.len()..n {
            self.draft.push(self.draft[i - next.len()]);
        }
        &self.draft
    }

    /// Notes a pass over the last token and the draft: the seconds it took, and the tokens of the draft that were accepted.
    pub fn note(&mut self, seconds: f64, drafted: usize, accepted: usize) {
        self.controller.note(self.matched, drafted, accepted, seconds);
    }
}
