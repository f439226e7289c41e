//! Ops on each element of one tensor: unary functions, activations, casts.

use super::operands::{OpContext, OpError, OpResult};
use super::shape::{count, invalid, unsupported};
use crate::tensor::{Data, Tensor};
use anemoe_kernels::{ActivationFunction, GELU_FP16, Pool};
use anemoe_mlpackage::mil::DataType;

/// Elements that a thread computes in one part of a job.
const MAPPED: usize = 1 << 12;

/// Computes `y = f(x)` on all threads.
fn map_all(x: &[f32], y: &mut [f32], f: &(dyn Fn(f32) -> f32 + Sync)) {
    Pool::global().for_chunks(y, MAPPED, &|i, y| {
        y.iter_mut().zip(&x[i * MAPPED..]).for_each(|(y, &x)| *y = f(x));
    });
}

/// A function of one float.
pub(in crate::cpu) type UnaryFunction = fn(f32) -> f32;

/// Returns the function of an op on floats without parameters; none for other ops.
pub(in crate::cpu) fn unary_function(op: &str) -> Option<UnaryFunction> {
    Some(match op {
        "abs" => f32::abs,
        "acos" => f32::acos,
        "asin" => f32::asin,
        "atan" => f32::atan,
        "atanh" => f32::atanh,
        "ceil" => f32::ceil,
        "cos" => f32::cos,
        "cosh" => f32::cosh,
        "erf" => libm::erff,
        "exp" => f32::exp,
        "exp2" => f32::exp2,
        "floor" => f32::floor,
        "round" => f32::round_ties_even,
        "sign" => |v| {
            if v > 0.0 {
                1.0
            } else if v < 0.0 {
                -1.0
            } else {
                v * 0.0
            }
        },
        "sin" => f32::sin,
        "sinh" => f32::sinh,
        "sqrt" => f32::sqrt,
        "square" => |v| v * v,
        "tan" => f32::tan,
        "tanh" => f32::tanh,
        "relu" => |v| v.max(0.0),
        "relu6" => |v| v.clamp(0.0, 6.0),
        "sigmoid" => sigmoid,
        "silu" => activation(ActivationFunction::Silu),
        "softplus" => softplus,
        "softsign" => |v| v / (1.0 + v.abs()),
        _ => return None,
    })
}

/// Applies the unary function that the op names.
pub(super) fn unary(c: &OpContext<'_>, out: &mut [Tensor]) -> OpResult {
    let x = c.arg("x")?;
    if let Data::I32(v) = &x.data {
        return integer(c, &x.shape, v, out);
    }
    let (shape, x) = c.f32s("x")?;
    let Some(f) = unary_function(c.op) else { return unsupported(format!("unary op `{}`", c.op)) };
    map_all(x, out[0].reset_f32(shape), &f);
    Ok(())
}

fn integer(c: &OpContext<'_>, shape: &[usize], x: &[i32], out: &mut [Tensor]) -> OpResult {
    let f: fn(i32) -> i32 = match c.op {
        "abs" => i32::wrapping_abs,
        "sign" => i32::signum,
        "square" => |v| v.wrapping_mul(v),
        "floor" | "ceil" | "round" => |v| v,
        "relu" => |v| v.max(0),
        _ => return unsupported(format!("`{}` of integers", c.op)),
    };
    let y = out[0].reset_i32(shape);
    y.iter_mut().zip(x).for_each(|(y, &x)| *y = f(x));
    Ok(())
}

