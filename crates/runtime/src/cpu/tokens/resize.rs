//! Makes functions for other token counts than they were written for.
//!
//! ```text
//! function for T0 tokens, the token axis of each input, T1
//!   --> every type inferred again; constants that hold T0 (shapes of reshapes) replaced
//! ```
//! Fixed shapes are for the Neural Engine. The operations of a layer treat tokens alike, so a function for T0 tokens defines the
//! one for T1. Every value has its tokens on one axis of size `fixed + per_token * T`, found by comparing its old and its new
//! shape. Operations that may compute something else with another size of that axis are refused.

use super::super::bindings::{bound_name, names};
use super::super::ops::{is_binary, is_over_axes, is_tokenwise};
use anemoe_mlpackage::mil::ops::{self, Context, Operand};
use anemoe_mlpackage::mil::{
    Argument, Binding, Dim, FeatureShape, Function, FunctionDescription, NamedType, Operation, TensorType,
    Value, ValueType,
};
use std::borrow::Cow;
use std::collections::BTreeMap;

/// Token axis of a value: axis `axis` has the size `fixed + per_token * T`.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(in crate::cpu) struct TokenAxis {
    pub axis: usize,
    pub per_token: u64,
    pub fixed: u64,
}

impl TokenAxis {
    /// Returns the size of the axis for `tokens` tokens; none where it is too large.
    pub fn size(self, tokens: usize) -> Option<u64> {
        self.per_token.checked_mul(u64::try_from(tokens).ok()?)?.checked_add(self.fixed)
    }
}

/// A value's type in the function as written and in the new one.
struct ResizedValue<'a> {
    old: &'a ValueType,
    new: Cow<'a, ValueType>,
    /// Value of a constant.
    value: Option<&'a Value>,
}

impl<'a> ResizedValue<'a> {
    /// Makes a value that does not depend on the token count.
    fn unchanged(ty: &'a ValueType, value: Option<&'a Value>) -> Self {
        ResizedValue { old: ty, new: Cow::Borrowed(ty), value }
    }

    fn is_changed(&self) -> bool {
        *self.old != *self.new
    }
}

/// The values of a function up to an operation, by name.
type Scope<'a> = BTreeMap<&'a str, ResizedValue<'a>>;

/// Rewrites `function`, written for `from` tokens or for a range that begins there, for `to` tokens. `axes` gives the token axis
/// of each input that has one.
///
/// # Errors
/// An operation may compute something else with another token count; the text names it.
pub(in crate::cpu) fn resize(
    function: &Function,
    described: &FunctionDescription,
    axes: &BTreeMap<String, usize>,
    from: usize,
    to: usize,
) -> Result<Function, String> {
    let mut new = function.clone();
    let counts = (from as u64, to as u64);
    if from == 0 || to == 0 {
        return Err(format!("{from} tokens, and {to}"));
    }
    let is_ranged = function.inputs.iter().any(|i| i.ty.tensor().is_some_and(|t| t.shape().is_none()));
    let mut scope = Scope::new();
    for (old, new) in function.inputs.iter().zip(&mut new.inputs) {
        if let (ValueType::Tensor(ty), Some(&axis)) = (&mut new.ty, axes.get(&old.name)) {
            let name = &old.name;
            let dim = ty.dims.get_mut(axis).ok_or_else(|| format!("input `{name}` has no axis {axis}"))?;
            *dim = match *dim {
                Dim::Fixed(n) => {
                    let fixed = n.checked_sub(counts.0);
                    let fixed =
                        fixed.ok_or_else(|| format!("input `{name}`: {n} on the axis of {from} tokens"))?;
                    Dim::Fixed(fixed + counts.1)
                }
                // The default of a range is the size for its lowest token count.
                Dim::Unknown | Dim::Variadic => {
                    let feature = described.inputs.iter().find(|f| f.name == *name);
                    let default = match feature.map(|f| &f.shape) {
                        Some(FeatureShape::Range { default, .. }) => default.get(axis).copied(),
                        _ => None,
                    };
                    let fixed = default.and_then(|n| n.checked_sub(counts.0));
                    Dim::Fixed(
                        fixed.ok_or_else(|| format!("input `{name}` has no size for its tokens"))? + counts.1,
                    )
                }
            };
        }
        if new.ty.tensor().is_some_and(|t| t.shape().is_none()) {
            return Err(format!("input `{}` has more than one size that is not fixed", old.name));
        }
        let known = ResizedValue { old: &old.ty, new: Cow::Owned(new.ty.clone()), value: None };
        scope.insert(&old.name, known);
    }
    for (old, new) in function.block.operations.iter().zip(&mut new.block.operations) {
        operation(old, new, &mut scope, counts, is_ranged)
            .map_err(|what| format!("operation `{}`: {what}", old.name()))?;
    }
    Ok(new)
}

