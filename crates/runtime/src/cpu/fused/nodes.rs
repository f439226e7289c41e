//! Nodes of a plan, with the values that they read and write.

use super::super::convolution::Convolution;
use super::super::ops::{BinaryLoops, OpFunction, Reduce, ReductionLoops, UnaryFunction};
use super::super::strided::StridedLoops;
use super::super::weights::StoredWeight;
use super::experts::Experts;
use super::view::{Base, View};
use anemoe_kernels::{ActivationFunction, AttentionShape, GateFunction, HeadStrides, RmsNorm, Window};
use anemoe_mlpackage::mil::TensorType;
use std::sync::Arc;

/// A product with a weight, one of a node.
pub(super) struct Item {
    pub weight: Arc<StoredWeight>,
    pub packed: usize,
    pub out: usize,
    pub bias: Option<Base>,
}

/// Packing of activations: the index of the packed activations, and the view that is packed.
pub(super) struct Fill {
    pub packed: usize,
    pub x: View,
    pub tokens: usize,
    pub channels: usize,
    /// Strides of tokens and channels.
    pub strides: (usize, usize),
}

pub(super) enum NodeKind {
    Products {
        fills: Vec<Fill>,
        items: Vec<Item>,
    },
    Conv {
        conv: Arc<Convolution>,
        window: Window,
        x: View,
        bias: Option<Base>,
        out: usize,
    },
    Gated {
        rows: StridedLoops<3>,
        n: usize,
        gate: Base,
        up: Base,
        function: GateFunction,
        out: usize,
    },
    Norm {
        rows: StridedLoops<2>,
        n: usize,
        x: Base,
        weight: Option<Base>,
        norm: RmsNorm,
        out: usize,
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
        out: usize,
    },
    Attention {
        shape: AttentionShape,
        q: (Base, HeadStrides),
        k: View,
        v: View,
        mask: (View, usize),
        /// A score for each head that has no value.
        sinks: Option<Vec<f32>>,
        out: (usize, HeadStrides),
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
    Experts(Box<Experts>),
    Binary {
        f: BinaryLoops,
        loops: StridedLoops<3>,
        x: Base,
        y: Base,
        out: usize,
    },
    Unary {
        f: UnaryFunction,
        loops: StridedLoops<2>,
        x: Base,
        out: usize,
    },
    Activate {
        loops: StridedLoops<2>,
        x: Base,
        kind: ActivationFunction,
        out: usize,
        /// Number of elements.
        n: usize,
    },
    Copy {
        loops: StridedLoops<2>,
        x: Base,
        out: usize,
        /// Value that fills `out` before the copy, and the number of elements of `out`.
        fill: Option<(f32, usize)>,
    },
    Softmax {
        rows: StridedLoops<2>,
        n: usize,
        step: usize,
        x: Base,
        out: usize,
    },
    Reduce {
        f: Reduce,
        loops: ReductionLoops,
        x: Base,
        out: usize,
    },
    MatMul {
        rows: StridedLoops<3>,
        sizes: (usize, usize),
        strides: (usize, usize, usize),
        x: Base,
        y: Base,
        out: usize,
    },
    WriteState {
        state: usize,
        loops: StridedLoops<2>,
        x: Base,
    },
    Kernel(Box<KernelCall>),
}

/// A call of a kernel of the op library on dense tensors.
pub(super) struct KernelCall {
    pub kernel: OpFunction,
    pub op_type: String,
    /// Operands by parameter; views that are no dense tensors are copied first.
    pub inputs: Vec<(String, KernelOperand)>,
    pub values: Vec<KernelOperand>,
    pub outputs: Vec<usize>,
    pub types: Vec<TensorType>,
}

pub(super) enum KernelOperand {
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
