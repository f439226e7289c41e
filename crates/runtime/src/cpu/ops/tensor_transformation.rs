//! Ops that reshape, slice and move elements.

use super::super::strided::dense_strides;
use super::elementwise_unary::copy;
use super::operands::{OpContext, OpError, OpResult};
use super::scatter_gather::copy_slices;
use super::shape::{count, invalid, offsets};
use super::tensor_operation::{pad, rearrange};
use crate::tensor::{Tensor, with_elements};

pub(super) fn reshape(c: &OpContext<'_>, out: &mut [Tensor]) -> OpResult {
    let x = c.arg("x")?;
    let wanted = c.required_ints("shape")?;
    let mut shape = Vec::with_capacity(wanted.len());
    let mut inferred = None;
    for (i, &n) in wanted.iter().enumerate() {
        shape.push(match n {
            -1 if inferred.is_none() => {
                inferred = Some(i);
                1
            }
            // The dimension as far from the last one; 1 where there is none.
            0 => (x.rank() + i).checked_sub(wanted.len()).map_or(1, |k| x.shape[k]),
            n => usize::try_from(n).map_err(|_| OpError::Invalid(format!("shape {wanted:?}")))?,
        });
    }
    let known = count(&shape)?;
    if let Some(i) = inferred {
        if known == 0 || x.len() % known != 0 {
            return invalid(format!("shape {:?} into {wanted:?}", x.shape));
        }
        shape[i] = x.len() / known;
    } else if known != x.len() {
        return invalid(format!("shape {:?} into {wanted:?}", x.shape));
    }
    copy(x, &shape, &mut out[0]);
    Ok(())
}

pub(super) fn reshape_like(c: &OpContext<'_>, out: &mut [Tensor]) -> OpResult {
    let x = c.arg("x")?;
    let (begins, ends) = (c.ints("begins")?.unwrap_or(&[]), c.ints("ends")?.unwrap_or(&[]));
    let masks = c.arg("end_masks")?.as_bool().unwrap_or(&[]);
    let mut shape = Vec::new();
    for (i, r) in c.values.iter().enumerate() {
        let (Some(&b), Some(&e), Some(&m)) = (begins.get(i), ends.get(i), masks.get(i)) else {
            return invalid("begins, ends and end_masks are shorter than ref_tensors");
        };
        // Bounds are those of a slice in Python.
        let bound =
            |v: i32| if v < 0 { r.rank().saturating_sub(v.unsigned_abs() as usize) } else { v as usize };
        let end = if m { r.rank() } else { bound(e).min(r.rank()) };
        shape.extend(&r.shape[bound(b).min(end)..end]);
    }
    if count(&shape)? != x.len() {
        return invalid(format!("shape {:?} into {shape:?}", x.shape));
    }
    copy(x, &shape, &mut out[0]);
    Ok(())
}

/// Computes `expand_dims`, `squeeze` and `flatten2d`.
pub(super) fn reranked(c: &OpContext<'_>, out: &mut [Tensor]) -> OpResult {
    let x = c.arg("x")?;
    let shape = match c.op {
        "expand_dims" => {
            let axes = c.ints("axes")?.unwrap_or(&[]);
            let rank = x.rank() + axes.len();
            let axes: Vec<usize> =
                axes.iter().map(|&a| super::shape::axis(a, rank)).collect::<OpResult<_>>()?;
            let mut rest = x.shape.iter();
            (0..rank)
                .map(|i| if axes.contains(&i) { 1 } else { rest.next().copied().unwrap_or(1) })
                .collect::<Vec<_>>()
        }
        "squeeze" => {
            let ones = || (0..x.rank()).filter(|&i| x.shape[i] == 1).collect();
            let axes = super::shape::axes(c, x.rank())?.unwrap_or_else(ones);
            if let Some(&a) = axes.iter().find(|&&a| x.shape[a] != 1) {
                return invalid(format!("axis {a} of {:?} is not 1", x.shape));
            }
            x.shape.iter().enumerate().filter(|(i, _)| !axes.contains(i)).map(|(_, &d)| d).collect()
        }
        _ => {
            let axis = c.int("axis", 1)?;
            let axis = if axis == x.rank() as i32 { x.rank() } else { super::shape::axis(axis, x.rank())? };
            vec![x.shape[..axis].iter().product(), x.shape[axis..].iter().product()]
        }
    };
    if shape.iter().product::<usize>() != x.len() {
        return invalid(format!("axes for a tensor of shape {:?}", x.shape));
    }
    copy(x, &shape, &mut out[0]);
    Ok(())
}

