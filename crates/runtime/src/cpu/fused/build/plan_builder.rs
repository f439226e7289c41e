//! The state of a plan while it is built: views of values, nodes, and buffers.

use super::super::super::ir::{InstrKind, ValueRef};
use super::super::super::strided::StridedLoops;
use super::super::super::weights::to_f16;
use super::super::nodes::{Computation, Node, NodeKind, Then};
use super::super::patterns::InstrGraph;
use super::super::view::{Base, View};
use crate::tensor::Data;
use anemoe_mlpackage::mil::{DataType, TensorType};

/// A plan while it is built.
pub(super) struct PlanBuilder<'a> {
    pub g: InstrGraph<'a>,
    pub states: &'a [Vec<usize>],
    /// Type of each buffer of the instructions.
    pub types: &'a [DataType],
    pub round: bool,
    /// View of each buffer of the instructions; none before its step.
    pub views: Vec<Option<View>>,
    pub nodes: Vec<Node>,
    /// Elements of each buffer of the plan.
    pub sizes: Vec<usize>,
    pub packed: usize,
    pub tensors: usize,
    /// For each value with matmuls: its view, the matmuls' node, and the packed activations.
    pub matmuls: Vec<(View, usize, usize)>,
    /// Nodes of convolutions, each with the buffer of the instructions whose value its results are.
    pub convs: Vec<(usize, usize)>,
    pub step: usize,
}

