//! Threads for short jobs.
//!
//! Decoding a token takes some hundred jobs of a few microseconds to a millisecond each. After work, a thread polls for
//! the next job for 200 microseconds before it sleeps, so that a job starts within a microsecond. The caller works on
//! its job too, and never waits for a thread that has not begun.
//!
//! ```text
//! seat of a thread, a cache line of its own:
//!
//!   EMPTY --caller--> OFFERED --thread--> TAKEN --thread--> EMPTY
//!                        |
//!                        +----caller, when its own work is done----> EMPTY
//!
//! parts:  thread i first takes share i of the parts, in order; then the parts left in the other shares
//! ```
//!
//! A job of n parts is offered to n - 1 threads, so that a small one costs a few cache lines on a processor of many cores.

use std::sync::atomic::{AtomicU32, AtomicUsize, Ordering, fence};
use std::sync::{Condvar, Mutex, OnceLock, PoisonError, TryLockError};
use std::time::{Duration, Instant};

/// Time that a thread polls for work before it sleeps. Not tuned; longer than the gaps between the jobs of a token.
const POLL_TIME: Duration = Duration::from_micros(200);
/// Largest number of threads of a pool.
pub const MAX_THREADS: usize = 256;

/// Runs the parts of a job on several threads.
pub struct Pool {
    shared: &'static PoolShared,
    threads: usize,
}

/// States of a seat.
const EMPTY: u32 = 0;
const OFFERED: u32 = 1;
const TAKEN: u32 = 2;

struct PoolShared {
    /// A seat for each thread; that of the caller, the first, stays empty.
    seats: Vec<OwnLine<AtomicU32>>,
    /// Next part of each thread's share of the parts.
    next: Vec<OwnLine<AtomicUsize>>,
    /// Parts of the job, and shares that they are divided into.
    parts: AtomicUsize,
    shares: AtomicUsize,
    /// Address of a `PoolJob` on the stack of the thread that started it.
    job: AtomicUsize,
    /// Jobs so far: threads to which none is offered see that others are, and do not sleep.
    jobs: OwnLine<AtomicUsize>,
    /// Held by the thread whose job runs: one job at a time.
    busy: Mutex<()>,
    sleepers: AtomicUsize,
    asleep: Mutex<()>,
    wake: Condvar,
    failed: AtomicUsize,
    quit: AtomicUsize,
}

/// A value in cache lines of its own.
#[repr(align(128))]
#[derive(Default)]
struct OwnLine<T>(T);

struct PoolJob<'a>(&'a (dyn Fn(usize) + Sync));

static GLOBAL: OnceLock<Pool> = OnceLock::new();
static WANTED: OnceLock<usize> = OnceLock::new();

