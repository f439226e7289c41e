//! Types of elementwise ops, contractions, normalizations, pools, reductions, compression and control flow.

use super::context::{Checked, Context, Inferred, broadcast, product};
use crate::mil::{DataType, Dim, TensorType, ValueType};

pub(super) fn one(dtype: DataType, dims: Vec<Dim>) -> Inferred {
    Ok(vec![ValueType::Tensor(TensorType { dtype, dims })])
}

/// Infers the type of `x`.
pub(super) fn same(c: &Context<'_>) -> Inferred {
    let x = c.tensor("x")?;
    one(x.dtype, x.dims.clone())
}

/// Infers the type of `x`, whose elements must be floats.
pub(super) fn same_float(c: &Context<'_>) -> Inferred {
    let x = c.tensor("x")?;
    if !x.dtype.is_float() {
        return Err(format!("parameter `x` is of {}, expected a float type", x.dtype));
    }
    one(x.dtype, x.dims.clone())
}

pub(super) fn binary(c: &Context<'_>) -> Inferred {
    let (x, y) = (c.tensor("x")?, c.tensor("y")?);
    c.same_dtype("y", x.dtype)?;
    one(x.dtype, broadcast(&x.dims, &y.dims)?)
}

pub(super) fn compare(c: &Context<'_>) -> Inferred {
    let (x, y) = (c.tensor("x")?, c.tensor("y")?);
    c.same_dtype("y", x.dtype)?;
    one(DataType::Bool, broadcast(&x.dims, &y.dims)?)
}

pub(super) fn softmax(c: &Context<'_>) -> Inferred {
    c.axis("axis", -1, c.rank("x")?)?;
    same_float(c)
}

pub(super) fn dtype_named(name: &str) -> Checked<DataType> {
    use DataType::*;
    let all =
        [Bool, Float16, Float32, Float64, Int8, Int16, Int32, Int64, UInt8, UInt16, UInt32, Int4, UInt4];
    all.into_iter().find(|t| t.name() == name).ok_or_else(|| format!("unknown data type `{name}`"))
}

pub(super) fn cast(c: &Context<'_>) -> Inferred {
    let dtype = dtype_named(c.text("dtype")?.ok_or("required parameter `dtype` is missing")?)?;
    one(dtype, c.tensor("x")?.dims.clone())
}

pub(super) fn select(c: &Context<'_>) -> Inferred {
    let (cond, a, b) = (c.tensor("cond")?, c.tensor("a")?, c.tensor("b")?);
    if cond.dtype != DataType::Bool {
        return Err(format!("parameter `cond` is of {}, expected bool", cond.dtype));
    }
    c.same_dtype("b", a.dtype)?;
    one(a.dtype, broadcast(&broadcast(&cond.dims, &a.dims)?, &b.dims)?)
}

pub(super) fn identity(c: &Context<'_>) -> Inferred {
    Ok(vec![c.operand("x")?.ty.clone()])
}

/// Infers the label and the probability of each class.
pub(super) fn classify(c: &Context<'_>) -> Inferred {
    let probabilities = c.tensor("probabilities")?;
    let ValueType::List { element, length } = c.operand("classes")?.ty else {
        return Err("parameter `classes` is no list".into());
    };
    if !matches!(element.tensor(), Some(t) if matches!(t.dtype, DataType::String | DataType::Int64) && t.rank() == 0)
    {
        return Err(format!("parameter `classes` is a list of {element}, expected string or int64"));
    }
    if let (Some(found), Some(classes)) = (probabilities.elements(), length.fixed())
        && found != classes
    {
        return Err(format!("{found} probabilities of {classes} classes"));
    }
    let value = Box::new(ValueType::Tensor(TensorType::scalar(DataType::Float64)));
    Ok(vec![(**element).clone(), ValueType::Dictionary { key: element.clone(), value }])
}

/// Computes the output size of a window op (convolution, pooling) along one axis.
fn window(n: Dim, kernel: u64, stride: u64, dilation: u64, pad: (u64, u64), ceil: bool) -> Checked<Dim> {
    let Dim::Fixed(n) = n else { return Ok(Dim::Unknown) };
    let reach = kernel.checked_sub(1).and_then(|k| k.checked_mul(dilation)).ok_or("kernel of size 0")?;
    let room = n.checked_add(pad.0).and_then(|n| n.checked_add(pad.1)).and_then(|n| n.checked_sub(reach + 1));
    let room = room.ok_or_else(|| format!("kernel reach {} is larger than the padded input", reach + 1))?;
    let mut out = room / stride + 1;
    if ceil && room % stride != 0 {
        // A window that would start in the trailing padding does not count.
        if out * stride < n + pad.0 {
            out += 1;
        }
    }
    Ok(Dim::Fixed(out))
}

