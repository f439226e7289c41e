//! Values of a function that is being compiled, by name.

use super::super::ir::ValueRef;
use super::super::weights::Constant;
use crate::tensor::Tensor;
use anemoe_mlpackage::mil::{TensorType, ValueType};
use std::collections::HashMap;
use std::sync::Arc;

/// Definition of a name: a constant that nothing reads yet, or a value that has a place.
#[derive(Clone)]
pub(super) enum Definition {
    Constant(Constant),
    Value(ValueRef),
}

/// Names defined so far, with their values and types.
#[derive(Default)]
pub(super) struct KnownValues<'a> {
    pub names: HashMap<&'a str, Definition>,
    pub types: HashMap<&'a str, &'a ValueType>,
    /// Constants that have a place.
    pub constants: Vec<Arc<Tensor>>,
}

impl KnownValues<'_> {
    /// Returns the constant of a name; none where it is computed.
    pub fn constant(&self, name: &str) -> Option<Constant> {
        match self.names.get(name)? {
            Definition::Constant(c) => Some(c.clone()),
            Definition::Value(ValueRef::Constant(i)) => Some(Constant::Dense(self.constants[*i].clone())),
            Definition::Value(_) => None,
        }
    }

    /// Tells whether a value is a tensor of floats.
    pub fn is_float(&self, name: &str) -> bool {
        self.types.get(name).and_then(|ty| ty.tensor()).is_some_and(|ty| ty.dtype.is_float())
    }

    /// Returns the rank of a tensor; 0 for other values.
    pub fn rank(&self, name: &str) -> usize {
        self.types.get(name).and_then(|ty| ty.tensor()).map_or(0, TensorType::rank)
    }
}
