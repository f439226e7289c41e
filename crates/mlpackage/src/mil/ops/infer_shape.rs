//! Types of ops that move elements: reshape, slices, pads, joins.

use super::context::{Checked, Context, Inferred, normalize_axis, product};
use super::infer::one;
use crate::mil::{DataType, Dim, TensorType, ValueType};

pub(super) fn dim(n: i64) -> Checked<Dim> {
    u64::try_from(n).map(Dim::Fixed).map_err(|_| format!("negative dimension {n}"))
}

pub(super) fn reshape(c: &Context<'_>) -> Inferred {
    let x = c.tensor("x")?;
    let Some(shape) = c.ints("shape") else {
        // The shape's length is known even where its values are not.
        return one(x.dtype, filled_dims(c)?);
    };
    let mut dims = Vec::new();
    let mut inferred = None;
    for (i, &n) in shape.iter().enumerate() {
        dims.push(match n {
            -1 if inferred.is_none() => {
                inferred = Some(i);
                Dim::Unknown
            }
            -1 => return Err("two dimensions of -1".into()),
            // The dimension as far from the last one; 1 where there is none.
            0 => (x.rank() + i).checked_sub(shape.len()).map_or(Dim::Fixed(1), |k| x.dims[k]),
            n => dim(n)?,
        });
    }
    let total = product(&x.dims);
    if let Some(i) = inferred {
        let others = dims.iter().enumerate().filter(|(j, _)| *j != i).map(|(_, d)| *d).collect::<Vec<_>>();
        if let (Some(total), Some(known)) = (total, product(&others)) {
            if known == 0 || total % known != 0 {
                return Err(format!("{total} elements into {shape:?}"));
            }
            dims[i] = Dim::Fixed(total / known);
        }
    } else if let (Some(a), Some(b)) = (total, product(&dims))
        && a != b
    {
        return Err(format!("{a} elements into {shape:?}"));
    }
    one(x.dtype, dims)
}

pub(super) fn reshape_like(c: &Context<'_>) -> Inferred {
    let x = c.tensor("x")?;
    let refs = c.tensors("ref_tensors")?;
    let (begins, ends) = (c.const_ints("begins")?, c.const_ints("ends")?);
    let masks = c.bools("end_masks").ok_or("parameter `end_masks` must be bool constants")?;
    let mut dims = Vec::new();
    for (i, r) in refs.iter().enumerate() {
        let (Some(&b), Some(&e), Some(&m)) = (begins.get(i), ends.get(i), masks.get(i)) else {
            return Err("begins, ends and end_masks are shorter than ref_tensors".into());
        };
        // Bounds are those of a slice in Python.
        let bound = |v: i64| (if v < 0 { v + r.rank() as i64 } else { v }).clamp(0, r.rank() as i64) as usize;
        let end = if m { r.rank() } else { bound(e) };
        dims.extend_from_slice(&r.dims[bound(b).min(end)..end]);
    }
    if let (Some(a), Some(b)) = (product(&x.dims), product(&dims))
        && a != b
    {
        return Err(format!("{a} elements into {}", TensorType { dtype: x.dtype, dims }));
    }
    one(x.dtype, dims)
}

pub(super) fn transpose(c: &Context<'_>) -> Inferred {
    let x = c.tensor("x")?;
    let perm = c.axes("perm", x.rank())?;
    let mut seen = vec![false; x.rank()];
    perm.iter().for_each(|&p| seen[p] = true);
    if perm.len() != x.rank() || seen.contains(&false) {
        return Err(format!("{perm:?} is not a permutation of {} axes", x.rank()));
    }
    one(x.dtype, perm.iter().map(|&p| x.dims[p]).collect())
}

pub(super) fn expand_dims(c: &Context<'_>) -> Inferred {
    let x = c.tensor("x")?;
    let axes = c.const_ints("axes")?;
    let rank = x.rank() + axes.len();
    let axes: Option<Vec<usize>> = axes.iter().map(|&a| normalize_axis(a, rank)).collect();
    let axes = axes.ok_or_else(|| format!("parameter `axes` for a result of rank {rank}"))?;
    let mut rest = x.dims.iter();
    let dims: Vec<Dim> = (0..rank)
        .map(
            |i| if axes.contains(&i) { Dim::Fixed(1) } else { rest.next().copied().unwrap_or(Dim::Fixed(1)) },
        )
        .collect();
    if rest.next().is_some() {
        return Err("parameter `axes` names an axis twice".into());
    }
    one(x.dtype, dims)
}

