//! Ops on pairs of elements, with NumPy broadcasting.

use super::super::strided::{StridedLoops, dense_strides, zip_elements};
use super::operands::{OpContext, OpError, OpResult};
use super::shape::{broadcast_shape, count, invalid, pair_loops, repeated, unsupported};
use crate::tensor::{Data, Tensor, with_elements};
use anemoe_kernels::Pool;

/// An op on pairs of floats: runs over all elements of the loops, with the arguments result, `x`, `y`.
pub(in crate::cpu) type BinaryLoops = fn(&StridedLoops<3>, &mut [f32], &[f32], &[f32]);

/// Returns the larger number; NaN where one is, as Apple's kernels do.
pub(super) fn larger(a: f32, b: f32) -> f32 {
    if a >= b || a.is_nan() { a } else { b }
}

/// Returns the smaller number; NaN where one is.
pub(super) fn smaller(a: f32, b: f32) -> f32 {
    if a <= b || a.is_nan() { a } else { b }
}

/// Returns the loops of an op on pairs of floats; none for other ops.
#[rustfmt::skip]
pub(in crate::cpu) fn binary_loops(op: &str) -> Option<BinaryLoops> {
    Some(match op {
        "add" => |l, o, x, y| zip_elements(l, o, x, y, |a, b| a + b),
        "sub" => |l, o, x, y| zip_elements(l, o, x, y, |a, b| a - b),
        "mul" => |l, o, x, y| zip_elements(l, o, x, y, |a, b| a * b),
        "real_div" => |l, o, x, y| zip_elements(l, o, x, y, |a, b| a / b),
        "floor_div" => |l, o, x, y| zip_elements(l, o, x, y, |a, b| (a / b).floor()),
        "mod" => |l, o, x, y| zip_elements(l, o, x, y, |a, b| a - b * (a / b).floor()),
        "maximum" => |l, o, x, y| zip_elements(l, o, x, y, larger),
        "minimum" => |l, o, x, y| zip_elements(l, o, x, y, smaller),
        "pow" => |l, o, x, y| zip_elements(l, o, x, y, f32::powf),
        _ => return None,
    })
}

pub(super) fn arithmetic(c: &OpContext<'_>, out: &mut [Tensor]) -> OpResult {
    let (x, y) = (c.arg("x")?, c.arg("y")?);
    let shape = broadcast_shape(&x.shape, &y.shape)?;
    count(&shape)?;
    let loops = pair_loops(&x.shape, &y.shape, &shape)?;
    match (&x.data, &y.data) {
        (Data::F32(a), Data::F32(b)) => {
            let f = binary_loops(c.op).ok_or_else(|| OpError::Unsupported(format!("op `{}`", c.op)))?;
            loops.split(Pool::global(), out[0].reset_f32(&shape), 1, &|loops, o| f(loops, o, a, b));
        }
        (Data::I32(a), Data::I32(b)) => {
            if matches!(c.op, "floor_div" | "mod" | "real_div") && b.contains(&0) {
                return invalid("division by zero");
            }
            let f: fn(i32, i32) -> i32 = match c.op {
                "add" => i32::wrapping_add,
                "sub" => i32::wrapping_sub,
                "mul" => i32::wrapping_mul,
                "floor_div" => floor_div,
                "real_div" => i32::wrapping_div,
                "mod" => |a, b| a.wrapping_sub(b.wrapping_mul(floor_div(a, b))),
                "maximum" => i32::max,
                "minimum" => i32::min,
                "pow" => |a, b| a.wrapping_pow(u32::try_from(b).unwrap_or(0)),
                _ => return unsupported(format!("`{}` of integers", c.op)),
            };
            zip_elements(&loops, out[0].reset_i32(&shape), a, b, f);
        }
        _ => return invalid("parameters `x` and `y` are of different types"),
    }
    Ok(())
}

fn floor_div(a: i32, b: i32) -> i32 {
    let q = a.wrapping_div(b);
    if a.wrapping_rem(b) != 0 && (a < 0) != (b < 0) { q - 1 } else { q }
}

pub(super) fn compare(c: &OpContext<'_>, out: &mut [Tensor]) -> OpResult {
    let (x, y) = (c.arg("x")?, c.arg("y")?);
    let shape = broadcast_shape(&x.shape, &y.shape)?;
    count(&shape)?;
    fn by<T: Copy + PartialOrd>(op: &str) -> Option<fn(T, T) -> bool> {
        Some(match op {
            "equal" => |a, b| a == b,
            "not_equal" => |a, b| a != b,
            "greater" => |a, b| a > b,
            "greater_equal" => |a, b| a >= b,
            "less" => |a, b| a < b,
            "less_equal" => |a, b| a <= b,
            _ => return None,
        })
    }
    let missing = || OpError::Unsupported(format!("op `{}`", c.op));
    let loops = pair_loops(&x.shape, &y.shape, &shape)?;
    let o = out[0].reset_bool(&shape);
    match (&x.data, &y.data) {
        (Data::F32(a), Data::F32(b)) => zip_elements(&loops, o, a, b, by(c.op).ok_or_else(missing)?),
        (Data::I32(a), Data::I32(b)) => zip_elements(&loops, o, a, b, by(c.op).ok_or_else(missing)?),
        (Data::Bool(a), Data::Bool(b)) => {
            let f: fn(bool, bool) -> bool = match c.op {
                "logical_and" => |a, b| a && b,
                "logical_or" => |a, b| a || b,
                "logical_xor" => |a, b| a != b,
                _ => by(c.op).ok_or_else(missing)?,
            };
            zip_elements(&loops, o, a, b, f);
        }
        _ => return invalid("parameters `x` and `y` are of different types"),
    }
    Ok(())
}

pub(super) fn select(c: &OpContext<'_>, out: &mut [Tensor]) -> OpResult {
    let (cond, a, b) = (c.arg("cond")?, c.arg("a")?, c.arg("b")?);
    let mask = cond.as_bool().ok_or_else(|| OpError::Invalid("parameter `cond` must be bool".into()))?;
    let shape = broadcast_shape(&broadcast_shape(&cond.shape, &a.shape)?, &b.shape)?;
    let n = count(&shape)?;
    let of = |t: &Tensor| repeated(&t.shape, &shape);
    let (m, x, y) = (of(cond)?, of(a)?, of(b)?);
    let loops = StridedLoops::new(&shape, [&dense_strides(&shape), &m, &x, &y], [0; 4]);
    fn pick<T: Copy>(loops: &StridedLoops<4>, mask: &[bool], a: &[T], b: &[T], out: &mut [T]) {
        loops.each_element(|[o, m, i, j]| out[o] = if mask[m] { a[i] } else { b[j] });
    }
    let other = || invalid(format!("parameters `a` and `b` are of different types ({n} elements)"));
    with_elements!(
        F32 | I32 | Bool,
        (&a.data, &b.data),
        |x, y| pick(&loops, mask, x, y, out[0].reset(&shape)),
        return other()
    );
    Ok(())
}
