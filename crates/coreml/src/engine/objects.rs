//! Objects that Core ML owns for a backend, on one thread.

use super::arrays::{Element, HostArray, StatePart, move_rows};
use super::failure::Failure;
use super::instance::{Instance, SequenceObjects};
use super::interface::{Interface, StateSlot, StatesKey};
use anemoe_runtime::tensor::Tensor;
use block2::StackBlock;
use objc2::rc::Retained;
use objc2_core_ml::{MLModel, MLMultiArray, MLState};
use objc2_foundation::NSString;
use std::cell::RefCell;
use std::collections::BTreeMap;
use std::ptr::NonNull;
use std::sync::Arc;

/// Key of a function of an open package.
pub(crate) type FunctionKey = u64;

/// Values of states, then of caches, as fp16 bits: one list each, without gaps.
pub(crate) type StateValues = Vec<Vec<u16>>;

/// A part of one state.
#[derive(Clone, Copy)]
pub(crate) struct RowsOf<'a> {
    pub states: &'a [StateSlot],
    /// Index of the state.
    pub state: usize,
    /// First row.
    pub first: usize,
}

/// Loaded functions, and states of sequences.
#[derive(Default)]
pub(crate) struct Objects {
    // States are declared first, so that they are dropped before the functions that made them.
    states: BTreeMap<StatesKey, States>,
    functions: BTreeMap<FunctionKey, LoadedModel>,
    /// Bytes of functions that are loaded or loading.
    bytes: u64,
    /// Number of uses so far, by which the least recently used function is found.
    clock: u64,
}

struct LoadedModel {
    instance: Instance,
    bytes: u64,
    used: u64,
}

struct States {
    slots: Arc<[StateSlot]>,
    live: Option<Live>,
    /// Values from which the next call starts.
    saved: Option<StateValues>,
    /// Caches that functions take as inputs. All functions get these same arrays.
    caches: Vec<CacheArray>,
}

/// A cache of a sequence, with as many slots as the last called function took. A sequence that outgrows a function is
/// copied once, not for every call.
struct CacheArray {
    whole: StateSlot,
    /// `None` while it is all zero and no function was called.
    array: Option<HostArray>,
}

impl CacheArray {
    /// Resizes the array to the slots that a function takes. Tells whether the array is a new one.
    fn fit(&mut self, slots: usize) -> Result<bool, Failure> {
        let made = match &mut self.array {
            Some(array) if array.slots() == slots => return Ok(false),
            Some(array) => array.with_slots(slots)?,
            None => {
                let mut shape = self.whole.shape.clone();
                if let Some(own) = shape.get_mut(2) {
                    *own = slots;
                }
                HostArray::new(&shape, Element::F16)?
            }
        };
        self.array = Some(made);
        Ok(true)
    }

    /// Replaces the contents. Tells whether the array is a new one.
    fn write(&mut self, bits: &[u16]) -> Result<bool, Failure> {
        let moved = self.fit(self.whole.shape.get(2).copied().unwrap_or(0))?;
        let array = self.array.as_mut().ok_or(Failure::Absent)?;
        array.write_bits(bits).map_err(Failure::Misfit)?;
        Ok(moved)
    }

    /// Reads all slots; slots that the array lacks are zero.
    fn read(&mut self) -> Result<Vec<u16>, Failure> {
        let slots = self.whole.shape.get(2).copied().unwrap_or(0);
        match &mut self.array {
            None => Ok(vec![0; self.whole.len()]),
            Some(array) if array.slots() == slots => array.read_bits().map_err(Failure::Misfit),
            Some(array) => array.with_slots(slots)?.read_bits().map_err(Failure::Misfit),
        }
    }
}

/// Core ML's states, bound to the model that made them: they must go before the model.
struct Live {
    state: Retained<MLState>,
    maker: FunctionKey,
}

/// Calls `work` with the array of a state.
fn with_array(
    state: &MLState,
    slot: &StateSlot,
    work: &dyn Fn(&MLMultiArray) -> Result<(), String>,
) -> Result<(), Failure> {
    let result = RefCell::new(Err("it was not shown".to_string()));
    let shown = StackBlock::new(|array: NonNull<MLMultiArray>| {
        // SAFETY: the array lives while the block runs, and is not kept.
        *result.borrow_mut() = work(unsafe { array.as_ref() });
    });
    // SAFETY: the block does not outlive the call.
    unsafe { state.getMultiArrayForStateNamed_handler(&NSString::from_str(&slot.name), &shown) };
    result.into_inner().map_err(|what| Failure::Misfit(format!("state `{}`: {what}", slot.name)))
}