impl Pool {
    /// Starts a pool of `threads` threads, the caller's included.
    pub fn new(threads: usize) -> Pool {
        let threads = threads.clamp(1, MAX_THREADS);
        // Threads may read it after the pool is dropped, so it lives as long as the process.
        let shared: &'static PoolShared = Box::leak(Box::new(PoolShared {
            seats: (0..threads).map(|_| OwnLine::default()).collect(),
            next: (0..threads).map(|_| OwnLine::default()).collect(),
            parts: AtomicUsize::new(0),
            shares: AtomicUsize::new(1),
            job: AtomicUsize::new(0),
            jobs: OwnLine::default(),
            busy: Mutex::new(()),
            sleepers: AtomicUsize::new(0),
            asleep: Mutex::new(()),
            wake: Condvar::new(),
            failed: AtomicUsize::new(0),
            quit: AtomicUsize::new(0),
        }));
        let mut started = 1;
        for i in 1..threads {
            let thread = std::thread::Builder::new().name(format!("anemoe-{i}"));
            if thread.spawn(move || shared.serve(i)).is_err() {
                // A pool works with fewer threads than asked for: those that have the first seats.
                break;
            }
            started += 1;
        }
        Pool { shared, threads: started }
    }

    /// Sets the number of threads of [`Pool::global`]. Returns false if that pool exists or the number was set before.
    pub fn set_threads(threads: usize) -> bool {
        WANTED.set(threads).is_ok() && GLOBAL.get().is_none()
    }

    /// Returns the pool of the process. Its number of threads is, in this order, that of [`Pool::set_threads`], that of
    /// the environment variable `ANEMOE_THREADS`, or the number of processors.
    pub fn global() -> &'static Pool {
        GLOBAL.get_or_init(|| {
            let said = || std::env::var("ANEMOE_THREADS").ok().and_then(|v| v.parse().ok());
            let wanted = WANTED.get().copied().or_else(said);
            let processors = || std::thread::available_parallelism().map_or(1, usize::from);
            Pool::new(wanted.unwrap_or_else(processors))
        })
    }

    /// Returns the number of threads, the caller's included.
    pub fn threads(&self) -> usize {
        self.threads
    }

    /// Calls `part` with every number below `parts` on several threads, and returns after the last call. From inside a
    /// part, or while another caller's job runs, it makes the calls one after the other.
    ///
    /// # Panics
    /// A part panicked.
    pub fn run(&self, parts: usize, part: &(dyn Fn(usize) + Sync)) {
        self.run_on(self.threads, parts, part);
    }

    /// Calls `part` as [`Pool::run`] does, on at most `threads` threads.
    ///
    /// # Panics
    /// A part panicked.
    pub fn run_on(&self, threads: usize, parts: usize, part: &(dyn Fn(usize) + Sync)) {
        let threads = threads.min(self.threads);
        let alone = threads < 2 || parts < 2;
        let free = || match self.shared.busy.try_lock() {
            Ok(guard) => Some(guard),
            // A job that panicked has ended as well.
            Err(TryLockError::Poisoned(guard)) => Some(guard.into_inner()),
            Err(TryLockError::WouldBlock) => None,
        };
        let Some(_guard) = (!alone).then(free).flatten() else {
            return (0..parts).for_each(part);
        };
        let s = self.shared;
        let shares = threads.min(parts);
        let job = PoolJob(part);
        s.job.store(&raw const job as usize, Ordering::Relaxed);
        s.parts.store(parts, Ordering::Relaxed);
        s.shares.store(shares, Ordering::Relaxed);
        for (i, next) in s.next[..shares].iter().enumerate() {
            next.0.store(first_part(i, parts, shares), Ordering::Relaxed);
        }
        let offered = &s.seats[1..shares];
        offered.iter().for_each(|seat| seat.0.store(OFFERED, Ordering::Release));
        s.jobs.0.fetch_add(1, Ordering::Relaxed);
        // A sleeper either sees the offer when it looks a last time, or is counted here.
        fence(Ordering::SeqCst);
        if s.sleepers.load(Ordering::Relaxed) > 0 {
            drop(s.asleep.lock().unwrap_or_else(PoisonError::into_inner));
            s.wake.notify_all();
        }
        let own = std::panic::catch_unwind(std::panic::AssertUnwindSafe(|| s.work(0, part, parts, shares)));
        if own.is_err() {
            s.stop(parts, shares);
        }
        offered.iter().for_each(|seat| take_back(&seat.0));
        let failed = s.failed.swap(0, Ordering::Relaxed);
        if let Err(panic) = own {
            std::panic::resume_unwind(panic);
        }
        assert!(failed == 0, "a part of a parallel job panicked");
    }

    /// Cuts `values` into chunks of `size` elements and calls `chunk` with each chunk's index and elements, on several threads.
    pub fn for_chunks<T: Send>(
        &self,
        values: &mut [T],
        size: usize,
        chunk: &(dyn Fn(usize, &mut [T]) + Sync),
    ) {
        let (size, n) = (size.max(1), values.len());
        let all = SharedPointer(values.as_mut_ptr());
        self.run(n.div_ceil(size), &|i| {
            let all = &all;
            let len = size.min(n - i * size);
            // SAFETY: pieces do not overlap and lie inside `values`, which stays borrowed until `run` returns.
            chunk(i, unsafe { std::slice::from_raw_parts_mut(all.0.add(i * size), len) });
        });
    }
}

impl Drop for Pool {
    fn drop(&mut self) {
        self.shared.quit.store(1, Ordering::SeqCst);
        drop(self.shared.asleep.lock().unwrap_or_else(PoisonError::into_inner));
        self.shared.wake.notify_all();
    }
}

/// The start of memory that the parts of a job write; each part writes elements of its own.
pub(crate) struct SharedPointer<T>(pub *mut T);
// SAFETY: threads access disjoint parts of the memory.
unsafe impl<T: Send> Sync for SharedPointer<T> {}

impl PoolShared {
    /// Keeps threads from starting another part.
    fn stop(&self, parts: usize, shares: usize) {
        self.next[..shares].iter().for_each(|next| next.0.store(parts, Ordering::Relaxed));
    }

    /// Works on the parts of the thread's own share, in order, then on parts left in other shares.
    fn work(&self, thread: usize, part: &(dyn Fn(usize) + Sync), parts: usize, shares: usize) {
        for i in 0..shares {
            let share = (thread + i) % shares;
            let end = first_part(share + 1, parts, shares);
            let next = &self.next[share].0;
            // Looks before it takes: a share that is done stays in the caches of all threads.
            while next.load(Ordering::Relaxed) < end {
                let i = next.fetch_add(1, Ordering::Relaxed);
                if i >= end {
                    break;
                }
                part(i);
            }
        }
    }

