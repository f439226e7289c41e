//! Reductions over axes.

use super::super::strided::{StridedLoops, dense_strides};
use super::elementwise_binary::{larger, smaller};
use super::operands::{OpContext, OpError, OpResult};
use super::shape::{invalid, unsupported};
use crate::tensor::{Data, Tensor};
use anemoe_kernels::Pool;

/// Most neighbouring results that one pass over their elements computes together.
const MAX_BESIDE: usize = 64;
/// Fewest neighbouring results for which a joint pass pays.
const MIN_BESIDE: usize = 8;

/// Loops of a reduction: over the results, and over the elements of each.
pub(in crate::cpu) struct ReductionLoops {
    /// Positions of each result and of its first element.
    results: StridedLoops<2>,
    /// Positions of the elements of a result, relative to its first element.
    elements: StridedLoops<1>,
    /// Number of elements of a result.
    n: usize,
}

/// A reduction of floats; arguments: loops, elements, results.
pub(in crate::cpu) type Reduce = fn(&ReductionLoops, &[f32], &mut [f32]);

impl ReductionLoops {
    /// Makes the loops of a reduction of elements of `shape`, at `strides` from `first` on, over the axes with `reduced` set.
    /// `out` holds the strides of the results, also along reduced axes.
    pub fn new(
        shape: &[usize],
        reduced: &[bool],
        out: &[usize],
        (strides, first): (&[usize], usize),
    ) -> ReductionLoops {
        let sizes = |inside: bool| -> Vec<usize> {
            shape.iter().zip(reduced).map(|(&n, &r)| if r == inside { n } else { 1 }).collect()
        };
        let elements = sizes(true);
        ReductionLoops {
            results: StridedLoops::new(&sizes(false), [out, strides], [0, first]),
            n: elements.iter().product(),
            elements: StridedLoops::new(&elements, [strides], [0]),
        }
    }

    /// Folds floats on all threads: `f` adds an element to the sum, `finish` makes the result of the sum and the element count.
    #[inline(always)]
    fn fold_floats<A: Copy + Sync>(
        &self,
        x: &[f32],
        y: &mut [f32],
        first: A,
        f: impl Fn(A, f32) -> A + Sync,
        finish: impl Fn(A, usize) -> f32 + Sync,
    ) {
        self.results.split_by(Pool::global(), y, (1, self.n), &|results, y| {
            fold(results, &self.elements, x, y, first, &f, |sum| finish(sum, self.n));
        });
    }
}

/// Folds the elements of each result in order, and makes the result with `finish`.
#[inline(always)]
fn fold<T: Copy, A: Copy>(
    results: &StridedLoops<2>,
    elements: &StridedLoops<1>,
    x: &[T],
    y: &mut [T],
    first: A,
    f: impl Fn(A, T) -> A,
    finish: impl Fn(A) -> T,
) {
    results.each(|[o, a], m, s| {
        let x = x.get(a..).unwrap_or_default();
        if *s == [1, 1] && m >= MIN_BESIDE {
            for (i, y) in y[o..o + m].chunks_mut(MAX_BESIDE).enumerate() {
                let mut sums = [first; MAX_BESIDE];
                let sums = &mut sums[..y.len()];
                elements.each(|[a], n, s| {
                    for k in 0..n {
                        let x = &x[a + i * MAX_BESIDE + k * s[0]..];
                        sums.iter_mut().zip(x).for_each(|(sum, x)| *sum = f(*sum, *x));
                    }
                });
                y.iter_mut().zip(sums).for_each(|(y, sum)| *y = finish(*sum));
            }
            return;
        }
        for i in 0..m {
            let (x, mut sum) = (x.get(i * s[1]..).unwrap_or_default(), first);
            elements.each(|[a], n, s| (0..n).for_each(|k| sum = f(sum, x[a + k * s[0]])));
            y[o + i * s[0]] = finish(sum);
        }
    });
}

/// Returns a reduction that sums in f32; none for other ops.
pub(in crate::cpu) fn fast_reduction(op: &str) -> Option<Reduce> {
    Some(match op {
        "reduce_sum" => |l, x, y| l.fold_floats(x, y, 0.0, |a, b| a + b, |v, _| v),
        "reduce_mean" => |l, x, y| l.fold_floats(x, y, 0.0, |a, b| a + b, |v, n| v / n as f32),
        "reduce_max" => |l, x, y| l.fold_floats(x, y, f32::NEG_INFINITY, larger, |v, _| v),
        "reduce_min" => |l, x, y| l.fold_floats(x, y, f32::INFINITY, smaller, |v, _| v),
        _ => return None,
    })
}

