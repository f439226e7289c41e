//! Matmul over weights that stay compressed, attention and elementwise functions, with SIMD chosen at run time.
//!
//! ```text
//! isa            which instructions this processor has
//! simd/          vectors of one instruction set behind common traits; the only dispatch
//! memory/        aligned vectors, fp16 buffers in large pages, prefetching
//! pool           threads for jobs of microseconds
//! weight_format  formats of stored weights, and their operands
//! matrix         views of weights                              lut_tables   tables as integers
//! arithmetic     how a matrix is multiplied
//! activations/   packs tokens as f32, int8, int16 or bf16
//! matmul/        jobs and schedule; one tile loop per arithmetic: f32, int16, int8, int8_blocks, bf16
//! owned_matrix   matrices with their memory, prepared for their tile loop
//! attention/     masked attention over a KV cache
//! elementwise    gates, soft cap, exponentials                rms_norm     RMS norms
//! conv           convolutions, as matmuls or depthwise         transpose    transposing copies
//! scale_search   scales of linear quantization                 f16          conversions of fp16
//! bandwidth      measures the memory                           product_speed  measures products in the caches
//! ```
//!
//! `docs/architecture.md` lists the places of unsafe code. Everything public is safe.
//!
//! # Tests
//! They prove that
//! - every vector function gives the bits of scalar code (`simd::tests`);
//! - every weight format agrees with f64 within its error bound, for any shape, batch and number of threads, and a token has
//!   the same bits alone and in a batch (`matmul`, `attention`);
//! - AVX2, AVX-512 and NEON give the digests in `tests/bit_exact.rs`.
//!
//! `cargo test -p anemoe-kernels` runs for 20 seconds on two cores of an EPYC 9004, after a compilation of minutes.

mod activations;
mod arithmetic;
mod arithmetic_choice;
mod attention;
mod bandwidth;
mod conv;
mod elementwise;
mod f16;
mod isa;
mod lut_tables;
mod matmul;
mod matrix;
mod memory;
mod owned_matrix;
mod packed_rows;
mod pool;
mod pooling;
mod product_speed;
mod rms_norm;
mod scale_search;
mod simd;
#[cfg(test)]
mod test_data;
mod transpose;
mod weight_format;

pub use activations::{Columns, Layout, PackedActivations};
pub use arithmetic_choice::Products;
pub use attention::{
    AttentionShape, CacheValues, CacheView, HeadStrides, MASK_CUTOFF, Mask, Softmax, attention,
};
pub use bandwidth::{measure_bandwidth, read};
pub use conv::{Conv, DepthwiseConv, Finish, Image, PackedConv, Window, conv, depthwise_conv, packed_conv};
pub use elementwise::{
    ActivationFunction, GELU_FP16, GateFunction, PairFunction, apply_activation, apply_gate, apply_pair,
    apply_sigmoid, clamp, dot_products, exp_and_sum_from, largest_element, leaky_relu, softcap,
};
pub use f16::{f16_bits_to_f32, f16_to_f32, f32_to_f16, round_to_f16};
pub use isa::Isa;
pub use lut_tables::{Int16Lut, round_to_int16};
pub use matmul::{MatMul, matmul_batch};
pub use matrix::{Matrix, MatrixError, f32_bytes};
pub use memory::F16Buffer;
pub use owned_matrix::OwnedMatrix;
pub use packed_rows::{DenseProducts, PackedRows, multiply_dense};
pub use pool::{MAX_THREADS, Pool};
pub use pooling::{PoolFunction, Pooling, pool_windows};
pub use product_speed::measure_multiply_adds;
pub use rms_norm::{RmsNorm, rms_norm};
pub use scale_search::{
    ErrorSums, GRIDS, Grids, ScaleAndZero, find_extremes, find_scale, quantize_linear, sum_grid_errors,
};
pub use transpose::{Strided, transpose, transpose_add};
pub use weight_format::{IndexBits, IntBits, MXFP4_TABLE, Weight, WeightFormat};
