//! Gather and scatter ops.

use super::super::strided::dense_strides;
use super::operands::{OpContext, OpError, OpResult};
use super::shape::{around, count, invalid, unsupported};
use crate::tensor::{Data, Tensor, with_elements};

/// Returns the position that an index into `n` elements names; a negative index counts from the end.
fn place(index: i32, n: usize) -> OpResult<usize> {
    let at = if index < 0 { i64::from(index) + n as i64 } else { i64::from(index) };
    match usize::try_from(at) {
        Ok(at) if at < n => Ok(at),
        _ => invalid(format!("index {index} into {n} elements")),
    }
}

/// Returns the shape and the elements of the operand `indices`.
fn indices<'a>(c: &OpContext<'a>) -> OpResult<(&'a [usize], &'a [i32])> {
    let t = c.arg("indices")?;
    let v =
        t.as_i32().ok_or_else(|| OpError::Invalid("parameter `indices` must be an integer tensor".into()))?;
    Ok((&t.shape, v))
}

/// Returns the position that an index of `gather*` or `scatter*` names among `n` elements.
///
/// From iOS17 on, ops have `validate_indices`: where it is true, an index outside `0..n` is an error. Where it is false, the op's
/// definition leaves open what such an index does: `gather*` counts a negative one from the end, and `scatter*` leaves it out.
fn checked_place(c: &OpContext<'_>, index: i32, n: usize) -> OpResult<Option<usize>> {
    let inside = usize::try_from(index).ok().filter(|&i| i < n);
    match c.get("validate_indices") {
        None => place(index, n).map(Some),
        Some(_) if inside.is_some() => Ok(inside),
        Some(_) if c.bool("validate_indices", false)? => invalid(format!(
            "index {index} into {n} elements, expected one from 0 on: validate_indices is true"
        )),
        Some(_) if c.op.starts_with("gather") => place(index, n).map(Some),
        Some(_) => Ok(None),
    }
}

/// Copies slices of `n` elements, which begin at `places` of `x`, to `out`, one after the other.
pub(super) fn copy_slices(
    x: &Tensor,
    shape: &[usize],
    n: usize,
    places: &[usize],
    out: &mut Tensor,
) -> OpResult {
    fn slices<T: Copy>(x: &[T], n: usize, places: &[usize], out: &mut [T]) {
        for (o, &p) in out.chunks_exact_mut(n.max(1)).zip(places) {
            o.copy_from_slice(&x[p..p + n]);
        }
    }
    with_elements!(
        F32 | I32 | Bool,
        &x.data,
        |v| slices(v, n, places, out.reset(shape)),
        return unsupported("strings")
    );
    Ok(())
}

pub(super) fn gather(c: &OpContext<'_>, out: &mut [Tensor]) -> OpResult {
    let x = c.arg("x")?;
    let (is, _) = indices(c)?;
    let axis = super::shape::axis(c.int("axis", 0)?, x.rank())?;
    let batch = usize::try_from(c.int("batch_dims", 0)?).unwrap_or(usize::MAX);
    if batch > axis || batch > is.len() || is[..batch.min(is.len())] != x.shape[..batch.min(x.rank())] {
        return invalid(format!("batch_dims {batch} with axis {axis}, {:?} and indices {is:?}", x.shape));
    }
    let shape = [&x.shape[..axis], &is[batch..], &x.shape[axis + 1..]].concat();
    count(&shape)?;
    let (inner, places) = slices(c, x, axis, batch)?;
    copy_slices(x, &shape, inner, &found(places), &mut out[0])
}

/// Returns the size of a slice behind `axis`, and the places of the slices that the indices name; the first `batch` axes of `x`
/// are those of the indices.
fn slices(c: &OpContext<'_>, x: &Tensor, axis: usize, batch: usize) -> OpResult<(usize, Vec<Option<usize>>)> {
    let (is, iv) = indices(c)?;
    let batches: usize = x.shape[..batch].iter().product();
    let (outer, n, inner) = around(&x.shape[batch..], axis - batch);
    let per_batch: usize = is[batch..].iter().product();
    let mut places = Vec::with_capacity(batches * outer * per_batch);
    for b in 0..batches {
        for o in 0..outer {
            for &i in &iv[b * per_batch..(b + 1) * per_batch] {
                places.push(checked_place(c, i, n)?.map(|i| ((b * outer + o) * n + i) * inner));
            }
        }
    }
    Ok((inner, places))
}

