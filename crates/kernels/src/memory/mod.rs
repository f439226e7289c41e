//! Cache-line-aligned vectors, fp16 buffers in large pages, prefetching.

mod aligned;
mod f16_buffer;
mod prefetch;

pub(crate) use aligned::AlignedVec;
pub use f16_buffer::F16Buffer;
pub(crate) use prefetch::{CacheLevel, Prefetch, prefetch};

/// Returns the N elements of `v` from `at` on.
#[inline(always)]
pub(crate) fn array_at<T, const N: usize>(v: &[T], at: usize) -> &[T; N] {
    match v[at..at + N].try_into() {
        Ok(array) => array,
        Err(_) => unreachable!("a slice of N elements"),
    }
}