pub(super) fn squeeze(c: &Context<'_>) -> Inferred {
    let x = c.tensor("x")?;
    let axes = if c.has("axes") {
        c.axes("axes", x.rank())?
    } else {
        (0..x.rank()).filter(|&i| x.dims[i] == Dim::Fixed(1)).collect()
    };
    if let Some(&a) = axes.iter().find(|&&a| !matches!(x.dims[a], Dim::Fixed(1) | Dim::Unknown)) {
        return Err(format!("axis {a} has size {}", x.dims[a]));
    }
    one(x.dtype, x.dims.iter().enumerate().filter(|(i, _)| !axes.contains(i)).map(|(_, d)| *d).collect())
}

/// Computes the shape of `x[begin:end:stride]` with masks; a size that is known only at run time is `Dim::Unknown`.
pub(super) fn sliced(c: &Context<'_>, x: &TensorType) -> Checked<Vec<Dim>> {
    let rank = x.rank();
    let mask = |param: &str| c.bools(param).unwrap_or_default();
    let (begin_mask, end_mask, squeeze_mask) = (mask("begin_mask"), mask("end_mask"), mask("squeeze_mask"));
    let flag = |m: &[bool], i: usize| m.get(i).copied().unwrap_or(false);
    let strides = if c.has("stride") { c.ints("stride") } else { Some(vec![1; rank]) };
    let (begin, end) = (c.ints("begin"), c.ints("end"));
    for (what, v) in [("begin", &begin), ("end", &end), ("stride", &strides)] {
        if v.as_ref().is_some_and(|v| v.len() != rank) {
            return Err(format!("parameter `{what}` for a tensor of rank {rank}"));
        }
    }
    let mut dims = Vec::new();
    for i in 0..rank {
        if flag(&squeeze_mask, i) {
            continue;
        }
        let stride = strides.as_ref().map(|s| s[i]);
        if stride == Some(0) {
            return Err("a stride of 0".into());
        }
        let whole = flag(&begin_mask, i) && flag(&end_mask, i);
        if whole && matches!(stride, Some(1 | -1)) {
            dims.push(x.dims[i]);
            continue;
        }
        let known = |masked: bool, v: &Option<Vec<i64>>| {
            if masked { Some(None) } else { v.as_ref().map(|v| Some(v[i])) }
        };
        let bounds =
            (known(flag(&begin_mask, i), &begin), known(flag(&end_mask, i), &end), stride, x.dims[i].fixed());
        dims.push(match bounds {
            (Some(b), Some(e), Some(s), Some(n)) => Dim::Fixed(slice_len(n, b, e, s)),
            _ => Dim::Unknown,
        });
    }
    Ok(dims)
}

/// Computes the number of elements of the Python slice `[begin:end:stride]` of a sequence of `n` elements.
pub(crate) fn slice_len(n: u64, begin: Option<i64>, end: Option<i64>, stride: i64) -> u64 {
    let n = i128::from(n);
    let stride = i128::from(stride);
    let place = |v: i64| if v < 0 { i128::from(v) + n } else { i128::from(v) };
    let (low, high) = if stride > 0 { (0, n) } else { (-1, n - 1) };
    let b = begin.map_or(if stride > 0 { 0 } else { n - 1 }, |v| place(v).clamp(low, high));
    let e = end.map_or(if stride > 0 { n } else { -1 }, |v| place(v).clamp(low, high));
    let span = if stride > 0 { e - b } else { b - e };
    if span <= 0 { 0 } else { ((span + stride.abs() - 1) / stride.abs()) as u64 }
}

pub(super) fn slice_by_index(c: &Context<'_>) -> Inferred {
    let x = c.tensor("x")?;
    one(x.dtype, sliced(c, x)?)
}

pub(super) fn slice_update(c: &Context<'_>) -> Inferred {
    let (x, update) = (c.tensor("x")?, c.tensor("update")?);
    c.same_dtype("update", x.dtype)?;
    let target = sliced(c, x)?;
    let fits = target.len() == update.rank()
        && target.iter().zip(&update.dims).all(|(a, b)| a == b || *a == Dim::Unknown || *b == Dim::Unknown);
    if !fits {
        let target = TensorType { dtype: x.dtype, dims: target };
        return Err(format!("an update of type {update} for a slice of type {target}"));
    }
    one(x.dtype, x.dims.clone())
}

