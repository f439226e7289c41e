//! Products and sums over dense tensors: `linear`, `matmul`, `einsum`, attention.

use super::super::strided::{StridedLoops, copy_elements, dense_strides};
use super::operands::{OpContext, OpError, OpFunction, OpResult};
use super::shape::{broadcast_shape, count, invalid, repeated, unsupported};
use crate::tensor::{Data, Tensor};
use anemoe_kernels::{DenseProducts, Pool, dot_products, multiply_dense};
use std::collections::BTreeSet;

/// Multiplications in a part of a job: some microseconds.
const MULTIPLIED: usize = 1 << 16;

/// Computes `c[m, n] = a[m, k] b[k, n]`, all row-major; the innermost loop runs along n.
fn product(a: &[f32], b: &[f32], c: &mut [f32], (k, n): (usize, usize)) {
    for (a, c) in a.chunks_exact(k.max(1)).zip(c.chunks_exact_mut(n.max(1))) {
        c.fill(0.0);
        for (v, b) in a.iter().zip(b.chunks_exact(n.max(1))) {
            c.iter_mut().zip(b).for_each(|(c, b)| *c += v * b);
        }
    }
}

/// Computes the dot product of `a` and `b`, in sixteen lanes.
pub(crate) fn dot(a: &[f32], b: &[f32]) -> f32 {
    // Partial sums let the compiler use vectors.
    let mut acc = [0f32; 16];
    let (a_main, a_rest) = a.as_chunks::<16>();
    let (b_main, b_rest) = b.as_chunks::<16>();
    for (x, y) in a_main.iter().zip(b_main) {
        for i in 0..16 {
            acc[i] += x[i] * y[i];
        }
    }
    let rest: f32 = a_rest.iter().zip(b_rest).map(|(x, y)| x * y).sum();
    acc.iter().sum::<f32>() + rest
}

/// Computes `c[m, n] = a[m, k] b[n, k]^T`.
fn product_transposed(a: &[f32], b: &[f32], c: &mut [f32], (k, n): (usize, usize)) {
    for (a, c) in a.chunks_exact(k.max(1)).zip(c.chunks_exact_mut(n.max(1))) {
        dot_products(&a[..k], b, c);
    }
}

/// Transposes `x`, `[rows, cols]`, to `[cols, rows]`.
pub(crate) fn transposed(x: &[f32], rows: usize, cols: usize) -> Vec<f32> {
    let mut out = vec![0f32; x.len()];
    for (r, row) in x.chunks_exact(cols.max(1)).enumerate() {
        for (c, v) in row.iter().enumerate() {
            out[c * rows + r] = *v;
        }
    }
    out
}

pub(super) fn linear(c: &OpContext<'_>, out: &mut [Tensor]) -> OpResult {
    match (&c.arg("x")?.data, &c.arg("weight")?.data) {
        (Data::I32(_), Data::I32(_)) => return int_linear(c, &mut out[0]),
        (Data::F32(_), Data::I32(_)) | (Data::I32(_), Data::F32(_)) => return mixed(linear, c, out),
        _ => {}
    }
    let ((xs, x), (ws, w)) = (c.f32s("x")?, c.f32s("weight")?);
    let (&[n, k], Some(&last)) = (ws, xs.last()) else {
        return invalid(format!("input of shape {xs:?} with a weight of shape {ws:?}"));
    };
    if last != k {
        return invalid(format!("{last} input features with a weight of shape {ws:?}"));
    }
    let mut shape = xs[..xs.len() - 1].to_vec();
    shape.push(n);
    count(&shape)?;
    let y = out[0].reset_f32(&shape);
    let rows = (MULTIPLIED / (k * n).max(1)).max(1);
    Pool::global().for_chunks(y, rows * n, &|i, y| product_transposed(&x[i * rows * k..], w, y, (k, n)));
    add_bias(c, y, n)
}

/// Computes a product of floats with integers (iOS17): in floats, in the declared type.
fn mixed(product: OpFunction, c: &OpContext<'_>, out: &mut [Tensor]) -> OpResult {
    let floats = |t: &Tensor| match &t.data {
        Data::I32(v) => Tensor::f32(&t.shape, v.iter().map(|&v| v as f32).collect()),
        _ => t.clone(),
    };
    let inputs: Vec<(&str, Tensor)> = c.inputs.iter().map(|(name, t)| (*name, floats(t))).collect();
    let inputs: Vec<(&str, &Tensor)> = inputs.iter().map(|(name, t)| (*name, t)).collect();
    product(&OpContext { inputs: &inputs, ..*c }, out)?;
    if c.outputs.first().is_some_and(|t| t.dtype.is_int())
        && let Some(y) = out[0].as_f32()
    {
        out[0] = Tensor::i32(&out[0].shape, y.iter().map(|&v| v as i32).collect());
    }
    Ok(())
}

