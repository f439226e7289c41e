//! Arrays of Core ML: over memory that this crate owns, and Core ML's own arrays, which are read by their strides.

use super::failure::Failure;
use anemoe_mlpackage::mil::DataType;
use anemoe_runtime::tensor::{Data, Tensor};
use block2::{RcBlock, StackBlock};
use objc2::AnyThread;
use objc2::rc::Retained;
use objc2_core_ml::{MLMultiArray, MLMultiArrayDataType};
use objc2_foundation::{NSArray, NSNumber};
use std::alloc::{Layout, alloc_zeroed, dealloc, handle_alloc_error};
use std::cell::RefCell;
use std::ffi::c_void;
use std::ptr::NonNull;

/// Alignment of memory in bytes: rows of the Neural Engine start at multiples of it.
const ALIGNMENT: usize = 64;

/// Element type of an array.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Element {
    F16,
    F32,
    I32,
}

impl Element {
    /// Returns the element type of a feature; `None` for types that no anemoe function has.
    pub fn of(dtype: DataType) -> Option<Element> {
        match dtype {
            DataType::Float16 => Some(Element::F16),
            DataType::Float32 => Some(Element::F32),
            DataType::Int32 => Some(Element::I32),
            _ => None,
        }
    }

    fn size(self) -> usize {
        match self {
            Element::F16 => 2,
            Element::F32 | Element::I32 => 4,
        }
    }

    fn kind(self) -> MLMultiArrayDataType {
        match self {
            Element::F16 => MLMultiArrayDataType::Float16,
            Element::F32 => MLMultiArrayDataType::Float32,
            Element::I32 => MLMultiArrayDataType::Int32,
        }
    }
}

fn numbers(values: &[usize]) -> Retained<NSArray<NSNumber>> {
    let values: Vec<_> = values.iter().map(|n| NSNumber::new_usize(*n)).collect();
    NSArray::from_retained_slice(&values)
}

fn usizes(values: &NSArray<NSNumber>) -> Vec<usize> {
    values.iter().map(|n| n.as_usize()).collect()
}

fn contiguous(shape: &[usize]) -> Vec<usize> {
    let mut strides = vec![1; shape.len()];
    for axis in (1..shape.len()).rev() {
        strides[axis - 1] = strides[axis] * shape[axis];
    }
    strides
}

/// Visits the offset of each row (the last axis) in order.
fn rows(shape: &[usize], strides: &[usize], mut visit: impl FnMut(usize)) {
    let axes = shape.len().saturating_sub(1);
    let count: usize = shape[..axes].iter().product();
    let mut at = vec![0; axes];
    for _ in 0..count {
        visit(at.iter().zip(strides).map(|(i, s)| i * s).sum());
        for axis in (0..axes).rev() {
            at[axis] += 1;
            if at[axis] < shape[axis] {
                break;
            }
            at[axis] = 0;
        }
    }
}

/// Allocates `bytes` bytes of zeros, at least one.
fn memory(bytes: usize) -> (NonNull<u8>, Layout) {
    let layout = Layout::from_size_align(bytes.max(1), ALIGNMENT);
    let layout = layout.unwrap_or_else(|_| handle_alloc_error(Layout::new::<u8>()));
    // SAFETY: the layout has at least one byte.
    let data = unsafe { alloc_zeroed(layout) };
    (NonNull::new(data).unwrap_or_else(|| handle_alloc_error(layout)), layout)
}

/// An array without gaps over memory that this crate allocates.
pub(crate) struct HostArray {
    array: Retained<MLMultiArray>,
    /// Memory of the array; freed when Core ML releases `array`.
    data: NonNull<u8>,
    shape: Vec<usize>,
    element: Element,
}

impl HostArray {
    /// Makes an array of zeros.
    pub fn new(shape: &[usize], element: Element) -> Result<HostArray, Failure> {
        let count: usize = shape.iter().product();
        let (data, layout) = memory(count * element.size());
        // SAFETY: the block runs once, when the array releases the memory that was allocated above with this layout.
        let free =
            RcBlock::new(move |data: NonNull<c_void>| unsafe { dealloc(data.as_ptr().cast(), layout) });
        // SAFETY: the memory has the size of the shape, and lives until the block runs.
        let array = unsafe {
            MLMultiArray::initWithDataPointer_shape_dataType_strides_deallocator_error(
                MLMultiArray::alloc(),
                data.cast(),
                &numbers(shape),
                element.kind(),
                &numbers(&contiguous(shape)),
                Some(&free),
            )
        };
        let array = array.map_err(|e| Failure::reported(&e))?;
        Ok(HostArray { array, data, shape: shape.to_vec(), element })
    }

