//! Ops that make, order, join and pad tensors.

use super::super::strided::{StridedLoops, copy_tensor_elements, dense_strides};
use super::operands::{OpContext, OpError, OpResult};
use super::scatter_gather::copy_slices;
use super::shape::{around, count, invalid, repeated, unsupported};
use crate::tensor::{Data, Tensor, TensorElement, with_elements};
use anemoe_mlpackage::mil::DataType;

pub(super) fn concat(c: &OpContext<'_>, out: &mut [Tensor]) -> OpResult {
    let Some(first) = c.values.first() else { return invalid("no values") };
    if first.rank() == 0 {
        // Scalars are joined to a vector, like a stack of them.
        return stack(&OpContext { inputs: &[("axis", &Tensor::i32(&[], vec![0]))], ..*c }, out);
    }
    let axis = super::shape::axis(c.int("axis", i32::MAX)?, first.rank())?;
    let interleave = c.bool("interleave", false)?;
    let mut shape = first.shape.clone();
    shape[axis] = 0;
    for v in c.values {
        let fits =
            v.rank() == first.rank() && (0..v.rank()).all(|i| i == axis || v.shape[i] == first.shape[i]);
        if !fits || interleave && v.shape != first.shape {
            return invalid(format!("shapes {:?} and {:?} along axis {axis}", first.shape, v.shape));
        }
        shape[axis] += v.shape[axis];
    }
    count(&shape)?;
    /// Joins values of the type of `_first`.
    fn join<T: TensorElement>(
        _first: &[T],
        values: &[&Tensor],
        sizes: &[usize],
        outer: usize,
        interleave: Option<(usize, usize)>,
        out: &mut [T],
    ) -> OpResult {
        let parts = values.iter().map(|v| v.elements()).collect::<Option<Vec<&[T]>>>();
        let parts = parts.ok_or_else(|| OpError::Invalid("values of different types".into()))?;
        let total: usize = sizes.iter().sum();
        for o in 0..outer {
            let row = &mut out[o * total..(o + 1) * total];
            match interleave {
                None => {
                    let mut at = 0;
                    for (part, &size) in parts.iter().zip(sizes) {
                        row[at..at + size].copy_from_slice(&part[o * size..(o + 1) * size]);
                        at += size;
                    }
                }
                // Slices along the axis, from each part in turn.
                Some((n, inner)) => {
                    for k in 0..n {
                        for (p, part) in parts.iter().enumerate() {
                            let to = (k * parts.len() + p) * inner;
                            row[to..to + inner].copy_from_slice(&part[(o * n + k) * inner..][..inner]);
                        }
                    }
                }
            }
        }
        Ok(())
    }
    let (outer, _, inner) = around(&first.shape, axis);
    let sizes: Vec<usize> = c.values.iter().map(|v| v.shape[axis] * inner).collect();
    let turns = interleave.then_some((first.shape[axis], inner));
    with_elements!(
        F32 | I32 | Bool,
        &first.data,
        |v| join(v, c.values, &sizes, outer, turns, out[0].reset(&shape)),
        unsupported("strings")
    )
}

pub(super) fn stack(c: &OpContext<'_>, out: &mut [Tensor]) -> OpResult {
    let Some(first) = c.values.first() else { return invalid("no values") };
    let axis = super::shape::axis(c.int("axis", i32::MAX)?, first.rank() + 1)?;
    // A stack is a concat of tensors with a new axis of size 1.
    let mut shape = first.shape.clone();
    shape.insert(axis, 1);
    let mut widened = Vec::new();
    for v in c.values {
        if v.shape != first.shape {
            return invalid(format!("shapes {:?} and {:?}", first.shape, v.shape));
        }
        widened.push(Tensor { shape: shape.clone(), data: v.data.clone() });
    }
    let values: Vec<&Tensor> = widened.iter().collect();
    let axis = Tensor::i32(&[], vec![axis as i32]);
    concat(&OpContext { op: "concat", inputs: &[("axis", &axis)], values: &values, outputs: c.outputs }, out)
}

