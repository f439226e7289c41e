//! One sequence: its tokens, and the states after them.

use super::kept_rows::{MOST_UNDONE, NewestRows, RowsByInput};
use super::{Logits, Model};
use crate::backend::SequenceStates;
use crate::{Error, Result};
use anemoe_bundle::Cache;
use std::collections::BTreeMap;

/// Id of a token that was given by registers or filled with noise: it cannot be run again.
pub(super) const UNKNOWN: u32 = u32::MAX;
/// Most tokens that a cut may run again after going back to earlier states: the tokens of one pass.
pub const MOST_RUN_AGAIN: usize = 64;
/// First bytes of a saved sequence.
const MAGIC: &[u8; 20] = b"anemoe sequence v2\0\0";

/// Values that a sequence carries from call to call in one package.
pub(super) struct PackageStates {
    pub states: Box<dyn SequenceStates>,
    pub rows: RowsByInput,
}

impl PackageStates {
    fn clear(&mut self) {
        self.states.clear();
        self.rows.clear();
    }

    fn can_rewind(&self, tokens: usize) -> bool {
        self.rows.values().all(|rows| rows.can_rewind(tokens)) && self.states.can_rewind(tokens)
    }

    fn rewind(&mut self, tokens: usize) -> Result<()> {
        self.states.rewind(tokens)?;
        self.rows.values_mut().for_each(|rows| rows.rewind(tokens));
        Ok(())
    }

    fn save(&self, out: &mut Vec<u8>) -> Result<()> {
        self.states.save(out)?;
        out.extend((self.rows.len() as u64).to_le_bytes());
        for (name, rows) in &self.rows {
            out.extend((name.len() as u64).to_le_bytes());
            out.extend(name.as_bytes());
            rows.save(out);
        }
        Ok(())
    }

    fn restore(&mut self, bytes: &mut &[u8]) -> Result<()> {
        self.states.restore(bytes)?;
        let rows = |bytes: &mut &[u8]| {
            let mut rows = RowsByInput::new();
            for _ in 0..number(bytes)? {
                let length = number(bytes)?;
                let name = String::from_utf8(bytes.split_off(..length)?.to_vec()).ok()?;
                rows.insert(name, NewestRows::restore(bytes)?);
            }
            Some(rows)
        };
        self.rows = rows(bytes).ok_or_else(|| wrong("its rows are cut short or wrong"))?;
        Ok(())
    }
}

fn wrong(what: &str) -> Error {
    Error::input(format!("saved sequence: {what}"))
}

/// Takes a number from the front of `bytes`; none where they end early.
fn number(bytes: &mut &[u8]) -> Option<usize> {
    usize::try_from(u64::from_le_bytes(bytes.split_off(..8)?.try_into().ok()?)).ok()
}

/// One sequence of tokens in a [`Model`], with one set of states per package. Making a sequence is cheap: memory for its states
/// is allocated with its first token.
pub struct Sequence {
    /// Number of the sequence's model.
    pub(super) model: u64,
    pub(super) packages: Vec<PackageStates>,
    /// Every token so far.
    pub(super) ids: Vec<u32>,
    /// One more than the highest position whose row is in the caches; tokens that were cut off count.
    pub(super) highest: usize,
    /// True if a call failed half-way, so that the states do not fit the tokens.
    pub(super) is_broken: bool,
    /// Sequence of a small model that drafts for this one. It is brought to the same tokens where it drafts.
    pub(crate) companion: Option<Box<Companion>>,
    /// First position and hidden states of the last pass, one behind the other, where the model keeps them.
    pub(super) hidden: (usize, Vec<f32>),
    /// In the sequence of an assistant: the positions whose keys it sees, and what `highest` is of their sequence.
    pub(super) lent: Option<(usize, usize)>,
}

/// Sequence of a small model beside a sequence of its target, whose first token it has, and the tokens after a gap.
pub(crate) struct Companion {
    pub sequence: Sequence,
    /// Tokens after the first one that the small model does not read.
    pub gap: usize,
}

impl Sequence {
    /// Returns the number of tokens.
    pub fn position(&self) -> usize {
        self.ids.len()
    }

    /// Tells whether the sequence is of `model`.
    pub(crate) fn is_of(&self, model: &Model) -> bool {
        self.model == model.number
    }

    /// Returns the tokens; those that were given by registers are unknown.
    pub(crate) fn ids(&self) -> &[u32] {
        &self.ids
    }

