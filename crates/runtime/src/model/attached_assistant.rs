//! Drafts of an assistant: a small model that reads the caches and the hidden state of the model that it drafts for, its target.
//!
//! ```text
//! target's sequence   t0 t1 .. tn-1 in its caches, tn newest       hidden state h of tn-1, after the final norm
//! step 1   input [E(tn); h]    at position n, over the keys of 0 .. n-1  -> logits of tn+1, h'
//! step 2   input [E(tn+1); h'] at position n, over the same keys         -> logits of tn+2, h"  ..
//! ```
//! The caches move to the assistant for the steps and back after them; a backend may copy them.

use super::sequence::{Companion, UNKNOWN};
use super::{Model, Sequence, locked};
use crate::cpu::{dot, read_constant};
use crate::{Error, Result};
use anemoe_bundle::{CHAIN_FILE, Centroids, Chain, Kept, Run, Step};
use anemoe_kernels::Pool;
use std::sync::atomic::Ordering;

/// Name of the weights of the final norm in packages of the head.
const FINAL_NORM: &str = "final_norm_weight";

/// A cache that the target lends.
struct LentCache {
    /// Index of the target's package that holds it, and of the assistant's that reads it.
    packages: (usize, usize),
    /// Name of the input that takes it.
    input: String,
    shape: [usize; 4],
}

/// An assistant that fits a target.
pub struct AttachedAssistant {
    small: Model,
    /// Weights and epsilon of the target's final norm.
    norm: (Vec<f32>, f32),
    lent: Vec<LentCache>,
}

/// Place from which an assistant drafts.
#[derive(Clone, Copy, Debug)]
pub struct DraftStart {
    /// Last token that is known.
    pub token: u32,
    /// Position of all steps.
    pub position: usize,
}

/// Returns the runs of a chain.
fn runs(chain: &Chain) -> impl Iterator<Item = &Run> {
    chain.steps.iter().filter_map(|step| if let Step::Run(run) = step { Some(run) } else { None })
}

impl AttachedAssistant {
    /// Attaches an assistant to its target, and runs a step to see that it fits.
    ///
    /// # Errors
    /// The bundle is no assistant, or one of another model; the error says what differs.
    pub fn new(small: Model, target: &Model) -> Result<AttachedAssistant> {
        let (own, other) = (&small.chain, &target.chain);
        let wrong = |what: String| Error::input(format!("assistant {}: {what}", small.bundle.display()));
        let Some(of) = &own.assistant else { return Err(wrong("the bundle is no assistant".into())) };
        if other.assistant.is_some() {
            return Err(wrong("an assistant has no assistant".into()));
        }
        for (what, own, other) in [
            ("a hidden size", of.target_hidden_size, other.model.hidden_size),
            ("a vocabulary", own.model.vocab_size, other.model.vocab_size),
        ] {
            if own != other {
                return Err(wrong(format!(
                    "it is made for a model with {what} of {own}, and this one has {other}"
                )));
            }
        }
        let mut lent = Vec::new();
        for run in runs(own) {
            for (input, kept) in &run.kept {
                let Kept::Lent { cache, heads, channels } = kept else { continue };
                let holder = runs(other).filter(|run| run.cache_names().any(|name| name == cache)).last();
                let (Some(holder), Some(theirs)) = (holder, other.caches.get(cache)) else {
                    let names: Vec<&str> = other.caches.keys().map(String::as_str).collect();
                    let what = format!(
                        "it reads layers of the kind `{cache}`, and the model has {}",
                        names.join(", ")
                    );
                    return Err(wrong(what));
                };
                if own.ropes.get(cache) != other.ropes.get(cache) {
                    return Err(wrong(format!(
                        "layers of the kind `{cache}` turn their heads otherwise than the model's: it is made for another model"
                    )));
                }
                let slots = own.caches[cache].slots;
                if slots != theirs.slots {
                    return Err(wrong(format!(
                        "it is built for {slots} slots of the kind `{cache}`, and the model has {}: build it with the --max-context and \
                         the --tokens of the model",
                        theirs.slots
                    )));
                }
                let package = |chain: &Chain, name: &str| chain.shards.iter().position(|s| s.name == name);
                if let (Some(theirs), Some(own)) = (package(other, &holder.shard), package(own, &run.shard)) {
                    let shape = [1, *heads, slots, *channels];
                    lent.push(LentCache { packages: (theirs, own), input: input.clone(), shape });
                }
            }
        }
        let head =
            other.head.iter().find_map(|step| if let Step::Run(run) = step { Some(run) } else { None });
        let shard = head.and_then(|run| other.shard(&run.shard));
        let norm = match shard.and_then(|shard| Some((shard, shard.functions.first()?))) {
            Some((shard, f)) => read_constant(&target.bundle.join(&shard.file), &f.name, FINAL_NORM)?,
            None => None,
        };
        let norm = norm.filter(|norm| norm.len() == other.model.hidden_size);
        let norm = norm.ok_or_else(|| wrong("the model's head does not begin with a norm".into()))?;
        let norm = (norm, of.eps);
        target.keeps_hidden.store(true, Ordering::Relaxed);
        let attached = AttachedAssistant { small, norm, lent };
        let mut probe = target.sequence();
        target.append(&mut probe, &[0], super::Logits::None, None)?;
        let start = DraftStart { token: 0, position: 1 };
        attached.draft(target, &mut probe, start, 1, &mut |_| None).map_err(|e| {
            Error::input(format!("assistant {}: {}", attached.small.bundle.display(), e.what()))
        })?;
        Ok(attached)
    }