pub(super) fn slice_by_size(c: &Context<'_>) -> Inferred {
    let x = c.tensor("x")?;
    let rank = x.rank();
    let Some(size) = c.ints("size") else { return one(x.dtype, vec![Dim::Unknown; rank]) };
    let begin = c.ints("begin");
    if size.len() != rank || begin.as_ref().is_some_and(|b| b.len() != rank) {
        return Err(format!("begin and size for a tensor of rank {rank}"));
    }
    let mut dims = Vec::new();
    for i in 0..rank {
        dims.push(match (size[i], begin.as_ref().map(|b| b[i]), x.dims[i].fixed()) {
            (-1, Some(b), Some(n)) => dim(n as i64 - if b < 0 { b + n as i64 } else { b })?,
            (-1, _, _) => Dim::Unknown,
            (s, b, n) => {
                if let (Some(b), Some(n)) = (b, n)
                    && (if b < 0 { b + n as i64 } else { b })
                        .checked_add(s)
                        .is_none_or(|end| end < 0 || end > n as i64)
                {
                    return Err(format!("{s} elements from {b} on axis {i} of size {n}"));
                }
                dim(s)?
            }
        });
    }
    one(x.dtype, dims)
}

pub(super) fn concat(c: &Context<'_>) -> Inferred {
    let types = c.tensors("values")?;
    let first = types[0];
    if types.iter().all(|t| t.rank() == 0 && t.dtype == first.dtype) {
        // Scalars make a vector.
        return one(first.dtype, vec![Dim::Fixed(types.len() as u64)]);
    }
    let axis = c.axis("axis", i64::MAX, first.rank())?;
    let mut dims = first.dims.clone();
    for t in &types[1..] {
        if t.dtype != first.dtype || t.rank() != first.rank() {
            return Err(format!("values of types {first} and {t}"));
        }
        for i in 0..dims.len() {
            dims[i] = match (dims[i], t.dims[i]) {
                (Dim::Fixed(a), Dim::Fixed(b)) if i == axis => {
                    Dim::Fixed(a.checked_add(b).ok_or("size overflow")?)
                }
                _ if i == axis => Dim::Unknown,
                (Dim::Fixed(a), Dim::Fixed(b)) if a != b => {
                    return Err(format!("sizes {a} and {b} on axis {i}, which is not joined"));
                }
                (Dim::Unknown | Dim::Variadic, d) | (d, _) => d,
            };
        }
    }
    one(first.dtype, dims)
}

pub(super) fn split(c: &Context<'_>) -> Inferred {
    let x = c.tensor("x")?;
    let axis = c.axis("axis", i64::MAX, x.rank())?;
    let part = |d: Dim| {
        let mut dims = x.dims.clone();
        dims[axis] = d;
        ValueType::Tensor(TensorType { dtype: x.dtype, dims })
    };
    if let Some(sizes) = c.ints("split_sizes") {
        let parts: Vec<Dim> = sizes.iter().map(|&n| dim(n)).collect::<Checked<_>>()?;
        if let Some(n) = x.dims[axis].fixed()
            && parts.iter().try_fold(0u64, |s, d| s.checked_add(d.fixed()?)) != Some(n)
        {
            return Err(format!("split_sizes {sizes:?} of axis {axis} of size {n}"));
        }
        return Ok(parts.into_iter().map(part).collect());
    }
    let n = u64::try_from(c.int("num_splits", 0)?).ok().filter(|n| (1..=65536).contains(n));
    let n = n.ok_or("parameter `num_splits` must be a positive constant")?;
    let size = match x.dims[axis] {
        Dim::Fixed(size) if size % n != 0 => {
            return Err(format!("{n} equal parts of axis {axis} of size {size}"));
        }
        Dim::Fixed(size) => Dim::Fixed(size / n),
        open => open,
    };
    Ok((0..n).map(|_| part(size)).collect())
}

pub(super) fn stack(c: &Context<'_>) -> Inferred {
    let types = c.tensors("values")?;
    let first = types[0];
    if let Some(t) = types.iter().find(|t| t.dtype != first.dtype || t.rank() != first.rank()) {
        return Err(format!("values of types {first} and {t}"));
    }
    let axis = c.axis("axis", i64::MAX, first.rank() + 1)?;
    let mut dims = first.dims.clone();
    dims.insert(axis, Dim::Fixed(types.len() as u64));
    one(first.dtype, dims)
}