/// Returns positive constants, one per spatial axis; ones when the parameter is absent.
fn per_axis(c: &Context<'_>, param: &str, n: usize) -> Checked<Vec<u64>> {
    if !c.has(param) {
        return Ok(vec![1; n]);
    }
    let v = c.const_ints(param)?;
    let v: Option<Vec<u64>> = v.iter().map(|&x| u64::try_from(x).ok().filter(|&x| x > 0)).collect();
    v.filter(|v| v.len() == n).ok_or_else(|| format!("parameter `{param}`: expected {n} positive integers"))
}

/// Returns the padding before and after each spatial axis, by `pad_type`.
fn padding(
    c: &Context<'_>,
    sizes: &[Dim],
    kernel: &[u64],
    strides: &[u64],
    dilations: &[u64],
) -> Checked<Vec<(u64, u64)>> {
    let n = sizes.len();
    match c.text("pad_type")?.unwrap_or("valid") {
        "valid" => Ok(vec![(0, 0); n]),
        "custom" => {
            let pad = c.const_ints("pad")?;
            let pad: Option<Vec<u64>> = pad.iter().map(|&p| u64::try_from(p).ok()).collect();
            let pad = pad.filter(|p| p.len() == 2 * n);
            let pad =
                pad.ok_or_else(|| format!("parameter `pad`: expected {} non-negative integers", 2 * n))?;
            Ok(pad.chunks(2).map(|p| (p[0], p[1])).collect())
        }
        same @ ("same" | "same_lower") => Ok((0..n)
            .map(|i| {
                let Dim::Fixed(size) = sizes[i] else { return (0, 0) };
                let reach = (kernel[i] - 1) * dilations[i] + 1;
                let needed = (size.div_ceil(strides[i]).max(1) - 1) * strides[i] + reach;
                let total = needed.saturating_sub(size);
                let (low, high) = (total / 2, total - total / 2);
                if same == "same" { (low, high) } else { (high, low) }
            })
            .collect()),
        other => Err(format!("parameter `pad_type`: `{other}` is not valid, custom, same or same_lower")),
    }
}

pub(super) fn conv(c: &Context<'_>) -> Inferred {
    let (x, w) = (c.tensor("x")?, c.tensor("weight")?);
    if !(3..=5).contains(&x.rank()) || w.rank() != x.rank() {
        return Err(format!("input of rank {} with a weight of rank {}", x.rank(), w.rank()));
    }
    if !c.has("quant_scale") {
        c.same_dtype("weight", x.dtype)?;
    }
    let n = x.rank() - 2;
    let groups = u64::try_from(c.int("groups", 1)?)
        .ok()
        .filter(|&g| g > 0)
        .ok_or("parameter `groups` must be positive")?;
    let (Some(out), Some(per_group)) = (w.dims[0].fixed(), w.dims[1].fixed()) else {
        return Err("the weight's channels must be known".into());
    };
    if let Dim::Fixed(channels) = x.dims[1]
        && per_group.checked_mul(groups) != Some(channels)
    {
        return Err(format!(
            "{channels} input channels, but the weight takes {per_group} in each of {groups} groups"
        ));
    }
    if out % groups != 0 {
        return Err(format!("{out} output channels in {groups} groups"));
    }
    if c.has("bias") {
        let b = c.tensor("bias")?;
        if b.rank() != 1 || b.dims[0] != Dim::Fixed(out) {
            return Err(format!("bias of type {b}, expected [{out}]"));
        }
    }
    let kernel: Option<Vec<u64>> = w.dims[2..].iter().map(|d| d.fixed().filter(|&k| k > 0)).collect();
    let kernel = kernel.ok_or("the weight's kernel must be known")?;
    let (strides, dilations) = (per_axis(c, "strides", n)?, per_axis(c, "dilations", n)?);
    let pads = padding(c, &x.dims[2..], &kernel, &strides, &dilations)?;
    let mut dims = vec![x.dims[0], Dim::Fixed(out)];
    for i in 0..n {
        dims.push(window(x.dims[2 + i], kernel[i], strides[i], dilations[i], pads[i], false)?);
    }
    one(x.dtype, dims)
}

