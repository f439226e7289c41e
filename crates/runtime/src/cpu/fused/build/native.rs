//! Operations that become views, and operations with loops of their own.

use super::super::super::ir::ValueRef;
use super::super::super::ops::{
    ReductionLoops, binary_loops, exact_reduction, fast_reduction, unary_function,
};
use super::super::super::strided::StridedLoops;
use super::super::nodes::NodeKind;
use super::super::view::{Base, View};
use super::plan_builder::{PlanBuilder, buffer_of};
use crate::tensor::Data;

impl PlanBuilder<'_> {
    /// Defines the step's result as a view, or adds a node with loops of its own; none where the op library has to compute it.
    pub(super) fn native(&mut self) -> Option<()> {
        let step = &self.g.instructions[self.step];
        let op = step.op_type.clone();
        match op.as_str() {
            // Rounded results need the op library's order of sums and its functions.
            "matmul" | "softmax" if self.round => None,
            "reshape" | "expand_dims" | "squeeze" | "identity" | "transpose" | "split" | "slice_by_size"
            | "slice_by_index" | "concat" | "pad"
                if self.moves_unrounded() =>
            {
                None
            }
            "reshape" | "expand_dims" | "squeeze" | "identity" => {
                let x = self.argument("x")?;
                let (_, shape) = self.result()?;
                let view = match x.reshaped(&shape) {
                    Some(v) => v,
                    None if x.len() == shape.iter().product::<usize>() => {
                        self.copied(&x, &(0..x.rank()).collect::<Vec<_>>()).reshaped(&shape)?
                    }
                    None => return None,
                };
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
            "silu" | "gelu" if !self.round => self.activate(),
            _ if exact_reduction(&op).is_some() => self.reduce(&op),
            _ if binary_loops(&op).is_some() => self.binary(&op),
            _ => self.unary(&op),
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
        if begin.len() != x.rank() || shape.len() != x.rank() {
            return None;
        }
        if op == "slice_by_index" {
            let unit = |v: Option<&[i32]>| v.is_none_or(|v| v.iter().all(|&s| s == 1));
            let stride = step.argument("stride");
            if (stride.is_some() && self.g.ints(stride).is_none()) || !unit(self.g.ints(stride)) {
                return None;
            }
            if let Some(place) = step.argument("squeeze_mask") {
                let ValueRef::Constant(c) = place else { return None };
                if self.g.constants[c].as_bool()?.iter().any(|&s| s) {
                    return None;
                }
            }
        }
        let masked: Vec<bool> = match step.argument("begin_mask") {
            Some(ValueRef::Constant(c)) if op == "slice_by_index" => self.g.constants[c].as_bool()?.to_vec(),
            Some(_) if op == "slice_by_index" => return None,
            _ => vec![false; x.rank()],
        };
        let mut view = x.clone();
        for d in 0..x.rank() {
            let start = match (masked.get(d), begin[d]) {
                (Some(true), _) => 0,
                (_, b) if b < 0 => usize::try_from(i64::from(b) + x.shape[d] as i64).ok()?,
                (_, b) => b as usize,
            };
            if start + shape[d] > x.shape[d] {
                return None;
            }
            view = view.sliced(d, start, shape[d]);
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
            self.push(NodeKind::Copy { loops, x: part.base, out: buffer_of(&out), fill: None });
            begin += part.shape[axis];
        }
        self.define(out)
    }

    fn pad(&mut self) -> Option<()> {
        let step = &self.g.instructions[self.step];
        let x = self.argument("x")?;
        let step_mode = step.argument("mode");
        if let Some(ValueRef::Constant(c)) = step_mode {
            let Data::Str(mode) = &self.g.constants[c].data else { return None };
            if mode.first()? != "constant" {
                return None;
            }
        } else if step_mode.is_some() {
            return None;
        }
        let pad = self.g.ints(step.argument("pad"))?.to_vec();
        let value = match step.argument("constant_val") {
            None => 0.0,
            Some(ValueRef::Constant(c)) => *self.g.constants[c].as_f32()?.first()?,
            Some(_) => return None,
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
        self.push(NodeKind::Copy { loops, x: x.base, out: buffer_of(&out), fill: Some((value, out.len())) });
        self.define(out)
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
        let last = y.rank() - 1;
        let y = self.make_contiguous(y, last);
        let (k, n) = (x.shape[x.rank() - 1], y.shape[y.rank() - 1]);
        if y.shape[y.rank() - 2] != k || shape[rank - 1] != n || shape[rank - 2] != x.shape[x.rank() - 2] {
            return None;
        }
        let (xk, yk, yn) = (x.strides[x.rank() - 1], y.strides[y.rank() - 2], y.strides[y.rank() - 1]);
        let out = self.allocate_dense(&shape);
        // Loops over the rows of the result: the node computes y's columns and sums over y's rows.
        let mut rows = shape.clone();
        rows[rank - 1] = 1;
        let (mut xv, mut yv) = (x.clone(), y.clone());
        let (x_last, y_last) = (x.rank() - 1, y.rank() - 1);
        xv.shape[x_last] = 1;
        (yv.shape[y_last], yv.shape[y_last - 1]) = (1, 1);
        let (xs, ys) = (xv.broadcast(&rows)?, yv.broadcast(&rows)?);
        let loops = StridedLoops::new(&rows, [&out.strides, &xs, &ys], [0, x.offset, y.offset]);
        let to = buffer_of(&out);
        if k == 0 || n == 0 {
            return None;
        }
        self.push(NodeKind::MatMul {
            rows: loops,
            sizes: (k, n),
            strides: (xk, yk, yn),
            x: x.base,
            y: y.base,
            out: to,
        });
        self.define(out)
    }

    fn softmax(&mut self) -> Option<()> {
        let step = &self.g.instructions[self.step];
        let axis = match step.argument("axis") {
            None => -1,
            place => *self.g.ints(place)?.first()?,
        };
        let x = self.argument("x")?;
        let axis = self.g.axis(axis, x.rank())?;
        let mut order = Self::order(&x);
        order.retain(|d| *d != axis);
        order.push(axis);
        let out = self.allocate(&x.shape, &order);
        let mut rows = x.shape.clone();
        rows[axis] = 1;
        let loops = StridedLoops::new(&rows, [&out.strides, &x.strides], [0, x.offset]);
        let (n, to) = (x.shape[axis], buffer_of(&out));
        self.push(NodeKind::Softmax { rows: loops, n, step: x.strides[axis], x: x.base, out: to });
        self.define(out)
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
        let to = buffer_of(&out);
        self.push_result(NodeKind::Reduce { f, loops, x: x.base, out: to }, to);
        let view = if keep { out } else { out.reshaped(&shape)? };
        self.define(view)
    }

    fn binary(&mut self, op: &str) -> Option<()> {
        let f = binary_loops(op)?;
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
        let to = buffer_of(&out);
        self.push_result(NodeKind::Binary { f, loops, x: x.base, y: y.base, out: to }, to);
        self.define(out)
    }

    fn unary(&mut self, op: &str) -> Option<()> {
        let f = unary_function(op)?;
        let x = self.argument("x")?;
        let out = self.allocate(&x.shape, &Self::order(&x));
        let loops = StridedLoops::new(&x.shape, [&out.strides, &x.strides], [0, x.offset]);
        let to = buffer_of(&out);
        self.push_result(NodeKind::Unary { f, loops, x: x.base, out: to }, to);
        self.define(out)
    }

    fn activate(&mut self) -> Option<()> {
        let kind = self.g.activation(self.step)?;
        let x = self.argument("x")?;
        let out = self.allocate(&x.shape, &Self::order(&x));
        let loops = StridedLoops::new(&x.shape, [&out.strides, &x.strides], [0, x.offset]);
        let (to, n) = (buffer_of(&out), out.len());
        self.push(NodeKind::Activate { loops, x: x.base, kind, out: to, n });
        self.define(out)
    }
}
