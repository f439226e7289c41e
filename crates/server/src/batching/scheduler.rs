//! The batcher's thread: admits jobs, runs passes, hands out tokens.

use super::choice::ChosenToken;
use super::jobs::{AnswerEvent, Job, JobFailure, Usage};
use super::prefixes::{MIN_SHARED_TOKENS, Prefixes};
use super::running_job::RunningJob;
use super::shared::Shared;
use super::warm_up::WarmUp;
use anemoe_runtime::model::{Logits, Request};
use anemoe_runtime::speculate::{DraftRoom, MOST_STREAMS, PassTime};
use rayon::prelude::*;
use std::collections::VecDeque;
use std::panic::{AssertUnwindSafe, catch_unwind};
use std::sync::atomic::Ordering;
use std::sync::mpsc::{Receiver, TryRecvError};
use std::time::{Duration, Instant};

/// Logits of a pass from which on several threads choose tokens.
const MANY_LOGITS: usize = 1 << 16;
/// Longest wait of prompts that came together for each other, in stalls, by measured times of passes.
const LONGEST_WAIT: u32 = 16;
/// Wait for jobs that come with a first one, as a share of the time that its prompt takes.
const GATHERING: f64 = 0.02;
/// Longest wait for jobs that come with a first one.
const LONGEST_GATHERING: Duration = Duration::from_millis(5);
/// Fewest prompt tokens that a pass reads, for any number of decoding sequences.
const LEAST_CHUNK: usize = 16;

/// State of the batcher's thread.
struct Scheduler<'a> {
    shared: &'a Shared,
    slots: Vec<RunningJob<'a>>,
    queue: VecDeque<Job>,
    prefixes: Prefixes,
    eos: Vec<u32>,
    context: usize,
    /// Recent time of a token, in seconds, in passes with parts of prompts.
    token_seconds: Option<f64>,
    /// Sequences that run, jobs that wait, and prefixes, as reported last.
    reported: [usize; 3],
}

/// Runs the batcher until all senders are dropped and all jobs have ended.
pub fn run(shared: &Shared, receiver: &Receiver<Job>) {
    let model = &shared.model.chain().model;
    let mut scheduler = Scheduler {
        shared,
        slots: Vec::new(),
        queue: VecDeque::new(),
        prefixes: Prefixes::new(shared.limits.prefixes),
        eos: model.eos_token_ids.clone(),
        context: model.max_context,
        token_seconds: None,
        reported: [0; 3],
    };
    let mut warm_up = WarmUp::new(shared.limits.sequences, &shared.speculation);
    let mut is_open = true;
    loop {
        if scheduler.is_idle() {
            if !is_open {
                return;
            }
            if !warm_up.step(&shared.model, &shared.speculation) {
                match receiver.recv() {
                    Ok(job) => scheduler.gather(job, receiver),
                    Err(_) => return,
                }
            }
        }
        loop {
            match receiver.try_recv() {
                Ok(job) => scheduler.queue.push_back(job),
                Err(TryRecvError::Empty) => break,
                Err(TryRecvError::Disconnected) => {
                    is_open = false;
                    break;
                }
            }
        }
        if let Err(failure) = contained(|| scheduler.turn()) {
            scheduler.slots.iter_mut().for_each(|slot| slot.fail(failure.clone()));
            scheduler.prefixes = Prefixes::new(shared.limits.prefixes);
            scheduler.collect();
        }
    }
}

/// Turns a panic into a failure, so that it ends no other job.
fn contained<T>(call: impl FnOnce() -> T) -> Result<T, JobFailure> {
    catch_unwind(AssertUnwindSafe(call))
        .map_err(|_| JobFailure::Broken("the server failed at this answer".into()))
}

impl<'a> Scheduler<'a> {
    /// Admits jobs and runs a pass.
    fn turn(&mut self) {
        self.drop_unwanted();
        self.admit();
        self.step();
        self.collect();
        self.report();
    }

    fn is_idle(&self) -> bool {
        self.slots.is_empty() && self.queue.is_empty()
    }

    /// Queues a first job, and jobs that arrive soon after: within a small share of the time that its prompt takes.
    fn gather(&mut self, job: Job, receiver: &Receiver<Job>) {
        let prompt = job.prompt.len() as f64 * self.token_seconds.unwrap_or(0.0);
        let until = Instant::now() + Duration::from_secs_f64(GATHERING * prompt).min(LONGEST_GATHERING);
        self.queue.push_back(job);
        while let Ok(job) = receiver.recv_timeout(until.saturating_duration_since(Instant::now())) {
            self.queue.push_back(job);
        }
    }