    /// Returns Core ML's array.
    pub fn array(&self) -> &Retained<MLMultiArray> {
        &self.array
    }

    fn len(&self) -> usize {
        self.shape.iter().product()
    }

    /// Copies a tensor into the array, converted to its element type; shapes must be equal.
    pub fn write(&mut self, tensor: &Tensor) -> Result<(), String> {
        let n = self.len();
        if tensor.shape != self.shape || tensor.len() != n {
            return Err(format!("shape {:?}, expected {:?}", tensor.shape, self.shape));
        }
        match (&tensor.data, self.element) {
            (Data::F32(values), Element::F16) => {
                // SAFETY: `n` aligned elements that live as long as `self`; no prediction runs while this thread is here.
                let to = unsafe { std::slice::from_raw_parts_mut(self.data.cast::<u16>().as_ptr(), n) };
                anemoe_kernels::f32_to_f16(values, to);
            }
            (Data::F32(values), Element::F32) => {
                // SAFETY: as above.
                let to = unsafe { std::slice::from_raw_parts_mut(self.data.cast::<f32>().as_ptr(), n) };
                to.copy_from_slice(values);
            }
            (Data::I32(values), Element::I32) => {
                // SAFETY: as above.
                let to = unsafe { std::slice::from_raw_parts_mut(self.data.cast::<i32>().as_ptr(), n) };
                to.copy_from_slice(values);
            }
            _ => return Err(format!("elements of another type than {:?}", self.element)),
        }
        Ok(())
    }

    /// Returns the elements as fp16 bits; an error for other types.
    fn own_bits(&mut self) -> Result<&mut [u16], String> {
        match self.element {
            // SAFETY: `self.len()` aligned elements that live as long as `self`; no prediction runs while this thread is here.
            Element::F16 => {
                Ok(unsafe { std::slice::from_raw_parts_mut(self.data.cast::<u16>().as_ptr(), self.len()) })
            }
            other => Err(format!("elements of type {other:?}, expected {:?}", Element::F16)),
        }
    }

    /// Copies fp16 bits into the array; lengths must be equal.
    pub fn write_bits(&mut self, bits: &[u16]) -> Result<(), String> {
        let own = self.own_bits()?;
        if own.len() != bits.len() {
            return Err(format!("{} elements, expected {}", bits.len(), own.len()));
        }
        own.copy_from_slice(bits);
        Ok(())
    }

    /// Returns a copy of the array's fp16 bits.
    pub fn read_bits(&mut self) -> Result<Vec<u16>, String> {
        Ok(self.own_bits()?.to_vec())
    }

    /// Copies the first `slots` slots of this cache, `[1, heads, own slots, channels]`, to a new cache; slots that this
    /// cache lacks are zero.
    pub fn with_slots(&mut self, slots: usize) -> Result<HostArray, Failure> {
        let &[1, heads, own_slots, channels] = &*self.shape else {
            return Err(Failure::Misfit(format!("a cache of shape {:?}", self.shape)));
        };
        let mut other = HostArray::new(&[1, heads, slots, channels], self.element)?;
        let shared = own_slots.min(slots) * channels;
        let from = self.own_bits().map_err(Failure::Misfit)?;
        let to = other.own_bits().map_err(Failure::Misfit)?;
        let heads = from.chunks_exact((own_slots * channels).max(1));
        for (from, to) in heads.zip(to.chunks_exact_mut((slots * channels).max(1))) {
            to[..shared].copy_from_slice(&from[..shared]);
        }
        Ok(other)
    }

    /// Returns the number of slots of this cache.
    pub fn slots(&self) -> usize {
        self.shape.get(2).copied().unwrap_or(0)
    }

