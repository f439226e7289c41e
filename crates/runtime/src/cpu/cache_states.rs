//! Turns caches that a function takes as inputs into states.
//!
//! ```text
//! as written   cache (input) -> cache * keep + placed -> attention        rows (output)
//! as it runs   cache (state) -> cache * keep + placed -> written back, and read by attention
//! ```
//! The rows of a call are written into the state in place; no cache is copied. A function that takes only the first slots of
//! the cache reads and writes these slots of the same state. Likewise each layer gets its own state where several layers share
//! one:
//!
//! ```text
//! as written   caches (state) -> slice of a layer -> cache * keep + placed -> attention     caches * keep + all placed -> state
//! as it runs   cache (state of the layer) -> cache * keep + placed -> written back, and read by attention
//! ```
//! A cache that another model lends becomes a state that is only read.

use super::bindings::{bound_name, constant_of, maker, names};
use crate::backend::{AddedRows, KeptCache};
use anemoe_mlpackage::mil::{
    Argument, Binding, Block, Feature, FeatureShape, Function, FunctionDescription, NamedType, Operation,
    TensorType, Value, ValueType,
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
    let input = function.inputs.remove(input);
    let ValueType::Tensor(ty) = input.ty else { return Err("no input has its name".into()) };
    let feature = described.inputs.remove(feature);
    let Some(AddedRows { rows, .. }) = &cache.added else {
        let operations = &mut function.block.operations;
        let current = format!("{name}_as_it_is");
        rename(operations, name, &current);
        operations.insert(0, operation("read_state", vec![argument("input", name)], &current, &ty));
        function.inputs.push(NamedType { name: name.into(), ty: ValueType::State(ty) });
        described.states.push(feature);
        return Ok(());
    };
    let at = function.block.outputs.iter().position(|o| o == rows);
    function.block.outputs.remove(at.ok_or_else(|| format!("no output is named `{rows}`"))?);
    described.outputs.retain(|f| f.name != *rows);
    blend_into_state(function, described, feature, &ty, cache.slots as u64)
}

/// Makes an operation with one result.
fn operation(op_type: &str, inputs: Vec<(String, Argument)>, to: &str, ty: &TensorType) -> Operation {
    Operation {
        op_type: op_type.into(),
        inputs: inputs.into_iter().collect(),
        outputs: vec![NamedType { name: to.into(), ty: ValueType::Tensor(ty.clone()) }],
        blocks: Vec::new(),
        attributes: BTreeMap::from([("name".into(), Value::string(to))]),
    }
}

