//! Types of ops that look elements up or put them in order.

use super::context::{Context, Inferred, normalize_axis};
use super::infer::{dtype_named, one};
use crate::mil::{DataType, Dim, TensorType, ValueType};

fn int_indices(c: &Context<'_>) -> Result<TensorType, String> {
    let t = c.tensor("indices")?;
    if t.dtype.is_int() {
        Ok(t.clone())
    } else {
        Err(format!("parameter `indices` is of {}, expected integers", t.dtype))
    }
}

pub(super) fn gather(c: &Context<'_>) -> Inferred {
    let (x, indices) = (c.tensor("x")?, int_indices(c)?);
    let axis = c.axis("axis", 0, x.rank())?;
    let batch = usize::try_from(c.int("batch_dims", 0)?).map_err(|_| "negative batch_dims")?;
    if batch > axis || batch > indices.rank() {
        return Err(format!("batch_dims {batch} with axis {axis} and indices of rank {}", indices.rank()));
    }
    let mut dims = x.dims[..axis].to_vec();
    dims.extend_from_slice(&indices.dims[batch..]);
    dims.extend_from_slice(&x.dims[axis + 1..]);
    // A scalar index into a vector gives a scalar.
    if dims.is_empty() && indices.rank() == 0 && x.rank() == 1 {
        return one(x.dtype, vec![]);
    }
    one(x.dtype, dims)
}

pub(super) fn gather_along_axis(c: &Context<'_>) -> Inferred {
    let (x, indices) = (c.tensor("x")?, int_indices(c)?);
    let axis = c.axis("axis", 0, x.rank())?;
    if indices.rank() != x.rank() {
        return Err(format!("indices of rank {} for a tensor of rank {}", indices.rank(), x.rank()));
    }
    for (i, (a, b)) in x.dims.iter().zip(&indices.dims).enumerate() {
        if i != axis && a != b && a.fixed().is_some() && b.fixed().is_some() {
            return Err(format!("sizes {a} and {b} on axis {i}"));
        }
    }
    one(x.dtype, indices.dims)
}

pub(super) fn gather_nd(c: &Context<'_>) -> Inferred {
    let (x, indices) = (c.tensor("x")?, int_indices(c)?);
    let batch = usize::try_from(c.int("batch_dims", 0)?).map_err(|_| "negative batch_dims")?;
    let last = indices.dims.last().and_then(|d| d.fixed()).ok_or("indices of unknown depth")? as usize;
    if batch + last > x.rank() || batch >= indices.rank() {
        return Err(format!(
            "indices of depth {last} with batch_dims {batch} into a tensor of rank {}",
            x.rank()
        ));
    }
    let mut dims = indices.dims[..indices.rank() - 1].to_vec();
    dims.extend_from_slice(&x.dims[batch + last..]);
    one(x.dtype, dims)
}

/// Infers the type of scatter ops: the type of `data`.
pub(super) fn scatter(c: &Context<'_>) -> Inferred {
    int_indices(c)?;
    let data = c.tensor("data")?;
    c.same_dtype("updates", data.dtype)?;
    one(data.dtype, data.dims.clone())
}

pub(super) fn non_zero(c: &Context<'_>) -> Inferred {
    one(DataType::Int32, vec![Dim::Unknown, Dim::Fixed(c.rank("x")? as u64)])
}

pub(super) fn one_hot(c: &Context<'_>) -> Inferred {
    let indices = int_indices(c)?;
    let axis = c.int("axis", -1)?;
    let axis = normalize_axis(axis, indices.rank() + 1).ok_or_else(|| format!("axis {axis}"))?;
    let size = match c.ints("one_hot_vector_size").as_deref() {
        Some([n]) => Dim::Fixed(u64::try_from(*n).map_err(|_| "negative one_hot_vector_size")?),
        _ => Dim::Unknown,
    };
    let dtype = match c.has("on_value") {
        true => c.tensor("on_value")?.dtype,
        false => DataType::Int32,
    };
    let mut dims = indices.dims;
    dims.insert(axis, size);
    one(dtype, dims)
}

pub(super) fn argsort(c: &Context<'_>) -> Inferred {
    let x = c.tensor("x")?;
    c.axis("axis", -1, x.rank())?;
    let dtype = c.text("output_dtype")?.map_or(Ok(DataType::Int32), dtype_named)?;
    one(dtype, x.dims.clone())
}

pub(super) fn topk(c: &Context<'_>) -> Inferred {
    let x = c.tensor("x")?;
    let axis = c.axis("axis", -1, x.rank())?;
    let k = match c.has("k").then(|| c.ints("k")) {
        None => Dim::Fixed(1),
        Some(Some(k)) if k.len() == 1 && k[0] == -1 => x.dims[axis],
        Some(Some(k)) if k.len() == 1 => {
            Dim::Fixed(u64::try_from(k[0]).map_err(|_| format!("k of {}", k[0]))?)
        }
        Some(_) => Dim::Unknown,
    };
    if let (Dim::Fixed(k), Dim::Fixed(n)) = (k, x.dims[axis])
        && k > n
    {
        return Err(format!("the {k} largest of {n}"));
    }
    let mut dims = x.dims.clone();
    dims[axis] = k;
    let values = ValueType::Tensor(TensorType { dtype: x.dtype, dims: dims.clone() });
    if !c.bool("return_indices", true)? {
        return Ok(vec![values]);
    }
    let dtype = c.text("output_indices_dtype")?.map_or(Ok(DataType::Int32), dtype_named)?;
    Ok(vec![values, ValueType::Tensor(TensorType { dtype, dims })])
}