    /// Waits for jobs until the pool is dropped.
    fn serve(&self, index: usize) {
        let seat = &self.seats[index].0;
        let mut idle = Instant::now();
        let (mut rounds, mut jobs) = (0u32, 0);
        loop {
            let take = || seat.compare_exchange(OFFERED, TAKEN, Ordering::Acquire, Ordering::Relaxed).is_ok();
            if seat.load(Ordering::Relaxed) == OFFERED && take() {
                let job = self.job.load(Ordering::Relaxed) as *const PoolJob<'_>;
                let (parts, shares) =
                    (self.parts.load(Ordering::Relaxed), self.shares.load(Ordering::Relaxed));
                // SAFETY: the thread that started the job keeps it alive until this seat is empty again.
                let part = unsafe { (*job).0 };
                let done = std::panic::catch_unwind(std::panic::AssertUnwindSafe(|| {
                    self.work(index, part, parts, shares);
                }));
                if done.is_err() {
                    self.failed.store(1, Ordering::Relaxed);
                    self.stop(parts, shares);
                }
                seat.store(EMPTY, Ordering::Release);
                idle = Instant::now();
                continue;
            }
            rounds = rounds.wrapping_add(1);
            if !rounds.is_multiple_of(64) {
                std::hint::spin_loop();
                continue;
            }
            let started = self.jobs.0.load(Ordering::Relaxed);
            if started != std::mem::replace(&mut jobs, started) {
                idle = Instant::now();
            }
            if idle.elapsed() < POLL_TIME {
                continue;
            }
            let asleep = self.asleep.lock().unwrap_or_else(PoisonError::into_inner);
            self.sleepers.fetch_add(1, Ordering::SeqCst);
            fence(Ordering::SeqCst);
            let quit = self.quit.load(Ordering::SeqCst) != 0;
            if !quit && seat.load(Ordering::Relaxed) == EMPTY {
                drop(self.wake.wait(asleep).unwrap_or_else(PoisonError::into_inner));
            }
            self.sleepers.fetch_sub(1, Ordering::SeqCst);
            if quit {
                return;
            }
            idle = Instant::now();
        }
    }
}

/// Returns the first part of share `share` of `shares`.
fn first_part(share: usize, parts: usize, shares: usize) -> usize {
    (share as u128 * parts as u128 / shares as u128) as usize
}

/// Takes the offer at a seat back, or waits until the thread that took it is done.
fn take_back(seat: &AtomicU32) {
    let mut rounds = 0u32;
    loop {
        let state = seat.load(Ordering::Acquire);
        let is_taken_back =
            || seat.compare_exchange(OFFERED, EMPTY, Ordering::Relaxed, Ordering::Relaxed).is_ok();
        if state == EMPTY || (state == OFFERED && is_taken_back()) {
            return;
        }
        rounds = rounds.wrapping_add(1);
        // A thread that works may have lost its processor to this one.
        if rounds.is_multiple_of(4096) { std::thread::yield_now() } else { std::hint::spin_loop() }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn every_part_runs_once_on_any_number_of_threads() {
        for threads in [1, 2, 3, 8, 64] {
            let pool = Pool::new(threads);
            for parts in [0, 1, 2, 7, 1000] {
                for _ in 0..20 {
                    let counts: Vec<AtomicUsize> = (0..parts).map(|_| AtomicUsize::new(0)).collect();
                    pool.run(parts, &|i| {
                        counts[i].fetch_add(1, Ordering::Relaxed);
                    });
                    assert!(counts.iter().all(|c| c.load(Ordering::Relaxed) == 1));
                }
            }
        }
    }

    #[test]
    fn jobs_inside_jobs_and_beside_jobs_run() {
        let pool = Pool::new(3);
        let sum = AtomicUsize::new(0);
        std::thread::scope(|scope| {
            for _ in 0..3 {
                scope.spawn(|| {
                    for _ in 0..50 {
                        pool.run(5, &|i| {
                            pool.run(4, &|j| {
                                sum.fetch_add(i * j, Ordering::Relaxed);
                            });
                        });
                    }
                });
            }
        });
        assert_eq!(sum.load(Ordering::Relaxed), 3 * 50 * 60);
    }

    #[test]
    fn sleeping_threads_wake_up() {
        let pool = Pool::new(2);
        for _ in 0..3 {
            std::thread::sleep(POLL_TIME * 5);
            let both = std::sync::Barrier::new(2);
            pool.run(2, &|_| {
                both.wait();
            });
        }
    }

    #[test]
    fn pieces_cover_a_slice() {
        let pool = Pool::new(4);
        let mut v = vec![0usize; 103];
        pool.for_chunks(&mut v, 10, &|i, piece| piece.iter_mut().for_each(|p| *p = i + 1));
        assert!(v.iter().enumerate().all(|(i, p)| *p == i / 10 + 1));
    }

    #[test]
    fn a_panic_reaches_the_caller_and_the_pool_goes_on() {
        let pool = Pool::new(2);
        let failed = std::panic::catch_unwind(std::panic::AssertUnwindSafe(|| {
            pool.run(100, &|i| assert!(i != 50));
        }));
        assert!(failed.is_err());
        let n = AtomicUsize::new(0);
        pool.run(10, &|_| {
            n.fetch_add(1, Ordering::Relaxed);
        });
        assert_eq!(n.load(Ordering::Relaxed), 10);
    }
}
