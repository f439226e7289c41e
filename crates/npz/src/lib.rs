//! NumPy's `.npy` and `.npz` files, read and written.
//!
//! Reads format versions 1.0, 2.0 and 3.0, C and Fortran order, and archives that are stored or deflated; writes 1.0 (2.0
//! where a header is too long for it) in C order, little-endian, the same bytes for the same arrays. The format is
//! NumPy's `numpy.lib.format`.
//!
//! A file is never believed: nothing is allocated from a size that a header claims before the file is known to hold as
//! many bytes, and what a compressed archive may grow to is bounded by its own length,
//! or by what its reader has use for.
//!
//! # Tests
//! Written files are read back, in every version and order; every damaged, lying or bloated file is an error that names
//! the array. The tests are beside the code.
//! `cargo test -p anemoe-npz` runs for 4 seconds on two busy cores, besides the compilation.
#![deny(unsafe_code)]

mod array;
mod npy;
mod npy_header;
mod npz;

pub use array::{Array, ArrayData, DType};
pub use npy::{read_npy, write_npy};
pub use npz::{read_npz, read_npz_within, write_npz, write_npz_compressed};

pub use anemoe_io::{Error, Result};