    /// Writes rows of tokens `[1, heads, T, channels]` into this cache `[1, heads, slots, channels]`: each token into
    /// the slot where `place` is 1: `[1, 1, slots, T]`, or `[1, 1, T, slots]` where slots are last. A token without a slot
    /// only fills its call up and is skipped.
    pub fn write_rows(&mut self, rows: &Tensor, place: &Tensor, is_place_last: bool) -> Result<(), String> {
        let wrong = || {
            let [rows, place] = [rows, place].map(|t| &t.shape);
            format!("rows {rows:?} placed by {place:?} do not fit the cache {:?}", self.shape)
        };
        let (&[1, heads, slots, channels], &[_, _, rows_of_place, columns]) = (&*self.shape, &*place.shape)
        else {
            return Err(wrong());
        };
        let tokens = if is_place_last { rows_of_place } else { columns };
        let fits = if is_place_last { [1, 1, tokens, slots] } else { [1, 1, slots, tokens] };
        let (Some(values), Some(places)) = (rows.as_f32(), place.as_f32()) else { return Err(wrong()) };
        if rows.shape != [1, heads, tokens, channels] || place.shape != fits {
            return Err(wrong());
        }
        let own = self.own_bits()?;
        for (i, _) in places.iter().enumerate().filter(|(_, value)| **value != 0.0) {
            let (slot, token) = if is_place_last { (i % slots, i / slots) } else { (i / tokens, i % tokens) };
            for head in 0..heads {
                let row = &values[(head * tokens + token) * channels..][..channels];
                anemoe_kernels::f32_to_f16(row, &mut own[(head * slots + slot) * channels..][..channels]);
            }
        }
        Ok(())
    }

    /// Copies the array into a tensor.
    pub fn read(&self, out: &mut Tensor) -> Result<(), String> {
        let bytes = self.len() * self.element.size();
        // SAFETY: the memory has `bytes` bytes; no prediction runs while this thread is here.
        let memory = unsafe { std::slice::from_raw_parts(self.data.as_ptr(), bytes) };
        let row = self.shape.last().copied().unwrap_or(1);
        let mut rows = (0..self.len() / row.max(1)).map(|r| r * row);
        copy(memory, self.element, &self.shape, 1, &mut rows, out)
    }
}

/// Copies rows of `shape` into a tensor. Rows start at the element indices `starts`; their elements are `step` apart.
fn copy(
    memory: &[u8],
    element: Element,
    shape: &[usize],
    step: usize,
    starts: &mut dyn Iterator<Item = usize>,
    out: &mut Tensor,
) -> Result<(), String> {
    let row = shape.last().copied().unwrap_or(1);
    let span = if row == 0 { 0 } else { (row - 1) * step + 1 };
    let part = |start: usize| {
        let size = element.size();
        let part = memory.get(start * size..(start + span) * size);
        part.ok_or_else(|| {
            format!("a row at element {start} lies outside of an array of {} bytes", memory.len())
        })
    };
    match element {
        Element::F16 => {
            for to in out.reset_f32(shape).chunks_exact_mut(row.max(1)) {
                halves(part(starts.next().unwrap_or(usize::MAX / 4))?, step, to);
            }
        }
        Element::F32 => {
            for to in out.reset_f32(shape).chunks_exact_mut(row.max(1)) {
                let words = part(starts.next().unwrap_or(usize::MAX / 8))?.as_chunks::<4>().0;
                to.iter_mut().zip(words.iter().step_by(step)).for_each(|(v, b)| *v = f32::from_le_bytes(*b));
            }
        }
        Element::I32 => {
            for to in out.reset_i32(shape).chunks_exact_mut(row.max(1)) {
                let words = part(starts.next().unwrap_or(usize::MAX / 8))?.as_chunks::<4>().0;
                to.iter_mut().zip(words.iter().step_by(step)).for_each(|(v, b)| *v = i32::from_le_bytes(*b));
            }
        }
    }
    Ok(())
}

/// fp16 elements of a row that are converted at a time.
const CONVERTED_CHUNK: usize = 256;

/// Converts a row of fp16, whose elements are `step` apart, to f32.
fn halves(bytes: &[u8], step: usize, to: &mut [f32]) {
    let words = bytes.as_chunks::<2>().0;
    let mut bits = [0u16; CONVERTED_CHUNK];
    for (k, to) in to.chunks_mut(CONVERTED_CHUNK).enumerate() {
        let from = words[k * CONVERTED_CHUNK * step..].iter().step_by(step);
        let bits = &mut bits[..to.len()];
        bits.iter_mut().zip(from).for_each(|(bits, word)| *bits = u16::from_le_bytes(*word));
        anemoe_kernels::f16_bits_to_f32(bits, to);
    }
}

