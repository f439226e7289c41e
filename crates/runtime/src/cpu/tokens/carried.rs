//! Rows that a layer carries from call to call in the rows of its state behind the slots of its cache.
//!
//! ```text
//! as written   before = rows of the state    window [.., R + T, d] = concat(before, own)    a row for each of the T tokens
//!              carried [.., R, d] = matmul(selection, window)                               window rows n.. for n tokens
//!              state = concat(cache, tail(carried)), or state[rows behind the slots] = tail(carried)
//! as it runs   before is an input, own also an output: the caller keeps the rows, see `backend::KeptRows`
//! ```
//! The rows of the state are still written, and no longer read.

use super::super::bindings::{bound_name, constant_of, maker, names};
use crate::backend::KeptRows;
use anemoe_mlpackage::mil::{
    Argument, Binding, Dim, Feature, FeatureShape, Function, FunctionDescription, NamedType, Operation,
    ValueType,
};
use std::collections::{BTreeMap, BTreeSet};

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

/// Finds the rows that `function` carries.
pub fn carried(function: &Function) -> Carried {
    let operations = &function.block.operations;
    let by = |name: &str| maker(operations, name).map(|at| &operations[at]);
    let writes: Vec<&Operation> = operations.iter().filter(|op| op.op_type == "write_state").collect();
    let states: BTreeSet<_> = writes.iter().filter_map(|write| bound_name(write, "input")).collect();
    if states.len() < writes.len() {
        return Carried::Unknown;
    }
    // A package has one write for each layer.
    let joins = |op: &&Operation| {
        op.op_type == "concat" || find_first_row(operations, op).is_some_and(|first| first > 0)
    };
    let data = |write: &&Operation| bound_name(write, "data").and_then(by).filter(joins);
    let joined: Vec<Option<&Operation>> = writes.iter().map(data).collect();
    if joined.iter().all(Option::is_none) {
        return Carried::Nothing;
    }
    let each = writes.iter().zip(joined).map(|(write, joined)| rows(function, write, joined?));
    each.collect::<Option<Vec<_>>>().map_or(Carried::Unknown, Carried::Rows)
}

/// Finds the first row of axis 2 that a `slice_update` with constant bounds writes.
fn find_first_row(operations: &[Operation], op: &Operation) -> Option<u64> {
    let value = constant_of(operations, op, "begin").filter(|_| op.op_type == "slice_update")?;
    u64::try_from(*value.as_ints()?.get(2)?).ok()
}

fn rows(function: &Function, write: &Operation, joined: &Operation) -> Option<CarriedRows> {
    let operations = &function.block.operations;
    let by = |name: &str| maker(operations, name);
    let type_of = |name: &str| operations[by(name)?].outputs.iter().find(|o| o.name == name)?.ty.tensor();
    let shape = |name: &str| type_of(name)?.shape();
    let input =
        |name: &str| function.inputs.iter().find(|i| i.name == name && matches!(i.ty, ValueType::Tensor(_)));
    let (slots, tail) = match joined.op_type.as_str() {
        "concat" => match joined.inputs.get("values")?.0.as_slice() {
            [Binding::Name(slots), Binding::Name(tail)] => (*shape(slots)?.get(2)?, tail.as_str()),
            _ => return None,
        },
        _ => (find_first_row(operations, joined)?, bound_name(joined, "update")?),
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
        let selects = op.op_type == "matmul" && bound_name(op, "x").is_some_and(|x| input(x).is_some());
        if selects {
            if product.replace(at).is_some_and(|other| other != at) {
                return None;
            }
        } else if inside.insert(at) {
            open.extend(names(op));
        }
    }
    let product = &operations[product?];
    let (selection, window) = (bound_name(product, "x")?, bound_name(product, "y")?);
    let &[Dim::Fixed(1), Dim::Fixed(1), Dim::Fixed(rows), all] =
        input(selection)?.ty.tensor()?.dims.as_slice()
    else {
        return None;
    };
    let of_window = &type_of(window)?.dims;
    let selected = product.outputs.first()?.ty.tensor()?.dims.get(2);
    if of_window.len() != 4 || of_window[2] != all || selected != Some(&Dim::Fixed(rows)) {
        return None;
    }
    Some(CarriedRows {
        selection: selection.to_string(),
        window: window.to_string(),
        rows: usize::try_from(rows).ok()?,
        state: bound_name(write, "input")?.to_string(),
        first: usize::try_from(slots).ok()?,
    })
}