pub(super) fn conv_transpose(c: &Context<'_>) -> Inferred {
    let (x, w) = (c.tensor("x")?, c.tensor("weight")?);
    if !(3..=5).contains(&x.rank()) || w.rank() != x.rank() {
        return Err(format!("input of rank {} with a weight of rank {}", x.rank(), w.rank()));
    }
    let n = x.rank() - 2;
    let groups = u64::try_from(c.int("groups", 1)?)
        .ok()
        .filter(|&g| g > 0)
        .ok_or("parameter `groups` must be positive")?;
    let out =
        w.dims[1].fixed().and_then(|o| o.checked_mul(groups)).ok_or("the weight's channels must be known")?;
    if w.dims[0] != x.dims[1] && x.dims[1] != Dim::Unknown {
        return Err(format!("{} input channels with a weight for {}", x.dims[1], w.dims[0]));
    }
    let mut dims = vec![x.dims[0], Dim::Fixed(out)];
    if c.has("output_shape") {
        let shape = c.const_ints("output_shape")?;
        let spatial = shape
            .len()
            .checked_sub(n)
            .and_then(|s| shape.get(s..))
            .ok_or("parameter `output_shape` is too short")?;
        for &s in spatial {
            dims.push(Dim::Fixed(u64::try_from(s).map_err(|_| "negative output_shape")?));
        }
        return one(x.dtype, dims);
    }
    let (strides, dilations) = (per_axis(c, "strides", n)?, per_axis(c, "dilations", n)?);
    let pad = match c.text("pad_type")?.unwrap_or("valid") {
        "custom" => c.const_ints("pad")?,
        _ => vec![0; 2 * n],
    };
    if pad.len() != 2 * n {
        return Err(format!("parameter `pad`: expected {} integers", 2 * n));
    }
    let same = matches!(c.text("pad_type")?, Some("same" | "same_lower"));
    for i in 0..n {
        let (Dim::Fixed(size), Dim::Fixed(kernel)) = (x.dims[2 + i], w.dims[2 + i]) else {
            dims.push(Dim::Unknown);
            continue;
        };
        let full = i128::from(strides[i]) * (i128::from(size) - 1)
            + i128::from(dilations[i]) * (i128::from(kernel) - 1)
            + 1;
        let size = if same {
            i128::from(size) * i128::from(strides[i])
        } else {
            full - i128::from(pad[2 * i]) - i128::from(pad[2 * i + 1])
        };
        dims.push(Dim::Fixed(u64::try_from(size).map_err(|_| "an output without elements")?));
    }
    one(x.dtype, dims)
}

pub(super) fn linear(c: &Context<'_>) -> Inferred {
    let (x, w) = (c.tensor("x")?, c.tensor("weight")?);
    if x.rank() == 0 || w.rank() != 2 {
        return Err(format!("input of type {x} with a weight of type {w}"));
    }
    let last = x.dims[x.rank() - 1];
    if let (Dim::Fixed(a), Dim::Fixed(b)) = (last, w.dims[1])
        && a != b
    {
        return Err(format!("{a} input features with a weight for {b}"));
    }
    if c.has("bias") && c.tensor("bias")?.dims != [w.dims[0]] {
        return Err(format!("bias of type {}, expected [{}]", c.tensor("bias")?, w.dims[0]));
    }
    let mut dims = x.dims[..x.rank() - 1].to_vec();
    dims.push(w.dims[0]);
    one(x.dtype, dims)
}

pub(super) fn matmul(c: &Context<'_>) -> Inferred {
    let (x, y) = (c.tensor("x")?, c.tensor("y")?);
    // A constant may be of another type (iOS17): the result is of the other operand's.
    let is_constant = |param: &str| c.operand(param).is_ok_and(|o| o.value.is_some());
    let dtype = match (is_constant("x"), is_constant("y")) {
        (true, false) => y.dtype,
        (false, true) => x.dtype,
        _ => c.same_dtype("y", x.dtype).map(|()| x.dtype)?,
    };
    if x.rank() == 0 || y.rank() == 0 {
        return Err("a scalar operand".into());
    }
    let (x_vector, y_vector) = (x.rank() == 1, y.rank() == 1);
    let mut a = x.dims.clone();
    let mut b = y.dims.clone();
    if x_vector {
        a.insert(0, Dim::Fixed(1));
    } else if c.bool("transpose_x", false)? {
        let n = a.len();
        a.swap(n - 1, n - 2);
    }
    if y_vector {
        b.push(Dim::Fixed(1));
    } else if c.bool("transpose_y", false)? {
        let n = b.len();
        b.swap(n - 1, n - 2);
    }
    let (n, m) = (a.len(), b.len());
    if let (Dim::Fixed(p), Dim::Fixed(q)) = (a[n - 1], b[m - 2])
        && p != q
    {
        return Err(format!("inner dimensions {p} and {q}"));
    }
    let mut dims = broadcast(&a[..n - 2], &b[..m - 2])?;
    if !x_vector {
        dims.push(a[n - 2]);
    }
    if !y_vector {
        dims.push(b[m - 1]);
    }
    one(dtype, dims)
}

