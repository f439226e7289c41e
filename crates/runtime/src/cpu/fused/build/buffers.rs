//! Assigns memory to the values of a plan.

use super::super::super::strided::StridedLoops;
use super::super::nodes::{Computation, Node, NodeKind, OpOperand, Then};
use super::super::view::{Base, View};

/// Assigns the same memory to buffers whose lifetimes do not overlap; returns the sizes in elements.
pub(super) fn assign(
    nodes: &mut [Node],
    sizes: &[usize],
    results: &mut [(StridedLoops<2>, View)],
) -> Vec<usize> {
    let mut last = vec![0; sizes.len()];
    for (i, node) in nodes.iter_mut().enumerate() {
        node.work.each_buffer(&mut |b| last[*b] = i);
    }
    for (_, view) in results.iter() {
        if let Base::Buffer(b) = view.base {
            last[b] = usize::MAX;
        }
    }
    let mut to: Vec<Option<usize>> = vec![None; sizes.len()];
    let mut slots: Vec<(usize, usize)> = Vec::new(); // size, last use of the present owner
    for (i, node) in nodes.iter_mut().enumerate() {
        node.work.each_buffer(&mut |b| {
            let slot = *to[*b].get_or_insert_with(|| {
                let free = |s: &(usize, usize)| s.1 < i;
                let best = (0..slots.len())
                    .filter(|&s| free(&slots[s]))
                    .min_by_key(|&s| slots[s].0.abs_diff(sizes[*b]));
                let slot = best.unwrap_or_else(|| {
                    slots.push((0, 0));
                    slots.len() - 1
                });
                slots[slot] = (slots[slot].0.max(sizes[*b]), last[*b]);
                slot
            });
            *b = slot;
        });
        node.round.iter_mut().for_each(|(b, _)| *b = to[*b].unwrap_or(0));
    }
    for (_, view) in results.iter_mut() {
        if let Base::Buffer(b) = &mut view.base {
            *b = to[*b].unwrap_or(0);
        }
    }
    slots.into_iter().map(|s| s.0).collect()
}

impl NodeKind {
    /// Calls `f` with every buffer that the node reads or writes.
    pub(super) fn each_buffer(&mut self, f: &mut dyn FnMut(&mut usize)) {
        fn base(b: &mut Base, f: &mut dyn FnMut(&mut usize)) {
            if let Base::Buffer(b) = b {
                f(b);
            }
        }
        match self {
            NodeKind::MatMuls { fills, items } => {
                fills.iter_mut().for_each(|x| base(&mut x.x.base, f));
                for i in items {
                    f(&mut i.out);
                    i.bias.iter_mut().for_each(|b| base(b, f));
                }
            }
            NodeKind::Update { new, keep, place, tail, .. } => {
                [new, keep, place].into_iter().chain(tail).for_each(|v| base(&mut v.base, f));
            }
            NodeKind::WriteState { x, .. } => base(x, f),
            NodeKind::Op(call) => {
                for operand in call.inputs.iter_mut().map(|(_, o)| o).chain(&mut call.values) {
                    match operand {
                        OpOperand::Whole(b) | OpOperand::Copied { x: b, .. } => base(b, f),
                    }
                }
            }
            NodeKind::Compute(work, out) => {
                work.each_base(&mut |b| base(b, f));
                f(out);
            }
        }
    }
}

impl Computation {
    /// Calls `f` with everything that the computation reads.
    fn each_base(&mut self, f: &mut dyn FnMut(&mut Base)) {
        match self {
            Computation::Conv { x, bias, then, .. } => {
                let pairs = then
                    .iter_mut()
                    .filter_map(|t| if let Then::Pair { with, .. } = t { Some(with) } else { None });
                [&mut x.base].into_iter().chain(bias).chain(pairs).for_each(f);
            }
            Computation::Pool { x, .. } => f(&mut x.base),
            Computation::Gated { gate, up, .. } => [gate, up].into_iter().for_each(f),
            Computation::Norm { x, weight, .. } => [x].into_iter().chain(weight).for_each(f),
            Computation::Rotate { x, cos, sin, .. } => [x, cos, sin].into_iter().for_each(f),
            Computation::Attention { q, k, v, mask, .. } => {
                [&mut q.0, &mut k.base, &mut v.base, &mut mask.0.base].into_iter().for_each(f);
            }
            Computation::Experts(e) => {
                f(&mut e.x.base);
                e.branches.iter_mut().for_each(|b| f(&mut b.weight.base));
            }
            Computation::Binary { x, y, .. } | Computation::MatMul { x, y, .. } => {
                [x, y].into_iter().for_each(f);
            }
            Computation::Unary { x, .. }
            | Computation::Copy { x, .. }
            | Computation::Softmax { x, .. }
            | Computation::Reduce { x, .. } => f(x),
        }
    }
}
