//! Executes any `.mlpackage` in the supported op set.
//!
//! ```text
//! CpuPackage --compile(function)---> CompiledFunction: constants folded, weights left as stored, values assigned to buffers
//!            --run(inputs, states)--> a plan's fused nodes, or instructions that run one after the other
//! ```
//! Ops compute in f32; with [`Precision::Fp16`] every result whose type is fp16 is rounded to fp16.

mod batch;
mod bindings;
mod cache_states;
mod classifier;
mod compile;
mod convolution;
mod function;
mod fused;
mod interpreter;
mod ir;
mod located;
pub mod ops;
mod package;
mod plan_source;
mod plans_by_shapes;
mod plans_by_tokens;
pub(crate) mod recent;
mod shared_constants;
mod state_value;
mod states;
mod strided;
mod tokens;
mod weights;

pub use classifier::{ClassLabel, Classifier};
pub use function::CompiledFunction;
pub use package::{CpuBackend, CpuPackage};
pub use states::CpuStates;
pub use tokens::{Carried, CarriedRows, carried};

pub(crate) use crate::backend::INLINE_TERMS;
pub use anemoe_kernels::Products;
pub(crate) use ops::dot;
pub(crate) use package::read_constant;

/// Rounding of results.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Default)]
pub enum Precision {
    /// Results of type fp16 are rounded to fp16, as on the device.
    #[default]
    Fp16,
    /// Nothing is rounded.
    Fp32,
}

/// Options of execution.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Options {
    /// Rounding of results.
    pub precision: Precision,
    /// Leave out the experts of fused functions whose routing weight is zero for every token.
    pub skip_zero: bool,
    /// Run functions of fixed shapes as fused nodes over planned buffers.
    pub fuse: bool,
    /// Hold keys and values of type fp16 in fp16, as a device does, even if nothing else is rounded: half the memory, and half
    /// the bytes read at long contexts. Applies to fused functions with [`Precision::Fp32`].
    pub half_states: bool,
    /// Arithmetic of products with weights.
    pub products: Products,
    /// Measure the time of every node of fused functions.
    pub profile: bool,
}

impl Options {
    /// Tells whether keys and values of type fp16 are held in fp16.
    fn holds_halves(&self) -> bool {
        self.half_states && self.fuse && self.precision == Precision::Fp32
    }
}

impl Default for Options {
    fn default() -> Self {
        Options {
            precision: Precision::Fp16,
            skip_zero: true,
            fuse: true,
            half_states: false,
            products: Products::Exact,
            profile: false,
        }
    }
}

fn ops_axis(axis: i32, rank: usize) -> Option<usize> {
    let a = if axis < 0 { i64::from(axis) + rank as i64 } else { i64::from(axis) };
    usize::try_from(a).ok().filter(|&a| a < rank)
}
