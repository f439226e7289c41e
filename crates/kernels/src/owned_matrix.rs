//! Matrices that own their storage and their lookup tables.

use crate::arithmetic::Arithmetic;
use crate::arithmetic_choice::Products;
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
    products: Products,
    arithmetic: Arithmetic,
}

impl<D: AsRef<[u8]>> OwnedMatrix<D> {
    /// Makes a matrix of a weight. Matmuls are exact, in f32, until [`OwnedMatrix::prepare`].
    ///
    /// # Errors
    /// Fails like [`Matrix::new`].
    pub fn new(weight: Weight<D, Vec<f32>>, rows: usize, cols: usize) -> Result<Self, MatrixError> {
        let bytes = weight.elements.as_ref().len();
        Matrix::new(borrow(&weight), rows, cols)?;
        let (products, arithmetic) = (Products::Exact, Arithmetic::F32);
        Ok(OwnedMatrix { weight, bytes, rows, cols, products, arithmetic })
    }

    /// Prepares matmuls: makes the lookup tables that the format needs.
    pub fn prepare(&mut self, products: Products) {
        self.products = products;
        // Exponents replace the scales that they are made of.
        self.arithmetic = match std::mem::take(&mut self.arithmetic) {
            Arithmetic::F32OfExponents(exponents) | Arithmetic::Int8OfExponents(exponents) => {
                Arithmetic::of_exponents(exponents, products)
            }
            _ => Arithmetic::choose(&self.view(), products),
        };
        if matches!(self.arithmetic, Arithmetic::F32OfExponents(_) | Arithmetic::Int8OfExponents(_)) {
            self.weight.values = None;
        }
    }

    /// Returns the storage format.
    pub fn format(&self) -> WeightFormat {
        self.weight.format
    }

    /// Returns what the matrix was prepared for.
    pub fn products(&self) -> Products {
        self.products
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
        let (rows, cols) = (self.rows, self.cols);
        Matrix { weight, first_row: 0, rows, cols, arithmetic: &self.arithmetic }
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