pub(super) fn einsum(c: &Context<'_>) -> Inferred {
    let types = c.tensors("values")?;
    let equation: String =
        c.text("equation")?.ok_or("required parameter `equation` is missing")?.split_whitespace().collect();
    let (inputs, output) = equation.split_once("->").ok_or("an equation without `->`")?;
    let inputs: Vec<&str> = inputs.split(',').collect();
    if inputs.len() != types.len() {
        return Err(format!("an equation for {} operands with {}", inputs.len(), types.len()));
    }
    let mut sizes = std::collections::BTreeMap::new();
    for (labels, ty) in inputs.iter().zip(&types) {
        if labels.chars().count() != ty.rank() {
            return Err(format!("`{labels}` for an operand of type {ty}"));
        }
        for (label, dim) in labels.chars().zip(&ty.dims) {
            let known = sizes.entry(label).or_insert(*dim);
            *known = super::context::broadcast_dim(*known, *dim)?;
        }
    }
    let dim = |label| {
        sizes.get(&label).copied().ok_or_else(|| format!("label `{label}` of the output is in no operand"))
    };
    one(types[0].dtype, output.chars().map(dim).collect::<Checked<_>>()?)
}

pub(super) fn norm(c: &Context<'_>) -> Inferred {
    let x = c.tensor("x")?;
    for param in ["gamma", "beta", "mean", "variance"] {
        c.same_dtype(param, x.dtype)?;
    }
    if c.has("axes") {
        c.axes("axes", x.rank())?;
    }
    same_float(c)
}

pub(super) fn pool(c: &Context<'_>) -> Inferred {
    let x = c.tensor("x")?;
    if !(3..=5).contains(&x.rank()) {
        return Err(format!("input of rank {}", x.rank()));
    }
    let n = x.rank() - 2;
    let kernel = per_axis(c, "kernel_sizes", n)?;
    let strides = per_axis(c, "strides", n)?;
    let pads = padding(c, &x.dims[2..], &kernel, &strides, &vec![1; n])?;
    let ceil = c.bool("ceil_mode", false)?;
    let mut dims = x.dims[..2].to_vec();
    for i in 0..n {
        dims.push(window(x.dims[2 + i], kernel[i], strides[i], 1, pads[i], ceil)?);
    }
    one(x.dtype, dims)
}

fn reduced(c: &Context<'_>, axes: &[usize]) -> Checked<Vec<Dim>> {
    let x = c.tensor("x")?;
    let keep = c.bool("keep_dims", false)?;
    let mut dims = Vec::new();
    for (i, &d) in x.dims.iter().enumerate() {
        match (axes.contains(&i), keep) {
            (false, _) => dims.push(d),
            (true, true) => dims.push(Dim::Fixed(1)),
            (true, false) => {}
        }
    }
    Ok(dims)
}

pub(super) fn reduce(c: &Context<'_>) -> Inferred {
    let x = c.tensor("x")?;
    let axes = c.axes("axes", x.rank())?;
    one(x.dtype, reduced(c, &axes)?)
}

pub(super) fn reduce_arg(c: &Context<'_>) -> Inferred {
    let axis = c.axis("axis", -1, c.rank("x")?)?;
    let dtype = c.text("output_dtype")?.map_or(Ok(DataType::Int32), dtype_named)?;
    one(dtype, reduced(c, &[axis])?)
}

pub(super) fn quantize(c: &Context<'_>) -> Inferred {
    let dtype = dtype_named(c.text("output_dtype")?.ok_or("required parameter `output_dtype` is missing")?)?;
    one(dtype, c.tensor("input")?.dims.clone())
}

pub(super) fn dequantize(c: &Context<'_>) -> Inferred {
    one(c.tensor("scale")?.dtype, c.tensor("input")?.dims.clone())
}