/// Computes ops with scalar parameters, such as `clip` and `gelu`.
pub(super) fn with_parameters(c: &OpContext<'_>, out: &mut [Tensor]) -> OpResult {
    if let ("clip" | "threshold", Data::I32(v)) = (c.op, &c.arg("x")?.data) {
        let low = c.int("alpha", i32::MIN)?;
        let high = if c.op == "clip" { c.int("beta", i32::MAX)? } else { i32::MAX };
        let y = out[0].reset_i32(&c.arg("x")?.shape);
        y.iter_mut().zip(v).for_each(|(y, &x)| *y = x.max(low).min(high));
        return Ok(());
    }
    let (shape, x) = c.f32s("x")?;
    let y = out[0].reset_f32(shape);
    let mut map = |f: &(dyn Fn(f32) -> f32 + Sync)| map_all(x, y, f);
    let required = |name: &str| c.arg(name).and_then(|_| c.float(name, 0.0));
    match c.op {
        "clamped_relu" => {
            let (a, b) = (required("alpha")?, required("beta")?);
            map(&|v| if v >= 0.0 { v } else { a * v }.min(b));
        }
        "clip" => {
            let (a, b) = (required("alpha")?, required("beta")?);
            map(&|v| v.max(a).min(b));
        }
        "elu" => {
            let a = c.float("alpha", 1.0)?;
            map(&|v| if v > 0.0 { v } else { a * v.exp_m1() });
        }
        "inverse" => {
            let e = c.float("epsilon", 1e-4)?;
            map(&|v| 1.0 / (v + e));
        }
        "leaky_relu" => {
            let a = c.float("alpha", 0.01)?;
            map(&|v| if v >= 0.0 { v } else { a * v });
        }
        "linear_activation" => {
            let (a, b) = (required("alpha")?, c.float("beta", 0.0)?);
            map(&|v| a * v + b);
        }
        "log" => {
            let e = c.float("epsilon", 1e-45)?;
            map(&|v| (v + e).ln());
        }
        "rsqrt" => {
            let e = c.float("epsilon", 1e-12)?;
            map(&|v| 1.0 / (v + e).sqrt());
        }
        "scaled_tanh" => {
            let (a, b) = (c.float("alpha", 1.0)?, c.float("beta", 1.0)?);
            map(&|v| a * (b * v).tanh());
        }
        "sigmoid_hard" => {
            let (a, b) = (c.float("alpha", 0.2)?, c.float("beta", 0.5)?);
            map(&|v| (a * v + b).clamp(0.0, 1.0));
        }
        "threshold" => {
            let a = required("alpha")?;
            map(&|v| v.max(a));
        }
        "thresholded_relu" => {
            let a = c.float("alpha", 1.0)?;
            map(&|v| if v >= a { v } else { 0.0 });
        }
        "gelu" => match c.str("mode", "EXACT")? {
            "EXACT" => map(&activation(ActivationFunction::Gelu)),
            "TANH_APPROXIMATION" => map(&activation(ActivationFunction::GeluTanh)),
            "SIGMOID_APPROXIMATION" => map(&activation(ActivationFunction::GeluSigmoid)),
            other => return invalid(format!("gelu mode `{other}`")),
        },
        _ => return unsupported(format!("op `{}`", c.op)),
    }
    Ok(())
}

/// Computes `prelu` and `softplus_parametric`, whose parameters are per channel (axis 1).
pub(super) fn per_channel(c: &OpContext<'_>, out: &mut [Tensor]) -> OpResult {
    let (shape, x) = c.f32s("x")?;
    let channels = *shape.get(1).ok_or_else(|| OpError::Invalid("input without a channel axis".into()))?;
    let param = |name: &str| -> OpResult<Vec<f32>> {
        let (_, v) = c.f32s(name)?;
        match v.len() {
            1 => Ok(vec![v[0]; channels]),
            n if n == channels => Ok(v.to_vec()),
            n => invalid(format!("{n} values of `{name}` for {channels} channels")),
        }
    };
    let alpha = param("alpha")?;
    let beta = if c.op == "softplus_parametric" { param("beta")? } else { Vec::new() };
    let inner: usize = shape[2..].iter().product();
    let y = out[0].reset_f32(shape);
    for (i, (y, x)) in y.chunks_exact_mut(inner.max(1)).zip(x.chunks_exact(inner.max(1))).enumerate() {
        let ch = i % channels;
        for (y, &v) in y.iter_mut().zip(x) {
            *y = match c.op {
                "prelu" if v >= 0.0 => v,
                "prelu" => alpha[ch] * v,
                _ => alpha[ch] * softplus(beta[ch] * v),
            };
        }
    }
    Ok(())
}

pub(super) fn softmax(c: &OpContext<'_>, out: &mut [Tensor]) -> OpResult {
    let (shape, x) = c.f32s("x")?;
    let axis = super::shape::axis(c.int("axis", -1)?, shape.len())?;
    let (_, n, inner) = super::shape::around(shape, axis);
    let y = out[0].reset_f32(shape);
    if y.is_empty() {
        return Ok(());
    }
    if inner == 1 {
        let rows = (MAPPED / n).max(1);
        Pool::global().for_chunks(y, rows * n, &|i, y| {
            for (y, x) in y.chunks_exact_mut(n).zip(x[i * rows * n..].chunks_exact(n)) {
                let max = x.iter().copied().fold(f32::NEG_INFINITY, f32::max);
                let mut sum = 0.0;
                for (y, &x) in y.iter_mut().zip(x) {
                    *y = (x - max).exp();
                    sum += *y;
                }
                y.iter_mut().for_each(|y| *y /= sum);
            }
        });
        return Ok(());
    }
    for (y, x) in y.chunks_exact_mut(n * inner).zip(x.chunks_exact(n * inner)) {
        for i in 0..inner {
            let max = (0..n).map(|k| x[k * inner + i]).fold(f32::NEG_INFINITY, f32::max);
            let sum: f32 = (0..n).map(|k| (x[k * inner + i] - max).exp()).sum();
            (0..n).for_each(|k| y[k * inner + i] = (x[k * inner + i] - max).exp() / sum);
        }
    }
    Ok(())
}

