//! Values that nodes read.

use super::view::{Base, View};
use crate::tensor::Tensor;
use anemoe_kernels::Columns;
use std::sync::Arc;

/// Values that nodes read, by base.
#[derive(Clone, Copy)]
pub(super) struct NodeInputs<'a> {
    pub buffers: &'a [Vec<f32>],
    pub tensors: &'a [Tensor],
    pub constants: &'a [Arc<Tensor>],
    pub inputs: &'a [&'a Tensor],
}

impl<'a> NodeInputs<'a> {
    pub fn tensor(&self, base: Base) -> Option<&'a Tensor> {
        match base {
            Base::Tensor(i) => Some(&self.tensors[i]),
            Base::Constant(i) => Some(&self.constants[i]),
            Base::Input(i) => Some(self.inputs[i]),
            Base::Buffer(_) | Base::State(_) => None,
        }
    }

    pub fn get(&self, base: Base) -> &'a [f32] {
        match base {
            Base::Buffer(i) => &self.buffers[i],
            _ => self.tensor(base).and_then(Tensor::as_f32).unwrap_or_default(),
        }
    }

    /// Returns the tokens of a view as columns for the kernels.
    pub fn columns(&self, x: &View, (token_stride, channel_stride): (usize, usize)) -> Columns<'a> {
        Columns { values: self.get(x.base), first: x.offset, token_stride, channel_stride }
    }
}
