//! Matrices that own their storage and their lookup tables.

use crate::lut_tables::{HalfLut, Int8Lut, Int16Lut};
use crate::matrix::{Matrix, MatrixError};
use crate::weight_format::{Weight, WeightFormat};

/// Holds a matrix with its storage. Checked once when it is made; every matmul takes a view.
#[derive(Debug)]
pub struct OwnedMatrix<D> {
    weight: Weight<D, Vec<f32>>,
    /// Bytes of the elements.
    bytes: usize,
    rows: usize,
    cols: usize,
    fast: bool,
    int8_lut: Option<Int8Lut>,
    int16_lut: Option<Int16Lut>,
    half_lut: Option<HalfLut>,
}

impl<D: AsRef<[u8]>> OwnedMatrix<D> {
    /// Makes a matrix of a weight. Matmuls are exact, in f32, until [`OwnedMatrix::prepare`].
    ///
    /// # Errors
    /// Fails like [`Matrix::new`].
    pub fn new(weight: Weight<D, Vec<f32>>, rows: usize, cols: usize) -> Result<Self, MatrixError> {
        let bytes = weight.elements.as_ref().len();
        Matrix::new(borrow(&weight), rows, cols)?;
        let (fast, int8_lut, int16_lut, half_lut) = (false, None, None, None);
        Ok(OwnedMatrix { weight, bytes, rows, cols, fast, int8_lut, int16_lut, half_lut })
    }

    /// Prepares approximate (`fast`) or exact matmul: makes the lookup tables that the format needs.
    pub fn prepare(&mut self, fast: bool) {
        let lut = self.weight.values.as_deref().unwrap_or_default();
        let (int8, int16) = match self.weight.format {
            WeightFormat::Lut { bits, .. } if fast => (Int8Lut::new(lut, usize::from(bits)), None),
            WeightFormat::Lut { bits: 4, .. } => (None, Int16Lut::new(lut)),
            _ => (None, None),
        };
        self.half_lut = match self.weight.format {
            WeightFormat::Lut { bits: 6 | 8, .. } if !fast => HalfLut::new(lut),
            _ => None,
        };
        let plain = Matrix { fast: false, int8_lut: None, int16_lut: None, ..self.view() };
        let view = if fast { plain.with_fast(int8.as_ref()) } else { plain.with_int16_lut(int16.as_ref()) };
        let (is_fast, takes_int8, takes_int16) =
            (view.fast, view.int8_lut.is_some(), view.int16_lut.is_some());
        self.fast = is_fast;
        self.int8_lut = int8.filter(|_| takes_int8);
        self.int16_lut = int16.filter(|_| takes_int16);
    }

    /// Returns the storage format.
    pub fn format(&self) -> WeightFormat {
        self.weight.format
    }

    /// Tells whether [`OwnedMatrix::prepare`] chose approximate matmul.
    pub fn is_fast(&self) -> bool {
        self.fast
    }

    /// Returns the packed elements.
    pub fn elements(&self) -> &D {
        &self.weight.elements
    }

    /// Returns a view of the matrix.
    pub fn view(&self) -> Matrix<'_> {
        let weight = borrow(&self.weight);
        // The other lengths cannot change: nothing else has access to their vectors.
        assert_eq!(weight.elements.len(), self.bytes, "the bytes of a weight have changed");
        Matrix {
            weight,
            first: 0,
            rows: self.rows,
            cols: self.cols,
            fast: self.fast,
            int8_lut: self.int8_lut.as_ref(),
            int16_lut: self.int16_lut.as_ref(),
            half_lut: self.half_lut.as_ref(),
        }
    }
}

fn borrow<D: AsRef<[u8]>>(weight: &Weight<D, Vec<f32>>) -> Weight<&[u8], &[f32]> {
    Weight {
        format: weight.format,
        elements: weight.elements.as_ref(),
        values: weight.values.as_deref(),
        offsets: weight.offsets.as_deref(),
    }
}
