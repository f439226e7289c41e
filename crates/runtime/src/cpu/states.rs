//! States of a sequence: values that outlive a call.

use super::state_value::{HalfCache, StateValue};
use crate::backend;
use crate::tensor::{Data, Tensor};
use crate::{Error, Result};
use anemoe_kernels::Pool;
use anemoe_mlpackage::mil::{DataType, TensorType};
use std::any::Any;

/// Most dimensions of a saved state.
const MAX_RANK: usize = 8;

/// States of a sequence on the CPU.
#[derive(Clone, Debug, Default)]
pub struct CpuStates {
    pub(super) names: Vec<String>,
    pub(super) types: Vec<TensorType>,
    pub(super) values: Vec<StateValue>,
    /// True if the last call left nothing but rows in slots of caches, which may stay and be masked.
    pub(super) may_stay: bool,
}

impl CpuStates {
    /// Adds a state of zeros; `cache` gives the slots that are held in fp16.
    pub(super) fn add(&mut self, name: &str, ty: &TensorType, cache: Option<usize>) {
        self.names.push(name.to_string());
        self.types.push(ty.clone());
        self.values.push(StateValue::zero(ty, cache));
    }

    /// Returns the names of the states, in order.
    pub fn names(&self) -> &[String] {
        &self.names
    }

    /// Returns the value of a state.
    pub fn get(&self, name: &str) -> Option<Tensor> {
        self.names.iter().position(|n| n == name).map(|i| self.values[i].to_tensor())
    }

    /// Sets a state.
    ///
    /// # Errors
    /// There is no such state, or the value has another shape.
    pub fn set(&mut self, name: &str, value: Tensor) -> Result<()> {
        let i = self.names.iter().position(|n| n == name);
        let i =
            i.ok_or_else(|| Error::input(format!("no state `{name}`; there is {}", self.names.join(", "))))?;
        if value.shape != self.values[i].shape() || value.as_f32().is_none() {
            return Err(Error::input(format!(
                "state `{name}`: a value of shape {:?}, expected {:?}",
                value.shape,
                self.values[i].shape()
            )));
        }
        self.values[i] = StateValue::Full(value);
        Ok(())
    }

    /// Sets every state to zero.
    pub fn clear(&mut self) {
        self.may_stay = false;
        for value in &mut self.values {
            match value {
                // New pages would be cleared by the system anyway, later, while they are written.
                StateValue::Cache(c) => {
                    c.bits.zero(Pool::global());
                    c.behind.fill(0.0);
                }
                StateValue::Full(t) => t.as_f32_mut().unwrap_or_default().fill(0.0),
            }
        }
    }

    /// Exchanges the last state with state `name` of `other`, which is made where it lacks it.
    fn exchange(&mut self, other: &mut CpuStates, name: &str) {
        let Some(last) = self.values.len().checked_sub(1) else { return };
        let at = other.names.iter().position(|n| n == name).unwrap_or_else(|| {
            other.names.push(name.to_string());
            other.types.push(TensorType::fixed(DataType::Float16, &[]));
            other.values.push(StateValue::default());
            other.names.len() - 1
        });
        std::mem::swap(&mut self.values[last], &mut other.values[at]);
        other.types[at] = self.types[last].clone();
    }

    /// Fills every state with noise between -0.5 and 0.5.
    fn fill_with_noise(&mut self, seed: u64) {
        let mut random = anemoe_io::Random::new(seed);
        let mut row = vec![0f32; 1024];
        for value in &mut self.values {
            let n = value.shape().iter().product::<usize>();
            for first in (0..n).step_by(row.len()) {
                let row = &mut row[..1024.min(n - first)];
                row.fill_with(|| random.uniform() as f32 - 0.5);
                value.set(first, row);
            }
        }
    }
}

/// First byte of a saved state: `FULL` for all in f32, `CACHE` for slots in fp16 and rows behind them in f32.
const FULL: u8 = 0;
const CACHE: u8 = 1;

impl backend::SequenceStates for CpuStates {
    fn fork(&self) -> Result<Box<dyn backend::SequenceStates>> {
        Ok(Box::new(self.clone()))
    }

    fn clear(&mut self) {
        CpuStates::clear(self);
    }

    fn can_rewind(&self, _: usize) -> bool {
        self.values.is_empty() || self.may_stay
    }

    fn rewind(&mut self, tokens: usize) -> Result<()> {
        match self.can_rewind(tokens) {
            true => Ok(()),
            false => Err(Error::input(format!("states that cannot undo {tokens} tokens"))),
        }
    }

