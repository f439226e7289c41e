//! Views of dense and compressed matrices in their storage form.

use crate::activations::Layout;
use crate::arithmetic::Arithmetic;
use crate::lut_tables::{Exponents, sign_bit};
use crate::weight_format::{IndexBits, IntBits, MXFP4_TABLE, Weight, WeightFormat};

/// Reason why a view cannot be made.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct MatrixError(pub &'static str);

impl std::fmt::Display for MatrixError {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.write_str(self.0)
    }
}

impl std::error::Error for MatrixError {}

/// Divides row and column numbers by a multiplication: a division takes as long as the matmul of a short row.
///
/// `n / by = (n * inverse) >> 64` for n below 2^32 (Lemire, Kaser, Kurz: Faster remainder by direct computation, 2019).
#[derive(Clone, Copy, Debug)]
pub(crate) struct Divisor {
    pub(crate) by: usize,
    /// `2^64 / by`, rounded up.
    inverse: u64,
}

impl Divisor {
    /// Makes the divisor `by`, which must not be zero.
    pub fn new(by: usize) -> Divisor {
        Divisor { by, inverse: (u64::MAX / by as u64).wrapping_add(1) }
    }

    /// Returns `n / by` for n below 2^32.
    #[inline(always)]
    pub fn divide(self, n: usize) -> usize {
        if self.by == 1 { n } else { ((u128::from(self.inverse) * n as u128) >> 64) as usize }
    }
}

/// Views a matrix `[rows, cols]`, row-major, in its storage form.
#[derive(Clone, Copy, Debug)]
pub struct Matrix<'a> {
    pub(crate) weight: Weight<&'a [u8], &'a [f32]>,
    /// Row of the storage that is row 0 of the view.
    pub(crate) first_row: usize,
    pub(crate) rows: usize,
    pub(crate) cols: usize,
    pub(crate) arithmetic: &'a Arithmetic,
}

static F32: Arithmetic = Arithmetic::F32;

