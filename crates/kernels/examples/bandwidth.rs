//! Reads weights of a decode step and of a batch, beside plain reading of the same memory: `cargo run --release -p
//! anemoe-kernels --example bandwidth [most tokens] [matrices] [fast]`.

use anemoe_kernels::{Codes, Columns, Matrix, Panel, Pool, Product, products, read_bandwidth};
use std::time::Instant;

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
    #[allow(non_snake_case)]
    let ROWS: usize = std::env::args().nth(4).and_then(|v| v.parse().ok()).unwrap_or(1408);
    let again: usize = std::env::args().nth(5).and_then(|v| v.parse().ok()).unwrap_or(1);
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
    let codes = Codes::new(&lut);
    let fast = std::env::args().nth(3).is_some_and(|v| v == "fast");
    let matrix = |e: usize| {
        let m = Matrix::lut(4, &indices[e * size..(e + 1) * size], &lut, 32, ROWS, COLS).expect("a matrix");
        if fast { m.fast(codes.as_ref()) } else { m }
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
            reads.push(read_bandwidth(pool, size * experts, 1));
            let started = Instant::now();
            for e in (0..n).cycle().take(n * again) {
                let w = matrix(e);
                products(
                    pool,
                    &mut [Some(Product { w, x: &panel, tokens: None, y: &mut y, stride: ROWS, bias: None })],
                );
            }
            times.push(started.elapsed().as_secs_f64());
        }
        reads.sort_by(f64::total_cmp);
        times.sort_by(f64::total_cmp);
        let gb = (size * n * again) as f64 / 1e9;
        let gmac = (ROWS * COLS * n * tokens * again) as f64 / 1e9;
        println!(
            "{tokens:>3} tokens: read {:.1} GB/s, product {:.1} GB/s ({:.0} %), {:.0} us per matrix, {:.0} GMAC/s",
            reads[2],
            gb / times[2],
            100.0 * gb / times[2] / reads[2],
            times[2] / n as f64 * 1e6,
            gmac / times[2]
        );
    }
}