    /// Returns for each slot whether its prompt holds back its last token until the other prompts are read, see [`join`].
    fn joined(&self) -> Vec<bool> {
        let waited = self.slots.iter().map(|slot| slot.started.elapsed()).max().unwrap_or_default();
        let left = (self.shared.limits.stall * LONGEST_WAIT).saturating_sub(waited).as_secs_f64();
        // Casting infinity or NaN gives a bound of the integer type.
        let tokens = self.token_seconds.map_or(0, |seconds| (left / seconds) as usize);
        let pending = |slot: &RunningJob<'_>| (!slot.is_decoding()).then(|| slot.pending());
        join(&self.slots.iter().map(pending).collect::<Vec<_>>(), tokens)
    }

    /// Ends jobs whose receiver is gone, that are past their deadline, or that the batcher aborts.
    fn drop_unwanted(&mut self) {
        let now = Instant::now();
        let is_aborted = self.shared.is_aborted.load(Ordering::SeqCst);
        let verdict = |job: &Job| match job {
            job if job.sink.is_gone() || is_aborted => Some(JobFailure::Closing),
            job if job.deadline.is_some_and(|d| d <= now) => Some(JobFailure::Timeout),
            _ => None,
        };
        for slot in &mut self.slots {
            if let Some(failure) = verdict(&slot.job) {
                slot.fail(failure);
            }
        }
        let waiting = self.queue.len();
        self.queue.retain_mut(|job| match verdict(job) {
            Some(failure) => {
                job.sink.send(AnswerEvent::Failed(failure));
                false
            }
            None => true,
        });
        self.shared.jobs.fetch_sub(waiting - self.queue.len(), Ordering::SeqCst);
        self.collect();
    }

    /// Tells whether a job should wait: its prompt begins with tokens that a slot is reading now, and a copy of them will follow.
    fn waits(&mut self, job: &Job) -> bool {
        if self.shared.limits.prefixes == 0 {
            return false;
        }
        let all = &job.prompt[..job.prompt.len() - 1];
        for slot in self.slots.iter_mut().filter(|slot| !slot.is_decoding()) {
            let shared = slot.ids.iter().zip(all).take_while(|(a, b)| a == b).count();
            if shared >= slot.sequence.position() + 2 * MIN_SHARED_TOKENS && shared < slot.ids.len() {
                slot.parts_at = Some(slot.parts_at.map_or(shared, |n| n.min(shared)));
                return slot.parts_at == Some(shared);
            }
        }
        false
    }

    /// Moves jobs from the queue to free slots, in order of arrival.
    fn admit(&mut self) {
        let mut waiting = VecDeque::new();
        while self.slots.len() < self.shared.limits.sequences {
            let Some(job) = self.queue.pop_front() else { break };
            if self.waits(&job) {
                waiting.push_back(job);
                continue;
            }
            let slot = contained(|| {
                let found = self.prefixes.find(&self.shared.model, &job.prompt)?;
                self.prefixes.note(&job.prompt);
                RunningJob::new(job, found.sequence, found.parts_at, self.shared)
            });
            let slot = slot.map_err(|failure| format!("{failure:?}"));
            match slot.and_then(|slot: anemoe_runtime::Result<_>| slot.map_err(|e| e.to_string())) {
                Ok(slot) => {
                    self.shared.metrics.prompt_tokens.add(slot.ids.len() as u64);
                    self.shared.metrics.reused_tokens.add(slot.reused as u64);
                    self.slots.push(slot);
                }
                // Dropping the job closes its sink, which its receiver sees.
                Err(e) => {
                    tracing::error!("a job could not begin: {e}");
                    self.shared.jobs.fetch_sub(1, Ordering::SeqCst);
                }
            }
        }
        waiting.append(&mut self.queue);
        self.queue = waiting;
    }

    /// Returns the number of tokens that each slot gets in the next pass.
    fn shares(&self) -> Vec<usize> {
        let decoding = self.slots.iter().filter(|s| s.is_decoding()).count();
        let pass = self.shared.model.most_tokens(None);
        let wanted: Vec<usize> = self
            .slots
            .iter()
            .zip(self.joined())
            .map(|(slot, is_joined)| match slot.is_decoding() {
                true => 0,
                // A pass ends where a prompt diverges from another, so that a copy can be made there.
                false => slot
                    .parts_at
                    .map_or(slot.pending(), |n| n - slot.sequence.position())
                    .min(slot.pending() - usize::from(is_joined)),
            })
            .collect();
        let room = match decoding {
            0 => pass,
            n => within(self.shared.limits.stall, self.token_seconds, pass).saturating_sub(n),
        };
        let mut shares = share(&wanted, room.max(LEAST_CHUNK));
        for (share, slot) in shares.iter_mut().zip(&self.slots) {
            if slot.is_decoding() {
                *share = slot.drafter.pass().len();
            }
        }
        shares
    }