impl<'a> Matrix<'a> {
    /// Views a weight as a matrix.
    ///
    /// # Errors
    /// The format does not fit the matrix, or an operand has another length.
    pub fn new(
        weight: Weight<&'a [u8], &'a [f32]>,
        rows: usize,
        cols: usize,
    ) -> Result<Matrix<'a>, MatrixError> {
        let fits = |n: usize, expected: u64| n as u64 == expected;
        let (elements, values) = weight
            .format
            .lengths(rows, cols)
            .filter(|_| !weight.format.has_values() || rows.max(cols) <= u32::MAX as usize)
            .ok_or(MatrixError("the format does not fit the rows and columns"))?;
        check(fits(weight.elements.len(), elements), "length of the elements")?;
        check(fits(weight.values.map_or(0, <[f32]>::len), values), "length of the tables or scales")?;
        let offsets = if weight.format.has_offsets() { values } else { 0 };
        check(fits(weight.offsets.map_or(0, <[f32]>::len), offsets), "length of the offsets")?;
        Ok(Matrix { weight, first_row: 0, rows, cols, arithmetic: &F32 })
    }

    /// Views dense f32 data.
    ///
    /// # Errors
    /// The data has another length.
    pub fn f32(data: &'a [f32], rows: usize, cols: usize) -> Result<Self, MatrixError> {
        Matrix::dense(WeightFormat::F32, f32_bytes(data), rows, cols)
    }

    /// Views dense fp16 data, little endian.
    ///
    /// # Errors
    /// The data has another length.
    pub fn f16(data: &'a [u8], rows: usize, cols: usize) -> Result<Self, MatrixError> {
        Matrix::dense(WeightFormat::Fp16, data, rows, cols)
    }

    fn dense(
        format: WeightFormat,
        elements: &'a [u8],
        rows: usize,
        cols: usize,
    ) -> Result<Self, MatrixError> {
        Matrix::new(Weight { format, elements, values: None, offsets: None }, rows, cols)
    }

    /// Returns the tables or scales; empty for dense weights, and where exponents stand for scales.
    pub fn values(&self) -> &'a [f32] {
        self.weight.values.unwrap_or_default()
    }

    /// Tells whether a kernel reads the rows in place: rows start at bytes, and blocks of scales do not end within a lane.
    ///
    /// Other matrices are dequantized first.
    pub(crate) fn is_read_in_place(&self) -> bool {
        match self.weight.format {
            WeightFormat::F32 | WeightFormat::Fp16 => true,
            WeightFormat::Lut { .. } => self.starts_rows_at_bytes(),
            // Eight columns share a lane.
            WeightFormat::Int { bits: IntBits::Four, block_cols, .. } => {
                self.starts_rows_at_bytes() && (block_cols.is_multiple_of(8) || block_cols == self.cols)
            }
            // Sixteen columns share a vector.
            WeightFormat::Int { bits: IntBits::Eight, block_cols, .. } => {
                matches!(block_cols, 16 | 32 | 64)
                    || block_cols.is_multiple_of(128)
                    || block_cols == self.cols
            }
            WeightFormat::Mxfp4 { .. } => self.exponents().is_some(),
        }
    }

    /// Returns the scales as exponents, if that is how they are held.
    fn exponents(&self) -> Option<&'a Exponents> {
        match self.arithmetic {
            Arithmetic::F32OfExponents(exponents) | Arithmetic::Int8OfExponents(exponents) => Some(exponents),
            _ => None,
        }
    }

    /// Returns the layout that this matrix needs its activations in.
    pub fn layout(&self) -> Layout {
        let has_four_bits = self.weight.format.bits() == 4;
        match self.arithmetic {
            Arithmetic::Int16(_) => Layout::Int16,
            Arithmetic::Int8(_) if has_four_bits => Layout::Int8Interleaved,
            Arithmetic::Int8(_) => Layout::Int8,
            Arithmetic::Int8Digits(_) => Layout::Int8Digits,
            Arithmetic::Int8OfBlocks | Arithmetic::Int8OfExponents(_) => Layout::Int8Blocks,
            Arithmetic::Bf16 => Layout::Bf16,
            Arithmetic::F32 | Arithmetic::F32OfHalves(_) | Arithmetic::F32OfExponents(_) => match self
                .weight
                .format
            {
                _ if !self.is_read_in_place() => Layout::F32,
                WeightFormat::Lut { bits, .. } => match bits {
                    IndexBits::One | IndexBits::Two | IndexBits::Three | IndexBits::Four | IndexBits::Six => {
                        Layout::F32Interleaved
                    }
                    IndexBits::Eight => Layout::F32,
                },
                WeightFormat::Int { bits: IntBits::Four, .. } | WeightFormat::Mxfp4 { .. } => {
                    Layout::F32Interleaved
                }
                WeightFormat::Int { bits: IntBits::Eight, .. } | WeightFormat::Fp16 | WeightFormat::F32 => {
                    Layout::F32
                }
            },
        }
    }

    /// Returns the number of rows.
    pub fn rows(&self) -> usize {
        self.rows
    }

    /// Returns the number of columns.
    pub fn cols(&self) -> usize {
        self.cols
    }

    /// Returns a view of rows `start..end`.
    ///
    /// # Panics
    /// The range is outside the view.
    pub fn row_range(&self, start: usize, end: usize) -> Matrix<'a> {
        assert!(start <= end && end <= self.rows);
        Matrix { first_row: self.first_row + start, rows: end - start, ..*self }
    }

    /// Returns the bits per element.
    fn bits(&self) -> usize {
        usize::from(self.weight.format.bits())
    }

    /// Tells whether every row starts at a byte.
    pub(crate) fn starts_rows_at_bytes(&self) -> bool {
        (self.cols * self.bits()).is_multiple_of(8)
    }

    /// Returns the bytes that a matmul reads, tables and scales excluded.
    pub fn bytes_read(&self) -> u64 {
        (self.rows as u64 * self.cols as u64 * self.bits() as u64).div_ceil(8)
    }

    /// Returns the stored bytes of this view's rows, tables and scales excluded; empty where rows do not start at bytes.
    pub(crate) fn stored(&self) -> &'a [u8] {
        if !self.starts_rows_at_bytes() {
            return &[];
        }
        let row = self.cols * self.bits() / 8;
        &self.weight.elements[self.first_row * row..(self.first_row + self.rows) * row]
    }

    /// Dequantizes all elements to `[rows, cols]`, row-major.
    ///
    /// # Panics
    /// `out` has another length.
    pub fn to_dense(&self, out: &mut [f32]) {
        assert_eq!(out.len(), self.rows * self.cols);
        for (r, row) in out.chunks_exact_mut(self.cols.max(1)).enumerate() {
            self.decode_row(r, row);
        }
    }

    /// Dequantizes one row with scalar code, the reference for every kernel.
    pub(crate) fn decode_row(&self, row: usize, out: &mut [f32]) {
        let row = self.first_row + row;
        let start = row * self.cols;
        let (elements, values) = (self.weight.elements, self.values());
        match self.weight.format {
            WeightFormat::F32 => {
                let row = &elements.as_chunks::<4>().0[start..start + self.cols];
                out.iter_mut().zip(row).for_each(|(o, &b)| *o = f32::from_ne_bytes(b));
            }
            WeightFormat::Fp16 => crate::f16::f16_to_f32(&elements[2 * start..2 * (start + self.cols)], out),
            WeightFormat::Lut { bits, rows_per_table } => {
                let bits = bits.bits();
                let table = &values[(row / rows_per_table) << bits..][..1 << bits];
                for (i, o) in out.iter_mut().enumerate() {
                    *o = table[element(elements, bits, start + i)];
                }
            }
            WeightFormat::Int { bits, signed, block_rows, block_cols, .. } => {
                let base = row / block_rows * (self.cols / block_cols);
                let sign_bit = usize::from(sign_bit(bits, signed));
                for (b, block) in out.chunks_exact_mut(block_cols).enumerate() {
                    let (s, z) = (values[base + b], self.weight.offsets.map_or(0.0, |o| o[base + b]));
                    for (i, o) in block.iter_mut().enumerate() {
                        let q = element(elements, bits.bits(), start + b * block_cols + i);
                        let q = ((q ^ sign_bit) as i32 - sign_bit as i32) as f32;
                        *o = s * (q - z);
                    }
                }
            }
            WeightFormat::Mxfp4 { block_cols } => {
                let base = row * (self.cols / block_cols);
                for (b, block) in out.chunks_exact_mut(block_cols).enumerate() {
                    let scale = self.exponents().map_or_else(|| values[base + b], |e| e.scale(base + b));
                    for (i, o) in block.iter_mut().enumerate() {
                        *o = scale * MXFP4_TABLE[element(elements, 4, start + b * block_cols + i)];
                    }
                }
            }
        }
    }
}