pub(super) fn split(c: &OpContext<'_>, out: &mut [Tensor]) -> OpResult {
    let x = c.arg("x")?;
    let axis = super::shape::axis(c.int("axis", i32::MAX)?, x.rank())?;
    let (outer, n, inner) = around(&x.shape, axis);
    let sizes: Vec<usize> = match c.ints("split_sizes")? {
        Some(v) => v.iter().map(|&s| usize::try_from(s).unwrap_or(usize::MAX)).collect(),
        None => {
            let parts = usize::try_from(c.int("num_splits", 0)?).unwrap_or(0);
            if parts == 0 || n % parts != 0 {
                return invalid(format!("{parts} equal parts of {n}"));
            }
            vec![n / parts; parts]
        }
    };
    if sizes.iter().try_fold(0usize, |a, &b| a.checked_add(b)) != Some(n) || sizes.len() != out.len() {
        return invalid(format!("parts {sizes:?} of axis {axis} of size {n}, for {} outputs", out.len()));
    }
    let mut from = 0;
    for (size, out) in sizes.iter().zip(out) {
        let mut shape = x.shape.clone();
        shape[axis] = *size;
        let places: Vec<usize> = (0..outer).map(|o| (o * n + from) * inner).collect();
        copy_slices(x, &shape, size * inner, &places, out)?;
        from += size;
    }
    Ok(())
}

pub(super) fn tile(c: &OpContext<'_>, out: &mut [Tensor]) -> OpResult {
    let x = c.arg("x")?;
    let reps = c.sizes("reps")?.filter(|r| r.len() == x.rank());
    let reps =
        reps.ok_or_else(|| OpError::Invalid(format!("parameter `reps` for a tensor of rank {}", x.rank())))?;
    // Each axis becomes two: repetitions (stride 0) and elements.
    let shape: Vec<usize> = x.shape.iter().zip(&reps).map(|(d, r)| d.saturating_mul(*r)).collect();
    count(&shape)?;
    let own = dense_strides(&x.shape);
    let (mut dims, mut strides) = (Vec::new(), Vec::new());
    for i in 0..x.rank() {
        dims.extend([reps[i], x.shape[i]]);
        strides.extend([0, own[i]]);
    }
    rearrange(x, &dims, &strides, &shape, &mut out[0]);
    Ok(())
}

/// Copies the elements of `x`, read by `dims` and `strides`, to a tensor of `shape`.
pub(super) fn rearrange(x: &Tensor, dims: &[usize], strides: &[usize], shape: &[usize], out: &mut Tensor) {
    let loops = StridedLoops::new(dims, [&dense_strides(dims), strides], [0, 0]);
    copy_tensor_elements(&loops, x, shape, out);
}

/// Fills a tensor of `shape` and `dtype` with the one number of `value`; with zero if there is no value.
pub(super) fn filled(value: Option<&Tensor>, shape: &[usize], dtype: DataType, out: &mut Tensor) -> OpResult {
    count(shape)?;
    let (float, int, flag) = match value.map(|t| &t.data) {
        None => (0.0, 0, false),
        Some(Data::F32(v)) if v.len() == 1 => (v[0], v[0] as i32, v[0] != 0.0),
        Some(Data::I32(v)) if v.len() == 1 => (v[0] as f32, v[0], v[0] != 0),
        Some(Data::Bool(v)) if v.len() == 1 => (f32::from(u8::from(v[0])), i32::from(v[0]), v[0]),
        Some(_) => return invalid("parameter `value` must be one number"),
    };
    match dtype {
        DataType::Bool => out.reset_bool(shape).fill(flag),
        t if t.is_float() => out.reset_f32(shape).fill(float),
        _ => out.reset_i32(shape).fill(int),
    }
    Ok(())
}

