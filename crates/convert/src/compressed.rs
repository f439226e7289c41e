//! Matrices that were compressed for a text before their packages are built: a file each, in the folder of the
//! unfinished build.

use crate::plan::MatrixPlan;
use crate::quantize::{CompressedMatrix, Metrics, TablesAndScales};
use crate::{Error, Result};
use anemoe_io::write_atomic;
use half::f16;
use serde::{Deserialize, Serialize};
use std::io::Write;
use std::path::{Path, PathBuf};

/// Prefix of the files' names.
pub const PREFIX: &str = "calibrated.";

/// Folder of matrices that were compressed for a text.
#[derive(Clone, Debug)]
pub struct CompressedMatrices {
    folder: PathBuf,
}

/// First line of a file; packed elements, values and offsets follow.
#[derive(Serialize, Deserialize)]
struct CompressedHeader {
    packed: usize,
    values: usize,
    offsets: usize,
    metrics: Metrics,
}

impl CompressedMatrices {
    /// Opens a folder that exists.
    pub fn new(folder: &Path) -> CompressedMatrices {
        CompressedMatrices { folder: folder.to_path_buf() }
    }

    /// Returns the path of a matrix's file, whose name says all that decides its contents.
    fn path(&self, m: &MatrixPlan) -> PathBuf {
        let key = format!("{} {} {} {} {} {}", m.part, m.tensor, m.offset, m.rows, m.cols, m.quant);
        self.folder.join(format!("{PREFIX}{}", anemoe_bundle::sha256(key.as_bytes())))
    }

    /// Tells whether a matrix was compressed.
    pub fn has(&self, m: &MatrixPlan) -> bool {
        self.path(m).is_file()
    }

    /// Writes a compressed matrix.
    ///
    /// # Errors
    /// The file cannot be written.
    pub fn write(&self, m: &MatrixPlan, c: &CompressedMatrix) -> Result<()> {
        let CompressedMatrix { packed, side } = c;
        let (values, offsets) = (side.values.len(), side.offsets.len());
        let header = CompressedHeader { packed: packed.len(), values, offsets, metrics: side.metrics };
        let mut bytes = serde_json::to_vec(&header).unwrap_or_default();
        bytes.push(b'\n');
        bytes.extend_from_slice(packed);
        bytes.extend(side.values.iter().flat_map(|v| v.to_le_bytes()));
        bytes.extend(side.offsets.iter().map(|&o| o as u8));
        let path = self.path(m);
        write_atomic(&path, |file| file.write_all(&bytes)).map_err(|e| Error::io(&path, e))
    }

    /// Reads a matrix; none where it was not compressed before.
    ///
    /// # Errors
    /// The file cannot be read, or is not as it was written.
    pub fn read(&self, m: &MatrixPlan) -> Result<Option<CompressedMatrix>> {
        let path = self.path(m);
        let bytes = match std::fs::read(&path) {
            Ok(bytes) => bytes,
            Err(e) if e.kind() == std::io::ErrorKind::NotFound => return Ok(None),
            Err(e) => return Err(Error::io(&path, e)),
        };
        let wrong = || Error::invalid(&path, format!("matrix `{}`: not as it was compressed", m.name));
        let end = bytes.iter().position(|b| *b == b'\n').ok_or_else(wrong)?;
        let header: CompressedHeader = serde_json::from_slice(&bytes[..end]).map_err(|_| wrong())?;
        let body = &bytes[end + 1..];
        let (values, offsets) = (header.packed, header.packed.saturating_add(2 * header.values));
        if body.len() != offsets.saturating_add(header.offsets) || offsets < values {
            return Err(wrong());
        }
        let halves = body[values..offsets].chunks_exact(2).map(|b| f16::from_le_bytes([b[0], b[1]]));
        let side = TablesAndScales {
            values: halves.collect(),
            offsets: body[offsets..].iter().map(|&b| b as i8).collect(),
            metrics: header.metrics,
        };
        Ok(Some(CompressedMatrix { packed: body[..values].to_vec(), side }))
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::quant::MatrixQuant;

    #[test]
    fn a_matrix_is_read_as_it_was_written() {
        let dir = tempfile::tempdir().unwrap();
        let store = CompressedMatrices::new(dir.path());
        let m = MatrixPlan {
            name: "q".into(),
            part: "attention".into(),
            tensor: "layers.0.q".into(),
            offset: 3,
            rows: 2,
            cols: 4,
            taps: 1,
            bank: false,
            quant: MatrixQuant::FP16,
        };
        assert!(!store.has(&m) && store.read(&m).unwrap().is_none());
        let mut metrics = Metrics::default();
        metrics.add(&[1.0, 2.0], &[1.0, 2.5], Some(&[1.0, 0.3]));
        let side = TablesAndScales { values: vec![f16::ONE, f16::MAX], offsets: vec![-3], metrics };
        let c = CompressedMatrix { packed: vec![1, 10, 255], side };
        store.write(&m, &c).unwrap();
        assert_eq!(store.read(&m).unwrap(), Some(c));
        assert!(!store.has(&MatrixPlan { offset: 4, ..m.clone() }));
        let path = store.path(&m);
        let whole = std::fs::read(&path).unwrap();
        for bytes in [&whole[..whole.len() - 1], b"{}\nabc", b"no line"] {
            std::fs::write(&path, bytes).unwrap();
            let err = store.read(&m).unwrap_err().to_string();
            assert!(err.contains("matrix `q`"), "{err}");
        }
    }
}
