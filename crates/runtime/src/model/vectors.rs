//! Vectors that host steps use, from a file of the bundle.

use crate::tensor::Tensor;
use crate::{Error, Result};
use anemoe_bundle::{CHAIN_FILE, Vectors as File};
use anemoe_kernels::Pool;
use anemoe_npz::{Array, read_npz};
use std::collections::BTreeMap;
use std::path::{Path, PathBuf};

/// Tokens whose sums are computed together.
const TOKENS: usize = 64;
/// Elements of a part of a job.
const PART: usize = 1 << 15;

/// Returns the channels of a part of a job, with `width` tokens each.
fn rows_of_piece(width: usize) -> usize {
    (PART / width).max(1)
}

/// The named vectors of a bundle.
pub(super) struct VectorFile {
    bundle: PathBuf,
    file: PathBuf,
    arrays: BTreeMap<String, Array>,
}

impl VectorFile {
    pub fn open(bundle: &Path, file: Option<&File>) -> Result<VectorFile> {
        let path = file.map_or_else(|| bundle.join(CHAIN_FILE), |f| bundle.join(&f.file));
        let arrays = match file {
            Some(_) => read_npz(&path)?,
            None => BTreeMap::new(),
        };
        Ok(VectorFile { bundle: bundle.to_path_buf(), file: path, arrays })
    }

    /// Returns a vector by its name.
    pub fn vector(&self, name: String) -> Result<Vec<f32>> {
        let array = self.arrays.get(&name).ok_or_else(|| {
            Error::invalid(self.bundle.join(CHAIN_FILE), format!("chain: no vector `{name}` is in its file"))
        })?;
        let values = array.to_f32();
        match values.iter().position(|v| !v.is_finite()) {
            None => Ok(values),
            Some(i) => {
                Err(Error::invalid(&self.file, format!("vector `{name}`: element {i} is {}", values[i])))
            }
        }
    }

    /// Returns a vector that holds each token once, such as the token of each row of the head.
    pub fn order(&self, name: &str, vocabulary: usize) -> Result<Vec<u32>> {
        let ids: Vec<u32> = self.vector(name.to_string())?.iter().map(|&v| v as u32).collect();
        let mut rows = vec![false; vocabulary];
        let mut is_new =
            |id: &u32| rows.get_mut(*id as usize).is_some_and(|row| !std::mem::replace(row, true));
        match ids.len() == vocabulary && ids.iter().all(&mut is_new) {
            true => Ok(ids),
            false => Err(Error::invalid(
                &self.file,
                format!("vector `{name}`: not each of {vocabulary} tokens once"),
            )),
        }
    }

    /// Returns a norm with its vector.
    pub fn norm(&self, name: &str, eps: f32) -> Result<Norm> {
        Ok(Norm { weight: self.vector(name.to_string())?, eps })
    }

    /// Returns a residual with its vectors.
    pub fn mix(&self, name: &str, with_branch: bool) -> Result<Mix> {
        let vector = |part: &str| self.vector(format!("{name}.{part}"));
        let branch_scale = if with_branch { Some(vector("branch_scale")?) } else { None };
        Ok(Mix { scale: vector("scale")?, branch_scale, shift: vector("shift")? })
    }
}

/// A residual: `stream * scale + branch * branch_scale + shift`, per channel.
pub(super) struct Mix {
    scale: Vec<f32>,
    branch_scale: Option<Vec<f32>>,
    shift: Vec<f32>,
}

impl Mix {
    /// Computes the residual of `stream`, `[1, C, 1, T]`, in place.
    pub fn apply(&self, stream: &mut Tensor, branch: Option<&Tensor>) -> std::result::Result<(), String> {
        let channels = self.scale.len();
        let of = |shape: &[usize]| format!("residual: {shape:?} with vectors of {channels} channels");
        let &[1, c, 1, width] = stream.shape.as_slice() else { return Err(of(&stream.shape)) };
        let shape = [1, c, 1, width];
        let wrong = || of(&shape);
        let fits = c == channels && self.shift.len() == c;
        let Some(stream) = stream.as_f32_mut().filter(|_| fits && width > 0) else { return Err(wrong()) };
        match (&self.branch_scale, branch) {
            (Some(branch_scale), Some(branch)) => {
                let Some(branch) = branch.as_f32().filter(|b| b.len() == stream.len()) else {
                    return Err(format!("residual: {shape:?} with a branch of {:?}", branch.shape));
                };
                if branch_scale.len() != c {
                    return Err(wrong());
                }
                // Vectors from channel `c` on.
                let vectors = |c: usize| self.scale[c..].iter().zip(&branch_scale[c..]).zip(&self.shift[c..]);
                let mixed = |s: f32, b: f32, ((scale, branch_scale), shift): ((&f32, &f32), &f32)| {
                    s * scale + (b * branch_scale + shift)
                };
                if width == 1 {
                    let all = stream.iter_mut().zip(branch).zip(vectors(0));
                    all.for_each(|((s, b), v)| *s = mixed(*s, *b, v));
                } else {
                    let rows = rows_of_piece(width);
                    Pool::global().for_chunks(stream, rows * width, &|piece, stream| {
                        let first = piece * rows;
                        let with = branch[first * width..].chunks_exact(width).zip(vectors(first));
                        for (stream, (branch, v)) in stream.chunks_exact_mut(width).zip(with) {
                            stream.iter_mut().zip(branch).for_each(|(s, b)| *s = mixed(*s, *b, v));
                        }
                    });
                }
            }
            _ => {
                for (i, stream) in stream.chunks_exact_mut(width).enumerate() {
                    stream.iter_mut().for_each(|s| *s = *s * self.scale[i] + self.shift[i]);
                }
            }
        }
        Ok(())
    }
}