    fn save(&self, out: &mut Vec<u8>) -> Result<()> {
        let number = |out: &mut Vec<u8>, n: usize| out.extend((n as u64).to_le_bytes());
        number(out, self.names.len());
        for ((name, ty), value) in self.names.iter().zip(&self.types).zip(&self.values) {
            number(out, name.len());
            out.extend(name.as_bytes());
            out.push(ty.dtype as u8);
            number(out, value.shape().len());
            value.shape().iter().for_each(|&n| number(out, n));
            let f32s = |out: &mut Vec<u8>, v: &[f32]| out.extend(v.iter().flat_map(|v| v.to_le_bytes()));
            match value {
                StateValue::Full(t) => {
                    out.push(FULL);
                    f32s(out, t.as_f32().unwrap_or_default());
                }
                StateValue::Cache(c) => {
                    out.push(CACHE);
                    number(out, c.slots);
                    out.extend(c.bits.iter().flat_map(|b| b.to_le_bytes()));
                    f32s(out, &c.behind);
                }
            }
        }
        Ok(())
    }

    fn restore(&mut self, bytes: &mut &[u8]) -> Result<()> {
        let read = read_states(bytes);
        *self = read.ok_or_else(|| Error::input("saved sequence: its states are cut short or wrong"))?;
        Ok(())
    }

    fn lend(&mut self, to: &mut dyn backend::SequenceStates, name: &str, shape: [usize; 4]) -> Result<()> {
        let to: &mut dyn Any = to;
        let to = to.downcast_mut().ok_or_else(|| Error::input("states of another backend"))?;
        let own = self.values.last().map_or(&[][..], StateValue::shape);
        if own != shape {
            return Err(Error::input(format!(
                "the model's cache is {own:?}, and its assistant reads {shape:?}: it is the assistant of another model"
            )));
        }
        self.exchange(to, name);
        Ok(())
    }

    fn take_back(&mut self, from: &mut dyn backend::SequenceStates, name: &str) {
        let from: &mut dyn Any = from;
        if let Some(from) = from.downcast_mut() {
            self.exchange(from, name);
        }
    }

    fn fill_with_noise(&mut self, seed: u64) -> bool {
        CpuStates::fill_with_noise(self, seed);
        true
    }
}

/// Reads states that [`backend::SequenceStates::save`] wrote; none where the bytes end early or are impossible.
fn read_states(bytes: &mut &[u8]) -> Option<CpuStates> {
    fn number(bytes: &mut &[u8]) -> Option<usize> {
        usize::try_from(u64::from_le_bytes(bytes.split_off(..8)?.try_into().ok()?)).ok()
    }
    fn f32s(bytes: &mut &[u8], n: usize) -> Option<Vec<f32>> {
        let part = bytes.split_off(..n.checked_mul(4)?)?;
        Some(part.as_chunks::<4>().0.iter().map(|b| f32::from_le_bytes(*b)).collect())
    }
    let mut states = CpuStates::default();
    for _ in 0..number(bytes)? {
        let length = number(bytes)?;
        let name = String::from_utf8(bytes.split_off(..length)?.to_vec()).ok()?;
        let dtype = *bytes.split_off_first()?;
        let dtype = [DataType::Float16, DataType::Float32].into_iter().find(|d| *d as u8 == dtype)?;
        let rank = number(bytes).filter(|rank| *rank <= MAX_RANK)?;
        let shape: Vec<usize> = (0..rank).map(|_| number(bytes)).collect::<Option<_>>()?;
        let n = shape.iter().try_fold(1usize, |n, &d| n.checked_mul(d))?;
        let value = match *bytes.split_off_first()? {
            FULL => StateValue::Full(Tensor { data: Data::F32(f32s(bytes, n)?), shape: shape.clone() }),
            CACHE => {
                let slots = number(bytes)?;
                let &[1, heads, rows, d] = shape.as_slice() else { return None };
                let bits = bytes.split_off(..n.checked_mul(2)?)?;
                let behind = f32s(bytes, heads.checked_mul(rows.checked_sub(slots)?)?.checked_mul(d)?)?;
                let mut cache = HalfCache::zeros(shape.clone(), slots);
                let bits = bits.as_chunks::<2>().0.iter().map(|b| u16::from_le_bytes(*b));
                cache.bits.iter_mut().zip(bits).for_each(|(to, from)| *to = from);
                cache.behind = behind;
                StateValue::Cache(cache)
            }
            _ => return None,
        };
        states.names.push(name);
        states.types.push(TensorType::fixed(dtype, &shape.iter().map(|&d| d as u64).collect::<Vec<_>>()));
        states.values.push(value);
    }
    Some(states)
}
