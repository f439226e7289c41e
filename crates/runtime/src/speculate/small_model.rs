//! Drafts of a small model with the same tokens.
//!
//! ```text
//! target's sequence                 t0 t1 .. tg tg+1 .. tn
//! its companion in the small model  t0          tg+1 .. tm    m <= n; g is 0 where the whole prompt was read
//! draft:  the companion is truncated to what both share, reads the rest and the newest token,
//!         row of logits --choose--> token --small model--> next row ..
//! ```
//! The small model counts positions without the gap. That changes its drafts, and no token of the target.

use super::wanted_draft::{CATCH_UP, WantedDraft};
use crate::Result;
use crate::model::{Companion, Logits, MOST_RUN_AGAIN, Model, Sequence};

/// Most tokens of a pass that reads what the small model lacks.
const MOST_READ: usize = 64;

/// Prepares the passes of drafts: over what a draft reads along, and over tokens before it.
pub(super) fn prepare(small: &Model) {
    let counts = (1..=CATCH_UP + 1).chain([16, 32, MOST_READ]);
    counts.filter(|n| *n <= small.most_tokens(None)).for_each(|n| small.prepare(n, Logits::Last));
}

/// Returns how many tokens the companion keeps to go on with `ids`, and those that it lacks: the first one, and others.
fn kept<'a>(small: &Model, own: &Companion, ids: &'a [u32]) -> (usize, [&'a [u32]; 2]) {
    let (first, rest) = ids.split_at(ids.len().min(1));
    let rest = &rest[own.gap.min(rest.len())..];
    match own.sequence.shared_with(first.iter().chain(rest)) {
        kept if kept > 0 && small.tokens_to_run_again(&own.sequence, kept) <= MOST_RUN_AGAIN => {
            (kept, [&[], &rest[kept - 1..]])
        }
        _ => (0, [first, rest]),
    }
}

/// Tells whether the small model knows the tokens; those that were given by registers it does not.
fn knows(small: &Model, ids: &[u32]) -> bool {
    ids.iter().all(|&id| (id as usize) < small.chain().model.vocab_size)
}

/// Takes the companion of a sequence, if it is of `small`.
fn companion<'a>(small: &Model, sequence: &'a Sequence) -> Option<&'a Companion> {
    sequence.companion.as_deref().filter(|own| own.sequence.is_of(small))
}

/// Returns how many tokens the companion keeps, and how many it lacks; none where it can keep nothing of what it has, its context
/// ends, or a token is not in its vocabulary.
pub(super) fn progress(small: &Model, sequence: &Sequence) -> Option<(usize, usize)> {
    let own = companion(small, sequence)?;
    let (kept, lacking) = kept(small, own, sequence.ids());
    let n = lacking.iter().map(|ids| ids.len()).sum::<usize>();
    let has_room = kept + n + 1 < small.chain().model.max_context;
    let goes_on = kept > 0 || own.sequence.position() == 0;
    (goes_on && has_room && lacking.iter().all(|ids| knows(small, ids))).then_some((kept, n))
}

/// Returns the most tokens with which a companion begins: half of its context, so that it does not begin anew all the time.
pub(super) fn window(small: &Model) -> usize {
    small.chain().model.max_context / 2
}

/// Makes an empty companion for the newest `tokens` tokens.
pub(super) fn begin(small: &Model, sequence: &mut Sequence, tokens: usize) -> usize {
    let tokens = tokens.min(window(small)).min(sequence.position());
    let gap = sequence.position() - tokens;
    let own = sequence.companion.take().filter(|own| own.sequence.is_of(small));
    let mut own = own.unwrap_or_else(|| Box::new(Companion { sequence: small.sequence(), gap }));
    own.sequence.clear();
    own.gap = gap;
    sequence.companion = Some(own);
    tokens
}

/// Cuts the companion back to what it shares with the sequence, and appends what it lacks, at most `most` tokens, and `newest`
/// after them.
fn append(
    small: &Model,
    sequence: &mut Sequence,
    most: usize,
    newest: Option<u32>,
) -> Result<Option<(usize, Vec<Vec<f32>>)>> {
    let Some(mut own) = sequence.companion.take().filter(|own| own.sequence.is_of(small)) else {
        return Ok(None);
    };
    let (kept, lacking) = kept(small, &own, sequence.ids());
    let lacking = lacking.into_iter().flatten();
    let mut next: Vec<u32> = lacking.copied().take(most).collect();
    let read = next.len();
    next.extend(newest);
    if !knows(small, &next) || kept + next.len() > small.chain().model.max_context {
        return Ok(None);
    }
    match kept {
        // Clearing also repairs a sequence whose last call failed.
        0 => own.sequence.clear(),
        _ => small.truncate(&mut own.sequence, kept)?,
    }
    let logits = if newest.is_some() { Logits::Last } else { Logits::None };
    let rows = small.append(&mut own.sequence, &next, logits, None)?;
    sequence.companion = Some(own);
    Ok(Some((read, rows)))
}

/// Reads at most `most` tokens of those that the companion lacks, in one pass, and returns how many.
///
/// # Errors
/// A package fails.
pub(super) fn read(small: &Model, sequence: &mut Sequence, most: usize) -> Result<usize> {
    let lacking = progress(small, sequence).map_or(0, |(_, lacking)| lacking);
    let most = most.min(lacking).min(MOST_READ).min(small.most_tokens(None));
    // Each number of tokens needs a prepared function.
    let most = if most > CATCH_UP { 1 << most.ilog2() } else { most };
    Ok(append(small, sequence, most, None)?.map_or(0, |(read, _)| read))
}

/// Appends tokens to `draft` that the small model expects, each chosen by `wanted`.
///
/// # Errors
/// A package fails.
pub(super) fn draft(
    small: &Model,
    sequence: &mut Sequence,
    wanted: WantedDraft<'_>,
    draft: &mut Vec<u32>,
) -> Result<()> {
    let Some((_, mut rows)) = append(small, sequence, usize::MAX, Some(wanted.newest))? else {
        return Ok(());
    };
    let (model, vocabulary) = (&small.chain().model, wanted.target.chain().model.vocab_size);
    for i in 1..=wanted.tokens {
        let Some(row) = rows.last_mut() else { break };
        row.resize(vocabulary, f32::NEG_INFINITY);
        let id = (wanted.choose)(row);
        draft.push(id);
        small.reuse_rows(rows.drain(..));
        let Some(own) = sequence.companion.as_mut().filter(|_| i < wanted.tokens) else { break };
        if id as usize >= model.vocab_size || own.sequence.position() >= model.max_context {
            break;
        }
        rows = small.append(&mut own.sequence, &[id], Logits::Last, None)?;
    }
    Ok(())
}
