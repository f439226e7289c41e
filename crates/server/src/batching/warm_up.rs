//! Prepares likely passes while no job runs.

use anemoe_runtime::model::{Logits, Model, Request, Sequence};
use anemoe_runtime::speculate::{Speculation, draft_lengths, measure_draft, measure_drafter};
use std::time::{Duration, Instant};

/// Most time of all preparations together.
const BUDGET: Duration = Duration::from_secs(20);
/// Most sequences whose passes are prepared: the executor keeps functions for 32 numbers of tokens (`runtime/cpu`),
/// some for prompts.
const MAX_WARM_SEQUENCES: usize = 30;

/// Runs passes of 1, 2, 3 .. sequences, each also with a chunk of a prompt, so that their functions are ready before a
/// job needs them: a new number of tokens takes longer than a pass.
pub struct WarmUp {
    sequences: Vec<Sequence>,
    /// Lengths of drafts that are not measured yet, the next one last; the drafter is measured before the first.
    lengths: Vec<usize>,
    most: usize,
    left: Duration,
}

impl WarmUp {
    /// Makes a warm-up for passes of up to `most` sequences.
    pub fn new(most: usize, speculation: &Speculation) -> WarmUp {
        let mut lengths: Vec<usize> = draft_lengths(speculation).collect();
        lengths.reverse();
        WarmUp { sequences: Vec::new(), lengths, most: most.min(MAX_WARM_SEQUENCES), left: BUDGET }
    }

    /// Prepares the next passes. Returns false when there are none left.
    pub fn step(&mut self, model: &Model, speculation: &Speculation) -> bool {
        let started = Instant::now();
        // A stream that runs alone comes first: one length of drafts in a step, since a request waits for the step.
        if self.sequences.len() == 1
            && !self.left.is_zero()
            && let Some(drafted) = self.lengths.pop()
        {
            if drafted == 1 {
                measure_drafter(model, speculation);
            }
            if let Err(e) = measure_draft(model, speculation, drafted) {
                tracing::warn!("passes of drafts cannot be measured: {e}");
                self.lengths.clear();
            }
            self.left = self.left.saturating_sub(started.elapsed());
            return true;
        }
        if self.sequences.len() >= self.most || self.left.is_zero() {
            self.most = 0;
            self.sequences = Vec::new();
            return false;
        }
        let n = self.sequences.len();
        let chunk = model.most_tokens(None).saturating_sub(n).clamp(1, model.chain().model.max_context);
        let ran = self.pass(model, chunk).and_then(|()| {
            self.sequences.push(model.sequence());
            // Drafts of few streams have passes of as many tokens with logits.
            model.prepare(n + 1, Logits::All);
            self.pass(model, 0)
        });
        if let Err(e) = ran {
            tracing::warn!("passes of {n} sequences cannot be prepared: {e}");
            self.most = 0;
        }
        self.left = self.left.saturating_sub(started.elapsed());
        true
    }

    /// Runs one token of every sequence, and a chunk of `chunk` tokens of another sequence.
    fn pass(&mut self, model: &Model, chunk: usize) -> anemoe_runtime::Result<()> {
        let ids = vec![0; chunk];
        let mut prompt = model.sequence();
        self.sequences.iter_mut().for_each(Sequence::clear);
        let token = |sequence| Request { sequence, ids: &[0], logits: Logits::Last };
        let mut requests: Vec<Request<'_>> = self.sequences.iter_mut().map(token).collect();
        if chunk > 0 {
            requests.push(Request { sequence: &mut prompt, ids: &ids, logits: Logits::None });
        }
        model.forward(&mut requests).map(|_| ())
    }
}
