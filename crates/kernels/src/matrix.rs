//! Views of dense and compressed matrices.

use crate::fast::Codes;
use crate::words::Words;

/// Why a view cannot be made.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct MatrixError(pub &'static str);

impl std::fmt::Display for MatrixError {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.write_str(self.0)
    }
}

impl std::error::Error for MatrixError {}

/// What row and column numbers are divided by: a division takes as long as the product of a short row.
#[derive(Clone, Copy, Debug)]
pub(crate) struct Divisor {
    by: usize,
    /// `2^64 / by`, rounded up.
    inverse: u64,
}

impl Divisor {
    /// By a number that is not zero.
    pub fn new(by: usize) -> Divisor {
        Divisor { by, inverse: (u64::MAX / by as u64).wrapping_add(1) }
    }

    /// `n / by` of `n` below 2^32 (Lemire, Kaser, Kurz: Faster remainder by direct computation, 2019).
    #[inline(always)]
    pub fn divide(self, n: usize) -> usize {
        if self.by == 1 { n } else { ((u128::from(self.inverse) * n as u128) >> 64) as usize }
    }

    /// The number itself.
    #[inline(always)]
    pub fn by(self) -> usize {
        self.by
    }
}

/// A matrix `[rows, cols]`, row-major, as it is stored.
#[derive(Clone, Copy, Debug)]
pub struct Matrix<'a> {
    pub(crate) data: Storage<'a>,
    /// Row of the storage that is row 0 here.
    pub(crate) first: usize,
    pub(crate) rows: usize,
    pub(crate) cols: usize,
    /// Products are of integers.
    pub(crate) fast: bool,
    pub(crate) codes: Option<&'a Codes>,
    /// What exact products look up.
    pub(crate) words: Option<&'a Words>,
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
        Matrix { data, first: 0, rows, cols, fast: false, codes: None, words: None }
    }

    /// Dense f32.
    ///
    /// # Errors
    /// The data has another length.
    pub fn f32(data: &'a [f32], rows: usize, cols: usize) -> Result<Self, MatrixError> {
        check(rows.checked_mul(cols) == Some(data.len()), "f32 matrix: length of the data")?;
        Ok(Matrix::new(Storage::F32(data), rows, cols))
    }

    /// Dense fp16, little endian.
    ///
    /// # Errors
    /// The data has another length.
    pub fn f16(data: &'a [u8], rows: usize, cols: usize) -> Result<Self, MatrixError> {
        let bytes = rows.checked_mul(cols).and_then(|n| n.checked_mul(2));
        check(bytes == Some(data.len()), "fp16 matrix: length of the data")?;
        Ok(Matrix::new(Storage::F16(data), rows, cols))
    }

    /// Palettized: `indices` packed least significant bit first over the whole matrix, `lut` `[rows / rows_per_group, 2^bits]`.
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

    /// Linearly quantized: `scale * (q - offset)`, one of each for every `block.0` x `block.1` elements, row-major.
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

    /// With products of integers, where the kind has them: tables, whose `codes` these are, and integers whose scales are for
    /// whole rows or for blocks of a multiple of 4 columns (8 for integers of 4 bits); rows start at bytes. Large ones of fp16
    /// and f32 are multiplied in bf16 where the processor does that. Others stay exact.
    pub fn fast(mut self, codes: Option<&'a Codes>) -> Self {
        let whole = |bits: usize| (self.cols * bits).is_multiple_of(8);
        (self.fast, self.codes) = match self.data {
            Storage::Lut { bits, lut, .. } => {
                let codes = codes.filter(|c| whole(bits) && c.fit(lut, bits));
                (codes.is_some(), codes)
            }
            Storage::Int { bits, block, .. } => {
                let lane = if bits == 4 { 8 } else { 4 };
                (whole(bits) && (block.1 == self.cols || block.1.is_multiple_of(lane)), None)
            }
            Storage::F16(_) | Storage::F32(_) => (crate::fast::bf16::is_worth_it(self.rows, self.cols), None),
        };
        self
    }

    /// With exact products of integers, where the kind has them: tables of sixteen entries, whose `words` these are; rows start
    /// at bytes. They take two thirds of the instructions of f32; for their error see [`Words`].
    pub fn whole(mut self, words: Option<&'a Words>) -> Self {
        self.words = match self.data {
            Storage::Lut { bits: 4, lut, .. } if self.is_direct() => words.filter(|w| w.fit(lut)),
            _ => None,
        };
        self
    }

    /// Rows.
    pub fn rows(&self) -> usize {
        self.rows
    }

    /// Columns.
    pub fn cols(&self) -> usize {
        self.cols
    }

    /// Rows `start..end` of this view.
    ///
    /// # Panics
    /// The range is outside the view.
    pub fn row_range(&self, start: usize, end: usize) -> Matrix<'a> {
        assert!(start <= end && end <= self.rows);
        Matrix { first: self.first + start, rows: end - start, ..*self }
    }

    /// Bytes that a product with the whole view reads, tables and scales left out.
    pub fn bytes_read(&self) -> u64 {
        let bits = match self.data {
            Storage::F32(_) => 32,
            Storage::F16(_) => 16,
            Storage::Lut { bits, .. } | Storage::Int { bits, .. } => bits,
        };
        (self.rows as u64 * self.cols as u64 * bits as u64).div_ceil(8)
    }

    /// The bytes of this view's rows as they are stored, tables and scales left out; none where rows do not start at bytes.
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

    /// All elements, row-major.
    ///
    /// # Panics
    /// `out` has another length.
    pub fn to_dense(&self, out: &mut [f32]) {
        assert_eq!(out.len(), self.rows * self.cols);
        for (r, row) in out.chunks_exact_mut(self.cols.max(1)).enumerate() {
            self.decode_row(r, row);
        }
    }

    /// The scalar oracle: elements of one row.
    pub(crate) fn decode_row(&self, row: usize, out: &mut [f32]) {
        let row = self.first + row;
        let start = row * self.cols;
        match self.data {
            Storage::F32(data) => out.copy_from_slice(&data[start..start + self.cols]),
            Storage::F16(data) => crate::f16_to_f32(&data[2 * start..2 * (start + self.cols)], out),
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

/// Bytes of f32 values.
pub(crate) fn as_bytes(values: &[f32]) -> &[u8] {
    // SAFETY: the bytes of initialized floats, as many as there are.
    unsafe { std::slice::from_raw_parts(values.as_ptr().cast(), size_of_val(values)) }
}

fn check(ok: bool, what: &'static str) -> Result<(), MatrixError> {
    if ok { Ok(()) } else { Err(MatrixError(what)) }
}

/// Element `i` of a stream of elements of `bits` bits.
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