pub(super) fn tile(c: &Context<'_>) -> Inferred {
    let x = c.tensor("x")?;
    let Some(reps) = c.ints("reps") else { return one(x.dtype, vec![Dim::Unknown; x.rank()]) };
    if reps.len() != x.rank() {
        return Err(format!("{} repetitions for a tensor of rank {}", reps.len(), x.rank()));
    }
    let tiled = |(d, &r): (&Dim, &i64)| match (d, u64::try_from(r)) {
        (Dim::Fixed(n), Ok(r)) => n.checked_mul(r).map(Dim::Fixed).ok_or_else(|| "size overflow".to_string()),
        (&open, Ok(_)) => Ok(open),
        (_, Err(_)) => Err(format!("{r} repetitions")),
    };
    one(x.dtype, x.dims.iter().zip(&reps).map(tiled).collect::<Checked<_>>()?)
}

pub(super) fn pad(c: &Context<'_>) -> Inferred {
    let x = c.tensor("x")?;
    let Some(pad) = c.ints("pad") else { return one(x.dtype, vec![Dim::Unknown; x.rank()]) };
    if pad.len() % 2 != 0 || pad.len() / 2 > x.rank() {
        return Err(format!("{} paddings for a tensor of rank {}", pad.len(), x.rank()));
    }
    let mut dims = x.dims.clone();
    let first = x.rank() - pad.len() / 2;
    for (i, p) in pad.chunks(2).enumerate() {
        if let Dim::Fixed(n) = dims[first + i] {
            let size = i128::from(n) + i128::from(p[0]) + i128::from(p[1]);
            dims[first + i] =
                Dim::Fixed(u64::try_from(size).map_err(|_| format!("padding {p:?} of size {n}"))?);
        }
    }
    one(x.dtype, dims)
}

pub(super) fn flatten2d(c: &Context<'_>) -> Inferred {
    let x = c.tensor("x")?;
    let axis = c.int("axis", 1)?;
    let axis = if axis == x.rank() as i64 { x.rank() } else { c.axis("axis", 1, x.rank())? };
    let fold = |dims: &[Dim]| product(dims).map_or(Dim::Unknown, Dim::Fixed);
    one(x.dtype, vec![fold(&x.dims[..axis]), fold(&x.dims[axis..])])
}

pub(super) fn shape(c: &Context<'_>) -> Inferred {
    let dtype = c.text("output_dtype")?.map_or(Ok(DataType::Int32), super::infer::dtype_named)?;
    one(dtype, vec![Dim::Fixed(c.rank("x")? as u64)])
}

/// Returns the dimensions that the operand `shape` names, without what 0 and -1 stand for in `reshape`.
pub(super) fn filled_dims(c: &Context<'_>) -> Checked<Vec<Dim>> {
    match c.ints("shape") {
        Some(shape) => shape.iter().map(|&n| if n == -1 { Ok(Dim::Unknown) } else { dim(n) }).collect(),
        None => match c.tensor("shape")?.dims[..] {
            [Dim::Fixed(rank @ 0..=16)] => Ok(vec![Dim::Unknown; rank as usize]),
            [Dim::Unknown] => Ok(vec![Dim::Variadic]),
            _ => Err(format!("a shape of type {}", c.tensor("shape")?)),
        },
    }
}

pub(super) fn fill(c: &Context<'_>) -> Inferred {
    let dtype = if c.has("value") { c.tensor("value")?.dtype } else { DataType::Float32 };
    one(dtype, filled_dims(c)?)
}

pub(super) fn fill_like(c: &Context<'_>) -> Inferred {
    let dtype = if c.has("value") { c.tensor("value")?.dtype } else { DataType::Float32 };
    one(dtype, c.tensor("ref_tensor")?.dims.clone())
}

pub(super) fn range_1d(c: &Context<'_>) -> Inferred {
    let dtype = c.tensor("start")?.dtype;
    let length = match (c.ints("start"), c.ints("end"), c.ints("step")) {
        (Some(a), Some(b), Some(s)) if a.len() == 1 && b.len() == 1 && s.len() == 1 && s[0] != 0 => {
            let span = if s[0] > 0 { b[0] - a[0] } else { a[0] - b[0] };
            Dim::Fixed(span.max(0).unsigned_abs().div_ceil(s[0].unsigned_abs()))
        }
        _ => Dim::Unknown,
    };
    one(dtype, vec![length])
}

