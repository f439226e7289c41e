//! Views: the places of a value's elements, given by an offset and a stride for each dimension.

use super::super::strided::{broadcast_strides, dense_strides};

/// Storage of a view's elements.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord)]
pub(super) enum Base {
    /// A buffer of the plan.
    Buffer(usize),
    /// A result of a function of the op library.
    Tensor(usize),
    /// A constant.
    Constant(usize),
    /// An input of the function, in the caller's memory.
    Input(usize),
    /// A state.
    State(usize),
}

/// Elements of a value in their storage.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(super) struct View {
    pub base: Base,
    pub offset: usize,
    pub shape: Vec<usize>,
    /// Strides of the dimensions, in elements.
    pub strides: Vec<usize>,
}

impl View {
    /// Makes a row-major view of the whole base.
    pub fn dense(base: Base, shape: &[usize]) -> View {
        View { base, offset: 0, shape: shape.to_vec(), strides: dense_strides(shape) }
    }

    pub fn len(&self) -> usize {
        self.shape.iter().product()
    }

    pub fn rank(&self) -> usize {
        self.shape.len()
    }

    /// Tells whether the elements are row-major from the offset on.
    pub fn is_dense(&self) -> bool {
        let dense = dense_strides(&self.shape);
        (0..self.rank()).all(|i| self.shape[i] == 1 || self.strides[i] == dense[i])
    }

    pub fn transposed(&self, perm: &[usize]) -> View {
        let permuted = |v: &[usize]| perm.iter().map(|&p| v[p]).collect();
        View { shape: permuted(&self.shape), strides: permuted(&self.strides), ..*self }
    }

    /// Returns a view of `size` elements of `axis`, from `begin` on.
    pub fn sliced(&self, axis: usize, begin: usize, size: usize) -> View {
        let mut v = self.clone();
        v.offset += begin * v.strides[axis];
        v.shape[axis] = size;
        v
    }

    /// Returns a view of the same elements in the same order with another shape; none where strides cannot express it.
    pub fn reshaped(&self, shape: &[usize]) -> Option<View> {
        if self.len() != shape.iter().product::<usize>() || self.len() == 0 {
            return None;
        }
        let old: Vec<(usize, usize)> =
            self.shape.iter().zip(&self.strides).filter(|(n, _)| **n != 1).map(|(n, s)| (*n, *s)).collect();
        let mut strides = vec![0; shape.len()];
        let (mut i, mut j) = (0, 0);
        while i < old.len() {
            // Match a run of old dimensions with a run of new dimensions of as many elements.
            let (mut a, mut b) = (old[i].0, 1);
            let (first_i, first_j) = (i, j);
            i += 1;
            loop {
                if b < a {
                    b *= *shape.get(j)?;
                    j += 1;
                } else if a < b {
                    let (n, s) = *old.get(i)?;
                    if old[i - 1].1 != s * n {
                        return None;
                    }
                    a *= n;
                    i += 1;
                } else {
                    break;
                }
            }
            let mut stride = old[i - 1].1;
            for k in (first_j..j).rev() {
                strides[k] = stride;
                stride *= shape[k];
            }
            // The old dimensions of a run must be contiguous with each other.
            if (first_i + 1..i).any(|k| old[k - 1].1 != old[k].1 * old[k].0) {
                return None;
            }
        }
        (shape[j.min(shape.len())..].iter().all(|&n| n == 1)).then(|| View {
            shape: shape.to_vec(),
            strides,
            ..*self
        })
    }

    /// Returns the strides for a larger shape, with NumPy's broadcasting; none where the shapes do not fit.
    pub fn broadcast(&self, shape: &[usize]) -> Option<Vec<usize>> {
        broadcast_strides(&self.shape, &self.strides, shape)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn at(v: &View, mut i: usize) -> usize {
        let mut place = v.offset;
        for d in (0..v.rank()).rev() {
            place += i % v.shape[d] * v.strides[d];
            i /= v.shape[d];
        }
        place
    }

    #[test]
    fn reshaping_keeps_the_order_or_is_refused() {
        let base = View::dense(Base::Buffer(0), &[2, 3, 4, 5]);
        let views = [
            base.clone(),
            base.transposed(&[0, 1, 3, 2]),
            base.transposed(&[3, 0, 1, 2]),
            base.sliced(1, 1, 2),
            base.sliced(3, 0, 1),
            base.sliced(0, 1, 1).transposed(&[1, 0, 2, 3]),
        ];
        let shapes: [&[usize]; 9] = [
            &[120],
            &[2, 3, 20],
            &[6, 20],
            &[2, 12, 5],
            &[5, 24],
            &[2, 2, 20],
            &[40, 2],
            &[1, 24, 1],
            &[3, 4, 5, 1],
        ];
        let mut possible = 0;
        for v in &views {
            for shape in shapes {
                if let Some(r) = v.reshaped(shape) {
                    possible += 1;
                    assert!((0..v.len()).all(|i| at(v, i) == at(&r, i)), "{v:?} {shape:?}");
                }
            }
        }
        assert_eq!(base.reshaped(&[2, 12, 5]).map(|v| v.strides), Some(vec![60, 5, 1]));
        assert_eq!(base.transposed(&[0, 1, 3, 2]).reshaped(&[120]), None);
        assert!(possible >= 8, "{possible}");
    }
}
