//! Ops that make, order, join and pad tensors.

use super::super::strided::{StridedLoops, copy_tensor_elements, dense_strides};
use super::operands::{OpContext, OpError, OpResult};
use super::scatter_gather::copy_runs;
use super::shape::{around, count, invalid, repeated, unsupported};
use crate::tensor::{Data, Tensor};
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
    fn join<T: Copy>(
        parts: &[&[T]],
        sizes: &[usize],
        outer: usize,
        interleave: Option<(usize, usize)>,
        out: &mut [T],
    ) {
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
    }
    let (outer, _, inner) = around(&first.shape, axis);
    let sizes: Vec<usize> = c.values.iter().map(|v| v.shape[axis] * inner).collect();
    let turns = interleave.then_some((first.shape[axis], inner));
    let mixed = || OpError::Invalid("values of different types".into());
    match &first.data {
        Data::F32(_) => {
            let parts: Option<Vec<&[f32]>> = c.values.iter().map(|v| v.as_f32()).collect();
            join(&parts.ok_or_else(mixed)?, &sizes, outer, turns, out[0].reset_f32(&shape));
        }
        Data::I32(_) => {
            let parts: Option<Vec<&[i32]>> = c.values.iter().map(|v| v.as_i32()).collect();
            join(&parts.ok_or_else(mixed)?, &sizes, outer, turns, out[0].reset_i32(&shape));
        }
        Data::Bool(_) => {
            let parts: Option<Vec<&[bool]>> = c.values.iter().map(|v| v.as_bool()).collect();
            join(&parts.ok_or_else(mixed)?, &sizes, outer, turns, out[0].reset_bool(&shape));
        }
        Data::Str(_) => return unsupported("strings"),
    }
    Ok(())
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
        copy_runs(x, &shape, size * inner, &places, out)?;
        from += size;
    }
    Ok(())
}

