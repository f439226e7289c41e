//! Splits a function with states into stages: those that treat all tokens alike, and those that depend on a sequence.
//!
//! ```text
//! stage 0: projections of all tokens, once ----> 1: cache and attention, once per sequence ----> 2: projections, once
//!                                                  ----> 3: cache and attention of the next layer ----> 4: ...
//! ```
//! Weights are in stages with even numbers, which run once for the tokens of all sequences of a batch.

use super::super::bindings::names;
use super::resize::{TokenAxis, resize, with_axes};
use anemoe_mlpackage::mil::{
    Binding, Block, Dim, Feature, FeatureShape, Function, FunctionDescription, NamedType, Operation,
    ValueType,
};
use std::collections::{BTreeMap, BTreeSet};

/// Token count that stages are written for.
pub(in crate::cpu) const WRITTEN_FOR: usize = 2;

/// A stage of a function, written for [`WRITTEN_FOR`] tokens.
pub(in crate::cpu) struct Stage {
    pub function: Function,
    pub described: FunctionDescription,
}

/// A function in stages, of which any may be missing. Those with odd numbers run once per sequence.
pub(in crate::cpu) struct Stages {
    pub stages: Vec<Option<Stage>>,
    /// Token axis of each input and of each value that goes from stage to stage.
    pub axes: BTreeMap<String, usize>,
}

/// Tells whether the operation may read neighbours of a token: a convolution with more than one tap.
fn has_taps(op: &Operation, shapes: &BTreeMap<&str, &ValueType>) -> bool {
    let weight = op.inputs.get("weight").and_then(|a| a.0.first());
    let ty = match weight {
        Some(Binding::Name(name)) => shapes.get(name.as_str()).and_then(|ty| ty.tensor()),
        Some(Binding::Value(value)) => value.ty.tensor(),
        None => None,
    };
    op.op_type == "conv" && ty.is_none_or(|ty| ty.dims.iter().skip(2).any(|d| *d != Dim::Fixed(1)))
}

