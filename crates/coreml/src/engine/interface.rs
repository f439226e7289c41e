//! Inputs, outputs and states of a function, read from the description in its package.

use super::arrays::Element;
use super::failure::Failure;
use anemoe_mlpackage::mil::{Binding, Feature, FeatureShape, Function, FunctionDescription, Operation};
use anemoe_runtime::backend::{AddedRows, KeptCache};
use anemoe_runtime::cpu::{Carried, carried};

/// A feature of a function.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(crate) struct Slot {
    pub name: String,
    pub element: Element,
    /// `None` where the shape comes with the call.
    pub shape: Option<Vec<usize>>,
}

/// Key of a sequence's states in a package.
pub(crate) type StatesKey = u64;

/// A state of a package; fp16 always.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(crate) struct StateSlot {
    pub name: String,
    pub shape: Vec<usize>,
}

impl StateSlot {
    /// Returns the number of elements.
    pub fn len(&self) -> usize {
        self.shape.iter().product()
    }
}

/// A cache that the host keeps and a function takes as an input.
#[derive(Clone, Debug)]
pub(crate) struct CacheSlot {
    /// Input, fp16, `[1, heads, slots, channels]`.
    pub cache: StateSlot,
    /// Rows that a call adds; `None` where the function only reads the cache.
    pub added: Option<CacheRows>,
}

/// Rows that a call adds to a cache.
#[derive(Clone, Debug)]
pub(crate) struct CacheRows {
    /// Output with the cache rows of the call's own tokens.
    pub rows: Slot,
    /// Index of the input that places the rows.
    pub place: usize,
    /// True if that input has slots on its last axis.
    pub is_place_last: bool,
}

/// Inputs and outputs of a function.
#[derive(Clone, Debug)]
pub(crate) struct Interface {
    /// Inputs that the caller gives.
    pub inputs: Vec<Slot>,
    /// Outputs that the caller sees.
    pub outputs: Vec<Slot>,
    /// Caches in the order of the package.
    pub caches: Vec<CacheSlot>,
    /// True if the function has states of Core ML.
    pub has_states: bool,
}

/// Rule by which calls of a function are undone.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(crate) enum UndoRule {
    /// Rows of caches stay; a mask hides them.
    Stay,
    /// Rows behind the slots of a state are restored from a copy.
    Rows {
        /// Index of the input that selects the rows, and so says how many tokens a call has.
        selection: usize,
        /// Index of the state.
        state: usize,
        /// First of the restored rows.
        first: usize,
    },
    /// Calls cannot be undone: tokens have to run again.
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
    /// Reads the interface of a function from its description; `caches` are the caches that the host keeps for it.
    pub fn of(described: &FunctionDescription, caches: &[KeptCache]) -> Result<Interface, Failure> {
        let (mut inputs, mut outputs) = (slots(&described.inputs)?, slots(&described.outputs)?);
        let mut kept = Vec::with_capacity(caches.len());
        let takes = |named: &&KeptCache| described.inputs.iter().any(|i| i.name == named.sign());
        for named in caches.iter().filter(takes) {
            let misfit = |what: String| Failure::Misfit(format!("cache `{}`: {what}", named.input));
            let cache = remove(&mut inputs, &named.input);
            let cache = cache.ok_or_else(|| misfit("no input has its name".into()))?;
            let rows = match &named.added {
                None => None,
                Some(added) => {
                    let rows = remove(&mut outputs, &added.rows);
                    let rows = rows.ok_or_else(|| misfit(format!("no output is named `{}`", added.rows)))?;
                    Some((rows, added))
                }
            };
            let cache = match cache {
                Slot { name, element: Element::F16, shape: Some(shape) } if shape.len() == 4 => {
                    StateSlot { name, shape }
                }
                Slot { element, shape, .. } => {
                    return Err(misfit(format!("{element:?} {shape:?}, expected fp16 of rank 4")));
                }
            };
            kept.push((cache, rows));
        }
        let found = |(cache, rows): (StateSlot, Option<(Slot, &AddedRows)>)| {
            let Some((rows, added)) = rows else { return Ok(CacheSlot { cache, added: None }) };
            let place = inputs.iter().position(|i| i.name == added.place);
            let place = place.ok_or_else(|| {
                Failure::Misfit(format!("cache `{}`: no input is named `{}`", cache.name, added.place))
            })?;
            let added = CacheRows { rows, place, is_place_last: added.is_place_last };
            Ok(CacheSlot { cache, added: Some(added) })
        };
        let caches = kept.into_iter().map(found).collect::<Result<_, Failure>>()?;
        Ok(Interface { inputs, outputs, caches, has_states: !described.states.is_empty() })
    }
}

fn remove(slots: &mut Vec<Slot>, name: &str) -> Option<Slot> {
    let at = slots.iter().position(|s| s.name == name)?;
    Some(slots.remove(at))
}

/// Returns the states of a package's functions; all functions with states must have the same.
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

/// Returns the number of rows that a function writes of a state `[1, heads, rows, channels]`: all rows, or the rows of
/// a slice update.
fn count_written_rows(body: &Function, state: &StateSlot) -> Option<usize> {
    let operations = &body.block.operations;
    let argument = |op: &Operation, param: &str| match op.inputs.get(param)?.0.first()? {
        Binding::Name(name) => Some(name.clone()),
        Binding::Value(_) => None,
    };
    let write = operations
        .iter()
        .find(|op| op.op_type == "write_state" && argument(op, "input").as_ref() == Some(&state.name));
    let by = |name: String| {
        operations.iter().flat_map(|op| op.outputs.iter().map(move |o| (op, o))).find(|(_, o)| o.name == name)
    };
    let update = write.and_then(|op| by(argument(op, "data")?)).map(|(op, _)| op);
    let update = update.filter(|op| op.op_type == "slice_update");
    let shape = match update {
        Some(op) => by(argument(op, "update")?)?
            .1
            .ty
            .tensor()?
            .shape()?
            .into_iter()
            .map(|d| usize::try_from(d).ok())
            .collect::<Option<Vec<_>>>()?,
        None => state.shape.clone(),
    };
    shape.get(2).copied().filter(|_| shape.len() == 4)
}

/// Finds the rule by which calls of the function `body` are undone; `states` are the states of its package.
pub(crate) fn undo_rule(body: &Function, interface: &Interface, states: &[StateSlot]) -> UndoRule {
    match carried(body) {
        Carried::Nothing => {
            // A cache is written with as many rows as some input has slots.
            let is_cache = |state: &StateSlot| {
                let rows = count_written_rows(body, state);
                let has = |slot: &Slot| {
                    slot.shape
                        .as_ref()
                        .is_some_and(|dims| dims.len() == 4 && dims[2..].iter().any(|d| rows == Some(*d)))
                };
                interface.inputs.iter().any(has)
            };
            if states.iter().all(is_cache) { UndoRule::Stay } else { UndoRule::Never }
        }
        // Carried rows of several layers are restored by running tokens again.
        Carried::Rows(several) => {
            let [rows] = several.as_slice() else { return UndoRule::Never };
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
