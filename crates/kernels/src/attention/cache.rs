//! Views of a KV cache, queries and masks.

use crate::memory::{CacheLevel, prefetch};
use crate::simd::{F32x16, LANES};

/// Holds a cache's elements.
#[derive(Clone, Copy, Debug)]
pub enum CacheValues<'a> {
    /// fp16 values as bits.
    F16(&'a [u16]),
    /// f32 values.
    F32(&'a [f32]),
}

impl CacheValues<'_> {
    /// Returns the size of an element in bytes.
    pub(super) fn size(&self) -> usize {
        match self {
            CacheValues::F16(_) => size_of::<u16>(),
            CacheValues::F32(_) => size_of::<f32>(),
        }
    }
}

/// Describes keys or values of all heads: `head_dim` contiguous elements for each head and slot.
#[derive(Clone, Copy, Debug)]
pub struct CacheView<'a> {
    /// The elements.
    pub values: CacheValues<'a>,
    /// Index of head 0, slot 0.
    pub first: usize,
    /// Elements from head to head.
    pub head_stride: usize,
    /// Elements from slot to slot.
    pub slot_stride: usize,
}

/// Describes queries or results `[heads, tokens, head_dim]` with contiguous channels.
#[derive(Clone, Copy, Debug)]
pub struct HeadStrides {
    /// Index of head 0, token 0.
    pub first: usize,
    /// Elements from head to head.
    pub head: usize,
    /// Elements from token to token.
    pub token: usize,
}

/// Holds the sizes of an attention call.
#[derive(Clone, Copy, Debug)]
pub struct AttentionShape {
    /// Query heads, a multiple of `kv_heads`.
    pub heads: usize,
    /// Key/value heads.
    pub kv_heads: usize,
    /// Tokens.
    pub tokens: usize,
    /// Channels of a head.
    pub head_dim: usize,
    /// Slots of the cache.
    pub slots: usize,
}

/// Describes the mask that is added to the scores: `[tokens, slots]` with contiguous slots.
#[derive(Clone, Copy, Debug)]
pub struct Mask<'a> {
    /// The elements.
    pub values: &'a [f32],
    /// Elements from token to token.
    pub token_stride: usize,
}

/// Describes the softmax that makes weights of a head's scores: `softmax(scale q k + mask)`.
#[derive(Clone, Copy, Debug)]
pub struct Softmax<'a> {
    /// Factor of the scores.
    pub scale: f32,
    /// Mask that is added to them.
    pub mask: Option<Mask<'a>>,
    /// One score more for each head, which has no value.
    pub sinks: Option<&'a [f32]>,
}

/// An element of a cache.
pub(super) trait CacheElement: Copy {
    fn vector<L: F32x16>(values: &[Self; LANES]) -> L;
    fn to_f32(self) -> f32;
}

impl CacheElement for u16 {
    #[inline(always)]
    fn vector<L: F32x16>(values: &[u16; LANES]) -> L {
        // SAFETY: sixteen fp16 values are 32 initialized bytes.
        L::from_f16(unsafe { &*values.as_ptr().cast() })
    }
    #[inline(always)]
    fn to_f32(self) -> f32 {
        half::f16::from_bits(self).to_f32()
    }
}

impl CacheElement for f32 {
    #[inline(always)]
    fn vector<L: F32x16>(values: &[f32; LANES]) -> L {
        L::load(values)
    }
    #[inline(always)]
    fn to_f32(self) -> f32 {
        self
    }
}

/// Loads sixteen elements.
///
/// # Safety
/// The elements `at..at + 16` exist.
#[inline(always)]
pub(super) unsafe fn vector_at<T: CacheElement, L: F32x16>(values: &[T], at: usize) -> L {
    // SAFETY: the caller promises sixteen elements from `at` on.
    T::vector(unsafe { &*values.as_ptr().add(at).cast() })
}

/// Locates keys or values of one head: slot s starts at `first + s * stride`, modulo 2^64.
#[derive(Clone, Copy)]
pub(super) struct SlotView<'a, T> {
    pub(super) values: &'a [T],
    pub(super) first: usize,
    pub(super) stride: usize,
}

impl<T: CacheElement> SlotView<'_, T> {
    #[inline(always)]
    pub(super) fn at(&self, slot: usize) -> usize {
        self.first.wrapping_add(slot * self.stride)
    }

    /// Prefetches `n` elements from `at` on.
    #[inline(always)]
    pub(super) fn prefetch(&self, at: usize, n: usize) {
        prefetch(CacheLevel::L2, self.values.as_ptr().wrapping_add(at).cast(), size_of::<T>() * n);
    }
}

impl CacheView<'_> {
    pub(super) fn head<'a, T>(&self, values: &'a [T], head: usize) -> SlotView<'a, T> {
        SlotView { values, first: self.first + head * self.head_stride, stride: self.slot_stride }
    }

    pub(super) fn check(&self, s: &AttentionShape) {
        let len = match self.values {
            CacheValues::F16(v) => v.len(),
            CacheValues::F32(v) => v.len(),
        };
        let end =
            self.first + (s.kv_heads - 1) * self.head_stride + (s.slots - 1) * self.slot_stride + s.head_dim;
        assert!(end <= len, "heads and slots lie inside the cache");
    }
}