/// Computes `linear` of integers; sums wrap.
fn int_linear(c: &OpContext<'_>, out: &mut Tensor) -> OpResult {
    let (x, w) = (c.arg("x")?, c.arg("weight")?);
    let transposed = Tensor { shape: vec![], data: Data::Bool(vec![true]) };
    let inputs = [("x", x), ("y", w), ("transpose_y", &transposed)];
    int_matmul(&OpContext { inputs: &inputs, ..*c }, out)?;
    let Data::I32(y) = &mut out.data else { return Ok(()) };
    add_to_rows(c.ints("bias")?, y, w.shape[0], i32::wrapping_add)
}

/// Computes `matmul` of integers; sums wrap.
fn int_matmul(c: &OpContext<'_>, out: &mut Tensor) -> OpResult {
    let m = MatrixProduct::new(c)?;
    let (Some(xs), Some(ys)) = (c.arg("x")?.as_i32(), c.arg("y")?.as_i32()) else {
        return invalid("operands of other types than integers");
    };
    let o = out.reset_i32(&m.shape);
    // Steps between the rows of a matrix and between the elements that a sum reads.
    let (xr, xk) = if m.transposes.0 { (1, m.m) } else { (m.k, 1) };
    let (yc, yk) = if m.transposes.1 { (m.k, 1) } else { (1, m.n) };
    m.each(|[part, i, j]| {
        for (at, o) in o[part * m.m * m.n..][..m.m * m.n].iter_mut().enumerate() {
            let (x, y) = (i * m.m * m.k + at / m.n * xr, j * m.k * m.n + at % m.n * yc);
            *o =
                (0..m.k).fold(0, |sum: i32, k| sum.wrapping_add(xs[x + k * xk].wrapping_mul(ys[y + k * yk])));
        }
    });
    Ok(())
}

/// Adds `bias`, if it is given, to each row of `n` values of `y`.
pub(crate) fn add_bias(c: &OpContext<'_>, y: &mut [f32], n: usize) -> OpResult {
    add_to_rows(c.get("bias").and_then(Tensor::as_f32), y, n, |y, b| y + b)
}

fn add_to_rows<T: Copy>(bias: Option<&[T]>, y: &mut [T], n: usize, add: impl Fn(T, T) -> T) -> OpResult {
    let Some(bias) = bias else { return Ok(()) };
    if bias.len() != n {
        return invalid(format!("bias of {} values for {n} outputs", bias.len()));
    }
    for row in y.chunks_exact_mut(n.max(1)) {
        row.iter_mut().zip(bias).for_each(|(y, b)| *y = add(*y, *b));
    }
    Ok(())
}

/// Sizes of a `matmul`: `[batch.., m, n] = [.., m, k] [.., k, n]`, each operand stored as it is or transposed.
struct MatrixProduct {
    m: usize,
    k: usize,
    n: usize,
    /// Shape of the result.
    shape: Vec<usize>,
    batch: Vec<usize>,
    /// Steps of the operands' matrices along the batch, in matrices.
    steps: [Vec<usize>; 2],
    transposes: (bool, bool),
}

impl MatrixProduct {
    fn new(c: &OpContext<'_>) -> OpResult<MatrixProduct> {
        let (xs, ys) = (c.arg("x")?.shape.as_slice(), c.arg("y")?.shape.as_slice());
        if xs.is_empty() || ys.is_empty() {
            return invalid("a scalar operand");
        }
        let (tx, ty) = (c.bool("transpose_x", false)?, c.bool("transpose_y", false)?);
        let (x_vector, y_vector) = (xs.len() == 1, ys.len() == 1);
        let x_dims: Vec<usize> = if x_vector { vec![1, xs[0]] } else { xs.to_vec() };
        let y_dims: Vec<usize> = if y_vector { vec![ys[0], 1] } else { ys.to_vec() };
        let transposes = (tx && !x_vector, ty && !y_vector);
        let (a, b) = (&x_dims[x_dims.len() - 2..], &y_dims[y_dims.len() - 2..]);
        let (m, k) = if transposes.0 { (a[1], a[0]) } else { (a[0], a[1]) };
        let (k2, n) = if transposes.1 { (b[1], b[0]) } else { (b[0], b[1]) };
        if k != k2 {
            return invalid(format!("shapes {xs:?} and {ys:?}: inner dimensions {k} and {k2}"));
        }
        let (x_batch, y_batch) = (&x_dims[..x_dims.len() - 2], &y_dims[..y_dims.len() - 2]);
        let batch = broadcast_shape(x_batch, y_batch)?;
        let mut shape = batch.clone();
        if !x_vector {
            shape.push(m);
        }
        if !y_vector {
            shape.push(n);
        }
        count(&shape)?;
        let steps = [repeated(x_batch, &batch)?, repeated(y_batch, &batch)?];
        Ok(MatrixProduct { m, k, n, shape, batch, steps, transposes })
    }