pub(super) fn attention(c: &Context<'_>) -> Inferred {
    let (q, k, v) = (c.tensor("query")?, c.tensor("key")?, c.tensor("value")?);
    let rank = q.rank();
    if rank < 3 || k.rank() != rank || v.rank() != rank {
        return Err(format!("query {q}, key {k}, value {v}: expected equal ranks of at least 3"));
    }
    if q.dims[rank - 1] != k.dims[rank - 1] {
        return Err(format!("query of {} channels with keys of {}", q.dims[rank - 1], k.dims[rank - 1]));
    }
    let mut dims = q.dims[..rank - 1].to_vec();
    dims.push(v.dims[rank - 1]);
    one(q.dtype, dims)
}

pub(super) fn read_state(c: &Context<'_>) -> Inferred {
    match c.operand("input")?.ty {
        ValueType::State(t) => Ok(vec![ValueType::Tensor(t.clone())]),
        other => Err(format!("parameter `input` has type {other}, expected a state")),
    }
}

pub(super) fn write_state(c: &Context<'_>) -> Inferred {
    match c.operand("input")?.ty {
        ValueType::State(t) if c.tensor("data")? == t => Ok(vec![]),
        ValueType::State(t) => Err(format!("a state of {t} is written with {}", c.tensor("data")?)),
        other => Err(format!("parameter `input` has type {other}, expected a state")),
    }
}

pub(super) fn cond(c: &Context<'_>) -> Inferred {
    let pred = c.tensor("pred")?;
    if pred.dtype != DataType::Bool {
        return Err(format!("parameter `pred` is of {}, expected bool", pred.dtype));
    }
    match c.block_results() {
        [a, b] if a.len() == b.len() => a.iter().zip(b).map(|(a, b)| merge(a, b)).collect(),
        [_, _] => Err("branches with different numbers of results".into()),
        other => Err(format!("{} branches, expected two", other.len())),
    }
}

/// Merges the types of two branches into a type that both fit; sizes that differ become unknown.
fn merge(a: &ValueType, b: &ValueType) -> Checked<ValueType> {
    match (a, b) {
        (ValueType::Tensor(x), ValueType::Tensor(y)) if x.dtype == y.dtype && x.rank() == y.rank() => {
            let dims =
                x.dims.iter().zip(&y.dims).map(|(&p, &q)| if p == q { p } else { Dim::Unknown }).collect();
            Ok(ValueType::Tensor(TensorType { dtype: x.dtype, dims }))
        }
        _ if a == b => Ok(a.clone()),
        _ => Err(format!("branches with results of {a} and {b}")),
    }
}

pub(super) fn while_loop(c: &Context<'_>) -> Inferred {
    Ok(c.operands("loop_vars").iter().map(|o| o.ty.clone()).collect())
}

// ---- compression ----

pub(super) fn lut_to_dense(c: &Context<'_>) -> Inferred {
    if c.has("shape") {
        // iOS16: packed indices, one table, the shape as a constant.
        let lut = c.tensor("lut")?;
        return one(lut.dtype, shape_operand(c, "shape")?);
    }
    let (indices, lut) = (c.tensor("indices")?, c.tensor("lut")?);
    let k = indices.rank();
    let bits = indices.dtype.bits();
    if DataType::uint_of_bits(bits) != Some(indices.dtype) {
        return Err(format!("indices of {}, expected uint1, 2, 3, 4, 6 or 8", indices.dtype));
    }
    if lut.rank() != k + 2 {
        return Err(format!("lut of rank {} for indices of rank {k}, expected {}", lut.rank(), k + 2));
    }
    if lut.dims[k] != Dim::Fixed(1 << bits) {
        return Err(format!("lut with {} entries for {bits}-bit indices", lut.dims[k]));
    }
    divides(&lut.dims[..k], &indices.dims, "lut")?;
    let mut dims = indices.dims.clone();
    let Some(vector) = lut.dims[k + 1].fixed() else { return Err("lut of unknown size".into()) };
    if vector > 1 {
        let axis = c.axis("vector_axis", i64::MAX, k)?;
        dims[axis] = match dims[axis] {
            Dim::Fixed(n) => Dim::Fixed(n.checked_mul(vector).ok_or("size overflow")?),
            open => open,
        };
    }
    one(lut.dtype, dims)
}

/// Checks that each dimension of `parts` divides the dimension of `whole` on the same axis. Both must be known.
fn divides(parts: &[Dim], whole: &[Dim], what: &str) -> Checked<()> {
    for (i, (p, n)) in parts.iter().zip(whole).enumerate() {
        match (p.fixed(), n.fixed()) {
            (Some(p), Some(n)) if p > 0 && n % p == 0 => {}
            _ => return Err(format!("{what}: {p} groups on axis {i} of {n}")),
        }
    }
    Ok(())
}

