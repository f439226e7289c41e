//! A running job.

use super::choice::{ChosenToken, choose};
use super::jobs::{AnswerEvent, EndReason, Job, JobFailure, Usage};
use super::shared::Shared;
use crate::grammar::AnswerGrammar;
use anemoe_runtime::Result;
use anemoe_runtime::model::Sequence;
use anemoe_runtime::sampler::Sampler;
use anemoe_runtime::speculate::{DraftRoom, Drafter, PassTime};
use anemoe_text::chat::StopStrings;
use anemoe_text::tokenizer::TextStream;
use std::time::Instant;

/// A job with its sequence.
pub struct RunningJob<'a> {
    /// The job.
    pub job: Job,
    /// States of the tokens that passes have run: the first of [`RunningJob::ids`].
    pub sequence: Sequence,
    /// Tokens of prompt and answer.
    pub ids: Vec<u32>,
    /// Length at which a copy of the sequence is kept, see [`Found::parts_at`](super::prefixes::Found::parts_at).
    pub parts_at: Option<usize>,
    /// Tokens of the prompt that were reused.
    pub reused: usize,
    /// Time at which the job was admitted.
    pub started: Instant,
    /// Time of the newest token.
    pub newest: Option<Instant>,
    /// Drafts tokens, and holds the tokens of the next pass once the prompt is read.
    pub drafter: Drafter,
    prompt: usize,
    sampler: Sampler,
    stream: TextStream<'a>,
    stops: StopStrings,
    /// Outcome; `None` while the job runs.
    pub ended: Option<std::result::Result<EndReason, JobFailure>>,
}

