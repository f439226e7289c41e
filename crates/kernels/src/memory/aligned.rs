//! A vector of 64-byte lines, each on a cache line: a load that crosses two cache lines costs two reads.

use std::ops::{Deref, DerefMut};

/// One cache line.
#[derive(Clone, Copy, Debug)]
#[repr(C, align(64))]
struct CacheLine<T>(T);

/// Holds lines of 64 bytes (numbers or bytes), each on a cache line.
#[derive(Clone, Debug)]
pub(crate) struct AlignedVec<T>(Vec<CacheLine<T>>);

impl<T> Default for AlignedVec<T> {
    fn default() -> Self {
        AlignedVec(Vec::new())
    }
}

impl<T: Copy> AlignedVec<T> {
    const SIZE: () = assert!(size_of::<T>() == 64);

    /// Makes an empty vector.
    pub const fn new() -> Self {
        AlignedVec(Vec::new())
    }

    /// Grows to at least `n` lines; new lines are `value`.
    pub fn grow(&mut self, n: usize, value: T) {
        let () = Self::SIZE;
        if self.0.len() < n {
            self.0.resize(n, CacheLine(value));
        }
    }
}

impl<T> Deref for AlignedVec<T> {
    type Target = [T];
    fn deref(&self) -> &[T] {
        // SAFETY: a line's only field has 64 bytes (`SIZE`) and no padding.
        unsafe { std::slice::from_raw_parts(self.0.as_ptr().cast(), self.0.len()) }
    }
}

impl<T> DerefMut for AlignedVec<T> {
    fn deref_mut(&mut self) -> &mut [T] {
        // SAFETY: a line's only field has 64 bytes (`SIZE`) and no padding.
        unsafe { std::slice::from_raw_parts_mut(self.0.as_mut_ptr().cast(), self.0.len()) }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn lines_lie_at_their_bounds_and_keep_their_values() {
        let mut lines = AlignedVec::<[u8; 64]>::new();
        lines.grow(3, [1; 64]);
        lines[1] = [7; 64];
        lines.grow(100, [2; 64]);
        lines.grow(5, [9; 64]);
        assert_eq!(lines.len(), 100);
        assert_eq!((lines[0][0], lines[1][63], lines[99][0]), (1, 7, 2));
        assert_eq!(lines.as_ptr() as usize % 64, 0);
    }
}