/// Rewrites a function like [`resize`], for one token more than it was written for, and finds the token axes of its inputs and
/// values; values without tokens have none.
///
/// # Errors
/// Fails like [`resize`].
pub(in crate::cpu) fn with_axes(
    function: &Function,
    described: &FunctionDescription,
    axes: &BTreeMap<String, usize>,
    from: usize,
) -> Result<(Function, BTreeMap<String, TokenAxis>), String> {
    let resized = |more: usize| resize(function, described, axes, from, from + more);
    let (one, two) = (resized(1)?, resized(2)?);
    fn values(f: &Function) -> impl Iterator<Item = &NamedType> {
        f.inputs.iter().chain(f.block.operations.iter().flat_map(|op| &op.outputs))
    }
    let counts = (from as u64 + 1, from as u64 + 2);
    let axis = |(a, b): (&NamedType, &NamedType)| Some((a.name.clone(), token_axis(&a.ty, &b.ty, counts)?));
    let axes = values(&one).zip(values(&two)).filter_map(axis).collect();
    Ok((one, axes))
}

/// Returns the token axis of a value; none where its shape does not depend on the token count.
fn token_axis(old: &ValueType, new: &ValueType, (from, to): (u64, u64)) -> Option<TokenAxis> {
    let (old, new) = (old.tensor()?.shape()?, new.tensor()?.shape()?);
    let axis = (0..old.len()).find(|&i| old[i] != new[i])?;
    let (tokens, size) = (from.abs_diff(to), old[axis].abs_diff(new[axis]));
    let per_token = size.checked_div(tokens)?;
    Some(TokenAxis { axis, per_token, fixed: old[axis].checked_sub(per_token * from)? })
}

/// Rewrites `new`, a copy of the operation `op`.
fn operation<'a>(
    op: &'a Operation,
    new: &mut Operation,
    scope: &mut Scope<'a>,
    counts: (u64, u64),
    is_ranged: bool,
) -> Result<(), String> {
    if op.op_type == "const" {
        for output in &op.outputs {
            scope.insert(&output.name, ResizedValue::unchanged(&output.ty, op.attributes.get("val")));
        }
        return Ok(());
    }
    if !op.blocks.is_empty() {
        return Err("it has blocks".into());
    }
    let mut changed: Vec<(&str, TokenAxis)> = Vec::new();
    for name in names(op) {
        let known = scope.get(name).ok_or_else(|| format!("`{name}` is used before it is defined"))?;
        if known.is_changed() {
            let axis = token_axis(known.old, &known.new, counts).or(is_ranged.then_some(TokenAxis {
                axis: 0,
                per_token: 1,
                fixed: 0,
            }));
            changed.push((name, axis.ok_or_else(|| format!("tokens of `{name}` are on no axis"))?));
        }
    }
    let unchanged =
        changed.is_empty() && op.outputs.iter().all(|o| o.ty.tensor().is_none_or(|t| t.shape().is_some()));
    if unchanged || op.op_type.starts_with("constexpr_") {
        for output in &op.outputs {
            scope.insert(&output.name, ResizedValue::unchanged(&output.ty, None));
        }
        return Ok(());
    }
    if !is_ranged {
        adapt(new, scope, &changed, counts)?;
    }
    let types = infer(new, scope)?;
    if types.len() != op.outputs.len() {
        return Err(format!("{} results where {} are inferred", op.outputs.len(), types.len()));
    }
    for ((old, output), ty) in op.outputs.iter().zip(&mut new.outputs).zip(types) {
        output.ty = ty;
        let (Some(before), Some(after)) = (old.ty.tensor(), output.ty.tensor()) else {
            return Err("a result that is no tensor".into());
        };
        let one_axis = before.rank() == after.rank()
            && after.shape().is_some()
            && (is_ranged || before.dims.iter().zip(&after.dims).filter(|(a, b)| a != b).count() <= 1);
        if before.dtype != after.dtype || !one_axis {
            return Err(format!("a result of type {after}, where {before} was"));
        }
        let known = ResizedValue { old: &old.ty, new: Cow::Owned(output.ty.clone()), value: None };
        scope.insert(&old.name, known);
    }
    Ok(())
}

fn infer(op: &Operation, scope: &Scope<'_>) -> Result<Vec<ValueType>, String> {
    if op.op_type == "write_state" {
        return match bound_name(op, "data").and_then(|name| scope.get(name)) {
            Some(known) if !known.is_changed() => Ok(Vec::new()),
            _ => Err("a state would be of another shape".into()),
        };
    }
    let def = ops::op(&op.op_type).ok_or("its type is not known")?;
    let mut context = Context::default();
    for (param, Argument(bindings)) in &op.inputs {
        let operands = bindings.iter().map(|binding| match binding {
            Binding::Value(v) => Some(Operand { ty: &v.ty, value: Some(v) }),
            Binding::Name(name) => scope.get(name.as_str()).map(|k| Operand { ty: &k.new, value: k.value }),
        });
        context.bind(param, operands.collect::<Option<_>>().ok_or("an operand is not defined")?);
    }
    def.infer(&context)
}

