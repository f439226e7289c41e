//! Changes of logits before a token is chosen: biases, penalties of what was said, tokens that may not come yet.

use super::sampling_settings::Sampling;
use std::collections::BTreeMap;

/// Occurrences of a token.
#[derive(Clone, Copy, Default)]
struct TokenCounts {
    /// Among the newest tokens, which the repetition penalty looks at.
    recent: u32,
    /// In the answer.
    answer: u32,
}

/// Changes logits by the tokens so far, in the order of Hugging Face transformers and vLLM:
///
/// ```text
/// v += bias                                                  of tokens and sequences
/// v  = v > 0 ? v / repetition_penalty : v * repetition_penalty   for the tokens of prompt and answer, or the newest of them
/// v -= frequency_penalty * n + presence_penalty              for tokens that are n > 0 times in the answer
/// v  = -inf                                                  for end tokens too early, and tokens that no answer begins with
/// ```
#[derive(Clone)]
pub struct LogitChanges {
    ids: Vec<u32>,
    prompt: usize,
    ends: Vec<u32>,
    counts: BTreeMap<u32, TokenCounts>,
    /// Places that were changed with their logits before, in order.
    changed: Vec<(usize, f32)>,
}

impl LogitChanges {
    /// Makes the changes for an answer to `prompt`; `ends` are the tokens that end it.
    pub fn new(sampling: &Sampling, prompt: &[u32], ends: &[u32]) -> LogitChanges {
        let mut changes = LogitChanges {
            ids: Vec::new(),
            prompt: prompt.len(),
            ends: ends.to_vec(),
            counts: BTreeMap::new(),
            changed: Vec::new(),
        };
        prompt.iter().for_each(|&id| changes.push(sampling, id));
        changes
    }

    /// Adds the next token.
    pub fn push(&mut self, sampling: &Sampling, id: u32) {
        let counts = self.counts.entry(id).or_default();
        counts.recent += 1;
        counts.answer += u32::from(self.ids.len() >= self.prompt);
        self.ids.push(id);
        let leaves = sampling.repeat_last_n.and_then(|n| self.ids.len().checked_sub(n + 1));
        if let Some(counts) = leaves.and_then(|at| self.counts.get_mut(&self.ids[at])) {
            counts.recent -= 1;
        }
    }

    /// Changes the logits; [`LogitChanges::undo`] takes the changes back.
    pub fn apply(&mut self, sampling: &Sampling, logits: &mut [f32]) {
        let LogitChanges { ids, prompt, ends, counts, changed } = self;
        changed.clear();
        let mut change = |id: u32, to: &dyn Fn(f32) -> f32| {
            if let Some(v) = logits.get_mut(id as usize) {
                changed.push((id as usize, *v));
                *v = to(*v);
            }
        };
        for bias in &sampling.biases {
            if let Some((&id, before)) = bias.tokens.split_last()
                && ids.ends_with(before)
            {
                change(id, &|v| v + bias.bias);
            }
        }
        let Sampling { repetition_penalty: repetition, presence_penalty, frequency_penalty, .. } = *sampling;
        if (repetition, presence_penalty, frequency_penalty) != (1.0, 0.0, 0.0) {
            for (&id, &TokenCounts { recent, answer }) in counts.iter() {
                change(id, &|v| {
                    let v = match recent > 0 {
                        true if v < 0.0 => v * repetition,
                        true => v / repetition,
                        false => v,
                    };
                    let presence = if answer > 0 { presence_penalty } else { 0.0 };
                    v - frequency_penalty * answer as f32 - presence
                });
            }
        }
        let said = ids.len() - *prompt;
        if said < sampling.min_new || ids.len() < sampling.min_length {
            ends.iter().for_each(|&id| change(id, &|_| f32::NEG_INFINITY));
        }
        if said == 0 {
            sampling.begin_suppress.iter().for_each(|&id| change(id, &|_| f32::NEG_INFINITY));
        }
    }

    /// Gives the logits their values before [`LogitChanges::apply`].
    pub fn undo(&mut self, logits: &mut [f32]) {
        self.changed.drain(..).rev().for_each(|(i, v)| logits[i] = v);
    }
}
