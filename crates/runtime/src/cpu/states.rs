//! Values that outlive a call: caches and states of convolutions.

use super::Session;
use crate::tensor::{Data, Tensor};
use crate::{Error, Result};
use anemoe_kernels::{CacheValues, Halves, Pool};
use anemoe_mlpackage::mil::{DataType, TensorType};
use half::f16;
use std::sync::Arc;

/// The value of a state.
#[derive(Clone, Debug)]
pub(super) enum StateValue {
    /// fp16, as bits.
    Half {
        bits: Halves,
        shape: Vec<usize>,
    },
    Full(Tensor),
}

impl Default for StateValue {
    fn default() -> Self {
        StateValue::Full(Tensor::default())
    }
}

impl StateValue {
    fn zero(ty: &TensorType, halves: bool) -> StateValue {
        let shape: Vec<usize> = ty.dims.iter().map(|d| d.fixed().unwrap_or(0) as usize).collect();
        let n = shape.iter().product();
        if ty.dtype == DataType::Float16 && halves {
            return StateValue::Half { bits: Halves::zeros(n), shape };
        }
        StateValue::Full(Tensor { data: Data::F32(vec![0.0; n]), shape })
    }

    fn shape(&self) -> &[usize] {
        match self {
            StateValue::Half { shape, .. } => shape,
            StateValue::Full(t) => &t.shape,
        }
    }

    fn to_tensor(&self) -> Tensor {
        match self {
            StateValue::Half { bits, shape } => {
                Tensor::f32(shape, bits.iter().map(|&b| f16::from_bits(b).to_f32()).collect())
            }
            StateValue::Full(t) => t.clone(),
        }
    }