impl<'a> RunningJob<'a> {
    /// Makes a running job that continues `sequence`, which holds the first tokens of its prompt.
    pub fn new(
        mut job: Job,
        sequence: Sequence,
        parts_at: Option<usize>,
        shared: &'a Shared,
    ) -> Result<RunningJob<'a>> {
        let stops = StopStrings::new(std::mem::take(&mut job.stops));
        let ids = std::mem::take(&mut job.prompt);
        let mut drafter = Drafter::new(shared.speculation.clone());
        ids.iter().for_each(|&id| drafter.push(id));
        let ends = [shared.model.chain().model.eos_token_ids.as_slice(), &job.ends].concat();
        Ok(RunningJob {
            drafter,
            sampler: Sampler::new(job.sampling.clone(), &ids, &ends),
            stream: TextStream::new(&shared.tokenizer, &ids)?.with_marks(std::mem::take(&mut job.marks)),
            reused: sequence.position(),
            parts_at: parts_at.filter(|n| *n > sequence.position()),
            prompt: ids.len(),
            started: Instant::now(),
            newest: None,
            ended: None,
            sequence,
            ids,
            stops,
            job,
        })
    }

    /// Returns the number of tokens that no pass has run.
    pub fn pending(&self) -> usize {
        self.ids.len() - self.sequence.position()
    }

    /// Tells whether the whole prompt has been read.
    pub fn is_decoding(&self) -> bool {
        self.ids.len() > self.prompt
    }

    fn generated(&self) -> usize {
        self.ids.len() - self.prompt
    }

    /// Returns the token counts so far.
    pub fn usage(&self) -> Usage {
        Usage { prompt: self.prompt, reused: self.reused, generated: self.generated() }
    }

    /// Plans the next pass: the newest token, followed by a draft if there is `room`. Returns the number of drafted tokens, and the
    /// seconds that planning took.
    pub fn plan_pass(&mut self, shared: &Shared, room: Option<DraftRoom>) -> (usize, f64) {
        let Some(&newest) = self.ids.last() else { return (0, 0.0) };
        let (generated, left) = (self.generated(), self.job.max_new.saturating_sub(self.generated()));
        let RunningJob { drafter, sequence, sampler, .. } = self;
        match room {
            Some(room) => {
                let room = DraftRoom { generated, left, ..room };
                drafter.plan(&shared.model, sequence, newest, &room, sampler);
            }
            None => drafter.plan_plain(newest),
        }
        (drafter.drafted(), drafter.planning())
    }

    /// Tells whether the newest token equals the drafted token at `place`, from 0, so that the next row of logits counts.
    pub fn agrees(&self, place: usize) -> bool {
        self.ended.is_none() && self.ids.last().is_some_and(|&id| self.drafter.agrees(place, id))
    }

    /// Cuts the sequence back to the drafted tokens that were right. Records `time`, that of a pass with drafts or without, where it
    /// is known.
    ///
    /// # Errors
    /// The states cannot be cut back.
    pub fn settle(&mut self, shared: &Shared, time: Option<PassTime>) -> Result<()> {
        let drafted = self.drafter.drafted();
        let first = self.sequence.position().saturating_sub(drafted);
        let new = self.ids.get(first..).unwrap_or_default();
        let right = (0..drafted).take_while(|&i| new.get(i).is_some_and(|&id| self.drafter.agrees(i, id)));
        let right = right.count();
        self.drafter.settle(&shared.model, &mut self.sequence, right, time)?;
        if time.is_some() {
            shared.metrics.verifier_passes.add(u64::from(drafted > 0));
            shared.metrics.draft_fallbacks.add(u64::from(self.drafter.fell_back()));
            shared.metrics.drafted_tokens.add(drafted as u64);
            shared.metrics.accepted_tokens.add(right as u64);
            if self.drafter.has_drafter_tokens() {
                shared.metrics.drafter_tokens.add(drafted as u64);
                shared.metrics.drafter_accepted.add(right as u64);
            }
            shared.metrics.drafter_microseconds.add((self.drafter.drafter_seconds() * 1e6) as u64);
        }
        Ok(())
    }

    /// Chooses a token from its logits; threads do this for several jobs in parallel.
    pub fn choose(&mut self, row: &mut [f32]) -> std::result::Result<ChosenToken, String> {
        choose(row, &mut self.sampler, self.job.grammar.as_mut(), self.job.logprobs)
    }

    /// Adds a chosen token, and ends the job at an end token, a stop string or a limit.
    pub fn push(
        &mut self,
        choice: std::result::Result<ChosenToken, JobFailure>,
        eos: &[u32],
        context: usize,
    ) {
        let choice = match choice {
            Ok(choice) => choice,
            Err(failure) => return self.fail(failure),
        };
        let id = choice.id;
        if !self.job.ignore_eos && (eos.contains(&id) || self.job.ends.contains(&id)) {
            return self.finish(EndReason::Stop);
        }
        if let Some(grammar) = &mut self.job.grammar
            && let Err(what) = grammar.accept(id)
        {
            return self.fail(JobFailure::Grammar(what));
        }
        self.ids.push(id);
        self.drafter.push(id);
        let (text, found) = match self.stream.push(id) {
            Ok(piece) => self.stops.push(&piece),
            Err(e) => return self.fail(JobFailure::Broken(e.to_string())),
        };
        if !self.job.sink.send(AnswerEvent::Token { text, choice }) {
            self.ended = Some(Err(JobFailure::Closing));
            return;
        }
        if found || self.job.grammar.as_ref().is_some_and(AnswerGrammar::is_complete) {
            return self.finish(EndReason::Stop);
        }
        if self.generated() >= self.job.max_new || self.ids.len() > context {
            self.finish(EndReason::Length);
        }
    }

    fn finish(&mut self, reason: EndReason) {
        let text = self.stops.finish();
        let usage = self.usage();
        let stop = self.stops.found().map(str::to_string);
        self.job.sink.send(AnswerEvent::Finished { text, reason, stop, usage });
        self.ended = Some(Ok(reason));
    }

    /// Ends the job with a failure.
    pub fn fail(&mut self, failure: JobFailure) {
        self.job.sink.send(AnswerEvent::Failed(failure.clone()));
        self.ended = Some(Err(failure));
    }
}
