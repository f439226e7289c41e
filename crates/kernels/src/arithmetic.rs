//! Ways to multiply a matrix.

use crate::lut_tables::{Exponents, HalfLut, Int8Codes, Int16Lut};

/// Says how a matrix is multiplied, with the tables that this takes.
#[derive(Debug, Default)]
pub(crate) enum Arithmetic {
    /// Exact, in f32.
    #[default]
    F32,
    /// Exact, in f32, with tables of 64 or 256 entries as fp16. Results have the same bits.
    F32OfHalves(HalfLut),
    /// Exact, in f32, with scales that are powers of two as bytes.
    F32OfExponents(Exponents),
    /// Exact, in integers, with tables of 16 entries. Takes two thirds of the instructions of f32; [`Int16Lut`] states its error.
    Int16(Int16Lut),
    /// Approximate, with weights and tokens of 8 bits.
    Int8(Int8Codes),
    /// Approximate, with integers of 8 bits as they are or entries of tables as 15 bits, and tokens of 15 bits in two digits.
    Int8Digits(Int8Codes),
    /// Approximate, with integers of 4 bits that have a scale per block, and tokens of 8 bits.
    Int8OfBlocks,
    /// The same with MXFP4, and scales that are powers of two as bytes.
    Int8OfExponents(Exponents),
    /// Approximate, in bf16.
    Bf16,
}
