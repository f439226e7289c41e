//! Inputs, outputs and states of a function, as its package describes them.

use super::arrays::Element;
use super::failure::Failure;
use anemoe_mlpackage::mil::{Feature, FeatureShape, Function, FunctionDescription};
use anemoe_runtime::cpu::{Carried, carried};

/// A feature of a function.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(crate) struct Slot {
    pub name: String,
    pub element: Element,
    /// None where it comes with the call.
    pub shape: Option<Vec<usize>>,
}

/// A state of a package: of 16-bit floats always.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(crate) struct StateSlot {
    pub name: String,
    pub shape: Vec<usize>,
}

impl StateSlot {
    /// Number of elements.
    pub fn len(&self) -> usize {
        self.shape.iter().product()
    }
}

/// What a function takes and gives.
#[derive(Clone, Debug)]
pub(crate) struct Interface {
    pub inputs: Vec<Slot>,
    pub outputs: Vec<Slot>,
    pub has_states: bool,
}

/// How calls of a function are undone.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(crate) enum UndoRule {
    /// Rows of caches stay, and are masked.
    Stay,
    /// Rows behind the slots of a state come back from a copy.
    Rows {
        /// Input that selects the rows, and so says how many tokens a call has.
        selection: usize,
        /// Number of the state.
        state: usize,
        /// First of the rows.
        first: usize,
    },
    /// Tokens have to run again.
    Never,
}

fn fixed(shape: &FeatureShape) -> Option<Vec<usize>> {
    match shape {
        FeatureShape::Fixed(dims) => dims.iter().map(|&d| usize::try_from(d).ok()).collect(),
        _ => None,
    }
}

fn slots(features: &[Feature]) -> Result<Vec<Slot>, Failure> {
    let slot = |f: &Feature| {
        let element = Element::of(f.dtype)
            .ok_or_else(|| Failure::Misfit(format!("`{}`: elements of {}", f.name, f.dtype)))?;
        Ok(Slot { name: f.name.clone(), element, shape: fixed(&f.shape) })
    };
    features.iter().map(slot).collect()
}

impl Interface {
    /// Reads a description.
    pub fn of(described: &FunctionDescription) -> Result<Interface, Failure> {
        Ok(Interface {
            inputs: slots(&described.inputs)?,
            outputs: slots(&described.outputs)?,
            has_states: !described.states.is_empty(),
        })
    }
}

/// The states of a package's functions: those that have any have the same ones.
pub(crate) fn states_of(functions: &[FunctionDescription]) -> Result<Vec<StateSlot>, Failure> {
    let mut states: Option<Vec<StateSlot>> = None;
    for described in functions.iter().filter(|f| !f.states.is_empty()) {
        let slot = |f: &Feature| {
            let halves = Element::of(f.dtype) == Some(Element::F16);
            let shape = fixed(&f.shape).filter(|_| halves);
            let shape = shape.ok_or_else(|| {
                Failure::Misfit(format!("state `{}` of {} {}, expected fp16", f.name, f.dtype, f.shape))
            })?;
            Ok(StateSlot { name: f.name.clone(), shape })
        };
        let mut own: Vec<StateSlot> = described.states.iter().map(slot).collect::<Result<_, Failure>>()?;
        own.sort_by(|a, b| a.name.cmp(&b.name));
        match &states {
            Some(known) if *known != own => {
                return Err(Failure::Misfit(format!(
                    "other states than in function `{}`",
                    functions[0].name
                )));
            }
            _ => states = Some(own),
        }
    }
    Ok(states.unwrap_or_default())
}

/// How calls of `body` are undone, whose package has `states`.
pub(crate) fn undo_rule(body: &Function, interface: &Interface, states: &[StateSlot]) -> UndoRule {
    match carried(body) {
        Carried::Nothing => {
            // A cache has as many rows as some input has slots.
            let is_cache = |state: &StateSlot| {
                let rows = state.shape.get(2).copied().filter(|_| state.shape.len() == 4);
                let has = |slot: &Slot| {
                    slot.shape
                        .as_ref()
                        .is_some_and(|dims| dims.len() == 4 && dims[2..].iter().any(|d| rows == Some(*d)))
                };
                interface.inputs.iter().any(has)
            };
            if states.iter().all(is_cache) { UndoRule::Stay } else { UndoRule::Never }
        }
        Carried::Rows(rows) => {
            let selection = interface.inputs.iter().position(|i| i.name == rows.selection);
            let state = states.iter().position(|s| s.name == rows.state);
            match (selection, state) {
                (Some(selection), Some(state)) if states.len() == 1 && states[state].shape.len() == 4 => {
                    UndoRule::Rows { selection, state, first: rows.first }
                }
                _ => UndoRule::Never,
            }
        }
        Carried::Unknown => UndoRule::Never,
    }
}
