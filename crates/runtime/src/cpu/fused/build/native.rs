//! Operations that become views, and operations with loops of their own.

use super::super::super::ir::InstrKind;
use super::super::super::ops::{
    ElementFunction, OpContext, PoolParams, ReductionLoops, binary_loops, element_function, exact_reduction,
    fast_reduction,
};
use super::super::super::strided::StridedLoops;
use super::super::nodes::{Computation, NodeKind, Then};
use super::super::view::{Base, View};
use super::plan_builder::{PlanBuilder, buffer_of, order_ending};
use crate::tensor::Tensor;
use anemoe_kernels::PairFunction;

/// Tells whether the result of an op may be a view of its operand.
#[rustfmt::skip]
pub(super) fn is_view(op: &str) -> bool {
    matches!(op,
        "reshape" | "expand_dims" | "squeeze" | "identity" | "transpose" | "split" | "slice_by_size" | "slice_by_index")
}

impl PlanBuilder<'_> {
    /// Defines the step's result as a view, or adds a node with loops of its own; none where the op library has to compute it.
    pub(super) fn native(&mut self) -> Option<()> {
        let step = &self.g.instructions[self.step];
        let op = step.op_type.clone();
        match op.as_str() {
            // Rounded results need the op library's order of sums and its functions.
            "softmax" if self.round => None,
            "matmul" if self.round && self.g.flag(step.argument("transpose_y"), false)? => None,
            moves if (is_view(moves) || matches!(moves, "concat" | "pad")) && self.moves_unrounded() => None,
            "reshape" | "expand_dims" | "squeeze" | "identity" => {
                let x = self.argument("x")?;
                let (_, shape) = self.result()?;
                let view = self.reshaped(&x, &shape)?;
                self.define(view)
            }
            "transpose" => {
                let x = self.view_argument("x")?;
                let perm = self.g.ints(step.argument("perm"))?;
                let perm: Option<Vec<usize>> = perm.iter().map(|&p| self.g.axis(p, x.rank())).collect();
                let perm = perm.filter(|p| p.len() == x.rank())?;
                self.define(x.transposed(&perm))
            }
            "split" => self.split(),
            "slice_by_size" | "slice_by_index" => self.slice(&op),
            "concat" => self.concat(),
            "pad" => self.pad(),
            "matmul" => self.matmul(),
            "softmax" => self.softmax(),
            "avg_pool" | "max_pool" | "l2_pool" => self.pool(),
            _ if exact_reduction(&op).is_some() => self.reduce(&op),
            _ if binary_loops(&op).is_some() => self.binary(&op),
            _ => self.unary(),
        }
    }

    /// Returns a float operand as a view, which may be a view of a state.
    fn view_argument(&self, name: &str) -> Option<View> {
        let place = self.g.instructions[self.step].argument(name)?;
        self.place(place).filter(|_| self.is_float(place))
    }

    fn split(&mut self) -> Option<()> {
        let step = &self.g.instructions[self.step];
        let x = self.view_argument("x")?;
        let axis = self.g.axis(*self.g.ints(step.argument("axis"))?.first()?, x.rank())?;
        let mut begin = 0;
        for b in step.writes() {
            let shape = &self.g.shapes[b];
            let size = *shape.get(axis)?;
            if begin + size > x.shape[axis] {
                return None;
            }
            let part = x.sliced(axis, begin, size);
            if part.shape != *shape {
                return None;
            }
            self.views[b] = Some(part);
            begin += size;
        }
        (begin == x.shape[axis]).then_some(())
    }

    fn slice(&mut self, op: &str) -> Option<()> {
        let step = &self.g.instructions[self.step];
        let x = self.view_argument("x")?;
        let (_, shape) = self.result()?;
        let begin = self.g.ints(step.argument("begin"))?.to_vec();
        let mut squeezed = vec![false; x.rank()];
        if op == "slice_by_index" {
            let unit = |v: Option<&[i32]>| v.is_none_or(|v| v.iter().all(|&s| s == 1));
            let stride = step.argument("stride");
            if (stride.is_some() && self.g.ints(stride).is_none()) || !unit(self.g.ints(stride)) {
                return None;
            }
            if let Some(place) = step.argument("squeeze_mask") {
                squeezed = self.g.constant(place)?.as_bool()?.to_vec();
            }
        }
        if begin.len() != x.rank() || squeezed.len() != x.rank() {
            return None;
        }
        let mut kept = shape.iter();
        let mut sizes = Vec::new();
        for squeezed in &squeezed {
            sizes.push(if *squeezed { 1 } else { *kept.next()? });
        }
        if kept.next().is_some() {
            return None;
        }
        let masked: Vec<bool> = match step.argument("begin_mask") {
            Some(place) if op == "slice_by_index" => self.g.constant(place)?.as_bool()?.to_vec(),
            _ => vec![false; x.rank()],
        };
        let mut view = x.clone();
        for d in 0..x.rank() {
            let start = match (masked.get(d), begin[d]) {
                (Some(true), _) => 0,
                (_, b) if b < 0 => usize::try_from(i64::from(b) + x.shape[d] as i64).ok()?,
                (_, b) => b as usize,
            };
            if start + sizes[d] > x.shape[d] {
                return None;
            }
            view = view.sliced(d, start, sizes[d]);
        }
        for d in (0..x.rank()).rev().filter(|d| squeezed[*d]) {
            view.shape.remove(d);
            view.strides.remove(d);
        }
        // A view of a state is copied before a later write.
        self.define(view)
    }

    fn concat(&mut self) -> Option<()> {
        let step = &self.g.instructions[self.step];
        let (_, shape) = self.result()?;
        let axis = self.g.axis(*self.g.ints(step.argument("axis"))?.first()?, shape.len())?;
        if self.g.flag(step.argument("interleave"), false)? {
            return None;
        }
        let values = step.values().to_vec();
        let parts: Option<Vec<View>> = values.into_iter().map(|p| self.float(p)).collect();
        let parts = parts?;
        let total: usize = parts.iter().filter_map(|p| p.shape.get(axis)).sum();
        let fits = |p: &View| {
            p.rank() == shape.len() && (0..shape.len()).all(|d| d == axis || p.shape[d] == shape[d])
        };
        if total != shape[axis] || !parts.iter().all(fits) {
            return None;
        }
        let order = parts.iter().max_by_key(|p| p.len()).map(Self::order)?;
        let out = self.allocate(&shape, &order);
        let mut begin = 0;
        for part in &parts {
            let to = out.sliced(axis, begin, part.shape[axis]);
            let loops =
                StridedLoops::new(&part.shape, [&to.strides, &part.strides], [to.offset, part.offset]);
            let copy = Computation::Copy { loops, x: part.base, fill: None };
            self.push(NodeKind::Compute(copy, buffer_of(&out)));
            begin += part.shape[axis];
        }
        self.define(out)
    }

    fn pad(&mut self) -> Option<()> {
        let step = &self.g.instructions[self.step];
        let x = self.argument("x")?;
        if self.g.text(step.argument("mode"), "constant")? != "constant" {
            return None;
        }
        let pad = self.g.ints(step.argument("pad"))?.to_vec();
        let value = match step.argument("constant_val") {
            None => 0.0,
            Some(place) => *self.g.constant(place)?.as_f32()?.first()?,
        };
        let (_, shape) = self.result()?;
        let first = x.rank().checked_sub(pad.len() / 2)?;
        if pad.len() % 2 != 0 || pad.iter().any(|&p| p < 0) {
            return None;
        }
        let out = self.allocate_dense(&shape);
        let mut to = out.clone();
        for d in 0..x.rank() {
            let (before, after) = match d.checked_sub(first) {
                None => (0, 0),
                Some(i) => (pad[2 * i] as usize, pad[2 * i + 1] as usize),
            };
            if shape.get(d) != Some(&(x.shape[d] + before + after)) {
                return None;
            }
            to = to.sliced(d, before, x.shape[d]);
        }
        let loops = StridedLoops::new(&x.shape, [&to.strides, &x.strides], [to.offset, x.offset]);
        self.compute(Computation::Copy { loops, x: x.base, fill: Some((value, out.len())) }, out)
    }

    fn matmul(&mut self) -> Option<()> {
        let step = &self.g.instructions[self.step];
        let (tx, ty) = (step.argument("transpose_x"), step.argument("transpose_y"));
        let (mut x, mut y) = (self.argument("x")?, self.argument("y")?);
        let (_, shape) = self.result()?;
        let rank = shape.len();
        if rank < 2 || x.rank() < 2 || y.rank() < 2 {
            return None;
        }
        let swap_last_axes = |v: &View| {
            let mut perm: Vec<usize> = (0..v.rank()).collect();
            perm.swap(v.rank() - 1, v.rank() - 2);
            v.transposed(&perm)
        };
        if self.g.flag(tx, false)? {
            x = swap_last_axes(&x);
        }
        if self.g.flag(ty, false)? {
            y = swap_last_axes(&y);
        }
        let (x_last, y_last) = (x.rank() - 1, y.rank() - 1);
        let x = self.make_contiguous(x, x_last);
        let y =
            if y.strides[y_last - 1] == 1 { self.out_of_state(y) } else { self.make_contiguous(y, y_last) };
        let (m, k, n) = (x.shape[x_last - 1], x.shape[x_last], y.shape[y_last]);
        if y.shape[y_last - 1] != k || shape[rank - 1] != n || shape[rank - 2] != m || k == 0 || n == 0 {
            return None;
        }
        let (x_stride, y_strides) = (x.strides[x_last - 1], [y.strides[y_last - 1], y.strides[y_last]]);
        let out = self.allocate_dense(&shape);
        let mut batch = shape.clone();
        batch[rank - 2..].fill(1);
        let first = |v: &View| {
            let mut v = v.clone();
            let last = v.rank() - 2;
            v.shape[last..].fill(1);
            v.broadcast(&batch)
        };
        let (xs, ys) = (first(&x)?, first(&y)?);
        let loops = StridedLoops::new(&batch, [&out.strides, &xs, &ys], [0, x.offset, y.offset]);
        let mut places = Vec::new();
        loops.each_element(|place| places.push(place));
        places.sort_unstable();
        let (x, y) = (x.base, y.base);
        self.compute_result(Computation::MatMul { places, sizes: [m, k, n], x_stride, y_strides, x, y }, out)
    }

    /// Returns the step's parameters apart from `x`, and a text of them; none where one is not a constant of one element.
    fn parameters(&self) -> Option<(Vec<(&str, &Tensor)>, String)> {
        let step = &self.g.instructions[self.step];
        let InstrKind::Op { inputs, .. } = &step.work else { return None };
        let (mut bound, mut text) = (Vec::new(), step.op_type.clone());
        for input in inputs.iter().filter(|input| input.param != "x") {
            let value = self.g.constant(input.place)?;
            bound.push((input.param.as_str(), value));
            if value.len() == 1 {
                text += &format!(" {} {:?}", input.param, value.data);
            }
        }
        Some((bound, text))
    }

    fn pool(&mut self) -> Option<()> {
        let x = self.argument("x")?;
        let op = self.g.instructions[self.step].op_type.as_str();
        let (inputs, _) = self.parameters()?;
        let c = OpContext { op, inputs: &inputs, values: &[], outputs: &[] };
        let spatial = x.shape.get(2..).filter(|s| (1..=3).contains(&s.len()))?.to_vec();
        let params = PoolParams::new(&c, spatial.len()).ok()?;
        let (window, sizes) = params.over(&spatial).ok()?;
        let (_, shape) = self.result()?;
        if shape[..2] != x.shape[..2] || shape[2..] != sizes || shape.contains(&0) {
            return None;
        }
        let x = self.make_contiguous(x, 1);
        let out = self.allocate(&shape, &order_ending(shape.len(), 1));
        let counts = params.counts(&window, &spatial);
        self.compute_result(Computation::Pool { function: params.function, window, counts, x }, out)
    }

    fn softmax(&mut self) -> Option<()> {
        let step = &self.g.instructions[self.step];
        let axis = match step.argument("axis") {
            None => -1,
            place => *self.g.ints(place)?.first()?,
        };
        let x = self.argument("x")?;
        let axis = self.g.axis(axis, x.rank())?;
        let (out, rows) = self.rows_like(&x, axis);
        let rows = StridedLoops::new(&rows, [&out.strides, &x.strides], [0, x.offset]);
        let (n, step) = (x.shape[axis], x.strides[axis]);
        self.compute(Computation::Softmax { rows, n, step, x: x.base }, out)
    }

    fn reduce(&mut self, op: &str) -> Option<()> {
        let step = &self.g.instructions[self.step];
        let axes = step.argument("axes");
        let keep = self.g.flag(step.argument("keep_dims"), false)?;
        let x = self.argument("x")?;
        let axes: Vec<usize> = match axes {
            None => (0..x.rank()).collect(),
            place => self.g.ints(place)?.iter().map(|&a| self.g.axis(a, x.rank())).collect::<Option<_>>()?,
        };
        let (_, shape) = self.result()?;
        let reduced: Vec<bool> = (0..x.rank()).map(|d| axes.contains(&d)).collect();
        let kept: Vec<usize> = (0..x.rank()).map(|d| if reduced[d] { 1 } else { x.shape[d] }).collect();
        let out = self.allocate(&kept, &Self::order(&x));
        if x.len() == 0 {
            return None;
        }
        let loops = ReductionLoops::new(&x.shape, &reduced, &out.strides, (&x.strides, x.offset));
        let fast = fast_reduction(op).filter(|_| !self.round);
        let f = fast.or_else(|| exact_reduction(op))?;
        let view = if keep { out } else { out.reshaped(&shape)? };
        self.compute_result(Computation::Reduce { f, loops, x: x.base }, view)
    }

    fn binary(&mut self, op: &str) -> Option<()> {
        let f = binary_loops(op)?;
        if self.pair_after_conv(op).is_some() {
            return Some(());
        }
        let (x, y) = (self.argument("x")?, self.argument("y")?);
        let (_, shape) = self.result()?;
        let (xs, ys) = (x.broadcast(&shape)?, y.broadcast(&shape)?);
        let model = [&x, &y].into_iter().find(|v| v.shape == shape && !matches!(v.base, Base::Constant(_)));
        let model = model.or_else(|| [&x, &y].into_iter().find(|v| v.shape == shape));
        let out = match model {
            Some(v) => self.allocate(&shape, &Self::order(v)),
            None => self.allocate_dense(&shape),
        };
        let broadcast = (0..shape.len()).all(|d| {
            let at = |v: &View| (d + v.rank()).checked_sub(shape.len()).map_or(1, |i| v.shape[i]);
            shape[d] == at(&x).max(at(&y)) || shape[d] == 0
        });
        let loops = StridedLoops::new(&shape, [&out.strides, &xs, &ys], [0, x.offset, y.offset]);
        if !broadcast {
            return None;
        }
        self.compute_result(Computation::Binary { f, loops, x: x.base, y: y.base }, out)
    }

    /// Adds the operation to the convolution that computes one of its operands, if the other one is known before it.
    fn pair_after_conv(&mut self, op: &str) -> Option<()> {
        let f = match op {
            "add" => PairFunction::Add,
            "sub" => PairFunction::Sub,
            "mul" => PairFunction::Mul,
            "real_div" => PairFunction::Div,
            _ => return None,
        };
        let step = &self.g.instructions[self.step];
        let (x, y) = (step.argument("x")?, step.argument("y")?);
        let (_, shape) = self.result()?;
        let orders = if matches!(op, "add" | "mul") { &[(x, y), (y, x)][..] } else { &[(x, y)] };
        for &(own, other) in orders {
            let Some((conv, view)) = self.conv_of(own) else { continue };
            let Some(other) = self.place(other).filter(|_| self.is_float(other)) else { continue };
            let is_before = match other.base {
                Base::Constant(_) | Base::Input(_) => true,
                Base::Buffer(b) => self.writer(b).is_some_and(|writer| writer < self.convs[conv].0),
                Base::Tensor(_) | Base::State(_) => false,
            };
            let Some(strides) = other.broadcast(&shape).filter(|_| is_before && view.shape == shape) else {
                continue;
            };
            let along = |expected: &dyn Fn(usize) -> usize| {
                (0..shape.len()).all(|d| shape[d] == 1 || strides[d] == expected(d))
            };
            let is_same = along(&|d| view.strides[d]);
            // Channels lie together.
            let by_channel = !is_same && along(&|d| usize::from(view.strides[d] == 1));
            let has_channels = (0..shape.len()).any(|d| shape[d] > 1 && view.strides[d] == 1);
            if is_same || by_channel && has_channels && self.channels_of(conv) > 1 {
                let then = Then::Pair { f, with: other.base, offset: other.offset, by_channel };
                return self.push_then((conv, view), then, false);
            }
        }
        None
    }

    fn unary(&mut self) -> Option<()> {
        let step = &self.g.instructions[self.step];
        let place = step.argument("x").filter(|x| self.is_float(*x))?;
        let fast = self.g.activation(self.step).filter(|_| !self.round).map(ElementFunction::Activation);
        let f = match fast {
            Some(f) => f,
            None => {
                let (inputs, text) = self.parameters()?;
                let c = OpContext { op: &step.op_type, inputs: &inputs, values: &[], outputs: &[] };
                let f = element_function(&c).ok()?;
                if self.rounds_result() && self.is_rounded(place) { f.rounded(&text) } else { f }
            }
        };
        let is_rounded = self.is_rounded(place) && f.keeps_halves();
        if let Some(conv) = self.conv_of(place) {
            return self.push_then(conv, Then::Map(f), is_rounded);
        }
        let x = self.argument("x")?;
        let out = self.allocate(&x.shape, &Self::order(&x));
        let loops = StridedLoops::new(&x.shape, [&out.strides, &x.strides], [0, x.offset]);
        let work = Computation::Unary { f, loops, x: x.base, n: out.len() };
        if is_rounded { self.compute(work, out) } else { self.compute_result(work, out) }
    }
}