/// Infers the type of an op that moves blocks of `param` x `param` elements from channels to space (`to_space`) or back.
fn rearranged(c: &Context<'_>, param: &str, to_space: bool) -> Inferred {
    let x = c.tensor("x")?;
    let block = Some(c.count(param)? as u64).filter(|b| (1..=65536).contains(b));
    let block = block.ok_or_else(|| format!("parameter `{param}` must be a positive constant"))?;
    if x.rank() != 4 {
        return Err(format!("input of rank {}, expected 4", x.rank()));
    }
    let times = |d: Dim, n: u64| match d {
        Dim::Fixed(v) => v.checked_mul(n).map(Dim::Fixed).ok_or_else(|| "size overflow".to_string()),
        open => Ok(open),
    };
    let over = |d: Dim, n: u64| match d {
        Dim::Fixed(v) if v % n == 0 => Ok(Dim::Fixed(v / n)),
        Dim::Fixed(v) => Err(format!("size {v} is not a multiple of {n}")),
        open => Ok(open),
    };
    let d = &x.dims;
    let dims = if to_space {
        vec![d[0], over(d[1], block * block)?, times(d[2], block)?, times(d[3], block)?]
    } else {
        vec![d[0], times(d[1], block * block)?, over(d[2], block)?, over(d[3], block)?]
    };
    one(x.dtype, dims)
}

pub(super) fn depth_to_space(c: &Context<'_>) -> Inferred {
    rearranged(c, "block_size", true)
}

pub(super) fn space_to_depth(c: &Context<'_>) -> Inferred {
    rearranged(c, "block_size", false)
}

pub(super) fn pixel_shuffle(c: &Context<'_>) -> Inferred {
    rearranged(c, "upscale_factor", true)
}

pub(super) fn pixel_unshuffle(c: &Context<'_>) -> Inferred {
    rearranged(c, "downscale_factor", false)
}

/// Infers the type of `space_to_batch` and `batch_to_space`: `block_shape` for every axis but the first two, and a pair
/// of paddings or crops for each.
pub(super) fn batch_space(c: &Context<'_>) -> Inferred {
    let x = c.tensor("x")?;
    let block = c.const_ints("block_shape")?;
    let to_batch = c.has("paddings");
    let edges = c.const_ints(if to_batch { "paddings" } else { "crops" })?;
    if x.rank() != block.len() + 2 || edges.len() != 2 * block.len() || block.iter().any(|&b| b < 1) {
        return Err(format!("block_shape {block:?} for a tensor of rank {}", x.rank()));
    }
    let factor: i64 = block.iter().product();
    let mut dims = x.dims.clone();
    let map = |d: Dim, f: &dyn Fn(i64) -> Option<i64>| match d {
        Dim::Fixed(n) => {
            f(n as i64).map(dim).unwrap_or_else(|| Err(format!("size {n} does not fit the blocks")))
        }
        open => Ok(open),
    };
    let exact = |a: i64, b: i64| (a % b == 0).then_some(a / b);
    dims[0] = map(dims[0], &|n| if to_batch { n.checked_mul(factor) } else { exact(n, factor) })?;
    for (i, &b) in block.iter().enumerate() {
        let (low, high) = (edges[2 * i], edges[2 * i + 1]);
        dims[i + 2] = map(dims[i + 2], &|n| {
            if to_batch { exact(n + low + high, b) } else { n.checked_mul(b).map(|v| v - low - high) }
        })?;
    }
    one(x.dtype, dims)
}

pub(super) fn sliding_windows(c: &Context<'_>) -> Inferred {
    let x = c.tensor("x")?;
    let axis = c.axis("axis", i64::MAX, x.rank())?;
    let (size, stride) = (c.int("size", 0)?, c.int("stride", 1)?);
    if size < 1 || stride < 1 {
        return Err(format!("windows of {size} every {stride}"));
    }
    let mut dims = x.dims.clone();
    if let Dim::Fixed(n) = dims[axis] {
        let room = (n as i64)
            .checked_sub(size)
            .filter(|&r| r >= 0)
            .ok_or_else(|| format!("windows of {size} over {n}"))?;
        dims[axis] = Dim::Fixed((room / stride + 1) as u64);
    }
    dims.insert(axis + 1, dim(size)?);
    one(x.dtype, dims)
}