    /// Runs one pass and hands out its tokens.
    fn step(&mut self) {
        if self.slots.is_empty() {
            return;
        }
        // Passes of few streams, without prompts, have room for drafts.
        let streams = self.slots.len();
        let is_small = streams <= MOST_STREAMS && self.slots.iter().all(RunningJob::is_decoding);
        let (mut drafted, mut seconds) = (0, self.shared.limits.stall.as_secs_f64());
        for slot in self.slots.iter_mut().filter(|slot| slot.is_decoding()) {
            let room = DraftRoom { streams, drafted, seconds: seconds.max(0.0), ..DraftRoom::alone(0, 0) };
            let (tokens, took) = slot.plan_pass(self.shared, is_small.then_some(room));
            (drafted, seconds) = (drafted + tokens, seconds - took);
        }
        let shares = self.shares();
        let reads_prompts =
            shares.iter().zip(&self.slots).any(|(share, slot)| *share > 0 && !slot.is_decoding());
        let mut parts: Vec<(usize, &mut RunningJob<'a>)> =
            self.slots.iter_mut().enumerate().filter(|(i, _)| shares[*i] > 0).collect();
        // Decoding streams go first: if a pass is too small for all, chunks of prompts wait.
        parts.sort_by_key(|(_, slot)| !slot.is_decoding());
        let numbers: Vec<usize> = parts.iter().map(|(i, _)| *i).collect();
        let mut requests: Vec<Request<'_>> =
            parts.into_iter().map(|(i, slot)| request(slot, shares[i])).collect();
        let tokens: usize = requests.iter().map(|r| r.ids.len()).sum();
        let started = Instant::now();
        let ran = self.shared.model.forward(&mut requests);
        let metrics = &self.shared.metrics;
        metrics.passes.add(1);
        metrics.pass_tokens.add(tokens as u64);
        let seconds = started.elapsed().as_secs_f64();
        metrics.pass_seconds.note(seconds);
        if reads_prompts {
            let now = seconds / tokens as f64;
            self.token_seconds = Some(self.token_seconds.map_or(now, |was| 0.75 * was + 0.25 * now));
        }
        drop(requests);
        match ran {
            Ok(rows) => {
                let mut of_slot: Vec<Vec<Vec<f32>>> = self.slots.iter().map(|_| Vec::new()).collect();
                for (number, rows) in numbers.into_iter().zip(rows) {
                    of_slot[number] = rows;
                }
                let time = PassTime { seconds, streams, drafted };
                self.hand_out(of_slot, is_small.then_some(time));
            }
            Err(e) => {
                tracing::error!("a pass failed: {e}");
                for slot in &mut self.slots {
                    slot.fail(JobFailure::Broken(e.to_string()));
                }
            }
        }
    }

    /// Chooses tokens from rows of logits, and keeps copies of sequences where prompts diverge. `time` is that of a pass that had
    /// room for drafts.
    fn hand_out(&mut self, mut rows: Vec<Vec<Vec<f32>>>, time: Option<PassTime>) {
        for slot in &mut self.slots {
            if slot.parts_at == Some(slot.sequence.position()) {
                slot.parts_at = None;
                match slot.sequence.fork() {
                    Ok(copy) => self.prefixes.keep(copy, &slot.ids, true),
                    Err(e) => tracing::warn!("states cannot be copied: {e}"),
                }
            }
        }
        let logits: usize = rows.iter().flatten().map(Vec::len).sum();
        let mut iterators: Vec<_> = rows.iter_mut().map(|rows| rows.iter_mut()).collect();
        let first: Vec<Option<&mut Vec<f32>>> = iterators.iter_mut().map(Iterator::next).collect();
        let choose = |(slot, row): (&mut RunningJob<'a>, Option<&mut Vec<f32>>)| {
            row.map(|row| Self::choose(slot, row))
        };
        let choices: Vec<Option<Result<ChosenToken, JobFailure>>> = if logits >= MANY_LOGITS {
            self.slots.par_iter_mut().zip(first).map(choose).collect()
        } else {
            self.slots.iter_mut().zip(first).map(choose).collect()
        };
        for ((slot, choice), rows) in self.slots.iter_mut().zip(choices).zip(iterators) {
            let Some(choice) = choice else { continue };
            let hand_out = contained(|| {
                let was_decoding = slot.is_decoding();
                Self::push(slot, choice, self.shared, &self.eos, self.context);
                // While drafted tokens equal chosen ones, the next row is that of plain decoding.
                for (place, row) in rows.enumerate() {
                    if !slot.agrees(place) {
                        break;
                    }
                    let choice = Self::choose(slot, row);
                    Self::push(slot, choice, self.shared, &self.eos, self.context);
                }
                if was_decoding && let Err(e) = slot.settle(self.shared, time) {
                    slot.fail(JobFailure::Broken(e.to_string()));
                }
            });
            if let Err(failure) = hand_out {
                slot.fail(failure);
            }
        }
        self.shared.model.reuse_rows(rows.into_iter().flatten());
    }

    /// Chooses a token for a slot.
    fn choose(slot: &mut RunningJob<'a>, row: &mut [f32]) -> Result<ChosenToken, JobFailure> {
        contained(|| slot.choose(row).map_err(JobFailure::Grammar))?
    }

    /// Adds a chosen token to a slot's answer, and records its time.
    fn push(
        slot: &mut RunningJob<'a>,
        choice: Result<ChosenToken, JobFailure>,
        shared: &Shared,
        eos: &[u32],
        context: usize,
    ) {
        let (metrics, now) = (&shared.metrics, Instant::now());
        match slot.newest.replace(now) {
            None => metrics.first_token_seconds.note((now - slot.started).as_secs_f64()),
            Some(before) => metrics.between_tokens_seconds.note((now - before).as_secs_f64()),
        }
        metrics.generated_tokens.add(1);
        slot.push(choice, eos, context);
    }

    /// Removes ended jobs from their slots, and keeps their sequences.
    fn collect(&mut self) {
        let mut i = 0;
        while i < self.slots.len() {
            let Some(ended) = self.slots[i].ended.take() else {
                i += 1;
                continue;
            };
            let slot = self.slots.swap_remove(i);
            let (usage, ms) = (slot.usage(), slot.started.elapsed().as_millis() as u64);
            let Usage { prompt, reused, generated } = usage;
            tracing::info!(id = slot.job.id, prompt, reused, generated, reason = ?ended, ms, "answer");
            self.shared.jobs.fetch_sub(1, Ordering::SeqCst);
            if matches!(ended, Err(JobFailure::Broken(_))) {
                continue;
            }
            self.prefixes.keep(slot.sequence, &slot.ids, false);
        }
    }

    fn report(&mut self) {
        self.report_as([self.slots.len(), self.queue.len(), self.prefixes.len()]);
    }

    /// Brings the server's gauges, to which each model's batcher adds, from what was reported last to `now`.
    fn report_as(&mut self, now: [usize; 3]) {
        let metrics = &self.shared.metrics;
        let gauges = [&metrics.running, &metrics.waiting, &metrics.prefixes];
        for ((gauge, was), now) in gauges.into_iter().zip(self.reported).zip(now) {
            gauge.add(now as u64);
            gauge.remove(was as u64);
        }
        self.reported = now;
    }
}

impl Drop for Scheduler<'_> {
    fn drop(&mut self) {
        self.report_as([0; 3]);
    }
}

