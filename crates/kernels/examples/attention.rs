//! Times attention of one token over fp16 caches that lie one behind the other in memory, alternating with plain reads
//! of the same memory:
//! `cargo run --release -p anemoe-kernels --example attention -- heads=8 kv_heads=2 head_dim=128 slots=4096 layers=40`.
//! All arguments are optional.

mod common;

use anemoe_kernels::{
    AttentionShape, CacheValues, CacheView, F16Buffer, HeadStrides, Pool, Softmax, attention, read,
};
use common::test_data::random_bits;
use common::{median, number};
use std::time::Instant;

fn main() {
    let (heads, kv_heads, head_dim) = (number("heads", 8), number("kv_heads", 2), number("head_dim", 128));
    let (slots, layers, rounds) = (number("slots", 4096), number("layers", 40), number("rounds", 40).max(1));
    let pool = Pool::global();
    let shape = AttentionShape { heads, kv_heads, tokens: 1, head_dim, slots };
    let cache = kv_heads * slots * head_dim;
    let mut halves = F16Buffer::zeros(layers * 2 * cache);
    pool.for_chunks(&mut halves, 1 << 18, &|i, piece| {
        for (v, s) in piece.iter_mut().zip(random_bits(i as u64)) {
            // Magnitudes from 1 to 2.
            *v = s as u16 & 0x83ff | 0x3c00;
        }
    });
    // SAFETY: a view of initialized integers as bytes.
    let bytes = unsafe { std::slice::from_raw_parts(halves.as_ptr().cast::<u8>(), 2 * halves.len()) };
    let q = vec![0.01f32; heads * head_dim];
    let mut out = vec![0f32; heads * head_dim];
    let at = HeadStrides { first: 0, head: head_dim, token: heads * head_dim };
    let (mut reads, mut times) = (Vec::new(), Vec::new());
    for _ in 0..rounds {
        let started = Instant::now();
        read(pool, bytes);
        reads.push(started.elapsed().as_secs_f64());
        let started = Instant::now();
        let softmax = Softmax { scale: 0.1, mask: None, sinks: None };
        for layer in 0..layers {
            let view = |part: usize| CacheView {
                values: CacheValues::F16(&halves),
                first: (2 * layer + part) * cache,
                head_stride: slots * head_dim,
                slot_stride: head_dim,
            };
            attention(pool, &shape, softmax, (&q, at), &view(0), &view(1), (&mut out, at));
        }
        times.push(started.elapsed().as_secs_f64());
    }
    let share = median(reads.iter().zip(&times).map(|(r, t)| r / t).collect());
    let (read, time, gb) = (median(reads), median(times), bytes.len() as f64 / 1e9);
    println!(
        "read {:.1} GB/s, attention {:.1} GB/s ({:.0} %), {:.0} us per layer",
        gb / read,
        gb / time,
        100.0 * share,
        time / layers as f64 * 1e6
    );
}