/// Returns the places of a `gather*` op, which finds every element.
fn found(places: Vec<Option<usize>>) -> Vec<usize> {
    places.into_iter().flatten().collect()
}

pub(super) fn gather_along_axis(c: &OpContext<'_>, out: &mut [Tensor]) -> OpResult {
    let x = c.arg("x")?;
    copy_slices(x, indices(c)?.0, 1, &found(places_along_axis(c, x)?), &mut out[0])
}

/// Returns the places of the elements that indices name along an axis of `x`.
fn places_along_axis(c: &OpContext<'_>, x: &Tensor) -> OpResult<Vec<Option<usize>>> {
    let (is, iv) = indices(c)?;
    let axis = super::shape::axis(c.int("axis", 0)?, x.rank())?;
    let fits =
        is.len() == x.rank() && is.iter().zip(&x.shape).enumerate().all(|(i, (a, b))| i == axis || a == b);
    if !fits {
        return invalid(format!("indices of shape {is:?} for {:?} along axis {axis}", x.shape));
    }
    let (_, n, inner) = around(&x.shape, axis);
    let m = is[axis];
    let place = |(k, &i): (usize, &i32)| {
        let (outer, column) = (k / (m * inner).max(1), k % inner.max(1));
        Ok(checked_place(c, i, n)?.map(|i| (outer * n + i) * inner + column))
    };
    iv.iter().enumerate().map(place).collect()
}

pub(super) fn gather_nd(c: &OpContext<'_>, out: &mut [Tensor]) -> OpResult {
    let x = c.arg("x")?;
    let (is, _) = indices(c)?;
    let batch = usize::try_from(c.int("batch_dims", 0)?).unwrap_or(usize::MAX);
    let (depth, places) = places_of_tuples(c, x, batch)?;
    let shape = [&is[..is.len() - 1], &x.shape[batch + depth..]].concat();
    count(&shape)?;
    copy_slices(x, &shape, x.shape[batch + depth..].iter().product(), &found(places), &mut out[0])
}

/// Returns the size of tuples of indices, and the places of `x` that they name; the first `batch` axes of `x` are those of the
/// indices.
fn places_of_tuples(c: &OpContext<'_>, x: &Tensor, batch: usize) -> OpResult<(usize, Vec<Option<usize>>)> {
    let (is, iv) = indices(c)?;
    let depth = is.last().copied().unwrap_or(0);
    if batch >= is.len() || batch.saturating_add(depth) > x.rank() || is[..batch] != x.shape[..batch] {
        return invalid(format!("indices of shape {is:?} into {:?} with batch_dims {batch}", x.shape));
    }
    let own = dense_strides(&x.shape);
    let per_batch: usize = is[batch..is.len() - 1].iter().product();
    let batch_size: usize = x.shape[batch..].iter().product();
    let mut places = Vec::new();
    for (k, tuple) in iv.chunks_exact(depth.max(1)).enumerate() {
        let mut at = Some(k / per_batch.max(1) * batch_size);
        for (j, &i) in (batch..).zip(tuple) {
            let found = checked_place(c, i, x.shape[j])?;
            at = at.zip(found).map(|(at, i)| at + i * own[j]);
        }
        places.push(at);
    }
    Ok((depth, places))
}

/// Computes an element by an arithmetic mode, from the old one and its update; none for other modes.
type UpdateArithmetic<T> = fn(&str, T, T) -> Option<T>;

/// Combines slices of `n` elements of `out`, which begin at `places`, with their updates according to `mode`.
fn update_elements<T: Copy + PartialOrd>(
    out: &mut [T],
    updates: &[T],
    (n, places): (usize, &[Option<usize>]),
    (mode, arithmetic): (&str, UpdateArithmetic<T>),
) -> OpResult {
    for (p, updates) in places.iter().zip(updates.chunks_exact(n.max(1))) {
        let Some(p) = *p else { continue };
        for (old, &new) in out[p..].iter_mut().zip(updates) {
            *old = match mode {
                "update" => new,
                "max" if new > *old => new,
                "min" if new < *old => new,
                "max" | "min" => *old,
                _ => arithmetic(mode, *old, new)
                    .ok_or_else(|| OpError::Invalid(format!("scatter mode `{mode}`")))?,
            };
        }
    }
    Ok(())
}

fn float_arithmetic(mode: &str, a: f32, b: f32) -> Option<f32> {
    Some(match mode {
        "add" => a + b,
        "sub" => a - b,
        "mul" => a * b,
        "div" => a / b,
        _ => return None,
    })
}

