//! Nodes that call the op library.

use super::super::super::ir::{InstrKind, ValueRef};
use super::super::super::strided::{StridedLoops, dense_strides};
use super::super::nodes::{NodeKind, OpCall, OpOperand};
use super::super::view::{Base, View};
use super::native::is_view;
use super::plan_builder::PlanBuilder;

impl PlanBuilder<'_> {
    /// Adds a node that calls the op library.
    pub(super) fn library_op(&mut self) -> Option<()> {
        let instructions = self.g.instructions;
        let step = &instructions[self.step];
        let InstrKind::Op { function, inputs, values, outputs } = &step.work else { return None };
        let operand = |b: &mut Self, place: ValueRef| -> Option<OpOperand> {
            let view = b.place(place)?;
            if matches!(view.base, Base::Tensor(_) | Base::Constant(_) | Base::Input(_))
                && view.offset == 0
                && view.is_dense()
                && b.whole(&view, place)
            {
                return Some(OpOperand::Whole(view.base));
            }
            if !b.is_float(place) {
                return None;
            }
            let dense = dense_strides(&view.shape);
            let loops = StridedLoops::new(&view.shape, [&dense, &view.strides], [0, view.offset]);
            let shape = view.shape.clone();
            b.tensors += 1;
            Some(OpOperand::Copied { loops, x: view.base, shape, copy: b.tensors - 1 })
        };
        let mut bound = Vec::new();
        for input in inputs {
            bound.push((input.param.clone(), operand(self, input.place)?));
        }
        let listed = values.iter().map(|&value| operand(self, value)).collect::<Option<_>>()?;
        let mut tensors = Vec::new();
        for &b in outputs {
            self.tensors += 1;
            tensors.push(self.tensors - 1);
            self.views[b] = Some(View::dense(Base::Tensor(self.tensors - 1), &self.g.shapes[b]));
        }
        self.push(NodeKind::Op(Box::new(OpCall {
            function: *function,
            op_type: step.op_type.clone(),
            inputs: bound,
            values: listed,
            outputs: tensors,
            types: step.types.clone(),
        })));
        Some(())
    }

    /// Tells whether the view covers its whole base, in the same shape.
    fn whole(&self, view: &View, place: ValueRef) -> bool {
        match place {
            ValueRef::Constant(_) => true,
            ValueRef::Buffer(b) => {
                let own = match view.base {
                    // An op or an input defined the value, and no view changed it; values that are no floats have no views.
                    Base::Tensor(_) => self.g.producer[b].is_some_and(|p| {
                        matches!(self.g.instructions[p].work, InstrKind::Op { .. })
                            && !(is_view(&self.g.instructions[p].op_type) && self.is_float(place))
                    }),
                    Base::Input(_) => self.g.producer[b].is_none(),
                    _ => false,
                };
                own && view.shape == self.g.shapes[b]
            }
            ValueRef::State(_) => false,
        }
    }
}
