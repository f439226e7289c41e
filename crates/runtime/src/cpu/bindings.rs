//! Names that the operations of a program read.

use anemoe_mlpackage::mil::{Argument, Binding, Operation, Value};

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

/// Finds the operation that makes a value; returns its number.
pub(super) fn maker(operations: &[Operation], name: &str) -> Option<usize> {
    operations.iter().position(|op| op.outputs.iter().any(|o| o.name == name))
}

/// Returns the value of the `const` operation of this name.
pub(super) fn constant<'a>(operations: &'a [Operation], name: &str) -> Option<&'a Value> {
    let op = &operations[maker(operations, name)?];
    op.attributes.get("val").filter(|_| op.op_type == "const")
}

/// Returns the constant that the first value of an operation's parameter is bound to.
pub(super) fn constant_of<'a>(
    operations: &'a [Operation],
    op: &'a Operation,
    param: &str,
) -> Option<&'a Value> {
    match op.inputs.get(param)?.0.first()? {
        Binding::Value(value) => Some(value),
        Binding::Name(name) => constant(operations, name),
    }
}