fn move_all(
    state: &MLState,
    slots: &[StateSlot],
    values: &mut [Vec<u16>],
    write: bool,
) -> Result<(), Failure> {
    for (slot, bits) in slots.iter().zip(values) {
        let bits = RefCell::new(bits);
        let part = StatePart { shape: &slot.shape, first: 0 };
        with_array(state, slot, &|array| move_rows(array, part, &mut bits.borrow_mut(), write))?;
    }
    Ok(())
}

fn zeros(slots: &[StateSlot]) -> StateValues {
    slots.iter().map(|s| vec![0; s.len()]).collect()
}

impl States {
    /// Reads Core ML's states; `None` where they are all zero.
    fn read(&self) -> Result<Option<StateValues>, Failure> {
        let Some(live) = &self.live else { return Ok(self.saved.clone()) };
        let mut values = zeros(&self.slots);
        move_all(&live.state, &self.slots, &mut values, false)?;
        Ok(Some(values))
    }

    /// Reads states and caches; `None` where there are no caches and all states are zero.
    fn values(&mut self) -> Result<Option<StateValues>, Failure> {
        let own = self.read()?;
        if self.caches.is_empty() {
            return Ok(own);
        }
        let mut values = own.unwrap_or_else(|| zeros(&self.slots));
        for cache in &mut self.caches {
            values.push(cache.read()?);
        }
        Ok(Some(values))
    }
}

impl Objects {
    /// Tells whether the function is loaded.
    pub fn holds(&self, function: FunctionKey) -> bool {
        self.functions.contains_key(&function)
    }

    /// Tells whether `bytes` more fit without unloading anything.
    fn has_room(&self, bytes: u64, limit: Option<u64>) -> bool {
        limit.is_none_or(|limit| self.bytes.saturating_add(bytes) <= limit)
    }

    /// Reserves `bytes` if they fit without unloading anything. Tells whether they do.
    pub fn reserve_free(&mut self, bytes: u64, limit: Option<u64>) -> bool {
        let fits = self.has_room(bytes, limit);
        self.bytes += if fits { bytes } else { 0 };
        fits
    }

    /// Reserves `bytes`, and unloads functions until they fit: the least recently used first, functions whose states
    /// are live last. No call runs meanwhile, since one thread does both.
    pub fn reserve(&mut self, bytes: u64, limit: Option<u64>) -> Result<(), Failure> {
        while !self.has_room(bytes, limit) {
            let makers: Vec<FunctionKey> =
                self.states.values().filter_map(|s| s.live.as_ref().map(|live| live.maker)).collect();
            let last = self.functions.iter().min_by_key(|(key, f)| (makers.contains(key), f.used));
            let Some(key) = last.map(|(key, _)| *key) else { break };
            self.unload(key)?;
        }
        self.bytes += bytes;
        Ok(())
    }

    /// Releases the reservation for a function that did not load.
    pub fn cancel(&mut self, bytes: u64) {
        self.bytes = self.bytes.saturating_sub(bytes);
    }

    /// Adds a loaded function whose bytes are reserved.
    pub fn insert(
        &mut self,
        function: FunctionKey,
        model: Retained<MLModel>,
        interface: Arc<Interface>,
        bytes: u64,
    ) {
        self.clock += 1;
        let loaded = LoadedModel { instance: Instance::new(model, interface), bytes, used: self.clock };
        if let Some(old) = self.functions.insert(function, loaded) {
            self.cancel(old.bytes);
        }
    }

    /// Unloads a function. Its live states are saved as values.
    pub fn unload(&mut self, function: FunctionKey) -> Result<(), Failure> {
        for states in self.states.values_mut() {
            if states.live.as_ref().is_some_and(|live| live.maker == function) {
                states.saved = states.read()?;
                states.live = None;
            }
        }
        if let Some(gone) = self.functions.remove(&function) {
            self.cancel(gone.bytes);
        }
        Ok(())
    }

