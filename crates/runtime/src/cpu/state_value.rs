//! Values of states: caches in fp16, and tensors.

use super::strided::{StridedLoops, copy_floats};
use crate::tensor::{Data, Tensor};
use anemoe_kernels::{CacheValues, F16Buffer, Pool};
use anemoe_mlpackage::mil::TensorType;
use half::f16;
use smallvec::SmallVec;

/// The value of a state.
#[derive(Clone, Debug)]
pub(super) enum StateValue {
    Cache(HalfCache),
    Full(Tensor),
}

/// Keys or values: for each head, `slots` rows in fp16 and the rows behind them in f32. Attention reads the slots, also the rows
/// of the call's own tokens. The rows behind are carried from call to call: if they were rounded, results would depend on how
/// a prompt is split into calls.
#[derive(Clone, Debug)]
pub(super) struct HalfCache {
    /// `[1, heads, all, d]`, as bits of fp16; zero behind the slots.
    pub bits: F16Buffer,
    /// `[heads, all - slots, d]`
    pub behind: Vec<f32>,
    shape: Vec<usize>,
    pub slots: usize,
}

/// Elements that are converted between fp16 and f32 together.
const CONVERTED_CHUNK: usize = 64;
/// Elements of a head from which on large pages are worth their memory: 1024 slots of 128 elements.
const LARGE_FROM: usize = 1 << 17;
/// Inline capacity for heads of keys and values.
const INLINE_HEADS: usize = 16;

impl HalfCache {
    /// Makes a cache of zeros. `shape` is `[1, heads, all, d]`, with `all >= slots`.
    pub fn zeros(shape: Vec<usize>, slots: usize) -> HalfCache {
        let n = shape.iter().product();
        let behind = vec![0.0; shape[1] * (shape[2] - slots) * shape[3]];
        HalfCache { bits: F16Buffer::zeros(n), behind, shape, slots }
    }

    /// Returns the elements of a head, and the elements of its slots.
    fn head(&self) -> (usize, usize) {
        (self.shape[2] * self.shape[3], self.slots * self.shape[3])
    }

    fn heads(&mut self) -> impl Iterator<Item = StatePiece<'_>> {
        let (all, slots) = self.head();
        let mut behind = self.behind.as_mut_slice();
        self.bits.chunks_exact_mut(all.max(1)).map(move |bits| {
            let own = behind.split_off_mut(..all - slots).unwrap_or_default();
            StatePiece::HalfCache { bits, behind: own }
        })
    }

    /// Prepares for writing slot `slot`: from [`LARGE_FROM`] elements of a head on, the cache uses large pages.
    pub fn reach(&mut self, slot: usize) {
        if slot * self.shape[3] >= LARGE_FROM {
            self.bits.use_large_pages();
        }
    }

    /// Reads elements `first`, `first + step`, .. into `out`.
    pub fn read(&self, first: usize, step: usize, out: &mut [f32]) {
        let (all, slots) = self.head();
        let (head, at) = (first / all.max(1), first % all.max(1));
        let last = at + out.len().saturating_sub(1) * step;
        if self.behind.is_empty() || last < slots {
            let mut halves = [0; CONVERTED_CHUNK];
            for (k, out) in out.chunks_mut(CONVERTED_CHUNK).enumerate() {
                let halves = &mut halves[..out.len()];
                halves
                    .iter_mut()
                    .enumerate()
                    .for_each(|(i, h)| *h = self.bits[first + (k * CONVERTED_CHUNK + i) * step]);
                anemoe_kernels::f16_bits_to_f32(halves, out);
            }
        } else if at >= slots && last < all {
            let behind = &self.behind[head * (all - slots) + at - slots..];
            out.iter_mut().enumerate().for_each(|(k, v)| *v = behind[k * step]);
        } else {
            for (k, v) in out.iter_mut().enumerate() {
                self.read(first + k * step, 0, std::slice::from_mut(v));
            }
        }
    }
}

impl Default for StateValue {
    fn default() -> Self {
        StateValue::Full(Tensor::default())
    }
}

