//! Matrix products over weights that stay compressed, with SIMD chosen at run time and a scalar oracle for each path.
//!
//! The only crate with unsafe code; everything public is safe.

mod half_float;
mod isa;
mod lanes;
mod linear_fit;
mod matmul;
mod matrix;

pub use half_float::{f16_to_f32, f32_to_f16, round_to_f16};
pub use isa::Isa;
pub use linear_fit::{
    ErrorSums, GRIDS, Grids, ScaleAndZero, best_scale, extremes, grid_errors, quantize_linear,
};
pub use matmul::{matmul, matmul_on, matmul_parallel};
pub use matrix::{Matrix, MatrixError};