fn shape_operand(c: &Context<'_>, param: &str) -> Checked<Vec<Dim>> {
    let value = c.operand(param)?.value.ok_or_else(|| format!("parameter `{param}` must be a constant"))?;
    let dims: Option<Vec<u64>> = match value.tensor_data() {
        Some(crate::mil::TensorData::Bytes(b)) => {
            Some(b.chunks_exact(4).map(|b| u64::from(u32::from_le_bytes([b[0], b[1], b[2], b[3]]))).collect())
        }
        Some(crate::mil::TensorData::Ints(v)) => v.iter().map(|&x| u64::try_from(x).ok()).collect(),
        _ => None,
    };
    let dims: Vec<Dim> = dims
        .ok_or_else(|| format!("parameter `{param}` must be a shape"))?
        .into_iter()
        .map(Dim::Fixed)
        .collect();
    product(&dims).ok_or_else(|| format!("parameter `{param}`: size overflow"))?;
    Ok(dims)
}

pub(super) fn blockwise(c: &Context<'_>) -> Inferred {
    let (data, scale) = (c.tensor("data")?, c.tensor("scale")?);
    if scale.rank() != data.rank() {
        return Err(format!("scale of rank {} for data of rank {}", scale.rank(), data.rank()));
    }
    divides(&scale.dims, &data.dims, "scale")?;
    if c.has("offset") && c.tensor("offset")?.dims != scale.dims {
        return Err(format!("offset of type {} with a scale of type {scale}", c.tensor("offset")?));
    }
    one(scale.dtype, data.dims.clone())
}

pub(super) fn affine_dequantize(c: &Context<'_>) -> Inferred {
    let (data, scale) = (c.tensor("quantized_data")?, c.tensor("scale")?);
    let axis = c.axis("axis", 0, data.rank())?;
    for param in ["scale", "zero_point"] {
        let t = c.tensor(param)?;
        if t.rank() > 1 || t.rank() == 1 && t.dims[0] != data.dims[axis] {
            return Err(format!("{param} of type {t} for axis {axis} of {data}"));
        }
    }
    one(scale.dtype, data.dims.clone())
}

pub(super) fn sparse_to_dense(c: &Context<'_>) -> Inferred {
    let values = c.tensor("nonzero_data")?;
    if c.has("shape") {
        return one(values.dtype, shape_operand(c, "shape")?);
    }
    let mask = c.tensor("mask")?;
    if values.rank() != 1 || mask.dtype != DataType::UInt1 {
        return Err(format!("nonzero_data of type {values} with a mask of type {mask}"));
    }
    one(values.dtype, mask.dims.clone())
}

pub(super) fn constexpr_cast(c: &Context<'_>) -> Inferred {
    let dtype = dtype_named(c.text("output_dtype")?.ok_or("required parameter `output_dtype` is missing")?)?;
    one(dtype, c.tensor("source_val")?.dims.clone())
}

/// Infers the types of mask and values of the joint sparse forms.
pub(super) fn to_sparse(c: &Context<'_>) -> Inferred {
    let (mask_param, values_param, source) = if c.has("indices_mask") {
        ("indices_mask", "indices_nonzero_data", "lut")
    } else {
        ("data_mask", "nonzero_data", "scale")
    };
    let (mask, values) = (c.tensor(mask_param)?, c.tensor(values_param)?);
    let dtype = c.tensor(source)?.dtype;
    let vector =
        if source == "lut" { c.tensor("lut")?.dims.last().and_then(|d| d.fixed()).unwrap_or(1) } else { 1 };
    let mut mask_dims = mask.dims.clone();
    let mut count = values.dims.clone();
    if vector > 1 {
        let axis = c.axis("vector_axis", i64::MAX, mask.rank())?;
        for (dims, i) in [(&mut mask_dims, axis), (&mut count, 0)] {
            if let Some(Dim::Fixed(n)) = dims.get(i).copied() {
                dims[i] = Dim::Fixed(n.checked_mul(vector).ok_or("size overflow")?);
            }
        }
    }
    Ok(vec![
        ValueType::Tensor(TensorType { dtype: mask.dtype, dims: mask_dims }),
        ValueType::Tensor(TensorType { dtype, dims: count }),
    ])
}
