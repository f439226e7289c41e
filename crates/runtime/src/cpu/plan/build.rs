//! From steps to nodes.

mod buffers;
mod native;

use super::super::ir::{Instr, InstrKind, Projection, ValueRef};
use super::super::weights::StoredWeight;
use super::super::weights::to_f16;
use super::Plan;
use super::experts::{Branch, Experts, WeightRows};
use super::nodes::{Fill, Item, KernelCall, KernelOperand, Node, NodeKind};
use super::patterns::{Fused, Graph};
use super::update::caches;
use super::view::{Base, StridedLoops, View, dense_strides};
use crate::tensor::{Data, Tensor};
use anemoe_kernels::{AttentionShape, HeadStrides};
use anemoe_mlpackage::mil::{DataType, TensorType};
use buffers::assign;
use std::collections::BTreeMap;
use std::sync::Arc;

/// Input of planning: a function's steps, in which every buffer is written once.
pub(in crate::cpu) struct PlanInput {
    pub steps: Vec<Instr>,
    pub constants: Vec<Arc<Tensor>>,
    /// Shape of each buffer.
    pub shapes: Vec<Vec<usize>>,
    /// Type of each buffer.
    pub types: Vec<DataType>,
    /// Buffer of each input.
    pub inputs: Vec<usize>,
    pub outputs: Vec<ValueRef>,
    pub states: Vec<Vec<usize>>,
    pub skip_zero: bool,
    /// Round every result of type fp16.
    pub round: bool,
}

struct Builder<'a> {
    g: Graph<'a>,
    states: &'a [Vec<usize>],
    /// Type of each buffer of the steps.
    types: &'a [DataType],
    round: bool,
    /// View of each buffer of the steps, once it is there.
    views: Vec<Option<View>>,
    nodes: Vec<Node>,
    /// Elements of each buffer of the plan.
    sizes: Vec<usize>,
    panels: usize,
    tensors: usize,
    /// Node and panel of the products of a value.
    products: Vec<(View, usize, usize)>,
    step: usize,
}

/// Makes a plan; none where something is not of a fixed form, and then the steps are executed as they are.
pub(in crate::cpu) fn plan(source: &PlanInput) -> Option<Plan> {
    let PlanInput { steps, constants, shapes, types, inputs, outputs, states, skip_zero, round } = source;
    let (skip_zero, round) = (*skip_zero, *round);
    let mut producer = vec![None; shapes.len()];
    let mut readers = vec![Vec::new(); shapes.len()];
    for (i, step) in steps.iter().enumerate() {
        step.writes().into_iter().for_each(|b| producer[b] = Some(i));
        step.reads().into_iter().for_each(|b| readers[b].push(i));
    }
    for place in outputs {
        if let ValueRef::Buffer(b) = place {
            readers[*b].push(usize::MAX);
        }
    }
    let g = Graph { steps, constants, shapes, producer, readers, round };
    let mut b = Builder {
        views: vec![None; shapes.len()],
        types,
        round,
        nodes: Vec::new(),
        sizes: Vec::new(),
        panels: 0,
        tensors: 0,
        products: Vec::new(),
        step: 0,
        states,
        g,
    };
    for (i, &buffer) in inputs.iter().enumerate() {
        let view = View::dense(Base::Input(i), &shapes[buffer]);
        b.views[buffer] =
            Some(if round && types[buffer] == DataType::Float16 { b.rounded_input(&view) } else { view });
    }
    let (fused, inside) = b.fuse();
    for i in 0..steps.len() {
        b.step = i;
        if inside[i] {
            continue;
        }
        match fused.get(&i) {
            Some(f) => b.fused(f)?,
            None => b.single()?,
        }
    }
    let mut results = Vec::new();
    for &place in outputs {
        let view = b.place(place)?;
        let dense = dense_strides(&view.shape);
        let nest = StridedLoops::new(&view.shape, [&dense, &view.strides], [0, view.offset]);
        results.push((nest, view));
    }
    let Builder { mut nodes, sizes, panels, tensors, .. } = b;
    let caches = caches(&nodes, states);
    let sizes = assign(&mut nodes, &sizes, &mut results);
    Some(Plan {
        nodes,
        sizes,
        panels,
        tensors,
        constants: constants.to_vec(),
        caches,
        outputs: results,
        skip_zero,
        round,
        times: Vec::new(),
    })
}