pub(super) fn fill(c: &OpContext<'_>, out: &mut [Tensor]) -> OpResult {
    let shape: Vec<usize> = if c.op == "fill_like" {
        c.arg("ref_tensor")?.shape.clone()
    } else {
        c.arg("shape").and_then(|_| c.sizes("shape"))?.unwrap_or_default()
    };
    filled(c.get("value"), &shape, c.outputs.first().map_or(DataType::Float32, |t| t.dtype), &mut out[0])
}

pub(super) fn shape(c: &OpContext<'_>, out: &mut [Tensor]) -> OpResult {
    let x = c.arg("x")?;
    let y = out[0].reset_i32(&[x.rank()]);
    y.iter_mut().zip(&x.shape).for_each(|(y, &d)| *y = i32::try_from(d).unwrap_or(i32::MAX));
    Ok(())
}

pub(super) fn range_1d(c: &OpContext<'_>, out: &mut [Tensor]) -> OpResult {
    let (start, end, step) = (c.arg("start")?, c.arg("end")?, c.arg("step")?);
    if let (Some(&[a]), Some(&[b]), Some(&[s])) = (start.as_i32(), end.as_i32(), step.as_i32()) {
        if s == 0 {
            return invalid("a step of 0");
        }
        let (a, b, s) = (i64::from(a), i64::from(b), i64::from(s));
        let span = if s > 0 { b - a } else { a - b };
        let n = span.max(0).unsigned_abs().div_ceil(s.unsigned_abs()) as usize;
        count(&[n])?;
        out[0].reset_i32(&[n]).iter_mut().enumerate().for_each(|(i, y)| *y = (a + i as i64 * s) as i32);
        return Ok(());
    }
    let (a, b, s) = (c.float("start", 0.0)?, c.float("end", 0.0)?, c.float("step", 1.0)?);
    let n = ((f64::from(b) - f64::from(a)) / f64::from(s)).ceil();
    if !n.is_finite() {
        return invalid(format!("a range from {a} to {b} in steps of {s}"));
    }
    let n = n.max(0.0) as usize;
    count(&[n])?;
    out[0].reset_f32(&[n]).iter_mut().enumerate().for_each(|(i, y)| *y = a + i as f32 * s);
    Ok(())
}

pub(super) fn band_part(c: &OpContext<'_>, out: &mut [Tensor]) -> OpResult {
    let x = c.arg("x")?;
    if x.rank() < 2 {
        return invalid(format!("input of shape {:?}", x.shape));
    }
    let (rows, cols) = (x.shape[x.rank() - 2], x.shape[x.rank() - 1]);
    let (lower, upper) = (i64::from(c.int("lower", -1)?), i64::from(c.int("upper", -1)?));
    let keep = |k: usize| {
        let (m, n) = ((k / cols % rows) as i64, (k % cols) as i64);
        (lower < 0 || m - n <= lower) && (upper < 0 || n - m <= upper)
    };
    super::elementwise_unary::copy(x, &x.shape, &mut out[0]);
    with_elements!(
        F32 | I32 | Bool,
        &mut out[0].data,
        |v| v.iter_mut().enumerate().filter(|(k, _)| !keep(*k)).for_each(|(_, v)| *v = Default::default()),
        return unsupported("strings")
    );
    Ok(())
}

/// Returns the elements of `x`, which `of` reads, as numbers.
fn numbers(x: &Tensor, of: &str) -> OpResult<Vec<f64>> {
    let other = || unsupported(format!("{of} other than numbers"));
    with_elements!(F32 | I32, &x.data, |v| Ok(v.iter().map(|v| v.number()).collect()), other())
}

