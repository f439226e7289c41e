//! How fast this machine reads memory.

use crate::Pool;
use crate::vector::dispatch;
use std::time::Instant;

/// Bytes of a part.
const PART: usize = 1 << 20;
/// Streams of a part, which are read in turn.
const STREAMS: usize = 4;
/// Bytes between what is read and what is prefetched.
const AHEAD: usize = 4096;

/// Gigabytes (10^9 bytes) per second that the pool's threads read together: the median of `rounds` passes over `bytes` of
/// memory, which should be several times the caches.
pub fn read_bandwidth(pool: &Pool, bytes: usize, rounds: usize) -> f64 {
    let parts = (bytes / PART).max(1);
    let mut memory = vec![0u64; parts * PART / 8];
    // Pages that nothing was written to are all the same one.
    pool.pieces(&mut memory, PART / 8, &|i, piece| piece.fill(i as u64 | 1));
    let sums: Vec<std::sync::atomic::AtomicU64> = (0..parts).map(|_| 0.into()).collect();
    let mut times: Vec<f64> = (0..rounds.max(1))
        .map(|_| {
            let started = Instant::now();
            pool.run(parts, &|i| {
                let mut sum = 0;
                add_up(&memory[i * PART / 8..(i + 1) * PART / 8], &mut sum);
                sums[i].store(sum, std::sync::atomic::Ordering::Relaxed);
            });
            started.elapsed().as_secs_f64()
        })
        .collect();
    times.sort_by(f64::total_cmp);
    (parts * PART) as f64 / 1e9 / times[times.len() / 2]
}

dispatch! {
    fn add_up(part: &[u64], sum: &mut u64) = add_up_on
}

#[inline(always)]
fn add_up_on<L: crate::lanes::Lanes>(part: &[u64], sum: &mut u64) {
    let (lines, _) = part.as_chunks::<8>();
    let n = lines.len() / STREAMS;
    let mut acc = [[0u64; 8]; STREAMS];
    for i in 0..n {
        for (s, acc) in acc.iter_mut().enumerate() {
            let line = &lines[s * n + i];
            #[cfg(target_arch = "x86_64")]
            {
                use std::arch::x86_64::{_MM_HINT_T0, _mm_prefetch};
                // SAFETY: prefetching reads nothing; the address may be any.
                unsafe { _mm_prefetch::<_MM_HINT_T0>(line.as_ptr().cast::<i8>().wrapping_add(AHEAD)) };
            }
            #[cfg(target_arch = "aarch64")]
            crate::lanes::neon::prefetch(line.as_ptr().cast::<u8>().wrapping_add(AHEAD));
            for (a, v) in acc.iter_mut().zip(line) {
                *a = a.wrapping_add(*v);
            }
        }
    }
    *sum = acc.iter().flatten().fold(0, |a, v| a.wrapping_add(*v));
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn all_lines_are_read() {
        let part: Vec<u64> = (0..PART as u64 / 8).collect();
        let mut sum = 0;
        add_up(&part, &mut sum);
        assert_eq!(sum, part.iter().sum::<u64>());
        assert!(read_bandwidth(&Pool::new(2), 8 << 20, 3) > 0.0);
    }
}
