//! Normalization ops.

use super::super::strided::dense_strides;
use super::operands::{OpContext, OpResult};
use super::shape::{invalid, offsets};
use crate::tensor::Tensor;
use anemoe_kernels::Pool;

/// Elements that a thread normalizes in one part of a job.
const NORMALIZED: usize = 1 << 12;

pub(super) fn layer_norm(c: &OpContext<'_>, out: &mut [Tensor]) -> OpResult {
    let (shape, x) = c.f32s("x")?;
    let rank = shape.len();
    let mut axes = super::shape::axes(c, rank)?.unwrap_or_else(|| (0..rank).collect());
    axes.sort_unstable();
    axes.dedup();
    // Adjacent axes count as one axis of `n` elements, with `inner` elements behind it.
    let (Some(&first), Some(&last)) = (axes.first(), axes.last()) else { return invalid("no axes") };
    if last - first + 1 != axes.len() {
        return norm_apart(c, &axes, &mut out[0]);
    }
    let n: usize = shape[first..=last].iter().product();
    let inner: usize = shape[last + 1..].iter().product();
    let epsilon = c.float("epsilon", 1e-5)?;
    let (gamma, beta) = (c.vector("gamma", n)?, c.vector("beta", n)?);
    let y = out[0].reset_f32(shape);
    if inner == 1 && n > 0 {
        let together = (NORMALIZED / n).next_multiple_of(ROWS).max(ROWS) * n;
        Pool::global().for_chunks(y, together, &|part, y| {
            let x = &x[part * together..][..y.len()];
            for (x, y) in x.chunks(ROWS * n).zip(y.chunks_mut(ROWS * n)) {
                normalize_rows(x, n, epsilon, (gamma, beta), y);
            }
        });
        return Ok(());
    }
    let one = (n * inner).max(1);
    let together = (NORMALIZED / one).max(1) * one;
    Pool::global().for_chunks(y, together, &|part, y| {
        for (y, x) in y.chunks_exact_mut(one).zip(x[part * together..].chunks_exact(one)) {
            for i in 0..inner {
                let scale = |k: usize, v: f32| v * gamma.map_or(1.0, |g| g[k]) + beta.map_or(0.0, |b| b[k]);
                normalize(n, |k| x[k * inner + i], epsilon, |k, v| y[k * inner + i] = scale(k, v));
            }
        }
    });
    Ok(())
}

/// Computes `layer_norm` over axes with others between them.
fn norm_apart(c: &OpContext<'_>, axes: &[usize], out: &mut Tensor) -> OpResult {
    let (shape, x) = c.f32s("x")?;
    let part = |inside: bool| {
        let sizes = (0..shape.len()).map(|i| if axes.contains(&i) == inside { shape[i] } else { 1 });
        offsets(&sizes.map(|n| (0..n).collect()).collect::<Vec<_>>(), &dense_strides(shape))
    };
    let (inner, outer) = (part(true), part(false));
    let epsilon = c.float("epsilon", 1e-5)?;
    let (gamma, beta) = (c.vector("gamma", inner.len())?, c.vector("beta", inner.len())?);
    let y = out.reset_f32(shape);
    for o in outer {
        let scale = |k: usize, v: f32| v * gamma.map_or(1.0, |g| g[k]) + beta.map_or(0.0, |b| b[k]);
        normalize(inner.len(), |k| x[o + inner[k]], epsilon, |k, v| y[o + inner[k]] = scale(k, v));
    }
    Ok(())
}

/// Normalizes `n` values to mean 0 and variance 1; `epsilon` is added to the variance.
fn normalize(n: usize, get: impl Fn(usize) -> f32, epsilon: f32, mut put: impl FnMut(usize, f32)) {
    let mean = (0..n).map(|k| f64::from(get(k))).sum::<f64>() / n as f64;
    let variance = (0..n).map(|k| (f64::from(get(k)) - mean).powi(2)).sum::<f64>() / n as f64;
    let scale = 1.0 / (variance + f64::from(epsilon)).sqrt();
    (0..n).for_each(|k| put(k, ((f64::from(get(k)) - mean) * scale) as f32));
}

/// Rows whose sums are in flight at the same time.
const ROWS: usize = 8;

