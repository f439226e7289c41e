//! Times matmul in each format with 1 to 512 tokens, packing, and attention, on one thread:
//! `cargo run --release -p anemoe-kernels --example matmul -- rows=704 cols=2816 only=lut4_int16`. All arguments are optional.
//!
//! Each line is a name, a number of tokens, and the smallest time of a call in microseconds. To compare two commits, build
//! both, run them in turn, and take medians of the ratios of each line.

mod common;

use anemoe_kernels::{
    AttentionShape, CacheValues, CacheView, Columns, HeadStrides, IndexBits, IntBits, Isa, MatMul,
    OwnedMatrix, PackedActivations, Pool, Products, Softmax, Weight, WeightFormat, attention, matmul_batch,
    round_to_int16,
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
    let scales = noise(1, n / 32);
    let dense: Vec<u8> = dense.iter().flat_map(|v| v.to_le_bytes()).collect();
    // `how` is none for f32 whatever the format.
    let make = |format: WeightFormat, elements: &[u8], values: Option<&[f32]>, how: Option<Products>| {
        let elements = elements[..n * usize::from(format.bits()) / 8].to_vec();
        let weight = Weight { format, elements, values: values.map(<[f32]>::to_vec), offsets: None };
        let mut matrix = OwnedMatrix::new(weight, rows, cols).unwrap();
        if let Some(products) = how {
            matrix.prepare(products);
        }
        matrix
    };
    let lut = |bits: IndexBits, table: &[f32], how| {
        let table = &table[..(rows / 32) << bits.bits()];
        make(WeightFormat::Lut { bits, rows_per_table: 32 }, &bytes, Some(table), how)
    };
    let int = |bits: IntBits, block_cols: usize, products: Products| {
        let format = WeightFormat::Int { bits, signed: true, block_rows: 1, block_cols, offsets: false };
        make(format, &bytes, Some(&scales[..n / block_cols]), Some(products))
    };
    let powers: Vec<f32> = bytes.iter().take(n / 32).map(|b| 2f32.powi(i32::from(b % 8) - 12)).collect();
    use IndexBits::*;
    let (exact, fast) = (Some(Products::Exact), Some(Products::Fast));
    let all = [
        ("f32", make(WeightFormat::F32, &dense, None, exact)),
        ("f16", make(WeightFormat::Fp16, &halves, None, exact)),
        ("lut4_f32", lut(Four, &lut4, None)),
        ("lut4_int16", lut(Four, &lut4, exact)),
        ("lut6_f32", lut(Six, &lut6, None)),
        ("lut6_f16", lut(Six, &lut6, exact)),
        ("lut8_f32", lut(Eight, &lut8, None)),
        ("lut8_f16", lut(Eight, &lut8, exact)),
        ("lut2", lut(Two, &lut4, exact)),
        ("lut3", lut(Three, &lut4, exact)),
        ("fast_mxfp4", make(WeightFormat::Mxfp4 { block_cols: 32 }, &bytes, Some(&powers), fast)),
        ("mxfp4", make(WeightFormat::Mxfp4 { block_cols: 32 }, &bytes, Some(&powers), exact)),
        ("int4_32", int(IntBits::Four, 32, Products::Exact)),
        ("int4_row", int(IntBits::Four, cols, Products::Exact)),
        ("int8_row", int(IntBits::Eight, cols, Products::Exact)),
        ("int8_32", int(IntBits::Eight, 32, Products::Exact)),
        ("fast_lut2", lut(Two, &lut4, fast)),
        ("fast_lut3", lut(Three, &lut4, fast)),
        ("fast_lut4", lut(Four, &lut4, fast)),
        ("fast_lut6", lut(Six, &lut6, fast)),
        ("fast_lut8", lut(Eight, &lut8, fast)),
        ("fast_int4", int(IntBits::Four, cols, Products::Fast)),
        ("usual_lut6", lut(Six, &lut6, Some(Products::Usual))),
        ("usual_int8", int(IntBits::Eight, cols, Products::Usual)),
        ("fast_int8", int(IntBits::Eight, cols, Products::Fast)),
        ("fast_int4_32", int(IntBits::Four, 32, Products::Fast)),
        ("fast_f16", make(WeightFormat::Fp16, &halves, None, fast)),
    ];
    let x = noise(1, cols * 512);
    let mut y = vec![0f32; rows * 512];
    let only = argument("only");
    for (name, matrix) in all.iter().filter(|(name, _)| only.as_deref().is_none_or(|only| only == *name)) {
        let w = matrix.view();
        for tokens in [1, 2, 3, 4, 8, 64, 512].into_iter().filter(|n| number("tokens", *n) == *n) {
            let mut packed = PackedActivations::default();
            let at = Columns { values: &x, first: 0, token_stride: cols, channel_stride: 1 };
            packed.pack(&pool, w.layout(), at, tokens, cols);
            let t = time((64 / tokens).max(3), || {
                matmul_batch(
                    Isa::best(),
                    &pool,
                    &mut [Some(MatMul { w, x: &packed, tokens: None, y: &mut y, stride: rows, bias: None })],
                );
            });
            println!("{name} {tokens} {t:.1}");
        }
        if ["f32", "lut4_f32", "lut4_int16", "fast_lut4", "fast_int8", "fast_f16"].contains(name) {
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
        let softmax = Softmax { scale: 0.1, mask: None, sinks: None };
        let t = time(10, || {
            attention(&pool, &s, softmax, (&q, at), &view(0), &view(1), (&mut out, at));
        });
        println!("attention_{heads}_heads {tokens} {t:.1}");
    }
}