/// Makes the request for a slot's next `tokens` tokens.
fn request<'s>(slot: &'s mut RunningJob<'_>, tokens: usize) -> Request<'s> {
    let first = slot.sequence.position();
    if slot.is_decoding() {
        let RunningJob { sequence, drafter, .. } = slot;
        return Request { sequence, ids: drafter.pass(), logits: drafter.wanted() };
    }
    let is_last = first + tokens == slot.ids.len();
    Request {
        sequence: &mut slot.sequence,
        ids: &slot.ids[first..first + tokens],
        logits: if is_last { Logits::Last } else { Logits::None },
    }
}

/// Returns the number of tokens, at most `most`, of a pass that takes no longer than `stall`, if a token takes
/// `seconds`. A power of two or `most`, since each number of tokens needs a prepared function.
fn within(stall: Duration, seconds: Option<f64>, most: usize) -> usize {
    let Some(seconds) = seconds.filter(|s| *s > 0.0) else { return most };
    let tokens = (stall.as_secs_f64() / seconds).clamp(1.0, most as f64) as usize;
    if tokens >= most { most } else { 1 << tokens.ilog2() }
}

/// Chooses the prompts that hold back their last token until the others have only that left. `pending` is the number of
/// unread tokens of each slot; `None` decodes. The shortest prompts wait, as many as fit into `left` tokens. Their
/// answers then begin together, and no prompt is read between tokens of another's answer.
fn join(pending: &[Option<usize>], mut left: usize) -> Vec<bool> {
    let mut joined = vec![false; pending.len()];
    let mut prompts: Vec<(usize, usize)> =
        pending.iter().enumerate().filter_map(|(i, n)| Some(((*n)?, i))).collect();
    // A decoding stream would wait for each of their passes.
    if prompts.len() < pending.len() {
        return joined;
    }
    prompts.sort_unstable();
    prompts.retain(|(n, _)| {
        let fits = *n <= left;
        left = if fits { left - n } else { 0 };
        fits
    });
    if prompts.len() > 1 && prompts.iter().any(|(n, _)| *n > 1) {
        prompts.into_iter().for_each(|(_, i)| joined[i] = true);
    }
    joined
}

