//! Importance of each input of each matrix: second moments of its values over a text, from a file.

use crate::plan::{MatrixPlan, Plan};
use crate::quant::MatrixQuant;
use crate::{Error, Result};
use anemoe_npz::Array;
use std::collections::{BTreeMap, BTreeSet};
use std::path::{Path, PathBuf};

/// Second moments of the inputs of matrices, by checkpoint tensor.
///
/// The file is an `.npz` with one array per tensor, named as in the checkpoint without its prefix (for instance
/// `layers.0.self_attn.q_proj.weight`): `[input channels]`, or `[experts, input channels]` where a tensor holds the
/// matrices of many experts. Tensors without an array count every input the same; `build` wants one for every projection.
#[derive(Clone, Debug, PartialEq)]
pub struct Importance {
    path: PathBuf,
    moments: BTreeMap<String, (Vec<usize>, Vec<f32>)>,
    sha256: String,
}

impl Importance {
    /// Reads a file of importances and checks it.
    ///
    /// # Errors
    /// The file is no `.npz`, or an array is of another rank, is not made of numbers, or holds one that is negative or not
    /// finite.
    pub fn read(path: &Path) -> Result<Importance> {
        // The archive is read first: a file that is no archive is refused before all of it is hashed.
        let arrays = anemoe_npz::read_npz(path)?;
        let sha256 = anemoe_bundle::file_sha256(path)?;
        let mut all = Importance { path: path.to_path_buf(), moments: BTreeMap::new(), sha256 };
        for (name, array) in arrays {
            let invalid = |what: String| Error::invalid(path, format!("importance `{name}`: {what}"));
            let values = array.to_f32();
            if let Some(i) = values.iter().position(|v| !v.is_finite() || *v < 0.0) {
                return Err(invalid(format!("element {i} is {}, expected a number from 0", values[i])));
            }
            match array.shape.len() {
                1 | 2 if !values.is_empty() => {
                    all.moments.insert(name, (array.shape.clone(), values));
                }
                _ => return Err(invalid(format!("shape {:?}", array.shape))),
            }
        }
        Ok(all)
    }

    /// Reads importances like [`Importance::read`] for a plan: one array for every projection that the plan compresses, and no
    /// other array.
    ///
    /// # Errors
    /// The file is wrong, or does not fit the plan.
    pub fn read_for(plan: &Plan, path: &Path) -> Result<Importance> {
        let importance = Importance::read(path)?;
        let matrices = || plan.shards.iter().flat_map(|s| &s.matrices);
        let known: BTreeSet<&str> = matrices().map(|m| m.tensor.as_str()).collect();
        importance.check_names(|name| known.contains(name))?;
        for m in matrices() {
            importance.of(m)?;
        }
        // Convolutions over several tokens have inputs that no calibration counts.
        let is_counted = |m: &&MatrixPlan| m.quant.kind != MatrixQuant::FP16.kind && m.taps == 1;
        // A set, since the experts of a layer can share one tensor.
        let compressed: BTreeSet<&str> = matrices().filter(is_counted).map(|m| m.tensor.as_str()).collect();
        importance.check_complete(compressed)?;
        Ok(importance)
    }

    /// Writes moments so that [`Importance::read`] reads them.
    ///
    /// # Errors
    /// The file cannot be written.
    pub fn write(path: &Path, moments: &BTreeMap<String, (Vec<usize>, Vec<f32>)>) -> Result<()> {
        let mut arrays = Vec::new();
        for (name, (shape, values)) in moments {
            let array = Array::new(shape.clone(), values.clone()).ok_or_else(|| {
                let n = values.len();
                Error::invalid(path, format!("importance `{name}`: {n} values for shape {shape:?}"))
            })?;
            arrays.push((name.clone(), array));
        }
        anemoe_npz::write_npz(path, &arrays)
    }

    /// Checks that every array has the name of a tensor that `known` accepts.
    ///
    /// # Errors
    /// An array has another name; the error names it.
    pub fn check_names(&self, known: impl Fn(&str) -> bool) -> Result<()> {
        match self.moments.keys().find(|name| !known(name)) {
            None => Ok(()),
            Some(name) => Err(Error::invalid(
                &self.path,
                format!("importance `{name}`: the checkpoint has no tensor of that name"),
            )),
        }
    }

