//! Measures how fast this machine reads its memory.

use crate::Pool;
use crate::memory::CacheLevel;
use crate::simd::{F32x16, simd_fn};
use std::sync::atomic::{AtomicU64, Ordering};
use std::time::Instant;

/// Bytes of a part: exceeds L1, and leaves many parts.
const PART: usize = 1 << 20;
/// Streams of a part, read alternately.
const STREAMS: usize = 4;
/// Bytes between the read and the prefetch. Not tuned.
const PREFETCH_DISTANCE: usize = 4096;

/// Measures the read bandwidth of the pool's threads in GB/s (10^9 bytes per second): the median of `rounds` passes
/// over `bytes` of memory, which should be several times the size of the caches.
pub fn measure_bandwidth(pool: &Pool, bytes: usize, rounds: usize) -> f64 {
    let mut memory = vec![0u8; bytes.max(PART)];
    // Pages that were never written all map to the same zero page.
    pool.for_chunks(&mut memory, PART, &|i, piece| piece.fill(i as u8 | 1));
    let mut times: Vec<f64> = (0..rounds.max(1))
        .map(|_| {
            let started = Instant::now();
            read(pool, &memory);
            started.elapsed().as_secs_f64()
        })
        .collect();
    times.sort_by(f64::total_cmp);
    memory.len() as f64 / 1e9 / times[times.len() / 2]
}

/// Reads `memory` with the pool's threads. Returns the sum of its little-endian 64-bit words, without an incomplete
/// last line of 64 bytes.
pub fn read(pool: &Pool, memory: &[u8]) -> u64 {
    let sum = AtomicU64::new(0);
    pool.run(memory.len().div_ceil(PART), &|i| {
        let mut of_part = 0;
        add_up(&memory[i * PART..memory.len().min((i + 1) * PART)], &mut of_part);
        sum.fetch_add(of_part, Ordering::Relaxed);
    });
    sum.into_inner()
}

simd_fn! {
    fn add_up(part: &[u8], sum: &mut u64) = add_up_on
}

#[inline(always)]
fn add_up_on<L: F32x16>(part: &[u8], sum: &mut u64) {
    let lines = part.as_chunks::<8>().0.as_chunks::<8>().0;
    let n = lines.len() / STREAMS;
    let mut acc = [0u64; 8];
    let mut add = |line: &[[u8; 8]; 8]| {
        crate::memory::prefetch(
            CacheLevel::L2,
            line.as_ptr().cast::<u8>().wrapping_add(PREFETCH_DISTANCE),
            64,
        );
        for (a, v) in acc.iter_mut().zip(line) {
            *a = a.wrapping_add(u64::from_le_bytes(*v));
        }
    };
    for i in 0..n {
        for s in 0..STREAMS {
            add(&lines[s * n + i]);
        }
    }
    lines[n * STREAMS..].iter().for_each(add);
    *sum = acc.iter().fold(0, |a, v| a.wrapping_add(*v));
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn all_lines_are_read() {
        let memory: Vec<u64> = (0..PART as u64 / 8 * 3 + 24).collect();
        let bytes: Vec<u8> = memory.iter().flat_map(|v| v.to_le_bytes()).collect();
        assert_eq!(read(&Pool::new(2), &bytes), memory.iter().sum::<u64>());
        assert!(measure_bandwidth(&Pool::new(2), 8 << 20, 3) > 0.0);
    }
}
