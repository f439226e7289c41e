//! Rows of the embedding, read from the bundle's file on demand.

use crate::{Error, Result};
use anemoe_bundle::{Embedding, WeightFormat};
use anemoe_kernels::{Matrix, Weight};
use half::f16;
use std::fs::File;
use std::io::{Read, Seek, SeekFrom};
use std::path::{Path, PathBuf};

/// The open embedding file of a bundle.
pub struct EmbeddingFile {
    path: PathBuf,
    file: File,
    info: Embedding,
    /// Bytes of the elements; `values`: bytes of the fp16 values behind them.
    elements: u64,
    values: u64,
    buffer: Vec<u8>,
    /// A table or scales; `zeros`: zero points.
    table: Vec<f32>,
    zeros: Vec<f32>,
    /// The row, with the elements before it in its first byte.
    decoded: Vec<f32>,
}

impl EmbeddingFile {
    /// Opens the file and checks its length against `info`.
    pub fn open(bundle: &Path, info: &Embedding) -> Result<EmbeddingFile> {
        let path = bundle.join(&info.file);
        let file = anemoe_io::open_input(&path, u64::MAX).map_err(|e| Error::io(&path, e))?;
        let sizes = info.storage.stored_sizes(info.rows, info.cols);
        let (elements, values, offsets) = sizes.ok_or_else(|| {
            Error::invalid(&path, format!("embedding: {} does not fit its rows and columns", info.storage))
        })?;
        let expected = elements + values + offsets;
        let found = file.metadata().map_err(|e| Error::io(&path, e))?.len();
        if found != expected {
            return Err(Error::invalid(
                &path,
                format!(
                    "embedding: {found} bytes where [{}, {}] in {} takes {expected}",
                    info.rows, info.cols, info.storage
                ),
            ));
        }
        Ok(EmbeddingFile {
            path,
            file,
            info: info.clone(),
            elements,
            values,
            buffer: Vec::new(),
            table: Vec::new(),
            zeros: Vec::new(),
            decoded: Vec::new(),
        })
    }

    /// Reads `len` bytes from `at` into the buffer.
    fn read(&mut self, at: u64, len: usize) -> Result<()> {
        self.buffer.resize(len, 0);
        self.file
            .seek(SeekFrom::Start(at))
            .and_then(|_| self.file.read_exact(&mut self.buffer))
            .map_err(|e| Error::io(&self.path, e))
    }

    /// Reads `n` fp16 values, from value `first` on, into the table.
    fn read_table(&mut self, first: u64, n: usize) -> Result<()> {
        self.read(self.elements + 2 * first, 2 * n)?;
        self.table.clear();
        self.table.extend(self.buffer.chunks_exact(2).map(|b| f16::from_le_bytes([b[0], b[1]]).to_f32()));
        Ok(())
    }

    /// Reads rows from `first` on into `out`, `[rows, cols]`, as [`EmbeddingFile::row`] does.
    pub fn rows(&mut self, first: usize, out: &mut [f32]) -> Result<()> {
        let cols = self.info.cols;
        if self.info.storage == WeightFormat::Fp16 && self.info.scale == 1.0 {
            self.read(2 * (first * cols) as u64, 2 * out.len())?;
            let matrix = Matrix::f16(&self.buffer, out.len() / cols, cols);
            let matrix = matrix.map_err(|e| Error::invalid(&self.path, format!("embedding: {e}")))?;
            matrix.to_dense(out);
            return Ok(());
        }
        out.chunks_exact_mut(cols).enumerate().try_for_each(|(i, out)| self.row(first + i, out))
    }