pub(super) fn cumsum(c: &OpContext<'_>, out: &mut [Tensor]) -> OpResult {
    let x = c.arg("x")?;
    let axis = super::shape::axis(c.int("axis", 0)?, x.rank())?;
    let (exclusive, reverse) = (c.bool("exclusive", false)?, c.bool("reverse", false)?);
    let (outer, n, inner) = around(&x.shape, axis);
    let mut sums = numbers(x, "cumsum of")?;
    for o in 0..outer {
        for i in 0..inner {
            let mut sum = 0.0;
            for k in 0..n {
                let k = if reverse { n - 1 - k } else { k };
                let at = &mut sums[(o * n + k) * inner + i];
                let before = sum;
                sum += *at;
                *at = if exclusive { before } else { sum };
            }
        }
    }
    match &x.data {
        Data::F32(_) => out[0].reset_f32(&x.shape).iter_mut().zip(sums).for_each(|(y, s)| *y = s as f32),
        _ => out[0].reset_i32(&x.shape).iter_mut().zip(sums).for_each(|(y, s)| *y = s as i64 as i32),
    }
    Ok(())
}

pub(super) fn non_zero(c: &OpContext<'_>, out: &mut [Tensor]) -> OpResult {
    let x = c.arg("x")?;
    let found: Vec<usize> = with_elements!(
        F32 | I32 | Bool,
        &x.data,
        |v| (0..v.len()).filter(|&i| v[i].number() != 0.0).collect(),
        return unsupported("strings")
    );
    let own = dense_strides(&x.shape);
    let rank = x.rank();
    let y = out[0].reset_i32(&[found.len(), rank]);
    for (row, at) in y.chunks_exact_mut(rank.max(1)).zip(found) {
        let mut left = at;
        for (y, s) in row.iter_mut().zip(&own) {
            *y = (left / s) as i32;
            left %= s;
        }
    }
    Ok(())
}

pub(super) fn one_hot(c: &OpContext<'_>, out: &mut [Tensor]) -> OpResult {
    let indices = c.arg("indices")?;
    let iv = indices
        .as_i32()
        .ok_or_else(|| OpError::Invalid("parameter `indices` must be an integer tensor".into()))?;
    let n = usize::try_from(c.int("one_hot_vector_size", 0)?).unwrap_or(0);
    let axis = super::shape::axis(c.int("axis", -1)?, indices.rank() + 1)?;
    let mut shape = indices.shape.clone();
    shape.insert(axis, n);
    count(&shape)?;
    let (outer, _, inner) = around(&shape, axis);
    let place = |o: usize, i: usize| {
        let index = iv[o * inner + i];
        // Negative indices count from the end; for any other index outside the vector all elements are `off_value`.
        let at = if index < 0 { i64::from(index) + n as i64 } else { i64::from(index) };
        usize::try_from(at).ok().filter(|&k| k < n).map(|k| (o * n + k) * inner + i)
    };
    let places = || (0..outer).flat_map(move |o| (0..inner).filter_map(move |i| place(o, i)));
    fn write<T: TensorElement>(y: &mut [T], (on, off): (T, T), places: impl Iterator<Item = usize>) {
        y.fill(off);
        places.for_each(|p| y[p] = on);
    }
    let (on, off) = ("on_value", "off_value");
    if c.outputs.first().is_some_and(|t| t.dtype.is_float()) {
        write(out[0].reset_f32(&shape), (c.float(on, 1.0)?, c.float(off, 0.0)?), places());
    } else if let Some(Tensor { data: Data::Bool(_), .. }) = c.get(on) {
        write(out[0].reset_bool(&shape), (c.bool(on, true)?, c.bool(off, false)?), places());
    } else {
        write(out[0].reset_i32(&shape), (c.int(on, 1)?, c.int(off, 0)?), places());
    }
    Ok(())
}

/// Calls `each` with outer index, inner index and the positions along the axis in order of their values; equal values keep order.
fn order(x: &Tensor, axis: usize, ascending: bool, mut each: impl FnMut(usize, usize, &[usize])) -> OpResult {
    let values = numbers(x, "ordering")?;
    let (outer, n, inner) = around(&x.shape, axis);
    let mut positions: Vec<usize> = Vec::with_capacity(n);
    for o in 0..outer {
        for i in 0..inner {
            let at = |k: usize| values[(o * n + k) * inner + i];
            positions.clear();
            positions.extend(0..n);
            positions
                .sort_by(|&a, &b| if ascending { at(a).total_cmp(&at(b)) } else { at(b).total_cmp(&at(a)) });
            each(o, i, &positions);
        }
    }
    Ok(())
}

