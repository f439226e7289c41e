//! Chooses how a matrix is multiplied.

use crate::arithmetic::Arithmetic;
use crate::lut_tables::{Exponents, HalfLut, Int8Codes, Int16Lut, MXFP4_BLOCK};
use crate::weight_format::{IndexBits, IntBits, WeightFormat};
use crate::{Isa, Matrix};

/// Says how exact products with weights are.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash, PartialOrd, Ord)]
pub enum Products {
    /// Results are those of f32.
    Exact,
    /// Activations are rounded where that changes less than a tenth of what the compression does (docs/kernels.md): to 8 bits for
    /// weights of at most 4 bits, to 15 bits for tables of 64 entries and for integers of 8 bits with a scale per row.
    Usual,
    /// Activations are rounded to 8 bits where weights are tables or integers, and products are of bf16 where weights are large
    /// and of fp16 or f32, and the processor has bf16. The error is about half a percent of a product's norm.
    Fast,
}

/// Fewest rows and columns for bf16. Routers are smaller: rounding their sums could choose another expert.
const MIN_BF16_SIZE: usize = 512;

impl Arithmetic {
    /// Chooses the arithmetic of MXFP4 with these scales.
    pub fn of_exponents(exponents: Exponents, products: Products) -> Arithmetic {
        match products {
            Products::Usual | Products::Fast if crate::simd::multiplies_bytes(Isa::best()) => {
                Arithmetic::Int8OfExponents(exponents)
            }
            Products::Exact | Products::Usual | Products::Fast => Arithmetic::F32OfExponents(exponents),
        }
    }

    /// Chooses the arithmetic of a matrix.
    pub fn choose(w: &Matrix<'_>, products: Products) -> Arithmetic {
        let multiplies_bytes = || crate::simd::multiplies_bytes(Isa::best());
        match (products, w.weight.format) {
            (Products::Exact, _) => Arithmetic::exact(w),
            (Products::Usual, WeightFormat::Lut { bits: IndexBits::Six, .. })
                if w.starts_rows_at_bytes() && multiplies_bytes() =>
            {
                let codes = Int8Codes::of_two_bytes(w.values());
                codes.map_or_else(|| Arithmetic::exact(w), Arithmetic::Int8Digits)
            }
            (Products::Usual, WeightFormat::Int { bits: IntBits::Eight, signed, block_cols, .. })
                if block_cols == w.cols && multiplies_bytes() =>
            {
                let codes = Int8Codes::of_integers(w.values(), w.weight.offsets, IntBits::Eight, signed);
                Arithmetic::Int8Digits(codes)
            }
            (Products::Usual, format) if format.bits() > 4 => Arithmetic::exact(w),
            (Products::Usual | Products::Fast, _) => Arithmetic::fast(w),
        }
    }

    /// Chooses exact arithmetic.
    pub fn exact(w: &Matrix<'_>) -> Arithmetic {
        let (format, lut) = (w.weight.format, w.values());
        let chosen = match format {
            WeightFormat::Lut { bits, .. } if w.is_read_in_place() => match bits {
                IndexBits::One | IndexBits::Two | IndexBits::Three => None,
                IndexBits::Four => Int16Lut::new(lut).map(Arithmetic::Int16),
                IndexBits::Six | IndexBits::Eight => HalfLut::new(lut).map(Arithmetic::F32OfHalves),
            },
            WeightFormat::Mxfp4 { block_cols: MXFP4_BLOCK } => {
                Exponents::new(lut).map(Arithmetic::F32OfExponents)
            }
            WeightFormat::Lut { .. }
            | WeightFormat::Int { .. }
            | WeightFormat::Mxfp4 { .. }
            | WeightFormat::Fp16
            | WeightFormat::F32 => None,
        };
        chosen.unwrap_or_default()
    }

    /// Chooses approximate arithmetic where the format has it; other formats stay exact, in f32.
    ///
    /// ```text
    /// LUT1 to LUT8             8-bit entries
    /// int8, int4               scales for whole rows; int4 scales per block too, on processors that multiply bytes
    /// MXFP4                    on processors that multiply bytes
    /// fp16, f32                bf16, from 512 rows and columns on, on processors with AVX512-BF16
    /// ```
    pub fn fast(w: &Matrix<'_>) -> Arithmetic {
        let starts_at_bytes = w.starts_rows_at_bytes();
        let multiplies_bytes = crate::simd::multiplies_bytes(Isa::best());
        let chosen = match w.weight.format {
            WeightFormat::Lut { bits, .. } if starts_at_bytes => {
                Int8Codes::of_tables(w.values(), bits).map(Arithmetic::Int8)
            }
            WeightFormat::Int { bits: IntBits::Four, block_cols, offsets: false, .. }
                if block_cols == MXFP4_BLOCK
                    && block_cols != w.cols
                    && starts_at_bytes
                    && multiplies_bytes =>
            {
                // The kernel multiplies zeros behind the end of a row by scales of the next one.
                w.values().iter().all(|v| v.is_finite()).then_some(Arithmetic::Int8OfBlocks)
            }
            WeightFormat::Int { bits, signed, block_cols, .. } if starts_at_bytes && block_cols == w.cols => {
                let codes = Int8Codes::of_integers(w.values(), w.weight.offsets, bits, signed);
                Some(Arithmetic::Int8(codes))
            }
            WeightFormat::Fp16 | WeightFormat::F32 => {
                let is_large = w.rows >= MIN_BF16_SIZE && w.cols >= MIN_BF16_SIZE;
                (is_large && crate::simd::has_bf16(Isa::best())).then_some(Arithmetic::Bf16)
            }
            WeightFormat::Mxfp4 { block_cols: MXFP4_BLOCK } => {
                Exponents::new(w.values()).map(|e| Arithmetic::of_exponents(e, Products::Fast))
            }
            WeightFormat::Mxfp4 { .. } => None,
            WeightFormat::Lut { .. } | WeightFormat::Int { .. } => None,
        };
        chosen.unwrap_or_default()
    }
}