pub(super) fn tile(c: &OpContext<'_>, out: &mut [Tensor]) -> OpResult {
    let x = c.arg("x")?;
    let reps = c.ints("reps")?.unwrap_or(&[]);
    let reps: Option<Vec<usize>> = reps.iter().map(|&r| usize::try_from(r).ok()).collect();
    let reps = reps.filter(|r| r.len() == x.rank());
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
fn filled(value: Option<&Tensor>, shape: &[usize], dtype: DataType, out: &mut Tensor) -> OpResult {
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
        let v = c.required_ints("shape")?;
        let v: Option<Vec<usize>> = v.iter().map(|&n| usize::try_from(n).ok()).collect();
        v.ok_or_else(|| OpError::Invalid("a negative dimension".into()))?
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
    match &mut out[0].data {
        Data::F32(v) => v.iter_mut().enumerate().filter(|(k, _)| !keep(*k)).for_each(|(_, v)| *v = 0.0),
        Data::I32(v) => v.iter_mut().enumerate().filter(|(k, _)| !keep(*k)).for_each(|(_, v)| *v = 0),
        Data::Bool(v) => v.iter_mut().enumerate().filter(|(k, _)| !keep(*k)).for_each(|(_, v)| *v = false),
        Data::Str(_) => return unsupported("strings"),
    }
    Ok(())
}

pub(super) fn cumsum(c: &OpContext<'_>, out: &mut [Tensor]) -> OpResult {
    let x = c.arg("x")?;
    let axis = super::shape::axis(c.int("axis", 0)?, x.rank())?;
    let (exclusive, reverse) = (c.bool("exclusive", false)?, c.bool("reverse", false)?);
    let (outer, n, inner) = around(&x.shape, axis);
    let run = |get: &dyn Fn(usize) -> f64, put: &mut dyn FnMut(usize, f64)| {
        for o in 0..outer {
            for i in 0..inner {
                let mut sum = 0.0;
                for k in 0..n {
                    let k = if reverse { n - 1 - k } else { k };
                    let at = (o * n + k) * inner + i;
                    if exclusive {
                        put(at, sum);
                        sum += get(at);
                    } else {
                        sum += get(at);
                        put(at, sum);
                    }
                }
            }
        }
    };
    match &x.data {
        Data::F32(v) => {
            let y = out[0].reset_f32(&x.shape);
            run(&|k| f64::from(v[k]), &mut |k, s| y[k] = s as f32);
        }
        Data::I32(v) => {
            let y = out[0].reset_i32(&x.shape);
            run(&|k| f64::from(v[k]), &mut |k, s| y[k] = s as i64 as i32);
        }
        _ => return unsupported("cumsum of other than numbers"),
    }
    Ok(())
}

pub(super) fn non_zero(c: &OpContext<'_>, out: &mut [Tensor]) -> OpResult {
    let x = c.arg("x")?;
    let found: Vec<usize> = match &x.data {
        Data::F32(v) => (0..v.len()).filter(|&i| v[i] != 0.0).collect(),
        Data::I32(v) => (0..v.len()).filter(|&i| v[i] != 0).collect(),
        Data::Bool(v) => (0..v.len()).filter(|&i| v[i]).collect(),
        Data::Str(_) => return unsupported("strings"),
    };
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
    let float = c.outputs.first().is_some_and(|t| t.dtype.is_float());
    let place = |o: usize, i: usize| {
        let index = iv[o * inner + i];
        // Negative indices count from the end; for any other index outside the vector all elements are `off_value`.
        let at = if index < 0 { i64::from(index) + n as i64 } else { i64::from(index) };
        usize::try_from(at).ok().filter(|&k| k < n).map(|k| (o * n + k) * inner + i)
    };
    let places = || (0..outer).flat_map(move |o| (0..inner).filter_map(move |i| place(o, i)));
    if float {
        let (on, off) = (c.float("on_value", 1.0)?, c.float("off_value", 0.0)?);
        let y = out[0].reset_f32(&shape);
        y.fill(off);
        places().for_each(|p| y[p] = on);
    } else if let Some(Tensor { data: Data::Bool(_), .. }) = c.get("on_value") {
        let (on, off) = (c.bool("on_value", true)?, c.bool("off_value", false)?);
        let y = out[0].reset_bool(&shape);
        y.fill(off);
        places().for_each(|p| y[p] = on);
    } else {
        let (on, off) = (c.int("on_value", 1)?, c.int("off_value", 0)?);
        let y = out[0].reset_i32(&shape);
        y.fill(off);
        places().for_each(|p| y[p] = on);
    }
    Ok(())
}

/// Calls `each` with outer index, inner index and the positions along the axis in order of their values; equal values keep order.
fn order(x: &Tensor, axis: usize, ascending: bool, mut each: impl FnMut(usize, usize, &[usize])) -> OpResult {
    let values: Vec<f64> = match &x.data {
        Data::F32(v) => v.iter().map(|&v| f64::from(v)).collect(),
        Data::I32(v) => v.iter().map(|&v| f64::from(v)).collect(),
        _ => return unsupported("ordering other than numbers"),
    };
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
    match &x.data {
        Data::F32(v) => out[0].reset_f32(&shape).iter_mut().enumerate().for_each(|(at, y)| *y = v[from(at)]),
        Data::I32(v) => out[0].reset_i32(&shape).iter_mut().enumerate().for_each(|(at, y)| *y = v[from(at)]),
        _ => return unsupported("topk of other than numbers"),
    }
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
    let constant = c.get("constant_val");
    match &x.data {
        Data::F32(v) => {
            let value = constant.and_then(|t| t.as_f32()).and_then(|v| v.first().copied()).unwrap_or(0.0);
            let y = out[0].reset_f32(&shape);
            y.iter_mut().enumerate().for_each(|(k, y)| *y = place(k, &out_strides).map_or(value, |p| v[p]));
        }
        Data::I32(v) => {
            let value = constant.and_then(|t| t.as_i32()).and_then(|v| v.first().copied()).unwrap_or(0);
            let y = out[0].reset_i32(&shape);
            y.iter_mut().enumerate().for_each(|(k, y)| *y = place(k, &out_strides).map_or(value, |p| v[p]));
        }
        Data::Bool(v) => {
            let value = constant.and_then(|t| t.as_bool()).and_then(|v| v.first().copied()).unwrap_or(false);
            let y = out[0].reset_bool(&shape);
            y.iter_mut().enumerate().for_each(|(k, y)| *y = place(k, &out_strides).map_or(value, |p| v[p]));
        }
        Data::Str(_) => return unsupported("strings"),
    }
    Ok(())
}

/// Computes `quantize` and `dequantize`, with scale and zero point per tensor or along an axis.
pub(super) fn quantization(c: &OpContext<'_>, out: &mut [Tensor]) -> OpResult {
    let x = c.arg("input")?;
    let (scale_shape, scale) = c.f32s("scale")?;
    let zero: Vec<f32> = match c.get("zero_point").map(|t| &t.data) {
        None => vec![0.0],
        Some(Data::I32(v)) => v.iter().map(|&v| v as f32).collect(),
        Some(Data::F32(v)) => v.clone(),
        Some(_) => return invalid("parameter `zero_point` must be numbers"),
    };
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
