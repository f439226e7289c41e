//! Generates tokens from a prompt.

use crate::model::{Logits, Model, Request, Sequence};
use crate::sampler::{Sampler, Sampling};
use crate::speculate::{DraftRoom, Drafter, PassTime, Speculation, SpeculationReport};
use crate::{Error, Result};
use std::time::{Duration, Instant};

/// Options of [`generate`].
#[derive(Clone)]
pub struct GenerateOptions {
    /// Most new tokens.
    pub max_new: usize,
    /// Settings for choosing tokens.
    pub sampling: Sampling,
    /// True to continue after the model's end tokens.
    pub ignore_eos: bool,
    /// Most tokens of one prefill call.
    pub prefill_chunk: Option<usize>,
    /// Settings for drafts of several tokens.
    pub speculation: Speculation,
}

/// Reason why generation ended.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Stop {
    /// The model chose this end token.
    EndToken(u32),
    /// `max_new` tokens were generated.
    MaxNew,
    /// The caches are full.
    ContextFull,
    /// The callback of the caller returned false.
    Caller,
}

/// Result of [`generate`]: tokens and times.
#[derive(Clone, Debug)]
pub struct Generated {
    /// New tokens; an end token is not among them.
    pub ids: Vec<u32>,
    /// Reason why generation ended.
    pub stop: Stop,
    /// Prompt tokens that were run; shared ones are not.
    pub prefill_tokens: usize,
    /// Time for the prompt, up to the first logits.
    pub prefill: Duration,
    /// Tokens that were run after the prompt.
    pub decode_tokens: usize,
    /// Time for the tokens after the prompt: passes, and choosing tokens from their logits.
    pub decode: Duration,
    /// Figures of drafts, if drafting was possible.
    pub speculation: Option<SpeculationReport>,
}

impl Generated {
    /// Returns decoded tokens per second; 0 when none was decoded.
    pub fn tokens_per_second(&self) -> f64 {
        if self.decode_tokens == 0 { 0.0 } else { self.decode_tokens as f64 / self.decode.as_secs_f64() }
    }
}

/// Continues `prompt` in `sequence`. The beginning that both share is not run again; the tokens are the same as in a new sequence.
/// `on_token` gets each new token as soon as it is chosen, and ends generation by returning false. With speculation the tokens
/// are the same, but come several at a time.
///
/// # Errors
/// The prompt is empty, holds an id outside the vocabulary, or is longer than the context; a package fails.
pub fn generate(
    model: &Model,
    sequence: &mut Sequence,
    prompt: &[u32],
    options: &GenerateOptions,
    mut on_token: impl FnMut(u32) -> bool,
) -> Result<Generated> {
    if prompt.is_empty() {
        return Err(Error::input("the prompt is empty: give at least one token"));
    }
    options.sampling.check().map_err(|e| Error::input(e.to_string()))?;
    options.speculation.check().map_err(Error::input)?;
    let max_context = model.chain().model.max_context;
    if prompt.len() > max_context {
        return Err(Error::input(format!(
            "the prompt has {} tokens, the context holds {max_context}: build with a larger --max-context",
            prompt.len()
        )));
    }
    let ends = &model.chain().model.eos_token_ids;
    let mut sampler = Sampler::new(options.sampling.clone(), prompt, ends);
    let started = Instant::now();
    // The last token always runs, because its logits choose the first new token.
    let shared = sequence.shared_with(&prompt[..prompt.len() - 1]);
    match shared {
        // Clearing also repairs a sequence whose last call failed.
        0 => sequence.clear(),
        _ => model.truncate(sequence, shared)?,
    }
    let rest = &prompt[shared..];
    for tokens in [options.prefill_chunk.unwrap_or(usize::MAX).min(rest.len()), 1] {
        model.prepare(tokens, Logits::Last);
    }
    let mut drafter = Drafter::new(options.speculation.clone());
    let mut logits: Vec<Vec<f32>> = Vec::new();
    let mut request = [Request { sequence: &mut *sequence, ids: rest, logits: Logits::Last }];
    model.advance(&mut request, options.prefill_chunk, &mut |_, _| (), &mut |_, row| logits.push(row))?;
    let prefill = started.elapsed();
    prompt.iter().for_each(|&id| drafter.push(id));
    let mut ids: Vec<u32> = Vec::new();
    // `decode`: time since the prompt, without what the caller does with tokens. `pass_time`: time of the last pass after the prompt.
    let mut decode = Duration::ZERO;
    let mut pass_time: Option<Duration> = None;
    let stop = loop {
        // A row of logits chooses a token; the next row is valid only if that token agrees with the draft.
        let before = ids.len();
        let mut stop = None;
        for (i, row) in logits.iter_mut().enumerate() {
            if ids.len() == options.max_new {
                stop = Some(Stop::MaxNew);
                break;
            }
            let started = Instant::now();
            let id = sampler.next(row) as u32;
            decode += started.elapsed();
            if !options.ignore_eos && ends.contains(&id) {
                stop = Some(Stop::EndToken(id));
                break;
            }
            ids.push(id);
            drafter.push(id);
            if !on_token(id) {
                stop = Some(Stop::Caller);
                break;
            }
            if ids.len() == options.max_new {
                stop = Some(Stop::MaxNew);
                break;
            }
            if !drafter.agrees(i, id) {
                break;
            }
        }
        // The passes saw all new tokens except the last one; an end token is not among the new tokens.
        let seen = match stop {
            Some(Stop::EndToken(_)) => ids.len() - before,
            _ => (ids.len() - before).saturating_sub(1),
        };
        let started = Instant::now();
        let time = pass_time.map(|time| {
            let seconds = time.as_secs_f64() - drafter.planning();
            PassTime { seconds, streams: 1, drafted: drafter.drafted() }
        });
        drafter.settle(model, sequence, seen, time)?;
        decode += pass_time.unwrap_or_default() + started.elapsed();
        if let Some(stop) = stop {
            break stop;
        }
        if sequence.position() == max_context {
            break Stop::ContextFull;
        }
        let Some(&last) = ids.last() else {
            return Err(Error::input("no logits"));
        };
        let started = Instant::now();
        let room = DraftRoom::alone(ids.len(), options.max_new - ids.len());
        drafter.plan(model, sequence, last, &room, &sampler);
        model.reuse_rows(logits.drain(..));
        let mut request =
            [Request { sequence: &mut *sequence, ids: drafter.pass(), logits: drafter.wanted() }];
        model.advance(&mut request, None, &mut |_, _| (), &mut |_, row| logits.push(row))?;
        pass_time = Some(started.elapsed());
    };
    let decode_tokens = sequence.position() - prompt.len();
    Ok(Generated {
        ids,
        stop,
        prefill_tokens: prompt.len() - shared,
        prefill,
        decode_tokens,
        decode,
        speculation: drafter.report(),
    })
}
