//! Drafts of a small model with the same tokens.
//!
//! ```text
//! target's sequence  t0 t1 .. tn        its companion in the small model  t0 t1 .. tm, m <= n
//! follow: cut the companion back to what both share, append the rest
//! draft:  row of logits --copy of the target's sampler--> token --small model--> next row ..
//! ```
//! The copy draws with the random numbers that the target's sampler will draw with. So both choose the same token wherever their
//! probabilities are alike, and the target's tokens stay those of plain decoding with the same seed.

use crate::Result;
use crate::model::{Logits, Model, Sequence};
use crate::sampler::Sampler;
use std::time::Instant;

/// Cuts `own`, a sequence of `small`, back to what it shares with `ids`, and returns how much that is.
fn shared(small: &Model, own: &mut Sequence, ids: &[u32]) -> Result<usize> {
    let shared = own.shared_with(ids);
    match shared {
        // Clearing also repairs a sequence whose last call failed.
        0 => own.clear(),
        _ => small.truncate(own, shared)?,
    }
    Ok(shared)
}

/// Brings `own` nearer to `ids`, by at most one pass of prompt tokens. Returns the seconds of the last token, for which it ran by
/// itself, once `own` has all of them; none before.
///
/// # Errors
/// The small model fails.
pub(super) fn follow(small: &Model, own: &mut Sequence, ids: &[u32]) -> Result<Option<f64>> {
    // The last token runs in any case, so that its time is known.
    let Some((last, before)) = ids.split_last() else { return Ok(None) };
    let rest = &before[shared(small, own, before)?..];
    let now = rest.len().min(small.most_tokens(None));
    small.append(own, &rest[..now], Logits::None, None)?;
    if now < rest.len() {
        return Ok(None);
    }
    let started = Instant::now();
    small.reuse_rows(small.append(own, &[*last], Logits::Last, None)?);
    Ok(Some(started.elapsed().as_secs_f64()))
}

/// Tells whether `small` can draft `n` tokens after `ids`: it knows the tokens, and its context has room.
pub(super) fn has_room(small: &Model, ids: &[u32], n: usize) -> bool {
    let model = &small.chain().model;
    ids.len() + n <= model.max_context && ids.iter().all(|&id| (id as usize) < model.vocab_size)
}

/// Appends `n` tokens to `draft` that `small` expects after `ids`; fewer where it expects one outside the target's `vocabulary`.
///
/// # Errors
/// The small model fails.
pub(super) fn draft(
    small: &Model,
    own: &mut Sequence,
    (ids, n): (&[u32], usize),
    (sampler, vocabulary): (&Sampler, usize),
    draft: &mut Vec<u32>,
) -> Result<()> {
    let mut sampler = sampler.ahead();
    let shared = shared(small, own, &ids[..ids.len() - 1])?;
    let mut rows = small.append(own, &ids[shared..], Logits::Last, None)?;
    for i in 0..n {
        let Some(row) = rows.last_mut() else { break };
        row.resize(vocabulary, f32::NEG_INFINITY);
        let id = sampler.next(row) as u32;
        if id as usize >= small.chain().model.vocab_size {
            break;
        }
        draft.push(id);
        small.reuse_rows(rows.drain(..));
        if i + 1 < n {
            rows = small.append(own, &[id], Logits::Last, None)?;
        }
    }
    small.reuse_rows(rows);
    Ok(())
}