/// Returns a constant operand.
fn constant<'a>(op: &'a Operation, param: &str, scope: &Scope<'a>) -> Option<&'a Value> {
    match op.inputs.get(param)?.0.first()? {
        Binding::Value(value) => Some(value),
        Binding::Name(name) => scope.get(name.as_str())?.value,
    }
}

/// Returns the integers of a constant operand.
fn ints(op: &Operation, param: &str, scope: &Scope<'_>) -> Option<Vec<i32>> {
    constant(op, param, scope)?.as_ints().map(<[i32]>::to_vec)
}

/// Returns the flags of a constant operand.
fn flags(op: &Operation, param: &str, scope: &Scope<'_>) -> Option<Vec<bool>> {
    match constant(op, param, scope)?.tensor_data()? {
        anemoe_mlpackage::mil::TensorData::Bools(v) => Some(v.clone()),
        _ => None,
    }
}

/// Replaces constants of an operation that hold the token count by -1, the rest of the elements. Refuses operations that may compute something else with
/// another token count.
fn adapt(
    op: &mut Operation,
    scope: &Scope<'_>,
    changed: &[(&str, TokenAxis)],
    counts: (u64, u64),
) -> Result<(), String> {
    let axis_of = |name: &str| changed.iter().find(|(n, _)| *n == name).map(|(_, axis)| *axis);
    let of_x = bound_name(op, "x").and_then(axis_of);
    let rank_of = |name: &str| scope.get(name).and_then(|k| k.old.tensor()).map_or(0, TensorType::rank);
    let other = || Err(format!("`{}` may mean something else with another number of tokens", op.op_type));
    match op.op_type.as_str() {
        binary if is_binary(binary) => {
            let (Some(x), Some(y)) = (bound_name(op, "x"), bound_name(op, "y")) else { return Ok(()) };
            let from_end = |name: &str| Some(rank_of(name) - axis_of(name)?.axis);
            match (from_end(x), from_end(y)) {
                (Some(a), Some(b)) if a != b => {
                    outer_product(op, (x.to_string(), a), (y.to_string(), b), counts)
                }
                _ => Ok(()),
            }
        }
        "reshape" => {
            let (Some(axis), Some(x)) = (of_x, bound_name(op, "x")) else { return other() };
            let shape = |t: Option<&TensorType>| t.and_then(TensorType::shape);
            let (Some(before), Some(output)) =
                (scope.get(x).and_then(|k| shape(k.old.tensor())), op.outputs.first())
            else {
                return other();
            };
            let Some(result) = shape(output.ty.tensor()) else { return other() };
            let tokens = reshaped(&before, axis, &result, counts.0)?;
            let shape =
                result.iter().enumerate().map(|(i, &n)| if i == tokens { Ok(-1) } else { i32::try_from(n) });
            let value =
                Value::int32s(&shape.collect::<Result<Vec<i32>, _>>().map_err(|_| "a size above 2^31")?);
            op.inputs.insert("shape".into(), Argument(vec![Binding::Value(value)]));
            Ok(())
        }
        "slice_by_size" => {
            let (Some(axis), Some(begin), Some(mut size)) =
                (of_x, ints(op, "begin", scope), ints(op, "size", scope))
            else {
                return other();
            };
            let (Some(b), Some(s)) = (begin.get(axis.axis), size.get_mut(axis.axis)) else { return other() };
            let before = axis.fixed + axis.per_token * counts.0;
            // The slice goes to the end, given as -1 or as a size.
            let to_end = *b >= 0 && (*s == -1 || i64::from(*b) + i64::from(*s) == before as i64);
            if !to_end {
                return other();
            }
            *s = -1;
            let value = Value::int32s(&size);
            op.inputs.insert("size".into(), Argument(vec![Binding::Value(value)]));
            Ok(())
        }
        "slice_by_index" => {
            let (Some(axis), Some(begin), Some(end)) =
                (of_x, ints(op, "begin", scope), ints(op, "end", scope))
            else {
                return other();
            };
            let flag = |param: &str| {
                flags(op, param, scope).and_then(|v| v.get(axis.axis).copied()).unwrap_or(false)
            };
            let from_front = flag("begin_mask") || begin.get(axis.axis).is_some_and(|b| *b >= 0);
            let from_end = flag("end_mask") || end.get(axis.axis).is_some_and(|e| *e < 0);
            let forward = ints(op, "stride", scope).is_none_or(|s| s.get(axis.axis) == Some(&1));
            if from_front && from_end && forward && !flag("squeeze_mask") { Ok(()) } else { other() }
        }
        "split" | "softmax" => {
            let (Some(axis), Some(x)) = (of_x, bound_name(op, "x")) else { return other() };
            let along = ints(op, "axis", scope).and_then(|v| v.first().copied());
            let along = along.or((op.op_type == "softmax").then_some(-1));
            let along = along.and_then(|a| super::super::ops_axis(a, rank_of(x)));
            if along.is_some_and(|a| a != axis.axis) { Ok(()) } else { other() }
        }
        over if is_over_axes(over) => {
            let (Some(axis), Some(x), Some(axes)) = (of_x, bound_name(op, "x"), ints(op, "axes", scope))
            else {
                return other();
            };
            let rank = rank_of(x);
            let all: Option<Vec<usize>> = axes.iter().map(|&a| super::super::ops_axis(a, rank)).collect();
            if all.is_some_and(|all| !all.contains(&axis.axis)) { Ok(()) } else { other() }
        }
        tokenwise if is_tokenwise(tokenwise) => Ok(()),
        _ => other(),
    }
}