impl StateValue {
    /// Copies elements to `out`, by loops over the result and the state.
    pub fn copy_to(&self, loops: &StridedLoops<2>, out: &mut [f32]) {
        match self {
            StateValue::Cache(cache) => loops.each(|[o, i], n, s| {
                let mut values = [0f32; CONVERTED_CHUNK];
                for first in (0..n).step_by(CONVERTED_CHUNK) {
                    let values = &mut values[..CONVERTED_CHUNK.min(n - first)];
                    cache.read(i + first * s[1], s[1], values);
                    values.iter().enumerate().for_each(|(k, v)| out[o + (first + k) * s[0]] = *v);
                }
            }),
            StateValue::Full(t) => copy_floats(loops, t.as_f32().unwrap_or_default(), out),
        }
    }

    /// Makes a state of zeros; `cache` gives the slots that are held in fp16.
    pub fn zero(ty: &TensorType, cache: Option<usize>) -> StateValue {
        let shape: Vec<usize> = ty.dims.iter().map(|d| d.fixed().unwrap_or(0) as usize).collect();
        match cache {
            Some(slots) => StateValue::Cache(HalfCache::zeros(shape, slots)),
            None => StateValue::Full(Tensor { data: Data::F32(vec![0.0; shape.iter().product()]), shape }),
        }
    }

    pub fn shape(&self) -> &[usize] {
        match self {
            StateValue::Cache(c) => &c.shape,
            StateValue::Full(t) => &t.shape,
        }
    }

    pub fn to_tensor(&self) -> Tensor {
        match self {
            StateValue::Cache(c) => {
                let mut values = vec![0.0; c.bits.len()];
                let parts = values.chunks_mut(c.shape[3].max(1)).enumerate();
                parts.for_each(|(i, row)| c.read(i * c.shape[3], 1, row));
                Tensor::f32(&c.shape, values)
            }
            StateValue::Full(t) => t.clone(),
        }
    }

    /// Converts the state to the form that a plan needs: `cache` slots in fp16, or a tensor of f32.
    pub fn convert_to(&mut self, cache: Option<usize>) {
        match (&*self, cache) {
            (StateValue::Cache(c), Some(slots)) if c.slots == slots => return,
            (StateValue::Full(_), None) => return,
            _ => {}
        }
        let t = std::mem::take(self).into_tensor();
        *self = match cache {
            Some(slots) => {
                let mut value = StateValue::Cache(HalfCache::zeros(t.shape.clone(), slots));
                value.set(0, t.as_f32().unwrap_or_default());
                value
            }
            None => StateValue::Full(t),
        };
    }

