//! Order of a weight's axes.

use crate::{Error, Result};

/// A weight whose channels lie on any two axes.
pub(super) struct AxedWeight<'a> {
    pub name: &'a str,
    pub shape: &'a [usize],
    /// Axes of output and input channels.
    pub axes: [usize; 2],
}

impl AxedWeight<'_> {
    /// Returns the axes with those of output and input channels first.
    fn order(&self) -> Vec<usize> {
        let rest = (0..self.shape.len()).filter(|axis| !self.axes.contains(axis));
        self.axes.into_iter().chain(rest).collect()
    }

    /// Tells whether the weight has its channels in the order `[out, in, rest..]`.
    pub fn is_in_order(&self) -> bool {
        self.order().is_sorted()
    }

    /// Returns shape and elements `[out, in, rest..]`.
    pub fn by_channels(&self, values: Vec<f32>) -> Result<(Vec<usize>, Vec<f32>)> {
        let [out, input] = self.axes;
        if out == input || out.max(input) >= self.shape.len() {
            let what = format!("axes {out} and {input} of a weight of shape {:?}", self.shape);
            return Err(Error::usage(format!("weight `{}`: {what}", self.name)));
        }
        let order = self.order();
        let shape = order.iter().map(|&axis| self.shape[axis]).collect();
        Ok((shape, if order.is_sorted() { values } else { permute(&values, self.shape, &order) }))
    }

    /// Returns elements `[out / vector, in, rest..]` in the weight's own order.
    pub fn in_own_order(&self, elements: &[u8], vector: usize) -> Vec<u8> {
        let order = self.order();
        let mut shape: Vec<usize> = order.iter().map(|&axis| self.shape[axis]).collect();
        shape[0] /= vector;
        let back: Vec<usize> =
            (0..order.len()).filter_map(|axis| order.iter().position(|&a| a == axis)).collect();
        permute(elements, &shape, &back)
    }

    /// Returns dimensions and elements of tables or scales, `[groups, blocks, entries]`.
    pub fn sides<T: Copy>(
        &self,
        (groups, blocks): (usize, usize),
        values: &[T],
        entries: usize,
    ) -> (Vec<usize>, Vec<T>) {
        let [out, input] = self.axes;
        let mut dims = vec![1; self.shape.len()];
        (dims[out], dims[input]) = (groups, blocks);
        let order = if out < input { [0, 1, 2] } else { [1, 0, 2] };
        (dims, permute(values, &[groups, blocks, entries], &order))
    }
}

/// Reorders the axes of a row-major array: axis i of the result is axis `order[i]` of `values`.
pub(super) fn permute<T: Copy>(values: &[T], shape: &[usize], order: &[usize]) -> Vec<T> {
    if order.is_sorted() {
        return values.to_vec();
    }
    let mut strides = vec![1; shape.len()];
    for axis in (1..shape.len()).rev() {
        strides[axis - 1] = strides[axis] * shape[axis];
    }
    let steps: Vec<(usize, usize)> = order.iter().map(|&axis| (shape[axis], strides[axis])).collect();
    let mut index = vec![0; steps.len()];
    let mut place = 0;
    let mut out = Vec::with_capacity(values.len());
    for _ in 0..values.len() {
        out.push(values[place]);
        for (i, (size, stride)) in index.iter_mut().zip(&steps).rev() {
            *i += 1;
            place += stride;
            if *i < *size {
                break;
            }
            place -= *i * stride;
            *i = 0;
        }
    }
    out
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn axes_are_reordered() {
        let values: Vec<u8> = (0..24).collect();
        let there = permute(&values, &[2, 3, 4], &[2, 0, 1]);
        assert_eq!(there[..4], [0, 4, 8, 12]);
        assert_eq!(permute(&there, &[4, 2, 3], &[1, 2, 0]), values);
    }
}
