//! Views of dense and compressed matrices, as they are stored.

use crate::lut_tables::{Int8Lut, Int16Lut};

/// Columns of a block, which kernels decode and activations are packed by: 16 lanes of 8 indices of 4 bits.
pub(crate) const BLOCK: usize = 128;

/// Says why a view cannot be made.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct MatrixError(pub &'static str);

impl std::fmt::Display for MatrixError {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.write_str(self.0)
    }
}

impl std::error::Error for MatrixError {}

/// Divides row and column numbers by multiplying: a division takes as long as the matmul of a short row.
///
/// `n / by = (n * inverse) >> 64` for n below 2^32 (Lemire, Kaser, Kurz: Faster remainder by direct computation, 2019).
#[derive(Clone, Copy, Debug)]
pub(crate) struct Divisor {
    by: usize,
    /// `2^64 / by`, rounded up.
    inverse: u64,
}

impl Divisor {
    /// Divides by a number that is not zero.
    pub fn new(by: usize) -> Divisor {
        Divisor { by, inverse: (u64::MAX / by as u64).wrapping_add(1) }
    }

    /// Returns `n / by` for n below 2^32.
    #[inline(always)]
    pub fn divide(self, n: usize) -> usize {
        if self.by == 1 { n } else { ((u128::from(self.inverse) * n as u128) >> 64) as usize }
    }

    /// Returns the divisor.
    #[inline(always)]
    pub fn by(self) -> usize {
        self.by
    }
}

/// Views a matrix `[rows, cols]`, row-major, as it is stored.
#[derive(Clone, Copy, Debug)]
pub struct Matrix<'a> {
    pub(crate) data: Storage<'a>,
    /// Row of the storage that is row 0 here.
    pub(crate) first: usize,
    pub(crate) rows: usize,
    pub(crate) cols: usize,
    /// Matmul may be approximate.
    pub(crate) fast: bool,
    /// Tables for approximate matmul.
    pub(crate) int8_lut: Option<&'a Int8Lut>,
    /// Tables for exact matmul of integers.
    pub(crate) int16_lut: Option<&'a Int16Lut>,
}

