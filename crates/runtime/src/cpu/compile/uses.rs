//! Counts readers of the values of a program.

use super::super::bindings::names;
use anemoe_mlpackage::mil::{Block, Operation};
use std::collections::BTreeMap;

/// Counts the readers of every name, nested blocks included; an output of a block is a reader.
pub(super) fn count_uses<'a>(block: &'a Block, uses: &mut BTreeMap<&'a str, usize>) {
    block.operations.iter().for_each(|op| count_op(op, uses));
    for name in &block.outputs {
        *uses.entry(name).or_default() += 1;
    }
}

/// Counts the names that an operation reads, its nested blocks included.
pub(super) fn count_op<'a>(op: &'a Operation, uses: &mut BTreeMap<&'a str, usize>) {
    names(op).for_each(|name| *uses.entry(name).or_default() += 1);
    op.blocks.iter().for_each(|b| count_uses(b, uses));
}
