//! Operands of an op, and its errors.

use crate::tensor::{Data, Tensor, TensorElement, with_elements};
use anemoe_mlpackage::mil::TensorType;

/// Reason why an op did not run. The executor adds the op's name and the file.
#[derive(Debug, thiserror::Error)]
pub enum OpError {
    /// The operands break the op's definition.
    #[error("{0}")]
    Invalid(String),
    /// The operands are legal, but the op's function does not implement this form.
    #[error("unsupported: {0}")]
    Unsupported(String),
}

/// Result of an op.
pub type OpResult<T = ()> = Result<T, OpError>;

/// Operands of one call of an op.
pub struct OpContext<'a> {
    /// Op type, for instance `reduce_sum`; families of ops share one function.
    pub op: &'a str,
    /// Operands by parameter name. Optional parameters that the program omits are absent; the function then uses the default of
    /// the op's definition.
    pub inputs: &'a [(&'a str, &'a Tensor)],
    /// Operands of a variadic parameter (`values` of `concat` and `stack`), in order; empty otherwise.
    pub values: &'a [&'a Tensor],
    /// Declared types of the outputs; unknown dimensions are resolved by the function.
    pub outputs: &'a [TensorType],
}

/// Function of an op: writes every output (see [`Tensor::reset_f32`] and its siblings).
pub type OpFunction = fn(&OpContext<'_>, &mut [Tensor]) -> OpResult;

impl<'a> OpContext<'a> {
    /// Returns an optional operand.
    pub fn get(&self, name: &str) -> Option<&'a Tensor> {
        self.inputs.iter().find(|(n, _)| *n == name).map(|(_, t)| *t)
    }

    /// Returns a required operand.
    pub fn arg(&self, name: &str) -> OpResult<&'a Tensor> {
        self.get(name).ok_or_else(|| OpError::Invalid(format!("required parameter `{name}` is missing")))
    }

    /// Returns the shape and the elements of a required float operand.
    pub fn f32s(&self, name: &str) -> OpResult<(&'a [usize], &'a [f32])> {
        let t = self.arg(name)?;
        let v = t
            .as_f32()
            .ok_or_else(|| OpError::Invalid(format!("parameter `{name}` must be a float tensor")))?;
        Ok((&t.shape, v))
    }

    /// Returns the elements of an optional integer vector or scalar.
    pub fn ints(&self, name: &str) -> OpResult<Option<&'a [i32]>> {
        match self.get(name) {
            None => Ok(None),
            Some(t) => t
                .as_i32()
                .map(Some)
                .ok_or_else(|| OpError::Invalid(format!("parameter `{name}` must be an integer tensor"))),
        }
    }

    /// Returns the elements of a required integer vector or scalar.
    pub fn required_ints(&self, name: &str) -> OpResult<&'a [i32]> {
        self.arg(name)?;
        Ok(self.ints(name)?.unwrap_or_default())
    }

    /// Returns the elements of a required operand of numbers, as floats.
    pub fn numbers(&self, name: &str) -> OpResult<Vec<f32>> {
        let numbers = self.exact_numbers(name)?;
        Ok(numbers.into_iter().map(|v| v as f32).collect())
    }

    /// Returns the elements of a required operand of numbers, each without rounding.
    pub fn exact_numbers(&self, name: &str) -> OpResult<Vec<f64>> {
        let wrong = || Err(OpError::Invalid(format!("parameter `{name}` must be numbers")));
        let data = &self.arg(name)?.data;
        with_elements!(F32 | I32, data, |v| Ok(v.iter().map(|v| v.number()).collect()), wrong())
    }

    /// Returns the elements of an optional vector of sizes.
    pub fn sizes(&self, name: &str) -> OpResult<Option<Vec<usize>>> {
        let Some(v) = self.ints(name)? else { return Ok(None) };
        let sizes = v.iter().map(|&n| usize::try_from(n).ok()).collect::<Option<_>>();
        sizes.map(Some).ok_or_else(|| OpError::Invalid(format!("negative `{name}`: {v:?}")))
    }

    /// Returns an optional size, or `default`.
    pub fn size(&self, name: &str, default: i32) -> OpResult<usize> {
        usize::try_from(self.int(name, default)?).map_err(|_| OpError::Invalid(format!("negative `{name}`")))
    }

    /// Returns an optional vector of `n` floats.
    pub fn vector(&self, name: &str, n: usize) -> OpResult<Option<&'a [f32]>> {
        match self.get(name).map(|_| self.f32s(name)).transpose()? {
            Some((shape, v)) if v.len() != n => {
                Err(OpError::Invalid(format!("parameter `{name}` has shape {shape:?}, expected [{n}]")))
            }
            found => Ok(found.map(|(_, v)| v)),
        }
    }

    /// Returns an optional integer scalar, or `default`.
    pub fn int(&self, name: &str, default: i32) -> OpResult<i32> {
        Ok(self.ints(name)?.and_then(|v| v.first().copied()).unwrap_or(default))
    }

    /// Returns an optional float scalar, or `default`.
    pub fn float(&self, name: &str, default: f32) -> OpResult<f32> {
        match self.get(name) {
            None => Ok(default),
            Some(Tensor { data: Data::F32(v), .. }) if v.len() == 1 => Ok(v[0]),
            Some(Tensor { data: Data::I32(v), .. }) if v.len() == 1 => Ok(v[0] as f32),
            Some(_) => Err(OpError::Invalid(format!("parameter `{name}` must be a number"))),
        }
    }

    /// Returns an optional bool scalar, or `default`.
    pub fn bool(&self, name: &str, default: bool) -> OpResult<bool> {
        match self.get(name) {
            None => Ok(default),
            Some(Tensor { data: Data::Bool(v), .. }) if v.len() == 1 => Ok(v[0]),
            Some(_) => Err(OpError::Invalid(format!("parameter `{name}` must be a bool"))),
        }
    }

    /// Returns an optional string, or `default`.
    pub fn str(&self, name: &str, default: &'a str) -> OpResult<&'a str> {
        match self.get(name) {
            None => Ok(default),
            Some(Tensor { data: Data::Str(v), .. }) if v.len() == 1 => Ok(&v[0]),
            Some(_) => Err(OpError::Invalid(format!("parameter `{name}` must be a string"))),
        }
    }
}
