//! Memory at the bounds of cache lines: a vector of 64 bytes that crosses one costs two reads.

use std::ops::{Deref, DerefMut, Range};

/// A line.
#[derive(Clone, Copy, Debug)]
#[repr(C, align(64))]
struct Line<T>(T);

/// Lines of 64 bytes, of numbers or bytes.
#[derive(Clone, Debug)]
pub(crate) struct Lines<T>(Vec<Line<T>>);

impl<T> Default for Lines<T> {
    fn default() -> Self {
        Lines(Vec::new())
    }
}

impl<T: Copy> Lines<T> {
    const SIZE: () = assert!(size_of::<T>() == 64);

    /// None.
    pub const fn new() -> Self {
        Lines(Vec::new())
    }

    /// At least `n` lines; new ones are `value`.
    pub fn grow(&mut self, n: usize, value: T) {
        let () = Self::SIZE;
        if self.0.len() < n {
            self.0.resize(n, Line(value));
        }
    }
}

impl<T> Deref for Lines<T> {
    type Target = [T];
    fn deref(&self) -> &[T] {
        // SAFETY: a line is its only field, without padding, since that has 64 bytes; see `SIZE`, without which there are no
        // lines.
        unsafe { std::slice::from_raw_parts(self.0.as_ptr().cast(), self.0.len()) }
    }
}

impl<T> DerefMut for Lines<T> {
    fn deref_mut(&mut self) -> &mut [T] {
        // SAFETY: as above.
        unsafe { std::slice::from_raw_parts_mut(self.0.as_mut_ptr().cast(), self.0.len()) }
    }
}

/// Where what was asked for waits.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Cache {
    First,
    /// Slower to read, but more can be under way: measured on AMD's fourth generation only.
    Second,
}

/// Asks for `bytes` bytes from an address on, which may be any.
#[inline(always)]
pub(crate) fn prefetch(to: Cache, from: *const u8, bytes: usize) {
    for at in (0..bytes).step_by(64) {
        let line = from.wrapping_add(at);
        #[cfg(target_arch = "x86_64")]
        // SAFETY: prefetching reads nothing; the address may be any.
        unsafe {
            use std::arch::x86_64::{_MM_HINT_T0, _MM_HINT_T1, _mm_prefetch};
            match to {
                Cache::First => _mm_prefetch::<_MM_HINT_T0>(line.cast()),
                Cache::Second => _mm_prefetch::<_MM_HINT_T1>(line.cast()),
            }
        }
        #[cfg(target_arch = "aarch64")]
        // SAFETY: prefetching reads nothing; the address may be any.
        unsafe {
            use std::arch::asm;
            let at = line.addr();
            match to {
                Cache::First => {
                    asm!("prfm pldl1keep, [{}]", in(reg) at, options(nomem, nostack, preserves_flags))
                }
                Cache::Second => {
                    asm!("prfm pldl2keep, [{}]", in(reg) at, options(nomem, nostack, preserves_flags))
                }
            }
        }
        #[cfg(not(any(target_arch = "x86_64", target_arch = "aarch64")))]
        let _ = (to, line);
    }
}

/// Memory that is asked for in pieces while something else is computed, so that requests neither wait for each other nor for
/// what has been asked for before.
#[derive(Clone, Copy, Debug)]
pub(crate) struct Ahead {
    pub from: *const u8,
    pub bytes: usize,
}

impl Ahead {
    pub const NOTHING: Ahead = Ahead { from: std::ptr::null(), bytes: 0 };

    /// Asks for pieces `which` of `all`.
    #[inline(always)]
    pub fn pieces(&self, which: Range<usize>, all: usize) {
        let lines = self.bytes.div_ceil(64);
        let (first, end) = (which.start * lines / all, which.end * lines / all);
        prefetch(Cache::Second, self.from.wrapping_add(64 * first), 64 * (end - first));
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn lines_lie_at_their_bounds_and_keep_their_values() {
        let mut lines = Lines::<[u8; 64]>::new();
        lines.grow(3, [1; 64]);
        lines[1] = [7; 64];
        lines.grow(100, [2; 64]);
        lines.grow(5, [9; 64]);
        assert_eq!(lines.len(), 100);
        assert_eq!((lines[0][0], lines[1][63], lines[99][0]), (1, 7, 2));
        assert_eq!(lines.as_ptr() as usize % 64, 0);
    }
}
