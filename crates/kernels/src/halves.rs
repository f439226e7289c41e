//! Memory for caches of fp16.

use crate::Pool;
use memmap2::MmapMut;
use std::ops::{Deref, DerefMut};

/// Bytes of a large page, where the system has them.
const PAGE: usize = 2 << 20;
/// Bytes of a page where it has not.
const SMALL_PAGE: usize = 4 << 10;

/// Halves as bits. From 2 MB on they lie in memory of their own, for which large pages are asked: attention at a long context
/// would look up a page for every few slots.
#[derive(Debug)]
pub struct Halves(Memory);

#[derive(Debug)]
enum Memory {
    Few(Vec<u16>),
    /// And how many.
    Many(MmapMut, usize),
}

impl Halves {
    /// Zeros. Pages that nothing is written to take no memory.
    pub fn zeros(n: usize) -> Halves {
        let map = match n * size_of::<u16>() {
            bytes if bytes >= PAGE => MmapMut::map_anon(bytes).ok(),
            _ => None,
        };
        let Some(map) = map else { return Halves(Memory::Few(vec![0; n])) };
        // Other systems, and some settings of this one, have small pages only.
        #[cfg(target_os = "linux")]
        let _ = map.advise(memmap2::Advice::HugePage);
        Halves(Memory::Many(map, n))
    }

    /// All zero again. Pages that nothing was written to still take no memory.
    pub fn zero(&mut self) {
        Pool::global().pieces(self, PAGE / size_of::<u16>(), &|_, part| {
            for page in part.chunks_mut(SMALL_PAGE / size_of::<u16>()) {
                if page.iter().any(|v| *v != 0) {
                    page.fill(0);
                }
            }
        });
    }
}

impl Deref for Halves {
    type Target = [u16];
    fn deref(&self) -> &[u16] {
        match &self.0 {
            Memory::Few(v) => v,
            // SAFETY: the mapping has 2 n bytes from a page on, all of them initialized.
            Memory::Many(map, n) => unsafe { std::slice::from_raw_parts(map.as_ptr().cast(), *n) },
        }
    }
}

impl DerefMut for Halves {
    fn deref_mut(&mut self) -> &mut [u16] {
        match &mut self.0 {
            Memory::Few(v) => v,
            // SAFETY: as above.
            Memory::Many(map, n) => unsafe { std::slice::from_raw_parts_mut(map.as_mut_ptr().cast(), *n) },
        }
    }
}

impl Clone for Halves {
    fn clone(&self) -> Halves {
        let mut copy = Halves::zeros(self.len());
        copy.copy_from_slice(self);
        copy
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn few_and_many_keep_their_values() {
        for n in [0, 1, 1000, PAGE / 2 - 1, PAGE / 2, PAGE + 17] {
            let mut halves = Halves::zeros(n);
            assert_eq!(halves.len(), n);
            assert_eq!(matches!(halves.0, Memory::Many(..)), n >= PAGE / 2);
            assert!(halves.iter().all(|v| *v == 0));
            if let Some(last) = halves.last_mut() {
                *last = 7;
                assert_eq!(halves.clone().last(), Some(&7));
            }
            assert_eq!(halves.clone()[..], halves[..]);
            halves.zero();
            assert!(halves.len() == n && halves.iter().all(|v| *v == 0));
        }
    }
}
