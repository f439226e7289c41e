//! Memory at cache lines, large pages for caches of fp16, and prefetching.

mod aligned;
mod f16_buffer;
mod prefetch;

pub(crate) use aligned::AlignedVec;
pub use f16_buffer::F16Buffer;
pub(crate) use prefetch::{CacheLevel, Prefetch, prefetch};