/// A norm: `x / sqrt(mean(x^2) + eps) * weight`, over the channels of each token.
pub(super) struct Norm {
    weight: Vec<f32>,
    eps: f32,
}

impl Norm {
    /// Normalizes `from`, `[1, C, 1, T]`, to `to`.
    pub fn apply(&self, from: &Tensor, to: &mut Tensor) -> std::result::Result<(), String> {
        let channels = self.weight.len();
        let (&[1, c, 1, width], Some(x)) = (from.shape.as_slice(), from.as_f32()) else {
            return Err(format!("norm of {:?}", from.shape));
        };
        if c != channels || width == 0 {
            return Err(format!("norm: {:?} with a weight of {channels} channels", from.shape));
        }
        let eps = f64::from(self.eps);
        // Zero stays zero even without an epsilon.
        let factor = |sum: f64| match sum / c as f64 + eps {
            0.0 => 0.0,
            mean => mean.sqrt().recip(),
        };
        let square = |v: &f32| f64::from(*v) * f64::from(*v);
        let out = to.reset_f32(&from.shape);
        if width == 1 {
            // Several sums, so that additions do not wait for each other.
            let (chunks, rest) = x.as_chunks::<8>();
            let mut sums = [0f64; 8];
            for chunk in chunks {
                sums.iter_mut().zip(chunk).for_each(|(sum, v)| *sum += square(v));
            }
            let f = factor(sums.iter().sum::<f64>() + rest.iter().map(square).sum::<f64>()) as f32;
            out.iter_mut().zip(x).zip(&self.weight).for_each(|((o, v), w)| *o = v * f * w);
            return Ok(());
        }
        // The same sums as for one token, so that results have the same bits.
        let (mut factors, whole) = (vec![0f32; width], c / 8 * 8);
        let pool = Pool::global();
        pool.for_chunks(&mut factors, TOKENS, &|piece, factors| {
            let mut sums = [[0f64; TOKENS]; 9];
            for (i, row) in x.chunks_exact(width).enumerate() {
                let sums = &mut sums[if i < whole { i % 8 } else { 8 }];
                let row = &row[piece * TOKENS..][..factors.len()];
                sums.iter_mut().zip(row).for_each(|(sum, v)| *sum += square(v));
            }
            for (t, f) in factors.iter_mut().enumerate() {
                *f = factor(sums[..8].iter().map(|sums| sums[t]).sum::<f64>() + sums[8][t]) as f32;
            }
        });
        let rows = rows_of_piece(width);
        pool.for_chunks(out, rows * width, &|piece, out| {
            let first = piece * rows;
            let with = x[first * width..].chunks_exact(width).zip(&self.weight[first..]);
            for (out, (row, w)) in out.chunks_exact_mut(width).zip(with) {
                for ((o, v), f) in out.iter_mut().zip(row).zip(&factors) {
                    *o = v * f * w;
                }
            }
        });
        Ok(())
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn each_channel_has_its_own_numbers() {
        let mix = Mix { scale: vec![2.0, 1.0], branch_scale: Some(vec![10.0, 0.5]), shift: vec![0.25, -1.0] };
        let mut stream = Tensor::f32(&[1, 2, 1, 2], vec![1.0, 2.0, 3.0, 4.0]);
        let branch = Tensor::f32(&[1, 2, 1, 2], vec![1.0, 0.0, 2.0, 4.0]);
        mix.apply(&mut stream, Some(&branch)).unwrap();
        assert_eq!(stream.as_f32().unwrap(), [12.25, 4.25, 3.0, 5.0]);
        mix.apply(&mut stream, None).unwrap();
        assert_eq!(stream.as_f32().unwrap(), [24.75, 8.75, 2.0, 4.0]);
        assert!(mix.apply(&mut Tensor::f32(&[1, 3, 1, 1], vec![0.0; 3]), Some(&branch)).is_err());
        assert!(mix.apply(&mut stream, Some(&Tensor::f32(&[1, 1, 1, 1], vec![0.0]))).is_err());
    }

    #[test]
    fn a_token_has_the_same_bits_beside_others() {
        let (c, width) = (2813, 67);
        let x: Vec<f32> = (0..c * width).map(|i| (i as f32 * 0.7).sin() * 3.0).collect();
        let norm = Norm { weight: (0..c).map(|i| 1.0 + i as f32 * 1e-3).collect(), eps: 1e-6 };
        let (mut all, mut one) = (Tensor::default(), Tensor::default());
        norm.apply(&Tensor::f32(&[1, c, 1, width], x.clone()), &mut all).unwrap();
        let own: Vec<f32> = x.iter().skip(1).step_by(width).copied().collect();
        norm.apply(&Tensor::f32(&[1, c, 1, 1], own), &mut one).unwrap();
        let beside = all.as_f32().unwrap().iter().skip(1).step_by(width);
        assert!(beside.zip(one.as_f32().unwrap()).all(|(a, b)| a.to_bits() == b.to_bits()));
    }

    #[test]
    fn each_token_has_its_own_norm() {
        let norm = Norm { weight: vec![1.0, 2.0], eps: 0.0 };
        let x = Tensor::f32(&[1, 2, 1, 2], vec![3.0, 0.0, 4.0, 0.0]);
        let mut out = Tensor::default();
        norm.apply(&x, &mut out).unwrap();
        let rms = 12.5f32.sqrt();
        let v = out.as_f32().unwrap();
        assert!((v[0] - 3.0 / rms).abs() < 1e-6 && (v[2] - 8.0 / rms).abs() < 1e-6);
        assert_eq!((v[1], v[3]), (0.0, 0.0));
        assert!(norm.apply(&Tensor::f32(&[1, 1, 1, 1], vec![1.0]), &mut out).is_err());
    }
}