pub(super) fn transpose(c: &OpContext<'_>, out: &mut [Tensor]) -> OpResult {
    let x = c.arg("x")?;
    let perm = c.ints("perm")?.unwrap_or(&[]);
    let perm: Vec<usize> = perm.iter().map(|&p| super::shape::axis(p, x.rank())).collect::<OpResult<_>>()?;
    let mut seen = vec![false; x.rank()];
    perm.iter().for_each(|&p| seen[p] = true);
    if perm.len() != x.rank() || seen.contains(&false) {
        return invalid(format!("{perm:?} is not a permutation of {} axes", x.rank()));
    }
    let own = dense_strides(&x.shape);
    let shape: Vec<usize> = perm.iter().map(|&p| x.shape[p]).collect();
    let strides: Vec<usize> = perm.iter().map(|&p| own[p]).collect();
    rearrange(x, &shape, &strides, &shape, &mut out[0]);
    Ok(())
}

/// A slice: the positions that it reads along each axis, and its shape.
struct Slice {
    places: Vec<Vec<usize>>,
    shape: Vec<usize>,
}

fn slice(c: &OpContext<'_>, x: &Tensor) -> OpResult<Slice> {
    let rank = x.rank();
    let get = |name: &str| -> OpResult<Vec<i32>> {
        let v = c.required_ints(name)?;
        if v.len() == rank {
            Ok(v.to_vec())
        } else {
            invalid(format!("{} values of `{name}` for rank {rank}", v.len()))
        }
    };
    let (begin, end) = (get("begin")?, get("end")?);
    let stride = if c.get("stride").is_some() { get("stride")? } else { vec![1; rank] };
    let mask = |name: &str| -> Vec<bool> {
        let v = c.get(name).and_then(Tensor::as_bool).unwrap_or(&[]);
        (0..rank).map(|i| v.get(i).copied().unwrap_or(false)).collect()
    };
    let (begin_mask, end_mask, squeeze_mask) = (mask("begin_mask"), mask("end_mask"), mask("squeeze_mask"));
    let (mut places, mut shape) = (Vec::new(), Vec::new());
    for i in 0..rank {
        let n = x.shape[i] as i64;
        let from_end = |v: i32| if v < 0 { i64::from(v) + n } else { i64::from(v) };
        if squeeze_mask[i] {
            let at = if begin_mask[i] { 0 } else { from_end(begin[i]) };
            if !(0..n).contains(&at) {
                return invalid(format!("index {} of axis {i} of size {n}", begin[i]));
            }
            places.push(vec![at as usize]);
            continue;
        }
        let step = i64::from(stride[i]);
        if step == 0 {
            return invalid("a stride of 0");
        }
        let (low, high) = if step > 0 { (0, n) } else { (-1, n - 1) };
        let b = match begin_mask[i] {
            true if step > 0 => 0,
            true => n - 1,
            false => from_end(begin[i]).clamp(low, high),
        };
        let e = match end_mask[i] {
            true if step > 0 => n,
            true => -1,
            false => from_end(end[i]).clamp(low, high),
        };
        let mut axis = Vec::new();
        let mut at = b;
        while (step > 0 && at < e) || (step < 0 && at > e) {
            axis.push(at as usize);
            at += step;
        }
        shape.push(axis.len());
        places.push(axis);
    }
    Ok(Slice { places, shape })
}

/// Makes room for the place of each element of a result, and counts both.
fn places_of(shape: &[usize]) -> OpResult<Vec<usize>> {
    let n = count(shape)?;
    // A place takes as much as two elements.
    count(&[n, 3])?;
    Ok(Vec::with_capacity(n))
}

fn read_slice(x: &Tensor, s: &Slice, out: &mut Tensor) -> OpResult {
    places_of(&s.shape)?;
    copy_slices(x, &s.shape, 1, &offsets(&s.places, &dense_strides(&x.shape)), out)
}

/// Reads the positions `places` along each axis.
pub(super) fn read_places(x: &Tensor, places: Vec<Vec<usize>>, out: &mut Tensor) -> OpResult {
    let shape = places.iter().map(Vec::len).collect();
    read_slice(x, &Slice { places, shape }, out)
}

pub(super) fn slice_by_index(c: &OpContext<'_>, out: &mut [Tensor]) -> OpResult {
    let x = c.arg("x")?;
    let s = slice(c, x)?;
    read_slice(x, &s, &mut out[0])
}

pub(super) fn slice_by_size(c: &OpContext<'_>, out: &mut [Tensor]) -> OpResult {
    let x = c.arg("x")?;
    let (begin, size) = (c.ints("begin")?.unwrap_or(&[]), c.ints("size")?.unwrap_or(&[]));
    if begin.len() != x.rank() || size.len() != x.rank() {
        return invalid(format!("begin and size for a tensor of rank {}", x.rank()));
    }
    let mut s = Slice { places: Vec::new(), shape: Vec::new() };
    for i in 0..x.rank() {
        let n = x.shape[i] as i64;
        let b = if begin[i] < 0 { i64::from(begin[i]) + n } else { i64::from(begin[i]) };
        let e = if size[i] == -1 { n } else { b + i64::from(size[i]) };
        if b < 0 || e > n || e < b {
            return invalid(format!("{} elements from {} on axis {i} of size {n}", size[i], begin[i]));
        }
        s.places.push((b as usize..e as usize).collect());
        s.shape.push((e - b) as usize);
    }
    read_slice(x, &s, &mut out[0])
}