/// Returns the bytes of f32 values, in native order.
pub fn f32_bytes(values: &[f32]) -> &[u8] {
    // SAFETY: a view of initialized floats as bytes, of the same size.
    unsafe { std::slice::from_raw_parts(values.as_ptr().cast(), size_of_val(values)) }
}

fn check(ok: bool, what: &'static str) -> Result<(), MatrixError> {
    if ok { Ok(()) } else { Err(MatrixError(what)) }
}

/// Returns element `i` of packed elements of `bits` bits, at most 8.
#[inline]
fn element(data: &[u8], bits: u8, i: usize) -> usize {
    match bits {
        8 => usize::from(data[i]),
        4 => usize::from(data[i / 2] >> (i % 2 * 4) & 15),
        _ => {
            let bits = usize::from(bits);
            let at = i * bits;
            let low = u16::from(data[at / 8]);
            let high = if at % 8 + bits > 8 { u16::from(data[at / 8 + 1]) << 8 } else { 0 };
            usize::from((low | high) >> (at % 8)) & ((1 << bits) - 1)
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    impl<'a> Matrix<'a> {
        /// Views palettized weights: indices of `bits` bits, and tables `[rows / rows_per_table, 2^bits]`.
        pub(crate) fn lut(
            bits: IndexBits,
            elements: &'a [u8],
            lut: &'a [f32],
            rows_per_table: usize,
            rows: usize,
            cols: usize,
        ) -> Result<Self, MatrixError> {
            let format = WeightFormat::Lut { bits, rows_per_table };
            Matrix::new(Weight { format, elements, values: Some(lut), offsets: None }, rows, cols)
        }

        /// Views linearly quantized weights: `scale * (q - offset)`, one scale and offset for each `block.0` x `block.1`
        /// elements, row-major.
        #[allow(clippy::too_many_arguments)]
        pub(crate) fn int(
            bits: IntBits,
            signed: bool,
            elements: &'a [u8],
            scale: &'a [f32],
            offsets: Option<&'a [f32]>,
            (block_rows, block_cols): (usize, usize),
            rows: usize,
            cols: usize,
        ) -> Result<Self, MatrixError> {
            let format =
                WeightFormat::Int { bits, signed, block_rows, block_cols, offsets: offsets.is_some() };
            Matrix::new(Weight { format, elements, values: Some(scale), offsets }, rows, cols)
        }

        /// Views MXFP4 weights: indices into [`MXFP4_TABLE`], and a power of two for each `block_cols` columns of a row.
        pub(crate) fn mxfp4(
            elements: &'a [u8],
            scale: &'a [f32],
            block_cols: usize,
            rows: usize,
            cols: usize,
        ) -> Result<Self, MatrixError> {
            let format = WeightFormat::Mxfp4 { block_cols };
            Matrix::new(Weight { format, elements, values: Some(scale), offsets: None }, rows, cols)
        }

        /// Returns the view with the arithmetic that was chosen for it.
        pub(crate) fn with(self, arithmetic: &'a Arithmetic) -> Self {
            Matrix { arithmetic, ..self }
        }
    }

    #[test]
    fn divisors_divide() {
        for by in [1, 2, 3, 5, 7, 32, 704, 1408, 65_537, u32::MAX as usize] {
            for n in [0, 1, 2, 31, 32, 33, 703, 704, 1407, 1408, 65_536, 65_537, 1 << 31, u32::MAX as usize] {
                assert_eq!(Divisor::new(by).divide(n), n / by, "{n} / {by}");
            }
        }
    }

    #[test]
    fn lengths_that_do_not_fit_are_refused() {
        assert!(Matrix::f32(&[0.0; 5], 2, 3).is_err());
        assert!(Matrix::f16(&[0; 11], 2, 3).is_err());
        assert!(Matrix::lut(IndexBits::Four, &[0; 3], &[0.0; 16], 2, 3, 2).is_err());
        assert!(Matrix::int(IntBits::Eight, true, &[0; 6], &[1.0], None, (2, 2), 2, 3).is_err());
        assert!(Matrix::f32(&[], usize::MAX, 2).is_err());
    }
}
