//! Types of recurrent ops, lists and random numbers.

use super::context::{Checked, Context, Inferred};
use super::infer::{dtype_named, one};
use super::infer_image::agree;
use super::infer_shape::filled_dims;
use crate::mil::{DataType, Dim, TensorType, ValueType};

/// Infers results of a recurrent op with `gates` gates: the hidden state of each step, the last one, and for `lstm` the memory.
fn recurrent(c: &Context<'_>, gates: u64, memory: bool) -> Inferred {
    let x = c.tensor("x")?;
    let [steps, batch, inputs] = x.dims[..] else {
        return Err(format!("input of type {x}, expected [steps, batch, inputs]"));
    };
    let directions = match c.text("direction")?.unwrap_or("forward") {
        "forward" | "reverse" => 1,
        "bidirectional" if memory => 2,
        other => return Err(format!("parameter `direction`: `{other}`")),
    };
    let Some(Dim::Fixed(hidden)) = c.tensor("weight_hh")?.dims.get(1).copied() else {
        return Err(format!("weight_hh of type {}", c.tensor("weight_hh")?));
    };
    let times = |n: u64| hidden.checked_mul(n).map(Dim::Fixed).ok_or("size overflow");
    let (rows, width) = (times(gates)?, times(directions)?);
    let expect = |param: &str, dims: &[Dim]| -> Checked<()> {
        let t = c.tensor(param)?;
        let fits = t.rank() == dims.len() && t.dims.iter().zip(dims).all(|(a, b)| agree(*a, *b));
        let expected = TensorType { dtype: x.dtype, dims: dims.to_vec() };
        if fits { Ok(()) } else { Err(format!("parameter `{param}` is {t}, expected {expected}")) }
    };
    for back in ["", "_back"].iter().take(directions as usize) {
        expect(&format!("weight_ih{back}"), &[rows, inputs])?;
        expect(&format!("weight_hh{back}"), &[rows, Dim::Fixed(hidden)])?;
    }
    for vector in ["bias", "bias_back", "input_bias"] {
        if c.has(vector) {
            expect(vector, &[rows])?;
        }
    }
    let steps = if c.bool("output_sequence", false)? { steps } else { Dim::Fixed(1) };
    let mut shapes = vec![vec![steps, batch, width], vec![batch, width]];
    expect("initial_h", &[batch, width])?;
    if memory {
        expect("initial_c", &[batch, width])?;
        shapes.push(vec![batch, width]);
    }
    Ok(shapes.into_iter().map(|dims| ValueType::Tensor(TensorType { dtype: x.dtype, dims })).collect())
}

pub(super) fn rnn(c: &Context<'_>) -> Inferred {
    recurrent(c, 1, false)
}

pub(super) fn gru(c: &Context<'_>) -> Inferred {
    recurrent(c, 3, false)
}

pub(super) fn lstm(c: &Context<'_>) -> Inferred {
    recurrent(c, 4, true)
}

/// Infers drawn numbers of `shape`, in the type of the distribution's parameters.
pub(super) fn random(c: &Context<'_>) -> Inferred {
    let parameter = ["low", "mean", "prob"].into_iter().find(|p| c.has(p));
    let dtype = parameter.map_or(Ok(DataType::Float32), |p| c.tensor(p).map(|t| t.dtype))?;
    one(dtype, filled_dims(c)?)
}

pub(super) fn random_categorical(c: &Context<'_>) -> Inferred {
    let x = c.tensor("x")?;
    let mut dims = x.dims.clone();
    *dims.last_mut().ok_or("a scalar input")? =
        Dim::Fixed(u64::try_from(c.int("size", 1)?).map_err(|_| "negative size")?);
    one(if x.dtype.is_float() { x.dtype } else { DataType::Float32 }, dims)
}

/// Returns a list's type and the type of its elements.
fn list<'a>(c: &Context<'a>) -> Checked<(&'a ValueType, &'a TensorType)> {
    match c.operand("ls")?.ty {
        ty @ ValueType::List { element, .. } => {
            let element = element.tensor().ok_or_else(|| format!("a list of {element}"))?;
            Ok((ty, element))
        }
        other => Err(format!("parameter `ls` has type {other}, expected a list")),
    }
}

pub(super) fn make_list(c: &Context<'_>) -> Inferred {
    let dtype = dtype_named(c.text("dtype")?.unwrap_or("fp32"))?;
    let sizes = c.operands("elem_shape").iter().flat_map(|o| match o.value.and_then(|v| v.as_ints()) {
        Some(sizes) => sizes.iter().map(|&n| u64::try_from(n).map_or(Dim::Unknown, Dim::Fixed)).collect(),
        // A name stands for a size that is known when the program runs.
        None => vec![Dim::Unknown],
    });
    let element = Box::new(ValueType::Tensor(TensorType { dtype, dims: sizes.collect() }));
    let length = match c.ints("init_length").as_deref() {
        Some([n]) => Dim::Fixed(u64::try_from(*n).map_err(|_| "negative init_length")?),
        _ if c.has("init_length") => Dim::Unknown,
        _ => Dim::Fixed(1),
    };
    Ok(vec![ValueType::List { element, length }])
}

pub(super) fn list_read(c: &Context<'_>) -> Inferred {
    Ok(vec![ValueType::Tensor(list(c)?.1.clone())])
}

pub(super) fn list_gather(c: &Context<'_>) -> Inferred {
    let (_, element) = list(c)?;
    let indices = c.tensor("indices")?;
    let mut dims = indices.dims.clone();
    dims.extend_from_slice(&element.dims);
    one(element.dtype, dims)
}

/// Infers the type of `list_write` and `list_scatter`: the list's.
pub(super) fn list_write(c: &Context<'_>) -> Inferred {
    let (ty, element) = list(c)?;
    c.same_dtype("value", element.dtype)?;
    Ok(vec![ty.clone()])
}

pub(super) fn list_length(c: &Context<'_>) -> Inferred {
    list(c)?;
    one(DataType::Int32, vec![])
}