pub(super) fn logical_not(c: &OpContext<'_>, out: &mut [Tensor]) -> OpResult {
    let x = c.arg("x")?;
    let v = x.as_bool().ok_or_else(|| OpError::Invalid("parameter `x` must be bool".into()))?;
    out[0].reset_bool(&x.shape).iter_mut().zip(v).for_each(|(y, x)| *y = !x);
    Ok(())
}

/// Copies `x`, for `identity`.
pub(super) fn identity(c: &OpContext<'_>, out: &mut [Tensor]) -> OpResult {
    copy(c.arg("x")?, &c.arg("x")?.shape, &mut out[0]);
    Ok(())
}

/// Copies the elements of `x` to `out`, in another shape of as many elements.
pub(super) fn copy(x: &Tensor, shape: &[usize], out: &mut Tensor) {
    match &x.data {
        Data::F32(v) => out.reset_f32(shape).copy_from_slice(v),
        Data::I32(v) => out.reset_i32(shape).copy_from_slice(v),
        Data::Bool(v) => out.reset_bool(shape).copy_from_slice(v),
        Data::Str(_) => *out = x.clone(),
    }
}

pub(super) fn cast(c: &OpContext<'_>, out: &mut [Tensor]) -> OpResult {
    let x = c.arg("x")?;
    let target = c.outputs.first().map_or(DataType::Float32, |t| t.dtype);
    count(&x.shape)?;
    convert(x, target, &mut out[0])
}

/// Converts elements as NumPy does: to integers by truncation (wrapped to the type's width), to bool by comparing with zero.
pub(super) fn convert(x: &Tensor, target: DataType, out: &mut Tensor) -> OpResult {
    let shape = &x.shape;
    let wrap = |v: i64| match target {
        DataType::Int8 => i32::from(v as i8),
        DataType::UInt8 => i32::from(v as u8),
        DataType::Int16 => i32::from(v as i16),
        DataType::UInt16 => i32::from(v as u16),
        _ => v as i32,
    };
    match (&x.data, target) {
        (Data::Str(_), _) => return invalid("a string cannot be cast"),
        (Data::F32(v), DataType::Bool) => {
            out.reset_bool(shape).iter_mut().zip(v).for_each(|(o, &v)| *o = v != 0.0)
        }
        (Data::I32(v), DataType::Bool) => {
            out.reset_bool(shape).iter_mut().zip(v).for_each(|(o, &v)| *o = v != 0)
        }
        (Data::Bool(v), DataType::Bool) => out.reset_bool(shape).copy_from_slice(v),
        (Data::F32(v), t) if t.is_float() => out.reset_f32(shape).copy_from_slice(v),
        (Data::I32(v), t) if t.is_float() => {
            out.reset_f32(shape).iter_mut().zip(v).for_each(|(o, &v)| *o = v as f32)
        }
        (Data::Bool(v), t) if t.is_float() => {
            out.reset_f32(shape).iter_mut().zip(v).for_each(|(o, &v)| *o = f32::from(u8::from(v)));
        }
        (Data::F32(v), _) => out.reset_i32(shape).iter_mut().zip(v).for_each(|(o, &v)| *o = wrap(v as i64)),
        (Data::I32(v), _) => {
            out.reset_i32(shape).iter_mut().zip(v).for_each(|(o, &v)| *o = wrap(i64::from(v)))
        }
        (Data::Bool(v), _) => out.reset_i32(shape).iter_mut().zip(v).for_each(|(o, &v)| *o = i32::from(v)),
    }
    Ok(())
}

/// Returns an activation as a function of one element.
pub(in crate::cpu) fn activation(kind: ActivationFunction) -> fn(f32) -> f32 {
    match kind {
        ActivationFunction::Gelu => |v| 0.5 * v * (1.0 + libm::erff(v * std::f32::consts::FRAC_1_SQRT_2)),
        ActivationFunction::GeluTanh => gelu_tanh,
        ActivationFunction::GeluFp16 => |v| v * sigmoid(v * (GELU_FP16[0] + GELU_FP16[1] * v * v)),
        ActivationFunction::GeluSigmoid => |v| v * sigmoid(1.702 * v),
        ActivationFunction::Silu => |v| v * sigmoid(v),
    }
}

pub(in crate::cpu) fn sigmoid(v: f32) -> f32 {
    1.0 / (1.0 + (-v).exp())
}

fn softplus(v: f32) -> f32 {
    // ln(1 + e^v) without overflow.
    v.max(0.0) + (-v.abs()).exp().ln_1p()
}

/// Computes `0.5 x (1 + tanh(sqrt(2/pi) (x + 0.044715 x^3)))`.
fn gelu_tanh(v: f32) -> f32 {
    let inner = 0.797_884_6 * (v + 0.044_715 * v * v * v);
    0.5 * v * (1.0 + inner.tanh())
}