    /// Checks that every tensor of `wanted` has an array.
    ///
    /// # Errors
    /// Tensors have no array; the error names the first four.
    pub fn check_complete<'a>(&self, wanted: impl IntoIterator<Item = &'a str>) -> Result<()> {
        const NAMED: usize = 4;
        let missing: Vec<&str> =
            wanted.into_iter().filter(|name| !self.moments.contains_key(*name)).collect();
        let mut list = missing.iter().take(NAMED).map(|n| format!("`{n}`")).collect::<Vec<_>>().join(", ");
        match missing.len() {
            0 => return Ok(()),
            1..=NAMED => {}
            n => list += &format!(" and {} more", n - NAMED),
        }
        let what =
            format!("importance: no array for {list}; `anemoe calibrate` writes one for every projection");
        Err(Error::invalid(&self.path, what))
    }

    /// Returns the second moments of a matrix's inputs, `[cols]`; none where the file has no array for its tensor.
    ///
    /// # Errors
    /// The array does not fit the matrix.
    pub fn of(&self, plan: &MatrixPlan) -> Result<Option<&[f32]>> {
        let Some((shape, values)) = self.moments.get(&plan.tensor) else { return Ok(None) };
        let row = match shape.as_slice() {
            [_] => 0,
            _ => (plan.offset / plan.weights().max(1)) as usize,
        };
        let cols = shape.last().copied().unwrap_or(0);
        let found = (cols == plan.cols).then(|| values.get(row * cols..(row + 1) * cols)).flatten();
        match found {
            Some(moments) => Ok(Some(moments)),
            None => Err(Error::invalid(
                &self.path,
                format!(
                    "importance `{}`: shape {shape:?} where matrix `{}` has {} inputs",
                    plan.tensor, plan.name, plan.cols
                ),
            )),
        }
    }

    /// Returns the SHA-256 of the file, in hexadecimal.
    pub fn sha256(&self) -> &str {
        &self.sha256
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::quant::MatrixQuant;

    fn matrix(tensor: &str, offset: u64, rows: usize, cols: usize) -> MatrixPlan {
        let (name, part) = ("m_weight".into(), "experts".into());
        MatrixPlan {
            name,
            part,
            tensor: tensor.into(),
            offset,
            rows,
            cols,
            taps: 1,
            bank: false,
            quant: MatrixQuant::FP16,
        }
    }

    fn file(arrays: &[(&str, Array)]) -> (tempfile::TempDir, PathBuf) {
        let dir = tempfile::tempdir().unwrap();
        let path = dir.path().join("i.npz");
        let arrays: Vec<_> = arrays.iter().map(|(n, a)| (n.to_string(), a.clone())).collect();
        anemoe_npz::write_npz(&path, &arrays).unwrap();
        (dir, path)
    }

    #[test]
    fn each_expert_has_its_own_row() {
        let dir = tempfile::tempdir().unwrap();
        let path = dir.path().join("i.npz");
        let moments = BTreeMap::from([
            ("e".to_string(), (vec![2, 3], vec![1.0, 2.0, 3.0, 4.0, 5.0, 6.0])),
            ("q".to_string(), (vec![2], vec![7.0, 8.0])),
        ]);
        Importance::write(&path, &moments).unwrap();
        let all = Importance::read(&path).unwrap();
        assert_eq!(all.of(&matrix("e", 12, 4, 3)).unwrap(), Some([4.0, 5.0, 6.0].as_slice()));
        assert_eq!(all.of(&matrix("q", 10, 5, 2)).unwrap(), Some([7.0, 8.0].as_slice()));
        assert_eq!(all.of(&matrix("other", 0, 5, 2)).unwrap(), None);
        assert!(all.of(&matrix("e", 24, 4, 3)).is_err());
        let err = all.of(&matrix("q", 0, 5, 3)).unwrap_err().to_string();
        assert!(err.contains("importance `q`") && err.contains("3 inputs"), "{err}");
        all.check_complete(["e", "q"]).unwrap();
        let err = all.check_complete(["a", "e", "b"]).unwrap_err().to_string();
        assert!(err.contains("i.npz") && err.contains("no array for `a`, `b`;"), "{err}");
        let err = all.check_complete(["1", "2", "3", "4", "5", "6"]).unwrap_err().to_string();
        assert!(err.contains("`4` and 2 more"), "{err}");
        let err = all.check_names(|n| n == "q").unwrap_err().to_string();
        assert!(err.contains("no tensor"), "{err}");
    }

    #[test]
    fn wrong_arrays_are_named() {
        for (array, says) in [
            (Array::new(vec![2], vec![1.0, f32::NAN]).unwrap(), "element 1 is NaN"),
            (Array::new(vec![2], vec![-1.0f32, 0.0]).unwrap(), "element 0 is -1"),
            (Array::new(vec![1, 1, 1], vec![1.0f32]).unwrap(), "shape [1, 1, 1]"),
            (Array::new(vec![0], Vec::<f32>::new()).unwrap(), "shape [0]"),
        ] {
            let (_dir, path) = file(&[("q", array)]);
            let err = Importance::read(&path).unwrap_err().to_string();
            assert!(err.contains("importance `q`") && err.contains(says), "{err}");
        }
    }
}
