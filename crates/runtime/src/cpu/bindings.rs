//! Names that the operations of a program read.

use anemoe_mlpackage::mil::{Argument, Binding, Operation};

/// Returns the name that a parameter is bound to; none where it is a constant written in place.
pub(super) fn name_of(binding: &Binding) -> Option<&str> {
    if let Binding::Name(name) = binding { Some(name) } else { None }
}

/// Iterates over the names that an operation reads, without those of its blocks.
pub(super) fn names(op: &Operation) -> impl Iterator<Item = &str> {
    op.inputs.values().flat_map(|Argument(bindings)| bindings).filter_map(name_of)
}

/// Returns the name that the first value of an operation's parameter is bound to.
pub(super) fn bound_name<'a>(op: &'a Operation, param: &str) -> Option<&'a str> {
    op.inputs.get(param)?.0.first().and_then(name_of)
}