    /// Returns the assistant's own model.
    pub fn model(&self) -> &Model {
        &self.small
    }

    /// Drafts after `start`, at most `n` tokens. `choose` chooses each token from its logits; none ends the draft. Drafts nothing
    /// where the hidden state of the last token is not known, or a context is full.
    ///
    /// # Errors
    /// The assistant fails.
    pub fn draft(
        &self,
        target: &Model,
        sequence: &mut Sequence,
        start: DraftStart,
        n: usize,
        choose: &mut dyn FnMut(&mut [f32]) -> Option<u32>,
    ) -> Result<()> {
        let keys = sequence.position();
        let has_room = start.position < self.small.chain.model.max_context;
        let Some(hidden) = self.hidden_state(sequence, target).filter(|_| has_room) else { return Ok(()) };
        let companion = sequence.companion.take().filter(|c| c.sequence.is_of(&self.small));
        let mut companion =
            companion.unwrap_or_else(|| Box::new(Companion { sequence: self.small.sequence(), gap: 0 }));
        let own = &mut companion.sequence;
        own.is_broken = false;
        own.ids.clear();
        own.ids.resize(start.position, UNKNOWN);
        own.lent = Some((keys, sequence.highest.max(keys)));
        let mut count = 0;
        let done = self.lent.iter().try_for_each(|LentCache { packages: (theirs, ours), input, shape }| {
            let (from, to) = (&mut sequence.packages[*theirs], &mut own.packages[*ours]);
            from.states.lend(to.states.as_mut(), input, *shape)?;
            count += 1;
            Ok(())
        });
        let done = done.and_then(|()| self.steps(target, own, (start.token, hidden), n, choose));
        for LentCache { packages: (theirs, ours), input, .. } in self.lent.iter().take(count) {
            let (to, from) = (&mut sequence.packages[*theirs], &mut own.packages[*ours]);
            to.states.take_back(from.states.as_mut(), input);
        }
        sequence.companion = Some(companion);
        done
    }

