//! Times matmul in each format with 1 to 512 tokens, packing, and attention, on one thread:
//! `cargo run --release -p anemoe-kernels --example matmul -- rows=704 cols=2816 only=lut4_int16`. All arguments are optional.
//!
//! Each line is a name, a number of tokens, and the smallest time of a call in microseconds. To compare two commits, build
//! both, run them in turn, and take medians of the ratios of each line.

mod common;

use anemoe_kernels::{
    AttentionShape, CacheValues, CacheView, Columns, HalfLut, HeadStrides, Int8Lut, Int16Lut, MatMul, Matrix,
    PackedActivations, Pool, attention, matmul_batch, round_to_int16,
};
use common::test_data::{noise, random_bits};
use common::{argument, number};
use std::time::Instant;

fn time(rounds: usize, mut call: impl FnMut()) -> f64 {
    call();
    let mut t: Vec<f64> = (0..rounds)
        .map(|_| {
            let s = Instant::now();
            call();
            s.elapsed().as_secs_f64() * 1e6
        })
        .collect();
    t.sort_by(f64::total_cmp);
    t[0]
}
fn main() {
    let (rows, cols) = (number("rows", 704), number("cols", 2816));
    let pool = Pool::new(1);
    let n = rows * cols;
    let words64: Vec<u64> = random_bits(1).take(n / 2).collect();
    let bytes: Vec<u8> = words64.iter().flat_map(|v| v.to_le_bytes()).collect();
    let dense = noise(1, n);
    let halves: Vec<u8> = words64
        .iter()
        .flat_map(|s| (s & 0x83ff_83ff_83ff_83ff | 0x3c00_3c00_3c00_3c00).to_le_bytes())
        .collect();
    let mut lut4 = noise(1, rows / 32 * 16);
    lut4.chunks_mut(16).for_each(round_to_int16);
    let (mut lut6, mut lut8) = (noise(1, rows / 32 * 64), noise(1, rows / 32 * 256));
    anemoe_kernels::round_to_f16(&mut lut6);
    anemoe_kernels::round_to_f16(&mut lut8);
    let (h6, h8) = (HalfLut::new(&lut6), HalfLut::new(&lut8));
    let (c4, c6, c8, w4) =
        (Int8Lut::new(&lut4, 4), Int8Lut::new(&lut6, 6), Int8Lut::new(&lut8, 8), Int16Lut::new(&lut4));
    let scales = noise(1, n / 32);
    let lut = |bits: usize, t| Matrix::lut(bits, &bytes[..n * bits / 8], t, 32, rows, cols).unwrap();
    let int = |bits: usize, block: usize| {
        Matrix::int(bits, true, &bytes[..n * bits / 8], &scales[..n / block], None, (1, block), rows, cols)
            .unwrap()
    };
    let all = [
        ("f32", Matrix::f32(&dense, rows, cols).unwrap()),
        ("f16", Matrix::f16(&halves[..2 * n], rows, cols).unwrap()),
        ("lut4_f32", lut(4, &lut4)),
        ("lut4_int16", lut(4, &lut4).with_int16_lut(w4.as_ref())),
        ("lut6_f32", lut(6, &lut6)),
        ("lut6_f16", lut(6, &lut6).with_half_lut(h6.as_ref())),
        ("lut8_f32", lut(8, &lut8)),
        ("lut8_f16", lut(8, &lut8).with_half_lut(h8.as_ref())),
        ("lut2", lut(2, &lut4[..rows / 32 * 4])),
        ("lut3", lut(3, &lut4[..rows / 32 * 8])),
        ("int4_32", int(4, 32)),
        ("int4_row", int(4, cols)),
        ("int8_row", int(8, cols)),
        ("int8_32", int(8, 32)),
        ("fast_lut4", lut(4, &lut4).with_fast(c4.as_ref())),
        ("fast_lut6", lut(6, &lut6).with_fast(c6.as_ref())),
        ("fast_lut8", lut(8, &lut8).with_fast(c8.as_ref())),
        ("fast_int4", int(4, cols).with_fast(None)),
        ("fast_int8", int(8, cols).with_fast(None)),
        ("fast_int4_32", int(4, 32).with_fast(None)),
        ("fast_f16", Matrix::f16(&halves[..2 * n], rows, cols).unwrap().with_fast(None)),
    ];
    let x = noise(1, cols * 512);
    let mut y = vec![0f32; rows * 512];
    let only = argument("only");
    for (name, w) in all.into_iter().filter(|(name, _)| only.as_deref().is_none_or(|only| only == *name)) {
        for tokens in [1, 2, 3, 4, 8, 64, 512] {
            let mut packed = PackedActivations::default();
            let at = Columns { values: &x, first: 0, token_stride: cols, channel_stride: 1 };
            packed.pack(&pool, w.layout(), at, tokens, cols);
            let t = time((64 / tokens).max(3), || {
                matmul_batch(
                    &pool,
                    &mut [Some(MatMul { w, x: &packed, tokens: None, y: &mut y, stride: rows, bias: None })],
                );
            });
            println!("{name} {tokens} {t:.1}");
        }
        if ["f32", "lut4_f32", "lut4_int16", "fast_lut4", "fast_int8", "fast_f16"].contains(&name) {
            let mut packed = PackedActivations::default();
            let t = time(5, || {
                let at = Columns { values: &x, first: 0, token_stride: cols, channel_stride: 1 };
                packed.pack(&pool, w.layout(), at, 64, cols);
            });
            println!("pack_{name} 64 {t:.1}");
        }
    }
    let (d, slots) = (128, 2048);
    let cache: Vec<u16> =
        words64.iter().flat_map(|s| [*s as u16 & 0x83ff | 0x3c00; 1]).cycle().take(4 * slots * d).collect();
    for (heads, tokens) in [(8, 1), (2, 1), (8, 16)] {
        let s = AttentionShape { heads, kv_heads: 2, tokens, head_dim: d, slots };
        let q = noise(1, heads * tokens * d);
        let mut out = vec![0f32; heads * tokens * d];
        let at = HeadStrides { first: 0, head: tokens * d, token: d };
        let view = |part: usize| CacheView {
            values: CacheValues::F16(&cache),
            first: part * 2 * slots * d,
            head_stride: slots * d,
            slot_stride: d,
        };
        let t = time(10, || {
            attention(&pool, &s, 0.1, (&q, at), &view(0), &view(1), None, (&mut out, at));
        });
        println!("attention_{heads}_heads {tokens} {t:.1}");
    }
}