/// Turns the product of a column and a row for one token, `[.., S, 1] * [.., 1, D]`, into the sum of these products over tokens:
/// a matmul.
fn outer_product(
    op: &mut Operation,
    (x, x_axis): (String, usize),
    (y, y_axis): (String, usize),
    counts: (u64, u64),
) -> Result<(), String> {
    let (column, row) = match (x_axis, y_axis) {
        (1, 2) => (x, y),
        (2, 1) => (y, x),
        _ => return Err("its operands have their tokens on different axes".into()),
    };
    if op.op_type != "mul" || counts.0 != 1 {
        return Err("its operands have their tokens on different axes".into());
    }
    op.op_type = "matmul".into();
    op.inputs.clear();
    for (param, binding) in [
        ("x", Binding::Name(column)),
        ("y", Binding::Name(row)),
        ("transpose_x", Binding::Value(Value::bool(false))),
        ("transpose_y", Binding::Value(Value::bool(false))),
    ] {
        op.inputs.insert(param.into(), Argument(vec![binding]));
    }
    Ok(())
}

/// Returns the token axis of the result of a reshape from `before`, with its tokens on `axis`, to the shape `result`.
///
/// A reshape keeps the order of elements, so tokens that are `stride` elements apart stay so. The axis of the result that
/// contains this stride holds the tokens.
fn reshaped(before: &[u64], axis: TokenAxis, result: &[u64], from: u64) -> Result<usize, String> {
    if before.contains(&0) || result.contains(&0) {
        return Err("a shape without elements".into());
    }
    let behind = |shape: &[u64], i: usize| shape[i + 1..].iter().product::<u64>();
    let stride = behind(before, axis.axis);
    let old_size = before[axis.axis];
    if axis.per_token == 1 || axis.fixed > 0 {
        // The result has the whole axis again; of several such axes, take the nearest.
        let whole = (0..result.len()).filter(|&i| result[i] == old_size && behind(result, i) == stride);
        if let Some(i) = whole.min_by_key(|i| i.abs_diff(axis.axis)) {
            return Ok(i);
        }
    }
    if axis.fixed > 0 {
        return Err("an axis that holds more than tokens is split or joined".into());
    }
    // Tokens are innermost on their axis.
    let holds = |i: &usize| {
        let (size, inner) = (result[*i], behind(result, *i));
        inner > 0
            && stride % inner == 0
            && size >= stride / inner * from
            && size % (stride / inner * from) == 0
    };
    // With one token several axes qualify: prefer an axis of one element, then the axis on which the token is innermost.
    let best = (0..result.len())
        .filter(holds)
        .min_by_key(|&i| (result[i] != from, behind(result, i) != stride, i.abs_diff(axis.axis)));
    let Some(i) = best else { return Err(format!("tokens of {before:?} are on no axis of {result:?}")) };
    Ok(i)
}

/// Returns the description of a rewritten function: `described` with the shapes of the program's inputs and outputs.
pub(in crate::cpu) fn describe(function: &Function, described: &FunctionDescription) -> FunctionDescription {
    let mut new = described.clone();
    let operations = || function.block.operations.iter().flat_map(|op| &op.outputs);
    for (features, is_input) in [(&mut new.inputs, true), (&mut new.outputs, false)] {
        for feature in features {
            let named = match is_input {
                true => function.inputs.iter().find(|i| i.name == feature.name),
                false => operations().find(|o| o.name == feature.name),
            };
            if let Some(shape) = named.and_then(|n| n.ty.tensor()?.shape()).filter(|shape| !shape.is_empty())
            {
                feature.shape = FeatureShape::Fixed(shape);
            }
        }
    }
    new
}
