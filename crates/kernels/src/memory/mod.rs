//! Cache-line-aligned vectors, fp16 buffers in large pages, prefetching.

mod aligned;
mod f16_buffer;
mod prefetch;

pub(crate) use aligned::AlignedVec;
pub use f16_buffer::F16Buffer;
pub(crate) use prefetch::{CacheLevel, Prefetch, prefetch};