/// Values that a function carries from call to call, where all are known: rows that callers keep, and slots of caches, which
/// may stay when a call is undone because callers mask them.
#[derive(Debug, Default)]
pub(in crate::cpu) struct KnownCarried {
    pub kept: Vec<KeptRows>,
    /// Slots of each state that has other rows behind them.
    pub slots: BTreeMap<String, usize>,
}

/// Rewrites `function` so that callers keep the rows that it carries. Returns none, and changes nothing, where it may carry
/// something else, or takes the rows in another way.
pub(in crate::cpu) fn keep_rows(
    function: &mut Function,
    described: &mut FunctionDescription,
) -> Option<KnownCarried> {
    let rows = match carried(function) {
        Carried::Nothing => return Some(KnownCarried::default()),
        Carried::Rows(rows) => rows,
        Carried::Unknown => return None,
    };
    let windows = rows.iter().map(|rows| CarriedWindow::of(function, rows)).collect::<Option<Vec<_>>>()?;
    let mut known = KnownCarried::default();
    for (rows, window) in rows.into_iter().zip(windows) {
        let CarriedWindow { at, before, own, kept, ty, feature } = window;
        for op in &mut function.block.operations[at..] {
            for binding in op.inputs.values_mut().flat_map(|Argument(bindings)| bindings) {
                if *binding == Binding::Name(before.clone()) {
                    *binding = Binding::Name(kept.input.clone());
                }
            }
        }
        described.inputs.push(Feature { name: kept.input.clone(), ..feature });
        function.inputs.push(NamedType { name: kept.input.clone(), ty });
        let of_own = function.block.operations.iter().flat_map(|op| &op.outputs).find(|o| o.name == own)?;
        let of_own = of_own.ty.tensor()?;
        let shape = of_own.shape().map_or(FeatureShape::Dynamic, FeatureShape::Fixed);
        described.outputs.push(Feature::array(&own, of_own.dtype, shape));
        function.block.outputs.push(own);
        known.slots.insert(rows.state, rows.first);
        known.kept.push(kept);
    }
    Some(known)
}

/// The operation that joins the rows carried before a call with those of its tokens.
struct CarriedWindow {
    /// Number of the first operation that may read `before`.
    at: usize,
    before: String,
    own: String,
    kept: KeptRows,
    ty: ValueType,
    feature: Feature,
}

impl CarriedWindow {
    fn of(function: &Function, rows: &CarriedRows) -> Option<CarriedWindow> {
        let operations = &function.block.operations;
        let made = |name: &str| {
            operations
                .iter()
                .enumerate()
                .find_map(|(i, op)| Some((i, op.outputs.iter().find(|o| o.name == name)?)))
        };
        let joins = &operations[made(&rows.window)?.0];
        let [Binding::Name(before), Binding::Name(own)] = joins.inputs.get("values")?.0.as_slice() else {
            return None;
        };
        let (at, result) = made(before)?;
        made(own).filter(|_| joins.op_type == "concat" && !function.block.outputs.contains(own))?;
        let shape = result.ty.tensor()?.shape()?;
        let &[1, heads, count, channels] = shape.as_slice() else { return None };
        let size = |n: u64| usize::try_from(n).ok();
        let kept = KeptRows {
            input: format!("{before}_kept"),
            rows: own.clone(),
            count: size(count).filter(|count| *count == rows.rows)?,
            heads: size(heads)?,
            channels: size(channels)?,
        };
        // All that the rows are made of is in the state.
        let mut open = vec![before.as_str()];
        while let Some(name) = open.pop() {
            let op = &operations[made(name)?.0];
            match op.op_type.as_str() {
                "read_state" if bound_name(op, "input") == Some(&rows.state) => {}
                "const" => {}
                "reshape" | "slice_by_size" | "slice_by_index" | "transpose" => open.extend(names(op)),
                _ => return None,
            }
        }
        let feature = Feature::array(before, result.ty.tensor()?.dtype, FeatureShape::Fixed(shape));
        let (before, own) = (before.clone(), own.clone());
        Some(CarriedWindow { at: at + 1, before, own, kept, ty: result.ty.clone(), feature })
    }
}
