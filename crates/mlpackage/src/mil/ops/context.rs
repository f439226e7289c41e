//! Context of type inference: the operands and nested blocks of an operation.

use crate::mil::{DataType, Dim, TensorData, TensorType, Value, ValueType};
use std::collections::BTreeMap;

/// An operand: its type, and its value if the program has it as a constant.
#[derive(Clone, Debug)]
pub struct Operand<'a> {
    /// Type.
    pub ty: &'a ValueType,
    /// Immediate or blob constant, when the operand is one.
    pub value: Option<&'a Value>,
}

/// Operands of an operation by parameter.
#[derive(Clone, Debug, Default)]
pub struct Context<'a> {
    operands: BTreeMap<&'a str, Vec<Operand<'a>>>,
    /// Types of the results of each nested block.
    blocks: Vec<Vec<ValueType>>,
}

/// Types of an operation's results, or the reason why its operands do not fit.
pub type Inferred = Result<Vec<ValueType>, String>;

/// A value, or the fault of an operand in words.
pub(super) type Checked<T> = Result<T, String>;

impl<'a> Context<'a> {
    /// Binds operands to a parameter.
    pub fn bind(&mut self, param: &'a str, operands: Vec<Operand<'a>>) {
        self.operands.insert(param, operands);
    }

    /// Adds a nested block by the types of its results.
    pub fn add_block(&mut self, results: Vec<ValueType>) {
        self.blocks.push(results);
    }

    pub(super) fn block_results(&self) -> &[Vec<ValueType>] {
        &self.blocks
    }

    /// Tells whether the number of dimensions of every operand is known, which type inference needs.
    pub fn has_ranks(&self) -> bool {
        self.operands.values().flatten().all(|o| o.ty.tensor().is_none_or(TensorType::has_rank))
    }

    /// Tells whether the parameter has operands.
    pub fn has(&self, param: &str) -> bool {
        self.operands.get(param).is_some_and(|o| !o.is_empty())
    }

