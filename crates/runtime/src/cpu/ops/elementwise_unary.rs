//! Ops on each element of one tensor: unary functions, activations, casts.

use super::super::weights::to_f16;
use super::elementwise_binary::smaller;
use super::operands::{OpContext, OpError, OpResult};
use super::shape::{count, invalid, unsupported};
use crate::tensor::{Data, Tensor, TensorElement, with_elements};
use anemoe_io::locked;
use anemoe_kernels::{ActivationFunction, GELU_FP16, Pool};
use anemoe_mlpackage::mil::DataType;
use std::collections::BTreeMap;
use std::sync::{Arc, Mutex};

/// Elements that a thread computes in one part of a job.
const MAPPED: usize = 1 << 12;

/// Computes `y = f(x)` on all threads.
pub(in crate::cpu) fn map_all(x: &[f32], y: &mut [f32], f: &ElementFunction) {
    Pool::global().for_chunks(y, MAPPED, &|i, y| {
        y.copy_from_slice(&x[i * MAPPED..][..y.len()]);
        f.apply(y);
    });
}

/// A function of many elements, in place.
type SliceFunction = dyn Fn(&mut [f32]) + Send + Sync;

/// A function of each element of a slice.
#[derive(Clone)]
pub(in crate::cpu) enum ElementFunction {
    /// Limits elements to a range.
    Clamp(f32, f32),
    /// Multiplies elements below zero.
    LeakyRelu(f32),
    /// An activation within some units in the last place.
    Activation(ActivationFunction),
    /// Any other function; it is called with many elements at a time.
    Other(Arc<SliceFunction>),
    /// Results of all fp16 numbers, rounded to fp16.
    Table(Arc<[u16]>),
}

/// Tables by the text of the function and its parameters.
static TABLES: Mutex<BTreeMap<String, Arc<[u16]>>> = Mutex::new(BTreeMap::new());

impl ElementFunction {
    fn scalar(f: impl Fn(f32) -> f32 + Send + Sync + 'static) -> ElementFunction {
        ElementFunction::Other(Arc::new(move |x| x.iter_mut().for_each(|v| *v = f(*v))))
    }

    /// Computes `x = f(x)`.
    pub fn apply(&self, x: &mut [f32]) {
        match self {
            ElementFunction::Clamp(low, high) => anemoe_kernels::clamp(x, *low, *high),
            ElementFunction::LeakyRelu(slope) => anemoe_kernels::leaky_relu(x, *slope),
            ElementFunction::Activation(kind) => anemoe_kernels::apply_activation(x, *kind),
            ElementFunction::Other(f) => f(x),
            ElementFunction::Table(table) => {
                let mut halves = [0u16; 256];
                for x in x.chunks_mut(halves.len()) {
                    let halves = &mut halves[..x.len()];
                    anemoe_kernels::f32_to_f16(x, halves);
                    halves.iter_mut().for_each(|h| *h = table[usize::from(*h)]);
                    anemoe_kernels::f16_bits_to_f32(halves, x);
                }
            }
        }
    }

    /// Returns the same function of fp16 numbers, with results rounded to fp16; a slow one is a table of all of them. `name` says
    /// which function it is, with its parameters.
    pub fn rounded(self, name: &str) -> ElementFunction {
        if matches!(
            self,
            ElementFunction::Clamp(..) | ElementFunction::LeakyRelu(_) | ElementFunction::Table(_)
        ) {
            return self;
        }
        let known = locked(&TABLES).get(name).cloned();
        ElementFunction::Table(known.unwrap_or_else(|| {
            let (mut values, mut halves) = (vec![0f32; 1 << 16], (0..=u16::MAX).collect::<Vec<u16>>());
            anemoe_kernels::f16_bits_to_f32(&halves, &mut values);
            self.apply(&mut values);
            anemoe_kernels::f32_to_f16(&values, &mut halves);
            let table: Arc<[u16]> = halves.into();
            locked(&TABLES).insert(name.to_string(), table.clone());
            table
        }))
    }

    /// Tells whether results of fp16 numbers are fp16 numbers.
    pub fn keeps_halves(&self) -> bool {
        match self {
            ElementFunction::Table(_) => true,
            ElementFunction::Clamp(low, high) => [low, high].into_iter().all(|v| to_f16(*v) == *v),
            _ => false,
        }
    }
}

