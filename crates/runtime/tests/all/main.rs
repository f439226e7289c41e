//! Tests of packages. They are one binary, since linking each takes seconds.

mod interop;
mod memory;
mod plans;
mod refused;
mod sparsity;