    /// Returns the number of tokens at the beginning that are equal to those of `ids`; 0 after a failed call.
    pub fn shared_with<'a>(&self, ids: impl IntoIterator<Item = &'a u32>) -> usize {
        if self.is_broken {
            return 0;
        }
        self.ids.iter().zip(ids).take_while(|(a, b)| a == b).count()
    }

    /// Forgets all tokens.
    pub fn clear(&mut self) {
        self.packages.iter_mut().for_each(PackageStates::clear);
        self.ids.clear();
        (self.highest, self.is_broken) = (0, false);
        self.hidden.1.clear();
    }

    /// Copies the sequence, for instance after a prompt that several answers share.
    ///
    /// # Errors
    /// The backend cannot read states.
    pub fn fork(&self) -> Result<Sequence> {
        Ok(Sequence {
            model: self.model,
            packages: self
                .packages
                .iter()
                .map(|p| Ok(PackageStates { states: p.states.fork()?, rows: p.rows.clone() }))
                .collect::<Result<_>>()?,
            ids: self.ids.clone(),
            highest: self.highest,
            is_broken: self.is_broken,
            hidden: self.hidden.clone(),
            lent: self.lent,
            // Without a copy, the small model begins anew.
            companion: self.companion.as_ref().and_then(|c| {
                let sequence = c.sequence.fork().ok()?;
                Some(Box::new(Companion { sequence, gap: c.gap }))
            }),
        })
    }

    /// Adds tokens that were given by their registers.
    pub(super) fn push_unknown(&mut self, tokens: usize) {
        self.ids.extend(std::iter::repeat_n(UNKNOWN, tokens));
        self.hidden.1.clear();
        self.highest = self.highest.max(self.ids.len());
    }

    /// Tells whether the rows of ring caches from `position - window` on are of the sequence's own tokens, not of tokens cut off.
    pub(super) fn has_rows_before(&self, position: usize, caches: &BTreeMap<String, Cache>) -> bool {
        caches.values().all(|cache| {
            let seen = cache.window.map_or(position, |w| position.min(w.saturating_sub(1)));
            // The row of a position is overwritten by the position `slots` later.
            let oldest = position - seen;
            seen == 0 || self.highest <= oldest + cache.slots
        })
    }

    /// Returns bytes from which [`Model::restore`] makes the same sequence, in this version of the program.
    ///
    /// # Errors
    /// The backend cannot read states, or an earlier call failed half-way.
    pub fn save(&self, model: &Model) -> Result<Vec<u8>> {
        model.check(self)?;
        let mut out = MAGIC.to_vec();
        out.extend(model.identity());
        for n in [self.ids.len(), self.highest, self.packages.len()] {
            out.extend((n as u64).to_le_bytes());
        }
        self.ids.iter().for_each(|id| out.extend(id.to_le_bytes()));
        self.packages.iter().try_for_each(|package| package.save(&mut out))?;
        Ok(out)
    }
}

impl Model {
    /// Fills the caches of a sequence with noise for `tokens` tokens, for measurements of time, which does not depend on values.
    ///
    /// # Errors
    /// The context holds fewer tokens, or the backend cannot write states.
    pub fn fill_with_noise(&self, sequence: &mut Sequence, tokens: usize, seed: u64) -> Result<()> {
        let room = self.chain.model.max_context;
        if tokens > room {
            return Err(Error::input(format!("a context of {tokens} tokens, where the bundle holds {room}")));
        }
        sequence.clear();
        // States are allocated with the first token.
        self.append(sequence, &[0], Logits::None, None)?;
        sequence.ids.clear();
        let mut random = anemoe_io::Random::new(seed);
        for (i, PackageStates { states, rows }) in sequence.packages.iter_mut().enumerate() {
            rows.values_mut().for_each(|rows| rows.fill_with_noise(&mut random));
            if !states.fill_with_noise(seed + i as u64) {
                return Err(Error::input("this backend cannot write states"));
            }
        }
        sequence.push_unknown(tokens);
        Ok(())
    }

    /// Refuses a sequence of another model, or one with a failed call.
    pub(super) fn check(&self, sequence: &Sequence) -> Result<()> {
        if sequence.model != self.number {
            return Err(Error::input("a sequence of another model"));
        }
        if sequence.is_broken {
            return Err(Error::input("a call of this sequence failed: clear it first"));
        }
        Ok(())
    }

    /// Makes an empty sequence.
    pub fn sequence(&self) -> Sequence {
        Sequence {
            model: self.number,
            packages: self
                .packages
                .iter()
                .map(|p| PackageStates { states: p.new_states(), rows: RowsByInput::new() })
                .collect(),
            ids: Vec::with_capacity(self.chain.model.max_context.min(1 << 12)),
            highest: 0,
            is_broken: false,
            companion: None,
            hidden: Default::default(),
            lent: None,
        }
    }