/// Splits `function`, written for `declared` tokens or for a range that begins there. Returns none where it has no states, or
/// where a value that would go from stage to stage has no axis of tokens only.
pub(in crate::cpu) fn stages(
    function: &Function,
    described: &FunctionDescription,
    axes: &BTreeMap<String, usize>,
    declared: usize,
) -> Option<Stages> {
    let base = resize(function, described, axes, declared, WRITTEN_FOR).ok()?;
    let (_, of_values) = with_axes(&base, described, axes, WRITTEN_FOR).ok()?;
    let is_pure = |axis: &TokenAxis| axis.per_token == 1 && axis.fixed == 0;
    let operations = &base.block.operations;
    let mut types: BTreeMap<&str, &ValueType> =
        base.inputs.iter().map(|i| (i.name.as_str(), &i.ty)).collect();
    types.extend(operations.iter().flat_map(|op| &op.outputs).map(|o| (o.name.as_str(), &o.ty)));

    // Values that depend only on constants, and values that belong to one sequence.
    let (mut constant, mut own) = (BTreeSet::new(), BTreeSet::new());
    for input in &base.inputs {
        if !of_values.get(&input.name).is_some_and(is_pure) {
            own.insert(input.name.as_str());
        }
    }
    let mut makes: BTreeMap<&str, usize> = BTreeMap::new();
    for (i, op) in operations.iter().enumerate() {
        let is_constant = op.op_type != "read_state" && names(op).all(|name| constant.contains(name));
        for output in &op.outputs {
            makes.insert(&output.name, i);
            if is_constant {
                constant.insert(output.name.as_str());
            } else if !of_values.get(&output.name).is_some_and(is_pure) {
                own.insert(output.name.as_str());
            }
        }
    }
    let is_constant = |op: &Operation| {
        op.outputs.iter().all(|o| constant.contains(o.name.as_str())) && !op.outputs.is_empty()
    };
    let mixes = |op: &Operation| {
        !is_constant(op)
            && (names(op).chain(op.outputs.iter().map(|o| o.name.as_str())).any(|n| own.contains(n))
                || has_taps(op, &types))
    };
    if !operations.iter().any(mixes) {
        return None;
    }
    // Values of a sequence that follow from inputs and from states before they are written: each stage makes its own.
    let n = operations.len();
    let is_input = |name: &str| base.inputs.iter().any(|i| i.name == name);
    let state_of = |op: &Operation| -> Option<&str> {
        let is_of_state = matches!(op.op_type.as_str(), "read_state" | "write_state");
        match op.inputs.get("input")?.0.first()? {
            Binding::Name(name) if is_of_state => types.get_key_value(name.as_str()).map(|(name, _)| *name),
            _ => None,
        }
    };
    let (mut free, mut written) = (vec![false; n], BTreeMap::new());
    let mut stage_of = vec![0usize; n];
    for (i, op) in operations.iter().enumerate() {
        if is_constant(op) {
            continue;
        }
        let state = state_of(op);
        let is_made_free = |name: &str| is_input(name) || makes.get(name).is_some_and(|&m| free[m]);
        free[i] = mixes(op)
            && op.op_type != "write_state"
            && state.is_none_or(|state| !written.contains_key(state))
            && names(op).all(|name| constant.contains(name) || is_made_free(name));
        let before = names(op).filter_map(|name| makes.get(name)).map(|&m| stage_of[m]).max().unwrap_or(0);
        let before = before.max(state.and_then(|state| written.get(state).copied()).unwrap_or(0));
        stage_of[i] = match (free[i], mixes(op), op.op_type.as_str()) {
            (true, ..) => 0,
            (false, true, _) => before + (before + 1) % 2,
            (false, false, "conv" | "linear") => before + before % 2,
            (false, false, _) => before,
        };
        if op.op_type == "write_state"
            && let Some(state) = state
        {
            written.insert(state, stage_of[i]);
        }
    }
    // Splits into heads before products of one sequence belong to the stage of these products.
    for i in (0..n).rev().filter(|&i| operations[i].op_type == "split") {
        let makes_one = |name: &str| operations[i].outputs.iter().any(|o| o.name == name);
        let mut readers = (0..n).filter(|&r| names(&operations[r]).any(makes_one)).peekable();
        let next = stage_of[i] + 1;
        if next % 2 == 1 && readers.peek().is_some() && readers.all(|r| stage_of[r] == next) {
            stage_of[i] = next;
        }
    }
    let mut stages = Vec::new();
    let mut axes: BTreeMap<String, usize> = axes.iter().map(|(name, axis)| (name.clone(), *axis)).collect();
    for wanted in 0..=stage_of.iter().copied().max().unwrap_or(0) {
        let inside: BTreeSet<usize> =
            (0..n).filter(|&i| stage_of[i] == wanted && !free[i] && !is_constant(&operations[i])).collect();
        if inside.is_empty() {
            stages.push(None);
            continue;
        }
        // Constants and free values that the stage reads, with the operations that make them.
        let mut all = inside.clone();
        let mut open: Vec<&str> = inside.iter().flat_map(|&i| names(&operations[i])).collect();
        while let Some(name) = open.pop() {
            let own = makes.get(name).filter(|&&m| free[m] || constant.contains(name));
            if own.is_some_and(|&m| all.insert(m)) {
                open.extend(names(&operations[makes[name]]));
            }
        }
        let made = |name: &str| makes.get(name).is_some_and(|m| all.contains(m));
        let read: BTreeSet<&str> =
            all.iter().flat_map(|&i| names(&operations[i])).filter(|name| !made(name)).collect();
        let outside = |name: &str| {
            base.block.outputs.iter().any(|o| o == name)
                || (0..n).any(|i| !all.contains(&i) && names(&operations[i]).any(|other| other == name))
        };
        let results = || inside.iter().flat_map(|&i| &operations[i].outputs);
        let written: Vec<&NamedType> = results().filter(|o| outside(&o.name)).collect();
        for name in read.iter().copied().chain(written.iter().map(|o| o.name.as_str())) {
            match of_values.get(name).filter(|axis| is_pure(axis)) {
                Some(axis) => drop(axes.insert(name.to_string(), axis.axis)),
                None if is_input(name) => {}
                None => return None,
            }
        }
        let feature = |name: &str, ty: &ValueType| {
            let ty = ty.tensor()?;
            Some(Feature::array(name, ty.dtype, FeatureShape::Fixed(ty.shape()?)))
        };
        let inputs: Vec<NamedType> = read
            .iter()
            .map(|name| Some(NamedType { name: (*name).into(), ty: (*types.get(name)?).clone() }))
            .collect::<Option<_>>()?;
        let of = |state: bool| {
            let some = inputs.iter().filter(move |i| matches!(i.ty, ValueType::State(_)) == state);
            some.map(|i| feature(&i.name, &i.ty)).collect::<Option<Vec<_>>>()
        };
        let described = FunctionDescription {
            name: described.name.clone(),
            inputs: of(false)?,
            outputs: written.iter().map(|o| feature(&o.name, &o.ty)).collect::<Option<_>>()?,
            states: of(true)?,
            ..FunctionDescription::default()
        };
        let block = Block {
            inputs: Vec::new(),
            operations: all.into_iter().map(|i| operations[i].clone()).collect(),
            outputs: written.into_iter().map(|o| o.name.clone()).collect(),
        };
        stages.push(Some(Stage { function: Function { inputs, opset: base.opset, block }, described }));
    }
    Some(Stages { stages, axes })
}
