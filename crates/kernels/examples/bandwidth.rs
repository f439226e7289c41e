//! Reads weights of a decode step and of a batch, beside plain reading of the same memory: `cargo run --release -p
//! anemoe-kernels --example bandwidth`.

use anemoe_kernels::{Columns, Matrix, Panel, Pool, Product, products};
use std::time::Instant;

const ROWS: usize = 1408;
const COLS: usize = 2816;

fn noise(n: usize) -> Vec<f32> {
    let mut s = 0x9e37_79b9_7f4a_7c15u64;
    let mut next = || {
        s ^= s << 13;
        s ^= s >> 7;
        s ^= s << 17;
        (s >> 40) as f32 / (1u64 << 24) as f32 - 0.5
    };
    (0..n).map(|_| next()).collect()
}

fn main() {
    let pool = Pool::global();
    let experts: usize = std::env::args().nth(2).and_then(|v| v.parse().ok()).unwrap_or(256);
    let size = ROWS * COLS / 2;
    let mut indices = vec![0u8; size * experts];
    pool.pieces(&mut indices, 1 << 20, &|i, piece| {
        let mut s = (i as u64 * 0x9e37_79b9_7f4a_7c15) | 1;
        for v in piece.chunks_exact_mut(8) {
            s ^= s << 13;
            s ^= s >> 7;
            s ^= s << 17;
            v.copy_from_slice(&s.to_le_bytes());
        }
    });
    let lut = noise(ROWS / 32 * 16);
    let matrix = |e: usize| {
        Matrix::lut(4, &indices[e * size..(e + 1) * size], &lut, 32, ROWS, COLS).expect("a matrix")
    };
    let most = std::env::args().nth(1).and_then(|v| v.parse().ok()).unwrap_or(usize::MAX);
    for tokens in [1usize, 2, 4, 8, 16, 64].into_iter().filter(|t| *t <= most) {
        let x = noise(COLS * tokens);
        let mut panel = Panel::default();
        let x = Columns { values: &x, first: 0, token_stride: COLS, channel_stride: 1 };
        panel.fill(matrix(0).order(), x, tokens, COLS, None);
        let mut y = vec![0f32; ROWS * tokens];
        let (mut reads, mut times) = (Vec::new(), Vec::new());
        let n = experts;
        for _ in 0..5 {
            let started = Instant::now();
            let sums: Vec<std::sync::atomic::AtomicU64> = (0..n).map(|_| 0.into()).collect();
            pool.run(n, &|e| {
                let sum: u64 = indices[e * size..(e + 1) * size]
                    .as_chunks::<64>()
                    .0
                    .iter()
                    .map(|c| {
                        c.as_chunks::<8>().0.iter().fold(0u64, |a, w| a.wrapping_add(u64::from_le_bytes(*w)))
                    })
                    .fold(0, u64::wrapping_add);
                sums[e].store(sum, std::sync::atomic::Ordering::Relaxed);
            });
            reads.push(started.elapsed().as_secs_f64());
            let started = Instant::now();
            for e in 0..n {
                let w = matrix(e);
                products(pool, &mut [Some(Product { w, x: &panel, y: &mut y, stride: ROWS, bias: None })]);
            }
            times.push(started.elapsed().as_secs_f64());
        }
        reads.sort_by(f64::total_cmp);
        times.sort_by(f64::total_cmp);
        let gb = (size * n) as f64 / 1e9;
        let gmac = (ROWS * COLS * n * tokens) as f64 / 1e9;
        println!(
            "{tokens:>3} tokens: read {:.1} GB/s, product {:.1} GB/s ({:.0} %), {:.0} us per matrix, {:.0} GMAC/s",
            gb / reads[2],
            gb / times[2],
            100.0 * reads[2] / times[2],
            times[2] / n as f64 * 1e6,
            gmac / times[2]
        );
    }
}
