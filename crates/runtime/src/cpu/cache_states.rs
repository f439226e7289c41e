//! Turns caches that a function takes as inputs into states.
//!
//! ```text
//! as written   cache (input) -> cache * keep + placed -> attention        rows (output)
//! as it runs   cache (state) -> cache * keep + placed -> written back, and read by attention
//! ```
//! The rows of a call are written into the state in place; no cache is copied. A function that takes only the first slots of
//! the cache reads and writes these slots of the same state.

use crate::backend::KeptCache;
use anemoe_mlpackage::mil::{
    Argument, Binding, FeatureShape, Function, FunctionDescription, NamedType, Operation, TensorType, Value,
    ValueType,
};
use std::collections::BTreeMap;

/// Rewrites `function` so that `cache` is one of its states and the cache's rows are no output.
///
/// # Errors
/// The function has no such input or output, or it does not blend rows into the cache; the text says which.
pub(super) fn make_state_of(
    function: &mut Function,
    described: &mut FunctionDescription,
    cache: &KeptCache,
) -> Result<(), String> {
    let name = cache.input.as_str();
    let is_input = |i: &NamedType| i.name == name && matches!(i.ty, ValueType::Tensor(_));
    let input = function.inputs.iter().position(is_input).ok_or("no input has its name")?;
    let feature = described.inputs.iter().position(|f| f.name == name).ok_or("no input has its name")?;
    let rows = function.block.outputs.iter().position(|o| *o == cache.rows);
    let rows = rows.ok_or_else(|| format!("no output is named `{}`", cache.rows))?;
    let input = function.inputs.remove(input);
    let ValueType::Tensor(ty) = input.ty else { return Err("no input has its name".into()) };
    let part = ty.shape().and_then(|shape| <[u64; 4]>::try_from(shape).ok());
    let part = part.ok_or_else(|| format!("it has type {ty}, expected four fixed dimensions"))?;
    let slots = cache.slots as u64;
    if part[2] > slots {
        return Err(format!("it has {} slots, where the whole cache has {slots}", part[2]));
    }
    let mut whole = part;
    whole[2] = slots;
    let state = TensorType::fixed(ty.dtype, &whole);
    function.inputs.push(NamedType { name: name.into(), ty: ValueType::State(state.clone()) });
    let mut feature = described.inputs.remove(feature);
    feature.shape = FeatureShape::Fixed(whole.to_vec());
    described.states.push(feature);
    function.block.outputs.remove(rows);
    described.outputs.retain(|f| f.name != cache.rows);

    let (old, current) = (format!("{name}_as_it_was"), format!("{name}_as_it_is"));
    let operations = &mut function.block.operations;
    rename(operations, name, &old);
    let updated = blended(operations, &old).ok_or("its rows are not blended with those of the call")?;
    let result = operations[updated].outputs[0].clone();
    if result.ty != ValueType::Tensor(ty.clone()) || function.block.outputs.contains(&result.name) {
        return Err("what is blended has another shape or leaves the function".into());
    }
    rename(&mut operations[updated + 1..], &result.name, &current);
    let operation = |op_type: &str, inputs: Vec<(String, Argument)>, to: &str, ty: &TensorType| Operation {
        op_type: op_type.into(),
        inputs: inputs.into_iter().collect(),
        outputs: vec![NamedType { name: to.into(), ty: ValueType::Tensor(ty.clone()) }],
        blocks: Vec::new(),
        attributes: BTreeMap::from([("name".into(), Value::string(to))]),
    };
    let write = |data: &str| Operation {
        outputs: Vec::new(),
        attributes: BTreeMap::from([("name".into(), Value::string(format!("{name}_written")))]),
        ..operation("write_state", vec![argument("input", name), argument("data", data)], "", &state)
    };
    let read = |to: &str| operation("read_state", vec![argument("input", name)], to, &state);
    if part == whole {
        operations.splice(updated + 1..updated + 1, [write(&result.name), read(&current)]);
        operations.insert(0, read(&old));
        return Ok(());
    }
    let [all_old, all_new, all] = ["as_it_was", "as_written", "as_it_is"].map(|n| format!("{name}_all_{n}"));
    let numbers =
        |param: &str, v: [i32; 4]| (param.into(), Argument(vec![Binding::Value(Value::int32s(&v))]));
    let extent = part.map(|n| i32::try_from(n).unwrap_or(i32::MAX));
    let first = |from: &str, to: &str| {
        let inputs = vec![argument("x", from), numbers("begin", [0; 4]), numbers("size", extent)];
        operation("slice_by_size", inputs, to, &ty)
    };
    let inputs = vec![
        argument("x", &all_old),
        argument("update", &result.name),
        numbers("begin", [0; 4]),
        numbers("end", extent),
    ];
    let put = operation("slice_update", inputs, &all_new, &state);
    let behind = [put, write(&all_new), read(&all), first(&all, &current)];
    operations.splice(updated + 1..updated + 1, behind);
    operations.splice(0..0, [read(&all_old), first(&all_old, &old)]);
    Ok(())
}

fn argument(param: &str, name: &str) -> (String, Argument) {
    (param.into(), Argument(vec![Binding::Name(name.into())]))
}

/// Renames a value in the inputs of operations.
fn rename(operations: &mut [Operation], from: &str, to: &str) {
    let arguments = operations.iter_mut().flat_map(|op| op.inputs.values_mut());
    for binding in arguments.flat_map(|Argument(bindings)| bindings) {
        if matches!(binding, Binding::Name(name) if name == from) {
            *binding = Binding::Name(to.into());
        }
    }
}

/// Finds the operation `old * keep + rows`, where nothing else reads `old` or the product. Returns the number of its `add`.
fn blended(operations: &[Operation], old: &str) -> Option<usize> {
    let only_reader = |name: &str, op_type: &str| {
        let reads = |op: &Operation| {
            let mut bindings = op.inputs.values().flat_map(|Argument(bindings)| bindings);
            bindings.any(|b| matches!(b, Binding::Name(n) if n == name))
        };
        let mut readers = operations.iter().enumerate().filter(|(_, op)| reads(op));
        let (at, op) = readers.next()?;
        (readers.next().is_none() && op.op_type == op_type && op.outputs.len() == 1).then_some(at)
    };
    let product = only_reader(old, "mul")?;
    only_reader(&operations[product].outputs[0].name, "add")
}
