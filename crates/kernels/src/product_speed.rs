//! Measures how fast this machine multiplies by weights in its caches.

use crate::{
    Columns, IndexBits, IntBits, Isa, MatMul, OwnedMatrix, PackedActivations, Pool, Products, Weight,
    WeightFormat, matmul_batch, round_to_int16,
};
use std::time::Instant;

/// Bytes of the matrix: it fits with its activations into the L2 caches of two cores.
const BYTES: usize = 512 << 10;
/// Columns of the matrix.
const COLS: usize = 1024;
/// Rows that share a table.
const ROWS_PER_TABLE: usize = 32;
/// Matmuls of a round: a few milliseconds.
const PER_ROUND: usize = 16;

/// Measures the multiply-adds per second of the pool's threads, the fastest of `rounds`. The matrix holds indices into
/// tables, for 8 bits integers with a scale per row, or fp16 without `index_bits`, and is multiplied by `tokens` tokens.
pub fn measure_multiply_adds(
    pool: &Pool,
    index_bits: Option<IndexBits>,
    products: Products,
    tokens: usize,
    rounds: usize,
) -> f64 {
    let format = match index_bits {
        None => WeightFormat::Fp16,
        Some(IndexBits::Eight) => {
            let (bits, signed, offsets) = (IntBits::Eight, true, false);
            WeightFormat::Int { bits, signed, block_rows: 1, block_cols: COLS, offsets }
        }
        Some(bits) => WeightFormat::Lut { bits, rows_per_table: ROWS_PER_TABLE },
    };
    let bits = usize::from(format.bits());
    let rows = BYTES * 8 / bits / COLS / ROWS_PER_TABLE * ROWS_PER_TABLE;
    // fp16 values have magnitudes from 1 to 2; indices take all values.
    let noise = |i: usize| (i.wrapping_mul(0x9e37_79b9) >> 7) as u16 & 0x83ff | 0x3c00;
    let elements: Vec<u8> = (0..rows * COLS * bits / 16).flat_map(|i| noise(i).to_le_bytes()).collect();
    let values = format.has_values().then(|| {
        let entries = if bits == 8 { rows } else { (rows / ROWS_PER_TABLE) << bits };
        let mut lut: Vec<f32> = (0..entries).map(|i| f32::from(noise(i)) / 65536.0 - 0.5).collect();
        lut.chunks_mut(16).filter(|_| bits == 4).for_each(round_to_int16);
        crate::round_to_f16(&mut lut);
        lut
    });
    let Ok(mut matrix) = OwnedMatrix::new(Weight { format, elements, values, offsets: None }, rows, COLS)
    else {
        return 0.0;
    };
    matrix.prepare(products);
    let w = matrix.view();
    let tokens = tokens.max(1);
    let x: Vec<f32> = (0..COLS * tokens).map(|i| f32::from(noise(i)) / 65536.0).collect();
    let columns = Columns { values: &x, first: 0, token_stride: COLS, channel_stride: 1 };
    let mut packed = PackedActivations::default();
    packed.pack(pool, w.layout(), columns, tokens, COLS);
    let mut y = vec![0f32; rows * tokens];
    let mut best = f64::INFINITY;
    // One extra round at the start brings the weights into the caches.
    for _ in 0..=rounds.max(1) {
        let started = Instant::now();
        for _ in 0..PER_ROUND {
            let product = MatMul { w, x: &packed, tokens: None, y: &mut y, stride: rows, bias: None };
            matmul_batch(Isa::best(), pool, &mut [Some(product)]);
        }
        best = best.min(started.elapsed().as_secs_f64());
    }
    (rows * COLS * tokens * PER_ROUND) as f64 / best.max(1e-9)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn every_format_is_multiplied() {
        let pool = Pool::new(2);
        for bits in IndexBits::ALL.into_iter().map(Some).chain([None]) {
            for products in [Products::Exact, Products::Usual, Products::Fast] {
                // A rate below that of any processor.
                assert!(measure_multiply_adds(&pool, bits, products, 2, 1) > 1e6, "{bits:?} {products:?}");
            }
        }
    }
}