    /// Calls `each` with the matrices of each product: of the result, of x and of y.
    fn each(&self, each: impl FnMut([usize; 3])) {
        if !self.shape.contains(&0) {
            let [x, y] = &self.steps;
            StridedLoops::new(&self.batch, [&dense_strides(&self.batch), x, y], [0; 3]).each_element(each);
        }
    }
}

pub(super) fn matmul(c: &OpContext<'_>, out: &mut [Tensor]) -> OpResult {
    match (&c.arg("x")?.data, &c.arg("y")?.data) {
        (Data::I32(_), Data::I32(_)) => return int_matmul(c, &mut out[0]),
        (Data::F32(_), Data::I32(_)) | (Data::I32(_), Data::F32(_)) => return mixed(matmul, c, out),
        _ => {}
    }
    let ((_, x), (_, y)) = (c.f32s("x")?, c.f32s("y")?);
    let product_of = MatrixProduct::new(c)?;
    let (m, k, n) = (product_of.m, product_of.k, product_of.n);
    let o = out[0].reset_f32(&product_of.shape);
    if k == 0 {
        o.fill(0.0);
        return Ok(());
    }
    let mut places = Vec::new();
    product_of.each(|[part, i, j]| places.push([part * m * n, i * m * k, j * k * n]));
    let (tx, ty) = product_of.transposes;
    let rows_of_x;
    let x = if tx {
        let matrices = x.chunks_exact((m * k).max(1));
        rows_of_x = matrices.flat_map(|x| transposed(x, k, m)).collect::<Vec<f32>>();
        rows_of_x.as_slice()
    } else {
        x
    };
    if !ty {
        let p = DenseProducts { places: &places, sizes: [m, k, n], x_stride: k, y_strides: [n, 1], x, y };
        multiply_dense(Pool::global(), &p, o);
        return Ok(());
    }
    for [part, i, j] in places {
        let rows = (MULTIPLIED / (k * n).max(1)).max(1);
        Pool::global().for_chunks(&mut o[part..part + m * n], rows * n, &|at, part| {
            product_transposed(&x[i + at * rows * k..], &y[j..j + k * n], part, (k, n));
        });
    }
    Ok(())
}

/// Computes `einsum` for any equation of two operands in which no label occurs twice in one operand.
pub(super) fn einsum(c: &OpContext<'_>, out: &mut [Tensor]) -> OpResult {
    let equation: String = c.str("equation", "")?.split_whitespace().collect();
    let parsed = equation.split_once("->").and_then(|(i, o)| Some((i.split_once(',')?, o)));
    let (Some(((la, lb), lo)), [a, b]) = (parsed, c.values) else {
        return unsupported(format!("einsum equation `{equation}` with {} operands", c.values.len()));
    };
    let (Some(av), Some(bv)) = (a.as_f32(), b.as_f32()) else {
        return invalid("einsum of other than floats");
    };
    let (la, lb, lo): (Vec<char>, Vec<char>, Vec<char>) =
        (la.chars().collect(), lb.chars().collect(), lo.chars().collect());
    let repeats = |l: &[char]| l.iter().enumerate().any(|(i, c)| l[..i].contains(c));
    if repeats(&la) || repeats(&lb) || repeats(&lo) {
        return unsupported(format!("einsum equation `{equation}` with a repeated label"));
    }
    if la.len() != a.rank() || lb.len() != b.rank() {
        return invalid(format!("einsum equation `{equation}` for shapes {:?} and {:?}", a.shape, b.shape));
    }
    let mut labels = lo.clone();
    labels.extend(la.iter().chain(&lb).filter(|l| !lo.contains(l)).copied());
    let mut seen = BTreeSet::new();
    labels.retain(|l| seen.insert(*l));
    let size = |l: char| -> OpResult<usize> {
        let of = |ls: &[char], t: &Tensor| ls.iter().position(|&x| x == l).map(|i| t.shape[i]);
        match (of(&la, a), of(&lb, b)) {
            (Some(p), Some(q)) if p != q && p != 1 && q != 1 => {
                invalid(format!("sizes {p} and {q} of label `{l}`"))
            }
            (Some(p), Some(q)) => Ok(p.max(q)),
            (Some(p), None) | (None, Some(p)) => Ok(p),
            (None, None) => invalid(format!("label `{l}` of the output is in no operand")),
        }
    };
    let sizes: Vec<usize> = labels.iter().map(|&l| size(l)).collect::<OpResult<_>>()?;
    let place = |ls: &[char], t: &Tensor| -> Vec<usize> {
        let own = dense_strides(&t.shape);
        let at =
            |l: &char| ls.iter().position(|x| x == l).map_or(0, |i| if t.shape[i] == 1 { 0 } else { own[i] });
        labels.iter().map(at).collect()
    };
    let shape = sizes[..lo.len()].to_vec();
    count(&sizes)?;
    let y = out[0].reset_f32(&shape);
    y.fill(0.0);
    let mut own = dense_strides(&shape);
    own.resize(labels.len(), 0);
    let (sa, sb) = (place(&la, a), place(&lb, b));
    StridedLoops::new(&sizes, [&own, &sa, &sb], [0; 3]).each_element(|[o, i, j]| y[o] += av[i] * bv[j]);
    Ok(())
}