/// Makes a state of the value `feature.name`, which no operation of `function` computes: the cache of type `ty` before the call,
/// the first slots of `slots`.
///
/// # Errors
/// The function does not blend rows into the cache.
fn blend_into_state(
    function: &mut Function,
    described: &mut FunctionDescription,
    mut feature: Feature,
    ty: &TensorType,
    slots: u64,
) -> Result<(), String> {
    let name = feature.name.as_str();
    let part = ty.shape().and_then(|shape| <[u64; 4]>::try_from(shape).ok());
    let part = part.ok_or_else(|| format!("it has type {ty}, expected four fixed dimensions"))?;
    if part[2] > slots {
        return Err(format!("it has {} slots, where the whole cache has {slots}", part[2]));
    }
    let mut whole = part;
    whole[2] = slots;
    let state = TensorType::fixed(ty.dtype, &whole);
    function.inputs.push(NamedType { name: name.into(), ty: ValueType::State(state.clone()) });

    let name = name.to_string();
    let name = name.as_str();
    feature.shape = FeatureShape::Fixed(whole.to_vec());
    described.states.push(feature);
    let (old, current) = (format!("{name}_as_it_was"), format!("{name}_as_it_is"));
    let operations = &mut function.block.operations;
    rename(operations, name, &old);
    let updated = blended(operations, &old).ok_or("its rows are not blended with those of the call")?;
    let result = operations[updated].outputs[0].clone();
    if result.ty != ValueType::Tensor(ty.clone()) || function.block.outputs.contains(&result.name) {
        return Err("what is blended has another shape or leaves the function".into());
    }
    rename(&mut operations[updated + 1..], &result.name, &current);
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
        operation("slice_by_size", inputs, to, ty)
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

/// Gives each layer a state of its own where one state holds the caches of several layers, one below the other along axis 1.
/// Leaves other states as they are.
///
/// # Errors
/// A part of such a state is no cache that rows are blended into.
pub(super) fn divide_states(
    function: &mut Function,
    described: &mut FunctionDescription,
) -> Result<(), String> {
    let is_state = |i: &&NamedType| matches!(i.ty, ValueType::State(_));
    let names: Vec<String> = function.inputs.iter().filter(is_state).map(|i| i.name.clone()).collect();
    for name in names {
        let Some(shared) = SharedState::find(&function.block, &name) else { continue };
        let Some(at) = described.states.iter().position(|f| f.name == name) else { continue };
        let feature = described.states.remove(at);
        function.inputs.retain(|i| i.name != name);
        let mut at = 0;
        function.block.operations.retain(|_| {
            at += 1;
            !shared.replaced.contains(&(at - 1))
        });
        for (part, ty) in shared.parts {
            let feature = Feature { name: part, ..feature.clone() };
            blend_into_state(function, described, feature, &ty, shared.slots)?;
        }
    }
    Ok(())
}

/// Operations that read and write a state whose parts are the caches of layers.
struct SharedState {
    /// Slots of each cache.
    slots: u64,
    /// Each layer's cache before the call, and its type.
    parts: Vec<(String, TensorType)>,
    /// Numbers of the operations that a state for each layer replaces.
    replaced: Vec<usize>,
}

impl SharedState {
    /// Finds the only read and the only write of a state, where every reader of what was read slices a layer's heads, but for
    /// one that blends the joined rows of all layers into the whole, as each layer blends its own.
    fn find(block: &Block, state: &str) -> Option<SharedState> {
        let operations = block.operations.as_slice();
        let of_state = |op_type: &str| {
            let mut all = operations
                .iter()
                .enumerate()
                .filter(|(_, op)| op.op_type == op_type && bound_name(op, "input") == Some(state));
            all.next().filter(|_| all.next().is_none())
        };
        let by = |name: &str| maker(operations, name);
        let ((read, all), (write, data)) = (of_state("read_state")?, of_state("write_state")?);
        let (all, whole) = (&all.outputs.first()?.name, shape_of(all.outputs.first()?)?);
        let mut replaced = vec![read, write];
        let mut updated = by(bound_name(data, "data")?)?;
        if operations[updated].op_type == "slice_update" {
            replaced.push(updated);
            updated = by(bound_name(&operations[updated], "update")?)?;
        }
        let blend = Blend::at(operations, updated)?;
        replaced.extend(blend.at);
        if blend.old != all {
            let slots = by(blend.old)?;
            let is_first = operations[slots].op_type == "slice_by_size"
                && ints(operations, &operations[slots], "begin")? == [0; 4]
                && bound_name(&operations[slots], "x") == Some(all.as_str());
            replaced.push(is_first.then_some(slots)?);
        }
        let joined = by(blend.new)?;
        replaced.push(joined);
        let Argument(rows) = operations[joined].inputs.get("values")?;
        if operations[joined].op_type != "concat" || ints(operations, &operations[joined], "axis")? != [1] {
            return None;
        }
        let (mut parts, mut head) = (Vec::new(), 0);
        for (i, op) in operations.iter().enumerate() {
            if replaced.contains(&i) || !reads(op, all) {
                continue;
            }
            let own = op.outputs.first()?;
            let shape = shape_of(own)?;
            let is_slice = op.op_type == "slice_by_size"
                && ints(operations, op, "begin")? == [0, i32::try_from(head).ok()?, 0, 0]
                && shape[3] == whole[3];
            let of_layer = Blend::at(operations, blended(operations, &own.name)?)?;
            let is_alike = (of_layer.keep, of_layer.place, of_layer.placed_by)
                == (blend.keep, blend.place, blend.placed_by);
            let is_next = matches!(rows.get(parts.len()), Some(Binding::Name(n)) if n == of_layer.new);
            let ValueType::Tensor(ty) = &own.ty else { return None };
            if !(is_slice && is_alike && is_next) {
                return None;
            }
            parts.push((own.name.clone(), ty.clone()));
            head += shape[1];
            replaced.push(i);
        }
        let is_part = |name: &String| parts.iter().any(|(part, _)| part == name);
        let gone = replaced.iter().flat_map(|&i| &operations[i].outputs).map(|o| &o.name);
        let is_read = |name: &String| {
            let others = operations.iter().enumerate().filter(|(i, _)| !replaced.contains(i));
            block.outputs.contains(name) || others.into_iter().any(|(_, op)| reads(op, name))
        };
        if gone.filter(|name| !is_part(name)).any(is_read) {
            return None;
        }
        (head == whole[1] && parts.len() == rows.len() && parts.len() > 1).then_some(SharedState {
            slots: whole[2],
            parts,
            replaced,
        })
    }
}

/// Operations that compute `old * keep + placed`, where `placed` is `new * place` or the product of the matrices `place` and
/// `new`.
struct Blend<'a> {
    old: &'a str,
    keep: &'a str,
    new: &'a str,
    place: &'a str,
    /// Type of the operation that places the rows.
    placed_by: &'a str,
    /// Numbers of the operations.
    at: [usize; 3],
}