/// Copies one of Core ML's own arrays into a tensor, by the array's shape and strides.
pub(crate) fn read_array(array: &MLMultiArray, element: Element, out: &mut Tensor) -> Result<(), Failure> {
    // SAFETY: plain getters of a living array.
    let (shape, strides, kind) =
        unsafe { (usizes(&array.shape()), usizes(&array.strides()), array.dataType()) };
    if kind != element.kind() || shape.len() != strides.len() || shape.is_empty() {
        return Err(Failure::Misfit(format!("an array of type {} and shape {shape:?}", kind.0)));
    }
    let mut starts = Vec::with_capacity(shape[..shape.len() - 1].iter().product());
    rows(&shape, &strides, |start| starts.push(start));
    let step = strides[strides.len() - 1];
    let shared = RefCell::new((out, Err("its memory was not shown".to_string())));
    let read = StackBlock::new(|bytes: NonNull<c_void>, size: isize| {
        let size = usize::try_from(size).unwrap_or(0);
        // SAFETY: Core ML shows `size` bytes for as long as the block runs.
        let memory = unsafe { std::slice::from_raw_parts(bytes.cast::<u8>().as_ptr(), size) };
        let (out, done) = &mut *shared.borrow_mut();
        *done = copy(memory, element, &shape, step.max(1), &mut starts.iter().copied(), out);
    });
    // SAFETY: the block does not outlive the call.
    unsafe { array.getBytesWithHandler(&read) };
    shared.into_inner().1.map_err(Failure::Misfit)
}

/// A part of a state `[1, heads, rows, channels]`: the rows from `first` on, of all heads.
#[derive(Clone, Copy)]
pub(crate) struct StatePart<'a> {
    pub shape: &'a [usize],
    pub first: usize,
}

impl StatePart<'_> {
    /// Calls `visit` with the offset of each row of the part.
    fn rows(&self, strides: &[usize], mut visit: impl FnMut(usize)) {
        let (from, count) = match self.shape {
            [_, _, all, _] => (self.first.min(*all), *all),
            _ => (0, usize::MAX),
        };
        let mut number = 0;
        rows(self.shape, strides, |start| {
            if number % count >= from {
                visit(start);
            }
            number += 1;
        });
    }
}

/// Copies rows of a state between Core ML's array and `bits`, in order without gaps: into the array if `write`, else
/// into `bits`. Runs within a handler that shows the state.
pub(crate) fn move_rows(
    array: &MLMultiArray,
    part: StatePart<'_>,
    bits: &mut [u16],
    write: bool,
) -> Result<(), String> {
    // SAFETY: plain getters of an array that lives while its handler runs.
    let (shape, strides, kind) =
        unsafe { (usizes(&array.shape()), usizes(&array.strides()), array.dataType()) };
    if shape != part.shape || kind != MLMultiArrayDataType::Float16 || strides.len() != shape.len() {
        return Err(format!("a state of type {} and shape {shape:?}, expected {:?}", kind.0, part.shape));
    }
    let row = shape.last().copied().unwrap_or(1);
    let result = RefCell::new((bits, Err("its memory was not shown".to_string())));
    let work = |bytes: NonNull<c_void>, size: isize, strides: &[usize]| {
        let all = usize::try_from(size).unwrap_or(0) / 2;
        // SAFETY: Core ML shows `size` bytes, aligned for 16 bits, for reading and writing as long as the block runs.
        let memory = unsafe { std::slice::from_raw_parts_mut(bytes.cast::<u16>().as_ptr(), all) };
        let (bits, done) = &mut *result.borrow_mut();
        let (mut at, mut fits, step) =
            (0, strides.len() == shape.len(), strides.last().copied().unwrap_or(1));
        part.rows(strides, |start| {
            let end = start + row.saturating_sub(1) * step;
            if let (true, Some(bits)) = (fits && end < memory.len(), bits.get_mut(at..at + row)) {
                for (i, bits) in bits.iter_mut().enumerate() {
                    let place = &mut memory[start + i * step];
                    if write { *place = *bits } else { *bits = *place }
                }
            } else {
                fits = false;
            }
            at += row;
        });
        *done = if fits && at == bits.len() {
            Ok(())
        } else {
            Err(format!("{at} elements, expected {}", bits.len()))
        };
    };
    let writing = StackBlock::new(|bytes: NonNull<c_void>, size: isize, own: NonNull<NSArray<NSNumber>>| {
        // SAFETY: the strides belong to the memory that Core ML shows, and live as long as the block runs.
        work(bytes, size, &usizes(unsafe { own.as_ref() }));
    });
    let reading = StackBlock::new(|bytes: NonNull<c_void>, size: isize| work(bytes, size, &strides));
    // SAFETY: the blocks do not outlive the calls.
    unsafe {
        match write {
            true => array.getMutableBytesWithHandler(&writing),
            false => array.getBytesWithHandler(&reading),
        }
    }
    result.into_inner().1
}