/// Computes `softmax(q k^T / sqrt(E) + mask) v`, with query `[.., L, E]`, key `[.., S, E]` and value `[.., S, EV]`.
pub(super) fn attention(c: &OpContext<'_>, out: &mut [Tensor]) -> OpResult {
    let ((qs, q), (ks, k), (vs, v)) = (c.f32s("query")?, c.f32s("key")?, c.f32s("value")?);
    let rank = qs.len();
    if rank < 3
        || ks.len() != rank
        || vs.len() != rank
        || qs[rank - 1] != ks[rank - 1]
        || ks[rank - 2] != vs[rank - 2]
    {
        return invalid(format!("query {qs:?}, key {ks:?}, value {vs:?}"));
    }
    let (l, e, s, ev) = (qs[rank - 2], qs[rank - 1], ks[rank - 2], vs[rank - 1]);
    let batch = broadcast_shape(&broadcast_shape(&qs[..rank - 2], &ks[..rank - 2])?, &vs[..rank - 2])?;
    let mask = c.get("attn_mask");
    let mut shape = batch.clone();
    shape.extend([l, ev]);
    count(&shape)?;
    let mut mask_shape = batch.clone();
    mask_shape.extend([l, s]);
    let additive: Option<Vec<f32>> = match mask {
        None => None,
        Some(m) => {
            let values: Vec<f32> = match &m.data {
                Data::F32(v) => v.clone(),
                Data::Bool(v) => v.iter().map(|&b| if b { 0.0 } else { f32::NEG_INFINITY }).collect(),
                _ => return invalid("parameter `attn_mask` must be float or bool"),
            };
            if broadcast_shape(&m.shape, &mask_shape)? != mask_shape {
                return invalid(format!("mask of shape {:?} for {mask_shape:?}", m.shape));
            }
            let mut full = vec![0f32; count(&mask_shape)?];
            let strides = repeated(&m.shape, &mask_shape)?;
            let loops = StridedLoops::new(&mask_shape, [&dense_strides(&mask_shape), &strides], [0; 2]);
            copy_elements(&loops, &values, &mut full);
            Some(full)
        }
    };
    let o = out[0].reset_f32(&shape);
    let strides_of = |t: &[usize]| repeated(&t[..rank - 2], &batch);
    let strides = [&dense_strides(&batch), &strides_of(qs)?, &strides_of(ks)?, &strides_of(vs)?];
    let scale = 1.0 / (e as f32).sqrt();
    let mut scores = vec![0f32; l * s];
    StridedLoops::new(&batch, strides.map(Vec::as_slice), [0; 4]).each_element(|[n, i, j, m]| {
        product_transposed(&q[i * l * e..][..l * e], &k[j * s * e..][..s * e], &mut scores, (e, s));
        for (r, row) in scores.chunks_exact_mut(s.max(1)).enumerate() {
            row.iter_mut().for_each(|v| *v *= scale);
            if let Some(mask) = &additive {
                row.iter_mut().zip(&mask[(n * l + r) * s..]).for_each(|(v, m)| *v += m);
            }
            let max = row.iter().copied().fold(f32::NEG_INFINITY, f32::max);
            row.iter_mut().for_each(|v| *v = (*v - max).exp());
            let sum: f32 = row.iter().sum();
            row.iter_mut().for_each(|v| *v /= sum);
        }
        product(&scores, &v[m * s * ev..][..s * ev], &mut o[n * l * ev..][..l * ev], (s, ev));
    });
    if batch.contains(&0) {
        return Err(OpError::Invalid("an empty batch".into()));
    }
    Ok(())
}