    pub(super) fn operand(&self, param: &str) -> Checked<&Operand<'a>> {
        self.operands
            .get(param)
            .and_then(|o| o.first())
            .ok_or_else(|| format!("required parameter `{param}` is missing"))
    }

    pub(super) fn operands(&self, param: &str) -> &[Operand<'a>] {
        self.operands.get(param).map_or(&[], Vec::as_slice)
    }

    /// Returns the tensor type of an operand; an error for other types.
    pub(super) fn tensor(&self, param: &str) -> Checked<&'a TensorType> {
        match self.operand(param)?.ty {
            ValueType::Tensor(t) => Ok(t),
            other => Err(format!("parameter `{param}` has type {other}, expected a tensor")),
        }
    }

    /// Returns the tensor types of a variadic parameter.
    pub(super) fn tensors(&self, param: &str) -> Checked<Vec<&'a TensorType>> {
        let types: Checked<Vec<_>> = self
            .operands(param)
            .iter()
            .map(|o| match o.ty {
                ValueType::Tensor(t) => Ok(t),
                other => Err(format!("parameter `{param}` has type {other}, expected a tensor")),
            })
            .collect();
        types.and_then(
            |t| if t.is_empty() { Err(format!("parameter `{param}` has no values")) } else { Ok(t) },
        )
    }

    pub(super) fn rank(&self, param: &str) -> Checked<usize> {
        Ok(self.tensor(param)?.rank())
    }

    fn value(&self, param: &str) -> Option<&'a Value> {
        self.operands.get(param)?.first()?.value
    }

    /// Returns the integers of the parameter's operands; `None` when it is absent or one is not constant.
    pub(super) fn ints(&self, param: &str) -> Option<Vec<i64>> {
        let ints = |o: &Operand<'_>| o.value?.as_ints().map(|v| v.iter().map(|&x| i64::from(x)).collect());
        let all: Option<Vec<Vec<i64>>> = self.operands.get(param)?.iter().map(ints).collect();
        all.map(|all| all.concat())
    }

    /// Returns a number of axes, an int32 or uint32 constant.
    pub(super) fn count(&self, param: &str) -> Checked<usize> {
        let n = match self.operand(param)?.value.and_then(Value::tensor_data) {
            Some(TensorData::Ints(v)) if v.len() == 1 => usize::try_from(v[0]).ok(),
            Some(TensorData::Bytes(b)) => {
                <[u8; 4]>::try_from(b.as_slice()).ok().map(|b| u32::from_le_bytes(b) as usize)
            }
            _ => None,
        };
        n.ok_or_else(|| format!("parameter `{param}` must be a constant that is not negative"))
    }

    /// Returns the integers of an operand that must be constant.
    pub(super) fn const_ints(&self, param: &str) -> Checked<Vec<i64>> {
        self.ints(param).ok_or_else(|| format!("parameter `{param}` must be an int32 constant"))
    }

    pub(super) fn int(&self, param: &str, default: i64) -> Checked<i64> {
        if !self.has(param) {
            return Ok(default);
        }
        match self.const_ints(param)?.as_slice() {
            [v] => Ok(*v),
            other => Err(format!("parameter `{param}` has {} values, expected one", other.len())),
        }
    }

    pub(super) fn bool(&self, param: &str, default: bool) -> Checked<bool> {
        if !self.has(param) {
            return Ok(default);
        }
        let value = self.value(param).and_then(Value::as_bool);
        value.ok_or_else(|| format!("parameter `{param}` must be a bool constant"))
    }

    pub(super) fn text(&self, param: &str) -> Checked<Option<&'a str>> {
        if !self.has(param) {
            return Ok(None);
        }
        let value = self.value(param).and_then(Value::as_str);
        value.map(Some).ok_or_else(|| format!("parameter `{param}` must be a string constant"))
    }

    pub(super) fn bools(&self, param: &str) -> Option<Vec<bool>> {
        let bools = |o: &Operand<'_>| match o.value?.tensor_data()? {
            TensorData::Bools(v) => Some(v.clone()),
            _ => None,
        };
        let all: Option<Vec<Vec<bool>>> = self.operands.get(param)?.iter().map(bools).collect();
        all.map(|all| all.concat())
    }

    /// Returns an axis of a tensor of `rank`; a negative parameter counts from the end.
    pub(super) fn axis(&self, param: &str, default: i64, rank: usize) -> Checked<usize> {
        let axis = self.int(param, default)?;
        normalize_axis(axis, rank)
            .ok_or_else(|| format!("parameter `{param}`: axis {axis} of a tensor of rank {rank}"))
    }

    /// Returns axes of a tensor of `rank`; all axes when the parameter is absent.
    pub(super) fn axes(&self, param: &str, rank: usize) -> Checked<Vec<usize>> {
        if !self.has(param) {
            return Ok((0..rank).collect());
        }
        let normalize = |axis: i64| {
            normalize_axis(axis, rank)
                .ok_or_else(|| format!("parameter `{param}`: axis {axis} of a tensor of rank {rank}"))
        };
        self.const_ints(param)?.into_iter().map(normalize).collect()
    }

    /// Checks that the operand, if bound, has the element type `dtype`.
    pub(super) fn same_dtype(&self, param: &str, dtype: DataType) -> Checked<()> {
        if !self.has(param) {
            return Ok(());
        }
        let found = self.tensor(param)?.dtype;
        if found == dtype {
            Ok(())
        } else {
            Err(format!("parameter `{param}` is of {found}, expected {dtype}"))
        }
    }
}

pub(super) fn normalize_axis(axis: i64, rank: usize) -> Option<usize> {
    let axis = if axis < 0 { axis.checked_add(rank as i64)? } else { axis };
    usize::try_from(axis).ok().filter(|&a| a < rank)
}

/// Broadcasts two dimensions.
pub(super) fn broadcast_dim(a: Dim, b: Dim) -> Checked<Dim> {
    match (a, b) {
        (Dim::Fixed(1), d) | (d, Dim::Fixed(1)) => Ok(d),
        (Dim::Fixed(x), Dim::Fixed(y)) if x == y => Ok(a),
        (Dim::Fixed(x), Dim::Fixed(y)) => Err(format!("dimensions {x} and {y} do not broadcast")),
        // An unknown dimension broadcasts with a size above 1 only if it is equal.
        (Dim::Unknown | Dim::Variadic, d) | (d, Dim::Unknown | Dim::Variadic) => Ok(d),
    }
}

/// Broadcasts two shapes as NumPy does, aligned at the last axis.
pub(super) fn broadcast(a: &[Dim], b: &[Dim]) -> Checked<Vec<Dim>> {
    let rank = a.len().max(b.len());
    let at = |s: &[Dim], i: usize| if i + s.len() < rank { Dim::Fixed(1) } else { s[i + s.len() - rank] };
    (0..rank).map(|i| broadcast_dim(at(a, i), at(b, i))).collect()
}

/// Returns the product of dimensions; `None` when one is unknown or the product overflows.
pub(super) fn product(dims: &[Dim]) -> Option<u64> {
    dims.iter().try_fold(1u64, |n, d| n.checked_mul(d.fixed()?))
}
