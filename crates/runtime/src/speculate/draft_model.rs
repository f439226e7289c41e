//! Models that draft for another one, the target: the one place that knows their kinds.

use super::small_model;
use super::wanted_draft::WantedDraft;
use crate::Result;
use crate::model::{AttachedAssistant, DraftStart, Logits, Model, Sequence};
use std::sync::atomic::{AtomicBool, Ordering};
use std::time::Instant;

/// Tokens that are read to measure the time of one.
const MEASURED: usize = 16;

/// Kind of a model that drafts.
pub enum DraftKind {
    /// A model with the same tokens and a sequence of its own.
    Small(Model),
    /// An assistant, which reads the caches of the target.
    Assistant(AttachedAssistant),
}

/// A model that drafts for a target. Its failures end drafts, and not generation.
pub struct DraftModel {
    kind: DraftKind,
    is_broken: AtomicBool,
}

impl DraftModel {
    /// Makes a drafter.
    pub fn new(kind: DraftKind) -> DraftModel {
        DraftModel { kind, is_broken: AtomicBool::new(false) }
    }

    /// Prepares its functions.
    pub fn prepare(&self) {
        match &self.kind {
            DraftKind::Small(small) => small_model::prepare(small),
            DraftKind::Assistant(assistant) => assistant.model().prepare(1, Logits::Last),
        }
    }

    /// Tells whether a call failed.
    pub fn is_broken(&self) -> bool {
        self.is_broken.load(Ordering::Relaxed)
    }

    /// Returns what `call` does; none if it fails, once with a warning, and if a call failed before.
    pub(super) fn attempt<T>(&self, call: impl FnOnce() -> Result<T>) -> Option<T> {
        if self.is_broken() {
            return None;
        }
        let e = match call() {
            Ok(result) => return Some(result),
            Err(e) => e,
        };
        if !self.is_broken.swap(true, Ordering::Relaxed) {
            tracing::warn!("the drafter failed, and drafts no more: {e}");
        }
        None
    }

    /// Returns the most tokens with which the drafter begins.
    pub(super) fn window(&self) -> usize {
        match &self.kind {
            DraftKind::Small(small) => small_model::window(small),
            DraftKind::Assistant(_) => usize::MAX,
        }
    }

    /// Returns how many tokens of `sequence` the drafter has, and how many it lacks; none if it cannot go on with what it has.
    pub(super) fn progress(&self, sequence: &Sequence) -> Option<(usize, usize)> {
        match &self.kind {
            DraftKind::Small(small) => small_model::progress(small, sequence),
            DraftKind::Assistant(_) => Some((sequence.position(), 0)),
        }
    }

    /// Lets the drafter begin anew with the newest `tokens` tokens of `sequence`, and returns how many it lacks then.
    pub(super) fn begin(&self, sequence: &mut Sequence, tokens: usize) -> usize {
        match &self.kind {
            DraftKind::Small(small) => small_model::begin(small, sequence, tokens),
            DraftKind::Assistant(_) => 0,
        }
    }

    /// Reads at most `most` of the tokens that the drafter lacks, in one pass, and returns how many.
    ///
    /// # Errors
    /// A package fails.
    pub(super) fn read(&self, sequence: &mut Sequence, most: usize) -> Result<usize> {
        match &self.kind {
            DraftKind::Small(small) => small_model::read(small, sequence, most),
            DraftKind::Assistant(_) => Ok(0),
        }
    }

    /// Appends tokens to `draft` that the drafter expects, after it has read what it lacks; fewer where its context ends.
    ///
    /// # Errors
    /// A package fails.
    pub(super) fn draft(
        &self,
        sequence: &mut Sequence,
        wanted: WantedDraft<'_>,
        draft: &mut Vec<u32>,
    ) -> Result<()> {
        match &self.kind {
            DraftKind::Small(small) => small_model::draft(small, sequence, wanted, draft),
            DraftKind::Assistant(assistant) => {
                let WantedDraft { target, newest, tokens, choose } = wanted;
                let start = DraftStart { token: newest, position: sequence.position() };
                assistant.draft(target, sequence, start, tokens, &mut |row| {
                    draft.push(choose(row));
                    draft.last().copied()
                })
            }
        }
    }

    /// Measures the seconds of a drafted token, and of a token that is read beside others, on a sequence of `target`.
    ///
    /// # Errors
    /// A package fails.
    pub(super) fn measure(&self, target: &Model) -> Result<(f64, f64)> {
        let tokens = MEASURED.min(target.chain().model.max_context).min(self.window());
        self.prepare();
        let mut sequence = target.sequence();
        target.append(&mut sequence, &vec![0; tokens], Logits::None, None)?;
        let (mut making, mut reading) = (0.0, 0.0);
        // The first time also touches memory for the first time.
        for _ in 0..2 {
            let started = Instant::now();
            let lacking = self.begin(&mut sequence, tokens);
            while self.read(&mut sequence, tokens)? > 0 {}
            reading = started.elapsed().as_secs_f64() / lacking.max(1) as f64;
            let started = Instant::now();
            let mut choose = |_: &mut [f32]| 0;
            let wanted = WantedDraft { target, newest: 0, tokens: 2, choose: &mut choose };
            self.draft(&mut sequence, wanted, &mut Vec::new())?;
            making = started.elapsed().as_secs_f64() / 2.0;
        }
        Ok((making, reading))
    }
}
