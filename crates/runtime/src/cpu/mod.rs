//! Executes any `.mlpackage` in the supported op set.
pub mod ops;