/// Divides `room` tokens among prompts that want `wanted` tokens each, oldest first. Half goes to the oldest, which
/// thus advances; the rest goes to the shortest first, so that short prompts do not wait for long ones.
fn share(wanted: &[usize], mut room: usize) -> Vec<usize> {
    let mut shares = vec![0; wanted.len()];
    let mut give = |i: usize, most: usize, room: &mut usize| {
        let n: usize = (wanted[i] - shares[i]).min(most).min(*room);
        shares[i] += n;
        *room -= n;
    };
    let mut order: Vec<usize> = (0..wanted.len()).filter(|i| wanted[*i] > 0).collect();
    if let Some(&oldest) = order.first() {
        give(oldest, room.div_ceil(2), &mut room);
    }
    order.sort_by_key(|i| wanted[*i]);
    for i in order {
        give(i, usize::MAX, &mut room);
    }
    shares
}

#[cfg(test)]
mod tests {
    use super::{JobFailure, contained, join, share, within};
    use std::time::Duration;

    #[test]
    fn a_panic_is_a_failure_of_its_answer() {
        let failed: Result<(), JobFailure> = contained(|| panic!("a test's own panic"));
        assert!(matches!(failed, Err(JobFailure::Broken(_))));
        assert_eq!(contained(|| 1), Ok(1));
    }

    #[test]
    fn a_pass_beside_streams_ends_in_time() {
        let stall = Duration::from_millis(250);
        assert_eq!(within(stall, None, 64), 64);
        assert_eq!(within(stall, Some(0.001), 64), 64);
        assert_eq!(within(stall, Some(0.0101), 64), 16);
        assert_eq!(within(stall, Some(0.0075), 64), 32);
        assert_eq!(within(stall, Some(9.0), 64), 1);
        assert_eq!(within(Duration::ZERO, Some(0.01), 64), 1);
        assert_eq!(within(stall, Some(0.0), 64), 64);
    }

    #[test]
    fn prompts_that_come_together_wait_for_each_other_unless_it_takes_too_long() {
        assert_eq!(join(&[Some(16), Some(1), Some(20)], 64), [true; 3]);
        assert_eq!(join(&[Some(16), Some(2000), Some(20)], 64), [true, false, true]);
        assert_eq!(join(&[Some(16), Some(2000)], 64), [false; 2]);
        assert_eq!(join(&[Some(16), None, Some(20)], 64), [false; 3]);
        assert_eq!(join(&[Some(1), Some(1)], 64), [false; 2]);
        assert_eq!(join(&[Some(16), Some(20)], 0), [false; 2]);
        assert_eq!(join(&[Some(16)], 64), [false]);
        assert_eq!(join(&[], 64), [false; 0]);
    }

    #[test]
    fn short_prompts_do_not_wait_for_long_ones_and_the_oldest_goes_on() {
        assert_eq!(share(&[2000, 0, 10], 64), [54, 0, 10]);
        assert_eq!(share(&[2000, 0, 100, 30], 64), [32, 0, 2, 30]);
        assert_eq!(share(&[0, 2000], 64), [0, 64]);
        assert_eq!(share(&[5, 6], 64), [5, 6]);
        assert_eq!(share(&[0, 0], 64), [0, 0]);
        assert_eq!(share(&[], 64), [0; 0]);
        let shares = share(&[900, 40, 40, 40, 40], 64);
        assert_eq!((shares[0], shares.iter().sum::<usize>()), (32, 64));
    }
}
