//! Fake of MLMultiArray.

use crate::faults::{error, raise};
use anemoe_runtime::tensor::{Data, Tensor};
use block2::{DynBlock, RcBlock};
use half::f16;
use objc_sim::{class, init};
use objc2::DefinedClass;
use objc2::rc::{Allocated, Retained};
use objc2_core_ml::{MLMultiArray, MLMultiArrayDataType};
use objc2_foundation::{NSArray, NSError, NSInteger, NSNumber};
use std::ffi::c_void;
use std::ptr::NonNull;

/// Alignment of rows in bytes, as on the Neural Engine.
const ROW: usize = 64;

fn usizes(values: &NSArray<NSNumber>) -> Vec<usize> {
    values.iter().map(|n| n.as_usize()).collect()
}

fn numbers(values: &[usize]) -> Retained<NSArray<NSNumber>> {
    NSArray::from_retained_slice(&values.iter().map(|n| NSNumber::new_usize(*n)).collect::<Vec<_>>())
}

fn size_of_kind(kind: isize) -> usize {
    match MLMultiArrayDataType(kind) {
        MLMultiArrayDataType::Float16 => 2,
        MLMultiArrayDataType::Float32 | MLMultiArrayDataType::Int32 => 4,
        _ => raise(&format!("elements of type {kind}")),
    }
}

/// Computes strides, in elements, for rows that start at multiples of [`ROW`] bytes.
fn padded(shape: &[usize], size: usize) -> Vec<usize> {
    let mut strides = vec![1; shape.len()];
    for axis in (1..shape.len()).rev() {
        let last = axis + 1 == shape.len();
        strides[axis - 1] =
            strides[axis] * if last { shape[axis].next_multiple_of(ROW / size) } else { shape[axis] };
    }
    strides
}

/// Computes the offsets of all elements, the last axis fastest.
fn offsets(shape: &[usize], strides: &[usize]) -> Vec<usize> {
    let mut all = vec![0];
    for (n, stride) in shape.iter().zip(strides) {
        all = all.iter().flat_map(|at| (0..*n).map(move |i| at + i * stride)).collect();
    }
    all
}

/// Memory of an array.
enum Memory {
    /// The array's own memory, in 64-bit words for alignment.
    Own(Vec<u64>),
    /// Memory of another owner, and the block that tells the owner when the array is gone.
    Theirs(*mut u8, Option<RcBlock<dyn Fn(NonNull<c_void>)>>),
}

pub(crate) struct ArrayIvars {
    memory: Memory,
    pub shape: Vec<usize>,
    strides: Vec<usize>,
    pub kind: isize,
}

impl ArrayIvars {
    fn bytes(&self) -> usize {
        let last = self.shape.iter().zip(&self.strides).map(|(n, s)| n.saturating_sub(1) * s).sum::<usize>();
        if self.shape.contains(&0) { 0 } else { (last + 1) * size_of_kind(self.kind) }
    }

    fn data(&self) -> *mut u8 {
        match &self.memory {
            Memory::Own(words) => words.as_ptr().cast_mut().cast(),
            Memory::Theirs(data, _) => *data,
        }
    }

    /// Reads the values.
    pub fn read(&self) -> Tensor {
        let at = offsets(&self.shape, &self.strides);
        let data = self.data();
        // SAFETY: the offsets lie within the array's memory.
        unsafe {
            match MLMultiArrayDataType(self.kind) {
                MLMultiArrayDataType::Float16 => Tensor::f32(
                    &self.shape,
                    at.iter().map(|o| (*data.cast::<f16>().add(*o)).to_f32()).collect(),
                ),
                MLMultiArrayDataType::Float32 => {
                    Tensor::f32(&self.shape, at.iter().map(|o| *data.cast::<f32>().add(*o)).collect())
                }
                _ => Tensor::i32(&self.shape, at.iter().map(|o| *data.cast::<i32>().add(*o)).collect()),
            }
        }
    }

    /// Writes the values.
    pub fn write(&self, tensor: &Tensor) {
        let at = offsets(&self.shape, &self.strides);
        let data = self.data();
        // SAFETY: the offsets lie within the array's memory.
        unsafe {
            match (MLMultiArrayDataType(self.kind), &tensor.data) {
                (MLMultiArrayDataType::Float16, Data::F32(v)) => {
                    at.iter().zip(v).for_each(|(o, v)| *data.cast::<f16>().add(*o) = f16::from_f32(*v));
                }
                (MLMultiArrayDataType::Float32, Data::F32(v)) => {
                    at.iter().zip(v).for_each(|(o, v)| *data.cast::<f32>().add(*o) = *v);
                }
                (MLMultiArrayDataType::Int32, Data::I32(v)) => {
                    at.iter().zip(v).for_each(|(o, v)| *data.cast::<i32>().add(*o) = *v);
                }
                _ => raise("values of another type than the array"),
            }
        }
    }