    /// Elements for a kernel.
    pub fn values(&self) -> CacheValues<'_> {
        match self {
            StateValue::Half { bits, .. } => CacheValues::F16(bits),
            StateValue::Full(t) => CacheValues::F32(t.as_f32().unwrap_or_default()),
        }
    }

    /// Sets elements from `first` on.
    pub fn set(&mut self, first: usize, values: &[f32]) {
        match self {
            StateValue::Half { bits, .. } => StatePiece::Half(bits).set(first, values),
            StateValue::Full(t) => {
                StatePiece::Full(t.as_f32_mut().unwrap_or_default()).set(first, values);
            }
        }
    }

    /// Calls `write` with each of `count` pieces of `size` elements, on several threads where `parallel` says so.
    pub fn pieces(
        &mut self,
        pool: &Pool,
        parallel: bool,
        (count, size): (usize, usize),
        write: &(dyn Fn(usize, StatePiece<'_>) + Sync),
    ) {
        match self {
            StateValue::Half { bits, .. } => {
                each_piece(pool, parallel, &mut bits[..count * size], size, &|i, p| {
                    write(i, StatePiece::Half(p));
                });
            }
            StateValue::Full(t) => {
                let values = t.as_f32_mut().unwrap_or_default();
                each_piece(pool, parallel, &mut values[..count * size], size, &|i, p| {
                    write(i, StatePiece::Full(p));
                });
            }
        }
    }

    /// Steps work on tensors.
    pub fn into_tensor(self) -> Tensor {
        match self {
            StateValue::Full(t) => t,
            half => half.to_tensor(),
        }
    }
}

fn each_piece<T: Send>(
    pool: &Pool,
    parallel: bool,
    values: &mut [T],
    size: usize,
    write: &(dyn Fn(usize, &mut [T]) + Sync),
) {
    if parallel {
        pool.pieces(values, size, write);
    } else {
        values.chunks_exact_mut(size).enumerate().for_each(|(i, p)| write(i, p));
    }
}

/// Elements of a state, next to each other.
pub(super) enum StatePiece<'a> {
    Half(&'a mut [u16]),
    Full(&'a mut [f32]),
}

impl StatePiece<'_> {
    pub fn get(&self, i: usize) -> f32 {
        match self {
            StatePiece::Half(bits) => f16::from_bits(bits[i]).to_f32(),
            StatePiece::Full(values) => values[i],
        }
    }

    /// Sets elements from `first` on.
    pub fn set(&mut self, first: usize, values: &[f32]) {
        match self {
            StatePiece::Half(bits) => {
                anemoe_kernels::f32_to_f16(values, &mut bits[first..first + values.len()]);
            }
            StatePiece::Full(all) => all[first..first + values.len()].copy_from_slice(values),
        }
    }
}

/// Values that outlive a call.
#[derive(Clone, Debug, Default)]
pub struct States {
    pub(super) names: Arc<Vec<String>>,
    types: Vec<TensorType>,
    pub(super) values: Vec<StateValue>,
    /// Those of type fp16 are held as such.
    halves: bool,
}

impl States {
    /// The states of a session, all zero.
    pub fn new(session: &Session) -> States {
        let mut states = States::default();
        for (name, ty) in &session.states {
            states.add(name, ty);
        }
        states
    }

    /// None yet; those of type fp16 are held as such where `halves` says so.
    pub(super) fn empty(halves: bool) -> States {
        States { halves, ..States::default() }
    }

    fn add(&mut self, name: &str, ty: &TensorType) {
        Arc::make_mut(&mut self.names).push(name.to_string());
        self.types.push(ty.clone());
        self.values.push(StateValue::zero(ty, self.halves));
    }

    /// Adds the states of another function of the same package; those of equal name are shared.
    pub(super) fn adopt(&mut self, session: &Session) -> std::result::Result<(), String> {
        for (name, ty) in &session.states {
            match self.names.iter().position(|n| n == name) {
                None => self.add(name, ty),
                Some(i) if self.types[i] == *ty => {}
                Some(i) => {
                    return Err(format!(
                        "state `{name}` has type {ty} in one function and {} in another",
                        self.types[i]
                    ));
                }
            }
        }
        Ok(())
    }

    /// Names, in order.
    pub fn names(&self) -> &[String] {
        &self.names
    }

    /// A state's value.
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
            i.ok_or_else(|| Error::Input(format!("no state `{name}`; there is {}", self.names.join(", "))))?;
        if value.shape != self.values[i].shape() || value.as_f32().is_none() {
            return Err(Error::Input(format!(
                "state `{name}`: a value of shape {:?}, expected {:?}",
                value.shape,
                self.values[i].shape()
            )));
        }
        self.values[i] = StateValue::Full(value);
        Ok(())
    }

    /// All zero again.
    pub fn reset(&mut self) {
        for (value, ty) in self.values.iter_mut().zip(&self.types) {
            match value {
                // Fresh pages would have to be cleared by the system as well, while they are written.
                StateValue::Half { bits, .. } => bits.zero(),
                StateValue::Full(_) => *value = StateValue::zero(ty, self.halves),
            }
        }
    }

    /// Noise between -0.5 and 0.5.
    pub(super) fn fill(&mut self, seed: u64) {
        let mut s = seed.wrapping_mul(0x9e37_79b9_7f4a_7c15) | 1;
        let mut row = vec![0f32; 1024];
        for value in &mut self.values {
            let n = value.shape().iter().product::<usize>();
            for first in (0..n).step_by(row.len()) {
                let row = &mut row[..1024.min(n - first)];
                for v in row.iter_mut() {
                    // Xorshift.
                    s ^= s << 13;
                    s ^= s >> 7;
                    s ^= s << 17;
                    *v = (s >> 40) as f32 / (1u64 << 24) as f32 - 0.5;
                }
                value.set(first, row);
            }
        }
    }

    /// As steps or plans take them: fp16 as tensors of f32, or as bits.
    pub(super) fn convert(&mut self, halves: bool) {
        self.halves = halves;
        for (value, ty) in self.values.iter_mut().zip(&self.types) {
            match value {
                StateValue::Half { .. } if !halves => {
                    *value = StateValue::Full(std::mem::take(value).into_tensor())
                }
                StateValue::Full(t) if halves && ty.dtype == DataType::Float16 => {
                    let v = t.as_f32().unwrap_or_default();
                    let mut bits = Halves::zeros(v.len());
                    anemoe_kernels::f32_to_f16(v, &mut bits);
                    *value = StateValue::Half { bits, shape: std::mem::take(&mut t.shape) };
                }
                _ => {}
            }
        }
    }
}