    /// Runs a function, with the states of a sequence if it has any.
    pub fn predict(
        &mut self,
        function: FunctionKey,
        states: Option<StatesKey>,
        inputs: &[&Tensor],
        outputs: &mut Vec<Tensor>,
    ) -> Result<(), Failure> {
        self.clock += 1;
        let Objects { functions, states: all, clock, .. } = self;
        let loaded = functions.get_mut(&function).ok_or(Failure::Absent)?;
        loaded.used = *clock;
        let Some(key) = states else { return loaded.instance.predict(inputs, None, outputs) };
        let states = all.get_mut(&key).ok_or(Failure::Absent)?;
        let (mut has_moved, mut failed) = (false, None);
        for (cache, slots) in states.caches.iter_mut().zip(loaded.instance.cache_slots()) {
            match cache.fit(slots) {
                Ok(moved) => has_moved |= moved,
                // Caches before the failing one may have moved.
                Err(failure) => {
                    (failed, has_moved) = (Some(failure), true);
                    break;
                }
            }
        }
        if has_moved {
            functions.values_mut().for_each(|f| f.instance.forget(key));
        }
        if let Some(failure) = failed {
            return Err(failure);
        }
        let loaded = functions.get_mut(&function).ok_or(Failure::Absent)?;
        let takes_state = loaded.instance.takes_state();
        if takes_state && states.live.is_none() {
            let state = loaded.instance.new_state();
            if let Some(values) = &mut states.saved {
                move_all(&state, &states.slots, values, true)?;
            }
            states.saved = None;
            states.live = Some(Live { state, maker: function });
        }
        let state = states.live.as_ref().filter(|_| takes_state).map(|live| &*live.state);
        let caches = states.caches.iter_mut().filter_map(|cache| cache.array.as_mut()).collect();
        let sequence = SequenceObjects { key, state, caches };
        loaded.instance.predict(inputs, Some(sequence), outputs)
    }

    /// Makes states and caches of a sequence, all zero or with values.
    pub fn begin(
        &mut self,
        key: StatesKey,
        slots: Arc<[StateSlot]>,
        caches: &[StateSlot],
        values: Option<StateValues>,
    ) -> Result<(), Failure> {
        let mut saved = values;
        let in_caches = saved.as_mut().map(|v| v.split_off(slots.len().min(v.len()))).unwrap_or_default();
        let mut arrays = Vec::with_capacity(caches.len());
        for (i, slot) in caches.iter().enumerate() {
            let mut array = None;
            if let Some(bits) = in_caches.get(i) {
                let mut whole = HostArray::new(&slot.shape, Element::F16)?;
                whole.write_bits(bits).map_err(Failure::Misfit)?;
                array = Some(whole);
            }
            arrays.push(CacheArray { whole: slot.clone(), array });
        }
        self.states.insert(key, States { slots, live: None, saved, caches: arrays });
        Ok(())
    }

    /// Drops the states and caches of a sequence.
    pub fn end(&mut self, key: StatesKey) {
        self.functions.values_mut().for_each(|f| f.instance.forget(key));
        self.states.remove(&key);
    }

    /// Reads states and caches of a sequence; `None` where they are all zero.
    pub fn values(&mut self, key: StatesKey) -> Result<Option<StateValues>, Failure> {
        self.states.get_mut(&key).map_or(Ok(None), States::values)
    }

    /// Replaces the contents of cache `cache` of a sequence.
    pub fn write_cache(&mut self, key: StatesKey, cache: usize, bits: &[u16]) -> Result<(), Failure> {
        let states = self.states.get_mut(&key).ok_or(Failure::Absent)?;
        if states.caches.get_mut(cache).ok_or(Failure::Absent)?.write(bits)? {
            self.functions.values_mut().for_each(|f| f.instance.forget(key));
        }
        Ok(())
    }

    /// Copies rows of a state between Core ML's memory and `bits`: into Core ML's memory if `write`, else into `bits`.
    pub fn move_rows(
        &mut self,
        key: StatesKey,
        rows: RowsOf<'_>,
        bits: &mut [u16],
        write: bool,
    ) -> Result<(), Failure> {
        let (Some(states), Some(slot)) = (self.states.get_mut(&key), rows.states.get(rows.state)) else {
            return Err(Failure::Absent);
        };
        let part = StatePart { shape: &slot.shape, first: rows.first };
        if let Some(live) = &states.live {
            let bits = RefCell::new(bits);
            return with_array(&live.state, slot, &|array| {
                move_rows(array, part, &mut bits.borrow_mut(), write)
            });
        }
        let saved = states.saved.get_or_insert_with(|| zeros(rows.states));
        let &[_, heads, all, d] = slot.shape.as_slice() else { return Err(Failure::Absent) };
        let own = saved.get_mut(rows.state).map(Vec::as_mut_slice).unwrap_or_default();
        let tail = (all - rows.first.min(all)) * d;
        for (head, bits) in
            own.chunks_exact_mut((all * d).max(1)).zip(bits.chunks_exact_mut(tail.max(1))).take(heads)
        {
            let own = &mut head[all * d - tail..];
            if write { own.copy_from_slice(bits) } else { bits.copy_from_slice(own) }
        }
        Ok(())
    }
}
