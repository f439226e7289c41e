//! Times jobs without work: the cost of starting and ending one, by the threads of the pool and the parts of the job:
//! `cargo run --release -p anemoe-kernels --example pool -- threads=16`. All arguments are optional.
//!
//! Each line is the threads, the parts, and the median of a job in microseconds.

mod common;

use anemoe_kernels::Pool;
use common::{median, number};
use std::time::Instant;

fn main() {
    let most = number("threads", std::thread::available_parallelism().map_or(1, usize::from));
    for threads in [2, 4, 8, 16, 32, 64].into_iter().filter(|n| *n <= most) {
        let pool = Pool::new(threads);
        for parts in [2, threads, 4 * threads] {
            let times = (0..2000).map(|_| {
                let started = Instant::now();
                (0..10).for_each(|_| pool.run(parts, &|part| _ = std::hint::black_box(part)));
                started.elapsed().as_secs_f64() * 1e5
            });
            println!("{threads} {parts} {:.2}", median(times.collect()));
        }
    }
}