/// Returns a reduction that sums in f64; none for other ops.
#[rustfmt::skip]
pub(in crate::cpu) fn exact_reduction(op: &str) -> Option<Reduce> {
    fn sum(a: f64, b: f32) -> f64 {
        a + f64::from(b)
    }
    fn squares(a: f64, b: f32) -> f64 {
        a + f64::from(b) * f64::from(b)
    }
    Some(match op {
        "reduce_sum" => |l, x, y| l.fold_floats(x, y, 0.0, sum, |v, _| v as f32),
        "reduce_mean" => |l, x, y| l.fold_floats(x, y, 0.0, sum, |v, n| (v / n as f64) as f32),
        "reduce_max" => |l, x, y| l.fold_floats(x, y, f32::NEG_INFINITY, larger, |v, _| v),
        "reduce_min" => |l, x, y| l.fold_floats(x, y, f32::INFINITY, smaller, |v, _| v),
        "reduce_prod" => |l, x, y| l.fold_floats(x, y, 1.0, |a: f64, b| a * f64::from(b), |v, _| v as f32),
        "reduce_l1_norm" => |l, x, y| l.fold_floats(x, y, 0.0, |a: f64, b| a + f64::from(b.abs()), |v, _| v as f32),
        "reduce_l2_norm" => |l, x, y| l.fold_floats(x, y, 0.0, squares, |v, _| v.sqrt() as f32),
        "reduce_sum_square" => |l, x, y| l.fold_floats(x, y, 0.0, squares, |v, _| v as f32),
        "reduce_log_sum" => |l, x, y| l.fold_floats(x, y, 0.0, sum, |v, _| v.ln() as f32),
        "reduce_log_sum_exp" => log_sum_exp,
        _ => return None,
    })
}

/// Computes `max + ln(sum(e^(x - max)))`, which does not overflow.
fn log_sum_exp(loops: &ReductionLoops, x: &[f32], y: &mut [f32]) {
    loops.results.each(|[o, a], m, s| {
        for i in 0..m {
            let x = x.get(a + i * s[1]..).unwrap_or_default();
            let (mut max, mut sum) = (f32::NEG_INFINITY, 0.0);
            loops.elements.each_element(|[k]| max = max.max(x[k]));
            loops.elements.each_element(|[k]| sum += (f64::from(x[k]) - f64::from(max)).exp());
            y[o + i * s[0]] = (sum.ln() + f64::from(max)) as f32;
        }
    });
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
    let axes = super::shape::axes(c, x.rank())?;
    let reduced: Vec<bool> =
        (0..x.rank()).map(|i| axes.as_ref().is_none_or(|axes| axes.contains(&i))).collect();
    let shape = result_shape(&x.shape, &reduced, c.bool("keep_dims", false)?);
    let kept = result_shape(&x.shape, &reduced, true);
    let strides = dense_strides(&x.shape);
    let loops = ReductionLoops::new(&x.shape, &reduced, &dense_strides(&kept), (&strides, 0));
    match &x.data {
        Data::F32(v) => {
            let f = exact_reduction(c.op).ok_or_else(|| OpError::Unsupported(format!("op `{}`", c.op)))?;
            f(&loops, v, out[0].reset_f32(&shape));
            Ok(())
        }
        Data::I32(v) => integers(c, &loops, v, out[0].reset_i32(&shape)),
        _ => invalid("parameter `x` must be a number tensor"),
    }
}

fn integers(c: &OpContext<'_>, loops: &ReductionLoops, x: &[i32], y: &mut [i32]) -> OpResult {
    let (first, f): (i32, fn(i32, i32) -> i32) = match c.op {
        "reduce_sum" | "reduce_mean" => (0, i32::wrapping_add),
        "reduce_max" => (i32::MIN, i32::max),
        "reduce_min" => (i32::MAX, i32::min),
        "reduce_prod" => (1, i32::wrapping_mul),
        "reduce_l1_norm" => (0, |a, b| a.wrapping_add(b.wrapping_abs())),
        "reduce_sum_square" => (0, |a, b| a.wrapping_add(b.wrapping_mul(b))),
        _ => return unsupported(format!("`{}` of integers", c.op)),
    };
    let divisor = if c.op == "reduce_mean" { loops.n.max(1) as i32 } else { 1 };
    fold(&loops.results, &loops.elements, x, y, first, f, |v| v / divisor);
    Ok(())
}

/// Computes `reduce_argmax` and `reduce_argmin`: the index of the largest or smallest element, the first of equal ones.
pub(super) fn arg(c: &OpContext<'_>, out: &mut [Tensor]) -> OpResult {
    let x = c.arg("x")?;
    let axis = super::shape::axis(c.int("axis", -1)?, x.rank())?;
    let values = c.exact_numbers("x")?;
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
