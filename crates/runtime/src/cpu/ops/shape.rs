//! Shapes and broadcasting.

use super::super::strided::{StridedLoops, broadcast_strides, dense_strides};
use super::operands::{OpContext, OpError, OpResult};
use std::cell::Cell;

/// Largest number of elements that a result may have: 4 GiB of f32.
pub(in crate::cpu) const MAX_ELEMENTS: usize = 1 << 30;

thread_local! {
    /// Most elements that a result may have now.
    static LIMIT: Cell<usize> = const { Cell::new(MAX_ELEMENTS) };
}

/// Runs `call`, in which each result may have at most `elements` elements.
pub(in crate::cpu) fn with_limit<T>(elements: usize, call: impl FnOnce() -> T) -> T {
    struct Restore(usize);
    impl Drop for Restore {
        fn drop(&mut self) {
            LIMIT.set(self.0);
        }
    }
    let _restore = Restore(LIMIT.replace(elements.min(MAX_ELEMENTS)));
    call()
}

/// Makes an [`OpError::Invalid`].
pub(super) fn invalid<T>(what: impl Into<String>) -> OpResult<T> {
    Err(OpError::Invalid(what.into()))
}

/// Makes an [`OpError::Unsupported`].
pub(super) fn unsupported<T>(what: impl Into<String>) -> OpResult<T> {
    Err(OpError::Unsupported(what.into()))
}

/// Returns the number of elements of a result; an error where it exceeds the limit of [`with_limit`].
pub(in crate::cpu) fn count(shape: &[usize]) -> OpResult<usize> {
    let limit = LIMIT.get();
    let n = shape.iter().try_fold(1usize, |n, &d| n.checked_mul(d)).filter(|&n| n <= limit);
    n.ok_or_else(|| {
        OpError::Invalid(format!(
            "a result of shape {shape:?} is too large: {limit} elements are left for it"
        ))
    })
}

/// Returns the index of an axis; a negative axis counts from the end.
pub(super) fn axis(axis: i32, rank: usize) -> OpResult<usize> {
    let a = if axis < 0 { axis as i64 + rank as i64 } else { axis as i64 };
    match usize::try_from(a) {
        Ok(a) if a < rank => Ok(a),
        _ => invalid(format!("axis {axis} of a tensor of rank {rank}")),
    }
}

/// Returns the optional parameter `axes` of an op on a tensor of this rank.
pub(super) fn axes(c: &OpContext<'_>, rank: usize) -> OpResult<Option<Vec<usize>>> {
    let all = |v: &[i32]| v.iter().map(|&a| axis(a, rank)).collect();
    c.ints("axes")?.map(all).transpose()
}

/// Returns the result shape of NumPy broadcasting.
pub(super) fn broadcast_shape(a: &[usize], b: &[usize]) -> OpResult<Vec<usize>> {
    let rank = a.len().max(b.len());
    let at = |s: &[usize], i: usize| if i + s.len() < rank { 1 } else { s[i + s.len() - rank] };
    (0..rank)
        .map(|i| match (at(a, i), at(b, i)) {
            (1, d) | (d, 1) => Ok(d),
            (p, q) if p == q => Ok(p),
            _ => invalid(format!("shapes {a:?} and {b:?} do not broadcast")),
        })
        .collect()
}

/// Returns the strides of a dense tensor of `shape` broadcast to `wanted`: 0 along repeated axes.
pub(super) fn repeated(shape: &[usize], wanted: &[usize]) -> OpResult<Vec<usize>> {
    let strides = broadcast_strides(shape, &dense_strides(shape), wanted);
    strides.ok_or_else(|| OpError::Invalid(format!("shape {shape:?} does not broadcast to {wanted:?}")))
}

/// Makes the loops over the elements of a result of `shape` and of two operands that are broadcast to it.
pub(super) fn pair_loops(x: &[usize], y: &[usize], shape: &[usize]) -> OpResult<StridedLoops<3>> {
    let (x, y) = (repeated(x, shape)?, repeated(y, shape)?);
    Ok(StridedLoops::new(shape, [&dense_strides(shape), &x, &y], [0; 3]))
}

/// Returns the offsets of all combinations of positions along the axes of a tensor with these strides, in order.
pub(super) fn offsets(places: &[Vec<usize>], strides: &[usize]) -> Vec<usize> {
    if places.iter().any(Vec::is_empty) {
        return Vec::new();
    }
    let along = |at: Vec<usize>, (places, step): (&Vec<usize>, &usize)| {
        at.iter().flat_map(|a| places.iter().map(move |p| a + p * step)).collect()
    };
    places.iter().zip(strides).fold(vec![0], along)
}

/// Returns the number of elements before an axis, along it, and behind it.
pub(super) fn around(shape: &[usize], axis: usize) -> (usize, usize, usize) {
    (shape[..axis].iter().product(), shape[axis], shape[axis + 1..].iter().product())
}