/// Returns the function of a float op of one tensor and parameters of one number, which are none of `x`.
///
/// # Errors
/// There is no such function, or a parameter does not fit.
pub(in crate::cpu) fn element_function(c: &OpContext<'_>) -> OpResult<ElementFunction> {
    let required = |name: &str| c.arg(name).and_then(|_| c.float(name, 0.0));
    Ok(match c.op {
        "relu" => ElementFunction::Clamp(0.0, f32::INFINITY),
        "relu6" => ElementFunction::Clamp(0.0, 6.0),
        "clip" => ElementFunction::Clamp(required("alpha")?, required("beta")?),
        "threshold" => ElementFunction::Clamp(required("alpha")?, f32::INFINITY),
        "leaky_relu" => ElementFunction::LeakyRelu(c.float("alpha", 0.01)?),
        "clamped_relu" => {
            let (a, b) = (required("alpha")?, required("beta")?);
            ElementFunction::scalar(move |v| smaller(if v >= 0.0 { v } else { a * v }, b))
        }
        "elu" => {
            let a = c.float("alpha", 1.0)?;
            ElementFunction::scalar(move |v| if v > 0.0 { v } else { a * v.exp_m1() })
        }
        "inverse" => {
            let e = c.float("epsilon", 1e-4)?;
            ElementFunction::scalar(move |v| 1.0 / (v + e))
        }
        "linear_activation" => {
            let (a, b) = (required("alpha")?, c.float("beta", 0.0)?);
            ElementFunction::scalar(move |v| a * v + b)
        }
        "log" => {
            let e = c.float("epsilon", 1e-45)?;
            ElementFunction::scalar(move |v| (v + e).ln())
        }
        "rsqrt" => {
            let e = c.float("epsilon", 1e-12)?;
            ElementFunction::scalar(move |v| 1.0 / (v + e).sqrt())
        }
        "scaled_tanh" => {
            let (a, b) = (c.float("alpha", 1.0)?, c.float("beta", 1.0)?);
            ElementFunction::scalar(move |v| a * (b * v).tanh())
        }
        "sigmoid_hard" => {
            let (a, b) = (c.float("alpha", 0.2)?, c.float("beta", 0.5)?);
            ElementFunction::scalar(move |v| (a * v + b).clamp(0.0, 1.0))
        }
        "thresholded_relu" => {
            let a = c.float("alpha", 1.0)?;
            ElementFunction::scalar(move |v| if v >= a { v } else { 0.0 })
        }
        "gelu" => {
            let mode = c.str("mode", "EXACT")?;
            let kind = ActivationFunction::of_gelu(mode);
            let kind = kind.ok_or_else(|| OpError::Invalid(format!("gelu mode `{mode}`")))?;
            ElementFunction::scalar(activation(kind))
        }
        _ => match unary_function(c.op) {
            Some(f) => ElementFunction::Other(Arc::new(f)),
            None => return unsupported(format!("op `{}`", c.op)),
        },
    })
}

/// Returns the function of an op on floats without parameters; none for other ops.
#[rustfmt::skip]
fn unary_function(op: &str) -> Option<fn(&mut [f32])> {
    /// Computes `x = f(x)`; each call of it is compiled with its function.
    #[inline(always)]
    fn each(x: &mut [f32], f: impl Fn(f32) -> f32) {
        x.iter_mut().for_each(|v| *v = f(*v));
    }
    Some(match op {
        "abs" => |x| each(x, f32::abs),
        "acos" => |x| each(x, f32::acos),
        "asin" => |x| each(x, f32::asin),
        "atan" => |x| each(x, f32::atan),
        "atanh" => |x| each(x, f32::atanh),
        "ceil" => |x| each(x, f32::ceil),
        "cos" => |x| each(x, f32::cos),
        "cosh" => |x| each(x, f32::cosh),
        "erf" => |x| each(x, libm::erff),
        "exp" => |x| each(x, f32::exp),
        "exp2" => |x| each(x, f32::exp2),
        "floor" => |x| each(x, f32::floor),
        "round" => |x| each(x, f32::round_ties_even),
        "sign" => |x| each(x, |v| if v > 0.0 { 1.0 } else if v < 0.0 { -1.0 } else { v * 0.0 }),
        "sin" => |x| each(x, f32::sin),
        "sinh" => |x| each(x, f32::sinh),
        "sqrt" => |x| each(x, f32::sqrt),
        "square" => |x| each(x, |v| v * v),
        "tan" => |x| each(x, f32::tan),
        "tanh" => |x| each(x, f32::tanh),
        "sigmoid" => |x| each(x, sigmoid),
        "silu" => |x| each(x, |v| v * sigmoid(v)),
        "softplus" => |x| each(x, softplus),
        "softsign" => |x| each(x, |v| v / (1.0 + v.abs())),
        _ => return None,
    })
}

/// Computes an op of one tensor and parameters of one number.
pub(super) fn unary(c: &OpContext<'_>, out: &mut [Tensor]) -> OpResult {
    let x = c.arg("x")?;
    if let Data::I32(v) = &x.data {
        return integer(c, &x.shape, v, out);
    }
    let (shape, x) = c.f32s("x")?;
    map_all(x, out[0].reset_f32(shape), &element_function(c)?);
    Ok(())
}

fn integer(c: &OpContext<'_>, shape: &[usize], x: &[i32], out: &mut [Tensor]) -> OpResult {
    let y = out[0].reset_i32(shape);
    if let "clip" | "threshold" = c.op {
        let low = c.int("alpha", i32::MIN)?;
        let high = if c.op == "clip" { c.int("beta", i32::MAX)? } else { i32::MAX };
        y.iter_mut().zip(x).for_each(|(y, &x)| *y = x.max(low).min(high));
        return Ok(());
    }
    let f: fn(i32) -> i32 = match c.op {
        "abs" => i32::wrapping_abs,
        "sign" => i32::signum,
        "square" => |v| v.wrapping_mul(v),
        "floor" | "ceil" | "round" => |v| v,
        "relu" => |v| v.max(0),
        _ => return unsupported(format!("`{}` of integers", c.op)),
    };
    y.iter_mut().zip(x).for_each(|(y, &x)| *y = f(x));
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
pub(in crate::cpu) fn copy(x: &Tensor, shape: &[usize], out: &mut Tensor) {
    with_elements!(F32 | I32 | Bool, &x.data, |v| out.reset(shape).copy_from_slice(v), *out = x.clone())
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
    if target.is_float() && x.as_f32().is_some() {
        copy(x, shape, out);
        return Ok(());
    }
    with_elements!(
        F32 | I32 | Bool,
        &x.data,
        |v| match target {
            DataType::Bool => {
                out.reset_bool(shape).iter_mut().zip(v).for_each(|(o, v)| *o = v.number() != 0.0);
            }
            t if t.is_float() => {
                out.reset_f32(shape).iter_mut().zip(v).for_each(|(o, v)| *o = v.number() as f32);
            }
            _ => out.reset_i32(shape).iter_mut().zip(v).for_each(|(o, v)| *o = wrap(v.number() as i64)),
        },
        return invalid("a string cannot be cast")
    );
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
