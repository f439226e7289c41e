//! Times matmul over LUT4 matrices (fp16 with `half=1`) that lie one behind the other in memory, alternating with plain
//! reads of the same memory:
//! `cargo run --release -p anemoe-kernels --example bandwidth -- tokens=1,8 matrices=256 rows=1408 cols=2816 fast=1`.
//! All arguments are optional. Rounds are short and alternate, so that other load on the machine affects both alike.

mod common;

use anemoe_kernels::{
    Columns, IndexBits, Isa, MatMul, OwnedMatrix, PackedActivations, Pool, Products, Weight, WeightFormat,
    matmul_batch, read, round_to_int16,
};
use common::test_data::{noise, random_bits};
use common::{argument, median, number};
use std::time::Instant;

/// Matrices of a round.
const ROUND: usize = 16;

fn main() {
    let (rows, cols, n) = (number("rows", 1408), number("cols", 2816), number("matrices", 256));
    let (fast, rounds) = (number("fast", 0) == 1, number("rounds", 40));
    let tokens = argument("tokens").unwrap_or_else(|| "1,2,4,8,16,64".into());
    let pool = Pool::global();
    let half = number("half", 0) == 1;
    let size = if half { rows * cols * 2 } else { rows * cols / 2 };
    let mut indices = vec![0u64; size * n / 8];
    pool.for_chunks(&mut indices, 1 << 17, &|i, piece| {
        for (v, s) in piece.iter_mut().zip(random_bits(i as u64)) {
            // As fp16, magnitudes from 1 to 2.
            *v = if half { s & 0x83ff_83ff_83ff_83ff | 0x3c00_3c00_3c00_3c00 } else { s };
        }
    });
    // SAFETY: a view of initialized integers as bytes.
    let indices = unsafe { std::slice::from_raw_parts(indices.as_ptr().cast::<u8>(), size * n) };
    let mut lut = noise(1, rows / 32 * 16);
    lut.chunks_mut(16).for_each(round_to_int16);
    let words = number("words", 1) == 1;
    let matrices: Vec<_> = (0..n)
        .map(|e| {
            let format = match half {
                true => WeightFormat::Fp16,
                false => WeightFormat::Lut { bits: IndexBits::Four, rows_per_table: 32 },
            };
            let (elements, values) = (&indices[e * size..(e + 1) * size], (!half).then(|| lut.clone()));
            let weight = Weight { format, elements, values, offsets: None };
            let mut matrix = OwnedMatrix::new(weight, rows, cols).expect("a matrix");
            if fast || words {
                matrix.prepare(if fast { Products::Fast } else { Products::Exact });
            }
            matrix
        })
        .collect();
    for tokens in tokens.split(',').map(|t| t.parse::<usize>().expect("tokens")) {
        let x = noise(2, cols * tokens);
        let mut packed = PackedActivations::default();
        let x = Columns { values: &x, first: 0, token_stride: cols, channel_stride: 1 };
        packed.pack(pool, matrices[0].view().layout(), x, tokens, cols);
        let mut y = vec![0f32; rows * tokens];
        let (mut reads, mut times) = (Vec::new(), Vec::new());
        let per = ROUND.min(n);
        for round in 0..rounds {
            let first = round * 2 * per % (n + 1 - per).max(1);
            let started = Instant::now();
            read(pool, &indices[first * size..(first + per) * size]);
            reads.push(started.elapsed().as_secs_f64());
            let first = (round * 2 + 1) * per % (n + 1 - per).max(1);
            let started = Instant::now();
            for matrix in &matrices[first..first + per] {
                let w = matrix.view();
                matmul_batch(
                    Isa::best(),
                    pool,
                    &mut [Some(MatMul { w, x: &packed, tokens: None, y: &mut y, stride: rows, bias: None })],
                );
            }
            times.push(started.elapsed().as_secs_f64());
        }
        let share = median(reads.iter().zip(&times).map(|(r, t)| r / t).collect());
        let (read, time) = (median(reads), median(times));
        let gb = (size * per) as f64 / 1e9;
        println!(
            "{tokens:>3} tokens: read {:.1} GB/s, product {:.1} GB/s ({:.0} %), {:.0} us per matrix, {:.0} GMAC/s",
            gb / read,
            gb / time,
            100.0 * share,
            time / per as f64 * 1e6,
            (rows * cols * per * tokens) as f64 / 1e9 / time
        );
    }
}