    /// Overwrites the memory with 0xff, so that later reads show.
    pub fn spoil(&self) {
        // SAFETY: the array has `bytes()` bytes.
        unsafe { std::ptr::write_bytes(self.data(), 0xff, self.bytes()) };
    }
}

impl Drop for ArrayIvars {
    fn drop(&mut self) {
        let data = self.data();
        match &mut self.memory {
            Memory::Own(_) => self.spoil(),
            Memory::Theirs(_, free) => {
                if let (Some(free), Some(data)) = (free.take(), NonNull::new(data.cast())) {
                    free.call((data,));
                }
            }
        }
    }
}

class!(FakeArray, "MLMultiArray", ArrayIvars, {
    #[unsafe(method_id(initWithDataPointer:shape:dataType:strides:deallocator:error:))]
    fn initWithDataPointer(
        this: Allocated<Self>,
        data: *mut c_void,
        shape: &NSArray<NSNumber>,
        kind: isize,
        strides: &NSArray<NSNumber>,
        free: *mut DynBlock<dyn Fn(NonNull<c_void>)>,
        out: *mut *mut NSError,
    ) -> Option<Retained<Self>> {
        let (shape, strides) = (usizes(shape), usizes(strides));
        if shape.len() == strides.len() {
            // SAFETY: the block lives during the call, and is copied.
            let free = NonNull::new(free).map(|f| unsafe { f.as_ref() }.copy());
            let memory = Memory::Theirs(data.cast(), free);
            Some(init!(this, ArrayIvars { memory, shape, strides, kind }))
        } else {
            // SAFETY: `out` points to the caller's error.
            unsafe { *out = error(4, "shape and strides differ in rank") };
            None
        }
    }
    #[unsafe(method(dataType))]
    fn dataType(&self) -> isize {
        self.ivars().kind
    }
    #[unsafe(method_id(shape))]
    fn shape(&self) -> Retained<NSArray<NSNumber>> {
        numbers(&self.ivars().shape)
    }
    #[unsafe(method_id(strides))]
    fn strides(&self) -> Retained<NSArray<NSNumber>> {
        numbers(&self.ivars().strides)
    }
    #[unsafe(method(getBytesWithHandler:))]
    fn getBytes(&self, handler: &DynBlock<dyn Fn(NonNull<c_void>, NSInteger)>) {
        let ivars = self.ivars();
        handler.call((NonNull::new(ivars.data().cast()).unwrap(), ivars.bytes() as isize));
    }
    #[unsafe(method(getMutableBytesWithHandler:))]
    fn getMutableBytes(
        &self,
        handler: &DynBlock<dyn Fn(NonNull<c_void>, NSInteger, NonNull<NSArray<NSNumber>>)>,
    ) {
        let ivars = self.ivars();
        let strides = numbers(&ivars.strides);
        let data = NonNull::new(ivars.data().cast()).unwrap();
        handler.call((data, ivars.bytes() as isize, NonNull::from(&*strides)));
    }
});

impl FakeArray {
    /// Makes an array as Core ML's own results are: with padded rows.
    pub fn result(tensor: &Tensor, kind: isize) -> Retained<Self> {
        Self::own(tensor, kind, padded(&tensor.shape, size_of_kind(kind)))
    }

    /// Makes an array that shows a state. Rows fill whole multiples of [`ROW`] bytes, with a gap after each.
    pub fn shown(tensor: &Tensor, kind: isize) -> Retained<Self> {
        let mut wider = tensor.shape.clone();
        if let Some(last) = wider.last_mut() {
            *last += ROW / size_of_kind(kind);
        }
        Self::own(tensor, kind, padded(&wider, size_of_kind(kind)))
    }

    fn own(tensor: &Tensor, kind: isize, strides: Vec<usize>) -> Retained<Self> {
        let (shape, size) = (tensor.shape.clone(), size_of_kind(kind));
        let elements: usize = shape.first().map_or(1, |n| n * strides[0].max(1));
        let memory = Memory::Own(vec![u64::MAX; (elements * size).div_ceil(8) + ROW / 8]);
        let made = Self::new(ArrayIvars { memory, shape, strides, kind });
        made.ivars().write(tensor);
        made
    }

    /// Returns the fake behind an array.
    pub fn behind(array: &MLMultiArray) -> &Self {
        // SAFETY: this class has the name.
        unsafe { &*std::ptr::from_ref(array).cast() }
    }

    /// Returns the array as the binding's type.
    pub fn as_array(&self) -> &MLMultiArray {
        // SAFETY: this class has the name.
        unsafe { &*std::ptr::from_ref(self).cast() }
    }
}
