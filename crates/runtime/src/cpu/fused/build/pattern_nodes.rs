//! Nodes that compute several instructions at once.

use super::super::super::ir::{InstrKind, Projection, ValueRef};
use super::super::super::strided::StridedLoops;
use super::super::super::weights::StoredWeight;
use super::super::experts::{BiasRows, Branch, Experts, WeightRows};
use super::super::nodes::{Computation, NodeKind};
use super::super::patterns::{self, Fused, optional};
use super::super::view::View;
use super::plan_builder::PlanBuilder;
use anemoe_kernels::{AttentionShape, HeadStrides};
use anemoe_mlpackage::mil::DataType;
use std::collections::BTreeMap;
use std::sync::Arc;

impl PlanBuilder<'_> {
    /// Finds groups of instructions that one node computes. Returns the node of each group by its last step, and marks the other instructions.
    pub(super) fn fuse(&self) -> (BTreeMap<usize, Fused>, Vec<bool>) {
        let n = self.g.instructions.len();
        let (mut fused, mut inside) = (BTreeMap::new(), vec![false; n]);
        let mut take = |root: usize, f: Fused, instructions: Vec<usize>, inside: &mut Vec<bool>| {
            // A state that the group reads must not be written before its last step.
            let first = instructions.iter().copied().min().unwrap_or(root);
            let operands = |s: &usize| self.g.instructions[*s].operands();
            let is_read = |state| {
                instructions.iter().chain([&root]).any(|s| operands(s).contains(&ValueRef::State(state)))
            };
            let spoils = |s: usize| match self.g.instructions[s].work {
                InstrKind::WriteState { state, .. } => is_read(state),
                _ => false,
            };
            if instructions.iter().chain([&root]).any(|&s| inside[s]) || (first..root).any(spoils) {
                return;
            }
            instructions.into_iter().for_each(|s| inside[s] = true);
            fused.insert(root, f);
        };
        // Tells whether these instructions may be rounded where one node computes them: every result has type fp16.
        let halves = |root: usize, instructions: &[usize]| {
            let mut all = instructions.iter().chain([&root]).flat_map(|&s| &self.g.instructions[s].types);
            !self.round || all.all(|ty| ty.dtype == DataType::Float16)
        };
        for (root, (f, instructions)) in self.g.experts(self.round) {
            if halves(root, &instructions) {
                take(root, f, instructions, &mut inside);
            }
        }
        for root in 0..n {
            if inside[root] {
                continue;
            }
            let state = match &self.g.instructions[root].work {
                InstrKind::WriteState { state, .. } => self.states[*state].as_slice(),
                _ => &[],
            };
            let update = self.g.update(root, state);
            let attention = || self.g.attention(root).or_else(|| self.g.attention_per_head(root));
            if let Some((f, instructions)) = update.or_else(attention) {
                if halves(root, &instructions) {
                    take(root, f, instructions, &mut inside);
                }
            } else if self.round {
                // The other fused nodes compute without rounding.
            } else if let Some((Fused::Norm { x, axis, norm, .. }, mut instructions)) = self.g.norm(root) {
                let weighted = self.g.weighted(root, axis);
                instructions.extend(weighted.map(|_| root));
                let (last, weight) =
                    weighted.map_or((root, None), |(product, weight)| (product, Some(weight)));
                take(last, Fused::Norm { x, axis, norm, weight }, instructions, &mut inside);
            } else if let Some((Fused::Rotate { x, cos, sin, half, factor }, mut instructions)) =
                self.g.rotate(root)
            {
                let multiplied = self.g.multiplied(root);
                instructions.extend(multiplied.map(|_| root));
                let (last, factor) = multiplied.unwrap_or((root, factor));
                take(last, Fused::Rotate { x, cos, sin, half, factor }, instructions, &mut inside);
            } else if let Some((f, instructions)) = self.g.gated(root) {
                take(root, f, instructions, &mut inside);
            }
        }
        (fused, inside)
    }

    pub(super) fn fused(&mut self, f: &Fused) -> Option<()> {
        match f {
            Fused::Norm { x, axis, norm, weight } => {
                let view = self.float(*x)?;
                let x = self.make_contiguous(view, *axis);
                let (out, rows) = self.rows_like(&x, *axis);
                let weight = optional(*weight, |w| Some(self.place(w)?.base))?;
                let rows = StridedLoops::new(&rows, [&out.strides, &x.strides], [0, x.offset]);
                let (n, norm) = (x.shape[*axis], *norm);
                self.compute(Computation::Norm { rows, n, x: x.base, weight, norm }, out)
            }
            Fused::Rotate { x, cos, sin, half, factor } => {
                let view = self.float(*x)?;
                let last = view.rank().checked_sub(1)?;
                let x = self.make_contiguous(view, last);
                let (cos, sin) = (self.float(*cos)?, self.float(*sin)?);
                let (cos, sin) = (self.make_contiguous(cos, last), self.make_contiguous(sin, last));
                let (out, rows) = self.rows_like(&x, last);
                let n = x.shape[last];
                if cos.shape.last() != Some(&n) || sin.shape.last() != Some(&n) {
                    return None;
                }
                let (c, s) = (cos.broadcast(&x.shape)?, sin.broadcast(&x.shape)?);
                let start = [0, x.offset, cos.offset, sin.offset];
                let rows = StridedLoops::new(&rows, [&out.strides, &x.strides, &c, &s], start);
                let (half, factor, x, cos, sin) = (*half, *factor, x.base, cos.base, sin.base);
                self.compute(Computation::Rotate { rows, half, n, x, cos, sin, factor }, out)
            }
            Fused::Gated { gate, up, function } => {
                let (gate, up) = (self.float(*gate)?, self.float(*up)?);
                let axis = *Self::order(&gate).last()?;
                let (gate, up) = (self.make_contiguous(gate, axis), self.make_contiguous(up, axis));
                let (out, rows) = self.rows_like(&gate, axis);
                let strides = [out.strides.as_slice(), &gate.strides, &up.strides];
                let rows = StridedLoops::new(&rows, strides, [0, gate.offset, up.offset]);
                let (n, gate, up, function) = (gate.shape[axis], gate.base, up.base, *function);
                self.compute(Computation::Gated { rows, n, gate, up, function }, out)
            }
            Fused::Experts { branches } => self.experts(branches),
            Fused::Attention { q, k, v, mask, kv_heads, sinks } => {
                self.attention((*q, *k, *v, *mask), *kv_heads, sinks.clone())
            }
            Fused::Update { state, new, keep, place, tail, slots } => {
                let (new, keep, place) = (self.float(*new)?, self.float(*keep)?, self.float(*place)?);
                let tail = optional(*tail, |tail| self.float(tail))?;
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

    fn weight_of(&self, step: usize) -> Option<Arc<StoredWeight>> {
        match &self.g.instructions[step].work {
            InstrKind::Project { projection: Projection::Conv(conv), .. } => Some(conv.weight.clone()),
            InstrKind::Project { projection: Projection::Linear { weight, .. }, .. } => Some(weight.clone()),
            _ => None,
        }
    }

    /// Returns part `place` of a constant, `rows` elements.
    fn bias_of(&self, bias: ValueRef, place: usize, rows: usize) -> Option<BiasRows> {
        let ValueRef::Constant(constant) = bias else { return None };
        BiasRows::new(self.g.constants[constant].clone(), place, rows)
    }

    fn experts(&mut self, branches: &[patterns::ExpertTerm]) -> Option<()> {
        let view = self.float(branches.first()?.x)?;
        // The input is not made contiguous: packs that are added up have to read the same elements.
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
            let bias = optional(b.bias, |bias| self.bias_of(bias, b.place, wide.rows()))?;
            let down_bias = optional(b.down_bias, |(constant, row)| {
                self.bias_of(ValueRef::Constant(constant), row, narrow.rows())
            })?;
            let fits = wide.cols() == channels
                && wide.rows() == 2 * narrow.cols()
                && shape == [1, narrow.rows(), 1, tokens];
            if !fits {
                return None;
            }
            all.push(Branch { gate_up, bias, down, down_bias, weight, function: b.function });
        }
        let out = self.allocate(&shape, &[0, 2, 3, 1]);
        let experts = Experts { x, branches: all, tokens, rows: shape[1] };
        self.compute(Computation::Experts(Box::new(experts)), out)
    }

    fn attention(
        &mut self,
        (q, k, v, mask): (ValueRef, ValueRef, ValueRef, ValueRef),
        kv_heads: usize,
        sinks: Option<Vec<f32>>,
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
            // The mask has its slots on the channel axis.
            for order in [&mut view.shape, &mut view.strides] {
                *order = vec![order[0], order[2], order[3], order[1]];
            }
        }
        let mask = self.make_contiguous(view, 3);
        let out = self.allocate(&shape, &[0, 2, 1, 3]);
        let slots = k.shape[2];
        let at = |v: &View| HeadStrides { first: v.offset, head: v.strides[1], token: v.strides[2] };
        let work = Computation::Attention {
            shape: AttentionShape { heads, kv_heads, tokens, head_dim, slots },
            q: (q.base, at(&q)),
            k,
            v,
            mask: (mask.clone(), mask.strides[2]),
            sinks,
            out: at(&out),
        };
        self.compute(work, out)
    }
}