pub(super) fn slice_update(c: &OpContext<'_>, out: &mut [Tensor]) -> OpResult {
    let (x, update) = (c.arg("x")?, c.arg("update")?);
    let s = slice(c, x)?;
    if update.shape != s.shape {
        return invalid(format!("an update of shape {:?} for a slice of shape {:?}", update.shape, s.shape));
    }
    copy(x, &x.shape, &mut out[0]);
    let places = offsets(&s.places, &dense_strides(&x.shape));
    let data = (&mut out[0].data, &update.data);
    with_elements!(
        F32 | I32 | Bool,
        (data.0, data.1),
        |o, u| places.iter().zip(u).for_each(|(&p, u)| o[p] = *u),
        return invalid("an update of another type")
    );
    Ok(())
}

pub(super) fn reverse(c: &OpContext<'_>, out: &mut [Tensor]) -> OpResult {
    let x = c.arg("x")?;
    let axes = super::shape::axes(c, x.rank())?.unwrap_or_else(|| (0..x.rank()).collect());
    let places =
        |(i, &d): (usize, &usize)| if axes.contains(&i) { (0..d).rev().collect() } else { (0..d).collect() };
    let s = Slice { places: x.shape.iter().enumerate().map(places).collect(), shape: x.shape.clone() };
    read_slice(x, &s, &mut out[0])
}

pub(super) fn reverse_sequence(c: &OpContext<'_>, out: &mut [Tensor]) -> OpResult {
    let x = c.arg("x")?;
    let lengths = c.ints("lengths")?.unwrap_or(&[]);
    let seq = super::shape::axis(c.int("seq_axis", 1)?, x.rank())?;
    let batch = super::shape::axis(c.int("batch_axis", 0)?, x.rank())?;
    let n = x.shape[seq];
    if lengths.len() != x.shape[batch] || lengths.iter().any(|&l| l < 0 || l as usize > n) {
        return invalid(format!("lengths {lengths:?} for shape {:?}", x.shape));
    }
    let own = dense_strides(&x.shape);
    let from = |k: usize| {
        let (b, s) = (k / own[batch] % x.shape[batch], k / own[seq] % n);
        let l = lengths[b] as usize;
        if s < l { k - s * own[seq] + (l - 1 - s) * own[seq] } else { k }
    };
    let mut places = places_of(&x.shape)?;
    places.extend((0..x.len()).map(from));
    copy_slices(x, &x.shape, 1, &places, &mut out[0])
}

pub(super) fn sliding_windows(c: &OpContext<'_>, out: &mut [Tensor]) -> OpResult {
    let x = c.arg("x")?;
    let axis = super::shape::axis(c.int("axis", i32::MAX)?, x.rank())?;
    let size = usize::try_from(c.int("size", 0)?).unwrap_or(0);
    let stride = usize::try_from(c.int("stride", 1)?).unwrap_or(0);
    if size == 0 || stride == 0 || size > x.shape[axis] {
        return invalid(format!("windows of {size} every {stride} over {}", x.shape[axis]));
    }
    let own = dense_strides(&x.shape);
    let (mut shape, mut strides) = (x.shape.clone(), own.clone());
    shape[axis] = (x.shape[axis] - size) / stride + 1;
    strides[axis] = own[axis] * stride;
    shape.insert(axis + 1, size);
    strides.insert(axis + 1, own[axis]);
    count(&shape)?;
    rearrange(x, &shape, &strides, &shape, &mut out[0]);
    Ok(())
}