pub(super) fn argsort(c: &OpContext<'_>, out: &mut [Tensor]) -> OpResult {
    let x = c.arg("x")?;
    let axis = super::shape::axis(c.int("axis", -1)?, x.rank())?;
    let (_, n, inner) = around(&x.shape, axis);
    let y = out[0].reset_i32(&x.shape);
    order(x, axis, c.bool("ascending", false)?, |o, i, positions| {
        for (k, &p) in positions.iter().enumerate() {
            y[(o * n + k) * inner + i] = p as i32;
        }
    })
}

pub(super) fn topk(c: &OpContext<'_>, out: &mut [Tensor]) -> OpResult {
    let x = c.arg("x")?;
    let axis = super::shape::axis(c.int("axis", -1)?, x.rank())?;
    let (_, n, inner) = around(&x.shape, axis);
    let k = match c.int("k", 1)? {
        -1 => n,
        k => usize::try_from(k).unwrap_or(usize::MAX),
    };
    if k > n {
        return invalid(format!("the {k} largest of {n}"));
    }
    let mut shape = x.shape.clone();
    shape[axis] = k;
    let mut indices = vec![0i32; count(&shape)?];
    order(x, axis, c.bool("ascending", false)?, |o, i, positions| {
        // Without `sort` any order is right; Core ML's is that of the values.
        for (j, &p) in positions[..k].iter().enumerate() {
            indices[(o * k + j) * inner + i] = p as i32;
        }
    })?;
    let from = |at: usize| {
        let (o, i) = (at / (k * inner).max(1), at % inner.max(1));
        (o * n + indices[at] as usize) * inner + i
    };
    copy_slices(x, &shape, 1, &(0..indices.len()).map(from).collect::<Vec<_>>(), &mut out[0])?;
    if let Some(out) = out.get_mut(1) {
        out.reset_i32(&shape).copy_from_slice(&indices);
    }
    Ok(())
}

pub(super) fn pad(c: &OpContext<'_>, out: &mut [Tensor]) -> OpResult {
    let x = c.arg("x")?;
    let pad = c.ints("pad")?.unwrap_or(&[]);
    let rank = x.rank();
    if pad.len() % 2 != 0 || pad.len() / 2 > rank {
        return invalid(format!("{} paddings for a tensor of rank {rank}", pad.len()));
    }
    let first = rank - pad.len() / 2;
    let mut amounts = vec![(0i64, 0i64); rank];
    for (i, p) in pad.chunks(2).enumerate() {
        amounts[first + i] = (i64::from(p[0]), i64::from(p[1]));
    }
    let size = |(&d, &(a, b)): (&usize, &(i64, i64))| usize::try_from(d as i64 + a + b);
    let shape: Result<Vec<usize>, _> = x.shape.iter().zip(&amounts).map(size).collect();
    let shape = shape.map_err(|_| OpError::Invalid(format!("padding {pad:?} of shape {:?}", x.shape)))?;
    count(&shape)?;
    let mode = c.str("mode", "constant")?;
    // For each axis, the input position that each output position reads; `None` is the constant.
    let mut reads: Vec<Vec<Option<usize>>> = Vec::new();
    for i in 0..rank {
        let n = x.shape[i] as i64;
        // The position of an element takes the memory of four elements.
        count(&[4, shape[i]])?;
        let mut axis = Vec::with_capacity(shape[i]);
        for o in 0..shape[i] as i64 {
            let at = o - amounts[i].0;
            axis.push(match mode {
                _ if (0..n).contains(&at) => Some(at as usize),
                "constant" => None,
                "replicate" if n > 0 => Some(at.clamp(0, n - 1) as usize),
                "reflect" if n > 1 => {
                    let mirrored = if at < 0 { -at } else { 2 * (n - 1) - at };
                    if !(0..n).contains(&mirrored) {
                        return invalid(format!("reflecting {pad:?} over shape {:?}", x.shape));
                    }
                    Some(mirrored as usize)
                }
                other => return invalid(format!("padding mode `{other}` of shape {:?}", x.shape)),
            });
        }
        reads.push(axis);
    }
    let own = dense_strides(&x.shape);
    let place = |mut at: usize, out_strides: &[usize]| {
        let mut from = 0;
        for i in 0..rank {
            from += reads[i][at / out_strides[i]]? * own[i];
            at %= out_strides[i];
        }
        Some(from)
    };
    let out_strides = dense_strides(&shape);
    with_elements!(
        F32 | I32 | Bool,
        &x.data,
        |v| {
            let constant = c.get("constant_val").and_then(|t| t.elements()?.first().copied());
            let value = constant.unwrap_or_default();
            let y = out[0].reset(&shape);
            y.iter_mut().enumerate().for_each(|(k, y)| *y = place(k, &out_strides).map_or(value, |p| v[p]));
        },
        return unsupported("strings")
    );
    Ok(())
}

