//! Buffers of fp16 in large pages.

use crate::Pool;
use memmap2::MmapMut;
use std::ops::{Deref, DerefMut};

/// Bytes of a large page.
const PAGE: usize = 2 << 20;
/// Bytes of a small page.
const SMALL_PAGE: usize = 4 << 10;

/// Holds fp16 values as bits, from 2 MB on in a mapping with large pages: attention over a long context would otherwise look up
/// a page for every few slots.
#[derive(Debug)]
pub struct F16Buffer(Memory);

#[derive(Debug)]
enum Memory {
    Small(Vec<u16>),
    /// Mapping, and number of values.
    Mapped(MmapMut, usize),
}

impl F16Buffer {
    /// Makes a buffer of `n` zeros. Pages that nothing is written to take no memory.
    pub fn zeros(n: usize) -> F16Buffer {
        let map = match n * size_of::<u16>() {
            bytes if bytes >= PAGE => MmapMut::map_anon(bytes).ok(),
            _ => None,
        };
        let Some(map) = map else { return F16Buffer(Memory::Small(vec![0; n])) };
        // An error leaves small pages.
        #[cfg(target_os = "linux")]
        let _ = map.advise(memmap2::Advice::HugePage);
        F16Buffer(Memory::Mapped(map, n))
    }

    /// Sets all to zero. Pages that nothing was written to still take no memory.
    pub fn zero(&mut self, pool: &Pool) {
        pool.for_chunks(self, PAGE / size_of::<u16>(), &|_, part| {
            for page in part.chunks_mut(SMALL_PAGE / size_of::<u16>()) {
                if page.iter().any(|v| *v != 0) {
                    page.fill(0);
                }
            }
        });
    }
}

impl Deref for F16Buffer {
    type Target = [u16];
    fn deref(&self) -> &[u16] {
        match &self.0 {
            Memory::Small(v) => v,
            // SAFETY: the mapping has 2 n bytes from a page on, all of them initialized.
            Memory::Mapped(map, n) => unsafe { std::slice::from_raw_parts(map.as_ptr().cast(), *n) },
        }
    }
}

impl DerefMut for F16Buffer {
    fn deref_mut(&mut self) -> &mut [u16] {
        match &mut self.0 {
            Memory::Small(v) => v,
            // SAFETY: the mapping has 2 n bytes from a page on, all of them initialized.
            Memory::Mapped(map, n) => unsafe { std::slice::from_raw_parts_mut(map.as_mut_ptr().cast(), *n) },
        }
    }
}

impl Clone for F16Buffer {
    fn clone(&self) -> F16Buffer {
        let mut copy = F16Buffer::zeros(self.len());
        copy.copy_from_slice(self);
        copy
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn small_and_mapped_buffers_keep_their_values() {
        for n in [0, 1, 1000, PAGE / 2 - 1, PAGE / 2, PAGE + 17] {
            let mut halves = F16Buffer::zeros(n);
            assert_eq!(halves.len(), n);
            assert_eq!(matches!(halves.0, Memory::Mapped(..)), n >= PAGE / 2);
            assert!(halves.iter().all(|v| *v == 0));
            if let Some(last) = halves.last_mut() {
                *last = 7;
                assert_eq!(halves.clone().last(), Some(&7));
            }
            assert_eq!(halves.clone()[..], halves[..]);
            halves.zero(&Pool::new(2));
            assert!(halves.len() == n && halves.iter().all(|v| *v == 0));
        }
    }
}