    /// Cuts a sequence back to its first `length` tokens. Tokens of the last call are undone at once. For earlier tokens, ring
    /// caches and carried rows may lack the needed rows, and then the remaining tokens are run again. In both cases the
    /// sequence is bit for bit as it was after these tokens.
    ///
    /// # Errors
    /// The sequence is shorter, or tokens that have to run again were given by registers: nothing changes then. Or a package
    /// fails.
    pub fn truncate(&self, sequence: &mut Sequence, length: usize) -> Result<()> {
        self.check(sequence)?;
        let position = sequence.position();
        if length > position {
            return Err(Error::input(format!("a sequence of {position} tokens truncated to {length}")));
        }
        if length == position {
            return Ok(());
        }
        if length == 0 {
            sequence.clear();
            return Ok(());
        }
        if let Some(back) = self.tokens_to_rewind(sequence, length) {
            sequence.is_broken = true;
            sequence.packages.iter_mut().try_for_each(|package| package.rewind(back))?;
            sequence.is_broken = false;
            let again = sequence.ids[position - back..length].to_vec();
            sequence.ids.truncate(position - back);
            if again.is_empty() {
                return Ok(());
            }
            return self.append(sequence, &again, Logits::None, None).map(|_| ());
        }
        if sequence.ids[..length].contains(&UNKNOWN) {
            return Err(Error::input("tokens that were given by registers cannot be run again"));
        }
        let ids = sequence.ids[..length].to_vec();
        sequence.clear();
        self.append(sequence, &ids, Logits::None, None).map(|_| ())
    }

    /// Returns how many tokens the states can rewind to reach `length`, or less and run the rest again; none where they cannot.
    fn tokens_to_rewind(&self, sequence: &Sequence, length: usize) -> Option<usize> {
        let position = sequence.position();
        // A backend may undo only whole calls: tokens that remain of such a call run again.
        let can = |back: &usize| {
            let kept = position - back;
            sequence.has_rows_before(kept, &self.chain.caches)
                && sequence.packages.iter().all(|package| package.can_rewind(*back))
                && !sequence.ids[kept..length].contains(&UNKNOWN)
        };
        let undone = position - length;
        (undone..=position.min(undone + MOST_RUN_AGAIN)).find(can)
    }

    /// Returns how many tokens [`Model::truncate`] would run again to cut a sequence back to `length`.
    pub fn tokens_to_run_again(&self, sequence: &Sequence, length: usize) -> usize {
        let position = sequence.position();
        if length == 0 || length >= position {
            return 0;
        }
        self.tokens_to_rewind(sequence, length).map_or(length, |back| length + back - position)
    }

    /// Returns how many tokens, at most `most`, a pass may append after one more token such that [`Model::truncate`] cuts them
    /// off without running tokens again. Returns 0 where the states do not tell, as after a long pass.
    pub fn most_to_undo(&self, sequence: &Sequence, most: usize) -> usize {
        if !sequence.packages.iter().all(|package| package.can_rewind(1)) {
            return 0;
        }
        let length = sequence.position() + 1;
        // The condition of `has_rows_before`, with the rows of all appended tokens in the rings.
        let room = |cache: &Cache| {
            let seen = cache.window.map_or(length, |w| length.min(w.saturating_sub(1)));
            (length - seen + cache.slots).saturating_sub(length)
        };
        let rings = self.chain.caches.values().map(room).min().unwrap_or(most);
        most.min(rings).min(MOST_UNDONE)
    }

    /// Makes a sequence from the bytes of [`Sequence::save`].
    ///
    /// # Errors
    /// The bytes are no sequence of this model, or end early.
    pub fn restore(&self, bytes: &[u8]) -> Result<Sequence> {
        let mut rest = bytes;
        let magic = rest.split_off(..MAGIC.len()).ok_or_else(|| wrong("it ends early"))?;
        if magic != MAGIC {
            return Err(wrong("it does not begin as one of this version"));
        }
        let identity = self.identity();
        if rest.split_off(..identity.len()) != Some(identity.as_slice()) {
            return Err(wrong("it is of another bundle"));
        }
        let mut numbers = [0; 3];
        for n in &mut numbers {
            *n = number(&mut rest).ok_or_else(|| wrong("it ends early"))?;
        }
        let [length, highest, packages] = numbers;
        let most = self.chain.model.max_context;
        if length > most || highest > most || length > highest {
            return Err(wrong("its lengths do not fit each other or the context"));
        }
        if packages != self.packages.len() {
            return Err(wrong("it has states of another number of packages"));
        }
        let mut sequence = self.sequence();
        let ids = rest.split_off(..4 * length).ok_or_else(|| wrong("it ends early"))?;
        let ids = ids.as_chunks::<4>().0.iter().map(|b| u32::from_le_bytes(*b));
        sequence.ids.extend(ids);
        let vocabulary = self.chain.model.vocab_size;
        if sequence.ids.iter().any(|&id| id as usize >= vocabulary && id != UNKNOWN) {
            return Err(wrong("a token is outside the vocabulary"));
        }
        sequence.packages.iter_mut().try_for_each(|package| package.restore(&mut rest))?;
        if !rest.is_empty() {
            return Err(wrong("there is something behind its end"));
        }
        sequence.highest = highest;
        Ok(sequence)
    }
}
