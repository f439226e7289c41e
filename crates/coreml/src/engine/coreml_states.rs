//! States of a sequence in one package.

use super::failure::Failure;
use super::interface::{StateSlot, StatesKey, UndoRule};
use super::loading::Engine;
use super::objects::{RowsOf, StateValues};
use crate::{Error, Result};
use anemoe_runtime::backend::SequenceStates;
use anemoe_runtime::model::MOST_UNDONE;
use std::any::Any;
use std::collections::VecDeque;
use std::path::PathBuf;
use std::sync::{Arc, OnceLock};

/// First bytes of saved states.
const MAGIC: u64 = u64::from_le_bytes(*b"mlstate1");

/// Facts of a package that the states of all its sequences share.
pub(crate) struct StatesInfo {
    pub package: PathBuf,
    /// Core ML's states, by name and shape.
    pub slots: Arc<[StateSlot]>,
    /// Caches that functions take as inputs, by name and shape.
    pub caches: Arc<[StateSlot]>,
    /// Set when a function with states is prepared.
    pub rule: OnceLock<UndoRule>,
}

impl StatesInfo {
    /// Iterates over states and caches in the order of [`StateValues`].
    fn all(&self) -> impl Iterator<Item = &StateSlot> {
        self.slots.iter().chain(self.caches.iter())
    }
}

/// States and caches of a sequence in one package.
pub(super) struct CoreMlStates {
    engine: Arc<Engine>,
    info: Arc<StatesInfo>,
    key: StatesKey,
    /// True if Core ML's thread has the states; before that, they are all zero.
    has_begun: bool,
    /// Token counts of the last calls, and the rows that they overwrote; the newest last.
    calls: VecDeque<(usize, Vec<u16>)>,
}

impl CoreMlStates {
    pub fn new(engine: Arc<Engine>, info: Arc<StatesInfo>) -> CoreMlStates {
        let key = engine.new_key();
        CoreMlStates { engine, info, key, has_begun: false, calls: VecDeque::new() }
    }

    fn failed(&self, failure: Failure) -> Error {
        failure.at(&self.info.package, "states")
    }

    /// Makes the states on Core ML's thread, with `values` or all zero.
    fn begin(&mut self, values: Option<StateValues>) -> Result<()> {
        let (key, slots, caches) = (self.key, self.info.slots.clone(), &self.info.caches);
        let begun = self.engine.ask(|o| o.begin(key, slots, caches, values));
        begun.map_err(|e| self.failed(e))?;
        self.has_begun = true;
        Ok(())
    }

    fn rows(&self) -> Option<RowsOf<'_>> {
        match self.info.rule.get() {
            Some(UndoRule::Rows { state, first, .. }) => {
                Some(RowsOf { states: &self.info.slots, state: *state, first: *first })
            }
            _ => None,
        }
    }

    /// Readies the states for a call of `tokens` tokens and keeps a copy of the rows that the call overwrites. Returns
    /// the states' key.
    pub fn ready(&mut self, tokens: usize) -> Result<StatesKey> {
        if !self.has_begun {
            self.begin(None)?;
        }
        // Reuses the memory of the oldest copy.
        let oldest = if self.calls.len() >= MOST_UNDONE { self.calls.pop_front() } else { None };
        let mut bits = oldest.map(|(_, bits)| bits).unwrap_or_default();
        let Some(rows) = self.rows() else { return Ok(self.key) };
        let &[_, heads, all, d] = rows.states[rows.state].shape.as_slice() else { return Ok(self.key) };
        bits.resize(heads * all.saturating_sub(rows.first) * d, 0);
        let key = self.key;
        let moved = self.engine.ask(|o| o.move_rows(key, rows, &mut bits, false));
        moved.map_err(|e| self.failed(e))?;
        self.calls.push_back((tokens, bits));
        Ok(self.key)
    }

    /// Returns how many of the last calls had `tokens` tokens together; `None` where no number of calls adds up to it.
    fn calls_of(&self, tokens: usize) -> Option<usize> {
        let mut left = tokens;
        for (count, (n, _)) in self.calls.iter().rev().enumerate() {
            if left == 0 {
                return Some(count);
            }
            left = left.checked_sub(*n)?;
        }
        (left == 0).then_some(self.calls.len())
    }

    fn values(&self) -> Result<Option<StateValues>> {
        if !self.has_begun {
            return Ok(None);
        }
        let key = self.key;
        self.engine.ask(|o| o.values(key)).map_err(|e| self.failed(e))
    }

    fn end(&mut self) {
        if self.has_begun {
            let key = self.key;
            let _ = self.engine.ask(|o| {
                o.end(key);
                Ok(())
            });
        }
        self.has_begun = false;
        self.calls.clear();
    }

    /// Replaces the states by `values`, or by zeros.
    fn replace(&mut self, values: Option<StateValues>) -> Result<()> {
        self.end();
        match values {
            None => Ok(()),
            values => self.begin(values),
        }
    }
}

