//! Turns caches that a function takes as inputs into states.
//!
//! ```text
//! as written   cache (input) -> cache * keep + placed -> attention        rows (output)
//! as it runs   cache (state) -> cache * keep + placed -> written back, and read by attention
//! ```
//! The rows of a call are then written in place, where the caller would write them, and nothing copies a cache.

use crate::backend::KeptCache;
use anemoe_mlpackage::mil::{
    Argument, Binding, Function, FunctionDescription, NamedType, Operation, Value, ValueType,
};
use std::collections::BTreeMap;

/// Rewrites `function` so that `cache` is a state of it, and its rows are no output.
///
/// # Errors
/// The function has no such input or output, or it does not blend rows into the cache; the text says which.
pub(super) fn hold_cache(
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
    function.inputs.push(NamedType { name: name.into(), ty: ValueType::State(ty.clone()) });
    described.states.push(described.inputs.remove(feature));
    function.block.outputs.remove(rows);
    described.outputs.retain(|f| f.name != cache.rows);

    let (old, current) = (format!("{name}_as_it_was"), format!("{name}_as_it_is"));
    let operations = &mut function.block.operations;
    rename(operations, name, &old);
    let updated = blended(operations, &old).ok_or("its rows are not blended with those of the call")?;
    let result = operations[updated].outputs[0].clone();
    if result.ty != ValueType::Tensor(ty) || function.block.outputs.contains(&result.name) {
        return Err("what is blended has another shape or leaves the function".into());
    }
    rename(&mut operations[updated + 1..], &result.name, &current);
    let read = |to: &str| Operation {
        op_type: "read_state".into(),
        inputs: BTreeMap::from([argument("input", name)]),
        outputs: vec![NamedType { name: to.into(), ty: result.ty.clone() }],
        blocks: Vec::new(),
        attributes: BTreeMap::from([("name".into(), Value::string(to))]),
    };
    let write = Operation {
        op_type: "write_state".into(),
        inputs: BTreeMap::from([argument("input", name), argument("data", &result.name)]),
        outputs: Vec::new(),
        blocks: Vec::new(),
        attributes: BTreeMap::from([("name".into(), Value::string(format!("{name}_written")))]),
    };
    operations.splice(updated + 1..updated + 1, [write, read(&current)]);
    operations.insert(0, read(&old));
    Ok(())
}

fn argument(param: &str, name: &str) -> (String, Argument) {
    (param.into(), Argument(vec![Binding::Name(name.into())]))
}

/// Replaces a name that operations read.
fn rename(operations: &mut [Operation], from: &str, to: &str) {
    let arguments = operations.iter_mut().flat_map(|op| op.inputs.values_mut());
    for binding in arguments.flat_map(|Argument(bindings)| bindings) {
        if matches!(binding, Binding::Name(name) if name == from) {
            *binding = Binding::Name(to.into());
        }
    }
}

/// The sum that holds a product of `old`, where nothing else reads `old` or the product.
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
