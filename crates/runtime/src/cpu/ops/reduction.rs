//! Reductions over axes.

use super::operands::{OpContext, OpError, OpResult};
use super::shape::{for_each_row, invalid, strides, unsupported};
use crate::tensor::{Data, Tensor};

/// Axes as flags.
fn reduced_axes(c: &OpContext<'_>, rank: usize) -> OpResult<Vec<bool>> {
    let mut flags = vec![c.ints("axes")?.is_none(); rank];
    for &a in c.ints("axes")?.unwrap_or(&[]) {
        flags[super::shape::axis(a, rank)?] = true;
    }
    Ok(flags)
}

fn result_shape(shape: &[usize], reduced: &[bool], keep: bool) -> Vec<usize> {
    let dim = |(&d, &r): (&usize, &bool)| match (r, keep) {
        (false, _) => Some(d),
        (true, true) => Some(1),
        (true, false) => None,
    };
    shape.iter().zip(reduced).filter_map(dim).collect()
}

pub(super) fn reduce(c: &OpContext<'_>, out: &mut [Tensor]) -> OpResult {
    let x = c.arg("x")?;
    let reduced = reduced_axes(c, x.rank())?;
    let shape = result_shape(&x.shape, &reduced, c.bool("keep_dims", false)?);
    match &x.data {
        Data::F32(v) => floats(c, x, v, &reduced, out[0].reset_f32(&shape)),
        Data::I32(v) => integers(c, x, v, &reduced, out[0].reset_i32(&shape)),
        _ => invalid("parameter `x` must be a number tensor"),
    }
}

/// Strides of the result along the axes of the input: 0 along reduced ones.
fn target_strides(shape: &[usize], reduced: &[bool]) -> Vec<usize> {
    let kept: Vec<usize> = shape.iter().zip(reduced).map(|(&d, &r)| if r { 1 } else { d }).collect();
    strides(&kept).into_iter().zip(reduced).map(|(s, &r)| if r { 0 } else { s }).collect()
}

fn floats(c: &OpContext<'_>, x: &Tensor, v: &[f32], reduced: &[bool], y: &mut [f32]) -> OpResult {
    let n: usize = x.shape.iter().zip(reduced).filter(|(_, r)| **r).map(|(d, _)| *d).product();
    let own = strides(&x.shape);
    let target = target_strides(&x.shape, reduced);
    let (inner, step) = (x.shape.last().copied().unwrap_or(1), target.last().copied().unwrap_or(0));
    let run = |init: f64, f: &dyn Fn(f64, f32) -> f64| {
        let mut acc = vec![init; y.len()];
        for_each_row(&x.shape, [&own, &target], |[i, o]| {
            if step == 0 {
                acc[o] = v[i..i + inner].iter().fold(acc[o], |a, &b| f(a, b));
            } else {
                acc[o..o + inner].iter_mut().zip(&v[i..]).for_each(|(a, &b)| *a = f(*a, b));
            }
        });
        acc
    };
    let sum = |a: f64, b: f32| a + f64::from(b);
    let squares = |a: f64, b: f32| a + f64::from(b) * f64::from(b);
    let acc = match c.op {
        "reduce_sum" => run(0.0, &sum),
        "reduce_mean" => run(0.0, &sum).into_iter().map(|v| v / n as f64).collect(),
        "reduce_max" => run(f64::NEG_INFINITY, &|a, b| a.max(f64::from(b))),
        "reduce_min" => run(f64::INFINITY, &|a, b| a.min(f64::from(b))),
        "reduce_prod" => run(1.0, &|a, b| a * f64::from(b)),
        "reduce_l1_norm" => run(0.0, &|a, b| a + f64::from(b.abs())),
        "reduce_l2_norm" => run(0.0, &squares).into_iter().map(f64::sqrt).collect(),
        "reduce_sum_square" => run(0.0, &squares),
        "reduce_log_sum" => run(0.0, &sum).into_iter().map(f64::ln).collect(),
        "reduce_log_sum_exp" => {
            let max = run(f64::NEG_INFINITY, &|a, b| a.max(f64::from(b)));
            let mut acc = vec![0.0f64; y.len()];
            for_each_row(&x.shape, [&own, &target], |[i, o]| {
                for (k, &b) in v[i..i + inner].iter().enumerate() {
                    acc[o + k * step] += (f64::from(b) - max[o + k * step]).exp();
                }
            });
            acc.into_iter().zip(max).map(|(a, m)| a.ln() + m).collect()
        }
        _ => return unsupported(format!("op `{}`", c.op)),
    };
    y.iter_mut().zip(acc).for_each(|(y, a)| *y = a as f32);
    Ok(())
}

fn integers(c: &OpContext<'_>, x: &Tensor, v: &[i32], reduced: &[bool], y: &mut [i32]) -> OpResult {
    let n: usize = x.shape.iter().zip(reduced).filter(|(_, r)| **r).map(|(d, _)| *d).product();
    let (init, f): (i32, fn(i32, i32) -> i32) = match c.op {
        "reduce_sum" | "reduce_mean" => (0, i32::wrapping_add),
        "reduce_max" => (i32::MIN, i32::max),
        "reduce_min" => (i32::MAX, i32::min),
        "reduce_prod" => (1, i32::wrapping_mul),
        "reduce_l1_norm" => (0, |a, b| a.wrapping_add(b.wrapping_abs())),
        "reduce_sum_square" => (0, |a, b| a.wrapping_add(b.wrapping_mul(b))),
        _ => return unsupported(format!("`{}` of integers", c.op)),
    };
    y.fill(init);
    let own = strides(&x.shape);
    let target = target_strides(&x.shape, reduced);
    let (inner, step) = (x.shape.last().copied().unwrap_or(1), target.last().copied().unwrap_or(0));
    for_each_row(&x.shape, [&own, &target], |[i, o]| {
        for (k, &b) in v[i..i + inner].iter().enumerate() {
            y[o + k * step] = f(y[o + k * step], b);
        }
    });
    if c.op == "reduce_mean" {
        y.iter_mut().for_each(|y| *y /= n.max(1) as i32);
    }
    Ok(())
}

/// Index of the largest or smallest element; the first of equals.
pub(super) fn arg(c: &OpContext<'_>, out: &mut [Tensor]) -> OpResult {
    let x = c.arg("x")?;
    let axis = super::shape::axis(c.int("axis", -1)?, x.rank())?;
    let values: Vec<f64> = match &x.data {
        Data::F32(v) => v.iter().map(|&v| f64::from(v)).collect(),
        Data::I32(v) => v.iter().map(|&v| f64::from(v)).collect(),
        _ => return Err(OpError::Invalid("parameter `x` must be a number tensor".into())),
    };
    let (outer, n, inner) = super::shape::around(&x.shape, axis);
    if n == 0 {
        return invalid("an axis without elements");
    }
    let reduced: Vec<bool> = (0..x.rank()).map(|i| i == axis).collect();
    let shape = result_shape(&x.shape, &reduced, c.bool("keep_dims", false)?);
    let y = out[0].reset_i32(&shape);
    let better = |a: f64, b: f64| if c.op == "reduce_argmax" { a > b } else { a < b };
    for o in 0..outer {
        for i in 0..inner {
            let at = |k: usize| values[(o * n + k) * inner + i];
            let best = (1..n).fold(0, |best, k| if better(at(k), at(best)) { k } else { best });
            y[o * inner + i] = best as i32;
        }
    }
    Ok(())
}