impl Drop for CoreMlStates {
    fn drop(&mut self) {
        self.end();
    }
}

impl SequenceStates for CoreMlStates {
    fn fork(&self) -> Result<Box<dyn SequenceStates>> {
        let mut fork = CoreMlStates::new(self.engine.clone(), self.info.clone());
        fork.replace(self.values()?)?;
        fork.calls = self.calls.clone();
        Ok(Box::new(fork))
    }

    fn clear(&mut self) {
        self.end();
    }

    fn can_rewind(&self, tokens: usize) -> bool {
        match self.info.rule.get() {
            _ if !self.has_begun => true,
            Some(UndoRule::Stay) => true,
            Some(UndoRule::Rows { .. }) => self.calls_of(tokens).is_some(),
            _ => tokens == 0,
        }
    }

    fn rewind(&mut self, tokens: usize) -> Result<()> {
        if !self.has_begun {
            return Ok(());
        }
        let refused = || Error::input(format!("states that cannot undo {tokens} tokens"));
        if !self.can_rewind(tokens) {
            return Err(refused());
        }
        if self.rows().is_some() {
            let calls = self.calls_of(tokens).ok_or_else(refused)?;
            let at = self.calls.len() - calls;
            if let (Some((_, bits)), Some(rows)) = (self.calls.get(at), self.rows()) {
                let (key, mut bits) = (self.key, bits.clone());
                let moved = self.engine.ask(|o| o.move_rows(key, rows, &mut bits, true));
                moved.map_err(|e| self.failed(e))?;
            }
            self.calls.truncate(at);
        }
        Ok(())
    }

    fn save(&self, out: &mut Vec<u8>) -> Result<()> {
        out.extend(MAGIC.to_le_bytes());
        let values = self.values()?;
        out.push(u8::from(values.is_some()));
        for bits in values.iter().flatten() {
            out.extend(bits.iter().flat_map(|b| b.to_le_bytes()));
        }
        Ok(())
    }

    fn restore(&mut self, bytes: &mut &[u8]) -> Result<()> {
        let wrong = || Error::input("saved sequence: its states are cut short, wrong, or of another backend");
        if bytes.split_off(..8) != Some(&MAGIC.to_le_bytes()) {
            return Err(wrong());
        }
        let values = match bytes.split_off_first().ok_or_else(wrong)? {
            0 => None,
            1 => {
                let mut values = StateValues::new();
                for slot in self.info.all() {
                    let part = bytes.split_off(..2 * slot.len()).ok_or_else(wrong)?;
                    values.push(part.as_chunks::<2>().0.iter().map(|b| u16::from_le_bytes(*b)).collect());
                }
                Some(values)
            }
            _ => return Err(wrong()),
        };
        self.replace(values)
    }

    /// Copies the cache: Core ML shows the memory of a state only while a call looks at it.
    fn lend(&mut self, to: &mut dyn SequenceStates, name: &str, shape: [usize; 4]) -> Result<()> {
        let to: &mut dyn Any = to;
        let to: &mut CoreMlStates =
            to.downcast_mut().ok_or_else(|| Error::input("states of another backend"))?;
        let own = self.info.all().last().map_or(&[][..], |slot| slot.shape.as_slice());
        let bits = self.values()?.and_then(|mut values| values.pop());
        let cache = to.info.caches.iter().position(|slot| slot.name == name);
        let (Some(bits), Some(cache), true) = (bits, cache, own == shape) else {
            return Err(Error::input(format!(
                "the model's cache is {own:?}, and its assistant reads {shape:?}: it is the assistant of another model"
            )));
        };
        if !to.has_begun {
            to.begin(None)?;
        }
        let key = to.key;
        let written = to.engine.ask(|o| o.write_cache(key, cache, &bits));
        written.map_err(|e| to.failed(e))
    }

    fn fill_with_noise(&mut self, seed: u64) -> bool {
        let mut random = anemoe_io::Random::new(seed);
        // fp16 bits of either sign, with magnitudes from 0.25 to 0.5.
        let mut noise = || 0x3400 | random.below(1 << 10) as u16 | (random.below(2) as u16) << 15;
        let values = self.info.all().map(|s| (0..s.len()).map(|_| noise()).collect());
        let values = values.collect();
        self.replace(Some(values)).is_ok()
    }
}
