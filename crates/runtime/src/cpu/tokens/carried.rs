//! Rows that a layer carries from call to call beside its cache, and their values after fewer tokens of a call.
//!
//! ```text
//! window  [.., R + T, d] = the R rows carried before the call, then one row for each of its T tokens
//! carried [.., R, d]     = matmul(selection, window), window rows n.. for n tokens
//! state                  = concat(cache, tail(carried)), or state[rows behind the slots] = tail(carried)
//! ```
//! A call keeps its window. After k of its n tokens, the carried rows are window rows k..; `tail` makes rows of the state of
//! them.

use anemoe_mlpackage::mil::{Argument, Binding};
use anemoe_mlpackage::mil::{
    Block, Feature, FeatureShape, Function, FunctionDescription, NamedType, Operation, TensorType, ValueType,
};
use std::collections::BTreeSet;

/// Rows that a function carries, by the names of its values.
pub struct CarriedRows {
    /// Input that selects the rows.
    pub selection: String,
    /// Value with the rows carried before the call and those of its tokens.
    pub window: String,
    /// Number of rows that are carried.
    pub rows: usize,
    /// State that holds the rows, from row `first` on.
    pub state: String,
    /// First row of the state that holds carried rows.
    pub first: usize,
    /// Function that makes rows of the state of carried rows.
    pub tail: Function,
    /// Description of `tail`.
    pub described: FunctionDescription,
}

/// Kind of values that a function writes to its states.
pub enum Carried {
    /// Only slots of caches, as far as the program shows.
    Nothing,
    /// Slots of caches, and behind the slots rows that are carried from call to call.
    Rows(Vec<CarriedRows>),
    /// Values of unknown meaning.
    Unknown,
}

fn names(op: &Operation) -> impl Iterator<Item = &str> {
    op.inputs.values().flat_map(|Argument(bindings)| bindings).filter_map(|b| match b {
        Binding::Name(name) => Some(name.as_str()),
        Binding::Value(_) => None,
    })
}

fn argument<'a>(op: &'a Operation, param: &str) -> Option<&'a str> {
    match op.inputs.get(param)?.0.first()? {
        Binding::Name(name) => Some(name),
        Binding::Value(_) => None,
    }
}

/// Finds the rows that `function` carries.
pub fn carried(function: &Function) -> Carried {
    let operations = &function.block.operations;
    let by = |name: &str| operations.iter().find(|op| op.outputs.iter().any(|o| o.name == name));
    let writes: Vec<&Operation> = operations.iter().filter(|op| op.op_type == "write_state").collect();
    let states: BTreeSet<_> = writes.iter().filter_map(|write| argument(write, "input")).collect();
    if states.len() < writes.len() {
        return Carried::Unknown;
    }
    // A package has one write for each layer.
    let joins = |op: &&Operation| {
        op.op_type == "concat" || find_first_row(operations, op).is_some_and(|first| first > 0)
    };
    let data = |write: &&Operation| argument(write, "data").and_then(by).filter(joins);
    let joined: Vec<Option<&Operation>> = writes.iter().map(data).collect();
    if joined.iter().all(Option::is_none) {
        return Carried::Nothing;
    }
    let each = writes.iter().zip(joined).map(|(write, joined)| rows(function, write, joined?));
    each.collect::<Option<Vec<_>>>().map_or(Carried::Unknown, Carried::Rows)
}

/// Finds the first row of axis 2 that a `slice_update` with constant bounds writes.
fn find_first_row(operations: &[Operation], op: &Operation) -> Option<u64> {
    let value = match op.inputs.get("begin").filter(|_| op.op_type == "slice_update")?.0.first()? {
        Binding::Value(value) => value,
        Binding::Name(name) => {
            let is_it = |op: &&Operation| op.op_type == "const" && op.outputs.iter().any(|o| o.name == *name);
            operations.iter().find(is_it)?.attributes.get("val")?
        }
    };
    u64::try_from(*value.as_ints()?.get(2)?).ok()
}

fn rows(function: &Function, write: &Operation, joined: &Operation) -> Option<CarriedRows> {
    let operations = &function.block.operations;
    let by = |name: &str| operations.iter().position(|op| op.outputs.iter().any(|o| o.name == name));
    let shape = |name: &str| -> Option<Vec<u64>> {
        let output = operations.get(by(name)?)?.outputs.iter().find(|o| o.name == name)?;
        output.ty.tensor()?.shape()
    };
    let input =
        |name: &str| function.inputs.iter().find(|i| i.name == name && matches!(i.ty, ValueType::Tensor(_)));
    let (slots, tail) = match joined.op_type.as_str() {
        "concat" => match joined.inputs.get("values")?.0.as_slice() {
            [Binding::Name(slots), Binding::Name(tail)] => (*shape(slots)?.get(2)?, tail.as_str()),
            _ => return None,
        },
        _ => (find_first_row(operations, joined)?, argument(joined, "update")?),
    };
    let whole = joined.outputs.first()?.ty.tensor()?.shape()?;
    let rows_of_tail = shape(tail)?;
    if whole.len() != 4 || rows_of_tail.len() != 4 || whole[2] != slots.checked_add(rows_of_tail[2])? {
        return None;
    }
    // Walk back from the tail to the product with the selection.
    let (mut inside, mut product) = (BTreeSet::new(), None);
    let mut open = vec![tail];
    while let Some(name) = open.pop() {
        let at = by(name)?;
        let op = &operations[at];
        let selects = op.op_type == "matmul" && argument(op, "x").is_some_and(|x| input(x).is_some());
        if selects {
            if product.replace(at).is_some_and(|other| other != at) {
                return None;
            }
        } else if inside.insert(at) {
            open.extend(names(op));
        }
    }
    let product = &operations[product?];
    let (selection, window) = (argument(product, "x")?, argument(product, "y")?);
    let of_selection = input(selection)?.ty.tensor()?.shape()?;
    let (result, window_shape) = (product.outputs.first()?, shape(window)?);
    let result_shape = result.ty.tensor()?.shape()?;
    let &[1, 1, rows, all] = of_selection.as_slice() else { return None };
    let fits = window_shape.len() == 4
        && window_shape[2] == all
        && result_shape.get(2) == Some(&rows)
        && rows <= all;
    if !fits {
        return None;
    }
    let feature =
        |name: &str, ty: &TensorType| Some(Feature::array(name, ty.dtype, FeatureShape::Fixed(ty.shape()?)));
    let tail_type = operations[by(tail)?].outputs.iter().find(|o| o.name == tail)?.ty.tensor()?.clone();
    let described = FunctionDescription {
        name: "tail".into(),
        inputs: vec![feature(&result.name, result.ty.tensor()?)?],
        outputs: vec![feature(tail, &tail_type)?],
        ..FunctionDescription::default()
    };
    let block = Block {
        inputs: Vec::new(),
        operations: inside.into_iter().map(|i| operations[i].clone()).collect(),
        outputs: vec![tail.to_string()],
    };
    let inputs = vec![NamedType { name: result.name.clone(), ty: result.ty.clone() }];
    Some(CarriedRows {
        selection: selection.to_string(),
        window: window.to_string(),
        rows: usize::try_from(rows).ok()?,
        state: argument(write, "input")?.to_string(),
        first: usize::try_from(slots).ok()?,
        tail: Function { inputs, opset: function.opset, block },
        described,
    })
}