impl<'a> Blend<'a> {
    /// Reads the blend that ends with operation `sum`.
    fn at(operations: &'a [Operation], sum: usize) -> Option<Blend<'a>> {
        let by = |name: &str| maker(operations, name);
        let operands = |op: &'a Operation| Some((bound_name(op, "x")?, bound_name(op, "y")?));
        let (kept, placed) = operands(operations.get(sum).filter(|op| op.op_type == "add")?)?;
        let (kept, placed) = (by(kept)?, by(placed)?);
        let (old, keep) = operands(Some(&operations[kept]).filter(|op| op.op_type == "mul")?)?;
        let by = &operations[placed];
        let (x, y) = operands(by)?;
        let is_turned = |param: &str| {
            by.inputs.contains_key(param)
                && constant_of(operations, by, param).and_then(|c| c.as_bool()) != Some(false)
        };
        let (new, place) = match by.op_type.as_str() {
            "mul" => (x, y),
            "matmul" if !is_turned("transpose_x") && !is_turned("transpose_y") => (y, x),
            _ => return None,
        };
        Some(Blend { old, keep, new, place, placed_by: &by.op_type, at: [kept, placed, sum] })
    }
}

/// Tells whether an operation takes a value.
fn reads(op: &Operation, name: &str) -> bool {
    names(op).any(|n| n == name)
}

/// Returns four fixed dimensions of a value.
fn shape_of(value: &NamedType) -> Option<[u64; 4]> {
    let ValueType::Tensor(ty) = &value.ty else { return None };
    ty.shape()?.try_into().ok()
}

/// Returns the integers of an operation's parameter, which is a constant.
fn ints(operations: &[Operation], op: &Operation, param: &str) -> Option<Vec<i32>> {
    constant_of(operations, op, param)?.as_ints().map(<[i32]>::to_vec)
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
        let mut readers = operations.iter().enumerate().filter(|(_, op)| reads(op, name));
        let (at, op) = readers.next()?;
        (readers.next().is_none() && op.op_type == op_type && op.outputs.len() == 1).then_some(at)
    };
    let product = only_reader(old, "mul")?;
    only_reader(&operations[product].outputs[0].name, "add")
}

#[cfg(test)]
mod tests {
    use super::*;
    use anemoe_mlpackage::mil::builder::{FunctionBuilder, Var, model};
    use anemoe_mlpackage::mil::{DataType, Opset};

