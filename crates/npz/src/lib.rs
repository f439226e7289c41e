//! Reads and writes NumPy's `.npy` and `.npz` files.
//!
//! Reads format versions 1.0, 2.0 and 3.0, C and Fortran order, and archives that are stored or deflated. Writes
//! version 1.0 (2.0 where the header is too long for 1.0) in C order, little-endian. The same arrays give the same
//! bytes. The format is NumPy's `numpy.lib.format`.
//!
//! Headers are not trusted: no memory is allocated for a claimed size before the file is known to hold as many bytes.
//! A compressed archive may expand to a multiple of its own length, or to the bytes that its reader wants.
//!
//! # Tests
//! Written files are read back, in every version and order. Every damaged, lying or bloated file is an error that
//! names the array. The tests are beside the code.
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
