//! Prefetching, whole or in parts.

use std::ops::Range;

/// Names the cache level of a prefetch.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum CacheLevel {
    L1,
    /// Slower to read than L1, but more prefetches can be in flight; faster for weights of 8 bits and more on an EPYC
    /// 9004, the only machine that was measured.
    L2,
}

/// Prefetches `bytes` bytes from `from` on; any address is allowed.
#[inline(always)]
pub(crate) fn prefetch(to: CacheLevel, from: *const u8, bytes: usize) {
    for at in (0..bytes).step_by(64) {
        let line = from.wrapping_add(at);
        #[cfg(target_arch = "x86_64")]
        // SAFETY: prefetching reads nothing, and any address is allowed.
        unsafe {
            use std::arch::x86_64::{_MM_HINT_T0, _MM_HINT_T1, _mm_prefetch};
            match to {
                CacheLevel::L1 => _mm_prefetch::<_MM_HINT_T0>(line.cast()),
                CacheLevel::L2 => _mm_prefetch::<_MM_HINT_T1>(line.cast()),
            }
        }
        #[cfg(target_arch = "aarch64")]
        // SAFETY: prefetching reads nothing, and any address is allowed.
        unsafe {
            use std::arch::asm;
            let at = line.addr();
            match to {
                CacheLevel::L1 => {
                    asm!("prfm pldl1keep, [{}]", in(reg) at, options(nomem, nostack, preserves_flags))
                }
                CacheLevel::L2 => {
                    asm!("prfm pldl2keep, [{}]", in(reg) at, options(nomem, nostack, preserves_flags))
                }
            }
        }
        #[cfg(not(any(target_arch = "x86_64", target_arch = "aarch64")))]
        let _ = (to, line);
    }
}

/// Memory that is prefetched in parts during a computation, so that prefetches do not wait for each other or for reads.
#[derive(Clone, Copy, Debug)]
pub(crate) struct Prefetch {
    pub from: *const u8,
    pub bytes: usize,
}

impl Prefetch {
    pub const NOTHING: Prefetch = Prefetch { from: std::ptr::null(), bytes: 0 };

    /// Prefetches parts `parts` of `all` equal parts into L2.
    #[inline(always)]
    pub fn prefetch_parts(&self, parts: Range<usize>, all: usize) {
        let lines = self.bytes.div_ceil(64);
        let (first, end) = (parts.start * lines / all, parts.end * lines / all);
        prefetch(CacheLevel::L2, self.from.wrapping_add(64 * first), 64 * (end - first));
    }
}