    /// Makes a function of two layers, each of 2 heads, over one state of 64 slots, of which it sees `seen`. The last argument
    /// returns the rows that are written of the two layers' own rows.
    fn two_layers(
        tokens: u64,
        seen: u64,
        written: fn([Var; 2]) -> [Var; 2],
    ) -> (Function, FunctionDescription) {
        let mut f = FunctionBuilder::new(Opset::CoreML8);
        let ty = |dims: &[u64]| TensorType::fixed(DataType::Float16, dims);
        let state = f.state("kv_cache", ty(&[1, 4, 64, 32])).unwrap();
        let keep = f.input("keep", ty(&[1, 1, seen, 1])).unwrap();
        let place = f.input("place", ty(&[1, 1, seen, tokens])).unwrap();
        let all = f.read_state("kv_old", &state).unwrap();
        let blend = |f: &mut FunctionBuilder, n: &str, old: &Var, new: &Var| {
            let kept = f.mul(&format!("{n}_kept"), old, &keep).unwrap();
            let placed = match tokens {
                1 => f.mul(&format!("{n}_placed"), new, &place).unwrap(),
                _ => f.matmul(&format!("{n}_placed"), &place, new, false, false).unwrap(),
            };
            f.add(&format!("{n}_updated"), &kept, &placed).unwrap()
        };
        let layer = |f: &mut FunctionBuilder, i: i32| {
            let n = format!("layer_{i}");
            let new = f.input(&format!("{n}_new"), ty(&[1, 2, tokens, 32])).unwrap();
            let size = [1, 2, seen as i32, -1];
            let old = f.slice_by_size(&format!("{n}_old"), &all, &[0, 2 * i, 0, 0], &size).unwrap();
            let updated = blend(f, &n, &old, &new);
            let read = f.relu(&format!("{n}_read"), &updated).unwrap();
            f.output(&read).unwrap();
            new
        };
        let rows = written([layer(&mut f, 0), layer(&mut f, 1)]);
        let joined = f.concat("new", &[&rows[0], &rows[1]], 1).unwrap();
        let is_part = seen < 64;
        let old = match is_part {
            true => f.slice_by_size("old", &all, &[0; 4], &[1, -1, seen as i32, -1]).unwrap(),
            false => all.clone(),
        };
        let mut updated = blend(&mut f, "all", &old, &joined);
        if is_part {
            let end = [1, 4, seen as i32, 32];
            updated = f.slice_update("updated", &all, &updated, &[0; 4], &end).unwrap();
        }
        f.write_state(&state, &updated).unwrap();
        let mut model = model(Opset::CoreML8, vec![("main".into(), f.finish().unwrap())], "main").unwrap();
        (model.program.functions.remove("main").unwrap(), model.functions.remove(0))
    }

    fn states(described: &FunctionDescription) -> Vec<&str> {
        described.states.iter().map(|f| f.name.as_str()).collect()
    }

    #[test]
    fn layers_that_share_a_state_get_one_each() {
        for (tokens, seen) in [(1, 64), (4, 64), (1, 32), (4, 32)] {
            let (mut function, mut described) = two_layers(tokens, seen, |rows| rows);
            divide_states(&mut function, &mut described).unwrap();
            assert_eq!(states(&described), ["layer_0_old", "layer_1_old"], "{tokens} tokens, {seen} slots");
            let operations = &function.block.operations;
            let count = |op_type: &str| operations.iter().filter(|op| op.op_type == op_type).count();
            assert_eq!((count("concat"), count("add"), count("write_state")), (0, 2, 2));
        }
    }

    #[test]
    fn a_state_that_is_written_with_other_rows_stays_whole() {
        let (mut function, mut described) = two_layers(4, 64, |[a, b]| [b, a]);
        let as_it_was = function.clone();
        divide_states(&mut function, &mut described).unwrap();
        assert_eq!(states(&described), ["kv_cache"]);
        assert_eq!(function, as_it_was);
    }
}