    /// Reads row `row`, scaled and rounded to fp16, into `out`, one element per column.
    pub fn row(&mut self, row: usize, out: &mut [f32]) -> Result<()> {
        let (cols, scale, storage) = (self.info.cols, self.info.scale, self.info.storage);
        let bits = storage.bits();
        // Columns that share a scale.
        let mut block = cols;
        match storage {
            WeightFormat::Lut { rows_per_table, .. } => {
                self.read_table(((row / rows_per_table) as u64) << bits, 1 << bits)?;
            }
            WeightFormat::Int { block_rows, block_cols, offsets, .. } => {
                let blocks = cols / block_cols;
                let first = (row / block_rows * blocks) as u64;
                self.read_table(first, blocks)?;
                self.zeros.clear();
                if offsets {
                    self.read(self.elements + self.values + first, blocks)?;
                    self.zeros.extend(self.buffer.iter().map(|&b| f32::from(b as i8)));
                }
                self.zeros.resize(blocks, 0.0);
                block = block_cols;
            }
            WeightFormat::Mxfp4 { block_cols } => {
                let blocks = cols / block_cols;
                self.read_table((row * blocks) as u64, blocks)?;
                self.zeros.clear();
                self.zeros.resize(blocks, 0.0);
                block = block_cols;
            }
            WeightFormat::Fp16 | WeightFormat::F32 => {}
        }
        // Every eighth element starts at a byte, for any number of bits.
        let first = row as u64 * cols as u64;
        let lead = (first % 8) as usize;
        let n = lead + cols;
        self.read(first / 8 * u64::from(bits), (n * usize::from(bits)).div_ceil(8))?;
        self.decoded.resize(n, 0.0);
        let packed = self.buffer.as_slice();
        // One row, whose table or scale comes first.
        let (format, values): (_, Option<&[f32]>) = match storage {
            WeightFormat::Lut { bits, .. } => {
                (WeightFormat::Lut { bits, rows_per_table: 1 }, Some(&self.table))
            }
            WeightFormat::Int { bits, .. } => {
                let (signed, offsets) = (true, false);
                (WeightFormat::Int { bits, signed, block_rows: 1, block_cols: n, offsets }, Some(&[1.0]))
            }
            WeightFormat::Mxfp4 { .. } => (WeightFormat::Mxfp4 { block_cols: n }, Some(&[1.0])),
            WeightFormat::Fp16 | WeightFormat::F32 => (WeightFormat::Fp16, None),
        };
        Matrix::new(Weight { format, elements: packed, values, offsets: None }, 1, n)
            .map_err(|e| Error::invalid(&self.path, format!("embedding: {e}")))?
            .to_dense(&mut self.decoded);
        out.copy_from_slice(&self.decoded[lead..]);
        if matches!(storage, WeightFormat::Int { .. } | WeightFormat::Mxfp4 { .. }) {
            for ((block, s), z) in out.chunks_exact_mut(block).zip(&self.table).zip(&self.zeros) {
                // The weight is rounded to fp16 first, as in a program.
                block.iter_mut().for_each(|q| *q = f16::from_f32(s * (*q - z)).to_f32());
            }
        }
        out.iter_mut().for_each(|v| *v = f16::from_f32(*v * scale).to_f32());
        Ok(())
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use anemoe_kernels::{IndexBits, IntBits};

    fn open(storage: WeightFormat, cols: usize, bytes: &[u8]) -> Result<(tempfile::TempDir, EmbeddingFile)> {
        let dir = tempfile::tempdir().unwrap();
        std::fs::write(dir.path().join("embed.bin"), bytes).unwrap();
        let (file, sha256) = ("embed.bin".into(), String::new());
        let info = Embedding { file, rows: 2, cols, scale: 2.0, storage, sha256 };
        EmbeddingFile::open(dir.path(), &info).map(|f| (dir, f))
    }

    fn half(values: &[f32]) -> Vec<u8> {
        values.iter().flat_map(|&v| f16::from_f32(v).to_le_bytes()).collect()
    }

    #[test]
    fn rows_that_start_inside_a_byte() {
        let mut bytes = vec![0b10_01_11_00, 0b00_01];
        bytes.extend(half(&[0.5, 1.0, 1.5, 2.0]));
        let (_dir, mut f) =
            open(WeightFormat::Lut { bits: IndexBits::Two, rows_per_table: 2 }, 3, &bytes).unwrap();
        let mut row = [0f32; 3];
        f.row(0, &mut row).unwrap();
        assert_eq!(row, [1.0, 4.0, 2.0]);
        f.row(1, &mut row).unwrap();
        assert_eq!(row, [3.0, 2.0, 1.0]);
    }

    #[test]
    fn integers_with_offsets() {
        // Rows 1 -1 | 2 -8 in blocks of one row and two columns.
        let mut bytes = vec![0xf1, 0x82];
        bytes.extend(half(&[0.5, 0.25]));
        bytes.extend([1u8, (-2i8) as u8]);
        let storage = WeightFormat::Int {
            bits: IntBits::Four,
            signed: true,
            block_rows: 1,
            block_cols: 2,
            offsets: true,
        };
        let (_dir, mut f) = open(storage, 2, &bytes).unwrap();
        let mut row = [0f32; 2];
        f.row(0, &mut row).unwrap();
        assert_eq!(row, [0.0, -2.0]);
        f.row(1, &mut row).unwrap();
        assert_eq!(row, [2.0, -3.0]);
        let err = open(storage, 2, &bytes[1..]).err().unwrap().to_string();
        assert!(err.contains("7 bytes where [2, 2]") && err.contains("takes 8"), "{err}");
    }
}
