//! Nodes of a plan, with the values that they read and write.

use super::super::convolution::Convolution;
use super::super::ops::{BinaryLoops, ElementFunction, OpFunction, Reduce, ReductionLoops};
use super::super::strided::StridedLoops;
use super::super::weights::StoredWeight;
use super::experts::Experts;
use super::inputs::NodeInputs;
use super::view::{Base, View};
use anemoe_kernels::{
    AttentionShape, GateFunction, HeadStrides, Layout, PairFunction, PoolFunction, RmsNorm, Window,
    apply_pair, round_to_f16,
};
use anemoe_mlpackage::mil::TensorType;
use std::sync::Arc;

/// A matmul with a weight, one of a node.
pub(super) struct Item {
    pub weight: Arc<StoredWeight>,
    pub packed: usize,
    pub out: usize,
    pub bias: Option<Base>,
}

/// Packing of activations: the index of the packed activations, and the view that is packed.
pub(super) struct Fill {
    pub packed: usize,
    /// Layout in which the node's matmuls read them.
    pub layout: Layout,
    pub x: View,
    pub tokens: usize,
    pub channels: usize,
    /// Strides of tokens and channels.
    pub strides: (usize, usize),
}

/// An operation on results of a convolution, in place.
pub(super) enum Then {
    /// Rounds to fp16.
    Round,
    Map(ElementFunction),
    Pair {
        f: PairFunction,
        with: Base,
        offset: usize,
        /// One element for each channel, not for each result.
        by_channel: bool,
    },
}

impl Then {
    /// Changes results, the first of which is result `at` of a convolution with `rows` channels. They are whole channels of
    /// several positions, or some channels of one.
    pub fn apply(&self, sources: &NodeInputs<'_>, rows: usize, at: usize, y: &mut [f32]) {
        match self {
            Then::Round => round_to_f16(y),
            Then::Map(f) => f.apply(y),
            Then::Pair { f, with, offset, by_channel } => {
                let other = &sources.get(*with)[*offset..];
                if *by_channel {
                    let first = at % rows.max(1);
                    y.chunks_mut(rows.max(1)).for_each(|y| apply_pair(y, &other[first..], *f));
                } else {
                    apply_pair(y, &other[at..], *f);
                }
            }
        }
    }
}

pub(super) enum NodeKind {
    MatMuls {
        fills: Vec<Fill>,
        items: Vec<Item>,
    },
    Update {
        state: usize,
        new: View,
        keep: View,
        place: View,
        tail: Option<View>,
        /// Rows of the state before the tail; the update may cover only the first of these rows.
        slots: usize,
        /// True if the same slots change as in the update before.
        as_before: bool,
    },
    WriteState {
        state: usize,
        loops: StridedLoops<2>,
        x: Base,
    },
    Op(Box<OpCall>),
    /// Computes a buffer.
    Compute(Computation, usize),
}

/// Computation of one buffer.
pub(super) enum Computation {
    Conv {
        conv: Arc<Convolution>,
        window: Window,
        x: View,
        bias: Option<Base>,
        /// Operations on the results, block by block.
        then: Vec<Then>,
    },
    /// A pool of an image with channels last.
    Pool {
        function: PoolFunction,
        window: Window,
        counts: [Vec<usize>; 3],
        x: View,
    },
    Gated {
        rows: StridedLoops<3>,
        n: usize,
        gate: Base,
        up: Base,
        function: GateFunction,
    },
    Norm {
        rows: StridedLoops<2>,
        n: usize,
        x: Base,
        weight: Option<Base>,
        norm: RmsNorm,
    },
    Rotate {
        rows: StridedLoops<4>,
        half: usize,
        n: usize,
        x: Base,
        cos: Base,
        sin: Base,
        /// Factor of the result.
        factor: f32,
    },
    Attention {
        shape: AttentionShape,
        q: (Base, HeadStrides),
        k: View,
        v: View,
        mask: (View, usize),
        /// A score for each head that has no value.
        sinks: Option<Vec<f32>>,
        out: HeadStrides,
    },
    Experts(Box<Experts>),
    Binary {
        f: BinaryLoops,
        loops: StridedLoops<3>,
        x: Base,
        y: Base,
    },
    Unary {
        f: ElementFunction,
        loops: StridedLoops<2>,
        x: Base,
        /// Number of elements.
        n: usize,
    },
    Copy {
        loops: StridedLoops<2>,
        x: Base,
        /// Value that fills `out` before the copy, and the number of elements of `out`.
        fill: Option<(f32, usize)>,
    },
    Softmax {
        rows: StridedLoops<2>,
        n: usize,
        step: usize,
        x: Base,
    },
    Reduce {
        f: Reduce,
        loops: ReductionLoops,
        x: Base,
    },
    /// Products of matrices `[m, k]` and `[k, n]`.
    MatMul {
        /// First element of each product's matrices: of the result, of x and of y.
        places: Vec<[usize; 3]>,
        /// Sizes m, k and n.
        sizes: [usize; 3],
        x_stride: usize,
        /// Strides of y's rows and columns.
        y_strides: [usize; 2],
        x: Base,
        y: Base,
    },
}

impl NodeKind {
    /// Tells whether the node writes a buffer.
    pub fn writes(&self, buffer: usize) -> bool {
        match self {
            NodeKind::MatMuls { items, .. } => items.iter().any(|item| item.out == buffer),
            NodeKind::Compute(_, out) => *out == buffer,
            NodeKind::Update { .. } | NodeKind::WriteState { .. } | NodeKind::Op(_) => false,
        }
    }
}

/// A call of a function of the op library on dense tensors.
pub(super) struct OpCall {
    pub function: OpFunction,
    pub op_type: String,
    /// Operands by parameter; views that are no dense tensors are copied first.
    pub inputs: Vec<(String, OpOperand)>,
    pub values: Vec<OpOperand>,
    pub outputs: Vec<usize>,
    pub types: Vec<TensorType>,
}

pub(super) enum OpOperand {
    Whole(Base),
    /// A view that is no dense tensor, and the index of the arena's tensor that it is copied to.
    Copied {
        loops: StridedLoops<2>,
        x: Base,
        shape: Vec<usize>,
        copy: usize,
    },
}

pub(super) struct Node {
    pub work: NodeKind,
    /// Buffers that are rounded to fp16 after the node, each with its number of elements.
    pub round: Vec<(usize, usize)>,
    /// Type of the operation that the node computes, or of the last one, for errors and times.
    pub op_type: String,
    pub name: String,
}
