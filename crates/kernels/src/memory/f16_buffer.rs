//! fp16 buffers whose pages take memory only after a write.

use crate::Pool;
use memmap2::MmapMut;
use std::ops::{Deref, DerefMut};

/// Bytes of a large page.
const PAGE: usize = 2 << 20;
/// Bytes of a small page.
const SMALL_PAGE: usize = 4 << 10;

/// Holds fp16 values as bits. From 2 MB on they lie in a mapping whose pages take no memory until they are written to:
/// a short text uses only the first pages of each head of a cache of 4096 slots. Attention over a long context would
/// look up a page every few slots, so [`F16Buffer::use_large_pages`] moves the mapping to large pages.
#[derive(Debug)]
pub struct F16Buffer(F16Memory);

#[derive(Debug)]
enum F16Memory {
    Small(Vec<u16>),
    Mapped(Mapping),
}

#[derive(Debug)]
struct Mapping {
    map: MmapMut,
    /// Number of values.
    len: usize,
    /// True if large pages were asked for, even if the system has none.
    is_large: bool,
}

impl Mapping {
    fn zeros(len: usize, is_large: bool) -> Option<Mapping> {
        let map = MmapMut::map_anon(len * size_of::<u16>()).ok()?;
        // An error leaves small pages.
        #[cfg(target_os = "linux")]
        if is_large {
            let _ = map.advise(memmap2::Advice::HugePage);
        }
        Some(Mapping { map, len, is_large })
    }
}

impl F16Buffer {
    /// Makes a buffer of `n` zeros. Pages take no memory until a write.
    pub fn zeros(n: usize) -> F16Buffer {
        let mapping = Some(n).filter(|n| n * size_of::<u16>() >= PAGE).and_then(|n| Mapping::zeros(n, false));
        F16Buffer(mapping.map_or_else(|| F16Memory::Small(vec![0; n]), F16Memory::Mapped))
    }

    /// Moves mapped values to large pages, once. Each large page takes 2 MB from the first write on, and the system
    /// fills it with zeros first: 0.3 GB for 40 caches of 4608 slots with a single token.
    pub fn use_large_pages(&mut self) {
        let F16Memory::Mapped(old) = &self.0 else { return };
        if old.is_large {
            return;
        }
        if let Some(large) = Mapping::zeros(old.len, true) {
            let mut large = F16Buffer(F16Memory::Mapped(large));
            large.copy_written(self);
            *self = large;
        }
    }

    /// Copies a buffer of the same length over zeros; skips pages of zeros.
    fn copy_written(&mut self, from: &F16Buffer) {
        let page = SMALL_PAGE / size_of::<u16>();
        for (to, from) in self.chunks_mut(page).zip(from.chunks(page)) {
            if from.iter().any(|v| *v != 0) {
                to.copy_from_slice(from);
            }
        }
    }

    /// Sets all values to zero. Pages that were never written take no memory afterwards either.
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
            F16Memory::Small(v) => v,
            // SAFETY: the mapping starts at a page and has 2 n initialized bytes.
            F16Memory::Mapped(m) => unsafe { std::slice::from_raw_parts(m.map.as_ptr().cast(), m.len) },
        }
    }
}

impl DerefMut for F16Buffer {
    fn deref_mut(&mut self) -> &mut [u16] {
        match &mut self.0 {
            F16Memory::Small(v) => v,
            // SAFETY: the mapping starts at a page and has 2 n initialized bytes.
            F16Memory::Mapped(m) => unsafe {
                std::slice::from_raw_parts_mut(m.map.as_mut_ptr().cast(), m.len)
            },
        }
    }
}

impl Clone for F16Buffer {
    fn clone(&self) -> F16Buffer {
        let large = match &self.0 {
            F16Memory::Mapped(m) if m.is_large => Mapping::zeros(m.len, true),
            _ => None,
        };
        let mut copy =
            large.map_or_else(|| F16Buffer::zeros(self.len()), |m| F16Buffer(F16Memory::Mapped(m)));
        copy.copy_written(self);
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
            assert_eq!(matches!(halves.0, F16Memory::Mapped(_)), n >= PAGE / 2);
            assert!(halves.iter().all(|v| *v == 0));
            if let Some(last) = halves.last_mut() {
                *last = 7;
                assert_eq!(halves.clone().last(), Some(&7));
            }
            assert_eq!(halves.clone()[..], halves[..]);
            let before = halves.to_vec();
            for _ in 0..2 {
                halves.use_large_pages();
                assert_eq!(halves[..], before[..]);
                assert_eq!(halves.clone()[..], before[..]);
            }
            halves.zero(&Pool::new(2));
            assert!(halves.len() == n && halves.iter().all(|v| *v == 0));
        }
    }
}
