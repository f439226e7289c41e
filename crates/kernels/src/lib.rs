//! Matrix products over weights that stay compressed, attention and vector functions, with SIMD chosen at run time and a
//! scalar oracle for each path.
//!
//! The only crate with unsafe code; everything public is safe.

mod attention;
mod bandwidth;
mod decode;
mod fast;
mod grouped;
mod half_float;
mod halves;
mod isa;
mod lanes;
mod linear_fit;
mod lines;
mod matrix;
mod panel;
mod pool;
mod product;
#[cfg(test)]
mod same_bits;
#[cfg(test)]
mod test_data;
mod transpose;
mod vector;
mod words;

pub use attention::{AttentionShape, CacheValues, CacheView, HeadStrides, Mask, attention};
pub use bandwidth::{read, read_bandwidth};
pub use decode::Order;
pub use fast::Codes;
pub use grouped::{Grouped, grouped};
pub use half_float::{f16_bits_to_f32, f16_to_f32, f32_to_f16, round_to_f16};
pub use halves::Halves;
pub use isa::Isa;
pub use linear_fit::{
    ErrorSums, GRIDS, Grids, ScaleAndZero, best_scale, extremes, grid_errors, quantize_linear,
};
pub use matrix::{Matrix, MatrixError};
pub use panel::{Columns, Panel};
pub use pool::{MOST_THREADS, Pool};
pub use product::{Product, products, products_on};
pub use transpose::{Strided, transpose, transpose_add};
pub use vector::{Gate, RmsNorm, activated, exp_sum, gated, rms_norm, softcap};
pub use words::{Words, round_to_words};