#[derive(Clone, Copy, Debug)]
pub(crate) enum Storage<'a> {
    F32(&'a [f32]),
    /// Little endian.
    F16(&'a [u8]),
    /// Element i has bits `[i * bits, (i + 1) * bits)` of `indices`, least significant first.
    Lut {
        bits: usize,
        indices: &'a [u8],
        lut: &'a [f32],
        rows_per_group: usize,
    },
    /// `scale * (q - offset)` with one of each per block; 4-bit elements packed like indices.
    Int {
        bits: usize,
        signed: bool,
        data: &'a [u8],
        scale: &'a [f32],
        offset: Option<&'a [f32]>,
        block: (usize, usize),
    },
}

impl<'a> Matrix<'a> {
    fn new(data: Storage<'a>, rows: usize, cols: usize) -> Self {
        Matrix { data, first: 0, rows, cols, fast: false, int8_lut: None, int16_lut: None }
    }

    /// Views dense f32.
    ///
    /// # Errors
    /// The data has another length.
    pub fn f32(data: &'a [f32], rows: usize, cols: usize) -> Result<Self, MatrixError> {
        check(rows.checked_mul(cols) == Some(data.len()), "f32 matrix: length of the data")?;
        Ok(Matrix::new(Storage::F32(data), rows, cols))
    }

    /// Views dense fp16, little endian.
    ///
    /// # Errors
    /// The data has another length.
    pub fn f16(data: &'a [u8], rows: usize, cols: usize) -> Result<Self, MatrixError> {
        let bytes = rows.checked_mul(cols).and_then(|n| n.checked_mul(2));
        check(bytes == Some(data.len()), "fp16 matrix: length of the data")?;
        Ok(Matrix::new(Storage::F16(data), rows, cols))
    }

    /// Views palettized weights: `indices` packed least significant bit first over the whole matrix, `lut` `[rows / rows_per_group, 2^bits]`.
    ///
    /// # Errors
    /// The bits are none of 1, 2, 3, 4, 6, 8, or a length does not fit.
    pub fn lut(
        bits: usize,
        indices: &'a [u8],
        lut: &'a [f32],
        rows_per_group: usize,
        rows: usize,
        cols: usize,
    ) -> Result<Self, MatrixError> {
        check([1, 2, 3, 4, 6, 8].contains(&bits), "lut matrix: bits")?;
        let bytes = rows.checked_mul(cols).and_then(|n| n.checked_mul(bits)).map(|b| b.div_ceil(8));
        check(bytes == Some(indices.len()), "lut matrix: length of the indices")?;
        check(rows.max(cols) <= u32::MAX as usize, "lut matrix: rows or columns")?;
        check(rows_per_group > 0 && rows.is_multiple_of(rows_per_group), "lut matrix: rows per group")?;
        check(lut.len() == (rows / rows_per_group) << bits, "lut matrix: length of the tables")?;
        Ok(Matrix::new(Storage::Lut { bits, indices, lut, rows_per_group }, rows, cols))
    }

    /// Views linearly quantized weights: `scale * (q - offset)`, one of each for every `block.0` x `block.1` elements, row-major.
    ///
    /// # Errors
    /// The bits are neither 4 nor 8, or a length does not fit.
    #[allow(clippy::too_many_arguments)]
    pub fn int(
        bits: usize,
        signed: bool,
        data: &'a [u8],
        scale: &'a [f32],
        offset: Option<&'a [f32]>,
        block: (usize, usize),
        rows: usize,
        cols: usize,
    ) -> Result<Self, MatrixError> {
        check(bits == 4 || bits == 8, "int matrix: bits")?;
        let bytes = rows.checked_mul(cols).and_then(|n| n.checked_mul(bits)).map(|b| b.div_ceil(8));
        check(bytes == Some(data.len()), "int matrix: length of the data")?;
        check(rows.max(cols) <= u32::MAX as usize, "int matrix: rows or columns")?;
        let fits = block.0 > 0 && block.1 > 0 && rows.is_multiple_of(block.0) && cols.is_multiple_of(block.1);
        check(fits, "int matrix: blocks")?;
        let blocks = rows / block.0 * (cols / block.1);
        check(
            scale.len() == blocks && offset.is_none_or(|o| o.len() == blocks),
            "int matrix: length of the scales",
        )?;
        Ok(Matrix::new(Storage::Int { bits, signed, data, scale, offset, block }, rows, cols))
    }

    /// Checks that a kernel reads the rows in place: they start at bytes, and blocks of scales do not end inside a lane.
    ///
    /// Other matrices are dequantized first.
    pub(crate) fn has_native_kernel(&self) -> bool {
        let is_whole = |bits: usize| (self.cols * bits).is_multiple_of(8);
        match self.data {
            Storage::F32(_) | Storage::F16(_) => true,
            Storage::Lut { bits, .. } => is_whole(bits),
            // Eight columns share a lane.
            Storage::Int { bits: 4, block, .. } => {
                is_whole(4) && (block.1.is_multiple_of(8) || block.1 == self.cols)
            }
            Storage::Int { .. } => true,
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
        Matrix { first: self.first + start, rows: end - start, ..*self }
    }

    /// Returns the bytes that a matmul reads, without tables and scales.
    pub fn bytes_read(&self) -> u64 {
        let bits = match self.data {
            Storage::F32(_) => 32,
            Storage::F16(_) => 16,
            Storage::Lut { bits, .. } | Storage::Int { bits, .. } => bits,
        };
        (self.rows as u64 * self.cols as u64 * bits as u64).div_ceil(8)
    }

    /// Returns the stored bytes of this view's rows, without tables and scales; none where rows do not start at bytes.
    pub(crate) fn stored(&self) -> &'a [u8] {
        let (data, bits) = match self.data {
            Storage::F32(data) => (as_bytes(data), 32),
            Storage::F16(data) => (data, 16),
            Storage::Lut { bits, indices, .. } => (indices, bits),
            Storage::Int { bits, data, .. } => (data, bits),
        };
        if !(self.cols * bits).is_multiple_of(8) {
            return &[];
        }
        let row = self.cols * bits / 8;
        &data[self.first * row..(self.first + self.rows) * row]
    }

    /// Dequantizes all elements, row-major.
    ///
    /// # Panics
    /// `out` has another length.
    pub fn to_dense(&self, out: &mut [f32]) {
        assert_eq!(out.len(), self.rows * self.cols);
        for (r, row) in out.chunks_exact_mut(self.cols.max(1)).enumerate() {
            self.decode_row(r, row);
        }
    }

    /// Dequantizes one row with scalar code, the reference of every kernel.
    pub(crate) fn decode_row(&self, row: usize, out: &mut [f32]) {
        let row = self.first + row;
        let start = row * self.cols;
        match self.data {
            Storage::F32(data) => out.copy_from_slice(&data[start..start + self.cols]),
            Storage::F16(data) => crate::f16::f16_to_f32(&data[2 * start..2 * (start + self.cols)], out),
            Storage::Lut { bits, indices, lut, rows_per_group } => {
                let table = &lut[(row / rows_per_group) << bits..][..1 << bits];
                for (i, o) in out.iter_mut().enumerate() {
                    *o = table[element(indices, bits, start + i)];
                }
            }
            Storage::Int { bits, signed, data, scale, offset, block } => {
                let base = row / block.0 * (self.cols / block.1);
                for (b, piece) in out.chunks_exact_mut(block.1).enumerate() {
                    let (s, z) = (scale[base + b], offset.map_or(0.0, |o| o[base + b]));
                    for (i, o) in piece.iter_mut().enumerate() {
                        let q = element(data, bits, start + b * block.1 + i);
                        let q = match (signed, bits) {
                            (false, _) => q as f32,
                            (true, 8) => f32::from(q as u8 as i8),
                            (true, _) => (if q >= 8 { q as i32 - 16 } else { q as i32 }) as f32,
                        };
                        *o = s * (q - z);
                    }
                }
            }
        }
    }
}

/// Returns the bytes of f32 values.
pub(crate) fn as_bytes(values: &[f32]) -> &[u8] {
    // SAFETY: the bytes of initialized floats, as many as there are.
    unsafe { std::slice::from_raw_parts(values.as_ptr().cast(), size_of_val(values)) }
}

fn check(ok: bool, what: &'static str) -> Result<(), MatrixError> {
    if ok { Ok(()) } else { Err(MatrixError(what)) }
}

/// Returns element `i` of a stream of elements of `bits` bits.
#[inline]
fn element(data: &[u8], bits: usize, i: usize) -> usize {
    match bits {
        8 => usize::from(data[i]),
        4 => usize::from(data[i / 2] >> (i % 2 * 4) & 15),
        _ => {
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
        assert!(Matrix::lut(5, &[0; 4], &[0.0; 32], 1, 1, 6).is_err());
        assert!(Matrix::lut(4, &[0; 3], &[0.0; 16], 2, 3, 2).is_err());
        assert!(Matrix::int(8, true, &[0; 6], &[1.0], None, (2, 2), 2, 3).is_err());
        assert!(Matrix::f32(&[], usize::MAX, 2).is_err());
    }
}