impl Builder<'_> {
    /// Steps that stand for more, and those that are inside of them.
    fn fuse(&self) -> (BTreeMap<usize, Fused>, Vec<bool>) {
        let n = self.g.steps.len();
        let (mut fused, mut inside) = (BTreeMap::new(), vec![false; n]);
        let mut take = |root: usize, f: Fused, steps: Vec<usize>, inside: &mut Vec<bool>| {
            // A state that is read inside must not be written before the root reads it.
            let first = steps.iter().copied().min().unwrap_or(root);
            let written = |s: usize| matches!(self.g.steps[s].work, InstrKind::WriteState { .. });
            if steps.iter().chain([&root]).any(|&s| inside[s]) || (first..root).any(written) {
                return;
            }
            steps.into_iter().for_each(|s| inside[s] = true);
            fused.insert(root, f);
        };
        let halves = |root: usize, steps: &[usize]| !self.round || self.are_halves(root, steps);
        for (root, (f, steps)) in self.g.experts(self.round) {
            if halves(root, &steps) {
                take(root, f, steps, &mut inside);
            }
        }
        for root in 0..n {
            if inside[root] {
                continue;
            }
            let state = match &self.g.steps[root].work {
                InstrKind::WriteState { state, .. } => self.states[*state].as_slice(),
                _ => &[],
            };
            let update = self.g.update(root, state);
            let attention = || self.g.attention(root).or_else(|| self.g.attention_per_head(root));
            if let Some((f, steps)) = update.or_else(attention) {
                if halves(root, &steps) {
                    take(root, f, steps, &mut inside);
                }
            } else if self.round {
                // Others compute without rounding.
            } else if let Some((Fused::Norm { x, axis, norm, .. }, mut steps)) = self.g.norm(root) {
                match self.g.weighted(root, axis) {
                    Some((product, weight)) => {
                        steps.push(root);
                        take(
                            product,
                            Fused::Norm { x, axis, norm, weight: Some(weight) },
                            steps,
                            &mut inside,
                        );
                    }
                    None => take(root, Fused::Norm { x, axis, norm, weight: None }, steps, &mut inside),
                }
            } else if let Some((f, steps)) = self.g.rotate(root).or_else(|| self.g.gated(root)) {
                take(root, f, steps, &mut inside);
            }
        }
        (fused, inside)
    }

    fn push(&mut self, work: NodeKind) {
        let step = &self.g.steps[self.step];
        let (op_type, name) = (step.op_type.clone(), step.name.clone());
        self.nodes.push(Node { work, round: Vec::new(), op_type, name });
    }

    /// A node that computes the step's result into a new buffer.
    fn push_result(&mut self, work: NodeKind, buffer: usize) {
        self.push(work);
        let node = self.nodes.len() - 1;
        self.round_result(node, buffer);
    }

    /// Rounds the step's result behind `node`, where it is rounded.
    fn round_result(&mut self, node: usize, buffer: usize) {
        let is_half = |ty: &TensorType| ty.dtype == DataType::Float16;
        if self.round && self.g.steps[self.step].types.first().is_some_and(is_half) {
            self.nodes[node].round.push((buffer, self.sizes[buffer]));
        }
    }

    /// A rounded copy of an input.
    fn rounded_input(&mut self, view: &View) -> View {
        let out = self.allocate_dense(&view.shape);
        let nest = StridedLoops::new(&view.shape, [&out.strides, &view.strides], [0, view.offset]);
        let to = buffer_of(&out);
        let work = NodeKind::Copy { nest, x: view.base, out: to, fill: None };
        let round = vec![(to, self.sizes[to])];
        self.nodes.push(Node { work, round, op_type: "input".into(), name: String::new() });
        out
    }

    /// Every result of these steps is of type fp16.
    fn are_halves(&self, root: usize, steps: &[usize]) -> bool {
        let all = steps.iter().chain([&root]).flat_map(|&s| &self.g.steps[s].types);
        all.into_iter().all(|ty| ty.dtype == DataType::Float16)
    }

    /// The value needs no rounding to fp16.
    fn is_rounded(&self, place: ValueRef) -> bool {
        match place {
            ValueRef::Buffer(b) => self.types[b] == DataType::Float16,
            ValueRef::Constant(c) => {
                let values = self.g.constants[c].as_f32().unwrap_or_default();
                values.iter().all(|v| v.is_nan() || to_f16(*v) == *v)
            }
            ValueRef::State(_) => true,
        }
    }

    /// The step's result is rounded, and an operand that it takes over is not.
    fn moves_unrounded(&self) -> bool {
        let step = &self.g.steps[self.step];
        let InstrKind::Kernel { inputs, values, .. } = &step.work else { return false };
        let operands = inputs.iter().map(|o| &o.place).chain(values);
        self.round
            && step.types.iter().any(|ty| ty.dtype == DataType::Float16)
            && operands.copied().any(|p| self.is_float(p) && !self.is_rounded(p))
    }

    fn place(&self, place: ValueRef) -> Option<View> {
        match place {
            ValueRef::Buffer(b) => self.views[b].clone(),
            ValueRef::Constant(c) => Some(View::dense(Base::Constant(c), &self.g.constants[c].shape)),
            ValueRef::State(s) => Some(View::dense(Base::State(s), &self.states[s])),
        }
    }

    fn is_float(&self, place: ValueRef) -> bool {
        match place {
            ValueRef::Buffer(b) => self.types[b].is_float(),
            ValueRef::Constant(c) => matches!(self.g.constants[c].data, Data::F32(_)),
            ValueRef::State(_) => true,
        }
    }

    /// A float operand that is not a state.
    fn float(&mut self, place: ValueRef) -> Option<View> {
        let view = self.place(place).filter(|_| self.is_float(place))?;
        Some(self.out_of_state(view))
    }

    fn argument(&mut self, name: &str) -> Option<View> {
        let place = self.g.steps[self.step].argument(name)?;
        self.float(place)
    }

    /// The shape and buffer of the step's only result.
    fn result(&self) -> Option<(usize, Vec<usize>)> {
        let step = &self.g.steps[self.step];
        let &[b] = step.writes().as_slice() else { return None };
        Some((b, self.g.shapes[b].clone()))
    }

    /// A new buffer whose elements lie in the order of dimensions `order`, outermost first.
    fn allocate(&mut self, shape: &[usize], order: &[usize]) -> View {
        let mut strides = vec![0; shape.len()];
        let mut n = 1;
        for &d in order.iter().rev() {
            strides[d] = n;
            n *= shape[d].max(1);
        }
        self.sizes.push(shape.iter().product());
        View { base: Base::Buffer(self.sizes.len() - 1), offset: 0, shape: shape.to_vec(), strides }
    }

    fn allocate_dense(&mut self, shape: &[usize]) -> View {
        self.allocate(shape, &(0..shape.len()).collect::<Vec<_>>())
    }

    /// A copy with `last` as the innermost dimension.
    fn copied(&mut self, view: &View, order: &[usize]) -> View {
        let out = self.allocate(&view.shape, order);
        let nest = StridedLoops::new(&view.shape, [&out.strides, &view.strides], [0, view.offset]);
        let to = buffer_of(&out);
        self.push(NodeKind::Copy { nest, x: view.base, out: to, fill: None });
        out
    }

    fn out_of_state(&mut self, view: View) -> View {
        if !matches!(view.base, Base::State(_)) {
            return view;
        }
        let copy = self.copied(&view, &(0..view.rank()).collect::<Vec<_>>());
        self.replace(&view, &copy);
        copy
    }

    /// Later readers of the same elements take the copy.
    fn replace(&mut self, view: &View, copy: &View) {
        for v in self.views.iter_mut().flatten() {
            if v == view {
                *v = copy.clone();
            }
        }
    }

    /// The view, or a copy of it, in which the elements along `axis` lie together.
    fn make_contiguous(&mut self, view: View, axis: usize) -> View {
        let view = self.out_of_state(view);
        if view.shape[axis] == 1 || view.strides[axis] == 1 {
            return view;
        }
        let order: Vec<usize> = (0..view.rank()).filter(|&d| d != axis).chain([axis]).collect();
        let copy = self.copied(&view, &order);
        self.replace(&view, &copy);
        copy
    }

    /// Dimensions by stride, the largest first.
    fn order(view: &View) -> Vec<usize> {
        let mut order: Vec<usize> = (0..view.rank()).collect();
        order.sort_by_key(|&d| std::cmp::Reverse((view.shape[d] == 1, view.strides[d])));
        order
    }

    fn define(&mut self, view: View) -> Option<()> {
        let (b, shape) = self.result()?;
        (view.shape == shape).then(|| self.views[b] = Some(view))
    }

    fn fused(&mut self, f: &Fused) -> Option<()> {
        match f {
            Fused::Norm { x, axis, norm, weight } => {
                let view = self.float(*x)?;
                let x = self.make_contiguous(view, *axis);
                let mut order = Self::order(&x);
                order.retain(|d| d != axis);
                order.push(*axis);
                let out = self.allocate(&x.shape, &order);
                let mut rows = x.shape.clone();
                rows[*axis] = 1;
                let weight = weight.map(|w| self.place(w).map(|v| v.base));
                let work = NodeKind::Norm {
                    rows: StridedLoops::new(&rows, [&out.strides, &x.strides], [0, x.offset]),
                    n: x.shape[*axis],
                    x: x.base,
                    weight: match weight {
                        Some(w) => Some(w?),
                        None => None,
                    },
                    norm: *norm,
                    out: buffer_of(&out),
                };
                self.push(work);
                self.define(out)
            }
            Fused::Rotate { x, cos, sin, half } => {
                let view = self.float(*x)?;
                let last = view.rank().checked_sub(1)?;
                let x = self.make_contiguous(view, last);
                let (cos, sin) = (self.float(*cos)?, self.float(*sin)?);
                let (cos, sin) = (self.make_contiguous(cos, last), self.make_contiguous(sin, last));
                let mut order = Self::order(&x);
                order.retain(|d| *d != last);
                order.push(last);
                let out = self.allocate(&x.shape, &order);
                let n = x.shape[last];
                if cos.shape.last() != Some(&n) || sin.shape.last() != Some(&n) {
                    return None;
                }
                let (c, s) = (cos.broadcast(&x.shape)?, sin.broadcast(&x.shape)?);
                let mut rows = x.shape.clone();
                rows[last] = 1;
                let start = [0, x.offset, cos.offset, sin.offset];
                let rows = StridedLoops::new(&rows, [&out.strides, &x.strides, &c, &s], start);
                let (half, to) = (*half, buffer_of(&out));
                self.push(NodeKind::Rotate {
                    rows,
                    half,
                    n,
                    x: x.base,
                    cos: cos.base,
                    sin: sin.base,
                    out: to,
                });
                self.define(out)
            }
            Fused::Gated { gate, up, kind } => {
                let (gate, up) = (self.float(*gate)?, self.float(*up)?);
                let axis = *Self::order(&gate).last()?;
                let (gate, up) = (self.make_contiguous(gate, axis), self.make_contiguous(up, axis));
                let mut order = Self::order(&gate);
                order.retain(|d| *d != axis);
                order.push(axis);
                let out = self.allocate(&gate.shape, &order);
                let mut rows = gate.shape.clone();
                rows[axis] = 1;
                let nest = StridedLoops::new(
                    &rows,
                    [&out.strides, &gate.strides, &up.strides],
                    [0, gate.offset, up.offset],
                );
                let (n, to) = (gate.shape[axis], buffer_of(&out));
                self.push(NodeKind::Gated {
                    rows: nest,
                    n,
                    gate: gate.base,
                    up: up.base,
                    kind: *kind,
                    out: to,
                });
                self.define(out)
            }
            Fused::Experts { branches } => self.experts(branches),
            Fused::Attention { q, k, v, mask, kv_heads } => self.attention((*q, *k, *v, *mask), *kv_heads),
            Fused::Update { state, new, keep, place, tail, slots } => {
                let (new, keep, place) = (self.float(*new)?, self.float(*keep)?, self.float(*place)?);
                let tail = match tail {
                    Some(t) => Some(self.float(*t)?),
                    None => None,
                };
                self.before_write(*state);
                let before = self.nodes.iter().rev().find_map(|node| match &node.work {
                    NodeKind::Update { new: other, keep: k, place: p, .. } => {
                        Some(other.shape[2] == new.shape[2] && (k, p) == (&keep, &place))
                    }
                    _ => None,
                });
                let as_before = before.unwrap_or(false);
                let (state, slots) = (*state, *slots);
                let work = NodeKind::Update { state, new, keep, place, tail, slots, as_before };
                self.push(work);
                Some(())
            }
        }
    }

    /// Values that are still a view of the state, and are read behind the write, are copied before it.
    fn before_write(&mut self, state: usize) {
        for b in 0..self.views.len() {
            let Some(view) = self.views[b].clone() else { continue };
            let later = self.g.readers[b].iter().any(|&r| r > self.step);
            if view.base == Base::State(state) && later {
                self.out_of_state(view);
            }
        }
    }

    fn weight_of(&self, step: usize) -> Option<Arc<StoredWeight>> {
        match &self.g.steps[step].work {
            InstrKind::Project { projection: Projection::Conv(conv), .. } => Some(conv.weight().clone()),
            InstrKind::Project { projection: Projection::Linear { weight, .. }, .. } => Some(weight.clone()),
            _ => None,
        }
    }

    fn experts(&mut self, branches: &[super::patterns::Branch]) -> Option<()> {
        let view = self.float(branches.first()?.x)?;
        // As it is, so that what only adds up experts reads its input itself, see `add_experts`.
        let x = self.out_of_state(view);
        let &[1, channels, 1, tokens] = x.shape.as_slice() else { return None };
        let (_, shape) = self.result()?;
        let mut all = Vec::new();
        for b in branches {
            let part = |b: &Self, step, place, of| WeightRows::new(b.weight_of(step)?, place, of);
            let (gate_up, down) = (part(self, b.gate_up, b.place, b.of)?, part(self, b.down, b.place, b.of)?);
            let weight = self.float(b.weight)?;
            if weight.shape != [1, b.of, 1, tokens] {
                return None;
            }
            let weight = weight.sliced(1, b.place, 1);
            let (wide, narrow) = (gate_up.matrix(), down.matrix());
            let fits = wide.cols() == channels
                && wide.rows() == 2 * narrow.cols()
                && shape == [1, narrow.rows(), 1, tokens];
            if !fits {
                return None;
            }
            all.push(Branch { gate_up, down, weight, kind: b.kind });
        }
        let out = self.allocate(&shape, &[0, 2, 3, 1]);
        self.push(NodeKind::Experts(Box::new(Experts::new(x, all, tokens, shape[1], buffer_of(&out)))));
        self.define(out)
    }

    fn attention(
        &mut self,
        (q, k, v, mask): (ValueRef, ValueRef, ValueRef, ValueRef),
        kv_heads: usize,
    ) -> Option<()> {
        let (_, shape) = self.result()?;
        let &[1, heads, tokens, head_dim] = shape.as_slice() else { return None };
        let view = self.float(q)?;
        let q = self.make_contiguous(view, 3);
        let cache = |b: &mut Self, place| {
            let v = b.place(place).filter(|_| b.is_float(place))?;
            Some(if v.strides[3] == 1 || v.shape[3] == 1 { v } else { b.make_contiguous(v, 3) })
        };
        let (k, v) = (cache(self, k)?, cache(self, v)?);
        let mut view = self.float(mask)?;
        if view.shape[1] == k.shape[2] && view.shape[2] == 1 {
            // Slots on the channel axis.
            for order in [&mut view.shape, &mut view.strides] {
                *order = vec![order[0], order[2], order[3], order[1]];
            }
        }
        let mask = self.make_contiguous(view, 3);
        let out = self.allocate(&shape, &[0, 2, 1, 3]);
        let slots = k.shape[2];
        let at = |v: &View| HeadStrides { first: v.offset, head: v.strides[1], token: v.strides[2] };
        let work = NodeKind::Attention {
            shape: AttentionShape { heads, kv_heads, tokens, head_dim, slots },
            q: (q.base, at(&q)),
            k,
            v,
            mask: (mask.clone(), mask.strides[2]),
            out: (buffer_of(&out), at(&out)),
        };
        self.push(work);
        self.define(out)
    }

    fn single(&mut self) -> Option<()> {
        let step = &self.g.steps[self.step];
        match &step.work {
            InstrKind::Cond { .. } | InstrKind::While { .. } | InstrKind::Call { .. } => None,
            InstrKind::Copy { from, .. } => {
                let view = self.place(*from)?;
                let copy = self.out_of_state(view);
                self.define(copy)
            }
            InstrKind::WriteState { state, data } => {
                let (state, data) = (*state, *data);
                if data == ValueRef::State(state) {
                    return Some(());
                }
                let x = self.float(data)?;
                self.before_write(state);
                let shape = self.states[state].clone();
                let nest = StridedLoops::new(&shape, [&dense_strides(&shape), &x.strides], [0, x.offset]);
                if x.shape != shape {
                    return None;
                }
                self.push(NodeKind::WriteState { state, nest, x: x.base });
                Some(())
            }
            InstrKind::Project { projection, x, bias, .. } => self.project(projection, *x, *bias),
            InstrKind::Kernel { .. } => match self.native() {
                Some(()) => Some(()),
                None => self.kernel(),
            },
        }
    }

    fn project(&mut self, projection: &Projection, x: ValueRef, bias: Option<ValueRef>) -> Option<()> {
        let x = self.float(x)?;
        match projection {
            Projection::Conv(conv) if conv.is_matmul() => {
                let weight = conv.weight().clone();
                let bias = self.bias(bias, weight.rows())?;
                self.tokenwise(x, weight, bias, (1, 1))
            }
            Projection::Conv(conv) => {
                let (window, expected) = conv.over(&x.shape).ok()?;
                let (_, shape) = self.result()?;
                if expected != shape {
                    return None;
                }
                let bias = self.bias(bias, shape[1])?;
                let x = if conv.wants_channels_last() { self.make_contiguous(x, 1) } else { x };
                let order: Vec<usize> = (0..shape.len()).filter(|&d| d != 1).chain([1]).collect();
                let out = self.allocate(&shape, &order);
                let (conv, to) = (conv.clone(), buffer_of(&out));
                self.push_result(NodeKind::Conv { conv, window, x, bias, out: to }, to);
                self.define(out)
            }
            Projection::Linear { weight, input, output } => {
                let axes = (x.rank().checked_sub(*input)?, x.rank().checked_sub(*output)?);
                let bias = self.bias(bias, weight.rows())?;
                self.tokenwise(x, weight.clone(), bias, axes)
            }
        }
    }

    /// Place of a bias of `rows` elements; `Some(None)` where there is no bias, `None` where it does not fit.
    fn bias(&mut self, bias: Option<ValueRef>, rows: usize) -> Option<Option<Base>> {
        let Some(bias) = bias else { return Some(None) };
        let v = self.float(bias)?;
        (v.len() == rows && v.is_dense() && v.offset == 0).then_some(Some(v.base))
    }

    /// A matmul of every token of x, whose channels are on one axis, and those of the result on another.
    fn tokenwise(
        &mut self,
        x: View,
        weight: Arc<StoredWeight>,
        bias: Option<Base>,
        (axis, to_axis): (usize, usize),
    ) -> Option<()> {
        let (_, shape) = self.result()?;
        let (rank, rows, cols) = (x.rank(), weight.rows(), weight.cols());
        if x.shape.get(axis) != Some(&cols) {
            return None;
        }
        let view = self.make_contiguous(x, axis);
        // All dimensions but the channels', as one.
        let others: Vec<usize> = (0..rank).filter(|&d| d != axis).collect();
        let tokens_view = view.transposed(&others.iter().copied().chain([axis]).collect::<Vec<_>>());
        let tokens: usize = tokens_view.shape[..rank - 1].iter().product();
        let flattened = match tokens_view.reshaped(&[tokens, cols]) {
            Some(v) => v,
            None => {
                let copy = self.copied(&tokens_view, &(0..rank).collect::<Vec<_>>());
                copy.reshaped(&[tokens, cols])?
            }
        };
        let dense: Vec<usize> = others.iter().map(|&d| view.shape[d]).chain([rows]).collect();
        let mut perm: Vec<usize> = (0..rank - 1).collect();
        perm.insert(to_axis, rank - 1);
        let out = self.allocate_dense(&dense);
        let result = out.transposed(&perm);
        if result.shape != shape {
            return None;
        }
        self.add_product(flattened, tokens, weight, bias, buffer_of(&out))?;
        self.define(result)
    }

    fn new_panel(&mut self) -> usize {
        self.panels += 1;
        self.panels - 1
    }

    /// Adds a product of `x` `[tokens, channels]` to the node of earlier products of `x`, or to a new one.
    fn add_product(
        &mut self,
        x: View,
        tokens: usize,
        weight: Arc<StoredWeight>,
        bias: Option<Base>,
        out: usize,
    ) -> Option<()> {
        let (channels, strides) = (x.shape[1], (x.strides[0], x.strides[1]));
        let order = weight.matrix().layout();
        let known = self.products.iter().find(|(v, _, _)| *v == x).map(|(_, node, _)| *node);
        if let Some(node) = known
            && let Some(Node { work: NodeKind::Products { fills, items }, .. }) = self.nodes.get_mut(node)
        {
            let same = items.iter().find(|i| i.weight.matrix().layout() == order).map(|i| i.panel);
            let panel = match same {
                Some(panel) => panel,
                None => {
                    self.panels += 1;
                    let panel = self.panels - 1;
                    fills.push(Fill { panel, x, tokens, channels, strides });
                    panel
                }
            };
            items.push(Item { weight, panel, out, bias });
            self.round_result(node, out);
            return Some(());
        }
        let panel = self.new_panel();
        self.products.push((x.clone(), self.nodes.len(), panel));
        let fills = vec![Fill { panel, x, tokens, channels, strides }];
        self.push_result(NodeKind::Products { fills, items: vec![Item { weight, panel, out, bias }] }, out);
        Some(())
    }

    /// Adds a node that calls the op library.
    fn kernel(&mut self) -> Option<()> {
        let steps = self.g.steps;
        let step = &steps[self.step];
        let InstrKind::Kernel { kernel, inputs, values, outputs } = &step.work else { return None };
        let operand = |b: &mut Self, place: ValueRef| -> Option<KernelOperand> {
            let view = b.place(place)?;
            if matches!(view.base, Base::Tensor(_) | Base::Constant(_) | Base::Input(_))
                && view.offset == 0
                && view.is_dense()
                && b.whole(&view, place)
            {
                return Some(KernelOperand::Whole(view.base));
            }
            if !b.is_float(place) {
                return None;
            }
            let dense = dense_strides(&view.shape);
            let nest = StridedLoops::new(&view.shape, [&dense, &view.strides], [0, view.offset]);
            let shape = view.shape.clone();
            if nest.is_too_deep() {
                return None;
            }
            b.tensors += 1;
            Some(KernelOperand::Copied { nest, x: view.base, shape, copy: b.tensors - 1 })
        };
        let mut bound = Vec::new();
        for input in inputs {
            bound.push((input.param.clone(), operand(self, input.place)?));
        }
        let mut listed = Vec::new();
        for &value in values {
            listed.push(operand(self, value)?);
        }
        let mut tensors = Vec::new();
        for &b in outputs {
            self.tensors += 1;
            tensors.push(self.tensors - 1);
            self.views[b] = Some(View::dense(Base::Tensor(self.tensors - 1), &self.g.shapes[b]));
        }
        self.push(NodeKind::Kernel(Box::new(KernelCall {
            kernel: *kernel,
            op_type: step.op_type.clone(),
            inputs: bound,
            values: listed,
            outputs: tensors,
            types: step.types.clone(),
        })));
        Some(())
    }

    /// The view is all of what it is a view of, under the same shape.
    fn whole(&self, view: &View, place: ValueRef) -> bool {
        match place {
            ValueRef::Constant(_) => true,
            ValueRef::Buffer(b) => {
                let own = match view.base {
                    // Defined by a kernel or an input and not looked at otherwise since.
                    Base::Tensor(_) => self.g.producer[b].is_some_and(|p| {
                        matches!(self.g.steps[p].work, InstrKind::Kernel { .. })
                            && !matches!(
                                self.g.steps[p].op_type.as_str(),
                                "reshape"
                                    | "expand_dims"
                                    | "squeeze"
                                    | "identity"
                                    | "transpose"
                                    | "split"
                                    | "slice_by_size"
                                    | "slice_by_index"
                            )
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

fn buffer_of(view: &View) -> usize {
    match view.base {
        Base::Buffer(b) => b,
        _ => unreachable!("a view of a new buffer"),
    }
}