    /// Returns the hidden state of the last token of a sequence after the final norm; none where it is not known.
    fn hidden_state(&self, sequence: &Sequence, target: &Model) -> Option<Vec<f32>> {
        let (first, rows) = &sequence.hidden;
        let width = target.chain.model.hidden_size;
        let at = sequence.position().checked_sub(first + 1)?.checked_mul(width)?;
        let row = rows.get(at..at + width).filter(|_| !sequence.is_broken)?;
        let (weights, eps) = &self.norm;
        let mean = row.iter().map(|v| f64::from(*v) * f64::from(*v)).sum::<f64>() / width as f64;
        let factor = (1.0 / (mean + f64::from(*eps)).sqrt()) as f32;
        Some(row.iter().zip(weights).map(|(v, w)| v * factor * w).collect())
    }

    fn steps(
        &self,
        target: &Model,
        own: &mut Sequence,
        (token, hidden): (u32, Vec<f32>),
        n: usize,
        choose: &mut dyn FnMut(&mut [f32]) -> Option<u32>,
    ) -> Result<()> {
        let width = hidden.len();
        let mut input = vec![0.0; width];
        input.extend(hidden);
        let mut token = token;
        for _ in 0..n {
            target.opened(&mut locked(&target.embedding))?.row(token as usize, &mut input[..width])?;
            let (mut logits, state) = self.small.assist(own, &input)?;
            if state.len() != width || logits.len() != target.chain.model.vocab_size {
                return Err(self.small.contradiction("a step leaves registers of other sizes".into()));
            }
            input[width..].copy_from_slice(&state);
            let chosen = choose(&mut logits);
            self.small.reuse_rows([logits]);
            match chosen.filter(|id| (*id as usize) < target.chain.model.vocab_size) {
                Some(id) => token = id,
                None => break,
            }
        }
        Ok(())
    }
}

impl Model {
    /// Runs a step of an assistant on caches of zeros, to see that its packages fit its chain.
    ///
    /// # Errors
    /// The bundle is no assistant, or a package fails.
    pub fn step_on_zeros(&self) -> Result<()> {
        let of = self.chain.assistant.as_ref().ok_or_else(|| Error::input("the bundle is no assistant"))?;
        let mut own = self.sequence();
        own.lent = Some((1, 1));
        self.assist(&mut own, &vec![0.0; 2 * of.target_hidden_size]).map(|_| ())
    }

    /// Computes the logits of the tokens of the best groups from those of the centroids and the normalized stream. Other tokens
    /// have the least of these minus 1.
    pub(super) fn logits_of_groups(&self, of: Centroids, centroids: &[f32], x: &[f32]) -> Result<Vec<f32>> {
        let (vocabulary, cols) = (self.chain.model.vocab_size, self.chain.embedding.cols);
        if centroids.len() != of.count || x.len() != cols {
            return Err(Error::invalid(
                self.bundle.join(CHAIN_FILE),
                format!("head: logits of {} centroids, expected {}", centroids.len(), of.count),
            ));
        }
        let size = vocabulary / of.count;
        let mut order: Vec<usize> = (0..of.count).collect();
        order.sort_unstable_by(|&a, &b| centroids[b].total_cmp(&centroids[a]).then(a.cmp(&b)));
        let mut rows = vec![0.0; of.top_k * size * cols];
        {
            let mut embedding = locked(&self.embedding);
            let embedding = self.opened(&mut embedding)?;
            for (group, rows) in order.iter().zip(rows.chunks_exact_mut(size * cols)) {
                embedding.rows(group * size, rows)?;
            }
        }
        let mut found = vec![0.0; of.top_k * size];
        Pool::global().for_chunks(&mut found, size, &|group, found| {
            let rows = rows[group * size * cols..].chunks_exact(cols);
            found.iter_mut().zip(rows).for_each(|(v, row)| *v = dot(row, x));
        });
        let least = found.iter().copied().fold(f32::INFINITY, f32::min) - 1.0;
        let mut logits = locked(&self.spare_rows).pop().unwrap_or_default();
        logits.clear();
        logits.resize(vocabulary, least);
        for (group, found) in order.iter().zip(found.chunks_exact(size)) {
            for (token, value) in self.token_ordering[group * size..].iter().zip(found) {
                logits[*token as usize] = *value;
            }
        }
        Ok(logits)
    }
}