impl PlanBuilder<'_> {
    pub fn push(&mut self, work: NodeKind) {
        let step = &self.g.instructions[self.step];
        let (op_type, name) = (step.op_type.clone(), step.name.clone());
        self.nodes.push(Node { work, round: Vec::new(), op_type, name });
    }

    /// Adds a node that computes the step's result in a new buffer.
    pub fn compute(&mut self, work: Computation, out: View) -> Option<()> {
        self.push(NodeKind::Compute(work, buffer_of(&out)));
        self.define(out)
    }

    /// Adds a node that computes the step's result in a new buffer, and its rounding.
    pub fn compute_result(&mut self, work: Computation, out: View) -> Option<()> {
        self.push(NodeKind::Compute(work, buffer_of(&out)));
        self.round_result(self.nodes.len() - 1, buffer_of(&out));
        self.define(out)
    }

    /// Adds a rounding to fp16 behind `node`, if the plan rounds and the step's result has type fp16.
    pub fn round_result(&mut self, node: usize, buffer: usize) {
        if self.rounds_result() {
            self.nodes[node].round.push((buffer, self.sizes[buffer]));
        }
    }

    /// Tells whether the plan rounds and the step's result has type fp16.
    pub fn rounds_result(&self) -> bool {
        let is_half = |ty: &TensorType| ty.dtype == DataType::Float16;
        self.round && self.g.instructions[self.step].types.first().is_some_and(is_half)
    }

    /// Returns the index in `convs` of the convolution that computes a value, and the value's view, if only this step reads it.
    pub fn conv_of(&self, place: ValueRef) -> Option<(usize, View)> {
        let ValueRef::Buffer(b) = place else { return None };
        let conv = self.convs.iter().position(|(_, value)| *value == b)?;
        (self.g.readers[b].len() == 1).then(|| Some((conv, self.views[b].clone()?)))?
    }

    /// Returns the number of channels of the results of a convolution.
    pub fn channels_of(&self, conv: usize) -> usize {
        match &self.nodes[self.convs[conv].0].work {
            NodeKind::Compute(Computation::Conv { conv, .. }, _) => conv.weight.rows(),
            _ => 0,
        }
    }

    /// Defines the step's result as that of an operation on the results of a convolution. `rounded` says that its results are
    /// fp16 numbers.
    pub fn push_then(&mut self, (conv, view): (usize, View), operation: Then, rounded: bool) -> Option<()> {
        let rounds = self.rounds_result() && !rounded;
        let (node, value) = self.convs.get_mut(conv)?;
        let NodeKind::Compute(Computation::Conv { then, .. }, _) = &mut self.nodes[*node].work else {
            return None;
        };
        then.push(operation);
        if rounds {
            then.push(Then::Round);
        }
        *value = self.g.instructions[self.step].writes().first().copied()?;
        self.define(view)
    }

    /// Returns the last node that writes a buffer.
    pub fn writer(&self, buffer: usize) -> Option<usize> {
        self.nodes.iter().rposition(|node| node.work.writes(buffer))
    }

    /// Tells whether the value's elements are fp16 numbers already.
    pub fn is_rounded(&self, place: ValueRef) -> bool {
        match place {
            ValueRef::Buffer(b) => self.types[b] == DataType::Float16,
            ValueRef::Constant(c) => {
                let values = self.g.constants[c].as_f32().unwrap_or_default();
                values.iter().all(|v| v.is_nan() || to_f16(*v) == *v)
            }
            ValueRef::State(_) => true,
        }
    }

    /// Tells whether the step's result is rounded to fp16, but an operand that it moves is not.
    pub fn moves_unrounded(&self) -> bool {
        let step = &self.g.instructions[self.step];
        let InstrKind::Op { inputs, values, .. } = &step.work else { return false };
        let operands = inputs.iter().map(|o| &o.place).chain(values);
        self.round
            && step.types.iter().any(|ty| ty.dtype == DataType::Float16)
            && operands.copied().any(|p| self.is_float(p) && !self.is_rounded(p))
    }

    pub fn place(&self, place: ValueRef) -> Option<View> {
        match place {
            ValueRef::Buffer(b) => self.views[b].clone(),
            ValueRef::Constant(c) => Some(View::dense(Base::Constant(c), &self.g.constants[c].shape)),
            ValueRef::State(s) => Some(View::dense(Base::State(s), &self.states[s])),
        }
    }

    pub fn is_float(&self, place: ValueRef) -> bool {
        match place {
            ValueRef::Buffer(b) => self.types[b].is_float(),
            ValueRef::Constant(c) => matches!(self.g.constants[c].data, Data::F32(_)),
            ValueRef::State(_) => true,
        }
    }

    /// Returns a float operand as a view; a view of a state is copied first.
    pub fn float(&mut self, place: ValueRef) -> Option<View> {
        let view = self.place(place).filter(|_| self.is_float(place))?;
        Some(self.out_of_state(view))
    }

    pub fn argument(&mut self, name: &str) -> Option<View> {
        let place = self.g.instructions[self.step].argument(name)?;
        self.float(place)
    }

    /// Returns the buffer and the shape of the step's only result.
    pub fn result(&self) -> Option<(usize, Vec<usize>)> {
        let step = &self.g.instructions[self.step];
        let &[b] = step.writes().as_slice() else { return None };
        Some((b, self.g.shapes[b].clone()))
    }

    /// Makes a buffer whose elements lie in the order of dimensions `order`, outermost first.
    pub fn allocate(&mut self, shape: &[usize], order: &[usize]) -> View {
        let mut strides = vec![0; shape.len()];
        let mut n = 1;
        for &d in order.iter().rev() {
            strides[d] = n;
            n *= shape[d].max(1);
        }
        self.sizes.push(shape.iter().product());
        View { base: Base::Buffer(self.sizes.len() - 1), offset: 0, shape: shape.to_vec(), strides }
    }

    pub fn allocate_dense(&mut self, shape: &[usize]) -> View {
        self.allocate(shape, &(0..shape.len()).collect::<Vec<_>>())
    }

    /// Adds a node that copies a view to a new buffer, with dimensions in `order`, outermost first.
    pub fn copied(&mut self, view: &View, order: &[usize]) -> View {
        let out = self.allocate(&view.shape, order);
        let loops = StridedLoops::new(&view.shape, [&out.strides, &view.strides], [0, view.offset]);
        let copy = Computation::Copy { loops, x: view.base, fill: None };
        self.push(NodeKind::Compute(copy, buffer_of(&out)));
        out
    }

    /// Returns a view of the same elements, or of a copy of them, in another shape; none where it has not as many elements.
    pub fn reshaped(&mut self, view: &View, shape: &[usize]) -> Option<View> {
        if view.len() != shape.iter().product::<usize>() {
            return None;
        }
        view.reshaped(shape).or_else(|| self.copied_dense(view).reshaped(shape))
    }

    fn copied_dense(&mut self, view: &View) -> View {
        self.copied(view, &(0..view.rank()).collect::<Vec<_>>())
    }

    pub fn out_of_state(&mut self, view: View) -> View {
        if !matches!(view.base, Base::State(_)) {
            return view;
        }
        let copy = self.copied_dense(&view);
        self.replace(&view, &copy);
        copy
    }

    /// Makes later readers of the same elements read the copy.
    pub fn replace(&mut self, view: &View, copy: &View) {
        for v in self.views.iter_mut().flatten() {
            if v == view {
                *v = copy.clone();
            }
        }
    }

    /// Returns the view, or a copy of it, in which the elements along `axis` lie together.
    pub fn make_contiguous(&mut self, view: View, axis: usize) -> View {
        let view = self.out_of_state(view);
        if view.shape[axis] == 1 || view.strides[axis] == 1 {
            return view;
        }
        let copy = self.copied(&view, &order_ending(view.rank(), axis));
        self.replace(&view, &copy);
        copy
    }

    /// Makes a buffer like `x` whose elements along `axis` lie together; also returns the shape of its rows along this axis.
    pub fn rows_like(&mut self, x: &View, axis: usize) -> (View, Vec<usize>) {
        let mut order = Self::order(x);
        order.retain(|d| *d != axis);
        order.push(axis);
        let mut rows = x.shape.clone();
        rows[axis] = 1;
        (self.allocate(&x.shape, &order), rows)
    }

    /// Returns the dimensions by stride, the largest first.
    pub fn order(view: &View) -> Vec<usize> {
        let mut order: Vec<usize> = (0..view.rank()).collect();
        order.sort_by_key(|&d| std::cmp::Reverse((view.shape[d] == 1, view.strides[d])));
        order
    }

    pub fn define(&mut self, view: View) -> Option<()> {
        let (b, shape) = self.result()?;
        (view.shape == shape).then(|| self.views[b] = Some(view))
    }

    /// Copies values that are still a view of the state and are read after the write.
    pub fn before_write(&mut self, state: usize) {
        for b in 0..self.views.len() {
            let Some(view) = self.views[b].clone() else { continue };
            let later = self.g.readers[b].iter().any(|&r| r > self.step);
            if view.base == Base::State(state) && later {
                self.out_of_state(view);
            }
        }
    }

    /// Adds a node that copies an input, rounded to fp16.
    pub fn rounded_input(&mut self, view: &View) -> View {
        let out = self.allocate_dense(&view.shape);
        let loops = StridedLoops::new(&view.shape, [&out.strides, &view.strides], [0, view.offset]);
        let to = buffer_of(&out);
        let work = NodeKind::Compute(Computation::Copy { loops, x: view.base, fill: None }, to);
        let round = vec![(to, self.sizes[to])];
        self.nodes.push(Node { work, round, op_type: "input".into(), name: String::new() });
        out
    }
}

/// Returns an order of dimensions, outermost first, that ends with `last`.
pub(super) fn order_ending(rank: usize, last: usize) -> Vec<usize> {
    (0..rank).filter(|&d| d != last).chain([last]).collect()
}

/// Returns the buffer of a view that [`PlanBuilder::allocate`] made.
pub(super) fn buffer_of(view: &View) -> usize {
    match view.base {
        Base::Buffer(b) => b,
        _ => unreachable!("a view of a new buffer"),
    }
}
