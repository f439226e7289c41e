//! Ops on pairs of elements, with NumPy broadcasting.

use super::operands::{OpContext, OpError, OpResult};
use super::shape::{broadcast_shape, count, invalid, unsupported, zip_broadcast};
use crate::tensor::{Data, Tensor};

pub(super) fn arithmetic(c: &OpContext<'_>, out: &mut [Tensor]) -> OpResult {
    let (x, y) = (c.arg("x")?, c.arg("y")?);
    let shape = broadcast_shape(&x.shape, &y.shape)?;
    count(&shape)?;
    match (&x.data, &y.data) {
        (Data::F32(a), Data::F32(b)) => {
            let (a, b) = ((x.shape.as_slice(), a.as_slice()), (y.shape.as_slice(), b.as_slice()));
            let o = out[0].reset_f32(&shape);
            match c.op {
                "add" => zip_broadcast(a, b, &shape, o, |a, b| a + b),
                "sub" => zip_broadcast(a, b, &shape, o, |a, b| a - b),
                "mul" => zip_broadcast(a, b, &shape, o, |a, b| a * b),
                "real_div" => zip_broadcast(a, b, &shape, o, |a, b| a / b),
                "floor_div" => zip_broadcast(a, b, &shape, o, |a: f32, b| (a / b).floor()),
                "mod" => zip_broadcast(a, b, &shape, o, |a: f32, b: f32| a - b * (a / b).floor()),
                "maximum" => zip_broadcast(a, b, &shape, o, f32::max),
                "minimum" => zip_broadcast(a, b, &shape, o, f32::min),
                "pow" => zip_broadcast(a, b, &shape, o, f32::powf),
                _ => return unsupported(format!("op `{}`", c.op)),
            }
        }
        (Data::I32(a), Data::I32(b)) => {
            if matches!(c.op, "floor_div" | "mod" | "real_div") && b.contains(&0) {
                return invalid("division by zero");
            }
            let (a, b) = ((x.shape.as_slice(), a.as_slice()), (y.shape.as_slice(), b.as_slice()));
            let o = out[0].reset_i32(&shape);
            match c.op {
                "add" => zip_broadcast(a, b, &shape, o, i32::wrapping_add),
                "sub" => zip_broadcast(a, b, &shape, o, i32::wrapping_sub),
                "mul" => zip_broadcast(a, b, &shape, o, i32::wrapping_mul),
                "floor_div" => zip_broadcast(a, b, &shape, o, floor_div),
                "real_div" => zip_broadcast(a, b, &shape, o, i32::wrapping_div),
                "mod" => zip_broadcast(a, b, &shape, o, |a: i32, b| {
                    a.wrapping_sub(b.wrapping_mul(floor_div(a, b)))
                }),
                "maximum" => zip_broadcast(a, b, &shape, o, i32::max),
                "minimum" => zip_broadcast(a, b, &shape, o, i32::min),
                "pow" => zip_broadcast(a, b, &shape, o, |a: i32, b: i32| {
                    a.wrapping_pow(u32::try_from(b).unwrap_or(0))
                }),
                _ => return unsupported(format!("`{}` of integers", c.op)),
            }
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
    let o = out[0].reset_bool(&shape);
    match (&x.data, &y.data) {
        (Data::F32(a), Data::F32(b)) => {
            zip_broadcast((&x.shape, a), (&y.shape, b), &shape, o, by(c.op).ok_or_else(missing)?);
        }
        (Data::I32(a), Data::I32(b)) => {
            zip_broadcast((&x.shape, a), (&y.shape, b), &shape, o, by(c.op).ok_or_else(missing)?);
        }
        (Data::Bool(a), Data::Bool(b)) => {
            let f: fn(bool, bool) -> bool = match c.op {
                "logical_and" => |a, b| a && b,
                "logical_or" => |a, b| a || b,
                "logical_xor" => |a, b| a != b,
                _ => by(c.op).ok_or_else(missing)?,
            };
            zip_broadcast((&x.shape, a), (&y.shape, b), &shape, o, f);
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
    fn pick<T: Copy + Default>(
        mask: (&[usize], &[bool]),
        a: (&[usize], &[T]),
        b: (&[usize], &[T]),
        shape: &[usize],
        out: &mut [T],
    ) {
        // A first pass takes `a` where the mask is set, a second `b` where it is not.
        let mut chosen = vec![None; out.len()];
        zip_broadcast(mask, a, shape, &mut chosen, |m, v| m.then_some(v));
        let whole: (&[usize], &[Option<T>]) = (shape, &chosen);
        let mut result = vec![T::default(); out.len()];
        zip_broadcast(whole, b, shape, &mut result, |v, other| v.unwrap_or(other));
        out.copy_from_slice(&result);
    }
    let m = (cond.shape.as_slice(), mask);
    match (&a.data, &b.data) {
        (Data::F32(x), Data::F32(y)) => {
            pick(m, (&a.shape, x), (&b.shape, y), &shape, out[0].reset_f32(&shape))
        }
        (Data::I32(x), Data::I32(y)) => {
            pick(m, (&a.shape, x), (&b.shape, y), &shape, out[0].reset_i32(&shape))
        }
        (Data::Bool(x), Data::Bool(y)) => {
            pick(m, (&a.shape, x), (&b.shape, y), &shape, out[0].reset_bool(&shape))
        }
        _ => return invalid(format!("parameters `a` and `b` are of different types ({n} elements)")),
    }
    Ok(())
}
