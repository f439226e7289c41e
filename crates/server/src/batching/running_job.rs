//! A job that runs.

use super::choice::{ChosenToken, choose};
use super::jobs::{AnswerEvent, EndReason, Job, JobFailure, Usage};
use super::shared::Shared;
use crate::grammar::in_short;
use anemoe_runtime::Result;
use anemoe_runtime::chat::{PromptText, StopStrings};
use anemoe_runtime::model::Sequence;
use anemoe_runtime::sampler::Sampler;
use anemoe_runtime::speculate::Drafter;
use anemoe_runtime::tokenizer::TextStream;
use std::time::Instant;

/// A job with its sequence.
pub struct RunningJob<'a> {
    /// The job.
    pub job: Job,
    /// Tokens that passes have seen: the first of [`RunningJob::ids`].
    pub sequence: Sequence,
    /// Prompt and answer.
    pub ids: Vec<u32>,
    /// Length at which a copy of the sequence is kept.
    pub parts_at: Option<usize>,
    /// Tokens of the prompt that were known.
    pub reused: usize,
    /// Time at which the job was admitted.
    pub started: Instant,
    /// Time at which the newest token came.
    pub newest: Option<Instant>,
    /// Drafts, and what the next pass is over once the prompt has been read.
    pub drafter: Drafter,
    prompt: usize,
    text: String,
    sampler: Sampler,
    stream: TextStream<'a>,
    stops: StopStrings,
    /// Reason of its end; None while it runs.
    pub ended: Option<std::result::Result<EndReason, JobFailure>>,
}

impl<'a> RunningJob<'a> {
    /// A job that goes on from `sequence`, which holds the beginning of its prompt.
    pub fn new(
        mut job: Job,
        sequence: Sequence,
        parts_at: Option<usize>,
        shared: &'a Shared,
    ) -> Result<RunningJob<'a>> {
        let stops = StopStrings::new(std::mem::take(&mut job.stops));
        let ids = job.prompt.ids.clone();
        let mut drafter = Drafter::new(shared.speculation.clone());
        ids.iter().for_each(|&id| drafter.push(id));
        drafter.assume_preparing(shared.model.shortest_preparation());
        Ok(RunningJob {
            drafter,
            sampler: Sampler::new(job.sampling.clone()),
            stream: TextStream::new(&shared.tokenizer, &ids)?.with_marks(std::mem::take(&mut job.marks)),
            reused: sequence.position(),
            parts_at: parts_at.filter(|n| *n > sequence.position()),
            prompt: ids.len(),
            text: String::new(),
            started: Instant::now(),
            newest: None,
            ended: None,
            sequence,
            ids,
            stops,
            job,
        })
    }

    /// Tokens that no pass has seen.
    pub fn pending(&self) -> usize {
        self.ids.len() - self.sequence.position()
    }

    /// The prompt has been read.
    pub fn is_decoding(&self) -> bool {
        self.ids.len() > self.prompt
    }

    fn generated(&self) -> usize {
        self.ids.len() - self.prompt
    }

    /// Counts of tokens so far.
    pub fn usage(&self) -> Usage {
        Usage { prompt: self.prompt, reused: self.reused, generated: self.generated() }
    }

    /// Sets what the next pass is over: the newest token, and where nothing else runs a draft behind it.
    pub fn plan_pass(&mut self, shared: &Shared, is_alone: bool) {
        let Some(&newest) = self.ids.last() else { return };
        if !is_alone {
            return self.drafter.plan_plain(newest);
        }
        let left = self.job.max_new.saturating_sub(self.generated());
        self.drafter.plan(&shared.model, &self.sequence, newest, self.generated(), left);
    }

    /// Tells whether the newest token is the one that was drafted at this place, from 0, so that the next row of logits counts.
    pub fn agrees(&self, place: usize) -> bool {
        self.ended.is_none() && self.ids.last().is_some_and(|&id| self.drafter.agrees(place, id))
    }

    /// Cuts the sequence back behind the drafted tokens that were right, and notes what the pass took where nothing else ran in it.
    ///
    /// # Errors
    /// The states cannot be cut back.
    pub fn settle(&mut self, shared: &Shared, seconds: Option<f64>) -> Result<()> {
        let drafted = self.drafter.drafted();
        let first = self.sequence.position().saturating_sub(drafted);
        let new = self.ids.get(first..).unwrap_or_default();
        let right = (0..drafted).take_while(|&i| new.get(i).is_some_and(|&id| self.drafter.agrees(i, id)));
        let right = right.count();
        self.drafter.settle(&shared.model, &mut self.sequence, right, seconds)?;
        if seconds.is_some() {
            shared.metrics.drafted_tokens.add(drafted as u64);
            shared.metrics.accepted_tokens.add(right as u64);
        }
        Ok(())
    }

    /// Chooses a token from its logits; the work that slots do side by side.
    pub fn choose(&mut self, row: &mut [f32]) -> std::result::Result<ChosenToken, String> {
        choose(row, &mut self.sampler, self.job.grammar.as_mut(), self.job.logprobs)
    }

    /// Adds a chosen token, and ends the job where it says so.
    pub fn push(&mut self, choice: std::result::Result<ChosenToken, String>, eos: &[u32], context: usize) {
        let choice = match choice {
            Ok(choice) => choice,
            Err(what) => return self.fail(JobFailure::Grammar(what)),
        };
        let id = choice.id;
        if !self.job.ignore_eos && (eos.contains(&id) || self.job.ends.contains(&id)) {
            return self.finish(EndReason::Stop);
        }
        if let Some(grammar) = &mut self.job.grammar
            && let Err(e) = grammar.consume_token(id)
        {
            return self.fail(JobFailure::Grammar(in_short(&e.to_string())));
        }
        self.ids.push(id);
        self.drafter.push(id);
        let (text, found) = match self.stream.push(id) {
            Ok(piece) => self.stops.push(&piece),
            Err(e) => return self.fail(JobFailure::Broken(e.to_string())),
        };
        self.text += &text;
        if !self.job.sink.send(AnswerEvent::Token { text, choice }) {
            self.ended = Some(Err(JobFailure::Closing));
            return;
        }
        if found {
            // The tokens are more than the text now.
            self.text.clear();
            return self.finish(EndReason::Stop);
        }
        if self.job.grammar.as_ref().is_some_and(|g| g.is_stopped()) {
            return self.finish(EndReason::Stop);
        }
        if self.generated() >= self.job.max_new || self.ids.len() > context {
            self.finish(EndReason::Length);
        }
    }

    fn finish(&mut self, reason: EndReason) {
        let text = self.stops.finish();
        let usage = self.usage();
        self.text += &text;
        self.job.sink.send(AnswerEvent::Finished { text, reason, usage });
        self.ended = Some(Ok(reason));
    }

    /// Ends the job with a failure.
    pub fn fail(&mut self, failure: JobFailure) {
        self.job.sink.send(AnswerEvent::Failed(failure.clone()));
        self.ended = Some(Err(failure));
    }

    /// Text and tokens of prompt and answer, where they fit each other.
    pub fn known(&self) -> Option<PromptText> {
        let whole = !self.job.prompt.text.is_empty() && !self.text.is_empty() && self.is_decoding();
        whole.then(|| PromptText {
            text: format!("{}{}", self.job.prompt.text, self.text),
            ids: self.ids.clone(),
        })
    }
}
