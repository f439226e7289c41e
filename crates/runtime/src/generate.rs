//! Prompt in, tokens out.

use crate::model::{Logits, Model, Sequence};
use crate::sampler::{Sampler, Sampling};
use crate::{Error, Result};
use std::time::{Duration, Instant};

/// What to generate.
#[derive(Clone, Debug)]
pub struct GenerateOptions {
    /// Most new tokens.
    pub max_new: usize,
    /// How tokens are chosen.
    pub sampling: Sampling,
    /// Go on behind the model's end tokens.
    pub ignore_eos: bool,
    /// Most tokens of one prefill call.
    pub prefill_chunk: Option<usize>,
}

/// Why generation ended.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Stop {
    /// The model said so.
    EndToken(u32),
    /// As many tokens as asked.
    MaxNew,
    /// The caches are full.
    ContextFull,
    /// The caller's callback said so.
    Caller,
}

/// What was generated, and how fast.
#[derive(Clone, Debug)]
pub struct Generated {
    /// New tokens; an end token is not among them.
    pub ids: Vec<u32>,
    /// Why it ended.
    pub stop: Stop,
    /// Prompt tokens.
    pub prefill_tokens: usize,
    /// Time for the prompt, first logits included.
    pub prefill: Duration,
    /// Tokens that went through the model one by one.
    pub decode_tokens: usize,
    /// Time for them.
    pub decode: Duration,
}

impl Generated {
    /// Decoded tokens per second; 0 when none was decoded.
    pub fn tokens_per_second(&self) -> f64 {
        if self.decode_tokens == 0 { 0.0 } else { self.decode_tokens as f64 / self.decode.as_secs_f64() }
    }
}

/// Continues `prompt` in `sequence`, which is cleared first. `on_token` sees each new token as soon as it is chosen and may end it by returning false.
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
        return Err(Error::Input("the prompt is empty: give at least one token".into()));
    }
    options.sampling.check().map_err(Error::Input)?;
    let max_context = model.chain().model.max_context;
    if prompt.len() > max_context {
        return Err(Error::Input(format!(
            "the prompt has {} tokens, the context holds {max_context}: build with a larger --max-context",
            prompt.len()
        )));
    }
    sequence.clear();
    let mut sampler = Sampler::new(options.sampling.clone());
    let started = Instant::now();
    for tokens in [options.prefill_chunk.unwrap_or(usize::MAX).min(prompt.len()), 1] {
        model.prepare(tokens);
    }
    let mut logits = model.append(sequence, prompt, Logits::Last, options.prefill_chunk)?;
    let prefill = started.elapsed();
    let mut ids = Vec::new();
    let mut decode = Duration::ZERO;
    let stop = loop {
        if ids.len() == options.max_new {
            break Stop::MaxNew;
        }
        let row = logits.last().ok_or_else(|| Error::Input("no logits".into()))?;
        let id = sampler.next(row) as u32;
        if !options.ignore_eos && model.chain().model.eos_token_ids.contains(&id) {
            break Stop::EndToken(id);
        }
        ids.push(id);
        if !on_token(id) {
            break Stop::Caller;
        }
        if ids.len() == options.max_new {
            break Stop::MaxNew;
        }
        if sequence.position() == max_context {
            break Stop::ContextFull;
        }
        let started = Instant::now();
        logits = model.append(sequence, &[id], Logits::Last, None)?;
        decode += started.elapsed();
    };
    let decode_tokens = sequence.position() - prompt.len();
    Ok(Generated { ids, stop, prefill_tokens: prompt.len(), prefill, decode_tokens, decode })
}