fn int_arithmetic(mode: &str, a: i32, b: i32) -> Option<i32> {
    Some(match mode {
        "add" => a.wrapping_add(b),
        "sub" => a.wrapping_sub(b),
        "mul" => a.wrapping_mul(b),
        "div" if b != 0 => a.wrapping_div(b),
        _ => return None,
    })
}

/// Copies `data` to `out` and applies slices of `n` updates, which begin at `places`; an update without a place is left out.
fn update_slices(c: &OpContext<'_>, n: usize, places: &[Option<usize>], out: &mut Tensor) -> OpResult {
    let (data, updates, mode) = (c.arg("data")?, c.arg("updates")?, c.str("mode", "add")?);
    if updates.len() != places.len() * n {
        return invalid(format!(
            "updates of shape {:?}, expected {} elements",
            updates.shape,
            places.len() * n
        ));
    }
    super::elementwise_unary::copy(data, &data.shape, out);
    match (&mut out.data, &updates.data) {
        (Data::F32(o), Data::F32(u)) => update_elements(o, u, (n, places), (mode, float_arithmetic)),
        (Data::I32(o), Data::I32(u)) => update_elements(o, u, (n, places), (mode, int_arithmetic)),
        _ => unsupported("scatter of other than numbers of one type"),
    }
}

pub(super) fn scatter(c: &OpContext<'_>, out: &mut [Tensor]) -> OpResult {
    let data = c.arg("data")?;
    let axis = super::shape::axis(c.int("axis", 0)?, data.rank())?;
    let (inner, places) = slices(c, data, axis, 0)?;
    update_slices(c, inner, &places, &mut out[0])
}

pub(super) fn scatter_along_axis(c: &OpContext<'_>, out: &mut [Tensor]) -> OpResult {
    update_slices(c, 1, &places_along_axis(c, c.arg("data")?)?, &mut out[0])
}

pub(super) fn scatter_nd(c: &OpContext<'_>, out: &mut [Tensor]) -> OpResult {
    let data = c.arg("data")?;
    let (depth, places) = places_of_tuples(c, data, 0)?;
    update_slices(c, data.shape[depth..].iter().product(), &places, &mut out[0])
}

#[cfg(test)]
mod tests {
    use super::*;

    fn run(op: &str, validate: Option<bool>, index: i32) -> OpResult<Vec<f32>> {
        let data = Tensor::f32(&[3], vec![1.0, 2.0, 3.0]);
        let mut inputs = vec![
            (if op == "gather" { "x" } else { "data" }, data),
            ("indices", Tensor::i32(&[1], vec![index])),
            ("updates", Tensor::f32(&[1], vec![10.0])),
        ];
        if op == "scatter_nd" {
            inputs[1].1 = Tensor::i32(&[1, 1], vec![index]);
        }
        if let Some(validate) = validate {
            inputs.push(("validate_indices", Tensor { shape: vec![], data: Data::Bool(vec![validate]) }));
        }
        let bound: Vec<(&str, &Tensor)> = inputs.iter().map(|(n, t)| (*n, t)).collect();
        let mut out = [Tensor::default()];
        let function = super::super::op_function(op).unwrap();
        function(&OpContext { op, inputs: &bound, values: &[], outputs: &[] }, &mut out)?;
        Ok(out[0].as_f32().unwrap().to_vec())
    }

    #[test]
    fn indices_are_validated_from_ios17_on() {
        for op in ["scatter", "scatter_along_axis", "scatter_nd"] {
            // Before iOS17, a negative index counts from the end.
            assert_eq!(run(op, None, -1).unwrap(), [1.0, 2.0, 13.0], "{op}");
            assert!(run(op, None, 3).is_err(), "{op}");
            assert_eq!(run(op, Some(false), 1).unwrap(), [1.0, 12.0, 3.0], "{op}");
            assert_eq!(run(op, Some(false), -1).unwrap(), [1.0, 2.0, 3.0], "{op}");
            assert_eq!(run(op, Some(false), 7).unwrap(), [1.0, 2.0, 3.0], "{op}");
            for index in [-1, 3] {
                assert!(
                    run(op, Some(true), index).unwrap_err().to_string().contains("validate_indices"),
                    "{op}"
                );
            }
        }
        assert_eq!(run("gather", Some(false), -1).unwrap(), [3.0]);
        assert!(run("gather", Some(true), -1).is_err());
    }
}