/// Computes `quantize` and `dequantize`, with scale and zero point per tensor or along an axis.
pub(super) fn quantization(c: &OpContext<'_>, out: &mut [Tensor]) -> OpResult {
    let x = c.arg("input")?;
    let (scale_shape, scale) = c.f32s("scale")?;
    let zero = if c.get("zero_point").is_some() { c.numbers("zero_point")? } else { vec![0.0] };
    // Shape of `n` scales or zero points: a vector lies along the axis.
    let along = |n: usize| -> OpResult<Vec<usize>> {
        let mut shape = vec![1; x.rank()];
        if n > 1 {
            let axis = super::shape::axis(c.int("axis", i32::MAX)?, x.rank())?;
            if x.shape[axis] != n {
                return invalid(format!("{n} scales along axis {axis} of {:?}", x.shape));
            }
            shape[axis] = n;
        }
        Ok(shape)
    };
    if scale_shape.len() > 1 || scale.is_empty() || zero.is_empty() {
        return unsupported(format!("a scale of shape {scale_shape:?}"));
    }
    let scale_strides = repeated(&along(scale.len())?, &x.shape)?;
    let zero_strides = repeated(&along(zero.len())?, &x.shape)?;
    let own = dense_strides(&x.shape);
    let at = |k: usize, strides: &[usize]| {
        own.iter().zip(&x.shape).zip(strides).map(|((s, d), t)| k / s % d * t).sum::<usize>()
    };
    if c.op == "dequantize" {
        let v = x.as_i32().ok_or_else(|| OpError::Invalid("parameter `input` must be integers".into()))?;
        let y = out[0].reset_f32(&x.shape);
        for (k, y) in y.iter_mut().enumerate() {
            *y = (v[k] as f32 - zero[at(k, &zero_strides)]) * scale[at(k, &scale_strides)];
        }
        return Ok(());
    }
    let v = x.as_f32().ok_or_else(|| OpError::Invalid("parameter `input` must be floats".into()))?;
    let (low, high) = match c.outputs.first().map(|t| t.dtype) {
        Some(DataType::UInt8) => (0.0, 255.0),
        Some(DataType::Int4) => (-8.0, 7.0),
        Some(DataType::UInt4) => (0.0, 15.0),
        _ => (-128.0, 127.0),
    };
    let y = out[0].reset_i32(&x.shape);
    for (k, y) in y.iter_mut().enumerate() {
        let q = (v[k] / scale[at(k, &scale_strides)]).round_ties_even() + zero[at(k, &zero_strides)];
        *y = q.clamp(low, high) as i32;
    }
    Ok(())
}