/// Normalizes up to [`ROWS`] rows of `n` values as [`normalize`] does, then multiplies by gamma and adds beta.
fn normalize_rows(
    x: &[f32],
    n: usize,
    epsilon: f32,
    (gamma, beta): (Option<&[f32]>, Option<&[f32]>),
    y: &mut [f32],
) {
    let mut rows = [&x[..n]; ROWS];
    rows.iter_mut().zip(x.chunks_exact(n)).for_each(|(row, x)| *row = x);
    let (mut mean, mut variance) = ([0f64; ROWS], [0f64; ROWS]);
    for k in 0..n {
        (0..ROWS).for_each(|r| mean[r] += f64::from(rows[r][k]));
    }
    mean.iter_mut().for_each(|v| *v /= n as f64);
    for k in 0..n {
        for r in 0..ROWS {
            let v = f64::from(rows[r][k]) - mean[r];
            variance[r] += v * v;
        }
    }
    for (r, y) in y.chunks_exact_mut(n).enumerate() {
        let scale = 1.0 / (variance[r] / n as f64 + f64::from(epsilon)).sqrt();
        for (y, x) in y.iter_mut().zip(rows[r]) {
            *y = ((f64::from(*x) - mean[r]) * scale) as f32;
        }
        match (gamma, beta) {
            (Some(g), Some(b)) => y.iter_mut().zip(g.iter().zip(b)).for_each(|(y, (g, b))| *y = *y * g + b),
            (Some(g), None) => y.iter_mut().zip(g).for_each(|(y, g)| *y = *y * g + 0.0),
            (None, Some(b)) => y.iter_mut().zip(b).for_each(|(y, b)| *y += b),
            (None, None) => y.iter_mut().for_each(|y| *y += 0.0),
        }
    }
}

/// Computes `batch_norm` and `instance_norm`, per channel (axis 1).
pub(super) fn channel_norm(c: &OpContext<'_>, out: &mut [Tensor]) -> OpResult {
    let (shape, x) = c.f32s("x")?;
    if shape.len() < 2 {
        return invalid(format!("input of shape {shape:?}"));
    }
    let channels = shape[1];
    let inner: usize = shape[2..].iter().product();
    let epsilon = c.float("epsilon", 1e-5)?;
    let (gamma, beta) = (c.vector("gamma", channels)?, c.vector("beta", channels)?);
    let (mean, variance) = (c.vector("mean", channels)?, c.vector("variance", channels)?);
    let y = out[0].reset_f32(shape);
    for (i, (y, x)) in y.chunks_exact_mut(inner.max(1)).zip(x.chunks_exact(inner.max(1))).enumerate() {
        let ch = i % channels;
        let (g, b) = (gamma.map_or(1.0, |g| g[ch]), beta.map_or(0.0, |b| b[ch]));
        match (mean, variance) {
            (Some(m), Some(v)) => {
                let scale = g / (v[ch] + epsilon).sqrt();
                y.iter_mut().zip(x).for_each(|(y, x)| *y = (x - m[ch]) * scale + b);
            }
            _ if c.op == "instance_norm" => normalize(inner, |k| x[k], epsilon, |k, v| y[k] = v * g + b),
            _ => return invalid("parameters `mean` and `variance` are required"),
        }
    }
    Ok(())
}

/// Computes `x / sqrt(sum(x^2) + epsilon)` over the last three axes.
pub(super) fn l2_norm(c: &OpContext<'_>, out: &mut [Tensor]) -> OpResult {
    let (shape, x) = c.f32s("x")?;
    if shape.len() < 3 {
        return invalid(format!("input of shape {shape:?}, expected rank 3 or more"));
    }
    let n: usize = shape[shape.len() - 3..].iter().product();
    let epsilon = c.float("epsilon", 1e-6)?;
    let y = out[0].reset_f32(shape);
    for (y, x) in y.chunks_exact_mut(n.max(1)).zip(x.chunks_exact(n.max(1))) {
        let sum: f64 = x.iter().map(|v| f64::from(v * v)).sum();
        let scale = (1.0 / (sum + f64::from(epsilon)).sqrt()) as f32;
        y.iter_mut().zip(x).for_each(|(y, x)| *y = x * scale);
    }
    Ok(())
}

pub(super) fn local_response_norm(c: &OpContext<'_>, out: &mut [Tensor]) -> OpResult {
    let (shape, x) = c.f32s("x")?;
    if shape.len() < 3 {
        return invalid(format!("input of shape {shape:?}, expected rank 3 or more"));
    }
    let size = usize::try_from(c.int("size", 0)?).unwrap_or(0);
    if size == 0 {
        return invalid("parameter `size` must be positive");
    }
    let (alpha, beta, k) = (c.float("alpha", 1e-4)?, c.float("beta", 0.75)?, c.float("k", 1.0)?);
    // A single matrix is an image of one channel (coremltools' op tests).
    let axis = if shape.len() == 3 && shape[0] == 1 { 0 } else { 1 };
    let (batch, channels, inner) = super::shape::around(shape, axis);
    let y = out[0].reset_f32(shape);
    for b in 0..batch {
        for ch in 0..channels {
            let low = ch.saturating_sub(size / 2);
            let high = (ch + (size - 1) / 2 + 1).min(channels);
            for i in 0..inner {
                let at = |ch: usize| x[(b * channels + ch) * inner + i];
                let sum: f32 = (low..high).map(|ch| at(ch) * at(ch)).sum();
                y[(b * channels + ch) * inner + i] = at(ch) / (k + alpha * sum / size as f32).powf(beta);
            }
        }
    }
    Ok(())
}