/// Moves blocks between channels and space, for inputs `[N, C, H, W]`: `depth_to_space`, `pixel_shuffle` and their inverses.
pub(super) fn blocks(c: &OpContext<'_>, out: &mut [Tensor]) -> OpResult {
    let x = c.arg("x")?;
    let &[n, ch, h, w] = x.shape.as_slice() else {
        return invalid(format!("input of shape {:?}, expected rank 4", x.shape));
    };
    let param = match c.op {
        "depth_to_space" | "space_to_depth" => "block_size",
        "pixel_shuffle" => "upscale_factor",
        _ => "downscale_factor",
    };
    let b = usize::try_from(c.int(param, 0)?).unwrap_or(0);
    if b == 0 || b > 1 << 16 {
        return invalid(format!("parameter `{param}` must be positive"));
    }
    let to_space = matches!(c.op, "depth_to_space" | "pixel_shuffle");
    if to_space && ch % (b * b) != 0 || !to_space && (h % b != 0 || w % b != 0) {
        return invalid(format!("shape {:?} in blocks of {b}", x.shape));
    }
    // The input's shape with its blocks as axes of their own, the order in which the output reads these axes, and its shape.
    let (dims, order, shape) = match c.op {
        "depth_to_space" => {
            ([n, b, b, ch / (b * b), h, w], [0, 3, 4, 1, 5, 2], [n, ch / (b * b), h * b, w * b])
        }
        "pixel_shuffle" => {
            ([n, ch / (b * b), b, b, h, w], [0, 1, 4, 2, 5, 3], [n, ch / (b * b), h * b, w * b])
        }
        "space_to_depth" => ([n, ch, h / b, b, w / b, b], [0, 3, 5, 1, 2, 4], [n, ch * b * b, h / b, w / b]),
        _ => ([n, ch, h / b, b, w / b, b], [0, 1, 3, 5, 2, 4], [n, ch * b * b, h / b, w / b]),
    };
    let own = dense_strides(&dims);
    let (read, strides): (Vec<usize>, Vec<usize>) = order.iter().map(|&o| (dims[o], own[o])).unzip();
    rearrange(x, &read, &strides, &shape, &mut out[0]);
    Ok(())
}

/// Computes `space_to_batch` and `batch_to_space`, for inputs `[N, C, spatial..]`.
pub(super) fn batches(c: &OpContext<'_>, out: &mut [Tensor]) -> OpResult {
    let x = c.arg("x")?;
    let to_batch = c.op == "space_to_batch";
    let block = c.ints("block_shape")?.unwrap_or(&[]);
    let edges = c.ints(if to_batch { "paddings" } else { "crops" })?.unwrap_or(&[]);
    let m = block.len();
    if x.rank() != m + 2
        || edges.len() != 2 * m
        || block.iter().any(|&b| b < 1)
        || edges.iter().any(|&e| e < 0)
    {
        return invalid(format!("block_shape {block:?} and {edges:?} for shape {:?}", x.shape));
    }
    let block: Vec<usize> = block.iter().map(|&b| b as usize).collect();
    // Sizes that overflow are refused when the elements of the result are counted.
    let factor = block.iter().fold(1usize, |n, &b| n.saturating_mul(b));
    let fits = || OpError::Invalid(format!("shape {:?} in blocks of {block:?}", x.shape));
    let mut moved = Tensor::default();
    if to_batch {
        // The axes of a block go in front of the batch.
        let pads = Tensor::i32(&[edges.len()], edges.to_vec());
        let inputs = [("x", x), ("pad", &pads)];
        pad(&OpContext { inputs: &inputs, ..*c }, std::slice::from_mut(&mut moved))?;
        if !moved.shape[2..].iter().zip(&block).all(|(n, b)| n.is_multiple_of(*b)) {
            return Err(fits());
        }
        let own = dense_strides(&moved.shape);
        let (batch, spatial) = moved.shape.split_at(2);
        let blocks: Vec<usize> = spatial.iter().zip(&block).map(|(n, b)| n / b).collect();
        let steps: Vec<usize> = own[2..].iter().zip(&block).map(|(s, b)| s.saturating_mul(*b)).collect();
        let shape = [&[batch[0].saturating_mul(factor), batch[1]], blocks.as_slice()].concat();
        count(&shape)?;
        let (dims, strides) = ([&block, batch, &blocks].concat(), [&own[2..], &own[..2], &steps].concat());
        rearrange(&moved, &dims, &strides, &shape, &mut out[0]);
        return Ok(());
    }
    if x.shape[0] % factor != 0 {
        return Err(fits());
    }
    let own = dense_strides(&x.shape);
    let mut shape = vec![x.shape[0] / factor, x.shape[1]];
    let (mut dims, mut strides) = (shape.clone(), own[..2].to_vec());
    let mut kept: Vec<Vec<usize>> = shape.iter().map(|&n| (0..n).collect()).collect();
    for i in 0..m {
        let size = x.shape[i + 2].saturating_mul(block[i]);
        let (before, after) = (edges[2 * i] as usize, edges[2 * i + 1] as usize);
        if before + after > size {
            return invalid("crops larger than the input");
        }
        // A place takes the memory of two elements.
        count(&[2, size])?;
        kept.push((before..size - after).collect());
        shape.push(size);
        // An element of a block lies in a batch of its own.
        dims.extend([x.shape[i + 2], block[i]]);
        let step = own[0].saturating_mul(shape[0]);
        strides.extend([own[i + 2], block[i + 1..].iter().fold(step, |n, &b| n.saturating_mul(b))]);
    }
    count(&shape)?;
    rearrange(x, &dims, &strides, &shape, &mut moved);
    read_places(&moved, kept, &mut out[0])
}
