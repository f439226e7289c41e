//! Shapes, strides and broadcasting.

use super::operands::{OpError, OpResult};
use std::cell::Cell;

/// Largest number of elements that a result may have: 4 GiB of f32.
pub(in crate::cpu) const MAX_ELEMENTS: usize = 1 << 30;

thread_local! {
    /// Elements that a result may have now.
    static LIMIT: Cell<usize> = const { Cell::new(MAX_ELEMENTS) };
}

/// Runs `call`, in which results have at most `elements`.
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

/// An [`OpError::Invalid`].
pub(super) fn invalid<T>(what: impl Into<String>) -> OpResult<T> {
    Err(OpError::Invalid(what.into()))
}

/// An [`OpError::Unsupported`].
pub(super) fn unsupported<T>(what: impl Into<String>) -> OpResult<T> {
    Err(OpError::Unsupported(what.into()))
}

/// Number of elements, refused when it is unreasonable.
pub(in crate::cpu) fn count(shape: &[usize]) -> OpResult<usize> {
    let limit = LIMIT.get();
    let n = shape.iter().try_fold(1usize, |n, &d| n.checked_mul(d)).filter(|&n| n <= limit);
    n.ok_or_else(|| {
        OpError::Invalid(format!(
            "a result of shape {shape:?} is too large: {limit} elements are left for it"
        ))
    })
}

/// Row-major strides.
pub(super) fn strides(shape: &[usize]) -> Vec<usize> {
    let mut strides = vec![1; shape.len()];
    for i in (1..shape.len()).rev() {
        strides[i - 1] = strides[i] * shape[i];
    }
    strides
}

/// An axis, counted from the end when negative.
pub(super) fn axis(axis: i32, rank: usize) -> OpResult<usize> {
    let a = if axis < 0 { axis as i64 + rank as i64 } else { axis as i64 };
    match usize::try_from(a) {
        Ok(a) if a < rank => Ok(a),
        _ => invalid(format!("axis {axis} of a tensor of rank {rank}")),
    }
}

/// Result shape of NumPy broadcasting.
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

/// Strides of a tensor of `shape` seen as one of shape `out`: 0 where it repeats.
pub(super) fn broadcast_strides(shape: &[usize], out: &[usize]) -> Vec<usize> {
    let own = strides(shape);
    let skip = out.len() - shape.len();
    (0..out.len()).map(|i| if i < skip || shape[i - skip] == 1 { 0 } else { own[i - skip] }).collect()
}

/// Walks all positions of `shape` but the last axis; `step` gets the offsets of each row by the given strides.
pub(super) fn for_each_row<const N: usize>(
    shape: &[usize],
    strides: [&[usize]; N],
    mut step: impl FnMut([usize; N]),
) {
    let outer = shape.len().saturating_sub(1);
    if shape.contains(&0) {
        return;
    }
    let mut index = vec![0usize; outer];
    let mut offsets = [0usize; N];
    loop {
        step(offsets);
        let mut axis = outer;
        loop {
            if axis == 0 {
                return;
            }
            axis -= 1;
            index[axis] += 1;
            for (o, s) in offsets.iter_mut().zip(strides) {
                *o += s[axis];
            }
            if index[axis] < shape[axis] {
                break;
            }
            for (o, s) in offsets.iter_mut().zip(strides) {
                *o -= s[axis] * shape[axis];
            }
            index[axis] = 0;
        }
    }
}

/// `out[i] = f(a[i], b[i])` with broadcasting; `shape` is the result's.
pub(super) fn zip_broadcast<A: Copy, B: Copy, R>(
    (a_shape, a): (&[usize], &[A]),
    (b_shape, b): (&[usize], &[B]),
    shape: &[usize],
    out: &mut [R],
    f: impl Fn(A, B) -> R,
) {
    if out.is_empty() {
        return;
    }
    if a.len() == out.len() && b.len() == out.len() {
        out.iter_mut().zip(a).zip(b).for_each(|((o, &a), &b)| *o = f(a, b));
        return;
    }
    if b.len() == 1 && a.len() == out.len() {
        let b = b[0];
        out.iter_mut().zip(a).for_each(|(o, &a)| *o = f(a, b));
        return;
    }
    let (sa, sb) = (broadcast_strides(a_shape, shape), broadcast_strides(b_shape, shape));
    let inner = shape.last().copied().unwrap_or(1);
    let (ia, ib) = (sa.last().copied().unwrap_or(0), sb.last().copied().unwrap_or(0));
    let mut rows = out.chunks_exact_mut(inner);
    for_each_row(shape, [&sa, &sb], |[oa, ob]| {
        let Some(row) = rows.next() else { return };
        match (ia, ib) {
            (0, 0) => {
                let (a, b) = (a[oa], b[ob]);
                row.iter_mut().for_each(|o| *o = f(a, b));
            }
            (0, _) => {
                let a = a[oa];
                row.iter_mut().zip(&b[ob..]).for_each(|(o, &b)| *o = f(a, b));
            }
            (_, 0) => {
                let b = b[ob];
                row.iter_mut().zip(&a[oa..]).for_each(|(o, &a)| *o = f(a, b));
            }
            _ => row.iter_mut().zip(&a[oa..]).zip(&b[ob..]).for_each(|((o, &a), &b)| *o = f(a, b)),
        }
    });
}

/// Sizes before, along and behind an axis.
pub(super) fn around(shape: &[usize], axis: usize) -> (usize, usize, usize) {
    (shape[..axis].iter().product(), shape[axis], shape[axis + 1..].iter().product())
}