    /// Returns the elements for a kernel; of a cache, the fp16 elements.
    pub fn values(&self) -> CacheValues<'_> {
        match self {
            StateValue::Cache(c) => CacheValues::F16(&c.bits),
            StateValue::Full(t) => CacheValues::F32(t.as_f32().unwrap_or_default()),
        }
    }

    /// Sets the elements from `first` on.
    pub fn set(&mut self, first: usize, values: &[f32]) {
        match self {
            StateValue::Cache(c) => {
                let (all, _) = c.head();
                let (mut at, mut values) = (first % all.max(1), values);
                for mut head in c.heads().skip(first / all.max(1)) {
                    let (own, others) = values.split_at(values.len().min(all - at));
                    head.set(at, own);
                    (at, values) = (0, others);
                    if values.is_empty() {
                        break;
                    }
                }
            }
            StateValue::Full(t) => {
                StatePiece::Full(t.as_f32_mut().unwrap_or_default()).set(first, values);
            }
        }
    }

    /// Calls `write` for each head, on several threads if `parallel` is set; the state is `[1, heads, slots, d]`.
    pub fn heads(&mut self, pool: &Pool, parallel: bool, write: &(dyn Fn(usize, StatePiece<'_>) + Sync)) {
        match self {
            StateValue::Cache(c) => each(pool, parallel, c.heads(), write),
            StateValue::Full(t) => {
                let size = t.shape.get(2..).map_or(0, |s| s.iter().product());
                let values = t.as_f32_mut().unwrap_or_default();
                each(pool, parallel, values.chunks_exact_mut(size.max(1)).map(StatePiece::Full), write);
            }
        }
    }

    /// Converts the state to a tensor, which the interpreter needs.
    pub fn into_tensor(self) -> Tensor {
        match self {
            StateValue::Full(t) => t,
            cache => cache.to_tensor(),
        }
    }
}

fn each<'a>(
    pool: &Pool,
    parallel: bool,
    heads: impl Iterator<Item = StatePiece<'a>>,
    write: &(dyn Fn(usize, StatePiece<'_>) + Sync),
) {
    if !parallel {
        return heads.enumerate().for_each(|(i, head)| write(i, head));
    }
    let mut heads: SmallVec<[_; INLINE_HEADS]> = heads.map(Some).collect();
    pool.for_chunks(&mut heads, 1, &|i, head| {
        head.iter_mut().filter_map(Option::take).for_each(|h| write(i, h))
    });
}

/// Neighbouring elements of a state.
pub(super) enum StatePiece<'a> {
    /// Elements of a head; the last bits stand in place of the rows behind the slots, and are not used.
    HalfCache {
        bits: &'a mut [u16],
        behind: &'a mut [f32],
    },
    Full(&'a mut [f32]),
}

impl StatePiece<'_> {
    pub fn get(&self, i: usize) -> f32 {
        match self {
            StatePiece::HalfCache { bits, behind } => match i.checked_sub(bits.len() - behind.len()) {
                Some(i) => behind[i],
                None => f16::from_bits(bits[i]).to_f32(),
            },
            StatePiece::Full(values) => values[i],
        }
    }

    /// Sets the elements from `first` on.
    pub fn set(&mut self, first: usize, values: &[f32]) {
        match self {
            StatePiece::HalfCache { bits, behind } => {
                let slots = bits.len() - behind.len();
                let (halves, others) = values.split_at(slots.saturating_sub(first).min(values.len()));
                anemoe_kernels::f32_to_f16(halves, &mut bits[first..first + halves.len()]);
                let at = (first + halves.len()).saturating_sub(slots);
                behind[at..at + others.len()].copy_from_slice(others);
            }
            StatePiece::Full(all) => all[first..first + values.len()].copy_from_slice(values),
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    /// Rounds the values in slots to fp16, as a cache holds them.
    fn expected(values: &[f32], [rows, slots, d]: [usize; 3]) -> Vec<f32> {
        let rounded = |v: f32| f16::from_f32(v).to_f32();
        let held = values.iter().enumerate();
        held.map(|(i, v)| if i / d % rows < slots { rounded(*v) } else { *v }).collect()
    }

    #[test]
    fn caches_round_their_slots_and_nothing_behind_them() {
        for [heads, rows, slots, d] in [[3, 7, 5, 4], [2, 4, 4, 70], [1, 3, 0, 5], [2, 2, 2, 0], [0, 3, 1, 2]]
        {
            let shape = [1, heads, rows, d];
            let n = shape.iter().product::<usize>();
            let values: Vec<f32> = (0..n).map(|i| (i as f32).sin()).collect();
            let want = expected(&values, [rows, slots, d]);
            let mut value = StateValue::Full(Tensor::f32(&shape, values));
            value.convert_to(Some(slots));
            assert_eq!(value.to_tensor(), Tensor::f32(&shape, want.clone()));
            let StateValue::Cache(cache) = &value else { panic!() };
            for (first, step) in [(0, 1), (1, 3), (d / 2, d.max(1)), (slots * d, 1)] {
                let count = n.saturating_sub(first).div_ceil(step);
                let mut read = vec![f32::NAN; count];
                cache.read(first, step, &mut read);
                let own: Vec<f32> = want.iter().skip(first).step_by(step).copied().collect();
                assert_eq!(read, own, "{shape:?} from {first} by {step}");
            }
            value.convert_to(None);
            assert_eq!(value.into_tensor(), Tensor::f32(&shape, want));
        }
    }

    #[test]
    fn pieces_of_caches_are_written_across_the_last_slot_and_the_last_row() {
        let [heads, rows, slots, d] = [3, 5, 2, 4];
        let shape = vec![1, heads, rows, d];
        let n = heads * rows * d;
        for (first, count) in [(0, n), (3, 10), (17, 30), (n - 1, 1), (5, 0)] {
            let mut value = StateValue::Cache(HalfCache::zeros(shape.clone(), slots));
            let new: Vec<f32> = (0..count).map(|i| 0.1 + i as f32).collect();
            value.set(first, &new);
            let mut want = vec![0.0; n];
            want[first..first + count].copy_from_slice(&new);
            let want = expected(&want, [rows, slots, d]);
            assert_eq!(value.to_tensor(), Tensor::f32(&shape, want.clone()));
            value.heads(Pool::global(), true, &|h, head| {
                (0..rows * d).for_each(|i| assert_eq!(head.get(i), want[h * rows * d + i]));
            });
        }
    }
}
